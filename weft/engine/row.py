"""Documents laid out for one forward of one rank, with every label fixed before they are joined.

B batch, T tokens of the row, N predictions that somebody needs. Prediction i reads position selected[i] and is about
targets[i], the next token of the same document; weights and arrays are those of that target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from weft.engine.document import Document
from weft.ops.attention import Bounds

Layout = Literal["packed", "apart"]


@dataclass(frozen=True)
class Row:
    """documents: the step's indices of the documents in it, in order. document_N: place of each prediction's document
    in that list. token_N: the target's place in its document. owner_M: of every token of the flattened row, the place
    of its document; -1 for padding; None where nobody asked. routes: [tokens of the flattened row, layers, k], -1 where
    there are none; None where no document has any. real_tokens: without padding."""

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


def build_row(
    indices: Sequence[int],
    documents: Mapping[int, Document],
    *,
    length: int,
    layout: Layout,
    every_token: bool,
    device: torch.device,
    owners: bool = False,
) -> Row:
    """Lay out documents for one forward.

    length: T of the row, padding included. every_token: predict all tokens, not only those with a weight. owners: fill
    owner_M. A row without documents holds one of padding, so that every rank runs the same collectives.
    """
    chosen = [documents[index] for index in indices]
    starts = _starts(chosen, length, layout)
    lengths = [len(d) for d in chosen]
    if layout == "packed":
        tail = length - sum(lengths)
        assert tail >= 0, f"documents of {sum(lengths)} tokens in a row of {length}"
        all_lengths = tuple(lengths) + ((tail,) if tail else ())
        shape, bounds = (1, length), Bounds.packed(all_lengths, device)
    else:
        shape = (max(1, len(chosen)), length)
        bounds = Bounds((length,) * shape[0], apart=True)
    ids = torch.zeros(shape[0] * length, dtype=torch.int64)
    for start, document in zip(starts, chosen, strict=True):
        ids[start : start + len(document)] = document.tokens
    positions = _positions(chosen, starts, shape, layout)
    return Row(
        documents=tuple(indices),
        input_ids_BT=_to(ids.view(shape), device),
        position_ids_BT=_to(positions, device),
        bounds=bounds,
        owner_M=_to(_owners(starts, lengths, ids.numel()), device) if owners else None,
        routes=_routes(chosen, starts, ids.numel(), device),
        real_tokens=sum(lengths),
        **_predictions(chosen, starts, every_token, device),
    )


def _owners(starts: Sequence[int], lengths: Sequence[int], tokens: int) -> Tensor:
    owner = torch.full((tokens,), -1)
    for place, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        owner[start : start + length] = place
    return owner


def _routes(documents: Sequence[Document], starts: Sequence[int], tokens: int, device: torch.device) -> Tensor | None:
    shapes = [document.routes.shape[1:] for document in documents if document.routes is not None]
    if not shapes:
        return None
    routes = torch.full((tokens, *shapes[0]), -1, dtype=torch.int16)
    for start, document in zip(starts, documents, strict=True):
        if document.routes is not None:
            routes[start : start + len(document)] = document.routes
    return _to(routes, device)


def _starts(documents: Sequence[Document], length: int, layout: Layout) -> list[int]:
    """Where each document begins in the flattened row."""
    if layout == "apart":
        return [place * length for place in range(len(documents))]
    starts, at = [], 0
    for document in documents:
        starts.append(at)
        at += len(document)
    return starts


def _positions(documents: Sequence[Document], starts: Sequence[int], shape: tuple[int, int], layout: Layout) -> Tensor:
    """Positions that restart with every document; padding counts from 0 too."""
    if layout == "apart":
        positions = torch.arange(shape[1]).repeat(shape[0])
    else:
        used = sum(len(d) for d in documents)
        # Padding never reaches a position that no document has: some rotary tables depend on the longest of the row.
        highest = max([2, *(len(d) for d in documents)])
        positions = torch.cat([torch.zeros(used, dtype=torch.int64), torch.arange(shape[1] - used) % highest])
    for start, document in zip(starts, documents, strict=True):
        own = torch.arange(len(document)) if document.positions is None else document.positions
        positions[start : start + len(document)] = own
    return positions.view(shape)


def _predictions(
    documents: Sequence[Document], starts: Sequence[int], every_token: bool, device: torch.device
) -> dict[str, Any]:
    """Shift within each document: position t predicts token t + 1, and the last position nothing."""
    columns: dict[str, list[Tensor]] = {
        n: [] for n in ("selected_N", "targets_N", "weights_N", "document_N", "token_N")
    }
    arrays: dict[str, list[Tensor]] = {name: [] for name in documents[0].arrays} if documents else {}
    for place, (start, document) in enumerate(zip(starts, documents, strict=True)):
        weights = document.weights[1:]
        wanted = torch.arange(len(document) - 1) if every_token else weights.nonzero().flatten()
        columns["selected_N"].append(wanted + start)
        columns["targets_N"].append(document.tokens[1:][wanted])
        columns["weights_N"].append(weights[wanted].float())
        columns["document_N"].append(torch.full_like(wanted, place))
        columns["token_N"].append(wanted + 1)
        for name in arrays:
            arrays[name].append(document.arrays[name][1:][wanted])
    empty = {"weights_N": torch.zeros(0)}
    joined: dict[str, Any] = {
        name: _to(torch.cat(parts) if parts else empty.get(name, torch.zeros(0, dtype=torch.int64)), device)
        for name, parts in columns.items()
    }
    joined["arrays"] = {name: _to(torch.cat(parts), device) for name, parts in arrays.items()}
    if not documents:  # nobody here knows the arrays' names, and objectives ask for them all the same
        joined["arrays"] = defaultdict(lambda: torch.zeros(0, device=device))
    return joined


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
