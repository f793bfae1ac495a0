"""`python -m weft.rl.algorithms.tables docs/reference/algorithms.md` writes the page's tables from the declarations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.rl.algorithms import ADVANTAGES, ALGORITHMS, TOKEN_LOSSES

_COLUMNS = ("advantage", "advantage_norm", "policy_loss", "loss_aggregation")  # keys with a separate column


def presets_table() -> str:
    """The presets, an algorithm to a line."""
    rows = []
    for spec in ALGORITHMS.values():
        other_keys = [f"{leaf} {_shown(value)}" for leaf, value in spec.preset.items() if leaf not in _COLUMNS]
        paper = f"[{spec.paper}](https://arxiv.org/abs/{spec.paper})"
        rows.append(
            [f"`{spec.name}`", *(str(spec.preset.get(leaf, "")) for leaf in _COLUMNS), ", ".join(other_keys), paper]
        )
    return _table(["`rl.algorithm`", *(f"`{leaf}`" for leaf in _COLUMNS), "other keys", "paper"], rows)


def advantages_table() -> str:
    """The formulas of advantages."""
    rows = [[f"`{spec.name}`", spec.formula] for spec in ADVANTAGES.values()]
    return _table(["`rl.advantage`", "advantage of each token"], rows)


def losses_table() -> str:
    """The formulas of the losses of a token."""
    rows = [[f"`{spec.name}`", spec.formula] for spec in TOKEN_LOSSES.values()]
    return _table(["`rl.policy_loss`", "policy loss"], rows)


def filled(page: str) -> str:
    """The page with its three tables from the declarations. Each table is between two comments with its name."""
    for name, table in {"presets": presets_table(), "advantages": advantages_table(), "losses": losses_table()}.items():
        begin, end = f"<!-- {name}: written by weft/rl/algorithms/tables.py -->\n", f"<!-- end of {name} -->\n"
        before, _, remainder = page.partition(begin)
        _, found_end, after = remainder.partition(end)
        assert found_end, f"no place for the table of {name}"
        page = before + begin + table + end + after
    return page


def _shown(value: Any) -> str:
    return f"[{', '.join(f'{v:g}' for v in value)}]" if isinstance(value, list) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
