"""The arithmetic of AdamW with low-bit state, on blocks [n, 256]: as single operations, or compiled into one kernel.

Every operation is rounded separately, as IEEE 754 defines, and the compiler must not contract a multiply and an add. So
the compiled kernel and single operations give bitwise equal results. Ranks may use different implementations.
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
# The number of elements on a rank, by type of device, above which the compiled kernel saves more time than torch needs
# to compile it; and the fewest blocks of a tensor for which it runs.
_COMPILED_FROM, _FEWEST_BLOCKS = {"cpu": 1 << 26, "cuda": 1 << 24}, 64

Step = Callable[..., None]


def find_step(device: torch.device, elements: int) -> Step:
    """`step_blocks`, compiled if a rank with this many elements benefits and the machine has a compiler."""
    if is_simulated() or elements < _COMPILED_FROM.get(device.type, elements + 1):
        return step_blocks
    compiler = find_spec("triton") if device.type == "cuda" else shutil.which(os.environ.get("CXX", "g++"))
    return step_blocks if compiler is None else _compiled()


class CompiledStep:
    """`step_blocks`, compiled.

    The first call with each combination of dtypes compares a few blocks with single operations. If the kernel fails to
    run, or if a bit differs, this object warns and uses single operations from then on.
    """

    def __init__(self) -> None:
        exact = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
        options_of_torch = torch._inductor.list_options()
        options = {name: value for name, value in exact.items() if name in options_of_torch}
        self._compiled = torch.compile(step_blocks, dynamic=True, fullgraph=True, options=options)
        self._failure = ""
        self._tried: set[tuple[Any, ...]] = set()

    def __call__(self, weights: Tensor, *arguments: Any) -> None:
        """Update blocks. The arguments are those of `step_blocks`."""
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
        except Exception as error:  # of the compiler, the driver, or a kernel that this device does not support
            self._failure = f"it does not run ({type(error).__name__}: {error})"
        else:
            pairs = zip(expected, actual, strict=True)
            if not all(a.equal(b) for a, b in pairs if isinstance(a, Tensor)):
                self._failure = "its results differ from single operations"
        if self._failure:
            device = arguments[0].device
            warnings.warn(f"the optimizer does not use its compiled kernel on {device}: {self._failure}", stacklevel=2)


def _first_blocks(x: Tensor, blocks: int) -> Tensor:
    """A copy of an argument of `step_blocks`, cut to the first blocks."""
    dim = next((dim for dim, size in enumerate(x.shape) if size == blocks), None)
    return (x if dim is None else x.narrow(dim, 0, _FEWEST_BLOCKS)).clone()


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
    """Update blocks [n, 256] of weights and their optimizer state, in place.

    first, second: the moments [n, 256], or their 8-bit codes. first_scales, second_scales: [n] scales of the codes, or
    None. shared: [2, n] the largest new exp_avg and sqrt(exp_avg_sq) of blocks that several ranks hold, negative for
    other blocks. compensation: the rounding errors that Kahan summation keeps. places, key: for `random_words`.
    factors: fp32 [8]: 1 - lr x weight decay, lr / (1 - beta1^t), sqrt(1 - beta2^t), eps, beta1, 1 - beta1, beta2,
    1 - beta2. stochastic: round bf16 weights stochastically.
    """
    decay, size, correction, eps, *averages = factors.unbind()
    scales = None
    if first_scales is not None and second_scales is not None:
        scales = first_scales[:, None], second_scales[:, None]
    m, v = new_moments(first, second, gradients, scales, averages)
    root = exact_root(v)
    exact = weights.float()
    if compensation is not None:
        exact = exact + compensation.float()
    exact = exact.mul(decay).sub_(m.div(root.div(correction).add_(eps)).mul_(size))
    words = random_words(places, key) if stochastic or scales is not None else None
    if stochastic and words is not None:
        # A random 16-bit number below the bits that bf16 keeps, then truncation: up or down in proportion to distance.
        bits = exact.view(torch.int32).add((words >> 16).bitwise_and_(_BITS)).bitwise_and_(~_BITS)
        rounded = bits.view(torch.float32).to(weights.dtype)
    else:
        rounded = exact.to(weights.dtype)
    weights.copy_(rounded)
    if compensation is not None:
        compensation.copy_(exact.sub_(rounded.float()))
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
    """Both moments after a step, fp32, with the shape of `gradients`. first, second: the moments before, or their
    codes. scales: the scales of the codes, broadcastable to them. averages: beta1, 1 - beta1, beta2, 1 - beta2."""
    beta1, one_minus_beta1, beta2, one_minus_beta2 = averages
    m, v, g = first.to(torch.float32, copy=True), second.to(torch.float32, copy=True), gradients.float()
    if scales is not None:
        m.mul_(m.abs()).mul_(scales[0] * (1 / _SIGNED**2))
        v.mul_(v).mul_(scales[1] * (1 / _POSITIVE**2))
        v.mul_(v)
    m.mul_(beta1).add_(g * one_minus_beta1)
    v.mul_(beta2).add_((g * g).mul_(one_minus_beta2))
    return m, v


def exact_root(x: Tensor) -> Tensor:
    """The correctly rounded square root of an fp32 tensor: a new tensor.

    On CPU this uses numpy, because torch uses MKL there, whose root is off by one bit for one element in five
    (torch 2.13).
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or is_simulated():
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.numpy()))


def random_words(places: Tensor, key: Tensor) -> Tensor:
    """[n, 256] int32 of uniform random bits, a function of `key` and of each element's index in the full tensor.

    places: int32 [n], the index of each block's first element in the flattened full tensor, modulo 2^32. key: an int32.
    The hash is C. Wellons' `lowbias32`: multiplications and xor-shifts.
    """
    x = places[:, None] + torch.arange(BLOCK, dtype=torch.int32, device=places.device)
    x.bitwise_xor_(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, places: int) -> Tensor:
    """The logical shift x >> places: a new tensor. torch's own shift is arithmetic, it fills with the sign bit."""
    return (x >> places).bitwise_and_((1 << (32 - places)) - 1)
