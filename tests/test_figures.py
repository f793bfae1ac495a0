"""Every figure of `weft verify` sees what no other does: each is made to differ by itself."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import describe, open_engine, parity, saved_model
from tests.pool import run
from weft.config.schema import OptimizerConfig
from weft.models.flops import FlopFacts
from weft.verification import harness
from weft.verification.documents import awkward_steps
from weft.verification.expected import Expected, Trainer, expect, with_noise, with_rounding
from weft.verification.observed import Observed
from weft.verification.routing import Differences


def both_sides(path: str) -> tuple[Observed, Expected]:
    """What a mesh of one rank and the reference compute."""
    with mock.patch.object(harness, "judge", return_value=harness.Verdict([])) as judge:
        harness.verify(open_engine(path, "1"), path, awkward_steps(128), [1e-3] * 3)
    seen, expected = judge.call_args.args[:2]
    return seen, expected


@pytest.fixture(scope="module")
def sides() -> tuple[Observed, Expected]:
    seen, expected = run(1, both_sides, saved_model("llama"))[0]
    return seen, expected


def longest(seen: Observed) -> int:
    return max(seen.readouts, key=lambda index: len(seen.readouts[index]["logprob"]))


def of_readouts(name: str, both: bool) -> Callable[[Observed], None]:
    def change(seen: Observed) -> None:
        for of in (seen.readouts, seen.alone) if both else (seen.alone,):
            of[longest(seen)][name][5] += 0.01

    return change


def at(name: str, place: int | None, values: Any) -> Callable[[Observed], None]:
    def change(seen: Observed) -> None:
        if place is None:
            setattr(seen, name, values(getattr(seen, name)))
        else:
            getattr(seen, name)[place] = values(getattr(seen, name)[place])

    return change


def first_parameter(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(iter(tensors))
    return {**tensors, name: tensors[name] * 1.01}


CHANGES: dict[str, Callable[[Observed], None]] = {
    "readout: logprob": of_readouts("logprob", both=True),
    "readout: entropy": of_readouts("entropy", both=True),
    "packed against alone": of_readouts("logprob", both=False),
    "neighbours do not move": at("neighbours", None, lambda value: value + 1e-4),
    "loss, documents 1": at("losses", 0, lambda value: value * 1.001),
    "loss, documents 2": at("losses", 1, lambda value: value * 1.001),
    "loss, documents 3": at("losses", 2, lambda value: value * 1.001),
    "gradient norm, documents 1": at("norms", 0, lambda value: value * 1.001),
    "gradient norm, documents 2": at("norms", 1, lambda value: value * 1.001),
    "gradient norm, documents 3": at("norms", 2, lambda value: value * 1.001),
    "loss, many micro-batches": at("micro_loss", None, lambda value: value * 1.001),
    "gradients, every parameter": at("gradients", 2, first_parameter),
    "gradients, many micro-batches": at("micro_gradients", None, first_parameter),
    "loss along 3 steps": at("trained", 2, lambda pair: (pair[0] * 1.01, pair[1])),
    "gradient norm along 3 steps": at("trained", 2, lambda pair: (pair[0], pair[1] * 1.01)),
    "weights after 3 steps": at("weights", None, first_parameter),
    "ranks that hold the same agree": at("apart", None, lambda _: "model.norm.weight: 1 on rank 0; 2 on rank 1"),
    "routes that differ without a tie": at("routing", None, lambda _: Differences(choices=10, differing=1, wrong=1)),
}


def test_these_are_all_figures(sides: tuple[Observed, Expected]) -> None:
    seen, expected = deepcopy(sides)
    seen.routing = Differences(choices=10)
    verdict = harness.judge(seen, expected, "adamw")
    assert verdict.failed == []
    assert {figure.name for figure in verdict.figures} == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_in_one_is_seen_by_that_one(name: str, sides: tuple[Observed, Expected]) -> None:
    seen, expected = deepcopy(sides)
    CHANGES[name](seen)
    assert harness.judge(seen, expected, "adamw").failed == [name]


def of_experts(path: str) -> list[float]:
    """The differences to fp64 of the gradients of each step, and of the weights, of a reference with experts."""
    trainer = Trainer(path, [1e-3] * 3, OptimizerConfig(eps=1e-5), "cpu", "model.layers")
    steps, facts = awkward_steps(128), FlopFacts(1, expert=1, experts=5, experts_per_token=2)
    found = with_rounding(with_noise(expect(trainer, steps, facts), trainer, steps), trainer, steps, facts)
    in_double = [harness.compare_gradients(step.others[-1], step.gradients, {}) for step in found.steps]
    weights = harness.compare_weights("w", found.others[-1], found.weights, found.start, found.others[:1], "sgd")
    return [harness.worst_of("g", figures).value for figures in in_double] + [weights.value]


def test_the_difference_to_fp64_is_measured_by_the_same_routes() -> None:
    """Five experts of which two are chosen: a token that went to another would move a gradient by far more."""
    assert all(0 < value < 1e-4 for value in run(1, of_experts, saved_model("qwen3_moe"))[0])


def test_a_bias_whose_gradient_is_nearly_zero_is_judged_by_what_fp32_rounds_off() -> None:
    """2.1e-5 off, ten times what other orders of documents show."""
    path = saved_model("cohere2", attention_bias=True, sliding_window=16)
    verdict = run(1, parity, path, "1", {})[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize(("value", "noise", "whether"), [(2e-5, 1e-7, True), (2e-3, 1e-7, False), (2e-5, None, False)])
def test_what_may_be_rounding(value: float, noise: float | None, whether: bool) -> None:
    passed, failed = harness.Figure("a", 0.0, 1e-5), harness.Figure("b", value, 1e-5, noise)
    assert harness.may_be_rounding(harness.Verdict([passed, failed])) == whether
    assert not harness.may_be_rounding(harness.Verdict([passed]))


def test_what_is_no_number_has_not_passed() -> None:
    assert harness.Figure("f", 1.0, 1.0).passed and not harness.Figure("f", 1.1, 1.0).passed
    assert not harness.Figure("f", float("nan"), 1.0).passed


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_are_as_far_off_as_their_difference_is_long(optimizer: str) -> None:
    """Moved by (3, 4), and off by (0.03, 0.04): a hundredth of the way."""
    start, after = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    seen = {"w": after["w"] * 1.01}
    figure = harness.compare_weights("weights", seen, after, start, [after], optimizer)
    assert figure.value == pytest.approx(0.01, rel=1e-4) and figure.noise == 0.0


@pytest.mark.parametrize("pads", [True, False])
def test_padding_is_noise_only_where_it_changes_rounding_alone(pads: bool) -> None:
    """Elsewhere it is another result, and tolerances would widen by it."""
    trainer = Trainer(saved_model("llama"), [1e-3], OptimizerConfig(lr=1e-3), "cpu", "model.layers", pads=pads)
    steps, facts = [awkward_steps(128)[0][:2]], FlopFacts(dense=1)
    expected = with_noise(expect(trainer, steps, facts), trainer, steps)
    assert len(expected.steps[0].others) == len(expected.others) == 1 + pads
