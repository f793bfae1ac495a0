"""weft migrate: what a draft says of the configs of other trainers, and that it is a config of weft's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hostile.test_configs import SPECIAL
from tests.support.mistakes import write_folder
from weft import cli
from weft.config import SftConfig, load_config
from weft.config.commands import SCHEMAS
from weft.config.keys import schema_keys
from weft.config.migrate.draft import Draft
from weft.config.migrate.migrate import migrate
from weft.config.migrate.names import entry_of
from weft.config.migrate.roll import ALGORITHM
from weft.config.migrate.trainer import TABLES
from weft.config.rl_checks import INERT
from weft.config.rl_schema import RlConfig
from weft.config.yaml12 import Loader, Node, read_file
from weft.errors import UserError

FOREIGN = Path(__file__).parents[1] / "foreign"
FILES = sorted(path.name for path in FOREIGN.iterdir() if path.suffix in (".yaml", ".sh"))
REINFORCED = ("roll_vision.yaml", "verl_vision.yaml", "verl_grpo.sh", "trl_grpo.yaml")


def command(file: str) -> str:
    """weft's command for a file, of which the name's last word tells."""
    last = Path(file).stem.rpartition("_")[2]
    commands = dict.fromkeys(("dpo", "kto", "orpo", "simpo"), "dpo") | {"reward": "reward", "distill": "distill"}
    return "rl" if file in REINFORCED else commands.get(last, "sft")


def values(*files: str, ranks: int | None = None) -> dict[str, Any]:
    """section.key -> value of the draft."""
    draft = yaml.safe_load(migrate([str(FOREIGN / file) for file in files], ranks))
    return {f"{section}.{leaf}": value for section, keys in draft.items() for leaf, value in keys.items()}


def expect(carried: dict[str, Any], expected: dict[str, Any]) -> None:
    """Keys that this version has not are left out of what is expected."""
    expected_keys = {key: value for key, value in expected.items() if key in schema_keys(SftConfig)}
    got = {key: float(value) if str(value).replace("e-", "").isdigit() else value for key, value in carried.items()}
    assert {key: got.get(key) for key in expected_keys} == expected_keys


HOSTILE_SCRIPTS = {
    "variables that double": (
        "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60,
        "with its variables replaced, a word has over 100,000",
    ),
    "a quote in a variable": ('A="it\'s"\npython train.py $A\n', "No closing quotation"),
    "a quote": ("python train.py 'a\n", "No closing quotation"),
    "no UTF-8": ("\udcff", "can't decode"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE_SCRIPTS)
def test_a_script_that_attacks_its_reader(name: str, tmp_path: Path) -> None:
    text, words = HOSTILE_SCRIPTS[name]
    (tmp_path / "a.sh").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=f"a.sh: cannot be read as a shell script: .*{words}"):
        migrate([str(tmp_path / "a.sh")])


@pytest.mark.parametrize(("lowest", "lr"), [("null", "1e-5"), ("1e-6", "0"), ("low", "1e-5"), ("[1]", "1e-5")])
def test_a_lowest_rate_that_is_no_share_of_the_rate_is_left(lowest: str, lr: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"model_name_or_path: m\nlearning_rate: {lr}\nmin_lr: {lowest}\n")
    assert "min_lr / lr" not in migrate([str(tmp_path / "a.yaml")])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_script_that_is_no_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = SPECIAL[kind]
    make(Path("a.sh"))
    with pytest.raises(UserError, match=f"a.sh: is {message}"):
        migrate(["a.sh"])


def test_trl() -> None:
    carried = values("trl.yaml", ranks=4)
    expect(
        carried,
        {
            "model.path": "org/base-7b", "model.recompute": "full", "data.max_length": 4096,
            "data.long_documents": "truncate", "data.train_on": "answers", "fsdp.param_dtype": "bf16",
            "step.tokens": 2 * 8 * 4 * 4096, "optimizer.lr": 2e-5, "optimizer.weight_decay": 0.01,
            "optimizer.betas": [0.9, 0.98], "schedule.name": "cosine", "schedule.warmup_ratio": 0.1,
            "schedule.min_lr_ratio": 0.1, "train.epochs": 1, "train.seed": 42, "checkpoint.every": 100,
            "checkpoint.keep": 1, "run.dir": "data/base-7b-sft",
        },
    )  # fmt: skip
    assert carried["track.report_to"] == ["wandb"]
    assert "train.steps" not in carried  # max_steps: -1
    draft = migrate([str(FOREIGN / "trl.yaml")])
    assert "tokens: 65536  # 8 x 2 x 4096 x the number of GPUs: multiply by that number, or set --nproc\n" in draft
    assert "min_lr_ratio: 0.1  # lr_scheduler_kwargs.min_lr_rate\n" in draft


def test_what_trl_leaves_unsaid() -> None:
    """Two files, one of accelerate, which says how many processes there are; the rest are TRL's own defaults."""
    expect(
        values("trl_lora.yaml", "accelerate.yaml"),
        {
            "optimizer.name": "adamw", "optimizer.weight_decay": 0.0, "optimizer.betas": [0.9, 0.999],
            "schedule.name": "linear", "schedule.warmup_steps": 20, "train.timeout": 1800, "train.epochs": 3,
            "data.max_length": 1024, "model.recompute": "full", "checkpoint.every": 500, "lora.rank": 16,
            "lora.alpha": 16, "lora.dropout": 0.05, "lora.rslora": True,
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "extra", "expected"),
    [
        ('{"num_experts": 8}', "", {"router_aux_loss": "document", "router_aux_loss_coef": 0.001}),
        (
            '{"num_experts": 8}',
            "router_aux_loss_coef: 0.02",
            {"router_aux_loss": "document", "router_aux_loss_coef": 0.02},
        ),
        ('{"num_experts": 8}', "router_aux_loss_coef: 0.0", {}),
        ('{"hidden_size": 8}', "", {}),
        (None, "", {}),
    ],
)
def test_the_auxiliary_loss_that_trl_adds(
    config: str | None, extra: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    """To every mixture of experts; of a model on the hub the draft says that it may be one."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    (tmp_path / "a.yaml").write_text(f"model_name_or_path: {tmp_path}\ndataset_name: d\n{extra}\n")
    draft = migrate([str(tmp_path / "a.yaml")])
    router_keys = {key: value for key, value in yaml.safe_load(draft)["model"].items() if "router" in key}
    assert router_keys == expected
    assert ("if the model is a mixture of experts" in draft) == (config is None)


def test_verl() -> None:
    expect(
        values("verl.yaml"),
        {
            "model.path": "org/base-7b", "model.recompute": "full", "data.path": "data/train.parquet",
            "data.max_length": 2048, "data.long_documents": "error", "step.documents": 128, "optimizer.lr": 2e-5,
            "optimizer.betas": [0.9, 0.95], "schedule.name": "cosine", "schedule.warmup_ratio": 0.1, "train.epochs": 3,
            "checkpoint.every": 500, "checkpoint.keep": 2,
        },
    )  # fmt: skip
    assert "data.columns" not in values("verl.yaml")  # multiturn: messages are found by their name
    engine = values("verl_engine.yaml")
    expect(engine, {"step.max_tokens_per_device": 16384, "optimizer.name": "adamw", "schedule.min_lr_ratio": 0.1})
    assert "mesh.dp_shard" not in engine and "schedule.warmup_steps" not in engine  # -1: none


@pytest.mark.parametrize(
    ("written", "epochs", "steps"),
    [("1.0", 1, 500), ("3", 3, 500.0), ('"2"', 2, "5e2"), ("2.0e+0", 2, "1_000")],
)
def test_numbers_of_any_yaml_type_carry_over(tmp_path: Path, written: str, epochs: int, steps: Any) -> None:
    """HuggingFace's own files have `num_train_epochs: 3.0`; YAML 1.1 and argument parsers read the other ways."""
    text = "model_name_or_path: m\ndataset_name: d\nlearning_rate: '2e-5'\nper_device_train_batch_size: 2.0\n"
    (tmp_path / "a.yaml").write_text(f"{text}num_train_epochs: {written}\nsave_steps: {steps}\n")
    carried = values(str(tmp_path / "a.yaml"))
    assert (carried["train.epochs"], carried["step.documents"]) == (epochs, 2)
    assert carried["checkpoint.every"] == float(str(steps).replace("_", "")) and float(carried["optimizer.lr"]) == 2e-5


def test_a_number_that_cannot_be_carried_is_named_and_no_default_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\ndataset_name: d\nnum_train_epochs: 1.5\nseed: 4.0\n")
    draft = migrate([str(tmp_path / "a.yaml")])
    assert "num_train_epochs: 1.5 is not a value of train.epochs, which is an integer or null." in draft
    assert "epochs:" not in draft.partition("# Not converted")[0] and "seed: 4\n" in draft


def test_a_key_without_effect_is_left_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\neval_steps: 50\nrun_name: a\n")
    draft = migrate([str(tmp_path / "a.yaml")])
    assert "#   eval_steps: eval.every would have no effect:" in draft
    assert "#   run_name: track.name would have no effect:" in draft


def columns(tmp_path: Path, text: str) -> Any:
    (tmp_path / "a.yaml").write_text(text)
    return yaml.safe_load(migrate([str(tmp_path / "a.yaml")]))["data"].get("columns")


def test_columns(tmp_path: Path) -> None:
    """verl and ROLL put question and answer into the chat template, as weft does with instruction and output."""
    row_columns = "data: {prompt_key: question, response_key: answer, messages_key: messages}\n"
    assert columns(tmp_path, row_columns) == {"instruction": "question", "output": "answer"}
    assert columns(tmp_path, "prompt_data: d\ninput_key: conversation\n") == {"messages": "conversation"}
    nested = "prompt_key: extra_info\nresponse_key: extra_info\nprompt_dict_keys: [question]\nresponse_dict_keys: [a]\n"
    assert columns(tmp_path, nested) == {"instruction": "extra_info.question", "output": "extra_info.a"}
    roll = "prompt_key: prompt\nquery_key: input\nresponse_key: completion\nsystem_key: system\n"
    expected = {"instruction": "prompt", "input": "input", "output": "completion", "system": "system"}
    assert columns(tmp_path, roll) == expected
    assert columns(tmp_path, "prompt_key: instruction\nquery_key: input\nresponse_key: output\n") is None
    assert columns(tmp_path, "prompt_key: prompt\nprompt_data: d\n") is None  # of RL: nothing to train


def test_roll() -> None:
    expect(
        values("roll.yaml"),
        {
            "step.documents": 1 * 32 * 8, "mesh.dp_shard": 8, "fsdp.param_dtype": "bf16", "schedule.name": "constant",
            "schedule.warmup_steps": 20, "optimizer.weight_decay": 0.0, "train.steps": 500, "data.shuffle": False,
            "data.path": "data/train.json", "eval.path": "data/held-out.json", "eval.every": 50,
        },
    )  # fmt: skip


ROLL_VISION = {
    "model.path": "org/base-VL-7B", "model.freeze": ["vision", "projector"], "model.recompute": "full",
    "data.sources": [{"path": "data/geometry.parquet"}, {"path": "data/charts.parquet"}],
    "data.long_documents": "drop", "data.image_pixels": {"max": 1048576, "min": 3136},
    "rl.advantage": "grpo", "rl.advantage_norm": "group", "rl.reward": ["math", "my_rewards:charts"], "rl.chat": True,
    "rl.policy_loss": "ppo", "rl.clip": [0.2, 0.2], "rl.dual_clip": None, "rl.kl_estimator": "k3",
    "rl.prompts_per_step": 256, "rl.group_size": 8, "rl.minibatches": 2,
    "rl.epochs": 1, "rl.kl_coef": 0.01, "rl.kl_in": "loss", "rl.kl_clamp": 10.0, "rl.loss_aggregation": "sequence_mean",
    "rl.correction": "none", "rollout.engine": "vllm", "rollout.num_engines": 4, "rollout.tp": 2,
    "rollout.gpu_memory_utilization": 0.8,
    "rollout.max_prompt_tokens": 2048, "rollout.max_new_tokens": 4096, "rollout.temperature": 0.99,
    "rollout.bucket_mb": 512, "cluster.trainer_ranks": 8,
    "cluster.placement": "colocated", "mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.cp": 2, "mesh.ulysses": 2,
    "fsdp.param_dtype": "bf16", "fsdp.reduce_dtype": "fp32", "optimizer.lr": 1e-6, "optimizer.weight_decay": 0.01,
    "schedule.name": "linear", "train.steps": 600, "checkpoint.every": 50, "eval.every": 10, "eval.samples": 1,
    "eval.path": "data/geometry-test.parquet",
}  # fmt: skip


def test_images_and_rewards_of_roll() -> None:
    """Its example on eight GPUs, Ulysses 2 and a frozen tower: the draft is one for `weft rl`."""
    carried = values("roll_vision.yaml")
    refused = {rule.key for rule in INERT if rule.because == "prompts with images are not in this version"}
    expected = {key: value for key, value in ROLL_VISION.items() if key not in refused}
    got = {key: float(value) if key == "optimizer.lr" else value for key, value in carried.items() if key in expected}
    assert got == expected
    assert carried["rl.algorithm"] is None  # the temperature of training: what differs has to be confirmed
    assert not {"critic.clip", "train.epochs", "data.max_length", "step.documents"} & set(carried)
    draft = migrate([str(FOREIGN / "roll_vision.yaml")])
    assert "`weft rl THIS --dry-run`" in draft
    assert "minibatches: 2  # 2048 samples / (1 x 256 x 4 data ranks)\n" in draft
    assert "steps: 600  # max_steps: 300 rollout steps of 2 optimizer steps\n" in draft
    below = " ".join(draft.partition("# Not converted:")[2].replace("\n#", " ").split())
    for words in (
        "freeze_module_prefix: `vision_model` is Megatron's name for tower and projector.",
        "rewards.charts.worker_cls: my_rewards.ChartRewardWorker: write it as a function",
        "rewards.charts.infer_batch_size: set `rl.reward`, and `rl.reward_column`",
        "disable_mm_preprocessor_cache,", "set `rollout.engine_kwargs`",
    ):  # fmt: skip
        assert words in below, words
    top = draft.partition("\nmodel:")[0]
    for words in ("temperature of training: 1", "prompts of a step: math 0.7, "):
        assert words in top, words
    assert (carried["rollout.top_k"], carried["rollout.top_p"], carried["rollout.allow_truncated"]) == (100, 0.99, True)
    assert "clip of rewards                    10, never reached" in draft  # of groups of 8, whose rewards are normal
    below = below.partition("without effect at these values")[0]
    assert "reference.device_mapping" not in below and "weft does not know it" not in below


@pytest.mark.parametrize("file", REINFORCED[:1])
def test_nothing_of_rollouts_is_lost_without_a_word(file: str) -> None:
    """Every value is taken, or named below the draft, but for those that say what weft does anyway."""
    text = migrate([str(FOREIGN / file)])
    carried, _, below = text.partition("# Not converted:")
    draft = Draft(next(trainer for trainer in TABLES.trainers if trainer.name == "roll"), RlConfig)
    assert draft.rl is not None
    joined_keys = {
        *TABLES.shared.per_device, *TABLES.shared.ranks.gpus, *draft.trainer.table.devices, draft.rl.engines,
        *draft.trainer.rl_columns, "reference.device_mapping", *ALGORITHM,
        *(f"reference.{part}" for part in ("model_args.dtype", *(f"strategy_args.strategy_config.{leaf}" for leaf in
                                                                  ("fsdp_size", "param_dtype")))),
    }  # fmt: skip
    for name, value in leaves(read_file(str(FOREIGN / file))):
        entry = draft.entry(name)
        key = draft.key_of(entry) or ""
        moved = key and f"  {key.rpartition('.')[2]}: " in carried
        meant = (
            draft.meaning(entry, value) is not None or bool({entry, name} & joined_keys) or name.endswith(".worker_cls")
        )
        none = value is None or (value == 0 and key in TABLES.shared.unlimited)
        assert name in below or moved or meant or none or f"# {entry}\n" in carried, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "sequence_length: 3072\nprompt_length: 1024\nadv_estimator: grpo\n",
            {"rollout.max_prompt_tokens": 1024, "rollout.max_new_tokens": 2048},
        ),
        (
            "adv_estimator: grpo\nprompt_length: 4096\nresponse_length: 16384\nactor_train: {model_args: "
            "{ulysses_size: 4}}\n",
            {"mesh.cp": 4, "step.max_tokens_per_device": None},  # 20480 over four ranks
        ),
        (
            "adv_estimator: grpo\npretrain: a/b-VL-3B\nprompt_length: 4096\nresponse_length: 16384\nactor_train: "
            "{model_args: {ulysses_size: 4}}\n",
            {"step.max_tokens_per_device": 20480},  # documents with images are not cut
        ),
        (
            "adv_estimator: grpo\nactor_train: {device_mapping: 'list(range(0,4))'}\nactor_infer: {strategy_args: "
            "{strategy_name: vllm}, device_mapping: 'list(range(4, 8))'}\nasync_generation_ratio: 1\n",
            {
                "cluster.trainer_ranks": 4, "rollout.num_engines": 4, "cluster.placement": "disaggregated",
                "cluster.max_staleness": 1,
            },
        ),
        (
            "adv_estimator: grpo\nrollout_batch_size: 64\nnum_return_sequences_in_group: 4\nmax_steps: 10\nppo_epochs: "
            "2\nactor_train: {device_mapping: '[0, 1]', training_args: {per_device_train_batch_size: 2, "
            "gradient_accumulation_steps: 16}}\n",
            {"rl.minibatches": 4, "train.steps": 80},
        ),
    ],
)  # fmt: skip
def test_what_names_of_roll_say_together(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    (tmp_path / "a.yaml").write_text(f"track_with: stdout\n{text}")
    carried = values(str(tmp_path / "a.yaml"))
    assert {key: carried.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("prefix", "frozen", "note"),
    [
        ("vision_model", ["vision", "projector"], True),
        ("model.visual", ["vision", "projector"], False),
        ("model.visual.blocks,model.embed", None, True),
    ],
)
def test_a_tower_that_is_frozen_by_prefix(tmp_path: Path, prefix: str, frozen: Any, note: bool) -> None:
    text = f"pretrain: m\nsequence_length: 512\ntrack_with: stdout\nfreeze_module_prefix: {prefix}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert values(str(tmp_path / "a.yaml")).get("model.freeze") == frozen
    below = migrate([str(tmp_path / "a.yaml")]).partition("# Not converted:")[2]
    assert ("freeze_module_prefix: " in below) == note


def test_images_of_llama_factory(tmp_path: Path) -> None:
    carried = values("llama_factory_vision.yaml", ranks=8)
    assert carried["model.freeze"] == ["vision"] and carried["data.image_pixels"] == {"max": 262144, "min": 1024}
    text = "model_name_or_path: org/base-VL-7B\ntemplate: qwen2_vl\ncutoff_len: 512\nstage: sft\n"
    (tmp_path / "a.yaml").write_text(f"{text}finetuning_type: full\n")
    carried = values(str(tmp_path / "a.yaml"))  # tower and projector are frozen where nothing is said
    assert carried["model.freeze"] == ["vision", "projector"] and carried["data.image_pixels"]["max"] == 589824
    (tmp_path / "a.yaml").write_text(f"{text}freeze_language_model: true\nfinetuning_type: full\n")
    assert values(str(tmp_path / "a.yaml"))["model.freeze"] == ["language", "vision", "projector"]
    (tmp_path / "a.yaml").write_text(text)  # adapters, in the language model alone
    assert "model.freeze" not in values(str(tmp_path / "a.yaml"))
    assert "set `lora.targets: ['*language_model.layers.*']`" in " ".join(
        migrate([str(tmp_path / "a.yaml")]).replace("\n#", " ").split()
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"vision_config": {}}', "freeze: [vision, projector]"),
        ('{"hidden_size": 8}', ""),
        (None, "(images): for a model with images"),
    ],
)
def test_whether_a_model_takes_images(tmp_path: Path, config: str | None, words: str) -> None:
    """Its config.json says it; of one that is not here the draft says what would be."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    text = f"model_name_or_path: {tmp_path}\ntemplate: a\ncutoff_len: 512\nstage: sft\nfinetuning_type: full\n"
    (tmp_path / "a.yaml").write_text(text)
    draft = migrate([str(tmp_path / "a.yaml")])
    assert words in draft and (words or ("vision" not in draft and "images" not in draft))


def test_images_of_axolotl_trl_and_verl(tmp_path: Path) -> None:
    draft = migrate([str(FOREIGN / "axolotl_vision.yaml")], 8)
    assert "freeze:" not in draft and "is not a\n#     value of lora.targets: set `lora.targets`:" in draft
    assert (
        "processor_type" not in draft.partition("# Read for the keys above")[0]
        and "image_size: set `data.image_pixels`:" in draft
    )
    carried = values("trl_vision.yaml")  # max_length: null
    assert not {"data.max_length", "data.long_documents"} & set(carried)
    text = "data: {train_files: d, image_key: pictures, prompt_key: q, response_key: a, video_key: videos}\n"
    (tmp_path / "a.yaml").write_text(f"{text}model: {{freeze_vision_tower: true}}\n")
    carried = values(str(tmp_path / "a.yaml"))
    assert carried["data.columns"] == {"instruction": "q", "output": "a", "images": "pictures"}
    assert carried["model.freeze"] == ["vision", "projector"]
    assert "video_key" not in migrate([str(tmp_path / "a.yaml")]).partition("# Read for the keys above")[0]


def test_frozen_parts_of_automodel(tmp_path: Path) -> None:
    text = "step_scheduler: {num_epochs: 1}\ndistributed: {tp_size: 1}\nfreeze_config: {freeze_vision_tower: true, "
    (tmp_path / "a.yaml").write_text(f"{text}freeze_language_model: true, freeze_embeddings: false}}\n")
    assert values(str(tmp_path / "a.yaml"))["model.freeze"] == ["vision", "projector", "language"]


def test_miles() -> None:
    expect(
        values("miles.sh"),
        {
            "model.path": "/models/base-7b", "data.path": "data/train.parquet", "step.documents": 128,
            "step.max_tokens_per_device": 9216, "optimizer.name": "adamw", "optimizer.lr": 1e-5,
            "schedule.min_lr_ratio": 0.1, "schedule.warmup_ratio": 0.1, "schedule.name": "cosine",
            "model.recompute": "full", "fsdp.cpu_offload": True, "train.epochs": 3, "checkpoint.every": 500,
        },
    )  # fmt: skip


def test_torchtitan() -> None:
    expect(
        values("torchtitan.yaml"),
        {
            "model.path": "./assets/hf/Qwen3-0.6B", "data.max_length": 8192, "step.documents": 64, "train.steps": 1000,
            "optimizer.betas": [0.9, 0.95], "schedule.name": "wsd", "schedule.decay": "linear",
            "schedule.decay_ratio": 0.8, "schedule.min_lr_ratio": 0.1, "checkpoint.dtype": "bf16",
            "model.compile": True,
        },
    )  # fmt: skip


def test_axolotl() -> None:
    carried = values("axolotl.yaml", ranks=8)
    expect(
        carried,
        {
            "model.path": "org/base-7b", "model.recompute": "full", "data.max_length": 2048,
            "data.long_documents": "drop", "step.tokens": 2 * 4 * 8 * 2048, "optimizer.lr": 2e-4,
            "optimizer.weight_decay": 0.0, "optimizer.betas": [0.9, 0.999], "schedule.name": "cosine",
            "schedule.warmup_ratio": 0.1, "schedule.min_lr_ratio": 0.0, "train.epochs": 4, "lora.rank": 16,
            "lora.alpha": 32, "lora.dropout": 0.05, "lora.targets": "all-linear", "run.dir": "./outputs/lora-out",
            "lora.base": "nf4",
        },
    )  # fmt: skip
    assert (carried["eval.share"], carried["checkpoint.keep"]) == (0.05, 4)
    assert carried["data.sources"] == [
        {"path": "org/chats", "split": "train[:20%]", "columns": {"messages": "conversations"}},
        {"path": "data/tasks.jsonl"},
    ]
    assert (carried["optimizer.name"], carried["optimizer.state_dtype"]) == ("adamw", "int8")
    assert not {"step.documents", "data.chat_template", "data.train_on"} & set(carried)
    draft = migrate([str(FOREIGN / "axolotl.yaml")])
    assert "# Recognised as a config of axolotl by base_model, datasets, dataset_prepared_path, val_set_size" in draft
    rest_of_draft = " ".join(draft.partition("# Not converted:")[2].replace("\n#", " ").split())
    for words in (
        "chat_template: weft uses the tokenizer's chat template",
        "saves_per_epoch:",
        "datasets.drop_system_message: sources of weft have no such key", "datasets.type: weft renders conversations,",
    ):  # fmt: skip
        assert words in rest_of_draft, words


def test_roles_of_axolotl(tmp_path: Path) -> None:
    """It writes {ours: [theirs]}."""
    source = "{path: d.jsonl, type: chat_template, roles: {assistant: [bot, assistant], user: [human]}}"
    (tmp_path / "a.yaml").write_text(f"base_model: m\nsequence_len: 512\ndatasets: [{source}]\n")
    carried = values(str(tmp_path / "a.yaml"))
    assert (carried["data.path"], carried["data.roles"]) == ("d.jsonl", {"bot": "assistant", "human": "user"})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("message_property_mappings: {role: who, content: what}", {"role": "who", "content": "what"}),
        ("message_field_role: who, message_field_content: what", {"role": "who", "content": "what"}),
        ("message_property_mappings: {role: from, content: value}, message_field_training: learn", {"train": "learn"}),
        ("message_property_mappings: {role: role, content: content}", {}),
    ],
)
def test_keys_of_messages_of_axolotl(keys: str, expected: dict[str, str], tmp_path: Path) -> None:
    source = f"{{path: d.jsonl, type: chat_template, {keys}}}"
    text = f"base_model: m\nsequence_len: 512\ndatasets: [{source}]\ndefault_system_message: Be kind.\n"
    (tmp_path / "a.yaml").write_text(text)
    carried = values(str(tmp_path / "a.yaml"))
    assert (carried.get("data.message_keys") or {}, carried["data.system"]) == (expected, "Be kind.")


def test_llama_factory() -> None:
    carried = values("llama_factory.yaml", ranks=4)
    expect(
        carried,
        {
            "model.path": "org/base-7b", "model.recompute": "full", "data.max_length": 4096, "data.workers": 16,
            "data.long_documents": "truncate", "step.documents": 1 * 8 * 4, "optimizer.lr": 1e-4,
            "optimizer.weight_decay": 0.0, "schedule.warmup_ratio": 0.1, "schedule.min_lr_ratio": 0.0,
            "train.epochs": 3, "lora.rank": 8, "lora.targets": "all-linear", "checkpoint.every": 500,
        },
    )  # fmt: skip
    assert carried["data.path"] is None  # a name of its dataset_info.json
    rest_of_draft = migrate([str(FOREIGN / "llama_factory.yaml")]).partition("# Not converted:")[2]
    assert "dataset: set `data.path`" in rest_of_draft and "template: weft uses the tokenizer's" in rest_of_draft
    assert (carried["eval.share"], carried["data.split"], carried["checkpoint.keep"]) == (0.1, "[:1000]", None)
    assert (
        "train.timeout" not in carried
        and "ddp_timeout: this is also the time until a hang is detected" in rest_of_draft
    )


def test_llama_factory_trains_adapters_unless_told_otherwise(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ntemplate: qwen\ncutoff_len: 512\nlora_target: q_proj,v_proj\nneat_packing: true\n"
    (tmp_path / "a.yaml").write_text(text)
    carried = values(str(tmp_path / "a.yaml"), ranks=2)
    assert (carried["lora.rank"], carried["lora.targets"]) == (8, ["q_proj", "v_proj"])
    assert carried["step.tokens"] == 8 * 1 * 512 * 2 and "step.documents" not in carried  # its default batch, packed
    (tmp_path / "a.yaml").write_text(f"{text}finetuning_type: full\n")
    assert not [key for key in values(str(tmp_path / "a.yaml")) if key.startswith("lora.")]


def test_torchtune() -> None:
    carried = values("torchtune.yaml", ranks=2)
    expect(
        carried,
        {
            "model.path": "models/base/", "model.recompute": "full", "data.path": "data/chats.json",
            "data.split": "train", "data.columns": {"messages": "dialogue"}, "data.max_length": 4096,
            "step.documents": 4 * 8 * 2, "optimizer.name": "adamw", "optimizer.betas": [0.9, 0.999],
            "optimizer.lr": 3e-4, "optimizer.weight_decay": 0.01, "schedule.name": "cosine",
            "schedule.warmup_steps": 100, "schedule.min_lr_ratio": 0.0, "train.epochs": 1, "lora.rank": 64,
            "lora.alpha": 128, "fsdp.param_dtype": "bf16", "fsdp.master_dtype": "bf16",
            "run.dir": "/tmp/lora_finetune_output", "data.long_documents": "truncate",
        },
    )  # fmt: skip
    assert carried["lora.targets"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (
        "optimizer.max_grad_norm" in carried and carried["optimizer.max_grad_norm"] is None
    )  # it clips only when asked


def test_accelerate_alone() -> None:
    """It says nothing of what is trained, so no trainer's defaults stand in it."""
    carried = values("accelerate.yaml")
    assert {key for key, value in carried.items() if value is not None} == {
        "model.recompute", "fsdp.param_dtype", "fsdp.reshard_after_forward", "fsdp.cpu_offload",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_model: m\nsequence_len: 2048\nrl: grpo\n", "it is a GRPO config of axolotl (rl: grpo). `weft migrate`"),
        ("model_name_or_path: m\nreward_model_path: r\n", "a PPO config of TRL and the HuggingFace Trainer (reward"),
        ("base_model: m\nsequence_len: 9\nkd_trainer: true\n", "it is a distillation config of axolotl (kd_trainer"),
        ("loss: {_component_: torchtune.rlhf.loss.PPOLoss}\n", "it is a PPO config of torchtune (loss._component_: "),
        ("engine_type: fancy\nhidden: 3\n", "not a config of a trainer that `weft migrate` knows: TRL"),
        ("model: {path: m}\noptimizer: {lr: 1.0e-5}\n", "already a config of weft"),
    ],
)
def test_what_no_draft_is_made_of_is_refused(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert cli.main(["migrate", str(tmp_path / "a.yaml")]) == 2
    assert words in capsys.readouterr().err


def leaves(node: Node, name: str = "") -> list[tuple[str, Any]]:
    if not node.is_section:
        return [(name, node.value)]
    return [leaf for key, child in node.value.items() for leaf in leaves(child, f"{name}.{key}".lstrip("."))]


@pytest.mark.parametrize("file", FILES)
def test_a_draft_is_a_config_of_weft(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model and data that are there, it loads as it stands: nothing unknown, nothing without effect."""
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text("")
    Path("mine.yaml").write_text(migrate([str(FOREIGN / file)], 16 if file in REINFORCED else None))
    overrides = ["model.path=org/m", "data.path=d.jsonl", "data.sources=null", "eval.path=d.jsonl", "eval.share=null"]
    overrides = overrides[:-1] if file in REINFORCED else overrides
    if file in REINFORCED:  # to be confirmed, and written
        reward = "regex" if file == "verl_grpo.sh" else "math"
        overrides += ["rl.algorithm=grpo", f"rl.reward=[{reward}]", "rl.reward_column=null"]
    load_config(["mine.yaml"], overrides, SCHEMAS[command(file)])


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith(".yaml") and file not in REINFORCED])
def test_nothing_is_lost_without_a_word(file: str) -> None:
    """Every value is taken, or named below the draft; but for those that say nothing (null, -1, false)."""
    draft = migrate([str(FOREIGN / file)])
    below = " ".join(draft.partition("# Not converted:")[2].replace("\n#", " ").split())
    carried = draft.partition("# Not converted:")[0]
    for name, value in leaves(read_file(str(FOREIGN / file))):
        jobs = [trainer.jobs[command(file)] for trainer in TABLES.trainers if command(file) in trainer.jobs]
        moves = [*(job.moves for job in jobs), *(trainer.moves for trainer in TABLES.trainers), TABLES.moves]
        entry = next((entry for job in jobs if (entry := entry_of(name, job.names))), entry_of(name)) or ""
        key = next((keys[entry] for keys in moves if entry in keys), name)
        meaning = [table.means.get(entry, {}) for table in (*jobs, *TABLES.trainers)]
        is_named = (
            any({str(value).lower(), "*", "on" if value else "off"} & {*table} for table in meaning)
            or f"{key.rpartition('.')[2]}: " in carried
            or entry
            in (
                *(name for job in jobs for name in (*job.methods, *job.columns, *job.complements)),
                *TABLES.shared.means,
                *TABLES.choices,
                *TABLES.minutes,
                *TABLES.shared.per_device,
                *TABLES.columns,
                *TABLES.shared.column_switches,
                *TABLES.shared.sources.lists,
                "optimizer",
                "micro_batch_size",
                "batch_size",
                "apply_lora_to_mlp",
                "min_lr",
            )
        )
        assert is_named or name in below or f" {entry}\n" in carried or value in (None, False, -1), name


PREFERENCES: dict[str, dict[str, Any]] = {
    "trl_dpo.yaml": {
        "loss": ["sigmoid", "sft"], "weights": [1.0, 0.2], "beta": 0.05, "label_smoothing": 0.1, "cache": "disk",
    },
    "trl_kto.yaml": {"loss": "kto", "beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.33},
    "trl_simpo.yaml": {"loss": ["simpo", "sft"], "weights": [1.0, 0.5], "beta": 2.0, "gamma": 1.4},
    "llama_factory_dpo.yaml": {"loss": ["hinge", "sft"], "weights": [1.0, 0.3], "beta": 0.2},
    "axolotl_dpo.yaml": {"loss": ["sigmoid", "sft"], "weights": [1.0, 1.0], "beta": 0.3, "label_smoothing": 0.1},
    "roll_dpo.yaml": {"loss": "ipo", "beta": 0.2},
    "ms_swift_dpo.sh": {"loss": ["sigmoid", "sft"], "weights": [1.0, 0.1]},
    "ms_swift_kto.sh": {"loss": "kto", "beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.25},
    "ms_swift_orpo.sh": {"loss": "orpo", "beta": 0.2},
    "ms_swift_simpo.sh": {"loss": ["simpo", "sft"], "weights": [1.0, 1.0], "beta": 2.0, "gamma": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("file", PREFERENCES)
def test_the_loss_of_preferences(file: str) -> None:
    draft = yaml.safe_load(migrate([str(FOREIGN / file)]))
    assert draft["preference"] == PREFERENCES[file]
    assert "dropout" not in draft.get("lora", {})  # `weft dpo` refuses it


DISTILLED: dict[str, dict[str, Any]] = {
    "trl_reward.yaml": {"reward": {"center_rewards_coefficient": 0.01}},
    "llama_factory_reward.yaml": {"reward": {"loss": "bradley_terry"}},
    "axolotl_reward.yaml": {"reward": {"center_rewards_coefficient": 0.02}},
    "trl_distill.yaml": {
        "distill": {
            "teacher": "org/instruct-7b", "loss": "jsd", "beta": 0.7, "on_policy": 0.5, "max_new_tokens": 128,
            "sampling_temperature": 0.9,
        },
        "teacher": {"param_dtype": "bf16"},
    },
    "roll_distill.yaml": {
        "distill": {"teacher": "org/instruct-14b", "loss": "reverse_kl", "alpha": 0.15},
        "teacher": {"param_dtype": "bf16", "tp": 4},
    },
    "ms_swift_reward.sh": {"reward": {"center_rewards_coefficient": 0.01}},
    "ms_swift_distill.sh": {"distill": {"teacher": "org/instruct-14b", "loss": "jsd", "beta": 0.7, "on_policy": 0}},
}  # fmt: skip


@pytest.mark.parametrize("file", DISTILLED)
def test_reward_models_and_distillation(file: str) -> None:
    draft = yaml.safe_load(migrate([str(FOREIGN / file)]))
    assert {section: draft.get(section) for section in DISTILLED[file]} == DISTILLED[file]


def test_what_goes_with_reward_models_and_distillation() -> None:
    reward, student = values("trl_reward.yaml"), values("roll_distill.yaml")
    assert (reward["optimizer.lr"], reward["data.long_documents"]) == (1e-4, "drop")
    assert "lora.dropout" not in reward and "lora.modules_to_save" not in reward
    assert (student["model.path"], student["step.documents"]) == (
        "org/instruct-7b",
        8 * 4 * 2,
    )  # of the student's ranks
    assert student["data.columns"] == {"instruction": "question_zh", "output": "answer_zh"}
    assert "teacher's most likely tokens: remove it" in " ".join(
        migrate([str(FOREIGN / "roll_distill.yaml")]).replace("\n#", " ").split()
    )


sampled = {"max_new_tokens": 128, "sampling_temperature": 0.9}  # TRL's defaults


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        (
            "model_name_or_path: m\nbeta: 0.0\nlmbda: 0.0\ntemperature: 0.9\n",
            {"teacher": None, "loss": "forward_kl", "on_policy": 0.0},
            "temperature: distill.sampling_temperature would have no effect",
        ),
        (
            "model_name_or_path: m\nbeta: 1\nlmbda: 1.0\n",
            {"teacher": None, "loss": "reverse_kl", "on_policy": 1.0, **sampled},
            "",
        ),
        (
            "model_name_or_path: m\nteacher_model_name_or_path: t\n",
            {"teacher": "t", "loss": "jsd", "on_policy": 0.5, **sampled},
            "",
        ),
        ("pretrain: m\nteacher_pretrain: t\n", {"teacher": "t", "alpha": 0.5}, ""),
        (
            "pretrain: m\nteacher_pretrain: t\nkd_objective: adaptive_kl\ndistill_loss_weight: 1.0\n",
            {"teacher": "t", "alpha": 0.0},
            "kd_objective: set `distill.loss`",
        ),
    ],
)  # fmt: skip
def test_what_names_of_distillation_say_together(
    tmp_path: Path, text: str, expected: dict[str, Any], note: str
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    draft = migrate([str(tmp_path / "a.yaml")])
    assert yaml.safe_load(draft)["distill"] == expected
    assert note in " ".join(draft.replace("\n#", " ").split())


ROWS: dict[str, dict[str, Any]] = {
    "pairs": {"prompt": "1 2", "chosen": "a b", "rejected": "c"},
    "labels": {"prompt": "1 2", "completion": "a b", "label": True},
    "sums": {"instruction": "1 2", "output": "3"},
}


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("trl_dpo.yaml", "pairs"),
        ("trl_kto.yaml", "labels"),
        ("llama_factory_dpo.yaml", "pairs"),
        ("llama_factory_reward.yaml", "pairs"),
        ("trl_distill.yaml", "sums"),
        pytest.param("ms_swift.sh", "sums", marks=pytest.mark.table),
        ("ms_swift_dpo.sh", "pairs"),
        pytest.param("ms_swift_kto.sh", "labels", marks=pytest.mark.table),
        pytest.param("ms_swift_orpo.sh", "pairs", marks=pytest.mark.table),
        pytest.param("ms_swift_simpo.sh", "pairs", marks=pytest.mark.table),
        ("ms_swift_reward.sh", "pairs"),
        ("ms_swift_distill.sh", "sums"),
    ],
)
def test_a_draft_passes_a_dry_run(
    file: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(ROWS[rows]) + "\n" for _ in range(8)))
    Path("mine.yaml").write_text(migrate([str(FOREIGN / file)]))
    overrides = ["model.path=tiny", "data.path=rows.jsonl", "data.split=null", "data.sources=null"]
    Path("teacher").symlink_to("tiny")
    overrides += ["distill.teacher=teacher"] if command(file) == "distill" else []
    overrides += ["reference.path=tiny"] if file == "llama_factory_dpo.yaml" else []
    assert cli.main([command(file), "mine.yaml", *overrides, "--dry-run"]) == 0, capsys.readouterr().err


def test_batches_and_data_sets_of_ms_swift(tmp_path: Path) -> None:
    """Numbers of GPUs come from the script, and arithmetic of it is done; accumulation fills a step of 16."""
    steps = {file: values(f"ms_swift_{file}.sh")["step.documents"] for file in ("dpo", "kto", "orpo", "simpo")}
    assert steps == {"dpo": 4 * 2 * 4, "kto": 2 * 8 * 2, "orpo": 16, "simpo": 1 * 8 * 2}
    assert values("ms_swift_orpo.sh", ranks=5)["step.documents"] == 1 * 4 * 5
    assert values("ms_swift_orpo.sh")["optimizer.lr"] == 1e-4  # with adapters
    assert values("ms_swift_simpo.sh")["optimizer.weight_decay"] == 0.05
    assert values("ms_swift.sh")["data.sources"][1] == {"path": "org/alpaca-en", "split": "train[:500]"}
    (tmp_path / "a.yaml").write_text("rlhf_type: dpo\nmodel: m\ntrain_type: full\ndataset: a.jsonl:en#20\n")
    draft = yaml.safe_load(migrate([str(tmp_path / "a.yaml")]))
    assert draft["data"] | {"path": "a.jsonl", "subset": "en", "split": "[:20]"} == draft["data"]
    assert float(draft["optimizer"]["lr"]) == 1e-5


def test_what_goes_with_preferences() -> None:
    assert values("roll_dpo.yaml")["reference.tp"] == 2 and values("roll_dpo.yaml")["step.documents"] == 64
    assert values("roll_dpo.yaml")["data.columns"] == {"chosen": "better", "rejected": "worse"}
    assert values("llama_factory_dpo.yaml")["reference.path"] == "org/reference-8b"
    assert values("axolotl_dpo.yaml")["data.columns"] == {
        "chosen": "better", "rejected": "worse", "messages": "conversation",
    }  # fmt: skip
    assert values("trl_dpo.yaml", ranks=4)["step.documents"] == 2 * 8 * 4
    assert "in weft z of `kto` is the mean over the optimizer step" in migrate([str(FOREIGN / "trl_kto.yaml")])


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        ("model_name_or_path: m\nbeta: 0.1\n", {"beta": 0.1}, "orpo for ORPOTrainer"),
        ("model_name_or_path: m\nbeta: 0.1\ncpo_alpha: 0.7\n", {"loss": "cpo", "beta": 0.1, "cpo_alpha": 0.7}, ""),
        (
            "model_name_or_path: m\nloss_type: simpo\n",
            {"loss": ["simpo", "sft"], "weights": [1.0, 1.0]},
            "the last is TRL's default cpo_alpha",
        ),
        ("model_name_or_path: m\nloss_type: simpo\ncpo_alpha: 0.0\n", {"loss": "simpo"}, ""),
        ("model_name_or_path: m\ncpo_alpha: 0.7\nloss_type: hinge\n", {"loss": None}, "no loss hinge"),
        ("model_name_or_path: m\nloss_type: aot_pair\nbeta: 1\n", {"loss": "aot_unpaired", "beta": 1}, "weft sorts"),
        ("model_name_or_path: m\nloss_type: bco\nbeta: 1\n", {"loss": None, "beta": 1}, "weft has no loss bco"),
        ("model_name_or_path: m\nbeta: 1\nreference_free: true\n", {"beta": 1}, "no DPO with a uniform reference"),
        ("base_model: m\nsequence_len: 9\nrl: ipo\n", {"loss": "ipo"}, ""),
        ("base_model: m\nsequence_len: 9\nrl: orpo\norpo_alpha: 0.2\n", {"loss": "orpo", "beta": 0.2}, "TRL averages"),
        (
            "base_model: m\nsequence_len: 9\nrl: kto\nkto_desirable_weight: 2.0\n",
            {"loss": "kto", "desirable_weight": 2.0},
            "a row is a prompt, a completion and a label",
        ),
        (
            "base_model: m\nsequence_len: 9\nrl: simpo\nsimpo_gamma: 1.0\ncpo_alpha: 0.3\n",
            {"loss": ["simpo", "sft"], "weights": [1.0, 0.3], "gamma": 1.0},
            "",
        ),
        ("model_name_or_path: m\ncutoff_len: 9\nstage: kto\n", {"loss": "kto"}, ""),
        (
            "model_name_or_path: m\ncutoff_len: 9\nstage: dpo\npref_loss: simpo\nsimpo_gamma: 0.7\n",
            {"loss": "simpo", "gamma": 0.7},
            "",
        ),
        (
            "model_name_or_path: m\ncutoff_len: 9\nstage: dpo\npref_loss: kto_pair\npref_bco_weight: 0.1\n",
            {"loss": None},
            "pref_bco_weight: weft has no counterpart",
        ),
    ],
)  # fmt: skip
def test_what_names_of_preferences_say_together(tmp_path: Path, text: str, expected: dict[str, Any], note: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    draft = migrate([str(tmp_path / "a.yaml")])
    assert yaml.safe_load(draft)["preference"] == expected
    assert note in " ".join(draft.replace("\n#", " ").split())


def test_options_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "ARGS=(\n   --hf-checkpoint models/a\n   --lr=1e-6 # low\n)\npython a.py \\\n --num-epoch 2 ${ARGS[@]}\n"
    (tmp_path / "run.sh").write_text(script)
    assert cli.main(["migrate", str(tmp_path / "run.sh")]) == 0
    out = capsys.readouterr().out
    assert "path: models/a  # hf_checkpoint" in out and "lr: 1e-06\n" in out and "epochs: 2  # num_epoch\n" in out
    assert cli.main(["migrate", str(tmp_path / "run.sh"), str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml: there is no such config file" in capsys.readouterr().err


def test_overrides_of_a_script(tmp_path: Path) -> None:
    """verl's runs are scripts: overrides, with +, lists, variables and their defaults; nothing else of the script."""
    carried = values("verl_script.sh")
    expect(
        carried,
        {
            "model.path": "models/org/base-7b", "data.path": "data/gsm8k/train.parquet", "step.documents": 32,
            "optimizer.lr": 1e-4, "optimizer.betas": [0.9, 0.98], "lora.rank": 32, "lora.alpha": 16,
            "lora.targets": ["q_proj", "v_proj"], "train.epochs": 2, "step.max_tokens_per_device": 8192,
            "run.dir": "out/gsm8k-tp2", "track.name": "gsm8k-tp2",
            "data.columns": {"instruction": "extra_info.question", "output": "extra_info.answer"},
        },
    )  # fmt: skip
    assert carried["track.report_to"] == ["wandb"]
    draft = migrate([str(FOREIGN / "verl_script.sh")])
    assert "path: $VAL  # val_files: write its value, because weft does not expand variables" in draft
    assert "does not know it" not in draft and "40 GPUs" not in draft


def test_a_launcher_of_ray_says_nothing(tmp_path: Path) -> None:
    script = "A=(--lr 2e-5)\nray start --head --num-gpus 8\nray job submit --address=a \\\n -- python3 t.py \\\n"
    (tmp_path / "run.sh").write_text(script + "   --num-epoch 2 ${A[@]}\n")
    draft = migrate([str(tmp_path / "run.sh")])
    assert "lr: 2e-05" in draft and "epochs: 2" in draft and "address" not in draft and "head" not in draft


def test_defaults_of_the_older_verl(tmp_path: Path) -> None:
    trainer = "trainer: {default_local_dir: a, total_epochs: 1, default_hdfs_dir: b}\ndata: {train_files: d}\n"
    (tmp_path / "a.yaml").write_text(trainer + "model: {path: m}\n")
    new = migrate([str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml").write_text(trainer + "model: {partial_pretrain: m}\n")
    old = migrate([str(tmp_path / "a.yaml")])
    assert "documents: 256  # verl's default" in new and "documents: 256  # verl's default" in old
    assert "name: constant  # verl's default" in new and "warmup_ratio: 0.1  # verl's default" in old
    assert "constant" not in old and "lr:" not in old  # cosine and 1e-5, as in weft
    (tmp_path / "a.yaml").write_text(trainer + "model: {partial_pretrain: m, lora_rank: 8}\n")
    adapted = migrate([str(tmp_path / "a.yaml")])
    assert "lr: 1e-05  # verl's default" in adapted  # weft's own is another one for adapters


def test_lists_of_files(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 100)  # a draft cuts nothing
    text = f"data: {{train_files: [{long}, b.parquet], val_files: [c.parquet]}}\n"
    (tmp_path / "a.yaml").write_text(text)
    carried = values(str(tmp_path / "a.yaml"))
    assert carried["data.sources"] == [{"path": str(long)}, {"path": "b.parquet"}] and "data.path" not in carried
    assert carried["eval.path"] == "c.parquet"
    (tmp_path / "a.yaml").write_text(text + "input_key: chat\n")
    carried = values(str(tmp_path / "a.yaml"))
    assert [source["columns"] for source in carried["data.sources"]] == [{"messages": "chat"}] * 2
    assert carried["eval.sources"] == [{"path": "c.parquet", "columns": {"messages": "chat"}}]
    assert "data.columns" not in carried and "eval.path" not in carried


def test_gpus_that_share_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "per_device_train_batch_size: 1\ngradient_accumulation_steps: 4\nnum_gpus_per_node: 8\n"
    (tmp_path / "a.yaml").write_text(text + "tensor_model_parallel_size: 4\noutput_dir: ${oc.env:WEFT_NO_SUCH,./out}\n")
    draft = migrate([str(tmp_path / "a.yaml")])
    assert "documents: 8  # 1 x 4 x 2 data rank(s), each of several GPUs" in draft
    assert "dir: ./out" in draft


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        (
            "pretrain: m\nsequence_length: 4096\nnum_gpus_per_node: 8\nulysses_size: 2\nfsdp_size: 4\n", None,
            {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.cp": 2, "mesh.ulysses": 2},
        ),
        (
            "pretrain: m\nsequence_length: 4096\nnum_gpus_per_node: 8\nulysses_size: 2\nfsdp_size: 1\n", None,
            {"mesh.cp": 2, "mesh.ulysses": 2},
        ),
        (
            "data: {train_files: d, max_length: 32768, max_token_len_per_gpu: 16384}\nengine: {fsdp_size: 16,"
            " ulysses_sequence_parallel_size: 4}\ntrainer: {nnodes: 1, n_gpus_per_node: 8}\n", None,
            {"mesh.cp": 4, "mesh.ulysses": 4, "step.max_tokens_per_device": 16384},
        ),
        (
            "data: {train_files: d, max_length: 80000}\nengine: {fsdp_size: 3, ulysses_sequence_parallel_size: 4}\n",
            None, {"mesh.cp": 4, "mesh.ulysses": 4, "step.max_tokens_per_device": 20000},
        ),
        (
            "parallelism: {tensor_parallel_degree: 2, context_parallel_degree: 4, data_parallel_shard_degree: 8}\n"
            "training: {seq_len: 65536}\nmetrics: {log_freq: 1}\n", 64,
            {"mesh.tp": 2, "mesh.cp": 4, "mesh.dp_shard": 8, "step.max_tokens_per_device": 16384},
        ),
        (
            "distributed: {tp_size: 2, cp_size: 2, dp_replicate_size: 2}\nstep_scheduler: {num_epochs: 1}\n"
            "packed_sequence: {packed_sequence_size: 16384}\n", None,
            {"mesh.tp": 2, "mesh.cp": 2, "mesh.dp_replicate": 2, "step.max_tokens_per_device": 8192},
        ),
        (
            "num_processes: 8\nparallelism_config: {parallelism_config_tp_size: 2, parallelism_config_sp_size: 2,"
            " parallelism_config_dp_shard_size: 2, parallelism_config_cp_size: 1}\n", None,
            {"mesh.tp": 2, "mesh.cp": 2, "mesh.ulysses": 2, "mesh.dp_shard": 2},
        ),
        (
            "base_model: m\nsequence_len: 8192\ndp_shard_size: 2\ncontext_parallel_size: 2\n"
            "tensor_parallel_size: 2\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\n", 8,
            {"mesh.dp_shard": 2, "mesh.cp": 2, "mesh.tp": 2, "step.documents": 8},
        ),
    ],
    ids=["ROLL", "ROLL, all ranks", "verl", "verl, uneven", "torchtitan", "Automodel", "accelerate", "axolotl"],
)  # fmt: skip
def test_meshes(tmp_path: Path, text: str, gpus: int | None, expected: dict[str, Any]) -> None:
    """verl's and ROLL's shards are counted over the ranks that share documents, weft's mesh.dp_shard is not."""
    (tmp_path / "a.yaml").write_text(text)
    carried = values(str(tmp_path / "a.yaml"), ranks=gpus)
    prefixes = ("mesh.", "step.documents") if "step.documents" in expected else ("mesh.",)
    prefixes = (*prefixes, "step.max_tokens_per_device")
    assert {key: value for key, value in carried.items() if key.startswith(prefixes)} == expected


def test_shards_that_do_not_divide_are_named(tmp_path: Path) -> None:
    text = "data: {train_files: d}\nengine: {fsdp_size: 3, ulysses_sequence_parallel_size: 2}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert "engine.fsdp_size: 3 ranks cannot be split into groups" in migrate([str(tmp_path / "a.yaml")])


@pytest.mark.parametrize("minutes", ["30", '"30"', "30.0"])
def test_minutes_are_seconds(tmp_path: Path, minutes: str) -> None:
    """In quotes, too, where sixty times a text would be a text."""
    text = f"base_model: m\nsequence_len: 512\ntimeout_minutes: {minutes}\ndp_shard_size: 4\n"
    (tmp_path / "a.yaml").write_text(text)
    carried = values(str(tmp_path / "a.yaml"))
    assert (carried["train.timeout"], carried["mesh.dp_shard"]) == (1800, 4)


def test_anchors_and_merged_keys_are_read(tmp_path: Path) -> None:
    """`<<: *name` is of YAML 1.1, and in many files; what the mapping itself sets comes before it."""
    text = "common: &common {learning_rate: 1.0e-5, num_train_epochs: 2}\nmodel_name_or_path: m\ndataset_name: d\n"
    (tmp_path / "a.yaml").write_text(f"{text}args:\n  learning_rate: 2.0e-5\n  <<: *common\n")
    carried = values(str(tmp_path / "a.yaml"))
    assert (float(carried["optimizer.lr"]), carried["train.epochs"]) == (2e-5, 2)
    source = "datasets:\n  - &one {path: a.jsonl, type: chat_template, split: train}\n  - {<<: *one, path: b.jsonl}\n"
    (tmp_path / "a.yaml").write_text(f"base_model: m\nsequence_len: 512\n{source}")
    carried = values(str(tmp_path / "a.yaml"))
    assert carried["data.sources"] == [{"path": "a.jsonl", "split": "train"}, {"path": "b.jsonl", "split": "train"}]
    (tmp_path / "a.yaml").write_text("model: {<<: 3, path: m}\n")
    with pytest.raises(UserError, match="`<<` merges mappings"):
        migrate([str(tmp_path / "a.yaml")])


def test_a_draft_holds_no_anchors(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {train_files: [a.parquet, b.parquet]}\ninput_key: chat\n")
    draft = migrate([str(tmp_path / "a.yaml")])
    assert "&id" not in draft and "*id" not in draft and draft.count("messages: chat") == 2


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("model_name_or_path: m\ndataset_name: d\nnum_generations: 8\nlearning_rate: 1.0e-6\nseed: 1\n", True),
        ("base_model: m\nsequence_len: 9\nrl: grpo\nmicro_batch_size: 1\nnum_epochs: 1\n", False),
        ("hf_checkpoint: m\nprompt_data: d\nadvantage_estimator: grpo\nlr: 1.0e-6\neps_clip: 0.2\n", True),
        ((FOREIGN / "verl_vision.yaml").read_text(), True),
        ((FOREIGN / "roll_vision.yaml").read_text(), True),
    ],
    ids=["TRL", "axolotl", "Miles", "verl", "ROLL"],
)
def test_no_command_sends_in_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, drafted: bool
) -> None:
    """`weft rl` and `weft sft` name `weft migrate` where it makes a draft of these files, and where it makes none all
    three say the same: of what there are drafts, and what to do."""
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(text)
    errors = {}
    for words in (["rl", "theirs.yaml"], ["sft", "theirs.yaml"], ["migrate", "theirs.yaml"]):
        assert cli.main(words) == (0 if drafted and words[0] == "migrate" else 2)
        errors[words[0]] = capsys.readouterr().err
    if drafted:
        assert all("weft migrate FILE makes a draft" in errors[command] for command in ("rl", "sft"))
        return
    assert all(TABLES.drafts in text and "makes a draft" not in text for text in errors.values())
    assert errors["sft"].count("\n") == 1 and errors["rl"].count("\n") > 5
    assert TABLES.drafts in errors["rl"].splitlines()[0] and "docs/coming-from/" in errors["rl"].splitlines()[-1]


def test_a_preference_config_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\nlearning_rate: 5.0e-7\nmax_prompt_length: 512\nseed: 1\n"
    Path("dpo.yaml").write_text(text)
    for command in ("sft", "rl"):
        assert cli.main([command, "dpo.yaml"]) == 2
        assert capsys.readouterr().err == (
            "error: dpo.yaml: this is a DPO config of TRL and the HuggingFace Trainer (beta: 0.1): `weft dpo` trains "
            "on preferences. docs/how-to/dpo.md has the keys. `weft migrate FILE` writes a draft of it.\n"
        )


@pytest.mark.parametrize(
    "name", ["num_generations: 8", "use_vllm: true", "reward_funcs: [accuracy]", "max_completion_length: 9"]
)
def test_names_of_samples_tell_reinforcement_learning_from_preferences(tmp_path: Path, name: str) -> None:
    """max_prompt_length and beta are names of both."""
    (tmp_path / "a.yaml").write_text(
        f"model_name_or_path: m\ndataset_name: d\nmax_prompt_length: 512\nbeta: 0.1\n{name}\n"
    )
    assert "`weft rl THIS --dry-run`" in migrate([str(tmp_path / "a.yaml")])


PROGRAM = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
NAME = "org/m"
RATE = 2e-6
RATE_OF_OTHERS = 1.0
RATE_OF_OTHERS = 2.0
dataset = load_dataset("org/d", "main", split="train").map(lambda row: row)
config = GRPOConfig("out", learning_rate=RATE, num_generations=4, temperature=RATE_OF_OTHERS, beta=float("1"))
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(NAME), args=config, reward_funcs=[accuracy_reward, len_reward],
    train_dataset=dataset, peft_config=LoraConfig(r=8, lora_alpha=16),
)
"""


def test_a_python_program_is_read_and_not_run(tmp_path: Path) -> None:
    """Literals, and names bound once; what is bound twice or computed is named, and not guessed."""
    (tmp_path / "train.py").write_text(PROGRAM)
    draft = migrate([str(tmp_path / "train.py")], 8)
    sections = yaml.safe_load(draft)
    assert sections["model"]["path"] == "org/m" and sections["data"]["path"] == "org/d"
    assert sections["data"]["subset"] == "main" and sections["data"]["split"] == "train"
    assert float(sections["optimizer"]["lr"]) == 2e-6 and sections["rl"]["group_size"] == 4
    assert sections["rl"]["reward"] == ["math", "my_rewards:len_reward"]
    assert sections["lora"]["rank"] == 8 and sections["lora"]["alpha"] == 16
    assert "#   temperature: RATE_OF_OTHERS, which is known only during the run -> the default, 1.0" in draft
    assert "#   beta: float('1'), which is known only during the run -> the default, 0.0" in draft
    assert sections["rollout"]["temperature"] == 1 and sections["rl"]["algorithm"] is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "train.py",
            "import trl\n",
            r"has no calls of a trainer.* write the command line into a file that ends in .sh",
        ),
        ("train.py", "SFTTrainer(model='m')\nDPOTrainer(model='m')\n", r"has 2 calls of a trainer"),
        ("train.py", "SFTTrainer(", r"cannot be read as a Python program"),
        ("train.ipynb", "{}", r"does not read notebooks: .* into a file that ends in .py"),
    ],
)
def test_other_programs_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        migrate([str(tmp_path / name)])


# ---------------------------------------------------------------- what has a key is carried over, not only named

HF = "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 1\n"
AXOLOTL = "base_model: m\nsequence_len: 512\n"
FACTORY = "model_name_or_path: m\ncutoff_len: 512\nstage: sft\nfinetuning_type: full\n"
VERL = "data: {train_files: d}\ntrainer: {total_epochs: 1}\n"
ROLL = "pretrain: m\nsequence_length: 512\ntrack_with: stdout\n"
MILES = "hf_checkpoint: m\nprompt_data: d\ninput_key: messages\n"
TITAN = "training: {seq_len: 512}\nparallelism: {data_parallel_shard_degree: 8}\nmetrics: {log_freq: 1}\n"
VALID = "data: {train_files: d, val_files: v}\ntrainer: {total_epochs: 1"
CARRIED: dict[str, tuple[str, dict[str, Any]]] = {
    # checkpoints: nobody but axolotl and torchtitan removes one that they were not told to
    "keep, TRL": (HF, {"checkpoint.keep": None}),
    "keep, LLaMA-Factory": (FACTORY, {"checkpoint.keep": None}),
    "keep, verl": (VERL, {"checkpoint.keep": None}),
    "keep, ROLL": (ROLL, {"checkpoint.keep": None}),
    "keep, Miles": (MILES, {"checkpoint.keep": None}),
    "keep, axolotl": (AXOLOTL, {"checkpoint.keep": 4}),
    "keep, torchtitan": (TITAN, {"checkpoint.keep": 10}),
    "keep 0, TRL": (f"{HF}save_total_limit: 0\n", {"checkpoint.keep": None}),
    "keep 0, ROLL": (f"{ROLL}max_ckpt_to_keep: 0\n", {"checkpoint.keep": None}),
    "keep -1, verl": (f"{VERL}max_ckpt_to_keep: -1\n", {"checkpoint.keep": None}),
    "keep null, verl": (f"{VERL}max_ckpt_to_keep: null\n", {"checkpoint.keep": None}),
    "keep 0, torchtitan": (f"{TITAN}checkpoint: {{keep_latest_k: 0}}\n", {"checkpoint.keep": None}),
    "keep 2": (f"{HF}save_total_limit: 2\n", {"checkpoint.keep": 2}),
    # verl evaluates after the last step alone where test_freq is -1, its default
    "test_freq -1": (f"{VALID}, test_freq: -1}}\n", {"eval.path": "v", "eval.every": 0}),
    "test_freq unset": (f"{VALID}}}\n", {"eval.path": "v", "eval.every": 0}),
    "test_freq 5": (f"{VALID}, test_freq: 5}}\n", {"eval.every": 5}),
    # its WSD decays by a cosine, over a tenth of the steps after warm-up
    "wsd": (
        f"{VERL}optim: {{lr_scheduler: wsd, lr_warmup_steps_ratio: 0.1}}\n",
        {"schedule.name": "wsd", "schedule.decay": "cosine", "schedule.decay_ratio": 0.09},
    ),
    "wsd, engine": (f"{VERL}optim: {{lr_scheduler_type: wsd}}\n", {"schedule.name": "wsd", "schedule.decay": "cosine"}),
    "recompute, verl": (VERL, {"model.recompute": "full", "data.max_length": 1024}),
    "recompute, older verl": (f"{VERL}model: {{partial_pretrain: m}}\n", {"model.recompute": "full"}),
    "recompute off": (f"{VERL}model: {{enable_gradient_checkpointing: false}}\n", {"model.recompute": "none"}),
    "recompute off, HF": (f"{HF}gradient_checkpointing: false\n", {"model.recompute": "none"}),
    "model_dtype": (f"{VERL}model: {{fsdp_config: {{model_dtype: bf16}}}}\n", {"fsdp.master_dtype": "bf16"}),
    "model_dtype, in full": (f"{VERL}engine: {{model_dtype: bfloat16}}\n", {"fsdp.master_dtype": "bf16"}),
    "thinking, verl": (
        f"{VERL}apply_chat_template_kwargs: {{enable_thinking: false}}\n",
        {"data.template_kwargs": {"enable_thinking": False}},
    ),
    "use_wandb": (f"{MILES}use_wandb: true\nwandb_project: p\n", {"track.report_to": ["wandb"], "track.project": "p"}),
    "use_tensorboard": (f"{MILES}use_tensorboard: true\nuse_wandb: true\n",
        {"track.report_to": ["tensorboard", "wandb"]}),
    "async_save": (f"{VERL}checkpoint: {{async_save: false}}\n", {"checkpoint.async": False}),
    "async_save_ckpt": (f"{ROLL}async_save_ckpt: false\n", {"checkpoint.async": False}),
    "pipelines, Miles": (f"{MILES}pipeline_model_parallel_size: 4\n", {"mesh.pp": 4}),
    "pipelines, ROLL": (
        f"{ROLL}pipeline_model_parallel_size: 2\nvirtual_pipeline_model_parallel_size: 3\n",
        {"mesh.pp": 2, "mesh.pp_stages_per_rank": 3, "mesh.pp_schedule": "Interleaved1F1B"},
    ),
    "no pipeline": (f"{ROLL}pipeline_model_parallel_size: 1\n", {"mesh.pp": None}),
    "wrapped classes": (
        f"{ROLL}wrap_policy: {{transformer_layer_cls_to_wrap: [Qwen3DecoderLayer], wrap_embeddings: true, "
        "wrap_lm_output: false}\n",
        {"fsdp.wrap": ["Qwen3DecoderLayer", "embedding"]},
    ),
    "wrapped head": (f"{ROLL}wrap_policy: {{wrap_lm_output: true}}\n", {"fsdp.wrap": ["layers", "head"]}),
    "wrapped by name": (
        f"{VERL}wrap_policy: {{transformer_layer_cls_to_wrap: A}}\n", {"fsdp.wrap": ["A"]}
    ),
    # held-out rows, parts of the data
    "val_set_size": (f"{AXOLOTL}val_set_size: 0.05\n", {"eval.share": 0.05}),
    "val_size": (f"{FACTORY}val_size: 0.1\neval_steps: 50\n", {"eval.share": 0.1, "eval.every": 50}),
    "val_set_size 0": (f"{AXOLOTL}val_set_size: 0.0\n", {"eval.share": None}),
    "val_set_size of documents": (f"{AXOLOTL}val_set_size: 200\n", {"eval.share": None}),
    "max_samples": (f"{FACTORY}max_samples: 1000\n", {"data.split": "[:1000]"}),
    "train_max_samples": (f"{VERL}train_max_samples: 64\n", {"data.split": "[:64]"}),
    "train_max_samples -1": (f"{VERL}train_max_samples: -1\n", {"data.split": None}),
    "overwrite": (f"{HF}overwrite_output_dir: true\n", {"run.overwrite": True}),
    # numbers that the user wrote
    "a lowest rate": (
        f"{HF}lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {{min_lr_rate: 0.1}}\n",
        {"schedule.name": "cosine", "schedule.min_lr_ratio": 0.1},
    ),
    "a lowest rate in JSON": (
        f"{HF}lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: '{{\"min_lr_rate\": 0.2}}'\n",
        {"schedule.min_lr_ratio": 0.2},
    ),
    "a lowest rate itself": (
        f"{HF}learning_rate: 1.0e-4\nlr_scheduler_kwargs: {{min_lr: 1.0e-5}}\n", {"schedule.min_lr_ratio": 0.1}
    ),
    "noise on embeddings": (f"{HF}neftune_noise_alpha: 5\n", {"train.neftune_noise_alpha": 5}),
    "noise on embeddings in LLaMA-Factory": (f"{FACTORY}neftune_alpha: 5.0\n", {"train.neftune_noise_alpha": 5}),
    "no noise on embeddings": (f"{AXOLOTL}noisy_embedding_alpha: 0\n", {"train.neftune_noise_alpha": None}),
    "restarts": (
        f"{HF}lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {{num_cycles: 3}}\n",
        {"schedule.name": "cosine_with_restarts", "schedule.cycles": 3, "schedule.min_lr_ratio": 0.0},
    ),
    "restarts in LLaMA-Factory": (
        f"{FACTORY}lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: '{{\"num_cycles\": 4}}'\n",
        {"schedule.name": "cosine_with_restarts", "schedule.cycles": 4, "schedule.min_lr_ratio": 0.0},
    ),
    "half a wave": (
        f"{HF}lr_scheduler_type: cosine\nlr_scheduler_kwargs: {{num_cycles: 0.5}}\n",
        {"schedule.name": "cosine", "schedule.cycles": None},
    ),
    "a polynomial with transformers' lowest rate": (
        f"{AXOLOTL}learning_rate: 1.0e-5\nlr_scheduler: polynomial\nlr_scheduler_kwargs: {{power: 2}}\n",
        {"schedule.name": "polynomial", "schedule.power": 2, "schedule.min_lr_ratio": 0.01},
    ),
    "a polynomial with a lowest rate": (
        f"{HF}learning_rate: 1.0e-4\nlr_scheduler_type: polynomial\nlr_scheduler_kwargs: {{lr_end: 1.0e-5}}\n",
        {"schedule.name": "polynomial", "schedule.power": None, "schedule.min_lr_ratio": 0.1},
    ),
    "an inverse root": (
        f"{HF}lr_scheduler_type: inverse_sqrt\nlr_scheduler_kwargs: {{timescale: 50}}\n",
        {"schedule.name": "inverse_sqrt", "schedule.timescale": 50, "schedule.min_lr_ratio": None},
    ),
    "an inverse root of Megatron": (
        f"{MILES}lr_decay_style: inverse-square-root\nlr_warmup_iters: 40\n",
        {"schedule.name": "inverse_sqrt", "schedule.warmup_steps": 40, "schedule.min_lr_ratio": None},
    ),
    "an inverse root of Megatron without warm-up": (
        f"{MILES}lr_decay_style: inverse-square-root\n", {"schedule.name": None}
    ),
    "a mixture": (
        "model_name_or_path: m\ndataset_mixture:\n  datasets:\n    - {path: a, name: x, split: train}\n"
        "    - {id: b, config: y, weight: 0.5}\n  test_split_size: 0.1\n",
        {
            "data.sources": [
                {"path": "a", "subset": "x", "split": "train"}, {"path": "b", "subset": "y", "weight": 0.5}
            ],
            "data.path": None, "eval.share": 0.1,
        },
    ),
    "a push": (
        f"{HF}push_to_hub: true\nhub_model_id: me/model\nhub_private_repo: true\n",
        {"checkpoint.push": "me/model", "checkpoint.push_at": "save", "checkpoint.push_private": True},
    ),
    "a push at the end": (
        f"{HF}push_to_hub: true\nhub_model_id: me/model\nhub_strategy: end\n",
        {"checkpoint.push": "me/model", "checkpoint.push_at": "end"},
    ),
    "no push": (f"{HF}push_to_hub: false\nhub_model_id: me/model\n", {"checkpoint.push": None}),
    "a push of axolotl": (f"{AXOLOTL}hub_model_id: me/model\n", {"checkpoint.push": "me/model"}),
    "no thinking": (f"{FACTORY}template: qwen3_nothink\n", {"data.template_kwargs": {"enable_thinking": False}}),
    "thinking, by a key": (f"{FACTORY}enable_thinking: true\n", {"data.template_kwargs": {"enable_thinking": True}}),
    "a timeout": (f"{HF}ddp_timeout: 7200\n", {"train.timeout": 7200}),
    "no timeout": (f"{HF}ddp_timeout: 180000000\n", {"train.timeout": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_what_has_a_key_is_carried_over(tmp_path: Path, name: str) -> None:
    text, expected = CARRIED[name]
    (tmp_path / "a.yaml").write_text(text)
    draft = yaml.load(migrate([str(tmp_path / "a.yaml")], 8), Loader)
    carried = {f"{section}.{leaf}": value for section, keys in draft.items() for leaf, value in keys.items()}
    none = {key for key, value in expected.items() if value is None and not key.endswith("keep")}
    assert not none & {*carried}
    got = {key: [*value] if isinstance(value, tuple) else value for key, value in carried.items() if key in expected}
    assert got == {key: value for key, value in expected.items() if key not in none}
    if "checkpoint.keep" in expected:
        assert "checkpoint.keep" in carried


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{AXOLOTL}plugins: [a.B]\nlora_mlp_kernel: true\n", "plugins, lora_mlp_kernel: weft and torch choose"),
        (f"{FACTORY}use_unsloth: true\n", "use_unsloth: weft and torch choose kernels"),
        (f"{AXOLOTL}min_sample_len: 4\n", "min_sample_len: weft never drops short documents"),
        (f"{AXOLOTL}optimizer: lion_8bit\n", "8-bit state is `optimizer.state_dtype` int8"),
        (f"{FACTORY}use_galore: true\n", "or the import path of another"),
        (f"{HF}compute_metrics: f\n", "compute_metrics: in Python on_step of weft.sft"),
        (f"{VERL}balance_dp_token: true\n", "balance_dp_token: the loss is always the mean over the trained tokens"),
        (f"{AXOLOTL}val_set_size: 200\n", "val_set_size: set `eval.share`, such as 0.05"),
        (f"{HF}push_to_hub: true\nhub_model_id: model\n", "hub_model_id: set `checkpoint.push`: OWNER/NAME"),
        (f"{HF}push_to_hub: true\n", "push_to_hub: set `checkpoint.push` to OWNER/NAME"),
        (f"{HF}ddp_timeout: 180000000\n", "ddp_timeout: this is also the time until a hang is detected"),
        (
            f"{HF}lr_scheduler_kwargs: {{min_rate: 3}}\n",
            "min_lr_ratio: 0.0 # TRL's default; but see lr_scheduler_kwargs.min_rate below",
        ),
        (
            f"{HF}lr_scheduler_type: cosine\nlr_scheduler_kwargs: {{num_cycles: 3}}\n",
            "lr_scheduler_kwargs.num_cycles: schedule.cycles would have no effect: only "
            "schedule.name=cosine_with_restarts reads it",
        ),
    ],
)  # fmt: skip
def test_what_has_no_key_is_answered(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    draft = " ".join(migrate([str(tmp_path / "a.yaml")]).replace("\n#", " ").split())
    assert words in draft, draft


SCRIPT = """
BACKEND=${{BACKEND:-fsdp}}
N=2
if {test}; then
    CONFIG="engine.ulysses_sequence_parallel_size=2 optim.lr=1e-5"
    NAME=one
elif [ "$BACKEND" = "other" ]; then
    CONFIG="optim.lr=5e-5"; NAME=two
else
    CONFIG="engine.tensor_model_parallel_size=4 optim.lr=2e-5"
    NAME=three
fi
torchrun -m verl.trainer.sft_trainer data.train_files=d $CONFIG trainer.experiment_name=$NAME trainer.total_epochs=1
"""


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ('[ "$BACKEND" = "fsdp" ]', "one"), ('[[ $BACKEND == fs* ]]', "one"), ('[ "$BACKEND" != "fsdp" ]', "three"),
        ('test -n "$BACKEND"', "one"), ('[ -z "$BACKEND" ]', "three"), ('[ ! -z "$BACKEND" ]', "one"),
        ('[ -z "$1" ]', "one"), ('[ -n "$SOMETHING_UNSET" ]', "three"), ('[ "$N" -gt 1 ]', "one"),
        ("[ $N -lt 2 ]", "three"),
        ("[ -f no.such.file ]", "three"), ("nvidia-smi", "three"),
    ],
)  # fmt: skip
def test_the_branch_of_a_script_that_is_taken(tmp_path: Path, test: str, name: str) -> None:
    """Of both branches the last was read, whatever it would run on."""
    (tmp_path / "a.sh").write_text(SCRIPT.format(test=test))
    draft = yaml.load(migrate([str(tmp_path / "a.sh")]), Loader)
    first_branch = {"cp": 2, "ulysses": 2}
    assert draft["optimizer"]["lr"] == {"one": 1e-5, "three": 2e-5}[name]
    assert draft["mesh"] == (first_branch if name == "one" else {"tp": 4})


def test_the_case_of_a_script_that_is_taken(tmp_path: Path) -> None:
    text = (
        "SIZE=${1:-7b}\ncase $SIZE in\n  1b)\n    LR=1e-4\n    ;;\n  7*) LR=2e-5 ;;\n  *)\n    LR=9\n    ;;\nesac\n"
        "if [ $SIZE = 7b ]; then\n  if [ $LR = 9 ]; then EPOCHS=5; else EPOCHS=3; fi\nfi\n"
    )
    (tmp_path / "a.sh").write_text(
        text + "python t.py --hf-checkpoint m --prompt-data d --lr $LR --num-epoch $EPOCHS\n"
    )
    draft = yaml.load(migrate([str(tmp_path / "a.sh")]), Loader)
    assert (draft["optimizer"]["lr"], draft["train"]["epochs"]) == (2e-5, 3)
