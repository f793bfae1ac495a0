"""TRL trains and scores with what `weft reward` saved, as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from tests.support.reward_job import FAMILIES, answers, run_weft, train_reward_model, weft_scores

COMMON: dict[str, Any] = dict(
    use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=1, logging_steps=1, save_strategy="no",
    report_to="none", disable_tqdm=True,
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    train_reward_model(request.param, path)
    return path


def pairs(folder: Path) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()])


def test_reward_trainer_goes_on_as_weft_does(folder: Path) -> None:
    """One step over all pairs: loss, gradient norm, scores and accuracy of both, and of weft's own scores."""
    checkpoint, data = folder / "rm/checkpoints/latest", pairs(folder)
    arguments = RewardConfig(
        output_dir=str(folder / "reward"), per_device_train_batch_size=len(data), max_length=None, learning_rate=1e-4,
        disable_dropout=True, **COMMON,
    )  # fmt: skip
    trainer = RewardTrainer(model=str(checkpoint), args=arguments, train_dataset=data)
    trainer.train()
    theirs = trainer.state.log_history[0]
    run_weft(
        "weft", "reward", f"model.path={checkpoint}", f"data.path={folder}/pairs.jsonl", f"run.dir={folder}/on",
        f"step.documents={len(data)}", "train.steps=1", "train.epochs=null", "--device", "cpu",
    )  # fmt: skip
    ours = json.loads((folder / "on/metrics.jsonl").read_text().splitlines()[0])
    for name, of_trl in (("loss", "loss"), ("grad_norm", "grad_norm"), ("accuracy", "accuracy"), ("margin", "margin")):
        assert ours[name] == pytest.approx(float(theirs[of_trl]), rel=1e-4), name
    scores = weft_scores(checkpoint, answers(folder))
    assert max(scores) - min(scores) > 0.1, "scores that are all alike show little"
    for name, of_scores in (("min_reward", min), ("max_reward", max)):
        assert of_scores(scores) == pytest.approx(float(theirs[name]), rel=1e-4, abs=1e-5)


def test_grpo_trainer_takes_it_as_a_reward_function(folder: Path) -> None:
    """The rewards of sampled answers are weft's scores of their texts."""
    checkpoint = folder / "rm/checkpoints/latest"
    arguments = GRPOConfig(
        output_dir=str(folder / "grpo"), per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
        temperature=1.0, log_completions=True, **COMMON,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder / "policy"), reward_funcs=str(checkpoint), args=arguments,
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"), train_dataset=pairs(folder),
    )  # fmt: skip
    trainer.train()
    (file,) = (folder / "grpo").rglob("*.parquet")
    rows = pandas.read_parquet(file)
    scores = weft_scores(checkpoint, list(rows["prompt"] + rows["completion"]))
    assert len(set(scores)) > 4
    assert list(rows[trainer.reward_func_names[0]]) == pytest.approx(scores, abs=1e-5)
