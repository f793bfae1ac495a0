"""Rules that a linter does not know: who may import what, who prints, which ranks a collective is over."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "weft").rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_only_one_file_imports_internals_of_transformers() -> None:
    """`from transformers import X` is its public interface; a submodule is not."""
    importing = set()
    for path in FILES:
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("transformers.") for name in names):
                importing.add(str(path.relative_to(ROOT)))
    assert importing <= {f"weft/models/hf{suffix}.py" for suffix in ("", "_processor", "_template", "_video")}


# The house, top to bottom, as docs/architecture.md draws it: each folder imports from folders below it, never above.
HOUSE = (
    "__main__", "cli", "api", "parsers", "recipes", "verify", "rl", "observe", "inference", "checkpoint", "data",
    "engine", "parallel", "models", "ops", "launch", "hub", "config", "rl.algorithms",
)  # fmt: skip
# Files that stand beside the folders; they import one another and no folder.
BELOW = {
    "errors", "files", "former_modules", "importing", "plugins", "strict_json", "terminal", "upstream", "version",
    "versions",
}  # fmt: skip


def room(module: str) -> str:
    """The folder or file under weft/. What rl/algorithms declares is read by the config, so it is a room of its own."""
    return "rl.algorithms" if module.startswith("weft.rl.algorithms") else module.split(".")[1]


def imports() -> set[tuple[str, str]]:
    """(importer, imported), by folder or file under weft/; what only a type checker reads counts, too."""
    pairs = set()
    for path in FILES:
        importer_room = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"weft.{alias.name}" for alias in node.names] if node.module == "weft" else [str(node.module)]
            pairs |= {(importer_room, room(name)) for name in names if name.startswith("weft.")}
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def test_nothing_imports_upwards() -> None:
    """`weft` itself, for `weft.rl` and the like, is the top of all."""
    floor = {name: number for number, name in enumerate(HOUSE)}
    folders = {room(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in FILES} - {"__init__"}
    assert folders == set(HOUSE) | BELOW
    upwards = {
        (importer, imported)
        for importer, imported in imports()
        if importer != "__init__" and floor.get(imported, 99) < floor.get(importer, 98 if importer in BELOW else 0)
    }
    assert upwards == set()


def test_everything_is_printed_by_one_file() -> None:
    """Else texts of others would command the terminal. What writes the project's own tables is no matter."""
    allowed = {"weft/terminal.py", "weft/config/reference.py", "weft/verify/plants.py"}
    printing = set()
    for path in FILES:
        for node in ast.walk(tree(path)):
            calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if calls or (isinstance(node, ast.ImportFrom) and node.module == "rich.console"):
                printing.add(str(path.relative_to(ROOT)))
    assert printing <= allowed


def test_no_two_files_import_each_other() -> None:
    """Not in a circle of any length either, whether at the top of the file, within a function or for types."""
    waiting = imports_of_files()
    while settled := [module for module, needed in waiting.items() if not needed & waiting.keys()]:
        for module in settled:
            del waiting[module]
    assert sorted(waiting) == []


def imports_of_files() -> dict[str, set[str]]:
    """module -> modules of weft that it imports; what only a type checker reads counts, too."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    needed: dict[str, set[str]] = {}
    for name, path in modules.items():
        named = set()
        for node in ast.walk(tree(path)):
            named |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {candidate if candidate in modules else node.module for candidate in inside}
        needed[name] = (named & modules.keys()) - {name}
    return needed


# What torch.distributed does over all ranks of the process where it is given no group, and where `group` stands.
COLLECTIVES = {
    "all_gather": 2, "all_gather_object": 2, "all_gather_single": 2, "all_reduce": 2, "all_to_all_single": 4,
    "barrier": 0, "broadcast": 2, "broadcast_object_list": 2, "gather": 3, "gather_object": 3, "get_rank": 0,
    "get_world_size": 0, "reduce": 3, "reduce_scatter": 3, "reduce_scatter_single": 3, "scatter": 3, "send": 2,
    "recv": 2, "irecv": 2, "isend": 2, "all_to_all": 2, "scatter_object_list": 3,
}  # fmt: skip


def without_group() -> list[str]:
    """Calls of the product that leave out over which ranks they are, or name WORLD; planted bugs apart."""
    calls = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if name == "weft/launch/process.py" or name.startswith("weft/verify/bugs/"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr == "WORLD":
                calls.append(f"{name}:{node.lineno} WORLD")
            if isinstance(node, ast.Call) and not _has_group(node):
                calls.append(f"{name}:{node.lineno} {ast.unparse(node.func)}")
    return calls


def _has_group(call: ast.Call) -> bool:
    module, _, function = ast.unparse(call.func).rpartition(".")
    renamed = not module and function in ("all_gather_single", "reduce_scatter_single")  # weft/versions.py
    if not (renamed or module in ("dist", "torch.distributed")) or function not in COLLECTIVES:
        return True
    group = next((word.value for word in call.keywords if word.arg == "group"), None)
    if group is None and len(call.args) > COLLECTIVES[function]:
        group = call.args[COLLECTIVES[function]]
    return group is not None and not (isinstance(group, ast.Constant) and group.value is None)


def test_every_collective_names_its_ranks() -> None:
    """So that no rank number stands for a data rank: one is counted in a group that says what it has in common."""
    assert without_group() == []
