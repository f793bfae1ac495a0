"""Runs a module that maps each token independently over tiles of tokens. Only one tile's intermediate results exist at
a time, in forward and in backward.

Backward runs each tile again and sums the weights' gradients over all tiles before it returns them. So FSDP gathers and
reduces the module's unit once, as without tiles. (Arctic long sequence training, arXiv:2506.13996, has a backward for
each tile.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.ops.recompute import keeping_nothing


def run_in_tiles(forward: Callable[[Tensor], Tensor], module: nn.Module, tile: int, x: Tensor) -> Tensor:
    """forward(x), computed for `tile` tokens at a time. x: [..., tokens, width]. forward: a forward of `module`, which
    uses the module's parameters."""
    if x.shape[-2] <= tile:
        return forward(x)
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or weights):
        return _outputs(forward, tile, x)
    # A separate node saves x before the tiles run, so that the recomputation of a layer can stop before the tiles.
    saved = _Saved.apply(x) if x.requires_grad else x
    out: Tensor = _Tiles.apply(forward, tile, saved.grad_fn, saved, *weights)
    return out


def _outputs(forward: Callable[[Tensor], Tensor], tile: int, x: Tensor) -> Tensor:
    with torch.no_grad(), keeping_nothing():
        return torch.cat([forward(tokens) for tokens in x.split(tile, -2)], -2)


class _Saved(torch.autograd.Function):
    """The identity. Its node saves the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[Tensor], Tensor], tile: int, node: Any, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.run, ctx.tile, ctx.node, ctx.weights = forward, tile, node, weights
        if node is None:
            ctx.save_for_backward(x)
        return _outputs(forward, tile, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors if ctx.node is None else ctx.node.saved_tensors
        inputs, sums = list[Tensor](), Sums(ctx.weights)
        for tokens, gradient in zip(x.split(ctx.tile, -2), gradients[0].split(ctx.tile, -2), strict=True):
            tokens = tokens.detach().requires_grad_(ctx.node is not None)
            with torch.enable_grad():
                out = ctx.run(tokens)
            leaves = ([tokens] if tokens.requires_grad else []) + list(ctx.weights)
            tile_gradients = torch.autograd.grad(out, leaves, gradient, allow_unused=True)
            if tokens.requires_grad:
                inputs.append(tile_gradients[0])
            sums.add(tile_gradients[len(tile_gradients) - len(ctx.weights) :])
        return None, None, None, torch.cat(inputs, -2) if inputs else None, *sums.totals()


class Sums:
    """Sums of the weights' gradients over tiles, in fp32 or fp64."""

    def __init__(self, weights: tuple[Tensor, ...]) -> None:
        self._dtypes = [weight.dtype for weight in weights]
        self._totals: list[Tensor | None] = [None] * len(weights)

    def add(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Add a tile's gradients, one per weight. None if the tile gives the weight no gradient."""
        for index, gradient in enumerate(gradients):
            total = self._totals[index]
            if gradient is not None:
                wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                self._totals[index] = wide if total is None else total.add_(gradient)

    def totals(self) -> list[Tensor | None]:
        """The sums, in the weights' dtypes."""
        pairs = zip(self._totals, self._dtypes, strict=True)
        return [None if total is None else total.to(dtype) for total, dtype in pairs]
