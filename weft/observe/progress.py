"""What the first rank shows while it trains: a live bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from weft.terminal import Console

# Steps that the estimate of the remaining time looks back on: the first ones are slow.
_WINDOW = 20


class Progress:
    """`with Progress(total_steps) as progress: progress.step(line)`, with the line of metrics.jsonl.

    show: False for ranks that print nothing. extra: further keys of the line to show, such as `reward/mean`.
    """

    def __init__(
        self,
        total_steps: int,
        show: bool = True,
        extra: tuple[str, ...] = (),
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._show, self._extra, self._clock = total_steps, show, extra, clock
        self._console = console or Console()
        self._done = 0
        self._times: deque[float] = deque([clock()], maxlen=_WINDOW + 1)
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        self._times = deque([self._clock()], maxlen=_WINDOW + 1)
        if self._show and self._console.is_terminal:
            # Where the terminal is narrow, the bar goes first and the end of the status next.
            width = len(f"step {self._total}/{self._total}")
            self._bar = Bar(
                TextColumn("step {task.completed}/{task.total}", table_column=Column(min_width=width, no_wrap=True)),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                expand=True,
                refresh_per_second=2,  # each costs a millisecond or two
            )
            self._task = self._bar.add_task("steps", total=self._total, status="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, line: Mapping[str, object]) -> None:
        """Show the step that has just ended."""
        number = line.get("step")
        self._done = number if isinstance(number, int) else self._done + 1
        self._times.append(self._clock())
        if not self._show:
            return
        status, eta = "  ".join(describe(line, self._extra)), f"ETA {duration(self.remaining())}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, status=escape(f"{eta}  {status}"))
        else:
            self._print(f"step {self._done}/{self._total}  {status}  {eta}")

    def note(self, text: str) -> None:
        """A line of text, above the bar where there is one."""
        if self._show:
            self._print(text)

    def notes(self, texts: Iterable[str]) -> None:
        """Several lines of text."""
        for text in texts:
            self.note(text)

    def remaining(self) -> float:
        """Estimated seconds to the end, at the pace of the last steps."""
        steps = len(self._times) - 1
        pace = (self._times[-1] - self._times[0]) / steps if steps else 0.0
        return pace * max(0, self._total - self._done)

    def _print(self, text: str) -> None:
        # A line that is read by another program must not be folded at rich's guess of a width.
        self._console.print(text, soft_wrap=True)


@contextmanager
def loading(
    show: bool = True, what: str = "loading", console: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """A bar for bytes that are read, on a terminal only; call what it yields with (done, total) of this rank."""
    console = console or Console()
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def describe(line: Mapping[str, object], extra: tuple[str, ...] = ()) -> list[str]:
    """The few words on a step that fit a line."""
    if line.get("skipped"):
        return [f"skipped: {line.get('reason') or 'loss or gradient is not finite'}"]
    if "loss" not in line:  # nothing was trained
        return [f"{key} {number(line.get(key), '.4g')}" for key in extra]
    words = [
        f"loss {number(line.get('loss'), '.4f')}",
        f"grad_norm {number(line.get('grad_norm'), '.3g')}",
        f"lr {number(line.get('lr'), '.2e')}",
        f"{number(line.get('tokens_per_second'), ',.0f')} tokens/s",
    ]
    if line.get("mfu") is not None:
        words.append(f"mfu {number(line.get('mfu'), '.1%')}")
    if line.get("memory_gib") is not None:
        words.append(f"{number(line.get('memory_gib'), '.2f')} GiB")
    return words + [f"{key} {number(line.get(key), '.4g')}" for key in extra if key in line]


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`, `2d 3:04:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02d}"
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


def number(value: object, form: str) -> str:
    """A number in this form, `-` where there is none. What rounds to zero has no sign."""
    if not isinstance(value, int | float):
        return "-"
    text = format(value, form)
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")
