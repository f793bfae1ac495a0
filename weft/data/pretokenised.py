"""Rows of token ids: their checks, and which tokens are trained.

{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}   as HuggingFace's models take them: not shifted, -100 is not trained
{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}   1 is trained; also TRL's completion_mask and assistant_masks
{"input_ids": [5, 6, 7]}                           every token is trained
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.data.messages import describe_type
from weft.errors import UserError

IGNORED = -100
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
_LARGEST = 2**31 - 1


def read_tokens(location: str, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(token ids, 1 for each trained token, else 0) of a row. Raises UserError."""
    ids = _integers(location, row, "input_ids")
    if not ids or not 0 <= min(ids) <= max(ids) <= _LARGEST:
        raise UserError(f"{location}: `input_ids` must be token ids, one or more, from 0.")
    _check_whole(location, row, len(ids))
    named = [name for name in ("labels", *_MASKS) if row.get(name) is not None]
    if len(named) > 1:
        raise UserError(f"{location}: has `{named[0]}` and `{named[1]}`, which both say what is trained. Keep one.")
    if not named:
        return ids, [1] * len(ids)
    values = _integers(location, row, named[0])
    if len(values) != len(ids):
        raise UserError(f"{location}: `{named[0]}` has {len(values)} values, and `input_ids` {len(ids)}.")
    return ids, _of_labels(location, ids, values) if named[0] == "labels" else _of_mask(location, named[0], values)


def _of_labels(location: str, ids: list[int], labels: list[int]) -> list[int]:
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORED, token):
            raise UserError(
                f"{location}: `labels` has {label} at {place}, where `input_ids` has {token}: a label is the token "
                "itself, not the next one, or -100, which is not trained."
            )
    return [int(label != IGNORED) for label in labels]


def _of_mask(location: str, name: str, values: list[int]) -> list[int]:
    if not set(values) <= {0, 1}:
        raise UserError(f"{location}: `{name}` must be 1 for each token that is trained, and 0 for others.")
    return values


def _check_whole(location: str, row: Mapping[str, Any], length: int) -> None:
    """Raises UserError if a row has padding or several documents: all of it would be trained as one document."""
    mask, positions = row.get("attention_mask"), row.get("position_ids")
    if mask is not None and (not isinstance(mask, list) or mask != [1] * length):
        raise UserError(f"{location}: `attention_mask` leaves tokens out: weft pads by itself, so leave padding out.")
    if positions is not None and positions != list(range(length)):
        raise UserError(
            f"{location}: `position_ids` begin anew: several documents in one row. weft packs by itself: write one a "
            "row."
        )


def _integers(location: str, row: Mapping[str, Any], name: str) -> list[int]:
    values = row[name]
    if not isinstance(values, list):
        raise UserError(f"{location}: `{name}` must be a list of integers, not {describe_type(values)}.")
    if wrong := [value for value in values if not isinstance(value, int)]:
        raise UserError(f"{location}: `{name}` must hold integers, and has {wrong[0]!r:.40}.")
    return [int(value) for value in values]
