"""`weft compare-step`: compares another trainer's loss and gradient norm of a batch with weft's.

If they differ, weft computes the batch again with one convention changed at a time. The report lists the conventions
that reproduce the other trainer's numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from weft.config.rl_schema import RlConfig
from weft.config.schema import MeshConfig
from weft.engine.engine import Engine
from weft.engine.losses.policy import PolicyLoss
from weft.errors import UserError
from weft.inference.types import Floats, Sample
from weft.launch.options import CompareStepOptions
from weft.launch.process import join
from weft.models import hf
from weft.recipes.verify import compute_in_fp32
from weft.rl.algorithms import TOKEN_LOSSES
from weft.rl.corrections import correct
from weft.rl.documents import ReadSamples, TrainedSamples
from weft.rl.model_engines import policy_config
from weft.rl.step_dump import NAMES, StepDump, read_step_dump, shifted
from weft.terminal import counted, say

_ARRAYS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "correction")
_KL_COEFFICIENTS = (0.001, 0.01, 0.04, 0.1)
# Of Miles, slime and verl (2), TRL (3, of the whole sample), OpenRLHF and NeMo-RL (5).
_CORRECTIONS = (
    *(("tis", "token", (0.0, highest)) for highest in (2.0, 3.0, 5.0)),
    *(("tis", "sequence", (0.0, highest)) for highest in (2.0, 3.0)),
    *(("mis", "sequence", (0.0, highest)) for highest in (2.0, 3.0)),
    ("mis", "token", (0.0, 2.0)),
    ("icepop", "token", (0.5, 5.0)),
)
_ENTROPY_COEFFICIENTS = (0.001, 0.01)
_TEMPERATURES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.2)


@dataclass(frozen=True)
class Convention:
    """One way to compute the batch. name: the key to set, or the other trainer's convention. factor: of loss and
    gradient. kl_of_current: as in PolicyLoss."""

    name: str
    config: RlConfig
    samples: Sequence[Sample]
    factor: float = 1.0
    kl_of_current: bool = False


@dataclass(frozen=True)
class Computed:
    """weft's numbers. scale: the loss with |advantage| as the loss of each token. It is the scale for differences of
    losses, because losses of compared samples cancel to about 0."""

    loss: float
    grad_norm: float
    scale: float


def run(config: RlConfig, options: CompareStepOptions) -> bool:
    """Print the comparison. Returns whether weft, as configured, computes the same numbers. Raises UserError if the
    file or the config does not allow the comparison."""
    dump = read_step_dump(options.dump, options.loss, options.grad_norm)
    config = comparable_config(config, dump, options.dump)
    compute_in_fp32()
    hf.import_architectures(config.model.imports, config.model.path)
    _check_ids(dump, config, options.dump)
    with join(options.device, config.train.timeout) as ranks:
        engine = Engine(policy_config(config), ranks)
        say(f"batch    {_described(dump)}; weft computes in fp32 on {ranks.device.type}")
        for line in _notes(config, dump):
            say(line)
        say(_logprobs_line(engine, dump))
        configured = compute(engine, Convention("", config, dump.samples), dump)
        assert configured is not None, "read_step_dump refuses a file without trained tokens"
        agrees = fits(configured, dump, options.tolerance)
        for line in _numbers(configured, dump):
            say(line)
        fitting, equal = [], []
        for convention in conventions(config, dump):
            computed = compute(engine, convention, dump)
            if computed is None:
                continue
            if fits(computed, replace(dump, loss=configured.loss, grad_norm=configured.grad_norm), options.tolerance):
                equal.append(convention.name)
            elif not agrees and fits(computed, dump, options.tolerance):
                fitting.append(f"fits     {convention.name}: {_differences(computed, dump)}")
    _conclude(configured, dump, options.tolerance, agrees, fitting)
    if equal:
        say(f"not compared: these conventions do not change this batch: {'; '.join(equal)}")
    return agrees


def comparable_config(config: RlConfig, dump: StepDump, name: str) -> RlConfig:
    """The config in one process and in fp32, without features for which the file has no arrays. Raises UserError if the
    loss needs something that the file does not have."""
    first = dump.samples[0]
    if config.rl.teacher_in_loss:
        raise UserError("weft compare-step does not compute a teacher: remove rl.teacher.")
    if config.rl.kl_coef > 0 and config.rl.kl_in == "loss" and first.ref_logprobs is None:
        raise UserError(
            f"{name}: has no ref_log_prob, which rl.kl_coef={config.rl.kl_coef:g} needs: add it, or set rl.kl_coef=0."
        )
    if first.correction is not None and not config.rl.corrects:
        raise UserError(
            f"{name}: has factors of a correction between engine and trainer, which this config does not apply: set "
            "rl.correction=tis rl.old_logprobs=recompute, or remove them from the file."
        )
    if first.correction is not None and first.old_logprobs is None:
        raise UserError(f"{name}: has a correction, but no old_log_probs: add them.")
    rl = replace(config.rl, measure_kl=False, mask_truncated=False, on_policy="measured")
    if first.correction is None and not dump.has_rollout:
        if rl.old_logprobs == "rollout" and first.old_logprobs is None:
            raise UserError(
                f"{name}: has no {' or '.join(NAMES['rollout_log_probs'])}, which rl.old_logprobs=rollout needs: add "
                "them, or set rl.old_logprobs=recompute."
            )
        rl = replace(rl, correction="none")
    if rl.kl_in == "reward":
        rl = replace(rl, kl_coef=0.0)
    return replace(
        config,
        rl=rl,
        mesh=MeshConfig(),
        model=replace(config.model, attention="auto"),
        lora=replace(config.lora, dropout=0.0),
        train=replace(config.train, neftune_noise_alpha=None),
        fsdp=replace(config.fsdp, param_dtype="fp32", reduce_dtype="fp32", master_dtype="fp32"),
    )


def compute(engine: Engine, convention: Convention, dump: StepDump) -> Computed | None:
    """The loss and the gradient norm of the batch; None if a convention leaves no token to train on."""
    samples, rl = convention.samples, convention.config.rl
    is_known = rl.old_logprobs == "rollout" or samples[0].old_logprobs is not None  # else the step itself corrects
    if dump.has_rollout and is_known and dump.samples[0].correction is None:  # else the file's factors are used
        samples = [replace(sample) for sample in samples]
        correct(samples, rl)
    documents = TrainedSamples(samples, convention.config)
    if not documents:
        return None
    loss = PolicyLoss(
        convention.config.rl, old_is_current=not documents.old_is_known, kl_of_current=convention.kl_of_current
    )
    engine.module.head.temperature = convention.config.rollout.temperature
    plan, local = engine.plan_step(documents)
    metrics = engine.accumulate(plan, local, loss)
    norm = engine.gradient_norm()
    engine.drop_gradients()
    total = sum(float((d.weights[1:] * d.arrays["advantages"][1:].abs()).sum()) for d in local.values())
    value = metrics["loss"]
    factor = convention.factor
    return Computed(
        float("nan") if value is None else value * factor, norm * factor, total / loss.normaliser(plan) * factor
    )


def fits(computed: Computed, dump: StepDump, tolerance: float) -> bool:
    """Whether every number of the file is within the tolerance."""
    loss = dump.loss is None or abs(computed.loss - dump.loss) <= tolerance * max(abs(dump.loss), computed.scale)
    norm = dump.grad_norm is None or abs(computed.grad_norm - dump.grad_norm) <= tolerance * abs(dump.grad_norm)
    return loss and norm


def conventions(config: RlConfig, dump: StepDump) -> Iterator[Convention]:
    """Every other way to compute the batch, each with one convention changed."""
    rl, first = config.rl, dump.samples[0]

    def with_rl(**keys: Any) -> Convention:
        words = (f"rl.{key}={_written(value)}" for key, value in keys.items())
        return Convention(" ".join(words), replace(config, rl=replace(rl, **keys)), dump.samples)

    def with_samples(name: str, change: Callable[[Sample], dict[str, Any]]) -> Convention:
        return Convention(name, config, [replace(sample, **change(sample)) for sample in dump.samples])

    for how in ("token_mean", "sequence_mean"):
        if how != rl.loss_aggregation:
            yield with_rl(loss_aggregation=how)
    for tokens in sorted({1, dump.width, *dump.columns, config.rollout.max_new_tokens}):
        if rl.loss_aggregation == "sequence_sum" and tokens == config.rollout.max_new_tokens:
            continue
        summed = replace(rl, loss_aggregation="sequence_sum")
        changed = replace(config, rl=summed, rollout=replace(config.rollout, max_new_tokens=tokens))
        name = f"rl.loss_aggregation=sequence_sum rollout.max_new_tokens={tokens}"
        name += " (a plain sum over each sample)" * (tokens == 1) + " (padding counts in the mean)" * (
            tokens in dump.columns
        )
        yield Convention(name, changed, dump.samples)
    for name in TOKEN_LOSSES:
        if name != rl.policy_loss:
            yield with_rl(policy_loss=name)
    yield with_rl(dual_clip=3.0 if rl.dual_clip is None else None)
    low, high = rl.clip
    for clip in dict.fromkeys(((0.2, 0.2), (0.2, 0.28), (low, low), (high, high))):
        if clip != (low, high):
            yield with_rl(clip=clip)
    if rl.kl_coef > 0:
        for estimator in ("k1", "k2", "k3"):
            if estimator != rl.kl_estimator:
                yield with_rl(kl_estimator=estimator)
        yield with_rl(kl_clamp=10.0 if rl.kl_clamp is None else None)
        yield with_rl(kl_unbiased=not rl.kl_unbiased)
        name = "the KL's gradient includes that of the probability of the sample (NeMo-RL; at the first update of a "
        of_current = replace(config, rl=replace(rl, kl_unbiased=True))
        yield Convention(f"{name}rollout rl.kl_unbiased=true)", of_current, dump.samples, kl_of_current=True)
        for coefficient in (0.0, *_KL_COEFFICIENTS):
            if coefficient != rl.kl_coef:
                yield with_rl(kl_coef=coefficient)
    elif first.ref_logprobs is not None:
        for coefficient in _KL_COEFFICIENTS:
            for estimator in ("k3", "k2", "k1"):
                yield with_rl(kl_coef=coefficient, kl_in="loss", kl_estimator=estimator)
    if not rl.entropy_coef:
        for coefficient in _ENTROPY_COEFFICIENTS:
            yield with_rl(entropy_coef=coefficient)
    else:
        yield with_rl(entropy_coef=0.0)
        for how in ("token_mean", "sequence_mean"):
            if how != (rl.entropy_aggregation or rl.loss_aggregation):
                yield with_rl(entropy_aggregation=how)
    trained = [sample for sample in dump.samples if sample.length]
    if rl.loss_aggregation != "token_mean" and len(trained) < len(dump.samples):
        name = "sequences without trained tokens count in the mean (rl.mask_truncated=true rl.count_masked=true)"
        yield Convention(name, config, dump.samples, len(trained) / len(dump.samples))
    tokens = sum(sample.length for sample in trained)
    if rl.loss_aggregation == "token_mean" and dump.step_tokens not in (None, 0, tokens):
        name = f"divided by the {dump.step_tokens:g} tokens of the step, of which the file has {tokens}"
        yield Convention(name, config, dump.samples, tokens / dump.step_tokens)
    if rl.loss_aggregation == "token_mean":
        total = sum(len(sample) for sample in dump.samples)
        yield Convention("tokens of prompts count in the mean", config, dump.samples, tokens / total)
    if first.correction is not None:
        yield with_rl(correction="none")
    elif dump.has_rollout:
        other = "recompute" if rl.old_logprobs == "rollout" else "rollout"
        yield with_rl(old_logprobs=other, correction="none")
        if rl.corrects:
            yield with_rl(correction="none")
        for correction, level, limits in _CORRECTIONS:
            keys = {"correction": correction, "correction_level": level, "correction_limits": limits}
            if rl.old_logprobs != "rollout" and any(getattr(rl, key) != value for key, value in keys.items()):
                yield with_rl(**keys)
    if first.old_logprobs is not None and first.correction is None:
        name = "old_log_probs of the current weights (as in the first update after a rollout)"
        yield with_samples(name, lambda sample: {"old_logprobs": None})
    values = np.concatenate([_advantages(sample)[sample.sampled] for sample in dump.samples])
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    if deviation > 0:
        for name, centre in (
            ("whitened over the trained tokens", float(values.mean())),
            ("divided by their standard deviation over the trained tokens", 0.0),
        ):
            yield with_samples(f"advantages {name}", partial(_rescaled, centre=centre, deviation=deviation))
    for size, name in _deviation_sizes(dump.samples).items():
        for over, power in (("n, not n - 1", 0.5), ("n - 1, not n", -0.5)):
            scale = (size / (size - 1)) ** power
            yield with_samples(
                f"advantages divided by the deviation over {over}, of the n = {size} {name}",
                partial(_rescaled, centre=0.0, deviation=1 / scale),
            )
    if rl.loss_aggregation == "token_mean" and not (rl.kl_coef or rl.entropy_coef):  # advantages then scale the loss
        for parts in (n for n in range(2, len(dump.samples)) if len(dump.samples) % n == 0):
            name = f"the mean of the token means of {parts} micro-batches of {len(dump.samples) // parts} sequences"
            yield Convention(name, config, _by_micro_batch(dump.samples, parts))
    for temperature in _TEMPERATURES:
        if temperature != config.rollout.temperature:
            changed = replace(config, rollout=replace(config.rollout, temperature=temperature))
            yield Convention(f"rollout.temperature={temperature:g}", changed, dump.samples)
    for tokens, word in ((1, "later"), (-1, "earlier")):
        name = f"one token {word} than in the file"
        yield with_samples(f"response_mask {name}", partial(_moved, tokens=tokens, names=()))
        yield with_samples(f"response_mask and all arrays {name}", partial(_moved, tokens=tokens, names=_ARRAYS))


def _advantages(sample: Sample) -> Floats:
    assert sample.advantages is not None, "read_step_dump refuses a file without advantages"
    return sample.advantages


def _rescaled(sample: Sample, centre: float, deviation: float) -> dict[str, Any]:
    return {"advantages": (_advantages(sample) - centre) / deviation}


def _deviation_sizes(samples: Sequence[Sample]) -> dict[int, str]:
    """Number of values of which a standard deviation may be -> what they are. The samples of a group have the same
    prompt, or are next to each other with advantages whose sum is about 0; groups of several sizes are not found."""
    sizes = {sum(sample.length for sample in samples): "trained tokens", len(samples): "samples"}
    by_prompt = {*Counter(sample.prompt.tokens for sample in samples).values()}
    values = np.array([_advantages(sample)[sample.sampled][0] if sample.length else 0.0 for sample in samples])
    limit = 1e-3 * max(float(np.abs(values).max()), 1e-9)
    centred = [
        n
        for n in range(2, len(samples))
        if len(samples) % n == 0 and np.abs(values.reshape(-1, n).sum(1)).max() < limit
    ]
    group = by_prompt.pop() if len(by_prompt) == 1 else 1
    group = group if group > 1 else next(iter(centred), 1)
    sizes[group] = "samples of a group"
    return {size: name for size, name in sizes.items() if size > 1}


def _by_micro_batch(samples: Sequence[Sample], parts: int) -> list[Sample]:
    """Samples with advantages that turn the mean over all tokens into the mean of the means over `parts` parts."""
    size = len(samples) // parts
    lengths = np.array([sample.length for sample in samples], np.float64)
    of_part = np.maximum(lengths.reshape(parts, size).sum(1), 1).repeat(size)
    factors = lengths.sum() / parts / of_part
    return [
        replace(sample, advantages=(_advantages(sample) * factor).astype(np.float32))
        for sample, factor in zip(samples, factors, strict=True)
    ]


def _moved(sample: Sample, tokens: int, names: Sequence[str]) -> dict[str, Any]:
    """The mask and these arrays, moved to later positions by this number of tokens."""
    mask = shifted(sample.sampled, tokens)
    mask[0] = False  # no position predicts the first token
    arrays = {name: getattr(sample, name) for name in names}
    return {"sampled": mask} | {name: shifted(v, tokens) for name, v in arrays.items() if v is not None}


def _written(value: Any) -> str:
    """A value as it is written in a config."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


# ---------------------------------------------------------------- output


def _check_ids(dump: StepDump, config: RlConfig, name: str) -> None:
    vocabulary = hf.vocabulary_size(config.model.path)
    for index, sample in enumerate(dump.samples):
        if sample.tokens.min() < 0 or sample.tokens.max() >= vocabulary:
            raise UserError(
                f"{name}: row {index}: input_ids has {sample.tokens.min()} to {sample.tokens.max()}, but the model "
                f"has {vocabulary} tokens: set model.path to the trained model."
            )


def _described(dump: StepDump) -> str:
    tokens = sum(len(sample) for sample in dump.samples)
    trained = sum(sample.length for sample in dump.samples)
    return f"{counted(len(dump.samples), 'sequence')}, {counted(tokens, 'token')}, {trained:,} of them trained"


def _notes(config: RlConfig, dump: StepDump) -> list[str]:
    first = dump.samples[0]
    notes = []
    if first.old_logprobs is None:
        notes.append("note     no old_log_probs in the file: weft computes them with the given weights")
    if first.correction is None and not dump.has_rollout:
        notes.append("note     no correction in the file: rl.correction is not compared")
    elif first.correction is None and config.rl.corrects:
        notes.append(
            f"note     rl.correction={config.rl.correction} is computed from the engine's logprobs of the file"
        )
    if first.ref_logprobs is not None and not config.rl.kl_coef:
        notes.append("note     ref_log_prob is not read: this config has no KL in the loss")
    return notes


def _logprobs_line(engine: Engine, dump: StepDump) -> str:
    """The differences between the file's old logprobs and the logprobs of the given weights."""
    if dump.samples[0].old_logprobs is None:
        return "logprobs not in the file"
    plan, local = engine.plan_step(ReadSamples(dump.samples, routed=False))
    read = engine.readout(plan, local, ("logprob",))
    gaps = [
        np.abs(read[index]["logprob"].numpy() - sample.old_logprobs)[sample.sampled]
        for index, sample in enumerate(dump.samples)
        if sample.length and sample.old_logprobs is not None
    ]
    joined = np.concatenate(gaps)
    return (
        f"logprobs weft's differ from old_log_probs by {joined.mean():.3g} on average, {joined.max():.3g} at most "
        "(rounding only, if the weights are those of the old policy)"
    )


def _numbers(computed: Computed, dump: StepDump) -> list[str]:
    rows = (("loss", computed.loss, dump.loss), ("gradient norm", computed.grad_norm, dump.grad_norm))
    return [
        f"{name:<14} weft {weft_value:.8g}, the file {'none' if file_value is None else f'{file_value:.8g}'}"
        for name, weft_value, file_value in rows
    ]


def _differences(computed: Computed, dump: StepDump) -> str:
    words = []
    if dump.loss is not None:
        words.append(f"loss differs by {abs(computed.loss - dump.loss):.2g}")
    if dump.grad_norm is not None:
        words.append(f"gradient norm by {abs(computed.grad_norm - dump.grad_norm):.2g}")
    return ", ".join(words)


def _conclude(configured: Computed, dump: StepDump, tolerance: float, agrees: bool, fitting: Sequence[str]) -> None:
    if agrees:
        say(f"agrees   within {tolerance:g}: {_differences(configured, dump)}")
        return
    say(f"differs  by more than {tolerance:g}: {_differences(configured, dump)}")
    for line in fitting:
        say(line)
    factor = None if fitting else _common_factor(configured, dump, tolerance)
    if factor is not None:
        say(f"fits     loss and gradient are {factor:.6g} times weft's, as if the trainer scaled its loss")
    elif not fitting:
        say("No single convention that weft tries explains the difference (docs/how-to/compare-step.md).")


def _common_factor(configured: Computed, dump: StepDump, tolerance: float) -> float | None:
    """The factor between weft's numbers and the file's, if it is the same for loss and gradient norm."""
    if dump.loss is None or dump.grad_norm is None or configured.grad_norm == 0:
        return None
    factor = dump.grad_norm / configured.grad_norm
    scaled = replace(configured, loss=configured.loss * factor, grad_norm=dump.grad_norm)
    # A loss of about 0 fits every factor.
    is_clear = abs(configured.loss) > 100 * tolerance * configured.scale
    return factor if is_clear and fits(scaled, dump, tolerance) else None
