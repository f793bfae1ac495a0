"""model.imports: an architecture of the user's own is trained, checked, saved and used like any other."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import forked
from tests.support.cases import parity
from tests.support.pool import run
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from weft import cli
from weft.config.load import imports_of_run
from weft.engine.selfcheck.architecture import LENGTHS, examine
from weft.engine.selfcheck.division import check_division
from weft.errors import UserError
from weft.launch.options import ChatOptions, ExportOptions
from weft.models import hf
from weft.recipes import export
from weft.recipes.chat import open_chat

MODULE = "tests.support.own_architecture"
IMPORTS = {"model": {"imports": (MODULE,)}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support.own_architecture import TwinConfig, TwinForCausalLM

    folder = tmp_path_factory.mktemp("own") / "model"
    torch.manual_seed(0)
    TwinForCausalLM(TwinConfig()).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.covers("model.imports")
@pytest.mark.parametrize("mesh", ["2", "tp2", "pp2"])
def test_gradients_and_weights_are_plain_transformers(mesh: str, model: str) -> None:
    verdict = run(2, parity, model, mesh, IMPORTS)[0]
    assert verdict is not None and verdict.passed, verdict


@pytest.fixture(scope="module")
def far_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with weights that only documents of more than 40 tokens use: one of the first step, none of the second,
    one of the third."""
    from tests.support.own_architecture import TwinConfig, TwinForCausalLM

    folder = tmp_path_factory.mktemp("far") / "model"
    torch.manual_seed(0)
    TwinForCausalLM(TwinConfig(far_from=40, num_hidden_layers=4)).save_pretrained(folder)
    return str(folder)


FAR_MESHES = ["2", "2x1", "pp2", "cp2", "tp2"]


@pytest.mark.parametrize("mesh", FAR_MESHES)
def test_weights_that_only_some_documents_use(mesh: str, far_model: str) -> None:
    """A rank without such documents reduces zeros; in a step without any, AdamW skips these weights, on all ranks."""
    verdict = run(2, parity, far_model, mesh, IMPORTS | {"step": {"max_tokens_per_device": 64}})[0]
    assert verdict is not None and verdict.passed, verdict


@pytest.mark.parametrize(
    ("far_from", "longest", "uses_all"), [(0, LENGTHS[0], True), (40, 4 * LENGTHS[0], True), (9999, LENGTHS[0], False)]
)
def test_the_checks_have_documents_that_use_all_weights(far_from: int, longest: int, uses_all: bool) -> None:
    """Code that no document of the checks runs might need whole rows between blocks."""
    from tests.support.own_architecture import TwinConfig

    config = TwinConfig(far_from=far_from, max_position_embeddings=256, architectures=["TwinForCausalLM"])
    support = examine(config)
    assert (support.longest, support.uses_all) == (longest, uses_all)
    assert check_division(config, support, 2).sequence == (far_from == 0)


@pytest.mark.table
@pytest.mark.parametrize("reduce", ["every", "scatter", "last"])
@pytest.mark.parametrize("mesh", ["2x2", "pp2x2", "pp2zx2", "pp2vx2x1", "2xcp2", "2xtp2", "cp2xtp2", "pp2xtp2"])
def test_weights_that_only_some_documents_use_however_gradients_are_reduced(
    mesh: str, reduce: str, far_model: str
) -> None:
    sections = IMPORTS | {"step": {"max_tokens_per_device": 64}, "fsdp": {"reduce": reduce}}
    verdict = run(4, parity, far_model, mesh, sections)[0]
    assert verdict is not None and verdict.passed, verdict


@pytest.fixture
def job(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of a run with data, in a working directory that holds my_model.py, which registers the architecture."""
    (tmp_path / "my_model.py").write_text("import tests.support.own_architecture\n")
    write_jsonl(tmp_path / "chat.jsonl", *[chat(("user", "a"), ("assistant", "b"))] * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return [
        f"model.path={model}", "model.imports=[my_model]", "data.path=chat.jsonl", "step.documents=4",
        "step.max_tokens_per_device=128",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_in_processes_that_know_nothing_of_it(job: list[str], model: str, tmp_path: Path) -> None:
    """Trained, planned and verified on a shrunken copy by the command; then exported, and loaded by transformers."""
    words = ["train.steps=1", "run.dir=run", "--device", "cpu"]
    for command in (["sft", *job, *words], ["plan", *job], ["verify", *job, "--layers", "1", "--device", "cpu"]):
        done = forked.run(command, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert imports_of_run("run") == imports_of_run("run/checkpoints/latest") == ("my_model",)
    exported = export.run(ExportOptions(path="run", output="exported", dtype="auto"))
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "twin" and config["architectures"] == ["TwinForCausalLM"]
    after = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert after.keys() == before.keys() and any(not torch.equal(after[name], before[name]) for name in after)
    answered = open_chat(ChatOptions(path="run", max_new_tokens=4, temperature=0.0, device="cpu"))
    assert isinstance(answered.say("a"), str)


def test_a_module_in_the_models_folder_is_never_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "comes_along.py").write_text("raise SystemExit('was run')")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(UserError, match=r"comes_along is .*, in the model's folder, but weft runs no code"):
        hf.import_architectures(["comes_along"], str(folder))
    (tmp_path / "package" / "model").mkdir(parents=True)
    (tmp_path / "package" / "model" / "inside.py").write_text("raise SystemExit('was run')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UserError, match=r"package.model.inside is .*, in the model's folder"):
        hf.import_architectures(["package.model.inside"], str(tmp_path / "package" / "model"))


WRONG = {
    "model.imports=[nowhere]": "there is no module nowhere",
    "model.imports=['my model']": "'my model' is not the name of a module: write my_model",
    "model.imports=[my_model.py]": "write my_model",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_module_that_is_not_there_is_said_before_anything_is_read(
    word: str, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sft", *job, word, "--device", "cpu"]) == 2
    assert WRONG[word] in capsys.readouterr().err


def test_what_an_unknown_architecture_needs_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "architectures": ["MineForCausalLM"]}))
    with pytest.raises(UserError, match="set model.imports to the module that registers it"):
        hf.read_config(str(tmp_path))
