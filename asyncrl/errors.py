"""All exceptions that asyncrl raises. Messages say where, what was found, what is allowed, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager


class AsyncRLError(Exception):
    """Base class of all errors. The command line prints their text without a traceback."""


class ConfigError(AsyncRLError, ValueError):
    """A config that cannot run: an unknown key, a wrong type, or an impossible combination."""


class DataError(AsyncRLError, ValueError):
    """A dataset or model that is missing or malformed."""


class MissingLibrary(AsyncRLError, ImportError):
    """A library is missing that one feature needs. An extra of this package installs it."""


class ShapeError(AsyncRLError, ValueError):
    """Tensors with shapes that do not fit together."""


class WireError(AsyncRLError, ValueError):
    """Bytes that are not a valid frame."""


class WireVersionError(WireError):
    """A frame of another wire version."""


class StoreError(AsyncRLError):
    """The store cannot be reached or used."""


class StoreRefused(StoreError):
    """The store refuses to serve this run: wrong password, too old, or not a store. A retry does not help."""


class ForeignRunError(StoreError):
    """The store holds another run."""


class BufferFenced(StoreError):
    """Another learner has taken over the run; this one must stop."""


class BufferGap(StoreError):
    """The store's history differs from this learner's: reload the last checkpoint and recover."""


class ControlError(AsyncRLError):
    """The control plane refused or lost a peer."""


class ControlRefused(ControlError):
    """The learner refuses this generator: another release, another config, or a name that is taken."""


class UpdatesRefused(ControlError):
    """Weights arrive, but no generator may sample with them. Sending them again does not help."""


class TransferError(AsyncRLError):
    """A weight transfer failed, was cut off, or did not verify."""


class EngineError(AsyncRLError):
    """The inference engine cannot do what was asked."""


class CodeChanged(EngineError):
    """A file with user code changed under a running generator, which must end."""


class RowsChanged(EngineError):
    """A file of rows changed under a process that reads rows from it, which must end."""


class ResultError(EngineError):
    """The engine's answer cannot be trained on. The ticket has failed, the engine continues."""


class DriftError(ResultError):
    """A turn was sampled behind other token ids than those that its session would train it behind."""


class RenderError(AsyncRLError, ValueError):
    """A chat template refuses the messages."""


class RewardError(AsyncRLError):
    """A reward function raised, hung, or returned something that is not a reward."""


class EnvironmentFault(AsyncRLError):
    """An environment failed: it raised, hung, died, or answered nonsense. The episode is never scored."""

    # An environment's process tells faults from mistakes of the model by this attribute.
    fault = True

    def __init__(self, message: str, *, reason: str = "raised") -> None:
        """Give the reason that counts it: `raised`, `returned`, `died`, `hung`, `start`, `long`, `silent`."""
        super().__init__(message)
        self.reason = reason


class MemoryFullError(AsyncRLError):
    """A step of the learner needs more memory than its GPU has."""


class CheckpointError(AsyncRLError):
    """A checkpoint that is missing, incomplete, or belongs to another run."""


class RunError(AsyncRLError):
    """The run cannot start or continue, for example because a process died too often."""


class RunNotUp(RunError):
    """The run is not up; it may start later."""


class CheckpointsRefused(RunError):
    """Checkpoints were saved, but none can be loaded, and a run never begins again by itself."""


def as_unicode(text: str) -> str:
    """Return `text` with a question mark for half of a surrogate pair, which neither frames nor stores take.

    User code has such texts from JSON, names of files and outputs of programs.
    """
    return text.encode("utf-8", "replace").decode()


def reason_of(error: BaseException) -> str:
    """Return the text of one of our errors, and type and text of the first of any others, as Unicode."""
    first = _leaves(error)[0]
    return as_unicode(str(first) if isinstance(first, AsyncRLError) else f"{type(first).__name__}: {first}")


def lacks_gpu_memory(error: RuntimeError) -> bool:
    """Return whether torch, CUDA, Triton or NCCL found no room on a GPU; each says it in its own way."""
    return any(words in str(error).lower() for words in ("out of memory", "failed to cuda calloc"))


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


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise the first error of a task group as itself, with the others as its notes, if all are ours.

    A group with another exception, which is a fault in the code, is raised as it is.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        errors = _leaves(group)
        if not all(isinstance(error, AsyncRLError) for error in errors):
            raise
    else:
        return
    for other in errors[1:]:
        errors[0].add_note(f"at the same time, {type(other).__name__}: {other}")
    raise errors[0] from errors[0].__cause__  # and not from the group


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
