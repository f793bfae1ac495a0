"""Makes one validated config from files and overrides. The stages are: read, merge, resolve, convert, check.

Every message contains the key, its value and its position in a file, and the value to set instead. All problems of a
stage are reported together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from weft.config.coerce import MismatchError, coerce, describe
from weft.config.commands import SCHEMAS, command_of
from weft.config.keys import NOT_YET_VALUES, Key, attribute, former_names, get, schema_keys, sections
from weft.config.migrate.names import weft_value
from weft.config.paths import check_paths, near_names
from weft.config.schema import SftConfig
from weft.config.unknown import Unknown, foreign_config, unknown_keys
from weft.config.validate import check_config, inert_keys, rules_of
from weft.config.yaml12 import Node, leaves_of, node_of, read_file, read_sections, read_value, show
from weft.errors import UserError

Schema = TypeVar("Schema")

COMMAND_LINE = "command line"
_BASE = "the run's config"
PATH_KEYS = (
    "model.path",
    "model.dcp_weights",
    "data.path",
    "eval.path",
    "eval.prompts",
    "lora.path",
    "run.dir",
    "run.staging",
)


def load_config(
    files: Sequence[str],
    overrides: Sequence[str],
    schema: type[Schema] = SftConfig,  # type: ignore[assignment]
    *,
    weights: bool = True,
    of_run: bool = False,
    base: Mapping[str, Mapping[str, Any]] | None = None,
) -> Schema:
    """The config of `files` (merged left to right) and `overrides` (`a.b=c`, later wins).

    weights: whether model.path must already contain weights. of_run: whether a run wrote the files. base: section ->
    key -> value, which the files override. If overrides make a key in files of a run or in base ineffective, the key is
    dropped, not refused. Raises UserError with one line per problem if a key is unknown, has a value of another type,
    cannot be combined with other keys, or names a local file that does not exist.
    """
    tree = _merged([node_of(base or {}, _BASE), *map(read_config_file, files), _parse_overrides(overrides)], schema)
    return _finish(tree, schema, weights, (*(files if of_run else ()), _BASE))


def load_values(values: Mapping[str, Any], location: str, schema: type[Schema], files: Sequence[str] = ()) -> Schema:
    """The config of a program. values: section -> key -> value, which override the values in `files`. location: the
    name of the call in the program, for messages. Raises UserError under the conditions of load_config."""
    tree = _merged([*map(read_config_file, files), node_of(values, location)], schema)
    return _finish(tree, schema, weights=True)


def written_config(run: str, schema: type, name: str | None = None) -> str:
    """The path of RUN/config.yaml, for `--resume RUN`. name: the name of RUN in messages, if it is not the path. Raises
    UserError if there is no such file, or if another command wrote it."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        problem = "contains no config.yaml, so it is not a run folder" if Path(run).is_dir() else "does not exist"
        raise UserError(f"--resume {run}: it {problem}. Write the path of a run folder (the value of run.dir).")
    command = command_of(read_config_file(str(path)).value or {})
    if SCHEMAS[command] is not schema:
        raise UserError(
            f"--resume {name or run}: weft {command} wrote this run: use weft {command} --resume {name or run}"
        )
    return str(path)


def imports_of_run(path: str) -> tuple[str, ...]:
    """model.imports of the run that contains the path, a run folder or one of its checkpoints; empty for other
    paths."""
    named = section_of_run(path, "model").get("imports")
    return tuple(str(name) for name in named or ()) if isinstance(named, list) else ()


def section_of_run(path: str, section: str) -> Mapping[str, Any]:
    """A section of the config of the run that contains the path, a run folder or one of its checkpoints; empty for
    other paths."""
    try:
        folder = Path(path).resolve()
        file = next(
            (candidate for candidate in (folder, *folder.parents[1:2]) if (candidate / "config.yaml").is_file()), None
        )
    except (OSError, RuntimeError, ValueError):  # such a name is invalid: the code that opens the file reports it
        return {}
    if file is None:
        return {}
    try:
        return read_sections(str(file / "config.yaml")).get(section) or {}
    except UserError:  # the code that needs the file reports the problem
        return {}


def _finish(tree: Node, schema: type[Schema], weights: bool, of_run: Sequence[str] = ()) -> Schema:
    explicit = _settle(tree, schema)
    fill_presets(tree, schema)
    config = build(tree, schema)
    for key in inert_keys(config) & explicit.keys() if of_run else ():
        if explicit[key].startswith(tuple(of_run)):
            del explicit[key]
    _raise_if(check_config(config, explicit) or check_paths(config, explicit, weights=weights))
    return config


def chosen_keys(overrides: Sequence[str], schema: type) -> dict[str, Any]:
    """Dotted key -> value, of overrides without files. Raises UserError for a key that is not in the schema, or a value
    of another type."""
    required = [f"{key.name}=x" for key in schema_keys(schema).values() if key.required]
    tree = _merged([_parse_overrides(overrides)], schema)
    config: Any = build(_merged([_parse_overrides([*required, *overrides])], schema), schema)
    return {name: get(config, name) for name in schema_keys(schema) if _find(tree, name) is not None}


def _parse_overrides(overrides: Sequence[str]) -> Node:
    """`a.b=c` overrides as one tree. Later overrides win."""
    tree = Node({}, COMMAND_LINE)
    for override in overrides:
        _merge(tree, parse_override(override))
    return tree


def parse_override(text: str) -> Node:
    """`a.b=c` as a tree."""
    name, equals, value = text.partition("=")
    parts = name.split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        hydra = f"{text.lstrip('+')}, without Hydra's +" if text.startswith("+") else ""
        example = hydra or "section.key=value, as in optimizer.lr=1e-5"
        raise UserError(f"{COMMAND_LINE}: `{text}` is not an override: write {example}.")
    node = read_value(value, COMMAND_LINE)
    for part in reversed(parts):
        node = Node({part: node}, COMMAND_LINE)
    return node


def read_config_file(path: str) -> Node:
    """The sections of a YAML or TOML file. Raises UserError, with similar names, if there is no such file."""
    file = Path(os.path.expanduser(path))  # Path.expanduser raises if the user does not exist
    if file.is_dir():
        raise UserError(f"{path}: this is a folder; write the path of a YAML file in it.")
    if os.path.lexists(file):
        # `optimizer.lr: 1` at the top level of a file means the same as on the command line: a key in a section.
        tree = read_file(path)
        expanded = Node({}, tree.location)
        for name, child in tree.value.items():
            node = child
            for part in reversed(name.split(".")[1:]):
                node = Node({part: node}, child.location)
            _merge(expanded, Node({name.split(".")[0]: node}, child.location))
        return expanded
    if re.fullmatch(r"[a-z_]+\.[a-z_]+", path) and not path.endswith((".yaml", ".yml", ".toml", ".json")):
        raise UserError(f"{path}: there is no such config file; to set a key write {path}=VALUE.")
    raise UserError(f"{path}: there is no such config file.{near_names(file)}")


def plain_sections(tree: Node) -> dict[str, dict[str, Any]]:
    """Section -> key -> value of a file's tree, without positions."""
    return {name: dict(_plain(node).value) for name, node in tree.value.items() if node.is_section}


def _merged(sources: Sequence[Node], schema: type) -> Node:
    """The trees of files and overrides as one. Later trees win. Keys have their current names."""
    tree = Node({}, COMMAND_LINE)
    for source in sources:
        _replace_former_names(source, schema)
        _merge(tree, source)
    return tree


def _replace_former_names(tree: Node, schema: type) -> None:
    """Rename keys to their current names. Raises UserError if a file, or the command line, sets a key by both names."""
    for former, name in former_names(schema).items():
        node, current = _find(tree, former), _find(tree, name)
        if node is None:
            continue
        if current is not None:
            raise UserError(
                f"{node.location}: {former} is the former name of {name}, which is also set ({current.location}): "
                f"remove {former}."
            )
        keys = tree.value[former.partition(".")[0]].value
        del keys[former.partition(".")[2]]
        keys[name.partition(".")[2]] = Node(node.value, f"{node.location} ({former})", node.raw)


def _merge(into: Node, source: Node, *, sections: bool = True) -> None:
    """Merge a tree into another. sections: whether the children are sections of the config; otherwise they are keys,
    which null removes."""
    for name, node in source.value.items():
        present = into.value.get(name)
        if present is not None and present.is_section and node.is_section:
            _merge(present, node, sections=False)
        elif not (sections and present is not None and present.is_section and node.value is None):
            into.value[name] = node  # an empty section (all its keys are commented out) changes nothing


def _settle(tree: Node, schema: type) -> dict[str, str]:
    """Remove keys that are null if null unsets them, and set the default of a key to null if its exclusive partner is
    set. Returns name -> position of the keys that are set."""
    rules = rules_of(schema)
    for name in rules.unsettable:
        node = _find(tree, name)
        if node is not None and node.value is None and not _accepts_null(schema_keys(schema).get(name)):
            section, _, leaf = name.partition(".")
            del tree.value[section].value[leaf]
    for default_key, other_key in rules.exclusive:
        partner = _find(tree, other_key)
        if partner is not None and partner.value is not None and _find(tree, default_key) is None:
            section, _, leaf = default_key.partition(".")
            if _accepts_null(schema_keys(schema).get(default_key)):
                tree.value[section].value[leaf] = Node(None, partner.location)
    names = (name for name in schema_keys(schema))
    nodes = ((name, _find(tree, name)) for name in names)
    return {name: node.location for name, node in nodes if node is not None and node.value is not None}


def fill_presets(tree: Node, schema: type) -> None:
    """Add the defaults that a key such as rl.algorithm sets for other keys, if they are not set. They are never refused
    as keys without effect."""

    def value(name: str) -> Any:
        chosen = _find(tree, name)
        result = schema_keys(schema)[name].default if chosen is None else _plain(chosen).value
        return result if isinstance(result, str | int | dict) else None

    for name, presets in rules_of(schema).presets(value):
        chosen = _find(tree, name)
        location = name if chosen is None else f"{chosen.location} ({name})"
        for key, preset in presets.items():
            section, _, leaf = key.partition(".")
            node = tree.value.setdefault(section, Node({}, location))
            if node.is_section:
                node.value.setdefault(leaf, Node(preset, location))


def _find(tree: Node, name: str) -> Node | None:
    section, _, leaf = name.partition(".")
    node = tree.value.get(section)
    return node.value.get(leaf) if node is not None and node.is_section else None


def _accepts_null(key: Key | None) -> bool:
    return key is not None and "null" in describe(key.type).split(" or ")


def build(tree: Node, schema: type[Schema]) -> Schema:
    """The typed config of a tree. Raises UserError for keys that are not in the schema and values of other types."""
    problems: list[str] = []
    unknown: list[Unknown] = []
    built: dict[str, Any] = {}
    for name, node in tree.value.items():
        if name not in sections(schema):
            unknown += unknown_keys(name, node, schema)
    for name, section_type in sections(schema).items():
        values = _build_section(name, tree.value.get(name, Node({}, "")), schema, problems, unknown)
        if not problems and not unknown:
            built[name] = section_type(**{attribute(leaf): value for leaf, value in values.items()})
    if unknown:
        lines, first, last = foreign_config(unknown, dict(leaves_of(tree)), schema)
        if not lines:
            raise UserError(first)
        _raise_if([*lines, *problems], [last] if last else [], first)
    _raise_if(problems)
    return schema(**built)


def _build_section(
    section: str, node: Node, schema: type, problems: list[str], unknown: list[Unknown]
) -> dict[str, Any]:
    keys = {key.leaf: key for key in schema_keys(schema).values() if key.name.startswith(section + ".")}
    if not node.is_section and node.value is not None:
        names = " or ".join(f"{section}.{leaf}" for leaf in list(keys)[:2])
        problems.append(f"{node.location}: {section} is a section, not a value ({show(node.value)}): set {names}.")
        return {}
    children: dict[str, Node] = node.value or {}
    values: dict[str, Any] = {}
    for leaf, child in children.items():
        if leaf not in keys:
            unknown += unknown_keys(f"{section}.{leaf}", child, schema)
            continue
        try:
            values[leaf] = _expand_home(keys[leaf].name, coerce(_plain(child), keys[leaf].type))
        except MismatchError as error:
            problems.append(_mismatch(keys[leaf], child, str(error)))
    for leaf, key in keys.items():
        if key.required and leaf not in children:
            problems.append(f"{key.name} is required: set {key.name}=... ({key.help.rstrip('.')}).")
    return values


def _plain(node: Node) -> Node:
    """The node. If a value is expected and it is a tree of Nodes, the tree becomes a plain dict."""
    if not node.is_section:
        return node
    return Node({name: _plain(child).value for name, child in node.value.items()}, node.location, node.raw)


def _mismatch(key: Key, node: Node, hint: str) -> str:
    value = _plain(node).value
    if (key.name, value) in NOT_YET_VALUES if isinstance(value, str) else False:
        return f"{node.location}: {key.name}: {value} is not in this version yet: set it to {describe(key.type)}."
    equivalent = None if hint else weft_value(key.name, value)
    if equivalent is not None:
        hint = f"write {equivalent}"
    example = "" if hint or key.required else f" (default: {show_default(key)})"
    advice = f": {hint}" if hint else example
    return f"{node.location}: {key.name} must be {describe(key.type)}, not {show(value)}{advice}."


def show_default(key: Key) -> str:
    """The default of a key in YAML."""
    return show(list(key.default) if isinstance(key.default, tuple) else key.default)


def _expand_home(name: str, value: Any) -> Any:
    return os.path.expanduser(value) if name in PATH_KEYS and isinstance(value, str) and value[:1] == "~" else value


def _raise_if(problems: list[str], hint: Sequence[str] = (), first: str = "") -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(problems[0])
    lines = [f"{len(problems)} problems in the config:", *(f"  {line}" for line in problems), *hint]
    lines = [first, *lines] if first else lines
    raise UserError("\n".join(lines))
