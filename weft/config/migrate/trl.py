"""The algorithms of TRL's GRPO and RLOO (`trl grpo`, `trl rloo`) in weft's keys, one quantity at a time.

The defaults are in trl/trainer/grpo_config.py and rloo_config.py. The computations are in grpo_trainer.py and
rloo_trainer.py in the same folder (advantages in _generate_and_score_completions, the loss in _compute_loss), in
version 1.16. Every key that defines the algorithm is written; see algorithm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.config.migrate.algorithm import Algorithm
from weft.config.migrate.scripts import PROGRAM
from weft.config.yaml12 import show

# Name -> TRL's default, for every name that this file reads.
DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_iterations": 1,
    "max_completion_length": 512,
    "max_prompt_length": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "importance_sampling_level": "token",
    "reward_funcs": None,
    "reward_weights": None,
    "reward_model_name_or_path": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "off_policy_mask_threshold": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,  # the former name of clip_max
    "max_grad_norm": 1.0,
}
# RLOOConfig: names that it lacks, names that only it has, and different defaults.
_OF_GRPO = (
    "use_bias_correction_kl", "delta", "importance_sampling_level", "scale_rewards", "loss_type",
    "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)  # fmt: skip
_OF_RLOO: dict[str, Any] = {"normalize_advantages": False, "reward_clip_range": None, "rloo_k": None}
_LIKE_GRPO: dict[str, Any] = {"beta": 0.05, "num_generations": 2}
# loss_type -> (rl.policy_loss, rl.loss_aggregation)
_LOSSES = {
    "grpo": ("ppo", "sequence_mean"),
    "dapo": ("ppo", "token_mean"),
    "dr_grpo": ("ppo", "sequence_sum"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
}
_SAPO = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}  # the temperatures of `rl.policy_loss: sapo`
# The end of a reward's name -> (weft's reward, whether both return the same numbers).
_REWARDS = {"accuracy_reward": ("math", True), "think_format_reward": ("format", False)}
# vllm_importance_sampling_mode -> (rl.correction, rl.correction_level); for masks it is icepop if clip_min is also set.
_CORRECTIONS = {
    "token_truncate": ("tis", "token"),
    "sequence_truncate": ("tis", "sequence"),
    "token_mask": ("mis", "token"),
    "sequence_mask": ("mis", "sequence"),
}


class Trl(Algorithm):
    """GRPOTrainer's algorithm."""

    defaults = DEFAULTS

    @classmethod
    def class_for(cls, settings: Mapping[str, Any]) -> type[Algorithm]:
        is_rloo = str(settings.get(PROGRAM, "")).startswith("rloo") or any(name in settings for name in _OF_RLOO)
        return Rloo if is_rloo else cls

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        updates = self.sizes(data_ranks)
        self.rewards()
        self.advantage()
        self.policy_loss(updates)
        self.kl()
        self.sampling()
        self.engines(gpus)
        self.corrections()
        self.compare_steps()

    def sizes(self, ranks: int | None) -> int:
        """Set prompts, samples and updates of a rollout step, and lengths. Returns the optimizer steps of one pass over
        a rollout step's samples, or 1 if they are unknown."""
        draft, group = self.draft, int(self.number("num_generations"))
        self.take("rl.group_size", group, "num_generations")
        self.take("rl.epochs", int(self.number("num_iterations")), "num_iterations")
        self.take("rollout.max_new_tokens", int(self.number("max_completion_length")), "max_completion_length")
        if limit := int(self.number("max_prompt_length")):
            self.take("rollout.max_prompt_tokens", limit, "max_prompt_length")
            self.differs("prompts that are too long", "truncated at the beginning", "an error, or omitted: "
                         "`data.long_documents`")  # fmt: skip
        self.take("rl.chat", False, "rl.chat", "TRL continues a prompt that is a text, without a template")
        draft.fit_row(draft.value("rollout.max_prompt_tokens", 1024) + draft.value("rollout.max_new_tokens"), "sample")
        batch, steps = int(self.number("per_device_train_batch_size")), int(self.number("gradient_accumulation_steps"))
        generated = int(self.number("generation_batch_size"))
        of_generation = int(self.number("steps_per_generation")) or steps
        if not generated and ranks is None:
            text = f"per_device_train_batch_size {batch} x {of_generation} x GPUs / num_generations {group}"
            draft.values["rl.prompts_per_step"] = (None, f"set it: {text}; or set --nproc", "generation_batch_size")
            samples = batch * of_generation
            updates = of_generation / steps
        else:
            samples = generated or batch * of_generation * (ranks or 1)
            self.take("rl.prompts_per_step", samples // group, "generation_batch_size",
                      f"{samples} samples / num_generations {group}")  # fmt: skip
            updates = samples / (batch * steps * ranks) if ranks else 0
        if updates >= 1 and updates == int(updates):
            self.take("rl.minibatches", int(updates), "steps_per_generation",
                      f"{of_generation} steps_per_generation / {steps} gradient_accumulation_steps"
                      if not generated else f"{samples} samples / the samples of an optimizer step")  # fmt: skip
            return int(updates)
        draft.values["rl.minibatches"] = (
            None, "set it: samples of generation / samples of an optimizer step", "steps_per_generation"
        )  # fmt: skip
        return 1

    def rewards(self) -> None:
        """Set rl.reward and rl.reward_weights."""
        functions = self.value("reward_funcs")
        names = [functions] if isinstance(functions, str) else list(functions or ())
        rewards, exact = list[str](), True
        for name in map(str, names):
            reward = next((entry for end, entry in _REWARDS.items() if name.rpartition(".")[2] == end), None)
            if reward is not None:
                rewards.append(reward[0])
                exact &= reward[1]
            elif "/" in name:
                rewards.append(f"model:{name}")
            elif "." in name:
                rewards.append(":".join(name.rsplit(".", 1)))
            else:
                rewards.append(f"my_rewards:{name}")
                exact = False
        if path := self.value("reward_model_name_or_path"):
            rewards.append(f"model:{path}")
        if rewards:
            self.take("rl.reward", rewards, "reward_funcs")
        (self.agrees if exact and rewards else self.differs)(
            "reward", ", ".join(map(str, names)) or "passed in Python", ", ".join(rewards) or "none: set `rl.reward`"
        )
        if "math" in rewards and "data.columns" not in self.draft.values:
            self.take("data.columns", {"answer": "solution"}, "reward_funcs", "the column that accuracy_reward reads")
        weights = self.value("reward_weights")
        if weights:
            self.take("rl.reward_weights", weights, "reward_weights")
        if len(rewards) > 1:
            together = str(self.value("multi_objective_aggregation"))
            (self.agrees if together == "sum_then_normalize" else self.differs)(
                "several rewards", together, "sum_then_normalize"
            )

    def advantage(self) -> None:
        """Set rl.algorithm, rl.advantage and rl.advantage_norm."""
        scale = self.value("scale_rewards")
        norm = {"true": "group", "false": "none"}.get(str(scale).lower(), str(scale))
        over = "" if norm == "none" else f" / standard deviation of the {norm}"
        self.take("rl.algorithm", "grpo", "loss_type", "TRL's GRPO; the keys below define it")
        self.take("rl.advantage", "grpo", "scale_rewards")
        self.take("rl.advantage_norm", norm, "scale_rewards")
        self.agrees("advantage", *[f"reward - mean of the group{over}"] * 2)
        self.masks()

    def masks(self) -> None:
        """Set rl.mask_truncated, rl.count_masked and rl.dynamic_sampling."""
        masked = self.on("mask_truncated_completions")
        self.take("rl.mask_truncated", masked, "mask_truncated_completions")
        if masked:
            self.take("rl.count_masked", True, "mask_truncated_completions", "TRL divides by all samples")
        self.take("rl.dynamic_sampling", 0, "rl.dynamic_sampling", "TRL has none")

    def policy_loss(self, updates: int) -> None:
        """Set rl.policy_loss, rl.clip, rl.dual_clip, rl.loss_aggregation and rl.entropy_coef."""
        kind, sequence = str(self.value("loss_type")), self.value("importance_sampling_level") == "sequence"
        loss, aggregation = _LOSSES.get(kind, ("ppo", "token_mean"))
        low = self.number("epsilon")
        high = low if self.value("epsilon_high") is None else self.number("epsilon_high")
        if loss == "ppo" and sequence:
            loss = "gspo"
        clip = [1.0, high - 1] if loss == "cispo" else [min(1.0, low), high]  # cispo's epsilon_high is the bound itself
        self.take("rl.policy_loss", loss, "loss_type", "loss_type, importance_sampling_level")
        exact = kind in _LOSSES and not (loss == "cispo" and (sequence or clip[1] <= 0))
        if loss == "sapo":
            exact = not sequence and all(self.settings.get(name, value) == value for name, value in _SAPO.items())
        level = "whole samples" if sequence else "each token"
        (self.agrees if exact else self.differs)("policy loss", f"{kind}, ratio of {level}", loss)
        if clip[1] > 0 and loss != "sapo":
            self.take("rl.clip", clip, "epsilon", "epsilon, epsilon_high")
            self.agrees("clip of the ratio", *[f"{1 - clip[0]:g} to {1 + clip[1]:g}"] * 2)
        if loss == "ppo":
            dual = None if self.value("delta") is None else self.number("delta")
            self.take("rl.dual_clip", dual, "delta")
            self.agrees("dual clip", *["none" if dual is None else f"{dual:g} x advantage, if that is negative"] * 2)
        elif self.value("delta") is not None:
            self.differs("dual clip", f"{self.number('delta'):g}", "none")
        self.take("rl.loss_aggregation", aggregation, "loss_type")
        shared = aggregation == "token_mean" and updates > 1
        theirs = "the mean over the tokens of all updates of a rollout step" if shared else kind
        (self.differs if shared or kind not in _LOSSES else self.agrees)("aggregation of the loss", theirs, aggregation)
        self.take("optimizer.max_grad_norm", self.value("max_grad_norm"), "max_grad_norm")
        self.take("rl.entropy_coef", self.number("entropy_coef"), "entropy_coef")
        if self.number("entropy_coef"):
            self.take("rl.entropy_aggregation", "token_mean", "entropy_coef", "TRL's bonus is a mean over tokens")
        self.compare_values({"entropy": "rl.entropy_coef"})
        for name, none, quantity in (
            ("use_adaptive_entropy", False, "weight of the entropy"),
            ("top_entropy_quantile", 1.0, "tokens by entropy"),
            ("off_policy_mask_threshold", None, "samples that are omitted"),
            ("sync_ref_model", False, "reference"),
        ):  # fmt: skip
            if self.value(name) not in (none, str(none).lower()):
                self.differs(quantity, f"{name} {show(self.value(name))}", "none")

    def kl(self) -> None:
        """Set rl.kl_coef and the related keys."""
        self.penalty(self.number("beta"), "beta", "loss", "k3", None, self.on("use_bias_correction_kl"))

    def sampling(self) -> None:
        """Set rollout.temperature, top_p, top_k and min_p."""
        self.draws(
            {leaf: leaf for leaf in ("temperature", "top_p", "top_k", "min_p")},
            "vllm" if self.on("use_vllm") else "embedded",
        )
        if self.number("repetition_penalty") != 1:
            self.differs("repetition_penalty", show(self.value("repetition_penalty")), "none")

    def engines(self, gpus: int | None) -> None:
        """Set the engines."""
        if gpus:
            self.take("cluster.trainer_ranks", gpus, "num_processes", f"{gpus} GPUs")
        if not self.on("use_vllm"):
            self.take("rollout.engine", "embedded", "use_vllm")
            return
        tp, colocated = int(self.number("vllm_tensor_parallel_size")), self.value("vllm_mode") == "colocate"
        self.take("rollout.engine", "vllm", "use_vllm")
        self.take("rollout.tp", tp, "vllm_tensor_parallel_size")
        self.take("cluster.placement", "colocated" if colocated else "disaggregated", "vllm_mode")
        if colocated:
            self.take("rollout.gpu_memory_utilization", self.number("vllm_gpu_memory_utilization"),
                      "vllm_gpu_memory_utilization")  # fmt: skip
        if gpus and colocated:
            self.take("rollout.num_engines", max(1, gpus // tp), "vllm_mode", f"{gpus} GPUs / {tp}")

    def corrections(self) -> None:
        """Set rl.old_logprobs and rl.correction. TRL corrects only vLLM's samples."""
        self.take("rl.old_logprobs", "recompute", "rl.old_logprobs", "the trainer's, as in TRL")
        if not self.on("use_vllm") or not self.on("vllm_importance_sampling_correction"):
            self.corrects("none", "token", 0.0, 0.0, "vllm_importance_sampling_correction")
            return
        mode = str(self.value("vllm_importance_sampling_mode"))
        correction, level = _CORRECTIONS.get(mode, _CORRECTIONS["sequence_mask"])
        former = self.value("vllm_importance_sampling_cap") is not None
        name = "vllm_importance_sampling_cap" if former else "vllm_importance_sampling_clip_max"
        low = self.number("vllm_importance_sampling_clip_min")
        high = 1e30 if self.value(name) is None else self.number(name)
        if low and correction == "mis":
            correction = "icepop"
        original = "" if mode in _CORRECTIONS else f"{mode}, {low:g} to {high:g}"
        self.corrects(correction, level, low, high, name, original)


class Rloo(Trl):
    """RLOOTrainer's algorithm: one ratio per sample, and the KL in its reward."""

    defaults = {name: value for name, value in DEFAULTS.items() if name not in _OF_GRPO} | _OF_RLOO | _LIKE_GRPO

    def advantage(self) -> None:
        """Set rl.algorithm, rl.advantage, rl.mask_truncated and rl.dynamic_sampling."""
        if "rloo_k" in self.settings:
            self.take("rl.group_size", int(self.number("rloo_k")), "rloo_k")
            self.differs("version", "TRL before 0.20, with other names and defaults", "RLOOConfig of 1.16")
        self.take("rl.algorithm", "rloo", "rl.algorithm", "TRL's RLOO; the keys below define it")
        self.take("rl.advantage", "rloo", "rl.advantage", "TRL's RLOO")
        text = "reward - mean of the other samples of the group"
        whitens = self.on("normalize_advantages")
        original = text + ", whitened over all samples" * whitens
        (self.differs if whitens else self.agrees)("advantage", original, text)
        bounds = self.value("reward_clip_range")
        (self.agrees if bounds is None else self.differs)("clip of rewards", show(bounds), "null")
        self.masks()

    def policy_loss(self, updates: int) -> None:
        """Set rl.policy_loss, rl.clip, rl.dual_clip, rl.loss_aggregation and rl.entropy_coef."""
        self.take("rl.policy_loss", "ppo_sequence", "rl.policy_loss", "the product of a sample's ratios, as in TRL")
        self.agrees("policy loss", *["ppo, with the product of a sample's ratios"] * 2)
        low = self.number("epsilon")
        high = low if self.value("epsilon_high") is None else self.number("epsilon_high")
        self.clip_ratio(low, high, "epsilon", "epsilon, epsilon_high", None, "rl.dual_clip")
        self.aggregation("seq-mean-token-mean", "rl.loss_aggregation", "max_grad_norm")
        self.take("rl.entropy_coef", 0.0, "rl.entropy_coef", "TRL's RLOO has none")
        if self.on("sync_ref_model"):
            self.differs("reference", f"sync_ref_model {show(self.value('sync_ref_model'))}", "none")

    def kl(self) -> None:
        """Set rl.kl_coef and the related keys."""
        self.penalty(self.number("beta"), "beta", "reward", "k1", None, False)

    def corrections(self) -> None:
        """Set rl.old_logprobs and rl.correction."""
        self.take("rl.old_logprobs", "recompute", "rl.old_logprobs", "the trainer's, as in TRL")
        self.corrects("none", "token", 0.0, 0.0, "rl.correction")
