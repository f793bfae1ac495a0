"""The loss mask of a rendered conversation, in characters: the part of each assistant message that a model generates.

The region of a message is what the template writes during its loop turn. The generation prompt at the beginning of the
region is not trained, nor is anything after the token that ends the turn. Both are learned once per template, from an
example conversation with unambiguous answers, and checked in every document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.data.chat_template import (
    SENTINEL,
    AmbiguousAnswerError,
    ChatTemplate,
    RenderError,
    Rendering,
    Span,
    common_header,
    common_start,
)
from weft.data.conversation import ChatInput
from weft.data.text_checks import TextChecks

_USER = {"role": "user", "content": "question"}
_ANSWER = {"role": "assistant", "content": "answer"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}],
}
_RESULT = {"role": "tool", "content": "result", "name": "f", "tool_call_id": "abcdefghi"}
_TOOL_ROLES = ("tool", "function", "ipython")


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """What a template writes around an answer.

    headers: texts that may precede an answer, longest first. closings: texts that may follow one; "" is none. follower:
    if there is no closing, the special token of the next turn, which then ends the answer; else "".
    """

    headers: tuple[str, ...]
    closings: tuple[str, ...]
    follower: str


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A conversation's text and its trained spans of characters."""

    text: str
    spans: tuple[Span, ...]


class AssistantMasks:
    """Finds the trained spans in the renderings of one template. specials: the tokenizer's special tokens. added: the
    other tokens that were added to its vocabulary."""

    def __init__(self, template: ChatTemplate, specials: Sequence[str], added: Sequence[str] = ()) -> None:
        self.template = template
        self.specials = tuple(sorted(filter(None, set(specials)), key=len, reverse=True))
        self.added = tuple(added)
        self._turns: dict[tuple[bool, str], TurnFormat | None] = {}

    def find(self, chat: ChatInput, kwargs: Mapping[str, Any]) -> MaskedText:
        """The conversation's text and trained spans. Raises AmbiguousAnswerError if the spans are ambiguous, and
        RenderError."""
        rendering = self.template.render(chat.messages, kwargs, tools=chat.tools)
        text, spans = rendering.text, dict[int, list[Span]]()
        if not chat.trained:
            TextChecks(self.template, chat, kwargs, rendering, spans).run()
            return MaskedText(rendering.text, ())
        if self.template.has_markers:
            spans = _within_markers(chat, rendering)
            TextChecks(self.template, chat, kwargs, rendering, spans).run()
            return MaskedText(rendering.text, tuple(span for message in spans.values() for span in message))
        if not rendering.regions and not rendering.scattered:
            text, compared = MasksByComparison(self.template, self.specials, self.added, chat, kwargs).find()
            spans = {place: [span] for place, span in zip(chat.trained, compared, strict=True)}
            TextChecks(self.template, chat, kwargs, rendering, spans).run()
            return MaskedText(text, compared)
        for place in chat.trained:
            (start, end), ending = self._answer(chat, kwargs, rendering, place)
            text += ending  # only of the last answer: the template writes this end of turn with the next question
            spans[place] = [(start, end + len(ending))]
        TextChecks(self.template, chat, kwargs, rendering, spans).run()
        return MaskedText(text, tuple(span for [span] in spans.values()))

    def whole(self, chat: ChatInput, kwargs: Mapping[str, Any]) -> MaskedText:
        """The conversation's text, with one trained span over all of it. Raises Lost, and RenderError."""
        rendering = self.template.render(chat.messages, kwargs, tools=chat.tools)
        TextChecks(self.template, chat, kwargs, rendering, {}).run()
        return MaskedText(rendering.text, ((0, len(rendering.text)),))

    def _answer(self, chat: ChatInput, kwargs: Mapping[str, Any], rendering: Rendering, place: int) -> tuple[Span, str]:
        """(trained span of the answer at index `place`, the end of turn to append to the text; "" if it has one)."""
        if place in rendering.scattered:
            raise AmbiguousAnswerError(f"message {place + 1} is rendered in several pieces", rendering)
        if place not in rendering.regions:
            raise AmbiguousAnswerError(f"the template does not render message {place + 1}", rendering)
        start, end = rendering.regions[place]
        turns = self._around(chat, kwargs, place)
        header = _header(rendering.of(place), turns)
        if header is None:  # the examples that the format was learned from do not cover this conversation
            turns = self._study(chat, kwargs, place)
            header = _header(rendering.of(place), turns)
        if header is None:
            raise AmbiguousAnswerError(
                f"message {place + 1} does not begin as the template begins an answer", rendering
            )
        start += len(header)
        if any(turns.closings):
            text = rendering.of(place).rstrip()
            if text.endswith((*filter(None, turns.closings), *self.specials)):
                return (start, rendering.regions[place][0] + len(text)), ""
            if end == len(rendering.text) and "" in turns.closings:
                return (start, end), next(filter(None, turns.closings))
            raise AmbiguousAnswerError(f"message {place + 1} does not end as the template ends an answer", rendering)
        follower = self._follower(rendering.text, end, turns.headers)
        if follower is not None:
            return (start, end + len(follower)), ""
        if end == len(rendering.text) and turns.follower:
            return (start, end), turns.follower
        raise AmbiguousAnswerError(
            f"no special token ends message {place + 1}, so that a model would never stop", rendering
        )

    def _around(self, chat: ChatInput, kwargs: Mapping[str, Any], place: int) -> TurnFormat:
        """The turn format of the answer at index `place`: learned once for answers to tool results and once for others;
        from this conversation if the template rejects the examples."""
        after_tool = place > 0 and chat.messages[place - 1]["role"] in _TOOL_ROLES
        key = after_tool, json.dumps(kwargs, sort_keys=True, default=str) if kwargs else ""
        if key not in self._turns:
            self._turns[key] = self._learn(after_tool, kwargs)
        return self._turns[key] or self._study(chat, kwargs, place)

    def _learn(self, after_tool: bool, kwargs: Mapping[str, Any]) -> TurnFormat | None:
        """The turn format in the middle and at the end of example conversations; None if the template rejects all."""
        before = [_USER, _CALL, _RESULT] if after_tool else [_USER]
        middle = ChatInput([*before, _ANSWER, _USER, _ANSWER], None, {}, ())
        last = ChatInput([*before, _ANSWER], None, {}, ())
        longer = ChatInput([_USER, _ANSWER, *before, _ANSWER], None, {}, ())
        found = []
        for chat, place in ((middle, len(before)), (last, len(before)), (longer, len(before) + 2)):
            try:
                found.append(self._study(chat, kwargs, place))
            except (AmbiguousAnswerError, RenderError):
                continue
        if not found:
            return None
        headers = {header for turns in found for header in turns.headers}
        return TurnFormat(
            tuple(sorted(headers, key=len, reverse=True)),
            tuple(dict.fromkeys(closing for turns in found for closing in turns.closings)),
            next((turns.follower for turns in found if turns.follower), ""),
        )

    def _study(self, chat: ChatInput, kwargs: Mapping[str, Any], place: int) -> TurnFormat:
        """The turn format of the answer at index `place` of a conversation. Raises AmbiguousAnswerError."""
        marked = chat.replaced(place, content=SENTINEL, reasoning_content=None, thinking=None, tool_calls=None)
        full = self.template.render(marked.messages, kwargs, tools=chat.tools)
        try:
            asked = self.template.render(chat.messages[:place], kwargs, tools=chat.tools, ask=True)
        except RenderError as error:
            raise AmbiguousAnswerError(
                f"the template does not render what stands before message {place + 1}: {error}", full
            ) from error
        start, end = full.regions.get(place, (0, 0))
        at = full.text.find(SENTINEL)
        if full.text.count(SENTINEL) != 1 or not start <= at < end:
            raise AmbiguousAnswerError(
                f"the text of message {place + 1} is not where the template renders this message", full
            )
        # The prompt may be written behind the loop over messages, or in it, while the loop is at the last message.
        if asked.text.startswith(full.text[:start]):
            prompt = asked.text[start:]
        elif place - 1 in asked.regions:
            prompt = self._prompt_behind(chat, kwargs, place - 1, asked)
        else:
            raise AmbiguousAnswerError(
                f"the template renders messages 1 to {place} otherwise when they are alone", asked
            )
        header = common_header(full.text[start:at], prompt, (*self.specials, *self.added))
        if prompt and not header:
            raise AmbiguousAnswerError(
                f"message {place + 1} does not begin with the generation prompt {prompt!r}", full
            )
        closing = full.text[at + len(SENTINEL) : end].rstrip()
        headers = tuple(dict.fromkeys((prompt, header)))
        return TurnFormat(headers, (closing,), "" if closing else self._follower(full.text, end, headers) or "")

    def _prompt_behind(self, chat: ChatInput, kwargs: Mapping[str, Any], place: int, asked: Rendering) -> str:
        """The generation prompt that follows message `place`, the last one of the rendering `asked`."""
        behind = asked.text[asked.regions[place][1] :]
        plain = self.template.render(chat.messages[: place + 1], kwargs, tools=chat.tools).of(place)
        inside = asked.of(place)
        return inside[len(plain) :] + behind if plain and inside.startswith(plain) else behind

    def _follower(self, text: str, end: int, headers: Sequence[str]) -> str | None:
        """The special token at `end`, which begins the next turn and so ends this one; None if answers begin with it,
        too."""
        found = next((token for token in self.specials if text.startswith(token, end)), None)
        return None if found is None or any(found in header for header in headers) else found


def _header(text: str, turns: TurnFormat) -> str | None:
    return next((header for header in turns.headers if text.startswith(header)), None)


def _within_markers(chat: ChatInput, rendering: Rendering) -> dict[int, list[Span]]:
    """Index of a trained message -> its spans between generation markers."""
    spans: dict[int, list[Span]] = {}
    for message, span in _owners(chat, rendering):
        if message in chat.trained and span[0] < span[1]:
            spans.setdefault(message, []).append(span)
    return spans


def _owners(chat: ChatInput, rendering: Rendering) -> Iterator[tuple[int, Span]]:
    """Yields (message, span) of every marked span: by regions if they hold all spans, else by order. Raises
    AmbiguousAnswerError."""
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    by_region = [
        next((i for i, (start, end) in rendering.regions.items() if start <= span[0] and span[1] <= end), None)
        for span in rendering.marked
    ]
    if None not in by_region:
        yield from ((i, span) for i, span in zip(by_region, rendering.marked, strict=True) if i is not None)
    elif set(answers) == set(chat.trained):
        yield from ((answers[0], span) for span in rendering.marked)
    elif len(answers) == len(rendering.marked):
        yield from zip(answers, rendering.marked, strict=True)
    else:
        raise AmbiguousAnswerError(
            f"{len(rendering.marked)} pieces are between generation markers, for {len(answers)} answers", rendering
        )


# ---------------------------------------------------------------- templates without visible loops


class MasksByComparison:
    """The masks of one conversation, for templates whose loops do not show which message they write: each text is
    replaced by a sentinel, and the renderings are compared.

    This costs one rendering per text of a message, so it is used only if ChatTemplate finds no message in a rendering.
    specials: the tokenizer's special tokens. added: the other tokens that were added to its vocabulary.
    """

    def __init__(
        self,
        template: ChatTemplate,
        specials: Sequence[str],
        added: Sequence[str],
        chat: ChatInput,
        kwargs: Mapping[str, Any],
    ) -> None:
        self._template = template
        self._kwargs = kwargs
        self._chat = chat
        self._tokens = (*specials, *added)
        self._special, self._any = _any_of(specials), _any_of(self._tokens)
        self.text = self._render(chat)
        self._hulls = {place: self._hull(place) for place in range(len(chat.messages))}

    def find(self) -> tuple[str, tuple[Span, ...]]:
        """(text, trained spans). The text is the rendering; an end of turn is appended if the last answer lacks one.
        Raises AmbiguousAnswerError."""
        text, spans = self.text, []
        for place in self._chat.trained:
            start, end = self._start(place), self._end(place)
            if end is None:
                ending = next(iter(self._closings()), None)
                if ending is None:
                    raise self._unclear(f"no special token ends message {place + 1}, so that a model would never stop")
                text, end = self.text + ending, len(self.text) + len(ending)
            spans.append((start, end))
        return text, tuple(spans)

    def _start(self, place: int) -> int:
        """The position after the generation prompt of the answer at index `place`. Raises AmbiguousAnswerError."""
        first, last = self._bounds(place)[0], self._place(place)[0]
        prompt = self._template.render(self._chat.messages[:place], self._kwargs, tools=self._chat.tools, ask=True).text
        if self.text.startswith(prompt) and first <= len(prompt) <= last:
            return len(prompt)
        for token in reversed(list(self._any.finditer(prompt))):
            at = self.text.rfind(token.group(), first, last)
            if at >= 0:
                return at + len(common_header(self.text[at:last], prompt[token.start() :], self._tokens))
        raise self._unclear(f"nothing before message {place + 1} looks like the generation prompt")

    def _end(self, place: int) -> int | None:
        """The position after the token that ends the turn; None if the text ends without one. Raises
        AmbiguousAnswerError."""
        own, limit = self._place(place)[1], self._bounds(place)[1]
        found = [match for match in self._special.finditer(self.text, own) if match.start() <= limit]
        if not found:
            if self.text[own:].strip():
                raise self._unclear(f"no special token ends message {place + 1}, so that a model would never stop")
            return None
        if "tool_calls" in self._chat.messages[place]:  # calls may contain other special tokens
            closings = self._closings()
            return next((match for match in found if match.group() in closings), found[0]).end()
        return found[0].end()

    def _closings(self) -> list[str]:
        """The special tokens that end an answer, in the middle of a conversation and at its end."""
        user, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": SENTINEL}
        out = []
        for messages in ([user, answer, user], [user, answer]):
            text = self._template.render(messages, self._kwargs).text
            match = self._special.search(text, text.index(SENTINEL))
            out += [match.group()] if match else []
        return out

    def _place(self, place: int) -> Span:
        hull = self._hulls[place]
        if hull is None:
            raise self._unclear(f"the template does not render message {place + 1}")
        return hull

    def _bounds(self, place: int) -> Span:
        """(end of the previous message, start of the next one). Raises AmbiguousAnswerError if the messages overlap."""
        before = [hull[1] for i, hull in self._hulls.items() if hull is not None and i < place]
        behind = [hull[0] for i, hull in self._hulls.items() if hull is not None and i > place]
        first, last = max(before, default=0), min(behind, default=len(self.text))
        start, end = self._place(place)
        if not first <= start <= end <= last:
            raise self._unclear(f"the template does not render message {place + 1} between its neighbours")
        return first, last

    def _hull(self, place: int) -> Span | None:
        """The smallest span that contains every text of a message; None if the template writes none of them."""
        spans = [span for other in self._variants(place) if (span := self._changed(other, place)) is not None]
        return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None

    def _changed(self, other: str, place: int) -> Span | None:
        count = other.count(SENTINEL)
        if count == 0:
            return None
        if count > 1:
            raise self._unclear(f"the template writes a text of message {place + 1} {count} times")
        head, _, tail = other.partition(SENTINEL)
        start = common_start(self.text, head)
        behind = common_start(self.text[start:][::-1], tail[::-1])
        return start, len(self.text) - behind

    def _variants(self, place: int) -> Iterator[str]:
        """Yields the rendering with one text of a message replaced by the sentinel, for each text in turn."""
        message = self._chat.messages[place]
        if isinstance(message["content"], str) and message["content"]:
            yield self._render(self._chat.replaced(place, content=SENTINEL))
        if "thinking" in message:
            yield self._render(self._chat.replaced(place, thinking=SENTINEL, reasoning_content=SENTINEL))
        for i, call in enumerate(message.get("tool_calls", ())):
            arguments: Any = {"sentinel": SENTINEL}
            if isinstance(call["function"]["arguments"], str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            changed = {**call, "function": {**call["function"], "arguments": arguments}}
            calls = [*message["tool_calls"][:i], changed, *message["tool_calls"][i + 1 :]]
            yield self._render(self._chat.replaced(place, tool_calls=calls))

    def _render(self, chat: ChatInput) -> str:
        return self._template.render(chat.messages, self._kwargs, tools=chat.tools).text

    def _unclear(self, reason: str) -> AmbiguousAnswerError:
        return AmbiguousAnswerError(reason, Rendering(self.text))


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
