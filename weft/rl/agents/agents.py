"""Episodes of agents: the endpoint for their calls, and a process for each episode."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding, has_template, read_encoding
from weft.errors import UserError
from weft.inference.base import Generates, SamplingParams
from weft.inference.types import Prompt, Sample
from weft.rl.agents.base import KEY, check_agent
from weft.rl.agents.endpoint import MODEL, Endpoint
from weft.rl.agents.session import Session, samples_of_calls
from weft.rl.chat import ChatRenderer
from weft.rl.environments.pool import EnvironmentPool
from weft.rl.rewards.base import AGENT
from weft.rl.workers import WorkerError

_GRACE = 1.0  # seconds to cancel a late coroutine before its process is killed


@dataclass
class Agents:
    """Settings of all episodes. needs_reward: whether an episode without a reward from its agent has none."""

    config: RlConfig
    pool: EnvironmentPool
    chats: ChatRenderer
    endpoint: Endpoint
    needs_reward: bool

    async def start(self) -> None:
        """Open the endpoint. UserError if it cannot listen."""
        await self.endpoint.start(self.config.rl.agent_host, self.config.rl.agent_port)

    async def close(self) -> None:
        """End all agents, and the endpoint."""
        await self.pool.close()
        await self.endpoint.close()

    async def episode(
        self, prompt: Prompt, number: int, engine: Generates, sampling: SamplingParams, seed: int, label: str = ""
    ) -> list[Sample]:
        """The samples of one episode: a run of the agent on the row of `prompt`. If the agent fails, they are not
        trained, and their notes have the `error`. Arguments are as in weft/rl/rollouts.py."""
        rl, rollout = self.config.rl, self.config.rollout
        session = Session(
            prompt, number, label + prompt.id, engine, sampling, self.chats, seed, rl.max_turns,
            rollout.max_prompt_tokens,
        )  # fmt: skip
        api_key = f"weft-{secrets.token_hex(16)}"
        worker = await self.pool.open()
        try:
            with self.endpoint.serving(api_key, session):
                request = ("run", (_row(prompt), self.endpoint.base_url, api_key, MODEL), rl.agent_timeout)
                running = asyncio.ensure_future(worker.ask(request, rl.agent_timeout + _GRACE))
                await asyncio.wait({running, session.failed}, return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    running.cancel()
                    session.failed.result()
                result, error = await running
        except WorkerError as failure:
            late = f" took more than {rl.agent_timeout:g} seconds"
            result, error = None, late if failure.late else f": its process {failure}"
        finally:
            await worker.end()
        outcomes = [*session.posted, *([result] if result is not None else [])]
        rewards = [entry["reward"] for entry in outcomes if entry["reward"] is not None]
        reward = rewards[-1] if rewards else None
        if error is None and reward is None and self.needs_reward:
            error = " returned no reward: return it, print it as the last line, or post it to base_url/reward"
        samples = samples_of_calls(prompt, number, session.calls, "" if error is None else f"{rl.agent}{error}")
        for sample in samples:
            sample.notes |= {name: note for entry in outcomes for name, note in entry["notes"].items()}
            sample.notes["calls"] = len(session.calls)
            sample.times.ended = time.time()
            if reward is not None:
                sample.rewards = {AGENT: reward}
        return samples


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of the episodes of a rollout step: calls, and documents, in the mean of an episode."""
    episodes = [sample for sample in samples if not sample.branch]
    calls = sum(sample.notes["calls"] for sample in episodes)
    return {"agent/calls": calls / len(episodes), "agent/documents": len(samples) / len(episodes)}


def _row(prompt: Prompt) -> dict[str, Any]:
    """The row of a prompt: its columns, and `prompt` or `messages`."""
    question = {"prompt": prompt.text} if prompt.messages is None else {"messages": [dict(m) for m in prompt.messages]}
    return {**prompt.columns, **question}


def load_agents(
    config: RlConfig, tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None = None, has_images: bool = False
) -> Agents | None:
    """The Agents of a config, or None without rl.agent. UserError for an agent that cannot be started, and for a model
    that cannot answer chats. has_images: whether the model reads images."""
    agent, rl = config.rl.agent, config.rl
    if agent is None:
        return None
    check_agent(agent)
    encoding = encoding or read_encoding(config.data, tokenizer)
    if has_images:
        raise UserError(
            f"{KEY}: agents are not supported with vision models in this version. Set model.path to a text-only model."
        )
    if not has_template(tokenizer, encoding):
        raise UserError(
            f"{KEY}: the tokenizer has no chat template, which agents need. Use the model's chat (instruct) variant, "
            "or set data.chat_template (chatml, or a file)."
        )
    pool = EnvironmentPool(agent, rl.agents_at_once, KEY)
    chats = ChatRenderer(tokenizer, encoding)
    endpoint = Endpoint(chats, config)
    return Agents(config, pool, chats, endpoint, needs_reward=not rl.reward and rl.teacher is None)
