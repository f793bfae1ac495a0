"""Agents as users write them, good ones and bad ones. No torch, no transformers: their processes import this."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit


def post(base_url: str, api_key: str, path: str, body: Any, **headers: str) -> tuple[int, str]:
    """(Status, text) of a POST."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    connection.request("POST", url.path + path, json.dumps(body), {"Authorization": f"Bearer {api_key}", **headers})
    response = connection.getresponse()
    return response.status, response.read().decode()


class RecordingClient:
    """Asks, and remembers (ids of the prompt, ids and logprobs of the answer) of each answer."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key, self.heard = base_url, api_key, list[Any]()

    def ask(self, messages: list[dict[str, Any]], retries: int = 0, **keys: Any) -> dict[str, Any]:
        body = {"model": "policy", "messages": messages, "logprobs": True, "return_token_ids": True, **keys}
        headers = {"X-Stainless-Retry-Count": str(retries)}
        status, text = post(self.base_url, self.api_key, "/chat/completions", body, **headers)
        assert status == 200, text
        value = json.loads(text)
        (choice,) = value["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        self.heard.append((value["prompt_token_ids"], choice["token_ids"], logprobs))
        message: dict[str, Any] = choice["message"]
        return message

    def respond(self, **keys: Any) -> dict[str, Any]:
        """The same over the Responses API; a stream's response is that of its last event."""
        body = {"model": "policy", "include": ["message.output_text.logprobs"], "return_token_ids": True, **keys}
        status, text = post(self.base_url, self.api_key, "/responses", body)
        assert status == 200, text
        if keys.get("stream"):
            text = json.dumps(json.loads(text.strip().rpartition("\ndata: ")[2])["response"])
        value: dict[str, Any] = json.loads(text)
        logprobs = [entry["logprob"] for entry in value["output"][0]["content"][0]["logprobs"]]
        self.heard.append((value["prompt_token_ids"], value["token_ids"], logprobs))
        return value


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def follow(client: RecordingClient, row: Any) -> None:
    """Three calls, each of which repeats all that was said."""
    messages = list(row["messages"])
    for text in ("more", "again", ""):
        messages += [client.ask(messages, max_tokens=6), said("user", text)]


def forget(client: RecordingClient, row: Any) -> None:
    """The third call leaves the first exchange out."""
    messages = list(row["messages"])
    messages += [client.ask(messages, max_tokens=5), said("user", "and then?")]
    messages += [client.ask(messages, max_tokens=5), said("user", "so?")]
    client.ask([messages[0], *messages[2:]], max_tokens=5)


def fork(client: RecordingClient, row: Any) -> None:
    """Two ways to go on from one answer."""
    messages = list(row["messages"])
    messages.append(client.ask(messages, max_tokens=5))
    for text in ("shorter", "longer"):
        client.ask([*messages, said("user", text)], max_tokens=4)


def team(client: RecordingClient, row: Any) -> None:
    """Two helpers with instructions of their own, at the same time; then one that reads both."""

    def helper(name: str) -> str:
        messages = [said("system", f"You are {name}."), *row["messages"]]
        messages += [client.ask(messages, max_tokens=4), said("user", "go on")]
        return str(client.ask(messages, max_tokens=4)["content"])

    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(helper, ("red", "blue")))
    client.ask([*row["messages"], said("user", " / ".join(texts))], max_tokens=4)


def again(client: RecordingClient, row: Any) -> None:
    """An answer that the client asks for once more, and two of its own to the same question."""
    first = client.ask(row["messages"], max_tokens=6)
    assert client.ask(row["messages"], 1, max_tokens=6) == first
    client.heard.pop()
    client.ask(row["messages"], max_tokens=6)


def leave(client: RecordingClient, row: Any) -> None:
    """A connection that closes before the answer; then the same question."""
    url, body = urlsplit(client.base_url), json.dumps({"model": "policy", "messages": row["messages"], "max_tokens": 6})
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nAuthorization: Bearer {client.api_key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.1)
    time.sleep(0.5)  # the endpoint sees that it has closed
    client.ask(row["messages"], max_tokens=6)


def stream(client: RecordingClient, row: Any) -> None:
    """An answer in events, and the same question continued."""
    body = {"model": "policy", "messages": row["messages"], "max_tokens": 6, "stream": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}, "logprobs": True}
    _, text = post(client.base_url, client.api_key, "/chat/completions", body)
    *events, done, end = text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    (choice,), (last,) = chunks[0]["choices"], chunks[1]["choices"]
    length = len(choice["token_ids"])
    assert done == "data: [DONE]" and end == "" and chunks[-1]["usage"]["completion_tokens"] == length
    assert choice["delta"]["role"] == "assistant" and last["finish_reason"] in ("length", "stop") and length <= 6
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    client.heard.append((chunks[0]["prompt_token_ids"], choice["token_ids"], logprobs))
    answer = said("assistant", choice["delta"]["content"])
    client.ask([*row["messages"], answer, said("user", "go on")], max_tokens=3)


def respond(client: RecordingClient, row: Any) -> None:
    """OpenAI's other API: a response; one that continues it by its id; one by its items, in events; and as a chat."""
    first = client.respond(input=row["messages"], max_output_tokens=5)
    client.respond(input="go on", previous_response_id=first["id"], max_output_tokens=4)
    client.respond(input=[*row["messages"], *first["output"], said("user", "and?")], stream=True, max_output_tokens=4)
    answer = said("assistant", first["output"][0]["content"][0]["text"])
    client.ask([*row["messages"], answer, said("user", "so?")], max_tokens=4)


PLAYS = {play.__name__: play for play in (follow, forget, fork, team, again, leave, stream, respond)}


def solve(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """Plays what the row says. The reward is a number of an answer."""
    client = RecordingClient(base_url, api_key)
    PLAYS[row["play"]](client, row)
    heard = sorted(client.heard)
    return {"reward": float(sum(heard[0][1]) % 7), "heard": heard}


async def fails(row: Any, base_url: str, api_key: str) -> float | None:
    """Asks once, and then fails as the row says."""
    client = RecordingClient(base_url, api_key)
    await asyncio.to_thread(client.ask, row["messages"], max_tokens=3)
    match row["play"]:
        case "raises":
            raise ValueError("no idea")
        case "exits":
            os._exit(3)
        case "hangs":
            await asyncio.sleep(1000)
        case "text":
            return "good"  # type: ignore[return-value]
        case "nothing":
            return None
        case "posts":
            post(base_url, api_key, "/reward", {"reward": 0.5, "why": "posted"})
            return None
    return 1.0


def deserts(row: Any, base_url: str, api_key: str) -> float:
    """Of the play `deserts`, it ends while its call is being answered; else it asks and is done."""
    client = RecordingClient(base_url, api_key)
    if row["play"] == "deserts":
        threading.Thread(target=client.ask, args=(row["messages"],), daemon=True).start()
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(str(client.ask(row["messages"], max_tokens=4)["content"])) % 3)


def crowd(row: Any, base_url: str, api_key: str) -> dict[str, Any]:
    """One of many at once: plays as in `solve`, or fails, or uses up its calls."""
    client, play = RecordingClient(base_url, api_key), row["play"]
    match play:
        case "raises":
            client.ask(row["messages"], max_tokens=3)
            raise ValueError("no idea")
        case "hangs":
            client.ask(row["messages"], max_tokens=3)
            time.sleep(1000)
        case "killed":
            deserts({**row, "play": "deserts"}, base_url, api_key)
        case "spends":
            body = {"model": "policy", "messages": row["messages"], "max_tokens": 2}
            while (status := post(base_url, api_key, "/chat/completions", body)[0]) == 200:
                client.heard.append(None)
            return {"reward": float(status == 403), "calls_made": len(client.heard)}
    PLAYS[play](client, row)
    return {"reward": 1.0, "heard": client.heard}
