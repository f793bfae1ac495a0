"""Gradients of linear layers' weights, computed after the backward of their row instead of in it.

The previous stage of a pipeline waits for gradients of hidden states, but no stage waits for gradients of weights (zero
bubble: Qi et al. 2023, arXiv:2401.10241). x, y: a layer's input and output, [..., width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Delayed = list[Callable[[], None]]  # each adds to the gradient of one weight


class WeightGradients:
    """Hooks on a model's linear layers. In forward, a layer computes with a detached weight; its backward notes how to
    compute the weight's gradient. Weights of other modules get their gradients in backward as usual."""

    def __init__(self, module: nn.Module) -> None:
        """Must come after all other hooks on linear layers, so that these see the layer's own input and output."""
        self._noted: Delayed = []
        self._within: list[tuple[nn.Module, nn.Parameter]] = []  # a stack, because recomputed layers may nest
        for child in module.modules():
            if type(child) is nn.Linear:
                child.register_forward_pre_hook(self._enter)
                child.register_forward_hook(self._leave, prepend=True, always_call=True)

    def take(self) -> Delayed:
        """The gradients noted by backwards since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def _enter(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        weight = linear._parameters.get("weight")
        if weight is None:  # it is quantised, and frozen
            return
        is_whole = weight.is_leaf  # not a slice, as in a part of a mixer
        if is_whole and weight.requires_grad and torch.is_grad_enabled() and args[0].requires_grad:
            self._within.append((linear, weight))
            linear._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)

    def _leave(self, linear: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        """output: None if the forward raised, as recomputation does when it stops early."""
        if not self._within or self._within[-1][0] is not linear:
            return output
        _, weight = self._within.pop()
        linear._parameters["weight"] = weight
        return None if output is None else _Note.apply(output, args[0].detach(), weight, self._note)

    def _note(self, weight: nn.Parameter, x: Tensor, y_grad: Tensor) -> None:
        def add() -> None:
            gradient = y_grad.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

        self._noted.append(add)


class _Note(torch.autograd.Function):
    """Identity on a layer's output; its backward notes the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: nn.Parameter, note: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.note = weight, note
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.note(ctx.weight, x, gradients[0])
        return gradients[0], None, None, None
