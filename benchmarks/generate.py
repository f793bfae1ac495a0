"""Batched generation beside transformers' own generate: seconds, and tokens per second.

    python benchmarks/generate.py                     # both shapes of the tiny Qwen3, a few minutes on one core
    python benchmarks/generate.py --shape uneven --runs 3
    python benchmarks/generate.py --model DIR --dtype bfloat16 --device cuda

32 prompts x 8 samples at temperature 1, one thread; `short`: 4 tokens each; `uneven`: 16 to 256 tokens, another length
for each prompt. transformers generates all samples in one padded batch up to the longest, as trainers that call it do,
and is given no credit for tokens behind a sample's own length. Medians of runs that alternate.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from weft.inference.base import Request, SamplingParams, seed_of
from weft.inference.generate import Generator

PROMPTS, COPIES, VOCABULARY = 32, 8, 14
SHAPES = {"short": (4, 4), "uneven": (16, 256)}  # shortest and longest completion


def tiny() -> transformers.PreTrainedModel:
    """0.8M parameters."""
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip


def draw_requests(vocabulary: int, shortest: int, longest: int) -> list[Request]:
    """Prompts of 6 to 8 tokens, and how far each is to be continued."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for number in range(PROMPTS):
        tokens = torch.randint(0, vocabulary, (6 + number % 3,), generator=generator).tolist()
        length = shortest + (longest - shortest) * ((number * 13) % PROMPTS) // (PROMPTS - 1)
        seeds = tuple(seed_of(0, str(number), sample) for sample in range(COPIES))
        requests.append(Request(str(number), tuple(tokens), seeds, SamplingParams(length)))
    return requests


def generate_by_transformers(model: transformers.PreTrainedModel, requests: Sequence[Request]) -> None:
    longest = max(len(request.tokens) for request in requests)
    ids = torch.zeros(PROMPTS * COPIES, longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(ids)
    for row in range(len(ids)):
        prompt = requests[row // COPIES].tokens
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    model.generate(  # type: ignore[operator]
        ids.to(model.device), attention_mask=attention_mask.to(model.device), do_sample=True, temperature=1.0, top_k=0,
        max_new_tokens=max(request.sampling.max_new_tokens for request in requests), pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def measure(runs: int, **ways: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each, run in turns after one run that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if run:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="default: both")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--model", help="a model directory in place of the tiny Qwen3")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)

    def load() -> transformers.PreTrainedModel:
        if options.model is None:
            return tiny().to(options.device, dtype)
        return transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()

    plain, generator = load(), Generator(load())
    vocabulary = plain.get_input_embeddings().weight.shape[0]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.processor() or 'CPU'}")
    print(
        f"{'shape':8s} {'tokens':>7s} {'weft s':>8s} {'theirs s':>8s} {'ratio':>6s} {'weft tok/s':>11s} {'theirs':>8s}"
    )
    for shape in [options.shape] if options.shape else SHAPES:
        requests = draw_requests(vocabulary, *SHAPES[shape])
        tokens = sum(COPIES * request.sampling.max_new_tokens for request in requests)
        measured = measure(
            options.runs,
            weft=lambda requests=requests: generator.generate(requests),
            theirs=lambda requests=requests: generate_by_transformers(plain, requests),
        )
        weft, reference = measured["weft"], measured["theirs"]
        print(
            f"{shape:8s} {tokens:7d} {weft:8.3f} {reference:8.3f} {weft / reference:6.2f} {tokens / weft:11.0f} "
            f"{tokens / reference:8.0f}"
        )


if __name__ == "__main__":
    main()
