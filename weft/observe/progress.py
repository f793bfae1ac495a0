"""Progress on the first rank: a live bar on a terminal, otherwise a line at intervals."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Column

from weft.terminal import Console, optional_output

# The remaining time is estimated from this many last steps, because the first steps are slow.
_WINDOW = 20
# Without a terminal, seconds between two lines about steps, and between two lines about the activity within a step.
_STEP_SECONDS, _DOING_SECONDS = 5.0, 10.0
# Metrics of a step of `weft rl` -> (their names in the line, formats). kl_old is shown only if it is not zero; it is
# zero until the weights change after the rollout. cut: share of samples that ended at rollout.max_new_tokens.
_POLICY = {
    "reward": ("reward", ".4g"), "reward_std": ("reward_std", ".4g"), "kl": ("kl", ".4g"),
    "policy/kl_old": ("kl_old", ".4g"), "entropy": ("entropy", ".3g"), "teacher/divergence": ("teacher", ".4g"),
    "teacher/kl": ("teacher", ".4g"), "teacher/agreement": ("agree", ".0%"),
    "completions/mean_length": ("length", ".4g"), "completions/clipped_ratio": ("cut", ".0%"),
    "staleness/mean": ("staleness", ".4g"),
}  # fmt: skip


_LOST = "output   the program or terminal that reads it has ended; the run continues, and writes metrics.jsonl"
_REWARD_MEAN = re.compile(r"rewards/.+/mean")


class Progress:
    """`with Progress(total_steps) as progress: progress.step(line)`, where `line` is the step's line of metrics.jsonl.

    show: False on ranks that print nothing. every: without a terminal, optimizer steps between two lines; None: at most
    one line every few seconds. The first, the last and skipped steps always have a line.
    """

    def __init__(
        self,
        total_steps: int,
        show: bool = True,
        interval: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._show, self._interval, self._clock = total_steps, show, interval, clock
        self._console = console or Console()
        self._done = 0
        self._times: deque[float] = deque([clock()], maxlen=_WINDOW + 1)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._doing = self._pending = ""
        self._words: list[str] = []  # of the latest step; a narrow terminal shows the first of them
        self._step_printed_at: float | None = None  # the last line of a step
        self._printed_at = self._times[-1]  # the last line of any kind
        self._output = ExitStack()

    def __enter__(self) -> Progress:
        self._output.enter_context(optional_output(_LOST))
        self._times = deque([self._clock()], maxlen=_WINDOW + 1)
        self._printed_at = self._times[-1]
        if self._show and self._console.is_terminal:
            # On a narrow terminal, the bar is dropped first, then the end of the status.
            width = len(f"step {self._total}/{self._total}")
            self._bar = Bar(
                TextColumn("step {task.completed}/{task.total}", table_column=Column(min_width=width, no_wrap=True)),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                expand=True,
                refresh_per_second=2,  # each refresh takes a millisecond or two
            )
            self._task = self._bar.add_task("steps", total=self._total, status="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print_step()  # the last step has no line yet if the run ends early
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._output.close()

    def step(self, line: Mapping[str, object]) -> None:
        """Shows a finished step."""
        number = line.get("step")
        self._done = number if isinstance(number, int) else self._done + 1
        self._times.append(self._clock())
        if not self._show:
            return
        words, eta = describe(line), f"ETA {duration(self.remaining())}"
        if self._bar is not None:
            self._words = [eta, *words]
            self._draw()
            return
        self._pending = "  ".join([f"step {self._done}/{self._total}", *words, eta])
        if self._is_due(line):
            self._print_step()

    def doing(self, text: str) -> None:
        """Shows the current activity within a step, in the bar or as a line at intervals. text: "" when it ends."""
        self._doing = text
        if self._bar is not None:
            self._draw()
        elif self._show and text and self._clock() - self._printed_at >= _DOING_SECONDS:
            self.note(text)

    def _is_due(self, line: Mapping[str, object]) -> bool:
        if self._done == self._total or line.get("skipped"):
            return True
        if self._interval is not None:
            return self._step_printed_at is None or self._done % self._interval == 0
        if "rollout" in line and "reward" not in line:  # only the last optimizer step of a rollout step has rewards
            return False
        return self._step_printed_at is None or self._times[-1] - self._step_printed_at >= _STEP_SECONDS

    def _print_step(self) -> None:
        if self._pending:
            text, self._pending = self._pending, ""
            self._step_printed_at = self._times[-1]
            self._print(text)

    def _draw(self) -> None:
        if self._bar is None or self._task is None:
            return
        room = self._console.width - len(f"step {self._total}/{self._total}") - 2  # a space after each column
        status = ""
        for word in filter(None, (self._doing, *self._words)):  # a word that does not fit is omitted completely
            longer = f"{status}  {word}" if status else word
            if status and len(longer) > room:
                break
            status = longer
        self._bar.update(self._task, completed=self._done, status=escape(status))

    def note(self, text: str) -> None:
        """Prints a line above the bar, or after the line of the latest step."""
        if self._show:
            self._print_step()
            self._print(text)

    def notes(self, texts: Iterable[str]) -> None:
        """Prints several lines."""
        for text in texts:
            self.note(text)

    def remaining(self) -> float:
        """The estimated seconds to the end, from the duration of the last steps."""
        steps = len(self._times) - 1
        pace = (self._times[-1] - self._times[0]) / steps if steps else 0.0
        return pace * max(0, self._total - self._done)

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        self._console.print_folded(text)


@contextmanager
def loading(
    show: bool = True, label: str = "loading", console: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for bytes, only on a terminal. Yields a function to call with (bytes done, total bytes)."""
    console = console or Console()
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def describe(line: Mapping[str, object]) -> list[str]:
    """The parts of a short description of a step. For `weft rl` it has rewards instead of the loss, which is zero as
    long as ratios are 1."""
    if line.get("skipped"):
        return [f"skipped: {line.get('reason') or 'loss or gradient is not finite'}"]
    if "rollout" in line:
        means = {key: key.removeprefix("rewards/").removesuffix("/mean") for key in line if _REWARD_MEAN.fullmatch(key)}
        shown = {"reward": _POLICY["reward"]}
        shown |= {key: (name, ".4g") for key, name in means.items() if len(means) > 1} | _POLICY
        values = [(line[key], *how) for key, how in shown.items() if line.get(key) is not None]
        words = [f"{word} {number(value, form)}" for value, word, form in values if value or word != "kl_old"]
    else:
        words = [f"loss {number(line.get('loss'), '.4f')}"]
        if line.get("accuracy") is not None:  # of a reward model
            words.append(f"accuracy {number(line.get('accuracy'), '.1%')}")
    if "loss" not in line:  # the step trained nothing
        return words
    words += [
        f"grad_norm {number(line.get('grad_norm'), '#.3g')}",
        f"lr {number(line.get('lr'), '.2e')}",
        f"{number(line.get('tokens_per_second'), ',.0f')} tokens/s",
    ]
    if line.get("mfu") is not None:
        words.append(f"mfu {number(line.get('mfu'), '.1%')}")
    if line.get("memory_gib") is not None:
        words.append(f"{number(line.get('memory_gib'), '.2f')} GiB")
    return words


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
    """A number in a format of format(); `-` if it is not a number. A value that rounds to zero has no sign."""
    if not isinstance(value, int | float):
        return "-"
    text = format(value, form)
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")
