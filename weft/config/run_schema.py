"""The keys of trackers, profiles and the run folder. See schema.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config import conditions as when
from weft.config.keys import key, with_former_names
from weft.config.ranges import POSITIVE, Range


@with_former_names
@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Destinations of metrics other than RUN/metrics.jsonl. See docs/reference/observing.md."""

    report_to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = key(
        "Trackers that receive every step's metrics, as in [tensorboard, wandb]. A tracker that fails never ends the "
        "run.",
        (),
        formerly="to",
    )
    project: str = key("Project (for mlflow: experiment) of the run.", "weft", unread=(when.NO_TRACKERS,))
    name: str | None = key(
        "Name of the run in the trackers; null: the name of the run folder.", None, unread=(when.NO_TRACKERS,)
    )
    timing: bool = key(
        "Measure the seconds of each step by phase: `time/data`, `time/forward`, `time/backward`, "
        "`time/communication` and `time/optimizer` in every line.",
        True,
    )
    system: bool = key(
        "Sample the load of the first rank's machine: processor, memory, and for NVIDIA GPUs utilisation, memory, "
        "temperature and power. Each sample is a line of RUN/system.jsonl, which trackers also receive.",
        True,
    )
    system_seconds: float = key("Seconds between two such samples.", 10.0, within=POSITIVE, unread=(when.NO_SAMPLES,))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Traces of chosen steps, in RUN/profile. See docs/reference/observing.md."""

    steps: tuple[int, ...] = key(
        "Optimizer steps that torch's profiler traces, as in [3, 4]: RUN/profile/rank-0-step-3.json.gz.",
        (),
        within=Range(lambda v: all(step >= 1 for step in v), "of steps, which count from 1"),
    )
    ranks: tuple[int, ...] = key(
        "Ranks that write a trace.",
        (0,),
        within=Range(lambda v: len(v) > 0 and all(rank >= 0 for rank in v), "one rank or more, which count from 0"),
        unread=(when.NO_PROFILE,),
    )
    memory: bool = key(
        "Also record allocations: in the trace, and on CUDA as a snapshot, rank-0-step-3.memory.pickle.",
        False,
        unread=(when.NO_PROFILE,),
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run folder."""

    dir: str | None = key(
        "The run folder; null: runs/NAME-DATE. With a URL of an object store, as in s3://bucket/run, the run works in "
        "a folder of run.staging and uploads during training (docs/how-to/object-stores.md).",
        None,
    )
    staging: str | None = key(
        "Local folder for files of object stores: run folders, and copies of data and models; null: "
        "~/.cache/weft/remote. If run.dir is a URL, all ranks of the run must share this folder.",
        None,
        unread=(when.NO_STORES,),
    )
    overwrite: bool = key("Remove the files of an earlier run in run.dir, including its checkpoints.", False)
