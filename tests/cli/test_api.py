"""weft.sft and weft.rl: the commands from Python."""

from __future__ import annotations

import inspect
import json
import pickle
import pkgutil
import pydoc
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict

import weft
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft import api, cli
from weft.config import to_dict
from weft.config.load import load_config
from weft.config.run_schema import RunConfig
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.launch import ray_actors
from weft.models import hf
from weft.observe.folder import make_folder
from weft.recipes import distill as distill_recipe
from weft.recipes import rl as rl_recipe

ROWS = [chat(("user", "a" * (i % 3 + 1)), ("assistant", "bcd" * (i % 4 + 1))) for i in range(8)]
SECTIONS: dict[str, Any] = {
    "step": {"documents": 4, "max_tokens_per_device": 128},
    "optimizer": {"lr": 1e-2, "betas": (0.9, 0.99)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api")
    byte_tokenizer().save_pretrained(path / "model")
    config = tiny_config("llama", vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path / "model")
    write_jsonl(path / "chats.jsonl", *ROWS)
    return path


@pytest.fixture(autouse=True)
def workdir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def test_a_teacher_goes_beside_what_the_config_says_of_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(distill_recipe, "run", lambda config, options, hooks: configs.append(config))
    base = {"data": {"path": "chats.jsonl"}, "distill": {"loss": "jsd", "beta": 0.1, "teacher": "another"}}
    weft.distill(base, model="model", teacher="teacher", run={"dir": "student"})
    (config,) = configs
    assert (config.distill.teacher, config.distill.loss, config.distill.beta) == ("teacher", "jsd", 0.1)
    with pytest.raises(UserError, match="are both set"):
        weft.distill(base, model="model", teacher="model", distill={"teacher": "another"})


@pytest.mark.slow
def test_rows_in_memory_train_as_the_file_does(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics: list[Any] = []
    run = weft.sft(model="model", data=iter(ROWS), on_step=metrics.append, run={"dir": "rows"}, **SECTIONS)
    overrides = [
        "step.documents=4",
        "step.max_tokens_per_device=128",
        "optimizer.lr=1e-2",
        "optimizer.betas=[0.9,0.99]",
    ]
    assert cli.main(["sft", "model.path=model", "data.path=chats.jsonl", "run.dir=file", *overrides]) == 0
    file = weft.Run(workdir / "file")
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in file.metrics]
    assert [line["step"] for line in metrics] == [1, 2]
    assert [line["loss"] for line in metrics] == [line["loss"] for line in run.metrics]
    assert run.summary["steps"] == 2 and (run.model / "model.safetensors").exists()
    assert [json.loads(line) for line in (run.folder / "data.jsonl").read_text().splitlines()] == ROWS
    actual, expected = (to_dict(load_config([str(r.folder / "config.yaml")], [])) for r in (run, file))
    assert (actual["data"].pop("path"), actual["run"].pop("dir")) == ("rows/data.jsonl", "rows")
    assert (expected["data"].pop("path"), expected["run"].pop("dir")) == ("chats.jsonl", "file")
    assert actual == expected
    capsys.readouterr()
    with pytest.raises(UserError, match="run.dir: rows already contains a run"):
        weft.sft(model="model", data=ROWS, run={"dir": "rows"}, **SECTIONS)
    assert cli.main(["sft", "--resume", "rows"]) == 0
    assert "rows has already finished" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_values_of_numpy_and_a_cell_that_is_run_again(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "c.yaml").write_text(
        "model: {path: model}\nstep: {documents: 4}\noptimizer: {lr: 1}\nrun: {dir: cell}\n"
    )
    sections: dict[str, Any] = {"optimizer": {"lr": np.float32(1e-2), "name": torch.optim.Adamax}}
    runs = [
        weft.sft(
            "c.yaml", data=ROWS[:rows], overwrite=overwrite, train={"steps": np.int64(2), "epochs": None}, **sections
        )
        for rows, overwrite in ((8, False), (4, True))
    ]
    (workdir / "cell" / "notes.txt").write_text("mine")
    assert runs[0].folder == runs[1].folder == Path("cell")
    written = load_config(["cell/config.yaml"], [])
    assert (written.optimizer.name, written.optimizer.lr) == ("torch.optim.adamax:Adamax", pytest.approx(1e-2))
    assert len((workdir / "cell" / "data.jsonl").read_text().splitlines()) == 4
    grown = weft.sft(resume="cell", checkpoint={"keep": 1})
    assert [line["step"] for line in grown.metrics] == [1, 2] and "already finished" in capsys.readouterr().out
    (workdir / "cell" / "critic" / "checkpoints").mkdir(parents=True)  # of a run of weft rl
    (workdir / "cell" / "track.json").write_text('{"id": "earlier"}')
    weft.sft("c.yaml", data="chats.jsonl", overwrite=True, train={"steps": 1, "epochs": None})
    assert not (workdir / "cell" / "critic").exists() and not (workdir / "cell" / "track.json").exists()
    assert len(runs[0].metrics) == 1 and (workdir / "cell" / "notes.txt").read_text() == "mine"


@pytest.mark.covers("run.overwrite")
def test_a_start_that_failed_leaves_no_run(workdir: Path) -> None:
    """A folder in which no step was taken can be used again."""
    (workdir / "failed").mkdir()
    (workdir / "failed" / "metrics.jsonl").touch()
    (workdir / "failed" / "config.yaml").touch()
    (workdir / "failed" / "checkpoints").mkdir()
    assert make_folder(RunConfig(dir="failed"), "model") == Path("failed")
    (workdir / "failed" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="failed already contains a run.*run.overwrite=true"):
        make_folder(RunConfig(dir="failed"), "model")
    assert make_folder(RunConfig(dir="failed", overwrite=True), "model") == Path("failed")


def test_names_of_the_package() -> None:
    """weft.rl is a function and a package, whichever a program imports first."""
    import weft.inference.types as types
    import weft.rl.algorithms.base  # Python sets weft.rl to the package here

    public = [
        "Batch", "Document", "Engine", "Environment", "Loss", "LossOutput", "Reply", "Run", "distill", "dpo", "reward",
        "rl", "sft",
    ]  # fmt: skip
    assert dir(weft) == public and all(getattr(weft, name).__name__ == name for name in public)
    assert inspect.isfunction(weft.rl) and "Reinforcement learning" in pydoc.render_doc(weft.rl)
    assert pickle.loads(pickle.dumps(weft.rl)) is weft.rl is api.rl
    assert weft.rl.algorithms.base is pkgutil.resolve_name("weft.rl.algorithms.base")
    assert types.__name__ == "weft.inference.types" and weft.Engine.__module__ == "weft.engine.engine"
    assert Path(weft.__file__).with_name("py.typed").exists()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda terms: terms.loss_sum, "Returns returned a Tensor of shape []; it must be LossOutput(loss_sum=...)"),
        (lambda terms: replace(terms, loss_sum=terms.loss_sum[None]), "a loss_sum that is a Tensor of shape [1]"),
        (lambda terms: None, "Returns returned a NoneType"),
    ],
)
def test_an_objective_that_returns_something_else(result: Any, words: str) -> None:
    class Returns(CrossEntropy):
        def __call__(self, batch: Any) -> Any:
            return result(super().__call__(batch))

    with pytest.raises(UserError, match=re.escape(words)):
        weft.sft(model="model", data="chats.jsonl", objective=Returns, run={"dir": "returns", "overwrite": True})


@pytest.mark.slow
def test_an_objective_may_be_an_object(workdir: Path) -> None:
    class Doubled(CrossEntropy):
        def normaliser(self, plan: Any) -> float:
            return super().normaliser(plan) / 2

    run = weft.sft(model={"path": "model"}, data={"path": "chats.jsonl"}, objective=Doubled, **SECTIONS)
    assert run.folder.parent == Path("runs") and run.folder.name.startswith("model-")
    plain = weft.sft(model={"path": "model"}, data={"path": "chats.jsonl"}, run={"dir": "plain"}, **SECTIONS)
    norms = [r.metrics[0]["grad_norm"] for r in (run, plain)]
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-5)
    assert "Doubled" in (run.folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"optimizer": {"learning_rate": 1}},
            "weft.sft: optimizer.learning_rate is not a key of weft: set `optimizer.lr`",
        ),
        ({"learning_rate": 1e-5}, "weft.sft: learning_rate is not a key of weft: set `optimizer.lr`"),
        ({"step": {"documents": "many"}}, "weft.sft: step.documents must be an integer or null, not many"),
        ({"data": {"rows": ROWS, "split": 3}}, "weft.sft: data.split must be a string or null, not 3"),
        ({"data": {"rows": ROWS, "path": "chats.jsonl"}}, "data={'rows': ..., 'path': ...} sets the data twice"),
        ({"data": ["text"]}, 'data: row 1 is a str, not a dict such as {"messages"'),
        ({"data": [{"text": {1, 2}}]}, "data: row 1, column 'text' cannot be written as JSON"),
        ({"data": [{"text": "a", "score": float("nan")}]}, "row 1, column 'score' cannot be written as JSON"),
        ({"data": DatasetDict(train=Dataset.from_list(ROWS))}, "data has splits (train): pass the rows of one"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a Linear, not a path or hub id"),
        ({"on_step": 3}, "on_step is a int: pass a function"),
        ({"model": "nowhere/at/all"}, "model.path nowhere/at/all does not exist"),
        ({"objective": object()}, "train.loss: object is not a loss"),
    ],
)
def test_what_is_wrong_is_said(arguments: dict[str, Any], words: str) -> None:
    arguments_given = {"model": "model", "data": "chats.jsonl", "run": {"dir": "wrong"}, **arguments}
    with pytest.raises(UserError) as caught:
        weft.sft(**arguments_given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rl": {"promts": 3}}, "weft.rl: rl.promts is not a key of weft: did you mean rl.prompts_per_step?"),
        ({"reward": None}, "rl.reward is empty: set at least one reward function"),
        ({"reward": ["math", 3]}, "reward: 3 is of type int: give a function"),
        ({"rl": {"reward": "math"}}, "reward and rl={'reward': ...} are both set"),
        ({"rl": 3}, "rl is a section, not a int"),
        ({"data": ["text"]}, 'data: row 1 is a str, not a dict such as {"messages"'),
        ({"config": 3}, "config is a int: pass a YAML file, a dict of sections, or a loaded config"),
        ({"config": {"rl": {"clip": 3}}}, "weft.rl: rl.clip must be"),
        ({"resume": "nowhere"}, "resume reads the data of the resumed run: remove the argument data"),
        ({"resume": "nowhere", "data": None}, "--resume nowhere: it does not exist"),
        ({"resume": "nowhere", "config": {}}, "resume reads the config of the resumed run: remove config"),
        ({"mesh": {"dp_shard": 3}, "cluster": {"trainer_ranks": 2}}, "mesh.dp_shard"),
        ({"on_step": 3}, "on_step is a int: pass a function"),
    ],
)
def test_what_is_wrong_with_reinforcement_learning_is_said(arguments: dict[str, Any], words: str) -> None:
    arguments_given = {
        "model": "model",
        "data": [{"prompt": "a"}],
        "reward": "length",
        "run": {"dir": "wrong"},
        **arguments,
    }
    with pytest.raises(UserError) as caught:
        weft.rl(**arguments_given)
    assert words in str(caught.value)


def test_a_config_is_that_of_its_file_or_object(workdir: Path) -> None:
    """weft.rl is a folder and a function, whatever has been imported."""
    configs: list[Any] = []
    (workdir / "rl.yaml").write_text(
        "model: {path: model}\nrl: {reward: [length], prompts: 3}\ndata: {path: chats.jsonl}\n"
    )
    with mock.patch.object(api, "_run_rl", lambda config, *_: configs.append(config)):
        weft.rl("rl.yaml", rl={"group_size": 2})
        weft.rl(configs[0], rl={**to_dict(configs[0])["rl"], "group_size": 4})
        weft.rl({"rl": {"prompts_per_step": 3, "group_size": 2}}, model="model", data="chats.jsonl", reward=["length"])
    first, second, third = configs
    assert (first.rl.prompts_per_step, first.rl.group_size, second.rl.group_size) == (3, 2, 4)
    assert first == third and replace(second, rl=first.rl) == first
    assert list(inspect.signature(weft.rl).parameters)[:4] == ["config", "model", "data", "reward"]


def test_scalars_of_numpy_are_written_as_numbers() -> None:
    row = {"text": "a", "id": np.int64(3), "scores": np.arange(2)}
    assert json.loads(api._line(row, 1)) == {"text": "a", "id": 3, "scores": [0, 1]}


def test_several_ranks_need_a_file_and_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="set data to the path of a file"):
        weft.sft(model="model", data=ROWS)
    with pytest.raises(UserError, match="set run=.*so that all ranks"):
        weft.sft(model="model", data="chats.jsonl")


def test_importing_weft_imports_no_torch() -> None:
    code = "import sys, weft; weft.sft; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_is_named_by_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    run = weft.Run(str(tmp_path))  # type: ignore[arg-type]  # notebooks check no types
    assert run.metrics == [{"step": 1}] and run.model == tmp_path / "checkpoints" / "latest"


def test_a_run_of_reinforcement_learning_gets_its_folder_and_hooks(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []
    monkeypatch.setattr(ray_actors, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(rl_recipe, "run", lambda *arguments: passed.extend(arguments))
    run = weft.rl(model="model", data="chats.jsonl", reward="length", on_step=passed.append)
    config, options, hooks = passed
    assert isinstance(config, api.RlConfig) and config.run.dir == str(run.folder)
    assert isinstance(options, api.RlOptions) and hooks.on_step == passed.append
