"""`openenv:URL`, for example `openenv:http://localhost:8000`: an environment behind a server of OpenEnv.

Every episode has a WebSocket, and with it a session of the server, which ends with the socket. The server's
`reset` gets the seed and the row. If the server has tools (MCP), they are the model's tools. Otherwise an
answer is the action: as it is if an action has one text, else the last JSON object in it. An action that the
server refuses is an observation; a lost server, or one that has no free session, is a fault.
"""

import contextlib
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from asyncrl.addons.adapters.base import ToolError, last_json, tools_of

# Limits in seconds for the server to accept a socket, to answer a ping, and to end a session.
OPEN_S, PING_S, CLOSE_S = 20.0, 20.0, 5.0
MOST_BYTES = 64 << 20
REFUSED = "VALIDATION_ERROR"


class _Connection:
    """The session of one episode. The client answers pings in a thread of its own."""

    url: str

    def _open(self, ping_s: float | None = PING_S) -> None:
        self._socket = connect(
            f"ws{self.url.removeprefix('http')}/ws",
            max_size=MOST_BYTES,
            open_timeout=OPEN_S,
            ping_interval=ping_s,
            ping_timeout=ping_s,
            close_timeout=CLOSE_S,
        )

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return `observation`, `reward` and `done`, or `errors` of an action that the server refuses."""
        with contextlib.suppress(ConnectionClosed):  # what a server says before it closes can still be read
            self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            reply = json.loads(self._socket.recv())
            found: dict[str, Any] = reply["data"]
            is_error = reply["type"] == "error"
        except ConnectionClosed as error:
            raise ConnectionError(f"the server {self.url} is lost: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            text = f"the server {self.url} gave no answer of OpenEnv ({type(error).__name__}: {error})"
            raise ConnectionError(text) from error
        if not is_error or (kind == "step" and found["code"] == REFUSED):
            return found
        cure = "; allow more sessions there (max_concurrent_envs)" if "CAPACITY" in found["code"] else ""
        raise ConnectionError(f"the server {self.url} says {found['code']}: {found['message']}{cure}")

    def close(self) -> None:
        """End the session, and wait until the server has ended it."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            self._socket.send('{"type": "close"}')
            self._socket.recv(CLOSE_S)
        self._socket.close()


class _Text(_Connection):
    """An environment whose action is an answer."""

    field: str  # the only field of an action if it is text without a choice, otherwise ""
    action: str  # which JSON object an action is

    def reset(self, **row: Any) -> str:
        self._open()
        said = _shown(self._ask("reset", row)["observation"])
        return said if self.field else f"An action is {self.action}.\n{said}"

    def step(self, response: str) -> tuple[str, float | None, bool]:
        action = {self.field: response} if self.field else last_json(response, "{")
        if action is None:
            return f"error: found no action; an action is {self.action}", 0.0, False
        reply = self._ask("step", action)
        if "errors" in reply:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in reply["errors"])
            return f"error: {wrong}; an action is {self.action}", 0.0, False
        return _shown(reply["observation"]), _number(reply["reward"]), bool(reply["done"])


class _Tools(_Connection):
    """An environment with tools; its reward is the sum of those of the calls."""

    def reset(self, **row: Any) -> str:
        self._open()
        self._reward: float | None = None
        self._done = False
        return _shown(self._ask("reset", row)["observation"])

    def get_reward(self) -> float | None:
        """Return the reward so far; None if the server gave none."""
        return self._reward

    def is_done(self) -> bool:
        return self._done

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        reply = self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        reward, self._done = _number(reply.get("reward")), bool(reply.get("done"))
        if reward is not None:
            self._reward = (self._reward or 0.0) + reward
        observation = reply.get("observation", {})
        if wrong := observation.get("error") or reply.get("errors"):
            raise ToolError(wrong["message"] if isinstance(wrong, Mapping) else str(wrong))
        result = observation.get("result")
        return result.get("data", result) if isinstance(result, Mapping) else result


def environment(url: str) -> type:
    """Return a class for the server at a URL. Raises OSError if there is none, TypeError without actions."""
    url = url.rstrip("/")
    with urllib.request.urlopen(f"{url}/schema", timeout=OPEN_S) as answer:
        action = json.load(answer)["action"]
    fields = {name: one for name, one in action["properties"].items() if name != "metadata"}
    if fields.keys() - {"type", "tool_name", "arguments"}:
        [(name, schema), *others] = fields.items()
        is_text = not others and schema.get("type") == "string" and "enum" not in schema
        kept = {key: value for key, value in action.items() if key in ("required", "$defs")}
        text = f"a JSON object with {json.dumps({'properties': fields} | kept)}"
        return type("Remote", (_Text,), {"url": url, "field": name if is_text else "", "action": text})
    lister = type("Lister", (_Connection,), {"url": url})()
    lister._open(ping_s=None)  # a thread that pings would end too late for this process to fork
    try:
        tools = lister._ask("step", {"type": "list_tools"}).get("observation", {}).get("tools")
    finally:
        lister.close()
    if not tools:
        raise TypeError(f"the server {url} has neither fields of an action nor tools")
    listed = [(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]
    return type("Remote", (_Tools,), {"url": url} | tools_of(_Tools._call, *listed))


def _shown(observation: Mapping[str, Any]) -> str:
    """An observation that has one text is this text, otherwise JSON."""
    said = {
        name: value
        for name, value in observation.items()
        if name != "metadata" and value not in (None, "", [], {})
    }
    values = list(said.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(said, ensure_ascii=False) if said else ""


def _number(reward: bool | float | None) -> float | None:
    return None if reward is None else float(reward)
