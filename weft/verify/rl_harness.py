"""Compares the update of `weft rl` on any mesh with plain PyTorch in one process (rl_reference.py), with the measures
of harness.py.

Both sides use the same rollouts. It compares: old and reference logprobs and values of the trainers; loss and every
parameter's gradient of the first update, in one split and in many micro-batches; losses, norms and weights along two
updates of each rollout step; and the same for the critic. Noise is added to synthetic rollouts' logprobs, and to old
logprobs unless the update computes them, so that corrections and clips have an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft.config.rl_schema import RlConfig
from weft.engine.batch.replay import LIVE, align_routes
from weft.engine.engine import Engine
from weft.engine.losses.policy import PolicyLoss
from weft.engine.losses.value import ValueLoss
from weft.engine.teachers import Teacher, with_teachers
from weft.errors import UserError
from weft.inference.types import Floats, Sample, SampleGroup, samples_of
from weft.launch import flight
from weft.models import hf
from weft.models.routing import replace_choices, replaced
from weft.rl import advantages, teacher
from weft.rl.algorithms import ADVANTAGES, TOKEN_LOSSES
from weft.rl.corrections import comparable, correct, old_is_current
from weft.rl.documents import TrainedSamples, build_documents, is_trained
from weft.rl.reference_critic import READS, read_before_training, set_readings
from weft.rl.trainer import TrainerRank
from weft.verify import rl_reference
from weft.verify.adapter import (
    as_in_files,
    engine_names,
    matrix_parts,
    optimizer_by_files,
    randomize_adapters,
    saved_adapter,
)
from weft.verify.expected import norm_of, plain_optimizer, widen
from weft.verify.harness import (
    SCALAR,
    Figure,
    Verdict,
    cut_documents,
    may_be_rounding,
    rounds,
    trainer_of,
    worst_five,
)
from weft.verify.observed import Tensors
from weft.verify.rl_reference import PeftPolicy, PlainCritic, PlainPolicy, PlainSample, UpdateSettings, distributions
from weft.verify.rl_rollouts import awkward_rollouts, disturb, noise
from weft.verify.training import ModelResults, figures_of, full_tensors

PASSES = 2  # updates of each rollout step
CRITIC = "critic: "

Rollouts = Sequence[Sequence[SampleGroup]]


@dataclass
class RunResults:
    """One side's results. reads: for each rollout step, name -> for each sample, an array over its sampled tokens."""

    reads: list[dict[str, list[Floats]]] = field(default_factory=list)
    policy: ModelResults = field(default_factory=ModelResults)
    critic: ModelResults | None = None


def verify_rl(trainer: TrainerRank, lr: float, rollouts: Rollouts | None = None) -> Verdict | None:
    """Compare a trainer with plain PyTorch on these rollouts, or on synthetic ones that its engine samples. Collective.

    Trains the trainer. Returns the verdict on rank 0, None on others. lr: learning rate of every update. Raises
    UserError for a user's advantage or policy loss.
    """
    config = trainer.config
    _require_known(config)
    randomize_adapters(trainer.engine)
    figures: list[Figure] = []
    if rollouts is None:
        rollouts = awkward_rollouts(trainer, trainer.engine.built.config.get_text_config().vocab_size)
        samples = [sample for groups in rollouts for sample in samples_of(groups)]
        parts: list[Any] = [None] * trainer.ranks.world
        dist.all_gather_object(parts, trainer.read("policy", samples), group=trainer.ranks.group)
        flight.enter(flight.ENDLESS)
        pairs = [(comparable(samples[i]), old) for part in parts for i, old in part.items()]
        figures.append(Figure("logprobs of engine and trainer", max(_difference(*pair) for pair in pairs), SCALAR))
        for groups in rollouts:
            disturb(groups)
    for engine in (trainer.engine, trainer.reference, trainer.teacher, trainer.critic):
        if engine is not None:
            cut_documents(engine, max(len(sample) for groups in rollouts for sample in samples_of(groups)))
    plain: RunResults | None = None
    noise_runs: list[RunResults] = []
    start = _weights(trainer)
    at_once = rounds(trainer.engine)
    with saved_adapter(trainer.engine) as adapter:
        if trainer.ranks.is_first:
            plain = _Plain(trainer, start, adapter).run(rollouts, lr)
        observed = _observe(trainer, rollouts, lr)
        if plain is None:
            return None
        figures += _read_figures(observed, plain)
        verdict = _judge(observed, plain, noise_runs, start, config, figures)
        if not verdict.passed:
            noise_runs.append(_Plain(trainer, start, adapter).run(rollouts, lr, reverse=True))
            if at_once:
                noise_runs.append(_in_double(trainer, start, adapter, rollouts, lr))
            verdict = _judge(observed, plain, noise_runs, start, config, figures)
        if may_be_rounding(verdict) and not at_once and _routes_are_known(trainer.engine, rollouts):
            noise_runs.append(_in_double(trainer, start, adapter, rollouts, lr))
            verdict = _judge(observed, plain, noise_runs, start, config, figures)
    return verdict


def _routes_are_known(engine: Engine, rollouts: Rollouts) -> bool:
    """Whether fp64 follows the same experts; without replay it would choose others if two scores are nearly equal."""
    samples = [sample for groups in rollouts for sample in samples_of(groups)]
    return not engine.built.flops.expert or all(sample.routes is not None for sample in samples)


def _judge(
    observed: RunResults,
    plain: RunResults,
    noise_runs: Sequence[RunResults],
    start: tuple[Tensors, Tensors | None],
    config: RlConfig,
    figures: list[Figure],
) -> Verdict:
    """All comparisons, after those in `figures`. noise_runs: the plain side with other orders of summation."""
    optimizer = config.optimizer.name
    of_policy, worst = figures_of(
        observed.policy, plain.policy, [run.policy for run in noise_runs], start[0], optimizer, ""
    )
    figures = [*figures, *of_policy]
    if observed.critic is not None:
        assert plain.critic is not None and start[1] is not None
        noisy = [run.critic for run in noise_runs if run.critic is not None]
        of_critic, worst_of_critic = figures_of(observed.critic, plain.critic, noisy, start[1], optimizer, CRITIC)
        figures, worst = [*figures, *of_critic], worst_five([*worst, *worst_of_critic])
    return Verdict(figures, worst)


def _require_known(config: RlConfig) -> None:
    for key, named, specs in (
        ("advantage", config.rl.advantage, ADVANTAGES),
        ("policy_loss", config.rl.policy_loss, TOKEN_LOSSES),
    ):
        if named not in specs:
            raise UserError(
                f"weft verify has no plain implementation of rl.{key}={named} to compare with: set it to one of "
                f"{', '.join(specs)}, which use the same mesh."
            )


def _weights(trainer: TrainerRank) -> tuple[Tensors, Tensors | None]:
    """(Complete weights of the policy, those of the critic or None), with the names of the plain side. Collective."""
    return full_tensors(trainer.engine), None if trainer.critic is None else full_tensors(trainer.critic)


# ---------------------------------------------------------------- the mesh


def _read(trainer: TrainerRank, samples: Sequence[Sample]) -> None:
    """Set the trainers' outputs for the samples (old and reference logprobs, values), on every rank."""
    rl = trainer.config.rl
    roles = read_before_training(rl, old=rl.old_logprobs == "recompute")
    parts: list[Any] = [None] * trainer.ranks.world
    dist.all_gather_object(parts, trainer.read_all(roles, samples), group=trainer.ranks.group)
    flight.enter(flight.ENDLESS)
    set_readings(samples, parts)


def _difference(actual: Floats, expected: Floats) -> float:
    """The largest difference, relative to the largest value if that is above 1."""
    return float(np.abs(actual - expected).max(initial=0.0)) / max(1.0, float(np.abs(expected).max(initial=0.0)))


def _observe(trainer: TrainerRank, rollouts: Rollouts, lr: float) -> RunResults:
    config, number = trainer.config, 0
    observed = RunResults(critic=None if trainer.critic is None else ModelResults())
    fused = old_is_current(config)
    for groups in rollouts:
        samples = samples_of(groups)
        _read(trainer, samples)
        names = [name for name in READS.values() if getattr(samples[0], name) is not None]
        observed.reads.append({name: [getattr(s, name)[s.sampled] for s in samples] for name in names})
        olds = [sample.old_logprobs for sample in samples]
        if not fused:
            for sample in samples:
                if sample.old_logprobs is not None:
                    sample.old_logprobs = np.where(
                        sample.sampled, sample.old_logprobs + noise(sample, "old"), 0
                    ).astype(np.float32)
        correct(samples, config.rl)
        advantages.advantages(groups, config.rl)
        if config.rl.teacher_in_advantage:
            teacher.add_teacher_advantages(samples, config.rl)
        if fused:
            for sample in samples:
                sample.old_logprobs = None
        if not number:
            _observe_gradients(trainer, samples, observed)
        for _ in range(PASSES):
            number += 1
            line = trainer.update(samples, number, PASSES * len(rollouts), 1, lr).line
            flight.enter(flight.ENDLESS)
            observed.policy.curve.append((_number(line["loss"]), 1.0, _number(line["grad_norm"])))
            if observed.critic is not None:
                norm = _number(line.get("critic/grad_norm", 0.0))
                observed.critic.curve.append((_number(line.get("loss/value_avg", 0.0)), 1.0, norm))
            for sample, old in zip(samples, olds, strict=True):
                sample.old_logprobs = old if fused else sample.old_logprobs
    observed.policy.weights, critic = _weights(trainer)
    if observed.critic is not None and critic is not None:
        observed.critic.weights = critic
    return observed


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _observe_gradients(trainer: TrainerRank, samples: Sequence[Sample], observed: RunResults) -> None:
    """Observe gradients of the first update, in one split and in many micro-batches."""
    documents = dict(enumerate(build_documents(samples, trainer.config)))
    masked = TrainedSamples(samples, trainer.config).masked
    longest = max((len(document) for document in documents.values()), default=1)
    fused = "old_logprobs" not in documents[0].arrays if documents else False
    pairs: list[tuple[Engine, Any, ModelResults]] = [
        (
            trainer.engine,
            lambda: PolicyLoss(trainer.config.rl, old_is_current=fused, masked=masked, teacher=trainer.teacher_loss),
            observed.policy,
        )
    ]
    if trainer.critic is not None and observed.critic is not None:
        pairs.append((trainer.critic, lambda: ValueLoss(trainer.config.critic.clip), observed.critic))
    for engine, objective, learner in pairs:
        for budget in (None, longest):
            plan = engine.plan(engine.planner.metadata(documents.values()), budget=budget)
            local = {index: documents[index] for index in engine.planner.local_documents(plan)}
            if trainer.teacher is not None and trainer.teacher_loss is not None and engine is trainer.engine:
                local = with_teachers([Teacher(trainer.teacher)], None, list(documents.values()), local, engine)
            metrics = engine.accumulate(plan, local, objective())
            gradients = {name: g.cpu() for name, g in engine.gradients() if g is not None}
            gradients = as_in_files(engine, gradients)
            loss = metrics.get("loss") if engine is trainer.engine else metrics.get("loss/value_avg")
            if budget is None:
                learner.first = loss or 0.0, 1.0, engine.gradient_norm(), gradients
            else:
                learner.micro.append((loss or 0.0, gradients))
            engine.drop_gradients()
    flight.enter(flight.ENDLESS)


# ---------------------------------------------------------------- one plain process


class _Plain:
    """The updates in one plain process, on the first rank only. double: whether models compute in fp64."""

    def __init__(
        self, trainer: TrainerRank, start: tuple[Tensors, Tensors | None], adapter: str | None, *, double: bool = False
    ) -> None:
        self.trainer, self.config, self.start, self.double = trainer, trainer.config, start, double
        engine, config = trainer.engine, trainer.config
        path, self.device = config.model.path, str(engine.device)
        self.policy: PlainPolicy | PeftPolicy
        if adapter is None:
            self.policy = PlainPolicy(path, self.device, config.model.freeze)
        else:
            settings = trainer_of(engine, path, [], adapter, {})
            self.policy = PeftPolicy(path, adapter, self.device, quantised=settings.quantised, frozen=settings.frozen)
        self.teacher: PlainPolicy | None = None
        rule = UpdateSettings(
            config.rl, config.rollout.temperature, config.rollout.max_new_tokens, config.critic.clip, self._following,
            self._taught if trainer.teacher_loss is not None else None,
        )  # fmt: skip
        if config.rl.teacher is not None:
            self.teacher = PlainPolicy(config.rl.teacher, self.device)
            self._prepare(self.teacher, rule)
        self._prepare(self.policy, rule)
        self.policy.start(self._optimizer(engine), config.optimizer.max_grad_norm)
        self.reference: PlainPolicy | None = None
        if config.rl.has_reference and not isinstance(self.policy, PeftPolicy):
            self.reference = PlainPolicy(config.reference.path or path, self.device)
            self._prepare(self.reference, rule)
        self.critic: PlainCritic | None = None
        if trainer.critic is not None and start[1] is not None:
            self.critic = PlainCritic(config.critic.path or path, start[1], self.device)
            self._prepare(self.critic, rule)
            self.critic.start(self._optimizer(trainer.critic), config.optimizer.max_grad_norm)

    def _prepare(self, plain: PlainPolicy | PeftPolicy | PlainCritic, rule: UpdateSettings) -> None:
        plain.rule = rule
        if self.double:
            widen(plain.model)

    def _optimizer(self, engine: Engine) -> torch.optim.Optimizer:
        c, plain = optimizer_by_files(engine), self.policy if engine is self.trainer.engine else self.critic
        assert plain is not None
        return plain_optimizer(c, engine.config.seed, engine_names(engine), matrix_parts(engine)).over(plain.named())

    @torch.no_grad()
    def _taught(self, row: PlainSample) -> torch.Tensor:
        assert self.teacher is not None
        return distributions(self.teacher.model, row, self.config.rollout.temperature)

    @contextmanager
    def _following(self, row: PlainSample) -> Iterator[None]:
        """Inside, the policy uses the experts that were chosen when the row was sampled."""
        facts = self.trainer.engine.built.flops
        if row.routes is None or not facts.expert:
            yield
            return
        routes = align_routes(row.routes, len(row.ids)).long().to(self.device)

        def choose(layer: int, scores: Any, out: Any) -> Any:
            recorded = routes[:, layer]
            return replaced(scores, out, torch.where(recorded[:, :1] != LIVE, recorded, out[1]))

        layers = list(self.policy.plain.get_submodule(self.trainer.engine.module.facts.layers).children())
        with replace_choices(layers, facts.experts, facts.experts_per_token, choose):
            yield

    def run(self, rollouts: Rollouts, lr: float, reverse: bool = False) -> RunResults:
        """The results of all updates. reverse: process rows in another order, which changes only rounding, to measure
        the plain side's noise."""
        config, fused = self.config, old_is_current(self.config)
        out = RunResults(critic=None if self.critic is None else ModelResults())
        for number, groups in enumerate(rollouts):
            samples = samples_of(groups)
            rows = self._rows(groups)
            out.reads.append(self._read(rows))
            if config.rl.old_logprobs == "recompute" and not fused:
                for row, sample in zip(rows, samples, strict=True):
                    row.old_logprobs = row.old_logprobs + torch.from_numpy(noise(sample, "old")[sample.sampled])
            rl_reference.correct(rows, config.rl)
            rl_reference.compare(rows, config.rl)
            rows = rows[::-1] if reverse else rows
            learners: list[tuple[Any, ModelResults, float]] = [(self.policy, out.policy, lr)]
            if self.critic is not None and out.critic is not None:
                learners.append((self.critic, out.critic, lr * config.critic.lr / config.optimizer.lr))
            if not number:
                for plain, learner, _ in learners:
                    loss, gradients = plain.gradients(rows)
                    norm = norm_of(gradients)
                    learner.first = loss, plain.size, norm, {name: g.cpu() for name, g in gradients.items()}
            for _ in range(PASSES):
                for plain, learner, rate in learners:
                    loss, norm = plain.step(rows, rate)
                    learner.curve.append((loss, plain.size, norm))
        out.policy.weights = {name: w.cpu() for name, w in self.policy.weights().items()}
        if self.critic is not None and out.critic is not None:
            out.critic.weights = {name: w.cpu() for name, w in self.critic.weights().items()}
        return out

    def _rows(self, groups: Sequence[SampleGroup]) -> list[PlainSample]:
        return [
            PlainSample(
                ids=sample.tokens.tolist(), drawn=np.flatnonzero(sample.sampled).tolist(), group=index,
                reward=sample.reward if sample.trained else None, trained=is_trained(sample, self.config),
                rollout_logprobs=torch.from_numpy(comparable(sample)[sample.sampled]), routes=sample.routes,
            )
            for index, group in enumerate(groups)
            for sample in group.samples
        ]  # fmt: skip

    def _read(self, rows: Sequence[PlainSample]) -> dict[str, list[Floats]]:
        """Set old and reference logprobs and values of the rows. Returns them as name -> one array per row."""
        rl, readouts = self.config.rl, dict[str, list[torch.Tensor]]()
        if rl.old_logprobs == "recompute":
            readouts["old_logprobs"] = self.policy.look(rows)
        if rl.has_reference and isinstance(self.policy, PeftPolicy):
            with self.policy.base():
                readouts["ref_logprobs"] = self.policy.look(rows, follow=False)
        elif self.reference is not None:
            readouts["ref_logprobs"] = self.reference.look(rows, follow=False)
        if self.teacher is not None and rl.teacher_in_advantage:
            readouts["teacher_logprobs"] = self.teacher.look(rows, follow=False)
        if self.critic is not None:
            readouts["values"] = self.critic.look(rows)
        for name, values in readouts.items():
            for row, value in zip(rows, values, strict=True):
                setattr(row, name, value)
        return {name: [value.numpy() for value in values] for name, values in readouts.items()}


def _in_double(
    trainer: TrainerRank, start: tuple[Tensors, Tensors | None], adapter: str | None, rollouts: Rollouts, lr: float
) -> RunResults:
    plain = _Plain(trainer, start, adapter, double=True)
    with hf.in_double():
        return plain.run(rollouts, lr)


# ---------------------------------------------------------------- figures


def _read_figures(observed: RunResults, plain: RunResults) -> list[Figure]:
    names = {
        "old_logprobs": "readout: old logprob", "ref_logprobs": "readout: reference logprob",
        "teacher_logprobs": "readout: teacher logprob", "values": "readout: value",
    }  # fmt: skip
    figures = []
    for name in plain.reads[0]:
        pairs = zip(observed.reads[0][name], plain.reads[0][name], strict=True)
        figures.append(Figure(names[name], max(_difference(*pair) for pair in pairs), SCALAR))
    return figures
