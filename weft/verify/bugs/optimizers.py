"""Bugs of optimizers whose steps depend on more than one element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from weft.engine.optim.low_bit import has_codes
from weft.parallel.mesh import local_shard
from weft.verify.bugs import MASTERS, Original, Plant, bug


@bug(
    "B33", "weft.engine.optim.placement:Placements.max_",
    "blocks of 8-bit state have scales of the parts on each rank",
    caught_by="weights after 3 steps", issue="bitsandbytes-foundation/bitsandbytes#2080", ranks=2,
    needs="optimizer.state_dtype=int8, and a mesh that splits blocks, such as mesh.tp=2 with rows that are not "
    "multiples of 512",
)  # fmt: skip
def scales_of_shards(plant: Plant, original: Original, self: Any, x: Any) -> None:
    _not_reduced(plant, original, self, x)


@bug(
    "B33", "weft.engine.optim.low_bit:LowBitAdamW.prepare",
    "whether a tensor's state has 8 bits depends on the size of the rank's shard",
    caught_by="weights after 3 steps", issue="pytorch/ao#4912", ranks=2, needs="optimizer.state_dtype=int8",
)  # fmt: skip
def codes_by_shard(plant: Plant, original: Original, self: Any, placement: Any, parameter: Any) -> Any:
    info = original(self, placement, parameter)
    if info.coded and not has_codes(placement.name, (sum(box.box.numel for box in placement.boxes) // 64, 64)):
        plant.hit()
        return replace(info, coded=False, scales=0)
    return info


@bug(
    "B33", "weft.engine.optim.muon:Muon.orthogonalise",
    "Muon orthogonalises each rank's part of a matrix",
    caught_by="weights after 3 steps", issue="areal-project/AReaL#1270", ranks=2, needs="optimizer.name=muon",
)  # fmt: skip
def muon_of_shards(plant: Plant, original: Original, self: Any, matrices: Any) -> Any:
    if len(self._boxes) == 1 or not matrices:
        return original(self, matrices)
    plant.hit()
    halves = [list(matrix.chunk(len(self._boxes))) for matrix in matrices]
    results = iter(original(self, [half for parts in halves for half in parts]))
    return [torch.cat([next(results) for _ in parts]) for parts in halves]


@bug(
    "B33", "weft.engine.optim.low_bit:block_places",
    "the bits of stochastic rounding depend on the position in the rank's shard",
    caught_by="weights after 3 steps", issue="pytorch/ao#4912", ranks=2,
    needs="optimizer.state_dtype=int8 or optimizer.rounding=stochastic",
)  # fmt: skip
def bits_by_local_place(plant: Plant, original: Original, rows: Any, grid: Any, width: int, device: Any) -> Any:
    local = replace(rows, row=rows.first, column=0)
    if local != rows:
        plant.hit()
    return original(local, replace(grid, lead=0), rows.columns, device)


@bug(
    "B33", "weft.engine.optim.placement:Placements.sum_",
    "Adafactor uses rows, columns and norms of each rank's part",
    caught_by="weights after 3 steps", issue="", ranks=2,
    needs="optimizer.name=adafactor",
)  # fmt: skip
def rows_of_shards(plant: Plant, original: Original, self: Any, x: Any) -> None:
    _not_reduced(plant, original, self, x)


@bug(
    "B33", "weft.engine.optim.optimizer:multiply_gradients",
    "the clipping factor is rounded to bf16, as in torch's list kernel on a CPU",
    caught_by=MASTERS, issue="", needs="fsdp.master_dtype=bf16",
)  # fmt: skip
def factor_in_bf16(plant: Plant, original: Original, parameters: Any, factor: float) -> None:
    gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
    if factor != 1.0 and gradients:
        plant.hit()
        torch._foreach_mul_(gradients, factor)


def _not_reduced(plant: Plant, original: Original, self: Any, x: Any) -> None:
    """The reduction over ranks runs, and its result is discarded."""
    before = x.clone()
    original(self, x)
    if not x.equal(before):
        plant.hit()
        x.copy_(before)
