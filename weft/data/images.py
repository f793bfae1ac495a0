"""The images and videos of documents: before training, weft measures them, checks them and expands their placeholders
in the text; a step loads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.config.schema import DataConfig
from weft.data.chat_template import Span
from weft.data.image_columns import Image, Video, images_alone
from weft.data.image_files import (
    ImageChecks,
    MediaInfo,
    MediaLocation,
    PromptImages,
    encode_picture,
    load_pixels,
    locate_media,
    measure_image,
    need_pillow,
    opening_pool,
)
from weft.data.image_urls import fetch_image
from weft.data.loss_mask import MaskedText
from weft.data.records import Record
from weft.data.video_files import measure_video, sample_frames
from weft.errors import BadRowError, UserError, first_line
from weft.models.clips import Clip, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from weft.models.hf_processor import ImageProcessor


@dataclass(frozen=True, slots=True)
class ExpandedText:
    """A conversation's text with placeholders expanded for its images and videos. chat: the text and its trained spans.
    replaced: the span of characters of each image or video. places: the location of each. patches, pairs: as in
    Media."""

    chat: MaskedText
    replaced: tuple[Span, ...] = ()
    places: tuple[MediaLocation, ...] = ()
    patches: int = 0
    pairs: int = 0


class Images:
    """Reads the images and videos of a vision model. Pickling omits the processor; each process loads it at the first
    image.

    placeholder, video_placeholder, marks, settings, template: as in ImageProcessor. problem: the reason if the model
    has no processor, else "".
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        limits: Mapping[str, int],
        checks: ImageChecks | None = None,
        video: Mapping[str, float] | None = None,
    ) -> None:
        """limits: as data.image_pixels. video: as data.video."""
        self._model, self._tokenizer, self._limits, self._video = model, tokenizer, dict(limits), dict(video or {})
        self.checks = checks or ImageChecks()
        self._processor: ImageProcessor | None = None
        self.problem, self.placeholder, self.video_placeholder, self.settings = "", "", "", ""
        self.template: str | None = None
        self.marks: tuple[str, ...] = ()
        try:
            processor = self.processor()
        except UserError as error:
            if limits or video:
                raise
            self.problem = str(error)  # becomes an error only for data with images
        else:
            self.placeholder, self.video_placeholder = processor.placeholder, processor.video_placeholder
            self.marks = processor.marks
            self.settings, self.template = processor.settings, processor.template

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_processor": None}

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The token ids that stand for images and videos, which no answer may contain."""
        vocab = self._tokenizer.get_vocab()
        return tuple(vocab[mark] for mark in self.marks if mark in vocab)

    def processor(self) -> ImageProcessor:
        """The model's processor. Raises UserError if there is none."""
        if self._processor is None:
            from weft.models import hf  # imported here: it imports torch, which tokenising texts does not need
            from weft.models.hf_processor import load_processor

            need_pillow(f"model.path: {self._model}")
            config = hf.read_config(self._model)
            self._processor = load_processor(self._model, config, self._tokenizer, self._limits, self._video)
        return self._processor

    def read(self, records: Sequence[Record]) -> list[tuple[Record, list[MediaInfo]]]:
        """For each record: (the record with its URLs fetched, the measurements of its images and videos). Opens all
        files in parallel. Raises the error of the first bad record: BadRowError, or UserError without a processor."""
        if not any(record.images for record in records):
            return [(record, []) for record in records]
        with opening_pool() as pool:
            return list(pool.map(self.read_one, records))

    def read_one(self, record: Record) -> tuple[Record, list[MediaInfo]]:
        """Same as `read`, for a single record."""
        if not record.images:
            return record, []
        if self.problem:
            raise UserError(f"{record.location}: has images. {self.problem}")
        names = _names(record.location, record.images)
        fetched, sizes = list[Image | Video](), list[MediaInfo]()
        for media, name in zip(record.images, names, strict=True):
            if isinstance(media, Video):
                if not self.video_placeholder:
                    raise BadRowError(
                        f"{name}: weft does not support the video input of {self.processor().kind} of model.path, only "
                        "of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Remove the video, or write its frames as images."
                    )
                file = None if media.file is None else fetch_image(media.file, name, self.checks.fetch)
                fetched.append(replace(media, file=file))
                sizes.append(measure_video(replace(media, file=file), name, self.checks))
            else:
                image = fetch_image(media, name, self.checks.fetch)
                fetched.append(image)
                sizes.append(measure_image(image, name, self.checks))
        return replace(record, images=tuple(fetched)), sizes

    def refuse_marks(self, record: Record, texts: Iterator[str]) -> None:
        """Raises BadRowError if a text contains the placeholder token of images or videos."""
        for text in texts:
            for mark in self.marks:
                if mark in text:
                    raise BadRowError(
                        f"{record.location}: a text contains {mark}, this model's placeholder of images or videos. "
                        "Remove it. Write images as parts of `content`, or in the column `images` with <image> in the "
                        "text for each; videos likewise, with <video>."
                    )

    def expand(self, record: Record, chat: MaskedText, sizes: Sequence[MediaInfo]) -> ExpandedText:
        """The text with each placeholder expanded. Expansions are never trained. sizes: measurements of the record's
        images and videos. Raises BadRowError."""
        places = self._places(record, chat.text)
        if not record.images:
            return ExpandedText(chat)
        try:
            layout = self.processor().layout(tuple(size.shape for size in sizes))
        except UserError:
            raise
        except Exception as error:  # processors raise errors of any type for sizes that they do not support
            shown = ", ".join(f"{size.width} x {size.height}" for size in sizes)
            raise BadRowError(
                f"{record.location}: the model's processor refuses images of {shown} pixels: {first_line(error)}."
            ) from error
        locations = (
            locate_media(record.location, media, size, record.position, number)
            for number, (media, size) in enumerate(zip(record.images, sizes, strict=True))
        )
        placed, replaced = expand_placeholders(chat, places, layout.texts)
        return ExpandedText(placed, replaced, tuple(locations), layout.patches, layout.pairs)

    def _places(self, record: Record, text: str) -> list[Span]:
        """The span of each placeholder in a rendering. Raises BadRowError if their kinds and order differ from those of
        the record's images and videos."""
        marks = {mark: kind for mark, kind in ((self.placeholder, Image), (self.video_placeholder, Video)) if mark}
        if not marks:
            return []
        matches = [(m.span(), marks[m.group()]) for m in re.finditer("|".join(map(re.escape, marks)), text)]
        if [kind for _, kind in matches] == [type(media) for media in record.images]:
            return [span for span, _ in matches]
        for mark, kind in marks.items():
            name = "image" if kind is Image else "video"
            count, expected = (
                sum(match_kind is kind for _, match_kind in matches),
                sum(isinstance(media, kind) for media in record.images),
            )
            if count != expected:
                raise BadRowError(
                    f"{record.location}: has {expected} {name}s, but the chat template writes {count} placeholders for "
                    f"them ({mark}). Set data.chat_template to one that renders parts of type {name}."
                )
        raise BadRowError(
            f"{record.location}: the chat template writes the placeholders of its images and videos in another order. "
            "Set data.chat_template to one that keeps their order."
        )

    def prompt(self, location: str, text: str, images: tuple[Image, ...]) -> tuple[str, PromptImages | None]:
        """(a rendered prompt with placeholders expanded, its images or None). Raises UserError if an image cannot be
        opened, or if the text does not have a placeholder for each."""
        record, sizes = self.read_one(Record(location, "messages", {}, images))
        placed = self.expand(record, MaskedText(text, ()), sizes)
        shown = images_alone(record.images)
        prompt_images = PromptImages(location, shown, tuple(sizes), placed.patches, placed.pairs) if images else None
        return placed.chat.text, prompt_images

    def reply(
        self,
        location: str,
        text: str,
        images: tuple[Image, ...],
        before: PromptImages | None,
        replied: PromptImages | None,
    ) -> tuple[str, PromptImages | None]:
        """(a rendered reply with placeholders expanded, the images of all replies so far). before, replied: the images
        of the prompt, and of earlier replies. Raises UserError as `prompt` does."""
        images = tuple(encode_picture(image, f"{location}: image", self.checks) for image in images)
        text, new = self.prompt(location, text, images)
        if new is None:
            return text, replied
        all_replied = new if replied is None else replied.followed_by(new)
        all_images = all_replied if before is None else before.followed_by(all_replied)
        layout = self.processor().layout(tuple(size.shape for size in all_images.sizes))
        return text, replace(all_replied, patches=layout.patches, pairs=layout.pairs)

    def inputs(self, location: str, images: Sequence[tuple[Image | Video, MediaInfo]]) -> tuple[dict[str, Any], int]:
        """(the model's inputs for a document's images and videos, the number of their patches). Raises UserError if a
        file has changed since it was tokenised."""
        processor, pictures, videos = self.processor(), list[Any](), list[tuple[list[Any], Clip]]()
        names = _names(location, [image for image, _ in images])
        for name, (image, expected) in zip(names, images, strict=True):
            if isinstance(image, Video):
                frames, info = sample_frames(image, name, self.checks, lambda info: processor.resizing(info.shape))
                videos += [] if info.clip is None else [(frames, info.clip)]
            else:
                picture, info = load_pixels(image, name, self.checks)
                pictures.append(picture)
            if info != expected:
                raise UserError(
                    f"{name} ({image}): has changed since the data were read: from {expected.width} x "
                    f"{expected.height} pixels in {expected.size:,} bytes to {info.width} x {info.height} in "
                    f"{info.size:,}. Start again when no program writes to it."
                )
        return processor.inputs(pictures, videos)


def read_images(model: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Images | None:
    """The image reader of a config; None for a text model. If only the processor has a chat template, it becomes the
    tokenizer's. Raises UserError."""
    from weft.models import hf
    from weft.models.hf_processor import is_vision_config

    if not is_vision_config(hf.read_config(model)):
        if key := next((name for name in ("image_pixels", "video") if getattr(data, name)), None):
            raise UserError(f"data.{key}: model.path {model} has no vision tower. Remove this key.")
        return None
    checks = ImageChecks(data.check_images, data.max_image_pixels, data.fetch_images, video=frame_sampling(data.video))
    images = Images(model, tokenizer, data.image_pixels, checks, data.video)
    if not tokenizer.chat_template and images.template:
        tokenizer.chat_template = images.template
    return images


def frame_sampling(video: Mapping[str, float]) -> Sampling:
    """data.video as a Sampling."""
    limits = {name: int(video[name]) for name in ("min_frames", "max_frames") if name in video}
    return replace(Sampling(float(video.get("fps", Sampling().fps))), **limits)


def text_model_error(location: str) -> BadRowError:
    """The error for a row or a prompt with images or videos when the model has no vision tower."""
    return BadRowError(f"{location}: has images or videos, and model.path is a text-only model.")


def expand_placeholders(
    chat: MaskedText, cuts: Sequence[Span], texts: Sequence[str]
) -> tuple[MaskedText, tuple[Span, ...]]:
    """(the text with each placeholder replaced, the span of each replacement). cuts: the spans of the placeholders.
    texts: the replacements. Trained spans are shifted, and split around replacements."""
    pieces, spans, replaced = list[str](), list[Span](), list[Span]()
    begin = length = 0
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
    """Yields all strings inside a value, such as the messages and tools of a conversation."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)


def _names(location: str, count: Sequence[Image | Video]) -> list[str]:
    """The names of a document's images and videos in messages."""
    kinds = ["video" if isinstance(media, Video) else "image" for media in count]
    numbers = [kinds[: index + 1].count(kind) for index, kind in enumerate(kinds)]
    total = {kind: "" if kinds.count(kind) == 1 else f" {{}} of {kinds.count(kind)}" for kind in kinds}
    return [f"{location}: {kind}{total[kind].format(number)}" for kind, number in zip(kinds, numbers, strict=True)]
