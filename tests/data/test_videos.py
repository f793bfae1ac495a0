"""Videos of rows: read, sampled, laid out and given to the tower as transformers' processors would."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from tests.hostile.test_configs import SPECIAL
from tests.support.toy_tokenizers import write_jsonl
from tests.support.vision_zoo import encoded, picture, vision_folder
from weft import cli
from weft.config.schema import DataConfig
from weft.data.documents import Documents, load_documents
from weft.data.encode import Encoding, changed_files, load_tokenizer
from weft.data.images import Images, read_images
from weft.data.tokenise import TokeniseOptions
from weft.engine.batch.document import Document
from weft.errors import UserError
from weft.models.clips import Clip, Sampling
from weft.models.hf_video import VIDEO_PROCESSORS, video_settings
from weft.models.vision import Vision

Model = tuple[PreTrainedTokenizerBase, Images]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")
    by_family: dict[str, str] = {}
    return lambda family: by_family.get(family) or by_family.setdefault(family, vision_folder(root / family, family))


def loaded(path: str, **data: Any) -> Model:
    tokenizer = load_tokenizer(path)
    images = read_images(path, tokenizer, DataConfig(path="unused", **data))
    assert images is not None
    return tokenizer, images


@pytest.fixture
def qwen(folders: Callable[[str], str]) -> Model:
    return loaded(folders("qwen2_5_vl"), video=SMALL)


SMALL = {"min_pixels": 256, "max_pixels": 64 * 64}


def read(data: Any, model: Model, **options: Any) -> Documents:
    return load_documents(data, model[0], images=model[1], **{"max_length": 10_000, **options})[0]


def question_row(*parts: Any, **columns: Any) -> dict[str, Any]:
    """A row: videos, images and texts, then the answer."""
    shown = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": "a cat"}], **columns}


def video(source: Any, **options: Any) -> dict[str, Any]:
    return {"type": "video", "video": source, **options}


def film(count: int, height: int = 40, width: int = 56) -> list[Image.Image]:
    return [picture(height, width, seed) for seed in range(count)]


def animation(frames: Sequence[Image.Image], form: str = "PNG", milliseconds: int = 250) -> bytes:
    out = io.BytesIO()
    exactly = {"lossless": True} if form == "WEBP" else {}
    frames[0].save(out, form, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, **exactly)
    return out.getvalue()


def media_of(document: Document) -> dict[str, torch.Tensor]:
    assert document.media is not None
    return document.media.inputs


# ---------------------------------------------------------------- which frames are taken


def test_frames_are_taken_evenly_and_in_pairs() -> None:
    sampling = Sampling(fps=2.0, min_frames=4, max_frames=16)
    assert sampling.clip(300, 30.0) == Clip(300, 30.0, 16)  # 20 at two a second
    assert sampling.clip(90, 30.0).num_frames == 6 and sampling.clip(90, 30.0).indices == [0, 18, 36, 53, 71, 89]
    assert (
        sampling.clip(30, 30.0).num_frames == 4
        and sampling.clip(3, 30.0).num_frames == 2
        and sampling.clip(1, 30.0).indices == [0]
    )
    assert sampling.clip(105, 30.0).num_frames == 6  # 7 at two a second
    assert sampling.clip(90, 30.0).sampled_fps == pytest.approx(2.0)


# ---------------------------------------------------------------- what transformers' processors would make


def expected_patches(pictures: Sequence[Image.Image], family: str, patch: int = 8) -> torch.Tensor:
    """As `patchify` of Qwen2VLVideoProcessor documents it: [time, 2 frames, channels, rows of 2 x 2 patches]."""
    default = VIDEO_PROCESSORS["Qwen3VLProcessor" if family == "qwen3_vl" else "Qwen2VLProcessor"]
    frames = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]).double() / 255
    frames = (frames - torch.tensor(default.image_mean)[:, None, None]) / torch.tensor(default.image_std)[:, None, None]
    if len(frames) % 2:
        frames = torch.cat([frames, frames[-1:]])
    time, (height, width) = len(frames) // 2, [side // patch for side in frames.shape[-2:]]
    cut = frames.view(time, 2, 3, height // 2, 2, patch, width // 2, 2, patch)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * height * width, -1)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("count", [4, 5])
def test_patches_are_those_of_the_familys_video_processor(
    family: str, count: int, folders: Callable[[str], str]
) -> None:
    max_pixels = 64 * 64 * (count if family == "qwen3_vl" else 1)
    tokenizer, _ = model = loaded(folders(family), video={"min_pixels": 256, "max_pixels": max_pixels})
    frames = film(count)  # 40 x 56 pixels: resized to 48 x 64 in all three
    (document,) = read([question_row(video(frames), "What happens?")], model)
    inputs, time = media_of(document), -(-count // 2)
    assert inputs["video_grid_thw"].tolist() == [[time, 4, 8]] or inputs["video_grid_thw"].tolist() == [[time, 6, 8]]
    height, width = (8 * side for side in inputs["video_grid_thw"][0, 1:].tolist())
    resized = [picture.resize((width, height), Image.Resampling.BICUBIC) for picture in frames]
    torch.testing.assert_close(
        inputs["pixel_values_videos"].double(), expected_patches(resized, family), rtol=0, atol=1e-5
    )
    text = tokenizer.decode(document.tokens)
    frame = "<|video_pad|>" * (height * width // 256)
    if family == "qwen3_vl":
        pairs = [frame] * time
        stamps = ["0.2", "1.2", "2.0"] if count == 5 else ["0.2", "1.2"]  # of frames at 0, 0.5, 1, ... seconds
        between = [
            f"<{seconds} seconds><|vision_start|>{placeholders}<|vision_end|>"
            for seconds, placeholders in zip(stamps, pairs, strict=True)
        ]
        assert f"<|vision_start|>{''.join(between)}<|vision_end|>What" in text
    else:
        assert f"<|vision_start|>{frame * time}<|vision_end|>What" in text
    assert inputs.get("second_per_grid_ts", torch.ones(1)).tolist() == [1.0]
    assert ("second_per_grid_ts" in inputs) == (family == "qwen2_5_vl")
    measures = documents_measures(model, frames)
    assert document.media is not None and measures == (len(inputs["pixel_values_videos"]), document.media.pairs, True)
    assert tokenizer.decode(document.tokens[document.weights > 0]) == "a cat<|im_end|>"


def test_frames_of_a_video_are_attended_to_apart() -> None:
    """Their number counts for the cost of a document as often as they are, not squared."""
    grids = {"video_grid_thw": torch.tensor([[3, 4, 2]]), "image_grid_thw": torch.tensor([[1, 2, 6]])}
    assert Vision.patches(SimpleNamespace(), grids) == [12, 8, 8, 8]  # type: ignore[arg-type]


def documents_measures(model: Model, frames: Any) -> tuple[int, int, bool]:
    measures = read([question_row(video(frames))], model).measures()
    return int(measures.patches[0]), int(measures.pairs[0]), bool(measures.videos[0])


@pytest.mark.parametrize("per_video", [False, True])
def test_sizes_stay_within_the_limits(per_video: bool) -> None:
    frames = replace(
        VIDEO_PROCESSORS["Qwen3VLProcessor" if per_video else "Qwen2VLProcessor"], patch_size=8, shortest_edge=4096
    )
    for height, width, frame_count in ((40, 56, 4), (1080, 1920, 6), (9, 300, 2), (300, 40, 9)):
        limited = frames.limited({"max_pixels": 65536})
        size = limited.size(height, width, frame_count)
        assert size[0] % 16 == size[1] % 16 == 0
        assert 4096 <= size[0] * size[1] * (frame_count if per_video else 1) <= 65536
        assert 0.6 < size[0] / size[1] * width / height < 1.7 or min(size) == 16
    with pytest.raises(ValueError, match="aspect ratio"):
        frames.size(10, 4000, 2)


def test_settings_are_those_of_the_models_files() -> None:
    settings = video_settings("Qwen2_5_VLProcessor", {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14})
    assert settings is not None and (settings.shortest_edge, settings.longest_edge) == (3136, 12845056)
    size = {"shortest_edge": 4096, "longest_edge": 25165824}
    own_settings = video_settings("Qwen3VLProcessor", {"size": size, "image_mean": [0.1, 0.2, 0.3], "patch_size": 16})
    assert (
        own_settings is not None
        and own_settings.image_mean == (0.1, 0.2, 0.3)
        and own_settings.longest_edge == 25165824
    )
    assert video_settings("Qwen2VLProcessor", {"cap_pixels_per_frame": True}) is None
    assert video_settings("Gemma3Processor", {}) is None


# ---------------------------------------------------------------- the forms of a video

FORMS: dict[str, Callable[[Path, list[Image.Image]], Any]] = {
    "folder": lambda root, frames: _folder(root / "clip", frames),
    "paths": lambda root, frames: [f"{name}/{n}.png" for name in [_folder(root / "clip", frames)] for n in range(12)],
    "bytes": lambda root, frames: [{"bytes": encoded(frame), "path": None} for frame in frames],
    "base64": lambda root, frames: [base64.b64encode(encoded(frame)).decode() for frame in frames],
    "PIL": lambda root, frames: frames,
    "APNG": lambda root, frames: _file(root / "clip.png", animation(frames, milliseconds=500)),
    "WebP": lambda root, frames: _file(root / "clip.webp", animation(frames, "WEBP", 500)),
    "WebP bytes": lambda root, frames: {"bytes": animation(frames, "WEBP", 500), "path": "gone.webp"},
    "data URI": lambda root, frames: (
        "data:image/png;base64," + base64.b64encode(animation(frames, "PNG", 500)).decode()
    ),
}


def _folder(path: Path, frames: Sequence[Image.Image]) -> str:
    path.mkdir()
    for number, frame in enumerate(frames):
        frame.save(path / f"{number}.png")
    (path / ".hidden").write_text("no frame")
    return path.name


def _file(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return path.name


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_video_give_the_same(
    form: str, tmp_path: Path, qwen: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two frames in a second, as data.video takes them."""
    monkeypatch.chdir(tmp_path)
    frames = film(12)  # names from 0 to 11: 10 comes last but one
    (expected,) = read([question_row(video(frames), "What?")], qwen)
    source = FORMS[form](tmp_path, frames)
    row = question_row(video(source), "What?")
    if form in ("folder", "paths", "base64", "APNG", "WebP", "data URI"):
        (document,) = read(str(write_jsonl(tmp_path / "d.jsonl", row)), qwen)
    else:
        (document,) = read([row], qwen)
    assert document.tokens.tolist() == expected.tokens.tolist()
    actual, reference = media_of(document), media_of(expected)
    assert actual.keys() == reference.keys() and all(torch.equal(actual[name], reference[name]) for name in reference)


def test_columns_and_places_of_other_libraries(tmp_path: Path, qwen: Model) -> None:
    _folder(tmp_path / "clip", film(4))
    _file(tmp_path / "cat.png", encoded(picture(40, 40, 9)))
    user, answer = {"role": "user"}, {"role": "assistant", "content": "a cat"}
    video_part, image = {"type": "video"}, {"type": "image"}
    rows = [
        {"messages": [{**user, "content": "<video>What?<image>"}, answer], "videos": ["clip"], "images": ["cat.png"]},
        {"messages": [{**user, "content": "What?"}, answer], "videos": "clip", "images": ["cat.png"]},
        {
            "messages": [{**user, "content": [video_part, {"type": "text", "text": "What?"}, image]}, answer],
            "images": ["cat.png"], "videos": [{"type": "video", "video": "clip", "sample_fps": 4}],
        },
        {
            "prompt": [{**user, "content": "<video>What?<image>"}], "completion": [answer],
            "videos": [[f"clip/{n}.png" for n in range(4)]], "images": ["cat.png"],
        },
    ]  # fmt: skip
    documents = read(str(write_jsonl(tmp_path / "d.jsonl", *rows)), qwen)
    texts = [qwen[0].decode(document.tokens) for document in documents]
    shorter = [re.sub(r"(<\|\w+_pad\|>)+", r"\1", text).partition("user\n")[2] for text in texts]
    rendered = "<|vision_start|><|{}_pad|><|vision_end|>"
    joined = rendered.format("video") + "What?" + rendered.format("image")
    assert [text.startswith(joined) for text in shorter] == [True, False, True, True]
    assert shorter[1].startswith(rendered.format("video") + rendered.format("image") + "What?") or shorter[
        1
    ].startswith(rendered.format("image") + rendered.format("video") + "What?")
    for document in documents:
        assert {"pixel_values", "pixel_values_videos"} <= media_of(document).keys()
    assert [media_of(measured)["second_per_grid_ts"].tolist() for measured in documents] == [[1.0], [1.0], [0.5], [1.0]]
    assert documents.measures().videos.all()


def test_placeholders_are_never_trained(qwen: Model) -> None:
    answer = [{"type": "text", "text": "see "}, video(film(4)), {"type": "text", "text": "there"}]
    rows = [{"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}]}]
    placeholder = qwen[0].convert_tokens_to_ids("<|video_pad|>")
    for train_on in ("answers", "all"):
        (document,) = read(rows, qwen, encoding=Encoding(train_on))
        trained = document.tokens[document.weights > 0].tolist()
        assert placeholder in document.tokens.tolist() and placeholder not in trained


# ---------------------------------------------------------------- data.video


@pytest.mark.covers("data.video")
def test_data_video_says_which_frames_and_how_large(tmp_path: Path, folders: Callable[[str], str]) -> None:
    path = tmp_path / "clip.webp"
    path.write_bytes(animation(film(20), "WEBP"))  # 5 seconds of 4 frames

    def grid(**options: float) -> list[int]:
        (document,) = read([question_row(video(str(path)))], loaded(folders("qwen2_5_vl"), video={**SMALL, **options}))
        sizes: list[int] = media_of(document)["video_grid_thw"][0].tolist()
        return sizes

    assert grid() == grid(fps=2) == [5, 4, 8] or grid() == [5, 6, 8]
    assert [grid(fps=fps)[0] for fps in (0.1, 1, 4, 100)] == [2, 2, 10, 10]
    assert grid(fps=0.1, min_frames=6)[0] == 3 and grid(max_frames=4)[0] == 2
    small, large = grid(max_pixels=1024), grid(min_pixels=16384, max_pixels=65536)
    assert small[1] * small[2] < grid()[1] * grid()[2] < large[1] * large[2]


@pytest.mark.parametrize(
    "file", ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"]
)
def test_checkpoints_have_the_limits_of_the_run(file: str, tmp_path: Path, folders: Callable[[str], str]) -> None:
    path = tmp_path / "model"
    shutil.copytree(folders("qwen2_5_vl"), path)
    if file.startswith("video"):
        (path / file).write_text(json.dumps({"patch_size": 8, "min_pixels": 256, "max_pixels": 8192, "fps": 2}))
    elif file.startswith("processor"):  # as transformers 5 saves a processor
        settings = json.loads((path / "preprocessor_config.json").read_text())
        nested = {
            "image_processor": settings,
            "video_processor": {"patch_size": 8, "min_pixels": 256, "max_pixels": 8192},
        }
        (path / file).write_text(json.dumps(nested))
    row = [question_row(video(film(4, 120, 120)))]
    saved = changed_files(str(path), DataConfig(path="unused", video={"min_pixels": 512, "max_pixels": 1024}))
    length = len(read(row, loaded(str(path), video={"min_pixels": 512, "max_pixels": 1024}))[0])
    assert length < len(read(row, loaded(str(path)))[0])
    for name, text in saved.items():
        (path / name).write_text(text)
    nested = file.startswith("processor")
    settings = (
        json.loads(saved[file])["video_processor"] if nested else json.loads(saved["video_preprocessor_config.json"])
    )
    assert settings["size"] == {"shortest_edge": 512, "longest_edge": 1024} and "min_pixels" not in settings
    assert settings["video_processor_type"] == "Qwen2VLVideoProcessor" and settings.get("fps", 2) == 2
    assert len(read(row, loaded(str(path)))[0]) == length


def test_limits_of_images_are_no_limits_of_videos(tmp_path: Path, folders: Callable[[str], str]) -> None:
    """Where a model has no file for videos, transformers takes the limits that the checkpoint has for images."""
    path = tmp_path / "model"
    shutil.copytree(folders("qwen2_5_vl"), path)
    row = [question_row(video(film(4, 120, 120)))]
    before = len(read(row, loaded(str(path)))[0])
    for name, text in changed_files(str(path), DataConfig(path="unused", image_pixels={"max": 1024})).items():
        (path / name).write_text(text)
    assert len(read(row, loaded(str(path)))[0]) == before


# ---------------------------------------------------------------- what is refused


def small_film(count: int = 2) -> list[str]:
    return [base64.b64encode(encoded(frame)).decode() for frame in film(count)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no file": (question_row(video("gone.gif")), "video (/"),
    "missing": (
        question_row(video("gone.gif")),
        "No such file or directory. Paths are relative to the file of the row",
    ),
    "still": (question_row(video(small_film()[0])), "is a still image. A video is a folder or list of frames"),
    "one frame": (question_row(video(small_film(1))), "a video has one frame. Write it as an image"),
    "no frames": (question_row(video([])), "a video has no frames"),
    "sizes": (
        question_row(video([*small_film(), base64.b64encode(encoded(picture(8, 8))).decode()])),
        "must have the same size",
    ),
    "container": (
        question_row(video("data:video/mp4;base64,AAAAIGZ0eXBpc29t")),
        "which is not installed: pip install av",
    ),
    "rate of a file": (
        question_row(video(base64.b64encode(animation(film(2))).decode(), sample_fps=2)),
        "`sample_fps` is only for a list or folder",
    ),
    "number": (
        question_row(video(3)),
        "a video is a path, a data: URI, base64, or {bytes, path} as datasets writes it, a",
    ),
    "rate": (
        question_row(video(small_film(), sample_fps=0)),
        "`sample_fps` must be the frames per second, above 0, not 0",
    ),
    "fps": (question_row(video(small_film(), fps=1)), "`fps` of a video is not read. Set data.video"),
    "many": (question_row(video(small_film(9))), "has 9 frames, but data.video allows 8"),
    "URL": (question_row(video("https://example.com/a.gif")), "fetches URLs only with data.fetch_images=true"),
    "URL of a frame": (
        question_row(video([small_film()[0], "https://example.com/a.png"])),
        "weft fetches only complete videos",
    ),
    "places": (
        question_row("<video><video>", videos=[small_film()]),
        "has 1 video in `videos` and 2 places for them (<video>",
    ),
    "no place": (question_row(video(None)), "has 0 videos in `videos` and 1 place"),
    "mark": (question_row("What is <|video_pad|>?"), "a text contains <|video_pad|>"),
    "text": ({"text": "a", "videos": ["a"]}, "`text` has no messages, which videos need"),
    "message": ({"messages": [{"role": "user", "content": "a", "videos": ["a"]}]}, "`videos` of a message is not read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_videos_that_are_refused(name: str, folders: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # as where it is not installed
    row, words = REFUSED[name]
    with pytest.raises(UserError) as caught:
        read([question_row("a"), row], loaded(folders("qwen2_5_vl"), video={**SMALL, "max_frames": 8}))
    assert str(caught.value).startswith("data[1]: ") and words in str(caught.value)


@pytest.mark.timeout(60)
def test_an_animation_that_takes_hours_to_draw(qwen: Model) -> None:
    """A quarter of a megabyte for 10,000 frames of 81 million pixels, of which each changes one."""
    head = b"GIF89a" + struct.pack("<HHBBB", 9000, 9000, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"\x21\xf9\x04\x08\x01\0\0\0\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    source = base64.b64encode(head + frame * 10_000 + b";").decode()
    began = time.process_time()
    with pytest.raises(UserError, match="has 10,000 frames of 9,000 x 9,000 pixels, together more than 20 x"):
        read([question_row(video(source))], qwen)
    assert time.process_time() - began < 10.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_video_that_is_no_file(kind: str, tmp_path: Path, qwen: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = SPECIAL[kind]
    make(Path("a.mp4"))
    message = "Too many levels" if kind == "loop" else message
    with pytest.raises(UserError, match=f"a.mp4.*{message}"):
        read([question_row(video(str(tmp_path / "a.mp4")))], qwen)


def test_families_whose_videos_are_not_read_are_named(folders: Callable[[str], str]) -> None:
    with pytest.raises(
        UserError, match=r"data\[0\]: video: weft does not support the video input of InternVLProcessor of mod"
    ):
        read([question_row(video(film(4)))], loaded(folders("internvl")))
    with pytest.raises(UserError, match=r"data.video: weft does not support the video input of InternVLProcessor"):
        loaded(folders("internvl"), video={"fps": 1})


def test_a_template_that_renders_no_videos_is_named(qwen: Model) -> None:
    template = qwen[0].chat_template.replace("c['type'] == 'video'", "false")
    with pytest.raises(UserError, match=r"data\[0\]"):
        read([question_row(video(film(4)), "a")], qwen, encoding=Encoding(chat_template=template))


# ---------------------------------------------------------------- caches, changes


def test_cached_tokens_are_of_the_videos_as_they_are(
    tmp_path: Path, qwen: Model, folders: Callable[[str], str]
) -> None:
    _folder(tmp_path / "clip", film(4))
    path = write_jsonl(
        tmp_path / "d.jsonl", question_row(video("clip"), "What?"), question_row(video(small_film()), "And?")
    )
    how = TokeniseOptions(cache=str(tmp_path / "cache"))
    first, cached = read(str(path), qwen, how=how), read(str(path), qwen, how=how)
    for document, cached_document in zip(first, cached, strict=True):
        assert all(
            torch.equal(media_of(document)[name], media_of(cached_document)[name]) for name in media_of(document)
        )
    picture(40, 56, 7).save(tmp_path / "clip" / "4.png")
    picture(40, 56, 8).save(tmp_path / "clip" / "5.png")
    with pytest.raises(UserError, match=r"d.jsonl:1: video \(.*clip\): has changed since the data were read"):
        cached[0]
    grown = read(str(path), qwen, how=how)[0]
    assert len(grown) > len(first[1]) and media_of(grown)["video_grid_thw"][0, 0] == 3
    slower = loaded(folders("qwen2_5_vl"), video={**SMALL, "fps": 1})
    assert media_of(read(str(path), slower, how=how)[0])["second_per_grid_ts"].tolist() == [2.0]


# ---------------------------------------------------------------- containers


def test_containers_are_decoded_where_pyav_is_installed(tmp_path: Path, qwen: Model) -> None:
    av = pytest.importorskip("av")
    frames = [Image.new("RGB", (64, 48), (8 * n, 255 - 8 * n, 128)) for n in range(30)]
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_image(frame)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    path = write_jsonl(
        tmp_path / "d.jsonl", question_row(video("clip.mp4"), "What?"), question_row(video("bad.mp4"), "What?")
    )
    (tmp_path / "bad.mp4").write_bytes(b"\0\0\0 ftypisom" + bytes(99))
    with pytest.raises(UserError, match=r"d.jsonl:2: video \(.*bad.mp4\): cannot be decoded"):
        read(str(path), qwen)
    documents, report = load_documents(str(path), qwen[0], images=qwen[1], max_length=10_000, bad_rows="drop")
    assert len(report.bad) == 1
    (expected,) = read([question_row(video([frames[n] for n in Clip(30, 10.0, 6).indices]), "What?")], qwen)
    actual, reference = media_of(documents[0]), media_of(expected)
    assert actual["video_grid_thw"].tolist() == reference["video_grid_thw"].tolist() == [[3, 6, 8]]
    assert (actual["pixel_values_videos"] - reference["pixel_values_videos"]).abs().mean() < 0.1  # it loses a little
    assert actual["second_per_grid_ts"].tolist() == [1.0]


# ---------------------------------------------------------------- weft data preview


def test_the_preview_says_what_is_seen_of_a_video(
    tmp_path: Path, folders: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clip.webp").write_bytes(animation(film(20), "WEBP"))
    parts = [{"type": "image", "image": small_film()[0]}, video("clip.webp")]
    path = write_jsonl(tmp_path / "d.jsonl", question_row(*parts, "What?"))
    words = [
        f"model.path={folders('qwen2_5_vl')}",
        f"data.path={path}",
        "step.documents=1",
        "data.cache=null",
        "model.init=random",
    ]
    limits = "data.video={max_frames: 4, min_pixels: 256, max_pixels: 4096}"
    assert cli.main(["data", "preview", *words, limits]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "image 1: 56 x 40 pixels" in shown
    assert re.search(r"video 2: 4 of 20 frames \(0.8 a second\), 56 x 40 pixels, .*? tokens, .*?clip.webp", shown)
