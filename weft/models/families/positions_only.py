"""stablelm and nemotron: decoder layers drop unknown arguments, so bounds come from position_ids, which restart in each
document."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from weft.ops.attention_call import Bounds


def bounds_from_positions(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Bounds | None]:
    """Bounds from the zeros of position_ids [B, T]. Reads them on the host: one sync per call on an accelerator."""
    positions = kwargs.get("position_ids")
    if positions is None:
        return query, None
    length = query.shape[2]
    if length == 1:  # a generation step, or documents of one token: both have the same attention
        return query, Bounds((1,) * len(positions), padded=True, past=positions[:, 0])
    if positions.shape[0] > 1:
        return query, Bounds((length,) * positions.shape[0], padded=True)
    starts = [*(positions[0] == 0).nonzero().flatten().tolist(), length]
    lengths = tuple(end - start for start, end in pairwise(starts))
    return query, Bounds.packed(lengths, query.device)


ADAPTERS = dict.fromkeys(("stablelm", "nemotron"), bounds_from_positions)
