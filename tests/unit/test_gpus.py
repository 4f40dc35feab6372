"""Only the GPUs that this process was given are dealt, by the names that it knows them by."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting import gpus, nvidia, processes, smi
from asyncrl.hosting.environment import ON_CPU, child_environment
from asyncrl.hosting.gpus import count_gpus, resolve_device, visible_devices
from asyncrl.hosting.placement import place
from asyncrl.trainer.deepspeed import engine_settings
from asyncrl.trainer.device import choose_device
from tests.support.gpu_tools import MATRIX, ROWS, tool, without_tools
from tests.support.task_config import config_of


@pytest.mark.parametrize(
    ("visible", "reader", "source", "expected"),
    [
        ("0,1", 0, 0, True),
        ("0,1", 1, 0, True),
        ("1,0", 1, 0, True),
        ("GPU-9,0", 1, 1, None),  # nvidia-smi shows no such GPU
        ("0,1,2", 2, 0, None),  # divided by MIG, and no instance is named
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
    assert nvidia.peer_reads([reader], source) == {reader: expected}


def test_a_gpu_of_another_chipset_cannot_be_read(monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path, "2,0,1")
    (tmp_path / "rows").write_text(ROWS.replace("Enabled", "Disabled"))
    (tmp_path / "matrix").write_text(MATRIX)
    count = f"echo >> {tmp_path}/asked; [ $1 = topo ] && exec /bin/cat {tmp_path}/matrix"
    tool(tmp_path, "nvidia-smi", f"{count}; exec /bin/cat {tmp_path}/rows")
    assert nvidia.peer_reads([0, 1, 2], 0) == {0: True, 1: False, 2: False}
    assert nvidia.peer_reads([2], 1) == {2: True}
    assert len((tmp_path / "asked").read_text()) == 4


def test_gpus_without_peer_access_cannot_read_each_other():
    cells = nvidia.read_peers(MATRIX)
    assert {pair for pair, cell in cells.items() if cell == "OK"} == {(0, 1), (1, 0)}
    assert len(cells) == 9 and nvidia.read_peers("Failed to initialise NVML") == {}


@pytest.mark.parametrize(("device", "accelerator"), [("cpu", "cpu"), ("auto", None)])
def test_what_libraries_are_told_about_devices(monkeypatch, tmp_path, device, accelerator):
    for name in ("DS_ACCELERATOR", "CUDA_DEVICE_ORDER", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    config = config_of(learner={"device": device})
    told = child_environment(config, tmp_path, threads=1, gpus=[])
    assert (told.get("DS_ACCELERATOR"), told["CUDA_DEVICE_ORDER"]) == (accelerator, "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert told.get("OMP_WAIT_POLICY") == ("PASSIVE" if device == "cpu" else None), "cores are shared"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    told = child_environment(config, tmp_path, threads=1, gpus=[])
    assert (told["CUDA_DEVICE_ORDER"], told["OMP_WAIT_POLICY"]) == ("FASTEST_FIRST", "ACTIVE")


def test_a_process_on_a_cpu_keeps_the_memory_that_it_had():
    """The system clears each page of 4 KiB at its first use: a minor fault."""
    code = """if True:
        from resource import RUSAGE_SELF, getrusage
        for _ in range(4):
            before = getrusage(RUSAGE_SELF).ru_minflt
            b"x" * (64 << 20)
            found = getrusage(RUSAGE_SELF).ru_minflt - before
        print(found)"""
    plain = {name: value for name, value in os.environ.items() if name not in ON_CPU}
    faults = [
        int(
            subprocess.run(
                [sys.executable, "-c", code], env=plain | more, capture_output=True, check=True
            ).stdout
        )
        for more in ({}, ON_CPU)
    ]
    assert faults[0] > (64 << 20) / 4096 * 0.9 and faults[1] < 100


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

    config = config_of()

    def given(gpus):
        return child_environment(config, tmp_path, threads=1, gpus=gpus)["CUDA_VISIBLE_DEVICES"]

    placement = place(count_gpus(), ranks=1, generators=2)
    assert given(placement.learner_gpus) == learner
    assert [given(seat.gpus) for seat in placement.generators] == generators


def test_children_get_uuids_in_full(monkeypatch, tmp_path):
    whole = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-5d2a1c77-3f0e-11d2-9a64-0c5b9f2b6d11"]
    lines = "; ".join(f"echo 'GPU {index}: NVIDIA (UUID: {uuid})'" for index, uuid in enumerate(whole))
    tool(tmp_path, "nvidia-smi", lines)
    monkeypatch.setenv("PATH", str(tmp_path))
    for given in (["GPU-5d2a", "GPU-8932f937"], [whole[1], "GPU-89"]):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(given))
        assert visible_devices([0, 1]) == f"{whole[1]},{whole[0]}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7c,GPU-00")
    assert visible_devices([0, 1]) == "MIG-7c,GPU-00", "what nvidia-smi does not list is not touched"


LISTED = """\
GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1f)
GPU 1: NVIDIA GeForce RTX 3090 (UUID: GPU-2e)
  MIG 1g.10gb     Device  0: (UUID: MIG-7c)
"""


@pytest.fixture
def no_device_files(monkeypatch, tmp_path):
    """A machine whose GPUs have no files in /dev, as under WSL2."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "dev")
    smi._listing.cache_clear()
    yield tmp_path
    smi._listing.cache_clear()


def test_gpus_without_device_files_are_counted_by_nvidia_smi(no_device_files, monkeypatch):
    assert count_gpus() == 0, "it is not installed"
    tool(no_device_files, "nvidia-smi", f"echo >> {no_device_files}/asked; /bin/cat <<'END'\n{LISTED}END")
    assert count_gpus() == count_gpus() == 2
    assert (no_device_files / "asked").read_text() == "\n", "it is asked once"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert resolve_device(config_of()) == "cuda"


def test_the_learner_follows_the_rule_that_chooses_the_generators_device(monkeypatch):
    config = config_of()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for visible, device in (("", torch.device("cpu")), ("0", torch.device("cuda", 0))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert resolve_device(config) == device.type
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert choose_device(config.learner, 0, auto=device.type) == device
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert used == [torch.device("cuda", 0)]
    with pytest.raises(ConfigError, match=r"auto means cuda here, but torch .* finds no usable GPU"):
        choose_device(config.learner, 0, auto="cuda")


def test_a_rank_whose_deepspeed_runs_on_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(
        engine_settings, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu")
    )
    engine_settings.require_device(torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"rank is on cuda, but DeepSpeed runs on cpu; .*DS_ACCELERATOR=cuda"
    ):
        engine_settings.require_device(torch.device("cuda", 0))


@pytest.mark.parametrize("script", ["exec /bin/sleep 60", "exit 9"])
def test_a_driver_that_does_not_answer_shows_no_gpu(no_device_files, monkeypatch, script):
    monkeypatch.setattr(smi, "ASK_S", 0.2)
    tool(no_device_files, "nvidia-smi", script)
    assert count_gpus() == 0


def test_a_driver_that_holds_nvidia_smi_is_not_waited_for(no_device_files, monkeypatch):
    """As in an uninterruptible wait, the process outlives the signal that kills others."""
    asked = []

    class Held(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            asked.append(self)

        def send_signal(self, number):
            pass

        kill = terminate = lambda self: None

    monkeypatch.setattr(smi, "ASK_S", 0.2)
    monkeypatch.setattr(processes, "_REAP_S", 0.2)
    monkeypatch.setattr(subprocess, "Popen", Held)
    tool(no_device_files, "nvidia-smi", "exec /bin/sleep 60")
    with pytest.raises(DataError, match=r"not answered within 0\.2 s and cannot be killed, the driver holds"):
        smi.ask("-L")
    assert asked[0].poll() is None, "it lives, and nobody waits for it"
    os.kill(asked[0].pid, signal.SIGKILL)
    assert asked[0].wait(60) == -signal.SIGKILL
