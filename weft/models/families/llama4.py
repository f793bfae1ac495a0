"""llama4: chunked attention and temperature tuning count from the start of the document, not of the row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds


def by_document(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Bounds | None]:
    """(query, bounds) of a call: the temperature depends on the position in the document instead of the row, and bounds
    are split at chunk borders."""
    bounds: Bounds | None = kwargs.get(BOUNDS_ARGUMENT)
    if bounds is None or bounds.padded:
        return query, bounds
    config: Any = module.config
    if config.attn_temperature_tuning and not module.use_rope:
        # f(document position) / f(row position), f(p) = log1p(floor((p + 1) / floor_scale)) attn_scale + 1
        row = torch.arange(query.shape[2], device=query.device)
        document = torch.cat([torch.arange(n, device=query.device) for n in bounds.lengths])
        scale: Any = module.attn_scale
        floor: Any = module.floor_scale
        new, old = (torch.log1p(torch.floor((p.float() + 1.0) / floor)) * scale + 1.0 for p in (document, row))
        query = query * (new / old).to(query.dtype)[None, None, :, None]
    if config.layer_types[module.layer_idx] == "chunked_attention":
        return query, _chunked(bounds, config.attention_chunk_size, query.device)
    return query, bounds


def _chunked(bounds: Bounds, size: int, device: torch.device) -> Bounds:
    if "chunked" not in bounds.cache:
        lengths = tuple(min(size, n - start) for n in bounds.lengths for start in range(0, n, size))
        bounds.cache["chunked"] = Bounds.packed(lengths, device)
    return bounds.cache["chunked"]


ADAPTERS = {"llama4_text": by_document}
