"""Optimizer steps: processor time, bytes of state, and memory above it, beside torch's AdamW and torch.optim.Muon.

    python benchmarks/optimizers.py                       # models of 30M and 100M parameters, about 3 minutes
    python benchmarks/optimizers.py --sizes 30M --runs 5

Every optimizer steps weights of the same shapes, in one process on one rank, in turns. Times are medians of the
processor time of all threads. `above` is the rise of the process's peak memory during a step, once its state exists.
torch's Muon takes matrices only, and steps in bf16; it has torch's fused AdamW beside it for the others. `clipped`:
with the multiplication of gradients by the factor of clipping; `on the host` does both in one pass, as
fsdp.cpu_offload=optimizer does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from weft.config.schema import OptimizerConfig
from weft.engine.optim.adamw import FusedAdamW
from weft.engine.optim.optimizer import build_optimizer, multiply_gradients
from weft.launch.machine import keep_freed_memory
from weft.parallel.shards.boxes import Box

SIZES = {"30M": (512, 1408, 6, 16384), "100M": (768, 2048, 12, 16384)}  # hidden, intermediate, layers, vocabulary
Model = list[tuple[str, nn.Parameter]]


def model(hidden: int, intermediate: int, layers: int, vocabulary: int, dtype: torch.dtype) -> Model:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"layers.{layer}.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.down_proj.weight": (hidden, intermediate)}
        shapes |= {f"layers.{layer}.{name}_norm.weight": (hidden,) for name in ("in", "post")}
    named = [(name, nn.Parameter((torch.randn(shape) * 0.02).to(dtype))) for name, shape in shapes.items()]
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    return named


def of_weft(dtype: torch.dtype, **keys: Any) -> Callable[[Model], list[torch.optim.Optimizer]]:
    def build(named: Model) -> list[torch.optim.Optimizer]:
        boxes = {name: [Box.from_shape(tuple(p.shape))] for name, p in named if _is_matrix(name, p)}
        optimizer = build_optimizer(named, OptimizerConfig(**keys), matrices=boxes)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return [optimizer]

    return build


def torch_adamw(named: Model) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for _, p in named], lr=1e-5, fused=True)]


def torch_muon(named: Model) -> list[torch.optim.Optimizer]:
    matrices, vectors = ([p for n, p in named if _is_matrix(n, p) is want] for want in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-5), torch.optim.AdamW(vectors, lr=1e-5, fused=True)]


class ClippedOptimizer:
    """AdamW with gradients multiplied by a factor near 1 before or, if `at_once`, within the step."""

    def __init__(self, named: Model, *, at_once: bool) -> None:
        self.parameters, self.at_once = [parameter for _, parameter in named], at_once
        built = build_optimizer(named, OptimizerConfig())
        assert isinstance(built, FusedAdamW)
        self.optimizer = built
        self.state = built.state

    def step(self) -> None:
        factor = 1 - 2**-20
        if self.at_once:
            self.optimizer.step_one_by_one(factor, lambda parameter: None)
        else:
            multiply_gradients(self.parameters, factor)
            self.optimizer.step()


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed" not in name


FP32, BF16 = torch.float32, torch.bfloat16
RIVALS: dict[str, tuple[torch.dtype, Callable[[Model], list[Any]]]] = {
    "torch AdamW, fused": (FP32, torch_adamw),
    "adamw": (FP32, of_weft(FP32)),
    "adamw, clipped": (FP32, lambda named: [ClippedOptimizer(named, at_once=False)]),
    "adamw, clipped, on the host": (FP32, lambda named: [ClippedOptimizer(named, at_once=True)]),
    "adamw, state bf16": (FP32, of_weft(FP32, state_dtype="bf16")),
    "adamw, state int8": (FP32, of_weft(FP32, state_dtype="int8")),
    "adamw, state int8, masters bf16 stochastic": (BF16, of_weft(BF16, state_dtype="int8", rounding="stochastic")),
    "torch Muon + AdamW": (FP32, torch_muon),
    "muon, bf16": (FP32, of_weft(FP32, name="muon", muon_dtype="bf16")),
    "muon, fp32": (FP32, of_weft(FP32, name="muon", muon_dtype="fp32")),
}


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def peak_above(size: str, name: str) -> int:
    """The rise of the peak during the second step, in a process of its own whose malloc gives memory back at once."""
    command = [sys.executable, __file__, "--sizes", size, "--above", name]
    done = subprocess.run(
        command, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}, check=True, capture_output=True, text=True
    )
    return int(done.stdout.split()[-1])


def measure_peak(size: str, name: str) -> int:
    dtype, build = RIVALS[name]
    optimizers = build(model(*SIZES[size], dtype))
    step(optimizers)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    step(optimizers)
    return peak_bytes() - before


def step(optimizers: list[Any]) -> float:
    began = time.process_time()
    for optimizer in optimizers:
        optimizer.step()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--optimizers", nargs="+", choices=RIVALS, default=list(RIVALS), metavar="NAME")
    parser.add_argument("--above", choices=RIVALS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.above:
        print(measure_peak(arguments.sizes[0], arguments.above))
        return
    keep_freed_memory()
    for size in arguments.sizes:
        built = {}
        for name in dict.fromkeys(["torch AdamW, fused", *arguments.optimizers]):
            dtype, build = RIVALS[name]
            torch.manual_seed(0)
            named = model(*SIZES[size], dtype)
            built[name] = named, build(named)
        parameters = sum(p.numel() for _, p in named)
        times: dict[str, list[float]] = {name: [] for name in built}
        for run in range(arguments.runs + 1):
            for name, (_, optimizers) in built.items():
                duration = step(optimizers)
                if run:
                    times[name].append(duration)
        print(f"\n{size}: {parameters:,} parameters, {torch.get_num_threads()} threads, torch {torch.__version__}")
        print("| optimizer | processor time, ms | x torch's AdamW | state, bytes per parameter | above, MiB |")
        print("| --- | --- | --- | --- | --- |")
        base = statistics.median(times["torch AdamW, fused"])
        for name, (_, optimizers) in built.items():
            values = (
                v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)
            )
            state = sum(v.nbytes for v in values if v.ndim) / parameters
            median = statistics.median(times[name])
            above = peak_above(size, name) / 2**20
            print(f"| {name} | {1e3 * median:.0f} | {median / base:.1f} | {state:.2f} | {above:.0f} |")


if __name__ == "__main__":
    main()
