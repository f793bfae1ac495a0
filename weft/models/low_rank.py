"""Low-rank additions to linear layers, embeddings and fused experts. The product B A is never materialised.

S rows of (token, chosen expert) pairs; E experts; r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.models import hf


class AdapterSwitch:
    """Turns all adapters of a model on and off."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turn the adapters off inside."""
        self.on = False
        try:
            yield
        finally:
            self.on = True


class LowRank(nn.Module):
    """An adapter: matrices A [.., in] and B [out, ..], unfilled. like: the weight that it adapts."""

    def __init__(
        self,
        a_shape: tuple[int, int],
        b_shape: tuple[int, int],
        scale: float,
        dropout: float,
        switch: AdapterSwitch,
        like: Tensor,
    ) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(a_shape, device=like.device, dtype=like.dtype))
        self.B = nn.Parameter(torch.empty(b_shape, device=like.device, dtype=like.dtype))
        self.scale, self.dropout, self.switch = scale, dropout, switch
        self._inputs = a_shape[1]
        self._own_inputs: Callable[[Tensor], Tensor] | None = None

    def divide(self, own_inputs: Callable[[Tensor], Tensor]) -> None:
        """Make A work on a part of the layer's inputs. own_inputs: [..., all inputs] -> [..., this rank's]."""
        self._own_inputs = own_inputs

    def down(self, x: Tensor) -> Tensor:
        """s A x, with dropout on x."""
        x = x.to(self.A.dtype)
        if self.dropout and self.training:
            x = self._drop(x)
        return F.linear(x, self.A) * self.scale

    def _drop(self, x: Tensor) -> Tensor:
        """Ranks that divide the inputs draw the mask of all of them, so that every rank draws equally much, and what is
        dropped is what one rank would drop."""
        if self._own_inputs is None:
            return F.dropout(x, self.dropout)
        return x * self._own_inputs(F.dropout(x.new_ones(*x.shape[:-1], self._inputs), self.dropout))

    def forward(self, x: Tensor) -> Tensor:
        """s B A x."""
        return F.linear(self.down(x), self.B)


def linear_hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Forward hook: adds the output of the adapter `lora` to that of its linear layer."""
    adapter: LowRank = module.lora
    return out + adapter(args[0]).to(out.dtype) if adapter.switch.on else out


def embedding_hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Forward hook: adds the output of `lora_embedding` to that of its embedding, with the family's scale."""
    adapter: LowRank = module.lora_embedding
    if not adapter.switch.on:
        return out
    added = F.linear(F.embedding(args[0], adapter.A.T), adapter.B) * adapter.scale
    factor = getattr(module, "embed_scale", None)
    return out + (added if factor is None else added * factor).to(out.dtype)


def experts_forward(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The forward of fused experts with adapters `lora_NAME`, for transformers' experts interface.

    Rows are sorted by expert, so that each projection, and each adapter matrix, is one grouped product.
    """
    tokens, chosen = chosen_TK.shape
    order_S = chosen_TK.reshape(-1).argsort(stable=True)
    expert_S = chosen_TK.reshape(-1)[order_S]
    # Where each expert's rows end; a sorted list needs no histogram, whose order of additions is left open on CUDA.
    every_E = torch.arange(experts.num_experts, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, every_E, right=True).to(torch.int32)
    rows = hidden_TH[order_S // chosen]
    if experts.has_gate:
        rows = experts._apply_gate(_project(experts, "gate_up_proj", rows, expert_S, ends_E))
    else:
        rows = experts.act_fn(_project(experts, "up_proj", rows, expert_S, ends_E))
    rows = _project(experts, "down_proj", rows, expert_S, ends_E)
    rows = rows * weights_TK.reshape(-1)[order_S, None]
    place_S = torch.empty_like(order_S).index_copy(0, order_S, torch.arange(len(order_S), device=order_S.device))
    return rows[place_S].view(tokens, chosen, -1).sum(1).to(hidden_TH.dtype)


def _project(experts: Any, name: str, rows: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
    """Each row through its own expert's matrix `name`, and through its adapter."""
    bias = getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else None
    out = hf.grouped_linear(rows, getattr(experts, name), ends_E, bias, experts.is_transposed)
    adapter: LowRank | None = getattr(experts, f"lora_{name}", None)
    if adapter is None or not adapter.switch.on:
        return out
    count = experts.num_experts
    a_Eri = adapter.A.view(count, -1, adapter.A.shape[1])
    b_Eor = adapter.B.view(len(adapter.B), -1, count).permute(2, 0, 1)
    missing = -a_Eri.shape[1] % (16 // rows.element_size())  # grouped products want rows of whole 16 bytes
    a_Eri, b_Eor = F.pad(a_Eri, (0, 0, 0, missing)), F.pad(b_Eor, (0, missing)).contiguous()
    inner = hf.grouped_linear(rows, a_Eri, ends_E, None, False) * adapter.scale
    return out + hf.grouped_linear(inner, b_Eor, ends_E, None, False).to(out.dtype)
