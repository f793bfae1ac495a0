"""weft's vLLM engine with a real server on CPU: what it generates is what transformers computes, before and after its
weights have changed, and it ends in an error when it ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.support.toy_tokenizers import byte_tokenizer
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.process import EngineDiedError
from weft.inference.vllm.engine import VllmEngine
from weft.inference.vllm.interpreter import find
from weft.inference.vllm.server import Settings
from weft.inference.weight_sync.protocol import SyncError

MEAN, LARGEST = 1e-5, 1e-4  # of |logprob - transformers'|
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(40, 80)), (11, 200, 3, 90, 41, 17, 5)]
SHAPE = dict(
    vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.1, tie_word_embeddings=True,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def make_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one shape."""
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"m{seed}", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def settings(model: Path, folder: Path, **options: Any) -> Settings:
    variables = {"VLLM_LOGGING_LEVEL": "INFO"}  # which conftest.py sets for this process
    defaults = dict(
        interpreter=find(sys.executable), name="vllm-0", max_tokens=1024, dtype="float32", variables=variables
    )
    return Settings(model=str(model), folder=folder, **{**defaults, **options})


@pytest.fixture(scope="module")
def engine(models: list[Path], loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    started = loop.run(VllmEngine.start(settings(models[0], tmp_path_factory.mktemp("engines")), version=1))
    yield started
    loop.run(started.close())


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: tuple[int, ...], completion: Completion) -> Tensor:
    """[G, V] that each token of the completion was drawn from, at temperature 1."""
    ids = torch.tensor([[*prompt, *completion.tokens]])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1]


def difference(logprobs: Tensor, completion: Completion) -> Tensor:
    """[G] |engine's logprob - ours|."""
    chosen = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    return (chosen - torch.tensor(completion.logprobs)).abs()


def is_of(model: PreTrainedModel, prompt: tuple[int, ...], completion: Completion, temperature: float = 1.0) -> bool:
    off = difference((logits_of(model, prompt, completion) / temperature).log_softmax(-1), completion)
    return float(off.mean()) < MEAN and float(off.max()) < LARGEST


def ask(
    engine: VllmEngine, loop: asyncio.Runner, sampling: SamplingParams, seeds: tuple[int, ...] = (1,)
) -> list[list[Completion]]:
    async def all_of_them() -> list[list[Completion]]:
        requests = (Request(f"prompt {n}", prompt, seeds, sampling) for n, prompt in enumerate(PROMPTS))
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return loop.run(all_of_them())


def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    engine: VllmEngine, loop: asyncio.Runner, models: list[Path]
) -> None:
    model = plain(models[0])
    for prompt, (completion,) in zip(PROMPTS, ask(engine, loop, SamplingParams(24, temperature=0)), strict=True):
        logits = logits_of(model, prompt, completion)
        assert list(completion.tokens) == logits.argmax(-1).tolist()
        assert is_of(model, prompt, completion)
        assert completion.finish == "length" and completion.versions == ((1, 24),)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drawn_tokens_come_with_the_logprobs_that_they_were_drawn_with(
    temperature: float, engine: VllmEngine, loop: asyncio.Runner, models: list[Path]
) -> None:
    model = plain(models[0])
    answers = ask(engine, loop, SamplingParams(24, temperature=temperature), seeds=(3, 4, 3))
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        assert all(is_of(model, prompt, completion, temperature) for completion in completions)
        assert completions[0] == completions[2] and completions[0].tokens != completions[1].tokens


def test_with_some_tokens_left_out_logprobs_are_among_the_kept(
    engine: VllmEngine, loop: asyncio.Runner, models: list[Path]
) -> None:
    model = plain(models[0])
    for prompt, (completion,) in zip(PROMPTS, ask(engine, loop, SamplingParams(16, top_k=5)), strict=True):
        logits = logits_of(model, prompt, completion)
        threshold = logits.topk(5).values[:, -1:]
        logprobs = logits.masked_fill(logits < threshold, -torch.inf).log_softmax(-1)
        assert float(difference(logprobs, completion).max()) < LARGEST
        assert completion.kept_logmass is None  # vLLM does not tell it


def test_end_tokens_and_stop_texts_end_a_completion_and_belong_to_it(engine: VllmEngine, loop: asyncio.Runner) -> None:
    (free,) = ask(engine, loop, SamplingParams(24), seeds=(5,))[0]
    position = next(n for n in range(3, 24) if free.tokens[n] not in free.tokens[:n])
    (ended,) = ask(engine, loop, SamplingParams(24, ends=(free.tokens[position],)), seeds=(5,))[0]
    assert ended.finish == "end" and ended.tokens == free.tokens[: position + 1]
    tokenizer = byte_tokenizer()
    (sampled,) = ask(engine, loop, SamplingParams(48, temperature=0.7), seeds=(5,))[2]
    text = tokenizer.decode(sampled.tokens[:20])
    stop = next(text[n : n + 2] for n in range(2, len(text)) if "\ufffd" not in text[n : n + 2])
    (stopped,) = ask(engine, loop, SamplingParams(48, temperature=0.7, stop=(stop,)), seeds=(5,))[2]
    assert stopped.finish == "end" and stop in tokenizer.decode(stopped.tokens)
    assert stop not in tokenizer.decode(stopped.tokens[:-1])
    assert stopped.tokens == sampled.tokens[: len(stopped.tokens)]


def test_requests_under_way_go_on_under_the_new_weights(
    engine: VllmEngine, loop: asyncio.Runner, models: list[Path]
) -> None:
    prompt, sampling = PROMPTS[2], SamplingParams(600, temperature=1.0)

    async def update_meanwhile() -> list[Completion]:
        running = asyncio.create_task(engine.generate(Request("long", prompt, (1, 2, 3), sampling)))
        await asyncio.sleep(0.6)
        await engine.reload(models[1], 2)
        return await running

    old, new = plain(models[0]), plain(models[1])
    for completion in loop.run(update_meanwhile()):
        (first, before), (second, after) = completion.versions
        assert (first, second) == (1, 2) and before + after == 600 and before > 0
        for model, span in ((old, slice(0, before)), (new, slice(before, None))):
            off = difference(logits_of(model, prompt, completion).log_softmax(-1), completion)[span]
            assert float(off.mean()) < MEAN and float(off.max()) < LARGEST  # caches were computed anew
    loop.run(engine.reload(models[0], 3))
    for prompt, (completion,) in zip(PROMPTS, ask(engine, loop, SamplingParams(16)), strict=True):
        assert is_of(old, prompt, completion) and completion.versions == ((3, 16),)


def test_a_paused_engine_keeps_requests_and_an_aborted_one_returns_what_they_have(
    engine: VllmEngine, loop: asyncio.Runner
) -> None:
    async def pause_then_abort() -> tuple[bool, list[Completion]]:
        await engine.pause()
        running = asyncio.create_task(engine.generate(Request("long", PROMPTS[0], (1, 2), SamplingParams(900))))
        await asyncio.sleep(0.5)
        waited = not running.done()
        await engine.resume()
        await asyncio.sleep(0.5)
        await engine.abort()
        return waited, await running

    waited, completions = loop.run(pause_then_abort())
    assert waited
    assert all(completion.finish == "abort" and 0 < len(completion.tokens) < 900 for completion in completions)


def test_an_update_that_fails_leaves_nothing_to_sample_from_until_one_succeeds(
    engine: VllmEngine, loop: asyncio.Runner, models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(models[1] / "model.safetensors")
    broken = {name.replace("layers.1.self_attn.k_proj", "layers.1.self_attn.kk_proj"): t for name, t in tensors.items()}
    save_file(broken, tmp_path / "model.safetensors")

    async def fail_then_succeed() -> list[Completion]:
        with pytest.raises(SyncError, match=r"vllm-0 did not receive version 4, and is paused.*kk_proj"):
            await engine.reload(tmp_path, 4)
        with pytest.raises(SyncError, match="no complete weights"):
            await engine.resume()
        waiting = asyncio.create_task(engine.generate(Request("early", PROMPTS[0], (1,), SamplingParams(8))))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await engine.reload(models[2], 5)
        await engine.resume()
        return await waiting

    (completion,) = loop.run(fail_then_succeed())
    assert completion.versions == ((5, 8),) and is_of(plain(models[2]), PROMPTS[0], completion)


def test_options_that_the_server_does_not_know_are_told_by_it(
    loop: asyncio.Runner, models: list[Path], tmp_path: Path
) -> None:
    wrong = settings(models[0], tmp_path, name="vllm-1", options={"max_num_seq": 3, "max_num_seqsss": 4})
    with pytest.raises(EngineDiedError, match=r"(?s)vllm-1 ended with status 2 while starting.*max-num-seqsss"):
        loop.run(VllmEngine.start(wrong))


@pytest.mark.parametrize("target", ["core", "server", "guard"])
def test_an_engine_that_is_killed_ends_all_that_waits_within_seconds(
    target: str, loop: asyncio.Runner, models: list[Path], tmp_path: Path
) -> None:
    async def kill_while_running() -> tuple[str, float]:
        engine = await VllmEngine.start(settings(models[0], tmp_path))
        served: Any = engine._served
        outer = psutil.Process(served._process._process.pid)
        (guard,) = outer.children()
        (server,) = guard.children()
        family = server.children(recursive=True)
        core = next(
            process
            for process in family
            if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline())
        )
        requests = [Request(f"prompt {n}", PROMPTS[n], (1, 2), SamplingParams(900)) for n in range(3)]
        running = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        {"core": core, "server": server, "guard": guard}[target].kill()
        errors = await asyncio.gather(*running, return_exceptions=True)
        seconds = time.monotonic() - began
        assert all(isinstance(error, EngineDiedError) for error in errors)
        await engine.close()
        processes = [outer, guard, server, *family]
        psutil.wait_procs(processes, timeout=10)
        alive = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not alive
        return str(errors[0]), seconds

    message, seconds = loop.run(kill_while_running())
    print(message, seconds)
    assert seconds < 8
    assert "vllm-0" in message and "generating prompt 0" in message and "prompt 2" in message
    assert f"The end of {tmp_path / 'vllm-0.log'}" in message
