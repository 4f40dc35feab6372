"""Asks nvidia-smi, which asks the driver: it makes no CUDA context, and takes no GPU memory."""

import re
import shutil
import subprocess
from functools import cache

from asyncrl.errors import DataError

SMI = "nvidia-smi"
ASK_S = 20.0
UNKNOWN_FIELD = r'Field "([\w.]+)" is not a valid field'


def is_installed() -> bool:
    """Return whether this machine or container has nvidia-smi."""
    return shutil.which(SMI) is not None


def ask(*arguments: str, program: str = SMI) -> str:
    """Return what nvidia-smi prints. Raises DataError."""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(f"{SMI} cannot be asked about the GPUs ({error}); run `asyncrl doctor`") from error
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split()) or f"exit status {done.returncode}"
        cure = "reset the GPU or restart the machine, or reinstall the driver"
        if re.search(UNKNOWN_FIELD, said):
            cure = "update the driver"
        raise DataError(f"{SMI}: {said}; {cure}")
    return done.stdout


def count_listed() -> int:
    """Count the GPUs that nvidia-smi lists; 0 if it is not installed or does not answer."""
    return len(_found(r"^GPU \d+:", shutil.which(SMI), "-L"))


def list_uuids() -> list[str]:
    """The UUIDs of all GPUs; none if nvidia-smi is not installed or does not answer."""
    return _found(r"\bGPU-[\w-]+", shutil.which(SMI), "--query-gpu=uuid", "--format=csv,noheader")


# These are asked for often, and a driver that hangs takes `ASK_S` each time.
@cache
def _found(pattern: str, program: str | None, *arguments: str) -> list[str]:
    try:
        return re.findall(pattern, ask(*arguments, program=program), re.MULTILINE) if program else []
    except DataError:
        return []
