# docker build --target cpu  -t weft:cpu .
# docker build --target cuda -t weft:cuda .    torch's own wheels bring CUDA; the host needs a driver only
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
# A compiler, for model.compile and the kernels that triton makes.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/weft
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

FROM base AS cpu-torch
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0

FROM base AS cuda-torch
RUN pip install torch==2.13.0

FROM cpu-torch AS cpu
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY weft weft
RUN pip install -c constraints.txt '.[data,rl,lora,track]'
WORKDIR /work
ENTRYPOINT ["weft"]

FROM cuda-torch AS cuda
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY weft weft
RUN pip install -c constraints.txt '.[data,rl,lora,track]'
WORKDIR /work
ENTRYPOINT ["weft"]
