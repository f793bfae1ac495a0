"""A cache on disk of a teacher's outputs, by content of documents. Later epochs, runs and other meshes read it.

Outputs are last hidden states, rows of H numbers, or lists of the most likely tokens, rows of 2 K numbers (pack_lists).

A folder belongs to one teacher in one dtype. It contains the teacher's head, and a pair of files for each process that
wrote to it: PART.bin, rows of [trained tokens, H], and PART.idx, an entry for each document: a digest of its tokens and
trained positions, the offset in bytes, the number of rows, and a digest of these rows. An entry is written after its
rows, so a truncated file has only complete entries. Rows that have changed since are an error. A changed document has
another digest, so it never gets the rows of the old document. The teacher is opened when a document has no entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.distillation import Listed
from weft.engine.teachers import Teacher, TeacherSource, exchange, head_for, read_hidden, with_readings
from weft.errors import UserError
from weft.launch.timing import waiting
from weft.ops.divergence import TeacherHead
from weft.ops.head import LogitTransform

_ENTRY = struct.Struct("<16sQI8s")  # digest of the document, offset, rows, digest of the rows
_FORMAT = "2"


def digest_of(document: Document) -> bytes:
    """16 bytes: the digest of the tokens and of the positions with a loss weight."""
    content = hashlib.blake2b(document.tokens.numpy().tobytes(), digest_size=16)
    content.update((document.weights != 0).numpy().tobytes())
    if document.positions is not None:
        content.update(document.positions.numpy().tobytes())
    return content.digest()


class HiddenCache:
    """One teacher's folder. width: H. dtype: of its hidden states."""

    def __init__(self, folder: Path, width: int, dtype: torch.dtype, teacher: Mapping[str, str]) -> None:
        """teacher: its identity. Raises UserError if the folder belongs to another teacher, or is unusable."""
        self.folder, self.width, self.dtype = folder, width, dtype
        self._entries: dict[bytes, tuple[str, int, int, bytes]] = {}
        self._read: dict[str, int] = {}  # bytes of each index that are in `_entries`
        self._part = uuid.uuid4().hex
        self._written = 0
        of_folder = {**teacher, "width": width, "dtype": str(dtype), "format": _FORMAT}
        manifest = json.dumps(of_folder, indent=1, sort_keys=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "teacher.json"
            if path.exists() and path.read_text(encoding="utf-8") != manifest:
                raise UserError(
                    f"distill.cache_dir: {folder} belongs to another teacher or another version of weft. Remove it, "
                    "or name another folder."
                )
            partial = path.with_name(f"{path.name}.{self._part}")
            partial.write_text(manifest, encoding="utf-8")
            partial.replace(path)
            self.refresh()
            ends: dict[str, int] = {}
            for part, start, rows, _ in self._entries.values():
                ends[part] = max(ends.get(part, 0), start + rows * self.row_bytes)
            for part, end in ends.items():
                rows_of_part = folder / f"{part}.bin"
                if not rows_of_part.exists() or rows_of_part.stat().st_size < end:
                    raise self._damaged(rows_of_part)
        except OSError as error:
            raise UserError(f"distill.cache_dir: {folder} cannot be used: {error.strerror or error}.") from error

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def refresh(self) -> None:
        """Read the entries that processes have written since the last call."""
        for path in sorted(self.folder.glob("*.idx")):
            content = path.read_bytes()
            for offset in range(self._read.get(path.stem, 0), len(content) - _ENTRY.size + 1, _ENTRY.size):
                digest, start, rows, of_rows = _ENTRY.unpack_from(content, offset)
                self._entries[digest] = path.stem, start, rows, of_rows
                self._read[path.stem] = offset + _ENTRY.size

    def get(self, document: Document) -> Tensor | None:
        """[T, H] as returned by Engine.last_hidden; None if there is no entry. Raises UserError for a damaged entry."""
        entry = self._entries.get(digest_of(document))
        if entry is None:
            return None
        part, start, rows, of_rows = entry
        is_trained = _trained(document)
        path = self.folder / f"{part}.bin"
        try:
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(rows * self.row_bytes)
        except OSError as error:
            raise self._damaged(path) from error
        if rows != int(is_trained.sum()) or len(content) != rows * self.row_bytes or _digest(content) != of_rows:
            raise self._damaged(path)
        out = torch.zeros(len(document), self.width, dtype=self.dtype)
        if rows:
            out[is_trained] = torch.frombuffer(bytearray(content), dtype=self.dtype).view(rows, self.width)
        return out

    def _damaged(self, path: Path) -> UserError:
        state = "is damaged" if path.exists() else "is missing"
        return UserError(f"distill.cache_dir: {path} {state}. Remove {self.folder}, and weft writes it again.")

    def put(self, documents: Mapping[int, Document], hidden: Mapping[int, Tensor]) -> None:
        """Write the hidden states of these documents."""
        entries = []
        with (self.folder / f"{self._part}.bin").open("ab") as file:
            for index, document in documents.items():
                rows = hidden[index][_trained(document)].contiguous()
                content = rows.view(torch.uint8).numpy().tobytes() if len(rows) else b""
                file.write(content)
                entries.append(_ENTRY.pack(digest_of(document), self._written, len(rows), _digest(content)))
                self._written += len(rows) * self.row_bytes
            file.flush()
            os.fsync(file.fileno())
        with (self.folder / f"{self._part}.idx").open("ab") as file:
            file.write(b"".join(entries))
        self.refresh()

    def head(self, transform: LogitTransform, vocabulary: int) -> TeacherHead | None:
        """The complete head, if it is cached. vocabulary: number of rows of the student's head."""
        path = self.folder / "head.safetensors"
        if not path.exists():
            return None
        tensors = load_file(path)
        weight = tensors["weight"]
        return TeacherHead(weight, tensors.get("bias"), transform, min(vocabulary, len(weight)))

    def keep_head(self, weight: Tensor, bias: Tensor | None) -> None:
        """Write the head, atomically."""
        tensors = {"weight": weight.cpu().contiguous()} | ({} if bias is None else {"bias": bias.cpu().contiguous()})
        partial = self.folder / f"head.{self._part}"
        save_file(tensors, partial)
        partial.replace(self.folder / "head.safetensors")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def _trained(document: Document) -> Tensor:
    """[T]: whether each token has a loss weight."""
    return (document.weights != 0) & (torch.arange(len(document)) > 0)


class CachedTeacher:
    """A teacher that is opened when a document has no entry. open: opens it; collective. transform: of its head's
    logits; None for a teacher that is given as lists."""

    def __init__(self, cache: HiddenCache, open: Callable[[], TeacherSource], transform: LogitTransform | None) -> None:
        self.cache, self._open, self._transform = cache, open, transform
        self._teacher: TeacherSource | None = None

    @property
    def teacher(self) -> TeacherSource:
        """Collective at the first use."""
        if self._teacher is None:
            self._teacher = self._open()
        return self._teacher

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        """As TeacherSource.read. Collective."""
        return self.teacher.read(documents)

    def head(self, student: Engine) -> TeacherHead | Listed | None:
        """As TeacherSource.head, from the folder if it is there. Collective."""
        if self._transform is None:
            return Listed()
        group, rank = student.mesh.world_group, dist.get_rank(student.mesh.world_group)
        rows = int(student.built.config.get_text_config().vocab_size)
        has = [self.cache.head(self._transform, rows) is not None]
        dist.broadcast_object_list(has, src=0, group=group)
        if not has[0]:
            teacher = self.teacher
            assert isinstance(teacher, Teacher)
            weight, bias = teacher.engine.head_weights()
            if rank == 0:
                self.cache.keep_head(weight, bias)
            dist.barrier(group)
        head = self.cache.head(self._transform, rows)
        if head is None:
            raise UserError(f"distill.cache_dir: not all ranks see {self.cache.folder}. Name a shared folder.")
        return head_for(head, student)


def with_cached_teachers(
    teachers: Sequence[TeacherSource],
    chosen: Sequence[int] | None,
    documents: Sequence[Document],
    local: Mapping[int, Document],
    student: Engine,
) -> dict[int, Document]:
    """teachers.with_teachers, with outputs from the folders. Documents without entry are read by their teacher and
    added. Teachers without cache (RowLists) read nothing. Collective."""
    cached = {number: teacher for number, teacher in enumerate(teachers) if isinstance(teacher, CachedTeacher)}
    teacher_of = {index: cached.get(0 if chosen is None else chosen[index]) for index in range(len(documents))}
    for teacher in cached.values():
        teacher.cache.refresh()
    to_read = {
        index: (document, source) for index, document in local.items() if (source := teacher_of[index]) is not None
    }
    entries = {index: teacher.cache.get(document) for index, (document, teacher) in to_read.items()}
    hidden = {index: values for index, values in entries.items() if values is not None}
    group, rank = student.mesh.world_group, dist.get_rank(student.mesh.world_group)
    missing: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    with waiting():
        dist.all_gather_object(missing, sorted(to_read.keys() - hidden.keys()), group=group)
    writer = {index: number for number, indices in reversed(list(enumerate(missing))) for index in indices}
    if writer:
        read = read_hidden([teacher.read for teacher in teachers], chosen, documents, sorted(writer))
        needed = {index: local[index] for index in missing[rank]}
        read = exchange(read, needed, group, student.device)
        for teacher in cached.values():
            written = {i: d for i, d in needed.items() if teacher_of[i] is teacher and writer[i] == rank}
            if written:
                teacher.cache.put(written, read)
        hidden |= read
    return with_readings(local, hidden, chosen)
