"""`weft verify` of a config of `weft reward`: its loss and gradients against transformers' classifier in one process,
one answer at a time."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.nn import functional as F

from weft.config.reward_schema import RewardLossConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.losses.reward import BradleyTerryLoss
from weft.engine.scores import parts_pairs, scored_document, step_scores
from weft.verify.expected import ExpectedGradient, norm_of, on_cpu
from weft.verify.harness import Figure, objective_figures
from weft.verify.observed import Step, Tensors, gradient_of, short_budget


def verify_reward(engine: Engine, path: str, step: Step, objective: Loss, config: RewardLossConfig) -> list[Figure]:
    """Figures of one step, in rows as configured and in short ones; empty except on the first rank. Collective.

    path: of the model's weights. step: an even number of documents, which are taken for pairs where the loss has such.
    """
    values = [_value(config, index) for index in range(len(step))]
    array = "margin" if config.loss == "bradley_terry" else "label"
    documents = [
        scored_document(torch.tensor(ids), None, {array: value}, group=index // 2 if array == "margin" else None)
        for index, ((ids, _), value) in enumerate(zip(step, values, strict=True))
    ]
    head = {name: w.cpu() for name, w in engine.tensors() if name.startswith(f"{engine.module.facts.head}.")}
    observed = []
    for budget in (None, short_budget(engine, step) + 1):
        plan = engine.plan(engine.planner.metadata(documents), budget=budget)
        local = {index: documents[index] for index in engine.planner.local_documents(plan)}
        if isinstance(objective, BradleyTerryLoss):
            objective.scores = step_scores(engine, plan, local) if parts_pairs(plan) else {}
        observed.append(gradient_of(engine, plan, local, objective)[:2])
    if not engine.ranks.is_first:
        return []
    model = _plain_model(path, head, config, str(engine.device))
    loss, gradients = _plain(model, step, values, config)
    reverse = _plain(model, step[::-1], values[::-1], config, turned=True)[1]
    return objective_figures(config.loss, observed, ExpectedGradient(loss, norm_of(gradients), gradients, [reverse]))


def _value(config: RewardLossConfig, index: int) -> float:
    """The margin of a pair, the same for both of its answers; or the label of an answer."""
    if config.loss == "bradley_terry":
        return 0.1 * (index // 2)
    return 0.3 * index - 1.0 if config.loss == "regression" else float(index % config.labels)


def _plain_model(path: str, head: Tensors, config: RewardLossConfig, device: str) -> Any:
    kind = "Token" if config.loss == "process" else "Sequence"
    auto_class = getattr(transformers, f"AutoModelFor{kind}Classification")
    model = auto_class.from_pretrained(
        path, num_labels=config.labels, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    model = model.eval().to(device)
    with torch.no_grad():
        for name, values in head.items():
            model.get_parameter(name).copy_(values)
    return model


def _plain(
    model: Any, step: Step, values: list[float], config: RewardLossConfig, turned: bool = False
) -> tuple[float, Tensors]:
    """(Loss, gradients). turned: of each pair the rejected answer comes first."""
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    rows = [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids, _ in step]
    score_NL = torch.stack([row[-1] if config.loss == "process" else row for row in rows])
    value_N = torch.tensor(values, device=device)
    if config.loss == "bradley_terry":
        first, second = score_NL[:, 0].view(-1, 2).unbind(1)
        chosen, rejected = (second, first) if turned else (first, second)
        loss = -F.logsigmoid(chosen - rejected - value_N[::2]).mean()
        loss = loss + config.center_rewards_coefficient * ((chosen + rejected) ** 2).mean()
    elif config.loss == "regression":
        loss = ((score_NL[:, 0] - value_N) ** 2).mean()
    else:
        loss = F.cross_entropy(score_NL, value_N.long())
    loss.backward()
    return float(loss.detach()), on_cpu({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
