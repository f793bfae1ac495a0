"""Selective recomputation: a recomputed layer reuses some results of its forward instead of computing them again.

torch.utils.checkpoint also has selective contexts. Their interface changes between versions. They also keep only the
outputs of operations, and collectives write into their arguments. Here `reuse_in_recompute` keeps the return value of a
function, and a dispatch mode keeps the results of attention kernels and matmuls. The code of layers needs no change.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from weft.config.recompute import FULL, Kind, RecomputePolicy
from weft.ops.offload import ActivationOffload, HostedLayer, HostedTensor, alias_of

T = TypeVar("T")
_NUMBERS = "numbers"  # numbers of rows for experts: every policy keeps them, because the host must wait for them
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(?!.*backward)\w*attention\w*|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|torch_attn::_varlen_attn"
)
_LEFT_FACTOR = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0}  # matmul -> index of its left argument
_NARROW = 8  # a matmul whose input and output widths differ by more than this factor has a narrow side


class LayerResults:
    """The results that one forward of a layer keeps for its recomputation, by kind, in the order of computation."""

    def __init__(self, policy: RecomputePolicy, hosted: HostedLayer | None = None) -> None:
        """hosted: the layer's offload, if kept results are stored on the host."""
        self.policy, self._hosted = policy, hosted
        self._results: dict[str, list[Any]] = {kind: [] for kind in (*policy.keep, _NUMBERS)}

    def append(self, kind: str, result: Any) -> None:
        """Keep a result: a tensor, or a tuple or list that contains tensors."""
        hosted = None if kind == _NUMBERS else self._hosted
        self._results[kind].append(tree_map(partial(_stored, hosted), result))

    def iterators(self) -> dict[str, Iterator[Any]]:
        """New iterators over the kept results of each kind. Every recomputation needs new ones, because a retained
        graph recomputes its layers in each backward."""
        return {kind: (tree_map(_restored, item) for item in items) for kind, items in self._results.items()}

    def tensors(self, kind: Kind) -> list[Tensor]:
        """All kept tensors of a kind."""
        tensors: list[Tensor] = []
        for items in self._results.get(kind, []):
            stored = (item for item in tree_leaves(items) if type(item) in (_Stored, HostedTensor))
            tensors += map(_restored, stored)
        return tensors


@dataclass(frozen=True)
class _Stored:
    """A kept tensor. alias: the tensor without a graph. version: its version counter when it was kept."""

    alias: Tensor
    version: int


def _stored(hosted: HostedLayer | None, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    on_host = None if hosted is None else hosted.hosted(value)
    if on_host is not None:
        return on_host
    alias = alias_of(value)
    return _Stored(alias, alias._version)


def _restored(value: Any) -> Any:
    if type(value) is HostedTensor:
        return value.restore()
    if type(value) is not _Stored:
        return value
    if value.alias._version != value.version:
        raise RuntimeError(
            "The model's code changed a tensor in place that recomputation keeps. Set model.recompute=full."
        )
    return value.alias.detach()


@dataclass
class _Phase:
    """A thread's forward or recomputation of a layer. kept: the results to reuse in a recomputation; None in a forward,
    which appends to `results`. matmuls: number of matmuls so far without a narrow side."""

    results: LayerResults
    kept: dict[str, Iterator[Any]] | None = None
    matmuls: int = 0

    def reuse(self, kind: str, compute: Callable[[], T]) -> T:
        if kind not in (*self.results.policy.keep, _NUMBERS):
            return compute()
        if self.kept is not None:
            result: T = next(self.kept[kind])
            return result
        result = compute()
        self.results.append(kind, result)
        return result

    def reuse_matmul(self, inner: int, outer: int, compute: Callable[[], Tensor]) -> Tensor:
        """The result of a matmul with a weight [inner, outer]. Every second result is kept. Narrow results are always
        kept, such as router scores and the first factor of adapters: they save much work for little memory. Results of
        narrow inputs are never kept."""
        if inner > _NARROW * outer:
            keeps = True
        elif outer > _NARROW * inner:
            keeps = False
        else:
            self.matmuls += 1
            keeps = self.matmuls % 2 == 0
        return self.reuse("matmuls", compute) if keeps else compute()


_thread = threading.local()  # phase: the _Phase of the layer that runs


def contexts(
    policy: RecomputePolicy = FULL, results: LayerResults | None = None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """(context of a layer's forward, context of its recomputation), for `context_fn` of torch.utils.checkpoint."""
    results = LayerResults(policy) if results is None else results
    return _inside(results, recomputes=False), _inside(results, recomputes=True)


@contextmanager
def _inside(results: LayerResults, *, recomputes: bool) -> Iterator[None]:
    outer_phase = getattr(_thread, "phase", None)
    _thread.phase = _Phase(results, results.iterators() if recomputes else None)
    try:
        with _KeepResults(_thread.phase) if results.policy.keeps_operations else nullcontext():
            yield
    finally:
        _thread.phase = outer_phase


@torch.compiler.disable
def reuse_in_recompute(compute: Callable[[], T], kind: str = _NUMBERS) -> T:
    """compute(). In recomputation, the result of the same call in forward, if the policy keeps results of this kind.
    Forward and recomputation must make these calls in the same order."""
    phase: _Phase | None = getattr(_thread, "phase", None)
    return compute() if phase is None else phase.reuse(kind, compute)


class _KeepResults(TorchDispatchMode):
    """A mode that passes attention operations and matmuls to `reuse` and `reuse_matmul` of a phase."""

    def __init__(self, phase: _Phase) -> None:
        super().__init__()
        self.phase, self.keep = phase, phase.results.policy.keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, left = _kind_of(func)
        if kind not in self.keep or getattr(_thread, "phase", None) is not self.phase:
            return func(*args, **(kwargs or {}))
        compute = partial(func, *args, **(kwargs or {}))
        if kind == "attention":
            return self.phase.reuse(kind, compute)
        return self.phase.reuse_matmul(args[left].shape[-1], args[left + 1].shape[-1], compute)


@cache
def _kind_of(operation: Any) -> tuple[str, int]:
    """(kind of the operation's result, index of a matmul's left argument). The kind is "" for other operations."""
    name = operation.name() if isinstance(operation, torch._ops.OpOverload) else ""
    name = name.partition(".")[0]
    if name in _LEFT_FACTOR:
        return "matmuls", _LEFT_FACTOR[name]
    return ("attention", 0) if _ATTENTION.fullmatch(name) else ("", 0)


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """A context in which no results are kept, for a part of a layer whose own backward recomputes it."""
    outer_phase = getattr(_thread, "phase", None)
    _thread.phase = None
    try:
        yield
    finally:
        _thread.phase = outer_phase


@contextmanager
def compiled_kernel() -> Iterator[None]:
    """A context for calls of torch.compile'd functions from a layer. It disables the dispatch mode, in which torch does
    not compile."""
    with nullcontext() if getattr(_thread, "phase", None) is None else _disable_current_modes():
        yield


def run_layer(
    policy: RecomputePolicy, layer: Callable[..., Any], *args: Any, offload: ActivationOffload | None = None
) -> Any:
    """layer(*args), recomputed in backward under this policy. offload: stores the layer's input, and perhaps the kept
    results, on the host until then. The first argument must be the layer's hidden states."""
    if offload is None or not torch.is_grad_enabled():
        return checkpoint(layer, *args, use_reentrant=False, context_fn=partial(contexts, policy))
    hosted = offload.layer(args[0])
    results = LayerResults(policy, hosted if offload.kept else None)
    with hosted.hidden_to_host():
        return checkpoint(layer, *args, use_reentrant=False, context_fn=partial(contexts, policy, results))
