# docker build -t weft:cuda .    torch's own wheels bring CUDA; the host needs a driver only
# docker build -t weft:cpu --build-arg TORCH_INSTALL_ARGS="--index-url https://download.pytorch.org/whl/cpu" .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG TORCH_INSTALL_ARGS=""
# A compiler, for model.compile and the kernels that triton makes.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/weft
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# torch comes first and alone, as in the Makefile.
RUN pip install ${TORCH_INSTALL_ARGS} torch==2.13.0
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY weft weft
RUN pip install -c constraints.txt '.[data,vision,video,rl,lora,remote,track]'
WORKDIR /work
ENTRYPOINT ["weft"]
