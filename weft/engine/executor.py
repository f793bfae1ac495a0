"""Runs forwards and backwards of an engine's model, a row at a time. No other code calls them.

N predictions of a row, E experts, C tokens whose logits a loss reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.replay import RouteReplay
from weft.engine.batch.rows import Row, StepRows
from weft.engine.build import BuiltModel
from weft.engine.config import EngineConfig
from weft.engine.experts import ExpertLoad
from weft.engine.losses.base import Batch, Loss, LossOutput, known_logprob_grad
from weft.engine.losses.check import check_is_sum, check_terms, check_tokens, chosen_tokens, comparisons_of
from weft.engine.metrics import MetricSums
from weft.launch import flight
from weft.launch.consistency import ReplicaChecksum
from weft.launch.timing import waiting
from weft.models.balance import Balance, Counted
from weft.models.embedding_noise import EmbeddingNoise
from weft.models.experts import find_experts, hides_routers
from weft.models.train_module import OF_ROUTERS
from weft.ops.divergence import Comparison
from weft.ops.exact import numerics
from weft.ops.head import KnownGrad
from weft.parallel.fsdp import WorkingCopies, end_backward, reduce_when, reshard
from weft.parallel.mesh import Mesh
from weft.parallel.pp.model import EmptyModule

Use = Callable[[int, Row, dict[str, Tensor]], None]  # (micro-batch, row, readouts)
WRONG = "_wrong"  # metric: number of rows whose gradient differs from the result of Loss.logprob_grad


@dataclass(frozen=True)
class LossScaling:
    """Factors that all rows of a step share. normaliser: divides the loss sum. balance: multiplies the sum of the
    experts' auxiliary loss. scale: multiplies gradients, for fp16. shares_E: see Balance. counted: by micro-batch;
    empty if the loss of a row needs only that row."""

    normaliser: float
    balance: float
    scale: float
    shares_E: Tensor | None = None
    counted: Sequence[Counted] = ()


@dataclass(frozen=True)
class ForwardResult:
    """A row after its forward. loss: the tensor to differentiate. loss_sum: with the auxiliary loss, without
    gradient. known_grad: the gradient that the row's logprobs will receive, if it is known."""

    row: Row
    output: LossOutput
    loss: Tensor
    loss_sum: Tensor
    known_grad: KnownGrad | None


@dataclass(frozen=True)
class ForwardRequest:
    """The readouts of a forward without gradients. chosen_NC, balance, comparisons: see TrainModule.forward."""

    readouts: frozenset[str]
    chosen_NC: Tensor | None = None
    balance: Balance | None = None
    comparisons: Sequence[Comparison] = ()


class Executor:
    """Runs one engine's model, of which this rank has all layers."""

    staged = False  # whether this rank has only some of the layers

    def __init__(self, config: EngineConfig, built: BuiltModel, mesh: Mesh, device: torch.device) -> None:
        self.config, self.module, self.mesh, self.device = config, built.module, mesh, device
        self.uses_bounds, self.balance, self.top_k = built.uses_bounds, built.balance, built.flops.experts_per_token
        self.experts = built.flops.experts if built.flops.expert else 0
        self.load = ExpertLoad(find_experts(self.module).values(), mesh)
        # A stage of a pipeline may have no experts, and would not know where other stages have their routers.
        routers_hidden = mesh.pp is None and hides_routers(layer for _, layer in self.module.layers)
        compiled = config.model.compile is True and not routers_hidden
        self.replay = RouteReplay(self.module, self.experts, self.top_k, compiled)
        self._noise: EmbeddingNoise | None = None
        embedding = self.module.get_submodule(self.module.facts.embedding)
        if config.neftune_noise_alpha is not None and not isinstance(embedding, EmptyModule):
            tp = mesh.tp
            self._noise = EmbeddingNoise(embedding, 1 if tp is None else tp.size, 0 if tp is None else tp.rank)
        self._vocabulary = int(built.config.get_text_config().vocab_size)
        self.copies = WorkingCopies(self.module, config.fsdp.reshard_after_forward is False, device)
        self.unchecked: set[type] = set()  # losses that have not yet passed the check that they are sums

    def train(
        self, rows: StepRows, objective: Loss, scaling: LossScaling, sums: MetricSums, *, routed: bool
    ) -> tuple[list[Tensor], list[ReplicaChecksum]]:
        """Add the gradient of all rows of a step, and their metrics to `sums`. routed: as in forward_backward.

        Returns the loss sum of each micro-batch, and checksums that must equal those of other ranks.
        """
        losses, checksums = list[Tensor](), list[ReplicaChecksum]()
        self.copies.decide()
        for micro, sources in enumerate(rows.sources):
            flight.enter("rows", micro + 1, sources)
            row, last = rows[micro].to(self.device), micro == len(rows.sources) - 1
            checksums += row.checksums
            loss = self.forward_backward(row, objective, scaling, sums, micro=micro, last=last, routed=routed)
            losses.append(loss)
        return losses, checksums

    def forward_backward(
        self, row: Row, objective: Loss, scaling: LossScaling, sums: MetricSums, *, micro: int, last: bool, routed: bool
    ) -> Tensor:
        """Add the gradient of one row to the parameters' gradients and its metrics to `sums`; returns the loss sum.

        micro: the micro-batch, from 0. last: of the step. routed: count the tokens for which the router would have
        chosen other experts.
        """
        flight.enter("forward", micro + 1)
        reduce_when(self.module, self.config.fsdp.reduce, last=last)
        end_backward(self.module, last)
        self.copies.micro_batch(last)
        # backward must run inside this context, so that recomputed layers use the same routes and kernels.
        with self.replay.following(row.routes, self.multiplicity_of(row)) as route_counts, numerics(self.config.exact):
            result = self.forward(row, objective, scaling, micro)
            flight.enter("backward", micro + 1)
            if result.loss.requires_grad:
                result.loss.backward()
            else:  # only the vision tower is trained, and no rank has images here
                reshard(self.module)
        self.add_metrics(result, sums)
        if routed:
            sums.add("routing/differing", *route_counts.share(self.device))
        return result.loss_sum

    def forward(
        self, row: Row, objective: Loss, scaling: LossScaling, micro: int, received: Tensor | None = None,
        chunk: int = 0,
    ) -> ForwardResult:  # fmt: skip
        """The forward of one row, up to the tensor to differentiate."""
        # If the gradient is known, the head differentiates each chunk of logits in the forward, and computes the chunk
        # once.
        gradient_N = known_logprob_grad(objective, row.weights_N)
        known_grad = None if gradient_N is None else KnownGrad(gradient_N)
        balance = self.balance_inputs(row, scaling, micro)
        chosen_NC = chosen_tokens(objective, row.targets_N, row.arrays)
        unchecked = type(objective) in self.unchecked and type(row.weights_N) is Tensor  # not a simulated one
        if unchecked:
            check_tokens(chosen_NC, self._vocabulary, objective)
        comparisons = comparisons_of(objective, row.arrays, len(row.targets_N))
        readouts = self.read(
            row, objective.readouts, known_grad, balance, chosen_NC, received=received, chunk=chunk,
            comparisons=comparisons,
        )  # fmt: skip
        balance_sum = readouts.pop("balance", None if balance is None else row.weights_N.new_zeros(()))
        batch = Batch(readouts, row.weights_N, row.document_N, row.documents, row.arrays, row.shared)
        if unchecked and len(row.weights_N) and check_is_sum(objective, batch):
            self.unchecked.discard(type(objective))
        output = replace(check_terms(objective(batch), objective), balance_sum=balance_sum)
        # The normaliser is the whole step's, so that the gradients of rows add up on every mesh.
        loss, loss_sum = output.loss_sum / scaling.normaliser * scaling.scale, output.loss_sum.detach()
        if balance_sum is not None:
            loss = loss + self.balance_loss(balance_sum, scaling)
            loss_sum = loss_sum + balance_sum.detach()
        return ForwardResult(row, output, loss, loss_sum, known_grad)

    def read(
        self,
        row: Row,
        readouts: frozenset[str],
        known_grad: KnownGrad | None = None,
        balance: Balance | None = None,
        chosen_NC: Tensor | None = None,
        received: Tensor | None = None,
        chunk: int = 0,
        comparisons: Sequence[Comparison] = (),
    ) -> dict[str, Tensor]:
        """One forward without a loss: the readouts of a row on the device (TrainModule.forward)."""
        bounds = row.bounds if self.uses_bounds else None
        first = received is None  # only the first stage has embeddings and images
        media, placeholder, exchange = (row.media, row.placeholder, row.exchange) if first else (None, False, None)
        if balance is not None and balance.counting:  # the head computes nothing
            row = replace(row, selected_N=row.selected_N[:0], targets_N=row.targets_N[:0], repeats=None)
        # Equal predictions of documents that share tokens are computed once, unless the loss reads chosen logits.
        repeats = row.repeats if chosen_NC is None and not comparisons else None
        if repeats is not None:
            row = replace(row, selected_N=row.selected_N[repeats.first_U], targets_N=row.targets_N[repeats.first_U])
            if known_grad is not None:
                known_grad = replace(known_grad, values_N=repeats.summed(known_grad.values_N))
        noise: AbstractContextManager[None] = nullcontext()
        if self._noise is not None and first and row.noise_keys_BT is not None and row.noise_sizes_BT is not None:
            noise = self._noise.adding(row.noise_keys_BT, row.noise_sizes_BT)
        tokens = row.real_tokens if row.real_K is None else row.real_K
        with self.load.counting(tokens, self.multiplicity_of(row)), noise:
            outputs: dict[str, Tensor] = self.module(
                row.input_ids_BT, row.position_ids_BT, bounds, row.selected_N, row.targets_N, readouts, known_grad,
                balance, chosen_NC, media, placeholder, received, chunk, exchange, comparisons,
            )  # fmt: skip
        if repeats is None:
            return outputs
        of_row = ("sent", *OF_ROUTERS)
        return {
            name: values if name in of_row else values.index_select(0, repeats.distinct_N)
            for name, values in outputs.items()
        }

    def multiplicity_of(self, row: Row) -> Tensor | None:
        """[T]: the number of documents that hold each token of the row; None if no token is shared, or if choices of
        experts are not counted."""
        segments = row.bounds.segments
        return None if segments is None or not self.experts else segments.multiplicity_T(self.device)

    def balance_loss(self, balance_sum: Tensor, scaling: LossScaling) -> Tensor:
        """The part of a row's auxiliary loss to differentiate. Every rank of tp holds complete routers, and their
        gradients are summed over these ranks."""
        return balance_sum * (scaling.balance / self.mesh.tp_size) * scaling.scale

    def add_metrics(self, result: ForwardResult, sums: MetricSums) -> None:
        """Add a row's metrics to the sums, after its backward."""
        if result.output.balance_sum is not None:
            segments = result.row.bounds.segments
            tokens = result.row.real_tokens if segments is None else sum(segments.document_lengths)
            sums.add("aux_loss", result.output.balance_sum, tokens)
        for flag in () if result.known_grad is None else result.known_grad.wrong:
            sums.add(WRONG, flag, 1.0)
        for name, (total, weight) in result.output.metrics.items():
            sums.add(name, total, weight)

    def visit(
        self, rows: StepRows, phase: str, ask: Callable[[Row], ForwardRequest], use: Use, *, following: bool = False,
        evaluating: bool = True,
    ) -> None:  # fmt: skip
        """Read every row without gradients and pass the readouts to `use`. following: replay the documents' routes.
        evaluating: in evaluation mode."""
        with self.without_gradients(evaluating=evaluating):
            for micro, sources in enumerate(rows.sources):
                flight.enter(phase, micro + 1, sources)
                row = rows[micro].to(self.device)
                request = ask(row)
                with self.replay.following(row.routes) if following else nullcontext():
                    readouts = self.read(
                        row, request.readouts, balance=request.balance, chosen_NC=request.chosen_NC,
                        comparisons=request.comparisons,
                    )  # fmt: skip
                use(micro, row, readouts)

    def name_metrics(self, objective: Loss, sums: MetricSums) -> None:
        """On a rank that never calls the loss, add its metrics with weight 0: all ranks need the same names."""

    @contextmanager
    def without_gradients(self, *, evaluating: bool = True) -> Iterator[None]:
        """Inside, no gradients, and evaluation mode if `evaluating`. Units are resharded at the end."""
        was_training = self.module.training
        self.module.train(was_training and not evaluating)
        try:
            with torch.no_grad(), numerics(self.config.exact):
                yield
        finally:
            self.module.train(was_training)
            reshard(self.module)

    def count(self, rows: StepRows, scaling: LossScaling, tokens: int) -> LossScaling:
        """The scaling of a step. It includes counts over all rows, or over all layers, that the experts' auxiliary loss
        needs before the forwards with gradients. Collective. tokens: number of tokens of the step.

        If the auxiliary loss is over the step, or layers are on several ranks, this costs a forward of every row. It
        draws the same random numbers (dropout of adapters) as the forward with gradients.
        """
        step = self.config.model.router_aux_loss == "step"
        if not self.balance or not (step or self.staged):
            return scaling
        chosen, layers = self._choices(rows)
        if not step:
            return replace(scaling, counted=[Counted(layers, own_DE.float()) for own_DE in chosen])
        total_E = torch.stack([own_DE.sum(0) for own_DE in chosen]).sum(0) / layers
        with waiting():
            dist.all_reduce(total_E, group=self.mesh.loss_group)
        return replace(scaling, shares_E=(total_E / tokens).float(), counted=[Counted(layers, None)] * len(chosen))

    def _choices(self, rows: StepRows) -> tuple[list[Tensor], Tensor]:
        """([D, E] for each micro-batch: how often its documents choose each expert, summed over layers; number of
        layers with routers)."""
        chosen = [torch.zeros(0)] * len(rows.sources)
        layers = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in chosen]

        def use(micro: int, row: Row, readouts: dict[str, Tensor]) -> None:
            if not len(chosen[micro]):
                chosen[micro] = torch.zeros(len(row.documents), self.experts, dtype=torch.float64, device=self.device)
            if "choices" in readouts:
                chosen[micro] += readouts["choices"]
                layers[micro] += readouts["layers"].to(self.device)

        def count_choices(row: Row) -> ForwardRequest:
            balance = self.balance_inputs(row, None, 0)
            assert balance is not None
            return ForwardRequest(frozenset(), balance=replace(balance, counting=True))

        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self.visit(rows, "count", count_choices, use, following=True, evaluating=False)
        self.sum_over_stages([*chosen, layers[0]])
        return chosen, layers[0].float()

    def sum_over_stages(self, sums: Sequence[Tensor]) -> None:
        """Sum the tensors, in place, over the ranks that have other layers; collective over these."""

    def balance_inputs(self, row: Row, scaling: LossScaling | None, micro: int) -> Balance | None:
        """The inputs of a forward of this row for the auxiliary loss of its experts."""
        if not self.balance:
            return None
        assert row.owner_M is not None
        owner_M, holders_DS, segments = row.owner_M, None, row.bounds.segments
        if segments is not None:
            owner_M, holders_DS = segments.segment_T(self.device), segments.holders_DS(self.device)
        counted = None if scaling is None or not scaling.counted else scaling.counted[micro]
        shares_E = None if scaling is None else scaling.shares_E
        return Balance(
            owner_M, len(row.documents), self.top_k, shares_E, shared=row.shared, counted=counted, holders_DS=holders_DS
        )
