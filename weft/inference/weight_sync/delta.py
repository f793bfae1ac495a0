"""Delta sync (rollout.sync): sends only the elements of each tensor that differ from the engines' weights, as
(position, value).

The sending rank keeps the bytes of the last sync in host memory, and compares each bucket with them. A changed element
costs 4 bytes for its position and its own width, so 6 for bf16. A tensor for which a patch would not be smaller is sent
completely. The engine patches its weights (protocol.patched), and compares a digest of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.inference.weight_sync.buckets import ALIGNMENT, BucketTensor
from weft.inference.weight_sync.checksums import checksum
from weft.inference.weight_sync.protocol import POSITION_BYTES, WIDTHS, Bytes

_MOST_ELEMENTS = 2**31  # the most elements of a tensor whose positions fit


class DeltaBase:
    """The weights that the engines of one sending rank have, and patches to newer weights.

    version: of the weights; None if no sync has been confirmed since they were noted. changed: elements that differed
    in the current sync. sent: bytes of its tensors on their way to the engines.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._tensors: dict[str, Bytes] = {}
        self.changed = self.sent = 0

    def begin(self) -> int | None:
        """Begin a sync; returns the version that engines must have for patches, or None. Until the sync is confirmed
        the base has no version."""
        version, self.version = self.version, None
        self.changed = self.sent = 0
        return version

    def confirm(self, version: int) -> None:
        """All engines of the sync have confirmed this version."""
        self.version = version

    def write(self, rows: Sequence[BucketTensor], memory: Bytes, dense: bool) -> list[BucketTensor]:
        """Note the tensors of a bucket, and replace them in its memory by patches. dense: leave the bucket as it is.
        Returns the rows of the resulting bucket."""
        written, end = list[BucketTensor](), 0
        for row in rows:
            data, before = memory[row.offset : row.end], self._tensors.get(row.entry.name)
            patch = None if dense or before is None else _patch(before, data, WIDTHS[row.entry.dtype])
            if patch is None:
                content = self._tensors[row.entry.name] = data.copy()
                self.changed += data.size // WIDTHS[row.entry.dtype]
                replaced = row
            else:
                digest = checksum(data) if patch.size else 0
                assert before is not None
                before[:] = data
                count = patch.size // (POSITION_BYTES + WIDTHS[row.entry.dtype])
                self.changed += count
                content, replaced = patch, replace(row, changed=count, digest=digest)
            if not dense:
                end = -(-end // ALIGNMENT) * ALIGNMENT
                memory[end : end + content.size] = content
                replaced = replace(replaced, offset=end)
                end += content.size
            self.sent += replaced.length
            written.append(replaced)
        return written


def _patch(before: Bytes, data: Bytes, width: int) -> Bytes | None:
    """The patch from one version of a tensor to the next (protocol.patched); None if it is not shorter than the
    tensor."""
    old, new = (part.view(f"u{width}") for part in (before, data))
    positions = np.flatnonzero(old != new)
    if len(positions) * (POSITION_BYTES + width) >= data.size or len(new) > _MOST_ELEMENTS:
        return None
    return np.concatenate([positions.astype(np.int32).view(np.uint8), new[positions].view(np.uint8)])
