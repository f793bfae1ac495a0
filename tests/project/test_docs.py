"""Every command of the docs is run, on models and data so small that it takes a second; what cannot run says why."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.test_house import HOUSE
from tests.support.docs_runner import Block, blocks, commands, run
from tests.support.local_rl import local_actors
from tests.support.toy_tokenizers import byte_tokenizer, chat
from tests.support.zoo import tiny_config
from weft import cli
from weft.config.commands import schema_of
from weft.config.load import load_config
from weft.config.migrate.trainer import TABLES
from weft.config.rl_schema import RlAlgorithm
from weft.models import hf
from weft.recipes import rl
from weft.rl.rewards.builtin import BUILT_IN

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMING_FROM = [ROOT / f"docs/coming-from/{trainer.name}.md" for trainer in TABLES.trainers]
RUNNABLE = [page for page in PAGES if any(block.words.startswith("run") for block in blocks(page))]
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B")


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the docs call Qwen/Qwen3-0.6B, as a folder: a model of that name on the hub is never asked for."""
    path = tmp_path_factory.mktemp("models")
    byte_tokenizer().save_pretrained(path)
    config = tiny_config("qwen3", vocab_size=264, max_position_embeddings=4096)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path)
    return path


@pytest.fixture
def workplace(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))  # modules of the pages are found here, and nowhere else later
    sys.modules.pop("my_losses", None)  # another page's
    for name in MODELS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(models)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    rows = [chat(("user", f"{n} + {n}?"), ("assistant", str(2 * n))) for n in range(16)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=label)
def test_the_commands_of_a_page_run(page: Path, workplace: Path) -> None:
    for block in blocks(page):
        run(block, workplace)


@pytest.mark.slow
def test_the_cell_of_a_notebook_that_starts_reinforcement_learning_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands; threads of this process are in place of Ray's actors."""
    (block,) = [block for block in blocks(ROOT / "docs/how-to/notebook.md") if "weft.rl(" in block.text]
    space: dict[str, Any] = {"__name__": "__main__"}
    monkeypatch.setattr(rl, "open_actors", local_actors)
    exec(compile(block.text, "notebook.md", "exec"), space)
    run = space["run"]
    assert [line["step"] for line in run.metrics] == list(range(1, 21)) and len(run.rollouts) == 20
    assert {"rewards/is_right/mean", "rewards/length/mean"} <= run.metrics[-1].keys()
    assert all(line["rewards/failed"] == 0 for line in run.metrics)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_block_of_commands_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("bash", "python"):
            assert re.match(r"run\b|skip: \w+|file=\S+", block.words), f"{label(page)}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{label(page)}: {target}"


def test_the_index_leads_to_every_page() -> None:
    """Directly, or as one of a folder whose README it names. Pages but three are in folders by kind."""
    docs = ROOT / "docs"
    assert {page.stem for page in docs.glob("*.md")} == {"index", "tutorial", "architecture"}
    assert "(docs/index.md)" in (ROOT / "README.md").read_text()
    text = (docs / "index.md").read_text()
    for page in (docs / label for label in map(str, (p.relative_to(docs) for p in PAGES[1:])) if label != "index.md"):
        named = [page.relative_to(docs), *(parent / "README.md" for parent in page.relative_to(docs).parents)]
        assert any(f"({name})" in text for name in named), page


def test_the_tests_that_a_page_names_are_there() -> None:
    for page in PAGES:
        for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), (
                f"{label(page)}: {file}::{test}"
            )


NOT_RUN = re.compile(
    r"\b(?:not|never|nothing|no)\b[^.|]{0,60}\b(?:run|compared|measured|tried)\b[^.|]{0,40}\b(?:GPU|accelerator|CUDA)"
    r"|\b(?:GPU|accelerator|CUDA)s?\b[^.|]{0,60}\b(?:not|never) (?:been )?(?:run|compared|measured|tried)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "gpu.md"], ids=label)
def test_that_nothing_ran_on_a_gpu_is_said_by_one_page(page: Path) -> None:
    """Others lead there, so that none is left behind when it changes."""
    for paragraph in page.read_text().split("\n\n"):
        if NOT_RUN.search(" ".join(paragraph.split())):
            assert "benchmarks/gpu.md" in paragraph, f"{label(page)}: {paragraph}"


def test_the_first_page_and_the_table_of_findings_say_of_gpus_what_the_page_does() -> None:
    status = "weft has run on one GPU"  # until `make gpu` has run on two
    assert status in (ROOT / "docs/benchmarks/gpu.md").read_text() and status in (ROOT / "README.md").read_text()
    rows = re.findall(r"^\|.*\| (.*?) \|$", (ROOT / "docs/explanation/cuda.md").read_text(), re.MULTILINE)
    cells = {row for row in rows if row not in ("run on a GPU", "---")}
    assert cells == {"yes", "no"}


# ---------------------------------------------------------------- the runner itself


def block_of(text: str, tmp_path: Path) -> Block:
    page = tmp_path / "page.md"
    page.write_text(text)
    (block,) = blocks(page)
    return block


def test_a_command_that_fails_fails_the_page(workplace: Path) -> None:
    block = block_of("```bash run\nweft sft model.path=nowhere/at/all data.path=chat.jsonl\n```\n", workplace)
    with pytest.raises(AssertionError, match="ended with 2"):
        run(block, workplace)
    with pytest.raises(AssertionError, match="ended with 1"):
        run(block_of("```bash run\nls chat.jsonl\nfalse  # no\n```\n", workplace), workplace)


def test_lines_are_joined_and_comments_left_out(workplace: Path) -> None:
    block = block_of("\n```bash run\n# first\nls -l \\\n    chat.jsonl  # here\n\nls\n```\n", workplace)
    assert block.line == 2
    assert commands(block) == ["ls -l      chat.jsonl", "ls"]


# ---------------------------------------------------------------- what weft makes of each page's configs


@pytest.mark.parametrize("page", COMING_FROM, ids=label)
def test_what_stands_beside_a_foreign_config_is_a_config(page: Path, workplace: Path) -> None:
    """The comments of the example: keys as `section: {key: value}`, or section.key=value beside flags."""
    example = blocks(page)[0]
    lines = re.findall(r"#.*?((?:\w+: \{[^{}]*\}(?:, )?)+)", example.text)
    overrides = []
    for text in lines:
        overrides += [f"{section}={{{inside}}}" for section, inside in re.findall(r"(\w+): \{([^{}]*)\}", text)]
    overrides += re.findall(r"(?<![\w-])(\w+\.\w+=[^\s,]+)", example.text)
    assert len(overrides) >= 5, page
    overrides = [re.sub(r"(?<=model=\{)path: [\w./-]+", "recompute: none", text) for text in overrides]
    overrides = [re.sub(r"(?<=data=\{)path: [\w./-]+", "shuffle: true", text) for text in overrides]
    keys_known = [text for text in overrides if not text.startswith(("lora=", "eval=", "model.path=", "data.path="))]
    schema: Any = schema_of([re.split(r"[.=]", text)[0] for text in keys_known])
    config = load_config([], ["model.path=Qwen/Qwen3-0.6B", "data.path=chat.jsonl", *keys_known], schema)
    assert config.step.documents or config.step.tokens


def test_every_command_and_every_built_in_reward_is_in_the_docs() -> None:
    """A command in the README or a page; a reward, with each of its arguments, in the table of the page on rewards."""
    text = "".join(page.read_text() for page in PAGES)
    assert {name for name in cli.COMMANDS if not re.search(rf"\bweft {name}\b", text)} == set()
    page = (ROOT / "docs/how-to/write-a-reward.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE))
    assert rows.keys() == BUILT_IN.keys()
    for name, function in BUILT_IN.items():
        common = {"completions", "completion_ids"}
        arguments = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        assert all(f"`{argument}`" in rows[name] for argument in arguments if argument not in common), name
    described = next(field.metadata["help"] for field in fields(RlAlgorithm) if field.name == "reward")
    assert all(re.search(rf"\b{name}\b", described) for name in BUILT_IN)


def test_the_commands_exist() -> None:
    """A command that the docs name is one of weft's."""
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash":
                for command in commands(block):
                    name = re.match(r"weft ([\w-]+)", command)
                    assert name is None or name[1] in cli.COMMANDS, f"{label(page)}: {command}"


def test_the_table_of_folders_names_what_there_is() -> None:
    """Rows of docs/architecture.md: the folders in the order of imports (project/test_house.py), and files of
    theirs."""
    rows = re.findall(r"^\| `(\w+)/` \| (.*?) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert [folder for folder, _ in rows] == [name for name in HOUSE if (ROOT / "weft" / name).is_dir()]
    named = {(folder, file) for folder, text in rows for file in re.findall(r"`(\w+\.py)`", text)}
    assert {(folder, file) for folder, file in named if not any((ROOT / "weft" / folder).rglob(file))} == set()


def test_the_walks_name_what_there_is() -> None:
    """docs/architecture.md follows a document and a weight: each `file.py:name` exists, and no folder is entered more
    than twice."""
    text = (ROOT / "docs/architecture.md").read_text()
    walks = text[text.index("## Two walks") : text.index("## A step, from documents")].split("A weight, from its file")
    for walk in walks[0], walks[1]:
        assert len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) == 10
        steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", walk)
        for file, name in steps:
            tree = ast.parse((ROOT / "weft" / file).read_text())
            for part in name.split("."):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
                tree = next(node for node in tree.body if isinstance(node, kinds) and node.name == part)
        folders = [file.rpartition("/")[0] for file, _ in steps]
        entered = [folder for index, folder in enumerate(folders) if index == 0 or folders[index - 1] != folder]
        assert max(map(entered.count, entered)) <= 2, entered


def test_a_loss_weight_is_followed_through_few_files() -> None:
    """docs/explanation/loss-weight-to-gradient.md: each file and name exists; twelve files, each folder once."""
    text = (ROOT / "docs/explanation/loss-weight-to-gradient.md").read_text()
    files = re.findall(r"^\d+\. `([\w/]+\.py)(?::[\w.]+)?`", text, re.MULTILINE)
    assert len(files) == len(set(files)) == 12
    for file, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        tree = ast.parse((ROOT / "weft" / file).read_text())
        for part in name.split("."):
            kinds = (ast.FunctionDef, ast.ClassDef)
            tree = next(node for node in tree.body if isinstance(node, kinds) and node.name == part)
    folders = [file.partition("/")[0] for file in files]
    assert len([a for a, b in pairwise([*folders, ""]) if a != b]) == len(set(folders)), folders
