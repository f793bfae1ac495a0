"""Things of the user's own code, by their import path."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from weft.errors import UserError


def import_named(path: str, key: str) -> Any:
    """What `package.module.Name` or `package.module:Name` is; the working folder is looked through last.

    key: the config's, for the UserError where there is no such thing.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{key}: {path} cannot be imported: {error}. Install it, or mend the path.") from error
    if not hasattr(module, name):
        raise UserError(f"{key}: {module_name} has no {name}.")
    return getattr(module, name)
