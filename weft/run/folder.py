"""The run folder: its location, the lock that one run holds on it, and what is done to files of an earlier run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from weft.checkpoint.retention import sweep
from weft.cluster.consistency import LOCK, check_shared
from weft.cluster.process import Ranks
from weft.config import to_yaml
from weft.config.rl_schema import RlConfig
from weft.config.run_schema import RunConfig
from weft.config.schema import SftConfig
from weft.errors import UserError
from weft.terminal import display_name

SAMPLES = "samples.jsonl"  # answers to eval.prompts
AnyConfig = SftConfig | RlConfig


@contextmanager
def open_folder(config: AnyConfig, ranks: Ranks, *, resume: bool = False) -> Iterator[Path]:
    """Create or re-enter RUN and lock it. All ranks agree on the path and check that they share it."""
    held: RunLock | None = None
    answer: list[str | None] = [None, None, None]
    if ranks.is_first:
        try:
            held = _hold(config, resume)
            answer = [str(held.folder), held.token, None]
        except UserError as error:
            answer[2] = str(error)
    dist.broadcast_object_list(answer, src=0, group=ranks.group)
    try:
        if answer[2] is not None:
            raise UserError(answer[2])
        folder = Path(str(answer[0]))
        check_shared(folder, str(answer[1]), ranks)
        if ranks.is_first and not resume:
            write_config(config, folder)
        yield folder
    finally:
        if held is not None:
            held.release()


@dataclass(frozen=True)
class RunLock:
    """RUN, locked by this process. token: the content of the lock file."""

    folder: Path
    token: str
    lock: TextIO

    def release(self) -> None:
        """Remove the lock."""
        Path(self.lock.name).unlink(missing_ok=True)
        self.lock.close()


@contextmanager
def lock_folder(config: AnyConfig, *, resume: bool = False) -> Iterator[RunLock]:
    """Lock RUN from a process that is no rank, such as the controller of `weft rl`; its ranks call `check_shared`."""
    held = _hold(config, resume)
    try:
        if not resume:
            write_config(config, held.folder)
        yield held
    finally:
        held.release()


def _hold(config: AnyConfig, resume: bool) -> RunLock:
    command = "rl" if isinstance(config, RlConfig) else "sft"
    try:
        folder = Path(str(config.run.dir)) if resume else make_folder(config.run, config.model.path, command)
        token = uuid.uuid4().hex
        lock = _lock(folder, token)
        if config.run.overwrite and not resume:
            _clear(folder)
        if resume:
            sweep(folder / "checkpoints")
        return RunLock(folder, token, lock)
    except OSError as error:
        raise UserError(f"run.dir: {config.run.dir} cannot be used: {error.strerror}: {error.filename}.") from error


def write_config(config: AnyConfig, folder: Path) -> None:
    """Write RUN/config.yaml atomically."""
    partial = folder / "config.yaml.partial"
    partial.write_text(to_yaml(config), encoding="utf-8")
    os.replace(partial, folder / "config.yaml")


def write_bad_rows(bad: Sequence[tuple[str, str]], folder: Path) -> None:
    """Write RUN/bad_rows.jsonl: one line per row that data.bad_rows=drop left out; no file without such rows. bad:
    (source, error) pairs."""
    path = folder / "bad_rows.jsonl"
    if not bad:
        path.unlink(missing_ok=True)
        return
    named = ({"source": display_name(source), "error": display_name(error)} for source, error in bad)
    lines = (json.dumps(row, ensure_ascii=False) for row in named)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="backslashreplace")


def cut_lines(path: Path, after: int) -> int:
    """Move the lines of steps after `after` from NAME.jsonl to NAME.dropped.jsonl; returns how many there were.

    A line that a kill cut short is moved, too. With after=0 everything is moved, the line of step 0 included.
    """
    if not path.exists():
        return 0
    kept: list[str] = []
    dropped: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (kept if after and _step_of(line) <= after else dropped).append(line)
    if dropped:
        with dropped_of(path).open("a", encoding="utf-8") as stream:
            stream.writelines(line.rstrip("\n") + "\n" for line in dropped)
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, path)
    return len(dropped)


def dropped_of(path: Path) -> Path:
    """NAME.dropped.jsonl of NAME.jsonl."""
    return path.with_name(f"{path.stem}.dropped{path.suffix}")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def default_folder(model: str) -> Path:
    """runs/NAME-DATE, the run folder where run.dir is null."""
    return Path("runs") / f"{Path(model).name or 'run'}-{datetime.now():%Y%m%d-%H%M%S}"


def make_folder(run: RunConfig, model: str, command: str = "sft") -> Path:
    """Create run.dir, or runs/NAME-DATE for null. UserError where it holds a run and run.overwrite is off."""
    folder = default_folder(model) if run.dir is None else Path(run.dir)
    if _holds_a_run(folder) and not run.overwrite:
        raise UserError(
            f"run.dir: {folder} holds a run already. Set run.dir to another folder, or run.overwrite=true to remove "
            f"that run; or go on with it: weft {command} --resume {folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# What a run leaves in its folder. Files of others stay.
_LEFT = (
    "config.yaml", "metrics.jsonl", "metrics.dropped.jsonl", "samples.jsonl", "samples.dropped.jsonl", "summary.json",
    "bad_rows.jsonl", "report.html", "checkpoints", "rollouts", "evaluations", "flight", "profile", "tensorboard",
    "engines",
)  # fmt: skip


def _holds_a_run(folder: Path) -> bool:
    """Whether a run has written anything there: one that failed before its first step has left nothing to lose."""
    found = (folder / name for name in ("metrics.jsonl", "checkpoints", "rollouts"))
    return any((path.is_file() and path.stat().st_size) or (path.is_dir() and any(path.iterdir())) for path in found)


def _clear(folder: Path) -> None:
    if _holds_a_run(folder):
        for path in (folder / name for name in _LEFT):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _lock(folder: Path, token: str) -> TextIO:
    """Take RUN/lock. The kernel frees it when its process ends, however that ends, so a file alone locks nothing."""
    path = folder / LOCK
    while True:
        stream = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            holder = _holder(stream.read())
            stream.close()
            raise UserError(
                f"run.dir: {folder} is in use by {holder}. Wait for it or stop it, or set run.dir to another folder."
            ) from error
        except OSError:
            break  # a file system without locks
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            break
        stream.close()  # its holder has removed it between our two calls
    stream.truncate(0)
    stream.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": token}))
    stream.flush()
    return stream


def _holder(text: str) -> str:
    try:
        fields = json.loads(text)
        return f"process {fields['pid']} on {fields['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
