"""One command for the minutes that a GPU is at hand: tests/cuda, then rates, training, memory, rollouts, as a table.

    python benchmarks/gpu.py --minutes 9 --out .gpu                       # make gpu
    python benchmarks/gpu.py --parts sft-4b profile --minutes 4           # some of it
    python benchmarks/gpu.py --tiny --device cpu --minutes 5              # all of it, on sizes of a test

Writes DIR/gpu.md and gpu.json anew after every row, so that an end at any moment loses nothing; beside them gpu.log
(what the parts print), tests.txt, profile-4b.txt and its trace. Every part is a process of its own and has a share of
the time that is left; parts come in the order of what they tell. Exit status 1 where a part has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_POLL = 0.5  # seconds between looks at a part's rows
_LEAST = 12.0  # seconds below which no part is begun: most of them would go into importing
_GRACE = 10.0  # seconds that a part may take beyond its time to end by itself


@dataclass(frozen=True)
class Part:
    """share: of the time that is left, against those of the parts still to come."""

    name: str
    share: float
    title: str
    about: str


_SFT = (
    "Random weights; one packed row of log-normal documents a step; bf16 compute over fp32 masters, AdamW. bare: a "
    "plain PyTorch loop with the same attention kernel (benchmarks/gpu_sft.py says what it does). MFU is of the "
    "measured matmul rate, causal attention counted half, recomputation not at all. GiB: the most at once. planner: "
    "weights, gradients, optimizer and gathered units, as weft's planner says; estimate: with activations and the head."
)
PARTS = (
    Part("rates", 30, "Rates", "bf16 products of random matrices, and copies: the floor of all that follows."),
    Part("tests", 150, "tests/cuda", "Output in tests.txt."),
    Part("sft-4b", 110, "SFT, Qwen3-4B", _SFT),
    Part("kernels", 45, "Attention kernels", "A 4B layer's attention over 16,384 tokens, forward and backward."),
    Part("head", 20, "The head", "Logprobs of 8192 tokens, H 2560, V 151,936, bf16, forward and backward. matmul "
         "share: three products at the measured rate / time. extra: beyond the gradients."),
    Part("profile", 35, "Profile of the 4B step", "By kernel in profile-4b.txt; the trace is beside it."),
    Part("sft-0.6b", 70, "SFT, Qwen3-0.6B", _SFT),
    Part("sft-30b-a3b", 50, "SFT, Qwen3-30B-A3B, as many layers as fit", _SFT),
    Part("rl", 35, "A step of reinforcement learning, Qwen3-0.6B", "In one process: 32 prompts of 256 tokens, 8 "
         "samples of 256 tokens each (64 in step 1, which warms up). difference: engine's logprobs from trainer's."),
    Part("files", 40, "Files", "A 4B model written and read; a checkpoint of 0.6B with its trainer state."),
    Part("sft-8b", 40, "SFT, Qwen3-8B", _SFT),
)  # fmt: skip


@dataclass
class Result:
    """state: "" once it has run, else why it has not, or not to its end."""

    part: Part
    state: str = "waiting"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

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
    if result.rows:
        parts.append(table(result.rows))
    state = f" {result.state[0].upper()}{result.state[1:]}." if result.state else ""
    return "\n\n".join(parts) + f"\n\nPart `{result.part.name}`, {result.seconds:.0f} s.{state}\n"


def page(command: str, machine: str, results: list[Result]) -> str:
    """The whole of gpu.md; what several parts have to say of their columns is said once."""
    head = f"# On one accelerator\n\n    {command}\n\n{machine}, {date.today()}.\n"
    said = [result.part.about for result in results]
    return "\n".join([head, *(section(r, about=said.index(r.part.about) == n) for n, r in enumerate(results))])


@dataclass
class Report:
    """What is on the disk."""

    folder: Path
    command: str
    machine: str
    results: list[Result]

    def write(self) -> None:
        """gpu.md and gpu.json, as things stand."""
        parts = {r.part.name: {"state": r.state, "seconds": r.seconds, "rows": r.rows} for r in self.results}
        found = {"command": self.command, "machine": self.machine, "parts": parts}
        _replace(self.folder / "gpu.json", json.dumps(found, indent=1))
        _replace(self.folder / "gpu.md", page(self.command, self.machine, self.results))


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)


# ---------------------------------------------------------------- running the parts


def run_parts(report: Report, options: argparse.Namespace, end: float) -> None:
    """Each in its turn, with its share of what is left until `end`."""
    report.write()
    for number, result in enumerate(report.results):
        left, least = end - time.monotonic(), 1.0 if options.tiny else _LEAST
        if left < least:
            result.state = f"not run: no time left ({max(0.0, left):.0f} s)"
        else:
            shares = sum(other.part.share for other in report.results[number:])
            limit = min(left, max(least, left * result.part.share / shares))
            run_part(report, result, options, limit, min(limit + _GRACE, left))
        report.write()
        print(section(result), flush=True)


def run_part(report: Report, result: Result, options: argparse.Namespace, limit: float, longest: float) -> None:
    """One, in a process of its own that is told `limit` seconds, and killed after `longest`."""
    began, ended = time.monotonic(), False
    with tempfile.TemporaryDirectory() as folder, (report.folder / "gpu.log").open("a") as log:
        rows = Path(folder) / "rows.json"
        result.state = "running"
        process = start(["--part", result.part.name, "--rows", str(rows), "--seconds", f"{limit:.1f}"], options, log)
        try:
            while not ended and time.monotonic() - began < longest:
                ended = _ends(process, _POLL)
                result.seconds = time.monotonic() - began
                if rows.exists() and (found := json.loads(rows.read_text())) != result.rows:
                    result.rows = found
                    report.write()
        finally:
            end_group(process)
    if not ended:
        result.state = f"stopped after {result.seconds:.0f} s"
    else:
        result.state = "" if process.returncode == 0 else f"failed: it ended with {process.returncode}; see gpu.log"


def start(words: list[str], options: argparse.Namespace, log: IO[str]) -> Popen[bytes]:
    """This program as a part, in a process group of its own, with the weft of this repository."""
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--device", options.device, "--out", options.out]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Popen(
        [*command, *(["--tiny"] if options.tiny else [])],
        stdout=log, stderr=STDOUT, env={**os.environ, "PYTHONPATH": path}, process_group=0,
    )  # fmt: skip


def _ends(process: Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except TimeoutExpired:
        return False
    return True


def end_group(process: Popen[bytes]) -> None:
    """Kill a part and what it has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------- one part, in its own process


def be_part(options: argparse.Namespace) -> None:
    """What a part's process does."""
    import torch._dynamo

    from benchmarks.device import Device
    from benchmarks.gpu_parts import FUNCTIONS
    from benchmarks.gpu_rows import Run, failure
    from weft.cluster.process import leave

    torch._dynamo.config.disable = options.tiny  # compiling takes a minute, whatever the size
    end = time.monotonic() + options.seconds
    run = Run(Device(options.device), options.tiny, end, Path(options.out), Path(options.rows))
    try:
        FUNCTIONS[options.part](run)
    except Exception as error:
        traceback.print_exc()
        run.add(note=failure(error))
    leave()


def describe_machine(options: argparse.Namespace) -> None:
    """Write what this runs on, where there is such a device."""
    import torch
    import transformers

    from benchmarks.device import Device

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees none")
        return
    device = Device(options.device)
    cuda = f"CUDA {torch.version.cuda}, " if device.cuda else ""
    text = (
        f"{device.name}, {device.memory / 2**30:.0f} GiB, {os.cpu_count()} cores; {cuda}torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {sys.version.split()[0]}"
    )
    Path(options.rows).write_text(json.dumps(text))


def ask_machine(options: argparse.Namespace) -> str:
    """What this runs on; "" where there is no such device."""
    with tempfile.TemporaryDirectory() as folder, (Path(options.out) / "gpu.log").open("a") as log:
        answer = Path(folder) / "machine.json"
        start(["--part", "machine", "--rows", str(answer)], options, log).wait()
        return str(json.loads(answer.read_text())) if answer.exists() else ""


# ---------------------------------------------------------------- the command


def main() -> int:
    """Exit status: 1 where a part has failed, 2 where nothing could begin."""
    end, options = time.monotonic(), parse()
    end += 60 * options.minutes
    if options.part:
        sys.path.insert(0, str(ROOT))
        print(f"==== {options.part}", flush=True)
        describe_machine(options) if options.part == "machine" else be_part(options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the part that runs ends, too
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.md", "gpu.json", "gpu.log"):
        (folder / name).unlink(missing_ok=True)
    machine = ask_machine(options)
    if not machine:
        said = (folder / "gpu.log").read_text().strip().splitlines()[-1]
        print(f"no {options.device} device here (--device cpu --tiny tries all of it): {said}", file=sys.stderr)
        return 2
    wanted = options.parts or [part.name for part in PARTS]
    chosen = [part for part in PARTS if part.name in wanted or part.name.split("-")[0] in wanted]
    report = Report(folder, f"python {shlex.join(sys.argv)}", machine, [Result(part) for part in chosen])
    run_parts(report, options, end)
    print(f"{folder}/gpu.md")
    return int(any(result.failed for result in report.results))


def parse() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--parts", nargs="+", choices=[*names, "sft"], help="some of it; `sft` is all of those")
    parser.add_argument("--out", default=".gpu", metavar="DIR")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="sizes of a test; nothing is compiled")
    for hidden in ("--part", "--rows"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
