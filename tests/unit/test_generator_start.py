import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import ControlError, ForeignRunError, StoreError, StoreRefused
from asyncrl.launch import calling, generator_process
from asyncrl.launch.players import Players
from asyncrl.run.starts import code_of

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


def test_a_generator_joins_with_the_code_that_it_runs_if_that_changed_while_it_read_its_prompts(
    tmp_path, monkeypatch
):
    reward = tmp_path / "reward.py"
    reward.write_text("def f(response): return 0.0")
    config = Config.model_validate(
        {
            "run": {"name": "far"},
            "model": {"path": "none"},
            "data": {"train": "none.jsonl"},
            "reward": {"functions": [{"function": f"{reward}:f"}]},
        }
    )
    hello, before = calling.hello_of(config, "g0", confirm=False), code_of(config)
    ran = mock.AsyncMock()

    def prompts_of(config):
        reward.write_text("def f(response): return 1.0")
        return mock.Mock(fingerprint="rows")

    monkeypatch.setattr(generator_process.PromptSource, "of", prompts_of)
    monkeypatch.setattr(Players, "start", mock.AsyncMock())
    monkeypatch.setattr(Players, "sampler", mock.Mock())
    monkeypatch.setattr(generator_process, "open_engine", mock.AsyncMock())
    monkeypatch.setattr(generator_process, "call_learner", mock.AsyncMock())
    monkeypatch.setattr(generator_process, "usable", lambda endpoint: ("tcp",))
    monkeypatch.setattr(generator_process, "resolve_device", lambda config: "cpu")
    monkeypatch.setattr(generator_process, "open_generator", lambda *_, **__: mock.Mock(run=ran))
    asyncio.run(
        generator_process._generate(config, hello, None, mock.Mock(), mock.Mock(), tmp_path, mock.Mock())
    )
    (joined,) = ran.call_args.args
    assert joined.code == code_of(config) != before and joined.incarnation == hello.incarnation
