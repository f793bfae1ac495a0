"""Mutants of data: order, limits, what is trained."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant("data/order.py", "SourceShare.in_epoch", "self.weight * self.documents + 0.5", "self.weight * self.documents", "tests/test_order.py"),
    Mutant("data/order.py", "SourceShare.chosen", "(epoch - 1) * self.in_epoch", "0", "tests/test_order.py"),
    Mutant("data/order.py", "SourceShare.chosen", "f'{seed}:{source}:{number}'", "f'{seed}:{number}'", "tests/test_order.py"),
    Mutant("data/order.py", "SourceShare.chosen", "sorted(out) if shuffle else out", "out", "tests/test_order.py"),
    Mutant("data/order.py", "epoch_order", "f'{seed}:{epoch}'", "f'{seed}'", "tests/test_order.py"),
    Mutant("data/order.py", "StepSampler.cut_epoch", "tokens + self._lengths[i] > self._tokens", "tokens + self._lengths[i] >= self._tokens", "tests/test_order.py"),
    Mutant("data/order.py", "StepSampler.cut_epoch", "step, tokens = [], 0", "step = []", "tests/test_order.py"),
    Mutant("data/order.py", "order_of", "begin += share.documents", "begin += share.in_epoch", "tests/test_order.py"),
    Mutant("data/order.py", "StepSampler.starting_at", "number <= first + i <= self.total", "number <= first + i", "tests/test_order.py"),
    Mutant("data/order.py", "StepSampler._count", "-(-self._in_epoch // self._documents)", "self._in_epoch // self._documents", "tests/test_order.py"),
    Mutant("data/limits.py", "Limits.select", "table.lengths <= self.max_length", "table.lengths < self.max_length", "tests/test_data.py tests/test_bad_data.py tests/test_sources.py"),
    Mutant("data/limits.py", "TableSelection.losses", "int(self.lengths[place])", "int(self.lengths[place]) + 1", "tests/test_data.py tests/test_ahead.py"),
    Mutant("data/limits.py", "_check_ids", "table.largest < vocab_size", "table.largest <= vocab_size", "tests/test_bad_data.py tests/test_data.py"),
    Mutant("data/limits.py", "Limits._refuse_long", "table.lengths > self.max_length", "table.lengths >= self.max_length", "tests/test_bad_data.py tests/test_data.py"),
    Mutant("data/table.py", "TokenTable.losses_of", "self.tokens(index, length)[1][1:]", "self.tokens(index, length)[1]", "tests/test_data.py tests/test_ahead.py tests/test_bad_data.py"),
    Mutant("data/table.py", "Chunk.of", "sum(item.trained[1:])", "sum(item.trained)", "tests/test_data.py tests/test_ahead.py tests/test_bad_data.py"),
    Mutant("data/table.py", "TokenTable.first_with", "np.searchsorted(self.ends, place, side='right')", "np.searchsorted(self.ends, place, side='left')", "tests/test_bad_data.py tests/test_data.py"),
    Mutant("data/encode.py", "_ended", "ids[-1:] == [eos]", "eos in ids", "tests/test_data.py tests/test_masks.py"),
    Mutant("data/encode.py", "_ended", "[*ids, eos]", "ids", "tests/test_data.py tests/test_masks.py"),
    Mutant("data/encode.py", "_trained_tokens", "behind += 1", "pass", "tests/test_masks.py tests/test_tokenise.py"),
    Mutant("data/encode.py", "_trained_tokens", "behind = len(mask)", "behind = len(mask) - 1", "tests/test_masks.py"),
    Mutant("data/encode.py", "Encoder.encode_prompts", "self.encoding.train_on == 'all'", "self.encoding.train_on != 'all'", "tests/test_masks.py tests/test_data.py"),
    Mutant("data/encode.py", "Encoder.beginnings", "ids if ids[:n] == self._prefix else self._prefix + ids", "self._prefix + ids", "tests/test_masks.py tests/test_data.py"),
    Mutant("data/conversation.py", "_trained", "i >= first", "True", "tests/test_masks.py tests/test_data.py"),
    Mutant("data/conversation.py", "_trained", "answers[-1:]", "answers[:1]", "tests/test_masks.py"),
    Mutant("data/conversation.py", "_trained", "messages[i].get('train') is not False", "messages[i].get('train') is True", "tests/test_masks.py"),
    Mutant("data/loss_mask.py", "AssistantMasks._answer", "start += len(header)", "pass", "tests/test_masks.py tests/test_masks_templates.py"),
    Mutant("data/loss_mask.py", "AssistantMasks._answer", "end + len(follower)", "end", "tests/test_masks.py tests/test_masks_templates.py"),
    Mutant("data/documents.py", "Documents._place", "np.searchsorted(self._ends, index, side='right')", "np.searchsorted(self._ends, index, side='left')", "tests/test_data.py tests/test_sources.py"),
    Mutant("data/records.py", "with_system", 'messages[0].get("role") == "system"', "False", "tests/test_bad_data.py tests/test_data.py"),
)  # fmt: skip
