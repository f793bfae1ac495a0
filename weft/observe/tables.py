"""The tables that a run prints: pure functions from plain rows to rich tables.

Shapes are written 1024x64, counts with a unit (5.24M), bytes in powers of 1024 (19.7 MiB).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich import box
from rich.measure import Measurement
from rich.table import Table

from weft.engine.describe import AxisRow, DtypeRow, ParameterRow, UnitRow
from weft.engine.optim.groups import OptimizerGroupRow
from weft.terminal import Console, byte_count, count, folded_width

_SHOWN_GROUPS = 4
_UNLIMITED = 10_000
# Width in columns without a terminal: it fits a log viewer and a pager.
_PAGE = 120


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine's memory on a rank, in bytes; None for a part that it does not have. gathered: the maximum at a
    time."""

    name: str
    weights: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    gathered: int | None = None
    note: str = ""

    @property
    def resident(self) -> int:
        """The memory that is always allocated."""
        return sum(part or 0 for part in (self.weights, self.gradients, self.optimizer))


def engine_table(engines: Sequence[EngineRow]) -> Table:
    """A row for each engine, and their sum."""
    columns = ("engine", ">weights", ">gradients", ">optimizer", ">together", ">gathered", "")
    rows = []
    for engine in engines:
        parts = (engine.weights, engine.gradients, engine.optimizer, engine.resident or None, engine.gathered)
        rows.append((engine.name, *(byte_count(part) if part else "" for part in parts), engine.note))
    total = byte_count(sum(engine.resident for engine in engines))
    return new_table("memory of a rank", *columns, rows=rows, total=("all", "", "", "", total, "", "at the same time"))


def mesh_table(axes: Iterable[AxisRow]) -> Table:
    """The axes, their sizes, and the ranks along each."""
    rows = []
    for axis in axes:
        shown = " | ".join(ranges(group) for group in axis["groups"][:_SHOWN_GROUPS])
        hidden = len(axis["groups"]) - _SHOWN_GROUPS
        shown += f" | {hidden} more" if hidden > 0 else ""
        rows.append((axis["name"], str(axis["size"]), shown, axis["meaning"]))
    return new_table("mesh", "axis", ">size", "ranks", "meaning", rows=rows)


def dtype_table(dtypes: Iterable[DtypeRow]) -> Table:
    """The dtypes, one row each."""
    return new_table("dtypes", "what", "dtype", "note", rows=[(d["use"], d["dtype"], d["note"]) for d in dtypes])


def unit_table(units: Sequence[UnitRow], tp: int = 1) -> Table:
    """The FSDP units. Units that differ only in the numbers of their names share a row. tp: size of mesh.tp."""
    mixed = ["sharding"] if any(unit["sharding"] for unit in units) else []
    title = "FSDP units" + (f", the part of one of {tp} ranks of tp" if tp > 1 else "")
    names_by_unit: dict[tuple[str, int, int, str], list[str]] = {}
    for unit in units:
        key = (re.sub(r"\d+", "*", unit["name"]), unit["parameters"], unit["bytes"], unit["sharding"])
        names_by_unit.setdefault(key, []).append(unit["name"])
    rows = [
        (str(len(names)), names[0] if len(names) == 1 else pattern, count(parameters), byte_count(size),
         *([sharding] if mixed else []))
        for (pattern, parameters, size, sharding), names in names_by_unit.items()
    ]  # fmt: skip
    parameters, size = sum(unit["parameters"] for unit in units), sum(unit["bytes"] for unit in units)
    total = (str(len(units)), "all", count(parameters), byte_count(size))
    return new_table(title, ">units", "name", ">parameters each", ">bytes each", *mixed, rows=rows, total=total)


def optimizer_table(groups: Sequence[OptimizerGroupRow]) -> Table:
    """The parameter groups with weight decay, and with learning rates if these differ."""
    rates = ["" if group.lr is None else f"{group.lr:g}" for group in groups]
    mixed = len(set(rates) - {""}) > 1
    rows = []
    for group, rate in zip(groups, rates, strict=True):
        counts = (str(group.parameters), count(group.elements), ", ".join(group.examples) or "-")
        rows.append((group.name, f"{group.weight_decay:g}", *([rate] if mixed else []), *counts))
    columns = ("group", ">weight decay", *([">peak lr"] if mixed else []), ">parameters", ">elements", "names")
    return new_table("optimizer groups", *columns, rows=rows)


def sharding_table(parameters: Sequence[ParameterRow]) -> Table:
    """Every parameter with its full shape and this rank's shape, and totals."""
    rows = [
        (p["name"], shape(p["full_shape"]), shape(p["local_shape"]), ", ".join(p["axes"]), p["dtype"])
        for p in parameters
    ]
    columns = ("parameter", ">full", ">this rank", "axes", "dtype")
    return new_table("sharding", *columns, rows=rows, total=_sharding_totals(parameters))


def sharding_totals_table(parameters: Sequence[ParameterRow]) -> Table:
    """Only the totals of sharding_table."""
    return new_table("sharding", "", ">full", ">this rank", "share", "", rows=[_sharding_totals(parameters)])


def _sharding_totals(parameters: Sequence[ParameterRow]) -> tuple[str, ...]:
    full, local = (
        [(math.prod(p[key]), math.prod(p[key]) * p["itemsize"]) for p in parameters]
        for key in ("full_shape", "local_shape")
    )
    elements, sharded = sum(n for n, _ in full), sum(n for n, _ in local)
    return (
        f"all {len(parameters)}",
        f"{count(elements)} ({byte_count(sum(size for _, size in full))})",
        f"{count(sharded)} ({byte_count(sum(size for _, size in local))})",
        f"{sharded / max(1, elements):.1%} on this rank",
        "",
    )


def new_table(
    title: str, *columns: str, rows: Iterable[Sequence[str]] = (), total: Sequence[str] | None = None
) -> Table:
    """A table with these column heads. A leading `>` aligns a column to the right. Long texts are wrapped. total: a
    last row, below a line."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    if total is not None:
        table.add_section()
        table.add_row(*total)
    return table


def show(table: Table, console: Console | None = None) -> None:
    """Prints a table, wrapped to the width of the terminal. Without a terminal the width is COLUMNS, or by default that
    of a page, or more if a name would be broken."""
    console = console or Console()
    if not console.is_terminal:
        for column in table.columns:
            column.no_wrap = " " not in max(map(str, column.cells), key=len, default="")
        page = Console(file=console.file, width=_UNLIMITED)
        needed = Measurement.get(page, page.options, table).minimum
        width = folded_width() if console.file is sys.stdout else None
        console = Console(file=console.file, width=width or max(_PAGE, console.width, needed))
    console.print(table)
    console.print()


def shape(sizes: Sequence[int]) -> str:
    """A shape as text: `4096x256`; `scalar` without dimensions."""
    return "x".join(map(str, sizes)) or "scalar"


def ranges(ranks: Sequence[int]) -> str:
    """Ranks as text: `0`, `0,2`, `0-3`, `0-6 by 2`."""
    steps = {late - early for early, late in pairwise(ranks)}
    if steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(steps) == 1 and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    return ",".join(map(str, ranks))
