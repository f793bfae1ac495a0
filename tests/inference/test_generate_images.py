"""Generation from prompts with images: greedy tokens are those of transformers, on families whose images differ."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from tests.support.cases import open_engine
from tests.support.pool import run
from tests.support.vision_zoo import FAMILIES, encoded, picture, saved_vision_model, vision_folder, vision_tokenizer
from weft.config.schema import DataConfig, EvalConfig, ModelConfig, SftConfig
from weft.data import prompts as prompts_of
from weft.data.encode import Encoding
from weft.data.image_opener import ImageOpener
from weft.data.images import Images, read_images
from weft.errors import UserError
from weft.inference import generate
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.generate import Generator
from weft.inference.rows import CachedRows, UncachedRows
from weft.inference.token_sampling import SampledTokens, sample_tokens
from weft.inference.types import Prompt
from weft.recipes.sampling import EvalPrompts, Sampler
from weft.rl.prompts import PromptRules, read_prompts

NEW = 8
PICTURES = {"a": picture(24, 40), "b": picture(32, 32, 3), "c": picture(40, 24, 1)}


@cache
def folder(family: str) -> str:
    """A tiny random model with its processor."""
    path = Path(saved_vision_model(family) + "-whole")
    shutil.copytree(saved_vision_model(family), path)
    config = (path / "config.json").read_bytes()
    vision_folder(path, family)
    (path / "config.json").write_bytes(config)
    return str(path)


def question_row(text: str, *names: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": encoded(PICTURES[name])} for name in names]
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


ROWS = [
    question_row("who is it?", "a"),
    question_row("and these?", "b", "c"),
    question_row("a longer text without any picture in it"),
]
NAMES = [("a",), ("b", "c"), ()]


def read(family: str, rows: list[dict[str, Any]], longest: int = 1000, **rules: Any) -> tuple[list[Prompt], Images]:
    tokenizer = vision_tokenizer(family)
    images = read_images(folder(family), tokenizer, DataConfig(path="unused"))
    assert images is not None
    return list(read_prompts(rows, tokenizer, Encoding(), PromptRules(longest, **rules), images)), images


def expected(family: str, images: Images) -> list[list[int]]:
    """Greedy tokens of transformers' generate, from what its processor makes of each prompt."""
    model: Any = getattr(transformers, FAMILIES[family].model).from_pretrained(folder(family), dtype=torch.float32)
    processor, tokenizer = images.processor()._processor, vision_tokenizer(family)
    out = []
    for row, names in zip(ROWS, NAMES, strict=True):
        bare = [{**part, "image": None} for part in row["prompt"][0]["content"]]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": bare}], tokenize=False, add_generation_prompt=True
        )
        keywords = {"images": [PICTURES[name] for name in names]} if names else {}
        inputs = processor(text=[text], return_tensors="pt", **keywords)
        options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        output = model.eval().generate(**inputs, **options)
        out.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return out


def completed(family: str, prompts: list[Prompt], images: Images, count: int = 2, **sampling: Any) -> list[Completion]:
    """The first completion of each prompt; all are asked for together."""
    model: Any = getattr(transformers, FAMILIES[family].model).from_pretrained(folder(family), dtype=torch.float32)
    generator = Generator(model, opener=ImageOpener(lambda: images))
    requests = [
        Request(str(n), prompt.tokens, tuple(range(count)), SamplingParams(NEW, **sampling), prompt.images)
        for n, prompt in enumerate(prompts)
    ]
    return [completions[0] for completions in generator.generate(requests)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    prompts, images = read(family, ROWS)
    completions = completed(family, prompts, images, temperature=0.0)
    assert [list(completion.tokens) for completion in completions] == expected(family, images)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava"])
def test_images_are_seen(family: str) -> None:
    """The same tokens with another image of the same size get other logprobs."""
    prompts, images = read(family, [question_row("what?", "a"), question_row("what?", "a")])
    other_prompts, _ = read(family, [question_row("what?", "c")])
    first, second = (completed(family, [prompt], images)[0].logprobs for prompt in prompts)
    assert first == second
    assert (
        len(other_prompts[0].tokens) != len(prompts[0].tokens)
        or completed(family, other_prompts, images)[0].logprobs != first
    )


def test_with_new_weights_samples_go_on_with_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys and values are computed again, images included."""
    prompts, images = read("qwen2_5_vl", ROWS)
    uninterrupted = completed("qwen2_5_vl", prompts, images, temperature=0.0)
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder("qwen2_5_vl"), dtype=torch.float32
    )
    generator = Generator(model, opener=ImageOpener(lambda: images))
    assert isinstance(generator._rows, CachedRows)
    for n, prompt in enumerate(prompts):
        generator.add(Request(str(n), prompt.tokens, (0,), SamplingParams(NEW, 0.0), prompt.images))
    completions_by_id: dict[str, Completion] = {}
    for step in range(2 * NEW):
        if step == 3:
            generator.renew(1)
        completions_by_id |= (
            {request.id: completions[0] for request, completions in generator.step()} if generator.busy else {}
        )
    assert [completions_by_id[str(n)].tokens for n in range(3)] == [completion.tokens for completion in uninterrupted]


def answer_that_draws_an_image(path: str, questions: EvalPrompts, root: str) -> dict[str, Any]:
    """A line of eval.prompts, by forwards of whole rows; the third token stands for an image."""
    eval_config = EvalConfig(prompts=("unused",), max_new_tokens=NEW)
    config = SftConfig(model=ModelConfig(path=path), data=DataConfig(path="unused"), eval=eval_config)
    assert questions.images is not None
    placeholder, calls = torch.tensor(questions.images.placeholders[:1]), []

    def third(*arguments: Any) -> SampledTokens:
        calls.append(arguments)
        drawn = sample_tokens(*arguments)
        return replace(drawn, tokens_R=placeholder) if len(calls) == 3 else drawn

    with mock.patch.object(generate, "open_rows", UncachedRows), mock.patch.object(generate, "sample_tokens", third):
        Sampler(config, open_engine(path, "1"), questions, Path(root))(1)
    line: dict[str, Any] = json.loads((Path(root) / "samples.jsonl").read_text())
    return line


def test_an_answer_to_eval_prompts_ends_where_it_draws_an_image(tmp_path: Path) -> None:
    """A forward of the whole row would find more places than images."""
    prompts, images = read("qwen2_5_vl", ROWS[:1])
    eval_prompts = [prompts_of.EvalPrompt(prompt.text, prompt.tokens, prompt.images) for prompt in prompts]
    questions = EvalPrompts(eval_prompts, vision_tokenizer("qwen2_5_vl"), (), images)
    (line,) = run(1, answer_that_draws_an_image, folder("qwen2_5_vl"), questions, str(tmp_path))
    assert line["tokens"] == 2 and not line["finished"]


def test_an_engine_of_texts_refuses_images() -> None:
    prompts, _ = read("qwen2_5_vl", ROWS[:1])
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder("qwen2_5_vl"), dtype=torch.float32
    )
    with pytest.raises(UserError, match="has images, but this engine was opened for a text-only model"):
        Generator(model).add(Request("7", prompts[0].tokens, (0,), SamplingParams(2), prompts[0].images))
