"""The embedded engine answers as transformers' own model does, and prompts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from weft.data.encode import Encoding
from weft.data.ends import configured_ends
from weft.data.messages import MessageRules
from weft.data.prompts import load_prompts
from weft.engine.batch.document import Document
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.parallel.mesh import local_shard
from weft.verify.adapter import randomize_adapters

PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3], [11, 12] * 10, [3, 100, 50]]
ENDS = (2, 17, 40)
# Widths of which tp takes halves in whole blocks of 64.
WIDE: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32},
}


def answers(path: str, mesh: str) -> tuple[list[list[Completion]], bool]:
    """Greedy, sampled twice with one seed and once with another; and whether nothing of it is left behind."""
    engine = open_engine(path, mesh)
    before = torch.get_rng_state()
    embedded, is_last_rank = EmbeddedEngine(engine), torch.distributed.get_rank() == engine.ranks.world - 1
    embedded.wake(is_last_rank)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.01)  # neither the weights of the files nor those of the first time
    embedded.wake(is_last_rank, version=7)
    completions = []
    if embedded.model is not None:
        for temperature, seed in ((0.0, 1), (1.0, 1), (1.0, 1), (1.0, 2)):
            sampling = SamplingParams(12, temperature, ends=ENDS)
            requests = [Request(str(n), tuple(prompt), (seed,), sampling) for n, prompt in enumerate(PROMPTS)]
            completions.append([completion for (completion,) in embedded.generate(requests)])
    copied = [] if embedded.model is None else [p.untyped_storage() for p in embedded.model.parameters()]
    copy_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in copied}.values())
    freed = embedded.sleep() == copy_bytes and not any(storage.nbytes() for storage in copied)
    return completions, freed and torch.equal(before, torch.get_rng_state())


@pytest.mark.covers("eval.temperature")
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param("llama_tied", "2", marks=pytest.mark.table),
        pytest.param("qwen3_moe", "1", marks=pytest.mark.table),
        ("lfm2", "2"),
        ("gpt_oss", "1"),
        ("phi3_longrope", "1"),
        ("llama_tied", "tp2"),
        ("qwen3", "tp4"),
        ("qwen3_moe", "2xtp2"),
        pytest.param("qwen3_moe", "4ep2", marks=pytest.mark.table),
        ("llama_tied", "pp2x2"),
        ("qwen3_moe", "pp2xep2"),
    ],
)
def test_answers_are_those_of_a_plain_model(family: str, mesh: str) -> None:
    path = saved_model(family)
    by_rank = run(world_of(mesh), answers, path, mesh)
    assert all(clean for _, clean in by_rank) and all(not completions for completions, _ in by_rank[:-1])
    greedy, first, same, other_seed = by_rank[-1][0]
    assert first == same != other_seed
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.01)
    for prompt, completion in zip(PROMPTS, greedy, strict=True):
        out = plain.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        finish = "end" if out[-1] in ENDS else "length"
        assert (completion.tokens, completion.finish) == (tuple(out), finish)
        assert completion.versions == ((7, len(out)),)


def logprobs_of_both(path: str, mesh: str, sections: Sections) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one completion, with adapters that do something: as the trainer reads them, and as they were sampled."""
    engine = open_engine(path, mesh, **sections)
    embedded = EmbeddedEngine(engine)
    embedded.wake()  # so that the next time brings what has changed
    randomize_adapters(engine)
    embedded.wake()
    request = Request("a", tuple(PROMPTS[2]), (3,), SamplingParams(9, 1.0))
    ((completion,),) = embedded.generate([request])
    tokens = torch.tensor([*request.tokens, *completion.tokens])
    document = Document(tokens, torch.ones(len(tokens)))
    plan = engine.plan(engine.planner.metadata([document]))
    readout = engine.readout(plan, dict.fromkeys(engine.planner.local_documents(plan), document))
    sampled = torch.tensor(completion.logprobs)
    return (readout[0]["logprob"][-len(sampled) :], sampled) if readout else (torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize(
    ("family", "mesh", "lora"),
    [
        ("llama", "2", {"rank": 4, "modules_to_save": ("lm_head",)}),
        ("qwen3", "2", {"rank": 4, "targets": ("q_proj", "embed_tokens")}),  # its head is tied to the embedding
        ("qwen3_moe", "2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj")}),
        ("qwen3_moe", "2xtp2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj", "embed_tokens")}),
        ("qwen3_moe", "pp2xep2", {"rank": 2, "targets": ("all-linear", "mlp.experts.gate_up_proj")}),
        ("qwen3", "pp2", {"rank": 4, "modules_to_save": ("lm_head",)}),
        ("llama", "2", {"rank": 4, "base": "nf4", "dora": True}),
        ("llama", "tp2", {"rank": 4, "base": "int8", "init": "pissa"}),
        ("llama", "1", {"rank": 4, "base": "nf4", "modules_to_save": ("lm_head",)}),
        ("qwen3", "2", {"rank": 4, "targets": ("q_proj", "embed_tokens", "lm_head"), "sampling": "separate"}),
        ("qwen3_moe", "ep2xtp2", {"rank": 2, "base": "nf4", "targets": ("all-linear", "mlp.experts.gate_up_proj")}),
        ("llama", "pp2", {"rank": 4, "base": "nf4", "rslora": True, "init": "olora"}),
        pytest.param("qwen3_moe", "ep2", {"rank": 2, "base": "fp8"}, marks=pytest.mark.table),
        pytest.param("qwen3_moe", "pp2xep2", {"rank": 2, "base": "fp8"}, marks=pytest.mark.table),
        pytest.param("llama", "pp2", {"rank": 4, "base": "nf4", "init": "loftq"}, marks=pytest.mark.table),
        pytest.param("llama", "tp2", {"rank": 4, "base": "nf4", "sampling": "merged"}, marks=pytest.mark.table),
        pytest.param("llama", "2", {"rank": 4, "dora": True, "sampling": "separate"}, marks=pytest.mark.table),
        pytest.param(
            "qwen3",
            "2xtp2",
            {"rank": 4, "modules_to_save": ("embed_tokens",), "sampling": "separate"},
            marks=pytest.mark.table,
        ),
    ],
)
def test_the_copy_has_the_adapters(family: str, mesh: str, lora: dict[str, Any]) -> None:
    path = saved_model(family, **(WIDE[family] if "base" in lora else {}))
    for trained, copy in run(world_of(mesh), logprobs_of_both, path, mesh, {"lora": lora}):
        torch.testing.assert_close(copy, trained, rtol=0, atol=2e-5)


def memory_of_the_copy(path: str, mesh: str, sections: Sections) -> dict[str, Any]:
    """Bytes that the copy has for itself, that a second time copies, and that remain on the device in sleep."""
    engine = open_engine(path, mesh, **sections)
    randomize_adapters(engine)
    embedded = EmbeddedEngine(engine)
    first, second = embedded.wake(), embedded.wake()
    engine.sleep("parameters")
    requests = [Request("a", (5, 6, 7), (1,), SamplingParams(8, 1.0))]
    answers = [embedded.generate(requests)]
    freed, storages = embedded.sleep(), [local_shard(p).untyped_storage() for p in engine.module.parameters()]
    stays = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    engine.wake()
    third = embedded.wake()
    answers.append(embedded.generate(requests))
    assert answers[0] == answers[1]
    whole = sum(parameter.numel() for parameter in engine.whole_parameters().values())
    return {"first": first, "second": second, "third": third, "freed": freed, "stays": stays, "all": whole}


@pytest.mark.covers("lora.sampling")
@pytest.mark.parametrize(("mesh", "form"), [("1", "nf4"), ("2x1", "compute"), ("2", "nf4"), ("tp2", "int8")])
def test_a_copy_holds_the_base_as_it_is_stored(mesh: str, form: str) -> None:
    """Where nothing is sharded it has adapters alone, and reads the trainer's base, which stays while that sleeps."""
    path = saved_model("llama", **WIDE["llama"])
    lora = {"rank": 4, "base": form, "sampling": "separate"}
    for facts in run(world_of(mesh), memory_of_the_copy, path, mesh, {"lora": lora}):
        adapters = facts["second"]
        assert adapters[0] == 2 * 14  # A and B of seven layers in each of two
        shares = mesh in ("1", "2x1")
        assert facts["first"] == facts["third"] and (facts["first"] == adapters) == shares
        assert (facts["stays"] > facts["all"] / 4) == shares  # norms are on every rank with mesh.tp
        assert facts["freed"] <= facts["first"][1]
    plain, *_ = run(1, memory_of_the_copy, path, "1", {"lora": lora | {"sampling": "merged"}})
    assert plain["first"] == plain["second"] and plain["stays"] == 0
    if form == "nf4":
        assert adapters[1] < facts["first"][1] <= 0.5 * plain["first"][1] or shares


def test_answers_end_where_model_and_tokenizer_say(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved_model("llama"))
    model.generation_config = transformers.GenerationConfig(eos_token_id=[7, 9])
    model.save_pretrained(path)
    assert configured_ends(str(path), byte_tokenizer()) == [2, 7, 9]  # 2: of config.json, and of the tokenizer
    (path / "generation_config.json").unlink()
    assert configured_ends(str(path), byte_tokenizer()) == [2]


# ---------------------------------------------------------------- prompts


def test_prompts_of_a_list_are_what_a_user_says_or_text_to_continue() -> None:
    tokenizer = byte_tokenizer()
    (prompt,) = load_prompts(["ab"], tokenizer)
    rendered = tokenizer.decode(prompt.tokens)
    assert prompt.text == "ab" and rendered == "<|start|>user\nab<|end|>\n<|start|>assistant\n"
    (text,) = load_prompts(["ab"], byte_tokenizer(None, bos=True))
    assert text.tokens == (1, *tokenizer("ab")["input_ids"])


def test_prompts_are_rendered_by_the_template_of_the_data() -> None:
    template = "{{ day }} {% for m in messages %}{{ m['content'] }}{% endfor %}{{ '>' if add_generation_prompt }}"
    encoding = Encoding(chat_template=template, template_kwargs={"day": "today"})
    (prompt,) = load_prompts(["ab"], byte_tokenizer(None), encoding)
    assert byte_tokenizer().decode(prompt.tokens) == "today ab>"


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """A file of training data serves: answers at the end are left out, and so is what follows a prompt."""
    turns = chat(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    path = write_jsonl(
        tmp_path / "p.jsonl", turns, "", {"prompt": "ab", "completion": "c"}, {"prompt": turns["messages"]}
    )
    first, second, third = load_prompts(path, byte_tokenizer())
    assert first.text == "system: s\nuser: a\nassistant: b\nuser: c" and first == third
    assert byte_tokenizer().decode(first.tokens).endswith("<|start|>user\nc<|end|>\n<|start|>assistant\n")
    assert second.text == "ab" and byte_tokenizer().decode(second.tokens) == "ab"


def test_prompts_have_the_roles_of_the_data(tmp_path: Path) -> None:
    conversation = {"messages": [{"from": "visitor", "value": "a"}, {"from": "clerk", "value": "b"}]}
    path = write_jsonl(tmp_path / "p.jsonl", conversation, {"prompt": [{"role": "visitor", "content": "a"}]})
    roles = {"visitor": "user", "clerk": "assistant"}
    first, second = load_prompts(path, byte_tokenizer(), rules=MessageRules(roles=roles))
    (plain,) = load_prompts(["a"], byte_tokenizer())
    (tmp_path / "p.txt").write_text("\ufeffa\r\n\n{b\n", encoding="utf-8")
    assert [prompt.text for prompt in load_prompts(f"{tmp_path}/p.txt", byte_tokenizer())] == [
        prompt.text for prompt in load_prompts(["a", "{b"], byte_tokenizer())
    ]
    assert first == second == plain


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", r"p\.jsonl:2: is not valid JSON"),
    "a list": ("[]", r"p\.jsonl:2: is not a JSON object"),
    "another key": ({"question": "a"}, r"p\.jsonl:2: has `question`; it needs `messages`"),
    "an empty text": ({"prompt": ""}, r"p\.jsonl:2: is empty"),
    "no messages": ({"messages": []}, r"p\.jsonl:2: `messages` is empty"),
    "answers alone": (chat(("assistant", "a")), r"p\.jsonl:2: contains no message to answer"),
    "a message of another shape": ({"messages": ["a"]}, r"p\.jsonl:2: message 1 must be an object"),
    "a role that the template does not know": (chat(("tool", "a")), r"p\.jsonl:2: .* refused this document: no tools"),
    "a role that weft does not know": (
        chat(("human", "a")),
        r"p\.jsonl:2: message 1: .* Set 'data\.roles={human: user}'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_is_named(name: str, tmp_path: Path) -> None:
    value, expected = BAD[name]
    path = write_jsonl(tmp_path / "p.jsonl", {"prompt": "fine"}, value)
    template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match=expected):
        load_prompts(path, byte_tokenizer(template))


def test_a_chat_without_a_template_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template. Write `prompt`"):
        load_prompts(write_jsonl(tmp_path / "p.jsonl", chat(("user", "a"))), byte_tokenizer(None))
    with pytest.raises(UserError, match="contains no prompts"):
        load_prompts(write_jsonl(tmp_path / "empty.jsonl"), byte_tokenizer())
