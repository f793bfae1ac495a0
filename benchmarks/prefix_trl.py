"""TRL's GRPO update on given samples, for benchmarks/prefix.py, in an environment of its own, which has no weft.

    ENVIRONMENT/bin/python benchmarks/prefix_trl.py SPEC.json

Prints one line of JSON: processor seconds of each update: loss, gradient, clipping and AdamW, one group a micro-batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    """The trainer wants one; the samples are tokens already."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    group, prefix, count = spec["group"], spec["prefix"], len(spec["tokens"])
    with tempfile.TemporaryDirectory() as out:
        arguments = GRPOConfig(
            output_dir=out, per_device_train_batch_size=group, gradient_accumulation_steps=count // group,
            num_generations=group, max_completion_length=len(spec["tokens"][0]) - prefix, temperature=1.0, beta=0.0,
            loss_type="dapo", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            processing_class=tokenizer(), reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments, train_dataset=Dataset.from_list([{"prompt": "<s>"}] * count),
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = count // group
    tokens, advantages = torch.tensor(spec["tokens"]), torch.tensor(spec["advantages"])
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, fused=True)
    trainer.model.train()
    seconds = []
    for _ in range(spec["rounds"]):
        began = time.process_time()
        for start in range(0, count, group):
            batch = tokens[start : start + group]
            inputs = {
                "prompt_ids": batch[:, :prefix], "completion_ids": batch[:, prefix:],
                "prompt_mask": torch.ones_like(batch[:, :prefix]),
                "completion_mask": torch.ones_like(batch[:, prefix:]), "advantages": advantages[start : start + group],
                "num_items_in_batch": torch.tensor(count * (batch.shape[1] - prefix)),
            }  # fmt: skip
            trainer.compute_loss(trainer.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
