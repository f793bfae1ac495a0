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
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.support.cases import open_engine, saved_model
from tests.support.pool import run
from tests.support.rl_samples import algorithm
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy, Loss
from weft.engine.losses.policy import PolicyLoss
from weft.engine.losses.value import ValueLoss
from weft.engine.optim.adamw import FusedAdamW
from weft.engine.score_head import ScoreSpec
from weft.launch.consistency import max_over_ranks
from weft.launch.process import world_group
from weft.launch.simulated import read
from weft.parallel.mesh import local_shard
from weft.verify.documents import awkward_steps

# Where the host reads what the device has computed, in a step of whatever kind, and how often: with AdamW on an
# accelerator, metrics and norm together, once the update is queued.
READS_ONCE = {"engine/engine.py Engine._update_and_read": 1}
READS = {
    "engine/engine.py Engine.accumulate": 1,  # the metrics, and whether the loss is finite: after all micro-batches
    "engine/optim/optimizer.py global_norm": 1,  # the norm: it is reported, and says whether and by how much to clip
}
# On numbers that are on the host wherever the parameters are, or where these are on the host.
ON_THE_HOST = {
    "torch/optim/adam.py",  # step counters of an AdamW that is not fused
    "engine/optim/block_step.py exact_root",  # by numpy, of parameters on the host
}

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
    """As in `engine/optim/optimizer.py global_norm`: the innermost frame outside of torch's own core, below weft."""
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
    batch = []
    for ids, mask in awkward_steps(128)[0]:
        values = {name: torch.linspace(-1.0, 1.0, len(ids)) for name in arrays}
        batch.append(Document(torch.tensor(ids), torch.tensor(mask, dtype=torch.float32), arrays=values))
    return batch


def reads_of_a_step(
    path: str, objective: Loss, arrays: tuple[str, ...], options: dict[str, Any], device: str
) -> Counter[str]:
    """Of a step of several micro-batches, rows apart, its metrics and its update, after one to warm up. device: the one
    that the update is queued for."""
    engine: Engine = open_engine(path, "2", **options)
    engine.reads_once = device == "cuda" and isinstance(engine.optimizer, FusedAdamW)
    plan, local = engine.plan_step(documents_with(arrays))
    assert plan.micro_batches >= 2
    for reading in (None, Reading()):
        rows = engine.rows(plan, local, objective).ahead()
        if reading is None:
            engine.step(plan, rows, objective, 1e-3)
        else:
            with reading.everything():
                metrics, result = engine.step(plan, rows, objective, 1e-3)
            assert metrics and not result.skipped
    assert reading is not None
    return reading.places


SMALL = {"step": {"max_tokens_per_device": 64}}
CLIPS = {"optimizer": {"max_grad_norm": 1e-3, "ema_decay": 0.9}, **SMALL}
GRPO = ("old_logprobs", "advantages", "correction", "ref_logprobs")
CASES: dict[str, tuple[str, Loss, tuple[str, ...], dict[str, Any]]] = {
    "sft": ("llama", CrossEntropy(), (), SMALL),
    "sft, clipped, averaged, bf16": ("llama", CrossEntropy(), (), {**CLIPS, "fsdp": {"param_dtype": "bf16"}}),
    "sft, sgd": ("llama", CrossEntropy(), (), {**SMALL, "optimizer": {"name": "sgd"}}),
    "sft, recompute": ("llama", CrossEntropy(), (), {**SMALL, "model": {"recompute": "full"}}),
    "sft, small states": ("llama", CrossEntropy(), (), {**SMALL, "optimizer": {"state_dtype": "bf16"}}),
    "sft, adapters": ("llama", CrossEntropy(), (), {**SMALL, "lora": {"rank": 4}}),
    "experts": ("qwen3_moe", CrossEntropy(), (), {**SMALL, "model": {"router_aux_loss": "document"}}),
    "experts, balanced by step": ("qwen3_moe", CrossEntropy(), (), {**SMALL, "model": {"router_aux_loss": "step"}}),
    "policy": ("llama", PolicyLoss(algorithm("grpo", kl_coef=0.1, entropy_coef=0.01)), GRPO, SMALL),
    "gspo": ("llama", PolicyLoss(algorithm("grpo", policy_loss="gspo", loss_aggregation="sequence_mean")), GRPO, SMALL),
    "policy that is its own old one": (
        "llama", PolicyLoss(algorithm("grpo", correction="mis", correction_level="sequence"), old_is_current=True),
        ("advantages", "rollout_logprobs"), SMALL,
    ),
    "critic": ("llama", ValueLoss(), ("returns", "values"), {**SMALL, "score": ScoreSpec(first="normal")}),
}  # fmt: skip


ON_CPU = ("sft, clipped, averaged, bf16", "policy")  # elsewhere the update follows the reads


@pytest.mark.parametrize(("case", "device"), [*((c, "cuda") for c in CASES), *((c, "cpu") for c in ON_CPU)])
def test_what_a_step_reads_back(case: str, device: str) -> None:
    family, objective, arrays, options = CASES[case]
    fused = options.get("optimizer", {}).get("name") != "sgd" and "state_dtype" not in options.get("optimizer", {})
    for places in run(2, reads_of_a_step, saved_model(family), objective, arrays, options, device):
        device_reads = {line: count for line, count in places.items() if line not in ON_THE_HOST}
        assert device_reads == (READS_ONCE if device == "cuda" and fused else READS)


class Spoilt(CrossEntropy):
    """Loss or gradient is not finite in the second step."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.what, self.steps = fault, 0

    def logprob_grad(self, weights_N: torch.Tensor) -> torch.Tensor | None:
        return None

    def __call__(self, batch: Any) -> Any:
        terms, self.steps = super().__call__(batch), self.steps + 1
        if self.steps == 3 and self.what == "loss":
            terms.loss_sum.mul_(float("nan"))
        if self.steps == 3 and self.what == "gradient":
            terms.loss_sum.register_hook(lambda gradient: gradient * float("inf"))
        return terms


def training(path: str, reads_once: bool, spoilt: str, norm: float) -> tuple[list[Any], list[torch.Tensor]]:
    """(Metrics and results of three steps; weights, state and average afterwards)."""
    engine = open_engine(path, "2", **SMALL, optimizer={"max_grad_norm": norm, "ema_decay": 0.9})
    engine.reads_once = reads_once
    objective, results = Spoilt(spoilt), list[Any]()
    for _ in range(3):
        plan, local = engine.plan_step(documents_with(()))
        metrics, result = engine.step(plan, local, objective, 1e-3)
        results.append((metrics, result.grad_norm, result.skipped, result.reason))
    assert engine.optimizer is not None and engine.ema is not None
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    state_copies = [
        local_shard(t.detach()).clone() for t in [*engine.module.parameters(), *state, *engine.ema.shards.values()]
    ]
    return results, state_copies


@pytest.mark.parametrize("spoilt", ["nothing", "loss", "gradient"])
def test_one_read_changes_nothing(spoilt: str) -> None:
    """Steps whose loss or gradient is not finite are skipped and reported in the same words."""
    for norm, tolerance in ((1e6, 0.0), (0.05, 1e-5)):
        for plain, single in zip(
            run(2, training, saved_model("llama"), False, spoilt, norm),
            run(2, training, saved_model("llama"), True, spoilt, norm), strict=True,
        ):  # fmt: skip
            assert [skipped for _, _, skipped, _ in single[0]].count(True) == (spoilt != "nothing")
            for (metrics, size, skipped, reason), expected in zip(single[0], plain[0], strict=True):
                assert (skipped, reason) == expected[2:]
                assert str(size) == str(expected[1]) or size == pytest.approx(expected[1], rel=1e-4)
                assert metrics.keys() == expected[0].keys()
                assert str(metrics["loss"]) == str(expected[0]["loss"]) or tolerance
            for actual, reference in zip(single[1], plain[1], strict=True):
                torch.testing.assert_close(actual, reference, rtol=tolerance, atol=tolerance)


def largest_rank() -> list[float]:
    """A meta tensor has no values that could be reduced."""
    return max_over_ranks([float(dist.get_rank()), 2.5], world_group(), torch.device("meta"))


def test_ranks_agree_on_the_host() -> None:
    assert run(2, largest_rank) == [[1.0, 2.5]] * 2
