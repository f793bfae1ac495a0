"""Files of a model that were damaged, or made to do harm: each is refused in one sentence before a byte is used."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, normalizers

from tests.support import forked
from tests.support.cases import saved_model
from tests.support.fuzz import fuzz
from tests.support.toy_tokenizers import byte_tokenizer
from weft.data.encode import load_tokenizer
from weft.errors import UserError
from weft.files import check_folder, read_object, regular_file
from weft.models import hf
from weft.observe import resume
from weft.observe.resume import sample_rows
from weft.parallel.shards import adapter_files
from weft.parallel.shards.adapter_files import shortest_names
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.load import plan_load
from weft.parallel.shards.quantised_files import find_decoders
from weft.parallel.shards.safetensors_files import TensorFile
from weft.parallel.shards.source import open_model_weights

DEEP = "[" * 5000 + "]" * 5000

# ---------------------------------------------------------------- what is no regular file


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    workdir = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(workdir)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


KINDS: dict[str, Callable[[Path], None]] = {
    "is a FIFO": fifo,
    "is a socket": unix_socket,
    "is a device": lambda path: path.symlink_to("/dev/zero"),
    "is a directory": lambda path: path.mkdir(),
    "is a loop of symbolic links": loop,
    "cannot be opened: No such file": lambda path: path.symlink_to("nowhere"),
}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("model.safetensors", lambda folder: open_model_weights(str(folder))),
    "index": ("model.safetensors.index.json", lambda folder: open_model_weights(str(folder))),
    "config of a source": ("config.json", lambda folder: open_model_weights(str(folder))),
    "config": ("config.json", lambda folder: hf.read_config(str(folder))),
    "generation": ("generation_config.json", lambda folder: hf.read_config(str(folder))),
    "tokenizer": ("tokenizer.json", lambda folder: load_tokenizer(str(folder))),
    "adapter": ("adapter_config.json", adapter_files.read_config),
}


@cache
def small_source() -> dict[str, bytes]:
    """The files of a model with its tokenizer."""
    folder = Path(saved_model("llama", vocab_size=264))
    byte_tokenizer().save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def copied(folder: Path, *without: str) -> Path:
    for name, content in small_source().items():
        if name not in without:
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_what_it_is(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    KINDS[kind](copied(tmp_path, name) / name)
    with pytest.raises(UserError, match=f"{name}: {kind}"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a" * 300])
def test_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be a file name|File name too long"):
        regular_file(tmp_path / name, "a file")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_command_does_not_wait_for_a_fifo(name: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(copied(tmp_path / "m", name) / name)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    done = forked.run(["sft", "model.path=m", "data.path=d.jsonl", "train.steps=1", "train.epochs=null"], tmp_path)
    assert done.returncode == 2 and f"m/{name}: is a FIFO, not a" in done.stderr and "Traceback" not in done.stderr


# ---------------------------------------------------------------- headers of safetensors


def safetensors(header: object, data: bytes = bytes(range(16)), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: Any, end: Any, shape: Any = (2, 2), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


REPEATED_KEY = b'{"a":%b,"a":%b}'
HEADERS: dict[str, bytes] = {
    "a range before the first tensor": safetensors({"a": entry(-16, 0)}),
    "a range before the file": safetensors({"a": entry(-(2**40), -(2**40) + 16)}),
    "a range backwards": safetensors({"a": entry(16, 0)}),
    "ranges that overlap": safetensors({"a": entry(0, 16), "b": entry(0, 16)}),
    "ranges that overlap in part": safetensors({"a": entry(0, 16), "b": entry(8, 24)}, bytes(24)),
    "a gap": safetensors({"a": entry(0, 16), "b": entry(20, 36)}, bytes(36)),
    "a gap before the first tensor": safetensors({"a": entry(16, 32)}, bytes(32)),
    "bytes behind the last tensor": safetensors({"a": entry(0, 16)}, bytes(20)),
    "a tensor twice": safetensors(REPEATED_KEY % ((json.dumps(entry(0, 16)).encode(),) * 2)),
    "a field twice": safetensors(b'{"a":{"dtype":"F32","shape":[4],"shape":[2,2],"data_offsets":[0,16]}}'),
    "a negative size": safetensors({"a": entry(0, 16, (-2, -2))}),
    "a size that is no number": safetensors({"a": entry(0, 16, ("2", 2))}),
    "a size that is a fraction": safetensors({"a": entry(0, 16, (2.0, 2.0))}),
    "a size that is true": safetensors({"a": entry(0, 16, (True, 4))}),
    "a size beyond all bounds": safetensors({"a": entry(0, 0, (2**62, 2**62, 0))}),
    "an infinite size": safetensors(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,16]}}'),
    "a shape that is no list": safetensors({"a": entry(0, 16, {"4": 4})}),
    "a dtype that nobody knows": safetensors({"a": entry(0, 16, dtype="F33")}),
    "a dtype that is no name": safetensors({"a": entry(0, 16, dtype=["F32"])}),
    "one offset": safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [4]}}),
    "a tensor that is a list": safetensors({"a": [0, 16]}),
    "a list": safetensors([1, 2]),
    "a number": safetensors(17),
    "metadata that are no text": safetensors({"__metadata__": {"save": 1}, "a": entry(0, 16)}),
    "metadata that are a list": safetensors({"__metadata__": [], "a": entry(0, 16)}),
    "deep nesting": safetensors(DEEP.encode()),
    "deep nesting in metadata": safetensors(b'{"__metadata__":' + DEEP.encode() + b"}"),
    "no UTF-8": safetensors(b'{"\xff":' + json.dumps(entry(0, 16)).encode() + b"}"),
    "a length beyond the file": safetensors({"a": entry(0, 16)}, length=2**63),
    "a length in the middle": safetensors({"a": entry(0, 16)}, length=20),
    "no length": b"\x08\0\0",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(UserError, match=r"model\.safetensors: is (not a safetensors file|truncated)") as caught:
        TensorFile.open(tmp_path / "model.safetensors")
    assert "\n" not in str(caught.value)


def test_a_box_outside_its_tensor_is_never_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    with TensorFile.open(tmp_path / "model.safetensors") as file:
        for box in (Box((2,), (4,)), Box((-1,), (2,))):
            with pytest.raises(AssertionError):
                file.read("a", box)


def test_a_tensor_without_elements_tells_nothing_of_a_model(tmp_path: Path) -> None:
    """Which other bytes would be read in its place?"""
    save_file({"a": torch.ones(0, 4), "b": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert [row.tolist() for row in sample_rows(str(tmp_path))] == [[1.0, 1.0, 1.0]]


def read_all(path: Path) -> None:
    with TensorFile.open(path) as file:
        for name, entry in file.entries.items():
            assert tuple(file.read(name).shape) == entry.shape
        assert all(isinstance(value, str) for value in file.metadata.values())


def header_seeds(folder: Path) -> list[bytes]:
    tensors = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.int8),
        "empty": torch.ones(0),
    }
    save_file(tensors, folder / "seed.safetensors", {"format": "pt", "rank": "0"})
    return [
        (folder / "seed.safetensors").read_bytes(),
        safetensors({}, b""),
        HEADERS["a gap"],
        HEADERS["a tensor twice"],
    ]


# ---------------------------------------------------------------- indices

INDICES: dict[str, tuple[str, str]] = {
    "a list": ("[]", "is list, not an object"),
    "no weight_map": ("{}", "weight_map"),
    "an empty weight_map": ('{"weight_map": {}}', "weight_map"),
    "a weight_map that is a list": ('{"weight_map": ["a"]}', "weight_map"),
    "a weight_map that is text": ('{"weight_map": "model.safetensors"}', "weight_map"),
    "a file that is a number": ('{"weight_map": {"a": 7}}', "weight_map"),
    "a file that is null": ('{"weight_map": {"a": null, "b": "model.safetensors"}}', "weight_map"),
    "a file that is a list": ('{"weight_map": {"a": ["model.safetensors"]}}', "weight_map"),
    "a NUL": ('{"weight_map": {"a": "a\\u0000.safetensors"}}', r"names 'a\\x00\.safetensors'"),
    "a folder above": ('{"weight_map": {"a": "../model.safetensors"}}', "not a file of this folder"),
    "an absolute name": ('{"weight_map": {"a": "/dev/zero"}}', "not a file of this folder"),
    "a folder inside": ('{"weight_map": {"a": "inside/model.safetensors"}}', "not a file of this folder"),
    "the folder": ('{"weight_map": {"a": "."}}', "not a file of this folder"),
    "the folder above": ('{"weight_map": {"a": ".."}}', "not a file of this folder"),
    "no name": ('{"weight_map": {"a": ""}}', "not a file of this folder"),
    "half a surrogate pair": ('{"weight_map": {"a": "\\ud800"}}', "cannot be a file name"),
    "a long name": ('{"weight_map": {"a": "' + "a" * 300 + '"}}', "File name too long"),
    "deep nesting": ('{"weight_map": ' + DEEP + "}", "nested too deep"),
    "no JSON": ("weight_map", "is not JSON"),
    "no UTF-8": ("\xff", "is not JSON"),
    "a number without an end": ("9" * 5000, "is not JSON"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    text, words = INDICES[name]
    (copied(tmp_path) / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "inside").mkdir()
    with pytest.raises(UserError, match=words) as caught:
        open_model_weights(str(tmp_path))
    assert "\n" not in str(caught.value)


def index_parser(folder: Path) -> Callable[[Path], None]:
    (copied(folder) / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")

    def parse(path: Path) -> None:
        (folder / "model.safetensors.index.json").write_bytes(path.read_bytes())
        open_model_weights(str(folder)).close()

    return parse


def index_seeds() -> list[bytes]:
    file = "model-00001-of-00001.safetensors"
    weight_map = {"model.norm.weight": file, "lm_head.weight": file}
    return [json.dumps({"metadata": {"total_size": 7}, "weight_map": weight_map}).encode()]


# ---------------------------------------------------------------- configs

CONFIGS: dict[str, tuple[str, str]] = {
    "deep nesting": ('{"model_type": ' + DEEP + "}", "nested too deep"),
    "a list": ("[]", "is list, not an object"),
    "null": ("null", "is NoneType, not an object"),
    "no JSON": ("{", "is not JSON"),
    "no UTF-8": ('{"\xff": 1}', "is not JSON"),
    "a model_type that is a list": ('{"model_type": ["llama"]}', "cannot read a model config"),
    "a model_type with a NUL": ('{"model_type": "a\\u0000b"}', "cannot read a model config"),
    "a size that is a list": ('{"model_type": "llama", "hidden_size": []}', "cannot read a model config"),
    "layers that are text": ('{"model_type": "llama", "num_hidden_layers": "2"}', "cannot read a model config"),
    "architectures that are a number": ('{"model_type": "llama", "architectures": 7}', "s is 7|field 'architectures'"),
    "a class that is a number": ('{"model_type": "llama", "architectures": [7]}', r"s is \[7\]|field 'architectures'"),
    "layers without end": ('{"model_type": "llama", "num_hidden_layers": 9999}', "is 9999, and no model has over 1,"),
    "blocks of a tower without end": (
        '{"model_type": "qwen2_5_vl", "vision_config": {"depth": 1000000000}}', "depth is 1000000000, and no model"),
    "labels without end": ('{"model_type": "llama", "num_labels": 2147483648}', "num_labels is 2147483648"),
    "a text that is no config": ('{"model_type": "llama", "text_config": "x"}', "the config of its text is 'x'"),
    "experts without end": ('{"model_type": "qwen2_moe", "num_experts": 1000000000}', "num_experts is 1000000000"),
    "rope that is a number": ('{"model_type": "llama", "rope_parameters": 7}', "cannot read a model config"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    text, words = CONFIGS[name]
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=words) as caught:
        hf.read_config(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [None, -1, 0, "x", [8]])
def test_a_vocabulary_that_is_none(size: Any, tmp_path: Path) -> None:
    kind = {"model_type": "vit"} if size is None else {"model_type": "llama", "vocab_size": size}
    (tmp_path / "config.json").write_text(json.dumps(kind))
    with pytest.raises(UserError, match="config.json: vocab_size is|cannot read a model config") as caught:
        hf.vocabulary_size(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["logging", "pipeline", "LlamaConfig", "a\0b", ""])
def test_a_class_that_is_no_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [name]}))
    with pytest.raises(UserError, match="has no model"):
        hf.model_class(hf.read_config(str(tmp_path)))


@pytest.mark.parametrize("ends", ['"x"', '{"a": 1}', "[1, null, [2]]", "true", "1.5"])
def test_ends_that_are_no_tokens(ends: str, tmp_path: Path) -> None:
    (copied(tmp_path) / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    with pytest.raises(UserError, match="generation_config.json: eos_token_id is"):
        check_folder(str(tmp_path))


TOKENIZERS: dict[str, tuple[str, str]] = {
    "deep nesting": ("tokenizer.json", DEEP),
    "deep nesting of its config": ("tokenizer_config.json", '{"a": ' + DEEP + "}"),
    "a list": ("tokenizer.json", "[]"),
    "a config that is a list": ("tokenizer_config.json", "[]"),
    "a model that is a number": ("tokenizer.json", '{"version": "1.0", "model": 7}'),
    "no JSON": ("tokenizer.json", "{"),
    "a config that is no JSON": ("tokenizer_config.json", "{"),
    "added tokens that are text": ("tokenizer_config.json", '{"added_tokens_decoder": "x"}'),
    "a length that is text": (
        "tokenizer_config.json",
        '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": "x"}',
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    file, text = TOKENIZERS[name]
    (copied(tmp_path) / file).write_text(text)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("replaces", "words"),
    [
        ([("a", "aa")] * 24, "its normalizer can make a text 16,777,216 times as long"),
        ([("a", "b" * 2000)], "its normalizer can make a text 2,000 times as long"),
        ([("", "a")], "its normalizer replaces the empty text by 'a'"),
        ([(Regex(" *"), "xx")] * 7, "its normalizer can make a text 2,187 times as long"),
        ([(Regex(" +"), " ")] * 30 + [("\n", "\u2581")] * 30, ""),
    ],
)
def test_a_normaliser_that_fills_the_memory_is_refused(replaces: Any, words: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    rules = [normalizers.Replace(pattern, content) for pattern, content in replaces]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.save_pretrained(copied(tmp_path))
    if not words:
        assert load_tokenizer(str(tmp_path)).backend_tokenizer.normalizer is not None
        return
    with pytest.raises(UserError, match=words) as caught:
        load_tokenizer(str(tmp_path))
    assert f"{tmp_path}: tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": "2"}, "cannot read a model config.*num_hidden_layers"),
        ({"num_hidden_layers": 2.0}, "cannot read a model config.*num_hidden_layers.*2.0"),
        ({"dtype": "auto"}, "config.json: dtype is 'auto', but torch has no such dtype"),
    ],
)
def test_a_config_at_fault_is_not_blamed_on_the_tokenizer(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = copied(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=words):
        load_tokenizer(str(tmp_path))


ADAPTERS: list[tuple[dict[str, Any], str]] = [
    ({"r": "8"}, "r cannot be '8'"),
    ({"r": -1}, "r cannot be -1"),
    ({"r": True}, "r cannot be True"),
    ({"r": None}, "r cannot be None"),
    ({"lora_alpha": []}, "lora_alpha cannot be"),
    ({"lora_alpha": float("nan")}, "lora_alpha cannot be nan"),
    ({"modules_to_save": 7}, "modules_to_save cannot be 7"),
    ({"modules_to_save": "lm_head"}, "modules_to_save cannot be"),
    ({"target_parameters": [7]}, "target_parameters cannot be"),
    ({"base_model_name_or_path": ["x"]}, "base_model_name_or_path cannot be"),
    ({"rank_pattern": []}, "uses features that weft does not support"),
]


@pytest.mark.parametrize(("changes", "words"), ADAPTERS)
def test_an_adapter_that_lies_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    content = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **changes}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        adapter_files.read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(DEEP)
    with pytest.raises(UserError, match="nested too deep"):
        adapter_files.read_config(tmp_path)


Sizes = dict[str, tuple[int, ...]]
QUANTISED: dict[str, tuple[dict[str, Any], Sizes, str]] = {
    "blocks of nothing": ({"weight_block_size": [0, 16]}, {}, "weight_block_size is"),
    "a block that is text": ({"weight_block_size": "16"}, {}, "weight_block_size is"),
    "one side": ({"weight_block_size": [16]}, {}, "weight_block_size is"),
    "too few factors": ({"weight_block_size": [16, 16]}, {"w": (32, 32), "w_scale_inv": (1, 2)}, r"should be \[2, 2\]"),
    "factors of a vector": ({"weight_block_size": [16, 16]}, {"w": (32,), "w_scale_inv": (2,)}, "should be"),
    "a half missing": ({"quant_method": "mxfp4"}, {"w_blocks": (2, 8, 1, 16)}, "not the two halves"),
    "halves that differ": (
        {"quant_method": "mxfp4"}, {"w_blocks": (2, 8, 4, 16), "w_scales": (2, 8, 1)}, "not the two halves",
    ),
    "another number of dimensions": (
        {"quant_method": "mxfp4"}, {"w_blocks": (8, 16), "w_scales": (8,)}, "not the two halves",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_tensors_that_do_not_fit_are_refused(name: str) -> None:
    config, shapes, words = QUANTISED[name]
    fp8 = torch.float8_e4m3fn if "weight_block_size" in config else torch.uint8
    dtypes = {tensor: torch.float32 if "scale_inv" in tensor else fp8 for tensor in shapes}
    with pytest.raises(UserError, match=words):
        find_decoders({"quant_method": "fp8", **config}, shapes, dtypes, "m")


def test_a_quantization_config_that_is_no_object(tmp_path: Path) -> None:
    config = json.loads(small_source()["config.json"])
    (copied(tmp_path) / "config.json").write_text(json.dumps(config | {"quantization_config": ["fp8"]}))
    with pytest.raises(UserError, match="quantization_config is no object"):
        open_model_weights(str(tmp_path))


# ---------------------------------------------------------------- at random


def fuzz_all(folder: Path, count: int) -> None:
    fuzz(read_all, header_seeds(folder), count, suffix=".safetensors")
    (folder / "model").mkdir()
    fuzz(index_parser(folder / "model"), index_seeds(), count, suffix=".json")
    seeds: Sequence[bytes] = (b'{"a": [1, {"b": null}]}', b'{"weight_map": {}}')
    fuzz(lambda path: read_object(path, "JSON"), seeds, count, suffix=".json")


def test_damage_at_random(tmp_path: Path) -> None:
    fuzz_all(tmp_path, 500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_much_damage_at_random(tmp_path: Path) -> None:
    fuzz_all(tmp_path, 20_000)


def test_a_head_that_is_missing_may_be_the_embedding(tmp_path: Path) -> None:
    tensors = load_file(copied(tmp_path) / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, source = hf.build_meta(hf.read_config(str(tmp_path)), dtype=torch.float32, attention=None), str(tmp_path)
    with pytest.raises(UserError, match=r'write "tie_word_embeddings": true there; .*: lm_head.weight'):
        plan_load(model, open_model_weights(source), ())
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan_load(
        hf.build_meta(hf.read_config(source), dtype=torch.float32, attention=None), open_model_weights(source), ()
    )


@pytest.mark.parametrize(("ends", "fits"), [("null", True), ("2", True), ("[2, null]", True), ('[2, "x"]', False)])
def test_ends_of_generation_may_be_missing(ends: str, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    if fits:
        check_folder(str(tmp_path))
        return
    with pytest.raises(UserError, match=r"eos_token_id is \[2, 'x'\]"):
        check_folder(str(tmp_path))


def test_the_fingerprint_of_weights_reads_every_so_many_tensors_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints hold it, so that no version of weft may compute another. A tensor without elements has no row."""
    tensors = {name: torch.arange(6.0).reshape(3, 2) + 10 * i for i, name in enumerate("abcdefg")}
    save_file({**tensors, "bb": torch.zeros(0, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(resume, "_NUM_SAMPLED", 4)
    rows = [row.tolist() for row in sample_rows(str(tmp_path))]
    assert rows == [tensors[name][1].tolist() for name in "adf"]


def test_short_names_of_targets_are_in_one_order() -> None:
    """Ranks, and runs, write the same file."""
    leaves = ["gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj", "w1", "w2", "w3"]
    names = [f"layers.{layer}.{leaf}" for layer in range(2) for leaf in reversed(leaves)]
    assert shortest_names(names, names) == leaves
    assert shortest_names(names[:9], names) == sorted(names[:9])
