"""Sequence parallelism: between blocks, each rank of tp has a part of a row's tokens. This shards the activations of
norms and residuals.

A block all-gathers its input and reduce-scatters its output. Together they send as many bytes as an all-reduce of the
output (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). B batch, T tokens of a row, H hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.ops.communicator import Communicator
from weft.ops.recompute import reuse_in_recompute


class GatherTokens(torch.autograd.Function):
    """All-gather, [B, T / ranks, H] -> [B, T, H]. Backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return reuse_in_recompute(lambda: gather_tokens(x, ranks), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(grad, ctx.ranks), None


class ReduceScatterTokens(torch.autograd.Function):
    """Reduce-scatter, [B, T, H] -> [B, T / ranks, H]: the sum over ranks, at this rank's tokens. Backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return reuse_in_recompute(lambda: reduce_scatter_tokens(x, ranks), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(grad, ctx.ranks), None


class _JoinTokens(torch.autograd.Function):
    """All-gather, [B, T / ranks, H] -> [B, T, H], before computations that all ranks repeat. Every rank then has the
    complete gradient, so backward selects the gradient of this rank's tokens and sums nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, rank: int) -> Tensor:
        ctx.rank, ctx.tokens = rank, x.shape[1]
        return gather_tokens(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(1, ctx.rank * ctx.tokens, ctx.tokens), None, None


def gather_tokens(x: Tensor, ranks: Communicator) -> Tensor:
    """[B, T, H]: the tokens of all ranks, in order. x: [B, T / ranks, H]. Collective."""
    return torch.cat(ranks.all_gather(x.contiguous()), 1)


def reduce_scatter_tokens(x: Tensor, ranks: Communicator) -> Tensor:
    """[B, T / ranks, H]: the sum over ranks, at this rank's tokens. x: [B, T, H]. Collective."""
    return ranks.reduce_scatter(x.transpose(0, 1)).transpose(0, 1)


def join_last_states(base: nn.Module, ranks: Communicator, rank: int) -> None:
    """Hook a base model to return the last hidden states of all tokens instead of this rank's tokens."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = _JoinTokens.apply(output.last_hidden_state, ranks, rank)
        return output

    base.register_forward_hook(hook)
