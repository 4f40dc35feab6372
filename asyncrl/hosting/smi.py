"""Asks nvidia-smi, which asks the driver: it makes no CUDA context, and takes no GPU memory."""

import re
import shutil
import subprocess
from functools import cache

from asyncrl.errors import DataError
from asyncrl.hosting.processes import stop_processes

SMI = "nvidia-smi"
ASK_S = 20.0
UNKNOWN_FIELD = r'Field "([\w.]+)" is not a valid field'


def is_installed() -> bool:
    """Return whether this machine or container has nvidia-smi."""
    return shutil.which(SMI) is not None


def ask(*arguments: str, program: str = SMI) -> str:
    """Return what nvidia-smi prints. Raises DataError."""
    try:
        process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            said = [text.decode(errors="replace") for text in process.communicate(timeout=ASK_S)]
        except subprocess.TimeoutExpired as error:
            # Not `subprocess.run`, which waits until a killed process has ended: the driver may hold it.
            is_held = stop_processes([process], grace_s=0.0)
            held = " and cannot be killed, the driver holds it: restart the machine" if is_held else ""
            raise OSError(f"process {process.pid} has not answered within {ASK_S:g} s{held}") from error
    except OSError as error:
        raise DataError(f"{SMI} cannot be asked about the GPUs ({error}); run `asyncrl doctor`") from error
    if process.returncode:
        found = " ".join("".join(said).split()) or f"exit status {process.returncode}"
        cure = "reset the GPU or restart the machine, or reinstall the driver"
        if re.search(UNKNOWN_FIELD, found):
            cure = "update the driver"
        raise DataError(f"{SMI}: {found}; {cure}")
    return said[0]


def list_uuids() -> list[str]:
    """The UUIDs of all GPUs; none if nvidia-smi is not installed or does not answer."""
    return re.findall(r"^GPU \d+:.*\(UUID: (GPU-[\w-]+)\)", _listing(shutil.which(SMI)), re.MULTILINE)


# It is asked for often, and a driver that hangs takes `ASK_S` each time.
@cache
def _listing(program: str | None) -> str:
    try:
        return ask("-L", program=program) if program else ""
    except DataError:
        return ""
