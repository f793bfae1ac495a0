"""Prompts with images on a real vLLM server: tokens and logprobs are those of weft's own generation."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision", reason="vLLM's vision models import it", exc_type=Exception)

from tests.inference.test_generate_images import ROWS
from tests.support.vision_zoo import vision_config, vision_folder, vision_tokenizer
from weft.config.schema import DataConfig
from weft.data.encode import Encoding
from weft.data.image_opener import ImageOpener
from weft.data.images import read_images
from weft.errors import UserError
from weft.inference.base import Request, SamplingParams
from weft.inference.generate import Generator
from weft.inference.vllm.engine import VllmEngine
from weft.inference.vllm.interpreter import find
from weft.inference.vllm.server import Settings
from weft.models import hf
from weft.rl.prompts import PromptRules, read_prompts

# Heads of 32, which vLLM needs on CPU.
WIDE = dict(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
)  # fmt: skip


def test_images(tmp_path: Path) -> None:
    path, tokenizer = vision_folder(tmp_path / "model", "qwen2_5_vl"), vision_tokenizer("qwen2_5_vl")
    config: Any = vision_config("qwen2_5_vl", tokenizer, **WIDE)
    config.vision_config.out_hidden_size = 128
    model = hf.build_random(config, dtype=torch.float32, attention="eager", seed=0)
    model.save_pretrained(path)
    images = read_images(path, tokenizer, DataConfig(path="unused"))
    prompts = list(read_prompts(ROWS, tokenizer, Encoding(), PromptRules(1000), images))
    generator = Generator(model, opener=ImageOpener(lambda: images))
    requests = [Request(str(n), p.tokens, (1, 2), SamplingParams(8, 0.0), p.images) for n, p in enumerate(prompts)]
    position = requests[0].tokens.index(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    longer = (*requests[0].tokens[:position], requests[0].tokens[position], *requests[0].tokens[position:])
    wrong = Request("wrong", longer, (1,), SamplingParams(2), requests[0].images)
    settings = Settings(
        interpreter=find(sys.executable), name="vllm-0", max_tokens=256, dtype="float32", model=path,
        folder=tmp_path, variables={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip

    async def answered() -> list[Any]:
        engine = await VllmEngine.start(settings, version=1)
        try:
            answers = await asyncio.gather(*(engine.generate(request) for request in requests))
            with pytest.raises(
                UserError, match="vLLM's processor makes 4 tokens of its images, but the trainer's makes 5"
            ):
                await engine.generate(wrong)
            return answers
        finally:
            await engine.close()

    for engine_group, own_group in zip(asyncio.run(answered()), generator.generate(requests), strict=True):
        for actual, expected in zip(engine_group, own_group, strict=True):
            assert actual.tokens == expected.tokens
            assert (torch.tensor(actual.logprobs) - torch.tensor(expected.logprobs)).abs().max() < 1e-3
