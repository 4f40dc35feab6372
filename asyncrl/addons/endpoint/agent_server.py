"""The HTTP server of a generator's endpoint: five paths, a key for each episode, limits for clients.

Answers are written when they are whole, also in a stream, so that a retry gets the same bytes. A stream sends
comments until then, so that no client gives up.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import resource
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from asyncrl.addons.endpoint.base import Dialect, Event, Json, Refused, now_s
from asyncrl.addons.endpoint.chat_dialect import ChatDialect, CompletionsDialect, openai_error
from asyncrl.addons.endpoint.messages_dialect import MessagesDialect
from asyncrl.addons.endpoint.open_episodes import OpenEpisodes
from asyncrl.addons.endpoint.responses_dialect import ResponsesDialect
from asyncrl.files import with_cure

log = logging.getLogger(__name__)

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionsDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MessagesDialect(),
}
MODELS = "/v1/models"
MAX_BODY_BYTES = 16 * 2**20
HEAD_S, BODY_S, SEND_S = 10.0, 30.0, 60.0  # limits for a client to send a head, a body, and to take an answer
COMMENT_S = 10.0  # pause between two comments of a stream
# Connections with a request: with half of the descriptors, a caller is refused, and does not wait for one.
# The remainder makes the -1 of no limit large.
MOST_CONNECTIONS = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**63 // 2)
MOST_WAITING = MOST_CONNECTIONS // 2  # connections without a request, whose agents are unknown
_JSON = (b"content-type", b"application/json")
_STREAM = (b"content-type", b"text/event-stream")


class Endpoint:
    """Serves the episodes of one generator."""

    def __init__(
        self, address: str = "127.0.0.1", *, frozen: Collection[str] = (), is_free: bool = False
    ) -> None:
        """Listen on `address` after `start`, on a free port. Answers of `frozen` models are not trained.

        If it `is_free`, constraints of sampling have no effect; otherwise they are refused.
        """
        self.episodes = OpenEpisodes()
        self.url = ""  # without a path
        self._address = address
        self._frozen = frozenset(frozen)
        self._is_free = is_free
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve. Raises OSError if the address cannot be used."""
        is_ipv6 = ":" in self._address
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        listener = _Listener(fileno=socket.create_server((self._address, 0), family=family).detach())
        host = f"[{self._address}]" if is_ipv6 else self._address
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._serve,
            http=type("Protocol", (_Protocol,), {"waiting": {}}),
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        """Stop serving; connections are cut after a second."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=5)
            self._serving.cancel()

    async def _serve(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request, as ASGI has it."""
        headers = {name.decode("latin-1").lower(): text.decode("latin-1") for name, text in scope["headers"]}
        path = scope["path"]
        # Some libraries expect the version in the base URL of Anthropic, too.
        path = path if path.startswith("/v1/") else f"/v1{path}"
        dialect = DIALECTS.get(path)
        exchange = _Exchange(receive, send)
        try:
            try:
                await self._respond(exchange, scope["method"], path, headers)
            except Refused as refused:
                error = dialect.error(refused) if dialect else openai_error(refused)
                if exchange.streams:
                    await exchange.stream(iter([("error", error)]))
                else:
                    await exchange.json(refused.status, error)
        except OSError:  # also a TimeoutError: the client does not take its answer
            log.debug("a client of the endpoint left")

    async def _respond(
        self, exchange: "_Exchange", method: str, path: str, headers: Mapping[str, str]
    ) -> None:
        dialect = DIALECTS.get(path)
        is_model = path.startswith(f"{MODELS}/") and len(path) > len(MODELS) + 1
        if dialect is None and path != MODELS and not is_model:
            allowed = ", ".join([*DIALECTS, MODELS])
            raise Refused(404, f"there is nothing at {path}; there are {allowed}", "not_found")
        if method != ("POST" if dialect else "GET"):
            raise Refused(405, f"{method} is not allowed at {path}", "method_not_allowed")
        episode = self.episodes.find(headers)
        if dialect is None:
            name = path.removeprefix(f"{MODELS}/") if is_model else "policy"
            model = {"id": name, "object": "model", "created": now_s(), "owned_by": "asyncrl"}
            await exchange.json(200, model if is_model else {"object": "list", "data": [model]})
            return
        with episode.request():
            try:
                body = await exchange.body(headers)
            except Refused as refused:
                raise episode.noted(refused) from None
            call = episode.read(dialect, body, path, is_free=self._is_free)
            wants = headers.get("x-asyncrl-train", "yes").lower() != "no"
            train = wants and call.model not in self._frozen
            answering = asyncio.ensure_future(
                episode.answer(
                    dialect,
                    call,
                    digest=hashlib.blake2b(f"{path} {train} ".encode() + body).digest(),
                    retry=headers.get("x-stainless-retry-count", "0"),
                    train=train,
                )
            )
            while not (await asyncio.wait({answering}, timeout=COMMENT_S))[0]:
                if call.streams:  # a comment shows that the connection lives
                    await exchange.part(b": the model is answering\n\n")
            answer = answering.result()
            if call.streams:
                await exchange.stream(dialect.events(call, answer))
            else:
                await exchange.json(200, answer)


class _Listener(socket.socket):
    """Refuses callers for whom there is no descriptor, who would wait until there is one."""

    # Of all listeners: it is closed while a caller is refused.
    _spare = open(os.devnull)  # noqa: SIM115

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.warning("a call of the model is refused: %s", with_cure(error, "environment.command"))
            self._spare.close()
            try:
                super().accept()[0].close()
            finally:
                _Listener._spare = open(os.devnull)  # noqa: SIM115
            raise BlockingIOError from error  # there is nothing for the event loop


class _Exchange:
    """One request and its response, in ASGI's messages."""

    def __init__(self, receive: Any, send: Any) -> None:
        self._receive = receive
        self._send = send
        self.streams = self._is_read = False

    async def body(self, headers: Mapping[str, str]) -> bytes:
        """The whole body. Raises Refused if it is too long or too slow."""
        too_long = Refused(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes", "body_too_long")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise too_long
        parts, size, is_more = [], 0, True
        try:
            async with asyncio.timeout(BODY_S):
                while is_more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    is_more = message.get("more_body", False)
                    if size > MAX_BODY_BYTES:
                        raise too_long
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {BODY_S:g} s", "body_too_slow") from None
        self._is_read = True
        return b"".join(parts)

    async def json(self, status: int, value: Json) -> None:
        """Send a whole response. The rest of a body that was not read is not waited for."""
        headers = [_JSON] if self._is_read else [_JSON, (b"connection", b"close")]
        await self._write({"type": "http.response.start", "status": status, "headers": headers})
        await self._write({"type": "http.response.body", "body": json.dumps(value).encode()})

    async def stream(self, events: Iterator[Event]) -> None:
        """Send events, and end the response."""
        for name, data in events:
            text = data if isinstance(data, str) else json.dumps(data)
            head = f"event: {name}\n" if name else ""
            await self.part(f"{head}data: {text}\n\n".encode())
        await self.part(b"", more=False)

    async def part(self, part: bytes, *, more: bool = True) -> None:
        """Send a part of a stream, which begins with its first one."""
        if not self.streams:
            self.streams = True
            await self._write({"type": "http.response.start", "status": 200, "headers": [_STREAM]})
        await self._write({"type": "http.response.body", "body": part, "more_body": more})

    async def _write(self, message: Mapping[str, Any]) -> None:
        async with asyncio.timeout(SEND_S):
            await self._send(message)


class _Server(uvicorn.Server):
    """A server inside of a process that handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class _Protocol(H11Protocol):
    """HTTP with limits for clients that send no head of a request: their time, and their number."""

    # Connections of the endpoint that wait for a head, the oldest first.
    waiting: ClassVar[dict["_Protocol", None]]
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_head(self) -> None:
        """The time runs from the end of the last request, whatever bytes arrive."""
        is_waiting = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if is_waiting and self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)
            self.waiting[self] = None
            if len(self.waiting) > MOST_WAITING:
                oldest = next(iter(self.waiting))
                oldest._stop_waiting()
                oldest.transport.abort()
        elif not is_waiting:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._late is not None:
            self._late.cancel()
            self._late = None
