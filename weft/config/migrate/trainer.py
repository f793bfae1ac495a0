"""Other trainers. Their tables are read on first use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.config.migrate.tables import TableError, inverse, read_table, word

FOLDER = Path(__file__).parent / "tables"
PREFERENCES = "preference tuning"
REWARD_MODELS = "reward models"
REINFORCEMENT = "reinforcement learning"
DISTILLATION = "distillation"
# Kind of training other than supervised fine-tuning -> weft's command. If a file has several kinds, the first counts.
KINDS = {DISTILLATION: "distill", REINFORCEMENT: "rl", REWARD_MODELS: "reward", PREFERENCES: "dpo"}
ITSELF = "="  # in `means`: the unchanged value
ANY = "*"  # in `means`: any other value
NOTE = "note"  # in `means`, instead of a key: advice, because the value cannot be converted
_SENTENCE = re.compile(r"[A-Z][A-Z0-9_]*")

Groups = dict[str, tuple[str, ...]]
Meanings = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Older:
    """The defaults of a trainer's former version. Its files are recognised by one of `names`."""

    names: tuple[str, ...]
    defaults: dict[str, Any]


@dataclass(frozen=True)
class RlDraft:
    """A trainer's configs of reinforcement learning, for `weft migrate`. moves, means, silent, defaults: as in Table,
    but these take precedence. algorithms: their names in messages, in capitals.

    columns: column of weft -> names of keys whose value is the file's name of the column. longest: names of the maximum
    sample length and of the maximum prompt length; if the first is set, their difference is the maximum completion
    length. engines: name of the list of the engines' devices. reward: pattern of names whose value is a reward's class.
    rewards: end of a class's name -> weft's function that computes the same. per_rollout: keys of weft that count
    optimizer steps, for which the trainer counts rollout steps. families: SENTENCE -> patterns of names, as in
    `sglang_*`; the sentence is the answer for a name that matches, if no table has the name.
    """

    algorithms: tuple[str, ...]
    moves: Groups
    means: Meanings
    silent: dict[str, Any]
    defaults: dict[str, Any]
    columns: Groups = field(default_factory=dict)
    longest: tuple[str, ...] = ()
    engines: str = ""
    reward: str = ""
    rewards: dict[str, str] = field(default_factory=dict)
    per_rollout: tuple[str, ...] = ()
    families: Groups = field(default_factory=dict)


@dataclass(frozen=True)
class JobDraft:
    """A trainer's configs of preference tuning, reward models or distillation, for `weft migrate`. names, moves, means,
    silent, defaults: as in Table, but these take precedence.

    methods: name -> value, or `*` -> the trainer's method, as in preferences.py. by_method: method -> key of weft ->
    the default of the method. columns: column of weft -> names of keys whose value is the file's name of the column.
    complements: key of weft -> names whose value is 1 - the key's. unsaid: name -> SENTENCE, the answer if the config
    does not have the name.
    """

    names: Groups
    moves: Groups = field(default_factory=dict)
    means: Meanings = field(default_factory=dict)
    silent: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, dict[str, str]] = field(default_factory=dict)
    by_method: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: Groups = field(default_factory=dict)
    complements: Groups = field(default_factory=dict)
    unsaid: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """tables/NAME.yaml. The introduction of the trainer's page is tables/NAME.md.

    A name is the last part of a trainer's dotted name, in lower case with underscores. If two names have the same last
    part, as many parts as necessary distinguish them (`checkpoint.interval`). `wandb.*` is a section and everything in
    it. SENTENCE is the name of a sentence in sentences.yaml, or a text.

    title: the trainer's name in messages. names: heading of the page -> SENTENCE -> the names with this answer. rl:
    SENTENCE -> the names with this answer in `weft rl`. defaults: key of weft -> the trainer's default, if it differs
    from weft's. older: the same for a former version.

    The following fields are for `weft migrate`. signs: patterns of complete dotted names by which the trainer's files
    are recognised. tasks: kind of training other than supervised fine-tuning -> name -> the values that select it;
    null: any value. foreign: the same for models that weft does not train, in words, as in `a diffusion model`. moves:
    key of weft -> names with the same values, in addition to shared.yaml. means: name -> value in lower case, `on`,
    `off` or `*` -> key of weft -> value. silent: name -> values that have no effect. per_device:
    names whose product is the batch of one device -> default. smallest_step: minimum number of documents in a step, if
    the file does not set the number of accumulated micro-batches. former: name of another version -> name. adapter_lr:
    default learning rate with adapters, if it differs. datasets: names whose values are data sets as in
    PATH:SUBSET#ROWS -> section of weft. packing: names that, if true, make the batch a number of rows of the maximum
    length. lora: the name that enables adapters -> the values that enable them; the value "" is an unset name.
    balancing: default factor of the auxiliary loss of a mixture of experts. package: the Python package of its
    programs, by which a script that runs one of its modules is recognised. companion: whether the trainer's file
    accompanies another trainer's. vision: name -> default for models with images. devices: names of the list of
    training devices. steps_behind: whether update k has the schedule's rate at k - 1, because a scheduler of PyTorch or
    Megatron steps after the update. rl_draft: reinforcement learning, if weft can draft it. jobs: the same for weft's
    commands dpo, reward and distill.
    """

    title: str
    names: dict[str, Groups]
    signs: tuple[str, ...]
    rl: Groups = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    older: Older | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    foreign: dict[str, dict[str, Any]] = field(default_factory=dict)
    moves: Groups = field(default_factory=dict)
    means: Meanings = field(default_factory=dict)
    silent: dict[str, Any] = field(default_factory=dict)
    per_device: dict[str, int] = field(default_factory=dict)
    smallest_step: int = 0
    former: dict[str, str] = field(default_factory=dict)
    adapter_lr: float | None = None
    datasets: dict[str, str] = field(default_factory=dict)
    packing: tuple[str, ...] = ()
    lora: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    balancing: float | None = None
    companion: bool = False
    package: str = ""
    vision: dict[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    steps_behind: bool = True
    rl_draft: RlDraft | None = None
    jobs: dict[str, JobDraft] = field(default_factory=dict)


@dataclass(frozen=True)
class RankNames:
    """Names that give the number of GPUs of the old run, and the ways in which they shared work."""

    all: tuple[str, ...]
    machines: tuple[str, ...]
    gpus: tuple[str, ...]
    sharing: tuple[str, ...]
    shards: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Sources:
    """Lists of data sets, and the keys of their entries."""

    lists: dict[str, str]
    keys: dict[str, str]
    columns: dict[str, str]
    silent: dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Shared:
    """tables/shared.yaml, whose comments explain each field."""

    trainers: tuple[str, ...]
    moves: Groups
    means: Meanings
    choices: Groups
    minutes: Groups
    betas: dict[str, tuple[Any, ...]]
    unlimited: tuple[str, ...]
    per_device: tuple[str, ...]
    ranks: RankNames
    columns: Groups
    column_switches: tuple[str, ...]
    sources: Sources
    values: dict[str, dict[str, tuple[Any, ...]]]
    names: Groups


@dataclass(frozen=True)
class Sentences:
    """tables/sentences.yaml: name -> sentence."""

    sft: dict[str, str]
    rl: dict[str, str]
    jobs: dict[str, str]


@dataclass(frozen=True)
class JobNames:
    """The entries of a trainer's table for one command of weft other than `weft sft`. names: name -> advice. moves:
    name -> key. columns: name -> column. complements: name -> key. unsaid: name -> advice. means, defaults, methods,
    by_method: as in JobDraft."""

    names: dict[str, str]
    moves: dict[str, str]
    means: Meanings
    defaults: dict[str, Any]
    columns: dict[str, str]
    methods: dict[str, dict[str, str]] = field(default_factory=dict)
    by_method: dict[str, dict[str, Any]] = field(default_factory=dict)
    complements: dict[str, str] = field(default_factory=dict)
    unsaid: dict[str, str] = field(default_factory=dict)


class Trainer:
    """Another trainer. name: the name of its table and page. Other attributes are made from `table`."""

    def __init__(self, name: str, table: Table, say: Sentences) -> None:
        file = f"{name}.yaml:"
        self.name, self.title, self.table = name, table.title, table
        self.short = table.title.partition(" and ")[0]
        self.headings = {
            heading: advice_by_name(groups, say.sft, f"{file} names: {heading}:")
            for heading, groups in table.names.items()
        }
        inverse(self.headings, f"{file} names:")
        self.names = {name: text for group in self.headings.values() for name, text in group.items()}
        self.rl = advice_by_name(table.rl, {**say.sft, **say.rl}, f"{file} rl:")
        self.lora = next(((switch, _words(list(on))) for switch, on in table.lora.items()), ("", []))
        self.moves = inverse(table.moves, f"{file} moves:")
        self.tasks = _tasks(table.tasks, f"{file} tasks:")
        self.foreign = _by_name(table.foreign)
        self.means = _meanings(table.means, table.silent, say.sft, f"{file} means:", f"{file} silent:")
        rl, location = table.rl_draft, f"{file} rl_draft:"
        self.rl_moves = {} if rl is None else inverse(rl.moves, f"{location} moves:")
        self.rl_columns = {} if rl is None else inverse(rl.columns, f"{location} columns:")
        self.rl_means: Meanings = {}
        self.families: dict[str, str] = {}
        if rl is not None:
            sentences = {**say.sft, **say.rl}
            self.rl_means = _meanings(rl.means, rl.silent, sentences, f"{location} means:", f"{location} silent:")
            self.families = advice_by_name(rl.families, sentences, f"{location} families:")
        self.jobs = {command: _job(job, say, f"{file} jobs: {command}:") for command, job in table.jobs.items()}
        if rl is not None:
            self.jobs["rl"] = JobNames(self.rl, self.rl_moves, self.rl_means, rl.defaults, self.rl_columns)

    def signs_in(self, names: Iterable[str]) -> list[str]:
        """The dotted names among these by which the trainer is recognised."""
        return [name for name in names if any(fnmatchcase(name.replace("-", "_"), sign) for sign in self.table.signs)]

    def task(self, name: str, value: Any) -> str | None:
        """The kind of training that a value selects; None for supervised fine-tuning. name: a key of `tasks`."""
        return _kind(self.tasks, name, value)

    def foreign_kind(self, name: str, value: Any) -> str | None:
        """The model that a value selects and weft does not train, in words; None if there is none. name: a key of
        `foreign`."""
        return _kind(self.foreign, name, value)


class Tables:
    """All tables of a folder, each read on first use."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder

    @cached_property
    def sentences(self) -> Sentences:
        return read_table(self.folder / "sentences.yaml", Sentences)

    @cached_property
    def shared(self) -> Shared:
        return read_table(self.folder / "shared.yaml", Shared)

    @cached_property
    def trainers(self) -> tuple[Trainer, ...]:
        tables = {name: read_table(self.folder / f"{name}.yaml", Table) for name in self.shared.trainers}
        return tuple(Trainer(name, table, self.sentences) for name, table in tables.items())

    @cached_property
    def names(self) -> dict[str, str]:
        """name -> advice, for the names of all trainers."""
        return {
            **self.names_without_page,
            **{name: text for trainer in self.trainers for name, text in trainer.names.items()},
        }

    @cached_property
    def rl_names(self) -> dict[str, str]:
        """name -> advice for `weft rl`."""
        return {name: text for trainer in self.trainers for name, text in trainer.rl.items()}

    @cached_property
    def names_without_page(self) -> dict[str, str]:
        """name -> advice, for names of trainers without a page."""
        return advice_by_name(self.shared.names, self.sentences.sft, "shared.yaml: names:")

    @cached_property
    def moves(self) -> dict[str, str]:
        """name -> key of weft with the same meaning and values, for all trainers."""
        return inverse(self.shared.moves, "shared.yaml: moves:")

    @cached_property
    def choices(self) -> dict[str, str]:
        """name -> key of weft with the same meaning, which accepts some of the values."""
        return inverse(self.shared.choices, "shared.yaml: choices:")

    @cached_property
    def minutes(self) -> dict[str, str]:
        """name whose value is in minutes -> key of weft whose value is in seconds."""
        return inverse(self.shared.minutes, "shared.yaml: minutes:")

    @cached_property
    def columns(self) -> dict[str, str]:
        """name of a key whose value is the name of a column -> weft's name of the column."""
        return inverse(self.shared.columns, "shared.yaml: columns:")

    @cached_property
    def values(self) -> dict[str, dict[str, str]]:
        """key of weft -> value of other trainers, in lower case -> weft's value."""
        return {key: inverse(groups, f"shared.yaml: values: {key}:") for key, groups in self.shared.values.items()}

    @cached_property
    def companions(self) -> tuple[Trainer, ...]:
        """Trainers whose file accompanies another trainer's."""
        return tuple(trainer for trainer in self.trainers if trainer.table.companion)

    @property
    def drafts(self) -> str:
        """The configs for which `weft migrate` makes drafts, and the advice for others."""
        titles = {
            kind: ", ".join(trainer.short for trainer in self.trainers if command in trainer.jobs)
            for kind, command in KINDS.items()
        }
        others = "; ".join(f"{kind} for {titles[kind]}" for kind in reversed(KINDS) if titles[kind])
        return (
            f"`weft migrate` drafts supervised fine-tuning for every trainer in docs/coming-from; {others}. "
            "For other configs, start with docs/how-to (rl.md for reinforcement learning). `weft rl FILE --dry-run` "
            "prints the keys to set for each name of the old config."
        )

    def introduction(self, trainer: Trainer) -> str:
        """The Markdown text below the title of a trainer's page."""
        return (self.folder / f"{trainer.name}.md").read_text(encoding="utf-8")


def advice_by_name(groups: Mapping[str, Iterable[str]], sentences: Mapping[str, str], location: str) -> dict[str, str]:
    """name -> advice. groups: SENTENCE -> names."""
    return {name: _sentence(key, sentences, location) for name, key in inverse(groups, location).items()}


def _sentence(key: str, sentences: Mapping[str, str], location: str) -> str:
    if key not in sentences and _SENTENCE.fullmatch(key):
        raise TableError(f"{location} {key} is not a sentence of sentences.yaml.")
    return sentences.get(key, key)


def _kind(kinds: Mapping[str, list[tuple[str, str]]], name: str, value: Any) -> str | None:
    """The kind whose pattern fits the value of a name; None: there is none."""
    if value is None or value is False:
        return None
    text = str(value).lower()
    return next((kind for pattern, kind in kinds.get(name, ()) if fnmatchcase(text, pattern)), None)


def _tasks(kinds: Mapping[str, Mapping[str, Any]], location: str) -> dict[str, list[tuple[str, str]]]:
    """_by_name of kinds of training that are known."""
    for kind in kinds:
        if kind not in KINDS:
            raise TableError(f"{location} {kind} is not one of {', '.join(KINDS)}.")
    return _by_name(kinds)


def _by_name(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """name -> (pattern of values, kind of training). The first matching pattern decides."""
    by_name: dict[str, list[tuple[str, str]]] = {}
    for kind, names in kinds.items():
        for name, values in names.items():
            patterns = [ANY] if values is None else _words(values)
            by_name.setdefault(name, []).extend((pattern, kind) for pattern in patterns)
    return by_name


def _job(job: JobDraft, say: Sentences, location: str) -> JobNames:
    sentences = {**say.sft, **say.rl, **say.jobs}
    means = _meanings(job.means, job.silent, sentences, f"{location} means:", f"{location} silent:")
    return JobNames(
        advice_by_name(job.names, sentences, f"{location} names:"),
        inverse(job.moves, f"{location} moves:"),
        means,
        job.defaults,
        inverse(job.columns, f"{location} columns:"),
        job.methods,
        job.by_method,
        inverse(job.complements, f"{location} complements:"),
        {name: _sentence(key, sentences, f"{location} unsaid:") for name, key in job.unsaid.items()},
    )


def _meanings(
    means: Meanings, silent: Mapping[str, Any], sentences: Mapping[str, str], location: str, of_silent: str
) -> Meanings:
    """`means` with sentences instead of their names, and `silent` values with an empty meaning. where, of_silent:
    positions in the table, for errors."""
    meanings: Meanings = {}
    for name, values in means.items():
        meanings[name] = {
            value: {
                key: _sentence(meant, sentences, f"{location} {name}:") if key == NOTE else meant
                for key, meant in meaning.items()
            }
            for value, meaning in values.items()
        }
    for name, values in silent.items():
        for value in _words(values):
            if value in meanings.setdefault(name, {}):
                raise TableError(f"{of_silent} {name}: {value} is also under means: remove one.")
            meanings[name][value] = {}
    return meanings


def _words(values: Any) -> list[str]:
    return [word(value) for value in (values if isinstance(values, list) else [values])]


TABLES = Tables()
