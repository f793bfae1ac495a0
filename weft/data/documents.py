"""Reads sources into Documents, which are built by index on access, and reports statistics of the data."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from weft.config.distill_schema import TOP_IDS, TOP_LOGPROBS
from weft.config.schema import DataConfig
from weft.data.encode import Encoding, has_template
from weft.data.image_files import opening_pool
from weft.data.images import Images
from weft.data.limits import Limits, LongDocuments, TableSelection, joined_example_ends
from weft.data.limits import bad_rows as bad_rows_of
from weft.data.order import SourceShare, permutation
from weft.data.records import ALL_KINDS, NEEDED, ROLES, ParseOptions, template_use
from weft.data.sources import Data, DataSource, open_data
from weft.data.table import Array, Digest, TokenTable
from weft.data.tokenise import TokeniseOptions, TokeniseTask, tokenise
from weft.engine.batch.document import Document, MeasuredDocuments, Measures
from weft.engine.batch.media import Media
from weft.engine.batch.prefixes import Beginning, pair_beginning
from weft.errors import UserError


@dataclass(frozen=True, slots=True)
class DataReport:
    """Statistics of the data.

    path: the label of the source, or "N sources". tokens: all tokens; loss_tokens: trained tokens. longest: tokens of
    the longest document after truncation. digest: hexadecimal, of all tokens and loss masks in order, and of the
    weights of several sources. dropped, truncated: numbers of documents that were too long. formats: (format,
    documents). in_epoch: documents of an epoch. sources: with data.sources, a report for each. bad: (source, error) of
    each omitted row. unit: the unit of `documents` and in_epoch: documents, or pairs or answers of preferences.
    """

    path: str
    documents: int
    tokens: int
    loss_tokens: int
    longest: int
    digest: str
    dropped: int = 0
    truncated: int = 0
    formats: tuple[tuple[str, int], ...] = ()
    in_epoch: int | None = None
    sources: tuple[DataReport, ...] = ()
    bad: tuple[tuple[str, str], ...] = ()
    unit: str = "documents"

    def __str__(self) -> str:
        formats = ", ".join(name if len(self.formats) == 1 else f"{count:,} {name}" for name, count in self.formats)
        text = (
            f"{self.path}: {self.documents:,} {self.unit}{f' ({formats})' * bool(formats)}, {self.tokens:,} tokens, of "
            f"which {self.loss_tokens:,} trained; the longest has {self.longest:,}"
        )
        for count, verb in ((self.dropped, "dropped"), (self.truncated, "truncated")):
            text += f"; {count:,} longer documents {verb}" if count else ""
        text += f"; {len(self.bad):,} bad rows omitted" if self.bad else ""
        if self.in_epoch not in (None, self.documents):
            text += f"; an epoch takes {self.in_epoch:,} {self.unit}"
        return "\n".join([text, *(f"         {source}" for source in self.sources)])

    def template_use(self, data: DataConfig, template: bool) -> str:
        """Same as the function template_use."""
        return template_use(dict(self.formats), data, template, has_roles=self.unit != "documents")


_NEVER = np.iinfo(np.int64).max


class Documents(MeasuredDocuments):
    """Documents, built from flat arrays on access. shares: their sources in order, from which the order of training is
    drawn."""

    def __init__(
        self,
        selections: Sequence[TableSelection],
        shares: Sequence[SourceShare],
        loaded: Sequence[_SourceDocuments] = (),
        tail: float | None = None,
    ) -> None:
        """tail: the loss weight of an answer's tokens beyond the length of the shorter answer of its pair."""
        self._selections, self.shares, self.loaded, self.tail = selections, shares, loaded, tail
        self._ends = np.cumsum([len(selection.indices) for selection in selections])
        self.example_ends = joined_example_ends(selections)
        sizes = np.diff(self.example_ends, prepend=0)
        grouped = len(sizes) < len(self)
        self._groups: Sequence[int | None] = (
            np.repeat(np.arange(len(sizes)), sizes).tolist() if grouped else [None] * len(self)
        )
        # [documents], as in Chunk
        self.roles: Array = np.concatenate([selection.table.roles[selection.indices] for selection in selections])
        self.margins: Array = np.concatenate([selection.table.margins[selection.indices] for selection in selections])
        self.commons: Array = np.concatenate([selection.table.commons[selection.indices] for selection in selections])
        self.reaches: Array = np.concatenate([selection.table.reaches[selection.indices] for selection in selections])
        # [documents] index of the document's teacher in distill.teachers
        self.teachers: Array = np.concatenate([selection.table.teachers[selection.indices] for selection in selections])
        self.widths: Array = np.concatenate([selection.table.widths[selection.indices] for selection in selections])
        lengths = np.concatenate([selection.lengths for selection in selections]).astype(np.int64)
        losses: Array = np.concatenate([selection.losses for selection in selections])
        self.trained: Array = losses  # [documents] trained tokens except the first token, which is never predicted
        self._cut = np.full(len(losses), _NEVER) if tail is None else _shorter(self.roles, losses)
        self._tail = np.float32(1.0 if tail is None else tail)
        beyond = np.maximum(losses - self._cut, 0)
        weights = losses - beyond + beyond * np.float64(self._tail)  # a trained token weighs 1
        if not self._tail:
            losses = losses - beyond
        patches: Array = np.concatenate([selection.table.patches[selection.indices] for selection in selections])
        pairs: Array = np.concatenate([selection.table.pairs[selection.indices] for selection in selections])
        videos: Array = np.concatenate([selection.table.videos[selection.indices] > 0 for selection in selections])
        self._measures = Measures(lengths, weights, losses, np.zeros(len(losses), bool), patches, pairs, videos)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def measures(self) -> Measures:
        return self._measures

    def groups(self) -> Sequence[int | None]:
        """The pair of each document."""
        return self._groups

    def beginnings(self, indices: Sequence[int], placeholders: Sequence[int] = ()) -> dict[int, Beginning]:
        """The beginnings of pairs with both answers among the documents, from the table's metadata."""
        lengths, pairs, beginnings = self._measures.length, defaultdict[int | None, list[int]](list), {}
        for index in indices:
            pairs[self._groups[index]].append(index)
        for pair, members in pairs.items():
            if pair is None or len(members) != 2:
                continue
            first, second = int(lengths[members[0]]), int(lengths[members[1]])
            common = min(int(self.commons[members[0]]), first, second)
            for answer, index in enumerate(members if common else ()):
                beginnings[index] = pair_beginning(pair, common, (first, second), answer, int(self.reaches[index]))
        return beginnings

    def source(self, index: int) -> str:
        selection, row = self._locate(index)
        return selection.table.row_name(int(selection.indices[row]))

    def dataset(self, index: int) -> str:
        return self._locate(index)[0].source

    def build(self, index: int) -> Document:
        selection, row = self._locate(index)
        index_in_table = int(selection.indices[row])
        ids, trained = selection.table.tokens(index_in_table, int(selection.lengths[row]))
        weights = trained.astype(np.float32)
        if self._cut[index] < self.trained[index]:
            weights[weights.cumsum() - weights[0] > self._cut[index]] *= self._tail
        return Document(
            tokens=torch.from_numpy(ids.astype(np.int64)),
            weights=torch.from_numpy(weights),
            group=self._groups[index],
            source=selection.table.row_name(index_in_table),
            dataset=selection.source,
            media=_media(selection.table, index_in_table),
            arrays=_lists(selection.table, index_in_table, len(ids)),
        )

    def take(self, indices: Sequence[int]) -> dict[int, Document]:
        """Builds the documents; if any has images, several in parallel, because building decodes and processes
        images."""
        if not self._measures.patches.any():
            return super().take(indices)
        with opening_pool() as pool:
            return dict(zip(indices, pool.map(self.build, indices), strict=True))

    def probes(self) -> Array:
        """A hash for each document, from its length and five of its tokens. Equal documents have equal hashes;
        different documents rarely do. The other tokens are not read."""
        probes = [np.empty(0, np.uint64)]
        for selection in self._selections:
            table, lengths = selection.table, selection.table.lengths[selection.indices].astype(np.int64)
            begins, numbers = table.ends[selection.indices] - lengths, lengths.astype(np.uint64)
            for quarter in range(5):
                tokens = table.ids[begins + (lengths - 1) * quarter // 4]
                numbers = numbers * np.uint64(1_000_003) + tokens.astype(np.uint64)
            probes.append(numbers)
        return np.concatenate(probes)

    def content(self, index: int) -> bytes:
        """A digest of a document's tokens before truncation, and of the sizes of its images."""
        selection, row = self._locate(index)
        index_in_table, digest = int(selection.indices[row]), Digest()
        ids, trained = selection.table.tokens(index_in_table, int(selection.table.lengths[index_in_table]))
        digest.update(ids, np.zeros_like(trained), np.array([len(ids)]))
        digest.update_images(*selection.table.media_of(index_in_table))
        return digest.hexdigest().encode()

    def _locate(self, index: int) -> tuple[TableSelection, int]:
        """(the selection that holds document `index`, its row in the selection)."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        selection = self._selections[number]
        return selection, index - int(self._ends[number]) + len(selection.indices)


def _lists(table: TokenTable, index: int, length: int) -> dict[str, torch.Tensor]:
    """A teacher's predictions for a document, as arrays; empty if its row has no lists."""
    if not table.widths[index]:
        return {}
    return {
        name: torch.from_numpy(x.copy())
        for name, x in zip((TOP_IDS, TOP_LOGPROBS), table.lists(index, length), strict=True)
    }


def _media(table: TokenTable, index: int) -> Media | None:
    """The decoded and processed images of a document. Raises UserError if an image has changed since the data were
    read."""
    places = table.places(index)
    if not places:
        return None
    assert table.inputs is not None
    location, patches = table.row_name(index), int(table.patches[index])
    inputs, count = table.inputs(location, places)
    assert count == patches, f"{location}: its images have {count} patches instead of {patches}"
    return Media(inputs, patches, int(table.pairs[index]))


def _shorter(roles: Array, trained: Array) -> Array:
    """[documents] trained tokens of the shorter answer of each document's pair."""
    chosen = np.flatnonzero(roles == ROLES.index("chosen"))
    shorter = np.full(len(roles), _NEVER)
    shorter[chosen] = shorter[chosen + 1] = np.minimum(trained[chosen], trained[chosen + 1])
    return shorter


def lengths_of(documents: Sequence[Document]) -> list[int]:
    """Number of tokens of each document; MeasuredDocuments are not built for it."""
    if isinstance(documents, MeasuredDocuments):
        lengths: list[int] = documents.measures().length.tolist()
        return lengths
    return [len(document) for document in documents]


def require_pairs(documents: Documents, consequence: str) -> None:
    """Raises UserError if a document is an answer with a label, which has no pair. consequence: the end of the
    message."""
    labelled = np.flatnonzero(documents.roles >= ROLES.index("desired"))
    if len(labelled):
        raise UserError(f"{documents.source(int(labelled[0]))}: is an answer with a label, and {consequence}")


def example_ends_of(documents: Sequence[Document]) -> NDArray[np.int64] | None:
    """[examples] the number of documents up to the end of each example; None where each document is one."""
    if isinstance(documents, Documents) and documents.roles.any():
        return documents.example_ends
    return None


def shares_of(documents: Sequence[Document]) -> Sequence[SourceShare] | None:
    """The sources of the documents; None if unknown."""
    return documents.shares if isinstance(documents, Documents) else None


def load_documents(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    long_documents: LongDocuments = "error",
    max_length_key: str = "data.max_length",
    vocab_size: int | None = None,
    encoding: Encoding | None = None,
    bad_rows: Literal["error", "drop"] = "error",
    images: Images | None = None,
    how: TokeniseOptions | None = None,
    rows: ParseOptions | None = None,
    tail: float | None = None,
) -> tuple[Documents, DataReport]:
    """Reads, checks and tokenises data. docs/reference/data.md lists the accepted forms.

    By default, the trained tokens are: the answers of a conversation and the tokens that end them; the completion of a
    prompt and the end-of-text token; all tokens of a `text`. `encoding` can change this. weights[i] of a document is
    1.0 if token i is trained as a target, else 0.0. Documents keep the order of their sources.

    max_length: longest document in tokens. max_length_key: the config key that set it, for messages. long_documents:
    whether longer documents are an error, truncated, or dropped. vocab_size: if given, token ids must be below it.
    encoding: the trained tokens and the chat template. bad_rows: whether an invalid row is an error or dropped. images:
    the image reader of a vision model. how: processes and cache; by default one process, no cache. rows: whether rows
    are preferences, or have labels. tail: as in Documents.

    Raises UserError, with file and line, for every error that the user must fix in the data.
    """
    sources, drop = open_data(data), bad_rows == "drop"
    chat = has_template(tokenizer, encoding)
    jobs = [
        (part, TokeniseTask(tokenizer, encoding, source.parse_options(chat, rows), drop, images))
        for source in sources
        for part in source.parts
    ]
    results = iter(tokenise(jobs, how or TokeniseOptions()))
    tables = [[next(results) for _ in source.parts] for source in sources]
    for source, source_tables in zip(sources, tables, strict=True):
        _check_not_empty(source, source_tables, drop)
    limits = Limits(max_length, max_length_key, long_documents, vocab_size, drop_untrained=drop)
    limits.check([table for source_tables in tables for table in source_tables])
    loaded = [
        _SourceDocuments(source, [limits.select(table, source.name) for table in source_tables])
        for source, source_tables in zip(sources, tables, strict=True)
    ]
    return _join(loaded, tail)


def hold_out(
    documents: Documents, fraction: float, seed: int
) -> tuple[tuple[Documents, DataReport], tuple[Documents, DataReport]]:
    """Splits documents into (training, held-out), each with its report; both keep their order.

    fraction: the fraction of each source to hold out, rounded to at least one document, drawn from the seed. Raises
    UserError if a source would have no training document left.
    """
    training, held_out = [], []
    for number, source in enumerate(documents.loaded):
        count = max(1, round(fraction * source.share.documents))
        if count >= source.share.documents:
            raise UserError(
                f"eval.share: {fraction:g} of {source.source.label}, which has {source.share.documents:,} documents, "
                "leaves none to train on. Lower eval.share, or set eval.path to held-out documents."
            )
        chosen = np.zeros(source.share.documents, bool)
        chosen[permutation(source.share.documents, f"{seed}:eval.share:{number}")[:count]] = True
        training.append(source.only(~chosen))
        held_out.append(source.only(chosen))
    held_out_documents, report = _join(held_out, documents.tail)
    return _join(training, documents.tail), (held_out_documents, replace(report, dropped=0, bad=()))


def find_leaks(held_out: Documents, training: Documents) -> list[tuple[str, str]]:
    """Held-out documents that are also in the training data: (name of the held-out document, name of the first equal
    training document). Documents are equal if their tokens before truncation and the sizes of their images are equal.
    Names are file:line or file[row]."""
    held_out_probes, training_probes = held_out.probes(), training.probes()
    equal = {training.content(int(i)): int(i) for i in np.flatnonzero(np.isin(training_probes, held_out_probes))[::-1]}
    pairs = (
        (int(i), equal.get(held_out.content(int(i)))) for i in np.flatnonzero(np.isin(held_out_probes, training_probes))
    )
    return [(held_out.source(i), training.source(equal_index)) for i, equal_index in pairs if equal_index is not None]


def leak_hint(name: str, equal: Sequence[tuple[str, str]], held_out: int, noun: str) -> list[str]:
    """A line about held-out data that are also trained on. name: of the source, "" for eval.path and eval.share. equal:
    (held-out row, equal row of the training data). held_out: number of held-out rows. noun: their plural."""
    if not equal:
        return []
    held_out_row, training_row = equal[0]
    return [
        f"hint     {name + ': ' if name else ''}{len(equal):,} of the {held_out:,} held-out {noun} are also in the "
        f"training data, so the evaluation tells less about new data. For example, {held_out_row} equals "
        f"{training_row}. Remove these documents from one of the two"
    ]


def _check_not_empty(source: DataSource, tables: Sequence[TokenTable], drop: bool) -> None:
    bad = [row for table in tables for row in bad_rows_of(table)] if drop else []
    if bad and not any((table.losses > 0).any() for table in tables):
        raise UserError(
            f"data.bad_rows: drop leaves no document of {source.label}: all {len(bad):,} rows are bad. The first: "
            f"{bad[0][1]}"
        )
    if not any(len(table) for table in tables):
        raise UserError(
            f"{source.parts[0].origin}: contains no documents. data.path must name data with {NEEDED} in each row."
        )


@dataclass(frozen=True)
class _SourceDocuments:
    source: DataSource
    selections: list[TableSelection]

    @property
    def share(self) -> SourceShare:
        return SourceShare(sum(len(selection.example_ends) for selection in self.selections), self.source.weight)

    @property
    def bad(self) -> tuple[tuple[str, str], ...]:
        return tuple((self.source.label, text) for selection in self.selections for _, text in selection.bad)

    def only(self, chosen: Array) -> _SourceDocuments:
        """The source reduced to the examples where the mask `chosen` is true."""
        ends = np.cumsum([len(selection.example_ends) for selection in self.selections])
        masks = np.split(chosen, ends[:-1])
        return _SourceDocuments(
            self.source, [selection.only(mask) for selection, mask in zip(self.selections, masks, strict=True)]
        )

    def report(self) -> DataReport:
        counts = np.bincount(
            np.concatenate([selection.table.formats[selection.indices] for selection in self.selections])
        )
        digests = [selection.digest() for selection in self.selections]
        return DataReport(
            path=self.source.label,
            documents=self.share.documents,
            tokens=sum(int(selection.lengths.sum()) for selection in self.selections),
            loss_tokens=sum(int(selection.losses.sum()) for selection in self.selections),
            longest=max(int(selection.lengths.max(initial=0)) for selection in self.selections),
            digest=digests[0] if len(digests) == 1 else _digest(digests),
            dropped=sum(selection.dropped for selection in self.selections),
            truncated=sum(selection.truncated for selection in self.selections),
            formats=tuple((name, int(count)) for name, count in zip(ALL_KINDS, counts, strict=False) if count),
            in_epoch=self.share.in_epoch,
            bad=self.bad,
            unit=unit_of([selection.table.roles[selection.indices] for selection in self.selections]),
        )


def unit_of(roles: Sequence[Array]) -> str:
    """The unit in which a step counts documents with these roles: documents, or pairs or answers of preferences."""
    present = {ROLES[int(role)] for of_table in roles for role in np.unique(of_table)} - {""}
    paired = {"chosen", "rejected"}
    return "documents" if not present else "pairs" if present <= paired else "rows" if present & paired else "answers"


def _join(loaded: Sequence[_SourceDocuments], tail: float | None = None) -> tuple[Documents, DataReport]:
    emptied = [source.source.label for source in loaded if not source.share.documents]
    if emptied:
        raise UserError(
            f"data.sources: data.long_documents: drop leaves no document of {emptied[0]}. Remove the source, raise "
            "data.max_length, or set data.long_documents: truncate."
        )
    selections = [selection for source in loaded for selection in source.selections]
    documents = Documents(selections, [source.share for source in loaded], loaded, tail)
    reports = [source.report() for source in loaded]
    if not loaded[0].source.name:
        return documents, reports[0]
    formats = {name: sum(dict(report.formats).get(name, 0) for report in reports) for name in ALL_KINDS}
    weights = [f"{source.source.weight:.17g}" for source in loaded]
    total = DataReport(
        path=f"{len(reports)} sources",
        documents=sum(report.documents for report in reports),
        tokens=sum(report.tokens for report in reports),
        loss_tokens=sum(report.loss_tokens for report in reports),
        longest=max(report.longest for report in reports),
        digest=_digest([*(report.digest for report in reports), *weights]),
        dropped=sum(report.dropped for report in reports),
        truncated=sum(report.truncated for report in reports),
        formats=tuple((name, count) for name, count in formats.items() if count),
        in_epoch=sum(source.share.in_epoch for source in loaded),
        sources=tuple(reports),
        bad=tuple(row for report in reports for row in report.bad),
        unit=reports[0].unit if len({report.unit for report in reports}) == 1 else "rows",
    )
    return documents, total


def _digest(parts: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
