"""Which tests are for `make unit`: those that start no process and make no process group, found by reading the code.

A test is left out if it, a fixture that it names, or a function that either calls uses something that starts processes.
`python -m tests.support.lanes` prints the files that have tests for this lane.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MODULES = {"multiprocessing", "subprocess", "ray", "torch.multiprocessing", "socketserver", "http.server"}
_NAMES = {  # of weft and torch, that start processes or make a group
    "EnvironmentPool", "RewardPool", "Trackers", "init_process_group", "join", "start_processes", "launch", "simulate",
}  # fmt: skip
# Of the repository itself, of other machines and environments, at random.
_APART = ("project/", "cuda/", "vllm/", "trl/", "hostile/test_fuzz")
_MOST_SECONDS = 5.0  # of a file, as recorded


@cache
def starting(path: Path) -> frozenset[str]:
    """The names of a module of tests that start a process when they are used."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = _imported(tree)
    definitions = [
        (definition, {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)} | _parameters(definition))
        for definition in tree.body
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign)
    ]
    while True:
        before = len(names)
        for definition, used in definitions:
            if used & names:
                names |= _bound(definition)
                if any("autouse" in ast.unparse(decorator) for decorator in getattr(definition, "decorator_list", ())):
                    names |= {name for bound_node, _ in definitions for name in _bound(bound_node)}
        if len(names) == before:
            return frozenset(names)


def _imported(tree: ast.Module) -> set[str]:
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name.split(".")[0] in _MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if _starts(node.module, alias.name):
                    names.add(alias.asname or alias.name)
    return names


def _starts(module: str, name: str) -> bool:
    """Whether `from module import name` gives something that starts processes."""
    if name in _NAMES or module in _MODULES or module.split(".")[0] == "ray":
        return True
    if module.split(".")[0] != "tests":
        return False
    file, inner = _file(module), _file(f"{module}.{name}")
    return bool(inner and starting(inner)) or bool(file and name in starting(file))


def _file(module: str) -> Path | None:
    path = ROOT / f"{module.replace('.', '/')}.py"
    return path if path.exists() else None


def _parameters(definition: ast.stmt) -> set[str]:
    return {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}


def _bound(definition: ast.stmt) -> set[str]:
    if isinstance(definition, ast.Assign):
        return {node.id for target in definition.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return {definition.name}


def is_unit(path: Path, function: str) -> bool:
    """Whether a test is for `make unit`, as far as its code says; a marker `slow` counts apart."""
    return not path.relative_to(ROOT / "tests").as_posix().startswith(_APART) and function not in starting(path)


def unit_files() -> list[str]:
    """The files that have such tests and take no more than some seconds, relative to the repository."""
    seconds: dict[str, float] = json.loads((ROOT / "tests" / "seconds.json").read_text())
    files = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        is_short = seconds.get(path.relative_to(ROOT / "tests").as_posix(), 0.0) <= _MOST_SECONDS
        if is_short and any(name.startswith("test_") and is_unit(path, name) for name in names):
            files.append(path.relative_to(ROOT).as_posix())
    return files


if __name__ == "__main__":
    print(*unit_files())
