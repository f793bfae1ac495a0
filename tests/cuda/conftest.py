"""What the tests of a CUDA device share: `python -m pytest tests/cuda`, at most eight minutes on one H200.

WEFT_CUDA_TESTS_DEVICE=cpu runs the bodies that make sense there on the CPU, at sizes for it: it finds errors of the
tests themselves, where there is no device. Nothing here needs more than torch, transformers and what weft imports for
an SFT run of JSONL.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.launch.process import Ranks, join, leave

DEVICE = os.environ.get("WEFT_CUDA_TESTS_DEVICE", "cuda")
BUDGET = 480.0  # seconds of all tests here together
TIMEOUT = 120  # of one of them, where it does not say
HERE = Path(__file__).parent
# The cheap ones come first, so that an end by time limit has shown the most. Others come before these.
ORDER = ("test_memory", "test_collectives", "test_rollouts", "test_ipc", "test_parity", "test_precision", "test_run")
_began = 0.0

# cuBLAS reads it when it is first used; Engine sets the same for train.deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, and put it in order behind all else."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.cuda)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    if item.path.parent != HERE:
        return 0
    return 2 + ORDER.index(item.path.stem) if item.path.stem in ORDER else 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """All in one line of pytest's summary, where there is no device."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device (WEFT_CUDA_TESTS_DEVICE=cpu runs what it can on the CPU)")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the bodies run."""
    return torch.device("cuda", 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """For what has no meaning elsewhere."""
    if device.type != "cuda":
        pytest.skip("is about CUDA itself")
    return device


@pytest.fixture(scope="session")
def ranks(device: torch.device) -> Iterator[Ranks]:
    """The process group of this one rank, as weft makes it; for all tests, because NCCL takes seconds."""
    yield join("cuda" if device.type == "cuda" else "cpu")
    leave()


@pytest.fixture(autouse=True)
def _eager_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """model.compile=auto is false: its trial compiles for half a minute. Tests of compiled layers set it to true, and
    whole runs are other processes."""
    monkeypatch.setattr("weft.engine.builder.may_compile", lambda *_: False)


@pytest.fixture(autouse=True)
def _within_budget(device: torch.device) -> Iterator[None]:
    """Every test fails at once when the time of all is used up; fp32 products are fp32, as in `weft verify`."""
    global _began
    _began = _began or time.monotonic()
    if time.monotonic() - _began > BUDGET:
        pytest.fail(f"not run: the tests before it took more than {BUDGET:.0f} s", pytrace=False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()
