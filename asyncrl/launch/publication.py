"""How rank 0 gets new weights to the generators: a copy that senders deliver, and the control plane that
orders it."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from asyncrl.control.base import MemberStatus
from asyncrl.control.zmq import ControlHub
from asyncrl.weights.base import Publisher


class Publication:
    """The publisher and the control plane. Nothing here waits for a generator."""

    def __init__(self, publisher: Publisher, hub: ControlHub) -> None:
        """`hub` sends what `publisher` has published."""
        self._publisher = publisher
        self._hub = hub
        self._rounds = 0

    def publish(
        self, version: int, parameters: Iterable[tuple[str, Tensor]], probe_logprobs: Sequence[float]
    ) -> None:
        """Copy the weights, and order every generator to load them."""
        self._publisher.publish(version, parameters, probe_logprobs)
        self._hub.announce(version)

    def check(self) -> None:
        """Raises ControlError when the control plane has broken down."""
        self._hub.check()

    def is_in_touch(self) -> bool:
        """Whether the control plane has done something since the last call; if not, no weights arrive
        anywhere."""
        before, self._rounds = self._rounds, self._hub.rounds
        return self._rounds != before

    @property
    def endpoint(self) -> str:
        """Where generators call."""
        return self._hub.endpoint

    def members(self) -> list[MemberStatus]:
        """The generators that have joined."""
        return self._hub.members()

    def counters(self) -> Mapping[str, float]:
        """The control plane's counters by name: joined, left, died, updates, ..."""
        return self._hub.counters()

    def close(self, reason: str, *, farewell: bool) -> None:
        """Stop. With `farewell` the generators hear that the run is over, else they wait for the next
        learner."""
        self._hub.stop(reason, farewell=farewell)
        self._publisher.close()


def interface_of(bind: str | None) -> str | None:
    """The address in `control.bind` that generators on other hosts reach; None when all are on this host."""
    return None if bind is None else bind.removeprefix("tcp://").rpartition(":")[0]
