"""The run folder: where it is, and that nothing of another run is overwritten."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import torch.distributed as dist

from weft.cluster.process import Ranks
from weft.config import to_yaml
from weft.config.schema import SftConfig
from weft.errors import UserError


def open_folder(config: SftConfig, ranks: Ranks) -> Path:
    """Make RUN, write RUN/config.yaml, and return the path that all ranks agree on."""
    answer: list[str | None] = [None, None]
    if ranks.is_first:
        try:
            answer[0] = str(_make(config))
        except UserError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return Path(str(answer[0]))


def _make(config: SftConfig) -> Path:
    if config.run.dir is None:
        name = Path(config.model.path).name or "run"
        folder = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    else:
        folder = Path(config.run.dir)
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists():
        raise UserError(f"run.dir: {folder} holds a run already. Set run.dir to another folder, or move that one away.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder
