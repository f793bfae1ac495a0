"""Runs forwards and backwards of a model whose layers are split into stages over several ranks (mesh.pp), a row at a
time.

Every rank builds every row of its documents, so that all ranks know the shapes of messages between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from weft.engine.batch.replay import RouteCounts
from weft.engine.batch.rows import Row, StepRows
from weft.engine.build import BuiltModel
from weft.engine.config import EngineConfig
from weft.engine.executor import Executor, ForwardRequest, ForwardResult, LossScaling, Use
from weft.engine.losses.base import Loss
from weft.engine.losses.check import metrics_of
from weft.engine.metrics import MetricSums
from weft.engine.step_plan.plan import StepPlan
from weft.launch import flight
from weft.launch.consistency import ReplicaChecksum
from weft.launch.timing import waiting
from weft.ops.exact import numerics
from weft.parallel.fsdp import end_backward, reduce_now, reduce_when
from weft.parallel.mesh import Mesh
from weft.parallel.pp.communication import P2PCommunicator, P2PMessage
from weft.parallel.pp.model import Pipeline
from weft.parallel.pp.schedule import DELAYED, Action, Placement, bubble, order
from weft.parallel.pp.weight_gradients import Delayed, WeightGradients


@dataclass(frozen=True)
class _Done:
    """A row in a stage between its forward and its backward. received: None in the first stage. sent: None in the last
    stage, which has `forwarded`. routes: of the stage's layers. balance, balance_loss: auxiliary loss of the stage's
    experts; None in the last stage."""

    row: Row
    received: Tensor | None
    sent: Tensor | None
    forwarded: ForwardResult | None
    routes: RouteCounts
    balance: Tensor | None = None
    balance_loss: Tensor | None = None


class PipelineExecutor(Executor):
    """Runs the stages of one rank. Losses, metrics and readouts come from the last stage."""

    staged = True

    def __init__(
        self,
        config: EngineConfig,
        built: BuiltModel,
        mesh: Mesh,
        device: torch.device,
        link: P2PCommunicator,
        pipeline: Pipeline,
        costs: Sequence[float],
    ) -> None:
        """costs: of each stage, in any unit."""
        super().__init__(config, built, mesh, device)
        self.link, self.axis, self.schedule, self.costs = link, link.axis, config.mesh.pp_schedule, costs
        self.placement = pipeline.placement
        self.has_loss = self.placement.last == self.axis.rank
        self.weights = WeightGradients(self.module) if self.schedule in DELAYED else None
        # The root is a unit of the model's first stage if this rank holds that stage, else of the rank's last stage.
        self.units: list[list[FSDPModule]] = [[] for _ in range(pipeline.placement.chunks)]
        for name, child in self.module.named_modules():
            if isinstance(child, FSDPModule):
                stage = pipeline.stage_of(name, self.module.facts.layers)
                if name == "" and self.axis.rank != 0:
                    stage = pipeline.placement.stage_of(self.axis.rank, pipeline.placement.chunks - 1)
                self.units[pipeline.placement.chunk_of(stage)].append(child)

    def train(
        self, rows: StepRows, objective: Loss, scaling: LossScaling, sums: MetricSums, *, routed: bool
    ) -> tuple[list[Tensor], list[ReplicaChecksum]]:
        """See Executor.train."""
        micro_batches = len(rows.sources)
        self.link.connect()
        losses, checksums = [torch.zeros((), device=self.device)] * micro_batches, list[ReplicaChecksum]()
        actions = order(self.schedule, self.placement, self.axis.rank, micro_batches)
        cache = _RowCache(rows, self.device, self.placement, self.axis.rank)
        between: dict[tuple[int, int], _Done] = {}
        delayed: dict[tuple[int, int], Delayed] = {}
        for index, action in enumerate(actions):
            for upcoming in actions[index : index + 2]:  # the next action's input arrives while this one computes
                self._ask(upcoming, cache)
            micro, key = action.micro, (action.chunk, action.micro)
            flight.enter(action.kind, micro + 1, rows.sources[micro])
            end_backward(self.module, action == actions[-1])
            if action.kind == "forward":
                checksums += cache[micro].checksums if action.chunk == 0 else ()
                between[key] = self._forward(action, cache[micro], objective, scaling)
            elif action.kind == "weights":
                self.compute_weight_gradients(action, delayed.pop(key), last=micro == micro_batches - 1)
            else:
                finished = between.pop(key)
                delayed[key] = self.run_backward(action, finished, last=micro == micro_batches - 1)
                losses[micro] = losses[micro] + self._account_stage(finished, sums)
                cache.drop(micro)
                if routed:
                    sums.add("routing/differing", *finished.routes.share(self.device))
        self.link.finish()
        self.name_metrics(objective, sums)
        return losses, checksums

    def _account_stage(self, done: _Done, sums: MetricSums) -> Tensor | float:
        """This stage's part of a row's loss sum; adds the row's metrics to `sums`."""
        if done.forwarded is not None:
            self.add_metrics(done.forwarded, sums)
            return done.forwarded.loss_sum
        if not self.balance:
            return 0.0
        aux_loss = 0.0 if done.balance is None else done.balance.detach()
        sums.add("aux_loss", aux_loss, 0.0)  # the last stage counts the tokens
        return aux_loss

    def _stage(self, action: Action) -> int:
        return self.placement.stage_of(self.axis.rank, action.chunk)

    def _ask(self, action: Action, cache: _RowCache) -> None:
        if action.kind != "weights":
            message = P2PMessage(action.kind == "forward", self._stage(action), action.micro)
            self.link.request(message, cache[action.micro].input_ids_BT.shape)

    def _forward(self, action: Action, row: Row, objective: Loss, scaling: LossScaling) -> _Done:
        stage = self._stage(action)
        received = self.link.receive(P2PMessage(True, stage, action.micro))
        if received is not None:
            received.requires_grad_()
        with self.replay.following(row.routes, self.multiplicity_of(row)) as routes, numerics(self.config.exact):
            if stage == self.placement.stages - 1:
                result = self.forward(row, objective, scaling, action.micro, received, action.chunk)
                return _Done(row, received, None, result, routes)
            balance_inputs = self.balance_inputs(row, scaling, action.micro)
            outputs = self.read(row, frozenset(), balance=balance_inputs, received=received, chunk=action.chunk)
        self.link.send(stage, True, action.micro, outputs["sent"], row.input_ids_BT.shape)
        balance = outputs.get("balance")
        loss = None if balance is None else self.balance_loss(balance, scaling)
        return _Done(row, received, outputs["sent"], None, routes, balance, loss)

    def run_backward(self, action: Action, done: _Done, *, last: bool) -> Delayed:
        """Run a backward; returns the delayed computation of weight gradients. last: whether it is the chunk's last
        micro-batch."""
        stage = self._stage(action)
        gradient = self.link.receive(P2PMessage(False, stage, action.micro))
        when = self.config.fsdp.reduce if self.weights is None else "later"
        reduce_when(self.module, when, last=last, units=self.units[action.chunk])
        with self.replay.following(done.row.routes), numerics(self.config.exact):  # for recomputed layers
            if done.forwarded is not None:
                done.forwarded.loss.backward()
            else:
                assert done.sent is not None
                losses = [] if done.balance_loss is None else [done.balance_loss]
                torch.autograd.backward([done.sent, *losses], [gradient, *[None for _ in losses]])
        if done.received is not None:
            self.link.send(stage, False, action.micro, done.received.grad, done.row.input_ids_BT.shape)
        return [] if self.weights is None else self.weights.take()

    def compute_weight_gradients(self, action: Action, delayed: Delayed, *, last: bool) -> None:
        """Compute the weight gradients that a backward delayed. After the last micro-batch of a chunk, reduce all of
        the chunk's gradients."""
        with torch.no_grad(), numerics(self.config.exact):
            for add in delayed:
                add()
        reduce_when(self.module, self.config.fsdp.reduce, last=last, units=self.units[action.chunk])
        reduce_now(self.module)

    def visit(
        self, rows: StepRows, phase: str, ask: Callable[[Row], ForwardRequest], use: Use, *, following: bool = False,
        evaluating: bool = True,
    ) -> None:  # fmt: skip
        """See Executor.visit. `use` is called in the last stage only or, when choices of experts are read, in all."""
        cache = _RowCache(rows, self.device, self.placement, self.axis.rank)
        self.link.connect()
        actions = order(self.schedule, self.placement, self.axis.rank, len(rows.sources))
        forwards = [action for action in actions if action.kind == "forward"]
        with self.without_gradients(evaluating=evaluating):
            for index, action in enumerate(forwards):
                micro, stage = action.micro, self._stage(action)
                flight.enter(phase, micro + 1, rows.sources[micro])
                for upcoming in forwards[index : index + 2]:
                    self._ask(upcoming, cache)
                row = cache[micro]
                request = ask(row)
                received = self.link.receive(P2PMessage(True, stage, micro))
                with self.replay.following(row.routes) if following else nullcontext():
                    readouts = self.read(
                        row, request.readouts, balance=request.balance, chosen_NC=request.chosen_NC, received=received,
                        chunk=action.chunk, comparisons=request.comparisons,
                    )  # fmt: skip
                last = stage == self.placement.stages - 1
                if last or request.balance is not None:
                    use(micro, row, readouts)
                if not last:
                    self.link.send(stage, True, micro, readouts["sent"], row.input_ids_BT.shape)
                cache.drop(micro)
            self.link.finish()

    def sum_over_stages(self, sums: Sequence[Tensor]) -> None:
        """See Executor.sum_over_stages."""
        joined = torch.cat([tensor.flatten() for tensor in sums])
        with waiting():
            dist.all_reduce(joined, group=self.axis.group)
        for tensor, part in zip(sums, joined.split([tensor.numel() for tensor in sums]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def name_metrics(self, objective: Loss, sums: MetricSums) -> None:
        """See Executor.name_metrics."""
        if not self.has_loss:
            for name in metrics_of(objective):
                sums.add(name, 0.0, 0.0)

    def bubble(self, plan: StepPlan) -> float:
        """The share of a step in which ranks wait for each other, from the FLOPs of its rows."""
        ranks, loss_rank = self.placement.ranks, self.mesh.loss_rank
        orders = [order(self.schedule, self.placement, rank, plan.micro_batches) for rank in range(ranks)]

        def cost(stage: int, action: Action) -> float:  # backward costs twice forward, half of it for weights
            full_backward = action.kind == "backward" and self.weights is None
            return self.costs[stage] * plan.costs[action.micro][loss_rank] * (2.0 if full_backward else 1.0)

        return bubble(orders, self.placement, cost)


class _RowCache:
    """Rows on the device. Each is built once, when its shape is first needed, and kept until each chunk of layers has
    dropped it."""

    def __init__(self, rows: StepRows, device: torch.device, placement: Placement, rank: int) -> None:
        self._rows, self._device, self._images = rows, device, rank == placement.rank_of(0)
        self._uses_left = dict.fromkeys(range(len(rows.sources)), placement.chunks)
        self._built: dict[int, Row] = {}

    def __getitem__(self, micro: int) -> Row:
        if micro not in self._built:
            row = self._rows[micro]
            self._built[micro] = (row if self._images else replace(row, media=None, placeholder=False)).to(self._device)
        return self._built[micro]

    def drop(self, micro: int) -> None:
        self._uses_left[micro] -= 1
        if not self._uses_left[micro]:
            del self._built[micro]
