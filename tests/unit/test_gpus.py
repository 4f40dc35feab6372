"""Only the GPUs that this process was given are dealt, by the names that it knows them by."""

import pytest

from asyncrl.config.schema import Config
from asyncrl.launch import nvidia
from asyncrl.launch.environment import child_environment
from asyncrl.launch.gpus import count_gpus
from asyncrl.launch.placement import place
from tests.support.gpu_tools import ROWS, tool, without_tools
from tests.support.task_config import config_of

MATRIX = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tNS\t
 GPU2\tCNS\tNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


@pytest.mark.parametrize(
    ("visible", "reader", "source", "expected"),
    [
        ("0,1", 0, 0, True),
        ("0,1", 1, 0, True),
        ("1,0", 1, 0, True),
        ("0,1,2", 2, 0, None),  # divided by MIG, and no instance is named
        ("0,1", 2, 0, None),
    ],
)
def test_which_gpu_reads_which(monkeypatch, tmp_path, visible, reader, source, expected):
    without_tools(monkeypatch, tmp_path, visible)
    (tmp_path / "rows").write_text(ROWS)
    (tmp_path / "matrix").write_text(MATRIX)
    tool(
        tmp_path,
        "nvidia-smi",
        f"[ $1 = topo ] && exec /bin/cat {tmp_path}/matrix; exec /bin/cat {tmp_path}/rows",
    )
    assert nvidia.can_read(reader, source) is expected


def test_gpus_without_peer_access_cannot_read_each_other():
    cells = nvidia.read_peers(MATRIX)
    assert {pair for pair, cell in cells.items() if cell == "OK"} == {(0, 1), (1, 0)}
    assert len(cells) == 9 and nvidia.read_peers("Failed to initialise NVML") == {}


@pytest.mark.parametrize(("device", "accelerator"), [("cpu", "cpu"), ("auto", None)])
def test_what_libraries_are_told_about_devices(monkeypatch, tmp_path, device, accelerator):
    for name in ("DS_ACCELERATOR", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    config = config_of(learner={"device": device})
    told = child_environment(config, tmp_path, threads=1, gpus=[])
    assert (told.get("DS_ACCELERATOR"), told["CUDA_DEVICE_ORDER"]) == (accelerator, "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert child_environment(config, tmp_path, threads=1, gpus=[])["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.mark.parametrize(
    ("ours", "learner", "generators"),
    [
        ("4,5, 6", "4", ["5", "6"]),
        ("GPU-1f,GPU-2e,GPU-3d", "GPU-1f", ["GPU-2e", "GPU-3d"]),
        ("3", "3", ["3", "3"]),
    ],
)
def test_only_gpus_that_we_were_given_are_dealt(monkeypatch, tmp_path, ours, learner, generators):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)

    parts = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"train": "t"}}
    config = Config.model_validate(parts | {"reward": {"functions": [{"function": "exact_match"}]}})

    def given(gpus):
        return child_environment(config, tmp_path, threads=1, gpus=gpus)["CUDA_VISIBLE_DEVICES"]

    placement = place(count_gpus(), ranks=1, generators=2)
    assert given(placement.learner_gpus) == learner
    assert [given(seat.gpus) for seat in placement.generators] == generators
