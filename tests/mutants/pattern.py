"""Finds a piece of Python in a syntax tree, whatever its variables are called and however it is laid out.

A pattern is an expression, or one or more statements. In it

- a name that the module does not define (a variable of the function) stands for any name, always for the same one;
- an attribute or keyword that no longer occurs in the module stands for any other, always for the same one;
- `...` among arguments, elements, operands or statements stands for any number of them; in a call also for all keywords
  that the pattern does not name. `...` in the replacement puts them back, in the same order.

The strictest reading that matches counts: names as they are written, then variables under other names, then variables
that have become expressions (as arguments do where a function is inlined).
"""

from __future__ import annotations

import ast
import builtins
import copy
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

Node = ast.expr | list[ast.stmt]
Function = ast.FunctionDef | ast.AsyncFunctionDef
EXACT, RENAMED, INLINED = range(3)  # how far names of a match may be from those of the pattern
_BUILTIN = frozenset(vars(builtins))


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Function]]:
    """(Qualified name, function) of every function, those within others too, in the order of the source."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{outer}.{node.name}".lstrip(".")
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, name)
        else:
            yield from functions(node, outer)


@dataclass
class Bindings:
    """What the parts of a pattern stand for in one match."""

    level: int
    fixed: frozenset[str]  # names that stand for themselves
    attributes: frozenset[str]  # attributes and keywords of the module
    names: dict[str, ast.expr] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # attributes
    runs: list[list[Any]] = field(default_factory=list)  # for each `...` of the pattern, in order
    keywords: list[list[ast.keyword]] = field(default_factory=list)  # for each call with `...`, in order

    def bind_name(self, name: str, node: ast.AST) -> bool:
        """Whether the name of a pattern may stand for this node."""
        if isinstance(node, ast.Name) and node.id == name:
            return isinstance(self.names.setdefault(name, node), ast.Name) and _same(self.names[name], node)
        if self.level == EXACT or name in (self.fixed if self.level == RENAMED else _BUILTIN):
            return False
        if not isinstance(node, ast.Name if self.level == RENAMED else ast.expr):
            return False
        assert isinstance(node, ast.expr)
        if name not in self.names:
            if self.level == RENAMED and any(_same(bound, node) for bound in self.names.values()):
                return False
            self.names[name] = node
        return _same(self.names[name], node)

    def bind_attribute(self, name: str | None, candidate: str | None) -> bool:
        """Whether an attribute or keyword of a pattern may stand for this one."""
        if name == candidate:
            return True
        if self.level == EXACT or name is None or candidate is None or name in self.attributes:
            return False
        return self.renamed.setdefault(name, candidate) == candidate

    def save(self) -> tuple[Any, ...]:
        return dict(self.names), dict(self.renamed), list(self.runs), list(self.keywords)

    def restore(self, saved: tuple[Any, ...]) -> None:
        names, renamed, runs, keywords = saved
        self.names, self.renamed, self.runs, self.keywords = dict(names), dict(renamed), list(runs), list(keywords)


def parse(text: str) -> Node:
    """An expression where the text is one, else statements. SyntaxError where it is neither."""
    try:
        return ast.parse(f"({text}\n)", mode="eval").body
    except SyntaxError:
        return ast.parse(textwrap.dedent(text)).body


def parse_statements(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text)).body


def _is_ellipsis(node: object) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is ...


def _same(first: ast.AST, second: ast.AST) -> bool:
    return _matches(first, second, Bindings(EXACT, frozenset(), frozenset()), plain=True)


def _matches(pattern: Any, node: Any, bindings: Bindings, *, plain: bool = False) -> bool:
    """plain: no part of the pattern stands for anything else."""
    if isinstance(pattern, list):
        return isinstance(node, list) and _match_lists(pattern, node, bindings, plain)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and bool(pattern == node)
    if isinstance(pattern, ast.expr_context):
        return True
    if not plain and isinstance(pattern, ast.Name):
        return bindings.bind_name(pattern.id, node)
    if type(pattern) is not type(node):
        return False
    for name, value in ast.iter_fields(pattern):
        candidate = getattr(node, name)
        if name in ("kind", "type_comment"):
            continue
        if not plain and name == "keywords" and isinstance(pattern, ast.Call) and _has_ellipsis(pattern):
            if not _match_keywords(value, candidate, bindings):
                return False
        elif not plain and isinstance(pattern, ast.arg) and name == "arg":
            if not bindings.bind_name(value, ast.Name(candidate)):
                return False
        elif not plain and isinstance(pattern, ast.Attribute | ast.keyword) and name in ("attr", "arg"):
            if not bindings.bind_attribute(value, candidate):
                return False
        elif not _matches(value, candidate, bindings, plain=plain):
            return False
    return True


def _match_lists(patterns: list[Any], nodes: list[Any], bindings: Bindings, plain: bool) -> bool:
    if not patterns:
        return not nodes
    if not plain and _is_ellipsis(patterns[0]):
        for count in range(len(nodes) + 1):
            saved = bindings.save()
            bindings.runs.append(nodes[:count])
            if _match_lists(patterns[1:], nodes[count:], bindings, plain):
                return True
            bindings.restore(saved)
        return False
    return (
        bool(nodes)
        and _matches(patterns[0], nodes[0], bindings, plain=plain)
        and _match_lists(patterns[1:], nodes[1:], bindings, plain)
    )


def _has_ellipsis(call: ast.Call) -> bool:
    return any(_is_ellipsis(argument) for argument in call.args)


def _match_keywords(patterns: list[ast.keyword], nodes: list[ast.keyword], bindings: Bindings) -> bool:
    unmatched = list(nodes)
    for pattern in patterns:
        match = next((node for node in unmatched if _matches(pattern, node, bindings)), None)
        if match is None:
            return False
        unmatched.remove(match)
    bindings.keywords.append(unmatched)
    return True


@dataclass(frozen=True)
class Match:
    """Where a pattern was found. nodes: an expression, or statements in a row."""

    nodes: Sequence[ast.expr | ast.stmt]
    bindings: Bindings


@lru_cache(maxsize=8)
def names_of(tree: ast.Module) -> tuple[frozenset[str], frozenset[str]]:
    """(Names that the module defines, and builtin ones; attributes and keywords that occur in it)."""
    fixed, attributes = set(_BUILTIN), set[str]()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            fixed.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            fixed |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            fixed.add(node.id)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            attributes.add(node.arg)
    return frozenset(fixed), frozenset(attributes)


def find(pattern: Node, scope: ast.AST, module: ast.Module, furthest: int = INLINED) -> list[Match]:
    """The matches within this tree at the first level that has any, in the order of the source."""
    fixed, attributes = names_of(module)
    for level in range(furthest + 1):
        matches = []
        for nodes in _candidates(pattern, scope):
            bindings = Bindings(level, fixed, attributes)
            if _matches(pattern, nodes if isinstance(pattern, list) else nodes[0], bindings):
                matches.append(Match(nodes, bindings))
        if matches:
            return matches
    return []


def is_like(pattern: ast.AST, node: ast.AST, module: ast.Module) -> bool:
    """Whether the pattern matches this node, under whatever names of variables."""
    return any(_matches(pattern, node, Bindings(level, *names_of(module))) for level in (EXACT, RENAMED))


def anonymous(node: ast.AST, module: ast.Module) -> str:
    """A text that is the same for two nodes that differ in the names of variables only."""
    fixed, _ = names_of(module)
    numbers = dict[str, str]()
    twin = copy.deepcopy(node)
    for part in ast.walk(twin):
        if isinstance(part, ast.Name) and part.id not in fixed:
            part.id = numbers.setdefault(part.id, str(len(numbers)))
        elif isinstance(part, ast.arg):
            part.arg = numbers.setdefault(part.arg, str(len(numbers)))
    return ast.dump(twin)


def _candidates(pattern: Node, scope: ast.AST) -> Iterator[list[Any]]:
    for node in ast.walk(scope):
        if not isinstance(pattern, list):
            if isinstance(node, ast.expr):
                yield [node]
            continue
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                for first in range(len(statements) - len(pattern) + 1):
                    yield statements[first : first + len(pattern)]


class _Fill(ast.NodeTransformer):
    """Puts what a match has bound into its replacement."""

    def __init__(self, bindings: Bindings) -> None:
        self.bindings, self.runs, self.keywords = bindings, iter(bindings.runs), iter(bindings.keywords)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        further = next(self.keywords, []) if _has_ellipsis(node) else []
        self.generic_visit(node)
        node.keywords.extend(further)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.bindings.names.get(node.id, node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self.bindings.renamed.get(node.attr, node.attr)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        node.arg = self.bindings.renamed.get(node.arg or "", node.arg)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = self.fill(value)
            elif isinstance(value, ast.AST):
                new = self.visit(value)
                assert new is not None
                setattr(node, next(name for name, child in ast.iter_fields(node) if child is value), new)
        return node

    def fill(self, nodes: list[Any]) -> list[Any]:
        out: list[Any] = []
        for node in nodes:
            if _is_ellipsis(node):
                out.extend(next(self.runs, [node]))
            else:
                out.append(self.visit(node) if isinstance(node, ast.AST) else node)
        return out


def filled(replacement: Node, bindings: Bindings) -> Node:
    """The replacement of one match, with the names and runs that the match found."""
    fill = _Fill(bindings)
    new = copy.deepcopy(replacement)
    return fill.fill(new) if isinstance(new, list) else fill.visit(new)


def unknown_names(replacement: Node, bindings: Bindings, scope: ast.AST) -> set[str]:
    """Names of a replacement that neither its match, the module nor this function knows."""
    in_scope = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name)}
    in_scope |= {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}
    inside = replacement if isinstance(replacement, list) else [replacement]
    named = {node for part in inside for node in ast.walk(part) if isinstance(node, ast.Name)}
    stored = {node.id for node in named if isinstance(node.ctx, ast.Store)}
    return {node.id for node in named} - stored - in_scope - set(bindings.names) - bindings.fixed


def write(source: str, module: ast.Module, match: Match, new: Node) -> str:
    """The source with the new nodes in place of those of the match."""
    first, last = match.nodes[0], match.nodes[-1]
    if isinstance(new, list):
        text = "\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in new) or "pass"
        text = textwrap.indent(text, " " * first.col_offset).lstrip()
    else:
        formatted = _formatted_text_around(module, first)
        if formatted is not first:  # nodes within f-strings have no place of their own in Python 3.11
            new = _replaced(copy.deepcopy(formatted), formatted, first, new)
            first = last = formatted
        text = f"({ast.unparse(ast.fix_missing_locations(new))})"
    assert last.end_lineno is not None and last.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    data = source.encode()
    return (data[:begin] + text.encode() + data[end:]).decode()


def _formatted_text_around(module: ast.Module, node: ast.AST) -> Any:
    """The outermost f-string that holds the node, or the node."""

    def search(parent: ast.AST, outer: ast.AST | None) -> ast.AST | None:
        if parent is node:
            return outer or node
        inside = outer or (parent if isinstance(parent, ast.JoinedStr) else None)
        return next((hit for child in ast.iter_child_nodes(parent) if (hit := search(child, inside))), None)

    return search(module, None) or node


def _replaced(twin: Any, tree: ast.AST, old: ast.AST, new: ast.expr) -> Any:
    """`twin`, a copy of `tree`, with `new` where `tree` has `old`."""
    number = next(number for number, node in enumerate(ast.walk(tree)) if node is old)
    target = list(ast.walk(twin))[number]
    for node in ast.walk(twin):
        for name, value in ast.iter_fields(node):
            if value is target:
                setattr(node, name, new)
            elif isinstance(value, list):
                value[:] = [new if part is target else part for part in value]
    return twin
