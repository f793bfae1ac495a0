"""`weft rl` in this process: trainer and engines are objects in threads of their own, in place of Ray's actors.

All else is the real thing: the controller's loop, the trainer with its engine and its checkpoints, weight sync.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pyarrow.parquet as pq
import torch
import transformers
from safetensors.torch import load_file

from examples.make_arithmetic_demo import make_model, make_tokenizer, problems, write
from tests.support.contract_server import ContractServer
from weft.config.conditions import SERVERS
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.image_opener import image_opener
from weft.errors import ActorError
from weft.inference.records import FOLDER, rollout_files
from weft.inference.standalone import Standalone
from weft.launch import flight
from weft.launch.options import RlOptions
from weft.launch.process import leave
from weft.launch.ray_actors import ActorGroup, gather_calls
from weft.recipes import rl
from weft.rl.actors import Actors, _make_reference_critic
from weft.rl.reference_critic import own_ranks
from weft.rl.trainer import TrainerRank

KEYS = [
    "model.init=random", "rl.prompts_per_step=2", "rl.group_size=3", "rollout.max_prompt_tokens=6",
    "rollout.max_new_tokens=4",
    "step.max_tokens_per_device=64", "optimizer.lr=1e-2", "schedule.name=constant", "schedule.warmup_steps=0",
    "rl.reward=[length]", "data.columns={answer: completion}",
    "checkpoint.every=1", "checkpoint.async=false",
]  # fmt: skip
# What differs from run to run, whatever is trained.
CLOCKS = ("tokens_per_second", "memory_gib", "mfu", "sync/gb_per_second")
Hook = Callable[[str, int], None]  # is told of each call of an actor: method, and how often it was called before


def make_task(folder: Path) -> Path:
    """A model of one layer, and one of two, 9 additions to learn from and 3 to hold out."""
    (folder / "adder").mkdir()
    make_tokenizer(folder / "adder")
    make_model(folder / "adder")
    shrink(folder / "adder", 1)
    shutil.copytree(folder / "adder", folder / "adder-2")
    shrink(folder / "adder-2", 2)
    write(folder / "additions.jsonl", problems()[:9])
    write(folder / "held-out.jsonl", problems()[9:12])
    return folder


def write_reward_model(base: Path, target: Path, seed: int, labels: int = 1) -> None:
    """A random reward model with the config and the tokenizer of a model at `base`."""
    shutil.copytree(base, target)
    config = transformers.AutoConfig.from_pretrained(base)
    config.num_labels, config.initializer_range = labels, 0.2
    torch.manual_seed(seed)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(target)


def write_teacher(base: Path, target: Path) -> None:
    """A model with the config and the tokenizer of one at `base`, which is yet to be drawn."""
    shutil.copytree(base, target)
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(base)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)


def shrink(model: Path, layers: int) -> None:
    """Make a model that is yet to be drawn narrow, with so many layers."""
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    config |= {"hidden_size": 32, "intermediate_size": 64}
    (model / "config.json").write_text(json.dumps(config))


def start(task: Path, run: Path, *overrides: str, hook: Hook | None = None, **options: Any) -> RlConfig:
    """A whole run of weft rl. more: keys. options: of the command line."""
    resume = options.pop("resume", False)
    files = [str(run / "config.yaml")] if resume else []
    words = [f"model.path={task}/adder", f"data.path={task}/additions.jsonl", *KEYS]
    config = load_config(files, [*([] if resume else words), f"run.dir={run}", *overrides], RlConfig)
    run_config(config, resume=resume, hook=hook, **options)
    return config


def run_config(config: RlConfig, *, resume: bool = False, hook: Hook | None = None, **options: Any) -> None:
    """The same with a config that was loaded."""
    with mock.patch.object(rl, "open_actors", partial(local_actors, hook=hook)):
        rl.run(config, RlOptions(device="cpu", world=1, resume=str(config.run.dir) if resume else None, **options))


class LocalGroup:
    """An ActorGroup of objects in this process; each is called in one thread, as an actor is."""

    def __init__(self, name: str, make: Sequence[Callable[[], Any]], hook: Hook | None = None) -> None:
        self.name, self._make, self._hook = name, list(make), hook
        self.objects: list[Any] = [None] * len(make)
        self._threads = [ThreadPoolExecutor(1) for _ in make]
        self.calls: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.objects)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        return await gather_calls([self.call_one(number, method, *args) for number in range(len(self))])

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        if self._hook is not None:
            self._hook(method, self.calls.get(method, 0))
        self.calls[method] = self.calls.get(method, 0) + 1
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[number], self._call, number, method, args)

    def _call(self, number: int, method: str, args: Any) -> Any:
        if self.objects[number] is None:
            self.objects[number] = self._make[number]()
        return getattr(self.objects[number], method)(*args)

    can_restart = True

    async def restart(self, number: int | None = None) -> None:
        for n in range(len(self)) if number is None else [number]:
            self.objects[n], self._threads[n] = None, ThreadPoolExecutor(1)

    async def join(self, number: int) -> None:
        await self.restart(number)

    def blamed(self, error: ActorError) -> ActorError:
        return error

    def save_evidence(self, run: Path) -> None:
        """There is none."""

    def end(self, number: int | None = None) -> None:
        for thread in self._threads if number is None else [self._threads[number]]:
            thread.shutdown()


@contextmanager
def local_actors(
    config: RlConfig, options: RlOptions, *, fill: bool, hook: Hook | None = None, kind: type[LocalGroup] = LocalGroup
) -> Iterator[Actors]:
    """What weft.rl.actors.open_actors gives, without Ray."""
    trainers = kind("trainer rank", [partial(TrainerRank, config, "cpu", fill=fill)], hook)
    models = {
        role: kind(
            f"{role.replace('_', ' ')} rank", [partial(_make_reference_critic, config, options, role, fill, 0)], hook
        )
        for role in own_ranks(config)
    }
    engines = None
    if config.rollout.engine in SERVERS:
        servers = config.cluster.engines.get("max", config.rollout.count)
        engines = kind("rollout engine", [partial(ContractServer, config)] * servers, hook)
    elif config.rollout.engine == "hf":
        opener = image_opener(config.model.path, config.data)
        exact = config.rl.on_policy == "exact"
        make = partial(Standalone, config.model.path, config.lora, dtype=torch.float32, opener=opener, exact=exact)
        engines = kind("rollout engine", [make] * config.cluster.engines.get("max", config.rollout.count), hook)
    try:
        model_groups = {role: cast(ActorGroup, group) for role, group in models.items()}
        yield Actors(
            cast(ActorGroup, trainers), model_groups, cast(ActorGroup, engines) if engines is not None else None
        )
    finally:
        for group in filter(None, (trainers, engines, *models.values())):
            group.end()
        flight.recorder.close()
        leave()


# ---------------------------------------------------------------- what a run has left


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without times and memory."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            key: value
            for key, value in line.items()
            if key not in CLOCKS and "seconds" not in key and not key.startswith("time/") and "_time/" not in key
        }
        for line in entries
    ]


def rollouts_of(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Every row of RUN/rollouts without its times, by rollout step."""
    return {
        step: pq.read_table(path).drop_columns("times").to_pylist()
        for step, path in rollout_files(run / FOLDER).items()
    }


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, a critic's too."""
    files = sorted((run / "checkpoints/latest").rglob("model*.safetensors"))
    return {f"{file.parent.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


def same_run(run: Path, second: Path) -> None:
    """Both have done the same, to the last bit."""
    assert lines_of(run) == lines_of(second)
    assert rollouts_of(run) == rollouts_of(second)
    weights, other_weights = weights_of(run), weights_of(second)
    assert [name.partition(" ")[2] for name in weights] == [name.partition(" ")[2] for name in other_weights]
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), other_weights.values(), strict=True))
