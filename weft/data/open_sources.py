"""The data section of a config -> sources with their files located. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.config.schema import DataConfig, SourceConfig
from weft.config.sources import source_name
from weft.data.blocks import MAX_ROW_BYTES
from weft.data.records import Reading
from weft.data.sources import Part, in_memory, open_source

# A path, the data section of a config, its sources, or rows: a list of dicts, a datasets.Dataset.
Data = str | DataConfig | Sequence[SourceConfig] | Sequence[Mapping[str, Any]] | Any


@dataclass(frozen=True)
class Source:
    """A source with its files. label: its name in reports. name: as in data.sources; "" without data.sources."""

    label: str
    parts: list[Part]
    columns: Mapping[str, str]
    name: str = ""
    weight: float = 1.0
    roles: Mapping[str, str] = field(default_factory=dict)

    def reading(self, chat: bool) -> Reading:
        """How the rows of the source are parsed. chat: whether there is a chat template."""
        return Reading(self.columns, self.roles, chat)


def open_data(data: Data) -> list[Source]:
    """Locates and opens the files of a data section. Raises UserError if one is missing or cannot be read."""
    if isinstance(data, DataConfig):
        if data.sources is not None:
            return [_open(source, data.roles, named=True, most=data.max_row_bytes) for source in data.sources]
        assert data.path is not None
        whole = SourceConfig(path=data.path, split=data.split, subset=data.subset, columns=data.columns)
        return [_open(whole, data.roles, most=data.max_row_bytes)]
    if isinstance(data, str):
        return [_open(SourceConfig(path=data), {})]
    if isinstance(data, Sequence) and data and isinstance(data[0], SourceConfig):
        configs: Sequence[Any] = data
        return [_open(source, {}, named=True) for source in configs]
    return [Source("data", [in_memory(data)], {})]


def _open(config: SourceConfig, roles: Mapping[str, str], named: bool = False, most: int = MAX_ROW_BYTES) -> Source:
    name = source_name(config) if named else ""
    label = f"{name} ({config.path})" if named else config.path
    key = "data.sources" if named else "data.path"
    return Source(label, open_source(config, key, most), config.columns, name, config.weight, roles)
