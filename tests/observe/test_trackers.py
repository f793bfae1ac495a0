"""Trackers: what they get, that none of them can end or hold up a run, and the ones that are installed for real."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.config.run_schema import ProfileConfig, TrackConfig
from weft.errors import UserError
from weft.observe import trackers
from weft.observe.profiling import check_profile
from weft.observe.trackers import TRACKERS, TrackedRun, Tracker, Trackers, check_installed, numbers

CONFIG = {"model": {"path": "m"}, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}
LINE = {
    "step": 3,
    "loss": 1.5,
    "epoch": 1,
    "mfu": None,
    "eval/loss": 2.0,
    "skipped": True,
    "reason": "x",
    "lr": float("nan"),
}


class Recording(Tracker):
    """Remembers what it is told."""

    package = "json"
    told: list[Any] = []  # noqa: RUF012 - one list for all, which the fixture empties

    def start(self, config: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> str:
        self.told.append((config, run))
        return "in memory"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, values))

    def finish(self, failed: bool) -> None:
        self.told.append(failed)


class FailsToStart(Recording):
    def start(self, config: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> str:
        raise ConnectionError("no\nroute to host")


class FailsOnce(Recording):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append("failed")
        raise OSError("disk full")


class StuckTracker(Recording):
    free = threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.free.wait(30)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, kind in [("fake", Recording), ("no-start", FailsToStart), ("fails", FailsOnce), ("stuck", StuckTracker)]:
        monkeypatch.setitem(TRACKERS, name, kind)
    Recording.told.clear()
    yield
    StuckTracker.free.set()


def tracked(folder: Path, *to: Any, step: int = 0, **keys: Any) -> Trackers:
    return Trackers(CONFIG, TrackConfig(report_to=to, **keys), folder, step)


def test_numbers_of_a_line() -> None:
    assert numbers(LINE) == {"train/loss": 1.5, "train/epoch": 1.0, "eval/loss": 2.0, "train/skipped": 1.0}


@pytest.mark.covers("track.report_to", "track.project", "track.name")
def test_a_tracker_gets_config_names_steps_and_the_end(tmp_path: Path) -> None:
    trackers = tracked(tmp_path, "fake", project="p")
    trackers.log({"step": 1, "loss": 2.0})
    trackers.finish()
    (config, run), line, failed = Recording.told
    assert config == CONFIG and (run.project, run.name, run.step) == ("p", tmp_path.name, 0)
    assert line == (1, {"train/loss": 2.0}) and failed is False
    assert trackers.notes == ["track    fake: in memory"]
    tracked(tmp_path, "fake", step=1, name="n").finish(failed=True)
    restarted = Recording.told[3][1]
    assert (restarted.id, restarted.name, restarted.step) == (run.id, "n", 1) and Recording.told[-1] is True


def test_one_that_fails_is_dropped_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = tracked(tmp_path, "no-start", "fails", "fake")
    assert (
        trackers.notes[0] == "track    no-start failed and receives no more metrics: ConnectionError: no route to host"
    )
    for step in (1, 2, 3):
        trackers.log({"step": step, "loss": 1.0})
    trackers.finish()
    assert capsys.readouterr().err == "track    fails failed and receives no more metrics: OSError: disk full\n"
    assert Recording.told.count("failed") == 1
    assert [call for call in Recording.told if isinstance(call, tuple)][-1][0] == 3


@pytest.mark.parametrize("failed", [False, True])
def test_one_that_is_stuck_holds_up_nothing(
    failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "FAILED_PATIENCE" if failed else "PATIENCE", 0.05)
    StuckTracker.free.clear()
    began = time.monotonic()
    tracker = tracked(tmp_path, "stuck")
    tracker.log({"step": 1})
    tracker.finish(failed)
    assert time.monotonic() - began < 5
    assert "stuck did not receive all metrics within 0.05 s" in capsys.readouterr().err


def test_without_trackers_nothing_is_written_and_no_thread_runs(tmp_path: Path) -> None:
    before = threading.active_count()
    trackers = tracked(tmp_path)
    trackers.log({"step": 1})
    assert threading.active_count() == before and list(tmp_path.iterdir()) == []
    trackers.finish()


def test_what_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"wandb, which is not installed: pip install wandb, or remove it from track.report_to"
    ):
        check_installed(TrackConfig(report_to=("wandb",)))
    with pytest.raises(UserError, match=r"wandb and mlflow, which are not installed: pip install wandb mlflow"):
        check_installed(TrackConfig(report_to=("wandb", "mlflow")))
    check_installed(TrackConfig())


def test_a_step_or_rank_that_is_none_of_the_runs_cannot_be_traced() -> None:
    with pytest.raises(UserError, match=r"profile.steps contains step 9, but the run has 6"):
        check_profile(ProfileConfig(steps=(3, 9)), steps=6)
    with pytest.raises(UserError, match=r"profile.ranks contains rank 2, but the run has 2, 0 to 1"):
        check_profile(ProfileConfig(steps=(3,), ranks=(0, 2)), world=2)
    with pytest.raises(UserError, match=r"has only rank 0: remove profile.ranks"):
        check_profile(ProfileConfig(steps=(3,), ranks=(1,)), world=1)
    check_profile(ProfileConfig(steps=(6,), ranks=(1,)), steps=6, world=2)


# ---------------------------------------------------------------- for real, where installed


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def two_starts(folder: Path, name: str) -> list[str]:
    """Steps 1 to 3, then a resumed run from step 2 on that goes to 4; the notes of both."""
    first = tracked(folder, name, project="p", name="r")
    for step in (1, 2, 3):
        first.log({"step": step, "loss": float(step)})
    first.finish(failed=True)
    second = tracked(folder, name, project="p", name="r", step=2)
    for step in (3, 4):
        second.log({"step": step, "loss": 10.0 * step})
    second.finish()
    return first.notes + second.notes


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    notes = two_starts(tmp_path, "tensorboard")
    assert notes[0] == f"track    tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30), (4, 40)]
    (config,) = read.Tensors("config/text_summary")[:1]
    assert b"lr: 0.1" in config.tensor_proto.string_val[0]
    without_a_checkpoint = tracked(tmp_path, "tensorboard", project="p", name="r")
    without_a_checkpoint.log({"step": 1, "loss": 5.0})
    without_a_checkpoint.finish()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(1, 5)]


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'ml.db'}")
    two_starts(tmp_path, "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path / 'ml.db'}")
    experiment = client.get_experiment_by_name("p")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["optimizer.lr"] == "0.1" and run.info.run_name == "r" and run.info.status == "FINISHED"
    history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(history) == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 40)]


@needs("wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    notes = two_starts(tmp_path, "wandb")
    assert all("track    wandb: offline; send it with: wandb sync" in note for note in notes)
    for note in notes:
        folder = Path(note.rpartition(" ")[2])
        assert list(folder.glob("*.wandb")), folder


@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3
    import subprocess
    import sys

    code = (
        "from tests.observe.test_trackers import two_starts; from pathlib import Path; import sys\n"
        "print(two_starts(Path(sys.argv[1]), 'trackio'))"
    )  # it reads TRACKIO_DIR once
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "db"))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert "trackio show --project p" in done.stdout, done.stderr
    (database,) = (tmp_path / "db").glob("*.db")
    rows = sqlite3.connect(database).execute("select run_name, step from metrics").fetchall()
    assert {("r", step) for step in (1, 2, 3, 4)} <= set(rows)
