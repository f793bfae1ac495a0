"""Every command that accepts a key reads it, or refuses it: found by following the calls from the command's recipe.

The walk is over syntax trees. A name leads to the function, class or value that it is bound to, through imports; a
method is reached once its class is, and its name is an attribute somewhere in what was reached. So it follows too much
rather than too little, and a key that it reports as unread is not read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import weft
from weft.config import SftConfig
from weft.config.checks import SFT, Inert, Rules
from weft.config.keys import attribute, schema_keys, sections
from weft.config.rl_checks import RULES as RL
from weft.config.rl_schema import RlConfig

PACKAGE = Path(weft.__file__).parent
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Of the config package, what turns keys into other values; the rest checks, prints and documents them.
READERS = ("mesh", "paths", "presets", "sources", "urls")
# What `weft.cli` runs with any config before the recipe.
BEFORE = ("weft.checkpoint.remote.local", "weft.checkpoint.remote.enter")
COMMANDS: dict[str, tuple[type, Rules]] = {"sft": (SftConfig, SFT), "rl": (RlConfig, RL)}


@cache
def modules() -> dict[str, ast.Module]:
    """Name -> syntax tree, without planted bugs and without the parts of the config package that only check keys."""
    trees = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        parts = name.split(".")
        if "bugs" not in parts and (parts[1:2] != ["config"] or (parts[2:3] and parts[2] in READERS)):
            trees[name] = ast.parse(path.read_text())
    return trees


@cache
def bindings(module: str) -> dict[str, ast.stmt | tuple[str, str | None]]:
    """Name -> its definition in this module, or (module, name in it) that it is imported from."""
    bound: dict[str, ast.stmt | tuple[str, str | None]] = {}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                target = (dotted, None) if dotted in modules() else (node.module, alias.name)
                bound[alias.asname or alias.name] = target
    for statement in modules()[module].body:
        if isinstance(statement, Definition):
            bound[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            bound |= {n.id: statement for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return bound


class Reached:
    """What may run once the functions and classes of some modules do."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self.nodes: list[tuple[str, ast.AST]] = []
        self._added: set[int] = set()
        self._methods: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
        self._attributes: set[str] = set()
        self._waiting: list[tuple[str, ast.AST]] = []
        for module in roots:
            for definition in bindings(module).values():
                if isinstance(definition, ast.AST):
                    self._add(module, definition)
        self._follow()

    def _follow(self) -> None:
        while self._waiting:
            while self._waiting:
                module, node = self._waiting.pop()
                for part in self._parts(module, node):
                    self.nodes.append((module, part))
                    self._scan(module, part)
            for module, method in self._methods:
                if method.name in self._attributes:
                    self._add(module, method)

    def _add(self, module: str, node: ast.AST) -> None:
        if id(node) not in self._added:
            self._added.add(id(node))
            self._waiting.append((module, node))

    def _parts(self, module: str, node: ast.AST) -> Iterator[ast.AST]:
        """What runs with this definition: of a class all but its methods, which wait until their names appear."""
        if not isinstance(node, ast.ClassDef):
            yield node
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("__"):
                self._methods.append((module, child))
            else:
                yield child

    def _scan(self, module: str, node: ast.AST) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Name):
                self._resolve(module, child.id)
            elif isinstance(child, ast.Attribute):
                self._attributes.add(child.attr)
                target = bindings(module).get(child.value.id) if isinstance(child.value, ast.Name) else None
                if isinstance(target, tuple) and target[1] is None:
                    self._resolve(target[0], child.attr)
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                self._attributes.add(child.value)  # a method of an actor is called by its name
                module_name, _, name = child.value.replace(":", ".").rpartition(".")
                self._resolve(module_name, name)  # an import path

    def _resolve(self, module: str, name: str) -> None:
        while module in modules():
            target = bindings(module).get(name)
            if isinstance(target, ast.AST):
                self._add(module, target)
            if not isinstance(target, tuple) or target[1] is None:
                return
            module, name = target[0], target[1]


def read_keys(reached: Reached, schema: type) -> set[str]:
    """Keys of which an attribute of that name is read, of what may be their section."""
    names: dict[str, dict[str, str]] = {section: {} for section in sections(schema)}
    for key in schema_keys(schema):
        section, _, leaf = key.partition(".")
        names[section][attribute(leaf)] = key
    kinds = {section: tuple(k.__name__ for k in sections(schema)[section].__mro__[:-1]) for section in names}
    by_attribute: dict[str, list[tuple[str, str]]] = {}
    for section, keys in names.items():
        for name, key in keys.items():
            by_attribute.setdefault(name, []).append((section, key))
    read = set()
    for module, node in reached.nodes:
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and child.attr in by_attribute and isinstance(child.ctx, ast.Load):
                value = child.value
                before = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
                for section, key in by_attribute[child.attr]:
                    if before == section or (before not in names and _mentions(module, section, kinds[section])):
                        read.add(key)
    return read


@cache
def _mentions(module: str, section: str, kinds: tuple[str, ...]) -> bool:
    """Whether the module's code names the section or one of its classes."""
    return any(kind in _text(module) for kind in kinds) or f".{section}" in _text(module)


@cache
def _text(module: str) -> str:
    return ast.unparse(modules()[module])


def refused(rules: Rules, key: str) -> bool:
    """Whether a rule refuses the key in every config."""
    return any(rule.key == key and _is_always(rule) for rule in rules.inert)


def _is_always(rule: Inert) -> bool:
    try:
        return bool(rule.when(None))  # a test that looks at the config cannot do without
    except AttributeError:
        return False


@cache
def reached_by(command: str) -> Reached:
    """weft.rl.algorithms imports its files by their names, which are in no import statement."""
    algorithms = [name for name in modules() if name.startswith("weft.rl.algorithms.")] if command == "rl" else []
    return Reached((f"weft.recipes.{command}", *BEFORE, *algorithms))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_every_key_that_it_accepts(command: str) -> None:
    schema, rules = COMMANDS[command]
    unread = schema_keys(schema).keys() - read_keys(reached_by(command), schema)
    assert {key for key in unread if not refused(rules, key)} == set()


def test_the_walk_leaves_out_what_the_other_command_calls() -> None:
    """Else it would prove nothing."""
    names = {command: {getattr(node, "name", "") for _, node in reached_by(command).nodes} for command in COMMANDS}
    assert {"compute_advantages", "stop_if_unproductive"} <= names["rl"] - names["sft"]
    assert {"overdue"} <= names["sft"] - names["rl"]
