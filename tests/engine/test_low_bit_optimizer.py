"""optimizer.state_dtype=int8, optimizer.rounding: codes, scales and masters are those of one process on every mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import describe, parity, saved_model, world_of
from tests.support.equal_gradients import same_on_every_mesh
from tests.support.pool import run
from weft.config.schema import OptimizerConfig
from weft.engine.optim.optimizer import build_optimizer, set_learning_rate, state_bytes
from weft.engine.optim.placement import Rows, random_key, random_words
from weft.verify.reference_low_bit import bits

INT8: dict[str, Any] = {"optimizer": {"state_dtype": "int8"}}
BF16 = {"master_dtype": "bf16"}
# Rows of 320 are cut in blocks of 256 and 64, which two ranks of tp cut in the middle.
WIDE = {"hidden_size": 320, "intermediate_size": 336, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "dense": ("llama", WIDE, INT8, ("1", "2", "3", "2x2", "tp2", "pp2", "2xtp2")),
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
    "experts": ("qwen3_moe", {}, INT8, ("1", "ep2", "ep2xtp2", "pp2xep2")),
}

# Of `make verify-all`: adapters as wide as blocks, and sizes that no number of ranks divides.
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "adapters": ("qwen3", {}, INT8 | {"lora": {"rank": 64}}, ("1", "2", "tp2", "pp2")),
    "uneven": ("llama_tied", WIDE | {"vocab_size": 130, "intermediate_size": 334}, INT8, ("1", "3", "2x2", "4", "tp2")),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.table) for name in TABLE)])
def test_codes_scales_and_masters_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    family, changes, sections, meshes = (CASES | TABLE)[name]
    saved = same_on_every_mesh(saved_model(family, **changes), sections, meshes, tmp_path)
    coded = sections["optimizer"].get("state_dtype") == "int8"
    assert any(entry.startswith("optimizer/exp_avg_scale/") for entry in saved) is coded


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
    rows = Rows(0, (slice(0, 64), slice(0, 1024)), 64, 1024, 0, 0, 0)
    words = random_words(rows, 1024, random_key(7, "model.w", 3), torch.device("cpu")).flatten().long() & 0xFFFFFFFF
    assert torch.equal(words, bits(random_key(7, "model.w", 3) & 0xFFFFFFFF, 65536))
    ones = torch.stack([(words >> bit & 1).double().mean() for bit in range(32)])
    assert (ones - 0.5).abs().max() < 4 * 0.5 / 256
    halves = torch.stack([words & 0xFFFF, words >> 16]).double()
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 4 / 256
