"""Selects the frames of a video that a model sees. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_PAIR = 2  # vision towers read frames in pairs


@dataclass(frozen=True, slots=True)
class Clip:
    """A sample of a video's frames. total: frames of the video. fps: its frames per second. num_frames: frames in the
    sample, evenly spaced from the first to the last."""

    total: int
    fps: float
    num_frames: int

    @property
    def indices(self) -> list[int]:
        """Indices of the sampled frames, ascending."""
        indices: list[int] = np.linspace(0, self.total - 1, self.num_frames).round().astype(int).tolist()
        return indices

    @property
    def sampled_fps(self) -> float:
        """Sampled frames per second of the video."""
        return self.num_frames / self.total * self.fps


Shape = tuple[int, int] | tuple[int, int, Clip]  # height and width of an image, or of a video's frames


@dataclass(frozen=True, slots=True)
class Sampling:
    """The number of frames to sample from a video (data.video): `fps` per second, at least min_frames if the video has
    that many, at most max_frames, and an even number, as in qwen-vl-utils."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def clip(self, total: int, fps: float) -> Clip:
        """The clip of a video with `total` frames at `fps` frames per second."""
        limit = min(self.max_frames, total)
        num_frames = min(max(total / fps * self.fps, self.min_frames), limit)
        return Clip(total, fps, max(int(num_frames) // _PAIR * _PAIR, 1))
