"""RMSNorm as torch's fused kernel: which classes are taken, and that values and gradients stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from tests.support.cases import describe, open_engine, parity, saved_model
from tests.support.pool import run
from weft.engine.builder import fuses_norms
from weft.models.fused_norms import FusedNorm, fuse_norms


class TwiceRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.0001


class OtherEpsilonRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance.clamp(min=self.variance_epsilon))


class DetachedRMSNorm(LlamaRMSNorm):
    """The same values, other gradients."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states * scale.detach()


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, DeepseekV3RMSNorm])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_classes_that_are_taken(kind: Any, device: str) -> None:
    with torch.device(device):
        holder = nn.ModuleList([kind(96), kind(64, eps=1e-5)])
    assert fuse_norms(holder) == {kind.__name__}
    assert [name for name, _ in holder.named_parameters()] == ["0.weight", "1.weight"]
    if device == "meta":
        return
    for norm, epsilon in zip(holder, (1e-6, 1e-5), strict=True):
        plain = kind(len(norm.weight), eps=epsilon)
        with torch.no_grad():
            plain.weight.copy_(norm.weight.normal_())
        results = []
        for module in (plain, norm):
            x = torch.randn(5, len(norm.weight), generator=torch.Generator().manual_seed(1)).mul_(0.01)
            out = module(x.requires_grad_())
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, module.weight])])
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)
        out = norm(torch.randn(2, len(norm.weight)).bfloat16())  # fp32 weights: as the stock class promotes
        assert out.dtype == plain(torch.randn(2, len(norm.weight)).bfloat16()).dtype


@pytest.mark.parametrize(
    "kind",
    [Gemma3RMSNorm, Qwen3NextRMSNorm, Qwen3NextRMSNormGated, TwiceRMSNorm, OtherEpsilonRMSNorm, DetachedRMSNorm,
     nn.LayerNorm],
)  # fmt: skip
def test_classes_of_another_formula_stay(kind: Any) -> None:
    holder = nn.ModuleList([kind(64)])
    assert not fuse_norms(holder) and type(holder[0]) is kind


@pytest.mark.parametrize("mesh", ["1", "tp2"])
def test_parity(mesh: str) -> None:
    verdict = run(2 if mesh == "tp2" else 1, parity, saved_model("qwen3"), mesh, {"model": {"fused_norms": True}})[0]
    assert verdict.passed, describe(verdict)


def fused(path: str, model: dict[str, Any]) -> set[bool]:
    engine = open_engine(path, "1", model=model)
    assert fuses_norms(engine.config, torch.device("cuda")) == model.get("fused_norms", True)
    norms = [module for module in engine.module.modules() if "RMSNorm" in type(module).__name__]
    return {isinstance(norm, FusedNorm) for norm in norms}


@pytest.mark.covers("model.fused_norms")
def test_where_they_are_fused() -> None:
    path = saved_model("qwen3")
    assert run(1, fused, path, {}) == [{False}]
    assert run(1, fused, path, {"fused_norms": True}) == [{True}]
