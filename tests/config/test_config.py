"""Configs: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft import config as package
from weft.config import (
    DataConfig,
    MeshConfig,
    MeshSizes,
    ModelConfig,
    SftConfig,
    StepConfig,
    check_config,
    check_reshard,
    load_config,
    resolve_mesh,
    shrink_mesh,
    to_dict,
    to_yaml,
)
from weft.config.checks import EXCLUSIVE, INERT
from weft.config.coerce import Node
from weft.config.commands import SCHEMAS
from weft.config.keys import get, schema_keys
from weft.config.mesh import fewest_ranks
from weft.config.presets import default_of_command
from weft.config.reference import reference
from weft.config.rl_schema import RlConfig
from weft.config.unknown import unknown_keys
from weft.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _folder(model_folder: Path) -> Path:
    """The working folder has an adapter `a`, too."""
    (model_folder / "a").mkdir()
    (model_folder / "a" / "adapter_config.json").write_text("{}")
    return model_folder


def load(*overrides: str, **files: str) -> SftConfig:
    """The config of files (name -> text) and overrides, with model.path and data.path set."""
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)
    return load_config([f"{name}.yaml" for name in files], ["model.path=m", "data.path=d.jsonl", *overrides])


def refused(*overrides: str, **files: str) -> str:
    with pytest.raises(UserError) as caught:
        load(*overrides, **files)
    return str(caught.value)


# ---------------------------------------------------------------- reading and merging


def test_defaults_are_those_of_the_schema() -> None:
    assert load() == SftConfig(model=ModelConfig(path="m"), data=DataConfig(path="d.jsonl"))


def test_files_merge_left_to_right_and_overrides_win() -> None:
    a = "step: {documents: 8, shapes: fixed}\noptimizer:\n  lr: 1e-4\n"
    b = "step: {documents: 16}\noptimizer:\n"
    config = load("optimizer.lr=3e-4", a=a, b=b)
    assert (config.step.documents, config.step.padding, config.optimizer.lr) == (16, "fixed", 3e-4)


def test_a_section_can_be_given_whole_or_dotted() -> None:
    config = load("mesh={dp_replicate: 2, dp_shard: 4}", a="optimizer.lr: 2e-5\noptimizer: {eps: 1e-6}\n")
    assert config.mesh == MeshConfig(dp_replicate=2, dp_shard=4)
    assert (config.optimizer.lr, config.optimizer.eps) == (2e-5, 1e-6)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), (".5", 0.5), ("1", 1.0), ("+1.5e+0", 1.5), ("010", 10.0), ("0x10", 16.0)],
)
def test_numbers_are_yaml_1_2(text: str, value: float) -> None:
    assert load(f"optimizer.lr={text}").optimizer.lr == value
    assert load(a=f"optimizer: {{lr: {text}}}").optimizer.lr == value


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "OFF"])
def test_words_of_yaml_1_1_are_strings(word: str) -> None:
    assert load(a=f"run: {{dir: {word}}}").run.dir == word
    assert "must be true or false" in refused(a=f"data: {{shuffle: {word}}}")


def test_a_source_needs_no_more_than_a_path() -> None:
    (source,) = load("data.path=null", "data.sources=[{path: d.jsonl}]").data.sources or ()
    assert (source.path, source.weight, source.columns) == ("d.jsonl", 1.0, {})


def test_lists_and_null() -> None:
    config = load("optimizer.betas=[0.8, 0]", "optimizer.max_grad_norm=null", "run.dir=null", "data.max_length=~")
    assert config.optimizer.betas == (0.8, 0.0)
    assert (config.optimizer.max_grad_norm, config.run.dir, config.data.max_length) == (None, None, None)


def test_text_of_the_command_line_is_a_string_where_one_is_asked_for() -> None:
    assert load("run.dir=2024").run.dir == "2024"
    assert load("run.dir=a: b").run.dir == "a: b"
    assert load("run.dir={x").run.dir == "{x"
    assert "in quotes" in refused(a="run: {dir: 2024}")


def test_a_bool_or_an_int() -> None:
    assert load("fsdp.reshard_after_forward=false").fsdp.reshard_after_forward is False
    assert load("fsdp.reshard_after_forward=2").fsdp.reshard_after_forward == 2
    assert "true, false, or a group of 2 or more" in refused("fsdp.reshard_after_forward=1")


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("data.path=~/d.jsonl").data.path == str(tmp_path / "d.jsonl")
    assert load("run.dir=~nobody-here/x").run.dir == "~nobody-here/x"


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("step.documents=1e3", "write 1000"),
        ("step.documents=true", "must be an integer or null, not true"),
        ("step.documents=1_000", "write 1000"),
        ("step.documents=[1]", "must be an integer"),
        ("step.documents={a: 1}", "must be an integer"),
        ("optimizer.lr=fast", "must be a number, not fast"),
        ("optimizer.lr=true", "must be a number, not true"),
        ("optimizer.lr=null", "must be a number, not null"),
        ("optimizer.lr=.inf", "it must be finite"),
        ("optimizer.betas=[0.9]", "a list of 2 numbers, not [0.9]: it has 1 values"),
        ("optimizer.betas=[0.9, x]", "a list of 2 numbers"),
        ("optimizer.groups=3", "must be a list, each a mapping of match, lr, lr_scale, weight_decay, not 3"),
        ("optimizer.groups=[{lr: 3}]", "`match` is missing"),
        ("optimizer.groups=[{match: [a], lr: fast}]", "`lr` must be a number or null, not fast"),
        ("optimizer.groups=[{match: [a], rate: 1}]", "`rate` is not one of match, lr, lr_scale, weight_decay"),
        ("data.shuffle=1", "write true"),
        ("data.shuffle=no", "write false"),
        ("step.padding=bucket", "one of free, buckets, fixed, not bucket"),
        ("model.recompute={keep: [norms]}", "`keep` must be a list of attention, collectives, matmuls, not [norms]"),
        ("model.freeze=lm_head", "a list of strings, not lm_head: write [lm_head]"),
        ("model.freeze=[*.norm, lm_head]", "write ['*.norm', lm_head]"),
        ("model.freeze=[1]", "a list of strings"),
        ("fsdp.overrides=[lm_head]", "a mapping of names to one of full, replicate or an integer"),
        ("fsdp.overrides={lm_head: whole}", "a mapping of names to"),
        ("mesh=4", "mesh is a section, not a value (4): set mesh.dp_replicate or mesh.dp_shard"),
    ],
)
def test_a_value_of_another_type_is_refused(override: str, words: str) -> None:
    message = refused(override)
    assert message.startswith("command line: " + override.partition("=")[0])
    assert words in message


def test_messages_say_where() -> None:
    assert refused(a="step:\n  shapes: free\n  documents: many\n").startswith("a.yaml:3: step.documents must be")


def test_all_problems_are_reported_together() -> None:
    lines = refused("step.documents=x", "optimizer.lr=x", "nonsense.key=1").splitlines()
    assert lines[0] == "3 problems in the config:"
    assert len(lines) == 4
    (line,) = refused(*[f"step.x{i}=1" for i in range(12)]).splitlines()
    assert line.startswith("command line: step.x0, step.x1,") and "and step.x11 are not keys of weft: step has" in line


def test_required_keys() -> None:
    with pytest.raises(UserError) as caught:
        load_config([], [])
    assert "model.path is required: set model.path=..." in str(caught.value)
    assert "data.path is required" in str(caught.value)


# ---------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("gradient_accumulation_steps=4", "Set `step.documents` = per-device batch x accumulation x data ranks"),
        ("step.gradient_accumulation_steps=4", "Set `step.documents` ="),
        ("train.per-device-train-batch-size=4", "Set `step.documents` ="),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=3", "set `schedule.warmup_steps`"),
        ("learning_rate=3", "set `optimizer.lr`"),
        ("parallelism.tensor_parallel_degree=2", "set `mesh.tp`"),
        ("parallelism.context_parallel_degree=2", "set `mesh.cp`"),
        ("rollout.num_generations=8", "rollout belongs to `weft rl`"),
        ("optimzer.lr=3", "did you mean optimizer"),
        ("optimizer.weight_decy=3", "did you mean optimizer.weight_decay"),
        ("lr=3", "lr is not a key of weft: set `optimizer.lr`."),
        ("train.eps=3", "did you mean optimizer.eps"),
        ("train.path=3", "did you mean model.path or data.path"),
        ("mesh.zzzz=3", "mesh has dp_replicate, dp_shard"),
        ("zzzz=3", "the sections are model, data, mesh"),
    ],
)
def test_an_unknown_key_is_answered(override: str, words: str) -> None:
    assert words in refused(override)


def test_an_unknown_section_is_answered_key_by_key() -> None:
    message = refused(a="training:\n  local_batch_size: 8\n  steps: 10\n")
    assert "a.yaml:2: training.local_batch_size is not a key of weft: weft splits micro-batches by tokens" in message
    assert "a.yaml:3: training.steps is not a key of weft: set `train.steps`" in message


# ---------------------------------------------------------------- keys that do not go together


def test_a_default_yields_to_its_partner() -> None:
    config = load("step.tokens=4096", "train.steps=10", "schedule.warmup_steps=2")
    assert (config.step.documents, config.step.tokens) == (None, 4096)
    assert (config.train.epochs, config.train.steps) == (None, 10)
    assert config.schedule.warmup_steps == 2


@pytest.mark.parametrize(("key", "partner"), EXCLUSIVE[1:])  # data.path: in tests/data/test_sources.py
def test_both_partners_are_refused(key: str, partner: str) -> None:
    value = "0.5" if key.endswith("ratio") else "5"
    message = refused(f"{partner}=5", a=f"{key}: {value}\n")
    assert f"{key} (a.yaml:1) and {partner} (command line) are both set" in message
    assert get(load(f"{partner}=5", f"{key}=null", a=f"{key}: {value}\n"), partner) == 5


def test_neither_partner_is_refused() -> None:
    assert "step.documents and step.tokens are both null" in refused("step.documents=null")


LORA = {"alpha": "16", "rslora": "true", "targets": "[q_proj]", "modules_to_save": "[lm_head]"}
LORA |= {"dora": "true", "init": "pissa"}
# Of adapters, whatever their origin.
STORED = {"base": "nf4", "dropout": "0.1", "plus_ratio": "16", "sampling": "merged"}
MUON = {"lr": "0.1", "momentum": "0.9", "scale": "original", "dtype": "fp32", "heads": "true"}
PUSHED = ("push_at", "push_private", "push_revision")


@pytest.mark.parametrize(
    ("key", "value", "overrides"),
    [
        ("optimizer.betas", "[0.9, 0.99]", ["optimizer.name=sgd"]),
        ("optimizer.eps", "1e-6", ["optimizer.name=sgd"]),
        ("optimizer.momentum", "0.9", []),
        ("optimizer.load_state", "true", []),
        ("optimizer.load_state", "true", ["model.dcp_weights=.", "optimizer.name=torch.optim.RAdam"]),
        ("optimizer.load_state", "true", ["model.dcp_weights=.", "optimizer.name=sgd"]),
        ("optimizer.betas", "[0.9, 0.99]", ["optimizer.name=torch.optim.RAdam"]),
        ("optimizer.state_dtype", "bf16", ["optimizer.name=torch.optim.RAdam"]),
        ("optimizer.options", "{eps: 1e-6}", []),
        ("optimizer.rounding", "stochastic", []),
        *((f"optimizer.muon_{leaf}", value, []) for leaf, value in MUON.items()),
        ("optimizer.state_dtype", "bf16", ["optimizer.name=muon"]),
        ("optimizer.state_dtype", "bf16", ["optimizer.name=adafactor"]),
        ("optimizer.betas", "[0.9, 0.99]", ["optimizer.name=adafactor"]),
        ("optimizer.eps", "1e-6", ["optimizer.name=lion"]),
        ("optimizer.rounding", "kahan", ["optimizer.name=sgd", "fsdp.master_dtype=bf16"]),
        ("checkpoint.weights", "ema", []),
        ("model.router_aux_loss_coef", "0.1", []),
        ("optimizer.state_dtype", "bf16", ["optimizer.name=sgd"]),
        ("fsdp.loss_scale", "1024", ["fsdp.param_dtype=bf16"]),
        ("fsdp.loss_scale_interval", "10", []),
        ("schedule.decay_ratio", "0.2", []),
        ("model.freeze", "[lm_head]", ["lora.rank=8"]),
        *((f"lora.{leaf}", value, ["eval.prompts=[a]"]) for leaf, value in {**LORA, **STORED}.items()),
        *((f"lora.{leaf}", value, ["lora.path=a"]) for leaf, value in {"rank": "8", **LORA}.items()),
        ("lora.sampling", "merged", ["lora.rank=8"]),
        ("schedule.decay", "linear", []),
        ("schedule.min_lr_ratio", "0.2", ["schedule.name=constant"]),
        ("schedule.min_lr_ratio", "0.2", ["schedule.name=inverse_sqrt"]),
        ("schedule.cycles", "2", []),
        ("schedule.power", "2.0", ["schedule.name=wsd"]),
        ("schedule.timescale", "10", ["schedule.name=polynomial"]),
        ("data.text_unit", "line", []),
        ("data.text_unit", "line", ["eval.path=d.jsonl"]),
        ("checkpoint.keep_every", "100", ["checkpoint.keep=null"]),
        ("checkpoint.keep_every", "100", ["checkpoint.every=0"]),
        ("checkpoint.push_at", "save", []),
        ("run.staging", "there", []),
        ("checkpoint.push_private", "true", []),
        ("checkpoint.push_revision", "dev", []),
        ("checkpoint.keep_best", "true", []),
        ("eval.every", "10", []),
        ("eval.at_start", "true", []),
        ("eval.patience", "2", ["eval.prompts=[a]"]),
        ("eval.target", "0.5", ["eval.prompts=[a]"]),
        ("eval.target", "0.5", ["eval.path=d.jsonl", "train.loss=weft.engine.losses.base:CrossEntropy"]),
        ("eval.min_delta", "0.1", ["eval.path=d.jsonl"]),
        ("eval.metric", "eval/loss", ["eval.path=d.jsonl"]),
        ("eval.max_new_tokens", "2", ["eval.path=d.jsonl"]),
        ("eval.temperature", "2", ["eval.path=d.jsonl"]),
        ("track.project", "mine", []),
        ("track.name", "first", []),
        ("track.system_seconds", "1", ["track.system=false"]),
        ("profile.ranks", "[1]", []),
        ("profile.memory", "true", []),
        ("mesh.pp_schedule", "GPipe", ["mesh.pp=1"]),
        ("mesh.pp_stages_per_rank", "2", ["mesh.pp=2"]),
    ],
)
def test_a_key_without_effect_is_refused(key: str, value: str, overrides: list[str]) -> None:
    message = refused(f"{key}={value}", *overrides)
    assert message.startswith(f"command line: {key} would have no effect:")
    load(f"{key}={value}", f"{key}=null", *overrides)


def test_every_inert_rule_is_tried() -> None:
    tried = {"optimizer.betas", "optimizer.eps", "optimizer.momentum", "schedule.decay_ratio", "schedule.decay"}
    tried |= {
        "optimizer.load_state",
        "optimizer.state_dtype",
        "optimizer.rounding",
        *(f"optimizer.muon_{leaf}" for leaf in MUON),
        *(f"schedule.{leaf}" for leaf in ("min_lr_ratio", "warmup_ratio", "cycles", "power", "timescale")),
        "checkpoint.keep_every",
    }
    tried |= {f"checkpoint.{leaf}" for leaf in PUSHED} | {"run.staging"}
    tried |= {"model.router_aux_loss_coef", "fsdp.loss_scale", "fsdp.loss_scale_interval"}
    tried |= {"optimizer.options", "checkpoint.weights"}
    tried |= {"model.freeze", "lora.rank", *(f"lora.{leaf}" for leaf in (*LORA, *STORED))}
    tried |= {"checkpoint.keep_best", "eval.every", "eval.at_start", "eval.patience", "eval.min_delta", "eval.metric"}
    tried |= {"eval.target"}
    tried |= {"eval.max_new_tokens", "eval.temperature"}
    tried |= {"track.project", "track.name", "track.system_seconds", "profile.ranks", "profile.memory"}
    tried |= {"mesh.pp_schedule", "mesh.pp_stages_per_rank"}
    tried |= {"data.split", "data.subset", "data.columns"} | {"data.text_unit"}  # in tests/data/test_sources.py
    assert {rule.key for rule in INERT} == tried


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.max_length=9000"], "set step.max_tokens_per_device=9000"),
        (["data.max_length=900", "step.tokens=500"], "set step.tokens=900 or more"),
        (["checkpoint.keep_every=250"], "set checkpoint.keep_every=200"),
        (["model.init=random", "lora.rank=8"], "set model.init=pretrained"),
        (["schedule.warmup_steps=11", "train.steps=10"], "set schedule.warmup_steps=10 or less"),
        (["optimizer.state_dtype=bf16", "optimizer.betas=[0.9, 0.999]"], "Set the second beta to at most 0.99"),
        (["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.state_dtype=int8"], "optimizer.name=adamw"),
        (
            ["optimizer.state_dtype=int8", "optimizer.load_state=true", "model.dcp_weights=."],
            "optimizer.load_state=false, or optimizer.state_dtype=bf16",
        ),
        (
            ["optimizer.name=radam"],
            "or the import path of a class, as in optimizer.name=torch.optim.RAdam.",
        ),
        (["optimizer.name=adam"], "optimizer.name is adam: write adamw, or torch.optim.Adam."),
        (["optimizer.name=torch.optim.SGD", "optimizer.options.lr=0.1"], "set optimizer.lr instead"),
        (["optimizer.groups=[{match: [], lr: 0.1}]"], "optimizer.groups[0] has no pattern"),
        (["optimizer.groups=[{match: [a]}]"], "optimizer.groups[0] changes nothing: set lr, lr_scale or weight_decay"),
        (["optimizer.groups=[{match: [a], lr: 1, lr_scale: 2}]"], "has both lr and lr_scale: remove one"),
        (["optimizer.groups=[{match: [a], lr_scale: 0}]"], "it must be above 0 (model.freeze lists frozen"),
        (["optimizer.groups=[{match: [a], weight_decay: -1}]"], "has weight_decay = -1; it must be 0 or more"),
        (["schedule.name=wsd", "schedule.warmup_ratio=0.6", "schedule.decay_ratio=0.6"], "more than all steps"),
        (
            ["schedule.name=cosine_with_restarts", "schedule.cycles=6", "train.steps=10"],
            "the rate of a cycle never falls: set schedule.cycles=5 or less",
        ),
        (["step.documents=1000000000"], "it must be 1 to 1,000,000"),
        (["data.workers=1000000000"], "it must be 1 to 4,096"),
    ],
)
def test_values_that_do_not_fit(overrides: list[str], words: str) -> None:
    assert words in refused(*overrides)


OUT_OF_RANGE = {
    "model.recompute": "{every: 0}",
    "model.tiled_mlp": "0",
    "data.workers": "0",
    "data.max_row_bytes": "0",
    "data.max_image_pixels": "0",
    "data.image_pixels": "{min: 9, max: 4}",
    "data.video": "{min_frames: 9, max_frames: 4}",
    "checkpoint.every": "-1",
    "checkpoint.every_minutes": "0",
    "checkpoint.keep": "0",
    "checkpoint.keep_every": "0",
    "checkpoint.push": "model",
    "mesh.dp_replicate": "0",
    "mesh.dp_shard": "-2",
    "mesh.cp": "0",
    "mesh.ulysses": "0",
    "mesh.tp": "0",
    "mesh.ep": "0",
    "mesh.pp": "0",
    "mesh.pp_stages_per_rank": "0",
    "fsdp.reshard_after_forward": "0",
    "fsdp.loss_scale": "1000",
    "fsdp.loss_scale_interval": "0",
    "fsdp.overrides": "{lm_head: 1}",
    "data.template_kwargs": "{messages: no}",
    "fsdp.prefetch": "[1, 0]",
    "data.max_length": "1",
    "step.documents": "0",
    "step.tokens": "0",
    "step.max_tokens_per_device": "0",
    "optimizer.lr": "0",
    "optimizer.weight_decay": "-0.1",
    "optimizer.betas": "[0.9, 1]",
    "optimizer.eps": "0",
    "optimizer.momentum": "1",
    "optimizer.muon_lr": "0",
    "optimizer.muon_momentum": "1",
    "optimizer.max_grad_norm": "0",
    "optimizer.ema_decay": "1",
    "schedule.warmup_ratio": "1.1",
    "schedule.warmup_steps": "-1",
    "schedule.min_lr_ratio": "1.5",
    "schedule.decay_ratio": "-0.1",
    "schedule.cycles": "0",
    "schedule.power": "0",
    "schedule.timescale": "0",
    "train.steps": "0",
    "train.epochs": "0",
    "train.seed": "-1",
    "train.timeout": "0",
    "model.router_aux_loss_coef": "0",
    "model.router_bias_rate": "0",
    "train.log_every": "0",
    "train.max_nonfinite": "0",
    "train.neftune_noise_alpha": "0",
    "lora.rank": "0",
    "lora.alpha": "0",
    "lora.plus_ratio": "0",
    "lora.dropout": "1",
    "lora.targets": "[]",
    "eval.every": "-1",
    "eval.patience": "0",
    "eval.target": "0",
    "eval.share": "1",
    "eval.min_delta": "-0.1",
    "eval.max_new_tokens": "0",
    "eval.temperature": "-1",
    "track.system_seconds": "0",
    "profile.steps": "[3, 0]",
    "profile.ranks": "[]",
}


RANGES = {key.name: key.within for key in schema_keys(SftConfig).values() if key.within}


@pytest.mark.parametrize("key", RANGES)
def test_a_value_out_of_range_is_refused(key: str) -> None:
    needed = {
        "optimizer.momentum": ["optimizer.name=sgd"],
        "optimizer.muon_lr": ["optimizer.name=muon"],
        "optimizer.muon_momentum": ["optimizer.name=muon"],
        "model.router_aux_loss_coef": ["model.router_aux_loss=document"],
        "eval.every": ["eval.path=d.jsonl"],
        "eval.patience": ["eval.path=d.jsonl"],
        "eval.target": ["eval.path=d.jsonl"],
        "eval.min_delta": ["eval.path=d.jsonl", "eval.patience=1"],
        "eval.max_new_tokens": ["eval.prompts=[a]"],
        "eval.temperature": ["eval.prompts=[a]"],
    }
    extra = needed.get(key, [])
    extra += ["lora.rank=8"] if key.startswith("lora.") and key != "lora.rank" else []
    extra += ["profile.steps=[1]"] if key == "profile.ranks" else []
    schedules = {
        "decay_ratio": "wsd",
        "cycles": "cosine_with_restarts",
        "power": "polynomial",
        "timescale": "inverse_sqrt",
    }
    extra += [f"schedule.name={name}" for leaf, name in schedules.items() if key == f"schedule.{leaf}"]
    extra += ["fsdp.param_dtype=fp16"] if key.startswith("fsdp.loss_scale") else []
    message = refused(f"{key}={OUT_OF_RANGE[key]}", *extra)
    assert f"command line: {key} is " in message
    assert RANGES[key].words in message


@pytest.mark.parametrize("day", ["2025-13-01", "20250301", "today"])
def test_template_date_is_a_day(day: str) -> None:
    assert "data.template_date is" in refused(f"data.template_date={day}") and load("data.template_date=2025-03-01")


def test_every_number_has_a_range() -> None:
    numeric = {
        key.name
        for key in schema_keys(SftConfig).values()
        if re.search(r"\bint\b", str(key.type)) or "float" in str(key.type)
    }
    assert numeric | {"lora.targets", "checkpoint.push", "model.recompute"} == set(RANGES) == set(OUT_OF_RANGE)


def test_a_config_made_in_python_is_checked_too() -> None:
    config = SftConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), step=StepConfig(tokens=100))
    assert check_config(config) == [
        "step.documents and step.tokens are both set: set exactly one of them, and the other to null."
    ]
    assert check_config(dataclasses.replace(config, step=StepConfig(tokens=100, documents=None))) == []


# ---------------------------------------------------------------- files


def test_syntax_errors_name_the_line() -> None:
    assert refused(a="model:\n\tpath: m\n").startswith("a.yaml:2: not valid YAML")
    assert "Indent with spaces" in refused(a="model:\n\tpath: m\n")
    assert refused(a="model:\n  path: m\n bad: 3\n").startswith("a.yaml:3: not valid YAML")
    assert "`lr` is set twice (first at a.yaml:2)" in refused(a="optimizer:\n  lr: 1\n  lr: 2\n")
    assert "a.yaml:1: expected sections" in refused(a="- model\n")
    assert refused(a="model: !!python/object:os.system x\n").startswith("a.yaml:1: not valid YAML")


def test_an_empty_file_changes_nothing() -> None:
    assert load(a="", b="# nothing\n") == load()


def test_a_missing_config_file_names_its_neighbours() -> None:
    Path("train.yaml").write_text("")
    with pytest.raises(UserError, match="no such config file. Did you mean train.yaml"):
        load_config(["trian.yaml"], [])
    with pytest.raises(UserError, match="to set a key write step.documents=VALUE"):
        load_config(["step.documents"], [])


def test_missing_data_and_model_name_their_neighbours() -> None:
    message = refused("data.path=dd.jsonl")
    assert "data.path dd.jsonl does not exist; it must be a local file, or a dataset on the hub" in message
    assert message.endswith("Did you mean d.jsonl?")
    assert "data.path d*.json: no file in " in refused("data.path=d*.json")
    Path("LICENSE").write_text("")
    assert "Did you mean" not in refused("data.path=nope")  # a name without an ending is not like every other
    assert "data.path m is a folder" in refused("data.path=m")
    assert "model.path ./mm does not exist" in refused("model.path=./mm")
    assert "model.path d.jsonl is a file" in refused("model.path=d.jsonl")
    Path("empty").mkdir()
    assert "model.path empty contains no config.json" in refused("model.path=empty")
    assert "model.path m/gone does not exist" in refused("model.path=m/gone")
    assert load("model.path=Qwen/Qwen3-0.6B").model.path == "Qwen/Qwen3-0.6B"


def test_random_weights_need_only_a_config() -> None:
    Path("m/model.safetensors").unlink()
    assert "set model.init=random" in refused()
    assert load("model.init=random").model.init == "random"


# ---------------------------------------------------------------- the mesh


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "sizes"),
    [(1, -1, 1, (1, 1)), (1, -1, 6, (1, 6)), (2, -1, 6, (2, 3)), (-1, 2, 6, (3, 2)), (2, 3, 6, (2, 3))],
)
def test_a_mesh_is_resolved(replicate: int, shard: int, world: int, sizes: tuple[int, int]) -> None:
    assert resolve_mesh(MeshConfig(dp_replicate=replicate, dp_shard=shard), world) == MeshSizes(*sizes)


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "words"),
    [
        (-1, -1, 4, "both -1"),
        (2, 3, 4, "= 2 x 3 = 6, but there are 4 ranks: start 6 ranks (--nproc 6) or set mesh.dp_shard=2."),
        (3, -1, 4, "4 ranks are not a multiple of mesh.dp_replicate = 3"),
        (8, -1, 4, "4 ranks are not a multiple"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(replicate: int, shard: int, world: int, words: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_mesh(MeshConfig(dp_replicate=replicate, dp_shard=shard), world)
    assert words in str(caught.value)


def test_ranks_of_ep_are_some_of_the_shards() -> None:
    assert resolve_mesh(MeshConfig(cp=2, ep=4), 8) == MeshSizes(1, 4, cp=2, ep=4)
    assert fewest_ranks(MeshConfig(ep=8)) == fewest_ranks(MeshConfig(cp=2, ep=8)) == 8
    with pytest.raises(UserError, match=r"mesh.ep=3 does not divide mesh.dp_shard x mesh.cp = 4: .* one of 1, 2, 4\."):
        resolve_mesh(MeshConfig(ep=3), 4)
    shrunk, notes = shrink_mesh(MeshConfig(dp_shard=16, ep=8), 2, True)
    assert (shrunk.dp_shard, shrunk.ep, len(notes)) == (2, 2, 2)


def test_what_a_resumed_run_no_longer_needs_is_dropped() -> None:
    """The config that a run wrote names keys that were of use there."""
    Path("run.yaml").write_text(to_yaml(load("mesh.pp=2", "mesh.pp_schedule=GPipe")))
    with pytest.raises(UserError, match=r"mesh\.pp_schedule would have no effect"):
        load_config(["run.yaml"], ["mesh.pp=1"])
    config = load_config(["run.yaml"], ["mesh.pp=1"], of_run=True)
    assert config.mesh.pp == 1 and "pp_schedule: GPipe" not in to_yaml(config)
    with pytest.raises(UserError, match=r"mesh\.pp_schedule would have no effect"):
        load_config(["run.yaml"], ["mesh.pp=1", "mesh.pp_schedule=1F1B"], of_run=True)


def test_an_integer_reshard_must_divide_the_shards() -> None:
    config = load("fsdp.reshard_after_forward=2")
    check_reshard(config, MeshSizes(1, 4))
    check_reshard(load(), MeshSizes(1, 1))
    with pytest.raises(UserError, match="must be one of true, false, 3"):
        check_reshard(config, MeshSizes(1, 9))
    with pytest.raises(UserError, match="must be one of true, false"):
        check_reshard(config, MeshSizes(2, 2))
    mixed = load("fsdp.overrides={'*.mlp': 2, lm_head: replicate}")
    check_reshard(mixed, MeshSizes(1, 4))
    with pytest.raises(UserError, match=r"fsdp.overrides: \*.mlp is 2, .*dp_shard = 2 .* one of full, replicate\."):
        check_reshard(mixed, MeshSizes(2, 2))


@pytest.mark.parametrize(
    ("mesh", "machine", "share", "expected", "notes"),
    [
        ((1, -1), 2, True, (1, 2), 0),
        ((1, -1), 1, True, (1, 2), 0),
        ((2, -1), 2, True, (2, 2), 0),
        ((1, 64), 2, True, (1, 2), 1),
        ((4, 64), 2, True, (2, 2), 2),
        ((1, -1), 8, False, (1, 8), 0),
        ((2, 8), 8, False, (2, 2), 1),
        ((1, 8), 8, False, (1, 8), 0),
        ((-1, -1), 8, False, (1, 8), 0),
    ],
)
def test_verify_shrinks_the_mesh_to_the_machine(
    mesh: tuple[int, int], machine: int, share: bool, expected: tuple[int, int], notes: int
) -> None:
    shrunk, messages = shrink_mesh(MeshConfig(dp_replicate=mesh[0], dp_shard=mesh[1]), machine, share)
    assert (shrunk.dp_replicate, shrunk.dp_shard) == expected
    assert len(messages) == notes


# ---------------------------------------------------------------- out again


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "step.tokens=4096", "train.steps=7"],
        ["schedule.name=wsd", "schedule.warmup_steps=3", "fsdp.reshard_after_forward=2", "run.dir=1e-5"],
        ["fsdp.wrap=[layers, LlamaMLP]"],
        ["fsdp.prefetch=2", "fsdp.cast_forward_inputs=['*.mlp']"],
        ["fsdp.prefetch=[2, 3]"],
        ["fsdp.overrides={'*.mlp': replicate, model.embed_tokens: 2, lm_head: full}"],
        ["model.freeze=[lm_head, '*.mlp']"],
        ["optimizer.name=torch.optim.RAdam", "optimizer.options={betas: [0.9, 0.99], foreach: true}"],
        ["optimizer.groups=[{match: [lm_head], lr: 1e-6}, {match: ['*.mlp', a], weight_decay: 0}]"],
        ["optimizer.ema_decay=0.99", "checkpoint.weights=ema"],
        ["schedule.name=constant", "run.dir=yes", "optimizer.lr=1e-7", "data.max_length=12"],
    ],
)
def test_a_resolved_config_loads_to_itself(overrides: list[str]) -> None:
    config = load(*overrides)
    Path("resolved.yaml").write_text(to_yaml(config))
    assert load_config(["resolved.yaml"], []) == config


def test_to_dict_is_plain_and_whole() -> None:
    rendered = to_dict(load())
    names = {f"{section}.{leaf}" for section, values in rendered.items() for leaf in values}
    unread = {"model.router_aux_loss_coef", "optimizer.momentum", "schedule.decay", "schedule.decay_ratio"}
    unread |= {"fsdp.loss_scale", "fsdp.loss_scale_interval", "optimizer.options", "checkpoint.weights"}
    unread |= {f"lora.{leaf}" for leaf in (*LORA, *STORED)} | {"checkpoint.keep_best"}
    unread |= {f"checkpoint.{leaf}" for leaf in PUSHED} | {"run.staging"}
    unread |= {"eval.every", "eval.at_start", "eval.metric", "eval.patience", "eval.min_delta", "eval.target"}
    unread |= {"eval.max_new_tokens", "eval.temperature", "optimizer.load_state"}
    unread |= {"track.project", "track.name", "profile.ranks", "profile.memory", "mesh.pp_schedule"}
    unread |= {"optimizer.rounding", *(f"optimizer.muon_{leaf}" for leaf in MUON)}
    unread |= {"data.text_unit", "mesh.pp_stages_per_rank", "schedule.cycles", "schedule.power", "schedule.timescale"}
    assert names == set(schema_keys(SftConfig)) - unread
    assert rendered["optimizer"]["betas"] == [0.9, 0.95]


# ---------------------------------------------------------------- the package


def test_the_package_imports_no_torch() -> None:
    folder = Path(package.__file__).parent
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    modules = ["weft", "weft.cli", *(".".join(["weft.config", *file.parts]) for file in files)]
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    assert page == reference(), "run: make docs"
    for schema in SCHEMAS.values():
        for name in schema_keys(schema):
            assert f"\n| `{name}` | " in page
    assert all(line.endswith(" |") for line in page.splitlines() if line.startswith("| `"))


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]


RATES = ("optimizer.lr", "optimizer.weight_decay", "schedule.name")


@pytest.mark.parametrize(
    ("schema", "overrides", "rates", "default"),
    [
        (SftConfig, (), (1e-5, 0.1, "cosine"), "weft sft"),
        (SftConfig, ("lora.rank=8",), (1e-4, 0.0, "cosine"), "weft sft with lora"),
        (SftConfig, ("lora.path=a",), (1e-4, 0.0, "cosine"), "weft sft with lora"),
        (SftConfig, ("lora.rank=null",), (1e-5, 0.1, "cosine"), "weft sft"),
        (SftConfig, ("lora.rank=8", "optimizer.lr=3e-4"), (3e-4, 0.0, "cosine"), ""),
        (RlConfig, ("rl.reward=[length]",), (1e-6, 0.0, "constant"), "weft rl"),
        (RlConfig, ("rl.reward=[length]", "lora.rank=8"), (1e-5, 0.0, "constant"), "weft rl with lora"),
        (RlConfig, ("rl.reward=[length]", "optimizer.lr=1e-5"), (1e-5, 0.0, "constant"), ""),
    ],
)
def test_rates_have_the_defaults_of_their_command_and_of_adapters(
    schema: type, overrides: tuple[str, ...], rates: tuple[float, float, str], default: str
) -> None:
    config = load_config([], ["model.path=m", "data.path=d.jsonl", *overrides], schema)
    assert tuple(get(config, name) for name in RATES) == rates
    assert default_of_command(config, "optimizer.lr") == default
    Path("resolved.yaml").write_text(to_yaml(config))  # as a resumed run reads it, whatever the defaults are then
    assert f"lr: {rates[0]:g}" in Path("resolved.yaml").read_text().replace("1.0e", "1e").replace("3.0e", "3e")
    assert load_config(["resolved.yaml"], [], schema, of_run=True) == config


def test_the_reference_page_names_each_default_that_depends_on_the_command() -> None:
    page = reference()
    assert "| `1e-05`, with lora `0.0001` | Peak learning rate. |" in page
    assert "| `1e-06`, with lora `1e-05` | Peak learning rate. |" in page
    assert "| `constant` | Shape of the learning rate after warm-up. |" in page


def test_a_section_of_weft_rl_is_unknown_to_weft_sft_alone() -> None:
    node = Node(4, "a.yaml:2")
    (rollout,) = unknown_keys("rollout.engin", node, SftConfig)
    assert rollout.name == "rollout.engin" and rollout.answer.startswith("belongs to `weft rl`")
    (engine,) = unknown_keys("rollout.engin", node, RlConfig)
    assert engine.location == "a.yaml:2" and "did you mean rollout.engine" in engine.answer
