"""The data section of a config -> sources with their files located. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.schema import DataConfig, SourceConfig
from weft.config.sources import source_name
from weft.data.blocks import MAX_ROW_BYTES
from weft.data.messages import AS_THEY_STAND, MessageRules
from weft.data.records import ParseOptions
from weft.data.sources import SourcePart, TextUnit, in_memory, open_source

# A path, the data section of a config, its sources, or rows: a list of dicts, a datasets.Dataset.
Data = str | DataConfig | Sequence[SourceConfig] | Sequence[Mapping[str, Any]] | Any


@dataclass(frozen=True)
class DataSource:
    """A source with its files. label: its name in reports. name: as in data.sources; "" without data.sources. rules:
    how its messages are read."""

    label: str
    parts: list[SourcePart]
    columns: Mapping[str, str]
    name: str = ""
    weight: float = 1.0
    rules: MessageRules = AS_THEY_STAND

    def reading(self, chat: bool) -> ParseOptions:
        """How the rows of the source are parsed. chat: whether there is a chat template."""
        return ParseOptions(self.columns, self.rules, chat)


def message_rules(data: DataConfig) -> MessageRules:
    """How the messages of a data section are read."""
    return MessageRules(data.roles, data.message_keys, data.ignore, data.system)


def open_data(data: Data) -> list[DataSource]:
    """Locates and opens the files of a data section. Raises UserError if one is missing or cannot be read."""
    if isinstance(data, DataConfig):
        rules = message_rules(data)
        if data.sources is not None:
            return [_open(source, rules, True, data.max_row_bytes, data.text_unit) for source in data.sources]
        assert data.path is not None
        whole = SourceConfig(path=data.path, split=data.split, subset=data.subset, columns=data.columns)
        return [_open(whole, rules, False, data.max_row_bytes, data.text_unit)]
    if isinstance(data, str):
        return [_open(SourceConfig(path=data), AS_THEY_STAND)]
    if isinstance(data, Sequence) and data and isinstance(data[0], SourceConfig):
        configs: Sequence[Any] = data
        return [_open(source, AS_THEY_STAND, named=True) for source in configs]
    return [DataSource("data", [in_memory(data)], {})]


def _open(
    config: SourceConfig,
    rules: MessageRules,
    named: bool = False,
    most: int = MAX_ROW_BYTES,
    unit: TextUnit | None = None,
) -> DataSource:
    name = source_name(config) if named else ""
    label = f"{name} ({config.path})" if named else config.path
    key = "data.sources" if named else "data.path"
    return DataSource(label, open_source(config, key, most, unit), config.columns, name, config.weight, rules)
