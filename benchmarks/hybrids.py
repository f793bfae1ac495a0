"""Tokens per second of families whose layers carry state: documents packed, and right-padded as in a batch.

    python benchmarks/hybrids.py --families lfm2 qwen3_5_text mamba2 falcon_h1         # docs/benchmarks/hybrids.md, 1
    python benchmarks/hybrids.py --documents 64 --families lfm2 qwen3_5_text mamba2      # the second table

The same steps -- the same documents, of log-normal lengths, the same weights, token budget and optimizer -- by two
engines in one process and one thread, in turns. Seconds are processor time, medians over the rounds; losses are
compared. `padding` is tokens computed / tokens of documents: of rows where documents are padded, of the groups in which
mixers run where they are packed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from weft.config.schema import ModelConfig, StepConfig
from weft.engine import build
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.process import join
from weft.models import hf
from weft.ops.by_document import groups_of

Layout = Literal["packed", "padded"]
EXAMINE = build.examine

_LINEAR = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_state=32, mamba_n_groups=1, mamba_chunk_size=64)


def _mixed(layers: int, state: str, attention: str) -> list[str]:
    """One layer in four attends."""
    return [attention if n % 4 == 3 else state for n in range(layers)]


def settings(family: str, hidden: int, layers: int) -> tuple[str, dict[str, Any]]:
    """(name of the classes, what differs from _COMMON)"""
    inner = dict(mamba_d_head=2 * hidden // 8)
    linear = dict(layer_types=_mixed(layers, "linear_attention", "full_attention"), head_dim=hidden // 8)
    return {
        "lfm2": ("Lfm2", dict(layer_types=_mixed(layers, "conv", "full_attention"), block_multiple_of=32)),
        "qwen3_5_text": ("Qwen3_5Text", {**_LINEAR, **linear}),
        "olmo_hybrid": ("OlmoHybrid", {**_LINEAR, **linear, "linear_num_key_heads": 8}),
        "bamba": ("Bamba", {**_MAMBA2, **inner, "attn_layer_indices": list(range(3, layers, 4))}),
        "falcon_h1": ("FalconH1", {**_MAMBA2, **inner, "mamba_d_ssm": 2 * hidden, "head_dim": hidden // 8}),
        "mamba2": ("Mamba2", dict(num_heads=8, head_dim=2 * hidden // 8, state_size=32, n_groups=1, chunk_size=64)),
        "jamba": ("Jamba", dict(attn_layer_period=4, attn_layer_offset=3, num_experts=1, mamba_d_state=16)),
    }[family]


FAMILIES = ("lfm2", "qwen3_5_text", "olmo_hybrid", "bamba", "falcon_h1", "mamba2")


def save_model(family: str, options: argparse.Namespace, folder: str) -> str:
    name, family_keys = settings(family, options.hidden, options.layers)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=2048, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8192,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **family_keys,
    )  # fmt: skip
    config.architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    model = hf.build_random(config, dtype=torch.float32, attention="eager", seed=0)
    path = f"{folder}/{family}"
    model.save_pretrained(path)
    return path


def steps_of(options: argparse.Namespace) -> list[dict[int, Document]]:
    """Documents of each step, of log-normal lengths."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    steps = []
    for _ in range(options.steps):
        drawn = [int(rng.lognormvariate(options.mean, options.sigma)) + 2 for _ in range(options.documents)]
        ids = [torch.randint(3, 2048, (min(options.longest, n),), generator=generator) for n in drawn]
        steps.append({n: Document(tokens, torch.ones(len(tokens))) for n, tokens in enumerate(ids)})
    return steps


class Side:
    """An engine that lays documents out in one way."""

    def __init__(self, path: str, options: argparse.Namespace, layout: Layout) -> None:
        step = StepConfig(max_tokens_per_device=options.budget)
        with mock.patch.object(build, "examine", lambda config: replace(EXAMINE(config), layout=layout)):
            self.engine = Engine(EngineConfig(model=ModelConfig(path=path), step=step), join("cpu"))
        self.steps = steps_of(options)
        self.plans = [
            self.engine.plan(self.engine.planner.metadata(step_documents.values())) for step_documents in self.steps
        ]
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def round(self) -> None:
        """All steps."""
        began = time.process_time()
        for plan, documents in zip(self.plans, self.steps, strict=True):
            self.losses.append(float(self.engine.accumulate(plan, documents, CrossEntropy())["loss"]))
            self.engine.apply(1e-4)
        self.seconds.append(time.process_time() - began)

    @property
    def micro_batches(self) -> float:
        """Of a step."""
        return sum(len(plan.rows) for plan in self.plans) / len(self.plans)

    @property
    def padding(self) -> float:
        """Tokens that mixers compute / tokens that are read."""
        real = computed = 0
        for plan, documents in zip(self.plans, self.steps, strict=True):
            for micro, (row,) in enumerate(plan.rows):
                real += sum(plan.documents[i].read for i in row)
                if plan.layout == "padded":
                    computed += len(row) * plan.row_length(micro, 0)
                else:
                    bounds = self.engine.rows(plan, documents, CrossEntropy())[micro].bounds
                    computed += sum(g.documents * g.longest for g in groups_of(bounds, torch.device("cpu")))
        return computed / real


def compare(family: str, options: argparse.Namespace) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(family, options, folder)
        packed, padded = Side(path, options, "packed"), Side(path, options, "padded")
        for number in range(options.rounds + 1):
            for side in (packed, padded) if number % 2 else (padded, packed):
                side.round()
    for packed_loss, padded_loss in zip(packed.losses, padded.losses, strict=True):
        assert abs(packed_loss - padded_loss) < 1e-4 * padded_loss, (packed_loss, padded_loss)
    tokens = sum(len(document) for documents in packed.steps for document in documents.values())
    fast, slow = (tokens / statistics.median(side.seconds[1:]) for side in (packed, padded))
    return (
        f"| {family} | {fast:.0f} | {slow:.0f} | **{fast / slow:.2f}** | {packed.padding:.2f} | {padded.padding:.2f} | "
        f"{packed.micro_batches:.1f} | {padded.micro_batches:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=(*FAMILIES, "jamba"))
    for name, default in (("hidden", 256), ("layers", 4), ("documents", 16), ("budget", 8192), ("longest", 2048),
                          ("steps", 3), ("rounds", 2)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mean", type=float, default=5.0, help="of the logarithm of a length")
    parser.add_argument("--sigma", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = sorted(len(document) for documents in steps_of(options) for document in documents.values())
    print(
        f"{options.steps} steps of {options.documents} documents, {sum(lengths)} tokens, {lengths[0]} to "
        f"{lengths[-1]} each, median {statistics.median(lengths):.0f}"
    )
    print("| family | packed, tokens/s | padded | ratio | padding, packed | padded | micro-batches, packed | padded |")
    print("|---|---|---|---|---|---|---|---|")
    for family in options.families:
        print(compare(family, options), flush=True)


if __name__ == "__main__":
    main()
