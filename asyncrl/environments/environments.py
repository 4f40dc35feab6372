"""The environment of a config: the user's code in processes of its own, behind the interface of `base`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Opening, Outcome, Talk
from asyncrl.environments.caller import Caller
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.fork_server import ForkServer
from asyncrl.environments.loops import asked, play_text
from asyncrl.errors import EnvironmentFault


class Environments:
    """Plays the episodes of a generator."""

    def __init__(self, config: EnvironmentConfig, variables: Sequence[str] = ()) -> None:
        """`variables` are patterns of environment variables, `run.environment`, that user code gets."""
        self._config = config
        self._server = ForkServer(config, variables)
        # What the user's file has: kind, columns, tools.
        self.description: Mapping[str, Any] = {}
        # Faults by reason.
        self.faults: Counter[str] = Counter()

    async def start(self) -> None:
        """Import the user's file, and look at it. Raises EnvironmentFault."""
        self.description = await self._server.start()
        if (kind := self.description["kind"]) != "text":
            text = f"environment.uses {self._config.uses} is of kind {kind}; a class with `step` is allowed"
            raise EnvironmentFault(text, reason="start")

    async def play(
        self, talk: Talk, row: Mapping[str, Any], *, prompt: Opening, seed: int, episode: int
    ) -> Outcome:
        """Play one episode, as `base.Environment` says."""
        try:
            return await self._play(talk, row, prompt, seed, episode)
        except EnvironmentFault as fault:
            self.faults[fault.reason] += 1
            raise

    async def close(self) -> None:
        """Kill all processes."""
        await self._server.close()

    async def _play(
        self, talk: Talk, row: Mapping[str, Any], prompt: Opening, seed: int, episode: int
    ) -> Outcome:
        # A row that names its seed is a task made from it.
        start = {"columns": self._columns({"seed": seed, "episode": episode} | dict(row)), "seed": seed}
        conversation = Conversation(talk, prompt, self._config.max_observation_characters)
        worker = Caller(self._config.step_s)
        try:
            await worker.start(self._server)
            outcome = await play_text(
                talk, conversation, worker.ask, start, rewards=self.description["rewards"]
            )
            if self.description["closes"]:
                await asked(worker.ask, "close")
        finally:
            worker.close()
        metrics = {name: float(count) for name, count in conversation.counts.items()}
        return replace(outcome, metrics=metrics | {"environment_s": worker.busy_s})

    def _columns(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the signature names: user code sees no others, so no answers by accident."""
        if missing := sorted(set(self.description["required"]) - given.keys()):
            found = f"environment.uses {self._config.uses} wants column(s) {missing}"
            raise EnvironmentFault(f"{found}, which the row lacks; it has {sorted(given)}", reason="start")
        names = given if self.description["takes_all"] else self.description["columns"]
        return {name: given[name] for name in names if name in given}
