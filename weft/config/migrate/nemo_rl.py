"""The algorithm of NeMo-RL's GRPO (examples/run_grpo_math.py) in weft's keys, one quantity at a time.

A config sets everything, or names a parent whose settings it changes (`defaults:`). For all other settings the values
of examples/configs/grpo_math_1B.yaml apply. The computations are in nemo_rl/algorithms/loss_functions.py (the loss),
nemo_rl/algorithms/utils.py (baseline, deviation, KL), nemo_rl/algorithms/grpo.py (the order of a step) and
nemo_rl/models/policy/dtensor_policy_worker.py (the schedule, stepped once per rollout step), at commit 54bec9d1. Names
of later versions are included. Every key that defines the algorithm is written; see algorithm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.config.migrate.algorithm import Algorithm
from weft.config.migrate.draft import Draft, numbers_of
from weft.config.migrate.trainer import TABLES
from weft.config.yaml12 import show

# Name -> its value in grpo_math_1B.yaml, for every name that this file reads.
DEFAULTS: dict[str, Any] = {
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.max_num_steps": 1000000,
    "grpo.max_rollout_turns": 1,
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.adv_estimator.name": "grpo",
    "grpo.adv_estimator.normalize_rewards": None,
    "grpo.adv_estimator.use_leave_one_out_baseline": None,
    "grpo.adv_estimator.minus_baseline": True,
    "grpo.val_at_start": False,
    "grpo.val_num_generations_per_prompt": 1,
    "grpo.use_dynamic_sampling": False,
    "grpo.overlong_filtering": False,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.kl_output_clamp_value": None,
    "loss_fn.kl_input_clamp_value": None,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.ratio_clip_c": None,
    "loss_fn.disable_ppo_ratio": False,
    "loss_fn.sequence_level_importance_ratios": False,
    "loss_fn.use_on_policy_kl_approximation": False,
    "loss_fn.use_importance_sampling_correction": False,
    "loss_fn.truncated_importance_sampling_ratio": None,
    "loss_fn.truncated_importance_sampling_ratio_min": None,
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.use_kl_in_reward": False,
    "loss_fn.use_cispo": False,
    "loss_fn.positive_example_nll_weight": 0.0,
    "loss_fn.force_on_policy_ratio": False,
    "loss_fn.token_level_loss": True,
    "checkpointing.enabled": True,
    "checkpointing.save_period": 10,
    "policy.train_global_batch_size": 512,
    "policy.max_total_sequence_length": 512,
    "policy.max_grad_norm": 1.0,
    "policy.dynamic_batching.enabled": True,
    "policy.dynamic_batching.train_mb_tokens": None,
    "policy.scheduler": None,
    "policy.generation.backend": "vllm",
    "policy.generation.max_new_tokens": None,
    "policy.generation.temperature": 1.0,
    "policy.generation.top_p": 1.0,
    "policy.generation.top_k": None,
    "policy.generation.val_temperature": None,
    "policy.generation.val_top_p": None,
    "policy.generation.val_top_k": None,
    "policy.generation.stop_strings": None,
    "policy.generation.vllm_cfg.tensor_parallel_size": 1,
    "policy.generation.vllm_cfg.enforce_eager": False,
    "policy.generation.colocated.enabled": True,
    "policy.generation.colocated.resources.gpus_per_node": None,
    "policy.generation.colocated.resources.num_nodes": None,
    "data.dataset_name": None,
    "data.prompt_file": None,
    "data.system_prompt_file": None,
    "data.max_input_seq_length": None,
}
_LOSS, _GENERATION = "loss_fn", "policy.generation"
# Sections that have an effect although their `enabled` is false.
_ALWAYS = ("checkpointing", "policy.generation.colocated", "policy.dynamic_batching", "grpo.async_grpo")
_MEGATRON = "policy.megatron_cfg"
_TRAINED = {"prompt": "instruction", "answer": "output"}  # the columns of data that is trained, not rewarded
# Names in Megatron's section -> the names with the same meaning for PyTorch.
_OF_MEGATRON = {
    "tensor_model_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
    "context_parallel_size": "policy.dtensor_cfg.context_parallel_size",
    "activation_checkpointing": "policy.dtensor_cfg.activation_checkpointing",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "optimizer.optimizer": "policy.optimizer.name",
    "optimizer.lr": "policy.optimizer.kwargs.lr",
    "optimizer.weight_decay": "policy.optimizer.kwargs.weight_decay",
    "optimizer.adam_eps": "policy.optimizer.kwargs.eps",
    **{f"peft.{leaf}": f"policy.dtensor_cfg.lora_cfg.{leaf}"
       for leaf in ("enabled", "dim", "alpha", "dropout", "target_modules")},
}  # fmt: skip
# Data sets with a name in NeMo-RL -> a source of weft. The split is omitted if the hub has only one.
_DATASETS: dict[str, dict[str, Any]] = {
    "AIME2024": {"path": "HuggingFaceH4/aime_2024", "columns": {"prompt": "problem", "answer": "answer"}},
    "DAPOMath17K": {"path": "BytedTsinghua-SIA/DAPO-Math-17k", "columns": {"answer": "reward_model.ground_truth"}},
    "DAPOMathAIME2024": {"path": "BytedTsinghua-SIA/AIME-2024", "columns": {"answer": "reward_model.ground_truth"}},
    "DeepScaler": {
        "path": "agentica-org/DeepScaleR-Preview-Dataset", "columns": {"prompt": "problem", "answer": "answer"},
    },
    "HelpSteer3": {"path": "nvidia/HelpSteer3", "subset": "preference"},
    "OpenMathInstruct-2": {
        "path": "nvidia/OpenMathInstruct-2", "split": "train_1M",
        "columns": {"prompt": "problem", "answer": "expected_answer"},
    },
    "OpenR1-Math-220k": {"path": "open-r1/OpenR1-Math-220k", "columns": {"prompt": "problem", "answer": "answer"}},
    "Tulu3Preference": {"path": "allenai/llama-3.1-tulu-3-8b-preference-mixture"},
    "geometry3k": {"path": "hiyouga/geometry3k", "columns": {"prompt": "problem", "answer": "answer"}},
    "gsm8k": {"path": "openai/gsm8k", "subset": "main", "columns": {"prompt": "question", "answer": "answer"}},
    "squad": {"path": "rajpurkar/squad"},
    "tulu3_sft_mixture": {"path": "allenai/tulu-3-sft-mixture"},
}  # fmt: skip


def settings_in_use(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(The settings that have an effect, with the names that NemoRl and the table know; name -> advice, for settings
    without effect). Disabled sections are omitted, Megatron's settings get the names of PyTorch's, and data sets with a
    name in NeMo-RL get their location on the hub."""
    is_off = {
        name.removesuffix(".enabled") for name, value in settings.items() if name.endswith(".enabled") and not value
    }
    is_off -= {*_ALWAYS}
    is_off = {part for part in is_off if not any(part.startswith(f"{other}.") for other in is_off)}
    notes = {f"{part}.*": "its `enabled` is false, so the section has no effect." for part in sorted(is_off)}
    effective = {
        name: value for name, value in settings.items() if not any(name.startswith(f"{part}.") for part in is_off)
    }
    if effective.get(f"{_MEGATRON}.enabled"):
        trained = {
            name: value
            for name, value in effective.items()
            if not name.startswith(("policy.optimizer", "policy.scheduler", "policy.dtensor_cfg"))
        }
        new_names = {f"{_MEGATRON}.{leaf}": name for leaf, name in _OF_MEGATRON.items()}
        effective = {new_names.get(name, name): value for name, value in trained.items()}
        betas = [settings.get(f"{_MEGATRON}.optimizer.adam_beta{number}") for number in (1, 2)]
        if None not in betas:
            effective["policy.optimizer.kwargs.betas"] = betas
        effective["policy.scheduler"] = _schedulers(settings)
    for part in ("train", "validation"):
        name, path, split = (
            effective.pop(f"data.{part}.{leaf}", None) for leaf in ("dataset_name", "data_path", "split")
        )
        if name is None and path is None:
            continue
        source = {**_DATASETS.get(str(name), {"path": path or name}), **({"split": split} if split else {})}
        if "columns" in source and not any(setting.startswith("grpo.") for setting in settings):
            source["columns"] = {_TRAINED[leaf]: column for leaf, column in source["columns"].items()}
        effective |= (
            {f"data.{leaf}": value for leaf, value in source.items()} if part == "train" else {"eval.sources": [source]}
        )
    return effective, notes


def _schedulers(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Megatron's schedule, converted to the list of torch's schedulers in policy.scheduler."""

    def setting(leaf: str, section: str = "scheduler") -> Any:
        return settings.get(f"{_MEGATRON}.{section}.{leaf}")

    peak, lowest = (next(numbers_of(setting(leaf, "optimizer")), 0) for leaf in ("lr", "min_lr"))
    schedulers: list[dict[str, Any]] = []
    if (warmup := setting("lr_warmup_iters")) and peak:
        start = next(numbers_of(setting("lr_warmup_init")), 0) / peak
        schedulers.append(
            {"name": "LinearLR", "kwargs": {"start_factor": float(f"{start:.6g}"), "total_iters": warmup}}
        )
    shape = {"cosine": "CosineAnnealingLR", "linear": "LinearLR"}.get(str(setting("lr_decay_style")), "ConstantLR")
    if shape == "CosineAnnealingLR":
        schedulers.append({"name": shape, "kwargs": {"eta_min": lowest, "T_max": setting("lr_decay_iters")}})
    elif shape == "LinearLR":
        end = lowest / peak if peak else 0
        schedulers.append({"name": shape, "kwargs": {"end_factor": end, "total_iters": setting("lr_decay_iters")}})
    return schedulers


class NemoRl(Algorithm):
    """GRPO of NeMo-RL."""

    defaults = DEFAULTS

    @classmethod
    def handles(cls, name: str) -> bool:
        return name in DEFAULTS or name.startswith(("env.", "policy.scheduler."))

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        self.data()
        self.rewards()
        self.advantage()
        self.policy_loss()
        self.kl()
        self.corrections()
        self.agrees("critic", "none", "none")
        self.draws({leaf: f"{_GENERATION}.{leaf}" for leaf in ("temperature", "top_p", "top_k")}, "vllm")
        if (stop := self.value(f"{_GENERATION}.stop_strings")) is not None:
            self.take("rollout.stop", stop, f"{_GENERATION}.stop_strings")
        self.devices(gpus)
        self.steps()

    def data(self) -> None:
        """Set the prompts and lengths."""
        name = self.value("data.dataset_name")
        if name is not None:
            self.take("data.path", name, "data.dataset_name")
        for key, quantity in (("data.prompt_file", "prompts"), ("data.system_prompt_file", "system prompt")):
            if self.value(key) is not None:
                self.differs(quantity, f"inserted into the text of {self.value(key)}",
                             "unchanged: `rl.instruction` appends text")  # fmt: skip
        self.take("rl.chat", True, "rl.chat", "NeMo-RL renders prompts with the chat template")
        total, limit = int(self.number("policy.max_total_sequence_length")), f"{_GENERATION}.max_new_tokens"
        longest = int(self.number(limit)) or total
        prompt = min(int(self.number("data.max_input_seq_length")) or total, 1024, max(1, total // 2))
        if longest < total:
            self.take("rollout.max_prompt_tokens", total - longest, "policy.max_total_sequence_length")
            self.take("rollout.max_new_tokens", longest, limit)
        else:
            self.take("rollout.max_prompt_tokens", prompt, "data.max_input_seq_length",
                      f"of max_total_sequence_length {total}")  # fmt: skip
            self.take("rollout.max_new_tokens", total - prompt, limit, f"max_total_sequence_length {total} - {prompt}")
            self.differs("longest completion", f"{total} tokens minus the prompt", f"{total - prompt}")
        self.take("data.long_documents", "drop", "data.long_documents", "NeMo-RL does not train on longer prompts")

    def rewards(self) -> None:
        """Set rl.reward."""
        environments = sorted({name.split(".")[1] for name in self.settings if name.startswith("env.")})
        if environments == ["math"]:
            self.take("rl.reward", ["math"], "env.math")
            self.agrees("reward", "math: 1 or 0, by math-verify", "math: 1 or 0, by math-verify")
        else:
            self.differs("reward", f"of the environments {', '.join(environments) or '?'}", "none: set `rl.reward`")
        for name in self.settings:
            if name.startswith("env.") and not name.endswith("num_workers"):
                self.draft.notes[name] = "weft does not know this environment: set `rl.reward` or `rl.environment`."
        if (turns := int(self.number("grpo.max_rollout_turns"))) > 1:
            self.differs("turns of a sample", str(turns), "one; for more set `rl.environment` and `rl.max_turns`")

    def advantage(self) -> None:
        """Set rl.algorithm, rl.advantage, rl.advantage_norm, rl.mask_truncated and rl.dynamic_sampling."""
        estimator = str(self.value("grpo.adv_estimator.name"))
        if estimator == "reinforce_plus_plus":
            minus = self.on("grpo.adv_estimator.minus_baseline")
            advantage = "reinforce++_baseline" if minus else "reinforce++"
            for key in ("rl.algorithm", "rl.advantage"):
                self.take(key, advantage, "grpo.adv_estimator.name")
            if not minus:
                self.take("rl.gamma", 1.0, "rl.gamma", "NeMo-RL does not discount")
            self.agrees("advantage", *[f"reward{' - mean of the group' * minus}, whitened over all tokens"] * 2)
        else:
            self.of_groups(estimator)
        self.take("rl.mask_truncated", self.on("grpo.overlong_filtering"), "grpo.overlong_filtering")
        replaces = self.on("grpo.use_dynamic_sampling")
        self.take("rl.dynamic_sampling", 100 if replaces else 0, "grpo.use_dynamic_sampling")

    def of_groups(self, estimator: str) -> None:
        """Set rl.algorithm, rl.advantage and rl.advantage_norm of an advantage that compares a group's samples."""
        leaves = ("use_leave_one_out_baseline", "normalize_rewards")
        names = [f"grpo.adv_estimator.{leaf}" for leaf in leaves]  # of later versions, where they are set
        names = [
            name if self.value(name) is not None else f"grpo.{leaf}" for name, leaf in zip(names, leaves, strict=True)
        ]
        excludes, divides = map(self.on, names)
        advantage = "rloo" if excludes and not divides else "grpo"
        self.take("rl.algorithm", advantage, names[0])
        self.take("rl.advantage", advantage, names[0])
        members = "other samples of the group" if excludes else "group"
        original = f"reward - mean of the {members}"
        if divides:
            original += f" / standard deviation of the {members}, divisor n"
        if estimator != "grpo":
            original = f"{estimator}, which weft does not have"
        if advantage == "grpo":
            self.take("rl.advantage_norm", "group" if divides else "none", names[1])
        drafted = f"reward - mean of the {'other samples of the group' if advantage == 'rloo' else 'group'}"
        drafted += " / standard deviation of the group, divisor n - 1" * divides
        (self.differs if divides or estimator != "grpo" else self.agrees)("advantage", original, drafted)

    def policy_loss(self) -> None:
        """Set rl.policy_loss, rl.clip, rl.dual_clip, rl.loss_aggregation and rl.entropy_coef."""
        plain, sequence = self.on(f"{_LOSS}.disable_ppo_ratio"), self.on(f"{_LOSS}.sequence_level_importance_ratios")
        cispo = self.on(f"{_LOSS}.use_cispo")
        loss = "reinforce" if plain else "cispo" if cispo else "gspo" if sequence else "ppo"
        name = f"{_LOSS}.disable_ppo_ratio" if plain else f"{_LOSS}.sequence_level_importance_ratios"
        name = f"{_LOSS}.use_cispo" if cispo else name
        self.take("rl.policy_loss", loss, name)
        self.agrees("policy loss", loss, loss)
        if not plain:
            ratio = self.value(f"{_LOSS}.ratio_clip_c")
            self.clip_ratio(self.number(f"{_LOSS}.ratio_clip_min"), self.number(f"{_LOSS}.ratio_clip_max"),
                            f"{_LOSS}.ratio_clip_min", "ratio_clip_min, ratio_clip_max",
                            None if ratio is None else self.number(f"{_LOSS}.ratio_clip_c"),
                            f"{_LOSS}.ratio_clip_c")  # fmt: skip
        mode = "token-mean" if self.on(f"{_LOSS}.token_level_loss") else "seq-mean-token-mean"
        self.aggregation(mode, f"{_LOSS}.token_level_loss", "policy.max_grad_norm")
        self.take("rl.entropy_coef", 0.0, "rl.entropy_coef", "NeMo-RL has none")
        if weight := self.number(f"{_LOSS}.positive_example_nll_weight"):
            self.differs("cross entropy of samples with the highest reward", f"added, times {weight:g}", "none")

    def kl(self) -> None:
        """Set rl.kl_coef and the related keys."""
        coef, kind = (
            self.number(f"{_LOSS}.reference_policy_kl_penalty"),
            str(self.value(f"{_LOSS}.reference_policy_kl_type")),
        )
        clamp, inner = self.value(f"{_LOSS}.kl_output_clamp_value"), self.value(f"{_LOSS}.kl_input_clamp_value")
        original = ""
        if self.on(f"{_LOSS}.use_on_policy_kl_approximation"):
            original = f"{coef:g} in the loss, {kind} x the ratio of policy and engine, without its gradient"
        elif inner is not None and clamp is None:
            original = f"{coef:g} in the loss, {kind} of a log ratio clamped at {inner}"
        name = f"{_LOSS}.reference_policy_kl_penalty"
        limit = None if clamp is None else float(next(numbers_of(clamp), 0)) or None
        used_in = "reward" if self.on(f"{_LOSS}.use_kl_in_reward") else "loss"
        if used_in == "reward" and str(self.value("grpo.adv_estimator.name")) != "reinforce_plus_plus":
            coef, original = 0.0, ""  # only this estimator reads it
        elif used_in == "reward":
            original = f"{coef:g} x {kind}, subtracted from each token's reward, which is not summed to its return"
        self.penalty(coef, name, used_in, kind if kind in ("k1", "k2", "k3") else "k3", limit, False, original)
        if coef and used_in == "loss" and not self.on(f"{_LOSS}.use_on_policy_kl_approximation"):
            self.draft.notes["(KL)"] = TABLES.sentences.rl["KL_GRADIENT"]

    def corrections(self) -> None:
        """Set rl.old_logprobs and rl.correction."""
        self.take("rl.old_logprobs", "recompute", "rl.old_logprobs", "the trainer's, as in NeMo-RL")
        switch, bound = f"{_LOSS}.use_importance_sampling_correction", f"{_LOSS}.truncated_importance_sampling_ratio"
        if not self.on(switch):
            self.corrects("none", "token", 0.0, 0.0, switch)
            return
        kind, limit = str(self.value(f"{_LOSS}.truncated_importance_sampling_type")), self.number(bound) or 1e30
        lowest = self.number(f"{_LOSS}.truncated_importance_sampling_ratio_min")
        original = ""
        if kind == "seq-mask-tis":
            original = (
                f"the ratio of each token, 0 in samples whose geometric mean is not {lowest:g} to {limit:g}, not cut"
            )
        name = switch if self.value(bound) is None else bound
        self.corrects("icepop" if kind == "icepop" else "tis", "token", lowest if kind != "seq-mask-tis" else 0.0,
                      limit if kind != "seq-mask-tis" else 1e30, name, original)  # fmt: skip

    def devices(self, gpus: int | None) -> None:
        """Set the engines and their devices."""
        draft, tp = self.draft, int(self.number(f"{_GENERATION}.vllm_cfg.tensor_parallel_size"))
        backend = str(self.value(f"{_GENERATION}.backend"))
        self.take("rollout.engine", "vllm", f"{_GENERATION}.backend")
        if backend != "vllm":
            draft.notes[f"{_GENERATION}.backend"] = f"weft has no engine {backend}: the draft uses vllm."
        self.take("rollout.tp", tp, f"{_GENERATION}.vllm_cfg.tensor_parallel_size")
        if self.on(f"{_GENERATION}.vllm_cfg.enforce_eager"):
            self.take("rollout.engine_kwargs", {"enforce_eager": True}, f"{_GENERATION}.vllm_cfg.enforce_eager")
        is_colocated = self.on(f"{_GENERATION}.colocated.enabled")
        self.take(
            "cluster.placement", "colocated" if is_colocated else "disaggregated", f"{_GENERATION}.colocated.enabled"
        )
        resources = [
            self.number(f"{_GENERATION}.colocated.resources.{leaf}") for leaf in ("gpus_per_node", "num_nodes")
        ]
        engines = gpus if is_colocated else int(resources[0] * (resources[1] or 1))
        for counted in ("cluster.gpus_per_node", "cluster.num_nodes"):
            draft.notes.pop(counted, None)
        if gpus:
            ranks = gpus if is_colocated else max(1, gpus - (engines or 0))
            self.take("cluster.trainer_ranks", ranks, "cluster.gpus_per_node", f"{ranks} GPUs")
        if engines:
            self.take("rollout.num_engines", max(1, engines // tp), f"{_GENERATION}.colocated.enabled",
                      f"{engines} GPUs / {tp}")  # fmt: skip

    def steps(self) -> None:
        """Set sizes, the optimizer steps of a rollout step, the schedule, and the keys that count these steps."""
        draft, batch = self.draft, int(self.number("policy.train_global_batch_size"))
        for key, name in (
            ("rl.prompts_per_step", "num_prompts_per_step"),
            ("rl.group_size", "num_generations_per_prompt"),
        ):
            self.take(key, int(self.number(f"grpo.{name}")), f"grpo.{name}")
        self.take("rl.epochs", 1, "rl.epochs", "samples are trained once")
        tokens = next(numbers_of(self.value("policy.dynamic_batching.train_mb_tokens")), None)
        if self.on("policy.dynamic_batching.enabled") and tokens:
            self.take("step.max_tokens_per_device", int(tokens), "policy.dynamic_batching.train_mb_tokens")
        draft.fit_row(draft.value("rollout.max_prompt_tokens") + draft.value("rollout.max_new_tokens"), "sample")
        count = self.updates(batch, "policy.train_global_batch_size", f"train_global_batch_size {batch}")
        if self.on(f"{_LOSS}.force_on_policy_ratio"):
            drafted = (
                "1, in one optimizer step of a rollout step" if count == 1 else "to the policy of the rollout step"
            )
            (self.agrees if count == 1 else self.differs)("ratio of the policy and the old one", "1", drafted)
        self.take("train.steps", int(self.number("grpo.max_num_steps")), "grpo.max_num_steps")
        every = int(self.number("checkpointing.save_period")) if self.on("checkpointing.enabled") else 0
        self.take("checkpoint.every", every, "checkpointing.save_period")
        if "eval.path" in draft.values or "eval.sources" in draft.values:
            self.take("eval.at_start", self.on("grpo.val_at_start"), "grpo.val_at_start")
            samples = int(self.number("grpo.val_num_generations_per_prompt")) or 1
            self.take("eval.samples", samples, "grpo.val_num_generations_per_prompt")
            for leaf, evaluated, keeps in (
                ("temperature", "val_temperature", 1.0), ("top_p", "val_top_p", 1.0), ("top_k", "val_top_k", 0),
            ):  # fmt: skip
                name = f"{_GENERATION}.{evaluated if self.value(f'{_GENERATION}.{evaluated}') is not None else leaf}"
                self.take(f"eval.{leaf}", self.value(name) or keeps, name)
            self.agrees("metric of evaluation", f"accuracy, the mean reward of {samples} sample(s)",
                      "eval/pass@1; eval/accuracy is for greedy answers")  # fmt: skip
        else:
            for key in [key for key in draft.values if key.startswith("eval.")]:
                draft.drop(key, "NeMo-RL's data set contains the held-out prompts: set `eval.path`.")
        self.schedule(count)
        draft.count_updates(("train.steps", "checkpoint.every", "schedule.warmup_steps"), count)
        warmup, steps = draft.value("schedule.warmup_steps", 0), draft.value("train.steps", 0)
        if warmup > steps:
            self.take("schedule.warmup_steps", steps, "policy.scheduler", f"{warmup}, which is longer than the run")
            self.differs("warm-up", f"{warmup} updates, of which the run has {steps}", f"{steps} updates")
        self.compare_steps()

    def schedule(self, updates: int) -> None:
        """Set the schedule from torch's schedulers. updates: optimizer steps of a rollout step."""
        original, drafted, is_same = take_schedule(self.draft, self.settings)
        of_update = ", of each update" if updates > 1 else ""
        (self.agrees if is_same else self.differs)(
            "schedule of the learning rate", f"{original}, by rollout steps", drafted + of_update
        )


def take_schedule(draft: Draft, settings: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Set the schedule from torch's schedulers in policy.scheduler. Returns (theirs, in words; the draft's, in words;
    whether they are the same)."""
    name = "policy.scheduler"
    listed = settings.get(name)
    if listed is None:  # one scheduler, whose arguments have different names
        scheduler_settings = {
            key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")
        }
        kwargs = {key.removeprefix("kwargs."): value for key, value in scheduler_settings.items() if key != "name"}
        listed = [{"name": scheduler_settings["name"], "kwargs": kwargs}] if scheduler_settings else []
    shape, texts = "constant", []
    for scheduler in listed:
        if "name" not in scheduler:
            continue
        kind, kwargs = str(scheduler["name"]).rpartition(".")[2], scheduler.get("kwargs") or {}
        texts.append(f"{kind} {show(dict(kwargs))}")
        peak = next(numbers_of(draft.value("optimizer.lr")), None)
        if kind == "LinearLR" and next(numbers_of(kwargs.get("start_factor")), 1) < 1:
            draft.take("schedule.warmup_steps", kwargs.get("total_iters"), name)
        elif kind == "LinearLR":
            shape = "linear"
            draft.take("schedule.min_lr_ratio", next(numbers_of(kwargs.get("end_factor")), 1), name, "end_factor")
        elif kind == "CosineAnnealingLR":
            shape = "cosine"
            lowest = next(numbers_of(kwargs.get("eta_min", 0)), 0)
            if peak:
                draft.take("schedule.min_lr_ratio", float(f"{lowest / peak:.6g}"), name, "eta_min / lr")
    draft.take("schedule.name", shape, name)
    if draft.value("schedule.warmup_steps"):
        draft.values.pop("schedule.warmup_ratio", None)
    drafted = shape + (", after a warm-up from 0" if draft.value("schedule.warmup_steps") else "")
    return ", ".join(texts) or "constant", drafted, all(text.startswith("ConstantLR") for text in texts)


def settle_schedule(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set the schedule of a draft without an algorithm, and note what differs."""
    original, drafted, is_same = take_schedule(draft, settings)
    draft.notes |= {} if is_same else {"policy.scheduler": f"{original} there, {drafted} here."}
