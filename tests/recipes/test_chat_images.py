"""`weft chat` with images: answers are those of transformers' generate on its own processor's inputs."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.inference.test_generate_images import PICTURES, folder
from tests.support.toy_tokenizers import CHATML, byte_tokenizer
from tests.support.vision_zoo import FAMILIES, vision_tokenizer
from tests.support.zoo import tiny_config
from weft import cli
from weft.config.schema import DataConfig
from weft.data.images import read_images
from weft.errors import UserError
from weft.launch.options import ChatOptions
from weft.models import hf
from weft.recipes.chat import Chat, open_chat
from weft.terminal import clean

NEW = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a.png (40 x 24 pixels), b.png and c.png, and files that are no images that models take."""
    path = tmp_path_factory.mktemp("pictures")
    for name, picture in PICTURES.items():
        picture.save(path / f"{name}.png")
    (path / "text.png").write_text("no image")
    content = (path / "a.png").read_bytes()
    (path / "cut.png").write_bytes(content[: len(content) // 2])
    PICTURES["a"].resize((900, 2)).save(path / "thin.png")
    return path


def opened(path: str, *images: Path) -> Chat:
    paths = tuple(str(image) for image in images)
    return open_chat(ChatOptions(path=path, images=paths, max_new_tokens=NEW, temperature=0.0, device="cpu"))


def message(text: str, images: int = 0) -> dict[str, Any]:
    parts = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
    return {"role": "user", "content": parts if images else text}


class Oracle:
    """transformers' own model and processor."""

    def __init__(self, family: str) -> None:
        self.tokenizer = vision_tokenizer(family)
        images = read_images(folder(family), self.tokenizer, DataConfig(path="unused"))
        assert images is not None
        self.processor = images.processor()._processor
        kind: Any = getattr(transformers, FAMILIES[family].model)
        self.model = kind.from_pretrained(folder(family), dtype=torch.float32).eval()

    @classmethod
    @cache
    def of(cls, family: str) -> Oracle:
        return cls(family)

    def inputs(self, messages: Sequence[dict[str, Any]], names: str) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return dict(self.processor(text=[text], images=[PICTURES[name] for name in names], return_tensors="pt"))

    def answer(self, messages: Sequence[dict[str, Any]], names: str) -> str:
        inputs = self.inputs(messages, names)
        output = self.model.generate(**inputs, do_sample=False, max_new_tokens=NEW,
                                    eos_token_id=self.tokenizer.eos_token_id, pad_token_id=0)  # fmt: skip
        return str(self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_answers_are_those_of_transformers(family: str, files: Path) -> None:
    """With an image, in a turn without one, and in a turn with two more; also of a second conversation. What generate
    is given is compared, too: gemma3 so small says the same of every image."""
    chat, oracle, conversation = opened(folder(family), files / "a.png"), Oracle.of(family), list[dict[str, Any]]()
    passed: dict[str, Any] = {}
    generate = chat.model.generate
    chat.model.generate = lambda **inputs: (passed.update(inputs), generate(**inputs))[1]
    for text, new, names in (("who is it?", "", "a"), ("why?", "", "a"), ("what else?", "bc", "abc")):
        for name in new:
            chat.show(str(files / f"{name}.png"))
        conversation.append(message(text, len(new) + (not conversation)))
        answer = chat.say(text)
        assert answer == oracle.answer(conversation, names) != ""
        for name, value in oracle.inputs(conversation, names).items():
            assert torch.equal(passed[name], value), name
        conversation.append({"role": "assistant", "content": answer})
    chat.begin()
    assert chat.say("who is it?") == conversation[1]["content"]


def test_every_line_of_standard_input_has_the_images(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("who?\nwhere?\n"))
    pictures = ["--image", str(files / "a.png"), "--image", str(files / "c.png")]
    words = ["--max-new-tokens", str(NEW), "--temperature", "0", "--device", "cpu"]
    assert cli.main(["chat", folder("qwen2_5_vl"), *pictures, *words]) == 0
    oracle = Oracle.of("qwen2_5_vl")
    answers = [oracle.answer([message(text, 2)], "ac") for text in ("who?", "where?")]
    assert capsys.readouterr().out == "".join(clean(answer) + "\n" for answer in answers)


def test_a_terminal_takes_images(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors end nothing; an answer that was stopped leaves its images for the next message."""
    shown: list[list[str]] = []

    def generated(self: Chat, inputs: Any) -> str:
        shown.append([image.name for image in (*self.shown_images, *self.waiting)])
        if len(shown) == 1:
            raise KeyboardInterrupt
        return "<|image_pad|>yes"

    (files / "a b.png").write_bytes((files / "b.png").read_bytes())
    lines = [f"/image '{files}/a b.png'", "/image none.png", "/image", "<|image_pad|>", "one", "two", "/help",
             f"/image {files}/a b.png", f"/image file://{files}/c.png", "three", "/new", "four"]  # fmt: skip
    typed = iter([*lines, "/exit"])
    monkeypatch.setattr(Chat, "_generate", generated)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert cli.main(["chat", folder("qwen2_5_vl"), "--image", str(files / "a.png"), "--device", "cpu"]) == 0
    both_images = ["a.png", "a b.png"]
    assert shown == [both_images, both_images, [*both_images, "a b.png", "c.png"], ["a.png"]]
    out = capsys.readouterr().out
    assert "/image PATH adds an image" in out and "(a.png (40 x 24 pixels) is added to your first message)" in out
    assert "(a b.png (32 x 32 pixels) is added to your next message)" in out
    assert "error: /image (" in out and "none.png): there is no such file.\n" in out
    assert "error: /image: write the path of an image" in out and "error: the message: contains <|image_pad|>" in out


REFUSED = {
    "none.png": r"--image \(.*none\.png\): there is no such file\.$",
    "text.png": r"text\.png\): is not a readable image \(formats: .*\)\.$",
    "cut.png": r"cut\.png\): is damaged: image file is truncated",
    "thin.png": r"thin\.png\): the model's processor refuses images of 900 x 2 pixels: ",
    ".": r"is a directory, not an image",
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name: str, files: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        opened(folder("qwen2_5_vl"), files / name)


def test_urls_are_refused(files: Path) -> None:
    options = ChatOptions(path=folder("qwen2_5_vl"), images=("https://host/cat.jpg",), device="cpu")
    with pytest.raises(UserError, match=r"--image: https://host/cat.jpg is a URL.* download it"):
        open_chat(options)


def test_models_without_images_say_so(files: Path, tmp_path: Path) -> None:
    """Of text alone, without a processor, without a chat template, and with one that has no place for images."""
    config = tiny_config("llama", vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(tmp_path / "text")
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "text")
    with pytest.raises(UserError, match=r"--image: .*text is a text-only model: .* a vision model"):
        opened(str(tmp_path / "text"), files / "a.png")
    path = shutil.copytree(folder("qwen2_5_vl"), tmp_path / "vision")
    blind = path / "chat_template.jinja"
    blind.write_text(CHATML)
    with pytest.raises(UserError, match="writes 0 placeholders"):
        opened(str(path), files / "a.png").say("who?")
    blind.unlink()
    with pytest.raises(UserError, match="has no chat template, which images need"):
        opened(str(path), files / "a.png")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"accepts no images: the image processor of .*vision cannot be created"):
        opened(str(path), files / "a.png")
    assert opened(str(path)).say("who?")


def test_an_adapter_of_a_vision_model_sees_images(files: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    oracle = Oracle("qwen2_5_vl")
    adapter = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    oracle.model = peft.get_peft_model(oracle.model, adapter).eval()
    oracle.model.save_pretrained(tmp_path)
    vision_tokenizer("qwen2_5_vl").save_pretrained(tmp_path)
    plain = Oracle.of("qwen2_5_vl").answer([message("who?", 1)], "a")
    assert opened(str(tmp_path), files / "a.png").say("who?") == oracle.answer([message("who?", 1)], "a") != plain
