"""Every key that is accepted has an effect: this table says which, and names the test that shows it.

A new key fails here until it has its line. `shown_by` is "file::test".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config import SftConfig
from weft.config.keys import schema_keys

TESTS = Path(__file__).parents[1]

# key -> (what it changes, shown_by)
EFFECTS: dict[str, tuple[str, str]] = {
    "model.path": ("which config, weights and tokenizer are read", "parity/test_parity.py::test_families"),
    "model.init": (
        "random: weights are drawn and no weight file is needed",
        "engine/test_engine.py::test_random_weights_depend_on_the_seed_and_not_on_the_mesh",
    ),
    "model.imports": (
        "which architectures of the user's own are known",
        "models/test_own_architecture.py::test_gradients_and_weights_are_plain_transformers",
    ),
    "model.dcp_weights": (
        "which directory of torch.distributed.checkpoint weights are read from",
        "checkpoint/test_dcp.py::test_what_names_stand_under",
    ),
    "model.ignore_weights": (
        "which tensors of the files may be left out",
        "checkpoint/test_load.py::test_an_unwanted_tensor_is_named_and_can_be_ignored",
    ),
    "model.attention": (
        "which kernel computes attention",
        "engine/test_startup.py::test_model_attention_names_the_kernel",
    ),
    "model.recompute": (
        "full: layers run again in backward, with equal gradients",
        "engine/test_engine.py::test_recompute_runs_layers_twice_with_equal_gradients",
    ),
    "model.router_aux_loss": (
        "document, step: the experts' auxiliary loss of each document, or of all tokens, is part of the gradient",
        "engine/test_balance.py::test_parity_with_transformers_own_loss_of_the_whole_step",
    ),
    "model.router_aux_loss_coef": (
        "factor of that loss",
        "engine/test_balance.py::test_the_coefficient_is_the_configs_unless_it_is_set",
    ),
    "model.router_bias_rate": (
        "how far correction biases move",
        "engine/test_router_bias.py::test_a_step_moves_biases_by_its_choices",
    ),
    "model.compile": (
        "layers run as compiled graphs",
        "models/test_compile.py::test_parity_with_compiled_layers",
    ),
    "model.fused_norms": (
        "RMSNorms run as torch's fused kernel",
        "models/test_fused_norms.py::test_where_they_are_fused",
    ),
    "model.transforms": (
        "fp8: linear layers of the decoder multiply rounded matrices",
        "models/test_fp8.py::test_gradients_of_plain_layers_that_round",
    ),
    "model.freeze": (
        "which parameters have no gradient and no optimizer state",
        "models/test_freeze.py::test_what_is_frozen_has_no_gradient_no_state_and_is_not_reduced",
    ),
    "data.path": ("which documents are trained", "data/test_documents.py::test_formats_mix_in_any_order"),
    "data.split": ("which split of a dataset, or part of a file", "data/test_sources.py::test_a_part_of_a_source"),
    "data.subset": (
        "which subset of a dataset on the hub",
        "data/test_sources.py::test_a_dataset_on_the_hub_is_asked_of_datasets",
    ),
    "data.columns": ("which columns are read as which", "data/test_sources.py::test_rows_of_other_trainers"),
    "data.sources": ("which sources are trained, and how much of each", "data/test_sources.py::test_several_sources"),
    "data.text_unit": ("what of a text file is a document", "data/test_sources.py::test_documents_of_plain_text"),
    "data.roles": ("who speaks", "data/test_sources.py::test_the_mapping_of_roles_that_an_error_proposes_mends_it"),
    "data.message_keys": ("which keys messages have", "data/test_messages.py::test_keys_of_other_names_are_mapped"),
    "data.ignore": (
        "what is left out on purpose",
        "data/test_messages.py::test_keys_and_columns_that_are_left_out_on_purpose",
    ),
    "data.system": (
        "the default system prompt",
        "data/test_messages.py::test_a_system_message_by_column_and_by_default",
    ),
    "data.train_on": ("which tokens the loss falls on", "data/test_masks.py::test_train_on"),
    "data.chat_template": (
        "how conversations are rendered",
        "data/test_masks_of_templates.py::test_a_template_of_a_file",
    ),
    "data.template_kwargs": (
        "what templates are told besides",
        "data/test_masks_of_templates.py::test_kwargs_of_the_config_and_of_a_document",
    ),
    "data.template_date": (
        "the day that templates write",
        "data/test_masks_of_templates.py::test_the_day_that_templates_write",
    ),
    "data.shuffle": (
        "the order of the documents",
        "data/test_order.py::test_seed_changes_the_order_and_no_shuffle_keeps_the_files",
    ),
    "data.max_length": ("how long a document may be", "data/test_documents.py::test_long_documents_truncated"),
    "data.long_documents": ("what becomes of longer ones", "data/test_documents.py::test_long_documents_dropped"),
    "data.bad_rows": (
        "whether bad rows end a run or are left out",
        "data/test_bad_rows.py::test_a_bad_row_is_an_error_that_names_the_key_or_is_left_out",
    ),
    "data.image_pixels": (
        "how many pixels of an image, and so tokens, a model sees",
        "data/test_images.py::test_image_pixels_are_the_processors_limits",
    ),
    "data.video": (
        "which frames of a video a model sees, and how large",
        "data/test_videos.py::test_data_video_says_which_frames_and_how_large",
    ),
    "data.check_images": (
        "whether damaged images are found before training",
        "data/test_images.py::test_check_images_decodes_before_training",
    ),
    "data.max_image_pixels": ("how large an image may be", "data/test_images.py::test_max_image_pixels_is_the_limit"),
    "data.fetch_images": ("whether URLs are images", "data/test_images.py::test_fetch_images_fetches_them_once"),
    "data.max_row_bytes": ("how large a row may be", "hostile/test_data.py::test_max_row_bytes_is_the_limit"),
    "data.workers": (
        "how many processes tokenise",
        "data/test_tokenise.py::test_processes_give_what_one_process_gives",
    ),
    "data.cache": ("where tokens are kept", "data/test_tokenise.py::test_what_is_kept_is_not_tokenised_again"),
    "mesh.dp_replicate": (
        "copies of the sharded model",
        "engine/test_engine.py::test_hsdp_shards_within_a_replica_and_copies_over_replicas",
    ),
    "mesh.dp_shard": (
        "shards of parameters, gradients and optimizer state",
        "engine/test_engine.py::test_uneven_shards_add_up",
    ),
    "mesh.cp": (
        "ranks over which long documents are cut",
        "parallel/test_context_parallel.py::test_steps_are_those_of_plain_transformers",
    ),
    "mesh.ulysses": (
        "of these, those that exchange heads",
        "parallel/test_context_parallel.py::test_bytes_that_travel_are_those_of_the_formula",
    ),
    "mesh.tp": (
        "ranks that divide each layer",
        "parallel/test_tensor_parallel.py::test_steps_are_those_of_plain_transformers",
    ),
    "mesh.ep": (
        "ranks that share the experts of a layer",
        "parallel/test_expert_parallel.py::test_a_rank_holds_its_experts_and_shards_them_over_those_that_hold_the_same",
    ),
    "mesh.pp": (
        "stages of layers, each on ranks of its own",
        "parallel/test_pipeline.py::test_a_rank_reads_and_holds_its_stage_alone",
    ),
    "mesh.pp_schedule": (
        "how many micro-batches a stage keeps at once",
        "parallel/test_pipeline.py::test_the_schedule_says_how_many_rows_are_kept",
    ),
    "mesh.pp_stages_per_rank": (
        "stages of layers on each rank",
        "parallel/test_pipeline_schedules.py::test_a_rank_has_the_layers_of_its_stages",
    ),
    "fsdp.param_dtype": ("dtype of compute", "engine/test_precision.py::test_every_dtype_is_the_configs"),
    "fsdp.loss_scale": ("the first loss scale of fp16", "engine/test_fp16.py::test_an_overflow_halves_the_scale"),
    "fsdp.loss_scale_interval": (
        "when the loss scale is doubled",
        "engine/test_fp16.py::test_the_scale_grows_after_good_steps",
    ),
    "fsdp.reduce_dtype": (
        "dtype of the gradient reduction",
        "engine/test_precision.py::test_every_dtype_is_the_configs",
    ),
    "fsdp.master_dtype": (
        "dtype of the stepped weights and optimizer state",
        "engine/test_precision.py::test_every_dtype_is_the_configs",
    ),
    "fsdp.wrap": ("which modules are gathered together", "parallel/test_fsdp_units.py::test_units"),
    "fsdp.overrides": (
        "over how many ranks single modules are sharded",
        "parallel/test_fsdp_overrides.py::test_where_parameters_lie",
    ),
    "fsdp.reshard_after_forward": (
        "when gathered parameters are freed",
        "engine/test_engine.py::test_what_stays_gathered_after_forward",
    ),
    "fsdp.prefetch": (
        "how many units are gathered ahead",
        "parallel/test_prefetch.py::test_units_are_gathered_ahead",
    ),
    "fsdp.cpu_offload": (
        "where parameters, gradients and optimizer state are kept; on a CPU, FSDP2's policy",
        "parallel/test_cpu_offload.py::test_every_unit_has_the_policy",
    ),
    "fsdp.cast_forward_inputs": (
        "dtype of the inputs of chosen modules",
        "parallel/test_cast_inputs.py::test_inputs_of_the_named_modules_are_cast",
    ),
    "fsdp.reduce": ("when gradients are reduced", "engine/test_engine.py::test_when_gradients_are_reduced"),
    "lora.rank": ("adapters instead of all weights, and their rank", "models/test_lora.py::test_parity"),
    "lora.alpha": ("the scale of adapters", "models/test_lora.py::test_parity"),
    "lora.rslora": ("the scale of adapters", "models/test_lora.py::test_parity"),
    "lora.dropout": (
        "dropout on inputs of adapters",
        "models/test_lora.py::test_dropout_is_seeded_and_for_training_only",
    ),
    "lora.targets": ("what is adapted", "models/test_lora.py::test_targets_by_pattern"),
    "lora.modules_to_save": ("what is trained whole", "models/test_lora.py::test_parity"),
    "lora.path": (
        "the adapter that is gone on with",
        "models/test_lora.py::test_a_bf16_base_under_fp32_adapters_is_within_pefts_own_noise",
    ),
    "step.documents": ("documents per optimizer step", "data/test_order.py::test_the_last_step_of_an_epoch_is_short"),
    "step.tokens": ("tokens per optimizer step", "data/test_order.py::test_tokens_by_hand"),
    "step.max_tokens_per_device": ("how a step is cut into micro-batches", "parity/test_parity.py::test_switches"),
    "step.padding": ("row lengths", "parity/test_parity.py::test_padded_shapes"),
    "optimizer.name": ("the update rule", "parity/test_parity.py::test_optimizers"),
    "optimizer.lr": ("the size of updates", "engine/test_schedule.py::test_constant_warms_up_and_stays"),
    "optimizer.weight_decay": ("how far weights shrink in a step", "engine/test_optimizer.py::test_adamw_by_hand"),
    "optimizer.betas": ("AdamW's averages", "engine/test_optimizer.py::test_adamw_by_hand"),
    "optimizer.eps": ("AdamW's denominator", "engine/test_optimizer.py::test_adamw_eps_is_outside_the_root"),
    "optimizer.momentum": ("SGD's velocity", "engine/test_optimizer.py::test_sgd_with_momentum_by_hand"),
    "optimizer.options": (
        "arguments of an optimizer by import path",
        "engine/test_optimizer_by_import_path.py::test_steps_are_those_of_the_whole",
    ),
    "optimizer.groups": (
        "learning rate and decay of chosen parameters",
        "engine/test_optimizer_groups.py::test_they_train_as_in_a_plain_loop_with_the_same_groups",
    ),
    "optimizer.state_dtype": (
        "dtype of the optimizer's state",
        "engine/test_dtypes.py::test_state_has_its_dtype_and_size",
    ),
    "optimizer.load_state": (
        "whether the optimizer begins with the state in that directory",
        "checkpoint/test_dcp.py::test_another_mesh_goes_on_as_torch_would",
    ),
    "optimizer.max_grad_norm": (
        "the norm to which gradients are clipped",
        "engine/test_optimizer.py::test_clip_by_hand",
    ),
    "optimizer.ema_decay": (
        "whether an average of the weights is kept",
        "engine/test_ema.py::test_after_steps_of_a_model",
    ),
    "schedule.name": ("the learning rate after warm-up", "engine/test_schedule.py::test_shape"),
    "schedule.warmup_ratio": ("warm-up steps", "engine/test_schedule.py::test_warmup_steps"),
    "schedule.warmup_steps": ("warm-up steps", "engine/test_schedule.py::test_warmup_steps"),
    "schedule.min_lr_ratio": ("the last learning rate", "engine/test_schedule.py::test_linear"),
    "schedule.decay_ratio": ("when wsd's decay begins", "engine/test_schedule.py::test_wsd_decays_in_its_last_share"),
    "schedule.decay": ("the shape of wsd's decay", "engine/test_schedule.py::test_wsd_decays_in_its_last_share"),
    "schedule.cycles": ("how often the rate falls", "engine/test_schedule.py::test_restarts_are_those_of_transformers"),
    "schedule.power": ("the shape of a polynomial", "engine/test_schedule.py::test_rates_are_those_of_transformers"),
    "schedule.timescale": (
        "how fast inverse_sqrt falls",
        "engine/test_schedule.py::test_rates_are_those_of_transformers",
    ),
    "train.steps": (
        "the number of optimizer steps",
        "recipes/test_sft.py::test_steps_end_a_run_and_without_a_name_it_gets_one",
    ),
    "train.epochs": ("the number of passes", "data/test_order.py::test_every_document_once_in_each_epoch"),
    "train.seed": (
        "the order, and random weights",
        "data/test_order.py::test_seed_changes_the_order_and_no_shuffle_keeps_the_files",
    ),
    "train.timeout": (
        "how long a collective waits",
        "recipes/test_sft.py::test_a_rank_that_stops_ends_the_run_after_the_timeout",
    ),
    "train.loss": (
        "what is trained",
        "engine/test_loss_by_import_path.py::test_an_objective_of_ones_own_is_trained",
    ),
    "train.neftune_noise_alpha": (
        "noise on embeddings",
        "models/test_neftune.py::test_gradients_are_those_of_transformers_with_the_same_noise",
    ),
    "train.log_every": ("which steps have a line", "observe/test_progress.py::test_every_so_many_steps"),
    "train.max_nonfinite": (
        "when non-finite steps end the run",
        "recipes/test_sft.py::test_steps_that_are_not_finite_are_skipped_and_end_a_run_when_they_repeat",
    ),
    "train.deterministic": (
        "torch.use_deterministic_algorithms",
        "engine/test_engine.py::test_deterministic_sets_torchs_flag_and_the_next_engine_its_own",
    ),
    "checkpoint.every": (
        "which steps are saved",
        "checkpoint/test_checkpoint.py::test_trainer_state_none_and_another_dtype",
    ),
    "checkpoint.every_minutes": (
        "when else a step is saved",
        "checkpoint/test_checkpoint.py::test_a_checkpoint_is_due_by_the_clock",
    ),
    "checkpoint.keep": ("which older ones stay", "checkpoint/test_checkpoint.py::test_keep_and_keep_every"),
    "checkpoint.keep_every": ("which of them stay for good", "checkpoint/test_checkpoint.py::test_keep_and_keep_every"),
    "checkpoint.dtype": (
        "dtype of saved weights",
        "checkpoint/test_checkpoint.py::test_trainer_state_none_and_another_dtype",
    ),
    "checkpoint.weights": (
        "whether a checkpoint's directory holds the average",
        "engine/test_ema.py::test_the_directory_holds_the_average_and_the_raw_weights_of_what_is_frozen",
    ),
    "checkpoint.trainer_state": (
        "what can be resumed",
        "checkpoint/test_checkpoint.py::test_trainer_state_of_the_last_only",
    ),
    "checkpoint.async": (
        "whether training waits for the disk",
        "checkpoint/test_checkpoint.py::test_an_asynchronous_save_holds_what_stood_when_it_began",
    ),
    "checkpoint.verify": (
        "what is compared before a checkpoint gets its name",
        "checkpoint/test_files_of_several_ranks.py::test_what_is_lost_is_found_and_not_committed",
    ),
    "checkpoint.keep_best": (
        "which checkpoint is kept besides",
        "recipes/test_eval.py::test_a_run_without_improvement_ends_and_keeps_its_best",
    ),
    "checkpoint.push": (
        "where on the hub the run's model is uploaded to",
        "checkpoint/test_push.py::test_the_last_checkpoint_at_the_end",
    ),
    "checkpoint.push_at": (
        "whether checkpoints are uploaded while training goes on",
        "checkpoint/test_push.py::test_after_each_save_while_training_goes_on_and_checkpoints_are_removed",
    ),
    "checkpoint.push_private": (
        "whether the repository is made private",
        "checkpoint/test_push.py::test_the_last_checkpoint_at_the_end",
    ),
    "checkpoint.push_revision": (
        "which branch is uploaded to",
        "checkpoint/test_push.py::test_an_upload_that_fails_is_said_and_the_run_goes_on",
    ),
    "eval.path": (
        "which documents are evaluated",
        "recipes/test_eval.py::test_training_does_not_notice_an_evaluation_and_a_resumed_run_finds_the_same",
    ),
    "eval.sources": (
        "which documents are evaluated, and reported apart",
        "recipes/test_eval.py::test_what_a_run_says_of_its_evaluations",
    ),
    "eval.share": (
        "what is not trained on, and evaluated",
        "data/test_sources.py::test_a_share_of_the_training_data_is_held_out",
    ),
    "eval.every": ("after which steps", "recipes/test_eval.py::test_what_a_run_says_of_its_evaluations"),
    "eval.at_start": (
        "the line of step 0",
        "recipes/test_eval.py::test_training_does_not_notice_an_evaluation_and_a_resumed_run_finds_the_same",
    ),
    "eval.metric": ("which figure decides", "recipes/test_eval.py::test_what_a_run_says_of_its_evaluations"),
    "eval.patience": (
        "when a run ends early",
        "recipes/test_eval.py::test_a_run_without_improvement_ends_and_keeps_its_best",
    ),
    "eval.min_delta": ("what counts as improved", "recipes/test_eval.py::test_small_improvements_add_up"),
    "eval.target": ("when a run ends early", "recipes/test_eval.py::test_a_run_ends_where_its_target_is_reached"),
    "eval.prompts": ("what is answered", "recipes/test_eval.py::test_what_a_run_says_of_its_evaluations"),
    "eval.max_new_tokens": (
        "how long answers may be",
        "recipes/test_eval.py::test_training_does_not_notice_an_evaluation_and_a_resumed_run_finds_the_same",
    ),
    "eval.temperature": (
        "whether tokens are drawn",
        "inference/test_embedded.py::test_answers_are_those_of_a_plain_model",
    ),
    "track.report_to": (
        "which trackers get the metrics",
        "observe/test_trackers.py::test_a_tracker_gets_config_names_steps_and_the_end",
    ),
    "track.project": (
        "the project that trackers file the run under",
        "observe/test_trackers.py::test_a_tracker_gets_config_names_steps_and_the_end",
    ),
    "track.name": (
        "the name of the run in trackers",
        "observe/test_trackers.py::test_a_tracker_gets_config_names_steps_and_the_end",
    ),
    "track.timing": (
        "whether lines have the seconds by phase",
        "observe/test_observing.py::test_timing_and_samples_of_the_machine_can_be_switched_off",
    ),
    "track.system": (
        "whether the machine is sampled",
        "observe/test_observing.py::test_timing_and_samples_of_the_machine_can_be_switched_off",
    ),
    "track.system_seconds": (
        "how often the machine is sampled",
        "observe/test_observing.py::test_the_machine_is_sampled_for_the_trackers_too",
    ),
    "profile.steps": ("which steps are traced", "launch/test_timing.py::test_a_trace_holds_the_phases"),
    "profile.ranks": ("which ranks write traces", "launch/test_timing.py::test_a_trace_holds_the_phases"),
    "profile.memory": ("whether allocations are in the trace", "launch/test_timing.py::test_a_trace_holds_the_phases"),
    "run.dir": ("where the run writes", "recipes/test_sft.py::test_the_resolved_config_runs_again"),
    "run.staging": (
        "where on this machine a run on an object store has its folder",
        "checkpoint/test_object_stores.py::test_a_run_on_a_store_that_is_killed_in_an_upload_goes_on_elsewhere_bit_for_bit",
    ),
    "run.overwrite": ("whether an earlier run is removed", "cli/test_api.py::test_a_start_that_failed_leaves_no_run"),
}


def test_every_key_has_its_line() -> None:
    assert list(EFFECTS) == list(schema_keys(SftConfig))


@pytest.mark.parametrize("key", EFFECTS)
def test_the_test_that_shows_it_exists(key: str) -> None:
    effect, shown_by = EFFECTS[key]
    file, _, name = shown_by.partition("::")
    assert effect and f"def {name}(" in (TESTS / file).read_text()
