"""Forwards and backwards of a model whose layers are over several stages of ranks (mesh.pp), a row at a time.

Every stage builds every row of its documents, so that all know the shape of what travels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.engine.build import BuiltModel
from weft.engine.config import EngineConfig
from weft.engine.executor import Asked, Executor, Factors, Forwarded, Trained, Use
from weft.engine.metrics import Sums
from weft.engine.plan import StepPlan
from weft.engine.replay import RouteCounts
from weft.engine.row import Row
from weft.engine.rows import Rows
from weft.engine.schedule import Action, bubble, order
from weft.objectives.base import Objective, metrics_of
from weft.ops.exact import numerics
from weft.parallel.fsdp import reduction
from weft.parallel.mesh import Mesh
from weft.parallel.stages import Link
from weft.telemetry import flight


@dataclass(frozen=True)
class _Done:
    """A row between its forward and its backward. received: None on the first stage. sent: None on the last, which has
    `forwarded`. routes: of this stage's layers."""

    row: Row
    received: Tensor | None
    sent: Tensor | None
    forwarded: Forwarded | None
    routes: RouteCounts


class PipelineExecutor(Executor):
    """Runs one stage. Losses, metrics and readouts are those of the last one."""

    def __init__(
        self, config: EngineConfig, built: BuiltModel, mesh: Mesh, device: torch.device, link: Link, costs: list[float]
    ) -> None:
        """costs: of each stage, in any unit."""
        super().__init__(config, built, mesh, device)
        self.link, self.axis, self.schedule, self.costs = link, link.axis, config.mesh.pp_schedule, costs

    def train(self, rows: Rows, objective: Objective, factors: Factors, sums: Sums, *, routed: bool) -> Trained:
        """See Executor.train."""
        micro_batches = len(rows.sources)
        self.link.connect()
        done = Trained([torch.zeros((), device=self.device)] * micro_batches)
        actions = order(self.schedule, self.axis.place, self.axis.size, micro_batches)
        held = _Held(rows, self.device)
        waiting: dict[int, _Done] = {}
        for place, action in enumerate(actions):
            for near in actions[place : place + 2]:  # what the next one needs travels while this one computes
                self._ask(near, held)
            micro, last = action.micro, action.micro == micro_batches - 1
            if action.forward:
                flight.at("forward", micro + 1, rows.sources[micro])
                done.alike += held[micro].alike
                waiting[micro] = self._forward(micro, held[micro], objective, factors)
                continue
            flight.at("backward", micro + 1, rows.sources[micro])
            finished = waiting.pop(micro)
            self._backward(micro, finished, last=last)
            held.drop(micro)
            if finished.forwarded is not None:
                self.account(finished.forwarded, sums)
                done.losses[micro] = finished.forwarded.seen
            if routed:
                sums.add("routing/differing", *finished.routes.share(self.device))
        self.link.finish()
        self.name_metrics(objective, sums)
        return done

    def _ask(self, action: Action, held: _Held) -> None:
        self.link.ask(action.forward, action.micro, held[action.micro].input_ids_BT.shape)

    def _forward(self, micro: int, row: Row, objective: Objective, factors: Factors) -> _Done:
        received = self.link.receive(True, micro)
        if received is not None:
            received.requires_grad_()
        with self.replay.following(row) as routes, numerics(self.config.exact):
            if self.axis.is_last:
                return _Done(row, received, None, self.forwarded(row, objective, factors, received), routes)
            sent = self.read(row, frozenset(), received=received)["sent"]
        self.link.send(True, sent, row.input_ids_BT.shape)
        return _Done(row, received, sent, None, routes)

    def _backward(self, micro: int, done: _Done, *, last: bool) -> None:
        """last: of the step."""
        gradient = self.link.receive(False, micro)
        with (
            reduction(self.module, self.config.fsdp.reduce, last=last),
            self.replay.following(done.row),  # layers that are recomputed
            numerics(self.config.exact),
        ):
            if done.forwarded is not None:
                done.forwarded.loss.backward()
            else:
                assert done.sent is not None
                done.sent.backward(gradient)
        if done.received is not None:
            self.link.send(False, done.received.grad, done.row.input_ids_BT.shape)

    def visit(self, rows: Rows, phase: str, ask: Callable[[Row], Asked], use: Use, *, following: bool = False) -> None:
        """See Executor.visit; `use` is called on the last stage alone."""
        held = _Held(rows, self.device)
        self.link.connect()
        with self.without_gradients():
            for micro, sources in enumerate(rows.sources):
                flight.at(phase, micro + 1, sources)
                for near in range(micro, min(micro + 2, len(rows.sources))):
                    self._ask(Action(True, near), held)
                row = held[micro]
                asked = ask(row)
                received = self.link.receive(True, micro)
                with self.replay.following(row) if following else nullcontext():
                    found = self.read(row, asked.what, chosen_NC=asked.chosen_NC, received=received)
                if self.axis.is_last:
                    use(micro, row, found)
                else:
                    self.link.send(True, found["sent"], row.input_ids_BT.shape)
                held.drop(micro)
            self.link.finish()

    def name_metrics(self, objective: Objective, sums: Sums) -> None:
        """See Executor.name_metrics."""
        if not self.axis.is_last:
            for name in metrics_of(objective):
                sums.add(name, 0.0, 0.0)

    def bubble(self, plan: StepPlan) -> float:
        """The share of a step in which stages wait for each other, from the FLOPs of its rows."""
        stages, rank = self.axis.size, self.mesh.loss_rank
        orders = [order(self.schedule, place, stages, plan.micro_batches) for place in range(stages)]

        def cost(stage: int, action: Action) -> float:  # backward costs twice forward
            return self.costs[stage] * plan.costs[action.micro][rank] * (1.0 if action.forward else 2.0)

        return bubble(orders, cost)


class _Held:
    """Rows on the device, each built once, from when its shape is needed until it is dropped."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._made: dict[int, Row] = {}

    def __getitem__(self, micro: int) -> Row:
        if micro not in self._made:
            self._made[micro] = self._rows[micro].to(self._device)
        return self._made[micro]

    def drop(self, micro: int) -> None:
        del self._made[micro]
