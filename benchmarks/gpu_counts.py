"""What a step of SFT asks of one H100, counted without one: weft's own step on tensors that have no values.

    python benchmarks/gpu_counts.py                      # Qwen3-4B, 16,384 tokens, model.recompute=full
    python benchmarks/gpu_counts.py --kept false         # parameters copied in every forward and backward
    python benchmarks/gpu_counts.py --shape 30b-a3b --lora 16

Operations by kind, the bytes that they read and write, and a roofline: the longer of FLOPs / 700 TFLOP/s and bytes /
3.0 TB/s, added up. Not in it: attention, launches, idle time, and what torch.compile fuses (layers run as they are).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.gpu_sft import config_of, write_model
from weft.config.recompute import RecomputePolicy
from weft.config.schema import FsdpConfig, LoraConfig, ModelConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch import simulated
from weft.launch.machine import ACCELERATORS
from weft.launch.process import fake_ranks
from weft.recipes.plan.simulate import Step, make_state, plan_of, rows_of

RATE, BYTES = 700e12, 3.0e12  # of one H100, as matmuls and passes over memory reach them
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")
_COPIES = ("copy_", "_to_copy", "clone", "cat", "stack", "chunk_cat", "_foreach_copy_", "constant_pad_nd")
_FREE = (
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "set_", "device",
    "_unsafe_view",
)  # fmt: skip
_FILLS = ("zeros", "ones", "full", "zeros_like", "full_like", "new_zeros", "new_full", "zero_", "fill_", "arange")


@dataclass
class Work:
    """Of all operations of a kind. seconds: on the roofline."""

    count: int = 0
    bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0


class OperationCounts(TorchDispatchMode):
    """Counts operations that are kernels on an accelerator, and reads by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: defaultdict[str, Work] = defaultdict(Work)
        self.reads = 0

    def add(self, kind: str, touched: int, flops: float = 0.0) -> None:
        work = self.kinds[kind]
        work.count, work.bytes, work.flops = work.count + 1, work.bytes + touched, work.flops + flops
        work.seconds += max(flops / RATE, touched / BYTES)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations are seen on local tensors
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name in _FREE or view or func.namespace in ("prim", "c10d"):
            return out
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        written = outputs or [t for t in inputs[:1] if name.endswith("_") or func.namespace != "aten"]
        touched = sum(t.nbytes for t in written) + sum(t.nbytes for t in inputs) * (name not in _FILLS)
        if name in _PRODUCTS:
            first_operand, right = [t for t in inputs if t.ndim >= 2][-2:]
            if func._schema.overload_name.endswith("out"):
                first_operand, right = args[1:3] if name != "mm" else args[:2]
            self.add("products", touched, 2.0 * first_operand.numel() * right.shape[-1])
        elif name == "_grouped_mm":  # tokens times their expert's weight, or the gradient of the experts' weights
            a, b = args[:2]
            self.add("grouped products", touched, 2.0 * a.numel() * b.shape[-1])
        elif "fused_adam" in name:
            self.add("optimizer", sum(4 * 7 * t.numel() for t in args[0]))
        elif func.namespace == "weft":
            self.add("kernels of experts" if "swiglu" in name else "head kernels", touched)
        else:
            self.add("copies" if name in _COPIES else "elementwise", touched)
        return out


class _Norm(torch.autograd.Function):
    """torch's fused kernel of RMSNorm, as its CUDA library runs it: one pass forward; backward one, and one for the
    weight."""

    counts: OperationCounts

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        _Norm.counts.add("norm kernels", 2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        _Norm.counts.add("norm kernels", 3 * x.nbytes)
        _Norm.counts.add("norm kernels", 2 * x.nbytes)
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def counting() -> Iterator[OperationCounts]:
    """Inside, operations and the host's reads are counted."""
    counts, original = OperationCounts(), simulated.read

    def read(values: Tensor, planned: Any) -> Any:
        counts.reads += 1
        return original(values, planned)

    _Norm.counts = counts
    with ExitStack() as patched:
        for module in [m for name, m in sys.modules.items() if name.startswith("weft.")]:
            if getattr(module, "read", None) is original:
                patched.enter_context(mock.patch.object(module, "read", read))
        patched.enter_context(
            mock.patch.object(functional, "rms_norm", lambda x, shape, weight, eps: _Norm.apply(x, weight))
        )
        patched.enter_context(counts)
        yield counts


def simulation_of(card: Any) -> Any:
    """The simulation of a card; versions of weft differ in what it is told."""
    for arguments in ((card.memory, getattr(card, "capability", (9, 0))), (card.memory,), ()):
        try:
            return simulated.Simulation("cuda", *arguments)
        except TypeError:
            continue
    raise AssertionError


def count(
    shape: str, tokens: int, recompute: Any, keep_weights: bool, micro_batches: int, tiny: bool = False, lora: int = 0
) -> OperationCounts:
    """Count one step, after the optimizer has its state. kept: fsdp.reshard_after_forward=false, which is what a run
    does from its second step on where memory allows. lora: rank of adapters on a frozen base in bf16; 0: none."""
    card = next(card for name, card in ACCELERATORS.items() if name.lower().startswith("h100"))
    simulation = simulation_of(card)
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", config_of(shape, tiny))
        config = EngineConfig(
            model=ModelConfig(path=str(model), init="random", recompute=recompute),
            step=StepConfig(documents=1, max_tokens_per_device=tokens),
            fsdp=FsdpConfig(reshard_after_forward=not keep_weights),
            lora=LoraConfig(rank=lora) if lora else LoraConfig(),
        )
        objective = CrossEntropy()
        step = Step([512] * (tokens // 512) * micro_batches, objective)
        with fake_ranks(1, "cpu", card, simulated=simulation) as ranks:
            engine = Engine(config, ranks, weights=False)
            plan = plan_of(engine, step)
            rows = rows_of(engine, plan, step)
            with simulation.running():
                make_state(engine)
                with counting() as counts:
                    if hasattr(engine, "step"):
                        engine.step(plan, rows, objective, 1e-5)
                    else:  # of older versions
                        engine.accumulate(plan, rows, objective)
                        engine.apply(1e-5)
    return counts


def report(counts: OperationCounts) -> str:
    """A table in Markdown."""
    lines = ["| kind | kernels | GB | TFLOP | ms at the roofline |", "|---|---|---|---|---|"]
    total = Work()
    for name, work in sorted(counts.kinds.items(), key=lambda item: -item[1].seconds):
        lines.append(_line(name, work))
        total.count, total.bytes = total.count + work.count, total.bytes + work.bytes
        total.flops, total.seconds = total.flops + work.flops, total.seconds + work.seconds
    return "\n".join([*lines, _line("all", total), "", f"Reads by the host: {counts.reads}"])


def _line(name: str, work: Work) -> str:
    return f"| {name} | {work.count} | {work.bytes / 1e9:.1f} | {work.flops / 1e12:.1f} | {work.seconds * 1e3:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="4b", choices=["0.6b", "4b", "30b-a3b"])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--recompute", default="full", metavar="none | full | N", help="N: every Nth layer")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--kept", default="true", choices=["true", "false"])
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers")
    options = parser.parse_args()
    counts = count(
        options.shape,
        options.tokens,
        RecomputePolicy(every=int(options.recompute)) if options.recompute.isdigit() else options.recompute,
        options.kept == "true",
        options.micro_batches,
        tiny=options.tiny,
        lora=options.lora,
    )
    assert math.isfinite(sum(work.seconds for work in counts.kinds.values()))
    print(report(counts))


if __name__ == "__main__":
    main()
