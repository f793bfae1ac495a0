"""The exchange of expert parallelism: rows of hidden states are sent to the ranks of their experts, and back.

T tokens, K experts chosen per token, S = T K rows of this rank, sorted by expert. R rows that this rank's local experts
compute. E experts, P ranks, H width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.launch.simulated import read
from weft.ops.communicator import Communicator, all_to_all
from weft.ops.kernel_trial import try_kernels, uses_kernels
from weft.ops.recompute import reuse_in_recompute


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of a layer over the ranks of mesh.ep. rank: this rank's index. experts: number of experts on each
    rank, in order. ranks: collectives over mesh.ep."""

    rank: int
    experts: tuple[int, ...]
    ranks: Communicator

    @property
    def num_local(self) -> int:
        """Number of experts on this rank."""
        return self.experts[self.rank]


@dataclass(frozen=True)
class Dispatched:
    """Rows on the rank of their experts.

    rows_RH: sorted by expert. If no row arrived: one row of zeros, for the first local expert.
    ends: index after the last row of each local expert.
    order_R: permutation from the order of arrival, rank by rank, to the order by expert. Empty if no row arrived.
    sent, received: number of rows to and from each rank.
    weights_R: router weights of the rows, if dispatch() was given weights.
    """

    rows_RH: Tensor
    ends: Tensor
    order_R: Tensor
    sent: list[int]
    received: list[int]
    weights_R: Tensor | None = None


def sort_by_expert(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """([S] permutation that sorts the choices by expert, [experts] int32 index after each expert's last choice)."""
    expert_S = chosen_TK.reshape(-1)
    order_S = expert_S.argsort(stable=True)
    # Not a histogram: on CUDA its order of additions is undefined.
    every_E = torch.arange(experts, device=expert_S.device)
    return order_S, torch.searchsorted(expert_S[order_S], every_E, right=True).to(torch.int32)


def rows_of(hidden_TH: Tensor, order_S: Tensor, chosen: int) -> Tensor:
    """[S, H]: each token's hidden state repeated for each of its `chosen` experts, permuted by `order_S`."""
    rows: Tensor = _Rows.apply(hidden_TH, order_S, chosen)
    return rows


def sum_of_choices(rows_SH: Tensor, order_S: Tensor, chosen: int) -> Tensor:
    """[T, H]: for each token, the sum of its `chosen` rows. rows_SH: in the order `order_S`. The adjoint of
    `rows_of`."""
    out: Tensor = _SumOfChoices.apply(rows_SH, order_S, chosen)
    return out


def permuted(rows: Tensor, order: Tensor) -> Tensor:
    """rows[order], for a permutation `order`. Backward applies the inverse permutation."""
    out: Tensor = _Permute.apply(rows, order)
    return out


@torch.compiler.disable
def dispatch(rows_SH: Tensor, ends_E: Tensor, axis: ExpertPlacement, weights_S: Tensor | None = None) -> Dispatched:
    """Send rows, sorted by expert, and their weights to the ranks of their experts. Collective over the axis.

    ends_E: index after the last row of each expert. The ranks first exchange the number of rows of each expert. The
    host waits for these numbers, because it needs the sizes of the second exchange. A recomputed layer reuses the
    numbers of its forward."""
    size = len(axis.experts)
    received_PE, sent, received = reuse_in_recompute(lambda: _exchange_counts(ends_E, len(rows_SH), axis))
    rows = all_to_all(rows_SH, axis.ranks, sent, received)
    expert_R = torch.arange(axis.num_local, device=rows.device).repeat(size)
    expert_R = expert_R.repeat_interleave(received_PE.flatten(), output_size=sum(received))
    order_R = expert_R.argsort(stable=True)
    ends = received_PE.sum(0).cumsum(0).to(torch.int32)
    rows_RH, weights_R = permuted(rows, order_R), None
    if weights_S is not None:
        weights_R = permuted(all_to_all(weights_S, axis.ranks, sent, received), order_R)
    if not len(rows_RH):  # the weight gradient of a grouped matmul without rows fails or hangs (weft/upstream.py)
        rows_RH, ends = F.pad(rows_RH, (0, 0, 0, 1)), torch.ones_like(ends)
        weights_R = None if weights_R is None else F.pad(weights_R, (0, 1))
    return Dispatched(rows_RH, ends, order_R, sent, received, weights_R)


def _exchange_counts(ends_E: Tensor, rows: int, axis: ExpertPlacement) -> tuple[Tensor, list[int], list[int]]:
    """([P, local experts] number of rows from each rank for each expert, rows to each rank, rows from each rank)."""
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    size = len(axis.experts)
    received_PE = axis.ranks.all_to_all(counts_E, axis.experts, [axis.num_local] * size).view(size, axis.num_local)
    sent_P = torch.stack([counts.sum() for counts in counts_E.split(list(axis.experts))])
    sent, received = read(torch.stack([sent_P, received_PE.sum(1)]), lambda: _even(rows, axis))
    return received_PE, sent, received


def _even(rows: int, axis: ExpertPlacement) -> list[list[int]]:
    """[rows to each rank, rows from each rank] if all experts get equally many, for simulations. rows: rows per
    rank."""
    experts, first = sum(axis.experts), 0
    sent = []
    for count in axis.experts:
        sent.append(rows * (first + count) // experts - rows * first // experts)
        first += count
    return [sent, [sent[axis.rank]] * len(sent)]


@torch.compiler.disable
def combine(rows_RH: Tensor, dispatched: Dispatched, axis: ExpertPlacement) -> Tensor:
    """[S, H]: the experts' outputs, sent back to the ranks of their tokens, in the order of dispatch(). Collective."""
    by_arrival = permuted(rows_RH[: len(dispatched.order_R)], inverse(dispatched.order_R))
    return all_to_all(by_arrival, axis.ranks, dispatched.received, dispatched.sent)


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, order_S: Tensor, chosen: int) -> Tensor:
        ctx.order, ctx.chosen = order_S, chosen
        return hidden_TH.index_select(0, order_S // chosen)

    @staticmethod
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor, None, None]:
        return _gathered_sum(grad_SH, ctx.order, ctx.chosen), None, None


class _SumOfChoices(torch.autograd.Function):
    """The order is an attribute of ctx and not a saved tensor. So this node saves no tensor, and a recomputed layer can
    stop before the last matmul of the experts."""

    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, order_S: Tensor, chosen: int) -> Tensor:
        ctx.order, ctx.chosen = order_S, chosen
        return _gathered_sum(rows_SH, order_S, chosen)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        return grad_TH.index_select(0, ctx.order // ctx.chosen), None, None


def _gathered_sum(rows_SH: Tensor, order_S: Tensor, chosen: int) -> Tensor:
    """[T, H]: the sum of each token's rows. It reads each row once and adds in fp32 in the order of choices, without
    atomics."""
    rows_SH, rows_TK = rows_SH.detach(), inverse(order_S).view(-1, chosen)
    if uses_kernels(rows_SH, check_kernel):
        return torch.ops.weft.sum_rows(rows_SH.contiguous(), rows_TK)
    return _plain_sum(rows_SH, rows_TK)


def _plain_sum(rows_SH: Tensor, indices_TK: Tensor) -> Tensor:
    return F.embedding_bag(indices_TK, rows_SH, mode="sum")


# torch's embedding_bag takes 0.73 ms on an H200 for 16,384 tokens x 8 rows of 2,048 in bf16, whose bytes take 0.14 ms.
# The kernel is registered as an operator, so that simulations run without Triton.
@torch.library.custom_op("weft::sum_rows", mutates_args=())
def _sum_rows(rows: Tensor, indices: Tensor) -> Tensor:
    from weft.ops import expert_kernels

    out = rows.new_empty(len(indices), rows.shape[1])
    expert_kernels.sum_rows(rows, indices, out)
    return out


@_sum_rows.register_fake
def _(rows: Tensor, indices: Tensor) -> Tensor:
    return rows.new_empty(len(indices), rows.shape[1])


@functools.cache
def check_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on this device and equals torch's operations in fp32, within the rounding of `dtype`."""
    return try_kernels("Outputs of experts are added", device, functools.partial(_largest_difference, device, dtype))


def _largest_difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference between the kernel and torch's operation in fp32, as a multiple of the tolerance for
    rounding to `dtype`. Infinite if a result is not finite."""
    generator, tokens, chosen = torch.Generator().manual_seed(0), 5, 3
    rows = torch.randn(tokens * chosen, 1500, generator=generator).to(device, dtype)
    indices = torch.randperm(len(rows), generator=generator).view(tokens, chosen).to(device)
    result, truth = _sum_rows(rows, indices).float(), _plain_sum(rows.float(), indices)
    difference = ((result - truth).abs() / (torch.finfo(dtype).eps * (truth.abs() + 1e-3))).max()
    return float(difference) if bool(difference.isfinite()) else float("inf")


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, inverse(ctx.order)), None
