"""What a step of SFT asks of one H100, counted without one: weft's own step on tensors that have no values.

    python benchmarks/gpu_counts.py                      # Qwen3-4B, 16,384 tokens, model.recompute=full
    python benchmarks/gpu_counts.py --kept false         # parameters copied in every forward and backward
    python benchmarks/gpu_counts.py --shape 30b-a3b --lora 16
    python benchmarks/gpu_counts.py --shape 30b-a3b --lora 16 --compiled

Operations by kind, the bytes that they read and write, and a roofline: the longer of FLOPs / 700 TFLOP/s and bytes /
3.0 TB/s, added up. Not in it: attention, launches and idle time.

--compiled: layers run as graphs that torch traces and partitions as for inductor. Their kernels are estimated: all
elementwise operations and sums over a token's values that are connected, without a matmul between them, are one
kernel, which reads each of its inputs once and writes each value that is read elsewhere once.
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
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.tensor import DTensor
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
from weft.models import fused_norms
from weft.recipes.plan.simulate import Step, make_state, plan_of, rows_of

RATE, BYTES = 700e12, 3.0e12  # of one H100, as matmuls and passes over memory reach them
_OF_EXPERTS = ("swiglu", "swiglu_gradient", "sum_rows")
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
        self.in_graph = False  # a compiled layer's graph runs, which is counted as a whole

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch compiles layers inside this mode."""
        return True

    def add(self, kind: str, touched: int, flops: float = 0.0) -> None:
        work = self.kinds[kind]
        work.count, work.bytes, work.flops = work.count + 1, work.bytes + touched, work.flops + flops
        work.seconds += max(flops / RATE, touched / BYTES)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations are seen on local tensors
        out = func(*args, **(kwargs or {}))
        if self.in_graph:
            return out
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
            self.add("kernels of experts" if name in _OF_EXPERTS else "head kernels", touched)
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

    _Norm.counts = _Graph.counts = counts
    with ExitStack() as patched:
        for module in [m for name, m in sys.modules.items() if name.startswith("weft.")]:
            if getattr(module, "read", None) is original:
                patched.enter_context(mock.patch.object(module, "read", read))
        patched.enter_context(mock.patch.object(fused_norms, "shapes_of_norm", _Norm.apply))
        patched.enter_context(counts)
        yield counts


_VIEWS = (
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "unbind", "as_strided", "alias", "detach", "getitem",
)  # fmt: skip


class _Graph:
    """A graph of a compiled layer, forward or backward, which is counted by the kernels that it would become."""

    counts: OperationCounts

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph, self._kernels = graph, list(_kernels(graph))

    def __call__(self, *args: Any) -> Any:
        for kernel in self._kernels:
            _Graph.counts.add(*kernel)
        _Graph.counts.in_graph = True
        try:
            return self._graph(*args)
        finally:
            _Graph.counts.in_graph = False


def _kernels(graph: fx.GraphModule) -> Iterator[tuple[str, int, float]]:
    """(kind, bytes, FLOPs) of the kernels of a graph."""
    base: dict[fx.Node, fx.Node] = {}  # the node whose memory a node's value is in
    depth: dict[fx.Node, int] = {}  # number of matmuls before the node
    kernel: dict[fx.Node, fx.Node] = {}  # elementwise operations: another one of the same kernel, or itself

    def root(node: fx.Node) -> fx.Node:
        while kernel[node] is not node:
            node = kernel[node]
        return node

    def alone(node: fx.Node) -> bool:
        """A sum over tokens, which needs another order of elements than the operations around it."""
        if _name(node) != "sum" or len(node.args) < 2:
            return False
        dims = node.all_input_nodes[0].meta["val"].ndim
        return dims - 1 not in [dim % dims for dim in node.args[1]]  # type: ignore[union-attr, operator]

    for node in graph.graph.nodes:
        base[node], sources = node, [base[source] for source in node.all_input_nodes]
        depth[node] = max((depth[source] + (_name(source) in _PRODUCTS) for source in sources), default=0)
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor | list | tuple):
            continue
        name = _name(node)
        if name in _VIEWS:
            base[node] = sources[0]
        elif name in _PRODUCTS:
            left, right = [a for a in node.all_input_nodes if a.meta["val"].ndim >= 2][-2:]
            touched = sum(_bytes(a) for a in (node, *node.all_input_nodes))
            yield (
                "products",
                touched,
                2.0 * _bytes(left) / left.meta["val"].itemsize * _size(right.meta["val"].shape[-1]),
            )
        elif name not in (*_FREE, *_FILLS):
            kernel[node] = node
            for source in sources:
                if source in kernel and depth[source] == depth[node] and not (alone(source) or alone(node)):
                    kernel[root(source)] = root(node)
    inputs: defaultdict[fx.Node, dict[fx.Node, int]] = defaultdict(lambda: defaultdict(int))
    written: defaultdict[fx.Node, dict[fx.Node, int]] = defaultdict(dict)
    for node in graph.graph.nodes:
        if base[node] is not node:
            continue
        for source in node.all_input_nodes:
            memory = base[source]
            inside = node in kernel and memory in kernel and root(node) is root(memory)
            if node in kernel and not inside:
                reads = inputs[root(node)]
                reads[memory] = min(_bytes(memory), reads[memory] + _bytes(source))
            if memory in kernel and not inside:
                written[root(memory)][memory] = _bytes(memory)
    for first in {root(node) for node in kernel}:
        yield "fused passes", sum(inputs[first].values()) + sum(written[first].values()), 0.0


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]


def _size(number: Any) -> int:
    return int(number.node.hint) if isinstance(number, torch.SymInt) else int(number)


def _bytes(node: fx.Node) -> int:
    """Bytes of a node's value; of all its tensors."""
    tensors = [t for t in tree_iter(node.meta.get("val")) if isinstance(t, Tensor)]
    return sum(math.prod(map(_size, t.shape)) * t.dtype.itemsize for t in tensors)


@contextmanager
def counted_graphs() -> Iterator[None]:
    """Inside, compiled layers run as graphs that are counted."""
    compile_module = torch.nn.Module.compile

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(_Graph(graph))

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip

    def compiled(module: torch.nn.Module, **options: Any) -> None:
        compile_module(module, backend=backend, **options)

    with (
        mock.patch.object(torch.nn.Module, "compile", compiled),
        torch._dynamo.config.patch(inline_torch_dispatch_torch_compile=True),
    ):
        yield


def simulation_of(card: Any) -> Any:
    """The simulation of a card; versions of weft differ in what it is told."""
    for arguments in ((card.memory, getattr(card, "capability", (9, 0))), (card.memory,), ()):
        try:
            return simulated.Simulation("cuda", *arguments)
        except TypeError:
            continue
    raise AssertionError


def count(
    shape: str, tokens: int, recompute: Any, keep_weights: bool, micro_batches: int, tiny: bool = False, lora: int = 0,
    compiled: bool = False,
) -> OperationCounts:  # fmt: skip
    """Count one step, after the optimizer has its state. kept: fsdp.reshard_after_forward=false, which is what a run
    does from its second step on where memory allows. lora: rank of adapters on a frozen base in bf16; 0: none.
    compiled: model.compile."""
    card = next(card for name, card in ACCELERATORS.items() if name.lower().startswith("h100"))
    simulation = simulation_of(card)
    with TemporaryDirectory() as folder, counted_graphs():
        model = write_model(Path(folder) / "model", config_of(shape, tiny))
        config = EngineConfig(
            model=ModelConfig(path=str(model), init="random", recompute=recompute, compile=compiled),
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
    parser.add_argument("--compiled", action="store_true", help="model.compile=true")
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
        compiled=options.compiled,
    )
    assert math.isfinite(sum(work.seconds for work in counts.kinds.values()))
    print(report(counts))


if __name__ == "__main__":
    main()
