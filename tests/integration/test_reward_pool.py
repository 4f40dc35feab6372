"""The reward pool against user code that misbehaves in every way we know, in real processes."""

import asyncio
import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgpack
import psutil
import pytest

from asyncrl.config.reward_section import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.rewards import opened
from asyncrl.rewards import reward_process as process_module
from asyncrl.rewards.base import RewardInput
from asyncrl.rewards.opened import Rewards
from asyncrl.sandbox.box import Box
from tests.support.machine import skip_for
from tests.support.waiting import HANG, LONG_S, elapse, has_ended, until, wait_until, wait_until_ended

pytestmark = pytest.mark.integration

FUNCTIONS = '''
import asyncio, os, signal, subprocess, sys, threading

def good(prompt, response): return float(len(response))
async def later(prompt, response):
    await asyncio.to_thread(os.getpid)
    return 0.5
def misbehave(prompt, response, how, note=None):
    """Does what column `how` says; then the worker must be as good as new."""
    if how == "raise": raise KeyError("lost")
    if how == "nan": return float("nan")
    if how == "text": return "1.0"
    if how == "none": return None
    if how == "sleep":
        if note: open(note, "w").close()
        HANG
    if how == "busy":
        while True: pass
    if how == "async hang": return asyncio.Event().wait()
    if how == "_exit": os._exit(3)
    if how == "exit": sys.exit(4)
    if how == "interrupt": raise KeyboardInterrupt
    if how == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if how == "orphan":
        with open(note, "w") as file: file.write(str(subprocess.Popen(["sleep", "60"]).pid))
        HANG
    if how == "fork":
        if os.fork() == 0: return 100.0
        return 1.0
    if how == "print":
        for _ in range(2000): print("x" * 1000)
        os.write(1, b"\\x00" * 100_000)
        os.system("echo from a child")
    if how == "read": assert sys.stdin.read() == ""
    if how == "dirty exit":
        print("the last words", flush=True)
        os._exit(5)
    return 1.0
def huge(prompt, response): return 1e308
def huger(prompt, response): return 1e308
def columns(prompt, response, **row): return float(len(row))
def sums(completions, task, **kwargs):
    return [2.0 if one == "math" else None for one in task]
def words(prompt, response, task):
    return (1.0, "dog") if task == "words" else None
def raw(prompt, response, raw_response): return float(len(raw_response))
KEPT = []
def leaks(prompt, response, last):
    """Take all descriptors or all rights, and end in the way of `last`."""
    if last == "works":
        os.close(os.open("/tmp", os.O_TMPFILE | os.O_RDWR))
        return 1.0
    if last == "takes rights":
        if os.getpid() == 1: os.chmod("/tmp", 0)
        return 0.5
    try:
        while True: KEPT.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        if last == "raises": raise
    return 0.5
'''.replace("HANG", HANG)


@pytest.fixture
def functions(tmp_path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def config(
    functions: Path, *names: str, timeout_s: float = 1.0, workers: int = 1, weights=None, **more
) -> RewardConfig:
    listed = [
        {
            "function": f"{functions}:{name}" if name != "exact_match" else name,
            "weight": (weights or {}).get(name, 1.0),
        }
        for name in names
    ]
    return RewardConfig.model_validate(
        {"functions": listed, "timeout_s": timeout_s, "workers": workers} | more
    )


def ask(response: str = "abc", **row) -> RewardInput:
    return RewardInput(prompt="p", response=response, row=row)


def run(config: RewardConfig, scenario) -> None:
    """`scenario(pool)` on a fresh loop, bounded; afterwards no child process may be left."""

    async def main() -> None:
        pool = Rewards(config, Path("runs"))
        try:
            async with asyncio.timeout(LONG_S):
                await scenario(pool)
        finally:
            await pool.close()

    before = set(psutil.Process().children(recursive=True))
    asyncio.run(main())
    wait_until_ended(set(psutil.Process().children(recursive=True)) - before)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", r"raised KeyError: 'lost' \(.*functions.py:\d+\)"),
        ("nan", "returned nan"),
        ("text", "returned str `1.0`"),
        ("sleep", "took longer than 1 s"),
        ("busy", "took longer than 1 s"),
        ("async hang", "took longer than 1 s"),
        ("_exit", "process died .exit status 3."),
        ("exit", "raised SystemExit: 4"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("segfault", "process died .killed by SIGSEGV."),
        ("dirty exit", "exit status 5.*the last words"),
    ],
)
def test_a_failure_names_the_part_and_the_reason_and_the_next_call_works(functions, how, reason):
    async def scenario(pool):
        with pytest.raises(RewardError, match=f"(?s)reward part `misbehave`.*{reason}"):
            await pool.score([ask(how=how)])
        [score] = await pool.score([ask(how="well")])
        assert (score.total, dict(score.parts)) == (1.0, {"misbehave": 1.0})

    run(config(functions, "misbehave"), scenario)


@pytest.mark.parametrize(
    "sandbox", ["none", pytest.param("bubblewrap", marks=skip_for(Box()._view.problem()))]
)
def test_a_call_that_takes_descriptors_or_rights_has_its_value_and_the_next_call_works(
    functions, monkeypatch, sandbox
):
    monkeypatch.chdir(functions.parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario(pool):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        try:
            for _ in range(2):
                for last in ("returns", "takes rights"):
                    assert [one.total for one in await pool.score([ask(last=last)])] == [0.5]
                    assert [one.total for one in await pool.score([ask(last="works")])] == [1.0]
                with pytest.raises(RewardError, match=r"raised OSError: \[Errno 24\] Too many open files"):
                    await pool.score([ask(last="raises")])
                assert [one.total for one in await pool.score([ask(last="works")])] == [1.0]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    run(config(functions, "leaks", timeout_s=60.0, sandbox=sandbox, memory_gib=2.0), scenario)


def test_parts_whose_sum_is_beyond_a_float_fail_the_call(functions):
    async def scenario(pool):
        with pytest.raises(RewardError, match=r"huge is 1e\+308; a reward and its parts are at most 1e\+09"):
            await pool.score([ask()])

    run(config(functions, "huge", "huger"), scenario)


@pytest.mark.parametrize("how", ["print", "fork", "read"])
def test_what_user_code_does_to_its_standard_streams_disturbs_nobody(functions, how):
    async def scenario(pool):
        for _ in range(2):
            scores = await pool.score([ask(how=how), ask(how="well")])
            assert [score.total for score in scores] == [1.0, 1.0]

    run(config(functions, "misbehave", timeout_s=10), scenario)


def test_a_hung_call_dies_with_its_children(functions, tmp_path):
    note = tmp_path / "pid"

    async def scenario(pool):
        with pytest.raises(RewardError, match="took longer"):
            await pool.score([ask(how="orphan", note=str(note))])
        child = int(note.read_text())
        await until(lambda: has_ended(child))

    run(config(functions, "misbehave"), scenario)


def test_parts_are_weighted_and_reported_raw_sync_and_async(functions):
    async def scenario(pool):
        scores = await pool.score([ask("abc", answer="abc"), ask("ab", answer="abc")])
        assert [dict(score.parts) for score in scores] == [
            {"good": 3.0, "later": 0.5, "exact_match": 1.0},
            {"good": 2.0, "later": 0.5, "exact_match": 0.0},
        ]
        assert [score.total for score in scores] == [3 * 0.1 + 2 * 0.5 - 1, 2 * 0.1 + 2 * 0.5]
        assert [score.answer for score in scores] == ["abc", "ab"], "of the one part that gives answers"

    run(
        config(
            functions, "good", "later", "exact_match", weights={"good": 0.1, "later": 2, "exact_match": -1}
        ),
        scenario,
    )


def test_the_part_that_failed_is_named_not_its_neighbours(functions):
    async def scenario(pool):
        for _ in range(2):  # a reply left over from the first failure would show in the second
            with pytest.raises(RewardError, match="reward part `misbehave` returned nan"):
                await pool.score([ask("abcd", how="nan")])
            [score] = await pool.score([ask("abcd", how="well")])
            assert dict(score.parts) == {"good": 4.0, "misbehave": 1.0, "later": 0.5}

    run(config(functions, "good", "misbehave", "later"), scenario)


def test_memory_is_limited_without_a_sandbox_too(functions):
    functions.write_text(
        FUNCTIONS + "def greedy(prompt, response):\n    return float(len(bytearray(int(response) << 20)))\n"
    )

    async def scenario(pool):
        with pytest.raises(RewardError, match="part `greedy` raised MemoryError"):
            await pool.score([ask("3000")])
        assert (await pool.score([ask("100")]))[0].total == 100 << 20

    run(config(functions, "greedy", memory_gib=1.0), scenario)


def test_how_much_was_printed_before_the_end_is_told(functions):
    functions.write_text(
        "import os\ndef loud(prompt, response):\n    print('y' * 50_000, 'the end', flush=True)\n    "
        "os._exit(1)\n"
    )

    async def scenario(pool):
        with pytest.raises(
            RewardError, match=r"last printed \(45,913 bytes before were dropped\): y+ the end$"
        ):
            await pool.score([ask()])

    run(config(functions, "loud"), scenario)


def test_replies_that_user_code_forges_fail_calls_and_never_the_generator(functions):
    functions.write_text(
        "import os, struct\n"
        "def forge(prompt, response, reply):\n"
        "    for number in range(3, 20) if reply else ():\n"
        "        try: os.write(number, struct.pack('<I', len(reply) // 2) + bytes.fromhex(reply))\n"
        "        except OSError: pass\n"
        "    return 1.0\n"
    )

    async def scenario(pool):
        for forged in (
            1,
            {},
            [],
            {"other": 1},
            {"values": [None], "answers": [None]},
            {"values": [1.0, 1.0], "answers": [None, None]},
            {"values": [1.0], "answers": [1]},
            {"started": True},
        ):
            with pytest.raises(RewardError, match="out of step, because user code wrote to its pipe"):
                await pool.score([ask(reply=msgpack.packb(forged).hex())])
            assert (await pool.score([ask(reply="")]))[0].total == 1.0
        assert (await pool.score([ask(reply=msgpack.packb({"values": [100.0], "answers": [None]}).hex())]))[
            0
        ].total == 100.0  # its own score
        assert (await pool.score([ask(reply="")]))[0].total == 1.0, "and nobody else's"

    run(config(functions, "forge"), scenario)


BATCH = """
import os, time
def size(prompts, responses, answer, messages=None, *, batch=6, **columns):
    assert len(prompts) == len(responses) == len(answer) <= batch and batch in (4, 6)
    if "bad" in responses: raise ValueError("of the row")
    if "nan" in responses: return [float("nan")] * len(prompts)
    if "die" in responses: os._exit(3)
    return [(len(prompts) + one / 100, prompt[:1]) if text else None for prompt, text, one in zip(prompts, responses, answer)]
def alone(prompt, response): return 1000.0
def told(prompts, responses, batch): return [float(batch)] * len(prompts)
"""


def groups_of(*texts: str) -> list[list[RewardInput]]:
    return [
        [
            RewardInput(prompt=f"{group}", response=text, row={"answer": group * 10 + index})
            for index, text in enumerate(group_texts.split(","))
        ]
        for group, group_texts in enumerate(texts)
    ]


def test_a_function_with_prompts_sees_responses_of_several_groups_up_to_its_batch(functions):
    functions.write_text(BATCH)

    async def scenario(pool):
        await pool.start()
        scored = await asyncio.gather(*(pool.score(one) for one in groups_of("a,b", "a,", "a,b", "a,b")))
        # The first six of the eight, then two; the score has the row of each.
        assert [dict(one.parts) for group in scored for one in group] == [
            {"size": 6.0}, {"size": 6.01}, {"size": 6.1}, {}, {"size": 6.2}, {"size": 6.21},
            {"size": 2.3}, {"size": 2.31},
        ]  # fmt: skip
        assert [one.answer for group in scored for one in group] == ["0", "0", "1", None, "2", "2", "3", "3"]

    run(config(functions, "size", timeout_s=10.0), scenario)


def test_a_batch_without_a_default_is_told(functions):
    functions.write_text(BATCH)

    async def scenario(pool):
        await pool.start()
        [scores] = await asyncio.gather(*(pool.score(one) for one in groups_of("a,b")))
        assert [one.total for one in scores] == [64.0, 64.0]

    run(config(functions, "told", timeout_s=10.0), scenario)


def test_params_give_the_size_of_a_batch_and_other_functions_go_on_beside_it(functions):
    functions.write_text(BATCH)
    small = RewardConfig.model_validate(
        {
            "functions": [
                {"function": f"{functions}:size", "params": {"batch": 4}},
                {"function": f"{functions}:alone"},
            ],
            "workers": 2,
        }
    )

    async def scenario(pool):
        [first] = await asyncio.gather(*(pool.score(one) for one in groups_of("a,b,c,d,e")))
        assert [int(one.total) for one in first] == [1004, 1004, 1004, 1004, 1001]

    run(small, scenario)


@pytest.mark.parametrize(
    ("how", "message", "fails"),
    [
        ("bad", r"`size` raised ValueError: of the row", [1]),
        ("nan", "`size` returned nan", [1]),
        ("die", "died .exit status 3.", [0, 1, 2]),
    ],
)
def test_a_row_that_fails_in_a_batch_fails_its_own_group_only(functions, how, message, fails):
    functions.write_text(BATCH)

    async def scenario(pool):
        await pool.start()
        several = groups_of("a,b", f"a,{how}", "c,d")
        done = await asyncio.gather(*(pool.score(one) for one in several), return_exceptions=True)
        assert [index for index, one in enumerate(done) if isinstance(one, RewardError)] == fails
        for index in fails:
            assert re.search(message, str(done[index]))
        # Nothing is left over from the failed call.
        [[one]] = await asyncio.gather(*(pool.score(one) for one in groups_of("a")))
        assert one.total == 1.0 and not pool._batches["size"]._tasks and not pool._batches["size"]._waiting

    run(config(functions, "size", timeout_s=10.0), scenario)


def test_a_group_that_is_given_up_takes_no_other_with_it(functions, monkeypatch):
    functions.write_text(BATCH)
    monkeypatch.setattr(opened, "WAIT_S", 2.0)

    async def scenario(pool):
        await pool.start()
        tasks = [asyncio.create_task(pool.score(one)) for one in groups_of("a,b", "a", "a")]
        await until(lambda: len(pool._batches["size"]._waiting) == 4)
        tasks[0].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert [[one.total for one in group] for group in done[1:]] == [[2.1], [2.2]]

    run(config(functions, "size", timeout_s=10.0), scenario)


def test_a_function_with_responses_sees_its_group_and_others_one_response(functions):
    functions.write_text(
        "def rank(prompt, responses, truncated, bonus, target=0):\n"
        "    assert truncated == [False] * len(responses) and target == 5\n"
        "    order = sorted(responses, key=len)\n"
        "    return [(order.index(one) + bonus, one[:1]) if one else None for one in responses]\n"
        "async def count(prompt, response, response_tokens): return float(response_tokens)\n"
        "def short(prompt, responses): return [1.0]\n"
        "def own(prompt, responses, messages, **columns): return [float(one == 'a') for one in messages]\n"
    )
    several = [
        RewardInput(prompt="p", response=text, row={"bonus": 2}, response_tokens=len(text))
        for text in ("ccc", "a", "", "bb")
    ]
    ranked = RewardConfig(
        functions=[
            {"function": f"{functions}:rank", "params": {"target": 5}, "weight": 10},
            {"function": f"{functions}:count"},
        ],
        workers=2,
    )

    async def scenario(pool):
        scores = await pool.score(several)
        assert [dict(one.parts) for one in scores] == [
            {"count": 3.0, "rank": 5.0},
            {"count": 1.0, "rank": 3.0},
            {"count": 0.0},
            {"count": 2.0, "rank": 4.0},
        ]
        assert [one.total for one in scores] == [53, 31, 0, 42]
        assert [one.answer for one in scores] == ["c", "a", None, "b"]

    run(ranked, scenario)

    async def refused(pool):
        with pytest.raises(RewardError, match=r"`short` returned '\[1.0\]' for 4 responses"):
            await pool.score(several)

    run(config(functions, "short"), refused)

    async def episodes(pool):
        said = [{"messages": one, "turns": 1, "result": {}} for one in "ab"]
        played = [RewardInput(prompt="p", response="r", row={"x": 1}, played=one) for one in said]
        assert [one.total for one in await pool.score(played)] == [1.0, 0.0]
        # Without an environment they are columns of the data.
        row = {"messages": "ba", "turns": 1, "result": {}}
        data = [RewardInput(prompt="p", response="r", row=row)] * 2
        assert [one.total for one in await pool.score(data)] == [0.0, 1.0]

    run(config(functions, "own"), episodes)

    async def unknown(pool):
        await pool.start()

    wrong = RewardConfig(functions=[{"function": f"{functions}:rank", "params": {"targets": 5}}])
    with pytest.raises(RewardError, match=r"takes no params targets; allowed are bonus, target"):
        run(wrong, unknown)


def test_parts_that_abstain_are_left_out_of_the_sum(functions):
    """PC01: each row is scored by one of two functions; a row of neither has no part."""

    async def scenario(pool):
        scores = await pool.score([ask(task=task) for task in ("math", "words", "neither")])
        found = [(score.total, dict(score.parts), score.answer) for score in scores]
        assert found == [(6.0, {"sums": 2.0}, None), (1.0, {"words": 1.0}, "dog"), (0.0, {}, None)]

    run(config(functions, "sums", "words", weights={"sums": 3.0}), scenario)


@pytest.mark.parametrize(
    ("names", "scores"),
    [
        (["raw"], [3.0, 10.0]),
        (["good", "raw"], [6.0, 13.0]),
        (["columns"], [3.0, 3.0]),
        (["good"], [3.0, 3.0]),
    ],
)
def test_the_response_with_its_special_tokens_is_decoded_if_a_function_asks_for_it(functions, names, scores):
    decoded = []

    def decode() -> str:
        decoded.append(1)
        return "<think>dog"

    async def scenario(pool):
        row = {"raw_response": "of another run"}
        given = [ask("dog"), RewardInput(prompt="p", response="dog", raw_response=decode, row=row)]
        assert [score.total for score in await pool.score(given)] == scores
        assert len(decoded) == (names != ["good"])

    run(config(functions, *names), scenario)


def test_waiting_for_a_worker_is_nobodys_timeout_and_workers_run_side_by_side(functions):
    (functions.parent / "functions.py").write_text(
        FUNCTIONS
        + "def slow(prompt, response):\n    threading.Event().wait(0.2)\n    return float(response)\n"
    )

    async def scenario(pool):
        scores = await pool.score([ask(str(n)) for n in range(24)])  # the last ones wait for 2.2 s
        assert [score.total for score in scores] == list(range(24))

    run(config(functions, "slow", timeout_s=2.0, workers=2), scenario)


def workers_of_this_process() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "asyncrl.rewards.worker" in child.cmdline()]


def test_a_worker_that_is_stopped_or_dies_while_it_is_idle_costs_no_attempt(functions, monkeypatch, caplog):
    async def scenario(pool):
        await pool.start()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            (worker,) = workers_of_this_process()
            worker.send_signal(number)
            with monkeypatch.context() as patch:
                patch.setattr(process_module, "START_S", 1.0)
                call = asyncio.create_task(pool.score([ask("abc")]))
                if number == signal.SIGSTOP:
                    await until(lambda: "did not begin a call" in caplog.text)
            assert (await call)[0].total == 3.0
            assert worker.pid not in {other.pid for other in workers_of_this_process()}

    run(config(functions, "good"), scenario)


def test_a_worker_that_cannot_be_started_is_tried_again_and_not_for_ever(functions, monkeypatch, caplog):
    monkeypatch.setattr(process_module, "AGAIN_S", 0.01)
    start, refused = asyncio.create_subprocess_exec, []

    async def refuse(*command, **options):
        if len(refused) < most:
            refused.append(command)
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)

    async def scenario(pool):
        nonlocal most
        assert (await pool.score([ask("abc")]))[0].total == 3.0
        assert caplog.text.count("did not load the functions") == len(refused) == most
        pool._workers[0].kill()
        refused.clear()
        most = process_module.BEGINNINGS
        with pytest.raises(
            RewardError, match=r"3 reward workers in a row did not load .*temporarily unavailable"
        ):
            await pool.score([ask("abc")])
        assert (await pool.score([ask("abc")]))[0].total == 3.0

    most = process_module.BEGINNINGS - 1
    run(config(functions, "good"), scenario)


def test_a_worker_that_dies_as_it_starts_is_replaced_before_the_functions_are_blamed(
    functions, monkeypatch, caplog
):
    monkeypatch.setattr(process_module, "AGAIN_S", 0.01)
    start, killed = asyncio.create_subprocess_exec, []

    async def start_and_kill(*command, **options):
        process = await start(*command, **options)
        if len(killed) < process_module.BEGINNINGS - 1:
            process.kill()
            killed.append(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_kill)

    async def scenario(pool):
        await pool.start()
        assert caplog.text.count("did not load the functions") == len(killed)
        assert (await pool.score([ask("abc")]))[0].total == 3.0

    run(config(functions, "good"), scenario)


def test_the_event_loop_never_stands_still(functions):
    async def scenario(pool):
        await pool.start()
        ticks, call = 0, asyncio.create_task(pool.score([ask(how="busy")]))
        while not call.done():
            await elapse(0.01)
            ticks += 1
        with pytest.raises(RewardError, match="took longer"):
            await call
        assert ticks > 5  # a loop that waits for the worker would see none in the whole second

    run(config(functions, "misbehave"), scenario)


def test_a_cancelled_call_leaves_a_clean_worker(functions, tmp_path):
    note = tmp_path / "begun"

    async def scenario(pool):
        await pool.start()
        call = asyncio.create_task(pool.score([ask(how="sleep", note=str(note)), ask(how="well")]))
        await until(note.exists)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [score.total for score in await pool.score([ask(how="well")] * 3)] == [1.0] * 3

    run(config(functions, "misbehave", timeout_s=30), scenario)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "def good(prompt, response): return 1.0\nraise OSError('no disk')",
            "part `good` cannot be loaded: raised OSError: no disk",
        ),
        ("def bad(prompt, response): return 1.0", "has no function `good`; it has .'bad'"),
        (
            "import os; print('bye', flush=True); os._exit(7)",
            "start of the reward worker: .*exit status 7.*bye",
        ),
        ("def good(:", "raised SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_loaded_stops_the_start(functions, source, reason):
    functions.write_text(source)

    async def scenario(pool):
        with pytest.raises(RewardError, match=f"(?s){reason}"):
            await pool.start()

    run(config(functions, "good"), scenario)


def test_a_missing_column_is_named_and_odd_values_are_passed_as_text(functions):
    from datetime import date

    async def scenario(pool):
        with pytest.raises(
            RewardError,
            match=r"part `misbehave` wants column\(s\) \['how'\].*it has \['day', 'response_tokens', 'truncated'\]",
        ):
            await pool.score([ask(day=date(2026, 1, 1))])
        with pytest.raises(RewardError, match=r"cannot be sent this row: .*surrogate"):
            await pool.score([ask(how="\ud800")])
        assert (await pool.score([ask(how="well", day=date(2026, 1, 1), huge=2**70)]))[0].total == 1.0

    run(config(functions, "misbehave"), scenario)


def test_prompt_and_response_columns_of_the_row_do_not_get_in_the_way(functions):
    async def scenario(pool):
        row = {"prompt": "q", "response": "r", "answer": "x"}
        [score] = await pool.score([RewardInput(prompt="p", response="abc", row=row)])
        assert score.total == 4.0  # answer, truncated, response_tokens and raw_response

    run(config(functions, "columns"), scenario)


ELSEWHERE = """
def accuracy_reward(completions, solution, **kwargs):
    return [float(message["content"] == right) for [message], right in zip(completions, solution)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train"
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": "x"}
"""


def test_functions_of_trl_and_verl_score_the_rows_that_they_have_there(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(ELSEWHERE)
    prompt = [{"role": "user", "content": "2+2?"}]
    verl = {
        "data_source": "openai/gsm8k", "ability": "math", "extra_info": {"split": "train", "index": 0},
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }  # fmt: skip

    async def scenario(pool):
        row = {"question": prompt, "solution": "4"} | verl
        asked = [RewardInput(prompt="2+2?", response=one, row=row, chat=prompt) for one in "45"]
        scores = await pool.score(asked)
        assert [score.parts for score in scores] == [
            {"accuracy_reward": 1.0, "compute_score": 1.0},
            {"accuracy_reward": 0.0, "compute_score": 0.0},
        ]
        assert [score.answer for score in scores] == ["x", "x"]

    run(config(path, "accuracy_reward", "compute_score"), scenario)


def test_workers_die_with_a_killed_parent_even_in_the_middle_of_a_call(functions, tmp_path):
    script, notes = tmp_path / "parent.py", [str(tmp_path / name) for name in ("one", "two")]
    script.write_text(
        "import asyncio\nfrom pathlib import Path\n"
        "from asyncrl.config.reward_section import RewardConfig\nfrom asyncrl.rewards.base import RewardInput\n"
        "from asyncrl.rewards.opened import Rewards\n"
        f"config = RewardConfig(functions=[{{'function': '{functions}:misbehave'}}], workers=2, timeout_s=60)\n"
        f"notes = {notes}\n"
        "hung = [RewardInput(prompt='', response='', row={'how': 'sleep', 'note': note}) for note in notes]\n"
        "async def main():\n    pool = Rewards(config, Path('runs'))\n    await pool.start()\n"
        "    await pool.score(hung)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], env=os.environ)
    try:
        wait_until(lambda: parent.poll() is not None or all(map(os.path.exists, notes)))
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) == 2
        os.kill(parent.pid, signal.SIGKILL)
        wait_until_ended(workers)
    finally:
        parent.kill()
        parent.wait(timeout=120)


def test_the_worker_is_light():
    heavy = ("torch", "pydantic", "numpy", "transformers")
    code = f"import sys, asyncrl.rewards.worker; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert found.strip() == "[]"
