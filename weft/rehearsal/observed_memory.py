"""What of a step is in memory, and when: every storage that torch makes for tensors, from birth to death, by class.

Classes are found afterwards. `weights`, `optimizer` and `gradients` are those that the engine holds. `gathered` are
whole parameters of FSDP units, and the buffers in which they arrive; `unreduced` gradients of whole units, on their way
to the ranks that keep parts of them. Of what else a forward makes, `activations` outlive it, because backward needs
them; a layer that runs again in backward has some, too. The rest is `temporary`. What an allocator rounds up, keeps or
cannot use is no part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from weft.engine.engine import Engine
from weft.parallel.fsdp import fsdp_modules
from weft.parallel.mesh import own_part
from weft.telemetry import flight

# With them FSDP fills gathered parameters: of several ranks, and of one.
_FILLS = (torch.ops.fsdp.split_with_sizes_copy.default, torch.ops.aten.copy_.default)

CLASSES = ("weights", "gradients", "optimizer", "activations", "gathered", "unreduced", "temporary")


@dataclass
class _Life:
    """A storage. born, died: numbers of operations. phase: in which it was made. again: made by a layer that runs again
    in backward. kind: its class, where that is known."""

    bytes: int
    born: int
    phase: tuple[str, int]
    died: int | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Peak:
    """The most that was in memory at once. classes: bytes of each of CLASSES then. phase, micro_batch: when. held: of
    each of weights, gradients and optimizer, all bytes that there are in the end."""

    total: int
    classes: dict[str, int]
    phase: str
    micro_batch: int


@dataclass
class _Unit:
    """The gathered parameters of one FSDP unit: storages that FSDP empties and fills again."""

    storages: list[torch.UntypedStorage]
    bytes: int


@dataclass
class Timeline:
    """lives: of all storages. gathered: at each operation, the bytes of gathered parameters. phases: of each operation.
    again: for each operation of a backward, whether a layer runs again."""

    lives: list[_Life] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    again: list[tuple[bool, int]] = field(default_factory=list)


class Tracking(TorchDispatchMode):
    """Follows the storages of this thread inside. Enter it before the step, and ask for the peak after it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.timeline = engine, Timeline()
        self._known: dict[int, _Life] = {}  # by address of the storage
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._groups = [group for group in map(_parameter_group, fsdp_modules(engine.module)) if group is not None]
        self._units: dict[int, _Unit] = {}
        self._open: list[_Unit] = []
        self._phase = ("start", 0)
        self._know(map(own_part, engine.module.parameters()), "weights")
        self._know(engine.module.buffers(), "weights")
        self._know(_state(engine), "optimizer")
        if engine.ema is not None:
            self._know(engine.ema.shards.values(), "optimizer")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self._tick()
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._seen(tensor)
        if func.namespace == "fsdp":
            self._collect(func._schema.name, args, kwargs or {})
        if func in _FILLS:
            self._look_for_gathered()
        return out

    def gradients_are_complete(self) -> None:
        """Mark what the parameters' gradients are in."""
        gradients = (own_part(p.grad) for p in self.engine.module.parameters() if p.grad is not None)
        self._know(gradients, "gradients")

    def peak(self) -> Peak:
        """Of all that was seen so far."""
        return _peak(self.timeline)

    # ------------------------------------------------------------ on the way

    def _tick(self) -> None:
        timeline, phase = self.timeline, (flight.own.phase, flight.own.micro_batch)
        if phase != self._phase:
            if self._phase[0] == "backward":
                self._know(_kept_by_fsdp(self._groups), "gradients")
            self._phase = phase
        timeline.phases.append(phase)
        if self._open and not all(unit.storages[0].nbytes() for unit in self._open):
            self._open = [unit for unit in self._open if unit.storages[0].nbytes()]
        timeline.gathered.append(sum(unit.bytes for unit in self._open))
        node = torch._C._current_autograd_node() if phase[0] == "backward" else None
        timeline.again.append((node is not None and torch.is_grad_enabled(), 0 if node is None else id_of(node)))

    def _seen(self, tensor: Tensor) -> _Life:
        storage = tensor.untyped_storage()
        key = storage._cdata
        life = self._known.get(key)
        if life is None:
            life = _Life(storage.nbytes(), len(self.timeline.phases), self._phase)
            self._known[key] = life
            self.timeline.lives.append(life)
            self._references[key] = weakref.ref(storage, lambda _: self._gone(key))
        return life

    def _gone(self, key: int) -> None:
        self._known.pop(key).died = len(self.timeline.phases)
        del self._references[key]

    def _know(self, tensors: Iterable[Tensor], kind: str) -> None:
        for tensor in tensors:
            self._seen(tensor).kind = kind

    def _collect(self, operation: str, args: Any, kwargs: Any) -> None:
        """What FSDP copies together for its collectives, and where it puts what arrives."""
        if operation == "fsdp::all_gather_copy_in":
            self._know(args[1:2], "gathered")
        elif operation == "fsdp::chunk_cat":
            self._know([*args[0], kwargs["out"] if "out" in kwargs else args[3]], "unreduced")

    def _look_for_gathered(self) -> None:
        """FSDP gives storages of gathered parameters their bytes just before it fills them."""
        for number, group in enumerate(self._groups):
            if number not in self._units and group.fsdp_params[0].all_gather_outputs:
                tensors = [tensor for p in group.fsdp_params for tensor in p.all_gather_outputs]
                for tensor in tensors:  # counted by its unit
                    life = self._seen(tensor)
                    life.kind, life.bytes = "gathered", 0
                size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                self._units[number] = _Unit([tensor.untyped_storage() for tensor in tensors], size)
        self._open = [unit for unit in self._units.values() if unit.storages[0].nbytes()]


def id_of(node: Any) -> int:
    """A number of a node of the graph, which its Python object has not."""
    return int(node._sequence_nr())


def _parameter_group(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def _kept_by_fsdp(groups: Iterable[Any]) -> Iterator[Tensor]:
    """Gradients that wait for the step's last micro-batch."""
    for group in groups:
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            if parameter.unsharded_accumulated_grad is not None:
                yield own_part(parameter.unsharded_accumulated_grad)
            if parameter.sharded_param.grad is not None:
                yield own_part(parameter.sharded_param.grad)


def _state(engine: Engine) -> Iterator[Tensor]:
    assert engine.optimizer is not None
    for of_parameter in engine.optimizer.state.values():
        yield from (own_part(value) for value in of_parameter.values() if isinstance(value, Tensor))


# ---------------------------------------------------------------- afterwards


def _peak(timeline: Timeline) -> Peak:
    count = len(timeline.phases)
    change = np.zeros(count + 2, np.int64)
    for life in timeline.lives:
        change[life.born] += life.bytes
        if life.died is not None:
            change[life.died + 1] -= life.bytes
    total = change.cumsum()[:count] + np.array(timeline.gathered, np.int64)
    at = int(total.argmax())
    classes = dict.fromkeys(CLASSES, 0)
    classes["gathered"] = timeline.gathered[at]
    rules = _Rules(timeline)
    for life in timeline.lives:
        if life.born <= at and (life.died is None or life.died >= at):
            classes[life.kind or rules.of(life)] += life.bytes
    phase, micro_batch = timeline.phases[at]
    return Peak(int(total[at]), classes, phase, micro_batch)


class _Rules:
    """The class of what no one has named."""

    def __init__(self, timeline: Timeline) -> None:
        count = len(timeline.phases)
        # For each operation, where its forward ends: the end of the phase, or of the layer that runs again.
        self._ends = [0] * (count + 1)
        end, again_end = count, -1
        for at in range(count - 1, -1, -1):
            if at + 1 < count and timeline.phases[at] != timeline.phases[at + 1]:
                end, again_end = at, -1
            phase = timeline.phases[at][0]
            if phase == "forward":
                self._ends[at] = end
            elif phase == "backward":
                again, node = timeline.again[at]
                if again_end >= 0 and node != timeline.again[again_end][1]:
                    again_end = -1
                if again and again_end < 0:
                    again_end = at
                self._ends[at] = again_end

    def of(self, life: _Life) -> str:
        end = self._ends[life.born]
        lasts = life.died is None or life.died > end
        return "activations" if end > 0 and lasts else "temporary"
