"""Files around the package that outsiders use: the site's table of contents, workflows, the version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import site_hooks
from weft.version import __version__

ROOT = Path(__file__).parents[2]


def pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for child in (entry.values() if isinstance(entry, dict) else entry) for page in pages(child)]


def test_the_site_leads_to_every_page_once() -> None:
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_fences_and_links_to_files_beside_docs_become_the_sites() -> None:
    page = "```json file=chat.jsonl\n{}\n```\n[an example](../../examples/chat.jsonl)\n```\n```yaml skip: a part\n"
    assert site_hooks.on_page_markdown(page) == (
        "```json\n{}\n```\n[an example](../source/examples/chat.jsonl.txt)\n```\n```yaml\n"
    )


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile(workflow: Path) -> None:
    text = workflow.read_text()
    targets = re.findall(r"make ([a-z-]+)", text) + re.findall(r"target: \[(.*)\]", text)
    of_makefile = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target.strip() for names in targets for target in names.split(",")}
    assert named and named <= of_makefile
    assert yaml.safe_load(text)["jobs"]


def test_one_version() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()
