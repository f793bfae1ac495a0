"""Every `section.key=value` that a message of weft proposes is a key that there is, with a value that it takes.

Messages are looked for in the source: a remedy that a test would have to provoke is looked at, too.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.config.keys import schema_keys, sections
from weft.config.load import build
from weft.config.migrate.trainer import TABLES
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.yaml12 import node_of, override, read_value, written
from weft.errors import UserError

SOURCE = Path(weft.__file__).parent
KEYS = {**schema_keys(RlConfig), **schema_keys(SftConfig)}
SECTIONS = {name.partition(".")[0] for name in KEYS}
_FILLED = "\0"  # what a message fills in
_PROPOSED = re.compile(r"(?<![\w./\0-])([a-z_]+\.[a-z_]+)=(\[[^\]]*\]|\{[^}]*\}|[^\s,;)\]`]+)")
# Names of other trainers, which a page explains.
_FOREIGN = {("config/migrate/tables/verl.md", "data.train_batch_size")}


def proposals(source: str) -> Iterator[tuple[str, str]]:
    """(key, value) of all in the strings of a source."""
    nodes = list(ast.walk(ast.parse(source)))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "override":
            yield from _of_call(*node.args)
        text = "" if id(node) in inside else _text(node)
        for key, value in _PROPOSED.findall(text):
            if key.partition(".")[0] in SECTIONS:
                yield key, value.rstrip(".:'\"")


def _of_call(key: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    """What a call of weft.config.yaml12.override proposes."""
    if isinstance(key, ast.Constant):
        try:
            yield key.value, written(ast.literal_eval(value))
        except ValueError:
            yield key.value, _FILLED


def proposals_of_tables() -> Iterator[tuple[str, str, str]]:
    """(file, key, value) of what is said of other trainers' names, and of the introductions of their pages."""
    say = TABLES.sentences
    texts = {"sentences.yaml": [*say.sft.values(), *say.rl.values()]}
    for trainer in TABLES.trainers:
        texts[f"{trainer.name}.yaml"] = [*trainer.names.values(), *trainer.rl.values()]
        texts[f"{trainer.name}.md"] = [TABLES.introduction(trainer)]
    for file, messages in texts.items():
        for text in messages:
            yield from ((f"config/migrate/tables/{file}", *proposal) for proposal in proposals(repr(text)))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or _FILLED for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def all_proposals() -> list[tuple[str, str, str]]:
    """(file, key, value) of all in the package. Not at import: every worker imports this file, and one runs it."""
    in_source = {
        (str(path.relative_to(SOURCE)), *proposal)
        for path in SOURCE.rglob("*.py")
        for proposal in proposals(path.read_text(encoding="utf-8"))
    }
    return sorted(in_source | set(proposals_of_tables()))


def problem(key: str, value: str) -> str:
    """What is wrong with a proposal; empty where nothing is."""
    if key not in KEYS:
        return f"there is no key {key}"
    if _FILLED in value or "..." in value:
        return ""
    schema: Any = SftConfig if key in schema_keys(SftConfig) else RlConfig
    tree = node_of({name: {} for name in sections(schema)} | {"model": {"path": "m"}, "data": {"path": "d"}}, "here")
    section, _, leaf = key.partition(".")
    tree.value[section].value[leaf] = read_value(value, "here")
    if schema is RlConfig and section != "rl":
        tree.value["rl"].value["reward"] = read_value("[math]", "here")
    try:
        build(tree, schema)
    except UserError as error:
        return str(error)
    return ""


def test_a_proposed_key_takes_the_proposed_value() -> None:
    proposed = [proposal for proposal in all_proposals() if proposal[:2] not in _FOREIGN]
    problems = {proposal: problem(*proposal[1:]) for proposal in proposed}
    assert {proposal: text for proposal, text in problems.items() if text} == {}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"prompt": "question", "completion": "reward_model.ground_truth"},
         "'data.columns={completion: reward_model.ground_truth, prompt: question}'"),
        (["math"], "'data.columns=[math]'"),
        ("a b", "'data.columns=a b'"),
        ({"pattern": "#### (.+)"}, "\"data.columns={pattern: '#### (.+)'}\""),
        ({"a": "it's $HOME"}, None),
        (512, "data.columns=512"),
        (None, "data.columns=null"),
    ],
)  # fmt: skip
def test_an_override_reaches_the_program_as_it_was_meant(value: Any, word: str | None) -> None:
    quoted = override("data.columns", value)
    assert word is None or quoted == word
    passed_on = subprocess.run(["sh", "-c", f"printf '%s' {quoted}"], capture_output=True, text=True, check=True).stdout
    key, _, text = passed_on.partition("=")
    assert key == "data.columns" and node_value(read_value(text, "here")) == value


def node_value(node: Any) -> Any:
    if isinstance(node.value, dict):
        return {name: node_value(child) for name, child in node.value.items()}
    return node.value


def test_no_proposal_breaks_in_a_shell() -> None:
    """Braces, brackets and spaces are quoted: they come from `override`, or stand in quotes."""
    unquoted = []
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.yaml")]:
        tree = ast.parse(path.read_text(encoding="utf-8") if path.suffix == ".py" else repr(path.read_text("utf-8")))
        documented = {
            id(ast.get_docstring(node, clean=False))
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        unquoted += [
            (path.name, match[0])
            for node in ast.walk(tree)
            if (text := _text(node)) and id(text) not in documented
            for match in re.finditer(r"(?<![\w.'\"`])([a-z]+)\.[a-z_]+=[\[{][^\]}]*", text)
            if match[1] in SECTIONS
        ]
    assert unquoted == []


def test_proposals_are_found() -> None:
    """A hundred and more are there; one that is misspelt, or has a value of another type, would be seen."""
    assert len(all_proposals()) > 100
    source = 'say("Set step.max_tokens_per_devise=512."); say(f"Set train.steps={n}, or model.recompute=ful.")'
    parsed = list(proposals(source))
    assert parsed == [
        ("step.max_tokens_per_devise", "512"),
        ("train.steps", "\0"),
        ("model.recompute", "ful"),
    ]
    assert [bool(problem(*proposal)) for proposal in parsed] == [True, False, True]
