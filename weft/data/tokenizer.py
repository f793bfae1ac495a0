"""Records -> token ids and which of them are trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from weft.data.records import Record
from weft.errors import UserError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and 1 for each that is trained as a target, else 0."""

    ids: list[int]
    trained: list[int]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model (a directory or hub id). Raises UserError where there is none that works."""
    from transformers import AutoTokenizer  # brings torch and half of transformers, which workers do without

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(
            f"model.path: no tokenizer could be read from {path}: {_first_line(error)}. It needs tokenizer.json and "
            "tokenizer_config.json beside config.json; copy them from the model you started from."
        ) from error
    # Given a config alone, transformers makes an empty tokenizer and says nothing.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise UserError(
            f"model.path: {path} holds no tokenizer. Copy tokenizer.json and tokenizer_config.json of the model you "
            "started from to it."
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


class Encoder:
    """Encodes records of one tokenizer: what it puts around a text is asked once, not for each record."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._prefix = self._find_prefix()
        self._masking: PreTrainedTokenizerBase | None = None

    def encode(self, records: Sequence[Record]) -> list[Encoded]:
        """Encodes each record by its format, in order."""
        by_format = {"messages": self._messages, "prompt": self._prompts, "text": self._texts}
        out: list[Encoded | None] = [None] * len(records)
        for name, encode in by_format.items():
            places = [i for i, record in enumerate(records) if record.format == name]
            if places:
                for i, encoded in zip(places, encode([records[i] for i in places]), strict=True):
                    out[i] = encoded
        return [encoded for encoded in out if encoded is not None]

    def _texts(self, records: Sequence[Record]) -> list[Encoded]:
        eos = self._eos(records[0])
        out = []
        for ids in self._plain([record.value["text"] for record in records]):
            ids = _ended(self._begun(ids), eos)
            out.append(Encoded(ids, [1] * len(ids)))
        return out

    def _prompts(self, records: Sequence[Record]) -> list[Encoded]:
        """Prompt and completion are tokenised apart, so that the prompt is what generation will be given."""
        eos = self._eos(records[0])
        prompts = self._plain([record.value["prompt"] for record in records])
        completions = self._continuations([record.value["completion"] for record in records])
        out = []
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt, completion = self._begun(prompt), _ended(completion, eos)
            out.append(Encoded(prompt + completion, [0] * len(prompt) + [1] * len(completion)))
        return out

    def _messages(self, records: Sequence[Record]) -> list[Encoded]:
        if self._masking is None:
            self._masking = _masking_copy(self.tokenizer, records[0].where)
        try:
            out = _apply_template(self._masking, [record.value["messages"] for record in records])
        except (TemplateError, ValueError, TypeError, KeyError, OverflowError) as error:
            if len(records) > 1:  # find the line that the template refused
                return [self._messages([record])[0] for record in records]
            raise UserError(
                f"{records[0].where}: the tokenizer's chat template refused this document: {_first_line(error)}. "
                "Change the messages, or the template in model.path (chat_template.jinja or tokenizer_config.json)."
            ) from error
        columns = zip(records, out["input_ids"], out["assistant_masks"], out["offset_mapping"], strict=True)
        return [Encoded(ids, _whole_characters(record, mask, offsets)) for record, ids, mask, offsets in columns]

    def _plain(self, texts: list[str]) -> list[list[int]]:
        out = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        ids: list[list[int]] = out["input_ids"]
        return ids

    def _continuations(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that continue others.

        SentencePiece-like tokenizers put a space before a text; within a document it would be one too many. They are
        recognised by what they make of "a", and get each text behind a line break whose tokens are then cut off.
        """
        plain = self._plain(texts)
        letter, anchor, both = self._plain(["a", "\n", "\na"])
        if both == anchor + letter:
            return plain
        anchored = self._plain(["\n" + text for text in texts])
        n = len(anchor)
        return [ids[n:] if ids[:n] == anchor else apart for ids, apart in zip(anchored, plain, strict=True)]

    def _find_prefix(self) -> list[int]:
        """What the tokenizer puts before a text, such as bos."""
        bare = self._plain(["a"])[0]
        full: list[int] = self.tokenizer("a", verbose=False)["input_ids"]
        for i in range(len(full) - len(bare) + 1):
            if full[i : i + len(bare)] == bare:
                return full[:i]
        return []

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def _eos(self, record: Record) -> int:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError(
                f"{record.where}: `{record.format}` documents end with the tokenizer's end-of-text token, and it has "
                "none: a model trained without it would never stop. Set eos_token in tokenizer_config.json."
            )
        assert isinstance(eos, int)
        return eos


def _ended(ids: list[int], eos: int) -> list[int]:
    return ids if ids[-1:] == [eos] else [*ids, eos]


def _masking_copy(tokenizer: PreTrainedTokenizerBase, where: str) -> PreTrainedTokenizerBase:
    """A copy whose offsets cover every character of a chat, after checking that it can mark the assistant's tokens.

    Byte-level tokenizers may trim spaces from offsets in their post-processor (Llama 3 does). transformers then finds
    no token for a space at either end of an answer: it trains nothing of that chat, or everything after it. Chat
    templates write their own special tokens, so the post-processor has nothing else to do here.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: has `messages`, but the tokenizer has no chat template. Use the model's chat (instruct) "
            "variant, put a chat_template.jinja beside the tokenizer, or write `prompt` and `completion`."
        )
    if not GENERATION_TAG.search(tokenizer.get_chat_template()):
        raise UserError(
            f"{where}: the tokenizer's chat template does not mark which tokens to train. In its chat_template.jinja, "
            "put {% generation %} before the assistant's content and {% endgeneration %} after its end-of-turn token; "
            "or write `prompt` and `completion`."
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"{where}: `messages` need a fast tokenizer (tokenizer.json) to mark which tokens to train, and model.path "
            f"has a {type(tokenizer).__name__}. Convert it, or write `prompt` and `completion`."
        )
    masking = copy.deepcopy(tokenizer)
    backend: Any = masking.backend_tokenizer
    backend.post_processor = None
    return masking


def _apply_template(tokenizer: PreTrainedTokenizerBase, chats: list[Any]) -> Any:
    return tokenizer.apply_chat_template(
        chats,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
    )


def _whole_characters(record: Record, mask: list[int], offsets: list[tuple[int, int]]) -> list[int]:
    """Extends the mask to all tokens of its last characters: transformers stops at the first byte of an emoji."""
    end = 0
    for i, (first, last) in enumerate(offsets):
        if first > end:
            raise UserError(
                f"{record.where}: the tokenizer drops characters {end} to {first} of the chat, so that trained tokens "
                "cannot be told from others. Write `prompt` and `completion`."
            )
        if i and mask[i - 1] and first < end:
            mask[i] = 1
        end = max(end, last)
    return mask


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
