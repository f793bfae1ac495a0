"""The faults of docs/reference/failures.md: what strikes a run of SFT, when, and what is seen of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.control_group import memory_group
from tests.support.faults import Fault, FaultRun
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft.checkpoint.state import check_contents, read_state
from weft.launch import flight
from weft.models import hf

STEPS = 6
CONFIG = """\
model: {path: ../model}
data: {path: ../chats.jsonl}
step: {documents: 8, max_tokens_per_device: 128}
optimizer: {lr: 1e-2}
train: {epochs: 2, seed: 3, log_every: 1}
run: {dir: run}
checkpoint: {every: 1, async: false}
"""


def write_shared(path: Path) -> Path:
    """A Llama and a Mixtral so small that a step takes milliseconds, and chats; each case has a folder beside them."""
    for name, family in (("model", "llama"), ("experts", "mixtral")):
        byte_tokenizer().save_pretrained(path / name)
        config = tiny_config(family, vocab_size=264)
        hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path / name)
    chats = [chat(("user", "a" * (i % 5 + 1)), ("assistant", "bcd" * (i % 7 + 1))) for i in range(20)]
    write_jsonl(path / "chats.jsonl", *chats)
    pairs = [
        {"prompt": "a" * (i % 5 + 1), "chosen": "bcd" * (i % 7 + 1), "rejected": "e" * (i % 4 + 2)} for i in range(20)
    ]
    write_jsonl(path / "pairs.jsonl", *pairs)
    return path


def write_config(folder: Path) -> Path:
    folder.mkdir()
    (folder / "c.yaml").write_text(CONFIG)
    return folder


@dataclass(frozen=True)
class FaultCase:
    """One fault in a run of nproc ranks, and what is seen of it.

    says: patterns that standard error matches, in this order. within: seconds, from the fault to the end of all ranks.
    saved: the last step whose checkpoint stands, None for the one before the fault. megabytes: of memory that the
    kernel lets it have, 0 for all there is. command: of weft. when: for the table, where it is not the fault's phase.
    """

    fault: Fault
    nproc: int
    status: int
    says: list[str]
    words: list[str] = field(default_factory=list)
    within: float = 20.0
    traceback: bool = False
    saved: int | None = None
    megabytes: int = 0
    command: str = "sft"
    when: str = ""


DOCUMENTS = r"documents ../chats\.jsonl:\d+"
STOPPED = r"1 other rank was stopped\."
RECORD = r"The last activity of each rank is in run/flight\."
QUICK = ["train.timeout=4"]
EXPERTS = ["model.path=../experts", "mesh.ep=2"]
STAGES = ["mesh.pp=2", "step.max_tokens_per_device=48"]
BY_PROCESSES = ["data.workers=2", "data.cache=cache"]

CASES = {
    # ------------------------------------------------------------ a rank that dies, in each phase
    "killed in forward": FaultCase(
        Fault(do="kill", rank=1), 2, 10,
        [r"^rank 1 was killed by SIGKILL", rf"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}", STOPPED, RECORD],
    ),
    "killed in backward": FaultCase(
        Fault(do="kill", rank=1, phase="backward"), 2, 10,
        [r"^rank 1 was killed by SIGKILL", rf"in step 2 of 6, backward of micro-batch 1, {DOCUMENTS}"],
    ),
    "killed, with experts on other ranks": FaultCase(
        Fault(do="kill", rank=1, micro=1), 2, 10,
        [r"^rank 1 was killed by SIGKILL", rf"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}", STOPPED, RECORD],
        EXPERTS,
    ),
    "stopped, with experts on other ranks": FaultCase(
        Fault(do="stop", rank=1), 2, 11,
        [r"^rank 1 is stuck: it did not come within 4 seconds \(train\.timeout\); it is stopped \(SIGSTOP\)"],
        [*EXPERTS, *QUICK],
    ),
    "killed in the reduction": FaultCase(
        Fault(do="kill", rank=0, phase="reduce"), 2, 10,
        [r"^rank 0 was killed by SIGKILL", rf"in step 2 of 6, reducing the metrics, {DOCUMENTS}"],
    ),
    "killed in the optimizer": FaultCase(
        Fault(do="kill", rank=1, phase="optimizer"), 2, 10, [r"^rank 1 was killed", r"in step 2 of 6, optimizer$"]
    ),
    "killed while loading": FaultCase(
        Fault(do="kill", rank=1, phase="load", step=0), 2, 10, [r"^rank 1 was killed by SIGKILL", "^loading the model$"]
    ),
    "killed while reading data": FaultCase(
        Fault(do="kill", rank=1, phase="data", step=0), 2, 10, [r"^rank 1 was killed by SIGKILL", "^reading the data$"]
    ),
    "killed while saving": FaultCase(
        Fault(do="kill", rank=0, phase="save", step=6), 2, 10, [r"^rank 0 was killed", r"in step 6 of 6, saving$"]
    ),
    "terminated while loading": FaultCase(
        Fault(do="terminate", rank=1, phase="load", step=0), 2, 10, [r"^rank 1 was killed by SIGTERM", "^loading"]
    ),
    "terminated in training": FaultCase(Fault(do="terminate", rank=1), 2, 143, []),  # all save and end, as they should
    "crash in native code": FaultCase(
        Fault(do="crash", rank=1), 2, 10,
        [r"^rank 1 was killed by SIGSEGV \(a crash in native code\)", "in step 2 of 6, forward", r"File .*string_at"],
    ),
    "os._exit": FaultCase(
        Fault(do="exit", rank=1), 2, 10, [r"^rank 1 ended with exit status 7 and no message", "in step 2 of 6, forward"]
    ),
    "sys.exit": FaultCase(
        Fault(do="sys.exit", rank=1), 2, 1, [r"^rank 1 failed: exit status 7", "in step 2 of 6, forward"]
    ),
    # ------------------------------------------------------------ a rank that raises
    "raises in forward": FaultCase(
        Fault(do="raise", rank=1, micro=1), 2, 1,
        [
            r"^rank 1 failed: RuntimeError: boom", f"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}",
            "Traceback", STOPPED,
        ],
        traceback=True,
    ),
    "raises in backward, one rank": FaultCase(
        Fault(do="raise", phase="backward", micro=2), 1, 1,
        [r"^error: RuntimeError: boom", f"in step 2 of 6, backward of micro-batch 2, {DOCUMENTS}", "Traceback", RECORD],
        traceback=True,
    ),
    "killed while tokenising": FaultCase(
        Fault(do="kill, tokenising", phase="tokenising", step=0), 2, 10,
        [r"^rank \d was killed by SIGKILL", "^reading the data$"], BY_PROCESSES,
    ),
    "stopped while tokenising": FaultCase(
        Fault(do="stop, tokenising", phase="tokenising", step=0), 2, 11,
        [r"^rank \d .*is stopped \(SIGSTOP\)", "^reading the data"], [*BY_PROCESSES, *QUICK], within=30.0,
    ),
    "a process that tokenises is killed": FaultCase(
        Fault(do="kill a worker", phase="tokenising", step=0), 2, 10,
        [r"^rank \d failed: a process that tokenises has died \(killed by SIGKILL\)"], BY_PROCESSES,
    ),
    "a process that tokenises is stopped": FaultCase(
        Fault(do="stop a worker", phase="tokenising", step=0), 2, 11,
        [r"^rank \d .*no progress for \d+ seconds \(train\.timeout\)", "reading the data", r"data/workers\.py"],
        [*BY_PROCESSES, *QUICK],
    ),
    "raises while reading data, one rank": FaultCase(
        Fault(do="raise", phase="data", step=0), 1, 1, [r"^error: RuntimeError: boom\nreading the data"], traceback=True
    ),
    "all raise while a checkpoint is written": FaultCase(
        Fault(do="slow disk, raise", rank=-1, phase="plan", step=3), 2, 1,
        [
            r"^ending   boom: weft first finishes run/checkpoints/step-000002, within 600 s",
            r"^saved    run/checkpoints/step-000002 in ", "failed: RuntimeError: boom", "in step 3 of 6, planning",
        ],
        ["checkpoint.every=2", "checkpoint.async=true"], traceback=True, saved=2,
    ),
    "one raises while a checkpoint is written": FaultCase(
        Fault(do="slow disk, raise", rank=1, phase="plan", step=3), 2, 1,
        ["^rank 1 failed: RuntimeError: boom", "in step 3 of 6, planning", STOPPED],
        ["checkpoint.every=2", "checkpoint.async=true"], within=5.0, traceback=True, saved=0,
    ),
    # ------------------------------------------------------------ a stage of a pipeline
    "killed in forward, the last stage": FaultCase(
        Fault(do="kill", rank=1), 2, 10,
        [r"^rank 1 was killed by SIGKILL", rf"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}", STOPPED, RECORD],
        STAGES,
    ),
    "killed in backward, the first stage": FaultCase(
        Fault(do="kill", rank=0, phase="backward", micro=2), 2, 10,
        [r"^rank 0 was killed by SIGKILL", rf"in step 2 of 6, backward of micro-batch 2, {DOCUMENTS}"], STAGES,
    ),
    "raises in forward, the first stage": FaultCase(
        Fault(do="raise", rank=0, micro=2), 2, 1,
        [
            r"^rank 0 failed: RuntimeError: boom", f"in step 2 of 6, forward of micro-batch 2, {DOCUMENTS}",
            "Traceback", STOPPED,
        ],
        STAGES, traceback=True,
    ),
    "raises in backward, the last stage": FaultCase(
        Fault(do="raise", rank=1, phase="backward", micro=1), 2, 1,
        [r"^rank 1 failed: RuntimeError: boom", f"in step 2 of 6, backward of micro-batch 1, {DOCUMENTS}", STOPPED],
        STAGES, traceback=True,
    ),
    "stopped, a stage": FaultCase(
        Fault(do="stop", rank=1), 2, 11,
        [r"^rank 1 is stuck: it did not come within 4 seconds", "in step 2 of 6, forward of micro-batch 1", "rank 0"],
        [*QUICK, *STAGES],
    ),
    "not a number, in a pipeline": FaultCase(
        Fault(do="not a number", rank=1, step=3), 2, 14,
        [r"2 steps in a row were not finite \(train\.max_nonfinite\)", "rank 1, micro-batch 1, documents ../chats"],
        ["train.max_nonfinite=2", *STAGES], saved=3,
    ),
    "a plan with another weight, in a pipeline": FaultCase(
        Fault(do="other weight", rank=1), 2, 15, [r"disagree", "the plan of the step: .* on rank 1; .* on the other"],
        STAGES,
    ),
    # ------------------------------------------------------------ a rank that hangs
    "stopped": FaultCase(
        Fault(do="stop", rank=1), 2, 11,
        [
            r"^rank 1 is stuck: it did not come within 4 seconds \(train\.timeout\); it is stopped \(SIGSTOP\)",
            f"in step 2 of 6, forward of micro-batch 1, {DOCUMENTS}",
            r"waiting: rank 0 \(in step 2 of 6", STOPPED, RECORD,
        ],
        QUICK,
    ),
    "sleeps in backward": FaultCase(
        Fault(do="sleep", rank=1, phase="backward"), 2, 11,
        [r"^rank 1 is stuck", "in step 2 of 6, backward of micro-batch 1", r"File .*faults\.py", "waiting: rank 0"],
        QUICK,
    ),
    "sleeps outside of collectives, first rank": FaultCase(
        Fault(do="sleep", rank=0, phase="record"), 2, 11,
        [r"^rank 0 is stuck", "in step 2 of 6, writing the metrics", "waiting: rank 1"],
        QUICK,
    ),
    "sleeps, one rank": FaultCase(
        Fault(do="sleep", phase="plan"), 1, 11,
        [r"^error: no progress for \d seconds \(train\.timeout\)", "in step 2 of 6, planning", r"faults\.py", RECORD],
        QUICK,
    ),
    "all ranks sleep": FaultCase(
        Fault(do="sleep", phase="data", step=0, rank=-1), 2, 11, ["no progress for", "reading the data"], QUICK
    ),
    "all ranks hold Python's lock": FaultCase(
        Fault(do="hold the lock", rank=-1), 2, 11,
        [r"^rank \d (failed: no progress for 1?\d seconds|is stuck: it did not come)",
         "in step 2 of 6, forward", STOPPED], ["train.timeout=2"], within=40.0,
    ),
    # ------------------------------------------------------------ memory, storage
    "the kernel kills it for lack of memory": FaultCase(
        Fault(do="fill memory", rank=1), 2, 12,
        [
            r"^rank 1 was killed by the kernel, which is short of memory", "in step 2 of 6, forward",
            "model.recompute=selective or full",
        ],
        megabytes=700,
    ),
    "MemoryError": FaultCase(
        Fault(do="memory", rank=1), 2, 12,
        [r"^rank 1 failed: MemoryError", "in step 2 of 6, forward", "set model.recompute=selective or full"],
    ),
    "accelerator's memory": FaultCase(
        Fault(do="cuda memory"), 1, 12, [r"^error: OutOfMemoryError: CUDA out of memory", "recompute=selective or full"]
    ),
    "allocator of the CPU": FaultCase(
        Fault(do="allocate", phase="load", step=0), 1, 12, [r"^error: RuntimeError: .*alloc", "mesh.dp_shard=-1"]
    ),
    "disk full under metrics": FaultCase(
        Fault(do="full metrics", rank=0, phase="record"), 2, 13,
        [r"^rank 0 failed: OSError: .*No space left on device", "in step 2 of 6, writing the metrics", "df -h"],
    ),
    "no room for the weights": FaultCase(
        Fault(do="small files", phase="save", step=6), 1, 13, ["^error: rank 0 could not save step 6 .*File too large"]
    ),
    "no room for a checkpoint": FaultCase(
        Fault(do="small files", phase="save", step=3, rank=0), 2, 13,
        [r"^rank 0 failed: rank 0 could not save step 3 to run/checkpoints.*File too large", "weft sft --resume run"],
    ),
    "folder vanishes": FaultCase(
        Fault(do="vanish", phase="record", step=2), 1, 13,
        [r"^error: FileNotFoundError: .*removed while the run wrote to it: 'run/metrics.jsonl'", "df -h"],
    ),
    "folder vanishes before a save": FaultCase(
        Fault(do="vanish", phase="save", step=3), 2, 13, ["^error: rank 0 could not save step 3 to run/checkpoints"]
    ),
    # ------------------------------------------------------------ numbers, agreement
    "not a number": FaultCase(
        Fault(do="not a number", rank=1, step=3), 2, 14,
        [r"2 steps in a row were not finite \(train\.max_nonfinite\)", "rank 1, micro-batch 1, documents ../chats"],
        ["train.max_nonfinite=2"], saved=3,
    ),
    "a plan with another weight": FaultCase(
        Fault(do="other weight", rank=1), 2, 15, [r"disagree", "the plan of the step: .* on rank 1; .* on the other"]
    ),
    "a plan in another order": FaultCase(
        Fault(do="other order", rank=1), 2, 15, ["^ranks disagree about step 2: the plans of rank . and"], QUICK,
        traceback=True,
    ),
    "a plan with fewer micro-batches": FaultCase(
        Fault(do="fewer documents", rank=1), 2, 15, ["^ranks disagree about step 2: the plans of rank . and"], QUICK,
    ),
    "other data": FaultCase(
        Fault(do="other data", rank=1), 2, 15,
        [r"^error: ranks disagree:\n  documents of the data: 20 \(\w+\) on rank 1; 20"], saved=0,
    ),
    "other code": FaultCase(
        Fault(do="other code", rank=1), 2, 15, [r"^error: ranks disagree:\n  weft's files: 0+ on rank 1"], saved=0
    ),
    # ------------------------------------------------------------ clocks
    "the clock goes back": FaultCase(Fault(do="clock back", rank=1), 2, 0, []),
    "the clock goes back, then a rank raises": FaultCase(
        Fault(do="clock back, raise", rank=1), 2, 1, ["^rank 1 failed: RuntimeError: boom", STOPPED], traceback=True
    ),
}  # fmt: skip

PHASES = {
    "data": "reading the data", "load": "loading the model", "plan": "planning", "rows": "laying out rows",
    "forward": "forward", "backward": "backward", "reduce": "reducing the metrics", "optimizer": "optimizer",
    "record": "writing the metrics", "evaluate": "evaluating", "save": "saving",
}  # fmt: skip


def every_phase() -> dict[str, FaultCase]:
    """Kills, exceptions and stops of either rank in every phase: with `make faults`, not in the suite."""
    cases_by_name = {}
    for phase, words in PHASES.items():
        step = 0 if phase in ("data", "load") else 3
        keys = ["eval.path=../chats.jsonl", "eval.every=1"] if phase == "evaluate" else []
        for rank in (0, 1):

            def fault(do: str, phase: str = phase, step: int = step, rank: int = rank) -> Fault:
                return Fault(do=do, phase=phase, step=step, rank=rank)

            cases_by_name[f"rank {rank} is killed, {words}"] = FaultCase(
                fault("kill"), 2, 10, ["was killed by SIGKILL"], keys
            )
            cases_by_name[f"rank {rank} raises, {words}"] = FaultCase(
                fault("raise"), 2, 1, ["boom"], keys, traceback=True
            )
            cases_by_name[f"rank {rank} is stopped, {words}"] = FaultCase(
                fault("stop"), 2, 11, [f"rank {rank} .*SIGSTOP"], [*QUICK, *keys]
            )
    return cases_by_name


# command -> words, and the model that it only reads, as flight records and messages name it
READ_MODELS = {
    "dpo": (["data.path=../pairs.jsonl", "preference.beta=0.1"], "the reference"),
    "distill": (["distill.teacher=../model", "distill.alpha=0.5"], "the teacher"),  # the student begins as it
}


def of_read_models() -> dict[str, FaultCase]:
    """The reference of `weft dpo` and the teacher of `weft distill`: killed, stopped, raising in each phase, and
    answers that make no sense."""
    cases_by_name = {}
    for command, (words, model) in READ_MODELS.items():
        name = f"{model} of weft {command}"
        for phase, step, doing, message in (
            ("load", 0, "loaded", f"^loading {model}$"), ("evaluate", 3, "read", f"^in step 3 of 6, reading {model}")
        ):  # fmt: skip
            when = "loading it" if phase == "load" else "reading it, step 3"
            if command == "distill" and phase == "evaluate":
                phase = "readout"
            fault = Fault(do="kill", phase=phase, step=step, rank=1, role=model)
            common: dict[str, Any] = {"command": command, "when": when}
            cases_by_name[f"{name} is killed while it is {doing}"] = FaultCase(
                fault, 2, 10, ["^rank 1 was killed by SIGKILL", message], words, **common
            )
            cases_by_name[f"{name} raises while it is {doing}"] = FaultCase(
                replace(fault, do="raise"), 2, 1, ["^rank 1 failed: RuntimeError: boom", message], words,
                traceback=True,
                **common,
            )  # fmt: skip
            cases_by_name[f"{name} is stopped while it is {doing}"] = FaultCase(
                replace(fault, do="stop"), 2, 11, [r"^rank 1 .*is stopped \(SIGSTOP\)", message],
                [*words, "train.timeout=4"], within=90.0, **common,
            )  # fmt: skip
    nan = Fault(do="reference gives NaN", phase="evaluate", step=3, rank=-1)
    of_dpo: dict[str, Any] = {"words": READ_MODELS["dpo"][0], "command": "dpo", "when": "reading it, step 3"}
    of_distill: dict[str, Any] = {"words": READ_MODELS["distill"][0], "command": "distill", "when": of_dpo["when"]}
    cases_by_name["the reference of weft dpo gives NaN"] = FaultCase(
        nan,
        2,
        14,
        [r"the reference \(../model\) computes log probabilities that are not finite.*pairs\.jsonl:\d+"],
        **of_dpo,
    )
    cases_by_name["the teacher of weft distill gives NaN"] = FaultCase(
        replace(nan, do="teacher gives NaN"), 2, 14,
        [r"the teacher ../model returns hidden states that are not finite, for ../chats\.jsonl:\d+"], **of_distill,
    )  # fmt: skip
    cases_by_name["the teacher of weft distill gives too few hidden states"] = FaultCase(
        replace(nan, do="teacher gives too few"), 2, 1,
        [r"RuntimeError: the teacher ../model returns hidden states of shape \(\d+, \d+\) for ../chats\.jsonl:\d+ of"],
        traceback=True, **of_distill,
    )  # fmt: skip
    return cases_by_name


FURTHER_CASES = every_phase() | of_read_models()


def saved_before(case: FaultCase) -> int:
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


def run_case(name: str, case: FaultCase, shared: Path) -> tuple[FaultRun, Path]:
    """The run, ended, and its folder, beside the model and the data."""
    folder = write_config(shared / re.sub(r"\W+", "-", name))
    with memory_group(case.megabytes) as group:
        return FaultRun(
            [case.command, "c.yaml", "--nproc", str(case.nproc), *case.words], folder, case.fault, group
        ).wait(), folder


def check(case: FaultCase, run: FaultRun, folder: Path) -> None:
    """AssertionError where anything is not as the case has it."""
    err = run.errors()
    assert run.status == case.status, err
    position = 0
    for pattern in case.says:
        match = re.compile(pattern, re.MULTILINE).search(err, position)
        assert match is not None, f"{pattern}\nis not in\n{err}"
        position = match.start()
    assert ("Traceback" in err) == case.traceback, err
    assert run.seconds() < case.within, run.seconds()
    records = flight.read_all(folder / "run" / "flight")
    failed_in_run = case.status not in (0, 143) and (folder / "run").exists()
    assert len(records) == (case.nproc if failed_in_run else 0), records
    if "vanish" not in case.fault.do:
        assert last_whole(folder / "run") == saved_before(case)
