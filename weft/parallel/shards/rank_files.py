"""Reads checkpoints of verl's FSDP: one file per rank, with the rank's shard of every tensor, written by torch.save.

Shards are DTensors that were pickled with their mesh. They are read as data (pickles.py). weft needs the full shape,
the sharded dimension, and the position of the elements in the file. On a mesh of one axis these determine the rank's
box."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.files import regular_file
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.dcp import ByteRange, DcpDirectory, StoredTensor, chunks_fill
from weft.parallel.shards.pickles import Constructor, GlobalName, PickledObject, UnreadableError
from weft.parallel.shards.torch_archives import SavedTensor, read_archive

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MOST_RANKS = 1 << 16
_MODULES = (
    "torch.distributed.tensor", "torch.distributed.tensor._api", "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.tensor.placement_types", "torch.distributed._tensor", "torch.distributed._tensor.api",
    "torch.distributed._tensor.placement_types", "torch.distributed.device_mesh", "torch.distributed._mesh_layout",
)  # fmt: skip
_CLASSES = (
    "DTensor", "DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "_StridedShard", "DeviceMesh",
    "_MeshLayout", "_FlatLayout",
)  # fmt: skip
_ALLOWED: dict[str, Constructor | None] = {
    **dict.fromkeys(f"{module}.{name}" for module, name in itertools.product(_MODULES, _CLASSES)),
    **dict.fromkeys(("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass")),
    **dict.fromkeys(("torch.serialization._get_layout", "torch.nn.parameter.Parameter")),
}


def holds_rank_files(folder: Path) -> bool:
    """Whether the folder contains files of verl's FSDP."""
    return folder.is_dir() and any(_FILE.fullmatch(file.name) for file in folder.iterdir())


def open_rank_files(path: str, key: str) -> DcpDirectory:
    """Open the directory at `path`. key: the config key of the path. Raises UserError if a rank's file is missing, or
    if verl did not write it with FSDP on a mesh of one axis."""
    folder = Path(path).expanduser()
    files = _files(folder, key)
    tensors: dict[str, StoredTensor] = {}
    saved: dict[ByteRange, SavedTensor] = {}
    for rank, file in enumerate(files):
        try:
            _add(file, rank, len(files), tensors, saved)
        except (UnreadableError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            if isinstance(error, UserError):
                raise
            reason = error if isinstance(error, UnreadableError) else "its content has unexpected types"
            raise UserError(f"{key}: {file} cannot be read: {reason}. {_merge(folder)}") from error
    for name, tensor in tensors.items():
        if not chunks_fill(tensor.shape, [box for box, _ in tensor.chunks]):
            raise UserError(f"{key}: the files of {folder} do not fill {name}, or overlap. {_merge(folder)}")
    return DcpDirectory(folder, tensors, {}, key, _chunks=saved)


def _merge(folder: Path) -> str:
    return (
        "verl merges such files: python -m verl.model_merger merge --backend fsdp "
        f"--local_dir {folder} --target_dir NEW; then set model.path=NEW, without model.dcp_weights."
    )


def _files(folder: Path, key: str) -> list[Path]:
    """The files in order of ranks. Raises UserError if a file is missing, or if the files have several world sizes."""
    matches = [match for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))]
    worlds = {int(match[1]) for match in matches}
    world = worlds.pop()
    if worlds or not 0 < world <= _MOST_RANKS:
        raise UserError(f"{key}: {folder} has files of several world sizes. Keep the files of one world size.")
    files = [folder / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    missing = next((file for file in files if not os.path.lexists(file)), None)
    if missing is not None:
        raise UserError(f"{key}: {missing} is missing: copy it there.")
    return [regular_file(file, "a rank's file") for file in files]


def _add(
    file: Path, rank: int, world: int, tensors: dict[str, StoredTensor], saved: dict[ByteRange, SavedTensor]
) -> None:
    """Add the content of a rank's file to `tensors` and `saved`."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        content: Mapping[Any, Any] = read_archive(descriptor, 0, os.fstat(descriptor).st_size, _ALLOWED)
    finally:
        os.close(descriptor)
    for name, value in content.items():
        if type(name) is not str:
            raise TypeError
        shape, box, local = _local_shard(value, rank, world)
        if local.shape != box.size:
            raise UnreadableError(f"it holds {list(local.shape)} of {name}, and not {list(box.size)}")
        earlier = tensors.get(name, StoredTensor(local.dtype, shape, ()))
        if (earlier.dtype, earlier.shape) != (local.dtype, shape):
            raise UnreadableError(f"it has another shape or dtype of {name} than the ranks before it")
        location = ByteRange(file.name, local.entry.begin, local.entry.end - local.entry.begin)
        if box.numel and (isinstance(value, PickledObject) or rank == 0):  # every rank has all of a plain tensor
            tensors[name] = StoredTensor(local.dtype, shape, (*earlier.chunks, (box, location)))
            saved[location] = local
        else:
            tensors[name] = earlier


def _local_shard(value: Any, rank: int, world: int) -> tuple[tuple[int, ...], Box, SavedTensor]:
    """(full shape, the rank's box, its elements) of a tensor of a state dict."""
    if isinstance(value, SavedTensor):
        return value.shape, Box.from_shape(value.shape), value
    function, tensor_class, args, state = value.args
    names_ok = type(function) is GlobalName and type(tensor_class) is GlobalName
    if not names_ok or not tensor_class.name.endswith(".DTensor"):
        raise UnreadableError("it holds tensors of another class than DTensor")
    fields = state[1] if type(state) is tuple else state  # a class with __slots__ has the state (None, fields)
    local, spec, shape = fields["_local_tensor"], fields["_spec"], args[2]
    placements = spec.get("placements")
    if type(placements) is not tuple or len(placements) != 1 or not placements[0].name.endswith(".Shard"):
        raise UnreadableError("its mesh has other axes than one that shards (trainer.fsdp_config.fsdp_size)")
    recorded_rank = spec.get("mesh").get("_rank")  # only some versions of torch record it
    if type(recorded_rank) is int and recorded_rank != rank:
        raise UnreadableError(f"it is the file of rank {recorded_rank}")
    dim = placements[0].get("dim")
    if type(shape) is not tuple or not isinstance(local, SavedTensor) or dim not in range(len(shape)):
        raise TypeError
    if not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError
    share = -(-shape[dim] // world)  # DTensor shards like torch.chunk
    start = min(shape[dim], rank * share)
    sizes = (*shape[:dim], min(shape[dim], start + share) - start, *shape[dim + 1 :])
    return shape, Box(tuple(start if d == dim else 0 for d in range(len(shape))), sizes), local
