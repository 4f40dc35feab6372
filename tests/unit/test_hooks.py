"""A user's hooks: found, called, published; and every mistake of theirs named."""

import signal

import pytest

from asyncrl.batch.hooks import Hooks
from asyncrl.config.base import Choice
from asyncrl.errors import ConfigError

SOURCE = """
class Counting:
    def __init__(self, start=0):
        self.count = start

    def before_step(self, plan):
        self.count += 1
        return {"count": self.count, plan: 2}

class After:
    def after_step(self, step):
        return None

class Empty:
    pass

class Raising:
    def after_step(self, step):
        return {"x": 1 / 0}

class Leaving:
    def __init__(self, status=None):
        if status is not None:
            raise SystemExit(status)

    def after_step(self, step):
        raise SystemExit

class Misshapen:
    def before_step(self, plan):
        return plan
"""


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return lambda *names, **params: Hooks.load([Choice(name=f"{file}:{name}", **params) for name in names])


def test_a_hook_has_a_state_of_its_own_and_its_numbers_a_prefix(load):
    hooks = load("Counting", start=5)
    assert hooks.before_step("plan") == {"hook/count": 6.0, "hook/plan": 2.0}
    assert hooks.before_step("plan") == {"hook/count": 7.0, "hook/plan": 2.0}
    assert hooks.after_step("step") == {}


def test_hooks_may_have_one_method_and_return_nothing(load):
    hooks = load("After", "Counting")
    assert hooks.after_step("step") == {}
    assert hooks.before_step("b") == {"hook/count": 1.0, "hook/b": 2.0}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Empty", {}, r"mine\.py:Empty` has no method before_step or after_step"),
        ("Missing", {}, r"cannot load `.*mine\.py:Missing`"),
        ("Leaving", {"status": 0}, r"Leaving` cannot be made with {'status': 0}: SystemExit: 0 \(.*mine\.py"),
        ("Counting", {"begin": 1}, r"Counting` cannot be made with {'begin': 1}: TypeError: .*begin"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_at_start(load, name, params, message):
    with pytest.raises(ConfigError, match=message):
        load(name, **params)


def test_a_name_without_a_place_is_refused():
    with pytest.raises(ConfigError, match=r"`Counting` is not a class; write `path\.py:Class` or"):
        Hooks.load([Choice(name="Counting")])


def test_an_exception_stops_the_run_naming_hook_method_and_line(load):
    line = SOURCE.split("\n").index('        return {"x": 1 / 0}') + 1
    with pytest.raises(
        ConfigError, match=rf"Raising`\.after_step failed: ZeroDivisionError: .*mine\.py:{line}\)"
    ) as caught:
        load("Raising").after_step("step")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exit_by_user_code_stops_the_run_and_one_by_sigterm_stays_one(load):
    with pytest.raises(ConfigError, match=r"Leaving`\.after_step failed: SystemExit"):
        load("Leaving").after_step("step")
    with pytest.raises(SystemExit):
        load("Leaving", status=128 + signal.SIGTERM)


@pytest.mark.parametrize("returned", [1.0, ["x"], {"x": "1"}, {"x": None}, {"x": True}])
def test_what_is_no_metric_is_refused(load, returned):
    with pytest.raises(ConfigError, match=r"Misshapen`\.before_step returned .*mapping of names to numbers"):
        load("Misshapen").before_step(returned)


def test_a_number_that_no_float_holds_names_the_hook(load):
    with pytest.raises(ConfigError, match=r"Misshapen`\.before_step failed: OverflowError"):
        load("Misshapen").before_step({"x": 10**400})
