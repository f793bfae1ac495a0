"""What shows that an engine has the weights that it was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.rl.types import Floats
from weft.rollout.sync.wire import SyncError


def compare(
    version: int, receiver: str, sent: Mapping[str, int], received: Mapping[str, int], placed: Mapping[str, int] | None
) -> None:
    """Checksums of a sync: of what was sent, of what came, and of what the engine holds now, where it can tell.

    SyncError, naming the engine and the tensors, where any differ or are not there.
    """
    told = {"received": received} if placed is None else {"received": received, "placed": placed}
    for what, sums in told.items():
        lacking = [name for name in sent if name not in sums]
        if lacking:
            raise SyncError(
                f"{receiver} did not say what it {what} of {_some(lacking)}, version {version}: it is not proven"
            )
    wrong = [name for name, value in sent.items() if received[name] != value]
    if wrong:
        raise SyncError(f"{receiver} received other bytes than were sent, version {version}: {_some(wrong)}")
    wrong = [name for name, value in sent.items() if placed is not None and placed[name] != value]
    if wrong:
        raise SyncError(f"{receiver} holds other values than it was sent, version {version}: {_some(wrong)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# Largest mean distance of logprobs that engines with the same weights showed is a tenth of these (docs/weight-sync.md).
PARITY = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}


def check_parity(
    receiver: str,
    version: int,
    engine: Sequence[Floats],
    trainer: Sequence[Floats],
    dtype: str,
    limit: float | None = None,
) -> float:
    """The mean distance of the engine's logprobs from the trainer's, of the same tokens under the same weights.

    engine, trainer: for each completion [G] logprobs of logits / temperature. dtype: the engine's, which says how far
    they may be apart, unless limit does. SyncError where they are further, or not numbers: the engine then samples from
    another model, or another prompt, than the trainer trains.
    """
    ours, theirs = (np.concatenate([np.asarray(part, np.float64) for part in parts]) for parts in (trainer, engine))
    if ours.shape != theirs.shape:
        raise SyncError(f"{receiver} gave {theirs.size} logprobs for {ours.size} tokens, version {version}")
    if not ours.size:
        return 0.0
    limit = PARITY[dtype] if limit is None else limit
    distance = np.abs(ours - theirs)
    mean = float(distance.mean())
    if not mean <= limit:
        place = int(np.nanargmax(np.where(np.isfinite(distance), distance, np.inf)))
        raise SyncError(
            f"{receiver} samples from another distribution than the trainer trains, version {version}: logprobs of "
            f"{ours.size} tokens differ by {mean:.2g} in the mean, at most {limit:g} is explained by {dtype}; most "
            f"where the engine says {theirs[place]:.4g} and the trainer {ours[place]:.4g}"
        )
    return mean
