import shutil
from pathlib import Path
from unittest import mock

import torch

from asyncrl.weights import publisher
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout


def test_files_of_an_earlier_learner_that_cannot_be_removed_keep_nobody_from_publishing(
    tmp_path: Path,
) -> None:
    """On a network file system a directory stays as long as somebody elsewhere has a file in it open."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / ".nfs01").touch()
    layout = Layout.plan([TensorSpec(name="a", dtype="float32", shape=(3,))], 1 << 20)
    with mock.patch.object(shutil, "rmtree"):
        made = publisher.SlotPublisher(
            layout,
            probe_ids=((1, 2),),
            initial_logprobs=(0.0,),
            directory=tmp_path / "weights",
            deadline_s=1.0,
        )
        made.publish(0, [("a", torch.ones(3))], (-1.0,)).result(30)
        made.close()


def test_a_copy_whose_sums_cannot_be_computed_is_a_failed_copy(tmp_path: Path) -> None:
    """A GPU computes them, which may be full. Otherwise the version would stay pinned for good."""
    layout = Layout.plan([TensorSpec(name="a", dtype="float32", shape=(3,))], 1 << 20)
    made = publisher.SlotPublisher(
        layout, probe_ids=((1, 2),), initial_logprobs=(0.0,), directory=tmp_path, deadline_s=1.0
    )
    newest, place = mock.Mock(**{"slot.buffer.is_cuda": True}), mock.Mock()
    full = torch.OutOfMemoryError("CUDA out of memory")
    with mock.patch.object(publisher, "checksums", side_effect=full):
        made._copy(newest, place)
    assert newest.unpin.call_count == 1 and made._not_copied is full and not place.complete.called
    made.close()
