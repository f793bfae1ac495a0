"""summary.json: the results of a run."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from weft.strict_json import plain
from weft.terminal import display_name
from weft.version import __version__
from weft.versions import TESTED, installed_version

_NUM_VALUES = 10


class Phases:
    """Seconds by phase: `with phases("load"): ...`. The time of a nested phase counts in both phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of another process."""
        for name, added in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + added

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass
class RunSummary:
    """Accumulates the lines of metrics.jsonl. model, data: their paths. Losses of skipped steps are omitted; peak
    memory is the largest rank's, in GiB (2^30 bytes)."""

    model: str
    data: str = ""
    steps: int = 0
    skipped_steps: int = 0
    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    peak_memory_gib: float = 0.0
    first_losses: list[float] = field(default_factory=list)
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_VALUES))
    first_rewards: list[float] = field(default_factory=list)
    last_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_VALUES))
    first_evaluation: dict[str, Any] | None = None
    last_evaluation: dict[str, Any] | None = None

    def add(self, line: Mapping[str, object]) -> None:
        """Count one step."""
        self.steps += 1
        self.skipped_steps += bool(line.get("skipped"))
        self.documents += int(_number(line.get("documents")))
        self.tokens += int(_number(line.get("tokens")))
        self.loss_tokens += int(_number(line.get("loss_tokens")))
        self.peak_memory_gib = max(self.peak_memory_gib, _number(line.get("memory_gib")))
        series = {"loss": (self.first_losses, self.last_losses), "reward": (self.first_rewards, self.last_rewards)}
        for name, (first, last) in series.items():
            value = line.get(name)
            if isinstance(value, int | float):
                first += [float(value)] * (len(first) < _NUM_VALUES)
                last.append(float(value))
        self.add_evaluation(line)

    def add_evaluation(self, line: Mapping[str, object]) -> None:
        """Store the `eval/...` metrics of a line, if it has any."""
        figures = {name: value for name, value in line.items() if name.startswith("eval/")}
        if figures:
            self.last_evaluation = {"step": line.get("step"), **plain(figures)}
            self.first_evaluation = self.first_evaluation or self.last_evaluation

    def counts(self) -> dict[str, Any]:
        """The accumulated state, for JSON. `restore` reads it."""
        excluded = ("model", "data")
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in excluded}
        return {name: list(value) if isinstance(value, deque) else value for name, value in values.items()}

    def restore(self, counts: Mapping[str, Any]) -> None:
        """Restore the `counts` of another process."""
        for name, value in counts.items():
            setattr(self, name, deque(value, maxlen=_NUM_VALUES) if isinstance(getattr(self, name), deque) else value)

    def write(
        self,
        path: Path,
        phases: Phases,
        saved: Path | None,
        stopped: str | None = None,
        best: Mapping[str, Any] | None = None,
    ) -> None:
        """Write summary.json atomically. Arguments as in `content`."""
        partial = path.with_name(path.name + ".partial")
        text = json.dumps(self.content(phases, saved, stopped, best), indent=2, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)

    def content(
        self,
        phases: Phases,
        saved: Path | None,
        stopped: str | None = None,
        best: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The content of summary.json. saved: the HuggingFace directory of the last weights. stopped: the signal, or
        the key of eval, that ended the run early. best: the best evaluation, with its checkpoint if that is saved."""
        rewarded, evaluation = bool(self.first_rewards), None
        if self.last_evaluation is not None:
            evaluation = {"first": self.first_evaluation, "last": self.last_evaluation, "best": best}
        content = {
            "model": display_name(self.model),
            "data": display_name(self.data),
            "saved": None if saved is None else display_name(str(saved)),
            "stopped": stopped,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "documents": self.documents,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "first_losses": self.first_losses,
            "last_losses": list(self.last_losses),
            **({"first_rewards": self.first_rewards, "last_rewards": list(self.last_rewards)} if rewarded else {}),
            "evaluation": evaluation,
            "seconds": {**phases.seconds, "total": sum(phases.seconds.values())},
            "peak_memory_gib": self.peak_memory_gib,
            "versions": versions(),
        }
        return dict(plain(content))


def versions() -> dict[str, str | None]:
    """Versions of weft and of the libraries on which its numbers depend."""
    return {"weft": __version__} | {name: installed_version(name) or None for name in TESTED}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
