"""Which frames of a video a model is shown. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_PAIR = 2  # frames that towers take together


@dataclass(frozen=True, slots=True)
class Clip:
    """The frames that are taken of a video. total: that it has. fps: of these in a second. taken: how many, evenly from
    the first to the last."""

    total: int
    fps: float
    taken: int

    @property
    def indices(self) -> list[int]:
        """The indices of the frames that are taken, rising."""
        found: list[int] = np.linspace(0, self.total - 1, self.taken).round().astype(int).tolist()
        return found

    @property
    def sampled_fps(self) -> float:
        """Frames that are taken of a second."""
        return self.taken / self.total * self.fps


Shape = tuple[int, int] | tuple[int, int, Clip]  # height and width of an image, or of a video's frames


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many frames are taken of a video, as data.video says: `fps` of a second, at least min_frames where it has so
    many, at most max_frames, and an even number, as qwen-vl-utils takes them."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def clip(self, total: int, fps: float) -> Clip:
        """The frames of a video with so many, of which so many are shown in a second."""
        most = min(self.max_frames, total)
        wanted = min(max(total / fps * self.fps, self.min_frames), most)
        return Clip(total, fps, max(int(wanted) // _PAIR * _PAIR, 1))
