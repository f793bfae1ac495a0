"""The position of every tensor of a checkpoint in the model: the map that loading, export and weight sync share.

For some families, the layout in checkpoints differs from the layout in memory (single experts, fused projections,
transposes). transformers' conversion rules run once, on placeholders that record the box of the parameter that each
result is. After that, every tensor of a checkpoint is a box of a parameter with permuted dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.errors import UserError
from weft.models import hf
from weft.parallel.shards.boxes import Box


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """The checkpoint's tensor `disk` equals the box `box` of the model's tensor `runtime`, with permuted dimensions.

    dims[i]: the runtime dimension that is dimension i of the checkpoint's tensor. All other runtime dimensions have
    size 1 in the box."""

    disk: str
    runtime: str
    box: Box
    dims: tuple[int, ...]

    @staticmethod
    def identity(disk: str, runtime: str, shape: tuple[int, ...]) -> TensorMapping:
        """The mapping of a full tensor without change of layout."""
        return TensorMapping(disk, runtime, Box.from_shape(shape), tuple(range(len(shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return tuple(self.box.size[dim] for dim in self.dims)

    def disk_box(self, box: Box) -> Box:
        """The box of the checkpoint's tensor that corresponds to `box`, a part of the mapping's box."""
        return Box(
            tuple(box.start[dim] - self.box.start[dim] for dim in self.dims), tuple(box.size[dim] for dim in self.dims)
        )

    def to_disk(self, values: Tensor) -> Tensor:
        """A view of `values` in the checkpoint's order of dimensions. values: elements of a part of the mapping's
        box."""
        if self.dims == tuple(range(values.ndim)):
            return values
        dropped = [dim for dim in range(values.ndim) if dim not in self.dims]
        return values.permute(*self.dims, *dropped).reshape([values.shape[dim] for dim in self.dims])

    def to_runtime(self, values: Tensor, box: Box) -> Tensor:
        """A view of `values` in the model's order of dimensions. values: elements of disk_box(box)."""
        if self.dims == tuple(range(len(box.size))):
            return values
        dropped = [dim for dim in range(len(box.size)) if dim not in self.dims]
        order = [*self.dims, *dropped]
        return values.reshape([*values.shape, *(1 for _ in dropped)]).permute(
            [order.index(d) for d in range(len(order))]
        )


def map_tensors(model: PreTrainedModel, names: Iterable[str] | None) -> list[TensorMapping]:
    """The mappings of every parameter and persistent buffer. A tied tensor occurs under its owner's name.

    names: names of the source's tensors, which select the conversion rules; None for transformers' default layout. Call
    this before the model is sharded: rules are selected by class, and sharding renames classes. Raises UserError if the
    rules do more than reorder elements, or lose elements.
    """
    if names is not None:
        hf.choose_rules(model, names)
    tied = hf.tied_parameters(model)
    traced_tensors = {
        name: _Traced(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name not in tied
    }
    try:
        on_disk = hf.run_rules_backwards(model, traced_tensors)
    except UnsupportedRule as error:
        raise UserError(
            f"model.path: the layout of {type(model).__name__}'s checkpoints needs {error}, which weft cannot follow."
        ) from error
    mappings = [traced.mapping(name) for name, traced in on_disk.items()]
    mapped = dict.fromkeys(traced_tensors, 0)
    for mapping in mappings:
        mapped[mapping.runtime] += mapping.box.numel
    lost = [name for name, traced in traced_tensors.items() if mapped[name] != traced.box.numel]
    if lost:
        raise UserError(
            f"model.path: transformers' rules for writing {type(model).__name__} as this checkpoint lays it out would "
            f"lose weights of {', '.join(lost[:3])} ({len(lost)} in all). Is it quantised? Use one in bf16 or fp32."
        )
    return mappings


class UnsupportedRule(Exception):
    """Raised for a conversion rule that does more than reorder elements."""


class _Traced:
    """A placeholder for a tensor in transformers' conversion operations. It records the origin of its elements."""

    def __init__(self, runtime: str, shape: tuple[int, ...]) -> None:
        self.runtime = runtime
        self.box = Box.from_shape(shape)
        self.dims = tuple(range(len(shape)))

    def mapping(self, disk: str) -> TensorMapping:
        return TensorMapping(disk, self.runtime, self.box, self.dims)

    # The tensor methods that the operations call. Only the order of elements matters, so contiguous() does nothing.

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.box.size[dim] for dim in self.dims)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    def size(self, dim: int) -> int:
        return self.box.size[self.dims[dim]]

    def contiguous(self) -> _Traced:
        return self

    def squeeze(self, dim: int | None = None) -> _Traced:
        squeezed = self.dims if dim is None else (self.dims[dim],)
        return self._with(self.box, tuple(d for d in self.dims if self.box.size[d] != 1 or d not in squeezed))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.chunk:
            return cls._chunk(*args, **(kwargs or {}))
        if function is torch.transpose:
            return cls._transpose(*args, **(kwargs or {}))
        raise UnsupportedRule(getattr(function, "__name__", str(function)))

    def _chunk(self, chunks: int, dim: int = 0) -> tuple[_Traced, ...]:
        runtime_dim = self.dims[dim]
        total, out = self.box.size[runtime_dim], []
        step = -(-total // chunks)
        for first in range(0, total, step):
            start, size = list(self.box.start), list(self.box.size)
            start[runtime_dim], size[runtime_dim] = start[runtime_dim] + first, min(step, total - first)
            out.append(self._with(Box(tuple(start), tuple(size)), self.dims))
        return tuple(out)

    def _transpose(self, dim0: int, dim1: int) -> _Traced:
        dims = list(self.dims)
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return self._with(self.box, tuple(dims))

    def _with(self, box: Box, dims: tuple[int, ...]) -> _Traced:
        out = _Traced(self.runtime, ())
        out.box, out.dims = box, dims
        return out
