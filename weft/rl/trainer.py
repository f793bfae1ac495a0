"""One trainer rank of reinforcement learning: a plain Python object that Ray, or a test, calls.

Every method except `generate` is called on all ranks together, with the same arguments.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoint import rng
from weft.checkpoint.export import save_huggingface
from weft.checkpoint.resume import restore_engine
from weft.checkpoint.retention import step_folder
from weft.checkpoint.save import Saver
from weft.checkpoint.state import read_state
from weft.config.rl_schema import RlConfig, reward_models
from weft.data.encode import changed_files, load_tokenizer
from weft.data.image_opener import image_opener
from weft.engine.batch.document import first_sources
from weft.engine.batch.media import ImageRoom
from weft.engine.contract import check_contract
from weft.engine.engine import Engine
from weft.engine.losses.policy import PolicyLoss
from weft.engine.sleep import Part
from weft.engine.teachers import Teacher, with_teachers
from weft.inference.base import Request, Synced
from weft.inference.embedded import EmbeddedEngine
from weft.inference.generate import Numbered
from weft.inference.types import Floats, Sample
from weft.inference.weight_sync.protocol import SyncError, Ticket, device_memory
from weft.inference.weight_sync.sender import EngineTarget, Sender, SyncFailure, options_of
from weft.launch import flight
from weft.launch.consistency import check_shared
from weft.launch.machine import device_name
from weft.launch.options import Device
from weft.launch.process import leave
from weft.launch.timing import StepTimes
from weft.models.flops import Throughput, peak_flops
from weft.observe.opening import ModelOpening, model_opening
from weft.observe.recorder import StepOutcome, step_line
from weft.parallel.fsdp import DTYPES, time_collectives
from weft.rl.colocation import sleeping_parts
from weft.rl.documents import TrainedSamples
from weft.rl.exact import prove_exact
from weft.rl.model_engines import (
    check_images,
    critic_engine,
    note_on_prefixes,
    notes_on_generation,
    opening_lines,
    policy_config,
    reference_engine,
    teacher_engine,
)
from weft.rl.reference_critic import (
    CRITIC,
    Critic,
    Role,
    checkpoints_of,
    critic_checkpoint,
    finish_step,
    own_ranks,
    readout,
    start_rank,
)
from weft.rl.reward_models import Conversation, ConversationScorer, score_parts
from weft.rl.rewards.calls import RewardOutcome
from weft.rl.teacher import teacher_loss


@dataclass(frozen=True)
class UpdateResult:
    """The outcome of an optimizer step. line: of metrics.jsonl. old: index -> `old` [T], for samples that had none."""

    line: dict[str, object]
    old: dict[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class RankDevices:
    """The devices of a rank. host: its name. visible: CUDA_VISIBLE_DEVICES. uuids: of its CUDA device; empty on CPU."""

    host: str
    visible: str
    uuids: list[str]


class TrainerRank:
    """The policy on one rank, with teacher, and with reference, critic and reward models unless they have separate
    ranks. Trains, reads, scores, saves, and sends weights to rollout engines."""

    def __init__(self, config: RlConfig, device: Device = "auto", *, fill: bool = True) -> None:
        """fill: False if a checkpoint will fill the trained weights."""
        self.config = config
        self.ranks = start_rank(config, device)
        self.engine = Engine(policy_config(config), self.ranks, fill=fill)
        separate = own_ranks(config)
        has_reference = "reference" not in separate
        self.reference = reference_engine(config, self.ranks, shares_with=self.engine) if has_reference else None
        critic = None if CRITIC in separate else critic_engine(config, self.ranks, fill=fill, shares_with=self.engine)
        has_teacher = "teacher" not in separate
        self.teacher = teacher_engine(config, self.ranks, shares_with=self.engine) if has_teacher else None
        self.teacher_loss = None
        if self.teacher is not None and config.rl.teacher_in_loss:
            self.teacher_loss = teacher_loss(config.rl, self.teacher, self.engine, config.rollout.temperature)
        self.reward_models = {
            role: ConversationScorer(config, path, self.ranks, shares_with=self.engine)
            for role, path in reward_models(config.rl.reward).items()
            if role not in separate
        }
        self.critic, self.values = critic, None if critic is None else Critic(critic, config)
        rng.seed_rank(config.train.seed, self.engine.mesh.loss_rank)
        self.tokenizer = load_tokenizer(config.model.path)
        self.opener = image_opener(config.model.path, config.data)
        tokens = config.rollout.kv_cache_tokens
        self.embedded = EmbeddedEngine(self.engine, self.tokenizer, tokens, routes=True, opener=self.opener)
        self.throughput = Throughput(self.engine.ranks.world, peak_flops(self.engine.ranks.device))
        self.times = StepTimes(self.engine.device, self.ranks.world) if config.track.timing else None
        if self.times is not None and self.engine.device.type == "cpu":
            time_collectives(self.engine.module)
        self.saver: Saver | None = None
        self.sender: Sender | None = None
        self.folder: Path | None = None
        self._contract_checked = False

    # ------------------------------------------------------------ at start

    def describe(self) -> ModelOpening:
        """The first lines of a run about the model and its layout."""
        notes = notes_on_generation(self.config, self.engine.built.config)
        parts = sleeping_parts(self.config, self.engine.device.type)
        model = model_opening(self.config, self.engine, list(self._engines().values())[1:], parts)
        return replace(model, lines=[*notes, *model.lines, *note_on_prefixes(self.engine)]).followed_by(
            [
                *opening_lines(self.config, self.reference, self.critic, self.teacher),
                *(f"{scorer.line()}; in the trainer's ranks" for scorer in self.reward_models.values()),
            ]
        )

    def compute_dtype(self) -> str:
        """The compute dtype, such as "bf16"."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.engine.precision.compute)

    def device_name(self) -> str:
        """The name of this rank's accelerator, or of the processor."""
        return device_name(self.engine.device.type)

    def open_run(
        self, folder: str, token: str, constants: Mapping[str, Any], last: int, texts: Mapping[str, str]
    ) -> list[str]:
        """Enter the folder of a run and restore its checkpoint of optimizer step `last` (0: none); returns messages.
        token: content of the run's lock, by which each rank checks that it sees the same folder. constants: the
        constant part of every checkpoint's state. texts: further files of every checkpoint."""
        run = Path(folder)
        check_shared(run, token, self.ranks)
        flight.in_run(run)
        self.folder = run
        notes: list[str] = []
        if last:
            state = read_state(step_folder(run / "checkpoints", last))
            critics = {} if self.critic is None else {str(critic_checkpoint(run.resolve(), last)): self.critic}
            notes = restore_engine(self.engine, state, self.config.train.seed, critics, command="rl")
        texts = {**changed_files(self.config.model.path, self.config.data), **texts}
        other_engines: dict[str, Engine] = {} if self.critic is None else {CRITIC: self.critic}
        checkpoint = checkpoints_of(self.config)
        self.saver = Saver(
            self.engine, run, checkpoint, constants, last, texts=texts, further_engines=other_engines, command="rl",
            timeout=self.config.train.timeout,
        )  # fmt: skip
        return notes

    def check_images(self, samples: Sequence[tuple[str, int, int]]) -> None:
        """Raise UserError if a model cannot process these samples (model_engines.check_images)."""
        for scorer in self.reward_models.values():
            scorer.check_images(samples)
        check_images(self._engines(), samples)

    def image_room(self) -> ImageRoom:
        """The smallest image room of the models in these ranks."""
        return ImageRoom.smallest([engine.planner.image_room for engine in self._engines().values()])

    # ------------------------------------------------------------ rollouts

    def sync(self, version: int) -> Synced:
        """Copy the current weights to the embedded engine."""
        flight.enter("sync")
        began = time.perf_counter()
        tensors, copied = self.embedded.wake(version=version)
        return Synced(version, tensors, copied, time.perf_counter() - began)

    def prove_exact(self) -> str:
        """Returns a line to print. UserError if the embedded engine's logprobs differ from the trainer's."""
        flight.enter("logprobs")
        rollout, asleep = self.config.rollout, tuple(self.engine.asleep)
        self.engine.wake()  # the trainer must read the samples
        proof = prove_exact(self.engine, self.embedded, rollout.max_prompt_tokens, rollout.max_new_tokens)
        if asleep:
            self.engine.sleep(*asleep)
        return f"exact    {proof.tokens} tokens sampled for a check: the trainer's logprobs are bitwise equal"

    def generate(self, requests: Mapping[int, Request], seconds: float) -> tuple[Numbered, int]:
        """Completions from this rank's embedded engine (EmbeddedEngine.advance)."""
        flight.enter("generate")
        return self.embedded.advance(requests, seconds)

    def end(self) -> Numbered:
        """End the requests of this rank's embedded engine (EmbeddedEngine.end)."""
        return self.embedded.end()

    def sleep_engine(self) -> int:
        """Free the embedded engine's copy of the weights; returns its bytes."""
        return self.embedded.sleep()

    def sleep(self, parts: Sequence[Part], sends: bool = False) -> int:
        """Move these parts of all models to host memory; returns the moved bytes. sends: whether the policy's
        parameters stay, because a sync follows."""
        moved = 0
        for engine in self._engines().values():
            moving = [part for part in parts if not (sends and engine is self.engine and part == "parameters")]
            moved += engine.sleep(*moving) if moving else 0
        return moved

    def wake(self) -> int:
        """Bring back all sleeping parts, bit for bit; returns their bytes."""
        return sum(engine.wake() for engine in self._engines().values())

    def _engines(self) -> dict[Role, Engine]:
        """The engines of these ranks by role, the policy's first."""
        engines = {"policy": self.engine, "reference": self.reference, "teacher": self.teacher, CRITIC: self.critic}
        scoring = {role: scorer.engine for role, scorer in self.reward_models.items()}
        return {role: engine for role, engine in engines.items() if engine is not None} | scoring

    def devices(self) -> RankDevices:
        """The devices of this rank."""
        uuids = device_memory.devices(self.engine.device)
        return RankDevices(socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), uuids[:1])

    def open_sync(
        self,
        hosts: Mapping[str, str],
        workers: int,
        devices: Mapping[str, Sequence[str]] | None = None,
        torches: Mapping[str, str] | None = None,
    ) -> dict[str, list[Ticket]]:
        """Prepare to send weights to separate engines; returns each engine's tickets.

        hosts: engine -> address of its host. workers: processes per engine. devices: engine -> UUIDs of the CUDA
        devices that it sees. torches: engine -> version of its torch.
        """
        assert self.folder is not None, "call open_run() first"
        uuids, versions = devices or {}, torches or {}
        receivers = [
            EngineTarget(name, host, workers, uuids.get(name, ()), versions.get(name, ""))
            for name, host in hosts.items()
        ]
        if self.sender is not None:
            self.sender.close()
        self.sender = Sender(self.engine, receivers, options_of(self.config, self.folder))
        return self.sender.tickets

    def send(
        self, version: int, names: Sequence[str] | None = None, attempt: int | None = None
    ) -> Synced | SyncFailure:
        """Send the current weights (Sender.send); the engines receive at the same time. Returns a SyncFailure, the
        same on all ranks, if it fails. Parameters that sleep are awake meanwhile."""
        assert self.sender is not None
        asleep = "parameters" in self.engine.asleep
        if asleep:
            self.engine.wake("parameters")
        try:
            return self.sender.send(version, names, attempt)
        except SyncError as error:
            return SyncFailure(str(error), error.engine, error.late)
        finally:
            if asleep:
                self.engine.sleep("parameters")

    def export(self, folder: str, version: int) -> Synced:
        """Write the current weights to `folder` as a HuggingFace directory."""
        flight.enter("sync")
        began = time.perf_counter()
        save_huggingface(self.engine, Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        return Synced(version, len(self.engine.built.mappings), size, time.perf_counter() - began)

    # ------------------------------------------------------------ reading

    def read_all(self, roles: Sequence[Role], samples: Sequence[Sample]) -> dict[Role, dict[int, Floats]]:
        """Read the samples with several roles; see read()."""
        return {role: self.read(role, samples) for role in roles}

    def read(self, role: Role, samples: Sequence[Sample]) -> dict[int, Floats]:
        """Index -> [T] for this rank's samples: the policy's or reference's logprob of each sampled token, or the
        critic's value before the token."""
        engines = self._engines()
        if role == "policy":
            return readout(self.engine, samples, "logprob", self.opener, routes=True)
        with flight.computing(f"the {role}"):
            if role == "reference" and role not in engines:
                with self.engine.without_adapter():
                    return readout(self.engine, samples, "logprob", self.opener)
            return readout(engines[role], samples, "value" if role == CRITIC else "logprob", self.opener)

    def score(self, role: Role, parts: Sequence[Sequence[Conversation]]) -> list[list[RewardOutcome]]:
        """The outcomes of a reward model in these ranks for the conversations of each part (score_parts)."""
        with flight.computing(f"the {role.replace('_', ' ')}"):
            return score_parts(self.reward_models[role], parts)

    # ------------------------------------------------------------ training

    def update(self, samples: Sequence[Sample], number: int, steps: int, epoch: int, lr: float) -> UpdateResult:
        """One optimizer step over these samples. If they have no `old`, the current policy's logprobs serve as `old`
        and are returned for this rank's samples.

        number, steps: this step's number, and the run's last. lr: the policy's learning rate; the critic's is
        critic.lr x lr / optimizer.lr.
        """
        began = time.perf_counter()
        documents = TrainedSamples(samples, self.config, self.opener)
        if not documents:  # on every rank alike
            skipped = {"step": number, "epoch": epoch, "skipped": True, "reason": "no sample to train"}
            return UpdateResult({**skipped, **_NO_STEP})
        loss = PolicyLoss(
            self.config.rl, old_is_current=not documents.old_is_known, masked=documents.masked,
            branches=documents.branches, teacher=self.teacher_loss,
        )  # fmt: skip
        # Only the policy's step is timed: readouts and the critic pass through phases of the same names.
        with contextlib.nullcontext() if self.times is None else contextlib.closing(self.times.open()):
            flight.step(number, steps, first_sources(documents, range(len(documents))), len(documents))
            plan, local = self.engine.plan_step(documents)
            if self.teacher is not None and self.teacher_loss is not None:
                local = with_teachers([Teacher(self.teacher)], None, documents, local, self.engine)
            metrics, result = self.engine.step(plan, local, loss, lr)
        outcome = StepOutcome(plan, metrics, result, lr, time.perf_counter() - began)
        values = {} if self.values is None else self.values.train(documents, lr / self.config.optimizer.lr)
        if not self._contract_checked:
            check_contract(self.engine)
            self._contract_checked = True
        memory = finish_step(self.engine, self.saver)
        line = step_line(number, epoch, outcome, self.throughput, memory) | values
        if self.times is not None:
            line |= self.times.take()
        is_copy = self.engine.mesh.tp is not None and self.engine.mesh.tp.rank > 0  # the first tp rank returns them
        old = {} if is_copy else loss.old_logprobs()
        read = {documents.places[index]: logprobs.numpy() for index, logprobs in old.items()}
        return UpdateResult(line, {index: _spread(samples[index], logprobs) for index, logprobs in read.items()})

    # ------------------------------------------------------------ saving

    def save(self, step: int, progress: Mapping[str, Any]) -> list[str]:
        """Start saving the state after this optimizer step; returns messages about earlier saves."""
        assert self.saver is not None
        flight.enter("save")
        self.saver.save(step, progress)
        return self.saver.pop_messages()

    def finish(self) -> tuple[str, list[str]]:
        """Wait for the last save; returns its folder and messages."""
        assert self.saver is not None
        flight.enter("save")
        return str(self.saver.finish()), self.saver.pop_messages()

    def ending(self, error: BaseException) -> None:
        """Called after a call failed on this rank. If it failed on all ranks, the save in progress is finished
        first."""
        if self.saver is not None:
            self.saver.end(error)

    def close(self) -> None:
        """Leave the process group."""
        if self.sender is not None:
            self.sender.close()
        leave()


# The other fields in the line of a step without documents.
_NO_STEP: dict[str, object] = {
    "loss": None, "grad_norm": None, "lr": None, "documents": 0, "tokens": 0, "loss_tokens": 0, "empty": True,
}  # fmt: skip


def _spread(sample: Sample, values: Floats) -> Floats:
    """[T] with these values at the sampled tokens, and zeros elsewhere."""
    spread = np.zeros(len(sample), np.float32)
    spread[sample.sampled] = values
    return spread
