"""docs/security.md says what the code does: the users to make in a store of one's own, and tests that exist."""

import re
from pathlib import Path

import pytest

from asyncrl.buffer.users import GENERATOR, LEARNER, generator_rules, learner_rules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.parametrize(("user", "rules"), [(LEARNER, learner_rules("NAME")), (GENERATOR, generator_rules("NAME"))])
def test_the_users_to_make_are_those_that_a_run_makes(user, rules):
    assert f"ACL SETUSER {user} on >PASSWORD {rules}" in " ".join(PAGE.split())


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[^`]+)`", PAGE)
    assert len(named) >= 8
    assert [path for path in named if not (ROOT / path).exists()] == []
