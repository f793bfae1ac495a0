"""The images of a prompt: measured when prompts are read, opened where they are needed. Reward functions and
environments get it in processes that import no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.data.image_columns import Image
from weft.data.image_files import Checks, Measured, pixels


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, not yet opened. where: names the prompt, for messages. images: in the order of their
    placeholders. sizes: of each. patches, pairs: as in Media."""

    where: str
    images: tuple[Image, ...]
    sizes: tuple[Measured, ...]
    patches: int
    pairs: int

    def followed_by(self, more: PromptImages) -> PromptImages:
        """These, then those of replies. more: whose patches and pairs count these, too, because processors pad images
        of one document to the largest."""
        both = (*self.images, *more.images), (*self.sizes, *more.sizes)
        return PromptImages(self.where, *both, more.patches, more.pairs)

    @property
    def names(self) -> list[str]:
        """The path of each image, as rollouts and samples record it."""
        return [str(image) for image in self.images]

    def pictures(self) -> list[Any]:
        """The images, opened: PIL images in RGB. Raises BadRowError where one can no longer be opened, or has grown."""
        limits = (Checks(max_pixels=size.height * size.width) for size in self.sizes)  # which the data's limit allowed
        return [pixels(image, self.where, checks)[0] for image, checks in zip(self.images, limits, strict=True)]
