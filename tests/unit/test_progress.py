"""Who is silent for too long counts as hung, and nobody else does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.hosting import progress
from asyncrl.hosting.progress import Attention, Board, Limits, Pace, Watch
from tests.support.waiting import wait_until

LIMITS = Limits(hang_s=100.0, slow_s=1000.0)
RANKS = ("rank 0", "rank 1")


class Worker:
    """Writes to one place of a board, as a process does."""

    def __init__(self, board: Board, place: int) -> None:
        self.place = progress._Place()
        self.place.memory, self.place.offset = board._memory, place * progress._SIGN.size

    def __getattr__(self, name: str):
        """`begin` and `beat`, of this place."""

        def call(*arguments: object) -> None:
            own, progress._own = progress._own, self.place
            try:
                getattr(progress, name)(*arguments)
            finally:
                progress._own = own

        return call


@pytest.fixture
def board():
    board = Board(RANKS)
    yield board
    board.close()


@pytest.fixture
def pair(board):
    """The watch of two ranks, and both."""
    watch, workers = Watch(board.signs, LIMITS), [Worker(board, place) for place in range(2)]
    return watch, *workers


@pytest.mark.parametrize(("pace", "bound_s"), [(Pace.NORMAL, 100.0), (Pace.SLOW, 1000.0), (Pace.QUICK, 30.0)])
def test_each_pace_has_its_bound(pair, pace, bound_s):
    watch, *workers = pair
    for worker in workers:
        worker.begin("step", pace)
    assert watch.look(0.0) is None
    workers[0].beat()
    assert watch.look(10.0) is None
    assert watch.look(bound_s) is None, "nobody is late yet"
    also = f"; rank 0: {bound_s - 9.0:.0f} s in `step`"  # in silence that may be the other's
    assert watch.look(bound_s + 1.0) == f"rank 1 made no progress for {bound_s + 1.0:.0f} s in `step`{also}"
    assert watch.look(bound_s + 50.0).startswith("rank 1"), "of two the one that has been silent longer"
    for worker in workers:
        worker.beat()
    assert watch.look(bound_s + 50.0) is None


def test_a_process_that_has_said_nothing_yet_is_starting(pair):
    watch, rank_0, _ = pair
    assert watch.look(0.0) is None
    rank_0.begin("step")
    assert watch.look(999.0) is None
    assert watch.look(1001.0) == "rank 1 made no progress for 1001 s in `start`"


def test_who_waits_for_a_slow_one_is_not_judged(pair):
    watch, rank_0, rank_1 = pair
    rank_0.begin("hooks", Pace.SLOW)
    rank_1.begin("train")
    for now_s in (0.0, 500.0, 900.0):
        assert watch.look(now_s) is None
    rank_0.begin("train")
    assert watch.look(950.0) is None, "its wait for the slow one is forgiven"
    assert watch.look(999.0) is None
    assert watch.look(1001.0).startswith("rank 1"), "silent since the slow one went on"


def test_a_slow_one_that_hangs_is_found(pair):
    watch, rank_0, rank_1 = pair
    rank_0.begin("hooks", Pace.SLOW)
    rank_1.begin("train")
    watch.look(0.0)
    assert watch.look(1001.0) == "rank 0 made no progress for 1001 s in `hooks`"


def test_whose_work_is_done_may_be_silent_and_hides_no_other(pair):
    """A rank that has trained, while rank 0 evaluates, exports and pushes."""
    watch, rank_0, rank_1 = pair
    rank_1.begin("end", Pace.OVER)
    rank_0.begin("last evaluation")
    for now_s in range(0, 100_000, 90):
        rank_0.beat()
        assert watch.look(float(now_s)) is None
    assert watch.look(now_s + 101.0) == "rank 0 made no progress for 101 s in `last evaluation`"


def test_silence_that_nobody_could_hear_is_nobodys_fault(pair):
    """The supervisor was stopped, or the machine starved it: the clock of its judgement stood still."""
    watch, rank_0, rank_1 = pair
    clock_s = 0.0
    attention = Attention(lambda: clock_s)
    for worker in (rank_0, rank_1):
        worker.begin("step")
    for gap_s in (0.2, 3600.0, 5.0, 86400.0):
        clock_s += gap_s
        assert watch.look(attention.look()) is None
    for _ in range(500):
        clock_s += 0.2
        hung = watch.look(attention.look())
    assert hung, "after that it listens as before"


def test_nonsense_on_a_board_harms_nobody(board):
    board._memory[:] = b"\xff" * len(board._memory)
    assert Watch(board.signs, LIMITS).look(0.0) is None


def test_long_words_are_cut(board):
    worker = Worker(board, 1)
    worker.begin("é" * 100)
    worker.beat()
    signs = board.signs()
    assert (signs["rank 0"].count, signs["rank 1"].count) == (0, 2)
    assert signs["rank 1"].doing.startswith("é" * 27)


def test_without_a_supervisor_nothing_is_said(monkeypatch):
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    progress.attach()
    progress.begin("step")
    assert progress.inherited() is None


SPEAKER = """
import sys, threading
from asyncrl.hosting import progress
progress.attach()
progress.begin("speak", progress.Pace.SLOW)
for has_no_say in (progress.beat, lambda: progress.begin("export")):
    beside = threading.Thread(target=has_no_say)
    beside.start()
    beside.join()
for line in sys.stdin:
    progress.beat()
    print("said", flush=True)
"""


def test_the_main_thread_of_a_process_speaks_to_its_own_place(board):
    with subprocess.Popen(
        [sys.executable, "-c", SPEAKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ) | progress.variable(board.descriptor, 1),
        pass_fds=[board.descriptor],
    ) as speaker:
        assert speaker.stdin is not None and speaker.stdout is not None
        for count in (3, 4):  # after `start` and `speak`
            speaker.stdin.write(b"go on\n")
            speaker.stdin.flush()
            speaker.stdout.readline()
            sign = board.signs()["rank 1"]
            assert (sign.count, sign.pace, sign.doing) == (count, Pace.SLOW, "speak")
        assert board.signs()["rank 0"].count == 0
        speaker.stdin.close()
        assert speaker.wait(60.0) == 0


def test_attention_follows_its_clock():
    now_s = 0.0
    attention = Attention(lambda: now_s)
    assert attention.look() == 0.0
    now_s = 0.5
    assert attention.look() == 0.5
    now_s = 100.0
    assert attention.look() == 1.5
    assert Attention().look() <= time.monotonic()


def test_what_a_library_writes_slowly_is_progress_as_long_as_its_files_change(board, tmp_path, monkeypatch):
    looks, rglob = [], Path.rglob
    monkeypatch.setattr(progress, "_own", Worker(board, 0).place)
    monkeypatch.setattr(Path, "rglob", lambda path, what: (looks.append(what), rglob(path, what))[1])
    read, file = lambda: board.signs()["rank 0"], tmp_path / "checkpoint-4" / "model.safetensors"
    file.parent.mkdir()
    with progress.while_growing("checkpoint", tmp_path, every_s=0.001):
        for size_bytes in range(3):
            before = read().count
            file.write_bytes(b"x" * size_bytes)
            wait_until(lambda before=before: read().count > before or not file.stat().st_size, 60.0)
        assert (read().pace, read().doing) == (Pace.SLOW, "checkpoint")
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 2, 60.0)
        settled, seen = read().count, len(looks)
        wait_until(lambda: len(looks) > seen + 9, 60.0)
        assert read().count == settled, "a write that stands still is none"
