"""Tensor parallelism: each rank of the axis computes with its part of heads, intermediate width and vocabulary.

The shards are plain tensors, made before FSDP2 shards them further, so the code of layers runs unchanged. The output of
a sharded block is summed over the ranks, and so is the gradient of its input: the operators g and f of Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053, section 3). Some weights are complete on every rank, but each rank uses them
only for its part (norms of heads, routers). Their gradients are summed over the ranks once per step."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from weft.errors import UserError
from weft.launch.consistency import checksum_term
from weft.models import hf
from weft.models.experts import use_experts_forward
from weft.models.low_rank import LowRank
from weft.models.mixer_shards import MixerShard
from weft.models.segments import Range, TPSpec, divide_segment, scaled_ranges
from weft.models.train_module import TrainModule
from weft.ops.communicator import Communicator, all_reduce
from weft.ops.head import VocabularyShard
from weft.ops.recompute import reuse_in_recompute
from weft.parallel.mesh import TPAxis, local_shard
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpec, split
from weft.parallel.tp.plan import TPPlan, find_tp_plan
from weft.parallel.tp.sequence import GatherTokens, ReduceScatterTokens, join_last_states


@dataclass(frozen=True)
class TensorParallel:
    """How tp shards a model. cuts: every name of a parameter -> its shards. partial: parameter whose gradient must be
    summed over ranks -> number of ranks with equal elements -> their communicator. sequence: whether tokens are sharded
    between blocks."""

    cuts: dict[str, AnyShardSpec]
    partial: dict[str, dict[int, Communicator]]
    sequence: bool = False


def tensor_parallel(
    module: TrainModule, axis: TPAxis | None, config: PretrainedConfig, *, sequence: bool = False
) -> TensorParallel:
    """Shard a model (on meta) and hook it to compute with its shards. Raises UserError if a size does not divide.

    axis: None leaves the model unchanged. sequence: also shard tokens between blocks. Row lengths must then be
    multiples of the axis' size."""
    if axis is None:
        return TensorParallel({}, {})
    plan = find_tp_plan(module, config.get_text_config(), axis.size)
    cuts = {
        name: tp_shard_spec(name, tuple(parameter.shape), plan.specs[name], axis)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    _replace_parameters(module, cuts)
    _hook_modules(module, plan, cuts, axis, sequence)
    vocabulary = [name for name in (module.facts.embedding, module.facts.head) if cuts[f"{name}.weight"].divides]
    inside = ("",) if sequence else tuple(f"{name}." for name in (*plan.regions, *vocabulary))
    partial = find_partial_parameters(cuts, axis, inside)
    if sequence and module.facts.head not in vocabulary:  # every rank's head reads all tokens: complete gradients
        partial = {name: ranks for name, ranks in partial.items() if not name.startswith(f"{module.facts.head}.")}
    return TensorParallel({**cuts}, partial, sequence)


def find_partial_parameters(
    cuts: dict[str, ShardSpec], axis: TPAxis, inside: tuple[str, ...]
) -> dict[str, dict[int, Communicator]]:
    """The parameters that several ranks hold, but that each uses only for its heads, columns or tokens: name -> number
    of ranks with equal elements -> their communicator. inside: prefixes of the names of sharded blocks."""
    numbers = sorted({copies for cut in cuts.values() for copies in cut.copies if copies > 1})
    groups = {copies: axis.neighbours(copies) for copies in numbers}
    return {
        name: {copies: groups[copies] for copies in cut.copies if copies > 1}
        for name, cut in cuts.items()
        if max(cut.copies) > 1 and name.startswith(inside)
    }


def tp_shard_spec(name: str, shape: tuple[int, ...], spec: TPSpec, axis: TPAxis) -> ShardSpec:
    """The shards of a parameter. spec: how it is sharded. Raises UserError if a size does not divide."""
    if spec.dim is None:
        full_range = ((0, shape[0]),) if shape else ((0, 1),)
        return ShardSpec(shape, 0, (full_range,) * axis.size, (axis.size,), axis.rank, axis.ranks)
    ranges: list[tuple[Range, ...]] = [()] * axis.size
    offset, copies = 0, list[int]()
    for segment in spec.segments:
        division = divide_segment(segment, axis.size)
        if division is None:
            items = "heads of keys and values" if segment.repeat else "heads" if segment.heads else "columns"
            sizes = ["1", *(str(n) for n in range(2, segment.count + 1) if segment.count % n == 0)]
            raise UserError(
                f"mesh.tp={axis.size} does not divide the {segment.count} {items} of {name}. Set mesh.tp to one of "
                f"{', '.join(sizes)}."
            )
        items_by_rank, num_copies = division
        copies.append(num_copies)
        elements = scaled_ranges(items_by_rank, segment.width, offset)
        ranges = [(*rank_ranges, added) for rank_ranges, added in zip(ranges, elements, strict=True)]
        offset += segment.size
    return ShardSpec(shape, spec.dim, tuple(ranges), tuple(copies), axis.rank, axis.ranks)


def _replace_parameters(module: TrainModule, cuts: dict[str, ShardSpec]) -> None:
    """Replace each sharded parameter by this rank's shard, uninitialised. Tied parameters stay tied."""
    shards: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not cuts[name].divides:
            continue
        if id(parameter) not in shards:
            shard = torch.empty(cuts[name].local_shape(), dtype=parameter.dtype, device=parameter.device)
            shards[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        owner_name, _, leaf = name.rpartition(".")
        owner: Any = module.get_submodule(owner_name)
        setattr(owner, leaf, shards[id(parameter)])
        if leaf == "weight" and hf.is_transposed(owner):
            owner.nf = owner.weight.shape[1]  # the forward of transformers' Conv1D reads its output width from `nf`


def _hook_modules(module: TrainModule, plan: TPPlan, cuts: dict[str, ShardSpec], axis: TPAxis, sequence: bool) -> None:
    """Hook every sharded module. Hooks run in the order of registration. Adapters were attached earlier, so they have
    added to a layer's output before a region's hook sums it."""
    enter, leave = (GatherTokens, ReduceScatterTokens) if sequence else (_SumGradient, _Sum)
    for region in _modules(module, plan.regions):
        region.register_forward_pre_hook(_enter(axis.ranks, enter), with_kwargs=True)
        region.register_forward_hook(_leave(axis.ranks, leave))
    if sequence:
        join_last_states(module.base, axis.ranks, axis.rank)
    for layer in _modules(module, plan.biased):
        share_bias(layer, axis.size)
    for name, spec in plan.joined.items():
        norm = module.get_submodule(name)
        width = sum(segment.size for segment in spec.segments)
        cut = tp_shard_spec(name, (width,), spec, axis)
        norm.register_forward_pre_hook(lambda _, args, cut=cut: (_JoinFeatures.apply(args[0], cut), *args[1:]))
        norm.register_forward_hook(lambda _, __, output, cut=cut: _along_last_dim(cut, output).take(output))
    for attention in _modules(module, plan.attention):
        _count_local_heads(attention, axis.size)
    for name, mixer in plan.mixers.items():
        module.mixers[name].shard = MixerShard(mixer, axis.rank, axis.size, axis.neighbours, stored=True)
    for name, adapter in module.named_modules():
        if isinstance(adapter, LowRank) and cuts[f"{name}.A"].divides:
            adapter.divide(partial(_take_last_dim, cuts[f"{name}.A"]), partial(all_reduce, ranks=axis.ranks))
    divide_vocabulary(module, cuts, axis, leave)


def _modules(module: nn.Module, names: list[str]) -> list[nn.Module]:
    """The modules of these names, without repetitions. A block that layers share has several names."""
    return list({id(child): child for child in map(module.get_submodule, names)}.values())


def _enter(ranks: Communicator, operation: type[torch.autograd.Function]) -> Callable[..., Any]:
    """A pre-hook that applies `operation` to the first argument, or else to the argument `hidden_states`."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if args:
            return (operation.apply(args[0], ranks), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": operation.apply(kwargs["hidden_states"], ranks)}

    return hook


def _leave(ranks: Communicator, operation: type[torch.autograd.Function]) -> Callable[..., Any]:
    """A hook that applies `operation` to the output, or to the first element of a tuple."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (operation.apply(output[0], ranks), *output[1:])
        return operation.apply(output, ranks)

    return hook


class _SumGradient(torch.autograd.Function):
    """f: the identity on the input of sharded layers. Backward sums the ranks' gradients, because each rank has the
    gradient through its shards only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.ranks), None


class _Sum(torch.autograd.Function):
    """g: the sum of the ranks' outputs of sharded layers. Its gradient is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator) -> Tensor:
        return reuse_in_recompute(lambda: all_reduce(x, ranks), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _JoinFeatures(torch.autograd.Function):
    """[..., local features] -> [..., all features], for norms over all heads (olmo2's q_norm)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: ShardSpec) -> Tensor:
        ctx.cut = cut
        return reuse_in_recompute(lambda: _along_last_dim(cut, x).join(x), "collectives")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cut: ShardSpec = ctx.cut
        local = _along_last_dim(cut, grad).take(all_reduce(grad, cut.ranks))
        # If copies > 1, ranks with equal features sum their gradients once more, in sum_partial_gradients.
        return local / cut.copies[0], None


def _along_last_dim(cut: ShardSpec, x: Tensor) -> ShardSpec:
    """The shards of a vector, as shards of activations like `x` along their last dimension."""
    return replace(cut, shape=(*x.shape[:-1], *cut.shape), dim=x.ndim - 1)


def _take_last_dim(cut: ShardSpec, x: Tensor) -> Tensor:
    """[..., inputs] -> [..., local inputs]. cut: shards of a matrix A of adapters, along its columns."""
    return replace(cut, shape=tuple(x.shape), dim=x.ndim - 1).take(x)


def share_bias(module: nn.Module, ranks: int) -> None:
    """Hook a layer whose output is summed over ranks, so that its bias counts once: each rank adds 1 / ranks of it."""
    share = 1.0 / ranks - 1.0

    def linear(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + share * module.bias

    if hasattr(module, "bias"):
        module.register_forward_hook(linear)
    else:
        module.weft_bias_share = 1.0 / ranks  # experts_forward reads it
        use_experts_forward(module)


_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "split_size")


def _count_local_heads(attention: Any, ranks: int) -> None:
    """Set the head counts of a module, and of a copy of its config, to this rank's. The code of some families reads
    these instead of shapes."""
    attention.config = copy.copy(getattr(attention, "config", None))
    for owner in (attention, attention.config):
        for name in _COUNTS:
            count = getattr(owner, name, None)
            if isinstance(count, int):
                setattr(owner, name, max(1, count // ranks))


def divide_vocabulary(
    module: TrainModule, cuts: dict[str, ShardSpec], axis: TPAxis, total: type[torch.autograd.Function]
) -> None:
    """Hook embedding and head to use their shards of the vocabulary. The embedding of a token of another rank is zero,
    and `total` sums the outputs over the ranks."""
    embedding: Any = module.get_submodule(module.facts.embedding)
    cut = cuts[f"{module.facts.embedding}.weight"]
    ((first, count),) = cut.ranges[cut.rank]
    padding = embedding.padding_idx
    if padding is not None:
        embedding.padding_idx = padding - first if first <= padding < first + count else None
    other_ranks: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        local_ids = args[0] - first
        other_ranks.append((local_ids < 0) | (local_ids >= count))
        return (local_ids.clamp(0, count - 1),)

    def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return total.apply(output.masked_fill(other_ranks.pop()[..., None], 0.0), axis.ranks)

    embedding.register_forward_pre_hook(enter)
    embedding.register_forward_hook(leave)
    head = f"{module.facts.head}.weight"
    if cuts[head].divides:
        shard = VocabularyShard(cuts[head].ranges[axis.rank][0][0], axis.ranks)
        module.head.divide(shard, lambda hidden: _SumGradient.apply(hidden, axis.ranks))


def random_difference(axis: TPAxis, device: torch.device) -> float:
    """This rank's term of a sum over the ranks of tp. The sum is 0 if all ranks have the same random state."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return float(checksum_term(zlib.crc32(state.numpy().tobytes()) & 0xFFFFFF, axis.rank, axis.size))


@torch.no_grad()
def sum_partial_gradients(module: nn.Module, divided: TensorParallel) -> None:
    """Sum the gradients of the parameters in `divided.partial` over the ranks, once per step. Collective over tp."""
    cuts, partial = divided.cuts, divided.partial
    buckets: dict[tuple[Communicator, torch.dtype], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if name in partial and parameter.grad is not None:
            for copies, gradient in split(parameter, local_shard(parameter.grad), cuts[name]):
                if copies > 1:
                    buckets.setdefault((partial[name][copies], gradient.dtype), []).append(gradient)
    for (ranks, _), gradients in buckets.items():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        ranks.sum_(flat)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(total.view_as(gradient))
