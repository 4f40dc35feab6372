"""Every exception raised on purpose. A message says where, what was found, what is allowed, what to do."""


class AsyncRLError(Exception):
    """Base of all; the command line prints its text without a traceback."""


class ConfigError(AsyncRLError, ValueError):
    """A configuration that cannot run: unknown key, wrong type, impossible combination."""


class DataError(AsyncRLError, ValueError):
    """A dataset or model that is missing or malformed."""


class MissingLibrary(AsyncRLError, ImportError):
    """A library that one feature needs, and that an extra of this package brings."""


class ShapeError(AsyncRLError, ValueError):
    """Tensors that do not fit together."""


class WireError(AsyncRLError, ValueError):
    """Bytes that are not a frame of ours."""


class WireVersionError(WireError):
    """A frame of another wire version."""


class StoreError(AsyncRLError):
    """The store cannot be reached or used."""


class StoreRefused(StoreError):
    """The store answers and will not serve us: wrong password, too old, not a store at all. Asking again is no use."""


class ForeignRunError(StoreError):
    """The store holds another run."""


class BufferFenced(StoreError):
    """Another learner has taken over the run; this one must stop."""


class BufferGap(StoreError):
    """The store's history is not this learner's: reload the last checkpoint and recover."""


class ControlError(AsyncRLError):
    """The control plane refused or lost a peer."""


class ControlRefused(ControlError):
    """The learner will not have this generator: another release, another config, a name that is taken."""


class UpdatesRefused(ControlError):
    """Weights arrive at the generators, and none of them may sample with them: sending them again is no use."""


class TransferError(AsyncRLError):
    """A weight transfer failed, was cut off, or did not verify."""


class EngineError(AsyncRLError):
    """The inference engine cannot do what was asked."""


class ResultError(EngineError):
    """The engine answered, and nobody can train on it: a failure of that ticket, the engine goes on."""


class RewardError(AsyncRLError):
    """A reward function raised, hung, or returned something that is no reward."""


class CheckpointError(AsyncRLError):
    """A checkpoint that is missing, torn, or does not belong to this run."""


class RunError(AsyncRLError):
    """The run cannot start or go on: lock held, port taken, process died too often."""


class RunNotUp(RunError):
    """The run is not there yet; it may come."""


class CheckpointsRefused(RunError):
    """Something was saved, nothing of it can be loaded, and a run does not begin again by itself."""
