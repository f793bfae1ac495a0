"""Bugs of resumed runs: a part of the state begins anew instead of going on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from weft.verify.bugs import Original, Plant, bug

RESUMED = "tests/checkpoint/test_resume.py: a resumed run is the unbroken one"


@bug(
    "B18", "weft.recipes.training:learning_rate",
    "a resumed run begins its learning rate schedule again",
    caught_by=RESUMED, issue="verl-project/verl#7953", needs="a run that is resumed",
)  # fmt: skip
def rate_restarted(plant: Plant, original: Original, step: int, *args: Any) -> float:
    done = plant.memory.setdefault("done", step - 1)
    plant.hits += done > 0
    return float(original(step - done, *args))


@bug(
    "B19", "weft.data.order:StepSampler.starting_at",
    "a resumed run begins the data again",
    caught_by=RESUMED, issue="huggingface/accelerate#4071", needs="a run that is resumed",
)  # fmt: skip
def place_in_data_lost(plant: Plant, original: Original, self: Any, number: int) -> Iterator[Any]:
    plant.hits += number > 1
    for step in original(self, 1):
        if step.number + number - 1 <= self.total:
            yield replace(step, number=step.number + number - 1)


@bug(
    "B20", "weft.checkpoint.resume:read_rng",
    "every rank takes up the first rank's random numbers",
    caught_by=RESUMED, issue="radixark/miles#3187", ranks=2, needs="a run that is resumed",
)  # fmt: skip
def first_ranks_random_numbers(plant: Plant, original: Original, state: Any, rank: int) -> Any:
    plant.hits += rank > 0
    return original(state, 0)


@bug(
    "B20", "weft.checkpoint.resume:load_state",
    "each rank takes up moments of zero",
    caught_by=RESUMED, issue="KempnerInstitute/KempnerForge#115", needs="a run that is resumed",
)  # fmt: skip
def moments_lost(plant: Plant, original: Original, engine: Any, state: Any) -> None:
    original(engine, state)
    for moments in engine.optimizer.state.values():
        for value in moments.values():
            if value.ndim:
                plant.hit()
                value.zero_()


@bug(
    "B21", "weft.checkpoint.state:is_writer",
    "a checkpoint holds the first rank's shards only",
    caught_by=RESUMED, issue="huggingface/accelerate#4206", ranks=2, needs="a run that is resumed",
)  # fmt: skip
def first_shards_only(plant: Plant, original: Original, shard: Any, number: int) -> bool:
    plant.hits += dist.get_rank() > 0 and bool(original(shard, number))
    return dist.get_rank() == 0 and bool(original(shard, number))
