"""Nothing that a conversation has is lost without a word: every key of a message, part, call and row is read, known to
be harmless, read by the chat template, or refused with its place and what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.test_masks import CALL, RESULT, TOOL, answer, tokenizer_of, trained, user
from tests.data.test_masks_of_templates import ASKING, PLAIN, TURN
from tests.support.toy_tokenizers import byte_tokenizer, write_jsonl
from weft.config.load import load_config
from weft.data.encode import Encoder, Encoding
from weft.data.messages import MessageRules, read_messages
from weft.data.prompts import load_prompts
from weft.data.records import ParseOptions, parse_row
from weft.errors import UserError, first_line

# A template with everything: thoughts, text beside calls, several calls, results, tools.
TEMPLATE = (
    "{% if tools %}{{ '<|start|>tools\n' + (tools | tojson) + '<|end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|start|>' + m.role + '\n' }}{% if m.reasoning_content %}{{ '[' + m.reasoning_content + ']' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|end|>\n' }}{% endfor %}" + ASKING
)


def rows_trained(
    row: dict[str, Any], rules: MessageRules | None = None, template: str = TEMPLATE, **columns: str
) -> list[str]:
    """What is trained of a row of a file."""
    tokenizer = byte_tokenizer(template)
    read = parse_row("d:1", row, ParseOptions(columns, rules or MessageRules()))
    return trained_of(Encoder(tokenizer), read)


def trained_of(encoder: Encoder, record: Any) -> list[str]:
    [encoded] = encoder.encode([record])
    spans: list[list[int]] = []
    for before, token, weight in zip([0, *encoded.trained], encoded.ids, encoded.trained, strict=False):
        if weight and not before:
            spans.append([])
        if weight:
            spans[-1].append(token)
    return [encoder.tokenizer.decode(span) for span in spans]


def two(**marks: Any) -> dict[str, Any]:
    return {"messages": [user("1?"), answer("BAD", **marks), user("2?"), answer("GOOD")]}


# ------------------------------------------------------------------ marks of what is trained


@pytest.mark.parametrize(
    "mark",
    [
        {"train": False}, {"training": False}, {"trainable": False}, {"loss": False}, {"loss": 0}, {"loss": 0.0},
        {"loss_mask": 0}, {"step_loss_mask": 0}, {"weight": 0}, {"weight": 0.0}, {"loss_scale": 0.0},
        {"loss_weight": 0}, {"masked": True}, {"masked": 1}, {"should_train": False}, {"train": False, "weight": 0},
        {"loss": False, "masked": True, "id": 3},
    ],
    ids=str,
)  # fmt: skip
def test_marks_of_other_trainers_say_what_is_trained(mark: dict[str, Any]) -> None:
    assert rows_trained(two(**mark)) == ["GOOD<|end|>"]
    marks = {
        name: (not value if isinstance(value, bool) else 1 - value) for name, value in mark.items() if name != "id"
    }
    assert rows_trained(two(**marks)) == ["BAD<|end|>", "GOOD<|end|>"]


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"loss": 0.5}, "`loss` is 0.5; it must be 0"),
        ({"loss": [True, False]}, "`loss` is [true, false]"),
        ({"weight": 2}, "`weight` is 2"),
        ({"loss_scale": 0.3}, "`loss_scale` is 0.3"),
        ({"loss_mask": "0"}, '`loss_mask` is "0"'),
        ({"loss": False, "trainable": True}, "`loss` and `trainable` contradict each other"),
        (
            {"mask": True},
            "`mask`: it is ambiguous: it marks trained messages for some trainers, untrained messages for others",
        ),
        ({"mask": 0}, "data.ignore=[mask]"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "`train_detail`"),
        ({"label_mask": 0}, "`label_mask`, which neither weft nor the chat template reads"),
        ({"exclude_from_loss": True}, "data.ignore=[exclude_from_loss]"),
        ({"no_loss": True}, "message 2 has `no_loss`"),
    ],
)
def test_marks_that_weft_cannot_follow_are_refused(mark: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        rows_trained(two(**mark))
    assert str(error.value).startswith("d:1: message 2") and words in str(error.value)


def test_a_mark_that_says_what_is_so_anyway() -> None:
    """slime marks every message, and reads the marks of answers alone."""
    row = {"messages": [user("1?") | {"step_loss_mask": 1}, answer("One.", step_loss_mask=1)]}
    assert rows_trained(row) == ["One.<|end|>"]
    row = {"messages": [user("1?") | {"loss": False}, answer("One.", loss=True)]}
    assert rows_trained(row) == ["One.<|end|>"]
    with pytest.raises(UserError, match="message 1 has `train: true`"):
        rows_trained({"messages": [user("1?") | {"loss": True}, answer("One.")]})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([{"type": "text", "text": "Hm"}, {"type": "text", "text": "Yes", "train": False}], "part 2 .* has `train`"),
        ([{"type": "text", "text": "Hm", "weight": 0}], "cut it into several messages"),
        ([{"type": "text", "text": "Hm", "masked": True}], "has `masked`"),
        (
            [{"type": "text", "text": "Hm", "hidden": True}],
            r"has `hidden`, which is not read. .*data.ignore=\[hidden\]",
        ),
        ([{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Yes"}], "as `reasoning_content`"),
    ],
)
def test_marks_of_parts_are_refused(parts: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=f"d:1: message 2: part . of `content`.*{words}|{words}"):
        rows_trained({"messages": [user("1?"), answer("") | {"content": parts}]})


def test_parts_that_say_nothing_more() -> None:
    parts = [
        {"type": "text", "text": "Ye", "id": 4, "cache_control": {"type": "ephemeral"}, "annotations": []},
        {"type": "text", "text": "s", "train": True, "image_url": None, "masked": False},
    ]
    row = {"messages": [user("1?") | {"content": [{"type": "text", "text": "1?", "train": False}]}, answer("")]}
    row["messages"][1]["content"] = parts
    assert rows_trained(row) == ["Yes<|end|>"]


# ------------------------------------------------------------------ keys of messages


@pytest.mark.parametrize(
    "name",
    [
        "reasoning_content",
        "thinking",
        "reasoning",
        "thought",
        "thoughts",
        "thinking_content",
        "reasoning_text",
        "think",
    ],
)
def test_thoughts_under_every_name_are_rendered(name: str) -> None:
    assert rows_trained({"messages": [user("1?"), answer("One.", **{name: "Hm."})]}) == ["[Hm.]One.<|end|>"]
    # a template that has that name alone
    template = TEMPLATE.replace("reasoning_content", name)
    assert rows_trained({"messages": [user("1?"), answer("One.", thinking="Hm.")]}, template=template) == [
        "[Hm.]One.<|end|>"
    ]
    with pytest.raises(UserError, match=r"message 2 has `reasoning_content`, which the chat template does not render"):
        rows_trained({"messages": [user("1?"), answer("One.", **{name: "Hm."})]}, template=PLAIN + ASKING)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (answer("One.", reasoning="Hm.", thinking="No."), "which differ"),
        (answer("Hm. One.", thought="Hm."), "is also in `content`, and would be trained twice"),
        (answer("One.", reasoning={"text": "Hm."}), "`reasoning` must be a string"),
        (answer("One.", chain_of_thought="Hm."), "`chain_of_thought`, which neither weft nor the chat template reads"),
        (answer("One.", scratchpad="Hm."), "data.ignore=[scratchpad]"),
        (answer("One.", channel="final"), "`channel`"),
        (answer("One.", refusal="I will not."), "`refusal`"),
        (answer("One.", eot=False), "`eot`"),
        (answer("One.", citations=["a"]), "`citations`"),
        (answer("", tool_calls=[{"function": {"name": "f", "arguments": {}}, "result": "12"}]), "call 1 has `result`"),
        (answer("", tool_calls=[{"function": {"name": "f", "arguments": {}, "output": "12"}}]), "call 1 has `output`"),
        (answer("", function_call={"name": "f"}, tool_calls=[{"function": {"name": "g"}}]), "`function_call` and"),
    ],
)
def test_keys_that_nobody_reads_are_refused(message: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        rows_trained({"messages": [user("1?"), message]})
    assert str(error.value).startswith("d:1: message 2") and words in str(error.value)


def test_a_thought_of_a_question_is_refused() -> None:
    with pytest.raises(UserError, match="message 1 has `reasoning_content`, which only an answer"):
        rows_trained({"messages": [user("1?") | {"thought": "Hm."}, answer("One.")]})


def test_keys_that_say_where_a_message_is_from_are_left_alone() -> None:
    """As data sets on the hub and logs of APIs have them."""
    origin: dict[str, Any] = {
        "id": "a1", "parent_id": None, "timestamp": 1.7e9, "created_at": "2024-01-01", "model": "m", "language": "en",
        "toxic": False, "redacted": False, "header": {"user-agent": "x"}, "turn_identifier": 3, "usage": {"tokens": 3},
        "refusal": None, "audio": None, "annotations": [], "tool_calls": None, "function_call": None, "files": [],
        "note": "", "eot": True, "ipython": False, "finish_reason": "stop", "metadata": {"a": 1}, "name": "bot",
        "logprobs": None, "reasoning_details": [], "mask": None, "masked": None, "type": "message",
        "status": "completed",
    }  # fmt: skip
    plain = {"messages": [user("1?"), answer("One.")], "extra": 1}
    assert rows_trained({"messages": [user("1?") | origin, answer("One.", **origin)]}) == rows_trained(plain)


def test_a_key_that_the_template_reads_is_its_own() -> None:
    template = PLAIN.replace(TURN, TURN.replace("m.role +", "m.role + (m.mood or '') +")) + ASKING
    happy = {"messages": [user("1?") | {"mood": "!"}, answer("One.")]}
    assert rows_trained(happy, template=template) == ["One.<|end|>"]
    with pytest.raises(UserError, match="message 1 has `mood`"):
        rows_trained(happy)
    # the word is in the template, but its value is not: in a loop over tools
    tools_template = PLAIN.replace("{{ ", "{% for t in tools or [] %}{{ t.mood }}{% endfor %}{{ ", 1) + ASKING
    with pytest.raises(UserError, match="message 1 has `mood`"):
        rows_trained(happy, template=tools_template)


@pytest.mark.covers("data.ignore")
def test_keys_and_columns_that_are_left_out_on_purpose() -> None:
    row = two(mask=True, action="look") | {"functions": [{"name": "f", "parameters": {}}], "system_prompt": "S."}
    row["messages"][3]["tool_calls"] = [{"function": {"name": "f", "arguments": {}}, "result": "12"}]
    rules = MessageRules(ignored=("mask", "action", "functions", "system_prompt", "result"))
    assert rows_trained(row, rules) == ["BAD<|end|>", "GOOD<call>f{}</call><|end|>"]


# ------------------------------------------------------------------ calls in other forms


def test_the_older_form_of_calls_is_read() -> None:
    older = {
        "messages": [
            user("Time?"),
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "get_time", "arguments": '{"city": "Rome"}'},
            },
            {"role": "function", "name": "get_time", "content": "noon"},
            answer("Noon."),
        ],
        "functions": [TOOL["function"]],
    }
    newer = {
        "messages": [user("Time?"), CALL, {"role": "tool", "name": "get_time", "content": "noon"}, answer("Noon.")],
        "tools": [TOOL],
    }
    for template in ("qwen3", "llama3_1", "glm4moe", "gptoss"):
        encoder = Encoder(tokenizer_of(template))
        first, two = (encoder.encode([parse_row("d:1", row, ParseOptions())]) for row in (older, newer))
        assert first == two


def test_a_template_of_the_older_form_gets_it() -> None:
    template = (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}{% if m.function_call %}"
        "{{ m.function_call.name + (m.function_call.arguments | tojson) }}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|end|>\n' }}{% endfor %}" + ASKING
    )
    messages = [user("Time?"), answer("", function_call={"name": "now", "arguments": {"in": "Rome"}})]
    result = {"role": "function", "name": "now", "content": "noon"}
    expected = ['now{"in": "Rome"}<|end|>', "Noon.<|end|>"]
    assert rows_trained({"messages": [*messages, result, answer("Noon.")]}, template=template) == expected
    [encoded] = Encoder(byte_tokenizer(template)).encode(
        [parse_row("d:1", {"messages": [*messages, result, answer("Noon.")]}, ParseOptions())]
    )
    assert "<|start|>function\nnoon" in byte_tokenizer(template).decode(encoded.ids)


def test_roles_of_calls_and_results() -> None:
    """ms-swift has a message for each call, ShareGPT the JSON of a call or of several."""
    call = {"role": "tool_call", "content": json.dumps({"name": "f", "arguments": {"a": 1}})}
    second_call = {"role": "tool_call", "content": {"name": "f", "arguments": {"a": 2}}}
    results = [{"role": "tool_response", "content": "x"}, {"role": "tool_response", "content": "y"}]
    row = {"messages": [user("Go"), answer("I look."), call, second_call, *results, answer("Done.")]}
    expected = ['I look.<call>f{"a": 1}</call><call>f{"a": 2}</call><|end|>', "Done.<|end|>"]
    assert rows_trained(row) == expected
    assert rows_trained(row, MessageRules(roles={"tool_call": "assistant", "tool_response": "tool"})) == expected
    untrained = {"messages": [user("Go"), call | {"loss": False}, results[0], answer("Done.")]}
    assert rows_trained(untrained) == ["Done.<|end|>"]
    with pytest.raises(UserError, match="message 2: the content of a tool_call must be JSON"):
        rows_trained({"messages": [user("Go"), {"role": "tool_call", "content": "f(1)"}]})


@pytest.mark.parametrize("arguments", ["", "  ", "null", None, {}, "{}"])
def test_arguments_that_are_empty(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    for form in ({"tool_calls": [call]}, {"function_call": call["function"]}):
        assert rows_trained({"messages": [user("Time?"), answer("", **form)]}) == ["<call>now{}</call><|end|>"]
    text = TEMPLATE.replace("(c.function.arguments | tojson)", "c.function.arguments")  # it adds texts
    assert rows_trained({"messages": [user("Time?"), answer("", tool_calls=[call])]}, template=text) == [
        "<call>now{}</call><|end|>"
    ]


@pytest.mark.parametrize("arguments", ["[1]", "3", '"a"', "true", [1], 3, True, "{a: 1}"])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    with pytest.raises(UserError, match="d:1: message 2: call 1: `arguments` (must be an object|is not valid JSON)"):
        rows_trained({"messages": [user("Time?"), answer("", tool_calls=[call])]})


def test_arguments_are_written_as_json_and_not_as_python() -> None:
    """A template that writes the arguments as they come wants their text."""
    template = TEMPLATE.replace("+ (c.function.arguments | tojson) +", "}}{{ c.function.arguments }}{{")
    row = {"messages": [user("Time?"), CALL, RESULT, answer("Noon.")]}
    assert rows_trained(row, template=template)[0] == '<call>get_time{"city": "Rome"}</call><|end|>'


# ------------------------------------------------------------------ columns of rows


@pytest.mark.parametrize(
    "columns",
    [
        {"loss_mask": [0, 1]}, {"loss_mask": [0, 0, 0, 1]}, {"loss_mask": "[0, 1]"}, {"step_loss_mask": [False, True]},
        {"mask_history": True}, {"mask_history": 1}, {"train_mask": [0, 1], "mask_history": True},
    ],
    ids=str,
)  # fmt: skip
def test_columns_that_say_what_is_trained(columns: dict[str, Any]) -> None:
    assert rows_trained(two() | columns) == ["GOOD<|end|>"]
    messages = two()["messages"]
    if "loss_mask" not in columns:
        split = {"prompt": messages[:1], "completion": messages[1:]} | columns
        assert rows_trained(split) == ["GOOD<|end|>"]
    renamed = {"turns": messages} | columns  # data.columns names one format: other columns keep their meaning
    assert rows_trained(renamed, messages="turns") == ["GOOD<|end|>"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"loss_mask": [0, 1, 1]}, "3 values, for 4 messages and 2 answers"),
        ({"loss_mask": [1, 1, 1, 1]}, "has 1 for message 1, but only answers"),
        ({"loss_mask": [0.5, 1]}, "must be a list of 0"),
        ({"loss_mask": 0}, "must be a list of 0"),
        ({"mask_history": "yes"}, "`mask_history` must be true or false"),
        ({"unmask": True}, "`unmask: true`"),
        ({"train_on_inputs": True}, "data.train_on=all"),
        ({"mask_prompt": False}, "data.ignore=[mask_prompt]"),
        ({"mask": "Assistant"}, "`mask`, which is ambiguous"),
        ({"mask": [0, 1]}, "`mask`, which is ambiguous"),
        ({"history": [["a", "b"]]}, "`history` in addition to messages"),
        ({"system": "A.", "system_prompt": "B."}, "`system` and `system_prompt` differ"),
        ({"enable_thinking": "on"}, "`enable_thinking` must be true or false"),
        ({"image": "cat.jpg"}, "data.columns={images: image}"),
        ({"audio": {"path": "a.wav"}}, "`audio` is not read"),
    ],
)
def test_columns_that_would_change_what_is_trained_are_refused(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        rows_trained(two() | columns)
    assert str(error.value).startswith("d:1: ") and words in str(error.value)


def test_columns_of_ordinary_data_sets_are_left_alone() -> None:
    columns: dict[str, Any] = {
        "id": 3, "conversation_id": "x", "source": "hub", "category": "math", "score": 0.5, "loss": 0.3, "weight": 0.5,
        "train": True, "label": "a", "labels": ["b"], "mask": "User", "mask_history": False, "unmask": False,
        "functions": ["def f(): pass"], "history": [], "objects": {"bbox": [[1, 2]]}, "image": None, "channel": "chat",
        "answer": "4", "reasoning": "on", "num_turns": 2, "prompt_id": "p", "metadata": {"a": 1}, "loss_mask": None,
        "mask_prompt": True, "tokens": [1, 2], "system_prompt": "", "tool_defs": None, "rejected_response": "no",
    }  # fmt: skip
    assert rows_trained(two() | columns) == ["BAD<|end|>", "GOOD<|end|>"]


@pytest.mark.parametrize("column", ["functions", "tool_defs"])
def test_tools_in_columns_of_other_names(column: str) -> None:
    native = {"messages": [user("Time?"), CALL, RESULT, answer("Noon.")], "tools": [TOOL]}
    for tools in ([TOOL["function"]], [TOOL], json.dumps([TOOL["function"]])):
        foreign = {"messages": native["messages"], column: tools}
        encoder = Encoder(tokenizer_of("qwen3"))
        first, two = (encoder.encode([parse_row("d:1", row, ParseOptions())]) for row in (native, foreign))
        assert first == two


def test_a_column_that_switches_thoughts() -> None:
    qwen = Encoder(tokenizer_of("qwen3"))
    row = {"messages": [user("1?"), answer("One.")], "enable_thinking": False}
    assert trained_of(qwen, parse_row("d:1", row, ParseOptions())) == ["One.<|im_end|>"]


@pytest.mark.covers("data.system")
def test_a_system_message_by_column_and_by_default() -> None:
    def text(row: dict[str, Any], rules: MessageRules) -> str:
        [encoded] = Encoder(byte_tokenizer(TEMPLATE)).encode([parse_row("d:1", row, ParseOptions({}, rules))])
        return byte_tokenizer(TEMPLATE).decode(encoded.ids)

    turns, default = [user("Hi"), answer("Ho")], MessageRules(system="Be kind.")
    begins = "<|start|>system\nBe kind.<|end|>\n<|start|>user"
    for row in (
        {"messages": turns},
        {"prompt": turns[:1], "completion": turns[1:]},
        {"instruction": "Hi", "output": "Ho"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    ):
        assert text(row, default).startswith(begins)
    with_system = [{"role": "system", "content": "Be brief."}, *turns]
    for row in (
        {"messages": with_system},
        {"messages": turns, "system": "Be brief."},
        {"messages": with_system, "system_prompt": "Be brief."},
    ):
        assert text(row, default).startswith("<|start|>system\nBe brief.<|end|>\n<|start|>user")
    assert text({"messages": turns, "system_prompt": "Be kind."}, MessageRules()).startswith(begins)
    for row in ({"text": "a"}, {"prompt": "a", "completion": "b"}, {"input_ids": [5, 6]}):
        with pytest.raises(UserError, match="d:1: data.system has no effect on"):
            parse_row("d:1", row, ParseOptions({}, default))


def test_conversations_are_read_without_a_mapping() -> None:
    conversation = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "One.", "weight": None}]
    for column in ("conversations", "conversation"):
        for value in (conversation, json.dumps(conversation), [user("1?"), answer("One.")]):
            assert rows_trained({"id": 1, column: value}) == ["One.<|end|>"]
            assert rows_trained({"instruction": "1?", "response": "no", column: value}) == ["One.<|end|>"]
    chosen = {"instruction": "2?", "output": "Two.", "conversations": conversation}
    assert rows_trained(chosen) == ["Two.<|end|>"]  # a whole row of another format


# ------------------------------------------------------------------ keys of other names


SPOKEN = {"dialog": [{"speaker": "visitor", "text": "1?"}, {"speaker": "clerk", "text": "One.", "t": 3, "learn": 0}]}


@pytest.mark.covers("data.message_keys")
def test_keys_of_other_names_are_mapped() -> None:
    roles = {"visitor": "user", "clerk": "assistant"}
    rules = MessageRules(roles, {"role": "speaker", "content": "text"}, ("t", "learn"))
    assert rows_trained(SPOKEN, rules, messages="dialog") == ["One.<|end|>"]
    marked = MessageRules(roles, {**rules.keys, "train": "learn"}, ("t",))
    assert rows_trained(SPOKEN, marked, messages="dialog") == []
    sharegpt = MessageRules(keys={"role": "who", "content": "what"})
    row = {"messages": [{"who": "human", "what": "1?"}, {"who": "gpt", "what": "One."}]}
    assert rows_trained(row, sharegpt) == ["One.<|end|>"]


def test_the_error_lists_the_keys_and_its_proposal_mends_it() -> None:
    row = {"messages": [{"speaker": "user", "text": "1?"}, {"speaker": "assistant", "text": "One."}]}
    with pytest.raises(UserError) as error:
        rows_trained(row)
    words = "message 1: has `speaker`, `text`, but needs `role` and `content`. "
    assert f"{words}Set 'data.message_keys={{content: text, role: speaker}}'." in str(error.value)
    assert rows_trained(row, MessageRules(keys={"role": "speaker", "content": "text"})) == ["One.<|end|>"]
    with pytest.raises(UserError, match=r"It has `role`, `text`\. Set 'data\.message_keys=\{content: text\}'"):
        rows_trained({"messages": [{"role": "user", "text": "1?"}]})


def test_a_column_of_turns_is_proposed() -> None:
    with pytest.raises(UserError, match=r"has `id`, `dialog`.*Set 'data\.columns=\{messages: dialog\}'"):
        rows_trained({"id": 1, **SPOKEN})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("{speaker: role}", "Write weft's name first: {role: speaker}"),
        ("{mood: feeling}", "mood is not a message key of weft"),
        ("{role: a, content: a}", "reads a twice"),
    ],
)
def test_bad_mappings_of_keys(keys: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        load_config([], ["model.path=m", "data.path=d.jsonl", f"data.message_keys={keys}"])
    assert words in str(error.value)


# ------------------------------------------------------------------ prompts


def test_prompts_of_evaluation_are_read_by_the_same_rules(tmp_path: Path) -> None:
    """Their tools, system messages and calls are in what the model is given; what would be lost is refused."""
    tokenizer = byte_tokenizer(TEMPLATE)
    question = [user("Time?"), CALL, RESULT]
    rows = [
        {"messages": [*question, answer("Noon.")], "tools": [TOOL], "system": "S."},
        {"conversations": [{"from": "human", "value": "Time?"}]},
        {"messages": [{"who": "user", "what": "Time?"}]},
    ]
    rules = MessageRules(keys={"role": "who", "content": "what"}, system="D.")
    path = write_jsonl(tmp_path / "a.jsonl", *rows[:2])
    first, second = load_prompts(path, tokenizer, rules=MessageRules(system="D."))
    text = tokenizer.decode(first.tokens)
    assert '"name": "get_time"' in text and "system\nS." in text and '<call>get_time{"city": "Rome"}</call>' in text
    assert tokenizer.decode(second.tokens).startswith("<|start|>system\nD.<|end|>\n<|start|>user\nTime?")
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*no `role`|has `role`"):
        load_prompts(path, tokenizer, rules=rules)
    (third,) = load_prompts(write_jsonl(tmp_path / "b.jsonl", rows[2]), tokenizer, rules=rules)
    assert third == second
    for template, words in (
        (PLAIN + ASKING, "has `tools`"),
        (TEMPLATE.replace("{{ m.content }}", ""), "text of message"),
    ):
        with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{words}"):
            load_prompts(path, byte_tokenizer(template))


# ------------------------------------------------------------------ headers that the loop writes


def _special(template: str, *words: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words)})
    return tokenizer


# Shaped as Granite 3.3's, GigaChat 3's, Apriel 1.5's and OLMo 2's: (template, special tokens, trained, header).
_IN_LOOP: dict[str, tuple[str, tuple[str, ...], str]] = {
    "granite": (
        "{% for m in messages %}{{ '<|role|>' + m['role'] + '<|is|>' + m['content'] + '<|text|>\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|role|>assistant<|is|>' }}{% endif %}{% endfor %}",
        ("<|role|>", "<|is|>", "<|text|>"),
        "{}<|text|>",
    ),
    "gigachat": (
        "{% for m in messages %}{{ m.role + '<|sep|>\n' + m.content + '<|message|>\n\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ 'assistant<|sep|>\n' }}{% endif %}{% endfor %}",
        ("<|sep|>", "<|message|>"),
        "{}<|message|>",
    ),
    "apriel": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
        "{% else %}{{ '\n<|answer|>\n' + m.content }}{% if not loop.last %}{{ '\n<|end|>\n' }}{% endif %}{% endif %}"
        "{% if loop.last and add_generation_prompt and m.role != 'assistant' %}{{ '\n<|answer|>\n' }}"
        "{% elif loop.last %}{{ '\n<|end|>\n' }}{% endif %}{% endfor %}",
        ("<|user|>", "<|answer|>"),
        "{}\n<|end|>",
    ),
    "olmo2, whose header is spelt": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '\n' }}"
        "{% elif not loop.last %}{{ '<|assistant|>\n' + m.content + eos_token + '\n' }}"
        "{% else %}{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        (),
        "{}</s>",
    ),
    "a turn that ends otherwise when it is the last": (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|end|>\n<|start|>assistant\n' }}"
        "{% else %}{{ '<|end|>\n' }}{% endif %}{% endfor %}",
        (),
        "{}<|end|>",
    ),
    "earlier turns differ": (  # the text before the answer is not that of the prompt: an earlier turn is cut
        "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
        "{% if loop.index0 == 1 and messages | length > 3 %}{{ 'cut' + m.content }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|end|>\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}{% endfor %}",
        (),
        "{}<|end|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _IN_LOOP)
def test_headers_that_the_loop_writes_are_not_trained(name: str) -> None:
    template, special, expected = _IN_LOOP[name]
    encoder = Encoder(_special(template, *special))
    assert trained(encoder, {"messages": [user("1+1?"), answer("2")]}) == [expected.format("2")]
    two_turns = {"messages": [user("1+1?"), answer("2"), user("1+2?"), answer("3")]}
    cut = "cut" if "cut" in template else ""
    assert trained(encoder, two_turns) == [expected.format(cut + "2"), expected.format("3")]
    row = {"prompt": [user("1+1?"), answer("2"), user("1+2?")], "completion": [answer("3")]}
    assert trained(encoder, row) == [expected.format("3")]


# ------------------------------------------------------------------ what a template leaves out


def leaves_out(piece: str, replacement: str = "") -> str:
    assert piece in TEMPLATE
    return TEMPLATE.replace(piece, replacement)


_CALLS_ALONE = leaves_out("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
LOOK = {"content": "LOOK."}
_ARGUMENTS = "(c.function.arguments | tojson)"
_OSLO = {"function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
_TWO = answer("", tool_calls=[*CALL["tool_calls"], _OSLO])


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (_CALLS_ALONE, [user("Q"), CALL | LOOK], "text of message 2 beside its call"),
        (_CALLS_ALONE, [user("Q"), CALL | LOOK, RESULT, answer("Noon.")], "text of message 2 beside its call"),
        (_CALLS_ALONE, [user("Q"), CALL | {"content": "Rome"}], "text of message 2 beside its call"),
        (_CALLS_ALONE, [user("Q"), CALL | LOOK | {"train": False}, RESULT, answer("Noon.")], "text of message 2"),
        (
            leaves_out("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"),
            [user("Q"), _TWO],
            "argument `city` of call 2 of message 2",
        ),
        (
            leaves_out("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"),
            [user("Q"), answer("", tool_calls=[{"function": {"name": "f", "arguments": {}}}] * 2)],
            "call 2 of message 2",
        ),
        (
            leaves_out("in m.tool_calls or []", "in (m.tool_calls if loop.last else [])"),
            [user("Q"), CALL, RESULT, answer("Noon.")],
            "argument `city` of call 1 of message 2",
        ),
        (leaves_out("+ " + _ARGUMENTS), [user("Q"), CALL], "argument `city` of call 1 of message 2"),
        (
            leaves_out(_ARGUMENTS, "(c.function.arguments.city | tojson)"),
            [user("Q"), answer("", tool_calls=[{"function": {"name": "f", "arguments": {"city": "Rome", "n": 3}}}])],
            "argument `n` of call 1",
        ),
        (leaves_out("c.function.name + "), [user("Q"), CALL], "the name of call 1 of message 2"),
        (
            leaves_out("{{ m.content }}", "{{ 'ok' if m.role == 'tool' else m.content }}"),
            [user("Q"), CALL, RESULT, answer("Noon.")],
            "text of message 3",
        ),
        (
            leaves_out("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            [user("Q"), CALL, RESULT, answer("Noon.")],
            "text of message 3",
        ),
        (
            leaves_out("{{ m.content }}", "{{ m.content if m.role != 'system' else '' }}"),
            [{"role": "system", "content": "Be brief."}, user("Say: Be brief."), answer("Ho")],
            "text of message 1",
        ),
        (
            leaves_out("{{ m.content }}", "{{ m.content if m.role != 'assistant' or loop.last else 'x' }}"),
            [user("1?"), answer("One.", train=False), user("2?"), answer("Two.")],
            "text of message 2",
        ),
        (
            leaves_out("{% if m.reasoning_content %}", "{% if m.reasoning_content and m.role == 'user' %}"),
            [user("Q"), answer("", reasoning_content="Hm.", tool_calls=CALL["tool_calls"]), RESULT, answer("Noon.")],
            "omits the thoughts of message 2",
        ),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused(template: str, messages: list[Any], words: str) -> None:
    for train_on in ("answers", "all"):
        if train_on == "all" and any("train" in message for message in messages):
            continue
        encoder = Encoder(byte_tokenizer(template), Encoding(train_on=train_on))  # type: ignore[arg-type]
        with pytest.raises(UserError) as error:
            encoder.encode([parse_row("d:1", {"messages": messages}, ParseOptions())])
        assert str(error.value).startswith("d:1: the template ") and words in str(error.value)
    rows_trained({"messages": messages})  # the template that has everything has it


def test_everything_is_looked_for_where_loops_say_nothing_too() -> None:
    """Templates whose loops do not show the messages, and answers none of which is trained."""
    silent = "{% set text %}" + _CALLS_ALONE.removesuffix(ASKING) + "{% endset %}{{ text }}" + ASKING
    messages = [user("Q"), answer("LOOK.", tool_calls=CALL["tool_calls"]), RESULT, answer("Noon.")]
    for train in (True, False):
        marked = [m | {"train": train} if m["role"] == "assistant" else m for m in messages]
        with pytest.raises(UserError, match="does not render the text of message 2 beside its call"):
            rows_trained({"messages": marked}, template=silent)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("{{ tools | length }}", "'get_time' of tool 1"),
        ("{% for t in tools %}{{ t.function.name }}{% endfor %}", "'The time in a city.' of tool 1"),
        (
            "{% for t in tools %}{{ t.function.name + t.function.description }}{% endfor %}",
            "'city' of tool 1",
        ),
    ],
)
def test_tools_that_a_template_leaves_out_are_refused(tools: str, words: str) -> None:
    template = "{% if tools %}" + tools + "{% endif %}" + PLAIN + ASKING
    with pytest.raises(UserError) as error:
        rows_trained({"messages": [user("Hi"), answer("Ho")], "tools": [TOOL]}, template=template)
    assert f"d:1: the template does not render {words}" in str(error.value)


def test_thoughts_of_earlier_turns_may_be_left_out() -> None:
    """As at inference: by templates that have those of the last turn."""
    last = leaves_out("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
    row = {"messages": [user("1?"), answer("One.", thinking="Hm."), user("2?"), answer("Two.", thinking="So.")]}
    assert rows_trained(row, template=last) == ["One.<|end|>", "[So.]Two.<|end|>"]
    assert rows_trained({"messages": [*row["messages"][:3], answer("Two.")]}, template=last) == [
        "One.<|end|>",
        "Two.<|end|>",
    ]


def test_calls_outside_of_the_generation_markers_are_refused() -> None:
    marked = TEMPLATE.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    with pytest.raises(UserError, match="call 1 of message 2 is not in the part that the template marks as the answer"):
        rows_trained({"messages": [user("Q"), answer("LOOK.", tool_calls=CALL["tool_calls"])]}, template=marked)


# ------------------------------------------------------------------ answers of templates that are compared


def test_a_call_with_special_tokens_is_trained_whole_where_loops_say_nothing() -> None:
    template = (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}{{ '<|start|>' + m.role + '\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}"
        "{{ '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}"
        "{% endfor %}{{ '<|end|>\n' }}{% endfor %}" + ASKING
    )
    encoder = Encoder(_special(template, "<call>", "</call>"))
    row = {"messages": [user("Time?"), CALL, RESULT, answer("Noon.")]}
    assert trained(encoder, row) == ['<call>get_time{"city": "Rome"}</call><|end|>', "Noon.<|end|>"]


@pytest.mark.parametrize("role", ["tool", "function", "ipython"])
def test_an_answer_to_a_result_of_any_role_has_the_header_of_such_answers(role: str) -> None:
    """A template that asks otherwise behind a result: the header is learned once, for these answers alone."""
    template = (
        "{% macro again(m) %}{{ ' again' if m.role not in ['user', 'assistant'] else '' }}{% endmacro %}"
        "{% for m in messages %}{{ '<|start|>' + m.role }}{% if not loop.first %}{{ again(messages[loop.index0 - 1]) }}"
        "{% endif %}{{ '\n' + m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' + again(messages[-1]) + '\n' }}{% endif %}"
    )
    call = answer("", tool_calls=[{"function": {"name": "f", "arguments": {}}}])
    row = {"messages": [user("Q"), call, {"role": role, "name": "f", "content": "12"}, answer("Noon.")]}
    encoder = Encoder(byte_tokenizer(template))
    assert trained(encoder, row) == ["f<|end|>", "Noon.<|end|>"]
    [masks] = encoder._answers.values()
    assert {after_tool for after_tool, _ in masks._turns} == {False, True}


def test_unknown_roles_are_refused_as_before() -> None:
    with pytest.raises(UserError, match="is unknown to weft"):
        read_messages("d:1", "messages", [{"role": "narrator", "content": "a"}])


def test_the_first_line_of_an_error_goes_on_where_it_ends_in_a_colon() -> None:
    assert first_line(ValueError("a sentence.\nand more")) == "a sentence"
    assert first_line(ValueError("\n these are wrong:\n  a, b.\nand more")) == "these are wrong: a, b"
    assert first_line(ValueError("these:")) == "these" and first_line(KeyError()) == "KeyError"
