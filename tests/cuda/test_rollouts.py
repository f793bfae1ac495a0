"""The embedded engine on a device: transformers' tokens, and the trainer's own logprobs of what it samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers

from tests.cuda.cases import BF16, FP32, gradient, kind
from tests.support.cases import open_engine, saved_model
from weft.engine.batch.document import Document
from weft.engine.batch.replay import align_routes
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.launch.process import Ranks
from weft.rl.exact import prove_exact

ENDS = (2, 17, 40)
PROMPTS = [(5,), (9, 8, 7, 6, 5, 4, 3), (11, 12) * 10, (3, 100, 50), (3, 100, 51)]
DENSE, EXPERTS = ("llama", "qwen3", "gemma3_text", "lfm2"), ("gpt_oss", "qwen3_moe", "deepseek_v3")


def requests(sampling: SamplingParams, samples: int = 1) -> list[Request]:
    return [
        Request(str(n), prompt, tuple(range(10 * n, 10 * n + samples)), sampling) for n, prompt in enumerate(PROMPTS)
    ]


def sampled(engine: Engine, *, routes: bool = False, tokens: int = 40) -> list[tuple[Request, list[Completion]]]:
    """Several samples of each prompt, which end at different times."""
    embedded = EmbeddedEngine(engine, routes=routes)
    embedded.wake()
    batch = requests(SamplingParams(tokens, 1.0, ends=ENDS), samples=4)
    answers = list(zip(batch, embedded.generate(batch), strict=True))
    embedded.sleep()
    return answers


def differences(engine: Engine, answers: Sequence[tuple[Request, list[Completion]]]) -> torch.Tensor:
    """Of every token that was sampled: its logprob in the trainer, less that where it was sampled."""
    documents, recorded = [], []
    for request, completions in answers:
        for completion in completions:
            tokens = torch.tensor([*request.tokens, *completion.tokens])
            chosen = None if completion.routes is None else align_routes(completion.routes, len(tokens))
            documents.append(Document(tokens, torch.ones(len(tokens)), routes=chosen))
            recorded.append(torch.tensor(completion.logprobs))
    plan = engine.plan(engine.planner.metadata(documents))
    read = engine.readout(plan, dict(enumerate(documents)))
    return torch.cat([read[i]["logprob"][-len(logprobs) :] - logprobs for i, logprobs in enumerate(recorded)])


@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
def test_greedy_answers_are_transformers_own(family: str, device: torch.device, ranks: Ranks) -> None:
    path = saved_model(family)
    engine = open_engine(path, "1", device=kind(device), **FP32)
    embedded = EmbeddedEngine(engine)
    embedded.wake(version=3)
    answers = embedded.generate(requests(SamplingParams(16, 0.0, ends=ENDS)))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    for prompt, (completion,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt], device=device)
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=16, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert list(completion.tokens) == out
        assert completion.versions == ((3, len(out)),)


@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
def test_fp32_logprobs_are_the_trainers(family: str, device: torch.device, ranks: Ranks) -> None:
    engine = open_engine(saved_model(family), "1", device=kind(device), **FP32)
    deviations = differences(engine, sampled(engine, routes=family in EXPERTS))
    assert len(deviations) > 100
    assert float(deviations.abs().max()) < 1e-4, float(deviations.abs().max())


@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
def test_bf16_logprobs_are_the_trainers_but_for_rounding(family: str, device: torch.device, ranks: Ranks) -> None:
    """Of weights that were trained on, of models as random as one begins with; experts on the recorded routes."""
    engine = open_engine(saved_model(family, initializer_range=0.05), "1", device=kind(device), **BF16)
    gradient(engine, 0)
    engine.apply(1e-3)
    deviations = differences(engine, sampled(engine, routes=family in EXPERTS))
    mean, largest = float(deviations.abs().mean()), float(deviations.abs().max())
    assert len(deviations) > 100
    assert mean < MEAN and largest < LARGEST, (mean, largest)


MEAN, LARGEST = 0.02, 0.2  # nats; on a CPU the worst family has 0.0035 and 0.021


def test_it_samples_what_the_distribution_says(device: torch.device, ranks: Ranks) -> None:
    """First tokens of many samples of one prompt: their frequencies, against the trainer's probabilities."""
    engine = open_engine(saved_model("qwen3", initializer_range=0.05), "1", device=kind(device), **FP32)
    embedded = EmbeddedEngine(engine)
    embedded.wake()
    count = 4000
    request = Request("a", PROMPTS[1], tuple(range(count)), SamplingParams(1, 1.0))
    ((*completions,),) = embedded.generate([request])
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in completions]), minlength=128).double()
    documents = {n: Document(torch.tensor([*PROMPTS[1], n]), torch.ones(len(PROMPTS[1]) + 1)) for n in range(128)}
    read = engine.readout(engine.plan(engine.planner.metadata(documents.values())), documents)
    expected = torch.stack([read[n]["logprob"][-1] for n in range(128)]).double().exp() * count
    likely = expected > 5
    chi_square = float(((counts - expected).square() / expected)[likely].sum())
    freedom = int(likely.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_the_same_seed_gives_the_same_and_waking_takes_new_weights(device: torch.device, ranks: Ranks) -> None:
    engine = open_engine(saved_model("qwen3"), "1", device=kind(device), **BF16)
    embedded = EmbeddedEngine(engine)
    embedded.wake()
    batch = requests(SamplingParams(12, 1.0, ends=ENDS))
    first, repeated = embedded.generate(batch), embedded.generate(batch)
    assert [c.tokens for (c,) in first] == [c.tokens for (c,) in repeated]
    freed = embedded.sleep()
    assert freed > 0
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.5)
    embedded.wake(version=1)
    assert embedded.generate(batch) != first


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_mode_holds_or_is_refused(dtype: str, device: torch.device, ranks: Ranks) -> None:
    """rl.on_policy=exact is proven at start or refused; it never goes on with logprobs that differ."""
    engine = open_engine(saved_model("qwen3"), "1", device=kind(device), exact=True, fsdp={"param_dtype": dtype})
    embedded = EmbeddedEngine(engine)
    embedded.wake()
    refusal = ""
    try:
        assert prove_exact(engine, embedded, 40, 20).exact
    except UserError as error:
        refusal = str(error)
    print(refusal or f"rl.on_policy=exact holds in {dtype} on {device.type}")
    if refusal:
        assert (device.type, dtype) != ("cpu", "fp32") and "Set rl.on_policy=measured" in refusal
        return
    deviations = differences(engine, sampled(engine))
    assert not bool(deviations.any())
