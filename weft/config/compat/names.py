"""Advice on names and values that users bring from other trainers.

A name is looked up by its longest end that a table has, so that `actor_rollout_ref.actor.optim.lr` and `lr` are the
same. `wandb.*` in a table stands for a section and everything in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from weft.config.compat.trainer import TABLES, Trainer

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
