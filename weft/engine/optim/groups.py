"""The learning rate and weight decay of each parameter: the default rule, and the config's groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.errors import UserError
from weft.models.patterns import matches, similar_names
from weft.parallel.shards.cuts import AnyShardSpec, full_shape

NamedParameters = Iterable[tuple[str, nn.Parameter]]

_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)
_BIAS = re.compile(r"(^|_)bias$", re.IGNORECASE)
_Row = tuple[int, str, float, float | None]  # (sort position, name, weight decay, peak learning rate)


@dataclass(frozen=True, slots=True)
class OptimizerGroupRow:
    """A row of the printed table: parameters with equal weight decay and learning rate.

    elements: number of elements, summed over all ranks. examples: the last parts of the parameters' names. lr: peak
    learning rate, None for frozen parameters.
    """

    name: str
    weight_decay: float
    parameters: int
    elements: int
    examples: tuple[str, ...]
    lr: float | None = None


@dataclass(frozen=True)
class ParamGroupRule:
    """How an optimizer treats a parameter. group: index in optimizer.groups, None if no group matches. lr_scale: factor
    on the step's learning rate."""

    group: int | None
    lr_scale: float
    weight_decay: float


def decays(name: str, ndim: int) -> bool:
    """Whether weight decay applies to the parameter `name`. ndim: number of its dimensions (global, for a DTensor).

    Matrices, embeddings and fused experts decay. Vectors and scalars do not. Biases, norms, conv1d kernels and A_log
    never decay, even with two dimensions: biases of fused experts and norms with one row per head have two.
    """
    owner, leaf = (["", *name.split(".")])[-2:]
    if ndim < 2 or leaf == "A_log" or _BIAS.search(leaf) or _NORM.search(owner):
        return False
    # A conv1d kernel has three dimensions. The name alone would also match GPT-2's Conv1D and image convolutions.
    return not ("conv" in owner.lower() and ndim == 3)


def param_group_rules(named_parameters: NamedParameters, config: OptimizerConfig) -> dict[nn.Parameter, ParamGroupRule]:
    """The rule of every parameter that requires a gradient, in the order of named_parameters.

    named_parameters: may list a tied parameter several times. A pattern then matches any of its names.
    """
    return {
        parameter: find_rule_of(names, parameter.ndim, config)
        for parameter, names in _names(named_parameters).items()
        if parameter.requires_grad
    }


def _names(named_parameters: NamedParameters) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters:
        names.setdefault(parameter, []).append(name)
    return names


def find_rule_of(names: Sequence[str], ndim: int, config: OptimizerConfig) -> ParamGroupRule:
    """The rule of one parameter: the first group of optimizer.groups with a matching pattern, else the default."""
    usual = config.weight_decay if decays(names[0], ndim) else 0.0
    for number, group in enumerate(config.groups):
        if any(matches(pattern, name) for pattern in group.match for name in names):
            lr_scale = 1.0 if group.lr_scale is None else group.lr_scale
            if group.lr is not None:
                lr_scale = group.lr / config.lr
            return ParamGroupRule(number, lr_scale, usual if group.weight_decay is None else group.weight_decay)
    return ParamGroupRule(None, 1.0, usual)


def check_groups(module: nn.Module, config: OptimizerConfig) -> None:
    """Raise UserError if a pattern of optimizer.groups matches nothing, or if a group gets no parameter."""
    named = list(module.named_parameters(remove_duplicate=False))
    for number, group in enumerate(config.groups):
        for pattern in group.match:
            if not any(matches(pattern, name) for name, _ in named):
                raise UserError(
                    f"optimizer.groups[{number}]: {pattern!r} matches no parameter"
                    f"{similar_names(pattern, [name for name, _ in named])}"
                )
    used_groups = {rule.group for rule in param_group_rules(named, config).values()}
    for number, group in enumerate(config.groups):
        if number not in used_groups:
            raise UserError(
                f"optimizer.groups[{number}] has no parameter: every parameter that {', '.join(group.match)} matches "
                "is in an earlier group, or frozen (model.freeze). Put this group before the earlier group, or remove "
                "it."
            )


def describe_groups(
    named_parameters: NamedParameters, config: OptimizerConfig, cuts: Mapping[str, AnyShardSpec] | None = None
) -> list[OptimizerGroupRow]:
    """Rows of the table printed at start: parameters with weight decay, parameters without, each optimizer group, and
    frozen parameters. cuts: how tp shards parameters, to count elements over all ranks."""
    names = _names(named_parameters)
    rules = param_group_rules(((name, p) for p, aliases in names.items() for name in aliases), config)
    rows: dict[_Row, list[nn.Parameter]] = {
        (-1, "decayed", config.weight_decay, config.lr): [],
        (-1, "not decayed", 0.0, config.lr): [],
    }
    for parameter, aliases in names.items():
        rows.setdefault(_row(aliases[0], parameter, rules.get(parameter), config), []).append(parameter)
    trained = [name for parameter, aliases in names.items() if parameter.requires_grad for name in aliases]
    return [
        OptimizerGroupRow(
            name=row[1],
            weight_decay=row[2],
            parameters=len(rows[row]),
            elements=sum(math.prod(full_shape(names[p][0], p, cuts or {})) for p in rows[row]),
            examples=_examples([names[p][0] for p in rows[row]], trained if row[3] is None else None),
            lr=row[3],
        )
        for row in sorted(rows, key=lambda row: row[:2])
    ]


def _row(name: str, parameter: nn.Parameter, rule: ParamGroupRule | None, config: OptimizerConfig) -> _Row:
    """The row of the table that counts this parameter. rule: None for a frozen parameter."""
    if rule is None:
        return len(config.groups), "frozen", 0.0, None
    decay = "decayed" if decays(name, parameter.ndim) else "not decayed"
    if rule.group is None:
        return -1, decay, rule.weight_decay, config.lr
    title = f"groups[{rule.group}]"
    if config.groups[rule.group].weight_decay is None:
        title += f", {decay}"
    return rule.group, title, rule.weight_decay, config.lr * rule.lr_scale


def _examples(names: Sequence[str], trained: Sequence[str] | None) -> tuple[str, ...]:
    """Examples for a row of the table: the last two parts of each name, without repetitions.

    trained: for frozen names, the names of all trained parameters. A frozen module is then listed by its name instead
    of its parameters' names.
    """
    short = (_frozen_module(name, trained) or ".".join(name.split(".")[-2:]) for name in names)
    return tuple(dict.fromkeys(re.sub(r"^\d+\.", "*.", name) for name in short))


def _frozen_module(name: str, trained: Sequence[str] | None) -> str | None:
    """The outermost module that contains this parameter and no trained parameter, and is in no list of layers. None if
    there is none, or if `trained` is None."""
    owners = name.split(".")[:-1] if trained is not None else []
    outside = next((depth for depth, part in enumerate(owners) if part.isdecimal()), len(owners))
    modules = (".".join(owners[: depth + 1]) for depth in range(outside))
    return next((module for module in modules if not any(t.startswith(f"{module}.") for t in trained or ())), None)


def set_rates(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Set each group's learning rate to `lr` x lr_scale. Some optimizers store the rate in a tensor."""
    for group in groups:
        rate = lr * group["lr_scale"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
