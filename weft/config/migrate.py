"""`weft migrate`: a config of another trainer as a draft of weft's. Imports no torch.

What has one meaning is taken over; of everything else the draft says what to do, in the words of aliases.py.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weft.config.aliases import advice_for, entry_of
from weft.config.checks import EXCLUSIVE, INERT
from weft.config.draft import Draft, numbers_of
from weft.config.keys import schema_keys
from weft.config.load import build, read_config_file
from weft.config.migrate_data import (
    COLUMNS,
    SOURCES,
    SWITCHES,
    columns_of_sources,
    take_adapted,
    take_columns,
    take_sources,
)
from weft.config.schema import SftConfig
from weft.config.scripts import read_script
from weft.config.trainers import TRAINERS, Trainer
from weft.config.trainers.accelerate import ACCELERATE
from weft.config.trainers.advice import BATCH
from weft.config.trainers.trainer import ITSELF, REINFORCEMENT
from weft.config.unknown import recognised
from weft.config.yaml12 import Node, node_of, show, written
from weft.errors import UserError
from weft.files import regular_file

_HEAD = """\
# A draft, made by `weft migrate` from {files}. Read it through: it holds what has the same meaning in weft.
# {known}
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
    "tensor_parallel_size",
    "sequence_parallel_degree",
    "tensor_parallel_dim",
    "parallelism_config_tp_size",
    "parallelism_config_cp_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "ulysses_sequence_parallel_size",
    "ulysses_size",
)
_ROUTED = r'"(num_experts|num_local_experts|n_routed_experts|router_aux_loss_coef)"'  # keys of config.json
_SIGNS = 4  # names that are shown of those by which a trainer was recognised
_NAMED = re.compile(r"\$\{([\w.]+)\}")
_OC_ENV = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")


def migrate(files: Sequence[str], ranks: int | None = None) -> str:
    """The draft, as YAML. ranks: data ranks of the old run, by which a per-device batch is multiplied; None: as many
    as the files say. UserError for files of a trainer that nobody knows, and of what is no supervised fine-tuning."""
    found = {name: value for path in files for name, value in _leaves(_read(path))}
    found = {name: _filled(value, found) for name, value in found.items()}
    trainer, signs = _trainer_of(found, files)
    draft = _draft(found, trainer, ranks or _ranks(found))
    _add_defaults(draft, trainer, found)
    _add_balancing(draft, trainer, found)
    _take_batch(draft, trainer, found, ranks or _ranks(found))
    _settle(draft, found)
    _drop_idle(draft)
    more = f" and {len(signs) - _SIGNS} more" if len(signs) > _SIGNS else ""
    known = f"Recognised as a config of {trainer.title} by {', '.join(signs[:_SIGNS])}{more}."
    head = _HEAD.format(files=", ".join(files), known="\n# ".join(textwrap.wrap(known, 116)))
    return head + _render(draft)


def _trainer_of(found: Mapping[str, Any], files: Sequence[str]) -> tuple[Trainer, list[str]]:
    """Whose files these are, and by which names; UserError where that is not said, or where they ask for what no draft
    is made of."""
    what = f"{', '.join(files)}: {'it is' if len(files) == 1 else 'they are'}"
    if found and set(found) <= set(schema_keys(SftConfig)):
        raise UserError(f"{what} a config of weft already: look at it with `weft sft {files[0]} --dry-run`.")
    by_signs = recognised(found)
    if by_signs is None:
        known = ", ".join(trainer.title for trainer in TRAINERS)
        raise UserError(
            f"{what} of no trainer that `weft migrate` knows, which are {known}. Write a config for `weft sft` with "
            "the keys of docs/config.md."
        )
    trainer, signs = by_signs
    for name, value in found.items():
        kind = _task(trainer, name, value)
        if kind is not None:
            instead = (
                f"Write a config for `weft rl`, which answers the names of others (docs/rl.md, docs/coming-from/"
                f"{trainer.name}.md)."
                if kind == REINFORCEMENT
                else "Preference tuning is not in this version of weft."
            )
            raise UserError(
                f"{what} of {trainer.title}, for {kind} ({name}: {show(value)}), and `weft migrate` makes drafts of "
                f"supervised fine-tuning alone. {instead}"
            )
    return trainer, signs


def _task(trainer: Trainer, name: str, value: Any) -> str | None:
    """The kind of training that a value asks for, where that is not supervised fine-tuning."""
    values = trainer.tasks.get(entry_of(name, trainer.tasks) or "", {})
    if value is None or value is False:
        return None
    return next((kind for pattern, kind in values.items() if fnmatchcase(str(value).lower(), pattern)), None)


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


def _draft(found: Mapping[str, Any], trainer: Trainer, ranks: int | None) -> Draft:
    """What the names say one by one."""
    draft, columns = Draft(), {}
    moves = {**MOVES, **ACCELERATE.moves, **trainer.moves}
    for name, value in found.items():
        entry = entry_of(name) or ""
        meaning = _meaning(trainer, entry, value)
        if name in schema_keys(SftConfig):
            draft.take(name, value, name)
        elif value is None or entry in SWITCHES or entry in _per_device(trainer):
            continue
        elif meaning is not None:
            _take_meaning(draft, meaning, value, name)
        elif entry in _BETAS:
            _take_beta(draft, entry, value, name)
        elif entry in COLUMNS and isinstance(value, str):
            columns[name] = value
        elif entry in SOURCES and isinstance(value, list):
            take_sources(draft, entry, value)
        elif entry in moves:
            _take_same(draft, moves[entry], value, name)
        elif entry in CONVERTED:
            key, convert = CONVERTED[entry]
            if convert(value) is not None:
                draft.take(key, convert(value), name)
        else:
            draft.left[name] = advice_for(name) or "weft does not know it."
    take_columns(draft, columns, found)
    take_adapted(draft, found)
    _settle_adapters(draft, trainer, found)
    return draft


def _meaning(trainer: Trainer, entry: str, value: Any) -> Mapping[str, Any] | None:
    """What this value says in keys of weft, where a table knows it. accelerate's file may go with any trainer's."""
    tables = (table.means[entry] for table in (trainer, ACCELERATE) if entry in table.means)
    return next((table[word] for table in tables for word in (str(value).lower(), "*") if word in table), None)


def _take_meaning(draft: Draft, meaning: Mapping[str, Any], given: Any, name: str) -> None:
    for key, value in meaning.items():
        if key:
            draft.take(key, given if value == ITSELF else value, name)
        else:
            draft.left[name] = value


def _take_beta(draft: Draft, entry: str, value: Any, name: str) -> None:
    default = 0.95 if entry.startswith("beta") else 0.999
    before = draft.value("optimizer.betas", [0.9, default])
    number = next(numbers_of(value), value)
    both = [number if place == _BETAS[entry] else beta for place, beta in enumerate(before)]
    draft.take("optimizer.betas", both, name)


def _per_device(trainer: Trainer) -> Collection[str]:
    return trainer.per_device or PER_DEVICE


def _take_batch(draft: Draft, trainer: Trainer, found: Mapping[str, Any], ranks: int | None) -> None:
    """step.documents, or step.tokens where rows are filled up, from the batch of one device."""
    given = {name: value for name, value in found.items() if entry_of(name) in _per_device(trainer)}
    own = {name.rpartition(".")[2]: next(numbers_of(value), None) for name, value in given.items() if value is not None}
    factors: dict[str, Any] = {**trainer.per_device, **own}
    if "step.documents" in draft.taken or "step.documents" in draft.unfit or not factors:
        draft.left |= dict.fromkeys(given, BATCH)
        return
    filled = any(found.get(name) is True for name in trainer.packing)
    if filled:
        factors["length"] = draft.value("data.max_length")
    if None in factors.values():
        draft.left |= dict.fromkeys(given, BATCH)
        return
    gpus = "the number of GPUs: multiply by it, or say --nproc"
    if ranks:
        gpus = f"{ranks} data rank(s), each of several GPUs" if _shared_by(found) > 1 else f"{ranks} GPUs"
    origin = f"{' x '.join(str(value) for value in factors.values())} x {gpus}"
    name = next(iter(given), "step.documents")
    draft.take("step.tokens" if filled else "step.documents", math.prod(factors.values()) * (ranks or 1), name, origin)


def _settle_adapters(draft: Draft, trainer: Trainer, found: Mapping[str, Any]) -> None:
    """Without adapters there is nothing to say of them, whatever stands in the file."""
    if _has_adapters(trainer, found):
        return
    for key in [key for key in draft.taken if key.startswith("lora.")]:
        draft.drop(key, f"{trainer.title} trains all weights unless {trainer.lora[0]} says otherwise.")


def _has_adapters(trainer: Trainer, found: Mapping[str, Any]) -> bool:
    """Whether the trainer would make them, or has no switch for it."""
    switch, on = trainer.lora
    given = (value for name, value in found.items() if name.rpartition(".")[2] == switch and value is not None)
    return not switch or str(next(given, "")).lower() in on


def _take_same(draft: Draft, key: str, value: Any, name: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "schedule.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        key = "schedule.warmup_ratio"  # transformers 5
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
    columns_of_sources(draft)
    longest = draft.value("data.max_length") or 0
    if longest > draft.value("step.max_tokens_per_device", 8192):
        draft.take("step.max_tokens_per_device", longest, "", "a row holds the longest document")


def _add_defaults(draft: Draft, trainer: Trainer, found: Mapping[str, Any]) -> None:
    """What nobody wrote down, because it was the other trainer's default and is not weft's."""
    older = any(entry_of(name) in trainer.older_names for name in found)
    for key, value in (trainer.older if older else trainer.defaults).items():
        replaced = any(key == loser and winner in draft.taken for loser, winner in EXCLUSIVE)
        idle = key == "lora.rank" and not _has_adapters(trainer, found)
        if key not in schema_keys(SftConfig) or key in draft.taken or key in draft.unfit or replaced or idle:
            continue
        origin = f"{trainer.title.partition(' and ')[0]}'s default"
        if value is None:
            draft.taken[key] = (None, origin, key)
        else:
            draft.take(key, value, key, origin)


def _add_balancing(draft: Draft, trainer: Trainer, found: Mapping[str, Any]) -> None:
    """The auxiliary loss that a trainer adds for every mixture of experts; a note where the model is not here."""
    if trainer.balancing is None or any(entry_of(name) == "router_aux_loss_coef" for name in found):
        return
    experts = _has_experts(str(draft.value("model.path")))
    if experts:
        origin = f"{trainer.title.partition(' and ')[0]}'s default, of a mixture of experts"
        draft.take("model.router_aux_loss", "document", "router_aux_loss_coef", origin)
        draft.take("model.router_aux_loss_coef", trainer.balancing, "router_aux_loss_coef", origin)
    elif experts is None:
        draft.left["router_aux_loss_coef"] = (
            f"if the model is a mixture of experts, its auxiliary loss was added, times {trainer.balancing}: set "
            f"`model.router_aux_loss: document` and `model.router_aux_loss_coef: {trainer.balancing}`."
        )


def _has_experts(path: str) -> bool | None:
    """Whether a model that is here has a router, by its config.json; None where it is not here."""
    try:
        file = regular_file(Path(os.path.expanduser(path)) / "config.json", "a model's config")
        return re.search(_ROUTED, file.read_text("utf-8")) is not None
    except (OSError, ValueError, UserError):
        return None


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


def _read(path: str) -> Node:
    """A file of YAML or TOML, or a shell script of which options and overrides are read."""
    return read_script(path) if path.endswith(".sh") else read_config_file(path)


def _filled(value: Any, found: Mapping[str, Any]) -> Any:
    """A value with OmegaConf's ${oc.env:NAME,default} put in, the variable as it is set here or the default, and with
    ${other.name}, another value of the files."""
    if not isinstance(value, str):
        return value
    value = _OC_ENV.sub(lambda match: os.environ.get(match[1]) or match[2] or match[0], value)
    return _NAMED.sub(lambda match: str(found.get(match[1], match[0])), value)


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
