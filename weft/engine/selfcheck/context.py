"""Checks context parallelism before documents are split over mesh.cp. A small random copy runs on split documents, in
threads that act as ranks. Readouts and all gradients must equal those of unsplit documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd

import torch
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.batch.assigned_images import assign_images
from weft.engine.batch.document import Document
from weft.engine.batch.rows import cut_row
from weft.engine.selfcheck.architecture import LENGTHS, once_per_process, small_copy
from weft.engine.selfcheck.harness import (
    Groups,
    Result,
    compare,
    copy_of,
    gradients_of,
    image_documents,
    in_threads,
    row_of,
    run_row,
    sum_by_name,
    text_documents,
    tolerance_of,
)
from weft.engine.step_plan.plan import StepPlan, plan_step
from weft.errors import UserError
from weft.models.flops import FlopFacts
from weft.models.train_module import TrainModule
from weft.models.vision import find_vision
from weft.ops.communicator import Communicator, CPAxis
from weft.ops.context import repeats

_BUDGET = 20  # tokens per rank: documents of LENGTHS are longer, except the document of one token


def choose_ulysses(flops: FlopFacts, config: PretrainedConfig, cp: int, tp: int) -> int:
    """The number of cp ranks that exchange heads: of the common divisors of cp and a rank's heads, the one with the
    fewest sent bytes.

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
    layers, per token of a document that is split over all of cp. Formulas: see `choose_ulysses`. Layers with windows
    send less."""
    n, of_heads, of_keys = cp // ulysses, 0.0, 0.0
    heads, keys = _heads(flops, config, tp)
    for count, layer in zip(heads, flops.attention, strict=True):
        sent = keys(count) * (repeats(keys(count), count, ulysses) if ulysses > 1 else 1)
        of_heads += 2 * (count + sent) * (ulysses - 1) / (ulysses * cp) * layer.width
        of_keys += 0.75 * (n - 1) / n * 2 * sent / ulysses * layer.width
    return of_heads, of_keys


def _heads(flops: FlopFacts, config: PretrainedConfig, tp: int) -> tuple[list[int], Callable[[int], int]]:
    """(query heads of a rank in each layer; function: query heads of a layer -> its key heads)."""
    text = config.get_text_config()
    heads = [max(1, layer.heads // tp) for layer in flops.attention]
    latent = getattr(text, "kv_lora_rank", None) is not None  # every query head has its own keys and values
    stated = int(getattr(text, "num_key_value_heads", None) or max(heads, default=1))
    of_rank = max(1, stated // tp)

    def keys(query_heads: int) -> int:
        return query_heads if latent else gcd(query_heads, of_rank)

    return heads, keys


@once_per_process
def check_context(
    config: PretrainedConfig,
    flops: FlopFacts,
    cp: int,
    ulysses: int,
    tp: int,
    images: bool = False,
    longest: int = LENGTHS[0],
) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its parameter. Raises UserError, with
    the family and what differs, if it is too large or the heads cannot be divided. images: also check a document with
    images. longest: of ModelSupport."""
    heads, _ = _heads(flops, config, tp)
    wrong = [h for h in heads if h % ulysses]
    if cp % ulysses or wrong:
        divided = f"mesh.cp = {cp}" if cp % ulysses else f"the {wrong[0]} attention heads of a rank"
        raise UserError(f"mesh.ulysses={ulysses} does not divide {divided}. Set mesh.ulysses=null to let weft choose.")
    small = small_copy(config, "per_document")
    ranks, reference = _ranks_of_copy(small, cp, ulysses), copy_of(small)
    plan, documents = _documents(reference, ranks, images, longest)
    expected = run_row(reference, row_of(documents, vision=find_vision(reference.base, reference.facts)))
    return compare("cp", config, lambda: _run_cut(small, documents, plan), expected, tolerance_of(reference))


def _ranks_of_copy(small: PreTrainedModel, cp: int, ulysses: int) -> tuple[int, int]:
    """(ring, Ulysses) sizes for the copy: 2 for each that is larger than 1 on the mesh, if its heads allow that."""
    heads = int(getattr(small.config.get_text_config(), "num_attention_heads", None) or ulysses)
    return (2 if cp > ulysses else 1), (2 if ulysses > 1 and heads % 2 == 0 else 1)


def _documents(
    module: TrainModule, ranks: tuple[int, int], images: bool, longest: int
) -> tuple[StepPlan, dict[int, Document]]:
    """Documents, and a plan that splits the longest of them."""
    ring, ulysses = ranks if ranks != (1, 1) else (2, 1)
    vision, documents = find_vision(module.base, module.facts), list(text_documents(module, longest).values())
    if images and vision is not None:
        # A document with three images of several sizes, longer than a row.
        (pictures,) = image_documents(module, vision, [[("image", 1), ("image", 3), ("image", 2)]]).values()
        texts = [replace(d, tokens=d.tokens.masked_fill(vision.token_types(d.tokens) > 0, 1)) for d in documents]
        documents = [pictures, *texts]
    metadata = [document.meta(cost=float(len(document) ** 2)) for document in documents]
    budget = _BUDGET * longest // LENGTHS[0]
    plan = plan_step(metadata, ranks=ring * ulysses, budget=budget, ring=ring, ulysses=ulysses, cuts_images=images)
    return plan, dict(enumerate(documents))


def _run_cut(small: PreTrainedModel, documents: dict[int, Document], plan: StepPlan) -> Result:
    """Readouts and gradients of threads that share the documents; gradients are summed."""
    assert plan.group is not None
    ring, ulysses = plan.group.ring, plan.group.ulysses
    starts = [sum(len(d) - 1 for d in list(documents.values())[:n]) for n in range(len(documents))]

    def run_rank(rank: int, groups: Groups) -> Result:
        axis, module = axis_of(rank, ring, ulysses, groups), copy_of(small)
        vision = find_vision(module.base, module.facts)
        readouts = torch.zeros(2, sum(len(d) - 1 for d in documents.values()))
        for micro in range(plan.micro_batches):
            indices = plan.rows[micro][rank]
            row = cut_row(row_of(documents, vision=vision, indices=indices), plan, micro, rank, axis)
            if vision is not None and plan.shares_images(micro, rank):
                row = replace(row, **assign_images(indices, documents, plan, micro, rank, axis, vision))
            first = torch.tensor([starts[i] for i in indices], dtype=torch.int64)
            readouts[:, first[row.document_N] + row.token_N - 1] = run_row(module, row)[0]
        return readouts, gradients_of(module)

    results = in_threads(ring * ulysses, run_rank)
    return torch.stack([readouts for readouts, _ in results]).sum(0), sum_by_name(g for _, g in results)


def axis_of(rank: int, ring: int, ulysses: int, groups: Groups) -> CPAxis:
    """The axis of one simulated rank."""

    def among(ranks: list[int]) -> Communicator | None:
        return None if len(ranks) == 1 else groups(tuple(ranks), rank)

    member, inner = divmod(rank, ulysses)
    return CPAxis(
        rank, ring, ulysses, groups(tuple(range(ring * ulysses)), rank),
        among([m * ulysses + inner for m in range(ring)]), among([member * ulysses + u for u in range(ulysses)]),
    )  # fmt: skip
