"""Opens the images of prompts in the processes that run a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from weft.config.schema import DataConfig
from weft.data.encode import load_tokenizer
from weft.data.image_files import MediaInfo, PromptImages
from weft.data.images import Images, read_images
from weft.engine.batch.media import Media

_ROOM = 1 << 30  # bytes of opened images in a process's cache: the images of a few hundred prompts


class ImageOpener:
    """Opens images of prompts in a process, with an LRU cache, because the samples of a prompt share its images and a
    step reads each sample several times."""

    def __init__(self, read: Callable[[], Images | None], room: int = _ROOM) -> None:
        """read: returns the image reader of the model, None for a text model; called at the first image, so that a
        process without images loads no tokenizer and no processor. room: size of the cache in bytes."""
        self._read, self._room, self._used = read, room, 0
        self._images: Images | None = None
        self._cache: OrderedDict[tuple[str, tuple[MediaInfo, ...], tuple[int, ...]], Media] = OrderedDict()

    def __call__(self, images_of_prompt: PromptImages) -> Media:
        """The model's inputs for these images. Raises UserError if an image has changed since the prompts were read."""
        self._images = self._images or self._read()
        assert self._images is not None, "text models refuse prompts with images"
        # Environment replies give the samples of a prompt different images; their bytes distinguish the samples.
        key = (
            images_of_prompt.location,
            images_of_prompt.sizes,
            tuple(hash(image.data) for image in images_of_prompt.images),
        )
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        images = list(zip(images_of_prompt.images, images_of_prompt.sizes, strict=True))
        with torch.inference_mode(
            False
        ):  # an engine may open them first, in inference mode, but training needs them in a backward pass
            inputs, patches = self._images.inputs(images_of_prompt.location, images)
        assert patches == images_of_prompt.patches, (
            f"{images_of_prompt.location}: its images have {patches} patches instead of {images_of_prompt.patches}"
        )
        media = self._cache[key] = Media(inputs, patches, images_of_prompt.pairs)
        self._used += _size(media)
        while self._used > self._room and len(self._cache) > 1:
            self._used -= _size(self._cache.popitem(last=False)[1])
        return media


def image_opener(model: str, data: DataConfig) -> ImageOpener:
    """The opener for the images of a config."""
    return ImageOpener(lambda: read_images(model, load_tokenizer(model), data))


def _size(media: Media) -> int:
    return sum(value.numel() * value.element_size() for value in media.inputs.values())
