"""The update of every algorithm in plain PyTorch: one process, transformers' model, one sample at a time.

Imports nothing of weft, on purpose. A row is what a rollout leaves: ids, places of those that were drawn, the group,
the reward (None: the sample is not trained), logprobs of the drawn tokens under three policies, and a critic's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LONGEST = 20  # what sequence_sum divides by
CUT = 12  # samples that are longer ended at their longest


@dataclass
class Row:
    ids: list[int]
    drawn: list[int]
    group: int
    reward: float | None
    old: Tensor
    rollout: Tensor
    reference: Tensor
    values: Tensor


def current(model: Any, row: Row, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs of the drawn tokens and entropies of their distributions."""
    logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0] / temperature
    logprobs = logits.log_softmax(-1)[[position - 1 for position in row.drawn]]
    chosen = logprobs[torch.arange(len(row.drawn)), [row.ids[position] for position in row.drawn]]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


# ---------------------------------------------------------------- advantages: row -> tensor over its drawn tokens


def by_group(rows: Sequence[Row], score: Callable[[Row], float], rule: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """rule: (scores of the group, place of the sample in it) -> advantage."""
    out = []
    for row in rows:
        members = [sibling for sibling in rows if sibling.group == row.group]
        position = next(n for n, sibling in enumerate(members) if sibling is row)
        scores = torch.tensor([score(member) for member in members], dtype=torch.float64)
        out.append(rule(scores, position).expand(len(row.drawn)))
    return out


def reward(row: Row) -> float:
    assert row.reward is not None
    return row.reward


def mean_std(scores: Tensor, index: int) -> Tensor:
    if len(scores) == 1 or bool((scores == scores[0]).all()):
        return torch.zeros((), dtype=torch.float64)
    return (scores[index] - scores.mean()) / (scores.std() + 1e-4)


def mean(scores: Tensor, index: int) -> Tensor:
    return scores[index] - scores.mean()


def leave_one_out(scores: Tensor, index: int) -> Tensor:
    remaining = torch.cat([scores[:index], scores[index + 1 :]])
    return scores[index] - remaining.mean() if len(remaining) else torch.zeros((), dtype=torch.float64)


def whiten(advantages: list[Tensor]) -> list[Tensor]:
    tokens = torch.cat(advantages)
    return [(a - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for a in advantages]


def penalised(row: Row, weight: float, estimator: str) -> Tensor:
    """The reward at the last token, less the KL of each."""
    d = (row.old - row.reference).double()
    rewards = -weight * {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimator]
    rewards[-1] += reward(row)
    return rewards


def discounted(row: Row, gamma: float, weight: float) -> Tensor:
    rewards, out = penalised(row, weight, "k1"), []
    for start in range(len(rewards)):
        out.append(sum(gamma**n * r for n, r in enumerate(rewards[start:])))
    return torch.stack([torch.as_tensor(value) for value in out])


def generalised(row: Row, gamma: float, lam: float, weight: float) -> Tensor:
    rewards, values, count = penalised(row, weight, "k3"), row.values.double(), len(row.drawn)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    return torch.stack(
        [torch.as_tensor(sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count))) for t in range(count)]
    )


# ---------------------------------------------------------------- losses of one sample: tensors over its drawn tokens


def clipped(ratio: Tensor, a: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    gain = torch.min(ratio * a, ratio.clip(1 - low, 1 + high) * a)
    if dual is not None:
        gain = torch.where(a < 0, torch.max(gain, dual * a), gain)
    return -gain


def weigh(row: Row, limits: tuple[float, float], level: str, outside: str) -> Tensor:
    """What a token's loss is multiplied by: `cut` at the limits, or 0 (`drop`) outside of them."""
    d = (row.old - row.rollout).double()
    if level != "token":
        d = (d.sum() if level == "sequence" else d.mean()).expand(len(d))
    rho = d.exp()
    if outside == "cut":
        return rho.clip(*limits)
    return torch.where((rho >= limits[0]) & (rho <= limits[1]), rho, 0.0)


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    return (reference - logp).exp() - 1 - (reference - logp)


# ---------------------------------------------------------------- from the losses of samples to one number


def token_mean(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def sequence_mean(losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def sequence_sum(losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.sum() / LONGEST for loss in losses]).mean()


# ---------------------------------------------------------------- algorithms

Aggregate = Callable[[list[Tensor]], Tensor]
Loss = Callable[[Row, Tensor, Tensor, Tensor], Tensor]  # row, logprobs, entropies, advantages -> losses


def ratio(row: Row, logp: Tensor) -> Tensor:
    return (logp - row.old).exp()


def grpo(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    loss = clipped(ratio(row, logp), a, 0.2, 0.2) * weigh(row, (0.0, 2.0), "token", "cut")
    return loss + 0.05 * k3(logp, row.reference) - 0.01 * entropy


def dapo(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    return clipped(ratio(row, logp), a, 0.2, 0.28, dual=1.3)


def ppo(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    return clipped(ratio(row, logp), a, 0.2, 0.2) * weigh(row, (0.0, 2.0), "token", "cut")


def with_k2(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    return ppo(row, logp, entropy, a) + 0.1 * (logp - row.reference) ** 2 / 2


def gspo(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    """Equation 5 as it stands: the gradient of the sample's ratio goes through all of its tokens."""
    sequence_ratio = ratio(row, logp).log().mean().exp()
    assert bool((a == a[0]).all())
    loss = clipped(sequence_ratio, a[0], 0.05, 0.08) * weigh(row, (0.0, 1.02), "geometric", "cut")[0]
    return loss.expand(len(a))


def cispo(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    weight = ratio(row, logp).clip(0.7, 1.3).detach() * weigh(row, (0.8, 1.5), "token", "drop")
    return -weight * a * logp


def plain(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    return -a * logp * weigh(row, (0.0, 1.5), "sequence", "drop")


def sequence_loss(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    """Of the probabilities of whole samples, as TRL's RLOO has it."""
    assert bool((a == a[0]).all())
    return clipped((logp - row.old).sum().exp(), a[0], 0.2, 0.2).expand(len(a))


def with_clamp(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    return clipped(ratio(row, logp), a, 0.2, 0.2, dual=3.0) + 0.5 * k3(logp, row.reference).clip(-0.05, 0.05)


def beside_entropy(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    """[2, G]: the loss without entropy, and entropies."""
    return torch.stack([clipped(ratio(row, logp), a, 0.2, 0.2), entropy])


def with_entropy(loss: Callable[[list[Tensor]], Tensor], bonus: Callable[[list[Tensor]], Tensor]) -> Aggregate:
    return lambda losses: loss([pair[0] for pair in losses]) - 0.3 * bonus([pair[1] for pair in losses])


def uncut(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    return clipped(ratio(row, logp), a, 0.2, 0.2) * float(len(row.drawn) <= CUT)


def masked_sequence(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
    return clipped(ratio(row, logp), a, 0.2, 0.2) * weigh(row, (0.0, 1.3), "sequence", "drop")


def unbiased(kind: str) -> Loss:
    def loss(row: Row, logp: Tensor, entropy: Tensor, a: Tensor) -> Tensor:
        r = (logp - row.rollout).exp()
        d = logp - row.reference
        kl = {"k1": r * d, "k2": r.detach() * d * d / 2, "k3": r * k3(logp, row.reference)}[kind]
        return clipped(r, a, 0.2, 0.2) + 0.1 * kl

    return loss


# name -> (losses of a sample's tokens, advantages, aggregation)
ALGORITHMS: dict[str, tuple[Loss, Callable[[list[Row]], list[Tensor]], Aggregate]] = {
    "grpo": (grpo, lambda rows: by_group(rows, reward, mean_std), sequence_mean),
    "dr_grpo": (ppo, lambda rows: by_group(rows, reward, mean), sequence_sum),
    "dapo": (dapo, lambda rows: by_group(rows, reward, mean_std), token_mean),
    "rloo": (ppo, lambda rows: by_group(rows, lambda r: float(penalised(r, 0.1, "k1").sum()), leave_one_out),
             sequence_sum),
    "reinforce++": (ppo, lambda rows: whiten([discounted(row, 0.9, 0.1) for row in rows]), token_mean),
    "reinforce++_baseline": (with_k2, lambda rows: whiten(by_group(rows, reward, mean)), token_mean),
    "gspo": (gspo, lambda rows: by_group(rows, reward, mean_std), sequence_mean),
    "cispo": (cispo, lambda rows: by_group(rows, reward, mean_std), token_mean),
    "ppo": (ppo, lambda rows: whiten([generalised(row, 0.95, 0.9, 0.1) for row in rows]), token_mean),
    "reinforce": (plain, lambda rows: by_group(rows, reward, mean), sequence_mean),
    "whole samples": (sequence_loss, lambda rows: by_group(rows, reward, leave_one_out), sequence_mean),
    "kl clamp": (with_clamp, lambda rows: by_group(rows, reward, mean_std), token_mean),
    "entropy by tokens": (beside_entropy, lambda rows: by_group(rows, reward, mean_std),
                          with_entropy(sequence_mean, token_mean)),
    "entropy by samples": (beside_entropy, lambda rows: by_group(rows, reward, mean_std),
                           with_entropy(sequence_sum, sequence_mean)),
    "masked counted": (uncut, lambda rows: by_group(rows, reward, mean_std), sequence_mean),
    "sequence mask": (masked_sequence, lambda rows: by_group(rows, reward, mean_std), token_mean),
    "kl k1": (unbiased("k1"), lambda rows: by_group(rows, reward, mean_std), token_mean),
    "kl k2": (unbiased("k2"), lambda rows: by_group(rows, reward, mean_std), token_mean),
    "kl k3": (unbiased("k3"), lambda rows: by_group(rows, reward, mean_std), token_mean),
}  # fmt: skip


def update(model: Any, rows: Sequence[Row], name: str, temperature: float) -> float:
    """Adds the gradient of one update over these rows; the loss."""
    loss_of, advantages_of, aggregate = ALGORITHMS[name]
    trained = [row for row in rows if row.reward is not None]
    losses = []
    for row, advantage in zip(trained, advantages_of(trained), strict=True):
        losses.append(loss_of(row, *current(model, row, temperature), advantage))
    loss = aggregate(losses)
    loss.backward()
    return float(loss.detach())
