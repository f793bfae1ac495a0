"""Opening the images of rows: their sizes before training, their pixels when a step needs them.

Every image is turned as its EXIF orientation says and made RGB, as transformers' load_image does. What cannot be opened
is a BadRowError with row, image and reason.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.data.image_columns import Image
from weft.errors import BadRowError, UserError, first_line
from weft.files import regular_file
from weft.models.clips import Clip, Sampling, Shape

# Those that PIL decodes by itself: others run programs (EPS), or are no pictures.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF; those for which height and width change places
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # which convert to white
MAX_PIXELS = 89_478_485  # of an image that is decoded, as in PIL


@dataclass(frozen=True, slots=True)
class Checks:
    """decode: as data.check_images. max_pixels: as data.max_image_pixels. fetch: as data.fetch_images. rows: whether
    images are those of rows, of which errors then speak. video: as data.video."""

    decode: bool = True
    max_pixels: int = MAX_PIXELS
    fetch: bool = False
    rows: bool = True
    video: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of an image, or of all frames of a video: height and width in pixels, as it is seen; bytes of its files; when one
    of them was changed last, in nanoseconds (0: it is no file). clip: of a video, which frames are taken."""

    height: int
    width: int
    size: int
    changed: int = 0
    clip: Clip | None = None

    @property
    def shape(self) -> Shape:
        """What a processor has to know to lay it out."""
        return (self.height, self.width) if self.clip is None else (self.height, self.width, self.clip)


def need_pillow(where: str) -> None:
    """UserError where PIL is missing. where: what needs it."""
    if find_spec("PIL") is None:
        raise UserError(
            f"{where}: images are read by Pillow, which is not installed: pip install pillow, or install weft with its "
            "extra [vision]."
        )


def opening_pool() -> ThreadPoolExecutor:
    """Threads that open, decode and process images side by side; PIL lets others run meanwhile."""
    return ThreadPoolExecutor(4, thread_name_prefix="images")


def measured(image: Image, where: str, checks: Checks) -> Measured:
    """What has to be known of an image before training. where: names the row and the image. Raises BadRowError."""
    with opened(image, where, checks) as (picture, size, changed):
        if checks.decode:
            picture.load()
        turned = picture.getexif().get(_ORIENTATION) in _TURNED
        width, height = reversed(picture.size) if turned else picture.size
        return Measured(height, width, size, changed)


def pixels(image: Image, where: str, checks: Checks) -> tuple[Any, Measured]:
    """(the image as a PIL image in RGB, what `measured` says of it). Raises BadRowError."""
    from PIL import ImageOps

    with opened(image, where, checks) as (picture, size, changed):
        picture.load()
        seen = in_colours(ImageOps.exif_transpose(picture))
        return seen, Measured(seen.height, seen.width, size, changed)


def in_colours(picture: Any) -> Any:
    """The picture in RGB."""
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # PIL warns of what it does otherwise
    return picture.convert("RGB")


def as_file(image: Image, where: str, checks: Checks) -> Image:
    """A picture in memory as the bytes of a PNG, of what `pixels` says; another image as it is. Raises BadRowError."""
    if image.picture is None:
        return image
    held = io.BytesIO()
    pixels(image, where, checks)[0].save(held, "PNG", compress_level=1)
    return Image(data=held.getvalue())


@contextmanager
def opened(image: Image, where: str, checks: Checks) -> Iterator[tuple[Any, int, int]]:
    """(PIL image, bytes, time of change); what goes wrong inside becomes a BadRowError."""
    name = f"{where} ({image})"
    need_pillow(name)
    try:
        if image.picture is not None:
            yield _checked(image.picture.copy(), name, checks), _held(image.picture), 0
            return
        if image.path is None:
            assert image.data is not None
            with _decoder(io.BytesIO(image.data)) as picture:
                yield _checked(picture, name, checks), len(image.data), 0
            return
        if not os.path.exists(image.path):
            raise FileNotFoundError
        found = regular_file(Path(image.path), "an image").stat()
        with open(image.path, "rb") as file, _decoder(file) as picture:
            yield _checked(picture, name, checks), found.st_size, found.st_mtime_ns
    except UserError as error:
        raise error if isinstance(error, BadRowError) else BadRowError(f"{name}: {error}") from None
    except FileNotFoundError:
        hint = " Paths are relative to the file of the row." if checks.rows else ""
        raise BadRowError(f"{name}: there is no such file.{hint}") from None
    except MemoryError:
        raise
    except Exception as error:  # PIL's decoders raise errors of any type for what they cannot read
        hint = " Mend the image, or remove the row." if checks.rows else ""
        raise BadRowError(f"{name}: {_reason(image, error)}{hint}") from None


def _decoder(file: Any) -> Any:
    from PIL import Image as Pil

    return Pil.open(file, formats=_known())


@cache
def _known() -> list[str]:
    """The formats that this Pillow was built with. Its warnings (of sizes, which are checked here, and of damaged EXIF)
    are silenced for good, because threads share the filters."""
    from PIL import Image as Pil

    warnings.filterwarnings("ignore", module=r"PIL\.")
    Pil.init()
    return [name for name in FORMATS if name in Pil.OPEN]


def _checked(picture: Any, name: str, checks: Checks) -> Any:
    check_size(picture.size, name, checks)
    if picture.mode in _DEEP:
        raise BadRowError(
            f"{name}: has {'16' if '16' in picture.mode else '32'} bits for a pixel ({picture.mode}), which would turn "
            "white. Save it with 8 bits for each of red, green and blue."
        )
    return picture


def check_size(size: tuple[int, int], name: str, checks: Checks) -> None:
    """BadRowError for a picture of this width and height that is not decoded."""
    width, height = size
    if width * height > checks.max_pixels:
        limit = f"{'data.max_image_pixels = ' if checks.rows else ''}{checks.max_pixels:,}"
        hint = ", or set data.max_image_pixels to more" if checks.rows else ""
        raise BadRowError(
            f"{name}: has {width:,} x {height:,} pixels, more than {limit}: decoding it could fill the memory. Make it "
            f"smaller{hint}."
        )
    if min(size) < 1:
        raise BadRowError(f"{name}: has {width} x {height} pixels. Remove it.")


def _held(picture: Any) -> int:
    width, height = picture.size
    return int(width * height)


def _reason(image: Image, error: Exception) -> str:
    from PIL import Image as Pil
    from PIL import UnidentifiedImageError

    empty = len(image.data) == 0 if image.data is not None else image.path is not None and _is_empty(image.path)
    if empty:
        return "is empty."
    if isinstance(error, UnidentifiedImageError):
        return f"is no image that can be read (formats: {', '.join(FORMATS)})."
    if isinstance(error, Pil.DecompressionBombError):
        return f"has more than {2 * MAX_PIXELS:,} pixels, which Pillow refuses."
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read: {error.strerror}."
    return f"is damaged: {first_line(error)}."


def _is_empty(path: str) -> bool:
    try:
        return os.stat(path).st_size == 0
    except OSError:
        return False
