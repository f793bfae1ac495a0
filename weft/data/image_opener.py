"""Opening the images of prompts where a model needs them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from weft.config.schema import DataConfig
from weft.data.image_files import Measured
from weft.data.images import Images, read_images
from weft.data.prompt_images import PromptImages
from weft.engine.media import Media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROOM = 1 << 30  # bytes of opened images that a process keeps: those of some hundred prompts


class ImageOpener:
    """Opens images of prompts in one process. The last ones are kept: the samples of a prompt share its images, and a
    step reads each sample several times."""

    def __init__(self, images: Images | None, room: int = _ROOM) -> None:
        """images: how the model's images are read; None for a model of text. room: bytes that are kept."""
        self._images, self._room, self._held = images, room, 0
        self._kept: OrderedDict[tuple[str, tuple[Measured, ...]], Media] = OrderedDict()

    def __call__(self, wanted: PromptImages) -> Media:
        """The inputs of the model. Raises UserError where an image has changed since the prompts were read."""
        assert self._images is not None, "prompts with images are refused by models of text"
        key = wanted.where, wanted.sizes
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        inputs, patches = self._images.inputs(wanted.where, list(zip(wanted.images, wanted.sizes, strict=True)))
        assert patches == wanted.patches, f"{wanted.where}: {patches} patches of images, {wanted.patches} expected"
        media = self._kept[key] = Media(inputs, patches)
        self._held += _size(media)
        while self._held > self._room and len(self._kept) > 1:
            self._held -= _size(self._kept.popitem(last=False)[1])
        return media


def image_opener(model: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> ImageOpener:
    """The opener of a config's images. Raises UserError as read_images."""
    return ImageOpener(read_images(model, tokenizer, data))


def _size(media: Media) -> int:
    return sum(value.numel() * value.element_size() for value in media.inputs.values())
