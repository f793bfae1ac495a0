"""Simulates a step of one rank of a mesh of any size in one process. It runs weft's Engine with tensors that have no
values and collectives that send nothing.

Model, mesh, sharding, hooks, executor, optimizer and the plan of the rows are those of a run. There are few
differences: launch/simulated.py defines the device for which kernels and sizes are chosen, and the numbers for which
the host would wait (experts get equal numbers of tokens); ops/shapes.py replaces attention kernels of CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from weft.engine.batch.document import Document, take
from weft.engine.batch.rows import StepRows
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError, first_line
from weft.launch.machine import Accelerator
from weft.launch.process import fake_ranks
from weft.launch.simulated import Simulation, on_host
from weft.ops.shapes import GroupedProducts
from weft.recipes.plan.observed_collectives import Collectives
from weft.recipes.plan.observed_memory import Peak
from weft.recipes.plan.readings import SimulatedReadings, fewest_micro_batches, longest
from weft.recipes.plan.watch import Watch, held_by


@dataclass(frozen=True)
class Step:
    """A step to simulate. lengths: of its documents, in tokens, all of which are trained. arrays: names of the
    per-token arrays that the loss reads. group, prefix: as in StepLengths. scored: whether only the last token of each
    document is scored. readings: the forwards before the step."""

    lengths: Sequence[int]
    objective: Loss
    arrays: Sequence[str] = ()
    group: int = 1
    prefix: int = 0
    scored: bool = False
    readings: SimulatedReadings = field(default_factory=SimulatedReadings)


@dataclass(frozen=True)
class Simulated:
    """A rank's simulated step. stage: its index on mesh.pp; None without pp. micro_batches: number that were run, of
    `all_micro_batches`. persistent: bytes of weights, gradients and optimizer state, without padding, and of frozen
    models. seconds: duration of the simulation."""

    rank: int
    stage: int | None
    micro_batches: int
    all_micro_batches: int
    persistent: dict[str, int]
    peak: Peak
    collectives: Collectives
    seconds: float


def simulate(config: EngineConfig, world: int, assumed: Accelerator | None, step: Step, *, rank: int = 0) -> Simulated:
    """Simulate a step of rank `rank` of `world` ranks, in a process without a process group. The optimizer already has
    its state, as in a later step of a run.

    assumed: each rank's accelerator; None for a CPU. If there are many micro-batches, only the longest are run: enough
    to fill the pipeline and to have gradients. Raises UserError for a config that weft refuses, and if the family's
    code depends on values.
    """
    _check(config)
    began = time.perf_counter()
    simulation = Simulation("cpu") if assumed is None else Simulation("cuda", assumed.memory, assumed.capability)
    # DTensor's caches have the shape of a mesh as key, and contain process groups that no longer exist.
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    with fake_ranks(world, "cpu", assumed, rank=rank, simulated=simulation) as ranks:
        engine = Engine(config, ranks, weights=False, readouts=step.objective.readouts)
        step.readings.open(engine)
        for model in step.readings.models:
            _check(model.config, step.readings.section)
        full_plan = plan_of(engine, step)
        plan = longest(full_plan, fewest_micro_batches(engine))
        rows = rows_of(engine, plan, step)
        with simulation.running(), _products(engine):
            make_state(engine)
            try:
                persistent, watch = watched_step(engine, plan, rows, step)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UserError(
                    f"--simulate: the code of model_type {engine.module.facts.model_type!r} depends on values of "
                    f"tensors ({first_line(error)}), which a simulation does not have: remove --simulate."
                ) from error
    stage = None if engine.mesh.pp is None else engine.mesh.pp.rank
    seconds = time.perf_counter() - began
    return Simulated(
        rank, stage, plan.micro_batches, full_plan.micro_batches, persistent, watch.peak(), watch.collectives, seconds
    )


def watched_step(engine: Engine, plan: StepPlan, rows: StepRows, step: Step) -> tuple[dict[str, int], Watch]:
    """Run one step, with the forwards before it, on a simulated or a real rank. Returns (bytes by class on the rank at
    the end of the backward, the Watch)."""
    readings = step.readings
    with on_host():
        documents = simulated_documents(step)
    with Watch(engine, readings.models, readings.frozen_tensors) as watch:
        rows = readings.read(engine, plan, documents, rows)
        engine.accumulate(plan, rows, step.objective)
        tensors_by_class = held_by(engine) | {"frozen": readings.frozen_tensors}
        persistent = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in tensors_by_class.items()}
        del tensors_by_class
        engine.apply(1e-5)
    return persistent, watch


def plan_of(engine: Engine, step: Step) -> StepPlan:
    """The plan of a step."""
    return engine.plan(engine.planner.metadata(simulated_documents(step)))


def rows_of(engine: Engine, plan: StepPlan, step: Step) -> StepRows:
    """This rank's rows, already built; in a simulation their tensors have no values."""
    local = take(simulated_documents(step), engine.planner.local_documents(plan))
    return engine.rows(plan, local, step.objective, 1).ahead()


def simulated_documents(step: Step) -> list[Document]:
    """The documents of a step. Plain documents of one length are the same object, because tokens do not matter."""
    like: dict[int, Document] = {}
    for length in set(step.lengths):
        unit_array, weights = torch.ones(length), torch.ones(length)
        if step.scored:
            weights[:-1] = 0.0
        like[length] = Document(unit_array.long(), weights, arrays=dict.fromkeys(step.arrays, unit_array))
    if step.group == 1:
        return [like[length] for length in step.lengths]
    documents = []
    for index, length in enumerate(step.lengths):
        tokens = like[length].tokens.clone()
        tokens[step.prefix : step.prefix + 1] = 2 + index % step.group
        documents.append(replace(like[length], tokens=tokens, group=index // step.group))
    return documents


def make_state(engine: Engine) -> None:
    """Let the optimizer create its state, which in a run it has from the second step on."""
    assert engine.optimizer is not None
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    engine.optimizer.step()
    engine.drop_gradients()


def _check(config: EngineConfig, section: str = "fsdp") -> None:
    if config.fsdp.cpu_offload:
        raise UserError(
            f"{section}.cpu_offload: a simulation does not distinguish host memory from the accelerator's: set "
            f"{section}.cpu_offload=false, or remove --simulate."
        )
    if config.model.compile is True:
        raise UserError(
            "model.compile: weft does not simulate the memory of compiled layers: set model.compile=false, or "
            "remove --simulate."
        )


def _products(engine: Engine) -> AbstractContextManager[Any]:
    return nullcontext() if engine.precision.compute == torch.bfloat16 else GroupedProducts()
