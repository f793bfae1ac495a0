"""Frozen models next to the trained model: the reference of preference losses and RL, the teacher of a student.

A config section (ModelSection) selects the model; its null keys have the values of the trained model. Each is an Engine
for inference, without gradients, optimizer or masters, and with a separate mesh, dtype and token budget. It makes a
separate plan, so a rank may read other documents than it trains.

    reference = open_frozen("reference", frozen_config(engine.config, config.reference), ranks, shares_with=engine)
    plan, local = reference.plan_step(documents) reference.readout(plan, local, ("logprob",))      # or its evaluate(),
    with a loss that collects its inputs
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from weft.config.rl_schema import RewardModelConfig
from weft.config.schema import FrozenModelConfig, LoraConfig, MeshConfig, ModelConfig, OptimizerConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.launch import flight
from weft.launch.process import Ranks
from weft.parallel.shards.load import Progress


class ModelSection(Protocol):
    """The keys of a config section that select a model and how it is computed: a ReferenceConfig, a CriticConfig, or a
    TeacherConfig with its path. ranks: of a separate model; None: it runs on the trained model's ranks."""

    @property
    def path(self) -> str | None: ...
    @property
    def ranks(self) -> int | None: ...
    @property
    def dp_replicate(self) -> int | None: ...
    @property
    def dp_shard(self) -> int | None: ...
    @property
    def tp(self) -> int | None: ...
    @property
    def pp(self) -> int | None: ...
    @property
    def cpu_offload(self) -> bool | None: ...
    @property
    def max_tokens_per_device(self) -> int | None: ...


class FrozenSection(ModelSection, Protocol):
    """A ModelSection of a frozen model."""

    @property
    def param_dtype(self) -> Literal["auto", "bf16", "fp16", "fp32"] | None: ...


@dataclass(frozen=True)
class FrozenAtPath:
    """A FrozenSection without model path in its config section: of a teacher, or of a reward model."""

    path: str
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = None
    ranks: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    pp: int | None = None
    cpu_offload: bool | None = None
    max_tokens_per_device: int | None = None

    @classmethod
    def from_config(cls, path: str, section: FrozenModelConfig | RewardModelConfig) -> FrozenAtPath:
        return cls(path, **vars(section))


def frozen_config(trained: EngineConfig, section: FrozenSection) -> EngineConfig:
    """The engine config of a frozen model. trained: the engine config of the trained model."""
    base = beside_trained(trained, section)
    fsdp = replace(base.fsdp, param_dtype=section.param_dtype or base.fsdp.param_dtype)
    return replace(
        base, fsdp=fsdp, optimizer=OptimizerConfig(), purpose="inference", replay=False, neftune_noise_alpha=None
    )


def open_frozen(
    section: str,
    config: EngineConfig,
    ranks: Ranks,
    *,
    weights: bool = True,
    shares_with: Engine | None = None,
    progress: Progress | None = None,
    readouts: Collection[str] = (),
) -> Engine:
    """The engine of such a config. section: its name, for errors. weights: as of Engine; a simulation has none. Other
    arguments: as of Engine. Collective."""
    with flight.computing(f"the {section}"), named_section(section):
        flight.enter("load")
        weights = weights and ranks.simulated is None
        return Engine(config, ranks, weights=weights, shares_with=shares_with, progress=progress, readouts=readouts)


def beside_trained(trained: EngineConfig, section: ModelSection) -> EngineConfig:
    """The engine config of another model: the trained model's, without settings for training, and with the section's
    settings."""
    model = ModelConfig(
        path=section.path or trained.model.path,
        init=trained.model.init if section.path is None else "pretrained",
        dcp_weights=trained.model.dcp_weights if section.path is None else None,
        ignore_weights=trained.model.ignore_weights,
        attention=trained.model.attention,
        compile=trained.model.compile,
    )
    usual = trained.mesh if section.ranks is None else MeshConfig()
    mesh = MeshConfig(
        dp_replicate=section.dp_replicate or usual.dp_replicate, dp_shard=section.dp_shard or usual.dp_shard,
        tp=section.tp or usual.tp, cp=usual.cp, ulysses=usual.ulysses if section.path is None else None,
        ep=usual.ep if section.path is None and section.dp_shard in (None, usual.dp_shard) else 1,
        pp=section.pp or usual.pp, pp_schedule=trained.mesh.pp_schedule,
        pp_stages_per_rank=trained.mesh.pp_stages_per_rank,
    )  # fmt: skip
    fsdp = (
        trained.fsdp
        if section.path is None
        else replace(trained.fsdp, wrap="auto", overrides={}, cast_forward_inputs=())
    )
    # fsdp.cpu_offload=optimizer would have no effect: a frozen model has only weights, which stay on the accelerator.
    fsdp = replace(fsdp, cpu_offload=fsdp.cpu_offload is True if section.cpu_offload is None else section.cpu_offload)
    # Separate ranks have no cp: a row holds cp times the tokens.
    factor = 1 if section.ranks is None else trained.mesh.cp
    budget = section.max_tokens_per_device or trained.step.max_tokens_per_device * factor
    step = replace(trained.step, max_tokens_per_device=budget)
    return replace(trained, model=model, lora=LoraConfig(), mesh=mesh, fsdp=fsdp, step=step)


@contextmanager
def named_section(section: str) -> Iterator[None]:
    """Inside, errors name this config section, because an engine's messages only name `model` and `mesh`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the {section} (keys {section}.*, others as the policy's): {error}") from error
