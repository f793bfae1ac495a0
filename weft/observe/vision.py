"""The lines that a run prints about a vision model: its parts, and the room that an image takes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.engine.engine import Engine
from weft.models.freeze import PRESETS, resolved
from weft.models.patterns import matches
from weft.models.vision import vision_parts
from weft.terminal import count


def vision_lines(engine: Engine, elements: Mapping[str, int], pixels: Mapping[str, int]) -> list[str]:
    """Lines of the opening; none without a vision tower. elements: parameter -> its elements over all ranks. pixels:
    data.image_pixels."""
    if not vision_parts(engine.module.base, engine.module.facts):
        return []
    why_not = engine.built.support.images
    parts = ", ".join(_part(engine, preset, elements) for preset in PRESETS)
    images = f"refused, because {why_not}" if why_not else _image(engine, pixels)
    return [f"parts    {parts} (model.freeze)", f"images   {images}"]


def _part(engine: Engine, preset: str, elements: Mapping[str, int]) -> str:
    """Describes a part of the model by its name in model.freeze: its size, and how much of it is trained."""
    patterns = resolved(engine.module, [preset])
    parameters = {n: p for n, p in engine.module.named_parameters() if any(matches(pattern, n) for pattern in patterns)}
    elements_of_part, trained = (
        sum(elements[n] for n in parameters),
        sum(elements[n] for n, p in parameters.items() if p.requires_grad),
    )
    state = {0: "frozen", elements_of_part: "trained"}.get(trained, f"{count(trained)} of it trained")
    return f"{preset} {count(elements_of_part)} {state}"


def _image(engine: Engine, pixels: Mapping[str, int]) -> str:
    """Describes how much of a row a document with images takes, and the largest image if the config limits its size."""
    vision, row_tokens = engine.built.vision, engine.config.step.max_tokens_per_device
    ranks = engine.planner.image_room.ranks
    limit = f"a document with images is not cut, and has to fit a row of {row_tokens:,} tokens"
    if ranks > 1:
        limit = (
            f"a document with images has to fit {ranks} rows of {row_tokens:,} tokens, over which it is cut (mesh.cp)"
        )
    if vision is None or "max" not in pixels or "image_grid_thw" not in vision.smallest:
        return limit
    merge = int(vision.smallest["image_grid_thw"][0, 1])
    tokens = pixels["max"] // (vision.patch * merge) ** 2
    patch_tokens = math.ceil(engine.built.flops.tower_memory * tokens * merge**2)
    return (
        f"an image takes up to {tokens + patch_tokens:,} tokens of a row: {tokens:,}, and {patch_tokens:,} for its "
        f"patches; {limit}"
    )
