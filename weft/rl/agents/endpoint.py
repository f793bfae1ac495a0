"""The endpoint that agents call: OpenAI's chat completions, responses and models, and /v1/reward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.rl.agents.chat_api import ChatRequest, completion_body, parse_request, parses_calls
from weft.rl.agents.http_server import HttpError, HttpRequest, HttpResponse, HttpServer
from weft.rl.agents.process import outcome
from weft.rl.agents.responses_api import ResponsesRequest, parse_responses_request, responses_body
from weft.rl.agents.session import Session
from weft.rl.chat import ChatRenderer

MODEL = "policy"
_RETRY = "x-stainless-retry-count"  # how often OpenAI's clients have sent a request before


class Endpoint:
    """Answers calls of agents; an API key is a session. base_url: as in OPENAI_BASE_URL."""

    def __init__(self, chats: ChatRenderer, config: RlConfig) -> None:
        self._served = (MODEL, config.model.path), config.rollout
        self._parses_calls = parses_calls(chats.template_source)
        self._sessions: dict[str, Session] = {}
        self._server = HttpServer(self._handle)
        self.base_url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen. port: 0 for any free one. UserError if that is not possible."""
        try:
            await self._server.start(host, port)
        except OSError as error:
            raise UserError(
                f"rl.agent_host, rl.agent_port: cannot listen on {host}:{port}: {error}. Set rl.agent_port=0 for a "
                "free port, and rl.agent_host to an address of this machine."
            ) from error
        reached = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        self.base_url = f"http://{f'[{reached}]' if ':' in reached else reached}:{self._server.port}/v1"

    async def close(self) -> None:
        """End the server and all calls."""
        await self._server.close()

    @contextmanager
    def serving(self, api_key: str, session: Session) -> Iterator[None]:
        """Answer calls with this key from `session`. Calls that are unanswered at the end are cancelled."""
        self._sessions[api_key] = session
        try:
            yield
        finally:
            del self._sessions[api_key]
            session.end()

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        session = self._sessions.get(key)
        if session is None:
            raise HttpError(
                401,
                "the API key belongs to no running episode: use the OPENAI_API_KEY that the agent received",
                "invalid_api_key",
            )
        match request.method, request.path:
            case "POST", "/v1/chat/completions":
                return await self._answer(session, request, parse_request(request.body, *self._served))
            case "POST", "/v1/responses":
                chat_request = parse_responses_request(request.body, *self._served, session.calls)
                return await self._answer(session, request, chat_request)
            case "GET", "/v1/models":
                listed = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "weft"}]
                return HttpResponse(200, json.dumps({"object": "list", "data": listed}).encode())
            case "POST", "/v1/reward":
                try:
                    session.posted.append(outcome(json.loads(request.body)))
                except (TypeError, ValueError) as error:
                    raise HttpError(400, f"a reward is a number, or an object with `reward`: {error}") from error
                return HttpResponse(200, b"{}")
        raise HttpError(
            404,
            f"{request.method} {request.path} is not served; the routes are POST /v1/chat/completions, POST "
            "/v1/responses, GET /v1/models and POST /v1/reward",
        )

    async def _answer(self, session: Session, request: HttpRequest, chat_request: ChatRequest) -> HttpResponse:
        if chat_request.tools and not self._parses_calls:
            raise HttpError(
                400,
                "the chat template of this model writes calls of tools in a format that this endpoint cannot parse "
                "(it reads <tool_call>{...}</tool_call>, as of Qwen3 and Hermes): describe tools in a message "
                "instead, and parse calls in the agent",
                param="tools",
            )
        call = await session.answer(chat_request, retry=request.headers.get(_RETRY, "0") != "0")
        if isinstance(chat_request, ResponsesRequest):
            body = responses_body(chat_request, call.answer, MODEL)
        else:
            body = completion_body(chat_request, call.answer, MODEL)
        kind = "text/event-stream" if chat_request.stream else "application/json"
        return HttpResponse(200, body, kind, lambda: session.forget(call))
