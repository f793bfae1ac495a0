"""tests/cuda has no device here. Its bodies run on the CPU, so that none fails for a reason of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor import compile_fx

FILES = ("precision", "parity", "collectives", "memory", "sync_free")  # of the others the CPU takes a minute


@pytest.mark.slow
def test_the_bodies_of_tests_for_a_device_run_on_the_cpu() -> None:
    files = [f"tests/cuda/test_{name}.py" for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "not compiled"],
        cwd=Path(__file__).parents[2], env={**os.environ, "WEFT_CUDA_TESTS_DEVICE": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "no CUDA device" not in done.stdout


def test_what_torch_warns_of_on_a_device_fails_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of torch do here, and a compiled graph with a product in fp32 brings one on every card since Ampere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    torch.set_float32_matmul_precision("highest")  # torch's own default
    compile_fx._warn_tf32_disabled.__wrapped__()
    registry: dict[str, object] = {"__name__": "torch.autograd.graph"}
    cublas = "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context..."
    warnings.warn_explicit(cublas, UserWarning, "graph.py", 824, "torch.autograd.graph", registry)
    with pytest.raises(UserWarning, match="another"):
        warnings.warn_explicit("another", UserWarning, "graph.py", 824, "torch.autograd.graph", registry)
