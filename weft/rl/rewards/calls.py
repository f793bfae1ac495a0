"""Calls of one reward function, in a worker process or in the controller. Imports neither torch nor numpy.

Three kinds of functions are recognised: TRL's `reward(prompts, completions, completion_ids, **columns) -> list[float |
None]`, the same as a coroutine function, and, by its parameter names, verl's `compute_score(data_source, solution_str,
ground_truth, extra_info) -> float | dict`, which may be a coroutine function.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from weft.data.image_files import PromptImages
from weft.errors import UserError
from weft.importing import import_named
from weft.rl.rewards.builtin import BUILT_IN, COMPARING, completion_text

STANDARD = ("prompts", "completions", "completion_ids")
_OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward function of the config. name: its name in metrics. path: a built-in's name, or an import path. options:
    from rl.reward_options. code: the pickled function, if a program passed one that cannot be imported."""

    name: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    code: bytes | None = None


@dataclass(frozen=True, slots=True)
class RewardSignature:
    """The parameters of an imported function. columns: names of all parameters. required: columns of the data that it
    needs. takes_all: whether it has `**columns`. reference: whether it needs a reference answer. source: file and line
    of its definition; "" if Python does not know them."""

    kind: Literal["list", "async", "verl"]
    columns: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool
    reference: bool
    source: str = ""


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """The samples of one call: lists of equal length, with columns by name."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, i: int) -> RewardBatch:
        """A batch of sample `i` alone."""
        columns = {name: values[i : i + 1] for name, values in self.columns.items()}
        index = slice(i, i + 1)
        return RewardBatch(self.prompts[index], self.completions[index], self.completion_ids[index], columns)


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """A function's result for one sample. value: None if the function returned None or failed. notes: the whole dict
    that a function returned, if any. late: whether the error is that the time limit was exceeded."""

    value: float | None
    error: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    late: bool = False


class _CountError(Exception):
    """A function returned more or fewer values than completions, so they cannot be assigned to samples."""


class RewardFunction:
    """An imported reward function."""

    def __init__(self, spec: RewardSpec) -> None:
        """UserError if the function does not exist or has unsupported parameters."""
        self.spec = spec
        self._call = _load(spec)
        if not callable(self._call):
            raise UserError(f"rl.reward: {spec.path} is a {type(self._call).__name__}, which cannot be called.")
        self.signature = _describe(spec, self._call)

    def __call__(self, batch: RewardBatch, runner: asyncio.Runner | None = None) -> list[RewardOutcome]:
        """An outcome for each sample. If a call with all samples fails, each sample is tried alone. runner: required
        for coroutine functions and verl's kind. UserError if a call returns more or fewer values than completions."""
        batch = replace(batch, columns={name: _opened(values) for name, values in batch.columns.items()})
        try:
            return self._outcomes(batch, runner)
        except _CountError as error:
            raise UserError(
                f"rl.reward: {self.spec.name} {error}: a reward function returns a list with one number, or None, for "
                "each completion, in their order."
            ) from error

    def _outcomes(self, batch: RewardBatch, runner: asyncio.Runner | None) -> list[RewardOutcome]:
        if self.signature.kind != "list":
            assert runner is not None
            return runner.run(self._side_by_side(batch))
        try:
            return _outcomes(self._list(batch), len(batch))
        except _CountError:
            raise
        except (Exception, SystemExit) as error:
            if len(batch) == 1:
                return [RewardOutcome(None, _last_line(error))]
        return [outcome for i in range(len(batch)) for outcome in self._outcomes(batch.only(i), runner)]

    def _list(self, batch: RewardBatch) -> Any:
        standard = {name: getattr(batch, name) for name in STANDARD if self._takes(name)}
        columns = {name: list(values) for name, values in batch.columns.items() if self._takes(name)}
        return self._call(**{**columns, **standard, **self.spec.options})

    def _takes(self, name: str) -> bool:
        return self.signature.takes_all or name in self.signature.columns

    async def _side_by_side(self, batch: RewardBatch) -> list[RewardOutcome]:
        """Call the function once per sample, concurrently, so that a slow or failing call affects no other."""
        ask = self._verl if self.signature.kind == "verl" else self._call_one
        return list(await asyncio.gather(*(ask(batch.only(i)) for i in range(len(batch)))))

    async def _call_one(self, batch: RewardBatch) -> RewardOutcome:
        try:
            return _outcomes(await self._list(batch), 1)[0]
        except _CountError:
            raise
        except (Exception, SystemExit) as error:
            return RewardOutcome(None, _last_line(error))

    async def _verl(self, batch: RewardBatch) -> RewardOutcome:
        row = {name: values[0] for name, values in batch.columns.items()}
        truth = row.get("ground_truth")
        if truth is None and isinstance(row.get("reward_model"), Mapping):
            truth = row["reward_model"].get("ground_truth")
        values = {
            "data_source": row.get("data_source"),
            "solution_str": completion_text(batch.completions[0]),
            "ground_truth": row.get("answer") if truth is None else truth,
            "extra_info": row.get("extra_info"),
        }
        try:
            returned = self._call(**{name: values[name] for name in _OF_VERL if self._takes(name)}, **self.spec.options)
            returned = await returned if inspect.isawaitable(returned) else returned
            if not isinstance(returned, Mapping):
                return _outcome(returned)
            if "score" not in returned:
                raise ValueError(f"returned a dict without `score`: it has {', '.join(map(str, returned))}")
            return RewardOutcome(_outcome(returned["score"]).value, _outcome(returned["score"]).error, {**returned})
        except (Exception, SystemExit) as error:
            return RewardOutcome(None, _last_line(error))


def _load(spec: RewardSpec) -> Any:
    if spec.path in BUILT_IN:
        return BUILT_IN[spec.path]
    if spec.code is None:
        return import_named(spec.path, "rl.reward")
    try:
        return pickle.loads(spec.code)
    except Exception as error:
        raise UserError(
            f"rl.reward: {spec.name} cannot be unpickled in the reward process: {_last_line(error)}. Move it to a "
            "module, and import it from there."
        ) from error


def _describe(spec: RewardSpec, call: Callable[..., Any]) -> RewardSignature:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"rl.reward: weft cannot read the parameters of {spec.path}. Wrap it in a function.") from None
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in parameters if p.name in names and p.default is p.empty]
    if unknown := [name for name in spec.options if name not in names and not takes_all]:
        raise UserError(
            f"rl.reward_options: {spec.name} has no parameter {unknown[0]}; it has {', '.join(names) or 'none'}."
        )
    needed = [name for name in required if name not in (*STANDARD, *spec.options)]
    if {"solution_str", "ground_truth"} <= set(names):
        columns_needed = [name for name in needed if name not in _OF_VERL]
        columns = (*names, "reward_model", "answer")
        return RewardSignature("verl", columns, tuple(columns_needed), takes_all, reference=True, source=_source(call))
    if required[:2] == ["args", "sample"] or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise UserError(
            f"rl.reward: {spec.path} has the parameters {', '.join(p.name for p in parameters)}; a reward function is "
            "reward(prompts, completions, completion_ids, **columns) -> list of numbers, or verl's compute_score("
            "data_source, solution_str, ground_truth, extra_info). docs/how-to/write-a-reward.md shows both."
        )
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
    reference = spec.path in COMPARING or (spec.path == "regex" and "(" in str(spec.options.get("pattern", "")))
    kind: Literal["list", "async"] = "async" if is_async else "list"
    return RewardSignature(kind, tuple(names), tuple(needed), takes_all, reference, _source(call))


def _source(call: Callable[..., Any]) -> str:
    """The file and line where a function, or an object's `__call__`, is defined; "" if unknown."""
    function = inspect.unwrap(call.func if isinstance(call, partial) else call)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _opened(values: Sequence[Any]) -> Sequence[Any]:
    """A column with images as lists of PIL images, each opened once for all samples of its prompt."""
    shown = {id(value): value for value in values if isinstance(value, PromptImages)}
    pictures = {key: images.pictures() for key, images in shown.items()}
    return [pictures.get(id(value), value) for value in values]


def _outcomes(returned: Any, count: int) -> list[RewardOutcome]:
    if isinstance(returned, str | Mapping) or not hasattr(returned, "__len__"):
        raise TypeError(f"returned {type(returned).__name__}, not a list of {count} numbers")
    if len(returned) != count:
        raise _CountError(f"returned {len(returned)} values for {count} completions")
    return [_outcome(value) for value in returned]


def _outcome(value: Any) -> RewardOutcome:
    if value is None:
        return RewardOutcome(None)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return RewardOutcome(None, f"returned {value!r:.80}, which is not a number")
    return RewardOutcome(number) if math.isfinite(number) else RewardOutcome(None, f"returned {number}")


def _last_line(error: BaseException) -> str:
    """The traceback's last line, with the place in the user's code where the error was raised: the innermost frame that
    is neither Python's library nor an installed package's, if there is one."""
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if not frames:
        return last
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(_LIBRARIES)), frames[-1])
    return f"{last} ({frame.filename}:{frame.lineno})"
