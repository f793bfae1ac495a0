"""Results that a recomputed layer takes from its forward instead of computing them again.

torch's selective checkpointing (torch.utils.checkpoint) has such contexts, too. Their interface changes between
versions, and they see operations alone, while collectives write into their arguments. Here `reuse_in_recompute` keeps
what a function returns, and a dispatch mode keeps the results of attention kernels and of matmuls, so that layers run
as they are written.
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
_NUMBERS = "numbers"  # of rows for experts, which the host waits for: every policy keeps them
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(?!.*backward)\w*attention\w*|aten::_(flash|efficient|cudnn)_attention_forward"
    r"|torch_attn::_varlen_attn"
)
_LEFT_FACTOR = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0}  # products with a weight -> place of it
_NARROW = 8


class LayerResults:
    """What one forward of a layer keeps for its recomputation, by kind, in the order of the computation."""

    def __init__(self, policy: RecomputePolicy, hosted: HostedLayer | None = None) -> None:
        """hosted: the layer's transfers, if results go to the host."""
        self.policy, self._hosted = policy, hosted
        self._results: dict[str, list[Any]] = {kind: [] for kind in (*policy.keep, _NUMBERS)}

    def append(self, kind: str, result: Any) -> None:
        """Keep a result: a tensor, or a tuple or list with tensors."""
        hosted = None if kind == _NUMBERS else self._hosted
        self._results[kind].append(tree_map(partial(_stored, hosted), result))

    def iterators(self) -> dict[str, Iterator[Any]]:
        """The kept results of each kind. A graph that is retained recomputes its layers at each backward, so that each
        recomputation begins anew."""
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
    """A kept tensor. alias: without a graph. version: of its values when it was kept."""

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
            "The model's code has changed a result in place that recomputation keeps: set model.recompute=full."
        )
    return value.alias.detach()


@dataclass
class _Phase:
    """What a thread does with results: keeps them in a layer's forward, or takes them in its recomputation. products:
    number of products with a weight so far."""

    results: LayerResults
    taken: dict[str, Iterator[Any]] | None = None
    products: int = 0

    def reuse(self, kind: str, compute: Callable[[], T]) -> T:
        if kind not in (*self.results.policy.keep, _NUMBERS):
            return compute()
        if self.taken is not None:
            result: T = next(self.taken[kind])
            return result
        result = compute()
        self.results.append(kind, result)
        return result

    def reuse_product(self, inner: int, outer: int, compute: Callable[[], Tensor]) -> Tensor:
        """Every second product. Narrow results, such as scores of routers and the first factor of adapters, are all
        kept: they take little memory for much work. Results of narrow inputs never are."""
        if inner > _NARROW * outer:
            keeps = True
        elif outer > _NARROW * inner:
            keeps = False
        else:
            self.products += 1
            keeps = self.products % 2 == 0
        if not keeps:
            return compute()
        if self.taken is not None:
            kept_result: Tensor = next(self.taken["matmuls"])
            return kept_result
        result = compute()
        self.results.append("matmuls", result)
        return result


_thread = threading.local()  # phase: the _Phase of the layer that runs


def contexts(
    policy: RecomputePolicy = FULL, results: LayerResults | None = None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """(context of a layer's forward, context of its recomputation), for `context_fn` of torch.utils.checkpoint."""
    results = LayerResults(policy) if results is None else results
    return _inside(results, takes=False), _inside(results, takes=True)


@contextmanager
def _inside(results: LayerResults, *, takes: bool) -> Iterator[None]:
    before = getattr(_thread, "phase", None)
    _thread.phase = _Phase(results, results.iterators() if takes else None)
    try:
        with _KeepResults(_thread.phase) if results.policy.keeps_operations else nullcontext():
            yield
    finally:
        _thread.phase = before


@torch.compiler.disable
def reuse_in_recompute(compute: Callable[[], T], kind: str = _NUMBERS) -> T:
    """compute(), or in recomputation its result in forward if the policy keeps results of this kind. Such calls must be
    in the same order in both."""
    phase: _Phase | None = getattr(_thread, "phase", None)
    return compute() if phase is None else phase.reuse(kind, compute)


class _KeepResults(TorchDispatchMode):
    """Inside, operations of attention and products with weights go through `reuse` of a phase."""

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
        return self.phase.reuse_product(args[left].shape[-1], args[left + 1].shape[-1], compute)


@cache
def _kind_of(operation: Any) -> tuple[str, int]:
    """(kind of the operation's result, "" for others; place of a product's left factor)."""
    name = operation.name() if isinstance(operation, torch._ops.OpOverload) else ""
    name = name.partition(".")[0]
    if name in _LEFT_FACTOR:
        return "matmuls", _LEFT_FACTOR[name]
    return ("attention", 0) if _ATTENTION.fullmatch(name) else ("", 0)


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Inside, a layer's results are not kept: backward runs that part of the layer by itself."""
    before = getattr(_thread, "phase", None)
    _thread.phase = None
    try:
        yield
    finally:
        _thread.phase = before


@contextmanager
def compiled_kernel() -> Iterator[None]:
    """Inside, a layer calls a function that torch compiles, which it does not do in a dispatch mode."""
    with nullcontext() if getattr(_thread, "phase", None) is None else _disable_current_modes():
        yield


def run_layer(
    policy: RecomputePolicy, layer: Callable[..., Any], *args: Any, offload: ActivationOffload | None = None
) -> Any:
    """layer(*args), which backward runs again under this policy. offload: what recomputation keeps is stored on the
    host until then; the first argument is the layer's hidden states."""
    if offload is None or not torch.is_grad_enabled():
        return checkpoint(layer, *args, use_reentrant=False, context_fn=partial(contexts, policy))
    hosted = offload.layer(args[0])
    results = LayerResults(policy, hosted if offload.kept else None)
    with hosted.hidden_to_host():
        return checkpoint(layer, *args, use_reentrant=False, context_fn=partial(contexts, policy, results))
