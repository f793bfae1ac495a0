"""The processes of a run of `weft rl`: trainer ranks and separate rollout engines, placed in a Ray cluster."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.config.conditions import SERVERS
from weft.config.devices import device_lists
from weft.config.rl_schema import RlConfig, reward_models
from weft.data.encode import load_tokenizer
from weft.data.image_opener import image_opener
from weft.inference.servers import CALLS, HostedServer, server_variables
from weft.inference.standalone import Standalone, engine_class
from weft.launch import flight
from weft.launch.machine import cpu_cores
from weft.launch.options import RlOptions
from weft.launch.ray_actors import ActorGroup, Bundle, actor_group, ray_session, reserved_devices
from weft.models import hf
from weft.parallel.fsdp import DTYPES
from weft.rl.placement import shared_ranks
from weft.rl.reference_critic import ReferenceCriticRank, Role, device_role, own_ranks
from weft.rl.reward_models import RewardModelRank
from weft.rl.trainer import TrainerRank


@dataclass(frozen=True)
class ActorResources:
    """The resources that actors request. reservations: reserved for each trainer rank, which itself uses `trainer`.
    engines: used by each engine. colocated_with: per engine, the trainer rank whose reservation it shares; None if
    every engine has its own reservation. busy: number of actors that compute at the same time."""

    reservations: Sequence[Bundle]
    trainer: Bundle
    engines: Sequence[Bundle]
    colocated_with: Sequence[int] | None
    busy: int


@dataclass(frozen=True)
class DevicePlaces:
    """The placement of a run's actors by cluster.devices. devices: all named devices, in order. bundle: the resources
    that each device reserves. roles: role -> indices of its devices. shares: role -> the resources that each of its
    actors requests."""

    devices: Sequence[int]
    bundle: Bundle
    roles: Mapping[str, Sequence[int]]
    shares: Mapping[str, Sequence[Bundle]]


def device_places(config: RlConfig, gpu: bool) -> DevicePlaces:
    """The placement by cluster.devices. Server engines are omitted: each uses several devices, of trainer ranks or
    separate. gpu: whether devices are CUDA devices."""
    lists = dict(device_lists(config.cluster.devices))
    if config.rollout.engine in SERVERS:
        lists.pop("rollout", None)
    is_separate = own_ranks(config)
    actors: dict[str, Sequence[int]] = {"trainer": lists["trainer"]}
    actors |= {role: lists[name] for role in is_separate if (name := device_role(role)) in lists}
    actors |= {"rollout": lists["rollout"]} if "rollout" in lists else {}
    devices = sorted({device for numbers in actors.values() for device in numbers})
    users = Counter(device for numbers in actors.values() for device in numbers)
    # Ray counts ten-thousandths of a resource.
    parts = {device: math.floor(10_000 / count) / 10_000 for device, count in users.items()}
    return DevicePlaces(
        devices,
        Bundle(gpus=1.0) if gpu else Bundle(cpus=1.0),
        {role: [devices.index(device) for device in numbers] for role, numbers in actors.items()},
        {
            role: [Bundle(gpus=parts[d]) if gpu else Bundle(cpus=parts[d]) for d in numbers]
            for role, numbers in actors.items()
        },
    )


def actor_resources(config: RlConfig, world: int, gpu: bool) -> ActorResources:
    """The resources of `world` trainer ranks and the engines. cluster.placement must be resolved. gpu: whether on CUDA
    devices."""
    rollout = config.rollout
    count = 0 if rollout.engine == "embedded" else rollout.count
    serves, bundle = rollout.engine in SERVERS, Bundle(gpus=1.0) if gpu else Bundle(cpus=1.0)
    if count and config.cluster.placement == "colocated" and (serves or not config.cluster.devices):
        # Rank and engine get half of a device each, so that Ray gives both the same one. A server gets its devices by
        # CUDA_VISIBLE_DEVICES instead, because they may belong to several ranks.
        half = Bundle(gpus=0.5) if gpu and not serves else None
        ranks = [shared_ranks(config, n)[0] if gpu or config.cluster.devices else n % world for n in range(count)]
        return ActorResources([bundle] * world, half or bundle, [half or Bundle()] * count, ranks, max(world, count))
    count = config.cluster.engines.get("max", count)
    engine_bundle = Bundle(gpus=float(rollout.tp)) if serves and gpu else bundle
    turns = not config.cluster.max_staleness  # trainers and engines alternate, so each may use all cores
    return ActorResources(
        [bundle] * world, bundle, [engine_bundle] * count, None, max(world, count) if turns else world + count
    )


@dataclass(frozen=True)
class Actors:
    """The actors of a run. trainers: the policy's ranks. reference_critic: separate ranks of a reference, a critic or a
    reward model.
    engines: each is a rollout engine or runs its server; None with the embedded engine."""

    trainers: ActorGroup
    reference_critic: Mapping[Role, ActorGroup]
    engines: ActorGroup | None

    @property
    def groups(self) -> dict[str, ActorGroup]:
        """All groups, by the subfolder of RUN for their evidence."""
        groups: dict[str, ActorGroup] = {
            "": self.trainers,
            **{str(role): group for role, group in self.reference_critic.items()},
        }
        return groups if self.engines is None else {**groups, "engines": self.engines}


@contextmanager
def open_actors(config: RlConfig, options: RlOptions, *, fill: bool) -> Iterator[Actors]:
    """Start a process for each trainer rank, each separate reference or critic rank, and each engine. fill: as in
    TrainerRank."""
    is_local, gpu, serves = config.cluster.address is None, options.device == "cuda", config.rollout.engine in SERVERS
    resources, rank_counts = actor_resources(config, options.world, gpu), own_ranks(config)
    bundle = Bundle(gpus=1.0) if gpu else Bundle(cpus=1.0)
    places = device_places(config, gpu) if config.cluster.devices else None
    busy = len(places.devices) if places is not None else resources.busy + sum(rank_counts.values())
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // busy)))
    common = {
        "OMP_NUM_THREADS": threads,
        **({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if is_local else {}),
    }
    named: Mapping[str, Sequence[int]] = places.roles if places is not None else {}
    reserved = [*resources.reservations] if places is None else [bundle] * len(places.devices)
    reserved += [bundle] * sum(count for role, count in rank_counts.items() if role not in named)
    joining = len(resources.engines) - config.rollout.count if config.cluster.engines else 0
    # A cluster may grow until engines join; a Ray that is started here does not.
    first_engines = resources.engines[: None if is_local else len(resources.engines) - joining]
    reserved += first_engines if resources.colocated_with is None and "rollout" not in named else ()

    def ranks(world: int) -> list[Mapping[str, str]]:
        return [
            {**common, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0" if gpu else str(rank)}
            for rank in range(world)
        ]

    def group(role: str, name: str, make: Callable[[int], Any], bundles: Sequence[Bundle], *arguments: Any,
              **options: Any) -> ActorGroup:  # fmt: skip
        options = {"timeout": config.train.timeout, **options}
        if places is not None and role in named:
            bundles = places.shares[role]
            options["share_with"] = (placed, [order[index] for index in named[role]])
            options["reserve"] = None
            options["turns"] = [] if role == "rollout" else [locks[index] for index in sorted(named[role])]
        return opened.enter_context(actor_group(name, make, bundles, *arguments, **options))

    with ExitStack() as opened:
        opened.enter_context(ray_session(config.cluster.address, reserved))
        if places is not None:
            placed, order = opened.enter_context(reserved_devices(places.bundle, len(places.devices)))
            locks = [asyncio.Lock() for _ in places.devices]
        make_trainer = partial(_make_trainer, config, options, fill)
        own_bundles = [resources.trainer] * options.world
        trainers = group(
            "trainer", "trainer rank", make_trainer, own_bundles, ranks(options.world), reserve=resources.reservations
        )
        reference_critic = {
            role: group(
                role,
                f"{role.replace('_', ' ')} rank",
                partial(_make_reference_critic, config, options, role, fill),
                [bundle] * world,
                ranks(world),
            )
            for role, world in rank_counts.items()
        }
        if not resources.engines:
            yield Actors(trainers, reference_critic, None)
            return
        make: Any = partial(HostedServer, config) if serves else partial(_make_engine, config, options)
        env = [common | (server_variables() if serves else {})] * len(resources.engines)
        share_with = None
        if resources.colocated_with is not None:
            rank_bundles = [order[index] for index in named["trainer"]] if places is not None else range(options.world)
            share_with = (trainers.placed, [rank_bundles[rank] for rank in resources.colocated_with])
        calls = CALLS if serves else 1
        limits = {
            "timeout": config.rollout.timeout, "key": "rollout.timeout", "at_once": calls, "joining": joining,
        }  # fmt: skip
        engines = group("rollout", "rollout engine", make, resources.engines, env, share_with=share_with, **limits)
        yield Actors(trainers, reference_critic, engines)


def _make_reference_critic(
    config: RlConfig, options: RlOptions, role: Role, fill: bool, rank: int
) -> ReferenceCriticRank | RewardModelRank:
    models = reward_models(config.rl.reward)
    if role in models:
        return RewardModelRank(config, models[role], options.device)
    return ReferenceCriticRank(config, role, options.device, fill=fill)


def _make_trainer(config: RlConfig, options: RlOptions, fill: bool, rank: int) -> TrainerRank:
    return TrainerRank(config, options.device, fill=fill)


def _make_engine(config: RlConfig, options: RlOptions, number: int) -> Standalone:
    flight.watch(config.rollout.timeout, "rollout.timeout")
    flight.enter("load")
    hf.import_architectures(config.model.imports, config.model.path)
    auto = "bf16" if options.device == "cuda" else "fp32"
    dtype = config.rollout.dtype if config.rollout.dtype != "auto" else config.fsdp.param_dtype
    return engine_class(config.rollout.engine)(
        config.model.path, config.lora, dtype=DTYPES[auto if dtype == "auto" else dtype], device=options.device,
        tokenizer=load_tokenizer(config.model.path), exact=config.rl.on_policy == "exact",
        opener=image_opener(config.model.path, config.data),
    )  # fmt: skip
