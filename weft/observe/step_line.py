"""The outcome of an optimizer step, and its line of metrics.jsonl, for SFT and RL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.engine.engine import StepResult
from weft.engine.step_plan.plan import StepPlan
from weft.models.flops import Throughput


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of an optimizer step. metrics: reduced over all ranks. seconds: wall time of the step."""

    plan: StepPlan
    metrics: Mapping[str, float | None]
    result: StepResult
    lr: float
    seconds: float


def step_line(
    number: int, epoch: int, outcome: StepOutcome, throughput: Throughput, memory_gib: float
) -> dict[str, object]:
    """The line of metrics.jsonl for step `number`. memory_gib: peak memory of the fullest rank."""
    plan, result, metrics = outcome.plan, outcome.result, dict(outcome.metrics)
    totals, loss = plan.totals, metrics.pop("loss")
    line: dict[str, object] = {
        "step": number,
        "epoch": epoch,
        "loss": None if result.skipped else loss,
        "grad_norm": None if result.skipped else result.grad_norm,
        "lr": None if result.skipped else outcome.lr,
        "documents": totals.documents,
        "tokens": totals.tokens,
        "loss_tokens": totals.loss_tokens,
        "micro_batches": plan.micro_batches,
        "fill": plan.fill,
        "utilisation": plan.utilisation,
        "seconds": outcome.seconds,
        "tokens_per_second": totals.tokens / outcome.seconds,
        "mfu": throughput.mfu(totals.cost, outcome.seconds),
        "memory_gib": memory_gib,
    }
    if result.loss_scale is not None:
        line["loss_scale"] = result.loss_scale
    if result.overflow:
        line["overflow"] = True
    return line | ({"skipped": True, "reason": result.reason} if result.skipped else metrics)
