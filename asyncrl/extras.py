"""Imports of optional libraries. If one is missing, the error names the extra that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.errors import MissingLibrary


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import a library of `asyncrl[extra]` within this context. Raises MissingLibrary with the install
    command."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingLibrary(
            f"the package {error.name} is not installed; run: {install_command(extra)}"
        ) from error


def install_command(*extras: str) -> str:
    """The command that installs the libraries of `extras`."""
    return f"pip install 'asyncrl[{','.join(extras)}]'"
