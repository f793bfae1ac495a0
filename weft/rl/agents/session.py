"""A session: the calls of one episode's agent, and the samples made from them.

Samples contain the engine's tokens, never tokenised again. If a call repeats an earlier conversation and its answer,
its prompt is the tokens of both, followed by the tokens that the chat template writes for the new messages. Any other
conversation is rendered and tokenised completely.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from weft.errors import UserError
from weft.inference.base import Completion, Generates, Request, SamplingParams, seed_of
from weft.inference.types import Prompt, Sample
from weft.rl.agents.chat_api import ChatAnswer, ChatRequest, parse_answer, same_message
from weft.rl.agents.http_server import HttpError
from weft.rl.chat import ChatRenderer
from weft.rl.trajectory import TrajectoryBuilder


@dataclass(frozen=True, eq=False)
class AgentCall:
    """An answered call. prompt: its tokens. ended: whether the answer has an end token."""

    request: ChatRequest
    prompt: tuple[int, ...]
    completion: Completion
    answer: ChatAnswer
    ended: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.completion.tokens


@dataclass
class Session:
    """The calls of one episode. number: of the sample in its group. name: of the prompt, with the label of an
    evaluation. most_calls, most_prompt: limits on the number of calls, and on the tokens of a prompt.

    calls: the calls with delivered answers, in order. posted: rewards that the agent has posted. failed: the engine's
    error, which ends the run.
    """

    prompt: Prompt
    number: int
    name: str
    engine: Generates
    sampling: SamplingParams
    chats: ChatRenderer
    seed: int
    most_calls: int
    most_prompt: int
    calls: list[AgentCall] = field(default_factory=list)
    posted: list[Mapping[str, Any]] = field(default_factory=list)
    failed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _repeats: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _started: int = 0

    async def answer(self, request: ChatRequest, retry: bool = False) -> AgentCall:
        """Answer a call, and add it to `calls`. retry: whether the client repeats a call; it then gets the same answer
        again. HttpError if it cannot be answered."""
        prompt = self.prompt_tokens(request)
        if retry and (before := self._answered(request, prompt)) is not None:
            return before
        if len(prompt) > self.most_prompt:
            raise HttpError(
                400,
                f"the prompt has {len(prompt):,} tokens, more than rollout.max_prompt_tokens={self.most_prompt:,}",
                "context_length_exceeded",
            )
        if len(self.calls) + len(self._running) >= self.most_calls:
            raise HttpError(
                403, f"the episode has reached its limit of {self.most_calls} calls (rl.max_turns)", "too_many_calls"
            )
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        repeated = self._repeats[prompt]
        self._repeats[prompt] += 1
        try:
            call = await self._complete(request, prompt, repeated)
        except BaseException:
            self._repeats[prompt] -= 1  # the answer was not delivered: a repeated call gets the same answer
            raise
        finally:
            self._running.discard(task)
        self.calls.append(call)
        return call

    def forget(self, call: AgentCall) -> None:
        """Drop a call whose answer did not reach the agent."""
        if call in self.calls:
            self.calls.remove(call)
            self._repeats[call.prompt] -= 1

    def end(self) -> None:
        """Cancel the calls that are still unanswered."""
        for task in list(self._running):
            task.cancel()

    def prompt_tokens(self, request: ChatRequest) -> tuple[int, ...]:
        """The tokens of a call's prompt. HttpError if the chat template cannot render it."""
        source = f"{self.prompt.source}, an agent's call"
        for call in sorted(self.calls, key=lambda call: -len(call.request.messages)):
            if (following := _continues(request, call)) is None:
                continue
            earlier = Prompt(0, 0, call.prompt, "", call.request.messages, request.columns, source)
            calls = call.answer.message.get("tool_calls", ())
            try:
                continuation = self.chats.continuation(earlier, following, calls)
            except UserError:
                break  # the template renders the history differently: start a new branch
            return (*call.tokens, *(() if call.ended else continuation.closing), *continuation.tokens)
        try:
            return self.chats.rendered_question(source, request.messages, request.columns)
        except UserError as error:
            raise HttpError(400, str(error)) from error

    async def _complete(self, request: ChatRequest, prompt: tuple[int, ...], repeated: int) -> AgentCall:
        sampling = self.sampling
        limit = min(request.max_tokens or sampling.max_new_tokens, sampling.max_new_tokens)
        sampling = replace(sampling, max_new_tokens=limit, stop=(*sampling.stop, *request.stop))
        self._started += 1
        name = f"{self.name}/{self.number} call {self._started}"
        # A seed depends on the call's tokens, not on its time, because concurrent calls arrive in any order.
        turn = _turn(prompt, repeated)
        seed = seed_of(self.seed, self.name, self.number, turn)
        try:
            (completion,) = await self.engine.generate(Request(name, prompt, (seed,), sampling))
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise HttpError(503, "the engine has failed, and the run ends") from error
        ended = bool(completion.tokens) and completion.tokens[-1] in sampling.ends
        answer = self._chat_answer(request, prompt, completion, ended, sampling.stop, f"{turn:x}")
        return AgentCall(request, prompt, completion, answer, ended)

    def _chat_answer(
        self,
        request: ChatRequest,
        prompt: tuple[int, ...],
        completion: Completion,
        ended: bool,
        stops: Sequence[str],
        name: str,
    ) -> ChatAnswer:
        tokenizer: PreTrainedTokenizerBase = self.chats.tokenizer
        tokens = list(completion.tokens)
        text = str(tokenizer.decode(tokens[:-1] if ended else tokens))
        if completion.finish == "end" and not ended:
            text = text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
        message = parse_answer(text, bool(request.tools), name)
        finish = "length" if completion.finish != "end" else "tool_calls" if "tool_calls" in message else "stop"
        pieces = tokenizer.batch_decode([[token] for token in tokens]) if request.logprobs else ()
        return ChatAnswer(name, message, finish, prompt, tokens, completion.logprobs, pieces)

    def _answered(self, request: ChatRequest, prompt: tuple[int, ...]) -> AgentCall | None:
        """The last call with the same request."""
        repeated_calls = (call for call in reversed(self.calls) if call.prompt == prompt)
        return next(
            (call for call in repeated_calls if replace(call.request, messages=request.messages) == request), None
        )


def _continues(request: ChatRequest, call: AgentCall) -> Sequence[Mapping[str, Any]] | None:
    """The messages that follow the conversation and the answer of an earlier call; None if they are not repeated."""
    before = [*call.request.messages, call.answer.message]
    if len(request.messages) <= len(before) or request.columns != call.request.columns:
        return None
    if not all(map(same_message, before, request.messages)):
        return None
    return request.messages[len(before) :]


def _turn(prompt: Sequence[int], repeated: int) -> int:
    digest = hashlib.blake2b(np.array([repeated, *prompt], np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def chains(calls: Sequence[AgentCall]) -> list[list[AgentCall]]:
    """The forest of the calls as paths from a root to a leaf: first that of the last call, then others by their tokens,
    because concurrent calls end in any order. A call's parent is the earlier call with the most tokens among those that
    its prompt begins with."""
    parents: dict[int, int] = {}
    for index, call in enumerate(calls):
        earlier = [n for n in range(index) if call.prompt[: len(calls[n].tokens)] == calls[n].tokens]
        if earlier:
            parents[index] = max(earlier, key=lambda n: (len(calls[n].tokens), -n))
    leaves = [index for index in range(len(calls)) if index not in parents.values()]
    paths = []
    for leaf in [*leaves[-1:], *sorted(leaves[:-1], key=lambda index: calls[index].tokens)]:
        path = [leaf]
        while path[0] in parents:
            path.insert(0, parents[path[0]])
        paths.append([calls[index] for index in path])
    return paths


def samples_of_calls(prompt: Prompt, number: int, calls: Sequence[AgentCall], error: str = "") -> list[Sample]:
    """The samples of an episode, one for each path of chains(). The tokens of a call are trained in the first path that
    contains it, and are context in other paths. All samples have the last call's finish, so that rl.mask_truncated
    masks all or none. error: why the episode failed."""
    counted: set[int] = set()
    samples: list[Sample] = []
    for branch, path in enumerate(chains(calls) or [[]]):
        first = path[0].prompt if path else prompt.tokens
        transcript = TrajectoryBuilder(replace(prompt, tokens=first, images=None))
        transcript.error = error
        for call in path:
            transcript.add_context(call.prompt[len(transcript.tokens) :])
            if id(call) in counted:
                transcript.add_context(call.completion.tokens)
            else:
                transcript.add_completion(call.completion)
        counted |= {id(call) for call in path}
        sample = transcript.sample(number)
        sample.branch, sample.finish = branch, samples[0].finish if samples else sample.finish
        sample.notes["messages"] = [*path[-1].request.messages, dict(path[-1].answer.message)] if path else []
        samples.append(sample)
    return samples
