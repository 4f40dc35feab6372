"""The hosts of a learner meet only if they agree, and what ends an attempt on one ends it on all."""

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from asyncrl.control.meeting import OVER, Ended, FollowerHost, LeadHost, Meeting, Terms
from asyncrl.errors import RunError
from asyncrl.hosting.progress import Attention
from asyncrl.run.keys import RunKeys
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

KEYS = RunKeys(bytes(range(32)))
LISTENING, CALLING = KEYS.ranks


@pytest.fixture
def terms(tmp_path):
    return Terms(
        endpoint=f"tcp://127.0.0.1:{free_ports(1)[0]}",
        wire_key=KEYS.join.wire,
        config="abc",
        hosts=2,
        probe=lambda token: tmp_path / f".writing-{token}",
        heartbeat_s=0.05,
        silent_s=1.0,
        pending_s=60.0,
    )


class Meets:
    """A host that waits for the meeting in a thread; `found` is the port, or the error."""

    running: ClassVar[list] = []

    def __init__(self, host):
        self.host, self.found = host, None
        self.thread = threading.Thread(target=self._meet, daemon=True)
        self.thread.start()
        self.running.append((host, self.thread))

    def _meet(self):
        try:
            self.found = self.host.meet()
        except RunError as error:
            self.found = error

    def __call__(self):
        self.thread.join(60)
        return self.found


@pytest.fixture
def hosts(terms):
    """Opens ends by number; with other terms or keys if a test says so. All are closed."""
    with ExitStack() as stack:

        def opened(number, *, keys=CALLING, **other):
            own = replace(terms, **other)
            made = FollowerHost(own, keys, number) if number else LeadHost(own, LISTENING)
            end = stack.enter_context(ExitStack())
            end.push(made)
            made.close = end.close
            return made

        yield opened
        for host, thread in Meets.running:
            host._terms = replace(host._terms, pending_s=0.0)
            thread.join(30)
        Meets.running.clear()


def together(hosts, **other):
    lead, host = hosts(0, **other), hosts(1, **other)
    waiting = Meets(host)
    port = lead.meet()
    assert waiting() == port
    return lead, host


def ends(host):
    """With which status others end the attempt at last."""
    found = []
    wait_until(lambda: found.append(host.look()) or found[-1] is not None, 30)
    return found[-1]


def test_all_meet_at_one_port_and_end_well_together(hosts, tmp_path):
    lead, host = together(hosts)
    assert (lead.look(), host.look()) == (None, None)
    assert not list(tmp_path.iterdir()), "the proof of the shared directory is removed"
    done, looks = [], []
    ended = threading.Thread(target=lambda: done.append(host.finish(0)))
    ended.start()
    wait_until(lambda: looks.append(lead.look()) or len(looks) == 20)  # rank 0 still evaluates
    assert not any(looks) and not done
    lead.finish(0)
    lead.close()
    ended.join(30)
    assert done == [0]


def test_with_three_hosts_nobody_begins_before_the_last(hosts):
    lead, first = hosts(0, hosts=3), hosts(1, hosts=3)
    waiting, begun = Meets(first), Meets(lead)
    wait_until(lambda: lead._hosts, 30)
    assert waiting.found is begun.found is None
    last = Meets(hosts(2, hosts=3))
    assert begun() == waiting() == last()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"config": "abd"}, r"learner-1 \(.*\) has another config than learner-0; give both the same file"),
        ({"release": "0.0.1"}, r"has asyncrl 0\.0\.1, learner-0 has .*; install the same"),
        (
            {"probe": "elsewhere"},
            r"has written .*, which learner-0 does not see; set run\.root to a directory",
        ),
        ({"probe": "missing"}, r"learner-1 cannot write .*missing.*: No such file or directory"),
    ],
)
def test_a_host_that_does_not_fit_is_told_why_and_one_that_fits_may_come(hosts, tmp_path, other, said):
    (tmp_path / "elsewhere").mkdir()
    lead, own = Meets(hosts(0)), dict(other)
    if "probe" in other:
        own["probe"] = lambda token: tmp_path / other["probe"] / token
    with pytest.raises(RunError, match=said):
        raise Meets(hosts(1, **own))()
    assert lead.found is None
    fits = Meets(hosts(1))
    assert fits() == lead()


@pytest.mark.parametrize("has_met", [False, True])
def test_a_number_that_is_taken_is_refused_but_free_after_its_host(hosts, has_met):
    lead = hosts(0, hosts=2 + (not has_met))
    first, waiting = hosts(1), Meets(lead)
    one = Meets(first)
    if has_met:
        assert one() == waiting()
    else:
        wait_until(lambda: lead._hosts, 30)
    second = Meets(hosts(1))
    if has_met:
        wait_until(lambda: (lead.look(), first.look()) == (None, None) and second.found is not None, 30)
    with pytest.raises(RunError, match=r"learner-1 .* is there already, at .*; give each host a --host"):
        raise second()
    if has_met:
        assert lead.look() is None, "the first goes on"
        first._send = lambda message: None  # it is killed
        first.close()
        Meets(hosts(1))
        assert ends(lead) == OVER, "its successor waits for the next attempt"


def test_ranks_that_fail_on_one_host_end_those_of_the_other(hosts, caplog):
    lead, host = together(hosts)
    assert host.finish(3) == 3
    host.close()
    assert ends(lead) == OVER and "the ranks of learner-1 have ended (exit status 3)" in caplog.text


def test_a_stop_that_reaches_a_host_without_work_first_leaves_rank_0_at_work(hosts, monkeypatch):
    lead, host = together(hosts)
    signalled = SimpleNamespace(monotonic=time.monotonic, sleep=lambda wait_s: sys.exit(143))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("asyncrl.control.meeting.time", signalled)
        host.finish(0)
    closing, looks = threading.Thread(target=host.close), []
    closing.start()
    wait_until(lambda: looks.append(lead.look()) or len(looks) == 100)  # longer than it may be silent
    closing.join(30)
    again = Meets(hosts(1))
    wait_until(lambda: looks.append(lead.look()) or len(looks) == 150)
    assert not any(looks) and again.found is None, "rank 0 exports the model; a successor waits for its end"


@pytest.mark.parametrize("status", [0, 2])
def test_the_end_of_rank_0_is_that_of_all(hosts, status):
    lead, host = together(hosts)
    lead.finish(status)
    threading.Thread(target=lead.close).start()
    assert ends(host) == status


def loses_first(lead, kind):
    """The connection breaks while `lead` sends the first message of `kind`."""
    send, lost = lead._send, []

    def sent(peer, message):
        if isinstance(message, kind) and not lost:
            lost.append(message)
            return True
        return send(peer, message)

    lead._send = sent


def test_hosts_meet_though_the_word_is_lost(hosts):
    lead, host = hosts(0), hosts(1)
    loses_first(lead, Meeting)
    waiting = Meets(host)
    port = lead.meet()
    wait_until(lambda: lead.look() is not None or waiting.found, 30)
    assert waiting.found == port and (lead.look(), host.look()) == (None, None)


def test_a_host_learns_how_it_ended_though_the_word_is_lost(hosts, monkeypatch):
    monkeypatch.setattr("asyncrl.control.meeting._FAREWELL_S", 60.0)
    lead, host = together(hosts, silent_s=30.0)
    loses_first(lead, Ended)
    lead.finish(0)
    closing = threading.Thread(target=lead.close)
    closing.start()
    assert host.finish(0) == 0
    host.close()
    closing.join(30)
    assert not closing.is_alive()


def test_a_host_that_gets_no_core_for_a_while_still_hears_how_it_ended(hosts):
    lead, host = together(hosts, silent_s=30.0)
    lead.finish(0)
    closing = threading.Thread(target=lead.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive(), "it waits for the answer"
    assert host.look() == 0 or ends(host) == 0
    closing.join(30)
    assert not closing.is_alive()


def test_a_silent_host_ends_the_attempt_on_both_sides(hosts, caplog):
    lead, host = together(hosts)
    assert ends(lead) == OVER and "learner-1 (" in caplog.text and "has been silent for" in caplog.text
    assert not [line for line in caplog.messages if "learner-0 has been silent" in line]
    lead, host = together(hosts, endpoint=f"tcp://127.0.0.1:{free_ports(1)[0]}")
    assert ends(host) == OVER and "learner-0 has been silent for" in caplog.text


def test_beats_keep_an_attempt_alive(hosts):
    lead, host = together(hosts, silent_s=0.3)
    looks = []
    wait_until(lambda: looks.extend((lead.look(), host.look())) or len(looks) == 100)
    assert not any(looks)


def test_a_host_of_an_earlier_attempt_is_told_that_it_is_over(hosts, terms):
    lead, host = together(hosts)
    lead._send = lambda *_: True  # it is killed: it says nothing
    lead.close()
    again = Meets(hosts(0))
    assert ends(host) == OVER
    host.close()
    assert Meets(hosts(1))() == again()


def test_who_is_missing_is_named_and_nobody_waits_for_ever(hosts):
    with pytest.raises(
        RunError, match=r"learner-1, learner-2 did not come to tcp.* within 0\.2 s; see RUN/logs"
    ):
        hosts(0, hosts=3, pending_s=0.2).meet()
    with pytest.raises(RunError, match=r"no learner answered at tcp.* for 0\.2 s; check that it runs"):
        hosts(1, pending_s=0.2).meet()


def test_a_host_that_waits_while_its_job_is_suspended_goes_on(hosts, monkeypatch):
    lead, host, waiting, now_s = hosts(0), hosts(1), [], [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=time.sleep)
    monkeypatch.setattr("asyncrl.control.meeting.time", clock)
    lead._attention = Attention(clock.monotonic)

    # The lead looks at its clock after the first, and before the last.
    events = [lambda: waiting.append(Meets(host)), lambda: now_s.insert(0, 3600.0)]
    monkeypatch.setattr("asyncrl.control.meeting.beat", lambda: events and events.pop()())
    assert lead.meet() == waiting[0]()


def test_generators_cannot_come_as_ranks(hosts):
    lead = Meets(hosts(0, pending_s=1.0))
    stranger = hosts(1, keys=KEYS.join.control, pending_s=1.0)
    assert isinstance(Meets(stranger)(), RunError) and "did not come" in str(lead())
