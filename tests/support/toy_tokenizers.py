"""Tokenizers so small that a reader can tokenise by hand: one token is one byte, except where a test adds a merge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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


TEMPLATES = Path(__file__).parents[1] / "templates"


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer adds to its vocabulary: special tokens, and others that decoding shows."""

    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None


_QWEN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_GLM_TAGS = (*_QWEN_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _deepseek(*names: str) -> tuple[str, ...]:
    return tuple(f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>" for name in names)


_DEEPSEEK_TAGS = ("<think>", "</think>", *_deepseek(
    "User", "Assistant", "tool sep", "tool calls begin", "tool calls end", "tool call begin", "tool call end",
    "tool outputs begin", "tool outputs end", "tool output begin", "tool output end"),
)  # fmt: skip
_BOS, _EOS = _deepseek("begin of sentence", "end of sentence")
FAMILIES = {
    "qwen": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), _QWEN_TAGS, eos="<|im_end|>"),
    "llama": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        bos="<|begin_of_text|>", eos="<|eot_id|>",
    ),
    "gemma": Family(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<eos>"),
    "gptoss": Family(
        ("<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        eos="<|return|>",
    ),
    "glm": Family(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), _GLM_TAGS,
        eos="<|endoftext|>",
    ),
    "deepseek": Family((_BOS, _EOS), _DEEPSEEK_TAGS, bos=_BOS, eos=_EOS),
    "phi": Family(("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), eos="<|endoftext|>"),
    "phi4": Family(("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), eos="<|im_end|>"),
    "mistral": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]",
         "[TOOL_CONTENT]"),
        bos="<s>", eos="</s>",
    ),
}  # fmt: skip


def family_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte by byte, with the family's added tokens and a template of tests/templates."""
    family_tokens = FAMILIES[family]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family_tokens.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family_tokens.added])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=family_tokens.bos, eos_token=family_tokens.eos)
    fast.chat_template = None if template is None else (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return fast


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
