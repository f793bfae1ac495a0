"""Which rank of mesh.pp has which stages of a pipeline. Pure arithmetic; ranks are places on that axis."""

from __future__ import annotations

from dataclasses import dataclass


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
