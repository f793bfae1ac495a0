"""Converts a record to the messages for the chat template, and selects the trained messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.data.messages import ContentParts, check_arguments, is_plain
from weft.data.records import Record
from weft.errors import BadRowError, UserError
from weft.strict_json import JsonError, parse

TrainOn = Literal["answers", "last", "all"]

# Each template reads one of these names, and each data set uses one; weft sets both in messages.
_REASONING = ("reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Input of a chat template. kwargs: template variables of this conversation only. trained: indices of the trained
    answers."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    kwargs: Mapping[str, Any]
    trained: tuple[int, ...]

    def replaced(self, index: int, **changes: Any) -> ChatInput:
        """The conversation with some keys of message `index` changed; None removes a key."""
        message = {key: value for key, value in {**self.messages[index], **changes}.items() if value is not None}
        messages = [*self.messages[:index], message, *self.messages[index + 1 :]]
        return ChatInput(messages, self.tools, self.kwargs, self.trained)


def is_chat(record: Record) -> bool:
    """Whether the chat template renders a record: it has `messages`, or its `prompt` is a list of messages."""
    return record.format == "messages" or (record.format == "prompt" and not isinstance(record.value["prompt"], str))


def conversation(record: Record, train_on: TrainOn, *, text_arguments: bool = False) -> ChatInput:
    """The conversation of a chat record (see is_chat). Raises BadRowError.

    text_arguments: pass the arguments of tool calls as JSON text, which some templates need, instead of as objects.
    """
    value = record.value
    raw: Sequence[Mapping[str, Any]] = value.get("messages") or ()
    first = 0
    if record.format == "prompt":
        raw, first = [*value["prompt"], *_as_messages(value["completion"])], len(value["prompt"])
    kwargs = value.get("chat_template_kwargs")
    return ChatInput(
        messages=[
            m if is_plain(m) else _message(f"{record.location}: message {i}", m, text_arguments)
            for i, m in enumerate(raw, start=1)
        ],
        tools=_tools(record.location, value.get("tools")),
        kwargs=_from_json(record.location, "chat_template_kwargs", kwargs) or {},
        trained=tuple(_trained(record.location, raw, first, train_on)),
    )


def _trained(location: str, messages: Sequence[Mapping[str, Any]], first: int, train_on: TrainOn) -> Iterator[int]:
    for number, message in enumerate(messages, start=1):
        flag = message.get("train")
        if flag is not None and not isinstance(flag, bool):
            raise BadRowError(f"{location}: message {number}: `train` must be true or false, not {json.dumps(flag)}.")
        if flag and (message["role"] != "assistant" or number <= first):
            raise BadRowError(
                f"{location}: message {number} has `train: true`, but only answers of the assistant can be trained. "
                "Remove it, or set data.train_on: all."
            )
        if flag is False and train_on == "all":
            raise BadRowError(
                f"{location}: message {number} has `train: false`, but data.train_on: all trains every token. Remove "
                "one of the two."
            )
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    for i in answers[-1:] if train_on == "last" else answers:
        if messages[i].get("train") is not False:
            yield i


def _as_messages(completion: Any) -> list[Any]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return [completion] if isinstance(completion, dict) else list(completion)


def _message(location: str, raw: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    """The message for the template: null means absent, text parts become ContentParts, missing content becomes ""."""
    message = {key: value for key, value in raw.items() if value is not None and key != "train"}
    content = message.get("content", "")
    message["content"] = ContentParts(content) if isinstance(content, list) and content else _text(content)
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message.update(dict.fromkeys(_REASONING, _text(reasoning)))
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_call(location, call, text_arguments) for call in calls]
    return message


def _text(content: Any) -> Any:
    return str(ContentParts(content)) if isinstance(content, list) else content


def _call(location: str, raw: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    """The call as {"type": "function", "function": {"name", "arguments"}}; missing parts are filled in."""
    call = {key: value for key, value in raw.items() if value is not None}
    function = dict(call.get("function") or {key: call.pop(key) for key in ("name", "arguments") if key in call})
    original = function.get("arguments")
    try:
        arguments: Any = check_arguments(location, original)
    except UserError as error:
        raise BadRowError(str(error)) from None
    if text_arguments:  # the user's text, if it is text: templates write it unchanged
        is_text = isinstance(original, str) and original.strip() and arguments
        arguments = original if is_text else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _tools(location: str, raw: Any) -> list[Any] | None:
    tools = _from_json(location, "tools", raw)
    if tools is not None and not isinstance(tools, list):
        raise BadRowError(f"{location}: `tools` must be a list of functions (JSON schemas).")
    return tools or None


def _from_json(location: str, name: str, raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        return parse(raw) if raw.strip() else None
    except JsonError as error:
        raise BadRowError(f"{location}: `{name}` is not valid JSON: {error}.") from None
