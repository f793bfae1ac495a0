"""Reads the options and overrides of a shell script as a config: --lr 1e-5 and optim.lr=1e-5. The script is not
run. Of `if` and `case` the branch counts that a run without arguments would take."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from weft.config.yaml12 import Node, node_of, read_value
from weft.errors import UserError
from weft.files import regular_file

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")
_MOST = 100_000  # characters of a word: variables that hold variables can grow exponentially
# A line is read if it has one of these commands, or begins with an option, as lines of arrays do.
_COMMAND = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|\S+\.py)")


def read_script(path: str) -> Node:
    """name -> value of all options and overrides of commands that start Python. Variables that the script sets are
    substituted, others by their defaults (`${NAME:-default}`); unknown ones stay. Raises UserError if the script cannot
    be read."""
    try:
        found = _found(regular_file(Path(path), "a shell script").read_text(encoding="utf-8"))
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a shell script: {error}") from error
    values = {name: [read_value(word, path).value for word in given] for name, given in found.items()}
    return node_of({name: given[0] if len(given) == 1 else given or True for name, given in values.items()}, path)


def _found(text: str) -> dict[str, list[str]]:
    """The last values of each option and override. Raises ValueError for text that no shell would read."""
    variables, branches = {"HOME": os.path.expanduser("~")}, _Branches()
    found: dict[str, list[str]] = {}
    for words in _lines(text):
        found |= _values(_arguments(branches.rest(words, variables), variables))
    return found


class _Branches:
    """The `if` and `case` blocks around a line. blocks: [the block's word (None for `if`), whether a branch of it was
    taken before, whether the present branch is taken] of each, outermost first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str | None, bool, bool]] = []

    def rest(self, words: Sequence[str], variables: dict[str, str]) -> Sequence[str]:
        """The words of a line that are a command in a branch that is taken; [] for others."""
        if not words:
            return []
        first, rest = words[0], words[1:]
        block, done, _ = self.blocks[-1] if self.blocks else (None, False, True)
        if first == "if":
            self.blocks.append((None, holds := _holds(rest, variables), holds))
        elif first == "case":
            self.blocks.append((_without(rest[0], variables) if rest else "", False, False))
        elif first in ("fi", "esac") and self.blocks:
            self.blocks.pop()
        elif first == "elif" and self.blocks:
            holds = not done and _holds(rest, variables)
            self.blocks[-1] = (block, done or holds, holds)
        elif first == "else" and self.blocks:
            self.blocks[-1] = (block, True, not done)
            return self.rest(rest, variables)
        elif block is not None and first.endswith(")") and "(" not in first:
            holds = not done and fnmatchcase(block, first[:-1])
            self.blocks[-1] = (block, done or holds, holds)
            return self.rest(rest, variables)
        elif first == "then":
            return self.rest(rest, variables)
        else:
            return words if all(taken for _, _, taken in self.blocks) else []
        return []


def _holds(words: Sequence[str], variables: dict[str, str]) -> bool:
    """Whether a test holds, as in [ "$A" = fsdp ]; False for what is known only where the script runs."""
    if len(words) < 3 or words[0] not in ("[", "[[", "test"):
        return False
    inside = [_without(word, variables) for word in (words[1:] if words[0] == "test" else words[1:-1])]
    negated, inside = inside[0] == "!", inside[1:] if inside[0] == "!" else inside
    if len(inside) == 2 and inside[0] in ("-z", "-n"):
        return (bool(inside[1]) == (inside[0] == "-n")) != negated
    return len(inside) == 3 and _compares(*inside) != negated


def _compares(left: str, operator: str, right: str) -> bool:
    if operator in ("=", "=="):
        return fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatchcase(left, right)
    number = {
        "-eq": int.__eq__,
        "-ne": int.__ne__,
        "-gt": int.__gt__,
        "-ge": int.__ge__,
        "-lt": int.__lt__,
        "-le": int.__le__,
    }
    if operator in number and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
        return bool(number[operator](int(left), int(right)))
    return False


def _without(word: str, variables: dict[str, str]) -> str:
    """A word with its variables substituted, those that are not known by nothing, as a shell does."""
    return _VARIABLE.sub(lambda match: match[3] or "", _expanded(word, variables))


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each command, over continued lines and without comments."""
    text = re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")
    text = re.sub(r"(?m)\s#.*$", "", text)
    words = shlex.shlex(text, posix=True, punctuation_chars="\n;&|")
    words.whitespace, words.whitespace_split, words.commenters = " \t\r", True, ""
    line: list[str] = []
    for word in words:
        if word.strip("\n;&|"):
            line.append(word)
        elif line:
            yield line
            line = []
    yield line


def _arguments(words: Sequence[str], variables: dict[str, str]) -> list[str]:
    """The words of a line that runs a program or fills an array; [] for others. Assignments are put into
    `variables`."""
    rest = [word for word in words if word != "export"]
    if rest and (array := re.match(r"\w+\+?=\((.*)", rest[0], re.DOTALL)):
        rest[0] = array[1]
        words = rest = [*rest[:-1], rest[-1].removesuffix(")")]
    elif any("$(" in word or "`" in word for word in rest):
        return []  # the output of a command is not known here
    while rest and (assignment := _ASSIGNMENT.fullmatch(rest[0])):
        variables[assignment[1]] = _expanded(assignment[2], variables)
        rest = rest[1:]
    if "--" in rest:  # ray job submit ... -- python3 train.py ...
        rest = rest[rest.index("--") + 1 :]
    expanded = [part for word in rest for part in _parts(word, variables)]
    options = bool(expanded) and expanded[0].startswith("--")
    return expanded if options or any(_COMMAND.fullmatch(word) for word in expanded) else []


def _parts(word: str, variables: dict[str, str]) -> list[str]:
    """A word with its variables substituted; a word that is a single variable may become several."""
    if word in ("$@", "$*") or "[@]" in word or "[*]" in word:
        return []
    return shlex.split(_expanded(word, variables)) if _VARIABLE.fullmatch(word) else [_expanded(word, variables)]


def _expanded(word: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        return variables.get(name, match[0] if default is None else default)

    for _ in range(4):  # a default may name another variable
        word = _VARIABLE.sub(value, word)
        if len(word) > _MOST:
            raise ValueError(f"with its variables put in, a word has over {_MOST:,} characters")
    return word


def _values(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, values) of `--name value ...`, `--name=value`, `name.name=value` and `+name=value`."""
    name, given = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, given
            name, _, value = word[2:].partition("=")
            name, given = name.replace("-", "_"), [value] if value else []
        elif override := _OVERRIDE.fullmatch(word):
            yield override[1], [override[2]]
        elif word == "-m" or _COMMAND.fullmatch(word):
            if name:
                yield name, given
            name = ""  # the options of a launcher end
        elif name:
            given.append(word)
    if name:
        yield name, given
