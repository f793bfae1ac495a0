"""What is said before anything is imported, loaded or asked of a network."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest

from tests.support.zoo import tiny_config
from weft import cli, hub
from weft.config.load import load_config, written_config
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.data.encode import load_tokenizer
from weft.errors import UserError
from weft.importing import named_problem
from weft.launch import process
from weft.models import hf

MODULE = "from os import path as where\nRIGHT = 1\nif RIGHT:\n    def is_right(): ...\nclass Calculator: ...\n"
NAMED = {
    "mine:is_right": "", "mine:Calculator.step": "", "mine:where": "", "mine.RIGHT": "", "open_:anything": "",
    "torch.optim:Adamax": "", "pack.inside:one": "", "broken:x": "", "sys:path": "",
    "mine:is_rihgt": "rl.reward: mine has no is_rihgt. Did you mean mine:is_right?",
    "mines:is_right": "rl.reward: there is no module mines for mines:is_right",
    "pack.outside:one": "rl.reward: there is no module pack.outside for pack.outside:one",
    "torch.optim:Adamaxx": "rl.reward: torch.optim has no Adamaxx. Did you mean torch.optim:Adamax?",
}  # fmt: skip


@pytest.mark.parametrize("path", NAMED)
def test_import_paths_are_looked_up_without_running_anything(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(MODULE + "print('this was run')\nraise SystemExit\n")
    (tmp_path / "open_.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "inside.py").write_text("one = 1")
    problem = named_problem(path, "rl.reward")
    assert problem.startswith(NAMED[path]) and bool(problem) == bool(NAMED[path])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "run.dir=gs://bucket/run",
            "run.dir gs://bucket/run: gs:// needs the package gcsfs, which is not installed",
        ),
        ("data.path=az://host/rows.jsonl", "data.path az://host/rows.jsonl: az:// needs the package adlfs"),
        ("train.loss=json:Focal", "train.loss: json has no Focal"),
        ("optimizer.name=nowhere:Lion", "optimizer.name: there is no module nowhere for nowhere:Lion"),
    ],
)
def test_what_a_config_names_that_is_not_there(override: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    tiny_config("llama").save_pretrained(tmp_path / "model")
    overrides = [f"model.path={tmp_path}/model", "model.init=random", f"data.path={tmp_path}/rows.jsonl"]
    with pytest.raises(UserError, match=re.escape(f"command line: {words}")):
        load_config([], [*overrides, override], SftConfig)


def test_a_run_of_another_command_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {path: d}\n")
    with pytest.raises(UserError, match=f"weft sft wrote this run: use weft sft --resume {tmp_path}"):
        written_config(str(tmp_path), RlConfig)
    (tmp_path / "config.yaml").write_text("rl: {prompts: 3}\n")
    with pytest.raises(UserError, match=f"weft rl wrote this run: use weft rl --resume {tmp_path}"):
        written_config(str(tmp_path), SftConfig)


def test_a_hub_out_of_reach_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would retry for a minute, and the tokenizer be blamed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model-dir").mkdir()
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(hub, "getproxies", dict)
    began = time.monotonic()
    for read in (load_tokenizer, hf.read_config):
        with pytest.raises(UserError, match="127.0.0.1 cannot be reached .*Did you mean model-dir?"):
            read("model-dri")
    assert time.monotonic() - began < 5
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy"})
    hub.check_model_is_there("model-dri")


def test_a_model_that_is_not_cached_is_not_looked_for_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tokenizer would be blamed, and its files asked for."""
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    for read in (load_tokenizer, hf.read_config):
        with pytest.raises(
            UserError, match=r"someone/model is not a folder .* HF_HUB_OFFLINE is set.*unset HF_HUB_OFFLINE"
        ):
            read("someone/model")
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda path, name: str(tmp_path) if "tokenizer" in name else None
    )
    hub.check_model_is_there("someone/model")


def test_variables_in_paths_that_are_made_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name would be made, and the run be looked for elsewhere."""
    monkeypatch.setenv("SCRATCH", "/large")
    for key in ("run.dir", "data.cache"):
        base = ["model.path=org/model", "data.path=org/data"]
        for value in ("$SCRATCH/new", "${SCRATCH}/new"):
            with pytest.raises(
                UserError, match=rf"{key} is '.*', but weft does not expand variables in a config: write .*/large/new"
            ):
                load_config([], [*base, f"{key}={value}"])
        with pytest.raises(UserError, match=rf"{key} is .*oc.env:SCRATCH.*: write the path itself"):
            load_config([], [*base, f"{key}=${{oc.env:SCRATCH}}/new"])
        load_config([], [*base, f"{key}=costs-5$"])


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(UserError, match=f"port {port} of this machine, .*is in use.*set it to a free port"):
            process.join("cpu", 5)


def test_the_hub_is_tried_at_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        tried.append(address)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.socket, "create_connection", refuse)
    for endpoint in ("http://mirror.example:8081", "https://mirror.example"):
        monkeypatch.setattr(hub.constants, "ENDPOINT", endpoint)
        with pytest.raises(UserError, match="mirror.example cannot be reached"):
            hub.check_model_is_there("no-such-org/no-such-model")
    assert tried == [("mirror.example", 8081), ("mirror.example", 443)]


# command, family of the model, words -> what is refused
REFUSED: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "no experts": ("sft", "llama", ("mesh.ep=2", "--nproc", "2"), "mesh.ep=2: weft finds no experts"),
    "no experts in dpo": ("dpo", "qwen3", ("mesh.ep=2", "--nproc", "2"), "mesh.ep=2: weft finds no experts"),
    "no experts in reward": ("reward", "llama", ("mesh.ep=2", "--nproc", "2"), "Set mesh.ep=1"),
    "no experts in rl": ("rl", "llama", ("mesh.ep=2", "--nproc", "2"), "mesh.ep=2: weft finds no experts"),
    "few experts": ("sft", "qwen3_moe", ("mesh.ep=16", "--nproc", "16"), "Set mesh.ep to 5 or less"),
    "few layers": ("distill", "llama", ("mesh.pp=8", "--nproc", "8"), "this model allow: set mesh.pp=2"),
    "few layers in rl": ("rl", "llama", ("mesh.pp=8", "--nproc", "8"), "this model allow: set mesh.pp=2"),
    "balance": ("sft", "llama", ("model.router_aux_loss=document",), "Set model.router_aux_loss=none"),
    "a row": ("sft", "llama", (), "rows.jsonl:1: has `txt`, but needs `messages`"),
    "a row of pairs": ("dpo", "llama", (), "rows.jsonl:1: "),
    "no vLLM": ("rl", "llama", ("rollout.engine=vllm", "rollout.python=/nowhere"), "no Python at /nowhere"),
    "biases": ("sft", "llama", ("model.router_bias_rate=0.001",), "Set model.router_bias_rate=null"),
}
_ROWS = {"rl": '{"prompt": "a", "answer": "b"}', "sft": '{"text": "a"}', "distill": '{"text": "a"}'}


@pytest.mark.parametrize("name", REFUSED)
def test_what_config_json_rules_out_is_refused_before_ranks_and_ray_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, family, words, expected = REFUSED[name]
    text = _ROWS.get(command, '{"prompt": "a", "chosen": "b", "rejected": "c"}') + "\n"
    (tmp_path / "rows.jsonl").write_text('{"txt": "a"}\n' if name.startswith("a row") else text)
    tiny_config(family).save_pretrained(tmp_path / "model")
    model = [f"model.path={tmp_path}/model", "model.init=random", f"data.path={tmp_path}/rows.jsonl"]
    model += ["rl.reward=[exact_match]"] if command == "rl" else []
    if command == "distill":
        tiny_config(family).save_pretrained(tmp_path / "teacher")
        model += [f"distill.teacher={tmp_path}/teacher"]

    def started(*arguments: object) -> int:
        raise AssertionError("a rank, or the controller of Ray, started")

    monkeypatch.setattr(cli, "run", started)
    monkeypatch.setattr(cli, "run_with_restarts", started)
    monkeypatch.setattr("subprocess.Popen", started)
    monkeypatch.setattr(cli, "check_ranks_fit", lambda *arguments: None)
    seconds = time.process_time()
    status = cli.main([command, *model, *words, "--device", "cpu"])
    assert status == 2 and expected in capsys.readouterr().err
    assert time.process_time() - seconds < 5
