"""Samples on their way, to rewards, to trainers and to files: what arrives is what was sent."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import numpy as np
import torch

from tests.support.rl_samples import algorithm, rl_config, sample, sharing
from weft.inference.records import has_routes, read_rollouts, write_rollouts
from weft.inference.types import Prompt, Sample, SampleGroup, samples_of
from weft.launch.summary import Phases
from weft.rl.documents import build_documents
from weft.rl.rollouts import rewarded_groups
from weft.rl.serialization import _BY_TOKEN, SampleBatch


def samples() -> list[Sample]:
    """Some with gaps, some without an array, one whose routes are recorded."""
    drawn = [
        sample(
            0, 3, 1.0, gaps=[1], old_logprobs=[-1.0, 0.0, -0.5], advantages=[0.5, 0.0, 0.25], correction=[1.0, 0.0, 2.0]
        ),
        sample(1, 1, None, old_logprobs=[-2.0]),
        sample(
            2, 2, 0.0, index=1, old_logprobs=[-1.0, -1.5], advantages=[1.0, 2.0], returns=[0.1, 0.2], values=[0.3, 0.4]
        ),
    ]
    drawn[0].routes = np.arange(5 * 2 * 2, dtype=np.int16).reshape(5, 2, 2)
    drawn[2].routes = np.arange(5 * 2 * 2, dtype=np.int16).reshape(5, 2, 2) + 7
    drawn[1].finish, drawn[2].trained = "length", False
    drawn[0].text, drawn[0].notes = "not needed", {"as": "little"}
    return drawn


def test_what_arrives_is_what_trainers_read() -> None:
    sent = samples()
    received = pickle.loads(pickle.dumps(SampleBatch(sent)))
    for sent_item, received_item in zip(sent, received, strict=True):
        assert (sent_item.id, sent_item.finish, sent_item.reward, sent_item.trained) == (
            received_item.id, received_item.finish, received_item.reward, received_item.trained,
        )  # fmt: skip
        assert (len(sent_item), sent_item.length, sent_item.counts) == (
            len(received_item),
            received_item.length,
            received_item.counts,
        )
        for name in (*_BY_TOKEN, "routes"):
            np.testing.assert_equal(getattr(received_item, name), getattr(sent_item, name))
    config = rl_config(algorithm("grpo"))
    expected, actual = build_documents(sent, config), build_documents(received, config)
    assert len(expected) == len(actual) == 1 and expected[0].source == actual[0].source
    assert torch.equal(expected[0].tokens, actual[0].tokens) and torch.equal(expected[0].weights, actual[0].weights)
    assert expected[0].arrays.keys() == actual[0].arrays.keys()
    assert expected[0].routes is not None and torch.equal(expected[0].routes, actual[0].routes)
    assert len(pickle.dumps(SampleBatch(sent))) < len(pickle.dumps(sent))


def test_a_group_is_rewarded_while_others_are_generated() -> None:
    """The second prompt takes longest to generate, and its reward no longer than the first's."""
    events: list[str] = []
    phases = Phases()

    async def generate(prompt: Prompt) -> SampleGroup:
        await asyncio.sleep(0.05 if prompt.index == 0 else 0.3)
        events.append(f"generated {prompt.index}")
        return SampleGroup(prompt, [])

    async def reward(group: SampleGroup) -> None:
        await asyncio.sleep(0.1)
        events.append(f"rewarded {group.prompt.index}")

    prompts = [Prompt(index, 0, (1,), "") for index in range(2)]
    groups = asyncio.run(rewarded_groups(prompts, generate, reward, phases, sharing(object())))
    assert [group.prompt.index for group in groups] == [0, 1]
    assert events == ["generated 0", "rewarded 0", "generated 1", "rewarded 1"]
    assert phases.seconds["generate"] >= 0.3 and 0.1 <= phases.seconds["reward"] < 0.3


def test_routes_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    drawn = samples()
    drawn[1].routes = np.full((2, 2, 2), -1, np.int16)
    groups = [SampleGroup(drawn[0].prompt, drawn[:2]), SampleGroup(drawn[2].prompt, drawn[2:])]
    path = write_rollouts(tmp_path, 1, groups, routes=True)
    assert has_routes(path)
    for original, stored in zip(drawn, samples_of(read_rollouts(path)), strict=True):
        np.testing.assert_array_equal(stored.routes, original.routes)
        assert stored.routes.dtype == np.int16 and stored.text == original.text
    drawn[2].routes[0, 0, 0] = 300
    assert samples_of(read_rollouts(write_rollouts(tmp_path, 2, groups, routes=True)))[2].routes[0, 0, 0] == 300
    path = write_rollouts(tmp_path, 3, groups)
    assert not has_routes(path) and all(sample.routes is None for sample in samples_of(read_rollouts(path)))
