"""Names of other trainers: the table is sound, and every key of their configs is answered, all at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft import cli
from weft.config import SftConfig, load_config
from weft.config.coerce import MismatchError, coerce
from weft.config.keys import schema_keys
from weft.config.migrate.check import problems
from weft.config.migrate.names import advice_for, trainers_of
from weft.config.migrate.pages import page
from weft.config.migrate.tables import TableError
from weft.config.migrate.trainer import FOLDER, TABLES, Tables
from weft.config.rl_schema import RlConfig
from weft.config.yaml12 import Node, read_file, read_value
from weft.errors import UserError

ROOT = Path(__file__).parents[2]
SOURCE_PATH = {"PYTHONPATH": str(ROOT)}
FOREIGN = Path(__file__).parents[1] / "foreign"
BY_NAME = {trainer.name: trainer for trainer in TABLES.trainers}


pytestmark = pytest.mark.usefixtures("model_folder")


def refusal(*files: str, overrides: tuple[str, ...] = (), schema: type = SftConfig) -> str:
    with pytest.raises(UserError) as caught:
        load_config(files, ["model.path=m", "data.path=d.jsonl", *overrides], schema)
    return str(caught.value)


# ---------------------------------------------------------------- the table


def test_every_name_sentence_and_key_of_the_tables_is_one_that_there_is() -> None:
    assert list(problems(TABLES)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("trl.yaml", "signs:", "sings:", "trl.yaml: `sings` is not a key of a table: did you mean signs?"),
        ("trl.yaml", "title: TRL", "# title: TRL", "trl.yaml: `title` is missing."),
        ("trl.yaml", "TOKEN_BUDGET: [auto_find_batch_size]", "TOKEN_BUDGET: auto_find_batch_size",
         "trl.yaml: names: The batch: TOKEN_BUDGET: must be a list of strings, not auto_find_batch_size."),
        ("verl.yaml", "TOKEN_MEAN:", "TOKEN_MEEN:", "verl.yaml: names: The batch: TOKEN_MEEN is not a sentence"),
        ("verl.yaml", "[loss_agg_mode,", "[pad_mode,", "pad_mode is under both PACKED and TOKEN_MEAN: remove one."),
        ("verl.yaml", "    TOKEN_BUDGET:", "    PACKED:", "verl.yaml: cannot be read: `PACKED` stands twice"),
        ("verl.yaml", "[use_torch_compile]", "[micro_batch_size]", "micro_batch_size is under both The batch and"),
        ("miles.yaml", "GROUP:", "GRUOP:", "miles.yaml: rl: GRUOP is not a sentence of sentences.yaml."),
        ("axolotl.yaml", "reinforcement learning: {", "rl: {", "axolotl.yaml: tasks: rl is not one of distillation"),
        ("torchtune.yaml", "note: ALPACA", "note: ALPAC", "dataset._component_: ALPAC is not"),
        ("axolotl.yaml", "adapter: lora\n", "adapter: qlora\n", "axolotl.yaml: silent: adapter: qlora is also under"),
        ("shared.yaml", "run.dir: [output_dir", "run.dir: [seed, output_dir", "seed is under both train.seed and"),
        ("shared.yaml", "sharing: [", "shared: [", "shared.yaml: ranks: `shared` is not a key of a table: did you"),
        ("roll.yaml", "DTYPE: [dtype", "DTYPE: [Dtype", "roll.yaml: names: Dtype is not a name: write it in lower"),
        ("roll.yaml", "SEED: [seed", "SEED: [train.seed", "roll.yaml: names: train.seed is a key of weft"),
        ("roll.yaml", "optimizer.lr: 5.0e-5", "optimizer.rate: 5.0e-5", "defaults: optimizer.rate is not a key of"),
        ("roll.yaml", "optimizer.lr: 5.0e-5", "optimizer.lr: 1.0e-5", "optimizer.lr: 1e-05 is also weft's default"),
        ("roll.yaml", "rl.prompts_per_step: [roll", "rl.promts: [roll", "rl_draft: rl.promts is not a key of `weft"),
        ("roll.yaml", "tokens: [prompt_length]", "tokens: [promt_length]", "rl_draft: promt_length is missing"),
        ("roll.yaml", "rollout.engine: hf}", "rollout.engin: hf}", "roll.yaml: rl_draft: rollout.engin is not a key"),
        ("roll.yaml", "  longest: [", "  longst: [", "rl_draft: `longst` is not a key of a table: did"),
        ("roll.yaml", "{max_pixels: 1048576", "{max_pixel: 1048576", "vision: max_pixel is missing under `means`."),
        ("torchtune.yaml", "train.epochs: [epochs]", "train.epoch: [epochs]", "moves: train.epoch is not a key of"),
        ("torchtune.yaml", "train.epochs: [epochs]", "train.epochs: [epocs]", "torchtune.yaml: epocs is missing"),
        ("torchtune.yaml", "fp32: {fsdp.param_dtype", "fp32: {fsdp.dtype", "means: dtype: fsdp.dtype is not a key"),
        ("trl.yaml", "LENGTH:", "Lenght:", "trl.yaml: names: max_length: the sentence follows a colon: begin in"),
        ("miles.yaml", "  GROUP:", "  \"set `rl.groups`.\":", "miles.yaml: rl: n_samples_per_prompt: `rl.groups` in"),
        ("trl.yaml", "lora: {", "lora: {lora_r: [true], ", "trl.yaml: lora: lora_r, use_peft: write only"),
        ("torchtitan.yaml", "STEPS: [", "EPOCHS: [max_steps, ", "names: max_steps: trl.yaml has a different"),
        ("sentences.yaml", "set `track.project`.", "say `track.projct`.", "PROJECT: `track.projct` in its sen"),
        ("sentences.yaml", "set `rl.kl_unbiased`.", "Set `rl.kl_unbiased`", "rl: UNBIASED: the sentence follows"),
    ],
)  # fmt: skip
def test_a_typo_in_a_table_is_named_with_its_file(tmp_path: Path, file: str, old: str, new: str, words: str) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "tables"))
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    try:
        message = "\n".join(problems(Tables(folder)))
    except TableError as error:
        message = str(error)
    assert words in message and file in message


def test_a_table_that_is_not_listed_and_a_page_without_an_introduction(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "tables"))
    (folder / "trl.md").rename(folder / "trlx.md")
    assert list(problems(Tables(folder))) == [
        "trl.md is missing: write the introduction of the trainer's page.",
        "trlx.md: trlx is not one of `trainers` in shared.yaml.",
    ]


def test_a_good_config_reads_no_table() -> None:
    code = (
        "from weft.config import load_config; from weft.config.migrate.trainer import TABLES\n"
        "load_config([], ['model.path=m', 'data.path=d.jsonl']); print(sorted(vars(TABLES)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **SOURCE_PATH}
    )
    assert done.stdout.strip() == "['folder']", done.stderr


def test_what_is_said_of_reinforcement_learning() -> None:
    """In a config of `weft rl` names of algorithms are answered, and what is no name but of SFT as there."""
    overrides = [
        "rl.reward=[math]",
        "beta=0.1",
        "actor_rollout_ref.rollout.n=8",
        "learning_rate=1",
        "rl.clipp=1",
        "actor_infer.foo=1",
    ]
    with pytest.raises(UserError) as caught:
        load_config([], ["model.path=m", "data.path=d.jsonl", "actor_infer.x=1", *overrides], RlConfig)
    for words in (
        "set `rl.kl_coef`",
        "set `rl.group_size`",
        "set `optimizer.lr`",
        "did you mean rl.clip?",
        "look for it in",
    ):
        assert words in str(caught.value)


def test_sections_of_reinforcement_learning_are_none_of_sft() -> None:
    assert "rl and cluster belong to `weft rl`: remove them" in refusal(
        overrides=("rl.prompts_per_step=3", "cluster.trainer_ranks=2")
    )


def test_there_are_at_least_400_names_and_50_of_each() -> None:
    assert len(TABLES.names) >= 400 and len(TABLES.rl_names) >= 200
    assert all(len(trainer.names) >= 50 for trainer in TABLES.trainers)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "set `schedule.warmup_steps`."),
        ("train.per-device-train-batch-size", "Set `step.documents` ="),
        ("Learning_Rate", "set `optimizer.lr`."),
        ("checkpoint.interval", "set `checkpoint.every`"),
        ("dataset.path_or_dataset", "set `data.path`."),
        ("validation_dataset.path_or_dataset", "set `eval.path`."),
        ("validation_dataset", "set `eval.path`."),
        ("wandb.entity", "set `track.report_to`"),
        ("interval", None),
        ("no_such_name", None),
    ],
)
def test_a_name_is_known_by_the_most_that_the_table_has_of_it(name: str, words: str | None) -> None:
    advice = advice_for(name)
    assert (words is None and advice is None) or (words is not None and advice is not None and words in advice)


@pytest.mark.parametrize(
    "key", [key for key in TABLES.values if key != "optimizer.name"]
)  # which takes any import path
def test_values_of_others_are_none_of_weft_and_the_answers_are(key: str) -> None:
    kind = schema_keys(SftConfig)[key].type
    for foreign, answer in TABLES.values[key].items():
        assert foreign == foreign.lower()
        coerce(read_value(answer, ""), kind)
        if kind is not str:  # optimizer.name may be an import path; weft/config/checks.py says what is none
            with pytest.raises(MismatchError):
                coerce(read_value(foreign, ""), kind)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.name=adamw_torch_fused", "optimizer.name is adamw_torch_fused: write adamw."),
        ("optimizer.name=AdamW", "optimizer.name is AdamW: write adamw."),
        ("schedule.name=cosine_with_min_lr", ": write cosine."),
        ("fsdp.param_dtype=bfloat16", ": write bf16."),
        ("model.attention=flash_attention_2", ": write auto."),
        ("model.recompute=true", ": write full."),
        ("fsdp.reshard_after_forward=never", ": write false."),
        ("+step.documents=4", "write step.documents=4, without Hydra's +."),
        ("~train.epochs", "no such config file"),
    ],
)
def test_values_and_spellings_of_others_are_answered(override: str, words: str) -> None:
    message = refusal(overrides=(override,)) if "=" in override else refusal(override)
    assert words in message


def test_a_config_may_be_toml() -> None:
    Path("job.toml").write_text('[model]\npath = "m"\n[step]\ndocuments = 8\n[optimizer]\nbetas = [0.9, 0.99]\n')
    config = load_config(["job.toml"], ["data.path=d.jsonl"])
    assert (config.step.documents, config.optimizer.betas) == (8, (0.9, 0.99))
    Path("job.toml").write_text("[training]\nlocal_batch_size = 8\n")
    assert "job.toml: training.local_batch_size is not a key of weft: weft splits micro-batches" in refusal("job.toml")
    Path("job.toml").write_text("[training\n")
    assert refusal("job.toml").startswith("job.toml: not valid TOML: ")


# ---------------------------------------------------------------- real configs


def leaves(node: Node, name: str = "") -> list[str]:
    if not node.is_section or not node.value:
        return [name]
    return [leaf for key, child in node.value.items() for leaf in leaves(child, f"{name}.{key}".lstrip("."))]


CONFIGS = {
    "trl.yaml": "trl",
    "trl_lora.yaml": "trl",
    "accelerate.yaml": "accelerate",
    "axolotl.yaml": "axolotl",
    "llama_factory.yaml": "llama_factory",
    "torchtune.yaml": "torchtune",
    "verl.yaml": "verl",
    "verl_engine.yaml": "verl",
    "roll.yaml": "roll",
    "torchtitan.yaml": "torchtitan",
    "automodel.yaml": "automodel",
    "trl_vision.yaml": "trl",
    "axolotl_vision.yaml": "axolotl",
    "llama_factory_vision.yaml": "llama_factory",
    "verl_vision.yaml": "verl",
    "roll_vision.yaml": "roll",
}
REINFORCED = ("verl_vision.yaml", "roll_vision.yaml")


@pytest.mark.parametrize("file", CONFIGS)
def test_every_key_of_a_real_config_is_answered_at_once(file: str) -> None:
    """Each key is one of weft's, or it stands in the message (itself or its section) with advice from the table."""
    path, schema = FOREIGN / file, RlConfig if file in REINFORCED else SftConfig
    message = refusal(str(path), overrides=("rl.reward=[math]",) if file in REINFORCED else (), schema=schema)
    assert "did you mean" not in message and "the sections are" not in message, message
    keys = leaves(read_file(str(path)))
    for key in keys:
        above = [".".join(key.split(".")[:n]) for n in range(1, key.count(".") + 2)]
        answered = any(re.search(rf"[ ,]{re.escape(name)}(?= is| are|,| and)", message) for name in above)
        assert answered or key in schema_keys(schema), key
    assert f"docs/coming-from/{CONFIGS[file]}.md" in message.splitlines()[-1]


def test_the_flags_of_miles_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for line in (FOREIGN / "miles.sh").read_text().splitlines()[1:] for word in line.split()]
    flags = [word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")]
    assert cli.main(["sft", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: weft sft: keys are set without dashes, as section.key=value.\n")
    for flag in flags:
        assert BY_NAME["miles"] in trainers_of(flag), flag
        assert re.search(rf"[ ,]{flag.replace('_', '-')}(?= is| are|,| and)", message), flag
    assert "docs/coming-from/miles.md" in message.splitlines()[-1]


def test_keys_with_one_answer_share_a_line() -> None:
    Path("a.yaml").write_text("per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\nmax_seq_len: 4\n")
    Path("b.yaml").write_text("grad_acc_steps: 8\n")
    lines = refusal("a.yaml", "b.yaml", overrides=("cutoff_len=3",)).splitlines()
    assert lines[0] == "2 problems in the config:"
    assert lines[1].startswith(
        "  a.yaml:1, 2; b.yaml:1: per_device_train_batch_size, gradient_accumulation_steps and grad_acc_steps are not "
        "keys of weft: a step is a set of documents"
    )
    assert lines[2].startswith("  a.yaml:3; command line: max_seq_len and cutoff_len are not keys of weft: set")


def test_a_few_names_do_not_make_a_trainer() -> None:
    assert "docs/coming-from" not in refusal(overrides=("lora_rank=8", "use_wandb=true"))


# ---------------------------------------------------------------- the pages


@pytest.mark.parametrize("name", BY_NAME)
def test_a_page_is_current(name: str) -> None:
    written = (ROOT / "docs" / "coming-from" / f"{name}.md").read_text()
    assert written == page(BY_NAME[name]), "run: make docs"


def test_the_tables_import_no_torch() -> None:
    code = "import sys, weft.config.migrate.pages; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
