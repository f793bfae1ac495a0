"""Images of rows: where they may stand, the tokens that they become, and what is said of those that cannot be read."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from tests.support.toy_tokenizers import byte_tokenizer, write_jsonl
from tests.support.vision_zoo import FAMILIES, encoded, picture, question, vision_folder
from weft.config.load import load_config
from weft.config.schema import DataConfig, SftConfig
from weft.data import image_files, image_urls
from weft.data.documents import Documents, load_documents
from weft.data.encode import Encoding, changed_files
from weft.data.image_columns import Image as ImageOfRow
from weft.data.image_files import ImageChecks, MediaInfo, MediaLocation, encode_picture
from weft.data.images import Images, expand_placeholders
from weft.data.loss_mask import MaskedText
from weft.data.records import ParseOptions
from weft.data.sources import SourcePart
from weft.data.tokenise import TokeniseOptions, TokeniseTask
from weft.engine.batch.document import Costs, Document, document_metadata
from weft.errors import UserError
from weft.models import hf, hf_processor
from weft.models.hf_processor import load_processor
from weft.recipes.run_data import read_run_data

CAT = picture(40, 56)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """family -> the path of a tiny model of it."""
    root = tmp_path_factory.mktemp("models")
    return lambda family: vision_folder(root / family, family)


@pytest.fixture(scope="module")
def qwen(models: Callable[[str], str]) -> tuple[PreTrainedTokenizerBase, Images]:
    return loaded(models("qwen2_5_vl"))


def user(text: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}], **columns}


def loaded(path: str, checks: ImageChecks | None = None, **pixels: int) -> tuple[PreTrainedTokenizerBase, Images]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return tokenizer, Images(path, tokenizer, pixels, checks)


def read(data: Any, model: tuple[PreTrainedTokenizerBase, Images], **options: Any) -> Documents:
    return load_documents(data, model[0], images=model[1], **{"max_length": 10_000, **options})[0]


def same(documents: Documents, expected: Documents) -> bool:
    """Whether tokens, masks and inputs of the tower are the same."""
    assert len(documents) == len(expected)
    for document, reference in zip(documents, expected, strict=True):
        assert (
            document.tokens.tolist() == reference.tokens.tolist()
            and document.weights.tolist() == reference.weights.tolist()
        )
        assert (document.media is None) == (reference.media is None)
        if document.media is not None and reference.media is not None:
            assert (
                document.media.patches == reference.media.patches
                and document.media.inputs.keys() == reference.media.inputs.keys()
            )
            assert all(
                torch.equal(document.media.inputs[name], reference.media.inputs[name]) for name in document.media.inputs
            )
    return True


# ---------------------------------------------------------------- tokens

CONVERSATIONS: list[list[tuple[int, int]]] = [[(40, 56)], [(20, 90), (50, 33)], [(64, 64), (31, 32), (100, 30)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_inputs_are_those_of_the_familys_processor(family: str, models: Callable[[str], str]) -> None:
    if family == "smolvlm":
        pytest.importorskip("num2words")
    tokenizer, images = model = loaded(models(family))
    rows = [question("What?", "two cats", [picture(*size) for size in sizes]) for sizes in CONVERSATIONS]
    documents = read(rows, model)
    for row, sizes, document in zip(rows, CONVERSATIONS, documents, strict=True):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        processor = images.processor()._processor
        expected = processor(text=[text], images=[picture(*size) for size in sizes], return_tensors="pt")
        assert document.tokens.tolist() == expected["input_ids"][0].tolist()
        assert document.media is not None and document.media.inputs
        assert all(torch.equal(values, expected[name]) for name, values in document.media.inputs.items())
        assert tokenizer.decode(document.tokens[document.weights > 0]) == "two cats<|im_end|>"
    measures = documents.measures()
    assert measures.patches.tolist() == [document.meta().patches for document in documents]
    for document, pairs in zip(documents, measures.pairs.tolist(), strict=True):
        media = document.media
        assert media is not None and media.pairs == pairs
        if "image_grid_thw" in media.inputs:
            assert pairs == int((media.inputs["image_grid_thw"].prod(1) ** 2).sum())


@pytest.mark.parametrize("family", ["gemma3", "llava", "idefics3"])
def test_the_processor_is_the_one_that_auto_classes_make(family: str, models: Callable[[str], str]) -> None:
    """Families with videos need torchvision for AutoProcessor."""
    path = models(family)
    _, images = loaded(path)
    processor, auto = images.processor()._processor, AutoProcessor.from_pretrained(path)
    text, cats = f"a {processor.image_token} b {processor.image_token}", [CAT, picture(90, 20)]
    assert processor(text=[text], images=cats)["input_ids"] == auto(text=[text], images=cats)["input_ids"]
    assert type(processor).__name__ == type(auto).__name__


def test_placeholders_are_never_trained(qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    answer = [{"type": "text", "text": "see "}, {"type": "image", "image": CAT}, {"type": "text", "text": "there"}]
    rows = [{"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}]}]
    placeholder = qwen[0].convert_tokens_to_ids("<|image_pad|>")
    for train_on in ("answers", "all"):
        (document,) = read(rows, qwen, encoding=Encoding(train_on))
        trained = document.tokens[document.weights > 0].tolist()
        assert placeholder in document.tokens.tolist() and placeholder not in trained
        assert "see <|vision_start|><|vision_end|>there<|im_end|>" in qwen[0].decode(trained)


def test_the_answers_of_a_pair_share_its_images(qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    """By metadata, without opening them."""
    question = [{"role": "user", "content": [{"type": "image", "image": CAT}, {"type": "text", "text": "What?"}]}]
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    documents = read([{"prompt": question, **answers}], qwen, rows=ParseOptions(preferences=True))
    placeholder = qwen[0].convert_tokens_to_ids("<|image_pad|>")
    costs = Costs(lambda length: 1, float, lambda patches, pairs: (100.0, 50))

    def paths(documents_of: Sequence[Document]) -> list[list[tuple[int, float, int]]]:
        metadata = document_metadata(documents_of, costs, lambda length: True, (placeholder,))
        return [[(node.end, node.cost, node.tower_tokens) for node in meta.path] for meta in metadata]

    with mock.patch.object(Documents, "build", side_effect=AssertionError("built")):
        measured = paths(documents)
    (shared, separate), (also_shared, _) = measured
    assert measured == paths(list(documents)) and shared == also_shared
    last = max(
        documents[0].tokens.tolist().index(token) for token in documents[0].tokens.tolist() if token == placeholder
    )
    assert last < shared[0] < separate[0] and shared == (shared[0], shared[0] + 100.0, 50)


def test_spans_move_with_what_replaces_a_placeholder() -> None:
    chat = MaskedText("ab@cd@ef", ((0, 2), (3, 7)))
    moved, replaced = expand_placeholders(
        chat, [match.span() for match in re.finditer("@", chat.text)], ["[1]", "[22]"]
    )
    assert moved.text == "ab[1]cd[22]ef"
    assert [moved.text[start:end] for start, end in moved.spans] == ["ab", "cd", "e"]
    assert [moved.text[start:end] for start, end in replaced] == ["[1]", "[22]"]


def test_text_alone_is_read_by_a_vision_model_as_ever(qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    rows = [{"messages": [{"role": "user", "content": "See <image>?"}, {"role": "assistant", "content": "No."}]}]
    (document,) = documents = read(rows, qwen)
    assert same(documents, load_documents(rows, qwen[0], max_length=10_000)[0])
    assert document.media is None and documents.measures().patches.tolist() == [0]


def test_a_model_without_a_processor_reads_text(tmp_path: Path) -> None:
    path = vision_folder(tmp_path, "qwen2_5_vl")
    (tmp_path / "preprocessor_config.json").unlink()
    model = loaded(path)
    text = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    assert len(read(text, model)) == 1
    with pytest.raises(UserError, match=r"data\[0\]: has images. .*cannot be created.*preprocessor_config.json"):
        read([question("a", "b", [CAT])], model)


# ---------------------------------------------------------------- where images may stand


def forms(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows that all say the same."""
    data = encoded(CAT)
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images" / "a cat.png").write_bytes(data)
    text = base64.b64encode(data).decode()

    def part(**payload: Any) -> dict[str, Any]:
        message = {"role": "user", "content": [{"type": "image", **payload}, {"type": "text", "text": "What?"}]}
        return {"messages": [message, {"role": "assistant", "content": "a cat"}]}

    def column(text: str, images: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "a cat"}]
        return {"messages": messages, "images": images}

    path = "images/a cat.png"
    return {
        "relative path": part(image=path),
        "absolute path": part(path=str(folder / path)),
        "file URL": part(url=(folder / path).as_uri()),
        "base64": part(base64=text),
        "data URI": part(type="image_url", image_url={"url": f"data:image/png;base64,{text}"}),
        "TRL, verl, LLaMA-Factory: places in the text": column("<image>What?", [path]),
        "TRL, ms-swift: no places": column("What?", [path]),
        "TRL: bare parts": {**part(), "images": [{"path": path, "bytes": None}]},
        "one image": column("<image>What?", path),
        "LLaVA: a column `image`": {"messages": column("<image>What?", path)["messages"], "image": path},
        "prompt and completion": {
            "prompt": [{"role": "user", "content": "<image>What?"}], "completion": "a cat", "images": [path],
        },
        "instruction": {"instruction": "<image>What?", "output": "a cat", "images": [path]},
        "sharegpt": {"messages": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "a cat"}],
                     "images": [path]},
    }  # fmt: skip


def test_all_forms_of_rows_give_the_same_document(
    tmp_path: Path, qwen: tuple[PreTrainedTokenizerBase, Images], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = forms(tmp_path)
    documents = read(write_jsonl(tmp_path / "rows.jsonl", *rows.values()), qwen)
    expected = read([question("What?", "a cat", [CAT])] * len(rows), qwen)
    assert same(documents, expected)
    monkeypatch.chdir(tmp_path)
    assert same(read(list(rows.values()), qwen), expected)


def test_images_in_all_kinds_of_files(tmp_path: Path, qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    data = [encoded(CAT), encoded(picture(90, 20), "JPEG")]
    columns = [{"bytes": content, "path": None} for content in data]
    texts = [base64.b64encode(content).decode() for content in data]
    messages = user("<image>What?")["messages"]
    tables = [{"messages": messages, "images": [image]} for image in columns]
    lists = [{"messages": messages, "images": [text]} for text in texts]
    datasets.Dataset.from_list(tables).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(tables).save_to_disk(tmp_path / "saved")
    (tmp_path / "a.json").write_text(json.dumps(lists))
    write_jsonl(tmp_path / "a.jsonl", *lists)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in lists)
    expected = read([{"messages": messages, "images": [content]} for content in data], qwen)
    for name in ("a.parquet", "saved", "a.json", "a.jsonl", "b.jsonl.gz"):
        assert same(read(str(tmp_path / name), qwen), expected), name
    pictures = datasets.Dataset.from_list(tables).cast_column("images", datasets.List(datasets.Image()))
    assert same(read(pictures, qwen), expected)


def test_an_image_is_seen_as_its_orientation_says(qwen: tuple[PreTrainedTokenizerBase, Images], tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    CAT.save(tmp_path / "turned.png", exif=exif)
    turned = CAT.transpose(Image.Transpose.ROTATE_270)
    rows = [question("What?", "a cat", [image]) for image in (str(tmp_path / "turned.png"), turned)]
    first, second = read(rows, qwen)
    assert first.media is not None and second.media is not None
    assert all(torch.equal(first.media.inputs[name], second.media.inputs[name]) for name in first.media.inputs)


def ifd(*entries: tuple[int, int, int, bytes]) -> bytes:
    """EXIF of (tag, type, count, value or offset)."""
    packed = b"".join(struct.pack("<HHI", tag, kind, count) + value for tag, kind, count, value in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + packed + struct.pack("<I", 0)


TURNED = (0x0112, 3, 1, struct.pack("<HH", 6, 0))
# EXIF with an orientation, and what else breaks its reader or writer. The last has no orientation that can be read.
STRANGE_EXIF = {
    "a float where text is due": ifd(TURNED, (0x010E, 11, 1, struct.pack("<f", 1.5))),
    "an offset out of range": ifd(TURNED, (0x010E, 2, 100, struct.pack("<I", 10**6))),
    "a directory out of range": ifd(TURNED, (0x8769, 4, 1, struct.pack("<I", 10**6))),
    "an orientation that is a float": ifd((0x0112, 11, 1, struct.pack("<f", 6.0))),
    "two orientations": ifd((0x0112, 3, 2, struct.pack("<HH", 6, 6))),
    "no directory": b"Exif\0\0II*\0" + struct.pack("<I", 99_999),
}


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("name", [*STRANGE_EXIF, *(f"TIFF {n}" for n in range(1, 9))])
def test_what_is_measured_before_training_is_what_a_step_reads(name: str, decode: bool) -> None:
    """Whatever the EXIF holds. Pillow itself turns TIFF."""
    file, picture = io.BytesIO(), CAT.convert("RGB")
    if name in STRANGE_EXIF:
        picture.save(file, "JPEG", exif=STRANGE_EXIF[name])
        upright = Image.open(file).convert("RGB")
        upright = upright.transpose(Image.Transpose.ROTATE_270) if name != "no directory" else upright
    else:
        picture.save(file, "TIFF", tiffinfo={0x0112: int(name[-1])})
        upright = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    image = ImageOfRow(data=file.getvalue())
    pixels, read = image_files.load_pixels(image, "row", ImageChecks())
    assert pixels.tobytes() == upright.tobytes() and (pixels.width, pixels.height) == upright.size
    assert image_files.measure_image(image, "row", ImageChecks(decode=decode)).shape == read.shape


def test_an_image_that_fills_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(picture: Any) -> None:
        raise MemoryError

    image = ImageOfRow(data=encoded(CAT))
    monkeypatch.setattr(Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(MemoryError) as caught:
        image_files.measure_image(image, "d.jsonl:3", ImageChecks())
    assert caught.value.__notes__ == [
        "d.jsonl:3 (in the row): not enough memory to decode this image. Make it smaller, or remove it."
    ]


def test_grey_and_transparent_images_become_rgb(qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    for mode in ("L", "RGBA", "P", "1", "CMYK", "LA"):
        image = CAT.convert("RGB").convert(mode) if mode not in ("LA",) else CAT.convert("L").convert("LA")
        converted, reference = read([question("a", "b", [image]), question("a", "b", [image.convert("RGB")])], qwen)
        assert converted.media is not None and reference.media is not None
        assert torch.equal(converted.media.inputs["pixel_values"], reference.media.inputs["pixel_values"])


# ---------------------------------------------------------------- what is refused


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and holds nothing."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR" + head, b"IDAT" + zlib.compress(b"nothing"))
    packed = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


JPEG = encoded(CAT, "JPEG")
BAD_IMAGES = {
    "missing.png": (None, "there is no such file. Paths are relative to the file of the row"),
    "empty.png": (b"", "is empty"),
    "text.png": (b"not an image", "is not a readable image (formats: PNG, JPEG"),
    "truncated.jpg": (JPEG[: len(JPEG) // 2], "is damaged: "),
    "truncated.png": (encoded(CAT)[:200], "is damaged: "),
    "large.png": (bomb(12_000, 12_000), "12,000 x 12,000 pixels, more than data.max_image_pixels = 89,478,485"),
    "bomb.png": (bomb(100_000, 100_000), "pixels"),
    "deep.png": (encoded(Image.new("I;16", (9, 9))), "16 bits per pixel"),
    "narrow.png": (encoded(Image.new("RGB", (900, 3))), "processor refuses images of 900 x 3 pixels"),
    "program.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "is not a readable image"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_an_image_that_cannot_be_read_is_named_or_left_out(
    name: str, tmp_path: Path, qwen: tuple[PreTrainedTokenizerBase, Images]
) -> None:
    data, words = BAD_IMAGES[name]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    good = question("What?", "a cat", [base64.b64encode(encoded(CAT)).decode()])
    bad = question("What?", "a cat", [name])
    path = write_jsonl(tmp_path / "rows.jsonl", good, bad, good)
    with pytest.raises(UserError) as caught:
        read(path, qwen)
    assert f"{path}:2: " in str(caught.value) and words in str(caught.value)
    assert "data.bad_rows=drop" in str(caught.value)
    documents, report = load_documents(path, qwen[0], images=qwen[1], max_length=10_000, bad_rows="drop")
    assert len(documents) == 2 and len(report.bad) == 1
    assert words in report.bad[0][1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more images": (user("<image>a", images=["a", "b"]), "has 2 images in `images` and 1 place for them"),
    "more places": (user("<image>a<image>", images=["a"]), "has 1 image in `images` and 2 places"),
    "no image": (user([{"type": "image"}]), "has 0 images in `images` and 1 place"),
    "another column": (user([{"type": "image"}], pictures="a"), "has 0 images in `images` and 1 place"),
    "a column without a place": (user("a", image="a"), "Set 'data.columns={images: image}'"),
    "pixels of one": (
        user([{"type": "image", "image": "a.png", "max_pixels": 9}]),
        "`max_pixels` of an image is not read. Set data.image_pixels",
    ),
    "null": (user("<image>a", images=[None]), "`images` contains null"),
    "number": (user("a", images=[3]), "an image is a path, a data: URI, base64, or {bytes, path}"),
    "bad base64": (user([{"type": "image", "image": "data:image/png;base64,@@"}]), "is not valid base64"),
    "no base64": (user([{"type": "image", "image": "data:image/png,abc"}]), "is not a data: URI of base64"),
    "URL": (user("<image>", images=["https://example.com/a.png"]), "fetches URLs only with data.fetch_images=true"),
    "audio": (user([{"type": "audio", "audio": "a.wav"}]), 'of type "audio": weft reads text, images and videos'),
    "audios": (
        user("a", audios=["a.wav"]),
        "`audios` is not supported in this version, which reads text, images and videos",
    ),
    "mark": (user("What is <|image_pad|>?"), "a text contains <|image_pad|>, this model's placeholder"),
    "text": ({"text": "a", "images": ["a"]}, "`text` has no messages, which images need"),
    "half a letter": (user("a", images=["~\ud800/a.png"]), "half of a surrogate pair"),
    "no URL": (user("a", images=["file://[a/b.png"]), "is not a valid file: URL"),
    "no user": ({"messages": [{"role": "assistant", "content": "b"}], "images": ["a"]}, "no message of the user"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_with_images_that_are_refused(name: str, qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    row, words = REFUSED[name]
    with pytest.raises(UserError) as caught:
        read([user("a"), row], qwen)
    assert str(caught.value).startswith("data[1]: ") and words in str(caught.value)


def test_a_template_that_renders_no_images_is_named(qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    chatml = byte_tokenizer().chat_template
    with pytest.raises(
        UserError, match=r"data\[0\]: has 1 images, but the chat template writes 0 placeholders .*data.chat_te"
    ):
        read([question("What?", "a cat", [CAT])], qwen, encoding=Encoding(chat_template=chatml))


def test_images_are_no_matter_of_a_model_of_text() -> None:
    with pytest.raises(UserError, match=r"data\[0\]: has images or videos, and model.path is a text-only model"):
        load_documents([question("What?", "a cat", [CAT])], byte_tokenizer(), max_length=100)


# ---------------------------------------------------------------- lengths, caches, changes


def test_truncation_leaves_images_whole(qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    rows = [question("What?", "a cat " * 20, [CAT]), user("a")]
    uncut = read(rows, qwen)
    placeholder = qwen[0].convert_tokens_to_ids("<|image_pad|>")
    reach = max(uncut[0].tokens.tolist().index(placeholder) + uncut[0].tokens.tolist().count(placeholder), 0)
    cut = read(rows, qwen, max_length=len(uncut[0]) - 5, long_documents="truncate")
    assert len(cut[0]) == len(uncut[0]) - 5 and cut[0].media is not None
    with pytest.raises(UserError, match=rf"data\[0\]: truncation to {reach - 1} tokens .* cut its images"):
        read(rows, qwen, max_length=reach - 1, long_documents="truncate")
    assert len(read(rows, qwen, max_length=60, long_documents="drop")) == 1


def test_kept_tokens_are_made_anew_where_an_image_has_changed(
    tmp_path: Path, qwen: tuple[PreTrainedTokenizerBase, Images]
) -> None:
    image, how = tmp_path / "a.png", TokeniseOptions(cache=str(tmp_path / "kept"))
    image.write_bytes(encoded(CAT))
    path = write_jsonl(tmp_path / "rows.jsonl", question("What?", "a cat", ["a.png"]))
    first = read(path, qwen, how=how)
    assert same(read(path, qwen, how=how), first)
    (cached,) = (tmp_path / "kept" / "tokens").glob("*[!k]")
    before = (cached / "table.json").stat().st_mtime_ns
    assert same(read(path, qwen, how=how), first) and (cached / "table.json").stat().st_mtime_ns == before
    image.write_bytes(encoded(picture(90, 20)))
    changed = read(path, qwen, how=how)
    assert same(changed, read([question("What?", "a cat", [picture(90, 20)])], qwen))
    with pytest.raises(UserError, match=r"rows.jsonl:1: image \(.*a.png\): has changed since the data were read"):
        first[0]


def test_a_file_of_rows_that_changed_is_an_error(tmp_path: Path, qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    row = question("What?", "a cat", [base64.b64encode(encoded(CAT)).decode()])
    path = write_jsonl(tmp_path / "rows.jsonl", row)
    documents = read(path, qwen)
    assert documents[0].media is not None
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match="rows.jsonl: has changed while weft read it"):
        documents[0]


def test_documents_are_the_same_from_other_processes(
    tmp_path: Path, qwen: tuple[PreTrainedTokenizerBase, Images], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(encoded(CAT))
    path = write_jsonl(tmp_path / "rows.jsonl", *[question(f"{i}", "a cat", ["a.png"]) for i in range(20)])
    expected = read(path, qwen)
    monkeypatch.setattr("weft.data.tokenise.CREW_BYTES", 0)
    assert same(read(path, qwen, how=TokeniseOptions(workers=2)), expected)


# ---------------------------------------------------------------- keys


def test_a_run_has_one_processor(tmp_path: Path, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For what it trains on, what it holds out, and the prompts that it answers."""
    (tmp_path / "a.png").write_bytes(encoded(picture(24, 40)))
    row = question("who?", "me", ["a.png"])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = [f"{key}={tmp_path}/rows.jsonl" for key in ("data.path", "eval.path", "eval.prompts")]
    loaded_paths = []
    load = hf_processor.load_processor
    monkeypatch.setattr(
        hf_processor, "load_processor", lambda *arguments: loaded_paths.append(arguments[0]) or load(*arguments)
    )
    data = read_run_data(load_config([], [f"model.path={models('qwen2_5_vl')}", "model.init=random", *rows], SftConfig))
    assert data.held_out.questions is not None and data.held_out.questions.prompts[0].images is not None
    assert len(loaded_paths) == 1


@pytest.mark.covers("data.image_pixels")
def test_image_pixels_are_the_processors_limits(models: Callable[[str], str]) -> None:
    row = [question("What?", "a cat", [picture(120, 120)])]
    lengths = [len(read(row, loaded(models("qwen2_5_vl"), max=max_pixels))[0]) for max_pixels in (1024, 4096, 16384)]
    assert lengths == sorted(set(lengths))
    small = [question("What?", "a cat", [picture(16, 16)])]
    lower_limits = [len(read(small, loaded(models("qwen2_5_vl"), min=n))[0]) for n in (256, 2048)]
    assert lower_limits[0] < lower_limits[1]
    assert len(read(row, loaded(models("mistral3"), max=1024))[0]) < len(read(row, loaded(models("mistral3")))[0])
    with pytest.raises(UserError, match=r"data.image_pixels: Gemma3ImageProcessor\w* of model.path has no such limits"):
        loaded(models("gemma3"), max=1024)
    with pytest.raises(UserError, match=r"PixtralImageProcessor\w* of model.path has no min"):
        loaded(models("mistral3"), min=1024)


@pytest.mark.parametrize("layout", ["preprocessor", "nested", "edges"])
def test_checkpoints_have_the_limits_of_the_run(layout: str, tmp_path: Path, models: Callable[[str], str]) -> None:
    """Whatever file the limits are in, and whatever they are called."""
    family, limits = ("mistral3", {"max": 1024}) if layout == "edges" else ("qwen2_5_vl", {"min": 512, "max": 1024})
    path = tmp_path / "model"
    shutil.copytree(models(family), path)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    if layout == "nested":  # as transformers 5 saves a processor
        (path / "preprocessor_config.json").unlink()
        settings |= {"min_pixels": 256, "max_pixels": 4096}
        (path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    row = [question("What?", "a cat", [picture(120, 120)])]
    saved = changed_files(str(path), DataConfig(path="unused", image_pixels=limits))
    of_videos = ["video_preprocessor_config.json"] if family == "qwen2_5_vl" else []
    assert [*saved] == ["processor_config.json" if layout == "nested" else "preprocessor_config.json", *of_videos]
    length = len(read(row, loaded(str(path), **limits))[0])
    assert length < len(read(row, loaded(str(path)))[0])
    for name, text in saved.items():
        (path / name).write_text(text)
    assert len(read(row, loaded(str(path)))[0]) == length
    assert changed_files(str(path), DataConfig(path="unused")) == {}


@pytest.mark.covers("data.check_images")
def test_check_images_decodes_before_training(tmp_path: Path, models: Callable[[str], str]) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG[: len(JPEG) // 2])
    path = write_jsonl(tmp_path / "rows.jsonl", question("What?", "a cat", ["a.jpg"]))
    with pytest.raises(UserError, match="rows.jsonl:1: image .* is damaged"):
        read(path, loaded(models("qwen2_5_vl")))
    documents = read(path, loaded(models("qwen2_5_vl"), ImageChecks(decode=False)))
    with pytest.raises(UserError, match="rows.jsonl:1: image .* is damaged"):
        documents[0]


@pytest.mark.covers("data.max_image_pixels")
def test_max_image_pixels_is_the_limit(models: Callable[[str], str]) -> None:
    row, size = [question("What?", "a cat", [CAT])], CAT.width * CAT.height
    assert len(read(row, loaded(models("qwen2_5_vl"), ImageChecks(max_pixels=size)))) == 1
    with pytest.raises(UserError, match=rf"more than data.max_image_pixels = {size - 1:,}"):
        read(row, loaded(models("qwen2_5_vl"), ImageChecks(max_pixels=size - 1)))


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        exists = self.path == "/cat.png"
        self.send_response(302 if self.path == "/file" else 200 if exists else 404)
        if self.path == "/file":
            self.send_header("Location", "file:///etc/hostname")
        self.end_headers()
        if exists:
            self.wfile.write(encoded(CAT))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Server) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


@pytest.mark.covers("data.fetch_images")
def test_fetch_images_fetches_them_once(server: str, models: Callable[[str], str], tmp_path: Path) -> None:
    model = loaded(models("qwen2_5_vl"), ImageChecks(fetch=True))
    path = write_jsonl(tmp_path / "rows.jsonl", question("What?", "a cat", [f"{server}/cat.png"]))
    documents = read(path, model)
    assert same(documents, read([question("What?", "a cat", [CAT])], model))
    for name, words in {"none.png": "the server answers 404", "file": "cannot be fetched"}.items():
        with pytest.raises(UserError, match=words):
            read([question("What?", "a cat", [f"{server}/{name}"])], model)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_sends_a_byte_at_a_time_is_left(
    scheme: str, begin: bytes, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes within the time that a byte has; over https, those of a handshake."""
    monkeypatch.setattr(image_urls, "_ANSWER_SECONDS", 0.5)
    handshake = b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb" if scheme == "https" else b""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(handshake or begin)
                while True:
                    connection.sendall(b"a")
                    time.sleep(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        row = question("What?", "a cat", [f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/cat.png"])
        with pytest.raises(UserError, match="cannot be fetched: it did not arrive within"):
            read([row], loaded(models("qwen2_5_vl"), ImageChecks(fetch=True)))
        thread.join()


# ---------------------------------------------------------------- what of transformers is relied on


@pytest.mark.compat
def test_what_processors_are_asked_for(models: Callable[[str], str]) -> None:
    """weft/models/hf_processor.py says which symbols."""
    path = models("qwen2_5_vl")
    processor = load_processor(path, hf.read_config(path), AutoTokenizer.from_pretrained(path), {})
    wrapped = processor._processor
    assert wrapped.get_attributes() == ["image_processor", "tokenizer", "video_processor"]
    assert wrapped.image_token in processor.marks and "image_grid_thw" in wrapped.image_processor.model_input_names
    out = wrapped(
        text=[f"a{wrapped.image_token}b"], images=[CAT], return_text_replacement_offsets=True, return_tensors="pt"
    )
    assert [item["replacement"] for item in out["text_replacement_offsets"][0]] == [wrapped.image_token * 8]
    assert processor.layout(((40, 56),)).patches == 32 == len(out["pixel_values"])
    assert processor._counts and processor._counted((700, 90)) == processor._processed(((700, 90),))
    assert "size" in wrapped.image_processor.to_dict()


def test_a_picture_in_memory_becomes_a_file_and_a_file_stays() -> None:
    of_file = ImageOfRow(data=encoded(CAT))
    assert encode_picture(of_file, "row 1", ImageChecks()) is of_file
    written = encode_picture(ImageOfRow(picture=CAT), "row 1", ImageChecks())
    assert written.data is not None
    with Image.open(io.BytesIO(written.data)) as picture:
        assert picture.format == "PNG" and picture.tobytes() == CAT.convert("RGB").tobytes()


def test_only_rows_that_hold_images_are_read_again(qwen: tuple[PreTrainedTokenizerBase, Images]) -> None:
    """The first row may be one that data.bad_rows=drop has left out."""

    def read_again(position: int) -> Any:
        raise AssertionError(f"row {position} is read")

    tokenizer, images = qwen
    location = MediaLocation(MediaInfo(CAT.height, CAT.width, len(encoded(CAT)), 0), data=encoded(CAT))
    part = SourcePart("a.jsonl", 0, True, lambda: iter(()), row=read_again)
    _, patches = TokeniseTask(tokenizer, images=images).inputs(part, "a.jsonl:2", [location])
    assert patches > 0
    with pytest.raises(AssertionError, match="row 3 is read"):
        TokeniseTask(tokenizer, images=images).inputs(part, "a.jsonl:2", [replace(location, data=None, position=3)])
