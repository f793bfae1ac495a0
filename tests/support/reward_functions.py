"""Reward functions as users write them, good ones and bad ones. No weft, no torch: processes import this."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any


def as_number(completions: list[str], **_: Any) -> list[float | None]:
    """What a completion says: a number, `none`, or one of the ways to fail."""
    return [_answered(text) for text in completions]


def _answered(text: str) -> float | None:
    if text == "raise":
        raise ValueError("no such thing")
    if text == "exit":
        sys.exit(3)
    if text == "crash":
        os._exit(7)
    if text == "hang":
        time.sleep(60)
    if text == "print":
        print("a reward may print")
        return 1.0
    return None if text == "none" else float(text)


async def slow_number(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Takes a while, as a call over the network does."""
    await asyncio.sleep(0.3)
    return [_answered(text) or 0.0 for text in completions]


def seen(prompts: Any, completions: Any, completion_ids: Any, answer: list[str], missing: Any = None) -> list[float]:
    """Prompts, completions, ids and columns belong together; chats come as messages."""
    if isinstance(prompts[0], list):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        assert all(completion[-1]["role"] == "assistant" for completion in completions)
        completions = [completion[-1]["content"] for completion in completions]
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer) and missing is None
    return [
        float(text == right and len(ids) == len(text))
        for text, right, ids in zip(completions, answer, completion_ids, strict=True)
    ]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """verl's."""
    assert data_source == "openai/gsm8k" and extra_info == {"index": 3}
    if solution_str == "raise":
        raise RuntimeError("scorer")
    return {"score": float(solution_str == ground_truth), "prediction": solution_str}


async def async_score(solution_str: str, ground_truth: str, **_: Any) -> float:
    await asyncio.sleep(0.01)
    return float(solution_str == ground_truth)


def process(completions: list[str]) -> list[float]:
    return [float(os.getpid()) for _ in completions]


def process_slowly(completions: list[str]) -> list[float]:
    time.sleep(0.5)
    return process(completions)


def has_torch(completions: list[str]) -> list[bool]:
    return ["torch" in sys.modules for _ in completions]


def too_few(completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) - 1)


def of_nobody(completions: list[str]) -> list[float]:
    raise LookupError("nobody is there")


def one_for_all(completions: list[str]) -> list[float]:
    return [1.0]


async def pairs(completions: list[str]) -> list[float]:
    return [0.0, 1.0]


def of_miles(args: Any, sample: Any) -> float:
    return 0.0


def needs_more(completions: list[str], difficulty: list[int]) -> list[float]:
    return [0.0 for _ in completions]


NO_FUNCTION = 3


def of_some(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Every other prompt that it is asked about has no reward."""
    of_some.calls = getattr(of_some, "calls", 0) + 1  # type: ignore[attr-defined]
    return [None if of_some.calls % 2 else float(len(text)) for text in completions]  # type: ignore[attr-defined]


def variety(completions: list[str], **_: Any) -> list[float]:
    """How many different characters there are."""
    return [float(len(set(text))) for text in completions]


def of_one(completions: list[str], **_: Any) -> list[float]:
    """The same for all."""
    return [1.0] * len(completions)


def of_none(completions: list[str], **_: Any) -> list[float | None]:
    """Has nothing to say of any."""
    return [None] * len(completions)


def hold_the_lock(completions: list[str], **_: Any) -> list[float]:
    """Starts something, and then looks for a needle until the end of time, in C."""
    import re
    import subprocess

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["STARTED"], "w"):
        pass
    return [float(bool(re.match("(a+)+$", "a" * 60 + "b"))) for _ in completions]


def told(completions: list[str], hint: str = "four", **columns: Any) -> list[float]:
    """1 for each letter of `hint`, which is its default here, and 1 where `extra` is null."""
    return [float(len(hint)) + (extra is None) for extra in columns["more"]]


def wide(images: list[list[Any]], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that sees the images: PIL images, one list for each sample."""
    sizes = [[image.size for image in shown] for shown in images]
    assert all(image.mode == "RGB" for shown in images for image in shown)
    assert sizes == [[tuple(pair) for pair in size] for size in columns["size"]], (sizes, columns["size"])
    return [float(sum(ids) % 3) for ids in completion_ids]


def slow_length(completions: list[str], **columns: Any) -> list[float]:
    """The number of different characters, a while later: tests kill its process meanwhile."""
    time.sleep(0.1)
    return [len(set(text)) / 4 for text in completions]
