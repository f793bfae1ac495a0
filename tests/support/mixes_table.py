"""`make verify-all`: families x mixes of mesh axes, on real ranks; the result is docs/reference/mixes.md.

Each cell is the verdict of `weft verify`'s own function. The suite takes a few of them (tests/parity/test_mixes.py).
Arguments are mixes; the rows of the others stay as they are.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

from tests.parallel.test_pipeline import model_of
from tests.support.cases import MESHES, parity, saved_model, world_of
from tests.support.pool import run
from tests.support.support_table import machine, rows

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "mixes.md"
FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe")
DENSE = ("llama", "qwen3", "gemma3_text")
MIXES = (
    "2xtp2", "2x1xtp2", "2xcp2", "2x1xcp2", "cp2xtp2", "4ep2", "2xep2", "ep2xtp2", "ep2xcp2", "ep4xcp2", "pp2x2",
    "pp2x2x1", "pp2xtp2", "pp2xcp2", "pp2xep2", "pp2xep2xcp2", "pp2x2xtp2", "pp2xep2xtp2", "ep2xcp2xtp2",
    "pp2ixtp2", "pp2vx2",
)  # fmt: skip
INTRODUCTION = """\
# Mixes of axes

`make verify-all` (tests/support/mixes_table.py) runs these tests and writes this page: {machine}. On real ranks (gloo,
fp32, tiny random models) it compares readouts, loss, the gradient of every parameter and the weights after three steps
with plain transformers in one process. **ok** means within the tolerances of `weft verify`
([design-decisions.md](../explanation/design-decisions.md#the-proof)). A cell is empty if the family has no experts or
layers for the axes.

Meshes are named as in tests/support/cases.py, with data axes first: `2x1` is dp_replicate 2 x dp_shard 1. `4ep2` has
four data ranks, each two with the same experts. `pp2i` has the schedule Interleaved1F1B and `pp2v` ZBVZeroBubble, with
two stages per rank. With cp, rows are so short that documents are split.

"""


def applies(family: str, mix: str) -> bool:
    """Whether the family has what the mix divides: experts, or a layer for each stage."""
    return "ep" not in mix or family not in DENSE


def verdict(family: str, mix: str) -> str:
    """The cell of one run."""
    sections = {"step": {"max_tokens_per_device": 40}} if "cp" in MESHES[mix] else {}
    try:
        path = model_of(family, mix) if "pp" in mix else saved_model(family)
        result = run(world_of(mix), parity, path, mix, sections, timeout=300)[0]
    except AssertionError as error:
        refusals = [line for line in str(error).splitlines() if "UserError: " in line]
        return f"refused: {refusals[-1].partition('UserError: ')[2]}" if refusals else f"failed: {error}"[:200]
    return "ok" if result.passed else f"failed: {', '.join(result.failed)}"


def write(table: dict[str, list[str]]) -> None:
    """The page, one row for each mix that has cells."""
    head = f"| mesh | ranks | {' | '.join(FAMILIES)} |\n{'| --- ' * (2 + len(FAMILIES))}|\n"
    lines = (f"| `{mix}` | {' | '.join(table[mix])} |\n" for mix in MIXES if mix in table)
    PAGE.write_text(INTRODUCTION.format(machine=machine()) + head + "".join(lines), encoding="utf-8")


def main(mixes: list[str]) -> int:
    """The status is 1 where a case fails."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = rows(PAGE.read_text(encoding="utf-8")) if mixes and PAGE.exists() else {}
    for mix in mixes or MIXES:
        begun = time.perf_counter()
        cells = [verdict(family, mix) if applies(family, mix) else "" for family in FAMILIES]
        table[mix] = [str(world_of(mix)), *cells]
        print(mix, f"{time.perf_counter() - begun:.0f} s", *cells, sep="  ", flush=True)
        write(table)
    return int(any(cell.startswith("failed") for cells in table.values() for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
