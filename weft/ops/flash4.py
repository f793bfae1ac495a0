"""Flash attention 4 (the package flash-attn-4): on Hopper about 1.7 times as fast as torch's kernel, forward and
backward.

torch can register it (`activate_flash_attention_impl("FA4")`), but torch 2.11 expects results that version 4.0.0b36 no
longer returns. So weft calls the package's forward and backward functions directly, with arguments that both versions
have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.ops.recompute import compiled_kernel, reuse_in_recompute

FLASH4 = "flash-attn-4"  # name of the package on PyPI


def flash4_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, longest: int, longest_key: int,
    *, scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Equal to torch's varlen_attn: [tokens, H, E] from tensors [tokens, heads, width] of documents end to end."""
    left, right = window_size
    options = {
        "cu_seqlens_q": cu_queries, "cu_seqlens_k": cu_keys, "max_seqlen_q": longest, "max_seqlen_k": longest_key,
        "softmax_scale": scale, "causal": right == 0, "window_size_left": None if left < 0 else left,
        "window_size_right": None if left < 0 or right < 0 else right,
    }  # fmt: skip
    out: Tensor = _Flash4.apply(query, key, value, options)
    return out


class _Flash4(torch.autograd.Function):
    """Attention. If the recompute policy keeps attention results, recomputation reuses output and logsumexp."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            from flash_attn.cute.interface import _flash_attn_fwd

            with compiled_kernel():
                out, logsumexp, *_ = _flash_attn_fwd(query, key, value, return_lse=True, **options)
            return out, logsumexp

        out, logsumexp = reuse_in_recompute(compute, "attention")
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        query, key, value, out, logsumexp = ctx.saved_tensors
        deterministic = torch.are_deterministic_algorithms_enabled()
        gradients = _flash_attn_bwd(
            query, key, value, out, grad.contiguous(), logsumexp, deterministic=deterministic, **ctx.options
        )
        return *gradients[:3], None
