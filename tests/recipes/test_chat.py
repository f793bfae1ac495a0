"""`weft chat`: which model it takes, what it asks of it, and that the answers are transformers' own."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.toy_tokenizers import CHATML, byte_tokenizer
from tests.support.zoo import tiny_config
from weft import cli
from weft.errors import UserError
from weft.launch.options import ChatOptions
from weft.models import hf
from weft.recipes.chat import Chat, end_tokens, find_model, open_chat, prompt_text

ASKS = CHATML + "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 2 and 4, which are two random models."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        config = tiny_config("llama", vocab_size=264, initializer_range=0.2)
        hf.build_random(config, dtype=torch.float32, attention="eager", seed=step).save_pretrained(checkpoint)
        byte_tokenizer(ASKS).save_pretrained(checkpoint)
    (folder / "config.yaml").write_text("")
    return folder


def expected(path: Path, prompt: str, tokens: int) -> str:
    """transformers' greedy answer to a rendered prompt."""
    tokenizer, model = byte_tokenizer(), AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("</s>", "<|end|>")]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                         eos_token_id=ends, pad_token_id=0)  # fmt: skip
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_every_line_of_standard_input_is_answered_on_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nyou\n"))
    words = ["chat", str(run), "--system", "be", "--max-new-tokens", "6", "--temperature", "0", "--device", "cpu"]
    assert cli.main(words) == 0
    prompts = [f"<|start|>system\nbe<|end|>\n<|start|>user\n{t}<|end|>\n<|start|>assistant\n" for t in ("hi", "you")]
    answers = [expected(run / "checkpoints" / "step-000004", prompt, 6) for prompt in prompts]
    assert capsys.readouterr().out == "".join(answer + "\n" for answer in answers)


GENERATION: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4}, "several answers": {"num_return_sequences": 3, "do_sample": True},
    "a dict": {"return_dict_in_generate": True}, "texts that end it": {"stop_strings": ["zzz"]},
}  # fmt: skip


@pytest.mark.parametrize("name", GENERATION)
def test_what_models_say_of_generation_does_not_end_it(name: str, run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION[name]))
    chat = open_chat(ChatOptions(path=str(folder), max_new_tokens=3, temperature=0.0, device="cpu"))
    assert isinstance(chat.say("a"), str) and len(chat.messages) == 2


HOSTILE: dict[str, dict[str, Any]] = {
    "a penalty that is text": {"repetition_penalty": "x"}, "no words": {"bad_words_ids": 7},
    "code from elsewhere": {"dola_layers": "low"}, "a constraint": {"constraints": [1]},
    "a length": {"min_new_tokens": []}, "a token": {"forced_eos_token_id": 1.5},
    "a decay": {"exponential_decay_length_penalty": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_models_say_of_generation_is_refused_in_a_sentence(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(HOSTILE[name]))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert cli.main(["chat", str(folder), "--max-new-tokens", "4", "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message and str(folder) in message


def test_turns_follow_on_each_other_until_a_new_beginning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = open_chat(ChatOptions(path=str(run), step=2, max_new_tokens=5, temperature=0.0, device="cpu"))
    first = chat.say("a")
    second = chat.say("b")
    turns = "".join(
        f"<|start|>{role}\n{t}<|end|>\n" for role, t in (("user", "a"), ("assistant", first), ("user", "b"))
    )
    assert second == expected(run / "checkpoints" / "step-000002", turns + "<|start|>assistant\n", 5)
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]
    chat.begin()
    assert chat.say("a") == first


def test_a_terminal_has_a_conversation(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversations: list[list[str]] = []

    def say(self: Chat, text: str) -> str:
        if text == "stop":
            raise KeyboardInterrupt
        self.messages.append({"role": "user", "content": text})
        conversations.append([message["content"] for message in self.messages])
        return ""

    typed = iter(["a", "", "b", "/new", "stop", "/quitt", "/save x", "c", "/quit", "never"])
    monkeypatch.setattr(Chat, "say", say)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert cli.main(["chat", str(run), "--device", "cpu"]) == 0
    assert conversations == [["a"], ["a", "b"], ["c"]]
    out = capsys.readouterr().out
    assert "step-000004 on cpu" in out and "/exit or Ctrl-D ends" in out and "(stopped)" in out
    assert "/quitt is not a command, and weft did not send it" in out and "/save is not a command" in out


def test_which_model(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(str(run), None) == str(run / "checkpoints" / "step-000004")
    assert find_model(str(run), 2) == str(run / "checkpoints" / "step-000002")
    assert find_model(str(run / "checkpoints" / "step-000002"), None) == str(run / "checkpoints" / "step-000002")
    assert find_model("Qwen/Qwen3-0.6B", None) == "Qwen/Qwen3-0.6B"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert find_model(str(tmp_path / "adapter"), None) == str(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"--step 3: .* has checkpoints of steps 2, 4"):
        find_model(str(run), 3)
    with pytest.raises(UserError, match="selects a checkpoint of a run folder"):
        find_model(str(run / "checkpoints" / "step-000002"), 2)
    with pytest.raises(UserError, match="is not a folder"):
        find_model(str(tmp_path / "none"), None)
    with pytest.raises(UserError, match=r"contains no config.json"):
        find_model(str(tmp_path), None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="adapter/none is not a folder"):  # the hub is not asked: the folder is here
        find_model("adapter/none", None)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match="no complete checkpoint yet"):
        find_model(str(tmp_path), None)


@pytest.mark.parametrize("template", [ASKS, CHATML])
def test_the_answer_begins_where_the_template_says(template: str) -> None:
    prompt = prompt_text(byte_tokenizer(template), [{"role": "user", "content": "a"}])
    assert prompt == "<|start|>user\na<|end|>\n<|start|>assistant\n"


def test_a_rendered_text_has_no_second_bos_where_there_is_no_template(run: Path) -> None:
    chat = open_chat(ChatOptions(path=str(run), device="cpu"))
    chat.tokenizer = byte_tokenizer(None, bos=True)
    for text in ("a", "<s>a"):
        inputs = chat._inputs(text, [], ())
        assert chat.tokenizer.decode(inputs["input_ids"][0]) == "<s>a" and inputs["attention_mask"].sum() == 2


def test_what_ends_an_answer() -> None:
    tokenizer = byte_tokenizer()
    end, eos = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id
    assert end_tokens(tokenizer, None) == [eos, end]
    assert end_tokens(tokenizer, [7, end]) == [7, end, eos]
    assert end_tokens(byte_tokenizer(None), 7) == [7, eos]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"temperature": 0.0}, {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}),
        ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
    ],
)
def test_temperature(run: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
    from weft.recipes.chat import _settings

    assert _settings(ChatOptions(path=str(run), **options)) == {"max_new_tokens": 512, **settings}
