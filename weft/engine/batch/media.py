"""Images and videos of a document, as returned by the model's processor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Media:
    """The images and videos of one document.

    inputs: forward arguments of the model (pixel_values, image_grid_thw, ...), images and videos each in the order of
    their placeholders. patches: number of positions that the vision tower forwards. pairs: number of pairs of positions
    of the same image or frame.
    """

    inputs: dict[str, Tensor]
    patches: int
    pairs: int

    @property
    def has_videos(self) -> bool:
        return "pixel_values_videos" in self.inputs

    def digest(self) -> bytes:
        """A digest of these images: equal for equal inputs, in every process."""
        hashed = blake2b(digest_size=16)
        for name, value in sorted(self.inputs.items()):
            hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            hashed.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        return hashed.digest()

    @staticmethod
    def from_inputs(inputs: dict[str, Tensor], patches: Sequence[int]) -> Media:
        """patches: number of patches of each image and frame."""
        return Media(inputs, sum(patches), sum(count**2 for count in patches))


@dataclass(frozen=True, slots=True)
class ImageRoom:
    """The room for a document with images. tokens: number of tokens in the rows of all ranks that may share it.
    per_patch: number of tokens that need as much memory as a patch. refusal: why the model cannot be trained on images;
    empty if it can. ranks: number of ranks over which such a document may be split."""

    tokens: int
    per_patch: float
    refusal: str = ""
    ranks: int = 1

    def in_tokens(self, patches: int) -> int:
        """The number of tokens that need as much memory as this number of patches."""
        return math.ceil(self.per_patch * patches)

    @staticmethod
    def smallest(rooms: Sequence[ImageRoom]) -> ImageRoom:
        """The room of a document that must fit all of these models."""
        refusal = next((room.refusal for room in rooms if room.refusal), "")
        return ImageRoom(min(room.tokens for room in rooms), max(room.per_patch for room in rooms), refusal)


def joined(inputs_by_document: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The forward arguments of several documents, concatenated over their images.

    Images are the first dimension; the second, if the first is a batch of documents (SmolVLM's pixel_values
    [1, images, 3, H, W]), but not if images are cut into tiles (LLaVA-NeXT's [images, tiles, 3, H, W], with
    image_sizes). Smaller images are padded with zeros, at the right and below, to the largest, and fewer tiles to the
    most, as the processors do.
    """
    names = {name: None for inputs in inputs_by_document for name in inputs}
    tiled = "image_sizes" in names
    return {name: _joined([inputs[name] for inputs in inputs_by_document if name in inputs], tiled) for name in names}


def _joined(parts: Sequence[Tensor], tiled: bool) -> Tensor:
    if tiled and parts[0].ndim == 5:
        tiles = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0,) * 7 + (tiles - part.shape[1],)) for part in parts])
    images = 1 if parts[0].ndim == 5 or (parts[0].ndim == 4 and not parts[0].is_floating_point()) else 0
    if parts[0].ndim > 2:
        size = [max(part.shape[dim] for part in parts) for dim in (-2, -1)]
        parts = [F.pad(part, (0, size[1] - part.shape[-1], 0, size[0] - part.shape[-2])) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=images)
