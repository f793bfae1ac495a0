"""The reference for adapters: peft's own model in one plain process. Imports only the plain reference and an error
class of weft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.verify.low_bit_reference import rounded_base
from weft.verify.reference import Reference


class PeftReference(Reference):
    """A plain model with the adapter of a folder, all in fp32 unless `base` gives another dtype for the base.
    quantised: name of a parameter of the base that is rounded first -> its format, and its blocks in fp8.
    frozen: number of the last rows of A and columns of B that are not trained.

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
        """A copy of every gradient that there is, by the names of named()."""
        return {name: parameter.grad.clone() for name, parameter in self.named() if parameter.grad is not None}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter, except the originals that peft keeps of modules that are trained whole."""
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
