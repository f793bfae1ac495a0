"""Requests and completions in the format of vLLM's /inference/v1/generate, a route from tokens to tokens."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.image_files import PromptImages
from weft.errors import UserError
from weft.inference.base import Completion, Finish, Request

_FINISHES: dict[str, Finish] = {"stop": "end", "length": "length", "abort": "abort"}
_NAN = -9999.0  # vLLM's value for a logprob that is NaN
_COLDEST = 0.01  # vLLM raises lower temperatures to this one


def body_of(
    request: Request, index: int, name: str, model: str | None = None, features: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The request body for the completion of the seed at index `index`. name: unique id of the call. model: an
    adapter's name; None: the model itself. features: from features_of(), for a request with images. UserError for a
    temperature that vLLM would raise."""
    sampling = request.sampling
    if 0 < sampling.temperature < _COLDEST:
        raise UserError(
            f"rollout.temperature is {sampling.temperature:g}, which vLLM would raise to {_COLDEST}: set that or more, "
            "or 0 for the likeliest token."
        )
    body: dict[str, Any] = {
        "request_id": name,
        "token_ids": list(request.tokens),
        "sampling_params": {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": request.seeds[index],
            "stop_token_ids": list(sampling.ends),
            "ignore_eos": True,  # `ends` already has all end tokens
            "stop": list(sampling.stop),
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
            "logprobs": 0,  # only of the sampled token
        },
    }
    if features is not None:
        body["features"] = features
    return body if model is None else {**body, "model": model}


def images_body(images: PromptImages, model: str) -> dict[str, Any]:
    """The body of a chat with only these images, for vLLM to process. PNG is lossless, so vLLM gets the pixels that
    the trainer gets."""
    parts = []
    for picture in images.pictures():
        buffer = io.BytesIO()
        picture.save(buffer, "PNG", compress_level=1)
        uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
        parts.append({"type": "image_url", "image_url": {"url": uri}})
    return {"model": model, "messages": [{"role": "user", "content": parts}]}


def features_of(answer: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """`features` of a request, from the response to images_body(), with the images' places in the request's tokens.
    UserError if vLLM's processor makes other tokens of an image than weft's."""
    features, rendered = answer["features"], answer["token_ids"]
    tokens, places, end = list(request.tokens), [], 0
    start, image = None, rendered
    for placeholder in features["mm_placeholders"]["image"]:
        image = rendered[placeholder["offset"] : placeholder["offset"] + placeholder["length"]]
        start = next((i for i in range(end, len(tokens)) if tokens[i : i + len(image)] == image), None)
        if start is None:
            break
        end = start + len(image)
        places.append({**placeholder, "offset": start})
    ((stands, _),) = Counter(image).most_common(1)  # the placeholder token
    if start is None or tokens.count(stands) != rendered.count(stands):
        raise UserError(
            f"{request.id}: vLLM's processor makes {rendered.count(stands)} tokens of its images, but the trainer's "
            f"makes {tokens.count(stands)}. Set rollout.engine_kwargs.mm_processor_kwargs to the limits of "
            "data.image_pixels, under the names of this model's processor, or set rollout.engine=embedded."
        )
    return {**features, "mm_placeholders": {"image": places}}


def completion_of(answer: Mapping[str, Any]) -> Completion:
    """Parse a response. ValueError if it is not what was requested, or if a logprob is NaN."""
    choice = answer["choices"][0]
    tokens = tuple(int(token) for token in choice["token_ids"] or ())
    content = ((choice["logprobs"] or {}).get("content") or []) if tokens else []
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
    if _NAN in logprobs:
        raise ValueError(f"the logprob of token {logprobs.index(_NAN)} is not a number: are the weights finite?")
    finish = _FINISHES.get(str(choice["finish_reason"]))
    if finish is None:
        raise ValueError(f"a completion ended by {choice['finish_reason']}")
    return Completion(tokens, logprobs, finish, _versions(choice, len(tokens)), routes=_routes(choice))


def _versions(choice: Mapping[str, Any], count: int) -> tuple[tuple[int, int], ...]:
    spans = choice.get("weight_versions") or []
    versions = tuple((int(span["version"]), int(span["end"]) - int(span["start"])) for span in spans)
    if sum(tokens for _, tokens in versions) != count:
        raise ValueError(f"{count} tokens came with the versions {versions}")
    return versions


def _routes(choice: Mapping[str, Any]) -> NDArray[Any] | None:
    """[tokens of prompt and completion - 1, layers, top_k]; None unless the server was started to send routes."""
    packed = choice.get("routed_experts")
    if packed is None:
        return None
    routes = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
    return routes if routes.dtype == np.uint8 else routes.astype(np.int16)
