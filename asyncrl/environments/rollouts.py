"""Free-form episodes: user code talks to the model as it likes, many episodes on one loop of one process.

A hung loop stops its episodes. A process whose loop does not answer is killed, and its episodes are faults.
"""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from asyncrl.algo.trainable import NAME, is_name
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import BudgetSpent, Outcome, Talk
from asyncrl.environments.fork_server import ForkServer, Worker, keep
from asyncrl.environments.json_frames import Channel
from asyncrl.environments.returned import read_numbers, read_result, read_reward, state_of
from asyncrl.environments.tool_schemas import tool_schema
from asyncrl.errors import EnvironmentFault


class Rollouts:
    """Plays `async def rollout(session, **columns)` in a number of processes."""

    def __init__(self, server: ForkServer, config: EnvironmentConfig) -> None:
        """Kill a process whose loop does not answer for `step_s`."""
        self._server, self._step_s = server, config.step_s
        # For trials: `EpisodeSampler` cancels sooner what does not end, and may score it.
        self._most_s = config.episode_s + 4 * config.step_s
        self._hosts: list[_Host | None] = [None] * config.workers
        self._starting = [asyncio.Lock() for _ in self._hosts]
        self._places = itertools.cycle(range(config.workers))
        self._numbers = itertools.count(1)

    async def play(self, talk: Talk, columns: Mapping[str, Any], *, seed: int, place: int) -> Outcome:
        """Play one episode. Raises EnvironmentFault, and what the talk raises except BudgetSpent."""
        place_in_turn, number = next(self._places), next(self._numbers)
        async with self._starting[place_in_turn]:
            host = self._hosts[place_in_turn]
            if host is None or host.is_lost:
                host = _Host(self._step_s)
                await host.start(self._server)
                self._hosts[place_in_turn] = host
        episode = _Episode(talk, host.worker.channel, number)
        try:
            host.begin(episode, {"columns": columns, "seed": seed, "place": place})
            async with asyncio.timeout(self._most_s):
                return episode.outcome(await episode.end)
        except TimeoutError:
            text = f"the rollout did not end within {self._most_s:g} s; bound what it waits for"
            raise EnvironmentFault(text, reason="hung") from None
        finally:
            host.leave(episode)

    async def close(self) -> None:
        for host in self._hosts:
            if host is not None:
                host.close()


class _Episode:
    """One episode: the questions of user code go to its talk."""

    def __init__(self, talk: Talk, channel: Channel, number: int) -> None:
        self.number = number
        self._talk, self._channel = talk, channel
        # The last message of user code.
        self.end: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answering: set[asyncio.Task[None]] = set()
        self._turns = 0
        self._finish_reason = "stop"

    def receive(self, message: dict[str, Any]) -> None:
        if "call" in message:
            keep(self._answering, self._answer(message))
        elif "reward" in message:
            try:
                value, state = read_reward("score_turn", message["reward"]), message["state"]
                if value is not None or state is not None:
                    self._talk.score_turn(value, None if state is None else state_of(None, {"state": state}))
            except EnvironmentFault as fault:
                self.fail(fault)
        elif not self.end.done():
            self.end.set_result(message)

    def fail(self, error: BaseException) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def outcome(self, last: Mapping[str, Any]) -> Outcome:
        """Return what the last message says. Raises EnvironmentFault."""
        if "error" in last:
            raise EnvironmentFault(f"the rollout raised {last['error']} ({last['where']})")
        if not self._turns and self._finish_reason == "stop":
            text = "the rollout ended without a call of `session.chat` or `session.complete`"
            raise EnvironmentFault(f"{text}: nothing was sampled", reason="silent")
        reward, parts = read_result("rollout", last.get("value"))
        counts = read_numbers("session.metrics,", last.get("metrics", {}))
        if wrong := [name for name in counts if not is_name(name)]:
            text = f"session.metrics has the name {wrong[0]!r:.80}; {NAME} are allowed"
            raise EnvironmentFault(text, reason="returned")
        # Behind the budget that ended the rollout, turns in progress may still have been answered.
        return Outcome(
            finish_reason=last.get("spent", self._finish_reason),
            reward=reward,
            parts=parts,
            metrics=counts | {"turns": float(self._turns)},
        )

    def leave(self) -> None:
        self.end.cancel()
        for task in self._answering:
            task.cancel()

    async def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            if "text" in message:
                answer = await self._talk.complete(message["text"])
            else:
                tools = [tool_schema(one) for one in message["tools"]]
                answer = await self._talk.chat(message["messages"], tools=tools, train=message["train"])
            self._turns += 1
            self._finish_reason = answer.finish_reason
            fields = asdict(replace(answer, logprobs=tuple))  # a function, which no message holds
            del fields["logprobs"]
            self._channel.send({"call": message["call"], "answer": fields})
        except BudgetSpent as spent:
            self._finish_reason = spent.finish_reason
            self._channel.send({"call": message["call"], "spent": spent.finish_reason})
        except Exception as error:  # noqa: BLE001 - the episode ends with it
            self.fail(error)


class _Host:
    """One process, and the episodes in it."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.worker = Worker(self._receive, self._lose)
        self._episodes: dict[int, _Episode] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered = True
        self.is_lost = False

    async def start(self, server: ForkServer) -> None:
        await server.start_worker(self.worker)
        keep(self._tasks, self._beat())

    def begin(self, episode: _Episode, start: Mapping[str, Any]) -> None:
        if self.is_lost:
            raise EnvironmentFault("the process of the rollouts died before the episode began", reason="died")
        self._episodes[episode.number] = episode
        self.worker.channel.send({"start": episode.number, **start})

    def leave(self, episode: _Episode) -> None:
        """Cancel what still runs of an episode."""
        if self._episodes.pop(episode.number, None) and not self.is_lost:
            self.worker.channel.send({"cancel": episode.number})
        episode.leave()

    def close(self) -> None:
        self.is_lost = True
        for task in self._tasks:
            task.cancel()
        self.worker.kill()

    def _receive(self, message: dict[str, Any]) -> None:
        if "pong" in message:
            self._answered = True
        elif episode := self._episodes.get(message["episode"]):  # else it has been cut off
            episode.receive(message)

    def _lose(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            keep(self._tasks, self._bury(reason))

    async def _bury(self, reason: str) -> None:
        fault = await self.worker.fault("the process of the rollouts", reason, self._step_s)
        for episode in self._episodes.values():
            episode.fail(fault)

    async def _beat(self) -> None:
        """Ask the loop for a sign, again and again; one that does not give it is hung."""
        while not self.is_lost:
            self._answered = False
            self.worker.channel.send({"ping": True})
            await asyncio.sleep(self._step_s)
            if not self._answered:
                self._lose("hung")
