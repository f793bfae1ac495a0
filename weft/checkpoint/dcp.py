"""Writes a directory that torch.distributed.checkpoint can read. It writes tensor by tensor, so memory holds one
tensor.

torch's own writer needs all tensors of a file in memory. The format is torch's: a file with the bytes of torch.save for
each tensor, and a pickled Metadata with the position of each tensor.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from weft.checkpoint.export import ExportPlan, FullTensors, write_companion_files
from weft.parallel.shards.dcp import METADATA

_FILE = "__0_0.distcp"


class DcpWriter:
    """Writes one file of tensors, and then .metadata."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stream = folder, (folder / _FILE).open("wb")
        self._described: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[str, ...]] = {}

    def add(self, path: tuple[str, ...], tensor: Tensor) -> None:
        """Write a tensor. path: its keys in nested dicts; joined by dots, they form its name."""
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # torch.save writes the storage of a view
        begin = self._stream.tell()
        torch.save(tensor, self._stream)
        info = _StorageInfo(_FILE, begin, self._stream.tell() - begin)
        offsets = torch.Size([0] * tensor.ndim)
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=tensor.shape)
        properties = TensorProperties(dtype=tensor.dtype)
        self._note(path, TensorStorageMetadata(properties, tensor.shape, [chunk]), offsets, info)

    def add_alias(self, path: tuple[str, ...], name: str) -> None:
        """Give the written tensor `name` a further name: tied weights have two names, but their bytes are written
        once."""
        described = self._described[name]
        offsets = described.chunks[0].offsets
        self._note(path, described, offsets, self._storage[MetadataIndex(name, offsets, 0)])

    def _note(
        self, path: tuple[str, ...], described: TensorStorageMetadata, offsets: torch.Size, info: _StorageInfo
    ) -> None:
        name = ".".join(path)
        self._described[name], self._paths[name] = described, path
        self._storage[MetadataIndex(name, offsets, 0)] = info

    def __enter__(self) -> DcpWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        if error is None:
            metadata = Metadata(dict(self._described), self._paths, self._storage, StorageMeta())
            with (self._folder / METADATA).open("wb") as stream:
                pickle.dump(metadata, stream)
                stream.flush()
                os.fsync(stream.fileno())


def write_dcp(
    plan: ExportPlan,
    weights: FullTensors,
    folder: Path,
    tied: Mapping[str, str],
    moments: Mapping[str, FullTensors],
    steps: Mapping[str, float],
) -> None:
    """Write config, tokenizer and the weights of a plan, under HuggingFace's names, and the optimizer's state as
    optimizer.state.NAME.KEY.

    tied: alias of a tied weight -> the name under which it is written. moments: key -> tensors by the model's names.
    steps: the optimizer's `step` of each parameter, by the model's names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_companion_files(plan, folder)
    with DcpWriter(folder) as writer:
        for name, draft in plan.drafts.items():
            writer.add((name,), draft.read(draft.box).to(plan.manifest[name].dtype))
        for mapping in plan.mappings:
            for key, tensors in ((None, weights), *moments.items()):
                if mapping.runtime not in tensors:
                    continue
                values = mapping.to_disk(tensors[mapping.runtime][0].read(mapping.box))
                if key is None:
                    writer.add((mapping.disk,), values.to(plan.manifest[mapping.disk].dtype))
                else:
                    writer.add(("optimizer", "state", mapping.disk, key), values)
            if mapping.runtime in steps and moments:
                writer.add(("optimizer", "state", mapping.disk, "step"), torch.tensor(steps[mapping.runtime]))
        written = {mapping.disk for mapping in plan.mappings}
        for name, owner in tied.items():
            if owner in written and name not in written:
                writer.add_alias((name,), owner)
