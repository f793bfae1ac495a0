"""`weft reward` through the real command: a style that is preferred, labels, steps, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.make_style_demo import main as make_demo
from tests.support import forked, local_rl
from tests.support.local_rl import rollouts_of
from tests.support.pool import run as run_in_pool
from tests.support.toy_tokenizers import write_jsonl
from weft import cli
from weft.config.load import load_config
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import LabelKind
from weft.data.labels import parse_labelled
from weft.data.records import ParseOptions
from weft.errors import UserError
from weft.launch.options import ChatOptions, MeasureOptions
from weft.observe.measured import measured_config
from weft.recipes.chat import open_chat
from weft.recipes.measure import _losses
from weft.recipes.reward import RewardRecipe

Weft = Callable[..., subprocess.CompletedProcess[str]]
EXAMPLES = Path(__file__).parents[2] / "examples"
KEYS = ["model.init=random", "optimizer.lr=2e-3", "step.max_tokens_per_device=1024"]
BASE = ["model.path=writer", "data.path=preferences.jsonl", "step.documents=32", *KEYS]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("style")
    make_demo(path)
    return path


@pytest.fixture(scope="module")
def weft(folder: Path) -> Weft:
    return lambda *words: forked.run(words, folder)


@pytest.fixture
def workdir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(weft: Weft, folder: Path) -> tuple[Path, str]:
    """(Run folder, console): 20 steps on one rank; the second half of the pairs is compared on the way."""
    done = weft("reward", *BASE, "train.steps=20", "eval.path=held-out.jsonl", "run.dir=rm", "checkpoint.every=10",
                "checkpoint.trainer_state=all", "reward.head=normal", "reward.center_rewards_coefficient=0.01",
                "reward.loss=bradley_terry")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "rm", done.stdout


@pytest.mark.covers("reward.loss", "reward.head", "reward.center_rewards_coefficient")
def test_the_preferred_style_gets_the_higher_score(trained: tuple[Path, str]) -> None:
    """Held-out pairs, and the same by transformers."""
    run, console = trained
    last = lines(run)[-1]
    assert last["eval/accuracy"] > 0.95 and last["accuracy"] > 0.95 and last["scores/chosen"] > last["scores/rejected"]
    assert abs(last["scores/chosen"] + last["scores/rejected"]) < 1.0  # centered
    assert (
        "accuracy" in console and "rl.reward=" in console and "model:" in console and "a new head (normal)" in console
    )
    checkpoint = run / "checkpoints/latest"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (run.parent / "held-out.jsonl").read_text().splitlines()]
    means = {}
    for name in ("chosen", "rejected"):
        texts = [f"{row['prompt']}{row[name]} {tokenizer.eos_token}" for row in rows]
        with torch.no_grad():
            means[name] = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.mean()
    assert float(means["chosen"]) == pytest.approx(last["eval/scores/chosen"], abs=1e-4)
    assert float(means["rejected"]) == pytest.approx(last["eval/scores/rejected"], abs=1e-4)


def test_a_run_goes_on_on_another_mesh(trained: tuple[Path, str], weft: Weft, folder: Path) -> None:
    """With rows so short that pairs are parted, on two ranks; and what resumes has the same steps."""
    done = weft("reward", *BASE, "train.steps=20", "run.dir=other", "reward.head=normal", "checkpoint.every=10",
                "reward.center_rewards_coefficient=0.01", "--nproc", "2", "step.max_tokens_per_device=64")  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = [line["loss"] for line in lines(trained[0])]
    assert [line["loss"] for line in lines(folder / "other")] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    (folder / "other/checkpoints/latest").unlink()
    for path in (folder / "other/checkpoints/step-000020").rglob("*"):
        path.unlink() if path.is_file() else None
    refused = weft("reward", "--resume", "other", "optimizer.lr=1.0")
    assert refused.returncode == 2 and "weft reward other/config.yaml model.path=" in refused.stderr
    done = weft("reward", "--resume", "other", "step.max_tokens_per_device=1024")
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in lines(folder / "other")] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_trained_model_goes_on_with_its_head(trained: tuple[Path, str], weft: Weft, folder: Path) -> None:
    run, _ = trained
    done = weft("reward", f"model.path={run}/checkpoints/latest", "data.path=preferences.jsonl", "step.documents=32",
                "train.steps=1", "run.dir=more", "lora.rank=4")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "its existing head" in done.stdout and lines(folder / "more")[0]["accuracy"] > 0.9
    described = json.loads((folder / "more/checkpoints/latest/adapter_config.json").read_text())
    assert described["task_type"] == "SEQ_CLS" and described["modules_to_save"] == ["score"]


def test_a_policy_is_taught_the_style_by_the_reward_model(trained: tuple[Path, str], weft: Weft, folder: Path) -> None:
    """The model writes both styles before."""
    words = ["model.path=writer", "data.path=letters.jsonl", "step.documents=64", "step.max_tokens_per_device=2048"]
    done = weft("sft", *words, "model.init=random", "optimizer.lr=3e-3", "train.epochs=2", "run.dir=taught")
    assert done.returncode == 0, done.stderr
    config = load_config(
        [str(EXAMPLES / "rl_style_cpu.yaml")],
        [f"model.path={folder}/taught/checkpoints/latest", f"data.path={folder}/requests.jsonl",
         f"rl.reward=[model:{trained[0]}/checkpoints/latest]", f"run.dir={folder}/rl", "train.steps=30"],
        RlConfig,
    )  # fmt: skip
    local_rl.run_config(config)
    steps = rollouts_of(folder / "rl")

    def polite(numbers: list[int]) -> float:
        texts = [row["completion"] for number in numbers for row in steps[number]]
        return sum("dear" in text and "regards" in text for text in texts) / len(texts)

    assert polite([1, 2]) < 0.7 < 0.8 < polite([28, 29, 30])


# ---------------------------------------------------------------- labels


def recipe_of(folder: Path, *words: str) -> RewardRecipe:
    keys = [f"model.path={folder}/writer", "model.init=random", f"data.path={folder}/rows.jsonl", *words]
    return RewardRecipe(load_config([], [*keys, "data.cache=null"], RewardConfig))


@pytest.mark.covers("reward.num_labels")
def test_a_label_of_a_row_is_learnt(weft: Weft, folder: Path) -> None:
    """The number of words; and whether a letter is polite."""
    rows = [json.loads(line) for line in (folder / "letters.jsonl").read_text().splitlines()][:400]
    write_jsonl(folder / "rows.jsonl", *({**row, "rating": float(len(row["completion"].split()))} for row in rows))
    done = weft("reward", "model.path=writer", *KEYS, "data.path=rows.jsonl", "step.documents=32", "train.epochs=4",
                "data.columns={label: rating}", "reward.loss=regression", "run.dir=regression")  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *_, last = lines(folder / "regression")
    assert last["loss"] < 0.1 * first["loss"]
    write_jsonl(folder / "rows.jsonl", *({**row, "label": int("dear" in row["completion"])} for row in rows))
    done = weft("reward", "model.path=writer", *KEYS, "data.path=rows.jsonl", "step.documents=32", "train.epochs=2",
                "reward.loss=classification", "reward.num_labels=3", "run.dir=classes")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert lines(folder / "classes")[-1]["accuracy"] > 0.95
    assert transformers.AutoConfig.from_pretrained(folder / "classes/checkpoints/latest").num_labels == 3


@pytest.mark.covers("reward.step_separator", "reward.train_on_last_step_only")
@pytest.mark.parametrize(("last", "expected"), [(False, {8: 1.0, 11: 0.0}), (True, {11: 0.0})])
def test_the_end_of_each_step_is_scored(folder: Path, last: bool, expected: dict[int, float]) -> None:
    """The prompt has five tokens, `to anna : rain ->`; each step ends with `:`."""
    row = {"prompt": "to anna : rain ->", "completions": ["dear anna", "rain"], "labels": [True, False]}
    write_jsonl(folder / "rows.jsonl", row)
    words = ["reward.loss=process", "reward.step_separator=' : '", f"reward.train_on_last_step_only={last}"]
    document = recipe_of(folder, *words).read_data().documents[0]
    scored = document.weights.nonzero()[:, 0].tolist()
    assert len(document) == 5 + 3 + 2 + 1
    labels = {position: float(document.arrays["label"][position]) for position in scored}
    assert labels == {position - (position == 11): label for position, label in expected.items()}


def test_steps_are_learnt(weft: Weft, folder: Path) -> None:
    """A step is right if it has the word of the prompt."""
    rows = [
        {"prompt": f"to anna : {word} ->", "completions": [f"dear {word}", f"bye {wrong}"], "labels": [True, False]}
        for word in ("rain", "tea", "book", "train") for wrong in ("lake", "snow", "bread")
    ] * 8  # fmt: skip
    write_jsonl(folder / "rows.jsonl", *rows)
    done = weft("reward", "model.path=writer", *KEYS, "data.path=rows.jsonl", "step.documents=16", "train.epochs=5",
                "reward.loss=process", "reward.step_separator=' : '", "run.dir=steps")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert lines(folder / "steps")[-1]["accuracy"] > 0.95
    config = transformers.AutoConfig.from_pretrained(folder / "steps/checkpoints/latest")
    assert config.architectures == ["Qwen3ForTokenClassification"] and config.num_labels == 2


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("rows", "words", "expected"), [
    ([{"prompt": "to anna", "completion": "rain"}], ["reward.loss=regression"], "no `label`. Name the column"),
    ([{"prompt": "to anna", "completion": "rain", "label": "good"}], ["reward.loss=regression"], "must be a number"),
    ([{"prompt": "to anna", "completion": "rain", "label": 2}], ["reward.loss=classification"], "classes are 0 to 1"),
    ([{"prompt": "to anna", "completions": ["a"], "labels": [None]}], ["reward.loss=process"], "or false, not None"),
    ([{"prompt": "to anna", "completions": ["rain"], "labels": []}], ["reward.loss=process"], "for each of 1 steps"),
    ([{"prompt": "to anna", "completions": ["rain"]}], ["reward.loss=process"], "has no `labels`"),
    ([{"prompt": "to anna", "completions": ["rain"], "labels": [3]}], ["reward.loss=process"], "true or false, not 3"),
])  # fmt: skip
def test_rows_that_have_no_label_are_named(
    folder: Path, rows: list[dict[str, Any]], words: list[str], expected: str
) -> None:
    write_jsonl(folder / "rows.jsonl", *rows)
    with pytest.raises(UserError) as caught:
        recipe_of(folder, *words).read_data()
    assert expected in str(caught.value) and ":1: " in str(caught.value)


@pytest.mark.parametrize("kind", ["number", "class"])
def test_a_missing_number_of_a_table_is_no_label(kind: LabelKind) -> None:
    row = {"prompt": "to anna", "completion": "rain", "label": float("nan")}
    with pytest.raises(UserError, match="^rows:2: `label` must be a finite number, not nan"):
        parse_labelled("rows:2", row, ParseOptions(label=kind, num_labels=2))


@pytest.mark.parametrize(("words", "expected"), [
    (["lora.rank=4", "lora.dropout=0.1"], "lora.dropout=0"), (["train.loss=my:Loss"], "reward.loss defines"),
    (["reward.num_labels=3"], "only reward.loss=classification reads it"),
    (["reward.loss=process", "reward.step_separator=''"], "reward.step_separator is empty"),
    (["train.neftune_noise_alpha=5"], "different noise"), (["eval.prompts=held-out.jsonl"], "returns scores, not text"),
])  # fmt: skip
def test_keys_that_do_not_go_together(workdir: Path, words: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config([], ["model.path=writer", "model.init=random", "data.path=preferences.jsonl", *words], RewardConfig)
    assert expected in str(caught.value)


def test_a_reward_model_is_no_model_of_text(trained: tuple[Path, str], workdir: Path) -> None:
    words = [f"model.path={trained[0]}/checkpoints/latest", "data.path=letters.jsonl", "run.dir=text"]
    assert cli.main(["sft", *words, "--dry-run"]) != 0
    with pytest.raises(UserError, match="returns scores, not text: `weft eval .*rm DATA`"):
        open_chat(ChatOptions(path=str(trained[0]), device="cpu"))


def test_held_out_pairs_are_measured_alike_by_run_and_command(trained: tuple[Path, str], workdir: Path) -> None:
    config = measured_config(str(trained[0]), [str(workdir / "held-out.jsonl")])
    assert isinstance(config, RewardConfig)
    options = MeasureOptions(path=str(trained[0]), device="cpu", json=True)
    (figures,) = run_in_pool(1, _losses, config, options)
    last = lines(trained[0])[-1]
    for name in ("loss", "accuracy", "scores/chosen", "scores/rejected"):
        assert figures[f"eval/{name}"] == pytest.approx(last[f"eval/{name}"], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("words", [
    ["reward.center_rewards_coefficient=0.1", "--nproc", "2"], ["reward.loss=process"],
    pytest.param(["reward.loss=classification"], marks=pytest.mark.table),
])  # fmt: skip
def test_verify_compares_the_scores_loss(weft: Weft, folder: Path, words: list[str]) -> None:
    write_jsonl(folder / "rows.jsonl", {"prompt": "to", "chosen": " dear", "rejected": " hey"})
    (folder / "v.yaml").write_text("model: {path: writer, init: random}\ndata: {path: rows.jsonl}\nreward: {}\n")
    done = weft("verify", "v.yaml", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "PASS" in done.stdout and ": gradients, many micro-batches" in done.stdout
