"""A draft of a config: the settings that were converted from another trainer's config, and the remaining ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from weft.config.coerce import MismatchError, coerce, describe
from weft.config.conditions import BUILT_IN_OPTIMIZERS
from weft.config.keys import Key, schema_keys
from weft.config.migrate.names import advice_for, entry_of, weft_value
from weft.config.migrate.trainer import ANY, ITSELF, NOTE, TABLES, JobNames, RlDraft, Trainer
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.sources import split_problems
from weft.config.yaml12 import Node, read_value, show

_LISTS = ("model.freeze", "fsdp.wrap", "track.report_to")  # lists filled by several names of a trainer
_PATTERNS = ("lora.targets", "data.split")  # keys for which other trainers accept other expressions


@dataclass(frozen=True)
class Quantity:
    """One quantity of the algorithm: its computation in the old config and in the draft, in words. is_equal:
    whether the two are equal."""

    name: str
    original: str
    drafted: str
    is_equal: bool


@dataclass
class Draft:
    """A draft under construction. trainer: of the old config. schema: of weft's command. values: key -> (value, origin
    in words, the trainer's name). notes: the trainer's name -> advice. unfit: keys whose old value weft does not
    accept; no default replaces it. images: whether the model is known to accept images. quantities: the compared
    computations."""

    trainer: Trainer
    schema: type = SftConfig
    values: dict[str, tuple[Any, str, str]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)
    images: bool = False
    quantities: list[Quantity] = field(default_factory=list)

    @property
    def rl(self) -> RlDraft | None:
        """The trainer's table for reinforcement learning, if the draft is for `weft rl`; else None."""
        return self.trainer.table.rl_draft if self.schema is RlConfig else None

    @property
    def command(self) -> str:
        """The command of weft that runs the draft."""
        return str(getattr(self.schema, "command"))  # noqa: B009 - `type` has no such attribute

    @property
    def job(self) -> JobNames | None:
        """The trainer's names for this command; None for `weft sft`."""
        return self.trainer.jobs.get(self.command)

    @property
    def keys(self) -> dict[str, Key]:
        """The keys that a draft may set."""
        return schema_keys(self.schema)

    def entry(self, name: str) -> str:
        """The entry of the tables for a dotted name; "" if there is none."""
        job_entry = entry_of(name, self.job.names) if self.job is not None else None
        return job_entry or entry_of(name) or ""

    def meaning(self, entry: str, value: Any) -> Mapping[str, Any] | None:
        """The meaning of a value, as key of weft -> value; None if no table has it. Tables of companions apply to every
        trainer."""
        words = (str(value).lower(), "on" if value else "off", ANY)
        tables = [self.trainer.means] if self.job is None else [self.job.means, self.trainer.means]
        for means in (*tables, *(companion.means for companion in TABLES.companions), TABLES.shared.means):
            meanings = means.get(entry, {})
            result = next((meanings[word] for word in words if word in meanings), None)
            if result is not None:
                return result
        return None

    def key_of(self, entry: str) -> str | None:
        """The key of weft that accepts the value of an entry unchanged; None if there is none."""
        move_tables = [self.trainer.moves] if self.job is None else [self.job.moves, self.trainer.moves]
        tables = (*move_tables, *(companion.moves for companion in TABLES.companions), TABLES.moves)
        return next((moves[entry] for moves in tables if entry in moves), None)

    @property
    def differs(self) -> list[Quantity]:
        """The quantities that the draft computes differently from the old config."""
        return [quantity for quantity in self.quantities if not quantity.is_equal]

    def compare(self, name: str, original: str, drafted: str, *, is_equal: bool = True) -> None:
        """Note the computations of a quantity of the algorithm in the old config and in the draft."""
        self.quantities.append(Quantity(name, original, drafted, is_equal))

    def fit_row(self, longest: int, unit: str) -> None:
        """Raise step.max_tokens_per_device until a row has room for `longest` tokens: over the ranks of mesh.cp, but on
        one rank if there may be images, because some models cannot split documents with images. unit: the word for a
        document."""
        cp = 1 if self.images else self.value("mesh.cp", 1)
        if longest > cp * self.value("step.max_tokens_per_device", 8192):
            shared = " over the ranks of mesh.cp" if cp > 1 else ""
            is_uncut = self.images and self.value("mesh.cp", 1) > 1
            suffix = " on one rank: some models cannot split documents with images" if is_uncut else ""
            self.take(
                "step.max_tokens_per_device",
                -(-longest // cp),
                "",
                f"a row needs room for the longest {unit}{shared}{suffix}",
            )

    def advice(self, name: str) -> str | None:
        """The advice about a name."""
        if self.rl is None and self.job is not None and (entry := entry_of(name, self.job.names)):
            return self.job.names[entry]
        advice = advice_for(name, reinforcement=self.rl is not None)
        if advice is None and self.rl is not None:
            families = self.trainer.families.items()
            advice = next((text for pattern, text in families if fnmatchcase(name, pattern)), None)
        return advice

    def count_updates(self, keys: Iterable[str], updates: int) -> None:
        """Multiply keys that count optimizer steps by `updates`, the optimizer steps in one step of the trainer."""
        for key in keys:
            count = self.value(key)
            if isinstance(count, int) and count > 0 and updates > 1:
                origin, name = self.values[key][1:]
                self.take(key, count * updates, name, f"{origin}: {count} rollout steps of {updates} optimizer steps")

    def value(self, key: str, default: Any = None) -> Any:
        """The converted value of a key."""
        return self.values[key][0] if key in self.values else default

    def take(self, key: str, value: Any, name: str, origin: str = "") -> None:
        """Set a key if the schema has it and accepts the value; otherwise note advice. name: the trainer's name.
        origin: in words."""
        spec = self.keys.get(key)
        fitting = None if spec is None else _fitting(spec, value)
        if fitting is None:
            self.notes[name] = self._unfit(spec, value, self.advice(name)) if spec else f"weft has no {key}."
            self.unfit.add(key)
        else:
            self.values[key] = (fitting, origin or self._short(name), name)

    def take_meaning(self, meaning: Mapping[str, Any], setting: Any, name: str, origin: str = "") -> None:
        """Set the keys of a meaning (see `meaning`). If several names fill the same list or mapping, their values are
        merged."""
        for key, value in meaning.items():
            if key == NOTE:
                self.notes[name] = value
                continue
            taken_value, before, source = _substituted(value, setting), self.value(key), origin or self._short(name)
            if key in _LISTS and isinstance(taken_value, str):
                taken_value = [part.strip() for part in taken_value.split(",")]
            if isinstance(before, list) and key in _LISTS:
                taken_value = [*before, *(item for item in taken_value if item not in before)]
            elif isinstance(before, dict):
                taken_value = {**before, **taken_value}
            else:
                before = None
            self.take(
                key,
                taken_value,
                name,
                source if before is None else ", ".join(dict.fromkeys([self.values[key][1], source])),
            )

    def _short(self, name: str) -> str:
        """The part of a name that the tables contain."""
        entry = self.entry(name)
        return entry if entry and not entry.endswith(".*") else name

    @staticmethod
    def _unfit(spec: Key, value: Any, advice: str | None) -> str:
        text = f"{show(value)} is not a value of {spec.name}"
        return (
            f"{text}: {advice}"
            if advice and (spec.type is str or spec.name in _PATTERNS)
            else f"{text}, which is {describe(spec.type)}."
        )

    def drop(self, key: str, because: str) -> None:
        """Remove a converted key, and note the reason."""
        _, _, name = self.values.pop(key)
        if name != key:
            self.notes[name] = because


def _substituted(value: Any, setting: Any) -> Any:
    """A value of `means`, with `setting` instead of ITSELF."""
    if isinstance(value, dict):
        return {name: _substituted(part, setting) for name, part in value.items()}
    if isinstance(value, list):
        return [_substituted(part, setting) for part in value]
    return setting if value == ITSELF else value


def _fitting(key: Key, value: Any) -> Any:
    """The value in a form that this key accepts; None if there is none."""
    equivalent = weft_value(key.name, value)
    if key.name == "optimizer.name" and equivalent is None and not _is_optimizer(value):
        return None
    if key.name == "data.split" and (not isinstance(value, str) or any(split_problems(value))):
        return None
    if isinstance(value, str) and "," in value and "tuple" in str(key.type) and not value.startswith("["):
        value = [part.strip() for part in value.split(",")]  # LLaMA-Factory's lists
    for candidate in (None if equivalent is None else read_value(equivalent, "").value, value, *numbers_of(value)):
        try:
            if candidate is not None:
                coerce(Node(candidate, ""), key.type)
                return candidate
        except MismatchError:
            continue
    return None


def _is_optimizer(value: Any) -> bool:
    return value in BUILT_IN_OPTIMIZERS or (isinstance(value, str) and bool(re.fullmatch(r"torch\.optim\.\w+", value)))


def numbers_of(value: Any) -> Iterator[int | float]:
    """The numbers that YAML 1.1 or an argument parser may read in a value: 3.0 as 3 and 3.0, "2e-5", 1_000."""
    try:
        number = float(value.replace("_", "") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return
    if isinstance(value, bool) or not math.isfinite(number):
        return
    if number.is_integer():
        yield int(number)
    yield number
