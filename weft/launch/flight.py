"""The flight record: the current activity of this rank, in a small file that remains after the process ends.

Recipes and the engine call `flight.enter("forward", 2, documents)`, which takes some microseconds. The file has two
lines of fixed width, each with a checksum. They are written alternately, so one of them is complete even after a kill
-9. The file is in the launcher's scratch folder or, without weft's launcher, at RUN/flight/rank-00000.live. After a
failure the record is saved as RUN/flight/rank-00000.json.
`listeners` are called when a phase begins; timing.py and profiling.py use them.
Times are from the monotonic clock, which all processes of a machine share. Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "flight"
_LINE = 4096
_TRAIL = 32
_MOST_DOCUMENTS = 8
_LONGEST_SOURCE = 120
# Fields of a collective in torch's flight recorder -> the functions that read them.
_KEYS = ("collective_seq_id", "profiling_name", "state", "input_sizes", "input_dtypes", "timeout_ms")
_GROUPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
# Slow phases -> the multiple of train.timeout after which weft reports a hang.
PATIENCE = {"load": 10.0, "save": 10.0, "sample": 10.0, "profile": 10.0}
ENDLESS = "idle"  # has no limit, because another process ends it
FIRST_STEP_PATIENCE = 10.0  # compilation

_WORDS = {
    "start": "at start",
    "data": "reading the data",
    "load": "loading the model",
    "plan": "planning the step",
    "count": "counting the experts' choices, micro-batch {micro_batch}",
    "rows": "laying out micro-batch {micro_batch}",
    "forward": "forward of micro-batch {micro_batch}",
    "backward": "backward of micro-batch {micro_batch}",
    "reduce": "reducing the metrics",
    "optimizer": "optimizer",
    "evaluate": "evaluating, forward of micro-batch {micro_batch}",
    "sample": "answering eval.prompts",
    "record": "writing the metrics",
    "profile": "writing the profile",
    "save": "saving",
    "upload": "uploading",
    "idle": "waiting for the controller",
    "sync": "syncing weights",
    "generate": "generating",
    "serve": "serving completions",
    "score": "scoring conversations",
    "logprobs": "computing logprobs, forward of micro-batch {micro_batch}",
}
# Phases of models other than the trained one.
_ROLE_WORDS = {
    "load": "loading {role}",
    **dict.fromkeys(("evaluate", "logprobs", "readout"), "reading {role}, forward of micro-batch {micro_batch}"),
}
_ABOUT_DOCUMENTS = ("plan", "count", "rows", "forward", "backward", "reduce", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """The state of one rank. since: when the phase began or last made progress. limit: seconds that the phase may take
    without progress. timeout: the limit of a phase that is not slow. step: 0 before the first. role: the model that the
    rank computes, if it is not the trained one. documents: sources of the first few of the phase's `count` documents.
    plan: digest of the step's plan. changes: number of phases so far, equal on ranks with equal progress. trail: the
    last phases, oldest first: since, step, phase, micro_batch."""

    rank: int = 0
    world: int = 1
    pid: int = 0
    run: str = ""
    limit: float | None = None
    timeout: float | None = None
    step: int = 0
    steps: int = 0
    plan: str = ""
    role: str = ""
    documents: Sequence[str] = ()
    count: int = 0
    phase: str = "start"
    micro_batch: int = 0
    since: float = 0.0
    changes: int = 0
    trail: Sequence[Any] = ()

    def activity(self) -> str:
        """The activity in words: `in step 3 of 6, forward of micro-batch 1, documents a.jsonl:3, a.jsonl:7`."""
        words = _WORDS.get(self.phase, self.phase)
        if self.role:
            words = _ROLE_WORDS.get(self.phase, words + " ({role})")
        words = words.format(micro_batch=self.micro_batch, role=self.role)
        if not self.step:
            return words
        text = f"in step {self.step} of {self.steps}, {words}"
        if self.documents and self.phase in _ABOUT_DOCUMENTS:
            hidden = f" and {self.count - len(self.documents)} more" if self.count > len(self.documents) else ""
            text += f", documents {', '.join(self.documents)}{hidden}"
        return text


class FlightRecorder:
    """The record of this process. Without a file it is only in memory."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._file: int | None = None
        self._path: Path | None = None
        self._is_in_run = False  # whether the file is in RUN, because there is no launcher to read it
        self._fixed: dict[str, Any] = {"rank": 0, "world": 1, "pid": os.getpid(), "run": ""}
        self._step: dict[str, Any] = {"step": 0, "steps": 0, "plan": "", "role": ""}
        self._about = '"documents":[],"count":0'
        self._head = ""  # the part that changes only with the step, as JSON
        self._trail: deque[str] = deque(maxlen=_TRAIL)
        self._timeout: float | None = None
        self.key = "train.timeout"  # the config key of the timeout
        self._first_step = 0
        self._written, self._turn = 0.0, False
        self.phase, self.micro_batch, self.changes = "start", 0, 0
        self.since = time.monotonic()
        self.limit: float | None = None
        self.listeners: list[Callable[[str, int], None]] = []

    # ------------------------------------------------------------ reports of the rank

    def begin(self, rank: int, world: int) -> None:
        """Set this rank and the number of ranks."""
        self._fixed |= {"rank": rank, "world": world, "pid": os.getpid()}
        self._head = ""
        self.enter(self.phase)

    def watch(self, timeout: float, key: str = "train.timeout") -> None:
        """From now on, a phase without progress for `timeout` seconds, or a multiple of it for slow phases, is a hang.
        key: the config key of the timeout."""
        self._timeout, self.key = timeout, key
        self._fixed["timeout"] = timeout
        self._head = ""
        self.enter(self.phase)

    @property
    def patience(self) -> str:
        """The time that this rank waits for others, in words."""
        return self.key if self._timeout is None else f"{self._timeout:g} seconds ({self.key})"

    def in_run(self, run: Path) -> None:
        """Set RUN, which now exists. Without a launcher the record is stored there."""
        self._fixed["run"] = str(run)
        if self._file is None:
            path = run / FOLDER / live_name(self._fixed["rank"])
            earlier = read(path)
            if earlier is not None:
                save(earlier, {"where": earlier.activity(), "message": "the process ended without a message"})
            self.open(path)
            self._is_in_run = True
        self._head = ""
        self._write()

    def step(self, number: int, steps: int, documents: Sequence[str] = (), count: int | None = None) -> None:
        """Begin a step. documents: sources of its documents, at least the first few. count: number of documents in the
        step, if `documents` has only some of them."""
        self._first_step = self._first_step or number
        self._step, self._head = {"step": number, "steps": steps, "plan": "", "role": ""}, ""
        self.enter("plan", documents=documents, count=count)

    def planned(self, digest: str) -> None:
        """Set the digest of this rank's plan of the step."""
        self._step["plan"] = digest
        self._head = ""

    @contextmanager
    def computing(self, role: str) -> Iterator[None]:
        """Inside, phases belong to a model other than the trained one. role: its name, as in `the reference`. After an
        error the record keeps the role."""
        self._set_role(role)
        yield
        self._set_role("")

    def _set_role(self, role: str) -> None:
        self._step["role"], self._head = role, ""
        self._write()

    def enter(
        self, phase: str, micro_batch: int = 0, documents: Sequence[str] | None = None, count: int | None = None
    ) -> None:
        """Begin a phase. micro_batch counts from 1. documents: sources of the documents in this phase; None: unchanged.
        count: as in step()."""
        self.phase, self.micro_batch = phase, micro_batch
        self.since = time.monotonic()
        self.changes += 1
        for listener in self.listeners:
            listener(phase, micro_batch)
        if self._timeout is not None:
            first = self._first_step and self._step["step"] == self._first_step
            slow = FIRST_STEP_PATIENCE if first else 1.0
            self.limit = None if phase == ENDLESS else self._timeout * max(slow, PATIENCE.get(phase, 1.0))
        if documents is not None:
            shown = [source[-_LONGEST_SOURCE:] for source in documents[:_MOST_DOCUMENTS]]
            self._about = f'"documents":{json.dumps(shown)},"count":{count or len(documents)}'
        self._trail.append(f'[{self.since:.6f},{self._step["step"]},"{phase}",{micro_batch}]')
        self._write()

    def beat(self) -> None:
        """Record that the current phase, which takes long, has made progress."""
        self.since = time.monotonic()
        if self.since - self._written > 1.0:
            self._write()

    def record(self) -> FlightRecord:
        """The current record."""
        return FlightRecord(**json.loads(self._text()))

    def silence(self) -> float | None:
        """Seconds by which the time without progress exceeds the limit; None within it."""
        over = -1.0 if self.limit is None else time.monotonic() - self.since - self.limit
        return over if over > 0 else None

    # ------------------------------------------------------------ the file

    def open(self, path: Path) -> None:
        """Write the record to this file from now on. An error is ignored: a record never ends a run."""
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            self._path = path
            self._write()

    def close(self, remove: bool = True) -> None:
        """Close the file and reset the record. remove: delete the file, if it is in RUN."""
        if self._file is not None:
            os.close(self._file)
        if remove and self._is_in_run and self._path is not None:
            with suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()  # succeeds for the last rank that leaves
        self._reset()

    def _text(self) -> str:
        if not self._head:
            self._head = json.dumps({**self._fixed, **self._step})[:-1]
        limit = "null" if self.limit is None else f"{self.limit:.3f}"
        return (
            f'{self._head},{self._about},"phase":"{self.phase}","micro_batch":{self.micro_batch},"since":{self.since:.6f},'
            f'"limit":{limit},"changes":{self.changes},"trail":[{",".join(self._trail)}]}}'
        )

    def _write(self) -> None:
        if self._file is None:
            return
        self._written = time.monotonic()
        text = self._text().encode()
        line = b"%08x %s" % (zlib.crc32(text), text)
        if len(line) < _LINE:
            self._turn = not self._turn
            with suppress(OSError):  # a full disk must end the run only if data would be lost
                os.pwrite(self._file, line.ljust(_LINE - 1) + b"\n", _LINE * self._turn)


def live_name(rank: int) -> str:
    """rank-00000.live"""
    return f"rank-{rank:05d}.live"


def kept_name(rank: int) -> str:
    """rank-00000.json"""
    return f"rank-{rank:05d}.json"


def read(path: Path) -> FlightRecord | None:
    """The newest complete record in a file of a rank or of `save`; None if there is none."""
    records = []
    with suppress(OSError, ValueError):
        content = path.read_bytes()
        if content.startswith(b"{"):
            return FlightRecord(**json.loads(content)["record"])
        for start in (0, _LINE):
            check, _, text = content[start : start + _LINE].rstrip(b" \n\0").partition(b" ")
            if text and check == b"%08x" % zlib.crc32(text):
                records.append(FlightRecord(**json.loads(text)))
    return max(records, key=lambda record: (record.changes, record.since), default=None)


def read_all(folder: Path) -> dict[int, FlightRecord]:
    """rank -> record for every file in a folder. If a rank has both kinds of file, the live file counts."""
    records = (read(path) for path in sorted(folder.glob("rank-*[.]*")) if path.suffix in (".json", ".live"))
    return {record.rank: record for record in records if record is not None}


def save(record: FlightRecord, details: Mapping[str, Any]) -> bool:
    """Write a rank's record, and `details` about its end, into RUN/flight, in a form that people can read. Returns
    False if that fails."""
    if not record.run:
        return False
    path = Path(record.run) / FOLDER / kept_name(record.rank)
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        noted = {**asdict(record), "trail": [" ".join(map(str, entry)) for entry in record.trail]}  # one line per entry
        draft.write_text(json.dumps({"record": noted, **details}, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        return False
    return True


def furthest_behind(records: Mapping[int, FlightRecord]) -> list[int]:
    """The ranks that have made the least progress; empty if all are equal."""
    progress = {rank: (record.step, record.changes) for rank, record in records.items()}
    slowest = [rank for rank, position in progress.items() if position == min(progress.values())]
    return slowest if len(slowest) < len(records) else []


def last_collectives(count: int = 16) -> list[dict[str, Any]]:
    """The last collectives of gloo and NCCL, oldest first, from torch's flight recorder; empty without a process group
    or a recorder."""
    c10d = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    collectives: list[dict[str, Any]] = []
    for name in _GROUPS:
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
        except Exception:  # the failure that is reported matters more
            continue
        for entry in entries[-count:]:
            group = entry.get("process_group") or [""]
            collectives.append({"group": group[-1], **{key: entry[key] for key in _KEYS if key in entry}})
    return collectives


# The record of this process. It is global, because there is one per process.
recorder = FlightRecorder()
enter, beat, step, planned = recorder.enter, recorder.beat, recorder.step, recorder.planned
computing = recorder.computing
begin, watch, in_run = recorder.begin, recorder.watch, recorder.in_run


def activity() -> str:
    """The current activity of this rank, in words."""
    return recorder.record().activity()
