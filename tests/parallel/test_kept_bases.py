"""Bases that are quantised on disk keep their bytes: each weight is the one that a decoder reads, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.test_load import fp8_source, mxfp4_source
from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from weft.errors import UserError
from weft.ops import low_bit, nf4
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.source import open_model_weights
from weft.recipes.verify import require_packages
from weft.verify.peft_reference import rounded_base
from weft.verify.plants import planted
from weft.verify.reference import Reference

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def bitsandbytes_source(folder: Path, bits: int) -> Path:
    """A llama whose decoder's linear layers are as bitsandbytes saves them (Linear4bit with double quantisation, or
    Linear8bitLt)."""
    source = Path(saved_model("llama", **WIDE))
    folder.mkdir()
    method = {"quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".layers." not in name or weight.ndim < 2:
            tensors[name] = weight
        elif bits == 8:
            scales = weight.abs().amax(1)
            tensors[name] = torch.round(weight * (127.0 / scales[:, None])).to(torch.int8)
            tensors[name.removesuffix("weight") + "SCB"] = scales
            tensors[f"{name}_format"] = torch.tensor(0, dtype=torch.uint8)
        else:
            tensors |= in_four_bits(name, weight)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_four_bits(name: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scales = nf4.quantise(weight)
    absmax, (largest, mean) = nf4.quantise_scales(scales)
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape), "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": float(mean),
    }  # fmt: skip
    levels, _, scale_levels = nf4._tables(weight.device)
    return {
        name: codes.reshape(-1, 1),
        f"{name}.absmax": absmax.flatten(),
        f"{name}.quant_map": levels.clone(),
        f"{name}.nested_absmax": largest,
        f"{name}.nested_quant_map": scale_levels.clone(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


SOURCES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "nf4": (lambda folder: bitsandbytes_source(folder, 4), ("all-linear",)),
    "int8": (lambda folder: bitsandbytes_source(folder, 8), ("all-linear",)),
    "fp8": (fp8_source, ("all-linear", "mlp.experts.gate_up_proj")),
    "mxfp4": (mxfp4_source, ("mlp.experts.gate_up_proj",)),
}


def kept_differences(path: str, mesh: str, form: str, targets: tuple[str, ...], plant: str | None = None) -> list[str]:
    """Weights that differ from those that a base in the compute dtype has."""
    with planted(plant):
        quantised = open_engine(path, mesh, lora={"rank": 2, "base": form, "targets": targets})
        values = dict(quantised.tensors())
    assert quantised.module.kept_as_stored == quantised.module.quantised_shapes.keys() != set()
    plain = dict(open_engine(path, mesh, lora={"rank": 2, "targets": targets}).tensors())
    return [name for name, values in values.items() if not torch.equal(values, plain[name])]


@pytest.mark.parametrize(
    ("form", "mesh"), [("nf4", "tp2"), ("int8", "2"), ("fp8", "ep2"), ("mxfp4", "2"), ("fp8", "3"), ("mxfp4", "ep2")]
)
def test_bytes_of_the_files_are_kept(form: str, mesh: str, tmp_path: Path) -> None:
    write, targets = SOURCES[form]
    path = str(write(tmp_path / "source"))
    assert run(world_of(mesh), kept_differences, path, mesh, form, targets) == [[]] * world_of(mesh)


@pytest.mark.parametrize(("bits", "form"), [(4, "nf4"), (8, "int8")])
def test_bitsandbytes_files_are_read(bits: int, form: str, tmp_path: Path) -> None:
    """Whole, and in boxes that cut blocks."""
    opened = open_model_weights(str(bitsandbytes_source(tmp_path / "source", bits)))
    plain = load_file(Path(saved_model("llama", **WIDE)) / "model.safetensors")
    assert opened.names == sorted(plain)
    for name in opened.decoders:
        expected = rounded_base(plain[name], form, (0, 0))
        assert torch.equal(opened.read(name), expected), name
        box = Box((3, 38), (expected.shape[0] - 8, 70))
        assert torch.equal(opened.read(name, box), expected[box.within(Box.from_shape(tuple(expected.shape)))])


def refused(path: str, form: str) -> str:
    with pytest.raises(UserError) as error:
        open_engine(path, "1", lora={"rank": 2, "base": form})
    return str(error.value)


def test_mxfp4_is_read_and_never_made() -> None:
    message = run(1, refused, saved_model("llama"), "mxfp4")[0]
    assert "model.path has none. Set lora.base to nf4, int8, fp8 or compute" in message
    assert low_bit.FORMATS["mxfp4"].sharded


def test_a_description_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = bitsandbytes_source(tmp_path / "source", 4)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {f"{name}.absmax": tensors[f"{name}.absmax"][:-1].clone()}, path / "model.safetensors")
    with pytest.raises(UserError, match="is not .* in bitsandbytes' 4 bits"):
        open_model_weights(str(path))


@pytest.mark.parametrize("bits", [4, 8])
def test_verify_reads_the_files_of_bitsandbytes_by_that_package(tmp_path: Path, bits: int) -> None:
    """The reference's weights are those that weft decodes; without the package, the error says what to install."""
    path = bitsandbytes_source(tmp_path / "model", bits)
    with mock.patch("importlib.util.find_spec", return_value=None), pytest.raises(UserError) as error:
        require_packages(str(path))
    assert "which needs it to read the files: pip install bitsandbytes accelerate." in str(error.value)
    require_packages(saved_model("llama"))
    pytest.importorskip("bitsandbytes")
    require_packages(str(path))
    plain = dict(Reference(str(path)).plain.named_parameters())
    opened = open_model_weights(str(path))
    assert opened.names == sorted(plain)
    for name, parameter in plain.items():
        assert parameter.requires_grad and torch.allclose(parameter, opened.read(name), rtol=1e-5, atol=1e-7), name
