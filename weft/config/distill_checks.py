"""Checks of a config of `weft distill`, with those that it shares with `weft sft` (checks.py)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.checks import (
    EXCLUSIVE,
    IMPORT_PATH,
    Inert,
    Rules,
    adapter_presets,
    inert_rules,
    pipeline_combinations,
    training_combinations,
)
from weft.config.distill_schema import AVERAGE, BASE, DATA, DIVERGENCES, DistillConfig, is_opened
from weft.config.sources import source_name


def _combinations(config: DistillConfig) -> Iterator[tuple[str, str]]:
    yield from training_combinations(config)
    distill = config.distill
    if distill.loss not in DIVERGENCES and not IMPORT_PATH.fullmatch(distill.loss):
        yield (
            "distill.loss",
            f"distill.loss is {distill.loss}, which is neither one of {', '.join(DIVERGENCES)} nor an import path, as "
            "in my_losses:skewed for the function skewed in my_losses.py.",
        )
    yield from _teachers(config)
    yield from _samples(config)
    yield from _teacher_ranks(config)
    stages = config.teacher.pp or config.mesh.pp
    if stages > 1 and config.mesh.pp == 1:
        yield from pipeline_combinations(config, "teacher.pp", stages)


def _teachers(config: DistillConfig) -> Iterator[tuple[str, str]]:
    distill = config.distill
    if (distill.teacher is None) == (distill.teachers is None):
        state = "neither is" if distill.teacher is None else "both are"
        yield (
            "distill.teacher",
            f"of distill.teacher and distill.teachers {state} set: set distill.teacher to a model, or "
            "distill.teachers to several by name.",
        )
    if distill.teacher == BASE and not config.lora.on:
        yield (
            "distill.teacher",
            "distill.teacher is base, the model under the student's adapters, and there are none: set lora.rank, or "
            "name a model.",
        )
    if distill.teacher == BASE and config.lora.modules_to_save:
        yield (
            "distill.teacher",
            "distill.teacher is base, but lora.modules_to_save replaces modules of the base: adapt them with "
            "lora.targets, or set distill.teacher to model.path, which opens a copy.",
        )
    if distill.teacher == AVERAGE and config.optimizer.ema_decay is None:
        yield (
            "distill.teacher",
            "distill.teacher is average, but no average of the weights is kept: set optimizer.ema_decay=0.99, or name "
            "a model.",
        )
    if distill.alpha == 0 and _begins_as_teacher(config):
        yield (
            "distill.alpha",
            f"distill.teacher is {distill.teacher}, which the student equals at its start, so that divergence and "
            "gradients are 0, and stay so: set distill.alpha above 0, for cross entropy beside, or name another model.",
        )
    if distill.cache == "disk" and distill.teacher == AVERAGE:
        yield (
            "distill.cache",
            "distill.cache is disk, but distill.teacher=average changes with every step: set distill.cache=off.",
        )
    if distill.served and distill.temperature != 1:
        yield (
            "distill.temperature",
            f"distill.temperature is {distill.temperature:g}, but a served teacher's log-probabilities are of "
            "temperature 1: set distill.temperature=1, or name a model.",
        )
    if distill.cache == "disk" and set(distill.named) == {DATA}:
        yield "distill.cache", "distill.cache is disk, but distill.teacher=data reads nothing: set distill.cache=off."
    if distill.teachers is None:
        return
    if paths := [path for path in distill.teachers.values() if path in (BASE, AVERAGE)]:
        yield (
            "distill.teachers",
            f"distill.teachers names {paths[0]}, which is the student itself: name models, or set distill.teacher.",
        )
    if distill.teacher_column is not None:
        return
    names = [source_name(source) for source in (*(config.data.sources or ()), *(config.eval.sources or ()))]
    if not config.data.sources:
        yield (
            "distill.teachers",
            "distill.teachers gives each source of the data a teacher, but data.sources is not set: set it, name the "
            "column of the rows that has the teacher's name in distill.teacher_column, or one model in "
            "distill.teacher.",
        )
    elif missing := [name for name in dict.fromkeys(names) if name not in distill.teachers]:
        yield (
            "distill.teachers",
            f"distill.teachers has no teacher for the source {missing[0]}: add {missing[0]}: PATH.",
        )
    elif extra := [name for name in distill.teachers if name not in names]:
        yield (
            "distill.teachers",
            f"distill.teachers names {extra[0]}, which is no source: there are {', '.join(names)}.",
        )
    if config.eval.path is not None:
        yield (
            "eval.path",
            "eval.path has no name by which distill.teachers could give it a teacher: set eval.sources, or eval.share.",
        )
    if config.eval.share is not None:
        yield (
            "eval.share",
            "eval.share has no name by which distill.teachers could give it a teacher: set eval.sources.",
        )


def _begins_as_teacher(config: DistillConfig) -> bool:
    """Whether the student's first distribution is its only teacher's."""
    teacher, lora = config.distill.teacher, config.lora
    if lora.path is not None or lora.dropout:
        return False
    return teacher in (BASE, AVERAGE) or (teacher == config.model.path and lora.base == "compute")


def _samples(config: DistillConfig) -> Iterator[tuple[str, str]]:
    distill = config.distill
    if not distill.on_policy:
        return
    if DATA in distill.named:
        yield (
            "distill.on_policy",
            f"distill.on_policy is {distill.on_policy:g}, but a teacher is data, whose lists are of the rows' own "
            "answers: name a model or a server, or set distill.on_policy=0.",
        )
    if distill.cache == "disk":
        yield (
            "distill.cache",
            "distill.cache is disk, but no later epoch has the answers that the student samples: set "
            "distill.cache=off, or distill.on_policy=0.",
        )
    if distill.alpha:
        yield (
            "distill.alpha",
            f"distill.alpha is {distill.alpha:g}, but cross entropy on the student's own samples teaches nothing: set "
            "distill.alpha=0, or distill.on_policy=0.",
        )


def _teacher_ranks(config: DistillConfig) -> Iterator[tuple[str, str]]:
    distill = config.distill
    if config.teacher.ranks is None:
        return
    if distill.named and not any(map(is_opened, distill.named)):
        yield (
            "teacher.ranks",
            f"teacher.ranks, but {distill.named[0]} is no model that weft opens: its ranks would have nothing to read. "
            "Leave teacher.ranks out.",
        )
    if distill.cache == "disk":
        yield (
            "teacher.ranks",
            "teacher.ranks with distill.cache=disk: the teacher is opened only for what the folder lacks, and its "
            "ranks would wait. Set distill.cache=off, or leave teacher.ranks out.",
        )
    if distill.on_policy:
        yield (
            "teacher.ranks",
            f"teacher.ranks with distill.on_policy={distill.on_policy:g}: the student samples when a step begins, so "
            "that the teacher could not read a step ahead, and both would wait in turn. Leave teacher.ranks "
            "out, or set distill.on_policy=0.",
        )


_OWN_LOSS = Inert("train.loss", lambda c: True, "distill.loss says what is trained")
DISTILL = Rules(
    EXCLUSIVE,
    (*inert_rules(DistillConfig), _OWN_LOSS),
    _combinations,
    lambda value: adapter_presets(value, "distill"),
)
