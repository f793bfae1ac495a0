"""The keys of `weft rl` that are not shared with `weft sft` (schema.py). Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weft.config import conditions as when
from weft.config.conditions import REWARD_MODEL
from weft.config.keys import key, with_former_names
from weft.config.ranges import (
    AT_LEAST_1,
    AXIS,
    BELOW_1,
    ENGINE_COUNTS,
    INSIDE_0_1,
    NOT_NEGATIVE,
    POSITIVE,
    PROCESSES,
    RANKS,
    SHARE,
    TWO_TOKENS,
    UP_TO_1,
    Range,
)
from weft.config.run_schema import RunConfig, TrackConfig
from weft.config.schema import (
    CheckpointConfig,
    DataConfig,
    FsdpConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    PolicyOptimizerConfig,
    ScheduleConfig,
    SourceConfig,
    StepConfig,
    TeacherConfig,
    TrainConfig,
)
from weft.errors import how_to_install
from weft.rl.algorithms import ADVANTAGES, ALGORITHMS, TOKEN_LOSSES, UNUSABLE, needs_critic

if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple({**ALGORITHMS, **UNUSABLE})]  # checks explain why a name in UNUSABLE cannot be used


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@with_former_names
@dataclass(frozen=True, kw_only=True)
class RlAlgorithm:
    """The algorithm, its rewards and its loss."""

    reward: tuple[str, ...] = key(
        "Reward functions: names of built-in ones (math, exact_match, regex, format, length), import paths, as in "
        "[my_rewards:is_right] (docs/how-to/write-a-reward.md), or reward models, as in "
        "[model:runs/rm/checkpoints/latest] (docs/how-to/reward-models.md).",
        (),
    )
    reward_weights: tuple[float, ...] | None = key(
        "Weight of each of rl.reward in the sum, in the same order; null: 1 for each.",
        None,
        unread=(when.NO_REWARD,),
    )
    reward_column: str | None = key(
        "Column that names the functions of rl.reward for each row (a name, or a list of names); null: all.",
        None,
        unread=(when.NO_REWARD,),
    )
    reward_options: dict[str, bool | int | float | str | tuple[str, ...]] = key(  # noqa: RUF009 - dataclasses.field()
        "Arguments of reward functions by name, as in {regex.pattern: '#### (\\\\d+)', math.boxed: true}.",
        default_factory=dict,
        unread=(when.NO_REWARD,),
    )
    reward_timeout: float = key(
        "Seconds for one call of a reward function with the samples of one prompt. Then weft ends its process and "
        "retries each sample alone.",
        30.0,
        within=POSITIVE,
        unread=(when.NO_REWARD,),
    )
    reward_workers: int | None = key(
        "Processes that run reward functions; null: one per core, at most 16.",
        None,
        within=PROCESSES,
        unread=(when.NO_REWARD,),
    )
    environment: str | None = key(
        "Environment that replies to the policy: an import path, as in examples.calculator_env:Calculator; a game "
        "with Gymnasium's API (gymnasium:FrozenLake-v1, gymnasium:my_games:Maze); or a server of OpenEnv "
        "(openenv:http://localhost:8000). null: the policy answers once. docs/how-to/environments.md",
        None,
    )
    agent: str | None = key(
        "Agent that calls the policy over HTTP, instead of an environment: the import path of a function, as in "
        "my_agents:solve; a command, as in 'python solve.py'; or an environment of the package verifiers "
        "(verifiers:my-env, verifiers:env.toml). weft serves it an OpenAI-compatible endpoint, and runs it once for "
        "each sample. null: none. docs/how-to/agents.md",
        None,
    )
    agent_timeout: float = key(
        "Seconds for one run of rl.agent. Then weft ends its process and does not train on the sample.",
        600.0,
        within=POSITIVE,
        unread=(when.NO_AGENT,),
    )
    agents_at_once: int = key(
        "Maximum number of concurrent runs of rl.agent.", 64, within=PROCESSES, unread=(when.NO_AGENT,)
    )
    agent_host: str = key(
        "Address of the endpoint of rl.agent. With any address other than 127.0.0.1, programs on other machines can "
        "try API keys.",
        "127.0.0.1",
        unread=(when.NO_AGENT,),
    )
    agent_port: int = key(
        "Port of the endpoint of rl.agent; 0: any free port.",
        0,
        within=Range(lambda v: 0 <= v < 65_536, "0 to 65,535"),
        unread=(when.NO_AGENT,),
    )
    max_turns: int = key(
        "Maximum number of answers of the policy in a conversation with rl.environment, or in one run of rl.agent.",
        8,
        within=AT_LEAST_1,
        unread=(when.ONE_TURN,),
    )
    environment_timeout: float = key(
        "Seconds for one step of rl.environment.", 60.0, within=POSITIVE, unread=(when.NO_ENVIRONMENT,)
    )
    algorithm: AlgorithmName = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Sets the keys below that you have not set, to the values of the algorithm's paper "
        "(docs/reference/algorithms.md).",
        "grpo",
    )
    preset: Literal["trl", "verl", "roll", "miles", "slime", "openrlhf", "nemo-rl"] | None = key(
        "Sets the keys below that you have not set, to this trainer's defaults for rl.algorithm where they differ "
        "from the paper (docs/reference/algorithms.md); null: the paper's values.",
        None,
        formerly="like",
    )
    prompts_per_step: int = key("Prompts of a rollout step.", 64, formerly="prompts", within=AT_LEAST_1)
    group_size: int = key("Samples of each prompt, whose rewards are compared.", 8, within=AT_LEAST_1)
    minibatches: int = key(
        "Optimizer steps of a rollout step, over which its groups are distributed.",
        1,
        formerly="updates",
        within=AT_LEAST_1,
    )
    chat: bool = key(
        "A text `prompt` is a user message, and weft renders it with the chat template; false: the policy continues "
        "the text.",
        False,
    )
    instruction: str | None = key(
        "Text appended to every prompt on a separate line, as in `Put the answer in \\boxed{}.`", None
    )
    epochs: int = key("Number of passes over a rollout step's samples.", 1, within=AT_LEAST_1)
    advantage: str = key(
        f"How a reward becomes the advantages of its sample's tokens: {_listed(ADVANTAGES)} "
        "(docs/reference/algorithms.md has the formulas), or your function, as in my_rl:advantage.",
        "grpo",
    )
    advantage_norm: Literal["group", "batch", "none"] = key(
        "Divisor of advantages: the standard deviation of the `group`'s rewards, or of the whole step's (`batch`; "
        "with `gae` that of the advantages, whose mean is also subtracted), or `none`.",
        "group",
        formerly="scale",
    )
    gamma: float = key("Discount factor per token.", 1.0, within=UP_TO_1)
    gae_lambda: float = key(
        "1: advantages only from rewards; lower values use more of the critic's values.", 1.0, within=SHARE
    )
    policy_loss: str = key(
        f"The loss of a token: {_listed(TOKEN_LOSSES)} (docs/reference/algorithms.md has the formulas), or a function "
        "of yours, as in my_rl:loss.",
        "ppo",
    )
    clip: tuple[float, float] = key(
        "Distances below and above 1 beyond which the ratio of current and old policy has no gradient.",
        (0.2, 0.2),
        within=Range(lambda v: 0 < v[0] <= 1 and v[1] > 0, "two numbers above 0, the first at most 1"),
    )
    dual_clip: float | None = key(
        "If the advantage is negative, upper bound on a token's loss as a multiple of the absolute advantage; null: "
        "unbounded.",
        None,
        within=Range(lambda v: v > 1, "above 1, or null"),
    )
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = key(
        "From the tokens' losses to the loss of an optimizer step. `token_mean`: the mean over tokens; "
        "`sequence_mean`: the mean of each sample, then over samples; `sequence_sum`: the sum of each sample / "
        "rollout.max_new_tokens, then the mean over samples.",
        "sequence_mean",
        formerly="aggregation",
    )
    kl_coef: float = key(
        "Weight of the KL divergence from the reference, the initial model; 0: none.",
        0.0,
        formerly="kl",
        within=NOT_NEGATIVE,
    )
    measure_kl: bool = key(
        "Measure the KL divergence from the reference (metric `kl`) even if rl.kl_coef is 0, without training on it.",
        False,
        unread=(when.KL_IS_TRAINED,),
    )
    kl_in: Literal["loss", "reward"] = key(
        "Add the KL divergence to the loss, or subtract it from each token's reward.", "loss", unread=(when.NO_KL,)
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "Estimator of each token's KL, with d = log(policy / reference): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. "
        "In the loss k2 has the gradient of the KL, and k3 that of the reverse KL; with rl.kl_unbiased all have the "
        "KL's gradient.",
        "k3",
        unread=(when.NO_KL,),
    )
    kl_clamp: float | None = key(
        "Maximum absolute value of each token's estimate; null: unbounded. verl, SkyRL, NeMo RL and ROLL use 10.",
        None,
        within=POSITIVE,
        unread=(when.NO_KL,),
    )
    kl_unbiased: bool = key(
        "Multiply the estimate in the loss by the ratio of current and old policy, so that its gradient is that of "
        "the KL (DeepSeek-V3.2).",
        False,
        unread=(when.NO_KL, when.KL_IN_REWARD),
    )
    entropy_coef: float = key(
        "Weight of the policy's entropy, which is subtracted from the loss.",
        0.0,
        formerly="entropy",
        within=NOT_NEGATIVE,
    )
    entropy_aggregation: Literal["token_mean", "sequence_mean"] | None = key(
        "Aggregation of the entropy over tokens; null: rl.loss_aggregation.",
        None,
        unread=(when.NO_ENTROPY,),
    )
    teacher: str | None = key(
        "Distil this model into the policy, on the policy's samples: a HuggingFace model directory or hub id with the "
        "same tokenizer; null: none. With a teacher, rl.reward may be empty (docs/how-to/distill.md).",
        None,
    )
    teacher_in: Literal["loss", "advantage"] = key(
        "`loss`: add rl.teacher_divergence of both distributions over the whole vocabulary, at each sampled token, to "
        "the loss (GKD). `advantage`: add log(teacher / policy) of each sampled token to its advantage; its expected "
        "gradient decreases the reverse KL.",
        "loss",
        unread=(when.NO_TEACHER,),
    )
    teacher_coef: float = key(
        "Weight of the teacher's term relative to the rewards.", 1.0, within=POSITIVE, unread=(when.NO_TEACHER,)
    )
    teacher_divergence: Literal["forward_kl", "reverse_kl", "jsd"] = key(
        "Divergence of rl.teacher_in=loss: `forward_kl` KL(teacher || policy), `reverse_kl` KL(policy || teacher), or "
        "`jsd`, with rl.teacher_beta between them. Logits of both are divided by rollout.temperature.",
        "reverse_kl",
        unread=(when.NO_TEACHER, when.TEACHER_IN_ADVANTAGE),
    )
    teacher_beta: float = key(
        "With jsd: beta KL(teacher || m) + (1 - beta) KL(policy || m), m = beta teacher + (1 - beta) policy.",
        0.5,
        within=INSIDE_0_1,
        unread=(when.NO_TEACHER, when.TEACHER_IN_ADVANTAGE, when.NO_TEACHER_JSD),
    )
    old_logprobs: Literal["recompute", "rollout"] = key(
        "Source of the old policy's logprobs. `recompute`: a forward of the trainer, which is not needed if a rollout "
        "step is one optimizer step (rl.minibatches x rl.epochs = 1). `rollout`: the engine's logprobs, so that "
        "ratios also correct the mismatch between engine and trainer.",
        "recompute",
    )
    on_policy: Literal["measured", "exact"] = key(
        "Whether samples come exactly from the trained policy. `measured`: engine and trainer round differently; the "
        "difference is a metric, and rl.correction corrects for it. `exact`: each logprob of the embedded engine is "
        "bitwise equal to the trainer's (fp32, CPU); weft tests this at the start and for every sample. "
        "docs/explanation/exact.md",
        "measured",
    )
    correction: Literal["none", "tis", "mis", "icepop"] = key(
        "Factor on the loss of a token that corrects for differences between engine and trainer: the ratio of old and "
        "rollout policy, truncated at rl.correction_limits (`tis`), or 0 outside the limits (`mis`: only above; "
        "`icepop`: above and below).",
        "tis",
        unread=(when.ROLLOUT_LOGPROBS, when.EXACT),
    )
    correction_level: Literal["token", "sequence", "geometric"] = key(
        "The ratio of each `token`, of the whole sample (`sequence`: the product), or their `geometric` mean.",
        "token",
        unread=(when.ROLLOUT_LOGPROBS, when.NO_CORRECTION, when.EXACT),
    )
    correction_limits: tuple[float, float] | None = key(
        "Lowest and highest ratio; null: [0, 2] with tis and mis, [0.5, 5] with icepop.",
        None,
        within=Range(lambda v: 0 <= v[0] <= 1 <= v[1], "two numbers, 1 between them, neither below 0"),
        unread=(when.ROLLOUT_LOGPROBS, when.NO_CORRECTION, when.EXACT),
    )
    dynamic_sampling: int = key(
        "Replace groups with equal rewards, which teach nothing, by groups of other prompts, in at most this many "
        "rounds. 0: keep them.",
        0,
        within=NOT_NEGATIVE,
    )
    mask_truncated: bool = key(
        "Do not train on samples truncated at the maximum length; their rewards still count in the means of their "
        "groups.",
        False,
    )
    count_masked: bool = key(
        "Count the samples of rl.mask_truncated in the divisor of sequence_mean and sequence_sum, as samples without "
        "a loss (TRL).",
        False,
        unread=(when.NONE_MASKED, when.COUNTS_TOKENS),
    )
    overlong_buffer: int | None = key(
        "Number of tokens before rollout.max_new_tokens in which a sample's reward is reduced, by up to "
        "rl.overlong_penalty (DAPO, equation 13); null: no reduction.",
        None,
        within=AT_LEAST_1,
    )
    overlong_penalty: float = key(
        "Penalty of a sample of the maximum length.", 1.0, within=POSITIVE, unread=(when.NO_OVERLONG_BUFFER,)
    )

    @property
    def has_reference(self) -> bool:
        """Whether the KL divergence from a reference is trained on, or only measured."""
        return self.kl_coef > 0 or self.measure_kl

    @property
    def teacher_in_loss(self) -> bool:
        """Whether the divergence from a teacher is part of the loss."""
        return self.teacher is not None and self.teacher_in == "loss"

    @property
    def teacher_in_advantage(self) -> bool:
        """Whether a teacher's logprobs of sampled tokens are part of the advantages."""
        return self.teacher is not None and self.teacher_in == "advantage"

    @property
    def has_critic(self) -> bool:
        """Whether rl.advantage reads the values of a critic."""
        return needs_critic(self.advantage)

    @property
    def corrects(self) -> bool:
        """Whether samples carry a correction between rollout and old policy."""
        return self.correction != "none" and self.old_logprobs == "recompute"


@with_former_names
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The rollout engine, and its sampling."""

    engine: str = key(
        "`embedded`: a copy of the model in the trainer's ranks, alternating with training. `hf`: the same generator "
        "in separate processes. `vllm`, `sglang`: servers in separate processes and environments. Or the name of an "
        "installed package's engine (docs/how-to/extend.md; docs/reference/rollout-engines.md).",
        "embedded",
    )
    max_prompt_tokens: int = key(
        "Maximum length of a prompt in tokens; data.long_documents handles longer ones.", 1024, within=AT_LEAST_1
    )
    max_new_tokens: int = key("Maximum length of a completion in tokens.", 1024, within=AT_LEAST_1)
    temperature: float = key(
        "Divisor of the logits, in sampling and in training.",
        1.0,
        within=Range(lambda v: v > 0, "above 0 (greedy samples of a group would all be equal)"),
    )
    top_p: float = key("Sample from the most likely tokens with this total probability; 1: all.", 1.0, within=UP_TO_1)
    top_k: int = key("Sample from this many most likely tokens; 0: all.", 0, within=NOT_NEGATIVE)
    min_p: float = key(
        "Do not sample tokens less likely than this share of the most likely one; 0: sample all.", 0.0, within=BELOW_1
    )
    allow_truncated: bool = key(
        "Train on samples of a server with rollout.top_p, top_k or min_p, even though it does not report the kept "
        "share of the distribution. Logprobs are then relative to the kept tokens, which biases the correction by "
        "that share (metric `sampling/kept_share`, docs/reference/algorithms.md).",
        False,
        unread=(when.ONLY_SERVERS, when.KEEPS_ALL_TOKENS),
    )
    oversample: int = key(
        "Groups to start in addition to those that a rollout step needs. weft trains on the first ones that are "
        "complete, and stops and drops the others (metrics `rollout/stopped_groups`, `rollout/dropped_samples`), so "
        "it trains on long answers less often than on short ones. 0: wait for all groups.",
        0,
        within=NOT_NEGATIVE,
    )
    stop: tuple[str, ...] = key("Texts that end a completion, in addition to the model's end tokens.", ())
    on_weight_update: Literal["continue", "drop"] = key(
        "Completions in progress when weights change (cluster.max_staleness). `continue`: they continue with the new "
        "weights, and each token has the version that sampled it; `drop`: they restart with the same seeds.",
        "continue",
        formerly="unfinished",
        unread=(when.NOTHING_UNFINISHED,),
    )
    transport: Literal["auto", "ipc", "shared", "group", "files"] = key(
        "How weights reach separate engines: memory of a CUDA device shared with a trainer rank (`ipc`), `shared` "
        "host memory, a process `group` (NCCL, or gloo on CPU), or `files` in RUN/sync, on a shared file system. "
        "`auto`: the first possible one, except files (docs/explanation/weight-sync.md).",
        "auto",
        unread=(when.NO_ENGINE_PROCESSES, when.READS_A_FOLDER),
    )
    sync: Literal["full", "delta", "auto"] = key(
        "What a sync sends to engines that have the last version: all tensors (`full`), or only elements whose bytes "
        "have changed, each with its position (`delta`: 6 bytes for an element in bf16, and a copy of the weights in "
        "the sending rank's memory and in each vLLM worker's). `auto`: `delta` through a process group on CPU, "
        "otherwise `full` (docs/explanation/weight-sync.md).",
        "full",
        unread=(when.NO_DELTAS,),
    )
    bucket_mb: int = key(
        "Megabytes of weights in flight to the engines, which is the memory that a sync needs. A tensor larger than a "
        "quarter of it is sent alone.",
        192,
        within=AT_LEAST_1,
        unread=(when.NO_ENGINE_PROCESSES, when.READS_A_FOLDER),
    )
    verify_every: int = key(
        "Every n-th sync compares checksums of all tensors, as received and as loaded by the engine; 0: only the "
        "first sync of each engine. Every sync checks names, shapes, dtypes and versions.",
        20,
        within=NOT_NEGATIVE,
        unread=(when.NO_ENGINE_PROCESSES, when.READS_A_FOLDER),
    )
    kv_cache_tokens: int = key(
        "Tokens in the embedded engine's KV cache on each rank. A completion counts with its maximum length; others "
        "wait. At least one always runs.",
        65_536,
        formerly="max_tokens_per_device",
        within=AT_LEAST_1,
        unread=(when.ONLY_EMBEDDED,),
    )
    python: str | None = key(
        "Python interpreter, or folder of the environment, of separate engines; null: the one that `weft engine "
        "install vllm` created.",
        None,
        unread=(when.ONLY_SERVERS,),
    )
    num_engines: int | None = key(
        "Number of separate engines; prompts are distributed over them. null: 1, or as many as fit on the devices of "
        "colocated trainers.",
        None,
        formerly="engines",
        within=AT_LEAST_1,
        unread=(when.NO_ENGINE_PROCESSES, when.DEVICES_ARE_NAMED, when.ENGINES_JOIN),
    )
    tp: int = key(
        "Accelerators per engine, for the engine's tensor parallelism.",
        1,
        within=AT_LEAST_1,
        unread=(when.ONLY_SERVERS,),
    )
    gpu_memory_utilization: float | None = key(
        "Share of an accelerator's memory that an engine may use for weights and KV cache; on CPU: GiB of KV cache, "
        "an integer. null: the engine's default, on CPU 1.",
        None,
        formerly="memory",
        within=POSITIVE,
        unread=(when.ONLY_SERVERS,),
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = key(
        "Dtype of weights and activations of separate engines; `auto`: the trainer's compute dtype.",
        "auto",
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    engine_kwargs: dict[str, Any] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Further arguments of the engine's server, as in {max_num_seqs: 512, enable_prefix_caching: false}. The "
        "server refuses unknown ones when it starts.",
        default_factory=dict,
        formerly="options",
        unread=(when.ONLY_SERVERS,),
    )
    timeout: float = key(
        "Seconds in which an engine must respond, and finish at least one of its running completions. Otherwise weft "
        "treats it as hanging. A server may need longer to start: rollout.start_timeout.",
        600.0,
        within=POSITIVE,
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    start_timeout: float = key(
        "Seconds in which a server (vllm, sglang) must start: read the model, compile, capture graphs. Otherwise weft "
        "treats it as hanging.",
        1800.0,
        within=POSITIVE,
        unread=(when.ONLY_SERVERS,),
    )
    restarts: int = key(
        "Number of times that weft replaces each engine that dies, hangs, raises, or returns an invalid completion "
        "within rollout.restart_window. One more failure ends the run, and so does a request on which more engines "
        "have failed. The new engine receives the current weights, and requests are repeated with their seeds "
        "(docs/reference/rollout-engines.md). 0: any failure ends the run.",
        3,
        within=NOT_NEGATIVE,
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    restart_window: float = key(
        "Seconds in which rollout.restarts counts failures.",
        3600.0,
        within=POSITIVE,
        unread=(when.NO_ENGINE_PROCESSES, when.NO_RESTARTS),
    )

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def count(self) -> int:
        """The number of engines in separate processes, after cluster.placement is resolved."""
        return self.num_engines or 1


@with_former_names
@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Placement of trainers and rollout engines."""

    address: str | None = key(
        "Ray cluster to join, as in 10.0.0.1:6379 or `auto`; null: weft starts Ray on this machine.", None
    )
    trainer_ranks: int | None = key(
        "Trainer ranks; null: one per accelerator of the cluster, otherwise --nproc, otherwise 1.",
        None,
        formerly="trainer",
        within=RANKS,
        unread=(when.DEVICES_ARE_NAMED,),
    )
    devices: dict[str, int | tuple[int, ...] | str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Devices of each role, as in {trainer: 0-15, rollout: 0-15, reference: 0-7}. The roles are trainer, rollout, "
        "reference, critic, teacher and reward_model. A value is a list of numbers, ranges (`0-3, 8-11`), another "
        "role, or a number of devices that no role has yet. Roles on the same devices alternate. Sets "
        "cluster.trainer_ranks, cluster.placement, rollout.num_engines and the ranks of these roles "
        "(docs/reference/rollout-engines.md); {}: these keys apply.",
        default_factory=dict,
    )
    placement: Literal["auto", "colocated", "disaggregated"] = key(
        "`colocated`: separate engines share the trainers' devices and alternate with them; `disaggregated`: they "
        "have other devices. `auto`: if both are possible in a long run, weft times a few rollout steps of each at "
        "the start and uses the faster one (docs/reference/rollout-engines.md).",
        "auto",
        unread=(when.IN_TRAINER_RANKS, when.DEVICES_ARE_NAMED, when.ENGINES_JOIN),
    )
    engines: dict[str, int] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Minimum and maximum number of separate engines, as in {min: 2, max: 8}, instead of rollout.num_engines. The "
        "run starts with `min`. Others join when the Ray cluster has room, receive the current weights, and may "
        "leave; other engines repeat the requests of an engine that leaves, with the same seeds "
        "(docs/reference/rollout-engines.md). {}: rollout.num_engines applies.",
        default_factory=dict,
        within=ENGINE_COUNTS,
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    offload_during_rollout: tuple[Literal["parameters", "optimizer", "gradients"], ...] | None = key(
        "Parts of the trainers (policy, and other models on their ranks) that move to host memory while engines on "
        "their devices generate; null: all three on accelerators, and none on CPU, where both are host memory.",
        None,
        formerly="sleep",
        unread=(when.DISAGGREGATED,),
    )
    cpu_backend: str = key(
        "Backend for CPU tensors between trainer ranks: gloo, or mpi, ucc or a plugin's backend if this torch has it. "
        "Tensors on accelerators always use NCCL.",
        "gloo",
    )
    frozen_restarts: int = key(
        "Number of times within an hour that weft restarts the ranks of each frozen model (reference.ranks, "
        "reward_model.ranks) if one of them is killed or hangs. They load the model again, and weft repeats the call. "
        "One more failure ends the run. 0: any failure ends the run.",
        3,
        within=NOT_NEGATIVE,
        unread=(when.NO_FROZEN_RANKS,),
    )
    max_staleness: int = key(
        "Maximum age of a sample, in versions of the weights, when the policy trains on it; generation runs this far "
        "ahead of training. 0: generation and training alternate. Needs a separate engine (rollout.engine).",
        0,
        within=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The reference of rl.kl_coef and rl.measure_kl: a separate engine without training."""

    path: str | None = key(
        "A HuggingFace model directory or hub id; null: the policy's model.path. With lora that is the base under the "
        "adapters, which needs no second copy.",
        None,
    )
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = key(
        "Dtype of its weights and compute; null: fsdp.param_dtype.", None
    )
    ranks: int | None = key(
        "Separate ranks, each with its own device; null: it alternates with the policy on the trainer's ranks.",
        None,
        within=AT_LEAST_1,
        unread=(when.devices_of("reference"),),
    )
    dp_replicate: int | None = key(
        "Replicas of its sharded weights; null: mesh.dp_replicate, or 1 with reference.ranks.", None, within=AXIS
    )
    dp_shard: int | None = key(
        "Ranks over which its weights are sharded; null: mesh.dp_shard, or all with reference.ranks.", None, within=AXIS
    )
    tp: int | None = key(
        "Ranks that split each of its layers; null: mesh.tp, or 1 with reference.ranks.", None, within=AT_LEAST_1
    )
    pp: int | None = key(
        "Pipeline stages of its layers; null: mesh.pp, or 1 with reference.ranks.", None, within=AT_LEAST_1
    )
    cpu_offload: bool | None = key("Keep its weights in host memory; null: fsdp.cpu_offload.", None)
    max_tokens_per_device: int | None = key(
        "Tokens of one of its forwards on one rank; null: step.max_tokens_per_device. It stores no activations, so "
        "more tokens fit.",
        None,
        within=TWO_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """The reward models of rl.reward (model:PATH): a separate engine without training for each."""

    ranks: int | None = key(
        "Separate ranks for each reward model, each with its own device; null: the models alternate with the policy "
        "on the trainer's ranks.",
        None,
        within=AT_LEAST_1,
        unread=(when.devices_of("reward_model"),),
    )
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = key(
        "Dtype of its weights and compute; null: fsdp.param_dtype.", None
    )
    dp_replicate: int | None = key(
        "Replicas of its sharded weights; null: mesh.dp_replicate, or 1 with reward_model.ranks.", None, within=AXIS
    )
    dp_shard: int | None = key(
        "Ranks over which its weights are sharded; null: mesh.dp_shard, or all with reward_model.ranks.",
        None,
        within=AXIS,
    )
    tp: int | None = key(
        "Ranks that split each of its layers; null: mesh.tp, or 1 with reward_model.ranks.", None, within=AT_LEAST_1
    )
    pp: int | None = key(
        "Pipeline stages of its layers; null: mesh.pp, or 1 with reward_model.ranks.",
        None,
        within=AT_LEAST_1,
    )
    cpu_offload: bool | None = key("Keep its weights in host memory; null: fsdp.cpu_offload.", None)
    max_tokens_per_device: int | None = key(
        "Tokens of one of its forwards on one rank; null: step.max_tokens_per_device. On the trainer's ranks, this "
        "times mesh.cp is the longest conversation in the reward model's tokens.",
        None,
        within=TWO_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of rl.advantage=gae: a separate engine that trains."""

    path: str | None = key(
        "Its initial model: a model, whose head is replaced by one that gives one number per token, or a classifier "
        "with one label (a reward model), whose head is kept; null: model.path.",
        None,
    )
    head: Literal["zeros", "normal"] = key(
        "Initialisation of a new head: `zeros`, so that all values are 0 at first, or `normal`, drawn with train.seed.",
        "zeros",
    )
    lr: float = key(
        "Peak learning rate; all other settings are those of `optimizer` and `schedule`.", 1.0e-5, within=POSITIVE
    )
    clip: float | None = key(
        "Distance from a value before the rollout step's first update beyond which the value has no gradient; null: "
        "no clipping.",
        0.2,
        within=Range(lambda v: v > 0, "above 0, or null for no clipping"),
    )
    ranks: int | None = key(
        "Separate ranks, each with its own device, on which the critic trains in parallel with the policy; null: it "
        "alternates with the policy on the trainer's ranks.",
        None,
        within=AT_LEAST_1,
        unread=(when.devices_of("critic"),),
    )
    dp_replicate: int | None = key(
        "Replicas of its sharded weights; null: mesh.dp_replicate, or 1 with critic.ranks.", None, within=AXIS
    )
    dp_shard: int | None = key(
        "Ranks over which it is sharded; null: mesh.dp_shard, or all with critic.ranks.", None, within=AXIS
    )
    tp: int | None = key(
        "Ranks that split each of its layers; null: mesh.tp, or 1 with critic.ranks.", None, within=AT_LEAST_1
    )
    pp: int | None = key(
        "Pipeline stages of its layers; null: mesh.pp, or 1 with critic.ranks.", None, within=AT_LEAST_1
    )
    cpu_offload: bool | None = key(
        "Keep its parameters, gradients and optimizer state in host memory; null: fsdp.cpu_offload.", None
    )
    max_tokens_per_device: int | None = key(
        "Tokens of one of its forwards on one rank; null: step.max_tokens_per_device.", None, within=TWO_TOKENS
    )


@dataclass(frozen=True, kw_only=True)
class RlScheduleConfig(ScheduleConfig):
    """As in `weft sft`, with another default."""

    name: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd"] = key(
        "Shape of the learning rate after warm-up.", "constant"
    )


@dataclass(frozen=True, kw_only=True)
class RlEvalConfig:
    """Held-out prompts, whose answers are rewarded but not trained."""

    path: str | None = key("Held-out prompts, in the forms of data.path, with the columns of data.columns.", None)
    sources: tuple[SourceConfig, ...] | None = key(
        "Several sets of held-out prompts, instead of eval.path, each with a name; each is evaluated separately.", None
    )
    every: int = key(
        "Rollout steps between evaluations; 0: only after the last.",
        0,
        within=NOT_NEGATIVE,
        unread=(when.NO_HELD_OUT_PROMPTS,),
    )
    at_start: bool = key("Also evaluate before the first step.", False, unread=(when.NO_HELD_OUT_PROMPTS,))
    samples: int = key(
        "Answers to sample for each held-out prompt in addition to the greedy one, to estimate pass@k; 0: none.",
        0,
        within=NOT_NEGATIVE,
        unread=(when.NO_HELD_OUT_PROMPTS,),
    )
    pass_at: tuple[int, ...] | None = key(
        "k of pass@k (Chen et al. 2021); null: 1, 2, 4, ... up to eval.samples, which is one of them.",
        None,
        within=Range(lambda v: len(v) > 0 and all(k >= 1 for k in v), "numbers of answers, 1 or more, or null"),
        unread=(when.NO_HELD_OUT_PROMPTS, when.GREEDY),
    )
    temperature: float = key(
        "Temperature of these samples (eval.samples).",
        1.0,
        within=Range(lambda v: v > 0, "above 0 (weft always adds one greedy answer)"),
        unread=(when.NO_HELD_OUT_PROMPTS, when.GREEDY),
    )
    top_p: float = key(
        "These samples use the most likely tokens with this total probability; 1: all.",
        1.0,
        within=UP_TO_1,
        unread=(when.NO_HELD_OUT_PROMPTS, when.GREEDY),
    )
    top_k: int = key(
        "These samples use this many most likely tokens; 0: all.",
        0,
        within=NOT_NEGATIVE,
        unread=(when.NO_HELD_OUT_PROMPTS, when.GREEDY),
    )
    max_new_tokens: int | None = key(
        "Maximum length of an answer in tokens; null: rollout.max_new_tokens.",
        None,
        within=AT_LEAST_1,
        unread=(when.NO_HELD_OUT_PROMPTS,),
    )
    correct_from: float = key(
        "Value from which an answer counts as correct, for the first reward function that returns one.",
        1.0,
        unread=(when.NO_HELD_OUT_PROMPTS,),
    )


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """The config of `weft rl`, one field per section."""

    command: ClassVar[str] = "rl"

    model: ModelConfig
    data: DataConfig
    rl: RlAlgorithm
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig, metadata={"unread": (when.NO_REFERENCE,)})
    critic: CriticConfig = field(default_factory=CriticConfig, metadata={"unread": (when.NO_CRITIC,)})
    reward_model: RewardModelConfig = field(
        default_factory=RewardModelConfig, metadata={"unread": (when.NO_REWARD_MODEL,)}
    )
    teacher: TeacherConfig = field(default_factory=TeacherConfig, metadata={"unread": (when.NO_TEACHER,)})
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optimizer: PolicyOptimizerConfig = field(default_factory=PolicyOptimizerConfig)
    schedule: RlScheduleConfig = field(default_factory=RlScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: RlEvalConfig = field(default_factory=RlEvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    run: RunConfig = field(default_factory=RunConfig)


BUILT_IN_REWARDS = ("math", "exact_match", "regex", "format", "length")
NEEDS_MATH_VERIFY = f"rl.reward: math needs math-verify: {how_to_install('math-verify>=0.8', 'rl')}"


def reward_models(paths: Sequence[str]) -> dict[str, str]:
    """Role -> path of each reward model in rl.reward."""
    models = [path.removeprefix(REWARD_MODEL) for path in paths if path.startswith(REWARD_MODEL)]
    return {"reward_model" if not n else f"reward_model_{n + 1}": path for n, path in enumerate(models)}


def reward_names(paths: Sequence[str]) -> list[str]:
    """The names of rl.reward in metrics and other keys: the function's name, or the whole path if two paths have the
    same name. The first model is `reward_model`, the second `reward_model_2`."""
    roles = iter(reward_models(paths))
    short = [next(roles) if path.startswith(REWARD_MODEL) else re.split(r"[.:]", path)[-1] for path in paths]
    return [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]
