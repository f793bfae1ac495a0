"""What each knob of memory saves and costs, on the CPU: weft's own forward and backward of a model of 30M parameters.

    python benchmarks/memory.py                    # rows of 4,096 and 16,384 tokens, about ten minutes on one core
    python benchmarks/memory.py --tokens 1024      # one row length

For each knob: what a row keeps after its forward, the planner's figure for it, the rise of the process's memory in a
forward and backward, and processor seconds. Knobs take turns, `--rounds` times; the table has medians, and seconds also
relative to the first knob.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.config.recompute import RecomputePolicy, policy_of
from weft.config.schema import FsdpConfig, LoraConfig, MeshConfig, ModelConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.process import join
from weft.parallel.activations import saved_bytes

MIB = 2**20
KNOBS: dict[str, dict[str, Any]] = {
    "recompute: none": {"model": {"recompute": "none"}},
    "recompute: {keep: [attention], every: 2}": {"model": {"recompute": RecomputePolicy(("attention",), 2)}},
    "recompute: selective": {"model": {"recompute": "selective"}},
    "recompute: {keep: [attention]}": {"model": {"recompute": RecomputePolicy(("attention",))}},
    "recompute: full": {"model": {"recompute": "full"}},
    "lora, full": {"model": {"recompute": "full"}, "lora": {"rank": 16}},
    "lora, full, base: nf4": {"model": {"recompute": "full"}, "lora": {"rank": 16, "base": "nf4"}},
}


def write_model(folder: Path) -> None:
    """A llama of 30M parameters, most of them in its layers."""
    shape = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder)


def open_engine(path: str, tokens: int, knob: dict[str, Any]) -> Engine:
    config = EngineConfig(
        model=ModelConfig(path=path, **knob["model"]),
        lora=LoraConfig(**knob.get("lora", {})),
        mesh=MeshConfig(),
        fsdp=FsdpConfig(),
        step=StepConfig(documents=1, max_tokens_per_device=tokens),
    )
    return Engine(config, join("cpu"))


def resident() -> tuple[int, int]:
    """(bytes of this process now, the most since `forget_peak`)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(engine: Engine, documents: list[Document]) -> tuple[float, float]:
    """(MiB that the process grew by, processor seconds) of one forward and backward."""
    plan, own = engine.plan_step(documents)
    forget_peak()
    before, _ = resident()
    started = time.process_time()
    engine.accumulate(plan, own, CrossEntropy())
    seconds = time.process_time() - started
    _, peak = resident()
    engine.drop_gradients()
    return (peak - before) / MIB, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--knobs", nargs="+", default=list(KNOBS), choices=list(KNOBS))
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        write_model(Path(folder))
        for tokens in given.tokens:
            generator = torch.Generator().manual_seed(0)
            documents = [
                Document(torch.randint(3, 4096, (tokens // 4 + 1,), generator=generator), torch.ones(tokens // 4 + 1))
                for _ in range(4)
            ]
            seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
            stored: dict[str, tuple[int, int]] = {}
            for round_ in range(given.rounds + 1):
                for name in given.knobs:
                    engine = open_engine(folder, tokens, KNOBS[name])
                    figures = measure(engine, documents)
                    if round_:  # the first warms caches
                        seen[name].append(figures)
                    policy = policy_of(engine.config.model.recompute)
                    saved = saved_bytes(engine.built.config, engine.precision.compute)
                    row = saved.bytes(tokens, recompute=policy)
                    stored[name] = row, sum(p.numel() * p.element_size() for p in engine.module.parameters())
                    del engine
                    gc.collect()
            print(f"\nrow of {tokens:,} tokens: MiB kept for backward (planned) | rise | weights | processor s | ratio")
            first = statistics.median(seconds for _, seconds in seen[given.knobs[0]])
            for name in given.knobs:
                rise, seconds = (statistics.median(values) for values in zip(*seen[name], strict=True))
                kept, weights = (size / MIB for size in stored[name])
                sizes = f"{kept:8.0f} {rise:8.0f} {weights:8.1f}"
                print(f"{name:42} {sizes} {seconds:8.2f} {seconds / first:6.2f}", flush=True)


if __name__ == "__main__":
    main()
