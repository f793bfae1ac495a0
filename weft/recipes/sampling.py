"""Answers to eval.prompts during training, recorded in RUN/samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from weft.config.schema import SftConfig
from weft.data.image_opener import ImageOpener
from weft.data.images import Images
from weft.data.prompts import EvalPrompt
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.inference.base import Request, SamplingParams, seed_of
from weft.inference.embedded import EmbeddedEngine
from weft.launch import flight
from weft.observe.folder import SAMPLES
from weft.terminal import byte_count

_PRINTED = 3  # number of answers that are printed in an evaluation
_TOKENS = 8_192  # capacity of the copy's KV cache, which needs memory in addition to the training state
_WIDTH = 100  # characters of a prompt, and of an answer, that are printed


@dataclass(frozen=True)
class EvalPrompts:
    """The prompts of eval.prompts. ends: ids of tokens that end answers. images: the image reader of a vision
    model."""

    prompts: Sequence[EvalPrompt]
    tokenizer: PreTrainedTokenizerBase
    ends: Sequence[int] = ()
    images: Images | None = None


class Sampler:
    """Samples the model's answers. The prompts are distributed over the ranks. A rank with prompts has a full copy of
    the model while it answers."""

    def __init__(self, config: SftConfig, engine: Engine, questions: EvalPrompts, folder: Path) -> None:
        """Raises UserError if a copy of the model does not fit into memory in addition to the training state."""
        self.config, self.ranks, self.questions = config.eval, engine.ranks, questions
        self.seed, self.path = config.train.seed, folder / SAMPLES
        self.ends = tuple(questions.ends)
        self.placeholders = () if questions.images is None else questions.images.placeholders
        self.embedded = EmbeddedEngine(engine, max_tokens=_TOKENS, opener=ImageOpener(lambda: questions.images))
        needed, room = self.embedded.bytes, engine.room - engine.memory.resident
        if needed > room:
            raise UserError(
                f"eval.prompts: each rank that answers needs a copy of the model, {byte_count(needed)}, but only "
                f"{byte_count(max(0, room))} are free in addition to the training state. "
                f"{self.embedded.smaller()}Remove eval.prompts."
            )

    def __call__(self, step: int) -> list[str]:
        """Answers all prompts and records the answers. Returns lines to print. Collective."""
        flight.enter("sample")
        numbers = range(self.ranks.rank, len(self.questions.prompts), self.ranks.world)
        self.embedded.wake(generates=bool(numbers))
        answered = self._answer(numbers, step) if numbers else {}
        self.embedded.sleep()
        parts: list[dict[int, dict[str, Any]]] = [{} for _ in range(self.ranks.world)]
        dist.all_gather_object(parts, answered, group=self.ranks.group)
        lines = [line for _, line in sorted(item for part in parts for item in part.items())]
        if self.ranks.is_first:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(line) + "\n" for line in lines)
        news = []
        for line in lines[:_PRINTED]:
            answer = _short(line["answer"] if line["finished"] else line["answer"] + " ...")
            news.append(f"sample   {_short(line['prompt'])} -> {answer}")
        return [*news, f"sample   {len(lines) - _PRINTED} more in {SAMPLES}"] if len(lines) > _PRINTED else news

    def _answer(self, numbers: Sequence[int], step: int) -> dict[int, dict[str, Any]]:
        """Number of each prompt in `numbers` -> its line of samples.jsonl."""
        # A sampled image token ends an answer, because it has no image, and a forward of the row would fail.
        ends = (*self.ends, *self.placeholders)
        sampling = SamplingParams(self.config.max_new_tokens, self.config.temperature, ends=ends)
        prompts = {number: self.questions.prompts[number] for number in numbers}
        # Training does not use these seeds, so an evaluation does not change the training run.
        requests = [
            Request(
                f"eval.prompts {number}",
                prompt.tokens,
                (seed_of(self.seed, f"samples:{step}:{number}", 0),),
                sampling,
                prompt.images,
            )
            for number, prompt in prompts.items()
        ]
        answered = {}
        for (number, prompt), (completion,) in zip(prompts.items(), self.embedded.generate(requests), strict=True):
            ended = completion.finish == "end"
            finished = ended and completion.tokens[-1] not in self.placeholders
            tokens = completion.tokens[:-1] if ended else completion.tokens
            answered[number] = {
                "step": step,
                "prompt": prompt.text,
                "answer": self.questions.tokenizer.decode(tokens, skip_special_tokens=True),
                "tokens": len(tokens),
                "finished": finished,
            }
            if prompt.images is not None:
                answered[number]["images"] = prompt.images.names
        return answered


def _short(text: str) -> str:
    """The text on one line of at most _WIDTH characters, without terminal control characters."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
