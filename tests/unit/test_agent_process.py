"""Agents that are programs: what they get, how their episode ends, and that none of their processes is left."""

import asyncio
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from asyncrl.addons.endpoint import agent_process
from asyncrl.addons.endpoint.agent_process import AgentEnvironment
from asyncrl.algo.trainable import GroupLimits
from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.engine.answers import AnswerReader
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.episodes import EpisodeSampler
from asyncrl.engine.fake import FakeEngine
from asyncrl.environments.base import Answer, BudgetSpent
from asyncrl.errors import EngineError, EnvironmentFault
from asyncrl.session.chat_template import TemplateRenderer
from asyncrl.types import Prompt
from tests.support.agent_talks import ScriptedTalk, character_tokenizer
from tests.support.waiting import HANG, has_ended, turns, until, wait_until, wait_until_ended

TEXT = Answer(text="two words", tokens=3, prompt_tokens=11)
ASK = """
    import json, os, sys, threading, time, urllib.request
    row = json.loads(os.environ.get("ASYNCRL_ROW", "null"))
    def ask(text, **more):
        body = json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()
        headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    def result(value):
        json.dump(value, open(os.environ["ASYNCRL_RESULT"], "w"))
"""


ROW = {"question": "1+2?", "answer": "3"}


def play(tmp_path, talk, program: str, *, prompt="1+2?", row=ROW, cancel_when=lambda: False, **config):
    """Play one episode of an agent that is this Python text."""
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(ASK) + textwrap.dedent(program))

    async def run():
        environment = AgentEnvironment(EnvironmentConfig(command=(sys.executable, str(file)), **config))
        await environment.start()
        try:
            playing = asyncio.ensure_future(environment.play(talk, row, prompt=prompt, seed=7, episode=2))
            await until(lambda: playing.done() or cancel_when())
            playing.cancel()
            return await playing
        finally:
            await environment.close()

    return asyncio.run(run())


def test_an_agent_gets_its_row_and_writes_its_reward(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the user")
    monkeypatch.setenv("MY_SECRET", "of the user")
    talk = ScriptedTalk(TEXT)
    outcome = play(
        tmp_path,
        talk,
        """
        assert (row["question"], row["prompt"], row["episode"]) == ("1+2?", "1+2?", 2)
        assert os.environ["ASYNCRL_SEED"] == "7" == str(row["seed"])
        assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
        assert "MY_SECRET" not in os.environ
        assert os.environ["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
        assert ask(row["question"], temperature=0) == "two words"
        result({"right": 0.5, "short": 0.25})
        """,
    )
    assert (outcome.finish_reason, outcome.reward) == ("stop", 0.75)
    assert outcome.parts == {"right": 0.5, "short": 0.25}
    counts = {"model_calls": 1.0, "overridden_calls": 1.0, "retried_calls": 0.0, "refused_calls": 0.0}
    assert outcome.metrics == counts
    assert talk.asked[0]["messages"] == [{"role": "user", "content": "1+2?"}]


def test_the_agent_of_the_guide_plays_a_row_with_messages(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    program = guide.split("## An agent\n")[1].split("The reward is")[0]
    talk = ScriptedTalk(*(Answer(text=text) for text in ("5", "4", "it is 3")))
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2?"}]
    outcome = play(tmp_path, talk, program, prompt=prompt)
    assert (outcome.reward, outcome.parts, outcome.metrics["refused_calls"]) == (1.0, {"right": 1.0}, 0)
    assert talk.asked[0]["messages"] == prompt
    assert [one["content"] for one in talk.asked[2]["messages"]][2:] == [
        "5", "Check your answer.", "4", "Check your answer."
    ]  # fmt: skip


@pytest.mark.parametrize("left", range(9))
def test_without_descriptors_an_attempt_fails_and_the_next_one_is_played(tmp_path, left, caplog):
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(ASK) + "ask('x'); result(1.0)")

    async def run():
        environment = AgentEnvironment(EnvironmentConfig(command=(sys.executable, str(file))))
        await environment.start()
        await environment.play(ScriptedTalk(TEXT), ROW, prompt="", seed=7, episode=2)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [number for number in range(limits[0]) if not os.path.lexists(f"/proc/self/fd/{number}")]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], limits[1]))
            try:
                await environment.play(ScriptedTalk(TEXT), ROW, prompt="", seed=7, episode=2)
            except EnvironmentFault as fault:
                assert "Too many open files" in f"{fault} {caplog.text}"
            else:
                assert left > 4
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            return await environment.play(ScriptedTalk(TEXT), ROW, prompt="", seed=7, episode=2)
        finally:
            await environment.close()

    assert asyncio.run(run()).reward == 1.0


@pytest.mark.parametrize("lacks", ["threads", "a directory"])
def test_without_threads_or_a_directory_an_attempt_is_a_fault_that_leaves_nothing(
    tmp_path, monkeypatch, lacks
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    says = {
        "threads": "can't start new thread",
        "a directory": "asyncrl-agents-.*No such file or directory; give a",
    }

    def refuse(thread):
        raise RuntimeError("can't start new thread")  # as Python does

    async def run():
        environment = AgentEnvironment(EnvironmentConfig(command=(sys.executable, "-c", "")))
        await environment.start()
        files, tasks = psutil.Process().num_fds(), len(asyncio.all_tasks())
        if lacks == "threads":
            monkeypatch.setattr(threading.Thread, "start", refuse)
        else:
            os.rmdir(environment._scratch.directory)
        with pytest.raises(EnvironmentFault, match=says[lacks]) as caught:
            await environment.play(ScriptedTalk(), ROW, prompt="", seed=7, episode=2)
        monkeypatch.undo()
        assert not environment.endpoint.episodes._open and psutil.Process().num_fds() <= files
        assert caught.value.reason == "start" and len(asyncio.all_tasks()) <= tasks
        await environment.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_a_client_library_repeats_is_counted(tmp_path):
    program = """
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
        for attempt in range(2):
            headers = {"x-api-key": os.environ["OPENAI_API_KEY"], "x-stainless-retry-count": str(attempt)}
            url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
            urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
    """
    outcome = play(tmp_path, ScriptedTalk(TEXT), program)
    assert (outcome.metrics["model_calls"], outcome.metrics["retried_calls"]) == (1.0, 1.0)


def test_an_agent_without_a_result_is_scored_by_the_reward_functions(tmp_path):
    for program in ("ask('x')", "ask('x'); result(None)", "ask('x'); result({'x': None})"):
        outcome = play(tmp_path, ScriptedTalk(TEXT), program)
        assert (outcome.reward, outcome.parts) == (None, {})


FAULTS = {
    "without a call of the model": "print('hello')",
    r"exit status 3\) after 1 calls of the model; it last printed: so long": "ask('x'); print('so long'); sys.exit(3)",
    "SIGKILL": "ask('x'); os.kill(os.getpid(), 9)",
    "constrains what the model may sample": """
        try:
            ask('x', tool_choice='required')
        except Exception:
            ask('x')
    """,
    "`ASYNCRL_RESULT` returned str `great`; allowed is a reward that is one finite": "ask('x'); result('great')",
    "`ASYNCRL_RESULT, part x` returned list": "ask('x'); result({'x': []})",
    "returned the reward 1000.*; it must be finite": "ask('x'); result(10**400)",
    "returned the reward inf; it must be finite": "ask('x'); result({'x': 1e308, 'y': 1e308})",
    "ASYNCRL_RESULT cannot be used .Expecting value": "ask('x'); os.mkfifo(os.environ['ASYNCRL_RESULT'])",
    "returned the reward nan": "ask('x'); result(float('nan'))",
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_failure_is_a_fault_and_never_a_score(tmp_path, message):
    with pytest.raises(EnvironmentFault, match=message):
        play(tmp_path, ScriptedTalk(TEXT), FAULTS[message])


@pytest.mark.parametrize(("constraints", "asked"), [("refuse", 1), ("ignore", 2)])
def test_constraints_are_a_counted_mistake_of_an_agent_that_gives_a_result_all_the_same(
    tmp_path, constraints, asked
):
    """DSPy asks for JSON only after a malformed answer: a fault would spare the policy its score of 0."""
    program = """
        ask('x')
        try:
            ask('y', response_format={"type": "json_object"})
        except Exception:
            pass
        result(0)
    """
    talk = ScriptedTalk(TEXT, TEXT)
    outcome = play(tmp_path, talk, program, constraints=constraints)
    assert (outcome.finish_reason, outcome.reward, len(talk.asked)) == ("stop", 0.0, asked)
    counts = outcome.metrics["refused_calls"], outcome.metrics["overridden_calls"]
    assert counts == (2 - asked, asked - 1)


@pytest.mark.parametrize("step", range(1, 6))
def test_an_episode_that_is_cancelled_at_its_start_leaves_nothing(tmp_path, monkeypatch, step):
    """Neither a key, a directory nor a descriptor."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run():
        environment = AgentEnvironment(EnvironmentConfig(command=(sys.executable, "-c", "input()")))
        await environment.start()
        files = psutil.Process().num_fds()
        playing = asyncio.ensure_future(environment.play(ScriptedTalk(), {}, prompt="", seed=0, episode=0))
        await turns(step)
        playing.cancel()
        await asyncio.wait({playing})
        keys = dict(environment.endpoint.episodes._open)
        assert not keys and psutil.Process().num_fds() <= files
        await environment.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_engine_is_a_fault_even_if_the_agent_goes_on(tmp_path):
    program = """
        try:
            ask('x')
        except Exception:
            ask('x')
    """
    with pytest.raises(EnvironmentFault, match="the model cannot answer: gone"):
        play(tmp_path, ScriptedTalk(EngineError("gone"), TEXT), program)


@pytest.mark.parametrize("reason", ["turns", "length"])
def test_a_spent_budget_ends_the_episode_whatever_the_agent_does_then(tmp_path, reason):
    outcome = play(tmp_path, ScriptedTalk(TEXT, BudgetSpent(reason)), "ask('x'); ask('y')")  # a traceback
    assert outcome.finish_reason == reason
    handled = "ask('x')\ntry: ask('y')\nexcept Exception: result(0.5)"
    outcome = play(tmp_path, ScriptedTalk(TEXT, BudgetSpent(reason)), handled)
    assert (outcome.finish_reason, outcome.reward) == (reason, 0.5)


def test_an_agent_that_was_killed_after_its_budget_was_spent_has_failed(tmp_path):
    """Its reward may be missing, and would count as 0."""
    program = """
        try:
            ask('x')
        except Exception:
            os.kill(os.getpid(), 9)
    """
    with pytest.raises(EnvironmentFault, match="SIGKILL"):
        play(tmp_path, ScriptedTalk(BudgetSpent("turns")), program)


def test_an_agent_that_shortens_its_conversation_is_not_cut_off(tmp_path):
    program = """
        try:
            ask('x')
        except Exception:
            ask('y')
    """
    outcome = play(tmp_path, ScriptedTalk(BudgetSpent("length"), TEXT), program)
    assert (outcome.finish_reason, outcome.metrics["refused_calls"]) == ("stop", 1.0)


def test_an_agent_may_shorten_its_first_call_but_not_give_up(tmp_path):
    long = EnvironmentFault("the first prompt has 9 tokens", reason="long")
    calls = "try: ask('x')\nexcept Exception: pass\n"
    assert play(tmp_path, ScriptedTalk(long, TEXT), f"{calls}ask('y')").metrics["refused_calls"] == 1.0
    with pytest.raises(EnvironmentFault, match="the first prompt has 9 tokens") as found:
        play(tmp_path, ScriptedTalk(long), calls)
    assert found.value.reason == "long"


def test_a_last_answer_that_the_run_cut_off_is_truncated_but_not_one_that_the_agent_wanted_short(tmp_path):
    cut = Answer(text="two wo", finish_reason="length", tokens=2)
    assert play(tmp_path, ScriptedTalk(cut), "ask('x')").finish_reason == "length"
    assert play(tmp_path, ScriptedTalk(cut), "ask('x', max_tokens=9)").finish_reason == "length"
    assert play(tmp_path, ScriptedTalk(cut), "ask('x', max_tokens=2)").finish_reason == "stop"


@pytest.mark.parametrize("word", ["python", "python3"])
def test_python_is_the_interpreter_of_the_config(tmp_path, monkeypatch, word):
    """The one on PATH does not count, if there is any."""
    monkeypatch.setenv("PATH", "")
    config = EnvironmentConfig(
        command=(word, "-c", "import sys; sys.exit(sys.argv[1])", "seen"), python=sys.executable
    )

    async def run(config):
        environment = AgentEnvironment(config)
        try:
            await environment.start()
            await environment.play(ScriptedTalk(), {}, prompt="", seed=0, episode=0)
        finally:
            await environment.close()

    with pytest.raises(EnvironmentFault, match="it last printed: seen"):
        asyncio.run(run(config))
    with pytest.raises(EnvironmentFault, match=f"there is no program {word}"):
        asyncio.run(run(config.model_copy(update={"python": None})))


def test_a_program_that_does_not_exist_is_refused_at_the_start():
    environment = AgentEnvironment(EnvironmentConfig(command=("no-such-agent",)))
    with pytest.raises(EnvironmentFault, match="there is no program no-such-agent"):
        asyncio.run(environment.start())


@pytest.mark.parametrize(("address", "host"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")])
def test_agents_call_the_address_of_the_config(tmp_path, address, host):
    try:
        socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ).close()
    except OSError:
        pytest.skip(f"this machine has no {address}")
    program = f"assert os.environ['OPENAI_BASE_URL'].startswith('http://{host}:'); ask('x'); result(1)"
    assert play(tmp_path, ScriptedTalk(TEXT), program, address=address).reward == 1.0


def test_an_address_of_another_machine_or_of_every_interface_is_refused(tmp_path):
    with pytest.raises(
        EnvironmentFault, match=r"environment\.address: this host cannot listen on 192\.0\.2\.1"
    ):
        play(tmp_path, ScriptedTalk(TEXT), "ask('x')", address="192.0.2.1")
    with pytest.raises(ValueError, match=r"address\n.* would listen on every interface"):
        EnvironmentConfig(command=("agent",), address="0.0.0.0")


@pytest.mark.parametrize("ends", ["", HANG], ids=["exits", "is cancelled"])
def test_no_process_of_an_agent_is_left(tmp_path, ends):
    """A child in its group, and one that has moved to another session and lost its parent."""
    pids = tmp_path / "pids"
    pids.touch()
    program = f"""
        import subprocess
        for moves in (False, True):
            if (pid := os.fork()) == 0:
                if moves:
                    os.setsid()
                    if os.fork():
                        os._exit(0)
                with open({str(pids)!r}, "a") as file:
                    file.write(f"{{os.getpid()}}\\n")
                {HANG}
                os._exit(0)
        ask('x')
        while len(open({str(pids)!r}).readlines()) < 2:
            pass
        {ends}
    """
    if ends:
        with pytest.raises(asyncio.CancelledError):
            play(tmp_path, ScriptedTalk(TEXT), program, cancel_when=lambda: pids.read_text().count("\n") == 2)
    else:
        play(tmp_path, ScriptedTalk(TEXT), program)
    left = [int(line) for line in pids.read_text().split()]
    assert len(left) == 2
    wait_until_ended(left)


def test_nothing_of_an_agent_is_left_when_its_generator_is_killed(tmp_path, monkeypatch):
    """Neither the agent, nor a child that has moved to another session, nor their files."""
    pids, scratch = tmp_path / "pids", tmp_path / "scratch"
    pids.touch()
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    program = f"""
        if os.fork() == 0:
            os.setsid()
        with open({str(pids)!r}, "a") as file:
            file.write(f"{{os.getpid()}}\\n")
        {HANG}
    """
    generator = multiprocessing.get_context("spawn").Process(
        target=play, args=(tmp_path, None, program), daemon=True
    )
    generator.start()
    wait_until(lambda: pids.read_text().count("\n") == 2)
    left = [int(line) for line in pids.read_text().split()]
    assert not any(map(has_ended, left))
    assert list(scratch.iterdir())
    generator.kill()
    wait_until_ended(left)
    wait_until(lambda: not list(scratch.iterdir()))


def test_memory_is_bounded(tmp_path):
    with pytest.raises(EnvironmentFault, match="MemoryError"):
        play(tmp_path, ScriptedTalk(TEXT), "ask('x'); bytes(2**30)", memory_gib=0.5)


@pytest.mark.parametrize("size", [1, 300_000, 3_000_000])
def test_a_row_of_any_size_is_in_a_file_and_a_short_one_in_a_variable(tmp_path, size):
    program = f"""
        import pathlib
        read = json.loads(pathlib.Path(os.environ["ASYNCRL_ROW_FILE"]).read_text())
        assert row in (None, read) and (row is None) == ({size} > 1)
        assert (len(read["page"]), read["prompt"]) == ({size}, "1+2?")
        ask('x'); result(1)
    """
    assert play(tmp_path, ScriptedTalk(TEXT), program, row={"page": "x" * size}).reward == 1.0


def test_an_agent_uses_no_proxy_where_its_user_wants_none(tmp_path, monkeypatch):
    for name, value in {"http_proxy": "http://127.0.0.1:9", "no_proxy": "*", "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)
    program = "ask('x'); result(float(bool(urllib.request.proxy_bypass('intra.net'))))"
    assert play(tmp_path, ScriptedTalk(TEXT), program).reward == 1.0


@pytest.mark.parametrize("over", [0, 1])
def test_the_longest_variable_is_one_that_the_system_takes(tmp_path, over):
    """One byte more is left out, and neither keeps the program from its start."""
    given = {"seed": 7, "episode": 2, "page": "", "prompt": "1+2?"}
    room = agent_process.LONGEST_VARIABLE - 1 - len("ASYNCRL_ROW=" + json.dumps(given))
    program = f"assert (row is None) == bool({over}); ask('x'); result(1)"
    assert play(tmp_path, ScriptedTalk(TEXT), program, row={"page": "x" * (room + over)}).reward == 1.0


@pytest.mark.parametrize("spent", ["", "turns"])
def test_a_result_counts_although_the_program_does_not_end(tmp_path, spent):
    program = f"""
        try:
            ask('x'); {"ask('y')" if spent else ""}
        except Exception:
            pass
        result(0.5)
        {HANG}
    """
    talk = ScriptedTalk(TEXT, *([BudgetSpent(spent)] if spent else []))
    outcome = play(tmp_path, talk, program, episode_s=3.0, step_s=0.1)
    assert (outcome.finish_reason, outcome.reward) == (spent or "stop", 0.5)


def test_a_program_that_neither_ends_nor_writes_a_result_is_waited_for(tmp_path):
    """Until the generator's own limit, which is a fault if no function scores the episode."""
    seen = tmp_path / "seen"
    program = f"ask('x'); threading.Event().wait(1.5); open({str(seen)!r}, 'w').close(); {HANG}"
    with pytest.raises(asyncio.CancelledError):
        play(tmp_path, ScriptedTalk(TEXT), program, cancel_when=seen.exists, episode_s=0.1, step_s=0.1)


def test_programs_are_started_few_at_a_time_and_never_by_the_thread_of_the_loop(tmp_path, monkeypatch):
    starting, most, threads, looks = [], [], set(), []
    start, look = subprocess.Popen, agent_process.end_marked

    def popen(*given, **options):
        starting.append(None)
        most.append(len(starting))
        threads.add(threading.get_ident())
        try:
            return start(*given, **options)
        finally:
            starting.pop()

    async def run():
        environment = AgentEnvironment(EnvironmentConfig(command=(sys.executable, "-S", "-c", "")))
        await environment.start()
        monkeypatch.setattr(agent_process.subprocess, "Popen", popen)
        monkeypatch.setattr(agent_process, "end_marked", lambda mark: looks.append(mark) or look(mark))
        plays = [environment.play(ScriptedTalk(), {}, prompt="", seed=0, episode=one) for one in range(8)]
        found = await asyncio.gather(*plays, return_exceptions=True)
        monkeypatch.undo()
        await environment.close()
        return found

    found = asyncio.run(run())
    assert ["without a call" in str(one) for one in found] == [True] * 8
    assert len(most) == 8 and max(most) <= agent_process.MOST_STARTING
    assert threading.get_ident() not in threads
    assert len(looks) == len(set(looks)) == 8, "each look reads the variables of all processes"


def test_a_group_of_episodes_that_agents_played(tmp_path):
    """Engine, session, endpoint and two processes: three turns and a summary that is a sequence of its own."""
    tokenizer = character_tokenizer()
    renderer = TemplateRenderer(tokenizer)
    file = tmp_path / "agent.py"
    file.write_text(
        textwrap.dedent(ASK)
        + textwrap.dedent("""
        import urllib.request
        def chat(messages):
            body = json.dumps({"messages": messages, "max_tokens": 5}).encode()
            headers = {"x-api-key": os.environ["OPENAI_API_KEY"]}
            request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
            return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(3):
            messages += [chat(messages), {"role": "user", "content": "go on"}]
        chat([{"role": "user", "content": "sum up"}])
        result(row["episode"] + 0.5)
        """)
    )
    config = EnvironmentConfig(command=(sys.executable, str(file)))

    async def run():
        environment = AgentEnvironment(config)
        await environment.start()
        try:
            sampler = EpisodeSampler(
                FakeEngine(vocabulary=len(tokenizer), seed=1),
                None,
                environment,
                config,
                renderer=renderer,
                read=AnswerReader(tokenizer, renderer).read,
                max_prompt_tokens=100,
                generator_id="g",
                seed=0,
            )
            prompt = Prompt(token_ids=(), text="count", row={})
            limits = GroupLimits(vocabulary=len(tokenizer), rollouts=2, max_tokens=400)
            spec = SamplingSpec(temperature=1.0, max_response_tokens=200)
            return await sampler.group(prompt, 1, limits, spec)
        finally:
            await environment.close()

    group = asyncio.run(run())
    assert group.episode_of.tolist() == [0, 0, 1, 1]
    assert [rollout.reward for rollout in group.rollouts] == [0.5, 0.5, 1.5, 1.5]
    assert [len(rollout.turns.ends) if rollout.turns else 1 for rollout in group.rollouts] == [3, 1, 3, 1]
    assert renderer.decode(group.rollouts[1].prompt_ids) == "[user]sum up[/user]"
    texts = [renderer.decode(rollout.response_ids[~rollout.action_mask]) for rollout in group.rollouts[::2]]
    assert all(text.replace("<eos>", "") == "[user]go on[/user]" * 2 for text in texts)
    assert group.episode_metrics["model_calls"].tolist() == [4, 4]
