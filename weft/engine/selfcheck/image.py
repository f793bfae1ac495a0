"""Checks a small copy before a model accepts images or videos. Documents with images in one row must have the logits of
HuggingFace's eager forward of each document alone, and an image or a video may only change the logits of its own
document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.engine.batch.media import joined
from weft.errors import first_line
from weft.models import hf
from weft.models.train_module import TrainModule
from weft.models.vision import Vision, count_features, find_vision
from weft.ops.attention_call import Bounds

Sample = tuple[Tensor, dict[str, Tensor]]  # token ids, forward arguments of its images
MediaKind = tuple[Literal["image", "video"], int]  # (kind, how many times as large as the smallest)
# Four documents: two with images or videos, each followed by one of text.
IMAGES: tuple[tuple[MediaKind, ...], ...] = ((("image", 1), ("image", 3)), (), (("image", 2),), ())
VIDEOS: tuple[tuple[MediaKind, ...], ...] = ((("image", 2), ("video", 1), ("video", 2)), (), (("video", 3),), ())


def check_images(module: TrainModule, reference: PreTrainedModel, tolerance: float) -> str:
    """Why this model cannot accept images; empty if it can."""
    vision = find_vision(module.base, module.facts)
    if vision is None:
        return "weft does not know its vision tower"
    return _check(module, reference, vision, IMAGES, tolerance)


def check_videos(module: TrainModule, reference: PreTrainedModel, tolerance: float) -> str:
    """Why this model, which accepts images, cannot accept videos; empty if it can."""
    vision = find_vision(module.base, module.facts)
    if vision is None or vision.clip is None:
        return "weft does not know the inputs of its videos"
    return _check(module, reference, vision, VIDEOS, tolerance)


def _check(
    module: TrainModule,
    reference: PreTrainedModel,
    vision: Vision,
    kinds: Sequence[Sequence[MediaKind]],
    tolerance: float,
) -> str:
    kind = "videos" if kinds is VIDEOS else "images"
    try:
        samples = documents_with(kinds, vision, module.base, len(module.head.weight))
        expected = [_reference_logits(reference, vision, *sample) for sample in samples]
        row_logits = _row(module, vision, samples)
        moved = [
            _row(module, vision, [*samples[:index], _changed(samples[index]), *samples[index + 1 :]])
            for index in (0, 2)
        ]
    except Exception as error:  # any exception type: the family's code ran on such a row
        return f"its code does not run on a row of documents with {kind} ({first_line(error)})"
    scale = max(float(logits.abs().max()) for logits in expected)
    worst = max(_distance(a, b) for a, b in zip(row_logits, expected, strict=True)) / scale
    if not worst <= tolerance:
        return f"logits of documents with {kind} differ from HuggingFace's by {worst:.1e} of the largest"
    for index, row in zip((0, 2), moved, strict=True):
        distances = [_distance(a, b) / scale for a, b in zip(row, row_logits, strict=True)]
        if not distances[index] > tolerance:
            return f"changing {kind} does not change their document"
        if max(distances[:index] + distances[index + 1 :]) > tolerance:
            return f"{kind} change the logits of other documents of the row"
    return ""


@torch.no_grad()
def documents_with(kinds: Sequence[Sequence[MediaKind]], vision: Vision, base: Any, vocabulary: int) -> list[Sample]:
    """Documents with these images and videos, text between and around them."""
    generator = torch.Generator().manual_seed(3)
    samples: list[Sample] = []
    for kinds_seen in kinds:
        ids, media = _words(generator, vocabulary, vision, 3), list[dict[str, Tensor]]()
        for kind, times in kinds_seen:
            inputs = vision.sample(generator, times) if kind == "image" else vision.sample_video(generator, times)
            for placeholder, count in placeholders(vision, base, inputs):
                ids += [placeholder] * count + _words(generator, vocabulary, vision, 5)
            media.append(inputs)
        ids += _words(generator, vocabulary, vision, 0 if kinds_seen else 20)
        samples.append((torch.tensor(ids), joined(media)))
    return samples


def placeholders(vision: Vision, base: Any, inputs: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """(token id, number) of each run of placeholders of an image or video."""
    count = count_features(base, inputs)
    if "video_grid_thw" not in inputs:
        return [(vision.image, count)]
    assert vision.video is not None
    return [(vision.video, length) for length in vision.runs(base, inputs, count)]


def _words(generator: torch.Generator, vocabulary: int, vision: Vision, count: int) -> list[int]:
    """Ids of text tokens, without placeholders."""
    ids = [i for i in range(1, vocabulary) if i not in (vision.image, vision.video)]
    return [ids[n] for n in torch.randint(len(ids), (count,), generator=generator).tolist()]


def _changed(sample: Sample) -> Sample:
    ids, inputs = sample
    return ids, {name: value + 1 if value.is_floating_point() else value for name, value in inputs.items()}


@torch.no_grad()
def _reference_logits(model: PreTrainedModel, vision: Vision, ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    types = vision.token_types(ids)[None]
    named = {n: types for n in ("mm_token_type_ids", "token_type_ids") if inputs and hf.accepts_by_name(model, n)}
    logits: Tensor = model(input_ids=ids[None], use_cache=False, **inputs, **named).logits[0]
    return logits


@torch.no_grad()
def _row(module: TrainModule, vision: Vision, samples: Sequence[Sample]) -> list[Tensor]:
    """Logits of each document, from one packed row."""
    lengths = [len(ids) for ids, _ in samples]
    bounds, offset, last = Bounds(tuple(lengths)), 0, []
    positions = [_positions(module, vision, *sample) for sample in samples]
    for ids, _ in samples:
        last.append(offset + vision.last_seen(ids))
        offset += len(ids)
    if vision.both_ways:
        bounds.last_seen = torch.cat(last)
    hidden = module.hidden(
        torch.cat([ids for ids, _ in samples])[None], torch.cat(positions, -1)[..., None, :], bounds,
        joined([inputs for _, inputs in samples]),
    )  # fmt: skip
    head = module.head
    return list(head.transform(torch.nn.functional.linear(hidden[0], head.weight, head.bias)).split(lengths))


def _positions(module: TrainModule, vision: Vision, ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    special = vision.positions(module.base, ids, inputs) if inputs else None
    if special is not None:
        return special
    positions = torch.arange(len(ids))
    return positions.repeat(3, 1) if hasattr(module.base, "get_rope_index") else positions


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
