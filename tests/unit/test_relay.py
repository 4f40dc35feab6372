"""One transfer per host: relays share a slot. Processes do in tests/integration/test_relay_processes.py."""

import errno
import fcntl
import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.errors import TransferError
from asyncrl.weights import staging
from asyncrl.weights.layout import checksums
from asyncrl.weights.slots import Slot, open_slot
from asyncrl.weights.staging import Relay
from tests.support.publications import LAYOUT, WAIT_S, Learner
from tests.support.waiting import LONG_S, let_pass, wait_until


@pytest.fixture
def learners():
    made = []

    def make(*args, **kwargs):
        made.append(Learner(*args, **kwargs))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


@pytest.fixture
def relays(tmp_path):
    made = []

    def make(count=1):
        made.extend(Relay(tmp_path / "shared") for _ in range(count))
        return made[-count:]

    yield make
    for each in made:
        each.close()


def test_a_slot_is_not_written_while_another_process_may_read_it(learners, relays):
    learner, (owner, slow) = learners(), relays(2)
    learner.bring(owner, 1)
    read = learner.bring(slow, 1)
    for stamp in (2, 3, 2, 3):
        newest = learner.bring(owner, stamp)
        assert learner.holds(read, 1) and learner.holds(newest, stamp)
    assert len(owner._own) == 2, "one for the slow reader, and one to write"
    assert learner.asked == [1, 2, 3, 2, 3]
    assert learner.holds(learner.bring(slow, 3), 3)
    assert learner.asked[5:] == [], "it is there already"


def test_a_follower_keeps_no_memory_of_its_own(learners, relays):
    learner, (first, second) = learners(), relays(2)
    learner.bring(first, 1)
    learner.bring(second, 2)
    assert learner.holds(learner.bring(first, 2), 2)
    assert first._own == [] and len(second._own) == 1


def test_the_owner_of_a_slot_that_closes_leaves_readers_what_they_have(learners, relays):
    learner, (owner, reader) = learners(), relays(2)
    learner.bring(owner, 1)
    read = learner.bring(reader, 1)
    owner.close()
    assert learner.holds(read, 1)


def test_a_transfer_that_fails_leaves_nothing_that_another_one_would_use(learners, relays):
    learner, (first, second) = learners(), relays(2)
    good = learner.sums[1]
    learner.sums[1] = (0, *good[1:])
    with pytest.raises(TransferError, match="checksum"):
        learner.bring(first, 1)
    learner.sums[1] = good
    assert learner.holds(learner.bring(second, 1), 1)
    assert learner.holds(learner.bring(first, 1), 1)
    assert learner.asked == [1, 1]


def test_publications_of_two_learners_with_equal_numbers_are_not_confused(learners, relays):
    one, other, (relay,) = learners(), learners(), relays()
    other.slots[1].buffer.fill_(9)
    other.sums[1] = checksums(other.slots[1].buffer, LAYOUT)
    assert one.holds(one.bring(relay, 1), 1)
    assert other.holds(other.bring(relay, 1), 1)


@pytest.mark.parametrize(
    "said",
    [
        b"no json",
        b"[1, 2]",
        b'{"path": "/etc/passwd"}',
        b'{"path": "/proc/1/fd/99999", "stamp": STAMP}',
        b'{"path": "/proc/PID/fd/OTHER", "stamp": STAMP}',
    ],
)
def test_what_the_file_says_is_not_believed(learners, relays, said):
    """As after a reuse of a process id: another file is there."""
    learner, (first, second) = learners(), relays(2)
    learner.bring(first, 1)
    other = Slot.create(LAYOUT.total_bytes)
    other.complete(1)
    file = os.open(first._path, os.O_RDWR)
    stamp = json.loads(os.pread(file, 256, 0))["stamp"]
    said = said.replace(b"STAMP", b"%d" % stamp).replace(b"PID", b"%d" % os.getpid())
    os.pwrite(file, said.replace(b"OTHER", b"%d" % other.file).ljust(256), 0)
    os.close(file)
    assert learner.holds(learner.bring(second, 1), 1)
    assert learner.asked == [1, 1]
    other.close()


def test_a_host_without_a_private_place_fetches_for_itself(learners, relays, tmp_path, caplog):
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared").chmod(0o777)
    learner, both = learners(), relays(2)
    for each in both:
        assert learner.holds(learner.bring(each, 1), 1)
    assert learner.asked == [1, 1] and "is open to others" in caplog.text


def test_its_files_are_private_small_and_do_not_hold_the_key(learners, relays, tmp_path):
    learner, (relay,) = learners(), relays()
    learner.bring(relay, 1)
    (path,) = (tmp_path / "shared").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size < 1000
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    key = learner.server.source(1)["key"]
    assert key.hex() not in path.name and key not in path.read_bytes()
    old, young = tmp_path / "shared" / "old", tmp_path / "shared" / "young"
    for each, age_s in ((old, 90_000), (young, 1_000)):
        each.touch()
        os.utime(each, (time.time() - age_s,) * 2)
    other = learners()
    other.bring(relay, 1)
    assert not old.exists() and young.exists(), "a run that was killed leaves its file for a day"
    young.unlink()
    path.unlink()
    relay.close()
    assert not list((tmp_path / "shared").iterdir())


class Clock:
    """Time passes only in waits."""

    def __init__(self):
        self.now_s = time.monotonic()

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def test_a_lock_that_is_never_released_costs_one_wait_and_not_one_for_each_version(
    learners, relays, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(staging, "time", clock)
    learner, (first, second) = learners(), relays(2)
    learner.bring(first, 1)
    holder = os.open(first._path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    waited_s, silent_s = [], min(staging.SILENT_S, WAIT_S / 4)
    for stamp in (2, 3, 2):
        before_s = clock.now_s
        assert learner.holds(learner.bring(second, stamp), stamp)
        waited_s.append(clock.now_s - before_s)
    assert waited_s[0] >= silent_s > 10 * max(waited_s[1:])
    os.close(holder)
    assert learner.holds(learner.bring(first, 3), 3)
    assert learner.holds(learner.bring(second, 3), 3)
    assert len(learner.asked) == 5, "they share again"


def test_a_transfer_that_is_slow_but_moves_is_waited_for(learners, relays, monkeypatch):
    fetch = staging.fetch

    def slowly(*arguments, on_progress, **options):
        for _ in range(15):
            let_pass(0.1)
            on_progress()
        fetch(*arguments, on_progress=on_progress, **options)

    monkeypatch.setattr(staging, "SILENT_S", 1.0)
    monkeypatch.setattr(staging, "fetch", slowly)
    learner, both = learners(), relays(2)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(learner.bring, each, 1) for each in both]
        assert all(learner.holds(call.result(LONG_S), 1) for call in calls)
    assert learner.asked == [1]


def test_the_deadline_bounds_waiting_and_fetching_together(learners, relays):
    learner, (first, second) = learners(), relays(2)
    learner.bring(first, 1)
    holder = os.open(first._path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(learner.bring, second, 2, 0.0)
        with pytest.raises(TransferError, match="the deadline has passed"):
            call.result(LONG_S)
    os.close(holder)
    wait_until(lambda: not learner.server._readers)


def test_a_holder_that_moves_is_not_waited_for_beyond_the_deadline(learners, relays, monkeypatch):
    clock = Clock()
    learner, (first, second) = learners(), relays(2)
    learner.bring(first, 1)
    holder = os.open(first._path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def moving(seconds):
        clock.now_s += seconds
        assert clock.now_s < began_s + 2 * WAIT_S
        os.utime(holder, (clock.now_s,) * 2)

    clock.sleep, began_s = moving, clock.now_s
    monkeypatch.setattr(staging, "time", clock)
    with pytest.raises(TransferError, match=r"the deadline has passed.*raise weights\.deadline_s"):
        learner.bring(second, 2)
    assert not second._own, "it takes no memory for what it cannot fetch"
    os.close(holder)


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_of_the_locks_costs_the_sharing_and_not_the_update(learners, relays, monkeypatch, caplog):
    learner, both = learners(), relays(2)
    whole = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda file, *at: full() if at[1] <= 256 else whole(file, *at))
    for each in both:
        assert learner.holds(learner.bring(each, 1), 1)
    assert caplog.text.count("not shared with other generators of this host: [Errno 28]") == 2
    open_files = [os.readlink(file) for file in os.scandir("/proc/self/fd") if os.path.lexists(file)]
    assert not [path for path in open_files if "/shared/" in path]


def test_memory_that_is_full_is_a_failed_update_with_what_is_needed_and_free(learners, relays, monkeypatch):
    learner, (alone,) = learners(), relays()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda file, *at: full() if at[1] > 256 else None)
        with pytest.raises(
            TransferError, match=r"needs \d+\.\d MiB of the memory of this host, where .* are free"
        ):
            learner.bring(alone, 1)
    assert learner.holds(learner.bring(alone, 1), 1)


@pytest.mark.parametrize("name", ["open", "lock"])
def test_a_host_without_a_file_for_a_turn_is_a_failed_update(learners, relays, monkeypatch, name):
    learner, (alone,) = learners(), relays()

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(alone, f"_{name}", refuse)
        assert learner.holds(learner.bring(alone, 1), 1), "not shared"
        patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(TransferError, match=r"no place for a version: .*Too many open"):
            learner.bring(alone, 2)
    assert learner.holds(learner.bring(alone, 3), 3)
    open_files = [os.path.realpath(place) for place in Path("/proc/self/fd").iterdir()]
    assert not [path for path in open_files if path.startswith(str(alone._directory))]


@pytest.mark.parametrize("kind", ["pipe", "directory", "short file"])
def test_a_number_that_is_used_again_is_no_slot(learners, relays, tmp_path, kind):
    """The holder has ended, and its process id and file belong to somebody else."""
    learner, (owner, other) = learners(), relays(2)
    learner.bring(owner, 1)
    made = tmp_path / "again"
    {"pipe": os.mkfifo, "directory": os.mkdir, "short file": os.mknod}[kind](made)
    described = json.loads(owner._path.read_bytes())
    again = os.open(made, os.O_RDONLY | os.O_NONBLOCK)
    described["path"] = f"/proc/{os.getpid()}/fd/{again}"
    with pytest.raises(TransferError, match=r"cannot be opened .*the learner has ended"):
        open_slot(described, LAYOUT.total_bytes)
    owner._path.write_bytes(json.dumps(described).encode().ljust(256))
    with ThreadPoolExecutor(1) as pool:
        assert learner.holds(pool.submit(learner.bring, other, 1).result(LONG_S), 1)
    os.close(again)
