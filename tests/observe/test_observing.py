"""A run with everything on through the real command: lines, trackers, traces, output, docs/reference/metrics.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft import cli
from weft.engine.metrics import CORE_KEYS
from weft.models import hf
from weft.observe.closing import closing

ROOT = Path(__file__).parents[2]
TIMES = ["time/data", "time/forward", "time/backward", "time/communication", "time/optimizer"]
WORDS = ["sft", "model.path=model", "model.init=random", "data.path=chats.jsonl", "step.documents=4", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and twelve chats: three steps of four."""
    path = tmp_path_factory.mktemp("observing")
    byte_tokenizer().save_pretrained(path / "model")
    tiny_config("llama", vocab_size=264).save_pretrained(path / "model")
    write_jsonl(path / "chats.jsonl", *(chat(("user", "a" * n), ("assistant", "b" * n)) for n in range(1, 13)))
    return path


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def on(folder: Path) -> tuple[Path, str]:
    """(run folder, console) of a run with tensorboard, timing and a trace."""
    pytest.importorskip("tensorboard")
    with pytest.MonkeyPatch.context() as patch:
        import contextlib
        import io

        patch.chdir(folder)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            words = ["run.dir=on", "track.report_to=[tensorboard]", "profile.steps=[2]", "track.system_seconds=0.01"]
            assert cli.main([*WORDS, *words]) == 0
    return folder / "on", out.getvalue()


def test_every_line_has_the_seconds_by_phase(on: tuple[Path, str]) -> None:
    written = lines(on[0])
    assert [line.get("profiled", False) for line in written] == [False, True, False]
    for line in written:
        assert [name for name in line if name.startswith("time/")] == TIMES
        spent = [line[name] for name in TIMES]
        assert all(isinstance(seconds, float) and seconds >= 0 for seconds in spent)
        assert sum(spent) == pytest.approx(line["seconds"], abs=0.05)  # type: ignore[arg-type]


def test_the_run_folder_has_trace_and_events(on: tuple[Path, str]) -> None:
    run, _ = on
    assert [path.name for path in (run / "profile").iterdir()] == ["rank-0-step-2.json.gz"]
    assert len(list((run / "tensorboard").glob("events.*"))) == 1
    assert json.loads((run / "track.json").read_text()).keys() == {"id"}


def test_what_it_says(on: tuple[Path, str]) -> None:
    _, out = on
    assert "track    tensorboard: tensorboard --logdir on/tensorboard\n" in out
    assert re.search(r"^step 3/3  loss \S+  grad_norm \S+  lr \S+  [\d,]+ tokens/s  [\d.]+ GiB  ETA 0:00$", out, re.M)
    assert re.search(r"^done     3 steps in 0:\d\d: data 0:\d\d, load 0:\d\d, train 0:\d\d, save 0:\d\d$", out, re.M)
    assert re.search(r"^loss     \d\.\d{4} -> \d\.\d{4}$", out, re.M)
    assert "model    on/checkpoints/step-000003\nnext     weft chat on " in out


@pytest.mark.covers("track.system_seconds")
def test_the_machine_is_sampled_for_the_trackers_too(on: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = on
    samples = [json.loads(line) for line in (run / "system.jsonl").read_text().splitlines()]
    assert len(samples) > 2 and samples[-1]["step"] == 3, "a sample every hundredth of a second"
    assert all(0 <= sample["system/cpu"] <= 1 for sample in samples)
    assert all(sample["system/memory_gib"] > 0 for sample in samples)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("system/cpu")] == [sample["step"] for sample in samples]


def test_the_start_and_the_end_are_recorded(on: tuple[Path, str]) -> None:
    run, _ = on
    start, end = (json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines())
    assert (start["step"], start["ranks"], start["mesh"]) == (0, 1, {"dp_replicate": 1, "dp_shard": 1})
    assert start["device"].endswith("(CPU)") and end["error"] == "" and start["started"] <= end["ended"]


@pytest.mark.covers("track.timing", "track.system")
def test_timing_and_samples_of_the_machine_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert cli.main([*WORDS, "run.dir=off", "track.timing=false", "track.system=false", "train.steps=1"]) == 0
    (line,) = lines(folder / "off")
    assert not [name for name in line if name.startswith("time/")]
    assert {path.name for path in (folder / "off").iterdir()} == {
        "checkpoints", "config.yaml", "metrics.jsonl", "opening.txt", "starts.jsonl", "summary.json",
    }  # fmt: skip


def test_every_metric_is_in_the_documentation(on: tuple[Path, str]) -> None:
    documented = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    assert {*CORE_KEYS, "skipped", "reason", "loss_scale", "aux_loss"} <= documented
    assert {name for line in lines(on[0]) for name in line} <= documented
    assert set(json.loads((on[0] / "summary.json").read_text())) <= documented


def test_a_step_beyond_the_run_is_refused_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hf, "build_random", None)
    assert cli.main([*WORDS, "run.dir=late", "profile.steps=[4]"]) == 2
    assert "profile.steps contains step 4, but the run has 3: use earlier steps." in capsys.readouterr().err


def test_losses_at_the_end_are_means_where_there_are_enough() -> None:
    summary = {
        "steps": 25, "skipped_steps": 2, "documents": 100, "tokens": 5000, "loss_tokens": 1000, "saved": None,
        "first_losses": [4.0, 2.0], "last_losses": [1.0, 0.5], "peak_memory_gib": 1.5,
        "seconds": {"load": 2.0, "train": 50.0, "total": 52.0}, "stopped": None,
        "evaluation": {
            "first": {"step": 0, "eval/loss": 5.0}, "last": {"step": 25, "eval/loss": None},
            "best": {"step": 20, "eval/a/loss": 1.25, "checkpoint": "checkpoints/20"},
        },
    }  # fmt: skip
    assert closing(summary, Path("run")) == [
        "done     25 steps (2 skipped) in 0:52: load 0:02, train 0:50",
        "loss     3.0000 -> 0.7500 (means of the first and the last 2 steps)",
        "held out 5.0000 (step 0) -> - (step 25); best eval/a/loss 1.2500 (step 20), kept as checkpoints/20",
        "tokens   5,000 (1,000 trained on) in 100 documents, 100 tokens/s; peak memory 1.50 GiB",
    ]


def test_reinforcement_learning_ends_with_its_reward_and_accuracy() -> None:
    evaluations = {
        name: {"step": step, "eval/accuracy": share} for name, step, share in (("first", 0, 0.4), ("last", 9, 0.85))
    }
    summary = {
        "steps": 9, "skipped_steps": 0, "documents": 1, "tokens": 1, "loss_tokens": 1, "saved": None,
        "first_losses": [0.1], "last_losses": [-0.1], "peak_memory_gib": 1.0, "seconds": {"total": 1.0},
        "stopped": None, "first_rewards": [0.25, 0.5], "last_rewards": [0.25, 0.5],
        "evaluation": {**evaluations, "best": None},
    }  # fmt: skip
    lines = closing(summary, Path("run"))
    assert "held out accuracy 40.0% (step 0) -> accuracy 85.0% (step 9)" in lines
    assert "reward   0.2500 -> 0.5000" in lines and not any(line.startswith("loss") for line in lines)
