"""The simulation notices mutants: here some, in `python -m reliability.simulation.mutants` all."""

import json
import shutil

import pytest

from reliability.simulation.mutant_table import MUTANTS, Edit
from reliability.simulation.mutants import ROOT, check_matches, try_mutant

RESULTS = ROOT / "bench" / "results" / "mutants.json"
pytestmark = pytest.mark.timeout(900)
QUICK = (
    "leased one beyond the credit",
    "no fence",
    "a commit forgets one take only",
    "takes that go on from the ledger are forgotten",
)
"""At least every fourth seed notices each, so other draws, as by a new kind of fault, change nothing."""


def test_every_mutant_still_finds_the_text_that_it_replaces():
    assert len(MUTANTS) >= 100
    check_matches()


def test_a_text_that_is_not_there_is_an_error(tmp_path):
    edit = Edit("asyncrl/buffer/functions.lua", "local function anchor(k)", "")
    copy = tmp_path / edit.path
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / edit.path, copy)
    edit.apply(tmp_path)
    with pytest.raises(LookupError, match=r"functions.lua no longer contains 'local function anchor"):
        edit.apply(tmp_path)


def test_nearly_all_were_noticed_and_the_others_are_explained():
    verdicts = json.loads(RESULTS.read_text())["mutants"]
    assert list(verdicts) == [mutant.what for mutant in MUTANTS]
    killed = {what for what, verdict in verdicts.items() if verdict["how"]}
    assert len(killed) >= 0.95 * len(verdicts)
    assert verdicts.keys() - killed == {mutant.what for mutant in MUTANTS if mutant.survives}


@pytest.mark.parametrize("what", QUICK)
def test_a_mutant_is_noticed(what):
    (mutant,) = [mutant for mutant in MUTANTS if mutant.what == what]
    verdict = try_mutant(mutant, seeds=40)
    assert "Violation" in verdict.how, verdict
