"""The order in which a rank of a pipeline runs the forwards and backwards of a step's micro-batches. Pure functions.

GPipe: Huang et al. 2019, arXiv:1811.06965. 1F1B and its interleaved form: Narayanan et al. 2021, arXiv:2104.04473,
sections 2.2.1 and 2.2.2. Zero bubble: Qi et al. 2023, arXiv:2401.10241, section 2 (H1), and Qi et al. 2024,
arXiv:2405.15362 (V).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
Kind = Literal["forward", "backward", "weights"]

DELAYED: tuple[Schedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble")
_INTERLEAVED: tuple[Schedule, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Placement:
    """How stages are assigned to ranks. chunks: stages per rank. folded: every second chunk is assigned in reverse
    order of ranks (a V), so with two chunks the first rank has the first and the last stage. Else every chunk starts at
    the first rank (a loop)."""

    ranks: int
    chunks: int = 1
    folded: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def last(self) -> int:
        """The rank of the last stage, which computes the loss."""
        return self.rank_of(self.stages - 1)

    def rank_of(self, stage: int) -> int:
        chunk, index = divmod(stage, self.ranks)
        return self.ranks - 1 - index if self.folded and chunk % 2 else index

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that is chunk `chunk` of a rank, from 0."""
        return chunk * self.ranks + (self.ranks - 1 - rank if self.folded and chunk % 2 else rank)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the order of layers."""
        return [self.stage_of(rank, chunk) for chunk in range(self.chunks)]

    def chunk_of(self, stage: int) -> int:
        return stage // self.ranks

    def neighbour(self, stage: int, onward: bool) -> int | None:
        """The stage after this stage (onward), or before it. None if there is none."""
        neighbour = stage + (1 if onward else -1)
        return neighbour if 0 <= neighbour < self.stages else None


class Action(NamedTuple):
    """One action of a rank: forward, backward or weight gradients of one micro-batch in one chunk. `backward` computes
    the gradients of the input and of weights. In the schedules in DELAYED, `weights` computes the gradients of
    weights."""

    kind: Kind
    micro: int
    chunk: int = 0


def placement_of(schedule: Schedule, ranks: int, chunks: int | None) -> Placement:
    """The placement of a schedule's stages. chunks: stages per rank, for interleaved schedules; None means 2."""
    if schedule == "ZBVZeroBubble":
        return Placement(ranks, 2, folded=True)
    return Placement(ranks, chunks or 2 if schedule in _INTERLEAVED else 1)


def order(schedule: Schedule, placement: Placement, rank: int, micro_batches: int) -> list[Action]:
    """The actions of a rank of mesh.pp, in order.

    In each chunk, forwards and backwards are in the order of micro-batches. So sender and receiver agree on the order
    of their messages."""
    if schedule == "ZBVZeroBubble":
        return _folded(placement.ranks, rank, micro_batches)
    ranks, chunks = placement.ranks, placement.chunks
    rounds = _rounds(micro_batches, micro_batches if chunks == 1 else ranks)
    forwards = [Action("forward", m, chunk) for micros in rounds for chunk in range(chunks) for m in micros]
    backwards = [Action("backward", m, chunk) for micros in rounds for chunk in reversed(range(chunks)) for m in micros]
    later_ranks = ranks - 1 - rank
    # The number of forwards before the first backward: each later rank delays a micro-batch's backward.
    warmup = 1 + later_ranks if chunks == 1 else 1 + 2 * later_ranks + (chunks - 1) * len(rounds[0])
    if schedule == "GPipe":
        warmup = micro_batches
    actions = forwards[:warmup]
    for index, backward in enumerate(backwards, start=warmup):
        actions += [backward, *forwards[index : index + 1]]
    return _with_weights(actions, rank) if schedule in DELAYED else actions


def _rounds(micro_batches: int, size: int) -> list[range]:
    """The micro-batches in rounds. A chunk runs all micro-batches of a round before the next chunk does. Rounds have at
    least `size` micro-batches, are as equal as possible, and larger rounds come first."""
    count = max(1, micro_batches // size)
    size_floor, larger = divmod(micro_batches, count)
    ends = [(n + 1) * size_floor + min(n + 1, larger) for n in range(count)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _with_weights(actions: Sequence[Action], delay: int) -> list[Action]:
    """The actions, with weight gradients `delay` backwards after their backward. A later rank starts its backwards
    earlier. It then computes weight gradients at the end, instead of waiting."""
    result: list[Action] = []
    delayed: list[Action] = []
    for action in actions:
        result.append(action)
        if action.kind == "backward":
            delayed.append(action._replace(kind="weights"))
            result += [delayed.pop(0)] if len(delayed) > delay else []
    return result + delayed


def _folded(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    """The V schedule. It is generated for enough micro-batches to fill the pipeline; the surplus is then removed."""
    remaining, padded = ranks - rank, max(micro_batches, 2 * ranks - 1)
    # f, b, w: forward, backward, weights. Lower case is the first chunk, upper case the second.
    letters = "f" * (2 * remaining - 1) + "Ff" * rank + "FBW" * remaining
    first_forwards = padded - (2 * remaining - 1 + rank)  # number of remaining forwards of the first chunk
    for steady in range(padded - ranks):
        letters += ("f" if steady < first_forwards else "") + "bwFBW"
    letters += "bB" * rank + "bw" * remaining + "W" * rank + "w" * rank
    kinds: dict[str, Kind] = {"f": "forward", "b": "backward", "w": "weights"}
    counts: Counter[str] = Counter()
    actions = []
    for letter in letters:
        actions.append(Action(kinds[letter.lower()], counts[letter], int(letter.isupper())))
        counts[letter] += 1
    return [action for action in actions if action.micro < micro_batches]


def in_flight(schedule: Schedule, placement: Placement, rank: int, micro_batches: int) -> int:
    """The largest number of (micro-batch, chunk) pairs whose activations a rank stores at the same time."""
    alive, peak, ends = 0, 0, "weights" if schedule in DELAYED else "backward"
    for action in order(schedule, placement, rank, micro_batches):
        alive += 1 if action.kind == "forward" else -1 if action.kind == ends else 0
        peak = max(peak, alive)
    return peak


def bubble(orders: Sequence[Sequence[Action]], placement: Placement, cost: Callable[[int, Action], float]) -> float:
    """The fraction of time in which ranks wait for each other, if communication takes no time.

    orders: the actions of each rank. cost: (stage, action) -> its duration. Raises RuntimeError if the orders deadlock.
    """
    ends: dict[tuple[int, Kind, int], float] = {}
    clocks, positions, busy = [0.0] * len(orders), [0] * len(orders), 0.0
    while any(position < len(actions) for position, actions in zip(positions, orders, strict=True)):
        moved = False
        for rank, actions in enumerate(orders):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                stage = placement.stage_of(rank, action.chunk)
                needed = _needed(placement, stage, action)
                if needed is not None and needed not in ends:
                    break
                begin = max(clocks[rank], 0.0 if needed is None else ends[needed])
                clocks[rank] = ends[stage, action.kind, action.micro] = begin + cost(stage, action)
                busy += cost(stage, action)
                positions[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError("the ranks of this pipeline schedule wait for each other in a cycle (a deadlock)")
    total = max(clocks) * len(orders)
    return 1.0 - busy / total if total else 0.0


def _needed(placement: Placement, stage: int, action: Action) -> tuple[int, Kind, int] | None:
    """(stage, kind, micro-batch) of the action whose result this action needs. None for a forward of the first
    stage."""
    if action.kind == "weights":
        return stage, "backward", action.micro
    neighbour = placement.neighbour(stage, onward=action.kind == "backward")
    if neighbour is not None:
        return neighbour, action.kind, action.micro
    return (stage, "forward", action.micro) if action.kind == "backward" else None
