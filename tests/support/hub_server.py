"""A hub on this machine: the few endpoints that an upload needs, what arrived kept in memory, faults on order.

Large files go the way of git LFS in one part, all others into the commit; nothing of Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub.constants
import yaml

TOKEN = "hf_of_the_tests"
_REPO = r"/api/models/(?P<name>[\w.-]+/[\w.-]+)"


@dataclass
class Commit:
    """A commit of a repository."""

    branch: str
    message: str
    files: list[str]


@dataclass
class Repo:
    """What a repository holds. files: branch -> path -> content."""

    private: bool = False
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[Commit] = field(default_factory=list)


@dataclass
class Hub:
    """owners: who the token may write for. faults: (method, part of the path) -> (status, message); such requests are
    answered so."""

    url: str = ""
    owners: tuple[str, ...] = ("me", "ours")
    repos: dict[str, Repo] = field(default_factory=dict)
    faults: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    hold: threading.Event = field(default_factory=threading.Event)  # commits wait for it

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """What lies in a repository."""
        return self.repos[name].files[branch]


@contextmanager
def hub(**fields: Any) -> Iterator[Hub]:
    """A hub that is asked by this process and its forks, in place of huggingface.co, with a token of its own."""
    state = Hub(**fields)
    state.hold.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hub_in_use(url: str, token: str | None = TOKEN, *, offline: bool = False) -> Iterator[None]:
    """The client of this process asks the hub at this address. Its constants are read where it is imported."""
    constants = huggingface_hub.constants
    with (
        mock.patch.object(constants, "ENDPOINT", url),
        mock.patch.object(constants, "HF_HUB_OFFLINE", offline),
        mock.patch.object(constants, "HF_HUB_DISABLE_XET", True),
        mock.patch.object(constants, "HF_TOKEN_PATH", "/nowhere/token"),
        mock.patch.dict("os.environ", {} if token is None else {"HF_TOKEN": token}),
    ):
        yield


def variables(url: str, home: Path) -> dict[str, str]:
    """The same for a process of its own."""
    return {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None:
            pass

        def answer(self, status: int, content: Any, **headers: str) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status: int, message: str, **headers: str) -> None:
            self.answer(status, {"error": message}, X_Error_Message=message, **headers)

        def handle_any(self) -> None:
            path, body = self.path.partition("?")[0], self.rfile.read(self._length())
            hub.requests.append((self.command, path))
            for (method, part), (status, message) in hub.faults.items():
                if method == self.command and part in path:
                    return self.refuse(status, message)
            if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(401, "Invalid credentials in Authorization header")
            route(self, path, body)

        def _length(self) -> int:
            return int(self.headers.get("Content-Length") or 0)

        do_GET = do_POST = do_PUT = handle_any

    def route(handler: Handler, path: str, body: bytes) -> None:
        if path.startswith("/lfs/"):
            return _store(hub, handler, path.removeprefix("/lfs/"), body)
        if path == "/api/repos/create":
            return _create(hub, handler, json.loads(body))
        if path == "/api/validate-yaml":
            return _validate(handler, json.loads(body)["content"])
        if match := re.fullmatch(r"/(?P<name>[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            return _batch(hub, handler, json.loads(body))
        match = re.match(_REPO, path)
        if match is None or match["name"] not in hub.repos:
            if match is not None and match["name"] in hub.cards:
                return handler.answer(200, {"id": match["name"], "cardData": hub.cards[match["name"]]})
            return handler.refuse(404, "Repository not found", X_Error_Code="RepoNotFound")
        _of_repo(hub, handler, match["name"], path[match.end() :], body)

    return Handler


def _create(hub: Hub, handler: Any, request: dict[str, Any]) -> None:
    owner = request.get("organization") or hub.owners[0]
    name = f"{owner}/{request['name']}"
    if owner not in hub.owners:
        return handler.refuse(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
    if name in hub.repos:
        return handler.refuse(409, "You already created this model repo")
    hub.repos[name] = Repo(private=request.get("visibility") == "private" or bool(request.get("private")))
    handler.answer(200, {"url": f"{hub.url}/{name}", "name": name})


def _validate(handler: Any, content: str) -> None:
    front = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    metadata = yaml.safe_load(front[1]) if front else None
    errors = [] if isinstance(metadata, dict) else [{"message": "no front matter"}]
    handler.answer(400 if errors else 200, {"errors": errors, "warnings": []})


def _batch(hub: Hub, handler: Any, request: dict[str, Any]) -> None:
    objects: list[dict[str, Any]] = []
    for entry in request["objects"]:
        upload = {"actions": {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}"}}}
        objects.append({**entry, **({} if entry["oid"] in hub.objects else upload)})
    handler.answer(200, {"transfer": "basic", "objects": objects})


def _store(hub: Hub, handler: Any, oid: str, body: bytes) -> None:
    if hashlib.sha256(body).hexdigest() != oid:
        return handler.refuse(400, "other bytes than announced")
    hub.objects[oid] = body
    handler.answer(200, {})


def _of_repo(hub: Hub, handler: Any, name: str, path: str, body: bytes) -> None:
    repo = hub.repos[name]
    if path.startswith("/preupload/"):
        files = [
            {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
             "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]  # fmt: skip
        return handler.answer(200, {"files": files})
    if path.startswith("/commit/"):
        return _commit(hub, handler, name, path.removeprefix("/commit/"), body)
    if path.startswith("/branch/"):
        branch = path.removeprefix("/branch/")
        if branch in repo.files:
            return handler.refuse(409, "Reference already exists")
        repo.files[branch] = dict(repo.files["main"])
        return handler.answer(200, {})
    handler.answer(200, {"id": name, "sha": "0" * 40, "private": repo.private, "siblings": [], "tags": []})


def _commit(hub: Hub, handler: Any, name: str, branch: str, body: bytes) -> None:
    hub.hold.wait(60.0)
    repo, message, arrived = hub.repos[name], "", {}
    if branch not in repo.files:
        return handler.refuse(404, "Revision not found", X_Error_Code="RevisionNotFound")
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            message = value["summary"]
        elif line["key"] == "file":
            arrived[value["path"]] = base64.b64decode(value["content"])
        else:
            assert line["key"] == "lfsFile", line["key"]
            arrived[value["path"]] = hub.objects[value["oid"]]
    repo.files[branch] |= arrived
    repo.commits.append(Commit(branch, message, sorted(arrived)))
    handler.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40})
