"""The versions that weft says it runs with are those that it is run with."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2])


@pytest.mark.compat
@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_installed_version_is_in_the_range_of_the_package(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [line for line in project["dependencies"] if line.startswith(name + ">=")]
    lowest, upper = requirement.removeprefix(name).split(",")
    module = pytest.importorskip(name)
    assert version(lowest) <= version(module.__version__) < version(upper)


@pytest.mark.compat
def test_the_compat_run_has_the_oldest_transformers() -> None:
    import transformers

    oldest = os.environ.get("WEFT_COMPAT")
    if oldest is None:
        pytest.skip("make test-compat sets WEFT_COMPAT")
    assert transformers.__version__.startswith(oldest + ".")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(line.startswith(f"transformers>={oldest},") for line in project["dependencies"])
