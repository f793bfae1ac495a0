"""Freezes parameters."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import UserError
from weft.models.patterns import matches, similar_names
from weft.models.train_module import TrainModule
from weft.models.vision import projector_parts, vision_parts

PRESETS = ("vision", "projector", "language")


def freeze(module: TrainModule, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match a pattern or belong to a preset.

    Raises UserError if a pattern matches nothing, if only some names of a tied parameter match, or if every parameter
    would be frozen.
    """
    patterns = resolved(module, patterns)
    names = dict(module.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise UserError(f"model.freeze: {pattern!r} matches no parameter{similar_names(pattern, names)}")
    frozen = {name for name in names if any(matches(pattern, name) for pattern in patterns)}
    tied = {id(names[name]): name for name in frozen}
    for name, parameter in names.items():
        if id(parameter) in tied and name not in frozen:
            raise UserError(
                f"model.freeze: {tied[id(parameter)]} and {name} are one tensor (tied). Freeze both or neither."
            )
    if names and len(frozen) == len(names):
        raise UserError("model.freeze: every parameter is frozen, so there is nothing to train. Remove a pattern.")
    for name in frozen:
        names[name].requires_grad_(False)


def resolved(module: TrainModule, patterns: Sequence[str]) -> tuple[str, ...]:
    """The patterns, with each preset replaced by names of modules or parameters: `vision` is the tower without its
    projector, `projector` the modules between tower and decoder, `language` the decoder and the head. Raises UserError
    for a preset if the model has no tower."""
    out: list[str] = []
    for pattern in patterns:
        out += _parts(module, pattern) if pattern in PRESETS else [pattern]
    return tuple(out)


def _parts(module: TrainModule, preset: str) -> list[str]:
    facts = module.facts
    tower, projector = vision_parts(module.base, facts), projector_parts(module.base, facts)
    if not tower:
        raise UserError(
            f"model.freeze: {preset!r} names a part of a vision-language model, but this model has no tower."
        )
    if preset == "language":
        return [facts.decoder, facts.head]
    if preset == "projector":
        return list(projector)
    names = [name for part in tower for name, _ in module.get_submodule(part).named_parameters(prefix=part)]
    return [name for name in names if not any(matches(outer, name) for outer in projector)]
