"""Whether an engine samples from the model that is trained: the last part of what is proven of a weight sync."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.rl_schema import RlConfig
from weft.errors import ActorError
from weft.rl.corrections import comparable
from weft.rollout.sync.protocol import SyncError
from weft.rollout.sync.verify import check_parity
from weft.rollout.types import Sample


def parity_is_due(config: RlConfig, steps: int) -> bool:
    """steps: rollout steps since the engines were started, this one with them."""
    every = config.rollout.verify_every
    return config.rollout.engine != "embedded" and (steps == 1 or (every > 0 and steps % every == 0))


def require_parity(samples: Sequence[Sample], version: int, engine: str, dtypes: Sequence[str]) -> None:
    """ActorError where logprobs that were sampled under this version are not those that the trainer, which still has
    its weights, reads (`old`). dtypes: of engine and trainer, as in "bf16"."""
    read = [
        (comparable(sample)[sample.sampled], sample.old[sample.sampled])
        for sample in samples
        if sample.old is not None and sample.length and (sample.versions[sample.sampled] == version).all()
    ]
    try:
        check_parity(engine, version, [own for own, _ in read], [old for _, old in read], dtypes)
    except SyncError as error:
        raise ActorError(str(error), "failed") from error
