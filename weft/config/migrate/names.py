"""Advice on names and values that users bring from other trainers.

Tables are searched for the longest end of a name, so `actor_rollout_ref.actor.optim.lr` and `lr` have the same entry.
`wandb.*` in a table is a section and everything in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.migrate.trainer import DISTILLATION, KINDS, PREFERENCES, REINFORCEMENT, REWARD_MODELS, TABLES, Trainer
from weft.config.yaml12 import show

# Minimum number of a trainer's names by which a config is recognised as that trainer's.
_FOREIGN = 4


def advice_for(name: str, *, reinforcement: bool = False) -> str | None:
    """Advice on a dotted name of another trainer; None if the name is unknown. reinforcement: for a config of
    `weft rl`, which has separate advice."""
    rl_entry = entry_of(name, TABLES.rl_names) if reinforcement else None
    if rl_entry is not None:
        return TABLES.rl_names[rl_entry]
    entry = entry_of(name)
    if entry is None:
        return None
    say = TABLES.sentences
    if reinforcement and TABLES.names[entry] in (say.sft["RL"], say.sft["REWARD"]):
        return say.rl["ELSEWHERE"]
    return TABLES.names[entry]


def trainers_of(name: str) -> list[Trainer]:
    """The trainers that have this dotted name."""
    entry = entry_of(name)
    return [trainer for trainer in TABLES.trainers if entry in trainer.names]


def entry_of(name: str, table: Mapping[str, Any] | None = None) -> str | None:
    """The most specific entry of a table (default: all names) for a dotted name; None if there is none."""
    table = TABLES.names if table is None else table
    parts = name.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        suffix = parts[start:]
        above = (f"{'.'.join(suffix[:end])}.*" for end in range(len(suffix), 0, -1))
        result = next((entry for entry in (".".join(suffix), *above) if entry in table), None)
        if result is not None:
            return result
    return None


def weft_value(key: str, value: Any) -> str | None:
    """weft's equivalent of another trainer's value of a key, or None."""
    word = str(value).lower()
    equivalents = TABLES.values.get(key, {})
    return equivalents.get(word) or (word if word in equivalents.values() and word != value else None)


def recognised(names: Iterable[str]) -> tuple[Trainer, list[str]] | None:
    """(The trainer with most signs among these dotted names, the names that are signs); None without any signs. A
    companion (accelerate), whose file accompanies another trainer's, is chosen only if no other trainer has signs."""
    names = list(names)
    signs_of = [(trainer, trainer.signs_in(names)) for trainer in TABLES.trainers]
    best = max(signs_of, key=lambda pair: (bool(pair[1]) and not pair[0].table.companion, len(pair[1])))
    return best if best[1] else None


@dataclass(frozen=True)
class Task:
    """A kind of training in another trainer's config, other than supervised fine-tuning. kind: one of KINDS. sign: the
    name that selects it, with its value. algorithm: in words, such as GRPO."""

    trainer: Trainer
    kind: str
    sign: str
    algorithm: str

    @property
    def command(self) -> str:
        """weft's command for it."""
        return KINDS[self.kind]

    @property
    def is_drafted(self) -> bool:
        """Whether `weft migrate` can draft it."""
        rl = self.trainer.table.rl_draft
        return self.command in self.trainer.jobs and (
            self.command != "rl" or self.algorithm in (rl.algorithms if rl else ())
        )

    def __str__(self) -> str:
        """The kind of config, and weft's support for it, as the end of a sentence about the file."""
        article = "an" if self.algorithm[0] in "EIOR" and self.algorithm.isupper() and self.algorithm != "RLOO" else "a"
        description = f"{article} {self.algorithm.replace('_', ' ')} config of {self.trainer.title} ({self.sign})"
        if self.algorithm in _PAIRS:
            return f"{description}. {_NEAREST}"
        if self.kind == REINFORCEMENT:
            return f"{description}. {TABLES.drafts}"
        draft = " `weft migrate FILE` writes a draft of it." if self.is_drafted else ""
        return f"{description}: {_COMMANDS[self.kind]}{draft}"


_PAIRS = ("ONLINE_DPO", "NASH_MD", "XPO")  # losses of pairs that are sampled during training
_NEAREST = (
    "weft has no loss of pairs that are sampled during training. The nearest are `weft rl` with `rl.advantage: rloo` "
    "and `rl.group_size: 2`, which also compares the rewards of two samples; and `weft dpo` on pairs that are sampled "
    "and scored before training."
)
# Kind -> weft's support for it, after a colon.
_COMMANDS = {
    DISTILLATION: "`weft distill` trains a student on a teacher's distributions, and `weft rl` with rl.teacher on the "
    "policy's samples. docs/how-to/distill.md has the keys.",
    REWARD_MODELS: "`weft reward` trains reward models. docs/how-to/reward-models.md has the keys.",
    PREFERENCES: "`weft dpo` trains on preferences. docs/how-to/dpo.md has the keys.",
}

_ALGORITHMS = re.compile(
    r"online_dpo|nash_md|xpo|ebft|gdpo|grpo|gspo|dapo|rloo|reinforce|ppo|dpo|kto|orpo|simpo|ipo|cpo"
)
_ESTIMATORS = ("adv_estimator", "advantage_estimator")  # names whose value is the algorithm
_OF_NAMES = {"rloo_k": "RLOO", "reward_model_path": "PPO", "normalize_advantages": "RLOO", "desirable_weight": "KTO"}
_OF_PAIRS, _OF_PPO = {"missing_eos_penalty", "judge", "max_new_tokens"}, {"response_length", "num_ppo_epochs"}  # TRL's
_OF_VALUES = {"gae": "PPO"}


def task_of(trainer: Trainer, settings: Mapping[str, Any]) -> Task | None:
    """The kind of training in a config of this trainer; None for supervised fine-tuning. settings: all names with their
    values."""
    kinds = [
        (trainer.task(entry_of(name, trainer.tasks) or "", value), name, value) for name, value in settings.items()
    ]
    for kind in KINDS:
        for task_kind, name, value in kinds:
            if task_kind == kind:
                return Task(trainer, kind, f"{name}: {show(value)}", _algorithm(trainer, kind, name, value, settings))
    return None


def _algorithm(trainer: Trainer, kind: str, name: str, value: Any, settings: Mapping[str, Any]) -> str:
    if kind in (DISTILLATION, REWARD_MODELS):
        return "distillation" if kind == DISTILLATION else "reward-model"
    leaf = name.rpartition(".")[2]
    leaves = {setting.rpartition(".")[2] for setting in settings}
    if kind == REINFORCEMENT and leaves & _OF_PAIRS and not leaves & _OF_PPO and trainer.name == "trl":
        return _PAIRS[0]
    estimator = next(
        (algorithm for setting, algorithm in settings.items() if setting.rpartition(".")[2] in _ESTIMATORS), None
    )
    if kind == REINFORCEMENT and estimator is not None:
        value = estimator
    word = str(value).lower()
    match = _ALGORITHMS.search(word) or _ALGORITHMS.search(leaf) or _ALGORITHMS.search(name.lower())
    if match is not None:
        return match[0].upper()
    return _OF_VALUES.get(word) or _OF_NAMES.get(leaf) or ("GRPO" if kind == REINFORCEMENT else "DPO")


def likely_trainer(names: Iterable[str]) -> Trainer | None:
    """The trainer with most of these dotted names; None if it has too few of them, or if another has as many."""
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
