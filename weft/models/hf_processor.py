"""transformers' internals (see hf.py) that convert images to model inputs: its processors, unchanged. For videos see
hf_video.py.

Used, checked on transformers 5.17 to 5.19:
- ProcessorMixin.{get_attributes, _get_arguments_from_pretrained, check_argument_for_proper_class, image_token,
  image_token_ids, replace_image_token(image_inputs, image_idx)}; its call with return_text_replacement_offsets=True
  (for each placeholder `replacement`, in order)
- models.auto.image_processing_auto.AutoImageProcessor (the public name wants torchvision in 5.17); AutoVideoProcessor,
  for families whose videos weft does not read
- of image processors .model_input_names, .to_dict, .get_number_of_image_patches(height, width) and .size:
  shortest_edge and longest_edge are pixels of an image where model_input_names has image_grid_thw; longest_edge alone
  is a length
- models.auto.processing_auto.PROCESSOR_MAPPING_NAMES; .configuration_auto.model_type_to_module_name; utils.cached_file

Video processors need torchvision, whose registry build is for CUDA and fails with a CPU build of torch. Without
torchvision, processors are created without a video processor, and transformers' PIL-backed classes process images.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import UserError, first_line, runs_own_code
from weft.files import read_object
from weft.models.clips import Clip, Shape
from weft.models.hf_video import (
    VIDEO_PROCESSORS,
    Frames,
    settings_file,
    settings_of,
    video_inputs,
    video_settings,
    video_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Size = tuple[int, int]  # height, width

# Outputs of a processor that are not inputs of the vision tower.
_OF_TEXT = frozenset(
    ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets", "position_ids")
)
_CACHED_LAYOUTS = 1 << 14  # cached layouts
_TRIED = ((40, 60), (100, 17), (230, 300))


@dataclass(frozen=True, slots=True)
class Layout:
    """The images and videos of a document, as text and as input of the vision tower. texts: for each, the text that
    replaces its placeholder. patches: total positions that the tower forwards. pairs: pairs of positions of the same
    image or frame."""

    texts: tuple[str, ...]
    patches: int
    pairs: int


class ImageProcessor:
    """A model's processor. kind: name of its class. placeholder, video_placeholder: text that the chat template writes
    for an image, and for a video; "" if weft does not read the model's videos. marks: texts that represent images and
    videos; no other text may contain them. template: the processor's chat template, if any."""

    def __init__(self, processor: Any, patch_size: int, frames: Frames | None = None) -> None:
        """frames: settings for videos; None if weft does not read the model's videos."""
        self._processor, self._patch_size, self._frames = processor, patch_size, frames
        self.kind = type(processor).__name__
        self.placeholder: str = processor.image_token
        self.video_placeholder: str = "" if frames is None else processor.video_token
        self.template: str | None = processor.chat_template if isinstance(processor.chat_template, str) else None
        ids = [token for token in processor.image_token_ids if token is not None]
        tokens = processor.tokenizer.convert_ids_to_tokens(ids)
        named = (self.placeholder, getattr(processor, "video_token", None), *tokens)
        self.marks = tuple(dict.fromkeys(text for text in named if text))
        self.layout = lru_cache(_CACHED_LAYOUTS)(self._layout)
        self._counts = False
        if self._images_are_independent and hasattr(processor.image_processor, "get_number_of_image_patches"):
            self._counts = all(self._counted(size) == self._processed((size,)) for size in _TRIED)

    @property
    def settings(self) -> str:
        """All settings that affect texts and inputs, as JSON."""
        attributes = {
            name: value for name, value in vars(self._processor).items() if isinstance(value, int | str | float)
        }
        images = self._processor.image_processor
        settings = [
            self.kind,
            type(images).__name__,
            attributes,
            images.to_dict(),
            self._patch_size,
            settings_of(self._frames),
        ]
        return json.dumps(settings, sort_keys=True, default=str)

    def files(self, path: str) -> dict[str, str]:
        """File name -> text of the processor's files at `path`, with this processor's pixel limits, so that a server
        processes images and frames as in training."""
        size = {name: value for name, value in dict(self._processor.image_processor.size).items() if value is not None}
        files = dict[str, dict[str, Any]]()
        for name in ("preprocessor_config.json", "processor_config.json"):
            content = _read_file(path, name)
            settings = content if name.startswith("pre") else content.get("image_processor")
            if not isinstance(settings, dict) or not settings:
                continue
            settings["size"] = size
            for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
                if key in settings:
                    settings[key] = size[edge]
            files[name] = content
        if self._frames is not None:  # without separate settings, a video processor uses the image processor's
            settings = self._frames.file(settings_file(lambda name: _read_file(path, name)))
            nested = files.get("processor_config.json", {})
            target = nested if "video_processor" in nested else files
            target["video_processor" if target is nested else "video_preprocessor_config.json"] = settings
        return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}

    def _layout(self, shapes: tuple[Shape, ...]) -> Layout:
        """The layout of images and videos of these shapes. Raises the processor's error for a size that it refuses."""
        if self._images_are_independent and len(shapes) > 1:
            layouts = [self.layout((shape,)) for shape in shapes]
            patches, pairs = sum(layout.patches for layout in layouts), sum(layout.pairs for layout in layouts)
            return Layout(tuple(text for layout in layouts for text in layout.texts), patches, pairs)
        if len(shapes) == 1 and len(shapes[0]) == 3:
            return self._of_video(*shapes[0])
        sizes = tuple((shape[0], shape[1]) for shape in shapes)
        return self._counted(sizes[0]) if self._counts else self._processed(sizes)

    def _of_video(self, height: int, width: int, clip: Clip) -> Layout:
        assert self._frames is not None
        grid = self._frames.grid(height, width, clip.num_frames)
        time, patches_per_frame = grid[0], grid[1] * grid[2]
        return Layout((video_text(self._processor, grid, clip),), time * patches_per_frame, time * patches_per_frame**2)

    def resizing(self, shape: Shape) -> Callable[[Any], Any]:
        """A function that resizes a frame (PIL image) of a video of this shape to the size that the model sees."""
        assert self._frames is not None and len(shape) == 3
        return self._frames.resizing(shape[0], shape[1], shape[2].num_frames)

    def _counted(self, size: Size) -> Layout:
        """The layout of an image, from the processor's count of patches: tens of milliseconds faster than `_processed`.
        Used only if both agree on the sizes of _TRIED."""
        patches = int(self._processor.image_processor.get_number_of_image_patches(*size))
        grid = {"image_grid_thw": np.array([[1, 1, patches]])}
        return Layout((str(self._processor.replace_image_token(grid, 0)),), patches, patches**2)

    def _processed(self, sizes: tuple[Size, ...]) -> Layout:
        """The layout of images of these sizes, from processing blank images."""
        from PIL import Image

        blank = [Image.new("RGB", (width, height)) for height, width in sizes]
        options = {"do_rescale": False, "do_normalize": False}  # neither changes a shape
        out = self._call(blank, return_text_replacement_offsets=True, return_tensors="pt", **options)
        texts = tuple(item["replacement"] for item in out["text_replacement_offsets"][0])
        assert len(texts) == len(sizes)
        patches_per_image = self._patches_per_image(out)
        return Layout(texts, sum(patches_per_image), sum(patches**2 for patches in patches_per_image))

    @property
    def _images_are_independent(self) -> bool:
        """Whether each image becomes separate rows of patches, independent of the document's other images."""
        return "image_grid_thw" in self._processor.image_processor.model_input_names

    def inputs(
        self, images: Sequence[Any], videos: Sequence[tuple[Sequence[Any], Clip]] = ()
    ) -> tuple[dict[str, Any], int]:
        """(model inputs for a document's images and videos in order, tensors by name; their number of patches).

        images: PIL images. videos: for each, (resized frames, their Clip).
        """
        out = self._call(images, return_tensors="pt") if images else {}
        import torch

        inputs = {name: value for name, value in out.items() if name not in _OF_TEXT}
        patches = sum(self._patches_per_image(inputs)) if images else 0
        inputs_per_video = [
            video_inputs(self._processor, self._frames, *video) for video in videos if self._frames is not None
        ]
        for name in inputs_per_video[0] if inputs_per_video else ():
            inputs[name] = torch.cat([video_input[name] for video_input in inputs_per_video])
        return inputs, patches + sum(
            int(grid) for video_input in inputs_per_video for grid in video_input["video_grid_thw"].prod(1)
        )

    def prompt_inputs(self, text: str, images: Sequence[Any]) -> Any:
        """All model inputs for a rendered prompt with one placeholder per image, as a BatchFeature."""
        return self._processor(text=[text], images=list(images), add_special_tokens=False, return_tensors="pt")

    def _call(self, images: Sequence[Any], **options: Any) -> Any:
        text = " ".join([self.placeholder] * len(images))
        return self._processor(text=[text], images=list(images), **options)

    def _patches_per_image(self, out: Mapping[str, Any]) -> list[int]:
        """Number of patches that the tower forwards for each image: from grids, or from tensors [..., channels, height,
        width], of which a large image may have several."""
        if "image_grid_thw" in out:
            return [height * width for time, height, width in out["image_grid_thw"].tolist() for _ in range(time)]
        shape = tuple(out["pixel_values"].shape)
        if len(shape) < 4:  # rows of patches
            return [shape[-2]] * math.prod(shape[:-2])
        patches = (shape[-2] // self._patch_size) * (shape[-1] // self._patch_size)
        return [patches] * math.prod(shape[:-3])


def is_vision_config(config: Any) -> bool:
    """Whether a model's config has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def load_processor(
    path: str,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    pixels: Mapping[str, int],
    video: Mapping[str, float] | None = None,
) -> ImageProcessor:
    """The processor of the model at `path`. config: the model's. pixels: `min` and `max`, as data.image_pixels. video:
    as data.video. Raises UserError if the model has no working processor, or the processor has no such limits."""
    check_torchvision()
    frames = None
    try:
        family = _family(path, config)
        frames = video_settings(family.__name__, settings_file(lambda name: _read_file(path, name)))
        processor = _class_of(path, family, tokenizer).from_pretrained(path, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # of any type: files of others, classes of many families
        if refusal := runs_own_code(path, error):
            raise refusal from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"model.path: the image processor of {path} cannot be created: {reason.rstrip('.')}. It needs "
            "preprocessor_config.json (and processor_config.json, if the model has one) next to config.json."
        ) from error
    if getattr(processor, "image_token", None) is None:
        raise UserError(
            f"model.path: the processor of {path} ({type(processor).__name__}) has no placeholder for images."
        )
    _set_pixels(processor, pixels)
    if video and frames is None:
        raise UserError(
            f"data.video: weft does not support the video input of {type(processor).__name__} of model.path "
            f"(supported: {', '.join(VIDEO_PROCESSORS)}). Remove this key."
        )
    if frames is not None:
        frames = processor.video_processor = frames.limited(video or {})
    patch = getattr(config.vision_config, "patch_size", None) or 14
    return ImageProcessor(processor, int(patch[0] if isinstance(patch, list | tuple) else patch), frames)


def _class_of(path: str, family: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The family's processor class, changed to use this tokenizer, and to have a video processor only if it needs one
    and torchvision is installed."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    videos = find_spec("torchvision") is not None and family.__name__ not in VIDEO_PROCESSORS

    class Processor(family):
        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            loaders = {
                "tokenizer": lambda: tokenizer,
                "image_processor": lambda: AutoImageProcessor.from_pretrained(path, trust_remote_code=False),
                "video_processor": lambda: _videos(path) if videos else None,
            }
            return [loaders[name]() for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor" or argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    Processor.__name__ = family.__name__
    return Processor


def _videos(path: str) -> Any:
    from transformers import AutoVideoProcessor

    return AutoVideoProcessor.from_pretrained(path, trust_remote_code=False)


def _family(path: str, config: Any) -> Any:
    """The processor class named in the model's files, else by its model_type, as AutoProcessor finds it."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    class_name = _named_class(path) or PROCESSOR_MAPPING_NAMES.get(config.model_type)
    owners = [model for model, name in PROCESSOR_MAPPING_NAMES.items() if name == class_name and _has(model)]
    if not owners:
        raise UserError(
            f"model.path: transformers has no processor of images {class_name or f'for {config.model_type}'} ({path})."
        )
    module_name = model_type_to_module_name(owners[0])
    module = f"transformers.models.{module_name}"
    with _without_torchvision(module, module_name):
        return getattr(importlib.import_module(f"{module}.processing_{module_name}"), str(class_name))


def _named_class(path: str) -> str | None:
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if class_name := _read_file(path, name).get("processor_class"):
            return str(class_name)
    return None


def _read_file(path: str, name: str) -> dict[str, Any]:
    """A JSON file of a model; {} if it is missing."""
    from transformers.utils import cached_file

    file = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return {} if file is None else read_object(Path(file), "a config of a model")


@cache
def _has(model: str) -> bool:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model)
    try:
        return find_spec(f"transformers.models.{name}.processing_{name}") is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def _without_torchvision(module: str, name: str) -> Iterator[None]:
    """A context in which imports of a family's torchvision-backed image processor return the PIL-backed class, which
    has the same functions. Some processors (pixtral) import it."""
    torchvision_module, pil_module = f"{module}.image_processing_{name}", f"{module}.image_processing_pil_{name}"
    if find_spec("torchvision") is not None or torchvision_module in sys.modules or find_spec(pil_module) is None:
        yield
        return
    sys.modules[torchvision_module] = importlib.import_module(pil_module)
    try:
        yield
    finally:
        del sys.modules[torchvision_module]


@cache
def check_torchvision() -> None:
    """Raises UserError if the installed torchvision does not work with this torch."""
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # torchvision of another build raises RuntimeError, OSError or ImportError
        raise UserError(
            "model.path: the installed torchvision, which processes images, does not work with this torch "
            f"({first_line(error)}). Install the build for this torch, or uninstall torchvision to use Pillow."
        ) from error


def _set_pixels(processor: Any, pixels: Mapping[str, int]) -> None:
    """Set the image processor's limits from data.image_pixels. Raises UserError if it has no such limits."""
    if not pixels:
        return
    images = processor.image_processor
    size = {name: value for name, value in dict(images.size).items() if value is not None}
    if "image_grid_thw" in images.model_input_names and {"shortest_edge", "longest_edge"} <= set(size):
        limits = {"shortest_edge": pixels.get("min"), "longest_edge": pixels.get("max")}
    elif set(size) == {"longest_edge"} and "min" not in pixels:
        limits = {"longest_edge": math.isqrt(pixels["max"])}
    else:
        named = ", ".join(f"{name}: {value}" for name, value in size.items())
        missing = "min" if set(size) == {"longest_edge"} else "such limits"
        raise UserError(
            f"data.image_pixels: {type(images).__name__} of model.path has no {missing}: it makes images of {named}. "
            f"Remove data.image_pixels{'.min' if missing == 'min' else ''}."
        )
    size |= {name: value for name, value in limits.items() if value is not None}
    if size.get("shortest_edge", 0) > size["longest_edge"]:
        raise UserError(
            f"data.image_pixels: min ({size['shortest_edge']:,}) is above max ({size['longest_edge']:,}) of "
            f"{type(images).__name__}. Set both."
        )
    images.size = type(images.size)(**size) if not isinstance(images.size, dict) else size
