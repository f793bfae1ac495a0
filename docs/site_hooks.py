"""Hooks of mkdocs: examples and benchmarks that pages link to are part of the site, as text; fences have a language."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *```\w+) [^`\n]+$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./\.\./((?:examples|benchmarks)/[\w./-]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds each file that a page links to as source/NAME.txt, which browsers show."""
    from mkdocs.structure.files import File

    texts = [page.content_string for page in files.documentation_pages()]
    for name in sorted({name for text in texts for name in LINK.findall(text)}):
        files.append(File.generated(config, f"source/{name}.txt", content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to those files, and fences without what tests read after the language (```json file=chat.jsonl)."""
    markdown = FENCE.sub(r"\1", markdown)
    return LINK.sub(r"](../source/\1.txt)", markdown)
