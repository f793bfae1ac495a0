"""Steps in which some ranks have images and others none: nobody waits for ever, and all gather and reduce alike."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.cases import ALL_GATHER, REDUCE_SCATTER, describe, open_engine, world_of
from tests.pool import run
from tests.test_vision_parity import parity
from tests.vision_zoo import saved_vision_model
from weft.engine.document import Document
from weft.engine.engine import Engine
from weft.engine.media import Media, joined
from weft.models.vision import Vision
from weft.objectives.cross_entropy import CrossEntropy


def drawn_documents(vision: Vision, source: random.Random, tokens_of: int) -> list[Document]:
    """Some documents, most of text; an image has `tokens_of` placeholders."""
    documents = []
    for number in range(source.randrange(1, 9)):
        generator = torch.Generator().manual_seed(source.randrange(10**6))
        images = [vision.sample(generator) for _ in range(source.choice((0, 0, 0, 1, 2)))]
        ids = [source.randrange(3, 100) for _ in range(source.randrange(2, 30))]
        for _ in images:
            ids += [vision.image] * tokens_of + [5, 6]
        inputs = joined(images)
        media = Media(inputs, vision.patches(inputs)) if images else None
        documents.append(Document(torch.tensor(ids), torch.ones(len(ids)), media=media, source=str(number)))
    return documents


def train_on_random_steps(path: str, mesh: str, steps: int, reduce: str) -> list[tuple[int, ...]]:
    """(all-gathers, reduce-scatters, all-reduces) of each rank over all steps."""
    engine, source, counts = open_engine(path, mesh, fsdp={"reduce": reduce}), random.Random(0), [0, 0]
    assert engine.built.vision is not None
    originals = [getattr(dist, name) for name in (ALL_GATHER, REDUCE_SCATTER)]

    def counted(place: int):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            counts[place] += 1
            return originals[place](*args, **kwargs)

        return call

    with mock.patch.object(dist, ALL_GATHER, counted(0)), mock.patch.object(dist, REDUCE_SCATTER, counted(1)):
        for _ in range(steps):
            one_step(engine, drawn_documents(engine.built.vision, source, 2))
    gathered: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, tuple(counts))
    return gathered


def one_step(engine: Engine, documents: list[Document]) -> None:
    plan, own = engine.deal(documents)
    metrics = engine.accumulate(plan, own, CrossEntropy())
    assert not engine.apply(1e-3).skipped
    assert metrics["loss"] is not None


@pytest.mark.parametrize("reduce", ["scatter", "last"])
def test_steps_in_which_other_ranks_have_images(reduce: str) -> None:
    counts = run(3, train_on_random_steps, saved_vision_model("qwen2_5_vl"), "3", 50, reduce)[0]
    assert len(set(counts)) == 1 and counts[0][0] > 0


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"freeze": ["vision", "projector"]}, "fsdp": {"reduce": "last"}},
        {"model": {"freeze": ["vision", "language"], "recompute": "full"}, "fsdp": {"reduce": "every"}},
        {"model": {"recompute": "full"}, "fsdp": {"reduce": "last"}, "step": {"max_tokens_per_device": 70}},
    ],
    ids=["language", "projector", "recompute"],
)
def test_what_is_trained(sections: dict[str, dict[str, Any]]) -> None:
    mesh = "2x2" if "step" in sections else "2"
    bare = "language" not in sections["model"].get("freeze", ())  # nothing would be trained on text
    verdict = run(world_of(mesh), parity, saved_vision_model("qwen2_5_vl"), mesh, sections, bare)[0]
    assert verdict.passed, describe(verdict)


def train_a_projector_on_text(path: str) -> float:
    """The gradient norm of a step without images in which only the projector is trained."""
    engine = open_engine(path, "2", model={"freeze": ["vision", "language"]})
    plan, own = engine.deal([Document(torch.arange(3, 20), torch.ones(17)) for _ in range(3)])
    engine.accumulate(plan, own, CrossEntropy())
    return engine.apply(1e-3).grad_norm


def test_projector_alone_has_no_gradient_on_text() -> None:
    assert run(2, train_a_projector_on_text, saved_vision_model("qwen2_5_vl")) == [0.0, 0.0]
