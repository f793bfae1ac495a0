"""What a sync sends, and how it gets from the trainer's shards into buckets.

A bucket is memory of the sender with tensors end to end, as a checkpoint lays them out. Where all ranks share a host
they all map it, and each writes the boxes that it holds: nothing is gathered, as in an export. Elsewhere the walker
gathers whole tensors, and those that send write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.checkpoint.adapters import adapter_shards, plan_adapter
from weft.checkpoint.export import manifest_of, plan_export, save_planned, written_shards
from weft.engine.engine import Engine
from weft.rollout.sync.protocol import Entry
from weft.sharding.boxes import Box, local_values, overlap
from weft.sharding.cuts import HeldBox, held_boxes
from weft.sharding.layout import Piece
from weft.sharding.safetensors_files import TensorFile

ALIGNMENT = 64  # bytes; tensors of a bucket begin at multiples of it


@dataclass(frozen=True)
class Content:
    """kind, adapter: as in protocol.Part. pieces, manifest: of what is sent, as an export plans them. dtype: of its
    parameters; None for those of an adapter."""

    kind: str
    pieces: list[Piece]
    manifest: dict[str, Tensor]
    adapter: dict[str, Any] | None = None
    dtype: torch.dtype | None = None

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The manifest as it is sent."""
        return {name: entry_of(name, tensor) for name, tensor in self.manifest.items()}

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.manifest.values())

    @property
    def room(self) -> int:
        """Bytes that all tensors take in one bucket."""
        return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in self.manifest.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(tensor.nbytes for tensor in self.manifest.values())


def entry_of(name: str, tensor: Tensor) -> Entry:
    """The entry that announces a tensor."""
    return Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def weights(engine: Engine, dtype: torch.dtype) -> Content:
    """The whole model, its parameters in this dtype; of one with adapters, its base."""
    kind = "weights" if engine.lora is None else "base"
    return Content(kind, engine.built.pieces, manifest_of(engine, dtype), dtype=dtype)


def adapter(engine: Engine) -> Content:
    """What is trained of a model with adapters, under peft's names, in the masters' dtype."""
    plan = plan_adapter(engine)
    return Content("adapter", plan.pieces, plan.manifest, plan.config)


@dataclass(frozen=True)
class Row:
    """A tensor in a bucket."""

    entry: Entry
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.entry.length

    def within(self, bucket: Tensor) -> Tensor:
        """The tensor itself. bucket: its uint8 memory."""
        return bucket[self.offset : self.end].view(getattr(torch, self.entry.dtype)).view(self.entry.shape)


class Buckets(Protocol):
    """The memories that buckets are written to, in turn."""

    @property
    def size(self) -> int:
        """The size in bytes at which a bucket is full. A larger tensor has a bucket of its own."""
        ...

    def memory(self, number: int) -> Tensor | None:
        """The uint8 memory of bucket `number`; None on a rank that does not write to it."""
        ...


def _place(rows: list[Row], entry: Entry, size: int) -> Row | None:
    """The place of a tensor after these; None if it does not fit any more."""
    offset = -(-rows[-1].end // ALIGNMENT) * ALIGNMENT if rows else 0
    return Row(entry, offset) if not rows or offset + entry.length <= size else None


class Plan:
    """Which boxes of its shards this rank writes to which bucket, on a host that all ranks share: worked out once."""

    def __init__(self, engine: Engine, content: Content, size: int) -> None:
        """size: at which a bucket is full; a tensor that is larger has its own."""
        cuts, among, borrowed = engine.divided.cuts, engine.mesh.stage_place, engine.borrowed
        state = engine.module.state_dict(keep_vars=True)
        own = {name: tensor for name, tensor in state.items() if name not in borrowed}
        held = {name: held_boxes(tensor, cuts.get(name), among) for name, tensor in own.items()}
        numbers = {name: number for number, name in enumerate(held)}
        self.buckets = list[list[Row]]()
        self._shares = list[list[_Share]]()
        for bucket in _planned(content, size):
            self.buckets.append([row for row, _ in bucket])
            shares = [
                _share(row, piece, box)
                for row, piece in bucket
                for box in held.get(piece.runtime, ())  # nothing of what another stage has
                if box.is_mine(numbers[piece.runtime])
            ]
            self._shares.append([share for share in shares if share is not None])

    def write(self, engine: Engine, buckets: Buckets) -> Iterator[list[Row]]:
        """Bucket by bucket, after this rank has written what it holds. No collective."""
        state = engine.module.state_dict(keep_vars=True)
        for number, (rows, shares) in enumerate(zip(self.buckets, self._shares, strict=True)):
            memory = buckets.memory(number)
            assert memory is not None
            for share in shares:
                values = share.piece.to_disk(local_values(state[share.piece.runtime])[share.source])
                share.row.within(memory)[share.target] = values
            yield rows


@dataclass(frozen=True)
class _Share:
    """What one rank writes of a tensor: the part `source` of what it holds, to the part `target` of the tensor."""

    row: Row
    piece: Piece
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def _share(row: Row, piece: Piece, held: HeldBox) -> _Share | None:
    part = overlap(piece.box, held.box)
    if part is None:
        return None
    return _Share(row, piece, held.within(part), piece.disk_box(part).within(Box.whole(piece.shape)))


def _planned(content: Content, size: int) -> Iterator[list[tuple[Row, Piece]]]:
    entries, bucket = content.entries, list[tuple[Row, Piece]]()
    for piece in content.pieces:
        row = _place([row for row, _ in bucket[-1:]], entries[piece.disk], size)
        if row is None:
            yield bucket
            bucket, row = [], Row(entries[piece.disk], 0)
        bucket.append((row, piece))
    yield bucket


def gathered(engine: Engine, content: Content, buckets: Buckets) -> Iterator[list[Row]]:
    """Fill buckets through the walker, on any mesh: every rank gets every tensor, and writes it if it has a memory."""
    entries, rows, number = content.entries, list[Row](), 0
    memory = buckets.memory(number)
    for name, tensor in engine.walk(content.pieces, content.manifest, bucket_bytes=2 * buckets.size):
        row = _place(rows[-1:], entries[name], buckets.size)
        if row is None:
            yield rows
            rows, row, number = [], Row(entries[name], 0), number + 1
            memory = buckets.memory(number)
        if memory is not None:
            row.within(memory).copy_(tensor)
        rows.append(row)
    yield rows


def exported(engine: Engine, content: Content, folder: Path) -> Iterator[tuple[Path, list[Row]]]:
    """A HuggingFace directory, or peft's of an adapter, each rank writing its boxes; then its files of tensors.

    Collective; for ranks and engines that share a file system.
    """
    if content.kind == "adapter":
        save_planned(engine, plan_adapter(engine), adapter_shards(engine), folder)
    else:
        save_planned(engine, plan_export(engine, content.dtype), written_shards(engine), folder)
    entries = content.entries
    for path in sorted(folder.glob("*.safetensors")):
        with TensorFile.open(path) as file:
            places = sorted((entry.begin, name) for name, entry in file.entries.items())
        yield path, [Row(entries[name], begin) for begin, name in places]
