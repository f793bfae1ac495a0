"""EngineConfig.temperature: readouts, and every gradient through them, are of logits / temperature, as sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from weft.engine.losses.base import Batch, CrossEntropy, LossOutput
from weft.verify import reference
from weft.verify.documents import awkward_steps
from weft.verify.harness import GRADIENT, SCALAR, compare_gradients
from weft.verify.observed import Tensors, to_documents

if TYPE_CHECKING:
    from weft.engine.losses.base import Loss

TEMPERATURE, BONUS = 0.6, 0.3
DOCUMENTS = awkward_steps(128)[0]


class WithEntropy(CrossEntropy):
    """Cross entropy less a bonus for entropy: a gradient through both readouts."""

    readouts = frozenset({"logprob", "entropy"})

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return None

    def __call__(self, batch: Batch) -> LossOutput:
        terms = super().__call__(batch)
        return LossOutput(terms.loss_sum - BONUS * (batch.weights_N * batch.readouts["entropy"]).sum(), terms.metrics)


def weft_gradients(path: str, mesh: str, exact: bool) -> tuple[list[Tensors], dict[int, Tensors]]:
    """Gradients of both objectives, and readouts of all documents."""
    engine = open_engine(path, mesh, temperature=TEMPERATURE, exact=exact, step={"max_tokens_per_device": 61})
    documents, metas = to_documents(engine, DOCUMENTS)
    plan = engine.plan(metas)
    gradients: list[Tensors] = []
    objectives: list[Loss] = [CrossEntropy(), WithEntropy()]
    for objective in objectives:
        engine.accumulate(plan, documents, objective)
        gradients.append({name: gradient for name, gradient in engine.gradients() if gradient is not None})
        engine.drop_gradients()
    parts: list[dict[int, Tensors]] = [{} for _ in range(engine.ranks.world)]
    dist.all_gather_object(parts, engine.readout(plan, documents, ("logprob", "entropy")))
    return gradients, {index: values for part in parts for index, values in part.items()}


def plain(path: str) -> tuple[list[Tensors], list[Tensors]]:
    """The same in one process from all logits: divided last, after whatever the family does to them."""
    model = reference.Reference(path)
    total = sum(sum(mask[1:]) for _, mask in DOCUMENTS)
    gradients, readouts = [], []
    for bonus in (0.0, BONUS):
        model.model.zero_grad(set_to_none=True)
        readouts = []
        for ids, mask in DOCUMENTS:
            logprobs = (model.logits(ids)[:-1] / TEMPERATURE).log_softmax(-1)
            logprob = logprobs.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            loss = -(torch.tensor(mask[1:]) * (logprob + bonus * entropy)).sum() / total
            loss.backward()
            readouts.append({"logprob": logprob.detach(), "entropy": entropy.detach()})
        gradients.append({n: p.grad.clone() for n, p in model.named() if p.grad is not None})
    return gradients, readouts


@pytest.mark.parametrize(
    ("family", "mesh", "exact"),
    [("llama", "2", False), ("gemma2", "2", False), ("llama_tied", "1", False), ("gemma2", "2", True)],
    ids=["plain", "softcap", "tied", "exact"],
)
def test_readouts_and_gradients_are_those_of_divided_logits(family: str, mesh: str, exact: bool) -> None:
    """exact: as rl.on_policy=exact computes them."""
    path = saved_model(family)
    gradients, readouts = run(world_of(mesh), weft_gradients, path, mesh, exact)[0]
    expected, values = plain(path)
    for index, document in enumerate(values):
        for name, value in document.items():
            torch.testing.assert_close(readouts[index][name][1:], value, rtol=SCALAR, atol=SCALAR)
    for actual, gradient_expected in zip(gradients, expected, strict=True):
        untied = {
            name: gradient for name, gradient in gradient_expected.items() if name in actual
        }  # a tied weight has two names
        figures = compare_gradients(actual, untied, {})
        assert len(figures) == len(actual) and all(figure.value <= GRADIENT for figure in figures), figures
