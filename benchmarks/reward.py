"""Reward models side by side: weft's training step and TRL's RewardTrainer, on the same pairs and model.

    make bench-reward                                   # sets up .venv-trl, then runs this; about 10 minutes
    python benchmarks/reward.py --trl PYTHON --rounds 3

A 5.2M-parameter Qwen3 in fp32 on the CPU, one thread, pairs of log-normal length (median 60 tokens, the prompt twice an
answer). In every round each contestant runs once, in a process of its own, one after the other. Processor time of the
steps alone, per pair: no loading, no tokenising, no first step. Both have AdamW, clipping, and steps of 32 pairs; TRL
pads a forward of 8 pairs, weft packs. Before that, losses and gradient norms of five steps are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAIRS, ACCUMULATED, COMPARED = 32, 4, 5  # pairs of a step; forwards of TRL's step; steps that are compared
RULE = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "clip": 1.0, "center": 0.01}
Answer = dict[str, Any]


def make_inputs(folder: Path, steps: int) -> Path:
    """A model with a head, and the ids of pairs with margins; returns the file that both contestants read."""
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, num_labels=1, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "model")
    source, pairs = random.Random(0), []
    for _ in range(PAIRS * steps):
        answer = [max(2, min(400, round(source.lognormvariate(3.0, 0.9)))) for _ in range(2)]
        prompt = [source.randrange(2, 8192) for _ in range(max(2, round(sum(answer))))]
        ids = [prompt + [source.randrange(2, 8192) for _ in range(n)] for n in answer]
        pairs.append({"chosen_ids": ids[0], "rejected_ids": ids[1], "margin": source.random()})
    path = folder / "spec.json"
    path.write_text(json.dumps({"model": str(folder / "model"), "pairs": pairs, "steps": steps, **RULE}))
    return path


def run_weft(spec: Answer) -> Answer:
    """Steps of the engine, as `weft reward` takes them."""
    sys.path.insert(0, str(FOLDER.parent))
    import torch

    from weft.config.schema import ModelConfig, OptimizerConfig, StepConfig
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.engine.losses.reward import BradleyTerryLoss
    from weft.engine.score_head import ScoreSpec
    from weft.engine.scores import parts_pairs, scored_document, step_scores
    from weft.launch.process import join

    optimizer = OptimizerConfig(
        betas=tuple(spec["betas"]), eps=spec["eps"], weight_decay=0.0, max_grad_norm=spec["clip"]
    )
    config = EngineConfig(
        model=ModelConfig(path=spec["model"]), optimizer=optimizer, step=StepConfig(max_tokens_per_device=2048),
        score=ScoreSpec(task="sequence", end_marked=True),
    )  # fmt: skip
    times, losses, norms = [], [], []
    with join("cpu") as ranks:
        engine, objective = Engine(config, ranks), BradleyTerryLoss(spec["center"])
        for number in range(spec["steps"]):
            rows = spec["pairs"][number * PAIRS : (number + 1) * PAIRS]
            began = time.process_time()
            documents = [
                scored_document(torch.tensor(row[name]), 0, {"margin": row["margin"]}, group=index)
                for index, row in enumerate(rows)
                for name in ("chosen_ids", "rejected_ids")
            ]
            plan, local = engine.plan_step(documents)
            objective.scores = step_scores(engine, plan, local) if parts_pairs(plan) else {}
            metrics, result = engine.step(plan, local, objective, spec["lr"])
            times.append(time.process_time() - began)
            losses.append(metrics["loss"])
            norms.append(result.grad_norm)
    return {"times": times, "losses": losses, "norms": norms}


def run_trl(spec: Answer) -> Answer:
    """TRL's trainer, in its own environment."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
    from trl import RewardConfig, RewardTrainer
    from trl_steps import StepRecord

    torch.set_num_threads(1)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    record = StepRecord()
    with tempfile.TemporaryDirectory() as out:
        arguments = RewardConfig(
            output_dir=out, max_steps=spec["steps"], per_device_train_batch_size=PAIRS // ACCUMULATED,
            gradient_accumulation_steps=ACCUMULATED, learning_rate=spec["lr"], lr_scheduler_type="constant",
            adam_beta1=spec["betas"][0], adam_beta2=spec["betas"][1], adam_epsilon=spec["eps"], weight_decay=0.0,
            max_grad_norm=spec["clip"], center_rewards_coefficient=spec["center"], max_length=None, use_cpu=True,
            bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, optim="adamw_torch_fused", disable_dropout=True,
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_pretrained(spec["model"], dtype=torch.float32)

        class PairsInOrder(RewardTrainer):
            def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
                return torch.utils.data.SequentialSampler(self.train_dataset)

        trainer = PairsInOrder(
            model=model, args=arguments, train_dataset=Dataset.from_list(spec["pairs"]), processing_class=tokenizer,
            callbacks=[record],
        )  # fmt: skip
        trainer.train()
    return {"times": record.seconds, "losses": record.losses, "norms": record.norms}


def answer_of(python: str, contestant: str, spec: Path) -> Answer:
    """What a contestant printed at its end."""
    command = [python, str(Path(__file__).resolve()), contestant, str(spec)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=str(FOLDER.parent / ".venv-trl/bin/python"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = make_inputs(Path(folder), options.steps)
        ratios, pairs = [], {"weft": [], "trl": []}
        for number in range(options.rounds):
            answers = {
                name: answer_of(python, name, spec) for name, python in (("weft", sys.executable), ("trl", options.trl))
            }
            if not number:
                for quantity in ("losses", "norms"):
                    rows = zip(answers["weft"][quantity][:COMPARED], answers["trl"][quantity][:COMPARED], strict=True)
                    worst = max(abs(a - b) / abs(b) for a, b in rows)
                    print(f"{quantity} of {COMPARED} steps differ by {worst:.1e} at most")
            for name, answer in answers.items():
                pairs[name].append(1000 * statistics.mean(answer["times"][1:]) / PAIRS)
            ratios.append(pairs["trl"][-1] / pairs["weft"][-1])
            print(
                f"round {number + 1}: {pairs['weft'][-1]:.2f} ms a pair, TRL {pairs['trl'][-1]:.2f}: {ratios[-1]:.2f} x"
            )
        print(f"median: {statistics.median(ratios):.2f} x")


if __name__ == "__main__":
    if sys.argv[1:2] in (["weft"], ["trl"]):
        spec = json.loads(Path(sys.argv[2]).read_text())
        print(json.dumps({"weft": run_weft, "trl": run_trl}[sys.argv[1]](spec)))
    else:
        main()
