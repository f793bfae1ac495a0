"""Opens the videos of rows: before training for their sizes and lengths, in a step for the sampled frames.

A video is a folder or a list of frames, an animation that Pillow opens, or a container (mp4, ...), which needs PyAV.
Folders and lists give all their frames; other videos are sampled according to data.video. If a video cannot be opened,
BadRowError names row, video and reason.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.config.yaml12 import override
from weft.data.image_columns import Image, Video
from weft.data.image_files import (
    ImageChecks,
    MediaInfo,
    check_size,
    file_state,
    files_of,
    load_pixels,
    measure_image,
    open_image,
    to_rgb,
)
from weft.errors import BadRowError, UserError, first_line, how_to_install
from weft.files import regular_file
from weft.models.clips import Clip

_STILL = (b"\xff\xd8", b"BM", b"II*\0", b"MM\0*")  # JPEG, BMP, TIFF
_MOST_CANVASES = 20  # limit for the pixels of all frames of an animation, as a multiple of data.max_image_pixels
_TICK = 100  # milliseconds of a frame without a duration, as in browsers

ConvertFrame = Callable[[Any], Any]  # converts a decoded frame, a PIL image, to its form in memory


@dataclass(frozen=True)
class _Opened:
    """An open video. take: (indices of frames, a function for each frame) -> the results of the function."""

    info: MediaInfo
    take: Callable[[Sequence[int], ConvertFrame], list[Any]]


def measure_video(video: Video, location: str, checks: ImageChecks) -> MediaInfo:
    """Measures a video before training. location: name of the row and the video. Raises BadRowError, or UserError for a
    container without PyAV."""
    if video.fps is not None and not _is_listed(video):
        raise BadRowError(
            f"{location} ({video}): `sample_fps` is only for a list or folder of frames, because a file contains its "
            "rate. Remove it."
        )
    with _open(video, location, checks) as opened:
        return opened.info


def _is_listed(video: Video) -> bool:
    """Whether the frames are separate images: a list, or a folder."""
    return video.file is None or (video.file.path is not None and os.path.isdir(video.file.path))


def sample_frames(
    video: Video, location: str, checks: ImageChecks, make_convert: Callable[[MediaInfo], ConvertFrame]
) -> tuple[list[Any], MediaInfo]:
    """(the sampled frames, the measurements of the video). make_convert: measurements -> a function that is applied to
    each frame once it is decoded, so that the decoded frames are never all in memory. Raises BadRowError."""
    with _open(video, location, checks) as opened:
        assert opened.info.clip is not None
        return opened.take(opened.info.clip.indices, make_convert(opened.info)), opened.info


@contextmanager
def _open(video: Video, location: str, checks: ImageChecks) -> Iterator[_Opened]:
    name = f"{location} ({video})"
    if video.file is None or _is_listed(video):
        frames = video.frames or [Image(path=path) for path in files_of(str(video.file))]
        yield _listed(frames, video.fps, name, checks)
    elif _head(video.file, name) in ("animation", "still"):
        with open_image(video.file, location, checks) as (picture, size, changed):
            yield _animated(picture, name, checks, size, changed)
    else:
        with _contained(video.file, name, checks) as open_video:
            yield open_video


def _listed(frames: Sequence[Image], fps: float | None, name: str, checks: ImageChecks) -> _Opened:
    """A video of separate images, which uses all of them."""
    if not frames:
        raise BadRowError(f"{name}: has no frames. Remove it, and its position in the text.")
    if len(frames) > checks.video.max_frames:
        raise BadRowError(
            f"{name}: has {len(frames):,} frames, but data.video allows {checks.video.max_frames:,} (max_frames) for "
            f"videos that use all frames. Remove some, or set {override('data.video', {'max_frames': len(frames)})}."
        )
    if url := next((frame.url for frame in frames if frame.url is not None), None):
        raise BadRowError(f"{name}: a frame is a URL ({url}), but weft fetches only complete videos. Name files.")
    labels = [f"{name}: frame {number} of {len(frames)}" for number in range(1, len(frames) + 1)]
    sizes = [measure_image(frame, label, checks) for frame, label in zip(frames, labels, strict=True)]
    for size, label in zip(sizes, labels, strict=True):
        if (size.height, size.width) != (sizes[0].height, sizes[0].width):
            raise BadRowError(
                f"{label} has {size.width} x {size.height} pixels, but the first frame has {sizes[0].width} x "
                f"{sizes[0].height}. Frames of a video must have the same size."
            )
    # If the row itself contains frames, the video has no modification time.
    changed = max(size.changed for size in sizes) if all(frame.path is not None for frame in frames) else 0
    info = MediaInfo(
        sizes[0].height, sizes[0].width, sum(size.size for size in sizes), changed,
        Clip(len(frames), fps or checks.video.fps, len(frames)),
    )  # fmt: skip

    def take(indices: Sequence[int], convert: ConvertFrame) -> list[Any]:
        return [convert(load_pixels(frames[index], labels[index], checks)[0]) for index in indices]

    return _Opened(info, take)


def _animated(picture: Any, name: str, checks: ImageChecks, size: int, changed: int) -> _Opened:
    """A GIF, WebP or PNG with several frames, each with a duration."""
    count = int(getattr(picture, "n_frames", 1))
    if count < 2:
        raise BadRowError(
            f"{name}: is a still image. A video is a folder or list of frames, an animated GIF, WebP or PNG, or a "
            "container such as mp4. Write an image as a part of type image."
        )
    _check_drawing(count, picture.size, name, checks)
    shown = 0.0
    for number in range(count):
        picture.seek(number)
        if checks.decode:
            picture.load()
        shown += float(picture.info.get("duration") or _TICK)
    clip = checks.video.clip(count, count * 1000 / shown)

    def take(indices: Sequence[int], convert: ConvertFrame) -> list[Any]:
        frames = []
        for index in indices:
            picture.seek(index)
            picture.load()
            frames.append(convert(to_rgb(picture)))
        return frames

    return _Opened(MediaInfo(picture.height, picture.width, size, changed, clip), take)


def _check_drawing(count: int, size: tuple[int, int], name: str, checks: ImageChecks) -> None:
    """Raises BadRowError for an animation with too many pixels in total, because each frame is drawn on a full canvas,
    however few bytes it has in the file."""
    width, height = size
    if count * width * height > _MOST_CANVASES * checks.max_pixels:
        raise BadRowError(
            f"{name}: has {count:,} frames of {width:,} x {height:,} pixels, together more than {_MOST_CANVASES} x "
            f"data.max_image_pixels ({checks.max_pixels:,}): drawing them would take too long. Make it smaller, remove "
            "frames, or raise data.max_image_pixels."
        )


@contextmanager
def _contained(file: Image, name: str, checks: ImageChecks) -> Iterator[_Opened]:
    """A container, opened by PyAV. Rotation metadata are ignored, as in transformers."""
    if find_spec("av") is None:
        raise UserError(
            f"{name}: weft decodes containers such as mp4 with PyAV, which is not installed: "
            f"{how_to_install('av', 'video')}. Or write the frames to a folder, and name the folder."
        )
    av: Any = importlib.import_module("av")
    size, changed = (len(file.data), 0) if file.data is not None else file_state([str(file.path)]) or (0, 0)
    try:
        with av.open(str(file.path) if file.data is None else io.BytesIO(file.data)) as container:
            yield _decoded(container, name, checks, size, changed)
    except UserError:
        raise
    except MemoryError as error:
        error.add_note(f"{name}: not enough memory to decode this video. Make it smaller, or remove it.")
        raise
    except Exception as error:  # FFmpeg's errors are of many types
        raise BadRowError(
            f"{name}: cannot be decoded: {first_line(error)}. Fix the video, or remove the row."
        ) from None


def _decoded(container: Any, name: str, checks: ImageChecks, size: int, changed: int) -> _Opened:
    if not container.streams.video:
        raise BadRowError(f"{name}: has only sound, no pictures. Remove it.")
    stream = container.streams.video[0]
    check_size((stream.codec_context.width, stream.codec_context.height), name, checks)
    total = 0 if checks.decode else stream.frames
    if not total:
        total = sum(1 for _ in container.decode(stream))
        container.seek(0)
    if not total or not stream.average_rate:
        raise BadRowError(f"{name}: has no frames. Remove it.")
    clip = checks.video.clip(total, float(stream.average_rate))

    def take(indices: Sequence[int], convert: ConvertFrame) -> list[Any]:
        selected = set(indices)
        frames = [convert(frame.to_image()) for n, frame in enumerate(container.decode(stream)) if n in selected]
        if len(frames) < len(selected):
            raise BadRowError(f"{name}: has fewer frames than its header claims. Fix the video, or remove the row.")
        return frames

    return _Opened(MediaInfo(stream.codec_context.height, stream.codec_context.width, size, changed, clip), take)


def _head(file: Image, name: str) -> str:
    """The kind of a file, from its first bytes: "animation" (GIF, PNG, WebP), "still" (other images), or
    "container"."""
    if file.picture is not None:
        return "animation"
    try:
        head = file.data[:12] if file.data is not None else _first_bytes(str(file.path))
    except UserError as error:
        raise BadRowError(f"{name}: {error}") from None
    except OSError as error:
        hint = " Paths are relative to the file of the row." if isinstance(error, FileNotFoundError) else ""
        raise BadRowError(f"{name}: cannot be read: {error.strerror}.{hint}") from None
    if not head:
        raise BadRowError(f"{name}: is empty. Fix the video, or remove the row.")
    if head.startswith((b"GIF8", b"\x89PNG")) or head[8:12] == b"WEBP":
        return "animation"
    return "still" if head.startswith(_STILL) else "container"


def _first_bytes(path: str) -> bytes:
    if os.path.exists(path):
        regular_file(Path(path), "a video")
    with open(path, "rb") as file:
        return file.read(12)
