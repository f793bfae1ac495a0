"""Sums over micro-batches and ranks, and metrics.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import pool
from weft.engine import nonfinite
from weft.engine.metrics import CORE_KEYS, MetricsFile, MetricSums
from weft.errors import RanksDisagreeError


def test_sums_over_micro_batches() -> None:
    sums = MetricSums()
    sums.add("loss", torch.tensor(6.0), torch.tensor(2))
    sums.add("loss", torch.tensor(2.0), 6.0)
    sums.add("kl", 3, 4)
    assert sums.reduce() == {"kl": 0.75, "loss": 1.0}


def test_nothing_added() -> None:
    assert MetricSums().reduce() == {}


def test_no_weight_is_none() -> None:
    sums = MetricSums()
    sums.add("loss", torch.tensor(0.0), torch.tensor(0))
    assert sums.reduce() == {"loss": None}


def test_gradients_are_left_behind() -> None:
    sums, x = MetricSums(), torch.ones(1, requires_grad=True)
    sums.add("loss", (x * 2).sum(), 1.0)
    assert sums.reduce() == {"loss": 2.0}


def test_accumulates_in_fp64() -> None:
    sums = MetricSums()
    sums.add("loss", torch.tensor(1e8), 1.0)
    for _ in range(64):
        sums.add("loss", torch.tensor(1.0), 0.0)  # in fp32 each would vanish
    assert sums.reduce() == {"loss": 1e8 + 64}


def test_a_bad_value_is_seen() -> None:
    sums = MetricSums()
    sums.add("loss", torch.tensor(math.nan), 1.0)
    loss = sums.reduce()["loss"]
    assert loss is not None and math.isnan(loss)


def reduce_unequal_weights() -> dict[str, float | None]:
    sums, rank = MetricSums(), dist.get_rank()
    losses = {0: [(9.0, 3), (1.0, 1)], 1: [(90.0, 96)], 2: [(0.0, 0)]}[rank]
    names = ["loss", "empty"] if rank else ["empty", "loss"]  # the order of adding is no matter
    for total, weight in losses:
        pairs = {"loss": (total, weight), "empty": (0.0, 0)}
        for name in names:
            sums.add(name, *map(torch.tensor, pairs[name]))
    return sums.reduce(dist.group.WORLD)


def test_ranks_of_unequal_weight() -> None:
    # 100 tokens with a sum of 100: the mean is 1. The mean of the ranks' means, (10 / 4 + 90 / 96) / 2, is 1.72.
    assert pool.run(3, reduce_unequal_weights) == [{"empty": None, "loss": 1.0}] * 3


def reduce_within_a_half() -> dict[str, float | None]:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sums = MetricSums()
    sums.add("rank", float(rank), 1.0)  # host numbers only
    return sums.reduce(halves[rank // 2])


def test_reduces_over_the_given_group_alone() -> None:
    assert [r["rank"] for r in pool.run(4, reduce_within_a_half)] == [0.5, 0.5, 2.5, 2.5]


def reduce_unlike_names() -> str:
    sums = MetricSums()
    sums.add("loss", 1.0, 1.0)
    sums.add("kl" if dist.get_rank() else "entropy", 1.0, 1.0)
    with pytest.raises(RanksDisagreeError) as raised:
        sums.reduce(dist.group.WORLD)
    return str(raised.value)


def test_unlike_names_are_refused() -> None:
    line = "metrics of the step: kl, loss on rank 1; entropy, loss on the other"
    assert pool.run(2, reduce_unlike_names) == [f"ranks disagree:\n  {line}"] * 2


def lines_of(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"reward/mean": 0.5, "tokens": 10, "step": 1, "loss": 2.5, "kl": None})
        assert len(lines_of(path)) == 1  # flushed
        file.write({"step": 2, "loss": math.nan, "grad_norm": math.inf, "skipped": True, "lags": [1.0, -math.inf]})
    first, second = lines_of(path)
    assert list(first) == [*CORE_KEYS, "reward/mean", "kl"]
    assert first["loss"] == 2.5 and first["mfu"] is None
    assert second["loss"] is None and second["grad_norm"] is None and second["lags"] == [1.0, None]
    assert list(second) == [*CORE_KEYS, "skipped", "lags"]


def test_metrics_file_adds_to_what_is_there(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricsFile(tmp_path / "metrics.jsonl") as file:
            file.write({"step": step})
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_what_is_not_finite_on_any_rank_is_named_once_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(parts: list[list[str]], local: list[str], group: object) -> None:
        parts[:] = [local, ["b", "a"]]

    monkeypatch.setattr(nonfinite, "world_group", lambda: None)
    monkeypatch.setattr(nonfinite.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(nonfinite.dist, "all_gather_object", gather)
    assert nonfinite._gathered(["a"]) == ["a", "b"]
