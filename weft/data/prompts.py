"""Reads the prompts of eval.prompts, which a model answers: from a JSONL or text file, or from a list of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.data.chat_template import RenderError
from weft.data.encode import Encoder, Encoding, has_template, limit_message, template_refusal
from weft.data.image_columns import VIDEOS, Image, images_alone, take_images
from weft.data.image_files import PromptImages
from weft.data.images import Images, text_model_error
from weft.data.messages import AS_THEY_STAND, Message, MessageRules, read_messages, with_default_system
from weft.data.records import Record, conversations_of, is_json_list, refuse_media, template_inputs, with_system
from weft.data.template_bounds import RenderLimitError
from weft.errors import UserError
from weft.files import regular_file
from weft.strict_json import JsonError, parse

Messages = list[dict[str, str]]
Render = Callable[[Messages, bool], str]

_MARK = "weft-mark"  # placeholder for an answer: the text before it in the rendering is the prompt
_NEEDED = "it needs `messages` (a chat to answer) or `prompt` (a text to continue)"


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt. text: for display. tokens: the model's input. images: of its placeholders, if any."""

    text: str
    tokens: tuple[int, ...]
    images: PromptImages | None = None


def load_prompts(
    source: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    encoding: Encoding | None = None,
    rules: MessageRules = AS_THEY_STAND,
    images: Images | None = None,
) -> list[EvalPrompt]:
    """The prompts of a JSONL file, of the lines of a .txt file, or of a list of texts.

    A text of the list, or a line of text, is a user's message if there is a chat template, else a text to continue. In
    a JSONL file, the chat template renders `messages` without the assistant messages at the end, and a text `prompt` is
    continued unchanged, so training data also work.

    encoding: the chat template, if not the tokenizer's, and its variables. rules: options for reading messages. images:
    the image reader of a vision model. Raises UserError, with file and line.
    """
    reader = _EvalPromptReader(Encoder(tokenizer, encoding, images), rules, images)
    if isinstance(source, str):
        folder = str(Path(source).parent)
        lines = list(_lines(source))
        if (
            source.endswith(".txt") and lines and not lines[0][1].lstrip().startswith("{")
        ):  # otherwise detected as JSONL by its content
            prompts = [reader.of_question(location, line.rstrip("\r")) for location, line in lines]
        else:
            prompts = [reader.of_line(location, line, folder) for location, line in lines]
    else:
        prompts = [reader.of_question(f"eval.prompts[{i}]", text) for i, text in enumerate(source)]
    if not prompts:
        raise UserError(
            f"eval.prompts: {source} contains no prompts. Write one prompt per line, or remove eval.prompts."
        )
    return prompts


def _lines(path: str) -> Iterator[tuple[str, str]]:
    try:
        text = regular_file(Path(path), "a file of prompts").read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"eval.prompts: {path} is not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
    except OSError as error:
        raise UserError(f"eval.prompts: cannot read {path}: {error.strerror}.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line


@dataclass(frozen=True, slots=True)
class _EvalPromptReader:
    """Reads single prompts. rules, images: as in load_prompts."""

    encoder: Encoder
    rules: MessageRules
    images: Images | None

    def of_question(self, location: str, text: str) -> EvalPrompt:
        """The prompt of a text: a user's message if there is a chat template, else a text to continue."""
        if has_template(self.encoder.tokenizer, self.encoder.encoding):
            return self._of_chat(location, with_default_system([{"role": "user", "content": text}], self.rules), {})
        return self._of_text(location, text)

    def of_line(self, location: str, line: str, folder: str) -> EvalPrompt:
        """The prompt of a line of JSON. folder: paths of images are relative to it."""
        try:
            value = parse(line)
        except JsonError as error:
            raise UserError(
                f"{location}: is not valid JSON: {error}. Each line must be one JSON object; {_NEEDED}."
            ) from None
        if not isinstance(value, dict):
            raise UserError(f"{location}: is not a JSON object: {_NEEDED}.")
        value = {name: item for name, item in value.items() if item is not None and name not in self.rules.ignored}
        conversations = None if "prompt" in value else conversations_of(value)
        column = "messages" if "messages" in value or conversations is not None else "prompt"
        content = value.get(column, conversations)
        if isinstance(content, str) and not is_json_list(content):
            return self._of_text(location, content)
        if isinstance(content, str | list):
            read = read_messages(location, column, content, self.rules, images=self.images is not None)
            while read and read[-1]["role"] == "assistant":
                read.pop()
            if not read:
                raise UserError(f"{location}: contains no message to answer. End it with a message of the user.")
            refuse_media(location, value, VIDEOS)
            with_system_text = with_default_system(with_system(location, value, read), self.rules)
            messages, media = take_images(location, with_system_text, value, folder)
            if media and self.images is None:
                raise text_model_error(location)
            return self._of_chat(location, messages, template_inputs(location, value), images_alone(media))
        keys = ", ".join(f"`{key}`" for key in value) or "no keys"
        raise UserError(f"{location}: has {keys}; {_NEEDED}.")

    def _of_text(self, location: str, text: str) -> EvalPrompt:
        (tokens,) = self.encoder.beginnings([text])
        if not tokens:
            raise UserError(f"{location}: is empty. Write a text for the model to continue.")
        return EvalPrompt(text, tuple(tokens))

    def _of_chat(
        self, location: str, messages: list[Message], inputs: Mapping[str, Any], prompt_media: tuple[Image, ...] = ()
    ) -> EvalPrompt:
        """The prompt of a chat. inputs: its tools and template variables, from template_inputs."""
        tokenizer, images = self.encoder.tokenizer, self.images
        if not has_template(tokenizer, self.encoder.encoding):
            raise UserError(
                f"{location}: is a chat, but the tokenizer has no chat template. Write `prompt` with a text to "
                "continue, or use the model's chat (instruct) variant."
            )
        chat, answers, kwargs = self.encoder.question(
            Record(location, "messages", {"messages": messages, **inputs}, prompt_media)
        )

        def render(messages: Messages, ask: bool) -> str:
            return answers.template.render(messages, kwargs, tools=chat.tools, ask=ask).text

        try:
            text = up_to_the_answer(render, chat.messages)
        except RenderError as error:
            raise template_refusal(location, error) from error
        except RenderLimitError as error:
            raise UserError(limit_message(location, error)) from None
        text, prompt_images = (text, None) if images is None else images.prompt(location, text, prompt_media)
        tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return EvalPrompt(as_text(messages), tuple(tokens), prompt_images)


def up_to_the_answer(render: Render, messages: Messages) -> str:
    """The rendering up to the beginning of the answer. Works also for templates without a generation prompt. render:
    (messages, whether to add the generation prompt) -> text."""
    plain, asking = render(messages, False), render(messages, True)
    if asking != plain:
        return asking
    answered = render([*messages, {"role": "assistant", "content": _MARK}], False)
    before, mark, _ = answered.partition(_MARK)
    return before if mark and before.startswith(plain) else plain


def as_text(messages: Sequence[dict[str, Any]]) -> str:
    """Messages for display: a single message as its text, several with their roles, one a line."""
    if len(messages) == 1:
        return _content(messages[0])
    return "\n".join(f"{message['role']}: {_content(message)}" for message in messages)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return str(content)
    return "".join(part.get("text") or f"<{part.get('type')}>" for part in content)
