"""Many agents at once on the embedded engine's pool: each failure costs one episode, and no other is lost."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
from transformers import AutoModelForCausalLM

from tests.rl.test_agents import agents, prompts, session_of
from tests.rl.test_environments import END, TOKENIZER, Scripted
from tests.support.cases import saved_model
from tests.support.local_rl import LocalGroup
from weft.inference.base import SamplingParams
from weft.inference.generate import Generator
from weft.inference.types import SampleGroup
from weft.rl.batch_pool import BatchPool
from weft.rl.rollouts import rollout_group

GOOD = ("follow", "stream", "respond", "again", "leave", "team", "spends")
# Play -> how its error ends.
BAD = {
    "killed": "its process was ended by signal 9",
    "raises": "ValueError: no idea",
    "hangs": "took more than 60 seconds",
}


def played(plays: Sequence[str], at_once: int) -> tuple[list[SampleGroup], float]:
    """(The groups of these plays, seconds). All calls are drawn by one engine, a token a turn."""
    path = saved_model("qwen3", vocab_size=len(TOKENIZER), initializer_range=0.05, max_position_embeddings=4096)
    actors: Any = LocalGroup("engine", [lambda: Generator(AutoModelForCausalLM.from_pretrained(path), 0, TOKENIZER)])
    pool, used = BatchPool(actors), agents("crowd", agents_at_once=at_once, agent_timeout=60.0)
    pool.method, pool.turn = "advance", 0.0
    sampling = SamplingParams(max_new_tokens=400, ends=(END,))

    async def run() -> tuple[list[SampleGroup], float]:
        await used.start()
        began = time.perf_counter()
        try:
            calls = (rollout_group(prompt, 1, pool, sampling, used, seed=11) for prompt in prompts(plays))
            groups = list(await asyncio.gather(*calls))
            seconds = time.perf_counter() - began
            await pool._end_unwanted()
            assert not pool._running and not pool._waiting and not used.endpoint._sessions
            return groups, seconds
        finally:
            await used.close()

    try:
        return asyncio.run(run())
    finally:
        actors.end()


def check(plays: Sequence[str], groups: Sequence[SampleGroup]) -> None:
    """Every episode is there: trained on what its agent heard, or failed as it was meant to."""
    assert len(groups) == len(plays)
    for play, group in zip(plays, groups, strict=True):
        notes = group.samples[0].notes
        assert notes.get("error", "").endswith(BAD.get(play, "")) and bool(notes.get("error")) == (play in BAD), notes
        if play == "spends":
            assert (group.samples[0].rewards, notes["calls_made"], notes["calls"]) == ({"agent": 1.0}, 8, 8)
        elif play not in BAD:
            drawn = [token for sample in group.samples for token in sample.tokens[sample.sampled].tolist()]
            assert sorted(drawn) == sorted(token for _, ids, _ in notes["heard"] for token in ids), play
            assert all(sample.rewards == {"agent": 1.0} for sample in group.samples)


def test_eight_agents_at_once() -> None:
    plays = [*GOOD[:-1], "killed", "raises"]
    check(plays, played(plays, 8)[0])


@pytest.mark.table
def test_fifty_agents_at_once() -> None:
    """150 episodes, of which three of each ten fail; -s prints how many there are a second."""
    plays = [[*GOOD, *BAD][number % 10] for number in range(150)]
    groups, seconds = played(plays, 50)
    check(plays, groups)
    calls = sum(group.samples[0].notes["calls"] for group in groups)
    sys.stderr.write(
        f"{len(plays)} episodes, {calls} calls in {seconds:.1f} s: {len(plays) / seconds:.2f} episodes/s\n"
    )


@pytest.mark.table
def test_what_the_endpoint_costs() -> None:
    """Seconds of processor time of a call in the controller, without an engine, by a connection that stays open; -s
    prints them."""

    def ask(base_url: str, body: str, times: int) -> None:
        url = urlsplit(base_url)
        connection = http.client.HTTPConnection(str(url.hostname), url.port)
        for _ in range(times):
            connection.request("POST", f"{url.path}/chat/completions", body, {"Authorization": "Bearer k"})
            response = connection.getresponse()
            response.read()
            assert response.status == 200
        connection.close()

    async def cost(messages: int, times: int = 200) -> float:
        served = agents(max_turns=10 * times)
        await served.start()
        turns = [{"role": ("user", "assistant")[n % 2], "content": "word " * 10} for n in range(messages)]
        body = json.dumps({"model": "policy", "messages": turns})
        try:
            with served.endpoint.serving("k", session_of(served, Scripted("four"))):
                await asyncio.to_thread(ask, served.endpoint.base_url, body, 5)
                began = time.thread_time()
                await asyncio.to_thread(ask, served.endpoint.base_url, body, times)
                return (time.thread_time() - began) / times
        finally:
            await served.close()

    costs = {messages: asyncio.run(cost(messages)) for messages in (1, 21)}
    sys.stderr.write(" ".join(f"{n} messages: {1e3 * seconds:.2f} ms a call." for n, seconds in costs.items()) + "\n")
    assert costs[1] < 0.05
