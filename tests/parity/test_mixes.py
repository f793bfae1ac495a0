"""Several axes at once. The whole table of families x mixes is `make verify-all` (tests/support/mixes_table.py)."""

from __future__ import annotations

import pytest

from tests.support import mixes_table, support_table
from tests.support.cases import pairs

CASES, TABLE = [("qwen3_moe", "pp2xep2xtp2"), ("llama", "pp2x2xtp2")], [("gpt_oss", "ep2xcp2xtp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mix"), pairs(CASES, TABLE))
def test_eight_ranks_on_three_axes(family: str, mix: str) -> None:
    assert mixes_table.verdict(family, mix) == "ok"


def test_the_page_has_every_mix_and_none_fails() -> None:
    rows = support_table.rows(mixes_table.PAGE.read_text())
    assert tuple(rows) == mixes_table.MIXES, "run: make verify-all"
    for mix, (_, *cells) in rows.items():
        assert len(cells) == len(mixes_table.FAMILIES)
        for family, cell in zip(mixes_table.FAMILIES, cells, strict=True):
            assert cell.startswith(("ok", "refused: ")) if mixes_table.applies(family, mix) else not cell, (
                family,
                mix,
                cell,
            )
