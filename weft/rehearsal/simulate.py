"""A step of one rank of a mesh of any size, in one process: weft's own Engine, with tensors that have no values and
collectives that send nothing.

Model, mesh, sharding, hooks, executor and optimizer are those of a run. What differs from one is in few places:
cluster/simulated.py says which sizes and kernels are chosen and what stands for numbers that the host would wait for
(experts get equally many tokens), and ops/flash_shapes.py stands for attention kernels of CUDA.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from weft.cluster.machine import Accelerator
from weft.cluster.process import pretend
from weft.cluster.simulated import Simulation
from weft.engine.config import EngineConfig
from weft.engine.document import Document
from weft.engine.engine import Engine
from weft.engine.plan import StepPlan
from weft.engine.rows import Rows
from weft.errors import UserError
from weft.objectives.base import Objective
from weft.ops.shapes import GroupedProducts
from weft.rehearsal.observed_collectives import Collectives
from weft.rehearsal.observed_memory import Peak
from weft.rehearsal.watch import Watch, held_by


@dataclass(frozen=True)
class Work:
    """The step that is simulated: so many micro-batches of full rows, of documents of so many tokens."""

    length: int
    micro_batches: int


@dataclass(frozen=True)
class Simulated:
    """What a rank did in the step. tokens: of all ranks. held: bytes of weights, gradients and optimizer's state.
    seconds: that the simulation took."""

    rank: int
    stage: int
    tokens: int
    held: dict[str, int]
    peak: Peak
    collectives: Collectives
    seconds: float


def simulate(
    config: EngineConfig, world: int, assumed: Accelerator | None, work: Work, objective: Objective, *, rank: int = 0
) -> Simulated:
    """Take one step as this rank of so many, from a process that has joined no ranks. assumed: its accelerator; None
    for a CPU."""
    if config.fsdp.cpu_offload:
        raise UserError("fsdp.cpu_offload: a simulation does not tell the host's memory from the device's.")
    began = time.perf_counter()
    _forget_meshes()
    simulation = Simulation("cpu" if assumed is None else "cuda")
    with pretend(world, "cpu", assumed, rank=rank, simulated=simulation) as ranks:
        engine = Engine(config, ranks, weights=False, readouts=objective.readouts)
        plan, rows = lay_out(engine, work, objective)
        with simulation.running(), _products(engine):
            make_state(engine)
            with Watch(engine) as watch:
                engine.accumulate(plan, rows, objective)
                held = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in held_by(engine).items()}
                engine.apply(1e-5)
        stage = 0 if engine.mesh.pp is None else engine.mesh.pp.place
        return Simulated(
            rank, stage, plan.totals.tokens, held, watch.peak(), watch.collectives, time.perf_counter() - began
        )


def _forget_meshes() -> None:
    """DTensor remembers meshes by their shape, and with them process groups that are no more."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()


def _products(engine: Engine) -> AbstractContextManager[Any]:
    return nullcontext() if engine.precision.compute == torch.bfloat16 else GroupedProducts()


def lay_out(engine: Engine, work: Work, objective: Objective) -> tuple[StepPlan, Rows]:
    """A step of documents that fill the rows of all ranks, and this rank's rows, in a simulation without values."""
    budget = engine.budget if engine.context is None else engine.budget * engine.context.size
    read = work.length - 1
    each = max(1, budget // read)
    data = engine.mesh.loss_ranks if engine.context is None else engine.mesh.loss_ranks // engine.context.size
    document = Document(torch.ones(work.length, dtype=torch.int64), torch.ones(work.length))
    documents = [document] * (each * data * work.micro_batches)
    plan, own = engine.deal(documents)
    rows = engine.rows(plan, own, objective).ahead()
    simulation = engine.ranks.simulated
    if simulation is None:
        return plan, rows
    made = [rows[micro].moved(simulation.fake.from_tensor) for micro in range(len(rows.sources))]
    return plan, Rows(rows.sources, lambda micro: made[micro])


def make_state(engine: Engine) -> None:
    """Let the optimizer make its state, which it has from the second step on."""
    assert engine.optimizer is not None
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    engine.optimizer.step()
    engine.drop_gradients()
