"""Sizes of the mesh axes. -1 is inferred. The product of the axes must be the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from weft.config.schema import MeshConfig
from weft.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # their product is the number of ranks


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """The size of every mesh axis. No size is -1."""

    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks of the complete mesh."""
        return math.prod(self.all)

    @property
    def all(self) -> tuple[int, ...]:
        """The sizes of all axes, in the order of AXES."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def named(self) -> dict[str, int]:
        """Axis -> size. Contains dp_replicate and dp_shard, and every other axis with more than one rank."""
        axes = {**dict(zip(AXES, self.all, strict=True)), "ep": self.ep}
        return {axis: size for axis, size in axes.items() if size > 1 or axis.startswith("dp")}

    @property
    def shards(self) -> int:
        """The number of ranks over which parameters, gradients and optimizer state are sharded."""
        return self.dp_shard * self.cp


def fewest_ranks(mesh: MeshConfig) -> int:
    """The smallest number of ranks for a mesh: the product of its axes, with 1 for -1. dp_shard=-1 becomes large enough
    that ep divides the shards."""
    fixed = _product({axis: getattr(mesh, axis) for axis in AXES})
    return fixed * (mesh.ep // math.gcd(mesh.ep, mesh.cp) if mesh.dp_shard == -1 and mesh.cp > 0 else 1)


def resolve_mesh(mesh: MeshConfig, world: int, option: str = "--nproc") -> MeshSizes:
    """The sizes of `mesh` on `world` ranks. Raises UserError if no inferred size makes their product `world`, or if ep
    does not divide the shards."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    inferred = [axis for axis, size in sizes.items() if size == -1]
    if len(inferred) > 1:
        names = " and ".join(f"mesh.{axis}" for axis in inferred)
        raise UserError(f"{names} are both -1, but weft can infer only one axis: set mesh.{inferred[0]}=1.")
    fixed = _product(sizes)
    if inferred and world % fixed == 0:
        sizes[inferred[0]] = world // fixed
    elif fixed != world or inferred:
        raise UserError(_product_message(sizes, fixed, world, option))
    resolved = MeshSizes(**sizes, ep=mesh.ep)
    if resolved.shards % resolved.ep:
        divisors = ", ".join(str(n) for n in range(1, resolved.shards + 1) if resolved.shards % n == 0)
        raise UserError(
            f"mesh.ep={resolved.ep} does not divide mesh.dp_shard x mesh.cp = {resolved.shards}: set mesh.ep to one of "
            f"{divisors}."
        )
    return resolved


def check_reshard(config: Any, sizes: MeshSizes) -> None:
    """Raise UserError if an integer in fsdp.reshard_after_forward or fsdp.overrides does not divide the number of
    shards into smaller groups."""
    _check_group("fsdp.reshard_after_forward", config.fsdp.reshard_after_forward, ("true", "false"), sizes)
    for pattern, group in config.fsdp.overrides.items():
        _check_group(f"fsdp.overrides: {pattern}", group, ("full", "replicate"), sizes)


def _check_group(key: str, group: str | int, alternatives: tuple[str, str], sizes: MeshSizes) -> None:
    if isinstance(group, bool | str) or (1 < group < sizes.shards and sizes.shards % group == 0):
        return
    divisors = [str(n) for n in range(2, sizes.shards) if sizes.shards % n == 0]
    choices = ", ".join([*alternatives, *divisors])
    over = "mesh.dp_shard" if sizes.cp == 1 else "mesh.dp_shard x mesh.cp"
    raise UserError(f"{key} is {group}, but with {over} = {sizes.shards} it must be one of {choices}.")


def shrink_mesh(mesh: MeshConfig, machine: int, share: bool) -> tuple[MeshConfig, list[str]]:
    """A mesh for `weft verify` on a machine that is smaller than the config's mesh.

    machine: number of its accelerators, or cores. share: whether several ranks may share a device, as CPU ranks share
    cores. An axis larger than the machine becomes 2. If the product still does not fit and ranks do not share devices,
    every axis larger than 2 becomes 2. -1 becomes the remaining number of devices, at least 2 if ranks share them.
    Returns the mesh with fixed sizes, and a sentence for each axis that shrank.
    """
    sizes: dict[str, int] = {axis: getattr(mesh, axis) for axis in AXES}
    shrunk: dict[str, Any] = {axis: min(size, 2) if size > machine else size for axis, size in sizes.items()}
    if not share and _product(shrunk) > machine:
        shrunk = {axis: min(size, 2) for axis, size in shrunk.items()}
    remaining = max(2 if share else 1, machine // _product(shrunk))
    free = [axis for axis, size in sizes.items() if size == -1]
    shrunk |= {axis: remaining if axis == free[-1] else 1 for axis in free}
    notes = [
        f"mesh.{axis} = {sizes[axis]} is more than this machine has ({machine}); weft verifies with {shrunk[axis]}"
        for axis in AXES
        if sizes[axis] > shrunk[axis]
    ]
    ulysses = mesh.ulysses if shrunk["cp"] == mesh.cp else None
    shards = shrunk["dp_shard"] * shrunk["cp"]
    ep = max(n for n in range(1, mesh.ep + 1) if shards % n == 0)
    if ep < mesh.ep:
        notes.append(
            f"mesh.ep = {mesh.ep} does not divide mesh.dp_shard x mesh.cp = {shards} here; weft verifies with {ep}"
        )
    return replace(mesh, **shrunk, ep=ep, ulysses=ulysses), notes


def _product(sizes: dict[str, int]) -> int:
    return math.prod(size for size in sizes.values() if size != -1)


def _product_message(sizes: dict[str, int], fixed: int, world: int, option: str) -> str:
    sizes = {axis: size for axis, size in sizes.items() if size != 1 or axis.startswith("dp")}
    product = " x ".join(f"mesh.{axis}" for axis in sizes)
    values = " x ".join(str(size) for size in sizes.values())
    if -1 in sizes.values():
        axes = " x ".join(f"mesh.{axis}" for axis, size in sizes.items() if size != -1)
        return (
            f"{product} = {values}: {world} ranks are not a multiple of {axes} = {fixed}; "
            f"set it to a divisor of {world}, or start a multiple of {fixed} ranks ({option})."
        )
    quotient = fixed // sizes["dp_shard"]
    fits = f" or set mesh.dp_shard={world // quotient}" if world % quotient == 0 else ""
    return f"{product} = {values} = {fixed}, but there are {world} ranks: start {fixed} ranks ({option} {fixed}){fits}."
