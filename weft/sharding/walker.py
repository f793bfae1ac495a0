"""The tensor walker: yields a sharded model as (HuggingFace name, whole tensor), in buckets.

Tensors are cast before they are gathered, so that the receiver's dtype is sent. The next bucket is gathered while one
is consumed; each has half of the bytes allowed. A larger tensor is gathered alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from weft.sharding.boxes import Box, local_box, overlap
from weft.sharding.layout import Piece
from weft.versions import all_gather_single

_ALIGNMENT = 16  # bytes; every tensor of a bucket begins at a multiple of its element


def walk(
    module: nn.Module, pieces: Iterable[Piece], manifest: Mapping[str, Tensor], *, bucket_bytes: int = 1 << 29
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `manifest` (names, shapes, dtypes; from checkpoint/export.py) in order, on the model's device.

    Collective: all ranks of the mesh walk together, and each receives every tensor. A yielded tensor may be a view of
    reused memory: copy it before taking the next. bucket_bytes: bytes in flight; only a single tensor that cannot be
    split may exceed them.
    """
    state = module.state_dict(keep_vars=True)
    parts = [part for group in _by_runtime(pieces) for part in _cut(state, group, manifest, bucket_bytes // 2)]
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


def checked(stream: Iterable[tuple[str, Tensor]], manifest: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The stream unchanged. RuntimeError where a tensor is missing, repeated, or has another shape or dtype than in the
    manifest."""
    missing = dict.fromkeys(manifest)
    for name, tensor in stream:
        if name not in manifest:
            raise RuntimeError(f"{name} is not in the manifest")
        if name not in missing:
            raise RuntimeError(f"{name} comes twice")
        promised = manifest[name]
        if tensor.shape != promised.shape or tensor.dtype != promised.dtype:
            raise RuntimeError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, promised as {promised.dtype} {list(promised.shape)}"
            )
        del missing[name]
        yield name, tensor
    if missing:
        raise RuntimeError(f"{len(missing)} tensors of the manifest did not come: {', '.join(list(missing)[:3])}")


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of a tensor of the model that are gathered together, with the pieces inside them."""

    runtime: str
    box: Box
    pieces: tuple[Piece, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def _by_runtime(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.runtime, []).append(piece)
    yield from groups.values()


def _cut(
    state: Mapping[str, Tensor], pieces: list[Piece], manifest: Mapping[str, Tensor], limit: int
) -> Iterator[_Part]:
    """A tensor whole, or, where it is larger than `limit`, in ranges of rows that split no piece (experts)."""
    shape = tuple(state[pieces[0].runtime].shape)
    dtype = max((manifest[piece.disk].dtype for piece in pieces), key=lambda dtype: dtype.itemsize)
    whole = _Part(pieces[0].runtime, Box.whole(shape), tuple(pieces), dtype)
    if whole.bytes <= limit or not shape:
        yield whole
        return
    ends = sorted({piece.box.end[0] for piece in pieces})
    borders = [row for row in ends if all(not (p.box.start[0] < row < p.box.end[0]) for p in pieces)]
    first, per_row = 0, whole.bytes // shape[0]
    for row, after in zip(borders, [*borders[1:], shape[0] + limit], strict=True):
        if (after - first) * per_row > limit:
            own = tuple(piece for piece in pieces if first <= piece.box.start[0] < row)
            yield _Part(whole.runtime, Box((first, *whole.box.start[1:]), (row - first, *shape[1:])), own, dtype)
            first = row


def _buckets(parts: Sequence[_Part], limit: int) -> Iterator[list[_Part]]:
    bucket: list[_Part] = []
    for part in parts:
        if bucket and sum(other.bytes for other in bucket) + part.bytes > limit:
            yield bucket
            bucket = []
        bucket.append(part)
    if bucket:
        yield bucket


class _Gather:
    """The parts of a bucket in flight: one all-gather for each mesh axis that shards some of them."""

    def __init__(self, state: Mapping[str, Tensor], bucket: list[_Part], manifest: Mapping[str, Tensor]) -> None:
        self.state, self.bucket, self.manifest = state, bucket, manifest
        self.lanes: dict[tuple[DeviceMesh, int], _Lane] = {}
        for part in bucket:
            axis = _sharded_axis(state[part.runtime])
            if axis is not None:
                self.lanes.setdefault(axis, _Lane(*axis)).parts.append(part)
        for lane in self.lanes.values():
            lane.start(state)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.bucket)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """In the order of the bucket's parts."""
        for part in self.bucket:
            axis = _sharded_axis(self.state[part.runtime])
            values = _own(self.state[part.runtime], part) if axis is None else self.lanes[axis].take(self.state, part)
            for piece in part.pieces:
                tensor = piece.to_disk(values[piece.box.within(part.box)])
                yield piece.disk, tensor.to(self.manifest[piece.disk].dtype)


def _sharded_axis(tensor: Tensor) -> tuple[DeviceMesh, int] | None:
    """The mesh axis over which a tensor is sharded; None where every rank holds it whole."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    axes = [a for a, place in enumerate(tensor.placements) if isinstance(place, Shard) and mesh.size(a) > 1]
    assert len(axes) <= 1, f"sharded over {len(axes)} axes"
    return (mesh, axes[0]) if axes else None


def _own(tensor: Tensor, part: _Part) -> Tensor:
    """A part of a tensor that this rank holds whole."""
    return local_box(tensor)[1][part.box.within(Box.whole(tuple(tensor.shape)))].to(part.dtype)


class _Lane:
    """One all-gather: each rank sends its boxes of all parts, end to end, as bytes."""

    def __init__(self, mesh: DeviceMesh, axis: int) -> None:
        self.mesh, self.axis, self.parts = mesh, axis, list[_Part]()

    def start(self, state: Mapping[str, Tensor]) -> None:
        """Cast this rank's shares and start the all-gather."""
        size = self.mesh.size(self.axis)
        self.places = [self._places(state, place) for place in range(size)]
        self.length = max(end for _, end in self.places)
        device = local_box(state[self.parts[0].runtime])[1].device
        sent = torch.empty(self.length, dtype=torch.uint8, device=device)
        starts, _ = self.places[self.mesh.get_local_rank(self.axis)]
        self.rows = all(state[part.runtime].placements[self.axis].dim == 0 for part in self.parts)
        for part in self.parts:
            box, local = local_box(state[part.runtime])
            share = overlap(part.box, box)
            if share is not None:
                end = starts[part] + share.numel * part.dtype.itemsize
                sent[starts[part] : end].view(part.dtype).view(share.size).copy_(local[share.within(box)])
        self.gathered = torch.empty(size * self.length, dtype=torch.uint8, device=device)
        group = self.mesh.get_group(self.axis)
        self.work = all_gather_single(self.gathered, sent, group=group, async_op=True)
        self.sent: Tensor | None = sent

    def take(self, state: Mapping[str, Tensor], part: _Part) -> Tensor:
        """A part, assembled from every rank's shares."""
        if self.sent is not None:
            self.work.wait()
            self.sent = None
        if self._is_in_order(part):
            return self.gathered.view(part.dtype).reshape(part.box.size)
        out = torch.empty(part.box.size, dtype=part.dtype, device=self.gathered.device)
        for place, (starts, _) in enumerate(self.places):
            share = overlap(part.box, self._box(state[part.runtime], place))
            if share is not None:
                begin = place * self.length + starts[part]
                values = self.gathered[begin : begin + share.numel * part.dtype.itemsize]
                out[share.within(part.box)] = values.view(part.dtype).reshape(share.size)
        return out

    def _is_in_order(self, part: _Part) -> bool:
        """Whether the gathered bytes are the part itself: nothing else was gathered, it is sharded by rows, and there
        is no padding between the ranks' shares."""
        return len(self.parts) == 1 and self.rows and self.gathered.numel() == part.bytes

    def _places(self, state: Mapping[str, Tensor], place: int) -> tuple[dict[_Part, int], int]:
        """(first byte of each part in what the rank at `place` sends, total length)."""
        starts, end = {}, 0
        for part in self.parts:
            share = overlap(part.box, self._box(state[part.runtime], place))
            starts[part] = end
            end += 0 if share is None else -(-share.numel * part.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return starts, end

    def _box(self, tensor: Tensor, place: int) -> Box:
        """The box of the rank at `place` of the axis."""
        assert isinstance(tensor, DTensor)
        coordinate = list(self.mesh.get_coordinate() or ())
        coordinate[self.axis] = place
        size, start = _compute_local_shape_and_global_offset(
            tensor.shape, self.mesh.shape, coordinate, tensor.placements
        )
        return Box(tuple(start), tuple(size))
