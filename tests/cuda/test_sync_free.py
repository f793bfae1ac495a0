"""A whole step waits for its device where tests/engine/test_device_reads.py says so, and nowhere else: torch counts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_device_reads import READS, READS_ONCE
from tests.support.cases import saved_model
from weft.config.schema import ModelConfig, OptimizerConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.batch.rows import build_row
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.process import Ranks
from weft.ops.head import _scale_
from weft.verify.documents import awkward_steps


def documents() -> list[Document]:
    steps = awkward_steps(128)[0]
    return [Document(torch.tensor(ids), torch.tensor(mask, dtype=torch.float32)) for ids, mask in steps]


@pytest.mark.parametrize(
    ("family", "model", "optimizer", "reads"),
    [
        ("llama", {}, {}, READS_ONCE),
        ("llama", {"recompute": "full"}, {"max_grad_norm": 1e-3, "ema_decay": 0.9}, READS_ONCE),
        ("llama", {}, {"name": "sgd"}, READS),
        ("qwen3_moe", {"router_aux_loss": "document"}, {}, READS_ONCE),
    ],
)
def test_a_step_waits_where_it_reads(
    family: str, model: dict[str, Any], optimizer: dict[str, Any], reads: dict[str, int], device: torch.device,
    ranks: Ranks,
) -> None:  # fmt: skip
    """On the CPU nothing waits; that the step runs is all that is seen there."""
    config = EngineConfig(
        model=ModelConfig(path=saved_model(family), **model),
        step=StepConfig(max_tokens_per_device=64),
        optimizer=OptimizerConfig(**optimizer),
    )
    engine = Engine(config, ranks)
    for last in (False, False, True):
        plan, local = engine.plan_step(documents())
        assert plan.micro_batches >= 2
        rows = engine.rows(plan, local, CrossEntropy()).ahead()
        with warnings.catch_warnings(record=True) as caught, waits_noted(device, last):
            warnings.simplefilter("always")
            metrics, result = engine.step(plan, rows, CrossEntropy(), 1e-3)
        assert metrics["loss"] is not None and not result.skipped
    waited = [(Path(w.filename).name, w.lineno) for w in caught if "synchronizing CUDA operation" in str(w.message)]
    # torch names the line that called it, which is simulated.read's, whoever called that.
    assert [name for name, _ in waited] == ["simulated.py"] * (sum(reads.values()) if device.type == "cuda" else 0)


@contextmanager
def waits_noted(device: torch.device, warn: bool) -> Iterator[None]:
    """Inside, torch warns of what waits for the device, if wanted."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn" if warn else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_pinned_row_arrives_as_it_was(layout: Any, device: torch.device) -> None:
    by_index = dict(enumerate(documents()))
    read = [max(1, len(document) - 1) for document in by_index.values()]
    length = sum(read) + 3 if layout == "packed" else max(read)
    row = build_row(list(by_index), by_index, read=read, length=length, layout=layout, every_token=False, owners=True)
    on_device = (row.pinned() if device.type == "cuda" else row).to(device)
    for name, value in vars(row).items():
        if isinstance(value, torch.Tensor):
            assert getattr(on_device, name).device == device and torch.equal(getattr(on_device, name).cpu(), value), (
                name
            )
    assert on_device.bounds.lengths == row.bounds.lengths and on_device.bounds.padded == row.bounds.padded
    if layout == "packed" and device.type == "cuda":
        assert on_device.bounds.cu_seqlens is not None and int(on_device.bounds.cu_seqlens[-1]) == length
    assert (
        build_row([], {}, read=[], length=8, layout=layout, every_token=False).to(device).arrays["any"].device == device
    )


def test_a_narrow_gradient_is_scaled_by_the_factor_itself(device: torch.device) -> None:
    """A product with a scalar tensor would round the factor to bf16 first: an error of up to 0.4% in all of it."""
    values = torch.randn(3000, 257, device=device).bfloat16()
    factor = torch.tensor(1 / 257.3, dtype=torch.float64, device=device)
    expected = (values.float() * float(factor)).bfloat16()
    _scale_(values, factor)
    assert torch.equal(values, expected)
