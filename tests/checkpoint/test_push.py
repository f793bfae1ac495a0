"""Uploads to the hub: what arrives is what lies on the disk, and nothing of them ends a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers
import yaml

from tests.support import forked, hub_server, local_rl
from tests.support.cases import world_of
from tests.support.hub_server import Hub, hub, hub_in_use
from tests.support.pool import run
from tests.support.resuming import Sections, attempt, inputs, lines, process
from weft import cli
from weft.checkpoint.remote import card
from weft.checkpoint.remote.card import CARD, model_card
from weft.checkpoint.remote.push import Pusher, Repository
from weft.checkpoint.retention import complete_steps
from weft.config.load import load_config
from weft.config.schema import CheckpointConfig
from weft.errors import UserError
from weft.recipes import push

LORA: Sections = {"lora": {"rank": 2}, "checkpoint": {"every": 5, "keep": None}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints after steps 5 and 10."""
    folder = tmp_path_factory.mktemp("push") / "run"
    process(folder, "2", sections={"checkpoint": {"every": 5, "keep": None}})
    return folder


@pytest.fixture
def served() -> Iterator[Hub]:
    with hub() as fake_hub, hub_in_use(fake_hub.url):
        yield fake_hub


def on_disk(checkpoint: Path) -> dict[str, bytes]:
    """What a user of the model needs, read independently of weft's own list."""
    files = [path for path in checkpoint.iterdir() if path.is_file() and path.name != "digests.json"]
    return {path.name: path.read_bytes() for path in files}


def front_matter(text: bytes | str) -> dict[str, Any]:
    text = text.decode() if isinstance(text, bytes) else text
    fields: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return fields


def main(*words: str) -> int:
    return cli.main(["push", *words])


# ---------------------------------------------------------------- weft push


def test_what_arrives_is_what_lies_on_the_disk(finished: Path, served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(finished.rglob("*"))
    assert main(str(finished), "me/model") == 0
    assert f"pushed   {served.url}/me/model/commit/" in capsys.readouterr().out
    arrived = dict(served.files("me/model"))
    text = arrived.pop("README.md")
    assert arrived == on_disk(finished / "checkpoints/step-000010")
    assert any(name.endswith(".safetensors") for name in arrived)
    assert not [name for name in arrived if "trainer_state" in name or "rank-" in name or "digests" in name]
    assert [(commit.branch, commit.message) for commit in served.repos["me/model"].commits] == [
        ("main", "Upload step-000010")
    ]
    assert front_matter(text)["tags"] == ["weft", "sft"]
    assert not served.repos["me/model"].private
    assert sorted(finished.rglob("*")) == before  # nothing is left in the run's folder


def test_options(finished: Path, served: Hub) -> None:
    words = ["--private", "--revision", "five", "--message", "halfway", "--step", "5"]
    assert main(str(finished), "ours/model", *words) == 0
    assert served.repos["ours/model"].private
    assert served.files("ours/model") == {}
    arrived = dict(served.files("ours/model", "five"))
    assert b"optimizer step 5 of 10" in arrived.pop("README.md")
    assert arrived == on_disk(finished / "checkpoints/step-000005")
    assert [(commit.branch, commit.message) for commit in served.repos["ours/model"].commits] == [("five", "halfway")]


def test_it_loads_from_what_arrived(finished: Path, served: Hub, tmp_path: Path) -> None:
    assert main(str(finished / "checkpoints/latest"), "me/model") == 0
    for name, content in served.files("me/model").items():
        (tmp_path / name).write_bytes(content)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_a_card_that_is_there_stays(finished: Path, served: Hub, tmp_path: Path) -> None:
    shutil.copytree(finished / "checkpoints/step-000010", tmp_path / "mine")
    (tmp_path / "mine/README.md").write_text("---\nlicense: mit\n---\nmine\n")
    assert main(str(tmp_path / "mine"), "me/model") == 0
    assert served.files("me/model")["README.md"] == b"---\nlicense: mit\n---\nmine\n"


def test_the_best(finished: Path, served: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(finished), "me/model", "--best") == 2
    assert "checkpoint.keep_best=true" in capsys.readouterr().err
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (tmp_path / "run/checkpoints/best").symlink_to("step-000005")
    assert main(str(tmp_path / "run"), "me/model", "--best") == 0
    assert b"optimizer step 5" in served.files("me/model")["README.md"]


@pytest.mark.slow
def test_the_program_asks_hf_endpoint(finished: Path, tmp_path: Path) -> None:
    with hub() as fake_hub:
        words = [sys.executable, "-m", "weft", "push", str(finished), "me/model"]
        environment = {**os.environ, **hub_server.variables(fake_hub.url, tmp_path)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert set(on_disk(finished / "checkpoints/latest")) < set(fake_hub.files("me/model"))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((401, "Invalid credentials in Authorization header"), "Run `hf auth login`, or set HF_TOKEN to another token"),
        ((403, "you may not"), "or name another repository"),
        ((429, "slow down"), "Try again in a few minutes"),
        ((500, "we are down"), "the hub answers 500 (we are down), an internal error of the hub. Try again later"),
        ((503, "we are down"), "Try again later"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("path", ["/api/repos/create", "/commit/"])
def test_what_the_hub_answers(
    fault: tuple[int, str], message: str, path: str, finished: Path, served: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    served.faults["POST", path] = fault
    assert main(str(finished), "me/model") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: weft push: the upload to me/model failed: ")
    assert message in line


def test_somebody_elses_name(finished: Path, served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(finished), "them/model") == 2
    assert "the token has no write access there" in capsys.readouterr().err
    assert served.repos == {}


def test_another_token(finished: Path, served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    with hub_in_use(served.url, "hf_wrong"):
        assert main(str(finished), "me/model") == 2
    assert "the token is invalid" in capsys.readouterr().err


def test_no_token_no_network_offline(finished: Path, served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    with hub_in_use(served.url, None):
        os.environ.pop("HF_TOKEN", None)
        assert main(str(finished), "me/model") == 2
    assert "Run `hf auth login`, or set HF_TOKEN" in capsys.readouterr().err
    with hub_in_use(served.url, offline=True):
        assert main(str(finished), "me/model") == 2
    assert "HF_HUB_OFFLINE is set. Unset it" in capsys.readouterr().err
    with hub_in_use("http://127.0.0.1:9"):
        assert main(str(finished), "me/model") == 2
    assert "http://127.0.0.1:9 (HF_ENDPOINT) cannot be reached" in capsys.readouterr().err
    assert served.requests == []


@pytest.mark.parametrize("name", ["model", "me/model/x", "me/a b", "me/-model", "me/mo--del", "me/" + "m" * 100, "/x"])
def test_a_name_that_the_hub_cannot_have(
    name: str, finished: Path, served: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(str(finished), name) == 2
    assert "must be OWNER/NAME" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"checkpoint\.push is .* must be OWNER/NAME"):
        load_config(
            [], [f"model.path={inputs()}/model", f"data.path={inputs()}/chats.jsonl", f"checkpoint.push={name}"]
        )
    assert served.requests == []


def test_keys_without_a_repository_are_refused() -> None:
    with pytest.raises(UserError, match=r"push_private would have no effect: checkpoint\.push is null"):
        load_config(
            [], [f"model.path={inputs()}/model", f"data.path={inputs()}/chats.jsonl", "checkpoint.push_private=true"]
        )


def damaged(finished: Path, tmp_path: Path, how: str) -> Path:
    folder = tmp_path / ("step-000010.partial" if how == "partial" else "step-000010")
    shutil.copytree(finished / "checkpoints/step-000010", folder)
    weights = folder / "model.safetensors"
    if how == "gone":
        weights.unlink()
    elif how == "short":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif how == "changed":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(bytes(content))
    elif how == "shard":
        named = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("partial", "is incomplete"),
        ("gone", "contains no weights"),
        ("short", "model.safetensors"),
        ("changed", "was changed after it was written"),
        ("shard", "lists model-2.safetensors"),
        ("empty", "neither a run folder"),
    ],
)
def test_what_is_not_whole_is_not_uploaded(
    how: str, message: str, finished: Path, tmp_path: Path, served: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(str(damaged(finished, tmp_path, how)), "me/model") == 2
    assert message in capsys.readouterr().err
    assert served.requests == []


def test_steps_that_are_not_there(finished: Path, served: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(finished), "me/model", "--step", "7") == 2
    assert "has checkpoints of steps 5, 10" in capsys.readouterr().err
    assert main(str(finished / "checkpoints/latest"), "me/model", "--step", "5") == 2
    assert "is not a run folder: remove them" in capsys.readouterr().err


# ---------------------------------------------------------------- checkpoint.push


def attempt_with_hub(url: str, token: str | None, *arguments: Any) -> None:
    """A run of one rank, which asks the hub at this address."""
    with hub_in_use(url, token):
        attempt(*arguments)


def attempt_that_waits_for_an_upload(url: str, token: str | None, *arguments: Any) -> None:
    """The same, whose training goes on from its first complete checkpoint when the first upload has begun: a short run
    would be over before the thread of the uploads looks for a checkpoint."""
    pop_messages = Pusher.pop_messages
    waited = threading.Event()

    def pop_when_uploading(pusher: Pusher) -> list[str]:
        if complete_steps(pusher._checkpoints) and not waited.is_set():
            deadline = time.monotonic() + 60.0
            while not (pusher._links / CARD).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            waited.set()
        return pop_messages(pusher)

    with mock.patch.object(Pusher, "pop_messages", pop_when_uploading):
        attempt_with_hub(url, token, *arguments)


def trained(
    folder: Path, url: str, mesh: str = "1", token: str | None = hub_server.TOKEN,
    attempt_of: Callable[..., None] = attempt_with_hub, **sections: Any,
) -> None:  # fmt: skip
    run(world_of(mesh), attempt_of, url, token, str(inputs()), str(folder), mesh, False, None, sections, None)


@pytest.mark.covers("checkpoint.push", "checkpoint.push_private")
def test_the_last_checkpoint_at_the_end(finished: Path, tmp_path: Path) -> None:
    with hub() as fake_hub:
        trained(tmp_path / "run", fake_hub.url, "2", checkpoint={"every": 5, "push": "me/model", "push_private": True})
        assert fake_hub.repos["me/model"].private
        assert [commit.message for commit in fake_hub.repos["me/model"].commits] == ["Upload step-000010 of run"]
        arrived = dict(fake_hub.files("me/model"))
        assert b"optimizer step 10 of 10" in arrived.pop("README.md")
        assert arrived == on_disk(tmp_path / "run/checkpoints/step-000010") == on_disk(finished / "checkpoints/latest")
    assert lines(tmp_path / "run") == lines(finished)
    assert not (tmp_path / "run/pushing").exists()


@pytest.mark.covers("checkpoint.push_at")
def test_after_each_save_while_training_goes_on_and_checkpoints_are_removed(tmp_path: Path) -> None:
    """The hub takes nothing until the run has all its checkpoints but the last removed: what it has from the first
    upload is whole."""
    keys = {"every": 1, "keep": 1, "push": "me/model", "push_at": "save"}
    with hub() as fake_hub:
        fake_hub.hold.clear()
        release_when(fake_hub, tmp_path / "run/checkpoints/step-000010")
        trained(
            tmp_path / "run", fake_hub.url, attempt_of=attempt_that_waits_for_an_upload, checkpoint=keys,
            train={"steps": 10, "epochs": None},
        )  # fmt: skip
        commits = fake_hub.repos["me/model"].commits
        assert commits[0].message < commits[-1].message == "Upload step-000010 of run"
        assert "model.safetensors" in commits[0].files
        arrived = dict(fake_hub.files("me/model"))
        arrived.pop("README.md")
        assert arrived == on_disk(tmp_path / "run/checkpoints/step-000010")


def release_when(fake_hub: Hub, path: Path) -> None:
    """Let the hub take commits once this path is there."""

    def wait() -> None:
        for _ in range(1200):
            if path.exists():
                break
            time.sleep(0.05)
        fake_hub.hold.set()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.covers("checkpoint.push_revision")
def test_an_upload_that_fails_is_said_and_the_run_goes_on(finished: Path, tmp_path: Path) -> None:
    with hub() as fake_hub:
        fake_hub.faults["POST", "/commit/"] = (503, "we are down")
        words = [
            "sft", f"model.path={inputs()}/model", f"data.path={inputs()}/chats.jsonl", f"run.dir={tmp_path}/run",
            "train.steps=2", "step.documents=6", "checkpoint.push=me/model", "checkpoint.push_revision=tried",
        ]  # fmt: skip
        done = forked.run(words, tmp_path, UseHub(fake_hub.url), HF_TOKEN=hub_server.TOKEN)
    assert done.returncode == 0, done.stderr
    command = f"weft push {tmp_path}/run/checkpoints/step-000002 me/model --revision tried"
    (notice,) = [line for line in done.stdout.splitlines() if line.startswith("push  ")]
    assert "the hub answers 503 (we are down)" in notice and notice.endswith(command)
    with hub() as fake_hub, hub_in_use(fake_hub.url):  # and the command does it
        assert cli.main(command.split()[1:]) == 0
        assert "model.safetensors" in fake_hub.files("me/model", "tried")


class UseHub:
    """Done in a process of its own before it begins: the hub at this address is asked."""

    def __init__(self, url: str, offline: bool = False) -> None:
        self.url, self.offline = url, offline

    def __call__(self) -> None:
        self.kept = hub_in_use(self.url, hub_server.TOKEN, offline=self.offline)
        self.kept.__enter__()


@pytest.mark.parametrize(
    ("fault", "message"), [(401, "hf auth login"), (403, "no write access"), (0, "HF_HUB_OFFLINE")]
)
def test_what_cannot_be_uploaded_to_is_an_error_before_the_run(fault: int, message: str, tmp_path: Path) -> None:
    words = ["sft", f"model.path={inputs()}/model", f"data.path={inputs()}/chats.jsonl", f"run.dir={tmp_path}/run",
             "checkpoint.push=me/model", "--nproc", "2"]  # fmt: skip
    with hub() as fake_hub:
        if fault:
            fake_hub.faults["POST", "/api/repos/create"] = (fault, "no")
        done = forked.run(words, tmp_path, UseHub(fake_hub.url, offline=not fault), HF_TOKEN=hub_server.TOKEN)
    assert done.returncode == 2
    assert message in done.stderr and "checkpoint.push: the upload to me/model failed" in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_adapter(tmp_path: Path) -> None:
    with hub() as fake_hub:
        trained(tmp_path / "run", fake_hub.url, **LORA | {"checkpoint": {"every": 0, "push": "me/lora"}})
        arrived = dict(fake_hub.files("me/lora"))
    front = front_matter(text := arrived.pop("README.md"))
    assert front["library_name"] == "peft" and front["tags"] == ["weft", "sft", "lora"]
    assert b"AutoPeftModelForCausalLM" in text
    assert arrived == on_disk(tmp_path / "run/checkpoints/step-000010")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(arrived)


@pytest.mark.slow
def test_reinforcement_learning(tmp_path: Path) -> None:
    task = local_rl.make_task(tmp_path)
    with hub() as fake_hub, hub_in_use(fake_hub.url):
        local_rl.start(task, tmp_path / "run", "train.steps=2", "checkpoint.push=me/policy")
        arrived = dict(fake_hub.files("me/policy"))
    assert front_matter(text := arrived.pop("README.md"))["tags"] == ["weft", "grpo"]
    assert b"reinforcement learning (grpo)" in text and b"| reward" in text
    assert arrived == on_disk(tmp_path / "run/checkpoints/latest")


def test_a_run_that_was_stopped_begins_no_upload(finished: Path, served: Hub, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    keys = ["checkpoint.push=me/model", f"model.path={inputs()}/model", f"data.path={inputs()}/chats.jsonl"]
    pusher = Pusher(Repository("me/model"), load_config([], keys).checkpoint, tmp_path / "run")
    pusher.start()
    (notice,) = pusher.finish(stopped=True, beat=lambda: None)
    assert notice.endswith(f"the run was stopped: weft push {tmp_path}/run/checkpoints/step-000010 me/model")
    assert served.requests == []


def test_the_best_at_the_end_where_it_is_kept(finished: Path, served: Hub, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (tmp_path / "run/checkpoints/best").symlink_to("step-000005")
    Repository("me/model").prepare()
    pusher = Pusher(Repository("me/model"), CheckpointConfig(push="me/model", keep_best=True), tmp_path / "run")
    pusher.start()
    pusher.finish(stopped=False, beat=lambda: None)
    assert b"optimizer step 5 of 10" in served.files("me/model")["README.md"]


# ---------------------------------------------------------------- the card


def checkpoint_of(tmp_path: Path, config: dict[str, Any], **state: Any) -> Path:
    folder = tmp_path / "run/checkpoints/step-000010"
    (folder / "trainer_state").mkdir(parents=True)
    content = {"step": 10, "steps": 20, "config": config, "versions": {"weft": "0.9", "torch": "2.13"}, **state}
    (folder / "trainer_state/state.json").write_text(json.dumps(content))
    metrics = [
        {"step": 5, "loss": 2.0, "eval/loss": 2.5},
        {"step": 10, "loss": 1.5, "seconds": 1.0, "tokens": 12345},
        {"step": 15, "loss": 1.0},
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder


def test_the_card_says_what_was_trained_on_what_and_how_well(tmp_path: Path, served: Hub) -> None:
    served.cards["Qwen/Qwen3-0.6B"] = {"license": "apache-2.0"}
    config = {
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"sources": [{"path": "HuggingFaceH4/ultrachat_200k"}, {"path": "/data/own.jsonl"}]},
    }
    text = model_card(checkpoint_of(tmp_path, config), "me/model")
    assert front_matter(text) == {
        "base_model": "Qwen/Qwen3-0.6B", "base_model_relation": "finetune", "library_name": "transformers",
        "pipeline_tag": "text-generation", "license": "apache-2.0", "datasets": ["HuggingFaceH4/ultrachat_200k"],
        "tags": ["weft", "sft"],
    }  # fmt: skip
    assert "`HuggingFaceH4/ultrachat_200k`, `/data/own.jsonl`, with weft 0.9" in text
    assert "after optimizer step 10 of 20" in text
    assert "| loss | 1.5 |" in text and "| eval/loss | 2.5 |" in text and "| tokens | 12,345 |" in text
    assert "| loss | 1 |" not in text and "seconds" not in text
    assert yaml.safe_load(text.split("```yaml\n")[1].split("\n```")[0]) == config


@pytest.mark.parametrize("adapter", [False, True])
def test_the_card_of_a_vision_model_loads_it_as_one(adapter: bool, tmp_path: Path, served: Hub) -> None:
    folder = checkpoint_of(tmp_path, {"model": {"path": "Qwen/Qwen2-VL-2B"}})
    (folder / "preprocessor_config.json").write_text("{}")
    if adapter:
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2-VL-2B"}')
    text = model_card(folder, "me/model")
    assert front_matter(text)["pipeline_tag"] == "image-text-to-text"
    code = text.split("```python\n")[1].split("```")[0]
    assert "AutoProcessor" in code and "AutoModelForImageTextToText" in code and "CausalLM" not in code
    assert ("PeftModel.from_pretrained(" in code) == adapter
    compile(code, "card", "exec")


def test_the_card_has_no_table_without_a_result(tmp_path: Path, served: Hub) -> None:
    folder = checkpoint_of(tmp_path, {"model": {"path": "x"}})
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 10, "eval/seconds": 3.0}\n')
    assert "## Results" not in model_card(folder, "me/model")


def test_a_base_in_a_folder_is_no_name_of_the_hub_and_its_card_says_the_license(tmp_path: Path, served: Hub) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/README.md").write_text("---\nlicense: gemma\n---\n# Base\n")
    text = model_card(checkpoint_of(tmp_path, {"model": {"path": str(tmp_path / "base")}}), "me/model")
    assert front_matter(text)["license"] == "gemma" and "base_model" not in front_matter(text)
    assert served.requests == []


def test_a_card_needs_no_hub_and_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    assert front_matter(model_card(tmp_path / "model", "me/model"))["tags"] == ["weft"]
    monkeypatch.setattr(card, "_SECONDS", 0.2)
    with hub_in_use("http://127.0.0.1:9"):
        text = model_card(checkpoint_of(tmp_path, {"model": {"path": "Qwen/Qwen3-0.6B"}}), "me/model")
    assert "license" not in front_matter(text)


def test_texts_of_the_config_do_not_leave_their_block(tmp_path: Path) -> None:
    config = {"model": {"path": "x"}, "data": {"template_kwargs": {"a": "```\n# Not a heading"}}}
    text = model_card(checkpoint_of(tmp_path, config), "me/model")
    assert "\n````yaml\n" in text and text.count("````") == 2


def test_only_whole_folders_are_whole(finished: Path) -> None:
    push.require_complete(finished / "checkpoints/step-000005")
