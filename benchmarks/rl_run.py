"""One contestant of benchmarks/rl.py in this process: weft, or a bare GRPO loop around transformers' generate.

    python benchmarks/rl_run.py weft-rollout SPEC.json

Prints one line of JSON: seconds of each step, warm-up included; of each phase in each step; and the completions'
lengths.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Spec = dict[str, Any]


class DrawnAnswer:
    """What is printed."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.lengths: list[int] = []

    @contextmanager
    def step(self) -> Iterator[Callable[[str], None]]:
        """One step; calling what it gives names the phase that ends there."""
        began = last = time.perf_counter()
        phases: dict[str, float] = {}

        def ends(name: str) -> None:
            nonlocal last
            now = time.perf_counter()
            phases[name] = phases.get(name, 0.0) + now - last
            last = now

        yield ends
        self.seconds.append(time.perf_counter() - began)
        self.phases.append(phases)

    def print(self) -> None:
        print(json.dumps({"seconds": self.seconds, "phases": self.phases, "lengths": self.lengths}))


# ---------------------------------------------------------------- weft


class InProcess:
    """An ActorGroup of one trainer rank, which is this process."""

    def __init__(self, actor: object) -> None:
        self.actor = actor

    def __len__(self) -> int:
        return 1

    async def all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.actor, method)(*args)]

    async def one(self, number: int, method: str, *args: Any) -> Any:
        return getattr(self.actor, method)(*args)


async def weft_steps(spec: Spec, old_logprobs: str, answer: DrawnAnswer) -> None:
    """The functions that the recipe's loop calls, in its order, with a trainer that is no actor."""
    from weft.config import load_config
    from weft.config.rl_schema import RlConfig
    from weft.launch.ray_actors import ActorGroup
    from weft.observe.folder import RunLock
    from weft.recipes import rl as recipe
    from weft.rl.actors import Actors
    from weft.rl.batch_pool import EmbeddedPool
    from weft.rl.colocation import DeviceSharing
    from weft.rl.state import FRESH
    from weft.rl.trainer import TrainerRank

    config = load_config([], [*spec["keys"], f"rl.old_logprobs={old_logprobs}"], RlConfig)
    task = recipe.read_task(config)
    trainers = cast(ActorGroup, InProcess(TrainerRank(config, "cpu")))
    plan = recipe.RlPlan.from_config(config, task.stream)
    run = recipe.RlRun(config, cast(RunLock, None), task, Actors(trainers, {}, None), plan, FRESH)  # nothing is written
    switch = DeviceSharing(EmbeddedPool(trainers), trainers, shared=True)
    await task.rewards.start(list(task.prompts))
    sampling = recipe.sampling_of(config, (await trainers.call_all("ends"))[0])
    await switch.to_rollouts(0)
    for number in range(1, plan.rollouts + 1):
        began = time.perf_counter()
        step = await recipe.roll_out(run, switch.engine, sampling, number)
        await switch.to_training()
        await recipe.compute_advantages(run, step)
        await recipe.update(run, step)
        with step.phases("sync"):
            await switch.to_rollouts(number)
        run.version = number
        answer.seconds.append(time.perf_counter() - began)
        answer.phases.append(step.phases.seconds)
        answer.lengths += [sample.length for sample in step.samples]
    await task.rewards.close()
    await trainers.call_all("close")


# ---------------------------------------------------------------- the bare loop


def bare_steps(spec: Spec, answer: DrawnAnswer) -> None:
    """What one writes without a library. There is one update per rollout, so that the old policy is the current one,
    and no logprobs are read before it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], weight_decay=0.0, fused=True)
    for number in range(spec["steps"]):
        texts = spec["problems"][number * spec["prompts"] : (number + 1) * spec["prompts"]]
        with answer.step() as ends:
            inputs = tokenizer(texts, return_tensors="pt", padding=True).to("cpu")
            ids, attention_mask = (
                inputs[name].repeat_interleave(spec["group"], 0) for name in ("input_ids", "attention_mask")
            )
            sequences = draw(model, ids, attention_mask, spec["max_new_tokens"])
            completions = sequences[:, ids.shape[1] :]
            sampled = until_end(completions, tokenizer.eos_token_id)
            ends("generate")
            tokenizer.batch_decode(completions, skip_special_tokens=True)  # what a reward reads
            lengths = sampled.sum(1)
            rewards = -(lengths - spec["target"]).abs() / spec["target"]
            ends("reward")
            grouped = rewards.view(-1, spec["group"])
            advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
            attention_mask = torch.cat([attention_mask, sampled.long()], 1)
            for rows in torch.arange(len(ids)).split(spec["rows"]):
                logprobs = read(model, sequences[rows], attention_mask[rows], completions.shape[1])
                loss = grpo_loss(logprobs, logprobs.detach(), advantages.view(-1, 1)[rows], sampled[rows].float())
                (loss.sum() / len(ids)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ends("train")
        answer.lengths += lengths.tolist()


def draw(model: Any, ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> Tensor:
    """[B, prompt + completion], whose rows end with padding."""
    model.eval()
    sequences: Tensor = model.generate(
        ids,
        attention_mask=attention_mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
    )
    model.train()
    return sequences


def until_end(completions: Tensor, end: int) -> Tensor:
    """[B, G] True up to the first end token, with it."""
    ended = (completions == end).long()
    return ended.cumsum(1) - ended == 0


def read(model: Any, sequences: Tensor, attention_mask: Tensor, completion: int) -> Tensor:
    """[B, G] logprobs of the completions; rows are cut to the longest among them."""
    padding = sequences.shape[1] - int(attention_mask.sum(0).nonzero().max()) - 1
    length = sequences.shape[1] - padding
    positions = (attention_mask[:, :length].cumsum(1) - 1).clamp(min=0)
    logits = model(
        sequences[:, :length], attention_mask=attention_mask[:, :length], position_ids=positions, use_cache=False,
        logits_to_keep=completion - padding + 1,
    ).logits[:, :-1]  # fmt: skip
    targets = sequences[:, length - logits.shape[1] : length, None]
    return F.pad(logits.log_softmax(-1).gather(-1, targets).squeeze(-1), (0, padding))


def grpo_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, sampled: Tensor) -> Tensor:
    """[B] mean of each sample's tokens."""
    ratio = (logprobs - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * sampled).sum(1) / sampled.sum(1)


def main() -> None:
    name, path = sys.argv[1:]
    spec, answer = json.loads(Path(path).read_text()), DrawnAnswer()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "bare":
        bare_steps(spec, answer)
    else:
        asyncio.run(weft_steps(spec, name.removeprefix("weft-"), answer))
    answer.print()


if __name__ == "__main__":
    main()
