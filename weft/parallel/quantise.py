"""Quantised bases (lora.base) over a mesh: which bytes a rank holds, and how they are loaded from files.

Blocks are counted from the first element of the full weight, so the bytes do not depend on the mesh. tp and ep can
split a weight with sharded scales (nf4, mxfp4) only between blocks. FSDP2 splits rows. While a weight is loaded, ranks
all-reduce the largest magnitudes of its blocks once. Weights that files store in the format of `lora.base` keep their
bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.errors import UserError
from weft.launch import flight
from weft.models import hf
from weft.models.experts import use_experts_forward
from weft.models.quantised import (
    CODES,
    SCALES,
    QuantisedWeight,
    WeightPiece,
    is_bytes,
    parts_of,
    replace_weight,
    slices_of_codes,
    slices_of_scales,
)
from weft.models.train_module import TrainModule
from weft.models.transforms import linear_layers
from weft.ops import low_bit
from weft.ops.low_bit import FORMATS, MXFP4, Format
from weft.parallel.shards.boxes import Box, local_box, local_values, overlap, slabs
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpecs
from weft.parallel.shards.layout import TensorMapping
from weft.parallel.shards.load import LoadPlan, fill_box
from weft.parallel.shards.quantised_files import Bnb4Bits, Decoder
from weft.terminal import counted

_SLAB = 1 << 22  # elements that are quantised together, in fp32


@dataclass(frozen=True)
class BaseFormat:
    """How lora.base stores the frozen weights. stored: names of weights that the files store in this format; if there
    are any, no other weight is quantised. kept: the names in `stored` whose bytes are loaded unchanged."""

    form: Format
    stored: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


def base_format(name: str, load: LoadPlan | None) -> BaseFormat:
    """The format of lora.base. load: None if no file is read. Raises UserError for mxfp4 if the files store no weight
    in it, because weft cannot quantise to mxfp4."""
    form = FORMATS[name]
    stored: dict[str, list[tuple[TensorMapping, Decoder]]] = {}
    decoders_of = {} if load is None else load.source.decoders
    for weight, fills in ({} if load is None else load.fills).items():
        decoders = [(mapping, decoders_of.get(file)) for mapping, file in fills]
        in_format = [(m, d) for m, d in decoders if d is not None and d.form is not None and d.form.name == name]
        if len(in_format) == len(decoders):
            stored[weight] = in_format
    if form is MXFP4 and not stored and load is not None:
        raise UserError(
            "lora.base=mxfp4 needs files with weights in MXFP4, and model.path has none. Set lora.base to nf4, int8, "
            "fp8 or compute."
        )
    forms = [decoder.form for pairs in stored.values() for _, decoder in pairs]
    if forms and forms[0] is not None:
        form = forms[0]  # fp8 files may have another block size
    kept = {weight for weight, pairs in stored.items() if _has_equal_blocks(form, pairs)}
    return BaseFormat(form, frozenset(stored), frozenset(kept))


def _has_equal_blocks(form: Format, pairs: Sequence[tuple[TensorMapping, Decoder]]) -> bool:
    """Whether the blocks in the files are blocks of the weight, so that bytes can be loaded unchanged. pairs: the
    tensors in files that make up the weight."""
    shape = tuple(max(ends) for ends in zip(*(mapping.box.end for mapping, _ in pairs), strict=True))
    for mapping, decoder in pairs:
        columns_dim, box = len(shape) - 1, mapping.box
        if decoder.form != form or mapping.dims[-2:] != (columns_dim - 1, columns_dim):
            return False
        if form.sharded and (len(pairs) > 1 or mapping.dims != tuple(range(len(shape)))):
            return False
        for dim, block in zip((columns_dim - 1, columns_dim), form.block, strict=True):
            size = block or shape[dim]
            if box.start[dim] % size or (box.end[dim] % size and box.end[dim] != shape[dim]):
                return False
    return True


def quantisable(
    module: TrainModule, whole_shapes: Mapping[str, tuple[int, ...]], base: BaseFormat
) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (module, attribute) of every frozen weight that the format can store.

    These are weights of linear layers of the decoder, and of fused experts. Routers, embeddings, heads, norms and
    mixers with state are not quantised. With sharded scales, a weight that does not divide into blocks is not
    quantised either. whole_shapes: name -> full shape, for weights that tp or ep has sharded.
    """
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
        if weight is not None
        and not weight.requires_grad
        and (name in base.stored if base.stored else base.form is not MXFP4 or weight.ndim == 3)
        and _divides(base.form, whole_shapes.get(name, tuple(weight.shape)))
    }


def _divides(form: Format, shape: Sequence[int]) -> bool:
    """Whether the last two numbers of a size, or of a start index, are multiples of the blocks of sharded scales."""
    units = _units(form)
    return not (shape[-2] % units[0] or shape[-1] % units[1])


def _units(form: Format) -> tuple[int, int]:
    """(rows, columns): a mesh can split a weight only at multiples of these."""
    return (form.block[0], max(form.block[1], form.per_byte)) if form.sharded else (1, 1)


def describe(module: TrainModule, elements: int) -> str:
    """Text about the quantised base, for the first lines of a run. elements: number of elements of all parameters."""
    shapes, form = module.quantised_shapes, module.quantised_form
    assert form is not None
    stored = sum(math.prod(shape) for shape in shapes.values())
    size = sum(math.prod(shape) * form.bytes(shape) for shape in shapes.values()) / stored
    kept = len(module.kept_as_stored)
    origin = f", {'all' if kept == len(shapes) else kept} with the bytes of the files" if kept else ""
    return (
        f"base in {form.title} (not exact): {counted(len(shapes), 'weight')} of the decoder{origin}, "
        f"{stored / elements:.0%} of all parameters, {size:.3f} bytes each; routers, embeddings, heads and norms "
        "are not quantised"
    )


def plan_quantised(module: TrainModule, cuts: ShardSpecs, base: BaseFormat) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of every weight that will be quantised, of all stages. Raises UserError if there is none, or
    if tp splits one inside a block whose scale is sharded."""
    shapes: dict[str, tuple[int, ...]] = {}
    form, units = base.form, _units(base.form)
    # Decided from full shapes, not from a rank's shards: the set of quantised weights must not depend on the mesh.
    whole_shapes = {name: spec.shape for name, spec in cuts.items()}
    for name, (owner, leaf) in quantisable(module, whole_shapes, base).items():
        local = owner._parameters[leaf]
        assert local is not None
        spec = cuts.get(name)
        shapes[name] = tuple(local.shape) if spec is None else spec.shape
        for piece in _pieces(tuple(local.shape), spec):
            if _divides(form, piece.start) and _divides(form, piece.size):
                continue
            dim, side = (-1, "inputs") if piece.start[-1] % units[1] or piece.size[-1] % units[1] else (-2, "rows")
            width, unit = shapes[name][dim], units[dim]
            sizes = [str(n) for n in range(1, width // unit + 1) if width % (n * unit) == 0]
            raise UserError(
                f"lora.base={form.name}: mesh.tp would split the {width} {side} of {name} inside a block of {unit}. "
                f"Set mesh.tp to one of {', '.join(sizes)}, or lora.base=compute."
            )
    if not shapes:
        raise UserError(
            f"lora.base={form.name}: the decoder has no frozen linear layer or experts with rows of a multiple of "
            f"{units[1]} elements. Set lora.base=compute."
        )
    return shapes


def quantise_base(
    module: TrainModule, shapes: Mapping[str, tuple[int, ...]], cuts: ShardSpecs, base: BaseFormat
) -> None:
    """Replace the weights of these names in this rank's stages by uninitialised codes and scales. Must run before FSDP2
    shards the module. shapes: result of plan_quantised."""
    local_names = {name for name, _ in module.named_parameters()}
    module.quantised_shapes, module.quantised_form = {**shapes}, base.form
    module.kept_as_stored = base.kept & shapes.keys()
    for name, whole_shape in shapes.items():
        if name not in local_names:
            module.quantised[name] = None
            continue
        owner, leaf = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        local = owner._parameters[leaf]
        assert local is not None
        if hf.is_fused_experts(owner):
            use_experts_forward(owner)
        pieces = _pieces(tuple(local.shape), cuts.get(name))
        module.quantised[name] = replace_weight(owner, leaf, base.form, whole_shape, pieces)


def _pieces(local_shape: tuple[int, ...], spec: AnyShardSpec | None) -> list[WeightPiece]:
    box = Box.from_shape(local_shape)
    if spec is None:
        return [WeightPiece(box.start, box.size, box.start)]
    return [WeightPiece(full.start, full.size, local.start) for full, local, _ in spec.boxes(box)]


def _shard_boxes(weight: QuantisedWeight, spec: AnyShardSpec | None) -> list[tuple[Box, tuple[slice, ...]]]:
    """(box of the full weight that this rank holds, its slices in the shard), in elements."""
    shard, _ = local_box(weight.codes)
    times = weight.form.per_byte
    box = Box((*shard.start[:-1], times * shard.start[-1]), (*shard.size[:-1], times * shard.size[-1]))
    pairs = [(box, box)] if spec is None else [(full, local) for full, local, _ in spec.boxes(box)]
    return [(full, local.within(box)) for full, local in pairs if full.numel]


@torch.no_grad()
def fill_quantised(
    module: TrainModule,
    plan: LoadPlan,
    cuts: ShardSpecs,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Quantise the base from its files, weight by weight.

    A rank reads its rows and rounds them to `dtype`. It never holds more of the base in `dtype` than its shard of one
    weight, and never more than a slab in fp32. Collective over `group`, all ranks, which agree on the scales. device:
    of the collectives."""
    for name, shape in module.quantised_shapes.items():
        flight.beat()
        weight, form = module.quantised[name], module.quantised_form
        assert form is not None
        if name in module.kept_as_stored:
            if weight is not None:
                _load_unchanged(weight, plan, name, cuts.get(name))
            continue
        largest = torch.zeros(form.grid(shape), device=device)  # of this rank's blocks, 0 elsewhere
        boxes = [] if weight is None else _shard_boxes(weight, cuts.get(name))
        values_by_box = []
        for box, _ in boxes:
            values = torch.empty(box.size, dtype=dtype)
            fill_box(values, box, plan.fills[name], plan.source)
            values_by_box.append(values.to(weight.codes.device))
            for slab in slabs(box, _SLAB):
                in_grid = largest[slices_of_scales(form, slab.within(Box.from_shape(shape)))]
                slab_largest = low_bit.largest_of(form, values_by_box[-1][slab.within(box)], slab.start)
                in_grid.copy_(torch.maximum(in_grid, slab_largest.to(device)))
        join_scales(largest, group)
        if weight is None:
            continue
        scales, shared = low_bit.seal_scales(form, largest)
        weight.shared = tuple(tensor.to(weight.codes.device) for tensor in shared)
        for (box, slices), values in zip(boxes, values_by_box, strict=True):
            codes = local_values(weight.codes)[slices_of_codes(form, slices)]
            for slab in slabs(box, _SLAB):
                in_box = slab.within(box)
                codes[slices_of_codes(form, in_box)] = low_bit.quantise(form, values[in_box], slab.start, weight.shared)
            if scales is not None:
                box_scales = scales[slices_of_scales(form, box.within(Box.from_shape(shape)))]
                local_values(weight.scales)[slices_of_scales(form, slices)] = box_scales.to(weight.codes.device)


def join_scales(largest: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce the largest magnitudes of a weight's blocks, in place. largest: 0 for blocks of which this rank has
    read nothing. Several ranks may have read parts of one block."""
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)


def _load_unchanged(weight: QuantisedWeight, plan: LoadPlan, name: str, spec: AnyShardSpec | None) -> None:
    """Fill this rank's shard with the bytes of the files. Every rank reads the unsharded scales from the files."""
    form, source, device = weight.form, plan.source, weight.codes.device
    pairs = [(mapping, source.decoders[file]) for mapping, file in plan.fills[name]]
    if isinstance(pairs[0][1], Bnb4Bits):
        weight.shared = tuple(tensor.to(device) for tensor in pairs[0][1].groups(source))
    elif form.sharded:
        weight.shared = ()
    else:
        shared = torch.empty(form.grid(weight.whole_shape))
        for mapping, decoder in pairs:
            in_grid = slices_of_scales(form, mapping.box.within(Box.from_shape(weight.whole_shape)))
            scales = decoder.scales(source, mapping.disk_box(mapping.box))
            shared[in_grid] = scales.view(shared[in_grid].shape)
        weight.shared = (shared.to(device),)
    for box, slices in _shard_boxes(weight, spec):
        codes = local_values(weight.codes)[slices_of_codes(form, slices)]
        for mapping, decoder in pairs:
            common = overlap(mapping.box, box)
            if common is None:
                continue
            stored = mapping.to_runtime(decoder.codes(source, mapping.disk_box(common)), common)
            codes[slices_of_codes(form, common.within(box))] = stored.to(device)
            if weight.scales is not None:
                scales = local_values(weight.scales)[slices_of_scales(form, slices)]
                scales.copy_(decoder.scales(source, common).to(device))


def empty_scales(module: TrainModule) -> None:
    """Set the tensors that fill_quantised would set, without values, for a simulation."""
    for weight in module.quantised.values():
        if weight is None:
            continue
        device, shapes = weight.codes.device, weight.form.shared(weight.whole_shape)
        weight.shared = tuple(torch.empty(shape, device=device) for shape in shapes)


def stored_tensors(module: TrainModule, cuts: ShardSpecs) -> tuple[dict[str, Tensor], ShardSpecs]:
    """(name -> this rank's shard, name -> how tp and ep shard it), for the state dict. A quantised weight is
    represented by the tensors in which it is stored (models/quantised.py:parts_of)."""
    tensors, specs = dict(module.state_dict(keep_vars=True)), dict(cuts)
    for name, weight in module.quantised.items():
        if weight is not None:
            tensors |= {name + suffix: tensor for suffix, tensor in parts_of(weight).items()}
    form = module.quantised_form
    for name in module.quantised_shapes.keys() & cuts.keys():
        assert form is not None
        ones = (1,) * (len(cuts[name].shape) - 2)
        specs[name + CODES] = cuts[name].by_blocks((*ones, 1, form.per_byte))
        if form.sharded:
            specs[name + SCALES] = cuts[name].by_blocks((*ones, *form.block))
    return tensors, specs


class DequantisedTensors(Mapping[str, Tensor]):
    """A state dict in which each quantised weight has its original name, instead of the names of its bytes. Reading a
    weight dequantises it. The last weight is cached, because callers read its parts one after the other."""

    def __init__(self, module: TrainModule, cuts: ShardSpecs, dtype: torch.dtype) -> None:
        self._module, self._cuts, self._dtype = module, cuts, dtype
        self._cached: dict[str, Tensor] = {}
        state = module.state_dict(keep_vars=True)
        self._tensors = {name: tensor for name, tensor in state.items() if not is_bytes(module.quantised_shapes, name)}
        self._names = [*self._tensors, *(name for name, weight in module.quantised.items() if weight is not None)]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._module.quantised.get(name)
        if weight is None:
            return self._tensors[name]
        if name not in self._cached:
            self._cached = {name: _dequantised_shard(weight, self._cuts.get(name), self._dtype)}
        return self._cached[name]


@torch.no_grad()
def _dequantised_shard(weight: QuantisedWeight, spec: AnyShardSpec | None, dtype: torch.dtype) -> Tensor:
    """The dequantised weight, sharded like its codes."""
    codes, scales = local_values(weight.codes), None if weight.scales is None else local_values(weight.scales)
    times = weight.form.per_byte
    values = torch.empty(*codes.shape[:-1], times * codes.shape[-1], dtype=dtype, device=codes.device)
    for box, slices in _shard_boxes(weight, spec):
        values[slices] = weight.box(codes, scales, slices, box.start, dtype)
    stored = weight.codes
    if not isinstance(stored, DTensor):
        return values
    shape = torch.Size([*stored.shape[:-1], times * stored.shape[-1]])
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        values, stored.device_mesh, stored.placements, run_check=False, shape=shape, stride=strides
    )
