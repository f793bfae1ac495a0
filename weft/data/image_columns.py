"""The images and videos of a row: from content parts, and from the columns `images` and `videos`, whose positions are
marked in the texts.

{"role": "user", "content": [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "What is it?"}]}
{"messages": [{"role": "user", "content": "<video>What happens?"}, ...], "videos": ["cat.gif"]}

image_files.py and video_files.py open files; this file does not. For each image or video, chat templates get a bare
part {"type": "image"} or {"type": "video"}.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from weft.config.yaml12 import override
from weft.data.messages import IMAGE_PARTS, VIDEO_PARTS, Message, describe_type, parse_json_list
from weft.errors import UserError
from weft.strict_json import check_unicode
from weft.terminal import counted

COLUMN, VIDEOS = "images", "videos"
_FORMS = "a path, a data: URI, base64, or {bytes, path} as datasets writes it"
# The first characters of a PNG, JPEG, GIF, WebP, BMP or TIFF in base64. No path of this length begins like this.
_BASE64 = re.compile(r"\A(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk[0-9A-Za-z]|SUkqA|TU0AK)[A-Za-z0-9+/=\s]{40,}\Z")
# Keys that qwen-vl-utils reads from each part; in weft, data.video sets them for all videos.
_OF_EACH_VIDEO = (
    "fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels", "resized_height",
    "resized_width", "video_start", "video_end",
)  # fmt: skip

_OF_EACH_IMAGE = ("min_pixels", "max_pixels", "resized_height", "resized_width")


@dataclass(frozen=True, slots=True)
class Image:
    """The location of an image of a row. Exactly one of path (absolute), data (the encoded bytes), url and picture (a
    PIL image) is set; a fetched url also has data."""

    path: str | None = None
    data: bytes | None = None
    url: str | None = None
    picture: Any = None

    def __str__(self) -> str:
        """Its name in messages."""
        return self.path or self.url or "in the row"


@dataclass(frozen=True, slots=True)
class Video:
    """The location of a video of a row: file (a file or a folder of frames) or frames (one image each). fps: frames per
    second of a folder or list of frames, if the row has it."""

    file: Image | None = None
    frames: tuple[Image, ...] = ()
    fps: float | None = None

    def __str__(self) -> str:
        """Its name in messages."""
        if self.file is not None:
            return str(self.file)
        return f"{len(self.frames)} frames" + (f" from {self.frames[0]}" if self.frames else "")


def images_alone(media: Sequence[Image | Video]) -> tuple[Image, ...]:
    """The images of a chat; asserts that there are no videos."""
    images = tuple(item for item in media if isinstance(item, Image))
    assert len(images) == len(media), "videos are refused where messages are read"
    return images


@dataclass(frozen=True, slots=True)
class _MediaKind:
    """Images or videos. column: their column of a row. mark: the text that marks a position in messages, if the row has
    the column. parts: their types of content parts. keys: the keys of a part that may contain an image or video. read:
    (name in messages, value of the column or part, folder) -> Image or Video."""

    name: str
    column: str
    mark: str
    parts: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[str, Any, str], Image | Video]

    def payload(self, part: Mapping[str, Any]) -> Any:
        """The image or video in a part; None if the column provides it."""
        return next((part[key] for key in self.keys if part.get(key) is not None), None)


def take_images(
    location: str, messages: Sequence[Message], row: Mapping[str, Any], folder: str
) -> tuple[list[Message], tuple[Image | Video, ...]]:
    """Returns (messages with a bare part for each image and video, the images and videos in the order of the parts).

    The images of the column `images` fill, in order, the parts without an image and each `<image>` in a text. Without
    such positions, the images go before the text of the first user message, as in TRL. Videos are treated the same.

    folder: paths are relative to it. Raises UserError for an invalid image or video, or if the number of images or
    videos in a column differs from the number of positions.
    """
    columns = {
        kind: _column(
            location, kind, row, folder, row.get(kind.name) is not None and any(_places(m, kind) for m in messages)
        )
        for kind in _KINDS
    }
    if not any(columns.values()) and not any(isinstance(message.get("content"), list) for message in messages):
        return list(messages), ()
    marked = [kind for kind in _KINDS if columns[kind]]
    for kind in marked:
        if not any(_places(message, kind) for message in messages):
            messages = _before_the_question(location, messages, kind, len(columns[kind]))
    remaining, counts = {kind: iter(columns[kind]) for kind in _KINDS}, dict.fromkeys(_KINDS, 0)
    media, result = list[Image | Video](), list[Message]()
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if isinstance(content, str) and any(kind.mark in content for kind in marked):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            result.append(message)
            continue
        bare = []
        for part in _parts(content, marked):
            part_kind = _find_kind(part)
            if part_kind is None:
                bare.append(part)
                continue
            payload = part_kind.payload(part)
            item = (
                next(remaining[part_kind], None)
                if payload is None
                else part_kind.read(f"{location}: message {number}", part, folder)
            )
            counts[part_kind] += payload is None
            media += [] if item is None else [item]
            bare.append({"type": part_kind.name})
        result.append({**message, "content": bare})
    for kind in _KINDS:
        _check_counts(location, row, kind, len(columns[kind]), counts[kind])
    return result, tuple(media)


def _check_counts(location: str, row: Mapping[str, Any], kind: _MediaKind, count: int, places: int) -> None:
    if count == places:
        return
    name = kind.name
    hint = "" if count or name not in row else f" Set {override('data.columns', {kind.column: name})}."
    raise UserError(
        f"{location}: has {counted(count, name)} in `{kind.column}` and {counted(places, 'place')} "
        f'for them ({kind.mark} in a text, or a part {{"type": "{name}"}} without its {name}). The two numbers '
        f"must be equal.{hint}"
    )


def _column(location: str, kind: _MediaKind, row: Mapping[str, Any], folder: str, marked: bool) -> list[Image | Video]:
    """The images or videos in their column. marked: whether the texts have positions for them."""
    name = kind.name if row.get(kind.column) is None and marked else kind.column  # LLaVA's data have a column `image`
    value = parse_json_list(location, name, row.get(name))
    if value is None:
        return []
    items = list(value) if isinstance(value, list | tuple) else [value]
    if any(item is None for item in items):
        raise UserError(f"{location}: `{kind.column}` contains null. Remove it, and its position in the text.")
    return [kind.read(f"{location}: `{kind.column}`", item, folder) for item in items]


def _places(message: Message, kind: _MediaKind) -> int:
    """The number of positions in a message that need an image or video from the column."""
    content = message.get("content")
    if isinstance(content, str):
        return content.count(kind.mark)
    parts = _parts(content, [kind]) if isinstance(content, list) else ()
    return sum(_find_kind(part) is kind and kind.payload(part) is None for part in parts)


def _before_the_question(location: str, messages: Sequence[Message], kind: _MediaKind, count: int) -> list[Message]:
    index = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        raise UserError(f"{location}: has `{kind.column}`, but no message of the user that could contain them.")
    message, content = messages[index], messages[index].get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    parts = [*({"type": kind.name} for _ in range(count)), *texts]
    return [*messages[:index], {**message, "content": parts}, *messages[index + 1 :]]


def _parts(content: Sequence[Any], marked: Sequence[_MediaKind]) -> Iterator[dict[str, Any]]:
    """The parts of a message's content. marked: kinds whose marks in texts become bare parts."""
    kinds = {kind.mark: kind for kind in marked}
    for part in content:
        if part["type"] != "text" or not any(mark in part["text"] for mark in kinds):
            yield part
            continue
        for text in re.split(f"({'|'.join(map(re.escape, kinds))})", part["text"]):
            if text in kinds:
                yield {"type": kinds[text].name}
            elif text:
                yield {"type": "text", "text": text}


def _find_kind(part: Mapping[str, Any]) -> _MediaKind | None:
    return next((kind for kind in _KINDS if part["type"] in kind.parts), None)


def _image(location: str, value: Any, folder: str) -> Image:
    if isinstance(value, Mapping):
        present_key = next((key for key in ("bytes", *_IMAGE.keys) if value.get(key) is not None), None)
        if present_key is not None:
            if unread := [key for key in _OF_EACH_IMAGE if value.get(key) is not None]:
                raise UserError(
                    f"{location}: `{unread[0]}` of an image is not read. Set data.image_pixels, which applies to all "
                    "images."
                )
            return _image(location, value[present_key], folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return Image(data=bytes(value))
    if isinstance(value, str):
        return _of_text(location, value, folder)
    if _is_picture(value):
        return Image(picture=value)
    raise UserError(f"{location}: an image is {_FORMS}, not {_shown(value)}.")


def _video(location: str, value: Any, folder: str) -> Video:
    if isinstance(value, Mapping):
        if unread := [key for key in _OF_EACH_VIDEO if value.get(key) is not None]:
            raise UserError(
                f"{location}: `{unread[0]}` of a video is not read. Set data.video, which applies to all videos."
            )
        present_key = next((key for key in ("bytes", *_VIDEO.keys) if value.get(key) is not None), None)
        if present_key is not None:
            inner = _video(location, value[present_key], folder)
            return replace(inner, fps=_fps(location, value) or inner.fps)
    if isinstance(value, list | tuple):
        if len(value) < 2:
            number = (
                "one frame. Write it as an image" if value else "no frames. Remove it, and its position in the text"
            )
            raise UserError(f"{location}: a video has {number}.")
        return Video(frames=tuple(_image(f"{location}: a frame", frame, folder) for frame in value))
    if isinstance(value, str | bytes | bytearray | memoryview) or _is_picture(value):
        return Video(file=_image(location, value, folder))
    raise UserError(f"{location}: a video is {_FORMS}, a folder, or a list of frames, not {_shown(value)}.")


def _is_picture(value: Any) -> bool:
    """Whether this is a PIL image; does not import PIL, which may be missing."""
    return hasattr(value, "convert") and hasattr(value, "size")


def _fps(location: str, part: Mapping[str, Any]) -> float | None:
    """Frames per second of a list of frames, from qwen-vl-utils' key `sample_fps`; None if missing."""
    fps = part.get("sample_fps")
    if fps is None:
        return None
    try:
        rate = float(fps)
    except (TypeError, ValueError):
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UserError(f"{location}: `sample_fps` must be the frames per second, above 0, not {json.dumps(fps)}.")
    return rate


def _of_text(location: str, text: str, folder: str) -> Image:
    scheme = text[:8].partition(":")[0].lower()
    if scheme == "data":
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise UserError(
                f"{location}: {text[:40]!r}... is not a data: URI of base64. Write data:image/png;base64,..."
            )
        return Image(data=_decoded(location, body))
    if scheme in ("http", "https"):
        return Image(url=text)
    if scheme == "file":
        text = _of_file_url(location, text)
    elif _BASE64.match(text):
        return Image(data=_decoded(location, text))
    if not text or "\0" in text:
        raise UserError(f"{location}: an image is {_FORMS}, not {json.dumps(text)}.")
    check_unicode(location, text)
    return Image(path=os.path.abspath(os.path.join(folder, os.path.expanduser(text))))


def _of_file_url(location: str, text: str) -> str:
    try:
        return unquote(urlsplit(text).path)
    except ValueError as error:  # brackets without an address
        raise UserError(f"{location}: {text[:80]!r} is not a valid file: URL ({error}). Write a path.") from None


def _decoded(location: str, text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{location}: an image is not valid base64: {error}.") from None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(f'`{key}`' for key in value) or 'no keys'}"
    plain = value is None or isinstance(value, bool | int | float | str | list)
    return describe_type(value) if plain else f"a {type(value).__name__}"


_IMAGE = _MediaKind(
    "image", COLUMN, "<image>", IMAGE_PARTS, ("image", "image_url", "url", "path", "base64", "bytes"), _image
)
_VIDEO = _MediaKind(
    "video", VIDEOS, "<video>", VIDEO_PARTS, ("video", "video_url", "url", "path", "base64", "bytes"), _video
)
_KINDS = (_IMAGE, _VIDEO)
