"""Loads weights into a sharded model. Every rank reads only the boxes that it holds.

The plan needs only names and shapes. It is made before any weights are read, so missing, unexpected and misshapen
tensors are reported immediately.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.errors import UserError
from weft.launch import flight
from weft.launch.process import rank_and_world, world_group
from weft.models import hf
from weft.models.lora import is_adapters
from weft.models.quantised import is_bytes
from weft.models.train_module import TrainModule
from weft.parallel.shards.boxes import Box, local_box, overlap, shard_of
from weft.parallel.shards.cuts import ShardSpecs, shards_of
from weft.parallel.shards.layout import TensorMapping, map_tensors
from weft.parallel.shards.source import TensorSource

Fills = Mapping[
    str, Sequence[tuple[TensorMapping, str]]
]  # tensor of the model -> its mappings, each with its name in the files
Progress = Callable[[int, int], None]  # (bytes filled so far, all bytes of this rank)
_COMPARED_ROWS = 1 << 24  # elements of two tied tensors that are compared together


@dataclass(frozen=True)
class LoadPlan:
    """How a model is filled. fills: tensor of the model -> its mappings, each with its name in the files. left_out:
    names in the files that are not used. fresh: tensors that the files do not contain, and that are initialised
    elsewhere. drafts: names of layers for multi-token prediction; they are not trained, and exports copy them."""

    source: TensorSource
    fills: dict[str, list[tuple[TensorMapping, str]]]
    left_out: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReport:
    """The result of a load. bytes_read: bytes that this rank read from disk. left_out, drafts: as in LoadPlan."""

    tensors: int
    bytes_read: int
    seconds: float
    left_out: tuple[str, ...]
    drafts: tuple[str, ...]


def plan_load(
    model: PreTrainedModel,
    source: TensorSource,
    ignore: Sequence[str],
    untied: Sequence[str] = (),
    may_lack: Collection[str] = (),
) -> tuple[list[TensorMapping], LoadPlan]:
    """The layout of a source, and the plan to fill the model from it. model: on meta, not yet sharded.

    ignore: globs of tensors in the files that need not be used. untied: tied names to untie. Tied weights that differ
    in the files are also untied. If the files contain only one of two untied tensors, both are filled from it.
    may_lack: tensors of the model that may be missing from the files. Raises UserError, with the first names, if
    tensors are missing, unexpected or misshapen."""
    for name, owner in hf.tied_parameters(model).items():
        if name in source.names and owner in source.names and _differ(source, name, owner):
            hf.untie(model, name)
    owners = {name: owner for name, owner in hf.tied_parameters(model).items() if name in untied}
    for name in owners:
        hf.untie(model, name)
    names = source.names
    mappings = map_tensors(model, names)
    in_files = _names_in_files(model, mappings, names)
    disk = {mapping.runtime: mapping.disk for mapping in mappings}
    for name, owner in owners.items():
        in_files.setdefault(disk[name], in_files[disk[owner]])
    lacking = [p for p in mappings if p.disk not in in_files]
    fresh = frozenset(p.runtime for p in lacking if p.runtime in may_lack)
    key = source.key
    needed = [mapping.disk for mapping in lacking if mapping.runtime not in fresh]
    head = next((n for n, module in model.named_modules() if module is model.get_output_embeddings()), None)
    problem = "weights that the model needs are not in the files"
    if needed == [f"{head}.weight"] and not hf.tied_parameters(model):
        problem += (
            ', and config.json says "tie_word_embeddings": false. If the head is the embedding, write '
            '"tie_word_embeddings": true there; otherwise fetch the files again'
        )
    _raise_for(key, problem, needed)
    filled = [p for p in mappings if p.runtime not in fresh]
    wrong = [
        f"{file} is {list(source.shape(file))} and should be {list(p.shape)}"
        for p in filled
        if source.shape(file := in_files[p.disk]) != p.shape
    ]
    _raise_for(key, "the files do not fit config.json", wrong)
    tied = hf.tied_parameters(model)
    unused = sorted(set(names) - set(in_files.values()) - set(tied))
    drafts = hf.draft_names(unused, model.config)
    unused = sorted(set(unused) - set(drafts))
    patterns = [re.compile(pattern) for pattern in hf.unused_patterns(model)]
    ignored = [n for n in unused if any(p.search(n) for p in patterns) or any(fnmatchcase(n, glob) for glob in ignore)]
    _raise_for(
        key,
        f"the files contain weights that {type(model).__name__} does not have (model.ignore_weights lists patterns of "
        "weights to ignore)",
        [name for name in unused if name not in ignored],
    )
    fills: dict[str, list[tuple[TensorMapping, str]]] = {}
    for mapping in filled:
        fills.setdefault(mapping.runtime, []).append((mapping, in_files[mapping.disk]))
    return mappings, LoadPlan(source, fills, tuple(ignored), fresh, tuple(drafts))


def _names_in_files(model: PreTrainedModel, mappings: list[TensorMapping], names: list[str]) -> dict[str, str]:
    """Disk name of a mapping -> name in the files, for the mappings that the files contain. The name in the files may
    have another prefix, or be the name of a tied tensor."""
    available = set(names)
    result = {mapping.disk: mapping.disk for mapping in mappings if mapping.disk in available}
    if len(result) == len(mappings):
        return result
    by_runtime = {runtime: name for name, runtime in hf.runtime_names(model, available - set(result)).items()}
    for tied, owner in hf.tied_parameters(model).items():
        if tied in by_runtime:
            by_runtime.setdefault(owner, by_runtime[tied])
    for mapping in mappings:
        if mapping.disk not in result and mapping.runtime in by_runtime:
            result[mapping.disk] = by_runtime[mapping.runtime]
    return result


def _raise_for(key: str, problem: str, names: list[str]) -> None:
    if names:
        and_more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise UserError(f"{key}: {problem}: {', '.join(names[:5])}{and_more}.")


def _differ(source: TensorSource, a: str, b: str) -> bool:
    """Whether two tensors of the files differ. Collective: each rank compares its share of the rows."""
    shape = source.shape(a)
    if shape != source.shape(b):
        return True
    rank, world = rank_and_world()
    rows = max(1, _COMPARED_ROWS // max(1, Box.from_shape(shape[1:]).numel))
    differs = torch.zeros(1)
    for number, start in enumerate(range(0, shape[0], rows)):
        if number % world == rank and not differs:
            box = Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))
            differs += not torch.equal(source.read(a, box), source.read(b, box))
    if world > 1:
        dist.all_reduce(differs, group=world_group())
    return bool(differs)


def load_weights(
    module: TrainModule, plan: LoadPlan, specs: ShardSpecs, progress: Progress | None = None
) -> LoadReport:
    """Fill the parameters and persistent buffers of a sharded module in place, except adapters, fresh tensors and the
    codes of quantised weights. Collective if shards are replicated.

    One replica reads each tensor, in turn, and broadcasts it to the other replicas.
    """
    started, earlier_bytes = time.perf_counter(), plan.source.bytes_read
    targets = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name in plan.fills}
    filled = {id(tensor) for tensor in targets.values()}
    state = module.state_dict(keep_vars=True).items()
    filled_elsewhere = {
        name for name, _ in state if name in plan.fresh or is_adapters(name) or is_bytes(module.quantised_shapes, name)
    }
    empty = [name for name, tensor in state if id(tensor) not in filled and name not in filled_elsewhere]
    assert not empty, f"nothing fills {empty[:3]}"
    fill_tensors(targets, plan.fills, plan.source, specs, progress)
    seconds = time.perf_counter() - started
    return LoadReport(len(targets), plan.source.bytes_read - earlier_bytes, seconds, plan.left_out, plan.drafts)


def fill_tensors(
    targets: Mapping[str, Tensor],
    fills: Fills,
    source: TensorSource,
    specs: ShardSpecs,
    progress: Progress | None = None,
) -> None:
    """Fill sharded tensors in place, in the order of their bytes in the files. Collective if shards are replicated.

    targets: runtime name -> a tensor that is sharded like the model's tensor with this name.
    """
    order = sorted(targets, key=lambda name: min(source.sort_key(file) for _, file in fills[name]))
    total = sum(local_box(tensor)[1].nbytes for tensor in targets.values())
    filled = 0
    for number, name in enumerate(order):
        flight.beat()
        local_shard = shard_of(targets[name])
        if local_shard.is_reader(number):
            for shard in shards_of(targets[name], specs.get(name)):
                fill_box(shard.values, shard.box, fills[name], source)
        for group in local_shard.groups:
            dist.broadcast(local_shard.values, group=group, group_src=number % dist.get_world_size(group))
        filled += local_shard.values.nbytes
        if progress is not None:
            progress(filled, total)


@torch.no_grad()
def fill_random(
    module: TrainModule, specs: ShardSpecs, config: PretrainedConfig, dtype: torch.dtype, seed: int
) -> None:
    """Fill a sharded module in place with transformers' initial weights. Each rank draws all weights of the model."""
    config = deepcopy(config)  # build_random sets another attention than the model's config has
    drawn = hf.build_random(config, dtype=dtype, attention="eager", seed=seed).state_dict()
    for name, tensor in module.hf_model.state_dict(keep_vars=True).items():
        for shard in shards_of(tensor, specs.get(name)):
            shard.values.copy_(drawn[name][shard.box.within(Box.from_shape(tuple(drawn[name].shape)))])


@torch.no_grad()
def fill_box(local: Tensor, box: Box, mappings: Sequence[tuple[TensorMapping, str]], source: TensorSource) -> None:
    """Fill `local` with the elements of `box`, from all mappings that overlap it."""
    filled = 0
    for mapping, name in sorted(mappings, key=lambda pair: source.sort_key(pair[1])):
        common = overlap(mapping.box, box)
        if common is not None:
            values = source.read(name, mapping.disk_box(common))
            local[common.within(box)].copy_(mapping.to_runtime(values, common))
            filled += common.numel
    assert filled == box.numel, f"{mappings[0][0].runtime}: {filled} of {box.numel} elements filled"


def read_whole(plan: LoadPlan, name: str) -> Tensor:
    """A full tensor of the model, in the files' dtype, or in fp32 if it is quantised. name: its runtime name."""
    mappings = plan.fills[name]
    shape = tuple(max(ends) for ends in zip(*(mapping.box.end for mapping, _ in mappings), strict=True))
    out = torch.empty(shape, dtype=plan.source.dtypes.get(mappings[0][1], torch.float32))
    fill_box(out, Box.from_shape(shape), mappings, plan.source)
    return out
