"""Runs the fenced blocks of a page of the docs, in their order, in one folder.

The words behind the language say what becomes of a block:

    ```bash run            each command is run and must end well; `weft ...` runs in this process
    ```python run          run in this process
    ```python file=NAME    written to NAME, for later blocks
    ```bash skip: REASON   shown only, and why
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tests.support import forked
from weft import cli

_FENCE = re.compile(r"^```(\w*)[ ]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """language, words: of the opening fence."""

    language: str
    words: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(fence[1], fence[2].strip(), fence[3], text.count("\n", 0, fence.start()) + 1)
        for fence in _FENCE.finditer(text)
    ]


def run(block: Block, folder: Path) -> None:
    """Do what the block's words say; folder is where this process stands."""
    name = re.search(r"\bfile=(\S+)", block.words)
    if name is not None:
        (folder / name[1]).write_text(block.text, encoding="utf-8")
    if re.match(r"run\b", block.words):
        if block.language == "python":
            exec(compile(block.text, f"block at line {block.line}", "exec"), {"__name__": "__main__"})
        else:
            for command in commands(block):
                _command(command)


def commands(block: Block) -> list[str]:
    """The commands of a block: lines, with those that a backslash continues; comments are left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def _command(command: str) -> None:
    """`weft ...`, also behind a pipe or into a file, in this process, which has imported torch; `python ...` in a fork
    of one that has; others in a shell."""
    before, _, last = command.rpartition(" | ")
    last, _, output = last.partition(" > ")
    words = shlex.split(last)
    if words[0] == "weft":
        status, out = _weft(words[1:], _shell(before, stdout=subprocess.PIPE).stdout if before else "")
        if output:
            Path(output).write_text(out, encoding="utf-8")
    elif words[0] == "python" and not before and not output:
        done = forked.run(partial(forked.script, words[1:]), Path.cwd())
        print(done.stdout, done.stderr, sep="", end="")
        status = done.returncode
    else:
        status = _shell(command).returncode
    assert status == 0, f"`{command}` ended with {status}"


def _weft(words: list[str], stdin: str) -> tuple[int, str]:
    """The exit status and the output, which is shown too, of a command that reads `stdin`."""
    out = io.StringIO()
    with patch("sys.stdin", io.StringIO(stdin)), redirect_stdout(out):
        status = cli.main(words)
    print(out.getvalue(), end="")
    return status, out.getvalue()


def _shell(command: str, **options: int) -> subprocess.CompletedProcess[str]:
    python = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; '
    return subprocess.run(["bash", "-c", python + command], check=False, text=True, **options)
