"""Checks of a config of `weft reward` that need neither torch nor a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.checks import EXCLUSIVE, Inert, Rules, adapter_presets, inert_rules, training_combinations
from weft.config.reward_schema import RewardConfig

_NO_TEXT = "a reward model returns scores, not text"
_INERT = (
    *inert_rules(RewardConfig),
    Inert("train.loss", lambda c: True, "reward.loss defines the loss"),
    Inert("eval.target", lambda c: True, "a reward model has no metric eval/exact"),
    Inert("eval.prompts", lambda c: True, _NO_TEXT),
    Inert("data.train_on", lambda c: True, "a reward model scores complete conversations"),
)


def _combinations(config: Any) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination of values that weft refuses."""
    paired = config.reward.loss == "bradley_terry"
    if paired and config.lora.dropout:
        yield (
            "lora.dropout",
            "lora.dropout: a pair with its answers on two ranks is compared by a forward without dropout, so the "
            "gradient would not be that of the loss. Set lora.dropout=0.",
        )
    if paired and config.train.neftune_noise_alpha is not None:
        yield (
            "train.neftune_noise_alpha",
            "train.neftune_noise_alpha: both answers of a pair would have different noise. Set "
            "train.neftune_noise_alpha=null.",
        )
    if config.reward.loss == "process" and not config.reward.step_separator:
        yield (
            "reward.step_separator",
            "reward.step_separator is empty, so no token ends a step: set it to a text, such as '\\n'.",
        )
    yield from training_combinations(config)


REWARD = Rules(EXCLUSIVE, _INERT, _combinations, lambda value: adapter_presets(value, "reward"))
