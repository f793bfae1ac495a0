"""A data set of synthetic documents, in the form that the data's reader returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.documents import Documents
from weft.data.encode import Encoded
from weft.data.image_files import MediaInfo, MediaLocation
from weft.data.limits import TableSelection
from weft.data.order import SourceShare
from weft.data.records import Record, Role
from weft.data.table import Chunk, in_memory
from weft.engine.batch.media import Media


@dataclass(frozen=True)
class SyntheticDocument:
    """ids: tokens. trained: as in Chunk, one value per token. role, margin: as in Record. example: the number of its
    row in the data; documents of one row are consecutive. media: its images. reach: tokens up to the end of the
    last."""

    ids: Sequence[int]
    trained: Sequence[int]
    example: int
    role: Role = ""
    margin: float = 0.0
    media: Media | None = None
    reach: int = 0


def synthetic_data(documents: Sequence[SyntheticDocument], tail: float | None = None) -> Documents:
    """The data set of these documents. tail: as in Documents."""
    records = [
        Record(f"verify:{document.example}", "input_ids", {}, role=document.role, margin=document.margin)
        for document in documents
    ]
    encoded = [
        Encoded(list(d.ids), list(d.trained))
        if d.media is None
        else Encoded(list(d.ids), list(d.trained), (_number(n),), d.media.patches, d.media.pairs, d.reach)
        for n, d in enumerate(documents)
    ]
    table = in_memory("verify", True, [Chunk.from_records([d.example for d in documents], records, encoded)])

    def inputs(_: str, places: Sequence[MediaLocation]) -> tuple[dict[str, Any], int]:
        media = documents[places[0].position].media
        assert media is not None
        return media.inputs, media.patches

    table.inputs = inputs
    selection = TableSelection(table, "", np.arange(len(documents)), table.lengths)
    return Documents([selection], [SourceShare(len(documents))], tail=tail)


def _number(document: int) -> MediaLocation:
    """The number of a document, which replaces the location of its images."""
    return MediaLocation(MediaInfo(1, 1, 0), position=document)
