"""A training batch that another trainer wrote to a file: the samples, its loss and its gradient norm.

docs/how-to/compare-step.md describes the file. B: sequences. T: columns of the token ids. An array of sequences is a
list of B arrays, whose lengths may differ. Entry t of an array is the value of token t given the tokens before it; an
array with R < T columns has the values of the last R tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from weft import strict_json
from weft.errors import UserError
from weft.inference.types import Flags, Floats, Prompt, Sample

Rows = list[NDArray[Any]]

# Field -> the names that files may have for it: weft's, then those of verl, TRL and Miles.
NAMES: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids", "tokens"),
    "attention_mask": ("attention_mask",),
    "response_mask": ("response_mask", "loss_mask", "loss_masks"),
    "old_log_probs": ("old_log_probs", "old_per_token_logps", "log_probs"),
    "ref_log_prob": ("ref_log_prob", "ref_per_token_logps", "ref_log_probs"),
    "advantages": ("advantages",),
    "correction": ("correction", "rollout_is_weights", "importance_sampling_ratio"),
    "loss": ("loss", "pg_loss", "actor/loss", "train/loss"),
    "grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm"),
}
SCALARS = ("loss", "grad_norm")
# TRL has the prompt, padded on the left, apart from the completion, padded on the right.
_HALVES = {
    "input_ids": ("prompt_ids", "completion_ids"),
    "attention_mask": ("prompt_mask", "completion_mask"),
}
_SUFFIXES = (".npz", ".safetensors", ".jsonl")


@dataclass(frozen=True)
class StepDump:
    """A read and checked file. samples: without padding; they have advantages, and old_logprobs, ref_logprobs and
    correction if the file has them. loss, grad_norm: None if the file has none. width: the most tokens from the first
    to the last trained one, in one sample."""

    samples: list[Sample]
    loss: float | None
    grad_norm: float | None
    width: int


def read_step_dump(path: Path) -> StepDump:
    """Read a file of another trainer's batch. Raises UserError if the file cannot be read, lacks a field, or if the
    fields' shapes do not fit."""
    if path.suffix not in _SUFFIXES:
        raise UserError(f"{path}: must end in {', '.join(_SUFFIXES)}, which says how it is read.")
    fields = _renamed(_read_lines(path) if path.suffix == ".jsonl" else _read_arrays(path), path)
    for name in ("input_ids", "response_mask", "advantages"):
        if name not in fields:
            raise UserError(f"{path}: has no {' or '.join(NAMES[name])}. It has: {', '.join(sorted(fields))}.")
    numbers = {name: _number(fields[name], name, path) for name in SCALARS if name in fields}
    if not numbers:
        raise UserError(f"{path}: has neither loss nor grad_norm, so there is nothing to compare: add one or both.")
    arrays: dict[str, Rows] = {name: list(fields[name]) for name in fields if name not in SCALARS}
    count = len(arrays["input_ids"])
    for name, rows in arrays.items():
        if len(rows) != count:
            raise UserError(f"{path}: {name} has {len(rows)} rows, but input_ids has {count}.")
    samples = [
        _sample(index, {name: np.asarray(rows[index]) for name, rows in arrays.items()}, path) for index in range(count)
    ]
    if not any(sample.length for sample in samples):
        raise UserError(f"{path}: response_mask is 0 everywhere, so no token is trained.")
    spans = [np.flatnonzero(sample.sampled) for sample in samples if sample.length]
    return StepDump(
        samples, numbers.get("loss"), numbers.get("grad_norm"), max(int(span[-1] - span[0]) + 1 for span in spans)
    )


def shifted(values: NDArray[Any], tokens: int) -> NDArray[Any]:
    """[T] with each entry shifted by `tokens` positions; vacated positions are 0 (False)."""
    moved = np.zeros_like(values)
    if tokens > 0:
        moved[tokens:] = values[:-tokens]
    else:
        moved[:tokens] = values[-tokens:]
    return moved


# ---------------------------------------------------------------- files


def _read_arrays(path: Path) -> dict[str, Any]:
    """Name -> array, of a file of numpy or safetensors. Nothing is unpickled."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        from safetensors.torch import load_file

        tensors = load_file(path)
    except Exception as error:  # the exception for a damaged file depends on the library
        hint = " weft does not read arrays of objects: pad them, or write .jsonl." if "pickle" in str(error) else ""
        raise UserError(f"{path}: cannot be read: {error}.{hint}") from error
    return {name: (t.double() if t.is_floating_point() else t).numpy() for name, t in tensors.items()}


def _read_lines(path: Path) -> dict[str, Any]:
    """The fields of a .jsonl file: a line for each sequence, and the scalars in any one line."""
    columns: dict[str, list[Any]] = {}
    scalars: dict[str, Any] = {}
    count = 0
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = strict_json.parse(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: is not JSON: {error}.") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: must be a JSON object.")
        for name in [name for name in row if any(name in NAMES[scalar] for scalar in SCALARS)]:
            if name in scalars:
                raise UserError(
                    f"{path}, line {number}: has {name} again: write it once, because it is a number of the "
                    "whole batch."
                )
            scalars[name] = row.pop(name)
        if not row:
            continue
        if count and set(row) != set(columns):
            raise UserError(
                f"{path}, line {number}: has {', '.join(sorted(row))}, but the lines before have "
                f"{', '.join(sorted(columns))}."
            )
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
        count += 1
    return {**columns, **scalars}


def _renamed(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Field of NAMES -> its values. Other names are left out."""
    fields: dict[str, Any] = {}
    for name, aliases in NAMES.items():
        present = [alias for alias in aliases if alias in raw]
        if len(present) > 1:
            raise UserError(
                f"{path}: has {' and '.join(present)}, which are names of the same field. Keep only one of them."
            )
        if present:
            fields[name] = raw[present[0]]
    for name, (prompt, completion) in _HALVES.items():
        if name not in fields and prompt in raw and completion in raw:
            if len(raw[prompt]) != len(raw[completion]):
                raise UserError(
                    f"{path}: {prompt} has {len(raw[prompt])} rows, but {completion} has {len(raw[completion])}."
                )
            halves = zip(raw[prompt], raw[completion], strict=True)
            fields[name] = [np.concatenate([np.asarray(a), np.asarray(b)]) for a, b in halves]
    if "completion_mask" in raw:
        fields.setdefault("response_mask", raw["completion_mask"])
    return fields


def _number(value: Any, name: str, path: Path) -> float:
    try:
        number = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        number = np.zeros(0)
    if number.size != 1 or not np.isfinite(number).all():
        raise UserError(f"{path}: {name} must be one finite number.")
    return float(number.reshape(()))


# ---------------------------------------------------------------- samples


def _sample(index: int, row: Mapping[str, NDArray[Any]], path: Path) -> Sample:
    """One sequence without its padding."""
    location = f"{path}: row {index}"
    ids = row["input_ids"]
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{location}: input_ids must be token ids [T], not {ids.dtype} {list(ids.shape)}.")
    if "attention_mask" in row and row["attention_mask"].shape != ids.shape:
        raise UserError(
            f"{location}: attention_mask is {list(row['attention_mask'].shape)}, but input_ids is {list(ids.shape)}: "
            "it must have as many entries."
        )
    columns = {name: _aligned(values, name, len(ids), location) for name, values in row.items() if name != "input_ids"}
    for name in ("attention_mask", "response_mask"):
        if name in columns and not np.isin(columns[name], (0, 1)).all():
            raise UserError(f"{location}: {name} must have only 0 and 1.")
    sampled: Flags = columns["response_mask"].astype(np.bool_)
    read: Flags = columns.get("attention_mask", np.ones(len(ids))).astype(np.bool_)
    if (sampled & ~read).any():
        raise UserError(
            f"{location}: response_mask covers padding, where attention_mask is 0. "
            "Entry t of each must be about token t."
        )
    if not read.any():
        raise UserError(f"{location}: attention_mask is 0 everywhere.")
    if sampled[read][0]:
        raise UserError(
            f"{location}: response_mask covers the first token, which nothing predicts. Entry t must be about token t, "
            "not about the token after it."
        )
    for name, values in columns.items():
        if not np.isfinite(values[sampled]).all():
            raise UserError(f"{location}: {name} is not finite at a token that response_mask covers.")

    def floats(name: str) -> Floats | None:
        return np.nan_to_num(columns[name][read]).astype(np.float32) if name in columns else None

    tokens = ids[read].astype(np.int64)
    return Sample(
        Prompt(index, 0, tuple(tokens[: int(np.argmax(sampled[read]))].tolist()), ""),
        0,
        tokens,
        sampled[read],
        np.zeros(len(tokens), np.float32),
        np.zeros(len(tokens), np.int32),
        "end",
        reward=0.0,
        old_logprobs=floats("old_log_probs"),
        ref_logprobs=floats("ref_log_prob"),
        advantages=floats("advantages"),
        correction=floats("correction"),
    )


def _aligned(values: NDArray[Any], name: str, length: int, location: str) -> Floats:
    """[T] of a number or of an array [R], which belongs to the last R tokens; 0 before them."""
    try:
        values = values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{location}: {name} must be numbers.") from error
    if name in ("advantages", "correction") and values.size == 1:
        return cast(Floats, np.full(length, values.reshape(())))
    if values.ndim != 1 or not 0 < len(values) <= length:
        raise UserError(
            f"{location}: {name} is {list(values.shape)}, but input_ids is [{length}]: it must have as many entries, "
            "or fewer, which belong to the last tokens."
        )
    return cast(Floats, np.concatenate([np.zeros(length - len(values)), values]))
