"""The run folder RUN: its location, the lock that a run holds on it, and the removal of files of an earlier run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from weft.checkpoint.retention import sweep
from weft.config import to_yaml
from weft.config.rl_schema import RlConfig
from weft.config.run_schema import RunConfig
from weft.config.schema import SftConfig
from weft.errors import UserError
from weft.files import LOCK
from weft.launch.consistency import check_shared
from weft.launch.process import Ranks
from weft.terminal import display_name

SAMPLES = "samples.jsonl"  # answers to eval.prompts
AnyConfig = SftConfig | RlConfig


@contextmanager
def open_folder(config: AnyConfig, ranks: Ranks, *, resume: bool = False) -> Iterator[Path]:
    """Creates or re-enters RUN and locks it on the first rank. Yields the path, which is equal on all ranks. Raises
    UserError on every rank if the ranks do not share the folder. Collective."""
    run_lock: RunLock | None = None
    answer: list[str | None] = [None, None, None]
    if ranks.is_first:
        try:
            run_lock = _lock_run(config, resume)
            answer = [str(run_lock.folder), run_lock.token, None]
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
        if run_lock is not None:
            run_lock.release()


@dataclass(frozen=True)
class RunLock:
    """RUN, locked by this process. token: the content of the lock file."""

    folder: Path
    token: str
    lock: TextIO

    def release(self) -> None:
        """Removes the lock file and releases the lock."""
        Path(self.lock.name).unlink(missing_ok=True)
        self.lock.close()


@contextmanager
def lock_folder(config: AnyConfig, *, resume: bool = False) -> Iterator[RunLock]:
    """Creates or re-enters RUN and locks it in a process that is not a rank, such as the controller of `weft rl`; the
    ranks call `check_shared`."""
    run_lock = _lock_run(config, resume)
    try:
        if not resume:
            write_config(config, run_lock.folder)
        yield run_lock
    finally:
        run_lock.release()


def _lock_run(config: AnyConfig, resume: bool) -> RunLock:
    try:
        folder = Path(str(config.run.dir)) if resume else make_folder(config.run, config.model.path, config.command)
        token = uuid.uuid4().hex
        lock = _lock(folder, token)
        if config.run.overwrite and not resume and _holds_a_run(folder):
            for path in (folder / name for name in _RUN_FILES):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        if resume:
            sweep(folder / "checkpoints")
        return RunLock(folder, token, lock)
    except OSError as error:
        raise UserError(f"run.dir: {config.run.dir} cannot be used: {error.strerror}: {error.filename}.") from error


def write_config(config: AnyConfig, folder: Path) -> None:
    """Writes RUN/config.yaml atomically."""
    partial = folder / "config.yaml.partial"
    partial.write_text(to_yaml(config), encoding="utf-8")
    os.replace(partial, folder / "config.yaml")


def write_bad_rows(bad: Sequence[tuple[str, str]], folder: Path) -> None:
    """Writes RUN/bad_rows.jsonl, one line for each row that data.bad_rows=drop omitted. If there are none, removes the
    file. bad: (source, error) of each row."""
    path = folder / "bad_rows.jsonl"
    if not bad:
        path.unlink(missing_ok=True)
        return
    named = ({"source": display_name(source), "error": display_name(error)} for source, error in bad)
    lines = (json.dumps(row, ensure_ascii=False) for row in named)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="backslashreplace")


def cut_lines(path: Path, after: int) -> int:
    """Moves the lines of steps after `after` from NAME.jsonl to NAME.dropped.jsonl; returns their number.

    An incomplete last line is also moved. With after=0 every line is moved, even that of step 0.
    """
    if not path.exists():
        return 0
    remaining: list[str] = []
    dropped: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (remaining if after and _step_of(line) <= after else dropped).append(line)
    if dropped:
        with dropped_of(path).open("a", encoding="utf-8") as stream:
            stream.writelines(line.rstrip("\n") + "\n" for line in dropped)
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(remaining), encoding="utf-8")
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
    """runs/NAME-DATE, the run folder if run.dir is null."""
    return Path("runs") / f"{Path(model).name or 'run'}-{datetime.now():%Y%m%d-%H%M%S}"


def make_folder(run: RunConfig, model: str, command: str = "sft") -> Path:
    """Creates run.dir, or runs/NAME-DATE if it is null. Raises UserError if it contains a run and run.overwrite is
    off."""
    folder = default_folder(model) if run.dir is None else Path(run.dir)
    if _holds_a_run(folder) and not run.overwrite:
        raise UserError(
            f"run.dir: {folder} already contains a run. Set run.dir to another folder, set run.overwrite=true to "
            f"remove that run, or resume it: weft {command} --resume {folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# The files of an earlier run that run.overwrite removes. Other files stay.
_RUN_FILES = (
    "config.yaml", "opening.txt", "metrics.jsonl", "metrics.dropped.jsonl", "samples.jsonl", "samples.dropped.jsonl",
    "summary.json", "bad_rows.jsonl", "report.html", "checkpoints", "rollouts", "evaluations", "flight", "profile",
    "tensorboard", "engines", "reference", "critic", "reward_model", "reward_model_2", "reward_model_3",
    "track.json", "starts.jsonl", "system.jsonl",
)  # fmt: skip


def _holds_a_run(folder: Path) -> bool:
    """Whether a folder has results of a run. A run that failed before its first step left none."""
    results = (folder / name for name in ("metrics.jsonl", "checkpoints", "rollouts"))
    return any((path.is_file() and path.stat().st_size) or (path.is_dir() and any(path.iterdir())) for path in results)


def _lock(folder: Path, token: str) -> TextIO:
    """Acquires the lock of RUN/lock. The kernel releases it when the process ends, even by a crash, so an old file is
    harmless. Raises UserError if another process holds the lock."""
    path = folder / LOCK
    while True:
        stream = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            holder = "another process"
            with suppress(ValueError, KeyError, TypeError):
                fields = json.loads(stream.read())
                holder = f"process {fields['pid']} on {fields['host']}"
            stream.close()
            raise UserError(
                f"run.dir: {folder} is in use by {holder}. Wait for it or stop it, or set run.dir to another folder."
            ) from error
        except OSError:
            break  # a file system without locks
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            break
        stream.close()  # the previous holder removed the file after we opened it: try again
    stream.truncate(0)
    stream.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": token}))
    stream.flush()
    return stream
