"""Reward functions that start processes which outlive them. No torch: processes import this."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any


def _note() -> None:
    with open(os.environ["STARTED"], "a") as file:
        file.write(f"{os.getpid()}\n")


def kills_itself(completions: Sequence[str], **_: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def leaves_the_session(completions: Sequence[str], **_: Any) -> list[float]:
    if not os.fork():
        os.setsid()
        _note()
        time.sleep(600)
    while not os.path.exists(os.environ["STARTED"]):
        time.sleep(0.01)
    return [1.0 for _ in completions]


def is_a_daemon(completions: Sequence[str], **_: Any) -> list[float]:
    if not os.fork():
        os.setsid()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _note()
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(os.environ["STARTED"]):
        time.sleep(0.01)
    return [1.0 for _ in completions]


def forks_and_returns_twice(completions: Sequence[str], **_: Any) -> list[float]:
    os.fork()
    return [float(len(completion)) for completion in completions]


async def gives_a_lock(solution_str: str, ground_truth: str) -> dict[str, Any]:
    return {"score": 1.0, "lock": threading.Lock() if solution_str == "a" else None}


def kills_its_parent(completions: Sequence[str], **_: Any) -> list[float]:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return []
