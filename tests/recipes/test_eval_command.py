"""`weft eval`: the figures of a model on held-out data without training, and which config measures it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import weft
from tests.support import forked
from tests.support.cases import write_small_job
from weft import cli
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig, SourceConfig
from weft.errors import UserError
from weft.launch.options import MeasureOptions
from weft.observe.measured import measured_config
from weft.recipes import measure

FIGURES = ("eval/loss", "eval/perplexity", "eval/accuracy", "eval/exact")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and two runs that were evaluated: of all weights, and of adapters."""
    folder = write_small_job(tmp_path_factory.mktemp("measure"))
    rows = {"path": str(folder / "chat.jsonl"), "max_length": 60}
    for name, lora in (("whole", {}), ("adapted", {"lora": {"rank": 2}})):
        weft.sft(
            model=folder / "model", data=rows, eval={"path": str(folder / "chat.jsonl")}, optimizer={"lr": 1e-2},
            step={"max_tokens_per_device": 64}, train={"epochs": 2}, run={"dir": str(folder / name)}, device="cpu",
            **lora,
        )  # fmt: skip
    return folder


@pytest.mark.parametrize("name", ["whole", "adapted"])
def test_the_figures_are_those_of_the_run(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    last = weft.Run(folder / name).metrics[-1]
    capsys.readouterr()
    assert cli.main(["eval", name, "chat.jsonl", "--device", "cpu", "--json", "--output", f"{name}.json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {figure: printed[figure] for figure in FIGURES} == {figure: last[figure] for figure in FIGURES}
    assert printed["documents"] == 4 and json.loads((folder / f"{name}.json").read_text()) == printed
    assert printed["model"].startswith(f"{name}/checkpoints/step-")
    before = weft.Run(folder / name).metrics[0]
    assert printed["eval/loss"] != pytest.approx(before["loss"], abs=1e-3)  # not the model that it began with


def test_two_ranks_measure_alike(folder: Path) -> None:
    words = ["eval", "whole", "chat.jsonl", "--device", "cpu", "--nproc", "2", "mesh.tp=2", "--json"]
    done = forked.run(words, folder)
    assert done.returncode == 0, done.stderr
    last = weft.Run(folder / "whole").metrics[-1]
    assert json.loads(done.stdout)["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)


def test_several_sources_are_refused_before_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = measured_config("model", ["chat.jsonl"])
    assert isinstance(config, SftConfig)
    sources = (SourceConfig(path="not-there.jsonl"), SourceConfig(path="chat.jsonl"))
    config = replace(config, data=replace(config.data, path=None, sources=sources))
    with pytest.raises(UserError, match="run it once for each path of data.sources"):
        measure.run(config, MeasureOptions(path="model", device="cpu"))


def test_what_of_a_run_says_how_it_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = measured_config("whole", ["chat.jsonl", "data.bad_rows=drop"])
    assert isinstance(config, SftConfig) and config.data.max_length == 60 and config.data.bad_rows == "drop"
    assert config.model.path.startswith("whole/checkpoints/step-") and config.eval.path is None
    adapted = measured_config("adapted", ["chat.jsonl"])
    assert adapted.model.path == str(folder / "model") and str(adapted.lora.path).startswith(
        "adapted/checkpoints/step-"
    )
    checkpoint = str(adapted.lora.path)
    assert measured_config(checkpoint, ["chat.jsonl"]).lora.path == checkpoint
    rewarded = measured_config("model", ["chat.jsonl", "rl.reward=[length]", "eval.samples=2"])
    assert isinstance(rewarded, RlConfig) and rewarded.eval.path == rewarded.data.path == "chat.jsonl"
    assert (rewarded.rl.prompts_per_step, rewarded.eval.samples) == (1, 2)
    with pytest.raises(
        UserError, match="weft eval: the path of the data is missing, as in weft eval model held_out.jsonl"
    ):
        measured_config("model", ["data.bad_rows=drop"])
    with pytest.raises(UserError, match="is a second file"):
        measured_config("model", ["chat.jsonl", "model"])
    with pytest.raises(UserError, match="--step 3 selects a checkpoint of a run folder"):
        measured_config("model", ["chat.jsonl"], 3)
