"""Small pictures of the images that prompts show, as `data:` URIs: the page stands alone."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from importlib.util import find_spec

from weft.data.image_columns import Image
from weft.data.image_files import Checks, pixels
from weft.errors import UserError

_SIDE = 112  # pixels at most
_MOST = 6  # of one prompt
_KEPT = 512


def pictures(names: object) -> list[dict[str, str]]:
    """The first images of a prompt: name and src, which is empty for one that is no file here. names: as runs record
    them, which anybody may have written."""
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [{"name": name, "src": _source(name)} for name in listed[:_MOST]]


@lru_cache(_KEPT)
def _source(path: str) -> str:
    if find_spec("PIL") is None:
        return ""
    try:
        image, _ = pixels(Image(path=path), "image", Checks())
    except UserError:
        return ""
    image.thumbnail((_SIDE, _SIDE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
