"""`make support`: which families train on which axes of the mesh; the result is docs/reference/support.md.

The start-up checks run on the tiny config of every family, then the cases of the tests of parity on real ranks, one
for each family and axis. Arguments are families; the rows of the others stay as they are.
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

from tests import test_context_parallel, test_expert_parallel, test_parity, test_pipeline, test_tensor_parallel
from tests.cases import parity, saved_model, world_of
from tests.pool import run
from tests.zoo import LAYOUT_FAMILIES, tiny_config
from weft.engine.context_check import check_context
from weft.engine.division_check import check_division
from weft.engine.expert_check import check_experts
from weft.engine.pipeline_check import check_pipeline
from weft.engine.startup import Findings, examine
from weft.errors import UserError
from weft.models import hf
from weft.models.flops import FlopFacts
from weft.models.mixer_part import can_share_documents
from weft.models.train_module import TrainModule

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "support.md"
AXES = ("dp", "tp", "cp", "ep", "pp")
KINDS = ("proven", "checked", "refused", "not run", "failed")
HEAD = "| family | model_type | layout | dp | tp | cp | ep | pp |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
WHOLE, DENSE = "not run: its documents are never cut", "not run: it has no experts"
_LONGEST = 140  # letters of a reason
INTRODUCTION = """\
# Families and axes

Written by `make support` (tests/support.py), which runs what stands here: {machine}. What the axes are is in
[parallelism.md](parallelism.md). weft has no list of families: one that is not here is tried at the start of a run,
on a small random copy, and refused by name where it does not pass.

- **proven**: on real ranks (gloo, fp32, tiny random models) readouts, loss, the gradient of every parameter and the
  weights after three steps are those of plain transformers in one process. The mesh is named as in tests/cases.py:
  `2x2` is dp_replicate x dp_shard, `tp4` four ranks of tp, `2xcp2` two data ranks of two ranks of cp, `cp4u2` a ring of
  two with Ulysses over two, `4ep2` four data ranks, of which two each have the same experts, `pp2x2` two stages of two
  data ranks, `pp2g` two with the schedule GPipe; `whole` is said where documents are never cut, but dealt to these
  ranks: where a state needs positions, and where documents are padded.
- **checked**: the check that every run makes before it loads passes. On a small copy, over threads that stand for
  ranks, readouts and gradients are those of the whole (tp, ep: 2 ranks; cp: a ring of 2, and of 2 with Ulysses over 2;
  where layers carry state, Ulysses over 2 alone; pp: each layer a stage); dp: logits are those of transformers, and
  documents do not see each other.
- **refused**: that check fails, so that a run ends within seconds with this reason.
- **not run**: nothing was tried.

"""


def cases() -> dict[tuple[str, str], str]:
    """(family, axis) -> the mesh on which a test proves it; of several the largest."""
    found: dict[tuple[str, str], str] = {}
    for axis, tried in (
        ("dp", test_parity.CASES),
        ("tp", [*test_tensor_parallel.TABLE, *test_tensor_parallel.CASES]),
        ("cp", [*test_context_parallel.TABLE, *test_context_parallel.CASES, *test_context_parallel.DEALT_WHOLE]),
        ("ep", [*test_expert_parallel.TABLE, *test_expert_parallel.CASES]),
        ("pp", [*test_pipeline.TABLE, *test_pipeline.CASES]),
    ):
        for family, mesh in tried:
            if world_of(mesh) >= world_of(found.get((family, axis), "1")):
                found[family, axis] = mesh
    return found


def machine() -> str:
    """When and where a page is written."""
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    return f"{datetime.date.today().isoformat()}, {versions}, on the CPU"


def rows(page: str) -> dict[str, list[str]]:
    """First cell of a row -> the others."""
    found = (re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in page.splitlines() if line.startswith("| `"))
    return {cells[0].strip("`"): cells[1:] for cells in found}


def row(family: str) -> list[str]:
    """The cells of a family, from runs."""
    config = hf.without_noise(tiny_config(family))
    model_type = f"`{config.get_text_config().model_type}`"
    try:
        findings = examine(config)
    except UserError as error:
        return [model_type, "", *[f"refused: {reason(error)}"] * len(AXES)]
    checks = {
        "dp": lambda: None,
        "tp": lambda: check_division(config, findings, 2),
        "cp": lambda: cut(config, findings),
        "ep": lambda: check_experts(config, findings, 2),
        "pp": lambda: check_pipeline(config, findings, torch.float32),
    }
    cells = {axis: proven(family, axis) or checked(checks[axis]) for axis in AXES}
    if not (cells["cp"].startswith("proven") or is_cut(config, findings)):
        cells["cp"] = WHOLE
    if "has no experts" in cells["ep"]:
        cells["ep"] = DENSE
    return [model_type, findings.layout, *cells.values()]


def is_cut(config: transformers.PretrainedConfig, findings: Findings) -> bool:
    """Whether documents are cut over two ranks of cp."""
    module = TrainModule(hf.build_meta(config, dtype=torch.float32, attention="eager"))
    shared = all(can_share_documents(boundary.mixer, 2, 1) for boundary in module.mixers.values())
    return findings.layout == "packed" and shared


def cut(config: transformers.PretrainedConfig, findings: Findings) -> None:
    """The check of cp with heads that are exchanged, and without; states are of whole documents."""
    for cp, ulysses in ((2, 2),) if findings.mixers else ((2, 1), (4, 2)):
        check_context(config, FlopFacts(1), cp, ulysses, 1)


def proven(family: str, axis: str) -> str | None:
    """The cell of a case of the tests; None where there is none."""
    mesh = cases().get((family, axis))
    if mesh is None:
        return None
    cuts = "cp" in mesh and (family, mesh) not in test_context_parallel.DEALT_WHOLE
    sections = test_context_parallel.SHORT if cuts else {}
    path = test_pipeline.model_of(family, mesh) if axis == "pp" else saved_model(family)
    verdict = run(world_of(mesh), parity, path, mesh, sections)[0]
    return f"proven: {named(family, axis)}" if verdict.passed else f"failed: {', '.join(verdict.failed)} on {mesh}"


def named(family: str, axis: str) -> str:
    """The mesh of a case, as its cell calls it."""
    mesh = cases()[family, axis]
    return f"{mesh}, whole" if axis == "cp" and (family, mesh) in test_context_parallel.DEALT_WHOLE else mesh


def checked(check: Callable[[], object]) -> str:
    """The cell of a start-up check."""
    try:
        check()
    except UserError as error:
        return f"refused: {reason(error)}"
    return "checked"


def reason(error: UserError) -> str:
    """The part of a message that says why."""
    text = re.sub(r"^.*?: on a small copy, |^mesh\.\w+: ", "", str(error).replace("\n", " "))
    text = re.split(r"\.? [Ss]et mesh\.|: set mesh\.|\. Set ", text)[0].rstrip(".:; ")
    text = text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " ..."
    return text.replace("|", "\\|").replace("<", "&lt;")


def write(found: dict[str, list[str]]) -> None:
    """The page, one row for each family of the zoo that has cells."""
    lines = (f"| `{family}` | {' | '.join(found[family])} |\n" for family in LAYOUT_FAMILIES if family in found)
    PAGE.write_text(INTRODUCTION.format(machine=machine()) + HEAD + "".join(lines), encoding="utf-8")


def main(families: list[str]) -> int:
    """The status is 1 where a case fails."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = rows(PAGE.read_text(encoding="utf-8")) if families and PAGE.exists() else {}
    for family in families or LAYOUT_FAMILIES:
        found[family] = row(family)
        print(family, *found[family], sep="  ", flush=True)
        write(found)
    return int(any(cell.startswith("failed") for cells in found.values() for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
