"""The vision side of a model: its tower, its placeholder tokens, and positions that depend on images and videos.

T tokens of a document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from weft.models import hf
from weft.models.facts import Facts
from weft.ops.communicator import FeatureExchange

# Families whose image tokens attend to each other in both directions, by the model_type of the full config.
BOTH_WAYS = ("gemma3",)
_PROJECTOR = ("projector", "connector", "merger", "aligner", "embed_vision")


@dataclass(frozen=True)
class Vision:
    """The vision part of a model.

    image, video: token ids of placeholders. parts: names of the modules that are neither decoder nor head. smallest:
    forward arguments of the smallest image. patch: side of a patch in pixels. both_ways: tokens of an image also attend
    to later tokens of it. clip: forward arguments of the shortest video; None if weft does not support the model's
    videos. layers: number of first decoder layers after which features of the tower are added to hidden states
    (DeepStack: Meng et al. 2024, arXiv:2406.04334).
    """

    image: int
    video: int | None
    parts: tuple[str, ...]
    smallest: Mapping[str, Tensor]
    patch: int
    both_ways: bool
    clip: Mapping[str, Tensor] | None = None
    layers: int = 0

    @property
    def merge(self) -> int:
        """Patches on each side of a feature; for towers with grids of patches only."""
        return int(self.smallest["image_grid_thw"][0, 1])

    @property
    def has_grids(self) -> bool:
        """Whether the tower reads grids of patches, and computes each image, and each frame of a video, separately."""
        return "image_grid_thw" in self.smallest

    def token_types(self, tokens_T: Tensor) -> Tensor:
        """[T]: 1 for placeholders of images, 2 of videos, else 0."""
        types = (tokens_T == self.image).int()
        return types if self.video is None else types + 2 * (tokens_T == self.video).int()

    def positions(self, base: nn.Module, tokens_T: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """[3, T]: positions by the family's rule (M-RoPE); None if images do not change positions. inputs: forward
        arguments of the document's images and videos."""
        if not hasattr(base, "get_rope_index"):
            return None
        arguments = {name: value for name, value in inputs.items() if hf.accepts(base, name) and "pixel" not in name}
        types = self.token_types(tokens_T)[None]
        rule: Any = base.get_rope_index
        positions: Tensor = rule(tokens_T[None], mm_token_type_ids=types, **arguments)[0]
        return positions[-3:, 0]

    def runs(self, base: nn.Module, inputs: Mapping[str, Tensor], count: int) -> list[int]:
        """Lengths of the runs of placeholders of one video: one run, or one per frame, whichever the family's position
        rule accepts. count: number of placeholders."""
        assert self.video is not None
        try:
            self.positions(base, torch.full((count,), self.video), inputs)
        except RuntimeError:  # it expects another number of placeholders side by side
            frames = int(inputs["video_grid_thw"][0, 0])
            return [count // frames] * frames
        return [count]

    def patches(self, inputs: Mapping[str, Tensor]) -> list[int]:
        """Number of positions that the tower forwards for each image, and each frame, of these forward arguments."""
        grids = [inputs[name].tolist() for name in ("image_grid_thw", "video_grid_thw") if name in inputs]
        if grids:
            return [height * width for grid in grids for time, height, width in grid for _ in range(time)]
        shape = inputs["pixel_values"].shape
        return [shape[-2] * shape[-1] // self.patch**2] * math.prod(shape[:-3])

    def sample(self, generator: torch.Generator, wide: int = 1) -> dict[str, Tensor]:
        """Forward arguments of an image of noise, `wide` times as wide as the smallest if the tower takes grids."""
        shapes = {name: value.shape for name, value in self.smallest.items()}
        if self.has_grids:
            merge, width = self.merge, shapes["pixel_values"][1]
            return {
                "pixel_values": torch.randn(2 * wide * merge**2, width, generator=generator),
                "image_grid_thw": torch.tensor([[1, 2 * merge, wide * merge]]),
            }
        return {**self.smallest, "pixel_values": torch.randn(shapes["pixel_values"], generator=generator)}

    def sample_video(self, generator: torch.Generator, long: int = 1) -> dict[str, Tensor]:
        """Forward arguments of a video of noise, `long` times as long as the shortest."""
        assert self.clip is not None
        time, height, width = self.clip["video_grid_thw"][0].tolist()
        patches, wide = self.clip["pixel_values_videos"].shape
        return {
            **self.clip,
            "pixel_values_videos": torch.randn(long * patches, wide, generator=generator),
            "video_grid_thw": torch.tensor([[long * time, height, width]]),
        }

    def last_seen(self, tokens_T: Tensor) -> Tensor:
        """[T]: index of the last token that each token sees: itself, or its image's last token."""
        ends, start = [], 0
        for kind, run in groupby(self.token_types(tokens_T).tolist()):
            count = len(list(run))
            ends += [start + count - 1] * count if kind else list(range(start, start + count))
            start += count
        return torch.tensor(ends, dtype=torch.int32)


def find_vision(base: nn.Module, facts: Facts) -> Vision | None:
    """The model's Vision; None if the model reads no images, or weft does not support the inputs of its tower."""
    config: Any = base.config
    if getattr(config, "vision_config", None) is None or not hf.accepts_by_name(base, "pixel_values"):
        return None
    image = next((v for n in ("image_token_id", "image_token_index") if (v := getattr(config, n, None))), None)
    patch = _first(getattr(config.vision_config, "patch_size", None))
    smallest = None if patch is None else _smallest(config, base, patch)
    if image is None or patch is None or smallest is None or not hasattr(base, "get_image_features"):
        return None
    video = getattr(config, "video_token_id", None)
    clip = None if video is None else _clip(base, smallest)
    both_ways, deep = config.model_type in BOTH_WAYS, getattr(config.vision_config, "deepstack_visual_indexes", None)
    return Vision(image, video, vision_parts(base, facts), smallest, patch, both_ways, clip, len(deep or ()))


def vision_parts(base: nn.Module, facts: Facts) -> tuple[str, ...]:
    """Names, relative to the root, of the base's children that do not contain the decoder; () without a tower."""
    if getattr(base.config, "vision_config", None) is None:
        return ()
    names = (f"{facts.base}.{name}" for name, _ in base.named_children())
    return tuple(name for name in names if not f"{facts.decoder}.".startswith(f"{name}."))


def projector_parts(base: nn.Module, facts: Facts) -> tuple[str, ...]:
    """Names of the modules between the vision tower and the decoder."""
    names: list[str] = []
    for name, _ in _inside(base, facts):
        last = name.rpartition(".")[2]
        if any(word in last for word in _PROJECTOR) and not _within(name, names):
            names.append(name)
    return tuple(names)


def tower_layers(base: nn.Module, facts: Facts) -> list[tuple[str, nn.Module]]:
    """(name, module) of the layers of the vision tower, in order."""
    layers: dict[str, nn.Module] = {}
    for name, child in _inside(base, facts):
        if hf.recomputes(child) and not _within(name, layers):
            layers[name] = child
    return list(layers.items())


def _inside(base: nn.Module, facts: Facts) -> Iterator[tuple[str, nn.Module]]:
    for part in vision_parts(base, facts):
        yield from base.get_submodule(part.removeprefix(f"{facts.base}.")).named_modules(prefix=part)


def _within(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in outer)


def count_features(base: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """The number of placeholders that images, or videos, with these forward arguments need."""
    model: Any = base
    if "video_grid_thw" in inputs:
        pixels, grids = inputs["pixel_values_videos"], inputs["video_grid_thw"]
        features: Any = model.get_video_features(pixels, grids, return_dict=True).pooler_output
    else:
        features = model.get_image_features(**inputs, return_dict=True).pooler_output
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _smallest(config: Any, base: nn.Module, patch: int) -> dict[str, Tensor] | None:
    """Forward arguments of one grey image of the smallest size that the tower takes; None if weft does not know it."""
    vision = config.vision_config
    if hf.accepts_by_name(base, "image_grid_thw"):
        merge = getattr(vision, "spatial_merge_size", None)
        if merge is None:
            return None
        channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        frames = getattr(vision, "temporal_patch_size", 1)  # ernie4_5_vl_moe merges frames behind the tower
        width = channels * frames * patch * patch
        return {
            "pixel_values": torch.full((merge * merge, width), 0.5),
            "image_grid_thw": torch.tensor([[1, merge, merge]]),
        }
    if vision.model_type == "pixtral":  # any size; two tokens, because its code squeezes a dimension of one
        width = patch * getattr(config, "spatial_merge_size", 1)
        height = 2 * width
        return {"pixel_values": torch.full((1, 3, height, width), 0.5), "image_sizes": torch.tensor([[height, width]])}
    size = _first(getattr(vision, "image_size", None))
    if size is None:
        return None
    if tilings := getattr(config, "image_grid_pinpoints", None):  # the model reads only the tiles that an image needs
        tiles = 1 + max(height // size * (width // size) for height, width in tilings)
        return {"pixel_values": torch.full((1, tiles, 3, size, size), 0.5), "image_sizes": torch.tensor([[size, size]])}
    batch = (1, 1) if hf.accepts_by_name(base, "pixel_attention_mask") else (1,)
    return {"pixel_values": torch.full((*batch, 3, size, size), 0.5)}


def _clip(base: nn.Module, smallest: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Forward arguments of a video of two frames (as the tower counts them), each twice as wide as the smallest image;
    None if the model takes no grids of frames."""
    named = all(hf.accepts_by_name(base, name) for name in ("pixel_values_videos", "video_grid_thw"))
    if not named or "image_grid_thw" not in smallest or not hasattr(base, "get_video_features"):
        return None
    (_, height, width), pixels = smallest["image_grid_thw"][0].tolist(), smallest["pixel_values"]
    seconds = {"second_per_grid_ts": torch.tensor([0.75])} if hf.accepts_by_name(base, "second_per_grid_ts") else {}
    return {
        "pixel_values_videos": pixels.repeat(4, 1),
        "video_grid_thw": torch.tensor([[2, height, 2 * width]]),
        **seconds,
    }


def _first(size: Any) -> int | None:
    """The first of a (height, width), or the number itself; None for anything else."""
    value = size[0] if isinstance(size, list | tuple) else size
    return value if isinstance(value, int) else None


def vision_context(
    base: nn.Module, inputs: Mapping[str, Any], placeholder: bool, exchange: FeatureExchange | None
) -> AbstractContextManager[None]:
    """The context in which a row's images and videos go through the tower. inputs: as Row.media;
    placeholder, exchange: as in Row."""
    if exchange is not None:
        return send_features(base, exchange)
    return drop_features(base) if placeholder else run_tower_once(base, inputs)


@contextmanager
def drop_features(base: nn.Module) -> Iterator[None]:
    """Inside, the tower runs but its features are dropped, so that its gradients are zeros.

    Ranks without images run it on the smallest image, so that all ranks gather and reduce the same parameters.
    """
    of_class: Any = type(base).get_image_features

    def no_features(*args: Any, **kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda t: t[:0], of_class(base, *args, **kwargs))

    with _in_place_of(base, get_image_features=no_features):
        yield


@contextmanager
def run_tower_once(base: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the images and videos of a row go through the tower together, so that a rank with both gathers and
    reduces the tower's parameters as often as a rank with one of them."""
    if not {"pixel_values", "pixel_values_videos"} <= inputs.keys():
        yield
        return
    of_class: Any = type(base).get_image_features
    video_outputs: list[Any] = []

    def images(pixel_values: Tensor, image_grid_thw: Tensor, **kwargs: Any) -> Any:
        pixels = torch.cat([pixel_values, inputs["pixel_values_videos"].to(pixel_values)])
        out = of_class(base, pixels, torch.cat([image_grid_thw, inputs["video_grid_thw"]]), **kwargs)
        count = len(image_grid_thw)
        video_outputs.append(_changed(out, lambda parts: parts[count:]))
        return _changed(out, lambda parts: parts[:count])

    with _in_place_of(base, get_image_features=images, get_video_features=lambda *args, **kwargs: video_outputs.pop()):
        yield


@contextmanager
def send_features(base: nn.Module, exchange: FeatureExchange) -> Iterator[None]:
    """Inside, the tower's features are sent to the ranks that have their tokens. Its inputs must be the images, and
    frames of videos, that this rank computes."""
    of_class: Any = type(base).get_image_features
    video_outputs: list[Any] = []

    def images(*args: Any, **kwargs: Any) -> Any:
        out = _changed(of_class(base, *args, **kwargs), lambda parts: [exchange.run(torch.cat(list(parts)))])
        video_outputs.append(_changed(out, lambda parts: [parts[0][exchange.images :]]))
        return _changed(out, lambda parts: [parts[0][: exchange.images]])

    with _in_place_of(base, get_image_features=images, get_video_features=lambda *args, **kwargs: video_outputs.pop()):
        yield


@contextmanager
def _in_place_of(base: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Inside, `methods` replace the base's own methods of the same names."""
    for name, method in methods.items():
        object.__setattr__(base, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(base, name)


def _changed(out: Any, change: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Any:
    """A tower's output with `change` applied to its features. A field with features is a list of one tensor per image,
    or a list of such lists, one per layer. Other fields are omitted, because no code reads them."""

    def change_field(value: Any) -> Any:
        return (
            change(value) if all(isinstance(item, Tensor) for item in value) else [change_field(item) for item in value]
        )

    return type(out)(**{name: change_field(value) for name, value in out.items() if isinstance(value, list | tuple)})
