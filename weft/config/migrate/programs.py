"""Reads the arguments of a trainer in a Python program as a config: GRPOConfig(learning_rate=1e-6) and the like. The
program is not run. Values are literals, or names that the program binds once to a literal."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.config.migrate.scripts import PROGRAM
from weft.config.yaml12 import Node, node_of
from weft.errors import UserError
from weft.files import regular_file

_TRAINERS = {  # class -> the equivalent script of TRL
    "SFTTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto", "ORPOTrainer": "orpo", "CPOTrainer": "cpo",
    "RewardTrainer": "reward", "PRMTrainer": "prm", "GKDTrainer": "gkd", "GRPOTrainer": "grpo", "RLOOTrainer": "rloo",
}  # fmt: skip
_SETTINGS = ("Config", "Arguments")  # the ends of class names whose arguments are settings
_ADAPTERS = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_SOURCES = ("model", "train_dataset", "eval_dataset")  # arguments of a trainer that load a model or data


def read_program(path: str) -> Node:
    """name -> value of the arguments of a trainer's class and of its configs. Raises UserError for a file that is not a
    Python program, or that does not have exactly one such class."""
    try:
        tree = ast.parse(regular_file(Path(path), "a Python program").read_text(encoding="utf-8"))
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a Python program: {error}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = [call for call in calls if _name(call.func) in _TRAINERS]
    if len(trainers) != 1:
        raise UserError(
            f"{path}: has {len(trainers) or 'no'} calls of a trainer. `weft migrate` reads a program with one call of "
            f"{', '.join(_TRAINERS)}. If the program builds a command line, write the command line into a file that "
            f"ends in .sh, and pass that file. docs/how-to/notebook.md shows weft in Python."
        )
    bound = _bound(tree)
    settings: dict[str, Any] = {PROGRAM: _TRAINERS[_name(trainers[0].func)]}
    for call in calls:
        name = _name(call.func)
        if name == "LoraConfig":
            settings |= {"use_peft": True} | dict(_arguments(call, bound, lambda key: _ADAPTERS.get(key, key)))
        elif name.endswith(_SETTINGS):
            settings |= dict(_arguments(call, bound, str))
    for keyword in trainers[0].keywords:
        if keyword.arg in _SOURCES:
            settings |= _source(keyword.arg, keyword.value, bound)
        elif keyword.arg not in (None, "args", "peft_config", "processing_class", "tokenizer", "quantization_config"):
            settings[keyword.arg] = _value(keyword.value, bound)
    return Node({name: node_of(value, path) for name, value in settings.items()}, path)


def _name(function: ast.expr) -> str:
    """The last part of the name of the called function."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _bound(tree: ast.AST) -> dict[str, ast.expr]:
    """Name -> the expression that it is bound to, for names that are bound once."""
    bound: dict[str, ast.expr] = {}
    several = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            several |= {name} & bound.keys()
            bound[name] = node.value
    return {name: value for name, value in bound.items() if name not in several}


def _arguments(
    call: ast.Call, bound: Mapping[str, ast.expr], rename: Callable[[str], str]
) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield rename(keyword.arg), _value(keyword.value, bound)


def _value(node: ast.expr, bound: Mapping[str, ast.expr]) -> Any:
    """The value of a literal. For any other expression, its name or its text."""
    for _ in range(4):  # a name may be bound to another
        if isinstance(node, ast.Name) and node.id in bound:
            node = bound[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element, bound) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ast.unparse(node)


def _source(argument: str, node: ast.expr, bound: Mapping[str, ast.expr]) -> dict[str, Any]:
    """The source of a model or a data set, with the names of TRL's scripts; otherwise its text."""
    expression = bound.get(node.id, node) if isinstance(node, ast.Name) else node
    loads = [call for call in ast.walk(expression) if isinstance(call, ast.Call) and call.args]
    load = next((call for call in loads if _name(call.func) in ("load_dataset", "from_pretrained")), None)
    if argument == "model":
        return {"model_name_or_path": _value(load.args[0] if load else expression, bound)}
    if load is None:
        return {argument: ast.unparse(expression)}
    keywords = {keyword.arg: _value(keyword.value, bound) for keyword in load.keywords}
    if argument == "eval_dataset":
        return {"dataset_test_split": keywords.get("split", "test")}
    source = {"dataset_name": _value(load.args[0], bound), "dataset_train_split": keywords.get("split", "train")}
    names = [_value(extra, bound) for extra in load.args[1:2]] or [keywords.get("name")]
    return source | ({"dataset_config": names[0]} if names[0] is not None else {})
