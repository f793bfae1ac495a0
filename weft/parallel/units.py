"""Which modules FSDP2 gathers together (fsdp.wrap), and over how many ranks each is sharded (fsdp.overrides)."""

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
    """Modules whose parameters are gathered together, except those of inner units. parts: the modules' names. keep:
    stay gathered between forward and backward. shard: number of ranks to shard over; `full`: all of dp_shard x cp;
    `replicate`: none; `experts`: the ranks that hold the same experts."""

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
    """The units that `wrap` and `overrides` describe, inner ones first; the root holds the rest.

    wrap: `layers` (each decoder layer, and each layer of the vision tower), `head` (with the final norm), `embedding`,
    and class names. Weights that two units would share stay with the root, because FSDP2 cannot gather one tensor
    twice: a tied head, and layers tied to one another (zamba2). Raises UserError if an entry names such a unit, matches
    nothing, or matches modules that some rank may not run.

    overrides: pattern of module names -> sharding. The outermost modules that a pattern matches become units; inner
    modules follow, unless another pattern matches them. experts: modules whose ranks hold different parts (ep).
    """
    units = _wrap(module, wrap)
    if overrides:
        units = _apply_overrides(module, units, overrides)
    for unit in units if experts else ():
        if unit.shard != "full" and any(f"{unit.name}.".startswith(f"{name}.") for name in experts):
            raise UserError(
                f"fsdp.overrides: {unit.name} is {unit.shard}, but mesh.ep places its experts on ranks: remove it "
                "from fsdp.overrides, or set mesh.ep=1."
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
    wrapped_ids = {id(part) for unit in units for part in unit.modules}
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
    """The units with the shardings of fsdp.overrides; modules that it names and no unit holds become units."""
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
        for name in unit.parts:  # of the innermost chosen module that contains this one
            while name and name not in chosen:
                name = _parent(name)
            strategies.append(chosen.get(name, "full"))
        if len(set(strategies)) == 1:
            out.append(replace(unit, shard=strategies[0]))
            continue
        parts = zip(unit.parts, unit.modules, strategies, strict=True)
        out += [Unit((part,), (child,), unit.keep, strategy) for part, child, strategy in parts]
    return out


def parameters_by_unit(units: Iterable[Unit]) -> list[list[nn.Parameter]]:
    """Parameters of each unit, without the parameters of its inner units; `units` in the order of find_units."""
    seen_ids: set[int] = set()
    owned = []
    for unit in units:
        parameters = {id(p): p for part in unit.modules for p in part.parameters() if id(p) not in seen_ids}
        seen_ids |= parameters.keys()
        owned.append(list(parameters.values()))
    return owned


def inner_units(root: nn.Module, units: Sequence[Unit]) -> dict[int, list[Unit]]:
    """id of a unit's first module, or of the root -> its direct inner units, in the model's order."""
    holder = {id(part): unit for unit in units for part in unit.modules}
    inside: dict[int, list[Unit]] = {}
    visited: set[int] = set()

    def visit(part: nn.Module, within: int) -> None:
        unit = holder.get(id(part))
        if unit is not None:
            if id(unit) not in visited:
                visited.add(id(unit))
                inside.setdefault(within, []).append(unit)
            within = id(unit.modules[0])
        for child in part.children():
            visit(child, within)

    visit(root, id(root))
    return inside


def _head_units(
    module: TrainModule, wrapped_ids: set[int], names_by_id: dict[int, list[str]], is_required: bool
) -> list[Unit]:
    """The final norm and the head, which run one after the other, last in forward and first in backward."""
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
    holder = _enclosing_list(module, name)
    if holder is not None:
        raise UserError(
            f"{key}: {name} is a member of the list {holder}. Not every rank runs every member: a rank does not run "
            "an expert that none of its tokens chose. As a separate unit it would hang the other ranks, or lose their "
            f"gradients. Name the module with the list, {type(module.get_submodule(_parent(holder))).__name__}."
        )
    tied = _split_tie(module, [name], names_by_id)
    if tied is not None:
        raise _tie_refusal(key, name, tied)
    return Unit((name,), (module.get_submodule(name),), keep=name == module.facts.head)


def _tie_refusal(key: str, name: str, tied: tuple[str, str]) -> UserError:
    return UserError(
        f"{key}: {name} cannot be a unit of its own, because {tied[0]} and {tied[1]} are one tensor (tied), which "
        "FSDP2 cannot gather twice: leave it out, and the root holds it."
    )


def _find_by_class(module: TrainModule, class_name: str) -> list[str]:
    """Names of the modules of this class that have parameters. Raises UserError, with the model's classes, if there are
    none."""
    holding = {
        name: type(child).__name__
        for name, child in module.named_modules()
        if name and not isinstance(child, CONTAINERS) and any(True for _ in child.parameters())
    }
    names = [name for name, kind in holding.items() if kind == class_name]
    if not names:
        kinds = ", ".join(sorted(set(holding.values())))
        raise UserError(
            f"fsdp.wrap: no module of class {class_name}. Name layers, head, embedding, or one of this model's "
            f"classes: {kinds}."
        )
    return names


def _names_by_id(module: nn.Module) -> dict[int, list[str]]:
    """id of a parameter -> all of its names."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return names_by_id


def _split_tie(module: nn.Module, names: Sequence[str], names_by_id: dict[int, list[str]]) -> tuple[str, str] | None:
    """Two names of one parameter, one inside these modules and one outside; None if there is no such parameter."""
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
