"""Parses rows into Records. Each row is a document in one of these formats, checked before tokenising:

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"prompt": "...", "completion": "..."}    both strings, or both messages
{"text": "..."}
{"instruction": "...", "input": "...", "output": "..."}     becomes a Record of messages, or of prompt and completion
{"input_ids": [...], "labels": [...]}     tokens, used unchanged; `labels` are not shifted, and -100 is not trained
{"input_ids": [...], "loss_mask": [...]}  1 is trained; also TRL's completion_mask and assistant_masks

Further columns: `tools`, `system` and `chat_template_kwargs`, `history` of an instruction, and `images` and `videos` of
a chat (weft/data/image_columns.py). weft reads or refuses columns of other trainers that have the same meaning or
change the trained tokens (weft/data/columns.py), and ignores all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.config.schema import DataConfig, LabelKind
from weft.config.sources import FORMATS, is_pattern, matching_files
from weft.config.yaml12 import override
from weft.data.columns import (
    SYSTEMS,
    apply_train_columns,
    divided_columns,
    rename_columns,
    system_of,
    template_switches,
    tools_of,
)
from weft.data.image_columns import Image, Video, take_images
from weft.data.messages import (
    AS_THEY_STAND,
    Message,
    MessageRules,
    describe_type,
    read_messages,
    read_tools,
    with_default_system,
)
from weft.errors import UserError
from weft.strict_json import JsonError, parse

# Role of a document in its row: an answer of a pair, or an unpaired answer (weft/data/preferences.py).
Role = Literal["", "chosen", "rejected", "desired", "undesired"]
ROLES: tuple[Role, ...] = ("", "chosen", "rejected", "desired", "undesired")
Format = Literal["messages", "prompt", "text", "input_ids", "steps"]
# Kind of a document. A prompt is text, or messages for the chat template.
Kind = Literal["messages", "prompt", "text", "input_ids", "prompt of messages", "steps"]
ALL_KINDS: tuple[Kind, ...] = ("messages", "prompt", "text", "input_ids", "prompt of messages", "steps")
CHATS: tuple[Kind, ...] = ("messages", "prompt of messages")
NEEDED = "`messages`, `prompt` and `completion`, `text`, `instruction` and `output`, or `input_ids`"

# Columns that change the meaning of a document: without them, training would use another document than the user wrote.
UNREAD_COLUMNS = ("audios", "documents")

# Columns with conversations, and with questions, in data of other libraries.
CONVERSATIONS, QUESTIONS = ("conversations", "conversation"), ("question", "problem", "query", "input")
# Columns that may hold the answer to `prompt` if there is no `completion` -> their paths in data.columns.
ANSWERS = {
    "response": "response", "answer": "answer", "label": "label", "output": "output", "solution": "solution",
    "reward_model": "reward_model.ground_truth", "chosen": "chosen",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class TopLists:
    """A teacher's likeliest tokens (weft/data/taught.py). ids: [entries, K] int32, -1 where an entry has fewer.
    logprobs: [entries, K] fp32."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Record:
    """A checked document.

    location: "file:line" or "file[row]", for messages. value: its keys depend on the format: `messages` (a list of
    dicts), with `tools` and `chat_template_kwargs` if the row has them; `prompt` and `completion`, both strings, or
    both lists of messages with the same two; `prompt`, `steps` and `trained`, texts and a number per step; `text`;
    `input_ids` and `trained` (1 for each trained token, else 0). images: the images and videos of a chat, in the order
    of their content parts. position: of the row, for reading it again; None if a single row cannot be read. role: of an
    answer of preferences. margin: of a pair, or the label of a row. teacher: index of the row's teacher in
    distill.teachers. lists: its teacher's predictions.
    """

    location: str
    format: Format
    value: dict[str, Any]
    images: tuple[Image | Video, ...] = ()
    position: int | None = None
    role: Role = ""
    margin: float = 0.0
    teacher: int = 0
    lists: TopLists | None = None

    @property
    def kind(self) -> Kind:
        is_chat = self.format == "prompt" and not isinstance(self.value["prompt"], str)
        return "prompt of messages" if is_chat else self.format


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """Options for parsing rows. columns: as data.columns. rules: options for reading messages. chat: whether an
    instruction becomes a chat; else plain text. preferences: whether rows are preferences, with one or two documents
    each. label, num_labels: the kind of rows' labels, and the number of classes. step_separator, last_step_only: as
    reward.step_separator and reward.train_on_last_step_only. teachers: the names of distill.teachers. teacher_column:
    the column with such a name. listed: the names of teachers whose rows have lists; `all` without names; empty if none
    has."""

    columns: Mapping[str, str] = field(default_factory=dict)
    rules: MessageRules = AS_THEY_STAND
    chat: bool = True
    preferences: bool = False
    label: LabelKind = ""
    num_labels: int = 0
    step_separator: str = "\n"
    last_step_only: bool = False
    teachers: tuple[str, ...] = ()
    teacher_column: str = ""
    listed: tuple[str, ...] | Literal["all"] = ()

    @property
    def taught(self) -> bool:
        """Whether rows name their teacher or have its predictions."""
        return bool(self.teachers or self.listed)


def template_use(counts: Mapping[str, int], data: DataConfig, template: bool, *, has_roles: bool = False) -> str:
    """A sentence about whether the chat template renders the documents. counts: of documents by kind. template: whether
    there is a template. has_roles: whether documents are answers of preferences, which are rendered only as
    messages."""
    unit = f"; each {data.text_unit or 'line'} of a .txt file is a document" if _has_texts(counts, data) else ""
    return f"{_template_use(counts, data, template, has_roles=has_roles)}{unit}"


def _has_texts(counts: Mapping[str, int], data: DataConfig) -> bool:
    """Whether some documents are text from a .txt file."""
    paths = [source.path for source in data.sources or ()] if data.path is None else [data.path]
    files = [name for path in paths for name in (matching_files(path) if is_pattern(path) else [path])]
    return counts.get("text", 0) > 0 and any(name.removesuffix(".gz").endswith(".txt") for name in files)


def _template_use(counts: Mapping[str, int], data: DataConfig, template: bool, *, has_roles: bool) -> str:
    chats, prompts, texts = sum(counts.get(k, 0) for k in CHATS), counts.get("prompt", 0), counts.get("text", 0)
    if not prompts and not texts:
        return "the chat template renders all documents" if chats else "not used: rows are tokens"
    names = " and ".join(["`prompt` and `completion`"] * bool(prompts) + ["`text`"] * bool(texts))
    names += " are" if prompts else " is"
    if has_roles:
        names = "prompts and answers that are text are"
    if not template:
        return f"there is no chat template: {names} trained as plain text"
    text = f"the chat template renders {chats:,} documents, and {prompts + texts:,} not" if chats else "NOT used"
    text += f": {names} trained as plain text"
    if not prompts:
        return text
    if has_roles:
        return f"{text}. To use it, write messages in place of text"
    if data.sources is not None:
        return f"{text}. To use it, call them `instruction` and `output` in the columns of the source"
    columns = {new: data.columns.get(old, old) for new, old in (("instruction", "prompt"), ("output", "completion"))}
    return f"{text}. To use it, set {override('data.columns', columns)}"


def json_row(location: str, line: bytes) -> dict[str, Any]:
    """The row in a line of JSON. location: "file:line", for messages. Raises UserError."""
    try:
        row = parse(line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: is not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
    except JsonError as error:
        raise UserError(f"{location}: is not valid JSON: {error}.{_json_advice(line)}") from None
    if not isinstance(row, dict):
        raise UserError(f"{location}: holds {describe_type(row)}, not an object.{_json_advice(line)}")
    return row


def parse_row(location: str, row: Mapping[str, Any], reading: ParseOptions, folder: str = "") -> Record:
    """The document of a row. folder: paths of images are relative to it. Raises UserError."""
    ignored = reading.rules.ignored
    read = {name: value for name, value in row.items() if name not in ignored} if ignored else row
    named = rename_columns(location, read, reading.columns) if reading.columns else read
    # Null means absent: exported tables have every column in every row.
    present = {name: value for name, value in named.items() if value is not None}
    refuse_media(location, present)
    _refuse_unwanted(location, present)
    if (conversations := conversations_of(present)) is not None:
        _refuse_preferences(location, present, reading.chat)
        present = {name: value for name, value in present.items() if name not in _QUESTION_COLUMNS}
        present["messages"] = conversations
    return _with_images(
        _READERS[_format(location, row, present, reading.chat)](location, present, reading), present, folder
    )


# Columns of a question, in data that also have whole conversations.
_QUESTION_COLUMNS = ("prompt", "instruction", "input")


def conversations_of(row: Mapping[str, Any]) -> Any:
    """ShareGPT's `conversations` of a row without another format; else None."""
    other_formats = ("messages", "text", "completion", "output", "input_ids")
    if any(name in row for name in other_formats):
        return None
    for name in CONVERSATIONS:
        value = row.get(name)
        if isinstance(value, str) and is_json_list(value):
            return value
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return value
    return None


def refuse_media(location: str, row: Mapping[str, Any], *further: str) -> None:
    """Raises UserError if a row has a column of media that weft does not read. further: further columns that are
    refused in this row."""
    if unread := [name for name in (*further, *UNREAD_COLUMNS) if row.get(name)]:
        read = "text and images" if further else "text, images and videos"
        raise UserError(
            f"{location}: `{unread[0]}` is not supported in this version, which reads {read}. Remove the column if the "
            "document is correct without it."
        )


def _with_images(record: Record, row: Mapping[str, Any], folder: str) -> Record:
    """The record with `images` set to the images and videos of its messages and of the columns `images` and
    `videos`."""
    names = [name for name in ("messages", "prompt", "completion") if isinstance(record.value.get(name), list)]
    if not names:
        _refuse(record.location, row, ("images",), f"`{record.format}` has no messages, which images need")
        _refuse(record.location, row, ("videos",), f"`{record.format}` has no messages, which videos need")
        return record
    messages = [message for name in names for message in record.value[name]]
    bare, images = take_images(record.location, messages, row, folder)
    if not images:
        return record
    first = len(record.value[names[0]])
    pieces = dict(zip(names, (bare[:first], bare[first:]), strict=False))
    return replace(record, value={**record.value, **pieces}, images=images)


def _json_advice(line: bytes) -> str:
    if line.lstrip().startswith(b"["):
        return " JSONL has one object per line, without a list around them. Rename a file with one list to .json."
    if line.strip() in (b"{", b"}", b"},"):
        return " JSONL has one complete object per line; this object spans several lines."
    return " Each line must be one JSON object."


def _format(location: str, row: Mapping[str, Any], present: Mapping[str, Any], chat: bool) -> str:
    """The format of a row, a key of _READERS. Raises UserError if there is none, or more than one."""
    formats = [name for name in ("messages", "text") if name in present]
    formats += ["prompt"] if "prompt" in present or "completion" in present else []
    formats += [name for name in ("instruction", "input_ids") if name in present]
    if len(formats) > 1:
        names = " and ".join(f"`{name}`" for name in formats)
        raise UserError(
            f"{location}: is in more than one format ({names}). Keep one of them, or name the format to train in "
            f"data.columns, as in {override('data.columns', {formats[0]: formats[0]})}."
        )
    if formats:
        return formats[0]
    _refuse_preferences(location, present, chat)
    names = ", ".join(f"`{name}`" for name in row) or "no columns"
    setting = _setting(_likely_columns(present, chat)) or divided_columns(location, row)
    raise UserError(f"{location}: has {names}, but needs {NEEDED}.{setting}")


def _setting(columns: Mapping[str, str]) -> str:
    return f" Set {override('data.columns', columns)}." if columns else ""


def _likely_columns(row: Mapping[str, Any], chat: bool) -> dict[str, str]:
    """The data.columns to propose for a row of another library; empty if weft knows none of its columns."""
    turns = (name for name, value in row.items() if isinstance(value, list) and value and _are_turns(value))
    named = next((name for name in (*CONVERSATIONS, "chosen") if isinstance(row.get(name), list)), next(turns, None))
    if named is not None:
        return {"messages": named}
    question, answers = next((name for name in QUESTIONS if name in row), None), _answers(row)
    if question is not None and answers:
        return _question_and_answer(row, question, answers[0], chat)
    text = next((name for name in ("chosen", "content", *CONVERSATIONS) if isinstance(row.get(name), str)), None)
    return {} if text is None else {"messages" if is_json_list(row[text]) else "text": text}


def _answers(row: Mapping[str, Any]) -> list[str]:
    """The paths of columns that may be the answer to a prompt, likeliest first."""
    return [path for name, path in ANSWERS.items() if name in row]


def _question_and_answer(row: Mapping[str, Any], question: str, answer: str, chat: bool) -> dict[str, str]:
    """The data.columns of a question and an answer. With a chat template, texts become a chat, because a prompt and a
    completion in text would be trained without the template."""
    if chat and isinstance(row[question], str) and not is_json_list(row[question]):
        return {"instruction": question, "output": answer}
    named = {"prompt": question, "completion": answer}
    return {name: path for name, path in named.items() if name != path}


def _refuse_preferences(location: str, row: Mapping[str, Any], chat: bool) -> None:
    """Raises UserError for a preference pair; the error proposes to train only the preferred answer."""
    if "chosen" not in row or "rejected" not in row:
        return
    chosen = row["chosen"]
    question = next((name for name in ("instruction", "prompt", *QUESTIONS, *CONVERSATIONS) if name in row), None)
    if isinstance(chosen, list) and (question is None or isinstance(row[question], str)):
        columns = {"messages": "chosen"}  # the whole conversation
    elif question is None:
        columns = {"messages" if isinstance(chosen, str) and is_json_list(chosen) else "text": "chosen"}
    elif question == "instruction":
        columns = {"output": "chosen"}
    else:
        columns = _question_and_answer(row, question, "chosen", chat)
    raise UserError(
        f"{location}: has `chosen` and `rejected`: it is a preference pair, on which `weft dpo` trains. "
        f"To fine-tune only on the chosen answers, set {override('data.columns', columns)}."
    )


def _refuse_unwanted(location: str, row: Mapping[str, Any]) -> None:
    """Raises UserError for an undesirable answer in a row of unpaired preferences (KTO): TRL's `label` next to prompt
    and completion, or LLaMA-Factory's `kto_tag`."""
    marks = ("label", "kto_tag") if "prompt" in row and "completion" in row else ("kto_tag",)
    for mark in marks:
        if row.get(mark) is False:
            raise UserError(
                f"{location}: `{mark}` is false, so the answer is undesirable. `weft dpo` with preference.loss=kto "
                "trains on such rows. To fine-tune on the other rows, remove these, or set "
                f"{override('data.ignore', [mark])} to train all."
            )


def _are_turns(value: Sequence[Any]) -> bool:
    """Whether a list may be a conversation with unknown keys: objects with two texts or more."""
    return all(isinstance(item, dict) and sum(isinstance(text, str) for text in item.values()) > 1 for item in value)


# ---------------------------------------------------------------- one reader for each format


def _read_messages(location: str, row: Mapping[str, Any], reading: ParseOptions) -> Record:
    messages = apply_train_columns(location, row, _messages(location, "messages", row["messages"], reading), 0)
    return _chat(location, row, reading, messages)


def _chat(location: str, row: Mapping[str, Any], reading: ParseOptions, messages: list[Message]) -> Record:
    messages = with_default_system(with_system(location, row, messages), reading.rules)
    return Record(location, "messages", {"messages": messages, **template_inputs(location, row)})


def _messages(location: str, column: str, value: Any, reading: ParseOptions) -> list[Message]:
    return read_messages(location, column, value, reading.rules, images=True, videos=True)


def _read_text(location: str, row: Mapping[str, Any], reading: ParseOptions) -> Record:
    _refuse(location, row, ("system", "tools", "chat_template_kwargs"), "`text` is trained unchanged")
    _refuse_default_system(location, reading, "text")
    return Record(location, "text", {"text": _string(location, row, "text")})


def _read_tokens(location: str, row: Mapping[str, Any], reading: ParseOptions) -> Record:
    ids, trained = read_tokens(location, row)
    _refuse_default_system(location, reading, "input_ids")
    return Record(location, "input_ids", {"input_ids": ids, "trained": trained})


def _read_prompt(location: str, row: Mapping[str, Any], reading: ParseOptions) -> Record:
    for name, present in (("prompt", "completion"), ("completion", "prompt")):
        if name not in row:
            _refuse_preferences(location, row, reading.chat)
            raise UserError(f"{location}: has `{present}` but no `{name}`.{_prompt_advice(name, row, reading.chat)}")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str) and not is_json_list(prompt):
        names = ("system", "tools", "chat_template_kwargs", *SYSTEMS)
        _refuse(location, row, names, "`prompt` and `completion` are plain text")
        _refuse_default_system(location, reading, "prompt")
        return Record(location, "prompt", {"prompt": prompt, "completion": completion})
    if isinstance(prompt, str) and not is_json_list(prompt):
        if isinstance(completion, list | dict):
            raise UserError(
                f"{location}: `prompt` is text, but `completion` is {describe_type(completion)}. Write both as text, "
                "or both as messages."
            )
        _string(location, row, "completion")
    if not isinstance(prompt, list | str):
        _string(location, row, "prompt")
    if isinstance(completion, str) and not is_json_list(completion):
        completion = [{"role": "assistant", "content": completion}]
    elif isinstance(completion, dict):
        completion = [completion]
    prompt_messages = _messages(location, "prompt", prompt, reading)
    messages = apply_train_columns(
        location, row, [*prompt_messages, *_messages(location, "completion", completion, reading)], len(prompt_messages)
    )
    prompt_messages, answered = messages[: len(prompt_messages)], messages[len(prompt_messages) :]
    prompt_messages = with_default_system(with_system(location, row, prompt_messages), reading.rules)
    return Record(
        location, "prompt", {"prompt": prompt_messages, "completion": answered, **template_inputs(location, row)}
    )


def _read_instruction(location: str, row: Mapping[str, Any], reading: ParseOptions) -> Record:
    """Alpaca's columns. In a chat, the question is one user message; as plain text, it ends with an empty line."""
    if "output" not in row:
        _refuse_preferences(location, row, reading.chat)
        raise UserError(f"{location}: has `instruction` but no `output`. Add `output`, the answer.")
    names = [name for name in ("instruction", "input") if row.get(name) not in (None, "")]
    question = "\n".join(_string(location, row, name) for name in names or ("instruction",))
    answer = _string(location, row, "output")
    if not reading.chat:
        unread = ("system", "tools", "history", "chat_template_kwargs", *SYSTEMS)
        _refuse(location, row, unread, "the tokenizer has no chat template")
        _refuse_default_system(location, reading, "instruction")
        return Record(location, "prompt", {"prompt": f"{question}\n\n", "completion": answer})
    turns = [*_history(location, row), (question, answer)]
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    without_history = {name: value for name, value in row.items() if name != "history"}
    return _chat(location, row, reading, apply_train_columns(location, without_history, messages, 0))


_READERS = {
    "messages": _read_messages,
    "text": _read_text,
    "prompt": _read_prompt,
    "instruction": _read_instruction,
    "input_ids": _read_tokens,
}
assert set(_READERS) == set(FORMATS)


# ---------------------------------------------------------------- further columns


def template_inputs(location: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `tools` and `chat_template_kwargs`, if it has them. Raises UserError."""
    inputs: dict[str, Any] = {}
    tools = tools_of(location, row)
    if tools:
        inputs["tools"] = read_tools(location, tools)
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise UserError(f"{location}: `chat_template_kwargs` must be an object, not {describe_type(kwargs)}.")
    kwargs = {**template_switches(location, row), **kwargs}
    if kwargs:
        inputs["chat_template_kwargs"] = kwargs
    return inputs


def with_system(location: str, row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages, preceded by the text of the row's column `system` or of a column with the same meaning. Raises
    UserError."""
    name, _ = system_of(location, row)
    if not name:
        return messages
    if messages[0].get("role") == "system":
        if name in SYSTEMS and messages[0].get("content") == row[name]:
            return messages
        raise UserError(
            f"{location}: has a column `{name}`, but its messages also begin with a system message. Keep one."
        )
    return [{"role": "system", "content": _string(location, row, name)}, *messages]


def _refuse_default_system(location: str, reading: ParseOptions, form: str) -> None:
    if reading.rules.system is not None:
        raise UserError(
            f"{location}: data.system has no effect on `{form}`, which no chat template renders. Remove data.system, "
            "or write the document as `messages`."
        )


def _history(location: str, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    turns = row.get("history") or []
    pairs = isinstance(turns, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in turns)
    if not pairs or not all(isinstance(text, str) for turn in turns for text in turn):
        raise UserError(f"{location}: `history` must be a list of pairs of strings: [[question, answer], ...].")
    return [(question, answer) for question, answer in turns]


def _refuse(location: str, row: Mapping[str, Any], names: tuple[str, ...], because: str) -> None:
    if unread := [name for name in names if row.get(name)]:
        raise UserError(
            f"{location}: has `{unread[0]}`, but {because}. Write the document as `messages`, or remove `{unread[0]}` "
            f"({override('data.ignore', [unread[0]])})."
        )


def _string(location: str, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        advice = " Write a list of messages under `messages`." if isinstance(value, list) and name == "text" else ""
        raise UserError(f"{location}: `{name}` must be a string, not {describe_type(value)}.{advice}")
    return value


def is_json_list(text: str) -> bool:
    """Whether a string is the JSON text of messages: a list of objects with `role` or `from`."""
    if text[:1] != "[" or text[1:].lstrip()[:1] != "{":
        return False
    try:
        value = parse(text)
    except JsonError:
        return False
    return all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value)


def _prompt_advice(missing: str, row: Mapping[str, Any], chat: bool) -> str:
    if missing == "prompt":
        return " Add `prompt`. A document without a prompt is written as `text`."
    if isinstance(row["prompt"], str) and isinstance(row.get("chosen"), list):  # whole conversations
        return _setting({"messages": "chosen"})
    answers = _answers(row)
    if not answers:
        return " Add `completion`, the answer."
    return _setting(_question_and_answer(row, "prompt", answers[0], chat))


# ---------------------------------------------------------------- rows of token ids

IGNORED = -100
_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
_LARGEST = 2**31 - 1


def read_tokens(location: str, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(token ids, 1 for each trained token, else 0) of a row. Raises UserError."""
    ids = _integers(location, row, "input_ids")
    if not ids or not 0 <= min(ids) <= max(ids) <= _LARGEST:
        raise UserError(f"{location}: `input_ids` must be one or more token ids, each 0 or above.")
    # weft would train a row with padding or several documents as one document.
    length = len(ids)
    mask, positions = row.get("attention_mask"), row.get("position_ids")
    if mask is not None and (not isinstance(mask, list) or mask != [1] * length):
        raise UserError(f"{location}: `attention_mask` excludes tokens. weft pads rows itself, so remove padding.")
    if positions is not None and positions != list(range(length)):
        raise UserError(
            f"{location}: `position_ids` restart, so the row has several documents. weft packs documents itself, so "
            "write one per row."
        )
    named = [name for name in ("labels", *_MASKS) if row.get(name) is not None]
    if len(named) > 1:
        raise UserError(f"{location}: has `{named[0]}` and `{named[1]}`, which both mark the trained tokens. Keep one.")
    if not named:
        return ids, [1] * len(ids)
    values = _integers(location, row, named[0])
    if len(values) != len(ids):
        raise UserError(f"{location}: `{named[0]}` has {len(values)} values, but `input_ids` has {len(ids)}.")
    return ids, _of_labels(location, ids, values) if named[0] == "labels" else _of_mask(location, named[0], values)


def _of_labels(location: str, ids: list[int], labels: list[int]) -> list[int]:
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORED, token):
            raise UserError(
                f"{location}: `labels` has {label} at {index}, but `input_ids` has {token}. A label must be the token "
                "at the same position, not the next, or -100, which is not trained."
            )
    return [int(label != IGNORED) for label in labels]


def _of_mask(location: str, name: str, values: list[int]) -> list[int]:
    if not set(values) <= {0, 1}:
        raise UserError(f"{location}: `{name}` must be 1 for each token that is trained, and 0 for others.")
    return values


def _integers(location: str, row: Mapping[str, Any], name: str) -> list[int]:
    values = row[name]
    if not isinstance(values, list):
        raise UserError(f"{location}: `{name}` must be a list of integers, not {describe_type(values)}.")
    if wrong := [value for value in values if not isinstance(value, int)]:
        raise UserError(f"{location}: `{name}` must contain integers, but has {wrong[0]!r:.40}.")
    return [int(value) for value in values]
