"""The best meshes for a model, a number of ranks and the lengths of its documents: every mesh that the axes allow is
tried by arithmetic, and what the family, the config or the memory forbids is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.config.check import check_config
from weft.config.mesh import MeshSizes
from weft.engine.plan import StepPlan
from weft.errors import UserError, first_line
from weft.rehearsal.blueprint import Blueprint
from weft.rehearsal.machines import Machine
from weft.rehearsal.memory import Memory, memory_of
from weft.rehearsal.rows import plan_rows
from weft.rehearsal.timing import StepTime, time_of

BEST = 5
_MOST_STAGES = 32
_UNIT = 64  # of which budgets are multiples


@dataclass(frozen=True)
class Search:
    """What is searched. config: of `weft sft` or `weft rl`. lengths: of a step's documents."""

    config: Any
    model: Blueprint
    machine: Machine
    ranks: int
    lengths: Sequence[int]


@dataclass(frozen=True)
class Proposal:
    """A mesh that fits. budget: step.max_tokens_per_device. limit: what keeps it from being faster, or larger."""

    mesh: MeshSizes
    budget: int
    recompute: bool
    memory: Memory
    time: StepTime
    limit: str


@dataclass
class Found:
    """best: the fastest first. tried: meshes. nearest: of those that do not fit, the one that needs the least memory.
    refused: reason -> number of meshes."""

    best: list[Proposal] = field(default_factory=list)
    tried: int = 0
    too_large: int = 0
    nearest: tuple[MeshSizes, Memory] | None = None
    refused: dict[str, int] = field(default_factory=dict)


def search(wanted: Search) -> Found:
    """Try all meshes. UserError where there is nothing to try."""
    found, plans = Found(), dict[object, StepPlan]()
    room = wanted.machine.accelerator.memory * wanted.machine.usable
    proposals = []
    for mesh in _meshes(wanted):
        found.tried += 1
        try:
            _check(wanted, mesh)
            budget = _budget(wanted, mesh)
            plan = _plan(wanted, mesh, budget, plans)
            proposal = _proposal(wanted, mesh, budget, plan, room)
        except UserError as error:
            reason = first_line(error)
            found.refused[reason] = found.refused.get(reason, 0) + 1
            continue
        if isinstance(proposal, Proposal):
            proposals.append(proposal)
            continue
        found.too_large += 1
        if found.nearest is None or proposal.fullest < found.nearest[1].fullest:
            found.nearest = mesh, proposal
    proposals.sort(key=lambda one: (one.time.seconds, one.memory.fullest))
    found.best = proposals[:BEST]
    return found


def _meshes(wanted: Search) -> Iterator[MeshSizes]:
    """All products of axes that make the ranks. tp stays within a machine; cp is what documents need, up to twice
    that."""
    ranks, model = wanted.ranks, wanted.model
    layers, longest = len(model.costs[0]), max(wanted.lengths)
    needed = -(-longest // model.config.step.max_tokens_per_device)
    experts = min((int(child.num_experts) for child in model.experts.values()), default=1)
    for tp in _divisors(ranks, min(wanted.machine.ranks, 16)):
        for pp in _divisors(ranks // tp, min(_MOST_STAGES, layers)):
            for cp in _divisors(ranks // tp // pp, 1 if needed == 1 else 2 * needed):
                data = ranks // tp // pp // cp
                for replicate in _divisors(data, data):
                    shard = data // replicate
                    if not _could_fit(wanted, tp * pp * shard * cp):
                        continue
                    for ep in _divisors(shard * cp, experts):
                        yield MeshSizes(replicate, shard, cp, tp, ep, pp)


def _divisors(number: int, most: int) -> list[int]:
    """Those that machines and shapes are made of: powers of two, and what is left of the number beside them."""
    odd = number
    while odd % 2 == 0:
        odd //= 2
    found = {power * rest for power in (1 << n for n in range(number.bit_length())) for rest in (1, odd)}
    return sorted(n for n in found if number % n == 0 and n <= most)


def _could_fit(wanted: Search, parts: int) -> bool:
    """Whether weights, gradients and states alone fit, in equal parts."""
    setup = wanted.model.setup
    state = setup.precision.master.itemsize + sum(dtype.itemsize for dtype in setup.moments)
    total = wanted.model.stored + wanted.model.trained * state * setup.trained
    return total / parts <= wanted.machine.accelerator.memory * wanted.machine.usable


def _check(wanted: Search, mesh: MeshSizes) -> None:
    """UserError for what the config or the family does not do on this mesh."""
    axes = {name: getattr(mesh, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")}
    own = replace(wanted.config.mesh, **axes, ulysses=None)
    budget = _budget(wanted, mesh)
    step = replace(wanted.config.step, max_tokens_per_device=budget)
    problems = check_config(replace(wanted.config, mesh=own, step=step))
    if problems:
        raise UserError(problems[0])
    wanted.model.check(mesh)


def _budget(wanted: Search, mesh: MeshSizes) -> int:
    """step.max_tokens_per_device, or more where the longest document needs it."""
    longest, stated = max(wanted.lengths), wanted.model.config.step.max_tokens_per_device
    shared = mesh.cp if wanted.model.built.cuts_documents else 1
    needed = -(-longest // shared)
    return max(stated, -(-needed // _UNIT) * _UNIT)


def _plan(wanted: Search, mesh: MeshSizes, budget: int, plans: dict[object, StepPlan]) -> StepPlan:
    model = wanted.model
    key = mesh.dp_replicate * mesh.shards, mesh.cp, mesh.tp, budget
    if key not in plans:
        plans[key] = plan_rows(model, mesh, wanted.lengths, budget)
    return plans[key]


def _proposal(wanted: Search, mesh: MeshSizes, budget: int, plan: StepPlan, room: float) -> Proposal | Memory:
    """The mesh as it fits, without recomputation where that is possible; else what it would need."""
    model, memory = wanted.model, None
    for recompute in (False, True):
        memory = memory_of(model, mesh, plan, recompute=recompute)
        if memory.fullest <= room:
            time = time_of(model, mesh, plan, wanted.machine, recompute=recompute)
            limit = time.limit if memory.fullest < 0.9 * room else f"memory, {time.limit}"
            return Proposal(mesh, budget, recompute, memory, time, limit)
    assert memory is not None
    return memory
