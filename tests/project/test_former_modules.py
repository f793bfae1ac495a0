"""Import paths that the docs once named lead to the modules that are there now."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

from weft.former_modules import FORMER_MODULES


def test_former_modules_are_the_present_ones() -> None:
    for name, present in FORMER_MODULES.items():
        module = import_module(name)
        if present is not None and "vllm" not in name:
            assert module is import_module(present), name
            assert module.__name__ == present and module.__spec__ is not None and module.__spec__.name == present


def test_a_program_written_with_former_names_runs() -> None:
    program = """
from weft.cluster.process import join
from weft.engine.document import Document
from weft.engine.plan import DocumentMeta, plan_step
from weft.objectives.base import Batch, Terms
from weft.objectives.cross_entropy import CrossEntropy
from weft.optim.schedule import learning_rate
from weft.rl.builtin_rewards import completion_text
from weft.sharding.walker import walk
import weft.engine.losses as losses
assert CrossEntropy is losses.CrossEntropy and Terms is losses.LossOutput
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_unknown_modules_stay_unknown() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import weft.objectives.unknown"], capture_output=True, text=True, timeout=300
    )
    assert "No module named 'weft.objectives.unknown'" in done.stderr
