"""Optimizers that the config names by import path.

Such an optimizer updates this rank's shards as plain tensors. This is exact on every mesh if the optimizer updates each
element independently. A trial on small tensors checks this before anything is loaded. It also checks that the
optimizer's state can be saved and restored.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.config.schema import OptimizerConfig
from weft.engine.optim.groups import set_rates
from weft.errors import UserError
from weft.importing import import_named
from weft.parallel.mesh import local_shard

Groups = Sequence[Mapping[str, Any]]
_ENGINE_ARGUMENTS = ("self", "params", "lr", "weight_decay")
_LR, _STEPS, _BREAK = 0.1, 4, 2
_SHAPES = ((192, 64), (192,))  # the matrix has more than 4096 elements, above which bitsandbytes uses 8-bit state
_RANKS = (slice(0, 128), slice(128, 192))
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # tolerance, as a share of the largest update


@dataclass(frozen=True)
class CustomOptimizerSpec:
    """An optimizer by import path that passed the trial.

    make: builds the optimizer from parameter groups. moments: dtypes of the state tensors that have a matrix's shape.
    dtypes: dtypes of all state tensors that have their parameter's shape. counters: names of the entries of its groups
    that change between steps.
    """

    path: str
    make: Callable[[Groups], torch.optim.Optimizer]
    moments: tuple[torch.dtype, ...]
    dtypes: frozenset[torch.dtype]
    counters: tuple[str, ...]


class ShardOptimizer:
    """An optimizer over this rank's shards as plain tensors.

    `param_groups` are the wrapped optimizer's. `state` is keyed by the model's parameters, with tensors of the shard's
    shape.
    """

    def __init__(self, groups: Groups, rule: CustomOptimizerSpec, numbers: Sequence[int] | None = None) -> None:
        """groups: this rank's parameter groups. numbers: the number of each group in the whole model, if other pipeline
        stages have other groups; default: in order."""
        self.counters = rule.counters
        self._numbers = range(len(groups)) if numbers is None else numbers
        self._shards: dict[nn.Parameter, nn.Parameter] = {
            parameter: nn.Parameter(local_shard(parameter).detach())
            for group in groups
            for parameter in group["params"]
        }
        self._optimizer = rule.make(
            [{**group, "params": [self._shards[parameter] for parameter in group["params"]]} for group in groups]
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def numbered_groups(self) -> dict[int, dict[str, Any]]:
        """This rank's groups by their number in the whole model."""
        return dict(zip(self._numbers, self.param_groups, strict=True))

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """State by parameter; {} for empty shards."""
        state = self._optimizer.state
        return {p: state.get(shard, {}) for p, shard in self._shards.items() if shard in state or not shard.numel()}

    def stepped(self, parameter: nn.Parameter) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        """(The wrapped optimizer, its shard of the parameter)."""
        return self._optimizer, self._shards[parameter]

    @torch.no_grad()
    def step(self) -> None:
        """Update every non-empty shard that has a gradient."""
        for parameter, shard in self._shards.items():
            shard.data = local_shard(parameter)  # FSDP2 may have moved the shard since
            steps = parameter.grad is not None and shard.numel() > 0
            shard.grad = local_shard(parameter.grad) if steps else None
        self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the shards and of the model's parameters."""
        assert set_to_none
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None


# ---------------------------------------------------------------- the trial, before anything is loaded


def find_rule(
    config: OptimizerConfig, *, sharded: bool, staged: bool = False, dtype: torch.dtype, device: torch.device
) -> CustomOptimizerSpec:
    """The optimizer at the import path optimizer.name, after the trial.

    sharded: whether ranks hold parts of parameters. staged: whether ranks hold only some parameters (pipeline stages).
    dtype, device: of the master weights. Raises UserError if the class does not exist, rejects the options, or fails
    the trial.
    """
    optimizer_class, decays = find_class(config)
    options: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in config.options.items()}

    def make(groups: Groups) -> torch.optim.Optimizer:
        accepted = [{k: v for k, v in group.items() if decays or k != "weight_decay"} for group in groups]
        return optimizer_class(accepted, lr=config.lr, **options)

    trial = _Trial(config.name, make, dtype, device).run(sharded, staged)
    dtypes = [
        tuple(v.dtype for v in state.values() if isinstance(v, Tensor) and v.shape == shape)
        for shape, state in zip(_SHAPES, trial.state, strict=True)
    ]
    return CustomOptimizerSpec(
        config.name,
        make,
        dtypes[0],
        frozenset(dtype for of_parameter in dtypes for dtype in of_parameter),
        tuple(trial.counters),
    )


def find_class(config: OptimizerConfig) -> tuple[type[torch.optim.Optimizer], bool]:
    """(Class at the import path optimizer.name, whether it accepts `weight_decay`), before the trial.

    Raises UserError if there is no such class, or if it has no argument for an option or a weight decay of the config.
    """
    optimizer_class = import_named(config.name, "optimizer.name")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UserError(
            f"optimizer.name: {config.name} is not a class derived from torch.optim.Optimizer. Set it to such a class, "
            "or to a name such as adamw."
        )
    parameters = inspect.signature(optimizer_class).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = [
        n
        for n, p in parameters.items()
        if n not in _ENGINE_ARGUMENTS and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    unknown = [name for name in config.options if name not in arguments]
    if unknown and not accepts_any:
        names = ", ".join(arguments) or "none"
        raise UserError(f"optimizer.options: {config.name} has no argument `{unknown[0]}`. Its arguments: {names}.")
    if "lr" not in parameters and not accepts_any:
        raise UserError(
            f"optimizer.name: {config.name} has no argument `lr`, through which weft sets the learning rate. Use a "
            "class that accepts `lr`."
        )
    decays = "weight_decay" in parameters or accepts_any
    decay_by_key = {"optimizer.weight_decay": config.weight_decay}
    decay_by_key |= {f"optimizer.groups[{n}].weight_decay": g.weight_decay or 0.0 for n, g in enumerate(config.groups)}
    for key, value in decay_by_key.items():
        if value > 0 and not decays:
            raise UserError(f"{key} is {value:g}, but {config.name} has no argument `weight_decay`: set it to 0.")
    return optimizer_class, decays


@dataclass(frozen=True)
class _Run:
    """A matrix and a vector before and after some steps, and the optimizer's state for each.

    counters: the entries of its groups that the steps changed: name -> the value in each group.
    """

    before: list[Tensor]
    after: list[Tensor]
    state: list[dict[str, Any]]
    counters: dict[str, list[Any]]


@dataclass(frozen=True)
class _Trial:
    """Runs an optimizer on small tensors: on full tensors, on the rows that each of two ranks would hold, and on single
    tensors, as pipeline stages would hold them."""

    path: str
    make: Callable[[Groups], torch.optim.Optimizer]
    dtype: torch.dtype
    device: torch.device

    def run(self, sharded: bool, staged: bool) -> _Run:
        """The run on full tensors. Raises UserError if the optimizer fails, or if its state cannot be saved; with
        `sharded` also if rows step differently from full tensors, with `staged` if single tensors do."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            try:
                reference = self._run()
            except Exception as error:
                raise self._refused(f"fails in a trial step: {type(error).__name__}: {error}") from error
            odd = [key for state in reference.state for key, value in state.items() if not storable(value)]
            odd += [key for key, values in reference.counters.items() if not all(map(is_number, values))]
            if odd:
                raise self._refused(
                    f"keeps state that a checkpoint cannot store: {', '.join(dict.fromkeys(odd))}. weft stores numbers "
                    "and plain tensors."
                )
            if _equal(reference, self._run(lr=_LR / 2)):
                raise self._refused(
                    "ignores the entry `lr` of its parameter groups, through which the schedule sets the learning rate."
                )
            if not _equal(reference, self._run(carried=list(reference.counters))):
                raise self._refused(
                    "keeps state outside of `state` and the numbers in its parameter groups. A checkpoint contains "
                    "only these, so a resumed run would differ."
                )
            if sharded:
                self._check_rows(reference, [self._run(rows) for rows in _RANKS])
            if staged:
                self._check_alone(self._run(one_group=True), [self._run(one_group=True, only=n) for n in (0, 1)])
        return reference

    def _check_alone(self, reference: _Run, parts: Sequence[_Run]) -> None:
        """Raise UserError unless the optimizer updates each tensor alone as it does together with its group."""
        advice = (
            "so its steps would depend on the pipeline stage of a tensor. Set mesh.pp=1, or use an optimizer that "
            "updates each tensor independently, such as adamw or sgd."
        )
        for key, values in reference.counters.items():
            if any(part.counters.get(key) != values for part in parts):
                raise self._refused(f"keeps {key} in its groups, and its value depends on all tensors, {advice}")
        for before, after, part in zip(reference.before, reference.after, parts, strict=True):
            if not (part.after[0] - after).abs().max() <= _ROUNDING[self.dtype] * (after - before).abs().max():
                raise self._refused(f"updates a tensor differently alone than together with others, {advice}")

    def _check_rows(self, reference: _Run, parts: Sequence[_Run]) -> None:
        """Raise UserError unless the rows take the same steps as full tensors."""
        advice = (
            "so its steps would depend on the number of ranks that share a parameter. Set mesh.dp_shard=1, or use an "
            "optimizer that updates each element independently, such as adamw or sgd."
        )
        for shape, state in zip(_SHAPES, reference.state, strict=True):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != shape:
                    raise self._refused(
                        f"keeps {key} of {list(value.shape)} for a parameter of {list(shape)}, {advice}"
                    )
        for key, values in reference.counters.items():
            if any(part.counters.get(key) != values for part in parts):
                raise self._refused(f"keeps {key} in its groups, and its value depends on all rows, {advice}")
        for number, (before, after) in enumerate(zip(reference.before, reference.after, strict=True)):
            all_rows = torch.cat([part.after[number] for part in parts])
            if not (all_rows - after).abs().max() <= _ROUNDING[self.dtype] * (after - before).abs().max():
                raise self._refused(f"updates a tensor differently from its rows, {advice}")

    def _run(
        self,
        rows: slice = slice(None),
        *,
        one_group: bool = False,
        only: int | None = None,
        lr: float = _LR,
        carried: Sequence[str] | None = None,
    ) -> _Run:
        """Run some steps. rows: the rows of each tensor to train. one_group: put all tensors into one group. only:
        train only this tensor. carried: midway, continue with a new optimizer that gets the state and these group
        entries."""
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)

        def draw(shape: tuple[int, ...]) -> Tensor:
            sizes = torch.linspace(0.5, 2.0, shape[0]).view(-1, *[1] * (len(shape) - 1))  # rows with different norms
            return (torch.randn(shape, generator=generator) * sizes)[rows].to(self.device, self.dtype)

        drawn = [nn.Parameter(draw(shape)) for shape in _SHAPES]
        parameters = drawn if only is None else drawn[only : only + 1]
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer = self._over(parameters, one_group)
        fresh = _entries(optimizer)
        for number in range(_STEPS):
            if carried is not None and number == _BREAK:
                optimizer, previous = self._over(parameters, one_group), optimizer
                for group, entries in zip(optimizer.param_groups, _entries(previous), strict=True):
                    group.update({key: entries[key] for key in carried if key in entries})
                for parameter in parameters:
                    optimizer.state[parameter].update(_copied(previous.state[parameter]))
            set_rates(optimizer.param_groups, lr / (1 + number))
            for parameter, shape in zip(drawn, _SHAPES, strict=True):
                parameter.grad = draw(shape)
            optimizer.step()
        state = [dict(optimizer.state[parameter]) for parameter in parameters]
        return _Run(
            before, [parameter.detach() for parameter in parameters], state, _changed(fresh, _entries(optimizer))
        )

    def _over(self, parameters: Sequence[nn.Parameter], one_group: bool) -> torch.optim.Optimizer:
        if one_group:
            return self.make([{"params": list(parameters), "weight_decay": 0.1, "lr_scale": 1.0}])
        return self.make([{"params": [p], "weight_decay": 0.1 * (p.ndim > 1), "lr_scale": 1.0} for p in parameters])

    def _refused(self, reason: str) -> UserError:
        return UserError(f"optimizer.name: {self.path} {reason}")


def storable(value: Any) -> bool:
    """Whether a checkpoint can store this entry of an optimizer's state. None is allowed, and not stored."""
    if isinstance(value, Tensor):
        return type(value) in (Tensor, DTensor) and value.layout == torch.strided
    return value is None or isinstance(value, bool | int | float)


def is_number(value: Any) -> bool:
    """Whether a value is a Python number or a tensor without dimensions."""
    return isinstance(value, bool | int | float) or (type(value) is Tensor and not value.ndim)


def _entries(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of the optimizer's groups without `params` and `lr`."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "lr")})
        for group in optimizer.param_groups
    ]


def _changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The entries that differ in any group: name -> the value of each group in `after`."""
    names = dict.fromkeys(name for group in after for name in group)
    pairs = list(zip(before, after, strict=True))
    return {n: [b.get(n) for _, b in pairs] for n in names if any(not _are_equal(a.get(n), b.get(n)) for a, b in pairs)}


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    return {key: value for key, value in copies.items() if value is not None}


def _equal(run: _Run, reference: _Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(run.after, reference.after, strict=True))
