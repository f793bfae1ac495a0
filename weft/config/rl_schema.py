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
    AlgorithmName = Literal[tuple({**ALGORITHMS, **UNUSABLE})]  # the config says why a name cannot be used


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@with_former_names
@dataclass(frozen=True, kw_only=True)
class RlAlgorithm:
    """The algorithm, its rewards and its loss."""

    reward: tuple[str, ...] = key(
        "Reward functions: names of built-in ones (math, exact_match, regex, format, length), import paths, as in "
        "[my_rewards:is_right] (docs/how-to/write-a-reward.md), or reward models, as in [model:runs/rm/checkpoints/"
        "latest] (docs/how-to/reward-models.md).",
        (),
    )
    reward_weights: tuple[float, ...] | None = key(
        "What each of rl.reward is multiplied by in the sum, in their order; null: 1 for each.",
        None,
        unread=(when.NO_REWARD,),
    )
    reward_column: str | None = key(
        "Column that names, for each row, which of rl.reward are asked (a name, or a list of names); null: all.",
        None,
        unread=(when.NO_REWARD,),
    )
    reward_options: dict[str, bool | int | float | str | tuple[str, ...]] = key(  # noqa: RUF009 - dataclasses.field()
        "Arguments of reward functions by name, as in {regex.pattern: '#### (\\\\d+)', math.boxed: true}.",
        default_factory=dict,
        unread=(when.NO_REWARD,),
    )
    reward_timeout: float = key(
        "Seconds that one call of a reward function, with the samples of one prompt, may take. Its process is ended "
        "then, and each sample tried alone.",
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
        "Environment that answers the policy, by its import path, as in examples.calculator_env:Calculator; a game of "
        "Gymnasium's API (gymnasium:FrozenLake-v1, gymnasium:my_games:Maze), or a server of OpenEnv "
        "(openenv:http://localhost:8000); null: the policy answers once. docs/how-to/environments.md",
        None,
    )
    agent: str | None = key(
        "Agent that asks the policy over HTTP, in place of an environment: the import path of a function, as in "
        "my_agents:solve; a command, as in 'python solve.py'; or an environment of the package verifiers "
        "(verifiers:my-env, verifiers:env.toml). weft serves it an endpoint like OpenAI's, and runs it once for each "
        "sample; null: none. docs/how-to/agents.md",
        None,
    )
    agent_timeout: float = key(
        "Seconds that one run of rl.agent may take. Its process is ended then, and the sample is not trained.",
        600.0,
        within=POSITIVE,
        unread=(when.NO_AGENT,),
    )
    agents_at_once: int = key(
        "Runs of rl.agent at the same time; others wait.", 64, within=PROCESSES, unread=(when.NO_AGENT,)
    )
    agent_host: str = key(
        "Address that the endpoint of rl.agent listens on. Any other than 127.0.0.1 lets programs of other machines "
        "try their API keys.",
        "127.0.0.1",
        unread=(when.NO_AGENT,),
    )
    agent_port: int = key(
        "Port of that endpoint; 0: any free one.",
        0,
        within=Range(lambda v: 0 <= v < 65_536, "0 to 65,535"),
        unread=(when.NO_AGENT,),
    )
    max_turns: int = key(
        "How often the policy may answer in one conversation with rl.environment, or in one run of rl.agent.",
        8,
        within=AT_LEAST_1,
        unread=(when.ONE_TURN,),
    )
    environment_timeout: float = key(
        "Seconds that one step of rl.environment may take.", 60.0, within=POSITIVE, unread=(when.NO_ENVIRONMENT,)
    )
    algorithm: AlgorithmName = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Sets those of the keys below that nobody has set, as the algorithm's paper has them "
        "(docs/reference/algorithms.md).",
        "grpo",
    )
    preset: Literal["trl", "verl", "roll", "miles", "slime", "openrlhf", "nemo-rl"] | None = key(
        "Sets those of the keys below that nobody has set as this trainer has them by default for rl.algorithm, where "
        "it differs from the paper (docs/reference/algorithms.md); null: the paper's.",
        None,
        formerly="like",
    )
    prompts_per_step: int = key("Prompts of a rollout step.", 64, formerly="prompts", within=AT_LEAST_1)
    group_size: int = key("Samples of each prompt, whose rewards are compared.", 8, within=AT_LEAST_1)
    minibatches: int = key(
        "Optimizer steps that a rollout step's groups are dealt to.", 1, formerly="updates", within=AT_LEAST_1
    )
    chat: bool = key(
        "A `prompt` that is a text is what a user says, and goes through the chat template; false: it is continued as "
        "it stands.",
        False,
    )
    instruction: str | None = key(
        "Text put behind every prompt, on a line of its own, as in `Put the answer in \\boxed{}.`", None
    )
    epochs: int = key("How often a rollout step's samples are trained.", 1, within=AT_LEAST_1)
    advantage: str = key(
        f"How a reward becomes the advantages of its sample's tokens: {_listed(ADVANTAGES)} "
        "(docs/reference/algorithms.md has the formulas), or a function of your own, as in my_rl:advantage.",
        "grpo",
    )
    advantage_norm: Literal["group", "batch", "none"] = key(
        "What advantages are divided by: the standard deviation of the `group`'s rewards, that of the whole step's "
        "(`batch`; with `gae` that of the advantages, whose mean is taken off, too), or `none`.",
        "group",
        formerly="scale",
    )
    gamma: float = key("What a reward is worth one token earlier.", 1.0, within=UP_TO_1)
    gae_lambda: float = key("1: advantages from rewards alone; less: more from the critic's values.", 1.0, within=SHARE)
    policy_loss: str = key(
        f"The loss of a token: {_listed(TOKEN_LOSSES)} (docs/reference/algorithms.md has the formulas), or a function "
        "of your own, as in my_rl:loss.",
        "ppo",
    )
    clip: tuple[float, float] = key(
        "How far below and above 1 the ratio of current and old policy may move before its gradient is cut.",
        (0.2, 0.2),
        within=Range(lambda v: 0 < v[0] <= 1 and v[1] > 0, "two numbers above 0, the first at most 1"),
    )
    dual_clip: float | None = key(
        "Where the advantage is negative, no token's loss is more than so many times that; null: unbounded.",
        None,
        within=Range(lambda v: v > 1, "above 1, or null"),
    )
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = key(
        "How an optimizer step's loss is made of those of its tokens: `token_mean`: their mean; `sequence_mean`: the "
        "mean of each sample, then of the samples; `sequence_sum`: the sum of each sample / rollout.max_new_tokens, "
        "then the mean of the samples.",
        "sequence_mean",
        formerly="aggregation",
    )
    kl_coef: float = key(
        "Weight of the KL divergence from the reference, the model as it was at first; 0: none.",
        0.0,
        formerly="kl",
        within=NOT_NEGATIVE,
    )
    measure_kl: bool = key(
        "Measure the KL divergence from the reference (metric `kl`) where rl.kl_coef is 0, too; nothing is trained on "
        "it.",
        False,
        unread=(when.KL_IS_TRAINED,),
    )
    kl_in: Literal["loss", "reward"] = key(
        "Whether it is part of the loss, or taken off each token's reward.", "loss", unread=(when.NO_KL,)
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "Of each token's KL, d being log(policy / reference): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. In the loss "
        "k2 has the gradient of the KL, and k3 that of the reverse one; all have the KL's with rl.kl_unbiased.",
        "k3",
        unread=(when.NO_KL,),
    )
    kl_clamp: float | None = key(
        "Each token's estimate is no further from 0 than this; null: unbounded. verl, SkyRL, NeMo RL and ROLL have 10.",
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
        "Weight of the entropy of the policy, which is taken off the loss.",
        0.0,
        formerly="entropy",
        within=NOT_NEGATIVE,
    )
    entropy_aggregation: Literal["token_mean", "sequence_mean"] | None = key(
        "How that entropy is made of its tokens'; null: as the loss is, rl.loss_aggregation.",
        None,
        unread=(when.NO_ENTROPY,),
    )
    teacher: str | None = key(
        "Distil this model into the policy, on the policy's own samples: a HuggingFace model directory or hub id with "
        "the same tokenizer; null: none. With it rl.reward may be empty (docs/how-to/distill.md).",
        None,
    )
    teacher_in: Literal["loss", "advantage"] = key(
        "`loss`: rl.teacher_divergence of both distributions over the whole vocabulary, at each sampled token's "
        "position, is part of the loss (GKD); `advantage`: log(teacher / policy) of each sampled token is added to its "
        "advantage, whose expected gradient is that of the reverse KL, taken off.",
        "loss",
        unread=(when.NO_TEACHER,),
    )
    teacher_coef: float = key(
        "Weight of the teacher's part beside rewards.", 1.0, within=POSITIVE, unread=(when.NO_TEACHER,)
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
        "Where logprobs of the old policy come from: `recompute` reads them with the trainer, in one more forward, or "
        "without it where a rollout step is one optimizer step (rl.minibatches x rl.epochs = 1); `rollout` takes those "
        "of the engine, so that ratios correct its mismatch, too.",
        "recompute",
    )
    on_policy: Literal["measured", "exact"] = key(
        "Whether samples come from the very policy that is trained. `measured`: engine and trainer round differently; "
        "the difference is a metric, and corrected (rl.correction). `exact`: each logprob that the embedded engine "
        "records is, to the last bit, the trainer's own (fp32, CPU); proven at start, required of every sample. "
        "docs/explanation/exact.md",
        "measured",
    )
    correction: Literal["none", "tis", "mis", "icepop"] = key(
        "What the loss of a token is multiplied by, to correct that the engine is not exactly the trainer: the ratio "
        "of old and rollout policy, cut at rl.correction_limits (`tis`), or 0 outside of them (`mis`: only above; "
        "`icepop`: above and below).",
        "tis",
        unread=(when.ROLLOUT_LOGPROBS, when.EXACT),
    )
    correction_level: Literal["token", "sequence", "geometric"] = key(
        "Whether that is the ratio of each `token`, of the whole sample (`sequence`: their product), or their "
        "`geometric` mean.",
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
        "Groups whose rewards are all equal teach nothing: they are replaced by those of other prompts, in so many "
        "rounds at most. 0: they stay.",
        0,
        within=NOT_NEGATIVE,
    )
    mask_truncated: bool = key(
        "Do not train samples that ended at their longest; their rewards still count in the means of their groups.",
        False,
    )
    count_masked: bool = key(
        "Count samples that rl.mask_truncated leaves out in the number that sequence_mean and sequence_sum divide by, "
        "as samples without a loss (TRL).",
        False,
        unread=(when.NONE_MASKED, when.COUNTS_TOKENS),
    )
    overlong_buffer: int | None = key(
        "Tokens before rollout.max_new_tokens in which the reward of a sample falls, from 0 by up to "
        "rl.overlong_penalty (DAPO, equation 13); null: it does not.",
        None,
        within=AT_LEAST_1,
    )
    overlong_penalty: float = key(
        "What a sample of the greatest length loses.", 1.0, within=POSITIVE, unread=(when.NO_OVERLONG_BUFFER,)
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
    """The rollout engine, and how it samples."""

    engine: str = key(
        "`embedded`: a copy of the model in the trainer's own ranks, taking turns with training. `hf`: the same "
        "generation in processes of its own. `vllm`, `sglang`: servers in processes and environments of their own. "
        "Or the name of an engine of an installed package (docs/how-to/extend.md; docs/reference/rollout-engines.md).",
        "embedded",
    )
    max_prompt_tokens: int = key(
        "Longest prompt in tokens; data.long_documents says what happens to others.", 1024, within=AT_LEAST_1
    )
    max_new_tokens: int = key("Longest completion in tokens.", 1024, within=AT_LEAST_1)
    temperature: float = key(
        "Logits are divided by it, in sampling and in training alike.",
        1.0,
        within=Range(lambda v: v > 0, "above 0 (greedy samples of a group would all be one)"),
    )
    top_p: float = key(
        "Likeliest tokens that are drawn from, by their probability together; 1: all.", 1.0, within=UP_TO_1
    )
    top_k: int = key("Likeliest tokens that are drawn from, by number; 0: all.", 0, within=NOT_NEGATIVE)
    min_p: float = key(
        "Tokens less likely than this share of the likeliest are not drawn; 0: all may be.", 0.0, within=BELOW_1
    )
    allow_truncated: bool = key(
        "Train on samples of a server whose rollout.top_p, top_k or min_p leave tokens out, though it does not say how "
        "much of the distribution it kept: logprobs are then of the kept tokens, which biases the correction by that "
        "share (metric `sampling/kept_share`, docs/reference/algorithms.md).",
        False,
        unread=(when.ONLY_SERVERS, when.KEEPS_ALL_TOKENS),
    )
    oversample: int = key(
        "Groups that are started beyond those that a rollout step needs. The first that are complete are trained, the "
        "others are stopped and dropped (metrics `rollout/stopped_groups`, `rollout/dropped_samples`): long answers "
        "are trained less often than short ones. 0: all are waited for.",
        0,
        within=NOT_NEGATIVE,
    )
    stop: tuple[str, ...] = key("Texts that end a completion, beside the model's end tokens.", ())
    on_weight_update: Literal["continue", "drop"] = key(
        "What becomes of completions that are being written when weights change (cluster.max_staleness): `continue`: "
        "they go on under the new weights, each token with the version that drew it; `drop`: they begin again, with "
        "the same seeds.",
        "continue",
        formerly="unfinished",
        unread=(when.NOTHING_UNFINISHED,),
    )
    transport: Literal["auto", "ipc", "shared", "group", "files"] = key(
        "How weights get to engines of their own: memory of the CUDA device that they share with a trainer rank "
        "(`ipc`), `shared` memory of their host, a process `group` (NCCL, or gloo on CPU), or `files` in RUN/sync, on "
        "a file system that all see; `auto`: the first of these that serves, but no files "
        "(docs/explanation/weight-sync.md).",
        "auto",
        unread=(when.NO_ENGINE_PROCESSES, when.READS_A_FOLDER),
    )
    sync: Literal["full", "delta", "auto"] = key(
        "What a sync sends to engines that have the last one's weights: all tensors (`full`), or only elements whose "
        "bytes have changed, each with its position (`delta`: 6 bytes for one of bf16, and a copy of the weights in "
        "the sending rank's memory, and in each vLLM worker's). `auto`: `delta` through a process group on CPU, `full` "
        "otherwise (docs/explanation/weight-sync.md).",
        "full",
        unread=(when.NO_DELTAS,),
    )
    bucket_mb: int = key(
        "Megabytes of weights that are on their way to the engines at once, which is the memory that a sync takes. A "
        "tensor that is larger than a quarter of it goes alone.",
        192,
        within=AT_LEAST_1,
        unread=(when.NO_ENGINE_PROCESSES, when.READS_A_FOLDER),
    )
    verify_every: int = key(
        "Syncs from one whose tensors are compared by checksum, where they arrived and where the engine keeps them, to "
        "the next; 0: only the first of each engine. Names, shapes, dtypes and versions are checked in each.",
        20,
        within=NOT_NEGATIVE,
        unread=(when.NO_ENGINE_PROCESSES, when.READS_A_FOLDER),
    )
    kv_cache_tokens: int = key(
        "Tokens that the embedded engine remembers at once on each rank (its KV cache), where a completion counts as "
        "long as it may become; others wait. One always runs.",
        65_536,
        formerly="max_tokens_per_device",
        within=AT_LEAST_1,
        unread=(when.ONLY_EMBEDDED,),
    )
    python: str | None = key(
        "Python program, or folder of the environment, that engines of their own run with; null: the one that "
        "`weft engine install vllm` made.",
        None,
        unread=(when.ONLY_SERVERS,),
    )
    num_engines: int | None = key(
        "Engines of their own; prompts are spread over them. null: 1, or as many as the devices of colocated trainers "
        "take.",
        None,
        formerly="engines",
        within=AT_LEAST_1,
        unread=(when.NO_ENGINE_PROCESSES, when.DEVICES_ARE_NAMED, when.ENGINES_JOIN),
    )
    tp: int = key(
        "Accelerators of each of them: tensor parallelism, as the engine does it.",
        1,
        within=AT_LEAST_1,
        unread=(when.ONLY_SERVERS,),
    )
    gpu_memory_utilization: float | None = key(
        "Share of an accelerator's memory that an engine may take for weights and KV cache; on CPU: whole GiB of KV "
        "cache. null: as the engine does by itself, on CPU 1.",
        None,
        formerly="memory",
        within=POSITIVE,
        unread=(when.ONLY_SERVERS,),
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = key(
        "Weights and activations of engines of their own; `auto`: the trainer's compute dtype.",
        "auto",
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    engine_kwargs: dict[str, Any] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Further arguments of the engine's server, as in {max_num_seqs: 512, enable_prefix_caching: false}; what it "
        "does not know it refuses when it starts.",
        default_factory=dict,
        formerly="options",
        unread=(when.ONLY_SERVERS,),
    )
    timeout: float = key(
        "Seconds in which an engine has to start, to obey, and to finish at least one of the completions that it is "
        "working on; one that does not counts as hanging.",
        600.0,
        within=POSITIVE,
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    restarts: int = key(
        "How often each engine that dies, hangs, raises, or answers what is no completion is replaced within "
        "rollout.restart_window; one failure more ends the run, as does a request with which more engines have failed. "
        "The new engine gets the current weights, and requests are redone with their seeds "
        "(docs/reference/rollout-engines.md). 0: any failure ends the run.",
        3,
        within=NOT_NEGATIVE,
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    restart_window: float = key(
        "Seconds within which rollout.restarts counts.",
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
        """The number of engines with processes of their own, once cluster.placement is settled."""
        return self.num_engines or 1


@with_former_names
@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where trainers and rollout engines run."""

    address: str | None = key(
        "Ray cluster to join, as in 10.0.0.1:6379 or `auto`; null: one of its own on this machine.", None
    )
    trainer_ranks: int | None = key(
        "Trainer ranks; null: one per accelerator of the cluster, else --nproc, else 1.",
        None,
        formerly="trainer",
        within=RANKS,
        unread=(when.DEVICES_ARE_NAMED,),
    )
    devices: dict[str, int | tuple[int, ...] | str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Devices of each role, as in {trainer: 0-15, rollout: 0-15, reference: 0-7}: of trainer, rollout, reference, "
        "critic, teacher and reward_model, a list of numbers, ranges (`0-3, 8-11`), another role, or a number of "
        "devices that no role has yet. Roles on the same devices take turns. Sets cluster.trainer_ranks, "
        "cluster.placement, rollout.num_engines and the ranks of these roles (docs/reference/rollout-engines.md); {}: "
        "those keys say it.",
        default_factory=dict,
    )
    placement: Literal["auto", "colocated", "disaggregated"] = key(
        "`colocated`: engines of their own have the trainers' devices, and they take turns; `disaggregated`: they have "
        "others. `auto`: in long runs where both are possible, a few rollout steps of each are timed at first, and the "
        "faster is taken (docs/reference/rollout-engines.md).",
        "auto",
        unread=(when.IN_TRAINER_RANKS, when.DEVICES_ARE_NAMED, when.ENGINES_JOIN),
    )
    engines: dict[str, int] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "How many engines of their own there may be, as in {min: 2, max: 8}, in place of rollout.num_engines: the run "
        "starts with `min`. Others join when the Ray cluster has room for them, get the current weights, and may "
        "leave; requests of those that leave are redone with their seeds (docs/reference/rollout-engines.md). {}: as "
        "many as rollout.num_engines says.",
        default_factory=dict,
        within=ENGINE_COUNTS,
        unread=(when.NO_ENGINE_PROCESSES,),
    )
    offload_during_rollout: tuple[Literal["parameters", "optimizer", "gradients"], ...] | None = key(
        "What of the trainers (policy, and models beside it in their ranks) waits in the host's memory while engines "
        "on their devices generate; null: all three on accelerators, nothing on CPU, where it would be copied from "
        "memory to memory.",
        None,
        formerly="sleep",
        unread=(when.DISAGGREGATED,),
    )
    cpu_backend: str = key(
        "What carries tensors on the CPU between ranks of the trainers: gloo, or mpi, ucc or a plugin's backend where "
        "this torch has them. Tensors on accelerators always go by NCCL.",
        "gloo",
    )
    frozen_restarts: int = key(
        "How often the ranks of each model that is only read (reference.ranks, reward_model.ranks) are started anew "
        "within an hour, if one of them is killed or hangs. They load the model again, and what they were asked is "
        "asked again; one failure more ends the run. 0: any failure ends the run.",
        3,
        within=NOT_NEGATIVE,
        unread=(when.NO_FROZEN_RANKS,),
    )
    max_staleness: int = key(
        "How many versions of the weights a sample may be older than the policy that trains on it: rollouts are made "
        "so far ahead, while training goes on. 0: they take turns. Needs an engine of its own (rollout.engine).",
        0,
        within=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The model that rl.kl_coef and rl.measure_kl measure the policy against: an engine of its own, which only
    reads."""

    path: str | None = key(
        "A HuggingFace model directory or hub id; null: the policy as model.path has it. With lora that is the base "
        "under the adapters, which needs no second copy.",
        None,
    )
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = key(
        "Dtype that it is kept and computed in; null: fsdp.param_dtype.", None
    )
    ranks: int | None = key(
        "Ranks of its own, each with a device that nobody else has; null: the trainer's ranks, which take turns.",
        None,
        within=AT_LEAST_1,
        unread=(when.devices_of("reference"),),
    )
    dp_replicate: int | None = key(
        "Copies of its sharded weights; null: mesh.dp_replicate, or 1 with reference.ranks.", None, within=AXIS
    )
    dp_shard: int | None = key(
        "Ranks over which its weights are sharded; null: mesh.dp_shard, or all with reference.ranks.", None, within=AXIS
    )
    tp: int | None = key(
        "Ranks that divide each of its layers; null: mesh.tp, or 1 with reference.ranks.", None, within=AT_LEAST_1
    )
    pp: int | None = key(
        "Stages of its layers, as mesh.pp has them; null: mesh.pp, or 1 with reference.ranks.", None, within=AT_LEAST_1
    )
    cpu_offload: bool | None = key("Keep its weights in the host's memory; null: fsdp.cpu_offload.", None)
    max_tokens_per_device: int | None = key(
        "Tokens of one of its forwards on one rank; null: step.max_tokens_per_device. It keeps no activations, so that "
        "more fit.",
        None,
        within=TWO_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """The reward models that rl.reward names as model:PATH: an engine of its own for each, which only reads."""

    ranks: int | None = key(
        "Ranks of each reward model, each with a device that nobody else has; null: the trainer's ranks, which take "
        "turns.",
        None,
        within=AT_LEAST_1,
        unread=(when.devices_of("reward_model"),),
    )
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = key(
        "Dtype that it is kept and computed in; null: fsdp.param_dtype.", None
    )
    dp_replicate: int | None = key(
        "Copies of its sharded weights; null: mesh.dp_replicate, or 1 with reward_model.ranks.", None, within=AXIS
    )
    dp_shard: int | None = key(
        "Ranks over which its weights are sharded; null: mesh.dp_shard, or all with reward_model.ranks.",
        None,
        within=AXIS,
    )
    tp: int | None = key(
        "Ranks that divide each of its layers; null: mesh.tp, or 1 with reward_model.ranks.", None, within=AT_LEAST_1
    )
    pp: int | None = key(
        "Stages of its layers, as mesh.pp has them; null: mesh.pp, or 1 with reward_model.ranks.",
        None,
        within=AT_LEAST_1,
    )
    cpu_offload: bool | None = key("Keep its weights in the host's memory; null: fsdp.cpu_offload.", None)
    max_tokens_per_device: int | None = key(
        "Tokens of one of its forwards on one rank, and, times mesh.cp on the trainer's ranks, the longest "
        "conversation in its own tokens; null: step.max_tokens_per_device.",
        None,
        within=TWO_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of rl.advantage=gae: an engine of its own beside the policy's, which trains."""

    path: str | None = key(
        "What it is made from: a model, whose head is replaced by one that gives one number per token, or a "
        "classifier with one label (a reward model), whose head is kept; null: model.path.",
        None,
    )
    head: Literal["zeros", "normal"] = key(
        "What a new head begins with: `zeros`, so that all values are 0 at first, or `normal`, drawn from train.seed.",
        "zeros",
    )
    lr: float = key("Peak learning rate; all else is as `optimizer` and `schedule` say.", 1.0e-5, within=POSITIVE)
    clip: float | None = key(
        "How far a value may move from what it was before a rollout step's first update, until its gradient is cut; "
        "null: never.",
        0.2,
        within=Range(lambda v: v > 0, "above 0, or null for no clipping"),
    )
    ranks: int | None = key(
        "Ranks of its own, each with a device that nobody else has: it then trains while the policy does; null: the "
        "trainer's ranks, which take turns.",
        None,
        within=AT_LEAST_1,
        unread=(when.devices_of("critic"),),
    )
    dp_replicate: int | None = key(
        "Copies of its sharded weights; null: mesh.dp_replicate, or 1 with critic.ranks.", None, within=AXIS
    )
    dp_shard: int | None = key(
        "Ranks over which it is sharded; null: mesh.dp_shard, or all with critic.ranks.", None, within=AXIS
    )
    tp: int | None = key(
        "Ranks that divide each of its layers; null: mesh.tp, or 1 with critic.ranks.", None, within=AT_LEAST_1
    )
    pp: int | None = key(
        "Stages of its layers, as mesh.pp has them; null: mesh.pp, or 1 with critic.ranks.", None, within=AT_LEAST_1
    )
    cpu_offload: bool | None = key(
        "Keep its parameters, gradients and optimizer state in the host's memory; null: fsdp.cpu_offload.", None
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
    """Held-out prompts, whose answers are rewarded and not trained."""

    path: str | None = key("Held-out prompts: data like data.path's, with the columns that data.columns says.", None)
    sources: tuple[SourceConfig, ...] | None = key(
        "Several sets of held-out prompts in place of eval.path, each with a name; evaluated apart.", None
    )
    every: int = key(
        "Rollout steps between evaluations; 0: only after the last.",
        0,
        within=NOT_NEGATIVE,
        unread=(when.NO_HELD_OUT_PROMPTS,),
    )
    at_start: bool = key("Evaluate before the first step, too.", False, unread=(when.NO_HELD_OUT_PROMPTS,))
    samples: int = key(
        "Answers drawn for each held-out prompt beside the greedy one, from which pass@k is estimated; 0: none.",
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
        "Temperature of the answers that eval.samples draws.",
        1.0,
        within=Range(lambda v: v > 0, "above 0 (one greedy answer is always asked for)"),
        unread=(when.NO_HELD_OUT_PROMPTS, when.GREEDY),
    )
    top_p: float = key(
        "Likeliest tokens that those are drawn from, by their probability together; 1: all.",
        1.0,
        within=UP_TO_1,
        unread=(when.NO_HELD_OUT_PROMPTS, when.GREEDY),
    )
    top_k: int = key(
        "Likeliest tokens that those are drawn from, by number; 0: all.",
        0,
        within=NOT_NEGATIVE,
        unread=(when.NO_HELD_OUT_PROMPTS, when.GREEDY),
    )
    max_new_tokens: int | None = key(
        "Longest answer in tokens; null: rollout.max_new_tokens.",
        None,
        within=AT_LEAST_1,
        unread=(when.NO_HELD_OUT_PROMPTS,),
    )
    correct_from: float = key(
        "Value of the first reward function that has one, from which an answer counts as correct.",
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
    """The names of rl.reward in metrics and other keys: the function's name, or the whole path if two share it; the
    first model is `reward_model`, the second `reward_model_2`."""
    roles = iter(reward_models(paths))
    short = [next(roles) if path.startswith(REWARD_MODEL) else re.split(r"[.:]", path)[-1] for path in paths]
    return [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]
