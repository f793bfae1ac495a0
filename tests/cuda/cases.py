"""What several of the tests on a device need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.options import Device
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

STEPS = awkward_steps(128)
FP32: dict[str, dict[str, Any]] = {"fsdp": {"param_dtype": "fp32"}}
BF16: dict[str, dict[str, Any]] = {"fsdp": {"param_dtype": "bf16"}}


def kind(device: torch.device) -> Device:
    """As weft's commands name it."""
    return "cuda" if device.type == "cuda" else "cpu"


def gradient(engine: Engine, number: int) -> float:
    """Add the gradient of one of STEPS; its loss."""
    documents, metas = to_documents(engine, STEPS[number])
    metrics = engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    assert metrics["loss"] is not None
    return metrics["loss"]


@contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Products that run for a good part of a second, on a stream of their own and on the one in use: a copy that nobody
    waits for is not done when the body goes on."""
    if device.type != "cuda":
        yield
        return
    matrix = torch.randn(4096, 4096, device=device) / 64
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _multiply(matrix, 100)
    _multiply(matrix, 50)
    yield
    stream.synchronize()


def _multiply(matrix: Tensor, times: int) -> None:
    product = matrix
    for _ in range(times):
        product = product @ matrix
