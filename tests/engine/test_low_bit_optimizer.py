"""optimizer.state_dtype=int8, optimizer.rounding: codes, scales and masters are those of one process on every mesh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cases import describe, parity, saved_model, world_of
from tests.support.equal_gradients import gradient, same_on_every_mesh
from tests.support.pool import run
from weft.config.schema import OptimizerConfig
from weft.engine.optim import block_step
from weft.engine.optim.block_step import exact_root, random_words
from weft.engine.optim.optimizer import build_optimizer, set_learning_rate, state_bytes
from weft.engine.optim.placement import random_key
from weft.recipes.verify import EPSILON
from weft.verify.reference_low_bit import CodedAdamW, bits

INT8: dict[str, Any] = {"optimizer": {"state_dtype": "int8"}}
BF16 = {"master_dtype": "bf16"}
# Rows of 320 are cut in blocks of 256 and 64, which two ranks of tp cut in the middle.
WIDE = {"hidden_size": 320, "intermediate_size": 336, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "dense": ("llama", WIDE, INT8, ("1", "3", "2x2", "tp2", "pp2")),
    "tied": ("llama_tied", {}, INT8, ("1", "tp2", "pp2")),
    "masters rounded at random": (
        "llama",
        {},
        {"fsdp": BF16, "optimizer": {"rounding": "stochastic"}},
        ("1", "3", "tp2"),
    ),
    "masters and what they lack": (
        "llama",
        {},
        {"fsdp": BF16, "optimizer": {"rounding": "kahan", "state_dtype": "int8"}},
        ("1", "2x2", "pp2"),
    ),
    "experts": ("qwen3_moe", {}, INT8, ("1", "ep2xtp2", "pp2xep2")),
}

# Of `make verify-all`: further meshes, adapters as wide as blocks, and sizes that no number of ranks divides.
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "dense, further": ("llama", WIDE, INT8, ("1", "2", "2xtp2")),
    "experts, further": ("qwen3_moe", {}, INT8, ("1", "ep2")),
    "adapters": ("qwen3", {}, INT8 | {"lora": {"rank": 64}}, ("1", "2", "tp2", "pp2")),
    "uneven": ("llama_tied", WIDE | {"vocab_size": 130, "intermediate_size": 334}, INT8, ("1", "3", "2x2", "4", "tp2")),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.table) for name in TABLE)])
def test_codes_scales_and_masters_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    family, changes, sections, meshes = (CASES | TABLE)[name]
    saved = same_on_every_mesh(saved_model(family, **changes), sections, meshes, tmp_path)
    coded = sections["optimizer"].get("state_dtype") == "int8"
    assert any(entry.startswith("optimizer/exp_avg_scale/") for entry in saved) is coded
    if family.startswith("llama"):
        weights = {entry.removeprefix("weights/"): x for entry, x in saved.items() if entry.startswith("weights/")}
        for entry, expected in plain_weights(saved_model(family, **changes), list(weights), sections).items():
            assert weights[entry].equal(expected), entry


def plain_weights(path: str, names: list[str], sections: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after three steps of the reference's optimizer over whole tensors. names: weft's."""
    masters = torch.bfloat16 if "fsdp" in sections else torch.float32
    parameters = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    weights = {name: torch.nn.Parameter(parameters[name].detach().to(masters)) for name in names}
    keys, coded = sections["optimizer"], sections["optimizer"].get("state_dtype") == "int8"
    decayed = {name: x.ndim > 1 and "norm" not in name for name, x in weights.items()}
    optimizer = CodedAdamW(
        [{"params": [x], "weight_decay": 0.1 * decayed[name]} for name, x in weights.items()],
        {x: name for name, x in weights.items()},
        {x: coded and decayed[name] and x.numel() >= 4096 for name, x in weights.items()},
        betas=(0.9, 0.95), eps=EPSILON, seed=0, state=torch.float32 if coded else masters,
        rounding=keys.get("rounding", "nearest"),
    )  # fmt: skip
    for step in range(1, 4):
        for group, (name, x) in zip(optimizer.param_groups, weights.items(), strict=True):
            x.grad, group["lr"] = gradient(name, tuple(x.shape), step).to(masters), 1e-2 / step
        optimizer.step()
    return {name: x.detach() for name, x in weights.items()}


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [("llama", "2xtp2", {}), ("qwen3_moe", "ep2", {}), ("qwen3", "2", {"lora": {"rank": 64}})],
)
def test_training_is_that_of_one_process_with_the_same_codes(family: str, mesh: str, sections: dict[str, Any]) -> None:
    """The reference has code of its own for codes, scales and random bits."""
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, INT8 | sections)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.covers("optimizer.rounding")
def test_small_steps_are_lost_to_nearest_and_kept_at_random_and_by_kahan() -> None:
    """200 steps of 1e-4 from 1, where neighbours in bf16 are 2^-8 apart below 1."""
    moved = {}
    for rounding in ("nearest", "stochastic", "kahan"):
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        config = OptimizerConfig(rounding=rounding, state_dtype="fp32", weight_decay=0.0)
        optimizer = build_optimizer([("w", weight)], config)
        for _ in range(200):
            set_learning_rate(optimizer, 1e-4)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[rounding] = float((1 - weight.detach().float()).mean())
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(0.02, rel=0.05)
    assert moved["kahan"] == pytest.approx(0.02, rel=0.1)  # of one weight, 0.02 lies between two neighbours


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_masters_in_fp32_are_stepped_as_if_no_rounding_were_set(rounding: Literal["stochastic", "kahan"]) -> None:
    """`weft verify` compares in fp32 with the user's optimizer section."""
    torch.manual_seed(0)
    start, gradient, results = torch.randn(64, 256), torch.randn(64, 256), []
    for config in (OptimizerConfig(state_dtype="int8"), OptimizerConfig(state_dtype="int8", rounding=rounding)):
        weight = torch.nn.Parameter(start.clone())
        optimizer = build_optimizer([("w", weight)], config)
        for _ in range(2):
            set_learning_rate(optimizer, 1e-3)
            weight.grad = gradient.clone()
            optimizer.step()
        results.append((weight.detach(), {*optimizer.state[weight]}))
    assert results[0][0].equal(results[1][0]) and results[0][1] == results[1][1]


def test_state_takes_two_bytes_and_its_scales() -> None:
    shape = (1000, 1024)
    weight = torch.nn.Parameter(torch.randn(shape))
    config = OptimizerConfig(state_dtype="int8")
    optimizer = build_optimizer([("w", weight)], config)
    weight.grad = torch.randn(shape)
    optimizer.step()
    size = sum(value.nbytes for key, value in optimizer.state[weight].items() if key != "step")
    assert (
        size
        == weight.numel() * (2 + 8 / 256)
        == state_bytes(config, torch.float32, None, {})("w", shape, weight.numel())
    )


def test_random_words_are_those_of_the_reference_and_uniform() -> None:
    places, key = torch.arange(0, 65536, 256, dtype=torch.int32), random_key(7, "model.w", 3)
    words = random_words(places, torch.tensor(key, dtype=torch.int32)).flatten().long() & 0xFFFFFFFF
    assert torch.equal(words, bits(key & 0xFFFFFFFF, 65536))
    ones = torch.stack([(words >> bit & 1).double().mean() for bit in range(32)])
    assert (ones - 0.5).abs().max() < 4 * 0.5 / 256
    halves = torch.stack([words & 0xFFFF, words >> 16]).double()
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 4 / 256


def random_blocks(weight: torch.dtype, state: torch.dtype, rounding: str) -> list[Any]:
    """Arguments of `step_blocks`: 301 blocks, of which every seventh is shared where the state is in codes."""
    torch.manual_seed(0)
    shape, coded = (301, 256), state == torch.int8
    moments = [torch.randn(shape).mul(1e-3).to(state), torch.rand(shape).mul(1e-6).to(state)]
    scales: list[torch.Tensor | None] = [None, None]
    shared = None
    if coded:
        moments = [torch.randint(-127, 128, shape, dtype=state), torch.randint(0, 256, shape, dtype=torch.uint8)]
        scales, shared = [torch.rand(301) * 1e-3, torch.rand(301) * 1e-3], torch.full((2, 301), -1.0)
        shared[:, ::7] = 1.0
    places, key = torch.arange(-7, 301 * 256 - 7, 256, dtype=torch.int32), torch.tensor(-12345, dtype=torch.int32)
    factors = torch.tensor([1 - 1e-6, 1e-3 / (1 - 0.9**3), (1 - 0.95**3) ** 0.5, 1e-8, 0.9, 1 - 0.9, 0.95, 1 - 0.95])
    return [
        torch.randn(shape).to(weight), torch.randn(shape).mul(1e-3).to(weight), *moments, *scales, shared,
        torch.randn(shape).mul(1e-3).to(weight) if rounding == "kahan" else None, places, key, factors,
        rounding == "stochastic",
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("weight", "state", "rounding"),
    [
        (torch.bfloat16, torch.int8, "stochastic"),
        pytest.param(torch.float32, torch.int8, "nearest", marks=pytest.mark.table),
        pytest.param(torch.bfloat16, torch.int8, "kahan", marks=pytest.mark.table),
        pytest.param(torch.bfloat16, torch.bfloat16, "kahan", marks=pytest.mark.table),
        pytest.param(torch.float32, torch.bfloat16, "nearest", marks=pytest.mark.table),
    ],
)
def test_the_compiled_pass_gives_the_bits_of_single_operations(
    weight: torch.dtype, state: torch.dtype, rounding: str
) -> None:
    with mock.patch.dict(block_step._COMPILED_FROM, {"cpu": 1}):
        compiled = block_step.find_step(torch.device("cpu"), 1)
    assert compiled is not block_step.step_blocks
    expected, actual = (random_blocks(weight, state, rounding) for _ in range(2))
    for _ in range(2):
        block_step.step_blocks(*expected)
        compiled(*actual)
    for place, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert not isinstance(a, torch.Tensor) or a.equal(b), place


@pytest.mark.parametrize(("error", "words"), [(None, "its results differ"), (RuntimeError("no"), "it does not run")])
def test_a_compiled_pass_that_is_wrong_is_not_used(error: Exception | None, words: str) -> None:
    step = block_step.CompiledStep()
    expected, actual = (random_blocks(torch.float32, torch.int8, "nearest") for _ in range(2))
    block_step.step_blocks(*expected)

    def wrong(weights: torch.Tensor, *arguments: Any) -> None:
        block_step.step_blocks(weights, *arguments)
        weights[0, 0] += 1.0
        if error is not None:
            raise error

    with mock.patch.object(step, "_compiled", wrong), pytest.warns(UserWarning, match=words):
        step(*actual)
    assert actual[0].equal(expected[0])


def test_roots_are_rounded_correctly() -> None:
    """torch.sqrt's are not, where MKL computes them."""
    x = torch.rand(1 << 16) * 1e-3
    assert exact_root(x).equal(x.double().sqrt().float())
