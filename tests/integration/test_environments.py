"""Environments in real processes: what is played, and what each failure of user code becomes."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from asyncrl.environments import fork_server as fork_servers
from asyncrl.errors import EnvironmentFault
from asyncrl.launch.players import Players
from asyncrl.types import Prompt
from tests.support.environments import environment, fork_server, play
from tests.support.talks import ScriptedTalk
from tests.support.task_config import config_of
from tests.support.waiting import HANG, has_ended, turns, until, wait_until, wait_until_ended

pytestmark = pytest.mark.integration

GUESS = '''
import os, random, tempfile

class Guess:
    """Guess a number below 32."""
    def reset(self, low=0):
        self.number = random.randrange(low, 32)
        open(os.path.join(tempfile.gettempdir(), "notes"), "w").write("private")
        assert os.listdir(tempfile.gettempdir()) == ["notes"]
        return ":"
    def step(self, response):
        guess = int(response)
        return "<>"[self.number > guess], float(guess == self.number), guess == self.number
'''
SUM = """
async def rollout(session):
    return float((await session.complete("1+1?")).text == "2")
"""
ODD = '''
import asyncio, ctypes, os, signal, socket, subprocess, sys, time

class Full(Exception):
    fault = True

class Odd:
    """Does what column `how` says: at once, or in its first step."""
    def reset(self, how, note=None, when="step"):
        self.how, self.note = how, note
        return "ready" if when == "step" else self.do()
    def step(self, response):
        return "done", self.do(), True
    def do(self):
        how = self.how
        if how == "raise": raise KeyError("lost")
        if how == "nan": return float("nan")
        if how == "text": return "much"
        if how == "bool": return True
        if how == "object": return object()
        if how == "huge": return "x" * (1 << 25)
        if how == "sleep":
            if self.note: open(self.note, "w").close()
            HANG
        if how == "busy":
            while True: pass
        if how == "_exit": os._exit(3)
        if how == "exit": sys.exit(4)
        if how == "interrupt": raise KeyboardInterrupt
        if how == "segfault": ctypes.string_at(0)
        if how == "memory": return len(bytearray(1 << 40))
        if how == "child":
            with open(self.note, "w") as file: file.write(str(subprocess.Popen(["sleep", "60"]).pid))
            HANG
        if how == "escape":
            escaped = subprocess.Popen(["sleep", "60"], start_new_session=True)
            with open(self.note, "w") as file: file.write(str(escaped.pid))
            HANG
        if how == "fork":
            if os.fork() == 0: return 100.0
            os.wait()
            return 1.0
        if how in ("garbage", "empty"):
            said = {"garbage": b"\\x00\\x00\\x00\\xffgarbage" * 100, "empty": b"\\x02\\x00\\x00\\x00{}"}[how]
            for number in range(3, 64):
                try: os.write(number, said)
                except OSError: pass
        if how == "flood":
            for _ in range(3000): print("x" * 1000)
        if how == "stdin": assert sys.stdin.read() == "", "user code sees a pipe"
        if how == "last words":
            print("the last words", flush=True)
            os._exit(5)
        if how == "secret": return float(sum(name.endswith("TOKEN") for name in os.environ))
        return 1.0

class Later:
    async def reset(self):
        await asyncio.to_thread(os.getpid)
        return ":"
    async def step(self, response):
        await asyncio.to_thread(os.getpid)
        return "", 0.25, False
    async def get_reward(self):
        return self.at_the_end
    at_the_end = 0.5
    def close(self):
        print("closed", flush=True)

class Silent(Later):
    at_the_end = None

class Nosy:
    def reset(self, question, **columns):
        return question + str(sorted(columns))
    def step(self, response):
        return "", 0, True
'''.replace("HANG", HANG)
THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.fixture(autouse=True)
def _scratch(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    yield
    assert list((tmp_path / "scratch").iterdir()) == [], "files of an environment are left"


def bisect(low, high=31):
    """Play `Guess`: the middle of what is left, by all observations."""
    bounds, state = [low, high], {}

    def answer(shown):
        if shown in "<>":
            bounds[shown == "<"] = state["guess"] + (1 if shown == ">" else -1)
        state["guess"] = sum(bounds) // 2
        return str(state["guess"])

    return ScriptedTalk(answer)


def run_odd(tmp_path, how, *, settings=None, **row):
    """One episode of `Odd`: its outcome or fault; and then another one, which must be good."""

    async def scenario():
        async with environment(
            tmp_path,
            ODD,
            "Odd",
            **{"step_s": 1.0 if how in ("sleep", "busy", "child") else 20.0, **(settings or {})},
        ) as played:
            try:
                result = await play(played, ScriptedTalk(["go"] * 9), {"how": how, **row})
            except EnvironmentFault as fault:
                result = fault
            after = await play(played, ScriptedTalk(["go"]), {"how": "nothing"})
            assert (after.reward, after.finish_reason) == (1.0, "stop")
            return result

    return asyncio.run(scenario())


def test_episodes_are_played_in_processes_of_their_own(tmp_path):
    async def scenario():
        async with environment(tmp_path, GUESS, "Guess") as played:
            talks = [bisect(0) for _ in range(20)]
            outcomes = await asyncio.gather(
                *(play(played, talk, seed=n // 2) for n, talk in enumerate(talks))
            )
            low = await play(played, bisect(31), {"low": 31, "answer": 31})
            return outcomes, talks, low

    outcomes, talks, low = asyncio.run(scenario())
    assert all((one.finish_reason, one.reward) == ("stop", 1.0) for one in outcomes)
    assert all(one.metrics["turns"] == len(talk.shown) for one, talk in zip(outcomes, talks, strict=True))
    assert low.metrics["turns"] == 1, "a column that `reset` names reaches it"
    starts = [tuple(talk.shown) for talk in talks]
    assert starts[::2] == starts[1::2], "one seed, one game"
    assert len(set(starts)) > 4, "other seeds, other games"


def test_hundreds_of_episodes_may_start_together(tmp_path):
    """More orders than the socket of the fork server holds."""

    async def scenario():
        async with environment(tmp_path, ODD, "Odd") as played:
            row = {"how": "nothing"}
            ends = await asyncio.gather(*(play(played, ScriptedTalk(["go"]), row) for _ in range(300)))
            assert [end.reward for end in ends] == [1.0] * 300

    asyncio.run(scenario())


@pytest.mark.parametrize(("name", "at_the_end"), [("Later", 0.5), ("Silent", 0.0)])
def test_an_episode_without_turns_left_is_cut_off_with_the_rewards_of_its_steps(tmp_path, name, at_the_end):
    async def scenario():
        async with environment(tmp_path, ODD, name) as played:
            talk = ScriptedTalk(["go"] * 9, max_turns=3)
            return await play(played, talk), talk.rewards

    outcome, rewards = asyncio.run(scenario())
    assert (outcome.finish_reason, outcome.reward) == ("turns", 3 * 0.25 + at_the_end)
    first, second, third = (state for _, state in rewards)
    assert [reward for reward, _ in rewards] == [0.25] * 3 and first != second == third


def test_only_columns_that_are_named_reach_user_code(tmp_path):
    async def scenario():
        row = {"question": "2+2=", "answer": "4"}
        shown = {}
        async with environment(tmp_path, ODD, "Nosy") as played:
            talk = ScriptedTalk(["4"])
            await play(played, talk, row)
            shown["all"] = talk.shown
        async with environment(
            tmp_path, ODD.replace(", **columns", "").replace("columns", "locals()"), "Nosy"
        ) as played:
            talk = ScriptedTalk(["4"])
            await play(played, talk, row)
            shown["named"] = talk.shown
            with pytest.raises(EnvironmentFault, match=r"wants column\(s\) \['question'\]") as caught:
                await play(played, ScriptedTalk([]), {"answer": "4"})
            assert caught.value.reason == "start"
        return shown

    shown = asyncio.run(scenario())
    assert shown == {
        "all": ["2+2=['answer', 'episode', 'prompt', 'seed']"],
        "named": ["2+2=['question', 'self']"],
    }


@pytest.mark.parametrize(
    ("how", "reason", "says"),
    [
        ("raise", "raised", r"`step` raised KeyError: 'lost' \(.*mine.py:\d+\)"),
        ("exit", "raised", "SystemExit: 4"),
        ("interrupt", "raised", "KeyboardInterrupt"),
        ("nan", "returned", "nan; it must be finite"),
        ("text", "returned", "str `much`; allowed is a reward that is one finite number"),
        ("bool", "returned", "bool `True`; allowed"),
        ("object", "raised", "returned a value of type object"),
        ("huge", "returned", "allowed is a reward that is one finite number"),
        ("_exit", "died", r"`step`: the process died \(exit status 3\)"),
        ("segfault", "died", "killed by SIGSEGV"),
        ("last words", "died", "exit status 5.*it last printed: the last words"),
        ("sleep", "hung", r"`step`: took longer than 1 s and was killed"),
        ("busy", "hung", "took longer than 1 s"),
        ("garbage", "returned", "sent bytes that are no message"),
        ("empty", "returned", "sent bytes that are no message"),
    ],
)
def test_a_failure_in_a_step_is_a_fault_with_its_reason_and_never_a_score(tmp_path, how, reason, says):
    fault = run_odd(tmp_path, how)
    assert isinstance(fault, EnvironmentFault) and fault.reason == reason, fault
    with pytest.raises(EnvironmentFault, match=f"(?s){says}"):
        raise fault


def test_what_an_episode_started_ends_with_it_wherever_it_hides(tmp_path):
    """Without our variables, in a session of its own, and with another parent than its worker."""
    code = """
import os, subprocess, sys

class Hides:
    def reset(self, note):
        subprocess.Popen([sys.executable, "-c", HIDDEN, note], env={}, stdout=subprocess.PIPE).stdout.read(1)
        return "ab"
    def step(self, response):
        return "cd", 1.0, True

HIDDEN = '''
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1], "w") as note:
            note.write(str(os.getpid()))
        os.write(1, b"x")
        os.execv("/bin/sleep", ["sleep", "600"])
os._exit(0)
'''
"""

    async def scenario():
        async with environment(tmp_path, code, "Hides") as played:
            for number in range(3):
                note = tmp_path / f"note{number}"
                await play(played, ScriptedTalk(["go"]), {"note": str(note)}, prompt="a")
                await until(lambda note=note: not psutil.pid_exists(int(note.read_text())))

    asyncio.run(scenario())


def test_an_observation_that_no_message_can_hold_is_cut_and_no_fault(tmp_path):
    code = """
class Long:
    def reset(self, how):
        return [{"role": "user", "content": "é" * 20_000_000}] if how == "messages" else "é" * 20_000_000
    def step(self, response):
        return "x" * 64_000_000, 1.0, response == "end"
"""

    async def scenario():
        async with environment(tmp_path, code, "Long", max_observation_characters=100) as played:
            for how in ("messages", "text"):
                talk = ScriptedTalk(["go", "end"])
                outcome = await play(played, talk, {"how": how}, prompt=[])
                first, second = talk.shown[0][-1]["content"], talk.shown[1][-1]["content"]
                assert len(first) == len(second) == 100 and outcome.reward == 2.0
                assert first.endswith("é\n[cut: at 100 of 20,000,000 characters]")
                assert second.endswith("x\n[cut: at 100 of 64,000,000 characters]")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("how", "reason"), [("raise", "raised"), ("sleep", "hung"), ("_exit", "died"), ("bool", "returned")]
)
def test_a_failure_in_reset_is_a_fault(tmp_path, how, reason):
    fault = run_odd(tmp_path, how, when="reset")
    assert isinstance(fault, EnvironmentFault) and fault.reason == reason and "`reset`" in str(fault)


def test_a_limit_of_memory_turns_a_runaway_into_a_fault(tmp_path):
    fault = run_odd(tmp_path, "memory", settings={"memory_gib": 1.0})
    assert isinstance(fault, EnvironmentFault) and "MemoryError" in str(fault)


@pytest.mark.parametrize(("how", "reward"), [("flood", 1.0), ("stdin", 1.0), ("fork", 1.0), ("secret", 0.0)])
def test_user_code_may_print_read_and_fork_and_sees_no_secret(tmp_path, how, reward, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    outcome = run_odd(tmp_path, how)
    assert outcome.reward == reward


def test_what_an_episode_started_is_killed_with_it(tmp_path):
    note = tmp_path / "pid"
    fault = run_odd(tmp_path, "child", note=str(note))
    assert fault.reason == "hung"
    assert (
        not psutil.pid_exists(int(note.read_text()))
        or psutil.Process(int(note.read_text())).status() == "zombie"
    )


def workers_of(played):
    """(fork server, its workers) of an environment that runs."""
    server = fork_server()
    return server, server.children()


@pytest.mark.parametrize(
    ("victim", "number", "reason", "says"),
    [
        ("worker", signal.SIGKILL, "died", "killed by SIGKILL"),
        ("worker", signal.SIGSTOP, "hung", "took longer than 3 s"),
        ("server", signal.SIGKILL, "died", "the fork server of the environment died"),
    ],
)
@pytest.mark.parametrize("when", ["in a step", "between two steps"])
def test_a_process_that_is_killed_or_stopped_fails_the_episode_by_name(
    tmp_path, victim, number, reason, says, when
):
    async def scenario():
        note = tmp_path / "begun"
        async with environment(tmp_path, ODD, "Odd", step_s=3.0) as played:

            def strike():
                server, [worker] = workers_of(played)
                struck = worker if victim == "worker" else server
                os.kill(struck.pid, number)
                wait_until(lambda: has_ended(struck) or struck.status() == psutil.STATUS_STOPPED)

            async def strike_soon():
                await until(note.exists)
                strike()

            def answer(shown):
                if when == "between two steps":
                    strike()
                return "go"

            striking = asyncio.create_task(strike_soon()) if when == "in a step" else None
            with pytest.raises(EnvironmentFault, match=f"(?s){says}") as caught:
                await play(
                    played,
                    ScriptedTalk(answer),
                    {"how": "sleep" if striking else "nothing", "note": str(note)},
                )
            assert caught.value.reason == reason
            after = await play(played, ScriptedTalk(["go"]), {"how": "nothing"})
            assert after.reward == 1.0

    asyncio.run(scenario())


def test_a_fork_server_that_is_stopped_is_killed_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_servers, "FORK_S", 0.5)

    async def scenario():
        async with environment(tmp_path, GUESS, "Guess") as played:
            workers_of(played)[0].suspend()
            with pytest.raises(EnvironmentFault, match="does not fork") as caught:
                await play(played, bisect(0))
            monkeypatch.undo()
            assert caught.value.reason == "hung"
            monkeypatch.undo()
            assert (await play(played, bisect(0))).reward == 1.0

    asyncio.run(scenario())


def test_an_end_that_arrives_after_all_waits_for_it_leaves_the_fork_server_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_servers, "END_S", 0.1)

    async def scenario():
        async with environment(tmp_path, GUESS, "Guess") as played:
            server = fork_server()

            def answer(shown):
                server.suspend()  # the worker plays on, and nobody reports its end
                return "31"

            await play(played, ScriptedTalk(answer), {"low": 31})
            assert len(server.children()) == 1
            [program] = played._server._programs
            await until(lambda: len(program.tasks) == 1)  # that which reads what the fork server prints
            assert program._workers
            server.resume()
            await until(lambda: not program._workers)
            assert (await play(played, bisect(0))).reward == 1.0
            assert fork_server() == server

    asyncio.run(scenario())


@contextlib.contextmanager
def descriptors(process, left):
    """Let a process have so many more open files than it has."""
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    free = [number for number in range(limits[0]) if not os.path.lexists(f"/proc/{process.pid}/fd/{number}")]
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free[left], limits[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("name", ["Guess", "rollout"])
@pytest.mark.parametrize(
    ("victim", "left", "says"),
    [
        ("server", 0, r"cannot fork: \[Errno 24\] Too many open files; let the user's file close what"),
        ("server", 1, r"OSError: \[Errno 24\] Too many open files"),
        ("generator", 0, r"cannot start: Too many open files; allow more open files: ulimit -n 65536"),
        ("generator", 1, r"cannot start: Too many open files; allow more open files: ulimit -n 65536"),
    ],
)
def test_without_descriptors_an_attempt_fails_and_the_processes_live(tmp_path, name, victim, left, says):
    async def scenario():
        async with environment(tmp_path, GUESS + SUM, name) as played:
            talk = {"Guess": lambda: bisect(0), "rollout": lambda: ScriptedTalk(["2"])}[name]
            server = fork_server()
            with (
                descriptors(server if victim == "server" else psutil.Process(), left),
                pytest.raises(EnvironmentFault, match=f"(?s){says}") as caught,
            ):
                await play(played, talk())
            is_raised = (name, victim, left) == ("Guess", "server", 1)
            assert caught.value.reason == ("raised" if is_raised else "died")
            assert (await play(played, talk())).reward == 1.0
            assert fork_server() == server

    asyncio.run(scenario())


def test_an_episode_that_is_cancelled_leaves_no_process(tmp_path):
    async def scenario():
        async with environment(tmp_path, ODD, "Odd", step_s=60) as played:
            note = tmp_path / "pid"
            for count in (0, 1, 10, 100, 1000, None):
                note.unlink(missing_ok=True)
                playing = asyncio.create_task(
                    play(played, ScriptedTalk(["go"]), {"how": "child", "note": str(note)})
                )
                await (until(note.exists) if count is None else turns(count))
                playing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await playing
            await until(lambda: workers_of(played)[1] == [])

    asyncio.run(scenario())


HASHES = """
class Hashes:
    def reset(self):
        return " ".join({"red", "green", "blue", "black", "white", "grey"})
    def step(self, response):
        return "", 0.0, True
"""


@pytest.mark.parametrize("threads", [False, True])
def test_one_seed_gives_one_beginning_in_every_process(tmp_path, threads):
    """Hashes decide the order of a set. Two generators have two fork servers; without forks, an episode has
    an interpreter of its own."""
    code = HASHES + (THREADS if threads else "")

    async def scenario():
        said = []
        for _ in range(2):
            async with environment(tmp_path, code, "Hashes") as played:
                talks = [ScriptedTalk([""]) for _ in range(2)]
                for episode, talk in enumerate(talks):
                    await play(played, talk, seed=7, episode=episode)
                said += [talk.shown[0] for talk in talks]
        return said

    said = asyncio.run(scenario())
    assert len(said) == 4 and len(set(map(str, said))) == 1


def test_an_import_that_starts_threads_gives_every_episode_an_interpreter(tmp_path, caplog):
    async def scenario():
        async with environment(tmp_path, GUESS + THREADS, "Guess") as played:
            outcomes = await asyncio.gather(*(play(played, bisect(0), seed=7) for _ in range(2)))
            assert [one.reward for one in outcomes] == [1.0, 1.0]
        async with environment(tmp_path, ODD + THREADS, "Odd", step_s=1.0) as played:
            for how, reason in (("_exit", "died"), ("sleep", "hung")):
                with pytest.raises(EnvironmentFault) as caught:
                    await play(played, ScriptedTalk(["go"]), {"how": how})
                assert caught.value.reason == reason

    asyncio.run(scenario())
    assert "started 1 threads" in caplog.text and "new interpreter" in caplog.text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("class Guess: pass", "class `Guess` has no method `reset`"),
        ("raise RuntimeError('no license')", "RuntimeError: no license"),
        ("import nonexistent_library", "No module named 'nonexistent_library'"),
        ("raise SystemExit(3)", "SystemExit"),
        ("import os; os._exit(3)", "died"),
        ("def Other(): pass", "has no function `Guess`"),
    ],
)
def test_a_file_that_cannot_be_used_fails_the_start(tmp_path, code, says):
    async def scenario():
        async with environment(tmp_path, code, "Guess"):
            raise AssertionError("it started")

    with pytest.raises(EnvironmentFault, match=says):
        asyncio.run(scenario())


def test_a_python_that_does_not_exist_is_refused_at_the_start(tmp_path):
    async def scenario():
        async with environment(tmp_path, GUESS, "Guess", python=tmp_path / "bin/python"):
            raise AssertionError("it started")

    with pytest.raises(EnvironmentFault, match=r"environment.python: there is no program .*bin/python; give"):
        asyncio.run(scenario())


ROLLOUT = "async def rollout(session):\n    await session.complete('a')\n    session.score_turn(1.0, 7)\n"
SHELF = """
class Shelf:
    def reset(self): return "a"
    def put(self, name: str) -> str:
        '''Put a book on the shelf.

        Args:
            name: The book's name.
        '''
        return name
"""


@pytest.mark.parametrize("name", ["Guess", "rollout", "Shelf"])
def test_gigpo_is_refused_for_tools_which_name_no_states(tmp_path, name):
    """Refused at the start of a generator, and not by a batch in the middle of a run."""
    (tmp_path / "mine.py").write_text(GUESS + ROLLOUT + SHELF)
    config = config_of(
        algorithm={"advantage": "gigpo"},
        environment={"uses": f"{tmp_path}/mine.py:{name}"},
        reward={"functions": []},
    )
    prompt = Prompt(token_ids=(1,), text="", row={})

    async def scenario():
        players = Players.of(config, tmp_path)
        try:
            await players.start(SimpleNamespace(of_task=lambda task, count: [prompt][:count]))
        finally:
            await players.close()

    refused = pytest.raises(EnvironmentFault, match=r"mine.py:Shelf has tools, which name no states; write a")
    with refused if name == "Shelf" else contextlib.nullcontext():
        asyncio.run(scenario())


@pytest.mark.parametrize("how", ["child", "escape"])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_generator_that_is_killed_leaves_no_process_and_no_file(tmp_path, how, is_stopped):
    """What the episodes started is killed, also what left its session; a stopped fork server is killed, too."""
    (tmp_path / "mine.py").write_text(ODD)
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.environments import Environments
from tests.support.talks import ScriptedTalk
async def main():
    played = Environments(EnvironmentConfig(uses={str(tmp_path / "mine.py") + ":Odd"!r}, step_s=60))
    await played.start()
    row = {{"how": {how!r}, "note": {str(tmp_path / "pid")!r}}}
    await played.play(ScriptedTalk(["go"]), row, prompt="", seed=0, episode=0)
asyncio.run(main())
"""
    scratch = tmp_path / "scratch"
    generator = psutil.Popen([sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(scratch)})
    note = tmp_path / "pid"
    wait_until(lambda: has_ended(generator) or (note.exists() and note.read_text()))
    family = generator.children(recursive=True)
    assert len(family) == 4, "fork server, worker, child, and the process that ends them"
    if is_stopped:
        for process in generator.children():
            if "asyncrl.environments" in str(process.cmdline()):
                process.suspend()
    generator.kill()
    generator.wait(120)
    wait_until_ended(family)
    assert list(scratch.iterdir()) == []


def test_another_python_needs_neither_asyncrl_nor_its_libraries(tmp_path):
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("this host has no other Python")

    async def scenario():
        code = GUESS + "\nimport importlib.util, sys\nassert not importlib.util.find_spec('pydantic')\n"
        async with environment(tmp_path, code, "Guess", python=python) as played:
            assert (await play(played, bisect(0))).reward == 1.0

    asyncio.run(scenario())
