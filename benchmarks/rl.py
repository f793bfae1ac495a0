"""Reinforcement learning side by side: weft, a bare PyTorch GRPO loop and TRL's GRPOTrainer, on the same task.

    make bench-rl                                   # sets up .venv-trl, then runs this
    python benchmarks/rl.py --case short --runs 1 --skip trl

The model of `make demo` (a 0.8M-parameter Qwen3, fp32, CPU, one thread), 32 prompts x 8 samples, in the same order, one
optimizer step per rollout step; completions of (i) 4 tokens, all of them, and (ii) uneven length, up to 256 tokens: as
many as the model itself makes them, with weights that are the same for all (rl_inputs.py). Every contestant samples,
rewards, updates, and gives the new weights to what samples. weft runs twice in its own process without Ray, with
`rl.old_logprobs` rollout and recompute, the default (all take the current policy for the old one, which it is where a
rollout step is one optimizer step), and once as `weft rl`, whose steps are timed by the lines of its metrics.jsonl. The
reward is weft's built-in `length`; in (i) all samples are equal and gradients zero, which takes no less time. The
learning rate is so small that lengths do not drift.

Each contestant runs once in every round, in a process of its own, and the order turns. Tables give medians over the
rounds of the mean timed step (of (ii) per sampled token, too, since lengths differ); a ratio is the median of the
rounds' own, of seconds in (i), and of seconds per sampled token in (ii).

At last engines of their own, one core each: cluster.max_staleness=1 beside 0, and the embedded engine on two ranks.
`--quiet 0.05` waits for idle cores, and repeats a run during which others took more than this share of them, but for
runs of the real command: what Ray starts cannot be told from what others do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl_inputs
from sft import FOLDER, TRL_PYTHON, Answer, Round, Spec, Watch, log, machine

PROMPTS, GROUP, LR, TARGET = 32, 8, 1e-6, 100


@dataclass(frozen=True)
class RolloutCase:
    """rows: samples of one forward and backward of those who pad; weft is given about as many tokens."""

    title: str
    max_new_tokens: int
    rows: int
    warmup: int
    timed: int


CASES = {
    "short": RolloutCase("(i) 4 tokens", 4, rows=256, warmup=3, timed=20),
    "uneven": RolloutCase("(ii) uneven lengths up to 256", 256, rows=32, warmup=1, timed=4),
}


@dataclass(frozen=True)
class RlContestant:
    """role: what rl_run.py or rl_trl.py is told; `command`: the real one. keys: further ones of the command."""

    name: str
    role: str
    keys: tuple[str, ...] = ()
    ranks: int = 1

    def run(self, spec: Spec, scratch: Path) -> Answer:
        """What it says, and how busy others were."""
        watch = Watch()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"PYTHONPATH": str(FOLDER.parent)}
        if self.role == "command":
            answer = self._command(spec, environment)
        else:
            path = scratch / "spec.json"
            path.write_text(json.dumps(spec))
            python, script = (TRL_PYTHON, "rl_trl.py") if self.role == "trl" else (sys.executable, "rl_run.py")
            words = [str(python), str(FOLDER / script), self.role, str(path)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
            if done.returncode or not lines:
                sys.exit(f"{self.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            answer = json.loads(lines[-1])
        # Ray's processes are not this one's children, and would count as others.
        return answer | {"others": None if self.role == "command" else watch.others()}

    def _command(self, spec: Spec, environment: dict[str, str]) -> Answer:
        """A step ends when its line is in metrics.jsonl; the first has no beginning, and counts as none."""
        with tempfile.TemporaryDirectory() as out:
            words = [sys.executable, "-m", "weft", "rl", *spec["keys"], f"run.dir={out}/run", *self.keys]
            words += ["--device", "cpu", "--nproc", str(self.ranks)]
            with open(Path(out) / "log", "w+") as log_file:
                process = subprocess.Popen(words, env=environment, stdout=log_file, stderr=subprocess.STDOUT)
                ends = list(arrivals(process, Path(out) / "run" / "metrics.jsonl"))
                log_file.seek(0)
                if process.returncode:
                    sys.exit(f"{self.name} failed:\n{log_file.read()[-4000:]}")
            lines = [json.loads(line) for line in (Path(out) / "run" / "metrics.jsonl").read_text().splitlines()]
        prefix, key = "seconds/", "completions/mean_length"
        return {
            "seconds": [0.0] + [after - before for before, after in pairwise(ends)],
            "phases": [{k.removeprefix(prefix): v for k, v in line.items() if k.startswith(prefix)} for line in lines],
            "lengths": [n for line in lines if (n := line.get(key)) is not None for _ in range(spec["samples"])],
        }


def arrivals(process: subprocess.Popen[bytes], path: Path) -> Iterator[float]:
    """When each line of a file was there, until the process has ended."""
    line_count, alive = 0, True
    while alive:
        alive = process.poll() is None
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        yield from [time.perf_counter()] * (lines - line_count)
        line_count = lines
        time.sleep(0.005)


CONTESTANTS = [
    RlContestant("weft, old logprobs from the rollout", "weft-rollout"),
    RlContestant("weft, as it is by default", "weft-recompute"),
    RlContestant("bare loop", "bare"),
    RlContestant("TRL", "trl"),
    RlContestant("`weft rl`", "command"),
]
OWN_CORE = ("rollout.engine=hf",)
ASYNCHRONOUS = [
    RlContestant("in turns, an engine of its own", "command", (*OWN_CORE, "cluster.max_staleness=0")),
    RlContestant("asynchronous, an engine of its own", "command", (*OWN_CORE, "cluster.max_staleness=1")),
    RlContestant("embedded, two ranks", "command", ranks=2),
]


# ---------------------------------------------------------------- the work


def make_spec(case: RolloutCase, folder: Path, options: argparse.Namespace, epochs: int = 1) -> Spec:
    """What every contestant is told."""
    steps = case.warmup + (options.steps or case.timed)
    rows = (folder / "additions.jsonl").read_text().splitlines()
    texts = [json.loads(row)["prompt"] for row in rows]
    keys = [
        f"model.path={folder / 'adder'}", f"data.path={folder / 'additions.jsonl'}", "data.shuffle=false",
        f"rl.prompts_per_step={options.prompts}", f"rl.group_size={GROUP}", "rl.reward=[length]",
        f"rl.reward_options={{length.target: {TARGET}}}", f"rl.epochs={epochs}", "rollout.max_prompt_tokens=6",
        f"rollout.max_new_tokens={case.max_new_tokens}", "step.max_tokens_per_device=4096", f"optimizer.lr={LR}",
        "optimizer.weight_decay=0", "schedule.name=constant", "schedule.warmup_steps=0",
        f"train.steps={steps * epochs}", "checkpoint.every=0",
    ]  # fmt: skip
    samples = options.prompts * GROUP
    return {
        "model": str(folder / "adder"), "problems": texts[: steps * options.prompts], "keys": keys, "steps": steps,
        "prompts": options.prompts, "group": GROUP, "samples": samples, "rows": min(case.rows, samples), "lr": LR,
        "max_new_tokens": case.max_new_tokens, "target": TARGET, "warmup": case.warmup, "epochs": epochs,
    }  # fmt: skip


def run_rounds(
    contestants: Sequence[RlContestant], spec: Spec, scratch: Path, runs: int, quiet: float | None
) -> list[Round]:
    rounds = []
    for number in range(runs):
        offset = number % len(contestants)
        answers: Round = {}
        for contestant in [*contestants[offset:], *contestants[:offset]]:
            answer = condense(undisturbed(contestant, spec, scratch, quiet), spec)
            answers[contestant.name] = answer
            log(f"round {number + 1}: {contestant.name}: {answer['step']:.3f} s, others {answer['others'] or 0.0:.0%}")
        rounds.append(answers)
    return rounds


def undisturbed(contestant: RlContestant, spec: Spec, scratch: Path, quiet: float | None) -> Answer:
    """Runs it, again and again as long as others take more than `quiet` of the cores meanwhile."""
    while True:
        while quiet is not None and Watch().wait(2.0).others() > quiet:
            time.sleep(10)
        answer = contestant.run(spec, scratch)
        if quiet is None or contestant.role == "command" or answer["others"] <= quiet:
            return answer
        log(f"{contestant.name}: others took {answer['others']:.0%} of the cores, once more")


def condense(answer: Answer, spec: Spec) -> Answer:
    """Means of the timed steps: step and phases in seconds; seconds per 1000 sampled tokens; the lengths. Of several
    epochs every line but the last of a rollout step says how long it took alone."""
    epochs = spec["epochs"] if len(answer["seconds"]) > spec["steps"] else 1
    seconds = [sum(answer["seconds"][i : i + epochs]) for i in range(0, len(answer["seconds"]), epochs)]
    seconds, phases = seconds[spec["warmup"] :], answer["phases"][epochs - 1 :: epochs][spec["warmup"] :]
    lengths = answer["lengths"][spec["warmup"] * spec["samples"] :]
    return {
        "step": statistics.mean(seconds),
        "per_token": 1000 * sum(seconds) / sum(lengths),
        "phases": {name: sum(p.get(name, 0.0) for p in phases) / len(phases) for name in phases[-1]},
        "lengths": lengths,
        "others": answer["others"],
    }


# ---------------------------------------------------------------- the tables


def step_table(contestants: Sequence[RlContestant], rounds: list[Round], figure: str) -> Iterator[str]:
    """by: what ratios are of."""
    yield "| run | s / step | lowest - highest | s / 1000 tokens | x bare loop | x TRL |"
    yield "|---|---|---|---|---|---|"
    for contestant in contestants:
        steps = [answers[contestant.name]["step"] for answers in rounds]
        tokens = middle(answers[contestant.name]["per_token"] for answers in rounds)
        bare, trl = (ratio(rounds, contestant.name, baseline, figure) for baseline in ("bare loop", "TRL"))
        span = f"{min(steps):.3f} - {max(steps):.3f}"
        yield f"| {contestant.name} | {statistics.median(steps):.3f} | {span} | {tokens:.3f} | {bare} | {trl} |"


def phase_table(contestants: Sequence[RlContestant], rounds: list[Round]) -> Iterator[str]:
    """Seconds of each phase of a step. What is in none of them is `unexplained`."""
    names = ("generate", "reward", "logprobs", "other", "train", "sync")
    yield "| seconds of | " + " | ".join(names) + " | rest |"
    yield "|---|" + "---|" * (len(names) + 1)
    for contestant in contestants:
        contestant_answers = [answers[contestant.name] for answers in rounds]
        cells = [middle(f["phases"].get(name, 0.0) for f in contestant_answers) for name in names]
        unexplained = middle(f["step"] - sum(f["phases"].values()) for f in contestant_answers)
        yield f"| {contestant.name} | " + " | ".join(f"{cell:.3f}" for cell in [*cells, unexplained]) + " |"


def length_table(contestants: Sequence[RlContestant], rounds: list[Round]) -> Iterator[str]:
    """Of all completions of all rounds; the command says only their means."""
    yield "| sampled tokens | mean | 10% are below | 90% | under 16 | cut |"
    yield "|---|---|---|---|---|---|"
    for contestant in contestants:
        lengths = sorted(n for answers in rounds for n in answers[contestant.name]["lengths"])
        mean = f"| {contestant.name} | {statistics.mean(lengths):.1f} |"
        if contestant.role == "command":
            yield f"{mean} | | | |"
            continue
        low, high = lengths[len(lengths) // 10], lengths[len(lengths) * 9 // 10]
        short, cut = (
            sum(flags) / len(lengths) for flags in ([n < 16 for n in lengths], [n == lengths[-1] for n in lengths])
        )
        yield f"{mean} {low:.0f} | {high:.0f} | {short:.1%} | {cut:.1%} |"


def asynchronous_lines(rounds: list[Round]) -> Iterator[str]:
    """How much sooner a step is over, and what the phases of the synchronous run allow."""
    turns, ahead, colocated_name = (contestant.name for contestant in ASYNCHRONOUS)
    phases = {name: middle(answers[turns]["phases"].get(name, 0.0) for answers in rounds) for name in PARTS}
    generate, train = phases["generate"] + phases["reward"], phases["logprobs"] + phases["train"]
    bound = (generate + train + phases["sync"]) / (max(generate, train) + phases["sync"])
    gain, colocated = (
        middle(a[turns]["per_token"] / a[baseline]["per_token"] for a in rounds) for baseline in (ahead, colocated_name)
    )
    yield (
        f"In turns, {generate / (generate + train):.0%} of the time is generation and rewards, the rest training; a "
        f"sync takes {phases['sync']:.3f} s. The bound is therefore {bound:.2f} x; asynchronous: {gain:.2f} x, "
        f"{gain / bound:.0%} of the bound. Embedded on two ranks, in turns: {colocated:.2f} x."
    )


PARTS = ("generate", "reward", "logprobs", "train", "sync")


def ratio(rounds: list[Round], contestant: str, baseline: str, figure: str) -> str:
    if baseline not in rounds[0]:
        return "not run"
    return f"{middle(answers[contestant][figure] / answers[baseline][figure] for answers in rounds):.2f}"


def middle(values: Iterator[float]) -> float:
    return statistics.median(list(values))


# ---------------------------------------------------------------- the report


def report(options: argparse.Namespace, contestants: list[RlContestant], scratch: Path) -> Iterator[str]:
    yield f"- `python benchmarks/rl.py {' '.join(sys.argv[1:])}`".rstrip(" `") + "`"
    yield from machine()
    for key in options.case:
        case = CASES[key]
        spec = make_spec(case, scratch, options)
        rounds = run_rounds(contestants, spec, scratch, options.runs, options.quiet)
        yield from heading(case.title, spec, rounds)
        yield from step_table(contestants, rounds, figure="step" if key == "short" else "per_token")
        yield ""
        yield from phase_table(contestants, rounds)
        if key == "uneven":
            yield ""
            yield from length_table(contestants, rounds)
    if not options.no_async:
        spec = make_spec(CASES["uneven"], scratch, options, options.epochs)
        rounds = run_rounds(ASYNCHRONOUS, spec, scratch, options.runs, options.quiet)
        yield from heading(f"Asynchronous, lengths as in (ii), rl.epochs={options.epochs}", spec, rounds)
        yield from step_table(ASYNCHRONOUS, rounds, figure="per_token")
        yield ""
        yield from phase_table(ASYNCHRONOUS, rounds)
        yield ""
        yield from asynchronous_lines(rounds)


def heading(title: str, spec: Spec, rounds: list[Round]) -> Iterator[str]:
    other_shares = [
        answer["others"] for answers in rounds for answer in answers.values() if answer["others"] is not None
    ]
    timed = spec["steps"] - spec["warmup"]
    yield f"\n## {title}\n"
    shares = (
        f"{statistics.median(other_shares):.0%} of the cores, at most {max(other_shares):.0%}"
        if other_shares
        else "an unknown share"
    )
    yield (
        f"{spec['prompts']} prompts x {GROUP}: {timed} steps timed after {spec['warmup']} to warm up, {len(rounds)} "
        f"rounds. Other programs took {shares} (of runs of the real command it is not known).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="timed steps of a run, in place of each case's own")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step")
    parser.add_argument("--skip", nargs="*", default=[], choices=[c.role for c in CONTESTANTS])
    parser.add_argument("--epochs", type=int, default=1, help="of the asynchronous part: more make training longer")
    parser.add_argument("--no-async", action="store_true", help="leave out the asynchronous part")
    parser.add_argument("--quiet", type=float, metavar="SHARE", help="wait for, and insist on, cores that are idle")
    options = parser.parse_args()
    contestants = [c for c in CONTESTANTS if c.role not in options.skip]
    if not TRL_PYTHON.exists():
        log("no .venv-trl, so TRL is left out: `make bench-rl` sets it up")
        contestants = [c for c in contestants if c.role != "trl"]
    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.redirect_stdout(sys.stderr):
            rl_inputs.make(Path(scratch))
        for line in report(options, contestants, Path(scratch)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
