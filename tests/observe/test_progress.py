"""What the first rank shows: a bar on a terminal, lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import pytest

from weft.observe.progress import Progress, describe, duration
from weft.terminal import Console

LINE = {"step": 1, "loss": 2.34567, "grad_norm": 12.3456, "lr": 1e-5, "tokens_per_second": 12345.6}
POLICY = {
    **LINE, "loss": 0.0, "rollout": 1, "reward": 0.3125, "reward_std": 0.21, "kl": 0.0012, "policy/kl_old": 0.0,
    "completions/mean_length": 341.5, "completions/clipped_ratio": 0.125, "entropy": 1.25, "staleness/mean": 0.5,
    "rewards/math/mean": 0.3125,
}  # fmt: skip


class SteppedClock:
    """Goes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(clock: SteppedClock, total: int, interval: int | None = None) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(total, interval=interval, console=Console(file=out, width=30), clock=clock), out


def ticking(*times: float) -> Callable[[], float]:
    clock: Iterator[float] = iter(times)
    return lambda: next(clock)


def test_lines_without_a_terminal() -> None:
    clock = SteppedClock()
    progress, out = shown(clock, 5)
    with progress:
        clock.now = 10
        progress.step(LINE)
        progress.note("saved [step-1]")
        clock.now = 20
        progress.step({"step": 2, "skipped": True, "reason": "loss is not finite: rank 1"})
    assert out.getvalue().splitlines() == [
        "step 1/5  loss 2.3457  grad_norm 12.3  lr 1.00e-05  12,346 tokens/s  ETA 0:40",
        "saved [step-1]",
        "step 2/5  skipped: loss is not finite: rank 1  ETA 0:30",
    ]


def steps_of(out: io.StringIO) -> list[int | str]:
    """Numbers of the steps that have a line, and other lines."""
    lines = out.getvalue().splitlines()
    return [int(line.split()[1].split("/")[0]) if line.startswith("step ") else line for line in lines]


@pytest.mark.parametrize(("ends_at", "expected"), [(20, [1, 6, 11, 16, 20]), (13, [1, 6, 11, 13])])
def test_a_line_every_few_seconds_at_most(ends_at: int, expected: list[int]) -> None:
    """The first and the last step have one, and the last of a run that ends early."""
    clock = SteppedClock()
    progress, out = shown(clock, 20)
    with progress:
        for step in range(1, ends_at + 1):
            clock.now = float(step)
            progress.step({**LINE, "step": step})
    assert steps_of(out) == expected


@pytest.mark.covers("train.log_every")
def test_every_so_many_steps() -> None:
    clock = SteppedClock()
    progress, out = shown(clock, 20, interval=8)
    with progress:
        for step in range(1, 21):
            progress.step({**LINE, "step": step} | ({"skipped": True} if step == 11 else {}))
            if step == 13:
                progress.note("eval")  # it is about a step, whose line goes first
    assert steps_of(out) == [1, 8, 11, 13, "eval", 16, 20]


def test_what_goes_on_within_a_step() -> None:
    clock = SteppedClock()
    progress, out = shown(clock, 3)
    with progress:
        for second in range(1, 31):
            clock.now = float(second)
            progress.doing(f"rollout step 1: {second}/99 samples")
        progress.doing("")
        progress.step(LINE)
        clock.now += 9.0
        progress.doing("rollout step 2: 1/99 samples")  # the step's own line is not old enough
    samples = [f"rollout step 1: {second}/99 samples" for second in (10, 20, 30)]
    assert steps_of(out) == [*samples, 1]


def test_a_policy_is_described_by_its_rewards() -> None:
    words = "  ".join(describe(POLICY))
    assert words.startswith(
        "reward 0.3125  reward_std 0.21  kl 0.0012  entropy 1.25  length 341.5  cut 12%  staleness 0.5  grad_norm 12.3"
    )
    described = describe({**POLICY, "rewards/format/mean": 1.0, "rewards/format/std": 0.5})
    assert described[:4] == ["reward 0.3125", "math 0.3125", "format 1", "reward_std 0.21"]
    assert "loss" not in words and "kl_old" not in words
    assert "kl_old 0.01" in describe({**POLICY, "policy/kl_old": 0.01})
    assert describe({"step": 1, "rollout": 1, "reward": 0.25}) == ["reward 0.25"]  # nothing was trained
    clock = SteppedClock()
    progress, out = shown(clock, 8)  # of two optimizer steps to a rollout step the last knows the rewards
    with progress:
        for step in range(1, 9):
            clock.now += 3
            line = POLICY if step % 2 == 0 else {**LINE, "rollout": 1}
            progress.step({**line, "step": step})
    assert steps_of(out) == [2, 4, 6, 8] and out.getvalue().count("reward 0.3125") == 4


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
        progress.doing("rollout step 1: 3/8 samples")
        progress.step(LINE)
        progress.note("saved [step-1]")
        progress.doing("")
        progress.step({**LINE, "step": 5, "loss": None})
    text = out.getvalue()
    assert "rollout step" not in text  # it was over before the bar was drawn again
    assert "saved [step-1]" in text and "step 5/5" in text and "loss -" in text
    assert "ETA 0:00" in text  # the last to go where the terminal is narrow
    assert all(len(line) < 2 * width for line in text.splitlines())  # escape codes aside, nothing wraps


def test_the_digits_of_a_gradient_norm_are_as_many_in_every_line() -> None:
    texts = [describe({**LINE, "grad_norm": value})[1] for value in (7.7, 7.65, 10.0, 0.5)]
    assert texts == ["grad_norm 7.70", "grad_norm 7.65", "grad_norm 10.0", "grad_norm 0.500"]


@pytest.mark.parametrize("width", [50, 80, 100, 160])
def test_a_terminal_cuts_no_figure_in_two(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    line = {**LINE, "memory_gib": 12.34}
    with Progress(5, console=console) as progress:
        progress.step(line)
    drawn = [text for text in out.getvalue().splitlines() if "step 1/5" in text][-1]
    figures = {"ETA 0:00", *describe(line)}
    shown = {word for word in figures if word in drawn}
    after_eta = drawn.partition("ETA")[2]
    for word in shown:
        after_eta = after_eta.replace(word.removeprefix("ETA"), "")
    assert shown and not re.search(r"[a-z]{2}|\d", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|step 1/5", "", after_eta)), drawn
    assert (len(shown) == len(figures)) == (width >= 100)


def test_the_bar_says_what_goes_on() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with Progress(5, console=console) as progress:
        progress.doing("rollout step 1: 3/8 [samples]")
    assert "step 0/5 rollout step 1: 3/8 [samples]" in " ".join(out.getvalue().split())


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
    assert describe({"loss": -1e-9, "lr": 1e-9})[0::2] == ["loss 0.0000", "lr 1.00e-09"]
