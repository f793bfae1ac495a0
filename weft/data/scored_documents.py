"""Documents of a reward model, which scores the last token or the last token of each step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.data.documents import Documents
from weft.data.table import Array
from weft.engine.batch.document import Document
from weft.engine.scores import scored_document, scored_length, with_end_mark


class ScoredDocuments(Documents):
    """Documents with an end mark, at whose prediction the last token is scored (engine/scores.py). array: the name of
    each document's number, `margin` or `label`."""

    def __init__(self, documents: Documents, pad: int | None, array: str) -> None:
        """pad: as in scored_length."""
        self.__dict__.update(vars(documents))
        self._pad, self._array = pad, array
        measures = documents.measures()
        lengths = measures.length + 1
        padded = np.flatnonzero(self._last_tokens() == pad) if pad is not None else np.zeros(0, np.int64)
        self.ends_cut = len(padded)  # documents whose last token is not scored
        for index in padded.tolist():
            lengths[index] = scored_length(self._tokens(index), pad) + 1
        ones = np.ones(len(lengths))
        self._measures = measures._replace(length=lengths, weight=ones, loss_tokens=ones.astype(np.int64))

    def _last_tokens(self) -> Array:
        last = [np.empty(0, np.int32)]
        for selection in self._selections:
            table, indices = selection.table, selection.indices
            last.append(table.ids[table.ends[indices] - table.lengths[indices] + selection.lengths - 1])
        return np.concatenate(last)

    def _tokens(self, index: int) -> Tensor:
        selection, row = self._locate(index)
        ids, _ = selection.table.tokens(int(selection.indices[row]), int(selection.lengths[row]))
        return torch.from_numpy(ids.astype(np.int64))

    def build(self, index: int) -> Document:
        document = super().build(index)
        values = {self._array: float(self.margins[index])}
        return scored_document(
            document.tokens, self._pad, values, source=document.source, dataset=document.dataset, media=document.media,
            group=document.group,
        )  # fmt: skip


class StepDocuments(Documents):
    """Documents whose steps have labels. A value v >= 1 in `trained` is the label v - 1 of the step that ends at this
    token."""

    def __init__(self, documents: Documents) -> None:
        self.__dict__.update(vars(documents))
        measures = documents.measures()
        # Count 1 if the first token ends a step, as it may if a prompt has no tokens.
        first = [np.empty(0, np.int64)]
        for selection in self._selections:
            table, indices = selection.table, selection.indices
            first.append((table.trained[table.ends[indices] - table.lengths[indices]] > 0).astype(np.int64))
        counts = documents.trained + np.concatenate(first)
        self._measures = measures._replace(
            length=measures.length + 1, weight=counts.astype(np.float64), loss_tokens=counts
        )

    def build(self, index: int) -> Document:
        document = super().build(index)
        # [T + 1] label + 1 of the step that the previous token ends, or 0
        marks = torch.cat([torch.zeros(1), document.weights])
        return Document(
            with_end_mark(document.tokens), (marks > 0).float(), arrays={"label": (marks - 1).clamp(min=0.0)},
            source=document.source, dataset=document.dataset, media=document.media,
        )  # fmt: skip
