"""Compares train.loss with the same object on plain readouts: one process, one document at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.engine.engine import Engine
from weft.engine.losses.base import Batch, Loss
from weft.engine.losses.check import check_normaliser, check_terms, chosen_tokens
from weft.models.readouts import HIDDEN, TOP, TOP_IDS
from weft.verify.adapter import as_in_files
from weft.verify.expected import ExpectedGradient, ReferenceTrainer, norm_of, on_cpu
from weft.verify.image_reference import Images
from weft.verify.observed import Step, Tensors, following, one_gradient, short_budget, to_documents
from weft.verify.reference import Document, Reference
from weft.verify.routing import Routes

LossAndGradients = list[tuple[float, Tensors]]  # the loss and the gradients: of rows as configured, and of short rows


def observe_objective(engine: Engine, objective: Loss, step: Step, routes: Routes, images: Images) -> LossAndGradients:
    """The engine's loss and gradients of `objective`, in rows as configured and in rows of about one document.
    Collective."""
    engine.check_sums(objective)
    budgets = (None, short_budget(engine, step, images))
    with following(engine, routes):
        results = [one_gradient(engine, step, budget, images, objective)[:2] for budget in budgets]
    return [(loss, as_in_files(engine, gradients)) for loss, gradients in results]


def divisor(engine: Engine, objective: Loss, step: Step, images: Images) -> float:
    """The number by which the loss divides the sum of this step."""
    return check_normaliser(objective.normaliser(engine.plan(to_documents(engine, step, images)[1])), objective)


def expect_objective(trainer: ReferenceTrainer, objective: Loss, step: Step, divided_by: float) -> ExpectedGradient:
    """The results of one plain process. Its noise sample has the documents in reverse order."""
    plain = trainer.reference()
    loss, gradients = _gradients(plain, objective, step, divided_by)
    reverse = _gradients(plain, objective, step[::-1], divided_by)[1]
    return ExpectedGradient(loss, norm_of(gradients), gradients, [reverse])


def _gradients(plain: Reference, objective: Loss, step: Sequence[Document], divisor: float) -> tuple[float, Tensors]:
    """(The metric `loss`, the gradients), including gradients of the experts' auxiliary loss."""
    plain.gradients([(ids, [0.0] * len(ids)) for ids, _ in step])  # leaves gradients of the auxiliary loss, if any
    total = weight = 0.0
    for document in step:
        terms = check_terms(objective(_batch(plain, objective, document)), objective)
        if terms.loss_sum.requires_grad:
            (terms.loss_sum / divisor).backward()
        loss_metric = terms.metrics.get("loss", (0.0, 0.0))
        total, weight = total + float(torch.as_tensor(loss_metric[0]).detach()), weight + float(loss_metric[1])
    return total / (weight or 1.0), on_cpu(plain.current_gradients())


def _batch(plain: Reference, objective: Loss, document: Document) -> Batch:
    """The predictions of a single document: its trained tokens, or all tokens for a loss that reads every token."""
    ids, mask = document
    states: dict[str, Tensor] = {}

    def keep(name: str, output: object) -> None:
        value = output[0] if isinstance(output, tuple) else output
        assert isinstance(value, Tensor)
        states[name] = value[0, :-1].float()

    modules = [name.removeprefix(HIDDEN) for name in objective.readouts if name.startswith(HIDDEN)]
    hooks = [
        plain.plain.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name in modules
    ]
    logits_TV = plain.logits(ids)[:-1]
    for hook in hooks:
        hook.remove()
    targets_T = torch.tensor(ids[1:], dtype=torch.int64, device=logits_TV.device)
    weights_T = torch.tensor(mask[1:], device=logits_TV.device)
    chosen = torch.full_like(weights_T, True, dtype=torch.bool) if objective.every_token else weights_T != 0
    logits_NV, targets_N = logits_TV[chosen], targets_T[chosen]
    logprob_NV = logits_NV.log_softmax(-1)
    readouts = {
        "logprob": logprob_NV.gather(1, targets_N[:, None])[:, 0],
        "entropy": -(logprob_NV.exp() * logprob_NV).sum(-1),
        "logsumexp": logits_NV.logsumexp(-1),
        **{HIDDEN + name: states[name][chosen] for name in modules},
    }
    asked_NC = chosen_tokens(objective, targets_N, {})
    if asked_NC is not None:
        readouts["chosen_logits"] = logits_NV.gather(1, asked_NC)
    for count in (name.removeprefix(TOP) for name in objective.readouts if name.startswith(TOP)):
        readouts[TOP + count], readouts[TOP_IDS + count] = logits_NV.topk(int(count), dim=-1)
    return Batch(readouts, weights_T[chosen], torch.zeros_like(targets_N), (0,), {})
