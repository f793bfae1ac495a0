"""docs/reference/support.md has every family of the zoo, and what it calls proven is proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import test_context_parallel
from tests.support import support_table
from tests.support.zoo import tiny_config
from weft.errors import UserError


def test_the_page_has_every_family_in_the_order_of_the_zoo() -> None:
    rows = support_table.rows(support_table.PAGE.read_text())
    assert tuple(rows) == support_table.FAMILIES, "run: make support"
    for family, (model_type, layout, *cells) in rows.items():
        assert model_type == f"`{tiny_config(family).get_text_config().model_type}`"
        assert layout in ("packed", "padded")
        assert len(cells) == len(support_table.AXES)
        assert all(cell.startswith(support_table.KINDS) and not cell.startswith("failed") for cell in cells), family


def proven() -> dict[tuple[str, str], str]:
    """(family, axis) -> the mesh, with `whole` where it is said."""
    return {
        (family, axis): cell.removeprefix("proven: ")
        for family, cells in support_table.rows(support_table.PAGE.read_text()).items()
        for axis, cell in zip(support_table.AXES, cells[2:], strict=True)
        if cell.startswith("proven")
    }


def test_what_is_proven_is_what_tests_prove() -> None:
    """Those of parity; and the next test, on two ranks."""
    dealt_whole = test_context_parallel.DEALT_WHOLE
    of_parity = {
        (family, axis): f"{mesh}, whole" if axis == "cp" and (family, mesh) in dealt_whole else mesh
        for (family, axis), mesh in support_table.cases().items()
    }
    listed = proven()
    assert of_parity.items() <= listed.items(), "run: make support"
    for (_, axis), mesh in listed.items() - of_parity.items():
        two = support_table.TWO_RANKS[axis]
        assert mesh in ((two, f"{two}, whole", support_table.STATES) if axis == "cp" else (two,)), "run: make support"


@pytest.mark.table
@pytest.mark.parametrize(("family", "axis"), [case for case in proven() if case not in support_table.cases()])
def test_what_the_page_calls_proven(family: str, axis: str) -> None:
    """Beyond the tests of parity."""
    mesh, _, every_mesh = proven()[family, axis].partition(", ")
    cell = support_table.proven(family, axis, mesh, bool(every_mesh))
    assert cell == f"proven: {proven()[family, axis]}"


def test_a_page_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_table, "PAGE", tmp_path / "support.md")
    dense = support_table.DENSE
    cells = {"llama": ["`llama`", "packed", "proven: 2", "refused: a \\| b", "not run", dense, "proven: pp2"]}
    support_table.write(cells)
    assert support_table.rows(support_table.PAGE.read_text()) == cells


def test_reasons_are_the_part_that_says_why() -> None:
    message = (
        "mesh.cp: weft cannot cut documents of model_type 'a': on a small copy, it differs by 1e-1. Set mesh.cp=1."
    )
    assert support_table.reason(UserError(message)) == "it differs by 1e-1"
    message = "mesh.tp: weft has no rule to shard a.weight [4] of b. Set mesh.tp=1."
    assert support_table.reason(UserError(message)) == "weft has no rule to shard a.weight [4] of b"
    assert len(support_table.reason(UserError("word " * 100))) < 150
