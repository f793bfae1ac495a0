"""The harness that damages files notices what a reader must not do, and gives the same cases each time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import fuzz
from weft.errors import UserError

SEEDS = [b'{"a": [1, {"b": "c"}], "d": 1.5}']


def computes(path: Path) -> None:
    while True:
        pass


def waits(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.with_name("fifo").open()


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "raises": (lambda path: {}["no key"], "KeyError: 'no key'"),
    "computes": (computes, "computed for longer than 0.2 s"),
    "waits": (waits, "waited for longer than 0.4 s"),
    "takes memory": (lambda path: bytearray(2 * fuzz.MEGABYTES * 10**6), "MemoryError"),
    "crashes": (lambda path: os.kill(os.getpid(), signal.SIGKILL), "ended with -9"),
    "exits": (lambda path: os._exit(3), "ended with 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_reader_must_not_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one case of many, which is shown."""
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "_WAITS", 2 if name == "waits" else 300)
    does, words = WRONG[name]

    def parse(path: Path) -> None:
        if b"-1" in path.read_bytes():
            does(path)

    with pytest.raises(AssertionError, match=words) as caught:
        fuzz.fuzz(parse, SEEDS, 200, suffix=".json")
    assert "-1" in str(caught.value).splitlines()[0]


def test_errors_that_are_allowed() -> None:
    def parse(path: Path) -> None:
        if path.suffix != ".json" or path.read_bytes() != SEEDS[0]:
            raise UserError("damaged")

    fuzz.fuzz(parse, SEEDS, 20, suffix=".json")
    with pytest.raises(AssertionError, match="UserError: damaged"):
        fuzz.fuzz(parse, SEEDS, 20, suffix=".json", allowed=(KeyError,))


def test_the_time_of_other_processes_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that is under way for longer than it may compute, as on a busy machine."""
    monkeypatch.setattr(fuzz, "SECONDS", 1.0)
    fuzz.fuzz(lambda path: time.sleep(1.5), SEEDS, 1, suffix=".json")


def test_cases_are_many_and_the_same_each_time() -> None:
    """Some are JSON still, with another structure; the length before a header of safetensors is often true."""
    framed = len(SEEDS[0]).to_bytes(8, "little") + SEEDS[0] + b"data"
    cases = [fuzz.changed([*SEEDS, framed], number) for number in range(500)]
    assert cases == [fuzz.changed([*SEEDS, framed], number) for number in range(500)]
    assert len(set(cases)) > 400
    values = [value for value in map(parsed, cases) if value is not None]
    assert len(values) > 50 and any(isinstance(value, dict) and value.keys() != {"a", "d"} for value in values)
    headers = [parsed(case[8 : 8 + int.from_bytes(case[:8], "little")]) for case in cases if case.endswith(b"}data")]
    assert sum(header is not None for header in headers) > 50


def parsed(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
