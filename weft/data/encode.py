"""Encodes records as token ids and a mask of trained tokens."""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2.exceptions import TemplateSyntaxError

from weft.config.schema import DataConfig
from weft.config.yaml12 import override
from weft.data.chat_template import (
    AmbiguousAnswerError,
    ChatTemplate,
    RenderError,
    Rendering,
    UnrenderedTextError,
    chosen_template,
)
from weft.data.conversation import ChatInput, TrainOn, conversation, is_chat
from weft.data.image_files import MediaInfo, MediaLocation
from weft.data.images import ExpandedText, Images, read_images, text_model_error, texts_of
from weft.data.loss_mask import AssistantMasks, MaskedText
from weft.data.messages import CALL_KEYS, FUNCTION_KEYS, is_harmless, is_plain, leave_out_key, unread_keys
from weft.data.records import Record, TopLists
from weft.data.template_bounds import RenderLimitError
from weft.data.text_checks import TextChecks
from weft.errors import BadRowError, UserError, first_line, is_panic, runs_own_code
from weft.files import check_folder
from weft.hub import check_model_is_there

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_SHOWN = 1500  # characters of a rendering in an error


@dataclass(frozen=True, slots=True)
class Encoding:
    """Options of tokenising records. train_on: as data.train_on. chat_template: Jinja source that replaces the
    tokenizer's template. template_kwargs: variables of the template. date: the date in renderings, YYYY-MM-DD; None:
    today."""

    train_on: TrainOn = "answers"
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tokenised document. trained: 1 for each token that is trained as a target, else 0. places, patches, pairs: of
    its images, as in ExpandedText. reach: number of tokens up to the end of the last image; 0 without images. lists: a
    teacher's predictions, an entry for each token."""

    ids: list[int]
    trained: list[int]
    places: tuple[MediaLocation, ...] = ()
    patches: int = 0
    pairs: int = 0
    reach: int = 0
    lists: TopLists | None = None


class Encoder:
    """Encodes records with a tokenizer. Threads may share an Encoder; because of a lock, they run in parallel only
    while chats are tokenised."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None = None, images: Images | None = None
    ) -> None:
        """images: the image reader of a vision model."""
        self.tokenizer, self._images = tokenizer, images
        self.encoding = encoding or Encoding()
        self._prefix = self._find_prefix()
        self._backend: Any = None  # for chats, created at the first
        self._answers: dict[str, AssistantMasks] = {}  # by the template's source
        self._lock = Lock()

    def encode(self, records: Sequence[Record]) -> list[Encoded]:
        """Encodes each record by its format, in order. Raises BadRowError for a record that cannot be encoded."""
        try:
            return self._encode(records)
        except BaseException as error:
            if not is_panic(error):
                raise
            if len(records) > 1:  # encode them one by one to name the failing record
                return [encoded for record in records for encoded in self.encode([record])]
            raise BadRowError(
                f"{records[0].location}: the tokenizer fails for this text: {first_line(error)}."
            ) from error

    def _encode(self, records: Sequence[Record]) -> list[Encoded]:
        kinds = ["chat" if is_chat(record) else record.format for record in records]
        out: list[Encoded | None] = [None] * len(records)
        encoders = {
            "chat": self._chats,
            "prompt": self.encode_prompts,
            "text": self._texts,
            "steps": self._steps,
            "input_ids": self._tokens,
        }
        for kind, encode in encoders.items():
            indices = [i for i, record_kind in enumerate(kinds) if record_kind == kind]
            if indices:
                if kind != "input_ids" and self._images is not None and self._images.marks:
                    for i in indices:
                        self._images.refuse_marks(records[i], texts_of(records[i].value))
                for i, encoded in zip(indices, encode([records[i] for i in indices]), strict=True):
                    out[i] = encoded
        return [encoded for encoded in out if encoded is not None]

    def _texts(self, records: Sequence[Record]) -> list[Encoded]:
        eos = self._eos(records[0])
        out = []
        with self._lock:
            encoded = self.beginnings([record.value["text"] for record in records])
        for ids in encoded:
            ids = _ended(ids, eos)
            out.append(Encoded(ids, [1] * len(ids)))
        return out

    def _steps(self, records: Sequence[Record]) -> list[Encoded]:
        """Each step is tokenised separately. `trained` of its last token is the step's number (labels.py)."""
        out = []
        with self._lock:
            prompts = self.beginnings([record.value["prompt"] for record in records])
            steps = [self.continuations(record.value["steps"]) for record in records]
        for record, prompt, parts in zip(records, prompts, steps, strict=True):
            if not all(parts):
                raise BadRowError(f"{record.location}: a step of `completions` has no tokens. Remove the row.")
            trained = [0] * len(prompt)
            for part, number in zip(parts, record.value["trained"], strict=True):
                trained += [*[0] * (len(part) - 1), number]
            out.append(Encoded([*prompt, *(token for part in parts for token in part)], trained))
        return out

    def _tokens(self, records: Sequence[Record]) -> list[Encoded]:
        if self.encoding.train_on != "answers":
            raise UserError(
                f"{records[0].location}: data.train_on={self.encoding.train_on} would have no effect: rows of "
                "`input_ids` mark the trained tokens themselves. Remove data.train_on."
            )
        return [Encoded(record.value["input_ids"], record.value["trained"]) for record in records]

    def encode_prompts(self, records: Sequence[Record]) -> list[Encoded]:
        """Prompt and completion are tokenised separately, so that the prompt has the same tokens as in generation."""
        eos = self._eos(records[0])
        with self._lock:
            prompts = self.beginnings([record.value["prompt"] for record in records])
            completions = self.continuations([record.value["completion"] for record in records])
        in_prompt = int(self.encoding.train_on == "all")
        out = []
        for prompt, completion in zip(prompts, completions, strict=True):
            completion = _ended(completion, eos)
            out.append(Encoded(prompt + completion, [in_prompt] * len(prompt) + [1] * len(completion)))
        return out

    def _chats(self, records: Sequence[Record]) -> list[Encoded]:
        """Each conversation is rendered and tokenised in one piece. A token with any trained character is trained."""
        sizes: list[list[MediaInfo]] = [[] for _ in records]
        if self._images is not None:  # opens every image, and fetches URLs
            opened = self._images.read(records)
            records, sizes = [record for record, _ in opened], [infos for _, infos in opened]
        elif with_images := next((record for record in records if record.images), None):
            raise text_model_error(with_images.location)
        with self._lock:
            if self._backend is None:
                self._backend = _chat_backend(self.tokenizer, records[0].location)
            chats = [self._rendered(record) for record in records]
        expand = self._images.expand if self._images is not None else lambda record, chat, infos: ExpandedText(chat)
        placed = [expand(*arguments) for arguments in zip(records, chats, sizes, strict=True)]
        encodings = self._backend.encode_batch([expanded.chat.text for expanded in placed], add_special_tokens=False)
        return [_encoded(encoding, expanded) for encoding, expanded in zip(encodings, placed, strict=True)]

    def _rendered(self, record: Record) -> MaskedText:
        """The rendering of a chat, with its trained tokens. Raises BadRowError."""

        def render(chat: ChatInput) -> MaskedText:
            masks, kwargs = self.masks_of(record, chat), {**self.encoding.template_kwargs, **chat.kwargs}
            return masks.mask_all(chat, kwargs) if self.encoding.train_on == "all" else masks.find(chat, kwargs)

        try:
            return self._either(record, self.encoding.train_on, render)
        except AmbiguousAnswerError as error:
            raise BadRowError(
                f"{record.location}: weft cannot determine which tokens are the assistant's: {error}. This is the "
                f"rendering, with the numbers of the recognised messages:\n{_shown(error.rendering)}\nIn a copy of the "
                f"template, put {{% generation %}} before the assistant's text and {{% endgeneration %}} after its "
                "end-of-turn token, and set data.chat_template to the copy."
            ) from error

    def _either(self, record: Record, train_on: TrainOn, render: Callable[[ChatInput], T]) -> T:
        """The result of `render` for a chat with tool-call arguments as objects or, if the template refuses or loses
        these, as JSON text. Raises BadRowError with the first refusal."""
        first: RenderError | UnrenderedTextError | None = None
        for text_arguments in (False, True):
            chat = conversation(record, train_on, text_arguments=text_arguments)
            try:
                return render(chat)
            except (RenderError, UnrenderedTextError) as error:
                first = first or error
                if not any("tool_calls" in message for message in chat.messages):
                    break
            except RenderLimitError as error:
                raise BadRowError(limit_message(record.location, error)) from None
        assert first is not None
        raise template_refusal(record.location, first) from first

    def masks_of(self, record: Record, chat: ChatInput) -> AssistantMasks:
        """The AssistantMasks of this conversation's template; a tokenizer may have a separate template for tools."""
        source = self.encoding.chat_template
        if source is None and record.images and self._images is not None:
            source = self._images.template
        if source is None:
            source = _own_template(self.tokenizer, record.location, chat)
        if source not in self._answers:
            added = self.tokenizer.added_tokens_decoder.values()
            self._answers[source] = AssistantMasks(
                _template(source, self.tokenizer, self.encoding),
                [*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)],
                [token.content for token in added if not token.special],
            )
        template = self._answers[source].template
        _check_read(record.location, chat, template, {**self.encoding.template_kwargs, **chat.kwargs})
        return self._answers[source]

    def question(self, record: Record) -> tuple[ChatInput, AssistantMasks, dict[str, Any]]:
        """(a chat to answer, the masks of its template, the template's variables). Raises BadRowError, also if a part
        of the chat is missing from its rendering."""

        def render(chat: ChatInput) -> tuple[ChatInput, AssistantMasks, dict[str, Any]]:
            answers, kwargs = self.masks_of(record, chat), {**self.encoding.template_kwargs, **chat.kwargs}
            rendering = answers.template.render(chat.messages, kwargs, tools=chat.tools, ask=True)
            TextChecks(answers.template, chat, kwargs, rendering, {}, ask=True).run()
            return chat, answers, kwargs

        return self._either(record, "answers", render)

    def plain(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, without special tokens."""
        out = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        ids: list[list[int]] = out["input_ids"]
        return ids

    def beginnings(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts at the beginning of a document, in training and in prompts. The tokenizer's prefix, such
        as bos, is added unless the text already has it, as renderings of chat templates do. No suffix is added.
        """
        n = len(self._prefix)
        return [ids if ids[:n] == self._prefix else self._prefix + ids for ids in self.plain(texts)]

    def continuations(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that continue other texts.

        SentencePiece-like tokenizers add a space before a text, which is wrong inside a document. If "\\na" is not
        tokenised as "\\n" followed by "a", each text is tokenised after a line break, whose tokens are then removed.
        """
        plain = self.plain(texts)
        letter, anchor, joined = self.plain(["a", "\n", "\na"])
        if joined == anchor + letter:
            return plain
        anchored = self.plain(["\n" + text for text in texts])
        n = len(anchor)
        return [ids[n:] if ids[:n] == anchor else unanchored for ids, unanchored in zip(anchored, plain, strict=True)]

    def _find_prefix(self) -> list[int]:
        """The tokens that the tokenizer adds before a text, such as bos."""
        bare = self.plain(["a"])[0]
        full: list[int] = self.tokenizer("a", verbose=False)["input_ids"]
        for i in range(len(full) - len(bare) + 1):
            if full[i : i + len(bare)] == bare:
                return full[:i]
        return []

    def _eos(self, record: Record) -> int:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError(
                f"{record.location}: `{record.format}` documents end with the tokenizer's end-of-text token, but the "
                "tokenizer has none. A model trained without it would never stop. Set eos_token in "
                "tokenizer_config.json."
            )
        assert isinstance(eos, int)
        return eos


def read_encoding(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Encoding:
    """The encoding of a config. Its date is set only if the template uses a date. Raises UserError."""
    source = chosen_template(data)
    if data.chat_template == "chatml" and "<|im_end|>" not in tokenizer.get_added_vocab():
        raise UserError(
            "data.chat_template: chatml ends answers with <|im_end|>, but the tokenizer has no such token, so a model "
            "would learn to spell it. Set data.chat_template to a Jinja file that ends answers with {{ eos_token }}, "
            "or use another model."
        )
    dated = "strftime_now" in (source or str(tokenizer.chat_template))
    return Encoding(data.train_on, source, data.template_kwargs, data.template_date if dated else None)


def has_template(tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None) -> bool:
    """Whether the encoding or the tokenizer has a chat template."""
    return bool(tokenizer.chat_template or (encoding and encoding.chat_template))


def renderer(
    tokenizer: PreTrainedTokenizerBase, encoding: Encoding
) -> Callable[[Sequence[Mapping[str, Any]], bool], str]:
    """A function (messages, whether to add the generation prompt) -> text, with the template used for documents."""
    source = encoding.chat_template or tokenizer.get_chat_template()
    template = _template(source, tokenizer, encoding)
    return lambda messages, ask: template.render(messages, encoding.template_kwargs, ask=ask).text


def _template(source: str, tokenizer: PreTrainedTokenizerBase, encoding: Encoding) -> ChatTemplate:
    try:
        variables: dict[str, Any] = {**tokenizer.special_tokens_map}
        if encoding.date is not None:  # without it, the template would read the clock
            variables["strftime_now"] = datetime.datetime.fromisoformat(encoding.date).strftime
        return ChatTemplate(source, variables)
    except TemplateSyntaxError as error:
        raise UserError(
            f"the tokenizer's chat template is not valid Jinja: {first_line(error)[:200]} (line {error.lineno}). Set "
            "data.chat_template to another template."
        ) from None


def limit_message(location: str, error: RenderLimitError) -> str:
    """The message for a template that exceeds its limits. location: the name of the document."""
    return (
        f"{location}: weft stopped the chat template at this document: {error}, more than any conversation needs. Set "
        "data.chat_template to another template, or remove the document."
    )


def _ended(ids: list[int], eos: int) -> list[int]:
    return ids if ids[-1:] == [eos] else [*ids, eos]


def _own_template(tokenizer: PreTrainedTokenizerBase, location: str, chat: ChatInput) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"{location}: has `messages`, but the tokenizer has no chat template. Use the model's chat (instruct) "
            "variant, add a chat_template.jinja to the tokenizer's folder, set data.chat_template (chatml, or a "
            "file), or write `prompt` and `completion`."
        )
    source: str = tokenizer.get_chat_template(tools=chat.tools)
    return source


def template_refusal(location: str, error: RenderError | UnrenderedTextError) -> BadRowError:
    """The error for a conversation that a template refused or rendered incompletely."""
    if isinstance(error, RenderError):
        return BadRowError(
            f"{location}: the chat template refused this document: {first_line(error)}. Change the messages, or set "
            "data.chat_template."
        )
    return BadRowError(
        f"{location}: {error}. This is the rendering:\n{_shown(error.rendering)}\nRemove that from the document, or "
        "set data.chat_template (or data.template_kwargs) so that it is rendered."
    )


def _check_read(location: str, chat: ChatInput, template: ChatTemplate, kwargs: Mapping[str, Any]) -> None:
    """Raises BadRowError if messages have a part that the template never reads, because it would be lost silently."""
    if chat.tools and not template.names("tools"):
        raise BadRowError(
            f"{location}: has `tools`, which the chat template does not render. Omit them "
            f"({override('data.ignore', ['tools'])}), or set data.chat_template to one that does."
        )
    for number, message in enumerate(chat.messages, start=1):
        if is_plain(message):
            continue
        if "tool_calls" in message and not template.reads_calls:
            raise BadRowError(
                f"{location}: message {number} has `tool_calls`, which the chat template does not render. Remove it, "
                "or set data.chat_template to one that does."
            )
        if message.get("thinking") and not template.reads_thoughts:
            raise BadRowError(
                f"{location}: message {number} has `reasoning_content`, which the chat template does not render. Write "
                "it into `content` in the form that the model should write, remove it, or set data.chat_template to "
                "one that does."
            )
        for call, name, stripped in _without_unread(chat, number - 1):
            if not template.names(name) or _renders_alike(template, chat, stripped, kwargs):
                raise BadRowError(
                    f"{location}: message {number}{call} has `{name}`, which neither weft nor the chat template reads. "
                    f"{leave_out_key(name)}"
                )


def _without_unread(chat: ChatInput, index: int) -> Iterator[tuple[str, str, ChatInput]]:
    """Yields (the call's name in messages, the key, the conversation without it) for each key that only the template
    could read."""
    message = chat.messages[index]
    for name in unread_keys(message):
        yield "", name, chat.replaced(index, **{name: None})
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        for holder, keys in ((call, CALL_KEYS), (function, FUNCTION_KEYS)):
            for name, value in holder.items():
                if name in keys or is_harmless(name, value):
                    continue
                remaining = {key: item for key, item in holder.items() if key != name}
                changed = remaining if holder is call else {**call, "function": remaining}
                calls = [*message["tool_calls"][:number], changed, *message["tool_calls"][number + 1 :]]
                yield f", call {number + 1}", name, chat.replaced(index, tool_calls=calls)


def _renders_alike(template: ChatTemplate, chat: ChatInput, changed: ChatInput, kwargs: Mapping[str, Any]) -> bool:
    """Whether a template renders two conversations identically; False if it refuses either."""
    try:
        first, second = (template.render(c.messages, kwargs, tools=c.tools).text for c in (chat, changed))
    except RenderError:
        return False
    return first == second


def _chat_backend(tokenizer: PreTrainedTokenizerBase, location: str) -> Any:
    """A tokenizers.Tokenizer for chats, whose offsets cover every character of a text. Raises UserError if none does.

    The post-processor is removed: chat templates write their own special tokens, and byte-level post-processors may
    trim spaces from offsets (Llama 3's does), so that a space at either end of an answer would have no token.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{location}: `messages` need a fast tokenizer (tokenizer.json), so that weft can mark the trained tokens, "
            f"but model.path has a {type(tokenizer).__name__}. Convert it, or write `prompt` and `completion`."
        )
    backend: Any = tokenizer.backend_tokenizer
    if backend.post_processor is not None or backend.padding is not None or backend.truncation is not None:
        backend = copy.deepcopy(backend)
        backend.post_processor = None
        backend.no_padding()
        backend.no_truncation()
    text = "a b\nc"
    encoding = backend.encode(text, add_special_tokens=False)
    lost = [i for i in range(len(text)) if encoding.char_to_token(i) is None]
    if lost:
        raise UserError(
            f"{location}: the tokenizer drops characters of a chat, such as {text[lost[0]]!r}, so weft cannot tell "
            "trained tokens from others. Write `prompt` and `completion`."
        )
    return backend


def _encoded(encoding: Any, placed: ExpandedText) -> Encoded:
    """encoding: the tokenizers.Encoding of placed.chat.text."""
    trained, reach = _trained_tokens(encoding, placed.chat), 0
    for start, end in placed.replaced:
        first, last = _token_at(encoding, start, end), encoding.char_to_token(end - 1)
        assert first is not None and last is not None
        reach = last + 1
        trained[first:reach] = [0] * (reach - first)
    return Encoded(encoding.ids, trained, placed.places, placed.patches, placed.pairs, reach)


def _trained_tokens(encoding: Any, chat: MaskedText) -> list[int]:
    """1 for each token with a trained character, else 0. encoding: the tokenizers.Encoding of chat.text."""
    mask = [0] * len(encoding)
    for start, end in chat.spans:
        first = _token_at(encoding, start, end)
        after = _token_at(encoding, end, len(chat.text))
        if after is None:
            after = len(mask)
        elif encoding.token_to_chars(after)[0] < end:  # the token has characters on both sides of the end
            after += 1
        if first is not None:
            mask[first:after] = [1] * (after - first)
    return mask


def _token_at(encoding: Any, position: int, limit: int) -> int | None:
    """The token of the first character in [position, limit) that has a token; None if no character has."""
    for i in range(position, limit):
        token: int | None = encoding.char_to_token(i)
        if token is not None:
            return token
    return None


def _shown(rendering: Rendering) -> str:
    """The rendering, indented, with each message as [number:text:number]; the middle of a long rendering is omitted."""
    text = rendering.text
    for index, (start, end) in sorted(rendering.regions.items(), key=lambda item: -item[1][0]):
        text = f"{text[:start]}[{index + 1}:{text[start:end]}:{index + 1}]{text[end:]}"
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]}\n...\n{text[-_SHOWN // 2 :]}"
    return "\n".join(f"  {line}" for line in text.splitlines())


def changed_files(model: str, data: DataConfig) -> dict[str, str]:
    """Name -> text of the files that replace the model's files in every checkpoint: the template of data.chat_template,
    and the processor with data.image_pixels and data.video. With them, a server needs none of these keys."""
    template = chosen_template(data)
    texts = {} if template is None else {"chat_template.jinja": template}
    images = read_images(model, load_tokenizer(model), data) if data.image_pixels or data.video else None
    return texts if images is None else texts | images.processor().files(model)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model (a directory or hub id). Raises UserError if there is none or it cannot be loaded."""
    from transformers import (  # imported here: it imports torch, which workers do not need
        AutoTokenizer,
        PreTrainedTokenizerBase,
    )

    check_folder(path)
    check_model_is_there(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except BaseException as error:  # the tokenizers library raises plain Exceptions, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if refusal := runs_own_code(path, error):
            raise refusal from error
        from weft.models.hf import read_config

        if not os.path.isdir(path) or os.path.exists(os.path.join(path, "config.json")):
            read_config(path)  # transformers finds the tokenizer through config.json: name that file if it is at fault
        raise UserError(
            f"model.path: no tokenizer could be read from {path}: {first_line(error)}. It needs tokenizer.json and "
            "tokenizer_config.json next to config.json. Copy them from the original model."
        ) from error
    # With only a config.json, transformers silently creates an empty tokenizer.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise UserError(
            f"model.path: {path} contains no tokenizer. Copy tokenizer.json and tokenizer_config.json of the original "
            "model to it."
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    _check_tokenizer(tokenizer, path)
    return tokenizer


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raises UserError for settings that crash the tokenizers library, or with which a short text can fill the
    memory."""
    max_length = tokenizer.model_max_length
    if not isinstance(max_length, int | float):
        raise UserError(
            f"model.path: {path}: tokenizer_config.json: model_max_length is {max_length!r:.80}, not a number of "
            "tokens. Correct it, or remove it."
        )
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None:
        return
    growth = _growth(json.loads(normalizer.__getstate__()), path)
    if growth > _MOST_GROWTH:
        raise UserError(
            f"model.path: {path}: tokenizer.json: its normalizer can make a text {growth:,.0f} times as long. Copy "
            "tokenizer.json from the original model."
        )


# Rules that replace a space or a quote stay far below this factor; a dozen rules that each double a text exceed it.
_MOST_GROWTH = 1000


def _growth(normalizer: Mapping[str, Any], path: str) -> float:
    """The largest factor by which a text can grow. normalizer: as in tokenizer.json. Unicode's normal forms are not
    counted."""
    if normalizer["type"] == "Sequence":
        return math.prod(_growth(step, path) for step in normalizer["normalizers"])
    if normalizer["type"] != "Replace":
        return 1.0
    pattern, content = normalizer["pattern"], normalizer["content"]
    if pattern.get("String") == "":  # the library panics
        raise UserError(
            f"model.path: {path}: tokenizer.json: its normalizer replaces the empty text by {content!r:.40}. Copy "
            "tokenizer.json from the original model."
        )
    if "String" in pattern:
        return max(1.0, len(content) / len(pattern["String"]))
    try:  # a pattern that matches the empty text matches between any two characters
        matches_empty = re.compile(pattern["Regex"]).match("") is not None
    except re.error:  # the library's regular expressions differ from Python's
        matches_empty = True
    return max(1.0, len(content) + float(matches_empty))
