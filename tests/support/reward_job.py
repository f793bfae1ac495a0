"""Models that weft trains and reads in its own environment, for tests in the environments of other programs, which
lack it: a reward model, and its scores. Imports no weft.

As a program, in weft's environment, it prints weft's scores: python -m tests.support.reward_job CHECKPOINT TEXTS.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.support.toy_tokenizers import byte_tokenizer, write_jsonl

ROOT = Path(__file__).parents[2]
PAIRS = 12
SHAPE = dict(
    vocab_size=288, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.1, bos_token_id=1,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip
FAMILIES = {"llama": ("Llama", False), "qwen3": ("Qwen3", True)}  # name in transformers, whether embeddings are tied
ENDING = "</s>"  # weft ends an answer with it


def run_weft(*words: str, without: Sequence[str] = ()) -> str:
    """What a module prints in weft's own environment. without: variables of the environment that it does not get."""
    environment = {key: value for key, value in os.environ.items() if key not in without} | {"PYTHONPATH": str(ROOT)}
    command = [str(ROOT / ".venv/bin/python"), "-m", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def write_model(family: str, folder: Path, seed: int) -> None:
    """A random causal model in fp32, with a byte tokenizer."""
    name, tied = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SHAPE, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def train_reward_model(family: str, folder: Path, without: Sequence[str] = ()) -> Path:
    """Four steps of `weft reward` on two ranks; the checkpoint. In `folder` are pairs.jsonl and `policy`, the causal
    model that it began with."""
    write_model(family, folder / "policy", seed=0)
    rows = [
        {"prompt": f"{n} + {n + 2} = ", "chosen": f"{2 * n + 2}" + ", as I said" * (n % 3), "rejected": "no" + "?" * n}
        for n in range(PAIRS)
    ]
    write_jsonl(folder / "pairs.jsonl", *rows)
    run_weft(
        "weft", "reward", f"model.path={folder}/policy", f"data.path={folder}/pairs.jsonl", f"run.dir={folder}/rm",
        "step.documents=6", "train.steps=4", "train.epochs=null", "optimizer.lr=1e-3", "reward.head=normal", "--nproc",
        "2", "--device", "cpu", without=without,
    )  # fmt: skip
    return folder / "rm/checkpoints/latest"


def answers(folder: Path) -> list[str]:
    """The texts that were scored: each prompt with each of its answers, and with the token that ends them."""
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    return [row["prompt"] + row[name] + ENDING for row in rows for name in ("chosen", "rejected")]


def weft_scores(checkpoint: Path, texts: Sequence[str], without: Sequence[str] = ()) -> list[float]:
    """weft's own scores of texts, whose special tokens are read as such; no other is added."""
    file = checkpoint.parents[1] / "texts.json"
    file.write_text(json.dumps(texts))
    scores: list[float] = json.loads(
        run_weft("tests.support.reward_job", str(checkpoint), str(file), without=without).splitlines()[-1]
    )
    return scores


def main(checkpoint: str, file: str) -> None:
    from weft.config.schema import ModelConfig, StepConfig
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.engine.score_head import ScoreSpec
    from weft.engine.scores import scored_document, step_scores
    from weft.launch.process import join
    from weft.models import hf

    tokenizer, pad = transformers.AutoTokenizer.from_pretrained(checkpoint), hf.padding_id(checkpoint)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in json.loads(Path(file).read_text())]
    config = EngineConfig(
        model=ModelConfig(path=checkpoint), step=StepConfig(max_tokens_per_device=256), purpose="inference",
        score=ScoreSpec(task="sequence", end_marked=True),
    )  # fmt: skip
    with join("cpu") as ranks:
        engine = Engine(config, ranks)
        plan, local = engine.plan_step([scored_document(torch.tensor(tokens), pad) for tokens in ids])
        scores = step_scores(engine, plan, local)
    print(json.dumps([scores[index] for index in range(len(ids))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
