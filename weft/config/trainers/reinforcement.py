"""What `weft rl` says to names of TRL's GRPOConfig, verl's PPO, ROLL's RLVR pipeline and Miles. Some of them mean
something else, or nothing, in supervised fine-tuning; there the trainers' own tables answer."""

from __future__ import annotations

_ALGORITHM = "say `rl.algorithm`, or `rl.advantage` alone: grpo, rloo, reinforce++, reinforce++_baseline or gae."
_GROUP = "say `rl.group_size`."
_PROMPTS = "say `rl.prompts`, prompts of a rollout step over all ranks; samples are `rl.group_size` times as many."
_EPOCHS = "say `rl.epochs`."
_UPDATES = "say `rl.updates`, optimizer steps of a rollout step: `rl.prompts` / prompts of one of them."
_STEP = (
    "an optimizer step has `rl.prompts` x `rl.group_size` / `rl.updates` samples, whatever the number of devices; "
    "micro-batches follow from `step.max_tokens_per_device`: leave it out."
)
_ROWS = "rows are filled up to `step.max_tokens_per_device`: leave it out."
_CLIP = "say `rl.clip`: [0.2, 0.2] is how far below and above 1 the ratio may move."
_DUAL = "say `rl.dual_clip`."
_KL = "say `rl.kl`, with `rl.kl_in` as loss or reward; 0 has no reference."
_KL_IN = "say `rl.kl_in`: loss or reward; `rl.kl` is its weight."
_ESTIMATOR = "say `rl.kl_estimator`: k1, k2 or k3 (low_var_kl)."
_CLAMP = "say `rl.kl_clamp`."
_LEVEL = "say `rl.policy_loss`: ppo clips tokens, gspo whole samples (ppo_sequence: by the product of their ratios)."
_UNBIASED = "say `rl.kl_unbiased`."
_ENTROPY = "say `rl.entropy`."
_AGGREGATION = "say `rl.aggregation`: token_mean, sequence_mean or sequence_sum."
_LOSS = "say `rl.policy_loss`: ppo, gspo, cispo or reinforce, or an import path."
_SCALE = "say `rl.scale`: group, batch or none."
_GAMMA = "say `rl.gamma`."
_LAMBDA = "say `rl.gae_lambda`."
_CORRECTION = "say `rl.correction`: tis, mis, icepop or none, at `rl.correction_level` token, sequence or geometric."
_LIMITS = "say `rl.correction_limits`: the lowest and the highest ratio of trainer and engine."
_OLD = "say `rl.old_logprobs`: recompute or rollout."
_DYNAMIC = "say `rl.dynamic_sampling`: how many rounds replace groups whose rewards are all equal."
_MASK = "say `rl.mask_truncated`."
_BUFFER = "say `rl.overlong_buffer`, in tokens."
_PENALTY = "say `rl.overlong_penalty`."
_REWARD = "say `rl.reward`: a list of names and import paths."
_PROMPT = "say `rollout.max_prompt_tokens`."
_COMPLETION = "say `rollout.max_new_tokens`."
_ENGINE = "say `rollout.engine`."
_REFERENCE = "there is a reference with `rl.kl` above 0: the model at first, or say `reference.path`."
_TRAINERS = "say `cluster.trainer`, the ranks that train; engines of their own are `rollout.engines` x `rollout.tp`."
_PLACEMENT = (
    "say `cluster.placement`: colocated (engines on the trainers' devices, taking turns), disaggregated or auto; the "
    "embedded `rollout.engine` lives in the trainers anyway."
)
_DEVICES = (
    "say `cluster.placement`: colocated where roles share devices, else disaggregated with `cluster.trainer` ranks and "
    "`rollout.engines` x `rollout.tp` devices; numbers of devices are Ray's to give."
)
_SLEEP = "say `cluster.sleep`: which of parameters, optimizer and gradients leave the device while engines generate."
_ENGINE_SLEEPS = (
    "a colocated engine (`cluster.placement`) always gives up weights and KV cache to training: leave it out."
)
_UNFINISHED = "say `rollout.unfinished`: continue or drop, with `cluster.max_staleness` above 0."
_MEMORY = "say `rollout.memory`, a share of the accelerator's memory."
_TP = "say `rollout.tp`."
_OPTIONS = "say `rollout.options`, arguments of the engine's server."
_STALENESS = "say `cluster.max_staleness`, in versions of the weights; 0 is synchronous."
_READING = (
    "logprobs and values are read in rows of `step.max_tokens_per_device` (`reference.max_tokens_per_device` for the "
    "reference, `critic.max_tokens_per_device` for the critic): leave it out."
)
_CRITIC_LR = "say `critic.lr`."
_VALUE_CLIP = "say `critic.clip`."
_TRANSPORT = "say `rollout.transport`: auto, ipc, shared, group or files."
_BUCKET = "say `rollout.bucket_mb`."
_REFERENCE_ROWS = "say `reference.max_tokens_per_device`, tokens of one forward."
_REFERENCE_OFFLOAD = "say `reference.cpu_offload`."
_CRITIC = "say `critic.path`, read where `rl.advantage` is gae; null is `model.path`."
_CRITIC_ROWS = "say `critic.max_tokens_per_device`, tokens of one forward."
_CRITIC_OFFLOAD = "say `critic.cpu_offload`."
_CRITIC_LOSS = "a critic is an engine of its own, with `critic.lr` as its learning rate: leave it out."
_ROUTES = "routes are followed wherever the engine (`rollout.engine`) records them: leave it out."
_ENGINES = "say `rollout.engines`; `rollout.tp` is how many accelerators each has."
_LENGTH = "`rollout.max_prompt_tokens` + `rollout.max_new_tokens` is what the engine is started for: leave it out."
_TEMPERATURE = "say `rollout.temperature`; training divides logits by it, too."

_RESUMED = "resuming is no key: `weft rl --resume RUN`, RUN being the old `run.dir`."
_KEPT = "all samples are kept in the folder rollouts of `run.dir`: leave it out."
_RECORDED = "an engine's logprobs are always recorded; `rl.old_logprobs` says whether ratios are made of them."
_NO_CLIP = "rewards and advantages are not clipped: do it in functions of your own (`rl.reward`, `rl.advantage`)."
_TOP_P = "say `rollout.top_p`."
_TOP_K = "say `rollout.top_k`; 0 keeps all."
_DIFFICULTY = (
    "say `rl.dynamic_sampling`, which replaces groups whose rewards are all equal; there is no other threshold."
)

_COLUMNS = (
    "say `data.columns`, as in data.columns={prompt: question, answer: reward_model.ground_truth}; all other columns "
    "are given to the rewards by their names."
)
_BY_COLUMN = "say `rl.reward_column`, the column that names the reward functions of its row."
_CHAT = "messages always go through the chat template; `rl.chat` says that a text does, too."
_LONG = "say `data.long_documents`: error or drop; a prompt is never cut."
_TURNS = "say `rl.max_turns`, answers of the policy in one conversation with `rl.environment`."
_ENVIRONMENT = "say `rl.environment`, the import path of a class that runs tools or plays (docs/environments.md)."
_EVAL_EVERY = "say `eval.every`, in rollout steps."
_EVAL_FIRST = "say `eval.at_start`."
_EVAL_PATH = "say `eval.path`, or `eval.sources` for several sets with names."
_EVAL_SAMPLES = "say `eval.samples`, from which pass@k is estimated; one greedy answer is always asked for."
_EVAL_LONGEST = "say `eval.max_new_tokens`."

_TRL = {
    "num_generations": _GROUP,
    "per_device_train_batch_size": _STEP,
    "gradient_accumulation_steps": _STEP,
    "generation_batch_size": _PROMPTS,
    "steps_per_generation": _UPDATES,
    "num_iterations": _EPOCHS,
    "beta": _KL,
    "epsilon": _CLIP,
    "epsilon_high": _CLIP,
    "delta": _DUAL,
    "loss_type": "say `rl.algorithm`: grpo, dr_grpo, dapo or cispo; `rl.aggregation` alone is how tokens are added up.",
    "scale_rewards": _SCALE,
    "importance_sampling_level": _LEVEL,
    "mask_truncated_completions": "say `rl.mask_truncated`, and `rl.count_masked` for the samples to count as in TRL.",
    "vllm_importance_sampling_correction": _CORRECTION,
    "vllm_importance_sampling_mode": _CORRECTION,
    "vllm_importance_sampling_cap": _LIMITS,
    "use_bias_correction_kl": _UNBIASED,
    "reward_funcs": _REWARD,
    "reward_weights": "say `rl.reward_weights`.",
    "environment_factory": _ENVIRONMENT,
    "tools": _ENVIRONMENT,
    "max_tool_calling_iterations": _TURNS,
    "max_prompt_length": _PROMPT,
    "max_completion_length": _COMPLETION,
    "use_vllm": _ENGINE,
    "vllm_mode": _PLACEMENT,
    "vllm_enable_sleep_mode": _ENGINE_SLEEPS,
    "vllm_gpu_memory_utilization": _MEMORY,
    "vllm_tensor_parallel_size": _TP,
    "max_staleness": _STALENESS,
    "cliprange_value": _VALUE_CLIP,
    "vf_coef": _CRITIC_LOSS,
    "vllm_max_model_length": _LENGTH,
}
_VERL = {
    "actor_rollout_ref.model.path": "say `model.path`: a HuggingFace directory or hub id.",
    "actor_rollout_ref.rollout.temperature": _TEMPERATURE,
    "actor_rollout_ref.rollout.top_p": _TOP_P,
    "actor_rollout_ref.rollout.top_k": _TOP_K,
    "enable_chunked_prefill": _OPTIONS,
    "calculate_log_probs": _RECORDED,
    "gen_batch_size": _DYNAMIC,
    "filter_groups.metric": "`rl.dynamic_sampling` goes by the reward, the weighted sum of all: leave it out.",
    "rollout_data_dir": _KEPT,
    "resume_mode": _RESUMED,
    "algorithm.adv_estimator": _ALGORITHM,
    "algorithm.gamma": _GAMMA,
    "algorithm.lam": _LAMBDA,
    "norm_adv_by_std_in_grpo": _SCALE,
    "use_kl_in_reward": _KL_IN,
    "kl_penalty": _ESTIMATOR,
    "kl_ctrl.kl_coef": _KL,
    "kl_coef": _KL,
    "use_kl_loss": _KL_IN,
    "kl_loss_coef": _KL,
    "kl_loss_type": _ESTIMATOR,
    "clip_ratio": _CLIP,
    "clip_ratio_low": _CLIP,
    "clip_ratio_high": _CLIP,
    "clip_ratio_c": _DUAL,
    "loss_agg_mode": _AGGREGATION,
    "policy_loss.loss_mode": _LOSS,
    "loss_mode": _LOSS,
    "entropy_coeff": _ENTROPY,
    "ppo_epochs": _EPOCHS,
    "ppo_mini_batch_size": _UPDATES,
    "ppo_micro_batch_size": _ROWS,
    "ppo_micro_batch_size_per_gpu": _ROWS,
    "log_prob_micro_batch_size_per_gpu": _READING,
    "ref.path": _REFERENCE,
    "gpu_memory_utilization": _MEMORY,
    "tensor_model_parallel_size": _TP,
    "engine_kwargs": _OPTIONS,
    "enforce_eager": _OPTIONS,
    "hybrid_engine": _PLACEMENT,
    "free_cache_engine": _ENGINE_SLEEPS,
    "enable_sleep_mode": _ENGINE_SLEEPS,
    "actor.fsdp_config.param_offload": _SLEEP,
    "actor.fsdp_config.optimizer_offload": _SLEEP,
    "partial_rollout": _UNFINISHED,
    "max_num_seqs": _OPTIONS,
    "max_num_batched_tokens": _OPTIONS,
    "n_gpus_per_node": _TRAINERS,
    "nnodes": _TRAINERS,
    "critic.optim.lr": _CRITIC_LR,
    "cliprange_value": _VALUE_CLIP,
    "update_weights_bucket_megabytes": _BUCKET,
    "staleness_threshold": _STALENESS,
    "ppo_max_token_len_per_gpu": "say `step.max_tokens_per_device`.",
    "rollout.n": _GROUP,
    "rollout.name": _ENGINE,
    "engine_kwargs.*": _OPTIONS,
    "max_model_len": _LENGTH,
    "train_batch_size": _PROMPTS,
    "max_response_length": _COMPLETION,
    "filter_groups.enable": _DYNAMIC,
    "filter_groups.max_num_gen_batches": _DYNAMIC,
    "overlong_buffer.len": _BUFFER,
    "overlong_buffer.penalty_factor": _PENALTY,
    "rollout_is": _CORRECTION,
    "rollout_is_threshold": _LIMITS,
    "rollout_rs": _CORRECTION,
    "rollout_rs_threshold": _LIMITS,
    "bypass_mode": _OLD,
    "custom_reward_function.path": _REWARD,
    "custom_reward_function.name": _REWARD,
    "critic.model.path": _CRITIC,
    "critic.cliprange_value": _VALUE_CLIP,
    "critic.ppo_max_token_len_per_gpu": _CRITIC_ROWS,
    "critic.forward_max_token_len_per_gpu": _CRITIC_ROWS,
    "critic.model.fsdp_config.param_offload": _CRITIC_OFFLOAD,
    "critic.model.fsdp_config.optimizer_offload": _CRITIC_OFFLOAD,
    "ref.log_prob_max_token_len_per_gpu": _REFERENCE_ROWS,
    "ref.fsdp_config.param_offload": _REFERENCE_OFFLOAD,
    "prompt_key": _COLUMNS,
    "reward_fn_key": _BY_COLUMN,
    "filter_overlong_prompts": _LONG,
    "data.truncation": _LONG,
    "multi_turn.*": _ENVIRONMENT,
    "multi_turn.max_assistant_turns": _TURNS,
    "multi_turn.max_user_turns": _TURNS,
    "val_files": _EVAL_PATH,
    "val_before_train": _EVAL_FIRST,
    "test_freq": _EVAL_EVERY,
    "val_kwargs.n": _EVAL_SAMPLES,
    "val_kwargs.do_sample": _EVAL_SAMPLES,
    "val_kwargs.temperature": "say `eval.temperature`.",
    "val_kwargs.top_p": "say `eval.top_p`.",
    "val_kwargs.top_k": "say `eval.top_k`; 0 keeps all.",
}
_ROLL = {
    "adv_estimator": _ALGORITHM,
    "actor_infer.generating_args.max_new_tokens": _COMPLETION,
    "actor_infer.generating_args.temperature": _TEMPERATURE,
    "actor_infer.generating_args.top_p": _TOP_P,
    "actor_infer.generating_args.top_k": _TOP_K,
    "actor_infer.generating_args.num_return_sequences": _GROUP,
    "actor_infer.strategy_args.strategy_name": _ENGINE,
    "validation.generating_args.max_new_tokens": _EVAL_LONGEST,
    "validation.generating_args.temperature": "say `eval.temperature`.",
    "validation.generating_args.top_p": "say `eval.top_p`.",
    "validation.generating_args.top_k": "say `eval.top_k`; 0 keeps all.",
    "validation.generating_args.num_return_sequences": _EVAL_SAMPLES,
    "reward_clip": _NO_CLIP,
    "advantage_clip": _NO_CLIP,
    "norm_mean_type": _SCALE,
    "norm_std_type": _SCALE,
    "difficulty_mask": _DIFFICULTY,
    "difficulty_low_threshold": _DIFFICULTY,
    "difficulty_high_threshold": _DIFFICULTY,
    "is_use_additional_prompts": _DYNAMIC,
    "max_running_requests": _OPTIONS,
    "use_kl_loss": _KL_IN,
    "kl_loss_coef": _KL,
    "ppo_epochs": _EPOCHS,
    "num_gpus_per_node": _TRAINERS,
    "gpu_memory_utilization": _MEMORY,
    "resume_from_checkpoint": _RESUMED,
    "num_return_sequences_in_group": _GROUP,
    "rollout_batch_size": _PROMPTS,
    "whiten_advantages": _SCALE,
    "pg_clip": _CLIP,
    "pg_clip_low": _CLIP,
    "pg_clip_high": _CLIP,
    "dual_clip_loss": _DUAL,
    "pg_variant": _LOSS,
    "init_kl_coef": _KL,
    "add_token_level_kl": _KL_IN,
    "entropy_loss_coef": _ENTROPY,
    "lambd": _LAMBDA,
    "device_mapping": _DEVICES,
    "sleep_level": _ENGINE_SLEEPS,
    "infer_batch_size": _READING,
    "async_generation_ratio": _STALENESS,
    "value_clip": _VALUE_CLIP,
    "model_update_buffer_size_mb": _BUCKET,
    "max_len_mask": _MASK,
    "use_additional_prompts": _DYNAMIC,
    "prompt_length": _PROMPT,
    "response_length": _COMPLETION,
    "vf_coef": _CRITIC_LOSS,
    "critic.model_args.model_name_or_path": _CRITIC,
    "critic.training_args.learning_rate": _CRITIC_LR,
    "reference.model_args.model_name_or_path": _REFERENCE,
    "reference.device_mapping": "say `reference.ranks` for ranks with devices of their own; null: the trainer's.",
    "critic.device_mapping": "say `critic.ranks` for ranks with devices of their own; null: the trainer's.",
    "reference.infer_batch_size": _REFERENCE_ROWS,
    "critic.infer_batch_size": _CRITIC_ROWS,
    "rewards.*": "say `rl.reward`, and `rl.reward_column` for the column, such as tag, that chooses among them.",
    "eval_steps": _EVAL_EVERY,
    "custom_envs.*": _ENVIRONMENT,
    "max_actions_per_traj": _TURNS,
}
_MILES = {
    "advantage_estimator": _ALGORITHM,
    "n_samples_per_prompt": _GROUP,
    "global_batch_size": _STEP,
    "micro_batch_size": _ROWS,
    "ref_load": _REFERENCE,
    "value_clip": _VALUE_CLIP,
    "use_rollout_routing_replay": _ROUTES,
    "num_steps_per_rollout": _UPDATES,
    "eps_clip": _CLIP,
    "eps_clip_high": _CLIP,
    "eps_clip_c": _DUAL,
    "use_unbiased_kl": _UNBIASED,
    "entropy_coef": _ENTROPY,
    "disable_grpo_std_normalization": _SCALE,
    "normalize_advantages": _SCALE,
    "use_tis": _CORRECTION,
    "tis_clip": _LIMITS,
    "tis_clip_low": _LIMITS,
    "use_rollout_logprobs": _OLD,
    "dynamic_sampling_filter_path": _DYNAMIC,
    "custom_pg_loss_reducer_function_path": _AGGREGATION,
    "rollout_temperature": _TEMPERATURE,
    "temperature": _TEMPERATURE,
    "rollout_max_prompt_len": _PROMPT,
    "rollout_max_response_len": _COMPLETION,
    "colocate": _PLACEMENT,
    "offload": _SLEEP,
    "offload_train": _SLEEP,
    "offload_rollout": _ENGINE_SLEEPS,
    "partial_rollout": _UNFINISHED,
    "actor_num_nodes": _TRAINERS,
    "actor_num_gpus_per_node": _TRAINERS,
    "rollout_num_gpus": _TRAINERS,
    "rollout_num_gpus_per_engine": _TP,
    "sglang_mem_fraction_static": _MEMORY,
    "update_weight_buffer_size": "say `rollout.bucket_mb`, in MiB.",
    "update_weight_transfer_mode": _TRANSPORT,
    "max_weight_staleness": _STALENESS,
    "sglang_context_length": _LENGTH,
    "input_key": _COLUMNS,
    "label_key": _COLUMNS,
    "apply_chat_template": _CHAT,
    "custom_generate_function_path": _ENVIRONMENT,
    "eval_interval": _EVAL_EVERY,
    "eval_prompt_data": _EVAL_PATH,
    "n_samples_per_eval_prompt": _EVAL_SAMPLES,
    "eval_max_response_len": _EVAL_LONGEST,
    "eval_temperature": "say `eval.temperature`.",
    "eval_top_p": "say `eval.top_p`.",
    "rm_type": _REWARD,
    "custom_rm_path": _REWARD,
}

# Of what the trainers' own tables know as no part of supervised fine-tuning.
ELSEWHERE = "`weft rl` has it, if at all, under `rl.algorithm` or `rollout.engine` (docs/algorithms.md)."

REINFORCEMENT_OF: dict[str, dict[str, str]] = {"trl": _TRL, "verl": _VERL, "roll": _ROLL, "miles": _MILES}
REINFORCEMENT: dict[str, str] = {name: text for names in REINFORCEMENT_OF.values() for name, text in names.items()}
