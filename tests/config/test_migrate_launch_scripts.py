"""weft migrate of launch scripts of slime, Miles and OpenRLHF: the draft computes what they compute, or says where not.

The right values were read off their sources, which weft/config/migrate/slime.py and openrlhf.py name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from weft.config import load_config
from weft.config.migrate.draft import Draft
from weft.config.migrate.migrate import _ALGORITHMS, migrate
from weft.config.migrate.trainer import TABLES
from weft.config.rl_schema import RlConfig
from weft.config.yaml12 import Loader

FOREIGN = Path(__file__).parents[1] / "foreign" / "rl"
Draw = Callable[..., tuple[dict[str, Any], dict[str, str], str]]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    """The draft of a script in tests/foreign, with more arguments, the last of which count."""

    def drawn(script: str, *arguments: str, ranks: int | None = None) -> tuple[dict[str, Any], dict[str, str], str]:
        (tmp_path / script).write_text(f"{(FOREIGN / script).read_text().rstrip()} {' '.join(arguments)}\n")
        text = migrate([str(tmp_path / script)], ranks)
        top = re.sub(r"\n#     ", " ", text.partition("\nmodel:")[0])
        sections = yaml.load(text, Loader)
        values = {f"{section}.{leaf}": value for section, keys in sections.items() for leaf, value in keys.items()}
        return values, dict(re.findall(r"^#   ([^:]+): (.* -> .*)$", top, re.MULTILINE)), text

    return drawn


def assert_loads(text: str, tmp_path: Path) -> RlConfig:
    """The config of a draft, once what it leaves open is written and its paths are ours."""
    sections = yaml.load(text, Loader)
    sections["rl"]["algorithm"] = (re.search(r"CONFIRM: write ([\w+]+),", text) or ["", sections["rl"]["algorithm"]])[1]
    (tmp_path / "p.jsonl").write_text('{"question": "1 + 1?", "label": "2"}\n')
    sections["data"]["path"] = str(tmp_path / "p.jsonl")
    sections.pop("eval", None)
    sections["rl"]["reward"] = ["math"]
    (tmp_path / "draft.yaml").write_text(yaml.safe_dump(sections))
    return load_config(
        [str(tmp_path / "draft.yaml")], ["rollout.python=/usr/bin/python3", "model.path=org/base"], RlConfig
    )


SLIME = {
    "model.path": "/models/base-4b", "data.path": "/data/math.jsonl", "data.shuffle": True,
    "data.columns": {"prompt": "question", "answer": "label"}, "rl.chat": True, "rl.reward": ["math"],
    "rl.prompts_per_step": 32, "rl.group_size": 8, "rl.minibatches": 2, "rl.epochs": 1,  # 256 samples / 128
    "rl.advantage": "grpo", "rl.advantage_norm": "group", "rl.policy_loss": "ppo", "rl.clip": [0.2, 0.28],
    "rl.dual_clip": None, "rl.loss_aggregation": "sequence_mean", "rl.entropy_coef": 0,
    "rl.kl_coef": 0.001, "rl.kl_in": "loss", "rl.kl_estimator": "k3", "rl.kl_clamp": 10, "rl.kl_unbiased": False,
    "rl.old_logprobs": "recompute", "rl.correction": "tis", "rl.correction_level": "token",
    "rl.correction_limits": [0, 2], "rl.dynamic_sampling": 100, "rl.mask_truncated": False,
    "rollout.engine": "sglang", "rollout.tp": 2, "rollout.num_engines": 8, "rollout.gpu_memory_utilization": 0.7,
    "rollout.max_new_tokens": 8192, "rollout.temperature": 0.8, "rollout.top_p": 1, "rollout.top_k": 0,
    "rollout.engine_kwargs": {"chunked_prefill_size": 4096},
    "cluster.trainer_ranks": 16, "cluster.placement": "colocated", "mesh.tp": 2, "mesh.cp": 2,
    "step.max_tokens_per_device": 9216,
    "optimizer.name": "adamw", "optimizer.lr": 1e-6, "optimizer.weight_decay": 0.1, "optimizer.betas": [0.9, 0.98],
    "optimizer.eps": 1e-8, "optimizer.max_grad_norm": 1,
    # 100 rollouts of two optimizer steps; warm-up counts optimizer steps there, too
    "schedule.name": "constant", "schedule.warmup_steps": 10, "train.steps": 200, "checkpoint.every": 20,
    "eval.every": 5, "eval.samples": 16, "eval.top_p": 0.7, "eval.temperature": 0.8, "eval.at_start": True,
    "eval.sources": [
        {"name": name, "path": f"/data/{name}.jsonl", "columns": {"answer": "label", "prompt": "question"}}
        for name in ("aime", "amc")
    ],
}  # fmt: skip


def test_grpo_of_slime(draw: Draw) -> None:
    values, differs, text = draw("slime_grpo.sh")
    assert {key: values.get(key) for key in SLIME} == SLIME
    assert set(differs) == {"reward", "warm-up of W updates, in update k"} and values["rl.algorithm"] is None
    assert "ref_load" in text and "does not know" not in text


@pytest.mark.parametrize(
    ("arguments", "expected", "differing"),
    [
        (["--advantage-estimator gspo", "--eps-clip 3e-4", "--eps-clip-high 4e-4"],
         {"rl.policy_loss": "gspo", "rl.advantage": "grpo", "rl.clip": [3e-4, 4e-4]}, set()),
        (["--advantage-estimator cispo", "--eps-clip 5"], {"rl.policy_loss": "cispo", "rl.clip": [1, 0.28]}, set()),
        (["--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9"],
         {"rl.advantage": "reinforce++", "rl.gamma": 0.9}, set()),
        (["--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages"],
         {"rl.advantage": "reinforce++_baseline"}, set()),
        (["--advantage-estimator ppo --lambd 0.95 --value-clip 0.3 --critic-lr 1e-5"],
         {"rl.advantage": "gae", "rl.advantage_norm": "none", "rl.gae_lambda": 0.95, "critic.lr": 1e-5,
          "critic.clip": 0.3}, {"critic's head at the start"}),
        (["--disable-grpo-std-normalization"], {"rl.advantage_norm": "none"}, set()),
        (["--disable-rewards-normalization"], {"rl.advantage_norm": "none"}, {"advantage"}),
        (["--normalize-advantages"], {"rl.advantage": "grpo"}, {"advantage"}),
        (["--calculate-per-token-loss"], {"rl.loss_aggregation": "token_mean"}, set()),
        (["--eps-clip-c 3"], {"rl.dual_clip": 3}, set()),
        (["--kl-loss-type k3"], {"rl.kl_estimator": "k3", "rl.kl_clamp": None}, set()),
        (["--kl-loss-type k1"], {"rl.kl_estimator": "k1", "rl.kl_clamp": None}, set()),
        (["--kl-loss-type k3 --use-unbiased-kl"], {"rl.kl_unbiased": True}, set()),
        (["--use-unbiased-kl"], {"rl.kl_unbiased": True}, {"KL"}),  # their product is cut
        # of the group estimators none reads kl_coef
        (["--kl-loss-coef 0", "--kl-coef 0.1"], {"rl.kl_coef": 0}, set()),
        (["--kl-loss-coef 0 --kl-coef 0.1 --advantage-estimator reinforce_plus_plus --normalize-advantages"],
         {"rl.kl_coef": 0.1, "rl.kl_in": "reward", "rl.kl_estimator": "k3"}, set()),
        (["--tis-clip 3 --tis-clip-low 0.5"], {"rl.correction": "tis", "rl.correction_limits": [0.5, 3]}, set()),
        (["--custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function"],
         {"rl.correction": "icepop"}, set()),
        (["--custom-tis-function-path mine.tis"], {"rl.correction": "tis"}, {"correction of the engine's mismatch"}),
        (["--use-opsm"], {"rl.policy_loss": "ppo"}, {"policy loss"}),
        (["--num-steps-per-rollout 4"], {"rl.minibatches": 4, "train.steps": 400}, set()),
        (["--global-batch-size 100"], {"rl.minibatches": None}, set()),
        (["--lora-rank 32", "--lora-alpha 32"],
         {"rollout.engine": "vllm", "lora.rank": 32, "rollout.engine_kwargs": None}, {"engine"}),
        (["--rollout-top-p 0.9"], {"rollout.top_p": 0.9, "rollout.allow_truncated": True}, set()),
        ([], {"data.long_documents": "error", "rollout.max_prompt_tokens": None}, set()),
        (["--rollout-max-prompt-len 2048"],
         {"data.long_documents": "drop", "rollout.max_prompt_tokens": 2048}, set()),
        (["--train-backend fsdp"], {"rl.policy_loss": "ppo", "optimizer.weight_decay": 0.1}, set()),
        (["--custom-rm-path rewards.mine.score"], {"rl.reward": ["my_rewards:score"]}, set()),
        (["--update-weights-interval 2 --max-weight-staleness 3 --fully-async"], {"cluster.max_staleness": 3}, set()),
        (["--use-opd --opd-type megatron --opd-teacher-load /models/t --opd-kl-coef 0.5"],
         {"rl.teacher": "/models/t", "rl.teacher_in": "advantage", "rl.teacher_coef": 0.5}, {"teacher"}),
    ],
)  # fmt: skip
def test_what_arguments_of_slime_mean(
    draw: Draw, arguments: list[str], expected: dict[str, Any], differing: set[str]
) -> None:
    values, differs, _ = draw("slime_grpo.sh", *arguments)
    assert {key: values.get(key) for key in expected} == expected
    assert set(differs) - {"reward", "warm-up of W updates, in update k"} == differing


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus --normalize-advantages", "ppo"])
def test_drafts_of_slime_load(draw: Draw, tmp_path: Path, estimator: str) -> None:
    _, _, text = draw("slime_grpo.sh", "--advantage-estimator", estimator)
    assert assert_loads(text, tmp_path).rl.minibatches == 2


def test_an_array_that_no_command_gets_says_nothing(draw: Draw, tmp_path: Path) -> None:
    assert draw("slime_grpo.sh")[0]["rl.dual_clip"] is None  # UNUSED_ARGS has 3.0
    (tmp_path / "f.sh").write_text(
        "A=(--hf-checkpoint m --rm-type math --lr 2e-6 --prompt-data d)\nB=(--lr 3e-6)\n"
        'B+=(--eps-clip 0.1)\nrun() { "$PY" "${A[@]}"; }\npython train.py ${B[@]}\nrun\n'
    )
    text = migrate([str(tmp_path / "f.sh")])
    assert "lr: 3e-06" in text and "clip: [0.1, 0.1]" in text and "path: m " in text


@pytest.mark.parametrize("trainer", [path.stem for path in sorted((FOREIGN / "arguments").glob("*.txt"))])
def test_every_argument_is_answered(trainer: str) -> None:
    """Of each argument of the trainer's own parser, the code, a key or a sentence says what becomes of it."""
    settings = {"(program)": trainer.rpartition("_")[2]}
    draft = Draft(next(table for table in TABLES.trainers if table.name == trainer.partition("_rloo")[0]), RlConfig)
    algorithm = _ALGORITHMS[draft.trainer.name].class_for(settings)
    names = (FOREIGN / "arguments" / f"{trainer}.txt").read_text().split()
    assert len(names) > 50
    unanswered = [
        name
        for name in names
        if name not in draft.keys
        and not (algorithm.handles(name) or draft.key_of(draft.entry(name)) or draft.advice(name))
    ]
    assert not unanswered


@pytest.mark.parametrize("trainer", sorted({*_ALGORITHMS} - {"roll"}))  # test_migrate_roll.py sets each of ROLL's
def test_every_default_is_read(trainer: str) -> None:
    """A name that is listed and not used would be dropped in silence."""
    algorithm = _ALGORITHMS[trainer]
    source = Path(str(import_module(algorithm.__module__).__file__)).read_text()
    body = source[source.index("\nclass ") :]
    for name in algorithm.defaults:
        leaf = name.rpartition(".")[2]
        patterns = (
            f"{leaf.rpartition('_')[0]}_{{",
            f"{name.rpartition('.')[0]}.{{",
            re.sub(r"_(train|infer)_", "_{role}_", leaf),
        )  # as in f"rollout_{leaf}"
        assert leaf in body or any(pattern in body for pattern in patterns) or leaf in ("horizon", "target_kl"), name


OPENRLHF = {
    "model.path": "org/base-8b", "model.recompute": "full", "data.path": "/data/math.jsonl",
    "data.columns": {"prompt": "question", "answer": "label"}, "rl.chat": True, "rl.reward": ["my_rewards:is_right"],
    "rl.prompts_per_step": 128, "rl.group_size": 8, "rl.minibatches": 2, "rl.epochs": 1,  # 1,024 samples / 512
    "rl.advantage": "grpo", "rl.advantage_norm": "group", "rl.policy_loss": "ppo", "rl.clip": [0.2, 0.27],
    "rl.dual_clip": None, "rl.loss_aggregation": "token_mean", "rl.entropy_coef": 0,
    "rl.kl_coef": 0.001, "rl.kl_in": "loss", "rl.kl_estimator": "k3", "rl.kl_clamp": 10, "rl.kl_unbiased": False,
    "rl.old_logprobs": "recompute", "rl.correction": "tis", "rl.correction_level": "token",
    "rl.correction_limits": [0.5, 5], "rl.dynamic_sampling": 0,
    "rollout.engine": "vllm", "rollout.tp": 4, "rollout.num_engines": 4, "rollout.gpu_memory_utilization": 0.6,
    "rollout.max_prompt_tokens": 1024, "rollout.max_new_tokens": 8192, "rollout.temperature": 1, "rollout.top_p": 1,
    "rollout.engine_kwargs": {"enforce_eager": True},
    "cluster.trainer_ranks": 16, "cluster.placement": "colocated",
    "cluster.offload_during_rollout": ["parameters", "optimizer", "gradients"],
    "mesh.cp": 2, "fsdp.param_dtype": "bf16", "fsdp.cpu_offload": "optimizer", "step.max_tokens_per_device": 16384,
    "optimizer.name": "adamw", "optimizer.lr": 5e-7, "optimizer.weight_decay": 0, "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-8, "optimizer.max_grad_norm": 1,
    # warm-up and schedule count optimizer steps there, too; checkpoints count rollout steps
    "schedule.name": "cosine", "schedule.warmup_ratio": 0.03, "schedule.min_lr_ratio": 0.1, "train.epochs": 3,
    "checkpoint.every": 40, "checkpoint.keep": 3, "run.dir": "/checkpoints/grpo", "track.report_to": ["wandb"],
}  # fmt: skip
WARM_UP = "warm-up of W updates, in update k"


def test_grpo_of_openrlhf(draw: Draw) -> None:
    values, differs, text = draw("openrlhf_grpo.sh")
    assert {key: values.get(key) for key in OPENRLHF} == OPENRLHF
    assert set(differs) == {"reward", WARM_UP} and values["rl.algorithm"] is None and "does not know" not in text


@pytest.mark.parametrize(
    ("arguments", "expected", "differing"),
    [
        (["--algo.advantage.estimator gae --critic.adam.lr 2e-6"],
         {"rl.advantage": "gae", "rl.advantage_norm": "batch", "critic.lr": 2e-6, "critic.clip": 0.5,
          "optimizer.lr": 5e-7}, {"critic's head at the start"}),
        (["--algo.advantage.estimator gae --critic.adam.weight_decay 0.1"], {"optimizer.weight_decay": 0},
         {"critic's head at the start", "adam.weight_decay of the critic"}),
        (["--algo.advantage.estimator reinforce --algo.advantage.gamma 0.9"],
         {"rl.advantage": "reinforce++", "rl.gamma": 0.9}, set()),
        (["--algo.advantage.estimator reinforce_baseline"], {"rl.advantage": "reinforce++_baseline"}, set()),
        (["--algo.advantage.estimator reinforce_baseline --algo.advantage.no_std_norm"], {}, {"advantage"}),
        (["--algo.advantage.estimator rloo"], {"rl.advantage": "rloo"}, set()),
        (["--algo.advantage.estimator dr_grpo"], {"rl.advantage": "grpo", "rl.advantage_norm": "none"}, set()),
        (["--actor.policy_loss_type gspo --algo.kl.init_coef 0"],
         {"rl.policy_loss": "gspo", "rl.loss_aggregation": "sequence_mean", "rl.old_logprobs": "rollout",
          "rl.correction": None}, set()),
        (["--actor.dual_clip 3"], {"rl.dual_clip": 3}, set()),
        (["--algo.kl.target 6"], {}, {"KL"}),
        (["--algo.advantage.is_correction_type icepop --algo.advantage.is_correction_threshold 0.2 3"],
         {"rl.correction": "icepop", "rl.correction_limits": [0.2, 3]}, set()),
        (["--algo.advantage.is_correction_type seq-mask-tis"],
         {"rl.correction": "icepop", "rl.correction_level": "geometric"}, {"correction of the engine's mismatch"}),
        (["--algo.dynamic_filtering_enable"], {"rl.dynamic_sampling": 100}, {"replaced groups"}),
        (["--reward.overlong_buffer_len 512"], {"rl.overlong_buffer": 512, "rl.overlong_penalty": 1}, set()),
        (["--reward.clip_range -1 1"], {}, {"clip of rewards"}),
        (["--reward.stop_properly_penalty_coef 0"], {}, {"reward of samples that did not end"}),
        (["--train.async_enable --train.partial_rollout_enable"],
         {"cluster.placement": "disaggregated", "cluster.max_staleness": 1, "rollout.on_weight_update": "continue"},
         set()),
        (["--train.max_epochs 2"], {"rl.epochs": 2, "checkpoint.every": 80}, set()),
        (["--eval.dataset /data/aime.jsonl --eval.steps 5"],
         {"eval.path": "/data/aime.jsonl", "eval.every": 5, "eval.samples": 4, "eval.temperature": 0.6}, set()),
    ],
)  # fmt: skip
def test_what_arguments_of_openrlhf_mean(
    draw: Draw, arguments: list[str], expected: dict[str, Any], differing: set[str]
) -> None:
    values, differs, _ = draw("openrlhf_grpo.sh", *arguments)
    assert {key: values.get(key) for key in expected} == expected
    assert set(differs) - {"reward", WARM_UP} == differing


def test_where_the_kl_is_in_the_reward(draw: Draw, tmp_path: Path) -> None:
    """Of estimators that compare a group theirs is taken off afterwards."""
    text = (FOREIGN / "openrlhf_grpo.sh").read_text().replace("   --algo.kl.use_loss \\\n", "")
    for estimator, differs in (("group_norm", True), ("gae", False), ("reinforce", False), ("rloo", True)):
        (tmp_path / "a.sh").write_text(text.replace("group_norm", estimator))
        draft = migrate([str(tmp_path / "a.sh")])
        assert "kl_in: reward" in draft and ("#   KL: " in draft) == differs


def test_former_names_of_openrlhf(tmp_path: Path) -> None:
    """Of flags without dots, which the quick starts of former versions have."""
    (tmp_path / "a.sh").write_text(
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 4 "
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 2 --pretrain org/base --reward_pretrain org/rm "
        "--micro_train_batch_size 8 --train_batch_size 128 --rollout_batch_size 128 --n_samples_per_prompt 1 "
        "--prompt_max_len 512 --generate_max_len 768 --zero_stage 3 --actor_learning_rate 5e-7 "
        "--critic_learning_rate 9e-6 --init_kl_coef 0.02 --prompt_data org/prompts --input_key context "
        "--apply_chat_template --normalize_reward --packing_samples --adam_offload\n"
    )
    text = migrate([str(tmp_path / "a.sh")])
    assert "does not know" not in text and "max_new_tokens: 768" in text and "max_prompt_tokens: 512" in text
    config = assert_loads(text.replace("path: org/rm", "path: org/base"), tmp_path)
    assert (config.rl.advantage, config.rl.kl_coef, config.rl.kl_in, config.rl.kl_estimator, config.rl.minibatches) == (
        "gae", 0.02, "reward", "k1", 1,
    )  # fmt: skip
    assert (config.critic.lr, config.optimizer.lr, config.cluster.trainer_ranks) == (9e-6, 5e-7, 4)


@pytest.mark.parametrize("estimator", ["group_norm", "gae", "reinforce", "reinforce_baseline", "rloo", "dr_grpo"])
def test_drafts_of_openrlhf_load(draw: Draw, tmp_path: Path, estimator: str) -> None:
    _, _, text = draw("openrlhf_grpo.sh", "--algo.advantage.estimator", estimator)
    assert assert_loads(text, tmp_path).rl.minibatches == 2
