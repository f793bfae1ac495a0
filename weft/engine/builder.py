"""How an Engine comes to be, in stages: describe, build on meta, (parallelize,) fill, optimizer."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.cluster.machine import keep_freed_memory
from weft.cluster.process import Ranks
from weft.config.checks import BUILT_IN
from weft.config.mesh import resolve_mesh
from weft.engine.build import BuiltModel, build_model, make_exact
from weft.engine.config import EngineConfig
from weft.engine.value_head import fill_value_head
from weft.models import hf
from weft.models.freeze import freeze
from weft.models.lora import freeze_base
from weft.optim.custom_optimizer import ForeignRule, OnShards, find_rule
from weft.optim.ema import Ema
from weft.optim.groups import check_groups
from weft.optim.optimizer import build_optimizer, moments
from weft.parallel.mesh import Mesh, build_mesh
from weft.parallel.parallelize import Precision, materialize, move_buffers
from weft.sharding.adapter_files import fill_adapters
from weft.sharding.load import LoadReport, Progress, fill_random, load_weights


@dataclass(frozen=True)
class Frame:
    """What is known before there is a model. device: where it computes; storage: where shards lie between their uses.

    rule: the optimizer that the config names by its import path, tried; None for those of weft. moments: dtypes of the
    optimizer's tensors of each parameter's shape; state_dtypes: of all that it keeps.
    """

    mesh: Mesh
    device: torch.device
    storage: torch.device
    precision: Precision
    rule: ForeignRule | None
    moments: tuple[torch.dtype, ...]
    state_dtypes: frozenset[torch.dtype]


def set_deterministic(wanted: bool) -> None:
    """torch's own switch, for the whole process; cuBLAS asks for a fixed workspace besides."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def describe(config: EngineConfig, ranks: Ranks, mesh: Mesh | None) -> Frame:
    """Mesh, dtypes and places. mesh: another engine's, which serves this one, too, where it has the same sizes."""
    sizes = resolve_mesh(config.mesh, ranks.world)
    wanted = sizes.dp_replicate, sizes.dp_shard
    if mesh is None or (mesh.dp_replicate, mesh.dp_shard) != wanted:
        mesh = build_mesh(*wanted, ranks.mesh_device)
    storage = torch.device("cpu") if config.fsdp.cpu_offload else ranks.device
    precision = Precision.of(config.fsdp, ranks.device, adapters=config.lora.on)
    rule = None
    if config.purpose == "inference":
        precision = replace(precision, master=precision.compute, frozen=precision.compute)
    elif config.optimizer.name not in BUILT_IN:
        rule = find_rule(
            config.optimizer,
            sharded=sizes.dp_shard > 1,
            dtype=precision.master,
            device=storage if ranks.assumed is None else torch.device("cpu"),
        )
    kept = moments(config.optimizer, precision.master, rule)
    state_dtypes = frozenset(kept) if rule is None else rule.dtypes
    return Frame(mesh, ranks.device, storage, precision, rule, kept, state_dtypes)


def build(config: EngineConfig, frame: Frame, *, weights: bool) -> BuiltModel:
    """The model on the meta device, what is not to be trained frozen."""
    built = build_model(
        config.model,
        config.lora,
        dtype=frame.precision.master,
        compute=frame.precision.compute,
        device=frame.device,
        weights=weights,
        values=config.value_head is not None,
    )
    module = built.module
    module.head.temperature = config.temperature
    if config.exact:
        make_exact(module)
    trained = config.purpose == "train"
    module.train(trained).requires_grad_(trained)
    if trained:
        if built.lora is None:
            freeze(module, config.model.freeze)
        else:
            freeze_base(module, built.lora)
        check_groups(module, config.optimizer)
    return built


def fill_weights(
    config: EngineConfig, frame: Frame, built: BuiltModel, progress: Progress | None, fill: bool
) -> LoadReport | None:
    """Give the shards storage and fill them: from the source's files or at random, unless fill is False, and with what
    neither has."""
    module, plan, lora = built.module, built.load, built.lora
    report = None
    materialize(module, frame.storage)
    if plan is None and fill:
        fill_random(module, built.config, frame.precision.master, config.seed)
    elif plan is not None:
        # A frozen base is in no checkpoint: it is always read.
        report = load_weights(module, plan, progress) if fill or lora is not None else None
        plan.source.close()
    hf.rebuild_buffers(module.hf_model)
    move_buffers(module, frame.device)
    if lora is not None:
        fill_adapters(module, lora, config.seed)
    if config.value_head is not None:
        fill_value_head(module, None if plan is None else plan.fresh, config.value_head, config.seed)
    return report


def build_optimizer_and_ema(
    config: EngineConfig, frame: Frame, module: nn.Module
) -> tuple[torch.optim.Optimizer | OnShards, Ema | None]:
    """What steps the shards, and the average of the weights where one is asked for."""
    optimizer = build_optimizer(module.named_parameters(remove_duplicate=False), config.optimizer, frame.rule)
    decay = config.optimizer.ema_decay
    ema = None if decay is None else Ema(module.parameters(), decay)
    if frame.device.type == "cpu":
        keep_freed_memory()  # not before: what loading frees should go back
    return optimizer, ema
