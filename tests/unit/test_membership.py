import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.control.base import Heartbeat, Hello, Leave, Refused
from asyncrl.control.membership import AlreadyMember, Joined, Membership, RunIdentity

TIMEOUT_S, CHALLENGE_S = 10.0, 3.0


def make():
    return Membership(
        RunIdentity(release="1.0", config_hash="abc"), timeout_s=TIMEOUT_S, challenge_s=CHALLENGE_S
    )


def hello(name="g", incarnation="a", **changes):
    return Hello(
        **{
            "generator_id": name,
            "incarnation": incarnation,
            "release": "1.0",
            "config_hash": "abc",
            "version": 0,
            **changes,
        }
    )


def beat(name="g", incarnation="a", version=0, state="sampling"):
    return Heartbeat(
        generator_id=name, incarnation=incarnation, version=version, state=state, metrics={"groups": 2.0}
    )


@pytest.mark.parametrize("changes", [{"release": "1.1"}, {"config_hash": "xyz"}])
def test_another_release_or_config_is_refused_and_told_both(changes):
    answer = make().hello(hello(**changes), 0.0)
    assert isinstance(answer, Refused)
    assert next(iter(changes.values())) in answer.reason
    assert ("1.0" if "release" in changes else "abc") in answer.reason


def test_a_config_from_an_old_record_is_refused_and_a_hosts_own_is_not():
    members = Membership(
        RunIdentity(release="1.0", config_hash="abc", host_digest="new"),
        timeout_s=TIMEOUT_S,
        challenge_s=CHALLENGE_S,
    )
    answer = members.hello(hello(host_digest="old"), 0.0)
    assert isinstance(answer, Refused) and "out of date" in answer.reason
    assert isinstance(members.hello(hello(host_digest="new"), 0.0), Joined)
    assert isinstance(members.hello(hello("h", host_digest=""), 0.0), Joined)


def test_a_host_with_other_data_under_the_same_path_is_refused():
    members = Membership(
        RunIdentity(release="1.0", config_hash="abc", rows="2 rows with digest a"),
        timeout_s=1.0,
        challenge_s=1.0,
    )
    for rows in ("2 rows with digest b", ""):
        answer = members.hello(hello(rows=rows), 0.0)
        assert (
            isinstance(answer, Refused)
            and f"read {rows} from" in answer.reason
            and "the learner 2 rows" in answer.reason
        )
    assert isinstance(members.hello(hello(rows="2 rows with digest a"), 0.0), Joined)


def test_a_generator_whose_files_of_user_code_have_changed_within_the_run_is_refused():
    members = Membership(
        RunIdentity(release="1.0", config_hash="abc", code=("game.py 1", "odd.py 2")),
        timeout_s=1.0,
        challenge_s=1.0,
    )
    answer = members.hello(hello(code=("game.py 1", "odd.py 3")), 0.0)
    assert isinstance(answer, Refused) and "found odd.py 3 (name" in answer.reason
    assert "rewards of two meanings would mix" in answer.reason
    assert isinstance(members.hello(hello(code=("game.py 1", "odd.py 2")), 0.0), Joined)


def test_silence_is_death_and_a_heartbeat_from_the_dead_asks_for_a_hello():
    members = make()
    members.hello(hello(), 0.0)
    assert members.heartbeat(beat(), TIMEOUT_S)
    assert members.expire(2 * TIMEOUT_S) == []
    assert members.expire(2 * TIMEOUT_S + 0.1) == ["g:a"]
    assert members.died == 1
    assert not members.heartbeat(beat(), 25.0)
    assert isinstance(members.hello(hello(), 25.0), Joined)
    assert members.joined == 2


def test_a_restarted_generator_replaces_its_dead_self_after_a_short_silence():
    members = make()
    members.hello(hello(), 0.0)
    assert members.hello(hello(incarnation="b"), 1.0) is None
    assert members.hello(hello(incarnation="b"), 2.0) is None
    answer = members.hello(hello(incarnation="b"), 4.0)
    assert isinstance(answer, Joined)
    assert answer.replaced == "g:a"
    assert (members.joined, members.died) == (2, 1)
    assert not members.heartbeat(beat(), 5.0)
    for incarnation, left in (("a", 0), ("b", 1)):
        members.leave(Leave(generator_id="g", incarnation=incarnation))
        assert (members.left, len(members.members)) == (left, 1 - left)


def test_a_duplicate_of_a_living_generator_is_refused():
    members = make()
    members.hello(hello(pid=42), 0.0)
    for second in range(1, 4):  # both speak once a second
        assert members.hello(hello(incarnation="b"), second) is None
        members.heartbeat(beat(), second + 0.5)
    answer = members.hello(hello(incarnation="b"), 4.0)
    assert isinstance(answer, Refused)
    assert "42" in answer.reason
    assert isinstance(members.hello(hello(), 4.0), AlreadyMember)


def test_what_the_dead_said_before_a_pause_of_the_learner_is_no_sign_of_life():
    members = make()
    members.hello(hello(), 0.0)
    members.heartbeat(beat(), 1.0)
    # The learner stands still; the generator beats on, is killed and started again. Then all is read within a
    # moment.
    assert members.hello(hello(incarnation="b"), 40.0) is None
    assert members.heartbeat(beat(), 40.01)
    assert isinstance(members.hello(hello(), 40.02), AlreadyMember)
    assert members.hello(hello(incarnation="b"), 40.03) is None
    assert members.hello(hello(incarnation="b"), 41.0) is None
    answer = members.hello(hello(incarnation="b"), 43.1)
    assert isinstance(answer, Joined) and answer.replaced == "g:a"


def test_statuses_show_the_last_heartbeat_and_the_silence_since():
    members = make()
    members.hello(hello(), 0.0)
    members.heartbeat(beat(version=7, state="waiting_tickets"), 2.0)
    (status,) = members.statuses(5.5)
    assert (status.generator_id, status.version, status.state, status.silent_s) == (
        "g",
        7,
        "waiting_tickets",
        3.5,
    )
    assert status.metrics == {"groups": 2.0}


events = st.lists(
    st.tuples(
        st.sampled_from(["hello", "hello", "heartbeat", "heartbeat", "leave", "expire"]),
        st.sampled_from("xy"),
        st.sampled_from("ab"),
        st.sampled_from([0.0, 0.5, 1.0, 3.5, 11.0]),
    ),
    max_size=60,
)


@given(events)
def test_everybody_who_joined_is_a_member_or_left_or_died_exactly_once(steps):
    members, now_s, inside = make(), 0.0, set()
    for event, name, incarnation, wait_s in steps:
        now_s += wait_s
        holder = f"{name}:{incarnation}"
        if event == "hello":
            answer = members.hello(hello(name, incarnation), now_s)
            if isinstance(answer, Joined):
                assert holder not in inside
                if answer.replaced:
                    inside.remove(answer.replaced)
                inside.add(holder)
            assert isinstance(answer, AlreadyMember) == (holder in inside and not isinstance(answer, Joined))
        elif event == "heartbeat":
            assert members.heartbeat(beat(name, incarnation), now_s) == (holder in inside)
        elif event == "leave":
            members.leave(Leave(generator_id=name, incarnation=incarnation))
            inside.discard(holder)
        else:
            for gone in members.expire(now_s):
                inside.remove(gone)
        assert {member.holder for member in members.members.values()} == inside
        assert len(inside) == len({each.split(":")[0] for each in inside})
        assert members.joined == len(inside) + members.left + members.died
