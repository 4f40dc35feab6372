"""Programs of a model in a real box: every limit, every secret, and programs that try to outlive their call.

Each program tries one thing. What it did is read from its result, or looked up from outside.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.config.reward_section import RewardConfig
from asyncrl.errors import EnvironmentFault
from asyncrl.rewards.base import RewardInput
from asyncrl.rewards.builtin import code, obstacle
from asyncrl.rewards.opened import Rewards
from asyncrl.sandbox.box import Box, Result, python_result
from tests.support.machine import skip_for
from tests.support.waiting import HANG, until

pytestmark = [pytest.mark.integration, skip_for(Box()._view.problem())]
CANARY = "canary-51c8"
OUTPUT = 4096
MEMORY_GIB = 0.5


class Lane:
    """One box and the loop that it belongs to."""

    def __init__(self) -> None:
        self.runner, self.box = asyncio.Runner(), Box(memory_gib=MEMORY_GIB, output_bytes=OUTPUT)

    def run(self, code: str, *, stdin: str = "", seconds: float = 5.0) -> Result:
        return self.runner.run(self.box.run(code, stdin=stdin, seconds=seconds))

    @property
    def processes(self) -> list[psutil.Process]:
        """Those behind the box: bubblewrap, process 1, and what it has left."""
        process = self.box._process
        if process is None:
            return []
        return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]

    def close(self) -> None:
        self.runner.run(self.box.close())
        self.runner.close()


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def the_next_program_works(lane: Lane) -> Iterator[None]:
    """Whatever a test did: the next program sees a clean box, alone in it."""
    yield
    after = lane.run(
        "import os\nprint(6 * 7, os.listdir('/tmp'), os.listdir('/dev/shm'), os.listdir('/proc/self/fd'))"
    )
    assert (after.stdout, after.status) == ("42 [] [] ['0', '1', '2', '3']\n", "ok"), after
    assert len(lane.processes) == 2


def test_output_input_and_exit_status(lane: Lane) -> None:
    result = lane.run("import sys\nprint(sys.stdin.read()[::-1])\nsys.stderr.write('é')", stdin="añb")
    assert (result.stdout, result.stderr, result.status, result.cut) == ("bña\n", "é", "ok", False)
    assert lane.run("import sys; sys.exit('why')").stderr == "why\n"
    assert lane.run("import sys; sys.exit()").status == lane.run("raise SystemExit(0)").status == "ok"
    assert lane.run("raise SystemExit(2)").status == lane.run("import os; os._exit(1)").status == "error"
    assert lane.run("import os; os.abort()").stderr == "\nkilled by SIGABRT\n"
    assert lane.run("import os; os.kill(os.getpid(), 40)").stderr == "\nkilled by signal 40\n"
    assert lane.run("import threading, atexit\natexit.register(print, 2)\n"
                    "threading.Timer(0.05, lambda: print(1)).start()").stdout == "1\n2\n"  # fmt: skip
    limits = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))"
    assert lane.run(limits, seconds=2.5).stdout == "(3, 4)\n", "processor time, of all threads of a process"
    assert lane.run("print(\udcff)").status == lane.run("a\0b").status == "error"


def test_a_traceback_is_that_of_a_file(lane: Lane, tmp_path: Path) -> None:
    code = "def half(x):\n    return x / 0\n\nhalf(3)\n"
    (tmp_path / "program").write_text(code)
    expected = os.popen(f"cd {tmp_path} && {sys.executable} program 2>&1").read()
    found = lane.run(code).stderr
    assert found.replace("<program>", str(tmp_path / "program")) == expected
    assert "SyntaxError" in lane.run("x = = 1").stderr


# 41 processes with the same 20 MiB.
SHARED = f"import os\nkept = b'x' * (20 << 20)\nfor _ in range(40):\n    if os.fork() == 0: break\n{HANG}"
LIMITS: dict[str, tuple[str, str, str]] = {
    "processor": ("while True: pass", "time", ""),
    "wall time": (f"print('begun')\n{HANG}", "time", ""),
    "wall time, deaf": ("import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: pass", "time", ""),
    "processor, threads": (
        "import hashlib, threading\nfor _ in range(4):\n"
        "    threading.Thread(target=lambda: [hashlib.sha256(b'x' * 10**6) for _ in iter(int, 1)]).start()",
        "time",
        "",
    ),
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "processes",
        "",
    ),
    "threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\nfor _ in range(200):\n    threading.Thread(target=time.sleep, args=(9,)).start()",
        "processes",
        "",
    ),
    "memory": ("b'x' * (3 << 30)", "error", "MemoryError"),
    "memory of many": (
        f"import os\nfor _ in range(8):\n    if os.fork() == 0: break\nkept = b'x' * (128 << 20)\n{HANG}",
        "memory",
        "",
    ),
    "memory that forks share": (SHARED, "time", ""),
    "memory that forks share and hide": (f"import ctypes\nctypes.CDLL(None).prctl(4, 0)\n{SHARED}", "memory", ""),
    "memory that no process has": ("import os\nos.memfd_create('x')", "error", "PermissionError"),
    "a file": ("open('/tmp/x', 'wb').write(b'x' * (300 << 20))", "error", "File too large"),
    "a full disk": (
        "for n in range(3):\n    with open(f'/tmp/{n}', 'wb', 0) as file:\n        assert file.write(b'x' * (200 << 20)) == 200 << 20, n",
        "error",
        "AssertionError: 1",
    ),
    "many files": ("import os\nfor n in range(12_000): os.mknod(f'/dev/shm/{n}')\n" + HANG, "files", ""),
    "descriptors": ("kept = [open('/dev/null') for _ in range(300)]", "error", "Too many open files"),
    "recursion in C": (
        "import ctypes\nctypes.string_at(0)",
        "error",
        "killed by SIGSEGV",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_ends_the_program_and_is_its_result(what: str, lane: Lane) -> None:
    code, status, said = LIMITS[what]
    result = lane.run(code, seconds=1.0 if status == "time" else 20.0)
    assert result.status == status and said in result.stderr, result
    assert result.stdout == ("begun\n" if what == "wall time" else ""), "what it printed before is kept"


def test_a_flood_of_output_is_cut_and_the_ends_are_kept(lane: Lane) -> None:
    before = psutil.Process().memory_info().rss
    flood = "import os\nos.write({0}, b'first')\nfor _ in range(2000): os.write({0}, b'x' * 100_000)\nos.write({0}, b'last')"
    out, err = lane.run(flood.format(1), seconds=20), lane.run(flood.format(2), seconds=20)
    assert out.cut and err.cut and out.status == err.status == "ok"
    assert out.stdout == "first" + "x" * (OUTPUT - 5)
    assert err.stderr == "x" * (OUTPUT - 4) + "last"
    assert psutil.Process().memory_info().rss - before < 50 << 20
    exactly = lane.run(f"print('x' * {OUTPUT - 1})")
    assert len(exactly.stdout) == OUTPUT and not exactly.cut


def test_there_is_no_network(lane: Lane) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{CANARY}")
        abstract.listen()
        for one in (listener, abstract):
            one.setblocking(False)
        address = listener.getsockname()
        assert lane.run(f"import socket\nsocket.create_connection({address})").status == "error"
        reached = lane.run(f"import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{CANARY}')")
        assert reached.status == "error" and "refused" in reached.stderr
        for one in (listener, abstract):
            with pytest.raises(BlockingIOError):
                one.accept()


SEARCH = """
import os
for top in ("/", ):
    for here, directories, files in os.walk(top):
        directories[:] = [one for one in directories if here + one not in ("/usr", "/proc") and len(here) < 60]
        for file in files:
            if file == "NAME":
                print(open(os.path.join(here, file)).read())
for path in ["PATHS", *(f"/proc/{pid}/{what}" for pid in ("1", "self", str(os.getppid())) for what in ("environ", "cmdline"))]:
    try:
        print(open(path).read())
    except OSError as error:
        print(type(error).__name__)
print(os.environ)
"""


def test_secrets_run_directory_and_data_are_hidden(
    lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "ASYNCRL_SECRET", "ASYNCRL_RUN_DIRECTORY", "PYTHONPATH", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, CANARY)
    data = tmp_path / "answers-of-the-test.jsonl"
    data.write_text(CANARY)
    lane.runner.run(lane.box.close())  # its variables are those of its start
    result = lane.run(SEARCH.replace("NAME", data.name).replace("PATHS", str(data)), seconds=20)
    assert result.status == "ok" and "FileNotFoundError" in result.stdout
    assert CANARY not in result.stdout + result.stderr


def test_what_is_hidden_is_empty_among_the_packages(tmp_path: Path) -> None:
    place = Path(sys.prefix)

    async def played(hidden: list[Path]) -> Result:
        async with Box(hidden=hidden) as box:
            return await box.run(f"import os\nprint(os.path.getsize({str(place / 'pyvenv.cfg')!r}) > 0)")

    assert asyncio.run(played([])).stdout == "True\n"
    assert asyncio.run(played([place / "pyvenv.cfg"])).stdout == "False\n"


SURVIVORS = {
    "double fork": f"import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        {HANG}",
    "holds the output": f"import os\nif os.fork() == 0:\n    os.setsid()\n    {HANG}\nos._exit(0)",
    "a daemon of another program": "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)",
    "stopped": "import os, signal\npid = os.fork()\nos.kill(pid or os.getpid(), signal.SIGSTOP)",
    "files and modules": "import sys, builtins\nopen('/tmp/x', 'w').write('1')\nopen('/dev/shm/x', 'w').write('1')\n"
    "builtins.open = sys.exit\nsys.modules['os'] = None\nsys.path.clear()",
}  # fmt: skip


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o500])
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_a_program_that_takes_rights_has_a_result_and_so_has_the_next_one(
    place: str, mode: int, lane: Lane
) -> None:
    lane.run("1")
    before = [one.pid for one in lane.processes]
    result = lane.run(f"import os\nos.chmod({place!r}, {mode})\nprint(6 * 7)\nraise SystemExit(3)")
    assert (result.stdout, result.status) == ("42\n", "error")
    assert [one.pid for one in lane.processes] == before, "it left no file"
    assert lane.run(f"open('{place}/x', 'w').write('1')\nprint(6 * 7)").stdout == "42\n"
    left = f"import os\nos.makedirs('{place}/a/b')\nos.chmod('{place}/a', 0)\nos.chmod({place!r}, {mode})"
    assert lane.run(left).status == "ok"


@pytest.mark.parametrize("how", SURVIVORS)
def test_nothing_outlives_its_call(how: str, lane: Lane) -> None:
    assert lane.run(SURVIVORS[how], seconds=2).status in ("ok", "time")


BREAKERS = (
    "import os, signal\nfor number in (9, 11, 19, 15, 2): os.kill(1, number)",
    "import os, signal\nos.killpg(os.getpgid(0), 19)",
    "import os\nos.kill(-1, 9)",
    "open('/proc/1/mem', 'r+b').write(b'x')",
    "import glob, os\nfor path in glob.glob('/proc/1/fd/*'): os.write(os.open(path, os.O_WRONLY), b'x' * 100)",
    "import os\nfor number in range(3, 1024):\n    try: os.write(number, b'x' * 100)\n    except OSError: pass",
    "import ctypes\nassert ctypes.CDLL(None, use_errno=True).ptrace(0x4206, 1, None, None) == 0",
    "import resource\nresource.prlimit(1, resource.RLIMIT_AS, (1, 1))",
    "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)",
)


@pytest.mark.parametrize("code", BREAKERS)
def test_no_program_reaches_process_1(code: str, lane: Lane) -> None:
    lane.run("1")
    before = [one.pid for one in lane.processes]
    lane.run(code, seconds=2)
    assert [one.pid for one in lane.processes] == before


def test_a_box_that_is_killed_is_a_fault_and_the_next_program_has_another(lane: Lane) -> None:
    async def killed() -> None:
        running = asyncio.create_task(lane.box.run(HANG, seconds=60))
        await until(lambda: len(lane.processes) > 2)
        _, first, _ = lane.processes
        first.kill()
        with pytest.raises(EnvironmentFault, match="ended before it answered"):
            await running

    lane.run("1")
    lane.runner.run(killed())


def test_a_call_that_is_cancelled_leaves_no_answer_behind(lane: Lane) -> None:
    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                lane.box.run("import threading\nthreading.Event().wait(1)\nprint('late')", seconds=9), 0.3
            )

    lane.runner.run(cancelled())
    assert lane.run("print('mine')").stdout == "mine\n"


def test_programs_at_the_same_time_get_their_own_results(lane: Lane) -> None:
    async def together() -> list[Result]:
        return await asyncio.gather(*(lane.box.run(f"print({n})") for n in range(10)))

    assert [one.stdout for one in lane.runner.run(together())] == [f"{n}\n" for n in range(10)]


def test_no_sandbox_is_a_fault_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentFault, match=r"found no program `bwrap`.*apt-get install bubblewrap"):
        asyncio.run(Box().run("1"))


REWARD = """
from asyncrl.sandbox.box import python_result

def passes(prompt, response, stdin, expected):
    return float(python_result(response, stdin=stdin, seconds=1).stdout.strip() == expected)
"""


def test_a_reward_runs_the_answer_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(REWARD)
    config = RewardConfig.model_validate({"functions": [{"function": "task.py:passes"}], "workers": 2})
    answers = [
        "print(int(input()) * 2)",
        "print(int(input()))",
        "while True: pass",
        "import os; os.kill(-1, 9)",
    ]
    row = {"stdin": "21", "expected": "42"}

    async def scores() -> list[float]:
        pool = Rewards(config, tmp_path / "runs")
        try:
            found = await pool.score([RewardInput(prompt="", response=one, row=row) for one in answers * 2])
        finally:
            await pool.close()
        return [one.total for one in found]

    assert asyncio.run(scores()) == [1.0, 0.0, 0.0, 0.0] * 2


PAIRS = [{"input": "21\n", "output": "42\n"}, {"input": "0", "output": " 0"}]


def test_the_built_in_reward_runs_the_tests_of_a_row() -> None:
    asserts = ["assert double(21) == 42", "assert double(0) == 0", "assert double(-1) == -1"]
    right, wrong = "def double(n): return abs(2 * n) if n >= 0 else n", "def double(n): return 42"
    for program, share in (
        (right, 1),
        (f"So:\n```python\n{wrong}\n```\nand\n```python\n{right}\n```\n", 1),
        (wrong, 1 / 3),
        (f"{right}\nraise SystemExit(0)", 0),
        (f"{right}\nimport os; os._exit(0)", 0),
        ("while True: pass", 0),
        ("def double(", 0),
    ):
        assert code("", program, asserts, share=True) == pytest.approx(share), program
        assert code("", program, asserts) == (share == 1)
    assert code("", "print(2 * int(input()))", PAIRS) == 1
    assert code("", f"```py\n{right}\n```\nIt gives\n```text\n42\n```\n", asserts) == 1
    assert code("", "print(42)", PAIRS, share=True) == 0.5
    with pytest.raises(ValueError, match="`output` of a test has more than 32 KiB"):
        code("", "print(42)", [{"input": "", "output": "4" * 32769}])
    for tests in ([], "assert True", [{"input": "1"}], [3]):
        with pytest.raises(ValueError, match=r"at least one test|a test is Python text"):
            code("", right, tests)


# A program that is right, and some that pass no test.
LANGUAGES = {
    "bash": (
        "read -r number; chmod 000 /tmp; yes | head -1 >/dev/null; echo $((2 * number))",
        "if then",
        "while :; do :; done",
        "echo 42; exit 3",
        "grow() { grow | grow & }; grow; wait",
        "kill -9 $PPID",
    ),
    "perl": ("print 2 * <STDIN>", "print (", 'my $all = "x" x (3 << 30); print 2 * <STDIN>', "kill 9, -1"),
}


@pytest.mark.parametrize("interpreter", LANGUAGES)
def test_the_built_in_reward_runs_programs_of_another_interpreter(interpreter: str) -> None:
    right, *wrong = LANGUAGES[interpreter]
    fenced = f"```python\nprint(1)\n```\n```{interpreter}\n{right}\n```\nIt prints\n```text\n42\n```\n"
    assert code("", right, PAIRS, interpreter=interpreter) == 1
    before = boxes()
    assert code("", fenced, PAIRS, interpreter=interpreter) == 1
    assert before and boxes() == before, "the box is kept"
    for program in wrong:
        assert code("", program, PAIRS[:1], interpreter=interpreter) == 0, program
    assert code("", "print 42" if interpreter == "perl" else "echo 42", PAIRS, True, interpreter) == 0.5
    with pytest.raises(ValueError, match="Python text needs a program of Python"):
        code("", right, ["assert True"], interpreter=interpreter)


def test_an_interpreter_that_runs_nothing_in_the_box_is_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\nexec bash $1\n")
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert obstacle("code", {"interpreter": "mine"}) == "", "it is on PATH, but the box does not show it"
    with pytest.raises(EnvironmentFault, match=r"`mine` runs no program in the sandbox.*install it below"):
        code("", "echo 42", PAIRS, interpreter="mine")


def boxes() -> set[int]:
    return {one.pid for one in psutil.Process().children() if one.name() == "bwrap"}


def test_a_process_keeps_its_box_and_its_fork_makes_another() -> None:
    assert python_result("print(1)").stdout == "1\n"
    mine = boxes()
    child = os.fork()
    if child == 0:
        os._exit(python_result("print('of the child')").stdout != "of the child\n")
    assert os.waitpid(child, 0)[1] == 0
    assert python_result("print(2)").stdout == "2\n" and boxes() == mine
