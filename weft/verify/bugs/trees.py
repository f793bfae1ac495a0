"""Bugs of documents that share prefixes and are forwarded as one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.batch.rows import Repeats, Row
from weft.ops.attention_call import Call
from weft.ops.segments import ROOT, Segments
from weft.verify.bugs import GRADIENTS, Original, Plant, bug

_TRL, _MEGATRON = "huggingface/trl#7328", "NVIDIA/Megatron-LM#7386"


@bug(
    "B39", "weft.engine.batch.rows:shift_labels",
    "the first token of a suffix is predicted from the previous token in the row, the last token of a sibling",
    caught_by=GRADIENTS, issue=_TRL,
)  # fmt: skip
def suffix_after_its_sibling(
    plant: Plant, original: Original, documents: Sequence[Document], token_index: Any, read: Sequence[int], *args: Any,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    out: dict[str, Any] = original(documents, token_index, read, *args, **options)
    firsts = torch.tensor([0, *read]).cumsum(0)
    document_N, token_N = out["document_N"], out["token_N"]
    is_read = token_N < torch.tensor(read)[document_N] if read else token_N < 0
    before_N = token_index.row_K[(firsts[document_N] + token_N)[is_read]] - 1
    plant.hits += int((before_N != out["selected_N"][is_read]).sum())
    return {**out, "selected_N": out["selected_N"].masked_scatter(is_read, before_N), "repeats": None}


def _segment_starts(row_T: Tensor) -> Tensor:
    """[T] bool: where a document's next segment begins."""
    return torch.cat([torch.tensor([False]), row_T.diff() != 1])


@bug(
    "B39", "weft.engine.batch.rows:build_positions",
    "positions of a suffix start at 0",
    caught_by=GRADIENTS, issue=_TRL,
)  # fmt: skip
def suffix_positions_restart(
    plant: Plant, original: Original, documents: Sequence[Document], token_index: Any, read: Sequence[int], *args: Any
) -> Tensor:
    positions: Tensor = original(documents, token_index, read, *args)
    for row_T in token_index.row_K.split(list(read)):
        starts_T = _segment_starts(row_T)
        if starts_T.any():
            plant.hit()
            first_T = torch.where(starts_T, row_T, row_T[:1]).cummax(0).values
            positions.view(-1)[row_T] = row_T - first_T
    return positions


@bug(
    "B39", "weft.engine.batch.rows:build_positions",
    "positions of a suffix continue over its siblings",
    caught_by=GRADIENTS, issue=_TRL,
)  # fmt: skip
def suffix_positions_run_on(
    plant: Plant, original: Original, documents: Sequence[Document], token_index: Any, read: Sequence[int], *args: Any
) -> Tensor:
    positions: Tensor = original(documents, token_index, read, *args)
    for row_T in token_index.row_K.split(list(read)):
        if _segment_starts(row_T).any():
            plant.hit()
            positions.view(-1)[row_T] = row_T - row_T[0]
    return positions


@bug(
    "B40", "weft.engine.batch.rows:shift_labels",
    "a shared token that several documents train is trained only for the first document",
    caught_by=GRADIENTS, issue=_TRL,
)  # fmt: skip
def shared_token_trained_once(plant: Plant, original: Original, *args: Any, **options: Any) -> dict[str, Any]:
    out: dict[str, Any] = original(*args, **options)
    repeats: Repeats | None = out["repeats"]
    if repeats is None:
        return out
    plant.hit()
    first_U = repeats.first_U.sort().values
    names = ("selected_N", "targets_N", "weights_N", "document_N", "token_N")
    arrays = {name: values[first_U] for name, values in out["arrays"].items()}
    return {**out, **{name: out[name][first_U] for name in names}, "arrays": arrays, "repeats": None}


@bug(
    "B40", "weft.ops.segments:Segments.holders_DS",
    "a token that several documents share counts once in the auxiliary loss of experts",
    caught_by=GRADIENTS, issue="areal-project/AReaL#804", needs="experts and model.router_aux_loss",
)  # fmt: skip
def shared_token_counts_once(plant: Plant, original: Original, self: Segments, device: torch.device) -> Tensor:
    holders_DS: Tensor = original(self, device)
    plant.hits += int((holders_DS.sum(0) > 1).any())
    return holders_DS * (holders_DS.cumsum(0) == 1)


@bug(
    "B40", "weft.ops.attention:attend_by_paths",
    "gradients of a shared token's keys and values from later siblings are lost, so only one document contributes",
    caught_by=GRADIENTS, issue="areal-project/AReaL#804",
)  # fmt: skip
def gradient_of_one_sibling(plant: Plant, original: Original, run: Callable[[Call], Tensor], call: Call) -> Tensor:
    segments, device = call.bounds.segments, call.key_BKTD.device
    if segments is None:
        return original(run, call)
    plant.hit()
    parents = segments.parents
    is_first = [parent == ROOT or parent not in parents[:n] for n, parent in enumerate(parents)]
    parts = zip(is_first, segments.before, segments.lengths, strict=True)
    lost = [torch.tensor([not first] * before + [False] * length, dtype=torch.bool) for first, before, length in parts]
    lost_S = torch.cat(lost).to(device)[:, None]
    tensors = (x.index_select(2, segments.key_tokens(device)) for x in (call.key_BKTD, call.value_BKTE))
    key, value = (torch.where(lost_S, x.detach(), x) for x in tensors)
    return run(replace(call, key_BKTD=key, value_BKTE=value, bounds=call.bounds.by_paths(device)))


@bug(
    "B41", "weft.engine.batch.rows:build_row",
    "a suffix attends to its siblings, and states continue from one sibling to the next",
    caught_by=GRADIENTS, issue=_MEGATRON,
)  # fmt: skip
def siblings_are_visible(plant: Plant, original: Original, *args: Any, **options: Any) -> Row:
    row: Row = original(*args, **options)
    segments = row.bounds.segments
    if segments is None:
        return row
    parents = tuple(ROOT if parent == ROOT else n - 1 for n, parent in enumerate(segments.parents))
    if parents != segments.parents:
        plant.hit()
    chained = Segments(segments.lengths, parents, segments.last_segments)
    return replace(row, bounds=replace(row.bounds, segments=chained))


@bug(
    "B39", "weft.ops.attention:attend_by_paths",
    "a window is counted along the row, so later siblings do not attend to the shared prefix",
    caught_by=GRADIENTS, issue=_TRL, needs="a family with sliding windows, such as gemma3",
)  # fmt: skip
def window_along_the_row(plant: Plant, original: Original, run: Callable[[Call], Tensor], call: Call) -> Tensor:
    segments, window = call.bounds.segments, call.window
    if segments is None or window is None:
        return original(run, call)
    ends = [start + length for start, length in zip(segments.starts, segments.lengths, strict=True)]
    far = [
        parent != ROOT and start - ends[parent] >= window
        for parent, start in zip(segments.parents, segments.starts, strict=True)
    ]
    plant.hits += sum(far)
    parents = tuple(ROOT if is_far else parent for is_far, parent in zip(far, segments.parents, strict=True))
    near = Segments(segments.lengths, parents, segments.last_segments)
    return original(run, replace(call, bounds=replace(call.bounds, segments=near, cache={})))
