"""Frames are tried in a process that may die of them."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from asyncrl.errors import RunError, WireError
from asyncrl.types import Group, Rollout, VersionSpan
from asyncrl.wire import decoder as decoding
from asyncrl.wire.decoder import IsolatedDecoder
from asyncrl.wire.group_frames import decode_group, encode_group
from bench import decoder as bench
from tests.support.waiting import HANG, wait_until_ended

pytestmark = pytest.mark.integration

KEY = b"key of the run"


def group_of(ticket_id=1, rollouts=4, tokens=100):
    return Group(
        ticket_id=ticket_id,
        rollouts=tuple(
            Rollout(
                prompt_ids=np.arange(7, dtype=np.int32),
                response_ids=np.arange(tokens, dtype=np.int32),
                action_mask=np.ones(tokens, dtype=np.bool_),
                behaviour_logprobs=np.full(tokens, -0.5, dtype=np.float32),
                version_spans=(VersionSpan(3, tokens),),
                finish_reason="stop",
                reward=float(number),
            )
            for number in range(rollouts)
        ),
        generator_id="g",
        finished_version=3,
    )


@pytest.fixture
def decoder():
    made = IsolatedDecoder(KEY, frame_s=20.0)
    yield made
    made.close()


def test_what_it_returns_is_what_the_codec_returns_and_refusals_have_the_codecs_reason(decoder):
    for ticket_id in range(1, 6):
        frame = encode_group(group_of(ticket_id), KEY)
        assert encode_group(decoder.decode(frame), KEY) == frame
    pid = decoder.pid
    for bad in (b"", b"garbage", encode_group(group_of(), b"another key"), frame[:-1]):
        with pytest.raises(WireError) as expected:
            decode_group(bad, KEY)
        with pytest.raises(WireError) as found:
            decoder.decode(bad)
        assert str(found.value) == str(expected.value)
    assert (decoder.pid, decoder.deaths) == (pid, 0)


def test_a_frame_of_many_megabytes_passes(decoder):
    frame = encode_group(group_of(rollouts=8, tokens=500_000), KEY)
    assert len(frame) > 30 << 20
    assert len(decoder.decode(frame).rollouts) == 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_decoder_that_dies_or_stops_between_frames_costs_no_frame(number):
    decoder = IsolatedDecoder(KEY, frame_s=3.0)
    try:
        frame = encode_group(group_of(), KEY)
        decoder.decode(frame)
        os.kill(decoder.pid, number)
        assert decoder.decode(frame).ticket_id == 1
        assert decoder.deaths == 1
    finally:
        decoder.close()


FATAL = """
import os, sys
import numpy as np
from asyncrl.wire import decoder
real = decoder.decode_group

def decode_group(frame, key):
    group = real(frame, key)
    action = group.generator_id
    if action == "crash":
        os.kill(os.getpid(), 11)
    if action == "raise":
        raise KeyError("a bug of ours")
    if action == "hang":
        HANG
    if action == "eat":
        eaten = [np.ones(1 << 20) for _ in range(4000)]
    return group

decoder.decode_group = decode_group
decoder.main()
""".replace("HANG", HANG)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("crash", "SIGSEGV"),
        ("raise", "exit status 1"),
        ("hang", "no answer within"),
        ("eat", "more than 64 MiB"),
    ],
)
def test_a_frame_that_kills_its_decoder_is_refused_and_the_next_one_passes(monkeypatch, action, reason):
    """The decoder is given a fault that a frame can reach; the learner's process has none of it."""
    start = subprocess.Popen

    def faulty(command, **kwargs):
        return start([sys.executable, "-c", FATAL, *command[4:]], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", faulty)
    decoder = IsolatedDecoder(KEY, frame_s=5.0)
    try:
        good = encode_group(group_of(), KEY)
        decoder.decode(good)
        bad = group_of(2)
        object.__setattr__(bad, "generator_id", action)
        before = psutil.Process().memory_info().rss
        with pytest.raises(WireError, match=f"2 decoder processes did not survive it.*{reason}"):
            decoder.decode(encode_group(bad, KEY))
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert decoder.decode(good).ticket_id == 1
        assert decoder.deaths == 2
    finally:
        decoder.close()


def test_a_host_that_can_start_no_decoder_ends_the_run_with_a_reason(monkeypatch, decoder):
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kwargs: start(["false"], **kwargs))
    with pytest.raises(RunError, match="did not start"):
        decoder.decode(encode_group(group_of(), KEY))
    assert decoder.pid is None


def test_a_host_that_has_room_again_costs_no_frame(monkeypatch, decoder, caplog):
    monkeypatch.setattr(decoding, "AGAIN_S", 0.01)
    start, tries = subprocess.Popen, []

    def popen(*args, **kwargs):
        tries.append(args)
        if len(tries) <= 3:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert decoder.decode(encode_group(group_of(), KEY)).ticket_id == 1
    assert decoder.deaths == 0 and caplog.text.count("cannot be started and is tried again") == 3
    decoder.close()
    monkeypatch.setattr(decoding, "START_S", 0.0)
    tries.clear()
    with pytest.raises(RunError, match=r"cannot be started: .*temporarily unavailable"):
        decoder.decode(encode_group(group_of(), KEY))


def test_it_goes_with_the_learner():
    script = f"""
import sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_decoder as t
decoder = t.IsolatedDecoder(t.KEY)
decoder.decode(t.encode_group(t.group_of(), t.KEY))
print(decoder.pid, flush=True)
{HANG}
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as learner:
        pid = int(learner.stdout.readline())
        child = psutil.Process(pid)
        learner.kill()
    wait_until_ended([child])


def test_decoding_takes_at_most_twice_the_frame_and_eight_mebibytes_whatever_it_holds():
    for name, row in bench.memory().items():
        assert row["grown_kib"] <= 2 * row["frame_kib"] + 8 * 1024, (name, row)
        assert row["verdict"].startswith("refused") == (name in bench.hostile()), (name, row)
