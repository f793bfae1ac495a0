"""Data -> prompts: formats, columns, templates, lengths; and the order in which rollout steps take them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tests.support.toy_tokenizers import byte_tokenizer, family_tokenizer, write_jsonl
from tests.support.zoo import tiny_config
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.documents import load_documents
from weft.data.encode import Encoding
from weft.data.prompts import load_prompts
from weft.errors import UserError
from weft.inference.types import Prompt
from weft.rl.chat import ChatRenderer
from weft.rl.evaluate import HeldOutPrompts
from weft.rl.prompts import PromptRules, Prompts, PromptStream, check_lengths, load_rl_prompts, read_prompts

ASKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


def config_of(*overrides: str) -> RlConfig:
    return load_config([], ["model.path=none", "data.path=none", "rl.reward=[length]", *overrides], schema=RlConfig)


def read(rows: Any, *, template: str | None = ASKING, longest: int = 1000, **rules: Any) -> Prompts:
    return read_prompts(rows, byte_tokenizer(template, bos=True), Encoding(), PromptRules(longest, **rules))


def decoded(prompt: Prompt) -> str:
    return str(byte_tokenizer().decode(list(prompt.tokens)))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1+1="}, "<s>1+1="),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "<|start|>user:hi<|end|><|start|>assistant:"),
        ({"prompt": '[{"role": "user", "content": "hi"}]'}, "<|start|>user:hi<|end|><|start|>assistant:"),
        (
            {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            "<|start|>user:hi<|end|><|start|>assistant:",
        ),
        (
            {"system": "be", "messages": [{"role": "user", "content": "hi"}]},
            "<|start|>system:be<|end|><|start|>user:hi<|end|><|start|>assistant:",
        ),
    ],
    ids=["text", "messages", "json", "sharegpt", "system"],
)
def test_what_the_model_is_given(row: dict[str, Any], expected: str) -> None:
    (prompt,) = read([{**row, "answer": "7"}])
    assert decoded(prompt) == expected
    assert prompt.columns["answer"] == "7" and prompt.source == "data[0]" and prompt.id == "0.0"


def test_rows_of_prompts_are_read_as_documents_are(tmp_path: Path) -> None:
    """Conversations, keys of other names, tools and system messages in other columns; the rewards get all columns."""
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + ASKING
    tools = [{"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}]
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}], "functions": tools, "system_prompt": "be"},
        {"messages": [{"who": "user", "what": "hi", "loss": 0}], "answer": "7"},
    ]
    keys = ["data.message_keys={role: who, content: what}", "data.system=kind"]
    (first,) = read(rows[:1], template=template)
    assert '"name": "now"' in decoded(first) and decoded(first).endswith(
        "<|start|>system:be<|end|><|start|>user:hi<|end|><|start|>assistant:"
    )
    config = config_of(f"data.path={write_jsonl(tmp_path / 'k.jsonl', rows[1])}", *keys)
    (second,) = load_rl_prompts(config, byte_tokenizer(template))
    assert decoded(second) == "<|start|>system:kind<|end|><|start|>user:hi<|end|><|start|>assistant:"
    assert second.columns["answer"] == "7"
    text = write_jsonl(tmp_path / "t.jsonl", {"prompt": "hi"})
    with pytest.raises(UserError, match="data.system has no effect on a text `prompt`"):
        load_rl_prompts(config_of(f"data.path={text}", keys[1]), byte_tokenizer(template))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [{"role": "user", "content": "hi", "hint": "7"}]}, "message 1 has `hint`, which neither"),
        ({"prompt": [{"role": "user", "content": "hi"}], "tools": [{"name": "f"}]}, "has `tools`"),
        (
            {"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]},
            "does not render the text of message 1",
        ),
    ],
)
def test_what_a_prompt_would_lose_is_refused(row: dict[str, Any], words: str) -> None:
    users = ASKING.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    with pytest.raises(UserError, match=rf"data\[0\]: .*{words}"):
        read([row], template=users)


def test_a_text_may_be_what_a_user_says_and_an_instruction_goes_behind_it() -> None:
    (prompt,) = read([{"prompt": "hi"}], chat=True, instruction="Be brief.")
    assert decoded(prompt) == "<|start|>user:hi\nBe brief.<|end|><|start|>assistant:"
    assert prompt.messages == ({"role": "user", "content": "hi\nBe brief."},)
    (prompt,) = read([{"prompt": [{"role": "user", "content": "hi"}]}], instruction="Be brief.")
    assert decoded(prompt) == "<|start|>user:hi\nBe brief.<|end|><|start|>assistant:"


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([{"prompt": "a"}], ASKING,
         "NOT used: `prompt` is text, which the model continues. Set rl.chat=true to render it as a user message"),
        ([{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}], ASKING,
         "the chat template renders 1 prompts, not 1: `prompt` is text, which the model continues. Set rl.chat=true "
         "to render it as a user message"),
        ([{"prompt": "a"}], None, "there is no chat template: prompts are continued as plain text"),
        ([{"messages": [{"role": "user", "content": "a"}]}], ASKING, "the chat template renders all prompts"),
    ],
)  # fmt: skip
def test_whether_the_chat_template_is_used_is_said(rows: Any, template: str | None, message: str) -> None:
    assert read(rows, template=template).template_use() == message


def test_held_out_prompts_that_are_trained_on_are_counted() -> None:
    training, held_out = (
        read([{"prompt": "a"}, {"prompt": "b"}]),
        read([{"prompt": "c"}, {"prompt": "b", "answer": "d"}]),
    )
    (line,) = HeldOutPrompts({"": held_out}).leaks(training)
    assert line.startswith("hint     1 of the 2 held-out prompts are also in the training data")
    assert "data[1] equals data[1]" in line
    assert HeldOutPrompts({"new": read([{"prompt": "e"}])}).leaks(training) == []


@pytest.mark.covers("rl.instruction")
def test_files_of_other_trainers(tmp_path: Path) -> None:
    """verl's columns, of which one is nested, from Parquet; by the keys of a config."""
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i}+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(3)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = config_of(
        f"data.path={tmp_path}/train.parquet",
        "data.columns={answer: reward_model.ground_truth}",
        "rl.instruction=Think.",
    )
    prompts = load_rl_prompts(config, byte_tokenizer(ASKING))
    assert [decoded(p) for p in prompts] == [
        f"<|start|>user:{i}+1?\nThink.<|end|><|start|>assistant:" for i in range(3)
    ]
    assert [p.columns["answer"] for p in prompts] == ["1", "2", "3"]
    assert prompts[1].columns["data_source"] == "openai/gsm8k" and prompts[1].columns["extra_info"]["index"] == 1
    assert str(prompts).endswith("train.parquet: 3 prompts of 29 tokens")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "memory"])
def test_nulls_and_json_values_reach_rewards_as_the_data_have_them(form: str, tmp_path: Path) -> None:
    """As TRL and verl have them: None in columns, in nested objects, in objects of lists. Messages have none."""
    import datasets

    def row(
        question: str, hint: str | None, info: dict[str, Any], extra: Any, function: dict[str, Any]
    ) -> dict[str, Any]:
        asking = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": question, "name": "me"}]
        cases = [{"input": "1", "output": None}]
        tools = [{"type": "function", "function": function}]
        return {"prompt": asking, "hint": hint, "extra_info": info, "cases": cases, "more": extra, "tools": tools}

    rows = [
        row("a", "h", {"index": 0, "author": "x"}, {"a": [None, {"b": None}]}, {"name": "f", "a": {"of": "int"}}),
        row("b", None, {"index": 1, "author": None}, [1, None], {"name": "g", "b": "c"}),
    ]
    jsonl = write_jsonl(tmp_path / "d.jsonl", *rows)
    dataset = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert str(dataset.features["more"]).startswith("Json")
    if form == "parquet":
        dataset.to_parquet(tmp_path / "d.parquet")
    if form == "saved":
        dataset.save_to_disk(tmp_path / "saved")
    source = {"jsonl": jsonl, "parquet": f"{tmp_path}/d.parquet", "saved": f"{tmp_path}/saved"}.get(form, dataset)
    template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    first, second = read(source, template=template)
    expected = read(jsonl, template=template)
    assert [decoded(prompt) for prompt in (first, second)] == [decoded(prompt) for prompt in expected]
    assert "null" not in decoded(first) + decoded(second)
    for prompt, row_values in zip((first, second), rows, strict=True):
        assert {name: prompt.columns[name] for name in ("hint", "extra_info", "cases", "more")} == {
            name: row_values[name] for name in ("hint", "extra_info", "cases", "more")
        }
        assert prompt.columns["tools"] == row_values["tools"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("ab", "<s>ab"), ("<s><|start|>user:ab<|end|>", "<s><|start|>user:ab<|end|>"), ("a<s>", "<s>a<s>")],
)
def test_a_text_that_was_rendered_has_no_second_bos(text: str, tokens: str, tmp_path: Path) -> None:
    """Wherever texts become prompts, they have the tokens that training gives them."""
    tokenizer = byte_tokenizer(None, bos=True)
    (prompt,) = read([{"prompt": text}], template=None)
    (rendered,) = load_prompts(write_jsonl(tmp_path / "p.jsonl", {"prompt": text}), tokenizer)
    (listed,) = load_prompts([text], tokenizer)
    (document,), _ = load_documents([{"prompt": text, "completion": "c"}], tokenizer, max_length=99)
    assert decoded(prompt) == tokens
    assert prompt.tokens == rendered.tokens == listed.tokens == tuple(document.tokens[: len(prompt.tokens)].tolist())


def test_what_a_tokenizer_puts_behind_a_text_is_not_in_a_prompt(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(None)
    pieces = ("<s>", tokenizer.convert_tokens_to_ids("<s>")), ("</s>", tokenizer.convert_tokens_to_ids("</s>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=list(pieces))
    assert decoded(read_prompts([{"prompt": "a"}], tokenizer, Encoding(), PromptRules(9))[0]) == "<s>a"
    assert load_prompts(["a"], tokenizer)[0].tokens == tuple(tokenizer("a")["input_ids"][:-1])


@pytest.mark.covers("rl.chat", "rollout.max_prompt_tokens")
def test_keys_of_the_config(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", {"prompt": "ab"}, {"prompt": "abcdef"})
    keys = [f"data.path={path}", "rl.chat=true", "rollout.max_prompt_tokens=20", "data.long_documents=drop"]
    (prompt,) = load_rl_prompts(config_of(*keys), byte_tokenizer(ASKING))
    assert decoded(prompt) == "<|start|>user:ab<|end|><|start|>assistant:" and len(prompt.tokens) == 20
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{{ mark }}{% endfor %}")
    keys += [f"data.chat_template={template}", "data.template_kwargs={mark: '!'}"]
    assert [decoded(p) for p in load_rl_prompts(config_of(*keys), byte_tokenizer(ASKING))] == ["ab!", "abcdef!"]


def test_long_prompts_are_an_error_or_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", {"prompt": "ab"}, {"prompt": "abcdef"}, {"prompt": "abc"})
    with pytest.raises(UserError, match=r"p.jsonl:2: 1 of 3 prompts are longer .*; this is the longest, with 7"):
        read(path, longest=4)
    remaining = read(path, longest=4, drop=True)
    assert (
        [p.text for p in remaining] == ["ab", "abc"]
        and remaining.dropped == 1
        and [p.index for p in remaining] == [0, 1]
    )
    assert remaining[1].source.endswith("p.jsonl:3")
    with pytest.raises(UserError, match="no prompt is left"):
        read(path, longest=1, drop=True)
    with pytest.raises(UserError, match="data.long_documents is truncate, but a truncated prompt"):
        config_of("data.long_documents=truncate")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            r"data\[0\]: has `question`, `answer`; .* Set 'data.columns={prompt: question}' rl.chat=true: a",
        ),
        ({"instruction": "a", "input": "b"}, "Write `instruction` and `input` into one column, `prompt`"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "has `prompt` and `messages`"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "contains no message to answer"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "has `tools`, but `prompt` is a text, .* rl.chat=true"),
        ({"prompt": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}, "does not render"),
        ({"prompt": "a", "images": ["x"]}, "has `images`, but `prompt` is a text, .* rl.chat=true"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "images": ["x"]},
            "has images or videos, and model.path is a text-only model",
        ),
        (
            {"prompt": [{"role": "user", "content": "<video>a"}], "videos": ["x"]},
            "`videos` is not supported in this version, which reads text and images",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]},
            'is of type "video": weft reads only text and images here',
        ),
    ],
    ids=[
        "question",
        "an instruction with an input",
        "both",
        "nothing asked",
        "tools of a text",
        "tools unread",
        "images of a text",
        "images",
        "videos",
        "video",
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read([row])


def test_other_bad_prompts() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        read([{"messages": [{"role": "user", "content": "a"}]}], template=None)
    with pytest.raises(UserError, match="gives id 1.., but the model's vocabulary has 100"):
        read([{"prompt": "a\u00ff"}], vocab_size=100)
    with pytest.raises(UserError, match="contains no prompts"):
        read([])


def test_the_digest_follows_tokens_order_and_weights(tmp_path: Path) -> None:
    original = read([{"prompt": "a"}, {"prompt": "bc"}])
    assert original.digest == read([{"prompt": "a", "answer": 1}, {"prompt": "bc"}]).digest
    assert (
        len(
            {
                original.digest,
                read([{"prompt": "bc"}, {"prompt": "a"}]).digest,
                read([{"prompt": "ab"}, {"prompt": "c"}]).digest,
            }
        )
        == 3
    )


# ---------------------------------------------------------------- continuations


QWEN_TOOL = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_what_the_template_writes_behind_an_answer() -> None:
    """By hand, for Qwen3: what was sampled ends with <|im_end|>; everything up to the next answer is the template's."""
    tokenizer = family_tokenizer("qwen", "qwen3")
    (prompt,) = read_prompts(
        [{"messages": [{"role": "user", "content": "3+4?"}]}], tokenizer, Encoding(), PromptRules(999)
    )
    continuation = ChatRenderer(tokenizer).continuation(prompt, [{"role": "tool", "content": "7"}])
    assert tokenizer.decode(list(continuation.closing)) == "<|im_end|>"
    assert tokenizer.decode(list(continuation.tokens)) == QWEN_TOOL
    calls = [{"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]
    assert ChatRenderer(tokenizer).continuation(prompt, [{"role": "tool", "content": "7"}], calls) == continuation


@pytest.mark.parametrize(
    ("family", "template"),
    [
        ("qwen", "qwen2_5"), ("qwen", "qwen3_instruct_2507"), ("llama", "llama3_1"), ("gemma", "gemma3"),
        ("phi", "phi3_5"), ("phi4", "phi4"), ("glm", "glm4moe"), ("mistral", "mistral_nemo"),
        ("deepseek", "deepseekv3"), ("llama", "llama3"), ("qwen", "qwen3_5_nothink"), ("gptoss", "gptoss"),
    ],
)  # fmt: skip
def test_a_longer_conversation_is_what_the_template_renders_at_once(family: str, template: str) -> None:
    """An answer and what follows it, each tokenised apart, against the rendering of the whole."""
    tokenizer = family_tokenizer(family, template)
    first, then = {"role": "user", "content": "3+4?"}, {"role": "user", "content": "and 5?"}
    encoding = Encoding(date="2026-01-02")
    read = PromptRules(9999)
    (prompt,) = read_prompts([{"messages": [first]}], tokenizer, encoding, read)
    answered = [first, {"role": "assistant", "content": "seven"}, then]
    (complete,) = read_prompts([{"messages": answered}], tokenizer, encoding, read)
    continuation = ChatRenderer(tokenizer, encoding).continuation(prompt, [then])
    answer_ids = tokenizer("seven", add_special_tokens=False)["input_ids"]
    parts = [*answer_ids, *continuation.closing, *continuation.tokens]
    assert tokenizer.decode(list(complete.tokens)).endswith(tokenizer.decode(parts))
    assert parts == list(complete.tokens)[-len(parts) :]


# ---------------------------------------------------------------- the order


def numbered(n: int) -> list[Prompt]:
    return [Prompt(i, 0, (i,), str(i)) for i in range(n)]


def test_each_prompt_comes_once_in_an_epoch_and_steps_are_whole() -> None:
    stream = PromptStream(numbered(10), 4, seed=3)
    assert stream.steps(2) == 5
    steps = [stream.take() for _ in range(5)]
    ids = [prompt.id for step in steps for prompt in step]
    assert sorted(ids) == sorted(f"{i}.{visit}" for i in range(10) for visit in (0, 1))
    assert [prompt.visit for prompt in (*steps[0], *steps[1], *steps[2][:2])] == [0] * 10
    assert stream.epoch == 2.0
    assert [p.index for p in PromptStream(numbered(3), 5, seed=3, shuffle=False).take()] == [0, 1, 2, 0, 1]


def test_a_stream_goes_on_where_another_was() -> None:
    """However many were taken at a time: dynamic sampling takes more than a step's."""
    uninterrupted = PromptStream(numbered(7), 3, seed=5).take(30)
    stream = PromptStream(numbered(7), 3, seed=5)
    first = [*stream.take(), *stream.take(2), *stream.take()]
    resumed = PromptStream(numbered(7), 3, seed=5, **stream.state())
    assert [p.id for p in (*first, *resumed.take(22))] == [p.id for p in uninterrupted]
    assert [p.id for p in PromptStream(numbered(7), 3, seed=6).take(7)] != [p.id for p in uninterrupted[:7]]


def test_weights_of_sources_say_how_often_their_prompts_come(tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(4)))
    config = config_of(
        "data.path=null",
        f"data.sources=[{{path: {tmp_path}/a.jsonl, weight: 2}}, {{path: {tmp_path}/b.jsonl, weight: 0.5}}]",
    )
    prompts = load_rl_prompts(config, byte_tokenizer())
    stream = PromptStream(prompts, 5, seed=0)
    assert stream.in_epoch == 10 and stream.steps(2) == 4
    counts = Counter(prompt.text for prompt in stream.take(20))
    assert counts == {**{f"a{i}": 4 for i in range(4)}, **{f"b{i}": 1 for i in range(4)}}


@pytest.mark.parametrize(
    ("family", "prompt", "words"),
    [
        ("llama", 250, r"260 tokens, but the model has 256 positions .*: lower one of the two keys"),
        (
            "phi3_longrope",
            30,
            r"40 tokens, but the model uses another rotary table above 32 .* Lower the sum of the two keys to 32",
        ),
    ],
)
def test_samples_that_may_become_too_long_are_refused(family: str, prompt: int, words: str) -> None:
    shape, keys = tiny_config(family), ("data.path=owner/data", "rollout.max_new_tokens=10")
    check_lengths(config_of(*keys, "rollout.max_prompt_tokens=22"), shape)
    with pytest.raises(UserError, match=words):
        check_lengths(config_of(*keys, f"rollout.max_prompt_tokens={prompt}"), shape)
