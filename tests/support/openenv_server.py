"""A server with environments of OpenEnv, for the Python that has it; prints its port."""

import os
import random
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Message(Action):
    message: str


class Text(Observation):
    text: str


class Echo(Environment):
    """Repeats, until it hears "bye"."""

    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Text:
        return Text(text="I repeat.")

    def step(self, action: Message, timeout_s: float | None = None) -> Text:
        return Text(text=action.message, reward=len(action.message), done=action.message == "bye")


class Number(Action):
    number: int


class Hint(Observation):
    hint: str
    tries: int


class Guess(Environment):
    """A number from the seed; the server raises at 13, and ends at 99."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 10) -> Hint:
        self.right, self.tries = random.Random(seed).randint(1, high), 0
        return Hint(hint=f"from 1 to {high}", tries=0)

    def step(self, action: Number, timeout_s: float | None = None) -> Hint:
        if action.number == 13:
            raise RuntimeError("unlucky")
        if action.number == 99:
            os._exit(1)
        self.tries += 1
        side = (action.number > self.right) - (action.number < self.right)
        return Hint(
            hint=["right", "lower", "higher"][side], tries=self.tries, done=not side, reward=float(not side)
        )


class Shop(MCPEnvironment):
    """A tool; a call is worth what has been sold, and three things are all there is."""

    state = State()

    def __init__(self) -> None:
        server = FastMCP("shop")
        self.sold = 0

        @server.tool
        def buy(what: str, count: int = 1) -> str:
            """Buy something."""
            if what == "air":
                raise ValueError("air is free")
            self.sold += count
            return f"{count} {what}, {self.sold} in all"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation()

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation: Observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward, observation.done = float(self.sold), self.sold >= 3
        return observation


if __name__ == "__main__":
    app = FastAPI()
    app.mount("/echo", create_fastapi_app(Echo, Message, Text, max_concurrent_envs=1))
    app.mount("/guess", create_fastapi_app(Guess, Number, Hint, max_concurrent_envs=4))
    app.mount("/shop", create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=1))
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])
