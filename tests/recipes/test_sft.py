"""`weft sft` and `weft verify` through the real command: what a run leaves, says and refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from tests.support import forked
from tests.support.machine import business
from tests.support.toy_tokenizers import CHATML, byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft import cli
from weft.config.load import load_config
from weft.config.schema import ScheduleConfig
from weft.engine.engine import Engine
from weft.engine.metrics import CORE_KEYS
from weft.engine.optim.schedule import learning_rate
from weft.launch.machine import known_accelerator
from weft.models import hf
from weft.recipes import training, training_preview
from weft.recipes.run_data import why_unread

EPOCHS, STEPS = 2, 6  # 20 documents, 8 to a step: three steps an epoch, the last of 4
CONFIG = f"""\
model: {{path: model}}
data: {{path: chats.jsonl, chat_template: own.jinja}}
step: {{documents: 8, max_tokens_per_device: 128}}
optimizer: {{lr: 1e-2}}
train: {{epochs: {EPOCHS}, seed: 3, log_every: 1}}
run: {{dir: one}}
"""
OWN_TEMPLATE = CHATML + "{# of a file #}"
Weft = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c.yaml, its data, and a Llama so small that a step takes milliseconds."""
    path = tmp_path_factory.mktemp("runs")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path / "model")
    config = tiny_config("llama", vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path / "model")
    chats = [chat(("user", "a" * (i % 5 + 1)), ("assistant", "bcd" * (i % 7 + 1))) for i in range(20)]
    write_jsonl(path / "chats.jsonl", *chats)
    (path / "c.yaml").write_text(CONFIG)
    (path / "own.jinja").write_text(OWN_TEMPLATE)
    return path


@pytest.fixture(scope="module")
def weft(folder: Path) -> Weft:
    """Runs `weft ...` in a process of its own, which is a fork unless it is said what starts it."""

    def start(*words: str, starter: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        if not starter:
            return forked.run(words, folder)
        command = [sys.executable, *starter, *words]
        return subprocess.run(
            command, cwd=folder, env=forked.environment(), capture_output=True, text=True, timeout=120
        )

    return start


@pytest.fixture
def workdir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process stands in the folder, so that cli.main is the command without the start of another Python."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


def tree(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*")}


# ---------------------------------------------------------------- a run on one rank


@pytest.fixture(scope="module")
def single_rank(weft: Weft, folder: Path) -> tuple[Path, str]:
    """(run folder, console) of a run on one rank."""
    done = weft("sft", "c.yaml")
    assert done.returncode == 0, done.stderr
    return folder / "one", done.stdout


@pytest.mark.slow
def test_the_run_folder(single_rank: tuple[Path, str], folder: Path) -> None:
    run, _ = single_rank
    assert {file.name for file in run.iterdir()} == {
        "config.yaml", "opening.txt", "metrics.jsonl", "checkpoints", "starts.jsonl", "summary.json", "system.jsonl",
    }  # fmt: skip
    assert {file.name for file in (run / "checkpoints").iterdir()} == {f"step-{STEPS:06d}", "latest"}
    latest = run / "checkpoints" / "latest"
    assert latest.is_symlink() and latest.resolve() == (run / "checkpoints" / f"step-{STEPS:06d}").resolve()
    saved = transformers.AutoModelForCausalLM.from_pretrained(latest)
    started = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert any(not torch.equal(a, b) for a, b in zip(saved.parameters(), started.parameters(), strict=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(latest)
    assert tokenizer.chat_template == OWN_TEMPLATE


@pytest.mark.slow
def test_metrics_have_every_key_in_every_line(single_rank: tuple[Path, str]) -> None:
    run, _ = single_rank
    written = lines(run)
    assert [line["step"] for line in written] == list(range(1, STEPS + 1))
    assert [line["documents"] for line in written] == [8, 8, 4] * EPOCHS
    assert [line["epoch"] for line in written] == [1, 1, 1, 2, 2, 2]
    for line in written:
        assert tuple(line)[: len(CORE_KEYS)] == CORE_KEYS
        assert line["lr"] == learning_rate(line["step"], STEPS, 1e-2, ScheduleConfig())
        assert line["tokens"] > line["loss_tokens"] > 0
        read = line["tokens"] - line["documents"]  # what a document's last token predicts nobody asks
        assert line["micro_batches"] == -(-read // 128)
        assert line["fill"] == pytest.approx(read / (128 * line["micro_batches"]))
        assert line["utilisation"] == 1.0  # one rank waits for nobody
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["grad_norm"] > 0 and line["memory_gib"] > 0
        assert line["mfu"] is None  # nobody knows a CPU's peak
    assert written[-1]["loss"] < 0.9 * written[0]["loss"]


@pytest.mark.slow
def test_the_summary_adds_up(single_rank: tuple[Path, str]) -> None:
    run, _ = single_rank
    summary, written = json.loads((run / "summary.json").read_text()), lines(run)
    assert (summary["steps"], summary["skipped_steps"], summary["documents"]) == (STEPS, 0, 40)
    assert summary["tokens"] == sum(line["tokens"] for line in written)
    assert summary["last_losses"] == losses(run)
    assert {"data", "load", "train", "save", "total"} <= summary["seconds"].keys()
    assert summary["model"] == "model" and summary["saved"] == f"one/checkpoints/step-{STEPS:06d}"


@pytest.mark.slow
def test_the_console_has_one_line_for_each_step(single_rank: tuple[Path, str]) -> None:
    run, console = single_rank
    assert re.findall(r"^step (\d+)/6  loss \d", console, re.MULTILINE) == [str(n) for n in range(1, STEPS + 1)]
    for words in ("run      one", "20 documents", "LlamaForCausalLM", "dp_shard 1 on 1 rank of cpu", "details  one/"):
        assert words in console
    full = (run / "opening.txt").read_text()
    for words in ("run      one", "attention kernel per_document", "FSDP units", "optimizer groups"):
        assert words in full
    opening = console.partition("\nstep 1/6")[0]
    assert len(opening.splitlines()) <= 14 and "FSDP units" not in opening and "attention kernel" not in opening


@pytest.mark.parametrize(("columns", "extra"), [(80, []), (60, ["--verbose"]), (80, ["--dry-run"])])
def test_nothing_that_begins_or_ends_a_run_is_wider_than_the_terminal(
    columns: int, extra: list[str], workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = ["eval.share=0.1", "optimizer.ema_decay=0.9", "lora.rank=2", "train.epochs=1"]
    assert cli.main(["sft", "c.yaml", "--device", "cpu", f"run.dir={tmp_path}/r", *words, *extra]) == 0
    out = capsys.readouterr().out
    if "--dry-run" in extra:
        out = out.partition("\nmodel    ")[2]  # behind the config
    else:  # lines of steps are one line each where there is no terminal
        out = out.partition("\nstep 1/")[0] + "\n" + out.partition("\ndone ")[2]
    path = len(str(tmp_path))  # names of files are not broken
    wide = [line for line in out.splitlines() if len(line.rstrip()) > columns]
    assert [line for line in wide if not re.search(r"/r\b", line) or len(line) > columns + path] == []


@pytest.mark.covers("run.dir")
@pytest.mark.slow
def test_the_resolved_config_runs_again(single_rank: tuple[Path, str], workdir: Path) -> None:
    """Every key is in it, and it gives the same losses."""
    run, _ = single_rank
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["train"]["seed"] == 3 and resolved["fsdp"]["reduce_dtype"] == "fp32"
    assert cli.main(["sft", "one/config.yaml", "run.dir=again"]) == 0
    assert losses(workdir / "again") == pytest.approx(losses(run), rel=1e-5)
    repeated = yaml.safe_load((workdir / "again" / "config.yaml").read_text())
    assert repeated["run"].pop("dir") == "again" and resolved["run"].pop("dir") == "one"
    assert repeated == resolved


@pytest.mark.slow
def test_a_folder_with_a_run_in_it_is_refused(
    single_rank: tuple[Path, str], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = single_rank
    before, config = tree(run), (run / "config.yaml").read_text()
    assert cli.main(["sft", "c.yaml", "optimizer.lr=1"]) == 2
    assert "run.dir: one already contains a run. Set run.dir to another folder" in capsys.readouterr().err
    assert tree(run) == before and (run / "config.yaml").read_text() == config


# ---------------------------------------------------------------- several ranks


@pytest.mark.slow
def test_two_ranks_train_alike(single_rank: tuple[Path, str], weft: Weft, folder: Path) -> None:
    done = weft("sft", "c.yaml", "run.dir=two", "--nproc", "2", starter=("-m", "weft"))
    assert done.returncode == 0, done.stderr
    assert losses(folder / "two")[0] == pytest.approx(losses(single_rank[0])[0], rel=1e-4)
    assert losses(folder / "two") == pytest.approx(losses(single_rank[0]), rel=1e-3)
    assert all(0 < line["utilisation"] <= 1 for line in lines(folder / "two"))
    assert len(re.findall(r"^step \d+/6", done.stdout, re.MULTILINE)) == STEPS  # the first rank speaks for both


@pytest.mark.slow
@pytest.mark.table  # with a signal, the suite has both in tests/launch/test_batch_scripts.py
def test_ranks_of_torchrun_join(single_rank: tuple[Path, str], folder: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "weft"]
    words = ["sft", "c.yaml", "mesh.dp_replicate=2", "run.dir=joined", "train.steps=2", "train.epochs=null"]
    done = forked.run(partial(forked.script, [*torchrun, *words]), folder)
    assert done.returncode == 0, done.stderr
    assert losses(folder / "joined") == pytest.approx(losses(single_rank[0])[:2], rel=1e-4)
    assert done.stdout.count("step 2/2  loss") == 1


@pytest.mark.table
def test_tasks_of_srun_join(single_rank: tuple[Path, str], folder: Path) -> None:
    """With the variables that Slurm gives each of them, and none of torchrun's."""
    words = ["sft", "c.yaml", "mesh.dp_replicate=2", "run.dir=tasks", "train.steps=2", "train.epochs=null"]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here"}
    tasks = [forked.Run(words, folder, **step, SLURM_PROCID=str(n), SLURM_LOCALID=str(n)) for n in range(2)]
    assert [task.wait().status for task in tasks] == [0, 0], [task.errors() for task in tasks]
    assert losses(folder / "tasks") == pytest.approx(losses(single_rank[0])[:2], rel=1e-4)
    assert [task.output().count("step 2/2  loss") for task in tasks] == [1, 0]


# ---------------------------------------------------------------- how long, and what is not trained


@pytest.mark.covers("train.steps")
@pytest.mark.slow
def test_steps_end_a_run_and_without_a_name_it_gets_one(workdir: Path) -> None:
    (workdir / "s.yaml").write_text("model: {path: model}\ndata: {path: chats.jsonl}\nstep: {documents: 8}\n")
    assert cli.main(["sft", "s.yaml", "train.steps=4", "optimizer.lr=1e-2"]) == 0
    (run,) = (workdir / "runs").iterdir()
    assert re.fullmatch(r"model-\d{8}-\d{6}", run.name)
    assert [line["epoch"] for line in lines(run)] == [1, 1, 1, 2]
    assert (run / "checkpoints" / "latest").resolve().name == "step-000004"


@pytest.fixture
def poisoned(workdir: Path) -> Path:
    """A model whose embedding of the letter z is infinite, and chats of which three have one."""
    path = workdir / "poisoned"
    if not path.exists():
        source = transformers.AutoModelForCausalLM.from_pretrained(workdir / "model")
        source.save_pretrained(path)
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(path)
        weights = load_file(path / "model.safetensors")
        weights["model.embed_tokens.weight"][tokenizer.convert_tokens_to_ids("z")] = float("inf")
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        bad = {2, 6, 8}
        chats = [chat(("user", "a"), ("assistant", "bz" if i in bad else "bc")) for i in range(10)]
        write_jsonl(workdir / "poison.jsonl", *chats)
    return path


POISON = [
    "sft", "model.path=poisoned", "data.path=poison.jsonl", "data.shuffle=false", "step.documents=2",
    "optimizer.lr=1e-2", "schedule.name=linear", "schedule.warmup_steps=0", "schedule.min_lr_ratio=0",
]  # fmt: skip


@pytest.mark.covers("train.max_nonfinite")
@pytest.mark.slow
def test_steps_that_are_not_finite_are_skipped_and_end_a_run_when_they_repeat(
    poisoned: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*POISON, "train.max_nonfinite=2", "run.dir=hopeless"]) == 14
    err = capsys.readouterr().err
    assert "2 steps in a row were not finite (train.max_nonfinite)" in err
    assert "rank 0, micro-batch 1, documents poison.jsonl:9, poison.jsonl:10" in err
    written = lines(workdir / "hopeless")
    assert [line.get("skipped", False) for line in written] == [False, True, False, True, True]
    rates = [0.008, None, 0.006, None, None]  # 1e-2 x (1 - s / 5) for the first and second step that was trained
    assert [line["lr"] for line in written] == [None if rate is None else pytest.approx(rate) for rate in rates]
    for line in written:
        assert (line["loss"] is None) == (line["grad_norm"] is None) == line.get("skipped", False)
    assert not (workdir / "hopeless" / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_goes_on_where_they_do_not_repeat(poisoned: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On weights that are finite: others would not be saved."""
    original, z = Engine.accumulate, byte_tokenizer().convert_tokens_to_ids("z")

    def accumulate(engine: Engine, plan: Any, rows: Any, objective: Any) -> Any:
        metrics = original(engine, plan, rows, objective)
        if any(z in rows[micro].input_ids_BT for micro in range(plan.micro_batches)):
            engine._nonfinite = "there is a z"
        return metrics

    monkeypatch.setattr(Engine, "accumulate", accumulate)
    assert cli.main([*POISON, "model.path=model", "train.max_nonfinite=3", "run.dir=hopeful"]) == 0
    summary = json.loads((workdir / "hopeful" / "summary.json").read_text())
    assert (summary["steps"], summary["skipped_steps"], len(summary["last_losses"])) == (5, 3, 2)
    assert (workdir / "hopeful" / "checkpoints" / "latest" / "model.safetensors").exists()


# ---------------------------------------------------------------- a dry run


def test_a_dry_run_shows_mesh_and_sharding_and_writes_nothing(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(workdir)
    sizes = ["mesh.dp_replicate=2", "--nproc", "6"]
    words = ["sft", "c.yaml", "run.dir=dry", "fsdp.param_dtype=bf16", *sizes, "--dry-run"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out.partition("\nmodel    ")[0])["fsdp"]["param_dtype"] == "bf16"
    for row in (r"dp_replicate +2 +0,3", r"dp_shard +3 +0-2", r"masters +float32", r"compute +bfloat16"):
        assert re.search(row, out), row
    assert "q_proj.weight  " not in out.partition("sharding")[2]
    assert cli.main([*words, "--parameters"]) == 0
    assert re.search(r"lm_head\.weight +264x64 +88x64 +dp_shard +float32", capsys.readouterr().out)
    assert tree(workdir) == before


def test_a_dry_run_says_documents_steps_and_time(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "c.yaml", "--device", "cpu", "--dry-run"]
    assert cli.main([*words, "train.epochs=3"]) == 0
    lines = capsys.readouterr().out.splitlines()[-7:]
    assert re.fullmatch(
        r"data     chats.jsonl: 20 documents \(messages\), [\d,]+ tokens, of which [\d,]+ trained; the longest has \d+",
        lines[0],
    )
    assert lines[1] == "steps    9 optimizer steps of 8 documents; 3 epochs of 20 documents, 3 each"
    assert [line.split()[0] for line in lines[2:]] == ["hint", "template", "ends", "time", "look"]
    assert lines[5].startswith("time     not estimated: the rates of this device are unknown")
    assert cli.main([*words, "--assume", "h100-80gb", "train.epochs=100000000"]) == 0
    (line,) = re.findall(r"^time .*", capsys.readouterr().out, re.MULTILINE)
    assert re.match(
        r"time     about [\d:d ]+ of optimizer steps, .* s each, as `weft plan` estimates for h100-80gb;", line
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=bad.jsonl", "bad.jsonl:2: `messages` must be a list"),
        ("data.max_length=12", "documents are longer than 12 tokens"),
        ("eval.path=bad.jsonl", "bad.jsonl:2: `messages` must be a list"),
        ("profile={steps: [7]}", "profile.steps contains step 7, but the run has 6"),
    ],
)
def test_a_dry_run_is_refused_for_what_a_run_is(
    override: str, message: str, workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "bad.jsonl", chat(("user", "a"), ("assistant", "b")), {"messages": 3})
    override = override.replace("bad.jsonl", str(tmp_path / "bad.jsonl"))
    for extra in (["--dry-run"], [f"run.dir={tmp_path}/run"]):
        assert cli.main(["sft", "c.yaml", "--device", "cpu", override, *extra]) == 2
        assert message in capsys.readouterr().err


def test_a_dry_run_says_why_data_are_not_read(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_preview, "_MAX_BYTES", 1000)
    for path, reason in {
        "someone/chats": "someone/chats is on the hub, and a dry run downloads nothing",
        "chats.jsonl": "it has ",
    }.items():
        assert cli.main(["sft", "c.yaml", "--device", "cpu", "--dry-run", f"data.path={path}"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"data     not read: {reason}")
    config = load_config(["c.yaml"], [])
    config = replace(config, data=replace(config.data, path="s3://bucket/chats.jsonl"))
    assert why_unread(config).startswith("s3://bucket/chats.jsonl is on an object store")


def test_an_accelerator_is_known_by_its_name_and_memory() -> None:
    for name, gib, expected in (
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA L40S", 44.4, "l40s-48gb"),
        ("NVIDIA L4", 22.0, "l4-24gb"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090-24gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, None),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
    ):
        match = known_accelerator(name, int(gib * (1 << 30)))
        assert (match.name if match is not None else None) == expected


def test_dropout_of_the_model_is_said_to_be_off(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", "c.yaml", "--device", "cpu", "--dry-run"]
    assert cli.main(words) == 0
    assert "\ndropout " not in capsys.readouterr().out
    shutil.copytree(workdir / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    assert cli.main([*words, f"model.path={tmp_path}/model"]) == 0
    assert "\ndropout  attention_dropout 0.1 of config.json: 0 in training" in capsys.readouterr().out


def test_an_impossible_kernel_is_refused_before_training(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "c.yaml", "run.dir=kernel", "model.attention=varlen", "--device", "cpu"]
    assert cli.main(words) == 2
    assert "model.attention=varlen cannot serve this run: float32 on cpu" in capsys.readouterr().err
    assert not (workdir / "kernel" / "metrics.jsonl").exists()


# ---------------------------------------------------------------- ranks that fail or stop


def spoil() -> None:
    """Rank 1 fails in its second step."""
    original = training.learning_rate

    def spoilt(step: int, *arguments: Any) -> float:
        if step == 2 and os.environ.get("RANK") == "1":
            raise OSError("no paper in tray 1")
        return original(step, *arguments)

    training.learning_rate = spoilt


@pytest.mark.slow
def test_a_rank_that_fails_in_training_names_itself(folder: Path) -> None:
    began = time.monotonic()
    done = forked.run(["sft", "c.yaml", "run.dir=failed", "--nproc", "2"], folder, spoil)
    assert time.monotonic() - began < 60 * business()
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 failed: OSError: no paper in tray 1\nin step 2 of 6, planning the step")
    assert "1 other rank was stopped.\n" in done.stderr
    assert not (folder / "failed" / "checkpoints").exists()


@pytest.mark.covers("train.timeout")
@pytest.mark.slow
def test_a_rank_that_stops_ends_the_run_after_the_timeout(folder: Path) -> None:
    timeout = 4
    words = ["sft", "c.yaml", "run.dir=stopped", "train.epochs=100000", f"train.timeout={timeout}", "--nproc", "2"]
    run = forked.Run(words, folder)
    run.wait_for("^step 3/")
    victim = sorted(psutil.Process(run.pid).children(), key=lambda child: child.pid)[1]
    victim.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    run.wait()
    seconds, err = time.monotonic() - began, run.errors()
    assert run.status == 11, err
    assert seconds < timeout + 20 * business()  # five seconds until the stopped rank is killed
    assert err.startswith(
        "rank 1 is stuck: it did not come within 4 seconds (train.timeout); it is stopped (SIGSTOP)\n"
    )
    assert re.search(r"^waiting: rank 0 \(in step \d+ of \d+, ", err, re.MULTILINE)
    assert not victim.is_running()


def test_a_signal_before_anything_is_loaded_is_answered(folder: Path) -> None:
    """At the first moment at which Python can: the child has a handler, which /proc shows."""
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", "sft", "c.yaml", "run.dir=early"], cwd=folder, env=forked.environment(),
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    while process.poll() is None:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        if caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            break
        time.sleep(0.005)
    process.terminate()
    _, err = process.communicate(timeout=60 * business())
    assert err == "stopped by SIGTERM\n" and process.returncode == 128 + signal.SIGTERM


# ---------------------------------------------------------------- weft verify

MESHES = {
    "one rank": (["--nproc", "1"], "dp_replicate 1 x dp_shard 1"),
    "FSDP": (["--nproc", "2"], "dp_replicate 1 x dp_shard 2"),
    "HSDP": (["--nproc", "4", "mesh.dp_replicate=2"], "dp_replicate 2 x dp_shard 2"),
}


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("name", ["one rank", "HSDP", pytest.param("FSDP", marks=pytest.mark.table)])
def test_verify(name: str, weft: Weft) -> None:
    words, mesh = MESHES[name]
    done = weft("verify", "c.yaml", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert mesh in done.stdout
    assert "PASS: on this mesh, loss, gradients and weights are those of one plain process." in done.stdout
    assert "OVER" not in done.stdout


@pytest.mark.slow
def test_verify_fails_with_a_bug_planted(weft: Weft) -> None:
    done = weft("verify", "c.yaml", "--nproc", "2", "--plant", "rank-local-count")
    assert done.returncode == 1, done.stderr + done.stdout
    assert "planted  rank-local-count" in done.stdout
    failed = re.search(r"^FAIL: over tolerance: (.*)$", done.stdout, re.MULTILINE)
    assert failed is not None and "gradients, every parameter" in failed[1]
