"""Converts chat messages from the forms in datasets to the form that chat templates read, and checks each message."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from weft.config.sources import ROLES
from weft.config.yaml12 import override, show
from weft.errors import UserError
from weft.strict_json import JsonError, parse

Message = dict[str, Any]

# ShareGPT's names of the roles, as datasets and LLaMA-Factory use them.
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
# Roles of messages whose content is the JSON of a call (ShareGPT, ms-swift), and roles of messages with its result.
CALL_ROLES = ("function_call", "tool_call")
RESULT_ROLES = ("tool_response", "function_response")
# Other names of roles: only used for the data.roles that an error message proposes.
_LIKELY = {
    **SPEAKERS, "prompter": "user", "instruction": "user", "question": "user", "bot": "assistant", "ai": "assistant",
    "model": "assistant", "answer": "assistant", "chatbot": "assistant", "response": "assistant",
}  # fmt: skip
# Other names of the keys of a message: only used for the data.message_keys that an error message proposes.
_LIKELY_KEYS = {
    "role": ("role", "speaker", "from", "author", "sender", "user_type", "type", "name"),
    "content": ("content", "text", "value", "message", "body", "utterance", "msg"),
}

# Names of an answer's thoughts: DeepSeek, Qwen; gpt-oss, Anthropic, Ollama; OpenRouter, vLLM, Gemma 4; others.
THOUGHTS = (
    "reasoning_content", "thinking", "reasoning", "thought", "thoughts", "thinking_content", "reasoning_text", "think",
)  # fmt: skip
# Marks of trained (1, true) and untrained (0, false) answers: axolotl, its older default, ms-swift and xtuner, slime
# and Miles, OpenAI and Together, others.
_MARKS = (
    "train", "training", "loss", "step_loss_mask", "loss_mask", "weight", "loss_weight", "loss_scale", "trainable",
    "trained", "is_trained", "should_train",
)  # fmt: skip
_OPPOSITE_MARKS = ("masked",)  # torchtune: true is not trained
# Marks of parts of a text (axolotl), and a mark that means "trained" for some trainers and "not trained" for others.
_REFUSED_MARKS = {
    "train_detail": "weft trains a whole answer or none of it",
    "training_detail": "weft trains a whole answer or none of it",
    "reasoning_training_detail": "weft trains a whole answer or none of it",
    "mask": "it is ambiguous: it marks trained messages for some trainers, untrained messages for others",
}

# Keys that templates and weft read; other keys are accepted only if the template reads them.
_READ = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "train", *THOUGHTS))
# Keys about the origin of a message, which no model reads or writes: of data sets on the hub (WildChat,
# OASST, ShareGPT ...) and of logs of APIs.
_HARMLESS = frozenset((
    "id", "_id", "message_id", "msg_id", "uuid", "openai_id", "parent_id", "parent", "parent_message_id", "call_id",
    "conversation_id", "turn", "turn_id", "turn_index", "turn_number", "turn_identifier", "index", "idx", "order",
    "timestamp", "time", "date", "datetime", "created", "created_at", "create_time", "updated_at", "update_time",
    "model", "model_name", "source", "dataset", "origin", "provider", "tool_name", "function_name", "object",
    "language", "lang", "country", "state", "hashed_ip", "header", "toxic", "redacted", "metadata", "meta", "extra",
    "extra_info", "info", "usage", "logprobs", "finish_reason", "stop_reason", "native_finish_reason", "annotations",
    "token_count", "num_tokens", "n_tokens", "score", "scores", "rating", "quality", "reward", "rank", "likes", "hash",
    "cost", "latency", "duration", "status", "cache_control", "parsed_arguments", "system_fingerprint", "markdown",
))  # fmt: skip
# Values without content: torchtune's marks of a message, types of OpenAI's Responses, unfinished
# answers.
_SAYING_NOTHING: dict[str, tuple[Any, ...]] = {
    "eot": (True,), "ipython": (False,), "end_turn": (True,), "prefix": (False,), "partial": (False,),
    "refusal": (False,), "is_error": (False,), "type": ("message", "text"), "content_type": ("text",),
}  # fmt: skip
CALL_KEYS = frozenset(("id", "type", "function", "name", "arguments"))
FUNCTION_KEYS = frozenset(("name", "arguments"))
_PART_KEYS = frozenset(("type", "text"))


@dataclass(frozen=True, slots=True)
class MessageRules:
    """Options for reading messages. roles, keys, ignored, system: as data.roles, data.message_keys, data.ignore and
    data.system."""

    roles: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    system: str | None = None


AS_THEY_STAND = MessageRules()


class ContentParts(str):
    """The joined text of a content with parts. parts: the list of parts, for templates that read lists."""

    parts: list[dict[str, str]]

    def __new__(cls, parts: Sequence[Any]) -> ContentParts:
        items = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        text = super().__new__(cls, "".join(part["text"] for part in items if part["type"] == "text"))
        text.parts = [
            {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": part["type"]}
            for part in items
        ]
        return text

    @property
    def texts(self) -> list[str]:
        return [part["text"] for part in self.parts if part["type"] == "text"]


def with_parts(message: Message) -> Message:
    """The message; with images or videos, its content is a list, because text would lose them."""
    content = message.get("content")
    if not isinstance(content, ContentParts) or all(part["type"] == "text" for part in content.parts):
        return message
    return {**message, "content": content.parts}


MEDIA = ("images", "videos", "audios")
IMAGE_PARTS = ("image", "image_url", "input_image")
VIDEO_PARTS = ("video", "video_url", "input_video")


def read_messages(
    location: str,
    column: str,
    value: Any,
    rules: MessageRules = AS_THEY_STAND,
    images: bool = False,
    videos: bool = False,
) -> list[Message]:
    """The messages of a column, each a new dict without nulls. images, videos: whether content parts of these types are
    allowed.

    `from` and `value` become `role` and `content`; marks of other trainers become `train`; other names of thoughts
    become `reasoning_content`; calls in other forms become `tool_calls`; text parts are unchanged. Other keys stay, for
    the chat template. Raises UserError for a value that is not a message.
    """
    value = parse_json_list(location, column, value)
    if not isinstance(value, list):
        raise UserError(
            f"{location}: `{column}` must be a list of objects with `role` and `content`, not {describe_type(value)}."
        )
    if not value:
        raise UserError(f"{location}: `{column}` is empty. Add messages, or remove the document.")
    noun = "message" if column == "messages" else f"message of `{column}`"
    read = (*(IMAGE_PARTS if images else ()), *(VIDEO_PARTS if videos else ()))
    converted = {*CALL_ROLES, *RESULT_ROLES}
    messages: list[Message] = []
    older_calls = False
    for number, raw in enumerate(value, start=1):
        if is_plain(raw) and not rules.keys and raw["role"] not in converted:
            messages.append(dict(raw))
            continue
        message = _message(f"{location}: {noun} {number}", raw, rules, read)
        older_calls |= isinstance(raw, dict) and bool(raw.get("function_call"))
        is_call = bool(message.pop(_IS_CALL, False))
        # In ms-swift, parallel calls are consecutive messages. A call joins the answer before it if their marks agree.
        last = messages[-1] if messages else {}
        if is_call and last.get("role") == "assistant" and last.get("train") == message.get("train"):
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), *message["tool_calls"]]}
        else:
            messages.append(message)
    if rules.roles:
        messages = [{**message, "role": rules.roles.get(message["role"], message["role"])} for message in messages]
    if older_calls:
        messages = [{**m, "role": "tool"} if m["role"] == "function" else m for m in messages]
    roles = {*ROLES, *rules.roles.values()}
    for number, message in enumerate(messages, start=1):
        if message["role"] not in roles:
            raise UserError(_unknown_role(f"{location}: {noun} {number}", messages, number - 1, rules.roles))
        if message["role"] != "assistant" and (unread := [n for n in ("tool_calls", *THOUGHTS) if message.get(n)]):
            raise UserError(
                f"{location}: {noun} {number} has `{unread[0]}`, which only an answer of the assistant can have, but "
                f"its role is {json.dumps(message['role'])}. Change the role, or remove the key."
            )
    return messages


def with_default_system(messages: list[Message], rules: MessageRules) -> list[Message]:
    """The messages, preceded by data.system if they have no system message."""
    if rules.system is None or any(message["role"] in ("system", "developer") for message in messages):
        return messages
    return [{"role": "system", "content": rules.system}, *messages]


def unread_keys(message: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a message with content that weft does not read. Only the template can render them."""
    for name, value in message.items():
        if name not in _READ and not is_harmless(name, value):
            yield name


def is_harmless(name: str, value: Any) -> bool:
    """Whether a key of a message, part or call has no content for a model."""
    if name in _HARMLESS or value is None or (isinstance(value, str | list | dict) and not value):
        return True
    return name in _SAYING_NOTHING and any(value is usual or value == str(usual) for usual in _SAYING_NOTHING[name])


def _unknown_role(location: str, messages: Sequence[Message], index: int, roles: Mapping[str, str]) -> str:
    """The error message for an unknown role. It proposes a data.roles with every unknown role of these messages."""
    unknown_role = messages[index]["role"]
    unknown = dict.fromkeys(m["role"] for m in messages if m["role"] not in (*ROLES, *roles.values()))
    mapping = {**roles, **{role: _LIKELY.get(role.lower(), role) for role in unknown}}
    keeps = (
        ""
        if unknown_role.lower() in _LIKELY
        else f", which leaves it as it is, or {{{show(unknown_role)}: assistant}} to train it"
    )
    return (
        f"{location}: the role {json.dumps(unknown_role)} is unknown to weft, so its messages would never be trained. "
        f"Set {override('data.roles', mapping)}{keeps}."
    )


def is_plain(message: Any) -> TypeGuard[Message]:
    """Whether a message has only a role and a text, as most have, and so needs no further checks."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )


def read_tools(location: str, value: Any) -> list[dict[str, Any]]:
    """The tools of a document, from a list of JSON schemas or its JSON text. Raises UserError."""
    value = parse_json_list(location, "tools", value)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        wrong = next((item for item in value if not isinstance(item, dict)), None) if isinstance(value, list) else value
        expected = "a list of objects, and one is " if isinstance(value, list) else "a list of objects, not "
        raise UserError(
            f"{location}: `tools` must be {expected}{describe_type(wrong)}. Each is the JSON schema of a function."
        )
    return value


def parse_json_list(location: str, column: str, value: Any) -> Any:
    """The value, parsed if it is the JSON text of a list, as in tables with string columns. Raises UserError."""
    if not isinstance(value, str) or value.lstrip()[:1] != "[":
        return value
    try:
        return parse(value)
    except JsonError as error:
        raise UserError(
            f"{location}: `{column}` begins like a JSON list, but is not valid JSON: {error}. Write it with json.dumps."
        ) from None


_IS_CALL = "\0call"  # marks, in this file, a message of a role of CALL_ROLES


def _message(location: str, value: Any, rules: MessageRules, read: Sequence[str]) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{location} must be an object with `role` and `content`, not {describe_type(value)}.")
    renamed: dict[Any, str] = {name: key for key, name in rules.keys.items()}
    message: Message = {
        str(renamed.get(name, name)): item
        for name, item in value.items()
        if item is not None and name not in rules.ignored and (name in renamed or name not in rules.keys)
    }
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
        if not isinstance(message["role"], str):
            raise UserError(
                f'{location}: `from` must be a string such as "human", not {describe_type(message["role"])}.'
            )
        message["role"] = _speaker(message["role"], rules)
    if not isinstance(message.get("role"), str):
        raise UserError(_no_role(location, message.get("role"), value, rules))
    if "role" in rules.keys:
        message["role"] = _speaker(message["role"], rules)
    if message["role"] in CALL_ROLES and rules.roles.get(message["role"], "assistant") == "assistant":
        message = _of_call(location, message)
    elif message["role"] in RESULT_ROLES and message["role"] not in rules.roles:
        message["role"] = "tool"
    if unread := [name for name in MEDIA if message.get(name)]:
        raise UserError(
            f"{location}: `{unread[0]}` of a message is not read. Write images and videos as parts of `content`, or as "
            "columns of the row."
        )
    _take_function_call(location, message)
    _take_thoughts(location, message)
    _check_content(location, message, value, rules, read)
    _check_calls(location, message, rules)
    return _with_train(location, message, rules)


def _speaker(speaker: str, rules: MessageRules) -> str:
    """The role of a speaker in ShareGPT's words. A word that data.roles maps, or an unknown word, is unchanged."""
    return speaker if speaker in rules.roles or speaker in CALL_ROLES else SPEAKERS.get(speaker, speaker)


def _no_role(location: str, role: Any, value: Mapping[str, Any], rules: MessageRules) -> str:
    """The error message about a message without a role. It proposes data.message_keys if the message has keys that may
    be roles."""
    if role is not None:
        return f'{location}: `role` must be a string such as "user", not {describe_type(role)}.'
    present = ", ".join(f"`{name}`" for name in value) or "no keys"
    used = {rules.keys.get("content", "content")} & set(value)
    keys: dict[str, str] = {}
    for key, names in _LIKELY_KEYS.items():
        name = next((n for n in names if n not in used and isinstance(value.get(n), str | list)), None)
        if name is not None and name != key:
            keys[key] = name
            used.add(name)
    if "role" not in keys:
        example = override("data.message_keys", {"role": "KEY"})
        return f"{location}: has {present}, but no `role`. Add the role, or set {example}."
    return (
        f"{location}: has {present}, but needs `role` and `content`. Set "
        f"{override('data.message_keys', {**rules.keys, **keys})}."
    )


def _of_call(location: str, message: Message) -> Message:
    """Convert a message of a role of CALL_ROLES, whose content is the JSON of one or several calls, to an answer with
    calls."""
    role, calls = message["role"], message.pop("content", None)
    try:
        calls = parse(calls) if isinstance(calls, str) else calls
    except JsonError as error:
        raise UserError(f"{location}: the content of a {role} must be JSON: {error}.") from None
    listed = calls if isinstance(calls, list) else [calls]
    return {
        **message,
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": call} for call in listed],
        _IS_CALL: role == "tool_call",
    }


def _take_function_call(location: str, message: Message) -> None:
    """Move OpenAI's older `function_call` to `tool_calls`."""
    call = message.pop("function_call", None)
    if not call:
        return
    if message.get("tool_calls"):
        raise UserError(f"{location}: has `function_call` and `tool_calls`. Keep one.")
    try:
        call = parse(call) if isinstance(call, str) else call
    except JsonError as error:
        raise UserError(
            f"{location}: `function_call` must be an object, but this text is not valid JSON: {error}."
        ) from None
    message["tool_calls"] = [{"type": "function", "function": call}]


def _take_thoughts(location: str, message: Message) -> None:
    """Move an answer's thoughts from any of their names to `reasoning_content`."""
    names = [name for name in THOUGHTS if name in message]
    if not names:
        return
    for name in names:
        value = message[name]
        texts = isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value)
        if not isinstance(value, str) and not texts:
            raise UserError(
                f"{location}: `{name}` must be a string, the answer's thoughts, not {describe_type(value)}."
            )
    filled = [name for name in names if message[name]]
    content = message.get("content")
    for name in filled:
        if message[name] != message[filled[0]]:
            raise UserError(f"{location}: has `{filled[0]}` and `{name}`, which differ. Keep one.")
        text = message[name].strip() if isinstance(message[name], str) else ""
        if name not in THOUGHTS[:2] and text and isinstance(content, str) and text in content:
            raise UserError(
                f"{location}: the text of `{name}` is also in `content`, and would be trained twice. Remove `{name}`, "
                f"or set {override('data.ignore', [name])}."
            )
    value = message[(filled or names)[0]]
    for name in names:
        del message[name]
    if filled or names[0] in THOUGHTS[:2]:
        message["reasoning_content"] = value


def _check_content(
    location: str, message: Message, value: Mapping[str, Any], rules: MessageRules, read: Sequence[str]
) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if isinstance(content, list):
        for number, part in enumerate(content, start=1):
            _check_part(f"{location}: part {number} of `content`", part, rules, read, message["role"] == "assistant")
        return
    # A message may have only reasoning, or only tool calls, and no content.
    if content is None and any(message.get(name) for name in ("tool_calls", "reasoning_content")):
        return
    if content is None and "content" not in value:
        present = ", ".join(f"`{name}`" for name in value)
        likely = next((name for name in _LIKELY_KEYS["content"] if isinstance(value.get(name), str | list)), None)
        advice = f" Set {override('data.message_keys', {**rules.keys, 'content': likely})}." if likely else ""
        raise UserError(
            f"{location}: `content` must be a string or a list of text parts, not null. It has {present}.{advice}"
        )
    raise UserError(f"{location}: `content` must be a string or a list of text parts, not {describe_type(content)}.")


def _check_part(location: str, part: Any, rules: MessageRules, read: Sequence[str], answers: bool) -> None:
    """Raises UserError for a part that weft cannot read completely. answers: whether it is of an answer."""
    if not isinstance(part, dict) or "type" not in part:
        raise UserError(
            f'{location} must be an object such as {{"type": "text", "text": "..."}}, not {describe_type(part)}.'
        )
    if part["type"] in read:
        return
    if part["type"] in ("thinking", "reasoning"):
        raise UserError(f"{location} is a thought. Write it as `reasoning_content` of the message.")
    if part["type"] != "text":
        raise UserError(f"{location} is of type {json.dumps(part['type'])}: {_reads(read)}. Remove it.")
    if not isinstance(part.get("text"), str):
        raise UserError(f"{location}: `text` must be a string, not {describe_type(part.get('text'))}.")
    for name, value in part.items():
        if name in _PART_KEYS or name in rules.ignored or is_harmless(name, value):
            continue
        if name in _MARKS or name in _OPPOSITE_MARKS:
            if (value in (0, 1)) and bool(value) == (answers == (name in _MARKS)):
                continue  # the mark agrees with the default
            raise UserError(
                f"{location} has `{name}`: weft trains a whole answer or none of it. Mark the message (`train: "
                f"false`), cut it into several messages, or remove `{name}`."
            )
        raise UserError(f"{location} has `{name}`, which is not read. {leave_out_key(name)}")


def leave_out_key(name: str) -> str:
    """The advice about a key that weft does not read."""
    return f"Remove it, or set {override('data.ignore', [name])} if the model does not need it."


def _reads(read: Sequence[str]) -> str:
    if not read:
        return "weft reads only text here"
    return "weft reads text, images and videos" if VIDEO_PARTS[0] in read else "weft reads only text and images here"


def _check_calls(location: str, message: Message, rules: MessageRules) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    calls = parse_json_list(location, "tool_calls", calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{location}: `tool_calls` must be a list of objects, not {describe_type(calls)}.")
    message["tool_calls"] = calls = [_without(call, rules.ignored) for call in calls]
    for number, call in enumerate(calls, start=1):
        function = call.get("function") or call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f'{location}: call {number} of `tool_calls` has no name: write {{"type": "function", "function": '
                '{"name": "...", "arguments": {...}}}.'
            )
        if "arguments" not in function and "parameters" in function:  # Llama 3's name of the arguments
            renamed = {("arguments" if name == "parameters" else name): item for name, item in function.items()}
            calls[number - 1] = {**call, "function": renamed} if call.get("function") else renamed
            function = renamed
        check_arguments(f"{location}: call {number}", function.get("arguments"))
    if not calls:  # templates test whether the key exists, not whether the list is empty
        del message["tool_calls"]


def _without(call: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """A copy of a call without these keys, also in its function."""
    result = {name: value for name, value in call.items() if name not in ignored}
    if isinstance(result.get("function"), dict):
        result["function"] = {name: value for name, value in result["function"].items() if name not in ignored}
    return result


def check_arguments(location: str, arguments: Any) -> Mapping[str, Any]:
    """The arguments of a call as an object; {} if they are absent, blank or null. Raises UserError for other values."""
    value = arguments
    if isinstance(value, str):
        try:
            value = parse(value) if value.strip() else None
        except JsonError as error:
            raise UserError(f"{location}: `arguments` is not valid JSON: {error}.") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(
            f"{location}: `arguments` must be an object of names and values, or its JSON text, not "
            f"{describe_type(value)}."
        )
    return value


def _with_train(location: str, message: Message, rules: MessageRules) -> Message:
    """The message with its marks, of any trainer, converted to `train`. Raises UserError."""
    for name, because in _REFUSED_MARKS.items():
        if name in message and not is_harmless(name, message[name]):
            raise UserError(
                f"{location} has `{name}`: {because}. Write `train: true` or `train: false` for the whole message, or "
                f"set {override('data.ignore', [name])}."
            )
    marks: dict[str, bool] = {}
    for name in (*_MARKS, *_OPPOSITE_MARKS):
        if name not in message:
            continue
        value = message.pop(name)
        if name == "step_loss_mask" and value == 1 and rules.roles.get(message["role"], message["role"]) != "assistant":
            continue  # slime's default, which trains only answers
        if name == "train" and not isinstance(value, bool | int | float):
            raise UserError(f"{location}: `train` must be true or false, not {describe_type(value)}.")
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            shown = json.dumps(value, ensure_ascii=False, default=str)[:80]
            raise UserError(f"{location}: `{name}` is {shown}; it must be 0 (not trained) or 1, false or true.")
        marks[name] = bool(value) == (name in _MARKS)
    if len(set(marks.values())) > 1:
        raise UserError(f"{location}: {' and '.join(f'`{name}`' for name in marks)} contradict each other. Keep one.")
    if marks:
        message["train"] = next(iter(marks.values()))
    return message


def describe_type(value: Any) -> str:
    """The type of a JSON value in words, such as "a number"."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")


def finite_number(location: str, name: str, value: Any) -> float:
    """The number in a column. Raises UserError for other values, and for NaN, which tables use for missing numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{location}: `{name}` must be a number, not {describe_type(value)}.")
    if not math.isfinite(value):
        raise UserError(f"{location}: `{name}` must be a finite number, not {value}.")
    return float(value)
