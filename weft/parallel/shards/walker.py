"""Iterates over a sharded model as (HuggingFace name, full tensor), in buckets.

Tensors are cast before they are gathered, so ranks send the receiver's dtype. While one bucket is consumed, the next
bucket is gathered. Each bucket has at most half of the allowed bytes. A larger tensor is gathered alone.

A tensor may be sharded by tp and ep. FSDP2 may shard each part further, over one axis of a mesh. A gather is first over
FSDP's ranks, then over tp and ep. A tensor of one pipeline stage is first sent to the other stages: each rank
broadcasts its share, and then all stages gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from weft.ops.communicator import Communicator
from weft.parallel.shards.boxes import Box, local_box, overlap
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpecs, full_shape
from weft.parallel.shards.layout import TensorMapping
from weft.versions import all_gather_single

RankIndex = tuple[int, int]  # (index among the ranks of tp and ep that shard the tensor, index on FSDP's axis)


class GatherGroup(NamedTuple):
    """The ranks over which a tensor is gathered. axis: (mesh, mesh dimension) over which FSDP shards it, or None.
    parts: ranks of tp and ep that hold its other parts, or None. source: (the ranks with this rank's coordinates in
    each stage, the stage that sends), or None if every stage holds the tensor."""

    axis: tuple[DeviceMesh, int] | None = None
    parts: Communicator | None = None
    source: tuple[dist.ProcessGroup, int] | None = None


@dataclass(frozen=True)
class StagePeers:
    """The ranks with this rank's coordinates in each pipeline stage. rank: this rank's index on mesh.pp. holders: name
    of a tensor -> the ranks of mesh.pp that hold it, ascending. meshes: the meshes over which FSDP shards, in an order
    that is equal in all stages."""

    group: dist.ProcessGroup
    rank: int
    holders: Mapping[str, Sequence[int]]
    meshes: Sequence[DeviceMesh]


class ShardSlice(NamedTuple):
    """A box of the full tensor. within: the slices that select it in the shard of a rank."""

    box: Box
    within: tuple[slice, ...]


@dataclass(frozen=True)
class TensorPlacement:
    """How one tensor is sharded. shape: of the full tensor. spec: how tp and ep shard it, or None. mesh, placements:
    FSDP's; None and () for a plain tensor. read: returns this rank's shard; None if another stage holds the tensor."""

    shape: tuple[int, ...]
    spec: AnyShardSpec | None
    group: GatherGroup
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    device: torch.device
    read: Callable[[], Tensor] | None = None

    @classmethod
    def from_tensor(
        cls, name: str, tensor: Tensor, specs: ShardSpecs, read: Callable[[], Tensor] | None = None
    ) -> TensorPlacement:
        """The placement of a tensor of this rank. read: returns the tensor when it is gathered. Raises RuntimeError if
        weft cannot gather the tensor's placements."""
        mesh, placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())
        shape = full_shape(name, tensor, specs)
        return cls._placed(name, shape, specs, mesh, tuple(placements), tensor.device, read)

    @classmethod
    def _placed(
        cls,
        name: str,
        shape: tuple[int, ...],
        specs: ShardSpecs,
        mesh: DeviceMesh | None,
        placements: tuple[Placement, ...],
        device: torch.device,
        read: Callable[[], Tensor] | None = None,
    ) -> TensorPlacement:
        spec = specs.get(name)
        spec = spec if spec is not None and spec.divides else None
        group = GatherGroup(_sharded_axis(name, mesh, placements), None if spec is None else spec.ranks)
        return cls(shape, spec, group, mesh, placements, device, read)

    @property
    def values(self) -> Tensor:
        """The elements on this rank. Its stage must hold the tensor."""
        assert self.read is not None
        return local_box(self.read())[1]

    @property
    def ranks(self) -> list[RankIndex]:
        """All ranks of the group, in gathering order."""
        fsdp_ranks = 1 if self.group.axis is None else self.group.axis[0].size(self.group.axis[1])
        parts = 1 if self.spec is None else self.spec.size
        return [(part, fsdp_rank) for part in range(parts) for fsdp_rank in range(fsdp_ranks)]

    @property
    def local_rank(self) -> RankIndex:
        """The index of this rank."""
        fsdp_rank = 0 if self.group.axis is None else self.group.axis[0].get_local_rank(self.group.axis[1])
        return (0 if self.spec is None else self.spec.rank), fsdp_rank

    @property
    def is_by_rows(self) -> bool:
        """Whether FSDP shards the first dimension, so that concatenated shards are the tensor."""
        if self.group.axis is None:
            return False
        placement = self.placements[self.group.axis[1]]
        return isinstance(placement, Shard) and placement.dim == 0

    def shares(self, part: Box, rank: RankIndex) -> list[ShardSlice]:
        """The parts of `part`, a box of the full tensor, that rank `rank` sends. If several ranks hold the same
        elements, the first of them sends them."""
        rank_box = self._local_box(rank)
        boxes = [(rank_box, rank_box, 1)] if self.spec is None else self.spec.for_rank(rank[0]).boxes(rank_box)
        slices = []
        for full_box, local, copies in boxes:
            box = overlap(part, full_box) if rank[0] % copies == 0 else None
            if box is not None:
                start = tuple(a - b + c for a, b, c in zip(box.start, full_box.start, local.start, strict=True))
                slices.append(ShardSlice(box, Box(start, box.size).within(rank_box)))
        return slices

    def _local_box(self, rank: RankIndex) -> Box:
        """The box that FSDP gives to rank `rank`, in its part of the tensor (by tp and ep)."""
        shape = self.shape if self.spec is None else self.spec.local_shape(rank[0])  # parts may have different sizes
        if self.group.axis is None:
            return Box.from_shape(shape)
        mesh, axis = self.group.axis
        coordinate = list(mesh.get_coordinate() or ())
        coordinate[axis] = rank[1]
        size, start = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinate, self.placements)
        return Box(tuple(start), tuple(size))


def placements_of(
    tensors: Mapping[str, Tensor], names: Iterable[str], specs: ShardSpecs, peers: StagePeers | None = None
) -> dict[str, TensorPlacement]:
    """Name -> TensorPlacement. peers: needed for names of other pipeline stages. The call is then collective over
    peers.group."""
    unique_names = list(dict.fromkeys(names))
    placements = {
        name: TensorPlacement.from_tensor(name, tensors[name], specs, partial(tensors.__getitem__, name))
        for name in unique_names
        if name in tensors
    }
    return placements if peers is None else _of_all_stages(placements, unique_names, specs, peers)


def _of_all_stages(
    local: Mapping[str, TensorPlacement], names: Sequence[str], specs: ShardSpecs, peers: StagePeers
) -> dict[str, TensorPlacement]:
    """Add the placements of other stages' tensors. The first stage that holds a tensor sends its description."""
    description = {}  # name -> shape, index of the mesh, placements, device
    for name, placement in local.items():
        if peers.holders[name][0] == peers.rank:
            mesh = None if placement.mesh is None else list(peers.meshes).index(placement.mesh)
            description[name] = placement.shape, mesh, placement.placements, placement.device.type
    descriptions: list[Any] = [None] * dist.get_world_size(peers.group)
    dist.all_gather_object(descriptions, description, group=peers.group)
    placements = {}
    for name in names:
        stages = peers.holders[name]
        if name in local:
            placement = local[name]
        else:
            shape, mesh, axes, device = descriptions[stages[0]][name]
            device_mesh = None if mesh is None else peers.meshes[mesh]
            placement = TensorPlacement._placed(name, shape, specs, device_mesh, axes, torch.device(device))
        if len(stages) < len(descriptions):
            placement = replace(placement, group=placement.group._replace(source=(peers.group, stages[0])))
        placements[name] = placement
    return placements


def _sharded_axis(name: str, mesh: DeviceMesh | None, placements: Sequence[Placement]) -> tuple[DeviceMesh, int] | None:
    """(mesh, mesh dimension) over which FSDP shards a tensor, or None. Raises RuntimeError for placements that weft
    cannot gather."""
    if mesh is None:
        return None
    axes = [a for a, kind in enumerate(placements) if not isinstance(kind, Replicate) and mesh.size(a) > 1]
    if len(axes) > 1 or not all(isinstance(placements[axis], Shard) for axis in axes):
        raise RuntimeError(f"{name} has the placements {tuple(placements)}, which weft cannot gather")
    return (mesh, axes[0]) if axes else None


# ---------------------------------------------------------------- the iterator

_ALIGNMENT = 16  # bytes; a multiple of all element sizes, so every tensor of a bucket is aligned


def walk(
    tensors: Mapping[str, Tensor],
    mappings: Iterable[TensorMapping],
    manifest: Mapping[str, Tensor],
    specs: ShardSpecs,
    *,
    peers: StagePeers | None = None,
    bucket_bytes: int = 1 << 29,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of `manifest` in order, on the model's device. Collective: all ranks of the mesh must iterate
    together, and each receives every tensor.

    A yielded tensor may be a view of memory that is reused, so copy it before the next iteration.
    tensors: the state dict of this rank's stage. A tensor is read when its bucket is gathered.
    manifest: names, shapes and dtypes of the full model, from checkpoint/export.py.
    specs: how tp and ep shard the model's tensors.
    peers: needed with a pipeline.
    bucket_bytes: limit on the bytes of both buckets. A rank of tp also holds its own part of a bucket. A tensor that
    cannot be split may exceed the limit.
    Raises RuntimeError if all ranks together do not hold all elements of a tensor.
    """
    groups: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        groups.setdefault(mapping.runtime, []).append(mapping)
    state = placements_of(tensors, groups, specs, peers)
    parts = [part for group in groups.values() for part in _split(state, group, manifest, bucket_bytes // 2)]
    pending: _Gather | None = None
    for bucket in _buckets(parts, bucket_bytes // 2):
        if pending is not None and pending.bytes + sum(part.bytes for part in bucket) > bucket_bytes:
            yield from pending.tensors()
            pending = None
        started = _Gather(state, bucket, manifest)
        if pending is not None:
            yield from pending.tensors()
        pending = started
    if pending is not None:
        yield from pending.tensors()


def check_stream(stream: Iterable[tuple[str, Tensor]], manifest: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The stream, unchanged. Raises RuntimeError if a tensor is missing or repeated, or if its shape or dtype differs
    from the manifest."""
    missing = dict.fromkeys(manifest)
    for name, tensor in stream:
        if name not in manifest:
            raise RuntimeError(f"{name} is not in the manifest")
        if name not in missing:
            raise RuntimeError(f"{name} occurs twice")
        expected = manifest[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise RuntimeError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, but the manifest has {expected.dtype} "
                f"{list(expected.shape)}"
            )
        del missing[name]
        yield name, tensor
    if missing:
        raise RuntimeError(f"{len(missing)} tensors of the manifest are missing: {', '.join(list(missing)[:3])}")


@dataclass(frozen=True, eq=False)
class _GatherSlice:
    """A range of rows of a model's tensor that is gathered together. mappings: the mappings inside it. dtype: in which
    it is sent."""

    runtime: str
    box: Box
    mappings: tuple[TensorMapping, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def _split(
    state: Mapping[str, TensorPlacement], mappings: list[TensorMapping], manifest: Mapping[str, Tensor], limit: int
) -> Iterator[_GatherSlice]:
    """Split a tensor that is larger than `limit` bytes into ranges of rows. No mapping (such as an expert) is split."""
    shape = state[mappings[0].runtime].shape
    dtype = max((manifest[mapping.disk].dtype for mapping in mappings), key=lambda dtype: dtype.itemsize)
    full_slice = _GatherSlice(mappings[0].runtime, Box.from_shape(shape), tuple(mappings), dtype)
    if full_slice.bytes <= limit or not shape:
        yield full_slice
        return
    ends = sorted({mapping.box.end[0] for mapping in mappings})
    borders = [row for row in ends if all(not (p.box.start[0] < row < p.box.end[0]) for p in mappings)]
    first, per_row = 0, full_slice.bytes // shape[0]
    for row, next_row in zip(borders, [*borders[1:], shape[0] + limit], strict=True):
        if (next_row - first) * per_row > limit:
            inside = tuple(mapping for mapping in mappings if first <= mapping.box.start[0] < row)
            yield _GatherSlice(
                full_slice.runtime, Box((first, *full_slice.box.start[1:]), (row - first, *shape[1:])), inside, dtype
            )
            first = row


def _buckets(parts: Sequence[_GatherSlice], limit: int) -> Iterator[list[_GatherSlice]]:
    bucket: list[_GatherSlice] = []
    for part in parts:
        if bucket and sum(member.bytes for member in bucket) + part.bytes > limit:
            yield bucket
            bucket = []
        bucket.append(part)
    if bucket:
        yield bucket


class _Gather:
    """A gather of a bucket: one shipment for each distinct GatherGroup of its tensors."""

    def __init__(
        self, state: Mapping[str, TensorPlacement], bucket: list[_GatherSlice], manifest: Mapping[str, Tensor]
    ) -> None:
        self.state, self.bucket, self.manifest = state, bucket, manifest
        by_group: dict[GatherGroup, list[_GatherSlice]] = {}
        for part in bucket:
            by_group.setdefault(state[part.runtime].group, []).append(part)
        by_group.pop(GatherGroup(), None)  # every rank holds these tensors completely
        self.shipments = {group: _Shipment(group, parts, state) for group, parts in by_group.items()}

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.bucket)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of the bucket."""
        for part in self.bucket:
            placement = self.state[part.runtime]
            shipment = self.shipments.get(placement.group)
            if shipment is None:  # this rank holds the full tensor
                values = placement.values[part.box.within(Box.from_shape(placement.shape))].to(part.dtype)
            else:
                values = shipment.take(part)
            for mapping in part.mappings:
                tensor = mapping.to_disk(values[mapping.box.within(part.box)])
                yield mapping.disk, tensor.to(self.manifest[mapping.disk].dtype)


class _Shipment:
    """A gather over one GatherGroup. Each rank concatenates its boxes of all parts as bytes, and sends them."""

    def __init__(self, group: GatherGroup, parts: list[_GatherSlice], state: Mapping[str, TensorPlacement]) -> None:
        """Cast this rank's shares, and start the all-gather over FSDP's axis."""
        self.group, self.parts = group, parts
        first = state[parts[0].runtime]
        self.laid = [_lay_out(parts, [state[p.runtime].shares(p.box, rank) for p in parts]) for rank in first.ranks]
        self.length = max(length for _, length in self.laid)
        local_layout = self.laid[first.ranks.index(first.local_rank)][0]
        sent = torch.empty(self.length, dtype=torch.uint8, device=first.device)
        for part in parts:
            placement = state[part.runtime]
            if placement.read is None:  # another stage sends it
                continue
            values, shares = placement.values, placement.shares(part.box, placement.local_rank)
            for (begin, box), share in zip(local_layout[part], shares, strict=True):
                _bytes(sent, begin, box, part.dtype).copy_(values[share.within])
        if group.source is not None:
            stages, source = group.source
            dist.broadcast(sent, group=stages, group_src=source)
        self.in_order = group.parts is None and len(parts) == 1 and first.is_by_rows
        self.gathered = [sent]  # after the gather over tp and ep, one tensor per part
        self.work: Any = None
        self.sent: Tensor | None = sent  # kept alive until the all-gather has ended
        if group.axis is not None:
            mesh, axis = group.axis
            self.gathered = [torch.empty(mesh.size(axis) * self.length, dtype=torch.uint8, device=sent.device)]
            self.work = all_gather_single(self.gathered[0], sent, group=mesh.get_group(axis), async_op=True)

    def take(self, part: _GatherSlice) -> Tensor:
        """A part, assembled from the shares of all ranks."""
        if self.sent is not None:  # the first call waits for the gathers
            if self.work is not None:
                self.work.wait()
            if self.group.parts is not None:
                self.gathered = self.group.parts.all_gather(self.gathered[0])
            self.sent = None
        if self.in_order and self.gathered[0].numel() == part.bytes:  # without padding between shares: no copy needed
            return self.gathered[0].view(part.dtype).reshape(part.box.size)
        out = torch.empty(part.box.size, dtype=part.dtype, device=self.gathered[0].device)
        fsdp_ranks, filled = len(self.laid) // len(self.gathered), 0
        for number, (laid, _) in enumerate(self.laid):
            rank, offset = number // fsdp_ranks, number % fsdp_ranks * self.length
            for begin, box in laid[part]:
                out[box.within(part.box)] = _bytes(self.gathered[rank], offset + begin, box, part.dtype)
                filled += box.numel
        if filled != part.box.numel:
            raise RuntimeError(f"{part.runtime}: the ranks hold {filled} of {part.box.numel} elements")
        return out


_Laid = dict[_GatherSlice, list[tuple[int, Box]]]  # (first byte in the bytes that a rank sends, box) of each share


def _lay_out(parts: Sequence[_GatherSlice], shares: Sequence[Sequence[ShardSlice]]) -> tuple[_Laid, int]:
    """(positions of all shares in the bytes that a rank sends, number of bytes)."""
    layout, end = _Laid(), 0
    for part, slices in zip(parts, shares, strict=True):
        layout[part] = []
        for share in slices:
            layout[part].append((end, share.box))
            end += share.box.numel * part.dtype.itemsize
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
    return layout, end


def _bytes(memory: Tensor, begin: int, box: Box, dtype: torch.dtype) -> Tensor:
    """A view of `memory` as the elements of a box. begin: index of its first byte."""
    return memory[begin : begin + box.numel * dtype.itemsize].view(dtype).view(box.size)
