"""Writes the data of `make demo-vision`: drawings of coloured shapes, and the config of a small vision model.

    .demo/shapes/*.png             drawings of 32 x 32 pixels: a shape at a random position on a noisy background
    .demo/shapes/train.jsonl       questions with a drawing, and answers such as "a green triangle"
    .demo/shapes/held-out.jsonl    200 drawings for evaluation only
    .demo/shapes/shown.jsonl       the first 8 of them, shown with the answers in the report
    .demo/shapes/model             tokenizer, image processor and config of a 0.6M-parameter Qwen2.5-VL

usage: python examples/make_shapes_demo.py [OUT]
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig

DRAWINGS, HELD_OUT, SHOWN, SIDE = 4000, 200, 8, 32
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTION = "what is drawn ?"
SPECIAL = (
    "<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def draw(colour: str, shape: str, source: random.Random) -> Image.Image:
    """One drawing, of 32 x 32 pixels."""
    ground = [tuple(source.randrange(0, 40) for _ in range(3)) for _ in range(SIDE * SIDE)]
    image = Image.new("RGB", (SIDE, SIDE))
    image.putdata(ground)
    size = source.randrange(16, 25)
    x, y = (source.randrange(0, SIDE - size) for _ in range(2))
    pen, fill = ImageDraw.Draw(image), COLOURS[colour]
    if shape == "circle":
        pen.ellipse((x, y, x + size, y + size), fill=fill)
    elif shape == "square":
        pen.rectangle((x, y, x + size, y + size), fill=fill)
    elif shape == "triangle":
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=fill)
    else:
        third = size // 3
        pen.rectangle((x + third, y, x + 2 * third, y + size), fill=fill)
        pen.rectangle((x, y + third, x + size, y + 2 * third), fill=fill)
    return image


def make_model(folder: Path) -> None:
    """Tokenizer, processor and config; training draws the weights (`model.init: random`)."""
    words = [" ", "user", "assistant", "a", *QUESTION.split(), *COLOURS, *SHAPES]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*SPECIAL, *words])}, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split(Regex(" |[^ ]+"), "isolated"), decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
            "tie_word_embeddings": True, "initializer_range": 0.1, "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<pad>"],
        },
        vision_config={
            "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 96, "window_size": 32,
            "fullatt_block_indexes": [1, 2], "initializer_range": 0.1,
        },
        tie_word_embeddings=True, initializer_range=0.1,
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    ).save_pretrained(str(folder))  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 4,
        "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": SIDE * SIDE},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def write(path: Path, numbers: Sequence[int], source: random.Random) -> None:
    """Writes one image per number, and a file of rows with question and answer."""
    rows = []
    for number in numbers:
        colour, shape = source.choice(list(COLOURS)), source.choice(SHAPES)
        name = f"{number:04}.png"
        draw(colour, shape, source).save(path.parent / name)
        question = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
        answer = f"a {colour} {shape}"
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(out: Path) -> None:
    """All of it."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "model").mkdir(parents=True)
    make_model(out / "model")
    source = random.Random(0)
    write(out / "train.jsonl", range(DRAWINGS), source)
    write(out / "held-out.jsonl", range(DRAWINGS, DRAWINGS + HELD_OUT), source)
    shown = (out / "held-out.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:SHOWN]
    (out / "shown.jsonl").write_text("".join(shown), encoding="utf-8")
    print(f"wrote {DRAWINGS} drawings, {HELD_OUT} to hold out, and a model to be trained, into {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo/shapes"))
