"""Bugs of the held-out loss: it depends on how documents are dealt, or documents are dropped or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from weft.engine.metrics import MetricSums
from weft.verify.bugs import Original, Plant, bug

HELD_OUT = "tests/recipes/test_eval.py: the held-out loss is the reference's token mean"


@bug(
    "B34", "weft.engine.engine:Engine.evaluate",
    "the held-out loss is the mean of the means of ranks and batches",
    caught_by=HELD_OUT, issue="huggingface/transformers#39241", ranks=2, needs="held-out documents",
)  # fmt: skip
def held_out_mean_of_means(plant: Plant, original: Original, *args: Any) -> MetricSums:
    means, sums = MetricSums(), original(*args)
    for name, total in sums._sums.items():
        weight = float(sums._weights[name])
        plant.hits += weight not in (0.0, 1.0)
        means.add(name, total / (weight or 1.0), float(weight > 0))
    return means


@bug(
    "B34", "weft.recipes.evaluate:split_by_tokens",
    "held-out documents beyond a multiple of the ranks are dropped",
    caught_by=HELD_OUT, issue="verl-project/verl#78", ranks=2, needs="held-out documents",
)  # fmt: skip
def held_out_documents_dropped(plant: Plant, original: Original, metas: Any, limit: int) -> Iterator[tuple[int, int]]:
    world = dist.get_world_size()
    for first, last in original(metas, limit):
        remainder = (last - first) % world if last - first > world else 0
        plant.hits += remainder > 0
        yield first, last - remainder


@bug(
    "B34", "weft.recipes.evaluate:split_by_tokens",
    "held-out documents are evaluated twice, to fill up the ranks",
    caught_by=HELD_OUT, issue="pytorch/pytorch#25162", ranks=2, needs="held-out documents",
)  # fmt: skip
def held_out_documents_twice(plant: Plant, original: Original, metas: Any, limit: int) -> Iterator[tuple[int, int]]:
    yield from original(metas, limit)
    missing = -len(metas) % dist.get_world_size()
    if missing:
        plant.hit()
        yield 0, min(missing, len(metas))
