"""Advice on names and values that users bring from other trainers.

A name is looked up by its longest end that a table has, so that `actor_rollout_ref.actor.optim.lr` and `lr` are the
same. `wandb.*` in a table stands for a section and everything in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.migrate.trainer import DISTILLATION, KINDS, REINFORCEMENT, TABLES, Trainer
from weft.config.yaml12 import show

# The number of names of another trainer that make a config look like that trainer's.
_FOREIGN = 4


def advice_for(name: str, *, reinforcement: bool = False) -> str | None:
    """Advice on a dotted name of another trainer; None if the name is unknown. reinforcement: for a config of
    `weft rl`, which has advice of its own."""
    own = entry_of(name, TABLES.rl_names) if reinforcement else None
    if own is not None:
        return TABLES.rl_names[own]
    found = entry_of(name)
    if found is None:
        return None
    say = TABLES.sentences
    if reinforcement and TABLES.names[found] in (say.sft["RL"], say.sft["REWARD"]):
        return say.rl["ELSEWHERE"]
    return TABLES.names[found]


def trainers_of(name: str) -> list[Trainer]:
    """The trainers that have this dotted name."""
    found = entry_of(name)
    return [trainer for trainer in TABLES.trainers if found in trainer.names]


def entry_of(name: str, table: Mapping[str, Any] | None = None) -> str | None:
    """The most specific entry of a table (default: all names) for a dotted name; None if there is none."""
    table = TABLES.names if table is None else table
    parts = name.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        own = parts[start:]
        above = (f"{'.'.join(own[:end])}.*" for end in range(len(own), 0, -1))
        found = next((entry for entry in (".".join(own), *above) if entry in table), None)
        if found is not None:
            return found
    return None


def weft_value(key: str, value: Any) -> str | None:
    """weft's equivalent of another trainer's value of a key, or None."""
    word = str(value).lower()
    known = TABLES.values.get(key, {})
    return known.get(word) or (word if word in known.values() and word != value else None)


def recognised(names: Iterable[str]) -> tuple[Trainer, list[str]] | None:
    """(The trainer with most signs among these dotted names, the names that are signs); None without any. A companion
    (accelerate), whose file accompanies another trainer's, is chosen only if there is no other."""
    names = list(names)
    found = [(trainer, trainer.signs_in(names)) for trainer in TABLES.trainers]
    best = max(found, key=lambda pair: (bool(pair[1]) and not pair[0].table.companion, len(pair[1])))
    return best if best[1] else None


@dataclass(frozen=True)
class Task:
    """Training other than supervised fine-tuning that another trainer's config asks for. kind: one of KINDS. sign: the
    name that asks for it, with its value. algorithm: in words, such as GRPO."""

    trainer: Trainer
    kind: str
    sign: str
    algorithm: str

    @property
    def is_drafted(self) -> bool:
        """Whether `weft migrate` makes a draft of it."""
        return self.kind == REINFORCEMENT and self.trainer.table.rl_draft is not None

    def __str__(self) -> str:
        """What the config is, and what weft can do with it, as the end of a sentence on the file."""
        article = "an" if self.algorithm[0] in "RIO" and self.algorithm.isupper() and self.algorithm != "RLOO" else "a"
        what = f"{article} {self.algorithm} config of {self.trainer.title} ({self.sign})"
        if self.kind == REINFORCEMENT:
            return f"{what}. {TABLES.drafts}"
        missing = "distillation" if self.kind == DISTILLATION else "preference tuning"
        return f"{what}; weft has no {missing} yet."


_ALGORITHMS = re.compile(r"grpo|gspo|dapo|rloo|reinforce|ppo|dpo|kto|orpo|simpo|ipo|cpo")
_ESTIMATORS = ("adv_estimator", "advantage_estimator")  # names whose value is the algorithm
_OF_NAMES = {
    "rloo_k": "RLOO", "reward_model_path": "PPO", "desirable_weight": "KTO", "reward_model": "reward-model",
    "process_reward_model": "reward-model",
}  # fmt: skip
_OF_VALUES = {"gae": "PPO", "rm": "reward-model"}


def task_of(trainer: Trainer, found: Mapping[str, Any]) -> Task | None:
    """What a config of this trainer asks for; None for supervised fine-tuning. found: all names with their values."""
    kinds = [(trainer.task(entry_of(name, trainer.tasks) or "", value), name, value) for name, value in found.items()]
    for kind in KINDS:
        for own, name, value in kinds:
            if own == kind:
                return Task(trainer, kind, f"{name}: {show(value)}", _algorithm(kind, name, value, found))
    return None


def _algorithm(kind: str, name: str, value: Any, found: Mapping[str, Any]) -> str:
    if kind == DISTILLATION:
        return "distillation"
    leaf = name.rpartition(".")[2]
    estimator = next((given for one, given in found.items() if one.rpartition(".")[2] in _ESTIMATORS), None)
    if kind == REINFORCEMENT and estimator is not None:
        value = estimator
    word = str(value).lower()
    known = _ALGORITHMS.search(word) or _ALGORITHMS.search(leaf)
    if known is not None:
        return known[0].upper()
    return _OF_VALUES.get(word) or _OF_NAMES.get(leaf) or ("GRPO" if kind == REINFORCEMENT else "DPO")


def likely_trainer(names: Iterable[str]) -> Trainer | None:
    """The trainer that has most of these dotted names, if there are enough of them and no other has as many."""
    names = list(names)
    if len(names) < _FOREIGN:
        return None
    by_signs = recognised(names)
    if by_signs is not None:
        return by_signs[0]
    best = Counter(trainer for name in names for trainer in trainers_of(name)).most_common(2)
    if not best or best[0][1] < _FOREIGN or (len(best) == 2 and best[0][1] == best[1][1]):
        return None
    return best[0][0]
