"""What each setting of memory saves and costs, on the CPU: weft's forward and backward of a small model.

    python benchmarks/memory.py                    # rows of 4,096 and 16,384 tokens, about twenty minutes on one core
    python benchmarks/memory.py --tokens 1024      # one row length
    python benchmarks/memory.py --size 100M --trl .venv-trl/bin/python     # beside TRL, from an environment with TRL

For each setting: what a row keeps for backward by the planner's figure, the rise of the process's memory in a forward
and backward (gradients are in it), the module's weights, and processor seconds. Each is measured in a process of its
own, in turns, `--rounds` times; the table has medians, and seconds also relative to the first setting.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.config.recompute import Activations, RecomputePolicy
from weft.config.schema import FsdpConfig, LoraConfig, MeshConfig, ModelConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.process import join
from weft.parallel.activations import LayerSetup, saved_bytes

MIB = 2**20
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute: none": {"model": {"recompute": "none"}},
    "recompute: {keep: [attention], every: 2}": {"model": {"recompute": RecomputePolicy(("attention",), 2)}},
    "recompute: selective": {"model": {"recompute": "selective"}},
    "recompute: {keep: [attention]}": {"model": {"recompute": RecomputePolicy(("attention",))}},
    "recompute: full": {"model": {"recompute": "full"}},
    "full, offload: inputs": {"model": {"recompute": "full", "offload_activations": "inputs"}},
    "selective, offload: kept": {"model": {"recompute": "selective", "offload_activations": "kept"}},
    "none, tiled_mlp: 1024": {"model": {"recompute": "none", "tiled_mlp": 1024}},
    "full, tiled_mlp: 1024": {"model": {"recompute": "full", "tiled_mlp": 1024}},
    "full, tiled_mlp: 4096": {"model": {"recompute": "full", "tiled_mlp": 4096}},
    "lora, full": {"model": {"recompute": "full"}, "lora": {"rank": 16}},
    "lora, full, base: nf4": {"model": {"recompute": "full"}, "lora": {"rank": 16, "base": "nf4"}},
}


SIZES = {"30M": (512, 1536, 8), "100M": (768, 2304, 14)}  # hidden, intermediate, layers
TRL = {"TRL": "plain", "TRL, gradient_checkpointing": "checkpointing"}


def write_model(folder: Path, size: str) -> None:
    """A llama, most of whose parameters are in its layers."""
    hidden, intermediate, layers = SIZES[size]
    shape = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder)


@dataclass(frozen=True)
class Measured:
    """kept: the planner's bytes that a row keeps for backward. weights: bytes of the module. rise: bytes by which the
    process grew in a forward and backward. seconds: processor seconds of these."""

    kept: int
    weights: int
    rise: int
    seconds: float


def open_engine(path: str, tokens: int, setting: dict[str, Any]) -> Engine:
    config = EngineConfig(
        model=ModelConfig(path=path, **setting["model"]),
        lora=LoraConfig(**setting.get("lora", {})),
        mesh=MeshConfig(),
        fsdp=FsdpConfig(),
        step=StepConfig(documents=1, max_tokens_per_device=tokens),
    )
    return Engine(config, join("cpu"))


def four_documents(tokens: int) -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    length = tokens // 4 + 1
    return [Document(torch.randint(3, 4096, (length,), generator=generator), torch.ones(length)) for _ in range(4)]


def resident() -> tuple[int, int]:
    """(bytes of this process now, the most since `forget_peak`)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory that was freed counts as there, and is used again
    Path("/proc/self/clear_refs").write_text("5")


def step(engine: Engine, documents: list[Document]) -> float:
    """One forward and backward; its processor seconds."""
    plan, local = engine.plan_step(documents)
    started = time.process_time()
    engine.accumulate(plan, local, CrossEntropy())
    seconds = time.process_time() - started
    engine.drop_gradients()
    return seconds


def measure(path: str, tokens: int, setting: dict[str, Any]) -> Measured:
    """Called in a process of its own: one that has computed keeps freed memory, and grows no more."""
    engine = open_engine(path, tokens, setting)
    step(engine, four_documents(64))  # loads libraries, makes caches
    documents = four_documents(tokens)
    forget_peak()
    before, _ = resident()
    seconds = step(engine, documents)
    _, peak = resident()
    activations = Activations.from_config(engine.config)
    saved = saved_bytes(
        engine.built.config, engine.precision.compute, setup=LayerSetup(tiled=activations.tile is not None)
    )
    activation_bytes = saved.bytes(tokens, activations)
    return Measured(
        activation_bytes, sum(p.numel() * p.element_size() for p in engine.module.parameters()), peak - before, seconds
    )


def measure_trl(python: str, path: str, tokens: int, mode: str) -> Measured:
    """As `measure`, of TRL. The planner knows nothing of it."""
    command = [python, str(Path(__file__).with_name("memory_trl.py")), path, str(tokens), mode]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    results = json.loads(done.stdout.splitlines()[-1])
    return Measured(0, 0, results["rise"], results["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=[*SETTINGS])
    parser.add_argument("--size", choices=SIZES, default="30M")
    parser.add_argument("--trl", help="a Python with TRL, to measure beside")
    options = parser.parse_args()
    with (
        TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh_process,
    ):
        write_model(Path(folder), options.size)
        for tokens in options.tokens:
            measured: dict[str, list[Measured]] = defaultdict(list)
            for _ in range(options.rounds):
                for name in [*options.settings, *(TRL if options.trl else ())]:
                    if name in TRL:
                        result = measure_trl(options.trl, folder, tokens, TRL[name])
                    else:
                        result = fresh_process.apply(measure, (folder, tokens, SETTINGS[name]))
                    measured[name].append(result)
                    print(
                        f"{name}: rise {result.rise / MIB:.0f} MiB, {result.seconds:.2f} s", file=sys.stderr, flush=True
                    )
            print(f"\nrow of {tokens:,} tokens: MiB kept for backward (planned) | rise | weights | processor s | ratio")
            first = statistics.median(result.seconds for result in measured[options.settings[0]])
            for name, rounds in measured.items():
                rise = statistics.median(result.rise for result in rounds)
                seconds = statistics.median(result.seconds for result in rounds)
                sizes = f"{rounds[0].kept / MIB:8.0f} {rise / MIB:8.0f} {rounds[0].weights / MIB:8.1f}"
                print(f"{name:42} {sizes} {seconds:8.2f} {seconds / first:6.2f}", flush=True)


if __name__ == "__main__":
    main()
