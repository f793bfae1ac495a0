"""A JSONL file -> Documents: which tokens are trained, what happens to long ones, and a report of what was read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from weft.data.records import Record, read_records
from weft.data.tokenizer import Encoded, Encoder
from weft.engine.document import Document
from weft.errors import UserError
from weft.observe import flight

LongDocuments = Literal["error", "truncate", "drop"]

_BATCH = 1000  # records tokenised at once: enough to keep a fast tokenizer busy, few enough to keep memory flat


@dataclass(frozen=True, slots=True)
class DataReport:
    """What a data file gave. Counts are of documents or tokens; longest is in tokens, after truncation.

    digest: hexadecimal, of all tokens and loss weights in their order.
    """

    path: str
    documents: int
    tokens: int
    loss_tokens: int
    longest: int
    digest: str
    dropped: int = 0
    truncated: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.path}: {self.documents:,} documents, {self.tokens:,} tokens, of which {self.loss_tokens:,} trained"
            f"; the longest has {self.longest:,}"
        )
        for count, what in ((self.dropped, "dropped"), (self.truncated, "truncated")):
            text += f"; {count:,} longer documents {what}" if count else ""
        return text


def fingerprint(documents: Sequence[Document]) -> str:
    """16 hexadecimal digits of all tokens and loss weights, in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(b"%d," % len(document))
        digest.update(document.tokens.numpy())
        digest.update(document.weights.numpy())
    return digest.hexdigest()


def load_documents(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    long_documents: LongDocuments = "error",
    max_length_key: str = "data.max_length",
    vocab_size: int | None = None,
) -> tuple[list[Document], DataReport]:
    """Reads, checks and tokenises a JSONL file.

    A `messages` document trains exactly the tokens inside its chat template's generation markers; `prompt` and
    `completion` the completion and the end-of-text token; `text` everything. weights[i] is 1.0 where token i is
    trained as a target, else 0.0. Documents keep the order of the file.

    max_length: longest document in tokens; max_length_key: the config key it came from, for messages. long_documents:
    whether longer ones are an error, lose their end, or are left out. vocab_size: where given, ids must be below it.

    Raises UserError with file and line for whatever the user has to mend in the data.
    """
    records = read_records(path)
    encoded = list(_encode(Encoder(tokenizer), records))
    _check_ids(records, encoded, vocab_size)
    _check_trained(records, encoded)
    long = {i for i, item in enumerate(encoded) if len(item.ids) > max_length}
    if long and long_documents == "error":
        raise UserError(_too_long(records, encoded, long, max_length, max_length_key))
    if long_documents == "truncate":
        encoded = [Encoded(item.ids[:max_length], item.trained[:max_length]) for item in encoded]
        _check_truncated(records, encoded, long, max_length_key)
    kept = [i for i in range(len(records)) if long_documents != "drop" or i not in long]
    if not kept:
        raise UserError(
            f"{path}: data.long_documents: drop leaves no document: all {len(records)} are longer than {max_length} "
            f"tokens ({max_length_key}). Raise {max_length_key}, or set data.long_documents: truncate."
        )
    documents = [_document(records[i], encoded[i]) for i in kept]
    report = DataReport(
        path=path,
        documents=len(documents),
        tokens=sum(len(encoded[i].ids) for i in kept),
        loss_tokens=sum(sum(encoded[i].trained[1:]) for i in kept),
        longest=max(len(encoded[i].ids) for i in kept),
        digest=fingerprint(documents),
        dropped=len(records) - len(kept),
        truncated=len(long) if long_documents == "truncate" else 0,
    )
    return documents, report


def _encode(encoder: Encoder, records: Sequence[Record]) -> Iterator[Encoded]:
    for start in range(0, len(records), _BATCH):
        flight.beat()
        yield from encoder.encode(records[start : start + _BATCH])


def _document(record: Record, encoded: Encoded) -> Document:
    return Document(
        tokens=torch.tensor(encoded.ids, dtype=torch.int64),
        weights=torch.tensor(encoded.trained, dtype=torch.float32),
        source=record.where,
    )


def _check_ids(records: Sequence[Record], encoded: Sequence[Encoded], vocab_size: int | None) -> None:
    for record, item in zip(records, encoded, strict=True):
        if vocab_size is not None and item.ids and max(item.ids) >= vocab_size:
            raise UserError(
                f"{record.where}: the tokenizer gives id {max(item.ids)}, but the model's vocabulary has {vocab_size} "
                f"(ids 0 to {vocab_size - 1}). Tokenizer and model of model.path do not belong together: use the "
                "model's own tokenizer, or resize the model's embeddings."
            )


def _check_trained(records: Sequence[Record], encoded: Sequence[Encoded]) -> None:
    """The first token is predicted from nothing, so it does not count as trained."""
    empty = [record for record, item in zip(records, encoded, strict=True) if not any(item.trained[1:])]
    if not empty:
        return
    others = f" So it is with {len(empty) - 1:,} more, the last at {empty[-1].where}." if len(empty) > 1 else ""
    if empty[0].format == "messages":
        advice = "Give it a message of the assistant (what the chat template puts between its generation markers)"
    else:
        advice = "Give it more text"
    raise UserError(f"{empty[0].where}: no token of this document is trained.{others} {advice}, or remove the line.")


def _check_truncated(records: Sequence[Record], encoded: Sequence[Encoded], long: set[int], key: str) -> None:
    empty = [i for i in sorted(long) if not any(encoded[i].trained[1:])]
    if empty:
        length = len(encoded[empty[0]].ids)
        raise UserError(
            f"{records[empty[0]].where}: no trained token is left after truncation to {length} tokens "
            f"({len(empty):,} such documents). Raise {key}, or set data.long_documents: drop."
        )


def _too_long(records: Sequence[Record], encoded: Sequence[Encoded], long: set[int], max_length: int, key: str) -> str:
    longest = max(sorted(long), key=lambda i: len(encoded[i].ids))
    length = len(encoded[longest].ids)
    if key == "step.max_tokens_per_device":
        fix = f"Set step.max_tokens_per_device to at least {length} if memory allows"
    else:
        fix = f"Set {key} to at least {length} (step.max_tokens_per_device must be as large)"
    return (
        f"{records[longest].where}: {len(long):,} of {len(records):,} documents are longer than {max_length} tokens "
        f"({key}); this is the longest, with {length}. {fix}, or set data.long_documents to truncate or drop."
    )
