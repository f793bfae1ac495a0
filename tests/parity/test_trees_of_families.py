"""Trees of families whose layers carry state, route tokens to experts, or take images."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parity.test_trees import of_trees
from tests.support.cases import describe, open_engine, pairs, references_once, saved_model, world_of
from tests.support.pool import run
from tests.support.vision_zoo import saved_vision_model
from weft.engine.batch.media import joined
from weft.engine.batch.rows import Row, RowBuilder
from weft.engine.experts import find_biases
from weft.engine.losses.base import CrossEntropy
from weft.engine.selfcheck.image import placeholders
from weft.engine.step_plan.plan import StepPlan
from weft.models import hf
from weft.models.vision import Vision
from weft.ops.segments import Segments
from weft.verify import harness
from weft.verify.documents import forest_steps
from weft.verify.harness import Verdict
from weft.verify.image_documents import text_ids
from weft.verify.image_reference import Images
from weft.verify.observed import to_documents
from weft.verify.reference import Document

STATES = [("qwen3_5_text", "1"), ("bamba", "2"), ("lfm2", "cp2u2"), ("qwen3_next", "tp2")]
MORE_STATES = [
    ("lfm2", "pp2"), ("mamba", "1"), ("mamba2", "2"), ("jamba", "2"), ("falcon_h1", "tp2"), ("nemotron_h", "ep2"),
    ("granitemoehybrid", "2"), ("zamba2", "1"), ("olmo_hybrid", "1"), ("kimi_linear", "1"), ("minimax", "1"),
    ("recurrent_gemma", "1"), ("lfm2_moe", "2"), ("bamba", "cp2u2"), ("qwen3_5_text", "2xtp2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh"), pairs(STATES, MORE_STATES))
def test_layers_that_carry_state(family: str, mesh: str) -> None:
    check(family, mesh, {}, lasting_states(family))


EXPERTS = [("qwen3_moe", "ep2", "document"), ("deepseek_v3", "ep2", None)]
MORE_EXPERTS = [
    ("qwen3_moe", "2", "step"), ("gpt_oss", "1", None), ("qwen3_moe", "2xcp2", "document"),
    ("qwen3_moe", "pp2", "document"), ("qwen3_moe", "pp2", "step"), ("qwen3_moe", "ep2xcp2", "step"),
    ("qwen3_moe", "1", None), ("mixtral", "2xep2", "document"), ("gpt_oss", "ep2xtp2", "step"),
    ("deepseek_v3", "tp2", None), ("jamba", "2", "document"),
]  # fmt: skip


@pytest.mark.covers("model.router_aux_loss")
@pytest.mark.parametrize(("family", "mesh", "loss"), pairs(EXPERTS, MORE_EXPERTS))
def test_experts_and_their_auxiliary_losses(family: str, mesh: str, loss: str | None) -> None:
    check(family, mesh, {} if loss is None else {"model": {"router_aux_loss": loss, "router_aux_loss_coef": 0.1}})


def loads(path: str, planted: bool) -> list[tuple[float, list[Tensor]]]:
    """(experts/max_load, correction biases after a step) with trees, and with documents apart. planted: a
    shared token counts once."""
    model, counts = {"router_bias_rate": 0.01}, Segments.multiplicity_T
    results = []
    for share in ("auto", "off"):
        engine = open_engine(path, "1", model=model, step={"max_tokens_per_device": 256, "share_prefixes": share})
        documents, metadata = to_documents(engine, forest_steps(128)[0])
        counting_once = mock.patch.object(
            Segments, "multiplicity_T", lambda self, device: counts(self, device).clamp(max=1)
        )
        with counting_once if planted else nullcontext():
            metrics = engine.accumulate(engine.plan(metadata), documents, CrossEntropy())
        engine.apply(0.0)
        biases = [bias.clone() for bias in find_biases(engine.module).values()]
        results.append((metrics["experts/max_load"] or 0.0, biases))
    return results


@pytest.mark.parametrize("planted", [False, True])
def test_loads_and_correction_biases_count_a_shared_token_for_each_document(planted: bool) -> None:
    (trees, separate) = run(1, loads, saved_model("deepseek_v3"), planted)[0]
    same = all(torch.equal(a, b) for a, b in zip(trees[1], separate[1], strict=True))
    assert (trees[0] == pytest.approx(separate[0], rel=1e-9) and same) == (not planted)


@cache
def lasting_states(family: str) -> str:
    """The family's small model with states that last for some tokens: its random ones are forgotten at once, so that a
    state which is not forked would hardly show."""
    folder = Path(saved_model(family))
    changed = folder.with_name(f"{family}-lasting")
    shutil.copytree(folder, changed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor.fill_(-2.0)
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    return str(changed)


def check(family: str, mesh: str, sections: dict[str, dict[str, Any]], path: str = "") -> None:
    ((verdict, rows), *_) = run(world_of(mesh), of_trees, path or saved_model(family), mesh, sections)
    assert verdict is not None and verdict.passed, describe(verdict)
    assert rows > 0


# ---------------------------------------------------------------- images


IMAGES = [("gemma3", "2"), ("qwen2_vl", "cp2")]
MORE_IMAGES = [
    ("qwen2_vl", "1"), ("qwen2_5_vl", "2x2"), ("llava", "tp2"), ("qwen3_vl", "pp2"), ("gemma3", "cp2"),
    ("qwen3_vl", "cp2u2"), ("qwen2_5_vl", "2xcp2"),
]  # fmt: skip


def forests_with_images(vision: Vision, base: Any) -> tuple[list[list[Document]], Images]:
    """Two steps of documents that begin with one image, most of them; one has another image at its place, and one has a
    second image behind."""
    generator = torch.Generator().manual_seed(0)
    first, second, wide = (vision.sample(generator, size) for size in (2, 2, 3))
    runs = {id(inputs): placeholders(vision, base, inputs) for inputs in (first, second, wide)}
    words, images, steps = text_ids(vision), dict[tuple[int, ...], dict[str, Tensor]](), list[list[Document]]()

    def shown(inputs: dict[str, Tensor]) -> list[int]:
        return [token for token, count in runs[id(inputs)] for _ in range(count)]

    def text(count: int, step: int) -> list[int]:
        return [words[n * step // 2 % len(words)] for n in range(count)]

    for lengths in ((3, 9, 1, 5, 12), (8, 2)):
        documents = []
        for number, length in enumerate(lengths):
            shows = [second] if number == 2 else [first, wide] if number == 3 else [first]
            code = divmod(len(images), len(words))  # the reference knows images by the beginning of a document
            ids = [*text(6, 1), *shown(shows[0]), *text(4, 3), *(words[digit] for digit in code), *text(length, number)]
            ids += [] if len(shows) == 1 else [*shown(wide), *text(3, 5)]
            documents.append((ids, [0.0 if token not in words else 1.0 for token in ids]))
            images[tuple(ids)] = joined(shows)
        steps.append([*documents, (text(15, 1), [1.0] * 15)])
    return steps, images


def parity_of_images(path: str, mesh: str) -> tuple[Verdict | None, list[tuple[int, int, bool]]]:
    """(Verdict, (segments, patches, whether features of its images are exchanged) of every row that was built)."""
    rows, build = list[tuple[int, int, bool]](), RowBuilder._build

    def noted(self: RowBuilder, *args: Any) -> Row:
        row = build(self, *args)
        patches = 0 if row.media is None or row.placeholder else sum(vision.patches(row.media))
        segments = row.bounds.segments
        trees = segments is not None and max(segments.multiplicities) > 1
        rows.append((len(segments.lengths) if segments is not None and trees else 0, patches, row.exchange is not None))
        return row

    with references_once(), mock.patch.object(RowBuilder, "_build", noted):
        engine = open_engine(path, mesh, step={"max_tokens_per_device": 512})
        plain = hf.build_random(hf.read_config(path), dtype=torch.float32, attention="eager", seed=0)
        assert engine.built.vision is not None
        vision = engine.built.vision
        steps, images = forests_with_images(vision, plain.model)
        return harness.verify(engine, path, steps, [1e-3] * len(steps), images), rows


@pytest.mark.parametrize(("family", "mesh"), pairs(IMAGES, MORE_IMAGES))
def test_images_of_a_shared_beginning_run_the_tower_once(family: str, mesh: str) -> None:
    ((verdict, rows), *_) = run(world_of(mesh), parity_of_images, saved_vision_model(family), mesh)
    assert verdict is not None and verdict.passed, describe(verdict)
    shared = [patches for segments, patches, _ in rows if segments]
    assert shared
    if mesh == "1":  # 16 of an image that three documents share, 16 of another in its place, 16 + 24 of two in one
        assert max(shared) == 72


def images_beside_a_cut_document(path: str) -> list[tuple[float, float, list[Tensor]]]:
    """(Loss, gradient norm, gradients of this rank) of a step in which each row has a part of a document with images
    and a tree with others, then of the same documents apart."""
    results = []
    for share in ("auto", "off"):
        engine = open_engine(path, "cp2", step={"max_tokens_per_device": 512, "share_prefixes": share})
        vision = engine.built.vision
        assert vision is not None
        plain = hf.build_random(hf.read_config(path), dtype=torch.float32, attention="eager", seed=0)
        (step, _), images = forests_with_images(vision, plain.model)
        (ids, _), text = step[3], [text_ids(vision)[n % 3] for n in range(150)]
        long = ([*ids, *text], [1.0] * len([*ids, *text]))
        images[tuple(long[0])] = images[tuple(ids)]
        documents, metadata = to_documents(engine, [long, *step[:3], *step[4:]], images)
        planned = (engine.plan(metadata, budget=budget) for budget in range(250, 80, -10))
        plan = next(p for p in planned if p.pieces and (share == "off" or trees_beside_cut(p)))
        loss = engine.accumulate(plan, documents, CrossEntropy())["loss"] or 0.0
        gradients = [p.grad.to_local().clone() for p in engine.module.parameters() if isinstance(p.grad, DTensor)]
        results.append((loss, engine.gradient_norm(), gradients))
    return results


def trees_beside_cut(plan: StepPlan) -> bool:
    """Whether a row has a part of a document and a tree, both with images."""
    return any(
        (segments := plan.segments(k, rank)) is not None
        and max(segments.multiplicities) > 1
        and plan.shares_images(k, rank)
        for k in range(plan.micro_batches)
        for rank in range(plan.ranks)
    )


def test_images_of_a_tree_beside_those_of_a_cut_document() -> None:
    for trees, separate in run(2, images_beside_a_cut_document, saved_vision_model("qwen2_vl")):
        assert trees[:2] == pytest.approx(separate[:2], rel=1e-6)
        assert len(trees[2]) == len(separate[2]) > 20
        largest = max(float(gradient.abs().max()) for gradient in separate[2])
        for gradient_of_tree, expected in zip(trees[2], separate[2], strict=True):
            assert float((gradient_of_tree - expected).abs().max()) <= 1e-5 * max(
                float(expected.abs().max()), 1e-3 * largest
            )
