"""Sequence parallelism: between blocks, the ranks of tp divide a row's tokens, and with them the activations of norms
and residuals.

A block all-gathers its input and reduce-scatters its output, which together send as much as an all-reduce of the output
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). B batch, T tokens of a row, H hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.ops.communicator import Communicator
from weft.ops.recompute import reuse_in_recompute


class GatherTokens(torch.autograd.Function):
    """[B, T / ranks, H] -> [B, T, H]; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return reuse_in_recompute(lambda: gather_tokens(x, ranks), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(grad, ctx.ranks), None


class ReduceScatterTokens(torch.autograd.Function):
    """[B, T, H] -> this rank's tokens of the sum, [B, T / ranks, H]; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return reuse_in_recompute(lambda: reduce_scatter_tokens(x, ranks), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(grad, ctx.ranks), None


class _JoinTokens(torch.autograd.Function):
    """[B, T / ranks, H] -> [B, T, H], for computations that all ranks repeat: every rank then has the whole gradient,
    and backward takes its own tokens' part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, rank: int) -> Tensor:
        ctx.rank, ctx.tokens = rank, x.shape[1]
        return gather_tokens(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(1, ctx.rank * ctx.tokens, ctx.tokens), None, None


def gather_tokens(x: Tensor, ranks: Communicator) -> Tensor:
    """[B, T, H]: all ranks' tokens in order."""
    return torch.cat(ranks.all_gather(x.contiguous()), 1)


def reduce_scatter_tokens(x: Tensor, ranks: Communicator) -> Tensor:
    """[B, T / ranks, H]: this rank's tokens of the sum."""
    return ranks.reduce_scatter(x.transpose(0, 1)).transpose(0, 1)


def join_last_states(base: nn.Module, ranks: Communicator, rank: int) -> None:
    """Make a base model return the last hidden states of all tokens, instead of this rank's."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = _JoinTokens.apply(output.last_hidden_state, ranks, rank)
        return output

    base.register_forward_hook(hook)
