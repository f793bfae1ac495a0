"""Checks the first row of each local .jsonl file before ranks start, which would take seconds to find it."""

from __future__ import annotations

from pathlib import Path

from weft.config.schema import SftConfig, SourceConfig
from weft.data.blocks import FileBlock
from weft.data.records import ParseOptions
from weft.data.sources import DataSource, message_rules
from weft.errors import UserError

_LONGEST = 1 << 20  # bytes of a first row; the ranks check longer ones


def check_first_rows(config: SftConfig) -> None:
    """Raises the ranks' UserError if a first row is no document, with or without a chat template. The ranks check all
    other rows, and files of other formats."""
    data = config.data
    if data.bad_rows != "error":
        return
    for source in data.sources or (SourceConfig(path=data.path or "", split=data.split, columns=data.columns),):
        path = Path(source.path).expanduser()
        if path.suffix != ".jsonl" or not path.is_file() or source.split is not None:
            continue
        with path.open("rb") as file:
            line = file.readline(_LONGEST)
        if not line.strip() or len(line) == _LONGEST:
            continue
        block = FileBlock(str(path), 0, len(line), 0)
        read = DataSource("", [], source.columns, source.name or "", rules=message_rules(data))
        errors = []
        for chat in (True, False):
            try:
                next(block.records(read.parse_options(chat, ParseOptions(**config.row_options))), None)
            except UserError as error:
                errors.append(error)
        if len(errors) == 2:
            raise errors[0]
