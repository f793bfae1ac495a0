"""Quizzes the model of `make demo` on unseen sums, with transformers alone.

usage: python examples/ask_arithmetic_demo.py [RUN] [PROBLEMS]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

RUN, PROBLEMS = ".demo/rl", ".demo/held-out.jsonl"
SHOWN, NEEDED = 4, 0.9

NEXT = """\
Next:
  {weft} rollouts {run}
      shows samples with their rewards
  {weft} report {run}
      curves of reward, KL, lengths and phases as one HTML page
  {weft} rl your.yaml
      trains your model on your rewards: start from a copy of examples/rl_arithmetic_cpu.yaml and
      docs/how-to/write-a-reward.md"""


def solve(model_path: str, prompts: list[str]) -> list[str]:
    """One greedy answer to each, all in one batch: every prompt has six characters."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    inputs = tokenizer(prompts, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(inputs["input_ids"], do_sample=False, max_new_tokens=4, pad_token_id=12)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in tokens[:, inputs["input_ids"].shape[1] :]]


def weft_command() -> str:
    """`weft`, or its path: `make demo` installs it into an environment that may not be active."""
    return "weft" if shutil.which("weft") else os.path.relpath(Path(sys.executable).parent / "weft")


def main() -> int:
    run, path = (sys.argv[1:] + [RUN, PROBLEMS][len(sys.argv) - 1 :])[:2]
    model_path = Path(run) / "checkpoints" / "latest"
    if not model_path.is_dir():
        print(f"There is no model at {model_path}: run `make demo` first.", file=sys.stderr)
        return 2
    problems = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    answers = solve(str(model_path), [problem["prompt"] for problem in problems])
    for problem, answer in list(zip(problems, answers, strict=True))[:SHOWN]:
        print(f"  {problem['prompt']} {answer:<8} (right: {problem['completion']})")
    share = sum(answer == p["completion"] for p, answer in zip(problems, answers, strict=True)) / len(problems)
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before = next(line["eval/accuracy"] for line in lines if "eval/accuracy" in line)
    print(f"\n{share:.0%} of {len(problems)} sums that it has never seen are right, by transformers' generate;")
    print(f"{before:.0%} were, before reinforcement learning. No answer was ever shown to it there: only rewards.\n")
    if share < NEEDED:
        print(f"That is less than the {NEEDED:.0%} expected: something is wrong.", file=sys.stderr)
        return 1
    print(NEXT.format(weft=weft_command(), run=run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
