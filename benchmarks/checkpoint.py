"""How long a save keeps training waiting, synchronous and asynchronous, and how much memory it takes.

    python benchmarks/checkpoint.py                    # about a minute, 5 GB of disk for a moment
    python benchmarks/checkpoint.py --hidden 256       # a quick look

One rank on CPU, a random Llama with fp32 masters and AdamW's moments (12 bytes a parameter), HuggingFace weights in
bf16. After each asynchronous save the model trains until it is written, as a run would. Waiting is what `Saver.save`
takes, and for asynchronous saves also what the steps beside the writing take longer than others.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil
import torch
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from weft.checkpoint.save import Saver
from weft.checkpoint.state import find_state_shards
from weft.config.schema import CheckpointConfig, ModelConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.process import join

GB, SAVES = 1e9, 3


def make_engine(folder: Path, hidden: int, layers: int) -> Engine:
    LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        vocab_size=32000, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    model = ModelConfig(path=str(folder), init="random")
    return Engine(EngineConfig(model=model, step=StepConfig(max_tokens_per_device=64)), join("cpu"))


def train_step(engine: Engine) -> float:
    """Seconds of one small step."""
    began = time.perf_counter()
    document = Document(tokens=torch.arange(48), weights=torch.ones(48))
    engine.accumulate(engine.plan(engine.planner.metadata([document])), {0: document}, CrossEntropy())
    engine.apply(1e-6)
    return time.perf_counter() - began


class Peak:
    """The most resident memory of this process while it is watched, in bytes above the beginning."""

    def __enter__(self) -> Peak:
        self._process, self._over = psutil.Process(), threading.Event()
        self._before = self.bytes = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes -= self._before


def measure(engine: Engine, asynchronous: bool) -> dict[str, list[float]]:
    """Seconds that save() took, that it was written in, and that steps beside it took; GB of memory."""
    figures: dict[str, list[float]] = {"waited": [], "written": [], "beside": [], "memory": []}
    config = CheckpointConfig(keep=1, async_=asynchronous, dtype="bf16")
    with tempfile.TemporaryDirectory(prefix="weft-saves-") as folder, ExitStack() as stack:
        saver = stack.enter_context(Saver(engine, Path(folder), config, {"config": {}}))
        for number in range(1, SAVES + 1):
            with Peak() as peak:
                began = time.perf_counter()
                saver.save(number, {})
                figures["waited"].append(time.perf_counter() - began)
                while saver._busy:
                    figures["beside"].append(train_step(engine))
                saver.wait()
                figures["written"].append(time.perf_counter() - began)
            figures["memory"].append(peak.bytes / GB)
            os.sync()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, join("cpu"):
        engine = make_engine(Path(folder), options.hidden, options.layers)
        for _ in range(2):
            train_step(engine)
        with Peak() as steps:
            undisturbed = median(train_step(engine) for _ in range(3))
        state = sum(part.local.nbytes for part in find_state_shards(engine).values())
        print(f"{os.cpu_count()} cores, torch {torch.__version__}; {state / GB:.2f} GB of masters and moments; a step")
        print(f"takes {undisturbed:.2f} s and {steps.bytes / GB:.2f} GB of its own.")
        print("Seconds by save: the first, then those that use its buffers again.\n")
        results = {name: measure(engine, name == "async") for name in ("sync", "async")}
        print("| save | training waits, s | whole save, s | steps beside it, s | peak above the beginning, GB |")
        print("|---|---|---|---|---|")
        for name, figures in results.items():
            during_save = f"{median(figures['beside']):.2f}" if figures["beside"] else "-"
            columns = [", ".join(f"{value:.2f}" for value in figures[key]) for key in ("waited", "written")]
            memory = ", ".join(f"{value:.2f}" for value in figures["memory"])
            print(f"| {name} | {columns[0]} | {columns[1]} | {during_save} | {memory} |")
        ratios = [a / b for a, b in zip(results["async"]["waited"], results["sync"]["waited"], strict=True)]
        print(f"\nasync waits {', '.join(f'{100 * ratio:.1f}%' for ratio in ratios)} of what sync does")
        above = max(results["async"]["memory"]) - steps.bytes / GB
        print(f"one host copy is {state / GB:.2f} GB; async takes {above:.2f} GB beside what the steps take")


if __name__ == "__main__":
    main()
