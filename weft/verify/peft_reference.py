"""The reference for adapters: peft's model in one plain process, and a second implementation of the formats of
quantised bases. Imports only the plain reference and an error class of weft.

nf4: levels and blocks of QLoRA (arXiv:2305.14314) as bitsandbytes stores them: 64 elements share a scale, 256 scales
share another, and scales are 8-bit numbers about their mean (arXiv:2110.02861). Every value is compared with every
level. int8: each row is scaled by its largest magnitude / 127 (arXiv:2208.07339). fp8: each block is scaled by its
largest magnitude / 448, then rounded to e4m3 (arXiv:2412.19437).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.verify.reference import Reference

_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def rounded_base(weight: Tensor, form: str, block: tuple[int, int]) -> Tensor:
    """The weight decoded from its bytes, in its dtype. block: of fp8."""
    if form == "nf4":
        return nf4_and_back(weight)
    if form == "int8":
        return int8_and_back(weight)
    return fp8_and_back(weight, block)


def int8_and_back(weight: Tensor) -> Tensor:
    """The weight rounded by rows of the last dimension."""
    rows = []
    for row in weight.float().reshape(-1, weight.shape[-1]):
        largest = row.abs().max()
        codes = torch.round(row * (127.0 / largest)) if largest > 0 else torch.zeros_like(row)
        rows.append(codes * largest * (1 / 127))
    return torch.stack(rows).reshape(weight.shape).to(weight.dtype)


def fp8_and_back(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The weight rounded by blocks of the last two dimensions; blocks at the edges may be smaller."""
    out = torch.empty_like(weight)
    for matrix, rounded in zip(weight.reshape(-1, *weight.shape[-2:]), out.view(-1, *weight.shape[-2:]), strict=True):
        for row in range(0, matrix.shape[0], block[0]):
            for column in range(0, matrix.shape[1], block[1]):
                part = (slice(row, row + block[0]), slice(column, column + block[1]))
                values = matrix[part].float()
                scale = values.abs().max() / values.new_tensor(448.0)
                ratio = values / scale if scale > 0 else values
                rounded[part] = ratio.to(torch.float8_e4m3fn).float() * scale
    return out


def nf4_and_back(weight: Tensor) -> Tensor:
    """The weight decoded from its bytes, in its dtype. Its size must be a multiple of 64."""
    blocks = weight.float().reshape(-1, 64)
    scales = blocks.abs().amax(1)
    values = _rounded(blocks * (1.0 / scales[:, None].clamp(min=1e-38)), torch.tensor(_NF4))
    mean = scales.double().mean().float()
    rounded = torch.cat([_rounded_scales(group) for group in (scales - mean).split(256)]) + mean
    return (values * rounded[:, None]).reshape(weight.shape).to(weight.dtype)


def _rounded_scales(scales: Tensor) -> Tensor:
    largest = scales.abs().max()
    return _rounded(scales * (1.0 / largest.clamp(min=1e-38)), _eight_bits()) * largest


def _rounded(values: Tensor, levels: Tensor) -> Tensor:
    """Each value replaced by the nearest level."""
    levels = levels.to(values.device)
    rows = [levels[(row[:, None] - levels).abs().argmin(-1)] for row in values.flatten().split(4096)]
    return torch.cat(rows).view_as(values)


def _eight_bits() -> Tensor:
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        middles = 10 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        levels += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(levels))


class PeftReference(Reference):
    """A plain model with the adapter of a folder, all in fp32 unless `base` is another dtype for the base. quantised:
    name of a parameter of the base that is rounded first -> its format, and its blocks in fp8. frozen: number of the
    last rows of A and columns of B that are not trained.

    Tensors are named as in the adapter's file, without its prefix; those of the frozen base as in the base.
    """

    def __init__(
        self,
        path: str,
        adapter: str,
        device: str = "cpu",
        balance: float = 0.0,
        whole_step: bool = False,
        base: torch.dtype = torch.float32,
        quantised: Mapping[str, tuple[str, tuple[int, int]]] | None = None,
        frozen: int = 0,
    ) -> None:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise UserError("adapters are compared with peft, which is not installed: pip install peft") from error
        super().__init__(path, device, (), balance, whole_step)
        for name, (form, block) in (quantised or {}).items():
            weight = self.plain.get_parameter(name)
            weight.data = rounded_base(weight.data, form, block)
        self.model = PeftModel.from_pretrained(self.plain.to(base), adapter, is_trainable=True).eval().to(device)
        for name, parameter in self.model.named_parameters():
            if frozen and (".lora_A." in name or ".lora_B." in name):
                first = parameter.shape[".lora_B." in name] - frozen
                rows = slice(first, None) if ".lora_A." in name else (slice(None), slice(first, None))
                parameter.register_hook(partial(_without, rows))

    def weights(self) -> dict[str, Tensor]:
        """A copy of named()."""
        return {name: parameter.detach().clone() for name, parameter in self.named()}

    def current_gradients(self) -> dict[str, Tensor]:
        """A copy of every existing gradient, by the names of named()."""
        return {name: parameter.grad.clone() for name, parameter in self.named() if parameter.grad is not None}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter, except the originals that peft keeps for modules that are trained completely."""
        return [(_plain(n), p) for n, p in self.model.named_parameters() if ".original_module." not in n]


def _without(rows: Any, grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[rows] = 0.0
    return grad


def _plain(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
    return (
        name.replace(".default", "").removesuffix(".weight" * ("magnitude" in name))
        if ".lora_" in name
        else re.sub(r"(\.base_layer)+\.", ".", name)
    )
