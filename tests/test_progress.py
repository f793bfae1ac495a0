"""What the first rank shows: a bar on a terminal, lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest

from weft.observe.progress import Progress, describe, duration
from weft.terminal import Console

LINE = {"step": 1, "loss": 2.34567, "grad_norm": 12.3456, "lr": 1e-5, "tokens_per_second": 12345.6, "reward/mean": 0.5}


def ticking(*times: float) -> Callable[[], float]:
    clock: Iterator[float] = iter(times)
    return lambda: next(clock)


def test_one_line_per_step_without_a_terminal() -> None:
    out = io.StringIO()
    clock = ticking(0, 0, 10, 20)
    with Progress(5, extra=("reward/mean",), console=Console(file=out, width=30), clock=clock) as progress:
        progress.step(LINE)
        progress.note("saved [step-1]")
        progress.step({"step": 2, "skipped": True, "reason": "loss is not finite: rank 1"})
    assert out.getvalue().splitlines() == [
        "step 1/5  loss 2.3457  grad_norm 12.3  lr 1.00e-05  12,346 tokens/s  reward/mean 0.5  ETA 0:40",
        "saved [step-1]",
        "step 2/5  skipped: loss is not finite: rank 1  ETA 0:30",
    ]


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(5, show=False) as progress:
        progress.step(LINE)
        progress.note("saved")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [40, 80, 160])
def test_bar_on_a_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with Progress(5, console=console) as progress:
        progress.step(LINE)
        progress.note("saved [step-1]")
        progress.step({**LINE, "step": 5, "loss": None})
    text = out.getvalue()
    assert "saved [step-1]" in text and "step 5/5" in text and "loss -" in text
    assert "ETA 0:00" in text  # the last to go where the terminal is narrow
    assert all(len(line) < 2 * width for line in text.splitlines())  # escape codes aside, nothing wraps


def test_the_pace_is_that_of_the_last_steps() -> None:
    # A slow first step of 100 s is forgotten after 20 more of 1 s.
    clock = ticking(0, 0, *range(100, 121))
    with Progress(31, show=False, clock=clock) as progress:
        for step in range(1, 22):
            progress.step({"step": step})
        assert progress.remaining() == 10.0


def test_steps_without_numbers_count_up() -> None:
    with Progress(2, show=False, clock=ticking(0, 0, 1, 2)) as progress:
        progress.step({})
        assert progress.remaining() == 1.0
        progress.step({})
        assert progress.remaining() == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (3599.6, "1:00:00"), (3723, "1:02:03"), (183845, "2d 3:04:05")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_missing_numbers_are_dashes() -> None:
    assert describe({"loss": None}) == ["loss -", "grad_norm -", "lr -", "- tokens/s"]
    assert describe({"reward": 0.25}, extra=("reward",)) == ["reward 0.25"]  # nothing was trained
    assert describe({"loss": -1e-9, "lr": 1e-9}, extra=("reward",))[0::2] == ["loss 0.0000", "lr 1.00e-09"]
