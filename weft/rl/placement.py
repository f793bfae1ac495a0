"""`cluster.placement`: whether rollout engines share the trainers' devices or have separate devices.

The embedded engine always shares them. For other engines, `auto` measures a few rollout steps with each placement, in a
temporary folder, and chooses the faster. It measures only if both are possible and the run is long enough to gain from
it; otherwise `_by_rule` decides. The choice is printed and written to RUN/config.yaml, so a resumed run keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from weft.config.conditions import SERVERS
from weft.config.devices import device_lists
from weft.config.rl_schema import RlConfig
from weft.errors import ActorError, UserError, first_line
from weft.launch.machine import accelerator_count
from weft.launch.options import RlOptions

Placement = Literal["colocated", "disaggregated"]
PLACEMENTS: tuple[Placement, ...] = ("colocated", "disaggregated")
LONG = 500  # shorter runs, in rollout steps, do not gain from 2 x TIMED steps and two starts
TIMED = 4  # rollout steps per placement; the first is not counted, because it includes one-time work


@dataclass(frozen=True)
class ResolvedPlacement:
    """A config whose placement is not `auto`. recorded: the config for RUN/config.yaml, without the derived number of
    engines. notes: lines to print."""

    config: RlConfig
    recorded: RlConfig
    notes: tuple[str, ...] = ()


def resolve_placement(
    config: RlConfig, options: RlOptions, rollouts: int, seconds: Callable[[RlConfig], float]
) -> ResolvedPlacement:
    """The config with its placement resolved. UserError if the requested placement is impossible.

    rollouts: number of rollout steps of the run. seconds: measures a rollout step with a config; raises UserError or
    ActorError if that cannot run.
    """
    if config.rollout.engine == "embedded":
        return ResolvedPlacement(config, config)
    requested = config.cluster.placement
    if requested != "auto":
        return ResolvedPlacement(_placed(config, options, requested), config)
    placement, why = _by_rule(config, options, rollouts)
    if placement is None:
        placement, why = _by_trial(config, options, seconds)
    placed = _placed(config, options, placement)
    return ResolvedPlacement(placed, replace(config, cluster=placed.cluster), (f"placed   {placement}: {why}",))


def _by_rule(config: RlConfig, options: RlOptions, rollouts: int) -> tuple[Placement | None, str]:
    """(placement, reason), or (None, "") if only a trial can decide."""
    cluster, rollout = config.cluster, config.rollout
    if cluster.max_staleness:
        return "disaggregated", "with cluster.max_staleness engines generate while trainers train"
    if options.rollout_only or options.replay is not None:
        return "colocated", "trainers or engines would be idle"
    if options.device == "cuda":
        if options.world % rollout.tp:
            return "disaggregated", f"{options.world} trainer ranks are not a multiple of rollout.tp = {rollout.tp}"
        if cluster.trainer_ranks is None:
            return "colocated", "trainers use all accelerators (set cluster.trainer_ranks to keep some for engines)"
        num_accelerators = accelerator_count("cuda") if cluster.address is None else None
        if num_accelerators is not None and num_accelerators < options.world + rollout.count * rollout.tp:
            return "colocated", f"trainers leave too few of the {num_accelerators} accelerators"
    if rollouts < LONG:
        return "colocated", f"{rollouts} rollout steps are too few to time both placements ({LONG} or more are needed)"
    return None, ""


def _by_trial(config: RlConfig, options: RlOptions, seconds: Callable[[RlConfig], float]) -> tuple[Placement, str]:
    """(the faster placement, the measured seconds). UserError if neither can run."""
    measured: dict[Placement, float] = {}
    results: list[str] = []
    for placement in PLACEMENTS:
        try:
            measured[placement] = seconds(_placed(config, options, placement))
            results.append(f"{placement} {measured[placement]:.3g}")
        except (UserError, ActorError) as error:
            results.append(f"{placement} not possible ({first_line(error)})")
    if not measured:
        raise UserError(
            "cluster.placement=auto: no placement is possible:\n" + "\n".join(f"  {text}" for text in results)
        )
    return min(measured, key=lambda placement: measured[placement]), f"seconds of a rollout step: {', '.join(results)}"


def _placed(config: RlConfig, options: RlOptions, placement: Placement) -> RlConfig:
    """The config with this placement and a definite number of engines. UserError if it is impossible."""
    rollout, world, gpu = config.rollout, options.world, options.device == "cuda"
    engines = rollout.num_engines or 1
    if rollout.transport == "ipc" and not (placement == "colocated" and gpu):
        raise UserError(
            "rollout.transport=ipc needs CUDA devices that trainers and engines share, but with "
            f"cluster.placement={placement} on {'CUDA' if gpu else 'CPU'} they share none. Set "
            "rollout.transport=auto."
        )
    if placement == "colocated" and rollout.sync == "delta":
        raise UserError(
            "rollout.sync=delta: colocated engines free their weights while trainers train, so every sync must send "
            "all weights. Set cluster.placement=disaggregated or rollout.sync=full."
        )
    if placement == "colocated" and gpu and rollout.transport == "group":
        raise UserError(
            "rollout.transport=group: with cluster.placement=colocated trainers and engines use the same devices, "
            "which NCCL does not support in one group. Set rollout.transport=auto."
        )
    if placement == "colocated" and gpu and not config.cluster.devices:
        if world % rollout.tp:
            raise UserError(
                f"rollout.tp={rollout.tp}: with cluster.placement=colocated an engine uses the devices of rollout.tp "
                f"of the {world} trainer ranks. Set rollout.tp to a divisor of {world}."
            )
        max_engines = world // rollout.tp
        engines = rollout.num_engines or max_engines
        if engines > max_engines:
            raise UserError(
                f"rollout.num_engines is {engines}, but with cluster.placement=colocated {world} trainer ranks have "
                f"room for {max_engines}: set rollout.num_engines={max_engines} or fewer, or null."
            )
    cluster = replace(config.cluster, placement=placement)
    return replace(config, cluster=cluster, rollout=replace(rollout, num_engines=engines))


def shared_ranks(config: RlConfig, number: int) -> list[int]:
    """The trainer ranks whose devices the engine with this number shares (cluster.placement)."""
    tp = config.rollout.tp if config.rollout.engine in SERVERS else 1
    numbers = range(number * tp, (number + 1) * tp)
    if not config.cluster.devices:
        return list(numbers)
    lists = device_lists(config.cluster.devices)
    return [lists["trainer"].index(lists["rollout"][n]) for n in numbers if lists["rollout"][n] in lists["trainer"]]
