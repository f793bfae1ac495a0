"""Chats in token space: the tokens of a prompt, and the tokens between one answer and the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.data.chat_template import AmbiguousAnswerError, ChatTemplate, RenderError, common_header
from weft.data.conversation import ChatInput, conversation
from weft.data.encode import Encoder, Encoding, limit_message, template_refusal
from weft.data.image_columns import Image, images_alone, take_images
from weft.data.image_files import PromptImages
from weft.data.images import Images, texts_of
from weft.data.loss_mask import AssistantMasks
from weft.data.messages import read_messages
from weft.data.prompts import up_to_the_answer
from weft.data.records import Record, template_inputs
from weft.data.template_bounds import RenderLimitError
from weft.errors import BadRowError, UserError, first_line
from weft.inference.types import Prompt

Message = Mapping[str, Any]

_ANSWER = "answer"  # replaces the policy's answer: the template's text after an answer must not depend on the answer


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens between an answer and the next one. closing: end the answer, if the policy did not end it. tokens:
    follow the ended answer. reply_images: as in Sample, with the images of this reply."""

    closing: tuple[int, ...]
    tokens: tuple[int, ...]
    reply_images: PromptImages | None = None


class ChatRenderer:
    """Renders chats with the chat template that training documents use."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None = None, images: Images | None = None
    ) -> None:
        """images: the image settings of a vision model."""
        self.tokenizer, self.images = tokenizer, images
        self.encoding = encoding or Encoding()
        self._encoder = Encoder(tokenizer, self.encoding, images)
        self._asks: dict[tuple[ChatTemplate, str], bool] = {}  # whether a generation prompt follows this role

    def question(
        self, source: str, messages: Sequence[Message], row: Mapping[str, Any], images: Sequence[Image] = ()
    ) -> tuple[ChatInput, str]:
        """The conversation in the template's format, and its rendering up to the start of the answer. UserError for an
        invalid row.

        row: the row's columns; only `tools` and `chat_template_kwargs` are read. images: the images of the messages.
        """
        value = {"messages": messages, **template_inputs(source, row)}
        chat, answers, kwargs = self._encoder.question(Record(source, "messages", value, tuple(images)))
        try:
            return chat, self._render_question(answers.template, chat, kwargs)
        except RenderError as error:
            raise template_refusal(source, error) from error
        except RenderLimitError as error:
            raise UserError(limit_message(source, error)) from None

    @property
    def template_source(self) -> str:
        """The Jinja source of the chat template."""
        return str(self.encoding.chat_template or self.tokenizer.get_chat_template())

    def rendered_question(self, source: str, messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of a conversation up to the start of the answer. Unlike question(), it accepts messages that the
        template omits or shortens, such as the thoughts of earlier answers. UserError if the template cannot render it.
        """
        chat = self._conversation(source, messages, row)
        answers, kwargs = self._answers(source, chat, ())
        try:
            return tuple(self.rendered([self._render_question(answers.template, chat, kwargs)])[0])
        except RenderError as error:
            raise template_refusal(source, error) from error
        except RenderLimitError as error:
            raise UserError(limit_message(source, error)) from None

    def continuation(
        self,
        prompt: Prompt,
        following: Sequence[Message],
        calls: Sequence[Message] = (),
        reply_images: PromptImages | None = None,
    ) -> Continuation:
        """The tokens between an answer and the next one, with the messages `following` (tool results, user turns)
        between them.

        The tokens are the template's output after a placeholder answer, so sampled text is never rendered or tokenised
        again. calls: the answer's tool calls, if the template needs them to render their results. reply_images: images
        of earlier replies. UserError if the template would render the earlier messages differently, or if the model
        takes no images; BadRowError for messages and images that cannot be read.
        """
        source, prompt_messages = prompt.source, prompt.messages
        following, new_images = self._take_images(source, following)
        assert prompt_messages is not None, "a text prompt can only be continued with text"
        answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
        if calls:
            answer = {"role": "assistant", "content": "", "tool_calls": list(calls)}
        chat = self._conversation(source, [*prompt_messages, answer, *following], prompt.columns)
        chat = replace(chat, trained=(len(prompt_messages),))
        before = () if prompt.images is None else prompt.images.images
        answers, kwargs = self._answers(source, chat, (*before, *new_images))
        question = replace(chat, messages=chat.messages[: len(prompt_messages)])
        try:
            mask = answers.find(chat, kwargs)
            text = self._render_question(answers.template, chat, kwargs)
            plain = answers.template.render(question.messages, kwargs, tools=chat.tools).text
            header = common_header(
                plain, self._render_question(answers.template, question, kwargs), (*answers.specials, *answers.added)
            )
        except AmbiguousAnswerError as error:
            raise UserError(
                f"{source}: cannot determine the chat template's output after an answer: {error}. Set "
                "data.chat_template to one that renders each message by itself."
            ) from error
        except RenderError as error:
            raise UserError(
                f"{source}: the chat template cannot render the environment's reply: {first_line(error)}. Reply with "
                "other messages, or set data.chat_template."
            ) from error
        except RenderLimitError as error:
            raise UserError(limit_message(source, error)) from None
        start, end = mask.spans[-1]
        if not header or not text.startswith(header.rstrip()) or text[:end] != mask.text[:end]:
            raise UserError(
                f"{source}: the chat template renders earlier messages differently when messages are added, so the "
                "tokens of a longer conversation do not extend those of a shorter one. Set data.chat_template to "
                "one that renders each message by itself, or let the environment reply with `text`."
            )
        closing = self._encoder.plain([text[start:end]])[0][-1:]
        special, after = set(self.tokenizer.added_tokens_decoder), text[end:]
        if self.images is not None:
            after, reply_images = self.images.reply(
                f"{source}, a reply", after, new_images, prompt.images, reply_images
            )
        closing = [token for token in closing if token in special]
        return Continuation(tuple(closing), tuple(self.tokens([after])[0]), reply_images)

    def _take_images(self, source: str, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[Image, ...]]:
        """The messages, with an empty image part for each image, and the images."""
        if not any(isinstance(message.get("content"), list) for message in messages):
            self._refuse_marks(source, messages)
            return messages, ()
        try:
            read = read_messages(f"{source}, a reply", "messages", [dict(message) for message in messages], images=True)
            bare, extracted = take_images(f"{source}, a reply", read, {}, "")
        except UserError as error:
            raise BadRowError(str(error)) from error
        images = images_alone(extracted)
        if images and self.images is None:
            raise UserError(f"rl.environment: a reply to {source} has images, and model.path is a text-only model.")
        self._refuse_marks(source, bare)
        return bare, images

    def _refuse_marks(self, source: str, messages: Sequence[Message]) -> None:
        if self.images is not None:
            self.images.refuse_marks(Record(f"{source}, a reply", "messages", {}), texts_of(messages))

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that continue other texts (Encoder.continuations)."""
        return self._encoder.continuations(texts)

    def beginnings(self, texts: list[str]) -> list[list[int]]:
        """Token ids of prompts that are texts (Encoder.beginnings)."""
        return self._encoder.beginnings(texts)

    def rendered(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered chats, which contain their special tokens as text."""
        return self._encoder.plain(texts)

    def _render_question(self, template: ChatTemplate, chat: ChatInput, kwargs: Mapping[str, Any]) -> str:
        """The rendering up to the start of the answer, even if the template has no generation prompt."""

        def render(messages: Any, ask: bool) -> str:
            return template.render(messages, kwargs, tools=chat.tools, ask=ask).text

        key = template, chat.messages[-1]["role"]
        if key not in self._asks:
            self._asks[key] = render(chat.messages, True) != render(chat.messages, False)
        return render(chat.messages, True) if self._asks[key] else up_to_the_answer(render, chat.messages)

    def _conversation(self, source: str, messages: Sequence[Message], row: Mapping[str, Any]) -> ChatInput:
        return conversation(
            Record(source, "messages", {"messages": messages, **template_inputs(source, row)}), "answers"
        )

    def _answers(self, source: str, chat: ChatInput, images: Sequence[Image]) -> tuple[AssistantMasks, dict[str, Any]]:
        answers = self._encoder.masks_of(Record(source, "messages", {}, tuple(images)), chat)
        return answers, {**self.encoding.template_kwargs, **chat.kwargs}
