"""Mutants that nobody thought of: drawn from a seed, some for each operator, over the modules of weft.

A site is (module, function, operator, ordinal): the ordinal-th node of the function's syntax tree that the operator
changes. Nothing of the source text is in it, so that a site outlives edits elsewhere. The seed gives every site a number
from its syntax, in which neither the module nor names of variables count; for each operator the sites with the lowest
numbers are drawn, one of a module: an edit moves few draws, and a file that moves none.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutants import data, models, pattern, rare, rl, step, storage
from tests.mutants.mutant import Mutant
from tests.mutants.pattern import Function

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).parent / "equivalent.json"
BY_HAND: tuple[Mutant, ...] = (
    *step.MUTANTS,
    *data.MUTANTS,
    *models.MUTANTS,
    *storage.MUTANTS,
    *rl.MUTANTS,
    *rare.MUTANTS,
)
COUNT, SEED = 150, 0
MOST_SECONDS, MOST_FILES = 60.0, 5  # of the tests of one mutant, as recorded
# Modules without a site: planted bugs are no product; vLLM's side runs in an environment of its own; of the rest, code
# is a script of the generated documentation.
LEFT_OUT = ("verification/bugs/", "rollout/vllm/", "config/reference.py", "config/migrate/pages.py")
# Tests of the repository itself, and those that try everything at once.
EXCLUDED = (
    "project/test_containers.py",
    "project/test_house.py",
    "project/test_names.py",
    "project/test_mutants.py",
    "project/test_docs.py",
    "project/test_examples.py",
    "project/test_benchmarks.py",
    "faults/test_faults.py",
    "faults/test_rl_faults.py",
    "hostile/test_fuzz_inputs.py",
)


@dataclass(frozen=True)
class Edit:
    """Text in place of a node."""

    node: ast.expr | ast.stmt
    text: str


# ---------------------------------------------------------------- operators: a node -> what stands in its place


def _comparison(node: ast.AST) -> ast.AST | None:
    swapped: dict[type[ast.cmpop], type[ast.cmpop]] = {
        ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    }  # fmt: skip
    if not isinstance(node, ast.Compare):
        return None
    return ast.Compare(node.left, [swapped[type(node.ops[0])](), *node.ops[1:]], node.comparators)


def _arithmetic(node: ast.AST) -> ast.AST | None:
    swapped: dict[type[ast.operator], type[ast.operator]] = {
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
        ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    }  # fmt: skip
    if isinstance(node, ast.AugAssign) and type(node.op) in swapped and not _is_text(node.value):
        return ast.AugAssign(node.target, swapped[type(node.op)](), node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in swapped or _is_text(node.left) or _is_text(node.right):
        return None
    return ast.BinOp(node.left, swapped[type(node.op)](), node.right)


def _boolean(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BoolOp):
        return None
    return ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)


def _operand(node: ast.AST) -> ast.AST | None:
    return node.values[-1] if isinstance(node, ast.BoolOp) else None


def _slice(node: ast.AST) -> ast.AST | None:
    constant = ast.Constant(1)
    if not isinstance(node, ast.Slice):
        return None
    if node.upper is not None:
        return ast.Slice(node.lower, ast.BinOp(node.upper, ast.Sub(), constant), node.step)
    return None if node.lower is None else ast.Slice(ast.BinOp(node.lower, ast.Add(), constant), None, node.step)


def _statement(node: ast.AST) -> ast.AST | None:
    removed = (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or (
        isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    )
    return ast.Pass() if removed or isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Delete) else None


def _arguments(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2 or _name(node.func) in ("isinstance", "hasattr", "getattr"):
        return None
    first, second, *further = node.args
    if any(isinstance(arg, ast.Starred) for arg in (first, second)) or ast.dump(first) == ast.dump(second):
        return None
    return ast.Call(node.func, [second, first, *further], node.keywords)


def _keyword(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or not node.keywords or node.keywords[0].arg in (None, "strict", "non_blocking"):
        return None  # `strict` is an assertion
    return ast.Call(node.func, node.args, node.keywords[1:])


def _constant(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant):
        return None
    if isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node.value, int):
        return ast.Constant(node.value + 1)
    return ast.Constant(node.value * 2 or 1.0) if isinstance(node.value, float) else None


def _condition(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.If | ast.IfExp | ast.While):
        return None
    return ast.UnaryOp(ast.Not(), node.test)


def _filter(node: ast.AST) -> ast.AST | None:
    return ast.Constant(True) if isinstance(node, ast.comprehension) and node.ifs else None


def _sign(node: ast.AST) -> ast.AST | None:
    signs = (ast.USub, ast.Not, ast.Invert)
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, signs) else None


def _function(node: ast.AST) -> ast.AST | None:
    pairs = ("min max", "any all", "amin amax", "floor ceil", "zeros ones", "argmin argmax", "startswith endswith")
    swapped = {a: b for pair in pairs for a, b in (pair.split(), pair.split()[::-1])} | {"sorted": "list"}
    if not isinstance(node, ast.Call) or _name(node.func) not in swapped:
        return None
    replacement = swapped[_name(node.func)]
    if _name(node.func) == "sorted":
        return ast.Call(ast.Name(replacement), node.args, [])
    func = ast.Name(replacement) if isinstance(node.func, ast.Name) else ast.Attribute(node.func.value, replacement)  # type: ignore[attr-defined]
    return ast.Call(func, node.args, node.keywords)


OPERATORS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "comparison": _comparison, "arithmetic": _arithmetic, "and / or": _boolean, "operand left out": _operand,
    "slice off by one": _slice, "statement removed": _statement, "arguments swapped": _arguments,
    "keyword left out": _keyword, "constant": _constant, "condition negated": _condition, "filter left out": _filter,
    "sign left out": _sign, "other function": _function,
}  # fmt: skip


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


# ---------------------------------------------------------------- sites


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function that run when it is called, in the order of the source. Without annotations, functions
    within, and what only words a message: assertions, errors, formatted text."""
    for name, value in ast.iter_fields(node):
        if name in (
            "annotation",
            "returns",
            "args" if isinstance(node, Function | ast.Lambda) else "",
            "decorator_list",
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            no_site = (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            if isinstance(child, ast.AST) and not isinstance(child, no_site):
                yield child
                yield from _nodes(child)


Sites = dict[tuple[str, str], list[Edit]]


def sites_of(module: ast.Module) -> Sites:
    """(Function, operator) -> what the operator can do to the functions of this name, in the order of the source."""
    out: Sites = defaultdict(list)
    for function, body in pattern.functions(module):
        for node in _nodes(body):
            for operator, change in OPERATORS.items():
                new = change(node)
                if new is None:
                    continue
                if isinstance(node, ast.If | ast.IfExp | ast.While):
                    edit = Edit(node.test, f"({ast.unparse(new)})")
                elif isinstance(node, ast.comprehension):
                    edit = Edit(node.ifs[0], ast.unparse(new))
                elif isinstance(node, ast.expr) and not isinstance(node, ast.Slice):
                    edit = Edit(node, f"({ast.unparse(new)})")
                else:
                    assert isinstance(node, ast.stmt | ast.Slice)
                    edit = Edit(node, ast.unparse(new))
                out[function, operator].append(edit)
    return out


@dataclass(frozen=True)
class Drawn:
    """A site. file: below weft/. tests: files that run the function, separated by spaces."""

    file: str
    function: str
    operator: str
    ordinal: int
    tests: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}: {self.operator} {self.ordinal}"

    def plant(self, package: Path) -> None:
        """Write the change into this copy of weft/. ValueError where there is no such site."""
        path = package / self.file
        source = path.read_bytes()
        sites = sites_of(ast.parse(source))[self.function, self.operator]
        if self.ordinal >= len(sites):
            raise ValueError(f"{self.name}: there are {len(sites)} such sites")
        changed = _written(source, sites[self.ordinal])
        ast.parse(changed)
        path.write_bytes(changed)

    def site(self) -> tuple[ast.Module, Edit]:
        """(The module, the change at the site) as they are in the repository."""
        module = ast.parse((ROOT / "weft" / self.file).read_bytes())
        return module, sites_of(module)[self.function, self.operator][self.ordinal]

    def shown(self) -> str:
        """The line, and what it becomes."""
        _, edit = self.site()
        return f"line {edit.node.lineno}: {ast.unparse(edit.node)} -> {edit.text}"


def _written(source: bytes, edit: Edit) -> bytes:
    lines, node = source.splitlines(keepends=True), edit.node
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None and node.end_col_offset is not None
    first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    return source[:first] + edit.text.encode() + source[last:]


# ---------------------------------------------------------------- draws


def draw(count: int = COUNT, seed: int = SEED) -> tuple[Drawn, ...]:
    """As many sites, an even share for each operator; only functions that some test runs."""
    of_operator: dict[str, list[tuple[bytes, Drawn]]] = defaultdict(list)
    for path in sorted((ROOT / "weft").rglob("*.py")):
        file = path.relative_to(ROOT / "weft").as_posix()
        if file.startswith(LEFT_OUT):
            continue
        module = ast.parse(path.read_bytes())
        lowest: dict[str, tuple[bytes, Drawn]] = {}
        for (function, operator), edits in sites_of(module).items():
            if not tests_of(file, function):
                continue
            last, texts = function.rpartition(".")[2], list[str]()
            for ordinal, edit in enumerate(edits):
                texts.append(pattern.anonymous(edit.node, module))
                key = _drawn_at(seed, operator, last, texts[-1], texts.count(texts[-1]))
                if operator not in lowest or key < lowest[operator][0]:
                    lowest[operator] = key, Drawn(file, function, operator, ordinal, tests_of(file, function))
        for operator, drawn in lowest.items():
            of_operator[operator].append(drawn)
    out: list[Drawn] = []
    for index, operator in enumerate(OPERATORS):
        share = (count * (index + 1)) // len(OPERATORS) - (count * index) // len(OPERATORS)
        out += [drawn for _, drawn in sorted(of_operator[operator], key=lambda entry: entry[0])[:share]]
    return tuple(out)


def _drawn_at(*key: object) -> bytes:
    return hashlib.sha256(repr(key).encode()).digest()


@dataclass(frozen=True)
class _Read:
    """A file of tests, or of weft: the modules of weft that it imports, and its words."""

    modules: frozenset[str]
    words: frozenset[str]


def _read(path: Path) -> _Read:
    source = path.read_text(encoding="utf-8")
    modules = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weft":
            modules |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.split(".")[0] == "weft"}
    modules |= set(re.findall(r"""["'](weft(?:\.\w+)+)[":']""", source))  # of mock.patch
    return _Read(frozenset(modules), frozenset(re.findall(r"\w+", source)))


def _test_files() -> list[str]:
    """Files of tests that a mutant may be tried with, below tests/."""
    files = [path.relative_to(ROOT / "tests").as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return [file for file in files if not file.startswith(("cuda/", "vllm/"))]


@cache
def _readings() -> tuple[dict[str, _Read], dict[str, _Read], dict[str, float]]:
    """(Test files, files of weft, seconds of test files)."""
    tests = {file: _read(ROOT / "tests" / file) for file in _test_files() if file not in EXCLUDED}
    weft = {p.relative_to(ROOT / "weft").as_posix(): _read(p) for p in sorted((ROOT / "weft").rglob("*.py"))}
    return tests, weft, json.loads((ROOT / "tests" / "seconds.json").read_text())


@cache
def tests_of(file: str, function: str) -> str:
    """The test files to try, the most likely first: of mutants that were thought of for this function, or module; that
    import the module, and name the function; that import what imports the module."""
    tests, weft, seconds = _readings()
    module = _module(file)
    users = {_module(user) for user, read in weft.items() if module in read.modules}
    named = set(function.split(".")) - {"__init__", "__post_init__", "__call__", "of", "run", "main"}
    by_hand = {
        (m.function, test.split("::")[0].removeprefix("tests/"))
        for m in BY_HAND
        if m.file == file
        for test in m.tests.split()
    }
    marks = dict[str, int]()
    for name, read in tests.items():
        mark = 8 * ((function, name) in by_hand) + 4 * (module in read.modules)
        mark += 3 * any(name == test for _, test in by_hand) + 2 * (bool(mark) and bool(named & read.words))
        marks[name] = mark or int(bool(users & read.modules))
    out, total = list[str](), 0.0
    for name in sorted(
        (name for name in marks if marks[name]), key=lambda name: (-marks[name], seconds.get(name, 0.0))
    ):
        if len(out) < MOST_FILES and (not out or total + seconds.get(name, 0.0) <= MOST_SECONDS):
            out.append(f"tests/{name}")
            total += seconds.get(name, 0.0)
    return " ".join(out)


def _module(file: str) -> str:
    return ".".join(("weft", *Path(file).with_suffix("").parts)).removesuffix(".__init__")


@cache
def equivalents() -> list[dict[str, str]]:
    """The changes that no test could see: file, operator, `before` (a pattern of the changed node) and why."""
    entries: list[dict[str, str]] = json.loads(EQUIVALENT.read_text())
    return entries


def why_equivalent(drawn: Drawn) -> str | None:
    """Why no test could see this mutant; None where some test should."""
    for entry in equivalents():
        if drawn.operator == entry["operator"] and drawn.file in files_of(entry) and is_recorded(entry, *drawn.site()):
            return entry["why"]
    return None


def files_of(entry: dict[str, str]) -> list[str]:
    """The file of an entry; any file where that is gone, because the code may have moved."""
    if (ROOT / "weft" / entry["file"]).exists():
        return [entry["file"]]
    return [path.relative_to(ROOT / "weft").as_posix() for path in sorted((ROOT / "weft").rglob("*.py"))]


def is_recorded(entry: dict[str, str], module: ast.Module, edit: Edit) -> bool:
    """Whether this entry is about the change."""
    before: ast.AST | None
    if isinstance(edit.node, ast.Slice):
        subscript = pattern.parse(f"x[{entry['before']}]")
        before = subscript.slice if isinstance(subscript, ast.Subscript) else None
    else:
        parsed = pattern.parse(entry["before"])
        before = (parsed[0] if isinstance(edit.node, ast.stmt) else None) if isinstance(parsed, list) else parsed
    return before is not None and pattern.is_like(before, edit.node, module)
