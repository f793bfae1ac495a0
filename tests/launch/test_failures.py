"""The parts of failing well: the record, kinds of errors, who is to blame, who differs, and when to start again."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, make_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import control_group
from weft import versions
from weft.errors import RanksDisagreeError, StorageError, UserError
from weft.launch import entrypoint, flight, launch, machine, monitor, reports
from weft.launch.consistency import differences
from weft.launch.entrypoint import set_up_actor
from weft.launch.failures import Failure, diagnose, is_external
from weft.launch.flight import FlightRecord, FlightRecorder
from weft.launch.launch import LaunchOutcome, attempt_alone, run_with_restarts
from weft.launch.monitor import ActorWatchdog, Evidence, RankMonitor
from weft.launch.reports import RankReport
from weft.launch.status import STATUS, Kind, failure_kind
from weft.launch.watchdog import SuspensionClock, in_collective, main_stack
from weft.rl import failure

# ---------------------------------------------------------------- the record


@pytest.fixture
def recorder(tmp_path: Path) -> FlightRecorder:
    """A record in a file, in step 3."""
    record = FlightRecorder()
    record.open(tmp_path / "rank-00001.live")
    record.begin(1, 2)
    record.watch(10.0)
    record.step(2, 6)
    record.step(3, 6, [f"a.jsonl:{i}" for i in range(20)])
    return record


def test_a_record_says_where_a_rank_is(recorder: FlightRecorder, tmp_path: Path) -> None:
    recorder.planned("abc")
    recorder.enter("forward", 2, ["a.jsonl:3", "a.jsonl:7"])
    read = flight.read(tmp_path / "rank-00001.live")
    assert read is not None and read == recorder.record()
    assert read.activity() == "in step 3 of 6, forward of micro-batch 2, documents a.jsonl:3, a.jsonl:7"
    assert (read.rank, read.world, read.pid, read.plan, read.limit) == (1, 2, os.getpid(), "abc", 10.0)
    assert [entry[1:] for entry in read.trail][-2:] == [[3, "plan", 0], [3, "forward", 2]]
    recorder.enter("optimizer")
    assert recorder.record().activity() == "in step 3 of 6, optimizer"


def test_many_documents_are_counted(recorder: FlightRecorder) -> None:
    assert recorder.record().activity().endswith("planning the step, documents " + ", ".join(
        f"a.jsonl:{i}" for i in range(8)) + " and 12 more")  # fmt: skip


def test_a_record_torn_by_a_kill_leaves_the_one_before(recorder: FlightRecorder, tmp_path: Path) -> None:
    """Whatever single line is torn, and wherever, the other is read."""
    path = tmp_path / "rank-00001.live"
    recorder.enter("forward", 1)
    recorder.enter("backward", 1)
    intact = path.read_bytes()
    phases = set()
    for line in (0, 1):
        for cut in (0, 5, 40, 300):
            torn = bytearray(intact)
            torn[4096 * line + cut : 4096 * line + cut + 3] = b"\0\0\0"
            path.write_bytes(torn)
            read = flight.read(path)
            assert read is not None
            phases.add(read.phase)
    assert phases == {"forward", "backward"}


def test_a_record_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    record = FlightRecorder()
    (tmp_path / "file").touch()
    record.open(tmp_path / "file" / "rank-00000.json")  # its folder is a file
    record.enter("load")
    assert record.record().phase == "load"
    os.symlink("/dev/full", tmp_path / "full")
    record.open(tmp_path / "full")
    record.enter("save")


def test_long_phases_have_more_time() -> None:
    record = FlightRecorder()
    record.watch(10.0)
    limits = {}
    for step in (1, 2):
        record.step(step, 6)
        limits[step] = record.limit
        record.enter("save")
        limits[-step] = record.limit
    assert limits == {1: 100.0, 2: 10.0, -1: 100.0, -2: 100.0}
    record.enter("data")
    record.since -= 11
    assert record.silence() == pytest.approx(1, abs=0.1)
    record.beat()
    assert record.silence() is None


def test_a_record_costs_little(recorder: FlightRecorder) -> None:
    began = time.perf_counter()
    for micro in range(1000):
        recorder.enter("forward", micro % 4, ["a.jsonl:3", "a.jsonl:7"])
    assert time.perf_counter() - began < 0.2  # 0.2 ms each; measured 8 us on an idle core


def test_a_run_that_ends_well_leaves_no_record(tmp_path: Path) -> None:
    record = FlightRecorder()
    record.in_run(tmp_path)
    assert flight.read_all(tmp_path / "flight").keys() == {0}
    record.close()
    assert not (tmp_path / "flight").exists()


def test_what_a_killed_process_left_is_kept_by_the_next(tmp_path: Path) -> None:
    first, second = FlightRecorder(), FlightRecorder()
    first.in_run(tmp_path)
    first.enter("save")
    second.in_run(tmp_path)
    second.close()
    assert flight.read_all(tmp_path / "flight")[0].phase == "save"


def test_what_was_kept_of_an_earlier_failure_stays(tmp_path: Path) -> None:
    flight.save(FlightRecord(run=str(tmp_path), phase="save"), {})
    before = (tmp_path / "flight" / "rank-00000.json").read_text()
    record = FlightRecorder()
    record.in_run(tmp_path)
    assert flight.read_all(tmp_path / "flight")[0].phase == "start"  # of this run
    record.close()
    assert flight.read_all(tmp_path / "flight")[0].phase == "save"
    assert (tmp_path / "flight" / "rank-00000.json").read_text() == before


# ---------------------------------------------------------------- kinds


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


KINDS: list[tuple[BaseException, Kind]] = [
    (UserError("set a"), "user"),
    (RanksDisagreeError("x"), "disagree"),
    (FloatingPointError("x"), "nonfinite"),
    (MemoryError(), "memory"),
    (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), "memory"),
    (StorageError("could not save"), "storage"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
    (OSError(errno.ENOSPC, "No space left on device"), "storage"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "storage"),
    (OSError(errno.EROFS, "Read-only file system"), "storage"),
    (FileNotFoundError(errno.ENOENT, "gone", "runs/a/metrics.jsonl"), "storage"),
    (FileNotFoundError(errno.ENOENT, "gone", "elsewhere"), "failed"),
    (FileNotFoundError(errno.ENOENT, "gone", "runs/ab/metrics.jsonl"), "failed"),  # a run beside it
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), "failed"),
    (RuntimeError("[pair.cc:81] Timed out waiting 4000ms for recv operation to complete"), "hang"),
    (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), "peer"),
    (raised_from(RuntimeError("could not save"), OSError(errno.ENOSPC, "full")), "storage"),
    (ValueError("documents timed out after lunch"), "failed"),
    (RuntimeError("boom"), "failed"),
]


@pytest.mark.parametrize(("error", "kind"), KINDS)
def test_kinds_of_errors(error: BaseException, kind: Kind) -> None:
    assert failure_kind(error, run="runs/a") == kind


def test_reports_are_dated_by_a_clock_that_never_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    before = time.monotonic()
    assert before <= reports.of_exception(0, RuntimeError("boom")).time <= time.monotonic()


def test_every_kind_has_a_status_of_its_own() -> None:
    assert {kind: status for kind, status in STATUS.items() if kind != "peer"} == {
        "failed": 1, "user": 2, "killed": 10, "hang": 11, "memory": 12, "storage": 13, "nonfinite": 14, "disagree": 15,
    }  # fmt: skip


# ---------------------------------------------------------------- who is to blame


def records(*phases: tuple[int, str, int]) -> dict[int, FlightRecord]:
    """One per rank: (step, phase, changes)."""
    return {
        rank: FlightRecord(
            rank=rank, step=step, steps=9, phase=phase, changes=changes, since=time.monotonic(), limit=5.0
        )
        for rank, (step, phase, changes) in enumerate(phases)
    }


def waiting(*ranks: int) -> list[RankReport]:
    return [
        RankReport(
            rank,
            float(rank),
            "RuntimeError: Timed out waiting",
            kind="hang",
            waited=True,
            within="600 seconds (train.timeout)",
        )
        for rank in ranks
    ]


COLLECTIVE = [
    'File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce',
    'File "a.py", line 1 in <module>',
]
USER_STACK = ['File "/x/data.py", line 7 in read', 'File "a.py", line 1 in <module>']


def test_the_rank_that_is_in_no_collective_is_named() -> None:
    evidence = Evidence(records((2, "forward", 9), (2, "forward", 9)), {0: COLLECTIVE, 1: USER_STACK})
    failure = diagnose(waiting(0), {0: 11, 1: -15}, evidence, 2)
    assert (failure.kind, failure.rank, failure.step) == ("hang", 1, 2)
    assert 'File "/x/data.py", line 7 in read' in failure.message


def test_else_the_rank_that_is_furthest_behind() -> None:
    evidence = Evidence(records((3, "forward", 15), (3, "forward", 15), (2, "optimizer", 14)))
    assert diagnose(waiting(0, 1), {0: 11, 1: 11, 2: -9}, evidence, 3).rank == 2


def test_else_nobody_but_who_waited() -> None:
    evidence = Evidence(records((3, "forward", 15), (3, "forward", 15)))
    failure = diagnose(waiting(0, 1), {0: 11, 1: 11}, evidence, 2)
    assert failure.message.startswith("rank 0 failed: RuntimeError: Timed out waiting")
    assert "Another rank did not come within 600 seconds (train.timeout)" in failure.message


def test_a_rank_that_lost_its_peer_is_not_the_first() -> None:
    lost = RankReport(0, 1.0, "RuntimeError: Connection closed by peer", kind="peer")
    boom = RankReport(1, 2.0, "RuntimeError: boom")
    assert diagnose([lost, boom], {0: 10, 1: 1}, Evidence(), 2).rank == 1
    # ended by SIGTERM before the agent sent any
    report = RankReport(0, 1.0, "RuntimeError: Connection closed by peer", kind="peer", ended_ranks=[1])
    assert diagnose([report], {0: 10, 1: -15}, Evidence(), 2).message.startswith("rank 1 was killed by SIGTERM")
    assert diagnose([lost], {0: 10, 1: -15}, Evidence(), 2).rank == 0


@pytest.mark.parametrize("waited", [False, True])
def test_a_rank_whose_connection_a_waiting_one_closed_is_not_the_cause(waited: bool) -> None:
    """Rank 1 is stopped. Rank 2 waits for it in vain and closes its connections, which rank 0 reports first, and may be
    the only one to report anything."""
    lost = RankReport(0, 1.0, "RuntimeError: gloo: Connection closed by peer", kind="peer", activity="in step 2 of 9")
    evidence = Evidence(records(*[(2, "forward", 9)] * 3), {0: COLLECTIVE}, {1: "stopped (SIGSTOP)"})
    failure = diagnose([lost, *(waiting(2) if waited else [])], {0: 10, 2: 11 if waited else -15, 1: -15}, evidence, 3)
    assert (failure.kind, failure.rank) == ("hang", 1)
    assert failure.message.startswith("rank 1 is stuck: it did not come within ")
    assert "it is stopped (SIGSTOP)" in failure.message and "rank 0 failed" not in failure.message


def test_a_rank_that_waited_in_vain_says_more_than_one_that_lost_a_connection() -> None:
    """Nobody is stopped: rank 1 is elsewhere."""
    lost = RankReport(0, 1.0, "RuntimeError: gloo: Connection closed by peer", kind="peer")
    evidence = Evidence(records(*[(2, "forward", 9)] * 3), {0: COLLECTIVE, 1: USER_STACK, 2: COLLECTIVE})
    failure = diagnose([lost, *waiting(2)], {0: 10, 2: 11, 1: -15}, evidence, 3)
    assert (failure.kind, failure.rank) == ("hang", 1)


RANK = """
import sys, time
from pathlib import Path
from weft.launch import flight
flight.recorder.open(Path(sys.argv[1]) / flight.FOLDER / flight.live_name(1))
flight.begin(1, 2)
flight.watch(0.3)
flight.enter("load")
print("there", flush=True)
time.sleep(600)
"""


def test_a_stopped_rank_is_found_in_a_slow_phase_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading may take ten times train.timeout, but not of a rank that does not run; frozen time of the launcher does
    not count."""
    monkeypatch.setattr(monitor, "BEHIND_SECONDS", 0.0)
    variables = {**os.environ, reports.FOLDER_VARIABLE: str(tmp_path)}
    words = [sys.executable, "-c", RANK, str(tmp_path)]
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout is not None and rank.stdout.readline() == "there\n"
            observed, start = RankMonitor(tmp_path), time.monotonic()
            while time.monotonic() - start < 0.5:  # it runs, and then it is stopped while the launcher is frozen, too
                observed.look(time.monotonic() - start)
                rank.send_signal(signal.SIGSTOP)
            assert reports.read_all(tmp_path) == []
            while not reports.read_all(tmp_path):
                assert time.monotonic() - start < 2.5  # ten times the timeout are three seconds
                observed.look(0.5)
                time.sleep(0.02)
        finally:
            rank.kill()
    (report,) = reports.read_all(tmp_path)
    assert (report.rank, report.kind, report.activity) == (1, "hang", "loading the model")
    assert report.message.endswith("it is stopped (SIGSTOP)")


def test_a_silent_rank_is_blamed_for_how_it_ended_not_for_its_place() -> None:
    """Exit statuses are in the order in which the launcher saw them."""
    # stopped by the agent, seen first; the kernel's or a user's kill came before
    assert diagnose([], {0: -15, 1: -9}, Evidence(), 2).rank == 1
    assert diagnose([], {0: -15, 1: -15}, Evidence(), 2).rank == 0
    # rank 0 has seen that rank 2 is gone, whatever became of rank 1 since
    lost = RankReport(0, time.monotonic(), "RuntimeError: Connection closed by peer", kind="peer", ended_ranks=[2])
    assert diagnose([lost], {1: 7, 0: 10, 2: -9}, Evidence(), 3).rank == 2
    # a rank that has said what it died of is not silent, though it ended first
    boom = RankReport(0, time.monotonic(), "RuntimeError: boom")
    assert diagnose([boom], {0: 1, 1: -15}, Evidence(), 2).message.startswith("rank 0 failed: RuntimeError: boom")
    assert diagnose([boom], {0: 1, 1: -11}, Evidence(), 2).rank == 1


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [("a word", 1, "a word"), ("", 1, ""), (None, 0, None), (0, 0, None), (7, 7, "exit status 7")],
)
@pytest.mark.parametrize("launched", [True, False])
def test_sys_exit_in_a_rank(
    code: Any, status: int, message: str | None, launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As Python itself has it: a text is shown, and is a failure."""
    ended: list[int] = []
    monkeypatch.setattr(entrypoint, "_end_rank", lambda status: ended.append(status) or status)
    monkeypatch.setattr(entrypoint, "joined", lambda: True)
    monkeypatch.setattr(entrypoint, "_prepare_rank", lambda into: None)
    monkeypatch.delenv(reports.FOLDER_VARIABLE, raising=False)
    if launched:
        monkeypatch.setenv(reports.FOLDER_VARIABLE, str(tmp_path))
    assert entrypoint.guarded(lambda: sys.exit(code)) == status and ended == [status]
    messages = [report.message for report in reports.read_all(tmp_path)]
    assert messages == ([message] if launched and message is not None else [])
    assert capsys.readouterr().err == (f"{message}\n" if isinstance(code, str) and not launched else "")


def test_how_long_another_was_waited_for_is_said() -> None:
    record = FlightRecorder()
    assert record.patience == "train.timeout"
    record.watch(90.0, "rollout.timeout")
    assert record.patience == "90 seconds (rollout.timeout)"


def test_the_kernels_kills_are_told_from_others() -> None:
    flight_records = records((2, "forward", 9), (2, "forward", 9))
    unknown, not_oom = (
        diagnose([], {1: -9}, Evidence(flight_records), 2),
        diagnose([], {1: -9}, Evidence(flight_records, oom_kills=0), 2),
    )
    assert unknown.kind == not_oom.kind == "killed"
    assert "probably by the kernel" in unknown.message and "not by the kernel" in not_oom.message
    failure = diagnose([], {1: -9}, Evidence(flight_records, oom_kills=1), 2)
    assert failure.kind == "memory"
    assert "rank 1 was killed by the kernel, which is short of memory\nin step 2 of 9, forward" in failure.message
    assert "step.max_tokens_per_device" in failure.message


def test_an_abort_after_the_timeout_is_a_hang() -> None:
    """NCCL's own watchdog ends a process so."""
    late = FlightRecord(rank=1, step=2, steps=9, phase="reduce", since=time.monotonic() - 5, limit=5.0)
    assert diagnose([], {1: -6}, Evidence({1: late}), 2).kind == "hang"
    assert diagnose([], {1: -6}, Evidence(records((1, "load", 1), (1, "load", 1))), 2).kind == "killed"


def test_the_kernels_count_of_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, text in ((2, "low 0\noom 3\noom_kill 2\n"), (1, "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")):
        (tmp_path / str(version)).write_text(text)
        monkeypatch.setattr(machine, "_memory_event_files", lambda path=tmp_path / str(version): iter([path]))
        assert machine.oom_kills() == {2: 2, 1: 4}[version]
    monkeypatch.setattr(machine, "_memory_event_files", lambda: iter([tmp_path / "none"]))
    assert machine.oom_kills() is None


GROUPS = {  # lines of /proc/self/cgroup -> the file of the kernel's counts
    "v2": ("0::/a.slice/b", "sys/fs/cgroup/a.slice/b/memory.events"),
    "v2 in a container": ("0::/", "sys/fs/cgroup/memory.events"),
    "v2 in a container that sees the host's path": ("0::/a.slice/b", "sys/fs/cgroup/memory.events"),
    "v1": ("5:cpu:/a\n4:memory:/b:c\n1:name=systemd:/a", "sys/fs/cgroup/memory/b:c/memory.oom_control"),
    "v1 beside a v2 without memory": ("4:memory:/b\n0::/a", "sys/fs/cgroup/memory/b/memory.oom_control"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_kernels_counts_are_found_in_either_version(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, file = GROUPS[name]
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.lstrip("/"))
    for system_file, text in (("proc/self/cgroup", groups), (file, "oom_kill 3\n")):
        (tmp_path / system_file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / system_file).write_text(text)
    assert machine.oom_kills() == 3


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_test_is_limited_in_either_version(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's part is in faults/test_faults.py, where this user may make such groups, in the version that is
    here."""
    cgroup = tmp_path / ("sys/fs/cgroup/a" if version == 2 else "sys/fs/cgroup/memory/a")
    files = ("memory.max", "cgroup.procs") if version == 2 else ("memory.limit_in_bytes", "cgroup.procs")
    for system_file, text in (
        (tmp_path / "proc/self/cgroup", "0::/a" if version == 2 else "4:memory:/a\n0::/"),
        (tmp_path / "sys/fs/cgroup/cgroup.controllers", "memory") if version == 2 else (tmp_path / "none", ""),
    ):
        system_file.parent.mkdir(parents=True, exist_ok=True)
        system_file.write_text(text)
    cgroup.mkdir(parents=True)
    monkeypatch.setattr(control_group, "Path", lambda path: tmp_path / path.lstrip("/"))
    make_folder = Path.mkdir

    def as_the_kernel_does(folder: Path, *arguments: object) -> None:
        make_folder(folder)
        for file in files:
            (folder / file).touch()

    monkeypatch.setattr(Path, "mkdir", as_the_kernel_does)
    monkeypatch.setattr(Path, "rmdir", lambda folder: shutil.rmtree(folder))
    with control_group.memory_group(7) as folder:
        assert folder is not None and folder.parent == cgroup
        control_group.enter(folder)
        assert [(folder / file).read_text() for file in files] == [str(7 << 20), str(os.getpid())]
    assert not folder.exists()


def test_time_in_which_the_process_was_frozen_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("weft.launch.watchdog.time.monotonic", lambda: now[0])
    frozen = SuspensionClock(0.5)
    for moment, expected in ((0.5, 0.0), (1.2, 0.0), (101.7, 100.0), (102.2, 100.0)):
        now[0] = moment
        assert frozen.tick() == pytest.approx(expected)


def test_the_main_threads_stack_is_found_in_a_dump() -> None:
    text = (
        'Thread 0x1 (most recent call first):\n  File "/w/watch.py", line 3 in loop\n  File "/t.py", line 1 in run\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/x/torch/distributed/c.py", line 5 in wait\n'
        '  File "/m.py", line 9 in <module>\n'
    )
    stack = main_stack(text)
    assert stack[0] == 'File "/x/torch/distributed/c.py", line 5 in wait'
    assert in_collective(stack) and not in_collective(stack[1:]) and not in_collective(main_stack(""))


@pytest.mark.parametrize(
    "frame",
    [
        'File "/s/weft/launch/simulated.py", line 56 in read',
        'File "/p/torch/cuda/__init__.py", line 1108 in synchronize',
        'File "/p/torch/cuda/streams.py", line 231, in synchronize',
    ],
)
def test_a_rank_that_waits_for_its_device_waits_for_the_others(frame: str) -> None:
    """On CUDA the host meets a collective that does not end at the next number that it reads."""
    assert in_collective([frame, 'File "/s/weft/engine/metrics.py", line 67 in reduce'])
    assert not in_collective(['File "/s/weft/engine/metrics.py", line 67 in reduce', frame])


# ---------------------------------------------------------------- who differs


def test_the_few_are_named_against_the_many() -> None:
    facts = [{"a": "1", "b": "x"}] * 3 + [{"a": "2", "b": "x"}]
    assert differences(facts, range(4)) == ["a: 2 on rank 3; 1 on the others"]
    assert differences(facts[:3], range(3)) == []
    assert differences([{"a": "1"}, {}], [4, 5]) == ["a: nothing on rank 5; 1 on the other"]
    assert differences([{"a": str(i % 9)} for i in range(90)], range(90))[0].startswith("a: 1 on ranks 1, 10, 19, ")


# ---------------------------------------------------------------- restarts


class Attempts:
    """Stands for the launcher: fails as told, one entry per attempt: kind, step and, where it is an error, its message;
    None is success."""

    def __init__(self, run: Path, *failures: tuple[Any, ...] | None) -> None:
        self.run, self.failures = run, list(failures)
        self.commands: list[str] = []

    def __call__(self, command: Sequence[str], nproc: int, debug: bool) -> LaunchOutcome:
        self.commands.append(command[0])
        outcome = self.failures.pop(0)
        if outcome is None:
            return LaunchOutcome(0)
        (self.run / "flight").mkdir(parents=True, exist_ok=True)
        (self.run / "flight" / "rank-00000.json").write_text(str(len(self.commands)))
        kind, step, *error = outcome
        run, external = str(self.run) if step else "", is_external(kind)
        failure = Failure(kind, "what happened", 1, step, run, "".join(error), external)
        return LaunchOutcome(failure.status, failure)


@pytest.mark.parametrize(
    ("failures", "restarts", "status", "commands"),
    [
        ([None], 3, 0, ["first"]),
        ([("killed", 4), None], 3, 0, ["first", "run"]),
        ([("killed", 4), ("hang", 6), None], 3, 0, ["first", "run", "run"]),
        ([("killed", 4), ("hang", 6)], 1, 11, ["first", "run"]),
        ([("killed", 4), ("killed", 4), ("peer", 4), None], 3, 0, ["first", "run", "run", "run"]),  # from outside
        ([("killed", 4), ("killed", 4)], 1, 10, ["first", "run"]),
        ([("memory", 4), ("memory", 4)], 3, 12, ["first", "run"]),
        ([("failed", 4, "boom 17\nx"), ("failed", 4, "boom 9\ny")], 3, 1, ["first", "run"]),  # the same error
        ([("failed", 4, "boom"), ("killed", 4), ("failed", 4, "boom")], 3, 1, ["first", "run", "run"]),
        ([("failed", 4, "boom"), ("failed", 4, "bang"), None], 3, 0, ["first", "run", "run"]),
        ([("failed", 4, "boom"), ("failed", 6, "boom"), None], 3, 0, ["first", "run", "run"]),
        ([("failed", 0), ("failed", 0)], 3, 1, ["first", "first"]),  # before there is a run
        ([("hang", 4), ("hang", 4), ("storage", 4), ("storage", 4), None], 4, 0, ["first", *["run"] * 4]),
        ([("user", 4)], 3, 2, ["first"]),
        ([("nonfinite", 4)], 3, 14, ["first"]),
        ([("disagree", 4)], 3, 15, ["first"]),
    ],
)
def test_when_to_start_again(
    failures: list[Any], restarts: int, status: int, commands: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(launch, "_pause", lambda seconds: 0)
    attempts = Attempts(tmp_path / "run", *failures)
    assert run_with_restarts(["first"], lambda run: [run.name], 2, restarts, attempt=attempts) == status
    assert attempts.commands == commands
    err = capsys.readouterr().err
    assert len(re.findall(r"^restart \d", err, re.MULTILINE)) == len(commands) - 1
    assert err.count("not restarted: ") == (status != 0)
    contents = [path.read_text() for path in sorted(tmp_path.glob("run/flight/attempt-*/rank-00000.json"))]
    assert contents == [str(number + 1) for number in range(len(commands) - 1) if failures[number][1]]


def test_the_pause_doubles_while_attempts_fail_at_one_step_and_the_end_names_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """N restarts are N restarts, in whatever phase a part dies."""
    pauses: list[float] = []
    monkeypatch.setattr(launch, "_pause", lambda seconds: pauses.append(seconds) or 0)
    steps = [3, 3, 3, 3, 5, 5, *[6] * 10]
    attempts = Attempts(tmp_path / "run", *(("peer" if n % 2 else "hang", step) for n, step in enumerate(steps)))
    assert run_with_restarts(["x"], lambda run: ["x"], 1, len(steps) - 1, attempt=attempts) == 10
    assert pauses == [0, 1, 2, 4, 0, 1, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    err = capsys.readouterr().err
    assert "restart 4 of 15: the attempt failed at step 3 (peer); the next attempt starts in 4 s\n" in err
    *_, first, second = err[: err.index("  3  ")].splitlines()
    assert err.count("not restarted: all 15 restarts are used. The attempts failed:\n") == 1
    assert (first, second) == ("  1  at step 3 (hang): what happened", "  2  at step 3 (peer): what happened")
    assert err.endswith("  16  at step 6 (peer): what happened\n")


def test_a_long_list_of_failures_omits_its_middle() -> None:
    lines = launch._list_failures([Failure("killed", f"rank {n} died\nwhere", step=n) for n in range(1, 101)])
    shown = lines.splitlines()
    assert (len(shown), shown[9], shown[10], shown[11]) == (
        21, "  10  at step 10 (killed): rank 10 died", "  ... 80 more", "  91  at step 91 (killed): rank 91 died",
    )  # fmt: skip


def test_a_signal_ends_the_pause() -> None:
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    assert launch._pause(60.0) == signal.SIGTERM and time.monotonic() - began < 30
    assert launch._pause(0.0) == 0


@pytest.mark.parametrize(
    ("kind", "message", "exit_status", "external"),
    [
        ("killed", "", -signal.SIGKILL, True),
        ("killed", "", -signal.SIGSEGV, False),
        ("killed", "", 7, False),
        ("killed", "trainer rank 0 died", None, True),
        ("peer", "", None, True),
        ("hang", "no progress for 9 seconds (train.timeout); it is stopped (SIGSTOP)", None, True),
        ("hang", "no progress for 9 seconds (train.timeout)", None, False),
        ("failed", "RuntimeError: boom", None, False),
        ("memory", "", -signal.SIGKILL, False),
    ],
)
def test_what_comes_from_outside(kind: Kind, message: str, exit_status: int | None, external: bool) -> None:
    assert is_external(kind, message, exit_status) == external


def test_a_signal_to_the_launcher_is_no_failure(tmp_path: Path) -> None:
    assert run_with_restarts(["x"], lambda run: [], 1, 5, attempt=lambda *_: LaunchOutcome(143)) == 143


def test_the_record_of_an_actor_is_where_the_controller_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "folder", lambda: tmp_path)
    for name in ("write_stacks_to", "end_with_parent", "watch_for_ever"):
        monkeypatch.setattr(entrypoint, name, lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    try:
        assert set_up_actor(3) == tmp_path
        record = flight.read_all(tmp_path / flight.FOLDER)[3]
    finally:
        flight.recorder.close()
    assert (record.rank, record.world, record.pid) == (3, 4, os.getpid())


def test_an_actor_without_progress_is_killed_with_the_report_of_a_hang(
    recorder: FlightRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    process: Any = SimpleNamespace(status=lambda: "running", kill=lambda: killed.append(1))
    monkeypatch.setattr(monitor, "process_of", lambda record, scratch: process)
    ActorWatchdog(tmp_path, 3.0, "train.timeout")._kill(1, recorder.record(), process, 7.0)
    (report,) = reports.read_all(tmp_path)
    assert (report.rank, report.kind, report.plain) == (1, "hang", True) and killed == [1]
    assert (
        report.message == "no progress for 7 seconds (train.timeout)"
        and report.activity == recorder.record().activity()
    )


@pytest.mark.parametrize("has_limit", [True, False])
def test_the_launcher_gets_a_limit_for_endings_where_torch_has_one(
    has_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has none."""
    fields = [("nodes", int), *([("shutdown_timeout", float)] if has_limit else [])]
    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", make_dataclass("LaunchConfig", fields))
    config = versions.launch_config(shutdown_timeout=3.0, nodes=1)
    assert asdict(config) == {"nodes": 1, **({"shutdown_timeout": 3.0} if has_limit else {})}


def test_a_controller_that_does_not_come_back_is_shown_where_it_is(tmp_path: Path) -> None:
    frame = sys._getframe()
    text = failure.hang_message(12.0, frame, tmp_path, "weft rl --resume RUN")
    assert "in one call for 12 seconds (train.timeout)" in text and text.endswith("Resume with: weft rl --resume RUN")
    assert "in test_a_controller_that_does_not_come_back_is_shown_where_it_is" in text
    assert "longer:\n\n" in failure.hang_message(12.0, None, tmp_path, "weft rl --resume RUN")


CONTROLLER = """
import json, os, sys
from pathlib import Path
from weft.launch.launch import note_run
run, ends = Path(sys.argv[1]), sys.argv[2:]
run.mkdir(exist_ok=True)
note_run(run)
attempt = len(list(run.glob("attempt-*")))
(run / f"attempt-{attempt}").touch()
with (run / "metrics.jsonl").open("a") as file:
    print(json.dumps({"step": 1 if ":" in ends[attempt] or ends[attempt] == "1" else attempt + 1}), file=file)
from weft.errors import ActorError
from weft.launch.entrypoint import guarded
def end():
    raise ActorError(*ends[attempt].removesuffix(", crash").split(": ")[::-1])
if ends[attempt] in ("kill", "stop"):
    os.kill(os.getpid(), 9 if ends[attempt] == "kill" else 19)
status = guarded(end) if ":" in ends[attempt] else int(ends[attempt])
if ends[attempt].endswith(", crash"):
    os.kill(os.getpid(), 11)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("ends", "attempts", "status", "says"),
    [
        (["kill", "11", "0"], 3, 0, "restart 2 of 3: the attempt failed at step 3 (hang)"),
        (["stop", "0"], 2, 0, "restart 1 of 3: the attempt failed at step 2 (hang)"),
        (["0"], 1, 0, ""),
        (["2", "0"], 1, 2, "not restarted: the error has to be fixed first"),
        (["143", "0"], 1, 143, ""),
        (["10", "1", "12", "13", "0"], 4, 13, "not restarted: all 3 restarts are used"),
        (
            ["killed: trainer rank 0 died", "killed: trainer rank 1 died", "0"],
            3,
            0,
            "restart 2 of 3: the attempt failed at step 2",
        ),
        (
            ["failed: boom in 4 s", "failed: boom in 5 s", "0"],
            2,
            1,
            "it has failed twice at step 2 with the same error",
        ),
        (["failed: boom", "failed: bang", "0"], 3, 0, "restart 2 of 3: the attempt failed at step 2 (failed)"),
        (["hang: no progress, crash", "0"], 2, 0, "restart 1 of 3: the attempt failed at step 2 (hang)"),
        # Ray's native code ends its process without a report when a part of Ray has died.
        (["1", "1", "1", "0"], 4, 0, "restart 3 of 3: the attempt failed at step 2 (failed)"),
        (["1", "1", "1", "1"], 4, 1, "  4  at step 2 (failed): the controller ended with exit status 1\n"),
    ],
)
def test_a_controller_is_restarted(
    ends: list[str], attempts: int, status: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(launch, "_pause", lambda seconds: 0)
    run = tmp_path / "run"
    words = [sys.executable, "-c", CONTROLLER, str(run), *ends]
    resumed: list[Path] = []

    def resume(folder: Path) -> list[str]:
        resumed.append(folder)
        return words

    monkeypatch.setattr(monitor, "BEHIND_SECONDS", 0.0)
    assert run_with_restarts(words, resume, 1, 3, attempt=partial(attempt_alone, timeout=0.5)) == status
    assert len(list(run.glob("attempt-*"))) == attempts and resumed == [run] * (attempts - 1)
    said = capfd.readouterr().err
    assert says in said and ("the controller was killed by SIGKILL" in said) == ("kill" in ends)
    assert ("seconds (train.timeout): the controller is stopped" in said) == ("stop" in ends)
