# Each target sets itself up in .venv; `make demo` and `make test` are all one needs.
# Another torch build: make demo TORCH_INSTALL_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH_INSTALL_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
COMPAT := 5.17
COMPAT_DIR := .compat/transformers-$(COMPAT)
ORACLE := 5.23
ORACLE_DIR := .compat/transformers-$(ORACLE)
VLLM_BIN := .venv-vllm/bin
TRL_BIN := .venv-trl/bin
# torch-transformers-Python: the ends of the ranges of pyproject.toml.
VERSIONS := 2.11-5.17-3.12 2.15-5.23-3.13
GPU_OUT ?= .gpu
MINUTES ?= 9

# Where it is set, each of the suite's hundreds of processes compiles weft anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-distill demo-sft demo-dpo demo-reward demo-vision unit test nightly lint types suite seams mutants faults mistakes support verify-all test-soak test-install test-compat test-oracle test-versions test-vllm test-trl bench bench-sft bench-reward bench-images bench-dpo bench-rl gpu docs site format clean

setup: $(STAMP)

# torch comes first and alone: resolved together with the rest it may be replaced by another build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weft needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH_INSTALL_ARGS) torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --config-settings editable_mode=compat -e '.[dev]'
	touch $@

# A warm start by fine-tuning, then reinforcement learning from rewards alone.
demo: $(STAMP)
	$(BIN)/python examples/make_arithmetic_demo.py
	rm -rf .demo/warm .demo/rl
	$(BIN)/weft sft examples/sft_arithmetic_cpu.yaml --nproc 2
	$(BIN)/weft rl examples/rl_arithmetic_cpu.yaml --nproc 2
	$(BIN)/python examples/ask_arithmetic_demo.py

demo-sft: $(STAMP)
	$(BIN)/python examples/make_chat_demo.py
	rm -rf .demo/run
	$(BIN)/weft sft examples/sft_chat_cpu.yaml --nproc 2
	$(BIN)/python examples/ask_chat_demo.py

# A student of 2 layers learns the distributions of a teacher of 4; the first and last `eval` lines have the agreement.
demo-distill: $(STAMP)
	$(BIN)/python examples/make_distill_demo.py
	rm -rf .demo/warm .demo/distilled .demo/teacher_cache
	$(BIN)/weft sft examples/sft_arithmetic_cpu.yaml --nproc 2
	$(BIN)/weft distill examples/distill_arithmetic_cpu.yaml --nproc 2

# A model is taught letters of two styles, a reward model prefers one of them, and the policy comes to write it.
demo-dpo: $(STAMP)
	$(BIN)/python examples/make_style_demo.py
	$(BIN)/weft sft examples/sft_style_cpu.yaml
	$(BIN)/weft dpo examples/dpo_style_cpu.yaml

demo-reward: $(STAMP)
	$(BIN)/python examples/make_style_demo.py
	$(BIN)/weft sft examples/sft_style_cpu.yaml
	$(BIN)/weft reward examples/reward_style_cpu.yaml
	$(BIN)/weft rl examples/rl_style_cpu.yaml

# A vision model learns to name drawings of shapes.
demo-vision: $(STAMP)
	$(BIN)/python examples/make_shapes_demo.py
	$(BIN)/weft sft examples/sft_shapes_cpu.yaml --nproc 2
	$(BIN)/python examples/ask_shapes_demo.py

# The tests that start no process, in a minute: tests/support/lanes.py reads in the code which they are.
unit: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "unit and not slow and not soak and not table" $(PYTEST_ARGS) \
		$$($(BIN)/python -m tests.support.lanes)

# What takes hours: all families on all meshes, mutants, kills of a real Ray and damage at random, other versions.
nightly: $(STAMP)
	$(MAKE) verify-all
	$(MAKE) mutants
	$(MAKE) test-soak
	$(MAKE) test-versions

# Two at a time: types are one process, and much of the suite waits.
test: $(STAMP)
	$(MAKE) -j2 lint types suite test-compat

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy weft

# Short private functions with one caller, small files, names that occur twice: lists to judge by, which nobody has to obey.
seams: $(STAMP)
	$(BIN)/python -m tests.support.seams

# Two at a time: much of the suite waits (for time limits, for ranks to start), and one file's ranks are one worker's.
# Status 1: tests failed. Up to three of them run once more, alone, and are named if they pass.
suite: $(STAMP)
	rm -f .pytest_cache/v/cache/lastfailed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) || \
		{ test $$? -eq 1 && $(BIN)/python -m tests.support.again; }

# Some 350 small bugs, and 150 that are drawn, each planted into a copy of weft: do its tests see it? WORDS=... takes those whose names hold one.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants.run --workers $(WORKERS) $(WORDS)

# What dies or breaks, and when: every case is run (half an hour), and docs/reference/failures.md says what came
# of it. WORDS=... runs those whose names hold one of these words, or, with `missing`, that have no row; the other rows stay.
faults: $(STAMP)
	$(BIN)/python -m tests.support.fault_matrix $(WORDS)

# What people get wrong, each with what its message proposes (five minutes); the table is in docs/reference/failures.md.
mistakes: $(STAMP)
	$(BIN)/python -m tests.support.mistakes

# Which families train on which axes of the mesh (ten minutes); docs/reference/support.md. WORDS=... are families.
support: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.support_table $(WORDS)

# What takes long: actors of weft rl that are stopped or killed on a real Ray; 20,000 damaged files for each reader.
test-soak: $(STAMP)
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

# The pages that a newcomer follows, in an environment that has what they install and nothing else.
test-install: .venv-install/.installed
	.venv-install/bin/python -m pytest -p no:cacheprovider tests/project/test_docs.py -k 'commands and (tutorial or lora or resume)'

.venv-install/.installed: pyproject.toml constraints.txt docs/tutorial.md
	rm -rf .venv-install
	$(PYTHON) -m venv .venv-install
	.venv-install/bin/python -m pip install --quiet $(TORCH_INSTALL_ARGS) torch==2.13.0
	.venv-install/bin/python -m pip install --quiet "$$(sed -n "s/^pip install .*'\(.*\)'$$/\1/p" docs/tutorial.md)" \
		-c constraints.txt
	.venv-install/bin/python -m pip install --quiet pytest pytest-timeout pytest-xdist
	touch $@

# Families x mixes of axes on up to eight ranks (twenty minutes); docs/reference/mixes.md. WORDS=... are mixes.
verify-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.mixes_table $(WORDS)
	$(BIN)/python -m pytest -m table $(PYTEST_ARGS)

# The oldest supported transformers beside the installed one, and what it needs that the newest does without.
test-compat: $(STAMP) $(COMPAT_DIR)/.installed
	WEFT_COMPAT=$(COMPAT) PYTHONPATH=$(COMPAT_DIR) $(BIN)/python -m pytest -m compat $(PYTEST_ARGS)

# Gradients with tensor parallelism against those of a transformers that divides models by itself, in processes of its own.
test-oracle: $(STAMP) $(ORACLE_DIR)/.installed
	WEFT_ORACLE=$(CURDIR)/$(ORACLE_DIR) $(BIN)/python -m pytest -m oracle tests/parity/test_oracle.py $(PYTEST_ARGS)

.compat/transformers-%/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --target $(@D) --no-deps \
		'transformers==$*.*' 'huggingface-hub>=1.31,<2' httpx httpcore certifi
	touch $@

# The ends of the ranges, in environments of several GB each: never in CI. Writes docs/reference/versions.md.
test-versions: $(STAMP) $(VERSIONS:%=.venv-versions/%/.installed)
	$(BIN)/python tests/support/versions.py $(VERSIONS:%=.venv-versions/%/bin/python) --workers $(WORKERS) \
		--pytest-args='$(PYTEST_ARGS)'

# That Python where there is one, else the usual.
.venv-versions/%/.installed: pyproject.toml
	own=python$(word 3,$(subst -, ,$*)); $$own -c '' 2>/dev/null || own=$(PYTHON); \
		test -x .venv-versions/$*/bin/python || $$own -m venv .venv-versions/$*
	.venv-versions/$*/bin/python -m pip install --quiet 'torch==$(word 1,$(subst -, ,$*)).*'
	.venv-versions/$*/bin/python -m pip install --quiet 'transformers==$(word 2,$(subst -, ,$*)).*' -e '.[dev]'
	touch $@

# vLLM has an environment of its own.
test-vllm: $(STAMP) .venv-vllm/.installed
	$(VLLM_BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)

.venv-vllm/.installed: weft/inference/vllm/interpreter.py | $(STAMP)
	$(BIN)/weft engine install vllm --python .venv-vllm --device cpu --torch "$(TORCH_INSTALL_ARGS)"
	$(VLLM_BIN)/python -m pip install --quiet pytest pytest-timeout
	touch $@

test-trl: $(STAMP) .venv-trl/.installed
	$(TRL_BIN)/python -m pytest tests/trl $(PYTEST_ARGS)

bench: $(STAMP) bench-sft
	$(BIN)/python benchmarks/head.py

bench-sft: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/sft.py

bench-reward: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/reward.py

bench-images: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/images.py

bench-dpo: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/dpo.py

bench-rl: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/rl.py

# Everything there is to measure on one GPU, in so many minutes; the page of the docs is what came of it. Not in an
# environment that is made for it: images for GPUs bring a torch that suits them, so without a .venv python3 is taken as it is.
gpu:
	python=$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)); \
	$$python benchmarks/gpu.py --minutes $(MINUTES) --out $(GPU_OUT); status=$$?; \
	test ! -e $(GPU_OUT)/gpu.md || cp $(GPU_OUT)/gpu.md docs/benchmarks/gpu.md; \
	test ! -d $(GPU_OUT)/measured || cp $(GPU_OUT)/measured/*.json weft/recipes/plan/measured/; exit $$status

# TRL has an environment of its own, with the transformers of ours: the comparison is of trainers.
.venv-trl/.installed: | $(STAMP)
	test -x $(TRL_BIN)/python || $(PYTHON) -m venv .venv-trl
	$(TRL_BIN)/python -m pip install --quiet $(TORCH_INSTALL_ARGS) torch==2.13.0
	$(TRL_BIN)/python -m pip install --quiet 'trl==1.16.*' pillow || $(TRL_BIN)/python -m pip install --quiet trl pillow
	$(TRL_BIN)/python -m pip install --quiet pytest pytest-timeout
	$(TRL_BIN)/python -m pip install --quiet "transformers==$$($(BIN)/python -c 'import transformers as t; print(t.__version__)')"
	touch $@

docs: $(STAMP)
	$(BIN)/python -m weft.config.reference > docs/reference/config.md
	$(BIN)/python -m weft.rl.algorithms.tables docs/reference/algorithms.md
	$(BIN)/python -m weft.config.migrate.pages docs/coming-from

# The pages of docs/ as a site in .site, in an environment of its own. A link that leads nowhere is an error.
site: .venv-site/.installed
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build

.venv-site/.installed:
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet 'mkdocs>=1.6,<2' 'mkdocs-material>=9.7,<10'
	touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-site .site .venv-versions .venv-vllm .venv-trl .compat .demo .gpu .mypy_cache .ruff_cache .pytest_cache *.egg-info build dist
