"""`weft watch`: shows a run live in the terminal, from its files. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.launch.options import WatchOptions
from weft.observe.progress import duration
from weft.observe.report.read import MetricsTail, NoStepError, ReportedRun, read_run
from weft.observe.report.svg import numeric
from weft.terminal import Console, clean

_SHOWN = 10  # number of last values in the table
_BARS = " ▁▂▃▄▅▆▇█"
_PLOTTED = 30  # steps in a curve
# The metrics that are shown, in order.
_METRICS = (
    "loss", "reward", "reward_std", "kl", "entropy", "eval/loss", "eval/reward", "grad_norm", "lr",
    "completions/mean_length", "completions/clipped_ratio", "staleness/mean", "staleness/max", "rollout/buffered",
    "rollout/keep_rate", "rollout/replaced",
    "rollout/untrained", "rollout/engine_restarts", "tokens_per_second", "memory_gib",
)  # fmt: skip

# The shares of each role's time in metrics.jsonl, in words.
_WAITS = {
    "trainer": {"train": "train", "samples": "wait for samples", "sync": "sync", "other": "other (evaluation, saving)"},
    "engine": {"generate": "generate", "weights": "wait for weights", "prompts": "wait for prompts"},
}


def run(options: WatchOptions) -> None:
    """Show the run until it ends, or once with --once or without a terminal. UserError if the folder contains no
    run."""
    folder, console = Path(options.run), Console()
    tail = MetricsTail(folder / "metrics.jsonl")
    if options.once or not console.is_terminal:
        console.print(view(_read(folder, tail)))
        return
    with Live(view(_read(folder, tail)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            reported = _read(folder, tail)
            live.update(view(reported), refresh=True)
            if isinstance(reported, ReportedRun) and not reported.is_running:
                break
            time.sleep(options.every)
    console.print(view(reported))


def _read(folder: Path, tail: MetricsTail) -> ReportedRun | str:
    """The run; or a message, if the run continues and no step has ended."""
    try:
        return read_run(folder, tail)
    except NoStepError as error:
        return str(error)


def view(reported: ReportedRun | str) -> Table:
    """The display of a run's current state."""
    picture = Table.grid()
    if isinstance(reported, str):
        picture.add_row(Text(clean(reported)))
        return picture
    lines = [line for line in reported.lines if line["step"]]
    for text, style in _head(reported, lines):
        picture.add_row(Text(clean(text), style=style))
    table = Table(box=None, pad_edge=False)
    for title, justify in (("metric", "left"), ("now", "right"), (f"mean of {_SHOWN}", "right"), ("curve", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for name in _METRICS:
        if values := last_values(lines, name, _PLOTTED):
            recent = values[-_SHOWN:]
            table.add_row(name, f"{values[-1]:.4g}", f"{sum(recent) / len(recent):.4g}", curve(values))
    picture.add_row()
    picture.add_row(table)
    return picture


def _head(reported: ReportedRun, lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(line, style) above the table: the run's state, its last step, shares of time, samples, starts and failures."""
    start = reported.starts[-1] if reported.starts else {}
    state, style = "is running", "bold"
    if not reported.is_running and start.get("error"):
        state, style = f"failed: {start['error']}", "bold red"
    elif not reported.is_running:
        ended = reported.summary or start.get("ended")
        state, style = ("has ended", "bold green") if ended else ("was killed: no end is recorded", "bold red")
    out = [(f"{reported.folder}  {state}", style)]
    if lines:
        last, total = lines[-1], int(reported.config.get("train", {}).get("steps") or 0)
        age = time.time() - (reported.folder / "metrics.jsonl").stat().st_mtime
        total_text = f" of {total}" if total else ""
        out.append((f"step     {last['step']}{total_text}; written {duration(age)} ago", ""))
    for role, words in _WAITS.items():
        keys = {f"{role}_time/{leaf}": word for leaf, word in words.items()}
        shares = {word: last_values(lines, key, _SHOWN) for key, word in keys.items()}
        if all(shares.values()):
            ranked = sorted(((sum(v) / len(v), word) for word, v in shares.items()), reverse=True)
            out.append((f"{role}s".ljust(9) + ", ".join(f"{word} {share:.0%}" for share, word in ranked), ""))
    if phases := phase_shares(lines[-_SHOWN:]):
        out.append(("time     " + ", ".join(f"{name} {share:.0%}" for name, share in phases.items()), ""))
    drawn = [line for line in lines[-_SHOWN:] if isinstance(line.get("rollout/untrained"), int | float)]
    rl = reported.config.get("rl", {})
    if drawn and rl:
        count = int(rl["prompts_per_step"]) * int(rl["group_size"])
        trained_share = 1 - sum(float(line["rollout/untrained"]) for line in drawn) / (count * len(drawn))
        out.append(
            (f"samples  {count} in a rollout step; {trained_share:.1%} of the last {len(drawn)} steps' are trained", "")
        )
    if len(reported.starts) > 1:
        began = datetime.fromisoformat(str(reported.starts[0]["started"]))
        hours = (datetime.now(UTC) - began).total_seconds()
        out.append((f"starts   {len(reported.starts)}, the first {duration(hours)} ago", ""))
    if not reported.is_running:
        out += [(f"rank {f.get('rank')}  {f.get('message', '')}", "red") for f in reported.failures[:3]]
    return out


def last_values(lines: Sequence[Mapping[str, Any]], name: str, count: int) -> list[float]:
    """The last `count` numbers of a metric, in order."""
    values = (numeric(line[name]) for line in reversed(lines) if name in line)
    return [*islice((value for value in values if value is not None), count)][::-1]


def phase_shares(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of each phase in the seconds of these lines, by the controller's clock, the largest first. Trainers are
    idle while engines generate, and engines are idle in the other phases. Empty without seconds. If both overlap
    (cluster.max_staleness), the shares refer to the sum."""
    seconds: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("seconds/") and isinstance(value, int | float):
                seconds[key.removeprefix("seconds/")] = seconds.get(key.removeprefix("seconds/"), 0.0) + value
    total = sum(seconds.values())
    return {name: value / total for name, value in sorted(seconds.items(), key=lambda item: -item[1])} if total else {}


def curve(values: Sequence[float]) -> str:
    """The values as bars. The minimum is the lowest bar and the maximum the highest."""
    low, high = min(values), max(values)
    width = (high - low) or 1.0
    return "".join(_BARS[1 + round((value - low) / width * 7)] for value in values)
