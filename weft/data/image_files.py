"""Opens the images of rows: before training for their sizes, in a step for their pixels. Also records where images and
videos are, and opens the images of prompts. Imports no torch, because reward processes use this file.

Every image is rotated by its EXIF orientation and converted to RGB, as in transformers' load_image. If an image cannot
be opened, BadRowError names row, image and reason.
"""

from __future__ import annotations

import io
import os
import re
import struct
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.data.image_columns import Image, Video
from weft.errors import BadRowError, UserError, first_line, how_to_install
from weft.files import regular_file
from weft.models.clips import Clip, Sampling, Shape

# The formats that PIL decodes itself: others run external programs (EPS), or are not pictures.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag; the values of it that swap height and width
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # PIL modes that would turn white in RGB
MAX_PIXELS = 89_478_485  # PIL's limit for decoded images


@dataclass(frozen=True, slots=True)
class ImageChecks:
    """decode: as data.check_images. max_pixels: as data.max_image_pixels. fetch: as data.fetch_images. rows: whether
    the images come from rows; then errors give advice about rows. video: as data.video."""

    decode: bool = True
    max_pixels: int = MAX_PIXELS
    fetch: bool = False
    rows: bool = True
    video: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """Measurements of an image, or of a video, whose frames all have one size.

    height, width: in pixels, after rotation. size: bytes of the files (number of pixels for a PIL image in memory).
    changed: time of the files' last modification, in nanoseconds; 0 without files. clip: the frames sampled from a
    video.
    """

    height: int
    width: int
    size: int
    changed: int = 0
    clip: Clip | None = None

    @property
    def shape(self) -> Shape:
        """The sizes from which a processor computes the layout."""
        return (self.height, self.width) if self.clip is None else (self.height, self.width, self.clip)


def need_pillow(location: str) -> None:
    """Raises UserError if Pillow is missing. location: the row that needs it, for the message."""
    if find_spec("PIL") is None:
        raise UserError(
            f"{location}: weft reads images with Pillow, which is not installed: {how_to_install('pillow', 'vision')}."
        )


def opening_pool() -> ThreadPoolExecutor:
    """Threads that open, decode and process images in parallel; PIL releases the GIL while it decodes."""
    return ThreadPoolExecutor(4, thread_name_prefix="images")


def measure_image(image: Image, location: str, checks: ImageChecks) -> MediaInfo:
    """Measures an image before training, and decodes it if checks.decode. location: name of the row and the image.
    Raises BadRowError."""
    with open_image(image, location, checks) as (picture, size, changed):
        orientation = _orientation(picture)
        if checks.decode or (
            picture.format == "TIFF" and orientation in _TURNED
        ):  # Pillow rotates TIFF while it decodes
            picture.load()
            picture, orientation = _upright(picture), None
            if picture.mode != "RGB":  # the same operations as `pixels`, so that errors show before training
                to_rgb(picture)
        width, height = reversed(picture.size) if orientation in _TURNED else picture.size
        return MediaInfo(height, width, size, changed)


def load_pixels(image: Image, location: str, checks: ImageChecks) -> tuple[Any, MediaInfo]:
    """(the image as a PIL image in RGB, its measurements). Raises BadRowError."""
    with open_image(image, location, checks) as (picture, size, changed):
        picture.load()
        upright = to_rgb(_upright(picture))
        return upright, MediaInfo(upright.height, upright.width, size, changed)


def _orientation(picture: Any) -> Any:
    """The EXIF orientation; None if there is none that Pillow can read."""
    try:
        return picture.getexif().get(_ORIENTATION)
    except Exception:  # of any type: damaged EXIF, on which no pixel depends
        return None


def _upright(picture: Any) -> Any:
    """The picture rotated by its EXIF orientation. Pillow's ImageOps.exif_transpose is not used: it also rewrites the
    rest of the EXIF, which fails for values whose type does not fit their tag."""
    from PIL import Image as Pil

    turn = Pil.Transpose
    turns = {
        2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE, 6: turn.ROTATE_270,
        7: turn.TRANSVERSE, 8: turn.ROTATE_90,
    }  # fmt: skip
    orientation = _orientation(picture)
    return picture.transpose(turns[orientation]) if orientation in turns else picture


def to_rgb(picture: Any) -> Any:
    """The picture in RGB."""
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # avoids a warning from PIL
    return picture.convert("RGB")


def encode_picture(image: Image, location: str, checks: ImageChecks) -> Image:
    """A PIL image in memory encoded as PNG, after `pixels`; any other image unchanged. Raises BadRowError."""
    if image.picture is None:
        return image
    buffer = io.BytesIO()
    load_pixels(image, location, checks)[0].save(buffer, "PNG", compress_level=1)
    return Image(data=buffer.getvalue())


@contextmanager
def open_image(image: Image, location: str, checks: ImageChecks) -> Iterator[tuple[Any, int, int]]:
    """Yields (PIL image, size, modification time), the latter two as in MediaInfo. Errors inside become
    BadRowErrors."""
    name = f"{location} ({image})"
    need_pillow(name)
    try:
        if image.picture is not None:
            width, height = image.picture.size
            yield _checked(image.picture.copy(), name, checks), int(width * height * len(image.picture.getbands())), 0
            return
        if image.path is None:
            assert image.data is not None
            with _decoder(io.BytesIO(image.data)) as picture:
                yield _checked(picture, name, checks), len(image.data), 0
            return
        if not os.path.exists(image.path):
            raise FileNotFoundError
        stat = regular_file(Path(image.path), "an image").stat()
        with open(image.path, "rb") as file, _decoder(file) as picture:
            yield _checked(picture, name, checks), stat.st_size, stat.st_mtime_ns
    except UserError as error:
        raise error if isinstance(error, BadRowError) else BadRowError(f"{name}: {error}") from None
    except FileNotFoundError:
        hint = " Paths are relative to the file of the row." if checks.rows else ""
        raise BadRowError(f"{name}: there is no such file.{hint}") from None
    except MemoryError as error:
        error.add_note(f"{name}: not enough memory to decode this image. Make it smaller, or remove it.")
        raise
    except Exception as error:  # PIL's decoders raise exceptions of any type for damaged files
        hint = " Fix the image, or remove the row." if checks.rows else ""
        raise BadRowError(f"{name}: {_reason(image, error)}{hint}") from None


def _decoder(file: Any) -> Any:
    from PIL import Image as Pil

    return Pil.open(file, formats=_decodable_formats())


@cache
def _decodable_formats() -> list[str]:
    """The formats that the installed Pillow supports. Silences Pillow's warnings (about sizes, which weft checks
    itself, and damaged EXIF) for the whole process, because threads share the warning filters."""
    from PIL import Image as Pil

    warnings.filterwarnings("ignore", module=r"PIL\.")
    Pil.init()
    return [name for name in FORMATS if name in Pil.OPEN]


def _checked(picture: Any, name: str, checks: ImageChecks) -> Any:
    check_size(picture.size, name, checks)
    if picture.mode in _DEEP:
        raise BadRowError(
            f"{name}: has {'16' if '16' in picture.mode else '32'} bits per pixel ({picture.mode}), which would turn "
            "white. Save it with 8 bits per colour channel."
        )
    return picture


def check_size(size: tuple[int, int], name: str, checks: ImageChecks) -> None:
    """Raises BadRowError if a picture of this (width, height) is too large to decode, or empty."""
    width, height = size
    if width * height > checks.max_pixels:
        limit = f"{'data.max_image_pixels = ' if checks.rows else ''}{checks.max_pixels:,}"
        hint = ", or raise data.max_image_pixels" if checks.rows else ""
        raise BadRowError(
            f"{name}: has {width:,} x {height:,} pixels, more than {limit}: decoding it could fill the memory. Make it "
            f"smaller{hint}."
        )
    if min(size) < 1:
        raise BadRowError(f"{name}: has {width} x {height} pixels. Remove it.")


def _reason(image: Image, error: Exception) -> str:
    from PIL import Image as Pil
    from PIL import UnidentifiedImageError

    size = None if image.data is None else len(image.data)
    with suppress(OSError):
        size = os.stat(image.path).st_size if image.path is not None else size
    if size == 0:
        return "is empty."
    if isinstance(error, UnidentifiedImageError):
        return f"is not a readable image (formats: {', '.join(FORMATS)})."
    if isinstance(error, Pil.DecompressionBombError):
        return f"has more than {2 * MAX_PIXELS:,} pixels, which Pillow refuses."
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read: {error.strerror}."
    return f"is damaged: {first_line(error)}."


# ---------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, not yet opened. location: the name of the prompt in messages. images: in the order of
    their placeholders. sizes: measurements of each. patches, pairs: of all of them, as in Media."""

    location: str
    images: tuple[Image, ...]
    sizes: tuple[MediaInfo, ...]
    patches: int
    pairs: int

    def followed_by(self, reply_images: PromptImages) -> PromptImages:
        """These images followed by the images of replies. reply_images.patches and .pairs must already count all images
        together, because processors pad the images of a document to the largest."""
        joined = (*self.images, *reply_images.images), (*self.sizes, *reply_images.sizes)
        return PromptImages(self.location, *joined, reply_images.patches, reply_images.pairs)

    @property
    def names(self) -> list[str]:
        """The path or URL of each image ("in the row" if none), as rollouts and samples record it."""
        return [str(image) for image in self.images]

    def pictures(self) -> list[Any]:
        """The images as PIL images in RGB. Raises BadRowError if an image can no longer be opened, or now has more
        pixels."""
        pictures = []
        for image, size in zip(self.images, self.sizes, strict=True):
            checks = ImageChecks(max_pixels=size.height * size.width)  # data.max_image_pixels allowed this size
            pictures.append(load_pixels(image, self.location, checks)[0])
        return pictures


# ---------------------------------------------------------------- locations of images

# A packed location: kind, height, width, bytes, a number (the modification time of the files; for an image in a row,
# the position of the row), the index among the images of the row; for a video also the fields of its Clip.
_HEAD, _CLIP = struct.Struct("<BIIQqI"), struct.Struct("<IdI")
HEAD_BYTES = _HEAD.size + _CLIP.size
_PATH, _ROW, _COPY = b"PRC"
_VIDEO_PATH, _VIDEO_ROW, _VIDEO_COPY, _FRAMES = b"prcf"
FILES, VIDEOS = (_PATH, _VIDEO_PATH, _FRAMES), (_VIDEO_PATH, _VIDEO_ROW, _VIDEO_COPY, _FRAMES)


def identity(packed: Any) -> Any:
    """The bytes for the digest of a document: size in pixels and bytes, and the clip, but not the location. packed: the
    first HEAD_BYTES of a packed location."""
    clip = packed[_HEAD.size :].tobytes() if packed[0] in VIDEOS else b""
    return packed[1:17].tobytes() + clip


@dataclass(frozen=True, slots=True)
class MediaLocation:
    """The location of an image or a video, for reading it again. info: its measurements when it was tokenised. paths:
    of its file or folder, or of its frames. data: a copy of its bytes. With neither, it is image number `index` of the
    row at `position`."""

    info: MediaInfo
    paths: tuple[str, ...] = ()
    data: bytes | None = None
    position: int = 0
    index: int = 0

    @property
    def in_row(self) -> bool:
        """Whether it can only be read from its row."""
        return not self.paths and self.data is None

    def source(self, row: Sequence[Image | Video]) -> Image | Video:
        """The image or video. row: all images and videos of its row; only used if in_row."""
        if self.in_row:
            return row[self.index]
        clip, files = self.info.clip, [Image(path=path) for path in self.paths]
        file = Image(data=self.data) if self.data is not None else files[0]
        if clip is None:
            return file
        return Video(file, fps=clip.fps) if len(files) < 2 else Video(frames=tuple(files), fps=clip.fps)

    def is_unchanged(self) -> bool:
        """Whether the files still have the size and modification time of `info`."""
        return file_state(self.paths) == (self.info.size, self.info.changed)

    def packed(self) -> bytes:
        """The bytes that a table stores."""
        info, clip = self.info, self.info.clip
        kind, tail = _ROW, b""
        if self.paths:
            kind, tail = _PATH, b"\0".join(os.fsencode(path) for path in self.paths)
        elif self.data is not None:
            kind, tail = _COPY, self.data
        number = self.position if kind == _ROW else info.changed
        if clip is not None:
            kind = _FRAMES if len(self.paths) > 1 else kind + _VIDEO_PATH - _PATH
            tail = _CLIP.pack(clip.total, clip.fps, clip.num_frames) + tail
        return _HEAD.pack(kind, info.height, info.width, info.size, number, self.index) + tail

    @classmethod
    def unpack(cls, packed: bytes) -> MediaLocation:
        """The inverse of `packed`."""
        kind, height, width, size, number, index = _HEAD.unpack_from(packed)
        tail, clip = packed[_HEAD.size :], None
        if kind in VIDEOS:
            clip, tail = Clip(*_CLIP.unpack_from(tail)), tail[_CLIP.size :]
        in_row = kind in (_ROW, _VIDEO_ROW)
        info = MediaInfo(height, width, size, 0 if in_row else number, clip)
        if kind in FILES:
            return cls(info, tuple(os.fsdecode(path) for path in tail.split(b"\0")))
        return cls(info, position=number, index=index) if in_row else cls(info, data=tail)


def file_state(paths: Sequence[str]) -> tuple[int, int] | None:
    """(total bytes, latest modification in nanoseconds) of files and of the files in folders; None if a file is
    gone."""
    try:
        stats = [os.stat(file) for path in paths for file in files_of(path)]
    except OSError:
        return None
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)


def files_of(path: str) -> list[str]:
    """[path] for a file; for a folder, its files except hidden ones, ordered by the numbers in their names."""
    if not os.path.isdir(path):
        return [path]
    names = [entry.name for entry in os.scandir(path) if entry.is_file() and not entry.name.startswith(".")]

    def natural_order(name: str) -> list[tuple[int, str]]:  # frame_2 comes before frame_10
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

    return [os.path.join(path, name) for name in sorted(names, key=natural_order)]


def locate_media(
    location: str, media: Image | Video, info: MediaInfo, position: int | None, index: int
) -> MediaLocation:
    """The MediaLocation of an image or video. location: the name of its row, for messages. position: of the row, if the
    row can be read again, else None. index: its index among the images of the row. Raises BadRowError if it could not
    be read again."""
    if isinstance(media, Video) and media.file is None:
        if all(frame.path is not None for frame in media.frames):
            return MediaLocation(info, tuple(str(frame.path) for frame in media.frames))
        if position is None:
            raise BadRowError(
                f"{location}: its frames are in a row that cannot be read again. Write the data as JSONL or Parquet, "
                "or name files."
            )
        return MediaLocation(info, position=position, index=index)
    image = media.file if isinstance(media, Video) else media
    assert image is not None
    if image.path is not None:
        return MediaLocation(info, (image.path,))
    if position is None or image.url is not None:
        assert image.data is not None
        return MediaLocation(info, data=image.data)
    return MediaLocation(info, position=position, index=index)
