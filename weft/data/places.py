"""Where to find the images and videos of tokenised documents again, and the packed form that a table stores."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.data.image_columns import Image, Video
from weft.data.image_files import MediaInfo
from weft.errors import BadRowError
from weft.models.clips import Clip

# A packed place: kind, height, width, bytes, a number (the modification time of the files; for a place in a row, the
# position of the row), the index among the images of the row; for a video also the fields of its Clip.
_HEAD, _CLIP = struct.Struct("<BIIQqI"), struct.Struct("<IdI")
HEAD_BYTES = _HEAD.size + _CLIP.size
_PATH, _ROW, _COPY = b"PRC"
_VIDEO_PATH, _VIDEO_ROW, _VIDEO_COPY, _FRAMES = b"prcf"
FILES, VIDEOS = (_PATH, _VIDEO_PATH, _FRAMES), (_VIDEO_PATH, _VIDEO_ROW, _VIDEO_COPY, _FRAMES)


def identity(packed: Any) -> Any:
    """The bytes that go into the digest of a document: size in pixels and bytes, and the clip, but not the location.
    packed: the first HEAD_BYTES of a packed place."""
    clip = packed[_HEAD.size :].tobytes() if packed[0] in VIDEOS else b""
    return packed[1:17].tobytes() + clip


@dataclass(frozen=True, slots=True)
class MediaLocation:
    """Where to find an image or a video again. info: its measurements when it was tokenised. paths: of its file or
    folder, or of its frames. data: a copy of its bytes. With neither, it is number `place` among the images of the row
    at `position`."""

    info: MediaInfo
    paths: tuple[str, ...] = ()
    data: bytes | None = None
    position: int = 0
    place: int = 0

    @property
    def in_row(self) -> bool:
        """Whether the row must be read again to get it."""
        return not self.paths and self.data is None

    def source(self, row: Sequence[Image | Video]) -> Image | Video:
        """The image or video. row: all images and videos of its row; only used if in_row."""
        if self.in_row:
            return row[self.place]
        clip, files = self.info.clip, [Image(path=path) for path in self.paths]
        file = Image(data=self.data) if self.data is not None else files[0]
        if clip is None:
            return file
        return Video(file, fps=clip.fps) if len(files) < 2 else Video(frames=tuple(files), fps=clip.fps)

    def is_as_it_was(self) -> bool:
        """Whether the files still have the size and modification time of `info`."""
        return file_state(self.paths) == (self.info.size, self.info.changed)

    def packed(self) -> bytes:
        """The bytes that a table stores."""
        seen, clip = self.info, self.info.clip
        kind, tail = _ROW, b""
        if self.paths:
            kind, tail = _PATH, b"\0".join(os.fsencode(path) for path in self.paths)
        elif self.data is not None:
            kind, tail = _COPY, self.data
        number = self.position if kind == _ROW else seen.changed
        if clip is not None:
            kind = _FRAMES if len(self.paths) > 1 else kind + _VIDEO_PATH - _PATH
            tail = _CLIP.pack(clip.total, clip.fps, clip.taken) + tail
        return _HEAD.pack(kind, seen.height, seen.width, seen.size, number, self.place) + tail

    @classmethod
    def of(cls, packed: bytes) -> MediaLocation:
        """The inverse of `packed`."""
        kind, height, width, size, number, place = _HEAD.unpack_from(packed)
        tail, clip = packed[_HEAD.size :], None
        if kind in VIDEOS:
            clip, tail = Clip(*_CLIP.unpack_from(tail)), tail[_CLIP.size :]
        in_row = kind in (_ROW, _VIDEO_ROW)
        seen = MediaInfo(height, width, size, 0 if in_row else number, clip)
        if kind in FILES:
            return cls(seen, tuple(os.fsdecode(path) for path in tail.split(b"\0")))
        return cls(seen, position=number, place=place) if in_row else cls(seen, data=tail)


def file_state(paths: Sequence[str]) -> tuple[int, int] | None:
    """(total bytes, latest modification in nanoseconds) of files and of the files in folders; None if one is gone."""
    try:
        found = [os.stat(file) for path in paths for file in files_of(path)]
    except OSError:
        return None
    return sum(one.st_size for one in found), max((one.st_mtime_ns for one in found), default=0)


def files_of(path: str) -> list[str]:
    """[path] for a file; for a folder its files that are not hidden, ordered by the numbers in their names."""
    if not os.path.isdir(path):
        return [path]
    names = [entry.name for entry in os.scandir(path) if entry.is_file() and not entry.name.startswith(".")]
    return [os.path.join(path, name) for name in sorted(names, key=_in_order)]


def _in_order(name: str) -> list[tuple[int, str]]:
    """A sort key by which frame_2 comes before frame_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def locate_media(
    location: str, seen: Image | Video, info: MediaInfo, position: int | None, place: int
) -> MediaLocation:
    """The MediaLocation of an image or video. location: the name of its row, for messages. position: of the row, if the
    row can be read again, else None. place: its index among the images of the row. Raises BadRowError if it could not
    be found again."""
    if isinstance(seen, Video) and seen.file is None:
        if all(frame.path is not None for frame in seen.frames):
            return MediaLocation(info, tuple(str(frame.path) for frame in seen.frames))
        if position is None:
            raise BadRowError(
                f"{location}: its frames lie in a row that cannot be read again. Write the data as JSONL or Parquet, "
                "or name files."
            )
        return MediaLocation(info, position=position, place=place)
    image = seen.file if isinstance(seen, Video) else seen
    assert image is not None
    if image.path is not None:
        return MediaLocation(info, (image.path,))
    if position is None or image.url is not None:
        assert image.data is not None
        return MediaLocation(info, data=image.data)
    return MediaLocation(info, position=position, place=place)
