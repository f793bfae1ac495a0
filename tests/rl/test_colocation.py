"""Trainers and engines on the same devices take turns: what is trained is the same, whoever sleeps meanwhile; and what
becomes of completions that are being written when weights change. Without Ray: what actors do, this process does."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import local_rl
from tests.support.cases import saved_model
from tests.support.pool import run
from tests.support.rl_samples import sample
from tests.support.toy_tokenizers import byte_tokenizer
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.engine.sleep import PARTS, Offloader, Part
from weft.inference.base import Request, SamplingParams
from weft.inference.standalone import Standalone
from weft.inference.types import Sample
from weft.rl import batch_pool, placement
from weft.rl.batch_pool import EmbeddedPool, StandalonePool
from weft.rl.colocation import DeviceSharing, sleeping_parts
from weft.rl.restarts import RestartBudget
from weft.rl.trainer import TrainerRank

KEYS = [
    "rl.reward=[length]", "rl.correction=none", "rl.advantage=gae", "rl.advantage_norm=none", "rl.kl_coef=0.1",
    "rl.group_size=4",
    "optimizer.lr=0.01", "critic.lr=0.01",
    "rollout.max_new_tokens=9", "rollout.max_prompt_tokens=9",
]  # fmt: skip
PROMPT = (5, 6, 7)
STEPS = 3


class LocalActor:
    """As ActorGroup has it, of one actor, which is an object of this process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __len__(self) -> int:
        return 1

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self.actor, method), *args)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        return [await self.call_one(0, method, *args)]


def open_switch(
    folder: Path, engine: str, shared: bool, parts: tuple[Part, ...], **keys: Any
) -> tuple[TrainerRank, DeviceSharing]:
    path = str(folder / "model")
    words = [f"model.path={path}", "data.path=owner/data", f"rollout.engine={engine}", *KEYS]
    config = load_config([], [*words, *(f"{key}={value}" for key, value in keys.items())], RlConfig)
    trainer = TrainerRank(config, "cpu")
    trainer.folder = folder
    trainers: Any = LocalActor(trainer)
    if engine == "embedded":
        return trainer, DeviceSharing(EmbeddedPool(trainers), [trainers] * shared, parts=parts)
    standalone: Any = LocalActor(Standalone(path, dtype=torch.float32))
    keep = config.rollout.on_weight_update == "continue"
    pool = StandalonePool(
        standalone, trainers, RestartBudget(0, 1.0, "rollout.restarts"), vocab_size=1000, timeout=60.0, keep=keep
    )
    asyncio.run(pool.open())
    return trainer, DeviceSharing(pool, [trainers] * shared, parts=parts)


def as_samples(completions: Any) -> list[Sample]:
    samples = []
    for number, completion in enumerate(completions):
        arrays = {"rollout_logprobs": completion.logprobs, "advantages": [(-1.0) ** number] * len(completion.tokens)}
        arrays["returns"] = [0.5] * len(completion.tokens)
        drawn = sample(number, len(completion.tokens), 1.0, **arrays)
        drawn.tokens[drawn.sampled] = completion.tokens
        samples.append(drawn)
    return samples


async def train(trainer: TrainerRank, switch: DeviceSharing, asleep: list[Any]) -> list[dict[str, object]]:
    """The recipe's order of things. asleep: takes what sleeps while engines generate, then while trainers train."""
    lines = []
    await switch.to_rollouts(0)
    for number in range(1, STEPS + 1):
        asleep.append([list(engine.asleep) for engine in (trainer.engine, trainer.reference, trainer.critic) if engine])
        seeds = tuple(range(10 * number, 10 * number + 4))
        samples = as_samples(await switch.engine.generate(Request(f"{number}", PROMPT, seeds, SamplingParams(9))))
        await switch.to_training()
        for role, name in (("policy", "old_logprobs"), ("reference", "ref_logprobs"), ("critic", "values")):
            for index, values in trainer.read(role, samples).items():  # type: ignore[arg-type]
                setattr(samples[index], name, values)
        lines.append(trainer.update(samples, number, STEPS, 1, 0.01).line)
        await switch.to_rollouts(number)
        async with switch.trainers_awake(back=number < STEPS):
            trainer.engine.require_awake(*PARTS)
    return lines


def trained(
    folder: Path, engine: str, shared: bool, parts: tuple[Part, ...], plant: str = ""
) -> tuple[list[Any], dict[str, Tensor], list[Any], set[str]]:
    """(loss and norm of each step, weights, what slept, phases)."""
    trainer, switch = open_switch(folder, engine, shared, parts)
    asleep: list[Any] = []
    wake = Offloader.wake

    def wrong(offloader: Offloader, part: Part) -> int:
        if part == "optimizer" and plant == "stays asleep":
            return 0
        waiting = offloader._asleep[part]
        if part == "optimizer" and plant == "wakes empty":
            for chunk in waiting.allocation.chunks:
                chunk.zero_()
        return wake(offloader, part)

    with patch.object(Offloader, "wake", wrong) if plant else nullcontext():
        lines = asyncio.run(train(trainer, switch, asleep))
    trainer.engine.wake()
    weights = {name: tensor.clone() for name, tensor in trainer.engine.tensors()}
    trainer.sender and trainer.sender.close()
    keys = ("loss", "grad_norm", "value_loss", "critic/grad_norm")
    return [[line.get(key) for key in keys] for line in lines], weights, asleep, set(switch.take_seconds())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    shutil.copytree(saved_model("llama", vocab_size=264), folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def separate(folder: Path) -> tuple[Any, ...]:
    """Engine and trainer on devices of their own, neither of which ever sleeps."""
    (result,) = run(1, trained, folder, "hf", False, ())
    return tuple(result)


@pytest.mark.parametrize(("engine", "parts"), [("hf", PARTS), ("hf", ()), ("embedded", PARTS)])
def test_what_is_trained_is_the_same_whoever_sleeps(
    folder: Path, separate: tuple[Any, ...], engine: str, parts: tuple[Part, ...]
) -> None:
    (result,) = run(1, trained, folder, engine, True, parts)
    lines, weights, asleep, phases = result
    assert lines == separate[0] and all(torch.equal(value, separate[1][name]) for name, value in weights.items())
    assert all(set(keys) == set(parts) for step in asleep for keys in step)
    assert phases == {"sync", "sleep", "wake"} and separate[3] == {"sync"}


@pytest.mark.parametrize("plant", ["stays asleep", "wakes empty"])
def test_a_part_that_is_not_woken_is_seen(folder: Path, separate: tuple[Any, ...], plant: str) -> None:
    if plant == "stays asleep":
        with pytest.raises(AssertionError, match="optimizer are asleep: call wake"):
            run(1, trained, folder, "embedded", True, PARTS, plant)
        return
    ((lines, *_),) = run(1, trained, folder, "embedded", True, PARTS, plant)
    assert lines[0] == separate[0][0] and lines != separate[0]


@pytest.mark.covers("cluster.offload_during_rollout")
def test_which_parts_sleep() -> None:
    """On accelerators that are shared all of them, on CPU none, and what cluster.offload_during_rollout says."""
    needed = ["model.path=org/m", "data.path=org/d", "rl.reward=[math]"]

    def parts(device: str, *words: str) -> tuple[Part, ...]:
        return sleeping_parts(load_config([], [*needed, *words], RlConfig), device)

    assert parts("cuda") == PARTS and parts("cpu") == () and parts("cuda", "cluster.offload_during_rollout=[]") == ()
    assert parts("cpu", "cluster.offload_during_rollout=[gradients,optimizer]") == ("optimizer", "gradients")
    assert parts("cuda", "rollout.engine=hf", "cluster.placement=colocated") == PARTS
    assert parts("cuda", "rollout.engine=hf", "cluster.placement=disaggregated") == ()


# ---------------------------------------------------------------- unfinished completions


def synced_meanwhile(folder: Path, unfinished: str) -> tuple[list[Any], list[Any], list[float], int]:
    """Weights change while completions are written: (of the pool, of a fresh engine with the new weights alone, largest
    distance of each version's logprobs from what the trainer reads with its weights, tokens that the old ones drew)."""
    keys = {"rollout.on_weight_update": unfinished, "cluster.max_staleness": 1}
    trainer, switch = open_switch(folder, "hf", False, (), **keys)
    requests = [Request(f"{n}", (*PROMPT, n + 8), (10 * n, 10 * n + 1), SamplingParams(4 + 8 * n)) for n in range(3)]

    async def body() -> tuple[list[Any], list[Any]]:
        await switch.to_rollouts(0)
        engine = switch.engine
        futures = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await asyncio.wait({futures[0]})
        trainer.update(learnt, 1, 2, 1, 0.01)
        await switch.to_rollouts(1)
        answers = [await future for future in futures]
        return answers, [await engine.generate(request) for request in requests]

    learnt = as_samples([])
    learnt = [
        sample(n, 6, 1.0, advantages=[(-1.0) ** n] * 6, old_logprobs=[-1.0] * 6, values=[0.0] * 6) for n in range(2)
    ]
    for member in learnt:
        member.returns, member.ref_logprobs = member.values, member.old_logprobs
    before: list[Any] = []
    update = trainer.update

    def noting(*args: Any) -> Any:
        before.append({name: tensor.clone() for name, tensor in trainer.engine.tensors()})
        return update(*args)

    trainer.update = noting  # type: ignore[method-assign]
    with patch.object(batch_pool.StandalonePool, "turn", 0.0):  # one token of each at a time
        answers, fresh = asyncio.run(body())
    samples = as_samples([c for completions in answers for c in completions])
    prompts = [request.tokens for request in requests for _ in request.seeds]
    versions = []
    for member, prompt, completion in zip(samples, prompts, [c for cs in answers for c in cs], strict=True):
        member.tokens = np.array([*prompt, *completion.tokens])
        member.sampled = np.array([False] * len(prompt) + [True] * len(completion.tokens))
        member.rollout_logprobs = np.array([0.0] * len(prompt) + list(completion.logprobs), np.float32)
        versions.append(np.repeat([v for v, _ in completion.versions], [n for _, n in completion.versions]))
    distances = []
    for version in (1, 0):
        if version == 0:
            with torch.no_grad():
                for name, tensor in trainer.engine.tensors():
                    tensor.copy_(before[0][name])
        read = trainer.read("policy", samples)
        differences = [
            np.abs(read[i] - member.rollout_logprobs)[member.sampled][versions[i] == version]
            for i, member in enumerate(samples)
        ]
        distances.append(float(np.concatenate(differences).max(initial=0.0)))
    assert trainer.sender is not None
    trainer.sender.close()
    return answers, fresh, distances, int(sum((v == 0).sum() for v in versions[2:]))


@pytest.mark.covers("rollout.on_weight_update")
@pytest.mark.parametrize("unfinished", ["continue", "drop"])
def test_completions_that_are_unfinished_when_weights_change(folder: Path, unfinished: str) -> None:
    ((answers, fresh, distances, old),) = run(1, synced_meanwhile, folder, unfinished)
    assert [len(completions) for completions in answers] == [2, 2, 2]
    for n, completions in enumerate(answers):  # none is lost, or longer than asked for
        assert all(len(c.tokens) == 4 + 8 * n == sum(count for _, count in c.versions) for c in completions)
    assert all(c.versions == ((0, 4),) for c in answers[0])
    assert max(distances) < 1e-5, distances
    if unfinished == "drop":
        assert old == 0 and [[c.tokens for c in cs] for cs in answers[1:]] == [
            [c.tokens for c in cs] for cs in fresh[1:]
        ]
        assert all(c.versions == ((1, len(c.tokens)),) for cs in answers[1:] for c in cs)
    else:
        assert all([v for v, _ in c.versions] == [0, 1] for cs in answers[1:] for c in cs) and old > 0


# ---------------------------------------------------------------- the recipe


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_rl.make_task(tmp_path_factory.mktemp("task"))


def test_a_run_in_turns_is_the_run_apart_and_auto_leaves_nothing_of_its_trial(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a held-out evaluation and a checkpoint between the steps, for which the trainers are woken."""
    keys = ["rollout.engine=hf", "train.steps=3", f"eval.path={task}/held-out.jsonl", "eval.every=1"]
    local_rl.start(task, tmp_path / "apart", *keys, "cluster.placement=disaggregated")
    monkeypatch.setattr(placement, "LONG", 1)
    local_rl.start(task, tmp_path / "auto", *keys, "cluster.offload_during_rollout=[parameters,optimizer,gradients]")
    local_rl.same_run(tmp_path / "auto", tmp_path / "apart")
    line = r"placed   (\w+): seconds of a rollout step: colocated ([\d.e-]+), disaggregated ([\d.e-]+)\n"
    match = re.search(line, capsys.readouterr().out)
    assert match is not None
    faster = "colocated" if float(match[2]) <= float(match[3]) else "disaggregated"
    assert match[1] == faster and f"  placement: {faster}\n" in (tmp_path / "auto/config.yaml").read_text()
    assert not (tmp_path / "auto/placement-trial").exists()
    run = tmp_path / "colocated"
    local_rl.start(
        task,
        run,
        *keys,
        "cluster.placement=colocated",
        "cluster.offload_during_rollout=[parameters,optimizer,gradients]",
    )
    local_rl.same_run(run, tmp_path / "apart")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all({"seconds/sleep", "seconds/wake", "seconds/sync"} <= line.keys() for line in lines)
