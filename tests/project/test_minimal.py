"""`weft sft` of JSONL with nothing installed but what pyproject.toml requires, and what each extra is named for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.cases import write_small_job
from weft.errors import how_to_install

ROOT = Path(__file__).parents[2]
EXTRAS = ("accelerate", "datasets", "math_verify", "mlflow", "peft", "pyarrow", "ray", "tensorboard")


def required(name: str, names: set[str]) -> set[str]:
    """The names of a distribution and all that it requires here, without extras."""
    names.add(name)
    for text in requires(name) or []:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower().replace("_", "-") not in names:
            required(requirement.name.lower().replace("_", "-"), names)
    return names


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has weft's requirements and no others: links to those that are installed."""
    folder = tmp_path_factory.mktemp("site")
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names: set[str] = set()
    for text in dependencies:
        required(Requirement(text).name, names)
    for name in names:
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            source, link = Path(str(package.locate_file(top))), folder / top
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder


def weft(bare: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`weft words` by a Python that sees those packages only."""
    return python(bare, folder, "from weft.cli import entry; entry()", *words)


def python(bare: Path, folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    paths = os.pathsep.join([str(ROOT), str(bare)])
    start = f"import sys; sys.path[:0] = {paths.split(os.pathsep)!r}; {program}"
    return subprocess.run(
        [sys.executable, "-S", "-c", start, *words],
        cwd=folder, env={**environment, "PYTHONPATH": paths, "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_job(tmp_path_factory.mktemp("minimal"))


WORDS = ("sft", "model.path=model", "data.path=chat.jsonl", "step.documents=2", "step.max_tokens_per_device=64")


def test_the_bare_environment_has_no_extras(bare: Path) -> None:
    assert not {name for name in EXTRAS if (bare / name).exists()}
    assert (bare / "torch").exists() and (bare / "transformers").exists()
    assert not (bare / Path(sysconfig.get_path("purelib")).name).exists()


def test_sft_of_jsonl(bare: Path, folder: Path) -> None:
    done = weft(bare, folder, *WORDS, "train.epochs=1", "run.dir=run", "--nproc", "1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2


MISSING = [
    ((*WORDS, "data.path=rows.parquet"), "pyarrow", "data"),
    ((*WORDS, "data.path=someone/rows"), "datasets", "data"),
    ((*WORDS, "track.report_to=[tensorboard]"), "tensorboard", "track"),
    (("rl", "model.path=model", "data.path=chat.jsonl", "rl.reward=[exact_match]"), "ray", "rl"),
]


@pytest.fixture(scope="module")
def refused(bare: Path, folder: Path) -> list[str]:
    """What each command of MISSING prints to standard error, one after another in one process."""
    (folder / "rows.parquet").write_bytes(b"PAR1")
    program = (
        f"from weft.cli import main\nfor words in {[words for words, _, _ in MISSING]!r}:\n"
        "    print(f'status {main(list(words))}', file=sys.stderr)\n"
    )
    done = python(bare, folder, program)
    assert done.stderr.count("status ") == done.stderr.count("status 2\n"), done.stderr + done.stdout
    return done.stderr.split("status 2\n")[:-1]


@pytest.mark.parametrize("number", range(len(MISSING)), ids=[package for _, package, _ in MISSING])
def test_what_is_missing_is_named_with_its_extra(number: int, refused: list[str]) -> None:
    assert len(refused) == len(MISSING)
    _, package, extra = MISSING[number]
    assert how_to_install(package, extra) in refused[number] and "Traceback" not in refused[number]


def texts() -> list[tuple[str, str]]:
    """(path, content) of every text in the repository but this file."""
    folders = ("weft", "docs", "examples", "benchmarks", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".html", ".ipynb", "Makefile", "Dockerfile")
    chosen = sorted(file for file in files if file.name.endswith(kinds) and file != Path(__file__) and file.is_file())
    return [(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in chosen]


def index_names(text: str) -> set[str]:
    """The names that the `pip install` commands of a text look up on the index."""
    names: set[str] = set()
    for command in re.findall(r"pip3? install ([^`\n;#:)]*)", text):
        words = (word.strip("'\",. ") for word in command.split())
        names |= {re.split(r"[\[<>=~!]", word)[0].lower().replace("_", "-") for word in words if word[:1].isalpha()}
    return names


def test_nothing_says_to_install_what_the_index_calls_weft() -> None:
    assert index_names("`pip install 'weft[rl]'`, or pip install -U weft==1") == {"weft"}
    extras = "|".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    wrong = [name for name, text in texts() if index_names(text) & {"weft", project()["name"]}]
    wrong += [name for name, text in texts() if re.search(rf"weft\[['\"]?({extras})\b", text)]
    assert wrong == [] and len(texts()) > 100


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_the_distribution_has_a_name_of_its_own_and_the_command_stays() -> None:
    assert str(project()["name"]).startswith("weft-") and project()["scripts"] == {"weft": "weft.cli:entry"}


def test_messages_say_how_to_install_by_one_function() -> None:
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    package = {name: text for name, text in texts() if name.startswith("weft/")}
    assert [name for name, text in package.items() if "'.[" in text] == ["weft/errors.py"]
    named = set().union(*(re.findall(r"how_to_install\(.*?['\"](\w+)['\"]\)", text) for text in package.values()))
    named |= set().union(*(re.findall(r"import_extra\([^,]+, \"(\w+)\"", text) for text in package.values()))
    assert {"rl", "data", "lora", "vision", "video", "remote"} <= named <= set(extras)
    assert how_to_install("math-verify>=0.8", "rl").startswith("pip install 'math-verify>=0.8', or ")
