"""Supervised fine-tuning side by side: weft, a bare PyTorch loop and TRL's SFTTrainer, on the same text and model.

    make bench-sft                                  # sets up .venv-trl, then runs this; about 40 minutes on two cores
    python benchmarks/sft.py --data chat --runs 1 --skip trl

A 5.2M-parameter Qwen3 in fp32 on the CPU, on (i) short chats and (ii) documents of log-normal length (inputs.py). In
every round each contestant runs once, in a process of its own (or two ranks of one thread each), and the order turns
from round to round. Only training steps are timed: no loading, no tokenising, no warm-up. The bare loop trains full
rows of 1024 whose documents see one another; weft and TRL keep documents apart. Tables give medians over the rounds;
a ratio is the median of the rounds' own ratios, because a shared machine changes its pace from minute to minute.

On a machine that others use, `--quiet 0.05` waits for idle cores before each run, and repeats a run during which
others took more than this share of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import inputs

from weft.data.documents import load_documents
from weft.data.encode import load_tokenizer
from weft.data.order import StepSampler
from weft.engine.batch.document import Document
from weft.launch.machine import processor_name

FOLDER = Path(__file__).resolve().parent
TRL_PYTHON = FOLDER.parent / ".venv-trl" / "bin" / "python"
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "clip": 1.0}
CHECK_TOKENS, CHECK_STEPS = 4096, 3

Spec = dict[str, Any]
Answer = dict[str, Any]
Round = dict[str, Answer]


@dataclass(frozen=True)
class Data:
    """A data set and how it is stepped over. rows: of the bare loop, 1024 tokens each, in a step and in a forward."""

    title: str
    file: str
    tokens: int
    warmup: int
    timed: int
    rows: tuple[int, int]
    trl: dict[str, Any]


# TRL joins the rows of a forward into one. It cuts documents longer than a row, so that long ones need a row of 4096,
# and a step more than one forward.
DATA = {
    "chat": Data(
        "(i) short chats", "chat.jsonl", tokens=4096, warmup=2, timed=8, rows=(4, 4),
        trl={"row": 1024, "rows_per_forward": 4, "accumulation": 1, "ranks_share": "rows_per_forward"},
    ),
    "lognormal": Data(
        "(ii) log-normal lengths", "lognormal.jsonl", tokens=16384, warmup=1, timed=3, rows=(16, 4),
        trl={"row": 4096, "rows_per_forward": 1, "accumulation": 4, "ranks_share": "accumulation"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """program: which script, and in which role. ranks: 1 has two threads, 2 have one each."""

    name: str
    program: tuple[str, str]
    ranks: int

    @property
    def library(self) -> str:
        return self.program[1]

    def command(self) -> list[str]:
        script, role = self.program
        python = str(TRL_PYTHON) if role in ("trl", "check") else sys.executable
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if self.ranks == 2 else []
        return [python, *launch, str(FOLDER / script), role]

    def run(self, spec: Path) -> Answer:
        """What it printed."""
        environment = os.environ | {"OMP_NUM_THREADS": str(2 // self.ranks), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.ranks == 2:
            environment |= ACCELERATE
        done = subprocess.run([*self.command(), str(spec)], env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"tokens"')]
        if done.returncode or not lines:
            sys.exit(f"{self.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        answer: Answer = json.loads(lines[-1])
        return answer


# What `accelerate launch --use_fsdp --fsdp_version 2` sets for its ranks.
ACCELERATE = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
CONTESTANTS = [
    Contestant("weft, 1 process", ("sft_run.py", "weft"), 1),
    Contestant("bare loop, 1 process", ("sft_run.py", "bare"), 1),
    Contestant("TRL, 1 process", ("sft_trl.py", "trl"), 1),
    Contestant("weft, 2 ranks", ("sft_run.py", "weft"), 2),
    Contestant("bare FSDP2 loop, 2 ranks", ("sft_run.py", "bare"), 2),
    Contestant("TRL, accelerate FSDP2, 2 ranks", ("sft_trl.py", "trl"), 2),
]


# ---------------------------------------------------------------- the work


def make_spec(data: Data, folder: Path) -> Spec:
    """The model, the documents of all steps, and who takes them how."""
    model = str(folder / "model")
    documents, _ = load_documents(str(folder / data.file), load_tokenizer(model), max_length=inputs.LONGEST)
    lengths = [len(document) for document in documents]
    count = data.warmup + data.timed
    steps = [
        step.documents for step in StepSampler(lengths, documents=None, tokens=data.tokens, epochs=None, steps=count)
    ]
    return {
        "model": model,
        "optimizer": OPTIMIZER,
        "weft": {"documents": None, "tokens": data.tokens},
        "bare": {"row": 1024, "rows_per_step": data.rows[0], "rows_per_forward": data.rows[1]},
        "trl": data.trl,
        **chosen(documents, steps),
    }


def chosen(documents: list[Document], steps: list[list[int]]) -> Spec:
    """The documents of these steps alone, numbered anew."""
    used = {index: position for position, index in enumerate(dict.fromkeys(i for step in steps for i in step))}
    listed = [{"ids": documents[i].tokens.tolist(), "trained": documents[i].weights.int().tolist()} for i in used]
    return {"documents": listed, "steps": [[used[i] for i in step] for step in steps]}


def check_spec(spec: Spec) -> Spec:
    """One row of the first step's documents, on which every step is taken."""
    documents, total = [], 0
    for index in spec["steps"][0]:
        document = spec["documents"][index]
        if total + len(document["ids"]) <= CHECK_TOKENS:
            documents.append(document)
            total += len(document["ids"])
    # The bare loop then has all documents in one row.
    bare = {"row": total, "rows_per_step": 1, "rows_per_forward": 1}
    return spec | {"documents": documents, "steps": [list(range(len(documents)))] * CHECK_STEPS, "bare": bare}


# ---------------------------------------------------------------- the tables


def run_rounds(
    contestants: list[Contestant], spec: Path, runs: int, warmup: int, quiet: float | None
) -> Iterator[Round]:
    for number in range(runs):
        turned = contestants[number % len(contestants) :] + contestants[: number % len(contestants)]
        answers: Round = {}
        for contestant in turned:
            answer = undisturbed(contestant, spec, quiet)
            answer["rate"] = sum(answer["tokens"][warmup:]) / sum(answer["seconds"][warmup:])
            answers[contestant.name] = answer
            log(f"round {number + 1}: {contestant.name}: {answer['rate']:.0f} tokens/s, others {answer['others']:.0%}")
        yield answers


def undisturbed(contestant: Contestant, spec: Path, quiet: float | None) -> Answer:
    """Runs it, again and again as long as others take more than `quiet` of the cores meanwhile."""
    while True:
        while quiet is not None and Watch().wait(2.0).others() > quiet:
            time.sleep(10)
        watch = Watch()
        answer = contestant.run(spec)
        answer["others"] = watch.others()
        if quiet is None or answer["others"] <= quiet:
            return answer
        log(f"{contestant.name}: others took {answer['others']:.0%} of the cores, once more")


class Watch:
    """What others do on this machine from now on."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = self._now()

    def wait(self, seconds: float) -> Watch:
        time.sleep(seconds)
        return self

    def others(self) -> float:
        """Share of the cores that neither this process and its children used, nor nobody."""
        now, busy, own_seconds = self._now()
        return max(0.0, (busy - self.busy) - (own_seconds - self.own)) / ((now - self.began) * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(time, seconds of processor time of all, of this process with its children that have ended)."""
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = (int(x) / os.sysconf("SC_CLK_TCK") for x in fields)
        process_times = os.times()
        return time.perf_counter(), user + nice + system + irq + softirq + steal, sum(process_times[:4])


def log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def speed_table(contestants: list[Contestant], rounds: list[Round]) -> Iterator[str]:
    yield "| run | tokens/s | lowest - highest | x bare loop, 1 process | x TRL, as many ranks |"
    yield "|---|---|---|---|---|"
    for contestant in contestants:
        rates = [answers[contestant.name]["rate"] for answers in rounds]
        bare = ratio(rounds, contestant, find(contestants, "bare", 1))
        trl = ratio(rounds, contestant, find(contestants, "trl", contestant.ranks))
        span = f"{min(rates):.0f} - {max(rates):.0f}"
        yield f"| {contestant.name} | {statistics.median(rates):.0f} | {span} | {bare} | {trl} |"


def find(contestants: list[Contestant], library: str, ranks: int) -> Contestant | None:
    return next((c for c in contestants if c.library == library and c.ranks == ranks), None)


def ratio(rounds: list[Round], contestant: Contestant, baseline: Contestant | None) -> str:
    if baseline is None:
        return "not run"
    return f"{statistics.median(r[contestant.name]['rate'] / r[baseline.name]['rate'] for r in rounds):.2f}"


def loss_table(spec: Path, with_trl: bool) -> Iterator[str]:
    """Losses of steps on the same documents; raises where weft's and TRL's first differ by more than 1e-3."""
    runs = {
        "weft": Contestant("weft", ("sft_run.py", "weft"), 1),
        "TRL": Contestant("TRL", ("sft_trl.py", "check"), 1),
        "bare loop, documents see one another": Contestant("bare", ("sft_run.py", "bare"), 1),
    }
    losses = {name: c.run(spec)["losses"] for name, c in runs.items() if with_trl or name != "TRL"}
    yield "| loss of step | " + " | ".join(str(k + 1) for k in range(CHECK_STEPS)) + " |"
    yield "|---|" + "---|" * CHECK_STEPS
    for name, values in losses.items():
        yield f"| {name} | " + " | ".join(f"{value:.6f}" for value in values) + " |"
    if with_trl:
        assert abs(losses["weft"][0] - losses["TRL"][0]) <= 1e-3, losses


def floor_line(spec: Spec, rounds: list[Round]) -> Iterator[str]:
    """What weft's steps would take if they were nothing but matrix products at this machine's rate."""
    answers = [answers["weft, 1 process"] for answers in rounds if "weft, 1 process" in answers]
    if not answers:
        return
    per_token = sum(answers[0]["flops"]) / sum(answers[0]["tokens"])
    peak = max(answer["matmul"] for answer in answers)
    share = statistics.median(a["rate"] * per_token / a["matmul"] for a in answers)
    yield (
        f"Floor: {per_token / 1e6:.1f} MFLOP a token (causal half of attention, the head for every token) at "
        f"{peak / 1e9:.0f} GFLOP/s, the best rate of torch's products of this model's shapes with two threads: "
        f"{peak / per_token:.0f} tokens/s. weft in one process works at {share:.0%} of the rate measured beside it."
    )


# ---------------------------------------------------------------- the report


def machine() -> Iterator[str]:
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers"))
    processor = f"{processor_name()}, {os.cpu_count()} cores"
    yield f"- {date.today()}, {processor}; Python {platform.python_version()}, {versions}"
    if TRL_PYTHON.exists():
        code = "import importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in "
        code += "('trl', 'accelerate', 'torch', 'transformers')), sep=', ')"
        yield f"- TRL's environment: {subprocess.check_output([TRL_PYTHON, '-c', code], text=True).strip()}"


def report(options: argparse.Namespace, contestants: list[Contestant], scratch: Path) -> Iterator[str]:
    yield f"- `python benchmarks/sft.py {' '.join(sys.argv[1:])}`".rstrip(" `") + "`"
    yield from machine()
    for key in options.data:
        data, path = DATA[key], scratch / f"{key}.json"
        spec = make_spec(data, scratch)
        path.write_text(json.dumps(spec))
        rounds = list(run_rounds(contestants, path, options.runs, data.warmup, options.quiet))
        other_shares = [answer["others"] for answers in rounds for answer in answers.values()]
        count, total = len(spec["documents"]), sum(len(d["ids"]) for d in spec["documents"])
        yield f"\n## {data.title}\n"
        shares = (
            f"{statistics.median(other_shares):.0%} of the cores (median of the runs; at most {max(other_shares):.0%})"
        )
        yield (
            f"{count} documents, {total / count:.0f} tokens each, in steps of {data.tokens} tokens: {data.timed} timed "
            f"after {data.warmup} to warm up, {len(rounds)} rounds. Other programs took {shares}.\n"
        )
        yield from speed_table(contestants, rounds)
        yield ""
        yield from floor_line(spec, rounds)
        if not options.no_losses:
            log("losses")
            path.write_text(json.dumps(check_spec(spec)))
            yield ""
            yield from loss_table(path, with_trl=any(c.library == "trl" for c in contestants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], choices=["weft", "bare", "trl"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--quiet", type=float, metavar="SHARE", help="wait for, and insist on, cores that are idle")
    parser.add_argument("--no-losses", action="store_true", help="leave out the comparison of losses")
    options = parser.parse_args()
    contestants = [c for c in CONTESTANTS if c.library not in options.skip and c.ranks in options.ranks]
    if not TRL_PYTHON.exists():
        log("no .venv-trl, so TRL is left out: `make bench-sft` sets it up")
        contestants = [c for c in contestants if c.library != "trl"]
    with tempfile.TemporaryDirectory() as scratch:
        with contextlib.redirect_stdout(sys.stderr):
            inputs.make(Path(scratch))
        for line in report(options, contestants, Path(scratch)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
