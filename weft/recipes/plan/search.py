"""Searches the best meshes for a model, a number of ranks and the lengths of documents. It estimates each mesh that the
axes permit, and counts the refused meshes by reason: the family, the config or the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from weft.config.mesh import MeshSizes
from weft.config.validate import check_config
from weft.engine.builder import state_bytes_of
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError, first_line
from weft.models.flops import document_flops
from weft.parallel.pp.schedule import DELAYED, placement_of
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.choices import Choice, choices, fitting
from weft.recipes.plan.machines import Machine
from weft.recipes.plan.memory import Memory, memory_of, rows_of_a_token
from weft.recipes.plan.other_models import OtherModels, RowsOf, with_readings
from weft.recipes.plan.rows import RowFacts, plan_rows, planner_of
from weft.recipes.plan.timing import StepTime, time_of

BEST = 5
_MOST_STAGES = 32
_MOST_TRIED = 400
_UNIT = 64  # budgets above the configured one are multiples of this number


@dataclass(frozen=True)
class Search:
    """The problem to search. config: of `weft sft` or `weft rl`. lengths: of a step's documents, in tokens. stated:
    whether there are no other lengths; otherwise documents may have up to data.max_length tokens. group, prefix: as in
    StepLengths."""

    config: Any
    model: Blueprint
    machine: Machine
    ranks: int
    lengths: Sequence[int]
    stated: bool = False
    group: int = 1
    prefix: int = 0

    @cached_property
    def costs(self) -> list[float]:
        """FLOPs of each document. A shared prefix counts for the first document of its group."""
        cost_by_length = {length: document_flops(self.model.built.flops, length) for length in set(self.lengths)}
        costs = [cost_by_length[length] for length in self.lengths]
        if self.group == 1 or planner_of(self.model, MeshSizes(1, 1, 1, 1, 1, 1)).apart:
            return costs
        prefix = document_flops(self.model.built.flops, self.prefix)
        return [cost - prefix * (index % self.group > 0) for index, cost in enumerate(costs)]

    def blocks(self, tp: int) -> int:
        """The number of blocks that tp splits; 0 if tp cannot split the model."""
        try:
            return len(self.model.styles(tp).regions)
        except UserError:
            return 0

    @property
    def longest(self) -> int:
        """Tokens of the longest possible document."""
        longest = max(self.lengths)
        return longest if self.stated else max(longest, getattr(self.config.data, "max_length", None) or 0)


@dataclass(frozen=True)
class Proposal:
    """A mesh that fits. budget: step.max_tokens_per_device. choice: the memory settings; `lossy` of them are inexact
    and not in the config. memory: of the trained model. fullest: peak bytes of a rank, including other models. limit:
    the part of a step that limits its speed, and "memory" if memory is nearly full."""

    mesh: MeshSizes
    budget: int
    choice: Choice
    lossy: int
    memory: Memory
    fullest: int
    time: StepTime
    limit: str


@dataclass
class SearchResult:
    """best: proposals, the fastest first. meshes: number of meshes that the axes permit. tried: number of meshes that
    were tried. too_large: number of meshes that do not fit. nearest: the mesh among them that needs the least memory,
    and its bytes. refused: reason -> number of meshes."""

    best: list[Proposal] = field(default_factory=list)
    meshes: int = 0
    tried: int = 0
    too_large: int = 0
    nearest: tuple[MeshSizes, int] | None = None
    refused: dict[str, int] = field(default_factory=dict)


def search(problem: Search) -> SearchResult:
    """Try meshes in the order of their lower bounds of time, until no other mesh can be among the best, or _MOST_TRIED
    were tried. If none fits, try meshes whose weights and optimizer state need other settings than the config's. If
    fewer than BEST fit, try further settings on the same meshes."""
    result, variants, other_blueprints = SearchResult(), dict[object, Blueprint](), dict[str, Blueprint]()
    rows_of = partial(_rows, problem, dict[object, tuple[StepPlan, RowFacts]]())
    room = problem.machine.accelerator.memory * problem.machine.usable
    slower: list[Proposal] = []
    for could_fit, limit in ((True, _MOST_TRIED), (False, _MOST_TRIED // 10)):
        bounds = [] if result.best else [(_least_seconds(problem, mesh), mesh) for mesh in meshes(problem, could_fit)]
        result.meshes += len(bounds)
        for lower_bound, mesh in sorted(bounds, key=lambda pair: pair[0])[:limit]:
            done = len(result.best) == BEST and not result.best[-1].lossy
            if done and lower_bound >= result.best[-1].time.seconds:
                break
            result.tried += 1
            try:
                config, needs_more = _check(problem, mesh), len(bounds) < BEST
                proposals = _proposals(
                    problem, mesh, config, rows_of, room, variants, other_blueprints, every_policy=needs_more
                )
            except UserError as error:
                reason = first_line(error)
                result.refused[reason] = result.refused.get(reason, 0) + 1
                continue
            if isinstance(proposals, list):
                result.best = sorted([*result.best, *(group[0] for group in proposals)], key=_rank)[:BEST]
                slower += (proposal for group in proposals for proposal in group[1:])
                continue
            result.too_large += 1
            if result.nearest is None or proposals < result.nearest[1]:
                result.nearest = mesh, proposals
    further = sorted(slower, key=_rank)[: BEST - len(result.best)]
    result.best = sorted([*result.best, *further], key=_rank)
    return result


def _rank(proposal: Proposal) -> tuple[int, float, int]:
    return proposal.lossy, proposal.time.seconds, proposal.fullest


def _least_seconds(problem: Search, mesh: MeshSizes) -> float:
    """A lower bound of a step's seconds: the compute of the busiest rank, collectives of tp and ep, and the bubble of a
    pipeline, without FSDP."""
    model, machine, ranks = problem.model, problem.machine, mesh.dp_replicate * mesh.shards
    costs = problem.costs
    shared = mesh.cp if model.built.cuts_documents else 1
    computing = max(sum(costs) / ranks, max(costs) / shared) / (mesh.tp * mesh.pp)
    seconds = computing / (machine.peak * max(machine.matmul, machine.attention))
    tokens = sum(problem.lengths) / ranks
    row = model.text.hidden_size * model.setup.precision.compute.itemsize
    if mesh.tp > 1:  # two collectives in forward and two in backward
        seconds += 4 * problem.blocks(mesh.tp) / mesh.pp * machine.gathering(tokens * row, mesh.tp, 1)
    if mesh.ep > 1:
        exchanged = tokens * row * rows_of_a_token(model)
        seconds += 4 * len(model.experts) / mesh.pp * machine.exchanging(exchanged, mesh.ep, mesh.tp)
    return seconds / (1.0 - _least_bubble(problem, mesh, ranks // shared))


def _least_bubble(problem: Search, mesh: MeshSizes, groups: int) -> float:
    """A lower bound of the share of time in which ranks of mesh.pp wait, for the maximum number of micro-batches.
    groups: number of groups of ranks that may share a document."""
    config = problem.model.config.mesh
    if mesh.pp == 1 or config.pp_schedule in DELAYED:
        return 0.0
    placement = placement_of(config.pp_schedule, mesh.pp, config.pp_stages_per_rank)
    micro_batches = (1 + len(problem.lengths) // max(1, groups)) * placement.chunks
    return (mesh.pp - 1) / (micro_batches + mesh.pp - 1)


def meshes(problem: Search, could_fit: bool = True) -> Iterator[MeshSizes]:
    """All meshes whose axes multiply to the number of ranks and whose shards could fit; or, with could_fit=False, those
    without replicas whose shards cannot fit with the config's settings. tp stays within a machine; cp is at most twice
    the number that the longest document needs."""
    ranks, model = problem.ranks, problem.model
    layers = len(model.costs[0])
    needed = -(-problem.longest // model.config.step.max_tokens_per_device)
    experts = min((int(child.num_experts) for child in model.experts.values()), default=1)
    for tp in _divisors(ranks, min(problem.machine.ranks, 16)):
        for pp in _divisors(ranks // tp, min(_MOST_STAGES, layers)):
            for cp in _divisors(ranks // tp // pp, 1 if needed == 1 else 2 * needed):
                data = ranks // tp // pp // cp
                for replicate in _divisors(data, data):
                    shard = data // replicate
                    if _could_fit(problem, tp * pp * shard * cp) != could_fit or (replicate > 1 and not could_fit):
                        continue
                    for ep in _divisors(shard * cp, experts):
                        yield MeshSizes(replicate, shard, cp, tp, ep, pp)


def _divisors(number: int, limit: int) -> list[int]:
    """Divisors up to `limit` that suit machines and shapes: powers of two, alone or times the number's odd factor."""
    odd = number
    while odd % 2 == 0:
        odd //= 2
    candidates = {power * factor for power in (1 << n for n in range(number.bit_length())) for factor in (1, odd)}
    return sorted(n for n in candidates if number % n == 0 and n <= limit)


def _could_fit(problem: Search, parts: int) -> bool:
    """Whether weights, gradients and optimizer state alone fit when split into `parts` equal parts. State on the host
    always fits, because the host's memory is unknown."""
    setup = problem.model.setup
    offload, room = problem.model.config.fsdp.cpu_offload, problem.machine.accelerator.memory * problem.machine.usable
    if offload is True:
        return True
    if offload == "optimizer":
        elements = sum(math.prod(weight.shape) for weight in problem.model.weights)
        return elements * setup.precision.compute.itemsize / parts <= room
    trained = [weight for weight in problem.model.weights if weight.trained and setup.trained]
    state_bytes = state_bytes_of(setup, problem.model.built)
    state = sum(state_bytes(weight.name, weight.shape, math.prod(weight.shape)) for weight in trained)
    total = problem.model.stored + problem.model.trained * setup.precision.master.itemsize * setup.trained + state
    return total / parts <= room


def _check(problem: Search, mesh: MeshSizes) -> Any:
    """The config on this mesh. Raises UserError if the config or the family forbids the mesh."""
    axes = {name: getattr(mesh, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")}
    mesh_config = replace(problem.config.mesh, **axes, ulysses=None)
    budget = _budget(problem, mesh)
    step = replace(problem.config.step, max_tokens_per_device=budget)
    data = problem.config.data
    if problem.stated and getattr(data, "max_length", None):
        data = replace(data, max_length=problem.longest)
    config = replace(problem.config, mesh=mesh_config, step=step, data=data)
    if problems := check_config(config):
        raise UserError(problems[0])
    problem.model.check(mesh)
    return config


def _budget(problem: Search, mesh: MeshSizes) -> int:
    """step.max_tokens_per_device, or more if the longest document needs it."""
    stated = problem.model.config.step.max_tokens_per_device
    shared = mesh.cp if problem.model.built.cuts_documents else 1
    needed = -(-problem.longest // shared)
    return max(stated, -(-needed // _UNIT) * _UNIT)


def _rows(
    problem: Search, planned: dict[object, tuple[StepPlan, RowFacts]], model: Blueprint, mesh: MeshSizes,
    budget: int | None,
) -> tuple[StepPlan, RowFacts]:  # fmt: skip
    """The rows of a model's ranks, and their facts. planned: results for earlier meshes."""
    groups = mesh.dp_replicate * mesh.dp_shard
    key = id(model), groups, mesh.cp, mesh.tp, budget
    if key not in planned:
        # If all documents are equal, a fraction of the ranks has the same fraction of the documents.
        repeats = math.gcd(len(problem.lengths) // problem.group, groups) if len(set(problem.lengths)) == 1 else 1
        part = replace(mesh, dp_replicate=1, dp_shard=groups // repeats)
        plan = plan_rows(
            model, part, problem.lengths[: len(problem.lengths) // repeats], budget, problem.group, problem.prefix
        )
        rows = RowFacts.from_plan(model, plan)
        planned[key] = plan, replace(rows, tokens=rows.tokens * repeats, flops=rows.flops * repeats)
    return planned[key]


def _proposals(
    problem: Search, mesh: MeshSizes, config: Any, rows_of: RowsOf, room: float, variants: dict[object, Blueprint],
    other_blueprints: dict[str, Blueprint], *, every_policy: bool,
) -> list[list[Proposal]] | int:  # fmt: skip
    """Proposals for this mesh in groups, each ordered by time: exact settings on the accelerator; if none of these fit,
    exact settings with shards on the host, and lossy settings. Otherwise the minimum number of bytes that it would
    need. config: on this mesh. variants, other_blueprints: blueprints of the trained model, and of other models.
    every_policy: also return recomputation policies that are slower than one that fits."""
    machine, budget, least = problem.machine, _budget(problem, mesh), 0
    plan, rows = rows_of(problem.model, mesh, budget)
    stated = Choice.from_config(problem.config)
    proposals: list[list[Proposal]] = []
    for group in choices(problem.config, adapters=problem.model.built.lora is not None):
        model = _variant(problem, group[0][0], variants)
        if model is None:
            continue
        other_models = OtherModels(
            group[0][0].apply(config), model, problem.ranks, "cpu", model.assumed, other_blueprints
        )
        engines = other_models.rows(mesh)
        resident = sum(engine.resident for engine in engines)
        read = max((engine.gathered or 0 for engine in engines), default=0)
        readings = other_models.readings(mesh, plan, rows, machine, rows_of)

        def needed(
            choice: Choice, model: Blueprint = model, resident: int = resident, read: int = read
        ) -> tuple[int, Memory]:
            memory = memory_of(model, mesh, rows, choice.activations)
            return resident + max(memory.fullest, memory.resident + read), memory

        matches, (size, _) = fitting(group, needed, room, every_policy=every_policy)
        least = min(least or size, size)
        if not matches:
            continue
        timed = [
            (with_readings(time_of(model, mesh, rows, machine, choice.activations), readings), fullest, memory, choice)
            for choice, fullest, memory in matches
        ]
        timed.sort(key=lambda option: (option[0].seconds, option[1]))
        proposals.append([
            Proposal(
                mesh, budget, choice, choice.lossy(stated), memory, fullest, time,
                time.limit if fullest < 0.9 * room else f"memory, {time.limit}",
            )
            for time, fullest, memory, choice in timed
        ])  # fmt: skip
        if group[0][0].cpu_offload == stated.cpu_offload:
            break
    return proposals or least


def _variant(problem: Search, choice: Choice, variants: dict[object, Blueprint]) -> Blueprint | None:
    """The model under these settings; None if the config refuses them."""
    key = choice.cpu_offload, choice.state_dtype, choice.base
    if key not in variants:
        config = choice.apply(problem.config)
        if check_config(config) and not check_config(problem.config):
            return None
        variants[key] = problem.model.with_settings(choice.apply(problem.model.config))
    return variants[key]
