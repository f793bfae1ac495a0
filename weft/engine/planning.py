"""Step plans for one model: what its documents cost, which of their tokens it reads, and which rows they may share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache, partial

from weft.config.schema import StepConfig
from weft.engine.batch.document import Costs, Document, MeasuredDocuments, document_metadata, have_videos
from weft.engine.batch.media import ImageRoom
from weft.engine.build import BuiltModel
from weft.engine.step_plan.plan import DocumentMeta, StepPlan, omitted_tokens, plan_step
from weft.errors import UserError
from weft.models.facts import position_limit, rope_is_dynamic
from weft.models.flops import document_flops, tower_flops
from weft.ops.communicator import CPAxis


class StepPlanner:
    """Plans the steps of one model on one mesh, which is `engine.planner`."""

    def __init__(
        self,
        step: StepConfig,
        ranks: tuple[int, int],
        built: BuiltModel,
        context: CPAxis | None,
        multiple: int,
        *,
        has_cp: bool,
    ) -> None:
        """ranks: (this rank's place among ranks with different documents, their number). context: the ranks that share
        documents, if any. multiple: row lengths are multiples of it. has_cp: whether mesh.cp is above 1."""
        self.step, self.layout, self.context, self.multiple = step, built.layout, context, multiple
        self._rank, self._ranks = ranks
        self._cuts = context is not None if has_cp else built.cuts_documents
        text = built.config.get_text_config()
        self._every_token_counts = bool(built.balance)  # the balancing loss of experts counts all tokens
        self._no_images, self._no_videos = built.support.images, built.support.videos
        self._cuts_images = context is not None and built.vision is not None and built.vision.has_grids
        room = step.max_tokens_per_device // multiple * multiple * self._image_ranks
        self.image_room = ImageRoom(room, built.flops.tower_memory, self._no_images, self._image_ranks)
        self._position_limit, self._dynamic = position_limit(text), rope_is_dynamic(text)
        # Cached by length, and by patches and pairs, because a step has many equal ones.
        self.costs = Costs(
            self._omitted, cache(partial(document_flops, built.flops)), cache(partial(tower_flops, built.flops))
        )

    def metadata(self, documents: Collection[Document]) -> list[DocumentMeta]:
        """The metadata of each document, with its cost in this model; measured documents are not built."""
        result = document_metadata(documents, self.costs)
        if self._no_images and any(meta.patches for meta in result):
            raise UserError(f"this model cannot be trained on images: {self._no_images}.")
        if self._no_videos and have_videos(documents):
            raise UserError(f"this model cannot be trained on videos: {self._no_videos}.")
        return result

    def check_images(self, documents: Sequence[Document]) -> None:
        """Raises UserError, with the document, if this model, or its rows, cannot hold the images of one."""
        if not isinstance(documents, MeasuredDocuments):
            return
        columns = documents.measures()
        if self._no_videos and not self._no_images and columns.videos.any():
            source = documents.source(int(columns.videos.argmax()))
            raise UserError(f"{source}: this model cannot be trained on videos: {self._no_videos}.")
        for index in columns.patches.nonzero()[0].tolist():
            self.check_image(documents.source(index), int(columns.length[index]), int(columns.patches[index]))

    def check_image(self, source: str, length: int, patches: int) -> None:
        """Check one document that is not built yet. source: names it in messages. patches: as in Media."""
        if self._no_images:
            raise UserError(f"{source}: this model cannot be trained on images: {self._no_images}.")
        extra, per_rank = self.image_room.in_tokens(patches), self.multiple * self._image_ranks
        if length - self._omitted(length) + extra > self.image_room.tokens:
            raise UserError(
                f"{source}: has {length} tokens, and its images, {patches} patches, take as much memory as {extra}; "
                f"{self._fits}: set that to {-(-(length + extra) // per_rank) * self.multiple} or more, or make images "
                "smaller with data.image_pixels."
            )

    @property
    def _image_ranks(self) -> int:
        """The number of ranks over which a document with images may be cut."""
        return self.context.size if self.context is not None and self._cuts_images else 1

    @property
    def _fits(self) -> str:
        if self._image_ranks > 1:
            return f"a document has to fit step.max_tokens_per_device on each of {self._image_ranks} ranks of mesh.cp"
        return "a document with images of this model is not cut, and has to fit step.max_tokens_per_device"

    def _omitted(self, length: int) -> int:
        """See DocumentMeta. If a document's length chooses its rotary table, the whole document is read."""
        limit = self._position_limit
        return omitted_tokens(length, read_all=self._every_token_counts or (limit is not None and length > limit))

    def plan(self, metadata: Sequence[DocumentMeta], budget: int) -> StepPlan:
        """See Engine.plan; `budget` is rounded up to the multiple."""
        context, budget = self.context, -(-budget // self.multiple) * self.multiple
        return plan_step(
            metadata,
            ranks=self._ranks,
            budget=budget,
            multiple=self.multiple,
            layout=self.layout,
            shapes=self.step.shapes,
            alone_above=self._alone_above(metadata, budget),
            ring=1 if context is None else context.ring_size,
            ulysses=1 if context is None else context.ulysses_size,
            cuts=self._cuts,
            cuts_images=self._cuts_images,
        )

    def _alone_above(self, metadata: Sequence[DocumentMeta], budget: int) -> int | None:
        """The length above which a document needs a row, and a rotary table, of its own. Raises UserError for longer
        documents that would be cut, or whose table keeps a state."""
        limit = self._position_limit
        longest = max((meta.read for meta in metadata), default=0)
        if limit is not None and self.context is not None and longest > max(limit, budget):
            raise UserError(
                f"mesh.cp: a document of {longest} tokens would be cut, but this model's rotary table beyond {limit} "
                f"tokens depends on the whole document: set step.max_tokens_per_device={longest}, or data.max_length="
                f"{limit} with data.long_documents=truncate or drop."
            )
        if limit is not None and self._dynamic and max(meta.read for meta in metadata) > limit:
            raise UserError(
                f"rope_type dynamic keeps a state from call to call beyond {limit} tokens, so longer documents have no "
                f"one result: set data.max_length={limit} with data.long_documents=truncate or drop."
            )
        return limit

    def local_documents(self, plan: StepPlan) -> list[int]:
        """Indices, in the step, of this rank's documents, ascending."""
        return sorted(index for row in plan.rows_of_rank(self._rank) for index in row)
