"""`make seams`: three lists that help to judge where the code is cut. Nobody has to obey them.

Private functions of few lines with one caller, files under 100 lines, and names that occur in several files.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORT, SMALL = 6, 100  # lines of a body, lines of a file


def main() -> None:
    """Print the lists, and the median length of a function."""
    single: list[str] = []
    small: list[str] = []
    owners: dict[str, set[str]] = defaultdict(set)
    lengths: list[int] = []
    for path in sorted((ROOT / "weft").rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        words = Counter(re.findall(r"\w+", text))
        lines = text.count("\n")
        if lines < SMALL and path.name != "__init__.py":
            small.append(f"{lines:4} {name}")
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                owners[node.name].add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                size = (node.end_lineno or 0) - body[0].lineno + 1
                lengths.append((node.end_lineno or 0) - node.lineno + 1)
                is_private = node.name.startswith("_") and not node.name.startswith("__")
                if is_private and words[node.name] == 2 and size <= SHORT and not node.decorator_list:
                    single.append(f"{size:4} {name}:{node.lineno} {node.name}")
    repeated = [
        f"{len(files):4} {name}: {', '.join(sorted(files))}" for name, files in owners.items() if len(files) > 1
    ]
    for title, entries in (
        (f"private functions of at most {SHORT} lines with one caller", single),
        (f"files under {SMALL} lines", small),
        ("names of functions and classes in several files", sorted(repeated, reverse=True)),
    ):
        print(f"{len(entries)} {title}", *entries, sep="\n", end="\n\n")
    print(f"{len(lengths)} functions, median {statistics.median(lengths):.0f} lines")


if __name__ == "__main__":
    main()
