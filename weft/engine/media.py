"""What a document shows besides its tokens: the inputs of the vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Media:
    """The images (and videos) of one document, as the model takes them.

    inputs: arguments of the model's forward (pixel_values, image_grid_thw, image_sizes, pixel_attention_mask, ...), in
    the order of the placeholders among the document's tokens, as the model's processor gives them. patches: positions
    that the vision tower forwards for them: rows of pixel_values where these are patches, else images x height x width
    in patches. Equal to DocumentMeta.patches of the document.
    """

    inputs: dict[str, Tensor]
    patches: int
