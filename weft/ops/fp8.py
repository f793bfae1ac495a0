"""Linear layers with matmuls of 8-bit floating-point numbers (e4m3: 4 bits of exponent, 3 bits of mantissa).

    y = x W^T        both rounded: each row of x (a token) and of W (an output) has a scale
    dL/dx = g W      both rounded: each row of g (a token) and each column of W (an input) has a scale
    dL/dW = g^T x    in the compute dtype

A scale is the least power of two for which the largest scaled element is at most 448, the largest number of e4m3. The
scale of a token depends on no other token, so packing, micro-batches and ranks do not change results. The last matmul
sums over tokens. Its scales would depend on how the step is split, so it stays in the compute dtype. torchao's recipe
`rowwise_with_gw_hp` is the same. Formats: Micikevicius et al. 2022, arXiv:2209.05433.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import UserError

MULTIPLE = 16  # tensor cores need widths that are multiples of this for 8-bit matmuls
CAPABILITY = (8, 9)  # lowest CUDA compute capability with 8-bit matmuls


def rounded(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(x / scale in e4m3, fp32 scale). All elements along `dim` share a scale, and `dim` has size 1 in the scale.

    A row of zeros has scale 1. A row with inf or NaN becomes NaN, so that the loss becomes NaN too.
    """
    largest = x.detach().abs().amax(dim, keepdim=True).float()
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa x 2^exponent, mantissa in [0.5, 1)
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)  # 448 = 0.875 x 2^9
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scale = torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scale, torch.nan))
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias with 8-bit matmuls, [..., O]. x: [..., I]. On CUDA, I and O must be multiples of MULTIPLE."""
    out: Tensor = _Linear.apply(x.flatten(0, -2), weight_OI)
    out = out.view(*x.shape[:-1], len(weight_OI))
    return out if bias_O is None else out + bias_O


def product(a_MK: Tensor, a_scale_M1: Tensor, b_NK: Tensor, b_scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T of rounded matrices, [M, N] in `dtype`, summed in fp32. Other devices than CUDA multiply the same numbers
    in fp32."""
    return torch.ops.weft.fp8_product(a_MK, a_scale_M1, b_NK, b_scale_N1, dtype)


# An operator of its own: torch.compile cannot trace scaled_mm in torch 2.11, and ends the graph of a layer at each one.
@torch.library.custom_op("weft::fp8_product", mutates_args=())
def _product(a_MK: Tensor, a_scale_M1: Tensor, b_NK: Tensor, b_scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    if a_MK.device.type != "cuda":
        return ((a_MK.float() @ b_NK.float().T) * (a_scale_M1 * b_scale_N1.T)).to(dtype)
    by_row = F.ScalingType.RowWise
    out: Tensor = F.scaled_mm(a_MK, b_NK.T, a_scale_M1, by_row, b_scale_N1.T, by_row, output_dtype=dtype)
    return out


@_product.register_fake
def _(a_MK: Tensor, a_scale_M1: Tensor, b_NK: Tensor, b_scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    return a_MK.new_empty(len(a_MK), len(b_NK), dtype=dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None, weight_OI)
        return product(*rounded(x_TI, 1), *rounded(weight_OI, 1), x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_TO,), (x_TI, weight_OI) = gradients, ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            columns_OI, scale_1I = rounded(weight_OI, 0)
            # Tensor cores need both operands contiguous along the summed dimension.
            grad_x = product(*rounded(grad_TO, 1), columns_OI.T.contiguous(), scale_1I.T, grad_TO.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_TO.T @ x_TI
        return grad_x, grad_weight


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if this device has no 8-bit matmuls, or computes them wrongly. dtype: the compute dtype."""
    if device.type != "cuda":
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    remedy = "Set 'model.transforms=[]'."
    if capability < CAPABILITY or not hasattr(F, "scaled_mm"):
        reason = f"{name} has none" if capability < CAPABILITY else f"torch {torch.__version__} has no scaled_mm"
        raise UserError(f"model.transforms: fp8 needs 8-bit matmuls, and {reason}. {remedy}")
    if dtype != torch.bfloat16:
        raise UserError(
            "model.transforms: fp8 needs a compute dtype of bf16 on CUDA. Set fsdp.param_dtype=bf16, or "
            "'model.transforms=[]'."
        )
    generator = torch.Generator().manual_seed(0)
    x_TI, weight_OI = (torch.randn(size, 256, generator=generator).to(dtype) for size in (67, 48))
    expected = product(*rounded(x_TI, 1), *rounded(weight_OI, 1), torch.float32)
    try:
        result = linear(x_TI.to(device), weight_OI.to(device)).float().cpu()
    except RuntimeError as error:
        raise UserError(f"model.transforms: a trial of fp8 failed on {name}: {error}. {remedy}") from error
    off = float((result - expected).abs().max() / expected.abs().max())
    if not off <= 1e-2:  # bf16 results: 4e-3
        raise UserError(
            f"model.transforms: fp8 computes wrong results on {name}: a matmul has a relative error of {off:.1e}. "
            f"{remedy}"
        )
