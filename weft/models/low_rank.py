"""Low-rank additions to linear layers, embeddings and fused experts. The matmul B A is computed only for norms of DoRA,
a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.models import hf
from weft.models.quantised import QuantisedWeight

_SLAB = 1 << 22  # elements of W + s B A in memory at a time


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
    """An adapter: matrices A [.., in] and B [out, ..], uninitialised. like: weight with their dtype and device.

    dora: also a magnitude [out] (DoRA, Liu et al. 2024, arXiv:2402.09353). frozen: number of the last rows of A and
    columns of B that are never trained (lora.init)."""

    def __init__(
        self,
        a_shape: tuple[int, int],
        b_shape: tuple[int, int],
        scale: float,
        dropout: float,
        switch: AdapterSwitch,
        like: Tensor,
        *,
        dora: bool = False,
        frozen: int = 0,
    ) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(a_shape, device=like.device, dtype=like.dtype))
        self.B = nn.Parameter(torch.empty(b_shape, device=like.device, dtype=like.dtype))
        self.magnitude: nn.Parameter | None = None
        if dora:
            self.magnitude = nn.Parameter(torch.empty(b_shape[0], device=like.device, dtype=like.dtype))
        self.scale, self.dropout, self.switch, self.frozen = scale, dropout, switch, frozen
        self.kept_norm: Tensor | None = None  # cached result of norm() while W, A and B do not change
        self._inputs = a_shape[1]
        self._own_inputs: Callable[[Tensor], Tensor] | None = None
        self._sum: Callable[[Tensor], Tensor] | None = None

    def divide(
        self, own_inputs: Callable[[Tensor], Tensor] | None, total: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Declare that A has this rank's part of the inputs. own_inputs: [..., all inputs] -> [..., this rank's], to
        slice a dropout mask over all inputs; None if masks cover only this rank's inputs. total: the sum of a tensor
        over the ranks."""
        self._own_inputs, self._sum = own_inputs, total

    def down(self, x: Tensor) -> Tensor:
        """s A x, with dropout on x in training."""
        x = x.to(self.A.dtype)
        if self.dropout and self.training:
            x = self._drop(x)
        return F.linear(x, _first_trained(self.A, self.frozen, 0)) * self.scale

    def _drop(self, x: Tensor) -> Tensor:
        """Dropout. Ranks that divide the inputs draw the mask of all inputs and use their part, so their random states
        stay equal and the mask is that of a single rank."""
        if self._own_inputs is None:
            return F.dropout(x, self.dropout)
        return x * self._own_inputs(F.dropout(x.new_ones(*x.shape[:-1], self._inputs), self.dropout))

    def forward(self, x: Tensor) -> Tensor:
        """s B A x."""
        return F.linear(self.down(x), _first_trained(self.B, self.frozen, 1))

    def renormalised(self, weight: Tensor | QuantisedWeight, bias: Tensor | None, out: Tensor, added: Tensor) -> Tensor:
        """m (W x + s B A x) / ||W + s B A|| + b, where the norm is over inputs and constant for backward (DoRA).
        weight: [out, in]. out: W x + b. added: s B A x."""
        assert self.magnitude is not None
        factor = self.magnitude / self.norm(weight)
        plain = out if bias is None else out - bias
        return out + ((factor - 1) * plain + factor * added).to(out.dtype)

    @torch.no_grad()
    def norm(self, weight: Tensor | QuantisedWeight) -> Tensor:
        """||W + s B A|| over inputs, [out], of all ranks' inputs."""
        if self.kept_norm is not None:
            return self.kept_norm
        dtype = self.A.dtype
        values = weight.dequantised(dtype) if isinstance(weight, QuantisedWeight) else weight
        rows = max(1, _SLAB // values.shape[1])
        slabs = zip(values.split(rows), self.B.split(rows), strict=True)
        sums = [torch.addmm(w.to(dtype), b, self.A, alpha=self.scale).float().square().sum(1) for w, b in slabs]
        squares = torch.cat(sums)
        return (squares if self._sum is None else self._sum(squares)).sqrt().to(dtype)


def _first_trained(matrix: Tensor, frozen: int, dim: int) -> Tensor:
    """The matrix, whose last `frozen` rows (dim 0) or columns (dim 1) get a gradient of zero."""
    if not frozen:
        return matrix
    trained, constant = matrix.split([matrix.shape[dim] - frozen, frozen], dim)
    return torch.cat([trained, constant.detach()], dim)


def linear_hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Forward hook: adds the output of the adapter `lora` to its linear layer's output."""
    adapter: LowRank = module.lora
    if not adapter.switch.on:
        return out
    added = adapter(args[0])
    if adapter.magnitude is None:
        return out + added.to(out.dtype)
    weight = module.weight.T if hf.is_transposed(module) else module.weight
    return adapter.renormalised(weight, module.bias, out, added)


def embedding_hook(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Forward hook: adds the output of `lora_embedding`, times the family's scale, to its embedding's output."""
    adapter: LowRank = module.lora_embedding
    if not adapter.switch.on:
        return out
    added = F.linear(F.embedding(args[0], adapter.A.T), adapter.B) * adapter.scale
    factor = getattr(module, "embed_scale", None)
    return out + (added if factor is None else added * factor).to(out.dtype)
