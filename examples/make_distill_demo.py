"""Writes the data of `make demo-distill`: those of `make demo`, and the config of a student that is half as deep as
the model that becomes its teacher, and of another family. The script downloads nothing.

    .demo/additions.jsonl, .demo/held-out.jsonl, .demo/adder   as make_arithmetic_demo.py writes them
    .demo/student                                              the same tokenizer and the config of a small Llama

usage: python examples/make_distill_demo.py [OUT]
"""

from __future__ import annotations

import sys
from pathlib import Path

import make_arithmetic_demo
from transformers import LlamaConfig


def main(out: Path) -> None:
    """All of it."""
    make_arithmetic_demo.main(out)
    student = out / "student"
    make_arithmetic_demo.make_tokenizer(student)
    LlamaConfig(
        vocab_size=24, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        eos_token_id=13, pad_token_id=12, bos_token_id=None, architectures=["LlamaForCausalLM"],
    ).save_pretrained(str(student))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo"))
