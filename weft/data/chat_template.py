"""Chat templates: selects a template, and renders it with a record of the message that each character comes from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from weft.config.paths import near_names
from weft.config.schema import DataConfig
from weft.data.messages import THOUGHTS
from weft.data.template_bounds import LimitInserter, RenderLimitError, install_limits
from weft.errors import UserError, first_line
from weft.files import regular_file
from weft.models import hf_template

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
NAMED = Path(__file__).parent / "templates"

# Probes of whether a template renders the content of a role: for each role, the messages before and after the probe.
_PROBE = "\ue5e3\ue5e4"
_PROBES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "user": ([], []),
    "assistant": ([("user", "question")], []),
    "system": ([], [("user", "question")]),
    "tool": ([("user", "question"), ("assistant", "answer")], []),
}
# Placeholder for a text to search in a rendering: private-use characters, which data lack and templates copy.
SENTINEL = "\ue5e1\ue5e2"
_ERROR_CHARACTERS = 300  # characters shown of a template's error message

Span = tuple[int, int]  # [start, end) in characters


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendered conversation.

    regions: index of a message -> the span that the template wrote in this message's loop iteration, if it is
    contiguous. scattered: indices of messages with several spans. marked: the spans between generation markers.
    """

    text: str
    regions: dict[int, Span] = field(default_factory=dict)
    scattered: frozenset[int] = frozenset()
    marked: tuple[Span, ...] = ()

    def region_text(self, message: int) -> str:
        """The region of a message as text; "" if it has no region."""
        start, end = self.regions.get(message, (0, 0))
        return self.text[start:end]


class RenderError(Exception):
    """A template raised an exception: it does not support these messages. The text is the template's error message."""


class AmbiguousAnswerError(Exception):
    """The trained part of a rendering is ambiguous; the error message gives the reason."""

    def __init__(self, reason: str, rendering: Rendering) -> None:
        super().__init__(reason)
        self.rendering = rendering


class UnrenderedTextError(AmbiguousAnswerError):
    """A rendering omits some text of its conversation."""


class PythonArgumentsError(UnrenderedTextError):
    """A rendering has the arguments of a call in Python's dict syntax: the template expects them as JSON text."""


class ChatTemplate:
    """A Jinja chat template with transformers' filters and globals. It records the text that it writes for each
    message.

    Marks are extra outputs inserted into the parsed template: around loops, at each loop iteration, and around
    generation markers. A mark is an empty string, so the rendered text is unchanged. Macros and captured blocks get no
    marks, because the template outputs their text later.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = hf_template.environment()
        self._bounds = install_limits(environment, len(source))
        environment.filters["weft_mark"] = _mark_of_item
        inserter = _MarkInserter()
        code = _compiled(environment, source, inserter)
        self._template = environment.template_class.from_code(environment, code, {**environment.globals, **_MARKS})
        self._variables = dict(variables)
        self._words = frozenset(re.findall(r"\w+", source))
        self._read_as: dict[tuple[str, bool], bool] = {}
        self._thoughts: dict[str, bool] = {}
        self._older_calls = self.names("function_call") and not self.names("tool_calls")
        # A third key for thoughts, for templates that read neither of the two keys in messages.
        self.reads_thoughts = self.names("reasoning_content") or self.names("thinking")
        self._thought = ""
        if not self.reads_thoughts:
            named = (name for name in THOUGHTS if re.search(rf"""(\.|\[['"]|\(['"]){name}\b""", source))
            self._thought = next(named, "")
            self.reads_thoughts = bool(self._thought)
        self.has_markers = bool(GENERATION_TAG.search(source))
        # Markers inside macros get no marks; transformers' tracker handles these.
        self._track: Any = environment.activate_tracker if inserter.unseen_markers else None

    def names(self, word: str) -> bool:
        """Whether the template uses a variable or attribute of this name."""
        return word in self._words

    def has_thoughts(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether the template renders the thoughts of the current answer: in the first turn, in a later turn, or
        before the result of a call. Cached."""
        key = json.dumps(kwargs, sort_keys=True, default=str) if kwargs else ""
        if key not in self._thoughts:
            user, thought = {"role": "user", "content": "question"}, {"reasoning_content": _PROBE, "thinking": _PROBE}
            answer = {"role": "assistant", "content": "answer"}
            call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}
            chats: list[list[dict[str, Any]]] = [
                [user, answer | thought],
                [user, answer, user, answer | thought],
                [user, {"role": "assistant", "content": "", "tool_calls": [call]} | thought],
            ]
            self._thoughts[key] = any(self._has_probe(chat, kwargs) for chat in chats)
        return self._thoughts[key]

    def _has_probe(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in self.render(messages, kwargs).text
        except RenderError:
            return False

    @property
    def reads_calls(self) -> bool:
        """Whether the template reads tool calls, in one of their two forms."""
        return self.names("tool_calls") or self._older_calls

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        tools: Sequence[Any] | None = None,
        ask: bool = False,
    ) -> Rendering:
        """Renders a conversation. ask: whether to add the generation prompt. Raises RenderError if the template fails,
        and RenderLimitError if it exceeds its limits."""
        try:
            messages = [self._as_read(message) for message in messages]
            self._bounds.begin()
            rendering = self._rendered(messages, kwargs, tools, ask)
            self._bounds.check(rendering.text, list(messages), dict(kwargs), list(tools or ()))
            return rendering
        except RenderLimitError:
            raise
        except TemplateError as error:
            raise RenderError(first_line(error)[:_ERROR_CHARACTERS]) from error
        except Exception as error:  # the expressions of a template can raise any exception
            raise RenderError(f"{type(error).__name__}: {first_line(error)}"[:_ERROR_CHARACTERS]) from error

    def _as_read(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with its content as a list of parts, if it is a list in the data or the template reads no plain
        text (SmolVLM, Idefics3, LLaVA-NeXT); unchanged if the template reads no lists. Thoughts and calls get the keys
        that the template reads."""
        if self._thought and "thinking" in message:
            message = {**message, self._thought: message["thinking"]}
        if self._older_calls and message.get("role") == "tool":
            message = {**message, "role": "function"}
        elif self._older_calls and len(message.get("tool_calls", ())) == 1:
            message = {**message, "function_call": message["tool_calls"][0]["function"]}
        content = message.get("content")
        if not isinstance(content, str):
            return message
        parts, role = getattr(content, "parts", None), str(message.get("role"))
        if (parts is None and self._reads(role, parts=False)) or not self._reads(role, parts=True):
            return message
        return {**message, "content": parts or [{"type": "text", "text": content}]}

    def _reads(self, role: str, *, parts: bool) -> bool:
        """Whether the template renders this role's content as a list of parts (`parts`), or else as text. Cached."""
        role = role if role in _PROBES else "user"
        if (role, parts) not in self._read_as:
            before, after = _PROBES[role]
            probe = [
                {"role": probe_role, "content": [{"type": "text", "text": text}] if parts else text}
                for probe_role, text in (*before, (role, _PROBE), *after)
            ]
            self._bounds.begin()
            try:
                text = self._rendered(probe, {}, None, False).text
            except RenderLimitError:
                raise
            except Exception:  # the expressions of a template can raise any exception
                text = ""
            self._read_as[role, parts] = _PROBE in text and not re.search(r"['\"]type['\"]", text)
        return self._read_as[role, parts]

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], tools: Sequence[Any] | None, ask: bool
    ) -> Rendering:
        blocks: list[str] = []
        marked: list[Span] = []
        with nullcontext() if self._track is None else self._track(blocks, marked):
            context = self._template.new_context(
                {
                    **self._variables,
                    **kwargs,
                    "messages": [_Message(message, index) for index, message in enumerate(messages)],
                    "tools": None if tools is None else list(tools),
                    "documents": None,
                    "add_generation_prompt": ask,
                }
            )
            pieces = _pieces(self._template.root_render_func(context), blocks, marked)
        regions = {message: spans[0] for message, spans in pieces.items() if len(spans) == 1}
        return Rendering("".join(blocks), regions, frozenset(pieces) - frozenset(regions), tuple(sorted(marked)))


class _PositionMark(str):
    """An empty string that marks a position in the output. message: index of the loop iteration's message, else
    None."""

    message: int | None

    def __str__(self) -> str:
        return self  # str(mark) would be a plain text


def _new_mark(message: int | None = None) -> _PositionMark:
    mark = _PositionMark()
    mark.message = message
    return mark


_mark_of_message = cache(_new_mark)
_LOOP_BEGINS, _LOOP_ENDS, _NO_MESSAGE, _MARKED, _UNMARKED = (_new_mark() for _ in range(5))
_MARKS = {
    "weft_loop_begins": _LOOP_BEGINS,
    "weft_loop_ends": _LOOP_ENDS,
    "weft_marks_begin": _MARKED,
    "weft_marks_end": _UNMARKED,
}


class _Message(dict[str, Any]):
    """A message with the mark of its index. It compares equal to a plain dict."""

    def __init__(self, message: Mapping[str, Any], index: int) -> None:
        super().__init__(message)
        self.mark = _mark_of_message(index)


def _mark_of_item(item: Any) -> _PositionMark:
    """The filter whose output begins a loop iteration: the mark of message `item`, or _NO_MESSAGE for another item."""
    return item.mark if type(item) is _Message else _NO_MESSAGE


def _pieces(stream: Iterable[str], blocks: list[str], marked: list[Span]) -> dict[int, list[Span]]:
    """Appends the text to `blocks` and the spans between markers to `marked`. Returns message -> its spans."""
    pieces: dict[int, list[Span]] = {}
    stack: list[int | None] = []  # the message of each open loop; None: its items are not messages
    marks: list[int] = []
    start = length = 0
    for block in stream:
        if type(block) is not _PositionMark:
            blocks.append(block)
            length += len(block)
            continue
        if block is _MARKED:
            marks.append(length)
            continue
        if block is _UNMARKED:
            marked.append((marks.pop(), length))
            continue
        if start < length:
            message = next((index for index in reversed(stack) if index is not None), None)
            if message is not None:
                _add(pieces.setdefault(message, []), start, length)
            start = length
        if block is _LOOP_BEGINS:
            stack.append(None)
        elif block is _LOOP_ENDS:
            stack.pop()
        else:
            stack[-1] = block.message
    return pieces


def _add(spans: list[Span], start: int, end: int) -> None:
    if spans and spans[-1][1] == start:
        start = spans.pop()[0]
    spans.append((start, end))


# Templates read these keys of messages and calls as attributes. The sandbox tries a slow attribute lookup before the
# item; reading the item at once gives the same value.
_ITEMS = frozenset(
    ("role", "content", "tool_calls", "reasoning_content", "thinking", "name", "function", "arguments", "type", "text")
)


class _MarkInserter(NodeTransformer):
    """Inserts marks around loops, at the beginning of each loop iteration, and around generation markers.
    unseen_markers: number of generation markers at positions where no marks can be inserted.
    """

    def __init__(self) -> None:
        self.unseen_markers = 0

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        if node.recursive or not isinstance(node.target, nodes.Name):
            return node
        item = nodes.Name(node.target.name, "load", lineno=node.lineno)
        index = nodes.Filter(item, "weft_mark", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.Output([index], lineno=node.lineno))
        return [_output("weft_loop_begins", node), node, _output("weft_loop_ends", node)]

    def visit_CallBlock(self, node: nodes.CallBlock) -> Any:
        if not _is_marker(node):
            return self._without_marks(node)
        self.generic_visit(node)
        inside = nodes.Scope(node.body, lineno=node.lineno)
        return [_output("weft_marks_begin", node), inside, _output("weft_marks_end", node)]

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        self.generic_visit(node)
        if node.attr not in _ITEMS or node.ctx != "load":
            return node
        return nodes.Getitem(node.node, nodes.Const(node.attr, lineno=node.lineno), "load", lineno=node.lineno)

    def _without_marks(self, node: nodes.Node) -> nodes.Node:
        self.unseen_markers += sum(_is_marker(call) for call in node.find_all(nodes.CallBlock))
        return node

    visit_Macro = visit_FilterBlock = visit_AssignBlock = _without_marks


def _is_marker(node: nodes.CallBlock) -> bool:
    call = node.call.node
    return isinstance(call, nodes.ExtensionAttribute) and call.name == hf_template.GENERATION_CALL


def _compiled(environment: Any, source: str, inserter: _MarkInserter) -> Any:
    """The compiled code of a template, with limits and marks inserted. Raises TemplateSyntaxError."""
    try:
        return environment.compile(inserter.visit(LimitInserter().visit(environment.parse(source))))
    except (RecursionError, MemoryError, SyntaxError, OverflowError) as error:  # Python's limits on nesting
        raise TemplateSyntaxError(f"it is nested too deeply ({type(error).__name__})", 1) from None


def _output(name: str, near: nodes.Node) -> nodes.Output:
    return nodes.Output([nodes.Name(name, "load", lineno=near.lineno)], lineno=near.lineno)


def common_start(a: str, b: str) -> int:
    """The length of the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def common_header(text: str, prompt: str, tokens: Sequence[str]) -> str:
    """The longest common prefix of `text` and `prompt` that does not split any of `tokens` in the prompt."""
    n = common_start(text, prompt)
    cut = (
        i
        for token in tokens
        for i in range(max(0, n - len(token) + 1), n)
        if i + len(token) > n and prompt.startswith(token, i)
    )
    return prompt[: min(cut, default=n)]


def chosen_template(data: DataConfig) -> str | None:
    """The Jinja source of data.chat_template, which names a file or a template of weft; None if unset. Raises
    UserError."""
    name = data.chat_template
    if name is None:
        return None
    names = sorted(path.stem for path in NAMED.glob("*.jinja"))
    path = NAMED / f"{name}.jinja" if name in names else Path(name)
    try:
        if not os.path.lexists(path):
            raise FileNotFoundError
        source = regular_file(path, "a chat template").read_text(encoding="utf-8")
        ChatTemplate(source, {})
    except FileNotFoundError:
        raise UserError(
            f"data.chat_template: neither a file {name} in {Path.cwd()} nor a template of that name exists. Set it to "
            f"a Jinja file, or to one of: {', '.join(names)}.{near_names(path)}"
        ) from None
    except UserError as error:  # not a regular file
        raise UserError(f"data.chat_template: cannot read {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: cannot read {name}: {error}.") from None
    except TemplateSyntaxError as error:
        raise UserError(f"data.chat_template: {name}:{error.lineno} is not valid Jinja: {error.message}.") from None
    return source
