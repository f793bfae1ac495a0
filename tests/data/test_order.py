"""The order of documents and their steps: whole, repeatable, and resumable at any step."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from weft.data.order import SampledStep, SourceShare, StepSampler, epoch_order

LENGTHS = [random.Random(1).randint(1, 40) for _ in range(23)]
RUNS: list[dict[str, Any]] = [
    {"documents": 5, "epochs": 3},
    {"documents": 5, "steps": 12},
    {"documents": 23, "epochs": 2},
    {"documents": 100, "steps": 4},
    {"tokens": 60, "epochs": 3},
    {"tokens": 60, "steps": 17},
    {"tokens": 10, "epochs": 2},
]


def make(lengths: list[int] = LENGTHS, **options: Any) -> StepSampler:
    options = {"documents": None, "epochs": None, **options}
    return StepSampler(lengths, **options)


def test_shuffle_is_a_permutation_of_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): tuple(epoch_order(50, seed, epoch, shuffle=True)) for seed in range(4) for epoch in range(4)
    }
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 16
    assert all(tuple(epoch_order(50, *key, shuffle=True)) == order for key, order in orders.items())
    assert epoch_order(5, 1, 2, shuffle=False) == [0, 1, 2, 3, 4]


def test_shuffle_is_the_same_on_every_machine() -> None:
    assert epoch_order(10, 0, 1, shuffle=True) == [4, 3, 2, 7, 5, 8, 0, 1, 6, 9]


@pytest.mark.covers("train.epochs")
@pytest.mark.parametrize("options", RUNS, ids=str)
def test_every_document_once_in_each_epoch(options: dict[str, Any]) -> None:
    steps = list(make(**options))
    epochs = {epoch: list(group) for epoch, group in itertools.groupby(steps, key=lambda step: step.epoch)}
    assert list(epochs) == list(range(1, len(epochs) + 1))
    if "steps" in options:  # the run may end within an epoch
        epochs.pop(max(epochs))
    for epoch, group in epochs.items():
        dealt = [i for step in group for i in step.documents]
        assert dealt == epoch_order(len(LENGTHS), 0, epoch, shuffle=True)


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_the_number_of_steps_is_known_in_advance(options: dict[str, Any]) -> None:
    steps = make(**options)
    total = len(steps)
    assert total == steps.total == options.get("steps", total)
    assert [step.number for step in steps] == list(range(1, total + 1))


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_starting_at_a_step_equals_the_unbroken_run(options: dict[str, Any]) -> None:
    unbroken = list(make(**options))
    for number in range(1, len(unbroken) + 2):
        assert list(make(**options).starting_at(number)) == unbroken[number - 1 :]


@pytest.mark.covers("step.documents")
def test_the_last_step_of_an_epoch_is_short() -> None:
    steps = list(make(documents=5, epochs=2))
    assert [len(step.documents) for step in steps] == [5, 5, 5, 5, 3] * 2


@pytest.mark.covers("step.tokens")
def test_tokens_by_hand() -> None:
    lengths = [4, 6, 1, 30, 5, 5, 1]
    steps = list(make(lengths, tokens=10, epochs=1, shuffle=False))
    # 4 + 6 fill a step exactly; 1 + 30 would not fit; 30 is longer than a step and stands alone; 5 + 5, then 1.
    assert [step.documents for step in steps] == [[0, 1], [2], [3], [4, 5], [6]]


def test_token_steps_are_full_and_within_the_limit() -> None:
    order = [i for step in make(tokens=60, epochs=1) for i in step.documents]
    position = 0
    for step in make(tokens=60, epochs=1):
        position += len(step.documents)
        tokens = sum(LENGTHS[i] for i in step.documents)
        assert tokens <= 60 or len(step.documents) == 1
        assert position == len(order) or tokens + LENGTHS[order[position]] > 60


@pytest.mark.covers("data.shuffle", "train.seed")
def test_seed_changes_the_order_and_no_shuffle_keeps_the_files() -> None:
    assert list(make(documents=5, epochs=1, seed=1)) != list(make(documents=5, epochs=1, seed=2))
    assert list(make([1, 1, 1], documents=2, epochs=2, shuffle=False)) == [
        SampledStep(1, 1, [0, 1]),
        SampledStep(2, 1, [2]),
        SampledStep(3, 2, [0, 1]),
        SampledStep(4, 2, [2]),
    ]


# ---------------------------------------------------------------- sources with weights


@pytest.mark.parametrize(("weight", "n", "expected"), [(1, 7, 7), (0.5, 7, 4), (0.5, 8, 4), (2.5, 3, 8), (0.01, 9, 1)])
def test_documents_of_a_source_in_an_epoch_by_hand(weight: float, n: int, expected: int) -> None:
    assert SourceShare(n, weight).in_epoch == expected
    assert len(make([1] * n, documents=1, epochs=3, shares=[SourceShare(n, weight)])) == 3 * expected


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.7, 1.0, 1.3, 2.0, 3.5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_document_comes_again_before_all_have_come(weight: float, shuffle: bool) -> None:
    """After any number of epochs, two documents of a source differ by at most one in how often they came."""
    shares, counts = [SourceShare(11, weight), SourceShare(12)], [0] * 23
    steps = make(documents=4, epochs=9, shares=shares, shuffle=shuffle)
    epochs = itertools.groupby(steps, key=lambda step: step.epoch)
    for number, (epoch, group) in enumerate(epochs, start=1):
        dealt = [i for step in group for i in step.documents]
        assert epoch == number and len(dealt) == shares[0].in_epoch + 12
        for i in dealt:
            counts[i] += 1
        assert sum(counts[:11]) == number * shares[0].in_epoch and max(counts[:11]) - min(counts[:11]) <= 1
        assert counts[11:] == [number] * 12


def test_halves_of_a_source_differ_by_epoch_and_by_seed() -> None:
    def epoch(seed: int, number: int) -> set[int]:
        steps = make([1] * 12, documents=12, epochs=4, seed=seed, shares=[SourceShare(12, 0.5)])
        return set(list(steps)[number - 1].documents)

    assert epoch(0, 1) | epoch(0, 2) == set(range(12)) == epoch(0, 3) | epoch(0, 4)
    assert len({frozenset(epoch(seed, number)) for seed in range(3) for number in (1, 3)}) == 6


def test_what_is_chosen_is_in_the_order_of_the_data_and_differs_by_source() -> None:
    chosen = [SourceShare(20, 0.5).chosen(source, 7, 1, True) for source in range(2)]
    assert chosen[0] != chosen[1]
    assert all(indices == sorted(indices) and len(indices) == 10 for indices in chosen)


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_runs_with_weights_can_be_taken_up_anywhere(options: dict[str, Any]) -> None:
    shares = [SourceShare(9, 0.6), SourceShare(14, 1.7)]
    unbroken = list(make(**options, shares=shares))
    assert [step.number for step in unbroken] == list(range(1, len(make(**options, shares=shares)) + 1))
    for number in range(1, len(unbroken) + 2):
        assert list(make(**options, shares=shares).starting_at(number)) == unbroken[number - 1 :]


def test_sources_of_weight_1_are_dealt_as_one() -> None:
    assert list(make(documents=5, epochs=2, shares=[SourceShare(10), SourceShare(13)])) == list(
        make(documents=5, epochs=2)
    )
