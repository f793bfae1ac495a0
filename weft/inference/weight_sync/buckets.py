"""The content of a sync, and how it is written from the trainer's shards into buckets.

A bucket is memory of the sender that holds tensors end to end, in the layout of a checkpoint. If all ranks share a
host, they all map the bucket and each writes the boxes that it holds, without a gather, as in an export. Otherwise the
walker gathers whole tensors, and the sending ranks write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.checkpoint.export import adapter_shards, manifest_of, plan_adapter, plan_export, save_planned, written_shards
from weft.engine.engine import Engine
from weft.inference.unmerged import stored_layout
from weft.inference.weight_sync.protocol import TensorHeader
from weft.models.lora import samples_separate
from weft.ops.low_bit import Format
from weft.parallel.shards.boxes import Box, local_values, overlap
from weft.parallel.shards.cuts import RankBox, ShardSpecs, rank_boxes
from weft.parallel.shards.layout import TensorMapping
from weft.parallel.shards.safetensors_files import TensorFile

ALIGNMENT = 64  # bytes; tensors of a bucket begin at multiples of it


@dataclass(frozen=True)
class SyncContent:
    """The tensors of a part of a sync. kind, adapter: as in protocol.Part. mappings, manifest: as an export plans them.
    dtype: of the parameters; None for an adapter. form: of weights that are sent in quantised form; None: all weights
    are sent in that dtype."""

    kind: str
    mappings: list[TensorMapping]
    manifest: dict[str, Tensor]
    adapter: dict[str, Any] | None = None
    dtype: torch.dtype | None = None
    form: Format | None = None

    @cached_property
    def entries(self) -> dict[str, TensorHeader]:
        """The manifest as protocol entries, by name."""
        return {name: entry_of(name, tensor) for name, tensor in self.manifest.items()}

    @property
    def bytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.manifest.values())

    @property
    def room(self) -> int:
        """The size in bytes of a bucket with all tensors, including alignment."""
        return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in self.manifest.values())

    @property
    def largest(self) -> int:
        """The size of the largest tensor in bytes."""
        return max(tensor.nbytes for tensor in self.manifest.values())


def entry_of(name: str, tensor: Tensor) -> TensorHeader:
    """The entry that announces a tensor."""
    return TensorHeader(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def weights(engine: Engine, dtype: torch.dtype, *, stored: bool = True) -> SyncContent:
    """The content for the whole model, with parameters in this dtype; for a model with adapters, for its base. With
    lora.sampling=separate its quantised weights are sent in quantised form. stored: whether engines accept that form;
    otherwise dequantised values are sent."""
    kind, form = "weights" if engine.lora is None else "base", engine.module.quantised_form
    if form is not None and stored and samples_separate(engine.config.lora):
        return SyncContent(kind, *stored_layout(engine, dtype), dtype=dtype, form=form)
    return SyncContent(kind, engine.built.mappings, manifest_of(engine, dtype), dtype=dtype)


def _local_tensors(engine: Engine, content: SyncContent) -> tuple[Mapping[str, Tensor], ShardSpecs]:
    return (engine.local_tensors(), engine.divided.cuts) if content.form is None else engine.stored_tensors()


def adapter(engine: Engine) -> SyncContent:
    """The content for all trained tensors of a model with adapters, under peft's names, in the masters' dtype."""
    plan = plan_adapter(engine)
    return SyncContent("adapter", plan.mappings, plan.manifest, plan.config)


@dataclass(frozen=True)
class BucketTensor:
    """A tensor in a bucket. offset: in bytes. changed: for a patch (delta.py), the number of its elements; digest: the
    checksum of the resulting tensor."""

    entry: TensorHeader
    offset: int
    changed: int | None = None
    digest: int = 0

    @property
    def length(self) -> int:
        """The bytes of the tensor, or of its patch."""
        return self.entry.length if self.changed is None else self.changed * self.entry.patch_width

    @property
    def end(self) -> int:
        return self.offset + self.length

    def within(self, bucket: Tensor) -> Tensor:
        """The tensor as a view of the bucket's uint8 memory."""
        return bucket[self.offset : self.end].view(getattr(torch, self.entry.dtype)).view(self.entry.shape)


class Buckets(Protocol):
    """The buffers that buckets are written to, in turn."""

    @property
    def size(self) -> int:
        """The size in bytes at which a bucket is full. A larger tensor gets its own bucket."""
        ...

    def memory(self, number: int) -> Tensor | None:
        """The uint8 memory of bucket `number`; None on a rank that does not write to it."""
        ...


def _next_slot(last: BucketTensor | None, entry: TensorHeader, size: int) -> BucketTensor | None:
    """The offset of a tensor after the last of a bucket of `size` bytes, if there is one; None if it does not fit."""
    if last is None:
        return BucketTensor(entry, 0)
    offset = -(-last.end // ALIGNMENT) * ALIGNMENT
    return BucketTensor(entry, offset) if offset + entry.length <= size else None


class BucketPlan:
    """Assigns the boxes of this rank's shards to buckets, if all ranks share a host. Computed once per content."""

    def __init__(self, engine: Engine, content: SyncContent, size: int) -> None:
        """size: bytes at which a bucket is full; a larger tensor gets its own."""
        self._content = content
        (state, cuts), among = _local_tensors(engine, content), engine.mesh.stage_rank
        boxes = {
            name: rank_boxes(state[name], cuts.get(name), among) for name in state if name not in engine.tied_copies
        }
        numbers = {name: number for number, name in enumerate(boxes)}
        self.buckets = list[list[BucketTensor]]()
        self._shares = list[list[_ShardCopy]]()
        for bucket in _planned(content, size):
            self.buckets.append([row for row, _ in bucket])
            shares = [
                _share(row, mapping, box)
                for row, mapping in bucket
                for box in boxes.get(mapping.runtime, ())  # empty for tensors of other pipeline stages
                if box.is_writer(numbers[mapping.runtime])
            ]
            self._shares.append([share for share in shares if share is not None])

    def write(self, engine: Engine, buckets: Buckets) -> Iterator[list[BucketTensor]]:
        """Yield the rows of each bucket, after this rank has written its boxes. Not collective."""
        state, _ = _local_tensors(engine, self._content)
        for number, (rows, shares) in enumerate(zip(self.buckets, self._shares, strict=True)):
            memory = buckets.memory(number)
            assert memory is not None
            for share in shares:
                values = share.mapping.to_disk(local_values(state[share.mapping.runtime])[share.source])
                share.row.within(memory)[share.target].copy_(values, non_blocking=True)
            settle(engine.device, memory)
            yield rows


@dataclass(frozen=True)
class _ShardCopy:
    """The part of a tensor that a rank writes: the box `source` of its local values, to the box `target` of the
    tensor."""

    row: BucketTensor
    mapping: TensorMapping
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def _share(row: BucketTensor, mapping: TensorMapping, local_box: RankBox) -> _ShardCopy | None:
    part = overlap(mapping.box, local_box.box)
    if part is None:
        return None
    return _ShardCopy(
        row, mapping, local_box.within(part), mapping.disk_box(part).within(Box.from_shape(mapping.shape))
    )


def _planned(content: SyncContent, size: int) -> Iterator[list[tuple[BucketTensor, TensorMapping]]]:
    entries, bucket = content.entries, list[tuple[BucketTensor, TensorMapping]]()
    for mapping in content.mappings:
        row = _next_slot(bucket[-1][0] if bucket else None, entries[mapping.disk], size)
        if row is None:
            yield bucket
            bucket, row = [], BucketTensor(entries[mapping.disk], 0)
        bucket.append((row, mapping))
    yield bucket


def gathered(engine: Engine, content: SyncContent, buckets: Buckets) -> Iterator[list[BucketTensor]]:
    """Fill buckets from gathered tensors, on any mesh; yields the rows of each. Every rank gets every tensor, and
    writes it if it has a buffer. Collective."""
    entries, rows, number = content.entries, list[BucketTensor](), 0
    memory = buckets.memory(number)
    stored = content.form is not None
    for name, tensor in engine.walk(content.mappings, content.manifest, stored=stored, bucket_bytes=2 * buckets.size):
        row = _next_slot(rows[-1] if rows else None, entries[name], buckets.size)
        if row is None:
            settle(engine.device, memory)
            yield rows
            rows, row, number = [], BucketTensor(entries[name], 0), number + 1
            memory = buckets.memory(number)
        if memory is not None:
            row.within(memory).copy_(tensor, non_blocking=True)
        rows.append(row)
    settle(engine.device, memory)
    yield rows


def settle(device: torch.device, memory: Tensor | None) -> None:
    """Wait until the copies of a bucket from this device to the host are done: once for all of them."""
    if device.type == "cuda" and memory is not None and memory.is_cpu:
        written = torch.cuda.Event()
        written.record()
        written.synchronize()


def exported(engine: Engine, content: SyncContent, folder: Path) -> Iterator[tuple[Path, list[BucketTensor]]]:
    """Write a HuggingFace directory (peft's for an adapter), each rank its boxes; then yield each file and its rows.

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
        yield path, [BucketTensor(entries[name], begin) for begin, name in places]
