"""Documents with images: loss, gradients and weights are those of one plain process, one document at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import describe, open_engine, pairs, references_once, world_of
from tests.support.pool import run
from tests.support.vision_zoo import FAMILIES, OTHER_FAMILIES, saved_vision_model
from weft.engine.batch import rows
from weft.engine.batch.assigned_images import assign_images
from weft.errors import UserError
from weft.models import hf
from weft.verify import harness
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.image_documents import shown, text_ids


def parity(
    path: str, mesh: str, sections: dict[str, dict[str, Any]], bare: bool = True, videos: bool = False, steps: int = 3
) -> Verdict | None:
    """The verdict of `weft verify`'s own function on this mesh; on rank 0. bare: the last of several steps is text
    alone. videos: with some beside images, and instead of them."""
    with references_once():
        engine = open_engine(path, mesh, **{"step": {"max_tokens_per_device": 256}, **sections})
        plain = hf.build_random(hf.read_config(path), dtype=torch.float32, attention="eager", seed=0)
        vision = engine.built.vision
        assert vision is not None and not engine.built.support.images
        assert not (videos and engine.built.support.videos)
        chosen = awkward_steps(100)[: max(steps, 2)]
        documents, images, image_step = shown(engine, chosen, plain.model, bare, videos)
        return harness.verify(engine, path, documents[:steps], [1e-3] * steps, images, image_step=image_step)


def check(
    family: str, mesh: str, layers: int = 2, deep: int = 1, videos: bool = False, **sections: dict[str, Any]
) -> None:
    path = saved_vision_model(family, layers, deep)
    verdict = run(world_of(mesh), parity, path, mesh, sections, True, videos)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_families(family: str) -> None:
    check(family, "2")


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [("qwen2_5_vl", "2x2"), ("qwen2_5_vl", "tp2")],
    # The first row: also without a bug in tests/verify/test_plants_on_meshes.py.
    [("gemma3", "cp2"), ("qwen2_5_vl", "cp2"), ("qwen2_5_vl", "1"), ("gemma3", "1"), ("gemma3", "3"),
     ("qwen2_5_vl", "3"), ("gemma3", "2x2"), ("gemma3", "tp2")],
))  # fmt: skip
def test_meshes(family: str, mesh: str) -> None:
    check(family, mesh)


def test_text_beside_images_is_no_placeholder() -> None:
    """Whatever ids a model has given them: documents get words after an image at their end, and in place of
    placeholders among random tokens."""
    for image, video in itertools.product((3, 5, 6, 7, 90), (None, 3, 5, 6, 8)):
        words = text_ids(SimpleNamespace(image=image, video=video))  # type: ignore[arg-type]
        assert len(set(words)) == 3 and not {image, video} & set(words)


FROZEN = {"model": {"freeze": ("model.visual",)}}
STAGES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("qwen3_vl", "pp2x2", 3, FROZEN), ("qwen3_vl", "pp2v", 5, {}), ("llava", "pp2", 2, {}),
]  # fmt: skip
STAGES_TABLE: list[tuple[str, str, int, dict[str, Any]]] = [
    ("qwen2_5_vl", "pp2x2", 2, {}), ("gemma3", "pp2xcp2", 2, {}), ("qwen2_5_vl", "pp2xcp2", 2, {}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh", "layers", "sections"), pairs(STAGES, STAGES_TABLE))
def test_the_tower_is_in_the_first_stage(family: str, mesh: str, layers: int, sections: dict[str, Any]) -> None:
    """With features of qwen3_vl's after two layers."""
    check(family, mesh, layers, deep=2, **sections)


def test_layers_that_take_features_are_in_the_first_stage() -> None:
    messages = run(3, refused, saved_vision_model("qwen3_vl", 3, 2), "pp3")
    assert "first 2 read image features and must be in the first stage, allow: set mesh.pp=2." in messages[0]


def refused(path: str, mesh: str) -> str:
    with pytest.raises(UserError) as error:
        open_engine(path, mesh)
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "mesh", "freeze"),
    pairs(
        [("qwen2_5_vl", "2", ["vision", "projector"]), ("qwen3_vl", "2", [])],
        [("qwen2_vl", "2", []), ("qwen2_5_vl", "3", [])],
    ),
)
def test_videos(family: str, mesh: str, freeze: list[str]) -> None:
    check(family, mesh, videos=True, model={"freeze": freeze})


def parity_of_cut_documents(path: str, mesh: str, sections: dict[str, dict[str, Any]]) -> tuple[Verdict | None, int]:
    """(the verdict of `parity` with videos, how many parts of documents with images this rank was given)."""
    parts: list[bool] = []

    def counted(indices: Sequence[int], *args: Any) -> dict[str, Any]:
        parts.append(True)
        return assign_images(indices, *args)

    with mock.patch.object(rows, "assign_images", counted):
        return parity(path, mesh, sections, videos=True), len(parts)


@pytest.mark.parametrize(
    ("family", "mesh", "freeze"),
    pairs([("qwen3_vl", "cp2u2", [])], [("qwen2_5_vl", "cp2", []), ("qwen2_5_vl", "cp2u2", ["vision"])]),
)
def test_documents_with_images_that_are_cut(family: str, mesh: str, freeze: list[str]) -> None:
    sections: dict[str, dict[str, Any]] = {"model": {"freeze": freeze}}
    results = run(world_of(mesh), parity_of_cut_documents, saved_vision_model(family), mesh, sections)
    assert results[0][0].passed, describe(results[0][0])
    assert all(parts > 0 for _, parts in results)


def test_images_with_experts_on_several_ranks() -> None:
    check("qwen3_vl_moe", "ep2")
