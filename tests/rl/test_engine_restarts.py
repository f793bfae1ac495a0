"""A rollout engine that dies, hangs or answers nonsense is replaced, and the run is the unbroken one, bit for bit.

Engines are objects of this process; tests/faults has real processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.cases import pairs
from tests.support.local_rl import (
    KEYS,
    LocalGroup,
    lines_of,
    local_actors,
    make_task,
    rollouts_of,
    weights_of,
)
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import ActorError, UserError
from weft.inference.base import Completion, Request, SamplingParams, Synced
from weft.inference.weight_sync.protocol import SyncError, Ticket
from weft.inference.weight_sync.sender import SyncFailure
from weft.launch.options import RlOptions
from weft.recipes import rl
from weft.rl import actors
from weft.rl.batch_pool import StandalonePool, require_completions
from weft.rl.restarts import RestartBudget

EXACT = ["rollout.engine=hf", "rl.on_policy=exact", "train.steps=3", "rollout.timeout=20"]
RESTARTS = "rollout/engine_restarts"


@dataclass
class Strike:
    """What becomes of the nth call of a method on an engine, counted over the engines' whole life. how: dies (before
    the call), dies late (after it, so that its answer is lost), dies midway (while it receives a tensor), hangs,
    raises, refuses (as a server does with status 4xx), or a function that spoils the answer."""

    method: str
    nth: int
    how: str | Callable[[Any], Any]
    engine: int | None = None
    times: int = 1


class StruckGroup(LocalGroup):
    """Actors in this process, of which engines are struck."""

    strikes: Sequence[Strike] = ()

    def __init__(self, name: str, make: Sequence[Callable[[], Any]], hook: Any = None) -> None:
        super().__init__(name, make, hook)
        self.dead = set[int]()
        self.restarted: list[int] = []
        self.count: dict[tuple[int, int | None], int] = {}
        self.struck = 0

    async def restart(self, number: int | None = None) -> None:
        await super().restart(number)
        assert number is not None, "engines are replaced one by one"
        self.dead.discard(number)
        self.restarted.append(number)

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        struck = str(args[0]) if method == "ask" else method  # ask: of a server
        strike = self._due(number, struck) if self.name == "rollout engine" else None
        died = ActorError(f"rollout engine {number} died", "killed")
        if number in self.dead or (strike is not None and strike.how == "dies"):
            self.dead.add(number)
            raise died
        if strike is not None and strike.how == "raises":
            raise ActorError(f"rollout engine {number} failed: RuntimeError: boom", "failed")
        if strike is not None and strike.how == "refuses":
            raise ActorError("rollout engine vllm-0 refuses a request: status 400: no such field", "user")
        if strike is not None and strike.how == "hangs":
            self.dead.add(number)
            raise ActorError(f"rollout engine {number} failed: no progress for 20 seconds (rollout.timeout)", "hang")
        try:
            if strike is not None and strike.how == "dies midway":
                with mock.patch.object(self.objects[number], "_take", _die):
                    await super().call_one(number, method, *args)
            answer = await super().call_one(number, method, *args)
        except SyncError as error:
            raise failed_with(error, number) from error
        except SystemExit:
            self.dead.add(number)
            raise died from None
        if strike is not None and strike.how == "dies late":
            self.dead.add(number)
            raise died
        return strike.how(answer) if strike is not None and callable(strike.how) else answer

    def _due(self, number: int, method: str) -> Strike | None:
        for index, strike in enumerate(self.strikes):
            if strike.method != method or strike.engine not in (None, number):
                continue
            self.count[index, strike.engine] = count = self.count.get((index, strike.engine), 0) + 1
            if strike.nth <= count < strike.nth + strike.times:
                self.struck += 1
                return strike
        return None


def failed_with(error: SyncError, number: int) -> ActorError:
    """As ActorGroup raises what an actor has reported."""
    report = mock.Mock(message=f"SyncError: {error}", is_consequence=False, order=(False, False, 0.0))
    return ActorError(f"rollout engine {number} failed: SyncError: {error}", "failed", report)


def _die(part: Any) -> None:
    next(part.tensors())
    raise SystemExit


def run_struck(
    task: Path, run: Path, strikes: Sequence[Strike], *keys: str, kind: type[StruckGroup] = StruckGroup
) -> StruckGroup:
    """A run whose engines are struck; returns the engines."""
    groups: list[StruckGroup] = []

    def make(*args: Any) -> StruckGroup:
        groups.append(kind(*args))
        groups[-1].strikes = strikes
        return groups[-1]

    words = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", *KEYS, f"run.dir={run}", *EXACT, *keys]
    config = load_config([], words, RlConfig)
    patched = mock.patch.object(rl, "open_actors", partial(local_actors, kind=make))  # type: ignore[arg-type]
    with patched, mock.patch.object(StandalonePool, "turn", 60.0):  # a call ends when its requests are complete
        rl.run(config, RlOptions(device="cpu", world=1))
    (engines,) = [group for group in groups if group.name == "rollout engine"]
    return engines


def spoilt(**fields: Any) -> Callable[[Any], Any]:
    """An answer in whose completions these fields have other values."""

    def spoil(answer: Any) -> Any:
        finished, drawn = answer
        return {key: [replace(c, **fields) for c in completions] for key, completions in finished.items()}, drawn

    return spoil


def restarts_of(run: Path) -> list[float]:
    return [line[RESTARTS] for line in lines_of(run)]


def same_but_for_restarts(run: Path, unbroken: Path) -> None:
    lines, expected_lines = (
        [{k: v for k, v in line.items() if k not in (RESTARTS, "rollout/engines")} for line in lines_of(r)]
        for r in (run, unbroken)
    )
    assert lines == expected_lines
    assert rollouts_of(run) == rollouts_of(unbroken)
    weights, expected = weights_of(run), weights_of(unbroken)
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in weights)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("restarts"))


@pytest.fixture(scope="module")
def unbroken(task: Path) -> Path:
    assert run_struck(task, task / "unbroken", []).restarted == []
    assert restarts_of(task / "unbroken") == [0.0, 0.0, 0.0]
    return task / "unbroken"


TWO, APART = ["rollout.num_engines=2"], ["cluster.placement=disaggregated"]
ASLEEP = ["cluster.offload_during_rollout=[parameters,optimizer,gradients]"]
NAN = spoilt(logprobs=(float("nan"),) * 4, tokens=(5,) * 4, versions=((1, 4),))
CASES: dict[str, tuple[list[Strike], list[str]]] = {
    "one of two dies before it generates": ([Strike("advance", 2, "dies")], [*TWO, *APART]),
    "one of two dies before it answers": ([Strike("advance", 3, "dies late")], [*TWO, *APART]),
    "a lone engine dies before it answers": ([Strike("advance", 2, "dies late")], []),
    "a lone engine dies, and trainers sleep": ([Strike("advance", 2, "dies")], ASLEEP),
    "a lone engine dies while it loads": ([Strike("host", 1, "dies")], []),
    "one of two dies as a sync begins": ([Strike("receive", 3, "dies")], [*TWO, *APART]),
    "one of two dies within a sync": ([Strike("receive", 4, "dies midway")], [*TWO, *APART]),
    "a lone engine dies within a sync": ([Strike("receive", 2, "dies midway")], []),
    "a lone engine dies when a sync is done": ([Strike("receive", 2, "dies late")], []),
    "a new engine dies while it is filled": (
        [Strike("advance", 2, "dies"), Strike("receive", 3, "dies midway")], [*APART],
    ),
    "an engine dies as it falls asleep": ([Strike("sleep", 2, "dies")], []),
    "a lone engine hangs": ([Strike("advance", 2, "hangs")], []),
    "a lone engine raises": ([Strike("advance", 2, "raises")], []),
    "logprobs are not finite": ([Strike("advance", 2, NAN)], []),
    "ids are none of the vocabulary": (
        [Strike("advance", 2, spoilt(tokens=(5, 999), logprobs=(-1.0, -1.0), versions=((1, 2),)))], [*TWO, *APART],
    ),
    "an answer is no answer": ([Strike("advance", 2, lambda answer: "hello")], []),
    "an answer is of another request": (
        [Strike("advance", 2, lambda answer: (dict.fromkeys([-1], next(iter(answer[0].values()))), 1))], [],
    ),
}  # fmt: skip


# Each way to fail and each moment is in the suite, with one engine or with two.
TABLE = (
    "one of two dies before it answers", "one of two dies within a sync", "a lone engine dies when a sync is done",
    "an answer is no answer",
)  # fmt: skip


@pytest.mark.parametrize("name", pairs([(name,) for name in CASES if name not in TABLE], [(name,) for name in TABLE]))
def test_a_run_whose_engine_fails_is_the_unbroken_one(name: str, task: Path, unbroken: Path) -> None:
    strikes, keys = CASES[name]
    run = task / name.replace(" ", "-")
    engines = run_struck(task, run, strikes, *keys)
    assert engines.struck == len(engines.restarted) == len(strikes)
    assert sum(restarts_of(run)) == len(strikes)
    same_but_for_restarts(run, unbroken)


ENDS: dict[str, tuple[Strike, list[str], str, str]] = {
    "an engine keeps dying": (
        Strike("host", 1, "dies", times=9), ["rollout.restarts=2"], "killed",
        r"rollout engine 0 has failed 3 times within 3600 s, and rollout.restarts is 2. The last error:\n"
        "rollout engine 0 died",
    ),
    "an engine keeps dying in syncs": (
        Strike("receive", 2, "dies", times=9), ["rollout.restarts=1"], "killed",
        r"rollout engine 0 has failed 2 times .*\nrollout engine 0 died",
    ),
    "one request is fatal": (
        Strike("advance", 2, "raises", times=9), ["rollout.restarts=1", "rollout.num_engines=4", *APART], "failed",
        r"2 engines have failed while they worked on .* within 3600 s, and rollout.restarts is 1.*\n.*boom",
    ),
    "engines are not replaced": (
        Strike("advance", 2, "dies"), ["rollout.restarts=0"], "killed", "^rollout engine 0 died",
    ),
    "a sync that fails for no engine's fault": (
        Strike("receive", 2, "raises"), ["rollout.restarts=0"], "failed", "boom",
    ),
}  # fmt: skip


@pytest.mark.covers("rollout.restarts")
@pytest.mark.parametrize("name", ENDS)
def test_a_run_whose_engines_keep_failing_ends_with_the_last_error(name: str, task: Path) -> None:
    strike, keys, kind, message = ENDS[name]
    with pytest.raises(ActorError, match=message) as error:
        run_struck(task, task / name.replace(" ", "-"), [strike], *keys)
    assert error.value.kind == kind


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_engines_that_fail_at_random_change_nothing(seed: int, task: Path, unbroken: Path) -> None:
    """A short soak; tests/faults/test_soak.py has real processes."""
    chance = random.Random(seed)
    ways: dict[str, Sequence[Any]] = {
        "advance": ("dies", "dies late", "hangs", "raises", NAN, lambda answer: "hello"),
        "receive": ("dies", "dies midway", "dies late"),
    }
    strikes, taken = list[Strike](), set[tuple[str, int]]()
    while len(strikes) < 12:
        method = chance.choice([*ways])
        nth = chance.randrange(1, 16)
        if (method, nth) not in taken:  # one strike hides another of the same call
            taken.add((method, nth))
            strikes.append(Strike(method, nth, chance.choice(ways[method])))
    run = task / f"random-{seed}"
    engines = run_struck(task, run, strikes, *TWO, *APART, "rollout.restarts=50")
    assert engines.struck >= 8 and sum(restarts_of(run)) == len(engines.restarted) >= 8
    same_but_for_restarts(run, unbroken)


@pytest.mark.covers("rollout.restart_window")
def test_restarts_that_are_long_ago_do_not_count(task: Path, unbroken: Path) -> None:
    strikes, keys = [Strike("advance", 2, "dies", times=3)], ["rollout.restarts=1", "rollout.restart_window=1e-6"]
    run_struck(task, task / "long-ago", strikes, *keys)
    assert sum(restarts_of(task / "long-ago")) == 3
    same_but_for_restarts(task / "long-ago", unbroken)


def test_what_is_no_completion_is_refused() -> None:
    request = Request("17.0", (5, 6), (1, 2), SamplingParams(3))
    good = Completion((4, 9), (-0.5, 0.0), "end", ((3, 1), (4, 1)))
    require_completions(request, [good, good], 10)
    for wrong, message in (
        ([good], "1 completions of 17.0 for 2 seeds"),
        ([good, replace(good, tokens=(4, 10))], "token 10 of 17.0"),
        ([good, replace(good, tokens=(4, -1))], "token -1 of 17.0"),
        ([good, replace(good, tokens=(4, 9.0))], "token 9.0 of 17.0"),
        ([good, replace(good, logprobs=(-0.5, float("nan")))], "logprob nan"),
        ([good, replace(good, logprobs=(-0.5, float("-inf")))], "logprob -inf"),
        ([good, replace(good, logprobs=(-0.5, 0.7))], "logprob 0.7"),
        ([good, replace(good, kept_logmass=(0.0, float("nan")))], "logprob nan"),
        ([good, replace(good, logprobs=(-0.5,))], "1 logprobs"),
        ([good, replace(good, versions=((3, 1),))], "for 2 tokens"),
        ([good, replace(good, tokens=(), logprobs=(), versions=())], "0 tokens of 17.0"),
        ([good, replace(good, tokens=(1,) * 4, logprobs=(-1.0,) * 4, versions=((3, 4),))], "room for 3"),
    ):
        with pytest.raises(ValueError, match=message):
            require_completions(request, wrong, 10)  # type: ignore[arg-type]


class Sides:
    """Trainers and two engines, in place of actors; notes who gets which version."""

    name, can_restart = "rollout engine", True

    def __init__(self) -> None:
        self.sent: list[tuple[int, tuple[str, ...]]] = []
        self.died = set[int]()

    def __len__(self) -> int:
        return 2

    async def restart(self, number: int) -> None:
        self.died.discard(number)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        if method == "send":
            self.sent.append((args[0], args[1]))
            return [Synced(args[0], 1, 1, 0.1)]
        return [{f"hf-{number}": [Ticket("nowhere", 1, "key", f"hf-{number}")] for number in range(2)}]

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        if number in self.died:
            raise ActorError(f"rollout engine {number} died", "killed")
        if method == "advance":
            completion = Completion((5,), (-0.5,), "end", ((1, 1),))
            return {key: [completion] * len(request.seeds) for key, request in args[0].items()}, 1
        return {"host": "here", "devices": [], "torch_version": "2.13.0"}.get(method)


@pytest.mark.parametrize("trains", [False, True])
def test_while_trainers_train_a_new_engine_waits_for_the_next_sync(trains: bool) -> None:
    """Their weights are between two versions then; otherwise it gets those of the last sync, alone."""

    async def play() -> tuple[list[tuple[int, tuple[str, ...]]], int]:
        sides: Any = Sides()
        restarts = RestartBudget(3, 60.0, "rollout.restarts", show=lambda text: None)
        pool = StandalonePool(sides, sides, restarts, vocab_size=9, timeout=1.0)
        await pool.open()
        await pool.sync(1)
        if trains:
            await pool.hold()
        sides.died.add(1)
        requests = [Request(f"{n}", (1,), (n,), SamplingParams(1)) for n in range(6)]
        answers = await asyncio.gather(*map(pool.generate, requests))
        await asyncio.sleep(0.2)
        await pool.sync(2)
        await pool.close()
        return sides.sent, len(answers)

    sent, answered = asyncio.run(play())
    alone = [] if trains else [(1, ("hf-1",))]
    assert sent == [(1, ("hf-0", "hf-1")), *alone, (2, ("hf-0", "hf-1"))] and answered == 6


class Forgetful(Sides):
    """Engines that keep what they were asked until they may answer. A sync in which one dies makes both forget."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[dict[int, Request]] = [{}, {}]
        self.answers, self.fails = False, False

    async def restart(self, number: int) -> None:
        await super().restart(number)
        self.jobs[number] = {}

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        if method == "send" and self.fails:
            self.fails, self.jobs[0] = False, {}
            self.died.add(1)
            return [SyncFailure("hf-1 has died", "hf-1", late=False)]
        return await super().call_all(method, *args)

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        if method == "receive" and self.fails:
            await asyncio.sleep(0.05)
        if method == "end":
            self.jobs[number] = {}
        if method != "advance" or number in self.died:
            return await super().call_one(number, method, *args)
        assert not self.jobs[number].keys() & args[0].keys(), "asked twice"
        self.jobs[number] |= args[0]
        await asyncio.sleep(0.01)
        if not self.answers:
            return {}, 0
        jobs, self.jobs[number] = self.jobs[number], {}
        return await super().call_one(number, method, jobs)


def test_an_abort_leaves_no_request_of_an_engine_that_dies_meanwhile() -> None:
    async def play() -> Any:
        sides: Any = Forgetful()
        restarts = RestartBudget(3, 60.0, "rollout.restarts", show=lambda text: None)
        pool = StandalonePool(sides, sides, restarts, vocab_size=9, timeout=1.0)
        await pool.open()
        await pool.sync(1)
        asking = asyncio.ensure_future(pool.generate(Request("a", (1,), (5,), SamplingParams(1))))
        await asyncio.sleep(0.03)
        sides.died |= {0, 1}
        sides.answers = True
        await pool.abort()
        (outcome,) = await asyncio.wait_for(asyncio.gather(asking, return_exceptions=True), 5.0)
        await asyncio.sleep(0.05)
        assert not pool._waiting and not pool._running and pool.drawn == 0
        await pool.close()
        return outcome

    assert isinstance(asyncio.run(play()), asyncio.CancelledError)


def test_requests_under_way_begin_again_after_a_sync_that_failed() -> None:
    """With cluster.max_staleness, engines work when weights change; each request is answered, and once."""

    async def play() -> tuple[int, list[tuple[int, tuple[str, ...]]]]:
        sides: Any = Forgetful()
        pool = StandalonePool(
            sides, sides, RestartBudget(3, 60.0, "rollout.restarts", show=lambda text: None), vocab_size=9, timeout=1.0
        )
        await pool.open()
        await pool.sync(1)
        requests = [Request(f"{n}", (1,), (n,), SamplingParams(1)) for n in range(6)]
        answers = [asyncio.ensure_future(pool.generate(request)) for request in requests]
        await asyncio.sleep(0.1)
        assert [len(jobs) for jobs in sides.jobs] == [3, 3]
        sides.fails = True
        await pool.sync(2)
        await asyncio.sleep(0.1)
        sides.answers = True
        done = await asyncio.wait_for(asyncio.gather(*answers), 5.0)
        await pool.close()
        return len(done), sides.sent

    answered, sent = asyncio.run(play())
    assert answered == 6 and sent == [(1, ("hf-0", "hf-1")), (2, ("hf-0", "hf-1"))]


# ---------------------------------------------------------------- engines that join and leave


class ComingGroup(StruckGroup):
    """Engines that join when the cluster has room for them: from the nth call of a method on any engine on. calls: of
    each method, over all engines."""

    room: tuple[str, int] = ("", 0)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.came: list[int] = []

    async def join(self, number: int) -> None:
        while self.calls.get(self.room[0], 0) < self.room[1]:
            await asyncio.sleep(0.01)
        await super().restart(number)
        self.came.append(number)


COMING: dict[str, tuple[tuple[str, int], list[Strike], list[int]]] = {
    "from the start": (("", 0), [], [1, 2]),
    "while others generate": (("advance", 2), [], [1, 2]),
    "while weights are sent": (("receive", 2), [], [1, 2]),
    "and leaves while it generates": (("", 0), [Strike("advance", 2, "dies late", engine=1)], [1, 1, 2]),
    "and leaves within a sync": (("", 0), [Strike("receive", 2, "dies midway", engine=1)], [1, 1, 2]),
    "and leaves as it joins": (("", 0), [Strike("host", 1, "dies", engine=2)], [1, 2, 2]),
    "and stays away": (("", 0), [Strike("host", 1, "dies", engine=2, times=9)], [1, 2, 2]),
}


@pytest.mark.covers("cluster.engines")
@pytest.mark.parametrize("name", COMING)
def test_engines_that_join_and_leave_change_no_sample(name: str, task: Path, unbroken: Path) -> None:
    """One is there from the start, up to two more join. Metrics, samples and weights are those of one engine."""
    room, strikes, came = COMING[name]
    run = task / f"joins {name}".replace(" ", "-")
    keys = ["cluster.engines={min: 1, max: 3}", "rollout.restarts=1"]
    with mock.patch.object(ComingGroup, "room", room):
        engines = run_struck(task, run, strikes, *keys, kind=ComingGroup)
    assert isinstance(engines, ComingGroup) and sorted(engines.came) == came
    assert engines.struck == sum(min(strike.times, 2) for strike in strikes)
    counts = [line["rollout/engines"] for line in lines_of(run)]
    assert all(1 <= count <= 3 for count in counts)
    assert counts[-1] == (2 if name == "and stays away" else 3)
    same_but_for_restarts(run, unbroken)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.engines={min: 3, max: 2}"], "numbers from 1 to 4,096, the first not above the second"),
        (["cluster.engines={most: 3}"], "it must be {min: ..., max: ...}"),
        (["cluster.engines={min: 1, max: 2}", "rollout.num_engines=2"], "cluster.engines sets it"),
        (["cluster.engines={min: 1, max: 2}", "cluster.placement=colocated"], "cluster.engines sets it"),
        (["cluster.engines={min: 1, max: 2}", "rollout.restarts=0"], "set rollout.restarts=1 or more"),
        (["cluster.engines={min: 1, max: 2}", "cluster.devices={trainer: 1, rollout: 1}"], "are both set"),
        (["cluster.engines={min: 1, max: 2}", "rollout.engine=embedded"], "rollout.engine=embedded has no processes"),
    ],
)
def test_engines_that_cannot_join_are_refused(words: list[str], message: str) -> None:
    needed = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]", "rollout.engine=hf"]
    with pytest.raises(UserError, match=message):
        load_config([], [*needed, *words], RlConfig)


@pytest.mark.parametrize(("address", "bundles"), [(None, 4), ("10.0.0.1:6379", 2)])
def test_a_ray_that_does_not_grow_has_room_for_all_engines_that_may_join(
    address: str | None, bundles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would wait for ever on a machine with as many cores as the run needs at first."""
    needed = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]", "rollout.engine=hf"]
    words = [*needed, "cluster.engines={min: 1, max: 3}", *([f"cluster.address={address}"] if address else [])]
    asked: list[int] = []

    def session(address: str | None, reserved: Sequence[Any]) -> Any:
        asked.append(len(reserved))
        raise UserError("no Ray here")

    monkeypatch.setattr(actors, "ray_session", session)
    options = RlOptions(device="cpu", world=1)
    with (
        pytest.raises(UserError, match="no Ray"),
        actors.open_actors(load_config([], words, RlConfig), options, fill=True),
    ):
        """Not opened."""
    assert asked == [bundles]


def test_a_budget_counts_engines_one_by_one_and_the_ranks_of_a_model_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("weft.rl.restarts.time.monotonic", lambda: now[0])
    shown, error = list[str](), ActorError("reference rank 1 died", "killed")
    engines = RestartBudget(1, 60.0, "rollout.restarts", shown.append)
    engines.spend("engine", 0, error)
    engines.spend("engine", 1, error)
    with pytest.raises(ActorError, match=r"engine 1 has failed 2 times within 60 s, and rollout.restarts is 1\."):
        engines.spend("engine", 1, error)
    assert engines.metrics() == {"rollout/engine_restarts": 2.0}
    models = RestartBudget(1, 60.0, "cluster.frozen_restarts", shown.append)
    models.spend("reference rank", None, error)
    with pytest.raises(ActorError, match=r"reference ranks have failed 2 times .* cluster.frozen_restarts is 1\."):
        models.spend("reference rank", None, error)
    now[0] = 61.0
    models.spend("reference rank", None, error)  # the window is over
    assert shown[0].startswith("restart  engine 0 is replaced, restart 1 of 1 within 60 s (rollout.restarts): ")
    assert shown[2].startswith("restart  reference ranks are started again, restart 1 of 1 within 60 s (cluster.fro")
    assert len(shown) == 4
