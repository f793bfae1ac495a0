"""The interface of weft's optimizers. Each optimizer has a file with an OptimizerKind, and an entry in OPTIMIZERS
(optimizer.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.engine.optim.placement import Placements
from weft.parallel.fsdp import DTYPES
from weft.parallel.mesh import local_shard
from weft.parallel.shards.boxes import Box

# Name of a parameter -> the boxes of its matrices, for optimizers that update whole matrices (Muon).
MatrixBoxes = Mapping[str, Sequence[Box]]


@dataclass(frozen=True)
class ParameterSet:
    """The parameters that an optimizer updates.

    groups: torch's param_groups, with `weight_decay` and `lr_scale`. names: the name of each parameter, equal on every
    mesh. matrices: for Muon. seed: the run's seed.
    """

    groups: Sequence[dict[str, Any]]
    names: Mapping[nn.Parameter, str]
    placements: Placements
    matrices: MatrixBoxes
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the master weights."""
        return next((p.dtype for group in self.groups for p in group["params"]), torch.float32)


@dataclass(frozen=True)
class WholeTensor:
    """A parameter before it is sharded. matrix: whether MatrixBoxes contains it."""

    name: str
    shape: Sequence[int]
    matrix: bool = False


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer.

    build: builds it for a set of parameters. moments: maps the dtype of the master weights to the dtypes of the state
    tensors that have a matrix's shape. state_bytes: the bytes of state for a number of elements of a tensor; its
    arguments are the config, the dtype of the master weights, the tensor, and the number of elements.
    """

    build: Callable[[OptimizerConfig, ParameterSet], torch.optim.Optimizer]
    moments: Callable[[OptimizerConfig, torch.dtype], tuple[torch.dtype, ...]]
    state_bytes: Callable[[OptimizerConfig, torch.dtype, WholeTensor, int], int]


class ElementwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that updates each element independently, so updating a shard equals updating the full tensor.

    state_dtype: dtype of the state tensors.
    """

    def __init__(self, params: Any, state_dtype: torch.dtype, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local_shard(parameter.grad).float(), group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter and its state. gradient: this rank's shard, in fp32."""
        raise NotImplementedError


def state_dtype(config: OptimizerConfig, master: torch.dtype) -> torch.dtype:
    """Dtype of the optimizer state, for master weights of dtype `master`. int8 means 8-bit codes with scales."""
    return master if config.state_dtype == "auto" else {**DTYPES, "int8": torch.int8}[config.state_dtype]
