"""What a run trains or reads beside its policy: a reference, which only reads, and a critic, which learns values.

Both live in the trainer's ranks, or in ranks of their own (reference.ranks, critic.ranks), which are a process group of
their own: then nobody takes turns with anybody, and a Trainer has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weft.checkpoint import rng
from weft.checkpoint.resume import fill_from
from weft.checkpoint.retention import complete_steps, step_folder
from weft.checkpoint.save import Saver
from weft.checkpoint.state import read_state
from weft.cluster.consistency import largest, require_agreement, versions
from weft.cluster.options import Device
from weft.cluster.process import Ranks, join, leave
from weft.config import to_dict
from weft.config.rl_schema import RlConfig
from weft.config.schema import CheckpointConfig
from weft.engine.contract import check_contract
from weft.engine.document import Document, first_sources
from weft.engine.engine import Engine, StepResult
from weft.objectives.value import ValueLoss
from weft.rl.documents import ReadSamples, TrainedSamples
from weft.rl.engines import critic_engine, opening_lines, reference_engine
from weft.rollout.types import Floats, Sample
from weft.telemetry import flight
from weft.telemetry.profiling import own_peak_memory_gib

Who = Literal["policy", "reference", "critic"]
CRITIC: Literal["critic"] = "critic"
READS: dict[Who, str] = {"policy": "old", "reference": "reference", "critic": "values"}  # the array of a sample


def set_readings(samples: Sequence[Sample], parts: Iterable[Mapping[Who, Mapping[int, Floats]]]) -> None:
    """Set the array of each sample that each of these has read. parts: what read_all of each rank returns."""
    for part in parts:
        for who, found in part.items():
            for index, values in found.items():
                setattr(samples[index], READS[who], values)


def start_rank(config: RlConfig, device: Device) -> Ranks:
    """Join the process group of this kind of rank, whose config and versions have to be one."""
    ranks = join(device, config.train.timeout)
    flight.watch(config.train.timeout)
    keys = {f"{section}.{key}": str(v) for section, values in to_dict(config).items() for key, v in values.items()}
    require_agreement(keys | versions(), ranks.group)
    flight.at("load")
    return ranks


def own_ranks(config: RlConfig) -> dict[Who, int]:
    """Number of ranks of a reference or critic that has ranks of its own."""
    wanted: dict[Who, int | None] = {
        "reference": config.reference.ranks if config.rl.kl > 0 else None,
        "critic": config.critic.ranks if config.rl.advantage == "gae" else None,
    }
    return {who: count for who, count in wanted.items() if count is not None}


def critic_checkpoint(run: Path, step: int) -> Path:
    """Of a step of the run: with the policy's, or of ranks of its own."""
    own = step_folder(run / CRITIC / "checkpoints", step)
    return own if own.is_dir() else step_folder(run / "checkpoints", step) / CRITIC


def steps_of_all(run: Path) -> list[int]:
    """Steps whose checkpoints are whole, of the policy and of a critic in ranks of its own."""
    steps, critics = complete_steps(run / "checkpoints"), run / CRITIC / "checkpoints"
    if not critics.is_dir():
        return steps
    also = set(complete_steps(critics))
    return [step for step in steps if step in also or (step_folder(run / "checkpoints", step) / CRITIC).is_dir()]


def checkpoints_of(config: RlConfig) -> CheckpointConfig:
    """One more is kept where two groups save by themselves: a step of which only one is whole is none."""
    own = config.checkpoint
    return replace(own, keep=own.keep + 1) if own.keep is not None and CRITIC in own_ranks(config) else own


def settle_step(engine: Engine, saver: Saver | None) -> float:
    """After a step: the largest peak memory of a rank, in GiB; raises where the saver of any rank has failed."""
    flight.at("record")
    failed = saver is not None and saver.failed
    memory, any_failed = largest([own_peak_memory_gib(engine.device), failed], engine.mesh.world_group, engine.device)
    if any_failed and saver is not None:
        saver.raise_failure()
    return memory


class Values:
    """A critic: read and trained."""

    def __init__(self, engine: Engine, config: RlConfig) -> None:
        self.engine, self.config = engine, config
        self._checked = False

    def train(self, documents: Sequence[Document], share: float) -> dict[str, object]:
        """A step over the samples that the policy is trained on; what the metrics say of it. share: of critic.lr."""
        engine = self.engine
        plan, own = engine.deal(documents)
        metrics = engine.accumulate(plan, own, ValueLoss(self.config.critic.clip))
        result: StepResult = engine.apply(self.config.critic.lr * share)
        if not self._checked:
            check_contract(engine)
            self._checked = True
        return {**metrics, "critic/grad_norm": result.grad_norm, "critic/skipped": result.skipped}


class Aside:
    """One rank of a reference's, or of a critic's own ranks. Every method is called on all of them together."""

    def __init__(self, config: RlConfig, who: Who, device: Device = "auto", *, fill: bool = True) -> None:
        """fill: False where a checkpoint will fill a critic's weights."""
        self.config, self.who = config, who
        self.ranks = start_rank(config, device)
        reference = reference_engine(config, self.ranks) if who == "reference" else None
        critic = critic_engine(config, self.ranks, fill=fill) if who == "critic" else None
        engine = reference or critic
        assert engine is not None
        self.engine, self.values = engine, None if critic is None else Values(critic, config)
        rng.seed_rank(config.train.seed, engine.mesh.loss_rank)
        self.saver: Saver | None = None

    def describe(self) -> list[str]:
        """What the run's opening says of it."""
        mine = (self.engine, None) if self.values is None else (None, self.engine)
        count, line = self.ranks.world, opening_lines(self.config, *mine)[-1]
        return [f"{line}; on {count} rank{'s' * (count > 1)} of its own"]

    def open_run(self, folder: str, constants: Mapping[str, Any], last: int = 0) -> None:
        """As the trainers do (Trainer.open_run); a reference has nothing to go on from."""
        run = Path(folder)
        flight.in_run(run)
        if self.values is None:
            return
        if last:
            fill_from(self.engine, read_state(critic_checkpoint(run, last)), self.config.train.seed, command="rl")
        (run / CRITIC).mkdir(exist_ok=True)
        kept, timeout = checkpoints_of(self.config), self.config.train.timeout
        self.saver = Saver(self.engine, run / CRITIC, kept, constants, last, command="rl", timeout=timeout)

    def read_all(self, whose: Sequence[Who], samples: Sequence[Sample]) -> dict[Who, dict[int, Floats]]:
        """What it reads of the samples that this rank was dealt."""
        return {self.who: readout(self.engine, samples, "logprob" if self.values is None else "value")}

    def update(self, samples: Sequence[Sample], number: int, steps: int, share: float) -> dict[str, object]:
        """A critic's step beside the policy's optimizer step `number`; what the metrics say of it."""
        assert self.values is not None
        documents = TrainedSamples(samples, self.config)
        if not documents:  # on every rank alike
            return {}
        flight.step(number, steps, first_sources(documents, range(len(documents))), len(documents))
        metrics = self.values.train(documents, share)
        memory = settle_step(self.engine, self.saver)
        return {**metrics, "critic/peak_memory_gib": memory}

    def save(self, step: int, progress: Mapping[str, Any]) -> list[str]:
        """As the trainers do; into RUN/critic/checkpoints."""
        assert self.saver is not None
        flight.at("save")
        self.saver.save(step, progress)
        return [f"critic: {text}" for text in self.saver.take_news()]

    def finish(self) -> list[str]:
        """Wait for the last save; news."""
        assert self.saver is not None
        flight.at("save")
        self.saver.finish()
        return [f"critic: {text}" for text in self.saver.take_news()]

    def ending(self, error: BaseException) -> None:
        """As the trainers do."""
        if self.saver is not None:
            self.saver.end(error)

    def close(self) -> None:
        """Leave the process group."""
        leave()


def readout(engine: Engine, samples: Sequence[Sample], what: str, routes: bool = False) -> dict[int, Floats]:
    """[T] of this rank's samples; zero where the policy did not draw."""
    flight.at("logprobs")
    plan, own = engine.deal(ReadSamples(samples, routes))
    read = engine.readout(plan, own, (what,))
    return {i: np.where(samples[i].sampled, found[what].numpy(), 0).astype(np.float32) for i, found in read.items()}
