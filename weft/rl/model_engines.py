"""The engine configs of policy, reference (only read) and critic (trained), and the engines of the latter two.

Reference and critic follow the policy's config, except where their sections set path, mesh, dtype or token budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from transformers import PretrainedConfig

from weft.config.rl_schema import CriticConfig, ReferenceConfig, RlConfig
from weft.config.schema import LoraConfig, MeshConfig, ModelConfig, OptimizerConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.score_head import ScoreSpec
from weft.errors import UserError
from weft.inference.cache_support import caches
from weft.launch.process import Ranks
from weft.parallel.shards.load import Progress


def policy_config(config: RlConfig) -> EngineConfig:
    """The engine config of the policy."""
    exact = config.rl.on_policy == "exact"
    return replace(EngineConfig.from_config(config), temperature=config.rollout.temperature, exact=exact)


def reference_config(config: RlConfig) -> EngineConfig | None:
    """The engine config of the reference. None without rl.kl_coef and rl.measure_kl, or if the policy without its
    adapters is the reference (Engine.without_adapter)."""
    section = config.reference
    if not config.rl.has_reference or (config.lora.on and section.path is None and not config.lora.modules_to_save):
        return None
    base = _from_policy(policy_config(config), section)
    fsdp = replace(base.fsdp, param_dtype=section.param_dtype or base.fsdp.param_dtype)
    return replace(base, fsdp=fsdp, optimizer=OptimizerConfig(), purpose="inference", replay=False)


def critic_config(config: RlConfig) -> EngineConfig | None:
    """The engine config of the critic; None unless rl.advantage needs one."""
    if not config.rl.has_critic:
        return None
    section = config.critic
    base = _from_policy(policy_config(config), section)
    optimizer = replace(config.optimizer, lr=section.lr, groups=(), ema_decay=None, load_state=False)
    model = replace(base.model, recompute=config.model.recompute)
    return replace(
        base, model=model, optimizer=optimizer, temperature=1.0, score=ScoreSpec(first=section.head), replay=False
    )


def reference_engine(
    config: RlConfig,
    ranks: Ranks,
    *,
    weights: bool = True,
    shares_with: Engine | None = None,
    progress: Progress | None = None,
) -> Engine | None:
    """The engine of reference_config, or None; collective. weights: False builds only shapes. shares_with: the policy's
    engine."""
    engine_config = reference_config(config)
    if engine_config is None:
        return None
    with _named("reference"):
        return Engine(engine_config, ranks, weights=weights, shares_with=shares_with, progress=progress)


def critic_engine(
    config: RlConfig,
    ranks: Ranks,
    *,
    weights: bool = True,
    fill: bool = True,
    shares_with: Engine | None = None,
    progress: Progress | None = None,
) -> Engine | None:
    """The engine of critic_config, or None; collective. weights: False builds only shapes. fill: False if a checkpoint
    will fill the weights. shares_with: the policy's engine."""
    engine_config = critic_config(config)
    if engine_config is None:
        return None
    with _named("critic"):
        return Engine(engine_config, ranks, weights=weights, fill=fill, shares_with=shares_with, progress=progress)


def opening_lines(config: RlConfig, reference: Engine | None, critic: Engine | None) -> list[str]:
    """Lines that describe the reference and the critic at start."""
    lines, only = [], "; not trained on (rl.measure_kl)" * config.rl.measure_kl
    if reference is not None:
        dtype = str(reference.precision.compute).removeprefix("torch.")
        lines.append(f"kl       measured against {reference.config.model.path}, in {dtype}{only}: {reference.memory}")
    elif config.rl.has_reference and reference_config(config) is None:
        lines.append(f"kl       measured against the base under the adapters{only}")
    if critic is not None:
        kind = type(critic.built.module.hf_model).__name__
        load = critic.built.load
        head = f"new head ({config.critic.head})" if load is None or load.fresh else "its own head"
        lines.append(f"critic   {critic.config.model.path}: {kind}, {head}, lr {config.critic.lr:g}: {critic.memory}")
    return lines


def notes_on_generation(config: RlConfig, shape: PretrainedConfig) -> list[str]:
    """A warning if weft's own engines must generate without a cache, which is many times slower."""
    if config.rollout.engine not in ("embedded", "hf") or caches(shape):
        return []
    return [
        f"warning  {shape.get_text_config().model_type} has no cache that gives the logits of a forward without one: "
        "each token is drawn by a forward of its whole row, which may cost ten times as much or more "
        "(rollout.engine=vllm generates by itself)"
    ]


def check_images(engines: Mapping[str, Engine | None], samples: Sequence[tuple[str, int, int]]) -> None:
    """Raise UserError, naming the prompt, if an engine cannot take a sample with images. engines: by role. samples: as
    longest_samples returns."""
    for role, engine in engines.items():
        if engine is not None:
            with nullcontext() if role == "policy" else _named(role):
                for sample in samples:
                    engine.planner.check_image(*sample)


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Inside, errors name this config section: an engine's own messages say only `model` and `mesh`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the {section} (keys {section}.*, others as the policy's): {error}") from error


def _from_policy(policy: EngineConfig, section: ReferenceConfig | CriticConfig) -> EngineConfig:
    """The policy's engine config without policy-only settings, with the section's own settings on top."""
    model = ModelConfig(
        path=section.path or policy.model.path,
        init=policy.model.init if section.path is None else "pretrained",
        dcp_weights=policy.model.dcp_weights if section.path is None else None,
        ignore_weights=policy.model.ignore_weights,
        attention=policy.model.attention,
        compile=policy.model.compile,
    )
    usual = policy.mesh if section.ranks is None else MeshConfig()
    mesh = MeshConfig(
        dp_replicate=section.dp_replicate or usual.dp_replicate, dp_shard=section.dp_shard or usual.dp_shard,
        tp=section.tp or usual.tp, cp=usual.cp, ulysses=usual.ulysses if section.path is None else None,
        ep=usual.ep if section.path is None and section.dp_shard in (None, usual.dp_shard) else 1,
        pp=section.pp or usual.pp, pp_schedule=policy.mesh.pp_schedule,
        pp_stages_per_rank=policy.mesh.pp_stages_per_rank,
    )  # fmt: skip
    fsdp = (
        policy.fsdp if section.path is None else replace(policy.fsdp, wrap="auto", overrides={}, cast_forward_inputs=())
    )
    if section.cpu_offload is not None:
        fsdp = replace(fsdp, cpu_offload=section.cpu_offload)
    factor = (
        1 if section.ranks is None else policy.mesh.cp
    )  # separate ranks have no cp: a row holds cp times the tokens
    budget = section.max_tokens_per_device or policy.step.max_tokens_per_device * factor
    step = replace(policy.step, max_tokens_per_device=budget)
    return replace(policy, model=model, lora=LoraConfig(), mesh=mesh, fsdp=fsdp, step=step)
