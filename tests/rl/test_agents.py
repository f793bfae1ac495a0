"""Agents: what they ask over HTTP, and the samples that their calls become."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.rl.test_environments import END, TOKENIZER, Scripted
from tests.support.agents import PLAYS, post
from tests.support.cases import open_engine, saved_model
from tests.support.local_rl import lines_of, rollouts_of, run_config, same_run, weights_of
from tests.support.pool import run
from tests.support.rl_samples import algorithm, rl_config
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding
from weft.engine.engine import Engine
from weft.engine.losses.policy import PolicyLoss
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.inference.types import Prompt, SampleGroup, samples_of
from weft.rl import batch_pool, trainer
from weft.rl.advantages import advantages
from weft.rl.agents.agents import Agents, load_agents
from weft.rl.agents.base import check_agent
from weft.rl.agents.chat_api import parse_request
from weft.rl.agents.http_server import HttpRequest, HttpResponse, HttpServer
from weft.rl.agents.session import AgentCall, Session, chains, samples_of_calls
from weft.rl.documents import ReadSamples, TrainedSamples, note_beginnings
from weft.rl.exact import require_exact
from weft.rl.prompts import PromptRules, read_prompts
from weft.rl.rewards.base import Failures, Rewards, decode
from weft.rl.rollouts import rollout_group
from weft.verify.harness import compare_gradients
from weft.verify.rl_rollouts import recorded_rollouts

SAMPLING = SamplingParams(max_new_tokens=8, ends=(END,))
GROUP = 2
Played = tuple[list[Request], list[SampleGroup]]


class Local:
    """The embedded engine in this process."""

    drawn = 0

    def __init__(self, engine: Engine, late: Prompt) -> None:
        """late: a prompt that takes a while to be answered."""
        self.embedded = EmbeddedEngine(engine, TOKENIZER)
        self.embedded.wake()
        self.late = late

    async def generate(self, request: Request) -> list[Completion]:
        await asyncio.sleep(0.3 if request.tokens == self.late.tokens else 0)
        return self.embedded.generate([request])[0]


def prompts(plays: Sequence[str]) -> list[Prompt]:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+{n}?"}], "play": name, "answer": "7"}
        for n, name in enumerate(plays)
    ]
    return list(read_prompts(rows, TOKENIZER, Encoding(), PromptRules(999)))


def agents(function: str = "solve", **keys: Any) -> Agents:
    agent = function if {"/", ":"} & {*function} else f"tests.support.agents:{function}"
    config = rl_config(algorithm(reward=(), agent=agent, **keys), max_prompt_tokens=2000, max_new_tokens=8)
    loaded = load_agents(config, TOKENIZER)
    assert loaded is not None
    return loaded


def play(engine: Any, agents_used: Agents, questions: Sequence[Prompt], count: int = 1) -> list[SampleGroup]:
    """The rewarded groups of these prompts, at the same time."""

    async def played() -> list[SampleGroup]:
        await agents_used.start()
        try:
            calls = (rollout_group(prompt, count, engine, SAMPLING, agents_used, seed=11) for prompt in questions)
            groups = list(await asyncio.gather(*calls))
            async with Rewards(agents_used.config.rl) as rewards:
                for group in groups:
                    decode(group.samples, TOKENIZER)
                    await rewards.score(group.samples, Failures())
            return groups
        finally:
            await agents_used.close()

    return asyncio.run(played())


# ---------------------------------------------------------------- with a model: what is trained is what was sampled


def trained(path: str) -> tuple[list[SampleGroup], dict[str, Tensor], tuple[int, int]]:
    """(Groups of all plays, gradients of one step, (tokens forwarded, nodes of the tries))."""
    engine = open_engine(path, "1", exact=True, step={"max_tokens_per_device": 4096})
    questions = prompts([*PLAYS])
    local = Local(engine, questions[[*PLAYS].index("leave")])
    groups = play(local, agents(), questions, GROUP)
    samples = samples_of(groups)
    note_beginnings(samples)
    read = ReadSamples(samples, routed=False)
    plan, local_documents = engine.plan_step(read)
    for index, readout in engine.readout(plan, local_documents).items():
        samples[index].old_logprobs = np.where(samples[index].sampled, readout["logprob"].numpy(), np.float32(0))
    require_exact(samples)
    for sample in samples:
        sample.old_logprobs = None
    config = rl_config(algorithm(reward=(), agent="a:b", correction="none"), max_new_tokens=8)
    advantages(groups, config.rl)
    documents = TrainedSamples(samples, config)
    loss = PolicyLoss(config.rl, old_is_current=True, branches=documents.branches)
    plan, rows = engine.plan_step(documents)
    engine.accumulate(plan, rows, loss)
    nodes = {(sample.prompt.id, *sample.tokens[:end].tolist()) for sample in samples for end in range(1, len(sample))}
    gradients = {name: gradient for name, gradient in engine.gradients() if gradient is not None}
    assert documents.branches == sum(sample.branch > 0 for sample in samples)
    return groups, gradients, (plan.tokens_forwarded, len(nodes))


def plain_gradients(path: str, groups: Sequence[SampleGroup]) -> dict[str, Tensor]:
    """The same of plain transformers, which forwards each call alone: its prompt and its answer, as the agent heard
    them. Every episode counts once, and each of its sampled tokens the same."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    loss, episodes = torch.zeros(()), [sample for group in groups for sample in group.episodes]
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group.episodes], dtype=torch.float64)
        for sample in group.episodes:
            assert sample.reward is not None
            spread = float(rewards.std()) if bool((rewards != rewards[0]).any()) else 0.0
            advantage = float(sample.reward - rewards.mean()) / (spread + 1e-4) if spread else 0.0
            count = sum(len(ids) for _, ids, _ in sample.notes["heard"])
            for prompt, ids, _ in sample.notes["heard"]:
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                logprobs = logits[torch.arange(len(ids)), ids]
                loss = loss - advantage * logprobs.sum() / count / len(episodes)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.covers("rl.agent")
def test_what_is_trained_is_what_agents_heard() -> None:
    """Ids, logprobs to the last bit, and every gradient, for continued, cut, parallel, repeated and broken calls; a
    token that calls share is forwarded once."""
    path = saved_model("qwen3", vocab_size=len(TOKENIZER), initializer_range=0.05)
    ((groups, gradients, (forwarded, nodes)),) = run(1, trained, path)
    by_play = dict(zip(PLAYS, groups, strict=True))
    counts = {name: [len(group.samples) // GROUP, group.samples[0].notes["calls"]] for name, group in by_play.items()}
    assert counts == {
        "follow": [1, 3], "forget": [2, 3], "fork": [2, 3], "team": [3, 5], "again": [2, 2], "leave": [1, 1],
        "stream": [1, 2], "respond": [3, 4],
    }  # fmt: skip
    for group in groups:
        for episode in group.episodes:
            parts = [sample for sample in group.samples if sample.number == episode.number]
            calls = sorted((*prompt, *ids) for prompt, ids, _ in episode.notes["heard"])
            drawn = [token for part in parts for token in part.tokens[part.sampled].tolist()]
            assert sorted(drawn) == sorted(token for _, ids, _ in episode.notes["heard"] for token in ids)
            logprobs = [x for part in parts for x in part.rollout_logprobs[part.sampled].tolist()]
            answered_logprobs = [x for _, _, answered in episode.notes["heard"] for x in answered]
            assert sorted(logprobs) == sorted(answered_logprobs)
            paths = [tuple(part.tokens.tolist()) for part in parts]
            assert all(any(path[: len(call)] == call for path in paths) for call in calls)
            assert {part.reward for part in parts} == {episode.reward}
    assert forwarded == nodes
    figures = compare_gradients(gradients, plain_gradients(path, groups), {})
    assert all(figure.value <= 1e-5 for figure in figures), max(figures, key=lambda figure: figure.value)


def test_chains_of_calls() -> None:
    """A call continues the longest of the earlier calls that its prompt begins with; equal answers to equal prompts are
    two documents; the path of the last call comes first, others by tokens, and each call is sampled once."""

    def call(prompt: str, answer: str) -> AgentCall:
        completion = Completion(tuple(map(ord, answer)), (-1.0,) * len(answer), "end", ((0, len(answer)),))
        return AgentCall(None, tuple(map(ord, prompt)), completion, SimpleNamespace(message={}), True)  # type: ignore[arg-type]

    a, b, c, d = call("p", "x"), call("px-", "y"), call("p", "x"), call("px-y+", "z")
    e, f = call("px-", "yy"), call("q", "x")
    assert chains([a, b, c, d, e, f]) == [[f], [c], [a, b, d], [a, e]]
    for exchange in (a, b, c, d, e, f):
        object.__setattr__(exchange, "request", SimpleNamespace(messages=()))
    samples = samples_of_calls(Prompt(0, 0, (1,), "p"), 2, [a, b, c, d, e, f])
    texts = ["".join(map(chr, sample.tokens)) for sample in samples]
    assert texts == ["qx", "px", "px-y+z", "px-yy"] and [s.id for s in samples] == [
        "0.0/2",
        *(f"0.0/2.{n}" for n in (1, 2, 3)),
    ]
    drawn = ["".join(map(chr, sample.tokens[sample.sampled])) for sample in samples]
    assert drawn == ["x", "x", "xyz", "yy"]


def test_runs_are_equal_and_can_be_replayed(tmp_path: Path) -> None:
    """To the last bit, with calls at the same time; and the loss is told of documents beyond one per episode."""
    shutil.copytree(saved_model("qwen3", vocab_size=len(TOKENIZER), initializer_range=0.05), tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "play": ("fork", "team")[n % 2]} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl", "rl.agent=tests.support.agents:solve",
        "rl.prompts_per_step=2", "rl.group_size=2", "rollout.max_prompt_tokens=240", "rollout.max_new_tokens=8",
        "step.max_tokens_per_device=1024", "optimizer.lr=1e-2", "train.steps=2", "checkpoint.async=false",
        "rl.on_policy=exact",
    ]  # fmt: skip
    branches = list[int]()

    def noted(*arguments: Any, **keys: Any) -> PolicyLoss:
        branches.append(keys["branches"])
        return PolicyLoss(*arguments, **keys)

    with mock.patch.object(trainer, "PolicyLoss", noted):
        for run_name, options in (("one", {}), ("two", {}), ("again", {"replay": str(tmp_path / "one/rollouts")})):
            config = load_config([], [*words, f"run.dir={tmp_path / run_name}"], RlConfig)
            run_config(config, **options)
    same_run(tmp_path / "one", tmp_path / "two")
    documents = [len(step) for step in rollouts_of(tmp_path / "one").values()]
    assert branches == [count - 4 for count in documents] * 3 and min(branches) >= 4
    assert [line["agent/documents"] for line in lines_of(tmp_path / "one")] == [count / 4 for count in documents]
    recorded = str(tmp_path / "one/rollouts")
    with pytest.raises(UserError, match="with several documents"):
        recorded_rollouts(recorded)
    config = load_config([], [*words, "rl.agent=null", "rl.reward=[length]", f"run.dir={tmp_path}/other"], RlConfig)
    with pytest.raises(UserError, match="set rl.agent as in the run that made them"):
        run_config(config, replay=recorded)
    trained, replayed = weights_of(tmp_path / "one"), weights_of(tmp_path / "again")
    assert all(torch.equal(tensor, replayed[name]) for name, tensor in trained.items())


def test_an_agent_that_is_killed_leaves_no_request_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn of the engine is one token here, so that the calls of killed agents are being answered when all other
    episodes have ended. They cost their episodes, and training goes on."""
    monkeypatch.setattr(batch_pool.BatchPool, "turn", 0.0)
    shutil.copytree(saved_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=2048), tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    plays = ("deserts", "stays", "stays")
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "play": play} for n, play in enumerate(plays)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl", "rl.agent=tests.support.agents:deserts",
        "rl.prompts_per_step=3", "rl.group_size=2", "rollout.max_prompt_tokens=200", "rollout.max_new_tokens=1800",
        "step.max_tokens_per_device=2048", "train.steps=2", "checkpoint.async=false", f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    run_config(load_config([], words, RlConfig))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]
    for step in rollouts_of(tmp_path / "run").values():
        errors = [json.loads(row["notes"]).get("error", "") for row in step]
        assert [error.endswith(": its process was ended by signal 9") for error in errors].count(True) == 2
        assert errors.count("") == 4


# ---------------------------------------------------------------- failures, rewards and refusals


@pytest.mark.covers("rl.agent_timeout")
def test_an_agent_that_fails_costs_its_episode(tmp_path: Path) -> None:
    plays = ("raises", "exits", "hangs", "text", "nothing", "posts", "well")
    groups = play(Scripted("four"), agents("fails", agent_timeout=1.0), prompts(plays))
    by_play = {name: group.samples[0] for name, group in zip(plays, groups, strict=True)}
    errors = {name: sample.notes.get("error", "") for name, sample in by_play.items()}
    assert errors["raises"].endswith(": ValueError: no idea")
    assert errors["exits"].endswith(": its process ended with status 3")
    assert errors["hangs"].endswith(" took more than 1 seconds")
    assert "returned 'good' as its reward, which is not a number" in errors["text"]
    assert "returned no reward: return it" in errors["nothing"]
    assert not any(by_play[name].counts for name in ("raises", "exits", "hangs", "text", "nothing"))
    assert (by_play["posts"].reward, by_play["posts"].notes["why"], by_play["well"].reward) == (0.5, "posted", 1.0)
    assert all(sample.length for sample in by_play.values())  # what they drew is recorded


def test_a_command_is_an_agent(tmp_path: Path) -> None:
    """It reads its row from standard input, and the last line of its output is its reward."""
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, sys\n"
        "from tests.support.agents import post\n"
        "row = json.load(sys.stdin)\n"
        "body = {'model': os.environ['OPENAI_MODEL'], 'messages': row['messages']}\n"
        "status, text = post(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], '/chat/completions', body)\n"
        "print('asked')\n"
        "if row['play'] == 'bad': sys.exit('no luck')\n"
        "print(json.dumps({'reward': status / 100, 'text': json.loads(text)['choices'][0]['message']['content']}))\n"
    )
    groups = play(Scripted("four"), agents(f"{sys.executable} {program}"), prompts(["good", "bad"]))
    good, bad = (group.samples[0] for group in groups)
    assert (good.reward, good.notes["text"]) == (2.0, "four")
    assert bad.notes["error"].endswith("ended with status 1: no luck") and not bad.counts


def test_the_example_is_an_agent() -> None:
    example = "examples.calculator_agent:solve"
    groups = [play(Scripted(text), agents(example), prompts(["-"]))[0] for text in ("so 7", "8")]
    assert [(group.samples[0].reward, group.samples[0].notes["tool_calls"]) for group in groups] == [(1.0, 0), (0.0, 0)]


def test_an_engine_that_fails_ends_the_run() -> None:
    class Failing(Scripted):
        async def generate(self, request: Request) -> list[Completion]:
            raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="the engine is gone"):
        play(Failing("four"), agents("fails"), prompts(["well"]))


@pytest.mark.covers("rl.agents_at_once")
def test_more_agents_than_may_run_at_once_wait() -> None:
    running, highest = 0, 0

    class Counting(Scripted):
        async def generate(self, request: Request) -> list[Completion]:
            nonlocal running, highest
            running, highest = running + 1, max(highest, running + 1)
            await asyncio.sleep(0.1)
            running -= 1
            return await super().generate(request)

    groups = play(Counting("four"), agents("fails", agents_at_once=2), prompts(["well"] * 5))
    assert highest == 2 and [group.samples[0].reward for group in groups] == [1.0] * 5


@pytest.mark.covers("rl.agent_host", "rl.agent_port")
def test_where_the_endpoint_listens() -> None:
    """On loopback unless told otherwise; a port that is taken is an error before agents start."""

    async def listening() -> tuple[str, str, str]:
        first = agents()
        await first.start()
        port = int(first.endpoint.base_url.rpartition(":")[2].removesuffix("/v1"))
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}") as error:
            await agents(agent_port=port).start()
        second = agents(agent_host="127.0.0.2", agent_port=port)
        await second.start()
        await first.close()
        await second.close()
        return first.endpoint.base_url, second.endpoint.base_url, str(error.value)

    first, second, error = asyncio.run(listening())
    assert first.startswith("http://127.0.0.1:") and second == first.replace("127.0.0.1", "127.0.0.2")
    assert "Set rl.agent_port=0" in error


REFUSED = {
    "temperature": (0.2, "the run samples with rollout.temperature=1"), "seed": (3, "the run sets seeds"),
    "n": (2, "which this endpoint does not support"), "model": ("gpt-9", "is not served here"),
    "messages": ([{"role": "assistant", "content": "x"}], "the last message is the assistant's"),
    "max_tokens": (0, "must be 1 or more"), "best_of": (2, "has no effect here"),
    "tool_choice": ("required", "because the policy decides"), "tools": ("add", "must be a list of objects"),
    "stop": (5, "must be a text or a list"), "chat_template_kwargs": ("x", "must be an object"),
}  # fmt: skip


def session_of(served: Agents, engine: Any, longest: int = 8) -> Session:
    (prompt,) = prompts(["-"])
    sampling = replace(SAMPLING, max_new_tokens=longest)
    limits = served.config.rl.max_turns, served.config.rollout.max_prompt_tokens
    return Session(prompt, 0, prompt.id, engine, sampling, served.chats, 11, *limits)


def test_what_seeds_depend_on() -> None:
    """On a call's tokens, and on how often they were asked before: not on the order of calls, and not on calls whose
    answers nobody has seen. A client's retry is no call."""
    first, second = ({"model": "policy", "messages": [{"role": "user", "content": text}]} for text in ("a", "b"))

    class Stuck(Scripted):
        stuck = False

        async def generate(self, request: Request) -> list[Completion]:
            completions = await super().generate(request)
            await asyncio.sleep(1000 if self.stuck else 0)
            return completions

    async def seeds(*bodies: Any) -> list[int]:
        engine = Stuck("four")
        session = session_of(agents(), engine)
        calls = [parse_request(json.dumps(body).encode(), ["policy"], session_config) for body in bodies]
        engine.stuck = True
        cancelled = asyncio.ensure_future(session.answer(calls[0]))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        engine.stuck = False
        answers = [await session.answer(call) for call in calls]
        assert await session.answer(calls[-1], retry=True) is answers[-1] and len(session.calls) == len(calls)
        return [request.seeds[0] for request in engine.requests]

    session_config = agents().config.rollout
    in_order, swapped = asyncio.run(seeds(first, second, first)), asyncio.run(seeds(second, first, first))
    assert (
        in_order[0] == in_order[1] == swapped[2]
        and swapped[0] == swapped[1] == in_order[2]
        and in_order[3] == swapped[3]
    )
    assert len({*in_order, *swapped}) == 3


def asked(
    engine: Any, *bodies: Any, path: str = "/chat/completions", key: str = "", longest: int = 8, **keys: Any
) -> list[tuple[int, Any]]:
    """(Status, JSON) of POSTs in one session."""

    async def run_them() -> list[tuple[int, Any]]:
        served = agents(**keys)
        await served.start()
        try:
            with served.endpoint.serving("k", session_of(served, engine, longest)):
                call = partial(asyncio.to_thread, post, served.endpoint.base_url, key or "k", path)
                answers = [await call(body) for body in bodies]
                return [(status, json.loads(text)) for status, text in answers]
        finally:
            await served.close()

    return asyncio.run(run_them())


def test_what_would_be_ignored_is_refused() -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "2?"}]}
    answers = asked(Scripted("four"), *({**body, name: value} for name, (value, _) in REFUSED.items()))
    for (status, answer), (name, (_, message)) in zip(answers, REFUSED.items(), strict=True):
        assert status == (404 if name == "model" else 400) and message in answer["error"]["message"], (name, answer)
        assert answer["error"]["param"] in (name, None)
    assert asked(Scripted("four"), body, key="other")[0][0] == 401
    status, answer = asked(Scripted("four"), body, path="/completions")[0]
    assert status == 404 and "the routes are POST /v1/chat/completions" in answer["error"]["message"]
    long = {**body, "messages": [{"role": "user", "content": "2" * 2500}]}
    assert asked(Scripted("four"), long)[0][1]["error"]["code"] == "context_length_exceeded"
    statuses = [status for status, _ in asked(Scripted("four"), *[body] * 3, max_turns=2)]
    assert statuses == [200, 200, 403]


def test_calls_of_tools_and_stop_texts() -> None:
    """Calls are parsed from an answer, and the history that repeats them continues its tokens."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "2?"}],
        "tools": [tool],
        "return_token_ids": True,
    }
    engine = Scripted('so <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>')
    ((_, first),) = asked(engine, body, longest=100)
    (choice,) = first["choices"]
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so"
    assert call["function"] == {"name": "add", "arguments": '{"a": 2}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
    longer = {**body, "messages": [*body["messages"], choice["message"], result]}
    (_, _), (_, second), (_, bare) = asked(engine, body, longer, {**longer, "tools": None}, longest=100)
    conversation = first["prompt_token_ids"] + choice["token_ids"]
    assert second["prompt_token_ids"][: len(conversation)] == conversation
    assert bare["prompt_token_ids"][: len(conversation)] != conversation  # other tools are another beginning
    assert "<tool_response>\n4" in TOKENIZER.decode(second["prompt_token_ids"][len(conversation) :])
    stopped = asked(Scripted("a STOP", end=False), {**body, "tools": None, "stop": "STOP"})[0][1]["choices"][0]
    assert stopped["message"]["content"] == "a " and stopped["finish_reason"] == "stop"


def test_the_client_of_openai() -> None:
    """Its own types go back as history, in one piece and in events."""
    openai = pytest.importorskip("openai")

    async def ask() -> tuple[str, str, list[int], list[int]]:
        served = agents()
        await served.start()
        try:
            with served.endpoint.serving("k", session_of(served, Scripted("four"), 100)):
                async with openai.AsyncOpenAI(base_url=served.endpoint.base_url, api_key="k") as client:
                    create, extra = client.chat.completions.create, {"return_token_ids": True}
                    messages: list[Any] = [{"role": "user", "content": "2?"}]
                    first = await create(model="policy", messages=messages, extra_body=extra)
                    messages += [first.choices[0].message, {"role": "user", "content": "3?"}]
                    two = await create(model="policy", messages=messages, extra_body=extra)
                    events = await create(model="policy", messages=messages, stream=True)
                    streamed = "".join([event.choices[0].delta.content or "" async for event in events])
            token_ids = [*first.prompt_token_ids, *first.choices[0].token_ids]
            return first.choices[0].message.content, streamed, token_ids, two.prompt_token_ids
        finally:
            await served.close()

    text, streamed, token_ids, longer = asyncio.run(ask())
    assert text == streamed == "four" and longer[: len(token_ids)] == token_ids


def test_an_error_of_the_endpoint_is_answered() -> None:
    """With 500 and its words; the server goes on."""

    async def run_them() -> list[tuple[int, str]]:
        async def handle(request: HttpRequest) -> HttpResponse:
            raise LookupError(f"no {request.path}")

        server = HttpServer(handle)
        await server.start("127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{server.port}"
            return [await asyncio.to_thread(post, url, "k", path, {}) for path in ("/a", "/b")]
        finally:
            await server.close()

    answers = asyncio.run(run_them())
    assert [status for status, _ in answers] == [500, 500] and "LookupError: no /b" in answers[1][1]


@pytest.mark.parametrize(
    ("agent", "message"),
    [("tests.support.agents:nobody", "has no nobody"), ("tests.support.agents:said", "is not an agent"),
     ("./no/such --program", "there is no program ./no/such")],
)  # fmt: skip
def test_what_is_no_agent_is_refused(agent: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_agent(agent)
