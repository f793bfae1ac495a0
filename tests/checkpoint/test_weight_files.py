"""Which of several saves in a folder is read: transformers' choice, or none, with the names of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.zoo import tiny_config
from weft.errors import UserError
from weft.models import hf
from weft.parallel.shards.source import INDEX, open_model_weights

NORM = "model.norm.weight"


def save(folder: Path, seed: int, **how: object) -> None:
    model = hf.build_random(tiny_config("llama"), dtype=torch.float32, attention="eager", seed=seed)
    torch.nn.init.constant_(model.get_parameter(NORM), float(seed))
    model.save_pretrained(folder, **how)


def shards_beside(folder: Path) -> None:
    """Another save in several files, as a merge or a download leaves them."""
    save(folder / "other", 2, max_shard_size="60KB")
    for file in (folder / "other").glob("model*"):
        file.rename(folder / file.name)


def shards_gone(folder: Path) -> None:
    shards_beside(folder)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()


def variant(folder: Path) -> None:
    save(folder / "other", 2, variant="fp16")
    (folder / "other/model.fp16.safetensors").rename(folder / "model.fp16.safetensors")


def stray(folder: Path) -> None:
    """consolidated.safetensors and a folder `original`, as Mistral and Llama come; and a pickle."""
    save(folder / "original", 2)
    (folder / "original/model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")


def shards_and_strays(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shards_beside(folder)
    save_file({NORM: torch.zeros(1)}, folder / "model-00099-of-00099.safetensors")
    stray(folder)


def named(folder: Path) -> None:
    save(folder / "other", 2)
    (folder / "other/model.safetensors").rename(folder / "chosen.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "chosen.safetensors"}))


FOLDERS: list[Callable[[Path], None]] = [shards_beside, shards_gone, variant, stray, shards_and_strays, named]


@pytest.mark.parametrize("change", FOLDERS, ids=lambda change: change.__name__)
def test_the_weights_are_those_that_transformers_reads(change: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path, 1)
    change(tmp_path)
    source = open_model_weights(str(tmp_path))
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(source.read(name), tensor), name
    source.close()


def test_a_save_that_transformers_would_not_find_is_read_if_it_is_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp16.safetensors")
    assert open_model_weights(str(tmp_path)).read(NORM)[0] == 1.0


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle that transformers prefers": (
        lambda folder: [(folder / "model.safetensors").unlink(), stray(folder)],
        r"consolidated.safetensors and pytorch_model.bin: transformers reads pytorch_model.bin",
    ),
    "two variants": (
        lambda folder: [(folder / "model.safetensors").rename(folder / "model.bf16.safetensors"), variant(folder)],
        r"is in both model.bf16.safetensors and model.fp16.safetensors: keep one",
    ),
    "an adapter beside the weights": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        r"adapter_config.json next to config.json. transformers would load the adapter .* lora.path",
    ),
    "an index of shards that are gone, alone": (
        lambda folder: [shards_gone(folder), (folder / "model.safetensors").unlink()],
        r"model-0000\d-of-0000\d.safetensors: cannot be opened",
    ),
    "a name that leads out": (
        lambda folder: (folder / "config.json").write_text('{"transformers_weights": "../x.safetensors"}'),
        r"transformers_weights is '../x.safetensors', not a \*.safetensors file of this folder",
    ),
    "another format": (
        lambda folder: (folder / "config.json").write_text('{"transformers_weights": "pytorch_model.bin"}'),
        r"transformers_weights is 'pytorch_model.bin', not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_as_transformers_reads_it_is_refused(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    save(tmp_path, 1)
    change(tmp_path)
    with pytest.raises(UserError, match=words):
        open_model_weights(str(tmp_path))


def test_an_index_that_config_names(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shards_beside(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "mine.safetensors.index.json")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "mine.safetensors.index.json"}))
    assert open_model_weights(str(tmp_path)).read(NORM)[0] == 2.0
    assert load_file(tmp_path / "model.safetensors")[NORM][0] == 1.0
