"""A check that the HuggingFace hub is in reach: without a network its client would retry for most of a minute."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache

from weft.config.paths import near_names
from weft.errors import UserError

_SECONDS = 5.0


def check_model_is_there(path: str) -> None:
    """Raise UserError if model.path is no folder, is not in the hub's cache, and the hub is out of reach. Skipped in
    offline mode, in which the client fails at once, and with a proxy."""
    if Path(path).exists() or constants.HF_HUB_OFFLINE or getproxies():
        return
    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"model.path {path} is no folder here and not in the hub's cache, and {hub.hostname} cannot be reached "
            f"({error.strerror or error}): name a folder, or fetch it where there is a network."
            f"{near_names(Path(path), folders=True)}"
        ) from error
