"""What to say to names that users bring from other trainers. The names are in trainers/, one file for each trainer.

A name is looked up by its last parts, as many as the table knows, so that `actor_rollout_ref.actor.optim.lr` and `lr`
are the same. `wandb.*` in the table stands for a section and all that is in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weft.config.trainers import OTHERS, TRAINERS
from weft.config.trainers import advice as say
from weft.config.trainers.reinforcement import ELSEWHERE, REINFORCEMENT

# Sections and keys of the design that enter the schema with their feature.
NOT_YET = (
    "mesh.cp",
    "mesh.tp",
    "mesh.ep",
    "mesh.pp",
)
# Values of keys that exist.
NOT_YET_VALUES = {("model.recompute", "selective"), ("optimizer.name", "muon")}

ALIASES: dict[str, str] = {**OTHERS, **{name: text for trainer in TRAINERS for name, text in trainer.advice()}}


def advice_for(name: str, *, reinforcement: bool = False) -> str | None:
    """What to say instead of a dotted name of another trainer, or None where it is not known.

    reinforcement: in a config of `weft rl`, which has answers of its own.
    """
    own = entry_of(name, REINFORCEMENT) if reinforcement else None
    if own is not None:
        return REINFORCEMENT[own]
    found = entry_of(name)
    if reinforcement and found is not None and ALIASES[found] in (say.RL, say.REWARD):
        return ELSEWHERE
    return None if found is None else with_state(ALIASES[found])


def trainers_of(name: str) -> list[str]:
    """The trainers that have a dotted name, by the names of their pages."""
    found = entry_of(name)
    return [trainer.name for trainer in TRAINERS if any(found in group for group in trainer.names.values())]


def not_yet(name: str) -> str | None:
    """The key or section of the design that covers a dotted name, or None."""
    return next((planned for planned in NOT_YET if name == planned or name.startswith(planned + ".")), None)


def with_state(text: str) -> str:
    """A text of the table, with what is not in this version yet of the keys that it names."""
    missing = [f"`{key}`" for key in dict.fromkeys(re.findall(r"`([\w.]+)`", text)) if not_yet(key)]
    if not missing:
        return text
    return f"{text} ({' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in this version yet.)"


def entry_of(name: str, table: Mapping[str, Any] = ALIASES) -> str | None:
    """The table's entry for a dotted name: the one that says most of it."""
    parts = name.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        own = parts[start:]
        above = (f"{'.'.join(own[:end])}.*" for end in range(len(own), 0, -1))
        found = next((entry for entry in (".".join(own), *above) if entry in table), None)
        if found is not None:
            return found
    return None
