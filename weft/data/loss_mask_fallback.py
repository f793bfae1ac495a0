"""The trained characters of a conversation, for templates whose loops do not show which message they write: each text
is replaced by a sentinel, and the renderings are compared.

This costs one rendering for every text of every message, so it is used only if ChatTemplate's notes find no message.
tests/data/test_masks.py checks that both ways give the same masks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.data.chat_template import AmbiguousAnswerError, ChatTemplate, Rendering, Span, common_header, common_start
from weft.data.conversation import ChatInput

SENTINEL = "\ue5e1\ue5e2"  # private-use characters: not in data, and templates copy them unchanged


class MasksByComparison:
    """The masks of one conversation. specials: the tokenizer's special tokens. added: the other tokens that were added
    to its vocabulary."""

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
