"""Constructs an Engine: decide mesh and dtypes, build on meta, shard, fill, create the optimizer. `assemble` runs all
stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from transformers import PretrainedConfig

from weft.config.conditions import BUILT_IN_OPTIMIZERS
from weft.config.mesh import resolve_mesh
from weft.config.recompute import Activations, policy_of
from weft.engine.build import BuiltModel, balance_coefficient, build_model, make_exact
from weft.engine.config import EngineConfig
from weft.engine.experts import check_biases
from weft.engine.loaded_state import check_state, load_state
from weft.engine.optim.custom_optimizer import CustomOptimizerSpec, ShardOptimizer, find_rule
from weft.engine.optim.groups import check_groups
from weft.engine.optim.loss_scale import LossScale
from weft.engine.optim.matrices import find_matrices
from weft.engine.optim.optimizer import Ema, build_optimizer, moments, state_bytes
from weft.engine.optim.placement import Placements
from weft.engine.score_head import fill_score_head
from weft.engine.selfcheck.compile import try_compiled
from weft.engine.selfcheck.context import check_context, choose_ulysses
from weft.engine.selfcheck.device import check_collectives
from weft.engine.selfcheck.division import check_division, check_experts
from weft.engine.selfcheck.pipeline import check_pipeline
from weft.errors import UserError
from weft.launch.consistency import max_over_ranks
from weft.launch.machine import HeapGaps, keep_freed_memory
from weft.launch.process import Ranks, new_groups_inherit_timeout
from weft.models import hf
from weft.models.cost import costs_of_layers
from weft.models.experts import hides_routers
from weft.models.flops import model_flops, peak_flops
from weft.models.freeze import freeze
from weft.models.lora import LoraPlan, freeze_base
from weft.models.mixer_shards import can_share_documents
from weft.models.readouts import ReadoutSpec, check_readouts
from weft.models.train_module import TrainModule
from weft.models.transforms import TRANSFORMS
from weft.ops.communicator import CPAxis
from weft.parallel.activations import LayerSetup, RowSharing, Saved, saved_bytes
from weft.parallel.adapter_values import fill_from_weights, needs_weights
from weft.parallel.fsdp import InputCasts
from weft.parallel.memory import (
    MemoryNeeds,
    StateBytes,
    TrainingState,
    capacity,
    check_draws,
    check_fits,
    local_ranks,
    memory_needs,
)
from weft.parallel.mesh import Mesh, build_mesh, cp_axis, stage_group
from weft.parallel.parallelize import Precision, StagePlan, layers_of, materialize, move_buffers, parallelize
from weft.parallel.pp.model import LayerInterface, Pipeline, cut_layers, without_placeholders
from weft.parallel.pp.schedule import DELAYED, Placement, Schedule, in_flight, placement_of
from weft.parallel.quantise import DequantisedTensors, base_format, empty_scales, fill_quantised
from weft.parallel.shards.adapter_files import fill_adapters, to_json
from weft.parallel.shards.cuts import full_shape
from weft.parallel.shards.load import LoadReport, Progress, fill_random, load_weights
from weft.parallel.tp.divide import TensorParallel
from weft.parallel.tp.plan import check_states
from weft.parallel.units import Unit

USUAL_LENGTH = 4096  # length of documents that balances attention and matmuls in a layer's cost


@dataclass(frozen=True)
class EngineSpec:
    """The decisions made before the model is built. storage: the device that holds shards between uses.

    rule: the optimizer that the config names by import path, already tried; None for weft's own. moments: dtypes of the
    optimizer's tensors that have a parameter's shape. state_dtypes: dtypes of all its tensors.
    """

    config: EngineConfig
    ranks: Ranks
    mesh: Mesh
    storage: torch.device
    precision: Precision
    rule: CustomOptimizerSpec | None
    moments: tuple[torch.dtype, ...]
    state_dtypes: frozenset[torch.dtype]

    @property
    def trained(self) -> bool:
        return self.config.purpose == "train"


@dataclass(frozen=True)
class ShardedModel:
    """The results of sharding. divided: the parameters that tp and ep divide. stages: the layers of each stage of
    mesh.pp; pipeline: the modules of each stage; both None for one stage. adapter_config: of the whole model's
    adapters; None without adapters or for one stage. context: the ranks over which documents are split. memory: bytes
    that a rank needs. room: bytes available on the rank's storage device."""

    units: list[Unit]
    divided: TensorParallel
    stages: StagePlan | None
    pipeline: Pipeline | None
    adapter_config: dict[str, Any] | None
    context: CPAxis | None
    memory: MemoryNeeds
    room: int
    input_casts: InputCasts


@dataclass(frozen=True)
class EngineState:
    """The results of all stages. loaded: None if no file was read. optimizer: None if nothing is trained."""

    spec: EngineSpec
    built: BuiltModel
    sharded: ShardedModel
    loss_scale: LossScale | None
    loaded: LoadReport | None = None
    optimizer: torch.optim.Optimizer | ShardOptimizer | None = None
    ema: Ema | None = None


def assemble(
    config: EngineConfig,
    ranks: Ranks,
    *,
    weights: bool,
    fill: bool,
    progress: Progress | None,
    mesh: Mesh | None,
    readouts: Collection[str],
) -> EngineState:
    """Run all stages in order. Arguments as in Engine; mesh: see `make_spec`."""
    set_deterministic(config.deterministic)
    with new_groups_inherit_timeout():
        spec = make_spec(config, ranks, mesh)
    if weights and spec.mesh is not mesh and ranks.simulated is None and ranks.device.type == "cuda":
        check_collectives(spec.mesh.groups, ranks.device, (spec.precision.compute, spec.precision.reduce))
    built = build(spec, weights=weights, readouts=readouts)
    with new_groups_inherit_timeout():
        spec = decide_compile(spec, built, readouts, tried=weights and ranks.simulated is None)
        sharded = shard_model(spec, built, readouts)
    parts = EngineState(spec, built, sharded, new_loss_scale(spec))
    if ranks.simulated is not None:
        with ranks.simulated.fake:
            materialize(built.module, ranks.tensors_on)
            empty_scales(built.module)
        rebuild_buffers(built.module)
    elif weights:
        check_memory(spec, built, sharded, fill=fill)
        parts = replace(parts, loaded=fill_weights(spec, built, sharded, progress, fill=fill))
    else:
        return parts
    if not spec.trained:
        return parts
    optimizer, ema = build_optimizer_and_ema(spec, built, sharded)
    if fill and config.optimizer.load_state and built.load is not None:
        load_state(optimizer, built.module, built.load, config.optimizer.name, spec.moments, sharded.divided.cuts)
    return replace(parts, optimizer=optimizer, ema=ema)


def set_deterministic(deterministic: bool) -> None:
    """Turn on torch's deterministic algorithms for the process; cuBLAS also needs a fixed workspace."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def make_spec(config: EngineConfig, ranks: Ranks, mesh: Mesh | None = None) -> EngineSpec:
    """Decide on mesh, dtypes and devices. mesh: another engine's, reused if it has the same sizes."""
    if config.purpose == "inference" and config.fsdp.cpu_offload == "optimizer":  # there is no optimizer
        config = replace(config, fsdp=replace(config.fsdp, cpu_offload=False))
    sizes = resolve_mesh(config.mesh, ranks.world)
    if mesh is None or mesh.sizes != sizes:
        mesh = build_mesh(sizes, ranks.mesh_device)
    storage = torch.device("cpu") if config.fsdp.cpu_offload else ranks.device
    precision = Precision.from_config(config.fsdp, ranks.device, adapters=config.lora.on)
    rule = None
    if config.purpose == "inference":
        precision = replace(precision, master=precision.compute, frozen=precision.compute)
    elif config.optimizer.name not in BUILT_IN_OPTIMIZERS:
        rule = find_rule(
            config.optimizer,
            sharded=sizes.shards * sizes.tp > 1,
            staged=sizes.pp > 1,
            dtype=precision.master,
            device=storage if ranks.assumed is None else torch.device("cpu"),
        )
    moment_dtypes = moments(config.optimizer, precision.master, rule)
    # Small tensors keep fp32 state next to the 8-bit state of others.
    wide = {torch.float32} if torch.int8 in moment_dtypes else set()
    state_dtypes = frozenset(moment_dtypes) | wide if rule is None else rule.dtypes
    return EngineSpec(config, ranks, mesh, storage, precision, rule, moment_dtypes, state_dtypes)


def build(spec: EngineSpec, *, weights: bool = True, readouts: Collection[str] = ()) -> BuiltModel:
    """Build the model on the meta device, and freeze all parameters that are not trained. weights: False opens no file
    of weights.

    Raises UserError if the model lacks one of the readouts, or if the config's auxiliary loss or parameter groups do
    not fit the model.
    """
    config = spec.config
    built = build_model(
        config.model,
        config.lora,
        dtype=spec.precision.master,
        compute=spec.precision.compute,
        device=spec.ranks.device,
        weights=weights,
        score=config.score,
    )
    module = built.module
    module.head.temperature = config.temperature
    if config.exact:
        make_exact(module, config.lora)
    module.train(spec.trained).requires_grad_(spec.trained)
    if spec.trained:
        if built.lora is None:
            freeze(module, config.model.freeze)
        else:
            freeze_base(module, built.lora)
        if config.optimizer.load_state and built.load is not None and config.model.dcp_weights is not None:
            check_state(module, built.load, config.optimizer.name)
        check_groups(module, config.optimizer)
    readout_spec = ReadoutSpec.parse(readouts)
    check_readouts(
        module, len(module.head.weight), readout_spec, compiled=config.model.compile is True, mixers=module.mixers
    )
    if spec.mesh.tp is not None:
        check_states(module, built.config.get_text_config(), readout_spec.hidden, spec.mesh.tp.size)
    if config.model.router_bias_rate is not None:
        check_biases(module, built.config.get_text_config().model_type)
    flops = replace(built.flops, tower_frozen=not _trains_tower(built))
    muon = spec.trained and config.optimizer.name == "muon"
    matrices = find_matrices(module, built.config, config.optimizer) if muon else {}
    balance = balance_coefficient(config.model, built.config, module)
    return replace(built, flops=flops, balance=balance, matrices=matrices)


def _trains_tower(built: BuiltModel) -> bool:
    """Whether the vision tower has trained parameters, so that it needs a backward."""
    parts = () if built.vision is None else built.vision.parts
    return any(p.requires_grad for part in parts for p in built.module.get_submodule(part).parameters())


def shard_model(spec: EngineSpec, built: BuiltModel, readouts: Collection[str] = ()) -> ShardedModel:
    """Shard the model over the mesh, in place; parameters stay on meta. readouts: as in Engine."""
    config, module, ranks = spec.config, built.module, spec.ranks
    checked = built.config if config.score is None else hf.with_logits(built.config)
    sequence = False
    if spec.mesh.tp is not None:
        lossy = [name for name in config.model.transforms if not TRANSFORMS[name].exact]
        if lossy:  # config/checks.py checks mesh.tp, but not the tp of a reference or a critic
            raise UserError(
                f"model.transforms: {', '.join(lossy)} cannot be combined with tensor parallelism: set tp to 1."
            )
        division = check_division(checked, built.support, spec.mesh.tp.size)
        # Hidden readouts need all tokens of a row, and image features are inserted into all of its embeddings.
        sequence = division.sequence and not ReadoutSpec.parse(readouts).hidden and built.vision is None
    if spec.mesh.ep is not None:
        check_experts(checked, built.support, spec.mesh.ep.size)
    context = context_of(spec, built, checked)
    stages, adapter_config = stages_of(spec, built, checked, ReadoutSpec.parse(readouts).hidden), None
    if stages is not None and built.lora is not None:
        check_adapters_in_layers(module, built.lora)
        adapter_config = to_json(built.lora, built.path, module)
    base = None if config.lora.base == "compute" else base_format(config.lora.base, built.load)
    units, divided, pipeline = parallelize(
        module, spec.mesh, built.config, config.model, config.fsdp, spec.precision, ranks.tensors_on,
        sequence=sequence, stages=stages, activations=Activations.from_config(config),
        fused_norms=fuses_norms(config, ranks.device), base=base,
    )  # fmt: skip
    if pipeline is not None:
        require_trained(spec, pipeline, module.facts.layers)
    state = TrainingState(state_bytes_of(spec, built), config.optimizer.ema_decay is not None) if spec.trained else None
    memory = memory_needs(module, units, spec.precision, state, config.fsdp.reshard_after_forward, divided.cuts)
    room = capacity(spec.storage, local_ranks(ranks.world), ranks.assumed)
    open_offload(spec, built, stages, context, sequence=divided.sequence)
    return ShardedModel(
        units, divided, stages, pipeline, adapter_config, context, memory, room,
        InputCasts(module, config.fsdp.cast_forward_inputs, spec.precision.compute),
    )  # fmt: skip


def open_offload(
    spec: EngineSpec, built: BuiltModel, stages: StagePlan | None, context: CPAxis | None, *, sequence: bool
) -> None:
    """Compute a bound of the host memory for offloaded activations. Raises UserError if the formula cannot be computed
    for this family."""
    config, offload = spec.config, built.module.offload
    if offload is None:
        return
    try:
        saved = saved_of(config, built, spec.mesh, context, spec.precision, sequence=sequence)
    except (
        Exception
    ) as error:  # any exception type: some families need real values, and the meta device has only shapes
        raise UserError(
            f"model.offload_activations: weft cannot compute the activation memory of {built.config.model_type} "
            f"layers without running them ({type(error).__name__}). Set model.offload_activations=off."
        ) from error
    layers, rows = stored_rows_of_rank(
        config.mesh.pp_schedule, stages, 0 if spec.mesh.pp is None else spec.mesh.pp.rank
    )
    all_rows = stages is not None and config.mesh.pp_schedule == "GPipe"  # the number of rows is unknown
    size = saved.on_host(config.step.max_tokens_per_device, Activations.from_config(config), layers, rows)
    offload.open(spec.ranks.device, None if all_rows else size)


def saved_of(
    config: EngineConfig, built: BuiltModel, mesh: Mesh, context: CPAxis | None, precision: Precision, *, sequence: bool
) -> Saved:
    """The activations that a rank of this mesh stores of a row for backward. Errors of families that cannot run on meta
    propagate."""
    ring, ulysses = (1, 1) if context is None else (context.ring_size, context.ulysses_size)
    sharing, tiled = RowSharing(mesh.tp_size, ring, ulysses, sequence), Activations.from_config(config).tile is not None
    return saved_bytes(built.config, precision.compute, sharing, LayerSetup(tiled=tiled))


def stored_rows_of_rank(schedule: Schedule, stages: StagePlan | None, pp_rank: int) -> tuple[list[int] | None, float]:
    """(layers of the rank at this index of mesh.pp, None for all; the most rows that it stores at once). With several
    stages per rank, a row counts by the share of stages that store it. GPipe stores all rows of a step; here one
    counts."""
    if stages is None:
        return None, 1.0
    placement = stages.placement
    # More micro-batches than 4 a stage change nothing.
    rows = placement.chunks if schedule == "GPipe" else in_flight(schedule, placement, pp_rank, 4 * placement.stages)
    return layers_of(stages, pp_rank), rows / placement.chunks


def state_bytes_of(spec: EngineSpec, built: BuiltModel) -> StateBytes:
    """Bytes of the optimizer's state."""
    return state_bytes(spec.config.optimizer, spec.precision.master, spec.rule, built.matrices)


def decide_compile(spec: EngineSpec, built: BuiltModel, readouts: Collection[str], *, tried: bool) -> EngineSpec:
    """The config with model.compile=auto resolved to true or false. tried: whether a small copy may be compiled.
    Collective if model.compile=auto and no rule excludes compiled layers."""
    config = spec.config
    if config.model.compile != "auto":
        return spec
    compiles = tried and may_compile(spec, built, readouts)
    if compiles:
        device, compute = spec.ranks.device, spec.precision.compute
        failure = ""
        if spec.ranks.local_rank == 0:  # other ranks of the machine have the same device and software
            failure = try_compiled(built.config, config.model.attention, built.support, device, compute)
        if failure:
            warnings.warn(f"model.compile=auto: layers are not compiled: {failure}", stacklevel=2)
        (failed,) = max_over_ranks([float(bool(failure))], spec.mesh.world_group, device)
        compiles = not failed
    return replace(spec, config=replace(config, model=replace(config.model, compile=compiles)))


# A layer's graphs, forward and backward, take the host 8.3 ms, its plain operations 6.1 ms: Qwen3-0.6B at 256 tokens on
# an H200 with 16 cores, torch 2.11 (docs/benchmarks/gpu.md).
_COMPILED_LAYER_SECONDS = 8.3e-3
_REACHED = 0.5  # fraction of peak FLOPs that such steps reach


def may_compile(spec: EngineSpec, built: BuiltModel, readouts: Collection[str]) -> bool:
    """Whether model.compile=auto considers compiled layers: on CUDA in 16 bits, if no feature reads values inside a
    layer or is known to break graphs, and if the device computes a full row for longer than the host needs to launch
    the graphs. Otherwise compiled layers are slower, because they take more host time than eager layers."""
    config, precise = spec.config, spec.precision.compute not in (torch.bfloat16, torch.float16)
    traced_routers = built.flops.expert and not hides_routers(layer for _, layer in built.module.layers)
    layers = bool(traced_routers or built.module.mixers or built.support.mixers or config.model.transforms)
    layer_needed = config.exact or config.deterministic or spec.mesh.pp_size > 1 or built.vision is not None
    policy = policy_of(config.model.recompute)
    layer_needed = layer_needed or (policy is not None and policy.keeps_operations) or config.lora.base != "compute"
    layer_needed = layer_needed or Activations.from_config(config).tile is not None
    read = bool(ReadoutSpec.parse(readouts).hidden)
    if spec.ranks.device.type != "cuda" or not spec.trained or precise or layers or layer_needed or read:
        return False
    peak = peak_flops(spec.ranks.device)
    # Attention is not counted: rows of the shortest documents spend almost no time in it.
    flops = model_flops(built.flops)[0] * config.step.max_tokens_per_device / spec.mesh.tp_size
    device_seconds = 0.0 if peak is None else flops / (_REACHED * peak)
    return peak is None or device_seconds > _COMPILED_LAYER_SECONDS * len(built.module.layers)


def fuses_norms(config: EngineConfig, device: torch.device) -> bool:
    """Apply model.fused_norms on this device. Models that must compute exactly what the sampler computes keep their
    norms."""
    setting = config.model.fused_norms
    return device.type == "cuda" and not config.exact if setting == "auto" else setting


def stages_of(spec: EngineSpec, built: BuiltModel, config: PretrainedConfig, hidden: Sequence[str]) -> StagePlan | None:
    """Cut the layers over mesh.pp, after a check that this model allows it. config: of the class with logits.
    hidden: modules whose outputs are read."""
    pp = spec.mesh.pp_size
    if pp == 1:
        return None
    if hidden:
        raise UserError(
            f"mesh.pp: module `{hidden[0]}`, whose output the loss reads, may be on another stage than the loss. "
            "Set mesh.pp=1."
        )
    mesh, weighed = spec.config.mesh, costs_of_layers(built.module, USUAL_LENGTH)
    placement = placement_of(mesh.pp_schedule, pp, mesh.pp_stages_per_rank)
    check_layers(len(weighed[0]), placement, least_layers(built))
    delayed = mesh.pp_schedule in DELAYED
    interface = check_pipeline(config, built.support, spec.precision.compute, delayed=delayed)
    return cut_stages(weighed, placement, interface, least_layers(built))


def least_layers(built: BuiltModel) -> int:
    """The number of layers that the first stage must have: the layers that read image features."""
    return 1 if built.vision is None else max(1, built.vision.layers)


def cut_stages(
    weighed: tuple[list[float], float], placement: Placement, interface: LayerInterface, min_first: int = 1
) -> StagePlan:
    """Split the layers into stages of similar cost. weighed: (cost of each layer, cost of the head); `check_layers`
    must have passed. min_first: number of layers that the first stage must have."""
    costs, head = weighed
    spans = cut_layers(costs, head, placement.stages, min_first)
    cost_by_stage = tuple(sum(costs[first:end]) + head * (end == len(costs)) for first, end in spans)
    return StagePlan(tuple(spans), placement, interface, cost_by_stage)


def check_layers(layers: int, placement: Placement, min_first: int = 1) -> None:
    """Raises UserError if a stage would have no layer. min_first: number of layers that must be in the first stage."""
    pp, free = placement.ranks, layers - min_first + 1
    if placement.stages <= free:
        return
    total = f"the {layers} decoder layers of this model"
    if min_first > 1:
        total += f", of which the first {min_first} read image features and must be in the first stage,"
    if free < pp:
        raise UserError(f"mesh.pp={pp} is more than {total} allow: set mesh.pp={free}.")
    fewer = f"mesh.pp_stages_per_rank={free // pp}" if free // pp > 1 else "mesh.pp_schedule=1F1B"
    raise UserError(
        f"mesh.pp={pp} with {placement.chunks} stages per rank makes {placement.stages} stages, more than {total} "
        f"allow: set {fewer}."
    )


def check_adapters_in_layers(module: TrainModule, lora: LoraPlan) -> None:
    """Raises UserError if an adapter is outside the layers, because several stages might need it with a tied weight."""
    outside = [target.name for target in lora.targets if not target.name.startswith(f"{module.facts.layers}.")]
    if outside:
        raise UserError(
            f"lora.targets: {outside[0]} is outside of the decoder layers, and mesh.pp supports adapters only "
            "inside. Remove it from lora.targets, or set mesh.pp=1."
        )


def require_trained(spec: EngineSpec, pipeline: Pipeline, layers: str) -> None:
    """Raises UserError if a stage has no trained parameter, because its backward would return no gradient."""
    trained = [name for name, tensor in pipeline.tensors.items() if tensor.requires_grad]
    within = {pipeline.stage_of(name.rpartition(".")[0], layers) for name in trained}
    for stage, (first, end) in enumerate(pipeline.spans if spec.trained else ()):
        if stage not in within:
            raise UserError(
                f"model.freeze leaves no parameter to train in stage {stage + 1} of mesh.pp (layers {first} to "
                f"{end - 1}): set mesh.pp=1."
            )


def context_of(spec: EngineSpec, built: BuiltModel, config: PretrainedConfig) -> CPAxis | None:
    """The ranks of cp, after a check that documents of this model can be split. None for one rank, and for models whose
    documents are padded or have state that cannot be split: ranks of cp then read whole documents, as on the other data
    axes. config: of the class with logits."""
    cp, tp, requested = spec.mesh.cp_size, spec.mesh.tp_size, spec.config.mesh.ulysses
    ulysses = ulysses_of(built, config, requested, cp, tp)
    if ulysses is None:
        return None
    try:
        check_context(config, built.flops, cp, ulysses, tp, cuts_images(built), built.support.longest)
    except UserError:
        if built.support.mixers and requested is None:  # whole documents are always exact
            return None
        raise
    return cp_axis(spec.mesh, ulysses)


def cuts_images(built: BuiltModel) -> bool:
    """Whether documents with images may be split too."""
    return built.vision is not None and built.vision.has_grids and not built.support.images


def ulysses_of(built: BuiltModel, config: PretrainedConfig, requested: int | None, cp: int, tp: int) -> int | None:
    """The number of cp ranks that exchange heads; None if documents are not split. Raises UserError if the requested
    size does not fit layers with state. requested: mesh.ulysses."""
    if cp == 1 or not built.cuts_documents:
        return None
    if not built.support.mixers:
        return choose_ulysses(built.flops, config, cp, tp) if requested is None else requested
    if requested is None and not shares_states(built, cp, tp):
        return None
    return ulysses_of_states(requested, cp, divides=shares_states(built, cp, tp))


def shares_states(built: BuiltModel, cp: int, tp: int) -> bool:
    """Whether the ranks of cp divide all heads, of attention and of layers with state."""
    heads = (max(1, layer.heads // tp) for layer in built.flops.attention)
    mixers = (boundary.mixer for boundary in built.module.mixers.values())
    return all(h % cp == 0 for h in heads) and all(can_share_documents(mixer, cp, tp) for mixer in mixers)


def ulysses_of_states(size: int | None, cp: int, *, divides: bool) -> int:
    """The Ulysses size for layers with state: cp, because state passes through the whole document. Raises UserError if
    the config sets another size, or if cp does not divide the heads."""
    if size not in (None, cp):
        raise UserError(
            f"mesh.ulysses={size}: layers of this model have state, so ranks can split a document only by heads: "
            f"set mesh.ulysses=null or {cp}."
        )
    if not divides:
        raise UserError(
            f"mesh.ulysses={size} does not divide all heads of attention and of layers with state: set "
            "mesh.ulysses=null. weft then assigns complete documents to the ranks of mesh.cp."
        )
    return cp


def check_memory(spec: EngineSpec, built: BuiltModel, sharded: ShardedModel, *, fill: bool) -> None:
    """Raises UserError if a rank has too little memory for its shards, or for drawing initial weights."""
    check_fits(sharded.memory, sharded.room, spec.mesh, spec.config.fsdp, spec.config.optimizer)
    if built.load is None and fill:
        parameters = dict(built.module.named_parameters())
        if sharded.pipeline is not None:
            parameters = {name: sharded.pipeline.tensors[name] for name in sharded.pipeline.parameter_names}
        shapes = (full_shape(name, p, sharded.divided.cuts) for name, p in parameters.items())
        check_draws(sum(map(prod, shapes)), capacity(torch.device("cpu"), local_ranks(spec.ranks.world)))


def rebuild_buffers(module: TrainModule) -> None:
    """Compute the buffers that no checkpoint holds, for the layers that this rank runs."""
    with without_placeholders(module.hf_model):
        hf.rebuild_buffers(module.hf_model)


def fill_weights(
    spec: EngineSpec, built: BuiltModel, sharded: ShardedModel, progress: Progress | None = None, *, fill: bool = True
) -> LoadReport | None:
    """Allocate the shards and fill them, from the source's files or at random, unless fill is False.

    Buffers, new adapters and a new head of scores are filled in any case. Returns None if nothing was read.
    """
    config, module, plan, lora = spec.config, built.module, built.load, built.lora
    report, cuts = None, sharded.divided.cuts
    materialize(module, spec.storage)
    if plan is None and fill:
        fill_random(module, cuts, built.config, spec.precision.master, config.seed)
    elif plan is not None:
        # Checkpoints do not hold a frozen base, so it is always read from its files.
        report = load_weights(module, plan, cuts, progress) if fill or lora is not None else None
        if module.quantised_shapes:
            fill_quantised(module, plan, cuts, spec.precision.frozen, spec.ranks.device, spec.mesh.world_group)
    rebuild_buffers(module)
    move_buffers(module, spec.ranks.device)
    if config.score is not None:
        fill_score_head(module, None if plan is None else plan.fresh, config.score.first, config.seed)
    if lora is not None:  # after the head, which an adapter's files may hold
        fill_adapters(module, lora, cuts, config.seed)
        if needs_weights(lora):
            assert plan is not None
            local = DequantisedTensors(module, cuts, spec.precision.frozen)
            fill_from_weights(module, lora, local, plan, cuts, stage_group(spec.mesh))
    if plan is not None:
        plan.source.close(keep=plan.drafts)  # checkpoints copy them
    return report


def build_optimizer_and_ema(
    spec: EngineSpec, built: BuiltModel, sharded: ShardedModel
) -> tuple[torch.optim.Optimizer | ShardOptimizer, Ema | None]:
    """The optimizer over the shards of a filled module, and the average of the weights if the config asks for one."""
    config, pipeline = spec.config.optimizer, sharded.pipeline
    all_parameters = None if pipeline is None else pipeline.named_parameters
    with new_groups_inherit_timeout():
        simulated = spec.ranks.simulated is not None
        placements = Placements(
            sharded.divided.cuts, spec.mesh.stage_rank, None if simulated else stage_group(spec.mesh)
        )
    module, seed = built.module, spec.config.seed
    named = module.named_parameters(remove_duplicate=False)
    optimizer = build_optimizer(named, config, spec.rule, all_parameters, placements, built.matrices, seed)
    ema = None if config.ema_decay is None else Ema(module.parameters(), config.ema_decay)
    if spec.ranks.device.type == "cpu":
        keep_freed_memory()  # not earlier, so that memory freed by loading is returned first
        if spec.config.model.compile is not True:  # hooks inside of compiled layers would be traced
            gaps = HeapGaps()
            for _, layer in module.layers:
                layer.register_forward_pre_hook(lambda *_: gaps.before_layer())
            module.register_forward_hook(lambda *_: gaps.before_backward() if torch.is_grad_enabled() else None)
    return optimizer, ema


def new_loss_scale(spec: EngineSpec) -> LossScale | None:
    """The loss scale for training in fp16; None otherwise."""
    fsdp, fp16 = spec.config.fsdp, spec.precision.compute == torch.float16
    return LossScale(fsdp.loss_scale, fsdp.loss_scale_interval) if fp16 and spec.trained else None
