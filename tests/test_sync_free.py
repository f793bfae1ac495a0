"""What a step reads back from its device: every place is listed here, with its reason.

On the CPU nothing waits, so operations are watched that would on an accelerator: numbers read by the host, and shapes
that depend on values. Rows are built beforehand: that is the host's own work. tests/cuda/test_sync_free.py counts real
synchronisations.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.cases import open_engine, saved_model
from tests.pool import run
from tests.rl_samples import algorithm
from weft.cluster.simulated import read
from weft.engine.document import Document
from weft.engine.engine import Engine
from weft.objectives.base import Objective
from weft.objectives.cross_entropy import CrossEntropy
from weft.objectives.policy import PolicyLoss
from weft.objectives.value import ValueLoss
from weft.verification.documents import awkward_steps

# Where the host reads what the device has computed, in a step of whatever kind, and how often.
READS = {
    "engine/metrics.py Sums.reduce": 1,  # the metrics, and whether the loss is finite: once, after all micro-batches
    "optim/optimizer.py global_norm": 1,  # the norm: it is reported, and says whether and by how much to clip
}
# In torch and transformers, on numbers that are on the host by their own choice wherever the parameters are.
ON_THE_HOST = {"torch/optim/adam.py"}  # step counters of an AdamW that is not fused

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "repeat_interleave.Tensor", "equal")
_BY_MASK = ("index.Tensor", "index_put", "_index_put_impl")
# By where the packages are imported from: a clone, or a folder above it, may be called weft or optim.
WEFT = Path(weft.__file__).parent
TORCH_OPTIM = Path(torch.optim.__file__).parent
_METHODS = ("tolist", "cpu", "numpy", "__array__")  # which are no operations of the CPU's


class Reading(TorchDispatchMode):
    """Counts what would wait for a device, by the function of weft, or the file of torch's optimizers, that called."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    @contextmanager
    def everything(self) -> Iterator[None]:
        with self, ExitStack() as patched:
            for method in _METHODS:
                watched = self._watched(getattr(torch.Tensor, method))
                patched.enter_context(mock.patch.object(torch.Tensor, method, watched))
            yield

    def _watched(self, original: Any) -> Any:
        def method(tensor: Any, *args: Any) -> Any:
            self.places[_caller()] += 1
            return original(tensor, *args)

        return method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        masks = name.startswith(_BY_MASK) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if masks or name.startswith(_READS):
            self.places[_caller()] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """As in `optim/optimizer.py global_norm`: the innermost frame outside of torch's own core, below weft."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(WEFT) and frame.f_code is not read.__code__:
            return f"{path.relative_to(WEFT)} {frame.f_code.co_qualname}"
        if path.is_relative_to(TORCH_OPTIM) and path.name != "optimizer.py":
            return "torch/optim/" + path.name
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def documents_with(arrays: tuple[str, ...]) -> list[Document]:
    made = []
    for ids, mask in awkward_steps(128)[0]:
        values = {name: torch.linspace(-1.0, 1.0, len(ids)) for name in arrays}
        made.append(Document(torch.tensor(ids), torch.tensor(mask, dtype=torch.float32), arrays=values))
    return made


def reads_of_a_step(path: str, objective: Objective, arrays: tuple[str, ...], options: dict[str, Any]) -> Counter[str]:
    """Of a step of several micro-batches, rows apart, its metrics and its update, after one to warm up."""
    engine: Engine = open_engine(path, "2", **options)
    plan, own = engine.deal(documents_with(arrays))
    assert plan.micro_batches >= 2
    for reading in (None, Reading()):
        rows = engine.rows(plan, own, objective).ahead()
        if reading is None:
            engine.accumulate(plan, rows, objective)
            engine.apply(1e-3)
        else:
            with reading.everything():
                metrics = engine.accumulate(plan, rows, objective)
                result = engine.apply(1e-3)
            assert metrics and not result.skipped
    assert reading is not None
    return reading.places


SMALL = {"step": {"max_tokens_per_device": 64}}
CLIPS = {"optimizer": {"max_grad_norm": 1e-3, "ema_decay": 0.9}, **SMALL}
GRPO = ("old_logprob", "advantage", "correction", "reference_logprob")
CASES: dict[str, tuple[str, Objective, tuple[str, ...], dict[str, Any]]] = {
    "sft": ("llama", CrossEntropy(), (), SMALL),
    "sft, clipped, averaged, bf16": ("llama", CrossEntropy(), (), {**CLIPS, "fsdp": {"param_dtype": "bf16"}}),
    "sft, sgd": ("llama", CrossEntropy(), (), {**SMALL, "optimizer": {"name": "sgd"}}),
    "sft, recompute": ("llama", CrossEntropy(), (), {**SMALL, "model": {"recompute": "full"}}),
    "sft, small states": ("llama", CrossEntropy(), (), {**SMALL, "optimizer": {"state_dtype": "bf16"}}),
    "sft, adapters": ("llama", CrossEntropy(), (), {**SMALL, "lora": {"rank": 4}}),
    "experts": ("qwen3_moe", CrossEntropy(), (), {**SMALL, "model": {"router_aux_loss": "document"}}),
    "experts, balanced by step": ("qwen3_moe", CrossEntropy(), (), {**SMALL, "model": {"router_aux_loss": "step"}}),
    "policy": ("llama", PolicyLoss(algorithm("grpo", kl=0.1, entropy=0.01)), GRPO, SMALL),
    "gspo": ("llama", PolicyLoss(algorithm("grpo", policy_loss="gspo", aggregation="sequence_mean")), GRPO, SMALL),
    "policy that is its own old one": (
        "llama", PolicyLoss(algorithm("grpo", correction="mis", correction_level="sequence"), old_is_current=True),
        ("advantage", "rollout_logprob"), SMALL,
    ),
    "critic": ("llama", ValueLoss(), ("return", "old_value"), {**SMALL, "value_head": "normal"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_reads_back(case: str) -> None:
    family, objective, arrays, options = CASES[case]
    for places in run(2, reads_of_a_step, saved_model(family), objective, arrays, options):
        own = {place: count for place, count in places.items() if place not in ON_THE_HOST}
        assert own == READS
