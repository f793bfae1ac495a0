"""A teacher on a server: lists of its likeliest tokens, through vLLM's OpenAI-compatible API.

    POST URL/completions {"model", "prompt": [token ids], "max_tokens": 1, "prompt_logprobs": K, "temperature": 0}

The response's choices[0].prompt_logprobs has an entry for each token of the prompt: null for the first, then an object
{token id: {"logprob": ..., "rank": ...}} with the K most likely tokens at this position, and the token itself. Logprobs
are at temperature 1, for any temperature of the request.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.document import Document, take
from weft.engine.engine import Engine
from weft.engine.losses.distillation import Listed
from weft.engine.teachers import pack_lists
from weft.errors import UserError, first_line
from weft.launch import flight
from weft.strict_json import JsonError, parse

KEY = "VLLM_API_KEY"  # the environment variable that has the server's key, as vLLM's server reads it
_THREADS = 8  # requests of a rank at a time; the server batches them
# Attempts of a request that a busy or restarting server did not answer; seconds before the second, doubled each time.
_ATTEMPTS, _PAUSE = 4, 1.0
_SHOWN = 300


@dataclass(frozen=True)
class ServedTeacher:
    """url: of the API, with /v1. model: its name on the server. top_k: K. timeout: seconds of a request."""

    url: str
    model: str
    top_k: int
    student: Engine
    timeout: float

    def head(self, student: Engine) -> Listed:
        return Listed()

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        """Index -> its lists, packed (pack_lists), of this rank's share of the documents."""
        group = self.student.mesh.world_group
        chosen = take(documents, range(dist.get_rank(group), len(documents), dist.get_world_size(group)))
        if images := [document.source for document in chosen.values() if document.media is not None]:
            raise UserError(
                f"{images[0]}: has images, but weft cannot send images to a served teacher. Set distill.teacher "
                "to a model."
            )
        with ThreadPoolExecutor(_THREADS) as threads:
            futures = {
                index: threads.submit(self.lists, document.source, document.tokens.tolist())
                for index, document in chosen.items()
            }
            try:
                read = {}
                for index, future in futures.items():
                    read[index] = future.result()
                    flight.beat()
                return read
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def lists(self, source: str, tokens: Sequence[int]) -> Tensor:
        """The packed lists of a document. source: its name, for messages."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self.top_k,
        }
        answer = call(f"{self.url}/completions", body, self.timeout)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            return pack_lists(*_read_entries(entries, self.top_k, len(tokens)))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"distill.teacher: {self.url} returned no prompt_logprobs for {source} ({type(error).__name__}: "
                f"{first_line(error)}). The server must be vLLM's OpenAI-compatible server. It answered: "
                f"{json.dumps(answer)[:_SHOWN]}"
            ) from error


def open_served(url: str, model: str | None, top_k: int, student: Engine, timeout: float) -> ServedTeacher:
    """The teacher at a URL. model: its name; None: the server's first. Raises UserError if the server does not answer
    as documented."""
    url = url.rstrip("/")
    if model is None:
        answer = call(f"{url}/models", None, timeout)
        try:
            model = str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"distill.teacher: {url}/models lists no model. Set distill.served_model. The server answered: "
                f"{json.dumps(answer)[:_SHOWN]}"
            ) from error
    teacher = ServedTeacher(url, model, top_k, student, timeout)
    teacher.lists("a request of two tokens", [0, 1])
    return teacher


def call(url: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
    """The JSON answer to a POST of `body`, or to a GET without one. Raises UserError, at once if the server refuses the
    request, and after a few attempts if it is not reached."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, None if body is None else json.dumps(body).encode(), headers)
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * 2 ** (attempt - 1))
        try:
            with urlopen(request, timeout=timeout) as response:
                return parse(response.read())
        except HTTPError as error:
            problem = f"status {error.code}: {error.read().decode(errors='replace').strip()[:_SHOWN]}"
            if error.code < 500 and error.code != 429:
                break
        except (URLError, OSError) as error:
            problem = str(getattr(error, "reason", error))
        except (JsonError, UnicodeDecodeError) as error:
            problem = f"its answer is not JSON: {error}"
            break
    raise UserError(f"distill.teacher: {url} did not answer like vLLM's server: {problem}")


def _read_entries(entries: Sequence[Mapping[str, Any] | None], top_k: int, tokens: int) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities), [T, K] each, of a response; the first entry, which is null, has none."""
    if len(entries) != tokens:
        raise ValueError(f"{len(entries)} entries for {tokens} tokens")
    ids, logprobs = torch.full((tokens, top_k), -1), torch.full((tokens, top_k), float("-inf"))
    for position, entry in enumerate(entries):
        if entry is None:
            if position:
                raise ValueError(f"entry {position} is null")
            continue
        listed = [(int(token), float(item["logprob"])) for token, item in entry.items() if int(item["rank"]) <= top_k]
        if not listed:
            raise ValueError(f"entry {position} has no token of rank 1 to {top_k}")
        listed = listed[:top_k]
        ids[position, : len(listed)] = torch.tensor([token for token, _ in listed])
        logprobs[position, : len(listed)] = torch.tensor([value for _, value in listed])
    return ids, logprobs
