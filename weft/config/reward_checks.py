"""Checks of a config of `weft reward` that need neither torch nor a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.checks import EXCLUSIVE, Inert, Rules, adapter_presets, inert_rules, training_combinations
from weft.config.reward_schema import RewardConfig

_NO_TEXT = "a reward model gives scores, and no text"
_INERT = (
    *inert_rules(RewardConfig),
    Inert("train.loss", lambda c: True, "reward.loss says what is trained"),
    Inert("eval.target", lambda c: True, "a reward model has no eval/exact"),
    Inert("eval.prompts", lambda c: True, _NO_TEXT),
    Inert("data.train_on", lambda c: True, "scores are of whole conversations"),
)


def _combinations(config: Any) -> Iterator[tuple[str, str]]:
    """(key, message) of values that do not go together."""
    paired = config.reward.loss == "bradley_terry"
    if paired and config.lora.dropout:
        yield (
            "lora.dropout",
            "lora.dropout: a pair whose answers lie on two ranks is compared by a forward without dropout, so that its "
            "gradient would be another than its loss's. Set lora.dropout=0.",
        )
    if paired and config.train.neftune_noise_alpha is not None:
        yield (
            "train.neftune_noise_alpha",
            "train.neftune_noise_alpha: both answers of a pair would get other noise. Set it to null.",
        )
    if config.reward.loss == "process" and not config.reward.step_separator:
        yield (
            "reward.step_separator",
            "reward.step_separator is empty, so that no token ends a step: set it to a text, such as '\\n'.",
        )
    yield from training_combinations(config)


REWARD = Rules(EXCLUSIVE, _INERT, _combinations, lambda value: adapter_presets(value, "reward"))
