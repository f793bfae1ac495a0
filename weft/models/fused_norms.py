"""RMSNorm with torch's fused kernel: replaces the elementwise operations of stock modules, which read and write a row
about eight times, by `torch.nn.functional.rms_norm`.

A class is replaced only if both give the same values and gradients on random rows, so another formula (Gemma's 1 +
weight, a gate, a group of channels) stays unchanged.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.launch.simulated import is_simulated
from weft.ops.shapes import shapes_of_norm

# fp32 rounding of a sum of squares over a row; gradients are also sums over the rows.
_ALLOWED = 2e-5
EPSILON = ("variance_epsilon", "eps")  # its names in stock classes, in the order in which forward looks


def fuse_norms(module: nn.Module) -> set[str]:
    """Make RMSNorms below `module` use torch's fused kernel, if its results are equal; returns the names of their
    classes. Parameters, names and hooks stay. Call it before forward is wrapped; parameters may be on meta."""
    is_equal: dict[tuple[Any, float, int], bool] = {}
    fused: set[str] = set()
    for child in module.modules():
        epsilon = _epsilon(child)
        if epsilon is None:
            continue
        settings: tuple[Any, float, int] = (type(child), epsilon, child.weight.numel())
        if settings not in is_equal:
            is_equal[settings] = is_root_mean_square(child, epsilon)
        if is_equal[settings]:
            fused.add(type(child).__name__)
            child.__class__ = _fused(settings[0])
    return fused


class FusedNorm(nn.Module):
    """A mixin for a class of RMSNorm. It is a class, not a forward per module, because compiled layers share graphs
    only if their modules have the same class."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype or x.shape[-1:] != self.weight.shape:
            return super().forward(x)  # promotes dtypes or broadcasts
        if not torch.compiler.is_compiling() and (x.is_meta or is_simulated()):
            return shapes_of_norm(x, self.weight)
        epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return functional.rms_norm(x, self.weight.shape, self.weight, epsilon)


@functools.cache
def _fused(kind: Any) -> Any:
    return type(kind.__name__, (FusedNorm, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of a module that is an RMSNorm by name, parameters and arguments; None for others."""
    if "RMSNorm" not in type(module).__name__ or isinstance(module, nn.RMSNorm | FusedNorm):
        return None
    if "forward" in vars(module):
        return None
    named = dict(module.named_parameters())
    if [*named] != ["weight"] or named["weight"].ndim != 1 or any(True for _ in module.buffers()):
        return None
    parameters = inspect.signature(type(module).forward).parameters.values()
    if len(parameters) != 2 or any(
        parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters
    ):
        return None
    return next((value for name in EPSILON if isinstance(value := getattr(module, name, None), float)), None)


def is_root_mean_square(module: nn.Module, epsilon: float) -> bool:
    """Whether a module computes x / sqrt(mean(x^2) + epsilon) * weight, in values and gradients, in fp32."""
    generator = torch.Generator().manual_seed(0)
    width = module.weight.numel()
    rows = torch.randn(3, 4, width, generator=generator)
    rows[0] *= epsilon**0.5  # small inputs, for which epsilon matters
    rows[1] *= 100.0
    weight = torch.randn(width, generator=generator)
    upstream = torch.randn(rows.shape, generator=generator)
    probe = copy.copy(module)  # without the parameter, which may be on meta
    probe._parameters = {"weight": nn.Parameter(weight.clone())}

    def results(run: Callable[[Tensor], Tensor], weight: Tensor) -> list[Tensor]:
        x = rows.clone().requires_grad_()
        out = run(x)
        return [out, *torch.autograd.grad(out, [x, weight], upstream)]

    with torch.enable_grad():
        weight.requires_grad_()
        try:
            expected = results(partial(type(module).forward, probe), probe.weight)
        except Exception:  # another formula
            return False
        fused = results(lambda x: functional.rms_norm(x, (width,), weight, epsilon), weight)
    return all(_is_close(a, b) for a, b in zip(fused, expected, strict=True))


def _is_close(result: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    rows, expected_rows = result.detach().reshape(-1, result.shape[-1]), expected.detach().reshape(-1, result.shape[-1])
    return bool(((rows - expected_rows).abs().amax(1) <= _ALLOWED * expected_rows.abs().amax(1)).all())
