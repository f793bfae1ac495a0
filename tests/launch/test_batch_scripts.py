"""The batch scripts of the docs, run as they stand: only paths, and programs of the cluster, are stood in for.

srun and torchrun of the stand-ins start two ranks, as the real ones would on each of several machines. They fork them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml

from tests.faults.test_faults import shared
from tests.support.cases import pairs
from tests.support.docs_runner import blocks
from tests.support.fault_cases import last_whole, write_config
from tests.support.forked import Run, environment
from tests.support.machine import business
from weft.launch.launchers import process_of_launcher
from weft.launch.machine import free_port

__all__ = ["shared"]
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("how-to/several-nodes.md", "reference/checkpoints.md")]
SCRIPTS = {
    name[1]: block.text
    for page in PAGES
    for block in blocks(page)
    if (name := re.search(r"file=(\S+\.sbatch)", block.words))
}
LONG = ("train.epochs=10000", "checkpoint.every=0", "train.log_every=1")

# Two tasks with Slurm's variables, or one under torchrun. USR1 goes to every process of the step, as from Slurm, and
# the first task that fails ends the others, as with KillOnBadExit=1.
SRUN = """
import os, signal, subprocess, sys, time, psutil
words = sys.argv[1:]
if words[0] == "--cpus-per-task":
    del words[:2]
count = 1 if words[0] == "torchrun" else int(os.environ["TASKS"])
step = {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": str(count), "SLURM_STEP_NODELIST": "here"}
start = subprocess.Popen
if count > 1 and words[0] == "weft":
    import tests.support.preload
    from tests.support.forked import _Fork as start
    words[:1] = [sys.executable, "-m", "weft"]
tasks = [
    start(words, env={**os.environ, **step, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}) for n in range(count)
]
def signalled(number, frame):
    for process in psutil.Process().children(recursive=True):
        process.send_signal(number)
signal.signal(signal.SIGUSR1, signalled)
while (codes := [task.poll() for task in tasks]).count(None):
    if any(codes):
        time.sleep(0.2)
        for task in tasks:
            task.kill()
    time.sleep(0.01)
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
# torchrun of the other machines is not there.
TORCHRUN = """
import re, sys
import tests.support.preload
from torch.distributed.elastic.multiprocessing import PContext, subprocess_handler
from torch.distributed.run import main
from tests.support.forked import _Fork
subprocess_handler.Popen = _Fork
close = PContext.close
def closing(self, death_sig=None, timeout=30):
    print(f"torchrun waits {timeout} seconds", flush=True)
    close(self, death_sig, timeout)
PContext.close = closing
words = " ".join(sys.argv[1:])
for alone, several in (
    ("--nnodes 1", r"--nnodes \\S+"), ("--nproc-per-node 2", "--nproc-per-node 8"),
    ("--rdzv-endpoint 127.0.0.1:0", r"--rdzv-endpoint \\S+"),
    ("--standalone", r"--node-rank \\S+ --master-addr \\S+ --master-port \\S+"),
):
    words = re.sub(several, alone, words)
main(words.split())
"""


def program(path: Path, text: str) -> None:
    """A program of Python. Its first line cannot name an interpreter whose path has a space."""
    code = path.with_name(f"{path.name}.code")
    code.write_text(text)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(code))} "$@"\n')
    path.chmod(0o755)


@pytest.fixture
def cluster(shared: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a config, and with the programs of a cluster."""
    folder = write_config(shared / re.sub(r"\W", "-", request.node.name))
    programs = folder / "bin"
    programs.mkdir()
    program(programs / "srun", SRUN)
    program(programs / "torchrun", TORCHRUN)
    program(programs / "weft", "from weft.cli import entry\nentry()\n")
    program(programs / "scontrol", "import sys\nprint('here' if 'show' in sys.argv else ' '.join(sys.argv[1:]))\n")
    return folder


def start(script: str, folder: Path, tasks: str, **variables: str) -> subprocess.Popen[str]:
    """`bash script`, with the shared file system and the config of `folder`. tasks: how many srun starts."""
    text = script.replace("/shared/", f"{folder}/").replace("RUN=runs/", f"RUN={folder}/runs/")
    text = re.sub(r"[^ \"]*\bsft\.yaml", f"c.yaml {' '.join(LONG)}", text)
    (folder / "script").write_text(text)
    path = f"{folder}/bin:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "mine", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "here"}
    all_variables = environment(PATH=path, PYTHONPATH=str(ROOT), **job, SLURM_NNODES="1", TASKS=tasks, **variables)
    with (folder / "out").open("a") as out:
        words = ["bash", "-c", text] if script.startswith("RUN=") else ["bash", str(folder / "script")]
        return subprocess.Popen(words, cwd=folder, env=all_variables, stdout=out, stderr=out, text=True)


def until_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60 * business()
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < step:
        assert process.poll() is None and time.monotonic() < end, (run.parent.parent / "out").read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status"), pairs([("sft.sbatch", 138), ("torchrun.sbatch", 1)], [("one.sbatch", 138)])
)
def test_a_batch_script_saves_in_time_and_goes_on_after_the_requeue(name: str, status: int, cluster: Path) -> None:
    run = cluster / "runs" / "mine"
    job = start(SCRIPTS[name], cluster, "1" if name == "one.sbatch" else "2")
    until_step(run, 3, job)
    (srun,) = [child for child in psutil.Process(job.pid).children() if "srun" in " ".join(child.cmdline())]
    srun.send_signal(signal.SIGUSR1)
    assert job.wait(60 * business()) == status
    out = (cluster / "out").read_text()
    assert "requeue 77" in out and "stopped  by SIGUSR1" in out, out
    assert json.loads((run / "summary.json").read_text())["stopped"] == "SIGUSR1"
    assert last_whole(run) >= 3
    program(cluster / "bin" / "srun", "import sys\nprint('again:', *sys.argv[1:])\n")
    assert start(SCRIPTS[name], cluster, "2").wait(60) == 0
    assert re.search(rf"again: .*sft --resume {run}\n", (cluster / "out").read_text())


def test_the_script_of_reinforcement_learning_passes_its_signal_on(cluster: Path) -> None:
    """`wait` of the shell ends with the signal, and the program does not: the script waits for the program's status."""
    text = """
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(0.3)
    print("saved", *sys.argv[1:], flush=True)
    sys.exit(138)
signal.signal(signal.SIGUSR1, save)
pathlib.Path("ready").touch()
time.sleep(60)
"""
    program(cluster / "bin" / "weft", text)
    job = start(SCRIPTS["rl.sbatch"], cluster, "1")
    while not (cluster / "ready").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 138
    out = (cluster / "out").read_text()
    assert out.splitlines() == [f"saved rl rl.yaml run.dir={cluster}/runs/mine", "requeue 77"]


@pytest.mark.slow
def test_the_command_of_the_manifest_uses_its_grace(cluster: Path) -> None:
    """SIGTERM to torchrun, as from Kubernetes. It waits for the save as long as the manifest says, not for 30 s."""
    (manifest,) = [block for block in blocks(ROOT / "docs/how-to/containers.md") if block.language == "yaml"]
    pod = list(yaml.safe_load_all(manifest.text))[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    seconds = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 30 < seconds < pod["terminationGracePeriodSeconds"]
    job = start(container["args"][0], cluster, "2", JOB_COMPLETION_INDEX="0", **variables)
    run = cluster / "runs" / "mine"
    until_step(run, 3, job)
    job.send_signal(signal.SIGTERM)  # `exec` has put torchrun in the shell's place
    job.wait(60 * business())
    assert f"torchrun waits {seconds} seconds" in (cluster / "out").read_text()
    assert json.loads((run / "summary.json").read_text())["stopped"] == "SIGTERM"
    assert last_whole(run) >= 3


# ---------------------------------------------------------------- ranks and their launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGUSR1, marks=pytest.mark.table)])
def test_ranks_save_and_end_when_torchrun_is_gone(number: signal.Signals, shared: Path) -> None:
    """torchrun does not handle SIGUSR1 by itself: it ends, and tells its ranks nothing."""
    folder = write_config(shared / f"torchrun {number.name}")
    command = [sys.executable, "-m", "weft", "sft", "c.yaml", *LONG]
    words = ["--standalone", "--nproc-per-node", "2", "--no-python", *command]
    run = Run(partial(torchrun, words), folder)
    run.wait_for("step 3/")
    ranks = psutil.Process(run.pid).children()
    assert len(ranks) == 2
    os.kill(run.pid, number)
    _, alive = psutil.wait_procs(ranks, timeout=20 * business())
    assert not alive
    assert last_whole(folder / "run") >= 3
    assert json.loads((folder / "run" / "summary.json").read_text())["stopped"] == "SIGTERM"


@pytest.mark.slow
def test_no_rank_ends_before_the_first_has_written_the_end_of_the_run(shared: Path) -> None:
    """Launchers kill the other ranks when one has ended with a status that is not 0."""
    folder = write_config(shared / "together")
    rendezvous = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [Run(["sft", "c.yaml", *LONG], folder, slow_summary, RANK=n, LOCAL_RANK=n, **rendezvous) for n in "01"]
    ranks[0].wait_for("step 3/")
    for rank in ranks:
        os.kill(rank.pid, signal.SIGUSR1)
    assert ranks[1].wait(60 * business()).status == 138
    assert json.loads((folder / "run" / "summary.json").read_text())["stopped"] == "SIGUSR1"
    assert ranks[0].wait(60 * business()).status == 138


def slow_summary() -> None:
    """Makes the end of the first rank take longer than the others'."""
    from weft.observe.recorder import RunRecorder

    finish = RunRecorder.finish

    def later(*args: object) -> None:
        time.sleep(0.5)
        finish(*args)  # type: ignore[arg-type]

    if os.environ["RANK"] == "0":
        RunRecorder.finish = later  # type: ignore[method-assign, assignment]


def torchrun(words: Sequence[str]) -> int:
    from torch.distributed.run import main

    main(list(words))
    return 0


ANCESTRY = (
    "import sys; from weft.launch.launchers import process_of_launcher as p; sys.exit(p().ppid() != int(sys.argv[1]))"
)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_the_launcher_is_known_behind_a_shell(variable: str) -> None:
    """This process starts a shell, the launcher; it starts a wrapper with the rank's variables, and that the rank."""
    rank = f"{shlex.quote(sys.executable)} -c {shlex.quote(ANCESTRY)} {os.getpid()}; exit $?"
    rank = f"{variable}=0 sh -c {shlex.quote(rank)}; exit $?"
    launcher = subprocess.run(["sh", "-c", rank], env=environment(PYTHONPATH=str(ROOT)), timeout=60, check=False)
    assert launcher.returncode == 0


def test_ranks_that_were_started_by_hand_have_no_launcher() -> None:
    assert process_of_launcher({"RANK": "0", "WORLD_SIZE": "2"}) is None
