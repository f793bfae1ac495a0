"""Fine-tuning on images side by side: weft and TRL's SFTTrainer, on the same rows and the same small Qwen2.5-VL.

    make bench-images                    # sets up .venv-trl, then runs this; some ten minutes on two cores
    python benchmarks/images.py --runs 1

Each row has an image of 32 x 32 to 224 x 224 pixels, a question, and an answer, a docstring of Python's standard
library; the answer is trained. A step has 16 rows. Weft packs them; TRL pads the rows of a forward (--forward, 16) to
the longest. Both decode images while they train. Rounds go by turns, each run in a process of its own with two threads;
the first two steps of a run are not counted. Tokens are those of the rows, with what stands for images and without
padding.

TRL's processor needs torchvision, which is not there for a torch of the CPU: it is given transformers' own processor
without the part for videos, as weft makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

STEPS, ROWS, SKIPPED, RATE = 14, 16, 2, 1e-3
SIDES = (32, 64, 96, 128, 160, 224)


def write_inputs(folder: Path) -> None:
    """The model, with random weights and processor; images; rows."""
    import torch
    from make_chat_demo import docstrings, question
    from PIL import Image

    from tests.support.vision_zoo import vision_config, vision_folder, vision_tokenizer
    from weft.models import hf

    model = vision_folder(folder / "model", "qwen2_5_vl")
    text = {
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    config: Any = vision_config("qwen2_5_vl", vision_tokenizer("qwen2_5_vl"), **text)
    vision = {"hidden_size": 96, "intermediate_size": 256, "depth": 4, "num_heads": 4, "out_hidden_size": 192}
    for name, value in (vision | {"patch_size": 14, "window_size": 112}).items():
        setattr(config.vision_config, name, value)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(model)
    limits = {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "size": limits}
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(processor | {"temporal_patch_size": 2}))
    source, rows = random.Random(0), []
    texts = [(name, text) for name, text in docstrings().items() if 20 <= len(text) <= 1200]
    for number, (name, text) in enumerate(source.sample(texts, STEPS * ROWS)):
        width, height = source.choice(SIDES), source.choice(SIDES)
        Image.frombytes("RGB", (width, height), source.randbytes(3 * width * height)).save(folder / f"{number}.jpg")
        question_parts = [{"type": "image", "image": f"{number}.jpg"}, {"type": "text", "text": question(name)}]
        answered = [{"role": "assistant", "content": text}]
        rows.append(
            json.dumps({"prompt": [{"role": "user", "content": question_parts}], "completion": answered}) + "\n"
        )
    (folder / "rows.jsonl").write_text("".join(rows))


def weft(folder: Path) -> dict[str, Any]:
    """`weft sft`, as a user runs it."""
    run = folder / "run"
    words = [
        f"model.path={folder}/model", f"data.path={folder}/rows.jsonl", "data.shuffle=false", f"step.documents={ROWS}",
        "step.max_tokens_per_device=4096", "train.epochs=1", f"optimizer.lr={RATE}", "schedule.name=constant",
        "schedule.warmup_steps=0", "checkpoint.every=0", f"run.dir={run}",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "weft", "sft", *words], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines]
    waited = sum(line["time/data"] for line in lines[SKIPPED:])
    return {
        "seconds": seconds, "tokens": [line["tokens"] for line in lines], "losses": [line["loss"] for line in lines],
        "waited": waited / sum(seconds[SKIPPED:]),
    }  # fmt: skip


def trl(folder: Path, forward: int) -> dict[str, Any]:
    """TRL in its own environment."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    words = [str(ROOT / ".venv-trl" / "bin" / "python"), __file__, "--trl", str(folder), "--forward", str(forward)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def be_trl(folder: Path, forward: int) -> None:
    """Train with SFTTrainer, and print what it did."""
    from datasets import Dataset
    from PIL import Image
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForImageTextToText, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from weft.models import hf
    from weft.models.hf_processor import load_processor

    path = str(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    processor = load_processor(path, hf.read_config(path), tokenizer, {})._processor
    processor.chat_template = tokenizer.chat_template
    ends: list[float] = []
    tokens: list[int] = []
    losses: list[float] = []

    class StepTimer(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    class TimedSftTrainer(SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens.append(int(inputs["attention_mask"].sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    def rows() -> Any:
        for line in (folder / "rows.jsonl").read_text().splitlines():
            row = json.loads(line)
            image = Image.open(folder / row["prompt"][0]["content"][0]["image"])
            yield {"prompt": [{"role": "user", "content": row["prompt"][0]["content"][1]["text"]}],
                   "completion": row["completion"], "images": [image]}  # fmt: skip

    arguments = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=forward,
        gradient_accumulation_steps=ROWS // forward, max_length=None, use_cpu=True, bf16=False,
        gradient_checkpointing=False, optim="adamw_torch_fused", learning_rate=RATE, lr_scheduler_type="constant",
        weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(path, dtype="float32")
    trainer = TimedSftTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(list(rows())), processing_class=processor,
        callbacks=[StepTimer()],
    )  # fmt: skip
    began = time.perf_counter()
    trainer.train()
    per = ROWS // forward
    print(json.dumps({
        "seconds": [end - start for start, end in zip([began, *ends], ends, strict=False)], "losses": losses,
        "tokens": [sum(tokens[i : i + per]) for i in range(0, len(tokens), per)],
    }))  # fmt: skip


def rate(answer: dict[str, Any]) -> float:
    """Tokens a second, without the first steps."""
    return sum(answer["tokens"][SKIPPED:]) / sum(answer["seconds"][SKIPPED:])


def one_round(scratch: Path, forward: int, swapped: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(weft's answer, TRL's), one after the other."""
    shutil.rmtree(scratch / "run", ignore_errors=True)
    if swapped:
        trl_result = trl(scratch, forward)
        weft_result = weft(scratch)
    else:
        weft_result = weft(scratch)
        trl_result = trl(scratch, forward)
    ratio, load = rate(weft_result) / rate(trl_result), os.getloadavg()[0]
    print(f"{rate(weft_result):,.0f} and {rate(trl_result):,.0f} tokens/s: {ratio:.2f} x, load {load:.0f}", flush=True)
    return weft_result, trl_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--forward", type=int, default=ROWS, help="rows of a forward of TRL")
    parser.add_argument("--trl", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        be_trl(Path(options.trl), options.forward)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_inputs(Path(scratch))
        results = [
            one_round(Path(scratch), options.forward, swapped=bool(number % 2)) for number in range(options.runs)
        ]
    weft_result, trl_result = results[-1]
    print(f"weft / TRL, median: {statistics.median(rate(a) / rate(b) for a, b in results):.2f}")
    same = "are equal" if weft_result["tokens"] == trl_result["tokens"] else "DIFFER"
    print(f"tokens of the steps {same}: {weft_result['tokens'][0]}, ...")
    print(f"weft waits for data: {statistics.median(a['waited'] for a, _ in results):.1%} of a step")
    for step in (0, 1, STEPS - 1):
        print(f"loss of step {step + 1}: {weft_result['losses'][step]:.5f} and {trl_result['losses'][step]:.5f}")


if __name__ == "__main__":
    main()
