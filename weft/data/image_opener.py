"""Opening the images of prompts in the processes that run a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from weft.config.schema import DataConfig
from weft.data.encode import load_tokenizer
from weft.data.image_files import MediaInfo, PromptImages
from weft.data.images import Images, read_images
from weft.engine.batch.media import Media

_ROOM = 1 << 30  # bytes of opened images that a process keeps: the images of a few hundred prompts


class ImageOpener:
    """Opens images of prompts in one process, with an LRU cache: the samples of a prompt share its images, and a step
    reads each sample several times."""

    def __init__(self, read: Callable[[], Images | None], room: int = _ROOM) -> None:
        """read: returns the image reader of the model, None for a text model; called at the first image, so that a
        process without images loads no tokenizer and no processor. room: bytes to keep."""
        self._read, self._room, self._held = read, room, 0
        self._images: Images | None = None
        self._kept: OrderedDict[tuple[str, tuple[MediaInfo, ...], tuple[int, ...]], Media] = OrderedDict()

    def __call__(self, wanted: PromptImages) -> Media:
        """The model's inputs for these images. Raises UserError if one has changed since the prompts were read."""
        self._images = self._images or self._read()
        assert self._images is not None, "prompts with images are refused by models of text"
        # Each sample of a prompt has its own images in environment replies: their bytes tell the samples apart.
        key = wanted.location, wanted.sizes, tuple(hash(image.data) for image in wanted.images)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        images = list(zip(wanted.images, wanted.sizes, strict=True))
        with torch.inference_mode(False):  # an engine may open them first, and training needs them in a backward pass
            inputs, patches = self._images.inputs(wanted.location, images)
        assert patches == wanted.patches, f"{wanted.location}: {patches} patches of images, {wanted.patches} expected"
        media = self._kept[key] = Media(inputs, patches, wanted.pairs)
        self._held += _size(media)
        while self._held > self._room and len(self._kept) > 1:
            self._held -= _size(self._kept.popitem(last=False)[1])
        return media


def image_opener(model: str, data: DataConfig) -> ImageOpener:
    """The opener for the images of a config."""
    return ImageOpener(lambda: read_images(model, load_tokenizer(model), data))


def _size(media: Media) -> int:
    return sum(value.numel() * value.element_size() for value in media.inputs.values())
