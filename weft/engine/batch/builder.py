"""The rows of one rank in a step, built on the host while the device computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from weft.engine.batch.assigned_images import assign_images
from weft.engine.batch.context_row import cut_row
from weft.engine.batch.document import Document
from weft.engine.batch.replay import RouteReplay
from weft.engine.batch.row import Row, build_row
from weft.engine.replicas import shared_documents
from weft.engine.step_plan.plan import Layout, StepPlan
from weft.models.embedding_noise import StepNoise
from weft.models.vision import Vision
from weft.ops.communicator import CPAxis


@dataclass(frozen=True)
class StepRows:
    """Rows by micro-batch, each built on access. sources: the documents' sources by micro-batch, for messages. noisy:
    whether their embeddings get noise."""

    sources: list[list[str]]
    build: Callable[[int], Row]
    noisy: bool = False

    def __getitem__(self, micro_batch: int) -> Row:
        return self.build(micro_batch)

    def ahead(self) -> StepRows:
        """The same rows, built now. An error in one is raised on access to that one."""
        futures: list[Future[Row]] = [Future() for _ in self.sources]
        for micro_batch, row in enumerate(futures):
            try:
                row.set_result(self.build(micro_batch))
            except Exception as error:
                row.set_exception(error)
        return replace(self, build=lambda micro_batch: futures[micro_batch].result())


@dataclass(frozen=True)
class RowBuilder:
    """Builds rows. rank: this rank's place among those with different documents. same: (its place among the ranks with
    the same documents, their number). context: the ranks that share documents, if any. owners: fill Row.owner_M.
    pinned: build rows in page-locked memory. vision, base: of the model; vision is None if it takes no images."""

    rank: int
    same: tuple[int, int]
    context: CPAxis | None
    layout: Layout
    owners: bool
    pinned: bool
    replay: RouteReplay
    vision: Vision | None
    base: nn.Module

    def rows(
        self,
        plan: StepPlan,
        documents: Mapping[int, Document],
        every_token: bool,
        routed: bool,
        noise: StepNoise | None = None,
    ) -> StepRows:
        """The rows of a plan. documents: at least this rank's, by index in the step. every_token, noise: see build_row.
        routed: keep, and check, the routes that documents carry."""
        sources = [[documents[i].source or str(i) for i in row] for row in plan.rows_of_rank(self.rank)]
        return StepRows(sources, partial(self._build, plan, documents, every_token, routed, noise), noise is not None)

    def _build(
        self,
        plan: StepPlan,
        documents: Mapping[int, Document],
        every_token: bool,
        routed: bool,
        noise: StepNoise | None,
        micro_batch: int,
    ) -> Row:
        indices = plan.rows[micro_batch][self.rank]
        for index in indices if routed else ():
            self.replay.check(documents[index])
        documents = {index: self._placed(documents[index]) for index in indices}
        read = [plan.documents[index].read for index in indices]
        length = sum(read) if plan.pieces else plan.row_length(micro_batch, self.rank)
        row = build_row(
            indices, documents, read=read, length=length, layout=self.layout, every_token=every_token,
            owners=self.owners, vision=self.vision, images=plan.has_images(micro_batch),
            noise=noise,
        )  # fmt: skip
        row = replace(row, checksums=shared_documents(row, plan, documents, micro_batch, self.rank, self.same))
        if plan.pieces:
            assert self.context is not None
            row = cut_row(row, plan, micro_batch, self.rank, self.context)
            if self.vision is not None and plan.shares_images(micro_batch, self.rank):
                row = assign_images(row, documents, plan, micro_batch, self.rank, self.context, self.vision)
        row = row if routed else replace(row, routes=None)
        return row.pinned() if self.pinned else row

    def _placed(self, document: Document) -> Document:
        """The document with the positions that follow from its images."""
        if document.media is None:
            return document
        assert self.vision is not None, "planner refuses images otherwise"
        positions = self.vision.positions(self.base, document.tokens, document.media.inputs)
        return document if positions is None else replace(document, positions=positions)
