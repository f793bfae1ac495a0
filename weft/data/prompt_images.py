"""The images of a prompt: measured when prompts are read, opened when they are needed. Imports no torch, because the
processes of reward functions and environments use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.data.image_columns import Image
from weft.data.image_files import ImageChecks, MediaInfo, load_pixels


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, not yet opened. location: the name of the prompt in messages. images: in the order of
    their placeholders. sizes: measurements of each. patches, pairs: of all of them, as in Media."""

    location: str
    images: tuple[Image, ...]
    sizes: tuple[MediaInfo, ...]
    patches: int
    pairs: int

    def followed_by(self, more: PromptImages) -> PromptImages:
        """These images followed by the images of replies. more: the latter; its patches and pairs must already count
        all images together, because processors pad the images of one document to the largest."""
        both = (*self.images, *more.images), (*self.sizes, *more.sizes)
        return PromptImages(self.location, *both, more.patches, more.pairs)

    @property
    def names(self) -> list[str]:
        """The path or URL of each image ("in the row" if none), as rollouts and samples record it."""
        return [str(image) for image in self.images]

    def pictures(self) -> list[Any]:
        """The images as PIL images in RGB. Raises BadRowError if one can no longer be opened, or has more pixels."""
        limits = (
            ImageChecks(max_pixels=size.height * size.width) for size in self.sizes
        )  # data.max_image_pixels allowed it
        return [load_pixels(image, self.location, checks)[0] for image, checks in zip(self.images, limits, strict=True)]
