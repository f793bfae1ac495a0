"""A rank's part of a mixer that carries state: HuggingFace's own code, on some of the heads.

The part is a view of the mixer: a shallow copy with the same class and hooks, slices of the weights and buffers, and
attributes that count this rank's heads. Its output is summed over the ranks that have the other parts. Under mesh.tp
the weights are parts already; then only buffers and attributes are cut.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.tp_mixers import MixerSpec, mixer_style
from weft.models.tp_parts import Range, TPSpec, ranges_of
from weft.ops.communicator import Communicator, MetaCommunicator, all_reduce_autograd

_SUMS = "weft_sums"  # attribute of a norm in a view: (ranks, their number) that hold the other parts of its input
Sums = tuple[tuple[Communicator, int], ...]


@dataclass(frozen=True)
class MixerShard:
    """Which part of a mixer a rank computes: the one at `place` of `size`. neighbours: number of ranks -> communicator
    of so many neighbouring ranks, which share an item. stored: parameters are cut already."""

    style: MixerSpec
    rank: int
    size: int
    neighbours: Callable[[int], Communicator]
    stored: bool


def share_of_documents(mixer: nn.Module, rank: int, ranks: Communicator, size: int) -> MixerShard | None:
    """The part of a rank that shares whole documents with the others of `size` ranks, which have no smaller groups.
    None if the heads do not divide, or if the mixer has per-token inputs other than hidden states."""
    style = mixer_style(mixer)
    if style is None or not style.hidden_alone or not style.divides(size):
        return None
    if any(style.sharing(norm, size) not in (1, size) for norm in style.norms):
        return None
    return MixerShard(style, rank, size, lambda _: ranks, stored=False)


def can_share_documents(mixer: nn.Module, size: int, tp: int) -> bool:
    """Whether `size` ranks of cp can share documents, with `tp` ranks of tp. mixer: a whole one."""
    style = mixer_style(mixer)
    if style is not None and tp > 1 and style.divides(tp):
        mixer = view(mixer, MixerShard(style, 0, tp, MetaCommunicator, stored=False))
    return share_of_documents(mixer, 0, MetaCommunicator(size), size) is not None


def view(mixer: nn.Module, share: MixerShard) -> nn.Module:
    """The part of a mixer, as a module. Differentiable: gradients of the slices reach the mixer's weights."""
    style, module_copies = share.style, _Copies(mixer)
    for name, cut in style.specs.items():
        owner, leaf = module_copies.holder(name)
        if leaf in owner._buffers:
            owner._buffers[leaf] = _slice(owner._buffers[leaf], cut, share)
        elif not share.stored:
            owner._parameters[leaf] = _slice(owner._parameters[leaf], cut, share)
            if leaf == "weight" and "lora" in owner._modules:
                _cut_adapter(module_copies.module(f"{name.rpartition('.')[0]}.lora"), cut, share)
    for name, parts in style.counts.items():
        owner, leaf = module_copies.holder(name)
        owner.__dict__[leaf] = sum(size for _, size in ranges_of(parts, share.rank, share.size))
    for name in style.norms:
        copies = style.sharing(name, share.size)
        if copies > 1:
            norm = module_copies.module(name)
            norm.__dict__[_SUMS] = (*getattr(norm, _SUMS, ()), (share.neighbours(copies), copies))
            norm.__dict__["forward"] = partial(_norm, norm, dealt_groups(style, name, share.size))
    for name in style.sums:
        layer = module_copies.module(name)
        layer.__dict__["_forward_hooks"] = OrderedDict(layer._forward_hooks)
        layer.register_forward_hook(partial(_sum_outputs, share.neighbours(share.size)))  # the last of the hooks
    if not share.stored:
        _share_bias(module_copies.module(style.output), share.size)
    part = module_copies.module("")
    part.__dict__.pop("forward", None)  # the PerDocumentMixer's
    part.__dict__["training"] = False  # fused kernels for training include the norm and the output projection
    return part


def dealt_groups(style: MixerSpec, norm: str, ranks: int) -> int:
    """Number of groups of a norm on one of `ranks` ranks; at least 1."""
    return max(1, style.norms[norm].count // ranks)


class _Copies:
    """Shallow copies of a module and, on demand, of its children, with their own dicts of parameters, buffers and
    modules."""

    def __init__(self, root: nn.Module) -> None:
        self._copies = {"": _copied(root)}

    def module(self, path: str) -> Any:
        """The copy of a child."""
        if path not in self._copies:
            parent, _, leaf = path.rpartition(".")
            holder = self.module(parent)
            self._copies[path] = holder._modules[leaf] = _copied(holder._modules[leaf])
        return self._copies[path]

    def holder(self, name: str) -> tuple[Any, str]:
        """(copy of the module that holds a tensor or attribute, its name there)."""
        owner, _, leaf = name.rpartition(".")
        return self.module(owner), leaf


def _copied(module: nn.Module) -> nn.Module:
    copy = object.__new__(type(module))
    dicts = {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
    copy.__dict__ = {**module.__dict__, **dicts}
    return copy


def _slice(tensor: Tensor, style: TPSpec, share: MixerShard) -> Tensor:
    assert style.dim is not None
    ranges = _joined(ranges_of(style.parts, share.rank, share.size))
    slices = [tensor.narrow(style.dim, first, size) for first, size in ranges]
    return slices[0] if len(slices) == 1 else torch.cat(slices, style.dim)


def _joined(ranges: list[Range]) -> list[Range]:
    """The ranges with adjacent ones joined, so that contiguous elements are not copied."""
    joined = ranges[:1]
    for first, size in ranges[1:]:
        before, length = joined[-1]
        if before + length == first:
            joined[-1] = (before, length + size)
        else:
            joined.append((first, size))
    return joined


def _cut_adapter(adapter: Any, weight: TPSpec, share: MixerShard) -> None:
    """Cut an adapter: B as the weight's outputs are divided, or A as its inputs are."""
    leaf, dim = ("B", 0) if weight.dim == 0 else ("A", 1)
    adapter._parameters[leaf] = _slice(adapter._parameters[leaf], TPSpec(dim, weight.parts), share)
    if leaf == "A":
        adapter.divide(None)  # dropout masks are over this rank's inputs


def _share_bias(layer: Any, size: int) -> None:
    """Divide a bias that every rank adds by their number, so that it counts once."""
    if layer._parameters.get("bias") is not None:
        layer._parameters["bias"] = layer._parameters["bias"] / size


def _sum_outputs(ranks: Communicator, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return all_reduce_autograd(output, ranks)


def _norm(norm: Any, groups: int, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """RMS norm of groups of heads that span several ranks, gated before or after it as in the family's code."""
    dtype, x = x.dtype, x.float()
    gate_last = getattr(norm, "norm_before_gate", False)
    if gate is not None and not gate_last:
        x = x * F.silu(gate.float())
    parts = x.unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(mean_square(parts, getattr(norm, _SUMS)) + norm.variance_epsilon)
    x = norm.weight * parts.flatten(-2).to(dtype)
    if gate is not None and gate_last:
        x = x * F.silu(gate.float())
    return x.to(dtype)


def mean_square(parts: Tensor, sums: Sums) -> Tensor:
    """[..., groups, 1]: mean square over the width on all ranks. parts: [..., groups, width on this rank]."""
    mean = parts.pow(2).mean(-1, keepdim=True)
    for ranks, size in sums:
        mean = all_reduce_autograd(mean, ranks) / size
    return mean
