"""Writes the data of `make demo`: additions of two numbers, a tokenizer of 24 tokens, and the config of a small model.

A problem is `47+85=`, and its answer `2+30+100`: ones, tens and hundreds of 132, in the order of addition. Models of
this size learn this slowly. The script downloads nothing.

    .demo/additions.jsonl   problems and answers for training
    .demo/held-out.jsonl    300 problems for evaluation only
    .demo/adder             a tokenizer and the config of a 0.8M-parameter Qwen3

usage: python examples/make_arithmetic_demo.py [OUT]
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

HELD_OUT = 300
PAD, END = "<pad>", "<end>"
LARGER = [*(f"+{tens}0" for tens in range(1, 10)), "+100"]  # in answers, one token each


def make_tokenizer(folder: Path) -> None:
    """One token per character of a problem, and one each for ones, tens and hundreds of an answer."""
    vocabulary = {text: place for place, text in enumerate([*"0123456789+=", PAD, END, *LARGER])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\+(100|[1-9]0)(?![0-9=])|."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END).save_pretrained(str(folder))


def make_model(folder: Path) -> None:
    """Only the config: training draws the weights (`model.init: random`)."""
    Qwen3Config(
        vocab_size=24, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        eos_token_id=13, pad_token_id=12, bos_token_id=None, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(str(folder))  # fmt: skip


def problems() -> list[tuple[int, int]]:
    """All pairs of two-digit numbers, shuffled with a fixed seed."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return pairs


def answer(a: int, b: int) -> str:
    """The sum as ones, tens and hundreds: 132 is `2+30+100`, and 107 `7+100`."""
    total = a + b
    tens, hundreds = total // 10 % 10 * 10, total // 100 * 100
    return "+".join([str(total % 10), *(str(part) for part in (tens, hundreds) if part)])


def write(path: Path, pairs: Sequence[tuple[int, int]]) -> None:
    """`prompt` and `completion` are what fine-tuning reads; a reward is given `completion` as a column."""
    rows = ({"prompt": f"{a}+{b}=", "completion": answer(a, b)} for a, b in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(out: Path) -> None:
    """All of it."""
    model = out / "adder"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    make_tokenizer(model)
    make_model(model)
    pairs = problems()
    write(out / "held-out.jsonl", pairs[:HELD_OUT])
    write(out / "additions.jsonl", pairs[HELD_OUT:])
    print(f"wrote {len(pairs) - HELD_OUT} additions, {HELD_OUT} to hold out, and a model to be trained, into {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo"))
