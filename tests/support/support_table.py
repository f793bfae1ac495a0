"""`make support`: which families train on which axes of the mesh; the result is docs/reference/support.md.

The start-up checks run on the tiny config of every family, then a case of parity on real ranks for each axis whose
check passes: a mesh of the tests of parity, else two ranks. Arguments are families; the rows of the others stay as
they are.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from tests.parallel import test_context_parallel, test_expert_parallel, test_pipeline, test_tensor_parallel
from tests.parity import test_parity
from tests.support.cases import parity, saved_model, world_of
from tests.support.pool import run
from tests.support.zoo import LAYOUT_FAMILIES, OWN_ATTENTION_FAMILIES, tiny_config
from weft.engine.selfcheck.architecture import ModelSupport, examine
from weft.engine.selfcheck.context import check_context
from weft.engine.selfcheck.division import check_division, check_experts
from weft.engine.selfcheck.pipeline import check_pipeline
from weft.errors import UserError
from weft.models import hf
from weft.models.facts import position_limit
from weft.models.flops import FlopFacts
from weft.models.mixer_shards import can_share_documents
from weft.models.train_module import TrainModule

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"
AXES = ("dp", "tp", "cp", "ep", "pp")
KINDS = ("proven", "refused", "not run", "failed")
FAMILIES = (*LAYOUT_FAMILIES, *OWN_ATTENTION_FAMILIES)
TWO_RANKS = {"dp": "2", "tp": "tp2", "cp": "cp2", "ep": "ep2", "pp": "pp2"}  # where no other test has a mesh
STATES = "cp2u2"  # of layers that carry state, which go over cp by Ulysses alone
HEAD = "| family | model_type | layout | dp | tp | cp | ep | pp |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
DENSE = "not run: no experts that weft knows"
_LONGEST = 140  # letters of a reason
INTRODUCTION = """\
# Families and axes

`make support` (tests/support/support_table.py) runs these tests and writes this page: {machine}.
[parallelism.md](parallelism.md) explains the axes. weft does not depend on this list. A run with another family tests a
small random copy at its start. If a test fails, weft refuses the family by name.

- **proven**: on real ranks (gloo, fp32, tiny random models) readouts, loss, the gradient of every parameter and the
  weights after three steps equal plain transformers in one process, on the mesh in the cell.
- **refused**: the check on a small copy fails, so a run ends within seconds with this reason.
- **not run**: there is no test.

Names of meshes, as in tests/support/cases.py:

- `2x2`: dp_replicate x dp_shard
- `tp4`: four ranks of tp
- `2xcp2`: two data ranks of two ranks of cp
- `cp4u2`: a ring of two with Ulysses over two
- `4ep2`: four data ranks, each two with the same experts
- `pp2x2`: two stages of two data ranks
- `pp2g`: two stages with the schedule GPipe
- `whole`: documents are not split over cp. This applies to padded documents, to a state that needs positions, and to
  a rotary table that depends on the document's length

`make test` and `make verify-all` run all proven cells.

"""


def cases() -> dict[tuple[str, str], str]:
    """(family, axis) -> the mesh on which a test proves it; of several the largest."""
    meshes: dict[tuple[str, str], str] = {}
    for axis, tried in (
        ("dp", test_parity.CASES),
        ("tp", [*test_tensor_parallel.TABLE, *test_tensor_parallel.CASES]),
        ("cp", [*test_context_parallel.TABLE, *test_context_parallel.CASES, *test_context_parallel.DEALT_WHOLE]),
        ("ep", [*test_expert_parallel.TABLE, *test_expert_parallel.CASES]),
        ("pp", [*test_pipeline.TABLE, *test_pipeline.CASES]),
    ):
        for family, mesh in tried:
            if world_of(mesh) >= world_of(meshes.get((family, axis), "1")):
                meshes[family, axis] = mesh
    return meshes


def machine() -> str:
    """When and where a page is written."""
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    return f"{datetime.date.today().isoformat()}, {versions}, on the CPU"


def rows(page: str) -> dict[str, list[str]]:
    """First cell of a row -> the others."""
    cells_of_rows = (re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in page.splitlines() if line.startswith("| `"))
    return {cells[0].strip("`"): cells[1:] for cells in cells_of_rows}


def row(family: str) -> list[str]:
    """The cells of a family, from runs."""
    config = hf.without_noise(tiny_config(family))
    model_type = f"`{config.get_text_config().model_type}`"
    try:
        findings = examine(config)
    except UserError as error:
        return [model_type, "", *[f"refused: {reason(error)}"] * len(AXES)]
    uncut = position_limit(config.get_text_config()) is not None or not is_cut(config, findings)
    checks = {
        "dp": lambda: None,
        "tp": lambda: check_division(config, findings, 2),
        "cp": lambda: None if uncut else cut(config, findings),
        "ep": lambda: check_experts(config, findings, 2),
        "pp": lambda: check_pipeline(config, findings, torch.float32),
    }
    cells = {}
    for axis in AXES:
        states = axis == "cp" and findings.mixers and not uncut
        mesh = cases().get((family, axis)) or (STATES if states else TWO_RANKS[axis])
        cells[axis] = refusal(checks[axis]) or proven(family, axis, mesh, uncut)
    if "has no experts" in cells["ep"]:
        cells["ep"] = DENSE
    return [model_type, findings.layout, *cells.values()]


def is_cut(config: transformers.PretrainedConfig, findings: ModelSupport) -> bool:
    """Whether documents are cut over two ranks of cp."""
    module = TrainModule(hf.build_meta(config, dtype=torch.float32, attention="eager"))
    shared = all(can_share_documents(boundary.mixer, 2, 1) for boundary in module.mixers.values())
    return findings.layout == "packed" and shared


def cut(config: transformers.PretrainedConfig, findings: ModelSupport) -> None:
    """The check of cp with heads that are exchanged, and without; states are of whole documents."""
    for cp, ulysses in ((2, 2),) if findings.mixers else ((2, 1), (4, 2)):
        check_context(config, FlopFacts(1), cp, ulysses, 1)


def proven(family: str, axis: str, mesh: str, uncut: bool) -> str:
    """The cell of a case on real ranks. whole: whether documents are dealt whole to ranks of cp."""
    sections = test_context_parallel.SHORT if "cp" in mesh and not uncut else {}
    path = test_pipeline.model_of(family, mesh) if axis == "pp" else saved_model(family)
    verdict = run(world_of(mesh), parity, path, mesh, sections)[0]
    if not verdict.passed:
        return f"failed: {', '.join(verdict.failed)} on {mesh}"
    return f"proven: {mesh}, whole" if axis == "cp" and uncut else f"proven: {mesh}"


def refusal(check: Callable[[], object]) -> str:
    """The cell of a start-up check that fails; else empty."""
    try:
        check()
    except UserError as error:
        return f"refused: {reason(error)}"
    return ""


def reason(error: UserError) -> str:
    """The part of a message that says why."""
    text = re.sub(r"^.*?: on a small copy, |^mesh\.\w+: ", "", str(error).replace("\n", " "))
    text = re.split(r"\.? [Ss]et mesh\.|: set mesh\.|\. Set ", text)[0].rstrip(".:; ")
    text = text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " ..."
    return text.replace("|", "\\|").replace("<", "&lt;")


def write(table: dict[str, list[str]]) -> None:
    """The page, one row for each family of the zoo that has cells."""
    lines = (f"| `{family}` | {' | '.join(table[family])} |\n" for family in FAMILIES if family in table)
    PAGE.write_text(INTRODUCTION.format(machine=machine()) + HEAD + "".join(lines), encoding="utf-8")


def main(families: list[str]) -> int:
    """The status is 1 where a case fails."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = rows(PAGE.read_text(encoding="utf-8")) if families and PAGE.exists() else {}
    for family in families or FAMILIES:
        table[family] = row(family)
        print(family, *table[family], sep="  ", flush=True)
        write(table)
    return int(any(cell.startswith("failed") for cells in table.values() for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
