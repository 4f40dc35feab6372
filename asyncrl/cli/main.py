"""The entry point: runs a command and ends with a message and an exit status (see docs/troubleshooting.md).

Nothing heavy is imported before the handler of Ctrl-C and SIGTERM is set.
"""

import os
import select
import signal
import sys
from types import FrameType

DONE = 0
# After Ctrl-C; likewise `up` returns 143 after SIGTERM, 129 after a closed terminal.
INTERRUPTED = 128 + signal.SIGINT

_interrupted = 0  # the exit status, once a signal has come


def main() -> None:
    """Run the command line and exit. A user's mistake prints a message, never a traceback."""
    # To find plugins, pydantic reads the metadata of all packages: a third of the time of `validate`.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    # A proxy for the internet does not reach this host's own services. As a whole `*` means all hosts.
    if (direct := os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "") != "*":
        hosts = dict.fromkeys([*filter(None, direct.split(",")), "localhost", "127.0.0.1", "::1"])
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(hosts)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by 2>&-: a file of ours would take its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the end
    sys.unraisablehook = _unraisable
    status = INTERRUPTED
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a script's background commands ignore it
            signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _interrupt)
        status = _status(sys.argv[1:])
    except KeyboardInterrupt:  # may be raised anywhere, also within an import
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the exit is left to interrupt
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Output that cannot be written goes to /dev/null: Python would try again at exit and report it.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def _status(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # A terminal without `±` in its encoding shows `?`.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    output = _output()
    try:
        from asyncrl.cli.app import COMPLETION, run

        status = run(arguments, completes=COMPLETION in os.environ)
        sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 - the outermost handler, which reports the error
        if _interrupted:  # a library turned what `_interrupt` raised into an error of its own
            return _interrupted
        if isinstance(error, BrokenPipeError):
            pipes = select.poll()
            pipes.register(sys.stdout.fileno(), select.POLLOUT)
            # Our own output is broken, as in `asyncrl samples | head`, which is no error.
            if any(event & select.POLLERR for _, event in pipes.poll(0)):
                return DONE
        from asyncrl.cli.mistakes import explain

        status = explain(error, arguments)
    except SystemExit:
        if output == _output():
            raise
        return DONE  # rich found that the output has no reader, and replaced it
    return status


def _output() -> tuple[int, int] | None:
    """Return the identity of the file or pipe of standard output."""
    try:
        found = os.fstat(1)
    except OSError:  # closed
        return None
    return found.st_dev, found.st_ino


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, after SIGTERM SystemExit, wherever the program is, also in a stuck event loop.

    Exit immediately on the second signal, and within an import: C++ libraries abort or raise another error
    when an import inside them fails. Child processes end with this process.
    """
    global _interrupted
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if _interrupted or frame is not None:  # it is importing
        os._exit(128 + number)
    _interrupted = 128 + number
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(_interrupted)


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """End the command on a signal that a library in another language has swallowed."""
    if _interrupted and found.exc_type in (KeyboardInterrupt, SystemExit):
        os._exit(_interrupted)
    sys.__unraisablehook__(found)


if __name__ == "__main__":
    main()
