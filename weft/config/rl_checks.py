"""Checks of a config of `weft rl`, beside those that it shares with `weft sft`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.checks import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    Inert,
    Rules,
    Test,
    common_combinations,
    held_out_problems,
)
from weft.config.checks import (
    EXCLUSIVE as SFT_EXCLUSIVE,
)
from weft.config.checks import (
    INERT as SFT_INERT,
)
from weft.config.checks import (
    RANGES as SFT_RANGES,
)
from weft.config.rl_schema import RlConfig

_DRAWN = "the policy's own completions are trained"
_LIMITS = "rollout.max_prompt_tokens and rollout.max_new_tokens say how long a sample may be"


_NO_PROMPTS = "neither eval.path nor eval.sources is set: nothing is evaluated"


def _held_out(config: RlConfig) -> bool:
    return config.eval.path is not None or config.eval.sources is not None


def _always(_: Any) -> bool:
    return True


EXCLUSIVE = tuple(pair for pair in SFT_EXCLUSIVE if pair[0] != "step.documents")

# Sections that RL reads otherwise than SFT; what the others share stays.
_OWN = ("eval.", "profile.", "checkpoint.keep_best")

INERT = (
    *(rule for rule in SFT_INERT if not rule.key.startswith(_OWN)),
    *(
        Inert(f"step.{leaf}", _always, "a rollout step has rl.prompts x rl.group_size documents, which rl.updates cuts")
        for leaf in ("documents", "tokens")
    ),
    Inert("data.train_on", _always, _DRAWN),
    Inert("data.max_length", _always, _LIMITS),
    Inert("data.workers", _always, "prompts are tokenised as they are read"),
    Inert("data.cache", _always, "prompts are tokenised as they are read"),
    Inert("eval.every", lambda c: not _held_out(c), _NO_PROMPTS),
    Inert("eval.at_start", lambda c: not _held_out(c), _NO_PROMPTS),
    Inert("train.objective", _always, "rl.algorithm says what is trained"),
)

RANGES: dict[str, tuple[Test, str]] = {
    **{name: rule for name, rule in SFT_RANGES.items() if not name.startswith(_OWN)},
    "rl.prompts": AT_LEAST_1,
    "rl.group_size": AT_LEAST_1,
    "rl.updates": AT_LEAST_1,
    "rl.epochs": AT_LEAST_1,
    "rl.clip": (lambda v: 0 < v[0] <= 1 and v[1] > 0, "two numbers above 0, the first at most 1"),
    "rollout.max_prompt_tokens": AT_LEAST_1,
    "rollout.max_new_tokens": AT_LEAST_1,
    "rollout.temperature": (lambda v: v > 0, "above 0 (greedy samples of a group would all be one)"),
    "cluster.trainer": AT_LEAST_1,
    "eval.every": NOT_NEGATIVE,
}


def _combinations(config: RlConfig) -> Iterator[tuple[str, str]]:
    if not config.rl.reward:
        yield "rl.reward", "rl.reward is empty: name at least one reward function."
    longest, row = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens, config.step.max_tokens_per_device
    if longest > row:
        yield (
            "step.max_tokens_per_device",
            f"a sample may have rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} tokens, but a row holds "
            f"step.max_tokens_per_device = {row} and samples are never cut over rows: set "
            f"step.max_tokens_per_device={longest}, or let samples be shorter.",
        )
    if config.rl.prompts % config.rl.updates:
        yield (
            "rl.updates",
            f"rl.updates is {config.rl.updates}, which does not divide rl.prompts = {config.rl.prompts}: groups are "
            "dealt to the optimizer steps whole, and equally.",
        )
    if config.data.long_documents == "truncate":
        yield (
            "data.long_documents",
            "data.long_documents is truncate, but a prompt without its end asks something else: set it to error, or to "
            "drop, which leaves out prompts of more than rollout.max_prompt_tokens.",
        )
    yield from common_combinations(config, free_columns=True)
    yield from held_out_problems(config.eval, free_columns=True)


RULES = Rules(EXCLUSIVE, INERT, RANGES, _combinations)
