"""Entry point: how a command ends, in an exit status and a message. docs/troubleshooting.md has the table.

Nothing heavy is imported before somebody catches Ctrl-C.
"""

import os
import select
import signal
import sys
from types import FrameType

DONE = 0
# Of Ctrl-C. `up` ends so by other signals too: 143 SIGTERM, 129 a closed terminal.
INTERRUPTED = 128 + signal.SIGINT

_interrupted = False


def main() -> None:
    """Run the command that was typed and exit; a mistake of the user's is a message, never a traceback."""
    # To find plugins, pydantic reads the metadata of every installed package: a third of the time until `validate` answers.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    sys.unraisablehook = _unraisable
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is in the background of a script
        signal.signal(signal.SIGINT, _interrupt)
    status = INTERRUPTED
    try:
        status = _status(sys.argv[1:])
    except KeyboardInterrupt:  # anywhere, also within an import
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to be interrupted but the exit
        _give_up_output_that_fails()
    sys.exit(status)


def _status(arguments: list[str]) -> int:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # a terminal that knows no `±` shows `?`
    output = _output()
    try:
        from asyncrl.cli.app import run

        status = run(arguments)
        if sys.stdout:
            sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - all that is left is to say it
        if _interrupted:  # what a library made of it
            return INTERRUPTED
        if isinstance(error, BrokenPipeError) and _reader_left():
            return DONE
        from asyncrl.cli.mistakes import explain

        status = explain(error, arguments)
    except SystemExit:
        if output == _output():
            raise
        return DONE  # rich found that the reader has left, and took its output away
    return status


def _output() -> tuple[int, int] | None:
    """Which file or pipe standard output is."""
    try:
        found = os.fstat(1)
    except OSError:  # closed
        return None
    return found.st_dev, found.st_ino


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: unwind from wherever it finds us, also from an event loop that does not get to its next turn.

    Leave at once when it is the second one, and within an import: libraries in C++ abort when one of their imports raises, or
    make something else of it. Processes that we started end with us.
    """
    global _interrupted
    if _interrupted or _is_importing(frame):
        os._exit(INTERRUPTED)
    _interrupted = True
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """A Ctrl-C that a library in another language has swallowed still ends the command."""
    if found.exc_type is KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(found)


def _reader_left() -> bool:
    """Whether it is our own output that nobody reads: after `asyncrl samples | head` there is nothing more to say."""
    pipes = select.poll()
    pipes.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in pipes.poll(0))


def _give_up_output_that_fails() -> None:
    """Python would try to write the rest once more, and complain."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
