"""Files that several ranks write: every byte arrives, whatever the caches between; and what does not arrive is seen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.two_caches import CacheClient, meeting
from weft.checkpoint import state
from weft.checkpoint.export import save_huggingface
from weft.checkpoint.retention import complete_steps
from weft.checkpoint.save import Saver
from weft.config.schema import CheckpointConfig
from weft.errors import StorageError
from weft.parallel.mesh import full_tensor
from weft.parallel.shards import ranges, safetensors_files
from weft.parallel.shards.boxes import Box, overlap
from weft.parallel.shards.digests import DIGESTS, BoxDigest, check_boxes
from weft.parallel.shards.ranges import RangeWriter, join_seams


def wide_model() -> str:
    """Its tensors lie over many blocks, and begin and end inside them."""
    return saved_model("llama", vocab_size=3001, hidden_size=128, intermediate_size=700)


@contextmanager
def through_caches(folder: Path, page: int, block: int) -> Iterator[None]:
    """This rank is one client of a network file system. block: of ranges.py; 1 takes the protection away."""
    meeting_folder = folder / "meet"
    meeting_folder.mkdir(exist_ok=True)
    client = CacheClient(page, meeting(meeting_folder, dist.get_rank(), dist.get_world_size()))
    with mock.patch.object(safetensors_files, "os", client), mock.patch.object(ranges, "BLOCK", block):
        yield


def saves(path: str, mesh: str, folder: str, page: int, block: int, verify: str) -> tuple[dict[str, Tensor], str]:
    """(whole weights of the engine that is saved, what its saving raises)."""
    engine, message = open_engine(path, mesh), ""
    config = CheckpointConfig(verify=verify)  # type: ignore[arg-type]
    with through_caches(Path(folder), page, block), Saver(engine, Path(folder), config, {"config": {}}) as saver:
        saver.save(1, {})
        try:
            saver.finish()
        except StorageError as error:
            message = str(error)
    return {name: full_tensor(tensor).clone() for name, tensor in engine.tensors()}, message


def differing(weights_file: Path, expected: dict[str, Tensor]) -> list[str]:
    weights = load_file(weights_file)
    assert weights.keys() == expected.keys()
    return [name for name in weights if not torch.equal(weights[name], expected[name])]


@pytest.mark.parametrize(("mesh", "page"), [("2", 4096), ("3", 65536), ("2x2", 65536)])
def test_clients_that_do_not_see_one_another_lose_nothing(mesh: str, page: int, tmp_path: Path) -> None:
    (expected, message), *_ = run(
        world_of(mesh), saves, wide_model(), mesh, str(tmp_path), page, ranges.BLOCK, "digest"
    )
    assert message == ""
    assert differing(tmp_path / "checkpoints" / "latest" / "model.safetensors", expected) == []
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-000001", "latest"}
    digests = json.loads((tmp_path / "checkpoints" / "latest" / DIGESTS).read_text())["files"]
    box_digests = [
        BoxDigest("model.safetensors", name, *box)
        for name, boxes in digests["model.safetensors"].items()
        for box in boxes
    ]
    check_boxes(tmp_path / "checkpoints" / "latest", "", box_digests, 0)
    assert sum(digest.box.numel for digest in box_digests) == sum(tensor.numel() for tensor in expected.values())


@pytest.mark.covers("checkpoint.verify")
def test_what_is_lost_is_found_and_not_committed(tmp_path: Path) -> None:
    """Without the protection: the file that a check of sizes lets pass is not what was written."""
    for verify in ("digest", "size"):
        (tmp_path / verify).mkdir()
        (expected, message), (_, other_message) = run(
            2, saves, wide_model(), "2", str(tmp_path / verify), 4096, 1, verify
        )
        assert message == other_message
        checkpoints = tmp_path / verify / "checkpoints"
        if verify == "size":
            assert message == "" and differing(checkpoints / "latest" / "model.safetensors", expected)
        else:
            assert "could not save step 1" in message and "weft sft --resume" in message
            assert (
                "model.safetensors: " in message and ", written by rank " in message and "checkpoint.verify" in message
            )
            assert list(checkpoints.iterdir()) == [] and complete_steps(checkpoints) == []


def saves_a_damaged_state(path: str, folder: str) -> str:
    """A bit of rank 1's file of the trainer state turns on the disk."""
    saver, write = Saver(open_engine(path, "2"), Path(folder), CheckpointConfig(), {"config": {}}), os.fsync

    def damaged(descriptor: int) -> None:
        write(descriptor)
        target = Path(f"/proc/self/fd/{descriptor}").resolve()
        if target.name == "rank-00001.safetensors":
            data = bytearray(target.read_bytes())
            data[-9] ^= 4
            target.write_bytes(data)

    with saver, mock.patch.object(state.os, "fsync", damaged):
        saver.save(1, {})
        try:
            saver.finish()
        except StorageError as error:
            return str(error)
    return ""


def test_a_trainer_state_that_the_disk_has_changed_is_not_committed(tmp_path: Path) -> None:
    messages = run(2, saves_a_damaged_state, saved_model("llama"), str(tmp_path))
    assert messages[0] == messages[1] and messages[0].startswith(
        "rank 0 could not save"
    )  # what another has written is read
    assert "trainer_state/rank-00001.safetensors, written by rank 1, has other bytes on the disk" in messages[0]
    assert complete_steps(tmp_path / "checkpoints") == []


def exports(path: str, folder: str) -> dict[str, Tensor]:
    engine = open_engine(path, "3")
    with through_caches(Path(folder), 65536, ranges.BLOCK):
        save_huggingface(engine, Path(folder) / "exported", shard_bytes=1_500_000)
    return {name: full_tensor(tensor).clone() for name, tensor in engine.tensors()}


def test_an_export_into_several_files_through_caches(tmp_path: Path) -> None:
    """As weight sync does it."""
    expected, *_ = run(3, exports, wide_model(), str(tmp_path))
    paths = list((tmp_path / "exported").glob("*.safetensors"))
    assert len(paths) > 2
    actual = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "meet"}


SHAPE = (700, 1000)
CUTS: dict[
    str, list[tuple[tuple[int, ...], tuple[int, ...]]]
] = {  # where each rank's box of the tensor begins and what size it has
    "rows": [((0, 0), (333, 1000)), ((333, 0), (367, 1000))],
    "columns": [((0, 0), (700, 501)), ((0, 501), (700, 499))],
    "few columns": [((0, 0), (700, 1)), ((0, 1), (700, 999))],
}


def writes_boxes(folder: str, cut: str) -> int:
    """Bytes that this rank has handed over."""
    rank, path = dist.get_rank(), Path(folder)
    before, after = torch.rand(123), torch.rand(77)  # the tensor begins and ends within blocks
    values = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    layout = safetensors_files.lay_out({"before": before, "values": values, "after": after})
    if rank == 0:
        safetensors_files.create(path / "x.safetensors", layout)
    dist.barrier()
    part, entry = Box(*CUTS[cut][rank]), layout.entries["values"]
    with through_caches(path, 65536, ranges.BLOCK), RangeWriter(path, path / f"seams-{rank}") as writer:
        for first in range(0, SHAPE[0], 90):  # as slices are cast and written
            box = overlap(part, Box((first, 0), (90, SHAPE[1])))
            if box is not None:
                whole_box = Box.from_shape(SHAPE)
                writer.write("x.safetensors", entry, part, box, values[box.within(whole_box)])
    dist.barrier()
    if rank == 1:
        join_seams(path, "x.safetensors", [path / "seams-0", path / "seams-1"])
    dist.barrier()
    assert torch.equal(load_file(path / "x.safetensors")["values"], values)
    return writer.handed


@pytest.mark.parametrize("cut", CUTS)
def test_boxes_of_any_dimension_arrive_and_only_seams_are_written_twice(cut: str, tmp_path: Path) -> None:
    handed = run(2, writes_boxes, str(tmp_path), cut)
    if cut == "rows":
        assert all(0 < count < 2 * ranges.BLOCK for count in handed)
    else:  # rows that are shorter than a block
        assert sum(handed) == 4 * SHAPE[0] * SHAPE[1]
