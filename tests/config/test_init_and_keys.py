"""`weft init` and `weft keys`: a first config that runs as it is, and the reference from the command line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.cases import write_small_job
from weft import cli
from weft.config.commands import SCHEMAS
from weft.config.keys import schema_keys
from weft.config.load import load_config
from weft.config.reference import find_keys, starter
from weft.config.schema import SftConfig
from weft.errors import UserError


def weft(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(words, folder)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_the_first_config_loads_and_so_does_each_line_that_is_commented_out(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    for name in ("chat.jsonl", "problems.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("{}")
    text = starter(command, {"model.path": "m"})
    (tmp_path / "c.yaml").write_text(text)
    plain = load_config(["c.yaml"], [], SCHEMAS[command], weights=False)
    uncommented = re.sub(r"^( *)# ( *)(\w+:)", r"\1\2\3", text, flags=re.M)
    assert uncommented.count("#") < text.count("#")
    if command == "rl":  # a file that the test does not have
        uncommented = re.sub(r"^ +environment:.*\n", "", uncommented, flags=re.M)
    (tmp_path / "all.yaml").write_text(uncommented)
    assert load_config(["all.yaml"], [], SCHEMAS[command], weights=False) != plain
    assert all(
        len(line) <= 150 and ("  # " in line or line[:1] == "#" or line.endswith((":", "")))
        for line in text.split("\n")
    )


def test_the_first_config_of_sft_runs_as_it_is(tmp_path: Path) -> None:
    folder = write_small_job(tmp_path)
    created = weft(folder, "init", "sft", "model.path=model", "mesh.tp=1", "--output", "sft.yaml")
    assert created.returncode == 0 and "weft sft sft.yaml --dry-run" in created.stdout, created.stderr
    assert "  tp: 1" in (folder / "sft.yaml").read_text()
    done = weft(folder, "sft", "sft.yaml", "--dry-run")
    assert done.returncode == 0 and "documents: 16" in done.stdout, done.stderr
    repeated = weft(folder, "init", "--output", "sft.yaml")
    assert repeated.returncode == 2 and "exists already" in repeated.stderr


def test_the_first_config_of_rl_runs_as_it_is(tmp_path: Path) -> None:
    folder = write_small_job(tmp_path)
    (folder / "problems.jsonl").write_text('{"prompt": "1 2", "answer": "2 1"}\n' * 40)
    created = weft(folder, "init", "rl", "model.path=model", "rollout.max_new_tokens=8", "rollout.max_prompt_tokens=40")
    (folder / "rl.yaml").write_text(created.stdout)
    done = weft(folder, "rl", "rl.yaml", "--dry-run")
    assert done.returncode == 0 and "reward   exact_match" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init", "grpo"], "weft init grpo: there is no such config; choose one of `weft sft`"),
        (["init", "sft", "rl"], "rl is not an override"),
        (["init", "learning_rate=1"], "optimizer.lr"),
        (["init", "train.epochs=x"], "train.epochs must be an integer"),
        (["keys", "zzz"], "no key has zzz in its name or meaning"),
        (["keys", "optimizer.lrr"], "Did you mean optimizer.lr"),
    ],
)
def test_what_they_refuse(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_keys_are_found_by_name_meaning_and_other_names() -> None:
    lr = "\n".join(find_keys(["optimizer.lr"]))
    assert lr.split("\n")[0].startswith(
        "optimizer.lr  a number; above 0; default weft sft: 1e-05, with lora 0.0001; weft dpo: 1e-06,"
    )
    assert "Peak learning rate." in lr and "critic" not in lr
    assert any(line.startswith("rl.dual_clip") for line in find_keys(["clip"]))
    assert any("rollout.max_new_tokens" in line for line in find_keys(["completion", "maximum"]))  # by meaning
    assert any("set `optimizer.lr`" in line for line in find_keys(["learning_rate"]))
    assert find_keys(["--optimizer.lr=3"]) == find_keys(["optimizer.lr"])
    listed = find_keys([])
    assert all(any(line.startswith(f"{name} ") for line in listed) for name in schema_keys(SftConfig))
    with pytest.raises(UserError):
        find_keys(["nothing", "such"])
