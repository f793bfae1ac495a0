"""What ends an answer: which tokens, where they are written, and who stops at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.support.toy_tokenizers import byte_tokenizer, chat, family_tokenizer, write_jsonl
from tests.support.zoo import tiny_config
from weft import cli
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.encode import Encoding
from weft.data.ends import AnswerEnds, answer_ends, taught_ends, template_ends
from weft.engine.batch.document import Document
from weft.launch.options import ExportOptions, MergeOptions
from weft.models import hf
from weft.recipes import export, merge, rl

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
EOS, END = 2, 4  # </s>, <|end|> of the toy tokenizer

# What the models' own generation_config.json names, but for ends of documents.
ENDS = {
    ("gptoss", "gptoss"): ["<|return|>", "<|call|>"], ("glm", "glm4moe"): ["<|user|>", "<|observation|>"],
    ("llama", "llama3_1"): ["<|eot_id|>"], ("gemma", "gemma3"): ["<end_of_turn>"], ("qwen", "qwen3"): ["<|im_end|>"],
    ("phi", "phi3"): ["<|end|>"], ("mistral", "mistral_nemo"): ["</s>"],
    ("qwen", "phi3"): [],  # it spells <|end|>, which nothing can stop at
}  # fmt: skip


@pytest.mark.parametrize(("family", "template"), ENDS)
def test_the_template_ends_answers_with_tokens_that_the_loss_mask_trains(family: str, template: str) -> None:
    tokenizer = family_tokenizer(family, template)
    assert [tokenizer.convert_ids_to_tokens(end) for end in template_ends(tokenizer)] == ENDS[family, template]


def test_the_template_of_the_config_comes_first() -> None:
    tokenizer = byte_tokenizer(None)
    assert template_ends(tokenizer) == []
    assert template_ends(tokenizer, Encoding(chat_template=CHATML)) == [END]
    assert template_ends(tokenizer, Encoding(chat_template="{% for %}")) == []  # whoever uses it says what is wrong


def documents(*trained: tuple[list[int], list[float]]) -> list[Document]:
    return [Document(torch.tensor(ids), torch.tensor(weights)) for ids, weights in trained]


def test_texts_teach_no_end_of_a_template() -> None:
    tokenizer, letter = byte_tokenizer(CHATML), byte_tokenizer().convert_tokens_to_ids("a")
    texts = documents(([letter, letter, EOS], [1.0, 1.0, 1.0]))
    chats = documents(([letter, END, letter], [0.0, 1.0, 0.0]))
    assert taught_ends(texts, tokenizer) == [EOS]
    assert taught_ends([*texts * 3000, *chats * 10], tokenizer) == [END]  # also behind many others
    assert taught_ends(documents(([letter, letter], [0.0, 1.0])), tokenizer) == []
    assert taught_ends(documents(([END, letter], [0.0, 0.0])), tokenizer) == []
    assert taught_ends([], tokenizer) == []


def test_rows_of_ids_teach_what_comes_last() -> None:
    tokenizer, letter = byte_tokenizer(None), byte_tokenizer().convert_tokens_to_ids("a")
    assert taught_ends(documents(([letter, END, letter], [0.0, 1.0, 0.0])), tokenizer) == [END]
    begins = documents(([letter, 3], [1.0, 1.0]), ([3, letter], [1.0, 1.0]))  # a chunk that was cut behind <|start|>
    assert taught_ends(begins, tokenizer) == []


def base_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> str:
    config = tiny_config("llama", vocab_size=264, hidden_size=64, initializer_range=0.1, eos_token_id=EOS)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_what_a_checkpoint_says(tmp_path: Path) -> None:
    path = base_model(tmp_path / "model", byte_tokenizer(CHATML))
    generation = {"eos_token_id": EOS, "temperature": 0.6, "do_sample": True}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    ends = answer_ends(path, byte_tokenizer(), [END])
    assert ends.ids == [EOS, END] and "<|end|>" in ends.lines()[0]
    assert json.loads(ends.files(path)["generation_config.json"]) == generation | {"eos_token_id": [EOS, END]}
    assert answer_ends(path, byte_tokenizer(), [EOS]).files(path) == {}  # the model's own is copied as it is

    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, EOS]}))
    named = answer_ends(path, byte_tokenizer(), [END])
    assert named.taught == () and named.lines() == [] and named.files(path) == {}

    (tmp_path / "model" / "generation_config.json").unlink()  # transformers then reads config.json
    written = json.loads(ends.files(path)["generation_config.json"])
    before = GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(path))
    assert written == {"bos_token_id": before.bos_token_id, "eos_token_id": [EOS, END]} | (
        {} if before.pad_token_id is None else {"pad_token_id": before.pad_token_id}
    )


COMMON = [
    "step.documents=32", "step.max_tokens_per_device=1024", "schedule.name=constant", "schedule.warmup_ratio=0",
    "optimizer.lr=1e-2", "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def chats(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "yes.jsonl", *[chat(("user", word), ("assistant", "ok")) for word in "abcdefgh"] * 4)


def answer_of(path: Path, question: str) -> str:
    """transformers' greedy answer, by the files of a checkpoint alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.slow
@pytest.mark.parametrize("ships", [False, True], ids=["data.chat_template", "template of the tokenizer"])
def test_transformers_ends_the_turn_of_a_base_model_that_learnt_chats(
    ships: bool, chats: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = base_model(tmp_path / "base", byte_tokenizer(CHATML if ships else None))
    (tmp_path / "own.jinja").write_text(CHATML)
    template_words = [] if ships else [f"data.chat_template={tmp_path}/own.jinja"]
    words = [
        f"model.path={base}",
        f"data.path={chats}",
        f"run.dir={tmp_path}/run",
        "train.steps=40",
        *template_words,
        *COMMON,
    ]
    assert cli.main(["sft", *words]) == 0
    assert "answers also end with <|end|>" in capfd.readouterr().out
    latest = tmp_path / "run/checkpoints/latest"
    assert answer_of(latest, "a") == "ok<|end|>"
    assert AutoTokenizer.from_pretrained(latest).eos_token == "</s>"  # documents that are no chats end as before
    exported = export.run(ExportOptions(path=str(tmp_path / "run"), output=str(tmp_path / "again")))
    assert GenerationConfig.from_pretrained(exported).eos_token_id == [EOS, END]


@pytest.mark.slow
def test_adapters_and_what_is_merged_end_the_turn(chats: str, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", byte_tokenizer(CHATML))
    words = [f"model.path={base}", f"data.path={chats}", f"run.dir={tmp_path}/run", "train.steps=1", "lora.rank=2"]
    assert cli.main(["sft", *words, *COMMON]) == 0
    merged = merge.run(MergeOptions(path=str(tmp_path / "run"), output=str(tmp_path / "merged")))
    for folder in (tmp_path / "run/checkpoints/latest", merged):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [EOS, END]

    adapter = (tmp_path / "run/checkpoints/latest").resolve()  # as peft would have saved it beside another template
    (adapter / "generation_config.json").unlink()
    byte_tokenizer(CHATML + "{# another #}").save_pretrained(adapter)
    merged = merge.run(MergeOptions(path=str(adapter), output=str(tmp_path / "theirs")))
    assert GenerationConfig.from_pretrained(merged).eos_token_id == [EOS, END]
    byte_tokenizer(CHATML).save_pretrained(adapter)  # the base's own template: nobody says that it was taught
    merged = merge.run(MergeOptions(path=str(adapter), output=str(tmp_path / "plain")))
    assert GenerationConfig.from_pretrained(merged).eos_token_id == EOS


PROMPTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "a chat": ({"prompt": [{"role": "user", "content": "a"}]}, [EOS, END]),
    "a text": ({"prompt": "a"}, [EOS]),
    "a text that was rendered": ({"prompt": "<|start|>user\na<|end|>\n<|start|>assistant\n"}, [EOS, END]),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("ships", [False, True], ids=["data.chat_template", "template of the tokenizer"])
def test_rollouts_and_their_evaluation_stop_where_the_template_ends(name: str, ships: bool, tmp_path: Path) -> None:
    row, expected = PROMPTS[name]
    base = base_model(tmp_path / "base", byte_tokenizer(CHATML if ships else None))
    (tmp_path / "own.jinja").write_text(CHATML)
    words = [
        f"model.path={base}", f"data.path={write_jsonl(tmp_path / 'p.jsonl', row)}", "rl.reward=[length]",
        "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=4",
        *([] if ships else [f"data.chat_template={tmp_path}/own.jinja"]),
    ]  # fmt: skip
    config = load_config([], words, RlConfig)
    task = rl.read_task(config)
    assert task.ends.ids == expected
    assert list(rl.sampling_of(config, task.ends.ids).ends) == expected
    assert bool(task.ends.files(base)) == (END in expected)


def test_nothing_is_said_of_ends_that_the_model_names() -> None:
    assert AnswerEnds((2, 4)).lines() == []
