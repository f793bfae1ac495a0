"""`weft push`: uploads a checkpoint, or any folder with a complete model or adapter, to the HuggingFace hub."""

from __future__ import annotations

import os
from pathlib import Path

from weft.checkpoint.remote.push import Repository, message_of, push_checkpoint
from weft.checkpoint.retention import best_step, chosen_step, complete_steps, step_folder
from weft.errors import UserError
from weft.files import is_own_file, read_object
from weft.launch.options import PushOptions
from weft.launch.scratch import scratch_folder
from weft.parallel.shards.adapter_files import CONFIG as ADAPTER
from weft.parallel.shards.digests import DIGESTS, check_digests
from weft.parallel.shards.safetensors_files import TensorFile
from weft.parallel.shards.source import INDEX
from weft.recipes.export import find_checkpoint


def run(options: PushOptions) -> str:
    """Uploads a checkpoint and returns its URL. Raises UserError if it is incomplete, or the hub refuses it."""
    checkpoint = choose_checkpoint(Path(options.path), options.step, best=options.best)
    require_complete(checkpoint)
    repository = Repository(options.repository, options.private, options.revision)
    repository.prepare()
    with scratch_folder("push-") as scratch:
        return push_checkpoint(
            repository, checkpoint, options.message or message_of(checkpoint), scratch / checkpoint.name
        )


def choose_checkpoint(path: Path, step: int | None, *, best: bool) -> Path:
    """The folder to upload: `path` itself, or the newest, the best or the given checkpoint of a run folder. Raises
    UserError if there is none."""
    checkpoints = path / "checkpoints"
    if step is None and not best:
        return find_checkpoint(path)
    if not complete_steps(checkpoints):
        raise UserError(f"--step and --best need a run folder, but {path} is not a run folder: remove them.")
    if step is not None:
        return chosen_step(checkpoints, path, step)
    chosen = best_step(checkpoints)
    if chosen is None:
        raise UserError(f"--best: {checkpoints} has no link `best`: the run did not have checkpoint.keep_best=true.")
    return step_folder(checkpoints, chosen)


def require_complete(checkpoint: Path) -> None:
    """Raises UserError if a folder contains no complete model or adapter, or if weights differ from their digests."""
    if checkpoint.suffix in (".partial", ".removing"):
        raise UserError(f"{checkpoint} is being written or removed, so it is incomplete: choose another checkpoint.")
    weights = sorted(checkpoint.glob("*.safetensors"))
    if not weights:
        raise UserError(
            f"{checkpoint} contains no weights (*.safetensors), so the "
            f"{'adapter' if (checkpoint / ADAPTER).is_file() else 'model'} is incomplete: write a checkpoint, "
            "RUN/checkpoints/step-N."
        )
    for file in weights:
        TensorFile.open(file).close()
    if os.path.lexists(checkpoint / INDEX):
        named = read_object(checkpoint / INDEX, "the index of a model's files").get("weight_map")
        names = set(named.values()) if isinstance(named, dict) else set()
        missing = sorted(n for n in names if not is_own_file(str(n)) or not (checkpoint / str(n)).is_file())
        if missing or not names:
            raise UserError(f"{checkpoint} is incomplete: {INDEX} lists {missing[0] if missing else 'no file'}.")
    if os.path.lexists(checkpoint / DIGESTS):
        check_digests(checkpoint)
