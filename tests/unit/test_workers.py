"""Messages to programs in processes of their own; the programs themselves are in tests/integration."""

import os
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.workers import LENGTH, ending, framed, pack, receive, take_message

messages = st.lists(
    st.dictionaries(st.text(max_size=5), st.integers(0, 2**40) | st.binary(max_size=40), max_size=3),
    max_size=5,
)


@given(messages, st.integers(1, 9))
def test_messages_that_arrive_in_pieces_come_out_whole_and_in_order(sent, piece):
    stream, arrived, found = b"".join(map(pack, sent)), bytearray(), []
    for start in range(0, len(stream), piece):
        arrived += stream[start : start + piece]
        while (message := take_message(arrived)) is not None:
            found.append(message)
    assert found == sent and not arrived


@pytest.mark.parametrize("cut", [0, 2, 4, 7])
def test_a_stream_that_ends_within_a_message_is_an_end(cut):
    stream = BytesIO(framed(b"first") + framed(b"second")[:cut])
    lengths = []
    assert receive(stream, expect=lengths.append) == b"first"
    with pytest.raises(EOFError):
        receive(stream, expect=lengths.append)
    assert lengths == [5, 6][: 1 + (cut >= LENGTH.size)], "the length is known before the message is read"


@pytest.mark.parametrize("program", ["import os; os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_the_exit_status_says_how_a_process_ended(program):
    status = os.waitstatus_to_exitcode(os.system(f"exec python3 -c '{program}'"))
    assert ending(status) == ("killed by SIGKILL" if "kill" in program else "exit status 3")
