"""Divides mixers that carry state by heads, groups of heads or channels, each of which has a separate state.

mesh.tp divides the weights of a mixer; ranks of mesh.cp that share documents divide its computation. A kind of mixer is
recognised by the names of its children and parameters. Its division is data (MixerSpec): the positions of heads in each
projection, in the convolution and in per-head tensors; the attributes of the mixer that count heads; the outputs inside
it that are sums over all heads. A mixer without a rule, or whose sizes do not fit its rule, is replicated on every
rank.

A rank's part is a view of the mixer: a shallow copy with the same class and hooks, slices of the weights and buffers,
and attributes that count this rank's heads, so HuggingFace's code runs on it. Its output is summed over the ranks with
the other parts. Under mesh.tp the weights are already divided, so only buffers and attributes are sliced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.segments import DimSegment, Range, TPSpec, divide_segment, rank_ranges
from weft.ops.communicator import Communicator, MetaCommunicator, all_reduce_autograd


@dataclass(frozen=True)
class MixerSpec:
    """The division of one mixer; names are relative to it.

    specs: parameter or buffer -> spec. output: the layer whose outputs are summed over the ranks. counts: attribute ->
    the parts whose elements it counts. norms: norm -> its groups, each normalised by itself, which may span several
    ranks. sums: layers whose outputs are sums over all channels. hidden_alone: hidden states are the only per-token
    input of its forward.
    """

    specs: dict[str, TPSpec]
    output: str
    counts: dict[str, tuple[DimSegment, ...]] = field(default_factory=dict)
    norms: dict[str, DimSegment] = field(default_factory=dict)
    sums: tuple[str, ...] = ()
    hidden_alone: bool = True

    def divides(self, ranks: int) -> bool:
        """Whether every part divides over this number of ranks."""
        parts = [part for spec in self.specs.values() for part in spec.segments]
        return all(divide_segment(part, ranks) is not None for part in [*parts, *self.norms.values()])

    def sharing(self, norm: str, ranks: int) -> int:
        """Number of ranks that a group of a norm spans."""
        items = divide_segment(self.norms[norm], ranks)
        assert items is not None
        return items[1]


def find_mixer_spec(mixer: nn.Module) -> MixerSpec | None:
    """The division of a mixer, from its sizes; None if it is replicated on every rank."""
    names = {name for name, _ in mixer.named_children()} | {name for name, _ in mixer.named_parameters(recurse=False)}
    for needed, rule in _RULES.items():
        if names.issuperset(needed):
            spec = rule(mixer)
            return spec if _explains(mixer, spec) else None
    return None


def _explains(mixer: nn.Module, spec: MixerSpec) -> bool:
    """Whether the parts of each divided tensor add up to the full tensor."""
    tensors = {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}
    return all(
        sum(p.size for p in s.segments) == tensors[n].shape[s.dim] for n, s in spec.specs.items() if s.dim is not None
    )


def _style(
    mixer: nn.Module,
    *,
    output: str,
    inner: DimSegment,
    parts: Mapping[str, tuple[DimSegment, ...]],
    dims: Mapping[str, int] | None = None,
    counts: Mapping[str, tuple[DimSegment, ...]] | None = None,
    norms: Mapping[str, DimSegment] | None = None,
    sums: tuple[str, ...] = (),
    hidden_alone: bool = True,
) -> MixerSpec:
    """output: the layer that reads `inner`. parts: layer or tensor -> the parts of its outputs. dims: the divided
    dimension of tensors, if it is not the first. Names that the mixer lacks are omitted."""
    tensors = {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}
    specs = {f"{output}.weight": TPSpec(1, (inner,)), **{f"{name}.weight": TPSpec(1, (inner,)) for name in sums}}
    for name, segments in parts.items():
        for tensor in (name, f"{name}.weight", f"{name}.bias"):
            if tensor in tensors:
                specs[tensor] = TPSpec((dims or {}).get(name, 0), segments)
    present_counts = {}
    for name, segments in (counts or {}).items():
        owner, _, leaf = name.rpartition(".")
        if hasattr(mixer.get_submodule(owner), leaf):
            present_counts[name] = segments
    return MixerSpec(specs, output, present_counts, dict(norms or {}), sums, hidden_alone)


def _heads(count: int, width: int = 1) -> DimSegment:
    return DimSegment(count, width, heads=True)


def _repeated(count: int, width: int = 1) -> DimSegment:
    return DimSegment(count, width, heads=True, repeat=True)


def _state_space(m: Any) -> MixerSpec:
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): groups of heads share B and C."""
    heads, inner = _heads(m.num_heads), _heads(m.num_heads, m.head_dim)
    group = _repeated(m.n_groups, m.ssm_state_size)
    convolved = (inner, group, group)
    projected = (inner, *convolved, heads)
    norms = {"norm": _norm_groups(m)} if hasattr(m.norm, "weight") else {}
    return _style(
        m, output="out_proj", inner=inner,
        parts={
            "in_proj": projected, "conv1d": convolved, "norm": (inner,), "mup_vector": projected,
            "A_log": (heads,), "D": (heads,), "dt_bias": (heads,),
        },
        dims={"mup_vector": 2},
        counts={
            "num_heads": (heads,), "n_groups": (_repeated(m.n_groups),), "intermediate_size": (inner,),
            "conv_dim": convolved, **{f"{name}.n_groups": (replace(part, width=1),) for name, part in norms.items()},
        },
        norms=norms,
    )  # fmt: skip


def _norm_groups(m: Any) -> DimSegment:
    """The groups of the gated output norm: all heads together, or several. Families state it in two ways."""
    width = int(m.norm.weight.shape[0])
    size = getattr(m.norm, "group_size", None) or width // getattr(m.norm, "n_groups", 1)
    groups = max(1, width // size)
    return _repeated(groups, width // groups)


def _selective(m: Any) -> MixerSpec:
    """Mamba (Gu and Dao 2023, arXiv:2312.00752): by channels; time steps, B and C are sums over all channels."""
    inner = _heads(m.intermediate_size)
    return _style(
        m, output="out_proj", inner=inner, sums=("x_proj",),
        parts={"in_proj": (inner, inner), "conv1d": (inner,), "dt_proj": (inner,), "A_log": (inner,), "D": (inner,)},
    )  # fmt: skip


def _delta_heads(m: Any) -> tuple[DimSegment, DimSegment, DimSegment, dict[str, tuple[DimSegment, ...]]]:
    """(keys, values, one element per value head, counts). Several value heads share a key head."""
    keys, values = _repeated(m.num_k_heads, m.head_k_dim), _heads(m.num_v_heads, m.head_v_dim)
    per_head = _heads(m.num_v_heads)
    counts: dict[str, tuple[DimSegment, ...]] = {
        "num_k_heads": (_repeated(m.num_k_heads),), "num_v_heads": (per_head,), "key_dim": (keys,),
        "value_dim": (values,),
    }  # fmt: skip
    return keys, values, per_head, counts


def _fused_delta_net(m: Any) -> MixerSpec:
    """Gated delta nets (Yang et al. 2024, arXiv:2412.06464) whose projections keep everything of a key head together
    (qwen3_next)."""
    values_per_key = m.num_v_heads // m.num_k_heads
    keys, values = _heads(m.num_k_heads, m.head_k_dim), _heads(m.num_k_heads, values_per_key * m.head_v_dim)
    per_head = _heads(m.num_k_heads, values_per_key)
    return _style(
        m, output="out_proj", inner=values,
        parts={
            "in_proj_qkvz": (_heads(m.num_k_heads, 2 * m.head_k_dim + 2 * values_per_key * m.head_v_dim),),
            "in_proj_ba": (_heads(m.num_k_heads, 2 * values_per_key),),
            "conv1d": (keys, keys, values), "A_log": (per_head,), "dt_bias": (per_head,),
        },
        counts={
            "num_k_heads": (_heads(m.num_k_heads),), "num_v_heads": (per_head,), "key_dim": (keys,),
        "value_dim": (values,),
        },
    )  # fmt: skip


def _delta_net(m: Any) -> MixerSpec:
    """Gated delta nets with queries, keys and values in one projection (qwen3_5), or in three (olmo_hybrid)."""
    keys, values, per_head, counts = _delta_heads(m)
    joint = (keys, keys, values)
    return _style(
        m, output="out_proj" if hasattr(m, "out_proj") else "o_proj", inner=values, counts=counts,
        parts={
            "in_proj_qkv": joint, "in_proj_z": (values,), "in_proj_a": (per_head,), "in_proj_b": (per_head,),
            "q_proj": (keys,), "k_proj": (keys,), "v_proj": (values,), "g_proj": (values,),
            "a_proj": (per_head,), "b_proj": (per_head,), "conv1d": joint, "A_log": (per_head,), "dt_bias": (per_head,),
        },
    )  # fmt: skip


def _kimi_delta(m: Any) -> MixerSpec:
    """Kimi delta attention (arXiv:2510.26692): a decay per channel; first matrices of low-rank pairs are whole."""
    heads, inner = _heads(m.num_heads), _heads(m.num_heads, m.head_dim)
    return _style(
        m, output="o_proj", inner=inner,
        parts={
            "q_proj": (inner,), "k_proj": (inner,), "v_proj": (inner,), "conv1d": (inner,) * 3, "b_proj": (heads,),
            "g_b_proj": (inner,), "forget_gate.f_b_proj": (inner,), "forget_gate.dt_bias": (inner,),
            "forget_gate.A_log": (heads,),
        },
        dims={"forget_gate.A_log": 2},
        counts={"num_heads": (heads,), "qkv_dim": (inner,)},
    )  # fmt: skip


def _lightning(m: Any) -> MixerSpec:
    """Lightning attention (MiniMax-01, arXiv:2501.08313): decays of heads are buffers; the norm spans all heads."""
    heads, inner = _heads(m.num_attention_heads), _heads(m.num_attention_heads, m.head_dim)
    return _style(
        m, output="out_proj", inner=inner,
        parts={
            "qkv_proj": (_heads(m.num_attention_heads, 3 * m.head_dim),), "output_gate": (inner,), "norm": (inner,),
            "slope_rate": (heads,), "query_decay": (heads,), "key_decay": (heads,), "diagonal_decay": (heads,),
        },
        dims={"diagonal_decay": 1},
        counts={"num_attention_heads": (heads,)},
        norms={"norm": _repeated(1, inner.size)},
    )  # fmt: skip


def _recurrent_unit(m: Any) -> MixerSpec:
    """RG-LRU blocks (Griffin, arXiv:2402.19427): one gate matrix per block of channels. They also read positions."""
    unit = m.rg_lru
    blocks, inner = _heads(unit.num_attention_heads), _heads(unit.num_attention_heads, unit.block_width)
    gates = (f"rg_lru.{gate}_gate_{leaf}" for gate in ("input", "recurrent") for leaf in ("weight", "bias"))
    return _style(
        m, output="linear_out", inner=inner, hidden_alone=False,
        parts={
            "linear_x": (inner,), "linear_y": (inner,), "conv_1d": (inner,), "rg_lru.recurrent_param": (inner,),
            **dict.fromkeys(gates, (blocks,)),
        },
        counts={"rg_lru.num_attention_heads": (blocks,), "conv_1d.groups": (inner,), "lru_width": (inner,)},
    )  # fmt: skip


def _short_convolution(m: Any) -> MixerSpec:
    """A gated convolution of channels (lfm2)."""
    inner = _heads(int(m.out_proj.weight.shape[1]))
    return _style(m, output="out_proj", inner=inner, parts={"in_proj": (inner,) * 3, "conv": (inner,)})


_RULES: Mapping[tuple[str, ...], Callable[[Any], MixerSpec]] = {
    ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj"): _fused_delta_net,
    ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "out_proj"): _delta_net,
    ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "conv1d", "o_proj"): _delta_net,
    ("q_proj", "k_proj", "v_proj", "forget_gate", "g_b_proj", "conv1d", "o_proj"): _kimi_delta,
    ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj"): _state_space,
    ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj"): _selective,
    ("qkv_proj", "output_gate", "norm", "out_proj"): _lightning,
    ("linear_x", "linear_y", "conv_1d", "rg_lru", "linear_out"): _recurrent_unit,
    ("conv", "in_proj", "out_proj"): _short_convolution,
}


# ---------------------------------------------------------------- a rank's part, as a module

_SUMS = "weft_sums"  # attribute of a norm in a view: (ranks, their number) that hold the other parts of its input
Sums = tuple[tuple[Communicator, int], ...]


@dataclass(frozen=True)
class MixerShard:
    """The part of a mixer that rank `rank` of `size` computes. neighbours: number of ranks -> communicator of so many
    neighbouring ranks, which share an item. stored: parameters are cut already."""

    spec: MixerSpec
    rank: int
    size: int
    neighbours: Callable[[int], Communicator]
    stored: bool


def shard_for_documents(mixer: nn.Module, rank: int, ranks: Communicator, size: int) -> MixerShard | None:
    """The part of rank `rank`, if `size` ranks share complete documents, without smaller groups. None if the heads do
    not divide, or if the mixer has per-token inputs other than hidden states."""
    spec = find_mixer_spec(mixer)
    if spec is None or not spec.hidden_alone or not spec.divides(size):
        return None
    if any(spec.sharing(norm, size) not in (1, size) for norm in spec.norms):
        return None
    return MixerShard(spec, rank, size, lambda _: ranks, stored=False)


def can_share_documents(mixer: nn.Module, size: int, tp: int) -> bool:
    """Whether `size` ranks of cp can share documents, with `tp` ranks of tp. mixer: not divided."""
    spec = find_mixer_spec(mixer)
    if spec is not None and tp > 1 and spec.divides(tp):
        mixer = view(mixer, MixerShard(spec, 0, tp, MetaCommunicator, stored=False))
    return shard_for_documents(mixer, 0, MetaCommunicator(size), size) is not None


def view(mixer: nn.Module, shard: MixerShard) -> nn.Module:
    """The part of a mixer, as a module. Differentiable: gradients of the slices reach the mixer's weights."""
    spec, module_copies = shard.spec, _Copies(mixer)
    for name, cut in spec.specs.items():
        owner, leaf = module_copies.holder(name)
        if leaf in owner._buffers:
            owner._buffers[leaf] = _slice(owner._buffers[leaf], cut, shard)
        elif not shard.stored:
            owner._parameters[leaf] = _slice(owner._parameters[leaf], cut, shard)
            if leaf == "weight" and "lora" in owner._modules:
                _cut_adapter(module_copies.module(f"{name.rpartition('.')[0]}.lora"), cut, shard)
    for name, parts in spec.counts.items():
        owner, leaf = module_copies.holder(name)
        owner.__dict__[leaf] = sum(size for _, size in rank_ranges(parts, shard.rank, shard.size))
    for name in spec.norms:
        copies = spec.sharing(name, shard.size)
        if copies > 1:
            norm = module_copies.module(name)
            norm.__dict__[_SUMS] = (*getattr(norm, _SUMS, ()), (shard.neighbours(copies), copies))
            norm.__dict__["forward"] = partial(_norm, norm, max(1, spec.norms[name].count // shard.size))
    for name in spec.sums:
        layer = module_copies.module(name)
        layer.__dict__["_forward_hooks"] = OrderedDict(layer._forward_hooks)
        ranks = shard.neighbours(shard.size)
        layer.register_forward_hook(lambda _, __, output, ranks=ranks: all_reduce_autograd(output, ranks))  # the last
    if not shard.stored:
        _share_bias(module_copies.module(spec.output), shard.size)
    part = module_copies.module("")
    part.__dict__.pop("forward", None)  # the PerDocumentMixer's
    part.__dict__["training"] = False  # fused kernels for training include the norm and the output projection
    return part


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


def _slice(tensor: Tensor, spec: TPSpec, shard: MixerShard) -> Tensor:
    assert spec.dim is not None
    ranges = _joined(rank_ranges(spec.segments, shard.rank, shard.size))
    slices = [tensor.narrow(spec.dim, first, size) for first, size in ranges]
    return slices[0] if len(slices) == 1 else torch.cat(slices, spec.dim)


def _joined(ranges: list[Range]) -> list[Range]:
    """The ranges with adjacent ones joined, so that contiguous elements are not copied."""
    merged = ranges[:1]
    for first, size in ranges[1:]:
        start, length = merged[-1]
        if start + length == first:
            merged[-1] = (start, length + size)
        else:
            merged.append((first, size))
    return merged


def _cut_adapter(adapter: Any, weight: TPSpec, shard: MixerShard) -> None:
    """Divide an adapter: B like the weight's outputs, or A like its inputs."""
    leaf, dim = ("B", 0) if weight.dim == 0 else ("A", 1)
    adapter._parameters[leaf] = _slice(adapter._parameters[leaf], TPSpec(dim, weight.segments), shard)
    if leaf == "A":
        adapter.divide(None)  # dropout masks cover only this rank's inputs


def _share_bias(layer: Any, size: int) -> None:
    """Divide a bias that every rank adds by their number, so that it counts once."""
    if layer._parameters.get("bias") is not None:
        layer._parameters["bias"] = layer._parameters["bias"] / size


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
