"""Things of the user's own code, by their import path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from weft.errors import UserError


def import_extra(module: str, extra: str, need: str) -> Any:
    """A module that only one of weft's extras brings. need: what wants it, as in "data.path: a Parquet file".

    UserError, with the extra, where it is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UserError(
            f"{need} needs {package}, which is not installed: pip install {package}, or install weft with its extra "
            f"[{extra}]."
        ) from error


def import_named(path: str, key: str) -> Any:
    """What `package.module:Name` or `package.module.Name` is; the last dot counts where there is no colon.

    The working folder is looked through last. key: the config's, for the UserError where there is no such thing.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # `python -m weft` has it, the command `weft` does not
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        what = f"there is no module {error.name} for {path}, which" if absent else path
        raise UserError(
            f"{key}: {what} cannot be imported: {error}. It is looked for among the installed packages, in PYTHONPATH "
            f"and in {os.getcwd()}: install it, or mend the path."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part) and module_name == "__main__":
            raise UserError(
                f"{key}: {path} belongs to the program that started the run, and this is another process: put it into "
                f"a module, and set {key} to its import path. A run that began with it goes on from a program that has "
                "it, too: weft.rl(resume=RUN, reward=...)."
            )
        if not hasattr(found, part):
            raise UserError(f"{key}: {module_name} has no {name}.")
        found = getattr(found, part)
    return found
