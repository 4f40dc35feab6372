"""What the world remembers of one lane, to judge every call on it."""

from typing import TYPE_CHECKING, Any

from asyncrl.buffer.ledger import next_chain
from asyncrl.buffer.shards import join

from .calls import Call, check_call
from .client import LATEST_S
from .invariants import check_state
from .lane import Lane, require
from .outcomes import outcome
from .store import OOM

if TYPE_CHECKING:
    from .world import World


class LaneWatch:
    """One shard."""

    def __init__(self, world: "World", name: str, shard: int) -> None:
        self._world = world
        self.name, self.shard = name, shard
        self.credit = 0
        """Highest id that a learner was allowed to open."""
        self._lane: Lane | None = None
        """After the last call; None when something else has changed the store since."""
        self._seen: dict[tuple[int, str], tuple[int, ...]] = {}
        self._recovered_takes = 0
        self._answers: dict[str, tuple[str, set[int]]] = {}
        """holder -> its last lease request, and the tickets that it got"""

    def look(self) -> Lane:
        data = self._world.store.data
        return (
            self._lane
            if self._lane is not None and self._lane.is_still(data)
            else Lane(data, self.name, self._lane)
        )

    def before(self) -> None:
        """A call comes."""
        self._lane = self._lane or self.look()

    def after(self, name: str, arguments: tuple[str, ...], reply: Any) -> None:
        """A function of the store, or UNLINK, has run."""
        # A learner without a checkpoint deletes what was there, and fences whoever was before.
        if name == "unlink":
            self.store_is_another()
            return
        world, before, lane = self._world, self._lane, self.look()
        assert before is not None
        self._lane = lane
        world.outcomes[outcome(name, reply, lane.frames)] += 1
        if name == "recover" and reply[0] == b"OK":
            self._recovered(before, arguments)
        elif name == "take" and lane.takes != before.takes:
            self._assigned(before, lane)
        elif name == "put":
            world.stored(self, lane)
        call = Call(
            name=name,
            arguments=arguments,
            reply=reply,
            before=before,
            after=lane,
            now_ms=world.store.now_ms,
            credit=self.credit,
            durable=world.durable_ids(self) if name == "commit" else set(),
            answered=self._answered_before(arguments) if name == "lease" else None,
            max_attempts=world.rules.max_attempts,
            max_deaths=world.rules.max_deaths,
            max_bytes=world.rules.max_bytes,
            name_of=self.name_of,
            window=world.windows.get(arguments[1]) if name == "take" else None,
        )
        check_call(call)
        # What has not changed was right before; a recovery clears up strays.
        if lane is not before or name == "recover":
            check_state(lane, world.store.strays_of(self.name))
        self._remember_answer(name, arguments, reply)
        world.is_closed = world.is_closed or (name == "close" and reply[0] == b"OK")

    def _assigned(self, before: Lane, lane: Lane) -> None:
        """A take is new, or those that were there were undone for a learner that wants fewer."""
        undone = {number for number in before.takes if before.takes[number] != lane.takes.get(number)}
        self._seen = {key: ids for key, ids in self._seen.items() if key[0] not in undone}
        if lane.takes:
            self._world.assigned(self, lane)

    def name_of(self, local_id: int) -> int:
        """The id that everybody else knows."""
        return join(self.shard, local_id, len(self._world.lanes))

    def consumed(self, owner: str, number: int, chain: str, ids: tuple[int, ...]) -> None:
        """The same take again, after a crash, has the same ids, unless the store lost something."""
        lane = self.look()
        if lane.meta.get("owner") != owner or lane.takes.get(number) != (chain, next_chain(chain, ids), ids):
            return  # replaced, or the store has forgotten this take, while the learner was stopped; it is about to hear of it
        before = self._seen.setdefault((number, chain), ids)
        require(before == ids, "a replayed take has other ids", number, before, ids)

    def store_is_another(self) -> None:
        """It lost something: what was assigned and answered before may be assigned and answered otherwise."""
        self._lane = None
        self._seen.clear()
        self._answers = dict(self.look().requests)

    def _answered_before(self, arguments: tuple[str, ...]) -> set[int] | None:
        request, ids = self._answers.get(arguments[0], ("", set()))
        return ids if request == arguments[3] else None

    def _remember_answer(self, name: str, arguments: tuple[str, ...], reply: Any) -> None:
        """Of each holder the last one with tickets, as the store does."""
        if name == "revoke":
            self._answers.pop(arguments[0], None)
        elif name == "lease" and reply != OOM and reply[3] and self._answered_before(arguments) is None:
            self._answers[arguments[0]] = (arguments[3], {int(i) for i in reply[3]})

    def _recovered(self, before: Lane, arguments: tuple[str, ...]) -> None:
        """The store let go of what the ledger holds; an older or foreign ledger may assign otherwise."""
        self._world.store.forget_strays(self.name)
        remembers = self._world.forgot_s < self._world.engine.now_s - LATEST_S
        is_alive = {
            learner.shards[self.shard]._owner: learner.process.is_alive for learner in self._world.learners
        }
        is_robbed = is_alive.get(before.meta.get("owner", "")) and not is_alive[arguments[1]]
        require(not (remembers and is_robbed), "a dead learner took the lane from one that lives", arguments)
        learner, owner, takes = self._world.learner, arguments[1], int(arguments[3])
        is_newest = learner is not None and learner.stands_at(self.shard, owner, takes)
        if not is_newest or takes < self._recovered_takes:
            self._seen.clear()
        self._recovered_takes = takes
        self._seen = {(number, chain): ids for (number, chain), ids in self._seen.items() if number > takes}
