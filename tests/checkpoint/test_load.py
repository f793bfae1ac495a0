"""Loading, export and the tensor walker against transformers' own from_pretrained and save_pretrained, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.cases import open_engine, pairs, world_of
from tests.support.pool import run
from tests.support.zoo import LAYOUT_FAMILIES, tiny_config
from weft.checkpoint import export
from weft.engine import build, builder
from weft.engine.engine import Engine
from weft.engine.selfcheck.architecture import ModelSupport
from weft.errors import UserError
from weft.models import hf
from weft.parallel import parallelize
from weft.parallel.shards import load, walker
from weft.parallel.shards.boxes import Box, local_box
from weft.parallel.shards.layout import TensorMapping
from weft.parallel.shards.ranges import RangeWriter
from weft.parallel.shards.safetensors_files import TensorFile, create, lay_out
from weft.parallel.shards.source import open_model_weights
from weft.parallel.shards.walker import check_stream, walk

Tensors = dict[str, Tensor]
_folder = tempfile.TemporaryDirectory(prefix="weft-load-")


# ---------------------------------------------------------------- sources and yardstick


@cache
def source(family: str, dtype: str = "bf16") -> Path:
    """A checkpoint in several files with an index; persistent buffers, zero in a fresh model, hold something."""
    path = Path(_folder.name) / f"{family}-{dtype}"
    model = hf.build_random(tiny_config(family), dtype=torch.float32, attention="eager", seed=0)
    buffers, generator = dict(model.named_buffers()), torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if name in buffers and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) / 10)
    if dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(path, max_shard_size="60KB")
    return path


def plain(path: str) -> PreTrainedModel:
    """As transformers loads it."""
    config = hf.without_noise(hf.read_config(path))
    return hf.model_class(config).from_pretrained(path, dtype=torch.float32)


def tensors_of(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


# ---------------------------------------------------------------- on the ranks


@contextmanager
def no_forward() -> Iterator[None]:
    """No start-up check, because nothing is computed here; storage is poisoned, so that what nothing fills shows."""

    def poisoned(module: nn.Module, device: torch.device) -> None:
        parallelize.materialize(module, device)
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                local_box(tensor)[1].fill_(torch.nan)

    hf.register_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build, "examine", lambda config, noise: ModelSupport("packed", True, 0.0, True, (), (), "", "lm_head")
        )
        patch.setattr(build, "check_kernel", lambda *args: None)
        patch.setattr(builder, "materialize", poisoned)
        yield


def differences(engine: Engine, model: PreTrainedModel) -> list[str]:
    """Names of tensors of which this rank holds something else than transformers loads."""
    expected = model.state_dict()
    wrong = []
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        box, local = local_box(tensor)
        full = expected.pop(name)
        if not torch.equal(local, full[box.within(Box.from_shape(tuple(full.shape)))]):
            wrong.append(name)
    buffers = dict(model.named_buffers())
    for name, buffer in engine.module.named_buffers():
        if buffer.dtype != buffers[name].dtype or not torch.equal(buffer, buffers[name]):
            wrong.append(name)
    return wrong + list(expected)


def load_change_write(path: str, mesh: str, folder: str) -> dict[str, Any]:
    """Load, compare, scale every weight, export, walk. The walked tensors are compared with the exported here."""
    with no_forward():
        engine = open_engine(path, mesh)
        assert engine.loaded is not None
        out = {"wrong": differences(engine, plain(path)), "read": engine.loaded.bytes_read}
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(1.5)
        export.save_huggingface(engine, Path(folder, "saved"), shard_bytes=60_000)
        saved = tensors_of(Path(folder, "saved"))
        manifest = export.manifest_of(engine)
        for bucket in (2000, 10**9):
            stream = check_stream(
                walk(engine.local_tensors(), engine.built.mappings, manifest, engine.divided.cuts, bucket_bytes=bucket),
                manifest,
            )
            walked = {name: tensor.clone() for name, tensor in stream}
            assert walked.keys() == saved.keys()
            out["wrong"] += [name for name, tensor in walked.items() if not same(tensor, saved[name])]
        return out


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# ---------------------------------------------------------------- every family


def tables() -> list[Any]:
    """Every family on two or four ranks, and every third on one; the other pairs are for `make verify-all`."""
    cases = [(f, m, (m == "1" and n % 3) or m == "24"[n % 2]) for n, f in enumerate(LAYOUT_FAMILIES) for m in "124"]
    return [pytest.param(f, m, marks=pytest.mark.table if is_table else ()) for f, m, is_table in cases]


@pytest.mark.parametrize(("family", "mesh"), tables())
def test_load_export_and_walk_are_transformers_own(family: str, mesh: str, tmp_path: Path) -> None:
    path, ranks = source(family), world_of(mesh)
    results = run(ranks, load_change_write, str(path), mesh, str(tmp_path))
    assert [result["wrong"] for result in results] == [[]] * ranks
    model = plain(str(path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "plain")
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "saved")
    stored = tensors_of(path)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert same(after[name], tensor.to(stored[name].dtype)), name


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "zamba2"])
def test_replicas_share_the_reading(family: str, tmp_path: Path) -> None:
    path = source(family)
    results = run(4, load_change_write, str(path), "2x2", str(tmp_path))
    assert [result["wrong"] for result in results] == [[]] * 4
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert max(result["read"] for result in results) <= 0.4 * size


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [("llama", "1"), ("mixtral", "4")], [("llama", "2"), ("llama", "4"), ("mixtral", "1"), ("mixtral", "2")],
))  # fmt: skip
def test_a_rank_reads_its_share(family: str, mesh: str, tmp_path: Path) -> None:
    path, ranks = source(family), world_of(mesh)
    size = sum(tensor.nbytes for tensor in tensors_of(path).values())
    results = run(ranks, load_change_write, str(path), mesh, str(tmp_path))
    assert max(result["read"] for result in results) <= 1.2 * size / ranks
    assert sum(result["read"] for result in results) >= size


# ---------------------------------------------------------------- what cannot be loaded


def refused(path: str, **model: Any) -> str:
    with no_forward():
        try:
            open_engine(path, "1", model=model)
        except UserError as error:
            return str(error)
    return ""


def edited(tmp_path: Path, family: str = "llama") -> tuple[Path, Tensors]:
    """A copy of a source in one file, and its tensors to change."""
    folder = tmp_path / "copy"
    shutil.copytree(source(family), folder)
    tensors = tensors_of(folder)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    return folder, tensors


def check_refused(folder: Path, pattern: str, **model: Any) -> None:
    [message] = run(1, refused_with, str(folder), model)
    assert re.search(pattern, message), message


def refused_with(path: str, model: dict[str, Any]) -> str:
    return refused(path, **model)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder, tensors = edited(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    check_refused(folder, r"not in the files: model\.layers\.1\.mlp\.up_proj\.weight\.")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder, tensors = edited(tmp_path, "qwen3_moe")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    check_refused(folder, r"not in the files: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight\.")


@pytest.mark.covers("model.ignore_weights")
def test_an_unwanted_tensor_is_named_and_can_be_ignored(tmp_path: Path) -> None:
    folder, tensors = edited(tmp_path)
    save_file(tensors | {"model.extra.weight": torch.ones(3)}, folder / "model.safetensors")
    check_refused(folder, r"LlamaForCausalLM does not have .*ignore_weights.*: model\.extra\.weight\.")
    check_refused(folder, r"^$", ignore_weights=("model.extra.*",))


def test_a_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder, tensors = edited(tmp_path)
    save_file(tensors | {"lm_head.weight": torch.ones(100, 64)}, folder / "model.safetensors")
    check_refused(folder, r"lm_head\.weight is \[100, 64\] and should be \[128, 64\]")


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    folder, tensors = edited(tmp_path)
    save_file(tensors, folder / "model.safetensors")
    intact = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(intact[:-100])
    check_refused(folder, r"model\.safetensors: is truncated: it has [\d,]+ bytes and should have [\d,]+")
    (folder / "model.safetensors").write_bytes(b"<html>")
    check_refused(folder, r"is not a safetensors file")


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(source("llama"), folder)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    check_refused(folder, r"index\.json lists .* in model-0000\d-of-0000\d\.safetensors, which does not contain it")
    first.unlink()
    check_refused(folder, r"safetensors: cannot be opened: No such file")


def differs_in_parts(path: str) -> list[bool]:
    """Whether `a` differs from each other tensor, compared by two ranks two rows at a time, in turn."""
    opened = open_model_weights(path)
    with mock.patch.object(load, "_COMPARED_ROWS", 8):
        return [load._differ(opened, "a", name) for name in ("same", "first", "second", "last")]


def test_ranks_agree_whether_tied_weights_differ(tmp_path: Path) -> None:
    """Each compares its share alone: what one of them finds, all have to know, or only some would untie."""
    same = torch.arange(20.0).reshape(5, 4)
    tensors = {name: same.clone() for name in ("a", "same", "first", "second", "last")}
    for name, row in (("first", 1), ("second", 3), ("last", 4)):
        tensors[name][row, 0] = -1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert run(2, differs_in_parts, str(tmp_path)) == [[False, True, True, True]] * 2


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder, _ = edited(tmp_path)
    check_refused(folder, r"holds no \*\.safetensors\. Set model\.init=random")
    (folder / "pytorch_model.bin").write_bytes(b"")
    check_refused(folder, r"pytorch_model\.bin, a pickle, which weft does not open")


def test_other_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    folder, tensors = edited(tmp_path)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    check_refused(folder, r"quantised \(gptq\), which weft cannot read")


# ---------------------------------------------------------------- quantised sources


def quantised(folder: Path, family: str, changes: dict[str, Any], config: dict[str, Any]) -> Path:
    """A source with other tensors and a quantization_config."""
    model = hf.build_random(tiny_config(family, **changes), dtype=torch.bfloat16, attention="eager", seed=0)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return folder


def fp8_source(folder: Path) -> Path:
    """Linear layers in FP8 with a factor for each block of 16 x 16."""
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    quantised(folder, "qwen3_moe", {"moe_intermediate_size": 48}, config)
    tensors, generator = tensors_of(folder), torch.Generator().manual_seed(3)
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            blocks = [-(-n // 16) for n in weight.shape]
            tensors[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) + 0.5
            tensors[name] = weight.float().to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def mxfp4_source(folder: Path) -> Path:
    """Experts in MXFP4: two numbers a byte, an exponent for each 32."""
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    quantised(folder, "gpt_oss", {"intermediate_size": 96}, config)
    tensors, generator = tensors_of(folder), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        shape = (experts, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def loaded_differences(path: str, mesh: str) -> list[str]:
    with no_forward():
        return differences(open_engine(path, mesh), plain(path))


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        (fp8_source, "3"),
        (mxfp4_source, "3"),
        *(pytest.param(make, "1", marks=pytest.mark.table) for make in (fp8_source, mxfp4_source)),
    ],
)
def test_quantised_sources_are_read_as_transformers_reads_them(make: Any, mesh: str, tmp_path: Path) -> None:
    path = make(tmp_path / "source")
    assert run(world_of(mesh), loaded_differences, str(path), mesh) == [[]] * world_of(mesh)


def test_fp8_blocks_that_stick_out_over_the_edge(tmp_path: Path) -> None:
    """transformers cannot read these; by the formula, element by element."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(37, 21, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(5, 2, generator=generator)
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 16]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_model_weights(str(tmp_path))
    expected = torch.tensor(
        [[float(values[i, j]) * float(scales[i // 8, j // 16]) for j in range(21)] for i in range(37)]
    )
    assert opened.names == ["w"]
    for box in (Box((0, 0), (37, 21)), Box((9, 0), (13, 21)), Box((15, 17), (20, 3)), Box((36, 5), (1, 12))):
        assert torch.allclose(opened.read("w", box), expected[box.within(Box.from_shape((37, 21)))], rtol=1e-6, atol=0)


# ---------------------------------------------------------------- the manifest, and bugs planted


def stream_of(*tensors: tuple[str, Tensor]) -> list[str]:
    manifest = {name: torch.empty(2, 3, device="meta") for name in ("a", "b")}
    return [name for name, _ in check_stream(iter(tensors), manifest)]


def test_the_manifest_is_kept() -> None:
    good = torch.ones(2, 3)
    assert stream_of(("a", good), ("b", good)) == ["a", "b"]
    for stream, message in (
        ([("a", good)], "1 tensors of the manifest are missing: b"),
        ([("a", good), ("b", good), ("a", good)], "a occurs twice"),
        ([("a", good), ("c", good)], "c is not in the manifest"),
        ([("a", good.bfloat16())], "a is torch.bfloat16"),
        ([("a", good.T)], r"\[3, 2\], but the manifest has"),
    ):
        with pytest.raises(RuntimeError, match=message):
            stream_of(*stream)


def test_what_is_gathered_at_once_is_as_much_as_fits_and_no_more() -> None:
    """Half of the bytes allowed, 64: small tensors together, and of a large one as many experts as fit."""
    shapes = {"a": (2, 4), "b": (2, 4), "experts": (5, 2, 3), "c": (2, 2)}
    module = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    mappings = [TensorMapping(name, name, Box.from_shape(shapes[name]), (0, 1)) for name in ("a", "b")]
    mappings += [TensorMapping(f"expert {n}", "experts", Box((n, 0, 0), (1, 2, 3)), (1, 2)) for n in range(5)]
    mappings.append(TensorMapping("c", "c", Box.from_shape(shapes["c"]), (0, 1)))
    manifest = {mapping.disk: torch.empty(mapping.shape, device="meta") for mapping in mappings}
    with mock.patch.object(walker, "_Gather", wraps=walker._Gather) as gather:
        streamed = dict(
            check_stream(walk(module.state_dict(keep_vars=True), mappings, manifest, {}, bucket_bytes=128), manifest)
        )
    gathered = [[mapping.disk for part in call.args[1] for mapping in part.mappings] for call in gather.call_args_list]
    assert gathered == [["a", "b"], ["expert 0", "expert 1"], ["expert 2", "expert 3"], ["expert 4", "c"]]
    assert all(torch.equal(streamed[f"expert {n}"], module["experts"][n]) for n in range(5))


def swapped_gate_and_up(path: str, folder: str) -> dict[str, Any]:
    """Plant: gate and up of the fused experts change places."""

    def swapped(mapping: TensorMapping) -> tuple[int, ...]:
        return mapping.box.start

    original = load.plan_load

    def planted(*args: Any) -> Any:
        mappings, plan = original(*args)
        for fills in plan.fills.values():
            if len(fills) > 1:
                names = [name for _, name in sorted(fills, key=lambda fill: swapped(fill[0]), reverse=True)]
                fills[:] = [
                    (mapping, name)
                    for (mapping, _), name in zip(sorted(fills, key=lambda f: swapped(f[0])), names, strict=True)
                ]
        return mappings, plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "plan_load", planted)
        return load_change_write(path, "1", folder)


def test_a_wrong_layout_is_seen(tmp_path: Path) -> None:
    [result] = run(1, swapped_gate_and_up, str(source("mixtral")), str(tmp_path))
    assert any("gate_up_proj" in name for name in result["wrong"])


def without_buffers(path: str) -> list[str]:
    """Plant: non-persistent buffers are not rebuilt."""
    with no_forward(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "rebuild_buffers", lambda model: None)
        return differences(open_engine(path, "1"), plain(path))


def test_buffers_that_are_not_rebuilt_are_seen() -> None:
    [wrong] = run(1, without_buffers, str(source("llama")))
    assert wrong == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]


def test_boxes_of_a_file_are_read_and_written(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 6, 7), "b": torch.tensor(2.5), "c": torch.arange(12).reshape(3, 4).bfloat16()}
    layout = lay_out(tensors)
    create(tmp_path / "x.safetensors", layout)
    with RangeWriter(tmp_path, None) as writer:
        for name, tensor in tensors.items():
            part, entry = Box.from_shape(tuple(tensor.shape)), layout.entries[name]
            boxes = [Box((r, c, 0), (1, 3, 7)) for r in range(5) for c in (0, 3)] if name == "a" else [part]
            for box in boxes:
                writer.write("x.safetensors", entry, part, box, tensor[box.within(part)])
    back = load_file(tmp_path / "x.safetensors")
    assert all(same(back[name], tensor) for name, tensor in tensors.items())
    with TensorFile.open(tmp_path / "x.safetensors") as file:
        for box in (Box((1, 2, 3), (3, 4, 2)), Box((0, 0, 6), (5, 6, 1)), Box((4, 0, 0), (1, 6, 7))):
            assert torch.equal(file.read("a", box), tensors["a"][box.within(Box.from_shape((5, 6, 7)))])
        assert file.bytes_read == 4 * (24 + 30 + 42)
