"""Metrics of the load of experts, and correction biases of routers.

After each optimizer step the bias of an expert that was chosen less often than the mean rises by
model.router_bias_rate; that of an expert chosen more often falls by it (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
Routers choose by score + bias, and weight only by score. L layers with experts, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.engine.metrics import MetricSums
from weft.errors import UserError
from weft.models import hf
from weft.models.experts import find_experts
from weft.ops.dispatch import ExpertPlacement
from weft.parallel.mesh import Mesh

NAMES = ("e_score_correction_bias", "expert_bias")


class ExpertLoad:
    """Counts choices of experts in the forwards of one engine's model. Nothing waits for the device."""

    def __init__(self, layers: Iterable[nn.Module], mesh: Mesh) -> None:
        """layers: experts of this stage, without experts that read every token (llama4)."""
        self.layers = [child for child in layers if hf.is_fused_experts(child)]
        self.last: Tensor | None = None  # [L, E] choices of the last step, over all ranks
        self._counts: dict[int, Tensor] = {}
        self._tokens: int | Tensor | None = None
        self._multiplicity_T: Tensor | None = None
        only_elsewhere = mesh.pp is not None and any(mesh.pp.all_gather(bool(self.layers))) and not self.layers
        self._of_others = ["experts/max_load", *["experts/sent"] * (mesh.ep is not None)] if only_elsewhere else []
        for child in self.layers:
            child.register_forward_pre_hook(self._count, with_kwargs=True)

    @contextmanager
    def counting(self, tokens: int | Tensor, multiplicity_T: Tensor | None = None) -> Iterator[None]:
        """Inside, count the choices of the first `tokens` tokens of a forward with gradients, or of the tokens with
        these indices; other tokens are padding. multiplicity_T: the number of documents that hold each token, if any is
        shared: its choices count that many times. Layers that backward recomputes are not counted again."""
        self._tokens = tokens if torch.is_grad_enabled() else None
        self._multiplicity_T = multiplicity_T
        try:
            yield
        finally:
            self._tokens = self._multiplicity_T = None

    def _count(self, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tokens is None:
            return
        chosen_TK = next(value for value in (*args, *kwargs.values()) if not value.is_floating_point())
        real = self._tokens
        expert = (chosen_TK.index_select(0, real) if isinstance(real, Tensor) else chosen_TK[:real]).reshape(-1)
        before = self._counts.get(id(experts))
        if before is None:
            before = torch.zeros(experts.num_experts, dtype=torch.int64, device=expert.device)
        times = torch.ones_like(expert, dtype=torch.int64)
        if self._multiplicity_T is not None:
            times = self._multiplicity_T.repeat_interleave(chosen_TK.shape[1])[: len(expert)]
        self._counts[id(experts)] = before.scatter_add(0, expert.long(), times)

    def add_to(self, sums: MetricSums, group: dist.ProcessGroup) -> None:
        """Add the metrics of the forwards since the last call. Collective over `group`, the ranks with other tokens.

        `experts/max_load`: the choices of a layer's busiest expert, relative to the mean over its experts, averaged
        over layers; 1 if all are equal. `experts/sent`, with mesh.ep: the share of choices computed on another rank.
        """
        if not self.layers:
            for name in self._of_others:  # every stage adds the same metrics
                sums.add(name, 0.0, 0.0)
            return
        counts_LE = torch.stack([self._counts[id(child)] for child in self.layers])
        self._counts.clear()
        axis: ExpertPlacement | None = getattr(self.layers[0], "weft_axis", None)
        if axis is not None:
            first = sum(axis.experts[: axis.rank])
            local = counts_LE[:, first : first + axis.num_local].sum()
            sums.add("experts/sent", counts_LE.sum() - local, counts_LE.sum())
        dist.all_reduce(counts_LE, group=group)
        self.last = counts_LE
        share_LE = counts_LE.double() / counts_LE.sum(1, keepdim=True).clamp(min=1)
        sums.add("experts/max_load", (share_LE.amax(1) * counts_LE.shape[1]).sum(), float(len(self.layers)))


def find_biases(module: nn.Module) -> dict[str, Tensor]:
    """Name -> the bias of each layer with experts, [E] or [1, E], in order. Layers without a bias are omitted."""
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
            f"model.router_bias_rate: the routers of {family} have no correction biases. Set "
            "model.router_bias_rate=null. To balance experts by a loss instead, set model.router_aux_loss=document."
        )


class RouterBiases:
    """The router biases of one engine's model."""

    def __init__(self, module: nn.Module, load: ExpertLoad, rate: float) -> None:
        self._biases, self._load, self._rate = list(find_biases(module).values()), load, rate

    @torch.no_grad()
    def step(self) -> None:
        """Update the biases from the choices of the last accumulated step, over all ranks."""
        counts_LE = self._load.last
        if counts_LE is None:
            return
        direction_LE = (counts_LE.double().mean(1, keepdim=True) - counts_LE).sign()
        for bias, direction_E in zip(self._biases, direction_LE, strict=True):
            bias += self._rate * direction_E.to(bias.dtype).view_as(bias)
