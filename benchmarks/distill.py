"""Distillation side by side: weft's step against TRL's GKDTrainer (off policy), on the same chats, models and order.

    python benchmarks/distill.py --trl .venv-trl/bin/python        # a few minutes on two cores

Student and teacher are small Qwen3 in fp32 on the CPU, whose heads have 16,384 rows. In each round both run once, in a
process of one thread. Reported: processor time of a step (median over rounds, after warm-up), their ratio, the peak of
resident memory above that before the first step, and the largest relative difference of loss and gradient norm in the
first five steps. weft's side is an engine with a teacher, as `weft distill` drives it, without logs and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, DOCUMENTS, STEPS, WARMUP, CHECKED = 16384, 16, 8, 2, 5
LR = 1e-3


def make(folder: Path) -> None:
    """Models, tokenizer and chats."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch
    import transformers

    from tests.support.toy_tokenizers import CHATML, byte_tokenizer

    for name, width, layers in (("student", 128, 4), ("teacher", 256, 4)):
        config = transformers.Qwen3Config(
            vocab_size=ROWS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
            tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, initializer_range=0.08,
        )  # fmt: skip
        torch.manual_seed(len(name))
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder / name)
        tokenizer = byte_tokenizer(CHATML)
        tokenizer.save_pretrained(folder / name)
    source, rows = random.Random(0), []
    for _ in range(DOCUMENTS * STEPS):
        user, answer = (
            "".join(source.choices("abcdefgh ", k=int(source.lognormvariate(m, 0.7)) + 4)) for m in (3.5, 4.5)
        )
        rows.append({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer[:700]}]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def of_weft(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch
    from transformers import AutoTokenizer

    from weft.config.schema import ModelConfig, OptimizerConfig, StepConfig
    from weft.engine.batch.document import Document
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.engine.losses.distillation import DistillationLoss
    from weft.engine.teachers import Teacher, with_teachers
    from weft.launch.process import join
    from weft.ops.divergence import terms_of

    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    documents = []
    for line in (folder / "chats.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids, start = (
            tokenizer(text, add_special_tokens=False)["input_ids"],
            len(tokenizer(prompt, add_special_tokens=False)["input_ids"]),
        )
        weights = torch.zeros(len(ids))
        weights[start:] = 1.0
        documents.append(Document(torch.tensor(ids), weights))
    optimizer = OptimizerConfig(lr=LR, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, max_grad_norm=1.0)
    with join("cpu") as ranks:
        config = EngineConfig(model=ModelConfig(path=str(folder / "student")), optimizer=optimizer,
                              step=StepConfig(max_tokens_per_device=2048))  # fmt: skip
        engine = Engine(config, ranks)
        teacher_config = EngineConfig(
            model=ModelConfig(path=str(folder / "teacher")), purpose="inference", step=config.step
        )
        teacher = Teacher(Engine(teacher_config, ranks, shares_with=engine))
        head = teacher.head(engine)
        assert head is not None
        objective = DistillationLoss(terms_of("jsd", 0.5), [head])
        losses, norms, seconds, before = [], [], [], peak()
        for number in range(STEPS):
            began = time.process_time()
            chosen = documents[number * DOCUMENTS : (number + 1) * DOCUMENTS]
            plan, local = engine.plan_step(chosen)
            taught = with_teachers([teacher], None, chosen, local, engine)
            metrics, result = engine.step(plan, taught, objective, LR)
            seconds.append(time.process_time() - began)
            losses.append(metrics["loss"])
            norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms, "seconds": seconds[WARMUP:], "memory": peak() - before}


def of_trl(folder: Path) -> dict[str, Any]:
    import torch
    from datasets import load_dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    class InOrder(GKDTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    seconds: list[float] = []
    began = [0.0]

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began[0] = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.process_time() - began[0])

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    models = [AutoModelForCausalLM.from_pretrained(folder / n, dtype=torch.float32) for n in ("student", "teacher")]
    arguments = GKDConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=4, gradient_accumulation_steps=DOCUMENTS // 4,
        max_steps=STEPS, learning_rate=LR, weight_decay=0.0, adam_beta2=0.999, lr_scheduler_type="constant",
        max_grad_norm=1.0, lmbda=0.0, beta=0.5, max_length=1024, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = InOrder(
        models[0], teacher_model=models[1], args=arguments, processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train"), callbacks=[Timer()],
    )  # fmt: skip
    before = peak()
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in logs], "norms": [line["grad_norm"] for line in logs],
        "seconds": seconds[WARMUP:], "memory": peak() - before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=".venv-trl/bin/python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.role:
        print("RESULT" + json.dumps({"weft": of_weft, "trl": of_trl}[options.role](Path(options.folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        results: dict[str, list[dict[str, Any]]] = {"weft": [], "trl": []}
        for _ in range(options.rounds):
            for role, python in (("weft", sys.executable), ("trl", options.trl)):
                command = [python, __file__, "--role", role, "--folder", folder]
                environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
                if not lines:
                    sys.exit(f"{role} failed:\n{done.stderr[-3000:]}")
                results[role].append(json.loads(lines[0].removeprefix("RESULT")))
    weft_result, trl_result = results["weft"][0], results["trl"][0]
    for name in ("losses", "norms"):
        pairs = list(zip(weft_result[name], trl_result[name], strict=True))[:CHECKED]
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        print(f"{name} of the first {CHECKED} steps differ by at most {worst:.1e}: {pairs[0]} .. {pairs[-1]}")
    medians = {role: [statistics.median(r["seconds"]) for r in runs] for role, runs in results.items()}
    for role, runs in results.items():
        print(f"{role:5} {statistics.median(medians[role]):.3f} s of a processor a step, peak memory +"
              f"{statistics.median(r['memory'] for r in runs) / 2**20:.0f} MiB")  # fmt: skip
    ratios = [b / a for a, b in zip(medians["weft"], medians["trl"], strict=True)]
    print(f"weft is {statistics.median(ratios):.2f} x as fast (rounds: {', '.join(f'{r:.2f}' for r in ratios)})")


if __name__ == "__main__":
    main()
