"""Templates of every shape: from files, with loops that say nothing, with answers where they do not belong."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_masks import CALL, CHATS, RESULT, TOOL, answer, record, tokenizer_of, trained, user
from tests.support.toy_tokenizers import CHATML, byte_tokenizer, family_tokenizer
from weft.config.schema import DataConfig
from weft.data.chat_template import ChatTemplate, Span
from weft.data.encode import Encoder, Encoding, read_encoding
from weft.errors import UserError
from weft.models import hf_template

TURN = "'<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n'"
PLAIN = "{% for m in messages %}{{ " + TURN + " }}{% endfor %}"
ASKING = "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"


def encoder(template: str, **options: Any) -> Encoder:
    return Encoder(byte_tokenizer(template), Encoding(**options))


MULTI = CHATS["multi"]


@pytest.mark.parametrize(
    "template",
    [
        PLAIN + ASKING,
        "{% for m in messages %}{% if true %}{{ " + TURN + " }}{% endif %}{% endfor %}" + ASKING,
        # messages by number, by a macro, from another list, in a captured block: nothing says whose text it is
        "{% for i in range(messages|length) %}{% set m = messages[i] %}{{ " + TURN + " }}{% endfor %}" + ASKING,
        "{% macro all(list) %}{% for m in list %}{{ "
        + TURN
        + " }}{% endfor %}{% endmacro %}{{ all(messages) }}"
        + ASKING,
        "{% set text %}" + PLAIN + "{% endset %}{{ text }}" + ASKING,
        # text before, between and behind; a loop that only looks; an answer told by its place
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% endif %}{% endfor %}" + PLAIN + ASKING,
        "{% for m in messages %}{% for other in messages[loop.index:] %}{% if other %}{% endif %}{% endfor %}{{ "
        + TURN
        + " }}{% endfor %}"
        + ASKING,
        CHATML,
    ],
)
def test_loops_of_every_kind(template: str) -> None:
    assert trained(encoder(template), MULTI) == ["One.<|end|>", "Two.<|end|>"]


# Shaped as Gemma 4's and DiffusionGemma's: a call is followed by the results of its tools, and the answer goes on in
# the same turn. CALLS, RESULTS, TEXT and END stand for their pieces, so that markers may go around any of them.
_ONE_TURN = (
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if not (m.role == 'assistant' and loop.index0 and messages[loop.index0 - 1].role == 'tool') %}"
    "{{ '<|start|>' + m.role + '\n' }}{% endif %}"
    "CALLS_TEXT_{% if not m.tool_calls %}END_{% endif %}RESULTS_{% endif %}{% endfor %}" + ASKING
)
_PIECES = {
    "CALLS_": (
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + (c.function.arguments.values() | join) + "
        "'</call>' }}{% endfor %}"
    ),
    "TEXT_": "{{ m.content }}",
    "END_": "{{ '<|end|>' }}",
    "RESULTS_": (
        "{% if m.tool_calls %}{% for k in range(loop.index0 + 1, messages | length) %}"
        "{% if messages[k].role == 'tool' %}{{ '<result>' + messages[k].content + '</result>' }}{% endif %}"
        "{% endfor %}{% endif %}"
    ),
}


def one_turn(*marked: str) -> str:
    """The template with generation markers around these pieces."""
    source = _ONE_TURN
    for name, piece in _PIECES.items():
        inside = f"{{% generation %}}{piece}{{% endgeneration %}}" if name in marked else piece
        chosen = (
            f"{{% if m.role == 'assistant' %}}{inside}{{% else %}}{piece}{{% endif %}}" if name in marked else piece
        )
        source = source.replace(name, chosen)
    return source


def test_a_tools_result_that_the_template_writes_into_a_turn_is_left_out_by_markers() -> None:
    chat = {"messages": [user("Time?"), CALL, RESULT, answer("Noon."), user("Thanks"), answer("Yes.")]}
    marked = encoder(one_turn("CALLS_", "TEXT_", "END_"))
    assert "".join(trained(marked, chat)) == "<call>get_timeRome</call>Noon.<|end|>Yes.<|end|>"
    two_results = {"messages": [user("Time?"), CALL, RESULT, {**RESULT, "content": "13:00"}, answer("Noon.")]}
    assert "".join(trained(marked, two_results)) == "<call>get_timeRome</call>Noon.<|end|>"
    for template in (one_turn(), one_turn("CALLS_", "TEXT_", "END_", "RESULTS_")):
        with pytest.raises(UserError, match=r"the template writes message 3 into an answer|does not (begin|end) like"):
            trained(encoder(template), chat)


# They read content as a list of parts and of a text nothing, as those of SmolVLM and Idefics3, and of LLaVA-NeXT, do.
_OF_PARTS = (
    "{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_OF_LINES = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ '\n' + part.text }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(("template", "begin", "join"), [(_OF_PARTS, " ", ""), (_OF_LINES, "\n", "\n")])
def test_templates_that_read_lists_of_parts(template: str, begin: str, join: str) -> None:
    """Texts become the lists that these templates want; lists are rendered as transformers renders them."""
    texts = [user("1?"), answer("One."), user("2?"), answer("Two.")]
    assert trained(encoder(template), {"messages": texts}) == [f"{begin}One.<|end|>", f"{begin}Two.<|end|>"]
    lists = [{**m, "content": parts(m["content"])} for m in texts]
    lists[0]["content"], lists[3]["content"] = parts("1", "?"), parts("Tw", "o.")
    assert trained(encoder(template), {"messages": lists}) == [f"{begin}One.<|end|>", f"{begin}Tw{join}o.<|end|>"]
    [encoded] = encoder(template).encode([record({"messages": lists})])
    expected = byte_tokenizer(template).apply_chat_template(lists, tokenize=False)
    assert byte_tokenizer(template).decode(encoded.ids) == expected


def test_templates_that_read_texts_alone_get_parts_joined() -> None:
    chat = {"messages": [{"role": "user", "content": parts("1", "?")}, answer("One."), user("2?"), answer("Two.")]}
    [encoded] = encoder(PLAIN + ASKING).encode([record(chat)])
    assert byte_tokenizer(PLAIN).decode(encoded.ids).startswith("<|start|>user\n1?<|end|>")


def test_an_answer_like_another_text() -> None:
    """Found by its place, not by its words."""
    same = {"messages": [user("<|start|>assistant\nOne.<|end|>"), answer("One."), user("One."), answer("One.")]}
    assert trained(encoder(PLAIN + ASKING), same) == ["One.<|end|>", "One.<|end|>"]
    assert trained(Encoder(tokenizer_of("qwen3")), same) == ["One.<|im_end|>", "<think>\n\n</think>\n\nOne.<|im_end|>"]


@pytest.mark.parametrize("text", ["  spaced\n", "<think>\nwhy\n</think>\n\nyes", "<", "\U0001f642", "<|im_end|>", ""])
def test_answers_that_templates_trim_or_cut(text: str) -> None:
    chat = {"messages": [user("1?"), answer(text), user("2?"), answer("Two.")]}
    cut = text.rpartition("</think>\n\n")[2]
    assert trained(Encoder(tokenizer_of("qwen3")), chat)[0] == f"{cut}<|im_end|>"
    assert trained(Encoder(tokenizer_of("qwen2_5")), chat)[0] == f"{text}<|im_end|>"
    assert trained(Encoder(tokenizer_of("llama3")), chat)[0] == f"{text.strip()}<|eot_id|>"


def test_header_is_what_the_template_writes_and_no_more() -> None:
    """The generation prompt ends with <think>, and an answer that begins with < is not part of it."""
    chat = {"messages": [user("1?"), answer("<b>One.</b>"), user("2?"), answer("Two.")]}
    assert trained(Encoder(tokenizer_of("qwen3_5_think")), chat) == [
        "<b>One.</b><|im_end|>",
        "\n</think>\n\nTwo.<|im_end|>",
    ]


def test_prompts_and_completions_of_messages() -> None:
    qwen = Encoder(tokenizer_of("qwen2_5"))
    prompt, completion = [user("1?"), answer("One."), user("2?")], [answer("Two.")]
    for form in (completion, completion[0], "Two."):
        assert trained(qwen, {"prompt": prompt, "completion": form}) == ["Two.<|im_end|>"]
    with_call = {"prompt": [user("Time?")], "completion": [CALL, RESULT, answer("Noon.", train=False)], "tools": [TOOL]}
    [call] = trained(qwen, with_call)
    assert call.startswith("<tool_call>") and call.endswith("</tool_call><|im_end|>")


def test_contents_in_every_form() -> None:
    """Text parts, arguments as JSON text, tools as JSON text, null keys of tables."""
    parts = [{"type": "text", "text": "Time "}, {"type": "text", "text": "in Rome?"}]
    call = {"function": {"name": "get_time", "arguments": '{"city": "Rome"}'}, "id": "call00001", "extra": None}
    forms = {
        "messages": [
            {"role": "user", "content": parts, "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "train": None},
            RESULT,
            {"role": "assistant", "content": [{"type": "text", "text": "Noon."}], "tool_calls": []},
        ],
        "tools": json.dumps([TOOL]),
    }
    for template in ("qwen3", "llama3_1", "glm4moe", "gptoss", "mistral_nemo"):
        used = Encoder(tokenizer_of(template))
        assert used.encode([record(forms)]) == used.encode([record(CHATS["tools"])])


@pytest.mark.covers("data.chat_template")
def test_a_template_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(PLAIN + ASKING)
    tokenizer = byte_tokenizer(None)
    encoding = read_encoding(DataConfig(path="", chat_template=str(tmp_path / "own.jinja")), tokenizer)
    assert trained(Encoder(tokenizer, encoding), MULTI) == ["One.<|end|>", "Two.<|end|>"]
    qwen = family_tokenizer("qwen")
    chatml = read_encoding(DataConfig(path="", chat_template="chatml"), qwen)
    assert trained(Encoder(qwen, chatml), MULTI) == ["One.<|im_end|>", "Two.<|im_end|>"]
    for name, words in (
        ("none", ["neither a file none", "chatml"]),
        (str(tmp_path), ["cannot read"]),
        ("chatml", ["spell it"]),
    ):
        with pytest.raises(UserError) as error:
            read_encoding(DataConfig(path="", chat_template=name), tokenizer)
        assert all(word in str(error.value) for word in ("data.chat_template", *words))
    (tmp_path / "own.jinja").write_text("\n{% for %}")
    with pytest.raises(UserError, match="own.jinja:2 is not valid Jinja"):
        read_encoding(DataConfig(path="", chat_template=str(tmp_path / "own.jinja")), tokenizer)


@pytest.mark.covers("data.template_kwargs")
def test_kwargs_of_the_config_and_of_a_document() -> None:
    thinking = [user("1?"), answer("One.")]
    without = Encoder(tokenizer_of("qwen3"), Encoding(template_kwargs={"enable_thinking": False}))
    assert trained(without, {"messages": thinking}) == ["One.<|im_end|>"]
    back = {"messages": thinking, "chat_template_kwargs": {"enable_thinking": True}}
    assert trained(without, back) == ["<think>\n\n</think>\n\nOne.<|im_end|>"]


@pytest.mark.covers("data.template_date")
@pytest.mark.parametrize("template", ["gptoss", "llama3_2", "mistral_small_3_2"])
def test_the_day_that_templates_write(template: str) -> None:
    tokenizer, chat = tokenizer_of(template), record(CHATS["single"])
    dated = read_encoding(DataConfig(path="", template_date="2025-03-04"), tokenizer)
    [encoded] = Encoder(tokenizer, dated).encode([chat])
    text = tokenizer.decode(encoded.ids)
    assert "2025-03-04" in text or "04 Mar 2025" in text
    [today] = Encoder(tokenizer).encode([chat])
    assert str(datetime.date.today().year) in tokenizer.decode(today.ids)


def test_a_day_is_asked_for_only_where_it_is_written() -> None:
    assert read_encoding(DataConfig(path="", template_date="2025-03-04"), tokenizer_of("qwen3")).date is None


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        ("{{ messages[0].content }}" + ASKING, MULTI["messages"], "does not render message 2"),
        # an answer behind the loop; one twice; one in two pieces; a question within an answer
        (
            "{% for m in messages %}{{ '<|start|>' + m.role }}{% endfor %}{{ messages[1].content }}<|end|>",
            [user("1?"), answer("One.")],
            "message 2",
        ),
        ("{% for m in messages %}{{ " + TURN + " }}{% endfor %}" + PLAIN, MULTI["messages"], "several pieces"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant\n' + m.content + '(' + "
            "messages[loop.index0 - 1].content + ')<|end|>' }}{% endif %}{% endfor %}",
            MULTI["messages"],
            "writes message 1 into an answer",
        ),
        (PLAIN.replace("<|end|>", "") + ASKING, [user("1?"), answer("One.")], "never stop"),
        # what a template drops: a question, an answer between markers, a system message, thoughts
        (PLAIN.replace("m.content", "('' if m.role == 'user' else m.content)"), MULTI["messages"], "text of message 1"),
        (
            CHATML.replace("m['content'] }}<|end|>{% endg", "'' }}<|end|>{% endg"),
            MULTI["messages"],
            "text of message 2",
        ),
        ("{% for m in messages[1:] %}" + PLAIN[21:], CHATS["system"]["messages"], "text of message 1"),
        (PLAIN + "{# thinking #}", CHATS["thinking"]["messages"], "omits the thoughts of message 2"),
        (
            PLAIN.replace("m.content", "m.content.split('</think>')[-1]"),
            [user("1?"), answer("<think>Hm.</think>One.")],
            "omits the thoughts of message 2",
        ),
    ],
)
def test_what_stays_unclear_is_refused_and_shown(template: str, messages: list[Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        trained(encoder(template), {"messages": messages})
    assert str(error.value).startswith("data.jsonl:1: ") and words in str(error.value)
    assert "data.chat_template" in str(error.value) and "This is the rendering" in str(error.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"messages": [user("a") | {"train": True}, answer("b")]}, "message 1 has `train: true`"),
        ({"messages": [user("a"), answer("b", train="no")]}, "`train` must be true or false"),
        ({"messages": [user("a"), answer("b")], "tools": "[oops"}, "`tools` is not valid JSON"),
        ({"messages": [user("a"), answer("b")], "tools": {"a": 1}}, "`tools` must be a list"),
        (
            {"messages": [user("a"), answer("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]},
            "message 2: `arguments` is not valid JSON",
        ),
    ],
)
def test_bad_conversations(value: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trained(Encoder(tokenizer_of("qwen3")), value)


def test_an_end_that_the_last_answer_lacks_is_added() -> None:
    """Some templates write the end of a turn with the next one."""
    template = (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content }}{% if not loop.last %}<|end|>{% endif %}"
    )
    assert trained(encoder(template + "{% endfor %}" + ASKING), MULTI) == ["One.<|end|>", "Two.<|end|>"]


MARK = "{% generation %}"
UNMARK = "{% endgeneration %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.role }}>" + MARK + "{{ m.content }}" + UNMARK + "{% endfor %}.",
        MARK + "{% for m in messages %}{% set x = m.role %}{{ x }}{{ loop.index }}{% endfor %}" + UNMARK + "{{ x }}",
        "{% macro say(m) %}" + MARK + "{{ m.content }}" + UNMARK + "{% endmacro %}{{ say(messages[0]) }}!",
        "{% for m in messages %}"
        + MARK
        + "a"
        + UNMARK
        + "{% set b %}"
        + MARK
        + "b"
        + UNMARK
        + "{% endset %}{% endfor %}",
    ],
    ids=["in a loop", "around a loop", "in a macro", "in a captured block"],
)
def test_what_is_marked_is_what_transformers_says(template: str) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    plain, blocks, marked = hf_template.environment().from_string(template), list[str](), list[Span]()
    with plain.environment.activate_tracker(blocks, marked):
        blocks += plain.generate(messages=messages)
    rendered = ChatTemplate(template, {}).render(messages, {})
    assert rendered.text == "".join(blocks) and rendered.marked == tuple(sorted(marked))
