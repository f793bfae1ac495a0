"""Parses rows with a label: data of reward models that do not learn from pairs.

{"prompt": ..., "completion": ..., "label": 0.7}, {"messages": [...], "label": 2}    a number, or a class, 0 or above
{"prompt": "...", "completions": ["step", ...], "labels": [true, ...]}               TRL's stepwise supervision

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.config.yaml12 import override
from weft.data.columns import add_named_columns
from weft.data.messages import describe_type, finite_number
from weft.data.records import ParseOptions, Record, parse_row
from weft.errors import UserError

_STEPS = ("prompt", "completions", "labels")


def parse_labelled(location: str, row: Mapping[str, Any], reading: ParseOptions, folder: str = "") -> Record:
    """The document of a row with a label. Arguments: as in parse_row. Raises UserError."""
    named = add_named_columns(location, row, reading.columns) if reading.columns else row
    present = {name: value for name, value in named.items() if value is not None}
    if reading.label == "steps":
        return _steps(location, present, reading)
    label = present.get("label", present.get("score"))
    if label is None:
        names = ", ".join(f"`{name}`" for name in row) or "no columns"
        raise UserError(
            f"{location}: has {names}, but no `label`. Name the column of the label in data.columns, as in "
            f"{override('data.columns', {'label': 'rating'})}."
        )
    number = finite_number(location, "label", int(label) if isinstance(label, bool) else label)
    if reading.label == "class" and (number != int(number) or not 0 <= number < reading.num_labels):
        raise UserError(
            f"{location}: `label` is {label}, but the classes are 0 to {reading.num_labels - 1} (reward.num_labels)."
        )
    document = {name: value for name, value in present.items() if name not in ("label", "score")}
    record = parse_row(location, document, replace(reading, columns={}), folder)
    return replace(record, margin=number)


def _steps(location: str, row: Mapping[str, Any], reading: ParseOptions) -> Record:
    if missing := [name for name in _STEPS if name not in row]:
        raise UserError(
            f"{location}: has no `{missing[0]}`: rows of reward.loss=process need `prompt`, `completions` and "
            "`labels`. Map your columns to them in data.columns."
        )
    prompt, steps, labels = (row[name] for name in _STEPS)
    if not isinstance(prompt, str) or not isinstance(steps, list) or not all(isinstance(s, str) for s in steps):
        raise UserError(f"{location}: `prompt` must be text, and `completions` a list of texts, one for each step.")
    if not isinstance(labels, list) or len(labels) != len(steps) or not steps:
        count = len(labels) if isinstance(labels, list) else describe_type(labels)
        raise UserError(f"{location}: `labels` must have one entry for each of {len(steps)} steps, not {count}.")
    if wrong := [label for label in labels if label not in (0, 1, True, False)]:
        raise UserError(f"{location}: `labels` must be true or false, not {wrong[0]!r}.")
    trained = [int(label) + 1 for label in labels]
    if reading.last_step_only:
        trained[:-1] = [0] * (len(steps) - 1)
    value = {"prompt": prompt, "steps": [step + reading.step_separator for step in steps], "trained": trained}
    return Record(location, "steps", value)
