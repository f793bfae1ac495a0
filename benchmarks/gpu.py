"""One command for the minutes that a GPU is at hand: does a run work, how fast is it, which tests pass; as a page.

    python benchmarks/gpu.py --minutes 9 --out .gpu                       # make gpu
    python benchmarks/gpu.py --parts sft-4b profile --minutes 4           # some of it
    python benchmarks/gpu.py --tiny --device cpu --minutes 5              # all of it, on sizes of a test

Writes DIR/gpu.md and gpu.json anew after every row, so that an end at any moment loses nothing; beside them gpu.log
(what the parts print), run.txt, tests.txt, profile-*.txt with their traces, clocks.txt, and measured/CARD.json, the
constants of this card, which take the place of assumptions of `weft plan` in weft/recipes/plan/measured. Parts come in
the order of what they tell, each with the seconds that it is planned to take: with fewer minutes than for all, the
first ones run. All run in one process, because importing torch takes 10 s; a part that hangs or breaks the device ends
that process, and the next part begins a new one. Warnings are listed in the page. Exit status 1 where a part has
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_POLL = 0.2  # seconds between looks at a part's rows
_MIN_SECONDS = 8.0  # seconds below which no part is begun
_GRACE = 10.0  # seconds that a part may take beyond its time to end by itself
START = 15  # seconds planned for importing and the device's context, once
_CLOCKS = "driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


@dataclass(frozen=True)
class Part:
    """seconds: that it is planned to take on one H100 with 16 cores. accelerators: fewer than these, and there is no
    such part."""

    name: str
    seconds: float
    title: str
    about: str
    accelerators: int = 1


_SFT = (
    "Random weights; one packed row of log-normal documents a step; bf16 compute over fp32 masters, AdamW; adapters of "
    "rank 16 on a frozen base in bf16 for 30B-A3B. bare: a plain PyTorch loop with the same attention kernel and a "
    "chunked, checkpointed cross entropy (benchmarks/gpu_sft.py says what it does); both have as many layers as both "
    "have memory for. MFU is of the measured matmul rate, causal attention counted half, recomputation not at all. "
    "first step: with compilation. GiB: the most at once; fragments: reserved, but not allocated, at most. planner: "
    "weights, gradients, optimizer and gathered units, as weft's planner says; estimate: with activations and the head."
)
PARTS = (
    Part("run", 50, "A run of weft sft", "Eight layers of Qwen3-0.6B with 32,768 tokens and random weights, from a "
         "config: 25 steps with a checkpoint after 20, then the last 5 again from it. Output in run.txt."),
    Part("two", 75, "Two devices", "A step on two ranks beside one rank's: relative differences of loss and gradient "
         "norm in fp32, and tokens/s in bf16, with small models.", accelerators=2),
    Part("rates", 15, "Rates", "bf16 products of random matrices, copies, and what the host pays: the floor of all "
         "that follows."),
    Part("profile", 30, "Profiles", "A step of 0.6B that is too short for the device; 0.6B without recomputation and "
         "4B with it: two steps by kind of work, and the gaps of the device of a third, with the frame of the host in "
         "them. By kernel in profile-*.txt; the traces are beside them."),
    Part("sft-4b", 110, "SFT, Qwen3-4B", _SFT),
    Part("sft-30b", 80, "SFT of adapters, Qwen3-30B-A3B", _SFT),
    Part("sft-0.6b", 25, "SFT, Qwen3-0.6B", _SFT),
    Part("tests", 100, "tests/cuda", "Flex attention, which is compiled, comes last. Output in tests.txt."),
    Part("head", 15, "The head", "Logprobs of 8192 tokens, H 2560, V 151,936, bf16, forward and backward. matmul "
         "share: three products at the measured rate / time. extra: beyond the gradients."),
    Part("kernels", 15, "Attention kernels", "A 4B layer's attention over 16,384 tokens, forward and backward."),
    Part("moe", 15, "A layer of experts", "128 experts, 8 a token, H 2048, I 768, 8192 tokens in bf16, forward and "
         "backward. dense: one product of as many FLOPs. empty: experts without tokens, whose gradients have to be 0. "
         "waits: times that the host waited for the device."),
    Part("rl", 30, "A step of reinforcement learning, Qwen3-0.6B", "In one process: 32 prompts of 256 tokens, 8 "
         "samples of 256 tokens each (64 in step 1, which warms up). difference: engine's logprobs from trainer's."),
    Part("files", 15, "Files", "A 4B model written and read; a checkpoint of 0.6B with its trainer state."),
)  # fmt: skip


@dataclass
class Result:
    """state: "" once it has run, else why it has not, or not to its end. facts: of the process, when it had ended."""

    part: Part
    state: str = "waiting"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether anything in it went wrong, beyond what there was no time or memory for."""
        return any("failed" in text for text in (self.state, *(str(row.get("note", "")) for row in self.rows)))


# ---------------------------------------------------------------- the page


def cell(value: Any) -> str:
    """Numbers with three digits that count, and all before the point."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: list[dict[str, Any]]) -> str:
    """Columns as they first occur, notes last."""
    columns = dict.fromkeys(name for row in rows for name in row)
    if "note" in columns:
        columns["note"] = columns.pop("note")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def section(result: Result, about: bool = True) -> str:
    """Of one part."""
    parts = [f"## {result.part.title}", *([result.part.about] if about else [])]
    by_columns: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result.rows:  # rows of other columns are another table
        by_columns.setdefault(tuple(name for name in row if name != "note")[:1], []).append(row)
    parts += [table(rows) for rows in by_columns.values()]
    state = f" {result.state[0].upper()}{result.state[1:]}." if result.state else ""
    facts = "".join(f"; {name} {cell(value)}" for name, value in result.facts.items() if value is not None)
    planned = f"planned {result.part.seconds:.0f} s"
    return "\n\n".join(parts) + f"\n\nPart `{result.part.name}`, {result.seconds:.0f} s, {planned}{facts}.{state}\n"


def page(report: Report) -> str:
    """The whole of gpu.md; what several parts have to say of their columns is said once."""
    machine = "\n".join(f"- {name}: {value}" for name, value in report.machine.items())
    head = f"# On one accelerator\n\n    {report.command}\n\n{date.today()}.\n\n{machine}\n"
    abouts = [result.part.about for result in report.results]
    sections = [section(r, about=abouts.index(r.part.about) == n) for n, r in enumerate(report.results)]
    if report.warnings:
        rows = [{"times": count, "warning": text[:400]} for text, count in report.warnings.most_common()]
        sections.append(f"## Warnings\n\nOf all parts but tests/cuda's, whose are in its table.\n\n{table(rows)}\n")
    return "\n".join([head, *sections])


@dataclass
class Report:
    """What is on the disk. machine: its name and versions, by what they are of. warnings: text -> times."""

    folder: Path
    command: str
    machine: dict[str, Any]
    results: list[Result]
    warnings: Counter[str] = field(default_factory=Counter)

    def write(self) -> None:
        """gpu.md, gpu.json and the constants of the card, as things stand."""
        parts = {
            r.part.name: {"state": r.state, "seconds": r.seconds, "rows": r.rows, "facts": r.facts}
            for r in self.results
        }
        content = {"command": self.command, "machine": self.machine, "parts": parts, "warnings": dict(self.warnings)}
        _replace(self.folder / "gpu.json", json.dumps(content, indent=1))
        _replace(self.folder / "gpu.md", page(self))
        constants = measured({r.part.name: r.rows for r in self.results})
        if constants and (card := self.machine.get("accelerator")):
            source = f"make gpu on {self.machine.get('device')}, {date.today()}, torch {self.machine.get('torch')}"
            (self.folder / "measured").mkdir(exist_ok=True)
            _replace(self.folder / "measured" / f"{card}.json", json.dumps({"source": source} | constants, indent=1))


def measured(parts: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The constants of recipes/plan/machines.py that these rows tell: FLOP/s, bytes/s and seconds."""
    figures: dict[str, float] = {}

    def take(name: str, part: str, column: str, unit: float, **conditions: Any) -> None:
        for row in parts.get(part, []):
            matches = all(str(row.get(key, "")).startswith(str(value)) for key, value in conditions.items())
            if matches and isinstance(row.get(column), int | float):
                figures.setdefault(name, row[column] * unit)

    # A card at its limit of power multiplies slower after a second of matmuls alone. Those of a step keep their rate:
    # on an H200 743 TFLOP/s in a profile of 4B, 754 for a layer alone, 650 for products that never end.
    take("matmul_rate", "rates", "rate", 1e12, what="matmuls of a 4b layer")
    take("copy_rate", "rates", "rate", 1e9, what="device to device")
    take("operation_rate", "profile", "operations GB/s", 1e9, model="4b")
    take("host_rate", "rates", "rate", 1e9, what="host to device, pinned")
    take("launch", "profile", "us of an operation", 1e-6, model="0.6b, 256 tokens")
    # Of a long document: attention takes most of the time where documents are long.
    for kernel in ("fa4", "varlen"):  # the first is what model.attention=auto takes where it is installed
        take("attention_rate", "kernels", "TFLOP/s", 1e12, kernel=kernel, documents="1")
    return figures


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)


# ---------------------------------------------------------------- running the parts


def run_parts(report: Report, options: argparse.Namespace, end: float, worker: Worker) -> None:
    """Each in its turn, until `end`: in its planned seconds, and those that nobody else is planned to take."""
    report.write()
    for number, result in enumerate(report.results):
        seconds_left, minimum = end - time.monotonic(), 1.0 if options.tiny else _MIN_SECONDS
        reserved = sum(following.part.seconds for following in report.results[number:])
        limit = min(seconds_left, result.part.seconds + max(0.0, seconds_left - reserved))
        if limit < min(minimum, result.part.seconds):
            result.state = f"not run: no time left ({max(0.0, seconds_left):.0f} s)"
        else:
            worker.run(report, result, limit, min(limit + _GRACE, seconds_left))
        report.write()
        print(section(result), flush=True)


class Worker:
    """The process in which parts run, one after the other, with what it is told and what it answers as files of a
    folder: N.order, N.rows (as in gpu_rows.py), N.done; NAME.warnings."""

    def __init__(self, options: argparse.Namespace, log: IO[str]) -> None:
        self.options, self.log = options, log
        self.folder = Path(tempfile.mkdtemp(prefix="weft-gpu-"))
        self.process: Popen[bytes] | None = None
        self.orders = 0

    def order(self, part: str, seconds: float) -> tuple[Path, Path]:
        """Begin a part, in a new process where there is none; (its rows, what it has left when it has ended)."""
        number, self.orders = self.orders, self.orders + 1
        _replace(self.folder / f"{number}.order", json.dumps({"part": part, "seconds": seconds}))
        if self.process is None or self.process.poll() is not None:
            self.process = start(["--worker", str(self.folder), "--first", str(number)], self.options, self.log)
        return self.folder / f"{number}.rows", self.folder / f"{number}.done"

    def run(self, report: Report, result: Result, limit: float, longest: float) -> None:
        """A part that is told `limit` seconds; the process is killed after `longest`."""
        began, ended, status = time.monotonic(), False, None
        result.state = "running"
        rows, done = self.order(result.part.name, limit)
        assert self.process is not None
        while not ended and status is None and time.monotonic() - began < longest:
            time.sleep(_POLL)
            status, ended = self.process.poll(), done.exists()
            result.seconds = time.monotonic() - began
            if rows.exists() and (new_rows := json.loads(rows.read_text())) != result.rows:
                result.rows = new_rows
                report.write()
        result.state = "" if ended else f"stopped after {result.seconds:.0f} s"
        if not ended and status is not None:
            result.state = f"failed: it ended with {status}; see gpu.log"
        if ended:
            answer = json.loads(done.read_text())
            result.facts = answer["facts"]
            if not answer["sound"]:
                result.state = "failed: the device answers no more; the next part has a new process"
        if not ended or not answer["sound"]:
            self.end()
        self.collect(report)

    def collect(self, report: Report) -> None:
        """Count the warnings so far: Python's, and those that libraries write themselves."""
        report.warnings.clear()
        for path in self.folder.glob("*.warnings"):
            report.warnings.update(json.loads(path.read_text()))
        with suppress(OSError):
            text = (report.folder / "gpu.log").read_text(errors="replace")
            report.warnings.update(re.findall(r"^(?:\[rank\d+\]:)?\[W[\d .:]+(.*)$", text, re.MULTILINE))

    def end(self) -> None:
        """Kill the process and what it has left behind."""
        if self.process is not None:
            end_group(self.process)
        self.process = None


def start(words: list[str], options: argparse.Namespace, log: IO[str]) -> Popen[bytes]:
    """This program as the parts' process, in a process group of its own, with the weft of this repository."""
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--device", options.device, "--out", options.out]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as weft's commands set it
    return Popen(
        [*command, *(["--tiny"] if options.tiny else [])],
        stdout=log, stderr=STDOUT, env={**allocator, **os.environ, "PYTHONPATH": path}, process_group=0,
    )  # fmt: skip


def end_group(process: Popen[bytes]) -> None:
    """Kill a process and what it has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------- in the parts' process


def work(options: argparse.Namespace) -> None:
    """Run what is ordered, until the program that orders has ended."""
    import torch._dynamo

    from benchmarks.device import Device
    from benchmarks.gpu_parts import FUNCTIONS
    from benchmarks.gpu_rows import PartRun, failure, keep_warnings
    from weft.launch.process import leave

    torch._dynamo.config.disable = options.tiny  # compiling takes a minute, whatever the size
    folder, number, parent = Path(options.worker), options.first, os.getppid()
    keep_warnings(folder / f"{os.getpid()}.warnings")
    device = Device(options.device)
    while os.getppid() == parent:
        order = folder / f"{number}.order"
        if not order.exists():
            time.sleep(0.02)
            continue
        order_of_part = json.loads(order.read_text())
        print(f"==== {order_of_part['part']}", flush=True)
        run = PartRun(
            device,
            options.tiny,
            time.monotonic() + order_of_part["seconds"],
            Path(options.out),
            folder / f"{number}.rows",
        )
        try:
            FUNCTIONS[order_of_part["part"]](run)
        except Exception as error:
            traceback.print_exc()
            run.add(note=failure(error))
        answer: dict[str, Any] = {"sound": device.answers(), "facts": {}}
        if device.cuda and answer["sound"]:
            answer["facts"] = device.allocator()
        _replace(folder / f"{number}.done", json.dumps(answer))
        number += 1
        if not answer["sound"]:
            os._exit(70)
    leave()


# ---------------------------------------------------------------- the command


def clocks(out: Path, when: str) -> str:
    """The driver's version and the clocks, in a line, and all that nvidia-smi says in clocks.txt; "" without it."""
    words = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    try:
        line = subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip().replace("\n", "; ")
        details = subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER"], capture_output=True, text=True, timeout=20)
    except (OSError, TimeoutExpired):
        return ""
    with (out / "clocks.txt").open("a") as stream:
        stream.write(f"==== {when}\n{line}\n{details.stdout}\n")
    return f"{line} ({_CLOCKS})"


def describe(worker: Worker, limit: float = 120.0) -> dict[str, Any]:
    """What this runs on; {} where there is no such device."""
    rows, done = worker.order("machine", limit)
    assert worker.process is not None
    end = time.monotonic() + limit
    while not done.exists() and worker.process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    described = json.loads(rows.read_text()) if done.exists() and rows.exists() else []
    return dict(described[0]) if described and "note" not in described[0] else {}


def main() -> int:
    """Exit status: 1 where a part has failed, 2 where nothing could begin."""
    end, options = time.monotonic(), parse()
    end += 60 * options.minutes
    if options.worker:
        sys.path.insert(0, str(ROOT))
        work(options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the part that runs ends, too
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.md", "gpu.json", "gpu.log", "clocks.txt"):
        (folder / name).unlink(missing_ok=True)
    with (folder / "gpu.log").open("a") as log:
        worker = Worker(options, log)
        try:
            return _measure(options, folder, worker, end)
        finally:
            worker.end()
            shutil.rmtree(worker.folder, ignore_errors=True)


def _measure(options: argparse.Namespace, folder: Path, worker: Worker, end: float) -> int:
    machine = describe(worker)
    if not machine:
        last_line = ((folder / "gpu.log").read_text().strip().splitlines() or ["its process said nothing"])[-1]
        print(f"no {options.device} device here (--device cpu --tiny tries all of it): {last_line}", file=sys.stderr)
        return 2
    if before := clocks(folder, "before"):
        machine["clocks before"] = before
    report = Report(
        folder, f"python {shlex.join(sys.argv)}", machine, [Result(part) for part in parts_of(options, machine)]
    )
    run_parts(report, options, end, worker)
    if after := clocks(folder, "after"):
        machine["clocks after"] = after
        report.write()
    print(f"{folder}/gpu.md")
    return int(any(result.failed for result in report.results))


def parts_of(options: argparse.Namespace, machine: dict[str, Any]) -> Sequence[Part]:
    """The wanted ones, in their order; on one device not those that need two."""
    names = options.parts or [part.name for part in PARTS]
    chosen = [part for part in PARTS if part.name in names or part.name.split("-")[0] in names]
    return [part for part in chosen if part.accelerators <= machine.get("devices", 1)]


def parse() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--parts", nargs="+", choices=[*names, "sft"], help="some of it; `sft` is all of those")
    parser.add_argument("--out", default=".gpu", metavar="DIR")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="sizes of a test; nothing is compiled")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
