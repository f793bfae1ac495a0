"""The engine configs of policy, critic, reference, teacher and reward models, and the engines of all but the policy.
Configs are the policy's, with the path, mesh, dtype and token budget of the model's section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from transformers import PretrainedConfig

from weft.config.devices import teacher_ranks
from weft.config.rl_schema import RlConfig
from weft.data.same_tokenizer import check_same_tokenizer
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.frozen import FrozenAtPath, beside_trained, frozen_config, named_section, open_frozen
from weft.engine.score_head import ScoreSpec
from weft.errors import UserError
from weft.inference.cache_support import caches
from weft.launch import flight
from weft.launch.process import Ranks


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
    return frozen_config(policy_config(config), section)


def teacher_config(config: RlConfig) -> EngineConfig | None:
    """The engine config of rl.teacher, or None. Its logits are divided by rollout.temperature, as the policy's."""
    if config.rl.teacher is None:
        return None
    section = replace(FrozenAtPath.from_config(config.rl.teacher, config.teacher), ranks=teacher_ranks(config))
    return frozen_config(policy_config(config), section)


def reward_model_config(config: RlConfig, path: str) -> EngineConfig:
    """The engine config of the reward model at `path`."""
    frozen = frozen_config(policy_config(config), FrozenAtPath.from_config(path, config.reward_model))
    return replace(frozen, temperature=1.0, exact=False, score=ScoreSpec(end_marked=True))


def critic_config(config: RlConfig) -> EngineConfig | None:
    """The engine config of the critic; None unless rl.advantage needs one."""
    if not config.rl.has_critic:
        return None
    section = config.critic
    base = beside_trained(policy_config(config), section)
    optimizer = replace(config.optimizer, lr=section.lr, groups=(), ema_decay=None, load_state=False)
    model = replace(base.model, recompute=config.model.recompute)
    return replace(
        base, model=model, optimizer=optimizer, temperature=1.0, score=ScoreSpec(first=section.head), replay=False
    )


def reference_engine(
    config: RlConfig, ranks: Ranks, *, weights: bool = True, shares_with: Engine | None = None
) -> Engine | None:
    """The engine of reference_config, or None; collective. weights: False builds only shapes. shares_with: the policy's
    engine."""
    engine_config = reference_config(config)
    if engine_config is None:
        return None
    return open_frozen("reference", engine_config, ranks, weights=weights, shares_with=shares_with)


def teacher_engine(
    config: RlConfig, ranks: Ranks, *, weights: bool = True, shares_with: Engine | None = None
) -> Engine | None:
    """The engine of teacher_config, or None; see reference_engine. Raises UserError for another tokenizer."""
    engine_config = teacher_config(config)
    if engine_config is None:
        return None
    check_same_tokenizer(config.model.path, engine_config.model.path, "rl.teacher")
    return open_frozen("teacher", engine_config, ranks, weights=weights, shares_with=shares_with)


def reward_model_engine(
    config: RlConfig, path: str, ranks: Ranks, *, weights: bool = True, shares_with: Engine | None = None
) -> Engine:
    """The engine of reward_model_config; see reference_engine."""
    with flight.computing("a reward model"):
        flight.enter("load")
        try:
            return Engine(
                reward_model_config(config, path), ranks, weights=weights, shares_with=shares_with, readouts=("score",)
            )
        except UserError as error:
            raise UserError(f"the reward model (rl.reward: model:{path}, keys reward_model.*): {error}") from error


def critic_engine(
    config: RlConfig, ranks: Ranks, *, weights: bool = True, fill: bool = True, shares_with: Engine | None = None
) -> Engine | None:
    """The engine of critic_config, or None; collective. weights: False builds only shapes. fill: False if a checkpoint
    will fill the weights. shares_with: the policy's engine."""
    engine_config = critic_config(config)
    if engine_config is None:
        return None
    with flight.computing("the critic"), named_section("critic"):
        return Engine(engine_config, ranks, weights=weights, fill=fill, shares_with=shares_with)


def opening_lines(
    config: RlConfig, reference: Engine | None, critic: Engine | None, teacher: Engine | None = None
) -> list[str]:
    """Lines that describe the reference, the teacher and the critic at start."""
    lines, only = [], "; not trained on (rl.measure_kl)" * config.rl.measure_kl
    if reference is not None:
        dtype = str(reference.precision.compute).removeprefix("torch.")
        lines.append(f"kl       measured against {reference.config.model.path}, in {dtype}{only}: {reference.memory}")
    elif config.rl.has_reference and reference_config(config) is None:
        lines.append(f"kl       measured against the base under the adapters{only}")
    if teacher is not None:
        part = config.rl.teacher_divergence if config.rl.teacher_in == "loss" else "log(teacher / policy) as advantage"
        lines.append(
            f"teacher  {teacher.config.model.path}: {part}, weight {config.rl.teacher_coef:g}: {teacher.memory}"
        )
    if critic is not None:
        kind = type(critic.built.module.hf_model).__name__
        load = critic.built.load
        head = f"new head ({config.critic.head})" if load is None or load.fresh else "its own head"
        lines.append(f"critic   {critic.config.model.path}: {kind}, {head}, lr {config.critic.lr:g}: {critic.memory}")
    return lines


def notes_on_generation(config: RlConfig, shape: PretrainedConfig) -> list[str]:
    """A warning if the embedded or hf engine must generate without a cache, which is many times slower."""
    if config.rollout.engine not in ("embedded", "hf") or caches(shape):
        return []
    return [
        f"warning  {shape.get_text_config().model_type} cannot generate exactly with a key-value cache, so each "
        "token needs a forward of its whole row, which may be ten times slower or more. rollout.engine=vllm has its "
        "own cache"
    ]


def note_on_prefixes(engine: Engine) -> list[str]:
    """A line if the common prompt of answers is forwarded once for each answer."""
    reason = engine.planner.apart
    if not reason or engine.config.step.share_prefixes == "off":
        return []
    return [f"prompts  forwarded once for each answer: {reason} (step.share_prefixes)"]


def check_images(engines: Mapping[str, Engine], samples: Sequence[tuple[str, int, int]]) -> None:
    """Raise UserError, naming the prompt, if an engine cannot process a sample with images. engines: by role. samples:
    as longest_samples returns."""
    for role, engine in engines.items():
        with nullcontext() if role == "policy" else named_section(role):
            for sample in samples:
                engine.planner.check_image(*sample)
