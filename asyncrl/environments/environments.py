"""The environment of a config: the user's code in processes of its own, behind the interface of `base`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Opening, Outcome, Talk
from asyncrl.environments.caller import Caller
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.fork_server import ForkServer
from asyncrl.environments.loops import asked, play_text, play_tool_class, play_tools
from asyncrl.environments.rollouts import Rollouts
from asyncrl.environments.tool_pool import ToolPool
from asyncrl.environments.tool_schemas import Toolbox
from asyncrl.errors import EnvironmentFault


@dataclass(eq=False)
class Environments:
    """Plays the episodes of a generator."""

    config: EnvironmentConfig
    # `run.environment`, and what `ForkServer` says.
    variables: Sequence[str] = ()
    loaded: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._server = ForkServer(self.config, self.variables, self.loaded)
        # What the user's file has: kind, columns, tools.
        self.description: Mapping[str, Any] = {}
        self._toolbox = Toolbox([])
        self._shared: ToolPool | Rollouts | None = None

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, which the model is shown."""
        return self._toolbox.schemas

    async def start(self) -> None:
        """Import the user's file, and look at it. Raises EnvironmentFault."""
        self.description = await self._server.start()
        self._toolbox = Toolbox(self.description["tools"])
        if self.description["kind"] == "tools":
            self._shared = ToolPool(self._server, self.config.workers, self.config.step_s)
            await self._shared.start()
        elif self.description["kind"] == "rollout":
            self._shared = Rollouts(self._server, self.config)

    async def play(
        self, talk: Talk, row: Mapping[str, Any], *, prompt: Opening, seed: int, episode: int
    ) -> Outcome:
        """Play one episode, as `base.Environment` says."""
        # A row that names its seed is a task made from it.
        columns = self._columns({"seed": seed, "episode": episode} | dict(row) | {"prompt": prompt})
        if isinstance(self._shared, Rollouts):
            return await self._shared.play(talk, columns, seed=seed, place=episode)
        conversation = Conversation(talk, prompt, self.config.max_observation_characters)
        if isinstance(self._shared, ToolPool):
            pool, step_s = self._shared, self.config.step_s
            outcome = await play_tools(conversation, self._toolbox, pool.ask, step_s=step_s)
            return replace(outcome, metrics=conversation.metrics)
        worker = Caller(self.config.step_s)
        try:
            await worker.start(self._server)
            start = {"columns": columns, "seed": seed}
            has, ask = self.description, worker.ask
            if has["kind"] == "text":
                outcome = await play_text(talk, conversation, ask, start, rewards=has["rewards"])
            else:
                tools = self._toolbox
                outcome = await play_tool_class(conversation, tools, ask, start, rewards=has["rewards"])
            if has["closes"]:
                await asked(ask, "close")
        finally:
            worker.close()
        return replace(outcome, metrics=conversation.metrics)

    async def close(self) -> None:
        """Kill all processes."""
        if self._shared is not None:
            await self._shared.close()
        await self._server.close()

    def _columns(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the signature names: user code sees no others, so no answers by accident."""
        if missing := sorted(set(self.description["required"]) - given.keys()):
            found = f"environment.uses {self.config.uses} wants column(s) {missing}"
            raise EnvironmentFault(f"{found}, which the row lacks; it has {sorted(given)}", reason="start")
        names = given if self.description["takes_all"] else self.description["columns"]
        return {name: given[name] for name in names if name in given}
