"""An engine's facts as plain data: `--dry-run --json` prints them, and the opening's tables show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cases import saved_model, write_small_job
from weft.cli import main
from weft.config.schema import MeshConfig, ModelConfig
from weft.engine.config import EngineConfig
from weft.engine.describe import describe
from weft.engine.engine import Engine
from weft.launch.process import fake_ranks


def test_facts_are_those_of_the_engine_and_fit_json() -> None:
    config = EngineConfig(model=ModelConfig(path=saved_model("llama")), mesh=MeshConfig(dp_shard=2, tp=2))
    with fake_ranks(4) as ranks:
        engine = Engine(config, ranks, weights=False)
        facts = describe(engine, parameters=True)
    assert json.loads(json.dumps(facts)) == json.loads(json.dumps(describe(engine, parameters=True)))
    elements = sum(parameter.numel() for parameter in engine.whole_parameters().values())
    assert facts["model"]["class"] == "LlamaForCausalLM" and facts["model"]["layout"] == "packed"
    assert facts["model"]["parameters"] >= elements // 2 and facts["model"]["attention"]
    axes = {axis["name"]: (axis["size"], len(axis["groups"])) for axis in facts["mesh"]["axes"]}
    assert axes["dp_shard"] == (2, 2) and axes["tp"] == (2, 2)
    assert {row["use"]: row["dtype"] for row in facts["dtypes"]}["masters"] == "float32"
    assert facts["units"][-1]["name"] == "root" and facts["memory"]["resident"] == engine.memory.resident
    names = [row["name"] for row in facts["parameters"]]
    assert names == [name for name, _ in engine.module.named_parameters()]
    assert any("tp" in row["axes"] and "dp_shard" in row["axes"] for row in facts["parameters"])
    assert "parameters" not in describe(engine)


def test_a_dry_run_prints_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_small_job(tmp_path)
    words = [f"model.path={folder / 'model'}", f"data.path={folder / 'chat.jsonl'}", "--device", "cpu"]
    status, (out, error) = main(["sft", "--dry-run", "--json", *words]), capsys.readouterr()
    assert status == 0, error
    printed = json.loads(out)
    assert printed["config"]["model"]["path"] == str(folder / "model")
    assert printed["mesh"]["ranks"] >= 1 and printed["memory"]["weights"] > 0 and "parameters" not in printed


def test_json_needs_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--json", "model.path=m", "data.path=d"]) != 0
    assert "--json needs --dry-run" in capsys.readouterr().err
