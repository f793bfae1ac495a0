"""`weft plugins` and `weft engine check`: list the names that installed packages provide, and check that their objects
meet the requirements of a run."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

from weft.config.conditions import ENGINES
from weft.config.rl_schema import BUILT_IN_REWARDS
from weft.config.schema import FsdpConfig, ModelConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.standalone import Standalone, engine_class
from weft.inference.types import Prompt
from weft.inference.weight_sync.protocol import SyncError
from weft.inference.weight_sync.sender import EngineTarget, Sender
from weft.launch.options import PluginsOptions
from weft.launch.process import join
from weft.plugins import GROUPS, load_plugin, package_of, plugins, shadowed
from weft.rl.algorithms import UNUSABLE
from weft.rl.environments.base import Reply, load_class
from weft.rl.environments.pool import EnvironmentPool
from weft.rl.environments.worker import plain
from weft.rl.rewards.base import try_rewards
from weft.terminal import say

# Prompts of the test requests: one token, and uneven lengths.
_PROMPTS = ((5,), (7, 11, 13), tuple(range(20, 57)), (3, 3, 3, 3))
_SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.8, ends=(2,))
_SEEDS = (1, 2**62 + 5)
_CLOSE = 1e-4  # of logprobs in fp32
_TURNS, _SECONDS = 8, 60.0
_ANSWERS = ("This is a placeholder answer.", "", "7", '{"text": "7"}')


def run(options: PluginsOptions) -> None:
    """List the names of all groups, or check one. UserError for the first requirement that is not met."""
    if not options.what:
        for key, group in GROUPS.items():
            for entry in plugins(group):
                say(f"{group.removeprefix('weft.'):<13} {entry.name:<20} {entry.value}  of {package_of(entry)}")
                built_in = {"rollout.engine": ENGINES, "rl.reward": BUILT_IN_REWARDS}.get(key, ())
                problem = "".join(shadowed(key, [entry.name], built_in))
                problem = UNUSABLE.get(entry.name, "") if key == "rl.algorithm" else problem
                try:
                    load_plugin(entry, key)
                except UserError as error:
                    problem = str(error)
                if problem:
                    say(f"{'':<13} cannot be used: {problem}")
        return
    kind, name = options.what
    row = json.loads(options.row)
    checks: dict[str, Callable[[], None]] = {
        "engine": lambda: check_engine(name),
        "environment": lambda: check_environment(name, row),
        "reward": lambda: check_reward(name, row),
    }
    checks[kind]()


def check_engine(name: str) -> None:
    """Send a tiny random model to an engine of this name by weight sync, and compare its samples with plain
    transformers."""
    with tempfile.TemporaryDirectory() as folder, join("cpu") as ranks, ThreadPoolExecutor(1) as pool:
        path = str(Path(folder) / "model")
        torch.manual_seed(0)
        shape = transformers.Qwen3Config(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3, eos_token_id=2,
        )  # fmt: skip
        plain_model = transformers.AutoModelForCausalLM.from_config(shape).eval()
        plain_model.save_pretrained(path)
        trainer = Engine(EngineConfig(model=ModelConfig(path=path), fsdp=FsdpConfig(param_dtype="fp32")), ranks)
        sender = Sender(trainer, [EngineTarget(name)])
        engine = engine_class(name)(path, dtype=torch.float32)

        def sync(version: int) -> None:
            receiving = pool.submit(engine.receive, sender.tickets[name][0], version)
            sender.send(version)
            receiving.result()

        _require(_refuses(engine), "an engine without weights samples: generate() must raise SyncError")
        sync(1)
        drawn = _sampled(engine, plain_model, 1)
        say(f"ok       {sum(len(c.tokens) for c in drawn)} tokens have the logprobs of plain transformers")
        single_completions = [
            completion for n in range(len(_PROMPTS)) for completion in engine.generate([_request(n)])[0]
        ]
        _require(
            [c.tokens for c in single_completions] == [c.tokens for c in drawn],
            "a request that is generated alone has other tokens than in a batch: a sample must depend only on its seed",
        )
        say("ok       samples depend on their seeds, not on the batch")
        numbered, unfinished = dict[int, Sequence[Completion]](), {n: _request(n) for n in range(len(_PROMPTS))}
        for _ in range(1000):
            finished, _ = engine.advance(unfinished, 0.0)
            numbered |= finished
            unfinished = {}
            if len(numbered) == len(_PROMPTS):
                break
        _require(
            [c.tokens for n in range(len(_PROMPTS)) for c in numbered.get(n, ())] == [c.tokens for c in drawn],
            "advance() returns other samples than generate()",
        )
        say("ok       generation in several calls returns the same samples")
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.add_(0.05)
        plain_model.load_state_dict(dict(trainer.tensors()), strict=False)
        sync(2)
        _sampled(engine, plain_model, 2)
        say("ok       a second sync replaces all weights")
        engine.sleep()
        _require(_refuses(engine), "an engine that sleeps must not sample, because its weights may be old")
        sync(3)
        _sampled(engine, plain_model, 3)
        say(f"ok       {name} sleeps, and wakes up with the weights of the next sync")


def _request(number: int) -> Request:
    return Request(f"check {number}", _PROMPTS[number], _SEEDS, _SAMPLING)


def _refuses(engine: Standalone) -> bool:
    try:
        engine.generate([_request(0)])
    except SyncError:
        return True
    return False


def _sampled(engine: Standalone, plain_model: Any, version: int) -> list[Completion]:
    """Completions of all prompts. UserError if their logprobs differ from plain transformers'."""
    requests = [_request(number) for number in range(len(_PROMPTS))]
    answers = engine.generate(requests)
    _require(
        [len(group) for group in answers] == [len(_SEEDS)] * len(requests), "there must be a completion for each seed"
    )
    for request, group in zip(requests, answers, strict=True):
        for completion in group:
            n = len(completion.tokens)
            _require(0 < n <= _SAMPLING.max_new_tokens, f"a completion has {n} tokens; it must have 1 to 12")
            ended = completion.tokens[-1] in _SAMPLING.ends
            _require(
                (completion.finish == "end") == ended and (ended or n == _SAMPLING.max_new_tokens),
                f"a completion that ends with token {completion.tokens[-1]} has finish `{completion.finish}`",
            )
            _require(completion.versions == ((version, n),), f"versions are {completion.versions}, not {version}")
            ids = torch.tensor([[*request.tokens, *completion.tokens]])
            with torch.no_grad():
                logits = plain_model(ids).logits[0, -n - 1 : -1].float() / _SAMPLING.temperature
            expected = logits.log_softmax(-1).gather(1, ids[0, -n:, None])[:, 0]
            worst = float((torch.tensor(completion.logprobs) - expected).abs().max())
            _require(
                worst <= _CLOSE, f"logprobs differ from those of plain transformers by {worst:.1e} (version {version})"
            )
    return [completion for group in answers for completion in group]


def check_environment(name: str, row: Mapping[str, Any]) -> None:
    """Run two conversations concurrently, in processes like a run's, and then the first one again."""
    kind = load_class(name)
    prompt = Prompt(0, 0, (1,), "", ({"role": "user", "content": str(row.get("prompt", ""))},), row, "the row")

    async def conversation(pool: EnvironmentPool) -> list[Reply | None]:
        worker = await pool.open()
        replies: list[Reply | None] = []
        try:
            for turn in range(_TURNS + 1):
                answer = _ANSWERS[(turn - 1) % len(_ANSWERS)]
                call = ("start", (prompt,)) if not turn else ("step", (answer, list(answer.encode())))
                reply, error = await worker.ask((*call, _SECONDS), _SECONDS + 1)
                _require(error is None, f"{kind.__name__}.{call[0]}{error}")
                _require(turn == 0 or isinstance(reply, Reply), f"{kind.__name__}.step returned {reply!r:.60}")
                replies.append(None if reply is None else plain(reply))
                if turn and not reply.done:
                    has_content = reply.messages or reply.text is not None or reply.tokens is not None
                    _require(bool(has_content), "step() returned no reply and was not done")
                if turn and reply.done:
                    break
            _, error = await worker.ask(("close", (), _SECONDS), _SECONDS + 1)
            _require(error is None, f"{kind.__name__}.close{error}")
        finally:
            await worker.end()
        return replies

    async def play() -> list[list[Reply | None]]:
        pool = EnvironmentPool(name)
        try:
            conversations = await asyncio.gather(conversation(pool), conversation(pool))
            return [*conversations, await conversation(pool)]
        finally:
            await pool.close()

    first, second, repeated = asyncio.run(play())
    say(f"ok       {name} replied {len(first) - 1} times, in separate processes")
    rewards = [reply.reward for reply in first if reply is not None and reply.reward is not None]
    _require(kind.gives_reward or not rewards, "replies have rewards, but the class does not set gives_reward = True")
    if first == second == repeated:
        say("ok       the same row and the same answers give the same replies")
    else:
        say("warning  replies differ between conversations: runs cannot be repeated")


def check_reward(name: str, row: Mapping[str, Any]) -> None:
    """Score placeholder answers of one row, in a process like a run's; twice, and in another order."""
    columns = {key: value for key, value in row.items() if key != "prompt"}
    answer_orders: Sequence[Sequence[str]] = (_ANSWERS, _ANSWERS, _ANSWERS[::-1])
    first, second, reverse = (
        try_rewards([name], texts, prompt=row.get("prompt", ""), **columns) for texts in answer_orders
    )
    errors = [line["errors"] for line in first if line["errors"]]
    _require(not errors, f"it fails: {errors[:1]}")
    say(f"ok       {name} scores {len(first)} answers: {', '.join(str(line['reward']) for line in first)}")
    _require(first == second, "the same answers have different rewards in the second call")
    _require(first == reverse[::-1], "a reward depends on the order of the answers")
    say("ok       rewards depend only on the answers")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UserError(f"weft plugins: {problem} (docs/how-to/extend.md)")
