"""Policy-gradient losses: the loss of each token (weft/rl/algorithms), KL to a reference, entropy, and the aggregation.

Three policies: `current`, which is differentiated; `old`, the trainer's when the rollout began; `rollout`, which drew
the tokens. Documents have the arrays old_logprobs, advantages, and correction, the importance weight for the difference
between old and rollout (weft/rl). If the weights were not updated since the rollout, old equals current in value, and
documents have rollout_logprobs instead of old_logprobs and correction. All logprobs are of logits / temperature. N
predictions of a row.

A step's loss is the sum over its tokens of weight x loss of the token, divided by a count of the whole step:

    token_mean      weight 1, by the step's trained tokens
    sequence_mean   weight 1 / G of a document's G trained tokens, by the step's documents
    sequence_sum    weight 1 / rollout.max_new_tokens, by the step's documents (Dr. GRPO, arXiv:2503.20783)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.engine.losses.base import Batch, LossOutput
from weft.engine.losses.correction import LARGEST, bounded, importance_ratios, of_tokens
from weft.engine.losses.distillation import DistillationLoss
from weft.errors import UserError
from weft.importing import import_named
from weft.ops.divergence import Comparison
from weft.rl.algorithms import TOKEN_LOSSES

if TYPE_CHECKING:
    from weft.config.rl_schema import RlAlgorithm
    from weft.engine.step_plan.plan import StepPlan


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of a row as a policy loss reads them, [N] each. logprob: of the current policy, with gradient.
    old_logprob: of the old policy. batch: has per_token_document_sum, for quantities of whole samples."""

    logprob: Tensor
    old_logprob: Tensor
    advantage: Tensor
    batch: Batch

    @property
    def log_ratio(self) -> Tensor:
        return (self.logprob - self.old_logprob).clamp(-LARGEST, LARGEST)

    @property
    def ratio(self) -> Tensor:
        """Current / old policy of each token."""
        return self.log_ratio.exp()

    @property
    def product_ratio(self) -> Tensor:
        """Ratio of each token's sample: the product over the sample's tokens, with gradients through all of them."""
        return self.batch.per_token_document_sum(self.log_ratio).clamp(-LARGEST, LARGEST).exp()

    @property
    def sequence_ratio(self) -> Tensor:
        """Ratio of each token's sample: (prod ratio)^(1/G), with a gradient through this token only (GSPO-token,
        arXiv:2507.18071, equation 14)."""
        with torch.no_grad():
            count = self.batch.per_token_document_sum(torch.ones_like(self.logprob))
            mean = self.batch.per_token_document_sum(self.log_ratio) / count
        return (mean + self.logprob - self.logprob.detach()).exp()


TokenLoss = Callable[[PolicyTokens, "RlAlgorithm"], Tensor]


def choose_policy_loss(name: str) -> TokenLoss:
    """A built-in loss, or the user's at an import path: (PolicyTokens, config) -> [N] loss of each token.

    Raises UserError if the path leads to no function.
    """
    if name in TOKEN_LOSSES:
        return TOKEN_LOSSES[name].loss
    loaded: Any = import_named(name, "rl.policy_loss")
    if not callable(loaded):
        raise UserError(
            f"rl.policy_loss: {name} is not a function of (tokens, config); see weft/engine/losses/policy.py."
        )
    loss: TokenLoss = loaded
    return loss


def kl_loss(tokens: PolicyTokens, reference_logprob: Tensor, config: RlAlgorithm) -> Tensor:
    """[N] the estimate of KL(current || reference) that is differentiated; d = log current - log reference.

    An unbiased estimate of the value may have a biased gradient, because the distribution of the tokens also depends on
    the policy, and no gradient passes through sampling. With tokens drawn from the current policy the expected gradient
    is

        k1 = d zero for all policies k2 = d^2 / 2            the gradient of KL(current || reference), the correct one
        k3 = exp(-d) - 1 + d    the gradient of KL(reference || current), as in GRPO; the same near the reference

    rl.kl_unbiased multiplies the estimate by the ratio of current and old policy; with k1 and k3 the ratio is also
    differentiated (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). With tokens drawn from the old policy, the expected
    gradient of each estimate is then the gradient of KL(current || reference). The gradients of k2 and k3 are equal
    token by token: ratio x d x grad log current.
    """
    d = tokens.logprob - reference_logprob
    if config.kl_estimator == "k1":
        estimate = d
    elif config.kl_estimator == "k2":
        estimate = d.square() / 2
    else:
        estimate = torch.expm1((-d).clamp(max=LARGEST)) + d
    if config.kl_clamp is not None:
        estimate = estimate.clamp(-config.kl_clamp, config.kl_clamp)
    if not config.kl_unbiased:
        return estimate
    return estimate * (tokens.ratio.detach() if config.kl_estimator == "k2" else tokens.ratio)


class PolicyLoss:
    """loss of a token = correction x policy loss + rl.kl_coef x KL - rl.entropy_coef x entropy + rl.teacher_coef x
    divergence from a teacher; see the top of this file."""

    readouts = frozenset({"logprob", "entropy"})  # entropy without a gradient costs almost no time
    every_token = False

    def __init__(
        self,
        config: RlAlgorithm,
        *,
        old_is_current: bool = False,
        kl_of_current: bool = False,
        masked: int = 0,
        branches: int = 0,
        teacher: DistillationLoss | None = None,
    ) -> None:
        """old_is_current: documents have no old_logprobs, because the weights were not updated since the rollout.
        kl_of_current: rl.kl_unbiased takes the current policy for the old one, so that its ratio is 1, with a gradient.
        masked: number of the step's samples that rl.mask_truncated masks. branches: number of the step's documents
        beyond the first of each episode; an episode counts as one document in means over sequences. teacher: for
        rl.teacher_in=loss; its divergence is read."""
        self.config, self.old_is_current, self.teacher = config, old_is_current, teacher
        self.kl_of_current = kl_of_current
        if teacher is not None:
            self.readouts = self.readouts | {"divergence", "agreement"}
        self.masked, self.branches = masked if config.count_masked else 0, branches
        self._tokens = self._samples = self._divisor = 1.0  # of the step, set by normaliser from the plan
        self.loss = choose_policy_loss(config.policy_loss)
        spec = TOKEN_LOSSES.get(config.policy_loss)
        self._ratio, self._clipping = ("ratio", "none") if spec is None else (spec.ratio, spec.clipping)
        self._read: list[tuple[tuple[int, ...], Tensor, Tensor]] = []  # of each row: documents, document_N, logprobs

    def old_logprobs(self) -> dict[int, Tensor]:
        """If the old policy is the current policy: index in the step -> logprobs of the document's trained tokens."""
        old: dict[int, Tensor] = {}
        for documents, document_N, logprob in self._read:
            counts = document_N.bincount(minlength=len(documents)).tolist()
            old |= zip(documents, logprob.float().cpu().split(counts), strict=True)
        return old

    def normaliser(self, plan: StepPlan) -> float:
        samples = sum(document.loss_tokens > 0 for document in plan.documents) - self.branches
        self._tokens = float(sum(document.loss_tokens for document in plan.documents)) or 1.0
        self._samples = float(samples) or 1.0
        summed = self.config.loss_aggregation == "token_mean"
        self._divisor = plan.totals.weight or 1.0 if summed else float(samples + self.masked) or 1.0
        return self._divisor

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return None  # it depends on the ratios

    def comparisons(self, arrays: Mapping[str, Tensor], count: int) -> list[Comparison]:
        """See Loss."""
        assert self.teacher is not None
        return self.teacher.comparisons(arrays, count)

    def __call__(self, batch: Batch) -> LossOutput:
        config, logprob, entropy = self.config, batch.readouts["logprob"], batch.readouts["entropy"]
        if self.old_is_current:
            self._read.append((batch.documents, batch.document_N, logprob.detach()))
        old = logprob.detach() if self.old_is_current else batch.arrays["old_logprobs"]
        tokens = PolicyTokens(logprob, old, batch.arrays["advantages"], batch)
        loss = self.loss(tokens, self.config)
        if not isinstance(loss, Tensor) or loss.shape != tokens.logprob.shape:
            raise UserError(
                f"rl.policy_loss: {self.config.policy_loss} must return a loss for each of the {len(tokens.logprob)} "
                f"tokens, not {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}."
            )
        if config.corrects:
            loss = loss * self._correction(batch, old)
        means = {"entropy": entropy, **self._ratio_metrics(tokens)}
        if config.has_reference:
            reference = batch.arrays["ref_logprobs"]
            means["kl"] = _k3(logprob, reference)
            if config.kl_coef > 0 and config.kl_in == "loss":
                sampled = replace(tokens, old_logprob=logprob.detach()) if self.kl_of_current else tokens
                loss = loss + config.kl_coef * kl_loss(sampled, reference, config)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * entropy * self._entropy_share(batch)
        shares: dict[str, tuple[Tensor, Tensor | float]] = {}
        if self.teacher is not None:
            divergence, agreement = batch.readouts["divergence"], batch.readouts["agreement"]
            part = config.teacher_coef * divergence
            means |= {"teacher/divergence": divergence, "teacher/agreement": agreement}
            sizes = [(batch.weights_N * x.detach()).abs().sum() for x in (part, loss)]
            shares["teacher/share"] = sizes[0], sizes[0] + sizes[1]
            loss = loss + part
        loss_sum = (batch.weights_N * loss).sum()
        metrics = {name: (value.detach().sum(), float(len(value))) for name, value in means.items()} | shares
        if self._ratio != "ratio" and self._clipping != "none":  # all tokens of a sample have the same ratio
            # For each sample, the share of tokens whose gradient was clipped.
            clipped = means["clip_ratio/region_mean"]
            count = batch.document_sum(torch.ones_like(clipped))
            share = batch.document_sum(clipped) / count.clamp(min=1)
            metrics["clip_ratio/samples_mean"] = share.sum(), (count > 0).sum()
        return LossOutput(loss_sum, {"loss": (loss_sum.detach(), self._share(batch)), **metrics})

    def _entropy_share(self, batch: Batch) -> Tensor | float:
        """Factor on each token's entropy, [N] or 1, that replaces the loss's aggregation by rl.entropy_aggregation."""
        aggregation = self.config.entropy_aggregation
        if aggregation is None:
            return 1.0
        entropies = torch.full_like(batch.weights_N, 1 / self._tokens)
        if aggregation == "sequence_mean":
            count = batch.per_token_document_sum(torch.ones_like(batch.weights_N))
            entropies = 1 / (count * self._samples)
        return entropies * self._divisor / batch.weights_N

    def _correction(self, batch: Batch, old: Tensor) -> Tensor:
        """[N] factors on the tokens' losses."""
        if not self.old_is_current:
            return batch.arrays["correction"]
        difference = old.double() - batch.arrays["rollout_logprobs"].double()
        ratios = importance_ratios(difference, batch.document_N, len(batch.documents), self.config)
        return of_tokens(bounded(ratios, self.config), batch.document_N, self.config).to(old.dtype)

    def _share(self, batch: Batch) -> Tensor:
        """This row's contribution to the normaliser."""
        if self.config.loss_aggregation == "token_mean":
            return batch.weights_N.sum()
        trained = (batch.document_sum(torch.ones_like(batch.weights_N)) > 0).sum()
        return trained * (self._divisor / self._samples)  # masked samples are spread over the rows

    @torch.no_grad()
    def _ratio_metrics(self, tokens: PolicyTokens) -> dict[str, Tensor]:
        """[N] for each token: its ratio, KL(old || current) by k3, and whether clipping removed its gradient.

        `low` counts ratios below rl.clip, and `high` ratios above it; for losses with `growing`, only where the
        advantage would move the ratio further away. Losses without clipping and users' losses have no clipping metrics.
        """
        config = self.config
        ratio: Tensor = getattr(tokens, self._ratio)
        metrics = {"policy/ratio": ratio, "policy/kl_old": _k3(tokens.old_logprob, tokens.logprob)}
        if self._clipping == "none":
            return metrics
        low, high = ratio < 1 - config.clip[0], ratio > 1 + config.clip[1]
        if self._clipping == "growing":
            low, high = low & (tokens.advantage < 0), high & (tokens.advantage > 0)
        clipped = {"low_mean": low, "high_mean": high, "region_mean": low | high}
        return metrics | {f"clip_ratio/{name}": flags.float() for name, flags in clipped.items()}


def _k3(p: Tensor, q: Tensor) -> Tensor:
    """[N] estimate exp(-d) - 1 + d of KL(p || q) for each token, without gradient; d = log p - log q, tokens are drawn
    from p."""
    d = (p - q).detach().clamp(-LARGEST, LARGEST)
    return torch.expm1(-d) + d
