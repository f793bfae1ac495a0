"""The layout of a run on an object store: checkpoints that are complete or absent, and small objects that name them.

    URL/config.yaml, metrics.jsonl, ...           as in RUN
    URL/checkpoints/step-000200/...               the files of a checkpoint
    URL/checkpoints/step-000200/complete.json     their sizes and sha256, written after all of them
    URL/checkpoints/latest, best                  the name of a checkpoint, as text: object stores have no links
    URL/critic/checkpoints/step-000200/...        of a critic with its own ranks; complete.json also lists its files
    URL/writer.json                               the process that writes to the URL

An object store cannot rename or link files. So a checkpoint is complete exactly if it has a complete.json, which is
written last and removed first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint.remote.store import Store, StoreError
from weft.checkpoint.retention import STATE_FILE, TRAINER_STATE, step_folder, superseded
from weft.errors import StorageError
from weft.files import sha256

CHECKPOINTS, COMPLETE, LATEST, BEST = "checkpoints", "complete.json", "checkpoints/latest", "checkpoints/best"
ASIDE = "complete.aside.json"  # complete.json of a checkpoint later than the step at which the run was resumed
WRITER, TOKEN = "writer.json", ".writer.json"  # the writer's token, on the store and in its local folder
CRITIC = "critic"
_STEP = re.compile(r"(?:critic/)?checkpoints/(step-(\d{6,}))/(.+)")
_AT_ONCE = 4  # files transferred in parallel


@dataclass(frozen=True)
class Manifest:
    """The content of complete.json. files: name relative to the run -> (bytes, sha256)."""

    step: int
    files: Mapping[str, tuple[int, str]]

    @staticmethod
    def from_folder(folder: Path, names: Iterable[str], step: int) -> Manifest:
        """The manifest of files in a local folder."""
        return Manifest(step, {name: ((folder / name).stat().st_size, sha256(folder / name)) for name in sorted(names)})

    @staticmethod
    def parse(content: bytes | None) -> Manifest | None:
        """The manifest in a complete.json; None if it is missing, malformed or truncated."""
        try:
            parsed = json.loads(content or b"")
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in parsed["files"].items()}
            return Manifest(int(parsed["step"]), files)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def text(self) -> bytes:
        return json.dumps({"step": self.step, "files": dict(self.files)}, indent=1).encode()

    @property
    def resumable(self) -> bool:
        """Whether a run can resume from this checkpoint."""
        return f"{CHECKPOINTS}/{name_of(self.step)}/{TRAINER_STATE}/{STATE_FILE}" in self.files


def name_of(step: int) -> str:
    """The name of a checkpoint: step-000200."""
    return step_folder(Path(), step).name


class RemoteRun:
    """A run on an object store. A single process writes to it. token: this process's token in writer.json; None for
    readers."""

    def __init__(self, store: Store, token: str | None = None) -> None:
        self.store, self.token = store, token
        self._without_state: set[int] = set()

    # ------------------------------------------------------------ listing

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending."""
        return self._steps(self.store.list(CHECKPOINTS))

    def _steps(self, names: Iterable[str], marker: str = COMPLETE) -> list[int]:
        matches = (_STEP.fullmatch(name) for name in names)
        return sorted(int(match[2]) for match in matches if match and match[3] == marker)

    def manifest(self, step: int, marker: str = COMPLETE) -> Manifest | None:
        """The manifest of a checkpoint; None if the checkpoint is incomplete."""
        return Manifest.parse(self.store.read(_marker(step, marker)))

    def named(self, link: str) -> int | None:
        """The step in the object `latest` or `best`; None if it is missing or malformed."""
        match = re.fullmatch(r"step-(\d{6,})", (self.store.read(link) or b"").decode(errors="replace").strip())
        return None if match is None else int(match[1])

    def holds_a_run(self) -> bool:
        """Whether the URL has results that a new run would overwrite."""
        names = self.store.list()
        return any(
            (name == "metrics.jsonl" and entry.size) or name.startswith(("checkpoints/", "rollouts/"))
            for name, entry in names.items()
        )

    def writer(self) -> str | None:
        """The token in writer.json; None if there is none."""
        try:
            return str(json.loads(self.store.read(WRITER) or b"")["token"])
        except (ValueError, KeyError, TypeError):
            return None

    # ------------------------------------------------------------ writing

    def upload(self, step: int, folder: Path) -> None:
        """Uploads a checkpoint: its files, then complete.json, then `latest`. folder: holds the files under their names
        relative to the run. Raises StoreError, or TakenOverError if another process has become the writer."""
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        manifest = Manifest.from_folder(folder, names, step)
        existing = self._objects(step)
        if _marker(step) in existing:
            self.unmark([step])
        self._in_parallel(lambda name: self.store.put(folder / name, name), names)
        self.store.remove(name for name in existing if name not in names)
        uploaded = self._objects(step)
        incomplete = [
            name for name, (size, _) in manifest.files.items() if name not in uploaded or uploaded[name].size != size
        ]
        if incomplete:
            raise StoreError(f"{self.store.url}/{incomplete[0]}: its size differs from the uploaded file's")
        self.require_own()
        self.store.write(_marker(step), manifest.text())
        self.point(LATEST, step)

    def point(self, link: str, step: int) -> None:
        """Points `latest` or `best` at a checkpoint."""
        self.store.write(link, name_of(step).encode())

    def unmark(self, steps: Iterable[int], into: str | None = None) -> None:
        """Marks checkpoints incomplete. Before that, points `latest` at the newest other checkpoint. into: the name
        under which to keep their complete.json; None to delete it."""
        unmarked = set(steps)
        remaining = [step for step in self.steps() if step not in unmarked]
        if unmarked and self.named(LATEST) in unmarked:
            self.point(LATEST, remaining[-1]) if remaining else self.store.remove([LATEST])
        for step in unmarked:
            if into is not None and (content := self.store.read(_marker(step))) is not None:
                self.store.write(_marker(step, into), content)
            self.store.remove([_marker(step)])

    def prune(self, keep: int | None, keep_every: int | None, best: int | None, *, last_state: bool) -> None:
        """Removes checkpoints that retention does not keep. keep, keep_every: as in section checkpoint. best: the step
        of the local best. last_state: whether only the newest checkpoint keeps its trainer state."""
        steps = self.steps()
        protected = {best, self.named(BEST)}
        for step in superseded(steps, keep, keep_every):
            if step not in protected:
                self.remove(step)
        for step in self.steps()[:-1] if last_state else []:
            if step not in self._without_state:
                self._remove_state(step)
                self._without_state.add(step)

    def remove(self, step: int) -> None:
        """Removes a checkpoint, its complete.json first."""
        self.unmark([step])
        self.store.remove(self._objects(step))

    def _remove_state(self, step: int) -> None:
        manifest = self.manifest(step)
        if manifest is None:
            return
        remaining = {name: entry for name, entry in manifest.files.items() if f"/{TRAINER_STATE}/" not in name}
        if len(remaining) < len(manifest.files):
            self.store.write(_marker(step), Manifest(step, remaining).text())
            self.store.remove(manifest.files.keys() - remaining.keys())

    def sweep(self) -> None:
        """Removes incomplete checkpoints of killed processes."""
        names = [*self.store.list(CHECKPOINTS), *self.store.list(f"{CRITIC}/{CHECKPOINTS}")]
        complete = {*self._steps(names), *self._steps(names, ASIDE)}
        matches = ((name, _STEP.fullmatch(name)) for name in names)
        self.store.remove(name for name, match in matches if match and int(match[2]) not in complete)

    def clear(self) -> None:
        """Removes the run except writer.json; each complete.json goes first."""
        self.unmark(self.steps())
        self.store.remove(name for name in self.store.list() if name != WRITER)

    def claim(self, token: str, details: Mapping[str, Any]) -> None:
        """Makes this process the writer. details: further content of writer.json."""
        self.token = token
        self.store.write(WRITER, json.dumps({"token": token, **details}).encode())

    def require_own(self) -> None:
        """Raises TakenOverError if another process has become the writer."""
        if self.writer() != self.token:
            raise TakenOverError(
                f"{self.store.url}: another process now writes to it (writer.json), so this one stops uploading"
            )

    # ------------------------------------------------------------ reading

    def download(self, manifest: Manifest, into: Path) -> None:
        """Downloads a checkpoint's files into `into`, under their names relative to the run, and verifies sizes and
        sha256. Raises StoreError, which names a file that differs."""

        def fetch(name: str) -> None:
            self.store.get(name, into / name)
            size, digest = manifest.files[name]
            if (into / name).stat().st_size != size or sha256(into / name) != digest:
                raise StoreError(f"{self.store.url}/{name}: size or sha256 differ from those of the upload")

        self._in_parallel(fetch, manifest.files)

    def _objects(self, step: int) -> dict[str, Any]:
        folder = f"{CHECKPOINTS}/{name_of(step)}"
        return {**self.store.list(folder), **self.store.list(f"{CRITIC}/{folder}")}

    def _in_parallel(self, do: Any, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="store") as threads:
            for done in [threads.submit(partial(do, name)) for name in names]:
                done.result()


class TakenOverError(StorageError):
    """Another process has become the writer of the run."""


def _marker(step: int, name: str = COMPLETE) -> str:
    return f"{CHECKPOINTS}/{name_of(step)}/{name}"
