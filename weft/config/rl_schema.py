"""The keys of `weft rl` beside those of schema.py, which it shares. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.config.schema import (
    CheckpointConfig,
    DataConfig,
    FsdpConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    StepConfig,
    TrackConfig,
    TrainConfig,
    key,
)


@dataclass(frozen=True, kw_only=True)
class RlAlgorithm:
    """What is learnt, from which rewards."""

    reward: tuple[str, ...] = key(
        "Reward functions: names of built-in ones (math, exact_match, regex, format, length), or import paths, as in "
        "[my_rewards:is_right]. docs/how-to/write-a-reward.md",
        (),
    )
    reward_weights: tuple[float, ...] | None = key(
        "What each of rl.reward is multiplied by in the sum, in their order; null: 1 for each.", None
    )
    reward_column: str | None = key(
        "Column that names, for each row, which of rl.reward are asked (a name, or a list of names); null: all.", None
    )
    reward_options: dict[str, bool | int | float | str | tuple[str, ...]] = key(  # noqa: RUF009 - dataclasses.field()
        "Arguments of reward functions by name, as in {regex.pattern: '#### (\\\\d+)', math.boxed: true}.",
        default_factory=dict,
    )
    reward_timeout: float = key(
        "Seconds that one call of a reward function, with the samples of one prompt, may take. Its process is ended then, "
        "and each sample tried alone.",
        30.0,
    )
    reward_workers: int | None = key("Processes that run reward functions; null: one per core, at most 16.", None)
    environment: str | None = key(
        "Environment that answers the policy, by its import path, as in examples.calculator_env:Calculator; null: the "
        "policy answers once. docs/environments.md",
        None,
    )
    max_turns: int = key("How often the policy may answer in one conversation with rl.environment.", 8)
    environment_timeout: float = key("Seconds that one step of rl.environment may take.", 60.0)
    dynamic_sampling: bool = key(
        "Replace prompts whose samples all have the same reward, from which nothing is learnt, by the next prompts of "
        "the data (DAPO, Yu et al. 2025).",
        False,
    )
    max_resamples: int = key(
        "How often rl.dynamic_sampling draws further prompts for one rollout step; what is missing then is filled up "
        "with those that were set aside.",
        3,
    )
    algorithm: Literal["grpo"] = key(
        "Presets of the keys below. `grpo`: rewards are compared within a group (Shao et al. 2024).", "grpo"
    )
    prompts: int = key("Prompts of a rollout step.", 64)
    group_size: int = key("Samples of each prompt, whose rewards are compared.", 8)
    updates: int = key("Optimizer steps that a rollout step's groups are dealt to.", 1)
    chat: bool = key(
        "A `prompt` that is a text is what a user says, and goes through the chat template; false: it is continued as "
        "it stands.",
        False,
    )
    instruction: str | None = key(
        "Text put behind every prompt, on a line of its own, as in `Put the answer in \\boxed{}.`", None
    )
    epochs: int = key("How often a rollout step's samples are trained.", 1)
    clip: tuple[float, float] = key(
        "How far below and above 1 the ratio of current and old policy may move before its gradient is cut.", (0.2, 0.2)
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What generates, and how tokens are drawn."""

    engine: Literal["embedded"] = key(
        "`embedded`: a copy of the model in the trainer's own ranks, taking turns with training.", "embedded"
    )
    max_prompt_tokens: int = key("Longest prompt in tokens; data.long_documents says what happens to others.", 1024)
    max_new_tokens: int = key("Longest completion in tokens.", 1024)
    temperature: float = key("Logits are divided by it, in sampling and in training alike.", 1.0)
    stop: tuple[str, ...] = key("Texts that end a completion, beside the model's end tokens.", ())


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where trainers and rollout engines run."""

    address: str | None = key(
        "Ray cluster to join, as in 10.0.0.1:6379 or `auto`; null: one of its own on this machine.", None
    )
    trainer: int | None = key("Trainer ranks; null: one per accelerator of the cluster, else --nproc, else 1.", None)


@dataclass(frozen=True, kw_only=True)
class RlEvalConfig:
    """Held-out prompts, whose answers are rewarded and not trained."""

    path: str | None = key("Held-out prompts: data like data.path's, with the columns that data.columns says.", None)
    sources: tuple[SourceConfig, ...] | None = key(
        "Several sets of held-out prompts in place of eval.path, each with a name; evaluated apart.", None
    )
    every: int = key("Rollout steps between evaluations; 0: only after the last.", 0)
    at_start: bool = key("Evaluate before the first step, too.", False)
    samples: int = key(
        "Answers drawn for each held-out prompt beside the greedy one, from which pass@k is estimated; 0: none.", 0
    )
    pass_at: tuple[int, ...] | None = key(
        "k of pass@k (Chen et al. 2021); null: 1, 2, 4, ... up to eval.samples, which is one of them.", None
    )
    temperature: float = key("Temperature of the answers that eval.samples draws.", 1.0)
    top_p: float = key("Likeliest tokens that those are drawn from, by their probability together; 1: all.", 1.0)
    top_k: int = key("Likeliest tokens that those are drawn from, by number; 0: all.", 0)
    max_new_tokens: int | None = key("Longest answer in tokens; null: rollout.max_new_tokens.", None)
    correct_from: float = key(
        "Value of the first reward function that has one, from which an answer counts as correct.", 1.0
    )


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """Everything `weft rl` reads."""

    model: ModelConfig
    data: DataConfig
    rl: RlAlgorithm
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: RlEvalConfig = field(default_factory=RlEvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    run: RunConfig = field(default_factory=RunConfig)
