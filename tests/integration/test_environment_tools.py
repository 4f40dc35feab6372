"""Tools and rollouts in real processes: what the model is shown, and what each failure becomes."""

import asyncio
import json
import os
import shutil
import signal
from dataclasses import fields
from itertools import pairwise

import pytest

from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.episodes import EpisodeFailed, EpisodeSampler
from asyncrl.engine.fake import FakeEngine
from asyncrl.environments.base import Answer, BudgetSpent, ToolCall
from asyncrl.environments.environments import REPLACE_S
from asyncrl.environments.fork_server import ForkServer
from asyncrl.environments.returned import state_of
from asyncrl.errors import EngineError, EnvironmentFault
from asyncrl.types import Prompt
from tests.support.environments import calls, environment, fork_server, play
from tests.support.letters import Letters, read
from tests.support.talks import ScriptedTalk
from tests.support.waiting import HANG, elapse, turns, until

pytestmark = pytest.mark.integration

ASK = [{"role": "user", "content": "2+3?"}]

TOOLS = '''
import errno, os, threading
from asyncrl.errors import EnvironmentFault

class Broken(Exception):
    fault = True

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def table(n: int) -> dict:
    """Count.

    Args:
        n: How far.
    """
    return {"list": list(range(n)), "é": None}

def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    open(__file__ + ".begun", "w").close()
    threading.Event().wait(seconds)
    return f"{os.getpid()}"

def fail(how: str) -> str:
    """Fail.

    Args:
        how: How.
    """
    if how == "ValueError": raise ValueError("no such number")
    if how == "FileNotFoundError": open("/nowhere/at/all")
    if how == "RecursionError": return fail(how)
    if how == "ConnectionError": raise ConnectionRefusedError("database")
    if how == "a library's":
        try: raise ConnectionRefusedError("database")
        except ConnectionRefusedError: raise RuntimeError("no answer")
    if how == "TimeoutError": raise TimeoutError("database")
    if how == "MemoryError": bytearray(1 << 50)
    if how == "ImportError": import nonexistent_library
    if how == "SystemExit": raise SystemExit(1)
    if how == "ENOSPC": raise OSError(errno.ENOSPC, "disk full")
    if how == "EMFILE": raise OSError(errno.EMFILE, "too many files")
    if how == "EIO": raise OSError(errno.EIO, "disk broken")
    if how == "fault": raise Broken("the sandbox is gone")
    if how == "sandbox": raise EnvironmentFault("no sandbox for programs")
    if how == "die": os._exit(9)
    return "fine"
'''
SHELF = '''
import os, time

class Shelf:
    """Tools with a state."""

    def reset(self, title):
        self.title, self.books = title, []
        return None

    def put(self, name: str) -> str:
        """Put a book on the shelf.

        Args:
            name: Its name.
        """
        if name == "late": HANG
        if name == "die": os._exit(3)
        if name == "wrong": raise ValueError("no such book")
        self.books.append(name)
        return f"{self.title}: {self.books}"

    def is_done(self):
        return len(self.books) >= 3

    def get_reward(self):
        return len(self.books) / 3
'''.replace("HANG", HANG)
# A class as TRL's `environment_factory` takes it: it is made without arguments, and `reset` gets the row.
FACTORY = '''
class Counter:
    def __init__(self):
        self.count = 0

    def reset(self, **kwargs) -> str | None:
        self.goal = kwargs["goal"]
        return f"Reach {self.goal} from {self.count}: {kwargs['prompt'][0]['content']}"

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: The amount to add to it.

        Returns:
            The counter's new value.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return 1.0 if self.count == self.goal else 0.0
'''
ROLLOUTS = '''
import asyncio, os, time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

states = {"zero": 0, "said": "Too low.", "listed": [8, 31]}

async def rollout(session, prompt, how="sum", **columns):
    if how == "silent": return 1.0
    messages = list(prompt)
    if how == "schema": await session.chat(messages, tools=[{"name": "add"}])
    if how == "text": await session.chat("hello")
    if how == "list": await session.complete(messages)
    if how == "judge": await session.chat(messages, train=False)
    while True:
        answer = await session.chat(messages, tools=[add])
        messages.append(answer.message)
        for call in answer.tool_calls:
            value = str(add(**call.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": value})
        if not answer.tool_calls: break
    session.score_turn(0.25, state=states.get(how, 7))
    session.metrics["messages"] = "many" if how == "words" else len(messages)
    if how == "blank": session.metrics["seen by"] = 1
    if how == "raise": raise KeyError("lost")
    if how == "sleep": await asyncio.Event().wait()
    if how == "hang": HANG
    if how == "die": os._exit(3)
    if how == "nan": return float("nan")
    if how == "object": return object()
    if how == "nothing": return None
    if how == "parts": return {"sum": 1.0, "short": 0.5}
    if how == "unknown part": session.metrics["messages"] = None
    if how.startswith("unknown"): return {"sum": None} | ({"short": 0.5} if how == "unknown part" else {})
    if how == "branches":
        both = await asyncio.gather(*(session.chat([{"role": "user", "content": x}]) for x in "ab"))
        return sum(float(one.text) for one in both)
    return float(answer.text == "5")

async def counting(session, how="number"):
    """Goes on until the budget is spent."""
    session.metrics["seen"] = {1} if how == "set" else 1
    while True:
        await session.complete("on")

async def together(session):
    """Asks twice at the same time, for states without rewards."""
    async def ask(text):
        await session.complete(text)
        session.score_turn(None, 7)
        session.metrics["asked"] = session.metrics.get("asked", 0) + 1
    async with asyncio.TaskGroup() as group:
        for text in "ab": group.create_task(ask(text))

async def scoring(session):
    """Scores what it has when its time is up."""
    try:
        while True: await session.complete("on")
    except Exception:
        await asyncio.to_thread(os.getpid)
        return 0.5

async def seen(session):
    """Says what it knows of a turn."""
    answer = await session.complete("on")
    await session.complete(repr(answer))
    return 1

async def stuck(session):
    await session.complete("on")
    await asyncio.Event().wait()

async def places(session, seed):
    await session.complete(f"{seed} {session.seed} {session.episode}")
    return 1
'''.replace("HANG", HANG)


def test_tools_answer_the_calls_of_the_model_in_order_and_an_answer_without_a_call_ends_it(tmp_path):
    async def scenario():
        async with environment(tmp_path, TOOLS, "add table wait", workers=2) as played:
            script = [calls(("add", {"a": 2, "b": 3}), ("table", {"n": 3})), "5"]
            talk = ScriptedTalk(script)
            outcome = await play(played, talk, prompt=ASK)
            late = ScriptedTalk([calls(("wait", {"seconds": 0.5}), ("wait", {"seconds": 0.5})), ""])
            await play(played, late, prompt=ASK)
            return outcome, talk, late.shown[-1]

    outcome, talk, late = asyncio.run(scenario())
    assert (outcome.finish_reason, outcome.reward) == ("stop", None)
    zeros = dict.fromkeys(("tools/invalid", "tools/late", "tools/raised", "observations/cut"), 0.0)
    assert outcome.metrics == {"turns": 2.0, "tools/calls": 2.0, **zeros}, "means over episodes need zeros"
    assert [one["function"]["name"] for one in talk.tools[0]] == ["add", "table", "wait"]
    first, second = talk.shown
    assert first == ASK and second[:2] == [
        *ASK,
        calls(("add", {"a": 2, "b": 3}), ("table", {"n": 3})).message,
    ]
    assert second[2] == {"role": "tool", "tool_call_id": "call-0", "name": "add", "content": "5"}
    assert json.loads(second[3]["content"]) == {"list": [0, 1, 2], "é": None} and "é" in second[3]["content"]
    assert late[-1]["content"] != late[-2]["content"], "two processes"


@pytest.mark.parametrize(
    ("call", "says", "counted"),
    [
        (("add", {"a": "x", "b": 1}), 'error: a must be an integer, got "x"', "tools/invalid"),
        (
            ("sub", {"a": 1}),
            "error: there is no tool sub; the tools are add, wait, fail, table",
            "tools/invalid",
        ),
        (("add", "a=1"), "error: the arguments of add are not a JSON object", "tools/invalid"),
        (("fail", {"how": "ValueError"}), "error: ValueError: no such number", "tools/raised"),
        (("fail", {"how": "FileNotFoundError"}), "error: FileNotFoundError: [Errno 2]", "tools/raised"),
        (("fail", {"how": "RecursionError"}), "error: RecursionError: ", "tools/raised"),
        (("wait", {"seconds": 60}), "error: wait took longer than 3 s and was stopped", "tools/late"),
        (("table", {"n": 99}), '{"list": [0, 1, 2,\n[cut: 389 of 407 characters]', "observations/cut"),
    ],
)
def test_a_mistake_of_the_model_is_an_observation_and_counted(tmp_path, call, says, counted):
    async def scenario():
        settings = {"step_s": 3.0, "max_observation_characters": 18 if call[0] == "table" else 200}
        async with environment(tmp_path, TOOLS, "add wait fail table", **settings) as played:
            talk = ScriptedTalk([calls(call, ("add", {"a": 2, "b": 3})), "so"])
            return await play(played, talk, prompt=ASK), talk.shown[-1]

    outcome, shown = asyncio.run(scenario())
    assert shown[-2]["content"].startswith(says) and shown[-1]["content"] == "5", "the other call is answered"
    assert outcome.finish_reason == "stop" and outcome.metrics[counted] == 1.0


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        *((how, "raised") for how in ("ConnectionError", "TimeoutError", "ImportError", "SystemExit")),
        ("a library's", "raised"),
        *((how, "raised") for how in ("ENOSPC", "EMFILE", "EIO", "fault", "sandbox")),
        ("die", "died"),
    ],
)  # fmt: skip
def test_a_tool_that_is_broken_is_a_fault_whatever_the_model_wrote(tmp_path, how, reason):
    async def scenario():
        async with environment(tmp_path, TOOLS, "fail add") as played:
            with pytest.raises(EnvironmentFault, match="fail") as caught:
                await play(played, ScriptedTalk([calls(("fail", {"how": how}))]), prompt=ASK)
            assert caught.value.reason == reason
            after = ScriptedTalk([calls(("add", {"a": 2, "b": 3})), ""])
            await play(played, after, prompt=ASK)
            assert after.shown[-1][-1]["content"] == "5"

    asyncio.run(scenario())


KEEPS = '''
import os

KEPT = []

class Store:
    def reset(self):
        return None

    def fill(self, mib: int, where: str) -> str:
        """Fill the memory.

        Args:
            mib: How much.
            where: Where it is kept.
        """
        found = KEPT if where == "module" else []
        for _ in range(16 * mib): found.append(bytearray(1 << 16))
        return f"{len(found)} {os.getpid()}"

fill = Store().fill
'''


@pytest.mark.parametrize("where", ["call", "module"])
@pytest.mark.parametrize("name", ["fill", "Store"])
def test_a_model_that_asks_for_too_much_memory_reads_so(tmp_path, name, where):
    """Also if the memory stays full: another process goes on, without the calls of other episodes failing."""

    async def scenario():
        async with environment(tmp_path, KEEPS, name, memory_gib=0.5) as played:
            small, large = ("fill", {"mib": 1, "where": "call"}), ("fill", {"mib": 900, "where": where})
            asked = [calls(large, *[small] * 5), calls(small), ""]
            talk = ScriptedTalk(asked)
            outcome = await play(played, talk, prompt=ASK)
            return outcome, [one["content"] for one in talk.shown[-1] if one["role"] == "tool"]

    outcome, (first, *others) = asyncio.run(scenario())
    assert first.startswith("error: MemoryError") and outcome.metrics["tools/raised"] >= 1
    if (name, where) != ("Store", "module"):  # its object is that of the episode
        assert len(others) == 6 and all(one.startswith("16 ") for one in others)
        assert outcome.metrics["tools/raised"] == 1


def test_calls_behind_one_that_kills_its_worker_are_made_by_another(tmp_path):
    """Quick calls travel together; only the oldest has begun."""

    async def scenario():
        async with environment(tmp_path, TOOLS, "add fail wait", step_s=1.0) as played:
            quick = [ScriptedTalk([calls(*[("add", {"a": n, "b": 1})] * 20), ""]) for n in range(20)]
            await asyncio.gather(*(play(played, talk, prompt=ASK) for talk in quick))
            bad = [calls(("fail", {"how": "die"})), calls(("wait", {"seconds": 60}))]
            good = [ScriptedTalk([calls(("add", {"a": n, "b": 1})), ""]) for n in range(30)]
            talks = [ScriptedTalk([bad[0]]), *good[:10], ScriptedTalk([bad[1], ""]), *good[10:]]
            ends = await asyncio.gather(
                *(play(played, talk, prompt=ASK) for talk in talks), return_exceptions=True
            )
            return ends, [talk.shown[-1][-1]["content"] for talk in good], talks[11].shown[-1][-1]["content"]

    ends, sums, late = asyncio.run(scenario())
    assert [n for n, end in enumerate(ends) if isinstance(end, BaseException)] == [0]
    assert isinstance(ends[0], EnvironmentFault) and "exit status 9" in str(ends[0])
    assert sums == [str(n + 1) for n in range(30)] and "took longer" in late


def test_a_worker_of_tools_that_is_stopped_or_killed_is_replaced(tmp_path):
    async def scenario():
        async with environment(tmp_path, TOOLS, "add wait", step_s=3.0) as played:
            for number, is_called in (
                (signal.SIGSTOP, True),
                (signal.SIGKILL, True),
                (signal.SIGKILL, False),
            ):
                begun = tmp_path / "mine.py.begun"
                begun.unlink(missing_ok=True)
                server = fork_server()
                [worker] = [one for one in server.children() if one.status() != "zombie"]
                talk = ScriptedTalk([calls(("wait", {"seconds": 60})), ""])
                playing = asyncio.create_task(play(played, talk, prompt=ASK))
                await (until(begun.exists) if is_called else turns(1))
                os.kill(worker.pid, number)
                if number == signal.SIGKILL and is_called:
                    with pytest.raises(
                        EnvironmentFault, match=r"`wait`: the process died \(killed by SIGKILL\)"
                    ):
                        await playing
                else:
                    await asyncio.gather(playing, return_exceptions=True)
                after = ScriptedTalk([calls(("add", {"a": 2, "b": 3})), ""])
                await play(played, after, prompt=ASK)
                assert after.shown[-1][-1]["content"] == "5"

    asyncio.run(scenario())


def test_workers_of_tools_that_die_at_their_start_are_replaced_with_a_pause(tmp_path, monkeypatch):
    """As on a full disk, until there is room."""
    begin, began_s = ForkServer.start_worker, []

    async def begun(self, worker):
        began_s.append(asyncio.get_running_loop().time())
        await begin(self, worker)

    async def added(played):
        talk = ScriptedTalk([calls(("add", {"a": 2, "b": 3})), "enough"])
        await play(played, talk, prompt=ASK)
        return talk.shown[-1][-1]["content"]

    async def scenario():
        async with environment(tmp_path, TOOLS, "add", workers=1) as played:
            assert await added(played) == "5"
            monkeypatch.setattr(ForkServer, "start_worker", begun)
            directory = played._server._scratch.directory
            shutil.rmtree(directory)
            directory.touch()
            [worker] = fork_server().children()
            worker.kill()
            await until(lambda: len(began_s) == 5)
            directory.unlink()
            directory.mkdir()
            await asyncio.gather(added(played), return_exceptions=True)
            assert await added(played) == "5"

    asyncio.run(scenario())
    assert min(later - one for one, later in pairwise(began_s)) > 0.9 * REPLACE_S


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_tools_start_again_if_their_fork_server_is_killed_meanwhile(tmp_path, monkeypatch, deaths):
    begin, asked = ForkServer.start_worker, []

    async def killed(self, worker):
        asked.append(self)
        if len(asked) <= deaths:
            await self._running()
            os.kill(fork_server().pid, signal.SIGKILL)
        await begin(self, worker)

    async def scenario():
        monkeypatch.setattr(ForkServer, "start_worker", killed)
        async with environment(tmp_path, TOOLS, "add") as played:
            talk = ScriptedTalk([calls(("add", {"a": 2, "b": 3})), "enough"])
            await play(played, talk, prompt=ASK)
            return talk.shown[-1][-1]["content"]

    if deaths == 3:
        with pytest.raises(EnvironmentFault, match="fork server of the environment"):
            asyncio.run(scenario())
    else:
        assert asyncio.run(scenario()) == "5" and len(asked) == deaths + 1


@pytest.mark.parametrize("place", ["__init__", "reset", "tool"])
def test_the_attribute_that_ends_an_episode_may_be_set_anywhere(tmp_path, place):
    lines = {one: "self.done = False" if one == place else "pass" for one in ("__init__", "reset")}
    code = f"""
class Twice:
    def __init__(self):
        self.calls = 0
        {lines["__init__"]}

    def reset(self):
        {lines["reset"]}

    def call(self) -> str:
        "Call it."
        self.calls += 1
        if self.calls == 2: self.done = True
        return "called"
"""
    assert ended(tmp_path, code, "Twice").metrics["tools/calls"] == 2
    assert ended(tmp_path, code.replace("self.done", "self.not_it"), "Twice").metrics["tools/calls"] == 5
    with pytest.raises(
        EnvironmentFault, match=r"is_done or done.* returned list .*; allowed is True or False"
    ):
        ended(tmp_path, code.replace("self.done = True", "self.done = [1]"), "Twice")


def ended(tmp_path, code, name):
    """The outcome of an episode with five calls, if nothing ends it before."""

    async def scenario():
        async with environment(tmp_path, code, name) as played:
            return await play(played, ScriptedTalk([calls(("call", {}))] * 5 + ["enough"]), prompt=ASK)

    return asyncio.run(scenario())


def test_an_object_with_tools_keeps_its_state_until_it_says_that_it_is_done(tmp_path):
    async def scenario():
        async with environment(tmp_path, SHELF, "Shelf") as played:
            script = [
                calls(("put", {"name": "a"}), ("put", {"name": "wrong"})),
                calls(("put", {"name": "b"}), ("put", {"name": "c"})),
            ]
            talks = [ScriptedTalk(script), ScriptedTalk([script[0], "enough"])]
            rows = [{"title": "upper"}, {"title": "lower"}]
            ends = await asyncio.gather(
                *(play(played, talk, row, prompt=ASK) for talk, row in zip(talks, rows, strict=True))
            )
            cut = await play(played, ScriptedTalk(script, max_turns=1), rows[0], prompt=ASK)
            return ends, talks, cut

    (done, stopped), talks, cut = asyncio.run(scenario())
    assert (done.finish_reason, done.reward, stopped.reward) == ("stop", 1.0, 1 / 3)
    assert (cut.finish_reason, cut.reward) == ("turns", 1 / 3), "a cut-off episode is scored"
    assert [one["function"]["name"] for one in talks[0].tools[0]] == ["put"]
    assert [one["content"] for one in talks[0].shown[1][-2:]] == [
        "upper: ['a']",
        "error: ValueError: no such book",
    ]
    assert talks[1].shown[1][-2]["content"] == "lower: ['a']", "each episode has its own object"


def test_a_class_of_trls_environment_factory_is_played_as_it_stands(tmp_path):
    async def run():
        steps = [calls(("increment", {"step": 2})), calls(("increment", {"step": 3})), "done"]
        talks = [ScriptedTalk(list(steps)), ScriptedTalk(list(steps))]
        async with environment(tmp_path, FACTORY, "Counter") as played:
            rewards = [
                (await play(played, talk, {"goal": goal}, prompt=ASK)).reward
                for talk, goal in zip(talks, (5, 6), strict=True)
            ]
        return rewards, talks[0]

    rewards, talk = asyncio.run(run())
    assert rewards == [1.0, 0.0], "the second episode begins at 0 again"
    assert talk.shown[0][-1]["content"] == "2+3?\n\nReach 5 from 0: 2+3?"  # as TRL joins them
    assert [shown[-1]["content"] for shown in talk.shown[1:]] == ["2", "5"]
    [tool] = talk.tools[0]
    assert tool["function"]["name"] == "increment"
    assert tool["function"]["parameters"]["properties"]["step"]["type"] == "integer"


def test_a_reward_that_only_the_object_has_is_the_reward(tmp_path):
    """As in the classes of TRL's documentation; an object without one gives none."""
    by_attribute = FACTORY[: FACTORY.index("    def get_reward")]
    by_attribute = by_attribute.replace("self.count = 0", "self.count = 0; self.NAME = 0.0")
    by_attribute = by_attribute.replace(
        "self.count += step", "self.count += step; self.NAME = self.count / 4"
    )

    async def run(name):
        async with environment(tmp_path, by_attribute.replace("NAME", name), "Counter") as played:
            steps = [calls(("increment", {"step": 2})), calls(("increment", {"step": 1})), "done"]
            talks = [ScriptedTalk(steps), ScriptedTalk(["done"])]
            return [(await play(played, talk, {"goal": 5}, prompt=ASK)).reward for talk in talks]

    assert asyncio.run(run("reward")) == [0.75, 0.0]
    assert asyncio.run(run("gain")) == [None, None]


@pytest.mark.parametrize(("name", "reason"), [("late", "hung"), ("die", "died")])
def test_an_object_that_is_lost_is_a_fault(tmp_path, name, reason):
    async def scenario():
        async with environment(tmp_path, SHELF, "Shelf", step_s=3.0) as played:
            with pytest.raises(EnvironmentFault, match="`put`") as caught:
                await play(played, ScriptedTalk([calls(("put", {"name": name}))]), {"title": "t"}, prompt=ASK)
            assert caught.value.reason == reason

    asyncio.run(scenario())


ENDS = '''
class Ends:
    def reset(self, how):
        self.how = how

    def put(self) -> str:
        """Put."""
        return "fine"

    def is_done(self):
        return self._fails("is_done")

    def get_reward(self):
        return self._fails("get_reward") or 1.0

    def close(self):
        self._fails("close")

    def _fails(self, name):
        if self.how == name: raise ValueError(name)
'''


@pytest.mark.parametrize("how", ["is_done", "get_reward", "close", "nothing"])
def test_an_object_that_cannot_end_its_episode_is_a_fault(tmp_path, how):
    async def scenario():
        async with environment(tmp_path, ENDS, "Ends") as played:
            return await play(played, ScriptedTalk([calls(("put", {})), ""]), {"how": how}, prompt=ASK)

    if how == "nothing":
        assert asyncio.run(scenario()).reward == 1.0
        return
    with pytest.raises(EnvironmentFault, match=rf"raised ValueError: {how} \(.*mine.py:\d+\)") as caught:
        asyncio.run(scenario())
    assert caught.value.reason == "raised"


def test_tools_need_a_chat_template(tmp_path):
    async def scenario():
        async with environment(tmp_path, TOOLS, "add") as played:
            with pytest.raises(EnvironmentFault, match=r"model\.chat_template: true"):
                await play(played, ScriptedTalk([""]), prompt="2+3=")

    asyncio.run(scenario())


def sums(*after):
    return ScriptedTalk([calls(("add", {"a": 2, "b": 3})), "5", *after])


def run_rollout(tmp_path, how, talk=None, **settings):
    """One rollout, and another after it, which must be good."""

    async def scenario():
        async with environment(tmp_path, ROLLOUTS, "rollout", **settings) as played:
            try:
                end = await play(played, talk or sums(), {"how": how}, prompt=ASK)
            except EnvironmentFault as fault:
                end = fault
            assert (await play(played, sums(), prompt=ASK)).reward == 1.0
            return end

    return asyncio.run(scenario())


def test_a_rollout_talks_to_the_model_as_it_likes(tmp_path):
    talk = sums()
    end = run_rollout(tmp_path, "sum", talk)
    assert (end.finish_reason, end.reward, end.metrics) == ("stop", 1.0, {"turns": 2.0, "messages": 4.0})
    assert talk.rewards == [(0.25, state_of(None, {"state": 7}))]
    assert [one["function"]["name"] for one in talk.tools[0]] == ["add"], "functions become schemas"
    assert talk.shown[1][-1] == {"role": "tool", "tool_call_id": "call-0", "name": "add", "content": "5"}


@pytest.mark.parametrize(("how", "state"), [("zero", 0), ("said", "Too low."), ("listed", [8, 31])])
def test_a_rollout_names_a_state_as_a_text_environment_does(tmp_path, how, state):
    talk = sums()
    assert run_rollout(tmp_path, how, talk).reward == 1.0
    ((_, named),) = talk.rewards
    assert named == state_of("another observation", {"state": state}) != 0


def test_a_rollout_may_ask_a_judge_that_is_not_trained(tmp_path):
    talk = sums()
    run_rollout(tmp_path, "judge", talk)
    assert talk.trained == [False, True]


@pytest.mark.parametrize(
    ("how", "reward", "parts"),
    [
        ("nothing", None, {}),
        ("parts", 1.5, {"sum": 1.0, "short": 0.5}),
        ("branches", 3.0, {}),
        ("unknown part", 0.5, {"short": 0.5}),
        ("unknown parts", None, {}),
    ],
)
def test_a_rollout_may_return_a_number_parts_or_nothing(tmp_path, how, reward, parts):
    end = run_rollout(tmp_path, how, sums("1", "2"))
    assert (end.reward, end.parts) == (reward, parts)
    assert ("messages" in end.metrics) == (how != "unknown part"), "a metric that is unknown is not 0"


@pytest.mark.parametrize(
    ("how", "reason", "says"),
    [
        ("raise", "raised", r"the rollout raised KeyError: 'lost' \(.*mine.py:\d+\)"),
        ("schema", "raised", "TypeError: found the tool {'name': 'add'}; as a schema it is "),
        ("text", "raised", r"found 'hello'; session.chat takes a list of messages .* \(.*mine.py:\d+\)"),
        ("list", "raised", "session.complete takes text, and session.chat takes messages"),
        ("silent", "silent", "nothing was sampled"),
        ("nan", "returned", "must be finite"),
        ("words", "returned", r"`session.metrics, messages` returned str `many`"),
        ("blank", "returned", r"session.metrics has the name 'seen by'; 1 to 200 letters, .* are allowed"),
        ("object", "raised", "returned a value of type object"),
        ("die", "died", "exit status 3"),
        ("hang", "hung", "took longer than 3 s and was killed"),
    ],
)
def test_a_rollout_that_fails_is_a_fault(tmp_path, how, reason, says):
    fault = run_rollout(tmp_path, how, step_s=3.0 if how == "hang" else 10.0)
    assert isinstance(fault, EnvironmentFault) and fault.reason == reason
    with pytest.raises(EnvironmentFault, match=says):
        raise fault


def test_a_rollout_that_does_not_end_is_a_fault_where_nothing_scores_it(tmp_path):
    """The sampler ends it first, and has functions or none; in a trial the limit of rollouts ends it."""
    limits = {"episode_s": 5.0, "step_s": 1.0}
    own = run_rollout(tmp_path, "sleep", **limits)
    assert (own.reason, str(own)) == ("hung", "the rollout did not end within 9 s; bound what it waits for")

    async def sampled():
        async with environment(tmp_path, ROLLOUTS, "stuck", replays=0, **limits) as played:
            names = {"renderer": Letters(), "read": read, "generator_id": "g", "seed": 0}
            sampler = EpisodeSampler(FakeEngine(), None, played, played.config, max_prompt_tokens=50, **names)
            spec = SamplingSpec(temperature=1.0, max_response_tokens=50)
            await sampler.play(Prompt(token_ids=(1,), text="ab", row={}), spec, seed=0, episode=0)

    with pytest.raises(EpisodeFailed, match="neither ended within 8 s nor gave a reward"):
        asyncio.run(sampled())


def test_a_rollout_may_score_when_the_time_of_its_turns_is_up(tmp_path):
    class Late(ScriptedTalk):
        async def complete(self, text):
            if self.shown:
                await elapse(0.5)
                raise BudgetSpent("time")
            return await super().complete(text)

    async def scenario():
        async with environment(tmp_path, ROLLOUTS, "scoring", episode_s=0.5) as played:
            return await play(played, Late(["on"]))

    end = asyncio.run(scenario())
    assert (end.finish_reason, end.reward) == ("time", 0.5)


def test_a_budget_that_is_spent_within_a_task_group_ends_the_rollout_and_is_no_fault(tmp_path):
    """Also if another turn is answered after it."""
    answered = asyncio.Event()

    class Second(ScriptedTalk):
        async def complete(self, text):
            if text == "b":
                raise BudgetSpent("sequences")
            await elapse(0.3)
            answered.set()
            return await super().complete(text)

    async def scenario():
        talk = Second(["on"])
        async with environment(tmp_path, ROLLOUTS, "together") as played:
            return await play(played, talk), talk.rewards

    end, rewards = asyncio.run(scenario())
    assert (end.finish_reason, end.reward) == ("sequences", None)
    assert not answered.is_set() or rewards == [(None, state_of(None, {"state": 7}))]


def test_states_reach_the_talk_without_rewards(tmp_path):
    async def scenario():
        talk = ScriptedTalk(["on", "on"])
        async with environment(tmp_path, ROLLOUTS, "together") as played:
            return await play(played, talk), talk.rewards

    end, rewards = asyncio.run(scenario())
    assert rewards == [(None, state_of(None, {"state": 7}))] * 2 and end.metrics["asked"] == 2


def test_a_rollout_sees_what_other_environments_see_of_a_turn(tmp_path):
    call = ToolCall(id="abc", name="add", arguments={"a": [1, None]})
    answer = Answer(
        text="é", tool_calls=(call,), finish_reason="length", tokens=3, is_unparsed=True, prompt_tokens=11,
        reasoning="hm", stop="\n", logprobs=lambda: [("a", -1.0)],
    )  # fmt: skip
    assert all(getattr(answer, one.name) != one.default for one in fields(Answer)), "a field is not tried"

    async def scenario():
        talk = ScriptedTalk([answer, "on"])
        async with environment(tmp_path, ROLLOUTS, "seen") as played:
            await play(played, talk)
        return talk.shown[1]

    assert asyncio.run(scenario()) == repr(answer)


def test_a_loop_that_hangs_costs_the_other_episodes_a_fault_and_not_their_lives(tmp_path):
    async def scenario():
        async with environment(tmp_path, ROLLOUTS, "rollout", step_s=3.0) as played:
            hows = ["sleep", "hang", "sleep"]
            ends = await asyncio.gather(
                *(play(played, sums(), {"how": how}, prompt=ASK) for how in hows), return_exceptions=True
            )
            assert [getattr(end, "reason", end) for end in ends] == ["hung"] * 3
            again = await asyncio.gather(*(play(played, sums(), prompt=ASK) for _ in range(20)))
            assert [end.reward for end in again] == [1.0] * 20

    asyncio.run(scenario())


def test_a_spent_budget_and_an_engine_error_reach_the_rollout_and_the_caller(tmp_path):
    async def scenario():
        async with environment(tmp_path, ROLLOUTS, "counting") as played:
            end = await play(played, ScriptedTalk(["on"] * 9, max_turns=4))
            assert (end.finish_reason, end.reward) == ("turns", None)
            assert end.metrics == {"turns": 4.0, "seen": 1.0}

            with pytest.raises(EnvironmentFault, match="returned a value of type set"):
                await play(played, ScriptedTalk(["on"], max_turns=1), {"how": "set"})

            def broken(shown) -> Answer:
                raise EngineError("aborted")

            with pytest.raises(EngineError, match="aborted"):
                await play(played, ScriptedTalk(broken))
            talk = ScriptedTalk(lambda shown: "on", max_turns=10**9)
            playing = asyncio.create_task(play(played, talk))
            await until(lambda: len(talk.shown) > 10)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
        async with environment(tmp_path, ROLLOUTS, "places") as played:
            talks = [ScriptedTalk(["on"]) for _ in range(3)]
            await asyncio.gather(
                *(play(played, talk, {"seed": 5}, seed=9, episode=n) for n, talk in enumerate(talks))
            )
            assert [talk.shown for talk in talks] == [[f"5 9 {n}"] for n in range(3)]

    asyncio.run(scenario())
