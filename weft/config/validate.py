"""Validation of a typed config by the rules in checks.py or rl_checks.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.checks import SFT, Rules, show_value
from weft.config.distill_checks import DISTILL
from weft.config.distill_schema import DistillConfig
from weft.config.dpo_checks import DPO
from weft.config.dpo_schema import DpoConfig
from weft.config.keys import get, schema_keys
from weft.config.reward_checks import REWARD
from weft.config.reward_schema import RewardConfig
from weft.config.rl_checks import RULES as RL
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig

_RULES: dict[type, Rules] = {
    SftConfig: SFT, DpoConfig: DPO, RewardConfig: REWARD, DistillConfig: DISTILL, RlConfig: RL,
}  # fmt: skip
_LARGEST = 2**31 - 1
_OF_ANY_SIZE = ("train.seed", "data.max_row_bytes")  # the latter has a separate limit


def check_config(config: Any, explicit: Mapping[str, str] | None = None) -> list[str]:
    """The problems of a typed config, as messages. explicit: key -> its position in a file, for keys the user set."""
    location, rules = explicit or {}, rules_of(type(config))
    problems = _out_of_range(config, location)
    problems += _exclusive(config, location, rules)
    reported = {key for key, partner in rules.exclusive if key in location and partner in location}
    problems += [
        f"{location[rule.key]}: {rule.key} would have no effect: {rule.because}. Remove it, or set it to null."
        for rule in rules.inert
        if rule.key in location and rule.key not in reported and rule.when(config)
    ]
    return problems + [_prefix(location, key) + text for key, text in rules.combinations(config)]


def rules_of(schema: type) -> Rules:
    """The rules for configs of this type."""
    return _RULES[schema]


def inert_keys(config: Any) -> set[str]:
    """Keys that have no effect in this config."""
    return {rule.key for rule in rules_of(type(config)).inert if rule.when(config)}


def _out_of_range(config: Any, location: Mapping[str, str]) -> list[str]:
    problems = []
    for name, key in schema_keys(type(config)).items():
        value = get(config, name)
        if key.within is not None and value is not None and not key.within.holds(value):
            problems.append(
                f"{_prefix(location, name)}{name} is {show_value(value)}; it must be {key.within.words} "
                f"(default: {show_value(key.default)})."
            )
    return problems or list(_beyond_all(config, location))


def _beyond_all(config: Any, location: Mapping[str, str]) -> Iterator[str]:
    """Problems of numbers that are too large for libraries: counts, sizes and timeouts."""
    for name in schema_keys(type(config)):
        value = get(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        kinds = (int, float) if name.endswith("timeout") else (int,)
        if name not in _OF_ANY_SIZE and any(type(number) in kinds and number > _LARGEST for number in numbers):
            yield f"{_prefix(location, name)}{name} is {show_value(value)}; it must be at most {_LARGEST}."


def _exclusive(config: Any, location: Mapping[str, str], rules: Rules) -> list[str]:
    problems = []
    for key, partner in rules.exclusive:
        if key in location and partner in location:
            problems.append(
                f"{key} ({location[key]}) and {partner} ({location[partner]}) are both set: "
                f"{partner} replaces {key}; set one of them to null."
            )
            continue
        nullable = type(None) in getattr(schema_keys(type(config))[key].type, "__args__", ())
        if nullable and (get(config, key) is None) == (get(config, partner) is None):
            state = "are both null" if get(config, key) is None else "are both set"
            problems.append(f"{key} and {partner} {state}: set exactly one of them, and the other to null.")
    return problems


def _prefix(location: Mapping[str, str], name: str) -> str:
    return f"{location[name]}: " if name in location else ""
