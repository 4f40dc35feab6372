"""Messages to programs in processes of their own; the programs themselves are in tests/integration."""

import fcntl
import os
import resource
import socket
from io import BytesIO

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.hosting.workers import LENGTH, Worker, ending, pack, receive

messages = st.lists(
    st.dictionaries(st.text(max_size=5), st.integers(0, 2**40) | st.binary(max_size=40), max_size=3),
    max_size=5,
)


@given(messages)
def test_messages_come_out_whole_and_in_order(sent):
    stream = BytesIO(b"".join(map(pack, sent)))
    assert [msgpack.unpackb(receive(stream)) for _ in sent] == sent
    with pytest.raises(EOFError):
        receive(stream)


@pytest.mark.parametrize("cut", [0, 2, 4, 7])
def test_a_stream_that_ends_within_a_message_is_an_end(cut):
    stream = BytesIO(LENGTH.pack(5) + b"first" + (LENGTH.pack(6) + b"second")[:cut])
    assert receive(stream) == b"first"
    with pytest.raises(EOFError):
        receive(stream)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_the_exit_status_says_how_a_process_ended(program, said):
    status = os.waitstatus_to_exitcode(os.system(f"exec python3 -c '{program}'"))
    assert ending(status) == said


def test_a_worker_answers_over_a_descriptor_that_select_does_not_take():
    """As in a process that serves hundreds of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        low, theirs = socket.socketpair()
        with low, theirs, socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD, 1100)) as high:
            worker = Worker.__new__(Worker)
            worker.channel, worker._replies = high, high.makefile("rb")
            theirs.sendall(pack("answer"))
            assert msgpack.unpackb(worker.ask(b"", wait_s=60.0)) == "answer"
            worker.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
