"""TRL's SFTTrainer as a contestant of benchmarks/memory.py, in an environment of its own, which has no weft.

    .venv-trl/bin/python benchmarks/memory_trl.py MODEL TOKENS {checkpointing,plain}

One forward and backward of four documents, as a batch of four rows. Prints a line of JSON: the rise of the process's
memory above the model with its gradients gone, in bytes (new gradients are in it), and processor seconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


class MeasuredTrainer(SFTTrainer):
    """Measures the second forward and backward, without optimizer steps."""

    results: dict[str, float]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        small = {name: x[:, :64].contiguous() if x.ndim == 2 else x for name, x in inputs.items()}
        super().training_step(model, small, *args, **kwargs)  # loads libraries, makes caches
        model.zero_grad(set_to_none=True)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory that was freed counts as there, and is used again
        Path("/proc/self/clear_refs").write_text("5")
        before, _ = resident()
        started = time.process_time()
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.results = {"seconds": time.process_time() - started, "rise": resident()[1] - before}
        return loss


def resident() -> tuple[int, int]:
    """(bytes of this process now, the most since the peak was reset)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def main() -> None:
    path, tokens, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(4096)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    generator = torch.Generator().manual_seed(0)
    length = tokens // 4 + 1
    rows = [torch.randint(3, 4096, (length,), generator=generator).tolist() for _ in range(4)]
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            output_dir=out, max_steps=1, per_device_train_batch_size=4, max_length=length, use_cpu=True, bf16=False,
            gradient_checkpointing=mode == "checkpointing", optim="sgd", learning_rate=0.0, save_strategy="no",
            report_to="none", disable_tqdm=True, dataloader_num_workers=0,
        )  # fmt: skip
        trainer = MeasuredTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            processing_class=tokenizer,
            args=config,
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        )
        trainer.train()
    print(json.dumps(trainer.results))


if __name__ == "__main__":
    main()
