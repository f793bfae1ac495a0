"""Checks that everything that a conversation has is in its rendering, and where it belongs: answers inside trained
spans, other texts outside.

Templates silently drop what they do not support: a list instead of a string, reasoning, a role, the text beside a call,
all calls but the first.
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
    """The checks of one conversation and its rendering. spans: index of an answer -> its trained spans; without any,
    only whether everything is rendered is checked. ask: whether the generation prompt was rendered, too."""

    template: ChatTemplate
    chat: ChatInput
    kwargs: Mapping[str, Any]
    rendering: Rendering
    spans: Mapping[int, Sequence[Span]]
    ask: bool = False

    def run(self) -> None:
        """Searches the texts in the rendering; the conversation is rendered again only for texts that are not found,
        and once if it has calls. Raises UnrenderedTextError if something is missing, and AmbiguousAnswerError if it is
        in the wrong place."""
        for place, message in enumerate(self.chat.messages):
            content, role = message["content"], message["role"]
            if isinstance(content, str) and content.strip():
                if place in self.spans:
                    self._answer(place, content)
                elif not all(self._is_shown(place, text) for text in _texts(content, role)):
                    self._other(place)
            if "thinking" in message:
                self._thoughts(place, message["thinking"])
            elif place == len(self.chat.messages) - 1 and place in self.spans and isinstance(content, str):
                self._thoughts(place, content.rpartition("</think>")[0].rpartition("<think>")[2])
        self._calls_and_tools()

    def _is_shown(self, place: int, text: str) -> bool:
        """Whether a text is in the region of its message, or elsewhere in the rendering and in no other message."""
        text = text.strip()
        if "tool_calls" in self.chat.messages[place]:  # it may be that of an argument
            return False
        if text in self.rendering.of(place):
            return True
        if text not in self.rendering.text:
            return False
        others = (message for i, message in enumerate(self.chat.messages) if i != place)
        return self.chat.messages[place]["role"] in ("system", "developer") and not any(
            text in str(value) for message in others for value in message.values()
        )

    def _answer(self, place: int, content: str) -> None:
        text = " ".join(self.rendering.text[start:end] for start, end in self.spans[place])
        if "tool_calls" not in self.chat.messages[place]:  # else the text may be that of an argument
            if content.strip() in text:
                return
            if (visible := content.rpartition("</think>")[2].strip()) and visible in text:
                return
        other = self._marked(place, _visible_marked(content))
        if other is None:
            return
        times = other.text.count(SENTINEL)
        if times == 0:
            raise UnrenderedTextError(self._not_rendered(place), self.rendering)
        if times > 1 or (self._has_regions() and SENTINEL not in other.of(place)):
            raise AmbiguousAnswerError(
                f"the text of message {place + 1} is not where the template renders this message", self.rendering
            )

    def _not_rendered(self, place: int) -> str:
        beside = " beside its call" if "tool_calls" in self.chat.messages[place] else ""
        return f"the template does not render the text of message {place + 1}{beside}"

    def _other(self, place: int) -> None:
        """Checks a text that is not an answer: it may be in the region of another message, but not in a trained one."""
        message = self.chat.messages[place]
        marked = _visible_marked(message["content"]) if message["role"] == "assistant" else SENTINEL
        other = self._marked(place, marked)
        if other is None:
            return
        if self._trains_sentinel(other):
            raise AmbiguousAnswerError(f"the template writes message {place + 1} into an answer", self.rendering)
        if SENTINEL not in other.text:
            raise UnrenderedTextError(self._not_rendered(place), self.rendering)

    def _trains_sentinel(self, other: Rendering) -> bool:
        """Whether the sentinel would be trained. With markers, only their spans count, not whole regions: Gemma 4
        writes the results of tools between a call and the answer, in the region of an answer."""
        if not self.template.has_markers:
            return any(SENTINEL in other.of(answer) for answer in self.spans)
        return any(SENTINEL in other.text[start:end] for start, end in self._trained_marks(other))

    def _trained_marks(self, other: Rendering) -> Iterator[Span]:
        """The spans between markers of another rendering of the conversation that are trained."""
        trained = {span for spans in self.spans.values() for span in spans}
        alike = len(other.marked) == len(self.rendering.marked)
        yield from (span for i, span in enumerate(other.marked) if not alike or self.rendering.marked[i] in trained)

    def _thoughts(self, place: int, thought: Any) -> None:
        """Raises UnrenderedTextError if what an answer thinks is missing. Templates may leave it out of earlier turns,
        as at inference, if they have it in the last one."""
        last = place == len(self.chat.messages) - 1
        if not isinstance(thought, str) or thought.strip() in self.rendering.text or (last and place not in self.spans):
            return
        if last or not self.template.has_thoughts(self.kwargs):
            raise UnrenderedTextError(
                f"the template leaves out what message {place + 1} thinks before it answers", self.rendering
            )

    def _calls_and_tools(self) -> None:
        """Checks all calls and tools by one more rendering, in which each of their arguments, names and descriptions is
        replaced by a mark of its own."""
        calls = [
            (place, number, call["function"])
            for place, message in enumerate(self.chat.messages)
            for number, call in enumerate(message.get("tool_calls", ()))
        ]
        if not calls and not self.chat.tools:
            return
        marks = (f"\ue5e1{i}\ue5e2" for i in count())
        arguments: dict[str, tuple[int, int, str]] = {}
        chat = self.chat
        for place, number, function in calls:
            own = function["arguments"]
            if isinstance(own, Mapping) and own and str(dict(own)) in self.rendering.of(place):
                raise PythonArgumentsError(
                    f"the template writes the arguments of call {number + 1} of message {place + 1} as Python writes "
                    "them, not as JSON",
                    self.rendering,
                )
            marked = dict(zip(_arguments(own) or ("",), marks, strict=False))
            arguments.update({mark: (place, number, name) for name, mark in marked.items()})
            chat = _with_arguments(chat, place, number, marked)
        texts: dict[str, tuple[int, str]] = {}
        if self.chat.tools:
            chat = replace(chat, tools=[_marked_tool(i, tool, marks, texts) for i, tool in enumerate(self.chat.tools)])
        other = self._render(chat)
        for mark, (place, number, name) in arguments.items():
            self._argument(other, mark, place, number, name)
        for place, number, function in calls:
            if function["name"] not in (self.rendering.of(place) or self.rendering.text):
                raise UnrenderedTextError(
                    f"the template does not render the name of call {number + 1} of message {place + 1}", self.rendering
                )
        for mark, (number, text) in texts.items():
            shown = other is not None and _has(other.text, mark)
            if not shown and (other is not None or not any(form in self.rendering.text for form in _forms(text))):
                raise UnrenderedTextError(
                    f"the template does not render {text[:80]!r} of tool {number + 1}", self.rendering
                )

    def _argument(self, other: Rendering | None, mark: str, place: int, number: int, name: str) -> None:
        """Checks an argument of a call; name: "" is a call without any. other: the rendering with the mark; None if the
        template refused it: then the argument's own text is searched."""
        if other is not None and _has(other.text, mark):
            if not self._is_trained(other, place, mark):
                raise AmbiguousAnswerError(
                    f"call {number + 1} of message {place + 1} is not in what the template marks as the answer",
                    self.rendering,
                )
        elif not name:
            calls = self.chat.messages[place]["tool_calls"]
            own = calls[number]["function"]["name"]
            text = self.rendering.of(place) or self.rendering.text
            if text.count(own) < sum(own in call["function"]["name"] for call in calls):
                raise UnrenderedTextError(
                    f"the template does not render call {number + 1} of message {place + 1}", self.rendering
                )
        elif not self._has_alone(place, number, name):
            raise UnrenderedTextError(
                f"the template does not render argument `{name}` of call {number + 1} of message {place + 1}",
                self.rendering,
            )

    def _is_trained(self, other: Rendering, place: int, mark: str) -> bool:
        """Whether a mark in an answer is trained, if the answer is."""
        if place not in self.spans:
            return True
        if self.template.has_markers:
            return any(_has(other.text[start:end], mark) for start, end in self._trained_marks(other))
        return not self._has_regions() or _has(other.of(place), mark)

    def _has_alone(self, place: int, number: int, name: str) -> bool:
        """Whether a call's argument is rendered if it alone is replaced; if the template refuses that, whether its own
        text is there."""
        other = self._render(_with_arguments(self.chat, place, number, {name: SENTINEL}))
        if other is not None:
            return _has(other.text, SENTINEL)
        own = self.chat.messages[place]["tool_calls"][number]["function"]["arguments"]
        value = (json.loads(own) if isinstance(own, str) else own)[name]
        text = self.rendering.of(place) or self.rendering.text
        return any(form in text for form in _forms(value))

    def _has_regions(self) -> bool:
        return bool(self.rendering.regions or self.rendering.scattered)

    def _marked(self, place: int, content: str) -> Rendering | None:
        return self._render(self.chat.replaced(place, content=content))

    def _render(self, chat: ChatInput) -> Rendering | None:
        """The rendering of a changed conversation; None if the template refuses it: it looks into what was changed."""
        try:
            return self.template.render(chat.messages, self.kwargs, tools=chat.tools, ask=self.ask)
        except RenderError:
            return None


def _texts(content: str, role: str) -> list[str]:
    """The texts of a content; images may separate them in the rendering. Of an answer, what follows its thoughts."""
    if role == "assistant":
        return [content.rpartition("</think>")[2].strip() or content]
    return content.texts if isinstance(content, ContentParts) else [content]


def _visible_marked(content: str) -> str:
    """The content with the sentinel in place of what follows its thoughts."""
    thoughts, closing, visible = content.rpartition("</think>")
    return f"{thoughts}{closing}{SENTINEL}" if visible.strip() else SENTINEL


def _arguments(arguments: Any) -> tuple[str, ...]:
    """The names of the arguments of a call."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return tuple(value) if isinstance(value, Mapping) else ()


def _with_arguments(chat: ChatInput, place: int, number: int, marked: Mapping[str, str]) -> ChatInput:
    """The conversation with these arguments of a call in place of its own of these names, as text if they were text."""
    calls = list(chat.messages[place]["tool_calls"])
    function = calls[number]["function"]
    own = function["arguments"]
    arguments: Any = {**(json.loads(own) if isinstance(own, str) else own), **marked}
    if isinstance(own, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    calls[number] = {**calls[number], "function": {**function, "arguments": arguments}}
    return chat.replaced(place, tool_calls=calls)


def _marked_tool(number: int, tool: Any, marks: Iterator[str], texts: dict[str, tuple[int, str]]) -> Any:
    """The tool with marks in place of its name, its description and the names of its parameters. texts: gets, for each
    mark, the number of the tool and the text."""
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
    """Whether a mark is in a text, as it is or escaped by JSON."""
    return mark in text or json.dumps(mark)[1:-1] in text


def _forms(value: Any) -> tuple[str, ...]:
    """How a template may write a value: a text as it is or escaped, others as JSON."""
    if isinstance(value, str):
        return value.strip(), json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]
    return json.dumps(value, ensure_ascii=False), json.dumps(value), str(value)
