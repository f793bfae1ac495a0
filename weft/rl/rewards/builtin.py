"""Reward functions that come with weft, with TRL's signature. Every reward worker imports this file, so it imports
nothing heavy.

The reference answer is the column `answer`, `solution` or `ground_truth`, the first that exists, or `ground_truth`
inside `reward_model` (verl's files). rl.reward_options sets keyword arguments that have defaults.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]

REFERENCES = ("answer", "solution", "ground_truth", "reward_model")
_SECONDS = 5  # limit of math-verify on one answer; a slower one counts as wrong


def exact_match(
    completions: Sequence[Completion], after: str | None = None, ignore_case: bool = False, **columns: Any
) -> list[float]:
    """1 where the completion equals the reference answer, ignoring surrounding white space.

    after: a mark before the answer, such as `####`; only the text after its last occurrence is compared, in the
    completion, which must have it, and in a reference that has it (GSM8K's raw answers).
    """

    def plain(text: str) -> str:
        text = text.rpartition(after)[2].strip() if after else text.strip()
        return text.lower() if ignore_case else text

    texts, expected = map(completion_text, completions), references(len(completions), columns)
    return [
        float((not after or after in text) and plain(text) == plain(reference))
        for text, reference in zip(texts, expected, strict=True)
    ]


def regex(completions: Sequence[Completion], pattern: str, **columns: Any) -> list[float]:
    """1 where the pattern (a Python regular expression whose `.` also matches line breaks) is found.

    If the pattern has groups, the first group of the last match must equal the reference answer. If the pattern also
    matches in the reference, and matches more than the group, as `#### (.+)` in GSM8K's `... #### 42`, the group is the
    reference answer.
    """
    compiled = re.compile(pattern, re.DOTALL)
    texts = [completion_text(completion) for completion in completions]
    if not compiled.groups:
        return [float(compiled.search(text) is not None) for text in texts]

    def last(text: str) -> re.Match[str] | None:
        return next(iter([*compiled.finditer(text)][-1:]), None)

    def answer(reference: str) -> str:
        match = last(reference)
        marked = match is not None and (match.group(1) or "").strip() != match.group(0).strip()
        return (match.group(1) or "" if match is not None and marked else reference).strip()

    matched = [None if (match := last(text)) is None else (match.group(1) or "").strip() for text in texts]
    expected = references(len(completions), columns)
    return [float(text == answer(reference)) for reference, text in zip(expected, matched, strict=True)]


def format(completions: Sequence[Completion], tags: Sequence[str] = ("think",), **_: Any) -> list[float]:
    """1 where the completion consists of these tags, each once, in order and not empty, as in `<think>...</think>`.

    With a single tag, an answer must follow it. With several, nothing may follow the last. The first opening tag may be
    missing, because some chat templates write it in the prompt.
    """
    return [float(_has_format(completion_text(completion), tags)) for completion in completions]


def length(completion_ids: Sequence[Sequence[int]], target: int = 100, **_: Any) -> list[float]:
    """-|n - target| / target for a completion of n tokens; at most 0."""
    return [-abs(len(ids) - target) / target for ids in completion_ids]


def math(completions: Sequence[Completion], boxed: bool = False, **columns: Any) -> list[float]:
    """1 where math-verify finds the final answer mathematically equal to the reference. If the completion has a
    `</think>`, only the text after it counts.

    boxed: whether a completion without \\boxed{} scores 0.
    """
    expected = references(len(completions), columns)
    return [
        _is_equal_answer(reference, completion_text(completion), boxed)
        for reference, completion in zip(expected, completions, strict=True)
    ]


BUILT_IN: dict[str, Callable[..., list[float]]] = {
    "math": math,
    "exact_match": exact_match,
    "regex": regex,
    "format": format,
    "length": length,
}
# Run in the controller: they are fast and cannot hang.
INLINE = ("exact_match", "format", "length")
# Always need the reference answer.
COMPARING = ("math", "exact_match")


def completion_text(completion: Completion) -> str:
    """The text of a completion; for a list of messages, the last assistant message."""
    if isinstance(completion, str):
        return completion
    answers = [message.get("content") or "" for message in completion if message.get("role") == "assistant"]
    return str(answers[-1]) if answers else ""


def references(count: int, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The reference answers of `count` samples. ValueError if one is missing."""
    return [_reference({name: columns[name][i] for name in REFERENCES if name in columns}) for i in range(count)]


def has_reference(columns: Mapping[str, Any]) -> bool:
    """Whether a row has a reference answer."""
    return any(True for _ in reference_answers(columns))


def _reference(row: Mapping[str, Any]) -> str:
    for value in reference_answers(row):
        return str(value)
    raise ValueError("there is no column `answer`; set 'data.columns={answer: COLUMN}'")


def reference_answers(row: Mapping[str, Any]) -> Iterator[Any]:
    """The reference answers of a row, the one that counts first."""
    for name in REFERENCES:
        value = row.get(name)
        if isinstance(value, Mapping):
            value = value.get("ground_truth")
        if value is not None:
            yield value


def _has_format(text: str, tags: Sequence[str]) -> bool:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    remainder = text.strip()
    for number, tag in enumerate(tags):
        opened = remainder.startswith(f"<{tag}>")
        if not opened and number > 0:
            return False
        inside, closed, remainder = remainder.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not closed or not inside.strip() or any(mark in inside for mark in marks):
            return False
        remainder = remainder.strip()
    return not remainder if len(tags) > 1 else bool(remainder) and not any(mark in remainder for mark in marks)


def _is_equal_answer(reference: str, text: str, boxed: bool) -> float:
    try:
        from math_verify import parse, verify
    except ImportError:
        from weft.config.rl_schema import NEEDS_MATH_VERIFY  # which takes longer to import than all the rest

        raise ImportError(NEEDS_MATH_VERIFY) from None

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = text.rpartition("</think>")[2]
    if boxed and r"\boxed" not in answer:
        return 0.0
    expected = reference.rpartition("####")[2].strip()  # GSM8K's answers end with #### and the number
    if expected == answer.strip():
        return 1.0
    marked = expected if "$" in expected or r"\boxed" in expected else f"${expected}$"
    return float(
        verify(
            parse(marked, parsing_timeout=_SECONDS), parse(answer, parsing_timeout=_SECONDS), timeout_seconds=_SECONDS
        )
    )
