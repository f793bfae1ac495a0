"""How tensor parallelism shards each parameter: rules on the module tree, for any family.

The first linear layers of attention or an MLP are sharded by outputs (heads, intermediate width), the last by inputs. A
matrix that matches no rule is an error, which names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from weft.errors import UserError
from weft.models import hf
from weft.models.experts import is_experts
from weft.models.families import carries_state
from weft.models.lora import parameter_of
from weft.models.low_rank import LowRank
from weft.models.mixer_shards import MixerSpec, find_mixer_spec
from weft.models.segments import DimSegment, TPSpec
from weft.models.train_module import ScoreHead, TrainModule

QUERY = ("q_proj", "q_b_proj")
GATES = ("gate_proj", "g_proj")  # gates on the outputs of heads
KEY_VALUE = ("k_proj", "v_proj")
LATENT = ("kv_b_proj",)  # MLA: computes keys and values of every head from one latent vector
FUSED = ("qkv_proj", "c_attn")  # rows: all queries, then all keys, then all values
MIXED = ("query_key_value",)  # rows, for each head or group of heads: queries, then key and value
GATE_UP = ("gate_proj", "up_proj", "c_fc", "fc1", "dense_h_to_4h", "w1", "w3")
FUSED_GATE_UP = ("gate_up_proj", "input_linear")
OUT = ("o_proj", "out_proj", "dense", "down_proj", "c_proj", "fc2", "dense_4h_to_h", "w2", "output_linear")
# Matrices that are complete on every rank: the first low-rank factors of MLA, routers, gates of shared experts,
# per-layer inputs (gemma4), the projection of a shared block's output (zamba2).
REPLICATED = (
    "q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate", "per_layer_input_gate",
    "per_layer_projection", "linear",
)  # fmt: skip
_LAYER = re.compile(r"DecoderLayer$")  # class of a layer inside a layer (zamba2)
_ADDITIONS = "_adapter_list"
_COLUMNS = 8  # intermediate widths are split at multiples of this: grouped matmuls need rows aligned to 16 bytes


@dataclass(frozen=True)
class TPPlan:
    """How tp shards a model.

    specs: name of a parameter -> how it is sharded. regions: modules that compute with sharded weights, and whose
    outputs are summed. biased: modules whose bias every rank would add. joined: a norm over all heads together -> how
    its input is sharded. attention: attention modules. mixers: sharded mixers with state.
    """

    specs: dict[str, TPSpec] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    biased: list[str] = field(default_factory=list)
    joined: dict[str, TPSpec] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    mixers: dict[str, MixerSpec] = field(default_factory=dict)


def find_tp_plan(module: TrainModule, config: PretrainedConfig, ranks: int) -> TPPlan:
    """How tp shards all parameters. ranks: size of mesh.tp. Mixers whose number of heads it does not divide are not
    sharded. Raises UserError, with the parameter's name, if a matrix matches no rule."""
    plan = TPPlan()
    specs = plan.specs
    embedding = module.get_submodule(module.facts.embedding)
    vocabulary = TPSpec(0, (DimSegment(len(embedding.weight)),))
    specs[f"{module.facts.embedding}.weight"] = vocabulary
    if not isinstance(module.head, ScoreHead):
        specs |= {f"{module.facts.head}.{name}": vocabulary for name, _ in module.head.named_parameters()}
    for (name, layer), layer_config in zip(module.layers, hf.layer_configs(config), strict=True):
        _add_layer(name, layer, layer_config, ranks, plan)
    specs.update(_adapter_specs(module, specs))
    mixers = tuple(f"{name}." for name in module.mixers)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in specs and parameter.ndim > 1 and not name.startswith(mixers) and not _may_stay(name, module):
            raise UserError(
                f"mesh.tp: weft has no rule to shard {name} {list(parameter.shape)} of {module.facts.model_type}. Set "
                "mesh.tp=1."
            )
        specs.setdefault(name, TPSpec())
    return plan


def check_states(module: TrainModule, config: PretrainedConfig, names: Sequence[str], ranks: int) -> None:
    """Raise UserError if a readout `hidden/MODULE` names a module inside a sharded block. names: the MODULEs."""
    for region in find_tp_plan(module, config, ranks).regions if names else ():
        inside = next((name for name in names if name.startswith(f"{region}.")), None)
        if inside is not None:
            raise UserError(
                f"train.loss: `hidden/{inside}` in `readouts` is inside {region}, which mesh.tp shards, so each rank "
                f"has only a part of its output. Read {region} or its layer, or set mesh.tp=1."
            )


def _adapter_specs(module: nn.Module, specs: Mapping[str, TPSpec]) -> Iterator[tuple[str, TPSpec]]:
    """How adapters are sharded: B like the outputs of its weight, or A like the inputs. The other matrix is complete on
    every rank. specs: of the weights."""
    for name, child in module.named_modules():
        if not isinstance(child, LowRank):
            continue
        owner_name, _, leaf = name.rpartition(".")
        spec = specs.get(f"{owner_name}.{parameter_of(leaf)}", TPSpec())
        by_outputs = spec.dim == _outputs_dim(module.get_submodule(owner_name))
        yield f"{name}.A", TPSpec() if spec.dim is None or by_outputs else TPSpec(1, spec.segments)
        yield f"{name}.B", TPSpec(0, spec.segments) if by_outputs else TPSpec()
        if child.magnitude is not None:
            yield f"{name}.magnitude", TPSpec(0, spec.segments) if by_outputs else TPSpec()


def _outputs_dim(owner: Any) -> int:
    """The dimension of a layer's weight that indexes its outputs."""
    if hf.is_fused_experts(owner):
        return 2 if owner.is_transposed else 1
    return 1 if hf.is_transposed(owner) or isinstance(owner, nn.Embedding) else 0


def _may_stay(name: str, module: TrainModule) -> bool:
    """Whether a matrix may be complete on every rank: it is in REPLICATED, or outside the decoder layers."""
    inside = name.removeprefix(f"{module.facts.layers}.")
    return inside == name or not set(REPLICATED).isdisjoint(inside.split("."))


def _add_layer(name: str, layer: nn.Module, config: PretrainedConfig, ranks: int, plan: TPPlan) -> None:
    for child_name, child in layer.named_children():
        path = f"{name}.{child_name}"
        if _LAYER.search(type(child).__name__):
            _add_layer(path, child, config, ranks, plan)
            continue
        specs = dict(
            _mixer_specs(path, child, ranks, plan) if carries_state(child) else _block_specs(path, child, config, plan)
        )
        specs |= dict(_addition_specs(path, child, specs))
        if any(spec.dim is not None for spec in specs.values()):
            plan.regions.append(path)
            plan.specs.update(specs)


def _addition_specs(name: str, block: nn.Module, specs: Mapping[str, TPSpec]) -> Iterator[tuple[str, TPSpec]]:
    """Specs of the low-rank pairs that a shared block (zamba2) adds to its projections. It has one pair for each layer
    that runs it."""
    for path, module in block.named_modules(prefix=name):
        owner, _, leaf = path.rpartition(".")
        if leaf.endswith(_ADDITIONS):
            adapted = leaf.removesuffix(_ADDITIONS).removeprefix("linear_")
            spec = specs[f"{owner}.{adapted if adapted.endswith('_proj') else f'{adapted}_proj'}.weight"]
            for tensor, _ in module.named_parameters(prefix=path):
                yield tensor, spec if tensor.endswith(".1.weight") else TPSpec()


def _mixer_specs(name: str, mixer: nn.Module, ranks: int, plan: TPPlan) -> Iterator[tuple[str, TPSpec]]:
    spec = find_mixer_spec(mixer)
    if spec is None or not spec.divides(ranks):
        return
    plan.mixers[name] = spec
    parameters = dict(mixer.named_parameters())
    yield from ((f"{name}.{tensor}", cut) for tensor, cut in spec.specs.items() if tensor in parameters)
    if f"{spec.output}.bias" in parameters:
        plan.biased.append(f"{name}.{spec.output}")


def _block_specs(name: str, block: nn.Module, config: PretrainedConfig, plan: TPPlan) -> Iterator[tuple[str, TPSpec]]:
    for path, module in block.named_modules(prefix=name):
        leaves = {leaf for leaf, _ in module.named_children()}
        if leaves & {*QUERY, *FUSED, *MIXED} and leaves & {*OUT}:
            yield from _attention_specs(path, module, config, plan)
        elif leaves & {*GATE_UP, *FUSED_GATE_UP} and leaves & {*OUT}:
            yield from _mlp_specs(path, module, plan)
        elif is_experts(module):
            yield from _expert_specs(path, module, plan)


def _attention_specs(
    name: str, module: nn.Module, config: PretrainedConfig, plan: TPPlan
) -> Iterator[tuple[str, TPSpec]]:
    heads = int(config.num_attention_heads)
    pairs = int(getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads)
    plan.attention.append(name)
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}"
        if leaf in (*QUERY, *GATES, *LATENT):
            yield from _outputs(path, child, (_heads(path, child, heads),))
        elif leaf in KEY_VALUE:
            yield from _outputs(path, child, (_heads(path, child, pairs, repeat=True),))
        elif leaf in FUSED:
            width = int(module.head_dim)
            count = _exactly(path, hf.linear_widths(child)[1], width) - heads
            keys = DimSegment(_exactly(path, count, 2), width, heads=True, repeat=True)
            yield from _outputs(path, child, (DimSegment(heads, width, heads=True), keys, keys))
        elif leaf in MIXED:
            yield from _outputs(path, child, _mixed(path, child, heads, pairs, config))
        elif leaf in OUT:
            width = _exactly(path, hf.linear_widths(child)[0], heads)
            yield from _inputs(path, child, DimSegment(heads, width, heads=True), plan)
        elif "norm" in leaf:
            yield from _norm_specs(path, leaf, child, module, (heads, pairs), plan)
    for leaf, parameter in module.named_parameters(recurse=False):
        if tuple(parameter.shape) == (heads,):  # attention sinks
            yield f"{name}.{leaf}", TPSpec(0, (DimSegment(heads, heads=True),))


def _mixed(name: str, linear: nn.Module, heads: int, pairs: int, config: PretrainedConfig) -> tuple[DimSegment, ...]:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        width = _width(name, linear, heads + 2)
        key = DimSegment(1, width, heads=True, repeat=True)
        return DimSegment(heads, width, heads=True), key, key
    return (_heads(name, linear, pairs),)


def _norm_specs(
    path: str, leaf: str, norm: nn.Module, attention: nn.Module, counts: tuple[int, int], plan: TPPlan
) -> Iterator[tuple[str, TPSpec]]:
    """Specs of a norm of queries or keys. A norm per head has one weight for all heads, which is not sharded, or a
    weight per head. A norm over all heads is added to plan.joined."""
    projection = getattr(attention, f"{leaf[0]}_proj", None)
    weight = getattr(norm, "weight", None)
    if projection is None or weight is None:
        return
    outputs, count = hf.linear_widths(projection)[1], counts[leaf[0] == "k"]
    segment = DimSegment(count, outputs // count, heads=True, repeat=leaf[0] == "k")
    if weight.ndim == 2 and weight.numel() == outputs:
        yield f"{path}.weight", TPSpec(0, (DimSegment(count, 1, heads=True, repeat=segment.repeat),))
    elif tuple(weight.shape) == (outputs,) and count > 1:
        plan.joined[path] = TPSpec(0, (segment,))


def _mlp_specs(name: str, module: nn.Module, plan: TPPlan) -> Iterator[tuple[str, TPSpec]]:
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}"
        if leaf in GATE_UP:
            yield from _outputs(path, child, (_columns(hf.linear_widths(child)[1]),))
        elif leaf in FUSED_GATE_UP:
            yield from _outputs(path, child, (_columns(_exactly(path, hf.linear_widths(child)[1], 2)),) * 2)
        elif leaf in OUT:
            yield from _inputs(path, child, _columns(hf.linear_widths(child)[0]), plan)


def _expert_specs(name: str, experts: nn.Module, plan: TPPlan) -> Iterator[tuple[str, TPSpec]]:
    """Specs of experts whose weights are stacked: [experts, out, in], or transposed [experts, in, out]."""
    if hf.is_fused_experts(experts):
        transposed = experts.is_transposed
    else:  # weights are [experts, in, 2 x width] and [experts, width, out] if transposed
        transposed = bool(experts.gate_up_proj.shape[2] == 2 * experts.down_proj.shape[1])
    for leaf, parameter in experts.named_parameters(recurse=False):
        if leaf.startswith("down_proj"):
            if parameter.ndim == 3:
                dim = 1 if transposed else 2
                yield f"{name}.{leaf}", TPSpec(dim, (_columns(parameter.shape[dim]),))
            else:
                plan.biased.append(name)
                yield f"{name}.{leaf}", TPSpec()
            continue
        dim = 2 if transposed and parameter.ndim == 3 else 1
        width = parameter.shape[dim]
        if leaf.startswith("gate_up_proj") and not getattr(experts, "is_concatenated", True):
            yield f"{name}.{leaf}", TPSpec(dim, (_columns(width // 2, 2),))  # columns of gate and up alternate
        else:
            halves = 2 if leaf.startswith("gate_up_proj") else 1
            yield f"{name}.{leaf}", TPSpec(dim, (_columns(width // halves),) * halves)


def _columns(width: int, elements: int = 1) -> DimSegment:
    """A segment of `width` columns with `elements` elements each. It can be split at multiples of _COLUMNS columns, or
    at every column if _COLUMNS does not divide the width."""
    unit = _COLUMNS if width % _COLUMNS == 0 else 1
    return DimSegment(width // unit, unit * elements)


def _outputs(name: str, linear: nn.Module, parts: tuple[DimSegment, ...]) -> Iterator[tuple[str, TPSpec]]:
    yield f"{name}.weight", TPSpec(1 if hf.is_transposed(linear) else 0, parts)
    if getattr(linear, "bias", None) is not None:
        yield f"{name}.bias", TPSpec(0, parts)


def _inputs(name: str, linear: nn.Module, part: DimSegment, plan: TPPlan) -> Iterator[tuple[str, TPSpec]]:
    yield f"{name}.weight", TPSpec(0 if hf.is_transposed(linear) else 1, (part,))
    if getattr(linear, "bias", None) is not None:
        plan.biased.append(name)


def _heads(name: str, linear: nn.Module, count: int, *, repeat: bool = False) -> DimSegment:
    return DimSegment(count, _width(name, linear, count), heads=True, repeat=repeat)


def _width(name: str, linear: nn.Module, count: int) -> int:
    return _exactly(name, hf.linear_widths(linear)[1], count)


def _exactly(name: str, total: int, count: int) -> int:
    if total % count:
        raise UserError(
            f"mesh.tp: {name} has a width of {total}, which is not a multiple of {count}, so weft cannot split it by "
            "heads. Set mesh.tp=1."
        )
    return total // count
