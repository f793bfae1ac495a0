"""The commands that train. Each has a schema of its config, and a section that marks it. Imports no torch.

To add a command, add an entry here and one in `weft/cli.py:RECIPES`. Options, dry run, `weft.NAME(...)`, `weft plan`,
`verify`, `init`, `keys` and the page of keys follow from these entries.
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
# Section -> the command of a config with this section. A config without any of them is a config of `weft sft`.
MARKS = {"preference": "dpo", "reward": "reward", "distill": "distill", "rl": "rl"}


def command_of(sections: Collection[str]) -> str:
    """The command of a config with these sections."""
    return next((command for section, command in MARKS.items() if section in sections), "sft")


def schema_of(sections: Collection[str]) -> type[SftConfig] | type[RlConfig]:
    """The schema of a config with these sections."""
    return SCHEMAS[command_of(sections)]


def job_lines(command: str) -> list[str]:
    """The line that prints the command of a config and its reason, for commands that accept any config. Empty for
    `weft sft`."""
    return [f"job      weft {command}: the config has the section {mark}" for mark in MARKS if MARKS[mark] == command]
