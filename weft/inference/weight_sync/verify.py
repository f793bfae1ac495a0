"""Verification that an engine has received and uses the weights that were sent to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.inference.weight_sync.protocol import SyncError


def compare(
    version: int, receiver: str, sent: Mapping[str, int], received: Mapping[str, int], placed: Mapping[str, int] | None
) -> None:
    """Compare checksums by tensor: of the sent bytes, of those that the engine received, and of its weights afterwards
    (placed; None if it cannot read them back). SyncError names the engine and the tensors that differ or are missing.
    receiver: the engine's name."""
    reports = {"received": received} if placed is None else {"received": received, "placed": placed}
    for verb, sums in reports.items():
        lacking = [name for name in sent if name not in sums]
        if lacking:
            raise SyncError(
                f"{receiver} did not report checksums of {_first_names(lacking)} that it {verb}, version {version}, "
                "so the sync cannot be verified"
            )
    wrong = [name for name, value in sent.items() if received[name] != value]
    if wrong:
        raise SyncError(
            f"{receiver} received bytes that differ from the sent bytes, version {version}: {_first_names(wrong)}"
        )
    wrong = [name for name, value in sent.items() if placed is not None and placed[name] != value]
    if wrong:
        raise SyncError(
            f"{receiver} holds values that differ from the sent values, version {version}: {_first_names(wrong)}"
        )


def _first_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + suffix


Floats = NDArray[np.float32]
# Tolerance on the mean difference by dtype. Measured with the right weights: 1.5e-6 in fp32 and 0.02 in bf16.
PARITY = {"fp32": 1e-3, "bf16": 0.2, "fp16": 0.05}


def check_parity(
    receiver: str, version: int, engine: Sequence[Floats], trainer: Sequence[Floats], dtypes: Sequence[str]
) -> float:
    """The mean absolute difference between the engine's and the trainer's logprobs of the same tokens.

    engine, trainer: per completion, [G] logprobs of logits / temperature. dtypes: of both, such as "bf16"; they
    determine the tolerance. SyncError if the mean exceeds the tolerance or is not finite: the engine then samples from
    another model, or after another prompt.
    """
    empty = np.zeros(0)
    expected, sampled = (np.concatenate([empty, *parts]).astype(np.float64) for parts in (trainer, engine))
    if expected.shape != sampled.shape:
        raise SyncError(f"{receiver} returned {sampled.size} logprobs for {expected.size} tokens, version {version}")
    if not expected.size:
        return 0.0
    limit = max(PARITY[dtype] for dtype in dtypes)
    distance = np.abs(expected - sampled)
    mean = float(distance.mean())
    if not mean <= limit:
        worst = int(np.nanargmax(np.where(np.isfinite(distance), distance, np.inf)))
        raise SyncError(
            f"{receiver} samples from another distribution than the trainer trains, version {version}: logprobs of "
            f"{expected.size} tokens differ by {mean:.2g} on average, but rounding in "
            f"{'/'.join(dict.fromkeys(dtypes))} explains at most {limit:g}. The largest difference: "
            f"{sampled[worst]:.4g} in the engine, {expected[worst]:.4g} in the trainer"
        )
    return mean
