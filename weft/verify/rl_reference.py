"""The update of reinforcement learning in one plain process, for policy and critic.

Imports only the plain reference of weft, and the plain functions of weft/rl/algorithms, which share no code with
training. Formulas and their sources are in docs/reference/algorithms.md. A row is a sample: its tokens, the indices of
those that the policy sampled (G), its group, its reward, and the engine's logprobs of the sampled tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from weft.rl.algorithms import ADVANTAGES, TOKEN_LOSSES
from weft.verify.peft_reference import PeftReference
from weft.verify.plain_divergence import divergence_of
from weft.verify.reference import Reference

_NONE = torch.zeros(0)
_LIMITS = {"tis": (0.0, 2.0), "mis": (0.0, 2.0), "icepop": (0.5, 5.0)}


@dataclass
class PlainSample:
    """A sample. drawn: indices of the tokens that the policy sampled. reward: None if the sample does not count.
    trained: whether its tokens are trained. Arrays are [G], one entry per sampled token. old_logprobs, ref_logprobs,
    teacher_logprobs and values come from models; correction, advantage and returns are derived from them."""

    ids: list[int]
    drawn: list[int]
    group: int
    reward: float | None
    trained: bool
    rollout_logprobs: Tensor
    routes: Any = None
    old_logprobs: Tensor = _NONE
    ref_logprobs: Tensor = _NONE
    teacher_logprobs: Tensor = _NONE
    values: Tensor = _NONE
    correction: Tensor = _NONE
    advantage: Tensor = _NONE
    returns: Tensor = _NONE


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of an update. rl: weft's section `rl`. longest: the divisor of sequence_sum. follow: a context in
    which experts follow a row's routes. teacher: with rl.teacher_in=loss, a row -> the teacher's `distributions`."""

    rl: Any
    temperature: float
    longest: int
    value_clip: float | None = None
    follow: Callable[[PlainSample], AbstractContextManager[Any]] = field(default=lambda row: nullcontext())
    teacher: Callable[[PlainSample], Tensor] | None = None

    def weights(self, row: PlainSample) -> float:
        """The weight of each of the row's tokens in the sums of a step, by rl.loss_aggregation."""
        return {"token_mean": 1.0, "sequence_mean": 1 / max(1, len(row.drawn)), "sequence_sum": 1 / self.longest}[
            self.rl.loss_aggregation
        ]


def distributions(model: Any, row: PlainSample, temperature: float) -> Tensor:
    """[G, V] log-probabilities of all tokens at the positions of sampled tokens."""
    logits = model(input_ids=torch.tensor([row.ids], device=_device(model)), use_cache=False).logits[0].float()
    return (logits / temperature).log_softmax(-1)[[position - 1 for position in row.drawn]]


def read(all_scores: Tensor, row: PlainSample) -> tuple[Tensor, Tensor]:
    """(Logprobs of the sampled tokens, entropies of their distributions), [G] each. all_scores: from
    `distributions`."""
    chosen = all_scores[torch.arange(len(row.drawn)), [row.ids[position] for position in row.drawn]]
    return chosen, -(all_scores.exp() * all_scores).sum(-1)


def _device(model: Any) -> torch.device:
    advantages: torch.device = next(model.parameters()).device
    return advantages


# ---------------------------------------------------------------- before the update


def correct(rows: Sequence[PlainSample], rl: Any) -> None:
    """Set each row's correction for the difference between old policy and rollout."""
    for row in rows:
        if rl.old_logprobs == "rollout":
            row.old_logprobs = row.rollout_logprobs
        log_rho = (row.old_logprobs - row.rollout_logprobs).double()
        if rl.correction_level != "token":
            log_rho = (log_rho.sum() if rl.correction_level == "sequence" else log_rho.mean()).expand(len(log_rho))
        rho = log_rho.exp()
        low, high = rl.correction_limits or _LIMITS.get(rl.correction, (0.0, float("inf")))
        if rl.correction == "none" or rl.old_logprobs == "rollout":
            row.correction = torch.ones_like(rho)
        elif rl.correction == "tis":
            row.correction = rho.clip(low, high)
        else:
            row.correction = torch.where((rho >= low) & (rho <= high), rho, 0.0)


def compare(rows: Sequence[PlainSample], rl: Any) -> None:
    """Set the advantages of the rows that have a reward, and with a critic, their returns."""
    rewarded = [row for row in rows if row.reward is not None]
    estimates = ADVANTAGES[rl.advantage].plain(rewarded, [_token_rewards(row, rl) for row in rewarded], rl)
    for row, advantage in zip(rewarded, estimates, strict=True):
        row.advantage = advantage
        if rl.teacher is not None and rl.teacher_in == "advantage":
            row.advantage = advantage + rl.teacher_coef * (row.teacher_logprobs - row.old_logprobs).double()


def _token_rewards(row: PlainSample, rl: Any) -> Tensor:
    """[G]: the reward at the last token, minus each token's KL if rl.kl_in is reward."""
    rewards = torch.zeros(len(row.drawn), dtype=torch.float64)
    if rl.kl_coef > 0 and rl.kl_in == "reward":
        rewards -= rl.kl_coef * _kl((row.old_logprobs - row.ref_logprobs).double(), rl)
    rewards[-1] += row.reward
    return rewards


def _kl(d: Tensor, rl: Any) -> Tensor:
    estimate = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[rl.kl_estimator]
    return estimate if rl.kl_clamp is None else estimate.clip(-rl.kl_clamp, rl.kl_clamp)


# ---------------------------------------------------------------- the update


class _Update(Reference, ABC):
    """A plain reference whose documents are rows. size: sum of the absolute values of the last loss's terms."""

    rule: UpdateSettings
    size: float = 0.0

    @abstractmethod
    def losses(self, row: PlainSample) -> Tensor:
        """[G] loss of each sampled token, without its weight."""

    @abstractmethod
    def total(self, rows: Sequence[PlainSample]) -> float:
        """The divisor of a step's weighted sum."""

    def gradients(self, documents: Sequence[Any]) -> tuple[float, dict[str, Tensor]]:
        """(Loss, every parameter's gradient) of one update over these rows."""
        self.model.zero_grad(set_to_none=True)
        trained = [row for row in documents if row.trained]
        total, loss, self.size = self.total(documents), 0.0, 0.0
        for row in trained:
            with self.rule.follow(row):
                losses = self.rule.weights(row) * self.losses(row) / total
                losses.sum().backward()
            loss, self.size = loss + float(losses.detach().sum()), self.size + float(losses.detach().abs().sum())
        return loss, self.current_gradients()


class _Policy(_Update):
    """The update of a policy. trained, divisor: the step's trained rows, and the divisor of their sum; set by
    `total`."""

    trained: Sequence[PlainSample] = ()
    divisor: float = 1.0

    def losses(self, row: PlainSample) -> Tensor:
        rl = self.rule.rl
        all_scores = distributions(self.model, row, self.rule.temperature)
        logprob, entropy = read(all_scores, row)
        loss = TOKEN_LOSSES[rl.policy_loss].plain(logprob, row, rl) * row.correction
        if rl.kl_coef > 0 and rl.kl_in == "loss":
            ratio, d = (logprob - row.old_logprobs).exp(), logprob - row.ref_logprobs
            if rl.kl_unbiased:
                ratio = ratio.detach() if rl.kl_estimator == "k2" else ratio
            loss = loss + rl.kl_coef * _kl(d, rl) * (ratio if rl.kl_unbiased else 1.0)
        if self.rule.teacher is not None:
            of_teacher = self.rule.teacher(row)
            common = min(all_scores.shape[1], of_teacher.shape[1])  # one vocabulary may have padding
            log_p, log_q = (scores[:, :common].log_softmax(-1) for scores in (all_scores, of_teacher))
            loss = loss + rl.teacher_coef * divergence_of(rl.teacher_divergence, log_p, log_q, rl.teacher_beta)
        return loss - rl.entropy_coef * entropy * self._entropy_share(row)

    def _entropy_share(self, row: PlainSample) -> float:
        """The factor that replaces a token's weight and divisor in the loss by those of rl.entropy_aggregation."""
        tokens, samples = sum(len(r.drawn) for r in self.trained), len(self.trained)
        if self.rule.rl.entropy_aggregation is None:
            return 1.0
        weight = 1 / tokens if self.rule.rl.entropy_aggregation == "token_mean" else 1 / (len(row.drawn) * samples)
        return weight * self.divisor / self.rule.weights(row)

    def total(self, rows: Sequence[PlainSample]) -> float:
        rl, self.trained = self.rule.rl, [row for row in rows if row.trained]
        masked = sum(not row.trained and row.reward is not None for row in rows) if rl.count_masked else 0
        tokens = sum(len(r.drawn) for r in self.trained)
        self.divisor = float(tokens if rl.loss_aggregation == "token_mean" else len(self.trained) + masked) or 1.0
        return self.divisor

    @torch.no_grad()
    def look(self, rows: Sequence[PlainSample], follow: bool = True) -> list[Tensor]:
        """Logprobs of the sampled tokens of each row under the current policy. follow: whether experts follow the rows'
        routes."""
        advantages = []
        for row in rows:
            with self.rule.follow(row) if follow else nullcontext():
                advantages.append(read(distributions(self.model, row, self.rule.temperature), row)[0].cpu())
        return advantages


class PlainPolicy(_Policy):
    """A plain model, trained on rows."""


class PeftPolicy(_Policy, PeftReference):
    """A plain model with an adapter, trained on rows."""

    @contextmanager
    def base(self) -> Iterator[None]:
        """Inside, the model runs without its adapter."""
        with self.model.disable_adapter():
            yield


class PlainCritic(_Update):
    """transformers' classifier with one label, evaluated before every sampled token: V of the state before the
    token."""

    def __init__(self, path: str, weights: dict[str, Tensor], device: str = "cpu") -> None:
        """weights: initial values, by parameter name."""
        self.plain = transformers.AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        self.plain.load_state_dict(weights, strict=False)
        self.model = self.plain.eval().to(device)
        self.device, self.optimizer = device, None

    def values(self, row: PlainSample) -> Tensor:
        hidden = self.plain.base_model(input_ids=torch.tensor([row.ids], device=self.device)).last_hidden_state
        advantages: Tensor = self.plain.score(hidden)[0, [position - 1 for position in row.drawn], 0].float()
        return advantages

    @torch.no_grad()
    def look(self, rows: Sequence[PlainSample]) -> list[Tensor]:
        """The current values of the sampled tokens of each row."""
        return [self.values(row).cpu() for row in rows]

    def losses(self, row: PlainSample) -> Tensor:
        value, clip = self.values(row), self.rule.value_clip
        square = (value - row.returns) ** 2
        if clip is not None:
            near = row.values + (value - row.values).clip(-clip, clip)
            square = torch.max(square, (near - row.returns) ** 2)
        return square / 2

    def total(self, rows: Sequence[PlainSample]) -> float:
        return sum(self.rule.weights(row) * len(row.drawn) for row in rows if row.trained) or 1.0
