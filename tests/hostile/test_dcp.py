"""Directories of torch.distributed.checkpoint that are damaged, or made to do harm: nothing of them runs, and each is
refused in one sentence."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.checkpoint.test_load import refused
from tests.support.cases import saved_model
from tests.support.foreign_dcp import save, save_alone, save_as_verl
from tests.support.fuzz import fuzz
from tests.support.pool import run
from weft import cli
from weft.errors import UserError
from weft.parallel.shards import dcp
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.dcp import open_dcp
from weft.parallel.shards.pickles import UnreadableError, read_pickle
from weft.parallel.shards.rank_files import open_rank_files

KEY = "model.dcp_weights"
W = torch.arange(12.0).reshape(4, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save({"w": W, "v": torch.ones(2, dtype=torch.bfloat16), "step": 3, "note": {"a": [1.5, None, "x"]}}, tmp_path / "d")
    return tmp_path / "d"


def read_all(folder: Path) -> None:
    """All that an engine does with one."""
    directory = open_dcp(str(folder), KEY)
    try:
        for name, stored in directory.tensors.items():
            directory.read(name, Box.from_shape(stored.shape))
        for name in directory.values:
            directory.value(name)
    finally:
        directory.close()


def message(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_one_is_read(folder: Path) -> None:
    read_all(folder)
    directory = open_dcp(str(folder), KEY)
    assert torch.equal(directory.read("w", Box((1, 1), (2, 2))), W[1:3, 1:3])
    assert directory.value("step") == 3 and directory.value("note.a") == [1.5, None, "x"]


def test_elements_in_other_orders(tmp_path: Path) -> None:
    """torch.save keeps the strides of a tensor whose elements lie end to end in another order of its dimensions."""
    tensors = {"t": W.t(), "p": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1), "one": torch.ones(1, 3, 1).mT}
    save(tensors, tmp_path / "d")
    directory = open_dcp(str(tmp_path / "d"), KEY)
    for name, tensor in tensors.items():
        assert torch.equal(directory.read(name, Box.from_shape(tuple(tensor.shape))), tensor)
    assert torch.equal(directory.read("p", Box((1, 0, 1), (2, 2, 2))), tensors["p"][1:3, :, 1:3])
    save({"gaps": torch.ones(4, 6)[:, ::2]}, tmp_path / "gaps")  # which torch itself closes
    read_all(tmp_path / "gaps")


def test_a_tensor_that_claims_more_than_is_there(folder: Path) -> None:
    """torch.save's own description of it, with another size in the place of the right one."""
    file = folder / "__0_0.distcp"
    right, larger = (b"K" + bytes([rows]) + b"K\x03\x86" for rows in (4, 200))
    assert file.read_bytes().count(right) == 1
    file.write_bytes(file.read_bytes().replace(right, larger))
    assert "a tensor is larger than its storage" in message(folder)


# ---------------------------------------------------------------- what would run


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def test_nothing_of_the_metadata_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    metadata = loaded(folder)
    metadata.planner_data["x"] = Harm()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "'posix.system'" in message(folder)
    assert not (folder / "harmed").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_of_a_tensors_file_runs(protocol: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch.save has its description. Of other protocols: each has instructions of its own."""
    monkeypatch.chdir(folder)
    torch.save({"w": Harm()}, folder / "harm.pt", pickle_protocol=protocol)
    content = (folder / "harm.pt").read_bytes()
    (folder / "__0_0.distcp").write_bytes(content)

    def move(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(content)

    change(folder, move)
    assert "'posix.system'" in message(folder)
    assert not (folder / "harmed").exists()


@pytest.mark.parametrize("kind", ["eval", "getattr", "bytearray", "type", "Tensor"])
def test_names_that_no_such_file_needs(kind: str) -> None:
    named = {
        "eval": b"cbuiltins\neval\n.", "getattr": b"cbuiltins\ngetattr\n.", "bytearray": b"cbuiltins\nbytearray\n.",
        "type": pickle.dumps(type(None)), "Tensor": pickle.dumps(torch.Tensor),
    }[kind]  # fmt: skip
    with pytest.raises(UnreadableError, match="refers to"):
        read_pickle(named, {})


BOMBS = {
    "a note far ahead": b"\x80\x04N" + b"r" + struct.pack("<I", 2**31 - 1) + b".",
    "an array of bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "a text": b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b".",
    "a number of many digits": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b".",
    "dicts": b"\x80\x04(" + b"}" * 5_000_000 + b"l.",
    "lists": b"\x80\x04]" + b"]" * 3_000_000 + b".",
    "tuples in tuples": b"\x80\x04)" + b"\x85" * 3_000_000 + b".",
    "a tuple of tuples as a key": b"\x80\x04})" + b"\x85NN00" * 100_000 + b"Ns.",
    "a list that holds itself": b"\x80\x04]\x94h\x00a.",
    "no end": b"\x80\x04N",
    "nothing": b"",
    "marks": b"(" * 1_000_000 + b"t.",
    "what is not there": b"\x80\x0400000.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, folder: Path) -> None:
    (folder / ".metadata").write_bytes(BOMBS[name])
    assert "cannot be read" in message(folder) or "is not a file that" in message(folder)


# ---------------------------------------------------------------- what lies


def loaded(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def change(folder: Path, edit: Callable[[Any], Any]) -> None:
    metadata = loaded(folder)
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def info(metadata: Any, name: str = "w") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def info_with(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: info(metadata).__dict__.update(fields)


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        described = metadata.state_dict_metadata["w"]
        chunk, storage = type(described.chunks[0]), info(metadata)
        described.chunks = [chunk(torch.Size(start), torch.Size(size)) for start, size in boxes]
        for start, _ in boxes:
            metadata.storage_data[MetadataIndex("w", start)] = storage

    return edit


def described(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.state_dict_metadata["w"].__dict__.update(fields)


def resized(*shape: int) -> Callable[[Any], None]:
    return lambda metadata: (described(size=torch.Size(shape))(metadata), chunks(((0, 0), shape))(metadata))[1]


def dtype(kind: torch.dtype) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["w"].properties, "dtype", kind)


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a file outside": (info_with(relative_path="../outside"), "not a file of this directory"),
    "an absolute file": (info_with(relative_path="/etc/passwd"), "not a file of this directory"),
    "a file that is not there": (info_with(relative_path="__1_0.distcp"), "No such file"),
    "an offset below 0": (info_with(offset=-1), "is truncated"),
    "a length beyond the end": (info_with(length=10**9), "is truncated"),
    "an offset that is no number": (info_with(offset=float("nan")), "unexpected types"),
    "an offset that is a text": (info_with(offset="0"), "unexpected types"),
    "no path": (info_with(relative_path=None), "unexpected types"),
    "compression": (info_with(transform_descriptors=["zstd"]), "extensions of DCP"),
    "chunks that overlap": (chunks(((0, 0), (3, 3)), ((2, 0), (2, 3))), "do not fill it, or overlap"),
    "chunks twice": (chunks(((0, 0), (4, 3)), ((0, 0), (4, 3))), "do not fill it, or overlap"),
    "a chunk that is missing": (chunks(((0, 0), (3, 3))), "do not fill it"),
    "no chunks": (chunks(), "do not fill it"),
    "chunks that cancel in number": (chunks(((0, 0), (2, 3)), ((1, 0), (2, 3))), "do not fill it, or overlap"),
    "a chunk outside": (chunks(((1, 0), (4, 3))), "is outside of the tensor"),
    "a chunk of other dimensions": (chunks(((0,), (4,))), "unexpected types"),
    "a larger tensor": (resized(400, 300), "a chunk of w is larger than its bytes"),
    "another shape": (resized(3, 4), "does not contain the part of w"),
    "another dtype": (dtype(torch.int32), "does not contain the part of w"),
    "a complex one": (dtype(torch.complex128), "'torch.complex128'"),
    "a size that is a list": (described(size=[4, 3]), "unexpected types"),
    "many dimensions": (described(size=torch.Size([1] * 20)), "20 dimensions"),
    "no storage": (lambda m: m.storage_data.clear(), "it has no position of"),
    "storage that is a list": (lambda m: setattr(m, "storage_data", []), "does not describe a checkpoint"),
    "a long name": (
        lambda m: m.state_dict_metadata.update({"x" * 2000: m.state_dict_metadata["w"]}), "unexpected types"
    ),
    "a tensor that is a number": (lambda m: m.state_dict_metadata.update(w=3), "unexpected types"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_lies(name: str, folder: Path) -> None:
    edit, words = LIES[name]
    change(folder, edit)
    assert words in message(folder)


def test_a_file_that_is_none(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    assert "is a FIFO" in message(folder)
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    assert "is a FIFO" in message(folder)


def test_more_files_than_a_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of many ranks: few are open at once."""
    monkeypatch.setattr(dcp, "_MOST_OPEN", 2)
    tensors = {f"w{number}": W + number for number in range(5)}
    with warnings.catch_warnings(action="ignore"):
        torch_dcp.save(
            tensors, storage_writer=FileSystemWriter(tmp_path / "d", single_file_per_rank=False), no_dist=True
        )
    directory = open_dcp(str(tmp_path / "d"), KEY)
    for _ in range(2):
        for name, tensor in tensors.items():
            assert torch.equal(directory.read(name, Box.from_shape((4, 3))), tensor)
            assert len(directory._files) <= 2
            links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
            assert sum(link.startswith(os.path.realpath(tmp_path)) for link in links) <= 2
    directory.close()
    (tmp_path / "d" / "__0_3.distcp").unlink()
    with pytest.raises(UserError, match="cannot be opened: No such file"):
        [directory.read(name, Box.from_shape((4, 3))) for name in tensors]


def test_files_that_are_cut_short(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 100)
    assert "__0_0.distcp is truncated" in message(folder)
    os.truncate(folder / ".metadata", 300)
    assert "cannot be read: it is truncated" in message(folder)


# ---------------------------------------------------------------- what people name by mistake


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


MISTAKES = {
    "a metadata for each rank": (("__0.metadata", "__1.metadata"), "no_dist=False"),
    "the folder above": (("dcp/.metadata", "config.json"), "Did you mean"),
    "a HuggingFace directory": (("model.safetensors",), "Set model.path to it"),
    "an unfinished one": (("__0_0.distcp",), "has not finished writing it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_people_name_by_mistake(name: str, tmp_path: Path) -> None:
    files, words = MISTAKES[name]
    assert words in message(make(tmp_path / "d", *files))


MEGATRON = {"embedding.word_embeddings.weight": torch.ones(2), "decoder.layers.mlp.linear_fc1.weight": torch.ones(2)}


def test_what_does_not_fit_the_model(tmp_path: Path) -> None:
    """Named before anything large is read, with what to do."""
    path = saved_model("llama")
    save(MEGATRON, tmp_path / "megatron")
    assert "has no tensors with names of LlamaForCausalLM" in refused(path, weights=str(tmp_path / "megatron"))
    tensors = save_alone(path, tmp_path / "whole")
    for name, change, words in (
        ("missing", lambda t: t.pop("model.norm.weight"), "not in the files: model.norm.weight"),
        ("more", lambda t: t.update(extra=W), "LlamaForCausalLM does not have (model.ignore_weights"),
        ("shape", lambda t: t.update({"model.norm.weight": W}), "is [4, 3] and should be [64]"),
    ):
        changed = dict(tensors)
        change(changed)  # type: ignore[no-untyped-call]
        save(changed, tmp_path / name)
        text = refused(path, weights=str(tmp_path / name))
        assert text.startswith("model.dcp_weights: ") and words in text
    assert refused(path, weights=str(tmp_path / "more"), ignore_weights=("extra",)) == ""


def test_torchtitans_names_of_another_family(tmp_path: Path) -> None:
    save({"tok_embeddings.weight": W, "layers.0.attention.wq.weight": W}, tmp_path / "d")
    assert "which weft supports for llama, qwen3, qwen3_moe, but not for gemma2" in refused(
        saved_model("gemma2"), weights=str(tmp_path / "d")
    )


def test_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths, and keys that do not go together, within a second."""
    home = shutil.copytree(saved_model("llama"), tmp_path / "home")
    (home / "model.safetensors").unlink()
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    make(home, ".metadata")
    base = ["sft", f"model.path={home}", f"data.path={tmp_path / 'data.jsonl'}"]
    for keys, words in (
        ([], f"set model.dcp_weights={home}"),
        (["model.dcp_weights=nowhere"], "model.dcp_weights nowhere does not exist"),
        (["model.dcp_weights=s3://a/b"], "model.dcp_weights s3://a/b"),
        (
            [f"model.dcp_weights={home}", "model.init=random"],
            "model.init is random, so the weights in model.dcp_weights",
        ),
        ([f"model.dcp_weights={home}", "lora.rank=2"], f"weft export {home} --model {home}"),
        (["optimizer.load_state=true", "model.init=random"], "model.dcp_weights is null"),
    ):
        assert cli.main([*base, *keys]) == 2
        assert words in capsys.readouterr().err


# ---------------------------------------------------------------- at random


def fuzz_all(folder: Path, count: int) -> None:
    save({"w": W, "v": torch.ones(2, dtype=torch.bfloat16), "step": 3}, folder)
    for name in (".metadata", "__0_0.distcp"):
        content = (folder / name).read_bytes()

        def parse(path: Path, name: str = name) -> None:
            (folder / name).write_bytes(path.read_bytes())
            read_all(folder)

        fuzz(parse, [content], count, suffix=".bin")
        (folder / name).write_bytes(content)
    run(1, save_as_verl, saved_model("llama"), str(folder / "actor"))
    file = folder / "actor" / "model_world_size_1_rank_0.pt"
    content = file.read_bytes()

    def parse_rank(path: Path) -> None:
        file.write_bytes(path.read_bytes())
        directory = open_rank_files(str(folder / "actor"), KEY)
        for name, stored in directory.tensors.items():
            directory.read(name, Box.from_shape(stored.shape))
        directory.close()

    fuzz(parse_rank, [content], count // 5, suffix=".pt")


def test_damage_at_random(tmp_path: Path) -> None:
    fuzz_all(tmp_path / "d", 500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_much_damage_at_random(tmp_path: Path) -> None:
    fuzz_all(tmp_path / "d", 20_000)


def test_keys_that_no_such_file_needs() -> None:
    """Besides others that it needs."""
    assert read_pickle(pickle.dumps({"a": 1, 2: "b"}), {}) == {"a": 1, 2: "b"}
    for key in ((1,), 2.5, None):
        with pytest.raises(UnreadableError):
            read_pickle(pickle.dumps({"a": 1, key: 2}), {})
