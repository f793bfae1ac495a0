"""What a part of benchmarks/gpu.py is given: its device, its time, and rows to fill, which are on disk at once."""

from __future__ import annotations

import json
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import Device

Row = dict[str, Any]


@dataclass
class PartRun:
    """tiny: sizes for a test, with the same code. end: by time.monotonic(). out: where files go. path: of the rows."""

    device: Device
    tiny: bool
    end: float
    out: Path
    path: Path
    rows: list[Row] = field(default_factory=list)
    _longest: dict[str, float] = field(default_factory=dict)

    def pick(self, full: Any, tiny: Any) -> Any:
        """The one of two sizes that this run has."""
        return tiny if self.tiny else full

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def add(self, **values: Any) -> Row:
        """A row of the table, in the order of its columns. Change it, and call save()."""
        self.rows.append(values)
        self.save()
        return values

    def save(self) -> None:
        """Write what there is: this process may be killed at any moment."""
        text = json.dumps([{name: _plain(value) for name, value in row.items()} for row in self.rows])
        draft = self.path.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(self.path)

    def attempt(self, row: Row, fill: Callable[[], Row], like: str = "") -> bool:
        """Add what `fill` finds to the row, or why there is nothing: no time, no memory, an error; whether it did.

        like: a word for those that take about as long: none is begun for which the longest of them would be too long.
        """
        began = time.monotonic()
        if self.left < self._longest.get(like, 0.0):
            row_values: Row = {"note": "not run: no time left"}
        else:
            try:
                row_values = fill()
            except torch.OutOfMemoryError:
                row_values = {"note": "out of memory"}
            except Exception as error:
                traceback.print_exc()
                row_values = {"note": failure(error)}
        self.device.collect()  # what the failed one held is free only here
        self._longest[like] = max(self._longest.get(like, 0.0), time.monotonic() - began)
        notes = [text for text in (row.pop("note", ""), row_values.pop("note", "")) if text]
        row.update(row_values | ({"note": "; ".join(notes)} if notes else {}))
        self.save()
        return not notes


def keep_warnings(path: Path) -> None:
    """From now on write each of this process's warnings into a file, as text -> times, and let none end anything."""
    counts: Counter[str] = Counter()
    shown = warnings.showwarning

    def keep(
        message: Any, category: type[Warning], filename: str, lineno: int, *arguments: Any, **options: Any
    ) -> None:
        short_path = "/".join(Path(filename).parts[-3:])
        counts[f"{category.__name__} ({short_path}:{lineno}): {str(message).strip().splitlines()[0]}"] += 1
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(counts))
        draft.replace(path)
        shown(message, category, filename, lineno, *arguments, **options)

    warnings.simplefilter("default")
    warnings.showwarning = keep


def failure(error: BaseException) -> str:
    """The last lines of a traceback, as one."""
    text = "".join(traceback.format_exception(error)).strip().splitlines()
    return "failed: " + " / ".join(line.strip() for line in text[-3:])[-400:]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
