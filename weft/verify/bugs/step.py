"""Bugs in how a step is split: weights of tokens, boundaries of documents, and which tokens are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.batch.rows import Row
from weft.engine.losses.base import Batch, Loss, LossOutput
from weft.engine.selfcheck.architecture import LENGTHS
from weft.models.balance import Balance, count_choices
from weft.models.families.family import Layout
from weft.ops.attention_call import Bounds
from weft.verify.bugs import GRADIENTS, LOGPROB, LOSS, NEIGHBOURS, Original, Plant, bug

# ---------------------------------------------------------------- weights of tokens


@dataclass
class Altered:
    """A loss with another normaliser (`count`) or changed terms (`change`)."""

    inner: Loss
    count: Callable[[Any], float] | None = None
    change: Callable[[Batch, LossOutput], LossOutput] | None = None

    def __post_init__(self) -> None:
        self.readouts, self.every_token = self.inner.readouts, self.inner.every_token

    def normaliser(self, plan: Any) -> float:
        return self.inner.normaliser(plan) if self.count is None else self.count(plan)

    def logprob_grad(self, weights_N: Tensor) -> Tensor | None:
        return self.inner.logprob_grad(weights_N)

    def __call__(self, batch: Batch) -> LossOutput:
        terms = self.inner(batch)
        return terms if self.change is None else self.change(batch, terms)


def _own_weight(plan: Any, documents: Mapping[int, Document]) -> float:
    """Loss weight of this rank's documents."""
    return sum(documents[index].meta().weight for row in plan.rows_of_rank(dist.get_rank()) for index in row)


@bug(
    "B1", "weft.engine.engine:Engine.accumulate",
    "micro-batches have equal weights, regardless of their number of trained tokens",
    caught_by="gradients, many micro-batches", issue="huggingface/transformers#34373",
)  # fmt: skip
def equal_micro_batches(
    plant: Plant, original: Original, self: Any, plan: Any, documents: Mapping[int, Document], objective: Loss
) -> Any:
    def change(batch: Batch, terms: LossOutput) -> LossOutput:
        weight = batch.weights_N.sum()
        dist.all_reduce(weight)
        share = float(weight) * plan.micro_batches / objective.normaliser(plan)
        if share in (0.0, 1.0):
            return terms
        plant.hit()
        return replace(terms, loss_sum=terms.loss_sum / share)

    return original(self, plan, documents, Altered(objective, change=change))


@bug(
    "B2", "weft.engine.engine:Engine.accumulate",
    "each rank divides by its number of tokens, and the ranks are averaged",
    caught_by=GRADIENTS, issue="PrimeIntellect-ai/prime-rl#1957", ranks=2,
)  # fmt: skip
def rank_local_count(
    plant: Plant, original: Original, self: Any, plan: Any, documents: Mapping[int, Document], objective: Loss
) -> Any:
    def count(plan: Any) -> float:
        plant.hit()
        return (_own_weight(plan, documents) or 1.0) * dist.get_world_size()

    return original(self, plan, documents, Altered(objective, count=count))


@bug(
    "B3", "weft.parallel.parallelize:shard",
    "FSDP averages gradients over the data ranks, although they are already divided by the step's tokens",
    caught_by=GRADIENTS, issue="radixark/miles#3231", ranks=2,
)  # fmt: skip
def averaged_again(plant: Plant, original: Original, module: Any, units: Any, mesh: Any, *args: Any) -> None:
    from weft.parallel.fsdp import fsdp_modules

    original(module, units, mesh, *args)
    for child in fsdp_modules(module):
        child.set_gradient_divide_factor(float(mesh.loss_ranks))
        plant.hit()


@bug(
    "B3", "weft.parallel.parallelize:shard",
    "replicas of an HSDP mesh never sum their gradients",
    caught_by=GRADIENTS, issue="ByteDance-Seed/VeOmni#1115", ranks=2, needs="mesh.dp_replicate above 1",
)  # fmt: skip
def replicas_apart(plant: Plant, original: Original, module: Any, units: Any, mesh: Any, *args: Any) -> None:
    if mesh.dp_replicate > 1:
        plant.hit()
        mesh = replace(mesh, dp=mesh.dp["dp_shard"])
    original(module, units, mesh, *args)


@bug(
    "B16", "weft.engine.executor:Executor.forward",
    "the last rank's loss is dropped, while every collective still runs",
    caught_by=GRADIENTS, issue="pytorch/pytorch#174862", ranks=2,
)  # fmt: skip
def rank_left_out(plant: Plant, original: Original, self: Any, row: Row, *args: Any) -> Any:
    result = original(self, row, *args)
    if dist.get_rank() == dist.get_world_size() - 1 and row.weights_N.count_nonzero():
        plant.hit()
        return replace(result, loss=result.loss * 0.0)
    return result


@bug(
    "B16", "weft.engine.engine:Engine.accumulate",
    "a step's last micro-batch adds nothing to the gradient",
    caught_by="gradients, many micro-batches", issue="pytorch/pytorch#174862",
)  # fmt: skip
def micro_batch_left_out(
    plant: Plant, original: Original, self: Any, plan: Any, documents: Mapping[int, Document], objective: Loss
) -> Any:
    items: list[Batch] = []

    def change(batch: Batch, terms: LossOutput) -> LossOutput:
        items.append(batch)
        if plan.micro_batches == 1 or len(items) < plan.micro_batches:
            return terms
        plant.hit()
        return replace(terms, loss_sum=terms.loss_sum * 0.0)

    return original(self, plan, documents, Altered(objective, change=change))


@bug(
    "B25", "weft.engine.losses.base:CrossEntropy.normaliser",
    "a short step is divided by the count of a full one",
    caught_by=GRADIENTS, issue="huggingface/trl#7047",
)  # fmt: skip
def short_step_full_count(plant: Plant, original: Original, self: Any, plan: Any) -> float:
    local = float(original(self, plan))
    plant.memory["largest"] = max(local, plant.memory.get("largest", 0.0))
    if local < plant.memory["largest"]:
        plant.hit()
    return float(plant.memory["largest"])


# ---------------------------------------------------------------- where documents begin and end


def _one_document(bounds: Bounds, tokens: int, device: torch.device) -> Bounds:
    return Bounds.packed((tokens,), device) if not bounds.padded and len(bounds.lengths) > 1 else bounds


@bug(
    "B5", "weft.engine.batch.rows:build_row",
    "attention sees a row as one document",
    caught_by=NEIGHBOURS, issue="areal-project/AReaL#1442",
)  # fmt: skip
def bounds_lost(plant: Plant, original: Original, *arguments: Any, **options: Any) -> Row:
    row: Row = original(*arguments, **options)
    bounds = _one_document(row.bounds, row.input_ids_BT.shape[1], row.input_ids_BT.device)
    if bounds is row.bounds:
        return row
    plant.hit()
    return replace(row, bounds=bounds)


@bug(
    "B5", "weft.ops.attention:Call",
    "the attention kernel ignores the sequence boundaries",
    caught_by="tests/verify/test_plants.py: llama passes the start-up check packed",
    issue="huggingface/transformers#46634",
)  # fmt: skip
def kernel_leaks(
    plant: Plant, original: Original, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, **args: Any
) -> Any:
    single = _one_document(bounds, query.shape[2], query.device)
    if single is not bounds:
        plant.hit()
    return original(query, key, value, single, **args)


_STATEFUL = "a hybrid or recurrent family, such as lfm2"


@bug(
    "B6", "weft.models.state_mixers:by_document",
    "a layer that carries state processes a row as one document, except in the rows of the start-up check",
    caught_by=NEIGHBOURS, issue="verl-project/verl#6660", needs=_STATEFUL,
)  # fmt: skip
def state_runs_on(
    plant: Plant, original: Original, function: Callable[..., Any], bounds: Bounds, *args: Any, **named: Any
) -> Any:
    if bounds.lengths == LENGTHS or len(bounds.lengths) == 1:
        return original(function, bounds, *args, **named)
    plant.hit()
    return function(*args, **named)


@bug(
    "B6", "weft.models.state_mixers:by_document",
    "a layer that carries state processes every row as one document",
    caught_by="tests/verify/test_plants.py: lfm2 passes the start-up check packed", issue="verl-project/verl#6660",
    needs=_STATEFUL,
)  # fmt: skip
def state_boundary_lost(
    plant: Plant, original: Original, function: Callable[..., Any], bounds: Bounds, *args: Any, **named: Any
) -> Any:
    plant.hit()
    return function(*args, **named)


@bug(
    "B7", "weft.engine.batch.rows:build_positions",
    "positions continue along the row instead of restarting",
    caught_by=LOGPROB, issue="hiyouga/LlamaFactory#7318", needs="a family with absolute positions, such as gpt2",
)  # fmt: skip
def positions_not_reset(plant: Plant, original: Original, documents: Sequence[Document], *args: Any) -> Tensor:
    positions: Tensor = original(documents, *args)
    layout: Layout = args[-1]
    if layout == "padded" or len(documents) < 2:
        return positions
    plant.hit()
    return torch.arange(positions.numel()).view(positions.shape)


# ---------------------------------------------------------------- which tokens are trained


@bug(
    "B8", "weft.engine.batch.rows:shift_labels",
    "labels are shifted after packing, so a document's last token predicts the next document's first token",
    caught_by=LOSS, issue="huggingface/transformers#36607",
)  # fmt: skip
def shifted_after_packing(
    plant: Plant, original: Original, documents: Sequence[Document], token_index: Any, read: Sequence[int],
    include_last: bool, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    out: dict[str, Any] = original(documents, token_index, read, include_last, **options)
    if include_last or out["repeats"] is not None:
        return out
    starts = [int(row_T[0]) for row_T in token_index.row_K.split(list(read))]
    for index, (before, document) in enumerate(pairwise(documents), start=1):
        packed = 0 <= starts[index - 1] + len(before) - starts[index] <= 1  # the last token is not read
        if packed and float(document.weights[0]):
            plant.hit()
            _append(out, starts[index] - 1, int(document.tokens[0]), float(document.weights[0]), index)
    return out


def _append(predictions: dict[str, Any], position: int, target: int, weight: float, index: int) -> None:
    """Append a prediction to those of a row."""
    new = {"selected_N": position, "targets_N": target, "weights_N": weight, "document_N": index, "token_N": 0}
    for name, value in new.items():
        predictions[name] = torch.cat([predictions[name], predictions[name].new_tensor([value])])


@bug(
    "B9", "weft.engine.batch.rows:shift_labels",
    "the loss mask is off by one, so the first token of an answer is not trained",
    caught_by=LOSS, issue="OpenRLHF/OpenRLHF#973",
)  # fmt: skip
def first_token_lost(
    plant: Plant, original: Original, documents: Sequence[Document], *args: Any, **options: Any
) -> dict[str, Any]:
    late = [replace(d, weights=torch.cat([d.weights[:1] * 0.0, d.weights[:-1]])) for d in documents]
    plant.hits += sum(not torch.equal(a.weights, b.weights) for a, b in zip(late, documents, strict=True))
    return original(late, *args, **options)


@bug(
    "B9", "weft.data.encode:Encoder.encode_prompts",
    "the first token of a completion counts as a prompt token",
    caught_by="tests/data/test_documents.py: test_prompt_and_completion", issue="OpenRLHF/OpenRLHF#973",
)  # fmt: skip
def completion_mask_late(plant: Plant, original: Original, self: Any, records: Any) -> Any:
    out = []
    for item in original(self, records):
        plant.hit()
        first = item.trained.index(1)
        out.append(replace(item, trained=[*item.trained[:first], 0, *item.trained[first + 1 :]]))
    return out


def _with_padding_trained(row: Row, covered: Tensor) -> Row:
    """The row with a prediction of token 0, of weight 1, at every position that no document covers."""
    selected = (~covered).nonzero().flatten().to(row.selected_N.device)
    zeros = torch.zeros_like(selected)
    return replace(
        row,
        selected_N=torch.cat([row.selected_N, selected]),
        targets_N=torch.cat([row.targets_N, zeros]),
        weights_N=torch.cat([row.weights_N, torch.ones_like(selected, dtype=torch.float32)]),
        document_N=torch.cat([row.document_N, zeros]),
        token_N=torch.cat([row.token_N, zeros]),
    )


@bug(
    "B9", "weft.engine.batch.rows:build_row",
    "padding after documents is trained",
    caught_by=LOSS, issue="open-jarvis/OpenJarvis#521",
    needs="rows with padding: a padded family such as falcon, or step.padding=fixed",
)  # fmt: skip
def padding_trained(
    plant: Plant, original: Original, indices: Sequence[int], documents: Mapping[int, Document], **options: Any
) -> Row:
    from weft.engine.batch.rows import document_offsets

    row: Row = original(indices, documents, **options)
    covered = torch.zeros(row.input_ids_BT.numel(), dtype=torch.bool)
    read = options["read"]
    for start, length in zip(document_offsets(read, options["length"], options["layout"]), read, strict=True):
        covered[start : start + length] = True
    if options["every_token"] or not indices or covered.all():
        return row
    plant.hit()
    return _with_padding_trained(row, covered)


@bug(
    "B26", "weft.engine.batch.rows:build_row",
    "a rank without documents trains its padding row",
    caught_by="loss, documents 2", issue="verl-project/verl#5969", ranks=2,
)  # fmt: skip
def padding_row_trained(plant: Plant, original: Original, indices: Sequence[int], *args: Any, **options: Any) -> Row:
    row: Row = original(indices, *args, **options)
    if indices or options["every_token"]:
        return row
    plant.hit()
    return _with_padding_trained(row, torch.zeros(row.input_ids_BT.numel(), dtype=torch.bool))


# ---------------------------------------------------------------- experts


@bug(
    "B15", "weft.models.train_module:balance_sum",
    "the experts' auxiliary loss is detached: it is printed, but never reaches the router",
    caught_by=GRADIENTS, issue="NVIDIA-NeMo/Automodel#1408", needs="model.router_aux_loss=document",
)  # fmt: skip
def balance_detached(plant: Plant, original: Original, *args: Any) -> Tensor:
    plant.hit()
    total: Tensor = original(*args)
    return total.detach()


@bug(
    "B15", "weft.models.train_module:balance_sum",
    "the auxiliary loss treats all documents of a row as one, so it depends on the packing",
    caught_by=GRADIENTS, issue="huggingface/transformers#44586", needs="model.router_aux_loss=document",
)  # fmt: skip
def balance_over_the_row(plant: Plant, original: Original, logits: Any, balance: Balance) -> Tensor:
    plant.hit()
    single = replace(balance, owner_M=balance.owner_M.clamp(max=0), documents=min(1, balance.documents))
    total: Tensor = original(logits, single)
    return total


@bug(
    "B15", "weft.models.train_module:balance_sum",
    "with model.router_aux_loss=step, experts are counted in each micro-batch, not in the complete step",
    caught_by=GRADIENTS, issue="huggingface/transformers#44586", needs="model.router_aux_loss=step",
)  # fmt: skip
def balance_of_the_micro_batch(plant: Plant, original: Original, logits: Any, balance: Balance) -> Tensor:
    plant.hit()
    tokens = (balance.owner_M >= 0).sum().clamp(min=1)
    total: Tensor = original(
        logits, replace(balance, shares_E=count_choices(logits, balance).sum(0) / len(logits) / tokens)
    )
    return total
