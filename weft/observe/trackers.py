"""Metrics to TensorBoard, Weights & Biases, trackio and MLflow, as set in track.report_to.

A thread of the first rank sends the numbers of every step, so a slow tracker delays no step. A tracker that fails is
dropped with a warning, and the run continues; RUN/metrics.jsonl always has all metrics. Imports no torch, and imports
the package of a tracker only if it is used.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import netrc
import os
import queue
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar

import yaml

from weft.config.run_schema import TrackConfig
from weft.errors import UserError, how_to_install
from weft.terminal import say

IDENTITY = "track.json"
# Seconds that a run waits at its end for trackers that have not received all metrics.
PATIENCE = 60.0
# The same for a failed run, whose other ranks are waiting.
FAILED_PATIENCE = 3.0


@dataclass(frozen=True)
class TrackedRun:
    """The identity of the run for a tracker. id: the same when the run is resumed. step: the last step that is kept, 0
    for none. A tracker removes later steps, which come from before the resume."""

    folder: Path
    project: str
    name: str
    id: str
    step: int = 0


class Tracker(ABC):
    """A destination of metrics. If a method raises, the run continues without this tracker. package: the name of the
    package that it imports, or of a module of the standard library."""

    package: ClassVar[str]

    @abstractmethod
    def start(self, config: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> str:
        """Begins or resumes a run; returns a URL or command to view it. config: section -> key -> value."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the numbers of one step."""

    @abstractmethod
    def finish(self, failed: bool) -> None:
        """Flushes and closes. failed: whether the run ended with an error."""


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard."""

    package = "tensorboard"

    def start(self, config: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        # Steps that a resumed run repeats replace the old ones; without a checkpoint all steps are repeated, with step
        # 0.
        self.writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else 0)
        self.writer.add_text("config", "    " + yaml.safe_dump(dict(config), sort_keys=False).replace("\n", "\n    "))
        return f"tensorboard --logdir {folder}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, failed: bool) -> None:
        self.writer.close()


class Wandb(Tracker):
    """Weights & Biases. Without an API key it runs offline: the files stay in RUN/wandb, for `wandb sync`."""

    package = "wandb"

    def start(self, config: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> str:
        import wandb

        offline = not os.environ.get("WANDB_MODE") and not _has_wandb_key()
        self.run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config={section: dict(keys) for section, keys in config.items()},
            mode="offline" if offline else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Use weft's step, because a resumed run may log a step again, which wandb's counter refuses.
        self.run.define_metric("*", step_metric="step")
        if self.run.offline:
            return f"offline; send it with: wandb sync {Path(self.run.dir).parent}"
        return str(self.run.url)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class Trackio(Tracker):
    """trackio: a local database (TRACKIO_DIR), or a Space if TRACKIO_SPACE_ID names one."""

    package = "trackio"

    def start(self, config: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> str:
        import trackio

        resume = "allow" if run.step else "never"  # trackio identifies runs only by name
        with redirect_stdout(io.StringIO()):  # it prints nine lines
            self.run = trackio.init(
                project=run.project, name=run.name, resume=resume, config=_flat(config), embed=False, auto_log_cpu=False
            )
        return f"trackio show --project {run.project}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        self.run.finish()


class MLflow(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI, or in a database next to the run folder."""

    package = "mlflow"

    def start(self, config: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs each table that it creates
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.parent.absolute() / 'mlflow.db'}"
        self.client = MlflowClient(tracking_uri=uri)
        experiment = self.client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(run.project)
        earlier_runs = self.client.search_runs(
            [experiment_id], filter_string=f"tags.`weft.id` = '{run.id}'", max_results=1
        )
        if earlier_runs:
            self.id = earlier_runs[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
        else:
            self.id = self.client.create_run(experiment_id, run_name=run.name, tags={"weft.id": run.id}).info.run_id
            params = [Param(name, str(value)[:6000]) for name, value in _flat(config).items()]
            for start in range(0, len(params), 100):
                self.client.log_batch(self.id, params=params[start : start + 100])
        return f"mlflow ui --backend-store-uri {uri}" if uri.startswith(("sqlite", "file")) else uri

    def log(self, step: int, values: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def check_installed(config: TrackConfig) -> None:
    """Raises UserError, with the command to install them, if packages of track.report_to are missing."""
    missing = [
        TRACKERS[name].package for name in config.report_to if importlib.util.find_spec(TRACKERS[name].package) is None
    ]
    if missing:
        raise UserError(
            f"track.report_to contains {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed: pip install {' '.join(missing)}, or remove {'it' if len(missing) == 1 else 'them'} from "
            "track.report_to."
            + f" For tensorboard alone: {how_to_install('tensorboard', 'track')}."
            * ("tensorboard" in missing)
        )


class Trackers:
    """The trackers of a run, on its first rank. notes: a message about each that started or failed to start."""

    def __init__(self, config: Mapping[str, Mapping[str, Any]], track: TrackConfig, folder: Path, step: int) -> None:
        """config: the resolved config. step: the last finished step of a resumed run, else 0."""
        self.notes: list[str] = []
        self._running: dict[str, Tracker] = {}
        self._lines: queue.SimpleQueue[Mapping[str, object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed = False
        if not track.report_to:
            return
        run = TrackedRun(folder, track.project, track.name or folder.resolve().name, _identity(folder), step)
        for name in dict.fromkeys(track.report_to):
            tracker = TRACKERS[name]()
            try:
                address = tracker.start(config, run)
            except Exception as error:  # the run continues, whatever a tracker raises
                self.notes.append(_lost(name, error))
            else:
                self._running[name] = tracker
                self.notes.append(f"track    {name}: {address}")
        if self._running:
            self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
            self._thread.start()

    def log(self, line: Mapping[str, object]) -> None:
        """Queues a line of metrics.jsonl. Returns at once."""
        if self._thread is not None:
            self._lines.put(line)

    def finish(self, failed: bool = False) -> None:
        """Waits for a limited time until every tracker has received all metrics and finished."""
        if self._thread is None:
            return
        self._failed = failed
        self._lines.put(None)
        patience = FAILED_PATIENCE if failed else PATIENCE
        self._thread.join(patience)
        if self._thread.is_alive():
            say(f"track    {', '.join(self._running)} did not receive all metrics within {patience:g} s", error=True)
        self._thread = None

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            self._call_all(methodcaller("log", line["step"], numbers(line)))
        self._call_all(methodcaller("finish", self._failed))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._running.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._running[name]
                say(_lost(name, error), error=True)


def numbers(line: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl, True as 1.0. Names without a group become `train/...`."""
    named = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    grouped = {name if "/" in name else f"train/{name}": float(value) for name, value in named.items()}
    return {name: value for name, value in grouped.items() if math.isfinite(value)}


def _flat(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def _identity(folder: Path) -> str:
    """The id of the run for trackers, created once and stored in RUN/track.json."""
    path = folder / IDENTITY
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    identifier = uuid.uuid4().hex[:12]
    with suppress(OSError):  # if the id is lost, a resumed run is a new run for trackers
        path.write_text(json.dumps({"id": identifier}) + "\n", encoding="utf-8")
    return identifier


def _lost(name: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"track    {name} failed and receives no more metrics: {type(error).__name__}: {text[:300]}"


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].strip("/")
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
