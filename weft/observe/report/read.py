"""Reads a run folder for `weft report`. Files may be incomplete, damaged, or written by someone else. Content that
cannot be shown is omitted with a note. Imports no torch."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from weft.checkpoint.retention import TRAINER_STATE, complete_steps, step_folder
from weft.config.keys import with_current_names
from weft.config.load import plain_sections
from weft.config.rl_schema import RlConfig
from weft.config.yaml12 import read_file
from weft.errors import UserError
from weft.files import LOCK
from weft.launch.flight import FOLDER as FLIGHT
from weft.observe.report.samples import best_and_worst, samples_over_time
from weft.observe.report.svg import numeric
from weft.observe.report.timeline import timelines
from weft.observe.starts import STARTS
from weft.observe.system import SYSTEM
from weft.terminal import byte_count, clean

Line = dict[str, Any]

MAX_KEYS = 500  # metrics, GPUs and ranks that are shown
# Values beyond these limits are not shown: the run folder is damaged, or was not written by weft.
_MAX_STEP, _LARGEST, _SMALLEST = 10**12, 1e30, 1e-30
_MAX_NAME, _MAX_CONFIG = 200, 1 << 20
_MAX_RANKS, _MAX_MESSAGE = 64, 500  # of a failure: ranks that are shown, characters of each message
_COMPARED = 512  # last bytes of metrics.jsonl, which identify a replaced file
_RUNNING_SECONDS = 120.0  # if the lock is not visible, a run counts as running when its last step is younger


@dataclass(frozen=True)
class ReportedRun:
    """The content of a run folder. summary: empty if the run has not ended. rollouts: for `weft rl`, the best and the
    worst samples of the last rollout step. over_time: for `weft rl`, answers to the same prompts. timelines: of its
    samples. starts: lines of starts.jsonl, each with its end. failures: the last activity of each rank in the last
    failed start, the probable cause first. system: lines of system.jsonl. is_running: whether the run continues. notes:
    unreadable content."""

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
    timelines: Mapping[str, Any] | None = None
    starts: Sequence[Line] = ()
    failures: Sequence[Mapping[str, Any]] = ()
    system: Sequence[Line] = ()
    is_running: bool = False
    notes: Sequence[str] = ()

    @property
    def is_rl(self) -> bool:
        """Whether `weft rl` wrote the run: the config has the section rl, or a line contains a rollout step."""
        return "rl" in self.config or any("rollout" in line for line in self.lines)

    def points(self, key: str) -> tuple[list[float], list[float | None]]:
        """(Steps, values) of the lines of metrics that have the key."""
        points = [(float(line["step"]), numeric(line[key])) for line in self.lines if key in line]
        return [x for x, _ in points], [y for _, y in points]

    def values(self, key: str) -> list[float]:
        """The numeric values of a metric."""
        return [value for value in self.points(key)[1] if value is not None]

    def has(self, key: str) -> bool:
        return any(numeric(line.get(key)) is not None for line in self.lines)


class NoStepError(UserError):
    """A run is running, but no step of it has ended yet."""


def read_run(folder: Path, tail: MetricsTail | None = None) -> ReportedRun:
    """Reads all content of a run folder for the page. tail: reads its metrics; samples, checkpoints and the machine's
    load, which take most of the time, are then omitted. Raises UserError if no step is recorded, or NoStepError if the
    first step may still end."""
    metrics, unread = folder / "metrics.jsonl", f"{folder}: no step has ended yet, so weft has nothing to show."
    if not metrics.is_file():
        if _is_running(folder, {}):
            raise NoStepError(unread)
        problem = "contains no metrics.jsonl, so it has no step of a run" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder}: it {problem}. Write the run.dir of a run.")
    notes: list[str] = []
    if tail is None:
        written = _read_lines(metrics, notes)
        lines = [_plain(line) for line in written if _has_step(line)]
        if len(lines) < len(written):
            notes.append(f"{metrics}: {len(written) - len(lines):,} lines without a step are omitted")
    else:
        lines = tail.read()
    starts = _read_starts(folder / STARTS, notes)
    if not lines:
        if _is_running(folder, starts[-1] if starts else {}):
            raise NoStepError(unread)
        ended = f" The run failed: {starts[-1]['error']}." if starts and starts[-1].get("error") else ""
        raise UserError(unread + ended)
    config: dict[str, dict[str, Any]] = {}
    if (folder / "config.yaml").is_file():
        try:
            config = with_current_names(plain_sections(read_file(str(folder / "config.yaml"))), RlConfig)
        except UserError as error:
            notes.append(str(error))
    try:
        rollouts = best_and_worst(folder) if tail is None else None
    except UserError as error:
        rollouts = None
        notes.append(str(error))
    return ReportedRun(
        folder=folder,
        name=folder.resolve().name,
        config=config,
        config_text=_read_text(folder / "config.yaml", notes)[:_MAX_CONFIG],
        lines=lines,
        summary=_read_summary(folder / "summary.json", notes),
        samples=[line for line in _read_lines(folder / "samples.jsonl", notes) if "answer" in line]
        if tail is None
        else (),
        checkpoints=_checkpoints(folder / "checkpoints") if tail is None else (),
        rollouts=rollouts,
        over_time=samples_over_time(folder, notes) if tail is None else (),
        timelines=timelines(folder, notes) if tail is None else None,
        starts=starts,
        failures=_read_failures(folder, starts, notes),
        system=[_plain(line) for line in _read_lines(folder / SYSTEM, notes)] if tail is None else (),
        is_running=_is_running(folder, starts[-1] if starts else {}),
        notes=list(dict.fromkeys(notes)),
    )


class MetricsTail:
    """The lines of a metrics.jsonl that grows. Each read parses the bytes that were appended since the last read. A
    file that was replaced, or truncated and rewritten (by a resumed run), is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[Line] = []
        self._offset, self._last = 0, b""  # the position after the last complete line; the bytes before it

    def read(self) -> list[Line]:
        """All lines so far, without an incomplete last line, which a later read returns."""
        with self._path.open("rb") as stream:
            stream.seek(self._offset - len(self._last))
            if stream.read(len(self._last)) != self._last:
                self._lines, self._offset, self._last = [], 0, b""
            stream.seek(self._offset)
            appended = stream.read()
        complete = appended[: appended.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._last = (self._last + complete)[-_COMPARED:]
        for text in complete.decode("utf-8", "replace").split("\n"):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and _has_step(line):
                self._lines.append(_plain(line))
        return self._lines


def _has_step(line: Line) -> bool:
    return type(step := line.get("step")) is int and 0 <= step < _MAX_STEP


def _read_text(path: Path, notes: list[str]) -> str:
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


def _read_lines(path: Path, notes: list[str]) -> list[Line]:
    """The objects of a JSONL file. An incomplete last line, which a killed run leaves, is skipped without a note."""
    objects, skipped = [], 0
    texts = _read_text(path, notes).split("\n")
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
        notes.append(f"{path}: {skipped:,} lines are not JSON objects and are omitted")
    return objects


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object of a JSON file; empty if there is none."""
    try:
        content = json.loads(_read_text(path, notes) or "{}")
    except (ValueError, RecursionError):
        notes.append(f"{path}: not valid JSON, omitted")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path}: not a JSON object, omitted")
        return {}
    return content


def _plain(line: Line) -> Line:
    """The line with its texts, booleans, and finite numbers that a chart can show. Other values become None."""
    plain: Line = {}
    for key, value in line.items():
        if not isinstance(value, bool | str):
            # NaN compares false, so it becomes None.
            is_shown = isinstance(value, int | float) and abs(value) < _LARGEST
            value = (value if abs(value) > _SMALLEST else 0) if is_shown else None
        plain[clean(key)[:_MAX_NAME]] = value
    return plain


def _read_summary(path: Path, notes: list[str]) -> dict[str, Any]:
    content = _read_object(path, notes)
    if not content:
        return {}
    summary: dict[str, Any] = {name: v for name in ("stopped", "data") if isinstance(v := content.get(name), str)}
    for name, kind in (("seconds", float | int), ("versions", str)):
        values = _plain(content[name]) if isinstance(content.get(name), dict) else {}
        summary[name] = {key: value for key, value in values.items() if isinstance(value, kind)}
    summary["seconds"] = {key: max(0, value) for key, value in summary["seconds"].items()}
    return summary


def _read_starts(path: Path, notes: list[str]) -> list[Line]:
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
                starts[-1][name] = value if type(value := line.get(name)) is int and 0 <= value < _MAX_STEP else 0
        elif starts:
            starts[-1] |= {name: texts[name] for name in ("ended", "error") if name in texts}
    return starts


def _read_failures(folder: Path, starts: Sequence[Line], notes: list[str]) -> list[dict[str, Any]]:
    """The files that the ranks of the last start wrote to RUN/flight, if it failed. Ranks that lost their connection to
    another rank come last, because their failures are consequences."""
    if not starts or ("ended" in starts[-1] and not starts[-1].get("error")):
        return []
    try:
        started = datetime.fromisoformat(starts[-1]["started"]).timestamp()
    except (ValueError, OverflowError):
        return []
    failures = []
    for path in sorted((folder / FLIGHT).glob("rank-*.json"))[:MAX_KEYS]:
        report = _read_object(path, notes)
        message, activity = (text if isinstance(text := report.get(name), str) else "" for name in ("message", "where"))
        rank = path.stem.removeprefix("rank-").lstrip("0") or "0"
        if report and path.stat().st_mtime >= started:
            lost_peer = report.get("kind") == "peer"
            failures.append(
                {"rank": rank, "lost_peer": lost_peer, "activity": activity, "message": message[:_MAX_MESSAGE]}
            )
    return sorted(failures, key=lambda failure: (failure["lost_peer"], not failure["message"]))[:_MAX_RANKS]


def _is_running(folder: Path, start: Mapping[str, Any]) -> bool:
    """Whether the run continues: a process of this machine holds its lock; or it was started on another machine, whose
    locks may not be visible here, and its last step ended recently. start: the last one, with its end."""
    lock = folder / LOCK
    try:
        if lock.is_symlink() or not lock.is_file():
            return False
        with lock.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if start.get("ended") or start.get("host") == socket.gethostname():
            return False
        return time.time() - (folder / "metrics.jsonl").stat().st_mtime < _RUNNING_SECONDS
    except BlockingIOError:
        return True
    except OSError:
        return False


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The complete checkpoints, the newest first: step, size, and the links to each."""
    if not folder.is_dir():
        return []
    links = {link.name: Path(os.readlink(link)).name for link in folder.iterdir() if link.is_symlink()}
    checkpoints = []
    for step in reversed(complete_steps(folder)):
        path = step_folder(folder, step)
        checkpoints.append(
            {
                "path": f"{folder.name}/{path.name}",
                "step": step,
                "size": byte_count(sum(file.stat().st_size for file in path.rglob("*") if file.is_file())),
                "marks": sorted(name for name, target in links.items() if target == path.name),
                "resumable": (path / TRAINER_STATE).is_dir(),
            }
        )
    return checkpoints
