"""Ranks are started, end together, and the one that failed first is shown first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support import forked
from tests.support.machine import business
from weft.errors import UserError
from weft.launch import process
from weft.launch.entrypoint import guarded
from weft.launch.failures import diagnose
from weft.launch.launch import launch
from weft.launch.launchers import join_launcher
from weft.launch.machine import cpu_cores
from weft.launch.monitor import Evidence
from weft.launch.process import fake_ranks, join
from weft.launch.reports import RankReport

SCRIPT = str(Path(__file__).parents[1] / "support" / "rank_script.py")


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite itself may run under a launcher; these tests start from a plain process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def launched(mode: str) -> int:
    return launch([sys.executable, SCRIPT, mode], 2)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """start(mode) runs two ranks of rank_script.py: (exit status, stdout, stderr). It must end within 30 s."""

    def run(mode: str) -> tuple[int, str, str]:
        began = time.monotonic()
        done = forked.run(partial(launched, mode), tmp_path)
        assert time.monotonic() - began < 30 * business()
        return done.returncode, done.stdout, done.stderr

    return run


Start = Callable[..., tuple[int, str, str]]


def test_ranks_join_and_share_the_cores(capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that are programs of their own, as they are outside of tests."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    status = launched("fine")
    out, err = capfd.readouterr()
    threads = max(1, cpu_cores() // 2)
    assert status == 0
    assert err == ""
    for rank in (0, 1):
        assert f"rank {rank} of 2, local {rank}, sum 2, threads {threads}" in out
    assert "WEFT_RANK_REPORTS" not in os.environ
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_one_rank_raises_and_all_end(start: Start) -> None:
    status, _, err = start("raise")
    assert status == 1
    assert err.startswith("rank 1 failed: RuntimeError: boom\nat start\nTraceback")
    assert err.endswith("1 other rank was stopped.\n")
    assert "torch.distributed.elastic" not in err


def test_a_user_error_has_no_traceback(start: Start) -> None:
    status, _, err = start("user")
    assert status == 2
    assert err == "rank 1 failed: set a.b to 1\n1 other rank was stopped.\n"


def test_the_same_user_error_of_all_ranks_is_shown_once(start: Start) -> None:
    status, _, err = start("same")
    assert (status, err) == (2, "error: set a.b to 1\n")


def test_a_killed_rank_is_named_with_its_signal(start: Start) -> None:
    status, _, err = start("kill")
    assert status == 10
    assert err.startswith("rank 1 was killed by SIGKILL")


def test_a_rank_that_exits_is_named_with_its_status(start: Start) -> None:
    status, _, err = start("exit")
    assert status == 1
    assert err.startswith("rank 1 failed: exit status 7")


def test_a_failed_verdict_is_no_crash(start: Start) -> None:
    status, out, err = start("verdict")
    assert (status, err) == (1, "")
    assert "rank 0 of 2" in out
    assert "rank 1 of 2" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(number: signal.Signals, tmp_path: Path) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends the ranks of a killed launcher")
    launcher = forked.Run(partial(launched, "sleep"), tmp_path)
    try:
        launcher.wait_for(r"(?s)pid \d+\n.*pid \d+\n")
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", launcher.output())]
        os.kill(launcher.pid, number)
        launcher.wait(20)
    finally:
        launcher.process.kill()
    assert len(pids) == 2
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    if number == signal.SIGTERM:
        assert launcher.errors() == "stopped by SIGTERM\n"
        assert launcher.status == 128 + signal.SIGTERM


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_JOB_NODELIST": "n[1-2]"}
STEP = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
LAUNCHED = {
    "srun on several hosts": (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu-[07-09,12],login[1-2]"},
        ("5", "8", "1", "4", "gpu-07", "20051"),
    ),
    "srun on one host": (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_STEP_NODELIST": "n[1]"},
        ("5", "8", "1", "8", "127.0.0.1", "20051"),
    ),
    "a place that the user names": (
        STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        ("5", "8", "1", "4", "head", "29500"),
    ),
    "mpirun of Open MPI": (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": "29500"},
        ("1", "2", "1", "2", "127.0.0.1", "29500"),
    ),
    "mpirun in a job of Slurm, whose daemons srun starts": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "3"} | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        ("1", "2", "1", "1", "n1", "20049"),
    ),
    "mpiexec of MPICH": (HYDRA | {"MASTER_ADDR": "a", "MASTER_PORT": "1234"}, ("1", "2", "0", "1", "a", "1234")),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_other_launchers_variables_become_torchruns(name: str) -> None:
    environment, expected = dict(LAUNCHED[name][0]), LAUNCHED[name][1]
    join_launcher(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert tuple(environment[name] for name in names) == expected
    assert environment["OMP_NUM_THREADS"] == str(max(1, cpu_cores() // int(expected[3])))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM,  # of a batch script
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # one task, whatever the job has
        STEP | {"RANK": "0", "WORLD_SIZE": "2"},  # of torchrun, which is the task
    ],
)
def test_one_process_stays_alone(environment: dict[str, str]) -> None:
    before = dict(environment)
    join_launcher(environment)
    assert environment == before


def test_ranks_that_do_not_know_the_first_host_are_refused() -> None:
    with pytest.raises(UserError, match="mpiexec has started 2 processes on several hosts.*set MASTER_ADDR"):
        join_launcher(dict(HYDRA))


NO_RANKS = [
    ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a', which is not a number, 0 or more"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1', which"),
    ({"RANK": "", "WORLD_SIZE": "2"}, "RANK='', which"),
    ({"RANK": "\u0663", "WORLD_SIZE": "4"}, "RANK='\u0663', which"),
    ({"RANK": "x"}, "RANK='x', which"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0', which is not a number, 1 or more"),
    ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='999"),
    ({"RANK": "7", "WORLD_SIZE": "2"}, "RANK=7 and WORLD_SIZE=2, but ranks count from 0"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1.5"}, "LOCAL_RANK='1.5', which"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0', which"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "MASTER_PORT='65536', which is not a number, 0 to"),
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x', which"),
    (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x', which"),
    (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "RANK='x', which"),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x', which"),
]


@pytest.mark.parametrize(("environment", "message"), NO_RANKS, ids=range(len(NO_RANKS)))
def test_variables_of_no_rank_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        join_launcher(dict(environment))
    assert len(str(caught.value)) < 300
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        with pytest.raises(UserError, match=re.escape(message)):
            process._rank_environment({"MASTER_ADDR": "a", "MASTER_PORT": "1", **environment})


def test_a_variable_of_no_rank_ends_the_program_with_a_sentence() -> None:
    variables = {**os.environ, "RANK": "x", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "weft", "--version"], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.startswith("error: the environment has RANK='x'")


def test_under_torchrun_it_joins(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *torchrun, SCRIPT, "fine"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60 * business())
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2, local 0, sum 2" in done.stdout
    assert "rank 1 of 2, local 1, sum 2" in done.stdout
    done = forked.run(partial(forked.script, [*torchrun, SCRIPT, "raise"]), tmp_path)
    assert done.returncode != 0
    assert "rank 1 failed: RuntimeError: boom" in done.stderr


# ---------------------------------------------------------------- which failure is shown


def report(rank: int, time: float, message: str = "boom", user: bool = False) -> RankReport:
    return RankReport(rank, time, message, f"Traceback of rank {rank}", "user" if user else "failed", plain=user)


@pytest.mark.parametrize(
    ("reports", "exits", "expected"),
    [
        (
            [report(2, 1.0), report(0, 2.0)],
            {0: 1, 2: 1, 1: -15, 3: -15},
            "rank 2 failed: boom\nTraceback of rank 2\n3 ",
        ),
        # a rank dies, another sees the connection close and reports that
        ([report(0, 1e12)], {0: 1, 1: -9}, "rank 1 was killed by SIGKILL"),
        ([report(0, 1e12)], {0: 1, 1: -11}, "rank 1 was killed by SIGSEGV (a crash in native code)"),
        # the agent's own signals to the others are not the cause
        ([report(0, 1e12)], {0: 1, 1: -15}, "rank 0 failed: boom"),
        ([report(0, 1.0)], {0: 1, 1: -9}, "rank 0 failed: boom"),
        ([], {1: -15, 0: -15}, "rank 1 was killed by SIGTERM"),
        ([], {1: 3, 0: -15}, "rank 1 ended with exit status 3"),
        # os._exit leaves no report
        ([report(0, 1e12)], {0: 1, 1: 3}, "rank 1 ended with exit status 3"),
        ([], {1: -250}, "rank 1 was killed by signal 250"),
        # different user errors are not one
        ([report(0, 1.0, "a", True), report(1, 2.0, "b", True)], {0: 2, 1: 2}, "rank 0 failed: a\n1 other rank"),
    ],
)
def test_the_first_failure_is_shown(reports: list[RankReport], exits: dict[int, int], expected: str) -> None:
    assert diagnose(reports, exits, Evidence(), nproc=max(2, len(exits))).message.startswith(expected)


def test_debug_shows_the_traceback_of_a_user_error() -> None:
    reports = [report(1, 1.0, "set a.b to 1", user=True)]
    assert "Traceback" not in diagnose(reports, {1: 2, 0: -15}, Evidence(), nproc=2).message
    shown = diagnose(reports, {1: 2, 0: -15}, Evidence(), nproc=2, debug=True).message
    assert shown.startswith("rank 1 failed: set a.b to 1\nTraceback of rank 1\n")


# ---------------------------------------------------------------- one process


def test_one_process_joins_without_a_launcher() -> None:
    with join("cpu") as ranks:
        assert (ranks.rank, ranks.world, ranks.device, ranks.is_first) == (0, 1, torch.device("cpu"), True)
        total = torch.ones(1)
        dist.all_reduce(total)
        with join("cpu") as second:  # inside a process group that exists: it is used, and stays
            assert not second.owner
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_one_process_leaves_after_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), join("cpu"):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_ranks_can_be_pretended() -> None:
    with fake_ranks(8) as ranks:
        assert (ranks.world, dist.get_world_size()) == (8, 8)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
        assert mesh["dp_shard"].size() == 4
    assert not dist.is_initialized()


@pytest.mark.parametrize(("backend", "lacks"), [("cuda:gloo", "cpu"), ("cpu:gloo", "cuda")])
def test_a_process_group_that_lacks_a_device_is_refused(
    backend: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for NCCL alone cannot move what weft has on the CPU."""
    monkeypatch.setattr(process, "choose_device", lambda *_: torch.device("cuda", 0))
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            UserError, match=rf"\({backend}\) does not support tensors on {lacks}.*'cpu:gloo,cuda:nccl'"
        ):
            join("auto")
    finally:
        dist.destroy_process_group()


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("variable", [None, *ALLOCATOR])
def test_segments_of_the_allocator_grow_before_cuda_is_used(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has said how memory is allocated."""
    events: list[str] = []
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", events.append, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(str(device)))
    monkeypatch.setattr(process, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    join("cuda")
    settings = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    if variable is None:
        assert events == ["expandable_segments:True", "cuda:0"]
        assert settings == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    else:
        assert events == ["cuda:0"] and settings == {variable: "max_split_size_mb:64"}


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        join("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what this machine has")
def test_cuda_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="--device cpu"):
        join("cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_process_joins_on_cuda() -> None:
    with join("auto") as ranks:
        assert ranks.device == torch.device("cuda", 0)
        for device in ("cpu", "cuda"):
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            assert total.item() == 1


def test_guarded_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert guarded(lambda: None) == 0
    assert guarded(lambda: True) == 0
    assert guarded(lambda: False) == 1
    assert guarded(lambda: fail(UserError("set a.b to 1"))) == 2
    assert capsys.readouterr().err == "error: set a.b to 1\n"
    assert guarded(lambda: fail(RuntimeError("boom"))) == 1
    assert "Traceback" in capsys.readouterr().err
    assert guarded(lambda: fail(UserError("x")), debug=True) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.covers("cluster.cpu_backend")
def test_the_backend_of_cpu_tensors_is_chosen_among_those_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "cluster.cpu_backend=mpi: this torch .* has gloo for tensors on the CPU. Set cluster.cpu_backend=gloo"
    with pytest.raises(UserError, match=refusal):
        join("cpu", cpu_backend="mpi")
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    created: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: created.append(backend))
    join("cpu", cpu_backend="mpi")
    assert created == ["mpi"]
    assert process._backend(torch.device("cuda"), "mpi") == "cpu:mpi,cuda:nccl"
