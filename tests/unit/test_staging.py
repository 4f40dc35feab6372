"""What an order may name on the generator's host."""

import pytest

from asyncrl.errors import TransferError
from asyncrl.launch import generator_process as generator
from asyncrl.weights.base import TensorSpec, UpdateOrder
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from asyncrl.weights.staging import HostStaging


def order(transport, **details):
    return UpdateOrder(
        version=1,
        transport=transport,
        deadline_s=0.1,
        details=details,
        probe_ids=((1, 2),),
        probe_logprobs=(0.0,),
        initial_logprobs=(0.0,),
    )


def in_file(directory):
    """An order to read a file of that directory."""
    layout = Layout.plan([TensorSpec(name="a", dtype="float32", shape=(3,))], 1 << 20)
    directory.mkdir(parents=True)
    slot = Slot.create(layout.total_bytes, directory=directory)
    slot.complete(1)
    sums = list(checksums(slot.buffer, layout))
    return order("disk", slot=slot.describe(), layout=layout.to_plain(), checksums=sums)


def test_files_of_the_run_are_used(tmp_path):
    good = in_file(tmp_path / "weights" / "versions")
    assert HostStaging(tmp_path / "weights").stage(good) is good


@pytest.mark.parametrize("place", ["..", "../../etc", "/etc", "/proc/self/fd", "link", "/", "v1/../.."])
def test_other_files_of_the_host_are_refused(tmp_path, place):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "link").symlink_to("/etc")
    staging, named = HostStaging(tmp_path / "weights"), str(tmp_path / "weights" / place)
    with pytest.raises(TransferError, match="uses nothing outside"):
        staging.stage(order("disk", slot={"path": named}))


def test_a_generator_that_was_started_elsewhere_uses_the_files_of_its_run(tmp_path, monkeypatch):
    """It joined by the address of the store's socket; run.root is relative to the learner's directory."""
    run = tmp_path / "learners" / "runs" / "far"
    good = in_file(run / "weights" / "versions")
    text = (
        "run: {name: far}\nmodel: {path: m}\ndata: {train: t}\nreward: {functions: [{function: "
        "exact_match}]}\n"
    )
    (run / "config.yaml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    seen = []

    async def generate(config, hello, store, keys, directory, scorers, context):
        seen.append(directory)

    monkeypatch.setattr(generator, "_generate", generate)
    monkeypatch.setattr(generator, "run_role", lambda role: role())
    monkeypatch.setattr(generator, "setup_logging", lambda *_, **__: None)
    monkeypatch.setattr(generator, "join_store", lambda *_: None)
    monkeypatch.setattr(generator, "join_keys", lambda environment: None)
    monkeypatch.setattr(
        "sys.argv", ["generator", "--id", "g0", "--store", "unix:///s", "--config", str(run / "config.yaml")]
    )
    generator.main()
    assert HostStaging(seen[0].weights).stage(good) is good
    assert not any((tmp_path / "elsewhere").iterdir())
