"""Adapters on disk, in peft's format: adapter_config.json and adapter_model.safetensors.

Names in a file are the names of peft's wrapped model, without the adapter's name. If several parameters of fused
experts have adapters, peft wraps the module once per parameter, the last parameter outermost. Only the depth of
`base_layer` in a name then identifies the parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from weft.config.schema import LoraConfig
from weft.errors import UserError
from weft.files import read_object
from weft.models import hf
from weft.models.facts import find_facts
from weft.models.lora import (
    EMBEDDING,
    LoraPlan,
    Target,
    adaptable,
    find_trained,
    first_values,
    is_adapters,
    matches_end,
    new_adapters,
    untied_for,
)
from weft.models.low_rank import LowRank
from weft.models.train_module import TrainModule
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import ShardSpecs, full_shape, shards_of
from weft.parallel.shards.safetensors_files import TensorFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Checkpoint layout -> names of modules that peft 0.21 mistakes for experts of the transformers 4 layout
# (peft/utils/transformers_weight_conversion.py). If they are listed as target_parameters, peft does not convert them.
_OLD_EXPERTS = {"mixtral": ("gate", "w1", "w2", "w3"), "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj")}
# Fields of peft's LoraConfig without effect on the results of a saved adapter: its origin, its training, its target
# modules (which the names of its tensors determine), and settings of features that are off.
HARMLESS = frozenset((
    "task_type", "auto_mapping", "peft_version", "inference_mode", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout", "megatron_core", "qalora_group_size",
    "runtime_config", "eva_config", "corda_config", "lora_ga_config", "loftq_config",
))  # fmt: skip
# Fields that weft reads. `weft merge` reads revision, if the adapter determines the base.
READ = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "modules_to_save", "target_parameters", "base_model_name_or_path",
    "revision", "init_lora_weights", "ensure_weight_tying", "use_dora",
))  # fmt: skip
# Features of peft that weft does not support: keys of adapter_config.json -> the values that mean "not used".
UNUSED: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None), "lora_bias": (False, None), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "trainable_token_indices": (None,), "layer_replication": (None,),
    "alora_invocation_tokens": (None,), "arrow_config": (None,), "use_bdlora": (None, False),
    "use_qalora": (False, None), "megatron_config": (None,), "velora_config": (None,), "monteclora_config": (None,),
    "kasa_config": (None,),
}  # fmt: skip
_FEATURE = re.compile(r"use_\w+|\w+_config")  # names of the keys of peft's features
# Values of init_lora_weights with which peft does not change the base. With any other value, peft subtracts a part from
# the base (pissa, olora, corda, lora_ga) or rounds it (loftq) when it loads the adapter, or cannot repeat the change.
_BASE_STAYS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "r": lambda value: type(value) is int and value > 0,
    "lora_alpha": lambda value: type(value) in (int, float) and math.isfinite(value),
    "use_rslora": lambda value: value is None or isinstance(value, bool),
    "use_dora": lambda value: value is None or isinstance(value, bool),
    "modules_to_save": _is_names,
    "target_parameters": _is_names,
    "base_model_name_or_path": lambda value: value is None or isinstance(value, str),
}


def plan_lora(model: PreTrainedModel, config: LoraConfig, *, merged: bool = False) -> LoraPlan | None:
    """The adapters of a config, new or at lora.path; None without adapters. merged: whether they will be merged instead
    of trained. Raises UserError if they do not fit the model."""
    if not config.on:
        return None
    if config.path is not None and not merged and read_config(Path(config.path)).get("init_lora_weights") == "mica":
        raise UserError(
            f"lora.path: {Path(config.path) / CONFIG}: init_lora_weights: mica trains only A, and weft trains both "
            f"matrices. weft merge {quote(config.path)} writes a model to continue from."
        )
    lora_plan = new_adapters(model, config) if config.path is None else read_plan(model, Path(config.path))
    plan = replace(lora_plan, dropout=config.dropout)
    wrapped = _as_parameters(plan, model)
    if plan.dropout and wrapped:
        raise UserError(
            f"lora.dropout cannot be combined with an adapter of {wrapped[0].weight} ({len(wrapped)} such parameters), "
            "because peft could not load it. Set lora.dropout=0, or remove these from lora.targets."
        )
    return plan


def _as_parameters(plan: LoraPlan, model: PreTrainedModel) -> list[Target]:
    """The targets that adapter_config.json must list as target_parameters: fused experts, and modules with names that
    peft mistakes for experts."""
    mistaken = _OLD_EXPERTS.get(hf.checkpoint_layout(model) or "", ())
    return [t for t in plan.targets if t.kind == "experts" or t.module.rpartition(".")[2] in mistaken]


# ---------------------------------------------------------------- names


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Parameter name in the adapted model -> name in an adapter file. names: all trained parameters, in model order."""
    trained = list(names)
    wrapped: dict[str, list[str]] = {}  # module -> adapters of its parameters, in the order in which peft wraps them
    for name in filter(is_adapters, trained):
        module, adapter, _ = name.rsplit(".", 2)
        if adapter not in wrapped.setdefault(module, []):
            wrapped[module].append(adapter)
    stored = {}
    for name in trained:
        stored[name] = PREFIX + name
        if is_adapters(name):
            module, adapter, matrix = name.rsplit(".", 2)
            adapters = wrapped[module]
            owner = PREFIX + module + ".base_layer" * (len(adapters) - 1 - adapters.index(adapter))
            is_embedding = adapter == EMBEDDING
            stored[name] = f"{owner}.lora_embedding_{matrix}" if is_embedding else f"{owner}.lora_{matrix}.weight"
            if matrix == "magnitude":
                stored[name] = f"{owner}.lora_magnitude_vector"
    return stored


def names_of(plan: LoraPlan, module: nn.Module) -> dict[str, str]:
    """file_names() of a model with its adapters attached."""
    return file_names(name for name, _ in module.named_parameters() if plan.trains(name))


# ---------------------------------------------------------------- the config


def to_json(plan: LoraPlan, base: str, module: TrainModule) -> dict[str, Any]:
    """The content of adapter_config.json. base: model.path. module: the model with its adapters."""
    modules = [name for name, child in module.named_modules() if not isinstance(child, LowRank)]
    parameters = [name for name, _ in module.named_parameters() if not is_adapters(name)]
    wrapped = _as_parameters(plan, module.hf_model)
    adapted = [target.module for target in plan.targets if target not in wrapped]
    fused = shortest_names([target.name for target in wrapped if target.kind == "experts"], parameters)
    modules_as_parameters = [target.weight for target in wrapped if target.kind != "experts"]
    return {
        "peft_type": "LORA",
        "task_type": hf.peft_task(module.hf_model.config),
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "r": plan.rank,
        "lora_alpha": int(plan.alpha) if plan.alpha == int(plan.alpha) else plan.alpha,
        "lora_dropout": plan.dropout,
        "use_rslora": plan.rslora,
        "use_dora": plan.dora,
        "bias": "none",
        "fan_in_fan_out": any(target.kind == "linear" and target.transposed for target in plan.targets),
        "target_modules": shortest_names(adapted, modules),
        "target_parameters": fused + modules_as_parameters or None,
        "modules_to_save": list(plan.trained) or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def shortest_names(chosen: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """The last parts of the chosen names, if these match no other name in `all_names`; else the full names."""
    leaves = sorted({name.rpartition(".")[2] for name in chosen})
    matched = {name for name in all_names if name.rpartition(".")[2] in leaves}
    return leaves if matched == set(chosen) else sorted(chosen)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json. Raises UserError if it is missing or describes adapters that weft does not
    support."""
    config = read_object(folder / CONFIG, "the config of an adapter")
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder} is an adapter of type {config.get('peft_type')}; weft supports only LORA.")
    used = [f"{key}: {config[key]}" for key, unused in UNUSED.items() if key in config and config[key] not in unused]
    supported = HARMLESS | READ | UNUSED.keys()
    used += [
        f"{key}: {config[key]!r:.80}"
        for key in sorted(config.keys() - supported)
        if config[key] and _FEATURE.fullmatch(key)
    ]
    if used:
        raise UserError(
            f"{folder / CONFIG} uses features that weft does not support: {', '.join(used)}. {_by_peft(folder)}"
        )
    init = config.get("init_lora_weights", True)
    if (init.lower() if isinstance(init, str) else init) not in _BASE_STAYS:
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights: {init!r:.80} means that peft changed the base before it trained "
            "the adapter, but weft would apply the adapter to the unchanged base. If the untrained adapter was also "
            "saved, convert it with peft's save_pretrained(NEW, "
            "path_initial_model_for_weight_conversion=UNTRAINED). For pissa and olora, peft repeats the change: "
            f"{_by_peft(folder)}"
        )
    if config.get("lora_alpha") == 0:
        raise UserError(
            f"{folder / CONFIG}: lora_alpha: 0 disables the adapter; verl's merger writes 0 whatever value was "
            "trained. Write the alpha that it was trained with."
        )
    wrong = [key for key, is_right in _TYPES.items() if not is_right(config.get(key))]
    if wrong:
        raise UserError(f"{folder / CONFIG}: {wrong[0]} cannot be {config.get(wrong[0])!r}. Fetch or write it again.")
    return config


def _by_peft(folder: Path) -> str:
    """Advice to merge the adapter with peft, the end of a message."""
    return (
        "Merge it with peft, and continue from that model: "
        "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), "
        f"{str(folder)!r}).merge_and_unload().save_pretrained(NEW_FOLDER), and copy the tokenizer's files there."
    )


def read_plan(model: PreTrainedModel, folder: Path) -> LoraPlan:
    """The adapters in a folder, determined from the names of its tensors. Raises UserError if they do not fit the
    model."""
    config = read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} holds no {WEIGHTS}; an adapter in a pickle (*.bin) must be saved again by peft.")
    with TensorFile.open(folder / WEIGHTS) as file:
        shapes = {name: entry.shape for name, entry in file.entries.items() if not name.endswith(".base_layer.weight")}
    # peft's rule: all modules whose names end with these characters, so `norm` also matches input_layernorm. An end
    # that matches nothing is passed on, so that find_trained reports it.
    modules = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    ends = config.get("modules_to_save") or ()
    trained = find_trained(model, [name for end in ends for name in ([m for m in modules if m.endswith(end)] or [end])])
    if hf.classifies(model.config) and find_facts(model).head not in trained:
        raise UserError(
            f"{folder / CONFIG}: the adapter has no head of scores (modules_to_save), so that it would stay untrained: "
            f"weft merge {quote(str(folder))} writes a model to begin from, with lora.rank for a new adapter."
        )
    targets = _targets_in(adaptable(model), shapes, config.get("target_parameters") or ())
    plan = LoraPlan(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        dropout=0.0,
        targets=targets,
        trained=trained,
        path=folder,
        dora=bool(config.get("use_dora")),
    )
    without_dora = [t.name for t in targets if t.kind != "linear" or t.module == find_facts(model).head]
    if plan.dora and without_dora:
        raise UserError(
            f"{folder / CONFIG}: use_dora: true with an adapter of {without_dora[0]}: weft supports DoRA only for "
            f"linear layers of the decoder. {_by_peft(folder)}"
        )
    tied = [name for name in untied_for(model, plan, merged=True) if config.get("ensure_weight_tying")]
    if tied:
        raise UserError(
            f"{folder / CONFIG}: ensure_weight_tying: true ties {tied[0]} to a weight that the adapter changes, but "
            f"weft would untie them. {_by_peft(folder)}"
        )
    _check_shapes(plan, model, shapes, folder)
    return plan


def _targets_in(
    candidates: Mapping[str, Target], shapes: Mapping[str, Any], parameters: Sequence[str]
) -> tuple[Target, ...]:
    targets = []
    for target in candidates.values():
        if target.kind == "experts":
            if any(matches_end(target.name, end) for end in parameters):
                targets.append(target)
        elif any(name in shapes for name in file_names(target.names).values()):
            targets.append(target)
    return tuple(targets)


def _check_shapes(plan: LoraPlan, model: PreTrainedModel, shapes: Mapping[str, Any], folder: Path) -> None:
    runtime_shapes = {name: shape for target in plan.targets for name, shape in plan.tensors(target).items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    runtime_shapes |= {name: tuple(p.shape) for name, p in parameters.items() if plan.trains(name)}
    expected = {stored: runtime_shapes[name] for name, stored in file_names(runtime_shapes).items()}
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    base_weights = [name for name in unknown if name.removeprefix(PREFIX) in parameters]
    if base_weights and not missing:
        raise UserError(
            f"{folder / WEIGHTS} contains {base_weights[0]}, a complete weight of the base model "
            f"({len(base_weights)} such), but modules_to_save in adapter_config.json does not list it. peft saves "
            f"embeddings this way after a change of the vocabulary. {_by_peft(folder)}"
        )
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"contains {unknown[0]}, which this model does not have"
        raise UserError(
            f"{folder / WEIGHTS} {problem} ({len(missing) + len(unknown)} tensors in all): is it of this model?"
        )
    wrong = [name for name, shape in expected.items() if tuple(shapes[name]) != shape]
    if wrong:
        raise UserError(
            f"{folder / WEIGHTS}: {wrong[0]} is {list(shapes[wrong[0]])} and should be {list(expected[wrong[0]])} "
            f"({len(wrong)} tensors in all differ): is it of this model?"
        )


# ---------------------------------------------------------------- filling a model


@torch.no_grad()
def fill_adapters(module: nn.Module, plan: LoraPlan, specs: ShardSpecs, seed: int) -> None:
    """Fill this rank's shards of the adapters from plan.path, or with random values from the seed. specs: how tp shards
    them.

    Without plan.path, fully trained modules keep the base's values.
    """
    parameters = dict(module.named_parameters())
    if plan.path is None:
        for name, parameter in parameters.items():
            if is_adapters(name):
                gaussian = plan.rank if plan.init == "gaussian" else None
                values = first_values(name, full_shape(name, parameter, specs), seed, gaussian)
                for shard in shards_of(parameter, specs.get(name)):
                    shard.values.copy_(values[shard.box.within(Box.from_shape(tuple(values.shape)))])
        return
    with TensorFile.open(plan.path / WEIGHTS) as file:
        for name, stored in names_of(plan, module).items():
            for shard in shards_of(parameters[name], specs.get(name)):
                shard.values.copy_(file.read(stored, shard.box))
