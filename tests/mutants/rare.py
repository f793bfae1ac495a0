"""Mutants of rare branches, which the tests of their files once let through."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_CONTEXT = "tests/parallel/test_context_parallel.py"

MUTANTS = (
    Mutant("parallel/tp/plan.py", "_norm_specs", "TPSpec(0, (DimSegment(count, 1, heads=True, repeat=part.repeat),))", "TPSpec()", "tests/parallel/test_tensor_parallel.py::test_norms_with_a_weight_for_each_head_are_divided_with_their_heads"),
    Mutant("ops/context.py", "attend_in_context", "last_seen[own:] - own", "last_seen[own:]", f"{_CONTEXT}::test_images_behind_a_cut_document_see_no_later_tokens"),
    Mutant("engine/batch/rows.py", "local_last_seen", "last_seen_T[kept_M]", "last_seen_T[: len(kept_M)]", f"{_CONTEXT}::test_the_last_token_that_an_image_shows_is_one_of_this_ranks_row"),
    Mutant("parallel/cp/split.py", "_assign_short", "_taken(cut, lengths, rooms)", "_taken(cut, lengths, lengths)", f"{_CONTEXT}::test_images_of_a_cut_document_take_room_on_its_ranks"),
    Mutant("engine/batch/assigned_images.py", "plan_exchange", "(first[s.index][_between(s, axis.rank, to)] for s in rising)", "(first[s.index][_between(s, axis.rank, to)] for s in rising[::-1])", f"{_CONTEXT}::test_features_of_several_documents_reach_the_tokens_of_their_images"),
    Mutant("engine/batch/assigned_images.py", "plan_exchange", "(_keys(s, _between(s, of, axis.rank)) for s in rising)", "(_keys(s, _between(s, of, axis.rank)) for s in rising[::-1])", f"{_CONTEXT}::test_features_of_several_documents_reach_the_tokens_of_their_images"),
    Mutant("ops/per_document.py", "block_spans", "earlier_keys + end", "earlier_keys + queries", "tests/ops/test_attention.py::test_blocks_of_queries_see_no_later_keys"),
    Mutant("ops/per_document.py", "block_spans", "before + first - call.window + 1", "before + first - call.window + 2", "tests/ops/test_attention.py::test_blocks_of_queries_see_no_later_keys"),
    Mutant("engine/executor.py", "Executor.balance_loss", "balance_sum * (factors.balance / self.mesh.tp_size) * factors.scale", "balance_sum * (factors.balance / self.mesh.tp_size)", "tests/engine/test_fp16.py::test_the_balancing_loss_of_experts_is_scaled"),
    Mutant("engine/executor.py", "Executor.read", "row.real_tokens if row.real_K is None else row.real_K", "row.real_tokens if row.real_K is None else row.input_ids_BT.numel()", "tests/engine/test_router_bias.py::test_padding_between_documents_is_no_choice_of_experts"),
    Mutant("ops/head.py", "_Running.joined", "largest is not None", "False", "tests/ops/test_head.py::test_readouts_of_a_divided_vocabulary"),
    Mutant("ops/head.py", "_Running.joined", "largest is not None", "largest is None", "tests/recipes/test_eval.py::test_the_held_out_loss_is_the_references_token_mean"),
    Mutant("ops/head.py", "may_anticipate", "dtype != torch.float16", "True", "tests/ops/test_head.py::test_in_fp16_gradients_are_of_the_scaled_loss"),
    Mutant("ops/head.py", "WideSum.__init__", "torch.zeros_like(out, dtype=wide)", "torch.zeros_like(out)", "tests/ops/test_head.py::test_the_weights_gradient_is_summed_in_fp32"),
    Mutant("engine/replicas.py", "_number", "[*(v for v in values if v.numel() >= 65536), ...]", "[...]", "tests/engine/test_replicas.py::test_one_bit_of_a_tensor_of_any_size_is_seen"),
    Mutant("engine/batch/rows.py", "Row.to", "replace(..., context=self.bounds.context)", "replace(...)", "tests/engine/test_row.py::test_what_a_row_shares_goes_with_it_to_a_device"),
    Mutant("models/vision.py", "Vision.patches", "[height * width for grid in grids for time, height, width in grid for _ in range(time)]", "[time * height * width for grid in grids for time, height, width in grid]", "tests/data/test_videos.py::test_frames_of_a_video_are_attended_to_apart"),
    Mutant("inference/weight_sync/checksums.py", "checksum", "min(number * _BLOCK, rows)", "number * _BLOCK", "tests/inference/test_weight_sync_errors.py::test_a_checksum_is_what_it_is_described_as"),
    Mutant("parallel/shards/dcp.py", "DcpDirectory._file", "os.close(self._files.pop(next(iter(self._files))))", "self._files.pop(next(iter(self._files)))", "tests/hostile/test_dcp.py::test_more_files_than_a_process_may_open"),
    Mutant("recipes/plan/memory.py", "_lingering", 'model.config.fsdp.reduce == "last"', "False", "tests/recipes/test_plan.py::test_gradients_of_the_root_linger_where_another_micro_batch_follows"),
    Mutant("checkpoint/remote/mirror.py", "Mirror._round", "step == best", "False", "tests/checkpoint/test_object_stores.py::test_the_best_checkpoint_is_uploaded_though_newer_ones_wait"),
    Mutant("checkpoint/remote/mirror.py", "Mirror._send_records", "self._sent.get(name) != (stat.st_size, stat.st_mtime_ns)", "self._sent.get(name, (0, 0))[0] != stat.st_size", "tests/checkpoint/test_object_stores.py::test_a_file_that_changes_within_its_size_is_uploaded_again"),
)  # fmt: skip
