"""Mutants of data: order, limits, what is trained."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant("data/order.py", "SourceShare.in_epoch", "self.weight * self.documents + 0.5", "self.weight * self.documents", "tests/data/test_order.py"),
    Mutant("data/order.py", "SourceShare.chosen", "(epoch - 1) * self.in_epoch", "0", "tests/data/test_order.py"),
    Mutant("data/order.py", "SourceShare.chosen", "f'{seed}:{source}:{number}'", "f'{seed}:{number}'", "tests/data/test_order.py"),
    Mutant("data/order.py", "SourceShare.chosen", "sorted(out) if shuffle else out", "out", "tests/data/test_order.py"),
    Mutant("data/order.py", "epoch_order", "f'{seed}:{epoch}'", "f'{seed}'", "tests/data/test_order.py"),
    Mutant("data/order.py", "StepSampler.cut_epoch", "tokens + self._lengths[i] > self._tokens", "tokens + self._lengths[i] >= self._tokens", "tests/data/test_order.py"),
    Mutant("data/order.py", "StepSampler.cut_epoch", "step, tokens = [], 0", "step = []", "tests/data/test_order.py"),
    Mutant("data/order.py", "order_of", "begin += share.documents", "begin += share.in_epoch", "tests/data/test_order.py"),
    Mutant("data/order.py", "StepSampler.starting_at", "number <= first + i <= self.total", "number <= first + i", "tests/data/test_order.py"),
    Mutant("data/order.py", "StepSampler._count", "-(-self._in_epoch // self._documents)", "self._in_epoch // self._documents", "tests/data/test_order.py"),
    Mutant("data/limits.py", "Limits.select", "table.lengths <= self.max_length", "table.lengths < self.max_length", "tests/data/test_documents.py tests/data/test_errors_in_data.py tests/data/test_sources.py"),
    Mutant("data/limits.py", "TableSelection.losses", "int(self.lengths[place])", "int(self.lengths[place]) + 1", "tests/data/test_documents.py tests/data/test_steps_from_lengths.py"),
    Mutant("data/limits.py", "_check_ids", "table.largest < vocab_size", "table.largest <= vocab_size", "tests/data/test_errors_in_data.py tests/data/test_documents.py"),
    Mutant("data/limits.py", "Limits._refuse_long", "table.lengths > self.max_length", "table.lengths >= self.max_length", "tests/data/test_errors_in_data.py tests/data/test_documents.py"),
    Mutant("data/table.py", "TokenTable.losses_of", "self.tokens(index, length)[1][1:]", "self.tokens(index, length)[1]", "tests/data/test_documents.py tests/data/test_steps_from_lengths.py tests/data/test_errors_in_data.py"),
    Mutant("data/table.py", "Chunk.from_records", "sum(map(bool, item.trained[1:]))", "sum(map(bool, item.trained))", "tests/data/test_documents.py tests/data/test_steps_from_lengths.py tests/data/test_errors_in_data.py"),
    Mutant("data/table.py", "TokenTable.first_with", "np.searchsorted(self.ends, place, side='right')", "np.searchsorted(self.ends, place, side='left')", "tests/data/test_errors_in_data.py tests/data/test_documents.py"),
    Mutant("data/encode.py", "_ended", "ids[-1:] == [eos]", "eos in ids", "tests/data/test_documents.py tests/data/test_masks.py"),
    Mutant("data/encode.py", "_ended", "[*ids, eos]", "ids", "tests/data/test_documents.py tests/data/test_masks.py"),
    Mutant("data/encode.py", "_trained_tokens", "behind += 1", "pass", "tests/data/test_masks.py tests/data/test_tokenise.py"),
    Mutant("data/encode.py", "_trained_tokens", "behind = len(mask)", "behind = len(mask) - 1", "tests/data/test_masks.py"),
    Mutant("data/encode.py", "Encoder.encode_prompts", "self.encoding.train_on == 'all'", "self.encoding.train_on != 'all'", "tests/data/test_masks.py tests/data/test_documents.py"),
    Mutant("data/encode.py", "Encoder.beginnings", "ids if ids[:n] == self._prefix else self._prefix + ids", "self._prefix + ids", "tests/data/test_masks.py tests/data/test_documents.py"),
    Mutant("data/conversation.py", "_trained", "i >= first", "True", "tests/data/test_masks.py tests/data/test_documents.py"),
    Mutant("data/conversation.py", "_trained", "answers[-1:]", "answers[:1]", "tests/data/test_masks.py"),
    Mutant("data/conversation.py", "_trained", "messages[i].get('train') is not False", "messages[i].get('train') is True", "tests/data/test_masks.py"),
    Mutant("data/loss_mask.py", "AssistantMasks._answer", "start += len(header)", "pass", "tests/data/test_masks.py tests/data/test_masks_of_templates.py"),
    Mutant("data/loss_mask.py", "AssistantMasks._answer", "end + len(follower)", "end", "tests/data/test_masks.py tests/data/test_masks_of_templates.py"),
    Mutant("data/documents.py", "Documents._locate", "np.searchsorted(self._ends, index, side='right')", "np.searchsorted(self._ends, index, side='left')", "tests/data/test_documents.py tests/data/test_sources.py"),
    Mutant("data/records.py", "with_system", 'messages[0].get("role") == "system"', "False", "tests/data/test_errors_in_data.py tests/data/test_documents.py"),
)  # fmt: skip
