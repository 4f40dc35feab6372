"""Generators of one host, as processes: one transfer for all, whichever of them ends or stops."""

import os
import signal

import pytest

from tests.support import publications
from tests.support.forks import fork_server
from tests.support.publications import LARGE, Learner
from tests.support.waiting import stop

pytestmark = pytest.mark.integration


class Generator:
    def __init__(self, forks, directory):
        self.channel, theirs = forks.Pipe()
        with theirs:
            self.process = forks.Process(target=publications.work, args=(str(directory), theirs))
            self.process.start()

    def order(self, learner, stamp, *, wait_s=60.0, silent_s=60.0, stall_s=0.0):
        self.channel.send(
            {
                "source": learner.server.source(stamp),
                "layout": learner.layout.to_plain(),
                "sums": learner.sums[stamp],
                "wait_s": wait_s,
                "silent_s": silent_s,
                "stall_s": stall_s,
            }
        )

    def answer(self):
        assert self.channel.poll(120.0), "no answer"
        return self.channel.recv()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        self.process.kill()
        self.process.join()
        self.channel.close()


@pytest.fixture(scope="module")
def forks():
    with fork_server("tests.support.publications") as forks:
        yield forks


@pytest.fixture
def generators(tmp_path, forks):
    made = []

    def make(count):
        made.extend(Generator(forks, tmp_path / "shared") for _ in range(count))
        return made[-count:]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def learner():
    made = Learner(LARGE)
    yield made
    made.close()


def total(learner, stamp):
    return int(learner.slots[stamp].buffer.sum())


def test_eight_generators_of_one_host_cost_the_learner_one_transfer_of_each_version(learner, generators):
    eight = generators(8)
    for stamp in (1, 2, 3):
        for generator in eight:
            generator.order(learner, stamp)
        assert {generator.answer() for generator in eight} == {total(learner, stamp)}
    assert learner.asked == [1, 2, 3]


def test_a_generator_that_is_killed_while_it_fetches_has_one_successor(learner, generators):
    first, *others = generators(4)
    first.order(learner, 1, stall_s=100.0)
    assert first.answer() == "fetching"
    for generator in others:
        generator.order(learner, 1)
    first.signal(signal.SIGKILL)
    assert {generator.answer() for generator in others} == {total(learner, 1)}
    assert learner.asked == [1, 1]


def test_a_generator_that_is_stopped_while_it_fetches_delays_the_others_by_a_bound(learner, generators):
    first, *others = generators(4)
    first.order(learner, 1, stall_s=100.0)
    assert first.answer() == "fetching"
    stop(first.process.pid)
    for stamp in (1, 2):
        for generator in others:
            generator.order(learner, stamp, silent_s=1.0)
        assert {generator.answer() for generator in others} == {total(learner, stamp)}
    assert learner.asked == [1, 1, 1, 1, 2, 2, 2], (
        "the stopped one keeps the lock, so each fetches for itself"
    )


def test_the_memory_of_a_generator_that_has_died_is_used_on_and_then_fetched_again(learner, generators):
    owner, reader, late = generators(3)
    for generator in (owner, reader):
        generator.order(learner, 1)
        assert generator.answer() == total(learner, 1)
    assert learner.asked == [1]
    owner.close()
    late.order(learner, 1)
    assert late.answer() == total(learner, 1)
    assert learner.asked == [1, 1]
    reader.order(learner, 1)
    assert reader.answer() == total(learner, 1)
    assert learner.asked == [1, 1]
