"""`mcp:COMMAND` or `mcp:URL`: the tools of a server of the Model Context Protocol, with mcp 2.

A command is a server of its own for every episode, so that it may have a state; it ends with the episode. A
call that the server refuses is an observation. A server that ends, or answers what is not MCP, is a fault.
"""

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from asyncrl.addons.adapters.base import ToolError, tools_of

# Before the import, which says nothing of versions.
if tuple(map(int, version("mcp").split(".")[:2])) < (2, 3):
    raise ImportError(
        f"found mcp {version('mcp')}; at least 2.3 is needed: run `pip install 'mcp>=2.3'` for the Python of "
        "the environment"
    )

from mcp import Client, MCPError, StdioServerParameters, types

# Answers of a server that lists its tools, before it is taken for one that does so without an end.
MOST_PAGES = 100
# An MCP client starts servers in sessions of their own, so the kernel is asked to kill them with us.
BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)
# Errors of the connection, not of a call: it is closed, or there is no answer.
LOST = (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT)


class _Connection:
    """One episode's connection, in a task of its own, because a client must be closed by its task."""

    server: str

    async def reset(self) -> None:
        """Connect. Raises what the client raises."""
        self._calls: asyncio.Queue[tuple[str, Mapping[str, Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._serve())
        await self._call("", {})

    async def _serve(self) -> None:
        async with Client(_parameters(self.server)) as client:
            while True:
                name, arguments, reply = await self._calls.get()
                try:
                    reply.set_result(await client.call_tool(name, dict(arguments)) if name else None)
                except Exception as error:  # noqa: BLE001 - what the client raises for a reply that is no MCP
                    reply.set_exception(error)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((name, arguments, reply))
        await asyncio.wait([self._task, reply], return_when=asyncio.FIRST_COMPLETED)
        try:
            return reply.result() if reply.done() else self._task.result()
        except Exception as group:
            error = _first(group)
            if not isinstance(error, MCPError):
                found = f"{type(error).__name__}: {error}"
                raise ConnectionError(f"the server {self.server} gave no answer of MCP ({found})") from group
            if error.code not in LOST:
                raise error from group
            raise ConnectionError(f"the server {self.server} is lost: {error}") from group


def environment(name: str) -> type:
    """Return a class whose methods are the tools of the server. Raises ImportError if there is none."""
    if not _is_url(name) and shutil.which(program := next(iter(shlex.split(name)), "")) is None:
        raise ImportError(
            f"there is no program `{program}`; write `mcp:COMMAND`, or `mcp:http://HOST:PORT/mcp`"
        )
    try:
        tools = asyncio.run(_listed(name))
    except Exception as group:  # noqa: BLE001 - what the client's tasks raise
        error = _first(group)
        raise ImportError(f"the MCP server gives no tools ({type(error).__name__}: {error})") from error
    listed = [(tool.name, tool.description, tool.input_schema) for tool in tools]
    return type("Server", (_Connection,), {"server": name} | tools_of(_called, *listed))


async def _listed(server: str) -> list[types.Tool]:
    async with Client(_parameters(server)) as client:
        tools, cursor = [], None
        for _ in range(MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if not (cursor := page.next_cursor):
                return tools
    raise ValueError(f"it lists tools without an end: {len(tools)} in {MOST_PAGES} answers")


def _parameters(server: str) -> str | StdioServerParameters:
    if _is_url(server):
        return server
    words = ["-I", "-c", BOUND, str(os.getpid()), *shlex.split(server)]
    return StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))


def _is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _called(self: _Connection, name: str, arguments: Mapping[str, Any]) -> str:
    result = await self._call(name, arguments)
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
    if result.is_error:
        raise ToolError(text)
    return text
