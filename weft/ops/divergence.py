"""Divergences between a student's and a teacher's distribution over the vocabulary, without materialising all logits.

N predictions, H hidden width of the student, V rows of its head, C tokens that both heads have, t tokens of a tile, b
tokens of a block, K tokens of a list.

A teacher's distribution is given by its hidden states, or by a list of its most likely tokens (TopTokens). Logits are
computed from hidden states for t tokens at a time and the full vocabulary, so the largest tensors are a few tiles [t,
V].

Let p = softmax(z / T) be the student's distribution, q the teacher's, and KL(a || b) = sum a (log a - log b). A
divergence is a sum over the vocabulary of terms(log p, log q). With s = d terms / d log p, its gradient with respect to
z / T is s - p sum(s). The teacher's logits get no gradient. If the vocabulary is sharded, ranks exchange sums only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.launch.simulated import device_kind
from weft.ops.head import (
    Anticipated,
    Gradients,
    KnownGrad,
    Logits,
    LogitTransform,
    NeededGradients,
    Scaling,
    VocabularyShard,
    add_input_gradients,
    add_product,
    block_bytes,
    local_columns,
    may_anticipate,
    slices,
    tanh_slope_,
    through_transform_,
    wide_dtype,
)

# (log p, log q), [t, C] each -> ([t, C] terms, whose sum over the vocabulary is the divergence; [t, C] their derivative
# with respect to log p). A multiple of p in the derivative has no effect, because it cancels in s - p sum(s).
Terms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q (log q - log p). The gradient with respect to logits is p - q."""
    q = log_q.exp()
    return (log_q - log_p).mul_(q), q.neg_()


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q). The gradient with respect to logits is p (log p - log q - KL)."""
    terms = (log_p - log_q).mul_(log_p.exp())
    return terms, terms


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (Agarwal et al., 2306.13649, as in TRL).

    Computed from log(m / p) = log(1 - beta) + softplus(log q - log p + log(beta / (1 - beta))), which neither overflows
    nor loses digits. The gradient with respect to logits is (1 - beta) p (log(p / m) - KL(p || m)).
    """
    difference = log_q - log_p
    odds = math.log(beta) - math.log1p(-beta)
    ratio = torch.nn.functional.softplus(difference + odds, threshold=40.0).add_(math.log1p(-beta))  # log(m / p)
    slope = log_p.exp().mul_(ratio).mul_(beta - 1.0)
    terms = difference.sub_(ratio).mul_(log_q.exp()).mul_(beta).add_(slope)
    return terms, slope


def differentiated(function: Callable[[Tensor, Tensor], Tensor], name: str) -> Terms:
    """A divergence from a function that returns only the terms. Autograd differentiates it, tile by tile.

    name: for messages. The result raises ValueError if the function returns another shape than [t, C].
    """

    def terms_and_slope(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            log_p = log_p.detach().requires_grad_()
            terms = function(log_p, log_q)
            if not isinstance(terms, Tensor) or terms.shape != log_p.shape:
                shape = tuple(terms.shape) if isinstance(terms, Tensor) else type(terms).__name__
                raise ValueError(
                    f"{name} returns {shape}; it must return a term for each token of the vocabulary, "
                    f"{tuple(log_p.shape)}, without summing them"
                )
            (slope,) = torch.autograd.grad(terms.sum(), log_p)
        return terms.detach(), slope

    return terms_and_slope


def terms_of(name: str, beta: float) -> Terms:
    """The divergence `name`: forward_kl, reverse_kl or jsd. beta: for jsd, 0 < beta < 1."""
    assert name != "jsd" or 0 < beta < 1, beta
    table: dict[str, Terms] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": partial(jsd, beta=beta)}
    return table[name]


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's head.

    weight: [rows, width]. With a sharded vocabulary, a rank needs only the rows of its student's shard. bias: [rows] or
    None. vocabulary: C, the number of tokens that both heads have. The divergence compares distributions over these.
    first: token of the first row.
    """

    weight: Tensor
    bias: Tensor | None
    transform: LogitTransform
    vocabulary: int
    first: int = 0

    def rows(self, first: int, count: int) -> TeacherHead:
        """The rows of the tokens first .. first + count - 1 that this head has."""
        start = max(0, min(first - self.first, len(self.weight)))
        rows = slice(start, max(start, min(start + count, self.vocabulary - self.first, len(self.weight))))
        bias = None if self.bias is None else self.bias[rows]
        return replace(self, weight=self.weight[rows], bias=bias, first=self.first + start)


class TeacherLogits(NamedTuple):
    """A teacher's distributions, given by its last hidden states at each prediction, in the dtype of its head."""

    hidden_NH: Tensor
    head: TeacherHead


class TopTokens(NamedTuple):
    """A teacher's distributions, given by its most likely tokens.

    ids_NK: distinct tokens, or -1 for unused entries. logprobs_NK: log-probabilities of logits / T. All other tokens of
    the vocabulary form one bin, the tail. So a divergence compares distributions over at most K + 1 bins, and is never
    negative. Without the tail it could be negative, and its minimum would not be at the teacher's distribution
    (arXiv:2601.19897, section 3). A tail below 2^-24, the rounding of fp32, counts as 2^-24.
    """

    ids_NK: Tensor
    logprobs_NK: Tensor


@dataclass(frozen=True)
class Comparison:
    """A teacher and the divergence from it. teacher: its distributions. temperature: T. chosen: indices of the
    predictions that have a teacher's distribution; None for all."""

    terms: Terms
    teacher: TeacherLogits | TopTokens
    temperature: float = 1.0
    chosen: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"the temperature of a divergence must be above 0, got {self.temperature}")


class Divergences(NamedTuple):
    """[N] each, fp32 (fp64 for fp64 weights). logprob: of the target. divergence: in nats. agreement: 1.0 if the most
    likely token of both models is equal, else 0.0; or None."""

    logprob: Tensor
    divergence: Tensor
    agreement: Tensor | None


def divergences(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    comparison: Comparison,
    *,
    temperature: float = 1.0,
    known_grad: KnownGrad | None = None,
    agreement: bool = False,
    rows_per_tile: int | None = None,
    shard: VocabularyShard | None = None,
) -> Divergences:
    """The divergence from the teacher and the log-probability of the target, from the same logits. Gradients are exact.

    hidden, weight, bias, targets, transform, shard: as in head.chunked_readouts. temperature: of logprob only; the
    divergence has comparison.temperature. known_grad: [2 N], the gradients that logprob and then the divergence will
    receive, up to one factor, if they are known. Logits are then computed once. agreement: whether to compute it; it
    has no gradient. rows_per_tile: t, by default chosen by bytes. The divergence is over the C tokens that both heads
    have, logprob over all V.
    """
    assert len(comparison.teacher[0]) == len(hidden), (comparison.teacher[0].shape, hidden.shape)
    if not may_anticipate(weight.dtype):
        known_grad = None
    settings = _Settings(Scaling.from_transform(transform, temperature), temperature, agreement, rows_per_tile, shard)
    out = _Divergences.apply(hidden, weight, bias, targets, comparison, known_grad, settings)
    return Divergences(*out)


class _Settings(NamedTuple):
    scaling: Scaling
    temperature: float
    agreement: bool
    rows_per_tile: int | None
    shard: VocabularyShard | None


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        comparison: Comparison,
        known_grad: KnownGrad | None,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        needs = NeededGradients(*ctx.needs_input_grad[:3])
        pair = _reader(hidden, weight, bias, targets, comparison, settings)
        ctx.anticipated = None
        if known_grad is not None and any(needs):
            ctx.anticipated = Anticipated(known_grad, pair.read(known_grad.values_N.view(2, -1), needs))
        else:
            pair.read(None, needs)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.comparison, ctx.settings = comparison, settings._replace(agreement=False)
        if pair.agreement is not None:
            ctx.mark_non_differentiable(pair.agreement)
        return pair.logprob, pair.divergence, pair.agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob: Tensor | None, divergence: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        anticipated: Anticipated | None = ctx.anticipated
        ctx.anticipated = None  # its tensors become the results, so a second backward must compute them again
        zeros = torch.zeros(len(targets), dtype=wide_dtype(weight), device=weight.device)
        upstream = torch.stack([zeros if logprob is None else logprob, zeros if divergence is None else divergence])
        if anticipated is not None:
            gradients = anticipated.scaled_to(upstream.flatten())
        else:
            pair = _reader(hidden, weight, bias, targets, ctx.comparison, ctx.settings)
            gradients = pair.read(upstream, NeededGradients(*ctx.needs_input_grad[:3]))
        return *gradients.rounded_like(hidden, weight, bias), *(None,) * 4


def _reader(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, comparison: Comparison, settings: _Settings
) -> _Reader:
    teacher = comparison.teacher
    if isinstance(teacher, TopTokens):
        return _ListReader(hidden, weight, bias, targets, comparison, settings, teacher)
    return _PairReader(hidden, weight, bias, targets, comparison, settings, teacher)


class _Reader(ABC):
    """Computes the student's logits tile by tile, and from them logprob, divergence and agreement, [N] each."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        comparison: Comparison,
        settings: _Settings,
    ) -> None:
        self.settings, self.shard, self.terms = settings, settings.shard, comparison.terms
        self.first = 0 if settings.shard is None else settings.shard.first
        self.targets = targets - self.first
        self.student = Logits(hidden.to(weight.dtype), weight, bias, settings.scaling)
        self.wide = self.student.wide
        # Logits are computed for the temperature of logprob; times `ratio` they have the divergence's temperature.
        self.ratio = settings.temperature / comparison.temperature
        self.logprob = torch.zeros(len(targets), dtype=self.wide, device=weight.device)
        self.divergence = torch.zeros_like(self.logprob)
        self.agreement = torch.zeros_like(self.logprob) if settings.agreement else None

    def read(self, upstream: Tensor | None, needs: NeededGradients) -> Gradients:
        """Fill the values. Returns gradients of the inputs for the upstream gradient [2, N] of logprob and divergence;
        without an upstream gradient, all are None."""
        weight = self.student.weight
        height = self._rows_per_tile()
        one_tile = height >= len(self.targets)
        needs = needs if upstream is not None else NeededGradients(False, False, False)
        out = Gradients.start(self.student, needs, weight.dtype if one_tile else self.wide)
        for rows in slices(len(self.targets), height):
            x = self.student.tile(rows, slice(0, len(weight)))
            y = self._teacher_tile(rows)
            # With a sharded vocabulary, a block is a full tile, for few collectives. Else a block fits the CPU's cache.
            step = max(1, block_bytes(device_kind(x.device)) // (4 * len(weight)))
            for block in slices(len(x), len(x) if self.shard is not None else step):
                block_rows = slice(rows.start + block.start, rows.start + block.stop)
                self._read_block(
                    x[block],
                    None if y is None else y[block],
                    block_rows,
                    None if upstream is None else upstream[:, block_rows, None],
                )
            if upstream is not None:
                add_input_gradients(x, self.student, rows, slice(0, len(weight)), out)
                if out.weight is not None:
                    add_product(out.weight, x.T, self.student.hidden[rows])
        return out

    def _teacher_tile(self, rows: slice) -> Tensor | None:
        """The teacher's logits of these predictions; None for a teacher given by TopTokens."""
        return None

    @abstractmethod
    def _read_block(self, x: Tensor, y: Tensor | None, rows: slice, upstream: Tensor | None) -> None:
        """Fill the values of a block of predictions. x, y: the student's and the teacher's products of hidden states
        and weights. With an upstream gradient [2, b, 1], overwrite x with its gradient."""

    def _rows_per_tile(self) -> int:
        """The number of tokens of a tile. Ranks of a sharded vocabulary agree on it, because their shards may differ by
        a row."""
        if self.settings.rows_per_tile is not None:
            return self.settings.rows_per_tile
        height = self.student.rows_of_all_columns()
        if self.shard is not None:
            negated = torch.tensor([-height], device=self.logprob.device)
            self.shard.ranks.max_(negated)
            height = -int(negated)
        return height

    def _transformed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(Logits, slope of the logit transform or None), from x, a block of products of hidden states and weights."""
        (inner, outer), z, slope = self.student.scaling, x.to(self.wide), None
        if outer is not None:
            slope = tanh_slope_(z).mul_(outer * inner)
            z.mul_(outer)
        return z, slope

    def _finish_gradient(
        self, x: Tensor, z: Tensor, slope: Tensor | None, at_target: tuple[Tensor, Tensor], g_logprob: Tensor
    ) -> None:
        """Add the target's part to z, the gradient of the logits, and write the gradient of x into x. at_target: result
        of local_columns for the targets."""
        is_inside, local = at_target
        z.scatter_add_(1, local[:, None], g_logprob * is_inside[:, None])
        through_transform_(z, slope, self.student.scaling.inner)
        if z.dtype != x.dtype:
            x.copy_(z)

    def _log_sum_exp(self, parts: list[Tensor]) -> Tensor:
        """[parts, b]: the log-sum-exp of each part's rows over the full vocabulary. A row of -inf has the result -inf.
        Collective with a sharded vocabulary."""
        lowest = torch.finfo(self.wide).min
        top = torch.stack([z.amax(1) if z.shape[1] else z.new_full((len(z),), lowest) for z in parts])
        top.clamp_(min=lowest)
        if self.shard is not None:
            self.shard.ranks.max_(top)
        mass = torch.stack([(z - largest[:, None]).exp_().sum(1) for z, largest in zip(parts, top, strict=True)])
        if self.shard is not None:
            self.shard.ranks.sum_(mass)
        return top + mass.log_()

    def _likeliest(self, z: Tensor) -> Tensor:
        """[b] the most likely token. Of tied tokens, the first. Collective with a sharded vocabulary."""
        if z.shape[1]:
            value, token = z.max(1)
        else:
            value, token = z.new_full((len(z),), float("-inf")), torch.zeros(len(z), dtype=torch.int64, device=z.device)
        if self.shard is None:
            return token
        values = torch.stack(self.shard.ranks.all_gather(value))
        tokens = torch.stack(self.shard.ranks.all_gather(token + self.first))
        return tokens.gather(0, values.argmax(0, keepdim=True))[0]


class _PairReader(_Reader):
    """A reader that also computes the teacher's logits from its hidden states."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        comparison: Comparison,
        settings: _Settings,
        teacher: TeacherLogits,
    ) -> None:
        super().__init__(hidden, weight, bias, targets, comparison, settings)
        head = teacher.head.rows(self.first, len(weight))
        # Detached, because the teacher may be the student itself or share its head, and must get no gradient.
        hidden_q, weight_q = teacher.hidden_NH.detach(), head.weight.detach()
        bias_q = None if head.bias is None else head.bias.detach()
        scaling_q = Scaling.from_transform(head.transform, comparison.temperature)
        self.teacher = Logits(hidden_q.to(weight_q.dtype), weight_q, bias_q, scaling_q)
        self.common = len(weight_q)

    def _teacher_tile(self, rows: slice) -> Tensor | None:
        return self.teacher.tile(rows, slice(0, self.common))

    def _read_block(self, x: Tensor, y: Tensor | None, rows: slice, upstream: Tensor | None) -> None:
        assert y is not None
        z, slope = self._transformed(x)
        log_p, log_q = z[:, : self.common] * self.ratio, y.to(self.wide)
        if self.teacher.scaling.outer is not None:
            log_q.tanh_().mul_(self.teacher.scaling.outer)
        if self.agreement is not None:
            self.agreement[rows] = (self._likeliest(log_p) == self._likeliest(log_q)).to(self.wide)
        # Whether logprob and the divergence have the same softmax. Always False with a sharded vocabulary, because
        # ranks must agree on the number of collectives, and self.common may differ between ranks.
        one_softmax = self.ratio == 1.0 and self.shard is None and self.common == len(self.student.weight)
        lse = self._log_sum_exp([log_p, log_q] if one_softmax else [log_p, log_q, z])
        log_p.sub_(lse[0, :, None])
        log_q.sub_(lse[1, :, None])
        terms, s = self.terms(log_p, log_q)
        is_inside, local = local_columns(self.targets[rows], slice(0, z.shape[1]))
        picked = torch.where(is_inside, z.gather(1, local[:, None])[:, 0], 0.0)
        sums = torch.stack([terms.sum(1), s.sum(1), picked, is_inside.to(self.wide)])
        if self.shard is not None:
            self.shard.ranks.sum_(sums)
        self.divergence[rows] = sums[0]
        # A target outside the vocabulary gives NaN, so that it cannot go unnoticed.
        self.logprob[rows] = torch.where(sums[3] > 0, sums[2] - lse[-1 if not one_softmax else 0], float("nan"))
        if upstream is None:
            return
        g_logprob, g_divergence = upstream[0], upstream[1] * self.ratio
        p = log_p.exp_()
        if one_softmax:
            z.copy_(s).mul_(g_divergence).addcmul_(p, g_divergence * sums[1, :, None] + g_logprob, value=-1.0)
        else:
            z.sub_(lse[2, :, None]).exp_().mul_(-g_logprob)
            z[:, : self.common].addcmul_(s, g_divergence).addcmul_(p, g_divergence * sums[1, :, None], value=-1.0)
        self._finish_gradient(x, z, slope, (is_inside, local), g_logprob)


class _ListReader(_Reader):
    """A reader that compares the student with TopTokens: the bins are the listed tokens and the tail.

    The tail's logit is the log-sum-exp of all unlisted logits. It is not computed as 1 - sum(listed probabilities),
    which rounds to 0 if the listed tokens have nearly all probability. The gradient of an unlisted logit is the
    gradient of the tail's logit x the token's share of the tail."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        comparison: Comparison,
        settings: _Settings,
        teacher: TopTokens,
    ) -> None:
        super().__init__(hidden, weight, bias, targets, comparison, settings)
        self.ids = teacher.ids_NK.to(targets)
        self.logprobs = teacher.logprobs_NK.detach().to(weight.device)

    def _read_block(self, x: Tensor, y: Tensor | None, rows: slice, upstream: Tensor | None) -> None:
        z, slope = self._transformed(x)
        ids, width = self.ids[rows], z.shape[1]
        is_used = ids >= 0
        is_here, columns = local_columns(ids - self.first, slice(0, width))
        is_here &= is_used
        is_listed = torch.zeros(len(z), width + 1, dtype=torch.bool, device=z.device)
        is_listed.scatter_(1, torch.where(is_here, columns, width), True)  # unused entries go to an extra column
        unlisted = (z * self.ratio).masked_fill_(is_listed[:, :width], float("-inf"))
        is_inside, local = local_columns(self.targets[rows], slice(0, width))
        picked = torch.where(is_inside, z.gather(1, local[:, None])[:, 0], 0.0)
        listed = torch.where(is_here, z.gather(1, columns) * self.ratio, 0.0)
        sums = torch.cat([listed, torch.stack([picked, is_inside.to(self.wide)], 1)], 1)
        if self.shard is not None:
            self.shard.ranks.sum_(sums)
        lse = self._log_sum_exp([unlisted, z])
        self.logprob[rows] = torch.where(sums[:, -1] > 0, sums[:, -2] - lse[1], float("nan"))
        log_p, log_q, has_tail = self.bins(sums[:, :-2], lse[0], is_used, self.logprobs[rows])
        if self.agreement is not None:
            likeliest = ids.gather(1, log_q[:, :-1].argmax(1, keepdim=True))[:, 0]
            self.agreement[rows] = (self._likeliest(z) == likeliest).to(self.wide)
        terms, s = self.terms(log_p, log_q)
        self.divergence[rows] = terms.sum(1)
        if upstream is None:
            return
        g_logprob, g_divergence = upstream[0], upstream[1] * self.ratio
        g_bins = g_divergence * (s - log_p.exp() * s.sum(1, keepdim=True))
        z.sub_(lse[1, :, None]).exp_().mul_(-g_logprob)
        share = unlisted.sub_(torch.where(has_tail, lse[0], 0.0)[:, None]).exp_()
        z.addcmul_(share, g_bins[:, -1:])
        z.scatter_add_(1, columns, g_bins[:, :-1] * is_here)
        self._finish_gradient(x, z, slope, (is_inside, local), g_logprob)

    def bins(self, listed: Tensor, tail: Tensor, is_used: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """([b, K + 1] log p, [b, K + 1] log q, [b] whether there is a tail). listed, tail: the student's logits, [b, K]
        and [b]. Unused bins have probability 0 in both models."""
        absent = torch.tensor(_ABSENT, dtype=self.wide, device=listed.device)
        has_tail = tail > float("-inf")
        is_bin = torch.cat([is_used, has_tail[:, None]], 1)
        logits = torch.cat([listed, tail[:, None]], 1).masked_fill(~is_bin, float("-inf"))
        log_p = torch.where(is_bin, logits - logits.logsumexp(1, keepdim=True), absent)
        log_q = torch.where(is_used, logprobs.to(self.wide), absent)
        tail_q = (1 - log_q.exp().sum(1, keepdim=True)).clamp(min=2.0**-24).log()
        return log_p, torch.cat([log_q, torch.where(has_tail[:, None], tail_q, absent)], 1), has_tail


_ABSENT = -1e4  # log-probability of an unused bin: its exponential is 0, and unlike -inf minus itself it gives 0
