"""The head's readouts against the naive loss: time and extra memory, at a real vocabulary.

    python benchmarks/head.py                          # the table, about 10 minutes on two cores
    python benchmarks/head.py --tokens 1024 --runs 3
    python benchmarks/head.py --tokens 8192 --device cuda --dtype bfloat16

Extra memory is the rise of the peak during one forward and backward, less the gradients of hidden states and weight;
each is measured in a process of its own. Times are medians of runs that alternate between the implementations;
processor time is that of all threads, of use on a busy machine under OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.device import Device
from weft.ops.head import KnownGrad, LogitTransform, chunked_readouts

MIB = 2**20
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprob, _ = chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=False)
    return -logprob.mean()


def with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprob, entropy = chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=True)
    assert entropy is not None
    return -logprob.mean()


def known_direction(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    direction = KnownGrad(torch.ones(len(targets), device=hidden.device))
    logprob, _ = chunked_readouts(hidden, weight, None, targets, LogitTransform(), entropy=False, known_grad=direction)
    return -logprob.mean()


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions())


LOSSES: dict[str, Loss] = {
    "naive": naive,
    "chunked": chunked,
    "chunked, entropy too": with_entropy,
    "chunked, known direction": known_direction,
    "F.linear_cross_entropy": torch_chunked,
}


class HeadInputs:
    """Random hidden states, head weight and targets, without temporaries that would raise the peak."""

    def __init__(self, options: argparse.Namespace, tokens: int) -> None:
        torch.manual_seed(0)
        factory = {"device": options.device, "dtype": getattr(torch, options.dtype)}
        self.device = Device(options.device)
        self.hidden = torch.empty(tokens, options.width, **factory).normal_().requires_grad_()
        self.weight = torch.empty(options.vocabulary, options.width, **factory).normal_(0, 0.05).requires_grad_()
        self.targets = torch.randint(options.vocabulary, (tokens,), device=options.device)

    def run(self, loss: Loss) -> tuple[float, float]:
        """(seconds, loss) of one forward and backward."""
        self.hidden.grad = self.weight.grad = None
        began = self.device.now()
        value = loss(self.hidden, self.weight, self.targets)
        value.backward()
        return self.device.now() - began, value.item()


def measure_one(name: str, options: argparse.Namespace, tokens: int) -> dict[str, float]:
    """Peak memory of the first run, median seconds of all, in this process."""
    problem = HeadInputs(options, tokens)
    warm = HeadInputs(argparse.Namespace(**{**vars(options), "vocabulary": 512}), 16)
    warm.run(LOSSES[name])
    base = problem.device.reset_peak()
    cpu = time.process_time()
    first, loss = problem.run(LOSSES[name])
    cpu = time.process_time() - cpu
    peak = problem.device.peak()
    assert problem.weight.grad is not None and problem.hidden.grad is not None
    gradients = problem.weight.grad.nbytes + problem.hidden.grad.nbytes
    seconds = [first] + [problem.run(LOSSES[name])[0] for _ in range(options.runs - 1)]
    return {
        "extra_mib": (peak - base - gradients) / MIB,
        "seconds": statistics.median(seconds),
        "cpu_seconds": cpu,
        "loss": loss,
        "grad_norm": problem.weight.grad.float().norm().item(),
    }


def measure_memory(name: str, options: argparse.Namespace, tokens: int) -> float:
    command = [sys.executable, __file__, "--one", name, "--tokens", str(tokens), "--runs", "1"]
    for key in ("width", "vocabulary", "device", "dtype"):
        command += [f"--{key}", str(getattr(options, key))]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(answer["extra_mib"])


def measure_times(options: argparse.Namespace, tokens: int, names: list[str]) -> dict[str, tuple[float, float]]:
    """(seconds, seconds of processor time) of each, medians of runs in turn."""
    problem = HeadInputs(options, tokens)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for run in range(options.runs + 1):
        for name in names:
            cpu = time.process_time()
            seconds, _ = problem.run(LOSSES[name])
            if run:  # the first warms up
                times[name].append((seconds, time.process_time() - cpu))
    return {name: (statistics.median(t[0] for t in v), statistics.median(t[1] for t in v)) for name, v in times.items()}


def machine(options: argparse.Namespace) -> str:
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads; load {os.getloadavg()[0]:.1f}"
    return f"{Device(options.device).name}; torch {torch.__version__}; {cores}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 8192])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--skip", nargs="*", default=[], choices=list(LOSSES))
    parser.add_argument("--one", choices=list(LOSSES), help="measure one in this process, print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_one(options.one, options, options.tokens[0])))
        return
    print(f"{machine(options)}\nH={options.width} V={options.vocabulary} {options.dtype}, {options.runs} runs\n")
    columns = ("tokens", "loss", "seconds", "/ naive", "processor seconds", "/ naive", "extra MiB", "/ naive")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for tokens in options.tokens:
        report(options, tokens, [name for name in LOSSES if name not in options.skip])


def report(options: argparse.Namespace, tokens: int, names: list[str]) -> None:
    """Table rows of one number of tokens; the naive loss only where memory holds its three [N, V] tensors."""
    needed = 12 * tokens * options.vocabulary + 12 * options.vocabulary * options.width
    if options.device == "cpu" and "naive" in names and needed > 0.9 * Device("cpu").free:
        names = [name for name in names if name != "naive"]
        print(f"| {tokens} | naive | not run: needs {needed / 2**30:.0f} GiB |" + " |" * 5, flush=True)
    seconds = measure_times(options, tokens, names)
    memory = {name: measure_memory(name, options, tokens) for name in names}

    def ratio(figure: float, naive: float | None, form: str) -> str:
        return "" if naive is None else format(figure / naive, form)

    for name in names:
        base, base_memory = seconds.get("naive", (None, None)), memory.get("naive")
        times = [
            f"{figure:.2f} | {ratio(figure, naive, '.2f')}" for figure, naive in zip(seconds[name], base, strict=True)
        ]
        cells = (str(tokens), name, *times, f"{memory[name]:.0f} | {ratio(memory[name], base_memory, '.1%')}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
