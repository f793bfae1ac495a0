"""Mutants of checkpoints: writing, committing, retention, resuming, exporting."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant("checkpoint/retention.py", "superseded", "step % keep_every]", "True]", "tests/test_checkpoint.py"),
    Mutant("checkpoint/retention.py", "prune", "if step != best:", "if True:", "tests/test_checkpoint.py tests/test_eval.py"),
    Mutant("checkpoint/retention.py", "prune", "complete_steps(checkpoints)[:-1]", "complete_steps(checkpoints)", "tests/test_checkpoint.py"),
    Mutant("checkpoint/retention.py", "prune", "[:-1]:", "[:-1] if best is None else [s for s in complete_steps(checkpoints) if s != best]:", "tests/test_checkpoint.py tests/test_eval.py"),
    Mutant("checkpoint/retention.py", "_point", "os.replace(draft, link)", "(link.unlink(missing_ok=True), draft.rename(link))", "tests/test_checkpoint.py"),
    Mutant("checkpoint/retention.py", "commit", "    _sync(target.parent)\n", "", "tests/test_checkpoint.py"),
    Mutant("checkpoint/retention.py", "commit", "        _sync(path)\n", "        pass\n", "tests/test_checkpoint.py"),
    Mutant("checkpoint/retention.py", "commit", "os.rename(target, removing)", "shutil.rmtree(target)", "tests/test_checkpoint.py"),
    Mutant("checkpoint/retention.py", "set_aside", "step > after", "step >= after", "tests/test_checkpoint.py tests/test_resume.py"),
    Mutant("checkpoint/retention.py", "sweep", "if _LEFTOVER.fullmatch(leftover.name):", "if False:", "tests/test_checkpoint.py"),
    Mutant("sharding/ranges.py", "RangeWriter._whole_blocks", "-(-begin // BLOCK) * BLOCK", "begin // BLOCK * BLOCK", "tests/test_ranges.py"),
    Mutant("sharding/ranges.py", "RangeWriter._write", "view[first - begin : last - begin]", "view[: last - first]", "tests/test_ranges.py"),
    Mutant("sharding/ranges.py", "join_seams", "opened.fsync()", "pass", "tests/test_ranges.py tests/test_checkpoint.py"),
    Mutant("sharding/boxes.py", "overlap", "n > 0 for n in size", "n >= 0 for n in size", "tests/test_checkpoint.py tests/test_load.py tests/test_export.py"),
    Mutant("sharding/boxes.py", "Shard.is_mine", "index == number % size", "index == 0", "tests/test_checkpoint.py tests/test_load.py tests/test_export.py"),
    Mutant("checkpoint/save.py", "Saver.due", "step == steps or ", "", "tests/test_checkpoint.py tests/test_sft_run.py"),
    Mutant("checkpoint/save.py", "Saver._check", "(rank + (world + 1) // 2) % world", "rank", "tests/test_checkpoint.py tests/test_ranges.py"),
    Mutant("checkpoint/save.py", "Saver._commit", "if nonfinite:", "if False:", "tests/test_checkpoint.py"),
    Mutant("checkpoint/save.py", "Saver._commit", 'self._until(job, lambda: job.notes.all("done"))', "pass", "tests/test_checkpoint.py tests/test_ranges.py"),
    Mutant("checkpoint/state.py", "find_parts", "if name in persistent:", "if False:", "tests/test_checkpoint.py tests/test_resume.py"),
    Mutant("checkpoint/state.py", "find_parts", "isinstance(value, Tensor) and value.ndim", "isinstance(value, Tensor) and value.ndim > 1", "tests/test_checkpoint.py tests/test_resume.py"),
    Mutant("checkpoint/state.py", "check_file", "contents and sha256(path) != file.sha256", "False", "tests/test_checkpoint.py tests/test_resume.py"),
    Mutant("checkpoint/state.py", "load_state", "filled[name] != part.box.numel", "False", "tests/test_checkpoint.py tests/test_resume.py"),
    Mutant("checkpoint/state.py", "load_state", "engine.loss_scale.load_state_dict(state.content[\"loss_scale\"])", "pass", "tests/test_knobs_fp16.py tests/test_resume.py"),
    Mutant("checkpoint/resume.py", "newest", "reversed(steps)", "steps", "tests/test_resume.py tests/test_checkpoint.py"),
    Mutant("checkpoint/resume.py", "agree", "if text is not None), None)", "if False), None)", "tests/test_resume.py tests/test_checkpoint.py"),
    Mutant("checkpoint/resume.py", "_take_up_rng", "rng.restore(read_rng(state, ranks.rank), engine.device)", "pass", "tests/test_resume.py tests/test_lora.py"),
    Mutant("sharding/digests.py", "check_boxes", "!= digest.sha256", "== ''", "tests/test_checkpoint.py tests/test_ranges.py"),
    Mutant("checkpoint/export.py", "check_sizes", "size != layout.size", "False", "tests/test_export.py"),
    Mutant("checkpoint/export.py", "_slices", "min(rows, box.size[0] - first)", "rows", "tests/test_export.py tests/test_checkpoint.py"),
    Mutant("checkpoint/export.py", "_most_common_dtype", "+= tensor.numel()", "+= 1", "tests/test_export.py"),
)  # fmt: skip
