"""Reading files that others wrote, after a check of their type, so that no read can block; JSON files as objects; and
links to files that outlive their folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import UserError, first_line
from weft.strict_json import is_deeper

LOCK = "lock"  # a file in RUN, which contains the id of the process that has locked it (flock)

_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}  # fmt: skip
_DEEPEST = 100  # levels of JSON


def regular_file(path: Path, purpose: str) -> Path:
    """The path, if it leads to a regular file. Raises UserError otherwise: opening a FIFO or a device may block, or
    read without end. purpose: the kind of file that it should be, with its article."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_not(path, "a loop of symbolic links", purpose) from error
        raise UserError(f"{path}: cannot be opened: {error.strerror}.") from error
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise UserError(f"{str(path)!r} cannot be a file name ({error}): write the path of {purpose}.") from error
    if kind != stat.S_IFREG:
        raise _is_not(path, _KINDS.get(kind, "no regular file"), purpose)
    return path


def _is_not(path: Path, kind: str, purpose: str) -> UserError:
    return UserError(f"{path}: is {kind}, not {purpose}: replace it by {purpose}.")


def read_object(path: Path, purpose: str) -> dict[str, Any]:
    """The JSON object in a file. purpose: as in `regular_file`. Raises UserError if there is none."""
    try:
        content = json.loads(regular_file(path, purpose).read_text(encoding="utf-8"))
        if is_deeper(content, _DEEPEST - 1):  # values are a level, too
            raise RecursionError
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise UserError(f"{path}: is nested too deeply to be read. Fetch or write it again.") from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {first_line(error)}. Fetch or write it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: its JSON is {type(content).__name__}, not an object. Fetch or write it again.")
    return content


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_own_file(name: str) -> bool:
    """Whether a name is a plain file name, which cannot lead out of its folder."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


# Files of a model that transformers or weft reads.
_OF_MODELS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.safetensors")
_GENERATION = "generation_config.json"


def check_folder(path: str) -> None:
    """Raise UserError unless the files of a local model folder are regular and its configs are valid JSON objects.
    Other paths are not checked."""
    folder = Path(path)
    if not folder.is_dir():
        return
    for file in sorted(file for pattern in _OF_MODELS for file in folder.glob(pattern)):
        regular_file(file, "a file of a model")
    if (folder / "config.json").exists():
        check_counts(read_object(folder / "config.json", "the config of a model"), path)
    if (folder / _GENERATION).exists():
        ends = read_object(folder / _GENERATION, "the config of generation").get("eos_token_id")
        if not all(type(token) is int for token in (ends if isinstance(ends, list) else [ends]) if token is not None):
            raise UserError(f"{folder / _GENERATION}: eos_token_id is {ends!r}; it must be a token id, or a list.")


# Modules and labels are created one by one: a config with a billion of them would fill the memory.
# Doge names 16,384 experts, also where it builds none.
_COUNTS = {
    re.compile(r"(layers?|depths?|blocks?)$"): 1_000,
    re.compile(r"experts$"): 100_000,
    re.compile(r"num_labels$"): 1_000_000,
}


def check_counts(config: Mapping[str, Any], path: str) -> None:
    """Raise UserError if the config of the model at `path` has a count that is larger than in any existing model."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value, path)
        limit = next((limit for names, limit in _COUNTS.items() if names.search(str(name))), None)
        if limit is not None and type(value) is int and value > limit:
            raise UserError(
                f"model.path: {path}: config.json: {name} is {value}, and no model has over {limit:,}. Fetch it again."
            )


def link_files(folder: Path, files: Iterable[Path], into: Path) -> None:
    """Create hard links in `into` to files of `folder`, so that they outlive it; symbolic links where hard ones are
    impossible. files: relative to `folder`. Raises FileNotFoundError if a file is gone."""
    into.mkdir(parents=True)
    for file in files:
        target = into / file
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / file, target)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without hard links
            target.symlink_to((folder / file).resolve(strict=True))
