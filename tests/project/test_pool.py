"""What tests/support/pool.py says of ranks that die or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import pool


def total() -> float:
    values = torch.ones(3)
    dist.all_reduce(values)
    return float(values.sum())


def one_aborts() -> None:
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def one_hangs() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def answered() -> None:
    pass


def message(function: Callable[[], object], timeout: float = 120.0) -> str:
    with pytest.raises(AssertionError) as caught:
        pool.run(2, function, timeout=timeout, retry=False)
    assert pool.run(2, total) == [6.0, 6.0]  # in new processes
    return str(caught.value)


def test_of_a_rank_that_dies_the_error_has_signal_stack_and_what_ran_before() -> None:
    pool.run(2, total)
    text = message(one_aborts)
    assert "rank 1 died by SIGABRT" in text
    assert "in one_aborts" in text  # the stack of Python, then of C++, unless torch was not given the time to take it
    assert "gloo::transport::tcp::Loop::run()" in text or "signal lost waiting for stacktrace" in text
    assert text.endswith("tests.project.test_pool.total on 2, tests.project.test_pool.one_aborts on 2")


def test_of_a_rank_that_hangs_the_error_has_the_stack() -> None:
    text = message(one_hangs, timeout=5.0)
    assert "ranks [0] of 2 did not finish within 5 s" in text and "in one_hangs" in text


def test_a_rank_that_dies_between_cases_fails_the_next_one() -> None:
    pool.run(2, answered)
    process = pool._workers[3].process
    process.kill()
    process.join()
    text = message(total)
    assert "rank 3 died by SIGKILL" in text and "tests.project.test_pool.answered on 2" in text


def one_crashes_once(mark: str) -> float:
    if dist.get_rank() == 1 and not os.path.exists(mark):
        open(mark, "w").close()
        os.abort()
    return total()


def test_one_crash_of_a_suite_is_a_warning_with_all_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_crashed", [])
    with pytest.warns(UserWarning, match=r"one_crashes_once ran again:(.|\n)*rank 1 died by SIGABRT"):
        assert pool.run(2, one_crashes_once, str(tmp_path / "once")) == [6.0, 6.0]
    with pytest.raises(pool.CrashError):
        pool.run(2, one_crashes_once, str(tmp_path / "twice"))
