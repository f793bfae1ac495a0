"""transformers' internals (see hf.py) that convert the frames of a video to model inputs.

transformers' video processors import torchvision, whose registry build is for CUDA and fails with a CPU build of torch.
So this file reimplements two of them, from their settings, with Pillow and the model's image processor, which splits
frames into the same patches. Pillow resizes frames even if torchvision is installed.

Used, checked on transformers 5.19 and 5.23:
- of processors .replace_video_token(video_inputs, video_idx): it reads video_grid_thw and, of video_metadata, fps and
  frames_indices; of its .video_processor merge_size and temporal_patch_size. .video_token, .model_input_names
- models.qwen2_vl.image_processing_pil_qwen2_vl.smart_resize, which Qwen2VLVideoProcessor has, too
- of image processors of rows of patches: their options do_resize, image_mean, image_std, patch_size, merge_size and
  temporal_patch_size; a patch is [channels, temporal_patch_size copies, patch_size, patch_size]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from weft.errors import UserError
from weft.models.clips import Clip

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Frames:
    """A video processor's settings. limits_whole_video: pixel limits apply to all frames together, else to each frame.
    The other fields have transformers' names."""

    kind: str
    limits_whole_video: bool
    shortest_edge: int
    longest_edge: int
    patch_size: int
    merge_size: int = 2
    temporal_patch_size: int = 2
    image_mean: tuple[float, ...] = _CLIP_MEAN
    image_std: tuple[float, ...] = _CLIP_STD
    resample: int = 3
    model_input_names: ClassVar = ["pixel_values_videos", "video_grid_thw"]  # processors read it

    def size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """(height, width) of the frames that the model sees. Raises ValueError for a shape that its family refuses."""
        factor = self.patch_size * self.merge_size
        if self.limits_whole_video:
            return self._size_of_all(height, width, num_frames, factor)
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size: tuple[int, int] = smart_resize(height, width, factor, self.shortest_edge, self.longest_edge)
        return size

    def _size_of_all(self, height: int, width: int, num_frames: int, factor: int) -> tuple[int, int]:
        """`size` as Qwen3VLVideoProcessor computes it. factor: sides are multiples of it."""
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > 200 * min(height, width):
            raise ValueError(f"absolute aspect ratio must be smaller than 200, got {height} x {width}")
        sides, step = (height, width), self.temporal_patch_size
        pixels = round(num_frames / step) * step * math.prod(round(side / factor) * factor for side in sides)
        if pixels > self.longest_edge:
            beta = math.sqrt(num_frames * height * width / self.longest_edge)
            size = [max(factor, math.floor(side / beta / factor) * factor) for side in sides]
        elif pixels < self.shortest_edge:
            beta = math.sqrt(self.shortest_edge / (num_frames * height * width))
            size = [math.ceil(side * beta / factor) * factor for side in sides]
        else:
            size = [round(side / factor) * factor for side in sides]
        return size[0], size[1]

    def grid(self, height: int, width: int, num_frames: int) -> tuple[int, int, int]:
        """video_grid_thw of a video. The last frame is repeated to fill temporal_patch_size."""
        size = self.size(height, width, num_frames)
        return -(-num_frames // self.temporal_patch_size), size[0] // self.patch_size, size[1] // self.patch_size

    def resizing(self, height: int, width: int, num_frames: int) -> Callable[[Any], Any]:
        """A function that resizes a frame (PIL image) to the size that the model sees."""
        size = self.size(height, width, num_frames)
        return lambda picture: picture.resize((size[1], size[0]), self.resample)

    def limited(self, pixels: Mapping[str, float]) -> Frames:
        """The settings with data.video's limits min_pixels and max_pixels. Raises UserError if min is above max."""
        min_pixels = int(pixels.get("min_pixels", self.shortest_edge))
        max_pixels = int(pixels.get("max_pixels", self.longest_edge))
        if min_pixels > max_pixels:
            raise UserError(
                f"data.video: min_pixels ({min_pixels:,}) is above max_pixels ({max_pixels:,}) of {self.kind}. Set "
                "both."
            )
        return replace(self, shortest_edge=min_pixels, longest_edge=max_pixels)

    def file(self, model_settings: Mapping[str, Any]) -> dict[str, Any]:
        """Content of video_preprocessor_config.json with these settings. model_settings: from the model's files."""
        other_settings = {name: value for name, value in model_settings.items() if name not in _OF_IMAGES}
        settings = asdict(self)
        size = {name: settings.pop(name) for name in ("shortest_edge", "longest_edge")}
        return {**other_settings, **{n: settings[n] for n in _SHARED}, "size": size, "video_processor_type": self.kind}


_OF_IMAGES = ("image_processor_type", "min_pixels", "max_pixels", "size", "processor_class")
_SHARED = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "resample")

# Class of a model's processor -> defaults of its video processor.
_PER_FRAME = Frames("Qwen2VLVideoProcessor", False, 128 * 28 * 28, 768 * 28 * 28, 14)
_OF_ALL = Frames(
    "Qwen3VLVideoProcessor", True, 128 * 32 * 32, 768 * 32 * 32, 16, image_mean=(0.5,) * 3, image_std=(0.5,) * 3
)
VIDEO_PROCESSORS = {"Qwen2VLProcessor": _PER_FRAME, "Qwen2_5_VLProcessor": _PER_FRAME, "Qwen3VLProcessor": _OF_ALL}


def settings_file(read: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The settings of a model's video processor, from the first file in transformers' order of preference. read: file
    name -> its JSON, {} if it is missing."""
    nested = read("processor_config.json").get("video_processor")
    settings = nested or read("video_preprocessor_config.json") or read("preprocessor_config.json")
    return settings if isinstance(settings, dict) else {}


def video_settings(processor: str, settings: Mapping[str, Any]) -> Frames | None:
    """The video processor's settings for a processor of this class; None if weft does not support the class or these
    settings. settings: from settings_file."""
    default = VIDEO_PROCESSORS.get(processor)
    if default is None:
        return None
    kind = settings.get("video_processor_type", default.kind)
    if kind != default.kind or settings.get("cap_pixels_per_frame"):
        return None
    size = {**asdict(default), **(settings.get("size") or {})}
    edges = (settings.get("min_pixels") or size["shortest_edge"], settings.get("max_pixels") or size["longest_edge"])
    overrides = {name: settings[name] for name in _SHARED if settings.get(name) is not None}
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in overrides.items()
    }
    return replace(default, shortest_edge=int(edges[0]), longest_edge=int(edges[1]), **fields)


def video_text(processor: Any, grid: tuple[int, int, int], clip: Clip) -> str:
    """The text that replaces the placeholder of a video."""
    times = SimpleNamespace(fps=clip.fps, frames_indices=clip.indices)
    inputs = {"video_grid_thw": np.array([grid]), "video_metadata": [times]}
    return str(processor.replace_video_token(inputs, 0))


def video_inputs(processor: Any, frames: Frames, pictures: Sequence[Any], clip: Clip) -> dict[str, Any]:
    """The model's inputs for a video. pictures: its frames, resized."""
    import torch

    width, height = pictures[0].size
    step, sides = frames.temporal_patch_size, (height // frames.patch_size, width // frames.patch_size)
    time = -(-len(pictures) // step)
    options = {name: getattr(frames, name) for name in _SHARED if name != "resample"}
    images = [*pictures, *[pictures[-1]] * (time * step - len(pictures))]
    pixel_values = processor.image_processor(images, do_resize=False, return_tensors="pt", **options)["pixel_values"]
    # The image processor repeats each frame `step` times; a video's patch has `step` different frames instead.
    rows, pixels = math.prod(sides), frames.patch_size**2
    single = pixel_values.view(time, step, rows, -1, step, pixels)[..., 0, :]
    patches = single.permute(0, 2, 3, 1, 4).reshape(time * rows, -1)
    inputs = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[time, *sides]])}
    if "second_per_grid_ts" in processor.model_input_names:
        inputs["second_per_grid_ts"] = torch.tensor([step / clip.sampled_fps])
    return inputs


def settings_of(frames: Frames | None) -> str:
    """The settings as JSON; "" for None."""
    return "" if frames is None else json.dumps(asdict(frames), sort_keys=True)
