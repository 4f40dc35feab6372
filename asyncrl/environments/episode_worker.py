"""The program of an environment's processes: it imports the user's file, runs it, and may be killed.

The environment's own Python runs `START` and needs nothing but the standard library. The process is a *fork
server*: it imports the user's file once, says what it found, and forks one worker per order. A worker has its
own socket, session, temporary directory and random numbers, and ends with the fork server. An import that
starts threads makes forks unsafe; such a process becomes a worker itself.

Messages on the fork server's socket (`json_frames`):

    in   {uses: [target, ...], limits: {RLIMIT_ name: value}}                                once
    out  {description: {...}, threads} | {error: reason}                                     once
    in   {serve: number, directory, fork}, with the worker's end of its socket
    out  {serving: number, pid} | {serving: number, error: reason}
    in   {reap: [number, ...]}                               their workers have been killed, or have ended
    out  {ended: number, status: exit status, negative for a signal}

Messages of a worker that plays many rollouts, `async def rollout(session, **columns)`, on one asyncio loop;
those of the other workers are in `player`. `start`, `cancel` and `episode` number the episodes, `call`
numbers what one asks of the model.

    in   {start, columns, seed, place} | {cancel} | {ping}
         {call, answer: the fields of `Answer` without `logprobs`} | {call, spent: finish reason}
    out  {call, episode, messages, tools, train} | {call, episode, text} | {episode, reward, state} | {pong}
         {episode, value, metrics} | {episode, spent: finish reason, metrics} | {episode, error, where, fault}

User code never sees these sockets: its standard input is empty, and its output goes to standard error.
"""

import asyncio
import contextlib
import errno
import gc
import os
import random
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.environments.base import Answer, BudgetSpent, Message, ToolCall
from asyncrl.environments.json_frames import packed, receive_order, take_frames
from asyncrl.environments.named import load_target
from asyncrl.environments.player import MAX_REASON_CHARACTERS, Player, described
from asyncrl.environments.user_code import describe, describe_tool
from asyncrl.hosting.processes import adopt_orphans, die_with_parent, join_outputs, kill_group, restrict

# Directory of this package, which the environment's Python need not have.
PLACE = str(Path(__file__).parents[2])
# Program text that finds this package first and the working directory last, whose files may be named like
# modules of a library; older versions of Python have no -P. The argument behind it is PLACE.
BEGIN = "import os, sys; sys.path = [sys.argv[1], *filter(None, sys.path), os.getcwd()]"
# Program text, with arguments PLACE, the socket's descriptor, and the process id of the parent.
START = f"{BEGIN}; from {__name__} import main; main()"
REAP_AGAIN_S = 0.02
READ_BYTES = 1 << 18
_MESSAGE = '{"role": ..., "content": ...}'
_SCHEMA = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


def main() -> None:
    """Serve orders until the parent's socket ends."""
    place, descriptor, parent_pid = sys.argv[1:]
    sys.path.remove(place)  # what lies next to this package is not for user code
    die_with_parent(int(parent_pid))
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    join_outputs()
    orders, _ = receive_order(control)
    restrict(orders["limits"])
    try:
        targets = [load_target(target) for target in orders["uses"]]
        description = describe(targets)
    except BaseException as error:  # noqa: BLE001 - user code may raise even SystemExit
        reason = str(error) if isinstance(error, ImportError | TypeError) else repr(error)
        control.sendall(packed({"error": reason[:MAX_REASON_CHARACTERS]}))
        return
    threads = len(os.listdir("/proc/self/task"))
    control.sendall(packed({"description": description, "threads": threads}))
    gc.freeze()
    _ForkServer(control, targets, description["kind"]).serve(int(parent_pid))


class _ForkServer:
    """Forks workers, and reports how they ended."""

    def __init__(self, control: socket.socket, targets: list[Any], kind: str) -> None:
        self._control, self._targets, self._kind = control, targets, kind
        # Process ids by number: of all workers, and of those to wait for.
        self._workers: dict[int, int] = {}
        self._killed: dict[int, int] = {}
        self._own: set[int] = set()  # children that the import has started

    def serve(self, parent_pid: int) -> None:
        # From here on, the death of the parent leaves time to kill what the workers started.
        signal.signal(signal.SIGTERM, lambda number, frame: self._end())
        die_with_parent(parent_pid, signal.SIGTERM)
        # Workers adopt orphans, too. So only what a worker left behind when it ended comes to this process.
        self._own = _children()
        adopt_orphans(True)
        are_left = False
        while True:
            wait_s = REAP_AGAIN_S if self._killed or are_left else None
            if select.select([self._control], [], [], wait_s)[0]:
                try:
                    order, descriptors = receive_order(self._control)
                except (EOFError, OSError):
                    self._end()
                self._follow(order, descriptors)
            for number, pid in list(self._killed.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del self._killed[number], self._workers[number]
                    self._tell({"ended": number, "status": os.waitstatus_to_exitcode(status)})
            are_left = self._end_orphans()

    def _end_orphans(self) -> bool:
        """Kill what ended workers have left; return whether something was, as its children are next."""
        orphans = _children() - self._own - set(self._workers.values())
        for pid in orphans:
            with contextlib.suppress(PermissionError):  # what sudo has started ends by itself
                os.kill(pid, signal.SIGKILL)  # also of a zombie, which is ours until it is waited for
            os.waitpid(pid, os.WNOHANG)
        return bool(orphans)

    def _follow(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if "reap" in order:
            self._killed.update((number, self._workers[number]) for number in order["reap"])
            return
        own_pid = os.getpid()
        try:
            if not descriptors:  # there was no number left for it
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            channel = socket.socket(fileno=descriptors[0])
            pid = os.fork() if order["fork"] else own_pid
        except OSError as error:  # also no memory, or no process, is left
            self._tell({"serving": order["serve"], "error": str(error)})
            return
        if pid == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            die_with_parent(own_pid)
        else:
            self._tell({"serving": order["serve"], "pid": pid})
        if pid in (0, own_pid):
            _work(channel, self._targets, self._kind, order["directory"])
        channel.close()
        self._workers[order["serve"]] = pid

    def _tell(self, message: dict[str, Any]) -> None:
        self._control.sendall(packed(message))

    def _end(self) -> NoReturn:
        for pid in self._workers.values():
            kill_group(pid)
        os._exit(0)


def _work(channel: socket.socket, targets: list[Any], kind: str, directory: str) -> NoReturn:
    """Be a worker until the socket ends."""
    try:
        adopt_orphans(True)
        os.makedirs(directory, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        random.seed()  # not the fork server's numbers
        if kind == "rollout":
            asyncio.run(_RolloutHost(channel, targets[0]).serve())
        else:
            Player(channel, targets, is_tools=kind == "tools").serve()
    except (EOFError, ConnectionError):  # the parent has closed the socket
        os._exit(0)
    except BaseException:  # noqa: BLE001 - it must not return to the fork server's loop
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # here, because what the end of a half-made event loop prints would hide the error


def _children() -> set[int]:
    """The process ids of this process's children, also of adopted ones and of those that have ended."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:  # the kernel does not list them
        return set()


class Session:
    """The first argument of a rollout: the model, in one episode."""

    def __init__(self, host: "_RolloutHost", number: int, *, seed: int, episode: int) -> None:
        """Stand for episode `number` of the host."""
        self._host, self._number = host, number
        # Equal for all episodes of a group.
        self.seed = seed
        # Place in the group, from 0.
        self.episode = episode
        # Small named numbers of the episode, for the run's metrics `environment/<name>`.
        self.metrics: dict[str, float] = {}

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Callable[..., Any] | Mapping[str, Any]] = (),
        train: bool = True,
    ) -> Answer:
        """Return the model's answer to a conversation. `tools` are functions or JSON schemas.

        With `train=False` the answer is not trained, for example that of a judge.
        Raises BudgetSpent if no turn is left. A rollout may let it pass; then the episode has no reward.
        Raises TypeError for a tool that is neither, and for what is not a list of messages.
        """
        if not isinstance(messages, list | tuple) or not all(
            isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages
        ):
            found = f"found {messages!r:.80}; session.chat takes a list of messages {_MESSAGE}"
            raise TypeError(f"{found}; a model without a chat template takes text, by session.complete")
        for tool in tools:
            if isinstance(tool, Mapping) and "function" not in tool:
                raise TypeError(f"found the tool {tool!r:.80}; as a schema it is {_SCHEMA}")
        offered = [tool if isinstance(tool, Mapping) else describe_tool(tool) for tool in tools]
        question = {"messages": list(messages), "tools": offered, "train": bool(train)}
        return await self._host.ask({**question, "episode": self._number})

    async def complete(self, text: str) -> Answer:
        """Return the model's answer to everything before, with `text` appended as it is.

        Raises BudgetSpent if no turn is left, and TypeError for what is not text.
        """
        if not isinstance(text, str):
            text = f"found {text!r:.80}; session.complete takes text, and session.chat takes messages"
            raise TypeError(text)
        return await self._host.ask({"text": text, "episode": self._number})

    def score_turn(self, reward: float | None, state: object = None) -> None:
        """Give the last turn a reward, if any, and name the state that it started from by a value of JSON."""
        self._host.tell({"reward": reward, "state": state, "episode": self._number})


class _RolloutHost:
    """Starts and cancels the episodes of its parent, and carries their questions to the model."""

    def __init__(self, channel: socket.socket, rollout: Callable[..., Any]) -> None:
        """Play the episodes of one function."""
        self._channel, self._rollout = channel, rollout
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._calls = 0

    async def serve(self) -> NoReturn:
        """Follow messages until the socket ends, which raises EOFError."""
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        arrived = bytearray()
        while data := await reader.read(READ_BYTES):
            arrived += data
            for message in take_frames(arrived):
                self._follow(message)
        raise EOFError

    async def ask(self, question: Mapping[str, Any]) -> Answer:
        """Return the model's answer. Raises BudgetSpent; TypeError and ValueError for what JSON has not."""
        self._calls += 1
        call = self._calls
        self.tell({"call": call, **question})
        self._asked[call] = asyncio.get_running_loop().create_future()
        try:
            return await self._asked[call]
        finally:
            del self._asked[call]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to the parent."""
        self._writer.write(packed(message))

    def _follow(self, message: dict[str, Any]) -> None:
        if "ping" in message:
            self.tell({"pong": message["ping"]})
        elif "start" in message:
            number = message["start"]
            self._episodes[number] = asyncio.create_task(self._play(number, message))
        elif "cancel" in message:
            if message["cancel"] in self._episodes:
                self._episodes[message["cancel"]].cancel()
        elif (asked := self._asked.get(message["call"])) is None or asked.done():
            return  # its episode was cancelled
        elif "spent" in message:
            asked.set_exception(BudgetSpent(message["spent"]))
        else:
            fields = message["answer"]
            calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
            asked.set_result(Answer(tool_calls=calls, **fields))

    async def _play(self, number: int, start: Mapping[str, Any]) -> None:
        session = Session(self, number, seed=start["seed"], episode=start["place"])
        try:
            try:
                end = {"value": await self._rollout(session, **start["columns"])}
            except BaseException as error:
                first = error
                # A task group wraps spent budgets, which may be all that ended the rollout.
                while isinstance(first, BaseExceptionGroup) and first.split(BudgetSpent)[1] is None:
                    first = first.exceptions[0]
                if not isinstance(first, BudgetSpent):
                    raise
                end = {"spent": first.finish_reason}
            self.tell({"episode": number, **end, "metrics": dict(session.metrics)})
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            self.tell({"episode": number} | described(error))
        finally:
            del self._episodes[number]
