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

from weft.errors import UserError
from weft.inference.types import Flags, Floats, Prompt, Sample
from weft.rl.dump_files import SCALARS, dump_paths, read_columns

Rows = list[NDArray[Any]]

# Field -> the names that files may have for it, best first: weft's, then those of other trainers.
NAMES: dict[str, tuple[str, ...]] = {
    "input_ids": ("input_ids", "tokens", "token_ids", "sequences"),
    "attention_mask": ("attention_mask",),
    "response_mask": ("response_mask", "loss_mask", "loss_masks", "action_mask", "token_loss_mask", "token_mask"),
    "old_log_probs": ("old_log_probs", "old_per_token_logps", "log_probs", "prev_logprobs", "action_log_probs"),
    "ref_log_prob": (
        "ref_log_prob", "ref_per_token_logps", "ref_log_probs", "ref_logprobs", "reference_policy_logprobs",
        "base_action_log_probs",
    ),
    "rollout_log_probs": (
        "rollout_log_probs", "sampling_per_token_logps", "generation_logprobs", "infer_logprobs", "inference_logprobs",
    ),
    "advantages": ("advantages",),
    "correction": ("correction", "rollout_is_weights", "importance_sampling_ratio"),
    **SCALARS,
}  # fmt: skip
# TRL and verl have the prompt, padded on the left, and the completion, padded on the right.
_HALVES = {
    "input_ids": (("prompt_ids", "completion_ids"), ("prompts", "responses")),
    "attention_mask": (("prompt_mask", "completion_mask"),),
}
# Masks of tokens, or of samples, that are 0 where response_mask covers tokens that are not trained.
_FURTHER_MASKS = ("tool_mask", "sample_loss_mask", "sample_mask")
_LENGTHS = ("total_lengths", "input_lengths", "sequence_lengths")  # tokens of each sequence, without padding
# Names of files that trainers write in addition to their batches -> the files with batches.
_OTHER_FILES = {
    ("input", "output", "score"): "it is text, as verl writes to trainer.rollout_data_dir, without token ids, logprobs "
    "and advantages. Write the DataProto of an update, as in data.save_to_disk('step.pkl')",
    ("response_length", "reward"): "it has samples before their advantages, as Miles and slime write with "
    "--save-debug-rollout-data. Give it a file of --save-debug-train-data",
    ("token_level_scores",): "it was written before the advantages were computed: write the DataProto of update_actor",
}


@dataclass(frozen=True)
class StepDump:
    """A read and checked file. samples: without padding; they have advantages, and old_logprobs, ref_logprobs and
    correction if the file has them. has_rollout: whether it has the engine's logprobs, too. loss, grad_norm: None if
    there is none. step_tokens: trained tokens of the step, of which the file may be a part; None: not in the file.
    width: the most tokens from the first to the last trained one, in one sample. columns: numbers of tokens of every
    sequence, with padding, in the arrays of the file; empty if sequences are not padded."""

    samples: list[Sample]
    has_rollout: bool
    loss: float | None
    grad_norm: float | None
    step_tokens: float | None
    width: int
    columns: tuple[int, ...] = ()


def read_step_dump(name: str, loss: float | None = None, grad_norm: float | None = None) -> StepDump:
    """Read another trainer's batch. name: as in dump_paths. loss, grad_norm: in place of the files' own. Raises
    UserError if a file cannot be read, lacks a field, or if the fields' shapes do not fit."""
    overrides = {key: value for key, value in (("loss", loss), ("grad_norm", grad_norm)) if value is not None}
    fields: dict[str, Any] = {}
    for path in dump_paths(name):
        fields = _joined(fields, _renamed(read_columns(path), path), path)
    fields = _without_repeated(fields) | overrides
    for field in ("input_ids", "response_mask", "advantages"):
        if field not in fields:
            raise UserError(f"{name}: has no {' or '.join(NAMES[field][:3])}. It has: {', '.join(sorted(fields))}.")
    numbers = {field: _number(fields.pop(field), field, name) for field in SCALARS if field in fields}
    if not numbers.keys() & {"loss", "grad_norm"}:
        raise UserError(
            f"{name}: has neither loss nor grad_norm, so there is nothing to compare: add one or both, or write them "
            "behind the command, as in --loss 0.012 --grad-norm 0.34."
        )
    arrays: dict[str, Rows] = {field: list(rows) for field, rows in fields.items()}
    count = len(arrays["input_ids"])
    for field, rows in arrays.items():
        if len(rows) != count:
            raise UserError(f"{name}: {field} has {len(rows)} rows, but input_ids has {count}.")
    samples = [
        _sample(index, {field: np.asarray(rows[index]) for field, rows in arrays.items()}, name)
        for index in range(count)
    ]
    if not any(sample.length for sample in samples):
        raise UserError(f"{name}: response_mask is 0 everywhere, so no token is trained.")
    spans = [np.flatnonzero(sample.sampled) for sample in samples if sample.length]
    return StepDump(
        samples,
        "rollout_log_probs" in arrays,
        numbers.get("loss"),
        numbers.get("grad_norm"),
        numbers.get("step_tokens"),
        max(int(span[-1] - span[0]) + 1 for span in spans),
        tuple(sorted({columns for field in ("input_ids", "response_mask") for columns in _columns(arrays[field])})),
    )


def _columns(rows: Rows) -> set[int]:
    """The number of columns of padded rows; empty if their lengths differ."""
    lengths = {len(row) for row in rows if np.ndim(row)}
    return lengths if len(lengths) == 1 else set()


def shifted(values: NDArray[Any], tokens: int) -> NDArray[Any]:
    """[T] with each entry shifted by `tokens` positions; vacated positions are 0 (False)."""
    moved = np.zeros_like(values)
    if tokens > 0:
        moved[tokens:] = values[:-tokens]
    else:
        moved[:tokens] = values[-tokens:]
    return moved


# ---------------------------------------------------------------- fields


def _renamed(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Field of NAMES -> its values: one for each sequence, or a scalar. Other names are omitted."""
    fields: dict[str, Any] = {}
    for field, aliases in NAMES.items():
        present = [alias for alias in aliases if alias in raw and raw[alias] is not None]
        for alias in present[1:]:
            if _contradict(raw[present[0]], raw[alias]):
                raise UserError(
                    f"{path}: has {present[0]} and {alias}, which are names of the same field. Keep only one of them."
                )
        if present:
            fields[field] = raw[present[0]]
    for field, halves in _HALVES.items():
        for prompt, completion in halves:
            if field not in fields and prompt in raw and completion in raw:
                if len(raw[prompt]) != len(raw[completion]):
                    raise UserError(
                        f"{path}: {prompt} has {len(raw[prompt])} rows, but {completion} has {len(raw[completion])}."
                    )
                pairs = zip(raw[prompt], raw[completion], strict=True)
                fields[field] = [np.concatenate([np.asarray(a), np.asarray(b)]) for a, b in pairs]
                if prompt == "prompts" and "attention_mask" not in fields:
                    raise UserError(
                        f"{path}: has prompts and responses, but no attention_mask, which tells padding from tokens: "
                        "add it, or input_ids without padding."
                    )
    if "completion_mask" in raw:
        fields.setdefault("response_mask", raw["completion_mask"])
    if not fields.keys() >= {"input_ids", "advantages"}:
        _refuse_other_files(raw, path)
    if "input_ids" not in fields:
        raise UserError(
            f"{path}: has no {' or '.join(NAMES['input_ids'][:3])}. It has: {', '.join(sorted(map(str, raw))[:30])}."
        )
    fields = {field: values if field in SCALARS else _rows(values, raw) for field, values in fields.items()}
    lengths = _lengths(raw)
    if lengths is not None and "attention_mask" not in fields:
        rows = zip(fields["input_ids"], lengths, strict=True)
        fields["attention_mask"] = [np.arange(len(ids)) < length for ids, length in rows]
    for name in _FURTHER_MASKS:
        if name in raw and "response_mask" in fields:
            rows = zip(fields["response_mask"], _rows(raw[name], raw), strict=True)
            fields["response_mask"] = [np.asarray(mask) * np.asarray(further) for mask, further in rows]
    number = next((name for name in ("partition", "sample_indices") if raw.get(name) is not None), None)
    if number is not None and len(raw[number]) == len(fields["input_ids"]):
        fields["number"] = list(raw[number])
    return fields


def _contradict(first: Any, second: Any) -> bool:
    """Whether two values of one field have the same shape, but differ."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and not np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
    return type(first) is type(second) and bool(np.any(first != second)) and not isinstance(first, list)


def _lengths(raw: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """Tokens of each sequence; None: not in the file."""
    if raw.get("cu_seqlens") is not None:
        return np.diff(_flat(raw["cu_seqlens"]))
    return next((_flat(raw[name]) for name in _LENGTHS if raw.get(name) is not None), None)


def _refuse_other_files(raw: Mapping[str, Any], path: Path) -> None:
    for names, reason in _OTHER_FILES.items():
        if all(name in raw for name in names):
            raise UserError(f"{path}: has no advantages: {reason}.")


def _rows(values: Any, raw: Mapping[str, Any]) -> list[Any]:
    """A value for each sequence. Sequences joined in one array are split by the array of lengths; a row that is a
    matrix with one row becomes that row."""
    if getattr(values, "ndim", 0) == 1:
        answers = raw.get("response_lengths")
        for lengths in (None if answers is None else _flat(answers), _lengths(raw)):
            if lengths is not None and len(lengths) != len(values) == lengths.sum():
                return list(np.split(values, np.cumsum(lengths)[:-1]))
    return [row[0] if np.ndim(row) == 2 and len(row) == 1 else row for row in values]


def _flat(values: Any) -> NDArray[np.int64]:
    return np.asarray(values, np.int64).reshape(-1)


def _joined(before: dict[str, Any], fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """The sequences of two files one after the other."""
    if before and before.keys() != fields.keys():
        raise UserError(
            f"{path}: has {', '.join(sorted(fields))}, but the files before have {', '.join(sorted(before))}."
        )
    if not before:
        return fields
    return {field: values if field in SCALARS else [*before[field], *values] for field, values in fields.items()}


def _without_repeated(fields: dict[str, Any]) -> dict[str, Any]:
    """Every sequence once, by `number`: ranks of tensor parallelism write the same ones."""
    numbers = fields.pop("number", None)
    if numbers is None:
        return fields
    first = list({number: index for index, number in reversed(list(enumerate(numbers)))}.values())[::-1]
    return {
        field: values if field in SCALARS else [values[index] for index in first] for field, values in fields.items()
    }


def _number(value: Any, name: str, path: str) -> float:
    try:
        number = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        number = np.zeros(0)
    if number.size != 1 or not np.isfinite(number).all():
        raise UserError(f"{path}: {name} must be one finite number.")
    return float(number.reshape(()))


# ---------------------------------------------------------------- samples


def _sample(index: int, row: Mapping[str, NDArray[Any]], path: str) -> Sample:
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

    tokens, rollout = ids[read].astype(np.int64), floats("rollout_log_probs")
    return Sample(
        Prompt(index, 0, tuple(tokens[: int(np.argmax(sampled[read]))].tolist()), ""),
        0,
        tokens,
        sampled[read],
        np.zeros(len(tokens), np.float32) if rollout is None else rollout,
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
