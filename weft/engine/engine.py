"""The Engine: the one object that owns model and optimizer on a rank. Nothing outside this folder calls backward."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.cluster.process import Ranks
from weft.engine import nonfinite
from weft.engine.build import BuiltModel, balance_coefficient
from weft.engine.builder import build, build_optimizer_and_ema, describe, fill_weights, set_deterministic
from weft.engine.config import EngineConfig
from weft.engine.document import Document, metas, take
from weft.engine.metrics import Sums
from weft.engine.plan import DocumentMeta, StepPlan, plan_step, unread_tokens
from weft.engine.replay import Replay
from weft.engine.row import Row
from weft.engine.rows import RowBuilder, Rows
from weft.engine.sleep import PARTS, Part, Sleeper, held
from weft.errors import UserError
from weft.models.captured import check_readouts
from weft.models.facts import position_limit, rope_is_dynamic
from weft.models.flops import document_flops
from weft.objectives.balance import Balance
from weft.objectives.base import Batch, Objective, Terms, check_terms
from weft.objectives.readouts import Wanted
from weft.ops.exact import numerics
from weft.ops.head import Direction
from weft.optim.custom_optimizer import OnShards
from weft.optim.ema import Ema
from weft.optim.loss_scale import LossScale
from weft.optim.optimizer import clip_gradients, global_norm, set_learning_rate, unscale_gradients
from weft.parallel.fsdp import fsdp_modules, reduction
from weft.parallel.inputs import InputCasts
from weft.parallel.mesh import Mesh
from weft.parallel.parallelize import parallelize
from weft.parallel.units import Unit
from weft.planner.memory import Trained, capacity, check_draws, check_fits, local_ranks, memory_needs
from weft.sharding.load import LoadReport, Progress
from weft.telemetry import flight
from weft.telemetry.timing import waiting


@dataclass(frozen=True)
class StepResult:
    """grad_norm: global, before clipping. skipped: the step was not finite, and nothing was updated. loss_scale: this
    step's, with fp16. overflow: it was skipped because that was too large, which is no error."""

    grad_norm: float
    skipped: bool
    reason: str = ""
    loss_scale: float | None = None
    overflow: bool = False


class Engine:
    """A sharded model that takes steps over sets of documents. Every method is called by all ranks together."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: Ranks,
        *,
        weights: bool = True,
        fill: bool = True,
        progress: Progress | None = None,
        beside: Engine | None = None,
        readouts: Collection[str] = (),
    ) -> None:
        """weights: False builds shapes only (a dry run); such an engine plans and describes itself, no more.

        fill: False leaves the source's weights unread: the caller fills every shard (a resumed run); the frozen base of
        adapters, which no checkpoint holds, is read all the same. progress: told of
        bytes filled while weights are read. beside: another engine of these ranks, whose process groups serve this one,
        too, where its mesh is the same, as does its memory on the host. readouts: what an objective will ask for;
        UserError where this model does not have it.
        """
        set_deterministic(config.deterministic)
        self.config, self.ranks, self.device = config, ranks, ranks.device
        trained = config.purpose == "train"
        frame = describe(config, ranks, None if beside is None else beside.mesh)
        self.mesh: Mesh = frame.mesh
        self.precision, self.storage = frame.precision, frame.storage
        self.moments, self.state_dtypes = frame.moments, frame.state_dtypes
        self.built: BuiltModel = build(config, frame, weights=weights)
        self.module, self.lora = self.built.module, self.built.lora
        vocabulary = len(self.module.head.weight)
        check_readouts(self.module, vocabulary, Wanted.of(readouts), compiled=config.model.compile)
        self.balance = balance_coefficient(config.model, self.built.config, self.module)
        self.units: list[Unit] = parallelize(
            self.module, self.mesh, config.model, config.fsdp, self.precision, ranks.device
        )
        state = Trained(self.moments, config.optimizer.ema_decay is not None) if trained else None
        self.memory = memory_needs(self.module, self.units, self.precision, state)
        self.room = capacity(self.storage, local_ranks(ranks.world), ranks.assumed)
        if weights:
            check_fits(self.memory, self.room, self.mesh, config.fsdp, config.optimizer)
            if self.built.load is None and fill:
                check_draws(self.module, capacity(torch.device("cpu"), local_ranks(ranks.world)))
        self.input_casts = InputCasts(self.module, config.fsdp.cast_forward_inputs, self.precision.compute)
        self.loaded: LoadReport | None = fill_weights(config, frame, self.built, progress, fill) if weights else None
        self.optimizer: torch.optim.Optimizer | OnShards | None = None
        self.ema: Ema | None = None
        if trained and weights:
            self.optimizer, self.ema = build_optimizer_and_ema(config, frame, self.module)
        self.loss_scale: LossScale | None = None
        if trained and self.precision.compute == torch.float16:
            self.loss_scale = LossScale(config.fsdp.loss_scale, config.fsdp.loss_scale_interval)
        self.sleeper: Sleeper = Sleeper(self.device, self.storage, None if beside is None else beside.sleeper)
        self._nonfinite: str | None = None
        self._position_limit = position_limit(self.built.config.get_text_config())
        flops = self.built.flops
        self._cost = cache(partial(document_flops, flops))  # of a length; a step has many of the same
        experts = flops.experts if flops.expert else 0
        self._replay = Replay(self.module, experts, flops.experts_per_token, config.model.compile)
        rank, on_device = self.mesh.data_rank, self.device.type == "cuda"
        self._rows = RowBuilder(rank, self.built.layout, bool(self.balance), on_device, self._replay)

    # ------------------------------------------------------------ plan

    def meta(self, document: Document) -> DocumentMeta:
        """The document's metadata with its cost in this model."""
        return self.metas([document])[0]

    def metas(self, documents: Sequence[Document]) -> list[DocumentMeta]:
        """The metadata of each; those that are measured are not built for it."""
        return metas(documents, self._unread, self.cost)

    def _unread(self, length: int) -> int:
        """unread_tokens, all of which the balancing loss of experts counts; and they are of the length by which some
        models choose a rotary table."""
        limit = self._position_limit
        return unread_tokens(length, whole=bool(self.balance) or (limit is not None and length > limit))

    def cost(self, length: int) -> float:
        """Estimated FLOPs of a document of this length, forward and backward."""
        return self._cost(length)

    def plan(self, metadata: Sequence[DocumentMeta], *, budget: int | None = None) -> StepPlan:
        """Deal a step's documents to rows; the same on every rank, from the same metadata.

        budget: tokens of a row, instead of step.max_tokens_per_device.
        """
        return plan_step(
            metadata,
            ranks=self.mesh.data_ranks,
            budget=budget or self.config.step.max_tokens_per_device,
            layout=self.built.layout,
            shapes=self.config.step.shapes,
            alone_above=self._alone_above(metadata),
        )

    def _alone_above(self, metadata: Sequence[DocumentMeta]) -> int | None:
        """Longer documents need a row of their own, because their rotary table is another than their neighbours'."""
        text, limit = self.built.config.get_text_config(), self._position_limit
        if limit is not None and rope_is_dynamic(text) and max(meta.read for meta in metadata) > limit:
            raise UserError(
                f"rope_type dynamic keeps a state from call to call beyond {limit} tokens, so longer documents have no "
                f"one result: set data.max_length={limit} with data.long_documents=truncate or drop."
            )
        return limit

    def needs(self, plan: StepPlan) -> list[int]:
        """The step's indices of the documents that this rank will be asked for."""
        return sorted(index for row in plan.of_rank(self.mesh.data_rank) for index in row)

    def deal(self, documents: Sequence[Document]) -> tuple[StepPlan, dict[int, Document]]:
        """The plan of a step of these documents, and those that this rank needs; of measured ones no other is built."""
        plan = self.plan(self.metas(documents))
        return plan, take(documents, self.needs(plan))

    def rows(self, plan: StepPlan, documents: Mapping[int, Document], objective: Objective) -> Rows:
        """This rank's rows for accumulate(), on the host: they may be built in another thread."""
        return self._lay_out(plan, documents, objective.every_token)

    def _lay_out(self, plan: StepPlan, documents: Mapping[int, Document], every_token: bool) -> Rows:
        routed = self.config.replay and (self.lora is None or self.lora.switch.on)
        return self._rows.rows(plan, documents, every_token, routed)

    # ------------------------------------------------------------ forward and backward

    def accumulate(
        self, plan: StepPlan, documents: Mapping[int, Document] | Rows, objective: Objective
    ) -> dict[str, float | None]:
        """Add the gradient of one whole step and return its metrics, reduced over all data ranks.

        documents: at least those of `needs(plan)`, by index in the step, or rows() of them. Gradients are sums over the
        step's tokens divided once by `objective.normaliser(plan)`. Routes that documents carry are followed; the metric
        `routing/differing` says of how many (token, layer) pairs the router would have chosen otherwise.
        """
        assert self.optimizer is not None, "this engine was opened for inference"
        self.require_awake("parameters", "gradients")
        assert self.lora is None or self.lora.switch.on, "without its adapter nothing of this engine can be trained"
        normaliser = objective.normaliser(plan)
        balance_factor = self.balance / plan.totals.tokens
        sums, losses = Sums(), []
        sums.add("_wrong", 0.0, 1.0)
        flight.planned(plan.fingerprint())
        rows = documents if isinstance(documents, Rows) else self.rows(plan, documents, objective)
        shares_E = self._expert_shares(plan, rows) if self._balances_steps else None
        routed = self.config.replay and any(meta.routed for meta in plan.documents)
        for micro in range(plan.micro_batches):
            flight.at("rows", micro + 1, rows.sources[micro])
            row = rows[micro].to(self.device)
            upstream_N = objective.upstream(row.weights_N)
            direction = None if upstream_N is None else Direction(upstream_N)
            flight.at("forward", micro + 1)
            last = micro == plan.micro_batches - 1
            with (
                reduction(self.module, self.config.fsdp.reduce, last=last),
                self._replay.following(row) as seen_routes,
                numerics(self.config.exact),
            ):
                terms = self._forward(row, objective, direction, shares_E)
                flight.at("backward", micro + 1)
                loss, seen = terms.loss_sum / normaliser, terms.loss_sum.detach()
                if terms.balance_sum is not None:
                    loss, seen = loss + terms.balance_sum * balance_factor, seen + terms.balance_sum.detach()
                    sums.add("aux_loss", terms.balance_sum, row.real_tokens)
                (loss * self._scale).backward()
            losses.append(seen)
            for flag in () if direction is None else direction.wrong:
                sums.add("_wrong", flag, 1.0)
            if routed:
                sums.add("routing/differing", *seen_routes.share(self.device))
            for name, (total, weight) in terms.metrics.items():
                sums.add(name, total, weight)
        metrics = self._reduce(plan, rows.sources, sums, losses)
        if metrics.pop("_wrong") and self._nonfinite is None:
            raise UserError(
                f"train.objective: upstream() of {type(objective).__name__} is not the gradient of its loss by the "
                "logprobs, up to one factor: return None there, and it is computed from the loss."
            )
        return metrics

    def _reduce(
        self, plan: StepPlan, sources: list[list[str]], sums: Sums, losses: list[Tensor]
    ) -> dict[str, float | None]:
        """One reduction for all metrics; a loss that is not finite anywhere is known everywhere afterwards.

        So are plans that are not the same on all ranks: their digests take part.
        """
        flight.at("reduce", documents=[source for row in sources for source in row])
        finite = torch.stack(losses).isfinite()
        sums.add("_nonfinite", (~finite).sum(), 1.0)
        metrics = sums.reduce(self.mesh.data_group, alike={"the plan of the step": plan.fingerprint()})
        if metrics.pop("_nonfinite"):
            self._nonfinite = nonfinite.name_losses(sources, (~finite).nonzero().flatten().tolist())
        return metrics

    @property
    def _balances_steps(self) -> bool:
        return bool(self.balance) and self.config.model.router_aux_loss == "step"

    def _expert_shares(self, plan: StepPlan, rows: Rows) -> Tensor:
        """[E]: how many of a token's choices fall on each expert, on average over the whole step; collective.

        A forward of every row, on the random numbers (the dropout of adapters) that the forward with a gradient draws.
        """
        counts = []
        devices = [self.device] if self.device.type == "cuda" else []
        with self._without_gradients(evaluating=False), torch.random.fork_rng(devices):
            for micro in range(plan.micro_batches):
                flight.at("count", micro + 1, rows.sources[micro])
                row = rows[micro].to(self.device)
                row = replace(row, selected_N=row.selected_N[:0], targets_N=row.targets_N[:0])  # nothing for the head
                balance = replace(self._balance(row), counting=True)
                with self._replay.following(row):
                    counts.append(self._read(row, frozenset(), balance=balance)["choices"].double())
        total_E = torch.stack(counts).sum(0)
        with waiting():
            dist.all_reduce(total_E, group=self.mesh.data_group)
        return (total_E / plan.totals.tokens).float()

    def _balance(self, row: Row, shares_E: Tensor | None = None) -> Balance:
        assert row.owner_M is not None
        return Balance(row.owner_M, len(row.documents), self.built.flops.experts_per_token, shares_E)

    def _forward(self, row: Row, objective: Objective, direction: Direction | None, shares_E: Tensor | None) -> Terms:
        balance = self._balance(row, shares_E) if self.balance else None
        readouts = self._read(row, objective.readouts, direction, balance, chosen_tokens(objective, row))
        balance_sum = readouts.pop("balance", None)
        batch = Batch(readouts, row.weights_N, row.document_N, row.documents, row.arrays)
        return replace(check_terms(objective(batch), objective), balance_sum=balance_sum)

    def _read(
        self,
        row: Row,
        what: frozenset[str],
        direction: Direction | None = None,
        balance: Balance | None = None,
        chosen_NC: Tensor | None = None,
    ) -> dict[str, Tensor]:
        bounds = row.bounds if self.built.uses_bounds else None
        return self.module(
            row.input_ids_BT, row.position_ids_BT, bounds, row.selected_N, row.targets_N, what, direction, balance,
            chosen_NC,
        )  # fmt: skip

    # ------------------------------------------------------------ without gradients

    @contextmanager
    def _without_gradients(self, *, evaluating: bool = True) -> Iterator[None]:
        """Forwards, as in evaluation unless told; afterwards the module is as if there had been none."""
        self.require_awake("parameters")
        was_training = self.module.training
        self.module.train(was_training and not evaluating)
        try:
            with torch.no_grad(), numerics(self.config.exact):
                yield
        finally:
            self.module.train(was_training)
            for unit in fsdp_modules(self.module):
                unit.reshard()  # no backward will: the optimizer would step shards behind gathered weights' back

    def evaluate(self, plan: StepPlan, documents: Mapping[int, Document], objective: Objective) -> Sums:
        """What the objective measures of a plan's documents, summed in fp64 over this rank's rows; nothing is trained.

        documents: those of `needs(plan)`. The sums are not yet those of all ranks.
        """
        sums, rows = Sums(), self.rows(plan, documents, objective)
        with self._without_gradients():
            for micro in range(plan.micro_batches):
                flight.at("evaluate", micro + 1, rows.sources[micro])
                row = rows[micro].to(self.device)
                found = self._read(row, objective.readouts, chosen_NC=chosen_tokens(objective, row))
                exact = {name: v.double() if v.is_floating_point() else v for name, v in found.items()}
                batch = Batch(exact, row.weights_N.double(), row.document_N, row.documents, row.arrays)
                for name, (total, weight) in check_terms(objective(batch), objective).metrics.items():
                    sums.add(name, total, weight)
        return sums

    def readout(
        self, plan: StepPlan, documents: Mapping[int, Document], what: Sequence[str] = ("logprob",)
    ) -> dict[int, dict[str, Tensor]]:
        """Per-token quantities of this rank's documents, in their order: index -> name -> [T] fp32 on the CPU.

        Entry t is about token t given those before it; entry 0, which nothing predicts, is 0. Routes that documents
        carry are followed.
        """
        out: dict[int, dict[str, Tensor]] = {}
        rows = self._lay_out(plan, documents, every_token=True)
        with self._without_gradients():
            for micro in range(plan.micro_batches):
                flight.at("readout", micro + 1, rows.sources[micro])
                row = rows[micro].to(self.device)
                with self._replay.following(row):
                    found = self._read(row, frozenset(what))
                lengths = [len(documents[index]) for index in row.documents]
                firsts = torch.tensor([0, *lengths]).cumsum(0)
                places = firsts[row.document_N.cpu()] + row.token_N.cpu()
                for name, values in found.items():
                    joined = torch.zeros(sum(lengths)).index_copy(0, places, values.float().cpu())
                    for index, own in zip(row.documents, joined.split(lengths), strict=True):
                        out.setdefault(index, {})[name] = own
        return dict(sorted(out.items()))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model inside: what readout() says there is of the weights at model.path, as before any training.

        UserError where modules are trained whole, because their own weights are not kept.
        """
        assert self.lora is not None, "this engine has no adapters"
        if self.lora.trained:
            raise UserError(
                f"the base model cannot be read through an adapter that replaces {', '.join(self.lora.trained)} "
                "(lora.modules_to_save): open another engine for it, or adapt these with lora.targets."
            )
        with self.lora.switch.off():
            yield

    # ------------------------------------------------------------ optimizer

    def apply(self, lr: float) -> StepResult:
        """Clip and step, or, where loss or gradient is not finite, drop the gradient and say so; all ranks agree."""
        assert self.optimizer is not None, "this engine was opened for inference"
        self.require_awake(*PARTS)
        flight.at("optimizer")
        scale = self._scale
        named = list(self.module.named_parameters())
        unscale_gradients(named, scale)
        norm = clip_gradients(named, self.config.optimizer.max_grad_norm)
        overflow, reason = False, self._nonfinite or ""
        if not reason and not math.isfinite(norm):
            overflow = self.loss_scale is not None and self.loss_scale.overflow()
            reason = f"fp16 overflow at loss scale {scale:g}" if overflow else nonfinite.name_gradients(self.module)
        if not reason:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update()
            if self.loss_scale is not None:
                self.loss_scale.succeed()
        self.drop_gradients()
        return StepResult(norm, bool(reason), reason, None if self.loss_scale is None else scale, overflow)

    @property
    def _scale(self) -> float:
        """What the gradients of this step are multiplied by until apply()."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    # ------------------------------------------------------------ sleep

    @property
    def asleep(self) -> dict[Part, int]:
        """Bytes of this rank's device that each part has given up."""
        return self.sleeper.asleep

    def sleep(self, *parts: Part) -> int:
        """Move these parts, by default all, to the host until wake(), for something else to use the device's memory.

        parameters; optimizer, its state and the average of the weights; gradients, those accumulated. What is asleep
        already, or lives on the host anyway (fsdp.cpu_offload), stays where it is. Returns the bytes that this rank
        gave up.
        """
        flight.at("sleep")
        for unit in fsdp_modules(self.module):
            unit.reshard()
        wanted = [part for part in parts or PARTS if part not in self.asleep]
        tensors = {part: held(part, self.module, self.optimizer, self.ema) for part in wanted}
        return sum(self.sleeper.sleep(part, of_part) for part, of_part in tensors.items())

    def wake(self, *parts: Part) -> int:
        """Bring these parts back, by default all, bit for bit; the bytes. What is awake stays."""
        flight.at("wake")
        return sum(self.sleeper.wake(part) for part in parts or PARTS if part in self.asleep)

    def require_awake(self, *parts: Part) -> None:
        """RuntimeError where one of these parts is asleep."""
        asleep = [part for part in parts if part in self.asleep]
        if asleep:
            raise RuntimeError(f"the engine's {' and '.join(asleep)} are asleep: call wake() before this")

    # ------------------------------------------------------------ tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace runtime name, whole tensor) of every parameter and persistent buffer, ties once per name.

        Gathered one by one on all ranks; the tensor is on the rank's device in its stored dtype.
        """
        self.require_awake("parameters")
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield name, whole(tensor)

    def gradient_norm(self) -> float:
        """The global norm of the gradient accumulated so far."""
        return global_norm(self.module.parameters()) / self._scale

    def drop_gradients(self) -> None:
        """Forget what has been accumulated."""
        assert self.optimizer is not None, "this engine was opened for inference"
        self.optimizer.zero_grad(set_to_none=True)
        self._nonfinite = None

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """(name, whole gradient) of every parameter, None where nothing used it."""
        for name, parameter in self.module.named_parameters():
            yield name, None if parameter.grad is None else whole(parameter.grad) / self._scale


def chosen_tokens(objective: Objective, row: Row) -> Tensor | None:
    """[N, C] the tokens whose logits an objective asks for. UserError where they are no such thing."""
    if "chosen_logits" not in objective.readouts:
        return None
    ask: Any = objective
    ids, count = ask.token_ids(row.targets_N, row.arrays), len(row.targets_N)
    if not count and isinstance(ids, Tensor) and ids.ndim < 2:  # of a row without documents, which has no arrays
        return row.targets_N.new_empty(0, 0)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2 or len(ids) != count:
        what = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(
            f"train.objective: token_ids() of {type(objective).__name__} gives {what}, and has to give int64 of shape "
            f"[{count}, tokens]: for each prediction the same number of tokens."
        )
    return ids.to(row.targets_N)


def whole(tensor: Tensor | nn.Parameter) -> Tensor:
    """The full tensor behind a shard; collective."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
