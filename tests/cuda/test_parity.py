"""On a device loss, gradients and weights are those of one plain process on the CPU, by `weft verify`'s measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cuda.cases import FP32, kind
from tests.support.cases import describe, open_engine, parity, saved_model
from weft.engine.optim.muon import newton_schulz
from weft.launch.process import Ranks
from weft.verify import harness
from weft.verify.documents import awkward_steps

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3")  # qwen3's head is tied
SWITCHES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "offloaded": ("llama", {"fsdp": {"cpu_offload": True}}),
    "recomputed": ("qwen3_moe", {"model": {"recompute": "full"}}),
    "fixed rows": ("llama", {"step": {"padding": "fixed"}}),
    "adapters": ("qwen3", {"lora": {"rank": 4}}),
    "selective": ("qwen3_moe", {"model": {"recompute": "selective"}}),
    "inputs on the host": ("llama", {"model": {"recompute": "full", "offload_activations": "inputs"}}),
    "kept results on the host": ("llama", {"model": {"recompute": "selective", "offload_activations": "kept"}}),
    "tiles": ("llama", {"model": {"tiled_mlp": 16}}),
    "update on the host": ("llama", {"fsdp": {"cpu_offload": "optimizer"}}),
    "nf4": ("qwen3", {"lora": {"rank": 4, "base": "nf4"}}),
    "int8": ("qwen3", {"lora": {"rank": 4, "base": "int8"}}),
    "fp8": ("qwen3", {"lora": {"rank": 4, "base": "fp8"}}),
    "dora": ("qwen3", {"lora": {"rank": 4, "dora": True}}),
    "8-bit states": ("qwen3", {"optimizer": {"state_dtype": "int8"}}),
}


def check(family: str, device: torch.device, sections: dict[str, dict[str, Any]]) -> None:
    exact = {**sections, "fsdp": {**FP32["fsdp"], **sections.get("fsdp", {})}}
    verdict = parity(saved_model(family), "1", exact, kind(device))
    assert verdict is not None
    for figure in verdict.figures:
        print(f"{family}: {figure.name} {figure.value:.1e} (at most {figure.tolerance:.1e}) {figure.note}")
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_the_reference(family: str, device: torch.device, ranks: Ranks) -> None:
    check(family, device, {})


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str, device: torch.device, ranks: Ranks) -> None:
    family, sections = SWITCHES[name]
    check(family, device, sections)


def test_muon_is_the_references_in_fp32(device: torch.device, ranks: Ranks) -> None:
    """`auto` orthogonalises in bf16 on a device, whose rounding is no part of the promise."""
    path = saved_model("qwen3_moe")
    optimizer = {"name": "muon", "muon_dtype": "fp32"}
    engine = open_engine(path, "1", device=kind(device), optimizer=optimizer, **FP32)
    verdict = harness.verify(engine, path, awkward_steps(128), [1e-3] * 3)
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize("shape", [(64, 160), (160, 64)])
def test_matrices_orthogonalised_together_in_bf16_are_torchs(shape: tuple[int, int], device: torch.device) -> None:
    matrices = torch.randn(5, *shape, device=device)
    together = newton_schulz(matrices, torch.bfloat16)
    for matrix, result in zip(matrices, together, strict=True):
        step = torch.nn.Parameter(torch.zeros(shape, device=device))
        step.grad = matrix.clone()
        torch.optim.Muon([step], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="original").step()
        expected = -step.detach() / max(1.0, shape[0] / shape[1]) ** 0.5
        assert float((result - expected).norm() / expected.norm()) < 2e-2
