"""The reference for documents with images and videos. It imports nothing of weft except plain references, on
purpose."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.verify.peft_reference import PeftReference
from weft.verify.reference import Reference

Images = Mapping[tuple[int, ...], Mapping[str, Tensor]]  # token ids of a document -> forward arguments of its images


class ImageReference(Reference):
    """Passes the images of documents to the model, like its processor.

    Images of a batch are concatenated in the order of its documents, and videos, too: for SmolVLM along the second
    dimension, for others, including LLaVA-NeXT with its tiles, along the first. Models that need token types get them
    from the placeholders.
    """

    def __init__(self, images: Images, *options: Any) -> None:
        """images: by the token ids of their documents. options: arguments of Reference."""
        super().__init__(*options)
        self.inputs_by_ids = images

    def images(self, ids: list[list[int]]) -> dict[str, Any]:
        images = [
            payload
            for ids_of_document in ids
            for prefix, payload in self.inputs_by_ids.items()
            if tuple(ids_of_document[: len(prefix)]) == prefix
        ]
        if not images:
            return {}
        arguments: dict[str, Any] = {
            name: torch.cat(
                [payload[name] for payload in images if name in payload], _images(value, ids_of_document)
            ).to(self.device)
            for ids_of_document in images
            for name, value in ids_of_document.items()
        }
        config: Any = self.plain.config
        named = inspect.signature(self.plain.forward).parameters
        tokens = torch.tensor(ids, device=self.device)
        types = (tokens == config.image_token_id).int()
        if getattr(config, "video_token_id", None) is not None:
            types += 2 * (tokens == config.video_token_id).int()
        return arguments | {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in named}


class PeftImageReference(ImageReference, PeftReference):
    """An ImageReference with the adapter of a folder. options: arguments of PeftReference."""


def _images(value: Tensor, inputs: Mapping[str, Tensor]) -> int:
    """The dimension along which images are concatenated."""
    return int(value.ndim == 5 and "image_sizes" not in inputs)
