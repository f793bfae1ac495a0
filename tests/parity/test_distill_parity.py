"""Distillation on any mesh equals plain transformers with full logits, by `weft verify`'s measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import plain_distill
from tests.support.cases import engine_config, open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.vision_zoo import saved_vision_model
from weft.engine.engine import Engine
from weft.engine.losses.distillation import DistillationLoss
from weft.engine.teachers import Teacher, TeacherSource, with_teachers
from weft.models import hf
from weft.ops import divergence
from weft.verify.distill_harness import DrawnLists
from weft.verify.documents import awkward_steps
from weft.verify.harness import SCALAR, SGD, compare_gradients
from weft.verify.image_documents import shown
from weft.verify.image_reference import ImageReference, Images
from weft.verify.observed import Tensors, short_budget, to_documents
from weft.verify.plants import planted

LISTS = "lists"  # in place of a path: drawn lists of likely tokens
LR = 0.2  # the rounding of weights stays far below what a step moves them by
SETTINGS = {"loss": "forward_kl", "beta": 0.3, "temperature": 1.0, "squared": False, "alpha": 0.0}


Steps = list[list[tuple[list[int], list[float]]]]


def distill(
    path: str, mesh: str, teachers: list[tuple[str, str]], settings: dict[str, Any], plant: str | None = None
) -> tuple[list[float], list[Tensors], Tensors, Steps, Images]:
    """(Loss and gradients of each step, weights at the end, the steps, their images). The first step comes twice: in
    rows of one document, and as planned. teachers: (path, mesh) of each."""
    optimizer = {"name": "sgd", "lr": LR, "max_grad_norm": None, "weight_decay": 0.0}
    sight = "vision_config" in hf.read_config(path).to_dict()
    engine = open_engine(path, mesh, optimizer=optimizer, step={"max_tokens_per_device": 256 if sight else 128})
    steps, images = awkward_steps(100 if sight else 128)[:3], dict[Any, Any]()
    if sight:
        base = hf.build_random(hf.read_config(path), dtype=torch.float32, attention="eager", seed=0).model
        steps, images, _ = shown(engine, steps, base)
    roles: list[TeacherSource] = []
    for p, m in teachers:
        if p == LISTS:
            roles.append(DrawnLists(128))
        else:
            config = replace(engine_config(p, m, step={"max_tokens_per_device": 256}), purpose="inference")
            roles.append(Teacher(Engine(config, engine.ranks, shares_with=engine)))
    heads = [head for role in roles if (head := role.head(engine)) is not None]
    scale = settings["temperature"] ** 2 if settings["squared"] else 1.0
    losses, results = list[float](), list[Tensors]()
    with planted(plant):
        terms = divergence.terms_of(settings["loss"], settings["beta"])
        objective = DistillationLoss(
            terms, heads, temperature=settings["temperature"], alpha=settings["alpha"], scale=scale
        )
        for number, step in enumerate([steps[0], *steps]):
            documents, metas = to_documents(engine, step, images)
            plan = engine.plan(metas, budget=short_budget(engine, step) if number == 0 else None)
            local = {index: documents[index] for index in engine.planner.local_documents(plan)}
            local = with_teachers(roles, choices(len(step), len(roles)), list(documents.values()), local, engine)
            losses.append(engine.accumulate(plan, local, objective)["loss"] or 0.0)
            results.append({name: g.cpu().clone() for name, g in engine.gradients() if g is not None})
            if number == 0:
                engine.drop_gradients()
            else:
                engine.apply(LR)
    return losses, results, {name: tensor.cpu() for name, tensor in engine.tensors()}, steps, images


def choices(documents: int, teachers: int) -> list[int] | None:
    return None if teachers == 1 else [index % teachers for index in range(documents)]


def check(student: str, mesh: str, teachers: list[tuple[str, str]], plant: str | None = None, **changes: Any) -> None:
    settings = SETTINGS | changes
    losses, gradients, weights, steps, images = run(world_of(mesh), distill, student, mesh, teachers, settings, plant)[
        0
    ]
    chosen = [choices(len(step), len(teachers)) or [0] * len(step) for step in steps]
    model = plain_distill.plain_model(student)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    reference = ImageReference(images, student)
    reference.plain = model

    def train(dtype: torch.dtype) -> tuple[list[float], list[Tensors], Tensors]:
        return plain_distill.train(
            student, [DrawnLists(128).lists if p == LISTS else p for p, _ in teachers], steps, chosen, settings, LR,
            lambda ids: reference.images([ids]), dtype,
        )  # fmt: skip

    expected = train(torch.float32)
    assert losses[0] == pytest.approx(expected[0][0], rel=SCALAR)
    for of_run, of_plain in zip(losses[1:], expected[0], strict=True):
        assert of_run == pytest.approx(of_plain, rel=10 * SCALAR)
    for number, actual in enumerate(gradients, start=-1):
        plain = expected[1][max(number, 0)]
        if all(figure.passed for figure in compare_gradients(actual, plain, {})):
            continue
        # After an update there is the noise of fp32 in the weights too.
        exact = train(torch.float64)[1][max(number, 0)]
        noise = {figure.name: figure.value for figure in compare_gradients(plain, exact, {})}
        bad = [figure for figure in compare_gradients(actual, plain, noise) if not figure.passed]
        assert not bad, (number, bad)
    moved = sum(float((expected[2][n] - w).double().square().sum()) for n, w in start.items())
    error = sum(float((expected[2][n].double() - weights[n].double()).square().sum()) for n in start)
    assert moved > 0 and (error / moved) ** 0.5 <= SGD, (error / moved) ** 0.5


WIDE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
CASES = [
    # student, mesh, (teacher, mesh), settings
    ("llama", "1", ("llama", "1"), {"loss": "jsd", "temperature": 2.0, "squared": True, "alpha": 0.3}),
    ("llama", "2", ("qwen3_moe", "2"), {"loss": "forward_kl", "alpha": 0.5}),
    ("qwen3", "2x2", ("llama", "4"), {"loss": "reverse_kl"}),
    ("llama", "pp2", ("llama", "pp2"), {"loss": "forward_kl"}),
    ("qwen3_moe", "ep2", ("llama", "2"), {"loss": "forward_kl"}),
    ("lfm2", "2", ("llama", "2"), {"loss": "jsd"}),
    ("llama", "cp2xtp2", ("gemma2", "2xtp2"), {"loss": "reverse_kl", "temperature": 0.7}),
    ("gemma3_text", "tp2", (LISTS, ""), {"loss": "jsd", "temperature": 2.0, "squared": True, "alpha": 0.3}),
]  # fmt: skip


TEACHERS = {1: "1", 2: "2", 4: "2x2"}  # by ranks: their meshes
TABLE = [
    (student, mesh, ("llama" if student == "qwen3" else "qwen3", TEACHERS[world_of(mesh)]), {"loss": "jsd"})
    for student, meshes in {
        "llama": ("2x2", "tp2", "2xtp2", "pp2xcp2"), "qwen3": ("1", "2", "tp2", "cp2", "pp2"),
        "gemma3_text": ("1", "2", "2x2", "cp2", "pp2"), "qwen3_moe": ("2", "tp2", "pp2xep2", "ep2xcp2"),
        "lfm2": ("1", "2x2", "pp2"), "qwen3_5_text": ("1", "2", "tp2"),
    }.items()
    for mesh in meshes
]  # fmt: skip
TABLE += [  # the first two: the suite has cp2xtp2, and tp2 with lists
    ("gemma3_text", "tp2", ("gemma2", "2"), {"loss": "jsd", "temperature": 1.5}),
    ("llama", "cp2", ("qwen3", "tp2"), {"loss": "reverse_kl", "alpha": 0.2}),
    ("llama", "1", (LISTS, ""), {"loss": "forward_kl"}),
    ("qwen3", "2x2", (LISTS, ""), {"loss": "reverse_kl"}),
    ("llama", "cp2", (LISTS, ""), {"loss": "forward_kl", "alpha": 0.5}),
    ("llama", "pp2", (LISTS, ""), {"loss": "jsd"}),
    ("qwen3_moe", "ep2", (LISTS, ""), {"loss": "reverse_kl", "temperature": 0.7}),
    ("lfm2", "2", (LISTS, ""), {"loss": "forward_kl"}),
]


@pytest.mark.parametrize(("student", "mesh", "teacher", "settings"), pairs(CASES, TABLE))
def test_a_step_equals_full_logits(student: str, mesh: str, teacher: tuple[str, str], settings: dict[str, Any]) -> None:
    changes = {"tie_word_embeddings": True} if student == "qwen3" else {}
    family, of_teacher = teacher
    wide = WIDE if family == "llama" else {}
    path = family if family == LISTS else saved_model(family, **wide)
    check(saved_model(student, **changes), mesh, [(path, of_teacher)], **settings)


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [("qwen2_5_vl", "2")], [("qwen2_5_vl", "tp2"), ("gemma3", "1"), ("gemma3", "2x2"), ("gemma3", "cp2")]
))  # fmt: skip
def test_teachers_see_the_images_of_their_students(family: str, mesh: str) -> None:
    """The teacher has another number of layers."""
    check(saved_vision_model(family), mesh, [(saved_vision_model(family, 3), mesh)], alpha=0.2)


def step_with_lists_is_the_plain_one(plant: str | None) -> bool:
    return passes([(LISTS, "")], plant)


def passes(teachers: list[tuple[str, str]], plant: str | None) -> bool:
    try:
        check(saved_model("llama"), "1", teachers, plant)
    except AssertionError as error:
        if "was planted but never reached" in str(error):
            raise
        return False
    return True


def test_several_teachers_of_other_widths() -> None:
    teachers = [(saved_model("llama", **WIDE), "2"), (saved_model("qwen3"), "2"), (LISTS, "")]
    check(saved_model("llama"), "2", teachers, alpha=0.1)
