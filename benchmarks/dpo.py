"""`weft dpo` beside TRL's DPOTrainer: the same losses step by step, and processor time per pair. And beside itself
without trees (step.share_prefixes=off), on prompts that are three times as long as an answer.

    make bench-dpo                              # sets up .venv-trl, then runs this
    python benchmarks/dpo.py --python PATH      # with TRL in another environment
    python benchmarks/dpo.py --only check       # losses and gradient norms of five steps alone
    python benchmarks/dpo.py --only trees       # needs no TRL

Both train a random model in fp32 on the same pairs in the same order, one process, one thread. Lengths of answers are
log-normal. TRL pads each batch; weft packs. Times are of interleaved runs, without the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {}, "hinge": {}, "ipo": {}, "exo_pair": {"label_smoothing": 0.1}, "nca_pair": {},
    "robust": {"label_smoothing": 0.1}, "bco_pair": {}, "sppo_hard": {}, "aot": {}, "aot_unpaired": {}, "apo_zero": {},
    "apo_down": {}, "discopop": {}, "sft": {}, "sigmoid_norm": {},
}  # fmt: skip


def write_job(folder: Path, *, width: int, layers: int, longest: float, pairs: int, prompt: int) -> None:
    """A model with a byte tokenizer, and pairs.jsonl."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.support.toy_tokenizers import byte_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    source = random.Random(0)

    def words(count: float) -> str:
        return "".join(source.choice("abcdefgh ") for _ in range(max(1, int(count))))

    rows = [
        {
            "prompt": words(source.uniform(0.5, 1.5) * prompt),
            "chosen": "x" + words(min(longest, source.lognormvariate(3.5, 0.9))),
            "rejected": "y" + words(min(longest, source.lognormvariate(3.5, 0.9))),
        }
        for _ in range(pairs)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_weft(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norms and processor seconds of each step of `weft dpo`."""
    import torch

    import weft

    torch.set_num_threads(1)
    lines, moments = list[Any](), [time.process_time()]

    def note(line: Any) -> None:
        lines.append(line)
        moments.append(time.process_time())

    keys = dict(spec["arguments"])
    preference = {"loss": keys.pop("loss_type", "sigmoid"), "beta": keys.pop("beta", 0.1), **keys}
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as run:
        weft.dpo(
            model=spec["model"], data={"path": spec["data"], "shuffle": False}, preference=preference,
            step={"documents": spec["pairs"], "max_tokens_per_device": spec["row"]} | spec.get("step", {}),
            device="cpu", on_step=note,
            optimizer={"lr": spec["lr"], "weight_decay": 0.0}, schedule={"name": "constant", "warmup_ratio": 0.0},
            train={"steps": spec["steps"], "epochs": None}, run={"dir": run, "overwrite": True},
            track={"timing": False, "system": False}, checkpoint={"every": 0, "trainer_state": "none"},
        )  # fmt: skip
    seconds = [after - before for before, after in pairwise(moments)]
    return {
        "losses": [line["loss"] for line in lines], "norms": [line["grad_norm"] for line in lines], "seconds": seconds,
    }  # fmt: skip


def of_trl(python: str, folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """The same of TRL."""
    file = folder / "spec.json"
    file.write_text(json.dumps(spec))
    words = [python, str(ROOT / "benchmarks" / "dpo_trl.py"), str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check(python: str) -> None:
    """Losses and gradient norms of five steps, for each loss_type: the largest relative difference."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_job(folder, width=32, layers=2, longest=60, pairs=40, prompt=15)
        for name, options in LOSSES.items():
            spec = {
                "model": str(folder / "model"), "data": str(folder / "pairs.jsonl"), "steps": 5, "pairs": 8, "batch": 8,
                "row": 512, "lr": 1e-3, "arguments": {"loss_type": name, "beta": 0.1, **options},
            }  # fmt: skip
            weft_result, trl_result = of_weft(folder, spec), of_trl(python, folder, spec)
            figures = [
                max(abs(a - b) / max(abs(b), 1e-8) for a, b in zip(weft_result[key], trl_result[key], strict=True))
                for key in ("losses", "norms")
            ]
            print(f"{name:<14} loss {figures[0]:.1e}  grad_norm {figures[1]:.1e}", flush=True)


def measure(python: str, repeats: int) -> None:
    """Processor milliseconds per pair, of interleaved runs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_job(folder, width=128, layers=4, longest=400, pairs=128, prompt=40)
        spec = {
            "model": str(folder / "model"), "data": str(folder / "pairs.jsonl"), "steps": 6, "pairs": 16, "batch": 8,
            "row": 1024, "lr": 1e-4, "arguments": {"loss_type": "sigmoid", "beta": 0.1},
        }  # fmt: skip
        compare(repeats, {"weft": lambda: of_weft(folder, spec), "TRL": lambda: of_trl(python, folder, spec)})


def measure_trees(repeats: int) -> None:
    """The same of weft with and without trees. Prompts have three times the tokens of an answer."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_job(folder, width=128, layers=4, longest=400, pairs=128, prompt=160)
        rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
        prompts, answers = (
            sum(len(row[name]) for row in rows for name in of) for of in (["prompt"], ["chosen", "rejected"])
        )
        spec = {
            "model": str(folder / "model"), "data": str(folder / "pairs.jsonl"), "steps": 6, "pairs": 16, "row": 2048,
            "lr": 1e-4, "arguments": {"loss_type": "sigmoid", "beta": 0.1},
        }  # fmt: skip
        print(f"prompts have {2 * prompts / answers:.2f} times the tokens of an answer")
        apart = spec | {"step": {"share_prefixes": "off"}}
        runs = compare(repeats, {"trees": lambda: of_weft(folder, spec), "no trees": lambda: of_weft(folder, apart)})
        worst = max(abs(a - b) / abs(b) for a, b in zip(*(run["losses"] for run in runs), strict=True))
        print(f"losses differ by {worst:.1e} at most")


def compare(repeats: int, contestants: dict[str, Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Processor milliseconds per pair of two contestants, in turns; returns their last runs."""
    ratios = []
    for _ in range(repeats):
        runs = [contestant() for contestant in contestants.values()]
        times = [statistics.median(run["seconds"][1:]) / 16 * 1000 for run in runs]
        ratios.append(times[1] / times[0])
        figures = ", ".join(f"{name} {time:.1f} ms" for name, time in zip(contestants, times, strict=True))
        print(f"{figures} per pair: {ratios[-1]:.2f} x", flush=True)
    print(f"median {statistics.median(ratios):.2f} x")
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=str(ROOT / ".venv-trl" / "bin" / "python"), help="an interpreter with TRL")
    parser.add_argument("--only", choices=("check", "trl", "trees"), help="one part of it")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.only in (None, "check"):
        check(chosen.python)
    if chosen.only in (None, "trl"):
        measure(chosen.python, chosen.repeats)
    if chosen.only in (None, "trees"):
        measure_trees(chosen.repeats)
