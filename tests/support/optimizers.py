"""Optimizers as somebody else might have written them, some of which cannot be used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class _Plain(torch.optim.Optimizer):
    """A loop over the parameters; a subclass says what is to be done with one."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(parameter, parameter.grad, self.state[parameter], group)

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.add_(gradient, alpha=-group["lr"])


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), with a count that is a number of Python, and a bf16 momentum."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = {"count": 0, "average": torch.zeros_like(parameter, dtype=torch.bfloat16)}
                state, gradient = self.state[parameter], parameter.grad
                state["count"] += 1
                average = state["average"].float()
                direction = (average * first + gradient * (1 - first)).sign_() / state["count"] ** 0.1
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["average"].copy_(average * second + gradient * (1 - second))


class NoDecay(torch.optim.Optimizer):
    """Takes no weight decay."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


class Normed(_Plain):
    """Divides by the norm of the whole gradient, as LARS and LAMB do."""

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.add_(gradient / gradient.norm(), alpha=-group["lr"])


class Rows(_Plain):
    """Keeps one number for each row."""

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rows = gradient.square().reshape(len(gradient), -1).mean(1)
        state["rows"] = state.get("rows", torch.zeros_like(rows)) * 0.9 + rows
        weight.add_(gradient / (1 + state["rows"].view(-1, *[1] * (gradient.ndim - 1))), alpha=-group["lr"])


class Ramp(_Plain):
    """Counts its steps in its groups, from the first one on."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.add_(gradient / group["step"], alpha=-group["lr"])


class Summed(_Plain):
    """Adds up its rates in its groups, which differ where rates do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["rates"] = group.get("rates", 0.0) + group["lr"]
        super().step()

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.add_(gradient / (1 + group["rates"]), alpha=-group["lr"])


class JointRule(Ramp):
    """Keeps the largest gradient that it has seen in its groups."""

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["largest"] = max(group.get("largest", 0.0), float(gradient.abs().max()))
        super().one(weight, gradient, state, group)


class Clipped(_Plain):
    """Clips what it is given by the norm of all of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class TensorRate(_Plain):
    """Wants its learning rate to stay the tensor that it made of it, as torchao's do."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        for group in self.param_groups:
            group["lr"] = torch.tensor(lr)

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert isinstance(group["lr"], torch.Tensor)
        weight.sub_(gradient * group["lr"])


class Counts(_Plain):
    """Counts its steps in itself, where no checkpoint looks."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.add_(gradient / self.steps, alpha=-group["lr"])


class Remembers(_Plain):
    """Keeps a list."""

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("norms", []).append(float(gradient.norm()))
        super().one(weight, gradient, state, group)


class OwnRate(_Plain):
    """Steps at the rate that it was built with."""

    def one(self, weight: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.add_(gradient, alpha=-self.defaults["lr"])


def not_a_class() -> None:
    """Something else that can be imported."""
