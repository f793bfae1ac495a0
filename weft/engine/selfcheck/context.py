"""Checks context parallelism before documents are cut over mesh.cp: a small random copy is run on cut documents, in
threads that act as ranks, and readouts and all gradients must equal those of whole documents."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.batch.assigned_images import assign_images
from weft.engine.batch.document import Document, DocumentMeta
from weft.engine.batch.media import Media
from weft.engine.batch.rows import Row, build_row, cut_row
from weft.engine.selfcheck.architecture import LENGTHS, documents_of, once_per_process, small_copy, text_vocabulary
from weft.engine.selfcheck.division import compare, in_threads, tolerance_of
from weft.engine.selfcheck.image import documents_with
from weft.engine.step_plan.plan import StepPlan, plan_step
from weft.errors import UserError
from weft.models.flops import FlopFacts
from weft.models.train_module import TrainModule
from weft.models.vision import Vision, find_vision
from weft.ops.communicator import Communicator, CPAxis
from weft.ops.context import repeats

_BUDGET = 20  # tokens per rank: all documents but the one-token one are longer


def choose_ulysses(flops: FlopFacts, config: PretrainedConfig, cp: int, tp: int) -> int:
    """The number of cp ranks that exchange heads: among those that divide cp and a rank's heads, the one that sends the
    fewest bytes.

    Elements received per token of a cut document and layer, with u ranks of Ulysses, a ring of n = cp / u, H query
    heads and K key heads of width D: (2 H + 2 K r) D (u - 1) / (u cp) for heads, where keys are repeated r times for u;
    and 3/4 (n - 1) / n x 2 K r D / u for keys and values in the ring.
    """
    heads, _ = _heads(flops, config, tp)
    fitting = [u for u in range(1, cp + 1) if cp % u == 0 and all(h % u == 0 for h in heads)]
    return min(fitting, key=lambda u: (sum(received_per_token(flops, config, cp, u, tp)), u))


def received_per_token(
    flops: FlopFacts, config: PretrainedConfig, cp: int, ulysses: int, tp: int
) -> tuple[float, float]:
    """(for the exchange of heads; for keys and values in the ring): elements that a rank receives in forward, over all
    layers, per token of a document that is cut over all of cp. Formulas: see `choose_ulysses`. Windows send less."""
    n, of_heads, of_keys = cp // ulysses, 0.0, 0.0
    each, keys = _heads(flops, config, tp)
    for own, layer in zip(each, flops.attention, strict=True):
        sent = keys(own) * (repeats(keys(own), own, ulysses) if ulysses > 1 else 1)
        of_heads += 2 * (own + sent) * (ulysses - 1) / (ulysses * cp) * layer.width
        of_keys += 0.75 * (n - 1) / n * 2 * sent / ulysses * layer.width
    return of_heads, of_keys


def _heads(flops: FlopFacts, config: PretrainedConfig, tp: int) -> tuple[list[int], Any]:
    """(query heads of a rank in each layer; function: query heads of a layer -> its key heads)."""
    text = config.get_text_config()
    heads = [max(1, layer.heads // tp) for layer in flops.attention]
    latent = getattr(text, "kv_lora_rank", None) is not None  # every head gets keys and values of its own
    stated = int(getattr(text, "num_key_value_heads", None) or max(heads, default=1))
    of_rank = max(1, stated // tp)

    def keys(own: int) -> int:
        return own if latent else gcd(own, of_rank)

    return heads, keys


@once_per_process
def check_context(
    config: PretrainedConfig, flops: FlopFacts, cp: int, ulysses: int, tp: int, images: bool = False
) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its parameter. Raises UserError, with
    the family and what differs, if it is too large or the heads cannot be divided. images: check a document with
    images, too."""
    heads, _ = _heads(flops, config, tp)
    wrong = [h for h in heads if h % ulysses]
    if cp % ulysses or wrong:
        what = f"mesh.cp = {cp}" if cp % ulysses else f"the {wrong[0]} attention heads of a rank"
        raise UserError(f"mesh.ulysses={ulysses} does not divide {what}: set mesh.ulysses=null, and weft chooses.")
    small = small_copy(config, "per_document")
    ranks = _ranks_of_copy(small, cp, ulysses)
    whole = TrainModule(copy.deepcopy(small))
    plan, documents = _documents(whole, ranks, images)
    expected = _whole(small, documents)
    refusal, tolerance = partial(_refusal, config), tolerance_of(whole)
    return compare(lambda: _cut(small, documents, plan), expected, refusal, "documents", tolerance)


def _refusal(config: PretrainedConfig, reason: str) -> UserError:
    return UserError(
        f"mesh.cp: weft cannot cut documents of model_type {config.get_text_config().model_type!r}: on a small copy, "
        f"{reason}. Set mesh.cp=1."
    )


def _ranks_of_copy(small: PreTrainedModel, cp: int, ulysses: int) -> tuple[int, int]:
    """(ring, Ulysses) sizes for the copy: 2 for each that is larger than 1 on the mesh, if its heads allow that."""
    heads = int(getattr(small.config.get_text_config(), "num_attention_heads", None) or ulysses)
    return (2 if cp > ulysses else 1), (2 if ulysses > 1 and heads % 2 == 0 else 1)


def _documents(module: TrainModule, ranks: tuple[int, int], images: bool) -> tuple[StepPlan, dict[int, Document]]:
    """Documents in a plan that cuts the longest ones."""
    ring, ulysses = ranks if ranks != (1, 1) else (2, 1)
    weights, vision = torch.linspace(0.5, 1.5, max(LENGTHS)), find_vision(module.base, module.facts)
    made = [Document(ids, weights[: len(ids)]) for ids in documents_of(text_vocabulary(module))]
    if images and vision is not None:
        texts = [replace(d, tokens=d.tokens.masked_fill(vision.token_types(d.tokens) > 0, 1)) for d in made]
        made = [_with_images(module, vision), *texts]
    metas = [
        DocumentMeta(len(d), 1.0, len(d) - 1, cost=float(len(d) ** 2), patches=d.media.patches if d.media else 0)
        for d in made
    ]
    plan = plan_step(metas, ranks=ring * ulysses, budget=_BUDGET, ring=ring, ulysses=ulysses, cuts_images=images)
    return plan, dict(enumerate(made))


def _with_images(module: TrainModule, vision: Vision) -> Document:
    """A document with three images of several sizes, longer than a row."""
    ((ids, inputs),) = documents_with(
        [[("image", 1), ("image", 3), ("image", 2)]], vision, module.base, text_vocabulary(module)
    )
    positions = vision.positions(module.base, ids, inputs)
    weights = torch.linspace(0.5, 1.5, len(ids))
    return Document(ids, weights, positions, media=Media.from_inputs(inputs, vision.patches(inputs)))


def _backward(module: TrainModule, row: Row) -> Tensor:
    """[2, N] log-probabilities and entropies of a row, whose weighted sum has been differentiated."""
    hidden = module.hidden(row.input_ids_BT, row.position_ids_BT, row.bounds, row.media, row.exchange)[0]
    got = module.head(hidden[row.selected_N], row.targets_N, ["logprob", "entropy"])
    ((got["logprob"] + 0.3 * got["entropy"]) * row.weights_N).sum().backward()
    return torch.stack([got["logprob"], got["entropy"]]).detach()


def _whole(small: PreTrainedModel, documents: dict[int, Document]) -> tuple[Tensor, dict[str, Tensor]]:
    """(readouts of all documents in order, gradient of each parameter)."""
    module = TrainModule(copy.deepcopy(small))
    return _backward(module, _row(list(documents), documents, find_vision(module.base, module.facts))), _gradients(
        module
    )


def _row(indices: Sequence[int], documents: dict[int, Document], vision: Vision | None) -> Row:
    """Whole documents, and their images."""
    read, images = [len(documents[i]) for i in indices], any(documents[i].media for i in indices)
    return build_row(
        indices, documents, read=read, length=sum(read), layout="packed", every_token=True, vision=vision, images=images
    )


def _gradients(module: TrainModule) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _cut(small: PreTrainedModel, documents: dict[int, Document], plan: StepPlan) -> tuple[Tensor, dict[str, Tensor]]:
    """Readouts and gradients, as `_whole` gives them, of threads that share the documents; gradients are summed."""
    assert plan.group is not None
    ring, ulysses = plan.group.ring, plan.group.ulysses
    starts = [sum(len(d) - 1 for d in list(documents.values())[:n]) for n in range(len(documents))]

    def one(place: int, groups: Any) -> tuple[Tensor, dict[str, Tensor]]:
        axis = _axis(place, ring, ulysses, groups)
        module = TrainModule(copy.deepcopy(small))
        vision = find_vision(module.base, module.facts)
        all_found = torch.zeros(2, sum(len(d) - 1 for d in documents.values()))
        for micro in range(plan.micro_batches):
            indices = plan.rows[micro][place]
            row = cut_row(_row(indices, documents, vision), plan, micro, place, axis)
            if vision is not None and plan.shares_images(micro, place):
                row = replace(row, **assign_images(indices, documents, plan, micro, place, axis, vision))
            found = _backward(module, row)
            at = torch.tensor([starts[i] for i in indices], dtype=torch.int64)
            all_found[:, at[row.document_N] + row.token_N - 1] = found
        return all_found, _gradients(module)

    results = in_threads(ring * ulysses, one)
    gradients: dict[str, Tensor] = {}
    for _, own in results:
        for name, gradient in own.items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
    return torch.stack([found for found, _ in results]).sum(0), gradients


def _axis(place: int, ring: int, ulysses: int, groups: Any) -> CPAxis:
    def among(ranks: list[int]) -> Communicator | None:
        return None if len(ranks) == 1 else groups(tuple(ranks), place)

    member, inner = divmod(place, ulysses)
    everyone = groups(tuple(range(ring * ulysses)), place)
    return CPAxis(
        place, ring, ulysses, everyone,
        among([m * ulysses + inner for m in range(ring)]), among([member * ulysses + u for u in range(ulysses)]),
    )  # fmt: skip
