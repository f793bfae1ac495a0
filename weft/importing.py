"""Objects of the user's own code, by import path."""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from weft.errors import UserError, how_to_install
from weft.plugins import GROUPS, load_plugin, plugin

MAIN = "__main__"  # module of functions that no other process can import


def import_extra(module: str, extra: str, need: str) -> Any:
    """A module that belongs to one of weft's extras. need: what requires it, as in "data.path: a Parquet file". Raises
    UserError, which names the extra, if the module is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UserError(f"{need} needs {package}, which is not installed: {how_to_install(package, extra)}.") from error


def search_working_directory() -> None:
    """Also search the working directory for modules, after all other folders: `python -m weft` does so, the command
    `weft` does not."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def import_module(path: str, key: str, module_name: str | None = None) -> Any:
    """The user's module `module_name`, `path` by default. The working directory is searched last. Raises UserError,
    which names the config key `key` and its value `path`, if it cannot be imported."""
    module_name = module_name or path
    search_working_directory()
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        subject = f"there is no module {error.name} for {path}, which" if absent else path
        raise UserError(
            f"{key}: {subject} cannot be imported: {error}. weft searches the installed packages, PYTHONPATH and "
            f"{os.getcwd()}: install it, or fix the path."
        ) from error


def import_named(path: str, key: str) -> Any:
    """The object at `package.module:Name` or `package.module.Name`, or under a name that an installed package registers
    (weft/plugins.py). Raises UserError like import_module, and if the module has no such object."""
    if key in GROUPS and (entry := plugin(path, key)) is not None:
        return load_plugin(entry, key)
    module_name, colon, name = path.partition(":")
    if not colon:
        module_name, _, name = path.rpartition(".")
    value = import_module(path, key, module_name)
    for part in name.split("."):
        if not hasattr(value, part) and module_name == "__main__":
            raise UserError(
                f"{key}: {path} is defined in the program that started the run, and this is another process: move it "
                f"to a module, and set {key} to its import path. To resume a run that began with it, pass it again: "
                "weft.rl(resume=RUN, reward=...)."
            )
        if not hasattr(value, part):
            raise UserError(f"{key}: {module_name} has no {name}.")
        value = getattr(value, part)
    return value


def module_file(name: str) -> Path | None:
    """The file of a module, or the folder of a package without one, found without running anything of it; None if
    there is none."""
    search_working_directory()
    places: Any = None
    spec = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places)  # by its full name, Python would look for its imported parent
        if spec is None:
            return None
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    origin = None if spec is None else spec.origin or next(iter(places or ()), None)
    return None if origin is None else Path(origin)


def named_problem(path: str, key: str) -> str:
    """Why import_named would fail, found by reading files without running them; for `module:`, why import_module would.
    Empty if it would succeed, or if only running the module could tell."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    path = path.removesuffix(":")
    search_working_directory()
    names: set[str] | None = set(sys.modules) | set(sys.builtin_module_names)
    places: Any = None
    top_level, parts = name.partition(".")[0], module_name.split(".")
    for number, part in enumerate(parts):
        if number and names is not None and places is None and ".".join(parts[: number + 1]) not in sys.modules:
            hint = f": write {':'.join(filter(None, ('.'.join(parts[:-1]), name)))}" if parts[-1] == "py" else ""
            return f"{key}: {path} names something in {'.'.join(parts[:number])}, which is no package{hint}."
        spec = PathFinder.find_spec(part, places)  # by its full name, Python would look for its imported parent
        if spec is None and (names is None or part in names):
            return ""  # the module may exist without a file
        if spec is None:
            return (
                f"{key}: there is no module {'.'.join(parts[: number + 1])} for {path}. weft searches the installed "
                f"packages, PYTHONPATH and {os.getcwd()}: install it, or fix the path."
            )
        names, locations = _names(spec.origin), spec.submodule_search_locations
        places = None if locations is None else list(locations)
    if names is None or top_level in names or not top_level:
        return ""
    close = difflib.get_close_matches(top_level, names, n=1)
    return f"{key}: {module_name} has no {name}." + (f" Did you mean {module_name}:{close[0]}?" if close else "")


def _names(origin: str | None) -> set[str] | None:
    """The names that a module defines at its top level; None if it can have more than its source says."""
    if origin is None:
        return set()  # a folder
    try:
        tree = ast.parse(Path(origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # no source, or an error that importing it will report
    names: set[str] = set()
    open_: list[ast.AST] = list(tree.body)
    while open_:
        node = open_.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute):
            names.add(node.id if isinstance(node, ast.Name) else f".{node.attr}")
        open_ += ast.iter_child_nodes(node)
    return None if names & {"*", "__getattr__", "__path__", "globals", "exec", "setattr", "vars", ".modules"} else names
