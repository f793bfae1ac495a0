"""Plans the rows of a step on any mesh from the lengths of its documents: the engine's planner, without an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config.mesh import MeshSizes
from weft.engine.batch.document import DocumentMeta
from weft.engine.batch.prefixes import Path, PathNode
from weft.engine.step_plan.plan import StepPlan, StepPlanner
from weft.models.flops import model_flops
from weft.ops.communicator import CPAxis, MetaCommunicator
from weft.recipes.plan.blueprint import Blueprint


@dataclass(frozen=True)
class StepLengths:
    """The lengths of a step's documents. origin: their source, in words. group, prefix: groups of `group` neighbours
    have the same first `prefix` tokens."""

    tokens: Sequence[int]
    origin: str
    group: int = 1
    prefix: int = 0

    def plan(self, model: Blueprint, mesh: MeshSizes, budget: int | None = None) -> tuple[StepPlan, RowFacts]:
        """The step's rows from plan_rows, and their facts."""
        plan = plan_rows(model, mesh, self.tokens, budget, self.group, self.prefix)
        return plan, RowFacts.from_plan(model, plan)


@dataclass(frozen=True)
class Load:
    """A rank's rows of a step. tokens: in all rows, with padding. predicted: tokens whose logits are computed. shared:
    tokens of documents that are split over ranks of cp."""

    micro_batches: int
    tokens: float
    predicted: float
    shared: float


@dataclass(frozen=True)
class RowFacts:
    """The facts of a step's rows that determine its memory and time. longest: tokens of the longest row. load:
    of a rank that gets the longest row of each micro-batch. dearest: FLOPs of a micro-batch's
    most expensive row, averaged over micro-batches. shares: for each micro-batch, the cost of its most expensive row
    relative to `dearest`. linear: the share of matmuls with weights in the FLOPs. tokens, flops: of all documents.
    cuts: whether any document is split. keys: maximum number of keys that the segments of a row attend to, relative to
    `longest`; 1 without trees."""

    longest: int
    load: Load
    shares: tuple[float, ...]
    dearest: float
    linear: float
    utilisation: float
    tokens: int
    flops: float
    cuts: bool
    keys: float = 1.0

    @staticmethod
    def from_plan(model: Blueprint, plan: StepPlan) -> RowFacts:
        """The facts of the rows of a plan of this model's documents."""
        row_costs = [max(costs) for costs in plan.costs]
        mean, totals = sum(row_costs) / len(row_costs), plan.totals
        linear, _ = model_flops(model.built.flops)
        forwarded, read = plan.tokens_forwarded, sum(document.read for document in plan.documents)
        flops = totals.cost if forwarded == read else math.fsum(cost for costs in plan.costs for cost in costs)
        share = linear * forwarded / flops
        longest = max(width for micro in range(plan.micro_batches) for width in _widths(plan, micro))
        return RowFacts(
            longest, _load(plan), tuple(cost / mean for cost in row_costs), mean, min(1.0, share), plan.utilisation,
            totals.tokens, flops, bool(plan.pieces), max(1.0, _keys(plan) / longest),
        )  # fmt: skip


def plan_rows(
    model: Blueprint, mesh: MeshSizes, lengths: Sequence[int], budget: int | None = None, group: int = 1,
    prefix: int = 0,
) -> StepPlan:  # fmt: skip
    """The plan of a step with documents of these lengths, in which all tokens are trained. budget: tokens of a row;
    None for step.max_tokens_per_device. group, prefix: as in StepLengths. Raises UserError if a document does not fit a
    row."""
    planner = planner_of(model, mesh)
    metadata = [meta_of(planner, length) for length in lengths]
    if group > 1 and not planner.apart:
        metadata = [
            replace(meta, group=index // group, path=_path(planner, meta.read, prefix, index, index // group))
            if prefix < meta.read and planner.shares(meta.length)
            else meta
            for index, meta in enumerate(metadata)
        ]
    return planner.plan(metadata, budget or planner.step.max_tokens_per_device)


def _path(planner: StepPlanner, read: int, prefix: int, document: int, group: int) -> Path:
    """The path of a document that shares its first tokens with its group."""
    return tuple(
        PathNode(digest, end, planner.costs.tokens(end))
        for digest, end in ((2 * group, prefix), (2 * document + 1, read))
    )


def planner_of(model: Blueprint, mesh: MeshSizes) -> StepPlanner:
    """The planner of the first rank of a mesh."""
    ulysses, no_ranks, context = model.ulysses(mesh.cp, mesh.tp), MetaCommunicator(1), None
    if ulysses is not None:
        context = CPAxis(0, mesh.cp // ulysses, ulysses, no_ranks, no_ranks, no_ranks)
    multiple = mesh.tp if model.sequence(mesh.tp) else 1
    ranks = mesh.dp_replicate * mesh.shards
    return StepPlanner(model.config.step, (0, ranks), model.built, context, multiple, has_cp=mesh.cp > 1)


def meta_of(planner: StepPlanner, length: int) -> DocumentMeta:
    """The metadata of a document of text."""
    omitted = planner.costs.omitted(length)
    cost = planner.costs.tokens(length - omitted)
    return DocumentMeta(length, float(length - 1), length - 1, cost=cost, omitted=omitted)


def _load(plan: StepPlan) -> Load:
    """The load of a rank that has the longest row in each micro-batch."""
    tokens = shared = 0.0
    for micro in range(plan.micro_batches):
        tokens += max(_widths(plan, micro))
        shared += _shared(plan, micro)
    of_documents = sum(document.loss_tokens for document in plan.documents)
    return Load(
        plan.micro_batches, tokens, tokens * min(1.0, of_documents / max(1, plan.tokens_forwarded)), shared
    )  # fmt: skip


def _widths(plan: StepPlan, micro: int) -> list[int]:
    """Tokens of each rank's row, with padding."""
    of_rows, padded = zip(plan.rows[micro], plan.lengths[micro], strict=True), plan.layout == "padded"
    return [length * (len(row) if padded else 1) for row, length in of_rows]


def _keys(plan: StepPlan) -> int:
    """The maximum number of keys that the segments of a row of trees attend to: their paths and themselves."""
    cells = ((micro, rank) for micro in range(plan.micro_batches) for rank in range(plan.ranks))
    rows = (plan.segments(*cell) for cell in cells)
    return max((sum(segments.key_lengths) for segments in rows if segments is not None), default=0)


def _shared(plan: StepPlan, micro: int) -> float:
    """The maximum number of tokens of split documents that a rank has in a micro-batch."""
    if not plan.pieces or plan.group is None:
        return 0.0
    largest = 0
    for rank, pieces in enumerate(plan.pieces[micro]):
        tokens = 0
        for document, intervals in zip(plan.rows[micro][rank], pieces, strict=True):
            count = sum(stop - start for start, stop in intervals)
            tokens += count if count < plan.documents[document].read else 0
        largest = max(largest, tokens)
    return float(largest)
