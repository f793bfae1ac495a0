"""TRL's GRPOTrainer as a contestant of benchmarks/rl.py, in an environment of its own, which has no weft.

    .venv-trl/bin/python benchmarks/rl_trl.py trl SPEC.json

Prints one line of JSON, as benchmarks/rl_run.py does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sft_trl import Timer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class TimedGrpoTrainer(GRPOTrainer):
    """Notes the seconds of generation, of rewards, and of the rest that comes before training."""

    def note(self) -> None:
        self.rollouts: list[dict[str, float]] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.rollouts.append({})
        began = time.perf_counter()
        outputs = super()._generate_and_score_completions(inputs)
        phases = self.rollouts[-1]
        phases["other"] = time.perf_counter() - began - sum(phases.values())
        return outputs

    def _generate(self, *args: Any) -> Any:
        began = time.perf_counter()
        outputs = super()._generate(*args)
        self.rollouts[-1]["generate"] = time.perf_counter() - began
        return outputs

    def _calculate_rewards(self, *args: Any) -> Any:
        began = time.perf_counter()
        rewards = super()._calculate_rewards(*args)
        self.rollouts[-1]["reward"] = time.perf_counter() - began
        return rewards


def arguments(spec: dict[str, Any], out: str) -> GRPOConfig:
    """The defaults of TRL but for what the other contestants share, and for what only saves memory or time."""
    samples = spec["prompts"] * spec["group"]
    return GRPOConfig(
        output_dir=out,
        max_steps=spec["steps"],
        per_device_train_batch_size=spec["rows"],
        gradient_accumulation_steps=samples // spec["rows"],
        num_generations=spec["group"],
        max_completion_length=spec["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def main() -> None:
    _, path = sys.argv[1:]
    spec = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    lengths: list[int] = []

    def length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [-abs(len(ids) - spec["target"]) / spec["target"] for ids in completion_ids]

    with tempfile.TemporaryDirectory() as out:
        timer = Timer()
        trainer = TimedGrpoTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(spec["model"]),
            reward_funcs=length,
            args=arguments(spec, out),
            train_dataset=Dataset.from_list([{"prompt": text} for text in spec["problems"]]),
            callbacks=[timer],
        )
        trainer.note()
        trainer.train()
    phases = [
        {**phase_seconds, "train": seconds - sum(phase_seconds.values())}
        for phase_seconds, seconds in zip(trainer.rollouts, timer.seconds, strict=True)
    ]
    print(json.dumps({"seconds": timer.seconds, "phases": phases, "lengths": lengths}))


if __name__ == "__main__":
    main()
