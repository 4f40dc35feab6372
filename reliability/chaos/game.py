"""A game whose reward proves that it was played to its end, as environment, tool, server of a tool and agent.

The reward is 1 plus a checksum of everything that the model said, so it is never 0. The user code of the
scenario `episodes`: the standard library only, because other processes load this file alone.
"""

import json
import os
import sys
import time
import urllib.request
import zlib
from collections.abc import Sequence

TURNS = 3
"""Answers of the model in an episode that ends by itself; with tools it ends at an answer without a call."""
LETTERS = "abcdefghijklmno"
SERVER = "server"
"""Argument of this file that makes it a server."""
_LINGER_S = 600.0


def reply(said: Sequence[str]) -> str:
    """What the model is shown after it said this: four letters."""
    number = zlib.crc32(json.dumps(list(said)).encode())
    return "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(4))


def reward(said: Sequence[str]) -> float:
    """Of the episode in which this was said: 1 to 1000."""
    return 1.0 + zlib.crc32(json.dumps(list(said)).encode()) % 1000


class Text:
    """The game as a text environment."""

    def reset(self, start: str) -> str:
        self._said = [start]
        return reply(self._said)

    def step(self, text: str) -> tuple[str, None, bool]:
        time.sleep(0.01)
        self._said.append(text)
        return reply(self._said), None, len(self._said) > TURNS

    def get_reward(self) -> float:
        return reward(self._said)


def mix(text: str) -> str:
    """Mix the letters of a text.

    Args:
        text: letters
    """
    time.sleep(0.01)
    return reply([text])


def serve() -> None:
    """Offer `mix` as a server of the Model Context Protocol, on standard input and output."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = [{"name": "mix", "description": "Mix the letters of a text.", "inputSchema": schema}]
    for line in sys.stdin:
        asked = json.loads(line)
        given = asked.get("params", {})
        if asked["method"] == "initialize":
            result: dict[str, object] | None = {
                "protocolVersion": given["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "game", "version": "1"},
            }
        elif asked["method"] == "tools/list":
            result = {"tools": tools}
        elif asked["method"] == "tools/call":
            time.sleep(0.05)
            result = {"content": [{"type": "text", "text": mix(**given["arguments"])}]}
        else:
            result = None
        if "id" in asked:
            answer = {"result": result} if result else {"error": {"code": -32601, "message": "unknown"}}
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}) + "\n")
            sys.stdout.flush()


def agent() -> None:
    """The game as a program, with a child that leaves the session of its parent and stays if it can."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(_LINGER_S)
        os._exit(0)
    start = json.loads(os.environ["ASYNCRL_ROW"])["start"]
    said, messages, status = [start], [{"role": "user", "content": start + reply([start])}], 0
    try:
        while len(said) <= TURNS:
            said.append(_answer(messages))
            messages += [
                {"role": "assistant", "content": said[-1]},
                {"role": "user", "content": reply(said)},
            ]
    except OSError:  # refused, or cut off
        status = 1
    time.sleep(0.02)  # a fault may strike between the last answer and the result, too
    with open(os.environ["ASYNCRL_RESULT"], "w") as file:
        json.dump(reward(said), file)
    sys.exit(status)


def _answer(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


if __name__ == "__main__":
    serve() if SERVER in sys.argv else agent()
