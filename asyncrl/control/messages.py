"""The control plane's wire format, and the log of rejected messages."""

import logging
import time
from dataclasses import dataclass
from typing import get_args

from asyncrl.control.base import Heartbeat, Hello, Leave, Refused, Stop, Welcome
from asyncrl.errors import WireError
from asyncrl.weights.base import UpdateOrder, UpdateReport
from asyncrl.wire.codec import HEADER_BYTES, MESSAGE_LIMITS, MessageCodec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnknownMember:
    """learner -> generator: the heartbeat's sender is not a member, or no longer, and must say hello."""


FromGenerator = Hello | Heartbeat | Leave | UpdateReport
FromLearner = Welcome | Refused | UnknownMember | Stop | UpdateOrder
CODEC: MessageCodec[FromGenerator | FromLearner] = MessageCodec(get_args(FromGenerator | FromLearner))

# Largest message that a generator accepts: orders carry the layout of the model, about 75 bytes per tensor.
MAX_ORDER_BYTES = HEADER_BYTES + MESSAGE_LIMITS.meta_bytes
# A report's reason is cut off here before it is sent.
MAX_REASON_CHARACTERS = 4000
_LOG_EVERY_S = 1.0


class Rejections:
    """Rejected messages: all are counted, at most one a second is logged."""

    def __init__(self) -> None:
        self.count = self._logged = 0
        self._logged_at_s = -_LOG_EVERY_S

    def add(self, error: Exception) -> None:
        """Count a message that was rejected because of `error`."""
        self.count += 1
        if time.monotonic() - self._logged_at_s < _LOG_EVERY_S:
            return
        log.warning(
            "control plane: a message was rejected (the %d. since the last such line): %s",
            *(self.count - self._logged, error),
            exc_info=None if isinstance(error, WireError | TypeError) else error,
        )
        self._logged, self._logged_at_s = self.count, time.monotonic()
