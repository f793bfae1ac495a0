"""Every figure of `weft verify` sees what no other does: each is made to differ by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import describe, open_engine, parity, saved_model
from tests.support.pool import run
from tests.support.rl_samples import algorithm, rl_config
from weft.config.schema import OptimizerConfig, ParameterGroup
from weft.models.flops import FlopFacts
from weft.verify import harness, rl_harness
from weft.verify.documents import awkward_steps, boundary_ids, special_ids
from weft.verify.expected import Expected, ReferenceTrainer, expect, plain_optimizer, with_noise, with_rounding
from weft.verify.observed import Observed, largest
from weft.verify.reference import Document, Reference
from weft.verify.routing import Differences


def both_sides(path: str) -> tuple[Observed, Expected]:
    """What a mesh of one rank and the reference compute."""
    with mock.patch.object(harness, "judge", return_value=harness.Verdict([])) as judge:
        harness.verify(open_engine(path, "1"), path, awkward_steps(128), [1e-3] * 3)
    observed, expected = judge.call_args.args[:2]
    return observed, expected


@pytest.fixture(scope="module")
def sides() -> tuple[Observed, Expected]:
    observed, expected = run(1, both_sides, saved_model("llama"))[0]
    return observed, expected


def longest(observed: Observed) -> int:
    return max(observed.readouts, key=lambda index: len(observed.readouts[index]["logprob"]))


def of_readouts(name: str, in_both: bool) -> Callable[[Observed], None]:
    def change(observed: Observed) -> None:
        for side in (observed.readouts, observed.separate) if in_both else (observed.separate,):
            side[longest(observed)][name][5] += 0.01

    return change


def changed_at(name: str, index: int | None, values: Any) -> Callable[[Observed], None]:
    def change(observed: Observed) -> None:
        if index is None:
            setattr(observed, name, values(getattr(observed, name)))
        else:
            getattr(observed, name)[index] = values(getattr(observed, name)[index])

    return change


def first_parameter(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(iter(tensors))
    return {**tensors, name: tensors[name] * 1.01}


CHANGES: dict[str, Callable[[Observed], None]] = {
    "readout: logprob": of_readouts("logprob", in_both=True),
    "readout: entropy": of_readouts("entropy", in_both=True),
    "packed row vs. single documents": of_readouts("logprob", in_both=False),
    "other documents do not change": changed_at("neighbours", None, lambda value: value + 1e-4),
    "evaluation: accuracy": changed_at("evaluated", None, lambda pair: (pair[0] + 0.1, pair[1])),
    "evaluation: exact": changed_at("evaluated", None, lambda pair: (pair[0], 0.0)),
    "loss, documents 1": changed_at("losses", 0, lambda value: value * 1.001),
    "loss, documents 2": changed_at("losses", 1, lambda value: value * 1.001),
    "loss, documents 3": changed_at("losses", 2, lambda value: value * 1.001),
    "gradient norm, documents 1": changed_at("norms", 0, lambda value: value * 1.001),
    "gradient norm, documents 2": changed_at("norms", 1, lambda value: value * 1.001),
    "gradient norm, documents 3": changed_at("norms", 2, lambda value: value * 1.001),
    "loss, many micro-batches": changed_at("micro_loss", None, lambda value: value * 1.001),
    "gradients, every parameter": changed_at("gradients", 2, first_parameter),
    "gradients, many micro-batches": changed_at("micro_gradients", None, first_parameter),
    "loss along 3 steps": changed_at("trained", 2, lambda pair: (pair[0] * 1.01, pair[1])),
    "gradient norm along 3 steps": changed_at("trained", 2, lambda pair: (pair[0], pair[1] * 1.01)),
    "weights after 3 steps": changed_at("weights", None, first_parameter),
    "copies on several ranks are equal": changed_at(
        "disagreement", None, lambda _: "model.norm.weight: 1 on rank 0; 2 on rank 1"
    ),
    "routes that differ without a tie": changed_at(
        "routing", None, lambda _: Differences(choices=10, differing=1, wrong=1)
    ),
}


def test_these_are_all_figures(sides: tuple[Observed, Expected]) -> None:
    observed, expected = deepcopy(sides)
    observed.routing = Differences(choices=10)
    verdict = harness.judge(observed, expected, "adamw")
    assert verdict.failed == []
    assert {figure.name for figure in verdict.figures} == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_in_one_is_seen_by_that_one(name: str, sides: tuple[Observed, Expected]) -> None:
    observed, expected = deepcopy(sides)
    CHANGES[name](observed)
    assert harness.judge(observed, expected, "adamw").failed == [name]


def test_documents_to_evaluate_are_hit_and_missed(sides: tuple[Observed, Expected]) -> None:
    """One has likeliest tokens alone. In the other, tokens are missed that are the likeliest of a half."""
    observed, expected = sides
    assert observed.evaluated == (expected.accuracy, expected.exact) and expected.exact == 0.5
    assert 0.7 < expected.accuracy < 0.9 and all(sum(mask) > 5 for _, mask in expected.held_out)


@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.nan]])
def test_the_largest_difference_is_no_number_if_any_is_none(values: list[float]) -> None:
    assert math.isnan(largest(values)) and largest([1.0, 3.0]) == 3.0 and largest([]) == 0.0


def test_a_later_loss_that_is_no_number_fails(sides: tuple[Observed, Expected]) -> None:
    observed, expected = deepcopy(sides)
    observed.trained[1] = (math.nan, math.nan)
    failed = harness.judge(observed, expected, "adamw").failed
    assert failed == ["loss along 3 steps", "gradient norm along 3 steps"]


def of_experts(path: str) -> list[float]:
    """The differences to fp64 of the gradients of each step, and of the weights, of a reference with experts."""
    trainer = ReferenceTrainer(path, [1e-3] * 3, OptimizerConfig(eps=1e-5), "cpu", "model.layers")
    steps, facts = awkward_steps(128), FlopFacts(1, expert=1, experts=5, experts_per_token=2)
    expected = with_rounding(with_noise(expect(trainer, steps, facts), trainer, steps), trainer, steps, facts)
    in_double = [harness.compare_gradients(step.noise_samples[-1], step.gradients, {}) for step in expected.steps]
    weights = harness.compare_weights(
        "w", expected.noise_samples[-1], expected.weights, expected.start, expected.noise_samples[:1], "sgd"
    )
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
    weights = {"w": after["w"] * 1.01}
    figure = harness.compare_weights("weights", weights, after, start, [after], optimizer)
    assert figure.value == pytest.approx(0.01, rel=1e-4) and figure.noise == 0.0


@pytest.mark.parametrize("pads", [True, False])
def test_padding_is_noise_only_where_it_changes_rounding_alone(pads: bool) -> None:
    """Elsewhere it is another result, and tolerances would widen by it."""
    trainer = ReferenceTrainer(saved_model("llama"), [1e-3], OptimizerConfig(lr=1e-3), "cpu", "model.layers", pads=pads)
    steps, facts = [awkward_steps(128)[0][:2]], FlopFacts(dense=1)
    expected = with_noise(expect(trainer, steps, facts), trainer, steps)
    assert len(expected.steps[0].noise_samples) == len(expected.noise_samples) == 1 + pads


def test_documents_have_the_borders_of_each_shard_of_the_vocabulary() -> None:
    """As inputs and as trained targets, of every number of shards up to that of the mesh; all else is as without."""
    assert boundary_ids(128, 1) == [0, 127] and boundary_ids(131, 2) == [0, 64, 65, 130]
    special = boundary_ids(131, 4)
    assert special[:8] == [0, 31, 32, 64, 65, 97, 98, 130] and set(special) == {*special[:8], 42, 43, 86, 87}
    plain, steps = awkward_steps(131), awkward_steps(131, special=special)
    assert steps[1:] == plain[1:] and [mask for _, mask in steps[0]] == [mask for _, mask in plain[0]]
    counted = [pair for ids, mask in steps[0] for pair in zip(ids[:-1], mask[:-1], strict=True)]
    assert set(special) <= {token for token, weight in counted if weight}
    assert not set(special) & {ids[0] for ids, _ in steps[0]}
    assert all(len(ids) == len(mask) for ids, mask in awkward_steps(10_000, special=range(3000, 9000))[0])


def special_of(path: str, mesh: str) -> tuple[list[int], str]:
    return special_ids(open_engine(path, mesh), path)


def test_padding_is_among_the_documents_unless_the_plain_model_has_no_gradients_there() -> None:
    path = saved_model("llama", pad_token_id=77)
    assert run(2, special_of, path, "tp2") == [([77, 0, 63, 64, 127], "")] * 2
    assert run(1, special_of, saved_model("llama", pad_token_id=None), "1") == [([0, 127], "")]


def without_gradients_at(token: int, path: str) -> tuple[list[int], str]:
    def gradients(self: Reference, documents: list[Document]) -> tuple[float, dict[str, torch.Tensor]]:
        bad = any(token in ids for ids, _ in documents)
        return 1.0, {"w": torch.tensor([math.nan if bad else 0.0])}

    with mock.patch.object(Reference, "gradients", gradients):
        return special_ids(open_engine(path, "1"), path)


def test_tokens_without_finite_gradients_are_left_out_and_named() -> None:
    path, why = saved_model("llama", pad_token_id=77), "plain transformers' gradients are not finite then"
    assert run(1, without_gradients_at, 77, path) == [([0, 127], f"tokens   no document has 77: {why}")]
    assert run(1, without_gradients_at, 127, path) == [([], f"tokens   no document has 77, 0, 127: {why}")]


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_families_whose_padding_embeds_to_zero(family: str) -> None:
    verdict = run(1, parity, saved_model(family), "1", {}, "cpu", 1, True)[0]
    assert verdict.passed, describe(verdict)


def test_groups_of_the_plain_optimizer_have_the_factors_of_their_rates() -> None:
    groups = ({"lr_scale": 0.1}, {"lr": 2e-3}, {"weight_decay": 0.0})
    config = OptimizerConfig(lr=1e-3, groups=tuple(ParameterGroup(match=("a",), **keys) for keys in groups))
    assert plain_optimizer(config).groups == [(("a",), 0.1, None), (("a",), 2.0, None), (("a",), 1.0, 0.0)]


@pytest.mark.parametrize(("path", "read"), [("r", ["m", "r"]), (None, ["m", "m"])])
def test_the_plain_reference_is_the_model_that_the_config_names(
    path: str | None, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def policy(path: str, *_: Any) -> Any:
        built.append(path)
        return SimpleNamespace(start=lambda *_: None)

    monkeypatch.setattr(rl_harness, "PlainPolicy", policy)
    monkeypatch.setattr(rl_harness._Plain, "_optimizer", lambda *_: None)
    config = rl_config(algorithm(kl_coef=0.1))
    config = replace(config, reference=replace(config.reference, path=path))
    trainer: Any = SimpleNamespace(config=config, engine=SimpleNamespace(device="cpu"), critic=None, teacher_loss=None)
    rl_harness._Plain(trainer, ({}, None), None)
    assert built == read
