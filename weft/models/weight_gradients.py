"""Gradients of linear layers' weights, computed after the backward of their row instead of in it.

A later stage of a pipeline waits for gradients of hidden states, and nobody for those of weights (zero bubble: Qi et
al. 2023, arXiv:2401.10241). X what a layer takes and Y what it gives, each [..., width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Delayed = list[Callable[[], None]]  # each adds to the gradient of one weight


class WeightGradients:
    """Hooks of a model's linear layers. Within a forward, a layer computes with a detached weight, and its backward
    notes what the weight's gradient is made of. Other weights get theirs in backward, as ever."""

    def __init__(self, module: nn.Module) -> None:
        """After whatever else hooks linear layers: what other hooks make of inputs and outputs is not the layer's."""
        self._noted: Delayed = []
        self._within: list[tuple[nn.Module, nn.Parameter]] = []  # a recomputed layer may be inside of another
        for child in module.modules():
            if type(child) is nn.Linear:
                child.register_forward_pre_hook(self._enter)
                child.register_forward_hook(self._leave, prepend=True, always_call=True)

    def take(self) -> Delayed:
        """What backwards have noted since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def _enter(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        weight = linear._parameters["weight"]
        assert weight is not None
        is_whole = weight.is_leaf  # and not a slice of one, in a part of a mixer
        if is_whole and weight.requires_grad and torch.is_grad_enabled() and args[0].requires_grad:
            self._within.append((linear, weight))
            linear._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)

    def _leave(self, linear: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        """output: None where the forward has ended with an exception, as recomputation does."""
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
    """What a layer gives, unchanged."""

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
