"""Makes the inputs of the benchmarks: real text, a small model with weights, no download. The same at every call.

    OUT/model             a Qwen3 of 5.2M parameters with random weights (fp32), and its tokenizer of 4096 tokens
    OUT/chat.jsonl        (i) the docstrings of Python's standard library as question and answer
    OUT/lognormal.jsonl   (ii) the same text in `text` documents of log-normal length: mean 400, at most 4096 tokens

usage: python benchmarks/inputs.py OUT
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from make_chat_demo import chat, docstrings, question, small_qwen3, train_tokenizer

LONGEST = 4096  # tokens
MEAN, SIGMA, DOCUMENTS = 400, 1.1, 512  # of the log-normal lengths
SHORTEST_ANSWER, LONGEST_ANSWER = 20, 2500  # characters


def chats(texts: dict[str, str]) -> list[dict[str, Any]]:
    """One question and answer for each docstring, shuffled."""
    rows = [chat(question(name), text[:LONGEST_ANSWER]) for name, text in texts.items() if len(text) >= SHORTEST_ANSWER]
    random.Random(0).shuffle(rows)
    return rows


def lognormal_lengths() -> list[int]:
    """The quantiles of the distribution, shuffled: no draw decides how long the tail is."""
    normal = statistics.NormalDist(math.log(MEAN) - SIGMA**2 / 2, SIGMA)
    lengths = [math.exp(normal.inv_cdf((i + 0.5) / DOCUMENTS)) for i in range(DOCUMENTS)]
    random.Random(0).shuffle(lengths)
    return [min(LONGEST, max(2, round(length))) for length in lengths]


def lognormal_texts(texts: dict[str, str], tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, str]]:
    """Pieces of the text laid end to end, again from the start where it does not suffice."""
    stream: list[int] = tokenizer("\n\n".join(texts.values()), verbose=False)["input_ids"]
    position = 0
    for length in lognormal_lengths():
        tokens = length - 1  # training appends the end-of-text token
        position = position if position + tokens <= len(stream) else 0
        text = tokenizer.decode(stream[position : position + tokens])
        position += tokens
        while len(tokenizer(text, verbose=False)["input_ids"]) >= LONGEST:  # the text at a cut may tokenise anew
            text = text[:-1]
        yield {"text": text}


def describe(name: str, lengths: list[int]) -> str:
    return (
        f"{name}: {len(lengths)} documents, {sum(lengths)} tokens; length mean {statistics.mean(lengths):.0f}, "
        f"median {statistics.median(lengths):.0f}, longest {max(lengths)}"
    )


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path) -> None:
    """Writes everything into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    texts = docstrings()
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(out / "model")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(small_qwen3(tokenizer, positions=LONGEST))
    model.save_pretrained(out / "model")
    rows, pieces = chats(texts), list(lognormal_texts(texts, tokenizer))
    write(out / "chat.jsonl", rows)
    write(out / "lognormal.jsonl", pieces)
    encoded = tokenizer.apply_chat_template([row["messages"] for row in rows], return_dict=True)["input_ids"]
    print(describe("chat.jsonl", [len(ids) for ids in encoded]))
    print(describe("lognormal.jsonl", [len(tokenizer(row["text"])["input_ids"]) + 1 for row in pieces]))
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    make(Path(sys.argv[1]))
