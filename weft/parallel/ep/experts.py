"""Expert parallelism: each rank of ep computes some experts of every layer.

A rank's experts are plain tensors. FSDP2 then shards them over the ranks that hold the same experts. Tokens are sent to
their experts and back (ops/dispatch.py), so the ranks that hold an expert have its complete gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.models import hf
from weft.models.experts import find_experts, use_experts_forward
from weft.models.low_rank import LowRank
from weft.models.segments import Range, even_ranges
from weft.models.train_module import TrainModule
from weft.ops.communicator import Communicator
from weft.ops.dispatch import Dispatched, ExpertPlacement, combine, dispatch
from weft.parallel.mesh import EPAxis
from weft.parallel.shards.cuts import AnyShardSpec, NestedShardSpec, ShardSpec, ShardSpecs


def expert_parallel(module: TrainModule, ranks: EPAxis | None, cuts: ShardSpecs) -> dict[str, AnyShardSpec]:
    """Shard the experts of a model (on meta) and make them exchange tokens. Returns `cuts`, extended by the experts.

    cuts: how tp shards parameters. Raises UserError if the model has no experts, or a layer fewer than ranks.
    """
    result = dict(cuts)
    if ranks is None:
        return result
    experts = find_experts(module)
    if not experts:
        raise UserError(
            f"mesh.ep={ranks.size}: weft finds no experts in a model of type {module.facts.model_type}. Set mesh.ep=1."
        )
    for name, child in experts.items():
        result |= _divide(name, child, ranks, result)
    return result


def _divide(name: str, experts: Any, ranks: EPAxis, cuts: ShardSpecs) -> dict[str, AnyShardSpec]:
    count = int(experts.num_experts)
    if count < ranks.size:
        raise UserError(
            f"mesh.ep={ranks.size} is more than the {count} experts of {name}. Set mesh.ep to {count} or less."
        )
    result: dict[str, AnyShardSpec] = {}
    for leaf, parameter in list(experts.named_parameters()):
        path = f"{name}.{leaf}"
        tp_cut = cuts.get(path)
        assert tp_cut is None or isinstance(tp_cut, ShardSpec)
        shape = tuple(parameter.shape) if tp_cut is None else tp_cut.shape
        cut = cut_of_expert(shape, count, tp_cut, ranks, strided=strided(experts, leaf))
        shard = torch.empty(cut.local_shape(), dtype=parameter.dtype, device=parameter.device)
        owner, _, attribute = leaf.rpartition(".")
        setattr(experts.get_submodule(owner), attribute, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        result[path] = cut
    experts_by_rank = even_ranges(count, ranks.size)
    exchange_tokens(experts, ExpertPlacement(ranks.rank, tuple(size for _, size in experts_by_rank), ranks.ranks))
    return result


def cut_of_expert(
    shape: tuple[int, ...], count: int, tp_cut: ShardSpec | None, ranks: EPAxis, *, strided: bool
) -> AnyShardSpec:
    """The shards of one tensor of a layer's `count` experts. tp_cut: how tp shards it. strided: see
    `split_by_experts`."""
    outer = split_by_experts(shape, even_ranges(count, ranks.size), strided, ranks)
    return outer if tp_cut is None else _nested(outer, tp_cut, ranks.with_tp)


def split_by_experts(shape: tuple[int, ...], experts_by_rank: list[Range], strided: bool, ranks: EPAxis) -> ShardSpec:
    """Shards by experts, along the first dimension (weights [experts, ...], matrix A of adapters [experts x r, ...]).

    strided: along the second dimension, in which the index of the expert varies fastest (matrix B [..., r x experts]).
    """
    count, dim = sum(size for _, size in experts_by_rank), int(strided)
    times = shape[dim] // count
    if strided:
        ranges = [tuple((repeat * count + first, size) for repeat in range(times)) for first, size in experts_by_rank]
    else:
        ranges = [((first * times, size * times),) for first, size in experts_by_rank]
    copies = (1,) * len(ranges[0])
    return ShardSpec(shape, dim, tuple(ranges), copies, ranks.rank, ranks.ranks)


def strided(experts: nn.Module, leaf: str) -> bool:
    """Whether a tensor of experts is a matrix B of adapters. In its second dimension, the index of the expert varies
    fastest."""
    owner, _, matrix = leaf.rpartition(".")
    return isinstance(experts.get_submodule(owner), LowRank) and matrix == "B"


def _nested(outer: ShardSpec, inner: ShardSpec, ranks: Communicator | None) -> NestedShardSpec:
    assert ranks is not None
    shape = outer.local_shape()
    if inner.divides:
        assert inner.dim != outer.dim
        return NestedShardSpec(outer, replace(inner, shape=shape), ranks)
    dim = next(d for d in range(len(shape)) if d != outer.dim)
    full_range = ((0, shape[dim]),)
    return NestedShardSpec(outer, replace(inner, shape=shape, dim=dim, ranges=(full_range,) * inner.size), ranks)


def exchange_tokens(experts: Any, axis: ExpertPlacement) -> None:
    """Make a layer's experts exchange tokens over `axis`. The layer must already have only this rank's experts."""
    if hf.is_fused_experts(experts):
        experts.weft_axis = axis
        use_experts_forward(experts)
    else:
        _exchange_dense(experts, axis)


def _exchange_dense(experts: nn.Module, axis: ExpertPlacement) -> None:
    """Hook experts whose input is every token for every expert, [experts x tokens, H] (llama4). Tokens that are not
    routed to an expert are zeros."""
    pending: list[Dispatched] = []

    def enter(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        total, tokens = sum(axis.experts), len(args[0]) // sum(axis.experts)
        ends = torch.arange(1, total + 1, dtype=torch.int32, device=args[0].device) * tokens
        pending.append(dispatch(args[0], ends, axis))
        return (pending[-1].rows_RH,)

    def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return combine(output, pending.pop(), axis)

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(leave)
