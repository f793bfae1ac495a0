"""Bodies of POST /v1/chat/completions: parsing of requests, and responses for OpenAI's clients."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from weft.config.rl_schema import RolloutConfig
from weft.data.messages import read_messages
from weft.errors import UserError
from weft.rl.agents.http_server import HttpError

# Keys of a request that change nothing about the answer.
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier",
}  # fmt: skip
_READ = {
    "messages", "stop", "max_tokens", "max_completion_tokens", "stream_options", "logprobs",
}  # fmt: skip
_READ_BY_ALL = {"model", "tools", "tool_choice", "stream", "chat_template_kwargs", "return_token_ids"}
# Keys of a request -> the config key that decides their value. A request may only set the same value.
_DECIDED = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
# Keys that may only have the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "top_logprobs": 0,
    "parallel_tool_calls": True, "response_format": {"type": "text"},
}  # fmt: skip
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ChatRequest:
    """A request. max_tokens: None if it sets no limit. kwargs: variables of the chat template. usage: whether a stream
    ends with a count of tokens. token_ids: whether the response has the ids of prompt and answer."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    kwargs: Mapping[str, Any]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool

    @property
    def columns(self) -> dict[str, Any]:
        """The inputs of the chat template besides messages, as columns of a row."""
        columns: dict[str, Any] = {}
        if self.tools:
            columns["tools"] = list(self.tools)
        if self.kwargs:
            columns["chat_template_kwargs"] = dict(self.kwargs)
        return columns


def parse_request(body: bytes, models: Sequence[str], rollout: RolloutConfig) -> ChatRequest:
    """Read a request. models: the names by which the policy is served. HttpError for a request that cannot be
    answered."""
    value = read_body(body, models)
    refuse(value, rollout, _READ, _NEUTRAL)
    stop = value.get("stop", ())
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
        raise HttpError(400, "`stop` must be a text or a list of texts, none of them empty", param="stop")
    limit = "max_completion_tokens" if "max_completion_tokens" in value else "max_tokens"
    options = value.get("stream_options", {})
    if not isinstance(options, dict):
        raise HttpError(400, "`stream_options` must be an object", param="stream_options")
    return ChatRequest(
        messages=messages_of(value.get("messages")),
        tools=offered(value, value.get("tools", [])),
        kwargs=value.get("chat_template_kwargs", {}),
        max_tokens=most_tokens(value, limit),
        stop=tuple(stops),
        stream=bool(value.get("stream")),
        usage=bool(options.get("include_usage")),
        logprobs=bool(value.get("logprobs")),
        token_ids=bool(value.get("return_token_ids")),
    )


def read_body(body: bytes, models: Sequence[str]) -> dict[str, Any]:
    """The keys of a request that are not null. HttpError if the body is not an object, or names a model that is not
    served."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object")
    value = {name: item for name, item in value.items() if item is not None}
    if value.get("model") not in models:
        raise HttpError(
            404,
            f"the model {value.get('model')!r} is not served here. The endpoint serves only {models[0]!r}, the "
            "trained policy; use another client for other models.",
            "model_not_found",
            "model",
        )
    return value


def refuse(value: Mapping[str, Any], rollout: RolloutConfig, read: Set[str], neutral: Mapping[str, Any]) -> None:
    """Raise HttpError for keys whose values would be ignored. read: keys of this API that are read. neutral: the values
    of other keys that change nothing."""
    for name, key in _DECIDED.items():
        if name in value and value[name] != getattr(rollout, key):
            raise HttpError(
                400,
                f"`{name}` is {value[name]!r}, but the run samples with rollout.{key}={getattr(rollout, key):g}, "
                f"which the loss assumes for every token. Remove `{name}`, or set the config key.",
                param=name,
            )
    for name, unchanged in neutral.items():
        if name in value and value[name] != unchanged:
            raise HttpError(
                400, f"`{name}` is {value[name]!r}, which this endpoint does not support: remove it", param=name
            )
    accepted = read | _READ_BY_ALL | _WITHOUT_EFFECT | _DECIDED.keys() | neutral.keys()
    if unknown := sorted(value.keys() - accepted):
        reason = "; the run sets seeds (train.seed)" if "seed" in unknown else ""
        raise HttpError(400, f"`{unknown[0]}` has no effect here: remove it{reason}", param=unknown[0])
    if not isinstance(value.get("chat_template_kwargs", {}), dict):
        raise HttpError(400, "`chat_template_kwargs` must be an object", param="chat_template_kwargs")


def most_tokens(value: Mapping[str, Any], name: str) -> int | None:
    """The limit of tokens under this name. HttpError if it is not a positive number."""
    limit = value.get(name)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise HttpError(400, f"`{name}` is {limit!r}; it must be 1 or more", param=name)
    return limit


def offered(value: Mapping[str, Any], tools: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools that the policy may call, by `tool_choice`. tools: of the request, in the format of chat
    completions."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise HttpError(400, "`tools` must be a list of objects", param="tools")
    choice = value.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise HttpError(
            400,
            f"`tool_choice` is {choice!r}; this endpoint supports `auto` and `none`, because the policy "
            "decides about calls",
            param="tool_choice",
        )
    return tuple(tools) if choice == "auto" else ()


def messages_of(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """The messages of a request, with contents as texts. HttpError for a malformed message."""
    try:
        messages = read_messages("the request", "messages", raw)
    except UserError as error:
        raise HttpError(400, str(error)) from error
    if messages[-1]["role"] == "assistant":
        raise HttpError(400, "the last message is the assistant's: end with a message to answer")
    return tuple({**message, "content": text_of(message.get("content"))} for message in messages)


def text_of(content: Any) -> str:
    """The text of a message's content: a text, null, or parts."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(str(part.get("text", "")) for part in content)


def same_message(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two messages say the same: role, text, calls, and the call that a result belongs to."""
    return _content(first) == _content(second)


def _content(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = [
        (call.get("id"), call["function"]["name"], _arguments(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")


def _arguments(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def parses_calls(template: str) -> bool:
    """Whether a chat template writes calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, like the
    templates of Qwen3 and Hermes; parse_answer reads this format."""
    return "<tool_call>" in template and not any(mark in template for mark in ("<function=", "<arg_key>"))


def parse_answer(text: str, has_tools: bool, name: str) -> dict[str, Any]:
    """The assistant's message. Calls are parsed only if tools were offered; a call that is not JSON stays text. name:
    of this answer, from which the ids of its calls are made."""
    calls: list[dict[str, Any]] = []
    for written in _CALL.findall(text) if has_tools else ():
        try:
            call = json.loads(written)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError):
            return {"role": "assistant", "content": text}
        calls.append({"id": f"call_{name}_{len(calls)}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text[: text.index("<tool_call>")].strip() or None, "tool_calls": calls}


@dataclass(frozen=True)
class ChatAnswer:
    """An answer, and its fields in responses. name: of the call in its session. pieces: the text of each token. finish:
    `stop`, `length` or `tool_calls`."""

    name: str
    message: Mapping[str, Any]
    finish: str
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[str]


def completion_body(request: ChatRequest, answer: ChatAnswer, model: str) -> bytes:
    """The response to a request: a chat.completion, or the events of a stream."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish}
    if request.logprobs:
        choice["logprobs"] = {"content": logprobs_of(answer), "refusal": None}
    if request.token_ids:
        choice["token_ids"] = list(answer.ids)
    usage = {
        "prompt_tokens": len(answer.prompt_ids),
        "completion_tokens": len(answer.ids),
        "total_tokens": len(answer.prompt_ids) + len(answer.ids),
    }
    body: dict[str, Any] = {"id": f"chatcmpl-{answer.name}", "created": int(time.time()), "model": model}
    if request.token_ids:
        body["prompt_token_ids"] = list(answer.prompt_ids)
    if not request.stream:
        choices = [{**choice, "message": dict(answer.message)}]
        return json.dumps({**body, "object": "chat.completion", "choices": choices, "usage": usage}).encode()
    calls = [{"index": n, **call} for n, call in enumerate(answer.message.get("tool_calls", ()))]
    delta = {**answer.message, **({"tool_calls": calls} if calls else {})}
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish}
    choices_of_chunks: list[list[dict[str, Any]]] = [[{**choice, "delta": delta, "finish_reason": None}], [last]]
    chunks = [{**body, "object": "chat.completion.chunk", "choices": choices} for choices in choices_of_chunks]
    if request.usage:
        chunks.append({**body, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    return "".join(f"data: {line}\n\n" for line in (*map(json.dumps, chunks), "[DONE]")).encode()


def logprobs_of(answer: ChatAnswer) -> list[dict[str, Any]]:
    """One entry for each sampled token, with the end token."""
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(answer.pieces, answer.logprobs, strict=True)
    ]
