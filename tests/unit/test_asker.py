"""Questions to a service, in virtual time: what takes time of a call, and what does not."""

from collections import Counter

import pytest

from asyncrl.config.reward_section import RewardConfig
from asyncrl.errors import RewardError
from asyncrl.rewards.base import Question, Unanswered
from asyncrl.rewards.opened import Asker
from tests.support.waiting import elapse, in_virtual_time

LIMIT_S = 10.0
OUTAGE_S = 700.0


class Failing:
    """A service that loses the first calls of each question, after `lost_s`, and is away after each."""

    remembers = False

    def __init__(self, lost: int, lost_s: float) -> None:
        self._lost, self._lost_s, self._left, self._is_away = lost, lost_s, 0, True

    async def start(self) -> None: ...

    def questions(self, one: object) -> list[Question]:
        raise NotImplementedError

    async def admit(self, question: Question) -> None:
        if self._is_away:
            await elapse(OUTAGE_S)
        self._is_away = False

    async def ask(self, question: Question) -> float:
        if self._left < self._lost:
            self._left += 1
            await elapse(self._lost_s)
            self._is_away = True
            raise Unanswered("nobody answered", reason="unavailable")
        self._left = 0
        return 1.0

    async def close(self) -> None: ...


class Confused(Failing):
    """A service that loses the first call, and whose later answers cannot be read."""

    async def ask(self, question: Question) -> float:
        if self._left == self._lost:
            await elapse(LIMIT_S / 2)
            raise Unanswered("no score", reason="unreadable")
        return await super().ask(question)


def answers(lost: int, lost_s: float, questions: int, kind: type[Failing] = Failing) -> Counter[str]:
    """Ask one question after the other. Returns the counts."""
    counts: Counter[str] = Counter()
    config = RewardConfig.model_validate({"functions": [], "timeout_s": LIMIT_S})

    async def run() -> None:
        asker = Asker("the scorer", kind(lost, lost_s), config, counts)
        for _ in range(questions):
            question = Question(request={}, read=lambda reply: (reply, ""))
            assert await asker.answer(question) == (1.0, "")
        await asker.close()

    in_virtual_time(run())
    return counts


@pytest.mark.parametrize(("lost", "lost_s"), [(1, LIMIT_S / 2), (3, 2.0)])
def test_the_wait_for_a_service_that_comes_back_takes_no_time_of_the_call_in_any_outage(lost, lost_s):
    counts = answers(lost, lost_s, questions=4)
    assert counts["reward_retries"] == 4 * lost and counts["reward_calls"] == 4 * (lost + 1)


def test_the_time_in_which_a_service_does_not_answer_is_limited():
    with pytest.raises(
        RewardError, match="the scorer took longer than 10 s; the last answer: nobody answered"
    ):
        answers(9, 4.0, questions=1)
    with pytest.raises(RewardError, match=r"the scorer took longer than 10 s$"):
        answers(1, LIMIT_S + 1.0, questions=1)
    with pytest.raises(RewardError, match="the scorer took longer than 10 s; the last answer: no score"):
        answers(1, 1.0, questions=1, kind=Confused)
