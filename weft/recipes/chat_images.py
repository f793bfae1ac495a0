"""The images of `weft chat`: read from files, and processed by transformers' processor."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedTokenizerBase

from weft.data.image_columns import Image
from weft.data.image_files import ImageChecks, load_pixels
from weft.data.images import Images
from weft.data.loss_mask import MaskedText
from weft.data.records import Record
from weft.errors import UserError
from weft.models.hf_processor import is_vision_config


@dataclass(frozen=True, slots=True)
class ChatImage:
    """An image of a conversation. name: of its file. picture: a PIL image in RGB, read once and kept in memory."""

    name: str
    picture: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.picture.width} x {self.picture.height} pixels)"


def sees_images(config: PretrainedConfig) -> bool:
    """Whether transformers has a model of images and text for this config."""
    return is_vision_config(config) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


@dataclass(frozen=True)
class ChatImages:
    """Reads the images of a chat. path: of the model. images: the image reader of the model; None if it accepts no
    images, and `refusal` is then the reason."""

    path: str
    images: Images | None
    refusal: str = "is a text-only model: remove the image, or use a vision model"

    @classmethod
    def for_model(cls, model: str, path: str, tokenizer: PreTrainedTokenizerBase) -> ChatImages:
        """The ChatImages of a vision model. model: the path of its processor. If only the processor has a chat
        template, the tokenizer gets it."""
        images = Images(model, tokenizer, {}, ImageChecks(rows=False))
        if images.problem:
            return cls(path, None, f"accepts no images: {images.problem.removeprefix('model.path: ').rstrip('.')}")
        if not tokenizer.chat_template and images.template:
            tokenizer.chat_template = images.template
        if not tokenizer.chat_template:
            return cls(path, None, "has no chat template, which images need: use the chat variant of the model")
        return cls(path, images)

    @property
    def on(self) -> bool:
        """Whether the model accepts images."""
        return self.images is not None

    def take(self, option: str, path: str) -> ChatImage:
        """Opens an image file. option: the option or command with the file, for messages. path: may be quoted as in a
        shell. Raises UserError if the model cannot process it."""
        if self.images is None:
            raise UserError(f"{option}: {self.path} {self.refusal}.")
        image = _file(option, path)
        picture, size = load_pixels(image, option, self.images.checks)
        record = Record(f"{option} ({image})", "messages", {}, (image,))
        self.images.expand(
            record, MaskedText(self.images.placeholder, ()), [size]
        )  # some processors refuse some shapes
        return ChatImage(os.path.basename(str(image.path)), picture)

    def refuse_marks(self, origin: str, text: str) -> None:
        """Raises UserError if a text contains a placeholder token for an image or a video."""
        for mark in () if self.images is None else self.images.marks:
            if mark in text:
                raise UserError(
                    f"{origin}: contains {mark}, this model's placeholder for an image or video: remove it, and "
                    "add images with /image PATH or --image PATH."
                )

    def without_marks(self, text: str) -> str:
        """An answer without placeholder tokens, so that the next prompt can be rendered."""
        for mark in () if self.images is None else self.images.marks:
            text = text.replace(mark, "")
        return text

    def inputs(self, prompt: str, images: Sequence[ChatImage], model: Any) -> Mapping[str, Any]:
        """The model's inputs for a rendered conversation and its images. Raises UserError if the rendered text does not
        have one placeholder per image."""
        assert self.images is not None
        places = prompt.count(self.images.placeholder)
        if places != len(images):
            raise UserError(
                f"the chat template of {self.path} writes {places} placeholders ({self.images.placeholder}) for "
                f"{len(images)} images: use a model whose template renders parts of type image."
            )
        inputs = self.images.processor().prompt_inputs(prompt, [image.picture for image in images])
        placed: Mapping[str, Any] = inputs.to(model.device, dtype=model.dtype)  # the dtype applies only to pixels
        return placed


def _file(option: str, path: str) -> Image:
    """The image at a path or file: URL. Raises UserError for another URL or an empty path."""
    scheme, separator, _ = path.partition("://")
    if separator and scheme.lower() == "file":
        return Image(path=unquote(urlsplit(path).path))
    if separator:
        raise UserError(f"{option}: {path} is a URL, but weft chat opens only files: download it and write its path.")
    if not path.strip():
        raise UserError(f"{option}: write the path of an image, as in {option} cat.jpg.")
    return Image(path=os.path.abspath(os.path.expanduser(_unquoted(path.strip()))))


def _unquoted(path: str) -> str:
    """The path without shell quotes, as terminals write a dropped file. A path with unquoted spaces is unchanged."""
    try:
        words = shlex.split(path)
    except ValueError:  # an unmatched quotation mark
        return path
    return words[0] if len(words) == 1 and not os.path.exists(path) else path
