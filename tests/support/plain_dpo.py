"""Losses of preferences in plain PyTorch, pair by pair with transformers' own forward. Imports nothing of weft."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid as ls
from torch.nn.functional import relu

BETA, SMOOTHING = 0.05, 0.1  # so small that no sigmoid is saturated


@dataclass
class PlainAnswer:
    """ids: the document. trained: 1 for each token of the answer. tail: factor on tokens from `shorter` on. inputs:
    further arguments of the model, of images."""

    ids: list[int]
    trained: list[int]
    role: str
    margin: float = 0.0
    shorter: int = 10**9
    tail: float = 1.0
    reference: float = field(default=0.0)
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.trained[1:])


def logprob_sum(model: Any, answer: PlainAnswer) -> Tensor:
    """Sum over the answer's tokens of their logprobs, those beyond `shorter` times `tail`."""
    ids = torch.tensor([answer.ids])
    logits = model(input_ids=ids, use_cache=False, **answer.inputs).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids[1:])[:, None])[:, 0]
    mask = torch.tensor(answer.trained[1:], dtype=torch.float32)
    return (logprobs * mask * torch.where(mask.cumsum(0) > answer.shorter, answer.tail, 1.0)).sum()


def pair_loss(name: str, c: Tensor, r: Tensor, rc: float, rr: float, nc: int, nr: int, margin: float = 0.0) -> Tensor:
    """A loss of one pair. c, r: logprob sums; rc, rr: the reference's; nc, nr: tokens."""
    b, e = BETA, SMOOTHING
    dc, dr = c - rc, r - rr
    x = b * (dc - dr) - margin
    losses: dict[str, Callable[[], Tensor]] = {
        "sigmoid": lambda: -(1 - e) * ls(x) - e * ls(-x),
        "hinge": lambda: relu(1 - x),
        "ipo": lambda: (dc / nc - dr / nr - 1 / (2 * b)) ** 2,
        "robust": lambda: (-(1 - e) * ls(x) + e * ls(-x)) / (1 - 2 * e),
        "exo_pair": lambda: x.sigmoid() * (ls(x) - math.log(1 - e)) + (-x).sigmoid() * (ls(-x) - math.log(e)),
        "nca_pair": lambda: -ls(b * dc) - 0.5 * ls(-b * dc) - 0.5 * ls(-b * dr),
        "bco_pair": lambda: -ls(b * dc) - ls(-b * dr),
        "sppo_hard": lambda: (dc - 0.5 / b) ** 2 + (dr + 0.5 / b) ** 2,
        "apo_zero": lambda: 1 - (b * dc).sigmoid() + (b * dr).sigmoid(),
        "apo_down": lambda: (b * dc).sigmoid() + 1 - (b * (dc - dr)).sigmoid(),
        "discopop": lambda: -ls(x) * (1 - (x / 0.05).sigmoid()) + (-x).exp() * (x / 0.05).sigmoid(),
        "sigmoid_norm": lambda: -ls(b * (dc / nc - dr / nr)),
        "simpo": lambda: (
            -(1 - e) * ls(b * (c / nc - r / nr) - 0.5 - margin) - e * ls(-(b * (c / nc - r / nr) - 0.5 - margin))
        ),
        "cpo": lambda: -(1 - e) * ls(b * (c - r) - margin) - e * ls(-(b * (c - r) - margin)),
        "orpo": lambda: -b * ls((c / nc - r / nr) - (torch.log(1 - (c / nc).exp()) - torch.log(1 - (r / nr).exp()))),
        "sft": lambda: c * 0.0,
    }
    return losses[name]()


def step_loss(
    names: Sequence[str], weights: Sequence[float], sums: Sequence[Tensor], answers: Sequence[PlainAnswer]
) -> Tensor:
    """The loss of a step of pairs, chosen before rejected. Cross entropy of chosen answers is over all their tokens."""
    chosen, rejected = range(0, len(answers), 2), range(1, len(answers), 2)
    total = torch.zeros(())
    for name, weight in zip(names, weights, strict=True):
        if name == "aot":
            policy = torch.stack([sums[c] - sums[r] for c, r in zip(chosen, rejected, strict=True)]).sort().values
            reference = torch.tensor(
                sorted(answers[c].reference - answers[r].reference for c, r in zip(chosen, rejected, strict=True))
            )
            x = BETA * (policy - reference)
            loss = (-(1 - SMOOTHING) * ls(x) - SMOOTHING * ls(-x)).mean()
        elif name == "aot_unpaired":
            columns = [torch.stack([sums[i] - answers[i].reference for i in column]) for column in (chosen, rejected)]
            x = BETA * (columns[0].sort().values - columns[1].sort().values)
            loss = (-(1 - SMOOTHING) * ls(x) - SMOOTHING * ls(-x)).mean()
        else:
            loss = torch.stack(
                [
                    pair_loss(
                        name, sums[c], sums[r], answers[c].reference, answers[r].reference, answers[c].tokens,
                        answers[r].tokens, answers[c].margin,
                    )
                    for c, r in zip(chosen, rejected, strict=True)
                ]
            ).mean()  # fmt: skip
        if name in ("sft", "cpo", "orpo"):
            loss = loss - sum(sums[c] for c in chosen) / sum(answers[c].tokens for c in chosen)
        total = total + weight * loss
    return total


def kto_loss(
    sums: Sequence[Tensor], answers: Sequence[PlainAnswer], kl: float, desirable: float, undesirable: float
) -> Tensor:
    """KTO of answers one by one."""
    losses = []
    for total, answer in zip(sums, answers, strict=True):
        ratio = total - answer.reference
        if answer.role in ("chosen", "desired"):
            losses.append(desirable * (1 - (BETA * (ratio - kl)).sigmoid()))
        else:
            losses.append(undesirable * (1 - (BETA * (kl - ratio)).sigmoid()))
    return torch.stack(losses).mean()
