"""The bytes that each rank of a mesh holds between steps, to the byte: shapes of tensors, and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from weft.config.mesh import MeshSizes
from weft.ops.communicator import MetaCommunicator
from weft.parallel.experts import cut_of_expert
from weft.parallel.mesh import Axis, ExpertRanks
from weft.parallel.tensor import cut_of
from weft.parallel.units import Strategy
from weft.rehearsal.blueprint import Blueprint, UnitFacts, Weight
from weft.sharding.cuts import even_ranges

_NOBODY = MetaCommunicator(1)


@dataclass(frozen=True)
class Place:
    """A rank, by its places on the axes. fsdp: dp_shard x cp, cp varying first."""

    pp: int = 0
    dp_replicate: int = 0
    fsdp: int = 0
    tp: int = 0

    @staticmethod
    def of(mesh: MeshSizes, rank: int) -> Place:
        """The place of a rank by its number."""
        rest, tp = divmod(rank, mesh.tp)
        rest, fsdp = divmod(rest, mesh.shards)
        pp, replicate = divmod(rest, mesh.dp_replicate)
        return Place(pp, replicate, fsdp, tp)

    def rank(self, mesh: MeshSizes) -> int:
        """Its number."""
        return ((self.pp * mesh.dp_replicate + self.dp_replicate) * mesh.shards + self.fsdp) * mesh.tp + self.tp


@dataclass(frozen=True)
class HeldUnit:
    """A unit on a rank, or several that are alike. count: how many. elements: gathered, of this rank's part by tp and
    ep. trained: those of weights that are. padded, trained_padded: as many as travel, because all shards are sent as
    large as the first. shards: ranks that it is sharded over."""

    name: str
    keep: bool
    strategy: Strategy
    count: int
    elements: int
    trained: int
    padded: int
    trained_padded: int
    shards: int


@dataclass(frozen=True)
class Held:
    """Bytes of one rank. average: of the weights (optimizer.ema_decay). units: those of which it has anything."""

    place: Place
    weights: int
    gradients: int
    optimizer: int
    average: int
    units: tuple[HeldUnit, ...]

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average


class Holdings:
    """What the ranks of one mesh hold of one model."""

    def __init__(self, model: Blueprint, mesh: MeshSizes) -> None:
        """UserError where sizes do not divide."""
        self.model, self.mesh = model, mesh
        self._parts: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        stages = model.stages(mesh.pp)
        self.holders = None if stages is None else stages[1].holders

    def of(self, place: Place) -> Held:
        """The bytes that one rank holds."""
        model, units = self.model, self.model.units(spread=self.mesh.ep > 1)
        parts = self._shapes(place)
        state = model.setup
        master = state.precision.master.itemsize
        moments = sum(dtype.itemsize for dtype in state.moments)
        average = torch.float32.itemsize if model.config.optimizer.ema_decay is not None else 0
        weights = trained = 0
        alike: dict[object, list[UnitFacts]] = {}
        for unit in units:
            there = [i for i in unit.weights if self._has(model.weights[i], place)]
            if there:
                shapes = tuple((parts[i], model.weights[i].itemsize, model.weights[i].trained) for i in there)
                alike.setdefault((unit.keep, unit.shard, shapes), []).append(unit)
        found = []
        for several in alike.values():
            shards, index = self._sharding(several[0].shard, place)
            own = [(parts[i], model.weights[i]) for i in several[0].weights if self._has(model.weights[i], place)]
            for shape, weight in own:
                count = shard_elements(shape, shards, index) * len(several)
                weights += count * weight.itemsize
                trained += count * weight.trained * state.trained
            found.append(_unit(several[0], len(several), own, shards))
        return Held(place, weights, trained * master, trained * moments, trained * average, tuple(found))

    def heaviest(self) -> Held:
        """Of the rank that holds most between steps: shards are rounded up for the first ranks of FSDP, parts for the
        last ones of tp and ep."""
        return max((self.of(place) for place in self._candidates()), key=lambda held: held.resident)

    def by_stage(self) -> list[Held]:
        """The same of each stage."""
        places = list(self._candidates())
        each = [[self.of(place) for place in places if place.pp == stage] for stage in range(self.mesh.pp)]
        return [max(held, key=lambda one: one.resident) for held in each]

    def _candidates(self) -> Iterator[Place]:
        """One of ranks that hold the same, and those that hold most among them."""
        tps = {tuple(self._shapes(Place(tp=tp))): tp for tp in reversed(range(self.mesh.tp))}
        fsdps = {0}
        for count in {weight.experts for weight in self.model.weights if weight.experts}:
            held = [size for _, size in even_ranges(count, self.mesh.ep)]
            fsdps.add(held.index(max(held)))
        for pp, fsdp, tp in product(range(self.mesh.pp), sorted(fsdps), sorted(tps.values())):
            yield Place(pp, 0, fsdp, tp)

    def _has(self, weight: Weight, place: Place) -> bool:
        return self.holders is None or place.pp in self.holders[weight.name]

    def _sharding(self, strategy: Strategy, place: Place) -> tuple[int, int]:
        """(ranks that a unit is sharded over, this one's place among them)."""
        mesh = self.mesh
        if strategy == "full":
            return mesh.shards, place.fsdp
        if strategy == "experts":
            return mesh.shards // mesh.ep, place.fsdp // mesh.ep
        if strategy == "replicate":
            return 1, 0
        assert isinstance(strategy, int)
        return strategy, (place.dp_replicate * mesh.shards + place.fsdp) % strategy

    def _shapes(self, place: Place) -> list[tuple[int, ...]]:
        """What tp and ep leave of each weight on this rank, before FSDP."""
        key = place.tp, place.fsdp % self.mesh.ep
        if key not in self._parts:
            alike: dict[object, tuple[int, ...]] = {}  # weights of like layers
            found = []
            for weight in self.model.weights:
                kind = weight.shape, self.model.style(weight.name) if self.mesh.tp > 1 else None, weight.experts
                if (kind, weight.strided) not in alike:
                    alike[kind, weight.strided] = self._part(weight, *key)
                found.append(alike[kind, weight.strided])
            self._parts[key] = found
        return self._parts[key]

    def _part(self, weight: Weight, tp: int, ep: int) -> tuple[int, ...]:
        mesh, cut = self.mesh, None
        if mesh.tp > 1:
            axis = Axis(tp, mesh.tp, _NOBODY, lambda _: _NOBODY)
            cut = cut_of(weight.name, weight.shape, self.model.style(weight.name), axis)
        if mesh.ep > 1 and weight.experts is not None:
            ranks = ExpertRanks(ep, mesh.ep, _NOBODY, _NOBODY if mesh.tp > 1 else None)
            return cut_of_expert(weight.shape, weight.experts, cut, ranks, strided=weight.strided).local_shape()
        return weight.shape if cut is None else cut.local_shape()


def shard_elements(shape: tuple[int, ...], shards: int, index: int) -> int:
    """Elements of FSDP2's shard of a tensor: of its rows, in equal parts that are rounded up; the last ranks have fewer
    or none."""
    if not shape:
        return 1
    each = math.ceil(shape[0] / shards)
    return max(0, min(each, shape[0] - each * index)) * math.prod(shape[1:])


def _unit(facts: UnitFacts, count: int, parts: list[tuple[tuple[int, ...], Weight]], shards: int) -> HeldUnit:
    def padded(shape: tuple[int, ...]) -> int:
        return shard_elements(shape, shards, 0) * shards

    return HeldUnit(
        facts.name,
        facts.keep,
        facts.shard,
        count,
        elements=sum(math.prod(shape) for shape, _ in parts),
        trained=sum(math.prod(shape) for shape, weight in parts if weight.trained),
        padded=sum(padded(shape) for shape, _ in parts),
        trained_padded=sum(padded(shape) for shape, weight in parts if weight.trained),
        shards=shards,
    )  # fmt: skip
