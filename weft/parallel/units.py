"""Determines the modules that FSDP2 gathers together (fsdp.wrap), and over how many ranks each is sharded
(fsdp.overrides)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from weft.errors import UserError
from weft.models.patterns import CONTAINERS, outermost, similar_names
from weft.models.train_module import TrainModule
from weft.models.vision import tower_layers
from weft.parallel.pp.model import PlaceholderLayer

Strategy = Literal["full", "replicate", "experts"] | int

AUTO = ("layers", "head")


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together, except the parameters of inner units.

    parts: names of the modules. keep: whether they stay gathered between forward and backward. shard: number of ranks
    to shard over, or `full` for all of dp_shard x cp, `replicate` for no sharding, `experts` for the ranks that hold
    the same experts."""

    name: str = field(init=False)
    parts: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    keep: bool = False
    shard: Strategy = "full"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", " + ".join(self.parts))


def find_units(
    module: TrainModule,
    wrap: Literal["auto"] | Sequence[str] = "auto",
    overrides: Mapping[str, Strategy] | None = None,
    experts: Collection[str] = (),
) -> list[Unit]:
    """The units that `wrap` and `overrides` define, inner units first. All other parameters belong to the root.

    wrap: `layers` (each decoder layer, and each layer of the vision tower), `head` (with the final norm), `embedding`,
    and class names. FSDP2 cannot gather one tensor in two units, so tied weights stay with the root: a tied head, and
    layers that share weights (zamba2). Raises UserError if an entry names a module with tied weights, matches nothing,
    or matches modules that a rank may skip.

    overrides: pattern of module names -> sharding. The outermost modules that a pattern matches become units. It also
    applies to their inner modules, unless another pattern matches these. experts: names of modules of experts that ep
    shards.
    """
    units = _wrap(module, wrap)
    if overrides:
        units = _apply_overrides(module, units, overrides)
    for unit in units if experts else ():
        if unit.shard != "full" and any(f"{unit.name}.".startswith(f"{name}.") for name in experts):
            raise UserError(
                f"fsdp.overrides: {unit.name} is {unit.shard}, but mesh.ep shards its experts. Remove it from "
                "fsdp.overrides, or set mesh.ep=1."
            )
    units = [unit for unit in units if unit.name not in experts]
    units += [Unit((name,), (module.get_submodule(name),), shard="experts") for name in experts]
    order = {id(child): index for index, child in enumerate(module.modules())}
    unique = {id(unit.modules[0]): unit for unit in units}
    return sorted(unique.values(), key=lambda unit: (-unit.parts[0].count("."), order[id(unit.modules[0])]))


def _wrap(module: TrainModule, wrap: Literal["auto"] | Sequence[str]) -> list[Unit]:
    """The units of fsdp.wrap."""
    entries, units = AUTO if wrap == "auto" else tuple(wrap), []
    names_by_id = _names_by_id(module)
    for entry in entries:
        if entry not in ("layers", "head", "embedding"):
            units += [
                _checked_unit(module, f"fsdp.wrap: {entry}", name, names_by_id)
                for name in _find_by_class(module, entry)
            ]
    wrapped_ids = {id(child) for unit in units for child in unit.modules}
    if "layers" in entries:
        units += [
            Unit((name,), (layer,))
            for name, layer in module.layers
            if id(layer) not in wrapped_ids
            and not isinstance(layer, PlaceholderLayer)
            and _split_tie(module, [name], names_by_id) is None
        ]
        units += [
            Unit((name,), (block,))
            for name, block in tower_layers(module.base, module.facts)
            if id(block) not in wrapped_ids
        ]
    if "embedding" in entries:
        units.append(_checked_unit(module, "fsdp.wrap: embedding", module.facts.embedding, names_by_id))
    if "head" in entries:
        units += _head_units(module, wrapped_ids, names_by_id, is_required=wrap != "auto")
    return units


def _apply_overrides(module: TrainModule, units: list[Unit], overrides: Mapping[str, Strategy]) -> list[Unit]:
    """The units with the shardings of fsdp.overrides. Modules that it names become units, if they are not yet."""
    chosen: dict[str, Strategy] = {}  # a later pattern wins
    for pattern, strategy in overrides.items():
        matched = [n for n in outermost(module, pattern) if any(True for _ in module.get_submodule(n).parameters())]
        if not matched:
            names = [name for name, _ in module.named_modules() if name]
            raise UserError(
                f"fsdp.overrides: {pattern!r} matches no module with parameters{similar_names(pattern, names)}"
            )
        chosen |= dict.fromkeys(matched, strategy)
    wrapped_names = {part for unit in units for part in unit.parts}
    names_by_id = _names_by_id(module)
    units = units + [
        _checked_unit(module, f"fsdp.overrides: {name}", name, names_by_id)
        for name in chosen
        if name not in wrapped_names
    ]
    out = []
    for unit in units:
        strategies = []
        for name in unit.parts:  # the innermost chosen module that contains it applies
            while name and name not in chosen:
                name = _parent(name)
            strategies.append(chosen.get(name, "full"))
        if len(set(strategies)) == 1:
            out.append(replace(unit, shard=strategies[0]))
            continue
        triples = zip(unit.parts, unit.modules, strategies, strict=True)
        out += [Unit((name,), (child,), unit.keep, strategy) for name, child, strategy in triples]
    return out


def parameters_by_unit(units: Iterable[Unit]) -> list[list[nn.Parameter]]:
    """The parameters of each unit, without the parameters of inner units. units: in the order of find_units."""
    seen_ids: set[int] = set()
    owned = []
    for unit in units:
        parameters = {id(p): p for child in unit.modules for p in child.parameters() if id(p) not in seen_ids}
        seen_ids |= parameters.keys()
        owned.append(list(parameters.values()))
    return owned


def inner_units(root: nn.Module, units: Sequence[Unit]) -> dict[int, list[Unit]]:
    """id of a unit's first module, or of the root -> the unit's direct inner units, in the model's order."""
    unit_of = {id(child): unit for unit in units for child in unit.modules}
    inside: dict[int, list[Unit]] = {}
    visited: set[int] = set()

    def visit(module: nn.Module, within: int) -> None:
        unit = unit_of.get(id(module))
        if unit is not None:
            if id(unit) not in visited:
                visited.add(id(unit))
                inside.setdefault(within, []).append(unit)
            within = id(unit.modules[0])
        for child in module.children():
            visit(child, within)

    visit(root, id(root))
    return inside


def _head_units(
    module: TrainModule, wrapped_ids: set[int], names_by_id: dict[int, list[str]], is_required: bool
) -> list[Unit]:
    """The unit of the final norm and the head. They run consecutively, last in forward and first in backward, so the
    unit stays gathered. An empty list if the head cannot be a unit."""
    facts = module.facts
    names = [name for name in (facts.final_norm, facts.head) if name is not None]
    names = [name for name in names if id(module.get_submodule(name)) not in wrapped_ids]
    tied = _split_tie(module, [facts.head], names_by_id)
    if tied is not None and is_required:
        raise _tie_refusal("fsdp.wrap: head", facts.head, tied)
    if tied is not None or facts.head not in names or not any(True for _ in module.head.parameters()):
        return []  # a head without parameters is on another stage of the pipeline
    return [Unit(tuple(names), tuple(module.get_submodule(name) for name in names), keep=True)]


def _checked_unit(module: TrainModule, key: str, name: str, names_by_id: dict[int, list[str]]) -> Unit:
    """The unit of a module that the config names. Raises UserError if the module cannot be a unit."""
    module_list = _enclosing_list(module, name)
    if module_list is not None:
        raise UserError(
            f"{key}: {name} is in the list {module_list}. A rank may skip modules of a list, such as an expert that "
            "none of its tokens chose. As a separate unit, it would then hang the other ranks or lose their gradients. "
            f"Name the module that contains the list, {type(module.get_submodule(_parent(module_list))).__name__}."
        )
    tied = _split_tie(module, [name], names_by_id)
    if tied is not None:
        raise _tie_refusal(key, name, tied)
    return Unit((name,), (module.get_submodule(name),), keep=name == module.facts.head)


def _tie_refusal(key: str, name: str, tied: tuple[str, str]) -> UserError:
    return UserError(
        f"{key}: {name} cannot be a separate unit, because {tied[0]} and {tied[1]} are one tensor (tied), and FSDP2 "
        f"cannot gather a tensor in two units. Remove {name}; it then belongs to the root unit."
    )


def _find_by_class(module: TrainModule, class_name: str) -> list[str]:
    """Names of the modules of this class that have parameters. Raises UserError, which lists the model's classes, if
    there are none."""
    classes = {
        name: type(child).__name__
        for name, child in module.named_modules()
        if name and not isinstance(child, CONTAINERS) and any(True for _ in child.parameters())
    }
    names = [name for name, module_class in classes.items() if module_class == class_name]
    if not names:
        raise UserError(
            f"fsdp.wrap: the model has no module of class {class_name}. Name layers, head, embedding, or one of this "
            f"model's classes: {', '.join(sorted(set(classes.values())))}."
        )
    return names


def _names_by_id(module: nn.Module) -> dict[int, list[str]]:
    """id of a parameter -> all its names."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return names_by_id


def _split_tie(module: nn.Module, names: Sequence[str], names_by_id: dict[int, list[str]]) -> tuple[str, str] | None:
    """(a name inside these modules, a name outside) of a parameter that is tied across their border; None without such
    a parameter."""
    prefixes = tuple(f"{name}." for name in names)
    for name in names:
        for parameter in module.get_submodule(name).parameters():
            inside = [path for path in names_by_id[id(parameter)] if path.startswith(prefixes)]
            outside = [path for path in names_by_id[id(parameter)] if not path.startswith(prefixes)]
            if outside:
                return inside[0], outside[0]
    return None


def _enclosing_list(module: TrainModule, name: str) -> str | None:
    parent = _parent(name)
    while parent.startswith(f"{module.facts.layers}."):
        if isinstance(module.get_submodule(parent), CONTAINERS):
            return parent
        parent = _parent(parent)
    return None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
