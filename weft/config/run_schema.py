"""Keys of trackers, profiles and the run's folder. See schema.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config import conditions as when
from weft.config.keys import key, with_former_names
from weft.config.ranges import POSITIVE, Range


@with_former_names
@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Where metrics go beside RUN/metrics.jsonl; docs/reference/observing.md tells more."""

    report_to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = key(
        "Trackers that get every step's metrics, as in [tensorboard, wandb]; one that fails never ends the run.",
        (),
        formerly="to",
    )
    project: str = key("Project (of mlflow: experiment) that the run belongs to.", "weft", unread=(when.NO_TRACKERS,))
    name: str | None = key(
        "Name of the run in the trackers; null: that of the run folder.", None, unread=(when.NO_TRACKERS,)
    )
    timing: bool = key(
        "Measure the seconds of each step by phase: `time/data`, `time/forward`, `time/backward`, "
        "`time/communication` and `time/optimizer` in every line.",
        True,
    )
    system: bool = key(
        "Sample how busy the first rank's machine is: processor, memory, and of NVIDIA GPUs utilisation, memory, "
        "temperature and power. A line of RUN/system.jsonl each time, which trackers get, too.",
        True,
    )
    system_seconds: float = key("Seconds between two such samples.", 10.0, within=POSITIVE, unread=(when.NO_SAMPLES,))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Traces of chosen steps, in RUN/profile; docs/reference/observing.md tells how to read them."""

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
        "Record allocations, too: in the trace, and on CUDA as a snapshot, rank-0-step-3.memory.pickle.",
        False,
        unread=(when.NO_PROFILE,),
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run writes."""

    dir: str | None = key(
        "Where the run writes; null: runs/NAME-DATE. On an object store, as in s3://bucket/run, it works in a folder "
        "of run.staging, and uploads beside training (docs/how-to/object-stores.md).",
        None,
    )
    staging: str | None = key(
        "Folder of this machine for what lies on object stores: the folders of runs, and copies of data and models; "
        "null: ~/.cache/weft/remote. All ranks of a run whose run.dir is a URL have to share it.",
        None,
        unread=(when.NO_STORES,),
    )
    overwrite: bool = key("Remove what an earlier run has left in run.dir, its checkpoints included.", False)
