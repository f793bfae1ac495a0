"""The tokens that end an answer. Files of a base model name only the end of a document, but a chat template ends turns
with another token. Every generator (rollout engines, eval.prompts, `weft chat`, servers of a checkpoint) must stop at
both.

weft never changes the tokenizer's eos_token: it ends documents other than chats, and templates write it, so a later run
on the checkpoint would render chats and end texts differently. Instead, a checkpoint lists the tokens in
generation_config.json, which transformers, vLLM and SGLang read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from weft.data.chat_template import AmbiguousAnswerError, RenderError
from weft.data.conversation import ChatInput
from weft.data.encode import Encoder, Encoding, has_template
from weft.data.records import Record
from weft.data.template_bounds import RenderLimitError
from weft.engine.batch.document import Document
from weft.errors import UserError, first_line
from weft.files import read_object
from weft.models import hf

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_LOOKED_AT = 1000  # number of documents, spread over the data, that are searched for trained ends

_TEXT = "weft-answer"
_USER, _ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": _TEXT}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def _call(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_RESULT = {"role": "tool", "content": "result", "name": "f", "tool_call_id": "abcdefghi"}
# Conversations whose trained answer ends a generation. An answer in the middle will not do: gpt-oss ends it with the
# token that also ends a thought.
_EXAMPLES = (
    ChatInput([_USER, _ANSWER], None, {}, (1,)),
    ChatInput([_USER, _call({})], [_TOOL], {}, (1,)),
    ChatInput([_USER, _call({}), _RESULT], [_TOOL], {}, (1,)),
    ChatInput([_USER, _call("{}")], [_TOOL], {}, (1,)),  # some templates read only text
    ChatInput([_USER, _call("{}"), _RESULT], [_TOOL], {}, (1,)),
)


@dataclass(frozen=True, slots=True)
class AnswerEnds:
    """Ids of the tokens that end answers. configured: from the model's files. taught: further tokens with which the
    chat template ends answers. shown: the taught tokens as text."""

    configured: tuple[int, ...]
    taught: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        """All ids, sorted."""
        return sorted({*self.configured, *self.taught})

    def lines(self) -> list[str]:
        """For the startup output: the ends that the model's files lack."""
        if not self.taught:
            return []
        names = ", ".join(self.shown)
        return [f"ends     answers also end with {names}: every checkpoint lists it in {GENERATION}, for servers"]

    def files(self, path: str) -> dict[str, str]:
        """{generation_config.json: its text} for checkpoints of the model at `path`: the model's file with the taught
        ends added. Empty if it already names all of them, and then the model's file is copied."""
        folder = hf.source_folder(path)
        own_file = folder / GENERATION if folder is not None else None
        if own_file is not None and own_file.is_file():
            content = read_object(own_file, "the config of generation")
        else:  # without this file, transformers derives one from config.json
            text = hf.read_config(path).get_text_config()
            content = {name: value for name in _IDS if (value := getattr(text, name, None)) is not None}
        named = _listed(content.get("eos_token_id")) or list(self.configured)
        missing = [token for token in self.taught if token not in named]
        if not missing:
            return {}
        return {GENERATION: json.dumps({**content, "eos_token_id": [*named, *missing]}, indent=2) + "\n"}


NO_ENDS = AnswerEnds(())


def answer_ends(path: str, tokenizer: PreTrainedTokenizerBase, taught: Sequence[int] = ()) -> AnswerEnds:
    """The ends of answers of the model at `path`. taught: ids of tokens that end answers in its data."""
    configured = configured_ends(path, tokenizer)
    new_ends = tuple(token for token in taught if token not in configured)
    return AnswerEnds(
        tuple(configured), new_ends, tuple(str(tokenizer.convert_ids_to_tokens(token)) for token in new_ends)
    )


def configured_ends(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer according to generation_config.json, config.json and the tokenizer; sorted."""
    source = str(hf.source_folder(path) or path)
    named = [getattr(hf.read_config(path).get_text_config(), "eos_token_id", None), tokenizer.eos_token_id]
    try:
        named.append(GenerationConfig.from_pretrained(source).eos_token_id)
    except OSError:  # some models lack the file
        pass
    except Exception as error:
        raise UserError(f"model.path: {source}: {GENERATION} cannot be read: {first_line(error)}.") from error
    return sorted({token for ids in named for token in _listed(ids)})


def template_ends(tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None = None) -> list[int]:
    """Ids of the tokens with which the chat template ends answers, including answers with tool calls: the last trained
    tokens of example conversations. Empty without a template, or if it spells the end as text."""
    encoding = replace(encoding or Encoding(), train_on="answers")
    if not has_template(tokenizer, encoding):
        return []
    encoder = Encoder(tokenizer, encoding)
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    ends: list[int] = []
    for chat in _EXAMPLES:
        try:
            answers = encoder.masks_of(Record("an example", "messages", {}), chat)
            masked = answers.find(chat, encoding.template_kwargs)
        except (
            UserError,
            RenderError,
            AmbiguousAnswerError,
            RenderLimitError,
        ):  # no template supports all examples
            continue
        for start, end in masked.spans[-1:]:
            text = masked.text[start:end].rstrip()
            _, is_text, after_text = text.rpartition(_TEXT)
            tokens = encoder.plain([after_text.lstrip() if is_text else text])[0]
            ends += [token for token in (tokens[:1] if is_text else tokens[-1:]) if token in added]
    return list(dict.fromkeys(ends))


def taught_ends(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None = None
) -> list[int]:
    """Ids of the added tokens that training documents teach as the end of an answer: the template's ends, if any
    document trains one; else the trained tokens that are last in a document and never followed by a trained token (for
    chats that were tokenised elsewhere)."""
    trained, last, inside = set[int](), set[int](), set[int]()
    for index in np.linspace(0, len(documents) - 1, min(len(documents), _LOOKED_AT)).astype(int) if documents else ():
        document = documents[int(index)]
        positions = document.weights.nonzero()[:, 0]
        if len(positions):
            tokens = document.tokens[positions]
            trained.update(tokens.unique().tolist())
            last.add(int(tokens[-1]))
            inside.update(tokens[:-1][positions[1:] == positions[:-1] + 1].unique().tolist())
    by_template = [token for token in template_ends(tokenizer, encoding) if token in trained]
    return by_template or sorted((last & set(tokenizer.added_tokens_decoder)) - inside)


def _listed(ids: int | Sequence[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else [int(token) for token in ids]
