"""The reward functions that come with weft, in TRL's signature. Imports nothing heavy: workers start with it.

The reference answer is the column `answer`, or where there is none `solution`, `ground_truth`, or what is under
`ground_truth` in `reward_model` (verl's files). Keyword arguments with defaults are set by rl.reward_options.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weft.config.rl_schema import NEEDS_MATH_VERIFY

Completion = str | Sequence[Mapping[str, Any]]

REFERENCES = ("answer", "solution", "ground_truth", "reward_model")
_SECONDS = 5  # that math-verify may think about one answer, which is wrong if it takes longer


def exact_match(
    completions: Sequence[Completion], after: str | None = None, ignore_case: bool = False, **columns: Any
) -> list[float]:
    """1 where the completion is the reference answer, white space around it apart.

    after: what stands before the answer, as in `####`: only what follows its last occurrence counts.
    """
    return [
        float(_plain(_behind(after, text), ignore_case) == _plain(reference, ignore_case))
        for text, reference in zip(
            map(completion_text, completions), references(len(completions), columns), strict=True
        )
    ]


def regex(completions: Sequence[Completion], pattern: str, **columns: Any) -> list[float]:
    """1 where the pattern is found. With a group in it, what the group holds in the last match must be the reference
    answer. pattern: a regular expression of Python's; `.` matches line breaks, too."""
    compiled = re.compile(pattern, re.DOTALL)
    texts = [completion_text(completion) for completion in completions]
    if not compiled.groups:
        return [float(compiled.search(text) is not None) for text in texts]
    found = [[match.group(1) or "" for match in compiled.finditer(text)][-1:] for text in texts]
    expected = references(len(completions), columns)
    return [
        float([reference.strip()] == [text.strip() for text in last])
        for reference, last in zip(expected, found, strict=True)
    ]


def format(completions: Sequence[Completion], tags: Sequence[str] = ("think",), **_: Any) -> list[float]:
    """1 where the completion is made of these tags, each once, in order, and not empty: `<think>...</think>`.

    Behind a single tag an answer has to follow; behind the last of several nothing may. The first opening tag may be
    missing: some chat templates write it when they ask for an answer.
    """
    return [float(_has_format(completion_text(completion), tags)) for completion in completions]


def length(completion_ids: Sequence[Sequence[int]], target: int = 100, **_: Any) -> list[float]:
    """-|n - target| / target for a completion of n tokens: 0 at best."""
    return [-abs(len(ids) - target) / target for ids in completion_ids]


def math(completions: Sequence[Completion], boxed: bool = False, **columns: Any) -> list[float]:
    """1 where the completion's final answer equals the reference mathematically, by math-verify.

    What comes behind `</think>` counts, where there is one. boxed: only an answer in \\boxed{} counts.
    """
    expected = references(len(completions), columns)
    return [
        _same(reference, completion_text(completion), boxed)
        for reference, completion in zip(expected, completions, strict=True)
    ]


BUILT_IN: dict[str, Callable[..., list[float]]] = {
    "math": math,
    "exact_match": exact_match,
    "regex": regex,
    "format": format,
    "length": length,
}
# Too quick to need a process, and they cannot hang.
INLINE = ("exact_match", "format", "length")
# Those that compare with the reference answer.
COMPARING = ("math", "exact_match")


def completion_text(completion: Completion) -> str:
    """The text of a completion; of several messages, what the assistant said last."""
    if isinstance(completion, str):
        return completion
    said = [message.get("content") or "" for message in completion if message.get("role") == "assistant"]
    return str(said[-1]) if said else ""


def references(count: int, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The reference answer of each of so many samples. Raises ValueError where one has none."""
    return [_reference({name: columns[name][i] for name in REFERENCES if name in columns}) for i in range(count)]


def has_reference(columns: Mapping[str, Any]) -> bool:
    """Whether a row has a reference answer."""
    return any(True for _ in _found(columns))


def _reference(row: Mapping[str, Any]) -> str:
    for value in _found(row):
        return str(value)
    raise ValueError("there is no column `answer`; set data.columns={answer: ...}")


def _found(row: Mapping[str, Any]) -> Iterator[Any]:
    for name in REFERENCES:
        value = row.get(name)
        if isinstance(value, Mapping):
            value = value.get("ground_truth")
        if value is not None:
            yield value


def _behind(mark: str | None, text: str) -> str:
    return text if mark is None else text.rpartition(mark)[2] if mark in text else ""


def _plain(text: str, ignore_case: bool) -> str:
    return text.strip().lower() if ignore_case else text.strip()


def _has_format(text: str, tags: Sequence[str]) -> bool:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rest = text.strip()
    for number, tag in enumerate(tags):
        opened = rest.startswith(f"<{tag}>")
        if not opened and number > 0:
            return False
        inside, closed, rest = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not closed or not inside.strip() or any(mark in inside for mark in marks):
            return False
        rest = rest.strip()
    return not rest if len(tags) > 1 else bool(rest) and not any(mark in rest for mark in marks)


def _same(reference: str, text: str, boxed: bool) -> float:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError(NEEDS_MATH_VERIFY) from None

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    said = text.rpartition("</think>")[2]
    if boxed and r"\boxed" not in said:
        return 0.0
    expected = reference.rpartition("####")[2].strip()  # GSM8K's answers end with #### and the number
    if expected == said.strip():
        return 1.0
    marked = expected if "$" in expected or r"\boxed" in expected else f"${expected}$"
    return float(
        verify(parse(marked, parsing_timeout=_SECONDS), parse(said, parsing_timeout=_SECONDS), timeout_seconds=_SECONDS)
    )
