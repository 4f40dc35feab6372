"""One step's groups: every id is booked once, rejected ones are refilled, a forgetful store is healed."""

import itertools
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from asyncrl.buffer.base import BufferRules, GeneratorBuffer, kind_of
from asyncrl.buffer.intake import Intake
from asyncrl.buffer.judge import MOST_KINDS, make_judge
from asyncrl.buffer.memory import MemoryBuffer
from asyncrl.buffer.shards import ShardedBuffer, ShardedIntake, join
from asyncrl.errors import RunError
from asyncrl.lineage import History, Weights
from asyncrl.types import Group, Rollout, VersionSpan, version_spans
from asyncrl.wire.group_frames import encode_group
from tests.support.intakes import GATE, B, frame, ids_of, intake


def generate(buffer: GeneratorBuffer, count: int) -> list[int]:
    ids = [ticket.id for ticket in buffer.lease("g", count).tickets]
    for ticket_id in ids:
        buffer.put("g", ticket_id, frame(ticket_id))
    return ids


@pytest.fixture
def buffer() -> MemoryBuffer:
    return MemoryBuffer(BufferRules(groups=B))


def test_nothing_is_handed_out_until_the_step_is_whole(buffer):
    one = intake(buffer)
    assert generate(buffer.peer(), 3) == [1, 2, 3]
    assert one.poll(0, wait_s=0) is None
    assert one.ledger.consumed == 0
    generate(buffer.peer(), 1)
    assert ids_of(one.poll(0, wait_s=0)) == [1, 2, 3, 4]
    assert (one.ledger.trained, one.ledger.consumed) == (4, 4)


def test_a_rejected_group_gives_its_credit_back_and_is_refilled(buffer):
    one = intake(buffer, judge=lambda group, version: "zero_variance" if group.ticket_id in (2, 3) else None)
    generator = buffer.peer()
    assert generate(generator, 100) == list(range(1, 9))  # (L + 1) B and no more
    collected = one.poll(0, wait_s=0)
    assert ids_of(collected) == [1, 4, 5, 6]
    assert [(group.ticket_id, reason) for group, reason in collected.rejected] == [
        (2, "zero_variance"),
        (3, "zero_variance"),
    ]
    assert collected.takes == 2
    assert generate(generator, 100) == [9, 10]
    assert one.ledger.rejected == {"zero_variance": 2}
    assert one.ledger.consumed == one.ledger.trained + one.ledger.total_rejected


def test_a_dead_ticket_is_counted_and_refilled(buffer):
    one = intake(buffer)
    generator = buffer.peer()
    ids = [ticket.id for ticket in generator.lease("g", 8).tickets]
    tombstone = encode_group(Group.dead(1, "reward timed out", generator_id="g", version=0))
    for _ in range(2):
        assert not generator.fail("g", 1, "reward timed out", tombstone)
        assert [ticket.id for ticket in generator.lease("g", 1).tickets] == [1]
    assert generator.fail("g", 1, "reward timed out", tombstone)
    for ticket_id in ids[1:]:
        generator.put("g", ticket_id, frame(ticket_id))
    assert ids_of(one.poll(0, wait_s=0)) == [2, 3, 4, 5]
    assert one.ledger.rejected == {"dead": 1}


@pytest.mark.parametrize("rubbish", [b"rubbish", frame(3)], ids=["no frame", "another group's frame"])
def test_a_frame_that_is_none_is_issued_again_and_nothing_is_lost(buffer, rubbish):
    one = intake(buffer)
    generator = buffer.peer()
    for ticket in generator.lease("g", B).tickets:
        generator.put("g", ticket.id, rubbish if ticket.id == 2 else frame(ticket.id))
    assert one.poll(0, wait_s=0) is None
    assert [ticket.id for ticket in generator.lease("other", 1).tickets] == [2]
    generator.put("other", 2, frame(2))
    assert sorted(ids_of(one.poll(0, wait_s=0))) == [1, 2, 3, 4]
    assert one.ledger.consumed == 4
    assert buffer.audit().missing == 0


def test_a_ticket_whose_frames_never_decode_is_dead_after_its_attempts():
    buffer = MemoryBuffer(BufferRules(groups=B, max_attempts=3))
    one = intake(buffer)
    generator, offered, rejected = buffer.peer(), 0, []
    for version in range(4):
        one.open(version)
        for _ in range(20):
            for ticket in generator.lease("g", B).tickets:
                offered += ticket.id == 2
                generator.put("g", ticket.id, b"rubbish" if ticket.id == 2 else frame(ticket.id))
            if (collected := one.poll(version, wait_s=0)) is not None:
                rejected += collected.rejected
                break
    assert offered == 3
    ((dead, reason),) = rejected
    assert (dead.ticket_id, reason.split(": ")[:2], one.ledger.rejected) == (
        2,
        ["dead", "undecodable"],
        {"dead": 1},
    )
    assert (buffer.audit().counters["dead"], buffer.audit().missing) == (1, 0)


def sampled_by(*weights: tuple[int, int]) -> Group:
    """One token by each (version, lineage)."""
    group = sampled_at(*(version for version, _ in weights))
    spans = tuple(VersionSpan(version, 1, lineage) for version, lineage in weights)
    return replace(group, rollouts=(replace(group.rollouts[0], version_spans=spans),))


def sampled_at(*versions: int, greedy_reward: float | None = None) -> Group:
    """A group of one rollout with a token of each version."""
    rollout = Rollout(
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.arange(len(versions), dtype=np.int32),
        action_mask=np.ones(len(versions), dtype=np.bool_),
        behaviour_logprobs=np.full(len(versions), -0.5, dtype=np.float32),
        version_spans=version_spans(map(Weights, versions)),
        finish_reason="stop",
    )
    return Group(
        ticket_id=1,
        rollouts=(rollout,),
        generator_id="g",
        finished_version=max(versions),
        greedy_reward=greedy_reward,
    )


def test_no_token_newer_than_the_version_being_trained_passes_the_judge():
    judge = make_judge((), drop_older_than=None)
    for versions in [(5,), (0, 5), (5, 5)]:
        assert judge(sampled_at(*versions), 5) is None
    for versions in [(6,), (0, 6), (5, 9, 5)]:
        assert judge(sampled_at(*versions), 5) == "discarded_lineage"


def test_no_token_of_a_lost_history_passes_the_judge_whatever_its_number():
    history = History(9, (Weights(0), Weights(4, 7)))
    judge = make_judge((), drop_older_than=None, history=history)
    for weights in [(0, 0), (4, 7), (1, 7), (5, 9), (6, 9)]:
        assert judge(sampled_by((0, 0), weights), 6) is None, weights
    for weights in [(1, 0), (5, 7), (6, 7), (4, 8), (0, 8), (7, 9)]:
        assert judge(sampled_by((0, 0), weights), 6) == "discarded_lineage", weights
        assert judge(sampled_by(weights, (6, 9)), 6) == "discarded_lineage", weights


def test_the_judge_looks_at_every_span_of_every_rollout():
    good, bad = sampled_by((5, 0)).rollouts[0], sampled_by((5, 0), (9, 0)).rollouts[0]
    judge = make_judge((), drop_older_than=5)
    for rollouts in [(good, good, bad), (bad, good), (good, bad, good)]:
        group = replace(sampled_at(5), rollouts=rollouts)
        assert judge(group, 5) == "discarded_lineage"
        assert judge(group, 9) is None and judge(group, 11) == "stale"


def test_groups_of_a_discarded_lineage_are_refilled_however_many_there_are(buffer):
    one = intake(buffer, judge=make_judge((), drop_older_than=None), max_refills=1)
    generator, newer = buffer.peer(), 5 * B
    for _ in range(20):
        for ticket in generator.lease("g", 100).tickets:
            generator.put("g", ticket.id, frame(ticket.id, version=7 if ticket.id <= newer else 0))
        if (collected := one.poll(0, wait_s=0)) is not None:
            break
    assert ids_of(collected) == [newer + 1, newer + 2, newer + 3, newer + 4]
    assert one.ledger.rejected == {"discarded_lineage": newer}


def test_a_group_whose_images_do_not_fit_is_counted_by_the_reason_and_not_trained(buffer):
    def fault(group: Group) -> str | None:
        return "image_changed: row 2: another picture" if group.ticket_id == 2 else None

    one = intake(buffer, judge=make_judge((), drop_older_than=None, fault=fault))
    generator = buffer.peer()
    for _ in range(3):
        for ticket in generator.lease("g", 100).tickets:
            generator.put("g", ticket.id, frame(ticket.id))
        if (collected := one.poll(0, wait_s=0)) is not None:
            break
    assert ids_of(collected) == [1, 3, 4, 5] and one.ledger.rejected == {"image_changed": 1}


def test_a_group_without_the_greedy_reward_that_the_advantage_needs_is_not_trained():
    judge = make_judge((), drop_older_than=None, needs_greedy=True)
    assert judge(sampled_at(0), 0) == "no_greedy_reward"
    assert judge(sampled_at(0, greedy_reward=0.0), 0) is None
    assert make_judge((), drop_older_than=None)(sampled_at(0), 0) is None


def test_endless_rejection_stops_with_an_explanation(buffer):
    one = intake(buffer, judge=lambda group, version: "zero_variance", max_refills=2)
    with pytest.raises(RunError, match=r"'zero_variance': \d+.*only 0 of 4 accepted"):
        for _ in range(20):
            generate(buffer.peer(), 100)
            one.poll(0, wait_s=0)


def fail_all(buffer: GeneratorBuffer, reasons: list[str]) -> None:
    """Let every attempt of all tickets fail."""
    while ids := [ticket.id for ticket in buffer.lease("g", 100).tickets]:
        for ticket_id in ids:
            text = reasons[ticket_id % len(reasons)].format(ticket_id)
            dead = Group.dead(ticket_id, text, generator_id="g", version=0)
            buffer.fail("g", ticket_id, text, encode_group(dead))


def test_a_run_in_which_every_ticket_dies_says_so_and_ends(buffer):
    """Long before `max_refills`, whose message would blame a single step."""
    one = intake(buffer, max_refills=10)
    reasons = itertools.cycle(["f returned None for row {}", "KeyError: 'answer'"])
    generator = buffer.peer()
    with pytest.raises(RunError) as found:
        for _ in range(3):
            fail_all(generator, [next(reasons)] * 2 + [next(reasons)])
            assert one.poll(0, wait_s=0) is None
    said = str(found.value)
    counts = {text: int(count) for count, text in re.findall(r"^  (\d+) x (.*)$", said, re.MULTILINE)}
    assert f"all {sum(counts.values())} groups that have arrived have failed" in said
    assert 8 <= sum(counts.values()) <= 12 and len(counts) == 2, said
    first, second = counts
    assert first.startswith("dead: f returned None for row ") and second == "dead: KeyError: 'answer'"


def test_a_run_of_which_one_group_could_be_trained_goes_on(buffer):
    one = intake(buffer, max_refills=10)
    generate(buffer.peer(), 1)
    for _ in range(5):
        fail_all(buffer.peer(), ["a judge does not answer"])
        assert one.poll(0, wait_s=0) is None
    assert one.ledger.rejected["dead"] > 8


def test_endless_faults_are_not_blamed_on_the_prompts(buffer):
    reasons = itertools.cycle(
        ["zero_variance", "filter_failed: KeyError: 'a'", "filter_failed: KeyError: 'b'"]
    )
    one = intake(buffer, judge=lambda group, version: next(reasons), max_refills=2)
    with pytest.raises(
        RunError, match=r"\{'zero_variance': 4, 'filter_failed': 8\}.*fix.*`filter_failed: KeyError: 'b'`"
    ):
        for _ in range(20):
            generate(buffer.peer(), 100)
            one.poll(0, wait_s=0)


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("short: 3 tokens", "short: 3 tokens"),
        ("mean reward 0.35", "mean_reward_0.35: mean reward 0.35"),
        ("a/b\n:c", "a_b: a/b :c"),
        ("", "unnamed:"),
        ("ä" * 100, "_" * 40 + ": " + "ä" * 100),
        ("x: " + "y" * 5000, "x: " + "y" * 997),
        (True, "filter_failed: TypeError: a filter returned True; it must return a reason, as text, or None"),
    ],
)
def test_the_kind_of_a_filters_reason_is_a_legal_name(buffer, reason, kept):
    one = intake(buffer, judge=lambda group, version: reason if group.ticket_id == 1 else None)
    generate(buffer.peer(), 100)
    [(_, said)] = one.poll(0, wait_s=0).rejected
    assert said == kept
    assert one.ledger.rejected == {kind_of(kept): 1}


def test_reasons_that_all_differ_count_as_a_bounded_number_of_kinds(buffer, caplog):
    one = intake(
        buffer,
        judge=lambda group, version: f"mean {group.ticket_id}" if group.ticket_id <= 50 else None,
        max_refills=20,
    )
    while one.poll(0, wait_s=0) is None:
        generate(buffer.peer(), 100)
    assert one.ledger.rejected == {f"mean_{ticket_id}": 1 for ticket_id in range(1, MOST_KINDS + 1)} | {
        "other": 50 - MOST_KINDS
    }
    [message] = [
        record.getMessage() for record in caplog.records if "kinds of reasons" in record.getMessage()
    ]
    assert "`mean 21`" in message


def test_what_was_issued_before_the_learner_came_is_not_held_against_its_filters(buffer):
    intake(buffer, max_lag=9)
    generate(buffer.peer(), 100)
    before = buffer.audit().issued
    resumed = intake(
        buffer.peer(),
        judge=lambda group, version: "short" if group.ticket_id <= before else None,
        max_refills=1,
    )
    for _ in range(30):
        generate(buffer.peer(), 100)
        if (collected := resumed.poll(0, wait_s=0)) is not None:
            break
    assert ids_of(collected) == [before + 1, before + 2, before + 3, before + 4]
    assert resumed.ledger.rejected == {"short": before}


def test_a_run_that_rejects_every_group_ends_however_slowly_they_come(buffer, monkeypatch):
    """The silence before each has the store repaired, and the repair must forget no rejection."""
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    one = intake(buffer, judge=lambda group, version: "zero_variance", max_refills=2, stall_s=1800.0)
    recoveries, mend = [], buffer.recover
    monkeypatch.setattr(
        buffer, "recover", lambda *args, **more: (recoveries.append(now_s[0]), mend(*args, **more))
    )
    with pytest.raises(RunError, match=r"12 groups were rejected in 3 takes \({'zero_variance': 12}\)"):
        for poll in range(100):
            now_s[0] = 40.0 * poll
            assert one.poll(0, wait_s=0.0) is None
            if poll % 3 == 0:
                generate(buffer.peer(), 1)
    assert len(recoveries) > 5


@pytest.mark.parametrize("shards", [1, 2])
def test_groups_that_died_before_a_resume_do_not_end_the_mended_run(shards):
    """Shards number their tickets each from 1, and the groups carry the ids of the lane."""
    buffers = [MemoryBuffer(BufferRules(groups=B)) for _ in range(shards)]

    def intakes() -> list[Intake]:
        return [
            intake(buffer.peer(), max_lag=4, gate=replace(GATE, name_of=partial(join, shard, shards=shards)))
            for shard, buffer in enumerate(buffers)
        ]

    intakes()
    generator = ShardedBuffer([buffer.peer() for buffer in buffers])
    fail_all(generator, ["KeyError: 'answer'"])
    before = generator.audit().issued
    assert before == 5 * B * shards
    resumed = ShardedIntake(tuple(intakes()))
    for _ in range(30):
        generate(generator, 100)
        if (collected := resumed.poll(0, wait_s=0)) is not None:
            break
    assert len(collected.groups) == B * shards and min(ids_of(collected)) > before
    assert [ledger["rejected"] for ledger in resumed.settled["shards"]] == [{"dead": 5 * B}] * shards


def test_a_stall_is_an_error_with_advice(buffer):
    one = intake(buffer, stall_s=0.0)
    with pytest.raises(RunError, match=r"no group arrived.*asyncrl generator"):
        one.poll(0, wait_s=0.01)


def test_a_run_that_was_suspended_as_a_whole_has_not_stalled(buffer, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    one = intake(buffer, stall_s=1800.0)
    for now_s[0] in (0.0, 1.0, 3600.0, 90000.0, *(90000.0 + 30.0 * poll for poll in range(1, 56))):
        assert one.poll(0, wait_s=0.0) is None
    with pytest.raises(RunError, match=r"no group arrived for 18\d\d s"):
        for now_s[0] in range(91680, 91860, 30):
            one.poll(0, wait_s=0.0)


def test_a_store_that_keeps_tickets_from_everybody_is_mended_before_the_run_counts_as_stalled(
    buffer, monkeypatch
):
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    one = intake(buffer, stall_s=1800.0)
    generate(buffer.peer(), 8)
    kept = buffer._store.ready
    buffer._store.ready = type(
        kept
    )()  # somebody wrote into the store: the frames are there, and nobody meets them
    recoveries = []
    mend = buffer.recover
    monkeypatch.setattr(
        buffer, "recover", lambda *args, **more: (recoveries.append(now_s[0]), mend(*args, **more))
    )
    for now_s[0] in (1.0, 60.0, 62.0, 63.0, 64.0):
        if (collected := one.poll(0, wait_s=0.0)) is not None:
            break
    assert recoveries == [62.0] and ids_of(collected) == [1, 2, 3, 4]


def test_a_wiped_store_is_healed_from_the_ledger_without_repeating_a_group(buffer):
    one = intake(buffer)
    generate(buffer.peer(), 8)
    trained = ids_of(one.poll(0, wait_s=0))
    buffer._store = MemoryBuffer(BufferRules(groups=B))._store  # wiped: everything is gone, the epoch too
    one.open(1)
    assert one.poll(1, wait_s=0) is None
    for _ in range(3):
        generate(buffer.peer(), 8)
        if (collected := one.poll(1, wait_s=0)) is not None:
            break
    assert not set(trained) & set(ids_of(collected))
    assert one.ledger.consumed == 8
