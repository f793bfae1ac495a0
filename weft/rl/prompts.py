"""The prompts of reinforcement learning: reading them from data, and their order over rollout steps."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from weft.config.rl_schema import RlConfig
from weft.config.yaml12 import override
from weft.data.blocks import OnBad, SourceRow, raise_bad_row
from weft.data.columns import SYSTEMS, TOOLS, add_named_columns, divided_columns
from weft.data.encode import Encoding, has_template, read_encoding
from weft.data.image_columns import COLUMN, VIDEOS, Image, images_alone, take_images
from weft.data.image_files import PromptImages, opening_pool
from weft.data.images import Images, text_model_error, texts_of
from weft.data.messages import MessageRules, read_messages, with_default_system, with_parts
from weft.data.order import SourceShare, order_of
from weft.data.prompts import as_text
from weft.data.records import (
    CONVERSATIONS,
    Record,
    conversations_of,
    is_json_list,
    refuse_media,
    with_system,
)
from weft.data.sources import Data, DataSource, open_data
from weft.errors import UserError, first_line
from weft.inference.types import Prompt
from weft.models.facts import position_limit
from weft.rl.chat import ChatRenderer
from weft.rl.environments.base import environment_class
from weft.strict_json import check_unicode
from weft.terminal import counted

_NEEDED = "`prompt` (a text, or messages) or `messages` in each row"

# Columns that the chat template reads.
_RENDERED = (
    "prompt", "messages", *CONVERSATIONS, "system", "tools", *TOOLS, "chat_template_kwargs", COLUMN, VIDEOS,
)  # fmt: skip

# Column names of common datasets -> weft's name, for the hint in an error message.
_FOREIGN = {
    "question": "prompt", "problem": "prompt", "query": "prompt", "input": "prompt", "instruction": "prompt",
    "text": "prompt", "conversations": "messages", "conversation": "messages",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Requirements on prompts. longest: limit in tokens. drop, drop_bad: whether to omit longer prompts, and invalid
    rows, instead of raising. chat: whether a text is a user turn. instruction: appended to each prompt. tools: JSON
    schemas for rows without their own. vocab_size: token ids must be below it."""

    longest: int
    drop: bool = False
    drop_bad: bool = False
    chat: bool = False
    instruction: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    vocab_size: int | None = None


def check_lengths(config: RlConfig, shape: PretrainedConfig) -> None:
    """Raise UserError if a sample may become longer than the model has positions, or would be trained with another
    rotary table than it was sampled with. shape: the text config."""
    rollout, positions = config.rollout, getattr(shape, "max_position_embeddings", None)
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if positions is not None and longest > positions:
        raise UserError(
            f"a sample may have rollout.max_prompt_tokens + rollout.max_new_tokens = {longest:,} tokens, but the model "
            f"has {positions:,} positions (max_position_embeddings in its config.json): lower one of the two keys."
        )
    limit = position_limit(shape)
    if limit is not None and longest > limit:
        raise UserError(
            f"a sample may have rollout.max_prompt_tokens + rollout.max_new_tokens = {longest:,} tokens, but the "
            f"model uses another rotary table above {limit:,} tokens (rope_parameters in its config.json). A longer "
            "sample would be trained with another table than it was sampled with. Lower the sum of the two keys to "
            f"{limit:,}."
        )


class Prompts(Sequence[Prompt]):
    """The prompts of a run. shares: one per source; they determine the order. dropped: number of prompts omitted as too
    long. bad: (source, error) of each omitted invalid row. template: whether there is a chat template."""

    def __init__(
        self,
        label: str,
        prompts: Sequence[Prompt],
        shares: Sequence[SourceShare],
        dropped: int = 0,
        bad: Sequence[tuple[str, str]] = (),
        template: bool = False,
    ) -> None:
        self.template = template
        self.label, self.prompts, self.shares, self.dropped, self.bad = label, prompts, shares, dropped, bad

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self.prompts[index]

    def __str__(self) -> str:
        lengths = [len(prompt.tokens) for prompt in self.prompts]
        shortest, longest = min(lengths), max(lengths)
        tokens = f"{shortest:,} to {longest:,} tokens" if shortest < longest else counted(longest, "token")
        text = f"{self.label}: {counted(len(self), 'prompt')} of {tokens}"
        text += f"; {self.dropped:,} longer ones dropped" if self.dropped else ""
        return text + (f"; {len(self.bad):,} bad rows omitted" if self.bad else "")

    def template_use(self) -> str:
        """A sentence on whether the chat template renders the prompts."""
        texts = sum(prompt.messages is None for prompt in self.prompts)
        if not texts:
            return "the chat template renders all prompts"
        if not self.template:
            return "there is no chat template: prompts are continued as plain text"
        use = (
            "NOT used"
            if texts == len(self)
            else f"the chat template renders {len(self) - texts:,} prompts, not {texts:,}"
        )
        return f"{use}: `prompt` is text, which the model continues. Set rl.chat=true to render it as a user message"

    @property
    def digest(self) -> str:
        """Hexadecimal digest of all tokens in order, the images' sizes, and the sources' weights."""
        digest = hashlib.blake2b(repr([(s.documents, s.weight) for s in self.shares]).encode(), digest_size=8)
        for prompt in self.prompts:
            digest.update(np.array([len(prompt.tokens), *prompt.tokens], np.int64).tobytes())
            if prompt.images is not None:
                digest.update(repr([(s.height, s.width, s.size) for s in prompt.images.sizes]).encode())
        return digest.hexdigest()


def load_rl_prompts(
    config: RlConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: Data | None = None,
    *,
    vocab_size: int | None = None,
    images: Images | None = None,
) -> Prompts:
    """The prompts that a config names. UserError with file and line for invalid data.

    A row has `prompt` (a text or messages) or `messages`; assistant messages at their end are removed. The other
    columns are kept for rewards. data: replaces the config's data: rows in memory, or another data section. vocab_size:
    token ids must be below it. images: the image settings of a vision model.
    """
    environment = environment_class(config)
    rules = PromptRules(
        longest=config.rollout.max_prompt_tokens,
        drop=config.data.long_documents == "drop",
        drop_bad=config.data.bad_rows == "drop",
        chat=config.rl.chat,
        instruction=config.rl.instruction,
        tools=() if environment is None else tuple(environment.tools),
        vocab_size=vocab_size,
    )
    encoding = read_encoding(config.data, tokenizer)
    return read_prompts(config.data if data is None else data, tokenizer, encoding, rules, images)


def read_prompts(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    encoding: Encoding,
    rules: PromptRules,
    images: Images | None = None,
) -> Prompts:
    """Read, check and tokenise prompts, source by source."""
    reader = _RlPromptReader(tokenizer, encoding, rules, images)
    shares: list[SourceShare] = []
    prompts: list[Prompt] = []
    dropped, bad = 0, list[tuple[str, str]]()
    sources = open_data(data)
    for source in sources:
        wrong: list[str] = []
        read = list(reader.read(source, partial(_keep, wrong) if rules.drop_bad else raise_bad_row))
        bad += [(source.label, text) for text in wrong]
        if wrong and not read:
            raise UserError(
                f"data.bad_rows=drop: no prompt of {source.label} is left, because all {len(wrong):,} rows are bad. "
                f"The first: {wrong[0]}"
            )
        short = [prompt for prompt in read if len(prompt.tokens) <= rules.longest]
        _check(source, read, short, rules)
        shares.append(SourceShare(len(short), source.weight))
        prompts += [replace(prompt, index=len(prompts) + i) for i, prompt in enumerate(short)]
        dropped += len(read) - len(short)
    label = sources[0].label if len(sources) == 1 else f"{len(sources)} sources"
    return Prompts(label, prompts, shares, dropped, bad, reader.has_template)


def _keep(wrong: list[str], number: int, error: UserError) -> None:
    wrong.append(first_line(error))


def _check(source: DataSource, read: Sequence[Prompt], short: Sequence[Prompt], rules: PromptRules) -> None:
    if not read:
        raise UserError(f"{source.label}: contains no prompts. data.path must name data with {_NEEDED}.")
    longest = max(read, key=lambda prompt: len(prompt.tokens))
    if rules.drop and not short:
        raise UserError(
            f"{source.label}: data.long_documents=drop: no prompt is left, because all {len(read):,} are longer than "
            f"rollout.max_prompt_tokens = {rules.longest}. Raise rollout.max_prompt_tokens."
        )
    if len(short) < len(read) and not rules.drop:
        raise UserError(
            f"{longest.source}: {len(read) - len(short):,} of {len(read):,} prompts are longer than "
            f"rollout.max_prompt_tokens = {rules.longest}; this is the longest, with {len(longest.tokens)}. Set "
            f"rollout.max_prompt_tokens={len(longest.tokens)}, or data.long_documents=drop to leave them out."
        )
    if rules.vocab_size is not None:
        for prompt in short:
            if max(prompt.tokens) >= rules.vocab_size:
                raise UserError(
                    f"{prompt.source}: the tokenizer gives id {max(prompt.tokens)}, but the model's vocabulary has "
                    f"{rules.vocab_size} tokens. Tokenizer and model at model.path do not match."
                )


@dataclass(frozen=True, slots=True)
class _RlPromptRow:
    """A row before it is tokenised. text: the text to tokenise; for a chat, its rendering. shown: Prompt.text. images:
    found in the row. opened: the same images, measured."""

    location: str
    text: str
    shown: str
    messages: tuple[Mapping[str, Any], ...] | None
    columns: Mapping[str, Any]
    images: tuple[Image, ...] = ()
    opened: PromptImages | None = None


class _RlPromptReader:
    """Rows -> prompts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, encoding: Encoding, rules: PromptRules, images: Images | None
    ) -> None:
        self.tokenizer, self.rules, self.images = tokenizer, rules, images
        self.chats = ChatRenderer(tokenizer, encoding, images)
        self.has_template = has_template(tokenizer, encoding)
        self.placeholders = () if images is None else images.placeholders

    def read(self, source: DataSource, bad: OnBad) -> Iterator[Prompt]:
        """The prompts of a source, all with index 0; the caller sets indices."""
        for part in source.parts:
            for block in part.blocks():
                rows, folder = [], block.folder()
                for row in block.rows(bad):
                    try:
                        rows.append((row.number, self._checked(row, source, folder)))
                    except UserError as error:
                        bad(row.number, error)
                yield from self._tokenised(list(self._opened(rows, bad)), bad)

    def _checked(self, row: SourceRow, source: DataSource, folder: str) -> _RlPromptRow:
        if row.escaped:
            check_unicode(row.location, row.values)
        return self._row(row.location, _rename_columns(row, source.columns), source, folder)

    def _opened(self, rows: Sequence[tuple[int, _RlPromptRow]], bad: OnBad) -> Iterator[_RlPromptRow]:
        """The rows whose images can be opened, with placeholders for images in their texts."""
        if self.images is None:
            yield from (row for _, row in rows)
            return
        with opening_pool() as pool:
            for (number, _), opened_row in zip(rows, pool.map(self._placed, [row for _, row in rows]), strict=True):
                if isinstance(opened_row, UserError):
                    bad(number, opened_row)
                else:
                    yield opened_row

    def _placed(self, row: _RlPromptRow) -> _RlPromptRow | UserError:
        assert self.images is not None
        try:
            text, opened = self.images.prompt(row.location, row.text, row.images)
        except UserError as error:
            return error
        return replace(row, text=text, columns={**row.columns, COLUMN: opened or ()}, opened=opened)

    def _tokenised(self, rows: Sequence[_RlPromptRow], bad: OnBad) -> Iterator[Prompt]:
        ids: dict[int, list[int]] = {}
        for is_chat, tokenise in ((True, self.chats.rendered), (False, self.chats.beginnings)):
            places = [i for i, row in enumerate(rows) if (row.messages is not None) == is_chat]
            if places:
                ids.update(zip(places, tokenise([rows[i].text for i in places]), strict=True))
        for i, row in enumerate(rows):
            if not ids[i]:
                bad(i, UserError(f"{row.location}: `prompt` is empty. Write a question or messages."))
                continue
            shown = row.opened, self.placeholders
            yield Prompt(0, 0, tuple(ids[i]), row.shown, row.messages, row.columns, row.location, *shown)

    def _row(self, location: str, row: dict[str, Any], source: DataSource, folder: str) -> _RlPromptRow:
        rules = source.rules
        row = {key: item for key, item in row.items() if key not in rules.ignored}
        refuse_media(location, row, VIDEOS)
        if row.get("prompt") is None:
            conversations = conversations_of({key: item for key, item in row.items() if item is not None})
            row |= {} if conversations is None else {"messages": conversations}
        name = _prompt_column(location, row, source.columns, self.has_template and not self.rules.chat)
        value = row[name]
        other_columns = {key: item for key, item in row.items() if key != name}
        if isinstance(value, str) and name == "prompt" and not is_json_list(value):
            text = value if self.rules.instruction is None else f"{value}\n{self.rules.instruction}"
            if not self.rules.chat:
                return _text_prompt(location, text, other_columns, rules)
            messages = with_system(location, other_columns, [{"role": "user", "content": text}])
        else:
            messages = with_system(location, other_columns, read_messages(location, name, value, rules, images=True))
            messages = self._instructed(_without_last_answers(location, name, messages))
        return self._chat(location, with_default_system(messages, rules), other_columns, folder)

    def _instructed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with rl.instruction appended to its last message."""
        text = self.rules.instruction
        if text is None:
            return messages
        *before, last = messages
        content = last.get("content")
        if isinstance(content, list):
            return [*before, {**last, "content": [*content, {"type": "text", "text": f"\n{text}"}]}]
        return [*before, {**last, "content": f"{content}\n{text}"}]

    def _chat(
        self, location: str, messages: list[dict[str, Any]], other_columns: dict[str, Any], folder: str
    ) -> _RlPromptRow:
        if not self.has_template:
            raise UserError(
                f"{location}: is a chat, but the tokenizer has no chat template. Use the model's chat (instruct) "
                "variant, set data.chat_template (chatml, or a file), or write `prompt` as a text to be continued."
            )
        if self.rules.tools and not other_columns.get("tools"):
            other_columns = {**other_columns, "tools": [dict(tool) for tool in self.rules.tools]}
        messages, extracted = take_images(location, messages, other_columns, folder)
        images = images_alone(extracted)
        if images and self.images is None:
            raise text_model_error(location)
        if self.images is not None:
            self.images.refuse_marks(Record(location, "messages", {}), texts_of(messages))
        chat, text = self.chats.question(location, messages, other_columns, images)
        answerable = tuple(with_parts(message) for message in chat.messages)
        return _RlPromptRow(location, text, as_text(answerable), answerable, other_columns, images)


def _rename_columns(row: SourceRow, columns: Mapping[str, str]) -> dict[str, Any]:
    """All columns of a row, and the columns of `columns` under weft's names. Rewards get nulls as in the data. Columns
    that the chat template renders are without nulls that an Arrow table added to objects."""
    named_columns = add_named_columns(row.location, row.values, columns)
    if row.cleaners:
        paths = {name: path for name, path in columns.items() if name in _RENDERED}
        cleaned = add_named_columns(row.location, row.cleaned(), paths)
        named_columns |= {name: cleaned[name] for name in _RENDERED if name in cleaned}
    return named_columns


def _text_prompt(location: str, text: str, other_columns: dict[str, Any], rules: MessageRules) -> _RlPromptRow:
    if rules.system is not None:
        raise UserError(
            f"{location}: data.system has no effect on a text `prompt`, which the model continues. Set rl.chat=true "
            "to render it as a user message, write it as messages, or remove data.system."
        )
    if unread := [
        name for name in ("system", *SYSTEMS, "tools", "chat_template_kwargs", COLUMN) if other_columns.get(name)
    ]:
        raise UserError(
            f"{location}: has `{unread[0]}`, but `prompt` is a text, which the model continues. Set rl.chat=true to "
            f"render it as a user message, write it as messages, or remove `{unread[0]}`."
        )
    return _RlPromptRow(location, text, text, None, other_columns)


def _prompt_column(location: str, row: Mapping[str, Any], columns: Mapping[str, str], chat: bool) -> str:
    """The name of the column that holds the prompt. chat: as in _columns_to_set."""
    candidates = [name for name in ("prompt", "messages") if row.get(name) is not None]
    named = [name for name in candidates if name in columns]
    if len(named) == 1 or len(candidates) == 1:
        return (named or candidates)[0]
    if candidates:
        raise UserError(
            f"{location}: has `prompt` and `messages`. Remove one of them, or name the column to use in "
            f"data.columns, as in {override('data.columns', {'prompt': 'prompt'})}."
        )
    names = ", ".join(f"`{name}`" for name in row) or "no columns"
    advice = _columns_to_set(row, chat) or divided_columns(location, row)
    raise UserError(f"{location}: has {names}; it needs {_NEEDED}.{advice}")


def _columns_to_set(row: Mapping[str, Any], chat: bool) -> str:
    """Advice on the keys to set for a row of another library; "" if weft knows none of its columns. chat: whether there
    is a chat template that weft does not apply to texts."""
    if row.get("instruction") and row.get("input"):
        return " Write `instruction` and `input` into one column, `prompt`: both are the question."
    weft_name, name = next(
        ((weft_name, name) for name, weft_name in _FOREIGN.items() if row.get(name) is not None), ("", "")
    )
    if not name:
        return ""
    is_text = weft_name == "prompt" and isinstance(row[name], str) and not is_json_list(row[name])
    also = " rl.chat=true: a question then goes through the chat template" if chat and is_text else ""
    return f" Set {override('data.columns', {weft_name: name})}{also}."


def _without_last_answers(location: str, name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without assistant messages at their end."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not any(message["role"] != "system" for message in messages):
        raise UserError(f"{location}: `{name}` contains no message to answer. End it with a user message.")
    return messages


def with_images(prompt: Prompt, prompts: Sequence[Prompt]) -> Prompt:
    """A recorded prompt with the images of the same prompt in the data, because records hold no images. UserError if
    the data's prompt with this index has images and other tokens."""
    data_prompt = prompts[prompt.index] if prompt.index < len(prompts) else None
    if data_prompt is None or data_prompt.images is None:
        return prompt
    if data_prompt.tokens != prompt.tokens:
        raise UserError(
            f"{prompt.source}: the recorded prompt differs from {data_prompt.source} of data.path, so its images "
            "cannot be read. Set data.path to the data of the recorded run."
        )
    return replace(prompt, images=data_prompt.images)


class PromptStream:
    """The prompts of a run in the order in which rollout steps take them.

    An epoch contains every prompt once (a weighted source contributes its share), in an order that depends only on the
    seed and the epoch. Epochs follow each other without a gap, so every rollout step gets `per_step` prompts. Each
    repetition of a prompt has its own `visit`, and therefore its own seeds.
    """

    def __init__(
        self, prompts: Sequence[Prompt], per_step: int, seed: int, shuffle: bool = True, *, taken: int = 0
    ) -> None:
        """per_step: prompts of a rollout step. taken: number of prompts that a resumed run has already taken."""
        assert len(prompts) and per_step >= 1
        self._prompts, self.per_step = prompts, per_step
        self._seed, self._shuffle = seed, shuffle
        self._shares = prompts.shares if isinstance(prompts, Prompts) else [SourceShare(len(prompts))]
        self.in_epoch = sum(share.in_epoch for share in self._shares)
        self._visits: Counter[int] = Counter()
        self._order = self._forever()
        self.taken = 0
        self.take(taken)

    def take(self, count: int | None = None) -> list[Prompt]:
        """The next `count` prompts; by default those of one rollout step."""
        out = [next(self._order) for _ in range(self.per_step if count is None else count)]
        self.taken += len(out)
        return out

    @property
    def epoch(self) -> float:
        """Number of epochs taken so far, as a fraction."""
        return self.taken / self.in_epoch

    def steps(self, epochs: int) -> int:
        """The number of rollout steps of this many epochs, rounded up."""
        return -(-epochs * self.in_epoch // self.per_step)

    def state(self) -> dict[str, int]:
        """The stream's part of a checkpoint."""
        return {"taken": self.taken}

    def _forever(self) -> Iterator[Prompt]:
        epoch = 1
        while True:
            for index in order_of(self._shares, self._seed, epoch, self._shuffle):
                visit = self._visits[index]
                self._visits[index] += 1
                yield replace(self._prompts[index], visit=visit)
            epoch += 1
