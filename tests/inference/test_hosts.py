"""Engines that are servers, each started and asked by a Ray actor, on two nodes of a cluster, which have
addresses of their own (both on this machine); the servers are stand-ins (stand_in_vllm.py)."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.stand_in_vllm import environment
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import ActorError, UserError
from weft.inference.base import Completion, Request, SamplingParams, Synced
from weft.inference.servers import CALLS, HostedServer, server_variables
from weft.inference.weight_sync.protocol import Ticket
from weft.launch.ray_actors import ActorGroup, Bundle, actor_group, check_capacity, ray_session
from weft.rl.restarts import RestartBudget
from weft.rl.served_pool import ServedPool, check_hosts, open_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENGINES, OTHER_HOST = 2, "127.0.0.3"


class IdleTrainers:
    """Stands for the trainer ranks: nothing is sent."""

    def __init__(self) -> None:
        self.hosts: dict[str, str] = {}

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        if method == "open_sync":
            self.hosts = args[0]
            return [{name: [Ticket("127.0.0.1", 1, "key", name)] for name in self.hosts}]
        return [Synced(args[0], 1, 8, 0.1)]


def config_of(folder: Path, python: Path) -> RlConfig:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text('{"model_type": "llama", "vocab_size": 100000}')
    (folder / "data.jsonl").write_text("{}\n")
    overrides = [
        f"model.path={folder}/model",
        f"data.path={folder}/data.jsonl",
        "rl.reward=[tests.support.reward_functions:seen]",
        "rollout.engine=vllm",
    ]
    return load_config(
        [], [*overrides, f"rollout.num_engines={ENGINES}", f"rollout.python={python}"], RlConfig, weights=False
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Each node has room for one engine."""
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray_cluster.add_node(num_cpus=1, node_ip_address=OTHER_HOST)
        with ray_session(ray_cluster.address, [Bundle(cpus=1.0)] * ENGINES):
            yield
    finally:
        ray_cluster.shutdown()


def actors(config: RlConfig) -> Any:
    environment = {"OMP_NUM_THREADS": "1", **server_variables()}
    return actor_group(
        "rollout engine",
        partial(HostedServer, config),
        [Bundle(cpus=1.0)] * ENGINES,
        [environment] * ENGINES,
        at_once=CALLS,
    )


def request(name: str, seeds: Sequence[int] = (100, 200)) -> Request:
    return Request(name, (1, 2, 3), tuple(seeds), SamplingParams(4))


def log_of(run: Path, number: int) -> str:
    return (run / f"engines/vllm-{number}.log").read_text()


def server_of(run: Path, number: int) -> psutil.Process:
    pids = re.findall(r"pid (\d+)", log_of(run, number))
    return psutil.Process(int(pids[-1]))


def all_ended(processes: Sequence[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=20)[1]


def test_engines_on_hosts(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of requests wait while orders are obeyed; what cannot run, or dies, is named, and takes what is its own
    with it."""
    monkeypatch.setenv("VLLM_TRIED", "yes")
    config, trainers, run = config_of(tmp_path, environment(tmp_path / "env")), IdleTrainers(), tmp_path / "run"

    async def body(group: ActorGroup) -> None:
        await a_host_that_cannot(group, config, tmp_path)
        pool: Any = await open_engines(config, trainers, group, run, "fp32", RestartBudget(0, 1.0, "rollout.restarts"))  # type: ignore[arg-type]
        assert list(trainers.hosts) == ["vllm-0", "vllm-1"]
        assert len(set(trainers.hosts.values())) == 2 and OTHER_HOST in trainers.hosts.values()
        assert all("VLLM_TRIED=yes" in log_of(run, number) for number in range(ENGINES))
        await many_requests_and_orders(pool)
        await a_server_that_dies(pool, run)
        await an_actor_that_dies(pool, run)
        await pool.close()

    with actors(config) as group:
        asyncio.run(body(group))


async def a_host_that_cannot(group: ActorGroup, config: RlConfig, folder: Path) -> None:
    """An engine that cannot run where it was put is told before anything starts."""
    with pytest.raises(UserError, match=r"needs 2 CPUs, but no host of the Ray cluster has more than 1"):
        check_capacity([Bundle(cpus=2.0)])
    await check_hosts(config, group)
    program = folder / "env/bin/python"
    good = program.read_text()
    program.write_text(good.replace("0.32.0", "0.40.1"))
    with pytest.raises(ActorError, match=r"has vLLM 0\.40\.1, but weft supports") as error:
        await group.call_one(1, "check", True)
    assert error.value.kind == "user" and "Traceback" not in str(error.value)
    program.write_text(good)


async def many_requests_and_orders(pool: ServedPool) -> None:
    """They wait for weights, of which the first sync comes while they wait."""
    waiting = [asyncio.ensure_future(pool.generate(request(f"prompt {n}", (n * 10, n * 10 + 1)))) for n in range(1500)]
    await asyncio.sleep(1.0)
    assert not any(task.done() for task in waiting)
    assert (await pool.sync(7)).version == 7
    for n, completions in enumerate(await asyncio.gather(*waiting)):
        first = Completion(tuple(range(n * 10, n * 10 + 4)), (-0.5,) * 4, "length", ((7, 4),))
        assert completions[0] == first and len(completions) == 2
    await pool.pause()
    pending = asyncio.ensure_future(pool.generate(request("held")))
    await asyncio.sleep(0.3)
    assert not pending.done()
    await pool.resume()
    assert len(await pending) == 2
    with pytest.raises(ActorError, match="^rollout engine vllm-0 did not receive version 8, and is paused") as error:
        await pool.actors.call_one(0, "ask", "receive", Ticket("nowhere", 1, "key", "vllm-0"), 8)
    assert "Traceback" not in str(error.value) and "withheld" in str(error.value)
    await pool.sync(9)


async def a_server_that_dies(pool: ServedPool, run: Path) -> None:
    """Of two engines the first, which also has another request to wait for."""
    await pool.pause()
    pending = asyncio.ensure_future(pool.actors.call_one(0, "ask", "generate", request("held")))
    await asyncio.sleep(0.3)
    began, server = time.monotonic(), server_of(run, 0)
    server.kill()
    with pytest.raises(ActorError) as error:
        await pending
    assert time.monotonic() - began < 15 and error.value.kind == "killed"
    lines = str(error.value).splitlines()
    assert lines[0] == "rollout engine vllm-0 ended with status 137 while generating held."
    assert lines[1] == f"The end of {run}/engines/vllm-0.log:" and "  | pid" in lines[2]
    assert lines[3].startswith("This was on host ") and len(lines) == 4


async def an_actor_that_dies(pool: ServedPool, run: Path) -> None:
    """Its server, which is not its child, ends nevertheless."""
    server = server_of(run, 1)
    guard, started, actor = server.parents()[:3]
    assert "ray::" in " ".join(actor.cmdline())
    pending = asyncio.ensure_future(pool.actors.call_one(1, "ask", "generate", request("held")))
    await asyncio.sleep(0.3)
    (folder,) = (Path(word).parent for word in server.cmdline() if word.endswith("/socket"))
    assert folder.is_dir()
    actor.kill()
    started.kill()  # as Ray does with children of what it ends
    with pytest.raises(ActorError, match="^rollout engine 1 died\nserving completions") as error:
        await pending
    assert error.value.kind == "killed"
    assert all_ended([started, guard, server]) and not folder.exists()
