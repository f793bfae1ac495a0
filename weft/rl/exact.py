"""rl.on_policy=exact: the sampling policy and the trained policy are bitwise equal (docs/explanation/exact.md).

Before training, a few sequences of this model are sampled and compared on this machine. During training, every sample
must match.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.config.rl_schema import RlConfig
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.selfcheck.architecture import text_vocabulary
from weft.errors import UserError
from weft.inference.base import Request, RolloutEngine, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.inference.types import Floats, Prompt, Sample, samples_of
from weft.launch.consistency import max_over_ranks
from weft.models.lora import samples_separate
from weft.rl.corrections import comparable
from weft.rl.rollouts import rollout_group

# (prompt, completion) lengths of the tried sequences: one token, more than a block of keys, and uneven lengths.
_LENGTHS = ((1, 6), (58, 9), (13, 24), (70, 1), (13, 5), (30, 40))
_INSTEAD = "Set rl.on_policy=measured, which corrects for the difference (rl.correction)"
_PROMPTS, _SAMPLES, _TOKENS = 8, 4, 64  # for a separate engine: prompts, samples of each, tokens of each sample
_ENGINES = {
    "vllm": "vLLM's batch-invariant kernels exist only on CUDA (weft sets VLLM_BATCH_INVARIANT there)",
    "sglang": "Its kernels differ from the trainer's",
    "hf": "It computes as the embedded engine does, on the same device with as many threads",
}


@dataclass(frozen=True)
class ExactnessResult:
    """The result of a comparison. tokens: number of compared tokens. differing, worst: number of logprobs that differ,
    and their largest difference, each on the worst rank. moved: number of completions whose tokens or logprobs change
    when their request is generated alone."""

    tokens: int
    differing: int
    worst: float
    moved: int

    @property
    def exact(self) -> bool:
        return not self.differing and not self.moved


def prove_exact(
    engine: Engine, embedded: EmbeddedEngine, longest_prompt: int, longest_completion: int
) -> ExactnessResult:
    """Sample a few sequences and read them with the trainer. UserError if any logprob differs, or if a completion
    depends on the batch. Collective.

    embedded: awake on every rank, with the trainer's weights. longest_prompt, longest_completion: limits on the tried
    lengths, in tokens.
    """
    proof = _compare(engine, embedded, _requests(engine, longest_prompt, longest_completion))
    if not proof.exact:
        reasons = [f"{proof.moved} completions depend on the other requests of the batch"] if proof.moved else []
        if proof.differing:
            reasons.insert(
                0, f"at least {proof.differing} have a different logprob in the trainer, by at most {proof.worst:.1e}"
            )
        raise UserError(
            f"rl.on_policy=exact: of {proof.tokens} tokens sampled for the check at start, {'; '.join(reasons)}. "
            f"{_reason(engine)} {_INSTEAD}."
        )
    return proof


def _requests(engine: Engine, longest_prompt: int, longest_completion: int) -> list[Request]:
    generator = np.random.default_rng(0)
    vocabulary = text_vocabulary(engine.module)
    requests = []
    for number, (prompt, completion) in enumerate(_LENGTHS):
        tokens = generator.integers(vocabulary, size=min(prompt, longest_prompt)).tolist()
        sampling = SamplingParams(min(completion, longest_completion), engine.config.temperature)
        requests.append(Request(f"exact {number}", tuple(tokens), tuple(range(1 + number % 3)), sampling))
    return requests


def _compare(engine: Engine, embedded: EmbeddedEngine, requests: list[Request]) -> ExactnessResult:
    """Every rank samples all requests, and reads its own documents."""
    batched = embedded.generate(requests)
    separate = [completions for request in requests[::-1] for completions in embedded.generate([request])][::-1]
    moved = sum(
        (a.tokens, a.logprobs) != (b.tokens, b.logprobs)
        for first, second in zip(batched, separate, strict=True)
        for a, b in zip(first, second, strict=True)
    )
    documents, recorded = [], []
    for group, (request, completions) in enumerate(zip(requests, batched, strict=True)):
        for completion in completions:
            tokens = torch.tensor(request.tokens + completion.tokens)
            documents.append(Document(tokens, torch.ones(len(tokens)), source=request.id, group=group))
            recorded.append(torch.tensor(completion.logprobs, dtype=torch.float32))
    read = engine.readout(*engine.plan_step(documents))
    differences = [(readouts["logprob"][-len(recorded[i]) :] - recorded[i]).abs() for i, readouts in read.items()]
    local = torch.cat([torch.zeros(1), *differences])
    numbers = [float((local != 0).sum()), float(local.nan_to_num(nan=float("inf")).max()), moved]
    worst = max_over_ranks(numbers, engine.mesh.world_group, engine.device)
    return ExactnessResult(sum(map(len, recorded)), int(worst[0]), worst[1], int(worst[2]))


def _reason(engine: Engine) -> str:
    """The known cause of a difference, and the remedy."""
    if engine.lora is not None and not samples_separate(engine.config.lora):
        where = "Adapters are separate from the weights in the trainer, but merged in the engine"
        return f"{where}: set lora.sampling=separate."
    if engine.lora is not None and engine.module.head.lora is not None:
        return "The trainer multiplies by the head and its adapter in one matmul: remove the head from lora.targets."
    if engine.precision.compute != torch.float32:
        return "This is known to work in fp32: set fsdp.param_dtype=fp32."
    if engine.device.type != "cpu":
        return f"Results of kernels on {engine.device.type} depend on the shape of their inputs."
    if not engine.built.uses_bounds:
        return "This family has layers other than attention, which weft cannot make exact."
    if torch.get_num_threads() > 1:
        return f"Each rank has {torch.get_num_threads()} threads: try OMP_NUM_THREADS=1."
    return "Results of this family's code depend on the shape of its inputs."


async def try_engine(
    config: RlConfig,
    engine: RolloutEngine,
    read: Callable[[Sequence[Sample]], Awaitable[None]],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
) -> str:
    """Sample answers to the run's first prompts with a separate engine, and read them with the trainer. Returns the
    line that reports exactness. UserError if a logprob differs. read: sets `old` of samples."""
    short = replace(sampling, max_new_tokens=min(_TOKENS, sampling.max_new_tokens))
    rollouts = (
        rollout_group(prompt, _SAMPLES, engine, short, None, config.train.seed, "exact ")
        for prompt in prompts[:_PROMPTS]
    )
    samples = [sample for sample in samples_of(await asyncio.gather(*rollouts)) if sample.length]
    await read(samples)
    sampled, old = (np.concatenate([values(s)[s.sampled] for s in samples]) for values in (comparable, _old))
    differences, name = np.abs(sampled.astype(np.float64) - old), config.rollout.engine
    if differences.any():
        asked_for, why = min(len(prompts), _PROMPTS), _ENGINES.get(name, "It computes differently from the trainer")
        raise UserError(
            f"rl.on_policy=exact: rollout.engine={name} is not exact here: {int((differences > 0).sum())} of "
            f"{len(differences)} tokens that it sampled for {asked_for} of this run's prompts have a different "
            f"logprob in the trainer, by {differences.mean():.1e} on average and at most {differences.max():.1e}. "
            f"{why}. {_INSTEAD}, or rollout.engine=embedded, which is exact on CPU in fp32."
        )
    count = len(differences)
    return f"exact    {count} tokens sampled by {name} for a check: the trainer's logprobs are bitwise equal"


def _old(sample: Sample) -> Floats:
    assert sample.old_logprobs is not None, f"sample {sample.id} has no logprobs of the old policy"
    return sample.old_logprobs


def require_exact(samples: Sequence[Sample]) -> None:
    """Raise UserError if the logprob of any sampled token differs from the trainer's in any bit."""
    for sample in samples:
        if not sample.counts or not sample.length:
            continue
        old, rollout = (x[sample.sampled] for x in (_old(sample), comparable(sample)))
        if not np.array_equal(old, rollout):
            index = int((old != rollout).argmax())
            raise UserError(
                f"rl.on_policy=exact: sample {sample.id}: {int((old != rollout).sum())} of {len(old)} tokens have a "
                f"different logprob in the trainer than in the engine. The first is sampled token {index}: "
                f"{old[index]:.9g} and {rollout[index]:.9g}. {_INSTEAD}."
            )
