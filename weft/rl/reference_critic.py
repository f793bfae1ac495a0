"""The frozen reference, and the critic, which learns values.

Each runs in the trainer's ranks, or in separate ranks (reference.ranks, critic.ranks), which form their own process
group and work at the same time as the trainers. A TrainerRank has no engine for a role with separate ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoint import rng
from weft.checkpoint.resume import restore_engine
from weft.checkpoint.retention import complete_steps, step_folder
from weft.checkpoint.save import Saver
from weft.checkpoint.state import read_state
from weft.config import to_dict
from weft.config.devices import device_lists, roles_on, show_devices, teacher_ranks
from weft.config.rl_schema import RlAlgorithm, RlConfig, reward_models
from weft.config.schema import CheckpointConfig
from weft.data.image_opener import ImageOpener, image_opener
from weft.engine.batch.document import Document, first_sources
from weft.engine.batch.media import ImageRoom
from weft.engine.contract import check_contract
from weft.engine.engine import Engine
from weft.engine.losses.value import ValueLoss
from weft.engine.sleep import Part
from weft.inference.types import Floats, Sample
from weft.launch import flight
from weft.launch.consistency import max_over_ranks, require_agreement, versions
from weft.launch.options import Device
from weft.launch.process import Ranks, join, leave
from weft.models import hf
from weft.observe.profiling import own_peak_memory_gib
from weft.rl.documents import ReadSamples, TrainedSamples
from weft.rl.model_engines import check_images, critic_engine, opening_lines, reference_engine, teacher_engine
from weft.terminal import counted

Role = str  # "policy", "reference", "teacher", "critic", or that of a reward model (config/rl_schema.py:reward_models)
CRITIC: Role = "critic"
# Role -> the array of a sample that it reads.
READS: dict[Role, str] = {
    "policy": "old_logprobs", "reference": "ref_logprobs", "teacher": "teacher_logprobs", "critic": "values",
}  # fmt: skip


def read_before_training(rl: RlAlgorithm, *, old: bool) -> list[Role]:
    """The models that must read the samples before training. old: whether the policy is one of them."""
    is_read_by_role: dict[Role, bool] = {
        "policy": old, "reference": rl.has_reference, "teacher": rl.teacher_in_advantage, "critic": rl.has_critic,
    }  # fmt: skip
    return [role for role, is_wanted in is_read_by_role.items() if is_wanted]


def set_readings(samples: Sequence[Sample], parts: Iterable[Mapping[Role, Mapping[int, Floats]]]) -> None:
    """Set on each sample the arrays that the roles have read. parts: the result of read_all on each rank. Raises as
    check_readings, and RuntimeError if a role has not read each sample. Ranks of mesh.cp that share a document all have
    its readings."""
    read: dict[Role, set[int]] = {}
    for part in parts:
        for role, readings in part.items():
            read.setdefault(role, set()).update(readings)
            for index, values in readings.items():
                check_readings(role, values, samples[index])
                setattr(samples[index], READS[role], values)
    for role, indices in read.items():
        if len(indices) != len(samples):
            raise RuntimeError(f"the {role} has read {len(indices)} of {len(samples)} samples")


def check_readings(role: Role, values: Floats, sample: Sample) -> None:
    """Raises RuntimeError if a role has not read each token of a sample, and FloatingPointError for a value that is not
    finite. The policy's values are checked later, with the rollout's (corrections.py)."""
    if values.shape != (len(sample),):
        raise RuntimeError(f"the {role} has read {values.shape} values of sample {sample.id} of {len(sample)} tokens")
    if role != "policy" and not np.isfinite(values).all():
        kind = "values" if role == CRITIC else "log probabilities"
        raise FloatingPointError(
            f"the {role} returns {kind} that are not finite, for sample {sample.id}. Check its weights, or set "
            f"{'fsdp' if role == CRITIC else role}.param_dtype=fp32."
        )


def start_rank(config: RlConfig, device: Device) -> Ranks:
    """Join the process group of this kind of rank, and check that all ranks have the same config and versions."""
    hf.import_architectures(config.model.imports, config.model.path)
    ranks = join(device, config.train.timeout, config.cluster.cpu_backend)
    flight.watch(config.train.timeout)
    keys = {f"{section}.{key}": str(v) for section, values in to_dict(config).items() for key, v in values.items()}
    require_agreement(keys | versions(), ranks.group)
    flight.enter("load")
    return ranks


def own_ranks(config: RlConfig) -> dict[Role, int]:
    """Number of separate ranks of the reference, the critic, the teacher and each reward model, of those that have
    any."""
    counts: dict[Role, int | None] = {
        "reference": config.reference.ranks if config.rl.has_reference else None,
        "critic": config.critic.ranks if config.rl.has_critic else None,
        "teacher": teacher_ranks(config) if config.rl.teacher is not None else None,
        **dict.fromkeys(reward_models(config.rl.reward), config.reward_model.ranks),
    }
    return {role: count for role, count in counts.items() if count is not None}


def critic_checkpoint(run: Path, step: int) -> Path:
    """The folder of the critic's checkpoint of a step: the separate ranks' folder if it exists, else in the
    policy's."""
    separate = step_folder(run / CRITIC / "checkpoints", step)
    return separate if separate.is_dir() else step_folder(run / "checkpoints", step) / CRITIC


def steps_of_all(run: Path) -> list[int]:
    """Steps with complete checkpoints of the policy and of a critic with separate ranks."""
    steps, critics = complete_steps(run / "checkpoints"), run / CRITIC / "checkpoints"
    if not critics.is_dir():
        return steps
    also = set(complete_steps(critics))
    return [step for step in steps if step in also or (step_folder(run / "checkpoints", step) / CRITIC).is_dir()]


def checkpoints_of(config: RlConfig) -> CheckpointConfig:
    """The checkpoint section. With a critic in separate ranks, one more checkpoint is kept, because a step counts only
    if the checkpoints of policy and critic are both complete."""
    checkpoint = config.checkpoint
    return (
        replace(checkpoint, keep=checkpoint.keep + 1)
        if checkpoint.keep is not None and CRITIC in own_ranks(config)
        else checkpoint
    )


def finish_step(engine: Engine, saver: Saver | None) -> float:
    """The largest peak memory of any rank, in GiB. Raises on all ranks if the saver of one has failed. Collective."""
    flight.enter("record")
    failed = saver is not None and saver.failed
    memory, any_failed = max_over_ranks(
        [own_peak_memory_gib(engine.device), failed], engine.mesh.world_group, engine.device
    )
    if any_failed and saver is not None:
        saver.raise_failure()
    return memory


def device_role(role: Role) -> str:
    """The name in cluster.devices of a role of separate ranks: all reward models have one list."""
    return "reward_model" if role.startswith("reward_model") else role


def shared_with_trainers(config: RlConfig) -> set[Role]:
    """The roles with separate ranks that share devices with trainer ranks (cluster.devices)."""
    lists = device_lists(config.cluster.devices)
    sharing = roles_on(lists, "trainer") if lists else ()
    return {role for role in own_ranks(config) if device_role(role) in sharing}


def where_separate(config: RlConfig, role: Role) -> str:
    """Where the separate ranks of a role are, for its line at start."""
    devices = device_lists(config.cluster.devices).get(device_role(role))
    if devices is None:
        return f"on {counted(own_ranks(config)[role], 'separate rank')}"
    return f"on devices {show_devices(devices)}"


class Critic:
    """A critic's engine and its training."""

    def __init__(self, engine: Engine, config: RlConfig) -> None:
        self.engine, self.config = engine, config
        self._checked = False

    def train(self, documents: Sequence[Document], share: float) -> dict[str, object]:
        """One optimizer step on the policy's samples; returns metrics. share: factor on critic.lr."""
        engine = self.engine
        plan, local = engine.plan_step(documents)
        metrics, result = engine.step(plan, local, ValueLoss(self.config.critic.clip), self.config.critic.lr * share)
        if not self._checked:
            check_contract(engine)
            self._checked = True
        return {**metrics, "critic/grad_norm": result.grad_norm, "critic/skipped": result.skipped}


class ReferenceCriticRank:
    """One of the separate ranks of a reference, a teacher or a critic. Methods are called on all of them together."""

    def __init__(self, config: RlConfig, role: Role, device: Device = "auto", *, fill: bool = True) -> None:
        """fill: False if a checkpoint will fill a critic's weights."""
        self.config, self.role = config, role
        self.ranks = start_rank(config, device)
        reference = reference_engine(config, self.ranks) if role == "reference" else None
        critic = critic_engine(config, self.ranks, fill=fill) if role == "critic" else None
        teacher = teacher_engine(config, self.ranks) if role == "teacher" else None
        engine = reference or critic or teacher
        assert engine is not None
        self.engine, self.values = engine, None if critic is None else Critic(critic, config)
        rng.seed_rank(config.train.seed, engine.mesh.loss_rank)
        self.opener = image_opener(config.model.path, config.data)
        self.saver: Saver | None = None

    def describe(self) -> list[str]:
        """Lines that describe this reference or critic at start."""
        engines = [self.engine if role == self.role else None for role in ("reference", "critic", "teacher")]
        return [f"{opening_lines(self.config, *engines)[-1]}; {where_separate(self.config, self.role)}"]

    def sleep(self, parts: Sequence[Part], sends: bool = False) -> int:
        """See TrainerRank.sleep."""
        return self.engine.sleep(*parts)

    def wake(self) -> int:
        """See TrainerRank.wake."""
        return self.engine.wake()

    def check_images(self, samples: Sequence[tuple[str, int, int]]) -> None:
        """Raise UserError if a model cannot process these samples (model_engines.check_images)."""
        check_images({self.role: self.engine}, samples)

    def image_room(self) -> ImageRoom:
        """See Engine.image_room."""
        return self.engine.planner.image_room

    def open_run(self, folder: str, constants: Mapping[str, Any], last: int = 0) -> None:
        """Enter RUN, like TrainerRank.open_run. A reference has nothing to restore or save."""
        run = Path(folder)
        flight.in_run(run)
        if self.values is None:
            return
        if last:
            restore_engine(self.engine, read_state(critic_checkpoint(run, last)), self.config.train.seed, command="rl")
        (run / CRITIC).mkdir(exist_ok=True)
        checkpoint, timeout = checkpoints_of(self.config), self.config.train.timeout
        self.saver = Saver(self.engine, run / CRITIC, checkpoint, constants, last, command="rl", timeout=timeout)

    def read_all(self, roles: Sequence[Role], samples: Sequence[Sample]) -> dict[Role, dict[int, Floats]]:
        """Read this rank's samples: a reference or teacher reads logprobs, a critic values. roles: ignored; a rank has
        one."""
        readout_name = "logprob" if self.values is None else "value"
        return {self.role: readout(self.engine, samples, readout_name, self.opener)}

    def update(self, samples: Sequence[Sample], number: int, steps: int, share: float) -> dict[str, object]:
        """The critic's optimizer step, at the same time as the policy's step `number`; returns metrics. share: as in
        Critic.train."""
        assert self.values is not None
        documents = TrainedSamples(samples, self.config, self.opener)
        if not documents:  # on every rank alike
            return {}
        flight.step(number, steps, first_sources(documents, range(len(documents))), len(documents))
        metrics = self.values.train(documents, share)
        memory = finish_step(self.engine, self.saver)
        return {**metrics, "critic/peak_memory_gib": memory}

    def save(self, step: int, progress: Mapping[str, Any]) -> list[str]:
        """Like Trainer.save, into RUN/critic/checkpoints."""
        assert self.saver is not None
        flight.enter("save")
        self.saver.save(step, progress)
        return [f"critic: {text}" for text in self.saver.pop_messages()]

    def finish(self) -> list[str]:
        """Wait for the last save; returns messages."""
        assert self.saver is not None
        flight.enter("save")
        self.saver.finish()
        return [f"critic: {text}" for text in self.saver.pop_messages()]

    def ending(self, error: BaseException) -> None:
        """Like Trainer.ending."""
        if self.saver is not None:
            self.saver.end(error)

    def close(self) -> None:
        """Leave the process group."""
        leave()


def readout(
    engine: Engine, samples: Sequence[Sample], name: str, opener: ImageOpener, routes: bool = False
) -> dict[int, Floats]:
    """This rank's samples, read by the engine: index -> [T], zero at tokens that the policy did not sample. If several
    ranks have the same samples, only the first returns them. name: `logprob` or `value`. routes: whether to replay the
    recorded experts. Collective."""
    flight.enter("logprobs")
    plan, local = engine.plan_step(ReadSamples(samples, routes, opener))
    read = engine.readout(plan, local, (name,))
    if engine.mesh.model_parallel_rank[0]:
        return {}
    return {i: np.where(samples[i].sampled, values[name].numpy(), 0).astype(np.float32) for i, values in read.items()}
