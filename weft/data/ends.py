"""The tokens that end an answer. Files of a base model name only the end of a document, and a chat template ends turns
with another token: whatever generates (rollout engines, eval.prompts, `weft chat`, servers of a checkpoint) has to stop
at both.

The tokenizer's eos_token is never changed. It ends documents that are no chats, and templates write it, so that a later
run on the checkpoint would render chats and end texts otherwise. transformers, vLLM and SGLang read the list in
generation_config.json, so a checkpoint lists them there.
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
_LOOKED_AT = 1000  # documents, over all of the data, that tell which ends are trained

_TEXT = "weft-answer"
_USER, _ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": _TEXT}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def _call(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_RESULT = {"role": "tool", "content": "result", "name": "f", "tool_call_id": "abcdefghi"}
# Conversations whose trained answer ends a generation. An answer in the middle does not do: gpt-oss ends it with the
# token that ends a thought, too.
_EXAMPLES = (
    ChatInput([_USER, _ANSWER], None, {}, (1,)),
    ChatInput([_USER, _call({})], [_TOOL], {}, (1,)),
    ChatInput([_USER, _call({}), _RESULT], [_TOOL], {}, (1,)),
    ChatInput([_USER, _call("{}")], [_TOOL], {}, (1,)),  # some templates read text alone
    ChatInput([_USER, _call("{}"), _RESULT], [_TOOL], {}, (1,)),
)


@dataclass(frozen=True, slots=True)
class AnswerEnds:
    """Ids of the tokens that end answers. configured: according to the model's files. taught: further ones, with which
    the chat template ends answers. shown: the taught ones as text."""

    configured: tuple[int, ...]
    taught: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        """All of them, sorted."""
        return sorted({*self.configured, *self.taught})

    def lines(self) -> list[str]:
        """For the opening of a run: the ends that the model's files lack."""
        if not self.taught:
            return []
        names = ", ".join(self.shown)
        return [f"ends     answers end with {names}, too: it goes into {GENERATION} of every checkpoint, for servers"]

    def files(self, path: str) -> dict[str, str]:
        """{generation_config.json: its text} for checkpoints of the model at `path`: its own, with the taught ends.
        Empty if it names them all: the model's own file is copied then."""
        folder = hf.source_folder(path)
        own_file = folder / GENERATION if folder is not None else None
        if own_file is not None and own_file.is_file():
            content = read_object(own_file, "the config of generation")
        else:  # transformers makes one of config.json, unless there is the file
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
    except OSError:  # not every model has the file
        pass
    except Exception as error:
        raise UserError(f"model.path: {source}: {GENERATION} cannot be read: {first_line(error)}.") from error
    return sorted({token for ids in named for token in _listed(ids)})


def template_ends(tokenizer: PreTrainedTokenizerBase, encoding: Encoding | None = None) -> list[int]:
    """Ids of the tokens with which the chat template ends answers, also answers with tool calls: the last tokens that
    are trained of example conversations. Empty without a template, and where it spells the end as text."""
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
        ):  # no template has all that the examples have
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
    """Ids of the added tokens that training documents teach as the end of an answer: the template's, if one of them is
    trained in any document; else those that come last in a document and before no trained token (chats that were
    tokenised by someone else)."""
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
