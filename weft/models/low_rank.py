"""Low-rank additions to linear layers, embeddings and fused experts. The product B A is never materialised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    """An adapter: matrices A [.., in] and B [out, ..], uninitialised. like: weight with their dtype and device."""

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

    def divide(self, own_inputs: Callable[[Tensor], Tensor] | None) -> None:
        """Declare that A holds this rank's part of the inputs. own_inputs: [..., all inputs] -> [..., this rank's], to
        cut a dropout mask over all inputs; None if masks are over this rank's inputs alone."""
        self._own_inputs = own_inputs

    def down(self, x: Tensor) -> Tensor:
        """s A x, with dropout on x in training."""
        x = x.to(self.A.dtype)
        if self.dropout and self.training:
            x = self._drop(x)
        return F.linear(x, self.A) * self.scale

    def _drop(self, x: Tensor) -> Tensor:
        """Dropout. Ranks that divide the inputs draw the mask of all inputs and use their part, so that their random
        states stay equal and the mask is the one that a single rank would draw."""
        if self._own_inputs is None:
            return F.dropout(x, self.dropout)
        return x * self._own_inputs(F.dropout(x.new_ones(*x.shape[:-1], self._inputs), self.dropout))

    def forward(self, x: Tensor) -> Tensor:
        """s B A x."""
        return F.linear(self.down(x), self.B)


def linear_hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Forward hook: adds the output of the adapter `lora` to its linear layer's output."""
    adapter: LowRank = module.lora
    return out + adapter(args[0]).to(out.dtype) if adapter.switch.on else out


def embedding_hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Forward hook: adds the output of `lora_embedding`, times the family's scale, to its embedding's output."""
    adapter: LowRank = module.lora_embedding
    if not adapter.switch.on:
        return out
    added = F.linear(F.embedding(args[0], adapter.A.T), adapter.B) * adapter.scale
    factor = getattr(module, "embed_scale", None)
    return out + (added if factor is None else added * factor).to(out.dtype)
