"""A server (vLLM, SGLang) that dies, hangs or answers nonsense is replaced, and the run is the unbroken one, bit for
bit. Engines may join and leave.

The servers are the standalone generator behind the calls of HostedServer; tests/vllm has the real ones.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.rl.test_engine_restarts import (
    RESTARTS,
    ComingGroup,
    Strike,
    failed_with,
    lines_of,
    restarts_of,
    run_struck,
)
from tests.support.local_rl import make_task, rollouts_of, write_teacher
from tests.support.stand_in_vllm import environment
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import ActorError
from weft.inference.base import Completion, Request, SamplingParams, Synced
from weft.inference.weight_sync.protocol import SyncError, Ticket
from weft.inference.weight_sync.sender import SyncFailure
from weft.rl.restarts import RestartBudget
from weft.rl.served_pool import ServedPool

SPOILT = Completion((5, 999), (-1.0, -1.0), "end", ((1, 2),))  # 999 is no token of the vocabulary
# The first 8 requests are those of the check for rl.on_policy=exact.
Case = tuple[str, list[Strike], int]
# Engine, strikes, number of engines. The first 8 requests are those of the check for rl.on_policy=exact.
CASES: dict[str, Case] = {
    "one of two dies before it answers": ("vllm", [Strike("generate", 10, "dies late")], 2),
    "a lone sglang dies as it reads weights": ("sglang", [Strike("reload", 2, "dies")], 1),
}
MORE: dict[str, Case] = {
    "a lone engine dies within a sync": ("vllm", [Strike("receive", 2, "dies midway")], 1),
    "an answer is no answer": ("vllm", [Strike("generate", 10, lambda answer: "hello")], 1),
    "a lone engine dies": ("vllm", [Strike("generate", 10, "dies")], 1),
    "a lone engine hangs": ("vllm", [Strike("generate", 3, "hangs")], 1),
    "one of two dies within a sync": ("vllm", [Strike("receive", 4, "dies midway")], 2),
    "a lone engine dies when a sync is done": ("vllm", [Strike("receive", 2, "dies late")], 1),
    "a new engine dies while it is filled": (
        "vllm", [Strike("generate", 10, "dies"), Strike("receive", 3, "dies midway")], 1,
    ),
    "ids are none of the vocabulary": ("vllm", [Strike("generate", 10, lambda answer: [SPOILT] * 3)], 2),
    "one of two sglang dies before it answers": ("sglang", [Strike("generate", 10, "dies late")], 2),
    "one of two sglang dies when it has read them": ("sglang", [Strike("reload", 3, "dies late")], 2),
    "an sglang cannot read them": ("sglang", [Strike("reload", 2, "raises")], 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = make_task(tmp_path_factory.mktemp("served"))
    environment(task / "env")
    return task


def served(task: Path, engine: str, count: int) -> list[str]:
    return [
        f"rollout.engine={engine}", f"rollout.python={task}/env/bin/python", f"rollout.num_engines={count}",
        "cluster.placement=disaggregated",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(task: Path) -> Path:
    assert run_struck(task, task / "unbroken", [], *served(task, "vllm", 2)).restarted == []
    assert restarts_of(task / "unbroken") == [0.0, 0.0, 0.0]
    return task / "unbroken"


def same_run(run: Path, unbroken: Path) -> None:
    """Both have the same samples and metrics, but for restarts, and for the bytes of a sync, which SGLang reads."""
    left_out = (RESTARTS, "rollout/engines", "sync/mb")
    lines, expected = ([{k: v for k, v in line.items() if k not in left_out} for line in lines_of(r)] for r in
                       (run, unbroken))  # fmt: skip
    assert lines == expected and rollouts_of(run) == rollouts_of(unbroken)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.table) for name in MORE)])
def test_a_run_whose_server_fails_is_the_unbroken_one(name: str, task: Path, unbroken: Path) -> None:
    engine, strikes, count = (CASES | MORE)[name]
    run = task / name.replace(" ", "-")
    engines = run_struck(task, run, strikes, *served(task, engine, count))
    assert engines.struck == len(engines.restarted) == len(strikes)
    assert sum(restarts_of(run)) == len(strikes)
    assert all(server.started >= 1 for server in engines.objects)
    same_run(run, unbroken)


@pytest.mark.parametrize(
    ("engine", "strikes"),
    [
        ("vllm", [Strike("generate", 10, "dies late", engine=1)]),
        pytest.param("sglang", [Strike("reload", 2, "dies", engine=1)], marks=pytest.mark.table),
        pytest.param("vllm", [Strike("receive", 2, "dies midway", engine=1)], marks=pytest.mark.table),
    ],
)
def test_servers_that_join_and_leave_change_no_sample(
    engine: str, strikes: list[Strike], task: Path, unbroken: Path
) -> None:
    run = task / f"joins {engine} {strikes[0].method}".replace(" ", "-")
    keys = [word for word in served(task, engine, 1) if not word.startswith(("rollout.num", "cluster.placement"))]
    engines = run_struck(task, run, strikes, *keys, "cluster.engines={min: 1, max: 3}", kind=ComingGroup)
    assert isinstance(engines, ComingGroup) and set(engines.came) == {1, 2}
    assert lines_of(run)[-1]["rollout/engines"] == 3
    assert len(engines.came) == 2 + engines.struck
    same_run(run, unbroken)


def test_a_server_gets_the_values_of_a_quantised_base_once(task: Path) -> None:
    """A run over an nf4 base is that with the hf engine, which gets the codes; adapters alone follow. Bit for bit."""
    write_teacher(task / "adder", task / "weights")
    keys = [f"model.path={task}/weights", "model.init=pretrained", "lora.rank=2", "lora.base=nf4"]
    run_struck(task, task / "nf4-hf", [], *keys)
    run_struck(task, task / "nf4-vllm", [], *keys, *served(task, "vllm", 1))
    same_run(task / "nf4-vllm", task / "nf4-hf")
    first, *later = [line["sync/mb"] for line in lines_of(task / "nf4-vllm")]
    assert first == later[0]  # of adapters; the base came before the first step


@pytest.mark.table
def test_a_server_that_keeps_dying_ends_the_run_with_its_last_error(task: Path) -> None:
    strikes = [Strike("receive", 2, "dies", times=9)]
    message = r"rollout engine 0 has failed 2 times .* rollout.restarts is 1. The last error:\nrollout engine 0 died"
    with pytest.raises(ActorError, match=message):
        run_struck(task, task / "keeps", strikes, *served(task, "vllm", 1), "rollout.restarts=1")


def test_a_request_that_a_server_refuses_ends_the_run_at_once(task: Path) -> None:
    """With the server's message, and without a restart: another server would refuse it, too."""
    strikes = [Strike("generate", 10, "refuses", times=9)]
    with pytest.raises(ActorError, match="^rollout engine vllm-0 refuses a request: status 400") as error:
        run_struck(task, task / "refuses", strikes, *served(task, "vllm", 2))
    assert error.value.kind == "user"


class TwoServers:
    """Trainers and two engines in place of actors. Requests wait until their engine is told what becomes of them."""

    name, can_restart = "rollout engine", True

    def __init__(self) -> None:
        self.sent: list[tuple[str, ...]] = []
        self.restarted: list[int] = []
        self.pending: list[dict[str, asyncio.Future[list[Completion]]]] = [{}, {}]
        self.fails = False

    def __len__(self) -> int:
        return 2

    async def restart(self, number: int) -> None:
        self.restarted.append(number)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        if method == "open_sync":
            return [{name: [Ticket("nowhere", 1, "key", name)] for name in args[0]}]
        self.sent.append(args[1])
        return [SyncFailure("vllm-1 has died", "vllm-1", late=False) if self.fails else Synced(args[0], 1, 1, 0.1)]

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        if method == "ask" and args[0] == "generate":
            self.pending[number][args[1].id] = asyncio.get_running_loop().create_future()
            return await self.pending[number][args[1].id]
        if method == "ask" and args[0] == "receive" and self.fails:
            self.fails = number != 1  # the second that fails ends it
            raise failed_with(SyncError("the sync failed"), number)
        return {"host": "here", "torch_version": "2.13.0"}.get(method)

    def answer(self) -> None:
        for requests in self.pending:
            for future in requests.values():
                if not future.done():
                    future.set_result([Completion((5,), (-0.5,), "length", ((1, 1),))])


class Recorded(TwoServers):
    """Two engines that answer at once with the seeds and the version of their weights, unless they hang. calls: what
    they were asked, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, Any]] = []
        self.version, self.has = 0, [0, 0]  # the trainers', the engines'
        self.fails_at: dict[int, asyncio.Event] = {}  # engine -> when its running request fails

    async def restart(self, number: int) -> None:
        await super().restart(number)
        self.has[number] = 0
        self.fails_at.pop(number, None)

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        if method != "ask":
            return await super().call_one(number, method, *args)
        kind, *rest = args
        self.calls.append((kind, number, rest[0].seeds if kind == "generate" else tuple(rest)))
        if kind == "receive":
            self.has[number] = self.version
        if kind == "generate":
            if number in self.fails_at:
                await self.fails_at[number].wait()
                raise ActorError(f"rollout engine {number} died", "killed")
            await asyncio.sleep(0)
            assert self.has[number], "a request reached an engine without weights"
            return [Completion((seed,), (-0.5,), "length", ((self.has[number], 1),)) for seed in rest[0].seeds]
        return None


def test_what_an_engine_leaves_is_redone_once_with_its_seeds_by_the_current_weights(task: Path) -> None:
    """Engines die while they have requests, the second those of the first; then one as the trainers' weights change."""

    async def play() -> Recorded:
        sides = Recorded()
        pool = pool_of(task, sides)
        await pool.open()
        sides.version = 7
        await pool.sync(7)
        sides.fails_at = {0: asyncio.Event(), 1: asyncio.Event()}
        requests = [Request(f"{n}", (1,), (2 * n, 2 * n + 1), SamplingParams(1)) for n in range(4)]
        answers = [asyncio.ensure_future(pool.generate(request)) for request in requests]
        await asyncio.sleep(0.01)
        for fails in [*sides.fails_at.values()]:  # the second has the requests of the first then
            fails.set()
            await asyncio.sleep(0.05)
        answered = await asyncio.wait_for(asyncio.gather(*answers), 5.0)
        assert [[c.tokens for c in completions] for completions in answered] == [
            [(seed,) for seed in request.seeds] for request in requests
        ]
        assert {c.versions for completions in answered for c in completions} == {((7, 1),)}
        assert pool.drawn == 8
        await pool.hold()  # from here on the trainers' weights change
        sides.version = 8
        sides.fails_at = {0: asyncio.Event()}
        last = asyncio.ensure_future(pool.generate(Request("4", (1,), (8,), SamplingParams(1))))
        await asyncio.sleep(0.01)
        sides.fails_at[0].set()
        (completion,) = await asyncio.wait_for(last, 5.0)
        assert (completion.tokens, completion.versions) == ((8,), ((7, 1),)) and sides.has == [0, 7]
        await pool.sync(8)
        assert sides.has == [8, 8] and pool.drawn == 9
        await pool.close()
        return sides

    sides = asyncio.run(play())
    assert sorted(sides.restarted) == [0, 0, 1]
    generated = [seeds for kind, _, seeds in sides.calls if kind == "generate"]
    assert sorted(generated.count(seeds) for seeds in {*generated}) == [2, 2, 2, 3, 3]


@pytest.mark.parametrize("when", ["waits", "has been dealt", "runs at an engine that dies"])
def test_an_abort_leaves_no_request_to_redo(when: str, task: Path) -> None:
    async def play() -> list[Any]:
        sides = Recorded()
        pool = pool_of(task, sides)
        await pool.open()
        sides.version = 1
        await pool.sync(1)
        if when != "runs at an engine that dies":
            await pool.pause()
        sides.fails_at = {0: asyncio.Event()}
        answer = asyncio.ensure_future(pool.generate(Request("a", (1,), (5,), SamplingParams(1))))
        await asyncio.sleep(0.01)
        if when == "has been dealt":
            await pool.resume()
        await pool.abort()
        sides.fails_at[0].set()
        if when == "waits":
            await pool.resume()
        (outcome,) = await asyncio.wait_for(asyncio.gather(answer, return_exceptions=True), 5.0)
        assert isinstance(outcome, asyncio.CancelledError)
        await pool.close()
        return [number for kind, number, _ in sides.calls if kind == "generate"]

    assert asyncio.run(play()) == ([0] if when == "runs at an engine that dies" else [])


def pool_of(task: Path, sides: Any) -> ServedPool:
    words = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", "rl.reward=[length]", "model.init=random"]
    config = load_config([], [*words, *served(task, "vllm", 2)], RlConfig)
    restarts = RestartBudget(3, 60.0, "rollout.restarts", show=lambda text: None)
    return ServedPool(config, sides, sides, restarts, task, "fp32", 9)


def test_a_failure_that_comes_late_is_not_the_new_engines(task: Path) -> None:
    """Both requests of an engine fail, the second when it has been replaced: it is replaced once, both are redone."""

    async def play() -> list[int]:
        sides = TwoServers()
        pool = pool_of(task, sides)
        await pool.open()
        await pool.sync(1)
        requests = [Request(f"{n}", (1,), (n,), SamplingParams(1)) for n in range(4)]
        answers = [asyncio.ensure_future(pool.generate(request)) for request in requests]
        await asyncio.sleep(0.01)
        first, second = sides.pending[0].values()
        first.set_exception(ActorError("rollout engine 0 died", "killed"))
        await asyncio.sleep(0.05)
        assert sides.restarted == [0]
        second.set_exception(ActorError("rollout engine 0 died", "killed"))
        await asyncio.sleep(0.05)
        sides.answer()
        assert len(await asyncio.wait_for(asyncio.gather(*answers), 5.0)) == 4
        await pool.close()
        return sides.restarted

    assert asyncio.run(play()) == [0]


def test_a_sync_that_fails_by_one_server_replaces_that_one(task: Path) -> None:
    """The other, whose part of the sync fails with it, keeps its requests and gets the weights again."""

    async def play() -> TwoServers:
        sides = TwoServers()
        pool = pool_of(task, sides)
        await pool.open()
        await pool.sync(1)
        answer = asyncio.ensure_future(pool.generate(Request("0", (1,), (7,), SamplingParams(1))))
        await asyncio.sleep(0.01)
        sides.fails = True
        await pool.sync(2)
        assert list(sides.pending[0]) == ["0"] and not answer.done()
        sides.answer()
        await asyncio.wait_for(answer, 5.0)
        await pool.close()
        return sides

    sides = asyncio.run(play())
    assert sides.restarted == [1] and sides.sent == [("vllm-0", "vllm-1")] * 3
