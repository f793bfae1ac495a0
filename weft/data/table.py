"""Tokenised documents concatenated in a few flat arrays, in memory or memory-mapped from files.

A table holds every document in full; weft/data/limits.py truncates and drops. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.blocks import row_name
from weft.data.encode import Encoded
from weft.data.image_files import FILES, HEAD_BYTES, MediaLocation, identity
from weft.data.records import ALL_KINDS, ROLES, Kind, Record, Role

Array = NDArray[Any]
BadRow = tuple[int, str]  # (number of the row, error message, which begins with file:line)

# One value per token, or per document.
_TOKENS = {"ids": np.int32, "trained": np.uint8}
# K values for each token, or none, by the document's `widths`.
_LISTS = {"top_ids": np.int32, "top_logprobs": np.float32}
_DOCUMENTS = {
    "lengths": np.int32, "losses": np.int32, "numbers": np.int64, "formats": np.uint8,
    "patches": np.int64, "pairs": np.int64, "reaches": np.int32, "images": np.int32, "videos": np.int32,
    "roles": np.uint8, "margins": np.float32, "commons": np.int32, "teachers": np.uint16, "widths": np.int32,
}  # fmt: skip
# The packed locations of the images of all documents, concatenated, and the size of each in bytes.
_PLACES = {"places": np.uint8}
_IMAGES = {"sizes": np.int64}
_ALL = _TOKENS | _LISTS | _DOCUMENTS | _PLACES | _IMAGES
_META = "table.json"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokenised documents.

    ids, trained: a value per token. The following have a value per document: lengths, its tokens; losses, its trained
    tokens except the first token, which is never predicted; numbers, its line or row; formats, indices into ALL_KINDS;
    patches, pairs, reaches, as in Encoded; images, the number of its images and videos; videos, the number of its
    videos; roles, indices into ROLES; margins and teachers, as in Record; commons, the number of tokens that both
    answers of its pair begin with, at least up to the end of its images, or 0; widths, K of its lists, 0 without lists.
    top_ids, top_logprobs: K values per token, as in TopLists. places: the packed MediaLocations of all images and
    videos, concatenated. sizes: bytes of each packed MediaLocation. bad: the omitted rows.
    """

    ids: Array
    trained: Array
    lengths: Array
    losses: Array
    numbers: Array
    formats: Array
    patches: Array
    pairs: Array
    reaches: Array
    images: Array
    videos: Array
    roles: Array
    margins: Array
    commons: Array
    teachers: Array
    widths: Array
    top_ids: Array
    top_logprobs: Array
    places: Array
    sizes: Array
    bad: Sequence[BadRow] = ()

    @classmethod
    def from_records(
        cls,
        numbers: Sequence[int],
        records: Sequence[Record],
        encoded: Sequence[Encoded],
        bad: Sequence[BadRow] = (),
    ) -> Chunk:
        """The chunk of these records. numbers: their lines or rows. encoded: their encodings by an Encoder."""
        total = sum(len(item.ids) for item in encoded)
        packed = [location.packed() for item in encoded for location in item.places]
        listed = [item.lists for item in encoded if item.lists is not None]
        return cls(
            ids=np.fromiter(chain.from_iterable(item.ids for item in encoded), np.int32, total),
            trained=np.fromiter(chain.from_iterable(item.trained for item in encoded), np.uint8, total),
            lengths=np.array([len(item.ids) for item in encoded], np.int32),
            losses=np.array([sum(map(bool, item.trained[1:])) for item in encoded], np.int32),
            numbers=np.array(numbers, np.int64),
            formats=np.array([ALL_KINDS.index(record.kind) for record in records], np.uint8),
            patches=np.array([item.patches for item in encoded], np.int64),
            pairs=np.array([item.pairs for item in encoded], np.int64),
            reaches=np.array([item.reach for item in encoded], np.int32),
            images=np.array([len(item.places) for item in encoded], np.int32),
            videos=np.array(
                [sum(location.info.clip is not None for location in item.places) for item in encoded], np.int32
            ),
            roles=np.array([ROLES.index(record.role) for record in records], np.uint8),
            margins=np.array([record.margin for record in records], np.float32),
            commons=_commons(records, encoded),
            teachers=np.array([record.teacher for record in records], np.uint16),
            widths=np.array([0 if item.lists is None else item.lists.ids.shape[1] for item in encoded], np.int32),
            top_ids=np.concatenate([np.empty(0, np.int32), *(lists.ids.ravel() for lists in listed)]),
            top_logprobs=np.concatenate([np.empty(0, np.float32), *(lists.logprobs.ravel() for lists in listed)]),
            places=np.frombuffer(b"".join(packed), np.uint8),
            sizes=np.array([len(location) for location in packed], np.int64),
            bad=bad,
        )


def _commons(records: Sequence[Record], encoded: Sequence[Encoded]) -> Array:
    commons = np.zeros(len(records), np.int32)
    for index, record in enumerate(records):
        if record.role == "chosen":  # the rejected answer follows
            count = common_beginning(encoded[index].ids, encoded[index + 1].ids)
            commons[index : index + 2] = count if count >= encoded[index].reach else 0
    return commons


def common_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class Digest:
    """Incremental hexadecimal digest of token ids, loss masks, lengths and images, in order. It does not depend on how
    the documents are split into chunks."""

    def __init__(self) -> None:
        self._parts = [hashlib.blake2b(digest_size=16) for _ in range(3)]
        # None until a document has images, a role, or a teacher, so that digests of texts do not include them
        self._images: Any = None
        self._answers: Any = None
        self._taught: Any = None

    def update(self, ids: Array, trained: Array, lengths: Array) -> None:
        for part, values, dtype in zip(
            self._parts, (ids, trained, lengths), (np.int32, np.uint8, np.int32), strict=True
        ):
            part.update(np.ascontiguousarray(values, dtype).data)

    def update_images(self, images: Array, places: Array, sizes: Array) -> None:
        """images: number of images of each document. places, sizes: as in Chunk."""
        if not len(sizes):
            return
        self._images = self._images or hashlib.blake2b(digest_size=16)
        starts = np.cumsum(sizes) - sizes
        for start in starts.tolist():
            self._images.update(identity(places[start : start + HEAD_BYTES]))
        self._images.update(np.ascontiguousarray(images[images > 0], np.int32).data)

    def update_answers(self, roles: Array, margins: Array) -> None:
        """Adds documents that are answers of preferences."""
        if roles.any():
            self._answers = self._answers or hashlib.blake2b(digest_size=16)
            self._answers.update(np.rec.fromarrays([roles, margins.astype("<f4")]).tobytes())

    def update_taught(self, teachers: Array, widths: Array, top_ids: Array, top_logprobs: Array) -> None:
        """Adds documents with lists, or with one of several teachers."""
        if teachers.any() or len(top_ids):
            self._taught = self._taught or [hashlib.blake2b(digest_size=16) for _ in range(3)]
            self._taught[0].update(np.rec.fromarrays([teachers, widths]).tobytes())
            for part, values in zip(self._taught[1:], (top_ids, top_logprobs), strict=True):
                part.update(np.ascontiguousarray(values).data)

    def hexdigest(self) -> str:
        further = (self._images, self._answers, *(self._taught or ()))
        parts = [*self._parts, *(part for part in further if part is not None)]
        return hashlib.blake2b(b"".join(part.digest() for part in parts), digest_size=8).hexdigest()


class TokenTable:
    """The documents of a SourcePart. origin, by_line: as in SourcePart. digest: see Digest. largest: the largest token
    id. bad: the omitted rows. inputs: (name of a document, locations of its images) -> (the model's inputs, patches);
    set by weft.data.tokenise."""

    def __init__(
        self,
        origin: str,
        by_line: bool,
        arrays: dict[str, Array],
        digest: str,
        largest: int,
        bad: Sequence[BadRow] = (),
    ) -> None:
        self.bad = bad
        self.origin, self.by_line, self.digest, self.largest = origin, by_line, digest, largest
        self.ids, self.trained = arrays["ids"], arrays["trained"]
        self.lengths, self.losses = arrays["lengths"], arrays["losses"]
        self.numbers, self.formats = arrays["numbers"], arrays["formats"]
        self.patches, self.pairs = arrays["patches"], arrays["pairs"]
        self.reaches, self.images, self.videos = arrays["reaches"], arrays["images"], arrays["videos"]
        self.roles, self.margins, self.commons = arrays["roles"], arrays["margins"], arrays["commons"]
        self.teachers, self.widths = arrays["teachers"], arrays["widths"]
        self.top_ids, self.top_logprobs = arrays["top_ids"], arrays["top_logprobs"]
        self._places, self._sizes = arrays["places"], arrays["sizes"]
        self.ends: Array = np.cumsum(self.lengths, dtype=np.int64)
        self.inputs: Callable[[str, Sequence[MediaLocation]], tuple[dict[str, Any], int]] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def row_name(self, index: int) -> str:
        """The name of a document in messages: file:line or file[row]."""
        return row_name(self.origin, int(self.numbers[index]), self.by_line)

    def format(self, index: int) -> Kind:
        return ALL_KINDS[int(self.formats[index])]

    def role(self, index: int) -> Role:
        return ROLES[int(self.roles[index])]

    def tokens(self, index: int, length: int) -> tuple[Array, Array]:
        """(ids, trained) of the first `length` tokens of a document."""
        begin = int(self.ends[index]) - int(self.lengths[index])
        return self.ids[begin : begin + length], self.trained[begin : begin + length]

    @cached_property
    def _list_ends(self) -> Array:
        """[documents] number of entries of top_ids up to the end of each document."""
        return np.cumsum(self.lengths.astype(np.int64) * self.widths)

    def lists(self, index: int, length: int) -> tuple[Array, Array]:
        """(top_ids, top_logprobs), [length, K] each, of the first `length` tokens of a document."""
        width = int(self.widths[index])
        begin = int(self._list_ends[index]) - int(self.lengths[index]) * width
        entries = slice(begin, begin + length * width)
        return self.top_ids[entries].reshape(length, width), self.top_logprobs[entries].reshape(length, width)

    @cached_property
    def _image_ends(self) -> tuple[Array, Array]:
        """(cumulative images by document, cumulative bytes of packed locations by image)."""
        return np.cumsum(self.images, dtype=np.int64), np.cumsum(self._sizes, dtype=np.int64)

    def places(self, index: int) -> list[MediaLocation]:
        """The locations of a document's images and videos, in order."""
        if not self.images[index]:
            return []
        documents, images = self._image_ends
        last = int(documents[index])
        ends = images[last - int(self.images[index]) : last].tolist()
        sizes = self._sizes[last - int(self.images[index]) : last].tolist()
        return [MediaLocation.unpack(self._places[e - n : e].tobytes()) for e, n in zip(ends, sizes, strict=True)]

    def image_files(self) -> Iterator[MediaLocation]:
        """Yields the locations of all images and videos that are files."""
        for end, size in zip(np.cumsum(self._sizes).tolist(), self._sizes.tolist(), strict=True):
            if self._places[end - size] in FILES:
                yield MediaLocation.unpack(self._places[end - size : end].tobytes())

    def media_of(self, index: int) -> tuple[Array, Array, Array]:
        """The arguments of Digest.update_images for one document."""
        packed = [location.packed() for location in self.places(index)]
        sizes = np.array([len(item) for item in packed], np.int64)
        return self.images[index : index + 1], np.frombuffer(b"".join(packed), np.uint8), sizes

    def losses_of(self, index: int, length: int) -> int:
        """Number of trained tokens of a document truncated to `length`, except the first token."""
        return int(np.count_nonzero(self.tokens(index, length)[1][1:]))

    def first_with(self, smallest: int) -> int:
        """The index of the first document with a token id of at least `smallest`; there must be one."""
        position = int(np.flatnonzero(self.ids >= smallest)[0])
        return int(np.searchsorted(self.ends, position, side="right"))


def in_memory(origin: str, by_line: bool, chunks: Iterable[Chunk]) -> TokenTable:
    """The table of these chunks, in memory."""
    digest, all_chunks = Digest(), list(chunks)
    for chunk in all_chunks:
        digest.update(chunk.ids, chunk.trained, chunk.lengths)
        digest.update_images(chunk.images, chunk.places, chunk.sizes)
        digest.update_answers(chunk.roles, chunk.margins)
        digest.update_taught(chunk.teachers, chunk.widths, chunk.top_ids, chunk.top_logprobs)
    arrays = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(chunk, name) for chunk in all_chunks)])
        for name, dtype in _ALL.items()
    }
    ids = arrays["ids"]
    bad = [row for chunk in all_chunks for row in chunk.bad]
    return TokenTable(origin, by_line, arrays, digest.hexdigest(), int(ids.max()) if len(ids) else 0, bad)


def write(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Writes a table to files in an existing folder, one chunk in memory at a time."""
    digest, largest, documents, bad, places_digest = Digest(), 0, 0, list[BadRow](), hashlib.blake2b(digest_size=16)
    files = {name: (folder / name).open("wb") for name in _ALL}
    try:
        for chunk in chunks:
            digest.update(chunk.ids, chunk.trained, chunk.lengths)
            digest.update_images(chunk.images, chunk.places, chunk.sizes)
            digest.update_answers(chunk.roles, chunk.margins)
            digest.update_taught(chunk.teachers, chunk.widths, chunk.top_ids, chunk.top_logprobs)
            places_digest.update(np.ascontiguousarray(chunk.places).data)
            largest = max(largest, int(chunk.ids.max()) if len(chunk.ids) else 0)
            documents += len(chunk.lengths)
            bad += chunk.bad
            for name, file in files.items():
                file.write(getattr(chunk, name).tobytes())
    finally:
        for file in files.values():
            file.close()
    meta = {"documents": documents, "digest": digest.hexdigest(), "largest": largest, "bad": bad}
    meta["places"] = places_digest.hexdigest()
    (folder / _META).write_text(json.dumps(meta), encoding="utf-8")


class DamagedTableError(Exception):
    """The files of a table are incomplete or have changed."""


def read(folder: Path, origin: str, by_line: bool) -> TokenTable:
    """The table in a folder of `write`, with tokens memory-mapped. Raises DamagedTableError if files are incomplete or
    have changed."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        small_arrays = _DOCUMENTS | _IMAGES
        arrays: dict[str, Array] = {name: np.fromfile(folder / name, dtype) for name, dtype in small_arrays.items()}
        arrays |= {name: _mapped(folder / name, dtype) for name, dtype in (_TOKENS | _LISTS | _PLACES).items()}
    except (FileNotFoundError, ValueError) as error:
        raise DamagedTableError(str(error)) from error
    if any(len(arrays[name]) != meta["documents"] for name in _DOCUMENTS):
        raise DamagedTableError(f"{folder} was changed after it was written")
    digest, tokens = Digest(), int(arrays["lengths"].sum(dtype=np.int64))
    digest.update(arrays["ids"], arrays["trained"], arrays["lengths"])
    digest.update_images(arrays["images"], arrays["places"], arrays["sizes"])
    digest.update_answers(arrays["roles"], arrays["margins"])
    digest.update_taught(*(arrays[name] for name in ("teachers", "widths", "top_ids", "top_logprobs")))
    places_digest = hashlib.blake2b(np.ascontiguousarray(arrays["places"]).data, digest_size=16).hexdigest()
    listed = int((arrays["lengths"].astype(np.int64) * arrays["widths"]).sum())
    counts = [
        *(len(arrays[name]) - tokens for name in _TOKENS),
        *(len(arrays[name]) - listed for name in _LISTS),
        int(arrays["images"].sum()) - len(arrays["sizes"]),
        int(arrays["sizes"].sum()) - len(arrays["places"]),
    ]
    if any(counts) or digest.hexdigest() != meta["digest"] or places_digest != meta["places"]:
        raise DamagedTableError(f"{folder} was changed after it was written")
    bad = [(number, text) for number, text in meta["bad"]]
    return TokenTable(origin, by_line, arrays, meta["digest"], meta["largest"], bad)


def _mapped(path: Path, dtype: Any) -> Array:
    empty = path.stat().st_size == 0  # an empty file cannot be mapped
    return np.empty(0, dtype) if empty else np.memmap(path, dtype, mode="r")
