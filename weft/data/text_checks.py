"""Checks that every text of a conversation is where it belongs in the rendering: answers inside trained spans, other
texts outside.

Templates silently drop what they do not support: a list instead of a string, reasoning, a role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.data.chat_template import ChatTemplate, Lost, Rendering, Span, Unclear
from weft.data.conversation import Conversation
from weft.data.loss_mask_fallback import SENTINEL
from weft.data.messages import Parts


@dataclass(frozen=True, slots=True)
class TextChecks:
    """The checks of one conversation and its rendering. spans: index of an answer -> its trained spans."""

    template: ChatTemplate
    chat: Conversation
    kwargs: Mapping[str, Any]
    rendering: Rendering
    spans: Mapping[int, Sequence[Span]]

    def run(self) -> None:
        """Searches the texts in the rendering; the conversation is rendered again only for texts that are not found.
        Raises Lost if a text is missing, and Unclear if it is in the wrong place."""
        for place, message in enumerate(self.chat.messages):
            content, role = message["content"], message["role"]
            if not isinstance(content, str) or not content.strip():
                continue
            if place in self.spans:
                self._answer(place, content)
            elif role in ("system", "developer"):
                if content.strip() not in self.rendering.text:
                    self._other(place, needed=True)
            elif role == "user" and any(text.strip() not in self.rendering.of(place) for text in _texts(content)):
                self._other(place, needed=True)
            elif role not in ("user", "assistant") and place not in self.rendering.regions:
                self._other(place, needed=False)
        self._thoughts()

    def _answer(self, place: int, content: str) -> None:
        text = " ".join(self.rendering.text[start:end] for start, end in self.spans[place])
        if content.strip() in text:
            return
        if (visible := content.rpartition("</think>")[2].strip()) and visible in text:
            return
        other = self._marked(place)
        count = other.text.count(SENTINEL)
        # gpt-oss drops the text beside a tool call once the final answer follows.
        if count == 0 and "tool_calls" not in self.chat.messages[place]:
            raise Lost(f"the template does not render the text of message {place + 1}", self.rendering)
        if count > 1 or (count == 1 and SENTINEL not in other.of(place)):
            raise Unclear(
                f"the text of message {place + 1} is not where the template renders this message", self.rendering
            )

    def _other(self, place: int, *, needed: bool) -> None:
        """Checks a text that is not an answer: it may be in the region of another message, but not in a trained one.
        needed: whether it must be rendered."""
        other = self._marked(place)
        if self._trains_sentinel(other):
            raise Unclear(f"the template writes message {place + 1} into an answer", self.rendering)
        if needed and SENTINEL not in other.text:
            raise Lost(f"the template does not render the text of message {place + 1}", self.rendering)

    def _trains_sentinel(self, other: Rendering) -> bool:
        """Whether the sentinel would be trained. With markers, only their spans count, not whole regions: Gemma 4
        writes the results of tools between a call and the answer, in the region of an answer."""
        if not self.template.has_markers:
            return any(SENTINEL in other.of(answer) for answer in self.spans)
        trained = {span for spans in self.spans.values() for span in spans}
        alike = len(other.marked) == len(self.rendering.marked)
        return any(
            SENTINEL in other.text[start:end]
            for i, (start, end) in enumerate(other.marked)
            if not alike or self.rendering.marked[i] in trained
        )

    def _thoughts(self) -> None:
        """Raises Lost if the reasoning of the last answer is missing. Templates drop the reasoning of earlier turns."""
        last = len(self.chat.messages) - 1
        if last not in self.spans:
            return
        message = self.chat.messages[last]
        thought = message.get("thinking")
        if thought is None and isinstance(message["content"], str):
            thought = message["content"].rpartition("</think>")[0].rpartition("<think>")[2]
        if isinstance(thought, str) and thought.strip() not in self.rendering.text:
            raise Lost(f"the template leaves out what message {last + 1} thinks before it answers", self.rendering)

    def _marked(self, place: int) -> Rendering:
        marked = self.chat.replaced(place, content=SENTINEL)
        return self.template.render(marked.messages, self.kwargs, tools=self.chat.tools)


def _texts(content: str) -> list[str]:
    """The texts of a content; images may separate them in the rendering."""
    return content.texts if isinstance(content, Parts) else [content]
