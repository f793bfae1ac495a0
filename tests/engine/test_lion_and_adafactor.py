"""optimizer.name=lion and adafactor: the numbers of plain optimizers over whole tensors, on every mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Adafactor, AutoModelForCausalLM

from tests.support.cases import describe, pairs, parity, saved_model, world_of
from tests.support.equal_gradients import gradient, same_on_every_mesh
from tests.support.pool import run
from weft.config.schema import OptimizerConfig
from weft.engine.optim.optimizer import build_optimizer, state_bytes

LION: dict[str, Any] = {"optimizer": {"name": "lion"}}
ADAFACTOR: dict[str, Any] = {"optimizer": {"name": "adafactor"}}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("family", "changes", "sections", "meshes"),
    pairs(
        [
            ("llama", {}, ADAFACTOR, ("1", "2", "2x2", "tp2")),
            ("qwen3_moe", TIED, ADAFACTOR, ("1", "ep2")),
            ("qwen3_moe", TIED, LION, ("1", "ep2xtp2")),
        ],
        [
            ("llama", {}, LION, ("1", "2", "2x2", "tp2")),
            ("gpt2", {}, ADAFACTOR, ("1", "3", "tp2", "pp2")),
            ("llama_tied", {}, ADAFACTOR, ("1", "pp2", "cp2")),
            ("qwen3_moe", {}, ADAFACTOR, ("1", "ep2xtp2", "pp2xep2")),
        ],
    ),
)
def test_three_steps_of_a_model_are_those_of_one_process(
    family: str, changes: dict[str, Any], sections: dict[str, Any], meshes: tuple[str, ...], tmp_path: Path
) -> None:
    """Weights and state are bitwise those of a mesh of one rank, also after a resume from another mesh."""
    path = saved_model(family, **changes)
    saved = same_on_every_mesh(path, sections, meshes, tmp_path)
    weights = {name.removeprefix("weights/"): x for name, x in saved.items() if name.startswith("weights/")}
    for name, expected in plain_weights(path, list(weights), sections["optimizer"]["name"]).items():
        moved = 1e-2 * (1 + 1 / 2 + 1 / 3)
        assert (weights[name] - expected).abs().max() <= 1e-5 * max(moved, float(expected.abs().max())), name


def plain_weights(path: str, names: list[str], optimizer: str) -> dict[str, torch.Tensor]:
    """The weights after three steps of a plain optimizer over whole tensors. names: weft's."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = {
        name: next(
            torch.nn.Parameter(x.clone())
            for n, x in parameters.items()
            if n.endswith(name.removeprefix("base.").removeprefix("head."))
        )
        for name in names
    }
    decayed = [
        {"params": [x], "weight_decay": 0.1 * (x.ndim > 1 and "bias" not in name)} for name, x in weights.items()
    ]
    adafactor = Adafactor(decayed, lr=1.0, scale_parameter=False, relative_step=False)
    momenta = {name: torch.zeros_like(x) for name, x in weights.items()}
    for step in range(1, 4):
        rate = 1e-2 / step
        for group, (name, x) in zip(decayed, weights.items(), strict=True):
            x.grad = gradient(name, tuple(x.shape), step)
            if optimizer == "lion":
                sign = (0.9 * momenta[name] + 0.1 * x.grad).sign()
                x.data = x.data * (1 - rate * group["weight_decay"]) - rate * sign
                momenta[name] = 0.95 * momenta[name] + 0.05 * x.grad
        if optimizer == "adafactor":
            for group in adafactor.param_groups:
                group["lr"] = rate
            adafactor.step()
    return {name: x.detach() for name, x in weights.items()}


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    pairs(
        [("qwen3_moe", "ep2", ADAFACTOR)],
        [("llama", "2xtp2", ADAFACTOR), ("qwen3", "2", ADAFACTOR | {"lora": {"rank": 4}}), ("llama", "2", LION)],
    ),
)
def test_training_is_that_of_one_process(family: str, mesh: str, sections: dict[str, Any]) -> None:
    verdict = run(world_of(mesh), parity, saved_model(family), mesh, sections)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize(("keys", "size"), [({"name": "lion"}, 4), ({"name": "lion", "state_dtype": "bf16"}, 2)])
def test_lion_keeps_one_moment(keys: dict[str, Any], size: int) -> None:
    assert bytes_of(keys, (64, 96)) == size * 64 * 96


def test_adafactor_keeps_rows_columns_and_vectors() -> None:
    assert bytes_of({"name": "adafactor"}, (64, 96)) == 4 * (64 + 96)
    assert bytes_of({"name": "adafactor"}, (3, 64, 96)) == 4 * 3 * (64 + 96)
    assert bytes_of({"name": "adafactor"}, (96,)) == 4 * 96


def bytes_of(keys: dict[str, Any], shape: tuple[int, ...]) -> int:
    """The bytes of the state of one tensor after a step, which are those of the planner."""
    weight, config = torch.nn.Parameter(torch.randn(shape)), OptimizerConfig(**keys)
    optimizer = build_optimizer([("w", weight)], config)
    weight.grad = torch.randn(shape)
    optimizer.step()
    size = sum(value.nbytes for key, value in optimizer.state[weight].items() if key != "step")
    assert size == state_bytes(config, torch.float32, None, {})("w", shape, weight.numel())
    return size
