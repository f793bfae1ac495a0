"""Checks of a config of `weft rl`, in addition to the checks that it shares with `weft sft` (checks.py)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields
from functools import partial
from typing import Any

from weft.config.checks import EXCLUSIVE as SFT_EXCLUSIVE
from weft.config.checks import (
    IMPORT_PATH,
    Inert,
    Rules,
    adapter_presets,
    common_combinations,
    held_out_problems,
    inert_rules,
    pipeline_combinations,
)
from weft.config.conditions import ENGINES, ENVIRONMENT_SCHEMES, KEEPS_ALL, REWARD_MODEL, SERVERS, VERIFIERS
from weft.config.devices import device_presets, device_problem
from weft.config.presets import LIKE
from weft.config.ranges import MOST_DOCUMENTS
from weft.config.rl_schema import (
    BUILT_IN_REWARDS,
    ReferenceConfig,
    RlAlgorithm,
    RlConfig,
    RlEvalConfig,
    RolloutConfig,
    reward_names,
)
from weft.config.yaml12 import override
from weft.errors import UserError
from weft.plugins import GROUPS, plugin, plugins
from weft.rl.algorithms import ADVANTAGES, ALGORITHMS, TOKEN_LOSSES, UNUSABLE
from weft.rl.algorithms.base import AdvantageSpec, TokenLossSpec


def _reads_base(config: RlConfig) -> bool:
    """Whether the reference is the policy without its adapters."""
    return config.lora.on and config.reference.path is None and not config.lora.modules_to_save


def _always(_: Any) -> bool:
    return True


def _unread_keys(leaf: str, specs: Mapping[str, AdvantageSpec | TokenLossSpec]) -> Iterator[Inert]:
    """A rule for each key that only some values of rl.`leaf` read. A user's function may read every key."""
    for read in dict.fromkeys(name for spec in specs.values() for name in spec.reads):
        readers = [name for name, spec in specs.items() if read in spec.reads]
        non_readers = specs.keys() - set(readers)
        *first, last = readers
        reason = f"only rl.{leaf}={', '.join(first)}{' and ' * bool(first)}{last} read{'' if first else 's'} it"
        yield Inert(f"rl.{read}", partial(_has_value, leaf, non_readers), reason)


def _has_value(leaf: str, values: Set[str], config: Any) -> bool:
    return getattr(config.rl, leaf) in values


EXCLUSIVE = tuple(pair for pair in SFT_EXCLUSIVE if pair[0] != "step.documents")

# Rules of `weft rl` for keys that it shares with `weft sft`. Other rules are at their keys and sections.
INERT = (
    *(rule for rule in inert_rules(RlConfig) if rule.key != "checkpoint.keep_best"),
    *(
        Inert(
            f"step.{leaf}",
            _always,
            "a rollout step has rl.prompts_per_step x rl.group_size documents, which rl.minibatches splits",
        )
        for leaf in ("documents", "tokens")
    ),
    Inert("data.train_on", _always, "the policy's completions are trained"),
    Inert(
        "data.max_length", _always, "rollout.max_prompt_tokens and rollout.max_new_tokens limit the length of a sample"
    ),
    Inert("data.workers", _always, "weft rl tokenises prompts while it reads them"),
    Inert("data.cache", _always, "weft rl tokenises prompts while it reads them"),
    Inert("train.loss", _always, "rl.algorithm defines the loss"),
    Inert(
        "train.neftune_noise_alpha",
        _always,
        "logprobs of samples come from the model that sampled them, without noise",
    ),
    Inert("model.attention", lambda c: c.rl.on_policy == "exact", "rl.on_policy=exact uses its own kernel"),
    *_unread_keys("advantage", ADVANTAGES),
    *_unread_keys("policy_loss", TOKEN_LOSSES),
    *(
        Inert(
            f"reference.{spec.name}", _reads_base, "the reference is the base under the adapters, not a separate engine"
        )
        for spec in fields(ReferenceConfig)
        if spec.name != "path"
    ),
)


# Arguments of an engine's server that weft sets -> what to do instead.
_CHOSEN = "weft chooses the server's address"
_DRAWS = "the section `rollout` has the sampling parameters"
_ADAPTERS = "set lora.rank instead"
_LENGTHS = "set rollout.max_prompt_tokens and rollout.max_new_tokens instead"
_SERVER_OPTIONS = {
    **dict.fromkeys(("uds", "host", "port"), _CHOSEN),
    **dict.fromkeys(("model", "model_path"), "set model.path instead"),
    "dtype": "set rollout.dtype instead",
    **dict.fromkeys(("seed", "random_seed"), "set train.seed instead"),
    **dict.fromkeys(("tensor_parallel_size", "tp_size", "tp"), "set rollout.tp instead"),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "set rollout.gpu_memory_utilization instead"),
    **dict.fromkeys(("max_model_len", "context_length"), _LENGTHS),
    "logprobs_mode": "weft needs logprobs of the distribution from which tokens are sampled",
    "generation_config": _DRAWS,
    "worker_extension_cls": "weft's extension receives the weights",
    **dict.fromkeys(("enable_lora", "max_lora_rank"), _ADAPTERS),
}
_COLDEST = 0.01  # vLLM raises lower temperatures to this one


def _server_combinations(rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination of values that weft refuses."""
    for name in rollout.engine_kwargs:
        instead = _SERVER_OPTIONS.get(name.replace("-", "_"))
        if instead is not None:
            yield "rollout.engine_kwargs", f"rollout.engine_kwargs contains `{name}`, which weft sets: {instead}."
    is_plugin, problem = _plugin_of("rollout.engine", rollout.engine, ENGINES)
    if problem or not (is_plugin or rollout.engine in ENGINES):
        names = [*ENGINES, *(entry.name for entry in plugins(GROUPS["rollout.engine"]))]
        close = difflib.get_close_matches(rollout.engine, names, 1)
        yield (
            "rollout.engine",
            problem
            or f"rollout.engine is {rollout.engine}: it must be one of {', '.join(names)}."
            + (f" Did you mean {close[0]}?" if close else ""),
        )
    if rollout.engine == "sglang" and rollout.python is None:
        yield (
            "rollout.python",
            "rollout.python is not set, and weft does not install SGLang. Set rollout.python to the interpreter, or to "
            "the folder of the environment, in which SGLang is installed.",
        )
    for name, neutral in KEEPS_ALL.items():
        value = getattr(rollout, name)
        if rollout.engine in SERVERS and value != neutral and not rollout.allow_truncated:
            yield (
                f"rollout.{name}",
                f"rollout.{name} is {value:g}, but {rollout.engine} does not report the kept share of the "
                f"distribution, so samples would not come from the trained policy: set rollout.{name}={neutral} "
                f"(evaluation has separate keys, eval.top_p and eval.top_k), or rollout.engine=embedded or hf, which "
                f"report it; or accept the bias, which weft measures: rollout.allow_truncated=true.",
            )
    if rollout.engine == "vllm" and 0 < rollout.temperature < _COLDEST:
        yield (
            "rollout.temperature",
            f"rollout.temperature is {rollout.temperature:g}, which vLLM would raise to {_COLDEST}: set {_COLDEST} or "
            f"more.",
        )


def _combinations(config: RlConfig) -> Iterator[tuple[str, str]]:
    if problem := device_problem(config):
        yield "cluster.devices", problem
        return  # device_problem reports this config
    yield from _server_combinations(config.rollout)
    if config.cluster.max_staleness and config.rollout.engine == "embedded":
        yield (
            "cluster.max_staleness",
            f"cluster.max_staleness is {config.cluster.max_staleness}, but the embedded engine alternates with "
            f"training: set rollout.engine=hf or vllm, or cluster.max_staleness=0.",
        )
    elif config.cluster.max_staleness and config.cluster.placement == "colocated":
        yield (
            "cluster.max_staleness",
            f"cluster.max_staleness is {config.cluster.max_staleness}, but with cluster.placement=colocated engines "
            "alternate with training: set cluster.max_staleness=0, or cluster.placement=disaggregated.",
        )
    if config.rollout.oversample and config.rl.agent is not None:
        yield (
            "rollout.oversample",
            f"rollout.oversample is {config.rollout.oversample}, but weft cannot stop a run of rl.agent: set "
            "rollout.oversample=0.",
        )
    if config.cluster.engines and config.cluster.devices:
        yield (
            "cluster.engines",
            "cluster.engines and cluster.devices are both set, but engines that join use devices outside all lists: "
            "remove one of the two keys.",
        )
    if config.cluster.engines and config.rollout.restarts == 0:
        yield (
            "cluster.engines",
            "cluster.engines lets engines leave, but with rollout.restarts=0 each leaving engine ends the run: set "
            "rollout.restarts=1 or more.",
        )
    if config.rollout.sync == "delta":
        yield from _delta_combinations(config)
    yield from _reward_combinations(config.rl)
    yield from _eval_combinations(config.eval)
    yield from _algorithm_combinations(config.rl, config.rollout.max_new_tokens)
    yield from _agent_combinations(config.rl)
    yield from _exact_combinations(config)
    yield from _truncated_combinations(config)
    yield from _teacher_combinations(config)
    for section in ("reference", "critic", "teacher", "reward_model"):
        role = getattr(config, section)
        if (role.pp or 1) > 1 and (
            config.mesh.pp == 1 or role.ranks is not None
        ):  # otherwise it has the policy's stages
            yield from pipeline_combinations(config, f"{section}.pp", role.pp)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    for section in ("step", "reference", "critic", "teacher"):
        row = getattr(config, section).max_tokens_per_device
        cp = config.mesh.cp if getattr(getattr(config, section), "ranks", None) is None else 1
        if row is not None and longest > row * cp:
            name = f"{section}.max_tokens_per_device"
            over = f" on each of {cp} ranks of mesh.cp" if cp > 1 else ""
            yield (
                name,
                f"a sample may have rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} tokens, but a row "
                f"has at most {name} = {row}{over}: set {name}={-(-longest // cp)}, a larger mesh.cp, or smaller "
                f"limits of rollout.",
            )
    if config.rl.minibatches > 0 and config.rl.prompts_per_step % config.rl.minibatches:
        yield (
            "rl.minibatches",
            f"rl.minibatches is {config.rl.minibatches}, which does not divide rl.prompts_per_step = "
            f"{config.rl.prompts_per_step}: each optimizer step needs the same number of complete groups.",
        )
    if config.data.long_documents == "truncate":
        yield (
            "data.long_documents",
            "data.long_documents is truncate, but a truncated prompt is another task: set it to error, or to drop, "
            "which omits prompts of more than rollout.max_prompt_tokens.",
        )
    if config.model.dcp_weights is not None and config.rollout.engine == "sglang":
        yield (
            "model.dcp_weights",
            "model.dcp_weights cannot be combined with rollout.engine=sglang, which loads the weights at model.path: "
            "set rollout.engine=vllm, or write a HuggingFace directory, weft export "
            f"{config.model.dcp_weights} --model {config.model.path}, and set model.path to this directory.",
        )
    if config.model.imports and config.rollout.engine in SERVERS:
        yield (
            "model.imports",
            f"model.imports cannot be combined with rollout.engine={config.rollout.engine}, which supports only its "
            f"own architectures: set rollout.engine=embedded or hf.",
        )
    yield from common_combinations(config, free_columns=True)


def _delta_combinations(config: RlConfig) -> Iterator[tuple[str, str]]:
    reasons = {
        "with lora weft sends only adapters": config.lora.on,
        f"rollout.transport={config.rollout.transport} does not use host memory, in which weft compares versions": (
            config.rollout.transport in ("files", "ipc")
        ),
        "with cluster.placement=colocated engines free their weights while trainers train": (
            config.cluster.placement == "colocated"
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            yield "rollout.sync", f"rollout.sync is delta, but {reason}: set rollout.sync=full."


def _teacher_combinations(config: RlConfig) -> Iterator[tuple[str, str]]:
    """rl.teacher compares complete distributions, and truncated sampling does not sample from the complete one."""
    if config.rl.teacher is None:
        return
    for name, neutral in KEEPS_ALL.items():
        if getattr(config.rollout, name) != neutral:
            yield (
                f"rollout.{name}",
                f"rollout.{name} is {getattr(config.rollout, name)}, which excludes tokens, but rl.teacher compares "
                f"distributions over the complete vocabulary: set rollout.{name}={neutral}.",
            )
    if config.rl.dynamic_sampling and not (config.rl.reward or config.rl.environment or config.rl.agent):
        yield (
            "rl.dynamic_sampling",
            f"rl.dynamic_sampling is {config.rl.dynamic_sampling}, but without rl.reward all rewards of a group are "
            "equal, so weft would replace every group: set rl.dynamic_sampling=0.",
        )
    if config.rl.teacher_in == "advantage" and config.rl.old_logprobs == "rollout":
        yield (
            "rl.teacher_in",
            "rl.teacher_in is advantage, which subtracts the trainer's logprobs, but rl.old_logprobs=rollout uses the "
            "engine's: set rl.old_logprobs=recompute.",
        )
    if config.rl.teacher_in == "advantage" and config.rl.advantage not in ADVANTAGES:
        return
    if config.rl.teacher_in == "advantage" and ADVANTAGES[config.rl.advantage].needs_critic:
        yield (
            "rl.teacher_in",
            f"rl.teacher_in is advantage, but rl.advantage={config.rl.advantage} has a critic, which does not learn "
            f"the teacher's term: set rl.teacher_in=loss, or rl.advantage=grpo.",
        )


def _exact_combinations(config: RlConfig) -> Iterator[tuple[str, str]]:
    if config.rl.on_policy != "exact":
        return
    if config.rl.old_logprobs == "rollout":
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but with rl.old_logprobs=rollout the trainer computes no logprobs to compare with "
            "the engine's: set rl.old_logprobs=recompute.",
        )
    if config.cluster.max_staleness:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but with cluster.max_staleness samples come from older weights: set "
            "cluster.max_staleness=0.",
        )
    if config.rollout.oversample:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but with rollout.oversample the trained groups depend on how fast they are "
            "sampled: set rollout.oversample=0.",
        )
    if config.rollout.truncated:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but rollout.top_p, top_k or min_p exclude tokens, which the trainer includes: "
            "set rollout.top_p=1, rollout.top_k=0 and rollout.min_p=0.",
        )
    if config.model.compile is True:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but with model.compile the compiler chooses the order of additions: set "
            "model.compile=false.",
        )
    if config.model.fused_norms is True:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but model.fused_norms changes how the trainer computes, and not all engines "
            "follow: set model.fused_norms=auto.",
        )
    if config.model.transforms:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but model.transforms changes how the trainer computes, and engines do not follow: "
            "set 'model.transforms=[]'.",
        )
    if config.mesh.cp > 1:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but mesh.cp splits documents, and engines do not: set mesh.cp=1.",
        )
    if config.mesh.ep > 1:
        yield (
            "rl.on_policy",
            "rl.on_policy is exact, but with mesh.ep an expert computes tokens of several ranks together, and an "
            "engine has other tokens while it samples: set mesh.ep=1.",
        )
    for section in ("mesh", "reference", "critic"):
        tp = getattr(config, section).tp or 1
        if tp > 1:
            yield (
                "rl.on_policy",
                f"rl.on_policy is exact, but with {section}.tp = {tp} the sums of a layer are added from {tp} ranks, "
                f"and an engine computes them in one sum: set {section}.tp=1.",
            )


def _truncated_combinations(config: RlConfig) -> Iterator[tuple[str, str]]:
    """vLLM normalises logprobs over the kept tokens: each exceeds the trainer's by -log of the kept share."""
    if config.rollout.engine != "vllm" or not (config.rollout.truncated and config.rollout.allow_truncated):
        return
    if config.rl.corrects and config.rl.correction_level == "sequence":
        yield (
            "rl.correction_level",
            "rl.correction_level is sequence, but vLLM's logprobs of truncated sampling omit the kept share, and the "
            "product of the ratios of a long sample vanishes: set rl.correction_level=token, or geometric.",
        )
    if config.rl.old_logprobs == "rollout":
        yield (
            "rl.old_logprobs",
            "rl.old_logprobs is rollout, but vLLM normalises logprobs of truncated sampling over the kept tokens, and "
            "the trainer over all tokens: ratios would never be 1, and no metric would show it. Set "
            "rl.old_logprobs=recompute.",
        )


def _reward_combinations(rl: RlAlgorithm) -> Iterator[tuple[str, str]]:
    if not (rl.reward or rl.environment or rl.agent or rl.teacher):
        yield (
            "rl.reward",
            f"rl.reward is empty: set at least one reward function, as in {override('rl.reward', ['math'])} "
            "(docs/how-to/write-a-reward.md), or an rl.environment or rl.agent that returns rewards, or an rl.teacher.",
        )
    for path in rl.reward:
        if path.startswith(REWARD_MODEL):
            if any(character.isspace() for character in path) or path == REWARD_MODEL:
                yield (
                    "rl.reward",
                    f"rl.reward contains {path!r}: write model:PATH, where PATH is a folder or hub id.",
                )
            continue
        is_plugin, problem = _plugin_of("rl.reward", path, BUILT_IN_REWARDS)
        if problem:
            yield "rl.reward", problem
        elif path not in BUILT_IN_REWARDS and not is_plugin and not IMPORT_PATH.fullmatch(path):
            names = [*BUILT_IN_REWARDS, *(entry.name for entry in plugins(GROUPS["rl.reward"]))]
            close = difflib.get_close_matches(path, names, 1)
            yield (
                "rl.reward",
                f"rl.reward contains {path}, which is not one of {', '.join(names)}, nor an import path, as in "
                "my_rewards:is_right for the function is_right in my_rewards.py, nor model:PATH for a reward model."
                + (f" Did you mean {close[0]}?" if close else ""),
            )
    if repeated := [path for path in dict.fromkeys(rl.reward) if rl.reward.count(path) > 1]:
        yield "rl.reward", f"rl.reward contains {repeated[0]} twice: remove one, and set rl.reward_weights."
    if rl.reward_weights is not None and len(rl.reward_weights) != len(rl.reward):
        yield (
            "rl.reward_weights",
            f"rl.reward_weights has {len(rl.reward_weights)} numbers for {len(rl.reward)} reward functions: write one "
            "for each, in the order of rl.reward.",
        )
    names = reward_names(rl.reward)
    for option in rl.reward_options:
        name, dot, argument = option.rpartition(".")
        if not dot or name not in names or not argument.isidentifier():
            yield (
                "rl.reward_options",
                f"rl.reward_options: {option} is not an argument of a reward function: write NAME.ARGUMENT, where "
                f"NAME is one of {', '.join(names) or 'rl.reward'}.",
            )
    if "regex" in rl.reward and "regex.pattern" not in rl.reward_options:
        yield (
            "rl.reward_options",
            "rl.reward contains regex, whose pattern is not set: set "
            f"{override('rl.reward_options', {'regex.pattern': '#### (.+)'})}.",
        )
    if rl.environment is not None:
        yield from _environment_problems(rl.environment)


def _plugin_of(key: str, name: str, built_in: tuple[str, ...] = ()) -> tuple[bool, str]:
    """(Whether an installed package provides this name for a key, the problem of the name or "")."""
    try:
        return plugin(name, key, built_in) is not None, ""
    except UserError as error:
        return True, str(error)


def _environment_problems(environment: str) -> Iterator[tuple[str, str]]:
    scheme, _, name = environment.partition(":")
    if scheme == VERIFIERS:
        yield (
            "rl.environment",
            f"rl.environment is {environment}: environments of the package verifiers call the policy over HTTP. Remove "
            f"rl.environment, and set rl.agent={environment} (docs/how-to/agents.md).",
        )
        return
    if scheme == "openenv":
        if not re.match(r"https?://[^/\s]", name):
            yield (
                "rl.environment",
                f"rl.environment is {environment}: write the server's address, as in openenv:http://localhost:8000.",
            )
    elif scheme in ENVIRONMENT_SCHEMES and not name.strip():
        yield (
            "rl.environment",
            f"rl.environment is {environment}: write a Gymnasium id or an import path after the colon, as in "
            "gymnasium:FrozenLake-v1 or gymnasium:my_games:Maze.",
        )
    is_plugin, problem = _plugin_of("rl.environment", environment)
    if problem:
        yield "rl.environment", problem
    elif scheme not in ENVIRONMENT_SCHEMES and not is_plugin and not IMPORT_PATH.fullmatch(environment):
        yield (
            "rl.environment",
            f"rl.environment is {environment}, which is not an import path: write package.module:Name, as in "
            "my_envs:Calculator for the class Calculator in my_envs.py.",
        )


def _agent_combinations(rl: RlAlgorithm) -> Iterator[tuple[str, str]]:
    """An episode of an agent may be several documents, with one reward and one advantage."""
    if rl.agent is None:
        return
    if rl.environment is not None:
        yield "rl.agent", "rl.agent and rl.environment are both set, but an agent needs no environment: remove one."
    if not rl.agent.strip():
        yield "rl.agent", "rl.agent is empty: write a function, as in my_agents:solve, or a command; or remove the key."
    if rl.advantage in ADVANTAGES and ADVANTAGES[rl.advantage].per_token:
        yield (
            "rl.advantage",
            f"rl.advantage is {rl.advantage}, which computes an advantage for each token of one sample, but an "
            f"episode of rl.agent may consist of several documents: set rl.advantage to one of "
            f"{', '.join(name for name, spec in ADVANTAGES.items() if not spec.per_token)}.",
        )
    if rl.policy_loss in TOKEN_LOSSES and TOKEN_LOSSES[rl.policy_loss].ratio != "ratio":
        yield (
            "rl.policy_loss",
            f"rl.policy_loss is {rl.policy_loss}, which reads the ratio of a complete sample, but an episode of "
            f"rl.agent may consist of several documents: set rl.policy_loss=ppo.",
        )
    of_samples = {
        "correction_level": (rl.correction_level != "token", "token"),
        "entropy_aggregation": (rl.entropy_aggregation == "sequence_mean", "null"),
        "overlong_buffer": (rl.overlong_buffer is not None, "null"),
        "kl_in": (rl.kl_coef > 0 and rl.kl_in == "reward", "loss"),
    }
    for leaf, (is_of_samples, instead) in of_samples.items():
        if is_of_samples:
            yield (
                f"rl.{leaf}",
                f"rl.{leaf} is {getattr(rl, leaf)}, which is computed from a single sample, but an episode of rl.agent "
                f"may consist of several documents: set rl.{leaf}={instead}.",
            )


def _eval_combinations(evaluation: RlEvalConfig) -> Iterator[tuple[str, str]]:
    yield from held_out_problems(evaluation, free_columns=True)
    largest = max(evaluation.pass_at or (0,))
    if evaluation.samples and largest > evaluation.samples:
        yield (
            "eval.pass_at",
            f"eval.pass_at contains {largest}, but eval.samples draws only {evaluation.samples} answers for each "
            f"prompt: set eval.samples={largest} or more (with twice as many, the estimate is better).",
        )


def _algorithm_combinations(rl: RlAlgorithm, longest: int) -> Iterator[tuple[str, str]]:
    if rl.algorithm in UNUSABLE and rl.algorithm not in ALGORITHMS:
        yield "rl.algorithm", UNUSABLE[rl.algorithm]
    if rl.preset is not None and rl.algorithm not in LIKE[rl.preset]:
        algorithms = ", ".join(LIKE[rl.preset])
        yield (
            "rl.preset",
            f"rl.preset is {rl.preset}, but weft has no defaults of {rl.preset} for {rl.algorithm}: set rl.algorithm "
            f"to one of {algorithms}, or rl.preset=null.",
        )
    for leaf, built_in in (("advantage", ADVANTAGES), ("policy_loss", TOKEN_LOSSES)):
        named = getattr(rl, leaf)
        if named not in built_in and not IMPORT_PATH.fullmatch(named):
            yield (
                f"rl.{leaf}",
                f"rl.{leaf} is {named}: it must be one of {', '.join(built_in)}, or the import path of your function, "
                f"as in my_rl:{leaf}."
                + "".join(f" A name that a package declares is missing: {problem}" for problem in UNUSABLE.values()),
            )
    if rl.prompts_per_step * rl.group_size > MOST_DOCUMENTS:
        yield (
            "rl.prompts_per_step",
            f"rl.prompts_per_step x rl.group_size is {rl.prompts_per_step * rl.group_size:,}; it must be "
            f"{MOST_DOCUMENTS:,} or less.",
        )
    if rl.advantage in ADVANTAGES and ADVANTAGES[rl.advantage].compares_group and rl.group_size < 2:
        yield (
            "rl.group_size",
            f"rl.group_size is {rl.group_size}, but rl.advantage={rl.advantage} compares the samples of a prompt: set "
            "rl.group_size=2 or more, or rl.advantage=reinforce++, which compares the samples of a step.",
        )
    if rl.has_critic and rl.advantage_norm == "group":
        yield (
            "rl.advantage_norm",
            "rl.advantage_norm is group, but rl.advantage=gae compares no groups: set rl.advantage_norm=batch or none.",
        )
    if rl.kl_coef > 0 and rl.kl_in == "loss" and rl.kl_estimator == "k1" and not rl.kl_unbiased:
        yield (
            "rl.kl_estimator",
            "rl.kl_estimator is k1, whose gradient in the loss is zero on average for every policy: set "
            "rl.kl_estimator=k2, whose gradient is that of the KL, or rl.kl_unbiased=true, or rl.kl_in=reward.",
        )
    if rl.correction == "mis" and rl.correction_limits is not None and rl.correction_limits[0] > 0:
        yield (
            "rl.correction_limits",
            f"rl.correction_limits has the lower limit {rl.correction_limits[0]:g}, but rl.correction=mis does not "
            f"change small ratios: set the lower limit to 0, or rl.correction=icepop, which also masks small ratios.",
        )
    if rl.overlong_buffer is not None and rl.overlong_buffer > longest:
        yield (
            "rl.overlong_buffer",
            f"rl.overlong_buffer is {rl.overlong_buffer}, longer than the longest completion: set it to at most "
            f"rollout.max_new_tokens = {longest}.",
        )


def _presets(value: Callable[[str], Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The presets of rl.preset, rl.algorithm and adapters, in order of precedence."""
    algorithm = value("rl.algorithm")
    of_trainer = LIKE.get(value("rl.preset"), {}).get(algorithm, {})
    of_paper = ALGORITHMS[algorithm].preset if algorithm in ALGORITHMS else {}
    for name, preset in (("rl.preset", of_trainer), ("rl.algorithm", of_paper)):
        yield name, {f"rl.{leaf}": default for leaf, default in preset.items()}
    yield "cluster.devices", device_presets(value("cluster.devices"), value("rollout.engine"), value("rollout.tp"))
    engines = value("cluster.engines")
    if isinstance(engines, dict) and isinstance(engines.get("min"), int):  # these engines need separate devices
        yield "cluster.engines", {"rollout.num_engines": engines["min"], "cluster.placement": "disaggregated"}
    yield from adapter_presets(value, "rl")


RULES = Rules(EXCLUSIVE, INERT, _combinations, _presets)
