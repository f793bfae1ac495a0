"""What lora.sampling costs and saves: resident bytes and tokens a second of the embedded copy, merged and separate.

    python benchmarks/sampling.py                       # the table of docs/how-to/lora.md; 5 minutes, one core
    python benchmarks/sampling.py --device cuda --hidden 4096 --layers 8 --rows 256

A row is a format of lora.base and a way to sample, on a mesh that shards nothing and (sharded) where the copy has the
base for itself. Tokens a second are by processor time on the CPU, the median of rounds in which all cases take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.config.schema import LoraConfig, ModelConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.inference.base import Request, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.inference.unmerged import stored_layout
from weft.launch.process import join
from weft.verify.adapter import randomize_adapters

CASES = [(base, how) for base in ("compute", "nf4", "int8", "fp8") for how in ("merged", "separate")]


class SamplingCase:
    """An engine over one base, and its copy."""

    def __init__(self, path: str, options: argparse.Namespace, base: str, how: str) -> None:
        lora = LoraConfig(rank=16, base=base, sampling=how)  # type: ignore[arg-type]
        step = StepConfig(max_tokens_per_device=8192)
        config = EngineConfig(model=ModelConfig(path=path), lora=lora, step=step)
        self.name, self.engine = f"{base:8} {how:9}", Engine(config, join(options.device))
        randomize_adapters(self.engine)
        with torch.no_grad():
            for name, parameter in self.engine.module.named_parameters():
                if name.endswith(".B"):
                    parameter.mul_(0.01)  # as after some steps, not as large as the weights
        self.copy = EmbeddedEngine(self.engine)
        began = time.perf_counter()
        self.copy.wake()
        self.fill = time.perf_counter() - began
        tokens = tuple(range(5, 5 + options.prompt))
        self.requests = [Request("a", tokens, tuple(range(options.rows)), SamplingParams(options.completion))]
        self.rates: list[float] = []

    def sample(self) -> None:
        """Add a measurement of tokens a second."""
        clock = time.process_time if self.engine.device.type == "cpu" else time.perf_counter
        began = clock()
        (self.answers,) = self.copy.generate(self.requests)
        self.rates.append(sum(len(answer.tokens) for answer in self.answers) / (clock() - began))

    def line(self) -> str:
        """A row of the table."""
        together = self.copy.bytes
        if self.copy.separate:
            together += sum(
                tensor.nbytes for tensor in stored_layout(self.engine, self.engine.precision.compute)[1].values()
            )
        documents = {
            n: Document(
                torch.tensor(self.requests[0].tokens + answer.tokens),
                torch.ones(len(answer.tokens) + len(self.requests[0].tokens)),
            )
            for n, answer in enumerate(self.answers[:8])
        }
        read = self.engine.readout(self.engine.plan(self.engine.planner.metadata(documents.values())), documents)
        pairs = [
            (read[n]["logprob"][-len(self.answers[n].tokens) :].cpu(), self.answers[n].logprobs) for n in documents
        ]
        difference = torch.cat([(values - torch.tensor(sampled)).abs() for values, sampled in pairs])
        return (
            f"{self.name}  {self.copy.bytes / 2**20:8.1f}  {together / 2**20:8.1f}  "
            f"{statistics.median(self.rates):8.1f}  {self.fill:6.2f}  {difference.mean():.1e}  {difference.max():.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 768, "layers": 6, "vocabulary": 4096, "prompt": 16, "completion": 24, "rows": 16, "rounds": 3}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            hidden_size=options.hidden, intermediate_size=options.hidden * 4, num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64, num_key_value_heads=options.hidden // 128 or 1,
            vocab_size=options.vocabulary,
        )  # fmt: skip
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        cases = [SamplingCase(folder, options, base, how) for base, how in CASES]
        for _ in range(options.rounds):
            for case in cases:
                case.sample()
    print("base     sampling   copy MiB   if sharded  tokens/s  fill s  |engine - trainer|: mean, max")
    print("\n".join(case.line() for case in cases))


if __name__ == "__main__":
    main()
