"""Checks that a rendering contains every part of its conversation, in the right place: answers inside trained spans,
other texts outside.

Templates silently drop what they do not support: a list instead of a string, reasoning, a role, the text next to a
call, all calls but the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from weft.data.chat_template import (
    SENTINEL,
    AmbiguousAnswerError,
    ChatTemplate,
    PythonArgumentsError,
    RenderError,
    Rendering,
    Span,
    UnrenderedTextError,
)
from weft.data.conversation import ChatInput
from weft.data.messages import ContentParts


@dataclass(frozen=True, slots=True)
class TextChecks:
    """The checks of a conversation and its rendering. spans: index of an answer -> its trained spans; without spans,
    only completeness is checked. ask: whether the rendering includes the generation prompt."""

    template: ChatTemplate
    chat: ChatInput
    kwargs: Mapping[str, Any]
    rendering: Rendering
    spans: Mapping[int, Sequence[Span]]
    ask: bool = False

    def run(self) -> None:
        """Searches the texts in the rendering. Renders the conversation again only for texts that are not found, and
        once if it has calls. Raises UnrenderedTextError for a missing text, and AmbiguousAnswerError for a text in the
        wrong place."""
        for index, message in enumerate(self.chat.messages):
            content, role = message["content"], message["role"]
            if isinstance(content, str) and content.strip():
                if index in self.spans:
                    self._answer(index, content)
                elif not all(self._is_shown(index, text) for text in _texts(content, role)):
                    self._other_text(index)
            if "thinking" in message:
                self._thoughts(index, message["thinking"])
            elif index == len(self.chat.messages) - 1 and index in self.spans and isinstance(content, str):
                self._thoughts(index, content.rpartition("</think>")[0].rpartition("<think>")[2])
        self._calls_and_tools()

    def _is_shown(self, index: int, text: str) -> bool:
        """Whether a text is in the region of its message, or elsewhere in the rendering and in no other message."""
        text = text.strip()
        if "tool_calls" in self.chat.messages[index]:  # the match may be the text of an argument
            return False
        if text in self.rendering.region_text(index):
            return True
        if text not in self.rendering.text:
            return False
        other_messages = (message for i, message in enumerate(self.chat.messages) if i != index)
        return self.chat.messages[index]["role"] in ("system", "developer") and not any(
            text in str(value) for message in other_messages for value in message.values()
        )

    def _answer(self, index: int, content: str) -> None:
        text = " ".join(self.rendering.text[start:end] for start, end in self.spans[index])
        if "tool_calls" not in self.chat.messages[index]:  # otherwise the match may be the text of an argument
            if content.strip() in text:
                return
            if (visible := content.rpartition("</think>")[2].strip()) and visible in text:
                return
        marked_rendering = self._marked(index, _visible_marked(content))
        if marked_rendering is None:
            return
        times = marked_rendering.text.count(SENTINEL)
        if times == 0:
            raise UnrenderedTextError(self._not_rendered(index), self.rendering)
        if times > 1 or (self._has_regions() and SENTINEL not in marked_rendering.region_text(index)):
            raise AmbiguousAnswerError(
                f"the text of message {index + 1} is not where the template renders this message", self.rendering
            )

    def _not_rendered(self, index: int) -> str:
        suffix = " beside its call" if "tool_calls" in self.chat.messages[index] else ""
        return f"the template does not render the text of message {index + 1}{suffix}"

    def _other_text(self, index: int) -> None:
        """Checks a text that is not an answer: it may be in another message's region, but not in a trained region."""
        message = self.chat.messages[index]
        content = _visible_marked(message["content"]) if message["role"] == "assistant" else SENTINEL
        marked_rendering = self._marked(index, content)
        if marked_rendering is None:
            return
        if self._trains_sentinel(marked_rendering):
            raise AmbiguousAnswerError(f"the template writes message {index + 1} into an answer", self.rendering)
        if SENTINEL not in marked_rendering.text:
            raise UnrenderedTextError(self._not_rendered(index), self.rendering)

    def _trains_sentinel(self, marked_rendering: Rendering) -> bool:
        """Whether the sentinel would be trained. With markers, only their spans count, not whole regions: Gemma 4
        writes the results of tools between a call and the answer, in the region of an answer."""
        if not self.template.has_markers:
            return any(SENTINEL in marked_rendering.region_text(answer) for answer in self.spans)
        return any(SENTINEL in marked_rendering.text[start:end] for start, end in self._trained_marks(marked_rendering))

    def _trained_marks(self, marked_rendering: Rendering) -> Iterator[Span]:
        """The trained spans between markers of another rendering of the conversation."""
        trained = {span for spans in self.spans.values() for span in spans}
        same_count = len(marked_rendering.marked) == len(self.rendering.marked)
        yield from (
            span
            for i, span in enumerate(marked_rendering.marked)
            if not same_count or self.rendering.marked[i] in trained
        )

    def _thoughts(self, index: int, thought: Any) -> None:
        """Raises UnrenderedTextError if an answer's thoughts are missing. Templates may omit them in earlier turns, as
        at inference, if they render them in the last turn."""
        last = index == len(self.chat.messages) - 1
        if not isinstance(thought, str) or thought.strip() in self.rendering.text or (last and index not in self.spans):
            return
        if last or not self.template.has_thoughts(self.kwargs):
            raise UnrenderedTextError(f"the template omits the thoughts of message {index + 1}", self.rendering)

    def _calls_and_tools(self) -> None:
        """Checks all calls and tools in one further rendering, with each argument, name and description replaced by a
        different mark."""
        calls = [
            (index, number, call["function"])
            for index, message in enumerate(self.chat.messages)
            for number, call in enumerate(message.get("tool_calls", ()))
        ]
        if not calls and not self.chat.tools:
            return
        marks = (f"\ue5e1{i}\ue5e2" for i in count())
        arguments: dict[str, tuple[int, int, str]] = {}
        chat = self.chat
        for index, number, function in calls:
            original = function["arguments"]
            if isinstance(original, Mapping) and original and str(dict(original)) in self.rendering.region_text(index):
                raise PythonArgumentsError(
                    f"the template writes the arguments of call {number + 1} of message {index + 1} in Python's "
                    "syntax, not as JSON",
                    self.rendering,
                )
            marked = dict(zip(_arguments(original) or ("",), marks, strict=False))
            arguments.update({mark: (index, number, name) for name, mark in marked.items()})
            chat = _with_arguments(chat, index, number, marked)
        texts: dict[str, tuple[int, str]] = {}
        if self.chat.tools:
            chat = replace(chat, tools=[_marked_tool(i, tool, marks, texts) for i, tool in enumerate(self.chat.tools)])
        marked_rendering = self._render(chat)
        for mark, (index, number, name) in arguments.items():
            self._argument(marked_rendering, mark, index, number, name)
        for index, number, function in calls:
            if function["name"] not in (self.rendering.region_text(index) or self.rendering.text):
                raise UnrenderedTextError(
                    f"the template does not render the name of call {number + 1} of message {index + 1}", self.rendering
                )
        for mark, (number, text) in texts.items():
            shown = marked_rendering is not None and _has(marked_rendering.text, mark)
            if not shown and (
                marked_rendering is not None or not any(form in self.rendering.text for form in _forms(text))
            ):
                raise UnrenderedTextError(
                    f"the template does not render {text[:80]!r} of tool {number + 1}", self.rendering
                )

    def _argument(self, marked_rendering: Rendering | None, mark: str, index: int, number: int, name: str) -> None:
        """Checks an argument of a call. name: "" for a call without arguments. marked_rendering: the rendering with the
        mark; None if the template refused it, and then the argument's text is searched."""
        if marked_rendering is not None and _has(marked_rendering.text, mark):
            if not self._is_trained(marked_rendering, index, mark):
                raise AmbiguousAnswerError(
                    f"call {number + 1} of message {index + 1} is not in the part that the template marks as the "
                    "answer",
                    self.rendering,
                )
        elif not name:
            calls = self.chat.messages[index]["tool_calls"]
            function_name = calls[number]["function"]["name"]
            text = self.rendering.region_text(index) or self.rendering.text
            if text.count(function_name) < sum(function_name in call["function"]["name"] for call in calls):
                raise UnrenderedTextError(
                    f"the template does not render call {number + 1} of message {index + 1}", self.rendering
                )
        elif not self._has_alone(index, number, name):
            raise UnrenderedTextError(
                f"the template does not render argument `{name}` of call {number + 1} of message {index + 1}",
                self.rendering,
            )

    def _is_trained(self, marked_rendering: Rendering, index: int, mark: str) -> bool:
        """Whether a mark in an answer is trained; also true if the answer is not trained."""
        if index not in self.spans:
            return True
        if self.template.has_markers:
            return any(
                _has(marked_rendering.text[start:end], mark) for start, end in self._trained_marks(marked_rendering)
            )
        return not self._has_regions() or _has(marked_rendering.region_text(index), mark)

    def _has_alone(self, index: int, number: int, name: str) -> bool:
        """Whether a call's argument is rendered when only this argument is replaced by its mark; if the template
        refuses that, whether the argument's text is in the rendering."""
        marked_rendering = self._render(_with_arguments(self.chat, index, number, {name: SENTINEL}))
        if marked_rendering is not None:
            return _has(marked_rendering.text, SENTINEL)
        arguments = self.chat.messages[index]["tool_calls"][number]["function"]["arguments"]
        value = (json.loads(arguments) if isinstance(arguments, str) else arguments)[name]
        text = self.rendering.region_text(index) or self.rendering.text
        return any(form in text for form in _forms(value))

    def _has_regions(self) -> bool:
        return bool(self.rendering.regions or self.rendering.scattered)

    def _marked(self, index: int, content: str) -> Rendering | None:
        return self._render(self.chat.replaced(index, content=content))

    def _render(self, chat: ChatInput) -> Rendering | None:
        """The rendering of a changed conversation; None if the template refuses it, because it parses the changed
        part."""
        try:
            return self.template.render(chat.messages, self.kwargs, tools=chat.tools, ask=self.ask)
        except RenderError:
            return None


def _texts(content: str, role: str) -> list[str]:
    """The texts of a content, which images may separate in the rendering. For an answer, the text after its
    thoughts."""
    if role == "assistant":
        return [content.rpartition("</think>")[2].strip() or content]
    return content.texts if isinstance(content, ContentParts) else [content]


def _visible_marked(content: str) -> str:
    """The content with the text after its thoughts replaced by the sentinel."""
    thoughts, closing, visible = content.rpartition("</think>")
    return f"{thoughts}{closing}{SENTINEL}" if visible.strip() else SENTINEL


def _arguments(arguments: Any) -> tuple[str, ...]:
    """The names of the arguments of a call."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return tuple(value) if isinstance(value, Mapping) else ()


def _with_arguments(chat: ChatInput, index: int, number: int, marked: Mapping[str, str]) -> ChatInput:
    """The conversation with these arguments of a call replaced; the arguments stay text if they were text."""
    calls = list(chat.messages[index]["tool_calls"])
    function = calls[number]["function"]
    original = function["arguments"]
    arguments: Any = {**(json.loads(original) if isinstance(original, str) else original), **marked}
    if isinstance(original, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    calls[number] = {**calls[number], "function": {**function, "arguments": arguments}}
    return chat.replaced(index, tool_calls=calls)


def _marked_tool(number: int, tool: Any, marks: Iterator[str], texts: dict[str, tuple[int, str]]) -> Any:
    """The tool with its name, description and parameter names replaced by marks. Adds mark -> (number of the tool,
    text) to `texts`."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool

    def marked(text: Any) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        mark = next(marks)
        texts[mark] = number, text
        return mark

    new = {key: marked(value) if key in ("name", "description") else value for key, value in function.items()}
    parameters = function.get("parameters")
    if isinstance(parameters, Mapping) and isinstance(properties := parameters.get("properties"), Mapping):
        new["parameters"] = {**parameters, "properties": {marked(name): value for name, value in properties.items()}}
    return {**tool, "function": new} if "function" in tool else new


def _has(text: str, mark: str) -> bool:
    """Whether a mark is in a text, unchanged or JSON-escaped."""
    return mark in text or json.dumps(mark)[1:-1] in text


def _forms(value: Any) -> tuple[str, ...]:
    """The forms in which a template may write a value: text unchanged or JSON-escaped, other values as JSON."""
    if isinstance(value, str):
        return value.strip(), json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]
    return json.dumps(value, ensure_ascii=False), json.dumps(value), str(value)
