"""Tokenizers so small that a reader can tokenise by hand: one token is one byte, except where a test adds a merge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<|start|>", "<|end|>")

# The end-of-turn token is trained, the line break behind it is not. (A bare line break behind a tag would be dropped.)
CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|end|>{{ '\n' }}{% endif %}"
    "{% endfor %}"
)
# Here the line break is trained too, so that the trained part ends with a space character.
CHATML_WITH_BREAK = CHATML.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")


def byte_tokenizer(
    template: str | None = CHATML,
    *,
    merges: Sequence[tuple[str, str]] = (),
    bos: bool = False,
    trim_offsets: bool = False,
    eos: str | None = "</s>",
) -> PreTrainedTokenizerFast:
    """Byte-level BPE. bos: it puts <s> before a text. trim_offsets: offsets leave out spaces, as Llama 3's do."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    steps: list[Any] = [processors.ByteLevel(trim_offsets=True)] if trim_offsets else []
    if bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]))
    if steps:
        backend.post_processor = processors.Sequence(steps)
    return _wrap(backend, template, eos)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a space is U+2581, and one is put before each text, as Llama 2's does."""
    letters = "\u2581\nabcdefghijklmnopqrstuvwxyz0123456789:"
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate((*SPECIAL, *letters))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return _wrap(backend, None, "</s>")


def lossy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter; white space is thrown away, as BERT's does."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate((*SPECIAL, *letters))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(backend, CHATML, "</s>")


def _wrap(backend: Tokenizer, template: str | None, eos: str | None) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token=eos)
    fast.chat_template = template
    return fast


def write_jsonl(path: Path, *values: Any) -> str:
    """Writes one line for each value, a string as it is, and returns the path."""
    lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
