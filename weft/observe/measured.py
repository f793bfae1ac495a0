"""The config of `weft eval`: the weights, and the keys that are copied from a run's config. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.checkpoint.retention import chosen_step, complete_steps
from weft.config.dpo_schema import DpoConfig
from weft.config.keys import with_current_names
from weft.config.load import load_config, parse_override, plain_sections, read_config_file
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.errors import UserError
from weft.files import read_object

_ADAPTER = "adapter_config.json"
# Keys of a run's config that determine documents, prompts and rewards, and how the model computes them.
_OTHER_DATA = ("path", "sources", "split", "subset", "columns", "shuffle", "chat_template", "workers", "cache")
_COPIED: dict[str, tuple[str, ...]] = {
    "step": ("max_tokens_per_device",),
    "fsdp": ("param_dtype",),
    "train": ("seed", "loss"),
    "rl": (
        "reward", "reward_weights", "reward_column", "reward_options", "reward_timeout", "reward_workers",
        "environment", "max_turns", "environment_timeout", "agent", "agent_timeout", "agents_at_once", "agent_host",
        "agent_port", "chat", "instruction",
    ),
    "rollout": ("max_prompt_tokens", "max_new_tokens", "stop"),
    "eval": ("samples", "pass_at", "temperature", "top_p", "top_k", "max_new_tokens", "correct_from"),
}  # fmt: skip


def measured_config(path: str, words: Sequence[str], step: int | None = None) -> SftConfig | RlConfig:
    """The config that measures a model. path: a run folder (its newest checkpoint, or that of `step`), a checkpoint, a
    model or adapter directory, or a hub id. words: the path of the data, and overrides. With a section `rl`, here or in
    the run's config, answers are rewarded; with `preference` they are compared, with `reward` they are scored;
    otherwise the loss of documents is measured. Raises UserError."""
    data = [word for word in words if "=" not in word or Path(word).exists()]
    overrides = [word for word in words if word not in data]
    named = {word.partition("=")[0] for word in overrides}
    if len(data) != 1 and not (not data and named & {"data.path", "data.sources"}):
        problem = (
            "the path of the data is missing"
            if not data
            else f"{data[1]} is a second file: write one path or a quoted pattern"
        )
        raise UserError(f"weft eval: {problem}, as in weft eval {path} held_out.jsonl [section.key=value ...].")
    run, checkpoint = _find_weights(Path(path), step)
    sections = {} if run is None else plain_sections(read_config_file(str(run / "config.yaml")))
    written = with_current_names(sections, RlConfig)
    rewards = "rl" in written or any(name.startswith("rl.") for name in named)
    base = _copied_keys(written, rewards)
    base["model"] = {"path": path if checkpoint is None else str(checkpoint)}
    if checkpoint is not None and (checkpoint / _ADAPTER).is_file():
        base_model = read_object(checkpoint / _ADAPTER, "the config of an adapter").get("base_model_name_or_path")
        model = written.get("model", {}).get("path") or base_model
        if not isinstance(model, str):
            raise UserError(f"{checkpoint}: its adapter_config.json has no name of a base model: set model.path=BASE.")
        base["model"], base["lora"] = {"path": model}, {"path": str(checkpoint)}
        template = written.get("data", {}).get("chat_template")  # a whole model's checkpoint has it in its tokenizer
        base["data"] |= {} if template is None else {"chat_template": template}
    for word in data:
        base["data"]["path"] = word
    if "reward" in written or any(name.startswith("reward.") for name in named):
        base["reward"] = dict(written.get("reward", {}))
        return load_config([], overrides, RewardConfig, base=base)
    if "preference" in written or any(name.startswith("preference.") for name in named):
        base["preference"] = dict(written.get("preference", {})) | {"cache": "off"}
        if run is not None and "lora" not in base:  # the reference is the model before training
            section = written.get("reference", {})
            base["reference"] = {"path": section.get("path") or written["model"]["path"]}
        return load_config([], overrides, DpoConfig, base=base)
    if not rewards:
        return load_config([], overrides, SftConfig, base=base)
    base.setdefault("rl", {})
    base["rl"] |= {"prompts_per_step": 1, "minibatches": 1}
    data_path = next((str(parse_override(word).value) for word in overrides if word.startswith("data.path=")), None)
    base["eval"] = {**base.get("eval", {}), "path": data_path or base["data"].get("path")}
    return load_config([], overrides, RlConfig, base=base)


def _find_weights(path: Path, step: int | None) -> tuple[Path | None, Path | None]:
    """(Run folder, checkpoint or model directory); None for a missing one: a hub id has neither."""
    candidates = (path, path.resolve().parent.parent)
    run = next((f for f in candidates if (f / "config.yaml").is_file() and (f / "checkpoints").is_dir()), None)
    if run is not None and run == path:
        steps = complete_steps(path / "checkpoints")
        if not steps:
            raise UserError(f"{path} has no complete checkpoint yet: wait for the first, or lower checkpoint.every.")
        return run, chosen_step(path / "checkpoints", path, steps[-1] if step is None else step)
    if step is not None:
        raise UserError(
            f"--step {step} selects a checkpoint of a run folder, but {path} is not a run folder: remove --step."
        )
    return run, path if path.is_dir() else None


def _copied_keys(written: Mapping[str, Mapping[str, Any]], rewards: bool) -> dict[str, dict[str, Any]]:
    """The keys that are copied from a run's config. The mesh is not copied: the number of ranks may differ."""
    data = {key: value for key, value in written.get("data", {}).items() if key not in _OTHER_DATA}
    if written.get("data", {}).get("sources") is None and "columns" in written.get("data", {}):
        data["columns"] = written["data"]["columns"]
    sections: dict[str, dict[str, Any]] = {"data": data}
    for section, leaves in _COPIED.items():
        if section in ("rl", "rollout", "eval") and not rewards:
            continue
        values = {leaf: written.get(section, {})[leaf] for leaf in leaves if leaf in written.get(section, {})}
        if values:
            sections[section] = values
    return sections
