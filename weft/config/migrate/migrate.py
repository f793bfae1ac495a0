"""`weft migrate`: converts another trainer's config to a draft for weft.

Unambiguous settings are converted. For all others the draft contains the advice of names.py.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, get_args

from weft.config.commands import SCHEMAS
from weft.config.keys import schema_keys
from weft.config.load import build, fill_presets, read_config_file
from weft.config.migrate.algorithm import Algorithm
from weft.config.migrate.columns import columns_of_sources, take_adapted, take_columns, take_datasets, take_sources
from weft.config.migrate.draft import Draft, numbers_of
from weft.config.migrate.names import entry_of, recognised, task_of
from weft.config.migrate.nemo_rl import NemoRl, settings_in_use, settle_schedule
from weft.config.migrate.openrlhf import OpenRlhf
from weft.config.migrate.preferences import drop_refused, method_of, settle_preferences
from weft.config.migrate.prime_rl import PrimeRl
from weft.config.migrate.programs import read_program
from weft.config.migrate.ranks import gpus_of, settle_mesh, shared_by
from weft.config.migrate.roll import Roll
from weft.config.migrate.rollouts import settle_roles, take_rewards, take_rl_columns
from weft.config.migrate.scripts import MODULE, PROGRAM, read_script
from weft.config.migrate.slime import Slime
from weft.config.migrate.trainer import ITSELF, TABLES, Trainer
from weft.config.migrate.trl import Trl
from weft.config.migrate.verl import Verl
from weft.config.migrate.vision import add_vision, config_has
from weft.config.presets import ADAPTER_DEFAULTS
from weft.config.schema import SftConfig
from weft.config.validate import rules_of
from weft.config.yaml12 import Node, leaves_of, node_of, read_value, written
from weft.errors import UserError

_HEAD = """\
# A draft, made by `weft migrate` from {files}. Read it: it contains the settings that have the same meaning in weft.
# {known}
# Then check it with `weft {command} THIS --dry-run`. docs/reference/config.md lists all keys.
"""
_RATE = (
    "schedule: in update k weft uses the schedule's rate at k, and the trainer uses the rate at k - 1, because its "
    "scheduler steps after the update. Its warm-up and decay are one update late."
)
_ROUTED = ("num_experts", "num_local_experts", "n_routed_experts", "router_aux_loss_coef")  # keys of config.json
_REQUIRED = {"rl": ("rl.reward",), "distill": ("distill.teacher",)}  # in addition to model and data
# trainer -> the class that reads its algorithms
_ALGORITHMS: dict[str, type[Algorithm]] = {
    "miles": Slime,
    "nemo_rl": NemoRl,
    "openrlhf": OpenRlhf,
    "prime_rl": PrimeRl,
    "roll": Roll,
    "trl": Trl,
    "verl": Verl,
}
# trainer -> (settings as read -> (settings that have an effect, name -> advice about the other settings))
_IN_USE: dict[str, Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, str]]]] = {"nemo_rl": settings_in_use}
# trainer -> the function that writes keys that depend on several names, in a draft without an algorithm
_SETTLE: dict[str, Callable[[Draft, Mapping[str, Any]], None]] = {"nemo_rl": settle_schedule}
_CONFIG_FILES = (".yaml", ".yml", ".toml")
_SIGNS = 4  # maximum number of recognised names that the draft shows
_KEY = re.compile(r"`([a-z_]+\.[a-z_]+)`")  # a key of weft in a sentence
_LONGEST_TIMEOUT = 6 * 3600  # seconds
_LR_END = 1e-7  # the default lowest rate of transformers' polynomial schedule
_NAMED = re.compile(r"\$\{([\w.]+)\}")
_PRODUCT = re.compile(r"\$\{mul:\s*(\d+),\s*(\d+)\}")  # of NeMo-RL
_DEEPEST = 20  # maximum length of a chain of parent files
_OC_ENV = re.compile(r"\$\{oc\.env:(\w+)(?:,([^{}]*))?\}")


def migrate(files: Sequence[str], ranks: int | None = None) -> str:
    """The draft without the quantities; see migrate_and_compare."""
    return migrate_and_compare(files, ranks)[0]


def migrate_and_compare(files: Sequence[str], ranks: int | None = None) -> tuple[str, list[str]]:
    """(The draft, as YAML; the names of quantities that it computes differently). ranks: number of GPUs of the old run.
    A batch per device is multiplied by the number of GPUs that had different documents. None: the files determine the
    number. Raises UserError for files of an unknown trainer, of preference tuning, or of reinforcement learning with a
    trainer whose table has no `rl_draft`."""
    nodes = [_read(path) for path in files]
    started = (_started_with(node, path) for node, path in zip(nodes, files, strict=True))
    parents = [parent for parent in started if parent is not None]
    files = [*parents, *files]
    settings = {name: value for node in [*map(_read, parents), *nodes] for name, value in _opened(node)}
    if parents:
        settings.pop("config", None)
    settings = {name: _filled(value, settings) for name, value in settings.items()}
    module = str(settings.pop(MODULE, ""))
    trainer, signs, schema = _trainer_of(settings, files, module)
    former = trainer.table.former
    settings = {former.get(name.lower(), name): value for name, value in settings.items()}
    settings = dict(_without_no(name, value) for name, value in settings.items())
    unused: dict[str, str] = {}
    if trainer.name in _IN_USE:
        settings, unused = _IN_USE[trainer.name](settings)
    draft = Draft(trainer, schema, notes=unused)
    algorithm = None if draft.rl is None else _ALGORITHMS[trainer.name].class_for(settings)
    _take_names(draft, settings, algorithm)
    if str(settings.get("config")).endswith(_CONFIG_FILES):
        draft.notes["config"] = TABLES.sentences.sft["CONFIG_FILE"]
    _add_defaults(draft, settings)
    if trainer.name in _SETTLE and algorithm is None:
        _SETTLE[trainer.name](draft, settings)
    if draft.command == "dpo":
        settle_preferences(draft, settings)
    elif draft.command == "reward":
        drop_refused(draft)
    _add_balancing(draft, settings)
    add_vision(draft, settings)
    gpus = ranks or gpus_of(settings, trainer)
    data_ranks = gpus and max(1, gpus // shared_by(settings))
    if algorithm is None:
        _take_batch(draft, settings, data_ranks)
    else:
        algorithm(draft, settings).settle(gpus, data_ranks)
    settle_mesh(draft, settings, gpus)
    if draft.rl is not None:
        settle_roles(draft, settings, gpus)
    _settle(draft, settings)
    _drop_idle(draft)
    # If the draft has no other key of the section that marks its command, write the loss of the command.
    key = {"dpo": "preference.loss", "reward": "reward.loss"}.get(draft.command)
    if key is not None and not any(name.partition(".")[0] == key.partition(".")[0] for name in draft.values):
        draft.take(key, draft.keys[key].default, key, f"the loss of `weft {draft.command}`")
    _mark_defaults(draft)
    if draft.differs:
        nearest = draft.value("rl.algorithm")
        confirm = f"CONFIRM: write {nearest}, the nearest algorithm, after you have read the lines DIFFERS above"
        draft.values["rl.algorithm"] = (None, confirm, "rl.algorithm")
    omitted = f" and {len(signs) - _SIGNS} more" if len(signs) > _SIGNS else ""
    recognition = f"Recognised as a config of {trainer.title} by {', '.join(signs[:_SIGNS])}{omitted}."
    head = _HEAD.format(
        files=", ".join(files),
        known="\n# ".join(textwrap.wrap(recognition, 116)),
        command=draft.command,
    )
    text = head + _differences(draft) + _render(draft) + _comparison(draft)
    text += _without_line(draft, settings, text)
    return text, [quantity.name for quantity in draft.differs]


def _without_no(name: str, value: Any) -> tuple[str, Any]:
    """`--no_NAME`, an option of transformers' argument parser, as NAME: False."""
    plain = name.removeprefix("no_")
    return (plain, False) if value is True and plain != name and entry_of(name) is None else (name, value)


def _trainer_of(settings: Mapping[str, Any], files: Sequence[str], module: str = "") -> tuple[Trainer, list[str], type]:
    """(Trainer of these files, the names by which it was recognised, schema of weft's command for them). module: that a
    script executes. Raises UserError for files of an unknown trainer, and for kinds of training without drafts."""
    subject = f"{', '.join(files)}: {'it is' if len(files) == 1 else 'they are'}"
    if settings and set(settings) <= set(schema_keys(SftConfig)):
        raise UserError(f"{subject} already a config of weft: check it with `weft sft {files[0]} --dry-run`.")
    packages = {trainer.table.package: trainer for trainer in TABLES.trainers if trainer.table.package}
    package = module.partition(".")[0]
    by_signs = (packages[package], [module]) if package in packages else recognised(settings)
    if by_signs is None:
        titles = ", ".join(trainer.title for trainer in TABLES.trainers)
        raise UserError(
            f"{subject} not a config of a trainer that `weft migrate` knows: {titles}. Write a config for `weft sft` "
            "with the keys of docs/reference/config.md."
        )
    trainer, signs = by_signs
    for name, value in settings.items():
        kind = trainer.foreign_kind(entry_of(name, trainer.foreign) or "", value)
        if kind is not None:
            raise UserError(f"{subject} a config of {trainer.title} for {kind} ({name}), which weft does not train.")
    task = task_of(trainer, settings)
    if task is not None and not task.is_drafted:
        raise UserError(f"{subject} {task}")
    return trainer, signs, SftConfig if task is None else SCHEMAS[task.command]


def _take_names(draft: Draft, settings: Mapping[str, Any], algorithm: type[Algorithm] | None) -> None:
    """Convert the names one by one, except names that `algorithm` reads; then convert columns and adapters."""
    columns: dict[str, str] = {}
    settled = {*TABLES.shared.column_switches, *_per_device(draft.trainer)}  # converted together with other names
    for name, value in settings.items():
        entry = draft.entry(name)
        if name == PROGRAM:
            draft.take_meaning(draft.meaning(name, value) or {}, value, name)
            continue
        if name in draft.keys:
            draft.take(name, value, name)
        elif value is None:
            _take_null(draft, name)
        elif entry in settled or (algorithm is not None and algorithm.handles(name)):
            continue
        elif (meaning := draft.meaning(entry, value)) is not None:
            draft.take_meaning(meaning, value, name)
        elif isinstance(value, str) and entry in {**TABLES.columns, **(draft.job.columns if draft.job else {})}:
            columns[name] = value
        elif entry in draft.trainer.table.datasets:
            take_datasets(draft, draft.trainer.table.datasets[entry], value, name)
        elif entry in TABLES.shared.sources.lists and isinstance(value, list):
            take_sources(draft, entry, value)
        elif not _take_value(draft, entry, value, name):
            draft.notes[name] = draft.advice(name) or "weft does not know this name."
    if draft.job is not None:
        entries = {draft.entry(name) for name in settings}
        draft.notes |= {name: text for name, text in draft.job.unsaid.items() if name not in entries}
    if draft.rl is None:
        take_columns(draft, columns, settings)
    else:
        take_rl_columns(draft, columns)
        take_rewards(draft, draft.rl, settings)
    take_adapted(draft, settings)
    _take_push(draft, settings)
    _settle_adapters(draft, settings)


def _take_null(draft: Draft, name: str) -> None:
    """Convert null, if weft's key accepts it. The trainer's default then does not apply."""
    key = draft.key_of(draft.entry(name))
    pairs = (exclusive_key for pair in rules_of(draft.schema).exclusive for exclusive_key in pair)
    if key is None or key in pairs or type(None) not in get_args(draft.keys[key].type):
        return
    draft.unfit |= {key, "data.long_documents"} if key == "data.max_length" else {key}
    if draft.keys[key].default is not None:
        draft.values[key] = (None, draft.entry(name), name)


def _take_value(draft: Draft, entry: str, value: Any, name: str) -> bool:
    """Convert a value, unchanged or in other units. Returns False if no key of weft corresponds to the entry."""
    if entry in TABLES.shared.betas:
        _take_beta(draft, TABLES.shared.betas[entry], value, name)
    elif key := draft.key_of(entry):
        _take_same(draft, key, value, name)
    elif key := TABLES.choices.get(entry):
        choices = get_args(get_args(draft.keys[key].type)[0])
        chosen = [choice for choice in (value if isinstance(value, list) else [value]) if choice in choices]
        if chosen:
            draft.take(key, chosen, name)
    elif key := TABLES.minutes.get(entry):
        minutes = value if isinstance(value, int | float) else next(numbers_of(value), None)
        draft.take(key, value if minutes is None else minutes * 60, name)
    elif draft.job is not None and entry in draft.job.complements:
        share = next(numbers_of(value), None)
        remainder = value if share is None else float(f"{1 - share:.6g}")
        draft.take(draft.job.complements[entry], remainder, name, f"1 - {entry}")
    elif entry in ("max_samples", "train_max_samples"):
        _take_part(draft, value, name)
    else:
        return False
    return True


def _take_beta(draft: Draft, pair: Sequence[Any], value: Any, name: str) -> None:
    """Set one of the two betas. The other keeps its converted value, or has its value in `pair`. pair: of shared.yaml,
    with ITSELF in the position of the converted beta."""
    before = draft.value("optimizer.betas", pair)
    number = next(numbers_of(value), value)
    betas = [number if entry == ITSELF else beta for entry, beta in zip(pair, before, strict=True)]
    draft.take("optimizer.betas", betas, name)


def _per_device(trainer: Trainer) -> Collection[str]:
    return trainer.table.per_device or TABLES.shared.per_device


def _take_batch(draft: Draft, settings: Mapping[str, Any], ranks: int | None) -> None:
    """Set step.documents (or step.tokens, if the trainer packs rows) from the batch per device."""
    advice, trainer = TABLES.sentences.sft["BATCH"], draft.trainer
    batch_settings = {name: value for name, value in settings.items() if entry_of(name) in _per_device(trainer)}
    batch_factors = {
        name.rpartition(".")[2]: next(numbers_of(value), None)
        for name, value in batch_settings.items()
        if value is not None
    }
    factors: dict[str, Any] = {**trainer.table.per_device, **batch_factors}
    least = trainer.table.smallest_step
    fills = bool(least) and "gradient_accumulation_steps" not in batch_factors and None not in factors.values()
    if fills:
        factors["gradient_accumulation_steps"] = -(-least // (math.prod(factors.values()) * (ranks or 1)))
    if "step.documents" in draft.values or "step.documents" in draft.unfit or not factors:
        draft.notes |= dict.fromkeys(batch_settings, advice)
        return
    filled = any(settings.get(name) is True for name in trainer.table.packing)
    if filled:
        factors["length"] = draft.value("data.max_length")
    if None in factors.values():
        draft.notes |= dict.fromkeys(batch_settings, advice)
        return
    gpus = "the number of GPUs: multiply by that number, or set --nproc"
    if ranks:
        gpus = f"{ranks} data rank(s), each of several GPUs" if shared_by(settings) > 1 else f"{ranks} GPUs"
    origin = f"{' x '.join(str(value) for value in factors.values())} x {gpus}"
    if fills:
        origin = f"{trainer.short} accumulates up to {least} documents or more"
    name = next(iter(batch_settings), "step.documents")
    draft.take("step.tokens" if filled else "step.documents", math.prod(factors.values()) * (ranks or 1), name, origin)


def _settle_adapters(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Remove the keys of lora if the old config has no adapters."""
    trainer = draft.trainer
    if _has_adapters(trainer, settings):
        return
    for key in [key for key in draft.values if key.startswith("lora.")]:
        draft.drop(key, f"{trainer.title} trains all weights unless {trainer.lora[0]} is set.")


def _has_adapters(trainer: Trainer, settings: Mapping[str, Any]) -> bool:
    """Whether the trainer would create adapters, or has no switch for them."""
    switch, on = trainer.lora
    switches = (value for name, value in settings.items() if name.rpartition(".")[2] == switch and value is not None)
    return not switch or str(next(switches, "")).lower() in on


def _take_same(draft: Draft, key: str, value: Any, name: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "schedule.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        key = "schedule.warmup_ratio"  # transformers 5
    amount = value if number else next(numbers_of(value), None)
    if amount is not None and amount <= 0 and key in TABLES.shared.unlimited:
        draft.unfit.add(key)  # no limit; a default must not replace it
        return
    if amount is not None and amount <= 0 and key == "checkpoint.keep":
        draft.values[key] = (None, f"{draft.entry(name)} {value}: all", name)
        return
    if key == "eval.share" and amount is not None and not 0 < amount < 1:
        if amount:
            draft.notes[name] = TABLES.sentences.sft["HELD_OUT"]
            draft.unfit.add(key)
        return
    if key == "train.timeout" and amount is not None and amount > _LONGEST_TIMEOUT:
        draft.notes[name] = TABLES.sentences.sft["TIMEOUT_LONG"]
        return
    if key in ("data.path", "eval.path") and isinstance(value, list):  # verl and ROLL accept lists of files
        is_several = len(value) > 1
        key = key.replace("path", "sources") if is_several else key
        value = _sources(value) if is_several else "".join(map(str, value))
    never = key in ("checkpoint.every", "eval.every") and amount is not None and amount < 0  # only the last step
    draft.take(key, 0 if never else value, name)


def _sources(paths: Sequence[Any]) -> list[dict[str, str]]:
    """data.sources of several files. Files with equal names, as in gsm8k/train.parquet and math/train.parquet, are
    named after their folders, too."""
    files = [PurePosixPath(str(path)) for path in paths]
    stems = [file.stem for file in files]
    return [
        {"name": f"{file.parent.name}-{file.stem}", "path": str(path)} if stems.count(file.stem) > 1 else {"path": path}
        for file, path in zip(files, paths, strict=True)
    ]


def _take_part(draft: Draft, limit: Any, name: str) -> None:
    """Set data.split to the first rows of its former value. limit: their number; 0 or less: all."""
    number = next(numbers_of(limit), None)
    if number is None or number != int(number):
        draft.notes[name] = draft.advice(name) or ""
    elif number > 0:
        split = str(draft.value("data.split") or "").partition("[")[0]
        draft.take("data.split", f"{split}[:{int(number)}]", name, f"{draft.entry(name)}: the first")


def _take_push(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set checkpoint.push from push_to_hub and hub_model_id. If nothing is pushed, remove the related keys."""
    by_entry = {draft.entry(name): (name, value) for name, value in settings.items()}
    name, repository = by_entry.get("hub_model_id", ("hub_model_id", None))
    is_switch = draft.trainer.name == "axolotl" and repository is not None  # axolotl pushes if the name is set
    switch, on = by_entry.get("push_to_hub", ("push_to_hub", is_switch))
    if on is True and isinstance(repository, str) and "/" in repository:
        draft.notes.pop(switch, None), draft.notes.pop(name, None)
        draft.take("checkpoint.push", repository, name)
        if "checkpoint.push_at" not in draft.values:
            draft.take("checkpoint.push_at", "save", "hub_strategy", "hub_strategy: every_save by default")
    elif on is True:
        draft.notes[switch] = "set `checkpoint.push` to OWNER/NAME; weft does not guess the owner."


def _settle(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set keys that depend on each other."""
    lowest_rates = ("min_lr", "lr_scheduler_kwargs.min_lr", "lr_scheduler_kwargs.lr_end")
    min_lr = next((name for name in settings if entry_of(name) in lowest_rates), None)
    lowest = next(numbers_of(settings.get(min_lr or "")), None)
    peak = next(numbers_of(draft.value("optimizer.lr")), None)
    lowest_key = "schedule.min_lr_ratio"
    of_default = draft.values.get(lowest_key, (None, "", lowest_key))[2] == lowest_key
    if min_lr is not None and lowest is not None and peak:
        draft.notes.pop(min_lr, None)
        draft.take("schedule.min_lr_ratio", float(f"{lowest / peak:.6g}"), min_lr, "min_lr / lr")
    elif draft.value("schedule.name") == "polynomial" and peak and of_default:
        draft.take(
            "schedule.min_lr_ratio", float(f"{_LR_END / peak:.6g}"), lowest_key, f"transformers' lr_end {_LR_END} / lr"
        )
    shape, origin, name = draft.values.get("schedule.name", (None, "", ""))
    warmed = draft.value("schedule.warmup_steps") or draft.value("schedule.warmup_ratio")
    if shape == "inverse_sqrt" and origin == "lr_decay_style" and not warmed:
        draft.drop(
            "schedule.name",
            "without warm-up Megatron's rate falls by the number of samples; weft has no such schedule.",
        )
    if settings.get("rollout_batch_size") == draft.value("step.documents"):
        draft.notes.pop("rollout_batch_size", None)
    for loser, winner in rules_of(draft.schema).exclusive:
        if winner in draft.values and loser in draft.values:
            draft.drop(loser, f"{winner} replaces it.")
    wrapped = draft.value("fsdp.wrap")
    if isinstance(wrapped, list) and {*wrapped} <= {"embedding", "head"}:
        draft.values["fsdp.wrap"] = (
            ["layers", *wrapped],
            *draft.values["fsdp.wrap"][1:],
        )  # the layers are always units
    if (
        "schedule.decay_ratio" in draft.values and draft.value("schedule.name") == "wsd"
    ):  # verl's share of the steps after warm-up
        share, origin, name = draft.values["schedule.decay_ratio"]
        remaining = 1 - (draft.value("schedule.warmup_ratio") or 0)
        draft.take(
            "schedule.decay_ratio",
            float(f"{share * remaining:.6g}"),
            name,
            f"{origin}: {share} of the steps after warm-up",
        )
    elif "schedule.decay_ratio" in draft.values:
        draft.take("schedule.name", "wsd", "decay_ratio", "constant, then the decay of decay_ratio")
    elif "schedule.decay" in draft.values:  # the decay follows the warm-up directly: the schedule of that name
        shape, _, name = draft.values.pop("schedule.decay")
        draft.take("schedule.name", shape, name)
    columns_of_sources(draft)
    if draft.value("rollout.engine") == "sglang":
        draft.notes["(SGLang)"] = TABLES.sentences.rl["SGLANG"]
    if "eval.share" in draft.values and ("eval.path" in draft.values or "eval.sources" in draft.values):
        draft.drop("eval.share", "the data for evaluation replaces it.")
    _settle_quantised(draft)
    if draft.rl is None:
        draft.fit_row(draft.value("data.max_length") or 0, "document")


def _settle_quantised(draft: Draft) -> None:
    """Remove keys that weft refuses with a quantised base."""
    base = draft.value("lora.base", "compute")
    if base == "compute" or draft.value("lora.rank") is None:
        return
    for key, because in (
        ("model.compile", "compiled layers would store the dequantised weights"),
        ("fsdp.cpu_offload", "the scales stay on the accelerator"),
    ):
        if draft.value(key):
            draft.drop(key, f"{key} cannot be combined with lora.base={base}: {because}.")


def _add_defaults(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set the keys whose default in the other trainer differs from weft's, if the old config does not set them."""
    trainer = draft.trainer
    older = trainer.table.older
    former = older is not None and any(entry_of(name) in older.names for name in settings)
    defaults = older.defaults if older is not None and former else trainer.table.defaults
    if draft.job is not None:
        defaults = {**defaults, **draft.job.defaults, **draft.job.by_method.get(method_of(draft, settings)[0], {})}
    if trainer.table.adapter_lr is not None and _has_adapters(trainer, settings):
        defaults = {**defaults, "optimizer.lr": trainer.table.adapter_lr}
    adapters = draft.value("lora.rank") or ("lora.rank" in defaults and _has_adapters(trainer, settings))
    if draft.rl is not None or adapters:
        # A table omits values that are weft's defaults without adapters. With adapters, other defaults apply.
        keys_of_schema = schema_keys(SftConfig if draft.rl is not None else draft.schema)
        changed = ADAPTER_DEFAULTS["sft" if draft.rl is not None else draft.command]
        defaults = {key: keys_of_schema[key].default for key in (*changed, "schedule.name")} | defaults
    for key, value in defaults.items():
        replaced = any(key == loser and winner in draft.values for loser, winner in rules_of(draft.schema).exclusive)
        idle = key == "lora.rank" and not _has_adapters(trainer, settings)
        if key not in draft.keys or key in draft.values or key in draft.unfit or replaced or idle:
            continue
        origin = f"{trainer.short}'s default"
        if value is None:
            draft.values[key] = (None, origin, key)
        else:
            draft.take(key, value, key, origin)


def _add_balancing(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set the auxiliary loss that a trainer adds for every mixture of experts. If the model's config is not on this
    machine, note it."""
    trainer = draft.trainer
    balancing = trainer.table.balancing
    if balancing is None or any(entry_of(name) == "router_aux_loss_coef" for name in settings):
        return
    experts = config_has(str(draft.value("model.path")), _ROUTED)
    if experts:
        origin = f"{trainer.short}'s default for a mixture of experts"
        draft.take("model.router_aux_loss", "document", "router_aux_loss_coef", origin)
        draft.take("model.router_aux_loss_coef", balancing, "router_aux_loss_coef", origin)
    elif experts is None:
        draft.notes["router_aux_loss_coef"] = (
            f"if the model is a mixture of experts, the trainer added its auxiliary loss, times {balancing}: set "
            f"`model.router_aux_loss: document` and `model.router_aux_loss_coef: {balancing}`."
        )


def _drop_idle(draft: Draft) -> None:
    """Remove keys that weft would refuse because they have no effect."""
    tree: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "data": {"path": "d"}} | ({"rl": {}} if draft.rl else {})
    for key, (value, _, _) in draft.values.items():
        section, _, leaf = key.partition(".")
        if value is not None or type(None) in get_args(draft.keys[key].type):
            tree.setdefault(section, {})[leaf] = value
    nodes = node_of(tree, "")
    fill_presets(nodes, draft.schema)
    config: Any = build(nodes, draft.schema)
    for rule in rules_of(draft.schema).inert:
        if rule.key in draft.values and rule.when(config):
            draft.drop(rule.key, f"{rule.key} would have no effect: {rule.because}.")


def _mark_defaults(draft: Draft) -> None:
    """Next to each default of the trainer, name the old config's setting with the same meaning that was not
    converted."""
    for name, advice in draft.notes.items():
        for key in _KEY.findall(advice):
            if key in draft.values and draft.values[key][1] == f"{draft.trainer.short}'s default":
                value, origin, origin_name = draft.values[key]
                draft.values[key] = (value, f"{origin}; but see {name} below", origin_name)


def _opened(node: Node) -> Iterator[tuple[str, Any]]:
    """(Dotted name, value) of a file. A text that is a JSON mapping, a form of arguments, is read as a mapping."""
    for name, value in leaves_of(node):
        if isinstance(value, str) and value[:1] == "{" and value[-1:] == "}":
            inside = read_value(value, node.location)
            if inside.is_section:
                yield from leaves_of(inside, name)
                continue
        yield name, value


def _read(path: str) -> Node:
    """The content of a YAML or TOML file, the options and overrides in a shell script, or the arguments in a Python
    program."""
    if path.endswith(".ipynb"):
        raise UserError(
            f"{path}: `weft migrate` does not read notebooks: copy the cell with the trainer into a file that ends in "
            f".py. docs/how-to/notebook.md shows weft in a notebook."
        )
    if path.endswith(".py"):
        return read_program(path)
    return read_script(path) if path.endswith(".sh") else _with_parents(path)


def _started_with(node: Node, path: str) -> str | None:
    """The config file that a script passes to its program (`--config FILE`), as a path relative to the current folder,
    to the script's, or to a folder above it; None if there is none of that name."""
    named = node.value.get("config") if path.endswith(".sh") and node.is_section else None
    if named is None or not isinstance(named.value, str) or not named.value.endswith(_CONFIG_FILES):
        return None
    parts = PurePosixPath(re.sub(r"\$\{?\w+\}?/?", "", named.value)).parts
    for folder in ("", *map(str, PurePosixPath(os.path.abspath(path)).parents)):
        file = os.path.join(folder, *parts)
        if os.path.isfile(file):
            return file
    return None


def _with_parents(path: str, children: Sequence[str] = ()) -> Node:
    """A config file merged over the files in its `defaults`, relative to it, as in NeMo-RL. children: the files that
    led here. Raises UserError for a file that is missing, or that leads back to itself."""
    node = read_config_file(path)
    named = node.value.get("defaults") if node.is_section else None
    parents = [named.value] if named is not None and isinstance(named.value, str) else []
    if named is not None and isinstance(named.value, list) and all(isinstance(name, str) for name in named.value):
        parents = named.value
    if not parents or not all(name.endswith((".yaml", ".yml")) for name in parents):
        return node  # no defaults, or groups of Hydra
    if path in children or len(children) > _DEEPEST:
        raise UserError(f"{path}: its `defaults` lead back to it.")
    settings: dict[str, Any] = {}
    for name in parents:
        parent = os.path.join(os.path.dirname(path), name)
        if not os.path.isfile(parent):
            raise UserError(f"{path}: its `defaults` name {parent}, which does not exist: copy the file there.")
        settings |= dict(leaves_of(_with_parents(parent, (*children, path))))
    changes = {name: value for name, value in leaves_of(node) if name != "defaults"}
    replaced = {  # names of a section that a value replaces, or the reverse
        name
        for name in settings
        if any(name.startswith(f"{change}.") or change.startswith(f"{name}.") for change in changes)
    }
    settings = {name: value for name, value in settings.items() if name not in replaced} | changes
    return Node({name: node_of(value, path) for name, value in settings.items()}, path)


def _filled(value: Any, settings: Mapping[str, Any]) -> Any:
    """A value with OmegaConf's references replaced: ${oc.env:NAME,default} by the environment variable or the default,
    ${other.name} by another value of the files, and ${mul:2, 3} by the product."""
    if not isinstance(value, str):
        return value
    value = _OC_ENV.sub(lambda match: os.environ.get(match[1]) or match[2] or match[0], value)
    for _ in range(3):  # a value may contain a reference to another
        value = _NAMED.sub(lambda match: str(settings.get(match[1], match[0])), value)
    return _PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), value)


def _differences(draft: Draft) -> str:
    """The quantities that the draft computes differently, for the top of the draft; "" if there are none."""
    if not draft.differs:
        return ""
    title = f"DIFFERS: weft computes these differently from this config of {draft.trainer.short} (theirs -> yours):"
    lines = ["#", f"# {title}"]
    for quantity in draft.differs:
        lines += textwrap.wrap(
            f"{quantity.name}: {quantity.original} -> {quantity.drafted}",
            116,
            initial_indent="#   ",
            subsequent_indent="#     ",
        )
    return "\n".join([*lines, "# weft refuses the draft until you replace null in `rl.algorithm`.", ""])


def _comparison(draft: Draft) -> str:
    """All quantities of the algorithm, theirs and yours, as a table in comments; "" if none were compared."""
    if not draft.quantities:
        return ""
    widths = [max(len(getattr(quantity, part)) for quantity in draft.quantities) for part in ("name", "original")]
    name, width = min(widths[0], 34), min(widths[1], 44)
    lines = ["", f"# Theirs -> yours, for the quantities of the algorithm ({draft.trainer.short} -> weft):"]
    for quantity in draft.quantities:
        mark = " " if quantity.is_equal else "!"
        lines.append(f"# {mark} {quantity.name:<{name}}  {quantity.original:<{width}} -> {quantity.drafted}")
    return "\n".join(lines) + "\n"


def _without_line(draft: Draft, settings: Mapping[str, Any], text: str) -> str:
    """The names of the old config that the draft does not contain yet, as comments, so that it contains every name.
    text: the draft."""
    comments = "\n".join(line.partition("#")[2] for line in text.splitlines())
    words = {*re.findall(r"[\w.()*-]+", comments)}
    words |= {name for key, (_, origin, name) in draft.values.items() if origin == key.partition(".")[2]}
    rest = [name for name in settings if not {name, draft.entry(name)} & words]
    nulls = [name for name in rest if settings[name] is None]
    lines = []
    for reason, names in (
        ("Null, which sets nothing in weft", nulls),
        ("Read for the keys above, or without effect at these values", [name for name in rest if name not in nulls]),
    ):
        if names:
            lines += ["", f"# {reason}:", *textwrap.wrap(", ".join(names), 116, initial_indent="#   ",
                                                        subsequent_indent="#   ", break_on_hyphens=False)]  # fmt: skip
    return "\n".join([*lines, ""]) if lines else ""


def _render(draft: Draft) -> str:
    lines: list[str] = []
    for required in ("model.path", "data.path", *_REQUIRED.get(draft.command, ())):
        if required not in draft.values and required.replace("path", "sources") not in draft.values:
            draft.values[required] = (None, "set it", "")
    for section in dict.fromkeys(name.partition(".")[0] for name in draft.keys):
        keys = [name for name in draft.keys if name.startswith(f"{section}.") and name in draft.values]
        lines += [f"\n{section}:"] if keys else []
        for name in keys:
            value, origin, _ = draft.values[name]
            leaf = name.partition(".")[2]
            if isinstance(value, str) and "$" in value:
                origin += ": write its value, because weft does not expand variables"
            lines.append(f"  {leaf}: {written(value)}" + (f"  # {origin}" if origin != leaf else ""))
    constant = draft.value("schedule.name", draft.keys["schedule.name"].default) == "constant"
    ratio = draft.value("schedule.warmup_ratio", draft.keys["schedule.warmup_ratio"].default)
    is_warmed = bool(draft.value("schedule.warmup_steps", ratio))
    if draft.trainer.table.steps_behind and (is_warmed or not constant):
        lines += ["\n# Changed meaning:", *textwrap.wrap(_RATE, 116, initial_indent="#   ", subsequent_indent="#     ")]
    by_advice: dict[str, list[str]] = {}
    for name, advice in draft.notes.items():
        by_advice.setdefault(advice, []).append(name)
    lines += ["\n# Not converted:"] if by_advice else []
    for advice, names in by_advice.items():
        text = f"{', '.join(names)}: {advice}"
        lines += textwrap.wrap(text, 116, initial_indent="#   ", subsequent_indent="#     ")
    return "\n".join(lines) + "\n"
