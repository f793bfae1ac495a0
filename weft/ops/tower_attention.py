"""Attention of a vision tower. Images, or windows of images, are laid end to end. Each attends to all of itself.

N patches of all images, H heads, D head width.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.ops.attention import KERNELS, flash_rows
from weft.ops.attention_call import Traits

BOTH_WAYS = (-1, -1)  # window argument of flash kernels: unlimited on both sides


def attend_in_tower(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function for vision towers that weft registers with transformers. Returns ([1, N, H, D], None).

    cu_seq_lens_q: cumulative lengths of images or windows. max_length_q: the largest length. transformers passes these
    to flash kernels. Raises RuntimeError if the model's code does not pass them.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError(
            f"{type(module).__name__}: the bounds of images did not reach attention, so images would see each other. "
            "Please report the model."
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query_1HND, key_1HND, value_1HND))
    width = query_1HND.shape[-1]
    scale = width**-0.5 if scaling is None else float(scaling)
    if KERNELS["varlen"].suits(query_1HND.device, query_1HND.dtype, Traits(width, value_1HND.shape[-1])):
        cumulative = cu_seq_lens_q.to(torch.int32)
        out = flash_rows(query, key, value, cumulative, cumulative, max_length_q, max_length_q, scale, BOTH_WAYS)
    else:
        out = _alike_together(query, key, value, cu_seq_lens_q.diff().tolist(), scale)
    return out[None], None


def _alike_together(query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor, lengths: list[int], scale: float) -> Tensor:
    """[N, H, D]: attention in which all images or windows of equal length run as one batch, also if they are not
    neighbours. (Windows at the edges of an image are smaller than inner windows.)"""
    counts = Counter(lengths)
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])  # stable
    moved = order != list(range(len(lengths)))
    rows = [query_NHD, key_NHD, value_NHD]
    if moved:
        order_N = _tokens(lengths, order, query_NHD.device)
        rows = [x.index_select(0, order_N) for x in rows]
    sizes = [length * counts[length] for length in sorted(counts)]
    results = []
    for length, *tensors in zip(sorted(counts), *(x.split(sizes) for x in rows), strict=True):
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in tensors)
        results.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
    out_NHD = results[0] if len(results) == 1 else torch.cat(results)
    return out_NHD.index_select(0, order_N.argsort()) if moved else out_NHD


def _tokens(lengths: list[int], order: list[int], device: torch.device) -> Tensor:
    """[N] indices of the patches, with images or windows in the order `order`."""
    firsts = torch.tensor(list(accumulate(lengths, initial=0))[:-1])[order]
    counts = torch.tensor(lengths)[order]
    ends = counts.cumsum(0)
    return (torch.arange(int(ends[-1])) + (firsts - (ends - counts)).repeat_interleave(counts)).to(device)
