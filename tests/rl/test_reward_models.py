"""Reward models in `weft rl`: their scores are those of transformers, mixed with functions; what fails is named."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from examples.judge_reward import judged
from tests.support.cases import MESHES, open_engine, world_of, write_small_job
from tests.support.local_rl import (
    lines_of,
    make_task,
    rollouts_of,
    same_run,
    start,
    write_reward_model,
    write_teacher,
)
from tests.support.pool import run
from tests.support.rl_samples import group
from weft.config.load import load_config
from weft.config.mesh import MeshSizes
from weft.config.rl_schema import RlConfig, reward_names
from weft.errors import ActorError, UserError
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.other_models import OtherModels
from weft.rl.colocation import DeviceSharing
from weft.rl.frozen_ranks import FrozenRanks
from weft.rl.model_engines import policy_config
from weft.rl.reference_critic import check_readings, set_readings
from weft.rl.restarts import RestartBudget
from weft.rl.reward_models import Conversation, ConversationScorer, RewardModelRank
from weft.rl.rewards.calls import RewardOutcome
from weft.rl.trainer import TrainerRank
from weft.verify.harness import Figure
from weft.verify.plants import planted
from weft.verify.score_check import score_figures

MODEL = "rl.reward=[model:{task}/rm, length]"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("task"))
    write_reward_model(folder / "adder", folder / "rm", 0)
    write_reward_model(folder / "adder", folder / "rm-2", 1)
    write_teacher(folder / "adder", folder / "policy")
    return folder


def plain_score(folder: Path, text: str) -> float:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


PARTS = "cluster.offload_during_rollout=[parameters, optimizer, gradients]"


@pytest.mark.covers("rl.reward", "reward_model.param_dtype", "reward_model.ranks")
@pytest.mark.parametrize("placed", [
    ["reward_model.ranks=1"], [PARTS, "rl.dynamic_sampling=1", "reward_model.cpu_offload=true"],
    ["rollout.engine=hf", "cluster.max_staleness=1"], ["rollout.engine=hf", "cluster.placement=colocated", PARTS],
])  # fmt: skip
def test_scores_are_those_of_transformers_and_mixed_with_functions(
    task: Path, tmp_path: Path, placed: list[str]
) -> None:
    """In ranks of their own, and in the trainer's, in turns with each kind of engine; of held-out prompts, too."""
    keys = [
        f"rl.reward=[model:{task}/rm, model:{task}/rm-2, length]", "rl.reward_weights=[2.0, -1.0, 0.5]",
        "train.steps=2", "reward_model.param_dtype=fp32", f"eval.path={task}/held-out.jsonl", "eval.every=1",
    ]  # fmt: skip
    start(task, tmp_path / "run", *keys, *placed)
    rows = [row for rows in rollouts_of(tmp_path / "run").values() for row in rows]
    evaluated = [row for path in (tmp_path / "run/evaluations").glob("*") for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 12 and len(evaluated) == 6, "two steps of 2 x 3 samples, two evaluations of 3"
    for row in [*rows, *evaluated]:
        text = row["prompt"] + row["completion"]
        rewards = json.loads(row["rewards"])
        assert rewards["reward_model"] == pytest.approx(plain_score(task / "rm", text), abs=1e-5)
        assert rewards["reward_model_2"] == pytest.approx(plain_score(task / "rm-2", text), abs=1e-5)
        expected = 2 * rewards["reward_model"] - rewards["reward_model_2"] + 0.5 * rewards["length"]
        assert row["reward"] == pytest.approx(expected, abs=1e-5)
    assert {"rewards/reward_model/mean", "rewards/reward_model_2/mean"} <= lines_of(tmp_path / "run")[0].keys()


def test_reward_models_wake_to_score(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they did not, they would be asked asleep, and say so."""

    async def forgets(switch: DeviceSharing) -> None:
        pass

    monkeypatch.setattr(DeviceSharing, "to_scoring", forgets)
    with pytest.raises(RuntimeError, match="asleep"):
        start(task, tmp_path / "run", f"rl.reward=[model:{task}/rm]", PARTS, "train.steps=1")


# ---------------------------------------------------------------- ranks

CHAT = [
    Conversation("a:1", [{"role": "user", "content": "1 2"}], [{"role": "assistant", "content": "3"}], {}),
    Conversation("a:2", [{"role": "user", "content": "4"}], [{"role": "assistant", "content": "5 6 7"}], {}),
    Conversation("a:3", [{"role": "user", "content": "8 " * 200}], [{"role": "assistant", "content": "9"}], {}),
]


def scored_config(folder: str, words: Sequence[str]) -> RlConfig:
    keys = [
        f"model.path={Path(folder).parent}/model",
        f"data.path={Path(folder).parent}/chat.jsonl",
        f"rl.reward=[model:{folder}]",
        "step.max_tokens_per_device=64",
    ]
    keys += ["rollout.max_prompt_tokens=8", "rollout.max_new_tokens=8", "fsdp.param_dtype=fp32"]
    return load_config([], [*keys, *words], RlConfig)


def scores_of(folder: str, words: Sequence[str]) -> tuple[list[RewardOutcome], int]:
    """(the outcomes, bytes of the weights in a rank)."""
    config = scored_config(folder, words)
    rank = TrainerRank(config, "cpu") if config.reward_model.ranks is None else RewardModelRank(config, folder, "cpu")
    first, *second = rank.score("reward_model", [CHAT[:1], CHAT[1:]])
    scorer = rank.scorer if isinstance(rank, RewardModelRank) else rank.reward_models["reward_model"]
    weights = sum(p.to_local().nbytes for p in scorer.engine.module.parameters() if isinstance(p, DTensor))
    return [*first, *second[0]], weights


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_small_job(folder)
    write_reward_model(folder / "model", folder / "rm", 0)
    return folder / "rm"


@pytest.mark.covers(
    "reward_model.ranks", "reward_model.tp", "reward_model.pp", "reward_model.dp_shard", "reward_model.dp_replicate",
    "reward_model.max_tokens_per_device", "reward_model.cpu_offload",
)  # fmt: skip
@pytest.mark.parametrize(("world", "words"), [
    (1, ["reward_model.ranks=1", "reward_model.cpu_offload=true"]),
    (2, ["reward_model.ranks=2", "reward_model.dp_shard=1", "reward_model.tp=2"]),
    (2, ["reward_model.ranks=2", "reward_model.dp_replicate=2", "reward_model.max_tokens_per_device=32"]),
    (2, ["reward_model.ranks=2", "reward_model.dp_shard=1", "reward_model.pp=2"]),
    (2, []), (2, ["mesh.cp=2"]), (2, ["reward_model.dp_shard=1", "reward_model.tp=2"]),
    (2, ["mesh.tp=2", "reward_model.dp_shard=1", "reward_model.tp=1", "reward_model.pp=2"]),
])  # fmt: skip
def test_conversations_go_through_the_models_own_template(chat_model: Path, world: int, words: list[str]) -> None:
    """One is longer than a row: it has no score, and an error that says so. In ranks of its own, and in the trainer's,
    on their mesh and on another, where it holds what `weft plan` says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_model)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(chat_model, dtype=torch.float32).eval()
    results = run(world, scores_of, str(chat_model), words)
    if "reward_model.tp=2" in words and "reward_model.ranks=2" not in words:
        config = scored_config(str(chat_model), words)
        further_models = OtherModels(config, Blueprint(policy_config(config), "cpu", None), world, "cpu", None)
        (planned,) = further_models.rows(MeshSizes(1, 2, 1, 1, 1, 1))
        assert planned.weights == max(weights for _, weights in results)
    for (*outcomes, long), _ in results:
        for conversation, outcome in zip(CHAT, outcomes, strict=False):
            ids = tokenizer.apply_chat_template([*conversation.prompt, *conversation.answer], return_dict=False)
            with torch.no_grad():
                expected = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
            assert outcome.value == pytest.approx(expected, abs=1e-5) and outcome.error is None
        assert long.value is None and "more than reward_model.max_tokens_per_device" in str(long.error)


def verified(folder: str, mesh: str, plant: str | None) -> list[Figure]:
    sizes = [f"mesh.{axis}={size}" for axis, size in MESHES[mesh].items()]
    base = str(Path(folder).parent / "model")
    words = [f"model.path={base}", "data.path=owner/data", f"rl.reward=[model:{folder}]", *sizes]
    words.append("reward_model.max_tokens_per_device=256")
    engine = open_engine(base, mesh)
    with planted(plant):
        scorer = ConversationScorer(load_config([], words, RlConfig), folder, engine.ranks, shares_with=engine)
        return score_figures({"reward_model": scorer}, engine.ranks)


@pytest.mark.parametrize(("mesh", "plant"), [("2", None), ("1", "score-one-token-early")])
def test_verify_compares_scores(chat_model: Path, mesh: str, plant: str | None) -> None:
    (figure,) = run(world_of(mesh), verified, str(chat_model), mesh, plant)[0]
    assert figure.name == "reward_model: scores" and figure.passed == (plant is None)


# ---------------------------------------------------------------- what goes wrong


def test_a_score_that_is_no_number_loses_its_samples_and_is_named(task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rm"
    shutil.copytree(task / "rm", folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(folder)
    with pytest.raises(UserError, match="rl.reward: reward_model failed for all 6 samples.*score is nan"):
        start(task, tmp_path / "run", f"rl.reward=[model:{folder}, length]", "train.steps=1")


def test_readings_that_make_no_sense_name_their_role() -> None:
    (first, *_) = group([1.0], [3]).samples
    values = np.zeros(len(first), np.float32)
    check_readings("teacher", values, first)
    with pytest.raises(
        RuntimeError, match=f"the teacher has read .* of sample {re.escape(first.id)} of {len(first)} tokens"
    ):
        check_readings("teacher", values[1:], first)
    with pytest.raises(
        FloatingPointError, match="the reference returns log probabilities that are not finite, for sample"
    ):
        check_readings("reference", values + np.float32("nan"), first)
    with pytest.raises(RuntimeError, match="the reference has read 1 of 2 samples"):
        set_readings([first, first], [{"reference": {0: values}}, {"reference": {}}])


APART = ["reward_model.ranks=1", "reference.ranks=1", "rl.kl_coef=0.1", "train.steps=3"]


@pytest.mark.covers("cluster.frozen_restarts")
def test_ranks_of_frozen_models_that_die_are_started_anew(task: Path, tmp_path: Path) -> None:
    """What they are asked again gives the run of ranks that live, bit for bit; after too many restarts the run ends.
    Exactly on policy, because otherwise the engine's turns, which time cuts, change the last bits of a rollout."""
    # Saved weights: actors in threads of one process would draw random ones from the same generator, in turns.
    policy = [f"model.path={task}/policy", "model.init=pretrained"]
    words, left = (
        [*policy, f"rl.reward=[model:{task}/rm]", "rl.on_policy=exact", *APART],
        ["score", "read_all", "read_all"],
    )

    def strikes_once(method: str, before: int) -> None:
        if method in left and before == 1:
            left.remove(method)
            if method not in left:  # trainers read before the reference does
                raise ActorError("rank 0 died", "killed")

    def strikes(method: str, before: int) -> None:
        if method == "score" and before >= 1:
            raise ActorError("reward model rank 0 died", "killed")

    start(task, tmp_path / "unbroken", *words)
    start(task, tmp_path / "run", *words, hook=strikes_once)
    assert not left
    same_run(tmp_path / "run", tmp_path / "unbroken")
    with pytest.raises(ActorError, match="failed 2 times .*, and cluster.frozen_restarts is 1.*\n.*rank 0 died"):
        start(task, tmp_path / "ends", *words, "cluster.frozen_restarts=1", hook=strikes)
    assert (tmp_path / "ends/checkpoints/step-000001").is_dir()


def budget(limit: int) -> RestartBudget:
    return RestartBudget(limit, 3600.0, "cluster.frozen_restarts", lambda text: None)


def test_ranks_that_die_while_they_start_are_started_again() -> None:
    """Each start spends a restart; one more than there are ends the run."""

    class DyingRanks:
        name, can_restart, starts, answers = "reference rank", True, 0, 0

        async def call_all(self, method: str, *args: Any) -> list[Any]:
            self.answers += 1
            if self.answers == 1:
                raise ActorError("reference rank 0 died", "killed")
            return [method]

        async def restart(self) -> None:
            self.starts += 1
            if self.starts < 3:
                raise ActorError("the actors could not be started: an actor died", "failed")

    group: Any = DyingRanks()
    assert asyncio.run(FrozenRanks(group, budget(3)).call_all("read_all")) == ["read_all"]
    assert group.starts == 3
    with pytest.raises(ActorError, match="failed 3 times .*, and cluster.frozen_restarts is 2"):
        asyncio.run(FrozenRanks(cast(Any, DyingRanks()), budget(2)).call_all("read_all"))


def test_ranks_that_give_an_invalid_answer_are_started_again_once() -> None:
    """New ranks that give one, too, end the run with its error: their weights are the cause, not their processes."""

    class SpoiltRanks:
        name, can_restart = "reference rank", True

        def __init__(self, spoilt: int) -> None:
            self.spoilt, self.calls = spoilt, list[str]()

        async def call_all(self, method: str, *args: Any) -> list[Any]:
            self.calls.append(method)
            self.spoilt -= method == "read_all"
            return [float("nan") if self.spoilt >= 0 else 1.0]

        async def restart(self) -> None:
            self.calls.append("restart")

    def accept(answers: list[Any]) -> None:
        if answers != [1.0]:
            raise FloatingPointError("the reference returns nan")

    async def read(spoilt: int, limit: int = 3) -> tuple[list[Any], list[str]]:
        group: Any = SpoiltRanks(spoilt)
        ranks = FrozenRanks(group, budget(limit))
        await ranks.call_all("open_run", "folder")
        return await ranks.call_all("read_all", accept=accept), group.calls

    assert asyncio.run(read(0))[1] == ["open_run", "read_all"]
    assert asyncio.run(read(1)) == ([1.0], ["open_run", "read_all", "restart", "open_run", "read_all"])
    for spoilt, limit in ((2, 3), (1, 0)):
        with pytest.raises(FloatingPointError, match="the reference returns nan"):
            asyncio.run(read(spoilt, limit))


@pytest.mark.parametrize(("kind", "key"), [("failed", []), ("killed", ["cluster.frozen_restarts=0"])])
def test_a_rank_that_raises_ends_the_run(task: Path, tmp_path: Path, kind: str, key: list[str]) -> None:
    def hook(method: str, before: int) -> None:
        if method == "score" and before == 1:
            raise ActorError("reward model rank 0 is gone", kind)

    words = [f"rl.reward=[model:{task}/rm]", *APART, *key]
    with pytest.raises(ActorError, match="^reward model rank 0 is gone"):
        start(task, tmp_path / "run", *words, hook=hook)
    assert (tmp_path / "run/checkpoints/step-000001").is_dir()


@pytest.mark.parametrize(("reward", "expected"), [
    ("model:{task}/adder", "Qwen3ForCausalLM without a trained score head. Train it"),
    ("model:{task}/nothing", "model:{task}/nothing: "), ("model:{task}/rm-3", "has 3 labels, but a reward is a single"),
    ("'model:'", "write model:PATH"),
])  # fmt: skip
def test_what_is_no_reward_model_is_refused_before_anything_starts(
    task: Path, tmp_path: Path, reward: str, expected: str
) -> None:
    if reward.endswith("rm-3") and not (task / "rm-3").exists():
        write_reward_model(task / "adder", task / "rm-3", 0, labels=3)
    with pytest.raises(UserError) as caught:
        start(task, tmp_path / "run", f"rl.reward=[{reward.format(task=task)}]", "train.steps=1")
    assert expected.format(task=task) in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_names_of_rewards() -> None:
    assert reward_names(["model:a/b.c", "my:right", "model:org/name"]) == ["reward_model", "right", "reward_model_2"]


def test_a_judge_behind_a_url_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the question and the answer; a reply without a grade is no reward."""
    calls: list[dict[str, Any]] = []

    class JudgeHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append({"path": self.path, "key": self.headers["Authorization"], **body})
            grade = "7" if "please" in body["messages"][0]["content"] else "no idea"
            reply = json.dumps({"choices": [{"message": {"content": grade}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *words: Any) -> None:
            """It says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), JudgeHandler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_MODEL", "judge")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        chat = [{"role": "assistant", "content": "yes please"}]
        values = asyncio.run(judged(["tea?", [{"role": "user", "content": "tea?"}]], ["no", chat]))
        server.shutdown()
    assert values == [None, 0.7]
    assert {call["path"] for call in calls} == {"/v1/chat/completions"} and calls[0]["key"] == "Bearer secret"
    assert sorted("Answer: no" in call["messages"][0]["content"] for call in calls) == [False, True]
