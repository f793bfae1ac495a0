"""Reward functions that a program passes as objects, converted for the worker processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from weft.errors import UserError, first_line
from weft.importing import MAIN, import_extra


def name_rewards(rewards: Any) -> tuple[list[str], dict[str, bytes]]:
    """(names for rl.reward, name -> pickled function, for functions that workers cannot import).

    rewards: a name or import path as in rl.reward, a function, or a list of these. UserError if an item is neither, or
    if a function cannot be pickled.
    """
    listed = rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    names: list[str] = []
    pickled: dict[str, bytes] = {}
    for number, reward in enumerate(listed, start=1):
        name = reward if isinstance(reward, str) else _import_path(reward)
        if name is None:
            name = _own_name(reward, number, names)
            pickled[name] = _pickled(reward, name)
        names.append(name)
    return names, pickled


def _import_path(function: Any) -> str | None:
    """The import path under which other processes find this function; None if it has none."""
    if not callable(function):
        raise UserError(
            f"reward: {function!r:.80} is of type {type(function).__name__}: give a function, the name of a built-in "
            "one (math), an import path (my_rewards:is_right), or a list of these."
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(name, str) or "<" in name or module not in sys.modules or module == MAIN:
        return None
    target: Any = sys.modules[module]
    for part in name.split("."):
        target = getattr(target, part, None)
    return f"{module}:{name}" if target is function and _can_be_imported(module) else None


def _can_be_imported(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module object without a file
        return False


def _own_name(function: Any, number: int, used: Sequence[str]) -> str:
    """A name such as `__main__:is_right`; numbered by `number` if the function has no usable name, or a taken one."""
    name = getattr(function, "__name__", type(function).__name__)
    qualified = f"{MAIN}:{name}"
    return qualified if name.isidentifier() and qualified not in used else f"{MAIN}:reward_{number}"


def _pickled(function: Any, name: str) -> bytes:
    """The function pickled by value, with everything that it uses from this program (cloudpickle)."""
    cloudpickle = import_extra("cloudpickle", "rl", "a reward function of a program")
    try:
        data: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise UserError(
            f"reward: {name.partition(':')[2]} cannot be pickled for the reward processes: {first_line(error)}. "
            "Create the objects that it uses at its first call, or move it to a module and import it from there."
        ) from error
    return data
