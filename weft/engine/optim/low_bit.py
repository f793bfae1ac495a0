"""AdamW with state or master weights of less than 32 bits, with the same result on every mesh.

An update is computed in fp32, tile by tile, from operations that IEEE 754 rounds correctly and separately
(block_step.py). So an element's new value does not depend on its neighbours in memory. With equal gradients, codes,
scales and master weights are bitwise equal to one process.

8-bit state (optimizer.state_dtype=int8) is stored in blocks of up to 256 elements along the last dimension of the full
tensor. A block never spans two rows. With s the largest magnitude of a block,

    exp_avg      m = s c |c| / 127^2    c in -127..127, rounded to nearest
    exp_avg_sq   sqrt(v) = s c^2 / 255^2    c in 0..255, rounded stochastically, and at least 1 if v > 0

The square makes codes denser near zero, as dynamic codes are (Dettmers et al. 2022, arXiv:2110.02861), without a table.
v is rounded stochastically, because with betas[1] near 1 a step changes it by less than one code. If the border of a
shard splits a block, the ranks of the stage agree on s: each step has one all-reduce of the maxima of split blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.engine.optim.block_step import BLOCK, exact_root, find_step, new_moments
from weft.engine.optim.groups import decays
from weft.engine.optim.placement import ParameterPlacement, Placements, Rows, random_key, rows_of
from weft.launch.simulated import device_kind
from weft.parallel.mesh import local_shard
from weft.parallel.shards.boxes import Box

_FEWEST, _NARROWEST = 4096, 64  # a tensor with fewer elements, or with shorter rows, keeps its state in fp32
_TILE = {"cpu": 1 << 18, "cuda": 1 << 23}  # elements per tile: small for a CPU's cache, large for few CUDA launches
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
Rounding = Literal["nearest", "stochastic", "kahan"]


def has_codes(name: str, shape: Sequence[int]) -> bool:
    """Whether optimizer.state_dtype=int8 stores the state of this tensor in 8 bits. shape: of the full tensor. Small
    tensors, and tensors without weight decay, keep their state in fp32."""
    wide = len(shape) >= 2 and shape[-1] >= _NARROWEST and math.prod(shape) >= _FEWEST
    return wide and decays(name, len(shape))


@dataclass(frozen=True)
class BlockGrid:
    """The blocks that a box of a tensor touches.

    first, count: index of the first block and number of blocks, along the last dimension. lead, tail: number of
    elements of the first block before the box, and of the last block after it. cut: indices of blocks that are only
    partly in the box. offset: index of the box's first scale among this rank's scales.
    """

    first: int
    count: int
    lead: int
    tail: int
    cut: tuple[int, ...]
    offset: int

    @classmethod
    def of_box(cls, box: Box, width: int, offset: int) -> BlockGrid:
        """The blocks of `box`. width: length of the full tensor's rows. offset: see the class."""
        start, end = (box.start[-1], box.end[-1]) if box.start else (0, 1)
        first, last = start // BLOCK, -(-end // BLOCK)
        cut = {0} if start > first * BLOCK or end < min((first + 1) * BLOCK, width) else set()
        if end < min(last * BLOCK, width):
            cut.add(last - first - 1)
        return cls(first, last - first, start - first * BLOCK, last * BLOCK - end, tuple(sorted(cut)), offset)

    def columns(self, block: int) -> slice:
        """The columns of the box that are in block `block`, counted from the box's first block."""
        start, end = block * BLOCK - self.lead, (block + 1) * BLOCK - self.lead
        return slice(max(0, start), min(end, self.count * BLOCK - self.lead - self.tail))


@dataclass(frozen=True)
class _Tile:
    """Rows that are updated together."""

    rows: Rows
    grid: BlockGrid

    @property
    def scales(self) -> slice:
        """The slice of this rank's scales that belongs to these rows."""
        first = self.grid.offset + self.rows.first * self.grid.count
        return slice(first, first + self.rows.count * self.grid.count)

    def blocks_of(self, shard: Tensor) -> tuple[Tensor, Tensor | None]:
        """(The blocks of the rows [n, 256] as a view of the shard, None). If the blocks are not contiguous in the
        shard: (a copy of the blocks, padded with zeros, the rows [count, columns] as a view of the shard)."""
        matrix = self.rows.matrix_in(shard)
        if not self.grid.lead and not self.grid.tail and matrix.is_contiguous():
            return matrix.view(-1, BLOCK), None
        return nn.functional.pad(matrix, (self.grid.lead, self.grid.tail)).view(-1, BLOCK), matrix

    def put_back(self, blocks: Tensor, matrix: Tensor | None) -> None:
        """Write blocks back to the shard, if they are a copy."""
        if matrix is not None:
            first = self.grid.lead
            matrix.copy_(blocks.view(self.rows.count, -1)[:, first : first + self.rows.columns])


def block_places(rows: Rows, grid: BlockGrid, width: int, device: torch.device) -> Tensor:
    """int32 [n], the index of each block's first element in the flattened full tensor, modulo 2^32. width: length of
    the full tensor's rows."""
    starts = torch.arange(rows.row, rows.row + rows.count, device=device) * width + (rows.column - grid.lead)
    offsets = torch.arange(0, grid.count * BLOCK, BLOCK, device=device)
    return (starts[:, None] + offsets).flatten().to(torch.int32)


@dataclass(frozen=True)
class _Parameter:
    """A parameter, split into tiles. coded: whether its state is in 8 bits. scales: number of blocks on this rank."""

    placement: ParameterPlacement
    tiles: tuple[_Tile, ...]
    coded: bool
    scales: int

    @property
    def rows(self) -> int:
        """Number of rows of the full tensor."""
        return math.prod(self.placement.shape[:-1])


@dataclass(frozen=True)
class StatePart:
    """A box of a state tensor, its values, and whether this rank saves it."""

    box: Box
    values: Tensor
    writes: bool


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with state in `state_dtype`.

    rounding: of bf16 master weights; must be `nearest` for wider dtypes. `stochastic` rounds up or down in proportion
    to the distance, with random bits that depend on seed, name, index in the full tensor, and step. `kahan` keeps the
    rounding error in bf16 and adds it in the next step."""

    def __init__(
        self,
        params: Any,
        placements: Placements,
        names: Mapping[nn.Parameter, str],
        *,
        state_dtype: torch.dtype,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        """names: the name of each parameter, equal on every mesh. Collective if 8-bit state is sharded."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype, self.rounding, self.seed, self.placements = state_dtype, rounding, seed, placements
        self._parameters = {
            parameter: self.prepare(placements.placement_of(names[parameter], parameter, number), parameter)
            for number, parameter in enumerate(p for group in self.param_groups for p in group["params"])
        }
        self._cut = self._cut_blocks()
        elements = sum(local_shard(parameter).numel() for parameter in self._parameters)
        device = next((parameter.device for parameter in self._parameters), torch.device("cpu"))
        self._step = find_step(device, elements)

    def prepare(self, placement: ParameterPlacement, parameter: nn.Parameter) -> _Parameter:
        """Split a parameter's shard into tiles, and decide whether its state is in 8 bits."""
        coded = self.state_dtype == torch.int8 and has_codes(placement.name, placement.shape)
        grids, offset, width = list[BlockGrid](), 0, placement.shape[-1] if placement.shape else 1
        for rank_box in placement.boxes:
            grids.append(BlockGrid.of_box(rank_box.box, width, offset))
            offset += grids[-1].count * math.prod(rank_box.box.size[:-1])
        parts = rows_of(placement, _TILE.get(device_kind(parameter.device), 1 << 23))
        return _Parameter(placement, tuple(_Tile(rows, grids[rows.box]) for rows in parts), coded, offset)

    def _cut_blocks(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(name, index of a block along the last dimension) -> (first index, number of rows) among the maxima that
        ranks exchange. Contains every block that some rank of the stage holds only in part."""
        cut = {
            (p.placement.name, tile.grid.first + block): p.rows
            for p in self._parameters.values()
            if p.coded
            for tile in p.tiles
            for block in tile.grid.cut
        }
        if self.state_dtype == torch.int8:
            for rank_cut in self.placements.gather(cut):
                assert isinstance(rank_cut, dict)
                cut |= rank_cut
        ranges, first = {}, 0
        for key in sorted(cut):
            ranges[key] = (first, cut[key])
            first += cut[key]
        return ranges

    # ------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient. Collective if ranks share blocks of 8-bit state."""
        assert closure is None
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in stepped:
            state = self._state_of(parameter)
            state["step"] = int(state["step"]) + 1  # a checkpoint of torch's AdamW has a tensor here
        factors = self._factors(stepped)
        maxima = self._agree(stepped, factors)
        for (parameter, _), of_step in zip(stepped, factors, strict=True):
            self._update(parameter, of_step, maxima)

    def _factors(self, stepped: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> list[Tensor]:
        """For each parameter, the fp32 [8] `factors` of block_step.step_blocks, on its device."""
        by_numbers: dict[tuple[Any, ...], Tensor] = {}
        factors = []
        for parameter, group in stepped:
            step, (beta1, beta2), lr = self.state[parameter]["step"], group["betas"], group["lr"]
            correction = math.sqrt(1 - beta2**step)
            numbers = (1 - lr * group["weight_decay"], lr / (1 - beta1**step), correction, group["eps"])
            key = (parameter.device, *numbers, beta1, 1 - beta1, beta2, 1 - beta2)
            if key not in by_numbers:
                by_numbers[key] = _on_device(torch.tensor(key[1:]), parameter.device)
            factors.append(by_numbers[key])
        return factors

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = 0
            for key in self.keys_of(parameter):
                state[key] = self.empty_state(parameter, key)
        return state

    def keys_of(self, parameter: nn.Parameter) -> list[str]:
        """Names of a parameter's state tensors."""
        scales = _SCALES if self._parameters[parameter].coded else ()
        compensation = ["compensation"] if self.rounding == "kahan" else []
        return [*_MOMENTS, *scales, *compensation]

    def empty_state(self, parameter: nn.Parameter, key: str) -> Tensor:
        """This rank's part of a state tensor before the first step."""
        info = self._parameters[parameter]
        if key.endswith("_scale"):
            return torch.zeros(info.scales, device=parameter.device)
        if key == "compensation":
            return torch.zeros_like(parameter, dtype=torch.bfloat16)
        codes = torch.int8 if key == "exp_avg" else torch.uint8
        plain = torch.float32 if self.state_dtype == torch.int8 else self.state_dtype
        return torch.zeros_like(parameter, dtype=codes if info.coded else plain)

    def _agree(
        self, stepped: Sequence[tuple[nn.Parameter, dict[str, Any]]], factors: Sequence[Tensor]
    ) -> Tensor | None:
        """[2, total rows of split blocks]: the largest new exp_avg and sqrt(exp_avg_sq) of each split block's row, over
        all ranks. None without split blocks. Collective."""
        if not self._cut:
            return None
        total = sum(rows for _, rows in self._cut.values())
        maxima = torch.zeros(2, total, device=stepped[0][0].device if stepped else None)
        for (parameter, _), of_step in zip(stepped, factors, strict=True):
            info, state = self._parameters[parameter], self.state[parameter]
            for tile in info.tiles:
                for block, rows in self._agreed_rows(info, tile).items():
                    columns = tile.grid.columns(block)
                    first, second, gradient = (
                        tile.rows.matrix_in(local_shard(tensor))[:, columns]
                        for tensor in (state["exp_avg"], state["exp_avg_sq"], parameter.grad)
                    )
                    scales = tuple(state[key][tile.scales].view(tile.rows.count, -1)[:, block, None] for key in _SCALES)
                    m, v = new_moments(first, second, gradient, (scales[0], scales[1]), [*of_step[4:].unbind()])
                    for maximum, x in zip(maxima, (m.abs_(), exact_root(v)), strict=True):
                        maximum[rows] = torch.maximum(maximum[rows], x.amax(1))
        self.placements.max_(maxima)
        return maxima

    def _agreed_rows(self, info: _Parameter, tile: _Tile) -> dict[int, slice]:
        """Split block of a tile's box -> the slice of its rows among the maxima that ranks exchange."""
        agreed = {}
        for block in tile.grid.cut if info.coded else ():
            first = self._cut[info.placement.name, tile.grid.first + block][0] + tile.rows.row
            agreed[block] = slice(first, first + tile.rows.count)
        return agreed

    def _update(self, parameter: nn.Parameter, factors: Tensor, maxima: Tensor | None) -> None:
        info, state, device = self._parameters[parameter], self.state[parameter], parameter.device
        shard, gradient = local_shard(parameter), local_shard(parameter.grad)
        stochastic = self.rounding == "stochastic"
        random = info.coded or stochastic
        word = random_key(self.seed, info.placement.name, state["step"]) if random else 0
        key = torch.full((), word, dtype=torch.int32, device=device)
        width = info.placement.shape[-1] if info.placement.shape else 1
        stepped = [shard, *(local_shard(state[name]) for name in _MOMENTS)]
        if "compensation" in state:
            stepped.append(local_shard(state["compensation"]))
        for tile in info.tiles:
            blocks = [tile.blocks_of(tensor) for tensor in stepped]
            weights, first, second = (of_tensor for of_tensor, _ in blocks[:3])
            scales = [state[name][tile.scales] if info.coded else None for name in _SCALES]
            self._step(
                weights, tile.blocks_of(gradient)[0], first, second, *scales, self._shared(info, tile, maxima),
                blocks[3][0] if len(blocks) > 3 else None, block_places(tile.rows, tile.grid, width, device), key,
                factors, stochastic,
            )  # fmt: skip
            for of_tensor in blocks:
                tile.put_back(*of_tensor)

    def _shared(self, info: _Parameter, tile: _Tile, maxima: Tensor | None) -> Tensor | None:
        """[2, n]: the maxima of a tile's split blocks, -1 for other blocks. None without split blocks."""
        agreed = self._agreed_rows(info, tile)
        if not agreed:
            return None
        assert maxima is not None
        shared = maxima.new_full((2, tile.rows.count, tile.grid.count), -1.0)
        for block, rows in agreed.items():
            shared[:, :, block] = maxima[:, rows]
        return shared.view(2, -1)

    # ------------------------------------------------------------ scales in a checkpoint

    def parts_of(self, parameter: nn.Parameter, key: str) -> tuple[tuple[int, ...], list[StatePart]] | None:
        """(Shape of the full state tensor, this rank's parts of it) for scales. None for state with the parameter's
        shape. The rank that holds a split block's first column saves its scale."""
        if not key.endswith("_scale"):
            return None
        info, scales = self._parameters[parameter], self.state[parameter][key]
        shape, parts = info.placement.shape, list[StatePart]()
        for rank_box, grid in zip(info.placement.boxes, self._grids(info), strict=True):
            box, writes = rank_box.box, rank_box.is_writer(info.placement.number)
            sizes = (*box.size[:-1], grid.count)
            values = scales[grid.offset : grid.offset + math.prod(sizes)].view(sizes)
            for first, end, saved in ((0, 1, writes and not grid.lead), (1, grid.count, writes)):
                if end > first:
                    part = Box((*box.start[:-1], grid.first + first), (*box.size[:-1], end - first))
                    parts.append(StatePart(part, values[..., first:end], saved))
        if not parts:
            nowhere = (0,) * len(shape)
            parts = [StatePart(Box(nowhere, nowhere), scales.view(nowhere), writes=False)]
        return (*shape[:-1], -(-shape[-1] // BLOCK)), parts

    def _grids(self, info: _Parameter) -> list[BlockGrid]:
        by_box = {tile.rows.box: tile.grid for tile in info.tiles}
        return [grid for _, grid in sorted(by_box.items())]


def _on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on `device`, made without waiting for the device."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
