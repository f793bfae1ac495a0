"""Tokens per second, MFU and peak memory of one accelerator: weft's Engine beside a bare PyTorch loop.

    python benchmarks/sft_gpu.py                             # Qwen3-0.6B and 4B shapes, rows of 8k and 16k, on CUDA
    python benchmarks/sft_gpu.py --shapes tiny --rows 512 --device cpu     # does the script run?

Random weights, packed documents of log-normal lengths (mean 400), bf16 compute, fp32 masters and AdamW states. The bare
loop is transformers' model under autocast with sdpa over whole rows (documents see each other there, so it does more
attention and less bookkeeping), fused AdamW. MFU counts model FLOPs only (recomputation is not work), by two
conventions: attention over all pairs of a row, and the causal half within documents. Every case runs in a process of
its own, so that one that does not fit costs nothing but its line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

SHAPES: dict[str, dict[str, int]] = {
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512),
}
MODES = ("bare", "weft", "weft+recompute", "weft+compile", "weft+recompute+compile")
WARM_UP, STEPS = 3, 5


def model_folder(shape: str, folder: Path) -> str:
    """A directory with the config of a Qwen3 of this shape; weights are drawn at load."""
    from transformers import Qwen3Config

    own = SHAPES[shape]
    config = Qwen3Config(
        **{"vocab_size": 151_936, "num_key_value_heads": own["num_attention_heads"] // 2, "head_dim": 128, **own},
        tie_word_embeddings=True, max_position_embeddings=32_768, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return str(folder)


def rows_of_documents(tokens: int, vocabulary: int, steps: int) -> list[list[torch.Tensor]]:
    """For each step, documents that fill one row of `tokens` exactly."""
    source = np.random.default_rng(0)
    rows: list[list[torch.Tensor]] = []
    for _ in range(steps):
        left, row = tokens, []
        while left:
            length = min(left, int(np.clip(source.lognormal(5.5, 1.0), 16, 4096)))
            row.append(torch.from_numpy(source.integers(0, vocabulary, length)))
            left -= length
        rows.append(row)
    return rows


def weft_step(path: str, tokens: int, mode: str, device: str) -> tuple[Callable[[list[torch.Tensor]], None], Any]:
    """One optimizer step of an Engine, and its FLOP facts."""
    from weft.cluster.process import join
    from weft.config.schema import ModelConfig, StepConfig
    from weft.engine.document import Document
    from weft.engine.engine import Engine, EngineConfig
    from weft.objectives.cross_entropy import CrossEntropy

    recompute = "full" if "recompute" in mode else "none"
    model = ModelConfig(path=path, init="random", recompute=recompute, compile="compile" in mode)  # type: ignore[arg-type]
    ranks = join(device)  # type: ignore[arg-type]
    engine = Engine(EngineConfig(model=model, step=StepConfig(max_tokens_per_device=tokens)), ranks)

    def step(row: list[torch.Tensor]) -> None:
        documents = {i: Document(ids, torch.ones(len(ids))) for i, ids in enumerate(row)}
        plan = engine.plan([engine.meta(document) for document in documents.values()])
        engine.accumulate(plan, documents, CrossEntropy())
        engine.apply(1e-5)

    return step, engine.built.flops


def bare_step(path: str, device: str) -> Callable[[list[torch.Tensor]], None]:
    """What one would write by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(row: list[torch.Tensor]) -> None:
        ids = torch.cat(row)[None].to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmul_rate(device: str) -> float:
    """FLOPs/s of a large bf16 product on this device, the best of several."""
    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(10):
        began = now(device)
        for _ in range(10):
            a @ b
        best = max(best, 10 * 2.0 * size**3 / (now(device) - began))
    return best


def now(device: str) -> float:
    """Seconds, once the device has caught up."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_case(shape: str, tokens: int, mode: str, device: str) -> dict[str, float]:
    """Median seconds of a step, MFU by both conventions against the matmul rate of this process, peak GiB."""
    from weft.config.schema import ModelConfig
    from weft.models.build import build_model
    from weft.observe.flops import document_flops

    with TemporaryDirectory() as folder:
        path = model_folder(shape, Path(folder))
        rows = rows_of_documents(tokens, SHAPES[shape].get("vocab_size", 151_936), WARM_UP + STEPS)
        rate = matmul_rate(device)
        step, facts = (bare_step(path, device), None) if mode == "bare" else weft_step(path, tokens, mode, device)
        facts = facts or build_model(ModelConfig(path=path), dtype=torch.float32, seed=0, weights=False).flops
        seconds = []
        for row in rows:
            began = now(device)
            step(row)
            seconds.append(now(device) - began)
    own = float(np.median(seconds[WARM_UP:]))
    causal = np.mean([sum(document_flops(facts, len(ids)) for ids in row) for row in rows[WARM_UP:]])
    return {
        "tokens_per_second": tokens / own,
        "share_full": document_flops(facts, tokens, causal=False) / own / rate,
        "share_causal": float(causal) / own / rate,
        "matmul_tflops": rate / 1e12,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan"),
    }


def main() -> None:
    """Run every case in its own process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "4b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        shape, tokens, mode = arguments.case
        print(json.dumps(run_case(shape, int(tokens), mode, arguments.device)))
        return
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; shares are of the bf16 matmul rate measured in the same process\n")
    print(f"{'shape':6}{'row':>7}  {'mode':24}{'tokens/s':>10}{'full':>8}{'causal':>8}{'TFLOP/s':>9}{'GiB':>8}")
    for shape in arguments.shapes:
        for tokens in arguments.rows:
            for mode in arguments.modes:
                case = ["--case", shape, str(tokens), mode, "--device", arguments.device]
                done = subprocess.run([sys.executable, __file__, *case], capture_output=True, text=True)
                head = f"{shape:6}{tokens:7}  {mode:24}"
                if done.returncode:
                    print(head + done.stderr.strip().splitlines()[-1][:80])
                    continue
                r = json.loads(done.stdout.strip().splitlines()[-1])
                print(
                    f"{head}{r['tokens_per_second']:10,.0f}{r['share_full']:8.1%}{r['share_causal']:8.1%}"
                    f"{r['matmul_tflops']:9.0f}{r['memory_gib']:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
