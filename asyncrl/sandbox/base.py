"""The interface of a sandbox, which runs the programs that a model wrote, and the result of a program."""

from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

Status = Literal["ok", "error", "time", "memory", "processes", "files"]
"""How a program ended: exit status 0, any other end of its own, or the limit for which it was killed."""

OUTPUT_BYTES = 32768
"""How much is kept of each output of a program, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of one program. A program that fails or is killed for a limit is a result, not an error."""

    # The beginning of the output, as UTF-8; other bytes become U+FFFD.
    stdout: str
    # The end of the error output, with the traceback.
    stderr: str
    status: Status
    # Wall time.
    seconds: float
    # Whether output is missing because there was too much of it.
    cut: bool


class Sandbox(Protocol):
    """Runs programs, one at a time: `async with Sandbox(...) as box: result = await box.run(code)`."""

    async def __aenter__(self) -> Self:
        """Raises EnvironmentFault if the sandbox cannot be made, with the reason and the cure."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the sandbox and everything in it."""
        ...

    async def run(self, code: str, *, stdin: str = "", seconds: float = 10.0) -> Result:
        """Run a Python program with this standard input, for at most `seconds` of wall and of CPU time.

        A program sees nothing of the programs before it. Raises EnvironmentFault if the sandbox broke; the
        next call makes another one.
        """
        ...
