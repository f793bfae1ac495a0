"""The algorithm of OpenRLHF (`python -m openrlhf.cli.train_ppo_ray`) in weft's keys, one quantity at a time.

The defaults are in openrlhf/cli/train_ppo_ray.py. The computations are in openrlhf/models/loss.py (losses and their
aggregation), openrlhf/models/utils.py (KL), openrlhf/trainer/ppo_utils/experience_maker.py (rewards and advantages) and
openrlhf/trainer/ray/ppo_actor.py, at commit 3c3be623. The table translates names of former versions
(`--init_kl_coef`). Every key that defines the algorithm is written; see algorithm.py.
"""

from __future__ import annotations

from typing import Any

from weft.config.migrate.algorithm import Algorithm

# Name -> OpenRLHF's default, for every name that this file reads.
DEFAULTS: dict[str, Any] = {
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.vllm_generate_batch_size": None,
    "rollout.max_new_tokens": None,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "data.max_len": 2048,
    "data.prompt_max_len": None,  # name of former versions
    "data.input_key": "input",
    "data.label_key": None,
    "data.image_key": "images",
    "data.apply_chat_template": False,
    "data.input_template": None,
    "data.prompt_probs": None,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.dynamic_batch_enable": False,
    "train.max_tokens_per_gpu": 16192,
    "train.agent_func_path": None,
    "train.colocate_all": False,
    "train.async_enable": False,
    "train.async_queue_size": 1,
    "train.partial_rollout_enable": False,
    "reward.model_name_or_path": None,
    "reward.remote_url": None,
    "reward.normalize_enable": False,
    "reward.clip_range": None,
    "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1.0,
    "reward.stop_properly_penalty_coef": None,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.advantage.is_correction_type": "tis",
    "algo.dynamic_filtering_enable": False,
    "algo.dynamic_filtering_range": [0, 1],
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": False,
    "algo.kl.estimator": "k1",
    "algo.kl.target": None,
    "algo.kl.horizon": 10000,
    "actor.policy_loss_type": "ppo",
    "actor.eps_clip": 0.2,
    "actor.eps_clip_low_high": None,
    "actor.dual_clip": None,
    "actor.entropy_coef": None,
    "actor.max_norm": 1.0,
    "actor.optim": "adam",
    "critic.model_name_or_path": None,
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "critic.freezing_steps": -1,
    "vllm.num_engines": None,
    "vllm.tensor_parallel_size": 1,
    "vllm.enforce_eager": False,
    "vllm.enable_prefix_caching": False,
    "ds.enable_sleep": False,
    "ds.zero_stage": 2,
    "ref.offload": False,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
}
# Estimator -> (rl.algorithm, rl.advantage, rl.advantage_norm, both in words).
_ESTIMATORS = {
    "gae": ("ppo", "gae", "batch", "gae, whitened over all tokens"),
    "reinforce": ("reinforce++", "reinforce++", None, "returns, whitened over all tokens"),
    "reinforce_baseline": (
        "reinforce++_baseline", "reinforce++_baseline", None, "reward - mean of the group, whitened over all tokens"
    ),
    "rloo": ("rloo", "rloo", None, "reward - mean of the other samples of the group"),
    "group_norm": ("grpo", "grpo", "group", "reward - mean of the group / standard deviation of the group"),
    "dr_grpo": ("dr_grpo", "grpo", "none", "reward - mean of the group"),
}  # fmt: skip
_WHITENED = ("gae", "reinforce", "reinforce_baseline")
# Names of the critic's settings -> the actor's, which weft uses for both, and the default of both.
_SHARED = {
    "adam.betas": [0.9, 0.95], "adam.eps": 1e-8, "adam.weight_decay": 0.0, "optim": "adam",
    "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.03, "min_lr_ratio": 0.1, "max_norm": 1.0,
}  # fmt: skip


class OpenRlhf(Algorithm):
    """train_ppo_ray's algorithm: PPO, REINFORCE++, RLOO, GRPO and Dr. GRPO."""

    defaults = DEFAULTS

    @classmethod
    def handles(cls, name: str) -> bool:
        return name in DEFAULTS or name.removeprefix("critic.") in _SHARED

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        self.data()
        self.rewards()
        estimator = str(self.value("algo.advantage.estimator"))
        self.advantage(estimator)
        self.policy_loss()
        self.kl(estimator)
        self.corrections()
        if estimator == "gae":
            self.critic()
        else:
            self.agrees("critic", "none", "none")
        self.draws({leaf: f"rollout.{leaf}" for leaf in ("temperature", "top_p")}, "vllm")
        self.devices(gpus)
        self.evaluation()
        self.steps()

    def data(self) -> None:
        """Set the columns of the prompts, and lengths."""
        columns = {"prompt": str(self.value("data.input_key"))}
        if label := self.value("data.label_key"):
            columns["answer"] = str(label)
        if (images := str(self.value("data.image_key"))) != "images":
            columns["images"] = images
        self.take("data.columns", columns, "data.input_key", "data.input_key, data.label_key")
        self.take("rl.chat", self.on("data.apply_chat_template"), "data.apply_chat_template")
        if (template := self.value("data.input_template")) is not None:
            self.differs("prompts", f"inserted into {template!r}", "unchanged: `rl.instruction` appends text")
        if self.value("data.prompt_probs") is not None:
            self.differs("prompts of a step", f"{self.value('data.prompt_probs')} of each file",
                         "in the order of the files: set `data.sources`, with weights")  # fmt: skip
        total, limit = int(self.number("data.max_len")), self.value("rollout.max_new_tokens")
        prompt = int(self.number("data.prompt_max_len")) or min(1024, total // 2)
        if limit is None:
            self.take("rollout.max_prompt_tokens", prompt, "data.max_len", f"of data.max_len {total}")
            self.take("rollout.max_new_tokens", total - prompt, "data.max_len", f"data.max_len {total} - {prompt}")
            self.differs("longest completion", f"{total} tokens minus the prompt", f"{total - prompt}")
        else:
            longest = int(self.number("rollout.max_new_tokens"))
            room = int(self.number("data.prompt_max_len")) or max(1, total - longest)
            self.take("rollout.max_new_tokens", longest, "rollout.max_new_tokens")
            self.take("rollout.max_prompt_tokens", room, "data.max_len", f"data.max_len {total} - {longest}")
        self.take("data.long_documents", "error", "data.long_documents", "no prompt is omitted silently")

    def rewards(self) -> None:
        """Set rl.reward, rl.overlong_buffer and rl.overlong_penalty."""
        path, remote = self.value("reward.model_name_or_path"), self.value("reward.remote_url")
        if self.value("train.agent_func_path") is not None:
            self.differs("samples and rewards", f"of the agent {self.value('train.agent_func_path')}",
                         "of the engine; `rl.environment` supports turns and tools")  # fmt: skip
        if remote is not None and not str(remote).startswith("http"):
            self.functions([str(remote)], "reward.remote_url", "(queries, prompts, labels)")
        elif remote is not None:
            self.differs("reward", f"of the server {remote}", "none: set `rl.reward` to a function that calls it")
        elif path is not None:
            self.take(
                "rl.reward", [f"model:{one_path}" for one_path in str(path).split(",")], "reward.model_name_or_path"
            )
            self.agrees("reward", f"model {path}", f"model:{path}")
        elif self.value("train.agent_func_path") is None:
            self.differs("reward", "none", "none: set `rl.reward`")
        if self.on("reward.normalize_enable"):
            self.differs("scale of rewards", "by the reward model's running mean and deviation", "unchanged")
        bounds = self.value("reward.clip_range")
        text = "-10 to 10" if bounds is None else f"{bounds[0]:g} to {bounds[1]:g}"
        is_reached = bounds is not None or path is not None
        (self.differs if is_reached else self.agrees)("clip of rewards", text, "none")
        if self.value("reward.overlong_buffer_len") is not None:
            length, penalty = "reward.overlong_buffer_len", "reward.overlong_penalty_factor"
            self.take("rl.overlong_buffer", int(self.number(length)), length)
            self.take("rl.overlong_penalty", self.number(penalty), penalty)
            self.agrees(
                "penalty of long samples", *[f"up to {self.number(penalty):g} in {self.number(length):g} tokens"] * 2
            )
        if (coef := self.value("reward.stop_properly_penalty_coef")) is not None:
            self.differs("reward of samples that did not end", f"stop_properly_penalty_coef {coef}",
                         "unchanged; `rl.mask_truncated` omits them")  # fmt: skip
        self.take("rl.mask_truncated", False, "rl.mask_truncated", "samples of the maximum length are trained")

    def advantage(self, estimator: str) -> None:
        """Set rl.algorithm, rl.advantage, rl.advantage_norm, rl.gamma, rl.gae_lambda and rl.dynamic_sampling."""
        name = "algo.advantage.estimator"
        algorithm, advantage, norm, text = _ESTIMATORS.get(estimator, _ESTIMATORS["gae"])
        self.take("rl.algorithm", algorithm, name)
        self.take("rl.advantage", advantage, name)
        if norm is not None:
            self.take("rl.advantage_norm", norm, name)
        undivided = self.on("algo.advantage.no_std_norm") and estimator in _WHITENED
        original = f"{estimator}: {text}" + ", only their mean subtracted" * undivided
        is_same = estimator in _ESTIMATORS and not undivided
        (self.agrees if is_same else self.differs)("advantage", original, f"{advantage}: {text}")
        if advantage in ("gae", "reinforce++"):
            self.take("rl.gamma", self.number("algo.advantage.gamma"), "algo.advantage.gamma")
        if advantage == "gae":
            self.take("rl.gae_lambda", self.number("algo.advantage.lambd"), "algo.advantage.lambd")
        self.compare_values({"gamma": "rl.gamma", "lambda": "rl.gae_lambda"})
        replaces = self.on("algo.dynamic_filtering_enable")
        self.take("rl.dynamic_sampling", 100 if replaces else 0, "algo.dynamic_filtering_enable")
        if replaces:
            low, high = map(float, self.value("algo.dynamic_filtering_range"))
            self.differs("replaced groups", f"groups whose mean score is not inside {low:g} to {high:g}",
                         "groups with equal rewards, which is the same for rewards of 0 and 1")  # fmt: skip

    def policy_loss(self) -> None:
        """Set rl.policy_loss, rl.clip, rl.dual_clip, rl.loss_aggregation and rl.entropy_coef."""
        loss = str(self.value("actor.policy_loss_type"))
        self.take("rl.policy_loss", loss, "actor.policy_loss_type")
        self.agrees("policy loss", loss, loss)
        pair = self.value("actor.eps_clip_low_high")
        low, high = map(float, pair) if pair is not None else [self.number("actor.eps_clip")] * 2
        dual = None if self.value("actor.dual_clip") is None else self.number("actor.dual_clip")
        self.clip_ratio(low, high, "actor.eps_clip", "eps_clip_low_high, eps_clip", dual, "actor.dual_clip")
        mode = "seq-mean-token-mean" if loss == "gspo" else "token-mean"
        self.aggregation(mode, "actor.policy_loss_type", "actor.max_norm")
        self.take("rl.entropy_coef", self.number("actor.entropy_coef"), "actor.entropy_coef")
        if self.number("actor.entropy_coef") and loss == "gspo":
            self.take("rl.entropy_aggregation", "token_mean", "actor.entropy_coef", "the mean over tokens, like theirs")
        self.compare_values({"entropy": "rl.entropy_coef"})

    def kl(self, estimator: str) -> None:
        """Set rl.kl_coef and the related keys."""
        coef, kind = self.number("algo.kl.init_coef"), str(self.value("algo.kl.estimator"))
        used_in = "loss" if self.on("algo.kl.use_loss") else "reward"
        original = ""
        if self.value("algo.kl.target") is not None:
            original = f"{coef:g} in the {used_in}, adapted to {self.value('algo.kl.target')} over "
            original += f"{self.value('algo.kl.horizon')} samples"
        elif used_in == "reward" and estimator not in ("gae", "reinforce"):
            original = f"{coef:g} of the KL of each token and the tokens after it, after the group is compared"
        elif used_in == "loss" and self.value("actor.policy_loss_type") == "gspo":
            original = f"{coef:g} in the loss, its mean over tokens"
        self.penalty(coef, "algo.kl.init_coef", used_in, kind, 10.0, False, original)

    def corrections(self) -> None:
        """Set rl.old_logprobs and rl.correction."""
        switch, of_kind = "algo.advantage.is_correction_enable", "algo.advantage.is_correction_type"
        low, high = map(float, self.value("algo.advantage.is_correction_threshold"))
        enabled, kind = self.on(switch), str(self.value(of_kind))
        # The ratio is then to the engine's logprobs.
        recorded = enabled and self.value("actor.policy_loss_type") == "gspo"
        self.take("rl.old_logprobs", "rollout" if recorded else "recompute", switch)
        self.agrees("logprobs of the old policy", *["the engine's" if recorded else "the trainer's"] * 2)
        if kind == "seq-mask-tis" and enabled and not recorded:
            text = f"token ratios of samples whose geometric mean is {low:g} to {high:g}"
            self.corrects("icepop", "geometric", low, high, of_kind, text)
        elif not recorded:
            self.corrects(kind if enabled else "none", "token", low, high, of_kind if enabled else switch)

    def critic(self) -> None:
        """Set critic.lr, critic.clip and critic.path."""
        self.take("critic.lr", self.number("critic.adam.lr"), "critic.adam.lr")
        self.take("critic.clip", self.number("critic.value_clip"), "critic.value_clip")
        self.compare_values({"critic's learning rate": "critic.lr", "clip of values": "critic.clip"})
        path = self.value("critic.model_name_or_path") or self.value("reward.model_name_or_path")
        if path is not None:
            self.take("critic.path", str(path).split(",")[0], "critic.model_name_or_path")
        self.differs("critic's head at the start", "from its checkpoint, otherwise random",
                     "zeros; `critic.head` has others")  # fmt: skip
        if (steps := self.number("critic.freezing_steps")) > 0:
            self.differs("warm-up of the critic", f"{steps:g} steps without the policy", "none")
        for leaf, default in _SHARED.items():
            critic, actor = (self.settings.get(f"{role}.{leaf}", default) for role in ("critic", "actor"))
            if critic != actor:
                self.differs(f"{leaf} of the critic", f"{critic}, policy {actor}", "the policy's")

    def devices(self, gpus: int | None) -> None:
        """Set the engines, and the parts of trainers that move to host memory while engines generate."""
        draft, tp = self.draft, int(self.number("vllm.tensor_parallel_size"))
        self.take("rollout.engine", "vllm", "vllm.num_engines", "OpenRLHF's engine")
        self.take("rollout.tp", tp, "vllm.tensor_parallel_size")
        asynchronous = self.on("train.async_enable")
        is_colocated = self.on("train.colocate_all") and not asynchronous
        self.take("cluster.placement", "colocated" if is_colocated else "disaggregated", "train.colocate_all")
        for counted in ("actor.num_nodes", "actor.num_gpus_per_node"):
            draft.notes.pop(counted, None)
        if gpus:
            self.take("cluster.trainer_ranks", gpus, "actor.num_gpus_per_node", f"{gpus} GPUs")
        if self.value("vllm.num_engines") is not None:
            self.take("rollout.num_engines", int(self.number("vllm.num_engines")), "vllm.num_engines")
        options = {leaf: True for leaf in ("enforce_eager", "enable_prefix_caching") if self.on(f"vllm.{leaf}")}
        if options:
            self.take("rollout.engine_kwargs", options, "vllm.enforce_eager", "the vllm options")
        if is_colocated and self.on("ds.enable_sleep"):
            self.take("cluster.offload_during_rollout", ["parameters", "optimizer", "gradients"], "ds.enable_sleep")
        if asynchronous:
            self.take(
                "cluster.max_staleness", max(1, int(self.number("train.async_queue_size"))), "train.async_queue_size"
            )
            if self.on("train.partial_rollout_enable"):
                self.take("rollout.on_weight_update", "continue", "train.partial_rollout_enable")
        if self.draft.value("rl.kl_coef"):
            self.take("reference.cpu_offload", self.on("ref.offload"), "ref.offload")
        if int(self.number("ds.zero_stage")) < 3:
            self.agrees("weights on each device", "complete; gradients and optimizer state are sharded (ZeRO below 3)",
                      "sharded; `fsdp.reshard_after_forward: false` keeps them from forward to backward")  # fmt: skip

    def evaluation(self) -> None:
        """Set how answers to held-out prompts are drawn."""
        if "eval.path" not in self.draft.values:
            for key in [key for key in self.draft.values if key.startswith("eval.")]:
                self.draft.drop(key, "the config has no held-out prompts: set `eval.path`.")
            return
        self.take("eval.samples", int(self.number("eval.n_samples_per_prompt")), "eval.n_samples_per_prompt")
        self.take("eval.temperature", self.number("eval.temperature"), "eval.temperature")

    def steps(self) -> None:
        """Set prompts and samples of a rollout step, its optimizer steps, and the keys that count these steps."""
        draft = self.draft
        self.take("rl.prompts_per_step", int(self.number("rollout.batch_size")), "rollout.batch_size")
        self.take("rl.group_size", int(self.number("rollout.n_samples_per_prompt")), "rollout.n_samples_per_prompt")
        self.take("rl.epochs", int(self.number("train.max_epochs")), "train.max_epochs")
        self.take("train.epochs", int(self.number("train.num_episodes")), "train.num_episodes")
        if self.on("train.dynamic_batch_enable"):
            self.take(
                "step.max_tokens_per_device", int(self.number("train.max_tokens_per_gpu")), "train.max_tokens_per_gpu"
            )
        draft.fit_row(draft.value("rollout.max_prompt_tokens") + draft.value("rollout.max_new_tokens"), "sample")
        batch = int(self.number("train.batch_size"))
        count = self.updates(batch, "train.batch_size", f"train.batch_size {batch}")
        draft.count_updates(("checkpoint.every",), count * int(self.number("train.max_epochs")))
        if self.value("rollout.vllm_generate_batch_size") is not None:
            self.agrees(
                "prompts that are started", str(self.value("rollout.vllm_generate_batch_size")), "as many as necessary"
            )
        if str(self.value("actor.optim")) == "muon":
            self.differs(
                "optimizer", "muon, with a separate lr for AdamW's parameters", "muon, with `optimizer.lr` for all"
            )
        self.compare_steps()
        self.warmed("lr x (k - 1) / W: the first update has a rate of 0")
