"""The arithmetic of AdamW with few bits, on blocks [n, 256]: operation by operation, or compiled into one pass.

Every operation is rounded by itself, as IEEE 754 says, and torch is told not to contract a product and a sum. So the
compiled pass and single operations give the same bits, and it does not matter on which rank which of them runs.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.launch.simulated import is_simulated

BLOCK = 256
_SIGNED, _POSITIVE = 127.0, 255.0
_BITS = 0xFFFF
_TINY = torch.finfo(torch.float32).tiny
# Elements of a rank, per kind of device, from which on a compiled pass earns the seconds that torch takes to make it;
# and blocks of a tensor.
_COMPILED_FROM, _FEWEST_BLOCKS = {"cpu": 1 << 26, "cuda": 1 << 24}, 64

Step = Callable[..., None]


def find_step(device: torch.device, elements: int) -> Step:
    """`step_blocks`, compiled if a rank with this many elements gains by it and the machine has a compiler."""
    if is_simulated() or elements < _COMPILED_FROM.get(device.type, elements + 1):
        return step_blocks
    compiler = find_spec("triton") if device.type == "cuda" else shutil.which(os.environ.get("CXX", "g++"))
    return step_blocks if compiler is None else _compiled()


class CompiledStep:
    """`step_blocks`, compiled. It is tried on a few blocks of each combination of dtypes. Where it does not run, or has
    other bits, this warns and computes by single operations from then on."""

    def __init__(self) -> None:
        exact = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
        options_of_torch = torch._inductor.list_options()
        options = {name: value for name, value in exact.items() if name in options_of_torch}
        self._compiled = torch.compile(step_blocks, dynamic=True, fullgraph=True, options=options)
        self._failure = ""
        self._tried: set[tuple[Any, ...]] = set()

    def __call__(self, weights: Tensor, *arguments: Any) -> None:
        """Step blocks, as `step_blocks`."""
        if self._failure or len(weights) < _FEWEST_BLOCKS:
            step_blocks(weights, *arguments)
            return
        kind = (weights.device, *(x.dtype if isinstance(x, Tensor) else x for x in (weights, *arguments)))
        if kind not in self._tried:
            self._tried.add(kind)
            self._try(weights, *arguments)
        (step_blocks if self._failure else self._compiled)(weights, *arguments)

    def _try(self, *arguments: Any) -> None:
        expected, actual = (
            [_first_blocks(x, len(arguments[0])) if isinstance(x, Tensor) else x for x in arguments] for _ in range(2)
        )
        step_blocks(*expected)
        try:
            self._compiled(*actual)
        except Exception as error:  # from a compiler, a driver, or a kernel that this device lacks
            self._failure = f"it does not run ({type(error).__name__}: {error})"
        else:
            pairs = zip(expected, actual, strict=True)
            if not all(a.equal(b) for a, b in pairs if isinstance(a, Tensor)):
                self._failure = "it gives other bits than single operations"
        if self._failure:
            device = arguments[0].device
            warnings.warn(f"the optimizer steps without a compiled pass on {device}: {self._failure}", stacklevel=2)


def _first_blocks(x: Tensor, blocks: int) -> Tensor:
    """A copy of what belongs to the first blocks in an argument of `step_blocks`."""
    axis = next((axis for axis, size in enumerate(x.shape) if size == blocks), None)
    return (x if axis is None else x.narrow(axis, 0, _FEWEST_BLOCKS)).clone()


@functools.cache
def _compiled() -> Step:
    return CompiledStep()


def step_blocks(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    first_scales: Tensor | None,
    second_scales: Tensor | None,
    shared: Tensor | None,
    compensation: Tensor | None,
    places: Tensor,
    key: Tensor,
    factors: Tensor,
    stochastic: bool,
) -> None:
    """Step blocks [n, 256] of weights, and their state, in place.

    first, second: the moments, or their codes if there are scales [n]. shared: [2, n] the largest new exp_avg and
    sqrt(exp_avg_sq) of blocks that several ranks hold, below 0 for others. compensation: what Kahan's rounding keeps.
    places, key: for `random_words`. factors: fp32 [8], of `factors_of`. stochastic: round bf16 weights by random bits.
    """
    decay, size, correction, eps, *averages = factors.unbind()
    scales = None
    if first_scales is not None and second_scales is not None:
        scales = first_scales[:, None], second_scales[:, None]
    m, v = new_moments(first, second, gradients, scales, averages)
    root = exact_root(v)
    new = weights.float()
    if compensation is not None:
        new = new + compensation.float()
    new = new.mul(decay).sub_(m.div(root.div(correction).add_(eps)).mul_(size))
    words = random_words(places, key) if stochastic or scales is not None else None
    if stochastic and words is not None:
        bits = new.view(torch.int32).add((words >> 16).bitwise_and_(_BITS)).bitwise_and_(~_BITS)
        rounded = bits.view(torch.float32).to(weights.dtype)
    else:
        rounded = new.to(weights.dtype)
    weights.copy_(rounded)
    if compensation is not None:
        compensation.copy_(new.sub_(rounded.float()))
    if scales is None or words is None or first_scales is None or second_scales is None:
        first.copy_(m)
        second.copy_(v)
        return
    magnitude = m.abs()
    largest, largest_root = magnitude.amax(1), root.amax(1)
    if shared is not None:
        largest = torch.where(shared[0] < 0, largest, shared[0])
        largest_root = torch.where(shared[1] < 0, largest_root, shared[1])
    first_scales.copy_(largest)
    second_scales.copy_(largest_root)
    codes = exact_root(magnitude.div_(largest.clamp(min=_TINY)[:, None]))
    first.copy_(codes.mul_(_SIGNED).round_().copysign_(m))
    random = words.bitwise_and_(_BITS).to(torch.float32).mul_(1 / (_BITS + 1))
    codes = exact_root(root.div(largest_root.clamp(min=_TINY)[:, None])).mul_(_POSITIVE).add_(random).floor_()
    second.copy_(torch.maximum(codes, (root > 0).to(torch.float32)).clamp_(max=_POSITIVE))


def new_moments(
    first: Tensor, second: Tensor, gradients: Tensor, scales: tuple[Tensor, Tensor] | None, averages: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Both moments after a step, fp32. scales: of the codes, which broadcast over them. averages: beta1, 1 - beta1,
    beta2, 1 - beta2."""
    beta1, rest1, beta2, rest2 = averages
    m, v, g = first.to(torch.float32, copy=True), second.to(torch.float32, copy=True), gradients.float()
    if scales is not None:
        m.mul_(m.abs()).mul_(scales[0] * (1 / _SIGNED**2))
        v.mul_(v).mul_(scales[1] * (1 / _POSITIVE**2))
        v.mul_(v)
    m.mul_(beta1).add_(g * rest1)
    v.mul_(beta2).add_((g * g).mul_(rest2))
    return m, v


def exact_root(x: Tensor) -> Tensor:
    """The square root of fp32, rounded correctly: a new tensor. On a CPU numpy's, because torch's is MKL's, which is
    off by one bit for one element in five (torch 2.13)."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or is_simulated():
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.numpy()))


def random_words(places: Tensor, key: Tensor) -> Tensor:
    """[n, 256] int32, of uniform bits that depend on `key` and on each element's place in the whole tensor.

    places: int32 [n], of each block's first element, modulo 2^32. key: an int32. A multiplicative hash with xor-shifts
    (after C. Wellons' `lowbias32`).
    """
    x = places[:, None] + torch.arange(BLOCK, dtype=torch.int32, device=places.device)
    x.bitwise_xor_(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, places: int) -> Tensor:
    """x >> places without its sign, which torch would shift in: a new tensor."""
    return (x >> places).bitwise_and_((1 << (32 - places)) - 1)
