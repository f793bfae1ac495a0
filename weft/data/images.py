"""The images of documents: measured, checked and given their places in a text before training; loaded when a step needs
them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.config.schema import DataConfig
from weft.data.chat_template import Span
from weft.data.image_columns import Image
from weft.data.image_files import (
    Checks,
    Measured,
    Place,
    as_file,
    measured,
    need_pillow,
    opening_pool,
    pixels,
    place_of,
)
from weft.data.image_urls import fetched
from weft.data.loss_mask import MaskedText
from weft.data.prompt_images import PromptImages
from weft.data.records import Record
from weft.errors import BadRowError, UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from weft.models.hf_processor import ImageProcessor


@dataclass(frozen=True, slots=True)
class Placed:
    """A conversation's text with its images in place. chat: its text and trained spans. replaced: the characters that
    stand for each image. places: where the images are found again. patches, pairs: as in Media."""

    chat: MaskedText
    replaced: tuple[Span, ...] = ()
    places: tuple[Place, ...] = ()
    patches: int = 0
    pairs: int = 0


class Images:
    """How a vision model's images are read. It is sent to other processes without the processor, which each loads when
    the first image comes.

    placeholder, marks, settings, template: as in ImageProcessor. problem: why the model has no processor; "" where it
    has one.
    """

    def __init__(
        self, model: str, tokenizer: PreTrainedTokenizerBase, limits: Mapping[str, int], checks: Checks | None = None
    ) -> None:
        self._model, self._tokenizer, self._limits = model, tokenizer, dict(limits)
        self.checks = checks or Checks()
        self._processor: ImageProcessor | None = None
        self.problem, self.placeholder, self.settings = "", "", ""
        self.template: str | None = None
        self.marks: tuple[str, ...] = ()
        try:
            processor = self.processor()
        except UserError as error:
            if limits:
                raise
            self.problem = str(error)  # which matters to data with images alone
        else:
            self.placeholder, self.marks = processor.placeholder, processor.marks
            self.settings, self.template = processor.settings, processor.template

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_processor": None}

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The tokens that stand for images and videos, which no answer may hold."""
        known = self._tokenizer.get_vocab()
        return tuple(known[mark] for mark in self.marks if mark in known)

    def processor(self) -> ImageProcessor:
        """The model's processor. Raises UserError where there is none."""
        if self._processor is None:
            from weft.models import hf  # with torch, which processes that tokenise texts do without
            from weft.models.hf_processor import load_processor

            need_pillow(f"model.path: {self._model}")
            self._processor = load_processor(self._model, hf.read_config(self._model), self._tokenizer, self._limits)
        return self._processor

    def read(self, records: Sequence[Record]) -> list[tuple[Record, list[Measured]]]:
        """(the record with what was fetched, the sizes of its images) of each; every image is opened. Raises
        BadRowError, of the first record that it is about."""
        if not any(record.images for record in records):
            return [(record, []) for record in records]
        with opening_pool() as pool:
            return list(pool.map(self.read_one, records))

    def read_one(self, record: Record) -> tuple[Record, list[Measured]]:
        """As read, for one record."""
        if not record.images:
            return record, []
        if self.problem:
            raise UserError(f"{record.where}: has images. {self.problem}")
        names = [_name(record.where, number, len(record.images)) for number in range(1, len(record.images) + 1)]
        found = [fetched(image, name, self.checks.fetch) for image, name in zip(record.images, names, strict=True)]
        sizes = [measured(image, name, self.checks) for image, name in zip(found, names, strict=True)]
        return replace(record, images=tuple(found)), sizes

    def refuse_marks(self, record: Record, texts: Iterator[str]) -> None:
        """Raises BadRowError where a text holds what stands for an image or a video."""
        for text in texts:
            for mark in self.marks:
                if mark in text:
                    raise BadRowError(
                        f"{record.where}: a text holds {mark}, with which this model marks the place of an image or "
                        "video. Take it out; images are parts of `content`, or stand in the column `images` with "
                        "<image> in the text for each."
                    )

    def place(self, record: Record, chat: MaskedText, sizes: Sequence[Measured]) -> Placed:
        """The text with what replaces each placeholder, which is never trained. sizes: of the record's images. Raises
        BadRowError."""
        found = chat.text.count(self.placeholder) if self.placeholder else 0
        if found != len(record.images):
            raise BadRowError(
                f"{record.where}: has {len(record.images)} images, and the chat template writes {found} places for "
                f"them ({self.placeholder}). Set data.chat_template to one that renders parts of type image."
            )
        if not record.images:
            return Placed(chat)
        try:
            layout = self.processor().layout(tuple((size.height, size.width) for size in sizes))
        except UserError:
            raise
        except Exception as error:  # of a family's processor, for a size that it does not take
            shown = ", ".join(f"{size.width} x {size.height}" for size in sizes)
            raise BadRowError(
                f"{record.where}: the model's processor refuses images of {shown} pixels: {first_line(error)}."
            ) from error
        places = (
            place_of(image, size, record.position, number)
            for number, (image, size) in enumerate(zip(record.images, sizes, strict=True))
        )
        placed, replaced = expanded(chat, self.placeholder, layout.texts)
        return Placed(placed, replaced, tuple(places), layout.patches, layout.pairs)

    def prompt(self, where: str, text: str, given: tuple[Image, ...]) -> tuple[str, PromptImages | None]:
        """(a rendered prompt with what stands for its images, these images). UserError where one cannot be opened, or
        the text has not one place for each."""
        record, sizes = self.read_one(Record(where, "messages", {}, given))
        placed = self.place(record, MaskedText(text, ()), sizes)
        found = PromptImages(where, record.images, tuple(sizes), placed.patches, placed.pairs) if given else None
        return placed.chat.text, found

    def reply(
        self, where: str, text: str, given: tuple[Image, ...], before: PromptImages | None, replied: PromptImages | None
    ) -> tuple[str, PromptImages | None]:
        """(a rendered reply with what stands for its images, the images of all replies). before, replied: the images of
        the prompt and of earlier replies. Raises BadRowError as `prompt`."""
        given = tuple(as_file(image, f"{where}: image", self.checks) for image in given)
        text, new = self.prompt(where, text, given)
        if new is None:
            return text, replied
        own = new if replied is None else replied.followed_by(new)
        whole = own if before is None else before.followed_by(own)
        sizes = tuple((size.height, size.width) for size in whole.sizes)
        layout = self.processor().layout(sizes)
        return text, replace(own, patches=layout.patches, pairs=layout.pairs)

    def inputs(self, where: str, images: Sequence[tuple[Image, Measured]]) -> tuple[dict[str, Any], int]:
        """(the model's inputs for a document's images, their patches). Raises UserError where an image is not what it
        was when it was tokenised."""
        opened = []
        for number, (image, was) in enumerate(images, start=1):
            name = _name(where, number, len(images))
            picture, seen = pixels(image, name, self.checks)
            if (seen.height, seen.width, seen.size) != (was.height, was.width, was.size) or was.changed != seen.changed:
                raise UserError(
                    f"{name} ({image}): has changed since the data were read: it is {seen.width} x {seen.height} "
                    f"pixels in {seen.size:,} bytes, and was {was.width} x {was.height} in {was.size:,}. Start again "
                    "when nothing writes to it."
                )
            opened.append(picture)
        return self.processor().inputs(opened)


def read_images(model: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Images | None:
    """How a config's images are read; None for a model of text. A chat template that only the processor has becomes
    the tokenizer's. Raises UserError."""
    from weft.models import hf
    from weft.models.hf_processor import is_vision_config

    if not is_vision_config(hf.read_config(model)):
        if data.image_pixels:
            raise UserError(f"data.image_pixels: model.path {model} has no vision tower: leave it out.")
        return None
    checks = Checks(data.check_images, data.max_image_pixels, data.fetch_images)
    images = Images(model, tokenizer, data.image_pixels, checks)
    if not tokenizer.chat_template and images.template:
        tokenizer.chat_template = images.template
    return images


def of_text_alone(where: str) -> BadRowError:
    """The error about a row or a prompt with images for a model without a vision tower."""
    return BadRowError(f"{where}: has images, and model.path is a model of text alone.")


def expanded(chat: MaskedText, placeholder: str, texts: Sequence[str]) -> tuple[MaskedText, tuple[Span, ...]]:
    """(the text with each placeholder replaced, the characters that replace them). Spans are moved, and cut where an
    image is."""
    pieces, spans, replaced = list[str](), list[Span](), list[Span]()
    begin = length = 0
    cuts = [match.span() for match in re.finditer(re.escape(placeholder), chat.text)]
    for number, (start, end) in enumerate([*cuts, (len(chat.text), len(chat.text))]):
        pieces.append(chat.text[begin:start])
        moved = length - begin
        inside = ((max(first, begin), min(last, start)) for first, last in chat.spans)
        spans += [(first + moved, last + moved) for first, last in inside if first < last]
        length += start - begin
        if number < len(texts):
            pieces.append(texts[number])
            replaced.append((length, length + len(texts[number])))
            length += len(texts[number])
        begin = end
    return MaskedText("".join(pieces), tuple(sorted(spans))), tuple(replaced)


def texts_of(value: Any) -> Iterator[str]:
    """All texts in the messages and tools of a conversation."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)


def _name(where: str, number: int, count: int) -> str:
    return f"{where}: image" if count == 1 else f"{where}: image {number} of {count}"
