"""Makes one message from reports, exit statuses and flight records: the rank that failed first, where and why, and how
to fix it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.launch import flight
from weft.launch.flight import FlightRecord
from weft.launch.monitor import FROZEN, STOP_SECONDS, Evidence
from weft.launch.reports import RankReport
from weft.launch.status import STATUS, Kind
from weft.launch.watchdog import in_collective

_SHOWN_CALLS = 6
_SHOWN_RANKS = 8
# (words in RankReport.activity, advice). The last entry applies to all other activities.
_MEMORY = (
    (
        "reading the data",
        "Out of host memory: each rank holds all documents. Start fewer ranks on a machine, or train on less data.",
    ),
    (
        "loading the model",
        "Out of memory: shard over more ranks (mesh.dp_shard=-1 and a larger --nproc), or set fsdp.cpu_offload.",
    ),
    (
        "",
        "Out of memory: lower step.max_tokens_per_device, set model.recompute=selective or full, shard over more ranks "
        "(mesh.dp_shard=-1 and a larger --nproc), or set fsdp.cpu_offload. model.recompute=auto chooses what fits.",
    ),
)
_STORAGE = "The storage is full, read-only or gone: check `df -h` and the folder, then resume from the last checkpoint."
_SIGNALS = {
    "SIGSEGV": " (a crash in native code)",
    "SIGBUS": " (often a full /dev/shm)",
    "SIGABRT": " (native code aborted; its message is above)",
}


_BY_KERNEL = " (probably by the kernel, short of memory: lower step.max_tokens_per_device or use fewer ranks)"
_NOT_BY_KERNEL = " (not by the kernel for lack of memory: its counter of such kills has not changed)"
_NUMBER = re.compile(r"0x[0-9a-f]+|[\d.]+")
_KINDS: dict[int, Kind] = {status: kind for kind, status in STATUS.items() if status > 2}


# Signals of errors in a program. A restart would repeat the error.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)


@dataclass(frozen=True)
class Failure:
    """A failed run. message: the complete text for the user. step: 0 before the first. run: RUN, or empty. error: the
    message of the exception, if there was one. external: whether another program or machine caused it (a signal killed
    or stopped a process, or a host was lost), so that the same step may succeed."""

    kind: Kind
    message: str
    rank: int | None = None
    step: int = 0
    run: str = ""
    error: str = ""
    external: bool = False

    @property
    def status(self) -> int:
        """The exit status."""
        return STATUS[self.kind]

    def repeats(self, other: Failure) -> bool:
        """Whether it is the same error at the same step as `other`. Numbers in the messages may differ."""
        texts = (_NUMBER.sub("", error.partition("\n")[0]) for error in (self.error, other.error))
        return self.step == other.step and next(texts) == next(texts)


def is_external(kind: Kind, message: str = "", exit_status: int | None = None) -> bool:
    """Failure.external for a failure of this kind. message: of the failed process. exit_status: of the killed process
    (negative: the signal), if it is known."""
    if kind == "killed":
        return exit_status is None or (exit_status < 0 and -exit_status not in _CRASHES)
    return kind == "peer" or (kind == "hang" and any(state in message for state in FROZEN.values()))


def diagnose(
    rank_reports: Sequence[RankReport], exits: Mapping[int, int], evidence: Evidence, nproc: int, debug: bool = False
) -> Failure:
    """Find the rank that failed first, and the reason.

    rank_reports: the earliest first. exits: rank -> exit status (negative: the signal) of the ranks that failed, in the
    order in which the launcher detected the failures. evidence: the launcher's observations.
    """
    errors = sorted((report for report in rank_reports if not report.is_verdict), key=lambda report: report.order)
    plan_difference = _unlike_plans(evidence.records)
    silent = _silent_rank(errors, exits)
    error = errors[0].message if errors and silent is None else ""
    if silent is not None:
        kind, text = _explain_silent_rank(silent, exits[silent], evidence)
        rank, stopped = silent, nproc - 1
    else:
        assert errors, "a rank failed, left no report and was not stopped"
        first, rank = errors[0], errors[0].rank
        kind = first.kind
        is_common = len(errors) == nproc and first.plain and len({r.message for r in errors}) == 1
        title = "error: " if is_common else f"rank {rank} failed: "
        stopped = 0 if is_common else nproc - 1
        text = explain(first, title, debug)
        if kind == "hang" or (first.is_consequence and evidence.states.keys() - {report.rank for report in errors}):
            kind, (rank, text) = "hang", explain_hang(errors, evidence, debug)
    if plan_difference and kind in ("hang", "peer", "killed", "failed"):
        kind, text = "disagree", f"{plan_difference}\n{text}"
    if stopped:
        text += f"\n{stopped} other rank{'s were' if stopped != 1 else ' was'} stopped."
    record = evidence.records.get(rank) or next(iter(evidence.records.values()), FlightRecord())
    text += describe_remaining_files(record.run) if kind != "user" else ""
    external = is_external(kind, text, None if silent is None else exits[silent])
    return Failure(kind, text, rank, record.step, record.run, error, external)


def explain(report: RankReport, title: str, debug: bool) -> str:
    """A report as text: the failure, its position, and the fix. A traceback is included only if there is no advice."""
    lines = [title + report.message, report.activity]
    if report.plain:
        pass
    elif report.kind == "memory":
        lines.append(_memory_advice(report.activity))
    elif report.kind == "storage":
        lines.append(_STORAGE)
    elif report.waited:
        lines.append(
            f"Another rank did not come within {report.within}: it has stopped, is stuck, or is in other code."
        )
    if debug or (report.kind == "failed" and not report.plain):
        lines.append(report.traceback)
    elif report.kind == "hang" and not report.waited:
        lines += report.traceback.rstrip().splitlines()[-2 * _SHOWN_CALLS :]
    return "\n".join(line for line in lines if line).rstrip()


def rank_failure_text(report: RankReport, is_distributed: bool, debug: bool) -> str:
    """The message for a rank that weft did not launch: its failure, and the rank for which it waited."""
    text = explain(report, f"rank {report.rank} failed: " if is_distributed else "error: ", debug)
    run = flight.recorder.record().run
    if report.waited and run:
        records = flight.read_all(Path(run) / flight.FOLDER)
        slowest = flight.furthest_behind(records) or [rank for rank in records if rank != report.rank]
        lines = [f"rank {rank} is {records[rank].activity()}" for rank in slowest[:_SHOWN_RANKS]]
        text = "\n".join([text, *filter(None, [_unlike_plans(records)]), *lines])
    return text + (describe_remaining_files(run) if report.kind != "user" else "")


def describe_remaining_files(run: str) -> str:
    """Lines about the files that a failed run leaves: its last checkpoint, and the records of its ranks; empty without
    a run folder."""
    if not run:
        return ""
    lines = [last_whole_checkpoint(Path(run)), f"The last activity of each rank is in {Path(run) / flight.FOLDER}."]
    return "".join(f"\n{line}" for line in lines if line)


def last_whole_checkpoint(run: Path) -> str:
    """A sentence about the last complete checkpoint of a run; empty without one."""
    latest = run / "checkpoints" / "latest"
    return f"The last complete checkpoint is {latest.parent / os.readlink(latest)}." if latest.exists() else ""


def save_current_record(report: RankReport) -> bool:
    """Write this rank's record to RUN/flight, for ranks that weft did not launch. Returns whether it succeeded."""
    return save_evidence([report], {report.rank: report.status}, Evidence({report.rank: flight.recorder.record()}))


def save_evidence(rank_reports: Sequence[RankReport], exits: Mapping[int, int], evidence: Evidence) -> bool:
    """Write each rank's record, and how the rank ended, to RUN/flight. Returns whether it succeeded for all."""
    by_rank, all_saved = {report.rank: report for report in rank_reports}, True
    for rank, record in evidence.records.items():
        details: dict[str, object] = {"where": record.activity(), "exit_status": exits.get(rank)}
        if rank in by_rank:
            report = by_rank[rank]
            details |= {"kind": report.kind, "message": report.message, "traceback": report.traceback}
            details["collectives"] = report.collectives
        details |= {"state": evidence.states.get(rank, ""), "stack": evidence.stacks.get(rank, [])}
        all_saved = flight.save(record, details) and all_saved
    return all_saved


# ---------------------------------------------------------------- a rank that ended without a report


def _silent_rank(errors: Sequence[RankReport], exits: Mapping[int, int]) -> int | None:
    """The rank that ended without a report, because it was killed or called os._exit; None if there is none.

    A rank whose end other ranks reported comes first. Ranks that the agent ended count only if nothing else is
    known: the agent sends SIGTERM to all remaining ranks, and SIGKILL to ranks that still run after STOP_SECONDS.
    """
    reported = {report.rank for report in errors}
    reported_gone = {rank for report in errors for rank in report.ended_ranks}
    stopping = {-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGUSR2}
    if errors and time.monotonic() - min(report.time for report in errors) >= STOP_SECONDS:
        stopping.add(-signal.SIGKILL)
    silent = [rank for rank in exits if rank not in reported]
    witnessed = [rank for rank in silent if rank in reported_gone]
    by_itself = [rank for rank in silent if exits[rank] not in stopping]
    return next(iter(witnessed or by_itself or (silent if not errors else [])), None)


def _explain_silent_rank(rank: int, status: int, evidence: Evidence) -> tuple[Kind, str]:
    record = evidence.records.get(rank)
    activity = f"\n{record.activity()}" if record is not None else ""
    stack = evidence.stacks.get(rank, [])
    calls = _calls(stack) if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE) else ""
    if status in _KINDS:  # its report could not be written
        return _KINDS[status], f"rank {rank} failed with exit status {status}; its message is above{activity}"
    if status >= 0:
        return "killed", f"rank {rank} ended with exit status {status} and no message{activity}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if status == -signal.SIGKILL and evidence.oom_kills:
        return "memory", oom_kill_text(f"rank {rank}", activity)
    if status == -signal.SIGKILL:
        hint = _BY_KERNEL if evidence.oom_kills is None else _NOT_BY_KERNEL
        return "killed", f"rank {rank} was killed by {name}{hint}{activity}"
    limit = record.limit if record is not None else None
    if status == -signal.SIGABRT and record is not None and limit and time.monotonic() - record.since > 0.9 * limit:
        # This is how NCCL's watchdog ends a process.
        return "hang", f"rank {rank} was ended by {name} after train.timeout without progress{activity}{calls}"
    return "killed", f"rank {rank} was killed by {name}{_SIGNALS.get(name, '')}{activity}{calls}"


def oom_kill_text(process: str, activity: str) -> str:
    """The message for a process that was killed for lack of memory. activity: step and phase, or ""."""
    return f"{process} was killed by the kernel, which is short of memory{activity}\n{_memory_advice(activity)}"


# ---------------------------------------------------------------- a rank that hangs


def explain_hang(errors: Sequence[RankReport], evidence: Evidence, debug: bool, name: str = "rank") -> tuple[int, str]:
    """(The rank that is stuck, not a rank that waited for it; the message). name: the word for a rank."""
    suspects = stuck_ranks(errors, evidence)
    first = errors[0]
    if not suspects or not any(report.is_consequence for report in errors):
        return first.rank, explain(first, f"{name} {first.rank} failed: ", debug)
    lines, within = [], next((report.within for report in errors if report.waited), first.within)
    for rank in suspects:
        record, state = evidence.records[rank], evidence.states.get(rank)
        because = f"; it is {state}" if state else ""
        lines.append(f"{name} {rank} is stuck: it did not come within {within}{because}")
        lines.append(record.activity() + _calls(evidence.stacks.get(rank, [])))
    waiting = ", ".join(f"{r.rank} ({r.activity})" for r in errors if r.rank not in suspects)
    lines.append(f"waiting: {name} {waiting}")
    if debug:
        lines.append(first.traceback)
    return suspects[0], "\n".join(lines).rstrip()


def stuck_ranks(errors: Sequence[RankReport], evidence: Evidence) -> list[int]:
    """The ranks that are stopped; otherwise ranks outside of a collective that others are inside of; otherwise the
    ranks that are furthest behind."""
    waiting = {report.rank for report in errors if report.waited}
    frozen = sorted(evidence.states.keys() & evidence.records.keys())
    if frozen:
        return frozen
    outside = [
        rank for rank, stack in sorted(evidence.stacks.items()) if rank not in waiting and not in_collective(stack)
    ]
    outside = [rank for rank in outside if rank in evidence.records]
    if outside and len(outside) < len(evidence.records):
        return outside
    return flight.furthest_behind(evidence.records)


def _unlike_plans(records: Mapping[int, FlightRecord]) -> str:
    """A line if ranks made different plans of the same step; otherwise empty."""
    ranks: dict[tuple[int, str], list[int]] = {}
    for rank, record in records.items():
        if record.plan:
            ranks.setdefault((record.step, record.plan), []).append(rank)
    steps = [step for step, _ in ranks]
    for step in steps:
        if steps.count(step) > 1:
            groups = sorted((r for (s, _), r in ranks.items() if s == step), key=len)
            minority, majority = (", ".join(map(str, group)) for group in (groups[0], groups[-1]))
            return f"ranks disagree about step {step}: the plans of rank {minority} and rank {majority} differ."
    return ""


def _calls(stack: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in stack[:_SHOWN_CALLS])


def _memory_advice(activity: str) -> str:
    return next(text for words, text in _MEMORY if words in activity)
