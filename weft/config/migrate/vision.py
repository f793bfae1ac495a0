"""Other trainers' defaults for models with images."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.config.migrate.draft import Draft
from weft.config.yaml12 import written
from weft.errors import UserError
from weft.files import regular_file

_CALLED = re.compile(r"(?i)(^|[-_/.\d])(vl|vlm|vision|llava|internvl|smolvlm|pixtral)([-_/.\d]|$)")
_TOWER = ("vision_config",)  # keys of config.json that mark a vision tower
_ADAPTED = (
    "the trainer adapted only the language model, and `lora.targets: all-linear` also adapts the vision tower: set "
    "`lora.targets: ['*language_model.layers.*']`."
)


def add_vision(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set the trainer's defaults for models with images, if the model accepts images. If that is unknown, note them."""
    entries = {draft.entry(name) for name in settings}
    unsaid = {name: value for name, value in draft.trainer.table.vision.items() if name not in entries}
    path = str(draft.value("model.path"))
    certain = bool(_CALLED.search(path)) or len(unsaid) < len(draft.trainer.table.vision)
    takes_images = certain or config_has(path, _TOWER)
    draft.images = bool(takes_images)
    if takes_images:
        _take(draft, unsaid)
    elif takes_images is None and unsaid:
        imagined = Draft(draft.trainer, draft.schema)
        _take(imagined, unsaid)
        advice = " and ".join(f"`{key}: {written(value)}`" for key, (value, _, _) in imagined.values.items())
        draft.notes["(images)"] = f"for a model with images, {draft.trainer.short} has other defaults: set {advice}."
    _settle_adapters(draft)


def _take(draft: Draft, unsaid: Mapping[str, Any]) -> None:
    for name, value in unsaid.items():
        origin = f"{draft.trainer.short}'s default for a model with images"
        draft.take_meaning(draft.meaning(name, value) or {}, value, name, origin)


def _settle_adapters(draft: Draft) -> None:
    """If the old config has adapters, advise on lora.targets instead of freezing the vision tower."""
    if draft.value("lora.rank") is None or "vision" not in draft.value("model.freeze", ()):
        return
    names = draft.values.pop("model.freeze")[2]
    if draft.value("lora.targets", "all-linear") == "all-linear":
        draft.notes[names] = _ADAPTED


def config_has(path: str, keys: Iterable[str]) -> bool | None:
    """Whether the config.json of a model has one of these keys; None if there is no such file on this machine."""
    try:
        file = regular_file(Path(os.path.expanduser(path)) / "config.json", "a model's config")
        return re.search(f'"({"|".join(keys)})"', file.read_text("utf-8")) is not None
    except (OSError, ValueError, UserError):
        return None
