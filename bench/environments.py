"""Tool calls, steps and episodes per second through the processes of an environment.

"pool" calls a tool straight through the workers; "loop" plays whole episodes, with the check of arguments and
the conversation; "text" forks a process for each episode; "rollout" plays in one process. The model's answers
cost nothing, so these are upper limits. "own_cpu_us" is what one of them costs the generator's process, and
"own_cpu_share" the share of a core that it got.

    python -m bench.environments [--workers 2] [--seconds 5] [--json FILE]
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.config.environment_section import EnvironmentConfig
from asyncrl.environments.base import Answer, BudgetSpent, ToolCall
from asyncrl.environments.environments import Environments
from bench.environment import describe, report

CODE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

class Count:
    def reset(self, seed):
        self.left = 10
        return "go"
    def step(self, response):
        self.left -= 1
        return "on", 0.0, self.left == 0

async def rollout(session, seed):
    for _ in range(10):
        await session.complete("go")
    return 1.0
'''
IN_FLIGHT = 256
TURNS = 10
PROMPT = [{"role": "user", "content": "2+3?"}]
CALL = ToolCall(id="c", name="add", arguments={"a": 2, "b": 3})


class FreeTalk:
    """Answers immediately: a call of the tool ten times, and then none."""

    def __init__(self):
        self.left = TURNS

    async def chat(self, messages, *, tools=(), **options):
        self.left -= 1
        return Answer(text="", tool_calls=(CALL,) if self.left >= 0 else ())

    async def complete(self, text, **options):
        if not self.left:
            raise BudgetSpent("turns")
        self.left -= 1
        return Answer(text="go")

    def score_turn(self, reward, state=None):
        pass


async def repeated(one, seconds, units):
    """Units per second of `one()`, `IN_FLIGHT` of which run at any time."""
    count, until = 0, time.perf_counter() + seconds

    async def go_on():
        nonlocal count
        while time.perf_counter() < until:
            await one()
            count += units

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(go_on() for _ in range(IN_FLIGHT)))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "per_second": round(count / wall),
        "own_cpu_share": round(cpu / wall, 2),
        "own_cpu_us": round(1e6 * cpu / count),
    }


async def measure(file, name, workers, seconds):
    """Rates of one environment."""
    uses = (f"{file}:{name}",) if name == "add" else f"{file}:{name}"
    played = Environments(EnvironmentConfig(uses=uses, workers=workers, step_s=60))
    await played.start()
    try:
        row = {"seed": 1}
        prompt = PROMPT if name == "add" else ""

        async def episode():
            await played.play(FreeTalk(), row, prompt=prompt, seed=1, episode=0)

        found = {f"{name}, turns of whole episodes": await repeated(episode, seconds, TURNS)}
        if name == "add":
            request = {"do": "call", "name": "add", "arguments": CALL.arguments, "limit": 1000}
            pool: Any = played._shared
            found["add, calls"] = await repeated(lambda: pool.ask(request), seconds, 1)
        return found
    finally:
        await played.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    rates = {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "mine.py"
        file.write_text(CODE)
        for name in ("add", "Count", "rollout"):
            rates |= asyncio.run(measure(file, name, asked.workers, asked.seconds))
    load = [round(one, 1) for one in os.getloadavg()]
    report({"environment": describe(), "workers": asked.workers, "load": load, "rates": rates}, asked.json)


if __name__ == "__main__":
    main()
