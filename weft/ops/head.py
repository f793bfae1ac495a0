"""Log-probabilities and entropies from hidden states, without materialising all logits.

N predictions, H hidden width, V vocabulary, t tokens and v columns of a tile, b tokens of a block.

Logits are computed tile by tile (some tokens x some of the vocabulary) and folded into a running log-sum-exp. Backward
computes each tile again. The vocabulary is the outer loop, so each slice of the weight's gradient is written once. With
tokens outside, all of [V, H] would be read and written for every chunk of tokens.

If the caller knows the direction of the gradient, as in supervised fine-tuning, forward also computes the gradients. A
tile is then a few tokens x the full vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.launch.simulated import device_kind, device_memory, is_simulated
from weft.ops.communicator import Communicator
from weft.ops.exact import linear, token_logprobs
from weft.ops.kernel_trial import try_kernels, uses_kernels

_MIB = 2**20
# A tile reads (t + v) x H elements for t x v x H operations, so nearly square tiles are best. More tokens than this
# give little improvement.
_TILE_TOKENS = 4096
_ROOMY = 38 * 2**30  # memory of accelerators that are sold as 40 GB or more


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """A family's transform of its logits: `softcap * tanh(x * scale / softcap)`, or `x * scale` without a softcap."""

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0, got {self.softcap}; use None for no softcap")

    def __call__(self, logits: Tensor) -> Tensor:
        """Transformed logits, out of place, for any shape."""
        if self.softcap is None:
            return logits if self.scale == 1.0 else logits * self.scale
        return self.softcap * torch.tanh(logits * (self.scale / self.softcap))


class Scaling(NamedTuple):
    """z = outer * tanh(inner * x) with a softcap, z = inner * x without (outer is None)."""

    inner: float
    outer: float | None

    @classmethod
    def from_transform(cls, transform: LogitTransform, temperature: float) -> Scaling:
        if transform.softcap is None:
            return cls(transform.scale / temperature, None)
        return cls(transform.scale / transform.softcap, transform.softcap / temperature)


@dataclass(frozen=True)
class KnownGrad:
    """The gradient [N] that logprobs will receive, up to one factor, if it is known before the forward.

    wrong: one flag per backward, on the device. True means that the gradient had another direction, and the result is
    wrong. The caller must check the flags later, because checking them immediately would wait for the device.
    """

    values_N: Tensor
    wrong: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class VocabularyShard:
    """A shard of the vocabulary. first: the token of this rank's first row of the weight. ranks: the ranks that share
    the vocabulary."""

    first: int
    ranks: Communicator


def chunked_readouts(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    *,
    entropy: bool,
    temperature: float = 1.0,
    known_grad: KnownGrad | None = None,
    exact: bool = False,
    tile: tuple[int, int] | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log-probability [N] of each target; entropy [N] or None), in nats, fp32 (fp64 for fp64 weights).

    With z = transform(hidden @ weight.T + bias) / temperature: logprob = z[target] - logsumexp(z), entropy =
    -sum(softmax(z) * log_softmax(z)). Matmuls run in the weight's dtype, all later operations in fp32 (fp64 for fp64
    weights). Backward is exact for any upstream gradient of both. For N = 0 gradients are zeros, not None.

    hidden: [N, H]. weight: [V, H]. bias: [V] or None.
    targets: [N] int64 in [0, V). The result of a target outside is NaN.
    temperature: above 0. Raises ValueError otherwise.
    known_grad: avoids the second computation of logits. Ignored with entropy. It costs an fp32 [V, H] buffer if the
    weight is narrower than fp32 and there are several tiles.
    exact: compute with the sampler's operations, from complete rows of logits.
    tile: (t, v), by default chosen by bytes.
    shard: this rank's shard of the vocabulary. All its ranks must call this together, with equal hidden states and
    targets. The gradient of the hidden states is then this rank's term of a sum over the ranks.
    """
    if not temperature > 0:
        raise ValueError(f"the temperature of log-probabilities must be above 0, got {temperature}")
    assert hidden.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    assert weight.ndim == 2 and weight.shape[1] == hidden.shape[1], (weight.shape, hidden.shape)
    scaling = Scaling.from_transform(transform, temperature)
    if entropy or exact or not may_anticipate(weight.dtype) or shard is not None:
        known_grad = None
    assert shard is None or not exact, "exact needs complete rows of logits, and the vocabulary is sharded"
    sampled = (transform, temperature) if exact else None
    if shard is not None:
        targets = targets - shard.first
    logprob, entropies = _Readouts.apply(
        hidden, weight, bias, targets, known_grad, scaling, entropy, tile, sampled, shard
    )
    return logprob, entropies


def may_anticipate(dtype: torch.dtype) -> bool:
    """Whether forward may compute gradients. Not in fp16, where gradients without the loss scale would underflow."""
    return torch.is_grad_enabled() and dtype != torch.float16


@torch.no_grad()
def logprob_and_top1(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    *,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target; 1.0 if no token is more likely than the target, else 0.0), without gradients.

    Shapes and dtypes: see chunked_readouts. Tied tokens all count as most likely.
    """
    logits = Logits(hidden.to(weight.dtype), weight, bias, Scaling.from_transform(transform, temperature))
    running = _Running.start(len(targets), hidden.device, logits.wide, entropy=False, largest=True)
    _fold_all(logits, targets if shard is None else targets - shard.first, running, tile)
    if shard is not None:
        running = running.joined(shard.ranks)
    assert running.largest is not None
    return running.picked - running.lse, (running.picked >= running.largest).to(logits.wide)


def tile_bytes(device: str, memory: int = 0) -> int:
    """Bytes of one fp32 tile of logits on this type of device. memory: bytes of memory of the accelerator.

    With a known gradient, each tile costs one pass over an fp32 buffer of the weight's shape. So tiles are large if the
    device has much memory.
    """
    return (64 if device == "cpu" else 2048 if memory >= _ROOMY else 512) * _MIB


def block_bytes(device: str) -> int:
    """Bytes of one fp32 block, the part of a tile that elementwise operations process together. On a CPU a block fits
    the cache. On an accelerator fewer, larger kernels are faster."""
    return (2 if device == "cpu" else 128) * _MIB


def _tile_shape(tokens: int, vocabulary: int, device: str, memory: int = 0) -> tuple[int, int]:
    """(t, v) of tiles of equal size, as nearly square as the shapes allow, with at most tile_bytes() in fp32."""
    rows = -(-tokens // max(1, -(-tokens // _TILE_TOKENS)))
    columns = min(vocabulary, max(1, tile_bytes(device, memory) // 4 // max(1, rows)))
    columns = -(-vocabulary // -(-vocabulary // columns))
    return max(1, rows), min(vocabulary, -(-columns // 64) * 64)


def wide_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of all operations after the matmuls: fp32, or fp64 for fp64 weights."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class Logits:
    """Computes tiles of scaling.inner * (hidden @ weight.T + bias). All tiles share one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> None:
        self.hidden, self.weight, self.bias, self.scaling = hidden, weight, bias, scaling
        self.wide = wide_dtype(weight)
        self._buffer = weight.new_empty(0)

    def tiles(self, tile: tuple[int, int] | None) -> Iterator[tuple[slice, Iterator[slice]]]:
        """(columns, slices of rows) of the tiles. tile: (t, v), by default nearly square."""
        device = self.weight.device
        height, width = tile or _tile_shape(
            len(self.hidden), len(self.weight), device_kind(device), device_memory(device)
        )
        for columns in slices(len(self.weight), width):
            yield columns, slices(len(self.hidden), height)

    def rows_of_all_columns(self) -> int:
        """Number of tokens in a tile with the full vocabulary."""
        device = self.weight.device
        return max(1, tile_bytes(device_kind(device), device_memory(device)) // (4 * len(self.weight)))

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """[t, v] inner * (hidden @ weight.T + bias) in the weight's dtype. The next call overwrites it."""
        hidden, weight = self.hidden[rows], self.weight[columns]
        if self._buffer.numel() < len(hidden) * len(weight):
            self._buffer = weight.new_empty(len(hidden) * len(weight))
        out = self._buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        inner = self.scaling.inner
        if self.bias is None:
            return torch.addmm(out, hidden, weight.T, beta=0, alpha=inner, out=out)
        return torch.addmm(self.bias[columns], hidden, weight.T, beta=inner, alpha=inner, out=out)

    def blocks(self, tile: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(rows, block in fp32 or fp64) for all rows of a tile. A block is a view if the tile has its dtype, else a
        copy."""
        return _blocks(tile, self.wide)


def _blocks(tile: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    budget = block_bytes(device_kind(tile.device))
    for rows in slices(len(tile), max(1, budget // (4 * tile.shape[1]))):
        yield rows, tile[rows].to(wide)


def slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class _Readouts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        known_grad: KnownGrad | None,
        scaling: Scaling,
        entropy: bool,
        tile: tuple[int, int] | None,
        sampled: tuple[LogitTransform, float] | None,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        needs = NeededGradients(*ctx.needs_input_grad[:3])
        logits = Logits(hidden.to(weight.dtype), weight, bias, scaling)
        running = _Running.start(len(targets), hidden.device, logits.wide, entropy)
        if known_grad is not None and any(needs):
            gradients = _fold_and_differentiate(logits, targets, known_grad.values_N, running, needs, tile)
            ctx.anticipated = Anticipated(known_grad, gradients)
        else:
            ctx.anticipated = None
            if sampled is None:
                _fold_all(logits, targets, running, tile)
            else:
                logprob = _read_as_sampled(logits, targets, running, *sampled)
            if shard is not None:
                running = running.joined(shard.ranks)
        ctx.save_for_backward(hidden, weight, bias, targets, running.lse, running.entropy)
        ctx.scaling, ctx.tile = scaling, tile
        return running.picked - running.lse if sampled is None else logprob, running.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        anticipated: Anticipated | None = ctx.anticipated
        ctx.anticipated = None  # its tensors become the results, so a second backward must compute them again
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(lse)
        if anticipated is not None:
            gradients = anticipated.scaled_to(grad_logprob)
        else:
            logits = Logits(hidden.to(weight.dtype), weight, bias, ctx.scaling)
            upstream = _Upstream(grad_logprob, grad_entropy, lse, entropy)
            gradients = _differentiate(logits, targets, upstream, NeededGradients(*ctx.needs_input_grad[:3]), ctx.tile)
        return *gradients.rounded_like(hidden, weight, bias), *(None,) * 7


class NeededGradients(NamedTuple):
    """The inputs that need gradients."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients of hidden states [N, H], weight [V, H] and bias [V]. None for inputs that need no gradient."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def start(cls, logits: Logits, needs: NeededGradients, weight_dtype: torch.dtype) -> Gradients:
        """Gradients of zero. Those of hidden states and bias are fp32 or fp64, because they sum over many tiles."""
        hidden, weight = logits.hidden, logits.weight
        return cls(
            torch.zeros_like(hidden, dtype=logits.wide) if needs.hidden else None,
            torch.zeros_like(weight, dtype=weight_dtype) if needs.weight else None,
            torch.zeros_like(weight[:, 0], dtype=logits.wide) if needs.bias else None,
        )

    def rounded_like(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, each in the dtype of its input."""
        pairs = zip(self, inputs, strict=True)
        return tuple(None if gradient is None or x is None else gradient.to(x.dtype) for gradient, x in pairs)


def _differentiate(
    logits: Logits, targets: Tensor, upstream: _Upstream, needs: NeededGradients, tile: tuple[int, int] | None
) -> Gradients:
    """Exact gradients for any upstream gradient. Computes each tile of logits again."""
    out = Gradients.start(logits, needs, logits.weight.dtype)
    for columns, all_rows in logits.tiles(tile):
        total = WideSum(out.weight[columns], logits.wide) if out.weight is not None else None
        for rows in all_rows:
            grad = _gradient_of_tile(logits, rows, columns, targets[rows], upstream.rows(rows))
            add_input_gradients(grad, logits, rows, columns, out)
            if total is not None:
                total.add(grad.T, logits.hidden[rows])
        if total is not None:
            total.finish()
    return out


def add_input_gradients(grad: Tensor, logits: Logits, rows: slice, columns: slice, out: Gradients) -> None:
    """Add a tile's gradient [t, v] to the gradients of the hidden states and the bias."""
    if out.hidden is not None:
        add_product(out.hidden[rows], grad, logits.weight[columns])
    if out.bias is not None:
        out.bias[columns] += grad.sum(0, dtype=logits.wide)


class Anticipated:
    """Gradients that forward computed for an expected upstream gradient of logprob. They are correct up to one factor
    if the actual upstream gradient has the expected direction."""

    def __init__(self, direction: KnownGrad, gradients: Gradients) -> None:
        self.direction, self.gradients = direction, gradients

    def scaled_to(self, actual: Tensor) -> Gradients:
        """The gradients for the upstream gradient `actual`. Appends to direction.wrong whether it has another
        direction."""
        direction, actual = self.direction.values_N.double(), actual.double()
        square = direction.dot(direction)
        factor = torch.where(square > 0, actual.dot(direction) / square, 0.0)
        expected = direction * factor
        # The caller's direction and autograd's gradient differ by up to four fp32 roundings. Some values underflow.
        allowed = 5e-7 * expected.abs() + torch.finfo(torch.float32).tiny
        as_expected = ((actual - expected).abs() <= allowed).all()
        # A non-finite gradient is not reported as a wrong direction: the engine skips such a step anyway.
        self.direction.wrong.append(~as_expected & actual.isfinite().all())
        for gradient in self.gradients:
            if gradient is not None:
                _scale_(gradient, factor)
        return self.gradients


def _scale_(values: Tensor, factor: Tensor) -> None:
    """values *= factor, computed in fp32 or wider. factor: a scalar on the device of the values. values.mul_ would
    round the factor to the dtype of the values."""
    if torch.finfo(values.dtype).bits >= 32:
        values.mul_(factor)
        return
    rows = max(1, block_bytes(device_kind(values.device)) // (4 * values[0].numel()))
    for block in values.split(rows):
        block.copy_(block.float().mul_(factor))


def _fold_and_differentiate(
    logits: Logits,
    targets: Tensor,
    direction: Tensor,
    running: _Running,
    needs: NeededGradients,
    tile: tuple[int, int] | None,
) -> Gradients:
    """Fill the running values. Returns the gradients for the upstream gradient `direction` [N] of logprob, computed
    from the same logits."""
    rows_per_tile = tile[0] if tile else logits.rows_of_all_columns()
    is_one_tile = rows_per_tile >= len(targets)
    out = Gradients.start(logits, needs, logits.weight.dtype if is_one_tile else logits.wide)
    columns = slice(0, len(logits.weight))
    for rows in slices(len(targets), rows_per_tile):
        grad = _softmax_and_gradient(logits, rows, targets[rows], direction[rows], running)
        add_input_gradients(grad, logits, rows, columns, out)
        if out.weight is not None:
            add_product(out.weight, grad.T, logits.hidden[rows])
    return out


def _softmax_and_gradient(logits: Logits, rows: slice, targets: Tensor, direction: Tensor, running: _Running) -> Tensor:
    """Fill the running values of these tokens. Returns the gradient [t, V], defined as in `_gradient_of_tile`."""
    tile = logits.tile(rows, slice(0, len(logits.weight)))
    lse, picked = running.lse[rows], running.picked[rows]
    if uses_kernels(tile, check_kernels):
        inner, outer = logits.scaling
        torch.ops.weft.head_softmax_gradient(tile, targets, direction, lse, picked, inner, outer)
    else:
        softmax_gradient_(tile, targets, direction, lse, picked, logits.scaling, logits.wide)
    return tile


def softmax_gradient_(
    tile: Tensor,
    targets: Tensor,
    direction: Tensor,
    lse: Tensor,
    picked: Tensor,
    scaling: Scaling,
    wide: torch.dtype = torch.float32,
) -> None:
    """Overwrite a tile of complete rows [t, V] with its gradient for the upstream gradient `direction` [t] of the
    log-probabilities. Fills lse [t], and picked [t] for targets inside the columns."""
    is_inside, local = local_columns(targets, slice(0, tile.shape[1]))
    inner, outer = scaling
    for block, z in _blocks(tile, wide):
        slope = None
        if outer is not None:
            slope = tanh_slope_(z).mul_(inner * outer)
            z.mul_(outer)
        index = local[block, None]
        picked[block] = torch.where(is_inside[block], z.gather(1, index).squeeze(1), picked[block])
        largest = z.amax(1, keepdim=True)
        total = z.sub_(largest).exp_().sum(1, keepdim=True)
        lse[block] = (total.log() + largest).squeeze(1)
        g = direction[block, None] if outer is not None else direction[block, None] * inner
        z.mul_(-g / total).scatter_add_(1, index, g * is_inside[block, None])
        if slope is not None:
            z.mul_(slope)
        if z.dtype != tile.dtype:
            tile[block] = z


class _Running(NamedTuple):
    """Values of each token over the columns processed so far, [N] each. picked: z of the target, NaN before its column.
    largest: z of the most likely token; None if not needed."""

    lse: Tensor
    picked: Tensor
    entropy: Tensor | None
    largest: Tensor | None = None

    @classmethod
    def start(
        cls, tokens: int, device: torch.device, dtype: torch.dtype, entropy: bool, largest: bool = False
    ) -> _Running:
        def full(value: float) -> Tensor:
            return torch.full((tokens,), value, device=device, dtype=dtype)

        lowest = float("-inf")
        return cls(full(lowest), full(float("nan")), full(0.0) if entropy else None, full(lowest) if largest else None)

    def joined(self, ranks: Communicator) -> _Running:
        """The values over the full vocabulary, from the values of all ranks' shards. Collective; exchanges [N] values.

        By the chain rule of entropy, as in `_merge`: H = sum_i w_i (H_i - log w_i), w_i the probability of shard i.
        """
        top = self.lse.clone()
        ranks.max_(top)
        mass = (self.lse - top).exp_()
        ranks.sum_(mass)
        lse = top + mass.log_()
        picked = self.picked.nan_to_num(float("-inf"), float("inf"), float("-inf"))
        ranks.max_(picked)
        picked = torch.where(picked.isneginf(), float("nan"), picked)
        entropy, largest = self.entropy, self.largest
        if entropy is not None:
            log_share = self.lse - lse
            entropy = log_share.exp() * (entropy - log_share)
            ranks.sum_(entropy)
        if largest is not None:
            ranks.max_(largest)
        return _Running(lse, picked, entropy, largest)


def _fold_all(logits: Logits, targets: Tensor, running: _Running, tile: tuple[int, int] | None) -> None:
    for columns, all_rows in logits.tiles(tile):
        for rows in all_rows:
            _fold(logits, rows, columns, targets[rows], running)


def _fold(logits: Logits, rows: slice, columns: slice, targets: Tensor, running: _Running) -> None:
    """Fold one tile into the running values."""
    tile = logits.tile(rows, columns)
    targets, picked = targets - columns.start, running.picked[rows]
    outer = logits.scaling.outer
    if uses_kernels(tile, check_kernels):
        lse, entropy = torch.empty_like(picked), torch.empty_like(picked)
        largest = torch.full_like(picked, float("-inf")) if running.largest is None else running.largest[rows]
        torch.ops.weft.head_fold(tile, targets, lse, entropy, picked, largest, outer)
        _merge(running, rows, lse, None if running.entropy is None else entropy)
        return
    is_inside, local = local_columns(targets, slice(0, tile.shape[1]))
    for block, z in logits.blocks(tile):
        if outer is not None:
            z.tanh_().mul_(outer)
        target_z = z.gather(1, local[block, None]).squeeze(1)
        picked[block] = torch.where(is_inside[block], target_z, picked[block])
        if running.largest is not None:
            largest = running.largest[rows][block]
            torch.maximum(largest, z.amax(1), out=largest)
        lse, entropy = (log_sum_exp_(z), None) if running.entropy is None else _log_sum_exp_and_entropy_(z)
        _merge(running, slice(rows.start + block.start, rows.start + block.stop), lse, entropy)


def _read_as_sampled(
    logits: Logits, targets: Tensor, running: _Running, transform: LogitTransform, temperature: float
) -> Tensor:
    """[N] log-probability of each target, with the sampler's operations (rl.on_policy=exact). Fills `running`."""
    logprob = torch.empty_like(running.lse)
    for rows in slices(len(targets), logits.rows_of_all_columns()):
        z = transform(linear(logits.hidden[rows], logits.weight, logits.bias).to(logits.wide))
        logprob[rows], logprobs = token_logprobs(z, targets[rows], temperature)
        picked = z.gather(1, targets[rows, None])[:, 0] / temperature
        running.lse[rows] = picked - logprob[rows]
        if running.entropy is not None:
            running.entropy[rows] = -logprobs.exp().mul_(logprobs).sum(1)
    return logprob


def local_columns(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(whether each target is one of these columns, its index among them), with the shape of `targets`. The index of a
    target outside is a valid index without meaning."""
    width = columns.stop - columns.start
    local = targets - columns.start
    return (local >= 0) & (local < width), local.clamp(0, width - 1)


def log_sum_exp_(z: Tensor) -> Tensor:
    """[b] log-sum-exp of the rows of z [b, v]. Overwrites z. (torch.logsumexp is 5 x slower on a CPU.)"""
    largest = z.amax(1, keepdim=True)
    return z.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))


def _log_sum_exp_and_entropy_(z: Tensor) -> tuple[Tensor, Tensor]:
    """([b] log-sum-exp, [b] entropy of the softmax) of the rows of z [b, v]. Overwrites z.

    With d = z - max z and s = sum exp d: lse = max z + log s, entropy = log s - sum(exp(d) * d) / s.
    """
    largest = z.amax(1, keepdim=True)
    exponentials = z.sub_(largest).exp()
    total = exponentials.sum(1)
    mean = exponentials.mul_(z).sum(1).div_(total)
    log_total = total.log_()
    return log_total + largest.squeeze(1), log_total - mean


def _merge(running: _Running, rows: slice, lse: Tensor, entropy: Tensor | None) -> None:
    """Combine two parts of a softmax by the chain rule of entropy: H = sum_i w_i (H_i - log w_i), w_i the probability
    of part i. lse, entropy: of the new part."""
    joint = torch.logaddexp(running.lse[rows], lse)
    if entropy is not None:
        assert running.entropy is not None
        first, second = running.lse[rows] - joint, lse - joint  # log w_i
        earlier = torch.where(first.isneginf(), 0.0, first.exp() * (running.entropy[rows] - first))
        running.entropy[rows] = earlier + second.exp() * (entropy - second)
    running.lse[rows] = joint


class _Upstream(NamedTuple):
    """Upstream gradients of logprob and entropy, and saved values, [N] each. value: the entropy."""

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor
    value: Tensor | None

    def rows(self, rows: slice) -> _Upstream:
        return _Upstream(*(x if x is None else x[rows] for x in self))


def _gradient_of_tile(logits: Logits, rows: slice, columns: slice, targets: Tensor, upstream: _Upstream) -> Tensor:
    """[t, v] gradient with respect to hidden @ weight.T + bias, in the weight's dtype. The next tile overwrites it.

    With p = softmax(z): d logprob / dz = onehot - p, d entropy / dz = -p (log p + entropy).
    """
    tile, targets = logits.tile(rows, columns), targets - columns.start
    if uses_kernels(tile, check_kernels):
        inner, outer = logits.scaling
        _, g_entropy, lse, value = upstream
        torch.ops.weft.head_gradient(tile, targets, lse, upstream.logprob, g_entropy, value, inner, outer)
    else:
        gradient_(tile, targets, upstream, logits.scaling, logits.wide)
    return tile


def gradient_(
    tile: Tensor, targets: Tensor, upstream: _Upstream, scaling: Scaling, wide: torch.dtype = torch.float32
) -> None:
    """Overwrite a tile [t, v] with its gradient, defined as in `_gradient_of_tile`. targets: [t], as indices of the
    tile's columns."""
    is_inside, local = local_columns(targets, slice(0, tile.shape[1]))
    inner, outer = scaling
    for block, z in _blocks(tile, wide):
        g = upstream.rows(block)
        slope = None
        if outer is not None:
            slope = tanh_slope_(z).mul_(outer * inner)
            z.mul_(outer)
        z.sub_(g.lse[:, None])
        if g.entropy is None:
            z.exp_().mul_(-g.logprob[:, None])
        else:
            assert g.value is not None
            p = z.exp()
            z.add_(g.value[:, None]).mul_(-g.entropy[:, None]).sub_(g.logprob[:, None]).mul_(p)
        z.scatter_add_(1, local[block, None], (g.logprob * is_inside[block])[:, None])
        through_transform_(z, slope, inner)
        if z.dtype != tile.dtype:
            tile[block] = z


# The kernels of head_kernels.py are registered as operators, so that simulations run without Triton.


@torch.library.custom_op("weft::head_fold", mutates_args=("lse", "entropy", "picked", "largest"))
def _fold_kernel(
    tile: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, picked: Tensor, largest: Tensor, outer: float | None
) -> None:
    from weft.ops import head_kernels

    head_kernels.fold(tile, targets, lse, entropy, picked, largest, outer)


@torch.library.custom_op("weft::head_softmax_gradient", mutates_args=("tile", "lse", "picked"))
def _softmax_gradient_kernel(
    tile: Tensor, targets: Tensor, direction: Tensor, lse: Tensor, picked: Tensor, inner: float, outer: float | None
) -> None:
    from weft.ops import head_kernels

    head_kernels.softmax_gradient(tile, targets, direction, lse, picked, inner, outer)


@torch.library.custom_op("weft::head_gradient", mutates_args=("tile",))
def _gradient_kernel(
    tile: Tensor, targets: Tensor, lse: Tensor, logprob: Tensor, entropy: Tensor | None, value: Tensor | None,
    inner: float, outer: float | None,
) -> None:  # fmt: skip
    from weft.ops import head_kernels

    head_kernels.gradient(tile, targets, lse, logprob, entropy, value, inner, outer)


for _operator in (_fold_kernel, _softmax_gradient_kernel, _gradient_kernel):
    _operator.register_fake(lambda *arguments: None)


@functools.cache
def check_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of head_kernels.py run on this device and equal the operations of this file, up to rounding
    in `dtype`. Compares once, on a small tile, and warns if they differ."""
    scalings = (Scaling(0.5, None), Scaling(0.1, 20.0))
    return try_kernels(
        "the head computes", device, lambda: max(_differences(device, dtype, scaling) for scaling in scalings)
    )


def _differences(device: torch.device, dtype: torch.dtype, scaling: Scaling) -> float:
    """The largest difference between a kernel and the operations that it replaces, as a multiple of the tolerance for
    rounding. Infinite if a result is not finite."""
    from weft.ops import head_kernels

    columns, inner, outer = 5000, *scaling
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, columns, generator=generator).mul_(4.0 / (1.0 if outer is None else outer)).to(device, dtype)
    g, targets = torch.tensor([1.0, 0.5, -2.0], device=device), torch.tensor([0, columns - 1, columns], device=device)
    is_inside = torch.tensor([True, True, False], device=device)
    z = x.float() if outer is None else outer * x.float().tanh()
    lse, entropy = log_sum_exp_(z.clone()), _log_sum_exp_and_entropy_(z.clone())[1]
    picked = torch.where(is_inside, z.gather(1, targets.clamp(max=columns - 1)[:, None])[:, 0], 0.0)
    pairs: list[tuple[Tensor, Tensor]] = []
    out = torch.zeros(4, 3, device=device)
    head_kernels.fold(x, targets, out[0], out[1], out[2], out[3], outer)
    pairs += zip(out, (lse, entropy, picked, z.amax(1).clamp(min=0.0)), strict=True)
    out, kernel_grad, torch_grad = torch.zeros(2, 3, device=device), x.clone(), x.clone()
    head_kernels.softmax_gradient(kernel_grad, targets, g, out[0], out[1], inner, outer)
    softmax_gradient_(torch_grad, targets, g, torch.empty_like(lse), torch.empty_like(lse), scaling)
    pairs += [(out[0], lse), (out[1], picked), (kernel_grad, torch_grad)]
    for g_entropy in (None, g.flip(0)):
        kernel_grad, torch_grad = x.clone(), x.clone()
        head_kernels.gradient(kernel_grad, targets, lse, g, g_entropy, entropy, inner, outer)
        gradient_(torch_grad, targets, _Upstream(g, g_entropy, lse, entropy), scaling)
        pairs.append((kernel_grad, torch_grad))
    worst = 0.0
    for result, truth in pairs:
        step = torch.finfo(torch.float32).eps * 64 if result.dtype == torch.float32 else torch.finfo(dtype).eps * 2
        allowed = step * (truth.float().abs() + 1e-4)  # gradients far below the largest gradient may underflow
        difference = ((result.float() - truth.float()).abs() / allowed).max()
        worst = max(worst, float(difference) if bool(difference.isfinite()) else float("inf"))
    return worst


def through_transform_(z: Tensor, slope: Tensor | None, inner: float) -> None:
    """Turn the gradient of logits into the gradient of their inputs, in place. slope: derivative of the
    soft-capped transform; None without a soft-cap."""
    if slope is not None:
        z.mul_(slope)
    elif inner != 1.0:
        z.mul_(inner)


def tanh_slope_(x: Tensor) -> Tensor:
    """1 - tanh(x)^2, the derivative of tanh; x is overwritten with tanh(x)."""
    return torch.square(x.tanh_()).neg_().add_(1.0)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. If total is wider than a and b, the product is not rounded to their dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        _wide_product(a.device if not is_simulated() else None, a.dtype)(total, a, b)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _multiply_wide(total: Tensor, a: Tensor, b: Tensor) -> None:
    total += torch.mm(a, b, out_dtype=total.dtype)


def _widen(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b with both factors converted to the sum's dtype, for a part of the inner dimension at a time."""
    step = max(1, block_bytes(device_kind(total.device)) // (4 * (a.shape[0] + b.shape[1])))
    for inner in slices(a.shape[1], step):
        total.addmm_(a[:, inner].to(total.dtype), b[inner].to(total.dtype))


@functools.cache
def _wide_product(device: torch.device | None, narrow: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The fastest function that adds a product of dtype `narrow` to an fp32 sum without rounding it first. device: None
    in a simulation.

    On CUDA torch has matmuls with a wider result dtype: mm since torch 2.8, addmm since 2.11. Each is tried once.
    """
    if device is None:
        return _accumulate
    candidates = (_accumulate, _multiply_wide) if device.type == "cuda" else ()
    for candidate in candidates:
        total = torch.ones(16, 16, device=device)
        # The product is 1 + 2^-12, which no 16-bit dtype represents.
        a = torch.full((16, 32), 2.0**-5, device=device, dtype=narrow)
        b = torch.full((32, 16), 1.0, device=device, dtype=narrow)
        b[0] += 2.0**-7
        try:
            candidate(total, a, b)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        if bool((total == 2.0 + 2.0**-12).all()):
            return candidate
    return _widen


class WideSum:
    """A sum of matmuls. It is accumulated in dtype `wide` if the dtype of `out` is narrower, and written to `out` at
    the end."""

    def __init__(self, out: Tensor, wide: torch.dtype) -> None:
        self.out, self._first = out, True
        self._total = out if out.dtype == wide else torch.zeros_like(out, dtype=wide)

    def add(self, a: Tensor, b: Tensor) -> None:
        if self._first and self._total is self.out:
            torch.mm(a, b, out=self.out)
        else:
            add_product(self._total, a, b)
        self._first = False

    def finish(self) -> None:
        if self._first:
            self.out.zero_()
        elif self._total is not self.out:
            self.out.copy_(self._total)
