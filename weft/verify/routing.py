"""Routes of mixture-of-experts models: recorded in the reference, and replayed in the engine. Differences are counted.

If two scores tie within rounding, the two runs may choose different experts, and all later results differ although
nothing is wrong. So the engine follows the reference's routes. If it would have chosen differently, the k-th and the
next score must be a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from weft.launch.process import world_group
from weft.models.low_rank import AdapterSwitch
from weft.models.routing import differ, replace_choices, replaced
from weft.ops.attention_call import Bounds

TIE = 1e-6  # largest gap of a tie, relative to the k-th score

Tokens = tuple[int, ...]
# (stage, tokens of a document) -> decoder layer -> chosen experts [T, k]; a stage is a state of the weights.
Routes = dict[tuple[int, Tokens], dict[int, Tensor]]


@dataclass
class Differences:
    """Counts of (token, layer) pairs. choices: all routed pairs. differing: pairs with other experts than the
    reference's. wrong: differing pairs that are not ties."""

    choices: int = 0
    differing: int = 0
    wrong: int = 0

    def summed(self) -> Differences:
        """The sums over all ranks, which have different documents. Collective."""
        group = world_group()
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (self.choices, self.differing, self.wrong), group=group)
        return Differences(*(sum(column) for column in zip(*gathered, strict=True)))


@dataclass
class _RowDocuments:
    """The documents of a forward, one entry per piece of the row. documents: tokens of the complete document; None for
    padding. counts: number of the document's tokens in the piece. firsts: index of the first of them. lengths: tokens
    of the piece, with padding."""

    documents: list[Tokens | None] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class Recorder:
    """Records the routes of a plain model that runs one document at a time. stage: the state of the weights, which the
    caller sets."""

    def __init__(self, experts: int, chosen: int, routes: Routes | None = None) -> None:
        """routes: recorded routes to follow."""
        self.experts, self.chosen, self.stage = experts, chosen, 0
        self.routes: Routes = {} if routes is None else routes

    @contextmanager
    def watching(self, model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, record every forward of a single document."""

        def keep(document: Tokens, layer: int, scores: Tensor, out: Any) -> Any:
            self.routes.setdefault((self.stage, document), {})[layer] = out[1].cpu()
            return out

        with self._visiting(model, layers, keep):
            yield

    @contextmanager
    def following(self, model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, every forward of a single document follows its recorded routes."""

        def follow(document: Tokens, layer: int, scores: Tensor, out: Any) -> Any:
            return replaced(scores, out, self.routes[self.stage, document][layer].to(scores.device))

        with self._visiting(model, layers, follow):
            yield

    @contextmanager
    def _visiting(
        self, model: nn.Module, layers: Sequence[nn.Module], visit: Callable[[Tokens, int, Tensor, Any], Any]
    ) -> Iterator[None]:
        """Inside, visit(document, layer, scores, result of topk) returns the choices for forwards of single
        documents."""
        state = _RowDocuments()

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            state.documents = [tuple(kwargs["input_ids"][0].tolist())] if len(kwargs["input_ids"]) == 1 else []

        def choose(layer: int, scores: Tensor, out: Any) -> Any:
            if not state.documents:
                return out
            assert state.documents[0] is not None
            return visit(state.documents[0], layer, scores, out)

        handle = model.register_forward_pre_hook(begin, with_kwargs=True)
        try:
            with replace_choices(layers, self.experts, self.chosen, choose):
                yield
        finally:
            handle.remove()


def _tokens_of(piece: tuple[int, ...], document: tuple[int, ...], first: int | None) -> int:
    """The number of a document's tokens at the beginning of a piece of a row: all, or all but the last, which a forward
    may omit; 0 if the piece is of another document. Padding may follow. first: for a part of a split document, the
    index of its first token."""
    if first is not None:
        return len(piece) if piece == document[first : first + len(piece)] else 0
    for read in (len(document), max(1, len(document) - 1)):
        if piece[:read] == document[:read]:
            return read
    return 0


def _parts(pieces: list[tuple[int, ...]], bounds: Any) -> list[list[tuple[tuple[int, ...], int | None]]]:
    """The pieces of a row, grouped by document, in order: (piece, index of its first token in a split document; None
    for a complete document)."""
    context = bounds.context
    if context is None:
        return [[(piece, None)] for piece in pieces]
    shared = [document for document, _, _ in context.ranges_by_rank[context.axis.rank]]
    parts: list[list[tuple[tuple[int, ...], int | None]]] = []
    for index, piece in enumerate(pieces):
        if index >= len(shared):
            parts.append([(piece, None)])
        elif index and shared[index] == shared[index - 1]:
            parts[-1].append((piece, bounds.firsts[index]))
        else:
            parts.append([(piece, bounds.firsts[index])])
    return parts


class Replay:
    """Makes a TrainModule follow recorded routes, and counts where it would have chosen differently."""

    def __init__(self, routes: Routes, experts: int, chosen: int) -> None:
        self.routes, self.experts, self.chosen, self.stage = routes, experts, chosen, 0
        self.differences = Differences()
        self._documents = sorted({tokens for _, tokens in routes}, key=len, reverse=True)

    @contextmanager
    def replaying(
        self, module: nn.Module, layers: Sequence[nn.Module], adapters: AdapterSwitch | None = None
    ) -> Iterator[None]:
        """Inside, every forward follows the routes, also in recomputation. A model without its adapters has other
        routes, and does not follow them."""
        state = _RowDocuments()

        def begin(module: nn.Module, args: Any) -> None:
            self._locate(state, args[0], args[2])

        def choose(layer: int, scores: Tensor, out: Any) -> Any:
            return self._steer(state, layer, scores, out) if adapters is None or adapters.on else out

        handle = module.register_forward_pre_hook(begin)
        try:
            with replace_choices(layers, self.experts, self.chosen, choose):
                yield
        finally:
            handle.remove()

    def _locate(self, state: _RowDocuments, input_ids_BT: Tensor, bounds: Any) -> None:
        """Set `state` to the known documents in a row, in the order of its tokens; None for padding."""
        rows = input_ids_BT.cpu()
        if bounds is None:  # the family's own attention code, with padded documents
            bounds = Bounds((rows.shape[1],) * len(rows), padded=True)
        if len(rows) == 1 and not bounds.padded:
            pieces = [tuple(piece.tolist()) for piece in rows[0].split(list(bounds.lengths))]
        else:
            pieces = [tuple(row.tolist()) for row in rows]
        state.lengths = [len(piece) for piece in pieces]
        state.documents, state.counts, state.firsts = [], [], []
        parts, segments = _parts(pieces, bounds), bounds.segments
        if segments is not None:  # documents that begin with a segment and its path all have the same routes there
            cut = 0 if bounds.context is None else len(bounds.context.ranges_by_rank[bounds.context.axis.rank])
            parts = [part for part in parts if part[0][1] is not None]
        for document_pieces in parts:
            document, counts = next(
                (
                    (k, h)
                    for k in self._documents
                    if all(h := [_tokens_of(piece, k, first) for piece, first in document_pieces])
                ),
                (None, [0] * len(document_pieces)),
            )
            state.documents += [document] * len(document_pieces)
            state.counts += counts
            state.firsts += [first or 0 for _, first in document_pieces]
        for segment in range(cut, len(pieces)) if segments is not None else ():
            path = tuple(rows[0][segments.path_tokens(segment)].tolist())
            state.documents.append(next((k for k in self._documents if k[: len(path)] == path), None))
            state.counts.append(segments.lengths[segment])
            state.firsts.append(segments.before[segment])

    def _steer(self, state: _RowDocuments, layer: int, scores: Tensor, out: Any) -> Any:
        indices, start = out[1].clone(), 0
        parts = zip(state.documents, state.counts, state.firsts, state.lengths, strict=True)
        for tokens, count, first, length in parts:
            recorded = self.routes.get((self.stage, tokens), {}).get(layer) if tokens is not None else None
            if recorded is not None:
                recorded = recorded[first : first + count]
                rows = slice(start, start + len(recorded))
                self._count(scores[rows].detach(), out[1][rows], recorded.to(indices.device))
                indices[rows] = recorded.to(indices.device)
            start += length
        assert start == len(scores), (start, scores.shape)
        return replaced(scores, out, indices)

    def _count(self, scores: Tensor, live: Tensor, recorded: Tensor) -> None:
        differing = differ(live, recorded)
        self.differences.choices += len(live)
        if not bool(differing.any()) or scores.shape[-1] <= self.chosen:
            return
        best = scores[differing].float().topk(self.chosen + 1, dim=-1)[0]
        gap = (best[:, -2] - best[:, -1]) / best[:, -2].abs().clamp_min(1e-30)
        self.differences.differing += int(differing.sum())
        self.differences.wrong += int((gap > TIE).sum())
