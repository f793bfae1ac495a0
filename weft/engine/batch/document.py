"""Training sequences, and their metadata for the step plan.

T tokens of a document or row, N predictions of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.batch.media import Media
from weft.engine.batch.prefixes import Beginning, Path, PathNode, TokenKeys, beginnings_of, token_keys


@dataclass(frozen=True, slots=True)
class DocumentMeta:
    """A document's metadata for the step plan.

    length: tokens. omitted: number of tokens at its end that no forward reads. weight: sum of the loss weights of its
    predicted tokens (all but the first). loss_tokens: predicted tokens with a non-zero weight. group: index of its
    group of documents; weft forwards equal prefixes of a group once. cost: estimated FLOPs, in any unit. routed:
    whether it carries routes. patches: number of patches of its images, in the vision tower. tower_tokens: number of
    tokens that need as much memory as these patches. path: the prefix that it shares with other documents of its group
    (prefixes.py); empty if it shares none.
    """

    length: int
    weight: float
    loss_tokens: int
    group: int | None = None
    cost: float = 0.0
    routed: bool = False
    omitted: int = 0
    patches: int = 0
    tower_tokens: int = 0
    path: Path = ()

    @property
    def read(self) -> int:
        """The number of tokens that a forward reads, counted from the first."""
        return self.length - self.omitted

    @property
    def room(self) -> int:
        """The number of tokens of step.max_tokens_per_device that the document uses."""
        return self.read + self.tower_tokens


def omitted_tokens(length: int, *, read_all: bool) -> int:
    """The number of tokens at a document's end that no forward reads: 1, because the last token predicts nothing; 0 if
    read_all."""
    return int(length > 1 and not read_all)


@dataclass(frozen=True, slots=True)
class Document:
    """One training sequence.

    tokens: [T] int64. weights: [T] fp32, the loss weight of each token as a target; the first is not used, because
    nothing predicts that token. positions: [T] or [3, T] int64, default 0..T-1. arrays: further per-token values [T],
    such as old logprobs. routes: [T, decoder layers, k] int16 or uint8, the experts of each token; -1: the router
    chooses (replay.py). media: its images and videos. group: see DocumentMeta. source: the document's origin, for
    messages ("chat.jsonl:12"). dataset: name of its data source, if there are several.
    """

    tokens: Tensor
    weights: Tensor
    positions: Tensor | None = None
    arrays: dict[str, Tensor] = field(default_factory=dict)
    routes: Tensor | None = None
    media: Media | None = None
    group: int | None = None
    source: str = ""
    dataset: str = ""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def token_keys(self, placeholders: Sequence[int] = ()) -> TokenKeys | None:
        """A key for each token. A token is shared with another document of the group if their keys are equal: token,
        image, position and experts. None if the document shares nothing. placeholders: as in prefixes.py:token_keys."""
        if self.routes is not None and len(self.routes) != len(self):
            return None  # RouteReplay.check names it
        positions = None if self.positions is None else self.positions.reshape(-1, len(self)).T
        columns = [tensor.numpy() for tensor in (positions, self.routes) if tensor is not None]
        images = b"" if self.media is None else self.media.digest()
        return token_keys(self.tokens.numpy(), placeholders, images, columns)

    def meta(self, cost: float = 0.0, omitted: int = 0, tower_tokens: int = 0) -> DocumentMeta:
        """This document's metadata. cost, omitted, tower_tokens: as in DocumentMeta."""
        # For short documents numpy takes a third of torch's time.
        predicted = self.weights[1:].numpy().astype(np.float64)
        return DocumentMeta(
            length=len(self),
            weight=float(predicted.sum()),
            loss_tokens=int(np.count_nonzero(predicted)),
            group=self.group,
            cost=cost,
            routed=self.routes is not None,
            omitted=omitted,
            patches=0 if self.media is None else self.media.patches,
            tower_tokens=tower_tokens,
        )


class Measures(NamedTuple):
    """The fields of DocumentMeta, Media.pairs and Media.has_videos, for several documents, each [documents]."""

    length: NDArray[np.int64]
    weight: NDArray[np.float64]
    loss_tokens: NDArray[np.int64]
    routed: NDArray[np.bool_]
    patches: NDArray[np.int64]
    pairs: NDArray[np.int64]
    videos: NDArray[np.bool_]


class MeasuredDocuments(Sequence[Document]):
    """Documents that can be planned before they are built, so that a rank builds only the documents that it reads."""

    @abstractmethod
    def measures(self) -> Measures:
        """The measures of all documents, bitwise equal to Document.meta of each."""

    @abstractmethod
    def source(self, index: int) -> str:
        """The `source` of the document of this index."""

    def dataset(self, index: int) -> str:
        """The `dataset` of the document of this index."""
        return self.build(index).dataset

    @abstractmethod
    def build(self, index: int) -> Document:
        """The document of this index, from 0."""

    def groups(self) -> Sequence[int | None]:
        """The group of each document."""
        return [None] * len(self)

    def beginnings(self, indices: Sequence[int], placeholders: Sequence[int] = ()) -> dict[int, Beginning]:
        """The shared prefixes of these documents, by index. Every rank calls this for all grouped documents of a step,
        so an implementation should not need the documents. This default builds all of them. placeholders: as in
        prefixes.py:token_keys."""
        groups = self.groups()
        return _beginnings({index: self.build(index) for index in indices}, groups, placeholders)

    def take(self, indices: Sequence[int]) -> dict[int, Document]:
        """index -> document."""
        return {index: self.build(index) for index in indices}

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        indices = range(len(self))[index]
        return self.build(indices) if isinstance(indices, int) else [self.build(position) for position in indices]


class Chosen(MeasuredDocuments):
    """A selection of other documents, in the given order."""

    def __init__(self, documents: MeasuredDocuments, indices: Sequence[int]) -> None:
        self._documents, self._indices = documents, indices

    def __len__(self) -> int:
        return len(self._indices)

    def measures(self) -> Measures:
        all_of, chosen = self._documents.measures(), np.asarray(self._indices, np.int64)
        return Measures(
            all_of.length[chosen], all_of.weight[chosen], all_of.loss_tokens[chosen], all_of.routed[chosen],
            all_of.patches[chosen], all_of.pairs[chosen], all_of.videos[chosen],
        )  # fmt: skip

    def groups(self) -> Sequence[int | None]:
        groups = self._documents.groups()
        return [groups[index] for index in self._indices]

    def beginnings(self, indices: Sequence[int], placeholders: Sequence[int] = ()) -> dict[int, Beginning]:
        numbers = {self._indices[index]: index for index in indices}
        beginnings = self._documents.beginnings(list(numbers), placeholders)
        return {numbers[index]: beginning for index, beginning in beginnings.items()}

    def source(self, index: int) -> str:
        return self._documents.source(self._indices[index])

    def dataset(self, index: int) -> str:
        return self._documents.dataset(self._indices[index])

    def build(self, index: int) -> Document:
        return self._documents.build(self._indices[index])


def choose(documents: Sequence[Document], indices: Sequence[int]) -> Sequence[Document]:
    """The documents of these indices, in this order; measured documents are not built."""
    if isinstance(documents, MeasuredDocuments):
        return Chosen(documents, indices)
    return [documents[index] for index in indices]


def take(documents: Sequence[Document], indices: Sequence[int]) -> dict[int, Document]:
    """index -> document, built."""
    if isinstance(documents, MeasuredDocuments):
        return documents.take(indices)
    return {index: documents[index] for index in indices}


def datasets_of(documents: Sequence[Document]) -> list[str]:
    """The `dataset` of each document; measured documents are not built."""
    if isinstance(documents, MeasuredDocuments):
        return [documents.dataset(index) for index in range(len(documents))]
    return [document.dataset for document in documents]


def have_videos(documents: Collection[Document]) -> bool:
    """Whether any has a video; measured documents are not built."""
    if isinstance(documents, MeasuredDocuments):
        return bool(documents.measures().videos.any())
    return any(document.media is not None and document.media.has_videos for document in documents)


def first_sources(documents: Sequence[Document], indices: Sequence[int], limit: int = 8) -> list[str]:
    """The sources of the first `limit` of these documents, for messages."""
    if isinstance(documents, MeasuredDocuments):
        return [documents.source(index) for index in indices[:limit]]
    return [documents[index].source for index in indices[:limit]]


@dataclass(frozen=True)
class Costs:
    """The costs of documents in one model. omitted: length -> DocumentMeta.omitted. tokens: number of tokens that a
    forward reads -> FLOPs. images: patches, pairs of a document's images -> (FLOPs, DocumentMeta.tower_tokens)."""

    omitted: Callable[[int], int]
    tokens: Callable[[int], float]
    images: Callable[[int, int], tuple[float, int]]


def document_metadata(
    documents: Collection[Document],
    costs: Costs,
    shares: Callable[[int], bool] | None = None,
    placeholders: Sequence[int] = (),
) -> list[DocumentMeta]:
    """The metadata of each document. shares: length -> whether a document of that length may share its beginning with
    others of its group; None: none does. placeholders: as in prefixes.py:token_keys."""
    measured = documents if isinstance(documents, MeasuredDocuments) else None
    sequence = documents if isinstance(documents, Sequence) else list(documents)
    metadata = [_meta(d, costs) for d in sequence] if measured is None else _measured(measured, costs)
    if shares is None:
        return metadata
    sharing = [n for n, meta in enumerate(metadata) if meta.group is not None and shares(meta.length)]
    if measured is not None:
        beginnings = measured.beginnings(sharing, placeholders) if sharing else {}
    else:
        groups = [meta.group for meta in metadata]
        beginnings = _beginnings({index: sequence[index] for index in sharing}, groups, placeholders)
    for index, beginning in beginnings.items():
        metadata[index] = replace(metadata[index], path=_priced(metadata[index], beginning, costs))
    return metadata


def _beginnings(
    documents: Mapping[int, Document], groups: Sequence[int | None], placeholders: Sequence[int]
) -> dict[int, Beginning]:
    """The shared prefixes of built documents, by index. groups: the group of each index."""
    sizes = Counter(groups[index] for index in documents)
    keys = {
        index: document.token_keys(placeholders) for index, document in documents.items() if sizes[groups[index]] > 1
    }
    return beginnings_of(
        dict(enumerate(groups)), {index: token_keys for index, token_keys in keys.items() if token_keys is not None}
    )


def _priced(meta: DocumentMeta, beginning: Beginning, costs: Costs) -> Path:
    """The path of the tokens that a forward reads; each node has the cost of a document that would end there."""
    tower = meta.cost - costs.tokens(meta.read)

    def priced(node: PathNode) -> PathNode:
        has_images = beginning.images_end and (node.end >= beginning.images_end or node.end == meta.read)
        extra, tokens = (tower, meta.tower_tokens) if has_images else (0.0, 0)
        return node._replace(cost=costs.tokens(node.end) + extra, tower_tokens=tokens)

    return tuple(priced(node) for node in beginning.path_of(meta.read))


def _measured(documents: MeasuredDocuments, costs: Costs) -> list[DocumentMeta]:
    columns = documents.measures()
    lengths, patches, pairs = columns.length.tolist(), columns.patches.tolist(), columns.pairs.tolist()
    omitted = [costs.omitted(length) for length in lengths]
    towers = [costs.images(*image) if image[0] else (0.0, 0) for image in zip(patches, pairs, strict=True)]
    flops = [
        costs.tokens(length - unread) + tower
        for length, unread, (tower, _) in zip(lengths, omitted, towers, strict=True)
    ]
    rows = zip(
        lengths, columns.weight.tolist(), columns.loss_tokens.tolist(), documents.groups(), flops,
        columns.routed.tolist(), omitted, patches, [tokens for _, tokens in towers],
        strict=True,
    )  # fmt: skip
    return [DocumentMeta(*row) for row in rows]  # fields in the order of DocumentMeta


def _meta(document: Document, costs: Costs) -> DocumentMeta:
    omitted = costs.omitted(len(document))
    media = document.media
    tower, tokens = (0.0, 0) if media is None else costs.images(media.patches, media.pairs)
    return document.meta(costs.tokens(len(document) - omitted) + tower, omitted, tokens)
