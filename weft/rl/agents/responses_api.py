"""Bodies of POST /v1/responses, OpenAI's Responses API: requests as chats, and responses and their events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.rl_schema import RolloutConfig
from weft.rl.agents.chat_api import (
    ChatAnswer,
    ChatRequest,
    logprobs_of,
    messages_of,
    most_tokens,
    offered,
    read_body,
    refuse,
)
from weft.rl.agents.http_server import HttpError
from weft.rl.agents.session import AgentCall

_READ = {"input", "instructions", "include", "max_output_tokens", "previous_response_id", "store"}
# Keys that may only have the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "background": False, "parallel_tool_calls": True, "text": {"format": {"type": "text"}}, "top_logprobs": 0,
    "truncation": "disabled", "stream_options": {"include_obfuscation": False},
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_PREFIX = "resp_"  # of ids of responses
# Keys of the objects in `input` and `tools`, by type: (required, optional). Chat templates do not write the optional
# keys.
_ITEMS = {
    "message": ({"role", "content"}, {"id", "status"}),
    "function_call": ({"call_id", "name", "arguments"}, {"id", "status"}),
    "function_call_output": ({"call_id", "output"}, {"id", "status"}),
}
_PARTS = {kind: ({"text"}, {"annotations", "logprobs"}) for kind in ("input_text", "output_text")}
_TOOLS = {"function": ({"name"}, {"description", "parameters", "strict"})}


@dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """A request of the Responses API as a chat. echoed: keys that its response repeats."""

    echoed: Mapping[str, Any]


def parse_responses_request(
    body: bytes, models: Sequence[str], rollout: RolloutConfig, calls: Sequence[AgentCall]
) -> ResponsesRequest:
    """Read a request. models: the names by which the policy is served. calls: earlier ones of the session, which
    `previous_response_id` may name. HttpError for a request that cannot be answered."""
    value = read_body(body, models)
    refuse(value, rollout, _READ, _NEUTRAL)
    include = value.get("include", [])
    if not isinstance(include, list) or set(map(str, include)) - {_LOGPROBS}:
        raise HttpError(400, f"`include` is {include!r}; this endpoint can include {_LOGPROBS} only", param="include")
    messages = _earlier(value["previous_response_id"], calls) if "previous_response_id" in value else []
    if (instructions := value.get("instructions")) is not None:
        if not isinstance(instructions, str):
            raise HttpError(400, "`instructions` must be a text", param="instructions")
        messages = [{"role": "system", "content": instructions}, *messages]
    echoed = {"temperature": rollout.temperature, "top_p": rollout.top_p, "tools": [], "tool_choice": "auto"} | {
        name: value[name]
        for name in ("instructions", "max_output_tokens", "metadata", "previous_response_id", "store", "tools",
                     "tool_choice", "user")
        if name in value
    }  # fmt: skip
    return ResponsesRequest(
        messages=messages_of([*messages, *_messages(value.get("input"))]),
        tools=offered(value, [_tool(tool, f"tools[{n}]") for n, tool in enumerate(_listed(value, "tools"))]),
        kwargs=value.get("chat_template_kwargs", {}),
        max_tokens=most_tokens(value, "max_output_tokens"),
        stop=(),
        stream=bool(value.get("stream")),
        usage=True,
        logprobs=bool(include),
        token_ids=bool(value.get("return_token_ids")),
        echoed=echoed,
    )


def _earlier(name: Any, calls: Sequence[AgentCall]) -> list[Mapping[str, Any]]:
    """The conversation up to the response of this id, without its instructions, as the API has it."""
    for call in calls:
        if isinstance(call.request, ResponsesRequest) and name == _PREFIX + call.answer.name:
            if not call.request.echoed.get("store", True):
                reason = "was requested with `store: false`: repeat its items in `input`"
                break
            return [*call.request.messages["instructions" in call.request.echoed :], call.answer.message]
    else:
        reason = "is of no response of this episode"
    raise HttpError(
        400, f"`previous_response_id` {name!r} {reason}", "previous_response_not_found", "previous_response_id"
    )


def _listed(value: Mapping[str, Any], name: str) -> list[Any]:
    items = value.get(name, [])
    if not isinstance(items, list):
        raise HttpError(400, f"`{name}` must be a list", param=name)
    return items


def _messages(items: Any) -> list[dict[str, Any]]:
    """`input` as messages of a chat. Calls belong to the assistant's message before them."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for number, raw in enumerate(_listed({"input": items}, "input")):
        name = f"input[{number}]"
        item = _read(raw, name, _ITEMS, "message")
        if item["type"] == "message":
            messages.append({"role": item["role"], "content": _text(item["content"], f"{name}.content")})
        elif item["type"] == "function_call_output":
            content = _text(item["output"], f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            function = {"name": item["name"], "arguments": item["arguments"]}
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
    return messages


def _text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    parts = [_read(part, f"{name}[{n}]", _PARTS) for n, part in enumerate(_listed({name: content}, name))]
    return "".join(str(part["text"]) for part in parts)


def _tool(tool: Any, name: str) -> dict[str, Any]:
    """A function in the format of chat completions."""
    function = _read(tool, name, _TOOLS)
    return {"type": function.pop("type"), "function": function}


def _read(
    raw: Any, name: str, kinds: Mapping[str, tuple[set[str], set[str]]], default: str | None = None
) -> dict[str, Any]:
    """The keys of an object that are not null. kinds: its possible types -> (keys it must have, keys it may have).
    default: its type if it names none. HttpError for other types, and for keys that would be ignored."""
    if not isinstance(raw, dict):
        raise HttpError(400, f"`{name}` must be an object", param=name)
    item = {"type": default, **{key: value for key, value in raw.items() if value is not None}}
    if item["type"] not in kinds:
        raise HttpError(
            400, f"`{name}.type` is {item['type']!r}; this endpoint reads {', '.join(kinds)}", param=f"{name}.type"
        )
    required, optional = kinds[item["type"]]
    if missing := sorted(required - item.keys()):
        raise HttpError(400, f"`{name}` has no `{missing[0]}`", param=f"{name}.{missing[0]}")
    if unknown := sorted(item.keys() - required - optional - {"type"}):
        raise HttpError(400, f"`{name}.{unknown[0]}` has no effect here: remove it", param=f"{name}.{unknown[0]}")
    return item


def responses_body(request: ResponsesRequest, answer: ChatAnswer, model: str) -> bytes:
    """The response to a request, or the events of a stream."""
    status = "incomplete" if answer.finish == "length" else "completed"
    response: dict[str, Any] = {
        "id": _PREFIX + answer.name, "object": "response", "created_at": int(time.time()), "model": model,
        "status": status, "error": None, "incomplete_details": None, "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "background": False, "store": True,
        **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id")), "metadata": {},
        **request.echoed, "output": _output(request, answer, status),
        "usage": {
            "input_tokens": len(answer.prompt_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(answer.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(answer.prompt_ids) + len(answer.ids),
        },
    }  # fmt: skip
    if answer.finish == "length":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    if request.token_ids:
        response |= {"prompt_token_ids": list(answer.prompt_ids), "token_ids": list(answer.ids)}
    if not request.stream:
        return json.dumps(response).encode()
    events = enumerate(_events(response))
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"
        for number, event in events
    ).encode()


def _output(request: ResponsesRequest, answer: ChatAnswer, status: str) -> list[dict[str, Any]]:
    """A message, if the answer has text or no calls, and its calls."""
    calls, text = answer.message.get("tool_calls", ()), answer.message["content"] or ""
    items: list[dict[str, Any]] = [
        {
            "type": "function_call", "id": f"fc_{answer.name}_{number}", "call_id": call["id"],
            "status": "completed", **call["function"],
        }
        for number, call in enumerate(calls)
    ]  # fmt: skip
    if text or not calls:
        logprobs = logprobs_of(answer) if request.logprobs else []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        message = {"type": "message", "id": f"msg_{answer.name}", "role": "assistant", "status": status}
        items.insert(0, {**message, "content": [part]})
    return items


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream, without their numbers: each text and each call's arguments come in one delta."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        ids = {"item_id": item["id"], "output_index": index}
        added = {"type": "response.output_item.added", "output_index": index}
        if item["type"] == "message":
            ids |= {"content_index": 0}
            (part,) = item["content"]
            content = {"text": part["text"], "logprobs": part["logprobs"]}
            yield {**added, "item": {**item, "status": "in_progress", "content": []}}
            yield {**ids, "type": "response.content_part.added", "part": {**part, "text": "", "logprobs": []}}
            yield {**ids, "type": "response.output_text.delta", "delta": part["text"], "logprobs": part["logprobs"]}
            yield {**ids, "type": "response.output_text.done", **content}
            yield {**ids, "type": "response.content_part.done", "part": part}
        else:
            arguments = item["arguments"]
            yield {**added, "item": {**item, "status": "in_progress", "arguments": ""}}
            yield {**ids, "type": "response.function_call_arguments.delta", "delta": arguments}
            yield {
                **ids, "type": "response.function_call_arguments.done", "arguments": arguments, "name": item["name"]
            }  # fmt: skip
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": dict(response)}
