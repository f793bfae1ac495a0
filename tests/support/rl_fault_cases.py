"""The faults of `weft rl` in docs/reference/failures.md: what strikes a run, when, and what is seen of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from tests.support.control_group import memory_group
from tests.support.fault_cases import last_whole
from tests.support.local_rl import KEYS, write_reward_model, write_teacher
from tests.support.rl_faults import RlFault, RlRun
from weft.inference.records import FOLDER, rollout_files

STEPS = 3  # rollout steps of one optimizer step each, with a checkpoint after each
ALL = "nothing: the run continues"


@dataclass(frozen=True, kw_only=True)
class RlCase:
    """One fault in a run, and what is seen of it.

    when: for the table. on: `one process`, or what Ray has. says: patterns that what it prints matches, in this order.
    within: seconds, from the fault to the end of the controller. saved: the last step whose checkpoint stands. lost:
    for the table, where it does not follow from that. failed: samples without a reward in the whole run, if that is
    known. tidy: whether nothing is left in the temporary directory, before the next start removes it. megabytes: as
    Case has them. resume_with: keys, where one rank goes on.
    """

    fault: RlFault
    when: str
    status: int
    says: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    on: str = "one process"
    within: float = 30.0
    saved: int = 1
    lost: str = ""
    failed: int | None = 0
    traceback: bool = False
    tidy: bool = True
    megabytes: int = 0
    resumes: bool = True
    resume_with: list[str] = field(default_factory=list)

    @property
    def on_ray(self) -> bool:
        return "Ray" in self.on


def words_of(task: Path, case: RlCase) -> list[str]:
    paths = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", "run.dir=run", f"train.steps={STEPS}"]
    return [*paths, *KEYS, *case.words]


def run_rl_case(name: str, case: RlCase, task: Path) -> tuple[RlRun, Path]:
    """The run, ended, and its folder, beside the model and the data."""
    folder = task / re.sub(r"\W+", "-", name)
    folder.mkdir()
    if any("../rm" in word or "../adder-3" in word for word in case.words):
        make_models(task)
    (task / "plain.jinja").write_text(TEMPLATE)
    with memory_group(case.megabytes) as group:
        return RlRun(words_of(task, case), folder, case.fault, on_ray=case.on_ray, group=group).wait(), folder


def check_rl(case: RlCase, run: RlRun, folder: Path) -> None:
    """AssertionError where anything is not as the case has it."""
    output = run.output() + run.errors()
    assert run.status == case.status, f"{run.status}: {output}"
    position = 0
    for pattern in case.says:
        match = re.compile(pattern, re.MULTILINE).search(output, position)
        assert match is not None, f"{pattern}\nis not in\n{output}"
        position = match.start()
    assert ("Traceback" in output) == case.traceback, output
    assert run.seconds() < case.within or not case.status, run.seconds()
    processes = run.left_processes()
    assert processes == [], [process.cmdline() for process in processes]
    assert not case.tidy or run.left_folders() == []
    assert last_whole(folder / "run") == case.saved, output
    if not case.status and case.failed is not None:
        assert sum(line["rewards/failed"] for line in lines(folder / "run")) == case.failed


def check_resume(case: RlCase, run: RlRun, folder: Path) -> None:
    """The run goes on from its last whole checkpoint, to its end; all that is left is the run."""
    try:
        if not case.resumes:
            return
        resumed = RlRun(["--resume", "run", *case.resume_with], folder, tmp=run.tmp).wait()
        output = resumed.output() + resumed.errors()
        assert resumed.status == 0, output
        opening = f"resumed  step {case.saved} of {STEPS}" if case.saved else "resumed  run has no checkpoint yet"
        assert opening in output, output
        assert [line["step"] for line in lines(folder / "run")] == list(range(1, STEPS + 1))
        assert sorted(rollout_files(folder / "run" / FOLDER)) == list(range(1, STEPS + 1))
        assert last_whole(folder / "run") == STEPS
        assert run.left_processes() == [] and run.left_folders() == []
    finally:
        run.forget()


def lines(run: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in entries if line["step"]]


# ---------------------------------------------------------------- actors that die or hang, on Ray

TWO, SOON = ["--nproc", "2"], ["train.timeout=3"]
EVALUATED = ["eval.path=../additions.jsonl", "eval.every=1"]
# phase -> how the table calls it, (phase, step, nth) of the flight record, keys, the last checkpoint
TRAINER: dict[str, tuple[str, tuple[str, int], list[str], int]] = {
    "loading": ("loading the model", ("load", 0), [], 0),
    "generating": ("generating, step 2", ("generate", 1), [], 1),
    "reading logprobs": ("computing logprobs, step 2", ("logprobs", 1), ["rl.kl_coef=0.1"], 1),
    "in forward": ("forward, step 2", ("forward", 2), [], 1),
    "in the optimizer": ("optimizer, step 2", ("optimizer", 2), [], 1),
    "syncing weights": ("syncing weights, step 2", ("sync", 2), [], 1),
    "evaluating": ("evaluating, step 2", ("generate", 2), EVALUATED, 1),
    "saving": ("saving, step 2", ("save", 2), [], 1),
}
WHERE = {
    "loading": "loading the model",
    "generating": "in step 1 of 3, generating", "evaluating": "in step 2 of 3, generating",
    "reading logprobs": "computing logprobs", "in forward": "in step 2 of 3, forward",
    "in the optimizer": "in step 2 of 3, optimizer", "syncing weights": "in step 2 of 3, syncing weights",
    "saving": "in step 2 of 3, saving",
}  # fmt: skip


def trainers() -> dict[str, RlCase]:
    """Either of two trainer ranks is killed, or stopped, in every phase that it has."""
    cases = {}
    for name, (when, (phase, step), keys, saved) in TRAINER.items():
        for rank in (0, 1):
            common: dict[str, Any] = {"when": when, "on": "Ray, 2 ranks", "saved": saved}
            fault: dict[str, Any] = {"phase": phase, "step": step, "rank": rank}
            cases[f"trainer rank {rank} is killed {name}"] = RlCase(
                fault=RlFault(do="kill", **fault), status=10, words=[*TWO, *keys], **common,
                says=[rf"trainer rank {rank} died", WHERE[name]],
            )  # fmt: skip
            cases[f"trainer rank {rank} is stopped {name}"] = RlCase(
                fault=RlFault(do="stop", **fault), status=11, words=[*TWO, *SOON, *keys], **common, within=90.0,
                says=[rf"trainer rank {rank} .*is stopped \(SIGSTOP\)", WHERE[name]],
            )  # fmt: skip
    return cases


def engines() -> dict[str, RlCase]:
    """A rollout engine of its own (rollout.engine=hf) is killed, stopped, or answers nonsense, in every phase that it
    has: another takes its place. Without restarts, and after too many, the run ends."""
    hf_engine, soon = ["rollout.engine=hf"], ["rollout.timeout=3", "train.timeout=20"]
    later = "run/checkpoints/step-000001"
    phases: dict[str, tuple[str, dict[str, Any], list[str], int]] = {
        "loading": ("loading the model", {"phase": "load"}, [], 0),
        "evaluating": ("evaluating, before step 1", {"phase": "generate"}, [*EVALUATED, "eval.at_start=true"], 0),
        "generating": ("generating, step 2", {"phase": "generate", "after": later}, [], 1),
        "syncing weights": ("syncing weights, step 2", {"phase": "sync", "nth": 3}, [], 1),
    }
    goes_on: dict[str, Any] = {"status": 0, "on": "Ray, an engine", "saved": 3, "lost": ALL, "resumes": False}
    ends: dict[str, Any] = {"when": "generating, step 2", "on": "Ray, an engine", "saved": 1}
    back = r"restart  rollout engine 0 runs again after"
    cases = {}
    for name, (when, fault, keys, _) in phases.items():
        once: dict[str, Any] = {"who": "engine", "step": 0, "once": "once", **fault}
        cases[f"a rollout engine is killed {name}"] = RlCase(
            fault=RlFault(do="kill", **once), when=when, words=[*hf_engine, *keys], **goes_on,
            says=[r"restart  rollout engine 0 is replaced, restart 1 of 3 .*: .*rollout engine 0 died", back],
        )  # fmt: skip
        cases[f"a rollout engine is stopped {name}"] = RlCase(
            fault=RlFault(do="stop", **once), when=when, words=[*hf_engine, *soon, *keys], **goes_on,
            says=[r"restart  rollout engine 0 is replaced, restart 1 of 3", back],
        )  # fmt: skip
    generating: dict[str, Any] = {"who": "engine", "step": 0, "phase": "generate", "after": later}
    cases["a rollout engine raises generating"] = RlCase(
        fault=RlFault(do="raise", once="once", **generating), when="generating, step 2", words=hf_engine, **goes_on,
        says=["rollout engine 0 is replaced, .*RuntimeError: boom", back],
    )  # fmt: skip
    cases["a rollout engine returns invalid answers"] = RlCase(
        fault=RlFault(do="an engine answers nonsense"), when="generating, step 1", words=hf_engine,
        **goes_on | {"on": "one process"},
        says=["rollout engine 0 is replaced, .*returned an invalid completion: ValueError: logprob nan", back],
    )  # fmt: skip
    cases["a rollout engine is killed each time"] = RlCase(
        fault=RlFault(do="kill", **generating), status=10, words=[*hf_engine, "rollout.restarts=1"], **ends,
        within=60.0,
        says=["rollout engine 0 has failed 2 times within 3600 s, and rollout.restarts is 1", "rollout engine 0 died"],
    )  # fmt: skip
    cases["a rollout engine is killed, and is not replaced"] = RlCase(
        fault=RlFault(do="kill", **generating), status=10, words=[*hf_engine, "rollout.restarts=0"], **ends,
        says=["rollout engine 0 died"],
    )  # fmt: skip
    cases["a rollout engine is stopped, and is not replaced"] = RlCase(
        fault=RlFault(do="stop", **generating), status=11, words=[*hf_engine, *soon, "rollout.restarts=0"], **ends,
        within=90.0, says=[r"rollout engine 0 .*is stopped \(SIGSTOP\)"],
    )  # fmt: skip
    return cases


def stages() -> dict[str, RlCase]:
    """A trainer rank is a stage of layers; an engine of its own gets the weights of two."""
    cut = ["model.path=../adder-2", "mesh.pp=2", "step.max_tokens_per_device=16", *TWO]
    soon = ["rollout.timeout=3", "train.timeout=20"]
    common: dict[str, Any] = {"on": "Ray, 2 ranks", "saved": 1, "resume_with": ["mesh.pp=1"]}
    return {
        "the last stage is killed in forward": RlCase(
            fault=RlFault(do="kill", rank=1, micro=1), when="forward, step 2", status=10, words=cut, **common,
            says=["trainer rank 1 died", "in step 2 of 3, forward of micro-batch 1"],
        ),
        "the first stage raises in backward": RlCase(
            fault=RlFault(do="raise", phase="backward", rank=0, micro=2), when="backward, step 2", status=1, words=cut,
            says=["trainer rank 0 failed: RuntimeError: boom", "in step 2 of 3, backward of micro-batch 2"],
            traceback=True, **common,
        ),
        "the last stage is stopped reading logprobs": RlCase(
            fault=RlFault(do="stop", phase="logprobs", step=1, rank=1), when="computing logprobs, step 2", status=11,
            words=[*cut, *SOON, "rl.kl_coef=0.1"], within=90.0, **common,
            says=[r"trainer rank 1 .*is stopped \(SIGSTOP\)", "computing logprobs"],
        ),
        "an engine is stopped, syncing weights of two stages": RlCase(
            fault=RlFault(who="engine", do="stop", phase="sync", step=0, nth=3, once="once"), status=0, lost=ALL,
            when="syncing weights, step 2", words=[*cut, "rollout.engine=hf", *soon], resumes=False,
            says=["rollout engine 0 is replaced, restart 1 of 3"], **common | {"saved": 3},
        ),
    }  # fmt: skip


SCORED, TAUGHT = ["rl.reward=[model:../rm, length]", "reward_model.ranks=1"], ["rl.teacher=../adder-3"]
_making = Lock()


def make_models(task: Path) -> None:
    """A reward model, rm, and a teacher, adder-3, beside the models of a task."""
    with _making:
        if not (task / "rm").exists():
            write_reward_model(task / "adder", task / "rm", 0)
            write_teacher(task / "adder-2", task / "adder-3")


def read_models() -> dict[str, RlCase]:
    """Separate ranks of a reward model, a reference or a teacher are killed or stopped in each of their phases, or
    answer nonsense: weft restarts them. Without restarts, and after too many, the run ends. A teacher in the trainer's
    ranks fails. Models always answer nonsense."""
    later, cases = "run/checkpoints/step-000001", dict[str, RlCase]()
    goes_on: dict[str, Any] = {"status": 0, "saved": 3, "lost": ALL, "resumes": False}
    measured = ["rl.kl_coef=0.1", "reference.ranks=1"]
    taught = [*TAUGHT, "rl.teacher_in=advantage", "cluster.devices={trainer: 1, teacher: 1}"]
    for model, words, name, when, fault in (
        ("reward model", SCORED, "loading", "loading the models", {"phase": "load"}),
        ("reward model", SCORED, "scoring", "computing rewards, step 2", {"phase": "score", "after": later}),
        ("reference", measured, "loading", "loading the models", {"phase": "load"}),
        ("reference", measured, "reading", "computing logprobs, step 2", {"phase": "logprobs", "after": later}),
        ("teacher", taught, "loading", "loading the models", {"phase": "load"}),
        ("teacher", taught, "reading", "computing logprobs, step 2", {"phase": "logprobs", "after": later}),
    ):
        common: dict[str, Any] = {"when": when, "on": f"Ray, a {model}", **goes_on}
        for do, done, options in (("kill", "killed", []), ("stop", "stopped", SOON)):
            cases[f"a {model} is {done} {name}"] = RlCase(
                fault=RlFault(who="reference_critic", do=do, step=0, once="once", **fault), words=[*words, *options],
                says=[rf"restart  {model} ranks are started again, restart 1 of 3", f"{model} ranks load"], **common,
            )  # fmt: skip
    for model, words in (("reference", measured), ("teacher", taught)):
        again = rf"restart  {model} ranks are started again, restart 1 of 3 .*: the {model} "
        in_step = {"when": "computing logprobs, step 1"}
        for do, done, says in (
            ("NaN once", "return NaN once", "returns log probabilities that are not finite"),
            ("a sample less", "omit a sample once", r"has read \d+ of 6"),
            ("a token less", "omit a token once", r"has read \(\d+,\) values of sample"),
        ):
            cases[f"separate ranks of a {model} {done}"] = RlCase(
                fault=RlFault(do=do), words=words, says=[again + says, f"{model} ranks load"], **goes_on, **in_step,
            )  # fmt: skip
        cases[f"separate ranks of a {model} return NaN each time"] = RlCase(
            fault=RlFault(do="NaN each time"), status=14, words=words, saved=0, **in_step,
            says=[again, f"error: the {model} returns log probabilities that are not finite, for sample"],
        )  # fmt: skip
    cases["a reward model gives too few scores once"] = RlCase(
        fault=RlFault(do="few scores once"), words=SCORED, when="computing rewards, step 1", **goes_on,
        says=[r"restart  reward model ranks .* 1 of 3 .*: the reward model has given \d+ scores for \d+ conversations"],
    )  # fmt: skip
    scoring: dict[str, Any] = {"who": "reference_critic", "step": 0, "phase": "score", "after": later}
    ends: dict[str, Any] = {"when": "computing rewards, step 2", "on": "Ray, a reward model", "saved": 1}
    cases["a reward model is killed each time"] = RlCase(
        fault=RlFault(do="kill", **scoring), status=10, words=[*SCORED, "cluster.frozen_restarts=1"], within=60.0,
        says=["ranks have failed 2 times within 3600 s, and cluster.frozen_restarts is 1", "rank 0 died"], **ends,
    )  # fmt: skip
    for do, done, status, options, message in (
        ("kill", "killed", 10, [], "reward model rank 0 died"),
        ("stop", "stopped", 11, SOON, r"reward model rank 0 .*is stopped \(SIGSTOP\)"),
    ):
        cases[f"a reward model is {done}, and is not restarted"] = RlCase(
            fault=RlFault(do=do, **scoring), status=status, words=[*SCORED, *options, "cluster.frozen_restarts=0"],
            within=90.0, says=[message, "scoring conversations"], **ends,
        )  # fmt: skip
    cases["the reference gives NaN"] = RlCase(
        fault=RlFault(do="reference gives NaN"), status=14, words=["rl.kl_coef=0.1"], saved=0,
        says=["the reference returns log probabilities that are not finite, for sample"],
        when="computing logprobs, step 1",
    )  # fmt: skip
    cases["the critic gives NaN"] = RlCase(
        fault=RlFault(do="critic gives NaN"), when="computing logprobs, step 1", status=14, saved=0,
        words=["rl.algorithm=ppo", "rl.minibatches=1", "rl.epochs=1"],
        says=["the critic returns values that are not finite, for sample .* fsdp.param_dtype=fp32"],
    )  # fmt: skip
    cases["a reward model gives NaN for a sample"] = RlCase(
        fault=RlFault(do="reward model gives NaN"), when="computing rewards, step 1", words=SCORED, failed=1,
        **goes_on | {"lost": SAMPLES[1]}, says=["reward   reward_model failed for sample .*: the model's score is nan"],
    )  # fmt: skip
    cases["a reward model raises scoring"] = RlCase(
        fault=RlFault(who="reference_critic", do="raise", phase="score", step=0, after=later), status=1, words=SCORED,
        says=["reward model rank 0 failed: RuntimeError: boom", "scoring conversations"], traceback=True, saved=1,
        when="computing rewards, step 2", on="Ray, a reward model",
    )  # fmt: skip
    cases["a reward model gives too few scores"] = RlCase(
        fault=RlFault(do="few scores"), status=1, words=SCORED, saved=0, when="computing rewards, step 1",
        says=[r"the reward.model.* has given \d+ scores for \d+ conversations"], traceback=True,
    )  # fmt: skip
    in_advantage = [*TAUGHT, "rl.teacher_in=advantage"]
    cases["the teacher of weft rl is killed reading"] = RlCase(
        fault=RlFault(do="kill", phase="logprobs", step=1, role="the teacher"), status=10, words=in_advantage, saved=1,
        says=["trainer rank 0 died", "reading the teacher"], when="computing logprobs, step 2", on="Ray, 1 rank",
    )  # fmt: skip
    cases["the teacher of weft rl is stopped reading"] = RlCase(
        fault=RlFault(do="stop", phase="logprobs", step=1, role="the teacher"), status=11, saved=1, within=90.0,
        words=[*in_advantage, *SOON], says=[r"trainer rank 0 .*is stopped \(SIGSTOP\)", "reading the teacher"],
        when="computing logprobs, step 2", on="Ray, 1 rank",
    )  # fmt: skip
    cases["the teacher of weft rl gives NaN"] = RlCase(
        fault=RlFault(do="teacher gives NaN"), status=14, words=in_advantage, saved=0,
        says=["teacher returns log probabilities that are not finite, for sample"], when="computing logprobs, step 1",
    )  # fmt: skip
    return cases


CRITIC: dict[str, tuple[str, dict[str, Any], str]] = {
    "loading": ("loading the models", {"phase": "load", "step": 0}, "loading the model"),
    "reading values": ("computing logprobs, step 2", {"phase": "logprobs", "step": 1}, "computing logprobs"),
    "in forward": ("forward, step 2", {"phase": "forward"}, "in step 2 of 3, forward"),
    "in the optimizer": ("optimizer, step 2", {"phase": "optimizer"}, "in step 2 of 3, optimizer"),
}


def critics() -> dict[str, RlCase]:
    """The separate ranks of a critic are trained, so their end ends the run; --restarts or --resume continues it."""
    apart = ["rl.algorithm=ppo", "rl.minibatches=1", "rl.epochs=1", "critic.ranks=1"]
    cases = {}
    for name, (when, fault, where) in CRITIC.items():
        common: dict[str, Any] = {"when": when, "on": "Ray, a critic", "saved": 0 if name == "loading" else 1}
        cases[f"a critic is killed {name}"] = RlCase(
            fault=RlFault(who="reference_critic", do="kill", **fault), status=10, words=apart, **common,
            says=["critic rank 0 died", where],
        )  # fmt: skip
        cases[f"a critic is stopped {name}"] = RlCase(
            fault=RlFault(who="reference_critic", do="stop", **fault), status=11, words=[*apart, *SOON], within=90.0,
            says=[r"critic rank 0 .*is stopped \(SIGSTOP\)", where], **common,
        )  # fmt: skip
    for do, done, status, says in (
        ("NaN once", "return NaN", 14, "error: the critic returns values that are not finite, for sample"),
        ("a sample less", "omit a sample", 1, r"the critic has read \d+ of 6 samples"),
    ):
        cases[f"separate ranks of a critic {done}"] = RlCase(
            fault=RlFault(do=do), when="computing logprobs, step 1", status=status, saved=0, words=apart, says=[says],
            traceback=status == 1,
        )  # fmt: skip
    return cases


# ---------------------------------------------------------------- the controller

# phase -> how the table calls it, which call of it, keys, the last checkpoint
CONTROLLER: dict[str, tuple[str, int, list[str], int]] = {
    "load": ("loading the models", 1, [], 0),
    "generate": ("generating, step 2", 3, [], 1),
    "reward": ("computing rewards, step 2", 3, [], 1),
    "advantages": ("computing advantages, step 2", 2, [], 1),
    "update": ("updating, step 2", 2, [], 1),
    "sync": ("syncing weights, step 2", 3, [], 1),
    "evaluate": ("evaluating, step 2", 3, EVALUATED, 1),
    "record": ("writing rollouts and metrics, step 2", 2, [], 1),
    "save": ("saving, step 2", 2, [], 1),
}


def controllers() -> dict[str, RlCase]:
    """The controller is killed, interrupted or terminated in every phase."""
    cases = {}
    for phase, (when, nth, keys, saved) in CONTROLLER.items():
        common: dict[str, Any] = {"when": when, "words": keys}
        for do, number, name in (("interrupt", 2, "SIGINT"), ("terminate", 15, "SIGTERM")):
            # A signal that comes while a step is saved ends the run after the next.
            fault = RlFault(who="controller", do=do, phase=phase, nth=nth - (phase == "save"))
            early = phase == "load"
            cases[f"{name}, {when}"] = RlCase(
                fault=fault, status=128 + number, saved=0 if early else 2, lost="" if early else "nothing", **common,
                tidy=not (early and do == "terminate"),
                says=[] if early else [rf"stopped  by {name} after step 2\. Resume with: weft rl --resume run"],
            )  # fmt: skip
        for on in ("one process", "Ray, 1 rank") if phase in ("generate", "update", "save") else ("one process",):
            name = f"the controller is killed, {when}" + (", with Ray" if "Ray" in on else "")
            fault = RlFault(who="controller", do="kill", phase=phase, nth=nth)
            cases[name] = RlCase(fault=fault, status=-9, saved=saved, on=on, tidy=False, **common)
    cases["the controller is stopped, and continues"] = RlCase(
        fault=RlFault(who="controller", do="stop for a while", phase="update", nth=2), when="updating, step 2",
        status=0, on="Ray, 1 rank", words=["train.timeout=2"], lost=ALL, saved=3, resumes=False,
    )  # fmt: skip
    return cases


def parts_of_ray() -> dict[str, RlCase]:
    """A process of the run's own Ray is killed."""
    return {
        f"Ray's {part} is killed": RlCase(
            fault=RlFault(who="controller", do=f"kill {part}", phase="update", nth=2), when="updating, step 2",
            status=10, on="Ray, 1 rank", says=[rf"{name}, process \d+, has died \(killed by SIGKILL\)"],
        )
        for part, name in (("gcs_server", r"Ray's GCS \(gcs_server\)"), ("raylet", "Ray's raylet"))
    }  # fmt: skip


# ---------------------------------------------------------------- a trainer that raises; storage; numbers


def raising() -> dict[str, RlCase]:
    """A trainer raises in every phase."""
    cases = {}
    for name, (when, (phase, step), keys, saved) in TRAINER.items():
        cases[f"a trainer raises {name}"] = RlCase(
            fault=RlFault(do="raise", phase=phase, step=step), when=when, status=1, words=keys, saved=saved,
            says=["trainer rank 0 failed: RuntimeError: boom", WHERE[name], "Traceback"], traceback=True,
        )  # fmt: skip
    cases["the advantage function raises"] = RlCase(  # in the controller: no trainer computes them
        fault=RlFault(who="controller", do="raise", phase="advantages", nth=2), status=1, saved=1,
        when="computing advantages, step 2", says=["RuntimeError: boom", "Traceback"], traceback=True,
    )  # fmt: skip
    for on in ("one process", "Ray, 1 rank"):
        cases["the advantage function hangs" + (", with Ray" if "Ray" in on else "")] = RlCase(
            fault=RlFault(who="controller", do="sleep", phase="advantages", nth=2), status=11, saved=1, on=on,
            when="computing advantages, step 2", words=["train.timeout=10"], tidy=False,
            says=[r"has been in one call for 1\d seconds \(train.timeout\)", "compute_advantages", "Resume"],
        )  # fmt: skip
    return cases


STORAGE = ["No space left on device|File too large", "weft rl --resume run"]
OTHERS = {
    "MemoryError in a trainer": RlCase(
        fault=RlFault(do="memory"), when="forward, step 2", status=12,
        says=["trainer rank 0 failed: MemoryError", "model.recompute=selective or full"],
    ),
    "the kernel kills a trainer rank for lack of memory": RlCase(
        fault=RlFault(do="fill memory"), when="forward, step 2", status=12, on="Ray, 1 rank", megabytes=4000,
        says=["trainer rank 0 was killed by the kernel, which is short of memory", "in step 2 of 3, forward"],
    ),
    "accelerator's memory": RlCase(
        fault=RlFault(do="cuda memory", phase="generate", step=1), when="generating, step 2", status=12,
        says=["trainer rank 0 failed: OutOfMemoryError: CUDA out of memory"],
    ),
    "disk full under rollouts": RlCase(
        fault=RlFault(who="controller", do="full rollouts", phase="record", nth=2), when="writing rollouts, step 2",
        status=13, says=["could not write run/rollouts/step-000002.parquet: ", *STORAGE],
    ),
    "disk full under metrics": RlCase(
        fault=RlFault(who="controller", do="full metrics", phase="record", nth=2), when="writing the metrics, step 2",
        status=13, says=["could not write .*metrics.jsonl: ", *STORAGE],
    ),
    "no room for a checkpoint": RlCase(
        fault=RlFault(who="controller", do="small files", phase="save", nth=2), when="saving, step 2",
        status=13, says=["could not save step 2 to run/checkpoints", *STORAGE],
    ),
    "a sync delivers wrong bytes": RlCase(
        fault=RlFault(do="another checksum"), when="syncing weights, before step 1", status=1, saved=0,
        words=["rollout.engine=hf"],
        says=["rollout.restarts is 3", "bytes that differ from the sent bytes, version 0", "weft rl --resume run"],
    ),
    "port in use": RlCase(
        fault=RlFault(do="port in use"), when="before loading", status=2, saved=0, on="Ray, 2 ranks",
        words=["--nproc", "2"], within=60.0,
        says=[r"port \d+ of this machine, the rendezvous of the ranks \(MASTER_PORT\), is in use"],
    ),
    "Ray cannot start": RlCase(
        fault=RlFault(do="few files"), when="before loading", status=10, saved=0, on="Ray, 1 rank",
        says=["error: Ray could not be started on this machine"],
    ),
    "overlong prompts": RlCase(
        fault=RlFault(do="nothing"), when="reading the data", status=2, saved=0, words=["rollout.max_prompt_tokens=3"],
        says=["additions.jsonl:1: 9 of 9 prompts are longer than rollout.max_prompt_tokens = 3"], resumes=False,
    ),
    "folder vanishes": RlCase(
        fault=RlFault(who="controller", do="vanish", phase="record", nth=2), when="writing rollouts, step 2",
        status=13, says=["could not write run/rollouts"], saved=0, resumes=False,
    ),
    "folder vanishes before a save": RlCase(
        fault=RlFault(who="controller", do="vanish", phase="save", nth=2), when="saving, step 2",
        status=13, says=["run"], saved=0, resumes=False,
    ),
}  # fmt: skip


# ---------------------------------------------------------------- what the user's code may do

OF_USER = ["rl.reward=[tests.support.fault_user_code:reward]", "rl.reward_workers=2", "rl.reward_timeout=2"]
ENVIRONMENT = [
    "rl.reward=[tests.support.reward_functions:variety]",
    "rl.environment=tests.support.fault_user_code:FaultyEnvironment",
    "rl.environment_timeout=2",
]
AGENT = [
    "rl.reward=[]", "data.columns={}", "rl.agent=tests.support.fault_user_code:agent", "rl.agent_timeout=2",
    "data.chat_template=../plain.jinja",
]  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # the model has no token but digits
OF_PHASE = {
    "reward": "computing rewards", "start": "starting an environment", "step": "a step of an environment",
    "agent start": "an agent before its first call", "agent step": "an agent after an answer",
}  # fmt: skip
PROMPT = "14+56="  # of step 2
SAMPLES = {1: "1 sample, which is not trained", 3: "3 samples, which are not trained"}


def users() -> dict[str, RlCase]:
    """Reward functions and environments that fail for the samples of one prompt, or for all."""
    cases: dict[str, RlCase] = {}

    def add(
        name: str, do: str, failed: int = 0, *, words: list[str] = OF_USER, says: str = "", prompt: str = PROMPT,
        once: str = "", megabytes: int = 0, phase: str = "",
    ) -> None:  # fmt: skip
        phase = phase or ("reward" if words is OF_USER else "start" if prompt else "step")
        part = "reward" if words is OF_USER else "agent" if words is AGENT else "environment"
        when = OF_PHASE[f"agent {phase}" if words is AGENT else phase]
        cases[f"{part} {name}"] = RlCase(
            fault=RlFault(who="user", do=do, phase=phase, prompt=prompt, once=once), status=0, words=words,
            when=f"{when}, {'step 2' if prompt else 'always'}", failed=failed, says=[says], saved=3,
            lost=SAMPLES[failed] if failed else ALL, megabytes=megabytes, resumes=False,
        )  # fmt: skip

    add("process is killed once", "kill", once="once")
    for name, do, says in USER_FAULTS:
        add(name, do, 3, says=f"reward   reward failed for sample .*{says}")
    add("uses up memory, and the kernel kills it", "fill memory", 3, says="was ended by signal 9", megabytes=900)
    killed = "reward uses up memory, and the kernel kills it"  # after it has looked for pages to take back, for seconds
    cases[killed] = replace(cases[killed], words=[*OF_USER, "rl.reward_timeout=30"])
    add("prints megabytes", "print megabytes")
    for name, do, says in ENVIRONMENT_FAULTS:
        add(name, do, 3, words=ENVIRONMENT, says=f"reward   environment failed for sample .*{says}")
    for name, do, phase, says in AGENT_FAULTS:
        says = f"reward   agent failed for sample .*fault_user_code:agent{says}"
        add(name, do, 3, words=AGENT, phase=phase, says=says)
    for name, do, says in REPLIES:  # the one sample that ends by itself is shown to the environment
        says = f"reward   environment failed for sample .*FaultyEnvironment.step:? {says}"
        add(name, do, 1, words=ENVIRONMENT, prompt="", says=says)
    return cases


USER_FAULTS = (
    ("process is killed", "kill", "was ended by signal 9"),
    ("process is stopped", "stop", "gave no answer within 2 seconds"),
    ("hangs", "sleep", "gave no answer within 2 seconds"),
    ("hangs with Python's lock held", "hold the lock", "gave no answer within 2 seconds"),
    ("raises", "raise", "RuntimeError: boom"),
    ("ends by os._exit", "exit", "ended with status 7"),
    ("ends by sys.exit", "sys.exit", "SystemExit: 7"),
    ("crashes in native code", "crash", "was ended by signal 11"),
    ("raises MemoryError", "memory", "MemoryError"),
    ("returns NaN", "nan", "returned nan"),
    ("returns infinity", "infinity", "returned inf"),
    ("returns one number for all", "a number", "returned float, not a list of"),
    ("returns words", "words", "returned 'good', which is not a number"),
)
ENVIRONMENT_FAULTS = (
    ("process is killed", "kill", "FaultyEnvironment.start: its process was ended by signal 9"),
    ("process is stopped", "stop", "FaultyEnvironment.start took more than 2 seconds"),
    ("hangs", "sleep", "FaultyEnvironment.start took more than 2 seconds"),
    ("raises", "raise", "FaultyEnvironment.start: RuntimeError: boom"),
    ("ends by os._exit", "exit", "FaultyEnvironment.start: its process ended with status 7"),
    ("crashes in native code", "crash", "FaultyEnvironment.start: its process was ended by signal 11"),
    ("raises MemoryError", "memory", "FaultyEnvironment.start: MemoryError"),
)
AGENT_FAULTS = (
    ("process is killed before its first call", "kill", "start", ": its process was ended by signal 9"),
    ("process is killed after an answer", "kill", "step", ": its process was ended by signal 9"),
    ("process is stopped before its first call", "stop", "start", " took more than 2 seconds"),
    ("process is stopped after an answer", "stop", "step", " took more than 2 seconds"),
    ("hangs after an answer", "sleep", "step", " took more than 2 seconds"),
    ("raises after an answer", "raise", "step", ": RuntimeError: boom"),
    ("ends by os._exit before its first call", "exit", "start", ": its process ended with status 7"),
    ("returns NaN", "nan", "step", ": ValueError: gave the reward nan"),
    ("returns words", "words", "step", ": TypeError: gave 'good' for a reward"),
)
REPLIES = (
    ("process is killed in a step", "kill", "its process was ended by signal 9"),
    ("process is stopped in a step", "stop", "took more than 2 seconds"),
    ("hangs in a step", "sleep", "took more than 2 seconds"),
    ("ends by os._exit in a step", "exit", "its process ended with status 7"),
    ("returns NaN", "nan", "ValueError: `reward` of a Reply is nan"),
    ("returns words", "words", "ValueError: could not convert string to float"),
)
ALWAYS = {
    "reward returns another number of values": RlCase(
        fault=RlFault(who="user", do="too few", phase="reward"), when="computing rewards, step 1", status=2,
        words=OF_USER,
        says=[r"error: rl\.reward: reward returned 2 values for 3 completions"], saved=0,
    ),
    "reward raises for all samples": RlCase(
        fault=RlFault(who="user", do="raise", phase="reward"), when="computing rewards, step 1", status=2,
        words=OF_USER,
        says=[r"error: rl\.reward: reward failed for all 6 samples"], saved=0,
    ),
    "reward hangs for all samples": RlCase(
        fault=RlFault(who="user", do="sleep", phase="reward"), when="computing rewards, step 1", status=2,
        words=OF_USER,
        says=[r"error: rl\.reward: reward failed for every one", "gave no answer within 2 seconds"], saved=0,
    ),
    "reward returns None for all samples": RlCase(
        fault=RlFault(who="user", do="none", phase="reward"), when="in every step", status=2, saved=1,
        lost="steps without a checkpoint",
        words=[*OF_USER, "train.max_nonfinite=2"], says=["error: 2 rollout steps in a row had no sample to train"],
    ),
    "all rewards are always equal": RlCase(
        fault=RlFault(who="user", do="all alike", phase="reward"), when="in every step", status=2,
        words=OF_USER, saved=3,
        says=["warning  3 rollout steps in a row had no training signal", "error: the run had no training signal"],
        lost="nothing: all steps were finished", resumes=False,
    ),
    "environment raises for all samples": RlCase(
        fault=RlFault(who="user", do="raise", phase="start"), when="starting an environment, step 1", status=2,
        words=ENVIRONMENT,
        says=[r"error: rl\.environment failed for all 6 samples"], saved=0,
    ),
    "fork server of environments is killed": RlCase(
        fault=RlFault(who="user", do="kill the parent", phase="step", once="once"), words=ENVIRONMENT, status=0,
        when="a step of an environment, step 1", failed=None, saved=3, resumes=False,
        lost="the current conversations",
        # Only the first three of a rollout's failures are printed, in the order in which they are noticed.
        says=[
            r"FaultyEnvironment\.(start|step): its process ended with its parent process, which was killed or stopped"
        ],
    ),
    "fork server of environments is stopped": RlCase(
        fault=RlFault(who="user", do="stop the parent", phase="step", once="once"), words=ENVIRONMENT, status=0,
        when="a step of an environment, step 1", saved=3, resumes=False, lost=ALL,
    ),
}  # fmt: skip

RL_CASES = (
    trainers()
    | engines()
    | stages()
    | read_models()
    | critics()
    | controllers()
    | parts_of_ray()
    | raising()
    | OTHERS
    | users()
    | ALWAYS
)
