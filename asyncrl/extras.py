"""Imports of optional libraries. If one is missing, the error names the extra that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.errors import MissingLibrary


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import a library of `asyncrl[extra]` in the body. Raises MissingLibrary with the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is not installed; run: {install_command(extra)}"
        raise MissingLibrary(message) from error


def install_command(*extras: str) -> str:
    """Return the command that installs the libraries of `extras`."""
    return f"pip install 'asyncrl[{','.join(extras)}]'"
