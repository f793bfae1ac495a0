"""Makes the inputs of benchmarks/rl.py: the demo's additions and its 0.8M Qwen3, with weights whose completions are
uneven in length. The same at every call.

    OUT/additions.jsonl   problems of `make demo`
    OUT/adder             the model, untrained; its tokenizer of 14 characters

Three programs that draw with generators of their own cannot be made to draw the same lengths, but they can be given a
model that says itself when to end, and how likely: then lengths have the same distribution, and each program ends a
completion in its own way, as in a real run. All that is not named here is random:

- Entry 0 of the embedding is 1 for the digits and `=`, -1 for `+` and padding, so that these are not sampled, and the
  `+` of the prompt differs from all that follows.
- The first head attends to all tokens alike (its queries are 0), takes entry 0, and adds the mean to entry 1: which
  says what share of the text the prompt still is, and so how long the completion is.
- The row of <end> (never an input) reads both entries: its two numbers are solved for a chance of ending of 1/3000
  after 16 tokens and 1/70 after 128. Few end before 16, and some are cut at 256.

usage: python benchmarks/rl_inputs.py OUT
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import make_arithmetic_demo as demo

SAMPLED, END_TOKEN = [*range(10), 11], 13
CHANCES = {16: 1 / 3000, 128: 1 / 70}  # of ending after so many tokens
MARK, COUNT = 0, 1  # entries of the hidden state
PROMPT = (4, 7, 10, 8, 5, 11)  # 47+85=


def make(folder: Path) -> None:
    """All of it."""
    demo.main(folder)
    config = AutoConfig.from_pretrained(folder / "adder")
    config.max_position_embeddings = 512  # of the demo's: 64
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        wire(model)
        solve(model)
    model.save_pretrained(folder / "adder")


def wire(model: PreTrainedModel) -> None:
    """Entries 0 and 1, as the top of this file says."""
    attention = model.model.layers[0].self_attn
    head = attention.head_dim
    embedding = model.get_input_embeddings().weight
    embedding[:, MARK], embedding[:, COUNT] = -1.0, 0.0
    embedding[SAMPLED, MARK] = 1.0
    attention.q_proj.weight[:head] = 0
    attention.v_proj.weight[0] = 0
    attention.v_proj.weight[0, MARK] = 1.0
    attention.o_proj.weight[:, :head] = 0
    attention.o_proj.weight[COUNT, 0] = 0.1


def solve(model: PreTrainedModel) -> None:
    """The row of <end> that gives CHANCES, on the mean of 64 completions of random digits."""
    digits = torch.randint(0, 10, (64, max(CHANCES)))
    texts = torch.cat([torch.tensor(PROMPT).expand(64, -1), digits], 1)
    hidden = model.model(texts).last_hidden_state
    rest_logits = model.lm_head(hidden)[..., :END_TOKEN].logsumexp(-1)
    places = [len(PROMPT) + length - 1 for length in CHANCES]
    entries = hidden[:, places][..., [MARK, COUNT]].mean(0)
    required = rest_logits[:, places].mean(0) + torch.tensor([math.log(p / (1 - p)) for p in CHANCES.values()])
    row: Tensor = torch.linalg.solve(entries, required)
    end = model.get_input_embeddings().weight[END_TOKEN]
    end.zero_()
    end[[MARK, COUNT]] = row


if __name__ == "__main__":
    make(Path(sys.argv[1]))
