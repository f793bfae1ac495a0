"""The loss mask of a rendered conversation, in characters: it covers the part of assistant messages that a model
generates.

The region of a message is the text that the template writes in the message's loop iteration. The generation prompt at
its beginning is not trained, nor is any text after the token that ends the turn. weft learns both once per template,
from an example conversation with unambiguous answers, and checks them in every document.
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
    """The text that a template writes around an answer.

    headers: texts that may precede an answer, longest first. closings: texts that may follow an answer; "" for none.
    follower: without a closing, the special token of the next turn, which then ends the answer; else "".
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
            spans = {index: [span] for index, span in zip(chat.trained, compared, strict=True)}
            TextChecks(self.template, chat, kwargs, rendering, spans).run()
            return MaskedText(text, compared)
        for index in chat.trained:
            (start, end), ending = self._answer(chat, kwargs, rendering, index)
            text += ending  # only the last answer lacks it: the template writes this end of turn with the next question
            spans[index] = [(start, end + len(ending))]
        TextChecks(self.template, chat, kwargs, rendering, spans).run()
        return MaskedText(text, tuple(span for [span] in spans.values()))

    def mask_all(self, chat: ChatInput, kwargs: Mapping[str, Any]) -> MaskedText:
        """The conversation's text, with a trained span over all of it. Raises UnrenderedTextError and RenderError."""
        rendering = self.template.render(chat.messages, kwargs, tools=chat.tools)
        TextChecks(self.template, chat, kwargs, rendering, {}).run()
        return MaskedText(rendering.text, ((0, len(rendering.text)),))

    def _answer(self, chat: ChatInput, kwargs: Mapping[str, Any], rendering: Rendering, index: int) -> tuple[Span, str]:
        """(trained span of the answer at index `index`, the end of turn to append to the text: "" if the text has
        it)."""
        if index in rendering.scattered:
            raise AmbiguousAnswerError(f"message {index + 1} is rendered in several pieces", rendering)
        if index not in rendering.regions:
            raise AmbiguousAnswerError(f"the template does not render message {index + 1}", rendering)
        start, end = rendering.regions[index]
        # The format is learned once for answers to tool results and once for others: from this conversation, if the
        # template rejects the examples.
        after_tool = index > 0 and chat.messages[index - 1]["role"] in _TOOL_ROLES
        key = after_tool, json.dumps(kwargs, sort_keys=True, default=str) if kwargs else ""
        if key not in self._turns:
            self._turns[key] = self._learn(after_tool, kwargs)
        turns = self._turns[key] or self._study(chat, kwargs, index)
        header = _header(rendering.region_text(index), turns)
        if header is None:  # the format's examples do not cover this conversation
            turns = self._study(chat, kwargs, index)
            header = _header(rendering.region_text(index), turns)
        if header is None:
            raise AmbiguousAnswerError(
                f"message {index + 1} does not begin like other answers of the template", rendering
            )
        start += len(header)
        if any(turns.closings):
            text = rendering.region_text(index).rstrip()
            if text.endswith((*filter(None, turns.closings), *self.specials)):
                return (start, rendering.regions[index][0] + len(text)), ""
            if end == len(rendering.text) and "" in turns.closings:
                return (start, end), next(filter(None, turns.closings))
            raise AmbiguousAnswerError(
                f"message {index + 1} does not end like other answers of the template", rendering
            )
        follower = self._follower(rendering.text, end, turns.headers)
        if follower is not None:
            return (start, end + len(follower)), ""
        if end == len(rendering.text) and turns.follower:
            return (start, end), turns.follower
        raise AmbiguousAnswerError(f"no special token ends message {index + 1}, so a model would never stop", rendering)

    def _learn(self, after_tool: bool, kwargs: Mapping[str, Any]) -> TurnFormat | None:
        """The turn format in the middle and at the end of example conversations; None if the template rejects all."""
        before = [_USER, _CALL, _RESULT] if after_tool else [_USER]
        middle = ChatInput([*before, _ANSWER, _USER, _ANSWER], None, {}, ())
        last = ChatInput([*before, _ANSWER], None, {}, ())
        longer = ChatInput([_USER, _ANSWER, *before, _ANSWER], None, {}, ())
        formats = []
        for chat, index in ((middle, len(before)), (last, len(before)), (longer, len(before) + 2)):
            try:
                formats.append(self._study(chat, kwargs, index))
            except (AmbiguousAnswerError, RenderError):
                continue
        if not formats:
            return None
        headers = {header for turns in formats for header in turns.headers}
        return TurnFormat(
            tuple(sorted(headers, key=len, reverse=True)),
            tuple(dict.fromkeys(closing for turns in formats for closing in turns.closings)),
            next((turns.follower for turns in formats if turns.follower), ""),
        )

    def _study(self, chat: ChatInput, kwargs: Mapping[str, Any], index: int) -> TurnFormat:
        """The turn format of the answer at index `index` of a conversation. Raises AmbiguousAnswerError."""
        marked = chat.replaced(index, content=SENTINEL, reasoning_content=None, thinking=None, tool_calls=None)
        full = self.template.render(marked.messages, kwargs, tools=chat.tools)
        try:
            prompted = self.template.render(chat.messages[:index], kwargs, tools=chat.tools, ask=True)
        except RenderError as error:
            raise AmbiguousAnswerError(
                f"the template does not render the messages before message {index + 1}: {error}", full
            ) from error
        start, end = full.regions.get(index, (0, 0))
        sentinel_at = full.text.find(SENTINEL)
        if full.text.count(SENTINEL) != 1 or not start <= sentinel_at < end:
            raise AmbiguousAnswerError(
                f"the text of message {index + 1} is not where the template renders this message", full
            )
        # A template may write the prompt after the loop over messages, or in the loop's last iteration.
        if prompted.text.startswith(full.text[:start]):
            prompt = prompted.text[start:]
        elif index - 1 in prompted.regions:
            prompt = self._prompt_behind(chat, kwargs, index - 1, prompted)
        else:
            raise AmbiguousAnswerError(
                f"the template renders messages 1 to {index} differently without the later messages", prompted
            )
        header = common_header(full.text[start:sentinel_at], prompt, (*self.specials, *self.added))
        if prompt and not header:
            raise AmbiguousAnswerError(
                f"message {index + 1} does not begin with the generation prompt {prompt!r}", full
            )
        closing = full.text[sentinel_at + len(SENTINEL) : end].rstrip()
        headers = tuple(dict.fromkeys((prompt, header)))
        return TurnFormat(headers, (closing,), "" if closing else self._follower(full.text, end, headers) or "")

    def _prompt_behind(self, chat: ChatInput, kwargs: Mapping[str, Any], index: int, prompted: Rendering) -> str:
        """The generation prompt that follows message `index`, the last one of the rendering `prompted`."""
        after = prompted.text[prompted.regions[index][1] :]
        plain = self.template.render(chat.messages[: index + 1], kwargs, tools=chat.tools).region_text(index)
        inside = prompted.region_text(index)
        return inside[len(plain) :] + after if plain and inside.startswith(plain) else after

    def _follower(self, text: str, end: int, headers: Sequence[str]) -> str | None:
        """The special token at `end`, which begins the next turn and so ends this turn; None if answers also begin with
        it."""
        special = next((token for token in self.specials if text.startswith(token, end)), None)
        return None if special is None or any(special in header for header in headers) else special


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
    """Yields (message, span) for every marked span: by regions if they contain all spans, else by order. Raises
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
            f"{len(rendering.marked)} spans are between generation markers, for {len(answers)} answers", rendering
        )


# ---------------------------------------------------------------- templates without visible loops


class MasksByComparison:
    """The masks of a conversation, for templates whose loops do not reveal the message that they write: each text is
    replaced by a sentinel, and the renderings are compared. This costs a rendering per text of a message, so it is used
    only if ChatTemplate finds no message in a rendering. specials: the tokenizer's special tokens. added: the other
    tokens that were added to its vocabulary.
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
        self._hulls = {index: self._hull(index) for index in range(len(chat.messages))}

    def find(self) -> tuple[str, tuple[Span, ...]]:
        """(text, trained spans). The text is the rendering; an end of turn is appended if the last answer lacks one.
        Raises AmbiguousAnswerError."""
        text, spans = self.text, []
        for index in self._chat.trained:
            start, end = self._start(index), self._end(index)
            if end is None:
                ending = next(iter(self._closings()), None)
                if ending is None:
                    raise self._unclear(f"no special token ends message {index + 1}, so that a model would never stop")
                text, end = self.text + ending, len(self.text) + len(ending)
            spans.append((start, end))
        return text, tuple(spans)

    def _start(self, index: int) -> int:
        """The position after the generation prompt of the answer at index `index`. Raises AmbiguousAnswerError."""
        first, last = self._bounds(index)[0], self._span(index)[0]
        prompt = self._template.render(self._chat.messages[:index], self._kwargs, tools=self._chat.tools, ask=True).text
        if self.text.startswith(prompt) and first <= len(prompt) <= last:
            return len(prompt)
        for token in reversed(list(self._any.finditer(prompt))):
            header_at = self.text.rfind(token.group(), first, last)
            if header_at >= 0:
                return header_at + len(common_header(self.text[header_at:last], prompt[token.start() :], self._tokens))
        raise self._unclear(f"nothing before message {index + 1} looks like the generation prompt")

    def _end(self, index: int) -> int | None:
        """The position after the token that ends the turn; None if the text ends without one. Raises
        AmbiguousAnswerError."""
        text_end, limit = self._span(index)[1], self._bounds(index)[1]
        matches = [match for match in self._special.finditer(self.text, text_end) if match.start() <= limit]
        if not matches:
            if self.text[text_end:].strip():
                raise self._unclear(f"no special token ends message {index + 1}, so that a model would never stop")
            return None
        if "tool_calls" in self._chat.messages[index]:  # calls may contain other special tokens
            closings = self._closings()
            return next((match for match in matches if match.group() in closings), matches[0]).end()
        return matches[0].end()

    def _closings(self) -> list[str]:
        """The special tokens that end an answer, in the middle of a conversation and at its end."""
        user, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": SENTINEL}
        out = []
        for messages in ([user, answer, user], [user, answer]):
            text = self._template.render(messages, self._kwargs).text
            match = self._special.search(text, text.index(SENTINEL))
            out += [match.group()] if match else []
        return out

    def _span(self, index: int) -> Span:
        hull = self._hulls[index]
        if hull is None:
            raise self._unclear(f"the template does not render message {index + 1}")
        return hull

    def _bounds(self, index: int) -> Span:
        """(end of the previous message, start of the next one). Raises AmbiguousAnswerError if the messages overlap."""
        ends_before = [hull[1] for i, hull in self._hulls.items() if hull is not None and i < index]
        starts_after = [hull[0] for i, hull in self._hulls.items() if hull is not None and i > index]
        first, last = max(ends_before, default=0), min(starts_after, default=len(self.text))
        start, end = self._span(index)
        if not first <= start <= end <= last:
            raise self._unclear(f"the template does not render message {index + 1} between its neighbours")
        return first, last

    def _hull(self, index: int) -> Span | None:
        """The smallest span that contains every text of a message; None if the template writes none of them."""
        spans = [span for variant in self._variants(index) if (span := self._changed(variant, index)) is not None]
        return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None

    def _changed(self, variant: str, index: int) -> Span | None:
        count = variant.count(SENTINEL)
        if count == 0:
            return None
        if count > 1:
            raise self._unclear(f"the template writes a text of message {index + 1} {count} times")
        head, _, tail = variant.partition(SENTINEL)
        start = common_start(self.text, head)
        common_tail = common_start(self.text[start:][::-1], tail[::-1])
        return start, len(self.text) - common_tail

    def _variants(self, index: int) -> Iterator[str]:
        """Yields the rendering with one text of a message replaced by the sentinel, for each text in turn."""
        message = self._chat.messages[index]
        if isinstance(message["content"], str) and message["content"]:
            yield self._render(self._chat.replaced(index, content=SENTINEL))
        if "thinking" in message:
            yield self._render(self._chat.replaced(index, thinking=SENTINEL, reasoning_content=SENTINEL))
        for i, call in enumerate(message.get("tool_calls", ())):
            arguments: Any = {"sentinel": SENTINEL}
            if isinstance(call["function"]["arguments"], str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            changed = {**call, "function": {**call["function"], "arguments": arguments}}
            calls = [*message["tool_calls"][:i], changed, *message["tool_calls"][i + 1 :]]
            yield self._render(self._chat.replaced(index, tool_calls=calls))

    def _render(self, chat: ChatInput) -> str:
        return self._template.render(chat.messages, self._kwargs, tools=chat.tools).text

    def _unclear(self, reason: str) -> AmbiguousAnswerError:
        return AmbiguousAnswerError(reason, Rendering(self.text))


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
