"""Code that lies in a model's folder is never run, whoever answers transformers' question."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import saved_model
from tests.support.toy_tokenizers import byte_tokenizer
from weft.data.encode import load_tokenizer
from weft.errors import UserError
from weft.launch.options import ChatOptions
from weft.models import hf
from weft.recipes.chat import open_chat

CODE = "import pathlib; pathlib.Path({mark!r}).touch()\nclass Own: pass\n"


def hostile(folder: Path, file: str, auto_map: dict[str, Any], **changes: Any) -> Path:
    """A copy of a small model with an auto_map in one of its files and code that leaves a mark when it is imported."""
    for source in Path(saved_model("llama", vocab_size=264)).iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    byte_tokenizer().save_pretrained(folder)
    mark = folder / "was-run"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **changes, "auto_map": auto_map}))
    return mark


READERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[str], Any]]] = {
    "config": ("config.json", {"AutoConfig": "own.Own"}, {"model_type": "own_type"}, hf.read_config),
    "tokenizer": (
        "tokenizer_config.json", {"AutoTokenizer": [None, "own.Own"]}, {"tokenizer_class": "OwnTokenizer"},
        load_tokenizer,
    ),
    "chat": (
        "config.json", {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}, {"model_type": "own_type"},
        lambda path: open_chat(ChatOptions(path=path, device="cpu")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_yes_to_everything_runs_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, auto_map, changes, read = READERS[name]
    mark = hostile(tmp_path, file, auto_map, **changes)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    with pytest.raises(UserError, match="code that comes with it"):
        read(str(tmp_path))
    assert not mark.exists()


def test_a_folder_with_auto_map_that_transformers_can_do_without_is_read(tmp_path: Path) -> None:
    mark = hostile(tmp_path, "config.json", {"AutoConfig": "own.Own"})
    assert hf.read_config(str(tmp_path)).model_type == "llama" and not mark.exists()
