"""What is trained of a conversation, for published chat templates, against texts written by hand.

The templates are as they were published (tests/templates/README.md); the tokenizers have their added tokens, and one
token for every other byte, so that a trained text is exactly what the trained tokens decode to.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.toy_tokenizers import TEMPLATES as TEMPLATE_FOLDER
from tests.support.toy_tokenizers import family_tokenizer
from weft.data.chat_template import Span
from weft.data.conversation import conversation
from weft.data.encode import Encoder, Encoding, _trained_tokens
from weft.data.loss_mask import MaskedText, MasksByComparison
from weft.data.messages import ContentParts
from weft.data.records import Record
from weft.errors import UserError

# template -> family of tokenizers
TEMPLATES = {
    "qwen2_5": "qwen",
    "qwen3": "qwen",
    "qwen3_instruct_2507": "qwen",
    "qwen3_5_think": "qwen",
    "qwen3_5_nothink": "qwen",
    "llama3": "llama",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "gemma3": "gemma",
    "gptoss": "gptoss",
    "glm4moe": "glm",
    "deepseekv3": "deepseek",
    "phi3": "phi",
    "phi3_5": "phi",
    "phi4": "phi4",
    "mistral_nemo": "mistral",
    "mistral_small_3_2": "mistral",
}

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


CALL = answer("", tool_calls=[{"id": "call00001", "function": {"name": "get_time", "arguments": {"city": "Rome"}}}])
RESULT = {"role": "tool", "name": "get_time", "tool_call_id": "call00001", "content": "12:00"}

CHATS: dict[str, dict[str, Any]] = {
    "single": {"messages": [user("Hi"), answer("Hello.")]},
    "multi": {"messages": [user("1?"), answer("One."), user("2?"), answer("Two.")]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user("Hi"), answer("Hello.")]},
    "flags": {"messages": [user("1?"), answer("One.", train=False), user("2?"), answer("Two.", train=True)]},
    "thinking": {
        "messages": [
            user("2+2?"),
            answer("4", reasoning_content="Easy."),
            user("2+3?"),
            answer("5", reasoning_content="Hm."),
        ]
    },
    "tools": {"messages": [user("Time in Rome?"), CALL, RESULT, answer("Noon.")], "tools": [TOOL]},
    "calls": {"messages": [user("Time in Rome?"), CALL, RESULT, answer("Noon.")]},
    "no-think": {
        "messages": [user("1?"), answer("One."), user("2?"), answer("Two.")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}

_QWEN_CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
_QWEN_35_CALL = "<tool_call>\n<function=get_time>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
_GLM_CALL = "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
_EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_DEEPSEEK_CALL = (  # this template writes no list of tools
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>"
    'get_time\n```json\n{"city": "Rome"}\n```'
    "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
)


def plain(end: str) -> dict[str, list[str]]:
    """What templates train that write an answer as it is, and the token that ends it."""
    return {
        "single": [f"Hello.{end}"],
        "multi": [f"One.{end}", f"Two.{end}"],
        "system": [f"Hello.{end}"],
        "flags": [f"Two.{end}"],
    }


_LLAMA_TOOLS = ['{"name": "get_time", "parameters": {"city": "Rome"}}<|eot_id|>', "Noon.<|eot_id|>"]

# (template, chat) -> the trained texts, one for each answer; a chat that is not here is refused.
EXPECTED: dict[str, dict[str, list[str]]] = {
    "qwen2_5": {**plain("<|im_end|>"), "tools": [f"{_QWEN_CALL}<|im_end|>", "Noon.<|im_end|>"]},
    "qwen3_instruct_2507": {**plain("<|im_end|>"), "tools": [f"{_QWEN_CALL}<|im_end|>", "Noon.<|im_end|>"]},
    # Only the last turn has its thoughts. Asked without enable_thinking, the model itself writes the empty ones.
    "qwen3": {
        "single": ["<think>\n\n</think>\n\nHello.<|im_end|>"],
        "multi": ["One.<|im_end|>", "<think>\n\n</think>\n\nTwo.<|im_end|>"],
        "system": ["<think>\n\n</think>\n\nHello.<|im_end|>"],
        "flags": ["<think>\n\n</think>\n\nTwo.<|im_end|>"],
        "thinking": ["4<|im_end|>", "<think>\nHm.\n</think>\n\n5<|im_end|>"],
        "tools": [f"{_QWEN_CALL}<|im_end|>", "<think>\n\n</think>\n\nNoon.<|im_end|>"],
        "no-think": ["One.<|im_end|>", "Two.<|im_end|>"],
    },
    # The generation prompt opens the thoughts.
    "qwen3_5_think": {
        "single": ["\n</think>\n\nHello.<|im_end|>"],
        "multi": ["One.<|im_end|>", "\n</think>\n\nTwo.<|im_end|>"],
        "system": ["\n</think>\n\nHello.<|im_end|>"],
        "flags": ["\n</think>\n\nTwo.<|im_end|>"],
        "thinking": ["4<|im_end|>", "Hm.\n</think>\n\n5<|im_end|>"],
        "tools": [f"\n</think>\n\n{_QWEN_35_CALL}<|im_end|>", "\n</think>\n\nNoon.<|im_end|>"],
        "no-think": ["One.<|im_end|>", "Two.<|im_end|>"],
    },
    # The generation prompt opens and closes them.
    "qwen3_5_nothink": {
        **plain("<|im_end|>"),
        "thinking": ["4<|im_end|>", "<think>\nHm.\n</think>\n\n5<|im_end|>"],
        "tools": [f"{_QWEN_35_CALL}<|im_end|>", "Noon.<|im_end|>"],
        "no-think": ["One.<|im_end|>", "Two.<|im_end|>"],
    },
    "llama3": plain("<|eot_id|>"),
    "llama3_1": {**plain("<|eot_id|>"), "tools": _LLAMA_TOOLS},
    "llama3_2": {**plain("<|eot_id|>"), "tools": _LLAMA_TOOLS},
    "gemma3": plain("<end_of_turn>"),
    # The model writes its channels, and so the header of its second message. Only the last answer ends the turn.
    "gptoss": {
        "single": ["<|channel|>final<|message|>Hello.<|return|>"],
        "multi": ["<|channel|>final<|message|>One.<|end|>", "<|channel|>final<|message|>Two.<|return|>"],
        "system": ["<|channel|>final<|message|>Hello.<|return|>"],
        "flags": ["<|channel|>final<|message|>Two.<|return|>"],
        "thinking": [
            "<|channel|>final<|message|>4<|end|>",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>",
        ],
        "tools": [
            ' to=functions.get_time<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
            "<|channel|>final<|message|>Noon.<|return|>",
        ],
    },
    # The role that comes next ends a turn; <|user|> behind the last is added.
    "glm4moe": {
        "single": ["\n<think></think>\nHello.<|user|>"],
        "multi": ["\n<think></think>\nOne.<|user|>", "\n<think></think>\nTwo.<|user|>"],
        "system": ["\n<think></think>\nHello.<|user|>"],
        "flags": ["\n<think></think>\nTwo.<|user|>"],
        "thinking": ["\n<think></think>\n4<|user|>", "\n<think>Hm.</think>\n5<|user|>"],
        "tools": [f"\n<think></think>\n{_GLM_CALL}<|observation|>", "\n<think></think>\nNoon.<|user|>"],
        "no-think": ["\nOne.<|user|>", "\nTwo.<|user|>"],
    },
    "deepseekv3": {**plain(_EOS), "calls": [f"{_DEEPSEEK_CALL}{_EOS}", f"Noon.{_EOS}"]},
    "phi3": plain("<|end|>"),
    "phi3_5": plain("<|end|>"),
    # These have no generation prompt: it is the end of the question.
    "phi4": plain("<|im_end|>"),
    "mistral_nemo": {  # it writes a system message before the last question, and only where nothing follows
        **{chat: texts for chat, texts in plain("</s>").items() if chat != "system"},
        "tools": [
            '[TOOL_CALLS][{"name": "get_time", "arguments": {"city": "Rome"}, "id": "call00001"}]</s>',
            "Noon.</s>",
        ],
    },
    "mistral_small_3_2": {
        **plain("</s>"),
        "tools": ['[TOOL_CALLS]get_time[CALL_ID]call00001[ARGS]{"city": "Rome"}</s>', "Noon.</s>"],
    },
}
for texts in EXPECTED.values():
    if "tools" in texts:
        texts["calls"] = texts["tools"]
CASES = [(template, chat) for template in TEMPLATES for chat in CHATS]
REFUSED = [(template, chat) for template, chat in CASES if chat not in (*EXPECTED[template], "no-think")]


@cache
def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    return family_tokenizer(TEMPLATES[template], template)


@cache
def encoder_of(template: str, train_on: Any = "answers") -> Encoder:
    return Encoder(tokenizer_of(template), Encoding(train_on=train_on))


def record(value: dict[str, Any]) -> Record:
    return Record("data.jsonl:1", "messages" if "messages" in value else "prompt", value)


def trained(encoder: Encoder, value: dict[str, Any]) -> list[str]:
    """The texts of the trained runs of tokens."""
    [encoded] = encoder.encode([record(value)])
    pairs = zip(encoded.trained, encoded.ids, strict=True)
    return [
        encoder.tokenizer.decode([token for _, token in run])
        for weight, run in itertools.groupby(pairs, key=lambda pair: pair[0])
        if weight
    ]


@pytest.mark.parametrize(("template", "chat"), [case for case in CASES if case[1] in EXPECTED[case[0]]])
def test_the_answer_and_its_end_of_turn_are_trained(template: str, chat: str) -> None:
    assert trained(encoder_of(template), CHATS[chat]) == EXPECTED[template][chat]


@pytest.mark.parametrize(("template", "chat"), REFUSED)
def test_what_a_template_would_drop_is_refused(template: str, chat: str) -> None:
    with pytest.raises(UserError, match="data.jsonl:1.*(which the chat template does not render|does not render the)"):
        trained(encoder_of(template), CHATS[chat])


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_what_transformers_renders(template: str) -> None:
    tokenizer = tokenizer_of(template)
    for name in {"multi", "system"} & set(EXPECTED[template]):
        messages = CHATS[name]["messages"]
        [encoded] = encoder_of(template).encode([record(CHATS[name])])
        ids = tokenizer.apply_chat_template(messages)["input_ids"]
        added = tokenizer.convert_tokens_to_ids(["<|user|>"]) if template == "glm4moe" else []
        assert encoded.ids == ids + added


# What no comparison of texts can tell: a call ends with <|call|>, which no answer does; a thought, where the generation
# prompt has an empty one.
_BEYOND_COMPARISON = [("gptoss", "tools"), ("gptoss", "calls"), ("qwen3_5_nothink", "thinking")]


@pytest.mark.parametrize(
    ("template", "chat"),
    [case for case in CASES if case[1] in EXPECTED[case[0]] and case not in _BEYOND_COMPARISON],
)
def test_comparing_renderings_finds_the_same(template: str, chat: str) -> None:
    """The way out for templates whose loops say nothing: no notes, only texts."""
    encoder, value = encoder_of(template), CHATS[chat]
    chat_ = conversation(record(value), "answers", text_arguments=template == "deepseekv3")
    answers = encoder.masks_of(record(value), chat_)
    text, spans = MasksByComparison(answers.template, answers.specials, answers.added, chat_, chat_.kwargs).find()
    assert [text[start:end] for start, end in spans] == EXPECTED[template][chat]


# What TRL trains beyond an answer and its end of turn: (text, what is left). Why: docs/reference/chat-templates.md.
_TRL_TRAINS_MORE = {
    "qwen2_5": (r"\A\n|\n\Z", ""),  # the end of the header, and the line break behind the turn
    "qwen3_instruct_2507": (r"\n\Z", ""),
    "gemma3": (r"\n\Z", ""),
    "phi3": (r"\n(<.endoftext.>)?\Z", ""),
    "phi3_5": (r"\n(<.endoftext.>)?\Z", ""),
    "gptoss": (r"\A<.start.>assistant", ""),
    "deepseekv3": (r"\A<\uff5c(Assistant|tool\u2581outputs\u2581end)\uff5c>", ""),
    # Its template has a thought in every turn; ours are as the model's own template writes them.
    "qwen3": (r"\A<think>\n.*</think>\n\n|\n\Z", ""),
    "qwen3_5_think": (r"\A(<think>\n.*|Hm\.|)\n</think>\n\n|\n\Z", ""),
    "qwen3_5_nothink": (r"\A<think>\n.*</think>\n\n|\n\Z", ""),
    "llama3": (r"(?!)", ""),
    "glm4moe": (r"\A\n<think></think>(?=\n(One|Two))", ""),  # with enable_thinking: false, the generation prompt has it
}
TRL_MASKS = json.loads((TEMPLATE_FOLDER / "trl_masks.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("template", "chat"), [(template, chat) for template in TRL_MASKS for chat in TRL_MASKS[template]]
)
def test_trl_trains_the_same_answers(template: str, chat: str) -> None:
    pattern, replacement = _TRL_TRAINS_MORE[template]
    actual, expected = (
        [re.sub(pattern, replacement, text, flags=re.DOTALL) for text in texts]
        for texts in (EXPECTED[template][chat], TRL_MASKS[template][chat])
    )
    assert actual == expected


@pytest.mark.covers("data.train_on")
def test_train_on() -> None:
    last = encoder_of("qwen2_5", "last")
    assert trained(last, CHATS["multi"]) == ["Two.<|im_end|>"]
    assert trained(last, CHATS["flags"]) == ["Two.<|im_end|>"]
    all_roles = encoder_of("qwen2_5", "all")
    [text] = trained(all_roles, CHATS["system"])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
    )
    assert trained(all_roles, {"prompt": "a", "completion": "b"}) == ["ab<|im_end|>"]
    assert trained(last, {"prompt": "a", "completion": "b"}) == ["b<|im_end|>"]
    split = {"prompt": CHATS["multi"]["messages"][:3], "completion": [answer("Two.")]}
    assert (
        trained(encoder_of("qwen2_5"), split) == trained(last, split) == ["Two.<|im_end|>"]
    )  # not the prompt's answer
    with pytest.raises(UserError, match="message 2 has `train: false`, but data.train_on: all"):
        trained(all_roles, CHATS["flags"])


class Straddling:
    """A tokenizers.Encoding whose tokens end at these characters, in the middle of an answer or not."""

    def __init__(self, *ends: int) -> None:
        self.spans = list(pairwise([0, *ends]))

    def __len__(self) -> int:
        return len(self.spans)

    def char_to_token(self, position: int) -> int | None:
        return next((i for i, (start, end) in enumerate(self.spans) if start <= position < end), None)

    def token_to_chars(self, token: int) -> tuple[int, int]:
        return self.spans[token]


@pytest.mark.parametrize(
    ("ends", "span", "mask"),
    [
        ((3, 6, 9), (3, 6), [0, 1, 0]),
        ((3, 7, 9), (3, 6), [0, 1, 0]),  # its last token holds a character behind it
        ((2, 5, 7, 9), (3, 6), [0, 1, 1, 0]),  # and so does its first, before it
        ((9,), (3, 6), [1]),
        ((3, 6, 9), (3, 9), [0, 1, 1]),
    ],
)
def test_a_token_that_has_a_trained_character_is_trained(ends: tuple[int, ...], span: Span, mask: list[int]) -> None:
    assert _trained_tokens(Straddling(*ends), MaskedText("x" * 9, (span,))) == mask


def test_messages_without_content_and_with_parts_are_made_whole_for_templates() -> None:
    call = {"function": {"name": "now", "arguments": "{}"}}
    raw = [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "time?"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": [], "reasoning_content": None},
    ]
    question, called, empty = conversation(Record("a.jsonl:1", "messages", {"messages": raw}), "answers").messages
    assert isinstance(question["content"], ContentParts) and str(question["content"]) == "What time?"
    assert called["content"] == "" and called["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
    assert empty == {"role": "assistant", "content": ""}
