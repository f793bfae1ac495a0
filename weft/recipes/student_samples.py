"""Answers that the student samples during distillation: distill.on_policy (lambda of GKD, arXiv:2306.13649).

The samples depend on train.seed, the step, the document's index in it and the weights, so a resumed run samples the
same answers as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from weft.config.distill_schema import DistillConfig
from weft.data.limits import length_limit
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.inference.base import Request, SamplingParams, seed_of
from weft.inference.embedded import EmbeddedEngine
from weft.launch import flight
from weft.terminal import byte_count

_TOKENS = 8_192  # capacity of the copy's KV cache, which needs memory in addition to the training state


class StudentSampler:
    """Samples the answers of a share of a step's documents from the student's current weights. The prompts are
    distributed over the ranks. A rank with prompts has a full copy of the model while it samples."""

    def __init__(self, config: DistillConfig, engine: Engine, ends: Sequence[int]) -> None:
        """ends: tokens that end an answer. Raises UserError if the student accepts images, or if a copy does not
        fit."""
        self.config, self.engine, self.ends = config, engine, tuple(ends)
        self.limit, _ = length_limit(config.data, config.step.max_tokens_per_device, config.mesh.cp)
        if engine.built.vision is not None:
            raise UserError(
                "distill.on_policy: a student that accepts images does not sample in this version: set "
                "distill.on_policy=0."
            )
        self.embedded = EmbeddedEngine(engine, max_tokens=max(_TOKENS, self.limit))
        needed, room = self.embedded.bytes, engine.room - engine.memory.resident
        if needed > room:
            raise UserError(
                f"distill.on_policy: each rank needs a copy of the student for sampling, {byte_count(needed)}, but "
                f"only {byte_count(max(0, room))} are free in addition to the training state. "
                f"{self.embedded.smaller()}Use more ranks, or set distill.on_policy=0."
            )

    def __call__(self, step: int, documents: Sequence[Document]) -> list[Document]:
        """The documents of the step. In some of them a sampled answer replaces the last answer. Collective."""
        flight.enter("sample")
        ranks, seed, out = self.engine.ranks, self.config.train.seed, list(documents)
        chosen = chosen_of_step(seed, step, len(out), self.config.distill.on_policy)
        local = chosen[ranks.rank :: ranks.world]
        requests = {index: self._request(step, index, out[index]) for index in local}
        requests = {index: request for index, request in requests.items() if request.sampling.max_new_tokens > 0}
        self.embedded.wake(generates=bool(requests))
        completions = self.embedded.generate(list(requests.values())) if requests else []
        self.embedded.sleep()
        sampled = {
            index: (len(request.tokens), [*request.tokens, *completion.tokens])
            for (index, request), (completion,) in zip(requests.items(), completions, strict=True)
        }
        parts: list[dict[int, tuple[int, list[int]]]] = [{} for _ in range(ranks.world)]
        dist.all_gather_object(parts, sampled, group=ranks.group)
        for index, (prompt, tokens) in sorted(item for part in parts for item in part.items()):
            original = out[index]
            weights = torch.cat([torch.zeros(prompt), torch.ones(len(tokens) - prompt)])
            source = f"{original.source} (sampled)"
            out[index] = Document(torch.tensor(tokens), weights, source=source, dataset=original.dataset)
        return out

    def _request(self, step: int, index: int, document: Document) -> Request:
        """The prompt of the document's last answer: the tokens before its last run of trained tokens."""
        distill, is_trained = self.config.distill, document.weights.numpy() != 0
        last = int(np.flatnonzero(is_trained)[-1])
        before = np.flatnonzero(~is_trained[:last])
        prompt = document.tokens[: max(1, int(before[-1]) + 1 if len(before) else 0)].tolist()
        room = min(distill.max_new_tokens, self.limit - len(prompt))
        sampling = SamplingParams(room, distill.sampling_temperature, ends=self.ends)
        seed = seed_of(self.config.train.seed, f"on_policy:{step}:{index}", 0)
        return Request(f"{document.source}, step {step}", tuple(prompt), (seed,), sampling)


def chosen_of_step(seed: int, step: int, documents: int, share: float) -> list[int]:
    """The ascending indices of the documents of a step whose answers are sampled: exactly this share on average. A pure
    function."""
    generator = np.random.default_rng([seed, step])
    count = int(share * documents + generator.random())
    return sorted(generator.permutation(documents)[:count].tolist())
