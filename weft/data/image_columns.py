"""The images of a row: content parts that hold one, and the column `images` with its places in the texts.

{"role": "user", "content": [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "What is it?"}]}
{"messages": [{"role": "user", "content": "<image>What is it?"}, ...], "images": ["cat.jpg"]}

Images are not opened here (weft/data/image_files.py does that). Templates are given {"type": "image"} for each.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from weft.data.messages import IMAGE_PARTS, Message, decoded, kind
from weft.errors import UserError

COLUMN = "images"
MARK = "<image>"  # the place of an image in a text, where a row has the column
_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
_FORMS = "a path, a data: URI, base64, or {bytes, path} as datasets writes it"
# What the base64 of a PNG, JPEG, GIF, WebP, BMP and TIFF begins with: no path of this length does.
_BASE64 = re.compile(r"\A(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk[0-9A-Za-z]|SUkqA|TU0AK)[A-Za-z0-9+/=\s]{40,}\Z")


@dataclass(frozen=True, slots=True)
class Image:
    """Where an image of a row is: one of path (absolute), data (its encoded bytes), url and picture (a PIL image). Data
    come to a url once it is fetched."""

    path: str | None = None
    data: bytes | None = None
    url: str | None = None
    picture: Any = None

    def __str__(self) -> str:
        """Its name in messages."""
        return self.path or self.url or "in the row"


def take_images(
    where: str, messages: Sequence[Message], row: Mapping[str, Any], folder: str
) -> tuple[list[Message], tuple[Image, ...]]:
    """(messages with a bare part for each image, the images in the order of these parts).

    folder: paths are relative to it. A part without an image, and each `<image>` in a text, takes the next image of the
    column `images`; where neither is, the images stand before the first message of the user, as in TRL. Raises
    UserError, also where not every place has an image and every image a place.
    """
    column = [_image(f"{where}: `{COLUMN}`", given, folder) for given in _column(where, row)]
    if not column and not any(isinstance(message.get("content"), list) for message in messages):
        return list(messages), ()
    if column and not any(_places(message) for message in messages):
        messages = _before_the_question(where, messages, len(column))
    rest, images, made = iter(column), list[Image](), list[Message]()
    places = 0
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if column and isinstance(content, str) and MARK in content:
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            made.append(message)
            continue
        parts = list(_parts(content, marks=bool(column)))
        for part in parts:
            if part["type"] == "text":
                continue
            own = _payload(part)
            found = next(rest, None) if own is None else _image(f"{where}: message {number}", own, folder)
            places += own is None
            images += [] if found is None else [found]
        made.append({**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in parts]})
    _check_counts(where, row, len(column), places)
    return made, tuple(images)


def _check_counts(where: str, row: Mapping[str, Any], images: int, places: int) -> None:
    if images == places:
        return
    hint = "" if images or "image" not in row else " Set data.columns={images: image}."
    raise UserError(
        f"{where}: has {images} image{'s' * (images != 1)} in `{COLUMN}` and {places} place{'s' * (places != 1)} for "
        f'them ({MARK} in a text, or a part {{"type": "image"}} without an image): each needs one of the other.{hint}'
    )


def _column(where: str, row: Mapping[str, Any]) -> list[Any]:
    given = decoded(where, COLUMN, row.get(COLUMN))
    if given is None:
        return []
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if any(image is None for image in listed):
        raise UserError(f"{where}: `{COLUMN}` holds null. Remove it, and its place in the text.")
    return listed


def _places(message: Message) -> int:
    """Places for images of the column."""
    content = message.get("content")
    if isinstance(content, str):
        return content.count(MARK)
    parts = _parts(content, marks=True) if isinstance(content, list) else ()
    return sum(part["type"] != "text" and _payload(part) is None for part in parts)


def _before_the_question(where: str, messages: Sequence[Message], count: int) -> list[Message]:
    place = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        raise UserError(f"{where}: has `{COLUMN}`, and no message of the user to which they could belong.")
    message, content = messages[place], messages[place].get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    parts = [*({"type": "image"} for _ in range(count)), *texts]
    return [*messages[:place], {**message, "content": parts}, *messages[place + 1 :]]


def _parts(content: Sequence[Any], marks: bool) -> Iterator[dict[str, Any]]:
    """The parts of a content. marks: texts are cut at each place of an image."""
    for part in content:
        if part["type"] != "text" or not marks or MARK not in part["text"]:
            yield part
            continue
        for number, text in enumerate(part["text"].split(MARK)):
            if number:
                yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}


def _payload(part: Mapping[str, Any]) -> Any:
    """What a part says of its image; None where the column has it."""
    assert part["type"] in IMAGE_PARTS
    return next((part[key] for key in _KEYS if part.get(key) is not None), None)


def _image(where: str, given: Any, folder: str) -> Image:
    if isinstance(given, Mapping):
        found = next((key for key in ("bytes", *_KEYS) if given.get(key) is not None), None)
        if found is not None:
            return _image(where, given[found], folder)
    if isinstance(given, bytes | bytearray | memoryview):
        return Image(data=bytes(given))
    if isinstance(given, str):
        return _of_text(where, given, folder)
    if hasattr(given, "convert") and hasattr(given, "size"):  # a PIL image; PIL itself may be missing
        return Image(picture=given)
    raise UserError(f"{where}: an image is {_FORMS}, not {_shown(given)}.")


def _of_text(where: str, text: str, folder: str) -> Image:
    scheme = text[:8].partition(":")[0].lower()
    if scheme == "data":
        return Image(data=_of_data_uri(where, text))
    if scheme in ("http", "https"):
        return Image(url=text)
    if scheme == "file":
        text = unquote(urlsplit(text).path)
    elif _BASE64.match(text):
        return Image(data=_decoded(where, text))
    if not text or "\0" in text:
        raise UserError(f"{where}: an image is {_FORMS}, not {json.dumps(text)}.")
    return Image(path=os.path.abspath(os.path.join(folder, os.path.expanduser(text))))


def _of_data_uri(where: str, text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise UserError(f"{where}: {text[:40]!r}... is no data: URI of base64: write data:image/png;base64,...")
    return _decoded(where, body)


def _decoded(where: str, text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where}: an image is not valid base64: {error}.") from None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(f'`{key}`' for key in value) or 'no keys'}"
    plain = value is None or isinstance(value, bool | int | float | str | list)
    return kind(value) if plain else f"a {type(value).__name__}"
