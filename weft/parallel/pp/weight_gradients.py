"""Delays the weight gradients of linear layers: they are computed after the backward of a row, not during it.

The previous stage of a pipeline waits for gradients of hidden states. No stage waits for gradients of weights (zero
bubble: Qi et al. 2023, arXiv:2401.10241). x, y: a layer's input and output, [..., width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Delayed = list[Callable[[], None]]  # each function adds to the gradient of one weight


class WeightGradients:
    """Hooks on a model's linear layers. In forward, a layer computes with a detached weight. Its backward records how
    to compute the weight's gradient. Other modules get their gradients in backward, as usual."""

    def __init__(self, module: nn.Module) -> None:
        """Create this after all other hooks on linear layers, so that they get the layer's original input and
        output."""
        self._recorded: Delayed = []
        self._active: list[tuple[nn.Module, nn.Parameter]] = []  # a stack, because recomputed layers may nest
        for child in module.modules():
            if type(child) is nn.Linear:
                child.register_forward_pre_hook(self._enter)
                child.register_forward_hook(self._leave, prepend=True, always_call=True)

    def take(self) -> Delayed:
        """Return and clear the gradients that backwards have recorded since the last call."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def _enter(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        weight = linear._parameters.get("weight")
        if weight is None:  # quantised weights are frozen
            return
        # In a shard of a mixer, the weight is a slice and not a leaf tensor: its gradient must go through autograd.
        if weight.is_leaf and weight.requires_grad and torch.is_grad_enabled() and args[0].requires_grad:
            self._active.append((linear, weight))
            linear._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)

    def _leave(self, linear: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        """output: None if the forward raised the exception that ends a recomputation early."""
        if not self._active or self._active[-1][0] is not linear:
            return output
        _, weight = self._active.pop()
        linear._parameters["weight"] = weight
        return None if output is None else _RecordGradient.apply(output, args[0].detach(), weight, self._record)

    def _record(self, weight: nn.Parameter, x: Tensor, y_grad: Tensor) -> None:
        def add() -> None:
            gradient = y_grad.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

        self._recorded.append(add)


class _RecordGradient(torch.autograd.Function):
    """The identity on a layer's output. Its backward calls `record` for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: nn.Parameter, record: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.record = weight, record
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.record(ctx.weight, x, gradients[0])
        return gradients[0], None, None, None
