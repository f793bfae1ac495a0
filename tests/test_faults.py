"""The fault matrix: whatever goes wrong ends soon, with the exit status and the words that docs/failures.md has."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.faults import Fault, Run
from tests.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.zoo import tiny_config
from weft.checkpoint.state import check_contents, read_state
from weft.cluster.machine import free_port
from weft.models import hf
from weft.observe import flight

pytestmark = pytest.mark.slow
STEPS = 6
CONFIG = """\
model: {path: ../model}
data: {path: ../chats.jsonl}
step: {documents: 8, max_tokens_per_device: 128}
optimizer: {lr: 1e-2}
train: {epochs: 2, seed: 3}
run: {dir: run}
checkpoint: {every: 1, async: false}
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama so small that a step takes milliseconds, and chats; each case has a folder beside them."""
    path = tmp_path_factory.mktemp("faults")
    byte_tokenizer().save_pretrained(path / "model")
    config = tiny_config("llama", vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path / "model")
    chats = [chat(("user", "a" * (i % 5 + 1)), ("assistant", "bcd" * (i % 7 + 1))) for i in range(20)]
    write_jsonl(path / "chats.jsonl", *chats)
    return path


@dataclass(frozen=True)
class Case:
    """One fault in a run of nproc ranks, and what is seen of it.

    says: patterns that standard error matches, in this order. within: seconds, from the fault to the end of all ranks.
    saved: the last step whose checkpoint stands, None for the one before the fault.
    """

    fault: Fault
    nproc: int
    status: int
    says: list[str]
    words: list[str] = field(default_factory=list)
    within: float = 20.0
    traceback: bool = False
    saved: int | None = None


DOCUMENTS = r"documents ../chats\.jsonl:\d+"
STOPPED = r"1 other rank was stopped\."
RECORD = r"What each rank was doing is in run/flight\."
QUICK = ["train.timeout=4"]

CASES = {
    # ------------------------------------------------------------ a rank that dies, in each phase
    "killed in forward": Case(
        Fault(do="kill", rank=1), 2, 10,
        [r"^rank 1 was killed by SIGKILL", rf"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}", STOPPED, RECORD],
    ),
    "killed in backward": Case(
        Fault(do="kill", rank=1, phase="backward"), 2, 10,
        [r"^rank 1 was killed by SIGKILL", rf"in step 2 of 6, backward of micro-batch 1, {DOCUMENTS}"],
    ),
    "killed in the reduction": Case(
        Fault(do="kill", rank=0, phase="reduce"), 2, 10,
        [r"^rank 0 was killed by SIGKILL", rf"in step 2 of 6, reducing the metrics, {DOCUMENTS}"],
    ),
    "killed in the optimizer": Case(
        Fault(do="kill", rank=1, phase="optimizer"), 2, 10, [r"^rank 1 was killed", r"in step 2 of 6, optimizer$"]
    ),
    "killed while loading": Case(
        Fault(do="kill", rank=1, phase="load", step=0), 2, 10, [r"^rank 1 was killed by SIGKILL", "^loading the model$"]
    ),
    "killed while reading data": Case(
        Fault(do="kill", rank=1, phase="data", step=0), 2, 10, [r"^rank 1 was killed by SIGKILL", "^reading the data$"]
    ),
    "killed while saving": Case(
        Fault(do="kill", rank=0, phase="save", step=6), 2, 10, [r"^rank 0 was killed", r"in step 6 of 6, saving$"]
    ),
    "terminated while loading": Case(
        Fault(do="terminate", rank=1, phase="load", step=0), 2, 10, [r"^rank 1 was killed by SIGTERM", "^loading"]
    ),
    "terminated in training": Case(Fault(do="terminate", rank=1), 2, 143, []),  # all save and end, as they should
    "crash in native code": Case(
        Fault(do="crash", rank=1), 2, 10,
        [r"^rank 1 was killed by SIGSEGV \(a crash in native code\)", "in step 2 of 6, forward", r"File .*string_at"],
    ),
    "os._exit": Case(
        Fault(do="exit", rank=1), 2, 10, [r"^rank 1 ended with exit status 7 and no message", "in step 2 of 6, forward"]
    ),
    "sys.exit": Case(Fault(do="sys.exit", rank=1), 2, 1, [r"^rank 1 failed: exit status 7", "in step 2 of 6, forward"]),
    # ------------------------------------------------------------ a rank that raises
    "raises in forward": Case(
        Fault(do="raise", rank=1, micro=1), 2, 1,
        [
            r"^rank 1 failed: RuntimeError: boom", f"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}",
            "Traceback", STOPPED,
        ],
        traceback=True,
    ),
    "raises in backward, one rank": Case(
        Fault(do="raise", phase="backward", micro=2), 1, 1,
        [r"^error: RuntimeError: boom", f"in step 2 of 6, backward of micro-batch 2, {DOCUMENTS}", "Traceback", RECORD],
        traceback=True,
    ),
    "raises while reading data, one rank": Case(
        Fault(do="raise", phase="data", step=0), 1, 1, [r"^error: RuntimeError: boom\nreading the data"], traceback=True
    ),
    "all raise while a checkpoint is written": Case(
        Fault(do="slow disk, raise", rank=-1, phase="plan", step=3), 2, 1,
        [
            r"^ending   boom: run/checkpoints/step-000002 is being written, and finished first, within 600 s",
            r"^saved    run/checkpoints/step-000002 in ", "failed: RuntimeError: boom", "in step 3 of 6, planning",
        ],
        ["checkpoint.every=2", "checkpoint.async=true"], traceback=True, saved=2,
    ),
    "one raises while a checkpoint is written": Case(
        Fault(do="slow disk, raise", rank=1, phase="plan", step=3), 2, 1,
        ["^rank 1 failed: RuntimeError: boom", "in step 3 of 6, planning", STOPPED],
        ["checkpoint.every=2", "checkpoint.async=true"], within=5.0, traceback=True, saved=0,
    ),
    # ------------------------------------------------------------ a rank that hangs
    "stopped": Case(
        Fault(do="stop", rank=1), 2, 11,
        [
            r"^rank 1 is stuck: it did not come within train\.timeout seconds; it is stopped \(SIGSTOP\)",
            f"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}",
            r"waiting: rank 0 \(in step 2 of 6", STOPPED, RECORD,
        ],
        QUICK,
    ),
    "sleeps in backward": Case(
        Fault(do="sleep", rank=1, phase="backward"), 2, 11,
        [r"^rank 1 is stuck", "in step 2 of 6, backward of micro-batch 1", r"File .*faults\.py", "waiting: rank 0"],
        QUICK,
    ),
    "sleeps outside of collectives, first rank": Case(
        Fault(do="sleep", rank=0, phase="record"), 2, 11,
        [r"^rank 0 is stuck", "in step 2 of 6, writing the metrics", "waiting: rank 1"],
        QUICK,
    ),
    "sleeps, one rank": Case(
        Fault(do="sleep", phase="plan"), 1, 11,
        [r"^error: no progress for \d seconds \(train\.timeout\)", "in step 2 of 6, planning", r"faults\.py", RECORD],
        QUICK,
    ),
    "all ranks sleep": Case(
        Fault(do="sleep", phase="data", step=0, rank=-1), 2, 11, ["no progress for", "reading the data"], QUICK
    ),
    "all ranks hold Python's lock": Case(
        Fault(do="hold the lock", rank=-1), 2, 11,
        [r"^rank \d failed: no progress for 1\d seconds", "in step 2 of 6, forward", STOPPED],
        ["train.timeout=2"], within=40.0,
    ),
    # ------------------------------------------------------------ memory, storage
    "MemoryError": Case(
        Fault(do="memory", rank=1), 2, 12,
        [r"^rank 1 failed: MemoryError", "in step 2 of 6, forward", "max_tokens_per_device, set model.recompute=full"],
    ),
    "accelerator's memory": Case(
        Fault(do="cuda memory"), 1, 12, [r"^error: OutOfMemoryError: CUDA out of memory", "model.recompute=full"]
    ),
    "allocator of the CPU": Case(
        Fault(do="allocate", phase="load", step=0), 1, 12, [r"^error: RuntimeError: .*alloc", "mesh.dp_shard=-1"]
    ),
    "disk full under metrics": Case(
        Fault(do="full metrics", rank=0, phase="record"), 2, 13,
        [r"^rank 0 failed: OSError: .*No space left on device", "in step 2 of 6, writing the metrics", "df -h"],
    ),
    "no room for the weights": Case(
        Fault(do="small files", phase="save", step=6), 1, 13, ["^error: rank 0 could not save step 6 .*File too large"]
    ),
    "no room for a checkpoint": Case(
        Fault(do="small files", phase="save", step=3, rank=0), 2, 13,
        [r"^rank 0 failed: rank 0 could not save step 3 to run/checkpoints.*File too large", "weft sft --resume run"],
    ),
    "folder vanishes": Case(
        Fault(do="vanish", phase="record", step=2), 1, 13,
        [r"^error: FileNotFoundError: .*removed while the run wrote to it: 'run/metrics.jsonl'", "df -h"],
    ),
    "folder vanishes before a save": Case(
        Fault(do="vanish", phase="save", step=3), 2, 13, ["^error: rank 0 could not save step 3 to run/checkpoints"]
    ),
    # ------------------------------------------------------------ numbers, agreement
    "not a number": Case(
        Fault(do="not a number", rank=1, step=3), 2, 14,
        [r"2 steps in a row were not finite \(train\.max_nonfinite\)", "rank 1, micro-batch 1, documents ../chats"],
        ["train.max_nonfinite=2"], saved=3,
    ),
    "a plan with another weight": Case(
        Fault(do="other weight", rank=1), 2, 15, [r"disagree", "the plan of the step: .* on rank 1; .* on the other"]
    ),
    "a plan in another order": Case(
        Fault(do="other order", rank=1), 2, 15, ["^ranks disagree about step 2: rank . made another plan"], QUICK,
        traceback=True,
    ),
    "a plan with fewer micro-batches": Case(
        Fault(do="fewer documents", rank=1), 2, 15, ["^ranks disagree about step 2: rank . made another plan"], QUICK,
    ),
    "other data": Case(
        Fault(do="other data", rank=1), 2, 15,
        [r"^error: ranks disagree:\n  documents of the data: 20 \(\w+\) on rank 1; 20"], saved=0,
    ),
    "other code": Case(
        Fault(do="other code", rank=1), 2, 15, [r"^error: ranks disagree:\n  weft's files: 0+ on rank 1"], saved=0
    ),
    # ------------------------------------------------------------ clocks
    "the clock goes back": Case(Fault(do="clock back", rank=1), 2, 0, []),
    "the clock goes back, then a rank raises": Case(
        Fault(do="clock back, raise", rank=1), 2, 1, ["^rank 1 failed: RuntimeError: boom", STOPPED], traceback=True
    ),
}  # fmt: skip


def write_config(folder: Path) -> Path:
    folder.mkdir()
    (folder / "c.yaml").write_text(CONFIG)
    return folder


Results = dict[str, Future[tuple[Run, Path]]]


@pytest.fixture(scope="module")
def results(shared: Path, request: pytest.FixtureRequest) -> Iterator[Results]:
    """The chosen cases run two at a time, because those that hang only wait."""

    def run(name: str) -> tuple[Run, Path]:
        case, folder = CASES[name], write_config(shared / re.sub(r"\W+", "-", name))
        return Run(["sft", "c.yaml", "--nproc", str(case.nproc), *case.words], folder, case.fault).wait(), folder

    wanted = [item.callspec.params["name"] for item in request.session.items if item.name.startswith("test_fault[")]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in wanted}


@pytest.mark.parametrize("name", CASES)
def test_fault(name: str, results: Results) -> None:
    case, (run, folder) = CASES[name], results[name].result()
    err = run.errors()
    assert run.status == case.status, err
    at = 0
    for pattern in case.says:
        found = re.compile(pattern, re.MULTILINE).search(err, at)
        assert found is not None, f"{pattern}\nis not in\n{err}"
        at = found.start()
    assert ("Traceback" in err) == case.traceback, err
    assert run.seconds() < case.within
    kept = flight.read_all(folder / "run" / "flight")
    failed_in_run = case.status not in (0, 143) and (folder / "run").exists()
    assert len(kept) == (case.nproc if failed_in_run else 0)
    if "vanish" not in case.fault.do:
        assert last_whole(folder / "run") == saved_before(case)


def saved_before(case: Case) -> int:
    """The last step that was saved, each as soon as it was done."""
    if case.saved is not None:
        return case.saved
    if case.status == 0:
        return STEPS
    if case.status == 143:  # it saved when it was asked to end
        return case.fault.step
    return max(0, case.fault.step - 1)


def last_whole(run: Path) -> int:
    """The step of the checkpoint that `latest` names, after reading all of it; 0 without any."""
    latest = run / "checkpoints" / "latest"
    if not latest.exists():
        return 0
    state = read_state(latest)
    check_contents(state, 0, 1)
    assert load_file(latest / "model.safetensors")
    return state.step


# ---------------------------------------------------------------- more than one process can show


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def joined(folder: Path, words: Sequence[Sequence[str]], fault: Fault | None = None) -> list[Run]:
    """Ranks as torchrun starts them, one for each list of words."""
    place = {
        "WORLD_SIZE": str(len(words)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return [
        Run(["sft", "c.yaml", *more], folder, fault, RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank, more in enumerate(words)
    ]


def test_a_run_is_restarted_afresh_where_nothing_was_saved(shared: Path) -> None:
    folder = write_config(shared / "restarted")
    fault = Fault(do="kill", step=2, once=str(folder / "struck"))
    run = Run(["sft", "c.yaml", "--restarts", "2"], folder, fault).wait()
    assert run.status == 0, run.errors()
    assert "restart 1 of 2: the attempt failed at step 2 (killed)" in run.errors()
    assert [line["step"] for line in metrics(folder / "run")] == list(range(1, STEPS + 1))
    kept = json.loads((folder / "run" / "flight" / "attempt-1" / "rank-00000.json").read_text())
    assert kept["exit_status"] == -9 and kept["where"].startswith("in step 2 of 6, forward")


@pytest.fixture(scope="module")
def unbroken(shared: Path) -> list[object]:
    """The losses of two ranks to which nothing happens."""
    folder = write_config(shared / "unbroken")
    run = Run(["sft", "c.yaml", "--nproc", "2"], folder).wait()
    assert run.status == 0, run.errors()
    return [line["loss"] for line in metrics(folder / "run")]


@pytest.mark.parametrize("do", ["kill", "stop", "raise", "memory"])
def test_a_restarted_run_is_bit_for_bit_the_unbroken_one(do: str, unbroken: list[object], shared: Path) -> None:
    folder = write_config(shared / f"restarted {do}")
    fault = Fault(do=do, step=4, rank=1, once=str(folder / "struck"))
    run = Run(["sft", "c.yaml", "--nproc", "2", "--restarts", "1", *QUICK], folder, fault).wait()
    assert run.status == 0, run.errors()
    assert "restart 1 of 1: the attempt failed at step 4" in run.errors()
    assert "resumed  step 3 of 6" in run.output()
    assert [line["loss"] for line in metrics(folder / "run")] == unbroken
    assert last_whole(folder / "run") == STEPS


def test_a_step_that_fails_twice_is_not_tried_again(shared: Path) -> None:
    folder = write_config(shared / "twice at a step")
    run = Run(["sft", "c.yaml", "--restarts", "5"], folder, Fault(do="exit", step=4)).wait()
    assert run.status == 10
    assert run.errors().count("rank 0 ended with exit status 7") == 2
    assert run.errors().endswith("not restarted: it has failed twice in a row at step 4\n")
    assert last_whole(folder / "run") == 3


def test_ranks_save_and_end_when_their_launcher_is_killed(shared: Path) -> None:
    folder = write_config(shared / "orphans")
    run = Run(["sft", "c.yaml", "train.epochs=10000", "checkpoint.every=0", "--nproc", "2"], folder)
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
    other = tiny_config("llama", vocab_size=264, hidden_size=128)
    hf.build_random(other, dtype=torch.float32, attention="eager", seed=0).save_pretrained(model / "other")
    shutil.move(model / "other" / WEIGHTS, model / WEIGHTS)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda model: (model / WEIGHTS).unlink(), "model.path"),
        (cut_short, "is cut short"),
        (swap, "embed_tokens"),
        (lambda model: (model / WEIGHTS).write_bytes(b""), "no safetensors file"),
    ],
    ids=["missing", "cut short", "swapped", "empty"],
)
def test_weights_that_cannot_be_loaded(harm: Callable[[Path], object], says: str, shared: Path) -> None:
    folder = write_config(shared / f"weights {says}")
    shutil.copytree(shared / "model", folder / "model")
    harm(folder / "model")
    run = Run(["sft", "c.yaml", "model.path=model", "--nproc", "2"], folder).wait()
    assert run.status == 2 and "Traceback" not in run.errors(), run.errors()
    assert says in run.errors()


def test_a_run_whose_last_state_was_tampered_with_goes_on_from_the_one_before(shared: Path) -> None:
    folder = write_config(shared / "tampered")
    assert Run(["sft", "c.yaml"], folder, Fault(do="kill", step=4)).wait().status is not None
    assert last_whole(folder / "run") == 3
    state = folder / "run" / "checkpoints" / "step-000003" / "trainer_state" / "state.json"
    state.write_text(state.read_text().replace('"step": 3', '"step": 2'))
    run = Run(["sft", "--resume", "run"], folder).wait()
    assert run.status == 0, run.errors()
    assert "step-000003: state.json is not what was written" in run.output()
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


def test_two_runs_in_one_folder(shared: Path) -> None:
    """The second is refused while the first goes on."""
    folder = write_config(shared / "twice")
    first = Run(["sft", "c.yaml"], folder, Fault(do="sleep briefly", phase="plan"))
    first.wait_for("step 1/6")
    second = Run(["sft", "c.yaml"], folder).wait()
    assert second.status == 2 and "run.dir: run holds a run already" in second.errors()
    assert "Traceback" not in second.errors()
    assert first.wait().status == 0, first.errors()
    assert len(metrics(folder / "run")) == STEPS


@pytest.mark.parametrize(
    ("what", "says"), [("missing", "data.path"), ("a folder", "data.path"), ("broken", "d.jsonl:2: is not valid JSON")]
)
def test_data_that_cannot_be_read(what: str, says: str, shared: Path) -> None:
    folder = write_config(shared / f"data {what}")
    data = folder / "d.jsonl"
    if what == "a folder":
        data.mkdir()
    elif what == "broken":
        data.write_text('{"text": "abc"}\n{"text": \n')
    run = Run(["sft", "c.yaml", "data.path=d.jsonl", "--nproc", "2"], folder).wait()
    assert run.status == 2 and "Traceback" not in run.errors()
    assert says in run.errors()
    assert not (folder / "run").exists()
