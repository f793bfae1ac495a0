"""TRL's SFTTrainer as a contestant of benchmarks/sft.py, in an environment of its own, which has no weft.

    .venv-trl/bin/python benchmarks/sft_trl.py trl SPEC.json

Prints one line of JSON on rank 0, as benchmarks/sft_run.py does; `check` in place of `trl` puts all documents of the
spec into one row and takes every step on it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_steps import StepRecord


class Trainer(SFTTrainer):
    """Notes the tokens and the loss of every forward."""

    def note(self) -> None:
        self.forward_tokens: list[int] = []
        self.forward_losses: list[float] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.forward_tokens.append(inputs["input_ids"].numel())
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.forward_losses.append(loss.item())
        return loss


def let_fsdp_run_on_cpu() -> None:
    """accelerate 1.15 turns FSDP on for accelerators only, and runs DDP here without a word: a rank passes as one."""
    shared = PartialState._shared_state
    if shared["distributed_type"] == DistributedType.MULTI_CPU:
        shared["distributed_type"] = DistributedType.MULTI_GPU


def arguments(spec: dict[str, Any], check: bool, out: str) -> SFTConfig:
    """The defaults of TRL but for what the other contestants share, and for what only saves memory or time."""
    rule, trl = spec["optimizer"], dict(spec["trl"])
    trl[trl["ranks_share"]] //= int(os.environ.get("WORLD_SIZE", "1"))
    return SFTConfig(
        output_dir=out,
        max_steps=len(spec["steps"]),
        per_device_train_batch_size=1 if check else trl["rows_per_forward"],
        gradient_accumulation_steps=1 if check else trl["accumulation"],
        packing=True,
        packing_strategy="bfd",
        max_length=spec["bare"]["row"] if check else trl["row"],
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        learning_rate=rule["lr"],
        lr_scheduler_type="constant",
        adam_beta1=rule["betas"][0],
        adam_beta2=rule["betas"][1],
        weight_decay=rule["weight_decay"],
        max_grad_norm=rule["clip"],
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_drop_last=not check,
    )


def main() -> None:
    mode, path = sys.argv[1:]
    spec = json.loads(Path(path).read_text())
    with tempfile.TemporaryDirectory() as out:
        timer = StepRecord(time.perf_counter)
        training = arguments(spec, mode == "check", out)  # it sets up the process group
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            let_fsdp_run_on_cpu()
        dataset = Dataset.from_list(
            [{"input_ids": d["ids"], "assistant_masks": [0, *d["trained"][1:]]} for d in spec["documents"]]
        )
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(spec["model"]),
            args=training,
            train_dataset=dataset,
            callbacks=[timer],
        )
        trainer.note()
        trainer.train()
    report(trainer, timer)


def report(trainer: Trainer, timer: StepRecord) -> None:
    steps, state = len(timer.seconds), PartialState()
    tokens = torch.tensor(trainer.forward_tokens).view(steps, -1).sum(1)
    losses = torch.tensor(trainer.forward_losses).view(steps, -1).sum(1)
    if state.num_processes > 1:
        dist.all_reduce(tokens)
        dist.all_reduce(losses)
        losses /= state.num_processes
    if state.is_main_process:
        kind = {type(p).__name__ for p in trainer.model_wrapped.parameters()}
        print(
            json.dumps(
                {"tokens": tokens.tolist(), "seconds": timer.seconds, "losses": losses.tolist(), "kind": sorted(kind)}
            )
        )


if __name__ == "__main__":
    main()
