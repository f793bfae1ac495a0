"""weft's tensor and expert parallelism against that of transformers 5.23, which nobody here wrote (`make test-oracle`).

transformers stands beside the environment, in $WEFT_ORACLE, where processes of its own find it
(tests/support/oracle.py); weft runs with the usual one. One micro-batch: with several, transformers' q_norm and
k_norm gradients are wrong. Families are those whose attention it divides: its plans leave that of deepseek_v3 whole,
and of gpt_oss all but the vocabulary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.support.cases import MESHES, open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.zoo import VOCABULARY
from weft.verify.documents import awkward_steps
from weft.verify.harness import Figure, compare_gradients, worst_of
from weft.verify.observed import one_gradient
from weft.verify.plants import planted

VERSION = "5.23."
ORACLE_PATH = os.environ.get("WEFT_ORACLE")
DOCUMENTS = awkward_steps(VOCABULARY)[2]  # three, so that the first data rank has two
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(ORACLE_PATH is None, reason="make test-oracle sets WEFT_ORACLE"),
]


@cache
def oracle_gradients(path: str, mesh: str) -> dict[str, Tensor]:
    """Whole gradients by transformers' own division."""
    with TemporaryDirectory(prefix="weft-oracle-") as folder:
        job, out = Path(folder, "job.json"), Path(folder, "gradients")
        axes = {"fsdp": MESHES[mesh]["dp_shard"], "tp": MESHES[mesh].get("tp", 1), "ep": MESHES[mesh].get("ep", 1)}
        job.write_text(json.dumps({"model": path, **axes, "documents": DOCUMENTS, "out": str(out)}))
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.oracle", job],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(ORACLE_PATH), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        with safe_open(out, "pt") as file:
            notes = file.metadata()
            assert notes["transformers"].startswith(VERSION)
            assert float(notes["parts"]) == axes["fsdp"] * axes["tp"]
        return load_file(out)


def weft_gradients(path: str, mesh: str, plant: str | None) -> dict[str, Tensor]:
    """Whole gradients by weft; on every rank."""
    with planted(plant):
        return one_gradient(open_engine(path, mesh), DOCUMENTS, None)[1]


def compared(path: str, mesh: str, plant: str | None = None) -> list[Figure]:
    """A figure for each parameter."""
    return compare_gradients(
        run(world_of(mesh), weft_gradients, path, mesh, plant)[0], oracle_gradients(path, mesh), {}
    )


CASES = [
    ("qwen3", "tp2"), ("qwen3", "2xtp2"), ("llama", "2xtp2"), ("qwen3_moe", "2xtp2"), ("gemma3_text", "tp2"),
    ("olmo2", "tp2"), ("mixtral", "ep2"), ("mixtral", "4ep2"), ("glm4_moe", "ep4"), ("gpt_oss", "ep2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh"), CASES, ids=map(" ".join, CASES))
def test_gradients_are_those_of_transformers(family: str, mesh: str) -> None:
    figures = compared(saved_model(family), mesh)
    print(worst_of(f"{family} {mesh}", figures))
    assert [figure for figure in figures if not figure.passed] == []


@pytest.mark.parametrize(("family", "plant", "wrong"), [
    ("qwen3", "head-norms-apart", ("q_norm", "k_norm")),
    ("qwen3", "block-norms-apart", ("layernorm",)),
    ("qwen3_moe", "routers-apart", ("mlp.gate.",)),
    ("mixtral", "experts-averaged", (".experts.",)),
])  # fmt: skip
def test_a_bug_is_seen(family: str, plant: str, wrong: tuple[str, ...]) -> None:
    figures = compared(saved_model(family), "4ep2" if plant.startswith("experts") else "2xtp2", plant)
    named = {figure.name for figure in figures if any(part in figure.name for part in wrong)}
    assert {figure.name for figure in figures if not figure.passed} == named
