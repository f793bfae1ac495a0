"""Checks that the tables name only existing names, sentences and keys. Their types are checked elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from weft.config.commands import SCHEMAS
from weft.config.keys import schema_keys, sections
from weft.config.migrate.scripts import PROGRAM
from weft.config.migrate.tables import TableError
from weft.config.migrate.trainer import NOTE, Tables, Trainer
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*(\.\*)?")
_NAMED = re.compile(r"`([a-z_]+\.[\w.*]+)`")  # a key of weft in a sentence


def check(tables: Tables) -> None:
    """Raise a TableError with all problems of the tables, if there are any."""
    messages = list(problems(tables))
    if messages:
        raise TableError("\n".join(messages))


def problems(tables: Tables) -> Iterator[str]:
    """The problems of the tables. Each contains its file and the key in it."""
    yield from _of_files(tables)
    yield from _of_sentences("sentences.yaml: sft", tables.sentences.sft, _known_names(SftConfig))
    yield from _of_sentences("sentences.yaml: rl", tables.sentences.rl, _known_names(RlConfig))
    every_key = set[str]().union(*(_known_names(schema) for schema in SCHEMAS.values()))
    yield from _of_sentences("sentences.yaml: jobs", tables.sentences.jobs, every_key)
    yield from _of_names("shared.yaml: names", tables.names_without_page)
    yield from _of_keys("shared.yaml: moves", tables.shared.moves)
    yield from _of_keys("shared.yaml: values", tables.shared.values)
    yield from _of_keys("shared.yaml: choices", tables.shared.choices)
    yield from _of_keys("shared.yaml: minutes", tables.shared.minutes)
    entries = {**tables.moves, **tables.choices, **tables.minutes, **tables.shared.means, **tables.shared.betas}
    yield from _of_entries("shared.yaml", entries, tables)
    for trainer in tables.trainers:
        yield from _of_trainer(trainer, tables)
    yield from _disagreements(tables)


def _of_files(tables: Tables) -> Iterator[str]:
    for name in tables.shared.trainers:
        if not (tables.folder / f"{name}.md").is_file():
            yield f"{name}.md is missing: write the introduction of the trainer's page."
    for path in sorted(tables.folder.iterdir()):
        if path.stem not in (*tables.shared.trainers, "shared", "sentences"):
            yield f"{path.name}: {path.stem} is not one of `trainers` in shared.yaml."


def _of_trainer(trainer: Trainer, tables: Tables) -> Iterator[str]:
    file, table = f"{trainer.name}.yaml", trainer.table
    yield from _of_names(f"{file}: names", trainer.names)
    yield from _of_sentences(f"{file}: names", trainer.names, _known_names(SftConfig))
    yield from _of_sentences(f"{file}: rl", trainer.rl, _known_names(RlConfig))
    if len(table.lora) > 1:
        yield f"{file}: lora: {', '.join(table.lora)}: write only the name that enables adapters."
    for name in trainer.rl:
        if not _NAME.fullmatch(name) or name in _known_names(RlConfig):
            yield f"{file}: rl: {name} is a key of weft, or not in lower case."
    yield from _of_keys(f"{file}: moves", table.moves)
    yield from _of_entries(file, {*trainer.moves, *trainer.means, *table.per_device}, tables)
    for name, values in trainer.means.items():
        keys = [key for meaning in values.values() for key in meaning if key != NOTE]
        yield from _of_keys(f"{file}: means: {name}", keys)
    for name in table.vision:
        if name not in trainer.means:
            yield f"{file}: vision: {name} is missing under `means`."
    yield from _of_rl_draft(trainer, tables)
    yield from _of_jobs(trainer, tables)
    former = table.older.defaults if table.older else {}
    yield from _of_keys(f"{file}: defaults", {**table.defaults, **former})
    for key, value in table.defaults.items():
        if key in schema_keys(SftConfig) and schema_keys(SftConfig)[key].default == value:
            yield f"{file}: defaults: {key}: {value} is also weft's default: remove it."


def _of_rl_draft(trainer: Trainer, tables: Tables) -> Iterator[str]:
    """Problems of a trainer's `rl_draft`: keys and names that do not exist."""
    rl, location = trainer.table.rl_draft, f"{trainer.name}.yaml: rl_draft"
    if rl is None:
        return
    meant = [key for values in trainer.rl_means.values() for meaning in values.values() for key in meaning]
    for key in (*rl.moves, *rl.defaults, *rl.per_rollout, *meant):
        if key != NOTE and key not in schema_keys(RlConfig):
            yield f"{location}: {key} is not a key of `weft rl`."
    yield from _of_sentences(f"{location}: families", trainer.families, _known_names(RlConfig))
    for name in (*trainer.rl_moves, *trainer.rl_means, *trainer.rl_columns, *rl.longest):
        if name not in trainer.rl and name not in tables.names:
            yield f"{location}: {name} is missing: add it under `rl` or `names` of a table."


def _of_jobs(trainer: Trainer, tables: Tables) -> Iterator[str]:
    """Problems of a trainer's `jobs`: commands, keys and names that do not exist."""
    for command in trainer.table.jobs:
        location, job = f"{trainer.name}.yaml: jobs: {command}", trainer.jobs[command]
        if command not in SCHEMAS:
            yield f"{location} is not a command of weft."
            continue
        keys = schema_keys(SCHEMAS[command])
        meant = [key for values in job.means.values() for meaning in values.values() for key in meaning]
        for key in (*job.moves.values(), *job.complements.values(), *job.defaults, *meant):
            if key != NOTE and key not in keys:
                yield f"{location}: {key} is not a key of `weft {command}`."
        yield from _of_sentences(f"{location}: names", job.names, _known_names(SCHEMAS[command]))
        for name in (*job.moves, *job.means, *job.methods, *job.columns, *job.complements, *job.unsaid):
            if name not in job.names and name not in tables.names and name != PROGRAM:
                yield f"{location}: {name} is missing: add it under its `names`, or `names` of a table."


def _of_names(location: str, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if not _NAME.fullmatch(name):
            yield f"{location}: {name} is not a name: write it in lower case, with underscores, as in a.b or a.*"
        if name in schema_keys(SftConfig):
            yield f"{location}: {name} is a key of weft, so weft never looks it up."


def _of_entries(location: str, names: Iterable[str], tables: Tables) -> Iterator[str]:
    """Problems of names that no table has under `names`: weft never reads entries for them."""
    for name in names:
        if name not in tables.names:
            yield f"{location}: {name} is missing under `names` of all tables."


def _of_keys(location: str, keys: Iterable[str]) -> Iterator[str]:
    for key in keys:
        if key not in schema_keys(SftConfig):
            yield f"{location}: {key} is not a key of weft."


def _of_sentences(location: str, sentences: Mapping[str, str], keys: set[str]) -> Iterator[str]:
    for name, text in sentences.items():
        if text[:1].isupper() or not text.endswith("."):
            yield f"{location}: {name}: the sentence follows a colon: begin in lower case, end with a full stop: {text}"
        yield from (
            f"{location}: {name}: `{key}` in its sentence is not a key of weft."
            for key in _NAMED.findall(text)
            if key not in keys
        )


def _known_names(schema: type) -> set[str]:
    """The keys, and `section.*`, that a sentence may contain."""
    return {*schema_keys(schema), *(f"{section}.*" for section in sections(schema))}


def _disagreements(tables: Tables) -> Iterator[str]:
    """A problem for each name to which the tables of two trainers have different answers."""
    for attribute in ("names", "rl"):
        first_answers: dict[str, tuple[str, str]] = {}
        if attribute == "names":
            first_answers = {name: ("shared", text) for name, text in tables.names_without_page.items()}
        for trainer in tables.trainers:
            for name, text in getattr(trainer, attribute).items():
                first_trainer, before = first_answers.setdefault(name, (trainer.name, text))
                if before != text:
                    yield f"{trainer.name}.yaml: {attribute}: {name}: {first_trainer}.yaml has a different answer."
