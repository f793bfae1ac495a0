"""`weft report`: one self-contained HTML page about a run, or comparing several runs. Imports no torch.

Runs in progress and runs that ended early have a page, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from jinja2 import Environment

from weft.checkpoint.retention import TRAINER_STATE, complete_steps, step_folder
from weft.config.keys import schema_keys
from weft.config.load import plain_sections
from weft.config.render import plain_value
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.yaml12 import Dumper, read_file
from weft.errors import UserError
from weft.files import LOCK
from weft.launch.flight import FOLDER as FLIGHT
from weft.launch.options import ReportOptions
from weft.launch.timing import METRICS as PHASES
from weft.observe.progress import duration
from weft.observe.report.charts import COLOURS, Chart, Series, draw, logarithmic, numeric
from weft.observe.report.pictures import pictures
from weft.observe.report.rl_page import evenly, is_rl, last_samples, rl_charts, samples_over_time
from weft.observe.starts import STARTS
from weft.observe.system import SYSTEM
from weft.terminal import byte_count, clean, count
from weft.version import __version__

Line = dict[str, Any]

# Values beyond these limits are not shown: the run folder is damaged, or was not written by weft.
_MOST_STEPS, _LARGEST, _SMALLEST = 10**12, 1e30, 1e-30
_MOST_NAME, _MOST_KEYS, _MOST_CONFIG = 200, 500, 1 << 20
_MOST_VALUE = 300  # characters of a value of the config in a table
_MOST_RANKS, _MOST_MESSAGE = 64, 500  # of a failure: ranks that are shown, characters of what each said
_MOST_ANSWERS = 6  # answers to a prompt of eval.prompts that are not folded away
_RUNS_SECONDS = 120.0  # a run whose last step is younger runs, where its lock cannot be seen

# Keys of metrics.jsonl with a chart of their own, in the order of the page; the series are added later.
_CHARTS: tuple[tuple[str, Chart], ...] = (
    ("loss", Chart("Loss", "nats per trained token", log=True, noisy=True)),
    ("grad_norm", Chart("Gradient norm", "L2, before clipping", log=True, noisy=True)),
    ("lr", Chart("Learning rate", "per step", zero=True)),
    ("tokens_per_second", Chart("Throughput", "tokens per second, all ranks", zero=True, noisy=True)),
    ("seconds", Chart("Time", "seconds per step", zero=True, noisy=True)),
    ("mfu", Chart("Model FLOPs utilisation", "share of the peak", zero=True, noisy=True, percent=True)),
    ("memory_gib", Chart("Peak memory", "GiB, largest rank", zero=True)),
    ("fill", Chart("Fill of rows", "real tokens / budget", zero=True, noisy=True, percent=True)),
    ("utilisation", Chart("Balance of ranks", "mean / largest FLOPs", zero=True, noisy=True, percent=True)),
)
_NO_CHART = {
    "step", "epoch", "documents", "tokens", "loss_tokens", "micro_batches", "skipped", "reason", "profiled",
    "eval/seconds", "rollout",
}  # fmt: skip
# Units of other metrics, by the last part of their names.
_UNITS = {"loss": "nats per trained token", "perplexity": "e^loss", "accuracy": "share of trained tokens",
          "exact": "share of documents"}  # fmt: skip


@dataclass(frozen=True)
class ReportedRun:
    """The content of a run folder. summary: empty if the run has not ended. rollouts: for `weft rl`, the best and the
    worst samples of the last rollout step. over_time: for `weft rl`, answers to the same prompts. starts: lines of
    starts.jsonl, each with those of its end. failures: where each rank was when the last start failed, the probable
    cause first. system: lines of system.jsonl. runs: whether the run goes on. notes: what could not be read."""

    folder: Path
    name: str
    config: Mapping[str, Mapping[str, Any]]
    config_text: str
    lines: Sequence[Line]
    summary: Mapping[str, Any]
    samples: Sequence[Line]
    checkpoints: Sequence[Mapping[str, Any]]
    rollouts: Mapping[str, Any] | None
    over_time: Sequence[Mapping[str, Any]] = ()
    starts: Sequence[Line] = ()
    failures: Sequence[Mapping[str, Any]] = ()
    system: Sequence[Line] = ()
    runs: bool = False
    notes: Sequence[str] = ()

    def points(self, key: str) -> tuple[list[float], list[float | None]]:
        """(steps, values) of the lines of metrics that have the key."""
        points = [(float(line["step"]), numeric(line[key])) for line in self.lines if key in line]
        return [x for x, _ in points], [y for _, y in points]

    def has(self, key: str) -> bool:
        return any(numeric(line.get(key)) is not None for line in self.lines)


def run(options: ReportOptions) -> tuple[Path, list[str]]:
    """Writes the page. Returns its path, and notes on what could not be read. Raises UserError if a folder holds no
    run, or the page cannot be written."""
    runs = _named_apart([read_run(Path(path)) for path in options.runs])
    target = Path(options.output) if options.output else _default_path(runs)
    try:
        target.write_text(page(runs), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--output: {target} cannot be written: {error.strerror}.") from error
    return target, [note for reported in runs for note in reported.notes]


def _default_path(runs: Sequence[ReportedRun]) -> Path:
    target = runs[0].folder / "report.html" if len(runs) == 1 else Path("report.html")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise UserError(f"{target}: is no regular file, so it is not written to: remove it, or set --output.")
    return target


def read_run(folder: Path) -> ReportedRun:
    """Reads everything that the page shows of a run folder. Raises UserError if no step is recorded there."""
    if not (folder / "metrics.jsonl").is_file():
        problem = "holds no metrics.jsonl, so no step of a run is there" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder}: it {problem}. Name the folder that run.dir named.")
    notes: list[str] = []
    metrics = _read_lines(folder / "metrics.jsonl", notes)
    lines = [_plain(line) for line in metrics if type(step := line.get("step")) is int and 0 <= step < _MOST_STEPS]
    if len(lines) < len(metrics):
        notes.append(f"{folder / 'metrics.jsonl'}: {len(metrics) - len(lines):,} lines name no step and are left out")
    if not lines:
        error = next((start["error"] for start in _starts(folder / STARTS, [])[-1:] if start.get("error")), "")
        ended = f" The run failed: {error}." if error else ""
        raise UserError(f"{folder}: no step has ended yet, so there is nothing to show.{ended}")
    summary = _read_summary(folder / "summary.json", notes)
    samples = [sample for sample in _read_lines(folder / "samples.jsonl", notes) if "answer" in sample]
    starts = _starts(folder / STARTS, notes)
    return ReportedRun(
        folder=folder,
        name=folder.resolve().name,
        config=_read_config(folder / "config.yaml", notes),
        config_text=_text(folder / "config.yaml", notes)[:_MOST_CONFIG],
        lines=lines,
        summary=summary,
        samples=samples,
        checkpoints=_checkpoints(folder / "checkpoints"),
        rollouts=_rollouts(folder, notes),
        over_time=samples_over_time(folder, notes),
        starts=starts,
        failures=_failures(folder, starts, notes),
        system=[_plain(line) for line in _read_lines(folder / SYSTEM, notes)],
        runs=_runs(folder),
        notes=list(dict.fromkeys(notes)),
    )


def page(runs: Sequence[ReportedRun]) -> str:
    """The page as HTML."""
    template = files("weft.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown_as_text)
    compared = len(runs) > 1
    main, others, zero = without_zeros(*charts(runs), one_by_one=not compared)
    return environment.from_string(template).render(
        title=" / ".join(run.name for run in runs),
        several=compared,
        runs=[_about(run, index) for index, run in enumerate(runs)],
        tiles=[] if compared else _tiles(runs[0]),
        table=_comparison(runs) if compared else None,
        differing=_differing(runs) if compared else [],
        facts=_facts_of_several(runs) if compared else [],
        charts=[_drawn(chart) for chart in main],
        others=[_drawn(chart) for chart in others],
        machine=[_drawn(chart) for chart in system_charts(runs)],
        zero=zero,
        version=__version__,
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
    )


# ---------------------------------------------------------------- reading


def _shown_as_text(value: Any) -> Any:
    """A template value with control characters in text escaped: a browser would obey those that reverse its order."""
    return clean(value) if type(value) is str else value


def _read_lines(path: Path, notes: list[str]) -> list[Line]:
    """The objects of a JSONL file. An incomplete last line, as a killed run leaves it, is skipped without a note."""
    objects, skipped = [], 0
    texts = _text(path, notes).split("\n")
    for number, text in enumerate(texts):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            skipped += bool(text.strip()) and number < len(texts) - 1
            continue
        if isinstance(line, dict):
            objects.append(line)
        else:
            skipped += 1
    if skipped:
        notes.append(f"{path}: {skipped:,} lines are no JSON objects and are left out")
    return objects


def _plain(line: Line) -> Line:
    """The line with its texts, booleans, and finite numbers that a chart can show; other values become None."""
    return {clean(key)[:_MOST_NAME]: _scalar(value) for key, value in line.items()}


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return value if isinstance(value, bool | str) else None
    size = abs(value)
    return (value if size > _SMALLEST else 0) if size < _LARGEST else None  # None for NaN: it compares false


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object of a JSON file; empty if there is none."""
    try:
        content = json.loads(_text(path, notes) or "{}")
    except (ValueError, RecursionError):
        notes.append(f"{path}: is no JSON and is left out")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path}: is no JSON object and is left out")
        return {}
    return content


def _read_summary(path: Path, notes: list[str]) -> dict[str, Any]:
    content = _read_object(path, notes)
    summary: dict[str, Any] = {
        name: content[name] for name in ("stopped", "data") if isinstance(content.get(name), str)
    }
    for name, kind in (("seconds", float | int), ("versions", str)):
        inside = _plain(content[name]) if isinstance(content.get(name), dict) else {}
        summary[name] = {key: value for key, value in inside.items() if isinstance(value, kind)}
    summary["seconds"] = {key: max(0, value) for key, value in summary["seconds"].items()}
    return summary if content else {}


def _read_config(path: Path, notes: list[str]) -> dict[str, dict[str, Any]]:
    """The sections of a config file; empty if there is none, or weft cannot read it."""
    if not path.is_file():
        return {}
    try:
        return plain_sections(read_file(str(path)))
    except UserError as error:
        notes.append(str(error))
        return {}


def _rollouts(folder: Path, notes: list[str]) -> Mapping[str, Any] | None:
    try:
        return last_samples(folder)
    except UserError as error:
        notes.append(str(error))
        return None


def _starts(path: Path, notes: list[str]) -> list[Line]:
    """The lines of starts, each with the keys of the end that follows it, if there is one."""
    starts: list[Line] = []
    for line in _read_lines(path, notes):
        mesh, versions = line.get("mesh"), line.get("versions")
        texts = {name: value for name, value in line.items() if isinstance(value, str)}
        if "started" in texts:
            starts.append(texts)
            for name, value in (("mesh", mesh), ("versions", versions)):
                starts[-1][name] = _plain(value) if isinstance(value, dict) else {}
            for name in ("step", "ranks"):
                starts[-1][name] = value if type(value := line.get(name)) is int and 0 <= value < _MOST_STEPS else 0
        elif starts:
            starts[-1] |= {name: texts[name] for name in ("ended", "error") if name in texts}
    return starts


def _failures(folder: Path, starts: Sequence[Line], notes: list[str]) -> list[dict[str, Any]]:
    """What the ranks of the last start left in RUN/flight, if it failed. Those that lost their connection to another
    come last: they are consequences."""
    if not starts or ("ended" in starts[-1] and not starts[-1].get("error")):
        return []
    failures = []
    for path in sorted((folder / FLIGHT).glob("rank-*.json"))[:_MOST_KEYS]:
        report = _read_object(path, notes)
        message, activity = (text if isinstance(text := report.get(name), str) else "" for name in ("message", "where"))
        rank = path.stem.removeprefix("rank-").lstrip("0") or "0"
        if report and path.stat().st_mtime >= _seconds(starts[-1]["started"]):
            lost = report.get("kind") == "peer"
            failures.append({"rank": rank, "lost": lost, "where": activity, "message": message[:_MOST_MESSAGE]})
    return sorted(failures, key=lambda failure: (failure["lost"], not failure["message"]))[:_MOST_RANKS]


def _seconds(text: str) -> float:
    """Seconds since 1970 of a time in ISO 8601; infinity of another text."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return float("inf")


def _runs(folder: Path) -> bool:
    """Whether the run goes on: a process of this machine holds its lock, or its last step ended just now."""
    lock = folder / LOCK
    try:
        if lock.is_symlink() or not lock.is_file():
            return False
        with lock.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return time.time() - (folder / "metrics.jsonl").stat().st_mtime < _RUNS_SECONDS
    except BlockingIOError:
        return True
    except OSError:
        return False


def _text(path: Path, notes: list[str]) -> str:
    """The text of a file; empty if there is none."""
    if not path.is_file():
        return ""
    try:
        content = path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        notes.append(f"{path}: cannot be read: {error.strerror}")
        return ""
    except UnicodeDecodeError as error:
        notes.append(f"{path}: is not UTF-8 ({error.reason} at byte {error.start}); such bytes are shown as \ufffd")
        return content.decode("utf-8", "replace")


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The complete checkpoints, the newest first: step, size, and the links that point at each."""
    if not folder.is_dir():
        return []
    links = {link.name: Path(os.readlink(link)).name for link in folder.iterdir() if link.is_symlink()}
    checkpoints = []
    for step in reversed(complete_steps(folder)):
        path = step_folder(folder, step)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        checkpoints.append(
            {
                "path": f"{folder.name}/{path.name}",
                "step": step,
                "size": byte_count(size),
                "marks": sorted(name for name, target in links.items() if target == path.name),
                "resumable": (path / TRAINER_STATE).is_dir(),
            }
        )
    return checkpoints


def _named_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """The runs, with paths in place of names that are not unique."""
    names = [run.name for run in runs]
    return [replace(run, name=str(run.folder)) if names.count(run.name) > 1 else run for run in runs]


# ---------------------------------------------------------------- charts


def charts(runs: Sequence[ReportedRun]) -> tuple[list[Chart], list[Chart]]:
    """(charts that every run has, charts of other metrics)."""
    main, rl_keys = rl_charts(runs)
    for key, chart in _CHARTS:
        if key == "seconds" and len(runs) == 1 and runs[0].has("time/forward"):
            main.append(_phase_chart(runs[0]))
        elif any(run.has(key) for run in runs):
            series = _series(runs, key)
            if key == "loss":
                series += _evaluation(runs)
            marks = _skipped(runs) if key in ("loss", "grad_norm", "lr") else []
            if key == "loss" and all(is_rl(run) for run in runs):
                chart = replace(chart, unit="of the policy", log=False)
            main.append(replace(chart, series=series, marks=marks))
    charted = {key for key, _ in _CHARTS} | _NO_CHART | rl_keys
    names = dict.fromkeys(key for run in runs for line in run.lines for key in line)
    other_keys = [
        key
        for key in list(names)[:_MOST_KEYS]
        if key not in charted and key != "eval/loss" and not key.startswith("time/")
    ]
    return main, _by_source(runs, [key for key in other_keys if any(run.has(key) for run in runs)])


# Charts of system.jsonl: name of the key, the same for each GPU, or for the host.
_SYSTEM_CHARTS = (
    ("utilisation", Chart("GPU utilisation", "share of time in which a kernel ran", zero=True, percent=True)),
    ("memory_gib", Chart("GPU memory", "GiB in use, by all processes", zero=True)),
    ("celsius", Chart("GPU temperature", "\N{DEGREE SIGN}C")),
    ("watts", Chart("GPU power", "W", zero=True)),
    ("system/cpu", Chart("Processor", "share of all cores", zero=True, percent=True)),
    ("system/memory_gib", Chart("Host memory", "GiB in use", zero=True)),
)


def system_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Charts of the first rank's machine, over time without pauses: one run has a series for each GPU, of several runs
    each has one, the mean over its GPUs."""
    times = [_running_minutes(run.system) for run in runs]
    longest = max((own[-1] for own in times if own), default=0.0)
    over, scale = ("hours", 1 / 60) if longest > 180.0 else ("minutes", 1.0) if longest > 3.0 else ("seconds", 60.0)
    found = []
    for leaf, chart in _SYSTEM_CHARTS:
        series = []
        for index, (run, minutes) in enumerate(zip(runs, times, strict=True)):
            x = [minute * scale for minute in minutes]
            names = dict.fromkeys(key for line in run.system for key in line)
            keys = [key for key in names if key == leaf or (key.startswith("system/gpu") and key.endswith(f"/{leaf}"))]
            columns = {key: [numeric(line.get(key)) for line in run.system] for key in keys[:_MOST_KEYS]}
            if len(runs) > 1 and columns:
                rows = [[value for value in row if value is not None] for row in zip(*columns.values(), strict=True)]
                columns = {run.name: [_mean(row) if row else None for row in rows]}
            for number, (key, y) in enumerate(columns.items()):
                name = key.split("/")[1] if len(runs) == 1 else key
                series.append(Series(name, x, y, colour=index if len(runs) > 1 else number))
        if any(value is not None for curve in series for value in curve.y):
            found.append(replace(chart, series=series, over=over))
    return found


def _running_minutes(lines: Sequence[Line]) -> list[float]:
    """The minutes at each sample since the first. A pause between two starts counts as one interval."""
    seconds = [numeric(line.get("time")) or 0.0 for line in lines]
    steps = [max(0.0, after - before) for before, after in pairwise(seconds)]
    usual = median(steps) if steps else 0.0
    total, minutes = 0.0, [0.0] * bool(seconds)
    for step in steps:
        total += step if step <= max(60.0, 5.0 * usual) else usual
        minutes.append(total / 60.0)
    return minutes


def without_zeros(
    main: Sequence[Chart], others: Sequence[Chart], *, one_by_one: bool
) -> tuple[list[Chart], list[Chart], list[str]]:
    """(main, others, names of what was removed), without charts that are zero throughout. one_by_one: the series of a
    chart are metrics of one run, so single zero series are removed, too; else they are one metric of several runs."""
    zero: list[str] = []

    def kept(charts: Sequence[Chart]) -> list[Chart]:
        remaining = []
        for chart in charts:
            flat = [series.name for series in chart.series if series.is_zero]
            if len(flat) == len(chart.series):
                zero.append(chart.title)
                continue
            if flat and one_by_one:
                zero.append(f"{chart.title} ({', '.join(flat)})")
                chart = replace(chart, series=[series for series in chart.series if not series.is_zero])
            remaining.append(chart)
        return remaining

    return kept(main), kept(others), zero


def _by_source(runs: Sequence[ReportedRun], keys: Sequence[str]) -> list[Chart]:
    """One chart for each key. For a single run, keys such as `eval/NAME/loss` share a chart, with a series a NAME."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split("/")
        has_own_chart = len(runs) > 1 or len(parts) != 3 or parts[0] != "eval"
        groups.setdefault(key if has_own_chart else f"eval/*/{parts[2]}", []).append(key)
    found = []
    for title, members in groups.items():
        series = [curve for key in members for curve in _series(runs, key)]
        if len(members) > 1:
            series = [replace(curve, name=curve.name.split("/")[1], colour=index) for index, curve in enumerate(series)]
        leaf = title.rpartition("/")[2]
        name = title if len(members) > 1 else members[0]
        share = leaf in ("accuracy", "exact", "clipped_ratio") or leaf.startswith("pass@")
        found.append(Chart(name, _unit(runs, leaf), series, percent=share))
    return found


def _unit(runs: Sequence[ReportedRun], leaf: str) -> str:
    """The unit of a metric. Accuracy counts whole answers in `weft rl`, and tokens in other runs."""
    if leaf == "accuracy" and any(is_rl(run) for run in runs):
        return "share of held-out prompts"
    return _UNITS.get(leaf, "")


def _series(runs: Sequence[ReportedRun], key: str) -> list[Series]:
    series = []
    for index, run in enumerate(runs):
        x, y = run.points(key)
        if x:
            series.append(Series(run.name if len(runs) > 1 else key, x, y, colour=index))
    return series


def _evaluation(runs: Sequence[ReportedRun]) -> list[Series]:
    """The series of held-out losses; of several runs, each in the colour of its run."""
    series = []
    for index, run in enumerate(runs):
        x, y = run.points("eval/loss")
        if x:
            compared = len(runs) > 1
            name = f"{run.name}, held out" if compared else "held out (eval/loss)"
            series.append(Series(name, x, y, colour=index if compared else 1, held_out=True))
    return series


def _phase_chart(run: ReportedRun) -> Chart:
    series = []
    lines = [line for line in run.lines if any(f"time/{phase}" in line for phase in PHASES)]
    x = [float(line["step"]) for line in lines]
    for index, phase in enumerate(PHASES):
        y = [numeric(line.get(f"time/{phase}")) for line in lines]
        if any(y):
            series.append(Series(phase, x, y, colour=index))
    return Chart("Time by phase", "seconds per step, first rank", series, stacked=True)


def _skipped(runs: Sequence[ReportedRun]) -> list[float]:
    return [float(line["step"]) for run in runs for line in run.lines if line.get("skipped")]


def _drawn(chart: Chart) -> dict[str, Any]:
    svg, data = draw(chart)
    solid = [series for series in chart.series if not series.held_out]
    axis = f"axis: difference from {data['base']}" if data["base"] else "log scale" if logarithmic(chart) else ""
    unit = ", ".join(text for text in (chart.unit, axis) if text)
    return {
        "title": chart.title,
        "unit": unit,
        "svg": clean(svg),
        "data": json.dumps(data, separators=(",", ":")),
        "legend": [(s.name, s.colour % COLOURS) for s in solid] if len(chart.series) > 1 else [],
        "dashed": [(s.name, s.colour % COLOURS) for s in chart.series if s.held_out][:1],
        "skipped": len(chart.marks),
    }


# ---------------------------------------------------------------- numbers


def _about(run: ReportedRun, index: int) -> dict[str, Any]:
    seconds = {name: value for name, value in run.summary.get("seconds", {}).items() if name != "total"}
    total = sum(seconds.values())
    return {
        "name": run.name,
        "folder": str(run.folder),
        "colour": index % COLOURS,
        "status": _status(run),
        "failed": not run.runs and bool(run.starts) and (bool(run.failures) or bool(run.starts[-1].get("error"))),
        "failures": () if run.runs else run.failures,
        "facts": _facts(run),
        "model": run.config.get("model", {}).get("path", "-"),
        "data": run.summary.get("data") or run.config.get("data", {}).get("path", "-"),
        "phases": [
            {"name": name, "time": duration(value), "share": value / total, "colour": n % COLOURS}
            for n, (name, value) in enumerate(seconds.items())
        ] if total else [],
        "skipped": [line for line in run.lines if line.get("skipped")],
        "samples": _samples(run),
        "rollouts": run.rollouts,
        "over_time": run.over_time,
        "checkpoints": run.checkpoints,
        "settings": _settings(run),
        "config": run.config_text,
        "notes": run.notes,
        "versions": {name: version for name, version in run.summary.get("versions", {}).items() if version},
    }  # fmt: skip


def _status(run: ReportedRun) -> str:
    last, start = run.lines[-1]["step"], run.starts[-1] if run.starts else {}
    if run.runs:
        return f"running: {last:,} steps so far"
    cause = next(
        (failure["message"] for failure in run.failures if failure["message"] and not failure["lost"]),
        start.get("error"),
    )
    if cause:
        return f"failed after step {last:,}: {cause.splitlines()[0]}"
    if start and "ended" not in start:
        return f"ended without a word after step {last:,}: killed, or its machine failed"
    if not run.summary:
        return f"not finished: {last:,} steps so far"
    stopped = run.summary.get("stopped")
    return f"stopped by {stopped} after step {last:,}" if stopped else f"finished after {last:,} steps"


def _facts(run: ReportedRun) -> dict[str, str]:
    """Name -> text: where, when and on what the run was started the last time, and by which command."""
    if not run.starts:
        return {}
    start = run.starts[-1]
    versions = {**start["versions"], **run.summary.get("versions", {})}
    restarts = f"; {len(run.starts)} starts, the last after step {start['step']:,}" if len(run.starts) > 1 else ""
    facts = {
        "device": f"{start['ranks']} x {start.get('device', '')}",
        "mesh": ", ".join(f"{axis} {size}" for axis, size in start["mesh"].items()),
        "rollout engines": start.get("engines", ""),
        "host": start.get("host", ""),
        "started": _day(run.starts[0]["started"]) + restarts,
        "ended": _day(start.get("ended", "")),
        "command": start.get("command", ""),
        "git commit": start.get("commit", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    return {name: text for name, text in facts.items() if text}


def _day(text: str) -> str:
    """`2026-11-26 08:59:33 UTC` of a time in ISO 8601; other texts as they are."""
    try:
        return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return text


def _facts_of_several(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for values in facts for name in values)
    return [{"name": name, "values": [values.get(name, "-") for values in facts]} for name in names]


def _settings(run: ReportedRun) -> dict[str, list[dict[str, str]]]:
    """The keys of the config that differ from their defaults (`set`) and the others: name, value, default, help."""
    rows: dict[str, list[dict[str, str]]] = {"set": [], "default": []}
    schema = schema_keys(RlConfig if "rl" in run.config else SftConfig)
    for section, values in run.config.items():
        for leaf, value in (values or {}).items():
            key = schema.get(f"{section}.{leaf}")
            default = None if key is None or key.required else plain_value(key.default)
            same = key is not None and not key.required and default == value
            shown = "-" if key is None or key.required else _shown(default)
            row = {
                "name": f"{section}.{leaf}",
                "value": _shown(value),
                "default": shown,
                "help": key.help if key else "",
            }
            rows["default" if same else "set"].append(row)
    return rows


def _samples(run: ReportedRun) -> list[dict[str, Any]]:
    """The answers grouped by prompt and images, prompts and answers in order. moments: the first, the last and some
    between; every: all, if these are more."""
    groups: dict[str, dict[str, Any]] = {}
    for sample in run.samples:
        prompt, images = _words(sample.get("prompt", "")), sample.get("images")
        group = groups.setdefault(f"{prompt}\n{images}", {"prompt": prompt, "images": images, "every": []})
        group["every"].append({"when": f"step {sample.get('step')}", "about": "", "text": _words(sample["answer"])})
    for group in groups.values():
        group["moments"] = [group["every"][index] for index in evenly(range(len(group["every"])), _MOST_ANSWERS)]
        group["every"] = group["every"] if len(group["every"]) > len(group["moments"]) else []
    return [{**group, "pictures": pictures(group["images"])} for group in groups.values()]


def _words(value: object) -> str:
    """A text as it is; messages as lines of `role: content`."""
    if isinstance(value, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in value)
    return str(value)


def _learnt(run: ReportedRun) -> dict[str, tuple[str, str]]:
    """The figures of the training goal: training and held-out loss, or reward and held-out accuracy."""
    rl = is_rl(run)
    figures: dict[str, tuple[str, str]] = {}
    values = [value for value in run.points("reward" if rl else "loss")[1] if value is not None]
    if values:
        window = max(1, min(10, len(values) // 2))  # so few that the first and the last do not overlap
        note = f"mean of the last {window}; first {window}" if window > 1 else "the last step; the first"
        figures["Reward" if rl else "Loss"] = (
            f"{_mean(values[-window:]):.4f}",
            f"{note}: {_mean(values[:window]):.4f}",
        )
    steps, held_out = run.points("eval/accuracy" if rl else "eval/loss")
    points = [(value, step) for step, value in zip(steps, held_out, strict=True) if value is not None]
    if points:
        best, step = min(points, key=lambda point: (-point[0] if rl else point[0], point[1]))
        name = "Held-out accuracy" if rl else "Held-out loss"
        figures[name] = (f"{best:.4f}", f"best, at step {step:.0f}; last: {points[-1][0]:.4f}")
    return figures


def _figures(run: ReportedRun) -> dict[str, tuple[str, str]]:
    """The figures of a run: name -> (number, note)."""
    figures = _learnt(run)
    skipped = sum(bool(line.get("skipped")) for line in run.lines)
    epochs = run.lines[-1].get("epoch")
    figures["Steps"] = (f"{run.lines[-1]['step']:,}", f"{skipped} skipped" + (f"; epoch {epochs}" if epochs else ""))
    figures["Tokens"] = (count(_total(run, "tokens")), f"{count(_total(run, 'loss_tokens'))} of them trained on")
    rates = [value for value in run.points("tokens_per_second")[1] if value is not None]
    mfu = [value for value in run.points("mfu")[1] if value is not None]
    if rates:
        share = f"; MFU {median(mfu):.1%}" if mfu else ""
        figures["Tokens/s"] = (f"{median(rates):,.0f}", f"median, all ranks{share}")
    memory = [value for value in run.points("memory_gib")[1] if value is not None]
    if memory:
        figures["Peak memory"] = (f"{max(memory):.2f} GiB", "largest rank")
    figures["Time"] = _time(run)
    return figures


def _time(run: ReportedRun) -> tuple[str, str]:
    seconds = run.summary.get("seconds", {})
    in_steps = sum(value for value in run.points("seconds")[1] if value is not None)
    if not seconds.get("total"):
        return duration(in_steps), "in steps"
    return duration(seconds["total"]), f"{in_steps / seconds['total']:.0%} of it in steps"


def _total(run: ReportedRun, key: str) -> int:
    return round(sum(value for value in run.points(key)[1] if value is not None))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _tiles(run: ReportedRun) -> list[dict[str, str]]:
    return [{"name": name, "number": value, "note": note} for name, (value, note) in _figures(run).items()]


def _comparison(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    figures = [_figures(run) for run in runs]
    names = list(dict.fromkeys(name for values in figures for name in values))
    return {"names": names, "rows": [[values.get(name, ("-", "")) for name in names] for values in figures]}


def _differing(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """The keys of the config whose values differ between runs. A run that lacks a key has its default."""
    flat = [{f"{s}.{k}": _shown(v) for s, keys in run.config.items() for k, v in (keys or {}).items()} for run in runs]
    schema = {**schema_keys(SftConfig), **schema_keys(RlConfig)}
    rows = []
    for name in dict.fromkeys(name for config in flat for name in config):
        key = schema.get(name)
        default = "-" if key is None or key.required else _shown(plain_value(key.default))
        if len({config.get(name, default) for config in flat}) > 1:
            rows.append({"key": name, "values": [config.get(name, "-") for config in flat]})
    return rows


def _shown(value: object) -> str:
    """A value of the config as YAML on one line, shortened."""
    if isinstance(value, str):
        text = value
    else:
        text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=1 << 20, allow_unicode=True)
        text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]} ..."
