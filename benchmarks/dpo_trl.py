"""TRL's DPOTrainer as a contestant of benchmarks/dpo.py, in an environment of its own, which has no weft.

    .venv-trl/bin/python benchmarks/dpo_trl.py SPEC.json

Prints one line of JSON: loss and gradient norm of each step, and its processor seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_steps import StepRecord


def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(spec["data"]).read_text().splitlines()]
    record, pairs = StepRecord(), spec["pairs"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder, max_steps=spec["steps"], per_device_train_batch_size=spec["batch"],
            gradient_accumulation_steps=pairs // spec["batch"], max_length=None, use_cpu=True, bf16=False,
            gradient_checkpointing=False, optim="adamw_torch_fused", learning_rate=spec["lr"], warmup_steps=0,
            lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_num_workers=0,
            train_sampling_strategy="sequential", **spec["arguments"],
        )  # fmt: skip
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(spec["model"]),
            callbacks=[record],
        )
        trainer.train()
    print(json.dumps({"losses": record.losses, "norms": record.norms, "seconds": record.seconds}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
