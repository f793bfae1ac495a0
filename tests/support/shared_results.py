"""Results that every run of the suite computes once, not once in each process: they are files of one folder.

Checks of an architecture (`once_per_process` of weft/engine/selfcheck/architecture.py) are functions of a config and of
the code; a planted bug is part of the key. Errors are not kept. A process that drops its results (`forget_checks`),
because code is replaced in it, shares none until its next case or test.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from tests.support.replacements import replacements
from weft.engine.selfcheck import architecture
from weft.models import hf
from weft.models.families import FAMILIES

FOLDER = "WEFT_TESTS_SHARED"  # a variable of the environment: the folder of this run of the suite
_OF_CHECKS = ("weft.engine", "weft.models", "weft.ops", "weft.parallel", "transformers.models")  # packages


class SharedResults(dict[tuple[Any, ...], Any]):
    """The results of a process. shares: whether it reads and writes files."""

    shares = True

    def clear(self) -> None:
        """Called by `forget_checks`."""
        super().clear()
        self.shares = False


def share_checks() -> None:
    """Share the results of checks that this process and its forks run from now on."""
    if not isinstance(architecture.results, SharedResults):
        architecture.results, architecture.compute_result = SharedResults(), compute_result
    architecture.results.shares = True


def compute_result(config: PretrainedConfig, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """In place of weft's own: the result of another process, if there is one and nothing is replaced here."""
    folder, results = os.environ.get(FOLDER), architecture.results
    shares = isinstance(results, SharedResults) and results.shares and shared(config) and nothing_replaced()
    if folder is None or not shares:
        return compute()
    hf.register_kernels()  # which checks do, too
    return result_of_file(Path(folder), repr(key), compute)


def shared(config: PretrainedConfig) -> bool:
    """Whether results are a file's: of transformers' own classes, but of those for which a check may register code in
    its process."""
    registers = config.get_text_config().model_type not in FAMILIES and not hf.uses_attention_interface(config)
    return type(config).__module__.startswith("transformers.models.") and not registers


def result_of_file(folder: Path, key: str, compute: Callable[[], Any]) -> Any:
    """The result that the folder has for this key; else compute it, while other processes wait."""
    path = folder / hashlib.sha256(key.encode()).hexdigest()
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a process that dies releases it
        file.seek(0)
        if content := file.read():
            return pickle.loads(content)
        result = compute()
        with suppress(pickle.PicklingError, TypeError, AttributeError):
            file.write(pickle.dumps(result))
        return result


def nothing_replaced() -> bool:
    """Whether no test has replaced code that checks run in this process."""
    return not any(replacements(*_OF_CHECKS))
