"""Quantised bases (lora.base: nf4) over a mesh: which bytes a rank holds, and how files fill them.

Blocks of 64 elements and groups of 256 scales lie along the whole weight, so that the bytes do not depend on the mesh:
tp and ep may cut a weight only between blocks, and FSDP2 cuts rows. The scales of a weight are gathered once, while it
is loaded, because they are relative to their mean over the whole weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.errors import UserError
from weft.launch import flight
from weft.models import hf
from weft.models.experts import use_experts_forward
from weft.models.quantised import QuantisedWeight, WeightPiece, is_bytes, replace_weight
from weft.models.train_module import TrainModule
from weft.models.transforms import linear_layers
from weft.ops import nf4
from weft.ops.nf4 import BLOCK, ScaleGroups
from weft.parallel.shards.boxes import Box, local_box, local_values
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpecs
from weft.parallel.shards.load import LoadPlan, fill_box
from weft.terminal import counted


def quantisable(module: TrainModule, whole_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (module, name in it) of every frozen weight that 4 bits can store: of linear layers of the decoder, and
    of fused experts. Routers, embeddings, heads, norms and mixers with state stay as they are, and so do weights whose
    last dimension is no multiple of 64. whole_shapes: name -> whole shape, of weights that tp and ep have divided."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    for name, layer in linear_layers(module):
        if not hf.is_transposed(layer) and not name.startswith(tuple(f"{mixer}." for mixer in module.mixers)):
            owners[f"{name}.weight"] = layer, "weight"
    for name, child in module.named_modules():
        if hf.is_fused_experts(child):
            leaves = [leaf for leaf, _ in child.named_parameters(recurse=False) if leaf in hf.EXPERT_WEIGHTS]
            owners |= {f"{name}.{leaf}": (child, leaf) for leaf in leaves}
    weights = {name: owner._parameters[leaf] for name, (owner, leaf) in owners.items()}
    return {
        name: owners[name]
        for name, weight in weights.items()
        if weight is not None and not weight.requires_grad and not whole_shapes.get(name, weight.shape)[-1] % BLOCK
    }


def describe(shapes: Mapping[str, tuple[int, ...]], elements: int) -> str:
    """For the opening lines of a run. elements: of all parameters."""
    stored = sum(math.prod(shape) for shape in shapes.values())
    return (
        f"base in NF4 (not exact): {counted(len(shapes), 'weight')} of the decoder, {stored / elements:.0%} of all "
        f"parameters, at {nf4.BYTES:.3f} bytes each; routers, embeddings, heads and norms stay as they are"
    )


def plan_quantised(module: TrainModule, cuts: ShardSpecs) -> dict[str, tuple[int, ...]]:
    """Name -> whole shape of every weight that will be quantised, of all stages. Raises UserError if there is none, or
    if tp cuts one inside a block."""
    shapes: dict[str, tuple[int, ...]] = {}
    # A rank's part decides nothing: whether a weight is quantised must not depend on the mesh.
    for name, (owner, leaf) in quantisable(module, {name: spec.shape for name, spec in cuts.items()}).items():
        part = owner._parameters[leaf]
        assert part is not None
        spec = cuts.get(name)
        shapes[name] = tuple(part.shape) if spec is None else spec.shape
        for piece in _pieces(tuple(part.shape), spec):
            if piece.start[-1] % BLOCK or piece.size[-1] % BLOCK:
                width = shapes[name][-1]
                sizes = [str(n) for n in range(1, width // BLOCK + 1) if width % (n * BLOCK) == 0]
                raise UserError(
                    f"lora.base=nf4: mesh.tp would cut the {width} inputs of {name} inside a block of {BLOCK}: set "
                    f"mesh.tp to one of {', '.join(sizes)}, or lora.base=compute."
                )
    if not shapes:
        raise UserError(
            "lora.base=nf4 finds no frozen linear layer or experts in the decoder whose rows are multiples of "
            f"{BLOCK}: set lora.base=compute."
        )
    return shapes


def quantise_base(module: TrainModule, shapes: Mapping[str, tuple[int, ...]], cuts: ShardSpecs) -> None:
    """Replace the weights of these names, as far as this rank's stages have them, by bytes, uninitialised. Before FSDP2
    shards the module."""
    local_names = {name for name, _ in module.named_parameters()}
    module.quantised_shapes = {**shapes}
    for name, whole_shape in shapes.items():
        if name not in local_names:
            module.quantised[name] = None
            continue
        owner, leaf = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        part = owner._parameters[leaf]
        assert part is not None
        if hf.is_fused_experts(owner):
            use_experts_forward(owner)
        module.quantised[name] = replace_weight(owner, leaf, whole_shape, _pieces(tuple(part.shape), cuts.get(name)))


def _pieces(part: tuple[int, ...], spec: AnyShardSpec | None) -> list[WeightPiece]:
    box = Box.from_shape(part)
    if spec is None:
        return [WeightPiece(box.start, box.size, box.start)]
    return [WeightPiece(whole.start, whole.size, local.start) for whole, local, _ in spec.boxes(box)]


def _shard_boxes(codes: Tensor, spec: AnyShardSpec | None) -> list[tuple[Box, tuple[slice, ...]]]:
    """(box of the whole weight that this rank's shard holds, where it is in the shard), in elements."""
    shard, _ = local_box(codes)
    box = Box((*shard.start[:-1], 2 * shard.start[-1]), (*shard.size[:-1], 2 * shard.size[-1]))
    pairs = [(box, box)] if spec is None else [(whole, local) for whole, local, _ in spec.boxes(box)]
    return [(whole, local.within(box)) for whole, local in pairs if whole.numel]


def _last(slices: tuple[slice, ...], divisor: int) -> tuple[slice, ...]:
    """Slices of elements as slices of what `divisor` elements share along the last dimension."""
    last = slices[-1]
    return (*slices[:-1], slice(last.start // divisor, last.stop // divisor))


@torch.no_grad()
def fill_quantised(
    module: TrainModule,
    plan: LoadPlan,
    cuts: ShardSpecs,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Quantise the base from its files, one weight after the other: a rank reads its own rows, rounds them to `dtype`,
    and never has more of the base in that dtype than its shard of one weight. Collective over all ranks, which agree on
    the scales. device: of the collectives."""
    for name, shape in module.quantised_shapes.items():
        flight.beat()
        weight = module.quantised[name]
        rows = torch.zeros(*shape[:-1], shape[-1] // BLOCK, device=device)  # this rank's scales, 0 elsewhere
        if weight is not None:
            for box, slices in _shard_boxes(weight.codes, cuts.get(name)):
                values = torch.empty(box.size, dtype=dtype)
                fill_box(values, box, plan.fills[name], plan.source)
                codes, scales = nf4.quantise(values.to(weight.codes.device))
                local_values(weight.codes)[_last(slices, 2)] = codes
                rows[_last(box.within(Box.from_shape(shape)), BLOCK)] = scales.to(device)
        join_scales(rows, group)
        if weight is None:
            continue
        codes, groups = nf4.quantise_scales(rows)
        weight.groups = ScaleGroups(*(part.to(weight.codes.device) for part in groups))
        for box, slices in _shard_boxes(weight.codes, cuts.get(name)):
            of_box = codes[_last(box.within(Box.from_shape(shape)), BLOCK)]
            local_values(weight.scales)[_last(slices, BLOCK)] = of_box.to(weight.scales.device)


def join_scales(rows: Tensor, group: dist.ProcessGroup) -> None:
    """Complete the scales of a weight by those that other ranks have computed; they are 0 here. Several ranks may have
    the same."""
    dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=group)


def empty_groups(module: TrainModule) -> None:
    """What fill_quantised sets, without values, for a simulation."""
    for weight in module.quantised.values():
        if weight is not None:
            count = math.prod(weight.whole_shape) // BLOCK
            largest = torch.empty(-(-count // nf4.GROUP), device=weight.codes.device)
            weight.groups = ScaleGroups(largest, largest.new_empty(()))


class DequantisedTensors(Mapping[str, Tensor]):
    """A state dict with each quantised weight under its own name, dequantised when it is read, in place of its
    bytes."""

    def __init__(self, module: TrainModule, cuts: ShardSpecs, dtype: torch.dtype) -> None:
        self._module, self._cuts, self._dtype = module, cuts, dtype
        state = module.state_dict(keep_vars=True)
        self._tensors = {name: tensor for name, tensor in state.items() if not is_bytes(module, name)}
        self._names = [*self._tensors, *(name for name, weight in module.quantised.items() if weight is not None)]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._module.quantised.get(name)
        return self._tensors[name] if weight is None else _dequantised_shard(weight, self._cuts.get(name), self._dtype)


@torch.no_grad()
def _dequantised_shard(weight: QuantisedWeight, spec: AnyShardSpec | None, dtype: torch.dtype) -> Tensor:
    """The weight, sharded as its bytes are."""
    codes, scales, groups = local_values(weight.codes), local_values(weight.scales), weight.groups
    assert groups is not None
    values = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype, device=codes.device)
    for box, slices in _shard_boxes(weight.codes, spec):
        index = WeightPiece(box.start, box.size, box.start).scale_index(weight.whole_shape, codes.device)
        of_box = nf4.dequantise_scales(scales[_last(slices, BLOCK)], groups, index)
        values[slices] = nf4.dequantise(codes[_last(slices, 2)], of_box, dtype)
    stored = weight.codes
    if not isinstance(stored, DTensor):
        return values
    shape = torch.Size([*stored.shape[:-1], 2 * stored.shape[-1]])
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        values, stored.device_mesh, stored.placements, run_check=False, shape=shape, stride=strides
    )
