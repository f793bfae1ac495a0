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
_TELLING = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")


def _cached_config(path: str) -> object:
    """A cached file that tells that a hub id was fetched; None if there is none."""
    try:
        cached = (try_to_load_from_cache(path, name) for name in _TELLING)
        return next((file for file in cached if isinstance(file, str)), None)
    except ValueError:  # no hub id
        return None


def check_model_is_there(path: str) -> None:
    """Raise UserError if model.path is no folder, is not in the hub's cache, and the hub is out of reach or
    HF_HUB_OFFLINE forbids it. With a proxy the hub is not tried."""
    if Path(path).exists() or isinstance(_cached_config(path), str):
        return
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"model.path {path} is not a folder here, not in the hub's cache ({constants.HF_HUB_CACHE}), and "
            "HF_HUB_OFFLINE is set: write the path of a folder, or unset HF_HUB_OFFLINE and download the model "
            f"once.{near_names(Path(path), folders=True)}"
        )
    if getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"model.path {path} is not a folder here and not in the hub's cache, and {hub.hostname} cannot be reached "
            f"({error.strerror or error}): write the path of a folder, or download the model where there is a network."
            f"{near_names(Path(path), folders=True)}"
        ) from error
