"""Metrics of a step: (sum, weight) pairs reduced once over one group of ranks, and metrics.jsonl."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from weft.launch.consistency import require_agreement
from weft.launch.simulated import read
from weft.launch.timing import waiting
from weft.strict_json import plain

# Keys that other programs may rely on, in the order of every line; the recipe's own keys follow.
CORE_KEYS = (
    "step", "loss", "grad_norm", "lr", "documents", "tokens", "tokens_forwarded", "loss_tokens", "micro_batches",
    "fill", "utilisation", "seconds", "tokens_per_second", "mfu", "memory_gib",
)  # fmt: skip


class MetricSums:
    """Weighted sums by name, accumulated over micro-batches in fp64 without synchronising the device.

    A metric is sum / weight over all micro-batches and ranks. A mean of the ranks' means would differ if weights
    differ.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, Tensor | float] = {}

    def add(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """Add one (sum, weight), scalars on the host or on one device."""
        self._sums[name] = self._sums.get(name, 0.0) + _exact(total)
        self._weights[name] = self._weights.get(name, 0.0) + _exact(weight)

    def add_all(self, sums: MetricSums, prefix: str = "") -> None:
        """Add all sums of another MetricSums, with `prefix` before their names."""
        for name, total in sums._sums.items():
            self.add(prefix + name, total, sums._weights[name])

    def reduce(
        self, group: dist.ProcessGroup | None = None, equal: Mapping[str, str] | None = None
    ) -> dict[str, float | None]:
        """sum / weight of every name over all ranks of `group`, sorted by name; None if the weight is 0.

        One all-reduce of one fp64 vector. Every rank must have added to the same names, in any order. group: None for
        this rank alone, without an all-reduce. equal: strings that must be equal on all ranks; their digests are part
        of the vector. Raises RanksDisagreeError with the strings that differ.
        """
        reduced = self.reduced(group, equal)
        return reduced.metrics(read(reduced.vector, reduced.planned))

    def reduced(
        self, group: dist.ProcessGroup | None, equal: Mapping[str, str] | None, further: Tensor | None = None
    ) -> Reduced:
        """Like `reduce`, without waiting for the device. further: [n] fp64 on the host, which is summed with it."""
        names = sorted(self._sums)
        checked = {**(equal or {}), "metrics of the step": ", ".join(names)}
        vector = _vector([*(self._sums[n] for n in names), *(self._weights[n] for n in names), *_fingerprint(checked)])
        count, ranks = len(vector), 1
        if further is not None:
            vector = torch.cat([vector, _moved(further, vector.device)])
        if group is not None:
            with waiting():
                dist.all_reduce(vector, group=group)
            ranks = dist.get_world_size(group)
        return Reduced(names, vector[:count], checked, ranks, group, vector[count:])


@dataclass(frozen=True)
class Reduced:
    """Reduced sums on their device. vector: the sums and then the weights of `names`, and two numbers of
    `strings`, which must be equal on all ranks. further: as in MetricSums.reduced, summed."""

    names: Sequence[str]
    vector: Tensor
    strings: Mapping[str, str]
    ranks: int
    group: dist.ProcessGroup | None
    further: Tensor

    def sum_of(self, name: str) -> Tensor:
        """One sum, a scalar on the device."""
        return self.vector[self.names.index(name)]

    def planned(self) -> list[float]:
        """The vector that a simulation reads."""
        count = len(self.names)
        return [0.0] * count + [1.0] * count + [self.ranks * number for number in _fingerprint(self.strings)]

    def metrics(self, values: Sequence[float]) -> dict[str, float | None]:
        """The metrics from the vector's values on the host. Collective if it raises RanksDisagreeError."""
        count = len(self.names)
        _check_equal(self.strings, values[-2:], self.ranks, self.group)
        pairs = zip(self.names, values[:count], values[count:-2], strict=True)
        return {name: total / weight if weight else None for name, total, weight in pairs}


def _exact(value: Tensor | float) -> Tensor | float:
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def _vector(values: Iterable[Tensor | float]) -> Tensor:
    """[len(values)] fp64, on the device of the tensors among the values; numbers of the host go there in one copy."""
    values = list(values)
    device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    numbers = torch.tensor([v for v in values if not isinstance(v, Tensor)], dtype=torch.float64)
    scalars = iter(_moved(numbers, device).unbind())
    return torch.stack([v if isinstance(v, Tensor) else next(scalars) for v in values])


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def _fingerprint(strings: Mapping[str, str]) -> tuple[float, float]:
    """A number and its square, small enough that their sums over a million ranks are exact in fp64."""
    number = float(zlib.crc32("\n".join(strings.values()).encode()) & 0xFFFF)
    return number, number * number


def _check_equal(
    strings: Mapping[str, str], fingerprint: Sequence[float], ranks: int, group: dist.ProcessGroup | None
) -> None:
    """Raises an error if the ranks' strings differ: without this check, different metrics would be added up. The
    variance of the ranks' digests is 0 if all are equal."""
    total, squares = fingerprint
    if ranks * int(squares) != int(total) ** 2:
        assert group is not None
        require_agreement(strings, group)
        raise RuntimeError(
            "the checksums of a reduction differ, but the strings are equal on all ranks: memory or network has "
            "corrupted data"
        )


class MetricsFile:
    """metrics.jsonl: one line of JSON per step, flushed when `write` returns. Non-finite numbers become null.

    CORE_KEYS come first and are always present, null if the line lacks them; other keys keep the line's order. An
    existing file is appended to.
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, object]) -> None:
        """Append one step's line."""
        ordered = {key: line.get(key) for key in CORE_KEYS} | dict(line)
        try:
            self._file.write(json.dumps(plain(ordered), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = error.filename or self._file.name
            raise
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while the run wrote to it", self._file.name)

    def sync(self) -> None:
        """Wait until all lines are on disk (fsync)."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
