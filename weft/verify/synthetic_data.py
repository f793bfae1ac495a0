"""A data set of synthetic documents, as the data's reader would give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.data.documents import Documents
from weft.data.encode import Encoded
from weft.data.limits import TableSelection
from weft.data.order import SourceShare
from weft.data.records import Record, Role
from weft.data.table import Chunk, in_memory


@dataclass(frozen=True)
class SyntheticDocument:
    """ids: tokens. trained: as in Chunk, one value a token. role, margin: as in Record. example: the number of its row
    in the data; documents of one row follow each other."""

    ids: Sequence[int]
    trained: Sequence[int]
    example: int
    role: Role = ""
    margin: float = 0.0


def synthetic_data(documents: Sequence[SyntheticDocument], tail: float | None = None) -> Documents:
    """The data set of these documents. tail: as in Documents."""
    records = [
        Record(f"verify:{document.example}", "input_ids", {}, role=document.role, margin=document.margin)
        for document in documents
    ]
    encoded = [Encoded(list(document.ids), list(document.trained)) for document in documents]
    table = in_memory("verify", True, [Chunk.from_records([d.example for d in documents], records, encoded)])
    selection = TableSelection(table, "", np.arange(len(documents)), table.lengths)
    return Documents([selection], [SourceShare(len(documents))], tail=tail)
