"""YAML 1.2 with positions: `1e-5` is a number, `yes` and `on` are strings, a duplicate key is an error.

PyYAML reads YAML 1.1, where `1e-5` is a string and `no` is false. Both have spoiled training runs. This file uses
PyYAML's parser, and replaces its implicit types by those of YAML 1.2's core schema.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weft.errors import UserError, first_line
from weft.files import regular_file

# A config written by a person has a few hundred values, nested a few levels deep. Larger files are refused before they
# exhaust memory.
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 4 << 20, 100_000, 64


# First characters of texts that YAML does not read literally: quotes, blocks, tags, anchors.
_MARKED = tuple("'\"|>!&")


@dataclass(slots=True)
class Node:
    """A value with its position. value: a scalar, a list, or dict[str, Node] for a section. location: "sft.yaml:12" or
    "command line". raw: the text as typed, for values from the command line."""

    value: Any
    location: str
    raw: str | None = None

    @property
    def is_section(self) -> bool:
        return isinstance(self.value, dict)


_CORE_SCHEMA = (
    ("tag:yaml.org,2002:null", r"(?:null|Null|NULL|~|)", ["n", "N", "~", ""]),
    ("tag:yaml.org,2002:bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("tag:yaml.org,2002:int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", r"(?:<<)", ["<"]),  # of YAML 1.1, and of most files with anchors
)


class Loader(yaml.SafeLoader):
    """yaml.SafeLoader with the types of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own registry, replaced and not extended


class Dumper(yaml.SafeDumper):
    """yaml.SafeDumper that quotes strings which `Loader` would not read as strings."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as in Loader

    def ignore_aliases(self, data: Any) -> bool:
        """True: a value that occurs twice is written twice, not as an anchor (`&id001`) and an alias."""
        return True


class _OneLineDumper(Dumper):
    """Dumper that escapes line breaks in strings."""


for _tag, _pattern, _first in _CORE_SCHEMA:
    Loader.add_implicit_resolver(_tag, re.compile(rf"^{_pattern}$"), _first)
    Dumper.add_implicit_resolver(_tag, re.compile(rf"^{_pattern}$"), _first)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if text in ("inf", "-inf", "nan"):
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[text]
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
Dumper.add_representer(float, _represent_float)


def _represent_in_one_line(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_OneLineDumper.add_representer(str, _represent_in_one_line)


def leaves_of(node: Node, name: str = "") -> Iterator[tuple[str, Any]]:
    """(Dotted name, value) of every node in a tree that is not a section."""
    if not node.is_section:
        yield name, node.value
        return
    for key, child in node.value.items():
        yield from leaves_of(child, f"{name}.{key}".lstrip("."))


def read_file(path: str) -> Node:
    """The file as a tree of Nodes. Raises UserError with file:line if it is not valid YAML or not a mapping of
    sections.

    A file whose name ends in .toml is read as TOML, and its Nodes have no lines.
    """
    text = _text(path)
    try:
        node = node_of(tomllib.loads(text), path) if path.endswith(".toml") else _parse(text, path)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}.") from error
    except yaml.YAMLError as error:
        raise UserError(_syntax_message(error, path)) from error
    except RecursionError:
        raise UserError(f"{path}: the nesting is too deep for a config, which has sections, keys and values.") from None
    except ValueError as error:  # from Python, for a number or a date
        raise UserError(f"{path}: contains a value that cannot be read: {first_line(error)}.") from error
    if node is None or node.value is None:
        return Node({}, path)
    if not node.is_section:
        raise UserError(f"{node.location}: expected sections such as `model:` and `data:`, found {show(node.value)}.")
    return node


def read_sections(path: str) -> dict[str, dict[str, Any]]:
    """section -> key -> value of a file, with any keys. Values outside of sections are omitted. Raises UserError under
    the conditions of `read_file`."""
    sections = {name: node.value for name, node in read_file(path).value.items() if node.is_section}
    return {name: {key: child.value for key, child in inside.items()} for name, inside in sections.items()}


def _text(path: str) -> str:
    try:
        with regular_file(Path(path).expanduser(), "a config file").open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UserError(
                f"{path}: larger than {_MOST_BYTES >> 20} MiB, so it is not a config: write a YAML file's path."
            )
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a config file: {error}") from error


def node_of(value: Any, location: str) -> Node:
    """A tree of Nodes from a value that does not come from YAML (but from a program or TOML)."""
    if isinstance(value, Mapping):
        return Node({str(name): node_of(child, location) for name, child in value.items()}, location)
    if isinstance(value, list | tuple):
        return Node([_plain(child) for child in value], location)
    return Node(_plain(value), location)


def _plain(value: Any) -> Any:
    """A program's value as YAML types: numbers of numpy and torch become numbers, classes become their import paths."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return value


def read_value(text: str, location: str) -> Node:
    """The value of a command-line override. Text that is not valid YAML is a string. Raises UserError if the nesting is
    too deep, or if a number cannot be read."""
    try:
        node = _parse(text, location, lines=False)
    except yaml.YAMLError:
        return Node(text, location, raw=text)
    except (RecursionError, ValueError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise UserError(f"{location}: {text[:40]}... cannot be read as a value: {problem}.") from None
    if node is None:
        return Node(None, location, raw=text)
    if isinstance(node.value, str) and node.value != text.strip() and text.strip()[:1] not in _MARKED:
        node.value = text  # YAML would fold its lines and drop text after a #
    node.raw = text
    return node


def written(value: Any) -> str:
    """A value in YAML, on one line."""
    text = yaml.dump(value, Dumper=_OneLineDumper, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def override(key: str, value: Any) -> str:
    """`key=value` as one word of a command line, with quotes if a shell would split or expand it. Messages propose
    it."""
    text = f"{key}={written(value)}"
    # YAML's quotes inside the word are easier to read than shlex's.
    return f'"{text}"' if "'" in text and not re.search(r'["$`\\!]', text) else shlex.quote(text)


def show(value: Any) -> str:
    """A value in YAML for messages, at most 80 characters."""
    text = written(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _parse(text: str, location: str, lines: bool = True) -> Node | None:
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_size(root)
        return _convert(loader, root, location, lines)
    finally:
        loader.dispose()


def _check_size(root: yaml.Node) -> None:
    """Raise a YAML error for a tree that is too deep or too large. Aliases (`*name`) count as their expansion, because
    a few lines of aliases can expand to more than memory."""
    waiting, count = [(root, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if depth > _DEEPEST or count > _MOST_VALUES:
            problem = (
                f"is nested more than {_DEEPEST} levels deep"
                if depth > _DEEPEST
                else f"has over {_MOST_VALUES:,} values"
            )
            problem += ", with aliases (`*name`) expanded; no config needs so many"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        if isinstance(node, yaml.MappingNode):
            waiting += [(child, depth + 1) for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(child, depth + 1) for child in node.value]


def _convert(loader: Loader, node: yaml.Node, origin: str, lines: bool) -> Node:
    location = f"{origin}:{node.start_mark.line + 1}" if lines else origin
    if not isinstance(node, yaml.MappingNode):
        return Node(loader.construct_object(node, deep=True), location)
    children: dict[str, Node] = {}
    merged: dict[str, Node] = {}  # of `<<: *name`; the mapping's keys override them
    for key_node, value_node in node.value:
        if isinstance(key_node, yaml.ScalarNode) and key_node.value == "<<":
            for merged_node in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if not isinstance(merged_node, yaml.MappingNode):
                    problem = "`<<` merges mappings, as in `<<: *name`"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                merged = {**_convert(loader, merged_node, origin, lines).value, **merged}
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key_node.start_mark)
        key = str(key_node.value)
        if key in children:
            problem = f"`{key}` is set twice (first at {children[key].location}): remove one of them"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        children[key] = _convert(loader, value_node, origin, lines)
        if lines:  # a block's mark is the line of its first child, but the user looks for the key's line
            children[key].location = f"{origin}:{key_node.start_mark.line + 1}"
    return Node({**merged, **children}, location)


def _syntax_message(error: yaml.YAMLError, path: str) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path}: not valid YAML: {error}"
    line = error.problem_mark.line + 1
    problem = " ".join(part for part in (error.context, error.problem) if part)
    hint = " Indent with spaces." if r"'\t'" in problem else ""
    if "mapping values are not allowed" in problem or "block mapping" in problem:
        hint = " Indent all keys of a section equally, and quote a value that contains `: `."
    return f"{path}:{line}: not valid YAML: {problem}.{hint}"
