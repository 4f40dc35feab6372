"""Libraries that not every run needs. They are imported where they are used; who lacks one is told which extra brings it."""

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.errors import MissingLibrary


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Around the import of a library that `asyncrl[extra]` brings. Raises MissingLibrary with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingLibrary(f"the package {error.name} is not installed; run: {install_command(extra)}") from error


def install_command(*extras: str) -> str:
    """What to type for the libraries of `extras`."""
    return f"pip install 'asyncrl[{','.join(extras)}]'"
