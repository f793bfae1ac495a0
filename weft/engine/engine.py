"""The Engine owns model and optimizer of a rank. Nothing outside this folder calls backward."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.engine import nonfinite
from weft.engine.batch.document import Document, DocumentMeta, take
from weft.engine.batch.rows import Row, RowBuilder, StepRows
from weft.engine.builder import assemble
from weft.engine.config import EngineConfig
from weft.engine.executor import WRONG, Executor, ForwardRequest, LossScaling
from weft.engine.experts import RouterBiases
from weft.engine.losses.base import Batch, Loss
from weft.engine.losses.check import check_normaliser, check_terms, chosen_tokens, comparisons_of
from weft.engine.metrics import MetricSums, Reduced
from weft.engine.optim.adamw import FusedAdamW
from weft.engine.optim.early_norms import EarlyNorms
from weft.engine.optim.optimizer import (
    OtherStages,
    clip_gradients,
    clipping_divisor,
    clipping_factor,
    device_norm,
    global_norm,
    multiply_gradients,
    set_learning_rate,
    unscale_gradients,
)
from weft.engine.pipeline_executor import PipelineExecutor
from weft.engine.replicas import ReplicaCheck
from weft.engine.sleep import PARTS, Offloader, Part, tensors_of
from weft.engine.step_plan.plan import StepPlan, StepPlanner
from weft.errors import RanksDisagreeError, UserError
from weft.launch import flight
from weft.launch.consistency import ReplicaChecksum
from weft.launch.process import Ranks
from weft.launch.simulated import host_memory, on_host, read
from weft.models.embedding_noise import StepNoise
from weft.models.quantised import parts_on_meta
from weft.models.readouts import ReadoutSpec
from weft.models.vision import vision_parts
from weft.parallel.device_copies import DeviceCopies
from weft.parallel.fsdp import UsedParameters, fsdp_modules, reshard
from weft.parallel.mesh import Mesh, full_tensor, local_shard
from weft.parallel.pp.communication import P2PCommunicator, gather_over_stages, sum_shared_gradients
from weft.parallel.quantise import DequantisedTensors, stored_tensors
from weft.parallel.shards.cuts import AnyShardSpec, ShardSpecs
from weft.parallel.shards.layout import TensorMapping
from weft.parallel.shards.load import Progress
from weft.parallel.shards.walker import StagePeers, check_stream, walk
from weft.parallel.tp.divide import random_difference, sum_partial_gradients


@dataclass(frozen=True)
class StepResult:
    """The outcome of apply(). grad_norm: global, before clipping. skipped: loss or gradient was not finite, and nothing
    was updated. loss_scale: of this step, with fp16. overflow: the step was skipped because the loss scale was too
    large; this is not an error. metrics: as accumulate() returns them, if apply() read them."""

    grad_norm: float
    skipped: bool
    reason: str = ""
    loss_scale: float | None = None
    overflow: bool = False
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Unread:
    """The sums of a step on the device, which the host has not read yet. sources: documents by micro-batch. finite:
    whether each loss is."""

    reduced: Reduced
    sources: list[list[str]]
    finite: Tensor
    checksums: list[ReplicaChecksum]


def _reason_apart(config: EngineConfig) -> str:
    """Why documents of this run cannot share tokens; empty if they can."""
    if config.lora is not None and config.lora.dropout:
        return "lora.dropout draws other random numbers for every document"
    if config.neftune_noise_alpha is not None:
        return "the noise on embeddings differs from document to document"
    return ""


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
        shares_with: Engine | None = None,
        readouts: Collection[str] = (),
    ) -> None:
        """weights: False builds shapes only (a dry run); such an engine can only plan and describe itself.

        fill: False leaves the source's weights unread, for a caller that fills every shard (a resumed run). The frozen
        base of adapters is still read, because no checkpoint holds it. progress: called with the bytes filled.
        shares_with: another engine of these ranks, whose host memory is used, and whose process groups are used if the
        mesh is the same. readouts: the names that losses will read; raises UserError if the model lacks one.
        """
        mesh = None if shares_with is None else shares_with.mesh
        state = assemble(config, ranks, weights=weights, fill=fill, progress=progress, mesh=mesh, readouts=readouts)
        spec, built, sharded = state.spec, state.built, state.sharded
        config = spec.config
        self.config, self.ranks, self.device = config, ranks, ranks.tensors_on
        self.mesh: Mesh = spec.mesh
        self.precision, self.storage = spec.precision, spec.storage
        self.moments, self.state_dtypes = spec.moments, spec.state_dtypes
        self.built = built
        if sharded.pipeline is not None:
            self.built = replace(built, whole_tensors=sharded.pipeline.tensors, adapter_config=sharded.adapter_config)
        self.module, self.lora, self.balance = built.module, built.lora, built.balance
        self.units, self.memory, self.room = sharded.units, sharded.memory, sharded.room
        self.input_casts, self.divided = sharded.input_casts, sharded.divided
        self.loaded = state.loaded
        self.optimizer, self.ema, self.loss_scale = state.optimizer, state.ema, state.loss_scale
        offloader = None if shares_with is None else shares_with.offloader
        self.offloader: Offloader = Offloader(self.device, self.storage, offloader)
        # fsdp.cpu_offload=optimizer: both threads run during backward and the update.
        self.device_copies: DeviceCopies | None = None
        self._early_norms: EarlyNorms | None = None
        self._nonfinite: str | None = None
        self._complete = False  # whether gradients are summed over tp and pp
        # On an accelerator, a wait in the middle of a step leaves it idle while the host prepares the update.
        on_device = ranks.device.type == "cuda" and not config.fsdp.cpu_offload
        self.reads_once = on_device and isinstance(self.optimizer, FusedAdamW) and self.loss_scale is None
        self._unread: _Unread | None = None
        self.context, self.budget = sharded.context, config.step.max_tokens_per_device
        multiple = self.mesh.tp.size if self.mesh.tp is not None and sharded.divided.sequence else 1
        data_rank, has_cp = (self.mesh.loss_rank, self.mesh.loss_ranks), self.mesh.cp_size > 1
        self.planner = StepPlanner(
            config.step, data_rank, built, sharded.context, multiple, has_cp=has_cp,
            end_marked=config.score is not None and config.score.end_marked, apart=_reason_apart(config),
        )  # fmt: skip
        self.pipeline, self.stages = sharded.pipeline, sharded.stages
        self._other_stages: OtherStages | None = None
        self._executor: Executor
        if self.mesh.pp is None or sharded.stages is None or sharded.pipeline is None:
            self._executor = Executor(config, built, self.mesh, self.device)
        else:
            wide = torch.float32 if sharded.stages.interface.wide else self.precision.compute
            width = built.config.get_text_config().hidden_size
            link = P2PCommunicator(self.mesh.pp, sharded.pipeline.placement, width, wide, self.device, multiple)
            self._executor = PipelineExecutor(
                config, built, self.mesh, self.device, link, sharded.pipeline, sharded.stages.costs
            )
            self._other_stages = OtherStages(self.mesh.pp.group, self.tied_copies)
        rate = config.model.router_bias_rate
        self._router_biases = None if rate is None else RouterBiases(self.module, self._executor.load, rate)
        on_device, replay = self.device.type == "cuda", self._executor.replay
        self._rows = RowBuilder(
            self.mesh.loss_rank, self.mesh.model_parallel_rank, sharded.context, built.layout, bool(self.balance),
            on_device, replay, built.vision, self.module.base,
        )  # fmt: skip
        self.lent_storages: frozenset[int] = frozenset()  # addresses of storages that a copy of the model also reads
        self._replicas = ReplicaCheck(self.module, self.divided.cuts, self._tied())
        self._used: UsedParameters | None = None  # on one data rank, a plain loop's gradients are there or not
        self._used_by_all: Tensor | None = None  # [parameters] on the device: by how many ranks in this step
        if self.optimizer is not None and self.mesh.loss_ranks > 1:
            towers = vision_parts(self.module.base, self.module.facts)
            self._used = UsedParameters(self.module, list(self.whole_parameters()), towers)
        if self.optimizer is not None and config.fsdp.cpu_offload == "optimizer":
            self.device_copies = DeviceCopies(self.module, self.device)
            if self.loss_scale is None:  # else gradients are unscaled after backward
                late = {*self.divided.partial, *self._tied()}
                self._early_norms = EarlyNorms(self.module, self.divided.cuts, late)

    def _tied(self) -> dict[str, tuple[int, int]]:
        """For each parameter that several stages hold: (this stage's index among them, their number)."""
        if self.pipeline is None or self.mesh.pp is None:
            return {}
        rank, holders = self.mesh.pp.rank, self.pipeline.holders
        return {name: (holders[name].index(rank), len(holders[name])) for name in self.pipeline.shared_params(rank)}

    @property
    def tied_copies(self) -> frozenset[str]:
        """Tensors of this rank's stage that another stage saves and counts."""
        if self.pipeline is None or self.mesh.pp is None:
            return frozenset()
        return self.pipeline.tied_copies(self.mesh.pp.rank)

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter of the whole model by name, tied ones once; on meta if this rank has a pipeline stage."""
        if self.pipeline is None:
            return dict(self.module.named_parameters())
        return {name: self.pipeline.tensors[name] for name in self.pipeline.parameter_names}

    @property
    def missing_params(self) -> frozenset[str]:
        """Tensors of the model that this rank's stage does not hold."""
        if self.pipeline is None or self.mesh.pp is None:
            return frozenset()
        return self.pipeline.missing_params(self.mesh.pp.rank)

    # ------------------------------------------------------------ plan

    def plan(self, metadata: Sequence[DocumentMeta], *, budget: int | None = None) -> StepPlan:
        """Assign a step's documents to rows: a pure function of the metadata, equal on every rank.

        budget: the most tokens of a rank's row; default Engine.budget, which is step.max_tokens_per_device.
        """
        return self.planner.plan(metadata, budget or self.budget)

    def plan_step(self, documents: Sequence[Document]) -> tuple[StepPlan, dict[int, Document]]:
        """The plan of a step of these documents, and this rank's documents by index. Other measured documents are not
        built."""
        with on_host(), host_memory():
            plan = self.plan(self.planner.metadata(documents))
            return plan, take(documents, self.planner.local_documents(plan))

    # Former names, for programs that use them.
    deal = plan_step

    def meta(self, document: Document) -> DocumentMeta:
        return self.planner.metadata([document])[0]

    def metas(self, documents: Sequence[Document]) -> list[DocumentMeta]:
        return self.planner.metadata(documents)

    def needs(self, plan: StepPlan) -> list[int]:
        return self.planner.local_documents(plan)

    def rows(
        self, plan: StepPlan, documents: Mapping[int, Document], objective: Loss, step: int | None = None
    ) -> StepRows:
        """This rank's rows for accumulate(), on the host. May be called in another thread. step: its number in the run,
        which seeds the noise of EngineConfig.neftune_noise_alpha; None for rows without noise."""
        hidden = ReadoutSpec.parse(objective.readouts).hidden
        if hidden and self.divided.sequence:
            raise UserError(
                f"{type(objective).__name__} reads `hidden/{hidden[0]}`, but ranks of mesh.tp divide a row's tokens "
                "between blocks. Pass the loss's readouts when the engine is created: Engine(..., "
                "readouts=loss.readouts)."
            )
        alpha = self.config.neftune_noise_alpha
        noise = None if alpha is None or step is None else StepNoise(alpha, self.config.seed, step)
        return self._lay_out(plan, documents, objective.every_token, noise)

    def _lay_out(
        self, plan: StepPlan, documents: Mapping[int, Document], every_token: bool, noise: StepNoise | None = None
    ) -> StepRows:
        routed = self.config.replay and (self.lora is None or self.lora.switch.on)
        rows, simulation = self._rows.rows(plan, documents, every_token, routed, noise), self.ranks.simulated
        if simulation is None:
            return rows

        def build(micro_batch: int) -> Row:
            with on_host(), host_memory():
                row = rows[micro_batch]
            return row.moved(simulation.on_device)

        return replace(rows, build=build)

    def bubble(self, plan: StepPlan) -> float:
        """The share of a step in which stages of mesh.pp wait for each other, from the FLOPs of this rank's rows."""
        executor = self._executor
        return executor.bubble(plan) if isinstance(executor, PipelineExecutor) else 0.0

    # ------------------------------------------------------------ forward and backward

    def check_sums(self, objective: Loss) -> None:
        """Check on the next rows, until one is conclusive, that this loss is a sum: with its documents twice, a row
        must give the same gradients. The check makes additional calls of the loss. Raises UserError if the loss is not
        a sum (weft/engine/losses/check.py)."""
        self._executor.unchecked.add(type(objective))

    def accumulate(
        self, plan: StepPlan, documents: Mapping[int, Document] | StepRows, objective: Loss
    ) -> dict[str, float | None]:
        """Add the gradient of one whole step and return its metrics, reduced over all data ranks.

        documents: at least those of planner.local_documents(plan), by index in the step, or rows() of them. With noise
        on embeddings rows() are required (ValueError). The gradient is a sum over the step's tokens, divided once by
        objective.normaliser(plan). Routers follow the documents' routes. The metric `routing/differing` is the share of
        (token, layer) pairs for which the router alone would have chosen other experts.
        """
        unread = self._accumulate(plan, documents, objective)
        return self._metrics(unread, read(unread.reduced.vector, unread.reduced.planned))

    def _accumulate(self, plan: StepPlan, documents: Mapping[int, Document] | StepRows, objective: Loss) -> _Unread:
        """accumulate() up to the point at which the host waits for the device."""
        assert self.optimizer is not None, "this engine was opened for inference"
        self.require_awake("parameters", "gradients")
        self._prepare_forwards()
        assert not self._complete, (
            "the gradients of this step were already read: call apply() or drop_gradients() before accumulate()"
        )
        assert self.lora is None or self.lora.switch.on, "accumulate() cannot run while adapters are switched off"
        normaliser = check_normaliser(objective.normaliser(plan), objective)
        sums = MetricSums()
        sums.add(WRONG, 0.0, 1.0)
        flight.planned(plan.fingerprint())
        rows = documents if isinstance(documents, StepRows) else self.rows(plan, documents, objective)
        if self.config.neftune_noise_alpha is not None and not rows.noisy:
            raise ValueError(
                "noise on embeddings depends on the step's number: call accumulate(plan, engine.rows(..., step=1), ...)"
            )
        scaling = LossScaling(normaliser, self.balance / plan.tokens_read, self._scale)
        scaling = self._executor.count(rows, scaling, plan.tokens_read)
        routed = self.config.replay and any(meta.routed for meta in plan.documents)
        losses, checksums = self._executor.train(rows, objective, scaling, sums, routed=routed)
        if self.pipeline is not None:
            sums.add("bubble", self.bubble(plan), 1.0)
        self._trained = type(objective).__name__
        # The same all-reduce reports losses that are not finite, and compares plans and replicated content of ranks.
        flight.enter("reduce", documents=[source for row in rows.sources for source in row])
        finite = torch.stack(losses).isfinite()
        sums.add("_nonfinite", (~finite).sum(), 1.0)
        if self.mesh.tp is not None and self.lora is not None and self.lora.dropout:
            sums.add("_random", random_difference(self.mesh.tp, self.device), 1.0)
        self._executor.load.add_to(sums, self.mesh.loss_group)
        self._replicas.add_to(sums, checksums, self.device)
        used = None if self._used is None else self._used.flags()
        reduced = sums.reduced(self.mesh.world_group, {"the plan of the step": plan.fingerprint()}, used)
        self._used_by_all = reduced.further
        return _Unread(reduced, rows.sources, finite, checksums)

    def step(
        self, plan: StepPlan, documents: Mapping[int, Document] | StepRows, objective: Loss, lr: float
    ) -> tuple[dict[str, float | None], StepResult]:
        """accumulate() and apply(). With AdamW on an accelerator the host waits for the device once, after the update
        is queued. Errors of accumulate() are raised at that point."""
        if self.reads_once:
            self._unread = self._accumulate(plan, documents, objective)
            result = self.apply(lr)
            return result.metrics, result
        return self.accumulate(plan, documents, objective), self.apply(lr)

    def _metrics(self, unread: _Unread, values: Sequence[float]) -> dict[str, float | None]:
        """The metrics of a step from its sums on the host. Raises the errors of accumulate(). Collective if a loss is
        not finite, or if ranks disagree."""
        metrics = unread.reduced.metrics(values)
        self._replicas.check(metrics, unread.checksums, self.mesh)
        if metrics.pop("_random", None):
            raise RanksDisagreeError(
                "ranks of one tp group draw different random numbers (lora.dropout), so they would train different "
                "weights"
            )
        if metrics.pop("_nonfinite"):
            micro_batches = (~unread.finite).nonzero().flatten().tolist()
            self._nonfinite = nonfinite.name_losses(unread.sources, micro_batches)
        if metrics.pop(WRONG) and self._nonfinite is None:
            raise UserError(
                f"train.loss: logprob_grad() of {self._trained} is not proportional to the gradient of its loss with "
                "respect to the logprobs. Return None there, and weft computes the gradient from the loss."
            )
        return metrics

    # ------------------------------------------------------------ without gradients

    def evaluate(self, plan: StepPlan, documents: Mapping[int, Document], objective: Loss) -> MetricSums:
        """The loss's metrics over this rank's rows, summed in fp64 and not yet reduced over ranks. Trains nothing.

        documents: at least those of planner.local_documents(plan).
        """
        sums, rows = MetricSums(), self.rows(plan, documents, objective)
        self._prepare_forwards()

        def ask(row: Row) -> ForwardRequest:
            chosen_NC = chosen_tokens(objective, row.targets_N, row.arrays)
            comparisons = comparisons_of(objective, row.arrays, len(row.targets_N))
            return ForwardRequest(objective.readouts, chosen_NC, comparisons=comparisons)

        def use(micro: int, row: Row, readouts: dict[str, Tensor]) -> None:
            exact = {name: v.double() if v.is_floating_point() else v for name, v in readouts.items()}
            batch = Batch(exact, row.weights_N.double(), row.document_N, row.documents, row.arrays, row.shared)
            for name, (total, weight) in check_terms(objective(batch), objective).metrics.items():
                sums.add(name, total, weight)

        self._executor.visit(rows, "evaluate", ask, use)
        self._executor.name_metrics(objective, sums)
        return sums

    def readout(
        self, plan: StepPlan, documents: Mapping[int, Document], names: Sequence[str] = ("logprob",)
    ) -> dict[int, dict[str, Tensor]]:
        """Per-token quantities of this rank's documents: index -> name -> [T] fp32 on the CPU.

        Entry t is the value of token t given the tokens before it; entry 0 is 0. Routers follow the documents' routes.
        """
        out = self._read(plan, documents, names, every_token=True)
        if self.mesh.pp is not None and self.pipeline is not None:
            out = self.mesh.pp.broadcast(self.pipeline.placement.last, out)
        return dict(sorted(out.items()))

    def last_hidden(self, plan: StepPlan, documents: Mapping[int, Document]) -> dict[int, Tensor]:
        """The hidden states that the head reads: index -> [T, H] in the head's dtype on the CPU, for this rank's
        documents. Entry t is at the position that predicts token t; zeros where t has no loss weight. With mesh.pp only
        the ranks of the last stage have them."""
        read = self._read(plan, documents, ("last_hidden",), every_token=False)
        return {index: named["last_hidden"] for index, named in sorted(read.items())}

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """The whole head: weight [V, H] and bias [V] or None, in the compute dtype, on every rank. Collective."""
        self.require_awake("parameters")
        pp, pipeline = self.mesh.pp, self.pipeline
        tensors: tuple[Tensor | None, Tensor | None] = (None, None)
        if pp is None or pipeline is None or pp.rank == pipeline.placement.last:
            reshard(self.module)
            head, names = self.module.head, {id(p): name for name, p in self.module.named_parameters()}
            weight, bias = (
                None if p is None else full_tensor(p, self.divided.cuts.get(names[id(p)])).to(self.precision.compute)
                for p in (head.weight, head.bias)
            )
            tensors = weight, bias
        if pp is not None and pipeline is not None:
            tensors = pp.broadcast(pipeline.placement.last, tensors)
        weight, bias = tensors
        assert weight is not None
        return weight, bias

    def _read(
        self, plan: StepPlan, documents: Mapping[int, Document], names: Sequence[str], *, every_token: bool
    ) -> dict[int, dict[str, Tensor]]:
        """Readouts of this rank's documents, [T, ...], at every token or at tokens with a loss weight; zeros elsewhere.
        With mesh.pp only the last stage has them."""
        out: dict[int, dict[str, Tensor]] = {}
        rows = self._lay_out(plan, documents, every_token=every_token)
        self._prepare_forwards()

        @host_memory()
        def use(micro: int, row: Row, readouts: dict[str, Tensor]) -> None:
            lengths = [len(documents[index]) for index in row.documents]
            firsts = torch.tensor([0, *lengths]).cumsum(0)
            positions = firsts[row.document_N.cpu()] + row.token_N.cpu()
            for name, values in readouts.items():
                values = (values if name == "last_hidden" else values.float()).cpu()
                joined = values.new_zeros(sum(lengths), *values.shape[1:]).index_copy(0, positions, values)
                by_document = dict(zip(row.documents, joined.split(lengths), strict=True))
                for index, values_T in self._join_parts(plan, micro, by_document, values).items():
                    out.setdefault(index, {})[name] = values_T

        self._executor.visit(rows, "readout", lambda row: ForwardRequest(frozenset(names)), use, following=True)
        return out

    def _join_parts(
        self, plan: StepPlan, micro: int, by_document: dict[int, Tensor], like: Tensor
    ) -> dict[int, Tensor]:
        """Add the values that other ranks computed for shared documents; [T, ...] per document of this rank. like: a
        tensor of their dtype and inner shape."""
        shared = plan.shared_documents(micro, self.mesh.loss_rank)
        if not shared or self.context is None:
            return by_document
        lengths = [plan.documents[index].length for index in shared]
        parts = [
            by_document.get(index, like.new_zeros(length, *like.shape[1:]))
            for index, length in zip(shared, lengths, strict=True)
        ]
        total = torch.cat(parts).to(self.device)
        self.context.ranks.sum_(total)
        complete = dict(zip(shared, total.cpu().split(lengths), strict=True))
        return {index: complete.get(index, values) for index, values in by_document.items()}

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, adapters are off, so that readout() reads the weights at model.path.

        Raises UserError if lora.modules_to_save replaced some of them.
        """
        assert self.lora is not None, "this engine has no adapters"
        if self.lora.trained:
            raise UserError(
                "the base model cannot be read with adapters switched off, because lora.modules_to_save replaced "
                f"{', '.join(self.lora.trained)}. Open another engine for the base model, or adapt these modules "
                "with lora.targets."
            )
        with self.lora.switch.off():
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, readouts use the average of the trained weights (optimizer.ema_decay). Needs memory for a copy of the
        shards."""
        assert self.ema is not None, "this engine has no average of the weights: set optimizer.ema_decay"
        reshard(self.module)
        shards = [(local_shard(parameter.detach()), mean) for parameter, mean in self.ema.shards.items()]
        present = [shard.clone() for shard, _ in shards]
        for shard, mean in shards:
            shard.copy_(mean)
        self.weights_changed()
        try:
            yield
        finally:
            reshard(self.module)
            for (shard, _), before in zip(shards, present, strict=True):
                shard.copy_(before)
            self.weights_changed()

    def weights_changed(self) -> None:
        """Call this if anything except apply() has written to the parameters, so that forwards use the new values."""
        if self.device_copies is not None:
            self.device_copies.invalidate()

    def _prepare_forwards(self) -> None:
        """Raises RuntimeError if parameters are asleep."""
        self.require_awake("parameters")
        if self.device_copies is not None:
            self.device_copies.refresh()

    # ------------------------------------------------------------ optimizer

    def apply(self, lr: float) -> StepResult:
        """Clip and step, or drop a gradient that is not finite; all ranks agree."""
        assert self.optimizer is not None, "this engine was opened for inference"
        self.require_awake(*PARTS)
        flight.enter("optimizer")
        scale = self._scale
        self.complete_gradients()
        named = list(self.module.named_parameters())
        unscale_gradients(named, scale)
        metrics: dict[str, float | None] = {}
        if self._unread is not None:
            queued = device_norm(named, self.divided.cuts, self._other_stages)
            norm, metrics = self._update_and_read(self._unread, queued, lr)
        elif self.device_copies is not None:
            norm = global_norm(named, self.divided.cuts, self._other_stages, self._early_norms)
        else:
            limit = self.config.optimizer.max_grad_norm
            norm = clip_gradients(named, limit, self.divided.cuts, self._other_stages)
        overflow, reason = False, self._nonfinite or ""
        if not reason and not math.isfinite(norm):
            overflow = self.loss_scale is not None and self.loss_scale.overflow()
            reason = f"fp16 overflow at loss scale {scale:g}" if overflow else nonfinite.name_gradients(self.module)
        if not reason:
            if self._unread is None:
                set_learning_rate(self.optimizer, lr)
                self._update(norm)
            if self._router_biases is not None:
                self._router_biases.step()
            if self.ema is not None:
                self.ema.update()
            if self.loss_scale is not None:
                self.loss_scale.succeed()
        self.drop_gradients()
        loss_scale = None if self.loss_scale is None else scale
        return StepResult(norm, bool(reason), reason, loss_scale, overflow, metrics)

    def _update(self, norm: float) -> None:
        """Step all parameters. Gradients are already clipped, unless only the optimizer is on the host. There the
        factor is applied when gradients are read, and each new value is copied to the device while the next parameter
        is stepped."""
        assert self.optimizer is not None
        if self.device_copies is None:
            self.optimizer.step()
            return
        factor = clipping_factor(norm, self.config.optimizer.max_grad_norm)
        if isinstance(self.optimizer, FusedAdamW):
            self.optimizer.step_one_by_one(factor, self.device_copies.update)
            return
        multiply_gradients(self.module.parameters(), factor)
        self.optimizer.step()
        self.device_copies.invalidate()
        self.device_copies.refresh()

    def _update_and_read(self, unread: _Unread, norm: Tensor, lr: float) -> tuple[float, dict[str, float | None]]:
        """Queue the update, then wait for the norm and the metrics of the step. The device skips the update if norm or
        loss is not finite."""
        assert isinstance(self.optimizer, FusedAdamW)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.divisor = clipping_divisor(norm, self.config.optimizer.max_grad_norm)
        self.optimizer.skip = (~norm.isfinite() | (unread.reduced.sum_of("_nonfinite") != 0)).float()
        self.optimizer.step()
        self.optimizer.divisor = self.optimizer.skip = None
        vector, planned = torch.cat([unread.reduced.vector, norm[None]]), unread.reduced.planned
        *values, read_norm = read(vector, lambda: [*planned(), 1.0])
        return read_norm, self._metrics(unread, values)

    @property
    def _scale(self) -> float:
        """The factor on the gradients of this step until apply()."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    # ------------------------------------------------------------ sleep

    @property
    def asleep(self) -> dict[Part, int]:
        """Bytes of this rank's device that each sleeping part has freed."""
        return self.offloader.asleep

    def sleep(self, *parts: Part) -> int:
        """Move these parts, by default all, to the host until wake(), to free device memory; returns the bytes freed.

        parameters; optimizer: its state and the average of the weights; gradients: the accumulated gradients. It does
        not move parts that already sleep or are always on the host (fsdp.cpu_offload), and parameters in
        `lent_storages`.
        """
        flight.enter("sleep")
        for unit in fsdp_modules(self.module):
            unit.reshard()
        to_move = [part for part in parts or PARTS if part not in self.asleep]
        freed = 0
        for part in to_move:
            tensors = tensors_of(part, self.module, self.optimizer, self.ema)
            unshared = (t for t in tensors if local_shard(t).untyped_storage().data_ptr() not in self.lent_storages)
            freed += self.offloader.sleep(part, unshared)
        if self.device_copies is not None and "parameters" in to_move:
            freed += self.device_copies.free()
        return freed

    def wake(self, *parts: Part) -> int:
        """Bring these parts, by default all, back bit for bit; returns the bytes."""
        flight.enter("wake")
        return sum(self.offloader.wake(part) for part in parts or PARTS if part in self.asleep)

    def require_awake(self, *parts: Part) -> None:
        """Raises RuntimeError if one of these parts is asleep."""
        asleep = [part for part in parts if part in self.asleep]
        if asleep:
            raise RuntimeError(f"the engine's {' and '.join(asleep)} are asleep: call wake() before this")

    # ------------------------------------------------------------ tensors

    def local_tensors(self) -> Mapping[str, Tensor]:
        """HuggingFace runtime name -> this rank's shard of every parameter and persistent buffer of its stage. Each
        read of a quantised weight dequantises it."""
        return DequantisedTensors(self.module, self.divided.cuts, self.precision.frozen)

    def stored_tensors(self) -> tuple[Mapping[str, Tensor], ShardSpecs]:
        """As local_tensors(), but with the stored parts of quantised weights; and how tp and ep divide them
        (parallel/quantise.py)."""
        return stored_tensors(self.module, self.divided.cuts)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace runtime name, whole tensor) of every parameter and persistent buffer; a tied one under each
        name.

        Collective. Tensors are gathered one by one, on the rank's device, in the stored dtype.
        """
        self.require_awake("parameters")
        cuts = self.divided.cuts
        local = self.local_tensors()
        if self.mesh.pp is None or self.pipeline is None:
            yield from ((name, full_tensor(tensor, cuts.get(name))) for name, tensor in local.items())
            return
        names = self.pipeline.holders
        stream = gather_over_stages(self.pipeline, self.mesh.pp, self.device, names, local, cuts, full_tensor)
        for name, tensor in stream:
            assert tensor is not None
            yield name, tensor

    def walk(
        self,
        mappings: Sequence[TensorMapping],
        manifest: Mapping[str, Tensor],
        *,
        stored: bool = False,
        bucket_bytes: int = 1 << 29,
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a manifest, gathered on every rank by parallel/shards/walker.py and checked. Collective.
        stored: mappings name the stored parts of quantised weights (stored_tensors) instead of the weights."""
        self.require_awake("parameters")
        peers = self._stage_peers()
        tensors, specs = self.stored_tensors() if stored else (self.local_tensors(), self.divided.cuts)
        stream = walk(tensors, mappings, manifest, specs, peers=peers, bucket_bytes=bucket_bytes)
        return check_stream(stream, manifest)

    def _stage_peers(self) -> StagePeers | None:
        if self.pipeline is None or self.mesh.pp is None:
            return None
        meshes = [self.mesh.dp] if self.mesh.experts is None else [self.mesh.dp, self.mesh.experts]
        holders, form = {**self.pipeline.holders}, self.module.quantised_form
        for name, shape in self.module.quantised_shapes.items():
            assert form is not None
            holders |= {name + end: holders[name] for end in parts_on_meta(form, shape)}
        return StagePeers(self.mesh.pp.group, self.mesh.pp.rank, holders, meshes)

    def gradient_norm(self) -> float:
        """The global norm of the accumulated gradient."""
        self.complete_gradients()
        return global_norm(self.module.named_parameters(), self.divided.cuts, self._other_stages) / self._scale

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients."""
        assert self.optimizer is not None, "this engine was opened for inference"
        self.optimizer.zero_grad(set_to_none=True)
        self._nonfinite = None
        self._complete = False
        self._unread = self._used_by_all = None
        if self._used is not None:
            self._used.forget()
        if self._early_norms is not None:
            self._early_norms.forget()

    def _drop_unused(self) -> None:
        """Drop the gradients, zeros, of parameters that no rank used in this step: as in a plain loop, the optimizer
        skips them. Waits for the device if this rank has parameters that it did not use."""
        unused = {} if self._used is None else self._used.unused()
        if not unused or self._used_by_all is None:
            return
        flags = self._used_by_all
        used = read(flags, lambda: [1.0] * len(flags))
        for parameter, index in unused.items():
            if not used[index]:
                parameter.grad = None

    def complete_gradients(self) -> None:
        """Drop gradients of unused parameters, and sum partial gradients over tp and pp, before anything reads them.
        Runs once a step, because a second sum would count them twice."""
        if self._complete:
            return
        self._drop_unused()
        if self.divided.partial:
            sum_partial_gradients(self.module, self.divided)
            self._complete = True
        if self.pipeline is not None and self.mesh.pp is not None:
            sum_shared_gradients(self.module, self.pipeline, self.mesh.pp)
            self._complete = True

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """(name, whole gradient) of every parameter; None if no row used the parameter. Collective."""
        self.complete_gradients()
        local, cuts = {name: p.grad for name, p in self.module.named_parameters()}, self.divided.cuts

        def unscaled(grad: Tensor, cut: AnyShardSpec | None) -> Tensor:
            return full_tensor(grad, cut) / self._scale

        if self.mesh.pp is None or self.pipeline is None:
            yield from ((n, None if g is None else unscaled(g, cuts.get(n))) for n, g in local.items())
        else:
            names = self.pipeline.parameter_names
            yield from gather_over_stages(self.pipeline, self.mesh.pp, self.device, names, local, cuts, unscaled)
