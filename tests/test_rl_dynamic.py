"""rl.dynamic_sampling in the recipe: groups whose rewards are all equal are replaced, in so many rounds at most."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rl_samples import algorithm, group, rl_config
from weft.recipes import rl as recipe
from weft.recipes.rl import RolloutStep, roll_out
from weft.rl.documents import most_informative
from weft.rl.prompts import PromptStream
from weft.rl.types import Group, Prompt
from weft.rollout.base import Completion, Request, Sampling


class Engine:
    """Answers with the number of the sample."""

    async def generate(self, request: Request) -> list[Completion]:
        return [Completion((number,), (0.0,), "end", ((0, 1),)) for number in range(len(request.seeds))]


class Rewards:
    """A prompt whose index is a multiple of three teaches nothing."""

    async def score(self, samples: Sequence[Any], texts: Sequence[str]) -> None:
        for sample in samples:
            sample.reward = 1.0 if sample.prompt.index % 3 == 0 else float(sample.number)


def trained(monkeypatch: pytest.MonkeyPatch, rounds: int) -> tuple[list[int], RolloutStep, PromptStream]:
    """Indices of the prompts whose groups are trained; twelve prompts, in their order."""
    monkeypatch.setattr(recipe, "completion_texts", lambda samples, _: ["" for _ in samples])
    stream = PromptStream([Prompt(n, 0, (3, 4), "") for n in range(12)], 6, 0, shuffle=False)
    config = rl_config(algorithm(dynamic_sampling=rounds, prompts=6, group_size=2))
    run: Any = SimpleNamespace(config=config, stream=stream, rewards=Rewards(), episodes=None, tokenizer=None)
    step = RolloutStep(1)
    engine: Any = Engine()
    groups = asyncio.run(roll_out(run, engine, Sampling(4), step))
    return [made.prompt.index for made in groups], step, stream


def test_groups_without_signal_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 and 3 are replaced by 6 and 7, and 6 by 8; the stream goes on behind them."""
    assert trained(monkeypatch, 0)[0] == [0, 1, 2, 3, 4, 5]
    assert trained(monkeypatch, 1)[0] == [0, 1, 2, 4, 5, 7]
    found, step, stream = trained(monkeypatch, 5)
    assert found == [1, 2, 4, 5, 7, 8]
    assert step.drawn == stream.taken == 9


def test_what_cannot_be_replaced_is_kept() -> None:
    groups: list[Group] = [group([1.0, 1.0]), group([0.0, 1.0]), group([2.0, 2.0])]
    assert most_informative(groups, 3) == groups
    assert most_informative(groups, 1) == [groups[1]]
    assert most_informative(groups, 2) == groups[:2]
