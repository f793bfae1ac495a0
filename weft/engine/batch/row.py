"""Documents laid out for one forward of one rank. Labels are shifted before documents are joined.

B batch, T tokens of the row, N predictions that are read. Prediction i is made at position selected[i] of targets[i],
the next token of the same document; weights and arrays are those of the target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.batch.media import joined
from weft.engine.step_plan.plan import Layout
from weft.launch.consistency import ReplicaChecksum
from weft.models.embedding_noise import StepNoise
from weft.models.vision import Vision
from weft.ops.attention_call import Bounds
from weft.ops.communicator import FeatureExchange
from weft.ops.shared_documents import SharedDocuments

# The token of padding. The embedding of 0 is often all zeros, where a standard deviation has no gradient (gemma3n).
PADDING = 1


@dataclass(frozen=True)
class Row:
    """documents: their indices in the step, in order. position_ids_BT: [3, B, T] if a document has three positions per
    token. document_N: index in `documents` of each prediction's document. token_N: index of the target in its document.
    owner_M: index in `documents` of each token's document, over the flattened row, -1 for padding; None unless
    requested. routes: [tokens of the flattened row, layers, k], -1 for none; None if no document has any. real_tokens:
    number of tokens without padding. shared: the documents that other ranks have parts of, if any. media: forward
    arguments of the row's images; None if no rank has images. borrowed: media are of an image in no document, so that
    this rank runs the tower as the others do. exchange: if set, media are the images that this rank computes, whose
    features are exchanged (dealt_images.py). real_K: indices in the flattened row of the tokens that are no padding, in
    layout `padded`; None where padding comes last. noise_keys_BT, noise_sizes_BT: see EmbeddingNoise.adding; None
    without noise. alike: checksums that must equal those of other ranks."""

    documents: tuple[int, ...]
    input_ids_BT: Tensor
    position_ids_BT: Tensor
    bounds: Bounds
    selected_N: Tensor
    targets_N: Tensor
    weights_N: Tensor
    document_N: Tensor
    token_N: Tensor
    arrays: dict[str, Tensor]
    owner_M: Tensor | None
    routes: Tensor | None
    real_tokens: int
    shared: SharedDocuments | None = None
    media: Mapping[str, Tensor] | None = None
    borrowed: bool = False
    exchange: FeatureExchange | None = None
    real_K: Tensor | None = None
    noise_keys_BT: Tensor | None = None
    noise_sizes_BT: Tensor | None = None
    checksums: tuple[ReplicaChecksum, ...] = ()

    def pinned(self) -> Row:
        """A copy in page-locked memory, for asynchronous copies to a device."""
        return self.moved(Tensor.pin_memory)

    def to(self, device: torch.device) -> Row:
        """The row on a device, by asynchronous copies; on the CPU, the row itself."""
        if device.type == "cpu":
            return self
        bounds = self.bounds
        if not bounds.padded:
            bounds = replace(
                Bounds.packed(bounds.lengths, device), firsts=self.bounds.firsts, context=self.bounds.context
            )
        if self.bounds.last_seen is not None:
            bounds = replace(bounds, last_seen=self.bounds.last_seen.to(device, non_blocking=True))
        return replace(self.moved(lambda tensor: tensor.to(device, non_blocking=True)), bounds=bounds)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Row:
        tensors = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        arrays = {name: move(values) for name, values in self.arrays.items()}
        changed: dict[str, Any] = {**tensors, "arrays": arrays if self.documents else _no_arrays(tensors["weights_N"])}
        if self.media is not None:
            changed["media"] = {name: move(value) for name, value in self.media.items()}
        if self.exchange is not None:
            changed["exchange"] = self.exchange.moved(move)
        return replace(self, **changed, shared=None if self.shared is None else self.shared.moved(move))


def build_row(
    indices: Sequence[int],
    documents: Mapping[int, Document],
    *,
    read: Sequence[int],
    length: int,
    layout: Layout,
    every_token: bool,
    owners: bool = False,
    vision: Vision | None = None,
    images: bool = False,
    noise: StepNoise | None = None,
) -> Row:
    """Lay out documents for one forward, on the host.

    read: tokens of each document that the forward reads: all, or all but the last. length: T with padding. every_token:
    predict all tokens, not only those with a weight. owners: fill owner_M. vision: of the model, if it takes images.
    images: whether some rank's row of this micro-batch has images. noise: that embeddings get. A row without documents
    holds padding, so that every rank runs the same collectives.
    """
    chosen = [documents[index] for index in indices]
    starts = _starts(read, length, layout)
    if layout == "packed":
        tail = length - sum(read)
        assert tail >= 0, f"documents of {sum(read)} tokens in a row of {length}"
        all_lengths = tuple(read) + ((tail,) if tail else ())
        shape, bounds = (1, length), Bounds.packed(all_lengths, torch.device("cpu"))
    else:
        shape = (max(1, len(chosen)), length)
        bounds = Bounds((length,) * shape[0], padded=True)
    if vision is not None and vision.both_ways and any(document.media for document in chosen):
        bounds.last_seen = _last_seen(chosen, vision, read, length)
    places = _TokenIndex.of_documents(starts, read)
    ids = torch.full((shape[0] * length,), PADDING)
    ids[places.row_K] = _joined([d.tokens[:count] for d, count in zip(chosen, read, strict=True)], torch.int64)
    return Row(
        documents=tuple(indices),
        input_ids_BT=ids.view(shape),
        position_ids_BT=build_positions(chosen, places, starts, read, shape, layout),
        bounds=bounds,
        owner_M=_owners(places, ids.numel()) if owners else None,
        routes=_routes(chosen, starts, read, ids.numel()),
        real_tokens=sum(read),
        real_K=None if layout == "packed" else places.row_K,
        **({} if noise is None else _noise(indices, chosen, places, shape, noise)),
        **(_media(chosen, vision) if images and vision is not None else {}),
        **shift_labels(chosen, starts, every_token),
    )


@dataclass(frozen=True)
class _TokenIndex:
    """For each of the K tokens of a row's documents, in order: the index of its document, its index in the document,
    and its index in the flattened row. Tensors instead of a loop, because there may be many short documents."""

    document_K: Tensor
    token_K: Tensor
    row_K: Tensor

    @staticmethod
    def of_documents(starts: Sequence[int], lengths: Sequence[int]) -> _TokenIndex:
        counts = torch.tensor(lengths, dtype=torch.int64)
        document = torch.arange(len(lengths)).repeat_interleave(counts)
        token = torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]
        return _TokenIndex(document, token, torch.tensor(starts, dtype=torch.int64)[document] + token)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def _owners(places: _TokenIndex, tokens: int) -> Tensor:
    owner = torch.full((tokens,), -1)
    owner[places.row_K] = places.document_K
    return owner


def _noise(
    indices: Sequence[int], documents: Sequence[Document], places: _TokenIndex, shape: tuple[int, int], noise: StepNoise
) -> dict[str, Tensor]:
    """The noise of a row's tokens, by the lengths of whole documents, whatever else is in the row."""
    keys, sizes = torch.zeros(shape).long().flatten(), torch.zeros(shape).flatten()
    if documents:
        lengths = torch.tensor([len(document) for document in documents], dtype=torch.float32)
        keys[places.row_K] = noise.keys(torch.tensor(indices)[places.document_K], places.token_K)
        sizes[places.row_K] = (noise.alpha / lengths.sqrt())[places.document_K]
    return {"noise_keys_BT": keys.view(shape), "noise_sizes_BT": sizes.view(shape)}


def _media(documents: Sequence[Document], vision: Vision) -> dict[str, Any]:
    """The images of a row; if it has none, the smallest possible one."""
    inputs = [document.media.inputs for document in documents if document.media is not None]
    return {"media": joined(inputs or [dict(vision.smallest)]), "borrowed": not inputs}


def _last_seen(documents: Sequence[Document], vision: Vision, read: Sequence[int], length: int) -> Tensor:
    """Bounds.last_seen of a packed row."""
    last = torch.arange(length, dtype=torch.int32)
    for document, count, start in zip(documents, read, accumulate(read, initial=0), strict=False):
        if document.media is not None:
            last[start : start + count] = start + vision.last_seen(document.tokens[:count])
    return last


def _routes(documents: Sequence[Document], starts: Sequence[int], read: Sequence[int], tokens: int) -> Tensor | None:
    shapes = [document.routes.shape[1:] for document in documents if document.routes is not None]
    if not shapes:
        return None
    routes = torch.full((tokens, *shapes[0]), -1, dtype=torch.int16)
    for start, count, document in zip(starts, read, documents, strict=True):
        if document.routes is not None:
            routes[start : start + count] = document.routes[:count]
    return routes


def _starts(read: Sequence[int], length: int, layout: Layout) -> list[int]:
    """The offset of each document in the flattened row."""
    if layout == "padded":
        return [index * length for index in range(len(read))]
    return list(accumulate(read, initial=0))[:-1]


def build_positions(
    documents: Sequence[Document],
    places: _TokenIndex,
    starts: Sequence[int],
    read: Sequence[int],
    shape: tuple[int, int],
    layout: Layout,
) -> Tensor:
    """Positions that restart with every document; padding counts from 0 too."""
    if layout == "padded":
        positions = torch.arange(shape[1]).repeat(shape[0])
    else:
        # Padding gets no position beyond those of documents: some rotary tables depend on the row's largest position.
        highest, used = max([2, *read]), sum(read)
        positions = torch.cat([torch.zeros(used, dtype=torch.int64), torch.arange(shape[1] - used) % highest])
    positions[places.row_K] = places.token_K
    if any(document.positions is not None and document.positions.ndim == 2 for document in documents):
        positions = positions.repeat(3, 1)  # in time, height and width; equal for text
    for start, count, document in zip(starts, read, documents, strict=True):
        if document.positions is not None:
            positions[..., start : start + count] = document.positions[..., :count]
    return positions.view(*positions.shape[:-1], *shape)


def shift_labels(documents: Sequence[Document], starts: Sequence[int], every_token: bool) -> dict[str, Any]:
    """Shift labels within each document: position t predicts token t + 1, and the last position predicts nothing."""
    places = _TokenIndex.of_documents(starts, [len(d) for d in documents])
    weights = _joined([d.weights for d in documents], torch.float32)
    predicted = places.token_K > 0
    chosen = (predicted if every_token else predicted & (weights != 0)).nonzero().flatten()
    arrays = {name: torch.cat([d.arrays[name] for d in documents])[chosen] for name in _array_names(documents)}
    return {
        "selected_N": places.row_K[chosen] - 1,
        "targets_N": _joined([d.tokens for d in documents], torch.int64)[chosen],
        "weights_N": weights[chosen],
        "document_N": places.document_K[chosen],
        "token_N": places.token_K[chosen],
        "arrays": arrays if documents else _no_arrays(weights),
    }


def _array_names(documents: Sequence[Document]) -> list[str]:
    return list(documents[0].arrays) if documents else []


def _no_arrays(like: Tensor) -> dict[str, Tensor]:
    """The arrays of a row without documents: objectives read them, but this rank does not know their names."""
    return defaultdict(lambda: torch.zeros(0, device=like.device))
