"""Correction biases of routers, which even out the load of experts without a loss.

After each optimizer step the bias of an expert that was chosen less often than the mean rises by
model.router_bias_rate; that of an expert chosen more often falls by it (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
Routers choose by score + bias, and weight by score alone. L layers with experts, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.engine.expert_load import ExpertLoad
from weft.errors import UserError
from weft.models import hf
from weft.models.experts import find_experts

NAMES = ("e_score_correction_bias", "expert_bias")


def find_biases(module: nn.Module) -> dict[str, Tensor]:
    """Name -> the bias of each layer with experts, [E] or [1, E], in order. A layer without one is left out."""
    biases = {}
    for name, experts in find_experts(module).items():
        block, _, _ = name.rpartition(".")
        for leaf, buffer in module.get_submodule(block).named_buffers():
            if leaf.rpartition(".")[2] in NAMES and buffer.numel() == experts.num_experts:
                biases[f"{block}.{leaf}"] = buffer
    return biases


def check_biases(module: nn.Module, family: str) -> None:
    """Raises UserError unless every layer with experts has such a bias."""
    layers = [child for child in find_experts(module).values() if hf.is_fused_experts(child)]
    if not layers or len(find_biases(module)) != len(layers):
        raise UserError(
            f"model.router_bias_rate: the routers of {family} have no correction biases: set model.router_bias_rate="
            "null, and model.router_aux_loss=document to balance its experts by a loss."
        )


class RouterBiases:
    """The router biases of one engine's model."""

    def __init__(self, module: nn.Module, load: ExpertLoad, rate: float) -> None:
        self._biases, self._load, self._rate = list(find_biases(module).values()), load, rate

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by the choices, over all ranks, of the step that was accumulated last."""
        counts_LE = self._load.last
        if counts_LE is None:
            return
        direction_LE = (counts_LE.double().mean(1, keepdim=True) - counts_LE).sign()
        for bias, direction_E in zip(self._biases, direction_LE, strict=True):
            bias += self._rate * direction_E.to(bias.dtype).view_as(bias)
