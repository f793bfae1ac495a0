"""Names that installed packages give: the example package, installed into a folder, and names that cannot be used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.local_rl import make_task
from weft import plugins
from weft.errors import UserError
from weft.importing import import_named
from weft.inference import standalone
from weft.inference.standalone import Standalone
from weft.recipes.plugins import check_engine, check_environment, check_reward
from weft.rl import algorithms

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package, as pip installs it. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples/plugin", folder / "source")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder / "source")], check=True)
    return folder / "site"


def weft(installed: Path, *words: str, status: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])}
    done = subprocess.run(
        [sys.executable, "-m", "weft", *words], env=env, cwd=installed, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_package_is_installed_and_checked(installed: Path, tmp_path: Path) -> None:
    assert [line.split()[1] for line in weft(installed, "plugins").splitlines()] == [
        "counting",
        "guess",
        "short",
        "sign",
    ]
    task = make_task(tmp_path)
    words = [
        f"model.path={task}/adder", f"data.path={task}/additions.jsonl", "model.init=random", "rl.algorithm=sign",
        "rl.reward=[short, length]", "rl.reward_options={length.longest: 4}", "rollout.engine=counting",
        "rl.prompts_per_step=2", "rollout.max_prompt_tokens=6", "rollout.max_new_tokens=4",
        "step.max_tokens_per_device=64", "data.columns={answer: completion}", "--dry-run",
    ]  # fmt: skip
    shown = weft(installed, "rl", *words)
    assert "advantage: sign" in shown and "counting" in shown and "short" in shown
    message = weft(installed, "rl", *words, "rl.algorithm=sgin", status=2)
    assert "sign" in message


BROKEN = """
[weft.algorithms]
tilted = broken.without:DECLARES
quits = broken.quits:DECLARES
wrong = broken:NOTHING
grpo = broken:NOTHING
[weft.engines]
slow = broken.without:Engine
[weft.environments]
maze = broken.without:Maze
[weft.rewards]
nice = broken.without:nice
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package whose names cannot be used, as pip installs it."""
    folder = tmp_path_factory.mktemp("broken")
    files = {
        "broken/__init__.py": "NOTHING = 3",
        "broken/without.py": "import nothing_of_this_name",
        "broken/quits.py": "raise SystemExit('no licence')",
        "broken-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: broken\nVersion: 0.3\n",
        "broken-0.3.dist-info/entry_points.txt": BROKEN,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_broken_package_is_an_error_of_those_who_name_it(broken: Path, tmp_path: Path) -> None:
    """The error has the package, the entry point and the exception. Other configs do not see it; a list does."""
    task = make_task(tmp_path)
    words = [
        f"model.path={task}/adder", f"data.path={task}/additions.jsonl", "model.init=random", "rl.prompts_per_step=2",
        "rollout.max_prompt_tokens=6", "rollout.max_new_tokens=4", "step.max_tokens_per_device=64", "--dry-run",
        "data.columns={answer: completion}",
    ]  # fmt: skip
    length = ["rl.reward=[length]", "rl.reward_options={length.longest: 4}"]
    named = [
        [*length, "rl.algorithm=tilted"], [*length, "rl.algorithm=quits"], [*length, "rl.algorithm=wrong"],
        [*length, "rl.advantage=tilt"], [*length, "rl.environment=maze"], ["rl.reward=[nice]"],
        [*length, "rollout.engine=slow"],
    ]  # fmt: skip
    program = "import json, sys\nfrom weft.cli import main\nfor words in json.loads(sys.argv[1]): print(main(words))"
    lines = json.dumps([["rl", *words, *length], *(["rl", *words, *more] for more in named), ["plugins"]])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(broken)]), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, lines], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    shown, *errors, listed = re.split(r"^[02]\n", done.stdout, flags=re.MULTILINE)[:-1]
    assert "cannot be" not in shown and "Traceback" not in done.stdout, done.stdout
    missing = "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'. Fix the package"
    expected = [
        f"rl.algorithm: tilted is broken.without:DECLARES of broken 0.3, which {missing}",
        "rl.algorithm: quits is broken.quits:DECLARES of broken 0.3, which cannot be imported: SystemExit: no licence",
        "rl.algorithm: broken:NOTHING of broken 0.3 is not a tuple of objects",
        f"rl.advantage is tilt: it must be one of gae, grpo, .* {missing}",
        f"rl.environment: maze is broken.without:Maze of broken 0.3, which {missing}",
        f"rl.reward: .*nice is broken.without:nice of broken 0.3, which {missing}",
        f"rollout.engine: slow is broken.without:Engine of broken 0.3, which {missing}",
    ]
    for error, pattern in zip(errors, expected, strict=True):
        assert error.startswith("error: ") and re.search(pattern, " ".join(error.split())), error
    assert "grpo is a built-in name; weft does not use broken:NOTHING of broken 0.3, which has the same name" in listed
    assert listed.count("cannot be used: ") == 7 and listed.count("broken 0.3, which cannot be imported") == 5


def test_names_of_algorithms_that_cannot_be_used() -> None:
    """One that weft has, and one that the declarations do not."""
    value = "weft.rl.algorithms.grpo:DECLARES"
    entries = tuple(EntryPoint(name, value, "weft.algorithms") for name in ("again", "grpo"))
    with (
        mock.patch.object(plugins, "plugins", return_value=entries),
        mock.patch.object(algorithms, "plugins", return_value=entries),
    ):
        added, unusable = algorithms._of_packages(algorithms._built_in())
    assert added == [] and "declares no algorithm named again" in unusable["again"]
    beginning = "rl.algorithm: grpo is a built-in name; weft does not use weft.rl.algorithms.grpo:DECLARES of "
    assert unusable["grpo"].startswith(beginning)


@pytest.mark.table
@pytest.mark.slow
def test_the_commands_that_third_parties_run(installed: Path) -> None:
    engine = weft(installed, "engine", "check", "counting")
    assert engine.count("ok ") == 5 and "have the logprobs of plain transformers" in engine
    assert "replied" in weft(installed, "plugins", "environment", "guess", "--row", json.dumps({"secret": 7}))
    assert "rewards depend only on the answers" in weft(installed, "plugins", "reward", "short")
    assert "neither embedded, hf" in weft(installed, "engine", "check", "none", status=2)


# ---------------------------------------------------------------- what the checks find


class Stale(Standalone):
    """Keeps its first weights."""

    def receive(self, *arguments: Any, **options: Any) -> None:
        before = {} if self._weights is None else {name: t.clone() for name, t in self._weights.state.items()}
        super().receive(*arguments, **options)
        assert self._weights is not None
        for name, tensor in before.items():
            self._weights.state[name].copy_(tensor)


class Warmer(Standalone):
    """Reports the logprobs of temperature 1."""

    def generate(self, requests, proceed=None):  # type: ignore[no-untyped-def]
        cold = super().generate(requests, proceed)
        return [
            [c.__class__(c.tokens, tuple(x * 0.8 for x in c.logprobs), c.finish, c.versions) for c in g] for g in cold
        ]


class Batched(Standalone):
    """Its samples depend on how many requests there are."""

    def generate(self, requests, proceed=None):  # type: ignore[no-untyped-def]
        seeded = [r.__class__(r.id, r.tokens, tuple(s + len(requests) for s in r.seeds), r.sampling) for r in requests]
        return super().generate(seeded, proceed)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Stale, r"logprobs differ .* \(version 2\)"),
        (Warmer, "logprobs differ from those of plain transformers"),
        (Batched, "generated alone has other tokens"),
    ],
)
def test_an_engine_that_breaks_a_promise_is_found(kind: type[Standalone], error: str) -> None:
    with (
        mock.patch("weft.recipes.plugins.engine_class", return_value=kind),
        pytest.raises(UserError, match=error),
    ):
        check_engine("broken")


@pytest.mark.parametrize(
    ("name", "error"),
    [("Broken", "nothing here"), ("SilentEnvironment", "returned no reply and was not done")],
)
def test_an_environment_that_breaks_a_promise_is_found(name: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        check_environment(f"tests.support.environments:{name}", {})


def test_a_reward_that_breaks_a_promise_is_found() -> None:
    with pytest.raises(UserError, match="it fails"):
        check_reward("tests.support.reward_functions:as_number", {})


# ---------------------------------------------------------------- names


@pytest.fixture
def given() -> Iterator[None]:
    entries = [
        EntryPoint("short", "one.rewards:short", "weft.rewards"),
        EntryPoint("short", "two.rewards:short", "weft.rewards"),
        EntryPoint("math", "one.rewards:math", "weft.rewards"),
        EntryPoint("gone", "no_such_package:reward", "weft.rewards"),
        EntryPoint("plain", "json:dumps", "weft.engines"),
    ]
    groups = lambda group: tuple(entry for entry in entries if entry.group == group)  # noqa: E731
    with mock.patch.object(plugins, "plugins", groups):
        yield


def test_names_that_cannot_be_used_are_refused(given: None) -> None:
    with pytest.raises(UserError, match=r"one.rewards:short.* and .*two.rewards:short.* both register the name short"):
        import_named("short", "rl.reward")
    assert plugins.plugin("math", "rl.reward", ("math",)) is None  # weft's own is used
    (line,) = plugins.shadowed("rl.reward", ["math", "short"], ("math", "length"))
    assert line.startswith("rl.reward: math is a built-in name; weft does not use one.rewards:math of ")
    with pytest.raises(UserError, match=r"gone is no_such_package:reward .* cannot be imported: ModuleNotFoundError"):
        import_named("gone", "rl.reward")
    with pytest.raises(
        UserError, match=r"plain is json:dumps, which is not a subclass of weft.inference.standalone.Standalone"
    ):
        standalone.engine_class("plain")
