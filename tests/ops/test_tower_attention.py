"""Attention of vision towers: each image, or window, by itself, in one call for all of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.vision_zoo import vision_config, vision_tokenizer
from weft.models import hf
from weft.ops import tower_attention
from weft.ops.tower_attention import attend_in_tower

LENGTHS = [[5], [4, 4, 4], [6, 2, 6, 1, 2, 6], [3, 8, 1]]


def expected(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """[1, N, H, D], by a mask over all."""
    image = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(image[:, None] != image, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_image_sees_itself_both_ways(lengths: list[int]) -> None:
    """Outputs and gradients."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 3, sum(lengths), 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    actual, _ = attend_in_tower(nn.Module(), *inputs, cu_seq_lens_q=bounds, max_length_q=max(lengths), scaling=0.3)
    reference = expected(*inputs, lengths, 0.3)
    torch.testing.assert_close(actual, reference)
    weights = torch.randn_like(reference)
    gradients, reference_gradients = (torch.autograd.grad((out * weights).sum(), inputs) for out in (actual, reference))
    for gradient, reference_gradient in zip(gradients, reference_gradients, strict=True):
        torch.testing.assert_close(gradient, reference_gradient)


def test_images_without_bounds_are_an_error() -> None:
    tensors = [torch.zeros(1, 1, 4, 8) for _ in range(3)]
    with pytest.raises(RuntimeError, match="bounds of images did not reach attention"):
        attend_in_tower(nn.Module(), *tensors)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5"])
def test_towers_are_called_with_the_bounds_of_their_images(family: str) -> None:
    """Features are those of transformers' loop, by one batch for each length; rl.on_policy=exact keeps the loop."""
    hf.register_kernels()
    config = vision_config(family, vision_tokenizer(family))
    model: Any = hf.build_random(config, dtype=torch.float32, attention="weft_auto", seed=0)
    patch = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
    grids = torch.tensor([[1, 4, 6], [1, 2, 2], [1, 4, 6], [1, 8, 4]])
    pixels = torch.randn(int(grids.prod(1).sum()), patch)
    calls, original = list[list[int]](), tower_attention._alike_together

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments[3])
        return original(*arguments)

    def features() -> Tensor:
        features_of_images = model.model.get_image_features(pixels, grids, return_dict=True).pooler_output
        return (
            torch.cat(list(features_of_images)) if isinstance(features_of_images, list | tuple) else features_of_images
        )

    with mock.patch.object(tower_attention, "_alike_together", counted), torch.no_grad():
        actual = features()
        assert len(calls) == config.vision_config.depth
        assert all(sum(lengths) == len(pixels) and len(lengths) >= len(grids) for lengths in calls)
        hf.set_attention(model, "weft_exact")
        torch.testing.assert_close(actual, features(), rtol=0, atol=2e-6)
    assert len(calls) == config.vision_config.depth


def test_other_towers_keep_transformers_attention() -> None:
    hf.register_kernels()
    for family in ("gemma3", "llava"):
        config = vision_config(family, vision_tokenizer(family))
        hf.build_random(config, dtype=torch.float32, attention="weft_auto", seed=0)
        assert config.vision_config._attn_implementation == "sdpa"
