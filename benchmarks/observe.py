"""What seeing a run costs: steps with everything on beside the same steps with everything off.

    python benchmarks/observe.py                              # some minutes, one rank
    torchrun --nproc-per-node 2 benchmarks/observe.py         # two ranks

On: the recipe's RunRecorder (metrics.jsonl, tensorboard, seconds by phase) and a live bar on a hidden terminal.
Off: the Engine alone. One process and one engine take blocks of steps in turns (off, on, on, off, ...), over the same
documents, with the 5.2M-parameter model of benchmarks/inputs.py, so that drift of the machine falls on both. CPU
time is that of the process, all its threads; unlike the wall clock's, its share means something on a busy machine too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import mean, median
from typing import Any, TextIO

import torch.distributed as dist
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from inputs import make

from weft.config import load_config
from weft.config.schema import SftConfig
from weft.data.encode import load_tokenizer
from weft.engine.batch.document import first_sources
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.prefetch import prefetch
from weft.launch import flight
from weft.launch.process import Ranks, join
from weft.launch.summary import RunSummary
from weft.observe.profiling import own_peak_memory_gib
from weft.observe.progress import Progress
from weft.observe.recorder import RunRecorder
from weft.observe.resume import Start
from weft.recipes.run_data import make_steps, read_data
from weft.recipes.training import prepare_step, take_step


class Bench:
    """An engine and the documents of one step, which every step takes again."""

    def __init__(self, config: SftConfig, ranks: Ranks, run: Path, terminal: TextIO) -> None:
        documents, _ = read_data(config, config.data, load_tokenizer(config.model.path))
        self.step = next(iter(make_steps(config, documents).starting_at(1)))
        self.engine = Engine(EngineConfig.from_config(config), ranks)
        self.sources = first_sources(documents, self.step.documents)
        self.objective = CrossEntropy()
        self.upcoming = prefetch(repeat(self.step), partial(prepare_step, self.engine, documents, self.objective))
        self.recorder = RunRecorder(config, self.engine, run, RunSummary(model=config.model.path), Start())
        self.console = Console(file=terminal, force_terminal=True, width=160)

    def take(self, progress: Progress | None) -> float:
        """Seconds of one step and, with `progress`, of all that is made of it."""
        began = time.perf_counter()
        step, laid_out = next(self.upcoming)
        flight.step(1, 1, self.sources, len(step.documents))
        step_result = take_step(self.engine, laid_out, self.objective, 1e-5)
        flight.enter("record")
        if progress is not None:
            memory = own_peak_memory_gib(self.engine.device)
            progress.step(self.recorder.record(self.step, step_result, memory, {}))
        return time.perf_counter() - began

    @contextmanager
    def on(self) -> Iterator[Progress]:
        """Everything on inside."""
        assert self.recorder.times is not None
        self.recorder.times.open()
        with Progress(1000, show=self.engine.ranks.is_first, console=self.console) as progress:
            yield progress
        self.recorder.times.close()


def measure(bench: Bench, blocks: int, size: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every step by the wall clock, and CPU seconds of a step in every block; by kind."""
    figures: dict[str, dict[str, list[float]]] = {kind: {"wall": [], "CPU": []} for kind in ("off", "on")}
    times = bench.recorder.times
    assert times is not None
    with bench.recorder:
        for block in range(-2, blocks):  # two to warm up
            kind = "on" if block % 4 in (1, 2) else "off"
            times.close()
            dist.barrier()
            began = time.process_time()
            if kind == "on":
                with bench.on() as progress:
                    seconds = [bench.take(progress) for _ in range(size)]
            else:
                seconds = [bench.take(None) for _ in range(size)]
            if block >= 0:
                figures[kind]["wall"] += seconds
                figures[kind]["CPU"].append((time.process_time() - began) / size)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--size", type=int, default=12, help="steps in a block")
    parser.add_argument("--documents", type=int, default=16, help="documents in a step")
    options = parser.parse_args()
    with join("cpu") as ranks:
        folder: list[Any] = [tempfile.mkdtemp(prefix="weft-observe-") if ranks.is_first else None]
        dist.broadcast_object_list(folder, src=0)
        out = Path(folder[0])
        if ranks.is_first:
            make(out)
            (out / "run").mkdir()
        dist.barrier()
        keys = [f"model.path={out / 'model'}", f"data.path={out / 'chat.jsonl'}", f"step.documents={options.documents}"]
        config = load_config([], [*keys, "step.max_tokens_per_device=2048", "track.report_to=[tensorboard]"])
        with Path(os.devnull).open("w") as terminal:
            bench = Bench(config, ranks, out / "run", terminal)
            with closing(bench.upcoming):
                times = measure(bench, options.blocks, options.size)
        if ranks.is_first:
            report(times, ranks.world)


def report(times: dict[str, dict[str, list[float]]], ranks: int) -> None:
    for clock in ("wall", "CPU"):
        off, on = times["off"][clock], times["on"][clock]
        print(
            f"{ranks} rank(s), {clock}: off {1000 * median(off):.1f} ms, on {1000 * median(on):.1f} ms a step; "
            f"on / off {median(on) / median(off):.4f} by medians, {mean(on) / mean(off):.4f} by means"
        )


if __name__ == "__main__":
    main()
