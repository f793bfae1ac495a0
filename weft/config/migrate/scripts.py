"""Reads the options and overrides of a shell script as a config: --lr 1e-5 and optim.lr=1e-5. The script is not
run. In `if` and `case`, the branch counts that a run without arguments would execute."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from weft.config.yaml12 import Node, node_of, read_value
from weft.errors import UserError
from weft.files import regular_file

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?)-([^{}]*))?\})")
_ARRAY = re.compile(r"(\w+)(\+?)=\((.*)", re.DOTALL)
_ELEMENTS = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_PROBE = re.compile(r"\$\([^()`]*\|\|\s*echo\s+(\w+)\s*\)")  # $(command && echo A || echo B): B is used
_PATTERNS = re.compile(r"(?m)^\s*[\w*?.-]+(?:\s*\|\s*[\w*?.-]+)+\)")  # of a branch of `case`: gpu | npu)
_EITHER = "\x1f"  # replaces | in these patterns; elsewhere | ends a command
# read -r -d '' NAME <<EOF ... EOF
_DOCUMENT = re.compile(r"(?ms)^\s*read\b[^\n]*?(\w+) <<-?\s*(['\"]?)(\w+)\2[ \t]*\n(.*?)^\s*\3[ \t]*$")
_PYTHON = re.compile(r"(?ms)python[\d.]* - <<-?\s*(['\"]?)(\w+)\1.*?^\s*\2\s*$")  # a program in the script
_MAX_SUM = 200  # characters of a sum of numbers
_MAX_WORD = 100_000  # characters of a word: nested variables can grow exponentially
# A line is read if it has one of these commands, or begins with an option, as lines of arrays do.
_COMMAND = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|trl|swift|llamafactory-cli|\S+\.py)")
_SUBCOMMANDS = ("trl", "swift", "llamafactory-cli")  # programs whose first argument is the command
_LAUNCHERS = ("torch.distributed", "accelerate", "deepspeed")  # modules that start another program
PROGRAM = "(program)"  # name of the executed script, without .py, or of the subcommand
MODULE = "(module)"  # name of the executed module, with its packages
_LAUNCHED = ("NPROC_PER_NODE", "NNODES")  # variables with the number of ranks that a command starts
# $(expr 16 / $N) and $((A * (B + 1)))
_SUM = re.compile(r"\$\(\s*expr\s+([^()`]+)\)|\$\(\(((?:[^()`]|\([^()`]*\))+)\)\)")
_NAME_IN_SUM = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OPERATIONS = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
    ast.Mod: int.__mod__,
}


def read_script(path: str) -> Node:
    """name -> value of all options and overrides of commands that start Python. Variables are replaced by their values
    in the script, or by their defaults (`${NAME:-default}`); unknown ones stay. Raises UserError if the script cannot
    be read."""
    try:
        words_by_name = _read_words(regular_file(Path(path), "a shell script").read_text(encoding="utf-8"))
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a shell script: {error}") from error
    nodes = {name: [read_value(word, path) for word in words] for name, words in words_by_name.items()}
    return Node(
        {
            name: values[0] if len(values) == 1 else node_of([value.value for value in values] or True, path)
            for name, values in nodes.items()
        },
        path,
    )


def _read_words(text: str) -> dict[str, list[str]]:
    """The last values of each option and override. Raises ValueError for text that a shell cannot read."""
    variables, branches = {"HOME": os.path.expanduser("~")}, _Branches()
    words_by_name: dict[str, list[str]] = {}
    arrays, passed = dict[str, list[str]](), set[str]()
    array = ""  # the name of the array that the current lines fill
    text = _PYTHON.sub("", re.sub(r"(?m)(^|\s)#.*$", "", text))
    text = _DOCUMENT.sub(lambda match: f"{match[1]}={shlex.quote(match[4])}", text)
    text = _PROBE.sub(r"\1", text)
    text = _PATTERNS.sub(lambda match: re.sub(r"\s*\|\s*", _EITHER, match[0]), text)
    for words in _lines(text):
        words = _computed(words, variables)
        if not array:
            words = [*branches.command_in_branch(words, variables)]
            if words and (opening := _ARRAY.fullmatch(words[0])):
                array = opening[1]
                arrays[array] = arrays.get(array, []) if opening[2] else []
                words[0] = opening[3]
        if array:
            closes = bool(words) and words[-1].count(")") > words[-1].count("(")
            if closes:
                words[-1] = words[-1].removesuffix(")")
            arrays[array] += [part for word in words if word for part in _parts(word, variables)]
            array = "" if closes else array
            continue
        if arguments := _arguments(words, variables, arrays):
            passed |= {name for word in words for name in _ELEMENTS.findall(word)}
            words_by_name |= _values(arguments)
    # An array that no command uses has no effect, unless a command uses it that is not read here, as in a function.
    unread = [name for name in arrays if name not in passed and name in _ELEMENTS.findall(text)]
    words_by_name = dict(_values([word for name in unread for word in arrays[name]])) | words_by_name
    ranks = {name.lower(): [variables[name]] for name in _LAUNCHED if variables.get(name, "").isdigit()}
    return ranks | words_by_name if words_by_name else {}


def _computed(words: Sequence[str], variables: dict[str, str]) -> list[str]:
    """The words with the results of `$(expr 16 / $N)` and `$((16 / N))`, if all numbers are known."""

    def result(match: re.Match[str]) -> str:
        text = (match[1] or match[2]).replace("\\", "").replace("/", "//").strip()
        text = _NAME_IN_SUM.sub(lambda name: variables.get(name[1], name[0]), text)
        if not re.fullmatch(r"[-+*/%()\d\s]+", text) or len(text) > _MAX_SUM:
            return match[0]
        try:
            return str(_calculated(ast.parse(text, mode="eval").body))
        except (SyntaxError, TypeError, ArithmeticError):
            return match[0]

    out = list[str]()
    for word in words:
        if out and "$(" in out[-1] and out[-1].count("(") > out[-1].count(")"):
            out[-1] += f" {word}"
        else:
            out.append(word)
    return [_SUM.sub(result, word) for word in out]


def _calculated(node: ast.expr) -> int:
    """The value of a sum of whole numbers. Raises TypeError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_calculated(node.left), _calculated(node.right))
    raise TypeError


class _Branches:
    """The `if` and `case` blocks around a line. blocks: for each, outermost first: [the block's word (None for `if`),
    whether a previous branch was taken, whether the current branch is taken]."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str | None, bool, bool]] = []

    def command_in_branch(self, words: Sequence[str], variables: dict[str, str]) -> Sequence[str]:
        """The words of a line that is a command in a taken branch; [] for other lines."""
        if not words:
            return []
        first, tail = words[0], words[1:]
        block, done, _ = self.blocks[-1] if self.blocks else (None, False, True)
        if first == "if":
            self.blocks.append((None, holds := _holds(tail, variables), holds))
        elif first == "case":
            self.blocks.append((_without(tail[0], variables) if tail else "", False, False))
        elif first in ("fi", "esac") and self.blocks:
            self.blocks.pop()
        elif first == "elif" and self.blocks:
            holds = not done and _holds(tail, variables)
            self.blocks[-1] = (block, done or holds, holds)
        elif first == "else" and self.blocks:
            self.blocks[-1] = (block, True, not done)
            return self.command_in_branch(tail, variables)
        elif block is not None and first.endswith(")") and first != ")" and "(" not in first:
            holds = not done and any(fnmatchcase(block, pattern) for pattern in first[:-1].split(_EITHER))
            self.blocks[-1] = (block, done or holds, holds)
            return self.command_in_branch(tail, variables)
        elif first == "then":
            return self.command_in_branch(tail, variables)
        else:
            return words if all(is_taken for _, _, is_taken in self.blocks) else []
        return []


def _holds(words: Sequence[str], variables: dict[str, str]) -> bool:
    """Whether a test holds, as in [ "$A" = fsdp ]; False if that is known only during a run of the script."""
    if len(words) < 3 or words[0] not in ("[", "[[", "test"):
        return False
    inside = [_without(word, variables) for word in (words[1:] if words[0] == "test" else words[1:-1])]
    negated, inside = inside[0] == "!", inside[1:] if inside[0] == "!" else inside
    if len(inside) == 2 and inside[0] in ("-z", "-n"):
        return (bool(inside[1]) == (inside[0] == "-n")) != negated
    return len(inside) == 3 and _compares(*inside) != negated


def _compares(first: str, operator: str, second: str) -> bool:
    if operator in ("=", "=="):
        return fnmatchcase(first, second)
    if operator == "!=":
        return not fnmatchcase(first, second)
    number = {
        "-eq": int.__eq__,
        "-ne": int.__ne__,
        "-gt": int.__gt__,
        "-ge": int.__ge__,
        "-lt": int.__lt__,
        "-le": int.__le__,
    }
    if operator in number and first.lstrip("-").isdigit() and second.lstrip("-").isdigit():
        return bool(number[operator](int(first), int(second)))
    return False


def _without(word: str, variables: dict[str, str]) -> str:
    """A word with its variables substituted, unknown ones by nothing, as in a shell."""
    return _VARIABLE.sub(lambda match: match[4] or "", _expanded(word, variables))


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each command, over continued lines. text: without comments."""
    text = text.replace("\\\n", " ")
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


def _arguments(words: Sequence[str], variables: dict[str, str], arrays: Mapping[str, list[str]]) -> list[str]:
    """The words of a line that runs a program, with the elements of arrays; [] for others. Assignments are put into
    `variables`."""
    remaining = [word for word in words if word != "export"]
    command = next((index for index, word in enumerate(remaining) if _COMMAND.fullmatch(word)), len(remaining) - 1)
    if any("$(" in word or "`" in word for word in remaining[: command + 1]):
        return []  # the output of a command is unknown; as an option's value it stays unchanged
    while remaining and (assignment := _ASSIGNMENT.fullmatch(remaining[0])):
        variables[assignment[1]] = _expanded(assignment[2], variables)
        remaining = remaining[1:]
    if "--" in remaining:  # ray job submit ... -- python3 train.py ...
        remaining = remaining[remaining.index("--") + 1 :]
    expanded = list[str]()
    for word in remaining:
        elements = _ELEMENTS.fullmatch(word)
        expanded += arrays.get(elements[1], []) if elements else _parts(word, variables)
    if expanded[:1] == ["uv"]:  # uv run --extra vllm python3 -m ...: uv's options are not the trainer's
        start = next((index for index, word in enumerate(expanded) if _COMMAND.fullmatch(word)), 0)
        expanded = expanded[start:]
    options = bool(expanded) and expanded[0].startswith("--")
    return expanded if options or any(_COMMAND.fullmatch(word) for word in expanded) else []


def _parts(word: str, variables: dict[str, str]) -> list[str]:
    """A word with its variables substituted; a word that is a single variable may become several."""
    if word in ("$@", "$*") or "[@]" in word or "[*]" in word:
        return []
    return shlex.split(_expanded(word, variables)) if _VARIABLE.fullmatch(word) else [_expanded(word, variables)]


def _expanded(word: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[4]
        text = variables.get(name)
        unset = text is None or (not text and match[3])  # ${NAME:-default} is the default for "", too
        return match[0] if unset and default is None else str(default if unset else text)

    for _ in range(4):  # a default may contain another variable
        word = _VARIABLE.sub(value, word)
        if len(word) > _MAX_WORD:
            raise ValueError(f"with its variables replaced, a word has over {_MAX_WORD:,} characters")
    return word


def _values(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, values) of `--name value ...`, `--name=value`, `name.name=value` and `+name=value`."""
    name, arguments, before = "", list[str](), ""
    runs = False  # whether the program's name has occurred: a later .py is an option's value
    for word in words:
        if before in ("-m", "--module") and not runs:
            runs = not word.startswith(_LAUNCHERS)
            if runs:
                yield MODULE, [word]
                yield PROGRAM, [word.rpartition(".")[2]]
            name, before = "", word
            continue
        subcommand = before.rpartition("/")[2] in _SUBCOMMANDS and not word.startswith("-")
        if not runs and (word.endswith(".py") or subcommand):
            runs = True
            yield PROGRAM, [word.rpartition("/")[2].removesuffix(".py")]
            if name:
                yield name, arguments
            name, before = "", word
            continue
        before = word
        if word.startswith("--"):
            if name:
                yield name, arguments
            name, _, value = word[2:].partition("=")
            name, arguments = name.replace("-", "_"), [value] if value else []
        elif override := _OVERRIDE.fullmatch(word):
            yield override[1], [override[2]]
        elif not runs and (word == "-m" or _COMMAND.fullmatch(word)):
            if name:
                yield name, arguments
            name = ""  # the options of a launcher end here
        elif name:
            arguments.append(word)
    if name:
        yield name, arguments
