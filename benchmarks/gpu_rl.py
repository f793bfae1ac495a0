"""A step of reinforcement learning for benchmarks/gpu.py, phase by phase, in one process: no Ray, random rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu_rows import PartRun, Row
from benchmarks.gpu_sft import config_of, draw_weights, write_model
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.inference.base import Request, SamplingParams, seed_of
from weft.inference.types import Prompt, SampleGroup, samples_of
from weft.rl.advantages import advantages
from weft.rl.corrections import correct
from weft.rl.reference_critic import set_readings
from weft.rl.rollouts import group_of
from weft.rl.trainer import TrainerRank

LR = 1e-6


def rl(run: PartRun) -> None:
    """Two steps of Qwen3-0.6B, the first with fewer tokens: it warms up. Every completion has the full length."""
    prompts, group, prompt_tokens, new_tokens = run.pick((32, 8, 256, 256), (2, 2, 6, 4))
    with TemporaryDirectory() as folder:
        config = _config(run, Path(folder), prompts, group, prompt_tokens, new_tokens)
        trainer = TrainerRank(config, run.device.kind, fill=False)  # type: ignore[arg-type]
        draw_weights(trainer.engine.module)
        drawn = np.random.default_rng(0).integers(2, trainer.engine.built.config.vocab_size, (prompts, prompt_tokens))
        step_prompts = [Prompt(i, 0, tuple(map(int, ids)), "") for i, ids in enumerate(drawn)]
        for number, length in ((1, new_tokens // 4), (2, new_tokens)):
            _step(run, trainer, step_prompts, number, length)


def _config(run: PartRun, folder: Path, prompts: int, group: int, prompt_tokens: int, new_tokens: int) -> RlConfig:
    model = write_model(folder / "model", config_of("0.6b", run.tiny))
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(model)
    (folder / "none.jsonl").write_text("")
    words = [
        f"model.path={model}", f"data.path={folder}/none.jsonl", "rl.reward=[length]", f"rl.prompts_per_step={prompts}",
        f"rl.group_size={group}", f"rollout.max_prompt_tokens={prompt_tokens}", f"rollout.max_new_tokens={new_tokens}",
        f"rollout.kv_cache_tokens={prompts * group * (prompt_tokens + new_tokens)}",
        f"step.max_tokens_per_device={run.pick(16_384, 64)}", f"optimizer.lr={LR}",
    ]  # fmt: skip
    return load_config([], words, RlConfig)


def _step(run: PartRun, trainer: TrainerRank, prompts: Sequence[Prompt], number: int, new_tokens: int) -> None:
    groups: list[SampleGroup] = []

    def sync() -> Row:
        return {"GB": trainer.sync(number).bytes / 1e9}

    def generate() -> Row:
        seeds, sampling = range(trainer.config.rl.group_size), SamplingParams(new_tokens)
        requests = [Request(p.id, p.tokens, tuple(seed_of(0, p.id, n) for n in seeds), sampling) for p in prompts]
        groups.extend(map(group_of, prompts, trainer.embedded.generate(requests)))
        return {"tokens": sum(sample.length for sample in samples_of(groups))}

    def sleep() -> Row:
        return {"GB": trainer.sleep_engine() / 1e9}

    def read() -> Row:
        samples = samples_of(groups)
        set_readings(samples, [trainer.read_all(["policy"], samples)])
        deviations = np.concatenate(
            [np.abs(s.old_logprobs - s.rollout_logprobs)[s.sampled] for s in samples if s.old_logprobs is not None]
        )
        tokens = sum(len(sample) for sample in samples)
        return {
            "tokens": tokens,
            "logprob difference, mean": float(deviations.mean()),
            "largest": float(deviations.max()),
        }

    def update() -> Row:
        source = np.random.default_rng(number)
        for sample in samples_of(groups):
            sample.reward = float(source.normal())
        correct(samples_of(groups), trainer.config.rl)
        advantages(groups, trainer.config.rl)
        samples = samples_of(groups)
        line = trainer.update(samples, number, 2, 1, LR).line
        assert not line.get("skipped"), line
        return {"tokens": sum(len(sample) for sample in samples)}

    for phase in (sync, generate, sleep, read, update):
        run.attempt(run.add(step=number, phase=phase.__name__), _timed(run, phase))


def _timed(run: PartRun, phase: Callable[[], Row]) -> Callable[[], Row]:
    def fill() -> Row:
        began = run.device.now()
        figures = phase()
        seconds = run.device.now() - began
        rates = {f"{name}/s": figures[name] / seconds for name in ("tokens", "GB") if name in figures}
        return {"seconds": seconds, **rates, **figures}

    return fill
