"""The time of a step on an assumed machine, part by part: arithmetic on stated rates, without measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.config.mesh import MeshSizes
from weft.engine.schedule import DELAYED, Action, bubble, order
from weft.planner.blueprint import Blueprint
from weft.planner.holdings import Held, Holdings
from weft.planner.machines import Machine
from weft.planner.memory import last_place
from weft.planner.rows import RowFacts
from weft.planner.traffic import Transfer, transfers


@dataclass(frozen=True)
class Part:
    """A part of a step on the slowest stage. seconds: duration of the part by itself. waits: the seconds that it adds
    to the step; for communication, those in which nothing is computed. received: bytes that a rank receives."""

    name: str
    seconds: float
    waits: float
    received: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class StepTime:
    """The time of a step. parts: their `waits` add up to `seconds`. tokens: of all ranks. mfu: FLOPs of the model as a
    share of those at peak. transfers: those of a rank of the slowest stage."""

    seconds: float
    parts: tuple[Part, ...]
    tokens: int
    mfu: float
    transfers: tuple[Transfer, ...]

    @property
    def limit(self) -> str:
        """The name of the part other than computing that adds most to a step; "computing" if none adds a tenth."""
        waiting = max((part for part in self.parts if part.name not in _COMPUTING), key=lambda part: part.waits)
        return waiting.name if waiting.waits > 0.1 * self.seconds else "computing"


_COMPUTING = ("matrices", "attention")


@dataclass(frozen=True)
class _Work:
    """A stage's seconds, as (forward, backward), for one row of the cost RowFacts.dearest. linear, attention:
    computing. open: collectives that nothing hides. gathers: collectives that computing may hide."""

    linear: tuple[float, float]
    attention: tuple[float, float]
    open: tuple[float, float]
    gathers: tuple[float, float]

    def seconds(self, share: float) -> tuple[float, float]:
        """(Forward, backward) seconds of a row that costs `share` times as much."""
        both = []
        for phase in (0, 1):
            computing = (self.linear[phase] + self.attention[phase]) * share
            both.append(max(computing, self.gathers[phase]) + self.open[phase] * share)
        return both[0], both[1]


def time_of(
    model: Blueprint, mesh: MeshSizes, rows: RowFacts, machine: Machine, *, recompute: bool | None = None
) -> StepTime:
    """The time of a step of these rows."""
    full = model.config.model.recompute == "full" if recompute is None else recompute
    held = Holdings(model, mesh).by_stage()
    moved = [transfers(model, mesh, one, rows.load, recompute=full) for one in held]
    works = [_work(model, mesh, one, rows, machine, of, full) for one, of in zip(held, moved, strict=True)]
    shares = rows.shares
    busy = [sum(sum(work.seconds(share)) for share in shares) for work in works]
    of_rows = _seconds_of_rows(model, mesh, works, busy, shares)
    slowest = max(range(len(works)), key=lambda stage: busy[stage])
    ends = [_end_of_step(of, machine) for of in moved]
    update = max(_update_seconds(one, machine) for one in held)
    whole = of_rows + max(ends) + update
    parts = _parts(works[slowest], rows, moved[slowest], machine)
    if mesh.pp > 1:
        idle, bubble_share = of_rows - busy[slowest], 1.0 - sum(busy) / len(busy) / of_rows
        parts.append(Part("waiting for stages", idle, idle, note=f"bubble {bubble_share:.0%}"))
    parts.append(Part("optimizer", update, update, note="reads and writes the states"))
    mfu = rows.flops / (machine.peak * mesh.world * whole)
    return StepTime(whole, tuple(parts), rows.tokens, mfu, tuple(moved[slowest]))


def _work(
    model: Blueprint,
    mesh: MeshSizes,
    held: Held,
    rows: RowFacts,
    machine: Machine,
    moved: Sequence[Transfer],
    recompute: bool,
) -> _Work:
    linear, attention = _flops(model, mesh, held.place.pp, rows, recompute=recompute)
    per_row = 1.0 / rows.load.micro_batches
    seconds = defaultdict[tuple[str, bool], float](float)
    for one in moved:
        seconds[one.phase, one.hidden] += one.seconds(machine) * per_row
    return _Work(
        linear=(linear[0] / (machine.peak * machine.matmul), linear[1] / (machine.peak * machine.matmul)),
        attention=(
            attention[0] / (machine.peak * machine.attention),
            attention[1] / (machine.peak * machine.attention),
        ),
        open=(seconds["forward", False], seconds["backward", False]),
        gathers=(seconds["forward", True], seconds["backward", True]),
    )


def _flops(
    model: Blueprint, mesh: MeshSizes, stage: int, rows: RowFacts, *, recompute: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """((forward, backward) FLOPs of matrices, the same of attention) of a rank of a stage, for a row of the cost
    RowFacts.dearest. Recomputed layers count again, in backward."""
    of_rank = rows.dearest / mesh.tp
    whole, head = model.costs
    everything, own = sum(whole) + head, model.layers(mesh.pp, stage)
    last = stage == last_place(model, mesh)
    layers, of_head = sum(whole[layer] for layer in own) / everything, head * last / everything
    frozen = model.built.flops.frozen
    ahead = 1 / 2 if frozen else 1 / 3
    linear = of_rank * rows.linear
    attending = of_rank * (1 - rows.linear) * len(own) / len(whole)
    trained = linear * (layers + of_head)
    forward, backward = trained * ahead, trained * (1 - ahead)
    if recompute:
        backward += linear * layers * ahead
    if last and (mesh.tp > 1 or model.samples):  # logits are computed twice
        backward += linear * of_head * ahead
    return (forward, backward), (attending / 3, attending * (2 + recompute) / 3)


def _seconds_of_rows(
    model: Blueprint, mesh: MeshSizes, works: Sequence[_Work], busy: Sequence[float], shares: Sequence[float]
) -> float:
    """Seconds of all forwards and backwards of a step, with the waiting of stages for each other. busy: each stage's
    seconds without waiting."""
    found = model.stages(mesh.pp)
    if found is None:
        return busy[0]
    stages, schedule = found[0], model.config.mesh.pp_schedule
    placement, delayed = stages.placement, schedule in DELAYED
    run, more = list(shares), 0.0
    if schedule != "GPipe" and len(run) > 8 * placement.stages and max(run) - min(run) < 1e-6:
        # Once a pipeline of equal rows is full, a further row adds its time on the slowest rank.
        del run[8 * placement.stages :]
        more = max(busy) * (1.0 - len(run) / len(shares))
    orders = [order(schedule, placement, place, len(run)) for place in range(mesh.pp)]
    costs = [[work.seconds(share) for share in run] for work in works]
    of_rank = [sum(stages.costs[stage] for stage in placement.stages_of(place)) for place in range(mesh.pp)]

    def cost(stage: int, action: Action) -> float:
        place = placement.rank_of(stage)
        forward, backward = costs[place][action.micro]
        seconds = forward if action.kind == "forward" else backward / 2 if delayed else backward
        return seconds * stages.costs[stage] / of_rank[place]

    busy_here = sum(busy) * len(run) / len(shares)
    return busy_here / len(busy) / (1.0 - bubble(orders, placement, cost)) + more


def _end_of_step(moved: Sequence[Transfer], machine: Machine) -> float:
    """Seconds of the collectives at the end of a step: sums over replicas, over tp and between stages."""
    return sum(one.seconds(machine) for one in moved if one.phase == "step")


def _update_seconds(held: Held, machine: Machine) -> float:
    """Seconds of clipping and the update: gradients are read twice, weights and states are read and written."""
    moved = 2 * (held.gradients + held.gradients + held.optimizer + held.average)
    return moved / (machine.memory_rate * machine.moved)


def _parts(work: _Work, rows: RowFacts, moved: Sequence[Transfer], machine: Machine) -> list[Part]:
    """The parts of the slowest stage's time: computing, and each kind of collective, with the seconds that computing
    does not hide."""
    total = sum(rows.shares)
    linear, attention = sum(work.linear) * total, sum(work.attention) * total
    even = rows.utilisation
    uneven = (linear + attention) * (1 - even)
    parts = [
        Part("matrices", linear * even, linear * even),
        Part("attention", attention * even, attention * even),
        Part("uneven rows", uneven, uneven, note=f"utilisation {even:.0%}"),
    ]
    visible = 0.0
    for share in rows.shares:
        for phase in (0, 1):
            computing = (work.linear[phase] + work.attention[phase]) * share
            visible += max(0.0, work.gathers[phase] - computing)
    hidden = sum(one.seconds(machine) for one in moved if one.hidden)
    for (name, overlaps), several in _by_name(moved):
        seconds = sum(one.seconds(machine) for one in several)
        received = sum(one.received for one in several)
        waits = visible * seconds / hidden if overlaps and hidden else seconds
        parts.append(Part(name, seconds, waits, received, "computing goes on" if overlaps else ""))
    return [part for part in parts if part.seconds > 0]


def _by_name(moved: Sequence[Transfer]) -> list[tuple[tuple[str, bool], list[Transfer]]]:
    """The transfers by (axis and kind, whether computing hides them)."""

    def key(one: Transfer) -> tuple[str, bool]:
        return f"{one.axis}: {one.kind}", one.hidden

    return [(name, list(several)) for name, several in groupby(sorted(moved, key=key), key)]
