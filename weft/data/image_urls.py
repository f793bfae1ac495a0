"""Images of URLs, fetched once while the data are read, where data.fetch_images allows it."""

from __future__ import annotations

import time
from dataclasses import replace
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from weft.data.image_columns import Image
from weft.errors import BadRowError, first_line
from weft.version import __version__

_SECONDS = 30.0  # without a byte
_MOST_BYTES = 64 << 20
_TRIES = 3
_HANDLERS = (
    ProxyHandler, HTTPHandler, HTTPSHandler, HTTPRedirectHandler, HTTPErrorProcessor, HTTPDefaultErrorHandler,
)  # fmt: skip


def fetched(image: Image, where: str, allowed: bool) -> Image:
    """The image with its bytes, where it is a URL. allowed: as data.fetch_images. Raises BadRowError."""
    if image.url is None or image.data is not None:
        return image
    if not allowed:
        raise BadRowError(
            f"{where} ({image.url}): is a URL, which is fetched only with data.fetch_images=true. Set that, or name a "
            "file."
        )
    for attempt in range(_TRIES):
        try:
            return replace(image, data=_read(image.url))
        except HTTPError as error:
            reason = f"the server answers {error.code} ({error.reason})"
            if error.code < 500:
                break
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = first_line(error)
        if attempt + 1 < _TRIES:
            time.sleep(attempt + 1.0)
    raise BadRowError(f"{where} ({image.url}): cannot be fetched: {reason}.")


def _read(url: str) -> bytes:
    """Only http and https are spoken, also after a redirection."""
    opener = OpenerDirector()
    for handler in _HANDLERS:
        opener.add_handler(handler())
    with opener.open(Request(url, headers={"User-Agent": f"weft/{__version__}"}), timeout=_SECONDS) as answer:
        data: bytes = answer.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return data
