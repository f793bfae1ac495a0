"""The exact number of bytes on each rank of a mesh between steps, computed from the shapes of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from weft.config.mesh import MeshSizes
from weft.engine.builder import state_bytes_of
from weft.models.segments import even_ranges
from weft.ops.communicator import MetaCommunicator
from weft.parallel.ep.experts import cut_of_expert
from weft.parallel.mesh import EPAxis, TPAxis
from weft.parallel.tp.divide import tp_shard_spec
from weft.parallel.units import Strategy
from weft.recipes.plan.blueprint import Blueprint, Units, Weight

_SINGLE = MetaCommunicator(1)


@dataclass(frozen=True)
class RankCoordinates:
    """A rank, by its indices on the axes. fsdp: its index on dp_shard x cp, where cp varies fastest."""

    pp: int = 0
    dp_replicate: int = 0
    fsdp: int = 0
    tp: int = 0

    @staticmethod
    def from_rank(mesh: MeshSizes, rank: int) -> RankCoordinates:
        """The coordinates of a rank, from its number."""
        remaining, tp = divmod(rank, mesh.tp)
        remaining, fsdp = divmod(remaining, mesh.shards)
        pp, replicate = divmod(remaining, mesh.dp_replicate)
        return RankCoordinates(pp, replicate, fsdp, tp)

    def rank(self, mesh: MeshSizes) -> int:
        """The rank's number."""
        return ((self.pp * mesh.dp_replicate + self.dp_replicate) * mesh.shards + self.fsdp) * mesh.tp + self.tp


@dataclass(frozen=True)
class UnitShare:
    """A unit on a rank, or `count` equal units. elements: elements of one gathered unit, after splits by tp and ep.
    trained: elements of trained weights. padded, trained_padded: the same as sent in collectives, in which all shards
    are as large as the first. shards: number of ranks over which the unit is sharded. tensors: number of its trained
    weights."""

    name: str
    keep: bool
    strategy: Strategy
    count: int
    elements: int
    trained: int
    padded: int
    trained_padded: int
    shards: int
    tensors: int


@dataclass(frozen=True)
class RankShare:
    """Bytes of one rank. average: the average of the weights (optimizer.ema_decay). units: units of which the rank has
    a part."""

    coordinates: RankCoordinates
    weights: int
    gradients: int
    optimizer: int
    average: int
    units: tuple[UnitShare, ...]

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average


def shares_by_stage(model: Blueprint, mesh: MeshSizes) -> list[RankShare]:
    """For each stage, the bytes of the rank that has most between steps."""
    if mesh not in model.shares:
        model.shares[mesh] = Holdings(model, mesh).by_stage()
    return model.shares[mesh]


class Holdings:
    """The bytes of one model on the ranks of one mesh."""

    def __init__(self, model: Blueprint, mesh: MeshSizes) -> None:
        """Raises UserError if the model cannot be split into the mesh's stages."""
        self.model, self.mesh = model, mesh
        self._parts: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        self._stages = model.stages(mesh.pp)
        self._state_bytes = state_bytes_of(model.setup, model.built)

    def share_of(self, coordinates: RankCoordinates) -> RankShare:
        """The bytes on one rank."""
        model, units = self.model, []
        parts, state = self._shapes(coordinates), model.setup
        weights, trained, moments = 0.0, 0, 0
        _, kinds = model.kinds(self.mesh.tp)
        for facts in model.units(self.mesh.tp, spread=self.mesh.ep > 1):
            several = self._count(facts, coordinates.pp)
            local = [(parts[kinds[i]], model.weights[i]) for i in facts.weights if self._has(i, coordinates.pp)]
            if not several or not local:
                continue
            shards, index = self._sharding(facts.shard, coordinates)
            for shape, weight in local:
                count = shard_elements(shape, shards, index) * several
                weights += count * weight.itemsize
                trained += count * weight.trained * state.trained
                if weight.trained and state.trained:
                    moments += self._state_bytes(weight.name, weight.shape, count)
            units.append(_unit(facts, several, local, shards, state.precision.compute.itemsize))
        average = torch.float32.itemsize if model.config.optimizer.ema_decay is not None else 0
        master = state.precision.master.itemsize
        return RankShare(coordinates, round(weights), trained * master, moments, trained * average, tuple(units))

    def by_stage(self) -> list[RankShare]:
        """For each stage, the bytes of the rank that has most between steps."""
        candidates = list(self._candidates())
        shares = [[self.share_of(replace(c, pp=stage)) for c in candidates] for stage in range(self.mesh.pp)]
        return [max(of_stage, key=lambda share: share.resident) for of_stage in shares]

    def _candidates(self) -> Iterator[RankCoordinates]:
        """Coordinates in a stage that may have most bytes, one of each kind: shards are rounded up for the first ranks
        of FSDP, and some ranks of tp and ep have one part more."""
        tps = {self._shapes(RankCoordinates(tp=tp)): tp for tp in reversed(range(self.mesh.tp))}
        fsdps = {0}
        for count in {weight.experts for weight in self.model.weights if weight.experts}:
            sizes = [size for _, size in even_ranges(count, self.mesh.ep)]
            fsdps.add(sizes.index(max(sizes)))
        for fsdp, tp in product(sorted(fsdps), sorted(tps.values())):
            yield RankCoordinates(0, 0, fsdp, tp)

    def _count(self, units: Units, stage: int) -> int:
        """The number of these units in a stage. The root and other units outside of the layers count on every stage,
        with the weights that the stage has."""
        if self._stages is None or units.layers is None:
            return units.count
        stage_layers = set(self.model.layers(self.mesh.pp, stage))
        return sum(layer in stage_layers for layer in units.layers)

    def _has(self, index: int, stage: int) -> bool:
        if self._stages is None or self.model.layer_numbers[index] is not None:
            return True
        return stage in self._stages[1].holders[self.model.weights[index].name]

    def _sharding(self, strategy: Strategy, coordinates: RankCoordinates) -> tuple[int, int]:
        """(Number of ranks over which a unit is sharded, this rank's index among them)."""
        mesh = self.mesh
        if strategy == "full":
            return mesh.shards, coordinates.fsdp
        if strategy == "experts":
            return mesh.shards // mesh.ep, coordinates.fsdp // mesh.ep
        if strategy == "replicate":
            return 1, 0
        assert isinstance(strategy, int)
        return strategy, (coordinates.dp_replicate * mesh.shards + coordinates.fsdp) % strategy

    def _shapes(self, coordinates: RankCoordinates) -> tuple[tuple[int, ...], ...]:
        """The shape of each kind of weight on this rank after splits by tp and ep, before FSDP."""
        key = coordinates.tp, coordinates.fsdp % self.mesh.ep
        if key not in self._parts:
            self._parts[key] = tuple(self._part(weight, *key) for weight in self.model.kinds(self.mesh.tp)[0])
        return self._parts[key]

    def _part(self, weight: Weight, tp: int, ep: int) -> tuple[int, ...]:
        mesh, cut = self.mesh, None
        if mesh.tp > 1:
            axis = TPAxis(tp, mesh.tp, _SINGLE, lambda _: _SINGLE)
            cut = tp_shard_spec(weight.name, weight.shape, self.model.styles(mesh.tp).specs[weight.name], axis)
        if mesh.ep > 1 and weight.experts is not None:
            ranks = EPAxis(ep, mesh.ep, _SINGLE, _SINGLE if mesh.tp > 1 else None)
            return cut_of_expert(weight.shape, weight.experts, cut, ranks, strided=weight.strided).local_shape()
        return weight.shape if cut is None else cut.local_shape()


def shard_elements(shape: tuple[int, ...], shards: int, index: int) -> int:
    """Elements of shard `index` of a tensor under FSDP2. It splits rows into equal parts, rounded up, so the last ranks
    have fewer or none."""
    if not shape:
        return 1
    rows = math.ceil(shape[0] / shards)
    return max(0, min(rows, shape[0] - rows * index)) * math.prod(shape[1:])


def _unit(
    facts: Units, count: int, parts: list[tuple[tuple[int, ...], Weight]], shards: int, compute: int
) -> UnitShare:
    """compute: bytes of an element in the compute dtype. Elements are counted in this unit, so a quantised weight has
    fewer."""

    def padded(shape: tuple[int, ...]) -> int:
        return shard_elements(shape, shards, 0) * shards

    def gathered(weight: Weight, elements: int) -> int:
        return round(elements * weight.itemsize / compute) if weight.quantised else elements

    return UnitShare(
        facts.name,
        facts.keep,
        facts.shard,
        count,
        elements=sum(gathered(weight, math.prod(shape)) for shape, weight in parts),
        trained=sum(math.prod(shape) for shape, weight in parts if weight.trained),
        padded=sum(gathered(weight, padded(shape)) for shape, weight in parts),
        trained_padded=sum(padded(shape) for shape, weight in parts if weight.trained),
        shards=shards,
        tensors=sum(weight.trained for _, weight in parts),
    )  # fmt: skip
