"""Orders in which the ranks of a pipeline run forwards and backwards of a step's micro-batches. Pure functions.

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
    """chunks: stages per rank. folded: every second pass over the ranks runs backwards (a V), so that with two chunks
    the first rank has the first and the last stage; else every pass begins at the first rank (a loop)."""

    ranks: int
    chunks: int = 1
    folded: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def last(self) -> int:
        """The rank of the last stage, which has the loss."""
        return self.rank_of(self.stages - 1)

    def rank_of(self, stage: int) -> int:
        chunk, index = divmod(stage, self.ranks)
        return self.ranks - 1 - index if self.folded and chunk % 2 else index

    def stage_of(self, rank: int, chunk: int) -> int:
        """A rank's stage number `chunk`, from 0."""
        return chunk * self.ranks + (self.ranks - 1 - rank if self.folded and chunk % 2 else rank)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the order of layers."""
        return [self.stage_of(rank, chunk) for chunk in range(self.chunks)]

    def chunk_of(self, stage: int) -> int:
        return stage // self.ranks

    def neighbour(self, stage: int, onward: bool) -> int | None:
        """The stage after this one, or before it; None at the ends."""
        neighbour = stage + (1 if onward else -1)
        return neighbour if 0 <= neighbour < self.stages else None


class Action(NamedTuple):
    """One action of a rank: forward, backward or weight gradients of one micro-batch in one of its chunks of layers.
    backward: gradients of the input and of weights; in schedules of DELAYED, `weights` computes the latter."""

    kind: Kind
    micro: int
    chunk: int = 0


def placement_of(schedule: Schedule, ranks: int, chunks: int | None) -> Placement:
    """The placement of a schedule's stages. chunks: stages per rank, for interleaved schedules; None for two."""
    if schedule == "ZBVZeroBubble":
        return Placement(ranks, 2, folded=True)
    return Placement(ranks, chunks or 2 if schedule in _INTERLEAVED else 1)


def order(schedule: Schedule, placement: Placement, rank: int, micro_batches: int) -> list[Action]:
    """The actions of a rank of mesh.pp, in order.

    In each chunk, micro-batches go forward and backward in order of their numbers, so that sender and receiver know the
    order of messages between them.
    """
    if schedule == "ZBVZeroBubble":
        return _folded(placement.ranks, rank, micro_batches)
    ranks, chunks = placement.ranks, placement.chunks
    rounds = _rounds(micro_batches, micro_batches if chunks == 1 else ranks)
    forwards = [Action("forward", m, chunk) for micros in rounds for chunk in range(chunks) for m in micros]
    backwards = [Action("backward", m, chunk) for micros in rounds for chunk in reversed(range(chunks)) for m in micros]
    after = ranks - 1 - rank
    ahead = 1 + after if chunks == 1 else 1 + 2 * after + (chunks - 1) * len(rounds[0])
    if schedule == "GPipe":
        ahead = micro_batches
    actions = forwards[:ahead]
    for done, backward in enumerate(backwards):
        actions += [backward, *forwards[ahead + done : ahead + done + 1]]
    return _with_weights(actions, rank) if schedule in DELAYED else actions


def _rounds(micro_batches: int, size: int) -> list[range]:
    """Consecutive micro-batches that pass a chunk one after the other: `size` or more per round, as equal as possible,
    with larger rounds first."""
    count = max(1, micro_batches // size)
    size_floor, larger = divmod(micro_batches, count)
    ends = [(n + 1) * size_floor + min(n + 1, larger) for n in range(count)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _with_weights(actions: Sequence[Action], delay: int) -> list[Action]:
    """Put weight gradients `delay` backwards after their backward. A later rank begins its backwards sooner, and has
    weight gradients left to compute when it would otherwise wait at the end."""
    result: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        result.append(action)
        if action.kind == "backward":
            waiting.append(action._replace(kind="weights"))
            result += [waiting.pop(0)] if len(waiting) > delay else []
    return result + waiting


def _folded(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    """The V schedule: made for enough micro-batches to fill the pipeline; those beyond the step's are then removed."""
    remaining, padded = ranks - rank, max(micro_batches, 2 * ranks - 1)
    # Letters stand for forward, backward, weights; lower case for the first chunk, upper case for the second.
    letters = "f" * (2 * remaining - 1) + "Ff" * rank + "FBW" * remaining
    first_forwards = padded - (2 * remaining - 1 + rank)  # forwards of the first chunk that are left
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
    """The most (micro-batch, chunk) pairs whose activations a rank keeps at once, for backward or weight gradients."""
    alive, peak, ends = 0, 0, "weights" if schedule in DELAYED else "backward"
    for action in order(schedule, placement, rank, micro_batches):
        alive += 1 if action.kind == "forward" else -1 if action.kind == ends else 0
        peak = max(peak, alive)
    return peak


def bubble(orders: Sequence[Sequence[Action]], placement: Placement, cost: Callable[[int, Action], float]) -> float:
    """The share of the ranks' time in which they wait for each other, if only computing takes time.

    orders: by rank. cost: of an action on a stage.
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
            raise RuntimeError("the stages of this pipeline wait for each other for ever")
    total = max(clocks) * len(orders)
    return 1.0 - busy / total if total else 0.0


def _needed(placement: Placement, stage: int, action: Action) -> tuple[int, Kind, int] | None:
    """(stage, kind, micro-batch) of the action whose result this one needs; None for a forward of the first stage."""
    if action.kind == "weights":
        return stage, "backward", action.micro
    neighbour = placement.neighbour(stage, onward=action.kind == "backward")
    if neighbour is not None:
        return neighbour, action.kind, action.micro
    return (stage, "forward", action.micro) if action.kind == "backward" else None
