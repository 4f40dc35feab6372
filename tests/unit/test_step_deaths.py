"""A step that every learner dies of is not repeated for ever: its groups, and no others, are set aside."""

import os

import pytest

from asyncrl.buffer.base import BufferRules
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.launch.step_deaths import MAX_DEATHS, StepDeaths
from tests.support.intakes import B, frame, ids_of, intake

BAD = [b"a", b"b"]


def die_in(path, version, frames, times=MAX_DEATHS):
    for _ in range(times):
        StepDeaths(path).begin(version, frames)


def test_the_frames_of_a_step_are_set_aside_after_as_many_deaths(tmp_path):
    path = tmp_path / "step.json"
    die_in(path, 7, BAD, MAX_DEATHS - 1)
    assert StepDeaths(path).reason(b"a") is None
    die_in(path, 7, BAD, 1)
    deaths = StepDeaths(path)
    assert (
        deaths.reason(b"a")
        == deaths.reason(b"b")
        == "3 learners died as they trained on the 2 groups of step 8"
    )
    assert deaths.reason(b"c") is None
    assert StepDeaths(path).reason(b"a"), "a start that begins no step changes nothing"


@pytest.mark.parametrize(
    "between", ["another step ends", "the step ends", "other bytes", "an earlier step is made again"]
)
def test_only_deaths_in_a_row_in_one_step_count(tmp_path, between):
    path = tmp_path / "step.json"
    die_in(path, 7, BAD, MAX_DEATHS - 1)
    if between == "other bytes":
        die_in(path, 7, [b"c"], 1)
    elif between == "an earlier step is made again":
        die_in(path, 6, [b"x"], 1)
    else:
        version, frames = (7, BAD) if between == "the step ends" else (6, [b"x"])
        once = StepDeaths(path)
        once.begin(version, frames)
        once.end(version)
    die_in(path, 7, BAD, 1)
    is_in_a_row = between in ("another step ends", "an earlier step is made again")
    assert bool(StepDeaths(path).reason(b"a")) is is_in_a_row


def test_what_kills_is_found_although_the_groups_beside_it_change(tmp_path):
    """Those that the weights of a dead learner have sampled are lost with it, and sampled anew."""
    path = tmp_path / "step.json"
    for life in range(MAX_DEATHS):
        assert StepDeaths(path).reason(b"a") is None
        die_in(path, 7, [b"a", b"beside it, life %d" % life], 1)
    deaths = StepDeaths(path)
    assert deaths.reason(b"a") == "3 learners died as they trained on the 1 groups of step 8"
    assert not any(deaths.reason(b"beside it, life %d" % life) for life in range(MAX_DEATHS))


def test_a_group_that_a_deadly_step_was_without_begins_again(tmp_path):
    path = tmp_path / "step.json"
    die_in(path, 7, BAD, MAX_DEATHS - 1)
    die_in(path, 7, [b"a", b"c"], 1)
    die_in(path, 7, BAD, 1)
    deaths = StepDeaths(path)
    assert deaths.reason(b"a") and not deaths.reason(b"b") and not deaths.reason(b"c")


def test_who_waits_or_saves_dies_of_no_step(tmp_path):
    path = tmp_path / "step.json"
    for _ in range(2 * MAX_DEATHS):
        deaths = StepDeaths(path)
        deaths.begin(7, BAD)
        deaths.end(7)
    assert StepDeaths(path).reason(b"a") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"begun": [1], "steps": {"7": {"a": 9}}}',
        '{"begun": 7, "steps": {"x": 1}}',
        '{"begun": 7, "steps": 1}',
        '{"begun": 7, "steps": {"7": [["a"], 9]}}',
        '{"begun": 7, "steps": {"7": {"a": "x"}}}',
    ],
)
def test_a_damaged_record_counts_as_none(tmp_path, text):
    path = tmp_path / "step.json"
    path.write_text(text)
    assert StepDeaths(path).reason(b"a") is None
    die_in(path, 7, BAD)
    assert StepDeaths(path).reason(b"a")


def test_a_record_that_cannot_be_written_holds_up_nobody(tmp_path):
    (tmp_path / "step.json").mkdir()
    deaths = StepDeaths(tmp_path / "step.json")
    deaths.begin(7, BAD)
    deaths.end(7)
    os.rmdir(tmp_path / "step.json")
    deaths.begin(7, BAD)
    assert (tmp_path / "step.json").is_file()


def test_a_run_gets_over_a_step_that_kills_every_learner(tmp_path):
    """Each learner recovers from the beginning, the last checkpoint; ids stay consumed once, audits agree."""
    buffer, lives = MemoryBuffer(BufferRules(groups=B)), []
    generator = buffer.peer()
    for _ in range(MAX_DEATHS + 1):
        deaths = StepDeaths(tmp_path / "step.json")
        one = intake(buffer.peer())
        one.gate = type(one.gate)(
            lane="train", decode=one.gate.decode, limits=one.gate.limits, condemned=deaths.reason
        )
        for ticket in generator.lease("g", 100).tickets:
            generator.put("g", ticket.id, frame(ticket.id))
        collected = one.poll(0, wait_s=0)
        lives.append(ids_of(collected))
        deaths.begin(0, buffer.frames(lives[-1]))
        if 2 not in lives[-1]:  # what kills
            deaths.end(0)
            break
    assert lives == [[1, 2, 3, 4]] * MAX_DEATHS + [[5, 6, 7, 8]]
    assert [(group.ticket_id, reason.split(":")[0]) for group, reason in collected.rejected] == [
        (n, "deadly") for n in (1, 2, 3, 4)
    ]
    assert one.ledger.rejected == {"deadly": B} and one.ledger.trained == B
    assert buffer.audit().missing == 0

    again = intake(buffer.peer())
    assert ids_of(again.poll(0, wait_s=0)) == [5, 6, 7, 8], (
        "who goes back once more meets the reasons in the store"
    )
    assert again.ledger.to_dict() == one.settled
