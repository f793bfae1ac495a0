"""Conditions under which a key has no effect. Keys name them in the schema: `key("...", 1, unread=(NO_STAGES,))`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from weft.config.sources import may_be_text
from weft.config.urls import uses_stores

BUILT_IN_OPTIMIZERS = ("adafactor", "adamw", "lion", "muon", "sgd")


class Unread(NamedTuple):
    """A key has no effect in configs for which `when` holds. weft refuses it there, and omits it from the resolved
    config. because: the reason, printed at the end of a message."""

    when: Callable[[Any], bool]
    because: str


def only_with(name: str, value: str, note: str = "") -> Unread:
    """weft reads the key only if another key of `weft sft` and `weft rl` has this value."""
    section, _, leaf = name.partition(".")
    return Unread(lambda c: getattr(getattr(c, section), leaf) != value, f"only {name}={value} reads it{note}")


def in_own_process(engine: str) -> bool:
    """Whether each engine is an object in a separate process: `hf`, and engines of packages (weft/plugins.py)."""
    return engine not in ("embedded", *SERVERS)


def devices_of(role: str) -> Unread:
    """weft does not read the key if cluster.devices of `weft rl` names this role."""
    return Unread(lambda c: role in c.cluster.devices, f"cluster.devices names {role}")


def is_held_out(config: Any) -> bool:
    """Whether the config names held-out documents or prompts."""
    share = getattr(config.eval, "share", None)  # of `weft sft`
    return any(value is not None for value in (config.eval.path, config.eval.sources, share))


def has_stages(config: Any) -> bool:
    """Whether any model has pipeline stages. In `weft rl` the reference and the critic may have separate stages."""
    sections = (getattr(config, name, None) for name in ("mesh", "reference", "critic"))
    return any((getattr(section, "pp", None) or 1) > 1 for section in sections)


def _reads_text(config: Any) -> bool:
    sections = (config.data, config.eval)
    paths = [section.path for section in sections if section.path is not None]
    return any(map(may_be_text, [*paths, *(s.path for section in sections for s in section.sources or ())]))


def _has_stateless_optimizer(config: Any) -> bool:
    return bool(config.optimizer.name == "sgd" and config.optimizer.momentum == 0)


NO_STAGES = Unread(lambda c: not has_stages(c), "mesh.pp is 1: there are no stages")
STAGES_BY_SCHEDULE = Unread(
    lambda c: not c.mesh.pp_schedule.startswith("Interleaved"), "mesh.pp_schedule sets the stages per rank"
)
PER_SOURCE = Unread(lambda c: c.data.sources is not None, "data.sources is set: set it for each source")
NO_TEXT_FILE = Unread(lambda c: not _reads_text(c), "no path of the data is a .txt file")
NO_ROUTER_LOSS = Unread(lambda c: c.model.router_aux_loss == "none", "model.router_aux_loss is none")
NO_SAVED_STATE = (
    Unread(lambda c: c.model.dcp_weights is None, "model.dcp_weights is null, so there is no state to load"),
    Unread(lambda c: c.optimizer.name not in ("adamw", "sgd"), "weft can load only the state of adamw and sgd"),
    Unread(_has_stateless_optimizer, "SGD without momentum has no state"),
)
NO_OWN_STATE = (
    Unread(_has_stateless_optimizer, "SGD without momentum has no state"),
    Unread(
        lambda c: c.optimizer.name not in BUILT_IN_OPTIMIZERS,
        "an optimizer with an import path chooses the dtype of its state itself",
    ),
    Unread(lambda c: c.optimizer.name == "muon", "Muon's state has the dtype of the master weights"),
    Unread(lambda c: c.optimizer.name == "adafactor", "Adafactor's state is in fp32"),
)
ONLY_ADAMW = only_with("optimizer.name", "adamw", " (with an import path, set optimizer.options)")
HAS_ADAMW = Unread(
    lambda c: c.optimizer.name not in ("adamw", "muon"),
    "only optimizer.name=adamw and muon read it (with an import path, set optimizer.options)",
)
HAS_BETAS = Unread(
    lambda c: c.optimizer.name not in ("adamw", "lion", "muon"),
    "only optimizer.name=adamw, lion and muon read it (with an import path, set optimizer.options)",
)
ONLY_MUON = only_with("optimizer.name", "muon")
ONLY_SGD = only_with("optimizer.name", "sgd", " (for AdamW set optimizer.betas, with an import path optimizer.options)")
ONLY_IMPORTED = Unread(
    lambda c: c.optimizer.name in BUILT_IN_OPTIMIZERS,
    "only an optimizer with an import path reads them, as in optimizer.name=torch.optim.AdamW",
)
WIDE_MASTERS = Unread(
    lambda c: c.fsdp.master_dtype != "bf16", "only master weights in bf16 (fsdp.master_dtype) are rounded"
)
NO_AVERAGE = Unread(lambda c: c.optimizer.ema_decay is None, "optimizer.ema_decay is null: no average")
WITH_ADAPTERS = Unread(lambda c: c.lora.on, "with lora, only adapters are trained")
NO_ADAPTERS = Unread(lambda c: not c.lora.on, "lora.rank is null, so there are no adapters (lora.rank=16 makes some)")
FROM_ADAPTER = Unread(lambda c: c.lora.path is not None, "the adapter at lora.path defines it")
ONLY_FP16 = Unread(lambda c: c.fsdp.param_dtype != "fp16", "only fsdp.param_dtype=fp16 scales the loss")
CONSTANT_RATE = Unread(lambda c: c.schedule.name == "constant", "schedule.name is constant")
NO_LOWEST_RATE = Unread(lambda c: c.schedule.name == "inverse_sqrt", "schedule.name=inverse_sqrt has no lowest rate")
WARMUP_IN_STEPS = Unread(lambda c: c.schedule.warmup_steps is not None, "schedule.warmup_steps is set")
KEEPS_ALL_CHECKPOINTS = Unread(lambda c: c.checkpoint.keep is None, "checkpoint.keep is null: all are kept")
SAVES_LAST_ONLY = Unread(lambda c: c.checkpoint.every == 0, "checkpoint.every is 0: only the last step is saved")
NO_DOCUMENTS = Unread(
    lambda c: not is_held_out(c), "none of eval.path, eval.sources and eval.share is set: no documents are evaluated"
)
EVALUATES_LAST_ONLY = Unread(lambda c: c.eval.every == 0, "eval.every is 0: only the last step is evaluated")
NOTHING_TO_EVALUATE = Unread(
    lambda c: not is_held_out(c) and c.eval.prompts is None,
    "none of eval.path, eval.sources, eval.share and eval.prompts is set",
)
NO_EXACT_FIGURE = Unread(
    lambda c: c.train.loss is not None, "train.loss replaces the cross entropy, and has no metric eval/exact"
)
NO_PATIENCE = Unread(lambda c: c.eval.patience is None, "eval.patience is not set")
NO_BEST = Unread(
    lambda c: c.eval.patience is None and not c.checkpoint.keep_best,
    "only eval.patience and checkpoint.keep_best read it",
)
NO_PROMPTS = Unread(lambda c: c.eval.prompts is None, "eval.prompts is not set")


def _samples(config: Any) -> bool:
    sampled = getattr(config.eval, "prompts", None) is not None or hasattr(config, "rollout")
    return sampled or getattr(getattr(config, "distill", None), "on_policy", 0) > 0


NOTHING_SAMPLED = Unread(lambda c: not _samples(c), "eval.prompts is not set, so nothing is sampled")
NOTHING_PUSHED = Unread(lambda c: c.checkpoint.push is None, "checkpoint.push is null: nothing is uploaded")
NO_TRACKERS = Unread(lambda c: not c.track.report_to, "track.report_to is empty")
NO_SAMPLES = Unread(lambda c: not c.track.system, "track.system is false")
NO_STORES = Unread(lambda c: not uses_stores(c), "no path of this config is on an object store")
NO_PROFILE = Unread(lambda c: not c.profile.steps, "profile.steps is empty")

# ---------------------------------------------------------------- weft rl

SERVERS = ("vllm", "sglang")  # engines that are servers in separate processes
TAKES_DELTAS = ("hf", "vllm")  # engines that can patch their current weights
ENGINES = ("embedded", "hf", *SERVERS)  # weft's engines; packages may add others, which run like `hf`
REWARD_MODEL = "model:"  # the prefix of a reward model in rl.reward
ENVIRONMENT_SCHEMES = ("gymnasium", "openenv")  # before the colon of an rl.environment that is not an import path
VERIFIERS = "verifiers"  # before the colon of an rl.agent that is an environment of the package verifiers
KEEPS_ALL = {"top_p": 1, "top_k": 0, "min_p": 0}  # key of rollout -> the value with which all tokens can be sampled


def _is_disaggregated(config: Any) -> bool:
    """Whether the config alone determines that engines and trainers share no devices."""
    cluster = config.cluster
    separate = cluster.placement == "disaggregated" or cluster.max_staleness > 0
    return bool(config.rollout.engine != "embedded" and separate)


NO_KL = Unread(lambda c: c.rl.kl_coef == 0, "rl.kl_coef is 0, so the loss has no KL")
KL_IS_TRAINED = Unread(lambda c: c.rl.kl_coef > 0, "rl.kl_coef is above 0, so the KL is always measured")
KL_IN_REWARD = Unread(lambda c: c.rl.kl_in == "reward", "rl.kl_in is reward, which has no gradient")
NO_ENTROPY = Unread(lambda c: c.rl.entropy_coef == 0, "rl.entropy_coef is 0")
ROLLOUT_LOGPROBS = Unread(
    lambda c: c.rl.old_logprobs == "rollout",
    "rl.old_logprobs is rollout, so the ratio of current and old policy also corrects for the engine",
)
NO_CORRECTION = Unread(lambda c: c.rl.correction == "none", "rl.correction is none")
EXACT = Unread(lambda c: c.rl.on_policy == "exact", "rl.on_policy is exact: there is nothing to correct")
NONE_MASKED = Unread(lambda c: not c.rl.mask_truncated, "rl.mask_truncated is false: no sample is masked")
COUNTS_TOKENS = Unread(lambda c: c.rl.loss_aggregation == "token_mean", "rl.loss_aggregation=token_mean counts tokens")
NO_OVERLONG_BUFFER = Unread(lambda c: c.rl.overlong_buffer is None, "rl.overlong_buffer is not set")
NO_REFERENCE = Unread(
    lambda c: not c.rl.has_reference,
    "rl.kl_coef is 0, so there is no reference (rl.measure_kl=true measures the KL from one)",
)
NO_CRITIC = Unread(lambda c: not c.rl.has_critic, "only rl.advantage=gae has a critic")
NO_REWARD_MODEL = Unread(
    lambda c: not any(path.startswith(REWARD_MODEL) for path in c.rl.reward), "rl.reward names no model:PATH"
)
NO_FROZEN_RANKS = Unread(
    lambda c: (
        (c.reference.ranks is None or not c.rl.has_reference)
        and (c.reward_model.ranks is None or not any(path.startswith(REWARD_MODEL) for path in c.rl.reward))
        and c.cluster.devices.get("teacher", "trainer") == "trainer"
    ),
    "no frozen model has separate ranks (reference.ranks, reward_model.ranks, cluster.devices)",
)
NO_TEACHER = Unread(lambda c: c.rl.teacher is None, "rl.teacher is not set")
TEACHER_IN_ADVANTAGE = Unread(lambda c: c.rl.teacher_in == "advantage", "only rl.teacher_in=loss reads it")
NO_TEACHER_JSD = Unread(lambda c: c.rl.teacher_divergence != "jsd", "only rl.teacher_divergence=jsd reads it")
NO_REWARD = Unread(lambda c: not c.rl.reward, "rl.reward is empty")
NO_AGENT = Unread(lambda c: c.rl.agent is None, "rl.agent is not set")
ONE_TURN = Unread(
    lambda c: c.rl.environment is None and c.rl.agent is None, "neither rl.environment nor rl.agent is set"
)
NO_ENVIRONMENT = Unread(lambda c: c.rl.environment is None, "rl.environment is not set")
ONLY_EMBEDDED = only_with("rollout.engine", "embedded", " (other engines read rollout.gpu_memory_utilization)")
ONLY_SERVERS = Unread(lambda c: c.rollout.engine not in SERVERS, "only engines that are servers read it")
ENGINES_JOIN = Unread(lambda c: bool(c.cluster.engines), "cluster.engines sets it")
NO_DELTAS = Unread(
    lambda c: c.rollout.engine not in TAKES_DELTAS,
    "only the engines hf and vllm can patch their weights; weft sends all tensors to other engines",
)
NO_RESTARTS = Unread(lambda c: c.rollout.restarts == 0, "rollout.restarts is 0: no engine is replaced")
KEEPS_ALL_TOKENS = Unread(lambda c: not c.rollout.truncated, "rollout.top_p, top_k and min_p exclude no token")
NO_ENGINE_PROCESSES = Unread(lambda c: c.rollout.engine == "embedded", "rollout.engine=embedded has no processes")
IN_TRAINER_RANKS = Unread(lambda c: c.rollout.engine == "embedded", "rollout.engine=embedded is in the trainers' ranks")
DEVICES_ARE_NAMED = Unread(lambda c: bool(c.cluster.devices), "cluster.devices sets it")
READS_A_FOLDER = Unread(lambda c: c.rollout.engine == "sglang", "SGLang reads weights from a folder")
DISAGGREGATED = Unread(_is_disaggregated, "engines have separate devices, so trainers need not free theirs")
NOTHING_UNFINISHED = Unread(
    lambda c: c.cluster.max_staleness == 0, "cluster.max_staleness is 0, so completions end before weights change"
)
NO_HELD_OUT_PROMPTS = Unread(
    lambda c: not is_held_out(c), "neither eval.path nor eval.sources is set: nothing is evaluated"
)
GREEDY = Unread(lambda c: c.eval.samples == 0, "eval.samples is 0, so answers are greedy")
