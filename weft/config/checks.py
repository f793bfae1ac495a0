"""Checks of a config that need neither torch nor a model: ranges, and combinations that weft refuses."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from weft.config.conditions import BUILT_IN_OPTIMIZERS
from weft.config.keys import schema_keys
from weft.config.migrate.names import weft_value
from weft.config.presets import ADAPTER_DEFAULTS
from weft.config.recompute import policy_of
from weft.config.schema import MOVES_BASE, SftConfig
from weft.config.sources import (
    column_problems,
    key_problems,
    role_problems,
    source_name,
    source_problems,
    split_problems,
)
from weft.config.yaml12 import override, show

# (key, partner): the partner replaces the key. If only the partner is set, the key's default becomes null.
EXCLUSIVE = (
    ("data.path", "data.sources"),
    ("step.documents", "step.tokens"),
    ("train.epochs", "train.steps"),
    ("schedule.warmup_ratio", "schedule.warmup_steps"),
)

Test = Callable[[Any], bool]
_TORCHS = tuple(f"torch.optim.{name}" for name in ("Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop"))


@dataclass(frozen=True, slots=True)
class Inert:
    """A key that has no effect in configs for which `when` holds. weft refuses it there, and omits it from the resolved
    config."""

    key: str
    when: Callable[[Any], bool]
    because: str


def inert_rules(schema: type) -> tuple[Inert, ...]:
    """The rules that the keys of a schema declare (`unread`)."""
    return tuple(Inert(name, *rule) for name, key in schema_keys(schema).items() for rule in key.unread)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for the configs of one command. exclusive: see EXCLUSIVE.
    combinations: config -> (key, message) for each combination that weft refuses. presets: given a function from keys
    to values, pairs of a key and the defaults that it sets for other keys; the pair that takes precedence comes
    first."""

    exclusive: Sequence[tuple[str, str]]
    inert: Sequence[Inert]
    combinations: Callable[[Any], Iterator[tuple[str, str]]]
    presets: Callable[[Callable[[str], Any]], Iterable[tuple[str, Mapping[str, Any]]]] = lambda value: ()

    @property
    def unsettable(self) -> tuple[str, ...]:
        """Keys that are dropped from the config if they are null."""
        return tuple(dict.fromkeys(rule.key for rule in self.inert))


INERT = inert_rules(SftConfig)

IMPORT_PATH = re.compile(r"\w+(\.\w+)*(:|\.)\w+(\.\w+)*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def training_combinations(config: Any) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination that `weft sft` and the commands that share its loop refuse."""
    longest, row, tokens = config.data.max_length, config.step.max_tokens_per_device, config.step.tokens
    cp = config.mesh.cp
    if longest is not None and longest > row * cp:
        ranks = f" on each of {cp} ranks of mesh.cp" if cp > 1 else ""
        yield (
            "data.max_length",
            f"data.max_length is {longest}, but a row has at most step.max_tokens_per_device = {row} tokens{ranks}, "
            f"and weft does not split a document over rows: set step.max_tokens_per_device={-(-longest // cp)}, or "
            f"data.max_length={row * cp}, or mesh.cp={-(-longest // row)}.",
        )
    if tokens is not None and longest is not None and longest > tokens:
        yield (
            "step.tokens",
            f"step.tokens is {tokens}, but a document may have data.max_length = {longest} tokens: "
            f"set step.tokens={longest} or more.",
        )
    objective = config.train.loss
    if objective is not None and not IMPORT_PATH.fullmatch(objective):
        yield (
            "train.loss",
            f"train.loss is {objective}, which is not an import path: write package.module:Name, as in "
            "my_losses:Focal for the class Focal in my_losses.py.",
        )
    yield from common_combinations(
        config, any(config.row_options.get(name) for name in ("preferences", "label", "teachers", "listed"))
    )
    yield from _eval_combinations(config.eval)


def pipeline_combinations(config: Any, axis: str, stages: int) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination that pipeline stages refuse. axis: the key that sets `stages`."""
    fsdp, names = config.fsdp, f"it names modules, and each rank of {axis} has only some of them"
    refused: tuple[tuple[str, bool, str, object], ...] = (
        ("fsdp.wrap", fsdp.wrap != "auto", f"it {names}", "auto"),
        ("fsdp.overrides", bool(fsdp.overrides), f"it {names}", {}),
        ("fsdp.cast_forward_inputs", bool(fsdp.cast_forward_inputs), f"it {names}", []),
    )  # fmt: skip
    for key, is_refused, why, instead in refused:
        if is_refused:
            text = f"{key} cannot be combined with {axis} = {stages}: {why}. "
            yield key, f"{text}Set {override(key, instead)}, or {axis}=1."
    if config.mesh.pp_schedule.endswith("ZeroBubble"):
        yield from _zero_bubble_combinations(config)


def _zero_bubble_combinations(config: Any) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination that zero-bubble schedules refuse: they compute weight gradients
    separately."""
    refused: tuple[tuple[str, bool, str, object], ...] = (
        ("fsdp.reduce", config.fsdp.reduce == "scatter" and config.mesh.dp_replicate != 1,
         "with mesh.dp_replicate it adds sums over dp_shard, which these schedules split by gradients", "every"),
        ("model.compile", config.model.compile is True,
         "a compiled layer computes the gradients of its weights and of hidden states together", False),
    )  # fmt: skip
    for key, is_refused, why, instead in refused:
        if is_refused:
            text = f"{key} cannot be combined with mesh.pp_schedule = {config.mesh.pp_schedule}: {why}. "
            yield key, f"{text}Set {override(key, instead)}, or mesh.pp_schedule=Interleaved1F1B."


def common_combinations(config: Any, free_columns: bool = False) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination that weft refuses in sections that `weft sft` and `weft rl` share.
    free_columns: whether the data may have columns with any name."""
    for name in config.model.imports:
        if not _MODULE.fullmatch(name):
            examples = "my_model for my_model.py in the working directory or PYTHONPATH, package.module in a package"
            yield "model.imports", f"model.imports: {name!r} is not the name of a module: write {examples}."
    cp, ulysses = config.mesh.cp, config.mesh.ulysses
    if ulysses and cp % ulysses:
        yield (
            "mesh.ulysses",
            f"mesh.ulysses is {ulysses}, which does not divide mesh.cp = {cp}: set mesh.ulysses to null or to a "
            f"divisor.",
        )
    yield from _source_problems(config.data, free_columns)
    day = config.data.template_date
    if day is not None and not _is_day(day):
        yield "data.template_date", f"data.template_date is {show_value(day)}; it must be a day as YYYY-MM-DD, or null."
    yield from _optimizer_combinations(config.optimizer)
    if config.lora.on and config.model.init == "random":
        yield (
            "model.init",
            "model.init is random, but with lora no checkpoint contains the random base, so nobody could load the "
            "adapter: set model.init=pretrained, or train all weights (lora.rank=null).",
        )
    yield from _weights_combinations(config)
    yield from _router_combinations(config)
    yield from _recompute_combinations(config)
    yield from _quantised_combinations(config)
    yield from _adapter_combinations(config)
    if config.model.transforms and config.mesh.tp > 1:
        yield (
            "model.transforms",
            f"model.transforms: {', '.join(config.model.transforms)} has a scale for each token and each row of "
            "weights. mesh.tp splits tokens and rows, so its scales would differ from those of one rank. Set "
            "mesh.tp=1, or 'model.transforms=[]'.",
        )
    if config.mesh.pp > 1:
        yield from pipeline_combinations(config, "mesh.pp", config.mesh.pp)
    yield from _schedule_combinations(config.schedule, config.train.steps)
    interval, keep_interval = config.checkpoint.every, config.checkpoint.keep_every
    if keep_interval is not None and interval and keep_interval % interval:
        yield (
            "checkpoint.keep_every",
            f"checkpoint.keep_every is {keep_interval}, but weft saves at multiples of checkpoint.every = "
            f"{interval}: set checkpoint.keep_every={max(1, keep_interval // interval) * interval}.",
        )


def _weights_combinations(config: Any) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination that model.dcp_weights refuses."""
    if config.model.dcp_weights is None:
        return
    if config.model.init == "random":
        yield (
            "model.init",
            "model.init is random, so the weights in model.dcp_weights would not be read: set model.dcp_weights=null, "
            "or model.init=pretrained.",
        )
    if config.lora.on:
        yield (
            "model.dcp_weights",
            "model.dcp_weights cannot be combined with lora: an adapter names its base by model.path, whose weights "
            f"differ. Write a HuggingFace directory, weft export {shlex.quote(config.model.dcp_weights)} "
            f"--model {shlex.quote(config.model.path)}, and set model.path to this directory.",
        )


def _router_combinations(config: Any) -> Iterator[tuple[str, str]]:
    if config.model.router_bias_rate is None:
        return
    if config.lora.on:
        yield (
            "model.router_bias_rate",
            "model.router_bias_rate changes biases of the base, which an adapter's checkpoint does not contain: set "
            "model.router_bias_rate=null, or lora.rank=null.",
        )


def _quantised_combinations(config: Any) -> Iterator[tuple[str, str]]:
    if not config.lora.on or config.lora.base == "compute":
        return
    refused: tuple[tuple[str, bool, str, object], ...] = (
        ("model.compile", config.model.compile is True, "compiled layers would store the dequantised weights", False),
        ("model.transforms", bool(config.model.transforms), "transforms need weights of 16 or 32 bits", []),
        ("model.init", config.model.init == "random", "weft quantises the weights in files", "pretrained"),
        ("fsdp.cpu_offload", config.fsdp.cpu_offload, "the scales stay on the accelerator", False),
    )
    for key, is_refused, why, instead in refused:
        if is_refused:
            yield (
                key,
                f"{key} cannot be combined with lora.base={config.lora.base}: {why}. Set {override(key, instead)}, "
                "or lora.base=compute.",
            )
    if not hasattr(config, "rollout"):
        return
    if config.rollout.engine == "vllm" and "quantization" in config.rollout.engine_kwargs:
        yield (
            "rollout.engine_kwargs",
            f"rollout.engine_kwargs.quantization: vLLM has no format that rounds like lora.base={config.lora.base}, so "
            "its base would differ from the trainer's. Remove the argument: weft then sends the base's values to vLLM "
            "once, in rollout.dtype. Or set lora.base=compute.",
        )
    if config.rollout.transport == "files" and config.rollout.engine != "embedded":
        yield (
            "rollout.transport",
            f"rollout.transport=files cannot be combined with lora.base={config.lora.base}: an export would dequantise "
            "each rank's complete shard of the base at once. Set rollout.transport=auto, or lora.base=compute.",
        )


def _adapter_combinations(config: Any) -> Iterator[tuple[str, str]]:
    lora, optimizer = config.lora, config.optimizer
    if not lora.on:
        return
    if lora.dora and lora.dropout:
        yield (
            "lora.dropout",
            "lora.dropout cannot be combined with lora.dora in this version: peft also applies dropout to the inputs "
            "of the base. Set lora.dropout=0, or lora.dora=false.",
        )
    if hasattr(config, "rollout") and config.rollout.engine == "sglang":
        yield (
            "rollout.engine",
            "rollout.engine=sglang reads exports of the base without adapters, so it would sample from the model "
            "before training. Set rollout.engine=vllm, hf or embedded, or lora.rank=null.",
        )
    if lora.sampling == "merged" and hasattr(config, "rollout") and config.rollout.engine == "vllm":
        yield (
            "lora.sampling",
            "lora.sampling=merged: with rollout.engine=vllm weft sends the base once, and then only the adapters, "
            "which vLLM does not merge. Set lora.sampling=auto, or rollout.engine=hf.",
        )
    if lora.dora and hasattr(config, "rollout") and config.rollout.engine == "vllm":
        yield (
            "lora.dora",
            "lora.dora: rollout.engine=vllm does not support DoRA. Set rollout.engine=hf or embedded, or "
            "lora.dora=false.",
        )
    if lora.init == "loftq" and lora.base == "compute":
        yield (
            "lora.init",
            "lora.init=loftq uses the rounding errors of lora.base, and compute has none: set lora.base=nf4, or "
            "lora.init=default.",
        )
    if lora.init == "loftq" and lora.base == "mxfp4":
        yield "lora.init", "lora.init=loftq needs unrounded weights; a file in mxfp4 has none. Set lora.init=default."
    if lora.init in MOVES_BASE:
        changed = [group.weight_decay for group in optimizer.groups if group.weight_decay]
        if optimizer.weight_decay or changed:
            yield (
                "optimizer.weight_decay",
                f"lora.init={lora.init}: the last rows of the adapters contain a part of the base, which weight decay "
                "would shrink. Set optimizer.weight_decay=0 (in optimizer.groups, too), or lora.init=default.",
            )
        if optimizer.name == "muon":
            yield (
                "optimizer.name",
                f"lora.init={lora.init}: the last rows of the adapters contain a part of the base, which muon would "
                "update together with the other rows. Set optimizer.name=adamw, or lora.init=default.",
            )


def _recompute_combinations(config: Any) -> Iterator[tuple[str, str]]:
    auto = config.model.recompute == "auto"
    if auto and hasattr(config, "rollout"):
        yield (
            "model.recompute",
            "model.recompute=auto cannot be used in weft rl, because engines share the memory: set model.recompute to "
            "none, selective or full. `weft plan` prints which of them fit.",
        )
    policy = None if auto else policy_of(config.model.recompute)
    if not auto and policy is None and config.model.offload_activations != "off":
        yield (
            "model.offload_activations",
            f"model.offload_activations={config.model.offload_activations} moves the activations that recomputation "
            "stores, and model.recompute=none recomputes nothing: set model.recompute=full, or "
            "model.offload_activations=off.",
        )
    if isinstance(config.model.tiled_mlp, int):
        if config.model.compile is True:
            yield (
                "model.compile",
                "model.tiled_mlp runs MLPs outside of compiled layers, so each layer would have several graphs: set "
                "model.compile=false, or model.tiled_mlp=off.",
            )
        if config.lora.dropout:
            yield (
                "model.tiled_mlp",
                "model.tiled_mlp recomputes MLPs in backward, where lora.dropout would draw other random numbers: set "
                "lora.dropout=0, or model.tiled_mlp=off.",
            )
    if config.model.compile is True and policy is not None and policy.keeps_operations:
        yield (
            "model.compile",
            f"model.recompute={policy} stores results of single operations, which compiled layers do not expose: set "
            "model.compile=false, or model.recompute=full.",
        )


def _eval_combinations(evaluation: Any) -> Iterator[tuple[str, str]]:
    yield from held_out_problems(evaluation)
    if evaluation.prompts is not None and not evaluation.prompts:
        yield "eval.prompts", "eval.prompts is empty: write a file's path or a list of prompts, or remove the key."
    figures = ["eval/loss", *(f"eval/{source_name(source)}/loss" for source in evaluation.sources or ())]
    if evaluation.metric not in figures:
        yield (
            "eval.metric",
            f"eval.metric is {evaluation.metric}, which this run does not compute: set it to {' or '.join(figures)}.",
        )


def held_out_problems(evaluation: Any, free_columns: bool = False) -> Iterator[tuple[str, str]]:
    """Problems of eval.path and eval.sources. free_columns: see common_combinations."""
    sources = evaluation.sources
    if evaluation.path is not None and sources is not None:
        yield "eval.sources", "eval.path and eval.sources are both set: keep one, and set the other to null."
    if getattr(evaluation, "share", None) is not None and (evaluation.path is not None or sources is not None):
        path_key = "eval.path" if sources is None else "eval.sources"
        yield "eval.share", f"eval.share and {path_key} are both set: keep one, and set the other to null."
    if sources is not None:
        texts = [*source_problems(sources, "eval.path", free_columns)]
        texts += [
            f"{s.path}: weight: every held-out document counts once: remove weight." for s in sources if s.weight != 1
        ]
        yield from (("eval.sources", f"eval.sources: {text}") for text in texts)


def _optimizer_combinations(optimizer: Any) -> Iterator[tuple[str, str]]:
    if optimizer.name not in BUILT_IN_OPTIMIZERS and not re.fullmatch(r"\w+([.:]\w+)+", optimizer.name):
        yield "optimizer.name", _no_such_optimizer(optimizer.name)
    if optimizer.name in ("adamw", "lion") and optimizer.state_dtype == "bf16" and optimizer.betas[1] > 0.99:
        yield (
            "optimizer.state_dtype",
            f"optimizer.state_dtype is bf16, which cannot represent the average of optimizer.betas[1] = "
            f"{optimizer.betas[1]:g}: rounding loses changes of less than 1/256. Set the second beta to at most 0.99, "
            f"or optimizer.state_dtype=fp32.",
        )
    if optimizer.name in ("lion", "sgd") and optimizer.state_dtype == "int8":
        yield (
            "optimizer.state_dtype",
            "optimizer.state_dtype is int8, which only AdamW supports: set optimizer.state_dtype=bf16, or "
            "optimizer.name=adamw.",
        )
    if optimizer.load_state and optimizer.state_dtype == "int8":
        yield (
            "optimizer.load_state",
            "optimizer.load_state reads floating-point moments, and optimizer.state_dtype=int8 stores codes: set "
            "optimizer.load_state=false, or optimizer.state_dtype=bf16.",
        )
    reserved = [name for name in ("params", "lr", "weight_decay") if name in optimizer.options]
    if reserved and optimizer.name not in BUILT_IN_OPTIMIZERS:
        advice = "remove it" if reserved[0] == "params" else f"set optimizer.{reserved[0]} instead"
        yield "optimizer.options", f"optimizer.options contains `{reserved[0]}`, which weft sets: {advice}."
    for number, group in enumerate(optimizer.groups):
        yield from (("optimizer.groups", f"optimizer.groups[{number}] {text}") for text in _group_problems(group))


def _no_such_optimizer(name: str) -> str:
    spelt = {path.rpartition(".")[2].lower(): path for path in _TORCHS}
    torchs, equivalent = spelt.get(name.lower()), weft_value("optimizer.name", name)
    if equivalent is not None:
        return f"optimizer.name is {show_value(name)}: write {equivalent}{f', or {torchs}' if torchs else ''}."
    return (
        f"optimizer.name is {show_value(name)}; it must be adamw, muon, lion, adafactor, sgd, or the import path of a "
        f"class, as in optimizer.name={torchs or 'torch.optim.Adagrad'}."
    )


def _group_problems(group: Any) -> Iterator[str]:
    if not group.match:
        yield "has no pattern: set `match`, a list of names of parameters or modules, as in ['*.mlp']."
    if group.lr is not None and group.lr_scale is not None:
        yield "has both lr and lr_scale: remove one."
    if group.lr is None and group.lr_scale is None and group.weight_decay is None:
        yield "changes nothing: set lr, lr_scale or weight_decay."
    for name in ("lr", "lr_scale"):
        value = getattr(group, name)
        if value is not None and value <= 0:
            yield f"has {name} = {value:g}; it must be above 0 (model.freeze lists frozen parameters)."
    if group.weight_decay is not None and group.weight_decay < 0:
        yield f"has weight_decay = {group.weight_decay:g}; it must be 0 or more."


def _source_problems(data: Any, free: bool) -> Iterator[tuple[str, str]]:
    yield from (("data.roles", f"data.roles: {text}") for text in role_problems(data.roles))
    yield from (("data.message_keys", f"data.message_keys: {text}") for text in key_problems(data.message_keys))
    if data.system is not None and not data.system.strip():
        yield "data.system", "data.system is blank: write the system prompt, or remove the key."
    if data.sources is not None:
        yield from (("data.sources", f"data.sources: {text}") for text in source_problems(data.sources, free=free))
        return
    yield from (("data.columns", f"data.columns: {text}") for text in column_problems(data.columns, free))
    yield from (("data.split", f"data.split: {text}") for text in split_problems(data.split))


def _schedule_combinations(schedule: Any, steps: int | None) -> Iterator[tuple[str, str]]:
    warmup = schedule.warmup_steps
    if warmup is not None and steps is not None and warmup > steps:
        yield (
            "schedule.warmup_steps",
            f"schedule.warmup_steps is {warmup}, but train.steps is {steps}, so the rate never reaches its peak: "
            f"set schedule.warmup_steps={steps} or less.",
        )
    if schedule.name == "cosine_with_restarts" and steps is not None and schedule.cycles > max(1, steps // 2):
        yield (
            "schedule.cycles",
            f"schedule.cycles is {schedule.cycles}, but train.steps is {steps}, so the rate of a cycle never falls: "
            f"set schedule.cycles={max(1, steps // 2)} or less.",
        )
    shares = schedule.warmup_ratio + schedule.decay_ratio
    if schedule.name == "wsd" and warmup is None and shares > 1:
        yield (
            "schedule.decay_ratio",
            f"schedule.warmup_ratio + schedule.decay_ratio is {shares:g}, more than all steps: lower one of them.",
        )


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def show_value(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        value = {name: list(part) if isinstance(part, tuple) else part for name, part in asdict(value).items()}
    return show(list(value) if isinstance(value, tuple) else value)


def adapter_presets(value: Callable[[str], Any], command: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The defaults that lora sets for other keys."""
    for name in ("lora.rank", "lora.path"):
        if value(name) is not None:
            yield name, ADAPTER_DEFAULTS[command]


SFT = Rules(EXCLUSIVE, INERT, training_combinations, lambda value: adapter_presets(value, "sft"))
