import asyncio
import socket
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
        "tcp://here",
    )
    assert asyncio.run(calling._control_endpoint(STORE, record)) == "tcp://here"


def test_a_generator_waits_where_an_earlier_learner_has_left_its_socket_file(tmp_path, monkeypatch):
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(path))
    monkeypatch.setattr(calling, "LEARNER_START_S", 0.3)
    for endpoint in (f"ipc://{path}", f"ipc://{tmp_path}/gone"):
        with pytest.raises(
            ControlError, match=f"Last: nobody listens at {endpoint}, where the learner was last"
        ):
            asyncio.run(calling._control_endpoint(STORE, Record(endpoint)))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as learner:
        learner.bind(str(path))
        learner.listen()
        assert asyncio.run(calling._control_endpoint(STORE, Record(f"ipc://{path}"))) == f"ipc://{path}"


def test_it_does_not_wait_for_ever_and_tells_what_it_found_last(monkeypatch):
    monkeypatch.setattr(calling, "LEARNER_START_S", 0.3)
    with pytest.raises(
        ControlError, match=r"redis://s: .* without a learner; start it\. Last: serves no run yet"
    ):
        asyncio.run(calling._control_endpoint(STORE, Record(StoreError("serves no run yet"))))
