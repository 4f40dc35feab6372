"""An HTTP server on a real socket that answers as a test says, also wrongly, late and never."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the server answers. `fault` is `hang`, `drop` (closes the connection), or `drip` (byte by byte)."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    fault: str = ""

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class Asked:
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: Any
    at_s: float


@dataclass
class JudgeServer:
    url: str
    asked: list[Asked] = field(default_factory=list)


def chat(words: str, tokens: int = 10) -> Reply:
    return Reply({"choices": [{"message": {"content": words}}], "usage": {"total_tokens": tokens}})


@contextmanager
def served(answer: Callable[[Asked, int], Reply]) -> Iterator[JudgeServer]:
    """Serve `answer(request, number of requests before)` until the end of the block."""
    over, lock = threading.Event(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(server.asked)
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.asked.append(Asked(self.path, headers, body, time.monotonic()))
            with suppress(ConnectionError):
                self.send(answer(server.asked[number], number))

        def send(self, reply: Reply) -> None:
            if reply.fault in ("hang", "drop"):
                if reply.fault == "hang":
                    over.wait()
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, value in {"content-length": str(len(reply.data)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if reply.fault == "drip":
                for index in range(len(reply.data)):
                    self.wfile.write(reply.data[index : index + 1])
                    if over.wait(0.3):
                        return
            self.wfile.write(reply.data)

        def log_message(self, *arguments: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512

    http = Server(("127.0.0.1", 0), Handler)
    server = JudgeServer(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        http.shutdown()
        http.server_close()
        thread.join()
