"""Checks of a config of `weft distill`, in addition to the checks that it shares with `weft sft` (checks.py)."""

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
            f"distill.loss is {distill.loss}, which is not one of {', '.join(DIVERGENCES)}, nor an import path. For "
            f"the function skewed in my_losses.py write my_losses:skewed.",
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
        state = "are both null" if distill.teacher is None else "are both set"
        yield (
            "distill.teacher",
            f"distill.teacher and distill.teachers {state}: set distill.teacher to one model, or distill.teachers to "
            "several models by name.",
        )
    if distill.teacher == BASE and not config.lora.on:
        yield (
            "distill.teacher",
            "distill.teacher is base, the model under the student's adapters, but there are no adapters: set "
            "lora.rank, or set distill.teacher to a model.",
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
            "distill.teacher is average, but the run keeps no average of the weights: set optimizer.ema_decay=0.99, or "
            "set distill.teacher to a model.",
        )
    if distill.alpha == 0 and _begins_as_teacher(config):
        yield (
            "distill.alpha",
            f"distill.teacher is {distill.teacher}, which equals the student at the start, so divergence and gradients "
            "are 0 in every step: set distill.alpha above 0 to add cross entropy, or set distill.teacher to another "
            "model.",
        )
    if distill.cache == "disk" and distill.teacher == AVERAGE:
        yield (
            "distill.cache",
            "distill.cache is disk, but distill.teacher=average changes with every step: set distill.cache=off.",
        )
    if distill.served and distill.temperature != 1:
        yield (
            "distill.temperature",
            f"distill.temperature is {distill.temperature:g}, but a server returns log-probabilities at temperature 1: "
            "set distill.temperature=1, or set distill.teacher to a model.",
        )
    if distill.cache == "disk" and set(distill.named) == {DATA}:
        yield "distill.cache", "distill.cache is disk, but distill.teacher=data runs no model: set distill.cache=off."
    if distill.teachers is None:
        return
    if paths := [path for path in distill.teachers.values() if path in (BASE, AVERAGE)]:
        yield (
            "distill.teachers",
            f"distill.teachers contains {paths[0]}, the student itself: use other models, or set distill.teacher.",
        )
    if distill.teacher_column is not None:
        return
    names = [source_name(source) for source in (*(config.data.sources or ()), *(config.eval.sources or ()))]
    if not config.data.sources:
        yield (
            "distill.teachers",
            "distill.teachers assigns a teacher to each source of the data, but data.sources is not set: set "
            "data.sources; or set distill.teacher_column to the column with the teacher's name; or set distill.teacher "
            "to one model.",
        )
    elif missing := [name for name in dict.fromkeys(names) if name not in distill.teachers]:
        yield (
            "distill.teachers",
            f"distill.teachers has no teacher for the source {missing[0]}: add {missing[0]}: PATH.",
        )
    elif extra := [name for name in distill.teachers if name not in names]:
        yield (
            "distill.teachers",
            f"distill.teachers contains {extra[0]}, which is not a source. The sources are {', '.join(names)}.",
        )
    if config.eval.path is not None:
        yield (
            "eval.path",
            "eval.path has no source name, so distill.teachers has no teacher for it: set eval.sources, or eval.share.",
        )
    if config.eval.share is not None:
        yield (
            "eval.share",
            "eval.share has no source name, so distill.teachers has no teacher for it: set eval.sources.",
        )


def _begins_as_teacher(config: DistillConfig) -> bool:
    """Whether the student's first distribution equals the distribution of its only teacher."""
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
            f"distill.on_policy is {distill.on_policy:g}, but the data has the teacher's tokens only for its own "
            "answers: set distill.teacher to a model or a server, or set distill.on_policy=0.",
        )
    if distill.cache == "disk":
        yield (
            "distill.cache",
            "distill.cache is disk, but the student samples other answers in every epoch: set distill.cache=off, or "
            "distill.on_policy=0.",
        )
    if distill.alpha:
        yield (
            "distill.alpha",
            f"distill.alpha is {distill.alpha:g}, but cross entropy on the student's samples teaches nothing: set "
            "distill.alpha=0, or distill.on_policy=0.",
        )


def _teacher_ranks(config: DistillConfig) -> Iterator[tuple[str, str]]:
    distill = config.distill
    if config.teacher.ranks is None:
        return
    if distill.named and not any(map(is_opened, distill.named)):
        yield (
            "teacher.ranks",
            f"teacher.ranks is set, but weft does not open {distill.named[0]} as a model: remove teacher.ranks.",
        )
    if distill.cache == "disk":
        yield (
            "teacher.ranks",
            "teacher.ranks with distill.cache=disk: weft opens the teacher only to fill the cache, and its ranks would "
            "then be idle. Set distill.cache=off, or remove teacher.ranks.",
        )
    if distill.on_policy:
        yield (
            "teacher.ranks",
            f"teacher.ranks with distill.on_policy={distill.on_policy:g}: the student samples when a step starts, so "
            f"the teacher cannot process the next step in advance, and both would wait for each other. Remove "
            f"teacher.ranks, or set distill.on_policy=0.",
        )


_OWN_LOSS = Inert("train.loss", lambda c: True, "distill.loss defines the loss")
DISTILL = Rules(
    EXCLUSIVE,
    (*inert_rules(DistillConfig), _OWN_LOSS),
    _combinations,
    lambda value: adapter_presets(value, "distill"),
)
