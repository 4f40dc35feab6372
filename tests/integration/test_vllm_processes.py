"""The engine's processes: their death is noticed, and they never outlive the generator."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.engine.base import SamplingSpec
from asyncrl.errors import EngineError
from tests.support.vllm_engines import STORIES, needs_stories, running_engine
from tests.support.waiting import HANG, LONG_S, until, wait_until_ended

pytestmark = [pytest.mark.integration, needs_stories]


@pytest.mark.parametrize(("victim", "ranks"), [("VLLM::Worker", 2), ("VLLM::EngineCore", 1)])
def test_a_dead_engine_process_is_an_engine_error_soon(victim, ranks):
    before = set(engine_processes())  # such as the warm sandbox of another test
    with running_engine(STORIES, tensor_parallel=ranks) as (runner, engine):
        processes = [process for process, command in living_children() if victim in command]
        assert processes, "the engine's processes are found by name"
        workers = sum("VLLM::Worker" in command for _, command in living_children())
        assert workers == (ranks if ranks > 1 else 0), "one rank runs in the core, as on a GPU"

        async def scenario():
            task = asyncio.create_task(
                engine.sample([1, 300], 64, SamplingSpec(temperature=1.0, max_response_tokens=256))
            )
            await until(lambda: engine._sampled()[1])
            os.kill(processes[0].pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="died"):
                await asyncio.wait_for(task, LONG_S)
            with pytest.raises(EngineError, match="died"):
                await asyncio.wait_for(engine.begin_update(), LONG_S)

        runner.run(scenario())
    assert set(engine_processes()) <= before


def living_children():
    """Processes below this one with their command lines, but none that has ended and awaits its parent."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process, " ".join(process.cmdline())


def engine_processes():
    return [process for process, command in living_children() if "resource_tracker" not in command]


PARENT = """
import sys
sys.path.insert(0, {root!r})
from tests.support.vllm_engines import running_engine, STORIES
import os, psutil, time
if __name__ == "__main__":
    with running_engine(STORIES, tensor_parallel={ranks}):
        method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        print("children", method, *[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
        {hang}
"""


@pytest.mark.parametrize(("ranks", "method", "least"), [(1, "fork", 1), (2, "spawn", 3)])
def test_no_process_outlives_a_killed_parent(tmp_path, ranks, method, least):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(root=str(Path(__file__).parents[2]), ranks=ranks, hang=HANG))
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}  # as a generator's
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        line = next(line for line in parent.stdout if line.startswith("children"))
        found, *pids = line.split()[1:]
        children = [psutil.Process(int(pid)) for pid in pids]
        assert found == method and len(children) >= least, "the engine's core, and workers of several ranks"
        parent.kill()
        parent.wait(120)
        wait_until_ended(children)
    finally:
        parent.kill()


SAMPLES = """
import sys
sys.path.insert(0, {root!r})
from asyncrl.engine.base import SamplingSpec
from tests.support.vllm_engines import running_engine, STORIES
if __name__ == "__main__":
    with running_engine(STORIES) as (runner, engine):
        runner.run(engine.score([1, 300, 301]))
        runner.run(engine.sample([1, 300], 4, SamplingSpec(temperature=1.0, max_response_tokens=8)))
"""


def test_no_request_waits_for_a_compiler(tmp_path):
    script, compiled = tmp_path / "samples.py", tmp_path / "compiled"
    script.write_text(SAMPLES.format(root=str(Path(__file__).parents[2])))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    subprocess.run([sys.executable, str(script)], check=True, timeout=280, env=environment)
    assert not [*compiled.rglob("*.so")]
