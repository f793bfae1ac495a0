"""The facts of a model that hold for every mesh: its weights, how each axis may split them, and its FSDP units."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from weft.config.mesh import MeshSizes
from weft.config.schema import MeshConfig
from weft.engine.build import BuiltModel
from weft.engine.builder import (
    USUAL_LENGTH,
    EngineSpec,
    build,
    check_adapters_in_layers,
    check_layers,
    cut_stages,
    cuts_images,
    fuses_norms,
    least_layers,
    make_spec,
    ulysses_of,
)
from weft.engine.config import EngineConfig
from weft.engine.selfcheck.context import check_context
from weft.engine.selfcheck.division import check_division, check_experts
from weft.engine.selfcheck.pipeline import check_pipeline
from weft.errors import UserError
from weft.launch.machine import Accelerator
from weft.launch.options import Device
from weft.launch.process import fake_ranks
from weft.models import hf
from weft.models.cost import costs_of_layers
from weft.models.experts import find_experts
from weft.models.train_module import ScoreHead, TrainModule
from weft.models.transforms import dense_mlps
from weft.parallel.activations import LayerSetup, RowSharing, Saved, saved_bytes
from weft.parallel.ep.experts import strided
from weft.parallel.parallelize import StagePlan, layers_of
from weft.parallel.pp.model import LayerInterface, Pipeline, plan_pipeline
from weft.parallel.pp.schedule import DELAYED, placement_of
from weft.parallel.quantise import base_format, quantisable
from weft.parallel.tp.plan import TPPlan, find_tp_plan
from weft.parallel.units import Strategy, Unit, find_units, parameters_by_unit
from weft.recipes.plan.passes import LayerPasses, head_passes, layer_passes, usual_passes

_EXPERT_RANKS = 8
_WIDE_TP = 8


@dataclass(frozen=True)
class Weight:
    """A parameter of the complete model; tied parameters occur once. itemsize: bytes of a stored element. experts:
    number of a layer's experts, if the parameter contains all of them. strided: as in parallel/ep/experts.py.
    quantised: stored in the format of lora.base."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    itemsize: float
    experts: int | None = None
    strided: bool = False
    quantised: bool = False


@dataclass(frozen=True)
class Units:
    """Equal FSDP units. name: the common name, with `*` for numbers. weights: indices of the first unit's weights.
    layers: the layer of each unit; None for units outside of the layers."""

    name: str
    count: int
    weights: tuple[int, ...]
    keep: bool
    shard: Strategy
    layers: tuple[int, ...] | None = None


class Blueprint:
    """A model that is built on meta once, for estimates on any number of meshes. Checks of small copies run once for
    each size of an axis."""

    def __init__(
        self, config: EngineConfig, device: Device, assumed: Accelerator | None, *, samples: bool = False
    ) -> None:
        """samples: whether documents are rollouts, whose entropies are computed. Raises UserError for a model that
        every mesh refuses."""
        self.config, self.assumed, self.samples = config, assumed, samples
        with fake_ranks(1, device, assumed) as ranks:
            self.setup: EngineSpec = make_spec(replace(config, mesh=MeshConfig()), ranks)
            self.built: BuiltModel = build(self.setup, weights=False)
        self.module: TrainModule = self.built.module
        self.checked = self.built.config if config.score is None else hf.with_logits(self.built.config)
        self._sequence: dict[int, bool] = {}
        self._experts_checked: set[int] = set()
        self._contexts: set[tuple[bool, bool]] = set()
        self._ulysses: dict[tuple[int, int], int | None] = {}
        self._pipelines: dict[int, tuple[StagePlan, Pipeline]] = {}
        self._saved: dict[tuple[RowSharing, LayerSetup], Saved] = {}
        self._passes: dict[RowSharing, list[LayerPasses]] = {}
        self._head_passes: dict[int, float] = {}
        self._styles: dict[int, TPPlan] = {}
        self._kinds: dict[int, tuple[list[Weight], list[int]]] = {}
        self._units: dict[tuple[int, bool], tuple[Units, ...]] = {}
        self._shared: dict[tuple[int, int], list[Weight]] = {}
        self.shares: dict[MeshSizes, list[Any]] = {}  # cache of holdings.py

    def with_settings(self, config: EngineConfig) -> Blueprint:
        """The same model with a config that uses memory differently: optimizer state, storage of the base and of
        shards, activations."""
        other = copy.copy(self)
        other.config = config
        other.setup = make_spec(replace(config, mesh=MeshConfig()), self.setup.ranks, self.setup.mesh)
        for name in ("weights", "stored"):
            other.__dict__.pop(name, None)
        other._kinds, other._units, other._shared, other.shares = {}, {}, {}, {}
        return other

    @property
    def text(self) -> PretrainedConfig:
        """The config of the decoder."""
        return self.built.config.get_text_config()

    @cached_property
    def experts(self) -> dict[str, nn.Module]:
        """Name -> the experts of a layer."""
        return find_experts(self.module)

    @cached_property
    def has_shared_experts(self) -> bool:
        """Whether layers have experts for all tokens, after the experts that routers choose."""
        return any("shared_" in name for name, _ in self.module.named_modules())

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All weights, in the model's order."""
        precision, weights = self.setup.precision, []
        stored = self.config.lora.base
        base = None if stored == "compute" else base_format(stored, self.built.load)
        quantised = {} if base is None else quantisable(self.module, {}, base)
        for name, parameter in self.parameters.items():
            owner = next((prefix for prefix in self.experts if name.startswith(f"{prefix}.")), None)
            count, fastest = None, False
            if owner is not None:
                child = self.experts[owner]
                count, fastest = int(child.num_experts), strided(child, name.removeprefix(f"{owner}."))
            dtype = precision.master if parameter.requires_grad else precision.frozen
            shape = tuple(parameter.shape)
            size = base.form.bytes(shape) if base is not None and name in quantised else dtype.itemsize
            weights.append(Weight(name, shape, parameter.requires_grad, size, count, fastest, name in quantised))
        return tuple(weights)

    @cached_property
    def stored(self) -> int:
        """Bytes of all weights."""
        return round(sum(math.prod(weight.shape) * weight.itemsize for weight in self.weights))

    @cached_property
    def trained(self) -> int:
        """Elements of all trained weights."""
        return sum(math.prod(weight.shape) for weight in self.weights if weight.trained)

    def styles(self, tp: int) -> TPPlan:
        """How `tp` ranks may split each weight."""
        if tp not in self._styles:
            self._styles[tp] = find_tp_plan(self.module, self.text, tp)
        return self._styles[tp]

    def undivided(self, tp: int) -> list[tuple[Weight, bool]]:
        """(A trained weight that every rank of tp has completely, whether it is inside a block that tp splits), for
        each."""
        styles, weights = self.styles(tp), []
        regions = set(styles.regions)
        for weight in self.weights:
            if weight.trained and styles.specs[weight.name].dim is None:
                parts = weight.name.split(".")
                weights.append((weight, any(".".join(parts[:n]) in regions for n in range(1, len(parts)))))
        return weights

    @cached_property
    def layer_numbers(self) -> list[int | None]:
        """The layer of each weight; None outside of the layers."""
        return [self.layer_of(weight.name) for weight in self.weights]

    def kinds(self, tp: int) -> tuple[list[Weight], list[int]]:
        """(One weight of each kind, the index of each weight's kind). Every mesh with this tp splits the weights of a
        kind equally."""
        if tp not in self._kinds:
            styles = self.styles(tp).specs if tp > 1 else {}
            numbers: dict[object, int] = {}
            firsts, kind_of_weight = list[Weight](), list[int]()
            for weight in self.weights:
                style = styles.get(weight.name)
                kind = weight.shape, weight.trained, weight.itemsize, weight.experts, weight.strided, style
                kind_of_weight.append(numbers.setdefault(kind, len(numbers)))
                if kind_of_weight[-1] == len(firsts):
                    firsts.append(weight)
            self._kinds[tp] = firsts, kind_of_weight
        return self._kinds[tp]

    def units(self, tp: int, *, spread: bool) -> tuple[Units, ...]:
        """The units, inner ones first. Units that are equal for this tp are one entry. The root, with the remaining
        weights, is last. spread: whether experts are separate units (ep)."""
        if (tp, spread) not in self._units:
            self._units[tp, spread] = self._find_units(tp, tuple(self.experts) if spread else ())
        return self._units[tp, spread]

    def _find_units(self, tp: int, experts: tuple[str, ...]) -> tuple[Units, ...]:
        _, kinds = self.kinds(tp)
        fsdp = self.config.fsdp
        units = find_units(self.module, fsdp.wrap, fsdp.overrides, experts=experts)
        places = {id(parameter): index for index, parameter in enumerate(self.parameters.values())}
        groups: dict[object, list[tuple[Unit, tuple[int, ...]]]] = {}
        for unit, unit_parameters in zip(units, parameters_by_unit(units), strict=True):
            weights = tuple(places[id(p)] for p in unit_parameters)
            inside = self.layer_of(f"{unit.parts[0]}.") is not None
            kind = unit.keep, unit.shard, inside or _pattern(unit.name), tuple(kinds[i] for i in weights)
            groups.setdefault(kind, []).append((unit, weights))
        entries = []
        for members in groups.values():
            first, weights = members[0]
            layers = [self.layer_of(f"{unit.parts[0]}.") for unit, _ in members]
            inside_of = tuple(number for number in layers if number is not None)
            name = first.name if len(members) == 1 else _pattern(first.name)
            entries.append(Units(name, len(members), weights, first.keep, first.shard, inside_of or None))
        in_units = {places[id(p)] for unit_parameters in parameters_by_unit(units) for p in unit_parameters}
        remaining = tuple(index for index in range(len(self.weights)) if index not in in_units)
        return (*entries, Units("root", 1, remaining, True, "full"))

    def layer_of(self, name: str) -> int | None:
        """The number of the decoder layer of a parameter's name; None outside of the layers."""
        prefix = f"{self.module.facts.layers}."
        return int(name.removeprefix(prefix).partition(".")[0]) if name.startswith(prefix) else None

    @cached_property
    def costs(self) -> tuple[list[float], float]:
        """(FLOPs per token of each layer, of the head), in documents of USUAL_LENGTH tokens."""
        return costs_of_layers(self.module, USUAL_LENGTH)

    @cached_property
    def _anatomy(self) -> LayerInterface:
        delayed = self.config.mesh.pp_schedule in DELAYED
        compute = self.setup.precision.compute
        return check_pipeline(self.built.config, self.built.support, compute, delayed=delayed)

    def stages(self, pp: int) -> tuple[StagePlan, Pipeline] | None:
        """The stages for `pp` ranks; None for one rank. Raises UserError if the model cannot be split into them."""
        if pp == 1:
            return None
        if pp not in self._pipelines:
            if self.built.lora is not None:
                check_adapters_in_layers(self.module, self.built.lora)
            placement = placement_of(self.config.mesh.pp_schedule, pp, self.config.mesh.pp_stages_per_rank)
            check_layers(len(self.costs[0]), placement, least_layers(self.built))
            stages = cut_stages(self.costs, placement, self._anatomy, least_layers(self.built))
            pipeline = plan_pipeline(self.module, stages.spans, placement, stages.interface)
            self._pipelines[pp] = stages, pipeline
        return self._pipelines[pp]

    def layers(self, pp: int, pp_rank: int) -> Sequence[int]:
        """The numbers of the layers of the rank with this index on mesh.pp."""
        stages = self.stages(pp)
        return range(len(self.costs[0])) if stages is None else layers_of(stages[0], pp_rank)

    def sequence(self, tp: int) -> bool:
        """Whether ranks of tp split tokens between layers. Raises UserError if they cannot split the model."""
        if tp == 1:
            return False
        checked_tp = tp if tp <= 4 else _WIDE_TP  # one check for all larger tp: a small copy cannot be split further
        if checked_tp not in self._sequence:
            division = check_division(self.checked, self.built.support, tp)
            self._sequence[checked_tp] = division.sequence and self.built.vision is None
        return self._sequence[checked_tp]

    def ulysses(self, cp: int, tp: int) -> int | None:
        """The number of cp ranks that exchange heads; None if documents are not split. Raises UserError if the model
        does not support it."""
        if (cp, tp) not in self._ulysses:
            ulysses = ulysses_of(self.built, self.checked, self.config.mesh.ulysses, cp, tp)
            kind = cp > (ulysses or 1), (ulysses or 1) > 1
            if ulysses is not None and (kind not in self._contexts or self.config.mesh.ulysses is not None):
                longest = self.built.support.longest
                check_context(self.checked, self.built.flops, cp, ulysses, tp, cuts_images(self.built), longest)
                self._contexts.add(kind)
            self._ulysses[cp, tp] = ulysses
        return self._ulysses[cp, tp]

    def saved(self, shared: RowSharing, *, tiled: bool = False, exchanged: bool = False) -> Saved:
        """The activations that a row stores for backward. tiled, exchanged: as in LayerSetup. Raises the error of a
        family that cannot run on meta."""
        fused = fuses_norms(self.config, self.setup.ranks.device)
        lora = self.config.lora if self.config.lora.on else None
        setup = LayerSetup(tiled, fused, self.config.model.compile is True, lora, exchanged)
        if (shared, setup) not in self._saved:
            self._saved[shared, setup] = saved_bytes(self.built.config, self.setup.precision.compute, shared, setup)
        return self._saved[shared, setup]

    @cached_property
    def mlp_share(self) -> float:
        """The share of the layers' matmuls that is in MLPs which can run over tiles of tokens."""
        facts = self.built.flops
        active = facts.dense + facts.expert * facts.experts_per_token / facts.experts - self.module.head.weight.numel()
        return min(1.0, sum(p.numel() for _, mlp in dense_mlps(self.module) for p in mlp.parameters()) / active)

    @cached_property
    def largest_mlp(self) -> int:
        """Trained elements of the largest MLP that can run over tiles of tokens."""
        sizes = [sum(p.numel() for p in mlp.parameters() if p.requires_grad) for _, mlp in dense_mlps(self.module)]
        return max(sizes, default=0)

    def passes(self, shared: RowSharing) -> list[LayerPasses]:
        """The bytes that each layer reads and writes outside of matmuls and attention; for families that cannot run on
        meta, as many as a layer of Qwen3 with this hidden size."""
        key = RowSharing(tp=shared.tp, sequence=shared.sequence, paths=shared.paths)
        if key not in self._passes:
            try:
                fused = fuses_norms(self.config, self.setup.ranks.device)
                passes = layer_passes(self.built.config, self.setup.precision.compute, key, fused_norms=fused)
            except Exception:  # whatever a family does that needs values
                passes = usual_passes(len(self.costs[0]), self.text.hidden_size, key.tp)
            self._passes[key] = passes
        return self._passes[key]

    def head_passes(self, tp: int) -> float:
        """The bytes that the head reads and writes outside of matmuls for a token, on one of `tp` ranks; 0 for a head
        of scores."""
        head = self.module.head
        if isinstance(head, ScoreHead):
            return 0.0
        words, hidden = -(-int(head.weight.shape[0]) // tp), int(head.weight.shape[1])
        if words not in self._head_passes:
            trained = bool(head.weight.requires_grad) and self.setup.trained
            compute = self.setup.precision.compute
            self._head_passes[words] = head_passes(words, hidden, compute, trained=trained, entropy=self.samples)
        return self._head_passes[words] * words

    def shared(self, pp: int, pp_rank: int) -> list[Weight]:
        """Trained weights that both the rank with this index on mesh.pp and another rank have."""
        stages = self.stages(pp)
        if stages is None:
            return []
        if (pp, pp_rank) not in self._shared:
            names = stages[1].shared_params(pp_rank)
            self._shared[pp, pp_rank] = [weight for weight in self.weights if weight.trained and weight.name in names]
        return self._shared[pp, pp_rank]

    def check(self, mesh: MeshSizes) -> None:
        """Raise UserError if this model cannot be trained on this mesh."""
        self.sequence(mesh.tp)
        self.ulysses(mesh.cp, mesh.tp)
        self.stages(mesh.pp)
        if mesh.ep == 1:
            return
        fewest = min((int(child.num_experts) for child in self.experts.values()), default=0)
        if self.experts and fewest < mesh.ep:
            raise UserError(f"mesh.ep={mesh.ep} is more than the {fewest} experts of a layer.")
        checked_ranks = min(mesh.ep, _EXPERT_RANKS)  # one check for all larger ep: a small copy has no more experts
        if checked_ranks not in self._experts_checked:
            check_experts(self.checked, self.built.support, mesh.ep)
            self._experts_checked.add(checked_ranks)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
