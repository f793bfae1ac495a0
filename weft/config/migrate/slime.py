"""The algorithm of a launch script of slime or Miles (train.py, train_async.py) in weft's keys, one quantity at a
time.

Miles is a fork of slime with its options. The defaults are in slime/utils/arguments.py, miles/utils/arguments.py and,
for `--train-backend fsdp`, miles/backends/fsdp_utils/arguments.py; others are Megatron's. The computations are in
slime/backends/megatron_utils/loss.py, slime/utils/ppo_utils.py, slime/ray/rollout.py (rewards) and
slime/backends/megatron_utils/model.py (the schedule, in optimizer steps), at commits 624b824a and 31f1ca96. Every key
that defines the algorithm is written; see algorithm.py.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from weft.config.migrate.algorithm import Algorithm
from weft.config.migrate.draft import numbers_of
from weft.config.migrate.names import weft_value
from weft.config.migrate.scripts import PROGRAM

# Name -> the default, for every name that this file reads.
DEFAULTS: dict[str, Any] = {
    "rollout_batch_size": None,
    "n_samples_per_prompt": 1,
    "global_batch_size": None,
    "num_steps_per_rollout": None,
    "num_rollout": None,
    "num_epoch": None,
    "over_sampling_batch_size": None,
    "dynamic_sampling_filter_path": None,
    "input_key": "input",
    "label_key": None,
    "apply_chat_template": False,
    "rm_type": None,
    "custom_rm_path": None,
    "rm_url": None,
    "reward_key": None,
    "custom_reward_post_process_path": None,
    "custom_generate_function_path": None,
    "advantage_estimator": "grpo",
    "custom_advantage_function_path": None,
    "disable_rewards_normalization": False,
    "disable_grpo_std_normalization": False,
    "normalize_advantages": False,
    "gamma": 1.0,
    "lambd": 1.0,
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "eps_clip_c": None,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "custom_loss_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "calculate_per_token_loss": False,
    "entropy_coef": 0.0,
    "clip_grad": 1.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "kl_coef": 0.0,
    "ref_update_interval": None,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "use_opd": False,
    "opd_kl_coef": 1.0,
    "opd_teacher_load": None,
    "critic_lr": None,
    "value_clip": 0.2,
    "num_critic_only_steps": 0,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_stop": None,
    "rollout_max_context_len": None,
    "eval_prompt_data": None,
    "eval_config": None,
    "skip_eval_before_train": False,
    "n_samples_per_eval_prompt": 1,
    "eval_temperature": None,
    "eval_top_p": None,
    "eval_top_k": None,
    "colocate": False,
    "rollout_num_gpus": None,
    "rollout_num_gpus_per_engine": 1,
    "train_backend": "megatron",
    "update_weights_interval": 1,
    "fully_async": False,
    "max_weight_staleness": None,
}
# Estimator -> (rl.algorithm, rl.advantage, rl.policy_loss). The first three divide by the group's deviation.
_ESTIMATORS = {
    "grpo": ("grpo", "grpo", "ppo"),
    "gspo": ("gspo", "grpo", "gspo"),
    "cispo": ("cispo", "grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce++", "reinforce++", "ppo"),
    "reinforce_plus_plus_baseline": ("reinforce++_baseline", "reinforce++_baseline", "ppo"),
    "ppo": ("ppo", "gae", "ppo"),
}
_OF_GROUPS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
_MATH = ("math", "dapo", "deepscaler", "boxed_math")  # rewards that compare an answer with the label
# Key of weft -> its default with --train-backend fsdp, if it differs from Megatron's.
_OF_FSDP = {"optimizer.weight_decay": 0.0, "optimizer.betas": [0.9, 0.95], "schedule.name": "constant"}
_SGLANG = "sglang_"  # the prefix of an option of the engine's server
# Such options that weft sets, or that have a key.
_PASSED = tuple(
    f"sglang_{leaf}"
    for leaf in (
        "mem_fraction_static", "context_length", "router_*", "dtype", "tp", "tp_size", "tensor_parallel_size", "host",
        "port", "model_path", "random_seed", "enable_lora", "max_lora_rank", "server_*",
    )
)  # fmt: skip


class Slime(Algorithm):
    """GRPO, GSPO, CISPO, REINFORCE++ and PPO of slime and Miles."""

    defaults = DEFAULTS

    @classmethod
    def handles(cls, name: str) -> bool:
        return name in DEFAULTS or (
            name.startswith(_SGLANG) and not any(fnmatchcase(name, pattern) for pattern in _PASSED)
        )

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        self.data()
        self.rewards()
        estimator = str(self.value("advantage_estimator"))
        self.advantage(estimator)
        self.policy_loss(estimator)
        self.kl(estimator)
        self.corrections()
        if estimator == "ppo":
            self.critic()
        else:
            self.agrees("critic", "none", "none")
        self.draws({leaf: f"rollout_{leaf}" for leaf in ("temperature", "top_p", "top_k")}, "sglang")
        if stop := self.value("rollout_stop"):
            self.take("rollout.stop", stop if isinstance(stop, list) else [stop], "rollout_stop")
        self.evaluation()
        self.devices(gpus)
        self.steps()

    def data(self) -> None:
        """Set the columns of the prompts' file."""
        columns = {"prompt": str(self.value("input_key"))}
        if label := self.value("label_key"):
            columns["answer"] = str(label)
        self.take("data.columns", columns, "input_key", "input_key, label_key")
        self.take("rl.chat", self.on("apply_chat_template"), "apply_chat_template")
        # without their limit weft's default would apply, and weft must not drop a prompt silently
        limited = "rollout.max_prompt_tokens" in self.draft.values
        self.take("data.long_documents", "drop" if limited else "error", "data.long_documents",
                  "longer prompts are omitted" if limited else "prompts of any length are used")  # fmt: skip

    def rewards(self) -> None:
        """Set rl.reward. If samples come from a function of the trainer's user, set rl.environment."""
        kind, path = self.value("rm_type"), self.value("custom_rm_path")
        if path is not None:
            self.functions([str(path)], "custom_rm_path", "(args, sample)")
        elif str(kind) in _MATH:
            boxed = str(kind) in ("math", "deepscaler", "boxed_math")
            self.take("rl.reward", ["math"], "rm_type")
            if boxed:
                self.take("rl.reward_options", {"math.boxed": True}, "rm_type", "the answer in \\boxed{}, like theirs")
            scores = "1 or -1 of the last 300 characters" if kind == "dapo" else "1 or 0"
            self.differs("reward", f"{kind}: {scores}, by their comparison", "math: 1 or 0, by math-verify")
        elif kind is not None or self.value("rm_url") is not None:
            self.functions([str(kind or "remote_rm")], "rm_type", "(response, label)")
        elif not self.on("use_opd"):
            self.differs("reward", "of each row's metadata (rm_type)", "none: set `rl.reward`")
        for name, quantity in (
            ("reward_key", "trained part of the reward"),
            ("custom_reward_post_process_path", "post-processing of a group's rewards"),
        ):
            if self.value(name) is not None:
                self.differs(quantity, f"{name} {self.value(name)}", "none: return it from the function of `rl.reward`")
        if (function := self.value("custom_generate_function_path")) is not None:
            self.differs("samples", f"from {function}", "from the engine; `rl.environment` supports turns and tools")

    def advantage(self, estimator: str) -> None:
        """Set rl.algorithm, rl.advantage, rl.advantage_norm, rl.gamma and rl.gae_lambda."""
        algorithm, advantage, _ = _ESTIMATORS.get(estimator, _ESTIMATORS["grpo"])
        whitens, centres = self.on("normalize_advantages"), not self.on("disable_rewards_normalization")
        divides = centres and not self.on("disable_grpo_std_normalization")
        name = "advantage_estimator"
        self.take("rl.algorithm", algorithm, name)
        self.take("rl.advantage", advantage, name)
        parts = ["reward"]
        if estimator in _OF_GROUPS and centres:
            parts.append("- mean of the group")
            if advantage == "grpo" and divides:
                parts.append("/ standard deviation of the group")
        text = " ".join(parts) + ", whitened over all tokens" * whitens
        if advantage == "grpo":
            norm = "group" if divides else "none"
            self.take("rl.advantage_norm", norm, "disable_grpo_std_normalization")
            drafted = "reward - mean of the group" + " / standard deviation of the group" * divides
            exact = centres and not whitens
        elif advantage == "gae":
            self.take("rl.advantage_norm", "batch" if whitens else "none", "normalize_advantages")
            drafted, exact = text, True
        else:
            drafted = (
                "reward - mean of the group" if estimator in _OF_GROUPS else "reward"
            ) + ", whitened over all tokens"
            exact = text == drafted
        if self.value("custom_advantage_function_path") is not None:
            text, exact = f"of {self.value('custom_advantage_function_path')}", False
        exact &= estimator in _ESTIMATORS
        (self.agrees if exact else self.differs)("advantage", f"{estimator}: {text}", f"{advantage}: {drafted}")
        if advantage in ("gae", "reinforce++"):
            self.take("rl.gamma", self.number("gamma"), "gamma")
        if advantage == "gae":
            self.take("rl.gae_lambda", self.number("lambd"), "lambd")
        self.compare_values({"gamma": "rl.gamma", "lambda": "rl.gae_lambda"})
        filtered = self.value("dynamic_sampling_filter_path")
        self.take("rl.dynamic_sampling", 0 if filtered is None else 100, "dynamic_sampling_filter_path")
        if filtered is not None:
            exact = str(filtered).endswith("check_reward_nonzero_std")
            (self.agrees if exact else self.differs)("replaced groups", str(filtered), "groups with equal rewards")
        if self.value("over_sampling_batch_size") is not None:
            self.agrees("prompts that are started", f"{self.value('over_sampling_batch_size')}", "as many as necessary")
        self.take("rl.mask_truncated", False, "rl.mask_truncated", "samples of the maximum length are trained")

    def policy_loss(self, estimator: str) -> None:
        """Set rl.policy_loss, rl.clip, rl.dual_clip, rl.loss_aggregation and rl.entropy_coef."""
        loss = _ESTIMATORS.get(estimator, _ESTIMATORS["grpo"])[2]
        function = self.value("custom_loss_function_path") or self.value("custom_pg_loss_reducer_function_path")
        self.take("rl.policy_loss", loss, "advantage_estimator")
        masked = self.on("use_opsm")
        original = str(function) if function else loss
        if masked:
            original += f", without samples of negative advantage that changed by over {self.number('opsm_delta'):g}"
        (self.differs if function or masked else self.agrees)("policy loss", original, loss)
        low = self.number("eps_clip")
        high = low if self.value("eps_clip_high") is None else self.number("eps_clip_high")
        dual = None if self.value("eps_clip_c") is None else self.number("eps_clip_c")
        self.clip_ratio(low, high, "eps_clip", "eps_clip, eps_clip_high", dual, "eps_clip_c")
        if loss == "cispo":
            self.draft.values.pop("rl.dual_clip")
        mode = "token-mean" if self.on("calculate_per_token_loss") else "seq-mean-token-mean"
        self.aggregation(mode, "calculate_per_token_loss", "clip_grad")
        self.take("rl.entropy_coef", self.number("entropy_coef"), "entropy_coef")
        self.compare_values({"entropy": "rl.entropy_coef"})

    def kl(self, estimator: str) -> None:
        """Set rl.kl_coef and the related keys."""
        kind = str(self.value("kl_loss_type"))
        estimate, clamp = _KL.get(kind, "k1"), 10.0 if kind == "low_var_kl" else None
        in_loss = self.on("use_kl_loss") and self.number("kl_loss_coef") > 0
        in_reward = self.number("kl_coef") > 0 and estimator not in ("grpo", "gspo", "cispo")
        if "kl_coef" in self.settings and self.number("kl_coef") and not in_reward:
            self.draft.notes["kl_coef"] = f"it has no effect with --advantage-estimator {estimator}: remove it."
        if "kl_loss_coef" in self.settings and self.number("kl_loss_coef") and not in_loss:
            self.draft.notes["kl_loss_coef"] = "without --use-kl-loss it has no effect: remove it."
        if in_loss and clamp and self.on("use_unbiased_kl"):
            original = f"{self.number('kl_loss_coef'):g} in the loss, k3 x ratio, their product clamped at 10"
        elif in_reward and estimator == "reinforce_plus_plus_baseline":
            original = f"{self.number('kl_coef'):g} of each token's KL, subtracted from its advantage"
        else:
            original = ""
        if in_loss:
            self.penalty(self.number("kl_loss_coef"), "kl_loss_coef", "loss", estimate, clamp,
                         self.on("use_unbiased_kl"), original)  # fmt: skip
        else:
            self.penalty(self.number("kl_coef") if in_reward else 0.0, "kl_coef", "reward", estimate, clamp, False,
                         original)  # fmt: skip
        if in_loss and (steps := self.value("ref_update_interval")):
            self.differs("reference", f"the policy of every {steps} rollout steps", "the initial model")

    def corrections(self) -> None:
        """Set rl.old_logprobs, rl.correction and rl.teacher."""
        recorded = self.on("use_rollout_logprobs")
        self.take("rl.old_logprobs", "rollout" if recorded else "recompute", "use_rollout_logprobs")
        self.agrees("logprobs of the old policy", *["the engine's" if recorded else "the trainer's"] * 2)
        function = str(self.value("custom_tis_function_path") or "")
        kind = "none" if not self.on("use_tis") else "icepop" if function.endswith("icepop_function") else "tis"
        unknown = kind == "tis" and function and not function.endswith("vanilla_tis_function")
        self.corrects(kind, "token", self.number("tis_clip_low"), self.number("tis_clip"),
                      "use_tis" if kind == "none" else "tis_clip", f"{function}" if unknown else "")  # fmt: skip
        if self.on("use_opd"):
            path, coef = self.value("opd_teacher_load"), self.number("opd_kl_coef")
            self.draft.values["rl.teacher"] = (path, "set it: the teacher as a HuggingFace model", "opd_teacher_load")
            self.take("rl.teacher_in", "advantage", "use_opd")
            self.take("rl.teacher_coef", coef, "opd_kl_coef")
            self.differs("teacher", f"{path or 'a server'}, {coef:g} x log(teacher / policy) in the advantage",
                         "the same for `rl.teacher`, a model in the trainers' ranks")  # fmt: skip

    def critic(self) -> None:
        """Set critic.lr and critic.clip."""
        rate = self.draft.value("optimizer.lr") if self.value("critic_lr") is None else self.number("critic_lr")
        self.take("critic.lr", rate, "critic_lr")
        self.take("critic.clip", self.number("value_clip"), "value_clip")
        self.compare_values({"critic's learning rate": "critic.lr", "clip of values": "critic.clip"})
        self.differs("critic's head at the start", "random", "zeros; `critic.head` has others")
        if steps := self.number("num_critic_only_steps"):
            self.differs("warm-up of the critic", f"{steps:g} steps without the policy", "none")

    def evaluation(self) -> None:
        """Set the held-out prompts, and how answers to them are drawn."""
        draft, data = self.draft, self.value("eval_prompt_data")
        if self.value("eval_config") is not None:
            draft.notes["eval_config"] = "list its sets in `eval.sources`, each with name and path."
        pairs = data if isinstance(data, list) else [data] if data is not None else []
        columns = {"columns": dict(draft.value("data.columns"))} if draft.value("data.columns") else {}
        if len(pairs) > 1 and len(pairs) % 2 == 0:
            sources = [
                {"name": str(name), "path": str(path), **columns}
                for name, path in zip(pairs[::2], pairs[1::2], strict=True)
            ]
            self.take("eval.sources", sources, "eval_prompt_data")
        elif pairs:
            self.take("eval.path", str(pairs[-1]), "eval_prompt_data")
        if not pairs:
            for key in [key for key in draft.values if key.startswith("eval.")]:
                draft.drop(key, "the config has no held-out prompts: set `eval.path` or `eval.sources`.")
            return
        self.take("eval.at_start", not self.on("skip_eval_before_train"), "skip_eval_before_train")
        self.take("eval.samples", int(self.number("n_samples_per_eval_prompt")), "n_samples_per_eval_prompt")
        for leaf in ("temperature", "top_p", "top_k"):
            name = f"eval_{leaf}" if self.value(f"eval_{leaf}") is not None else f"rollout_{leaf}"
            value = self.number(name)
            self.take(f"eval.{leaf}", max(0, int(value)) if leaf == "top_k" else value, name)

    def devices(self, gpus: int | None) -> None:
        """Set the engines, their devices, and the arguments of their server."""
        draft, per_engine = self.draft, int(self.number("rollout_num_gpus_per_engine"))
        adapters = bool(draft.value("lora.rank"))  # weft sends adapters to vLLM, but not to SGLang
        engine = "vllm" if adapters else "sglang"
        self.take("rollout.engine", engine, "rollout.engine", "the only engine of slime and Miles")
        if adapters:
            self.differs("engine", "sglang, which receives the adapters", "vllm: weft's sglang supports no adapters")
        if per_engine:
            self.take("rollout.tp", per_engine, "rollout_num_gpus_per_engine")
        else:
            draft.values["rollout.tp"] = (None, "set it: GPUs of an engine", "rollout_num_gpus_per_engine")
        is_colocated = self.on("colocate")
        self.take("cluster.placement", "colocated" if is_colocated else "disaggregated", "colocate")
        for counted in ("actor_num_nodes", "actor_num_gpus_per_node", "num_gpus_per_node"):
            draft.notes.pop(counted, None)
        if gpus:
            self.take("cluster.trainer_ranks", gpus, "actor_num_gpus_per_node", f"{gpus} GPUs")
        engines = gpus if is_colocated else int(self.number("rollout_num_gpus"))
        if engines and per_engine:
            self.take("rollout.num_engines", max(1, engines // per_engine), "rollout_num_gpus",
                      f"{engines} GPUs / {per_engine}")  # fmt: skip
        else:
            draft.values["rollout.num_engines"] = (None, "set it: GPUs of the engines / rollout.tp", "rollout_num_gpus")
        if self.on("fully_async") or self.settings.get(PROGRAM) == "train_async":
            bound = self.value("max_weight_staleness") or self.value("update_weights_interval")
            self.take("cluster.max_staleness", int(bound), "max_weight_staleness", "rollouts are made during training")
            if self.on("fully_async") and self.value("max_weight_staleness") is None:
                self.differs("age of samples", "unbounded", f"at most {bound} versions of the weights")
        options: dict[str, Any] = {}
        for name, value in self.settings.items():
            if self.handles(name) and name not in DEFAULTS:
                option, _, leaf = name.removeprefix(_SGLANG).partition(".")  # the option may be a mapping
                options[option] = {**options.get(option, {}), leaf: value} if leaf else value
        if (dtype := self.settings.get("sglang_dtype")) is not None:
            self.take("rollout.dtype", weft_value("fsdp.param_dtype", dtype) or dtype, "sglang_dtype")
        if options and adapters:
            self.draft.notes["sglang_*"] = (
                f"{', '.join(options)}: vLLM has different options (`rollout.engine_kwargs`)."
            )
        elif options:
            self.take("rollout.engine_kwargs", options, "sglang_*", "the --sglang options")
        if self.value("train_backend") == "fsdp":
            for key, value in _OF_FSDP.items():
                if draft.values.get(key, (None, "", ""))[2] == key:  # a default
                    self.take(key, value, key, f"{draft.trainer.short}'s default with fsdp")

    def steps(self) -> None:
        """Set the optimizer steps of a rollout step, the length of the run, and the keys that count these steps."""
        draft = self.draft
        for key, name in (("rl.prompts_per_step", "rollout_batch_size"), ("rl.group_size", "n_samples_per_prompt")):
            if self.value(name) is not None:
                self.take(key, int(self.number(name)), name)
        self.take("rl.epochs", 1, "rl.epochs", "samples are trained once")
        longest = draft.value("rollout.max_prompt_tokens", 1024) + (draft.value("rollout.max_new_tokens") or 1024)
        draft.fit_row(int(next(numbers_of(self.value("rollout_max_context_len")), longest)), "sample")
        if (count := int(self.number("num_steps_per_rollout"))) and draft.value("rl.prompts_per_step", 0) % count == 0:
            self.take("rl.minibatches", count, "num_steps_per_rollout")
        else:
            batch = self.value("global_batch_size")
            count = self.updates(int(self.number("global_batch_size")), "global_batch_size",
                                 f"global_batch_size {batch or 'that was not given'}")  # fmt: skip
        if steps := int(self.number("num_rollout")):
            self.take("train.steps", steps, "num_rollout")
            draft.values.pop("train.epochs", None)
        elif epochs := self.number("num_epoch"):
            self.take("train.epochs", epochs, "num_epoch")
        draft.count_updates(("train.steps", "checkpoint.every"), count)
        self.compare_steps()
        self.warmed("lr x (k - 1) / W: Megatron's first update has a rate of 0")
