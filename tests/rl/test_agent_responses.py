"""OpenAI's Responses API on the endpoint of agents: the same tokens as chat completions, and nothing that is ignored.

tests/rl/test_agents.py plays it with a model.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.rl.test_agents import agents, asked, session_of
from tests.rl.test_environments import TOKENIZER, Scripted
from tests.support.agents import post

TOOL = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
CALLING = 'so <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
ASKED = {"model": "policy", "input": "2?", "return_token_ids": True}


def served_to(engine: Any, ask: Callable[[str], Awaitable[Any]]) -> tuple[Any, list[Any]]:
    """(What `ask`, with the endpoint's URL, returns, the calls of its session)."""

    async def run() -> tuple[Any, list[Any]]:
        served = agents()
        await served.start()
        try:
            session = session_of(served, engine, 100)
            with served.endpoint.serving("k", session):
                return await ask(served.endpoint.base_url), session.calls
        finally:
            await served.close()

    return asyncio.run(run())


def responses(engine: Any, *bodies: Any, longest: int = 100) -> list[Any]:
    answers = asked(engine, *bodies, path="/responses", longest=longest)
    assert all(status == 200 for status, _ in answers), answers
    return [answer for _, answer in answers]


def test_the_tokens_are_those_of_chat_completions() -> None:
    """Of instructions, tools, calls and results; and a conversation continues its tokens, by items and by id."""
    result = {"type": "function_call_output", "call_id": "", "output": "4"}
    first_asked = {**ASKED, "instructions": "Add.", "tools": [TOOL]}
    (first,) = responses(Scripted(CALLING), first_asked)
    message, call = first["output"]
    assert (message["content"][0]["text"], call["name"], call["arguments"]) == ("so", "add", '{"a": 2}')
    assert (first["status"], first["usage"]["output_tokens"]) == ("completed", len(first["token_ids"]))
    assert first["usage"]["input_tokens"] == len(first["prompt_token_ids"])
    result["call_id"] = call["call_id"]
    user = {"role": "user", "content": [{"type": "input_text", "text": "2?"}]}
    by_items = {**first_asked, "input": [user, *first["output"], result]}
    by_id = {**first_asked, "input": [result], "previous_response_id": first["id"]}
    without = {**by_id, "instructions": None}
    _, items, one, bare = responses(Scripted(CALLING), first_asked, by_items, by_id, without)
    heard = first["prompt_token_ids"] + first["token_ids"]
    assert items["prompt_token_ids"] == one["prompt_token_ids"] and items["prompt_token_ids"][: len(heard)] == heard
    assert "<tool_response>\n4" in TOKENIZER.decode(items["prompt_token_ids"][len(heard) :])
    assert "Add." not in TOKENIZER.decode(bare["prompt_token_ids"])  # instructions are of one response

    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    chat = {"model": "policy", "tools": [{"type": "function", "function": function}], "return_token_ids": True}
    chat["messages"] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2?"}]
    ((_, begun),) = asked(Scripted(CALLING), chat, longest=100)
    answer = begun["choices"][0]["message"]
    told = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "4"}
    chats = [chat, {**chat, "messages": [*chat["messages"], answer, told]}]
    (_, begun), (_, continued) = asked(Scripted(CALLING), *chats, longest=100)
    assert begun["prompt_token_ids"] == first["prompt_token_ids"]
    assert begun["choices"][0]["token_ids"] == first["token_ids"]
    assert continued["prompt_token_ids"] == items["prompt_token_ids"]


def test_what_a_response_says() -> None:
    """Its limit, its reason to be incomplete, logprobs of all its tokens, and what it repeats of the request."""
    keys = {"metadata": {"a": "b"}, "max_output_tokens": 2, "include": ["message.output_text.logprobs"]}
    (cut,) = responses(Scripted("one two three four"), {**ASKED, **keys})
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (message,) = cut["output"]
    (part,) = message["content"]
    assert message["status"] == "incomplete" and cut["metadata"] == {"a": "b"} and cut["max_output_tokens"] == 2
    assert [entry["logprob"] for entry in part["logprobs"]] == [-0.5, -0.5]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    (calling,) = responses(Scripted(CALLING.removeprefix("so ")), {**ASKED, "tools": [TOOL]})
    assert [item["type"] for item in calling["output"]] == ["function_call"]


def test_events() -> None:
    """Those of the API in its order, numbered; the last one has the response that is not streamed."""
    body = {**ASKED, "tools": [TOOL], "include": ["message.output_text.logprobs"]}
    (plain,) = responses(Scripted(CALLING), body)
    text = streamed(Scripted(CALLING), body)
    events = [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    part = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    added, done = ["output_item.added"], ["output_item.done"]
    kinds = ["created", "in_progress", *added, *part, *done, *added, *arguments, *done, "completed"]
    assert [event["type"].removeprefix("response.") for event in events] == kinds
    assert [line.partition(": ")[2] for line in text.splitlines()[::3]] == [event["type"] for event in events]
    assert {**events[-1]["response"], "created_at": 0} == {**plain, "created_at": 0}
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    assert streamed(Scripted("one two three"), {**ASKED, "max_output_tokens": 1}).count("event: response.incomplete")


def streamed(engine: Any, body: Any) -> str:
    """The text of a stream."""

    async def ask(base_url: str) -> tuple[int, str]:
        return await asyncio.to_thread(post, base_url, "k", "/responses", {**body, "stream": True})

    (status, text), _ = served_to(engine, ask)
    assert status == 200, text
    return text


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
# Key that the error names -> (keys of the request, words of the message).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "background": ({"background": True}, "which this endpoint does not support"),
    "conversation": ({"conversation": "conv_1"}, "has no effect here"),
    "include": ({"include": ["reasoning.encrypted_content"]}, "can include message.output_text.logprobs only"),
    "input": ({"input": 5}, "must be a list"),
    "input[0].type": ({"input": [{"type": "reasoning", "summary": []}]}, "is 'reasoning'; this endpoint reads message"),
    "input[0].content[0].type": ({"input": [IMAGE]}, "is 'input_image'; this endpoint reads input_text"),
    "input[1].call_id": (
        {"input": [{"role": "user", "content": "2?"}, {"type": "function_call_output", "output": ""}]},
        "has no `call_id`",
    ),
    "input[0].phase": ({"input": [{"role": "user", "content": "", "phase": "x"}]}, "has no effect here"),
    "instructions": ({"instructions": ["x"]}, "must be a text"),
    "max_output_tokens": ({"max_output_tokens": 0}, "must be 1 or more"),
    "max_tool_calls": ({"max_tool_calls": 2}, "has no effect here"),
    "model": ({"model": "gpt-9"}, "is not served here"),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, "which this endpoint does not support"),
    "previous_response_id": ({"previous_response_id": "resp_0"}, "is of no response of this episode"),
    "reasoning": ({"reasoning": {"effort": "low"}}, "has no effect here"),
    "stop": ({"stop": "x"}, "has no effect here"),
    "stream_options": ({"stream_options": {"include_obfuscation": True}}, "which this endpoint does not support"),
    "temperature": ({"temperature": 0.2}, "the run samples with rollout.temperature=1"),
    "text": ({"text": {"format": {"type": "json_schema"}}}, "which this endpoint does not support"),
    "tool_choice": ({"tool_choice": {"type": "function", "name": "add"}}, "the policy decides"),
    "tools[0].type": ({"tools": [{"type": "web_search"}]}, "is 'web_search'; this endpoint reads function"),
    "tools[0].defer_loading": ({"tools": [{**TOOL, "defer_loading": True}]}, "has no effect here"),
    "top_logprobs": ({"top_logprobs": 2}, "which this endpoint does not support"),
    "truncation": ({"truncation": "auto"}, "which this endpoint does not support"),
}


def test_what_would_be_ignored_is_refused() -> None:
    bodies = [{**ASKED, **keys} for keys, _ in REFUSED.values()]
    answers = asked(Scripted("four"), *bodies, path="/responses")
    for (status, answer), (param, (_, message)) in zip(answers, REFUSED.items(), strict=True):
        assert status == (404 if param == "model" else 400), (param, answer)
        assert message in answer["error"]["message"] and answer["error"]["param"] == param, (param, answer)
    ends = {**ASKED, "input": [{"role": "assistant", "content": "2"}]}
    status, answer = asked(Scripted("four"), ends, path="/responses")[0]
    assert status == 400 and "the last message is the assistant's" in answer["error"]["message"]
    (first,) = responses(Scripted("four"), {**ASKED, "store": False})
    bodies = [{**ASKED, "store": False}, {**ASKED, "previous_response_id": first["id"]}]
    _, (status, answer) = asked(Scripted("four"), *bodies, path="/responses", longest=100)
    assert status == 400 and "was requested with `store: false`" in answer["error"]["message"]


# ---------------------------------------------------------------- the packages that agents use


def test_the_client_of_openai() -> None:
    """Its own types are valid, and go back as history; a stream's events are those of its types."""
    openai = pytest.importorskip("openai")
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    async def ask(base_url: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            items: list[Any] = [{"role": "user", "content": "2?"}]
            first = await client.responses.create(model="policy", input=items, tools=[TOOL])
            assert first.output_text == "so"
            Response.model_validate(json.loads(first.model_dump_json(exclude_unset=True)))
            items += first.output
            items += [{"type": "function_call_output", "call_id": first.output[1].call_id, "output": "4"}]
            events = await client.responses.create(model="policy", input=items, tools=[TOOL], stream=True)
            async for event in events:
                TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(exclude_unset=True, by_alias=True))
            assert event.type == "response.completed" and event.response.output_text == "so"
            async with client.responses.stream(
                model="policy", input="3?", previous_response_id=event.response.id, tools=[TOOL]
            ) as stream:
                assert (await stream.get_final_response()).output_text == "so"
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.create(model="policy", input="2?", truncation="auto")
            assert error.value.param == "truncation"

    _, calls = served_to(Scripted(CALLING), ask)
    assert len(calls) == 3
    assert all(later.prompt[: len(call.tokens)] == call.tokens for call, later in itertools.pairwise(calls))


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_the_agents_of_openai(api: str) -> None:
    """The package openai-agents, over both APIs: a tool is called, and its result continues the tokens."""
    sdk = pytest.importorskip("agents")
    import openai

    class Calling(Scripted):
        async def generate(self, request: Any) -> Any:
            self.lines = (CALLING,) if not self.requests else ("four",)
            return await super().generate(request)

    added: list[int] = []

    @sdk.function_tool
    def add(a: int) -> int:
        """Adds."""
        added.append(a)
        return a + a

    async def ask(base_url: str) -> str:
        sdk.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            kind = sdk.OpenAIResponsesModel if api == "responses" else sdk.OpenAIChatCompletionsModel
            agent = sdk.Agent("adder", instructions="Add.", tools=[add], model=kind("policy", client))
            result = await sdk.Runner.run(agent, "2+2?")
            streamed = sdk.Runner.run_streamed(agent, [*result.to_input_list(), {"role": "user", "content": "and?"}])
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == "four"
            return str(result.final_output)

    final, calls = served_to(Calling(""), ask)
    assert (final, added, len(calls)) == ("four", [2], 3)
    assert all(later.prompt[: len(call.tokens)] == call.tokens for call, later in itertools.pairwise(calls))


ANSWERING = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "four"}}\n</tool_call>'


class Playing(Scripted):
    """Answers with these lines, the last one again and again."""

    def __init__(self, *lines: str) -> None:
        super().__init__("")
        self.script = lines

    async def generate(self, request: Any) -> Any:
        self.lines = (self.script[min(len(self.requests), len(self.script) - 1)],)
        return await super().generate(request)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_pydantic_ai(api: str, stream: bool) -> None:
    """A tool is called, and its result continues the tokens, over both APIs; so does a result by a tool, if the model's
    profile says that nothing forces a call."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider

    result = '<tool_call>\n{"name": "final_result", "arguments": {"response": 4}}\n</tool_call>'

    async def ask(base_url: str) -> Any:
        kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
        model = kind(
            "policy", provider=OpenAIProvider(base_url=base_url, api_key="k"),
            profile=OpenAIModelProfile(supports_forced_tool_choice=False),
        )  # fmt: skip
        agent = pydantic_ai.Agent(model, instructions="Add.", output_type=int)

        @agent.tool_plain
        def add(a: int) -> int:
            """Adds."""
            return a + a

        if not stream:
            return (await agent.run("2+2?")).output
        async with agent.run_stream("2+2?") as streamed_run:
            return await streamed_run.get_output()

    output, calls = served_to(Playing(CALLING.removeprefix("so "), result), ask)
    assert output == 4 and len(calls) == 2
    assert calls[1].prompt[: len(calls[0].tokens)] == calls[0].tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["ToolCallingAgent", "CodeAgent"])
def test_smolagents(kind: str, stream: bool) -> None:
    """Agents that call tools, and agents that write code. The package writes a call and its result anew, as texts, so
    the next call is a path of its own."""
    smolagents = pytest.importorskip("smolagents")
    lines = (
        (CALLING, ANSWERING) if kind == "ToolCallingAgent" else ("<code>\nadd(2)\n</code>", "<code>\nfinal_answer(4)")
    )
    added: list[int] = []

    class Add(smolagents.Tool):  # type: ignore[misc, name-defined]
        name, description = "add", "Adds."
        inputs, output_type = {"a": {"type": "integer", "description": "a number"}}, "integer"

        def forward(self, a: int) -> int:
            added.append(a)
            return a + a

    async def ask(base_url: str) -> Any:
        # Its default is `required`, which a policy that decides itself cannot promise.
        choice = {"tool_choice": "auto"} if kind == "ToolCallingAgent" else {}
        model = smolagents.OpenAIModel(model_id="policy", api_base=base_url, api_key="k", **choice)
        agent = getattr(smolagents, kind)(
            tools=[Add()], model=model, stream_outputs=stream, max_steps=3, verbosity_level=0
        )
        agent.prompt_templates["system_prompt"] = "Add."
        return await asyncio.to_thread(agent.run, "2+2?")

    output, calls = served_to(Playing(*lines), ask)
    assert (str(output), added, len(calls)) == ("four" if kind == "ToolCallingAgent" else "4", [2], 2)
    heard = "".join(TOKENIZER.decode(calls[1].prompt).split())
    assert "Observation" in heard and calls[1].prompt[: len(calls[0].tokens)] != calls[0].tokens


SMOL_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
# What the packages send beside messages, as recorded of pydantic-ai 2.68 and smolagents 1.26.
RECORDED: dict[str, dict[str, Any]] = {
    "pydantic-ai": {
        "stream": False, "tool_choice": "auto", "messages": [
            {"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "so", "tool_calls": [
                {"id": "call_1_0", "type": "function", "function": {"name": "add", "arguments": "{\"a\":2}"}}
            ]},
            {"role": "tool", "tool_call_id": "call_1_0", "content": "4"},
        ],
        "tools": [{**SMOL_TOOL, "function": {**SMOL_TOOL["function"], "strict": True}}],  # type: ignore[dict-item]
    },
    "smolagents": {
        "stop": ["Observation:", "Calling tools:"], "tool_choice": "auto", "tools": [SMOL_TOOL], "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Add."}]},
            {"role": "user", "content": [{"type": "text", "text": "New task:\n2+2?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "so\nCalling tools:\n[{'id': 'call_1_0'}]"}]},
            {"role": "user", "content": [{"type": "text", "text": "Observation:\n4"}]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("package", RECORDED)
def test_what_packages_send_is_answered(package: str) -> None:
    """Also streamed with a count of tokens, as both ask for it."""
    body = {"model": "policy", **RECORDED[package]}
    streamed_body = {**body, "stream": True, "stream_options": {"include_usage": True}}

    async def ask(base_url: str) -> list[tuple[int, str]]:
        return [await asyncio.to_thread(post, base_url, "k", "/chat/completions", b) for b in (body, streamed_body)]

    ((status, text), (streamed_status, events)), calls = served_to(Playing(CALLING), ask)
    (choice,) = json.loads(text)["choices"]
    assert status == streamed_status == 200 and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    *_, count, done = [event.removeprefix("data: ") for event in events.split("\n\n") if event]
    assert done == "[DONE]" and json.loads(count)["usage"]["completion_tokens"] == len(calls[1].answer.ids)
    assert calls[0].prompt == calls[1].prompt and "\n4" in TOKENIZER.decode(calls[0].prompt)
