"""An engine of two workers: each has its part of every version, over slots and over vLLM's own NCCL messages.

Sockets stand for NCCL between the sender and the workers; all else is real, also how the workers meet.
"""

import contextlib
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.device_communicators import pynccl_wrapper
from vllm.distributed.weight_transfer import nccl_common

from asyncrl.errors import TransferError
from asyncrl.weights.layout import checksums
from asyncrl.weights.nccl import NcclSender
from tests.support import nccl_stand_in
from tests.support.vllm_engines import (
    STORIES,
    apply,
    flat,
    load,
    logprobs_of,
    needs_stories,
    order,
    running_engine,
    scrambled,
    slot_order,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs_stories]

WORKERS = 2
PROBE = (1, *range(300, 331))
PLUGIN = "[vllm.general_plugins]\nnccl_stand_in = tests.support.nccl_receivers:install\n"


@pytest.fixture
def world(monkeypatch, tmp_path):
    """(runner, engine); a plugin replaces NCCL in its workers. Afterwards in this process, for the sender."""
    package = tmp_path / "nccl_stand_in-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl-stand-in\nVersion: 0\n")
    (package / "entry_points.txt").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    with running_engine(STORIES, transport="nccl", tensor_parallel=WORKERS) as world:
        stream = SimpleNamespace(synchronize=lambda: None)
        library = SimpleNamespace(ncclGetUniqueId=lambda: SimpleNamespace(internal=os.urandom(128)))
        monkeypatch.setattr(pynccl_wrapper, "NCCLLibrary", lambda: library)
        monkeypatch.setattr(nccl_common, "uid_init_process_group", nccl_stand_in.Communicator)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        yield world


def test_both_workers_load_their_part_of_every_version(world):
    runner, engine = world
    model = load(STORIES)
    layout, _ = flat(model)

    def send(sender, version, *, spoil=0):
        """Update over NCCL; returns what was sent, and whether the order was for a new group."""
        new = scrambled(model, version)
        _, buffer = flat(new)
        sums = checksums(buffer, layout)
        details = {**sender.prepare(), "checksums": [*sums[:-1], sums[-1] ^ spoil]}
        thread = threading.Thread(target=sender.transfer, args=(buffer,))
        thread.start()
        try:
            runner.run(apply(engine, order(version, "nccl", details)))
        finally:
            thread.join()
        return new, details["init"] is not None

    def assert_engine_has(expected):
        assert np.abs(runner.run(engine.score(PROBE)) - logprobs_of(expected, PROBE)).max() < 1e-3

    assert_engine_has(model)
    new = scrambled(model, 1)
    _slot, made = slot_order(1, new)
    runner.run(apply(engine, made))
    assert_engine_has(new)
    sender = NcclSender(layout, WORKERS)
    for version in (2, 3):
        new, is_new_group = send(sender, version)
        assert is_new_group == (version == 2)
        assert_engine_has(new)
    with pytest.raises(TransferError, match=f"{layout.specs[-1].name}.*checksum"):
        send(sender, 4, spoil=1)
    sender.close()
    new, is_new_group = send(NcclSender(layout, WORKERS), 5)
    assert is_new_group
    assert_engine_has(new)
