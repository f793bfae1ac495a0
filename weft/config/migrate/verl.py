"""The algorithm of a verl config (`verl.trainer.main_ppo`) in weft's keys, one quantity at a time.

The defaults are in verl/trainer/config/ppo_trainer.yaml and the files that it includes. The computations are in
verl/trainer/ppo/core_algos.py (advantages, losses, KL, aggregation), verl/trainer/ppo/ray_trainer.py (the order of a
step), verl/workers/actor/dp_actor.py (mini-batches and the schedule's steps) and verl/utils/reward_score, at commit
b178a3cd. Every key that defines the algorithm is written; see algorithm.py.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from weft.config.conditions import SERVERS
from weft.config.migrate.algorithm import Algorithm
from weft.config.migrate.draft import numbers_of
from weft.config.yaml12 import show

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_VALIDATION, _CORRECTION = f"{_ROLLOUT}.val_kwargs", "algorithm.rollout_correction"

# Name -> verl's default, for every name that this file reads.
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.use_pf_ppo": False,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.filter_groups.metric": None,
    f"{_CORRECTION}.rollout_is": None,
    f"{_CORRECTION}.rollout_is_threshold": 2.0,
    f"{_CORRECTION}.rollout_is_batch_normalize": False,
    f"{_CORRECTION}.rollout_rs": None,
    f"{_CORRECTION}.rollout_rs_threshold": None,
    f"{_CORRECTION}.bypass_mode": False,
    f"{_CORRECTION}.loss_type": "ppo_clip",
    f"{_ACTOR}.tis_imp_ratio_cap": -1,  # a name of version 0.5
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.shuffle": False,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_low": 0.2,
    f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.loss_scale_factor": None,
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.grad_clip": 1.0,
    f"{_ACTOR}.fsdp_config.param_offload": False,
    f"{_ACTOR}.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.ref.fsdp_config.param_offload": False,
    f"{_ACTOR}.use_dynamic_bsz": False,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{_ROLLOUT}.name": "vllm",
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_p": 1.0,
    f"{_ROLLOUT}.top_k": -1,
    f"{_ROLLOUT}.do_sample": True,
    f"{_VALIDATION}.temperature": 0.0,
    f"{_VALIDATION}.top_p": 1.0,
    f"{_VALIDATION}.top_k": -1,
    f"{_VALIDATION}.n": 1,
    f"{_VALIDATION}.do_sample": False,
    "data.prompt_key": "prompt",
    "data.image_key": "images",
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "async_training.require_batches": 1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.staleness_threshold": 0.1,
    "rollout.total_rollout_steps": None,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "custom_reward_function.path": None,
    "custom_reward_function.name": "compute_score",
    "reward_model.enable": False,
    "reward_model.reward_manager": "naive",
    "reward_model.overlong_buffer.enable": False,
    "reward_model.overlong_buffer.len": 0,
    "reward_model.overlong_buffer.penalty_factor": 1.0,
    "critic.optim.lr": 1e-5,
    "critic.model.path": None,
    "critic.cliprange_value": 0.5,
    "trainer.critic_warmup": 0,
    "trainer.val_before_train": True,
}  # fmt: skip
# Names of the critic that set how its work is split and stored, and do not change results.
_CRITIC_IDLE = (
    "critic.*micro_batch_size*", "critic.*max_token_len_per_gpu", "critic.use_dynamic_bsz", "critic.strategy",
    "critic.model.use_remove_padding", "critic.model.enable_gradient_checkpointing", "critic.model.tokenizer_path",
    "critic.checkpoint.*", "critic.model.fsdp_config.*",
)  # fmt: skip
# Names of the critic's settings -> the policy's, which weft uses for both, and verl's default.
_CRITIC = {
    "critic.optim.weight_decay": (f"{_ACTOR}.optim.weight_decay", 0.01),
    "critic.optim.lr_warmup_steps_ratio": (f"{_ACTOR}.optim.lr_warmup_steps_ratio", 0.0),
    "critic.ppo_epochs": (f"{_ACTOR}.ppo_epochs", 1),
    "critic.ppo_mini_batch_size": (f"{_ACTOR}.ppo_mini_batch_size", 256),
    "critic.grad_clip": (f"{_ACTOR}.grad_clip", 1.0),
}
# Estimator -> (rl.algorithm, rl.advantage, rl.advantage_norm, both in words).
_ESTIMATORS = {
    "gae": ("ppo", "gae", "batch", "gae, whitened over all tokens"),
    "grpo": ("grpo", "grpo", "group", "reward - mean of the group / standard deviation of the group"),
    "rloo": ("rloo", "rloo", None, "reward - mean of the other samples of the group"),
    "reinforce_plus_plus": ("reinforce++", "reinforce++", None, "returns, whitened over all tokens"),
    "reinforce_plus_plus_baseline": (
        "reinforce++_baseline", "reinforce++_baseline", None, "reward - mean of the group, whitened over all tokens"
    ),
}  # fmt: skip
_LOSSES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "reinforce"}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_OFFLOADED = {"param_offload": ["parameters", "gradients"], "optimizer_offload": ["optimizer"]}


class Verl(Algorithm):
    """The algorithm of main_ppo. Its batches do not depend on the number of data ranks."""

    defaults = DEFAULTS

    @classmethod
    def handles(cls, name: str) -> bool:
        return name in DEFAULTS or name.startswith(("critic.", "reward_model.", "custom_reward_function."))

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        self.data()
        self.rewards()
        estimator = self.advantage()
        self.policy_loss()
        self.kl()
        self.corrections()
        if estimator == "gae":
            self.critic()
        else:
            self.agrees("critic", "none", "none")
        self.sampling()
        self.evaluation()
        self.devices(gpus)
        self.steps()
        for name in self.settings:
            has_effect = not any(fnmatchcase(name, pattern) for pattern in _CRITIC_IDLE)
            if self.handles(name) and name not in DEFAULTS and name not in _CRITIC and has_effect:
                self.draft.notes[name] = self.draft.advice(name) or "weft does not know this name."

    def data(self) -> None:
        """Set the columns of verl's files, and the handling of long prompts."""
        columns = {"answer": "reward_model.ground_truth"}
        for name, column in (("data.prompt_key", "prompt"), ("data.image_key", "images")):
            if self.value(name) != column:
                columns[column] = str(self.value(name))
        self.take("data.columns", columns, "data.prompt_key", "verl's columns: prompt, and reward_model.ground_truth")
        self.take("rl.chat", False, "rl.chat", "verl's prompts are messages, which the chat template renders")
        drops = self.on("data.filter_overlong_prompts")
        self.take("data.long_documents", "drop" if drops else "error", "data.filter_overlong_prompts")
        if not drops and self.value("data.truncation") != "error":
            self.differs("prompts that are too long", f"truncated ({self.value('data.truncation')})", "an error")

    def rewards(self) -> None:
        """Set rl.reward, rl.overlong_buffer and rl.overlong_penalty."""
        path, function = self.value("custom_reward_function.path"), self.value("custom_reward_function.name")
        files = self.settings.get("data.train_files", "")
        names = [str(name).lower() for name in (files if isinstance(files, list) else str(files).split(","))]
        gsm8k = [name for name in names if "gsm8k" in name]
        if path is not None:
            module = str(path).removesuffix(".py").strip("./").replace("/", ".")
            self.take("rl.reward", [f"{module}:{function}"], "custom_reward_function.path",
                      f"{path}: make sure that Python can import it")  # fmt: skip
            self.agrees("reward", f"{path}: {function}", f"the same function, {module}:{function}")
        elif gsm8k:
            self.take("rl.reward", ["regex"], "data.reward_fn_key", "verl's score of openai/gsm8k")
            self.take("rl.reward_options", {"regex.pattern": r"#### (\-?[0-9\.\,]+)"}, "data.reward_fn_key",
                      "verl's score of openai/gsm8k")  # fmt: skip
            self.differs("reward", "gsm8k: the last number after `####`, without commas, in the last 300 characters",
                         "regex: the last number after `####`, unchanged")  # fmt: skip
            if others := len(names) - len(gsm8k):
                self.differs("reward of the other files", f"verl's score for each row's data_source, of {others}",
                             "that of gsm8k: set `rl.reward`, and `rl.reward_column`")  # fmt: skip
        else:
            self.differs("reward", "verl's score for each row's data_source", "none: set `rl.reward`")
        if str(self.settings.get("distillation.enabled", False)).lower() == "true":
            self.differs("teacher", "distillation: its models score the policy's samples", "none: set `rl.teacher`, "
                         "`rl.teacher_in: advantage` and `rl.teacher_coef`")  # fmt: skip
        if self.on("reward_model.enable"):
            self.differs("reward model", "added to the score of rules", "none: `rl.reward: [model:PATH]` adds one")
        manager = str(self.value("reward_model.reward_manager"))
        if manager not in ("naive", "dapo", "batch", "prime"):
            self.differs("reward manager", manager, "none")
        if self.on("reward_model.overlong_buffer.enable"):
            length, penalty = (f"reward_model.overlong_buffer.{leaf}" for leaf in ("len", "penalty_factor"))
            self.take("rl.overlong_buffer", int(self.number(length)), length)
            self.take("rl.overlong_penalty", self.number(penalty), penalty)
            text = f"up to {self.number(penalty):g} in the last {self.number(length):g} tokens"
            self.agrees("penalty of long samples", text, text)

    def advantage(self) -> str:
        """Set rl.algorithm, rl.advantage, rl.advantage_norm, rl.gamma, rl.gae_lambda. Returns verl's estimator."""
        name = "algorithm.adv_estimator"
        estimator = str(self.value(name)).removesuffix("_vectorized")
        algorithm, advantage, norm, text = _ESTIMATORS.get(estimator, _ESTIMATORS["grpo"])
        if advantage == "grpo" and not self.on("algorithm.norm_adv_by_std_in_grpo"):
            norm, text = "none", "reward - mean of the group"
        self.take("rl.algorithm", algorithm, name)
        self.take("rl.advantage", advantage, name)
        if norm is not None:
            self.take("rl.advantage_norm", norm, "algorithm.norm_adv_by_std_in_grpo" if advantage == "grpo" else name)
        if estimator in _ESTIMATORS:
            self.agrees("advantage", f"{estimator}: {text}", f"{advantage}: {text}")
        else:
            self.differs("advantage", f"{estimator}, which weft does not have", f"{advantage}: {text}")
        advantage = self.alone(advantage)
        if advantage in ("gae", "reinforce++"):
            self.take("rl.gamma", self.number("algorithm.gamma"), "algorithm.gamma")
        if advantage == "gae":
            self.take("rl.gae_lambda", self.number("algorithm.lam"), "algorithm.lam")
        self.compare_values({"gamma": "rl.gamma", "lambda": "rl.gae_lambda"})
        if self.on("algorithm.use_pf_ppo"):
            self.differs("samples of an update", "drawn by their scores (pf_ppo)", "each sample once")
        return estimator

    def policy_loss(self) -> None:
        """Set rl.policy_loss, rl.clip, rl.dual_clip, rl.loss_aggregation, rl.entropy_coef and rl.dynamic_sampling."""
        mode = str(self.value(f"{_ACTOR}.policy_loss.loss_mode"))
        loss = _LOSSES.get(mode, "ppo")
        self.take("rl.policy_loss", loss, f"{_ACTOR}.policy_loss.loss_mode")
        (self.agrees if mode in _LOSSES else self.differs)("policy loss", mode, loss)
        if loss == "ppo":
            dual = self.number(f"{_ACTOR}.clip_ratio_c")
            self.clip_ratio(self.bound("low"), self.bound("high"), f"{_ACTOR}.clip_ratio_low",
                       "clip_ratio_low, clip_ratio_high", dual, f"{_ACTOR}.clip_ratio_c")  # fmt: skip
        elif loss != "reinforce":
            low, high = min(1.0, self.bound("low")), self.bound("high")
            self.take("rl.clip", [low, high], f"{_ACTOR}.clip_ratio_low", "clip_ratio_low, clip_ratio_high")
            self.agrees("clip of the ratio", *[f"{1 - low:g} to {1 + high:g}"] * 2)
        name = f"{_ACTOR}.loss_agg_mode"
        aggregation = "seq-mean-token-mean" if loss == "gspo" else str(self.value(name))  # gspo supports no other
        self.aggregation(aggregation, name, f"{_ACTOR}.grad_clip")
        if self.value(f"{_ACTOR}.loss_scale_factor") is not None:
            self.draft.notes[f"{_ACTOR}.loss_scale_factor"] = "`rollout.max_new_tokens` replaces it: remove it."
        if "optimizer.eps" not in self.draft.values:
            self.take("optimizer.eps", 1e-8, "optimizer.eps", "torch's default, as in verl")
        self.take("rl.entropy_coef", self.number(f"{_ACTOR}.entropy_coeff"), f"{_ACTOR}.entropy_coeff")
        self.compare_values({"entropy": "rl.entropy_coef"})
        self.take("rl.mask_truncated", False, "rl.mask_truncated", "verl trains samples of the maximum length")
        rounds = int(self.number("algorithm.filter_groups.max_num_gen_batches"))
        filters = self.on("algorithm.filter_groups.enable")
        self.take("rl.dynamic_sampling", (rounds or 100) if filters else 0, "algorithm.filter_groups.enable")
        if filters:
            metric = show(self.value("algorithm.filter_groups.metric"))
            text = f"replaced if equal in {metric}, in {rounds or 'any number of'} rounds"
            self.agrees("groups with equal rewards", text, "replaced")

    def bound(self, end: str) -> float:
        """clip_ratio_low or clip_ratio_high. clip_ratio counts only if these are null: their default is 0.2."""
        name = f"{_ACTOR}.clip_ratio_{end}"
        if self.value(name) is None:
            return self.number(f"{_ACTOR}.clip_ratio")
        if f"{_ACTOR}.clip_ratio" in self.settings and self.number(f"{_ACTOR}.clip_ratio") != self.number(name):
            self.draft.notes[f"{_ACTOR}.clip_ratio"] = (
                f"it has no effect: verl reads clip_ratio_low and clip_ratio_high, here {self.number(name):g}. If "
                "your version of verl is older than these two names, set `rl.clip`."
            )
        return self.number(name)

    def kl(self) -> None:
        """Set rl.kl_coef and the related keys."""
        in_loss = self.on(f"{_ACTOR}.use_kl_loss") and self.number(f"{_ACTOR}.kl_loss_coef") > 0
        in_reward = self.on("algorithm.use_kl_in_reward") and self.number("algorithm.kl_ctrl.kl_coef") > 0
        if not in_loss and not in_reward:
            self.take("rl.kl_coef", 0.0, f"{_ACTOR}.use_kl_loss")
            self.agrees("KL", "none", "none")
            return
        name, penalty_name, switch = (
            (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type", f"{_ACTOR}.use_kl_loss")
            if in_loss
            else ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.use_kl_in_reward")
        )
        penalty = str(self.value(penalty_name))
        estimator = _KL.get(penalty, "k3" if in_loss else "k1")
        used_in, limit = "loss" if in_loss else "reward", 10.0 if estimator == "k3" else None
        self.take("rl.kl_coef", self.number(name), name)
        self.take("rl.kl_in", used_in, switch)
        self.take("rl.kl_estimator", estimator, penalty_name)
        self.take("rl.kl_clamp", limit, penalty_name, f"verl's limit of {estimator}")
        if in_loss:
            self.take("rl.kl_unbiased", False, penalty_name, "verl has no such factor")
        adaptive = in_reward and not in_loss and self.value("algorithm.kl_ctrl.type") != "fixed"
        text = f"{self.number(name):g} in the {used_in}, {penalty}" + (", adapted" if adaptive else "")
        text += f" and {self.number('algorithm.kl_ctrl.kl_coef'):g} in the reward" if in_loss and in_reward else ""
        is_same = penalty in _KL and not adaptive and not (in_loss and in_reward)
        (self.agrees if is_same else self.differs)("KL", text, f"{self.number(name):g} in the {used_in}, {estimator}")

    def corrections(self) -> None:
        """Set rl.old_logprobs and rl.correction."""
        bypass = self.on(f"{_CORRECTION}.bypass_mode")
        self.take("rl.old_logprobs", "rollout" if bypass else "recompute", f"{_CORRECTION}.bypass_mode")
        if bypass and self.value(f"{_CORRECTION}.loss_type") != "ppo_clip":
            self.differs("loss of bypass_mode", str(self.value(f"{_CORRECTION}.loss_type")), "ppo_clip")
        name, limit = f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_is_threshold"
        level = self.value(name)
        if level is None and self.number(f"{_ACTOR}.tis_imp_ratio_cap") > 0:
            name, level, limit = f"{_ACTOR}.tis_imp_ratio_cap", "token", f"{_ACTOR}.tis_imp_ratio_cap"
        if level is None:
            self.take("rl.correction", "none", name)
            self.agrees("correction of the engine's mismatch", "none", "none")
        elif "_" in str(self.value(limit)):  # lower_upper: weights outside of the limits are zero
            low, high = (next(numbers_of(bound), 0) for bound in str(self.value(limit)).split("_", 1))
            self.corrects("icepop", str(level), low, high, limit)
        else:
            self.take("rl.correction", "tis", name)
            self.take("rl.correction_level", str(level), name)
            self.take("rl.correction_limits", [0.0, self.number(limit)], limit)
            text = f"ratio of each {level}, at most {self.number(limit):g}"
            normalised = self.on(f"{_CORRECTION}.rollout_is_batch_normalize")
            is_same = level in ("token", "sequence") and not normalised and self.number(limit) >= 1
            (self.agrees if is_same else self.differs)(
                "correction of the engine's mismatch", text + ", divided by their mean" * normalised, text
            )
        if self.value(f"{_CORRECTION}.rollout_rs") is not None:
            text = f"{self.value(f'{_CORRECTION}.rollout_rs')}, {self.value(f'{_CORRECTION}.rollout_rs_threshold')}"
            self.differs("samples that are omitted", text, "none; the nearest is `rl.correction: icepop`")

    def critic(self) -> None:
        """Set critic.lr, critic.clip and critic.path."""
        self.take("critic.lr", self.number("critic.optim.lr"), "critic.optim.lr")
        self.take("critic.clip", self.number("critic.cliprange_value"), "critic.cliprange_value")
        self.compare_values({"critic's learning rate": "critic.lr", "clip of values": "critic.clip"})
        path = self.value("critic.model.path")
        if path is not None and path != self.draft.value("model.path"):
            self.take("critic.path", path, "critic.model.path")
        self.differs("critic's head at the start", "random", "zeros; `critic.head` has others")
        if self.draft.value("rl.loss_aggregation") != "token_mean":
            self.differs("aggregation of the critic's loss", str(self.value(f"{_ACTOR}.loss_agg_mode")),
                         "the mean over tokens")  # fmt: skip
        if warmup := self.number("trainer.critic_warmup"):
            self.differs("warm-up of the critic", f"{warmup:g} steps without the policy", "none")
        for name, (policy_name, default) in _CRITIC.items():
            policy = self.settings.get(policy_name, default)
            if name in self.settings and self.settings[name] != policy:
                self.differs(name, f"critic {show(self.settings[name])}, policy {show(policy)}", "the policy's")

    def sampling(self) -> None:
        """Set rollout.temperature, top_p, top_k and min_p."""
        greedy = not self.on(f"{_ROLLOUT}.do_sample")
        if greedy:
            self.differs("sampling", "greedy (do_sample false)", "sampled")
        names = {leaf: f"{_ROLLOUT}.{leaf}" for leaf in ("temperature", "top_p", "top_k")}
        self.draws(names, self.engine)

    @property
    def engine(self) -> str:
        name = str(self.value(f"{_ROLLOUT}.name"))
        return name if name in ("vllm", "sglang", "hf") else "vllm"

    def evaluation(self) -> None:
        """Set how answers to held-out prompts are drawn."""
        if "eval.path" not in self.draft.values and "eval.sources" not in self.draft.values:
            return
        self.take("eval.at_start", self.on("trainer.val_before_train"), "trainer.val_before_train")
        samples = int(self.number(f"{_VALIDATION}.n")) if self.on(f"{_VALIDATION}.do_sample") else 0
        self.take("eval.samples", samples, f"{_VALIDATION}.n")
        if samples:
            self.take("eval.temperature", self.number(f"{_VALIDATION}.temperature"), f"{_VALIDATION}.temperature")
            self.take("eval.top_p", self.number(f"{_VALIDATION}.top_p"), f"{_VALIDATION}.top_p")
            self.take("eval.top_k", max(0, int(self.number(f"{_VALIDATION}.top_k"))), f"{_VALIDATION}.top_k")

    @property
    def asynchronous(self) -> bool:
        """Whether trainers and engines run at the same time (fully_async_policy)."""
        return any(name.startswith("async_training.") for name in self.settings)

    def devices(self, gpus: int | None) -> None:
        """Set the engines, and the parts of trainers that move to host memory while engines generate."""
        draft, tp = self.draft, int(self.number(f"{_ROLLOUT}.tensor_model_parallel_size"))
        name = f"{_ROLLOUT}.name"
        self.take("rollout.engine", self.engine, name)
        if self.value(name) != self.engine:
            draft.notes[name] = f"weft has no engine {self.value(name)}: the draft uses {self.engine}."
        if self.engine in SERVERS:
            self.take("rollout.tp", tp, f"{_ROLLOUT}.tensor_model_parallel_size")
        else:
            tp = 1
            draft.values.pop("rollout.gpu_memory_utilization", None)
        is_disaggregated = self.asynchronous or "rollout.n_gpus_per_node" in self.settings  # one_step_off_policy
        self.take(
            "cluster.placement", "disaggregated" if is_disaggregated else "colocated", "actor_rollout_ref.hybrid_engine"
        )
        if is_disaggregated:
            engines = int(self.number("rollout.nnodes") * self.number("rollout.n_gpus_per_node"))
            self.take("rollout.num_engines", max(1, engines // tp), "rollout.n_gpus_per_node", f"{engines} GPUs / {tp}")
            ahead = self.number("async_training.staleness_threshold") if self.asynchronous else 1
            self.take("cluster.max_staleness", math.ceil(ahead), "async_training.staleness_threshold")
            if ahead != math.ceil(ahead):
                self.differs("samples ahead of the weights", f"{ahead:g} of the samples between two syncs",
                             f"up to {math.ceil(ahead)} version")  # fmt: skip
        if gpus:
            self.take("cluster.trainer_ranks", gpus, "trainer.n_gpus_per_node", f"{gpus} GPUs")
            if not is_disaggregated:
                self.take("rollout.num_engines", max(1, gpus // tp), name, f"{gpus} GPUs / {tp}")
            for counted in ("trainer.n_gpus_per_node", "trainer.nnodes"):
                draft.notes.pop(counted, None)
        offloaded = [
            part for leaf, parts in _OFFLOADED.items() if self.on(f"{_ACTOR}.fsdp_config.{leaf}") for part in parts
        ]
        if not is_disaggregated:
            self.take("cluster.offload_during_rollout", offloaded, f"{_ACTOR}.fsdp_config.param_offload",
                      "param_offload, optimizer_offload of the actor")  # fmt: skip
        if self.draft.value("rl.kl_coef"):
            self.take("reference.cpu_offload", self.on("actor_rollout_ref.ref.fsdp_config.param_offload"),
                      "actor_rollout_ref.ref.fsdp_config.param_offload")  # fmt: skip

    def steps(self) -> None:
        """Set the optimizer steps of a rollout step, and the keys that count them."""
        draft, name = self.draft, f"{_ACTOR}.ppo_mini_batch_size"
        longest = draft.value("rollout.max_prompt_tokens", 0) + draft.value("rollout.max_new_tokens", 0)
        if self.on(f"{_ACTOR}.use_dynamic_bsz"):
            self.take("step.max_tokens_per_device", int(self.number(f"{_ACTOR}.ppo_max_token_len_per_gpu")),
                      f"{_ACTOR}.ppo_max_token_len_per_gpu")  # fmt: skip
        draft.fit_row(longest, "sample")
        batch = int(self.number(name))
        if self.asynchronous:
            several, syncs = (
                int(self.number(f"async_training.{leaf}"))
                for leaf in ("require_batches", "trigger_parameter_sync_step")
            )
            self.take("rl.prompts_per_step", batch * several * syncs, "async_training.trigger_parameter_sync_step",
                      f"{batch} x require_batches {several} x trigger_parameter_sync_step {syncs}")  # fmt: skip
        prompts = draft.value("rl.prompts_per_step", 0)
        epochs = int(self.number(f"{_ACTOR}.ppo_epochs"))
        self.take("rl.epochs", epochs, f"{_ACTOR}.ppo_epochs")
        if not batch or not prompts or prompts % batch:
            text = "set it: prompts of a rollout step / ppo_mini_batch_size, if the result is a whole number"
            draft.values["rl.minibatches"] = (None, text, name)
            return
        self.take("rl.minibatches", prompts // batch, name, f"{prompts} prompts / ppo_mini_batch_size {batch}")
        self.compare_steps()
        if self.on(f"{_ACTOR}.shuffle"):
            self.agrees("samples of an update", "drawn at random", "complete groups, in the order of their prompts")
        updates = prompts // batch * epochs
        draft.count_updates(("train.steps", "checkpoint.every", "schedule.warmup_steps"), updates)
        if samples := int(self.number("rollout.total_rollout_steps")):
            draft.values.pop("train.epochs", None)
            self.take("train.steps", max(1, samples // batch * epochs), "rollout.total_rollout_steps",
                      f"{samples} prompts / ppo_mini_batch_size {batch}")  # fmt: skip
        constant = draft.value("schedule.name") == "constant" and not (
            draft.value("schedule.warmup_steps") or draft.value("schedule.warmup_ratio")
        )
        text = (
            f"{draft.value('schedule.name')}, {'one rate for' if updates > 1 else 'of'} all updates of a rollout step"
        )
        (self.agrees if constant or updates == 1 else self.differs)(
            "schedule of the learning rate", text, f"{draft.value('schedule.name')}, of each update"
        )
