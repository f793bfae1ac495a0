"""What a model has for images: its vision tower, its placeholders, and how its positions follow images.

T tokens of a document, V rows that a vision tower reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from weft.models import hf
from weft.models.facts import Facts

# Families whose image tokens attend to each other both ways, by the model_type of the whole config.
BOTH_WAYS = ("gemma3",)
_PROJECTOR = ("projector", "connector", "merger", "aligner", "embed_vision")


@dataclass(frozen=True)
class Vision:
    """The vision of one model.

    image, video: token ids of placeholders. parts: names of the modules that are neither decoder nor head. smallest:
    forward arguments of the smallest image. patch: pixels of a patch's side. both_ways: tokens of an image attend to
    each other, later ones too. layers: after so many of the first decoder layers, features of the tower are added to
    hidden states (DeepStack: Meng et al. 2024, arXiv:2406.04334).
    """

    image: int
    video: int | None
    parts: tuple[str, ...]
    smallest: Mapping[str, Tensor]
    patch: int
    both_ways: bool
    layers: int = 0

    def token_types(self, tokens_T: Tensor) -> Tensor:
        """[T]: 1 for placeholders of images, 2 of videos, else 0."""
        types = (tokens_T == self.image).int()
        return types if self.video is None else types + 2 * (tokens_T == self.video).int()

    def positions(self, base: nn.Module, tokens_T: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """[3, T] by the family's own rule (M-RoPE); None where images do not change positions."""
        if not hasattr(base, "get_rope_index"):
            return None
        known = {name: value for name, value in inputs.items() if hf.accepts(base, name) and "pixel" not in name}
        types = self.token_types(tokens_T)[None]
        rule: Any = base.get_rope_index
        positions: Tensor = rule(tokens_T[None], mm_token_type_ids=types, **known)[0]
        return positions[-3:, 0]

    def patches(self, inputs: Mapping[str, Tensor]) -> list[int]:
        """Of each image, the positions that the tower forwards for these arguments."""
        if "image_grid_thw" in inputs:
            return [height * width for time, height, width in inputs["image_grid_thw"].tolist() for _ in range(time)]
        shape = inputs["pixel_values"].shape
        return [shape[-2] * shape[-1] // self.patch**2] * math.prod(shape[:-3])

    def sample(self, generator: torch.Generator, wide: int = 1) -> dict[str, Tensor]:
        """Forward arguments of an image of noise, `wide` times as wide as the smallest, where the tower allows that."""
        shapes = {name: value.shape for name, value in self.smallest.items()}
        if "image_grid_thw" in shapes:
            merge, width = int(self.smallest["image_grid_thw"][0, 1]), shapes["pixel_values"][1]
            return {
                "pixel_values": torch.randn(2 * wide * merge**2, width, generator=generator),
                "image_grid_thw": torch.tensor([[1, 2 * merge, wide * merge]]),
            }
        return {**self.smallest, "pixel_values": torch.randn(shapes["pixel_values"], generator=generator)}

    def last_seen(self, tokens_T: Tensor) -> Tensor:
        """[T]: the last token that each token sees: itself, or the last of its image."""
        ends, at = [], 0
        for kind, run in groupby(self.token_types(tokens_T).tolist()):
            count = len(list(run))
            ends += [at + count - 1] * count if kind else list(range(at, at + count))
            at += count
        return torch.tensor(ends, dtype=torch.int32)


def find_vision(base: nn.Module, facts: Facts) -> Vision | None:
    """None where the model takes no images, or weft does not know what its tower reads."""
    config: Any = base.config
    if getattr(config, "vision_config", None) is None or not hf.accepts_by_name(base, "pixel_values"):
        return None
    image = next((v for n in ("image_token_id", "image_token_index") if (v := getattr(config, n, None))), None)
    patch = _first(getattr(config.vision_config, "patch_size", None))
    smallest = None if patch is None else _smallest(config, base, patch)
    if image is None or patch is None or smallest is None or not hasattr(base, "get_image_features"):
        return None
    video = getattr(config, "video_token_id", None)
    both_ways, deep = config.model_type in BOTH_WAYS, getattr(config.vision_config, "deepstack_visual_indexes", None)
    return Vision(image, video, vision_parts(base, facts), smallest, patch, both_ways, len(deep or ()))


def vision_parts(base: nn.Module, facts: Facts) -> tuple[str, ...]:
    """Names, in the root, of the base's own modules that are not on the way to the decoder."""
    if getattr(base.config, "vision_config", None) is None:
        return ()
    names = (f"{facts.base}.{name}" for name, _ in base.named_children())
    return tuple(name for name in names if not f"{facts.decoder}.".startswith(f"{name}."))


def projector_parts(base: nn.Module, facts: Facts) -> tuple[str, ...]:
    """Names of the modules between the vision tower and the decoder."""
    found: list[str] = []
    for name, _ in _inside(base, facts):
        last = name.rpartition(".")[2]
        if any(word in last for word in _PROJECTOR) and not _within(name, found):
            found.append(name)
    return tuple(found)


def blocks(base: nn.Module, facts: Facts) -> list[tuple[str, nn.Module]]:
    """(name, module) of the layers of the vision tower, in order."""
    found: dict[str, nn.Module] = {}
    for name, child in _inside(base, facts):
        if hf.recomputes(child) and not _within(name, found):
            found[name] = child
    return list(found.items())


def _inside(base: nn.Module, facts: Facts) -> Iterator[tuple[str, nn.Module]]:
    for part in vision_parts(base, facts):
        yield from base.get_submodule(part.removeprefix(f"{facts.base}.")).named_modules(prefix=part)


def _within(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{holder}.") for holder in outer)


def count_features(base: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """How many placeholders images with these forward arguments have."""
    found: Any = base.get_image_features(**inputs, return_dict=True).pooler_output
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _smallest(config: Any, base: nn.Module, patch: int) -> dict[str, Tensor] | None:
    """The arguments of one grey image, as small as the family's tower takes it."""
    vision = config.vision_config
    if hf.accepts_by_name(base, "image_grid_thw"):
        merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        width = channels * vision.temporal_patch_size * patch * patch
        return {
            "pixel_values": torch.full((merge * merge, width), 0.5),
            "image_grid_thw": torch.tensor([[1, merge, merge]]),
        }
    if vision.model_type == "pixtral":  # images of any size; two tokens, because its code loses a dimension of one
        width = patch * getattr(config, "spatial_merge_size", 1)
        height = 2 * width
        return {"pixel_values": torch.full((1, 3, height, width), 0.5), "image_sizes": torch.tensor([[height, width]])}
    size = _first(getattr(vision, "image_size", None))
    if size is None:
        return None
    batch = (1, 1) if hf.accepts_by_name(base, "pixel_attention_mask") else (1,)
    return {"pixel_values": torch.full((*batch, 3, size, size), 0.5)}


def _first(size: Any) -> int | None:
    """Of a height and a width, the height."""
    found = size[0] if isinstance(size, list | tuple) else size
    return found if isinstance(found, int) else None


@contextmanager
def without_features(base: nn.Module) -> Iterator[None]:
    """Inside, the tower runs, and none of what it computes is used: its gradients are zeros.

    Ranks without images run it on the smallest image, so that all ranks gather and reduce the same parameters.
    """
    of_class: Any = type(base).get_image_features

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda t: t[:0], of_class(base, *args, **kwargs))

    object.__setattr__(base, "get_image_features", nothing)
    try:
        yield
    finally:
        object.__delattr__(base, "get_image_features")
