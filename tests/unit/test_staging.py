"""What an order may name on the generator's host."""

import pytest

from asyncrl.errors import TransferError
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.staging import GlooStaging


def order(transport, **details):
    return UpdateOrder(version=1, transport=transport, deadline_s=0.1, details=details, probe_ids=(1, 2), probe_logprobs=(0.0,))


def test_files_of_the_run_are_used(tmp_path):
    (tmp_path / "weights" / "v1").mkdir(parents=True)
    staging = GlooStaging(tmp_path / "weights")
    good = order("disk", directory=str(tmp_path / "weights" / "v1"))
    assert staging.stage(good) is good


@pytest.mark.parametrize("place", ["..", "../../etc", "/etc", "/proc/self/fd", "link", "/", "v1/../.."])
@pytest.mark.parametrize("transport", ["disk", "gloo", "nccl"])
def test_other_files_of_the_host_are_refused(tmp_path, place, transport):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "link").symlink_to("/etc")
    staging, named = GlooStaging(tmp_path / "weights"), str(tmp_path / "weights" / place)
    details = {"rendezvous": {"directory": named}} if transport == "gloo" else {"directory": named}
    with pytest.raises(TransferError, match="uses nothing outside"):
        staging.stage(order(transport, **details))


def test_memory_is_named_by_this_process_only(tmp_path):
    with pytest.raises(TransferError, match="only this process itself"):
        GlooStaging(tmp_path).stage(order("memory", slot="/proc/1/fd/3", layout={}))
