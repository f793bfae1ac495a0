"""AdamW whose state, masters or both take fewer bits than fp32, with the same result on every mesh.

A step is computed in fp32, a part of a tensor at a time, from operations that IEEE 754 rounds correctly one by one. So
an element's new value does not depend on its neighbours in memory, and codes, scales and masters are bitwise those of
one process, given equal gradients.

8-bit state (optimizer.state_dtype=int8) is kept in blocks of up to 256 elements along the last dimension of the whole
tensor; a block never spans two rows. With s the largest magnitude of a block,

    exp_avg      m = s c |c| / 127^2    c in -127..127, rounded to nearest
    exp_avg_sq   sqrt(v) = s c^2 / 255^2    c in 0..255, rounded stochastically, and at least 1 where v > 0

The square spreads the codes over magnitudes as dynamic codes do (Dettmers et al. 2022, arXiv:2110.02861), without a
table. v is rounded stochastically, because with betas[1] near 1 a step moves it by less than a code. Where a shard's
border cuts a block, the ranks of the stage agree on s: one all-reduce of the maxima of cut blocks in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.engine.optim.groups import decays
from weft.engine.optim.placement import ParameterPlacement, Placements, Rows, random_key, random_words, rows_of
from weft.launch.simulated import device_kind
from weft.parallel.mesh import local_shard
from weft.parallel.shards.boxes import Box

BLOCK = 256
_FEWEST, _NARROWEST = 4096, 64  # elements of a tensor, and of its rows, from which on it has 8-bit state
_TILE = {"cpu": 1 << 18, "cuda": 1 << 23}  # elements that are stepped at once: in a core's cache; in few launches
_SIGNED, _POSITIVE = 127.0, 255.0
_BITS = 0xFFFF
Rounding = Literal["nearest", "stochastic", "kahan"]


def has_codes(name: str, shape: Sequence[int]) -> bool:
    """Whether optimizer.state_dtype=int8 keeps the state of this whole tensor in 8 bits. Other tensors are small, and
    keep fp32."""
    wide = len(shape) >= 2 and shape[-1] >= _NARROWEST and math.prod(shape) >= _FEWEST
    return wide and decays(name, len(shape))


@dataclass(frozen=True)
class BlockGrid:
    """The blocks that a box of a tensor touches. first, count: along the last dimension. lead, tail: elements of the
    first and the last block that lie before and behind the box. cut: indices of blocks that the box does not hold
    whole. offset: place of the first scale among this rank's."""

    first: int
    count: int
    lead: int
    tail: int
    cut: tuple[int, ...]
    offset: int

    @classmethod
    def of_box(cls, box: Box, width: int, offset: int) -> BlockGrid:
        """width: of the whole tensor's rows."""
        start, end = box.start[-1], box.end[-1]
        first, last = start // BLOCK, -(-end // BLOCK)
        cut = {0} if start > first * BLOCK or end < min((first + 1) * BLOCK, width) else set()
        if end < min(last * BLOCK, width):
            cut.add(last - first - 1)
        return cls(first, last - first, start - first * BLOCK, last * BLOCK - end, tuple(sorted(cut)), offset)

    def maxima(self, x: Tensor) -> Tensor:
        """[rows, count] the largest of x [rows, columns], none of which is negative."""
        if self.count == 1:
            return x.amax(1, keepdim=True)
        if self.lead or self.tail:
            x = nn.functional.pad(x, (self.lead, self.tail))
        return x.view(len(x), self.count, BLOCK).amax(2)

    def scale_(self, x: Tensor, scales: Tensor, *, by: Callable[[Tensor, Tensor], Tensor] = Tensor.mul_) -> Tensor:
        """Multiply x [rows, columns] by the scales [rows, count] of its blocks, or do `by` with them. In place."""
        if self.count == 1:
            return by(x, scales)
        if self.lead or self.tail:
            wide = scales[:, :, None].expand(-1, -1, BLOCK).reshape(len(scales), -1)
            return by(x, wide[:, self.lead : wide.shape[1] - self.tail])
        by(x.view(len(x), self.count, BLOCK), scales[:, :, None])
        return x

    def columns(self, block: int) -> slice:
        """The columns of the box that lie in a block."""
        start, end = block * BLOCK - self.lead, (block + 1) * BLOCK - self.lead
        return slice(max(0, start), min(end, self.count * BLOCK - self.lead - self.tail))


@dataclass(frozen=True)
class _Tile:
    """Rows that are stepped at once. grid: None for state without codes."""

    rows: Rows
    grid: BlockGrid | None

    @property
    def scales(self) -> slice:
        """Where the scales of these rows are among this rank's."""
        assert self.grid is not None
        first = self.grid.offset + self.rows.first * self.grid.count
        return slice(first, first + self.rows.count * self.grid.count)


@dataclass(frozen=True)
class _Parameter:
    """A parameter as it is stepped. coded: whether its state is in 8 bits. scales: number of this rank's blocks."""

    placement: ParameterPlacement
    tiles: tuple[_Tile, ...]
    coded: bool
    scales: int

    @property
    def rows(self) -> int:
        """Number of rows of the whole tensor."""
        return math.prod(self.placement.shape[:-1])


@dataclass(frozen=True)
class StatePart:
    """A box of a state tensor, its elements, and whether this rank saves it."""

    box: Box
    values: Tensor
    writes: bool


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with state in `state_dtype`.

    rounding: of bf16 masters. `stochastic`: up or down in proportion to the distance, by bits of seed, name, place
    in the whole tensor and step. `kahan`: what is rounded away is kept in bf16 and added to the next step.
    """

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
        """names: of all parameters, the same on every mesh. Collective where 8-bit state is sharded."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype, self.rounding, self.seed, self.placements = state_dtype, rounding, seed, placements
        self._parameters = {
            parameter: self.prepare(placements.placement_of(names[parameter], parameter, number), parameter)
            for number, parameter in enumerate(p for group in self.param_groups for p in group["params"])
        }
        self._cut = self._cut_blocks()

    def prepare(self, placement: ParameterPlacement, parameter: nn.Parameter) -> _Parameter:
        coded = self.state_dtype == torch.int8 and has_codes(placement.name, placement.shape)
        grids, offset = list[BlockGrid | None](), 0
        for rank_box in placement.boxes:
            grid = BlockGrid.of_box(rank_box.box, placement.shape[-1], offset) if coded else None
            grids.append(grid)
            offset += 0 if grid is None else grid.count * math.prod(rank_box.box.size[:-1])
        parts = rows_of(placement, _TILE.get(device_kind(parameter.device), 1 << 23))
        return _Parameter(placement, tuple(_Tile(rows, grids[rows.box]) for rows in parts), coded, offset)

    def _cut_blocks(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(name, block along the last dimension) -> (first place, rows) among the maxima that ranks exchange, for every
        block that some rank of the stage holds in part."""
        cut = {
            (p.placement.name, tile.grid.first + block): p.rows
            for p in self._parameters.values()
            for tile in p.tiles
            if tile.grid is not None
            for block in tile.grid.cut
        }
        if self.state_dtype == torch.int8:
            for cut_there in self.placements.gather(cut):
                assert isinstance(cut_there, dict)
                cut |= cut_there
        ranges, first = {}, 0
        for key in sorted(cut):
            ranges[key] = (first, cut[key])
            first += cut[key]
        return ranges

    # ------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient. Collective where ranks share blocks of 8-bit state."""
        assert closure is None
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in stepped:
            state = self._state_of(parameter)
            state["step"] = int(state["step"]) + 1  # a tensor where another optimizer has saved it
        maxima = self._agree(stepped)
        for parameter, group in stepped:
            self._update(parameter, group, maxima)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = 0
            for key in self.keys_of(parameter):
                state[key] = self.empty_state(parameter, key)
        return state

    def keys_of(self, parameter: nn.Parameter) -> list[str]:
        """Names of a parameter's state tensors."""
        scales = ["exp_avg_scale", "exp_avg_sq_scale"] if self._parameters[parameter].coded else []
        compensation = ["compensation"] if self.rounding == "kahan" and parameter.dtype == torch.bfloat16 else []
        return ["exp_avg", "exp_avg_sq", *scales, *compensation]

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

    def _agree(self, stepped: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> Tensor | None:
        """[2, places] the largest new exp_avg and sqrt(exp_avg_sq) of each cut block's row, over all ranks."""
        if not self._cut:
            return None
        total = sum(rows for _, rows in self._cut.values())
        maxima = torch.zeros(2, total, device=stepped[0][0].device if stepped else None)
        for parameter, group in stepped:
            info, state = self._parameters[parameter], self.state[parameter]
            for tile in info.tiles:
                for block, rows in self._agreed_rows(info, tile).items():
                    assert tile.grid is not None
                    columns = tile.grid.columns(block)
                    moments = moments_of(tile, state, local_shard(parameter.grad), group["betas"], columns)
                    for maximum, x in zip(maxima, (moments[0].abs_(), moments[1].sqrt_()), strict=True):
                        maximum[rows] = torch.maximum(maximum[rows], x.amax(1))
        self.placements.max_(maxima)
        return maxima

    def _agreed_rows(self, info: _Parameter, tile: _Tile) -> dict[int, slice]:
        """Cut block of a tile's box -> its rows among the maxima that ranks exchange."""
        agreed = {}
        if tile.grid is not None:
            for block in tile.grid.cut:
                first = self._cut[info.placement.name, tile.grid.first + block][0] + tile.rows.row
                agreed[block] = slice(first, first + tile.rows.count)
        return agreed

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], maxima: Tensor | None) -> None:
        info, state = self._parameters[parameter], self.state[parameter]
        step, (beta1, beta2) = state["step"], group["betas"]
        size, correction = group["lr"] / (1 - beta1**step), math.sqrt(1 - beta2**step)
        shard, gradient = local_shard(parameter), local_shard(parameter.grad)
        random = info.coded or (self.rounding == "stochastic" and shard.dtype == torch.bfloat16)
        key = random_key(self.seed, info.placement.name, step) if random else 0
        width = info.placement.shape[-1] if info.placement.shape else 1
        for tile in info.tiles:
            first, second = moments_of(tile, state, gradient, group["betas"])
            root = second.sqrt()
            words = random_words(tile.rows, width, key, shard.device) if random else None
            masters = tile.rows.matrix_in(shard)
            new = masters.float() if masters.dtype != torch.float32 else masters
            compensation = tile.rows.matrix_in(local_shard(state["compensation"])) if "compensation" in state else None
            if compensation is not None:
                new = new + compensation.float()
            change = first.div(root.div(correction).add_(group["eps"])).mul_(size)
            new = new.mul(1 - group["lr"] * group["weight_decay"]).sub_(change)
            _store(masters, new, words if self.rounding == "stochastic" else None)
            if compensation is not None:
                compensation.copy_(new.sub_(masters.float()))
            if tile.grid is None:
                tile.rows.matrix_in(local_shard(state["exp_avg"])).copy_(first)
                tile.rows.matrix_in(local_shard(state["exp_avg_sq"])).copy_(second)
                continue
            assert words is not None
            agreed = {}
            for block, rows in self._agreed_rows(info, tile).items():
                assert maxima is not None
                agreed[block] = maxima[:, rows]
            _encode(tile, state, first, root, words, agreed)

    # ------------------------------------------------------------ what a checkpoint holds of the scales

    def parts_of(self, parameter: nn.Parameter, key: str) -> tuple[tuple[int, ...], list[StatePart]] | None:
        """(Shape of the whole state tensor, this rank's parts), for scales; None for state like the parameter. A cut
        block's scale is saved by the rank that holds the block's first column."""
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
        return [grid for _, grid in sorted(by_box.items()) if grid is not None]


def moments_of(
    tile: _Tile, state: Mapping[str, Any], gradient: Tensor, betas: tuple[float, float], columns: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Both new moments of a tile, or of some of its columns: fp32 [rows, columns]."""
    beta1, beta2 = betas
    g = tile.rows.matrix_in(gradient)[:, columns].float()
    first = tile.rows.matrix_in(local_shard(state["exp_avg"])).to(torch.float32, copy=True)
    second = tile.rows.matrix_in(local_shard(state["exp_avg_sq"])).to(torch.float32, copy=True)
    if tile.grid is not None:
        first.mul_(first.abs())
        second.mul_(second)
        shape = tile.rows.count, tile.grid.count
        for key, x, code in (("exp_avg", first, _SIGNED), ("exp_avg_sq", second, _POSITIVE)):
            tile.grid.scale_(x, state[f"{key}_scale"][tile.scales].view(shape) * (1 / code**2))
        second.mul_(second)
    first, second = first[:, columns].mul_(beta1), second[:, columns].mul_(beta2)
    first.add_(g * (1 - beta1))
    second.add_((g * g).mul_(1 - beta2))
    return first, second


def _encode(
    tile: _Tile, state: Mapping[str, Any], first: Tensor, root: Tensor, words: Tensor, agreed: Mapping[int, Tensor]
) -> None:
    """Store both moments as codes and scales. agreed: block -> [2, rows] its scales, where ranks share it. Overwrites
    `root` and `words`."""
    grid, tiny = tile.grid, torch.finfo(torch.float32).tiny
    assert grid is not None
    size, smallest = first.abs(), (root > 0).to(torch.float32)
    for moment, (key, x) in enumerate((("exp_avg", size), ("exp_avg_sq", root))):
        scales = grid.maxima(x)
        for block, of_block in agreed.items():
            scales[:, block] = of_block[moment]
        state[f"{key}_scale"][tile.scales].view(scales.shape).copy_(scales)
        grid.scale_(x, scales.clamp_(min=tiny), by=Tensor.div_).sqrt_()
    tile.rows.matrix_in(local_shard(state["exp_avg"])).copy_(size.mul_(_SIGNED).round_().copysign_(first))
    random = words.bitwise_and_(_BITS).to(torch.float32).mul_(1 / (_BITS + 1))
    codes = root.mul_(_POSITIVE).add_(random).floor_()
    tile.rows.matrix_in(local_shard(state["exp_avg_sq"])).copy_(
        torch.maximum(codes, smallest, out=codes).clamp_(max=_POSITIVE)
    )


def _store(masters: Tensor, new: Tensor, words: Tensor | None) -> None:
    """Round to the masters' dtype: to nearest, or up or down by the upper halves of `words`."""
    if words is None or masters.dtype != torch.bfloat16:
        masters.copy_(new)
        return
    bits = new.view(torch.int32).add((words >> 16).bitwise_and_(_BITS)).bitwise_and_(~_BITS)
    masters.copy_(bits.view(torch.float32))
