"""These tests run in an environment of their own (`make test-vllm`); the suite, which has no vLLM, skips the folder."""

import importlib.util
import os

import pytest

# In this process, without compilation (the sampler would be compiled even where the model is not), on one thread.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(SETTINGS)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore::FutureWarning:vllm.*")
