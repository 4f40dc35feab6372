"""What nvidia-smi, the kernel and libraries say about GPUs is read as it is printed, and each fault is named."""

from contextlib import nullcontext

import pytest
import torch

from asyncrl.errors import ConfigError, DataError
from asyncrl.hosting import gpus as our_gpus
from asyncrl.hosting import machine
from asyncrl.hosting.gpus import count_gpus, visible_names
from asyncrl.hosting.nvidia import (
    GIB,
    MIB,
    OPTIONAL,
    choose,
    peer_reads,
    read_gpus,
    read_instances,
    visible_gpus,
)
from asyncrl.preflight import doubts, fit
from asyncrl.preflight.checks import gpu as checks
from asyncrl.preflight.doctor import machine_checks
from asyncrl.preflight.fit import require_fit, require_room
from asyncrl.trainer import attention
from tests.support.gpu_tools import LOG, ROWS, tool, without_tools
from tests.support.task_config import config_of

DESKTOP = (
    "0, GPU-1f, 00000000:01:00.0, NVIDIA GeForce RTX 4090, 535.104.05, 24564, 612, [N/A], [N/A], [N/A]\n"
)
LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-77f0e1aa-0b1c-2d3e-4f50-616263646566)
  MIG 3g.40gb     Device  0: (UUID: MIG-7c9b8a52-1d2e-5f60-8a31-b94f5e0c1d22)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-0f1e2d3c-4b5a-5697-8897-a6b5c4d3e2f1)
"""
GPUS = read_gpus(ROWS)
# A driver that knows none of the fields that are not in its answer.
OLD_DRIVER = """\
for field in {fields}; do
  case "$1" in *"$field"*) echo "Field \\"$field\\" is not a valid field to query."; exit 2;; esac
done
/bin/cat <<'END'
{rows}END"""


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("3, 1,", ["3", "1"]),
        ("NoDevFiles", []),
        ("0,0", []),
        ("GPU-8932f937,GPU-5d2a1c77", ["GPU-8932f937", "GPU-5d2a1c77"]),
        ("MIG-7c9b8a52-1d2e-5f60-8a31-b94f5e0c1d22", ["MIG-7c9b8a52-1d2e-5f60-8a31-b94f5e0c1d22"]),
        (None, None),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts_them(variable, names, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_names() == names
    if names is not None:
        assert count_gpus() == len(names)


def test_rows_of_nvidia_smi():
    first, second, third = GPUS
    assert (first.total_bytes, first.used_bytes, first.bus) == (81559 * MIB, 4 * MIB, "0000:18:00")
    assert (second.ecc_errors, second.is_worn) == (3, True) and third.is_divided
    (desktop,) = read_gpus(DESKTOP)
    assert desktop.total_bytes == 24564 * MIB and not (desktop.ecc_errors or desktop.is_worn)
    with pytest.raises(DataError, match=r"GPU 0 \(NVIDIA H100.*\[GPU is lost\].*CUDA_VISIBLE_DEVICES"):
        read_gpus(ROWS.splitlines()[0].replace("81559, 4", "[GPU is lost], [GPU is lost]"))


def test_gpus_are_found_by_index_uuid_its_beginning_and_instance():
    instances = read_instances(LISTING, GPUS)
    assert [one.total_bytes / GIB for one in instances] == pytest.approx([0.95 * 40, 0.95 * 10])
    assert choose(["1", "GPU-8932"], GPUS, ()) == (GPUS[1], GPUS[0])
    assert choose(["MIG-0f1e2d3c-4b5a-5697-8897-a6b5c4d3e2f1"], GPUS, instances) == instances[1:]
    with pytest.raises(DataError, match=r"names 7, but nvidia-smi shows 3 GPUs \(GPU-8932"):
        choose(["7"], GPUS, ())
    with pytest.raises(
        DataError, match=r"GPU 2 .* divided by MIG.*name Device 0 of a GPU in CUDA_VISIBLE_DEVICES"
    ):
        choose(["2"], GPUS, ())


def test_no_instance_reads_the_memory_of_another_one(monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path, "MIG-7c9b8a52,MIG-0f1e2d3c")
    rows = f"/bin/cat <<'END'\n{ROWS}END"
    tool(tmp_path, "nvidia-smi", f"[ $1 = -L ] && exec /bin/cat <<'END'\n{LISTING}END\n{rows}")
    assert peer_reads([0, 1], 0) == {0: True, 1: False}


@pytest.mark.parametrize("known", [0, 1, 2])
def test_what_an_old_driver_does_not_know_is_left_out_and_said_once(monkeypatch, tmp_path, known):
    without_tools(monkeypatch, tmp_path, "0,1")
    rows = "".join(", ".join(row.split(", ")[: 7 + known]) + "\n" for row in ROWS.splitlines())
    unknown = OPTIONAL[known:]
    tool(tmp_path, "nvidia-smi", OLD_DRIVER.format(fields=" ".join(unknown), rows=rows))
    second = visible_gpus()[1]
    assert second.used_bytes == 61234 * MIB and second.unknown == unknown
    assert machine.this_machine("auto").gpu_bytes == (81559 * MIB,) * 2
    (said,) = [doubt for doubt in checks.gpu_doubts(config_of()) if "does not know" in doubt]
    assert said.endswith("so this is not checked; update the driver") and all(one in said for one in unknown)
    finding = checks.state()
    assert finding.verdict == "warning" and unknown[0] in finding.found
    tool(tmp_path, "nvidia-smi", OLD_DRIVER.format(fields="pci.bus_id", rows=rows))
    with pytest.raises(DataError, match=r'"pci.bus_id" is not a valid field to query\.; update the driver'):
        visible_gpus()


def test_the_memory_of_this_machine_is_that_of_the_visible_gpus(monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path, "1,GPU-8932")
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
    found = machine.this_machine("auto")
    assert found.gpu_bytes == (81559 * MIB,) * 2 and found.others_bytes == (61234 * MIB, 4 * MIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert machine.this_machine("cpu").gpu_bytes == (), "nvidia-smi is not asked"
    tool(
        tmp_path,
        "nvidia-smi",
        "echo 'Unable to determine the device handle for GPU0: Unknown Error'; exit 15",
    )
    with pytest.raises(DataError, match=r"Unable to determine the device handle.*restart the machine"):
        machine.this_machine("auto")


def test_faults_of_our_gpus_are_named_and_those_of_programs_are_not():
    first, second, third = GPUS
    assert not list(checks.faults([first], LOG))
    ecc, worn, xid = checks.faults([second], LOG)
    assert "GPU 1 (NVIDIA H100 80GB HBM3): 3 memory errors" in ecc and "next reset" in worn
    assert "Xid 79" in xid and "has fallen off the bus" in xid
    assert [fault.partition(": ")[2][:6] for fault in checks.faults([third], LOG)] == ["Xid 94"]


@pytest.mark.parametrize(
    ("driver", "cuda", "fault"),
    [
        ("550.54.15", "13.0", "needs 580.65.06"),
        ("580.65.06", "13.0", None),
        ("550.54.15", "12.8", None),
        ("525.60.11", "12.1", "needs 525.60.13"),
        ("1.0", "99.0", None),
        ("[N/A]", "13.0", None),
    ],
)
def test_a_driver_too_old_for_torch(driver, cuda, fault):
    found = checks.driver_fault(driver, cuda)
    assert (found is None) == (fault is None) and (fault or "") in (found or "")


def test_faults_are_named_next_to_an_old_driver_and_to_processes_that_are_not_known(monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path, "1")
    rows = f"/bin/cat <<'END'\n{ROWS}END"
    refusal = "case $1 in --query-compute*) echo Unknown Error; exit 9;; esac"
    tool(tmp_path, "nvidia-smi", f"{refusal}\n{rows}")
    monkeypatch.setattr(checks, "_kernel_log", lambda: LOG)
    monkeypatch.setattr(checks, "_driver_fault", lambda gpu: "an old driver")
    finding = checks.state()
    said = ("an old driver; nvidia-smi: Unknown Error; GPU", "3 memory errors", "Xid 79", "59.8 GiB of")
    assert finding.verdict == "failed" and all(one in finding.found for one in said)
    assert all(cure in finding.fix for cure in (checks.DRIVER_CURE, "reinstall", checks.FAULTS_CURE))


def test_other_processes_on_our_gpus_are_named():
    apps = f"{GPUS[1].uuid}, 4711, /usr/bin/python3\n{GPUS[0].uuid}, 12, [Not Found]\n"
    (found,) = checks.others(GPUS[:2], apps)
    assert found.endswith("59.8 GiB of 79.6 GiB are in use by process 4711 (/usr/bin/python3)")
    (hidden,) = checks.others(GPUS[1:2], "")
    assert hidden.endswith("are in use"), "a container sees no processes"
    assert not [*checks.others(GPUS[:1], apps)]


def test_a_run_that_other_processes_leave_no_room_for_is_refused(monkeypatch, tmp_path):
    shape = machine.ModelShape(
        parameters=10**8, layers=2, hidden=64, intermediate=64, query=64, kv=64, vocabulary=1000
    )
    monkeypatch.setattr("asyncrl.preflight.fit.read_trained_shape", lambda model, learner: shape)
    without_tools(monkeypatch, tmp_path)
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
    config = config_of(generator={"vllm": {}})
    require_fit(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=r"GPU 0: .* other processes 59\.8 GiB.*; end the other processes"):
        require_fit(config)


def test_joining_generators_are_refused_where_they_do_not_fit(monkeypatch, tmp_path):
    shape = machine.ModelShape(
        parameters=10**9, layers=2, hidden=64, intermediate=64, query=64, kv=64, vocabulary=1000
    )
    monkeypatch.setattr("asyncrl.preflight.fit.read_trained_shape", lambda model, learner: shape)
    without_tools(monkeypatch, tmp_path)
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
    # Three ranks need three GPUs, but these are on another host.
    config = config_of(learner={"ranks": 3}, generator={"vllm": {}})
    require_room(config, 1)
    wide = config_of(generator={"tensor_parallel": 2})
    with pytest.raises(
        ConfigError, match=r"generator\.tensor_parallel: found 2 GPUs per generator, but .* 1"
    ):
        require_room(wide, 1)
    half = config_of(generator={"gpu_memory_utilization": 0.6})
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: found 0\.6 for each of 2 generators"):
        require_room(half, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=r"other processes 59\.8 GiB; end .*lower generator\.gpu") as told:
        require_room(config, 1)
    assert "learner." not in str(told.value)
    small = ROWS.replace("81559, 4", "4096, 4")
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{small}END")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="holds no sequence of full length"):
        require_room(config, 1)
    require_room(config_of(learner={"device": "cpu"}, generator={"tensor_parallel": 2}), 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    with pytest.raises(ConfigError, match=r"found 2 GPUs per generator, but the GPUs are instances of MIG"):
        require_room(wide, 1)


def test_a_machine_without_the_tools_is_not_refused(monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path)
    config = config_of()
    require_fit(config)
    assert "NVIDIA_DRIVER_CAPABILITIES" in "".join(checks.gpu_doubts(config))
    assert checks.state().verdict == "warning"
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
    finding = checks.state()
    assert finding.verdict == "ok" and "the kernel's log cannot be read here" in finding.found
    assert not list(checks.gpu_doubts(config_of(learner={"device": "cpu"})))


def test_up_warns_of_faults_and_refuses_an_old_driver(monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path, "1")
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
    tool(tmp_path, "dmesg", f"/bin/cat <<'END'\n{LOG}END")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(our_gpus, "LINKER_PATHS", tmp_path)
    said = list(checks.gpu_doubts(config_of()))
    assert [part in one for part, one in zip(("ECC", "reset", "Xid 79"), said, strict=True)] == [True] * 3
    assert checks.state().verdict == "failed"
    with pytest.raises(ConfigError, match=r"needs 580\.65\.06 or newer; update the driver, install a torch"):
        checks.require_usable_gpus(config_of())
    checks.require_usable_gpus(config_of(learner={"device": "cpu"}))
    # CUDA's compatibility package, as a user or as the tools of containers install it.
    with monkeypatch.context() as patches:
        patches.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat")
        checks.require_usable_gpus(config_of())
        found = checks.state()
        assert found.verdict == "warning" and "59.8 GiB" in found.found and "`nvidia-smi -r`" in found.fix
        assert "choose others with CUDA_VISIBLE_DEVICES" in found.fix and "Xid 79" in found.found
    (tmp_path / "00-compat-123.conf").write_text("/usr/local/cuda/compat\n")
    checks.require_usable_gpus(config_of())


@pytest.mark.parametrize(
    ("capability", "refused"), [("7.5", True), ("8.0", False), ("12.0", False), ("[N/A]", False)]
)
def test_a_gpu_without_bfloat16_is_refused_for_it_alone(monkeypatch, tmp_path, capability, refused):
    without_tools(monkeypatch, tmp_path, "0")
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS.replace(' No', f' No, {capability}')}END")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with (
        pytest.raises(ConfigError, match=r"capability 7\.5, .* set model\.dtype=float32")
        if refused
        else nullcontext()
    ):
        checks.require_usable_gpus(config_of())
    checks.require_usable_gpus(config_of(model={"path": "m", "dtype": "float32"}))


def test_another_order_of_cuda_is_named_where_gpus_have_no_uuid(monkeypatch, tmp_path):
    without_tools(monkeypatch, tmp_path)
    tool(tmp_path, "nvidia-smi", f"/bin/cat <<'END'\n{ROWS}END")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert not list(checks.gpu_doubts(config_of()))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    (said,) = checks.gpu_doubts(config_of())
    assert said.startswith("CUDA_DEVICE_ORDER is FASTEST_FIRST") and "; unset it, or name GPUs" in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932")
    assert not list(checks.gpu_doubts(config_of()))


def test_torch_for_cpus_on_a_machine_with_gpus_is_refused_with_both_ways_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(doubts, "build_of", lambda package: "cpu")
    with pytest.raises(ConfigError, match=r"2 GPUs, but torch .* asyncrl\[gpu\], or set learner\.device=cpu"):
        fit._require_usable(config_of())
    fit._require_usable(config_of(learner={"device": "cpu"}))
    monkeypatch.setattr(doubts, "build_of", lambda package: "cu130")
    fit._require_usable(config_of())


def test_a_flash_attention_of_another_torch_is_named_where_it_is_chosen(monkeypatch, tmp_path):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    with pytest.raises(ConfigError, match=r"`import flash_attn` fails .*undefined symbol.* or uninstall it"):
        attention.choose_attention(torch.device("cuda", 0), torch.bfloat16)
    assert attention.choose_attention(torch.device("cpu"), torch.bfloat16) == attention.SEGMENTS


def test_only_a_machine_with_gpus_is_asked_about_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    plain = [check.name for check in machine_checks(None)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    more = [check.name for check in machine_checks(None)]
    assert [name for name in more if name not in plain] == ["gpu state"]
