"""Checks tokenised documents, and truncates or drops too long ones. Error messages name file and line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from weft.config.schema import DataConfig
from weft.data.blocks import with_skip_advice
from weft.data.table import Array, BadRow, Digest, TokenTable
from weft.errors import UserError

LongDocuments = Literal["error", "truncate", "drop"]


@dataclass(frozen=True)
class TableSelection:
    """The trained documents of a table, after truncation and dropping. source: name of the source, "" without
    data.sources. kept: their indices in the table. lengths: tokens of each after truncation. dropped: number of
    documents dropped as too long. bad: (row number, error) of omitted rows."""

    table: TokenTable
    source: str
    indices: Array
    lengths: Array
    dropped: int = 0
    bad: Sequence[BadRow] = ()

    @property
    def truncated(self) -> int:
        return int((self.lengths < self.table.lengths[self.indices]).sum())

    @cached_property
    def losses(self) -> Array:
        """Trained tokens of each document. The first token of a document does not count, because it is never
        predicted."""
        losses = self.table.losses[self.indices].astype(np.int64)
        for index in np.flatnonzero(self.lengths < self.table.lengths[self.indices]):
            losses[index] = self.table.losses_of(int(self.indices[index]), int(self.lengths[index]))
        return losses

    @cached_property
    def example_ends(self) -> Array:
        """[examples] the number of documents up to the end of each example: a document, or a pair of preferences."""
        return example_ends(self.table, self.indices)

    def only(self, chosen: Array) -> TableSelection:
        """The selection reduced to the examples where the mask `chosen` is true."""
        documents = np.repeat(chosen, np.diff(self.example_ends, prepend=0))
        return replace(self, indices=self.indices[documents], lengths=self.lengths[documents])

    def digest(self) -> str:
        """Digest of the documents after truncation and dropping."""
        if len(self.indices) == len(self.table) and not self.truncated:
            return self.table.digest
        digest = Digest()
        for index, length in zip(self.indices, self.lengths, strict=True):
            digest.update(*self.table.tokens(int(index), int(length)), np.array([length]))
            entry = slice(int(index), int(index) + 1)
            top_ids, top_logprobs = (values.ravel() for values in self.table.lists(int(index), int(length)))
            digest.update_taught(self.table.teachers[entry], self.table.widths[entry], top_ids, top_logprobs)
            digest.update_images(*self.table.media_of(int(index)))
        digest.update_answers(self.table.roles[self.indices], self.table.margins[self.indices])
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Limits:
    """max_length: longest document in tokens, set by the config key `key`. long: as data.long_documents. vocab_size: if
    given, token ids must be below it. drop_untrained: drop documents without a trained token, instead of raising an
    error."""

    max_length: int
    key: str = "data.max_length"
    long: LongDocuments = "error"
    vocab_size: int | None = None
    drop_untrained: bool = False

    def check(self, tables: Sequence[TokenTable]) -> None:
        """Raises UserError at the first document that cannot be trained."""
        for table in tables:
            _check_ids(table, self.vocab_size)
        if not self.drop_untrained:
            check_trained(tables)
        if self.long == "error":
            self._refuse_long(tables)
        elif self.long == "truncate":
            self._check_truncated(tables)
        elif all((table.lengths > self.max_length).all() for table in tables):
            count = sum(len(table) for table in tables)
            raise UserError(
                f"{tables[0].origin}: data.long_documents: drop leaves no document: all {count} are longer than "
                f"{self.max_length} tokens ({self.key}). Raise {self.key}, or set data.long_documents: truncate."
            )
        for table in () if self.drop_untrained else tables:
            if len(equal := self._equal_pairs(table)):
                raise with_skip_advice(UserError(self._equal(table, int(equal[0]), len(equal))))

    def _equal_pairs(self, table: TokenTable) -> Array:
        """The first document of each pair whose answers have the same tokens after truncation."""
        starts, sizes = _example_starts(table) if table.roles.any() else (np.zeros(0, np.int64), np.zeros(0, np.int64))
        starts = starts[sizes == 2]
        lengths = np.minimum(table.lengths, self.max_length)
        equal_pairs = [
            int(index)
            for index in starts[lengths[starts] == lengths[starts + 1]]
            if all(
                np.array_equal(chosen, rejected)
                for chosen, rejected in zip(
                    *(table.tokens(int(index) + n, int(lengths[index])) for n in (0, 1)), strict=True
                )
            )
        ]
        return np.array(equal_pairs, np.int64)

    def _equal(self, table: TokenTable, index: int, count: int = 1) -> str:
        more = f" {count - 1:,} more rows have this error." if count > 1 else ""
        if table.lengths[index] > self.max_length:
            return (
                f"{table.row_name(index)}: both answers are equal after truncation to {self.max_length} tokens "
                f"({self.key}).{more} Raise {self.key}, or set data.long_documents: drop."
            )
        return f"{table.row_name(index)}: both answers have the same tokens: there is nothing to prefer.{more}"

    def select(self, table: TokenTable, source: str) -> TableSelection:
        """Selects the documents of a table to train."""
        good = table.losses > 0 if self.drop_untrained else np.ones(len(table), bool)
        equal = self._equal_pairs(table) if self.drop_untrained else np.zeros(0, np.int64)
        good[equal] = False
        short = table.lengths <= self.max_length if self.long == "drop" else np.ones(len(table), bool)
        if table.roles.any():  # drop both answers of a pair
            starts, sizes = _example_starts(table)
            good, short = (np.repeat(np.logical_and.reduceat(mask, starts), sizes) for mask in (good, short))
        selected = np.flatnonzero(good & short)
        dropped = int((good & ~short).sum())
        bad = sorted([*bad_rows(table), *((int(table.numbers[i]), self._equal(table, int(i))) for i in equal)])
        return TableSelection(
            table, source, selected, np.minimum(table.lengths[selected], self.max_length), dropped, bad
        )

    def _refuse_long(self, tables: Sequence[TokenTable]) -> None:
        count = sum(int((table.lengths > self.max_length).sum()) for table in tables)
        if not count:
            return
        table = max(tables, key=_longest)
        length, total = _longest(table), sum(len(table) for table in tables)
        if self.key == "step.max_tokens_per_device":
            fix = f"Set step.max_tokens_per_device to at least {length} if memory allows"
        elif self.key == _OVER_CP:
            fix = f"Raise step.max_tokens_per_device or mesh.cp until their product is at least {length}"
        else:
            fix = f"Set {self.key} to at least {length} (step.max_tokens_per_device must be as large)"
        raise UserError(
            f"{table.row_name(int(table.lengths.argmax()))}: {count:,} of {total:,} documents are longer than "
            f"{self.max_length} tokens ({self.key}). The longest is this one, with {length}. {fix}, or set "
            "data.long_documents to truncate or drop."
        )

    def _check_truncated(self, tables: Sequence[TokenTable]) -> None:
        self._check_images(tables)
        empty = [
            (table, int(index))
            for table in tables
            for index in np.flatnonzero(table.lengths > self.max_length)
            if table.losses[index] and not table.losses_of(int(index), self.max_length)
        ]
        if empty:
            table, index = empty[0]
            raise UserError(
                f"{table.row_name(index)}: no trained token is left after truncation to {self.max_length} tokens "
                f"({len(empty):,} such documents). Raise {self.key}, or set data.long_documents: drop."
            )

    def _check_images(self, tables: Sequence[TokenTable]) -> None:
        """Raises UserError if truncation would remove tokens of an image."""
        cut = [(table, int(index)) for table in tables for index in np.flatnonzero(table.reaches > self.max_length)]
        if cut:
            table, index = cut[0]
            raise UserError(
                f"{table.row_name(index)}: truncation to {self.max_length} tokens ({self.key}) would cut its images, "
                f"which end at token {int(table.reaches[index])} ({len(cut):,} such documents). Raise {self.key}, make "
                "images smaller (data.image_pixels), or set data.long_documents: drop."
            )


def joined_example_ends(selections: Sequence[TableSelection]) -> Array:
    """[examples of all selections] TableSelection.example_ends, over the concatenated documents of all selections."""
    begins = np.cumsum([0, *(len(selection.indices) for selection in selections)])[:-1]
    ends: Array = np.concatenate(
        [begin + selection.example_ends for begin, selection in zip(begins, selections, strict=True)]
    )
    return ends


def example_ends(table: TokenTable, indices: Array) -> Array:
    """[examples] number of these documents up to the end of each example (the documents of a row of preferences)."""
    if not table.roles.any():
        return np.arange(1, len(indices) + 1)
    numbers = table.numbers[indices]
    return np.flatnonzero(np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)]) + 1


def _example_starts(table: TokenTable) -> tuple[Array, Array]:
    """(First document of each example of a table, its documents)."""
    sizes = np.diff(example_ends(table, np.arange(len(table))), prepend=0)
    return np.cumsum(sizes) - sizes, sizes


_OVER_CP = "step.max_tokens_per_device x mesh.cp"


def length_limit(data: DataConfig, budget: int, ranks: int = 1) -> tuple[int, str]:
    """(longest document in tokens, the config key that sets it). budget: step.max_tokens_per_device. ranks: the size of
    mesh.cp, over which a document may be split."""
    if data.max_length is None:
        return budget * ranks, "step.max_tokens_per_device" if ranks == 1 else _OVER_CP
    return min(data.max_length, budget * ranks), "data.max_length"


def _longest(table: TokenTable) -> int:
    return int(table.lengths.max(initial=0))


def _check_ids(table: TokenTable, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    if table.widths.any() and (listed := int(table.top_ids.max(initial=0))) >= vocab_size:
        lists = (table.lists(index, int(table.lengths[index]))[0] for index in range(len(table)))
        index = next(index for index, ids in enumerate(lists) if ids.max(initial=0) >= vocab_size)
        raise UserError(
            f"{table.row_name(index)}: `teacher_top_ids` has id {listed}, but the model's vocabulary has {vocab_size} "
            f"(ids 0 to {vocab_size - 1}): the teacher has another tokenizer."
        )
    if table.largest < vocab_size:
        return
    index = table.first_with(vocab_size)
    token = int(table.tokens(index, int(table.lengths[index]))[0].max())
    giver = "it has" if table.format(index) == "input_ids" else "the tokenizer gives"
    raise UserError(
        f"{table.row_name(index)}: {giver} id {token}, but the model's vocabulary has {vocab_size} (ids 0 to "
        f"{vocab_size - 1}). Tokenizer and model of model.path do not match. Use the model's tokenizer, or resize the "
        "model's embeddings."
    )


def check_trained(tables: Sequence[TokenTable]) -> None:
    """Raises UserError if a document has no trained token. Its first token does not count, because it is never
    predicted."""
    empty = [(table, int(index)) for table in tables for index in np.flatnonzero(table.losses == 0)]
    if not empty:
        return
    (table, index), (last, last_index) = empty[0], empty[-1]
    more_text = (
        f" {len(empty) - 1:,} more rows have this error, the last at {last.row_name(last_index)}."
        if len(empty) > 1
        else ""
    )
    raise with_skip_advice(UserError(_untrained(table, index, more_text)))


def bad_rows(table: TokenTable) -> list[BadRow]:
    """(row number, error) of the rows without a valid document or without a trained token, in order."""
    empty = (int(index) for index in np.flatnonzero(table.losses == 0))
    return sorted([*table.bad, *((int(table.numbers[index]), _untrained(table, index)) for index in empty)])


def _untrained(table: TokenTable, index: int, more_text: str = "") -> str:
    if table.format(index) in ("text", "input_ids"):
        advice = "Write more text" if table.format(index) == "text" else "Add a label other than -100"
    else:
        advice = "Add a message of the assistant without `train: false`, or a completion"
    return f"{table.row_name(index)}: no token of this document is trained.{more_text} {advice}, or remove it."
