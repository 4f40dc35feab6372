"""The environment of kind `command`: a program of any language that calls the model over the endpoint."""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.addons.endpoint.agent_server import Endpoint
from asyncrl.addons.endpoint.open_episodes import OpenEpisode
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Opening, Outcome, Talk
from asyncrl.environments.returned import read_result
from asyncrl.errors import EnvironmentFault
from asyncrl.files import with_cure
from asyncrl.hosting.processes import bound_to_us, end_marked, kill_group, public_environment
from asyncrl.hosting.workers import Printed, Scratch, ending

END_S = 5.0  # limit for killed processes to end
MAX_RESULT_BYTES = 2**20
MOST_STARTING = 2  # programs at the same time: a start holds this process until the kernel has done its part
LONGEST_VARIABLE = 2**17 - 1  # bytes of NAME=VALUE that Linux takes


@dataclass(eq=False)
class AgentEnvironment:
    """Plays each episode with a process of its own, which ends the episode by exiting."""

    config: EnvironmentConfig
    # `run.environment`: patterns of environment variables that agents get.
    variables: Sequence[str] = ()
    # Called after each episode; raises if the program was another one.
    loaded: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        config = self.config
        self.endpoint = Endpoint(config.address, frozen=config.frozen, is_free=config.constraints == "ignore")
        self.description: Mapping[str, Any] = {"tools": ()}  # an agent brings its own
        # A killed generator cannot end agents itself.
        self._scratch: Scratch | None = None
        self._starting = asyncio.Semaphore(MOST_STARTING)

    async def start(self) -> None:
        """Begin to serve the model. Raises EnvironmentFault if there is no such program or address."""
        if shutil.which(self.config.program) is None:
            found = f"environment.command: there is no program {self.config.program}"
            raise EnvironmentFault(f"{found}; give a path, or a name on PATH", reason="start")
        try:
            await self.endpoint.start()
        except OSError as error:
            found = f"environment.address: this host cannot listen on {self.config.address} ({error})"
            raise EnvironmentFault(f"{found}; `ip address` lists its addresses", reason="start") from error
        self._scratch = Scratch("asyncrl-agents-")

    async def play(
        self, talk: Talk, row: Mapping[str, Any], *, prompt: Opening, seed: int, episode: int
    ) -> Outcome:
        """Run the program for one episode, as `base.Environment` says.

        The episode fails if a call failed and the program went on, if it called nothing, or if its status is
        not 0; but not if a budget was spent. Refused constraints do not fail it if it gave a result.
        """
        assert self._scratch is not None
        directory = self._scratch.directory / secrets.token_hex(8)
        result = directory / "result.json"
        open_episode = self.endpoint.episodes.open(talk)
        program = None
        try:
            # Not in a thread: a cancelled wait for it would leave the directory.
            directory.mkdir()
            # A row that names its seed is a task made from it.
            given = {"seed": seed, "episode": episode} | dict(row) | {"prompt": prompt}
            async with self._starting:
                name, arguments = self.config.program, self.config.command[1:]
                program = _Program(
                    [shutil.which(name) or name, *arguments],
                    self._environment(open_episode.key, given, directory),
                    memory_gib=self.config.memory_gib,
                )
                await asyncio.shield(program.started)
            await asyncio.wait({program.status}, timeout=self.config.episode_s + self.config.step_s)
            # A program that has written its result when its time is up need not end by itself.
            is_late = not program.status.done() and result.exists()
            status = 0 if is_late else await asyncio.shield(program.status)
            await program.end()
            printed, program = program.printed, None
            self.loaded()
            return _outcome(open_episode, status, printed, result)
        except OSError as error:  # for example, no descriptor is left for its output
            text = with_cure(error, f"environment.command {self.config.program}: no process can be started")
            raise EnvironmentFault(text, reason="start") from error
        finally:
            self.endpoint.episodes.close(open_episode)
            if program is not None:
                await asyncio.shield(program.end())
            with contextlib.suppress(RuntimeError):  # no thread is left
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def close(self) -> None:
        """Stop serving, and kill what is left of the agents."""
        await self.endpoint.close()
        if self._scratch is not None:
            await self._scratch.end()

    def _environment(self, key: str, given: Mapping[str, Any], directory: Path) -> dict[str, str]:
        """Our variables without secrets, and what the program needs to call the model."""
        assert self._scratch is not None
        url = self.endpoint.url
        row = json.dumps(given, default=str)
        (directory / "row.json").write_text(row)
        fits = len(f"ASYNCRL_ROW={row}") < LONGEST_VARIABLE  # JSON is ASCII
        ours = public_environment(self.variables) | self._scratch.variables
        # A proxy for the internet does not reach this address. As a whole `*` means all hosts.
        direct = ours.get("NO_PROXY") or ours.get("no_proxy")
        direct = direct if direct == "*" else ",".join(filter(None, [direct, self.config.address]))
        needed = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            **({"ASYNCRL_ROW": row} if fits else {}),
            "ASYNCRL_ROW_FILE": str(directory / "row.json"),
            "ASYNCRL_SEED": str(given["seed"]),
            "ASYNCRL_RESULT": str(directory / "result.json"),
            "TMPDIR": str(directory),
            "NO_PROXY": direct,
            "no_proxy": direct,
            "PYTHONUNBUFFERED": "1",
        }
        # OpenAI's Agents SDK would send the conversations to OpenAI, and wait for that at its end.
        return {"OPENAI_AGENTS_DISABLE_TRACING": "1"} | ours | needed


class _Program:
    """A program in a process group of its own, and the end of what it prints.

    A thread starts it and waits for it, because the kernel kills it when the thread that started it ends.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *, memory_gib: float | None
    ) -> None:
        self.printed = Printed()
        self._command, self._variables, self._memory_gib = command, variables, memory_gib
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        # Done when the program runs; an EnvironmentFault if it cannot.
        self.started: asyncio.Future[None] = self._loop.create_future()
        # The exit status, negative for a signal.
        self.status: asyncio.Future[int] = self._loop.create_future()
        # A pipe of our own: a program's end must not wait for all that hold the pipe.
        output, theirs = os.pipe()
        self._following = asyncio.create_task(self._follow(output))
        try:
            threading.Thread(target=self._run, args=(theirs,), daemon=True).start()
        except RuntimeError as error:  # no thread is left
            os.close(theirs)
            self._tell(self.started.set_exception, self._unstarted(error))

    async def end(self) -> None:
        """Kill what is left of it, and read what it has printed."""
        await asyncio.wait({self.started})
        if self._process is not None:
            kill_group(self._process.pid)
            # All that inherited the key. Without a descriptor or thread, the environment's end does it.
            with contextlib.suppress(OSError, RuntimeError):
                await asyncio.to_thread(end_marked, f"OPENAI_API_KEY={self._variables['OPENAI_API_KEY']}")
        await asyncio.wait({self._following}, timeout=END_S)
        self._following.cancel()

    def _run(self, output: int) -> None:
        try:
            self._process = subprocess.Popen(
                bound_to_us(self._command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._variables,
                start_new_session=True,
            )
            if self._memory_gib:
                limit = int(self._memory_gib * 2**30)
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(self._process.pid, resource.RLIMIT_AS, (limit, limit))
        except (OSError, ValueError) as error:  # ValueError: an argument with a zero byte
            self._tell(self.started.set_exception, self._unstarted(error))
            return
        finally:
            os.close(output)
        self._tell(self.started.set_result, None)
        self._tell(self.status.set_result, self._process.wait())

    def _unstarted(self, error: Exception) -> EnvironmentFault:
        text = f"environment.command {self._command[0]}: the process cannot be started ({error})"
        return EnvironmentFault(text, reason="start")

    def _tell(self, settle: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(settle, value)

    async def _follow(self, output: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb")
        )
        with contextlib.closing(transport):
            await self.printed.follow(reader)


def _outcome(episode: OpenEpisode, status: int, printed: Printed, result: Path) -> Outcome:
    """The end of an episode whose program ended with `status`. Raises EnvironmentFault."""
    if episode.fault:
        raise EnvironmentFault(f"{episode.fault}{printed.note}", reason="returned")
    if episode.mistake and (status or not episode.calls or not result.exists()):
        raise EnvironmentFault(f"{episode.mistake}{printed.note}", reason="returned")
    if episode.overlong and not episode.calls:
        raise EnvironmentFault(f"{episode.overlong}{printed.note}", reason="long")
    cut = episode.spent or ("length" if episode.is_cut or (episode.overflowed and status) else "")
    if not episode.calls and not cut:
        raise EnvironmentFault(
            f"the command ended ({ending(status)}) without a call of the model: nothing was sampled; it must "
            f"call OPENAI_BASE_URL or ANTHROPIC_BASE_URL with the key that it gets{printed.note}",
            reason="silent",
        )
    # Nothing that an agent does after a spent budget ends like this, and its result may be missing.
    was_killed = status == -signal.SIGKILL
    if was_killed or (status and not cut):
        text = f"the command ended ({ending(status)}) after {episode.calls} calls of the model"
        raise EnvironmentFault(f"{text}{printed.note}", reason="died")
    reward, parts = _read_result(result)
    metrics = {
        "model_calls": float(episode.calls),
        "overridden_calls": float(episode.overridden),
        "retried_calls": float(episode.retries),
        "refused_calls": float(episode.refused),
    }
    return Outcome(finish_reason=cut or "stop", reward=reward, parts=parts, metrics=metrics)


def _read_result(path: Path) -> tuple[float | None, dict[str, float]]:
    """The reward and its parts that the program wrote; None if it wrote none. Raises EnvironmentFault."""
    try:
        # An open of a named pipe would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            value = json.loads(file.read(MAX_RESULT_BYTES))
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, RecursionError) as error:
        allowed = "allowed is JSON: a finite number, or an object of finite numbers, whose sum is the reward"
        text = f"the file of ASYNCRL_RESULT cannot be used ({error}); {allowed}"
        raise EnvironmentFault(text, reason="returned") from error
    return read_result("ASYNCRL_RESULT", value)
