"""`weft migrate`: a config of another trainer as a draft of weft's. Imports no torch.

What has one meaning is taken over; of everything else the draft says what to do, in the words of aliases.py.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.config.aliases import advice_for, entry_of
from weft.config.checks import EXCLUSIVE, INERT
from weft.config.coerce import MismatchError, coerce, describe
from weft.config.keys import Key, schema_keys
from weft.config.load import build, read_config_file
from weft.config.schema import SftConfig
from weft.config.scripts import read_script
from weft.config.trainers import Trainer
from weft.config.trainers.values import weft_value
from weft.config.unknown import likely_trainer
from weft.config.yaml12 import Node, node_of, read_value, show, written

_HEAD = """\
# A draft, made by `weft migrate` from {files}. Read it through: it holds what has the same meaning in weft.
# Then look at it with `weft sft THIS --dry-run`. Every key is in docs/config.md.
"""
# weft's key <- the names of it whose values can be taken as they are.
_SAME: dict[str, str] = {
    "model.path": "model_name_or_path partial_pretrain pretrain hf_checkpoint hf_assets_path base_model "
    "pretrained_model_name_or_path",
    "model.attention": "attn_implementation",
    "model.compile": "torch_compile use_torch_compile compile.enable training.compile compile.enabled",
    "model.freeze": "freeze_modules frozen_modules freeze_params",
    "data.path": "dataset_name train_files data_args.file_name prompt_data path_or_dataset_id path_or_dataset "
    "dataset_path train_file",
    "data.subset": "dataset_config",
    "data.split": "dataset_train_split dataset.split",
    "data.shuffle": "shuffle_dataset rollout_shuffle dataloader.shuffle",
    "data.max_length": "max_length max_seq_length seq_length seq_len sequence_length cutoff_len max_seq_len",
    "data.long_documents": "truncation truncation_mode",
    "data.workers": "dataset_num_proc preprocessing_num_workers",
    "mesh.dp_shard": "fsdp_size data_parallel_shard_degree",
    "mesh.dp_replicate": "dp_replicate_size data_parallel_replicate_degree",
    "fsdp.param_dtype": "mixed_precision mixed_precision_param param_dtype",
    "fsdp.reduce_dtype": "reduce_dtype mixed_precision_reduce",
    "fsdp.reshard_after_forward": "reshard_after_forward fsdp_reshard_after_forward",
    "fsdp.cpu_offload": "fsdp_cpu_offload fsdp_offload_params offload_policy cpu_offload enable_cpu_offload",
    "step.documents": "train_batch_size global_batch_size",
    "step.max_tokens_per_device": "max_token_len_per_gpu max_tokens_per_gpu packed_sequence_size",
    "optimizer.name": "optim optim.optimizer",
    "optimizer.lr": "learning_rate lr",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.betas": "betas",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.max_grad_norm": "max_grad_norm clip_grad grad_clip max_norm",
    "schedule.name": "lr_scheduler_type lr_scheduler lr_decay_style warmup_style",
    "schedule.warmup_steps": "warmup_steps lr_warmup_steps lr_warmup_iters",
    "schedule.warmup_ratio": "warmup_ratio lr_warmup_fraction lr_warmup_steps_ratio warmup_steps_ratio",
    "schedule.min_lr_ratio": "min_lr_ratio min_lr_factor lr_min",
    "schedule.decay_ratio": "decay_ratio",
    "schedule.decay": "decay_type lr_wsd_decay_style",
    "train.epochs": "num_train_epochs total_epochs num_epoch num_epochs",
    "train.steps": "max_steps total_training_steps training.steps train_iters",
    "train.seed": "seed",
    "train.deterministic": "full_determinism deterministic deterministic_mode",
    "train.timeout": "ddp_timeout nccl_timeout",
    "checkpoint.every": "save_steps save_freq save_interval checkpoint.interval ckpt_every_steps",
    "checkpoint.keep": "save_total_limit max_ckpt_to_keep keep_latest_k",
    "checkpoint.dtype": "export_dtype",
    "run.dir": "output_dir default_local_dir dump_folder save",
    "track.project": "project project_name wandb_project",
    "track.name": "run_name experiment_name exp_name wandb_run_name",
    "eval.path": "val_files eval_prompt_data validation.data_args.file_name",
    "eval.every": "eval_steps test_freq eval_interval val_every_steps validation.freq",
    "lora.rank": "lora_r lora_rank peft.dim",
    "lora.alpha": "lora_alpha peft.alpha",
    "lora.dropout": "lora_dropout peft.dropout",
    "lora.targets": "lora_target_modules target_modules lora_target peft.target_modules",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.rslora": "use_rslora",
}
MOVES: dict[str, str] = {name: key for key, names in _SAME.items() for name in names.split()}


def _trackers(value: Any) -> list[str] | None:
    """Those of a name or a list of names that weft has."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name in ("tensorboard", "wandb", "trackio", "mlflow")] or None


# Names whose value says the same in other words: -> (key, value in weft, or None where nothing is to be set).
CONVERTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "gradient_checkpointing": ("model.recompute", lambda v: "full" if v else None),
    "enable_gradient_checkpointing": ("model.recompute", lambda v: "full" if v else None),
    "recompute_granularity": ("model.recompute", lambda v: None if v in (None, "none") else "full"),
    "disable_gradient_checkpointing": ("model.recompute", lambda v: None if v else "full"),
    "activation_checkpointing": ("model.recompute", lambda v: "full" if v else None),
    "fsdp_activation_checkpointing": ("model.recompute", lambda v: "full" if v else None),
    "activation_checkpoint.mode": ("model.recompute", lambda v: None if v == "none" else "full"),
    "assistant_only_loss": ("data.train_on", lambda v: "answers" if v else "all"),
    "completion_only_loss": ("data.train_on", lambda v: "answers" if v else "all"),
    "bf16": ("fsdp.param_dtype", lambda v: "bf16" if v else None),
    "fp16": ("fsdp.param_dtype", lambda v: "fp16" if v else None),
    "report_to": ("track.to", _trackers),
    "logger": ("track.to", _trackers),
    "track_with": ("track.to", _trackers),
    "optimizer": ("optimizer.name", lambda v: "adamw" if v == "adam" else v),
    "timeout_minutes": ("train.timeout", lambda v: v * 60),
    "distributed_timeout_minutes": ("train.timeout", lambda v: v * 60),
}
_BETAS = {"adam_beta1": 0, "adam_beta2": 1, "beta1": 0, "beta2": 1}
PER_DEVICE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "grad_acc_steps",
    "accumulate_grad_batches",
)
# Names of columns -> what weft calls the column.
COLUMNS = {
    "messages_key": "messages",
    "input_key": "messages",
    "prompt_key": "instruction",
    "query_key": "input",
    "response_key": "output",
    "system_key": "system",
    "tools_key": "tools",
    "dataset_text_field": "text",
}
# What else says which column it is; _take_columns reads it.
SWITCHES = ("prompt_dict_keys", "response_dict_keys", "multiturn.enable")
# Where a trainer says "no limit", or "never".
_UNSET = {
    "lora.rank",
    "train.steps",
    "train.epochs",
    "schedule.warmup_steps",
    "mesh.dp_shard",
    "data.max_length",
    "eval.every",
}


# How many GPUs of a machine ranks ran on, and by how many of them a document is shared.
_GPUS = ("n_gpus_per_node", "num_gpus_per_node", "actor_num_gpus_per_node", "nproc_per_node")
_SHARED_BY = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "ulysses_sequence_parallel_size",
    "ulysses_size",
)
_OC_ENV = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")


@dataclass
class Draft:
    """taken: key -> (value, where it comes from, their name). left: their name -> what to do about it. unfit: keys for
    which a value was given that weft cannot take, so that no default stands in for it."""

    taken: dict[str, tuple[Any, str, str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)

    def value(self, key: str, default: Any = None) -> Any:
        """What has been taken for a key."""
        return self.taken[key][0] if key in self.taken else default

    def take(self, key: str, value: Any, name: str, origin: str = "") -> None:
        """Set a key, unless the schema does not have it or its value does not fit. name: theirs; origin: in words."""
        spec = schema_keys(SftConfig).get(key)
        fitting = None if spec is None else _fitting(spec, value)
        if fitting is None:
            kind = f"{show(value)} is no value of {key}, which is {describe(spec.type)}." if spec else ""
            self.left[name] = kind or advice_for(name) or f"weft has no {key}."
            self.unfit.add(key)
        else:
            self.taken[key] = (fitting, origin or entry_of(name) or name, name)

    def drop(self, key: str, because: str) -> None:
        """Take a key back."""
        _, _, name = self.taken.pop(key)
        if name != key:
            self.left[name] = because


def migrate(files: Sequence[str], ranks: int | None = None) -> str:
    """The draft, as YAML. ranks: data ranks of the old run, by which a per-device batch is multiplied; None: as many
    as the files say."""
    found = {name: _filled(value) for path in files for name, value in _leaves(_read(path))}
    draft = _draft(found, ranks or _ranks(found))
    _add_defaults(draft, likely_trainer(found), found)
    _drop_idle(draft)
    return _HEAD.format(files=", ".join(files)) + _render(draft)


def _ranks(found: Mapping[str, Any]) -> int | None:
    """Data ranks of the old run, where its config says so."""
    by_entry = {entry_of(name): value for name, value in found.items() if isinstance(value, int)}
    if "num_processes" in by_entry:
        return int(by_entry["num_processes"])
    nodes = by_entry.get("nnodes") or by_entry.get("actor_num_nodes") or 1
    each = next((by_entry[name] for name in _GPUS if by_entry.get(name)), None)
    return None if each is None else max(1, int(nodes) * int(each) // _shared_by(found))


def _shared_by(found: Mapping[str, Any]) -> int:
    """How many GPUs of the old run worked on the same documents."""
    sizes = (value for name, value in found.items() if entry_of(name) in _SHARED_BY)
    return math.prod(value for value in sizes if isinstance(value, int) and value > 0)


def _draft(found: Mapping[str, Any], ranks: int | None) -> Draft:
    draft = Draft()
    batch: dict[str, Any] = {}
    columns: dict[str, str] = {}
    for name, value in found.items():
        entry = entry_of(name) or ""
        if name in schema_keys(SftConfig):
            draft.take(name, value, name)
        elif value is None:
            continue
        elif entry in PER_DEVICE:
            batch[name.rpartition(".")[2]] = value
        elif entry in _BETAS:
            default = 0.95 if entry.startswith("beta") else 0.999
            before = draft.value("optimizer.betas", [0.9, default])
            both = [value if place == _BETAS[entry] else beta for place, beta in enumerate(before)]
            draft.take("optimizer.betas", both, name)
        elif entry in COLUMNS and isinstance(value, str):
            columns[name] = value
        elif entry in SWITCHES:
            continue
        elif entry in MOVES:
            _take_same(draft, MOVES[entry], value, name)
        elif entry in CONVERTED:
            key, convert = CONVERTED[entry]
            if convert(value) is not None:
                draft.take(key, convert(value), name)
        else:
            draft.left[name] = advice_for(name) or "weft does not know it."
    if batch and "step.documents" not in draft.taken:
        documents = math.prod(int(value) for value in batch.values()) * (ranks or 1)
        factors = " x ".join(str(value) for value in batch.values())
        gpus = "the number of GPUs: multiply by it, or say --nproc"
        if ranks:
            gpus = f"{ranks} data rank(s), each of several GPUs" if _shared_by(found) > 1 else f"{ranks} GPUs"
        draft.take("step.documents", documents, next(iter(batch)), f"{factors} x {gpus}")
    _take_columns(draft, columns, found)
    _settle(draft, found)
    return draft


def _take_columns(draft: Draft, given: Mapping[str, str], found: Mapping[str, Any]) -> None:
    """data.columns, of the columns that weft would not find by their names. given: their key -> the column."""
    columns = {COLUMNS[str(entry_of(name))]: column for name, column in given.items()}
    values = {entry_of(name): value for name, value in found.items()}
    if "messages" in columns and "instruction" in columns:  # verl has both, and a switch
        for unused in ("instruction", "output") if values.get("multiturn.enable") else ("messages",):
            columns.pop(unused, None)
    for ours, inside in (("instruction", "prompt_dict_keys"), ("output", "response_dict_keys")):
        path = values.get(inside)
        if ours in columns and path:  # verl: the names under which the text lies in the column
            columns[ours] = ".".join([columns[ours], *map(str, path if isinstance(path, list) else [path])])
    if "output" not in columns:
        columns.pop("instruction", None)  # the prompts of reinforcement learning
    if any(theirs != ours for ours, theirs in columns.items()):
        draft.take("data.columns", columns, next(iter(given)), ", ".join(str(entry_of(name)) for name in given))


def _take_same(draft: Draft, key: str, value: Any, name: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and value <= 0 and key in _UNSET:
        return  # no limit
    if key in ("data.path", "eval.path") and isinstance(value, list):  # verl and ROLL take lists of files
        several = len(value) > 1
        key = key.replace("path", "sources") if several else key
        value = [{"path": path} for path in value] if several else "".join(map(str, value))
    draft.take(key, max(0, value) if number and key == "checkpoint.every" else value, name)


def _settle(draft: Draft, found: Mapping[str, Any]) -> None:
    """What two keys say together."""
    min_lr = next((name for name in found if entry_of(name) == "min_lr"), None)
    if min_lr is not None and "optimizer.lr" in draft.taken:
        draft.left.pop(min_lr, None)
        ratio = float(f"{float(found[min_lr]) / float(draft.value('optimizer.lr')):.6g}")
        draft.take("schedule.min_lr_ratio", ratio, min_lr, "min_lr / lr")
    if found.get("rollout_batch_size") == draft.value("step.documents"):
        draft.left.pop("rollout_batch_size", None)
    for loser, winner in EXCLUSIVE:
        if winner in draft.taken and loser in draft.taken:
            draft.drop(loser, f"{winner} replaces it.")
    if "schedule.decay_ratio" in draft.taken:
        draft.take("schedule.name", "wsd", "decay_ratio", "constant, then the decay of decay_ratio")
    elif "schedule.decay" in draft.taken:  # decay right after warm-up: the schedule of that name
        shape, _, name = draft.taken.pop("schedule.decay")
        draft.take("schedule.name", shape, name)
    _columns_of_sources(draft)
    longest = draft.value("data.max_length", 0)
    if longest > draft.value("step.max_tokens_per_device", 8192):
        draft.take("step.max_tokens_per_device", longest, "", "a row holds the longest document")


def _columns_of_sources(draft: Draft) -> None:
    """Sources have columns of their own: data.columns goes into each."""
    if "data.sources" not in draft.taken or "data.columns" not in draft.taken:
        return
    columns, _, _ = draft.taken.pop("data.columns")
    if "eval.path" in draft.taken:
        path, origin, name = draft.taken.pop("eval.path")
        draft.taken["eval.sources"] = ([{"path": path}], origin, name)
    for key in ("data.sources", "eval.sources"):
        if key in draft.taken:
            sources, origin, name = draft.taken[key]
            draft.taken[key] = ([{**source, "columns": columns} for source in sources], origin, name)


def _add_defaults(draft: Draft, trainer: Trainer | None, found: Mapping[str, Any]) -> None:
    """What nobody wrote down, because it was the other trainer's default and is not weft's."""
    if trainer is None:
        return
    older = any(entry_of(name) in trainer.older_names for name in found)
    for key, value in (trainer.older if older else trainer.defaults).items():
        replaced = any(key == loser and winner in draft.taken for loser, winner in EXCLUSIVE)
        if key in schema_keys(SftConfig) and key not in draft.taken and key not in draft.unfit and not replaced:
            draft.take(key, value, key, f"{trainer.title.partition(' and ')[0]}'s default")


def _drop_idle(draft: Draft) -> None:
    """Leave out what would be refused for having no effect."""
    tree: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "data": {"path": "d"}}
    for key, (value, _, _) in draft.taken.items():
        section, _, leaf = key.partition(".")
        tree.setdefault(section, {})[leaf] = value
    config = build(node_of(tree, ""), SftConfig)
    for rule in INERT:
        if rule.key in draft.taken and rule.when(config):
            draft.drop(rule.key, f"{rule.key} would have no effect: {rule.because}.")


def _fitting(key: Key, value: Any) -> Any:
    """The value as this key takes it, or None where it cannot."""
    ours = weft_value(key.name, value)
    for candidate in (None if ours is None else read_value(ours, "").value, value, *_numbers(value)):
        try:
            if candidate is not None:
                coerce(Node(candidate, ""), key.type)
                return candidate
        except MismatchError:
            continue
    return None


def _numbers(value: Any) -> Iterator[int | float]:
    """The number that YAML 1.1, an argument parser or quotes would make of a value: 3.0 as 3, "2e-5", 1_000."""
    try:
        number = float(value.replace("_", "") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return
    if isinstance(value, bool) or not math.isfinite(number):
        return
    if number.is_integer():
        yield int(number)
    yield number


def _read(path: str) -> Node:
    """A file of YAML or TOML, or a shell script of which options and overrides are read."""
    return read_script(path) if path.endswith(".sh") else read_config_file(path)


def _filled(value: Any) -> Any:
    """A value with OmegaConf's ${oc.env:NAME,default} put in: the variable as it is set here, or the default."""
    if not isinstance(value, str):
        return value
    return _OC_ENV.sub(lambda match: os.environ.get(match[1]) or match[2] or match[0], value)


def _leaves(node: Node, name: str = "") -> Iterator[tuple[str, Any]]:
    if not node.is_section:
        yield name, node.value
        return
    for key, child in node.value.items():
        yield from _leaves(child, f"{name}.{key}".lstrip("."))


def _render(draft: Draft) -> str:
    lines: list[str] = []
    for required in ("model.path", "data.path"):
        if required not in draft.taken and required.replace("path", "sources") not in draft.taken:
            draft.taken[required] = (None, "set it", "")
    for section in dict.fromkeys(name.partition(".")[0] for name in schema_keys(SftConfig)):
        keys = [name for name in schema_keys(SftConfig) if name.startswith(f"{section}.") and name in draft.taken]
        lines += [f"\n{section}:"] if keys else []
        for name in keys:
            value, origin, _ = draft.taken[name]
            leaf = name.partition(".")[2]
            if isinstance(value, str) and "$" in value:
                origin += ": write it out, weft knows no variables"
            lines.append(f"  {leaf}: {written(value)}" + (f"  # {origin}" if origin != leaf else ""))
    by_advice: dict[str, list[str]] = {}
    for name, advice in draft.left.items():
        by_advice.setdefault(advice, []).append(name)
    lines += ["\n# Not taken over:"] if by_advice else []
    for advice, names in by_advice.items():
        text = f"{', '.join(names)}: {advice}"
        lines += textwrap.wrap(text, 116, initial_indent="#   ", subsequent_indent="#     ")
    return "\n".join(lines) + "\n"
