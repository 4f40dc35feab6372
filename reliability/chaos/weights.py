"""Faults on the weights plane: `python -m reliability.chaos.weights [--injections N] [--joins N] [--aborts N]
[--minutes M] [--transport slot|tcp|nccl] [--hosts]`.

The learner's end is here: publisher, control hub, a loop that publishes a version every `STEP_S` and times
itself. Generators are the shipped loop, control client and staging,
in processes of their own, with a toy engine whose tensors all hold the version: a token that sees two
numbers, or another one than its tag, is of a mixture. With `--hosts`, learner and generators have a network
each, joined by a cable. Over TCP those that are struck share what they fetch, and the others fetch for
themselves. Over NCCL, whose part Gloo plays here, two generators share a host and a third one has its own.

    stricken   a receiver is killed or stopped in the middle of an update; the others and the learner must not notice
    visitors   generators join, take one update, and leave or die
    aborted    transfers end at a random tensor, on the wire or in the engine
    parted     nccl only, in place of `stricken`: one of the two processes between learner and host is stopped
               during a transfer, and then killed, left, or continued
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from asyncrl.algo.trainable import GroupLimits
from asyncrl.buffer.base import Lease, PutOutcome
from asyncrl.config.sections import ControlConfig
from asyncrl.control.base import Hello
from asyncrl.control.client import ControlClient
from asyncrl.control.membership import RunIdentity
from asyncrl.control.zmq import ControlHub
from asyncrl.engine.base import SamplingSpec
from asyncrl.engine.fake import FakeEngine, logits_of
from asyncrl.engine.sampler import Sampler
from asyncrl.errors import TransferError
from asyncrl.generator import Generator, GeneratorSettings, Lane
from asyncrl.hosting.processes import die_with_parent
from asyncrl.rewards.base import RewardInput, Score
from asyncrl.run.keys import RunKeys
from asyncrl.types import Prompt, Ticket
from asyncrl.weights import layout, nccl, staging, stream
from asyncrl.weights.agreement import Agreement
from asyncrl.weights.base import TRANSPORTS, TensorSpec, UpdateOrder
from asyncrl.weights.publisher import SlotPublisher
from asyncrl.weights.slots import open_slot
from asyncrl.weights.staging import HostStaging, Relay

from .helpers import PROBE, probe_logprobs
from .hosts import Hosts, inside, move_to
from .pairs import ENDINGS, ends_of, pairs_of

LAYOUT = layout.Layout.plan(
    [TensorSpec(name=f"w{i}", dtype="int32", shape=(256, 512)) for i in range(24)], 1 << 20
)
KEYS = RunKeys(bytes(32))
STEP_S = 0.5
DEADLINE_S, TIMEOUT_S, HEARTBEAT_S = 8.0, 4.0, 0.25
# Both processes of a pair import torch first.
DEADLINES_S = {"nccl": 30.0}
WAIT_S = 600.0
"""For anything that must happen; a loaded machine is slow."""


# --- generators -----------------------------------------------------------------------------------


class Told:
    """What a generator tells the test."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __call__(self, kind: str, **what: Any) -> None:
        with self._lock:
            self._pipe.send({"kind": kind, "at_s": time.monotonic(), **what})


class WeighedEngine(FakeEngine):
    """Its weights are real tensors, all of them full of their version."""

    def __init__(self, told: Told, rng: random.Random, options: dict[str, Any]) -> None:
        super().__init__(token_s=0.005)
        self.tensors = [torch.zeros(spec.shape, dtype=torch.int32) for spec in LAYOUT.specs]
        self.mixed = 0
        self._told, self._rng, self._options = told, rng, options

    def _draw(self, last: int, temperature: float) -> tuple[int, float]:
        seen = {int(value) for tensor in self.tensors for value in (tensor[0, 0], tensor[-1, -1])}
        self.mixed += seen != {self.weights.version}
        return super()._draw(last, temperature)

    async def begin_update(self) -> None:
        await super().begin_update()
        if self._options.get("never_pauses"):  # a broken engine, to see that a mixture would be found
            self._resumed.set()

    async def receive(self, order: UpdateOrder) -> None:
        if self._options.get("never_pauses"):
            self._received = logits_of(order.version)
        else:
            await super().receive(replace(order, details={}))
        fails_at = (
            self._rng.randrange(len(self.tensors))
            if self._rng.random() < self._options.get("load_fails", 0.0)
            else -1
        )
        for index, tensor in enumerate(tensors_of(order)):
            if index == fails_at:
                self._told("aborting", where="load", tensor=index, version=order.version)
                raise TransferError(f"told to fail at tensor {index}")
            self.tensors[index].copy_(tensor)
            await asyncio.sleep(0.001)  # whoever sampled now would see two versions
        if any((tensor != order.version).any() for tensor in self.tensors):
            self._told("wrong", version=order.version)


def tensors_of(order: UpdateOrder) -> Iterator[torch.Tensor]:
    """In the layout's order."""
    slot = open_slot(order.details["slot"], LAYOUT.total_bytes)
    yield from (LAYOUT.view(slot.buffer, index) for index in range(len(LAYOUT.specs)))
    slot.require_unchanged()


class WatchedStaging(HostStaging):
    """Says which tensor it is at, and takes its time there."""

    def __init__(self, files: Path, told: Told, rng: random.Random, options: dict[str, Any]) -> None:
        super().__init__(files)
        self._relay = Relay(Path(options["directory"], options.get("shares", uuid.uuid4().hex)))
        self._told, self._rng, self._options = told, rng, options
        self._tensor = self._tells_at = 0
        self._kind = "begun"

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        self._told("ordered", version=order.version, transport=order.transport)
        self._tensor, self._tells_at = 0, self._rng.randrange(len(LAYOUT.specs))
        cut = self._rng.random() < self._options.get("wire_fails", 0.0)
        self._kind = "cut me" if cut else "begun"

        def verify_slot(buffer: torch.Tensor, plan: layout.Layout, sums: Any) -> None:
            for index in range(len(plan.specs)):
                self._verify(order, buffer, plan, sums, index)

        with (
            mock.patch.object(stream, "verify", lambda *arguments: self._verify(order, *arguments)),
            mock.patch.object(staging, "verify", verify_slot),
        ):
            return super().stage(order)

    def _verify(self, order: UpdateOrder, *arguments: Any) -> None:
        if self._tensor == self._tells_at:
            self._told(self._kind, version=order.version, tensor=self._tensor)
            time.sleep(0.5 if self._kind == "cut me" else self._options.get("tensor_s", 0.0))
        self._tensor += 1
        time.sleep(self._options.get("tensor_s", 0.0))
        layout.verify(*arguments)


class Endless:
    """A buffer with always one more ticket, until the generator is told to leave."""

    def __init__(self, *, may_fail: bool) -> None:
        self.closed = False
        self._may_fail = may_fail
        self.put_tokens = 0
        self._next = 0

    def lease(self, holder: str, count: int) -> Lease:
        self._next += count
        tickets = tuple(
            Ticket(id=i, minimum_version=0) for i in range(self._next - count + 1, self._next + 1)
        )
        return Lease(tickets=() if self.closed else tickets, closed=self.closed)

    def renew(self, holder: str, ids: object) -> None: ...
    def give_back(self, holder: str, ids: object) -> None: ...

    def fail(self, holder: str, ticket_id: int, reason: str, tombstone: bytes) -> bool:
        assert self._may_fail, reason
        return False

    def put(self, holder: str, ticket_id: int, frame: bytes) -> PutOutcome:
        self.put_tokens += 1
        return PutOutcome.STORED


class Nothing:
    """A tracker and a scorer without work."""

    def log(self, *_: Any, **__: Any) -> None: ...
    def samples(self, *_: Any) -> None: ...
    def close(self) -> None: ...

    async def score(self, inputs: list[RewardInput]) -> list[Score]:
        return [Score(total=1.0, parts={"same": 1.0})] * len(inputs)


class WatchedClient(ControlClient):
    """Tells the reports."""

    told: Told
    tally: Callable[[], dict[str, int]]

    async def report(self, report: Any) -> None:
        kind = "applied" if report.applied else "failed"
        self.told(kind, version=report.version, reason=report.reason, **self.tally())
        await super().report(report)


def generator(endpoint: str, name: str, seed: int, pipe: Connection, options: dict[str, Any]) -> None:
    """A process."""
    die_with_parent()
    if "namespace" in options:
        move_to(options["namespace"])
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    asyncio.run(_generate(endpoint, name, seed, pipe, options))


async def _generate(endpoint: str, name: str, seed: int, pipe: Connection, options: dict[str, Any]) -> None:
    told, rng = Told(pipe), random.Random(seed)
    nothing: Any = Nothing()
    # An engine that never pauses also samples between two versions, and such rollouts are refused.
    buffer = Endless(may_fail=options.get("never_pauses", False))
    engine = WeighedEngine(told, rng, options)
    client = WatchedClient(
        endpoint,
        heartbeat_s=HEARTBEAT_S,
        timeout_s=TIMEOUT_S,
        join_s=WAIT_S,
        keys=KEYS.join.control,
    )
    client.told = told
    client.tally = lambda: {
        "tokens": engine.stats().sampled_tokens,
        "mixed": engine.mixed,
        "put": buffer.put_tokens,
    }

    def leave_when_told() -> None:
        buffer.closed = pipe.poll(None)

    threading.Thread(target=leave_when_told, daemon=True).start()
    lane = Lane(
        name="train",
        buffer=buffer,
        prompt=lambda ticket_id: Prompt(token_ids=(1, 2), text="", row={}),
        spec=SamplingSpec(temperature=1.0, max_response_tokens=40),
        limits=GroupLimits(vocabulary=1000, rollouts=2, max_tokens=100),
        minimum_version=lambda ticket: 0,
    )
    hello = Hello(
        generator_id=name,
        incarnation=uuid.uuid4().hex[:8],
        release="1",
        config_hash="x",
        version=0,
        pid=os.getpid(),
        transports=TRANSPORTS,
    )
    told("joining", pid=os.getpid())
    await Generator(
        engine=engine,
        lanes=[lane],
        sampler=Sampler(engine, nothing, lambda ids, raw=False: "", name),
        staging=WatchedStaging(Path(endpoint.removeprefix("ipc://")).parent / "w", told, rng, options),
        control=client,
        tracker=nothing,
        agreement=Agreement(limit=1e-3, dtype="float32"),
        settings=GeneratorSettings(max_running=4, most_held=4, lease_s=30.0, heartbeat_s=HEARTBEAT_S),
    ).run(hello)
    told("left", **client.tally())


@dataclass(slots=True, eq=False)
class Member:
    """A generator as the test sees it."""

    name: str
    process: Any
    pipe: Connection
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=1000))
    counts: Counter[str] = field(default_factory=Counter)
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last event of each kind."""
    mixed: int = 0
    tokens: int = 0

    def hear(self) -> None:
        """Everything it has said."""
        try:
            while self.pipe.poll():
                event = self.pipe.recv()
                self.counts[event["kind"]] += 1
                self.last[event["kind"]] = event
                self.events.append(event)
                self.mixed, self.tokens = event.get("mixed", self.mixed), event.get("tokens", self.tokens)
        except (EOFError, ConnectionError):
            return


# --- the learner ----------------------------------------------------------------------------------


class Learner:
    """Publisher, hub, and a loop that trains nothing and publishes. A context manager."""

    def __init__(self, directory: Path, seed: int, transport: str, hosts: Hosts | None = None) -> None:
        deadline_s = DEADLINES_S.get(transport, DEADLINE_S)
        self.rng = random.Random(seed)
        self._options: dict[str, Any] = {"directory": str(directory)}
        if hosts:
            self._options["namespace"] = hosts.generators.file
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "asyncrl.generator", "asyncrl.engine.fake", "asyncrl.weights.publisher"]
        )
        self._directory = directory
        address = hosts.cables["control"].address(0) if hosts else None
        with inside(hosts.learner.file) if hosts else nullcontext():
            self.publisher = SlotPublisher(
                LAYOUT,
                probe_ids=(PROBE,),
                initial_logprobs=probe_logprobs(0),
                directory=directory / "w",
                deadline_s=deadline_s,
                interface=address or (None if transport == "slot" else "127.0.0.1"),
            )
            self.hub = ControlHub(
                f"tcp://{address}:*" if address else f"ipc://{directory}/c.sock",
                self.publisher,
                ControlConfig(heartbeat_s=HEARTBEAT_S, timeout_s=TIMEOUT_S),
                RunIdentity(release="1", config_hash="x"),
                transport=transport,
                deadline_s=deadline_s,
                keys=KEYS.control,
            )
        self.version = 0
        self.publish_s: list[float] = []
        self.errors: list[str] = []
        self.members: list[Member] = []
        self._stop = threading.Event()
        self._loop = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> "Learner":
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._loop.join(WAIT_S)
        for member in self.members:
            member.process.kill()
            member.process.join(10.0)
        self.hub.stop("the test is over")
        self.publisher.close()

    def _train(self) -> None:
        tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.int32) for spec in LAYOUT.specs}
        while not self._stop.wait(STEP_S):
            version = self.version + 1
            for tensor in tensors.values():
                tensor.fill_(version)
            started_s = time.perf_counter()
            try:
                published = self.publisher.publish(version, tensors.items(), probe_logprobs(version))
                published.add_done_callback(lambda done: self.hub.announce(done.result()))
            except BaseException as error:  # noqa: BLE001 - whatever it is, it would have ended the learner
                self.errors.append(repr(error))
                return
            self.publish_s.append(time.perf_counter() - started_s)
            self.version = version

    def add(self, name: str, **options: Any) -> Member:
        """Start a generator."""
        mine, theirs = self._context.Pipe()
        arguments = (self.hub.endpoint, name, self.rng.randrange(1 << 30), theirs, self._options | options)
        process = self._context.Process(target=generator, args=arguments, daemon=True)
        process.start()
        theirs.close()
        member = Member(name, process, mine)
        self.members.append(member)
        return member

    def remove(self, member: Member) -> None:
        """Forget one that has ended."""
        member.process.join(10.0)
        member.pipe.close()
        self.members.remove(member)

    def listen(self, timeout_s: float = 0.02) -> None:
        """Hear everybody. Raises AssertionError when the learner's loop has ended."""
        assert not self.errors, self.errors
        self.hub.check()
        for pipe in wait([member.pipe for member in self.members], timeout_s):
            next(member for member in self.members if member.pipe is pipe).hear()

    def wait_for(self, condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
        """Listen until `condition`. Raises AssertionError."""
        until_s = time.monotonic() + wait_s
        while not condition():
            self.listen()
            assert time.monotonic() < until_s, f"no {what} within {wait_s:g} s: {self.hub.counters()}"

    def wait_until_more(self, member: Member, kind: str) -> None:
        """Wait for the next event of a kind."""
        count = member.counts[kind]
        self.wait_for(lambda: member.counts[kind] > count, f"{kind} of {member.name}")

    def cut_connections(self) -> bool:
        """Cut every transfer over TCP that is under way; False if there is none."""
        readers = list(self.publisher._server._readers) if self.publisher._server else []
        for channel in readers:
            with suppress(OSError):  # it has just ended
                channel.shutdown(socket.SHUT_RDWR)
        return bool(readers)


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    at = {"p50": (len(ordered) - 1) // 2, "p99": int(0.99 * (len(ordered) - 1)), "max": len(ordered) - 1}
    return {name: round(1000 * ordered[index], 2) for name, index in at.items()}


# --- what is done to them -------------------------------------------------------------------------


@dataclass(slots=True)
class Patient:
    """A generator that is struck again and again: well -> stopped -> returning -> well, or with no stop."""

    member: Member
    state: str = "well"
    kind: str = ""
    since_s: float = 0.0
    """When it was continued or started anew; while it is stopped, when that ends."""
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def is_in_the_middle(self) -> bool:
        """It has just said that it receives."""
        new = self.state == "well" and self.member.counts["begun"] > self.seen["begun"]
        self.seen["begun"] = self.member.counts["begun"]
        return new

    def strike(self, kind: signal.Signals, learner: Learner) -> str:
        """Returns what was done."""
        os.kill(self.member.process.pid, kind)
        self.member.hear()
        late = "" if self.member.events[-1]["kind"] == "begun" else ", too late"
        self.kind, self.since_s = kind.name, time.monotonic()
        if kind is signal.SIGSTOP:
            self.state = "stopped"
            self.since_s += learner.rng.choice((0.3, 1.0, TIMEOUT_S + 2.0, DEADLINE_S + 2.0))
            return f"SIGSTOP{late}"
        learner.remove(self.member)
        self.state, self.member, self.seen = (
            "returning",
            learner.add(self.member.name, tensor_s=0.01, shares="sick"),
            Counter(),
        )
        return f"SIGKILL{late}"

    def look(self, back_s: dict[str, list[float]]) -> None:
        """Let it go on when its time has come; note when it is back."""
        if self.state == "stopped" and time.monotonic() > self.since_s:
            os.kill(self.member.process.pid, signal.SIGCONT)
            self.state, self.since_s, self.seen["applied"] = (
                "returning",
                time.monotonic(),
                self.member.counts["applied"],
            )
        elif self.state == "returning":
            if self.member.counts["applied"] > self.seen["applied"]:
                back_s[self.kind].append(self.member.last["applied"]["at_s"] - self.since_s)
                self.state = "well"
            assert time.monotonic() < self.since_s + WAIT_S, (
                f"{self.member.name} is not back: {self.member.counts}"
            )


def stricken(learner: Learner, injections: int, until_s: float) -> dict[str, Any]:
    """Kill or stop a receiver while it receives, again and again."""
    well = [learner.add(f"well{i}") for i in range(2)]
    learner.wait_for(
        lambda: all(member.counts["applied"] >= 3 for member in well), "three updates of the well"
    )
    calm_from = len(learner.publish_s)
    learner.wait_for(lambda: len(learner.publish_s) >= calm_from + 40, "forty calm steps")
    calm, faulty_from = learner.publish_s[calm_from:], len(learner.publish_s)
    before = {member.name: Counter(member.counts) for member in well}
    struck: Counter[str] = Counter()
    back_s: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    sick = [Patient(learner.add(f"sick{i}", tensor_s=0.01, shares="sick")) for i in range(3)]
    while (goes_on := _goes_on(sum(struck.values()), injections, until_s)) or any(
        each.state != "well" for each in sick
    ):
        learner.listen()
        for patient in sick:
            patient.look(back_s)
            if patient.is_in_the_middle and goes_on:
                kind = learner.rng.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP))
                struck[patient.strike(kind, learner)] += 1
    faulty = learner.publish_s[faulty_from:]
    return {
        "injected": dict(struck),
        "learner_errors": len(learner.errors),
        "publish_ms_calm": spread(calm),
        "publish_ms_under_faults": spread(faulty),
        "steps_under_faults": len(faulty),
        "steps_that_took_a_second": sum(seconds > 1.0 for seconds in faulty),
        "updates_of_the_others": sum(
            member.counts["applied"] - before[member.name]["applied"] for member in well
        ),
        "failed_updates_of_the_others": sum(member.counts["failed"] for member in well),
        "tokens": sum(member.tokens for member in learner.members),
        "mixed_tokens": sum(member.mixed for member in learner.members),
        "back_after_ms": {kind: spread(seconds) for kind, seconds in back_s.items()},
    }


def _goes_on(done: int, wanted: int, until_s: float) -> bool:
    return done < wanted and time.monotonic() < until_s


def visitors(learner: Learner, joins: int, until_s: float, at_once: int = 4) -> dict[str, Any]:
    """Generators come, take an update, and go: every other one without a word."""
    steady = learner.add("steady")
    learner.wait_for(lambda: steady.counts["applied"] >= 2, "updates of the steady one")
    failed, started_s, steps = steady.counts["failed"], time.monotonic(), len(learner.publish_s)
    first_order_s, first_update_s, gone, number = [], [], Counter[str](), 0
    inside: list[Member] = []
    mixed = 0
    while (goes_on := _goes_on(number, joins, until_s)) or inside:
        while goes_on and len(inside) < at_once and number < joins:
            inside.append(learner.add(f"visitor{number}"))
            number += 1
        learner.listen()
        for visitor in list(inside):
            if not visitor.counts["applied"]:
                assert visitor.process.is_alive(), visitor.counts
                continue
            joining_s = visitor.last["joining"]["at_s"]
            kinds = {event["kind"]: event["at_s"] for event in reversed(visitor.events)}
            first_order_s.append(kinds["ordered"] - joining_s)
            first_update_s.append(kinds["applied"] - joining_s)
            way = "left" if int(visitor.name.removeprefix("visitor")) % 2 else "died"
            if way == "died":
                visitor.process.kill()
            else:
                visitor.pipe.send("leave")
                learner.wait_until_more(visitor, "left")
            mixed += visitor.mixed
            gone[way] += 1
            inside.remove(visitor)
            learner.remove(visitor)
    seconds = time.monotonic() - started_s
    learner.wait_for(lambda: [m.generator_id for m in learner.hub.members()] == ["steady"], "end of the dead")
    return {
        "joins": number,
        "leaves": dict(gone),
        "seconds": round(seconds, 1),
        "learner_errors": len(learner.errors),
        "learner_steps": len(learner.publish_s) - steps,
        "publish_ms": spread(learner.publish_s[steps:]),
        "join_to_first_order_ms": spread(first_order_s),
        "join_to_first_update_ms": spread(first_update_s),
        "failed_updates_of_the_steady": steady.counts["failed"] - failed,
        "mixed_tokens": mixed + steady.mixed,
        "readers_that_are_gone": sum(
            not reader.startswith("steady:") for reader in list(learner.publisher._readers)
        ),
    }


def aborted(learner: Learner, aborts: int, until_s: float) -> dict[str, Any]:
    """Transfers end at a random tensor, on the wire or in the engine."""
    members = [learner.add(f"g{i}", wire_fails=0.5, load_fails=0.3, shares="all") for i in range(3)]
    cut: Counter[str] = Counter()
    handled: Counter[str] = Counter()
    while _goes_on(sum(member.counts["failed"] for member in members), aborts, until_s):
        learner.listen()
        for member in members:
            assert member.process.is_alive(), (member.name, member.counts)
            if member.counts["cut me"] > handled[member.name]:
                handled[member.name] = member.counts["cut me"]
                if learner.cut_connections():
                    cut["connections cut"] += 1
    before = sum(member.counts["applied"] for member in members)
    for member in members:
        cut["engine stopped loading"] += member.counts["aborting"]
    learner.wait_for(
        lambda: sum(m.counts["applied"] for m in members) > before, "update after the last abort"
    )
    return {
        "failed_updates": sum(member.counts["failed"] for member in members),
        "by": dict(cut),
        "applied_updates": sum(member.counts["applied"] for member in members),
        "tokens": sum(member.tokens for member in members),
        "mixed_tokens": sum(member.mixed for member in members),
        "wrong_weights": sum(member.counts["wrong"] for member in members),
        "learner_errors": len(learner.errors),
    }


def parted(learner: Learner, injections: int, until_s: float) -> dict[str, Any]:
    """Stop one process of a pair while versions are sent, then kill it or the other one, wait, or go on."""
    well = learner.add("well", shares="well")
    sick = [learner.add(f"sick{number}", shares="sick") for number in range(2)]
    everyone = [well, *sick]
    learner.wait_for(lambda: all(member.counts["applied"] >= 2 for member in everyone), "two updates of each")
    struck: Counter[str] = Counter()
    back_s: dict[str, list[float]] = {}
    before, failed = Counter(well.counts), 0
    while _goes_on(sum(struck.values()), injections, until_s):
        pairs = [pair for member in sick for pair in pairs_of(os.getpid(), member.process.pid)]
        if not pairs:  # the first transfer after a fault has not begun
            learner.listen()
            continue
        pair = learner.rng.choice(pairs)
        end, what = learner.rng.choice(("sends", "receives")), learner.rng.choice(list(ENDINGS))
        seen_failed, started_s = sum(member.counts["failed"] for member in sick), time.monotonic()
        try:
            pair[end].suspend()
            while time.monotonic() < started_s + 3 * STEP_S:
                learner.listen()
            ENDINGS[what](pair, end)
        except psutil.NoSuchProcess:  # a generator that found the version of the other has ended its pair
            continue
        for member in sick:
            learner.wait_until_more(member, "applied")
        lost = sum(member.counts["failed"] for member in sick) - seen_failed
        failed += lost
        struck[f"{end} {what}{'' if lost else ', no update failed'}"] += 1
        back_s.setdefault(what, []).append(time.monotonic() - started_s)

    unpaired = 0

    def all_are_paired() -> bool:
        nonlocal unpaired
        pairs = [pairs_of(os.getpid(), member.process.pid) for member in everyone]
        unpaired = len(ends_of(os.getpid())) - sum(map(len, pairs))
        return unpaired == 0

    with suppress(AssertionError):  # then the result says how many are left
        # A pair that starts has no group yet: it waits for a process that was killed.
        learner.wait_for(all_are_paired, "end of the processes whose other end has gone", nccl.START_S)
    return {
        "injected": dict(struck),
        "failed_updates": failed,
        "learner_errors": len(learner.errors),
        "updates_of_the_others": well.counts["applied"] - before["applied"],
        "failed_updates_of_the_others": well.counts["failed"] - before["failed"],
        "tokens": sum(member.tokens for member in everyone),
        "mixed_tokens": sum(member.mixed for member in everyone),
        "wrong_weights": sum(member.counts["wrong"] for member in everyone),
        "processes_without_a_pair": unpaired,
        "back_after_ms": {kind: spread(seconds) for kind, seconds in back_s.items()},
    }


def sampling_on(learner: Learner, mixtures: int, until_s: float) -> dict[str, Any]:
    """A broken engine, which does not pause for an update."""
    member = learner.add("broken", never_pauses=True)
    learner.wait_for(lambda: member.mixed >= mixtures, "mixture", until_s - time.monotonic())
    return {"mixed_tokens": member.mixed}


def run(
    scenario: Callable[..., dict[str, Any]],
    count: int,
    minutes: float = 5.0,
    seed: int = 1,
    transport: str = "slot",
    *,
    between_hosts: bool = False,
) -> dict[str, Any]:
    """One scenario in a directory of its own: `count` faults, or as many as `minutes` allow."""
    directory = Path(tempfile.mkdtemp(prefix="asyncrl-weights-"))
    hosts = Hosts() if between_hosts else None
    try:
        with Learner(directory, seed, transport, hosts) as learner:
            return scenario(learner, count, time.monotonic() + 60.0 * minutes)
    finally:
        if hosts:
            hosts.close()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Entry point. The exit status is 1 when a promise was broken."""
    from bench.environment import describe

    parser = argparse.ArgumentParser(prog="python -m reliability.chaos.weights", description=__doc__)
    parser.add_argument("--injections", type=int, default=100)
    parser.add_argument("--joins", type=int, default=200)
    parser.add_argument("--aborts", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=30.0, help="per kind of fault, at most")
    parser.add_argument("--transport", choices=["slot", "tcp", "nccl"], default="slot")
    parser.add_argument("--hosts", action="store_true", help="a network each for learner and generators")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="runs of other seeds keep their place there")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    strikes = parted if arguments.transport == "nccl" else stricken
    counts: dict[Callable[..., dict[str, Any]], int] = {
        strikes: arguments.injections,
        visitors: arguments.joins,
        aborted: arguments.aborts,
    }
    found: dict[str, Any] = (
        json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    )
    broken = 0
    for scenario, count in counts.items():
        if not count:
            continue
        environment = describe("torch")
        transport = arguments.transport + " between hosts" * arguments.hosts
        faults = run(
            *(scenario, count, arguments.minutes, arguments.seed, arguments.transport),
            between_hosts=arguments.hosts,
        )
        result = {"seed": arguments.seed, "transport": transport} | faults | {"environment": environment}
        mine = (arguments.seed, transport)
        found[scenario.__name__] = [
            one for one in found.get(scenario.__name__, []) if (one["seed"], one.get("transport")) != mine
        ] + [result]
        sys.stdout.write(f"{scenario.__name__}: {json.dumps(result, indent=1)}\n")
        sys.stdout.flush()
        harm = (
            "learner_errors",
            "mixed_tokens",
            "wrong_weights",
            "failed_updates_of_the_others",
            "failed_updates_of_the_steady",
            "processes_without_a_pair",
        )
        broken += sum(result.get(name, 0) for name in harm)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
