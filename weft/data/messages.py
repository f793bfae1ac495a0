"""Chat messages in the forms that datasets use -> messages as chat templates read them, each checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

from weft.config.sources import ROLES
from weft.config.yaml12 import show
from weft.errors import UserError
from weft.strict_json import JsonError, parse

Message = dict[str, Any]

# ShareGPT's names of the roles, as datasets and LLaMA-Factory use them.
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip
# Other names of roles: only used for the data.roles that an error message proposes.
_LIKELY = {
    **SPEAKERS, "prompter": "user", "instruction": "user", "question": "user", "bot": "assistant", "ai": "assistant",
    "model": "assistant", "answer": "assistant", "chatbot": "assistant", "response": "assistant",
}  # fmt: skip


class Parts(str):
    """The joined text of a content that is a list of parts. parts: the list, for templates that read lists."""

    parts: list[dict[str, str]]

    def __new__(cls, parts: Sequence[Any]) -> Parts:
        listed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        made = super().__new__(cls, "".join(part["text"] for part in listed if part["type"] == "text"))
        made.parts = [
            {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": part["type"]}
            for part in listed
        ]
        return made

    @property
    def texts(self) -> list[str]:
        return [part["text"] for part in self.parts if part["type"] == "text"]


def as_parts(message: Message) -> Message:
    """The message with a list content as Parts, which templates can read as a text or as a list."""
    content = message.get("content")
    return {**message, "content": Parts(content)} if isinstance(content, list) else message


def with_parts(message: Message) -> Message:
    """The message with its content as a list if it has images or videos, which its text would lose."""
    content = message.get("content")
    if not isinstance(content, Parts) or all(part["type"] == "text" for part in content.parts):
        return message
    return {**message, "content": content.parts}


MEDIA = ("images", "videos", "audios")
IMAGE_PARTS = ("image", "image_url", "input_image")
VIDEO_PARTS = ("video", "video_url", "input_video")


def read_messages(
    where: str,
    column: str,
    value: Any,
    roles: Mapping[str, str] = MappingProxyType({}),
    images: bool = False,
    videos: bool = False,
) -> list[Message]:
    """The messages of a column, each a new dict without nulls. roles: as data.roles. images, videos: whether content
    parts of these types are allowed.

    `from` and `value` become `role` and `content`; a `weight` of 0 or 1 becomes `train`; text parts are unchanged.
    Raises UserError for anything that is not a message.
    """
    value = decoded(where, column, value)
    if not isinstance(value, list):
        raise UserError(f"{where}: `{column}` must be a list of objects with `role` and `content`, not {kind(value)}.")
    if not value:
        raise UserError(f"{where}: `{column}` is empty. Give it messages, or remove the document.")
    place = "message" if column == "messages" else f"message of `{column}`"
    read = (*(IMAGE_PARTS if images else ()), *(VIDEO_PARTS if videos else ()))
    found = [
        dict(message) if is_plain(message) else _message(f"{where}: {place} {number}", message, roles, read)
        for number, message in enumerate(value, start=1)
    ]
    if roles:
        found = [{**message, "role": roles.get(message["role"], message["role"])} for message in found]
    known = {*ROLES, *roles.values()}
    for number, message in enumerate(found, start=1):
        if message["role"] not in known:
            raise UserError(_unknown_role(f"{where}: {place} {number}", found, number - 1, roles))
    return found


def _unknown_role(where: str, messages: Sequence[Message], place: int, roles: Mapping[str, str]) -> str:
    """The error message for an unknown role. It proposes a data.roles with every unknown role of these messages."""
    own = messages[place]["role"]
    others = dict.fromkeys(m["role"] for m in messages if m["role"] not in (*ROLES, *roles.values()))
    mapping = {**roles, **{role: _LIKELY.get(role.lower(), role) for role in others}}
    keeps = "" if own.lower() in _LIKELY else f", which leaves it as it is, or {{{show(own)}: assistant}} to train it"
    return (
        f"{where}: weft does not know the role {json.dumps(own)}, so it would not be trained whatever it is. Set "
        f"data.roles={show(mapping)}{keeps}."
    )


def is_plain(message: Any) -> TypeGuard[Message]:
    """Whether a message is just a role and a text, as most are: such a message needs no further checks."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )


def read_tools(where: str, value: Any) -> list[dict[str, Any]]:
    """The tools of a document, from a list of JSON schemas or its JSON text. Raises UserError."""
    value = decoded(where, "tools", value)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        inside = (
            next((item for item in value if not isinstance(item, dict)), None) if isinstance(value, list) else value
        )
        of = "a list of objects, and one is " if isinstance(value, list) else "a list of objects, not "
        raise UserError(f"{where}: `tools` must be {of}{kind(inside)}. Each is the JSON schema of a function.")
    return value


def decoded(where: str, column: str, value: Any) -> Any:
    """The value, parsed if it is the JSON text of a list, as in tables with string columns. Raises UserError."""
    if not isinstance(value, str) or value.lstrip()[:1] != "[":
        return value
    try:
        return parse(value)
    except JsonError as error:
        raise UserError(
            f"{where}: `{column}` is text that begins like a JSON list and is none: {error}. Write it with json.dumps."
        ) from None


def _message(where: str, value: Any, roles: Mapping[str, str], read: Sequence[str]) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be an object with `role` and `content`, not {kind(value)}.")
    message = {name: item for name, item in value.items() if item is not None}
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message, where, roles)
    if not isinstance(message.get("role"), str):
        raise UserError(f'{where}: `role` must be a string such as "user", not {kind(message.get("role"))}.')
    if unread := [name for name in MEDIA if message.get(name)]:
        raise UserError(
            f"{where}: `{unread[0]}` of a message is not read: images and videos are parts of `content`, or columns of "
            "the row."
        )
    _check_content(where, message, read)
    _check_calls(where, message)
    return _with_train(where, message)


def _from_sharegpt(message: Message, where: str, roles: Mapping[str, str]) -> Message:
    speaker = message.pop("from")
    if not isinstance(speaker, str):
        raise UserError(f'{where}: `from` must be a string such as "human", not {kind(speaker)}.')
    role = speaker if speaker in roles else SPEAKERS.get(speaker, speaker)
    message = {"role": role, "content": message.pop("value", None), **message}
    if speaker != "function_call":
        return message
    calls = message.pop("content")
    try:
        calls = parse(calls) if isinstance(calls, str) else calls
    except JsonError as error:
        raise UserError(f"{where}: `value` of a function_call must be JSON: {error}.") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _check_content(where: str, message: Message, read: Sequence[str]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if isinstance(content, list):
        for number, part in enumerate(content, start=1):
            _check_part(f"{where}: part {number} of `content`", part, read)
        return
    # A message may have only reasoning, or only tool calls, and no content.
    if content is None and any(message.get(name) for name in ("tool_calls", "reasoning_content", "thinking")):
        return
    raise UserError(f"{where}: `content` must be a string or a list of text parts, not {kind(content)}.")


def _check_part(where: str, part: Any, read: Sequence[str]) -> None:
    if not isinstance(part, dict) or "type" not in part:
        raise UserError(f'{where} must be an object such as {{"type": "text", "text": "..."}}, not {kind(part)}.')
    if part["type"] in read:
        return
    if part["type"] != "text":
        raise UserError(f"{where} is of type {json.dumps(part['type'])}: {_reads(read)}. Remove it.")
    if not isinstance(part.get("text"), str):
        raise UserError(f"{where}: `text` must be a string, not {kind(part.get('text'))}.")


def _reads(read: Sequence[str]) -> str:
    if not read:
        return "only text is read here"
    return "weft reads text, images and videos" if VIDEO_PARTS[0] in read else "only text and images are read here"


def _check_calls(where: str, message: Message) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{where}: `tool_calls` must be a list of objects, not {kind(calls)}.")
    for number, call in enumerate(calls, start=1):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f'{where}: call {number} of `tool_calls` has no name: write {{"type": "function", "function": '
                '{"name": "...", "arguments": {...}}}.'
            )
    if not calls:  # templates test whether the key exists, not whether the list is empty
        del message["tool_calls"]


def _with_train(where: str, message: Message) -> Message:
    """The message with OpenAI's `weight` (0 or 1) as `train` (false or true). Raises UserError."""
    weight = message.pop("weight", None)
    if weight is not None:
        if weight not in (0, 1):
            raise UserError(f"{where}: `weight` is {json.dumps(weight)}; it must be 0 (not trained) or 1.")
        message.setdefault("train", bool(weight))
    if not isinstance(message.get("train", True), bool):
        raise UserError(f"{where}: `train` must be true or false, not {kind(message['train'])}.")
    return message


def kind(value: Any) -> str:
    """The type of a JSON value in words, such as "a number"."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
