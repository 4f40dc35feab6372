"""Whether a generator can open the learner's memory, which it asks before it joins."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.hosting.processes import closed_to_us
from asyncrl.launch import calling
from asyncrl.launch.calling import usable

ALL = ("slot", "nccl", "tcp", "disk")


@pytest.fixture
def listener(tmp_path):
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(0o777)
        tmp_path.chmod(0o755)
        listening.listen()
        yield path


def test_a_process_of_the_same_user_and_container_is_open(listener, caplog):
    assert closed_to_us(listener) == ""
    assert usable(f"ipc://{listener}", ALL) == ALL and not caplog.records


def test_nobody_listens(tmp_path, caplog):
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(tmp_path / "left"))
    assert usable(f"ipc://{tmp_path}/left", ALL) == ALL and not caplog.records, "a learner will be there"
    assert usable(f"ipc://{tmp_path}/none", ALL) == ALL
    assert "is not known" in caplog.text
    assert usable("tcp://10.0.0.1:5555", ALL) == ALL


def test_a_learner_in_another_container_is_closed(listener):
    wrapper = ["unshare", "--pid", "--fork"]
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make containers here")
    script = f"from asyncrl.hosting.processes import *; print(closed_to_us(Path({str(listener)!r})))"
    found = subprocess.check_output([*wrapper, sys.executable, "-c", script], text=True)
    assert found == "it is in another container\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_learner_of_another_user_is_closed(listener):
    listening = os.open(listener.parent, os.O_PATH)  # the other user may not walk here
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        os.setgid(65534)
        os.setuid(65534)
        os.write(theirs, closed_to_us(Path(f"/proc/self/fd/{listening}/{listener.name}")).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(listening)
    os.close(theirs)
    with open(ours) as answer:
        assert answer.read() == "it is of another user"


def test_without_the_learners_memory_weights_come_over_files(listener, monkeypatch, caplog):
    monkeypatch.setattr(calling, "closed_to_us", lambda path: "it is in another container")
    assert usable(f"ipc://{listener}", ALL) == ("disk",)
    assert "because it is in another container" in caplog.text and "control.bind" in caplog.text
