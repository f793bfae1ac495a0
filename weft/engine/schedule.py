"""Orders in which the stages of a pipeline run forwards and backwards of a step's micro-batches. Pure functions.

GPipe: Huang et al. 2019, arXiv:1811.06965. 1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Schedule = Literal["1F1B", "GPipe"]


class Action(NamedTuple):
    """The forward or the backward of a micro-batch on one stage."""

    forward: bool
    micro: int


def order(schedule: Schedule, place: int, stages: int, micro_batches: int) -> list[Action]:
    """What a stage does, in order. Micro-batches go forward and backward by their numbers on every stage, so that
    whatever travels between two stages in one direction is in one order."""
    ahead = micro_batches if schedule == "GPipe" else min(micro_batches, stages - place)
    forwards = [Action(True, micro) for micro in range(micro_batches)]
    backwards = [Action(False, micro) for micro in range(micro_batches)]
    found = forwards[:ahead]
    for done, backward in enumerate(backwards):
        found += [backward, *forwards[ahead + done : ahead + done + 1]]
    return found


def in_flight(schedule: Schedule, stages: int, micro_batches: int) -> int:
    """The most micro-batches of which a stage keeps what backward needs: the first stage's."""
    return micro_batches if schedule == "GPipe" else min(micro_batches, stages)


def bubble(orders: Sequence[Sequence[Action]], cost: Callable[[int, Action], float]) -> float:
    """The share of the stages' time in which they wait for each other, where nothing but computing takes time.

    orders: by stage. cost: of an action on a stage.
    """
    ends: dict[tuple[int, Action], float] = {}
    clocks, places, busy = [0.0] * len(orders), [0] * len(orders), 0.0
    while any(place < len(actions) for place, actions in zip(places, orders, strict=True)):
        moved = False
        for stage, actions in enumerate(orders):
            while places[stage] < len(actions):
                action = actions[places[stage]]
                needed = _needed(stage, action, len(orders))
                if needed is not None and needed not in ends:
                    break
                begin = max(clocks[stage], 0.0 if needed is None else ends[needed])
                clocks[stage] = ends[stage, action] = begin + cost(stage, action)
                busy += cost(stage, action)
                places[stage] += 1
                moved = True
        if not moved:
            raise RuntimeError("the stages of this pipeline wait for each other for ever")
    whole = max(clocks) * len(orders)
    return 1.0 - busy / whole if whole else 0.0


def _needed(stage: int, action: Action, stages: int) -> tuple[int, Action] | None:
    """The action of another stage whose result this one takes."""
    if action.forward:
        return (stage - 1, action) if stage else None
    return (stage + 1, action) if stage < stages - 1 else None
