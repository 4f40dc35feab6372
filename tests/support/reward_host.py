"""`reward_host.py CONFIG RUN_ROOT` stands for a generator: a pool of one worker; each line of its input is a
row to score."""

import asyncio
import json
import sys
import time
from pathlib import Path

from asyncrl.config.reward_section import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.rewards.base import RewardInput
from asyncrl.rewards.opened import Rewards


def say(answer: dict) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def main() -> None:
    pool = Rewards(RewardConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
    await pool.start()
    say({})
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            started_s = time.perf_counter()
            answer: dict[str, object] = {}
            try:
                (score,) = await pool.score([RewardInput(prompt="", response="", row=json.loads(line))])
                answer["score"] = score.total
            except RewardError as error:
                answer["error"] = str(error)
            say(answer | {"seconds": time.perf_counter() - started_s})
    finally:
        await pool.close()


asyncio.run(main())
