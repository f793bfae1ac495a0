"""docs/reference/support.md has every family of the zoo, and as proven what the tests of parity prove."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import support
from tests.zoo import LAYOUT_FAMILIES, tiny_config
from weft.errors import UserError


def test_the_page_has_every_family_in_the_order_of_the_zoo() -> None:
    found = support.rows(support.PAGE.read_text())
    assert tuple(found) == LAYOUT_FAMILIES, "run: make support"
    for family, (model_type, layout, *cells) in found.items():
        assert model_type == f"`{tiny_config(family).get_text_config().model_type}`"
        assert layout in ("packed", "padded")
        assert len(cells) == len(support.AXES)
        assert all(cell.startswith(support.KINDS) and not cell.startswith("failed") for cell in cells), family


def test_what_is_proven_is_what_the_tests_prove() -> None:
    found = support.rows(support.PAGE.read_text())
    proven = {
        (family, axis): cell.removeprefix("proven: ")
        for family, cells in found.items()
        for axis, cell in zip(support.AXES, cells[2:], strict=True)
        if cell.startswith("proven")
    }
    assert proven == {case: support.named(*case) for case in support.cases()}, "run: make support"


def test_a_page_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "PAGE", tmp_path / "support.md")
    cells = {"llama": ["`llama`", "packed", "checked", "refused: a \\| b", support.WHOLE, support.DENSE, "checked"]}
    support.write(cells)
    assert support.rows(support.PAGE.read_text()) == cells


def test_reasons_are_the_part_that_says_why() -> None:
    message = (
        "mesh.cp: weft cannot cut documents of model_type 'a': on a small copy, it differs by 1e-1. Set mesh.cp=1."
    )
    assert support.reason(UserError(message)) == "it differs by 1e-1"
    message = "mesh.tp: weft does not know how a.weight [4] of b can be divided: set mesh.tp=1."
    assert support.reason(UserError(message)) == "weft does not know how a.weight [4] of b can be divided"
    assert len(support.reason(UserError("word " * 100))) < 150
