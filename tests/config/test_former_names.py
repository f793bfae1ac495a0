"""Keys that were renamed: their former names work wherever a key is given, and the resolved config has the new ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.support.cases import saved_model
from tests.support.toy_tokenizers import byte_tokenizer
from weft import cli
from weft.config import load_config, to_dict, to_yaml
from weft.config.keys import former_names, get, with_current_names
from weft.config.load import chosen_keys, load_values
from weft.config.rl_schema import RlAlgorithm, RlConfig, RolloutConfig
from weft.config.schema import ModelConfig, SftConfig, StepConfig
from weft.config.yaml12 import written
from weft.errors import UserError
from weft.observe.measured import measured_config
from weft.observe.report.read import read_run
from weft.observe.resume import changes
from weft.recipes import rl as rl_recipe
from weft.recipes import sft as sft_recipe

NAMES = {**former_names(RlConfig), **former_names(SftConfig)}
RL = ["model.path=m", "data.path=d.jsonl", "rl.reward=[length]"]
SFT = RL[:2]

# Former name -> (a value other than the default, keys without which it would have no effect)
VALUES: dict[str, tuple[Any, list[str]]] = {
    "rl.kl": (0.5, []),
    "rl.entropy": (0.5, []),
    "rl.scale": ("none", []),
    "rl.aggregation": ("token_mean", []),
    "rl.like": ("verl", []),
    "rl.prompts": (8, []),
    "rl.updates": (2, []),
    "cluster.sleep": (["optimizer"], []),
    "cluster.trainer": (3, []),
    "rollout.memory": (0.5, ["rollout.engine=vllm"]),
    "rollout.engines": (2, ["rollout.engine=hf"]),
    "rollout.options": ({"max_num_seqs": 5}, ["rollout.engine=vllm"]),
    "rollout.unfinished": ("drop", ["rollout.engine=hf", "cluster.max_staleness=1"]),
    "rollout.max_tokens_per_device": (5000, []),
    "model.weights": (".", []),
    "track.to": (["tensorboard"], []),
    "step.shapes": ("buckets", []),
    "train.objective": ("weft.engine.losses:CrossEntropy", []),
}


pytestmark = pytest.mark.usefixtures("model_folder")


def schema_of(former: str) -> tuple[type, list[str]]:
    return (SftConfig, SFT) if former in former_names(SftConfig) else (RlConfig, RL)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_every_renamed_key_is_tried_here() -> None:
    assert set(NAMES) == set(VALUES)


@pytest.mark.parametrize("former", VALUES)
def test_former_names_work_in_files_and_on_the_command_line(former: str) -> None:
    """The resolved config, which the run keeps, has the new name alone, and reads as the same config again."""
    value, extra = VALUES[former]
    schema, required = schema_of(former)
    section, _, leaf = former.partition(".")
    Path("nested.yaml").write_text(f"{section}:\n  {leaf}: {written(value)}\n")
    Path("dotted.yaml").write_text(f"{former}: {written(value)}\n")
    sources: list[tuple[list[str], list[str]]] = [
        (["nested.yaml"], []),
        (["dotted.yaml"], []),
        ([], [f"{former}={written(value)}"]),
    ]
    for files, overrides in sources:
        config: Any = load_config(files, [*required, *extra, *overrides], schema)
        assert plain(get(config, NAMES[former])) == value
        section_of = to_dict(config)[section]
        assert leaf not in section_of and plain(section_of[NAMES[former].partition(".")[2]]) == value
        Path("resolved.yaml").write_text(to_yaml(config))
        assert load_config(["resolved.yaml"], [], schema, of_run=True) == config


@pytest.mark.parametrize("former", VALUES)
def test_former_names_work_in_python(former: str) -> None:
    """In the sections of a call, in the constructor of a section, and as attributes, which functions of users read."""
    value, extra = VALUES[former]
    schema, _ = schema_of(former)
    section, _, leaf = former.partition(".")
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    values |= {"rl": {"reward": ["length"]}} if schema is RlConfig else {}
    for word in extra:
        name, _, text = word.partition("=")
        values.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = int(text) if text.isdigit() else text
    values[section] = {**values.get(section, {}), leaf: value}
    config: Any = load_values(values, "weft.rl", schema)
    assert plain(get(config, NAMES[former])) == value
    assert getattr(getattr(config, section), leaf) == get(config, NAMES[former])
    kind = type(getattr(config, section))
    section_config = kind(**({"path": "m"} if section == "model" else {}), **{leaf: value})
    assert getattr(section_config, NAMES[former].partition(".")[2]) == value


def test_attributes_that_there_are_not() -> None:
    with pytest.raises(AttributeError, match="'RlAlgorithm' object has no attribute 'klx'"):
        _ = RlAlgorithm().klx  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="scale is the former name of advantage_norm: set only advantage_norm"):
        RlAlgorithm(scale="none", advantage_norm="none")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'promts'"):
        RlAlgorithm(promts=3)  # type: ignore[call-arg]
    assert dataclasses.replace(RolloutConfig(memory=0.5), tp=2).gpu_memory_utilization == 0.5  # type: ignore[call-arg]


@pytest.mark.parametrize("former", VALUES)
def test_a_key_by_both_names_is_an_error(former: str) -> None:
    value, extra = VALUES[former]
    schema, required = schema_of(former)
    name, (section, _, leaf) = NAMES[former], former.partition(".")
    both_names = [f"{former}={written(value)}", f"{name}={written(value)}"]
    with pytest.raises(UserError) as caught:
        load_config([], [*required, *extra, *both_names], schema)
    assert str(caught.value) == (
        f"command line: {former} is the former name of {name}, which is also set (command line): remove {former}."
    )
    text = written(value)
    Path("both.yaml").write_text(f"{section}:\n  {leaf}: {text}\n  {name.partition('.')[2]}: {text}\n")
    with pytest.raises(UserError, match=rf"both.yaml:2: {former} is the former name of {name}.*\(both.yaml:3\)"):
        load_config(["both.yaml"], [*required, *extra], schema)


def test_later_sources_override_earlier_ones_by_either_name() -> None:
    """A new name on the command line replaces a former one in a file, and the other way round."""
    Path("old.yaml").write_text("rl:\n  kl: 0.1\n")
    Path("new.yaml").write_text("rl:\n  kl_coef: 0.2\n")
    for files, overrides, expected in (
        (["old.yaml"], ["rl.kl_coef=0.3"], 0.3),
        (["new.yaml"], ["rl.kl=0.3"], 0.3),
        (["old.yaml", "new.yaml"], [], 0.2),
        (["new.yaml", "old.yaml"], [], 0.1),
    ):
        assert load_config(files, [*RL, *overrides], RlConfig).rl.kl_coef == expected


def test_messages_name_the_key_and_what_was_written() -> None:
    Path("old.yaml").write_text("rl:\n  kl: much\n")
    for files, overrides, words in (
        (["old.yaml"], [], "old.yaml:2 (rl.kl): rl.kl_coef must be a number, not much"),
        ([], ["rl.kl=-1"], "command line (rl.kl): rl.kl_coef is -1"),
        ([], ["rollout.memory=0.5"], "command line (rollout.memory): rollout.gpu_memory_utilization would"),
        ([], ["rl.promts=3"], "rl.promts is not a key of weft: did you mean rl.prompts_per_step?"),
    ):
        with pytest.raises(UserError) as caught:
            load_config(files, [*RL, *overrides], RlConfig)
        assert words in str(caught.value)


def test_presets_do_not_replace_what_was_set_by_a_former_name() -> None:
    config = load_config([], [*RL, "rl.like=verl", "rl.algorithm=dapo", "rl.aggregation=sequence_mean"], RlConfig)
    assert (config.rl.preset, config.rl.loss_aggregation, config.rl.dual_clip) == ("verl", "sequence_mean", 3.0)


def test_calls_of_weft_take_former_names(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(rl_recipe, "run", lambda config, options, hooks: configs.append(config))
    monkeypatch.setattr(sft_recipe, "run", lambda config, options, hooks: configs.append(config))
    weft.rl(
        model="m", data="d.jsonl", reward=["length"], rl={"prompts": 6, "updates": 3}, cluster={"trainer": 2},
        run={"dir": "r"},
    )  # fmt: skip
    weft.sft(model="m", data="d.jsonl", step={"shapes": "fixed"}, track={"to": ["tensorboard"]}, run={"dir": "s"})
    first, second = configs
    assert (first.rl.prompts_per_step, first.rl.minibatches, first.cluster.trainer_ranks) == (6, 3, 2)
    assert (second.step.padding, second.track.report_to) == ("fixed", ("tensorboard",))


def test_runs_of_earlier_versions_are_resumed_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN/config.yaml and the config in a checkpoint's state have former names: keys can be changed on the way, nothing
    counts as changed by its name alone, and `weft eval` and `weft report` read the run."""
    Path("run/checkpoints").mkdir(parents=True)
    text = "model: {path: m}\ndata: {path: d.jsonl}\nrl: {reward: [length], prompts: 4, updates: 2, kl: 0.1}\n"
    Path("run/config.yaml").write_text(text + "step: {shapes: buckets}\n")
    Path("run/metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    configs: list[Any] = []
    monkeypatch.setattr(rl_recipe, "run", lambda config, options, hooks=None: configs.append(config))
    assert cli.main(["rl", "--resume", "run", "rl.minibatches=1", "rl.kl=0.2", "--device", "cpu"]) == 0
    (config,) = configs
    assert (config.rl.prompts_per_step, config.rl.minibatches, config.rl.kl_coef) == (4, 1, 0.2)
    assert config.step.padding == "buckets"
    now = to_dict(load_config(["run/config.yaml"], [], RlConfig))
    before = json.loads(json.dumps(now))
    for section, leaf in (name.split(".") for name in NAMES):
        if NAMES[f"{section}.{leaf}"].split(".")[1] in before.get(section, {}):
            before[section][leaf] = before[section].pop(NAMES[f"{section}.{leaf}"].split(".")[1])
    assert before["rl"]["updates"] == 2 and list(changes(before, now, RlConfig)) == []
    assert with_current_names(before, RlConfig) == now
    read = read_run(Path("run"))
    assert read.config["rl"]["minibatches"] == 2 and "updates" not in read.config["rl"]
    shutil.copytree("m", "run/checkpoints/step-000001")
    assert measured_config("run/checkpoints/step-000001", ["d.jsonl"]).rl.prompts_per_step == 1  # type: ignore[union-attr]


def test_the_resolved_config_is_printed_with_new_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_keys(["rl.prompts=4"], RlConfig) == {"rl.prompts_per_step": 4}
    assert cli.main(["init", "rl", "rl.prompts=4", "rl.kl=0.1"]) == 0
    out = capsys.readouterr().out
    assert "  prompts_per_step: 4" in out and "  kl_coef: 0.1" in out
    assert cli.main(["keys", "cluster.sleep"]) == 0
    assert "cluster.offload_during_rollout" in capsys.readouterr().out


def test_a_dry_run_prints_new_names(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(saved_model("llama"), "toy")
    byte_tokenizer().save_pretrained("toy")
    words = ["sft", "model.path=toy", "data.path=d.jsonl", "step.shapes=fixed", "track.to=[]"]
    assert cli.main([*words, "--device", "cpu", "--nproc", "1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "  padding: fixed" in out and "  report_to: []" in out and "shapes:" not in out


def test_a_foreign_config_is_not_read_by_former_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Drafts of `weft migrate` have new names alone."""
    foreign = Path(__file__).parent.parent / "foreign" / "roll_vision.yaml"
    assert cli.main(["migrate", str(foreign)]) == 0
    draft = capsys.readouterr().out
    for former in ("prompts:", "updates:", "kl:", "aggregation:", "engines:", "memory:", "sleep:", "trainer:"):
        assert f"\n  {former}" not in draft
    assert "\n  prompts_per_step: " in draft and "\n  num_engines: " in draft


def test_sections_of_configs_without_renamed_keys_are_plain() -> None:
    assert StepConfig(shapes="fixed") == StepConfig(padding="fixed")  # type: ignore[call-arg]
    assert ModelConfig(path="m", weights="w").dcp_weights == "w"  # type: ignore[call-arg]
