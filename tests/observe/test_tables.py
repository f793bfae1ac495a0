"""The tables that a run prints."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.table import Table

from weft.engine.describe import AxisRow, DtypeRow, ParameterRow, UnitRow
from weft.engine.optim.groups import OptimizerGroupRow
from weft.observe.tables import (
    dtype_table,
    mesh_table,
    optimizer_table,
    ranges,
    shape,
    sharding_table,
    sharding_totals_table,
    show,
    unit_table,
)
from weft.terminal import Console, byte_count, count


def axis_row(name: str, size: int, groups: Sequence[Sequence[int]], meaning: str = "") -> AxisRow:
    return AxisRow(name=name, size=size, groups=groups, meaning=meaning)


def unit_row(name: str, parameters: int, size: int) -> UnitRow:
    return UnitRow(name=name, parameters=parameters, bytes=size, sharding="")


def parameter_row(
    name: str, full: Sequence[int], local: Sequence[int], axes: Sequence[str], dtype: str, itemsize: int
) -> ParameterRow:
    return ParameterRow(name=name, full_shape=full, local_shape=local, axes=axes, dtype=dtype, itemsize=itemsize)


def printed(table: Table) -> list[str]:
    out = io.StringIO()
    show(table, Console(file=out))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_mesh() -> None:
    lines = printed(
        mesh_table(
            [
                axis_row("dp_replicate", 2, ((0, 2), (1, 3)), "copies"),
                axis_row("dp_shard", 2, ((0, 1), (2, 3))),
                axis_row("many", 2, tuple((i, i + 1) for i in range(0, 12, 2))),
            ]
        )
    )
    assert lines[0] == "mesh" and "dp_replicate 2 0,2 | 1,3 copies" in lines and "dp_shard 2 0-1 | 2-3" in lines
    assert "many 2 0-1 | 2-3 | 4-5 | 6-7 | 2 more" in lines


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 2), "0,2"), (range(8), "0-7"), ((1, 3, 5), "1-5 by 2"),
        ((0, 1, 5), "0,1,5"),
    ],
)  # fmt: skip
def test_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert ranges(ranks) == text


def test_dtypes() -> None:
    assert "storage fp32 masters" in printed(dtype_table([DtypeRow(use="storage", dtype="fp32", note="masters")]))


def test_alike_units_share_a_row() -> None:
    units = [unit_row(f"model.layers.{i}", 1_048_576, 4 << 20) for i in range(4)]
    units += [
        unit_row("model.norm + lm_head", 999, 4000),
        unit_row("model.layers.4", 7, 28),
        unit_row("root", 1000, 4000),
    ]
    lines = printed(unit_table(units))
    assert "4 model.layers.* 1.05M 4 MiB" in lines and "1 model.norm + lm_head 999 3.906 KiB" in lines
    assert "1 model.layers.4 7 28 B" in lines and "7 all 4.2M 16.01 MiB" in lines


def test_optimizer_groups() -> None:
    rows = [
        OptimizerGroupRow("decayed", 0.1, 36, 4_980_736, ("a.weight", "b.*.weight")),
        OptimizerGroupRow("not decayed", 0.0, 0, 0, ()),
    ]
    lines = printed(optimizer_table(rows))
    assert "decayed 0.1 36 4.98M a.weight, b.*.weight" in lines and "not decayed 0 0 0 -" in lines


ROWS = [
    parameter_row("model.embed_tokens.weight", (4096, 256), (2048, 256), ("dp_shard: rows",), "fp32", 4),
    parameter_row("model.norm.weight", (256,), (128,), ("dp_shard: rows",), "fp32", 4),
    parameter_row("scale", (), (), (), "bf16", 2),
]


def test_sharding() -> None:
    lines = printed(sharding_table(ROWS))
    assert "model.embed_tokens.weight 4096x256 2048x256 dp_shard: rows fp32" in lines
    assert "scale scalar scalar bf16" in lines
    totals = "all 3 1.05M (4.001 MiB) 524K (2 MiB) 50.0% on this rank"
    assert totals in lines and totals in printed(sharding_totals_table(ROWS))
    assert any("0.0% on this rank" in line for line in printed(sharding_totals_table([])))


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_folds_and_loses_nothing(width: int) -> None:
    out = io.StringIO()
    show(sharding_table(ROWS), Console(file=out, width=width, force_terminal=True, color_system=None))
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    assert "…" not in out.getvalue()


def test_without_a_terminal_names_are_whole() -> None:
    name = "model." + "layers." * 40 + "weight"
    lines = printed(sharding_table([parameter_row(name, (2,), (1,), (), "fp32", 4)]))
    assert any(name in line for line in lines)


@pytest.mark.parametrize(("width", "page"), [(80, 120), (150, 150)])
def test_without_a_terminal_a_list_of_names_folds_at_a_page(width: int, page: int) -> None:
    names = tuple(f"some_projection_{i}.weight" for i in range(20))
    out = io.StringIO()
    show(optimizer_table([OptimizerGroupRow("decayed", 0.1, 20, 1000, names)]), Console(file=out, width=width))
    assert all(len(line) <= page for line in out.getvalue().splitlines())
    assert all(name in out.getvalue() for name in names)


def test_counts() -> None:
    assert [count(n) for n in (0, 999, 1000, 4_980_736, 70_600_000_000)] == ["0", "999", "1K", "4.98M", "70.6B"]
    assert [byte_count(n) for n in (12, 1536, 20_657_000, 3 << 40)] == ["12 B", "1.5 KiB", "19.7 MiB", "3 TiB"]
    assert shape((1, 4, 16)) == "1x4x16" and shape(()) == "scalar"
