"""Every key that is accepted has an effect: the test that shows it is marked `@pytest.mark.covers("optimizer.lr")`."""

from __future__ import annotations

import ast
from pathlib import Path

from weft.config.commands import SCHEMAS
from weft.config.keys import schema_keys

TESTS = Path(__file__).parents[1]


def covered() -> set[str]:
    """The keys that tests are marked with."""
    keys = set[str]()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
                        keys.update(ast.literal_eval(argument) for argument in decorator.args)
    return keys


def test_every_key_has_a_test_that_is_marked_with_it() -> None:
    keys = {key for schema in SCHEMAS.values() for key in schema_keys(schema)}
    marked = covered()
    assert keys - marked == set(), "mark the test of its effect: @pytest.mark.covers(...)"
    assert marked - keys == set(), "there are no such keys"
