"""Checks that the local files named in a config exist. It downloads nothing and does not read the files."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.config.checks import IMPORT_PATH
from weft.config.conditions import ENVIRONMENT_SCHEMES, REWARD_MODEL
from weft.config.rl_schema import NEEDS_MATH_VERIFY
from weft.config.sources import DATA_SUFFIXES, is_pattern, looks_like_hub_dataset, matching_files
from weft.config.urls import is_url, url_problem
from weft.config.yaml12 import override
from weft.errors import UserError
from weft.files import regular_file
from weft.importing import MAIN, named_problem


def check_paths(config: Any, explicit: Mapping[str, str] | None = None, *, weights: bool = True) -> list[str]:
    """The problems of paths in a config, as messages. explicit: key -> its position in a file, for keys that the user
    set. weights: whether model.path must already contain weights."""
    location = explicit or {}
    prompts = getattr(config.eval, "prompts", None)  # only `weft sft` has the key
    prompts = prompts if isinstance(prompts, str) else None
    data = _data_paths(config)
    named = [("model.path", config.model.path), ("lora.path", config.lora.path), ("run.dir", config.run.dir)]
    named += [("data.chat_template", config.data.chat_template), ("eval.prompts", prompts)]
    named += [("model.dcp_weights", config.model.dcp_weights)]
    written = [("run.dir", config.run.dir), ("data.cache", config.data.cache)]
    problems = [(key, problem) for key, path in written if (problem := _variable_problem(key, path))]
    problems += list(_unnameable([*data, *((key, path) for key, path in named if path is not None)]))
    if not problems:
        problems = [(key, data_problem(key, path)) for key, path in data if not is_url(path)]
        if prompts is not None and not is_url(prompts):
            problems.append(("eval.prompts", _prompts_problem(prompts)))
        if not is_url(config.data.chat_template):
            problems.append(("data.chat_template", _template_problem(config.data.chat_template)))
        if not is_url(config.model.path):
            problems.append(("model.path", _model_problem(config, weights)))
        problems.append(("model.dcp_weights", _weights_problem(config.model.dcp_weights)))
        if not is_url(config.lora.path):
            problems.append(("lora.path", _adapter_problem(config.lora.path)))
        problems += [(key, named_problem(path, key)) for key, path in _import_paths(config)]
        problems.append(("rl.reward", _extra_problem(config)))
    return [f"{location[key]}: {text}" if key in location else text for key, text in problems if text]


def _data_paths(config: Any) -> list[tuple[str, str]]:
    """(key, path) of all data in the config."""
    data = [("data.path", config.data.path), *(("data.sources", source.path) for source in config.data.sources or ())]
    data += [("eval.path", config.eval.path), *(("eval.sources", s.path) for s in config.eval.sources or ())]
    return [(key, path) for key, path in data if path is not None]


def _import_paths(config: Any) -> list[tuple[str, str]]:
    """(key, path) of the user's functions and classes."""
    named = [("optimizer.name", config.optimizer.name), ("train.loss", config.train.loss)]
    if (rl := getattr(config, "rl", None)) is not None:
        named += [("rl.reward", path) for path in rl.reward if not path.startswith(REWARD_MODEL)]
        named += [(f"rl.{key}", getattr(rl, key)) for key in ("advantage", "policy_loss")]
        scheme, _, game = (rl.environment or "").partition(":")
        is_path = scheme not in ENVIRONMENT_SCHEMES
        named.append(("rl.environment", rl.environment if is_path else game if IMPORT_PATH.fullmatch(game) else None))
    paths = [(key, path) for key, path in named if path is not None and ("." in path or ":" in path)]
    paths += [("model.imports", f"{module}:") for module in config.model.imports]
    return [(key, path) for key, path in paths if path.partition(":")[0] != MAIN]


def _variable_problem(key: str, path: str | None) -> str:
    """The problem of a path with an environment variable in it, or "". The path need not exist."""
    if path is None or not re.search(r"\$[{A-Za-z_]", path):
        return ""
    expanded = os.path.expandvars(path)
    write = override(key, expanded) if "$" not in expanded else "the path itself"
    return f"{key} is {path!r}, but weft does not expand variables in a config: write {write}."


def _extra_problem(config: Any) -> str:
    """The message if a built-in reward needs a package that is not installed, or ""."""
    rl = getattr(config, "rl", None)
    if rl is None or "math" not in rl.reward or find_spec("math_verify") is not None:
        return ""
    return f"{NEEDS_MATH_VERIFY}."


def _unnameable(named: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(key, problem) of texts that cannot be the name of a file, for which later checks would raise, and of URLs that
    this machine cannot read."""
    for key, path in named:
        if is_url(path):
            if problem := url_problem(key, path):
                yield key, problem
            continue
        try:
            os.lstat(os.path.expanduser(path))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            yield key, f"{key} {path[:60]!r} cannot be the name of a file ({reason}): write another path."


def holds_weights(folder: Path) -> bool:
    """Whether a model directory contains weight files."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def near_names(file: Path, folders: bool = False) -> str:
    """' Did you mean a/b.yaml?' with similar names in the folder of the missing file, or "". folders: search for
    folders instead of files."""
    if not os.path.isdir(file.parent):
        return f" The folder {file.parent} does not exist."
    entries = (entry for entry in file.parent.iterdir() if not entry.name.startswith("."))
    names = [entry.name for entry in entries if os.path.isdir(entry) == folders and entry.name != file.name]
    close = difflib.get_close_matches(file.name, names, n=3, cutoff=0.5)
    if not close and not folders and file.suffix:  # files of the same type
        close = sorted(name for name in names if Path(name).suffix == file.suffix)[:3]
    return f" Did you mean {' or '.join(str(file.parent / name) for name in close)}?" if close else ""


def _kind_problem(file: Path, purpose: str) -> str:
    """The problem of a path that is not a regular file, or ""."""
    try:
        regular_file(file, purpose)
    except UserError as error:
        return str(error)
    return ""


def _prompts_problem(path: str) -> str:
    if Path(path).expanduser().is_file():
        return ""
    if os.path.lexists(path) and (problem := _kind_problem(Path(path), "a file of prompts")):
        return f"eval.prompts {problem}"
    if path.startswith("["):
        return f'eval.prompts {path} is not a list in YAML: quote each text, as in \'["What is it?", "Why: say it."]\'.'
    near = near_names(Path(path))
    return (
        f"eval.prompts {path} is not a file: write the path of a JSONL or .txt file, or a list of prompts: "
        f"{override('eval.prompts', [path])}.{near}"
    )


def _template_problem(path: str | None) -> str:
    """The problem of a template file, or ""."""
    if path is None or not path.endswith(".jinja") or os.path.lexists(path):
        return ""
    return f"data.chat_template {path} does not exist: write a Jinja file's path, or chatml.{near_names(Path(path))}"


def data_problem(key: str, path: str) -> str:
    """The problem of a data path, or ""."""
    file = Path(path).expanduser()
    if is_pattern(path):
        return "" if matching_files(path) else f"{key} {path}: no file in {Path.cwd()} matches this pattern."
    if file.is_file() or is_saved_dataset(file) or looks_like_hub_dataset(path):
        return ""
    if os.path.lexists(file) and not file.is_dir() and (problem := _kind_problem(file, "a file of data")):
        return f"{key} {problem}"
    if file.is_dir():
        endings = (*DATA_SUFFIXES, *(f"{suffix}.gz" for suffix in DATA_SUFFIXES))
        names = [entry.name for entry in file.iterdir() if entry.name.endswith(endings)]
        inside = sorted(names, key=lambda name: (name.endswith((".txt", ".txt.gz")), name))[:3]  # README.txt last
        hint = f": write one of {', '.join(str(file / name) for name in inside)}" if inside else ""
        hint += f", or {file / ('*' + Path(inside[0]).suffix)} for all" if len(inside) > 1 else ""
        return f"{key} {path} is a folder that datasets' save_to_disk did not write; it must be a file{hint}."
    return (
        f"{key} {path} does not exist; it must be a local file, or a dataset on the hub (owner/name).{near_names(file)}"
    )


def is_saved_dataset(folder: Path) -> bool:
    """Whether save_to_disk of datasets wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _model_problem(config: Any, weights: bool) -> str:
    path = config.model.path
    folder = Path(path)
    if folder.is_dir():
        return _folder_problem(
            folder, weights and config.model.init == "pretrained" and config.model.dcp_weights is None
        )
    if folder.is_file():
        return f"model.path {path} is a file: write the path of the folder that contains it."
    if not _looks_like_a_path(path):
        return ""  # a hub id, which transformers resolves, or reports as missing
    return (
        f"model.path {path} does not exist: write the path of a folder with config.json, or a hub id such as "
        f"Qwen/Qwen3-0.6B.{near_names(folder, folders=True)}"
    )


def _folder_problem(folder: Path, weights: bool) -> str:
    has_config = os.path.lexists(folder / "config.json")  # the code that reads it checks its content
    if not has_config and (folder / "adapter_config.json").is_file():
        return (
            f"model.path {folder} is an adapter, not a model: set lora.path to it and model.path to its base, or "
            f"merge it into its base: weft merge {shlex.quote(str(folder))}."
        )
    if not has_config:
        return f"model.path {folder} contains no config.json, so it is not a HuggingFace model directory."
    if weights and not holds_weights(folder):
        if dcp := next(
            (candidate for candidate in (folder, folder / "dcp") if os.path.lexists(candidate / ".metadata")), None
        ):
            return (
                f"model.path {folder} has its weights in the format of torch.distributed.checkpoint: also set "
                f"{override('model.dcp_weights', str(dcp))}."
            )
        return (
            f"model.path {folder} contains no weights (*.safetensors): download them to this folder, or set "
            "model.init=random to train from scratch."
        )
    return ""


def _weights_problem(path: str | None) -> str:
    """The problem of model.dcp_weights, or "". The code that reads the directory checks its content."""
    if path is None or Path(path).expanduser().is_dir():
        return ""
    if is_url(path):
        return (
            f"model.dcp_weights {path}: weft reads it only from a local or shared file system: copy it there, and set "
            "model.dcp_weights to the copy."
        )
    near = near_names(Path(path), folders=True)
    return f"model.dcp_weights {path} does not exist: write the path of a torch.distributed.checkpoint directory.{near}"


def _adapter_problem(path: str | None) -> str:
    if path is None or os.path.lexists(Path(path) / "adapter_config.json"):
        return ""
    if Path(path).is_dir():
        return (
            f"lora.path {path} contains no adapter_config.json: write the path of an adapter, RUN/checkpoints/step-N."
        )
    return f"lora.path {path} does not exist: write the path of an adapter.{near_names(Path(path), folders=True)}"


def _looks_like_a_path(path: str) -> bool:
    """Whether a text cannot be a hub id (`name` or `org/name`), or its first folder exists here."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or path.startswith((".", "~")):
        return True
    return "/" in path and Path(path).parts[0] != path and Path(Path(path).parts[0]).is_dir()
