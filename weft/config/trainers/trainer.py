"""What is known of another trainer: its names, and what to write in weft instead of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer that people come from.

    name: of its page, docs/coming-from/NAME.md. introduction: Markdown, below the title of that page. names: heading
    -> name -> what to say in weft. A name is the last part of theirs, or as many of the last parts as it takes to tell
    it from another (`checkpoint.interval`); lower case, with underscores; `wandb.*` is a section. Keys of weft stand in
    backquotes. defaults: key of weft -> the value that the trainer has where nothing is said, and weft has not.
    older: the same of its former version, whose files are told by one of older_names.
    """

    name: str
    title: str
    introduction: str
    names: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, Any]
    older: Mapping[str, Any] = field(default_factory=dict)
    older_names: tuple[str, ...] = ()

    def advice(self) -> Iterator[tuple[str, str]]:
        """(name, what to say in weft) of every name."""
        for group in self.names.values():
            yield from group.items()
