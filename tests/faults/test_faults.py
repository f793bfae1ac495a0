"""The fault matrix: whatever goes wrong ends soon, with the exit status and the words of docs/reference/failures.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.cases import pairs
from tests.support.control_group import can_limit_memory
from tests.support.fault_cases import CASES, QUICK, STEPS, check, last_whole, run_case, write_config, write_shared
from tests.support.faults import Fault, FaultRun
from tests.support.zoo import tiny_config
from weft.launch import flight
from weft.launch.machine import free_port
from weft.models import hf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shared(tmp_path_factory.mktemp("faults"))


Results = dict[str, Future[tuple[FaultRun, Path]]]


@pytest.fixture(scope="module")
def results(shared: Path, request: pytest.FixtureRequest) -> Iterator[Results]:
    """The chosen cases run three at a time, because those that hang only wait."""

    names = [item.callspec.params["name"] for item in request.session.items if item.name.startswith("test_fault[")]
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(run_case, name, CASES[name], shared) for name in names}


# Of each, the suite has the same fault at another moment or on a plainer mesh.
TABLE = (
    "killed in the reduction", "killed, with experts on other ranks", "killed while reading data",
    "raises in backward, one rank",
    "killed in backward", "killed in the optimizer", "killed in forward, the last stage",
    "raises in forward, the first stage", "raises in backward, the last stage", "stopped, a stage",
    "stopped, with experts on other ranks", "sleeps outside of collectives, first rank", "not a number, in a pipeline",
    "a plan with another weight, in a pipeline", "no room for the weights", "folder vanishes before a save",
)  # fmt: skip


@pytest.mark.parametrize("name", pairs([(name,) for name in CASES if name not in TABLE], [(name,) for name in TABLE]))
def test_fault(name: str, results: Results) -> None:
    if CASES[name].megabytes and not can_limit_memory():
        pytest.skip("this user may make no group whose memory is limited")
    check(CASES[name], *results[name].result())


# ---------------------------------------------------------------- more than one process can show


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def joined(folder: Path, words: Sequence[Sequence[str]], fault: Fault | None = None) -> list[FaultRun]:
    """Ranks as torchrun starts them, one for each list of words."""
    rendezvous = {
        "WORLD_SIZE": str(len(words)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return [
        FaultRun(["sft", "c.yaml", *extra], folder, fault, RANK=str(rank), LOCAL_RANK=str(rank), **rendezvous)
        for rank, extra in enumerate(words)
    ]


def test_a_run_is_restarted_afresh_where_nothing_was_saved(shared: Path) -> None:
    folder = write_config(shared / "restarted")
    fault = Fault(do="kill", step=2, once=str(folder / "struck"))
    run = FaultRun(["sft", "c.yaml", "--restarts", "2"], folder, fault).wait()
    assert run.status == 0, run.errors()
    assert "restart 1 of 2: the attempt failed at step 2 (killed)" in run.errors()
    assert [line["step"] for line in metrics(folder / "run")] == list(range(1, STEPS + 1))
    record = json.loads((folder / "run" / "flight" / "attempt-1" / "rank-00000.json").read_text())
    assert record["exit_status"] == -9 and record["where"].startswith("in step 2 of 6, forward")


@pytest.fixture(scope="module")
def unbroken(shared: Path) -> list[object]:
    """The losses of two ranks to which nothing happens."""
    folder = write_config(shared / "unbroken")
    run = FaultRun(["sft", "c.yaml", "--nproc", "2"], folder).wait()
    assert run.status == 0, run.errors()
    return [line["loss"] for line in metrics(folder / "run")]


@pytest.mark.parametrize("do", pairs([("kill",), ("stop",)], [("raise",), ("memory",)]))
def test_a_restarted_run_is_bit_for_bit_the_unbroken_one(do: str, unbroken: list[object], shared: Path) -> None:
    folder = write_config(shared / f"restarted {do}")
    fault = Fault(do=do, step=4, rank=1, once=str(folder / "struck"))
    run = FaultRun(["sft", "c.yaml", "--nproc", "2", "--restarts", "1", *QUICK], folder, fault).wait()
    assert run.status == 0, run.errors()
    assert "restart 1 of 1: the attempt failed at step 4" in run.errors()
    assert "resumed  step 3 of 6" in run.output()
    assert [line["loss"] for line in metrics(folder / "run")] == unbroken
    assert last_whole(folder / "run") == STEPS


def test_a_step_that_fails_twice_is_not_tried_again(shared: Path) -> None:
    folder = write_config(shared / "twice at a step")
    run = FaultRun(["sft", "c.yaml", "--restarts", "5"], folder, Fault(do="exit", step=4)).wait()
    assert run.status == 10
    assert run.errors().count("rank 0 ended with exit status 7") == 2
    assert run.errors().endswith("not restarted: it has failed twice at step 4 with the same error\n")
    assert last_whole(folder / "run") == 3


def test_a_run_whose_terminal_is_closed_saves_and_ends(shared: Path) -> None:
    folder = write_config(shared / "closed")
    run = FaultRun(["sft", "c.yaml"], folder, Fault(do="hang up", step=2)).wait()
    assert run.status == 128 + signal.SIGHUP, run.errors()
    assert "stopping SIGHUP" in run.errors() and last_whole(folder / "run") == 2


def test_under_nohup_a_run_goes_on_when_its_terminal_is_closed(shared: Path) -> None:
    """torch's agent would handle the signal all the same."""
    folder = write_config(shared / "nohup")
    words = ["sft", "c.yaml", "--nproc", "2"]
    run = FaultRun(words, folder, Fault(do="hang up the launcher", step=2), nohup=True).wait()
    assert run.status == 0, run.errors()
    assert run.struck.exists() and last_whole(folder / "run") == STEPS


def test_ranks_save_and_end_when_their_launcher_is_killed(shared: Path) -> None:
    folder = write_config(shared / "orphans")
    run = FaultRun(["sft", "c.yaml", "train.epochs=10000", "checkpoint.every=0", "--nproc", "2"], folder)
    run.wait_for("step 3/")
    ranks = psutil.Process(run.process.pid).children()
    assert len(ranks) == 2
    run.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive
    assert last_whole(folder / "run") >= 3


WEIGHTS = "model.safetensors"


def cut_short(model: Path) -> None:
    os.truncate(model / WEIGHTS, 20000)


def swap(model: Path) -> None:
    """The weights of a wider model."""
    replacement = tiny_config("llama", vocab_size=264, hidden_size=128)
    hf.build_random(replacement, dtype=torch.float32, attention="eager", seed=0).save_pretrained(model / "other")
    shutil.move(model / "other" / WEIGHTS, model / WEIGHTS)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda model: (model / WEIGHTS).unlink(), "model.path"),
        (cut_short, "is truncated"),
        (swap, "embed_tokens"),
        (lambda model: (model / WEIGHTS).write_bytes(b""), "not a safetensors file"),
    ],
    ids=["missing", "cut short", "swapped", "empty"],
)
def test_weights_that_cannot_be_loaded(harm: Callable[[Path], object], message: str, shared: Path) -> None:
    folder = write_config(shared / f"weights {message}")
    shutil.copytree(shared / "model", folder / "model")
    harm(folder / "model")
    run = FaultRun(["sft", "c.yaml", "model.path=model", "--nproc", "2"], folder).wait()
    assert run.status == 2 and "Traceback" not in run.errors(), run.errors()
    assert message in run.errors()


def test_a_run_whose_last_state_was_tampered_with_goes_on_from_the_one_before(shared: Path) -> None:
    folder = write_config(shared / "tampered")
    assert FaultRun(["sft", "c.yaml"], folder, Fault(do="kill", step=4)).wait().status is not None
    assert last_whole(folder / "run") == 3
    state = folder / "run" / "checkpoints" / "step-000003" / "trainer_state" / "state.json"
    state.write_text(state.read_text().replace('"step": 3', '"step": 2'))
    run = FaultRun(["sft", "--resume", "run"], folder).wait()
    assert run.status == 0, run.errors()
    assert "step-000003: state.json was changed after it was written" in run.output()
    assert "resumed  step 2 of 6" in run.output()


def test_ranks_without_a_launcher_of_weft_find_out_that_they_differ(shared: Path) -> None:
    folder = write_config(shared / "joined")
    runs = joined(folder, [["optimizer.lr=1e-2"], ["optimizer.lr=1e-3"]])
    for rank, run in enumerate(runs):
        assert run.wait().status == 15, run.errors()
        assert run.errors().startswith(f"rank {rank} failed: ranks disagree:\n  optimizer.lr: 0.001 on rank 1; 0.01 on")
    assert not (folder / "run").exists()


def test_a_hang_without_a_launcher_of_weft_says_where_the_others_are(shared: Path) -> None:
    folder = write_config(shared / "joined-hang")
    runs = joined(folder, [QUICK, QUICK], Fault(do="stop", rank=1, phase="optimizer"))
    try:
        assert runs[0].wait().status == 11, runs[0].errors()
    finally:
        runs[1].process.kill()
    err = runs[0].errors()
    assert re.match(r"rank 0 failed: RuntimeError: .*Timed out waiting", err), err
    assert "rank 1 is in step 2 of 6, optimizer" in err
    assert flight.read_all(folder / "run" / "flight").keys() == {0, 1}


def test_a_hang_of_all_ranks_without_a_launcher_of_weft_ends_all(shared: Path) -> None:
    """Each rank's own watchdog: nobody waits in a collective that would time out."""
    folder = write_config(shared / "joined-all-hang")
    runs = joined(folder, [QUICK, QUICK], Fault(do="sleep", rank=-1, phase="rows"))
    for rank, run in enumerate(runs):
        assert run.wait().status == 11, run.errors()
        assert re.search(rf"^rank {rank} failed: no progress for \d+ seconds \(train.timeout\)", run.errors()), (
            run.errors()
        )


def test_two_runs_in_one_folder(shared: Path) -> None:
    """The second is refused while the first goes on."""
    folder = write_config(shared / "twice")
    first = FaultRun(["sft", "c.yaml"], folder, Fault(do="sleep briefly", phase="plan"))
    first.wait_for("step 1/6")
    second = FaultRun(["sft", "c.yaml"], folder).wait()
    assert second.status == 2 and "run.dir: run already contains a run" in second.errors()
    assert "Traceback" not in second.errors()
    assert first.wait().status == 0, first.errors()
    assert len(metrics(folder / "run")) == STEPS


@pytest.mark.parametrize(
    ("damage", "message"),
    [("missing", "data.path"), ("a folder", "data.path"), ("broken", "d.jsonl:2: is not valid JSON")],
)
def test_data_that_cannot_be_read(damage: str, message: str, shared: Path) -> None:
    folder = write_config(shared / f"data {damage}")
    data = folder / "d.jsonl"
    if damage == "a folder":
        data.mkdir()
    elif damage == "broken":
        data.write_text('{"text": "abc"}\n{"text": \n')
    run = FaultRun(["sft", "c.yaml", "data.path=d.jsonl", "--nproc", "2"], folder).wait()
    assert run.status == 2 and "Traceback" not in run.errors()
    assert message in run.errors()
    assert not (folder / "run").exists()
