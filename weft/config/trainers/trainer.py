"""What is known of another trainer: its names, and what to write in weft instead of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

PREFERENCES = "preference tuning"
REINFORCEMENT = "reinforcement learning"
ITSELF = "="  # in `means`: the value as it is


T = TypeVar("T")


def same(names: Iterable[str], meaning: T) -> dict[str, T]:
    """One meaning for several names, or values: what nobody changes may be shared."""
    return dict.fromkeys(names, meaning)


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer that people come from.

    name: of its page, docs/coming-from/NAME.md. introduction: Markdown, below the title of that page. names: heading
    -> name -> what to say in weft. A name is the last part of theirs, or as many of the last parts as it takes to tell
    it from another (`checkpoint.interval`); lower case, with underscores; `wandb.*` is a section. Keys of weft stand in
    backquotes. defaults: key of weft -> the value that the trainer has where nothing is said, and weft has not.
    older: the same of its former version, whose files are told by one of older_names.

    What `weft migrate` knows of it besides:

    signs: patterns of whole dotted names by which its files are recognised. tasks: name -> value, or `*` for any -> the
    kind of training, where that is not supervised fine-tuning. moves: name -> key that takes its value as it is, where
    that is not the same for all trainers (migrate.py). means: name -> value, in lower case, or `*` for any -> what it
    says in keys of weft; under the key "" stands what cannot be carried over. per_device: names whose product is the
    batch of one device, with their defaults. packing: names that make that a number of rows of the greatest length.
    lora: the name that says whether there are adapters, and the values with which there are; "": nothing is said.
    balancing: what it multiplies the auxiliary loss of a mixture of experts by, where nothing is said.
    """

    name: str
    title: str
    introduction: str
    names: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, Any]
    older: Mapping[str, Any] = field(default_factory=dict)
    older_names: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    tasks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    moves: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    per_device: Mapping[str, int] = field(default_factory=dict)
    packing: tuple[str, ...] = ()
    lora: tuple[str, tuple[str, ...]] = ("", ())
    balancing: float | None = None

    def advice(self) -> Iterator[tuple[str, str]]:
        """(name, what to say in weft) of every name."""
        for group in self.names.values():
            yield from group.items()

    def signs_in(self, names: Iterable[str]) -> list[str]:
        """Those of these dotted names that are signs of this trainer."""
        return [name for name in names if any(fnmatchcase(name.replace("-", "_"), sign) for sign in self.signs)]
