"""The callers' side of scorers: after a call without an answer the next one waits until a scorer answers."""

import asyncio

import pytest

from asyncrl.control.scoring import ScorerService, endpoint_of, serve_scores
from asyncrl.rewards.base import Question, Unanswered


def test_a_call_whose_scorer_died_lets_the_next_one_wait_for_its_successor(tmp_path):
    async def scenario() -> list[float]:
        taken = asyncio.Event()

        async def dies(request):
            if request["ids"] != [0, 0]:
                taken.set()
                await asyncio.Event().wait()
            return 0.0

        async def answers(request):
            return float(sum(request["ids"]))

        service = ScorerService("rm", tmp_path, 1, call_s=2.0, remembers=False)
        question = Question(request={"ids": [2, 3]}, read=float)
        await service.start()
        first = asyncio.create_task(serve_scores(endpoint_of(tmp_path, "rm", 0), dies))
        try:
            await service.admit(question)
            lost = asyncio.create_task(service.ask(question))
            await taken.wait()
            first.cancel()
            await asyncio.wait({first})
            with pytest.raises(Unanswered):
                await lost
            waiting = asyncio.create_task(service.admit(question))
            assert not (await asyncio.wait({waiting}, timeout=0.1))[0]
            second = asyncio.create_task(serve_scores(endpoint_of(tmp_path, "rm", 0), answers))
            await waiting
            found = await service.ask(question)
            second.cancel()
            await asyncio.wait({second})
            return [found]
        finally:
            await service.close()

    assert asyncio.run(scenario()) == [5.0]
