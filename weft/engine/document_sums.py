"""Logprob sums of whole documents, without gradients, known to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import Batch, LossOutput
from weft.launch import flight
from weft.launch.simulated import read

if TYPE_CHECKING:
    from weft.engine.step_plan.plan import StepPlan


class DocumentSums:
    """A loss without gradient: it collects the sum over each document of loss weight x logprob. totals: [2, D], the
    sums and the number of times each was added."""

    readouts = frozenset({"logprob"})
    every_token = False

    def __init__(self, documents: int) -> None:
        self.totals = torch.zeros(2, documents, dtype=torch.float64)

    def normaliser(self, plan: StepPlan) -> float:
        return 1.0

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return None

    def __call__(self, batch: Batch) -> LossOutput:
        sums_D = batch.document_sum((batch.weights_N * batch.readouts["logprob"]).double())
        documents = torch.tensor(batch.counted_documents, dtype=torch.int64)
        values = sums_D.detach().cpu()
        self.totals.index_add_(1, documents, torch.stack([values, torch.ones_like(values)]))
        return LossOutput(sums_D.sum())


def read_sums(engine: Engine, documents: Sequence[Document]) -> Tensor:
    """[documents] fp64 on the host: the sum over each document of loss weight x logprob, in evaluation mode. The same
    on every rank. Raises RuntimeError if no rank read a document. Collective."""
    flight.enter("logprobs")
    plan, local = engine.plan_step(documents)
    collected = DocumentSums(len(documents))
    engine.evaluate(plan, local, collected)
    return means_over_ranks(engine, collected.totals, "logprobs")


def means_over_ranks(engine: Engine, totals: Tensor, readings: str) -> Tensor:
    """[documents] on the host, from each rank's [2, documents]: the sum of a document's readings, and their number. The
    same on every rank. readings: their name, for the error. Raises RuntimeError if no rank read a document. Collective.
    """
    totals = totals.to(engine.device)
    dist.all_reduce(totals, group=engine.mesh.world_group)
    sums, counts = totals.cpu()
    times = read(counts, lambda: [1.0] * len(counts))
    if not all(times):
        raise RuntimeError(f"no rank read document {times.index(0.0)} of {len(times)}: its {readings} are missing")
    return sums / counts
