"""Writes the data of `make demo-reward`: letters in two styles, a preference for one of them, and the config of a small
model.

A prompt asks for a letter about some words, `to anna : rain tea ->`, and an answer has the words in order between a
greeting and an end: polite, `dear anna rain tea regards`, or blunt, `hey anna rain tea bye`. The script downloads
nothing.

    .demo/style/letters.jsonl      letters of both styles, which the model is taught first
    .demo/style/preferences.jsonl  pairs: the polite letter is preferred to the blunt one
    .demo/style/held-out.jsonl     200 pairs for evaluation only
    .demo/style/requests.jsonl     prompts for reinforcement learning
    .demo/style/writer             a tokenizer and the config of a 0.1M-parameter Qwen3

usage: python examples/make_style_demo.py [OUT]
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

PAD, END = "<pad>", "<end>"
NAMES = ("anna", "ben", "carla", "david", "emma", "felix", "greta", "hugo")
WORDS = ("rain", "tea", "book", "train", "lake", "snow", "bread", "song", "cat", "road", "lamp", "boat")
STYLES = {"polite": ("dear", "regards"), "blunt": ("hey", "bye")}
VOCABULARY = (PAD, END, "to", ":", "->", *NAMES, *WORDS, *(word for ends in STYLES.values() for word in ends))


def make_model(folder: Path) -> None:
    """A tokenizer of words, and the config of a model: training draws the weights (`model.init: random`)."""
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(VOCABULARY)}, unk_token=PAD))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    words.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words with spaces
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END).save_pretrained(str(folder))
    Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(str(folder))  # fmt: skip


def letter(name: str, words: Iterable[str], style: str) -> str:
    """An answer in a style."""
    greeting, end = STYLES[style]
    return f" {greeting} {name} {' '.join(words)} {end}"


def requests(count: int, seed: int) -> list[tuple[str, str, str, str]]:
    """(prompt, name, polite answer, blunt answer). The words of a blunt answer differ from those of a polite one in
    half of them, so that a score cannot count on equal lengths."""
    source, rows = random.Random(seed), []
    for _ in range(count):
        name, words = source.choice(NAMES), source.sample(WORDS, source.randint(1, 4))
        others = words if source.random() < 0.5 else source.sample(WORDS, source.randint(1, 4))
        prompt = f"to {name} : {' '.join(words)} ->"
        rows.append((prompt, name, letter(name, words, "polite"), letter(name, others, "blunt")))
    return rows


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(out: Path) -> None:
    """All of it."""
    model = out / "writer"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    make_model(model)
    taught, preferred, held_out, asked = (requests(count, seed) for seed, count in enumerate((1200, 600, 200, 200)))
    letters = [{"prompt": p, "completion": answer} for p, _, *answers in taught for answer in answers]
    write(out / "letters.jsonl", letters)
    for name, rows in (("preferences", preferred), ("held-out", held_out)):
        write(out / f"{name}.jsonl", ({"prompt": p, "chosen": a, "rejected": b} for p, _, a, b in rows))
    write(out / "requests.jsonl", ({"prompt": p} for p, *_ in asked))
    print(f"wrote {len(letters)} letters, {len(preferred)} preferences, {len(held_out)} to hold out, and a model to be")
    print(f"trained, into {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo/style"))
