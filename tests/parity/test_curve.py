"""Several steps: loss and gradient norm within 1e-4 of the reference while the loss moves."""

from __future__ import annotations

import pytest

from tests.support.cases import open_engine, pairs, saved_model
from tests.support.pool import run
from weft.engine.losses.base import CrossEntropy
from weft.verify import reference, reference_optimizer
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

LR, CLIP, STEPS, DECAY = 3e-3, 1.65, 10, 0.1


def curve(path: str, mesh: str, count: int) -> list[tuple[float, float]]:
    engine = open_engine(path, mesh, optimizer={"eps": 1e-8, "max_grad_norm": CLIP, "weight_decay": DECAY})
    steps, losses = awkward_steps(128), []
    for number in range(count):
        documents, metas = to_documents(engine, steps[number % 3])
        loss = engine.accumulate(engine.plan(metas), documents, CrossEntropy())["loss"]
        assert loss is not None
        losses.append((loss, engine.apply(LR).grad_norm))
    return losses


def expected_curve(path: str, count: int) -> list[tuple[float, float]]:
    plain, steps = reference.Reference(path), awkward_steps(128)
    plain.start(reference_optimizer.Optimizer(weight_decay=DECAY).over(plain.named()), CLIP)
    return [plain.step(steps[number % 3], LR) for number in range(count)]


def check(path: str, mesh: str, expected: list[tuple[float, float]]) -> None:
    losses = run(int(mesh), curve, path, mesh, len(expected))[0]
    for (loss, norm), (expected_loss, expected_norm) in zip(losses, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [("llama", "1"), ("qwen3", "2"), ("qwen3_moe", "2")], [("llama", "2"), ("qwen3", "1"), ("qwen3_moe", "1")],
))  # fmt: skip
def test_ten_steps_while_clipping_comes_and_goes(family: str, mesh: str) -> None:
    path = saved_model(family, initializer_range=0.02)  # larger weights start with a norm that is always clipped
    expected = expected_curve(path, STEPS)
    assert expected[-1][0] < 0.9 * expected[0][0]  # the same documents, nine steps later
    clipped = [norm > CLIP for _, norm in expected]
    assert any(clipped) and not all(clipped), [norm for _, norm in expected]
    check(path, mesh, expected)


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [("jamba", "2"), ("recurrent_gemma", "1"), ("recurrent_gemma", "3")],
    [("jamba", "1"), ("jamba", "3"), ("recurrent_gemma", "2")],
))  # fmt: skip
def test_five_steps_of_models_whose_attention_comes_late(family: str, mesh: str) -> None:
    """Their first two layers have none."""
    path = saved_model(family)
    check(path, mesh, expected_curve(path, 5))
