"""Learning rates against values computed by hand from the formulas in docs/reference/training.md."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from subprocess import run
from typing import Any, get_args

import pytest
import torch
import transformers

from weft.config.keys import schema_keys
from weft.config.migrate.trainer import TABLES
from weft.config.reference import _COMMENTS
from weft.config.schema import ScheduleConfig, SftConfig
from weft.engine.optim.schedule import decay_steps, learning_rate, warmup_steps

NAMES = get_args(schema_keys(SftConfig)["schedule.name"].type)


def rates(total: int, lr: float = 1.0, beyond: int = 0, **keys: Any) -> list[float]:
    config = ScheduleConfig(**keys)
    return [learning_rate(step, total, lr, config) for step in range(1, total + beyond + 1)]


@pytest.mark.covers("schedule.warmup_ratio", "schedule.warmup_steps")
@pytest.mark.parametrize(
    ("ratio", "steps", "total", "expected"),
    [
        (0.03, None, 100, 3),
        (0.03, None, 10, 1),  # ceil(0.3)
        (0.03, None, 1, 1),
        (0.07, None, 100, 7),  # 0.07 x 100 is 7.000000000000001 in floating point
        (0.03, 0, 100, 0),
        (0.03, 12, 100, 12),  # warmup_steps goes before the ratio
        (0.0, None, 100, 0),
        (1.0, None, 7, 7),
    ],
)
def test_warmup_steps(ratio: float, steps: int | None, total: int, expected: int) -> None:
    assert warmup_steps(ScheduleConfig(warmup_ratio=ratio, warmup_steps=steps), total) == expected


def test_cosine_with_warmup() -> None:
    # W = 2, T = 6: p = 0.25, 0.5, 0.75, 1 in steps 3 to 6; (1 + cos(pi p)) / 2 = 0.853553, 0.5, 0.146447, 0.
    values = rates(6, lr=2.0, warmup_steps=2, min_lr_ratio=0.1)
    assert values == pytest.approx([1.0, 2.0, 1.7363961031, 1.1, 0.4636038969, 0.2], abs=1e-9)


def test_cosine_without_warmup_starts_below_the_peak() -> None:
    # W = 0, T = 4: p = s / 4.
    values = rates(4, warmup_steps=0, min_lr_ratio=0.0)
    assert values == pytest.approx([0.8535533906, 0.5, 0.1464466094, 0.0], abs=1e-9)


@pytest.mark.covers("schedule.min_lr_ratio")
def test_linear() -> None:
    values = rates(5, lr=10.0, name="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert values == pytest.approx([10.0, 8.0, 6.0, 4.0, 2.0], abs=1e-12)


@pytest.mark.covers("optimizer.lr")
def test_constant_warms_up_and_stays() -> None:
    values = rates(5, lr=3.0, beyond=2, name="constant", warmup_steps=3)
    assert values == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0])


@pytest.mark.covers("schedule.decay_ratio", "schedule.decay")
@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("linear", [0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1, 1, 1, 1, 1, 0.8681980515, 0.55, 0.2318019485, 0.1]),
        ("1-sqrt", [0.5, 1, 1, 1, 1, 1, 0.55, 0.3636038969, 0.2205771366, 0.1]),
    ],
)
def test_wsd_decays_in_its_last_share(decay: str, expected: list[float]) -> None:
    # T = 10, decay_ratio 0.4: steps 7 to 10 have q = 0.25, 0.5, 0.75, 1.
    values = rates(10, name="wsd", decay=decay, decay_ratio=0.4, warmup_steps=2, min_lr_ratio=0.1)
    assert values == pytest.approx(expected, abs=1e-9)


def test_wsd_decay_is_a_share_of_the_whole_run() -> None:
    # 0.3 of 20 steps, not of the 10 behind the warm-up.
    assert decay_steps(ScheduleConfig(name="wsd", decay_ratio=0.3, warmup_steps=10), 20) == 6


def test_wsd_decay_never_reaches_into_the_warmup() -> None:
    config = ScheduleConfig(name="wsd", decay_ratio=0.9, warmup_steps=6)
    assert decay_steps(config, 10) == 4
    assert learning_rate(6, 10, 1.0, config) == 1.0


def test_the_decay_is_a_share_of_all_steps() -> None:
    """Of T, not of the T - W behind the warm-up: ceil(0.4 x 10) is 4, ceil(0.4 x 7) is 3."""
    assert decay_steps(ScheduleConfig(name="wsd", decay_ratio=0.4, warmup_steps=3), 10) == 4
    assert decay_steps(ScheduleConfig(name="wsd", decay_ratio=0.2, warmup_steps=50), 100) == 20


def test_wsd_without_decay_is_constant() -> None:
    assert rates(4, beyond=1, name="wsd", decay_ratio=0.0, warmup_steps=0) == [1.0] * 5


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial", "wsd"])
def test_one_step(name: str) -> None:
    assert rates(1, name=name, warmup_steps=0, min_lr_ratio=0.25) == [0.25]  # step 1 is step T
    assert rates(1, name=name, min_lr_ratio=0.25) == [1.0]  # warmup_ratio 0.03 makes it a warm-up step


def transformers_rates(name: str, warmup: int, total: int, **options: Any) -> list[float]:
    """transformers' rates at its current_step 1 to `total`, for a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = transformers.get_scheduler(name, optimizer, warmup, total, options)
    return [schedule.lr_lambdas[0](step) for step in range(1, total + 1)]


@pytest.mark.covers("schedule.power", "schedule.timescale")
@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
@pytest.mark.parametrize("total", [11, 20, 97])
def test_rates_are_those_of_transformers(warmup: int, total: int) -> None:
    shape: dict[str, Any] = {"warmup_steps": warmup}
    falls = {**shape, "min_lr_ratio": 0.0}
    assert rates(total, name="constant", **shape) == pytest.approx(
        transformers_rates("constant_with_warmup", warmup, total)
    )
    assert rates(total, name="linear", **falls) == pytest.approx(transformers_rates("linear", warmup, total), abs=1e-12)
    assert rates(total, name="cosine", **falls) == pytest.approx(transformers_rates("cosine", warmup, total), abs=1e-12)
    for power in (0.5, 1.0, 2.0, 3.5):
        for lowest in (0.0, 1e-7, 0.25):
            actual = rates(total, name="polynomial", power=power, warmup_steps=warmup, min_lr_ratio=lowest)
            expected = transformers_rates("polynomial", warmup, total, power=power, lr_end=lowest)
            assert actual == pytest.approx(expected, abs=1e-12)
    for timescale in (None, 1, 7, 1000):
        options = {} if timescale is None else {"timescale": timescale}
        actual = rates(total, name="inverse_sqrt", timescale=timescale, **shape)
        assert actual == pytest.approx(transformers_rates("inverse_sqrt", warmup, total, **options))


@pytest.mark.covers("schedule.cycles")
@pytest.mark.parametrize("cycles", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0, 3, 10])
@pytest.mark.parametrize("total", [11, 20, 31, 97])
def test_restarts_are_those_of_transformers(cycles: int, warmup: int, total: int) -> None:
    actual = rates(total, name="cosine_with_restarts", cycles=cycles, warmup_steps=warmup, min_lr_ratio=0.0)
    expected = transformers_rates("cosine_with_restarts", warmup, total, num_cycles=cycles)
    for step in range(max(1, warmup), total):
        # Where a cycle begins at a step, transformers' fraction of a float may round to the end of the one before.
        if (step - warmup) * cycles % (total - warmup) == 0:
            expected[step - 1] = 1.0
    assert actual == pytest.approx(expected, abs=1e-12)


def test_a_cycle_begins_at_the_peak_whatever_the_floats_round_to() -> None:
    """49 x (2 / 98) is 0.9999999999999999 in floating point, the end of a cycle."""
    values = rates(98, name="cosine_with_restarts", cycles=49, warmup_steps=0, min_lr_ratio=0.5)
    assert values == pytest.approx([0.75, 1.0] * 48 + [0.75, 0.5])


def test_restarts_end_at_the_minimum_and_stay() -> None:
    # W = 1, T = 9, 2 cycles of 4 steps.
    values = rates(9, beyond=2, name="cosine_with_restarts", cycles=2, warmup_steps=1, min_lr_ratio=0.2)
    fall = [0.8828427125, 0.6, 0.3171572875]
    assert values == pytest.approx([1.0, *fall, 1.0, *fall, 0.2, 0.2, 0.2], abs=1e-9)


def test_inverse_sqrt_does_not_depend_on_the_length_of_the_run() -> None:
    keys: dict[str, Any] = {"name": "inverse_sqrt", "warmup_steps": 4}
    assert rates(30, **keys) == rates(90, **keys)[:30]


def test_every_name_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/training.md").read_text()
    formulas = page.partition("## Learning rate")[2].partition("## ")[0]
    for name in NAMES:
        assert f"\n    {name} " in formulas or f"\n    {name}\n" in formulas, name
        assert name in TABLES.sentences.sft["SCHEDULE"] and name in _COMMENTS["schedule.name"], name


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_warmup_of_the_whole_run(name: str) -> None:
    assert rates(4, beyond=2, name=name, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.1, 0.1])


@pytest.mark.covers("schedule.name")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 3, 7, 20])
@pytest.mark.parametrize("decay", ["linear", "cosine", "1-sqrt"])
def test_shape(name: str, warmup: int, decay: str) -> None:
    total = 7
    values = rates(total, beyond=30, name=name, decay=decay, warmup_steps=warmup, min_lr_ratio=0.3)
    if name not in ("constant", "inverse_sqrt") and warmup < total:
        assert values[total - 1] == 0.3  # exactly
    after = values[min(warmup, total) - 1 :] if warmup else values
    assert all(late <= early for early, late in pairwise(after))


def test_imports_no_torch() -> None:
    code = "import sys, weft.engine.optim.schedule; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
