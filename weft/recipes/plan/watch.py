"""Observes a step of a rank, real or simulated: every storage, from its creation until it is freed, and every
collective.

FSDP keeps the storages of gathered parameters and empties them in between, without an event in torch. So a unit's
storages are checked after every operation that may have filled them, and while they are full.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from weft.engine.engine import Engine
from weft.launch import flight
from weft.launch.simulated import fills_host
from weft.parallel.fsdp import fsdp_modules
from weft.parallel.mesh import local_shard
from weft.recipes.plan.observed_collectives import Collectives, parts_of
from weft.recipes.plan.observed_memory import Life, Moment, Peak, peak_of

# Operations by which FSDP fills gathered parameters: with several ranks, and with one.
_FILLS = (torch.ops.fsdp.split_with_sizes_copy.default, torch.ops.aten.copy_.default)

# Phases of launch/flight.py in which autograd runs.
_BACKWARDS = ("backward", "weights")


class _Unit:
    """The gathered parameters of an FSDP unit."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = [tensor for p in parameters for tensor in p.all_gather_outputs]
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self._first = self.tensors[0].untyped_storage()

    @property
    def full(self) -> bool:
        return self._first.nbytes() > 0


class Watch(TorchDispatchMode):
    """Records the operations of this thread inside the context. Enter it only once."""

    def __init__(
        self, engine: Engine, other_engines: Sequence[Engine] = (), frozen_tensors: Iterable[Tensor] = ()
    ) -> None:
        """engine: before the step, when the optimizer has its state. other_engines: further engines of this rank.
        frozen_tensors: their tensors."""
        super().__init__()
        parts = [parts_of(model) for model in (*other_engines, engine)]
        self.engine, self.collectives = engine, Collectives({k: v for part in parts for k, v in part.items()})
        self.moments: list[Moment] = []  # one per operation
        self.lives: list[Life] = []
        self._phase = ("", 0)
        self._alive: dict[int, Life] = {}  # by address
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        units = (unit for model in (engine, *other_engines) for unit in fsdp_modules(model.module))
        groups = (unit._get_fsdp_state()._fsdp_param_group for unit in units)
        self._groups: list[Any] = [group for group in groups if group is not None]
        self._units: dict[int, _Unit] = {}  # index of a group -> its unit, once it was gathered
        self._full: list[_Unit] = []
        self._gathered = 0  # bytes of these
        self._in_head = False
        self._hooks = []
        for model in (engine, *other_engines):
            head = model.module.head
            self._hooks.append(head.register_forward_pre_hook(lambda *_: self._head(True)))
            self._hooks.append(head.register_forward_hook(lambda *_: self._head(False)))
        for kind, tensors in (held_by(engine) | {"frozen": frozen_tensors}).items():
            self._classify(tensors, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor's inner operations are observed one by one
        out = func(*args, **(kwargs or {}))
        if fills_host():
            return out
        if func in _FILLS:
            self._look_for_gathered()
        self._note()
        if isinstance(out, Tensor):  # of nearly all operations
            self._life(out)
        else:
            for tensor in tree_iter(out):
                if isinstance(tensor, Tensor):
                    self._life(tensor)
        if func.namespace == "fsdp":
            self._classify_buffers(func._schema.name, args, kwargs or {})
        elif func.namespace == "c10d":
            self.collectives.add(func._schema.name.removeprefix("c10d::"), args)
        return out

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def peak(self) -> Peak:
        """The peak of memory."""
        return peak_of(self.lives, self.moments)

    def _head(self, runs: bool) -> None:
        self._in_head = runs

    def _note(self) -> None:
        phase = flight.recorder.phase, flight.recorder.micro_batch
        if phase != self._phase:
            if self._phase[0] in (*_BACKWARDS, "reduce"):
                self._classify(_gradients_of(self._groups), "gradients")
            self._phase = phase
        for unit in self._full:
            if not unit.full:
                self._set_full(self._full)
                break
        node, recomputes = -1, False
        if phase[0] in _BACKWARDS:
            current = torch._C._current_autograd_node()
            if current is not None:
                node, recomputes = current._sequence_nr(), torch.is_grad_enabled()
        self.moments.append(Moment(*phase, self._gathered, node, recomputes))

    def _set_full(self, units: Iterable[_Unit]) -> None:
        """Note which of these units are gathered, and their bytes: a step has thousands of operations for a change."""
        self._full = [unit for unit in units if unit.full]
        self._gathered = sum(unit.bytes for unit in self._full)

    def _life(self, tensor: Tensor) -> Life:
        storage = tensor.untyped_storage()
        key = storage._cdata
        life = self._alive.get(key)
        if life is None:
            kind = "head" if self._in_head else None
            life = self._alive[key] = Life(storage.nbytes(), len(self.moments), kind=kind)
            self.lives.append(life)
            self._references[key] = weakref.ref(storage, lambda _: self._freed(key))
        return life

    def _freed(self, key: int) -> None:
        self._alive.pop(key).died = len(self.moments)
        del self._references[key]

    def _classify(self, tensors: Iterable[Tensor], kind: str) -> None:
        for tensor in tensors:
            self._life(tensor).kind = kind

    def _classify_buffers(self, operation: str, args: Any, kwargs: Any) -> None:
        """Note the buffers that FSDP packs for its collectives."""
        if operation == "fsdp::all_gather_copy_in":
            self._classify(args[1:2], "gathered")
        elif operation == "fsdp::chunk_cat":
            self._classify([*args[0], kwargs["out"] if "out" in kwargs else args[3]], "unreduced")

    def _look_for_gathered(self) -> None:
        for index, group in enumerate(self._groups):
            if index not in self._units and all(p.all_gather_outputs for p in group.fsdp_params):
                unit = self._units[index] = _Unit(group.fsdp_params)
                for tensor in unit.tensors:
                    life = self._life(tensor)
                    life.kind, life.bytes = "gathered", 0  # the unit counts the bytes
        self._set_full(self._units.values())


def held_by(engine: Engine) -> dict[str, list[Tensor]]:
    """The tensors of an engine on this rank, by class: weights, optimizer state and gradients."""
    assert engine.optimizer is not None
    parameters = list(engine.module.parameters())
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    average = [] if engine.ema is None else list(engine.ema.shards.values())
    return {
        "weights": [*map(local_shard, parameters), *engine.module.buffers()],
        "optimizer": [*(local_shard(value) for value in states if isinstance(value, Tensor)), *average],
        "gradients": [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None],
    }


def _gradients_of(groups: Iterable[Any]) -> Iterator[Tensor]:
    """Gradients of FSDP's groups, including gradients that are reduced only in the step's last micro-batch."""
    for group in groups:
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            for gradient in (parameter.unsharded_accumulated_grad, parameter.sharded_param.grad):
                if gradient is not None:
                    yield local_shard(gradient)
