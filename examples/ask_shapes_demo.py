"""Quizzes the model of `make demo-vision` on unseen drawings, with transformers alone.

usage: python examples/ask_shapes_demo.py [RUN]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, logging

RUN = ".demo/shapes/run"
SHOWN, NEEDED = 4, 0.9

NEXT = """\
Next:
  {weft} report {run}
      curves of the loss as one HTML page
  {weft} sft your.yaml
      trains your vision model on your images: start from a copy of examples/sft_shapes_cpu.yaml and
      docs/how-to/images.md"""


class Model:
    """The trained model with its tokenizer and image processor, as transformers loads them."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.images = AutoImageProcessor.from_pretrained(path, backend="pil")
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def answer(self, question: list[dict[str, Any]], image: Image.Image) -> str:
        """The greedy answer to a question with one image."""
        seen = self.images(images=image, return_tensors="pt")
        count = int(seen["image_grid_thw"].prod()) // self.images.merge_size**2
        text = self.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt")["input_ids"]
        types = (ids == self.model.config.image_token_id).int()
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=ids, mm_token_type_ids=types, do_sample=False, max_new_tokens=8, **seen
            )  # fmt: skip
        return str(self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def weft_command() -> str:
    """`weft`, or its path: `make demo-vision` installs it into an environment that may not be active."""
    return "weft" if shutil.which("weft") else os.path.relpath(Path(sys.executable).parent / "weft")


def main() -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run = Path(sys.argv[1] if len(sys.argv) > 1 else RUN)
    path = run / "checkpoints" / "latest"
    if not path.is_dir():
        print(f"There is no model at {path}: run `make demo-vision` first.", file=sys.stderr)
        return 2
    model = Model(path)
    rows = [json.loads(line) for line in (run.parent / "held-out.jsonl").read_text(encoding="utf-8").splitlines()]
    right = 0
    for number, row in enumerate(rows):
        question, answer = row["messages"][:1], row["messages"][1]["content"]
        name = question[0]["content"][0]["image"]
        said = model.answer(question, Image.open(run.parent / name))
        right += said == answer
        if number < SHOWN:
            print(f"  {name}: {said:<22} (right: {answer})")
    share = right / len(rows)
    print(f"\n{share:.0%} of {len(rows)} drawings that it has never seen are named, by transformers' generate.\n")
    if share < NEEDED:
        print(f"That is less than the {NEEDED:.0%} expected: something is wrong.", file=sys.stderr)
        return 1
    print(NEXT.format(weft=weft_command(), run=run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
