"""Logits of chosen tokens, the largest logits, and log-sum-exp, from hidden states, without materialising all logits.

N predictions, H hidden width, V vocabulary, C chosen tokens per prediction, K largest logits per prediction, tiles
[t, v]. As in head.py, logits are computed tile by tile, and again in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.ops.head import (
    Gradients,
    Logits,
    LogitTransform,
    NeededGradients,
    Scaling,
    VocabularyShard,
    WideSum,
    add_input_gradients,
    local_columns,
    log_sum_exp_,
    tanh_slope_,
    through_transform_,
)


class Selected(NamedTuple):
    """chosen: [N, C] logits of the chosen tokens. top, top_ids: [N, K] the largest logits, descending, and their
    tokens. logsumexp: [N]; a logit minus logsumexp is a log-probability."""

    chosen: Tensor
    top: Tensor
    top_ids: Tensor
    logsumexp: Tensor


def selected_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    transform: LogitTransform,
    *,
    top: int = 0,
    temperature: float = 1.0,
    tile: tuple[int, int] | None = None,
    shard: VocabularyShard | None = None,
) -> Selected:
    """Selected values of z = transform(hidden @ weight.T + bias) / temperature, with exact gradients.

    hidden: [N, H]. weight: [V, H]. bias: [V] or None. ids: [N, C] int64 in [0, V); the result for an id outside is NaN.
    top: K, at most V. tile, shard: as in head.chunked_readouts. Results are fp32 (fp64 for fp64 weights). For N = 0
    gradients are zeros, not None.
    """
    assert hidden.ndim == 2 and ids.ndim == 2 and len(ids) == len(hidden), (hidden.shape, ids.shape)
    assert top >= 0 and (top <= len(weight) or shard is not None), (top, weight.shape)
    return Selected(
        *_Selected.apply(hidden, weight, bias, ids, top, Scaling.from_transform(transform, temperature), tile, shard)
    )


class _RunningSelection(NamedTuple):
    """Values of each prediction over the columns processed so far. chosen: NaN before the token's column."""

    chosen: Tensor
    top: Tensor
    top_ids: Tensor
    lse: Tensor

    @classmethod
    def start(cls, ids: Tensor, top: int, dtype: torch.dtype) -> _RunningSelection:
        lowest = float("-inf")
        largest = torch.full((len(ids), top), lowest, dtype=dtype, device=ids.device)
        return cls(
            torch.full(ids.shape, float("nan"), dtype=dtype, device=ids.device),
            largest,
            torch.zeros_like(largest, dtype=torch.int64),
            torch.full((len(ids),), lowest, dtype=dtype, device=ids.device),
        )

    def rows(self, rows: slice) -> _RunningSelection:
        return _RunningSelection(*(values[rows] for values in self))

    def joined(self, shard: VocabularyShard) -> _RunningSelection:
        """The values over the full vocabulary, from the values of all ranks' shards. Collective; each rank sends its K
        largest logits."""
        ranks, count = shard.ranks, self.top.shape[1]
        largest = self.lse.clone()
        ranks.max_(largest)
        mass = (self.lse - largest).exp_()
        ranks.sum_(mass)
        chosen = self.chosen.nan_to_num(float("-inf"), float("inf"), float("-inf"))
        ranks.max_(chosen)
        chosen = torch.where(chosen.isneginf(), float("nan"), chosen)
        top, top_ids = self.top, self.top_ids
        if count:
            values, ids = torch.cat(ranks.all_gather(top), 1), torch.cat(ranks.all_gather(top_ids + shard.first), 1)
            top, order = values.topk(count, 1)
            top_ids = ids.gather(1, order)
        return _RunningSelection(chosen, top, top_ids, largest + mass.log_())


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        top: int,
        scaling: Scaling,
        tile: tuple[int, int] | None,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        first = 0 if shard is None else shard.first
        ids = ids - first
        logits = Logits(hidden.to(weight.dtype), weight, bias, scaling)
        running = _RunningSelection.start(ids, top, logits.wide)
        for columns, all_rows in logits.tiles(tile):
            for rows in all_rows:
                values = logits.tile(rows, columns)
                for block, z in logits.blocks(values):
                    if scaling.outer is not None:
                        z.tanh_().mul_(scaling.outer)
                    block_rows = slice(rows.start + block.start, rows.start + block.stop)
                    _fold(z, ids[block_rows], columns, running.rows(block_rows))
        if shard is not None:
            running = running.joined(shard)
        ctx.save_for_backward(hidden, weight, bias, torch.cat([ids, running.top_ids - first], 1), running.lse)
        ctx.mark_non_differentiable(running.top_ids)
        ctx.scaling, ctx.tile, ctx.chosen = scaling, tile, ids.shape[1]
        return tuple(running)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, chosen: Tensor | None, top: Tensor | None, _: Any, lse: Tensor | None) -> Any:
        hidden, weight, bias, ids, saved_lse = ctx.saved_tensors
        upstream = torch.zeros(ids.shape, dtype=saved_lse.dtype, device=ids.device)
        if chosen is not None:
            upstream[:, : ctx.chosen] = chosen
        if top is not None:
            upstream[:, ctx.chosen :] = top
        logits = Logits(hidden.to(weight.dtype), weight, bias, ctx.scaling)
        out = Gradients.start(logits, NeededGradients(*ctx.needs_input_grad[:3]), weight.dtype)
        for columns, all_rows in logits.tiles(ctx.tile):
            total = WideSum(out.weight[columns], logits.wide) if out.weight is not None else None
            for rows in all_rows:
                mass = None if lse is None else lse[rows]
                grad = _gradient_of_tile(logits, rows, columns, ids[rows], upstream[rows], mass, saved_lse[rows])
                add_input_gradients(grad, logits, rows, columns, out)
                if total is not None:
                    total.add(grad.T, logits.hidden[rows])
            if total is not None:
                total.finish()
        return *out.rounded_like(hidden, weight, bias), *(None,) * 5


def _fold(z: Tensor, ids: Tensor, columns: slice, running: _RunningSelection) -> None:
    """Fold logits z [t, v] of these columns into the running values of their rows. Overwrites z."""
    is_inside, local = local_columns(ids, columns)
    running.chosen.copy_(torch.where(is_inside, z.gather(1, local), running.chosen))
    count = running.top.shape[1]
    if count:
        values, indices = z.topk(min(count, z.shape[1]), 1)
        values, order = torch.cat([running.top, values], 1).topk(count, 1)
        running.top_ids.copy_(torch.cat([running.top_ids, indices + columns.start], 1).gather(1, order))
        running.top.copy_(values)
    running.lse.copy_(torch.logaddexp(running.lse, log_sum_exp_(z)))


def _gradient_of_tile(
    logits: Logits, rows: slice, columns: slice, ids: Tensor, upstream: Tensor, mass: Tensor | None, lse: Tensor
) -> Tensor:
    """[t, v] gradient with respect to hidden @ weight.T + bias, in the weight's dtype. The next tile overwrites it.

    upstream: gradient of the logits of `ids`. mass: gradient of log-sum-exp, whose derivative is the softmax.
    """
    tile = logits.tile(rows, columns)
    inner, outer = logits.scaling
    for block, z in logits.blocks(tile):
        slope = None
        if outer is not None:
            slope = tanh_slope_(z).mul_(outer * inner)
            z.mul_(outer)
        if mass is None:
            z.zero_()
        else:
            z.sub_(lse[block, None]).exp_().mul_(mass[block, None])
        is_inside, local = local_columns(ids[block], columns)
        z.scatter_add_(1, local, upstream[block] * is_inside)
        through_transform_(z, slope, inner)
        if z.dtype != tile.dtype:
            tile[block] = z
    return tile
