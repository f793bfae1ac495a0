"""What rl.on_policy=exact costs: seconds to generate, read and train a rollout step's samples, against `measured`.

    python benchmarks/exact.py                          # the table of docs/explanation/exact.md; 3 minutes, two cores
    python benchmarks/exact.py --hidden 512 --layers 8 --vocabulary 32000 --prompts 8 --completion 128

One process and one thread. Seconds are processor time, the median of runs that alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from weft.config.schema import ModelConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.launch.process import join


class ExactCase:
    """An engine and its copy, and the samples of a rollout step."""

    def __init__(self, path: str, options: argparse.Namespace, exact: bool) -> None:
        self.engine = Engine(
            EngineConfig(model=ModelConfig(path=path), step=StepConfig(max_tokens_per_device=4096), exact=exact),
            join("cpu"),
        )
        self.embedded = EmbeddedEngine(self.engine)
        self.embedded.wake()
        generator = torch.Generator().manual_seed(0)
        sampling = SamplingParams(options.completion)
        self.requests = [
            Request(str(n), tuple(torch.randint(options.vocabulary, (options.prompt,), generator=generator).tolist()),
                    tuple(range(options.group)), sampling)
            for n in range(options.prompts)
        ]  # fmt: skip
        self.answers: list[list[Completion]] = []

    def generate(self) -> None:
        self.answers = self.embedded.generate(self.requests)

    def documents(self) -> dict[int, Document]:
        tokens = [r.tokens + c.tokens for r, group in zip(self.requests, self.answers, strict=True) for c in group]
        return {n: Document(torch.tensor(t), torch.ones(len(t))) for n, t in enumerate(tokens)}

    def read(self) -> None:
        documents = self.documents()
        self.engine.readout(self.engine.plan(self.engine.planner.metadata(documents.values())), documents)

    def train(self) -> None:
        documents = self.documents()
        plan = self.engine.plan(self.engine.planner.metadata(documents.values()))
        self.engine.accumulate(plan, documents, CrossEntropy())
        self.engine.drop_gradients()


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "hidden": 128, "layers": 4, "vocabulary": 14, "prompts": 32, "group": 8, "prompt": 10, "completion": 16,
        "runs": 5,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32, head_dim=32,
        num_key_value_heads=max(1, options.hidden // 64), tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        cases = {exact: ExactCase(folder, options, exact) for exact in (False, True)}
        seconds_by_phase: dict[str, dict[bool, list[float]]] = {}
        for number in range(options.runs + 1):
            for phase in ("generate", "read", "train"):
                for exact, case in cases.items():
                    spent = seconds(getattr(case, phase))
                    if number:  # the first warms up
                        seconds_by_phase.setdefault(phase, {}).setdefault(exact, []).append(spent)
    print(f"{'':10} {'measured':>9} {'exact':>9}  ratio")
    for phase, times in seconds_by_phase.items():
        measured, exact = (statistics.median(times[kind]) for kind in (False, True))
        print(f"{phase:10} {measured:8.3f}s {exact:8.3f}s  {exact / measured:5.2f}")


if __name__ == "__main__":
    main()
