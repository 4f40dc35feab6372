import asyncio
from types import SimpleNamespace

import pytest

from asyncrl.errors import ControlError, ForeignRunError, StoreError, StoreRefused
from asyncrl.launch import calling

STORE = SimpleNamespace(url="redis://s")


class Record:
    """Answers in turn, the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def read(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(control_endpoint=answer)


def test_a_generator_that_is_there_before_the_learner_waits_for_it_whatever_the_store_says_till_then():
    record = Record(
        StoreError("serves no run yet"),
        StoreRefused("changed"),
        ForeignRunError("another secret"),
        "",
        "ipc://here",
    )
    assert asyncio.run(calling._control_endpoint(STORE, record)) == "ipc://here"


def test_it_does_not_wait_for_ever_and_tells_what_it_found_last(monkeypatch):
    monkeypatch.setattr(calling, "LEARNER_START_S", 0.3)
    with pytest.raises(
        ControlError, match=r"redis://s: .* without a learner; start it\. Last: serves no run yet"
    ):
        asyncio.run(calling._control_endpoint(STORE, Record(StoreError("serves no run yet"))))
