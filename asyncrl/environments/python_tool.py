"""The built-in tool `python`, for `environment.uses: [python]`."""

from asyncrl.sandbox.programs import python_result

# Limit for a program, below that of a call, `environment.step_s`.
PROGRAM_S = 5.0
_NOTES = {
    "time": f"stopped after {PROGRAM_S:g} s",
    "memory": "stopped: it used more than 1 GiB of memory",
    "processes": "stopped: it had too many processes",
    "files": "stopped: it made too many files",
}


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It has no network, sees no files, and remembers nothing of earlier programs.
    """
    result = python_result(code, seconds=PROGRAM_S)
    parts = [result.stdout.rstrip("\n"), result.stderr.strip("\n"), _NOTES.get(result.status, "")]
    if result.cut:
        parts.append("a part of the output is missing, because it was too long")
    return "\n".join(part for part in parts if part) or "the program printed nothing"
