"""URLs of object stores in the syntax of fsspec (s3://bucket/x): whether a path is a URL, and whether its client is
installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from weft.errors import how_to_install

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.")
# Protocol -> the package that fsspec needs for it.
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "adl": "adlfs", "oss": "ossfs", "oci": "ocifs", "http": "aiohttp", "https": "aiohttp", "sftp": "paramiko",
    "ssh": "paramiko", "hdfs": "pyarrow", "webhdfs": "requests", "smb": "smbprotocol",
}  # fmt: skip


class LocalCopy(str):
    """The local path of a copy of a URL. remote: the URL, which configs and messages contain."""

    remote: str

    def __new__(cls, local: str, remote: str) -> LocalCopy:
        copy = super().__new__(cls, local)
        copy.remote = remote
        return copy

    def __reduce__(self) -> tuple[type[LocalCopy], tuple[str, str]]:
        return LocalCopy, (str(self), self.remote)


def named(path: str) -> str:
    """The name of a path for the user: for a local copy, its URL."""
    return path.remote if isinstance(path, LocalCopy) else path


def is_url(path: str | None) -> bool:
    """Whether a path is on an object store."""
    return path is not None and _URL.match(path) is not None


def url_problem(key: str, url: str) -> str:
    """The problem of a URL, or "": an unknown protocol, or a package that is not installed."""
    match = _URL.match(url)
    assert match is not None
    protocol = match[1].lower()
    package = _PACKAGES.get(protocol)
    if package is not None:
        if find_spec(package) is not None:
            return ""
        install = how_to_install(package, "remote") if package == "s3fs" else f"pip install {package}"
        return f"{key} {url}: {protocol}:// needs the package {package}, which is not installed: {install}"
    from fsspec.registry import available_protocols, get_filesystem_class

    if protocol not in available_protocols():
        stores = "s3://, gs://, az://, file:// and other protocols of fsspec"
        return f"{key} {url}: fsspec has no protocol {protocol}://: write a URL with {stores}, or a local path."
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        return f"{key} {url}: {protocol}:// cannot be used: {error}."
    return ""


# Keys with a path that may be a URL, and with lists of sources that have such paths.
_PATHS = (
    "model.path", "lora.path", "data.path", "data.chat_template", "eval.path", "eval.prompts", "reference.path",
    "critic.path",
)  # fmt: skip
_SOURCES = ("data.sources", "eval.sources")


def map_paths(config: Any, change: Callable[[str, str], str]) -> Any:
    """The config with each path that may be a URL, except run.dir, replaced by `change(key, path)`."""
    for key in (*_PATHS, *_SOURCES):
        section, _, leaf = key.partition(".")
        part: Any = getattr(config, section, None)
        value = getattr(part, leaf, None)
        if isinstance(value, str):
            changed: Any = change(key, value)
        elif key in _SOURCES and value is not None:
            changed = tuple(replace(source, path=change(key, source.path)) for source in value)
        else:
            continue
        config = replace(config, **{section: replace(part, **{leaf: changed})})
    return config


def uses_stores(config: Any) -> bool:
    """Whether a config contains a URL."""
    paths = [config.run.dir] if config.run.dir is not None else []

    def note(key: str, path: str) -> str:
        paths.append(path)
        return path

    map_paths(config, note)
    return any(is_url(named(path)) for path in paths)
