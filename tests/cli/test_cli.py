"""The command line: what reaches the recipes, with which number of ranks, and the exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

import weft.recipes
from weft import __version__, cli
from weft.config.commands import SCHEMAS
from weft.config.keys import schema_keys
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.launch.options import TrainOptions, VerifyOptions
from weft.parsers import OTHER_COMMANDS

CONFIG = """\
model: {path: m}
data: {path: d.jsonl}
"""


class Recorder:
    """Stands for both recipes and for the launcher: remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.launched: list[tuple[Sequence[str], int]] = []
        self.answer: Any = True

    def run(self, config: Any, options: Any) -> Any:
        self.calls.append((config, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def launch(self, command: Sequence[str], nproc: int, debug: bool = False) -> int:
        self.launched.append((command, nproc))
        return 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    """Recipes and launcher replaced; c.yaml, its model and its data in the working folder; a machine of two cores."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_text("")
    (tmp_path / "d.jsonl").write_text("")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    recording = Recorder()
    for name in ("sft", "verify"):
        recipe = types.SimpleNamespace(run=recording.run)
        monkeypatch.setitem(sys.modules, f"weft.recipes.{name}", recipe)  # type: ignore[arg-type]
        monkeypatch.setattr(weft.recipes, name, recipe, raising=False)
    monkeypatch.setattr("weft.launch.launch.launch", recording.launch)
    monkeypatch.setattr(cli, "accelerator_count", lambda device: 0)
    monkeypatch.setattr(cli, "check_ranks_fit", lambda ranks, device: None)
    monkeypatch.setattr(cli, "cpu_cores", lambda: 2)
    return recording


def test_sft_runs_here_on_one_rank(recorder: Recorder) -> None:
    assert cli.main(["sft", "c.yaml", "optimizer.lr=2e-5", "--device", "cpu", "step.documents=3"]) == 0
    ((config, options),) = recorder.calls
    assert (config.optimizer.lr, config.step.documents) == (2e-5, 3)
    words = ("c.yaml", "optimizer.lr=2e-5", "step.documents=3")
    assert options == TrainOptions(config=words, device="cpu", world=1)
    assert recorder.launched == []


def test_sft_starts_ranks_that_get_the_same_command_line(recorder: Recorder) -> None:
    words = ["sft", "c.yaml", "--nproc", "2", "optimizer.lr=2e-5"]
    assert cli.main(words) == 0
    assert recorder.calls == []
    assert recorder.launched == [([sys.executable, "-m", "weft", *words], 2)]


def test_one_rank_per_accelerator(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "accelerator_count", lambda device: 0 if device == "cpu" else 4)
    assert cli.main(["sft", "c.yaml"]) == 0
    assert recorder.launched[0][1] == 4
    assert cli.main(["sft", "c.yaml", "--device", "cpu"]) == 0
    assert recorder.calls[0][1].world == 1


def test_a_dry_run_describes_all_ranks_from_one_process(recorder: Recorder) -> None:
    assert cli.main(["sft", "c.yaml", "--nproc", "16", "--dry-run", "--parameters", "mesh.dp_replicate=2"]) == 0
    ((_, options),) = recorder.calls
    words = ("c.yaml", "mesh.dp_replicate=2")
    assert options == TrainOptions(config=words, nproc=16, world=16, dry_run=True, parameters=True)
    assert recorder.launched == []


def test_under_torchrun_it_joins(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["sft", "c.yaml", "mesh.dp_shard=4"]) == 0
    assert recorder.calls[0][1].world == 4
    assert recorder.launched == []
    assert cli.main(["sft", "c.yaml", "--dry-run"]) == 0  # the first rank prints
    assert len(recorder.calls) == 1


def test_restarts_run_in_ranks_even_on_one(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def supervise(command: Sequence[str], resume: Any, nproc: int, restarts: int, debug: bool, attempt: Any) -> int:
        calls.append((command[3:], resume(Path("r"))[3:], nproc, restarts))
        return 0

    monkeypatch.setattr(cli, "run_with_restarts", supervise)
    words = ["sft", "c.yaml", "optimizer.lr=1", "--restarts", "3", "--device", "cpu"]
    assert cli.main(words) == 0
    assert calls == [(words, ["sft", "--resume", "r", "--device", "cpu"], 1, 3)]
    assert recorder.calls == []


def test_restarts_are_the_launchers_affair(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("weft.launch.entrypoint._end_rank", lambda status: status)
    assert cli.main(["sft", "c.yaml", "--restarts", "3"]) == 2
    assert "under torchrun use its --max-restarts" in capsys.readouterr().err
    monkeypatch.setattr("weft.launch.reports.folder", lambda: Path("scratch"))  # a rank of weft's own launcher
    assert cli.main(["sft", "c.yaml", "--restarts", "3"]) == 0
    assert len(recorder.calls) == 1


def test_nproc_that_contradicts_torchrun_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("weft.launch.entrypoint._end_rank", lambda status: status)
    assert cli.main(["sft", "c.yaml", "--nproc", "2"]) == 2
    assert "WORLD_SIZE=4" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "status"), [(True, 0), (False, 1), (UserError("x"), 2), (RuntimeError("x"), 1)])
def test_exit_statuses(recorder: Recorder, answer: Any, status: int) -> None:
    recorder.answer = answer
    assert cli.main(["verify", "c.yaml", "--nproc", "1"]) == status


def test_verify_passes_its_options(recorder: Recorder) -> None:
    assert cli.main(["verify", "c.yaml", "--nproc", "1", "--layers", "2", "--plant", "B1"]) == 0
    assert recorder.calls[0][1] == VerifyOptions(config=("c.yaml",), nproc=1, world=1, layers=2, plant="B1")


def test_verify_takes_the_ranks_that_its_mesh_needs(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "c.yaml"]) == 0
    command, nproc = recorder.launched[0]
    assert nproc == 2  # on CPU a mesh of one would show little
    axes = ["mesh.dp_replicate=1", "mesh.dp_shard=2", "mesh.cp=1", "mesh.tp=1", "mesh.ulysses=null"]
    assert command[-5:] == axes
    assert cli.main(["verify", "c.yaml", "mesh.dp_replicate=4", "mesh.dp_shard=64"]) == 0
    assert recorder.launched[1][1] == 4
    assert "mesh.dp_shard = 64 is more than this machine has (2); weft verifies with 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "c.yaml", "--nproc", "3", "mesh.dp_shard=2"], "but there are 3 ranks"),
        (["sft", "c.yaml", "--nproc", "0"], "--nproc"),
        (["sft", "c.yaml", "--nproc", "x"], "--nproc"),
        (["sft", "c.yaml", "--step.documents=3"], "without dashes: step.documents=3"),
        (["sft", "c.yaml", "--optimizer.lr", "3"], "without dashes: optimizer.lr=VALUE"),
        (["sft", "c.yaml", "--parameters"], "--dry-run"),
        (["sft", "c.yaml", "--nproc", "4", "fsdp.reshard_after_forward=3"], "must be one of true, false, 2"),
        (["verify", "c.yaml", "--layers", "0"], "--layers: 0 is not a whole number of 1 or more"),
        (["sftt"], "did you mean weft sft?"),
        (["bench", "c.yaml"], "docs/benchmarks has the command"),
        (["c.yaml"], "weft sft c.yaml"),
        (["zzz"], "the commands are sft, "),
    ],
)
def test_a_wrong_command_line_is_answered(
    recorder: Recorder, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert recorder.calls == recorder.launched == []


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("train", "`weft sft` fine-tunes"), ("finetune", "`weft sft` fine-tunes"), ("serve", "`vllm serve`"),
        ("generate", "`weft chat RUN|MODEL`"), ("infer", "`weft chat"), ("predict", "`weft chat"),
        ("KTO", "preference.loss=kto"), ("orpo", "preference.loss=orpo"),
        ("grpo", "weft rl ... rl.algorithm=grpo"), ("ppo", "rl.algorithm=ppo"), ("lora", "lora.rank=16"),
        ("convert", "`weft export`"), ("merge_adapter", "`weft merge RUN|ADAPTER`"),
    ],
)  # fmt: skip
def test_words_of_other_tools_are_answered_with_what_does_it_here(
    word: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word, "x.yaml"]) == 2
    errors = capsys.readouterr().err
    assert (
        errors.startswith(f"error: weft {word}: there is no such command: ")
        and answer in errors
        and "did you mean" not in errors
    )


def test_answers_to_words_of_other_tools_name_commands_and_keys_that_there_are() -> None:
    algorithms = get_args(schema_keys(RlConfig)["rl.algorithm"].type)
    for word, answer in OTHER_COMMANDS.items():
        assert word not in cli.COMMANDS and word == word.lower()
        assert set(re.findall(r"weft ([a-z]+)\b(?! rl)", answer.replace("-m weft", "weft"))) <= {
            *cli.COMMANDS,
            "starts",
        }
        assert all(
            (Path(cli.__file__).parent.parent / page).exists() for page in re.findall(r"docs/[\w/.-]+\w", answer)
        )
        for key, value in re.findall(r"([a-z]+\.[a-z_]+)=([\w']+)", answer):
            assert any(key in schema_keys(schema) for schema in SCHEMAS.values()), word
            assert key != "rl.algorithm" or value in algorithms


def test_weft_plan_says_its_own_option_for_ranks(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "c.yaml", "--ranks", "64", "mesh.dp_shard=16"]) == 2
    assert "start 16 ranks (--ranks 16) or set mesh.dp_shard=64" in capsys.readouterr().err


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.launch import machine

    monkeypatch.setattr(machine, "accelerator_count", lambda device: 2)
    machine.check_ranks_fit(2, "auto")
    with pytest.raises(UserError, match="--nproc 2 or less, or --device cpu"):
        machine.check_ranks_fit(3, "auto")


def test_a_file_with_an_equals_sign_is_a_file(recorder: Recorder) -> None:
    Path("lr=3.yaml").write_text(CONFIG)
    assert cli.main(["sft", "lr=3.yaml"]) == 0


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"weft {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert "  verify " in capsys.readouterr().out
    assert cli.main([]) == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["sft", "--help"])
    assert caught.value.code == 0


def test_a_bad_config_is_answered_without_torch(tmp_path: Path) -> None:
    code = "import sys; from weft.cli import main; status = main(['sft', 'step.documents=x', '--nproc', '2'])\n"
    code += "print(status, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n"


def test_debug_shows_where_a_user_error_came_from(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", "c.yaml", "step.documents=x", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "status", "destroyed", "ray"),
    [("1", 0, False, False), ("1", 3, True, False), ("", 0, True, False), ("", 10, False, True)],
    ids=["well", "badly", "alone", "with a dead Ray"],
)
def test_a_rank_that_ended_well_runs_no_native_destructors(rank: str, status: int, destroyed: bool, ray: bool) -> None:
    """Nor does a controller whose Ray has died: they have crashed, so that its status was that of a SIGSEGV."""
    code = (
        "import atexit, threading, time\n"
        "from weft.launch import entrypoint\n"
        "from weft.launch.entrypoint import program\n"
        "class Native:\n"
        "    def __del__(self): print('destroyed', flush=True)\n"
        "kept = Native()\n"
        "def main():\n"
        "    atexit.register(print, 'at exit')\n"
        f"    entrypoint.unsafe_destructors = {ray}\n"
        "    threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        f"    return {status}\n"
        "program(main)\n"
    )
    ranks = {"RANK": rank, "WORLD_SIZE": "2"} if rank else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **ranks})
    assert done.returncode == status
    assert done.stdout.split("\n") == ["thread", "at exit", *["destroyed"] * destroyed, ""]
