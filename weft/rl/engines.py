"""The engines of a trainer group besides the policy's: the reference, which only reads, and the critic, which trains.

Each is an Engine like any other, in the same ranks, with its own mesh, dtype and token budget where the config says so.
Everything is called on all ranks together, with the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from weft.checkpoint.state import DamagedError, load_state, read_state
from weft.cluster.process import Ranks
from weft.config.rl_schema import CriticConfig, ReferenceConfig, RlConfig
from weft.config.schema import LoraConfig, MeshConfig, ModelConfig, OptimizerConfig
from weft.engine.engine import Engine, EngineConfig
from weft.errors import UserError
from weft.models.load import Progress
from weft.objectives.value import ValueLoss
from weft.rl.documents import document_to_read, documents_of, is_trained
from weft.rl.types import Floats, Sample

CRITIC = "critic"  # folder of a checkpoint


def policy_config(config: RlConfig) -> EngineConfig:
    """The engine that `weft rl` trains."""
    return EngineConfig(
        model=config.model,
        lora=config.lora,
        mesh=config.mesh,
        fsdp=config.fsdp,
        step=config.step,
        optimizer=config.optimizer,
        seed=config.train.seed,
        deterministic=config.train.deterministic,
        temperature=config.rollout.temperature,
    )


def reference_config(config: RlConfig) -> EngineConfig | None:
    """The engine that rl.kl is measured with; None where there is none, or where it is the policy without its adapters
    (Engine.without_adapter)."""
    own = config.reference
    if config.rl.kl == 0 or (config.lora.on and own.path is None and not config.lora.modules_to_save):
        return None
    beside = _beside(policy_config(config), own)
    fsdp = replace(beside.fsdp, param_dtype=own.param_dtype or beside.fsdp.param_dtype)
    return replace(beside, fsdp=fsdp, optimizer=OptimizerConfig(), purpose="inference", replay=False)


def critic_config(config: RlConfig) -> EngineConfig | None:
    """The engine that learns values; None where nothing asks for them."""
    if config.rl.advantage != "gae":
        return None
    own = config.critic
    beside = _beside(policy_config(config), own)
    optimizer = replace(config.optimizer, lr=own.lr, groups=(), ema_decay=None)
    model = replace(beside.model, recompute=config.model.recompute)
    return replace(beside, model=model, optimizer=optimizer, temperature=1.0, value_head=own.head, replay=False)


def reference_engine(
    config: RlConfig, ranks: Ranks, *, beside: Engine | None = None, progress: Progress | None = None
) -> Engine | None:
    """That of reference_config, opened; collective. beside: the policy's."""
    wanted = reference_config(config)
    if wanted is None:
        return None
    with _named("reference"):
        return Engine(wanted, ranks, beside=beside, progress=progress)


def critic_engine(
    config: RlConfig, ranks: Ranks, *, fill: bool = True, beside: Engine | None = None, progress: Progress | None = None
) -> Engine | None:
    """That of critic_config, opened; collective. fill: False where a checkpoint is going to fill it. beside: the
    policy's."""
    wanted = critic_config(config)
    if wanted is None:
        return None
    with _named("critic"):
        return Engine(wanted, ranks, fill=fill, beside=beside, progress=progress)


class Beside:
    """The reference and the critic that a config asks for, on one rank beside its policy."""

    def __init__(self, config: RlConfig, policy: Engine, *, fill: bool = True) -> None:
        """fill: False where a checkpoint is going to fill the critic; the reference reads its own files always."""
        self.config, self.policy = config, policy
        self.reference = reference_engine(config, policy.ranks, beside=policy)
        self.critic = critic_engine(config, policy.ranks, fill=fill, beside=policy)

    @property
    def saved(self) -> dict[str, Engine]:
        """What a checkpoint holds beside the policy: folder -> engine."""
        return {} if self.critic is None else {CRITIC: self.critic}

    def fill_from(self, checkpoint: Path) -> None:
        """Go on from a checkpoint with the critic. UserError where it holds none that is whole."""
        if self.critic is None:
            return
        try:
            load_state(self.critic, read_state(checkpoint / CRITIC))
        except DamagedError as error:
            raise UserError(f"{checkpoint / CRITIC} cannot be resumed from: {error}.") from error

    def reference_logprobs(self, samples: Sequence[Sample]) -> dict[int, Floats]:
        """The reference's logprob of every sampled token, [T], of the samples that this rank was dealt, by index."""
        if self.reference is not None:
            return read_samples(self.reference, samples, "logprob")
        with self.policy.without_adapter():
            return read_samples(self.policy, samples, "logprob")

    def values(self, samples: Sequence[Sample]) -> dict[int, Floats]:
        """The critic's value of every sampled token before it was drawn, [T], likewise."""
        assert self.critic is not None, "rl.advantage asks for no critic"
        return read_samples(self.critic, samples, "value")

    def update_critic(self, samples: Sequence[Sample], lr: float) -> dict[str, object]:
        """One optimizer step of the critic towards the samples' returns; its metrics, none where no sample is trained.

        lr: the policy's of this step, of which the critic's is critic.lr / optimizer.lr.
        """
        critic, documents = self.critic, documents_of(samples, self.config)
        assert critic is not None, "rl.advantage asks for no critic"
        if not documents:
            return {}
        plan = critic.plan([critic.meta(document) for document in documents])
        needed = {index: documents[index] for index in critic.needs(plan)}
        metrics = critic.accumulate(plan, needed, ValueLoss(self.config.critic.clip))
        own_lr = lr * self.config.critic.lr / self.config.optimizer.lr
        result = critic.apply(own_lr)
        if result.skipped:
            return {"critic/skipped": True, "critic/reason": result.reason, **dict.fromkeys(metrics)}
        explained = explained_variance([sample for sample in samples if is_trained(sample, self.config)])
        own = {"critic/grad_norm": result.grad_norm, "critic/lr": own_lr, "critic/explained_variance": explained}
        return {**metrics, **own}


def read_samples(engine: Engine, samples: Sequence[Sample], what: str) -> dict[int, Floats]:
    """A readout of every sampled token, [T], 0 elsewhere, of the samples that this rank was dealt, by index."""
    documents = [document_to_read(sample) for sample in samples]
    plan = engine.plan([engine.meta(document) for document in documents])
    read = engine.readout(plan, {index: documents[index] for index in engine.needs(plan)}, (what,))
    return {
        index: np.where(samples[index].sampled, found[what].numpy(), 0).astype(np.float32)
        for index, found in read.items()
    }


def explained_variance(samples: Sequence[Sample]) -> float | None:
    """1 - Var(R - V) / Var(R) over sampled tokens, V before the update: 1 where the critic knew, 0 where it might as
    well have said one number; None where all returns are equal."""
    known = [
        (sample.returns[sample.sampled], sample.values[sample.sampled])
        for sample in samples
        if sample.returns is not None and sample.values is not None
    ]
    returns, values = (np.concatenate(column).astype(np.float64) for column in zip(*known, strict=True))
    if np.ptp(returns) == 0:
        return None
    return float(1 - (returns - values).var() / returns.var())


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Messages of what is opened inside speak of model and mesh: say whose."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the {section} (keys {section}.*, others as the policy's): {error}") from error


def _beside(policy: EngineConfig, own: ReferenceConfig | CriticConfig) -> EngineConfig:
    """The policy's engine, less what is its own affair, with what the section says."""
    model = ModelConfig(
        path=own.path or policy.model.path,
        init=policy.model.init if own.path is None else "pretrained",
        ignore_weights=policy.model.ignore_weights,
        attention=policy.model.attention,
        compile=policy.model.compile,
    )
    mesh = MeshConfig(
        dp_replicate=own.dp_replicate or policy.mesh.dp_replicate, dp_shard=own.dp_shard or policy.mesh.dp_shard
    )
    fsdp = policy.fsdp if own.path is None else replace(policy.fsdp, wrap="auto", overrides={}, cast_forward_inputs=())
    if own.cpu_offload is not None:
        fsdp = replace(fsdp, cpu_offload=own.cpu_offload)
    budget = own.max_tokens_per_device or policy.step.max_tokens_per_device
    step = replace(policy.step, max_tokens_per_device=budget)
    return replace(policy, model=model, lora=LoraConfig(), mesh=mesh, fsdp=fsdp, step=step)
