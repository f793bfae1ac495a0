"""Thumbnails of the images of prompts as `data:` URIs, which keep the page self-contained."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from importlib.util import find_spec

from weft.data.image_columns import Image
from weft.data.image_files import ImageChecks, load_pixels
from weft.errors import UserError

_SIDE = 112  # largest width and height in pixels
_MAX_THUMBNAILS = 6  # thumbnails of one prompt
_CACHED = 512


def pictures(names: object) -> list[dict[str, str]]:
    """The name and the `src` URI of the first images of a prompt; `src` is "" if there is no such image file. names:
    from a run's records, which are not trusted."""
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [{"name": name, "src": _source(name)} for name in listed[:_MAX_THUMBNAILS]]


@lru_cache(_CACHED)
def _source(path: str) -> str:
    if find_spec("PIL") is None:
        return ""
    try:
        image, _ = load_pixels(Image(path=path), "image", ImageChecks())
    except UserError:
        return ""
    image.thumbnail((_SIDE, _SIDE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
