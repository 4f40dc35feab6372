"""One run without models: its processes, kept up as by a supervisor, the verdict on what it consumed."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil

from asyncrl.buffer.base import Audit
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.server import StoreServer
from asyncrl.buffer.users import GENERATOR, LEARNER, StoreUser, generator_rules, learner_rules, with_user
from asyncrl.config.store import StoreConfig
from asyncrl.errors import StoreError
from asyncrl.hosting.progress import Attention, Board, Limits, Watch
from asyncrl.hosting.supervisor import USER_ERROR
from asyncrl.launch.own_store import KeptStore

from . import roles
from .disk import Disk
from .hosts import Cable, Hosts, inside
from .lineage import Verdict, handed_over, judge
from .members import Member, Stuck, send
from .proxy import LATE_S, Proxy
from .roles import KEYS, RULES, RUN, Place

START_S = 300.0
"""Longest time to the first step, and from the last fault to the end of the run."""
USERS = [
    StoreUser(name, KEYS.store_password(name), rules(RUN))
    for name, rules in ((LEARNER, learner_rules), (GENERATOR, generator_rules))
]

Fsync = Literal["always", "everysec", "no"]


@dataclass(slots=True)
class World:
    """A context manager: leaving it ends every process."""

    directory: Path
    seed: int
    generators: int = 3
    fsync: Fsync = "everysec"
    is_spread: bool = False
    """Every role has a host of its own: TCP, CURVE and store users instead of socket files and proxies."""
    learner_role: Callable[..., None] = roles.learner
    generator_role: Callable[..., None] = roles.generator
    preload: str = "reliability.chaos.roles"
    """Module that has the roles; the processes are forks of one that has imported it."""
    struck: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    recoveries: dict[str, list[tuple[float, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By kind: when it struck, and what to look for."""
    exits: Counter[str] = field(default_factory=Counter)
    """Ends of processes that no fault of ours explains, by role and exit status."""
    members: dict[str, Member] = field(default_factory=dict)
    usurpations: int = 0
    home: int = 0
    """Number of the usurpation that began the directory of the learner that has the run."""
    given_back: int = 0
    """How often the first of two learners went on, and the second was fenced."""
    hang_s: float = float("inf")
    """Silence after which a process is replaced, also the store."""
    hangs: list[dict[str, Any]] = field(default_factory=list)
    """What was stopped, and how long it took to go on."""
    noted: list[tuple[str, float]] = field(default_factory=list)
    """Every fault: its kind, and when it struck."""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """What struck together, and the longest pause of steps after it."""
    poisons: list[dict[str, Any]] = field(default_factory=list)
    """Wrong frames that the store took: kind, id, content."""
    disk: Disk = field(init=False)
    server: StoreServer = field(init=False)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    hosts: Hosts | None = None
    _context: Any = field(init=False)
    _kept: KeptStore = field(init=False)
    _attention: Attention = field(default_factory=Attention)
    _killed: set[int] = field(default_factory=set)
    _old_learners: list[Member] = field(default_factory=list)
    _is_contested: bool = False
    """Whether learners that were replaced are awake."""

    def __enter__(self) -> "World":
        self.directory.mkdir(parents=True)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([self.preload])
        self.disk = Disk(self.directory / "store", self.directory)
        if self.is_spread:
            self.hosts = Hosts()
            # every link of these hosts; a run would have to name one
            config = StoreConfig(fsync=self.fsync).model_copy(update={"bind": "tcp://0.0.0.0:6379"})
            self.server = StoreServer(config, self.directory / "store", users=USERS, needs_data=False)
        else:
            self.server = StoreServer(
                StoreConfig(fsync=self.fsync), self.directory / "store", needs_data=False
            )
        self.start_store()
        self._kept = KeptStore(self.server, silent_s=self.hang_s)
        if not self.is_spread:
            self.proxies = {
                name: Proxy(self.server.socket_path, seed=self.seed) for name in ("generators", "learner")
            }
            self.proxies["control"] = Proxy(
                self.control_path, seed=self.seed, listen=self.directory / "control.sock"
            )
        self._add("learner", self.learner_role, self.checkpoints)
        for index in range(self.generators):
            self._add(f"g{index}", self.generator_role, self.seed * 1000 + index)
        return self

    def __exit__(self, *_: object) -> None:
        for member in [*self.members.values(), *self._old_learners]:
            if member.process is not None:
                member.process.kill()
                member.process.join(10.0)
        for proxy in self.proxies.values():
            proxy.close()
        self.server.stop()
        if self.hosts is not None:
            self.hosts.close()

    # --- addresses --------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """Of the learner that has the run."""
        return self.directory / f"checkpoints-{self.home}"

    @property
    def control_path(self) -> Path:
        """Where the learner that has the run listens."""
        return self.directory / f"control-{self.home}.sock"

    def _place(self, name: str) -> Place:
        is_learner = name.startswith("learner")
        if self.hosts is not None:
            return self._place_on_host(self.hosts, is_learner)
        store = self.proxies["learner" if is_learner else "generators"].address
        control = self.control_path if is_learner else self.proxies["control"].address
        return Place(
            directory=self.directory,
            store=f"redis://{store}/0",
            control=f"ipc://{control}",
            has_helpers=self.hang_s < float("inf"),
        )

    def _place_on_host(self, hosts: Hosts, is_learner: bool) -> Place:
        user, host = (LEARNER, hosts.learner) if is_learner else (GENERATOR, hosts.generators)
        store = hosts.cables["learner" if is_learner else "generators"].address(0)
        return Place(
            directory=self.directory,
            store=f"redis://{user}@{store}:6379/0",
            control=f"tcp://{hosts.cables['control'].address(0)}:5555",
            password=KEYS.store_password(user),
            network=host.file,
        )

    @property
    def pairs(self) -> dict[str, Proxy] | dict[str, Cable]:
        """What can be cut."""
        return self.proxies if self.hosts is None else self.hosts.cables

    def _add(self, name: str, role: Callable[..., None], *arguments: Any) -> None:
        self.members[name] = Member(name, role, self._place(name), arguments)

    # --- life -------------------------------------------------------------------------------------

    def start_store(self) -> None:
        """Start it on its disk, without a proxy in between."""
        with ExitStack() as stack:
            stack.enter_context(self.disk.below())
            if self.hosts is not None:
                stack.enter_context(inside(self.hosts.store.file))
            self.server.start()

    def revive_store(self) -> None:
        """Start it again; what does not come up now (full disk, say) is tried again at the next look."""
        with suppress(StoreError):
            self.start_store()

    def start(self) -> None:
        """Start everybody and wait for the first steps."""
        self.tend()
        self.wait(lambda: self.version >= 3, START_S, "the third step")

    def tend(self) -> None:
        """Start what has died; wake what has slept its time."""
        now_s = time.monotonic()
        if self.hang_s < float("inf"):
            self._replace_hung()
        if not self.server.is_running:
            self.exits["store"] += 1
            self.server.stop()
            self.revive_store()
        for member in self.members.values():
            if 0.0 < member.stopped_until_s <= now_s:
                member.stopped_until_s = 0.0
                send(member, signal.SIGCONT)
        if self._is_contested and self.members["learner"].ended_with == USER_ERROR:
            self._give_back()
        for member in self.members.values():
            if not member.is_alive and not self._is_finished(member):
                self._restart(member)

    def _replace_hung(self) -> None:
        """As the supervisor does, by the same signs and judges."""
        now_s = self._attention.look()
        if self.server.is_running and self._kept.is_silent():
            self.server.kill()
            self.revive_store()
            self._kept = KeptStore(self.server, silent_s=self.hang_s)
        for member in self.members.values():
            if member.is_alive and member.watch is not None and member.watch.look(now_s):
                self.kill(member.name)

    def pids(self, kind: str) -> list[int]:
        """Of the processes of a kind that can hang: learner, generator, store, or a helper of theirs."""
        if kind == "store":
            return [self.server.pid]
        owner, marker = roles.HELPERS.get(kind, (kind, ""))
        prefix = "g" if owner == "generator" else owner
        awake = [one for one in self.members.values() if one.is_alive and not one.stopped_until_s]
        found = [one.pid for one in awake if one.name.startswith(prefix)]
        if not marker:
            return found
        children = [child for pid in found for child in psutil.Process(pid).children()]
        return [child.pid for child in children if marker in " ".join(child.cmdline())]

    def _is_finished(self, member: Member) -> bool:
        """A generator that is killed at the very end has nothing to come back for."""
        learner = self.members["learner"].process
        is_over = (self.directory / roles.FINISH).exists() and learner is not None and learner.exitcode == 0
        return is_over and not member.is_alive

    def _restart(self, member: Member) -> None:
        if member.process is not None and member.pid not in self._killed:
            self.exits[f"{member.name.rstrip('0123456789')} {member.process.exitcode}"] += 1
        if member.board is not None:
            member.board.close()
        member.board = board = Board([member.name])
        member.watch = Watch(board.signs, Limits(hang_s=self.hang_s, slow_s=2 * self.hang_s))
        signs = f"/proc/{os.getpid()}/fd/{board.descriptor}"
        member.process = self._context.Process(
            target=roles.start,
            args=(member.role, member.place, member.name, signs, *member.arguments),
            daemon=True,
        )
        member.process.start()
        member.stopped_until_s = 0.0
        member.starts += 1

    def wait(self, condition: Callable[[], bool], wait_s: float, what: str) -> None:
        """Tend the run until `condition`. Raises Stuck."""
        until_s = time.monotonic() + wait_s
        while not condition():
            self.tend()
            if time.monotonic() > until_s:
                raise Stuck(
                    f"{self.directory}: no {what} within {wait_s:.0f} s; exits {dict(self.exits)}, "
                    f"{self.audit()}; last faults {self.noted[-6:]}"
                )
            time.sleep(0.02)

    def run_for(self, seconds: float) -> None:
        """Tend the run."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(left_s, 0.02))

    # --- faults on processes ----------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """As kill -9. What is stopped can be killed too."""
        member = self.members[name]
        if member.is_alive:
            self._killed.add(member.pid)
            send(member, signal.SIGKILL)
            member.process.join(10.0)  # type: ignore[union-attr]

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP now, SIGCONT later: a zombie that still holds its tickets, its lock, its epoch."""
        if self.members[name].is_alive:
            send(self.members[name], signal.SIGSTOP)
            self.members[name].stopped_until_s = time.monotonic() + seconds

    def refuse_second(self) -> None:
        """A second learner on the same host must not get the lock. Raises Stuck."""
        second = Member("learner-second", roles.learner, self._place("learner-second"), (self.checkpoints,))
        self._restart(second)
        assert second.process is not None
        second.process.join(60.0)
        if second.process.exitcode != USER_ERROR:
            second.process.kill()
            raise Stuck(f"a second learner ended with status {second.process.exitcode}, not {USER_ERROR}")

    def usurp(self) -> None:
        """A learner on another host, which sees neither lock nor directory, takes the run over from a stopped
        one.

        It goes on from a copy of the checkpoints.
        """
        old = self.members["learner"]
        if not old.is_alive:
            return
        send(old, signal.SIGSTOP)
        copied = self.checkpoints
        self.usurpations += 1
        self.home = self.usurpations
        if copied.exists():
            shutil.copytree(copied, self.checkpoints)
        self.proxies["control"].upstream = self.control_path
        self._old_learners.append(old)
        self._add("learner", roles.learner, self.checkpoints)

    def wake_old(self) -> None:
        """Wake the learners that were replaced, and wait until one of all goes on. Raises Stuck."""
        for old in self._old_learners:
            send(old, signal.SIGCONT)
        self._is_contested = True
        self.wait(
            lambda: not any(old.is_alive for old in self._old_learners),
            START_S,
            "fencing of a learner that was replaced",
        )
        self._is_contested = False
        statuses = {old.ended_with for old in self._old_learners}
        self._old_learners.clear()
        # Else it was fenced, or found after its sleep no store, or died of a broken connection.
        if 0 in statuses:
            raise Stuck(f"a learner that was replaced took the run for finished: {statuses}")

    def _give_back(self) -> None:
        """The second learner was fenced by the first.

        So it is where the store was wiped in between, or the first was stopped before it had begun: the one
        that recovers last has the run. That one goes on by itself, and the second is not started again.
        """
        for old in self._old_learners:
            if old.ended_with != USER_ERROR:
                self._old_learners.remove(old)
                self.members["learner"], old.stopped_until_s = old, 0.0
                self.home = int(old.arguments[0].name.removeprefix("checkpoints-"))
                self.proxies["control"].upstream = self.control_path
                self.given_back += 1
                return

    # --- what can be seen -------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the last step that any learner made."""
        return next(
            (
                event["version"]
                for event in reversed(self.events(tail_bytes=4096))
                if event["event"] == "step"
            ),
            0,
        )

    def events(self, *, tail_bytes: int | None = None) -> list[dict[str, Any]]:
        """What learners said, oldest first."""
        path = self.directory / roles.EVENTS
        if not path.exists():
            return []
        with path.open("rb") as file:
            if tail_bytes is not None:
                file.seek(max(0, path.stat().st_size - tail_bytes))
            lines = file.read().splitlines()
        return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]

    @property
    def furthest(self) -> int:
        """The highest id that any learner has trained on lately."""
        return max(
            (event["last"] for event in self.events(tail_bytes=1 << 16) if event["event"] == "step"),
            default=0,
        )

    def end_round(self, faults: Sequence[tuple[str, float]]) -> None:
        """The run has gone on after them: note the longest time without a step since the last of them."""
        if faults:
            since_s = max(at_s for _, at_s in faults)
            steps = [event["at_s"] for event in self.events(tail_bytes=1 << 18) if event["event"] == "step"]
            times = [since_s, *(at_s for at_s in steps if at_s > since_s)]
            pause_s = max(after - before for before, after in pairwise(times))
            self.rounds.append({"kinds": [kind for kind, _ in faults], "pause_s": round(pause_s, 2)})

    @contextmanager
    def buffer(self) -> Iterator[RedisBuffer]:
        """A handle past every proxy."""
        url, password = self.server.url, None
        if self.is_spread:
            url, password = with_user(url, LEARNER), KEYS.store_password(LEARNER)
        connection = StoreConnection(url, password=password, retry_s=10.0)
        try:
            yield RedisBuffer(connection, RUN, RULES)
        finally:
            connection.close()

    def found(self) -> dict[str, float]:
        """Figures of a kind of run."""
        return {}

    def audit(self) -> Audit | StoreError:
        """The store's, or why there is none."""
        try:
            with self.buffer() as buffer:
                return buffer.audit()
        except StoreError as error:
            return error

    # --- the end ----------------------------------------------------------------------------------

    def finish(self) -> Verdict:
        """No more faults: let the run end by itself, and judge it. Raises Stuck."""
        self.settle()
        return self._judge()

    def settle(self) -> None:
        """No more faults: let the run end by itself. Raises Stuck."""
        for proxy in self.proxies.values():
            proxy.swallow_rate = proxy.repeat_rate = 0.0
        for pair in self.pairs.values():
            pair.heal()
        self.disk.fill(False)
        self.disk.slow(False)
        self.wake_old()
        if any(proxy.repeated for proxy in self.proxies.values()):
            self.run_for(LATE_S)
        # Takes of an earlier life that are in no checkpoint are replayed first: the end shall leave none.
        furthest = max(event.get("version", 0) for event in self.events())
        self.wait(lambda: self.version >= furthest + 2, START_S, f"step {furthest + 2}")
        (self.directory / roles.FINISH).touch()
        self.wait(
            lambda: all(self._is_finished(member) for member in self.members.values()),
            START_S,
            "end of the run",
        )

    def _judge(self) -> Verdict:
        last = max(self.checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        verdict = judge(last, self.directory / "manifests", handed_over(self.directory))
        return replace(verdict, wrong=(*verdict.wrong, *self._imbalance(verdict.groups), *self._given_up()))

    def _given_up(self) -> list[str]:
        """Ends after which no supervisor starts a process again: a person would have to."""
        return [
            f"{count} times {one}, and a person had to start it again"
            for one, count in self.exits.items()
            if one.endswith(f" {USER_ERROR}")
        ]

    def _imbalance(self, consumed: int) -> list[str]:
        with self.buffer() as buffer:
            audit = buffer.audit()
        wrong = [] if audit.missing == 0 else [f"audit: {audit.missing} ids are missing: {audit}"]
        if audit.taken + audit.done != consumed:
            wrong.append(
                f"audit: the store counts {audit.taken} taken and {audit.done} done, the ledger {consumed}"
            )
        return wrong
