"""Synthetic documents with images and videos of noise, for checks without user data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.engine.batch.media import joined
from weft.engine.engine import Engine
from weft.engine.selfcheck.image import placeholders
from weft.models.facts import position_limit
from weft.models.vision import Vision
from weft.verify.image_reference import Images
from weft.verify.observed import to_documents
from weft.verify.reference import Document, Reference


def steps_with_images(
    steps: Sequence[Sequence[Document]],
    vision: Vision,
    base: Any,
    seed: int = 0,
    bare: bool = True,
    videos: bool = False,
) -> tuple[list[list[Document]], Images]:
    """The steps, with none, one or two images in each document. bare: whether the last step has no images. videos: half
    of the documents with images have a video instead of the first image.

    base: a base model with weights, whose vision tower determines the number of placeholders of an image.
    """
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    words = text_ids(vision)
    out: list[list[Document]] = []
    images: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
    for number, step in enumerate(steps):
        out.append([])
        for index, (ids, mask) in enumerate(step):
            text = [words[0] if i in (vision.image, vision.video) else i for i in ids]
            count = 0 if (bare and number == len(steps) - 1) or len(ids) < 3 else (index + 1) % 3
            samples = [vision.sample(generator, source.randrange(1, 4)) for _ in range(count)]
            if samples and videos and index % 4 < 2:
                samples = [*samples[1:], vision.sample_video(generator, source.randrange(1, 3))]
            document = text, list(mask)
            for inputs in samples:
                document = _inserted(document, placeholders(vision, base, inputs), vision, source)
            if samples:
                images[tuple(document[0])] = joined(samples)
            out[-1].append(document)
    return out, images


def documents_behind(engine: Engine, base: Any, step: Sequence[Document]) -> tuple[list[Document], Images]:
    """(Short documents with an image, and a long document that mesh.cp can split so that short ones fit after its
    parts; images by the token ids of their documents). Both are empty if the engine splits no documents.

    The long document has images if such documents are split. It is the last one, and the short ones increase in length,
    because a row has another order: split documents first, and long ones before short ones. step: documents with text
    to use.
    """
    vision, images = engine.built.vision, dict[tuple[int, ...], dict[str, torch.Tensor]]()
    if engine.context is None or vision is None:
        return [], images
    source, generator = random.Random(1), torch.Generator().manual_seed(1)
    text = [i for ids, _ in step for i in ids if i not in (vision.image, vision.video)]

    def document(first: int, length: int, count: int) -> Document:
        document: Document = [text[(first + n) % len(text)] for n in range(length)], [1.0] * length
        inputs = [vision.sample(generator, 2) for _ in range(count)]
        for payload in inputs:
            document = _inserted(document, placeholders(vision, base, payload), vision, source)
        if inputs:
            images[tuple(document[0])] = joined(inputs)
        return document

    short = [document(9 * n, 4 + n, 1) for n in range(engine.context.size)]
    room = max(meta.room for meta in to_documents(engine, short, images)[1])
    long = document(5, 2 * room + 4, 3 if engine.planner.image_room.ranks > 1 else 0)
    limit = position_limit(engine.built.config.get_text_config())
    return ([], {}) if limit is not None and len(long[0]) > limit else ([*short, long], images)


def takes_images(engine: Engine) -> bool:
    """Whether the model is trained on images."""
    return engine.built.vision is not None and not engine.built.support.images


def text_ids(vision: Vision) -> list[int]:
    """Three token ids that are not placeholders of an image or a video."""
    return [i for i in (3, 5, 6, 7, 8) if i not in (vision.image, vision.video)][:3]


def _inserted(document: Document, runs: Sequence[tuple[int, int]], vision: Vision, source: random.Random) -> Document:
    """The document with the placeholders of another image or video after its present ones; there is text before,
    between and after them."""
    ids, mask = document
    for placeholder, count in runs:
        first = max((n + 1 for n, i in enumerate(ids) if i in (vision.image, vision.video)), default=0) + 1
        if first >= len(ids):  # text between two placeholders
            ids, mask = [*ids, *text_ids(vision)[1:]], [*mask, 1.0, 1.0]
        position = source.randrange(first, len(ids))
        ids, mask = (
            [*ids[:position], *[placeholder] * count, *ids[position:]],
            [*mask[:position], *[0.0] * count, *mask[position:]],
        )
    return ids, mask


def prompts_for(
    engine: Engine, path: str, prompts: Sequence[Sequence[list[int]]]
) -> tuple[list[list[list[int]]], Images]:
    """(The prompts of each step, with images if the model accepts them; the images by the ids of their prompts). Other
    arguments: see steps_for. Collective."""
    documents = [[(ids, [0.0] * len(ids)) for ids in step] for step in prompts]
    steps, images, _ = steps_for(engine, path, documents, videos=False)
    return [[ids for ids, _ in step] for step in steps], images


def without_placeholders(engine: Engine, ids: Sequence[int]) -> list[int]:
    """The ids, with each placeholder of an image or a video replaced by a word."""
    vision = engine.built.vision
    return [i if vision is None or i not in (vision.image, vision.video) else text_ids(vision)[0] for i in ids]


def steps_for(
    engine: Engine, path: str, steps: Sequence[Sequence[Document]], videos: bool = True
) -> tuple[list[list[Document]], Images, list[Document]]:
    """(The steps, with images and videos if the model accepts them; the images; documents_behind, whose images are
    among them); the same on every rank. Collective.

    path: the model's weights, from which the first rank determines the number of placeholders of an image. videos:
    whether there are any.
    """
    if not takes_images(engine):
        return [list(step) for step in steps], {}, []
    document: list[Any] = [None]
    if engine.ranks.is_first:
        plain = Reference(path, str(engine.device)).plain.get_submodule(engine.module.facts.base)
        document = [shown(engine, steps, plain, videos=videos and not engine.built.support.videos)]
    dist.broadcast_object_list(document, src=0, group=engine.ranks.group)
    samples: tuple[list[list[Document]], Images, list[Document]] = document[0]
    return samples


@torch.no_grad()
def shown(
    engine: Engine, steps: Sequence[Sequence[Document]], base: Any, bare: bool = True, videos: bool = False
) -> tuple[list[list[Document]], Images, list[Document]]:
    """steps_with_images and documents_behind."""
    vision = engine.built.vision
    assert vision is not None
    with_images, images = steps_with_images(steps, vision, base, bare=bare, videos=videos)
    document, media = documents_behind(engine, base, with_images[0])
    return with_images, {**images, **media}, document
