"""Quizzes the model of `make demo-sft` with transformers alone, because a run folder holds an ordinary model directory.

usage: python examples/ask_chat_demo.py [MODEL] [CHAT]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = ".demo/run/checkpoints/latest"
CHAT = ".demo/chat.jsonl"
QUESTIONS, NEEDED, SHOWN = 40, 36, 3

NEXT = """\
Next:
  {weft} verify examples/sft_chat_cpu.yaml --nproc 2
      proves on this model that two ranks compute what one plain process does
  {weft} sft examples/sft_chat_cpu.yaml model.path=MODEL model.init=pretrained data.path=CHAT.jsonl --dry-run
      shows the mesh, the sharding and every setting for a model and data of your own, without training
  {weft} sft your.yaml
      trains your model; start from a copy of examples/sft_chat_cpu.yaml and its comments"""


def trained_pairs(path: str) -> list[tuple[str, str]]:
    """Questions and answers spread evenly over the file."""
    with open(path, encoding="utf-8") as file:
        chats = [json.loads(line)["messages"] for line in file]
    every = max(1, len(chats) // QUESTIONS)
    return [(question["content"], answer["content"]) for question, answer in chats[::every][:QUESTIONS]]


def ask(model_path: str, questions: list[str], max_new_tokens: int) -> list[str]:
    """One greedy answer for each question, all in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in tokens[:, inputs["input_ids"].shape[1] :]]


def weft_command() -> str:
    """`weft`, or its path: `make demo` installs it into an environment that may not be active."""
    return "weft" if shutil.which("weft") else os.path.relpath(Path(sys.executable).parent / "weft")


def main() -> int:
    model_path, chat_path = (sys.argv[1:] + [MODEL, CHAT][len(sys.argv) - 1 :])[:2]
    if not Path(model_path).is_dir():
        print(f"There is no model at {model_path}: run `make demo-sft` first.", file=sys.stderr)
        return 2
    pairs = trained_pairs(chat_path)
    answers = ask(model_path, [question for question, _ in pairs], max_new_tokens=200)
    for (question, original), answer in list(zip(pairs, answers, strict=True))[:SHOWN]:
        print(f"question: {question}\n  model:     {answer}\n  docstring: {original}\n")
    right = sum(answer == original for (_, original), answer in zip(pairs, answers, strict=True))
    print(f"{right} of {len(pairs)} trained questions are answered word for word, by transformers' generate.")
    print(
        "The model has learnt these answers by heart: it knows nothing else. That is the point of the demo, which shows"
    )
    print("that training, saving and loading work; a useful model starts from pretrained weights.\n")
    if right < min(NEEDED, len(pairs)):
        print(f"That is fewer than the {NEEDED} expected: something is wrong.", file=sys.stderr)
        return 1
    print(NEXT.format(weft=weft_command()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
