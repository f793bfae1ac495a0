"""The rows of a step on any mesh, from the lengths of its documents: the engine's own planner, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config.mesh import MeshSizes
from weft.engine.plan import DocumentMeta, StepPlan
from weft.engine.planning import StepPlanner
from weft.ops.communicator import ContextAxis, MetaCommunicator
from weft.rehearsal.blueprint import Blueprint


@dataclass(frozen=True)
class StepLengths:
    """The lengths of a step's documents. said: where they are from."""

    of: Sequence[int]
    said: str


def plan_rows(model: Blueprint, mesh: MeshSizes, lengths: Sequence[int], budget: int | None = None) -> StepPlan:
    """The plan of a step of documents of these lengths, all of whose tokens are trained. budget: of a row; None as
    step.max_tokens_per_device says. UserError where a document fits no row."""
    planner = planner_of(model, mesh)
    return planner.plan([meta_of(planner, length) for length in lengths], budget or planner.step.max_tokens_per_device)


def planner_of(model: Blueprint, mesh: MeshSizes) -> StepPlanner:
    """The planner of the first rank of a mesh."""
    ulysses, nobody, context = model.ulysses(mesh.cp, mesh.tp), MetaCommunicator(1), None
    if ulysses is not None:
        context = ContextAxis(0, mesh.cp // ulysses, ulysses, nobody, nobody, nobody)
    multiple = mesh.tp if model.sequence(mesh.tp) else 1
    ranks = mesh.dp_replicate * mesh.shards
    return StepPlanner(model.config.step, (0, ranks), model.built, context, multiple)


def meta_of(planner: StepPlanner, length: int) -> DocumentMeta:
    """Of a document of text."""
    omitted = planner.costs.omitted(length)
    cost = planner.costs.tokens(length - omitted)
    return DocumentMeta(length, float(length - 1), length - 1, cost=cost, omitted=omitted)
