"""The environment of kind `command`: a program of any language that calls the model over the endpoint."""

import asyncio
import contextlib
import json
import math
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.endpoint.agent_server import Endpoint
from asyncrl.endpoint.open_episodes import OpenEpisode
from asyncrl.environments.base import Opening, Outcome, Talk
from asyncrl.errors import EnvironmentFault, as_unicode
from asyncrl.hosting.processes import bound_to_us, end_marked, public_environment
from asyncrl.hosting.workers import Printed, Scratch, ending

END_S = 5.0  # limit for killed processes to end
MAX_RESULT_BYTES = 2**20


class AgentEnvironment:
    """Plays each episode with a process of its own, which ends the episode by exiting."""

    def __init__(self, config: EnvironmentConfig, variables: Sequence[str] = ()) -> None:
        """`variables` are patterns of environment variables, `run.environment`, that agents get."""
        self.endpoint = Endpoint(config.address, frozen=config.frozen, is_free=config.constraints == "ignore")
        self.description: Mapping[str, Any] = {"tools": ()}  # an agent brings its own
        self._config = config
        self._variables = variables
        # A killed generator cannot end agents itself.
        self._scratch: Scratch | None = None

    async def start(self) -> None:
        """Begin to serve the model. Raises EnvironmentFault if there is no such program or address."""
        if shutil.which(self._config.program) is None:
            found = f"environment.command: there is no program {self._config.program}"
            raise EnvironmentFault(f"{found}; give a path, or a name on PATH", reason="start")
        try:
            await self.endpoint.start()
        except OSError as error:
            found = f"environment.address: this host cannot listen on {self._config.address} ({error})"
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
        # Not in a thread: a cancelled wait for it would leave the directory.
        directory = Path(tempfile.mkdtemp(dir=self._scratch.directory))
        open_episode = self.endpoint.open(talk)
        program = None
        try:
            # A row that names its seed is a task made from it.
            given = {"seed": seed, "episode": episode} | dict(row) | {"prompt": prompt}
            program = await self._spawn(open_episode, given, directory)
            status = await program.process.wait()
            await program.end()
            return _outcome(open_episode, status, program.printed, directory / "result.json")
        finally:
            self.endpoint.shut(open_episode)
            if program is not None:
                await asyncio.shield(program.end())
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def close(self) -> None:
        """Stop serving, and kill what is left of the agents."""
        await self.endpoint.close()
        if self._scratch is not None:
            await self._scratch.end()

    async def _spawn(self, episode: OpenEpisode, given: Mapping[str, Any], directory: Path) -> "_Program":
        """Start the program in a process group of its own. Raises EnvironmentFault."""
        name, arguments = self._config.program, self._config.command[1:]
        # Not asyncio's pipe: then the end of the program would wait for all that hold the pipe.
        output, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_us([shutil.which(name) or name, *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env=self._environment(episode.key, given, directory),
                start_new_session=True,
            )
        except BaseException as error:
            os.close(output)
            if not isinstance(error, OSError):
                raise
            text = f"environment.command {name}: the process cannot be started ({error})"
            raise EnvironmentFault(text, reason="start") from error
        finally:
            os.close(theirs)
        if self._config.memory_gib:
            limit = int(self._config.memory_gib * 2**30)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
        return _Program(process, output, episode.key)

    def _environment(self, key: str, given: Mapping[str, Any], directory: Path) -> dict[str, str]:
        """Our variables without secrets, and what the program needs to call the model."""
        assert self._scratch is not None
        url = self.endpoint.url
        ours = public_environment(self._variables) | self._scratch.variables
        # A proxy for the internet does not reach this address.
        direct = ",".join(filter(None, [ours.get("NO_PROXY") or ours.get("no_proxy"), self._config.address]))
        # OpenAI's Agents SDK would send the conversations to OpenAI, and wait for that at its end.
        quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
        needed = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "ASYNCRL_ROW": json.dumps(given, default=str),
            "ASYNCRL_SEED": str(given["seed"]),
            "ASYNCRL_RESULT": str(directory / "result.json"),
            "TMPDIR": str(directory),
            "NO_PROXY": direct,
            "no_proxy": direct,
            "PYTHONUNBUFFERED": "1",
        }
        return quiet | ours | needed


class _Program:
    """A running program, and the end of what it prints."""

    def __init__(self, process: asyncio.subprocess.Process, output: int, key: str) -> None:
        self.process = process
        self.printed = Printed()
        self._key = key
        self._following = asyncio.create_task(self._follow(output))

    async def end(self) -> None:
        """Kill what is left of it, and read what it has printed."""
        await asyncio.to_thread(end_family, self.process.pid, self._key)
        await asyncio.wait({self._following}, timeout=END_S)
        self._following.cancel()

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
        given = value if isinstance(value, dict) else {"reward": value}
        parts = {as_unicode(str(name)): _number(one) for name, one in given.items()}
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentFault(
            f"the file of ASYNCRL_RESULT cannot be used ({error}); allowed is JSON: a finite number, or an "
            "object of finite numbers, whose sum is the reward",
            reason="returned",
        ) from error
    return (sum(parts.values()) if parts else None), (parts if isinstance(value, dict) else {})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"found {value!r:.40}")
    return float(value)


def end_family(pid: int, key: str) -> None:
    """Kill a process group, and all processes that inherited the key, wherever they have moved."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    end_marked(f"OPENAI_API_KEY={key}")
