"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235): a second moment of rows and columns instead of elements.

Equal to transformers' Adafactor as its Trainer uses it: with an external learning rate (scale_parameter=False,
relative_step=False). With t the step, b = 1 - t^-0.8, and means over the last two dimensions of the full tensor:

    R = b R + (1 - b) mean_columns(g^2 + 1e-30)        [..., rows]
    C = b C + (1 - b) mean_rows(g^2 + 1e-30)           [..., columns]
    U = g / sqrt(R / mean(R) x C)                      vectors: U = g / sqrt(V), with V as AdamW's second moment
    w = w (1 - lr d) - lr U / max(1, RMS(U))

Each rank sums the squares of its shards. Two all-reduces over the ranks of a stage then give sums over full tensors:
one for rows and columns of g, one for U. R and C are replicated on every rank, 4 (rows + columns) bytes for a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.engine.optim.kinds import OptimizerKind, ParameterSet, WholeTensor
from weft.engine.optim.placement import ParameterPlacement, Placements, Rows, rows_of
from weft.launch.simulated import device_kind
from weft.parallel.mesh import local_shard

_SMALLEST, _DECAY = 1e-30, -0.8  # transformers' eps[0] and decay_rate; its clip_threshold is 1
_TILE = {"cpu": 1 << 18, "cuda": 1 << 23}  # elements per tile: small for a CPU's cache, large for few CUDA launches


@dataclass(frozen=True)
class MatrixRows:
    """Rows of one matrix of a tensor (a tensor of more than two dimensions is a stack of matrices).

    rows: the rows of the shard that contain them. local: their slice of `rows`. index: index of the matrix. row: index
    of the first row in the matrix. counted: whether this rank, of all that hold these rows, adds their squares.
    """

    rows: Rows
    local: slice
    index: int
    row: int
    counted: bool

    @property
    def columns(self) -> slice:
        """Columns of the matrix."""
        return slice(self.rows.column, self.rows.column + self.rows.columns)

    @property
    def matrix_rows(self) -> slice:
        """Rows of the matrix."""
        return slice(self.row, self.row + self.local.stop - self.local.start)

    def matrix_in(self, shard: Tensor) -> Tensor:
        """The rows as a matrix, a view of the shard."""
        return self.rows.matrix_in(shard)[self.local]


def parts_of(placement: ParameterPlacement, elements: int) -> Iterator[MatrixRows]:
    """The rows of a shard, in tiles of about `elements` elements at most. A tile has rows of one matrix only."""
    height = placement.shape[-2] if len(placement.shape) > 1 else 1
    for rows in rows_of(placement, elements):
        counted = placement.boxes[rows.box].is_writer(placement.number)
        first = 0
        while first < rows.count:
            index, row = divmod(rows.row + first, height)
            last = min(rows.count, first + height - row)
            yield MatrixRows(rows, slice(first, last), index, row, counted)
            first = last


class Adafactor(torch.optim.Optimizer):
    """Adafactor over sharded parameters; the formulas are at the top of this file."""

    def __init__(self, params: Any, placements: Placements, names: Mapping[nn.Parameter, str], lr: float) -> None:
        """names: the name of each parameter, equal on every mesh."""
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.placements = placements
        self._placement_of: dict[nn.Parameter, ParameterPlacement] = {}
        self._parts: dict[nn.Parameter, list[MatrixRows]] = {}
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            placement = placements.placement_of(names[parameter], parameter, number)
            self._placement_of[parameter] = placement
            self._parts[parameter] = list(parts_of(placement, _TILE.get(device_kind(parameter.device), 1 << 23)))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient. Collective over the ranks of a stage."""
        assert closure is None
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not stepped:
            return
        parameters = [parameter for parameter, _ in stepped]
        for parameter in parameters:
            self._advance(parameter)
        self._update_moments(parameters)
        factors = [self._factors(parameter) for parameter in parameters]
        divisors = self._divisors(parameters, factors)
        for (parameter, group), of_parameter, divisor in zip(stepped, factors, divisors, strict=True):
            shard, lr = local_shard(parameter), group["lr"]
            for part in self._parts[parameter]:
                target = part.matrix_in(shard)
                update = self._direction(parameter, part, of_parameter).div_(divisor).mul_(lr)
                target.copy_((target.float() * (1 - lr * group["weight_decay"])).sub_(update))

    def _advance(self, parameter: nn.Parameter) -> None:
        state, shape = self.state[parameter], self._placement_of[parameter].shape
        if "step" not in state:
            state["step"] = 0
            if len(shape) > 1:
                state["exp_avg_sq_row"] = torch.zeros(shape[:-1], device=parameter.device)
                state["exp_avg_sq_col"] = torch.zeros((*shape[:-2], shape[-1]), device=parameter.device)
            else:
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] = int(state["step"]) + 1

    def _update_moments(self, parameters: Sequence[nn.Parameter]) -> None:
        matrices = [parameter for parameter in parameters if "exp_avg_sq_row" in self.state[parameter]]
        sizes = [self.state[p][key].numel() for p in matrices for key in ("exp_avg_sq_row", "exp_avg_sq_col")]
        device = parameters[0].device
        sums = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        by_tensor = iter(sums.split(sizes))
        pairs = []
        for parameter in matrices:
            height, width = self._placement_of[parameter].shape[-2:]
            row_sums, column_sums = next(by_tensor).view(-1, height), next(by_tensor).view(-1, width)
            pairs.append((row_sums, column_sums))
            for part in self._parts[parameter]:
                if part.counted:
                    squares = part.matrix_in(local_shard(parameter.grad)).float().square()
                    row_sums[part.index, part.matrix_rows] += squares.sum(1, dtype=torch.float64)
                    column_sums[part.index, part.columns] += squares.sum(0, dtype=torch.float64)
        self.placements.sum_(sums)
        for parameter, (row_sums, column_sums) in zip(matrices, pairs, strict=True):
            height, width = self._placement_of[parameter].shape[-2:]
            for key, total, count in (("exp_avg_sq_row", row_sums, width), ("exp_avg_sq_col", column_sums, height)):
                self._average(self.state[parameter], key, (total / count).float().view_as(self.state[parameter][key]))
        for parameter in parameters:
            if "exp_avg_sq" in self.state[parameter]:
                self._average(self.state[parameter], "exp_avg_sq", local_shard(parameter.grad).float().square())

    def _average(self, state: dict[str, Any], key: str, squares: Tensor) -> None:
        share = state["step"] ** _DECAY
        local_shard(state[key]).mul_(1 - share).add_(squares.add_(_SMALLEST).mul_(share))

    def _factors(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor] | None:
        """The factors by which U multiplies rows and columns of the gradient: ([matrices, rows, 1] 1 / sqrt(R /
        mean(R)), [matrices, 1, columns] 1 / sqrt(C)). None for a vector."""
        state, shape = self.state[parameter], self._placement_of[parameter].shape
        if len(shape) < 2:
            return None
        rows, columns = state["exp_avg_sq_row"].view(-1, shape[-2]), state["exp_avg_sq_col"].view(-1, shape[-1])
        return (rows / rows.mean(-1, keepdim=True)).rsqrt_()[:, :, None], columns.rsqrt()[:, None, :]

    def _direction(self, parameter: nn.Parameter, part: MatrixRows, factors: tuple[Tensor, Tensor] | None) -> Tensor:
        """U for the rows of `part`, before division by max(1, RMS(U)): a new tensor."""
        gradient = part.matrix_in(local_shard(parameter.grad)).float()
        if factors is None:
            return gradient * part.matrix_in(local_shard(self.state[parameter]["exp_avg_sq"])).rsqrt()
        rows, columns = factors
        return gradient * (rows[part.index, part.matrix_rows] * columns[part.index, :, part.columns])

    def _divisors(
        self, parameters: Sequence[nn.Parameter], factors: Sequence[tuple[Tensor, Tensor] | None]
    ) -> list[Tensor]:
        """max(1, RMS(U)) of each parameter, on its device."""
        sums = torch.zeros(len(parameters), dtype=torch.float64, device=parameters[0].device)
        for total, parameter, of_parameter in zip(sums, parameters, factors, strict=True):
            for part in self._parts[parameter]:
                if part.counted:
                    total += self._direction(parameter, part, of_parameter).square_().sum(dtype=torch.float64)
        self.placements.sum_(sums)
        counts = [math.prod(self._placement_of[parameter].shape) for parameter in parameters]
        return [(total / count).sqrt().clamp(min=1.0).float() for total, count in zip(sums, counts, strict=True)]


def build_adafactor(config: OptimizerConfig, parameters: ParameterSet) -> torch.optim.Optimizer:
    """Adafactor, with the groups' weight decay."""
    return Adafactor(parameters.groups, parameters.placements, parameters.names, config.lr)


def adafactor_moments(config: OptimizerConfig, master: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtype of a vector's second moment. A matrix has no state of its shape."""
    return (torch.float32,)


def adafactor_bytes(config: OptimizerConfig, master: torch.dtype, tensor: WholeTensor, elements: int) -> int:
    """Bytes of the state: for a matrix all of R and C on every rank, for a vector its elements."""
    count = elements
    if len(tensor.shape) > 1:
        *lead, rows, columns = tensor.shape
        count = math.prod(lead) * (rows + columns)
    return count * torch.float32.itemsize


ADAFACTOR = OptimizerKind(build_adafactor, adafactor_moments, adafactor_bytes)
