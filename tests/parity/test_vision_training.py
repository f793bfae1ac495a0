"""Steps in which some ranks have images or videos and others none: nobody waits for ever, and all gather and reduce
alike."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parity.test_vision_parity import parity
from tests.support.cases import ALL_GATHER, REDUCE_SCATTER, describe, open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.vision_zoo import saved_vision_model
from weft.engine.batch.document import Document, MeasuredDocuments, Measures
from weft.engine.batch.media import Media, joined
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.models.vision import Vision


def drawn_documents(vision: Vision, source: random.Random, tokens_of: int) -> list[Document]:
    """Some documents, most of text; an image has `tokens_of` placeholders, a video four."""
    documents = []
    for number in range(source.randrange(1, 9)):
        generator = torch.Generator().manual_seed(source.randrange(10**6))
        images = [vision.sample(generator) for _ in range(source.choice((0, 0, 0, 1, 2)))]
        videos = [vision.sample_video(generator) for _ in range(source.choice((0, 0, 0, 0, 1)))]
        ids = [source.randrange(3, 100) for _ in range(source.randrange(2, 30))]
        for _ in images:
            ids += [vision.image] * tokens_of + [5, 6]
        for _ in videos:
            assert vision.video is not None
            ids += [vision.video] * 4 + [5, 6]
        inputs = joined([*images, *videos])
        media = Media.from_inputs(inputs, vision.patches(inputs)) if inputs else None
        documents.append(Document(torch.tensor(ids), torch.ones(len(ids)), media=media, source=str(number)))
    return documents


def train_on_random_steps(path: str, mesh: str, steps: int, reduce: str) -> list[tuple[int, ...]]:
    """(all-gathers, reduce-scatters, all-reduces) of each rank over all steps."""
    engine, source, counts = open_engine(path, mesh, fsdp={"reduce": reduce}), random.Random(0), [0, 0]
    assert engine.built.vision is not None
    originals = [getattr(dist, name) for name in (ALL_GATHER, REDUCE_SCATTER)]

    def counted(index: int):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            counts[index] += 1
            return originals[index](*args, **kwargs)

        return call

    with mock.patch.object(dist, ALL_GATHER, counted(0)), mock.patch.object(dist, REDUCE_SCATTER, counted(1)):
        for _ in range(steps):
            one_step(engine, drawn_documents(engine.built.vision, source, 2))
    gathered: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, tuple(counts))
    return gathered


def one_step(engine: Engine, documents: list[Document]) -> None:
    plan, local = engine.plan_step(documents)
    metrics = engine.accumulate(plan, local, CrossEntropy())
    assert not engine.apply(1e-3).skipped
    assert metrics["loss"] is not None


@pytest.mark.parametrize("reduce", ["scatter", pytest.param("last", marks=pytest.mark.table)])
def test_steps_in_which_other_ranks_have_images_and_videos(reduce: str) -> None:
    counts = run(3, train_on_random_steps, saved_vision_model("qwen2_5_vl"), "3", 50, reduce)[0]
    assert len(set(counts)) == 1 and counts[0][0] > 0


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"freeze": ["vision", "projector"]}, "fsdp": {"reduce": "last"}},
        {"model": {"freeze": ["vision", "language"], "recompute": "full"}, "fsdp": {"reduce": "every"}},
        {"model": {"recompute": "full"}, "fsdp": {"reduce": "last"}, "step": {"max_tokens_per_device": 70}},
        {"model": {"recompute": "selective"}},
    ],
    ids=["language", "projector", "recompute", "selective"],
)
def test_what_is_trained(sections: dict[str, dict[str, Any]]) -> None:
    mesh = "2x2" if "step" in sections else "2"
    bare = "language" not in sections["model"].get("freeze", ())  # nothing would be trained on text
    verdict = run(world_of(mesh), parity, saved_vision_model("qwen2_5_vl"), mesh, sections, bare)[0]
    assert verdict.passed, describe(verdict)


def train_a_projector_on_text(path: str) -> float:
    """The gradient norm of a step without images in which only the projector is trained."""
    engine = open_engine(path, "2", model={"freeze": ["vision", "language"]})
    plan, local = engine.plan_step([Document(torch.arange(3, 20), torch.ones(17)) for _ in range(3)])
    engine.accumulate(plan, local, CrossEntropy())
    return engine.apply(1e-3).grad_norm


def test_projector_alone_has_no_gradient_on_text() -> None:
    assert run(2, train_a_projector_on_text, saved_vision_model("qwen2_5_vl")) == [0.0, 0.0]


def frozen_parts(path: str, preset: str) -> set[str]:
    """The first parts of the names, below the base, of what is not trained."""
    engine = open_engine(path, "1", model={"freeze": [preset]})
    names = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
    return {".".join(name.split(".")[1:3]) for name in names}


def test_presets_name_parts() -> None:
    path = saved_vision_model("qwen2_5_vl")
    assert run(1, frozen_parts, path, "vision")[0] == {"visual.patch_embed", "visual.blocks"}
    assert run(1, frozen_parts, path, "projector")[0] == {"visual.merger"}
    assert {name.split(".")[0] for name in run(1, frozen_parts, path, "language")[0]} == {"language_model", "weight"}


class ImageDocument(MeasuredDocuments):
    """One document of 30 tokens with an image of 16 patches."""

    def __len__(self) -> int:
        return 1

    def measures(self) -> Measures:
        length, no = np.array([30]), np.array([False])
        return Measures(length, np.array([29.0]), np.array([29]), no, np.array([16]), np.array([256]), no)

    def source(self, index: int) -> str:
        return "seen.jsonl:1"

    def build(self, index: int) -> Document:
        raise AssertionError("nothing need be built")


def refusal(path: str, tokens: int) -> str:
    """The error about a document with an image; empty where it can be trained."""
    engine = open_engine(path, "1", step={"max_tokens_per_device": tokens})
    try:
        engine.planner.check_images(ImageDocument())
    except UserError as error:
        return str(error)
    return ""


def test_images_that_fit_no_row_are_named_before_training() -> None:
    path = saved_vision_model("qwen2_5_vl")
    message = run(1, refusal, path, 32)[0]
    assert "seen.jsonl:1" in message
    proposed = int(message.split("Set it to ")[1].split()[0])
    assert 32 < proposed < 60 and run(1, refusal, path, proposed) == [""]


def test_images_are_refused_where_the_model_takes_none() -> None:
    message = run(1, refusal, saved_model("llama"), 128)[0]
    assert "seen.jsonl:1: this model cannot be trained on images" in message
