"""What trees of shared prefixes save: a GRPO update and a readout of logprobs, with step.share_prefixes auto and off.

    python benchmarks/prefix.py                                    # docs/benchmarks/prefix.md, 1: the 5M-shaped model
    python benchmarks/prefix.py --model 30M --rounds 2 --prompts 1
    python benchmarks/prefix.py --families qwen3_5_text bamba lfm2 qwen3_moe --rounds 2
    python benchmarks/prefix.py --trl ENVIRONMENT/bin/python       # TRL's own update on the same samples beside it

A case is P tokens of a prompt, R tokens of each answer, G answers to a prompt. The same documents, weights, loss and
optimizer in two engines of one process and one thread, in turns: what one round takes is compared within the round.
`ideal` is G (P + R) / (P + G R), tokens apart / tokens of trees; `reached` is the measured ratio / ideal. Peaks of
memory are of processes of their own, above what the process held before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from weft.config.rl_schema import RlAlgorithm
from weft.config.schema import ModelConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.policy import PolicyLoss
from weft.launch.process import join
from weft.models import hf

Sharing = Literal["auto", "off"]
Case = tuple[int, int, int]
CASES: tuple[Case, ...] = ((512, 64, 8), (256, 256, 8), (1024, 128, 16), (64, 256, 8))
VOCABULARY = 4096
SHAPES = {"5M": dict(hidden_size=256, num_hidden_layers=6), "30M": dict(hidden_size=512, num_hidden_layers=8)}


def family_settings(family: str, hidden: int, layers: int) -> tuple[str, dict[str, Any]]:
    """(name of the classes, keys of the config beside the common ones)"""
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)]
    linear = dict(
        layer_types=kinds, head_dim=hidden // 8, linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=32, linear_value_head_dim=32,
    )  # fmt: skip
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=hidden, head_dim=hidden // 8)
    mamba = dict(mamba_n_heads=8, mamba_d_state=32, mamba_n_groups=1, mamba_chunk_size=64, mamba_d_head=2 * hidden // 8)
    convolutions = ["full_attention" if n % 4 == 3 else "conv" for n in range(layers)]
    return {
        "llama": ("Llama", {}),
        "gemma3_text": ("Gemma3Text", dict(head_dim=hidden // 8, sliding_window=256)),
        "qwen3_moe": ("Qwen3Moe", experts),
        "qwen3_5_text": ("Qwen3_5Text", linear),
        "bamba": ("Bamba", {**mamba, "attn_layer_indices": list(range(3, layers, 4))}),
        "jamba": ("Jamba", dict(attn_layer_period=4, attn_layer_offset=3, num_experts=1, mamba_d_state=16)),
        "lfm2": ("Lfm2", dict(layer_types=convolutions, block_multiple_of=32)),
    }[family]


def save_model(family: str, shape: str, folder: str) -> str:
    hidden, layers = SHAPES[shape]["hidden_size"], SHAPES[shape]["num_hidden_layers"]
    name, keys = family_settings(family, hidden, layers)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY, intermediate_size=4 * hidden, num_attention_heads=8, num_key_value_heads=4,
        hidden_size=hidden, num_hidden_layers=layers, max_position_embeddings=8192, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **keys,
    )  # fmt: skip
    config.architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    path = f"{folder}/{family}-{shape}"
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path)
    return path


def documents_of(case: Case, prompts: int) -> dict[int, Document]:
    """Answers to `prompts` prompts, with advantages."""
    prefix, suffix, group = case
    generator = torch.Generator().manual_seed(0)
    documents = {}
    for prompt in range(prompts):
        beginning = torch.randint(3, VOCABULARY, (prefix,), generator=generator)
        for answer in range(group):
            tokens = torch.cat([beginning, torch.randint(3, VOCABULARY, (suffix,), generator=generator)])
            weights = torch.cat([torch.zeros(prefix), torch.ones(suffix)])
            advantages = weights * (1.0 if answer % 2 else -1.0)
            documents[len(documents)] = Document(tokens, weights, arrays={"advantages": advantages}, group=prompt)
    return documents


def ideal(case: Case) -> float:
    prefix, suffix, group = case
    return group * (prefix + suffix) / (prefix + group * suffix)


class PrefixSide:
    """An engine that shares prefixes, or does not. seconds: (processor, wall) of each round, by phase."""

    def __init__(self, path: str, case: Case, prompts: int, budget: int, sharing: Sharing) -> None:
        step = StepConfig(max_tokens_per_device=budget, share_prefixes=sharing)
        self.engine = Engine(EngineConfig(model=ModelConfig(path=path), step=step), join("cpu"))
        self.documents = documents_of(case, prompts)
        self.plan = self.engine.plan(self.engine.planner.metadata(self.documents.values()))
        self.seconds: dict[str, list[tuple[float, float]]] = {"update": [], "readout": []}
        self.losses: list[float] = []

    def update(self) -> None:
        objective = PolicyLoss(RlAlgorithm(loss_aggregation="token_mean", correction="none"), old_is_current=True)
        self.losses.append(float(self.engine.accumulate(self.plan, self.documents, objective)["loss"] or 0.0))
        self.losses.append(self.engine.apply(1e-6).grad_norm)

    def readout(self) -> None:
        self.engine.readout(self.plan, self.documents, ("logprob",))

    def round(self) -> None:
        for name, run in (("update", self.update), ("readout", self.readout)):
            began = time.process_time(), time.perf_counter()
            run()
            self.seconds[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))


def ratios(trees: PrefixSide, separate: PrefixSide, phase: str, clock: int) -> float:
    """The median over the rounds, without the first, of the seconds apart / the seconds of trees."""
    pairs = zip(trees.seconds[phase][1:], separate.seconds[phase][1:], strict=True)
    return statistics.median(separate_seconds[clock] / tree_seconds[clock] for tree_seconds, separate_seconds in pairs)


def compare(family: str, shape: str, case: Case, options: argparse.Namespace) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(family, shape, folder)
        budget = options.budget or case[2] * (case[0] + case[1])
        trees, separate = (PrefixSide(path, case, options.prompts, budget, sharing) for sharing in ("auto", "off"))
        for number in range(options.rounds + 1):
            for side in (trees, separate) if number % 2 else (separate, trees):
                side.round()
        for tree_loss, separate_loss in zip(trees.losses, separate.losses, strict=True):
            assert abs(tree_loss - separate_loss) < 1e-3 * max(abs(separate_loss), 1e-3), (tree_loss, separate_loss)
        cells = [f"{case}", family, f"{ideal(case):.2f}"]
        for phase in ("update", "readout"):
            processor, wall = (ratios(trees, separate, phase, clock) for clock in (0, 1))
            cells += [f"**{processor:.2f}**", f"{wall:.2f}", f"{processor / ideal(case):.2f}"]
        seconds = [statistics.median(s[0] for s in side.seconds["update"][1:]) for side in (trees, separate)]
        cells += [f"{seconds[0]:.2f}", f"{seconds[1]:.2f}"]
        if options.trl:
            cells.append(f"{trl_seconds(options.trl, path, case, options):.2f}")
        if options.memory:
            cells += [f"{peak(path, case, options, budget, sharing):.0f}" for sharing in ("auto", "off")]
    return f"| {' | '.join(cells)} |"


def trl_seconds(python: str, path: str, case: Case, options: argparse.Namespace) -> float:
    """Processor seconds of TRL's update of the same samples."""
    documents = documents_of(case, options.prompts).values()
    spec = {
        "model": path, "prefix": case[0], "group": case[2], "rounds": options.rounds + 1,
        "tokens": [document.tokens.tolist() for document in documents],
        "advantages": [float(document.arrays["advantages"][-1]) for document in documents],
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(spec, file)
        file.flush()
        script = str(Path(__file__).with_name("prefix_trl.py"))
        done = subprocess.run([python, script, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return statistics.median(json.loads(done.stdout.splitlines()[-1])[1:])


def peak(path: str, case: Case, options: argparse.Namespace, budget: int, sharing: Sharing) -> float:
    """MiB that updates take above what the engine holds before them: optimizer state, gradients, activations."""
    words = [sys.executable, __file__, "--peak", path, sharing, json.dumps([*case, options.prompts, budget])]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak(path: str, sharing: Sharing, numbers: Sequence[int]) -> None:
    *case, prompts, budget = numbers
    side = PrefixSide(path, (case[0], case[1], case[2]), prompts, budget, sharing)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    for _ in range(2):
        side.update()
    print((resident("VmHWM") - before) / 1024)


def resident(name: str) -> int:
    """KiB of this process, by the name in Linux' status file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def profile(path: str, case: Case, options: argparse.Namespace, sharing: Sharing) -> None:
    """What an update spends its time on."""
    side = PrefixSide(path, case, options.prompts, case[2] * (case[0] + case[1]), sharing)
    side.update()
    run: Callable[[], None] = side.update if options.profile == "update" else side.readout
    with torch.profiler.profile() as profiler:
        run()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="5M")
    parser.add_argument("--families", nargs="+", default=["llama"])
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="numbers of CASES, from 0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--budget", type=int, help="step.max_tokens_per_device; default: one group apart")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--trl", help="python of an environment with TRL")
    parser.add_argument("--profile", choices=["update", "readout"])
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        path, sharing, numbers = options.peak
        print_peak(path, sharing, json.loads(numbers))
        return
    if options.profile:
        with tempfile.TemporaryDirectory() as folder:
            path = save_model(options.families[0], options.model, folder)
            for sharing in ("auto", "off"):
                profile(path, CASES[options.cases[0]], options, sharing)
        return
    names = [
        "(P, R, G)",
        "family",
        "ideal",
        "update",
        "wall",
        "reached",
        "readout",
        "wall",
        "reached",
        "s trees",
        "s apart",
    ]
    names += ["s TRL"] * bool(options.trl) + ["MiB trees", "MiB apart"] * options.memory
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for family in options.families:
        for number in options.cases:
            print(compare(family, options.model, CASES[number], options), flush=True)


if __name__ == "__main__":
    main()
