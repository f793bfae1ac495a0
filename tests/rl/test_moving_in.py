"""Quick starts of verl, TRL, ROLL and Miles: `weft migrate`, then only paths, sizes and the engine change, then
`weft rl` with the same roles, placement and algorithm. docs/coming-from/quick-starts.md has the results of 20 steps."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.rl.test_rl_run import VARIABLES, WEFT, weft
from tests.support.local_rl import lines_of
from tests.support.toy_tokenizers import family_tokenizer
from weft.config.yaml12 import Loader
from weft.inference.records import FOLDER, read_rollouts, rollout_files

QUICK_STARTS = Path(__file__).parents[1] / "foreign" / "quick_starts"
SIZES = [
    "model.path=tiny", "rollout.max_new_tokens=24", "rollout.max_prompt_tokens=128",
    "step.max_tokens_per_device=512", "run.dir=run", "checkpoint.every=0", "track.report_to=[]", "train.epochs=null",
]  # fmt: skip
NO_SERVER = ["rollout.engine=hf", "rollout.gpu_memory_utilization=null", "rollout.tp=null"]  # vLLM and SGLang need GPUs


@dataclass(frozen=True)
class QuickStart:
    """A config of another trainer and what a user changes of its draft.

    confirm: what `rl.algorithm` becomes, once the differences are read. changes: paths, sizes and the engine, which is
    one of a GPU. group, prompts, updates: of a rollout step; the first is the published one. kept: keys of the draft
    with the published values, which the run has.
    """

    file: str
    confirm: str | None
    changes: list[str]
    group: int
    prompts: int
    updates: int
    kept: dict[str, Any] = field(default_factory=dict)


CASES = {
    "verl's GSM8K": QuickStart(
        "verl_gsm8k.sh", "grpo",
        ["data.path=gsm8k.parquet", "eval.path=gsm8k.parquet", "rl.prompts_per_step=4", "cluster.trainer_ranks=2",
         "rollout.num_engines=1", "track.name=null", "track.project=null", *NO_SERVER],
        5, 4, 2,
        {"rl.kl_coef": 0.001, "rl.kl_in": "loss", "rl.kl_estimator": "k3", "rl.kl_clamp": 10.0, "rl.dual_clip": 3,
         "rl.loss_aggregation": "token_mean", "cluster.placement": "colocated", "optimizer.weight_decay": 0.01,
         "rl.minibatches": 2, "schedule.name": "constant"},
    ),
    "TRL's GRPO": QuickStart(
        "trl_grpo.py", None,
        ["data.path=solution.jsonl", "data.split=null", "rl.prompts_per_step=2", "cluster.trainer_ranks=2"],
        8, 2, 1,
        {"rl.advantage": "grpo", "rl.advantage_norm": "group", "rl.kl_coef": 0, "rl.loss_aggregation": "token_mean",
         "rl.clip": [0.2, 0.2], "rl.dual_clip": None, "rollout.engine": "embedded", "schedule.name": "linear"},
    ),
    "ROLL's RLVR": QuickStart(
        "roll_rlvr.yaml", "reinforce++",
        ["rl.prompts_per_step=4", "cluster.trainer_ranks=2", "mesh.dp_shard=2", "rollout.num_engines=1",
         "track.name=null", "eval.max_new_tokens=24", "rollout.allow_truncated=null", *NO_SERVER],
        8, 4, 1,
        {"rl.advantage": "reinforce++", "rl.dual_clip": 1.4, "rl.loss_aggregation": "sequence_mean",
         "rl.mask_truncated": True, "rl.kl_coef": 0.0, "rollout.temperature": 0.99, "rollout.top_p": 0.99,
         "rollout.top_k": 100, "rl.old_logprobs": "recompute", "cluster.placement": "colocated",
         "schedule.name": "linear", "schedule.warmup_steps": 20, "optimizer.weight_decay": 0.0},
    ),
    "Miles' FSDP": QuickStart(
        "miles_fsdp.sh", "grpo",
        ["rl.prompts_per_step=2", "data.path=dapo-math-17k.jsonl", "cluster.trainer_ranks=2", "rollout.num_engines=1",
         "rollout.engine_kwargs=null", "track.project=null", "eval.max_new_tokens=24", "eval.samples=2", *NO_SERVER],
        16, 2, 1,
        {"rl.advantage": "grpo", "rl.advantage_norm": "group", "rl.clip": [0.2, 0.28], "rl.dual_clip": None,
         "rl.loss_aggregation": "sequence_mean", "rl.kl_coef": 0.0, "rl.old_logprobs": "recompute",
         "rl.correction": "none", "cluster.placement": "colocated", "schedule.name": "constant", "eval.at_start": True,
         "optimizer.weight_decay": 0.1, "optimizer.betas": [0.9, 0.98]},
    ),
}  # fmt: skip


# ROLL's files -> the reward of their rows, by its name in `rl.reward`
DOMAINS = {
    "code_KodCode_data.jsonl": "code_sandbox", "llm_judge_Multi-subject-RLVR_deal_new.jsonl": "llm_judge",
    "math_deepmath_deal.jsonl": "math", "general_ifeval_train_deal.jsonl": "ifeval",
    "general_CrossThink-QA_deal.jsonl": "crossthinkqa", "math_benchmarks.jsonl": "math",
}  # fmt: skip
MY_REWARDS = """
def _holds(completions, answer):
    return [float(right in text) for text, right in zip(completions, answer)]

code_sandbox = llm_judge = ifeval = crossthinkqa = _holds
"""


def make_world(folder: Path) -> None:
    """A tiny Qwen3 that answers in the form of GSM8K and of `boxed`, mostly wrongly, and questions in the
    columns of each trainer's data."""
    asked = [(f"{a} figs and {b}?", str(a + b)) for a in range(2, 9) for b in range(2, 8)]
    turns = [[{"role": "user", "content": question}] for question, _ in asked]
    write_model(folder / "tiny", turns, [f"\\boxed{{{answer}}}\n#### {answer}" for _, answer in asked])
    rows = [{"prompt": messages, "solution": f"${answer}$"} for messages, (_, answer) in zip(turns, asked, strict=True)]
    write_lines(folder / "solution.jsonl", rows)
    for file in ("dapo-math-17k.jsonl", "aime-2024.jsonl"):  # Miles
        write_lines(folder / file, [{"prompt": row["prompt"], "label": row["solution"].strip("$")} for row in rows])
    for file, domain in DOMAINS.items():  # ROLL: messages as JSON; `domain` is added, by the tag of a row
        write_lines(folder / file, [
            {"messages": json.dumps(row["prompt"]), "ground_truth": row["solution"].strip("$"), "domain": domain}
            for row in rows
        ])  # fmt: skip
    (folder / "my_rewards.py").write_text(MY_REWARDS)
    Dataset.from_list([
        {"data_source": "openai/gsm8k", "prompt": messages, "ability": "math",
         "reward_model": {"ground_truth": answer, "style": "rule"}, "extra_info": {"index": n, "split": "train"}}
        for n, (messages, (_, answer)) in enumerate(zip(turns, asked, strict=True))
    ]).to_parquet(str(folder / "gsm8k.parquet"))  # fmt: skip


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, turns: list[list[dict[str, str]]], answers: list[str]) -> None:
    """Some steps of a plain loop: the form of an answer is learnt, the sum is not."""
    tokenizer = family_tokenizer("qwen", "qwen3")
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    ))  # fmt: skip
    prompts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    texts = [f"{prompt}{answer}<|im_end|>" for prompt, answer in zip(prompts, answers, strict=True)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def move(case: QuickStart, folder: Path) -> dict[str, Any]:
    """Write the draft, with the line that confirms what differs. Returns its sections."""
    gpus = ["--nproc", "8"] if case.file.endswith(".py") else []  # a program does not say
    draft = weft([*WEFT, "migrate", str(QUICK_STARTS / case.file), *gpus]).partition("weft migrate: ")[0]
    assert "weft does not know it" not in draft
    nearest = re.search(r"CONFIRM: write ([\w+]+),", draft)
    assert (nearest and nearest[1]) == case.confirm
    sections: dict[str, Any] = yaml.load(draft, Loader)
    sections["rl"]["algorithm"] = case.confirm or sections["rl"]["algorithm"]
    for source in (source for section in ("data", "eval") for source in sections.get(section, {}).get("sources", ())):
        source["path"] = str(folder / Path(source["path"]).name)
    (folder / "mine.yaml").write_text(yaml.safe_dump(sections))
    return sections


@pytest.mark.table
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_quick_start_moves_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    steps = case.kept.get("schedule.warmup_steps", 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(VARIABLES, "PYTHONPATH", f"{VARIABLES['PYTHONPATH']}{os.pathsep}{tmp_path}")  # my_rewards
    make_world(tmp_path)
    move(case, tmp_path)
    paths = re.compile(r"=(tiny|run|[\w.-]+\.(?:jsonl|parquet))$")
    words = [paths.sub(rf"={tmp_path}/\1", word) for word in (*SIZES, *case.changes)]
    weft([*WEFT, "rl", str(tmp_path / "mine.yaml"), *words, f"train.steps={steps * case.updates}"])
    lines = [line for line in lines_of(tmp_path / "run") if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, steps * case.updates + 1))
    for path in rollout_files(tmp_path / "run" / FOLDER).values():
        groups = read_rollouts(path)
        assert len(groups) == case.prompts and all(len(group.samples) == case.group for group in groups)
    config = yaml.load((tmp_path / "run/config.yaml").read_text(), Loader)
    assert {key: config[key.partition(".")[0]][key.partition(".")[2]] for key in case.kept} == case.kept
