"""Bugs of context parallelism: tokens that are lost, or counted twice, if documents are split over ranks.

Like bugs of tensor parallelism, they are inactive in the checks of a small copy before the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.losses.base import Batch, Loss, LossOutput
from weft.ops.attention_call import Bounds, TokenRange
from weft.ops.communicator import GroupCommunicator
from weft.ops.context import repeats
from weft.verify.bugs import GRADIENTS, LOGPROB, LOSS, Original, Plant, bug, rehearsing
from weft.verify.bugs.step import Altered

IMAGES_BEHIND_CUT = "images after a split document: logprob"
SAMPLES = "tests/parallel/test_context_parallel.py: ratios of whole samples"
HELD_OUT_CUT = "tests/recipes/test_eval.py: the held-out loss of documents that are cut"
MEGATRON = "NVIDIA/Megatron-LM#7452"
NEEDS = "mesh.cp above 1"


# ---------------------------------------------------------------- counts


@bug(
    "B4", "weft.engine.engine:Engine.accumulate",
    "the step's tokens are counted once for each rank of cp",
    caught_by=GRADIENTS, issue="PrimeIntellect-ai/prime-rl#2562", ranks=2, needs=NEEDS,
)  # fmt: skip
def tokens_per_cp_rank(
    plant: Plant, original: Original, self: Any, plan: Any, documents: Mapping[int, Document], objective: Loss
) -> Any:
    def count(plan: Any) -> float:
        plant.hits += self.mesh.cp_size > 1
        return objective.normaliser(plan) * float(self.mesh.cp_size)

    return original(self, plan, documents, Altered(objective, count=count))


@bug(
    "B37", "weft.engine.losses.base:Batch.document_sum",
    "a split document counts on every rank that has a part of it",
    caught_by=SAMPLES, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and a loss of complete documents, such as GSPO",
)  # fmt: skip
def cut_document_counted_again(plant: Plant, original: Original, self: Batch, values_N: Tensor) -> Tensor:
    if self.shared is None:
        result: Tensor = original(self, values_N)
        return result
    plant.hits += len(self.shared.counted_indices) < len(self.documents)
    return self._document_sums(values_N)


@bug(
    "B37", "weft.ops.shared_documents:SharedDocuments.complete",
    "sums over a split document include only a rank's part",
    caught_by=SAMPLES, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and a loss of complete documents, such as GSPO",
)  # fmt: skip
def document_sums_of_parts(plant: Plant, original: Original, self: Any, values: Tensor) -> Tensor:
    plant.hit()
    return values


@bug(
    "B24", "weft.engine.engine:Engine.evaluate",
    "for a split held-out document, the rank with its first token evaluates its part, and other ranks evaluate nothing",
    caught_by=HELD_OUT_CUT, issue="areal-project/AReaL#1096", ranks=2, needs=f"{NEEDS} and held-out documents",
)  # fmt: skip
def held_out_parts_dropped(plant: Plant, original: Original, self: Any, plan: Any, documents: Any, args: Any) -> Any:
    def change(batch: Batch, terms: LossOutput) -> LossOutput:
        if batch.shared is None:
            return terms
        counted = torch.isin(batch.document_N, batch.shared.counted_indices)
        plant.hits += not bool(counted.all())
        return args(replace(batch, weights_N=batch.weights_N * counted))

    return original(self, plan, documents, Altered(args, change=change))


# ---------------------------------------------------------------- where a document is cut


@bug(
    "B8", "weft.engine.batch.rows:local_predictions",
    "labels are shifted after the split, so the last token of a part predicts nothing",
    caught_by=LOSS, issue="huggingface/transformers#48570", ranks=2, needs=NEEDS,
)  # fmt: skip
def labels_lost_at_the_cut(plant: Plant, original: Original, selected_N: Tensor, kept_M: Tensor, tokens: int) -> Any:
    chosen, places = original(selected_N, kept_M, tokens)
    if rehearsing():
        return chosen, places
    inside = torch.isin(selected_N[chosen] + 1, kept_M)
    plant.hits += not bool(inside.all())
    return chosen[inside], places[inside]


@bug(
    "B7", "weft.engine.batch.rows:cut_row",
    "positions restart with each part of a split document",
    caught_by=LOGPROB, issue="verl-project/verl#1947", ranks=2, needs=NEEDS,
)  # fmt: skip
def positions_begin_at_the_cut(plant: Plant, original: Original, *arguments: Any) -> Any:
    row = original(*arguments)
    repeated = torch.cat([torch.arange(n) for n in row.bounds.lengths]).expand_as(row.position_ids_BT)
    plant.hits += not torch.equal(repeated, row.position_ids_BT)
    return replace(row, position_ids_BT=repeated)


# ---------------------------------------------------------------- keys and values in the ring


@bug(
    "B37", "weft.ops.attention_call:visible_keys",
    "a part of a document does not attend to the parts before it",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and mesh.ulysses=1",
)  # fmt: skip
def earlier_pieces_missing(
    plant: Plant, original: Original, runs: list[TokenRange], window: int | None
) -> list[TokenRange]:
    result: list[TokenRange] = original(runs, window)
    if rehearsing() or window is not None:
        return result
    plant.hits += result != list(runs)
    return list(runs)


@bug(
    "B37", "weft.ops.attention_call:visible_keys",
    "sliding windows end at the first token of a rank",
    caught_by=LOGPROB, issue="huggingface/accelerate#4177", ranks=2, needs=f"{NEEDS} and sliding windows",
)  # fmt: skip
def windows_end_at_the_cut(
    plant: Plant, original: Original, runs: list[TokenRange], window: int | None
) -> list[TokenRange]:
    result: list[TokenRange] = original(runs, window)
    if rehearsing() or window is None:
        return result
    plant.hits += result != list(runs)
    return list(runs)


@bug(
    "B37", "weft.ops.context:ring_attention",
    "sliding windows become full attention",
    caught_by=LOGPROB, issue="huggingface/accelerate#4177", ranks=2, needs=f"{NEEDS} and sliding windows",
)  # fmt: skip
def windows_forgotten(plant: Plant, original: Original, call: Any, context: Any, run: Any) -> Tensor:
    if not rehearsing():
        plant.hits += call.window is not None
        call = replace(call, window=None)
    result: Tensor = original(call, context, run)
    return result


@bug(
    "B37", "weft.ops.attention_call:ContextRow.build_keys",
    "keys from other ranks come after the rank's keys, not in the order of the document",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and mesh.ulysses=1",
)  # fmt: skip
def keys_as_they_come(plant: Plant, original: Original, self: Any, *args: Any) -> Any:
    result = original(self, *args)
    if rehearsing():
        return result
    sorted_run = result.run.sort()[0]
    plant.hits += not torch.equal(sorted_run, result.run)
    return replace(result, run=sorted_run)


@bug(
    "B37", "weft.ops.communicator:_Exchange.backward",
    "gradients of sent keys and values are not returned",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def gradients_stay_away(plant: Plant, original: Original, ctx: Any, grad: Tensor) -> Any:
    local, *args = original(ctx, grad)
    if not isinstance(ctx.arguments[0], GroupCommunicator):
        return local, *args
    plant.hits += local.numel() > 0
    return local * 0, *args


@bug(
    "B37", "weft.ops.per_document:block_spans",
    "in a split document, all blocks of queries except the last attend to later tokens",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def blocks_see_later_tokens(
    plant: Plant, original: Original, call: Any, queries: int, keys: int
) -> Iterator[tuple[slice, slice]]:
    for block, items in original(call, queries, keys):
        if rehearsing():
            yield block, items
            continue
        plant.hits += items.stop < keys
        yield block, slice(items.start, keys)


# ---------------------------------------------------------------- images beside a document that is cut


@bug(
    "B37", "weft.ops.attention:attend_in_context",
    "images after a split document attend to as many later tokens as this rank has of that document",
    caught_by=IMAGES_BEHIND_CUT, issue=MEGATRON, ranks=2,
    needs=f"{NEEDS} and images whose tokens attend to later ones, as in gemma3",
)  # fmt: skip
def images_see_beyond_themselves(plant: Plant, original: Original, call: Any, context: Any, run: Any) -> Tensor:
    if call.bounds.last_seen is not None and context.whole_lengths and not rehearsing():
        plant.hits += context.tokens > 0
        call = replace(call, bounds=replace(call.bounds, last_seen=call.bounds.last_seen + context.tokens))
    result: Tensor = original(call, context, run)
    return result


@bug(
    "B37", "weft.engine.batch.rows:local_last_seen",
    "the later tokens that an image attends to are read at another token's position in a row with a split document",
    caught_by=IMAGES_BEHIND_CUT, issue=MEGATRON, ranks=2,
    needs=f"{NEEDS} and images whose tokens attend to later ones, as in gemma3",
)  # fmt: skip
def images_see_by_another_place(
    plant: Plant, original: Original, last_seen_T: Tensor, kept_M: Tensor, tail: int
) -> Tensor:
    moved = last_seen_T.clone()
    moved[kept_M] = last_seen_T[: len(kept_M)]
    plant.hits += not torch.equal(moved, last_seen_T)
    result: Tensor = original(moved, kept_M, tail)
    return result


@bug(
    "B37", "weft.engine.batch.assigned_images:plan_exchange",
    "features of images are sent in the order of the row, but read as if sorted by document",
    caught_by=IMAGES_BEHIND_CUT, issue=MEGATRON, ranks=2,
    needs=f"{NEEDS} and rows with a split document with images and other documents with images",
)  # fmt: skip
def features_in_the_order_of_the_row(
    plant: Plant, original: Original, items: Sequence[Any], documents: Any, shards: Any, axis: Any
) -> Any:
    result = original(items, documents, shards, axis)
    by_row = original([replace(single, index=index) for index, single in enumerate(items)], (), shards, axis)
    plant.hits += not torch.equal(result.sent, by_row.sent)
    return replace(result, sent=by_row.sent)


# ---------------------------------------------------------------- heads in Ulysses


@bug(
    "B37", "weft.ops.context:heads_for_tokens",
    "every rank of Ulysses has the sinks of the first heads",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs="mesh.ulysses above 1 and sinks, as in gpt_oss",
)  # fmt: skip
def sinks_of_the_first_heads(plant: Plant, original: Original, call: Any, context: Any, ranks: Any) -> Any:
    result = original(call, context, ranks)
    if result.sinks_H is None or not isinstance(ranks, GroupCommunicator):
        return result
    plant.hit()
    return replace(result, sinks_H=call.sinks_H[: result.query_BHTD.shape[1]])


@bug(
    "B37", "weft.ops.context:heads_for_tokens",
    "gradients of a key and value head on several ranks of Ulysses are multiplied by their number again",
    caught_by=GRADIENTS, issue="ByteDance-Seed/VeOmni#338", ranks=2,
    needs="mesh.ulysses above the heads of keys and values",
)  # fmt: skip
def repeated_keys_multiplied(plant: Plant, original: Original, call: Any, context: Any, ranks: Any) -> Any:
    key, value, size = call.key_BKTD, call.value_BKTE, context.axis.ulysses_size
    times = repeats(key.shape[1], call.query_BHTD.shape[1], size)
    if times > 1 and isinstance(ranks, GroupCommunicator):
        plant.hit()
        key, value = (x * times - (x * (times - 1)).detach() for x in (key, value))
    return original(replace(call, key_BKTD=key, value_BKTE=value), context, ranks)


# ---------------------------------------------------------------- states


@bug(
    "B6", "weft.ops.attention_call:ContextRow.shared_bounds",
    "states and convolutions continue from one split document to the next",
    caught_by=LOGPROB, issue="verl-project/verl#6660", ranks=4,
    needs="mesh.ulysses above 2, layers that carry state, and rows with two split documents",
)  # fmt: skip
def state_runs_into_the_next(plant: Plant, original: Original, self: Any, device: torch.device) -> Bounds:
    result: Bounds = original(self, device)
    if rehearsing():
        return result
    plant.hits += len(result.lengths) > 1
    return Bounds.packed((sum(result.lengths),), device)


@bug(
    "B37", "weft.ops.attention_call:ContextRow.shared_bounds",
    "states and convolutions restart at the first token of a rank's part of a document",
    caught_by=LOGPROB, issue="PrimeIntellect-ai/prime-rl#2562", ranks=2,
    needs="mesh.ulysses above 1 and layers that carry state",
)  # fmt: skip
def state_begins_at_the_cut(plant: Plant, original: Original, self: Any, device: torch.device) -> Bounds:
    result: Bounds = original(self, device)
    if rehearsing():
        return result
    pieces = sorted(piece for ranges in self.ranges_by_rank for piece in ranges)
    plant.hits += len(pieces) > len(result.lengths)
    return Bounds.packed(tuple(stop - start for _, start, stop in pieces), device)
