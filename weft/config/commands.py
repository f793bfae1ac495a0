"""The commands that train, each with the schema of its config and the section that only it has. Imports no torch.

A new command is one entry here, and one in `weft/cli.py:RECIPES`: options,
dry run, `weft.NAME(...)`, `weft plan`, `verify`, `init`, `keys` and the page of keys follow.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig

SCHEMAS: dict[str, type[SftConfig] | type[RlConfig]] = {
    "sft": SftConfig, "dpo": DpoConfig, "reward": RewardConfig, "distill": DistillConfig, "rl": RlConfig,
}  # fmt: skip
# Section -> the command that a config with this section belongs to; without any of them it belongs to `weft sft`.
MARKS = {"preference": "dpo", "reward": "reward", "distill": "distill", "rl": "rl"}


def command_of(sections: Collection[str]) -> str:
    """The command of a config with these sections."""
    return next((command for section, command in MARKS.items() if section in sections), "sft")


def schema_of(sections: Collection[str]) -> type[SftConfig] | type[RlConfig]:
    """The schema of a config with these sections."""
    return SCHEMAS[command_of(sections)]


def job_lines(command: str) -> list[str]:
    """Which command a config is of, and why, for commands that take the configs of all; nothing for weft sft."""
    return [f"job      weft {command}: the config has a section {mark}" for mark in MARKS if MARKS[mark] == command]
