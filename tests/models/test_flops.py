"""FLOPs and peaks, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.vision_zoo import vision_config, vision_tokenizer
from tests.support.zoo import tiny_config
from weft.engine.batch.media import Media
from weft.launch.accelerators import ASSUMABLE, CARDS, limits_of
from weft.launch.machine import ACCELERATORS
from weft.models import hf
from weft.models.cost import flop_facts
from weft.models.flops import (
    AttentionFacts,
    FlopFacts,
    Throughput,
    attention_pairs,
    document_flops,
    model_flops,
    peak_flops,
    peak_of,
    tower_flops,
)
from weft.models.train_module import TrainModule
from weft.models.vision import find_vision, tower_layers
from weft.recipes.plan.machines import machine_of


def test_dense_model() -> None:
    # Llama-2 7B: 32 layers of 4 x 4096^2 + 3 x 4096 x 11008 weights, a head of 32000 x 4096.
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096
    assert weights == 6_607_077_376
    facts = FlopFacts(dense=weights, attention=(AttentionFacts(32, 128),) * 32)
    linear, quadratic = model_flops(facts, causal=False)
    assert linear == 39_642_464_256
    assert quadratic == 12 * 32 * 32 * 128  # 12 x layers x heads x width
    assert model_flops(facts)[1] == quadratic / 2
    assert document_flops(facts, 4096, causal=False) == linear * 4096 + quadratic * 4096**2
    assert document_flops(facts, 4096) == linear * 4096 + quadratic * 4096**2 / 2


def test_only_the_experts_of_a_token_count() -> None:
    facts = FlopFacts(dense=1000, expert=6400, experts=64, experts_per_token=4)
    assert model_flops(facts) == (6.0 * (1000 + 400), 0.0)


def test_a_frozen_weight_costs_no_gradient_of_its_own() -> None:
    assert model_flops(FlopFacts(dense=1000, frozen=True, trained=50.0)) == (4.0 * 1000 + 6.0 * 50, 0.0)


def test_unequal_layers() -> None:
    attention = (AttentionFacts(heads=2, width=10), AttentionFacts(heads=3, width=(192 + 128) / 2))
    assert model_flops(FlopFacts(0, attention), causal=False)[1] == 12 * (20 + 480)


@pytest.mark.parametrize(
    ("length", "window", "causal", "pairs"),
    [
        (8, None, True, 32.0),
        (8, None, False, 64.0),
        (8, 8, True, 32.0),
        (8, 100, True, 32.0),
        (8, 2, True, 14.0),  # 2 x 8 - 2^2 / 2
        (8, 2, False, 28.0),
        (0, 2, True, 0.0),
    ],
)
def test_attention_pairs(length: int, window: int | None, causal: bool, pairs: float) -> None:
    assert attention_pairs(length, window, causal) == pairs


def test_heads_of_latent_attention_are_as_wide_as_keys_and_values_on_average() -> None:
    """Of MLA's configs head_dim, where it is, is the width of the rotated part."""
    config: Any = tiny_config("deepseek_v3")
    module = TrainModule(hf.build_random(config, dtype=torch.float32, attention="eager", seed=0))
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (16, 8, 16)
    assert {facts.width for facts in flop_facts(module).attention} == {(16 + 8 + 16) / 2}


def test_windowed_layers_cost_less() -> None:
    facts = FlopFacts(0, (AttentionFacts(1, 1), AttentionFacts(1, 1, window=2)))
    assert document_flops(facts, 8) == 12 * (32 + 14)
    assert document_flops(facts, 2) == model_flops(facts)[1] * 4


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("Tesla T4", 65e12),
        ("AMD Instinct MI300A", 980.6e12),
        ("Quadro RTX 6000", None),
        ("some other device", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    actual = peak_of(name)
    assert actual is None if peak is None else actual == pytest.approx(peak)


def test_every_accelerator_that_a_plan_assumes_is_of_the_one_table() -> None:
    """mfu of a run and the time of a plan are shares of one peak."""
    for name, accelerator in ACCELERATORS.items():
        machine = machine_of(accelerator)
        card, rates = ASSUMABLE[name]
        assert machine.peak == card.peak * 1e12 and machine.memory_rate == rates.memory * 1e9
        assert card.source and accelerator.capability == card.capability
    assert len(ASSUMABLE) == len([card for card in CARDS if card.name])


def test_old_and_foreign_cards_are_named() -> None:
    assert limits_of((9, 0), True) == limits_of((8, 0), True) == ""
    assert limits_of((7, 0), True).endswith("bf16 is emulated, which is slow: set fsdp.param_dtype=fp16")
    assert limits_of((7, 5), False) == (
        "compute capability 7.5: weft uses the attention kernel per_document, because flash attention needs 8.0"
    )
    assert limits_of(None, True).startswith("weft does not support AMD accelerators")


def test_the_peak_of_a_cpu_is_unknown() -> None:
    assert peak_flops(torch.device("cpu")) is None
    assert Throughput(ranks=2, peak=None).mfu(1e12, 1.0) is None


def test_share_of_the_peak() -> None:
    assert Throughput(ranks=4, peak=100e12).mfu(flops=800e12, seconds=4.0) == 0.5


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "gemma3"])
def test_the_towers_blocks_are_counted_with_their_attention(family: str) -> None:
    """A forward of them, counted by torch; Qwen2.5-VL's first layer has windows of 4 x 4 patches."""
    model = hf.build_random(
        vision_config(family, vision_tokenizer(family)), dtype=torch.float32, attention="eager", seed=0
    )
    module = TrainModule(model)
    vision, facts = find_vision(module.base, module.facts), flop_facts(module)
    assert vision is not None
    inputs = dict(vision.smallest)
    if "image_grid_thw" in inputs:
        grids = torch.tensor([[1, 8, 8], [1, 4, 8]])
        inputs = {"pixel_values": torch.randn(96, inputs["pixel_values"].shape[1]), "image_grid_thw": grids}
    media = Media.from_inputs(inputs, vision.patches(inputs))
    counted, of_blocks = FlopCounterMode(display=False), 0
    with counted, torch.no_grad():
        module.base.get_image_features(**inputs, return_dict=True)  # type: ignore[operator]
    for name, _ in tower_layers(module.base, module.facts):
        last = "." + ".".join(name.split(".")[-2:])  # torch begins names where the forward began
        of_blocks += sum(
            next(
                counts for module_name, counts in counted.get_flop_counts().items() if module_name.endswith(last)
            ).values()
        )
    flops, _ = tower_flops(facts, media.patches, media.pairs)
    assert of_blocks == flops / 3
    assert tower_flops(replace(facts, tower_frozen=True), media.patches, media.pairs)[0] == of_blocks
