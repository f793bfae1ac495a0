"""The config of an Engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from weft.config.reward_schema import RewardConfig, RewardLossConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import (
    FsdpConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    SftConfig,
    StepConfig,
)
from weft.engine.score_head import ScoreSpec

# Their learning rate is multiplied by lora.plus_ratio: B, magnitudes (LoRA+, Hayou et al. 2024, arXiv:2402.12354).
_FASTER = ("*.lora*.[Bm]*",)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The sections of a run's config that an Engine reads. purpose: with `inference` there are no gradients, optimizer
    or fp32 masters.

    temperature: divides the logits of every logprob and entropy, as in sampling. exact: a token's logprob is bitwise
    equal to the logprob that the embedded engine records when it samples the token (docs/explanation/exact.md). score:
    a critic or a reward model, with the readouts `value` (one label) and `score` instead of logits.
    neftune_noise_alpha: adds noise to embeddings in training (models/embedding_noise.py). replay: follow the documents'
    routes, except while adapters are switched off.
    """

    model: ModelConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    deterministic: bool = False
    purpose: Literal["train", "inference"] = "train"
    temperature: float = 1.0
    exact: bool = False
    score: ScoreSpec | None = None
    replay: bool = True
    neftune_noise_alpha: float | None = None

    def __post_init__(self) -> None:
        ratio, groups = self.lora.plus_ratio, self.optimizer.groups
        added = ParameterGroup(match=_FASTER, lr_scale=ratio)
        if self.lora.on and ratio is not None and added not in groups:
            object.__setattr__(self, "optimizer", replace(self.optimizer, groups=(*groups, added)))

    @staticmethod
    def from_config(config: SftConfig | RlConfig) -> EngineConfig:
        """The sections of a config of `weft sft` or `weft rl`."""
        return EngineConfig(
            model=config.model,
            lora=config.lora,
            mesh=config.mesh,
            fsdp=config.fsdp,
            step=config.step,
            optimizer=config.optimizer,
            seed=config.train.seed,
            deterministic=config.train.deterministic,
            neftune_noise_alpha=config.train.neftune_noise_alpha,
            score=_score_of(config.reward) if isinstance(config, RewardConfig) else None,
        )

    of = from_config  # the former name


def _score_of(reward: RewardLossConfig) -> ScoreSpec:
    """The score head of `weft reward`."""
    return ScoreSpec(reward.labels, reward.head, "token" if reward.loss == "process" else "sequence", end_marked=True)
