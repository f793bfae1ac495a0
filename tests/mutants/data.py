"""Mutants of data: order, limits, what is trained."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant("data/order.py", "Share.in_epoch", " + 0.5", "", "tests/test_order.py"),
    Mutant("data/order.py", "Share.chosen", "(epoch - 1) * self.in_epoch", "0", "tests/test_order.py"),
    Mutant("data/order.py", "Share.chosen", "{seed}:{source}:{number}", "{seed}:{number}", "tests/test_order.py"),
    Mutant("data/order.py", "Share.chosen", "sorted(out) if shuffle else out", "out", "tests/test_order.py"),
    Mutant("data/order.py", "epoch_order", "{seed}:{epoch}", "{seed}", "tests/test_order.py"),
    Mutant("data/order.py", "Steps._deal", "tokens + self._lengths[i] > self._tokens", "tokens + self._lengths[i] >= self._tokens", "tests/test_order.py"),
    Mutant("data/order.py", "Steps._deal", "step, tokens = [], 0", "step = []", "tests/test_order.py"),
    Mutant("data/order.py", "order_of", "begin += share.documents", "begin += share.in_epoch", "tests/test_order.py"),
    Mutant("data/order.py", "Steps.starting_at", "number <= first + i <= self.total", "number <= first + i", "tests/test_order.py"),
    Mutant("data/order.py", "Steps._count", "-(-self._in_epoch // self._documents)", "self._in_epoch // self._documents", "tests/test_order.py"),
    Mutant("data/limits.py", "Limits.piece", "table.lengths <= self.max_length", "table.lengths < self.max_length", "tests/test_data.py tests/test_bad_data.py tests/test_sources.py"),
    Mutant("data/limits.py", "Piece.losses", "int(self.lengths[place])", "int(self.lengths[place]) + 1", "tests/test_data.py tests/test_ahead.py"),
    Mutant("data/limits.py", "_check_ids", "table.largest < vocab_size", "table.largest <= vocab_size", "tests/test_bad_data.py tests/test_data.py"),
    Mutant("data/limits.py", "Limits._refuse_long", "table.lengths > self.max_length", "table.lengths >= self.max_length", "tests/test_bad_data.py tests/test_data.py"),
    Mutant("data/table.py", "Table.losses_of", "[1][1:]", "[1]", "tests/test_data.py tests/test_ahead.py tests/test_bad_data.py"),
    Mutant("data/table.py", "Chunk.of", "sum(item.trained[1:])", "sum(item.trained)", "tests/test_data.py tests/test_ahead.py tests/test_bad_data.py"),
    Mutant("data/table.py", "Table.first_with", 'side="right"', 'side="left"', "tests/test_bad_data.py tests/test_data.py"),
    Mutant("data/encode.py", "_ended", "ids[-1:] == [eos]", "eos in ids", "tests/test_data.py tests/test_masks.py"),
    Mutant("data/encode.py", "_ended", "[*ids, eos]", "ids", "tests/test_data.py tests/test_masks.py"),
    Mutant("data/encode.py", "_trained_tokens", "behind += 1", "pass", "tests/test_masks.py tests/test_tokenise.py"),
    Mutant("data/encode.py", "_trained_tokens", "behind = len(mask)", "behind = len(mask) - 1", "tests/test_masks.py"),
    Mutant("data/encode.py", "Encoder._prompts", '== "all"', '!= "all"', "tests/test_masks.py tests/test_data.py"),
    Mutant("data/encode.py", "Encoder.beginnings", "ids if ids[:n] == self._prefix else self._prefix + ids", "self._prefix + ids", "tests/test_masks.py tests/test_data.py"),
    Mutant("data/conversation.py", "_trained", "and i >= first]", "]", "tests/test_masks.py tests/test_data.py"),
    Mutant("data/conversation.py", "_trained", "answers[-1:] if", "answers[:1] if", "tests/test_masks.py"),
    Mutant("data/conversation.py", "_trained", 'is not False', "is True", "tests/test_masks.py"),
    Mutant("data/loss_mask.py", "AssistantMasks._answer", "start += len(header)", "pass", "tests/test_masks.py tests/test_masks_templates.py"),
    Mutant("data/loss_mask.py", "AssistantMasks._answer", "end + len(follower)", "end", "tests/test_masks.py tests/test_masks_templates.py"),
    Mutant("data/documents.py", "Documents._place", 'side="right"', 'side="left"', "tests/test_data.py tests/test_sources.py"),
    Mutant("data/records.py", "with_system", 'messages[0].get("role") == "system"', "False", "tests/test_bad_data.py tests/test_data.py"),
)  # fmt: skip
