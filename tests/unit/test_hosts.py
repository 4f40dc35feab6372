"""What each host of a run is to do, and what follows when its command ends or it has no place."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.best_effort import BestEffort
from asyncrl.cli.app import run as typed
from asyncrl.cluster import slurm
from asyncrl.cluster.driver import Hosts, host_spec, wants_gpus
from asyncrl.cluster.kubernetes import rendered
from asyncrl.cluster.plans import (
    NODE,
    NODES,
    HostPlan,
    HostState,
    described,
    generators_plan,
    learner_plans,
    node_plan,
    reachable,
    store_url,
)
from asyncrl.cluster.slurm import SlurmCluster, run_script
from asyncrl.commands import found as joining
from asyncrl.commands import hosts as hosts_command
from asyncrl.commands.found import require_learner
from asyncrl.commands.hosts import started_on_hosts
from asyncrl.commands.rank_host import started_ranks
from asyncrl.commands.supervising import claimed
from asyncrl.config.resolved import dump_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError, RunNotUp
from asyncrl.files import replace_text
from asyncrl.hosting import route
from asyncrl.hosting.placement import misplaced, misplaced_generators, placement_of
from asyncrl.hosting.route import Reach, in_clear, reaches, unreached, with_addresses
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.launch import calling
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import RunKeys
from tests.support.pages import ROOT, commands
from tests.support.ports import free_ports
from tests.support.waiting import let_pass

KEYS = RunKeys(bytes(range(32))).join
PLAIN = {
    "run": {"name": "far"},
    "model": {"path": "none"},
    "data": {"train": "none.jsonl"},
    "reward": {"functions": [{"function": "exact_match"}]},
    "generator": {"count": 4, "tensor_parallel": 2},
    "learner": {"ranks": 2},
    "cluster": {"kind": "local", "generator_hosts": 2},
}


TWO = {"kind": "local", "learner_hosts": 2}


def config(**parts) -> Config:
    return Config.model_validate({**PLAIN, **parts})


def test_plans_say_who_runs_what_and_hold_no_key(tmp_path):
    ours = reachable(config())
    assert (ours.control.bind, ours.store.bind) == ("auto", "auto")
    (learner,) = learner_plans(ours, tmp_path / "hosts.yaml", on_gpus=True)
    generators = generators_plan(ours, tmp_path / "hosts.yaml", 3, KEYS, on_gpus=True)
    assert (learner.name, learner.gpus) == ("learner-0", 2)
    assert (generators.name, generators.gpus) == ("generators-3", 8)
    words = " ".join(generators.argv)
    assert "--count 4 --name generators-3 --store redis://generator@{learner}:16379/0 --wait 300" in words
    lines = [*described(ours, on_gpus=False), repr(generators), words]
    assert [line.split(":")[0] for line in lines[1:4]] == ["learner-0", "generators-0", "generators-1"]
    assert not any(KEYS.text() in line or KEYS.secret.hex() in line for line in lines)


@pytest.mark.parametrize(
    ("gpus", "asked"), [((), 4), ((4,), 5), ((0,), 5), ((1, 4), 6), ((1, 1), 5), ((9,), 10), ((9, 2), 10)]
)
def test_a_host_of_generators_has_gpus_for_the_models_that_it_serves_too(tmp_path, gpus, asked):
    functions = [{"function": "model_score", "params": {"scorer": "judge"}}]
    ours = config(
        generator={"count": 2, "tensor_parallel": 2},
        scorers={"judge": {"model": "m", "gpus": gpus}},
        reward={"functions": functions},
    )
    assert generators_plan(ours, tmp_path / "hosts.yaml", 0, None, on_gpus=True).gpus == asked
    assert f"nvidia.com/gpu: {asked}}}" in rendered(ours, None)
    placement = placement_of(ours, asked, has_learner=False)
    used = [gpu for seat in placement.generators for gpu in seat.gpus]
    assert len({*used, *gpus}) == len(used) + len({*gpus}), "no GPU has two of them"
    assert not list(misplaced_generators(ours, asked, placement))
    assert generators_plan(ours, tmp_path / "hosts.yaml", 0, None, on_gpus=False).gpus == 0


def test_the_ports_that_hosts_must_reach_follow_the_config():
    ours = reachable(config())
    assert [*described(ours, on_gpus=False)][4:] == [
        "generators-* must reach {learner} at port 16379: store (store.bind), not encrypted",
        "generators-* must reach {learner} at port 16380: control plane (control.bind)",
        "generators-* must reach every port of {learner}: weights (control.bind), not encrypted",
    ]
    far = config(
        store={"url": "rediss://learner@[fd00::5]/0"},
        control={"bind": "tcp://[fd00::1]:65534"},
        weights={"transport": "nccl"},
        cluster=TWO,
    )
    assert [one[:3] for one in reaches(far, "fd00::9")] == [
        ("learner-0, generators-*", "fd00::5", 6379),
        ("generators-*", "fd00::1", 65534),
        ("generators-*", "fd00::1", 0),
        ("generators-* and back", "fd00::1", 0),
        ("learner-*", "fd00::1", 65535),
        ("learner-*", "learner-*", 0),
    ]
    assert [one.what for one in reaches(far, "fd00::9") if one.is_encrypted] == [
        "store",
        "control plane",
        "meeting of the learner's hosts",
    ]
    said = in_clear(reaches(ours, "10.0.0.1"))
    assert said.startswith("not encrypted between hosts: store (store.bind), weights (control.bind); use")
    said = in_clear(reaches(far, "fd00::9"))
    assert "hosts: weights (weights.transport), gradients (cluster.learner_hosts); use" in said
    assert not in_clear(reaches(ours, "127.0.0.1"))


@pytest.mark.parametrize(
    ("has_config", "has_key", "found"),
    [(False, False, "newest"), (True, False, "ours"), (False, True, "older"), (True, True, "older")],
)
def test_of_runs_with_the_same_store_the_one_that_is_meant_is_joined(
    tmp_path, monkeypatch, has_config, has_key, found
):
    monkeypatch.chdir(tmp_path)
    nothing = SimpleNamespace(close=lambda: None, read=lambda: None)
    monkeypatch.setattr(joining, "StoreConnection", lambda *_, **__: nothing)
    monkeypatch.setattr(joining, "RunRecord", lambda *_: nothing)
    monkeypatch.setattr(joining, "clock_skew_s", lambda connection: 0.0)
    runs = {name: RunDirectory(Path("runs", name)) for name in ("oldest", "newest", "ours", "older")}
    for name, age_s in zip(runs, (400, 100, 200, 300), strict=True):
        runs[name].make()
        runs[name].draw_secret()
        url = runs[name].path / "store.url"
        url.write_text("redis://10.0.0.9:6379/0")
        os.utime(url, (1e9 - age_s, 1e9 - age_s))
    key = runs["older"].keys().join
    ours = config(run={"name": "ours"})
    joined = joining._find(
        "redis://10.0.0.9:6379/0", ours if has_config else None, (lambda: key) if has_key else None
    )
    assert joined.learners == runs[found] and joined.keys == runs[found].keys().join


def test_a_store_of_the_command_line_that_is_not_a_url_is_named():
    for scheme in ("redis", "rediss"):
        with pytest.raises(RunError, match="--store is not a URL: Invalid IPv6 URL"):
            joining._find(f"{scheme}://[fd00::9:6379/0", None, None)


@pytest.fixture
def closed_port():
    """A port whose host answers nothing, as behind a firewall: the queue of its connections is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        stack.enter_context(socket.create_connection(listener.getsockname(), 10.0))
        yield listener.getsockname()[1]


def test_a_port_that_is_closed_to_a_host_is_named_within_the_time_that_it_has(closed_port, tmp_path):
    silent = {"control": {"bind": f"tcp://auto:{closed_port}", "timeout_s": 0.4, "heartbeat_s": 0.1}}
    found = (
        rf"does not reach 127\.0\.0\.1 at port {closed_port} \(timed out\), the control plane.* control\.bind"
    )
    with pytest.raises(RunError, match=found):
        require_learner("redis://127.0.0.1:1/0", config(**silent), "", pytest.fail)
    require_learner("unix:///run/store.sock", config(**silent), "", pytest.fail)
    # Of a store that is not the learner's own, only the record says where the learner is.
    other = config(**silent, store={"url": "redis://10.0.0.9:1/0", "insecure": True})
    require_learner("redis://10.0.0.9:1/0", other, "", pytest.fail)
    with pytest.raises(RunNotUp, match=found):
        require_learner("redis://10.0.0.9:1/0", other, f"tcp://127.0.0.1:{closed_port}", pytest.fail)
    bind = {"bind": f"tcp://auto:{closed_port - 1}", "timeout_s": 0.4, "heartbeat_s": 0.1}
    ranks = config(run={"name": "far", "root": str(tmp_path)}, cluster=TWO, control=bind)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "run.key").touch()
    with (
        pytest.raises(RunError, match=rf"at port {closed_port} .* the meeting of the learner's hosts"),
        started_ranks(ranks, tmp_path / "run.yaml", 1, learner="127.0.0.1"),
    ):
        pass
    [free] = free_ports(1)
    others = [Reach("generators-*", "127.0.0.1", port, "store", "store.bind") for port in (free, 0)]
    assert not [*unreached(others, 10.0)], "nothing listens yet, or any port will do"


def test_a_closed_port_of_a_learner_that_comes_later_is_logged(closed_port, monkeypatch, caplog):
    async def recorded(*unused: object) -> str:
        return f"tcp://127.0.0.1:{closed_port}"

    monkeypatch.setattr(calling, "_control_endpoint", recorded)
    monkeypatch.setattr(calling, "ControlClient", lambda endpoint, **options: endpoint)
    settings = config(control={"timeout_s": 0.4, "heartbeat_s": 0.1}).control
    called = calling.call_learner(settings, None, SimpleNamespace(record="", wire=b"", control=None), print)
    assert asyncio.run(called).endswith(f":{closed_port}")
    assert f"does not reach 127.0.0.1 at port {closed_port} (timed out), the control plane" in caplog.text


@pytest.mark.parametrize("key", ["control", "store"])
def test_an_address_at_which_this_host_cannot_listen_is_refused_in_a_bounded_time(key, monkeypatch):
    def refused(host: str) -> str:
        with pytest.raises(
            RunError, match=f"^{key}.bind is tcp://{host}:7000, at which .*; write auto"
        ) as said:
            with_addresses(config(cluster={}, **{key: {"bind": f"tcp://{host}:7000"}}), [])
        return str(said.value)

    ours = config(cluster={}, **{key: {"bind": "tcp://127.0.0.1:7000"}})
    assert with_addresses(ours, []) is ours
    assert "(Cannot assign requested address)" in refused("192.0.2.1")
    assert "label empty or too long" in refused("a..b")
    answer, ask = threading.Event(), socket.getaddrinfo

    def answered_late(host: str, *rest: Any, **options: Any) -> Any:
        answer.wait()
        return ask(host, *rest, **options)

    def unknown(*arguments: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(route.socket, "getaddrinfo", unknown)
    assert "(Name or service not known)" in refused("h100-7.lan")
    monkeypatch.setattr(route, "LOOKUP_S", 0.01)
    monkeypatch.setattr(route.socket, "getaddrinfo", answered_late)
    assert "(no answer about its name in 0.01 s)" in refused("127.0.0.1")
    answer.set()


def test_a_port_that_refuses_is_told_once_the_learner_has_said_that_it_listens(monkeypatch):
    """As behind a firewall that rejects; while nothing listens, a learner's host refuses alike."""
    [free] = free_ports(1)
    ours, told, asked = config(control={"bind": f"tcp://auto:{free}"}), list[str](), []
    connect = socket.create_connection
    monkeypatch.setattr(
        route.socket, "create_connection", lambda place, *rest: asked.append(place) or connect(place, *rest)
    )
    require_learner("redis://127.0.0.1:1/0", ours, "", told.append)
    assert not told
    require_learner("redis://127.0.0.1:1/0", ours, f"tcp://127.0.0.1:{free}", told.append)
    [said] = told
    assert asked == [("127.0.0.1", free)] * 2, "once per call"
    assert f"does not reach 127.0.0.1 at port {free} (Connection refused), the control plane" in said
    assert "control.bind; a learner that starts again refuses, too" in said


def test_what_the_user_sets_stays():
    own = config(store={"bind": "tcp://10.0.0.1:7000"}, control={"bind": "tcp://auto:7001"})
    assert reachable(own) == own and store_url(own, "10.9.9.9") == "redis://generator@10.0.0.1:7000/0"
    other = config(store={"url": "rediss://s:6379/0"})
    assert reachable(other).store.bind is None and store_url(other, "10.9.9.9") == "rediss://s:6379/0"


def test_the_ranks_of_a_learner_are_divided_among_its_hosts(tmp_path):
    ours = reachable(config(learner={"ranks": 8, "sequence_parallel": 2}, cluster=TWO))
    learner, ranks = learner_plans(ours, tmp_path / "hosts.yaml", on_gpus=True)
    assert (learner.gpus, ranks.gpus, ranks.name, ranks.role, ranks.keys) == (
        4,
        4,
        "learner-1",
        "ranks",
        None,
    )
    assert ranks.argv[0] == "rank" and " ".join(ranks.argv[3:]) == "--host 1 --learner {learner}"
    assert [line.split(":")[0] for line in described(ours, on_gpus=False)][1:3] == ["learner-0", "learner-1"]
    assert placement_of(ours, 4, generators=0).learner_gpus == (0, 1, 2, 3)
    found = [mistake.text for mistake in misplaced(ours, 3, generators=False)]
    assert found[0].startswith("found 4 ranks, but this machine shows 3 GPUs")


@pytest.mark.parametrize(
    ("learner", "cluster", "said"),
    [
        (
            {"ranks": 3},
            TWO,
            r"cluster\.learner_hosts is 2, which does not divide learner\.ranks \(3\); set one",
        ),
        (
            {"ranks": 4, "sequence_parallel": 4},
            TWO,
            r"with 2 ranks each.*sequence_parallel \(4\) would divide a sequence over two hosts; set one of \[1, 2\]",
        ),
        ({"ranks": 2}, {"learner_hosts": 2}, r"cluster\.learner_hosts is 2, but cluster\.kind is not set"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused(learner, cluster, said):
    with pytest.raises(ValidationError, match=said):
        config(learner=learner, cluster=cluster)


@pytest.mark.parametrize(
    ("hosts", "number", "said"),
    [
        (1, 1, r"found --host 1, but cluster\.learner_hosts is 1; allowed is none: host 0 has the command"),
        (2, 2, r"found --host 2, but cluster\.learner_hosts is 2; allowed is 1 to 1"),
        (2, 0, r"found --host 0, .* allowed is 1 to 1"),
        (
            2,
            1,
            r"run\.key is not on this host: the hosts of a learner share its run directory; set run\.root",
        ),
    ],
)
def test_a_host_of_ranks_that_is_called_wrongly_says_how(tmp_path, hosts, number, said):
    ours = config(run={"name": "far", "root": str(tmp_path)}, cluster={**TWO, "learner_hosts": hosts})
    with (
        pytest.raises((ConfigError, RunError), match=said),
        started_ranks(ours, tmp_path / "run.yaml", number, learner="10.0.0.1"),
    ):
        pass


def test_the_number_of_generators_of_a_host_must_be_known():
    with pytest.raises(ValidationError, match=r"generator\.count is not; set it"):
        config(generator={})


def test_mistakes_are_reported_together_with_and_without_hosts(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(PLAIN | {"learner": {"rank": 2}}))
    for overrides in ([], ["cluster.kind=null"]):
        with pytest.raises(
            ConfigError, match=r"learner\.rank: found an unknown key(?s:.*)data\.train: found no"
        ):
            typed(["up", str(path), *overrides])
    with pytest.raises(ConfigError, match=r"found --dry-run, but .* sets no cluster\.kind"):
        typed(["up", str(path), "cluster.kind=null", "--dry-run"])


@pytest.mark.parametrize("page", ["hosts", "hosts-ray", "hosts-slurm"])
def test_the_lines_of_the_pages_need_no_quick_start_before_them(page, tmp_path, monkeypatch, capsys):
    """Where it was trained, its run has ended, or keeps its ranks; elsewhere there is no model yet."""
    monkeypatch.chdir(tmp_path)
    lines = [one.words[1:] for one in commands(ROOT / "docs" / f"{page}.md") if " cluster.kind=" in one.text]
    assert lines
    for line in lines:
        assert any(word.startswith("run.name=") for word in line), line
        # Ray is not installed everywhere.
        assert typed([*line, "--dry-run", "cluster.kind=slurm"]) == 0
        assert "learner-0" in capsys.readouterr().out


class Engine:
    """A cluster whose hosts end as a test says."""

    def __init__(self):
        self.found, self.started, self.killed, self.asked = {}, [], [], 0

    def start(self, plan, output):
        self.started.append((plan.name, " ".join(plan.argv)))
        self.found[plan.name] = HostState(phase="running", address="10.0.0.1")

    def states(self):
        self.asked += 1
        return self.found

    def stop(self, name, *, kill):
        self.killed += [name] * kill
        if self.found[name].phase in ("pending", "running"):
            self.found[name] = HostState(phase="ended", status=143)

    def end(self, name, phase="ended", status=None):
        self.found[name] = HostState(phase=phase, status=status)


class Clock(Hosts):
    """Time passes when the supervisor sleeps."""

    passed_s = 0.0

    def now_s(self):
        return self.passed_s

    def sleep(self, wait_s):
        type(self).passed_s += wait_s
        super().sleep(0.0)


@pytest.fixture
def run(tmp_path):
    """A supervisor of a learner's host and one of generators; what happens at which tick is up to a test."""
    engine = Engine()
    plans = {
        "learner-0": HostPlan(name="learner-0", role="learner", argv=["learn"], gpus=0),
        "generators-0": HostPlan(name="generators-0", role="generators", argv=["at {learner}"], gpus=0),
    }
    hosts = Clock(engine, 100.0, lambda states: None, plans)
    specs = [host_spec(plan, tmp_path, is_extra=False) for plan in plans.values()]
    supervisor = Supervisor(specs, max_restarts=2, host=hosts)

    def play(events, *more):
        ticks = iter(range(10_000))
        for plan in more:
            plans[plan.name] = plan
            supervisor.add(host_spec(plan, tmp_path, is_extra=False))

        def tick():
            now = next(ticks)
            events.get(now, lambda: None)()
            hosts.tend()
            if now == 1000:
                supervisor.request_stop("the end of the test")

        with supervisor:
            supervisor.run(tick)
        return supervisor

    return engine, play


def test_a_lost_host_is_placed_again_and_knows_the_learner(run):
    engine, play = run
    play({5: lambda: engine.end("generators-0", "lost"), 300: lambda: engine.end("generators-0", status=-9)})
    names = [name for name, _ in engine.started]
    assert names == ["learner-0", "generators-0", "generators-0", "generators-0"]
    assert engine.started[1][1] == "at 10.0.0.1"
    assert "generators-0" in engine.killed, "what is left of a lost host is ended before the next"


@pytest.mark.parametrize("status", [1, 2, 3])
def test_a_command_that_gave_up_is_not_started_again(run, tmp_path, status):
    engine, play = run
    (tmp_path / "generators-0.out").write_text("")

    def give_up():
        (tmp_path / "generators-0.out").write_text("RunError: its GPU is broken\n")
        engine.end("generators-0", status=status)

    with pytest.raises(RunError, match="its GPU is broken"):
        play({5: give_up})
    assert [name for name, _ in engine.started] == ["learner-0", "generators-0"]


def test_a_run_goes_on_without_a_host_of_generators_while_it_has_another(run, tmp_path, caplog):
    engine, play = run
    second = HostPlan(name="generators-1", role="generators", argv=["at {learner}"], gpus=0)
    for name in ("generators-0", "generators-1"):
        (tmp_path / f"{name}.out").write_text("")

    def give_up(name):
        (tmp_path / f"{name}.out").write_text(f"RunError: the GPU of {name} is broken\n")
        engine.end(name, status=1)

    with pytest.raises(RunError, match="the GPU of generators-1 is broken"):
        play({5: lambda: give_up("generators-0"), 50: lambda: give_up("generators-1")}, second)
    assert [name for name, _ in engine.started] == ["learner-0", "generators-0", "generators-1"]
    assert "the GPU of generators-0 is broken" in caplog.text


def test_generators_follow_a_learner_that_moves(run):
    engine, play = run

    def move():
        engine.start = lambda plan, output: (
            Engine.start(engine, plan, output)
            or engine.found.update({plan.name: HostState(phase="running", address="10.0.0.2")})
        )
        engine.end("learner-0", "lost")

    play({5: move})
    assert engine.started == [
        ("learner-0", "learn"),
        ("generators-0", "at 10.0.0.1"),
        ("learner-0", "learn"),
        ("generators-0", "at 10.0.0.2"),
    ]


def learner_without_an_address(engine, monkeypatch):
    waits = HostState(phase="pending", why="job 7: Resources")
    monkeypatch.setattr(engine, "start", lambda plan, output: engine.found.update({plan.name: waits}))


def test_a_command_that_an_engine_cannot_place_at_once_is_placed_later(run, monkeypatch, caplog):
    engine, play = run
    learner_without_an_address(engine, monkeypatch)
    failures = iter([OSError("squeue: Unable to contact slurm controller")])

    def come():
        engine.found["learner-0"] = HostState(phase="running", address="10.0.0.1")
        monkeypatch.setattr(engine, "start", busy)

    def busy(plan, output):
        for failure in failures:
            raise failure
        Engine.start(engine, plan, output)

    play({5: come})
    assert engine.started == [("generators-0", "at 10.0.0.1")]
    assert "generators-0 cannot be started and is tried again in 15 s: squeue: Unable" in caplog.text


def test_a_command_that_has_not_begun_ends_at_once_and_is_never_placed(run, monkeypatch, caplog):
    engine, play = run
    learner_without_an_address(engine, monkeypatch)
    stopped_s = []

    def fail():
        stopped_s.append(Clock.passed_s)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play({5: fail})
    assert Clock.passed_s - stopped_s[0] < 1.0
    assert list(engine.found) == ["learner-0"] and "cannot be killed" not in caplog.text


def test_an_engine_is_asked_once_a_tick_however_many_hosts_there_are(run):
    engine, play = run
    names = [f"generators-{index}" for index in range(1, 9)]
    more = [HostPlan(name=name, role="generators", argv=["at {learner}"], gpus=0) for name in names]
    asked = []
    play({tick: lambda: asked.append(engine.asked) for tick in range(20, 120)}, *more)
    assert len(engine.started) == 10
    assert {after - before for before, after in itertools.pairwise(asked)} == {1}


@pytest.mark.parametrize("phase", ["pending", "lost"])
def test_a_host_of_the_learner_that_was_lost_is_awaited_for_a_bounded_time(run, phase):
    engine, play = run

    def nowhere(plan, output):
        if phase == "lost":
            raise OSError("no node is free")
        engine.found[plan.name] = HostState(phase="pending", why="job 7: Resources")

    def lose():
        engine.start = nowhere
        engine.found["learner-0"] = HostState(phase="lost", why="its node has failed")

    why = {"pending": "job 7: Resources", "lost": "its node has failed"}[phase]
    with pytest.raises(RunError, match=f"learner-0 has no host after 100 s: {why}; .*cluster.pending_s"):
        play({5: lose, 900: lambda: pytest.fail("it waits still")})


def test_the_end_of_the_learner_is_the_end_of_the_run(run):
    engine, play = run
    assert play({5: lambda: engine.end("learner-0", status=0)}).is_over


def test_a_run_goes_on_without_a_host_that_is_added_or_was_lost_and_says_what_it_waits_for(caplog, tmp_path):
    engine = Engine()
    engine.found["generators-0"] = HostState(phase="running")
    plan = HostPlan(name="generators-1", role="learner", argv=[], gpus=0)
    hosts = Hosts(engine, 0.0, lambda states: None, {"generators-1": plan})
    hosts.start(host_spec(plan, tmp_path, is_extra=True))
    hosts.tend()
    for name in engine.found:
        engine.found[name] = HostState(phase="pending", why="job 7: Resources")
    hosts.tend()
    hosts.tend()
    assert [record.getMessage() for record in caplog.records] == [
        f"generators-{index} is pending: job 7: Resources" for index in (0, 1)
    ]


@pytest.mark.parametrize("address", ["10.0.0.9", "fd00::9"])
def test_each_host_gets_the_learners_address_as_its_command_reads_it(address, tmp_path):
    """A URL has brackets around an IPv6 address, as `store_url` and `filled_in` have it for a known one."""
    engine, ours = Engine(), config(cluster=TWO)
    generators = generators_plan(ours, tmp_path / "hosts.yaml", 0, None, on_gpus=False)
    plans = {plan.name: plan for plan in [*learner_plans(ours, tmp_path / "f", on_gpus=False), generators]}
    hosts = Hosts(engine, 100.0, lambda states: None, plans)
    engine.found["learner-0"] = HostState(phase="running", address=address)
    for name in ("learner-1", "generators-0"):
        hosts.start(host_spec(plans[name], tmp_path))
    started = {name: words.split() for name, words in engine.started}
    assert started["learner-1"][-1] == address and store_url(ours, address) in started["generators-0"]
    nodes = {NODES: f"{address}\n10.0.0.2", NODE: "1", "ASYNCRL_SECRET": "00" * 32}
    assert store_url(ours, address) in node_plan(config(), tmp_path / "f", nodes).argv


def test_a_host_that_finds_no_place_is_named_with_what_it_waits_for():
    engine = Engine()
    engine.found["generators-0"] = HostState(phase="pending", why="it waits for 8 GPUs; free: 6")
    hosts = Hosts(engine, 0.0, lambda states: None)
    hosts.tend()
    with pytest.raises(RunError, match=r"generators-0 has no host after 0 s: it waits for 8 GPUs; free: 6"):
        hosts.tend()


def test_a_step_of_slurm_asks_for_the_gpus_of_its_host(tmp_path, monkeypatch):
    """Stand-ins for its programs write down what they are called with."""
    answers = {"squeue": "case $* in *%N*) echo n1 n2;; esac", "srun": f'echo "$*" >> {tmp_path}/steps'}
    node = "echo NodeName=n$i NodeAddr=10.0.0.$i"
    answers["scontrol"] = f"for i in 1 2; do case $2 in hostnames) echo n$i;; node) {node};; esac; done"
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr("asyncrl.cluster.slurm.signal.signal", lambda *_: None)
    ours = config(run={"name": "far", "root": str(tmp_path)}, cluster={"kind": "slurm"})
    cluster, asked = SlurmCluster(ours), []
    (tmp_path / "far" / "logs").mkdir(parents=True)
    for gpus in (2, 0):
        (tmp_path / "steps").unlink()
        plan = HostPlan(name=f"generators-{gpus}", role="generators", argv=["version"], gpus=gpus)
        cluster.start(plan, tmp_path / "output")
        cluster._placed[plan.name].step.wait(60)
        asked.append([word for word in (tmp_path / "steps").read_text().split() if "gpus" in word])
    assert asked == [["--gpus-per-node=2"], []]


@pytest.mark.parametrize(
    ("kind", "node", "gpus", "wants"),
    [
        ("slurm", "", "", True),  # a shell of `salloc` on the host where users log in
        ("slurm", "n1", "", False),
        ("slurm", "n1", "0", True),
        ("ray", "n1", "", True),
        ("local", "", "", False),
    ],
)
def test_hosts_that_are_elsewhere_ask_for_gpus_that_this_machine_does_not_have(
    monkeypatch, kind, node, gpus, wants
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if node:
        monkeypatch.setenv("SLURMD_NODENAME", node)
    cluster = {"kind": kind, "generator_hosts": 1}
    assert wants_gpus(config(cluster=cluster)) == wants
    assert not wants_gpus(config(cluster=cluster, learner={"ranks": 2, "device": "cpu"}))


def test_a_stop_waits_for_a_command_of_slurm_that_is_only_just_placed(tmp_path):
    file = str(tmp_path / "learner-0.pid")
    with subprocess.Popen(["sh", "-c", slurm._TERMINATED, file]) as stop:
        let_pass(0.5)  # srun takes that long
        with subprocess.Popen(["sh", "-c", slurm._NAMED, file, "sleep", "600"]) as command:
            try:
                assert stop.wait(60) == 0
                assert command.wait(60) == -signal.SIGTERM
            finally:
                command.kill()


def test_down_ends_though_slurm_does_not_clear_a_node_and_up_may_follow(tmp_path, monkeypatch):
    passed_s, asked, told = itertools.count(step=10.0), [], []
    clock = SimpleNamespace(monotonic=lambda: next(passed_s), sleep=lambda wait_s: None)
    monkeypatch.setattr(slurm, "time", clock)
    monkeypatch.setattr(slurm, "ask", lambda *words, **_: asked.append(words) or "9\n")
    states = iter(["RUNNING"] * 3)

    def jobs_of(run):
        if next(passed_s) > 10_000.0:
            pytest.fail("it waits still")
        return [slurm.Job("7", next(states, "COMPLETING"), "0", "None", str(run))]

    monkeypatch.setattr(slurm, "jobs_of", jobs_of)
    assert slurm.end_jobs(tmp_path, lambda: False, told.append)
    assert asked == [("scancel", "--batch", "--signal=TERM", "7")], "what completes is cancelled already"
    [said] = told
    assert "jobs 7 have ended, but Slurm clears their nodes for longer than 120 s" in said
    monkeypatch.setattr(hosts_command, "jobs_of", jobs_of)
    ours = config(run={"name": "far", "root": str(tmp_path)}, cluster={"kind": "slurm"})
    assert "job 9 is submitted" in next(iter(hosts_command.submitted(ours, ["asyncrl", "up"], fresh=False)))
    states = iter(["RUNNING"])
    with pytest.raises(RunError, match="job 7 is RUNNING"):
        next(iter(hosts_command.submitted(ours, ["asyncrl", "up"], fresh=False)))


def test_down_waits_for_jobs_that_save_while_slurms_controller_is_away(tmp_path, monkeypatch):
    passed_s, asked = itertools.count(step=10.0), []
    clock = SimpleNamespace(monotonic=lambda: next(passed_s), sleep=lambda wait_s: None)
    monkeypatch.setattr(slurm, "time", clock)
    monkeypatch.setattr(slurm, "ask", lambda *words, **_: asked.append(words) or "")
    answers = iter([["7"], OSError("Socket timed out"), ["7"], [], *[OSError("no squeue")] * 3])

    def jobs_of(run):
        if isinstance(answer := next(answers), OSError):
            raise answer
        return [slurm.Job(job, "RUNNING", "0", "None", str(run)) for job in answer]

    monkeypatch.setattr(slurm, "jobs_of", jobs_of)
    assert slurm.end_jobs(tmp_path, lambda: False, pytest.fail)
    assert asked == [("scancel", "--batch", "--signal=TERM", "7")], "nothing ends the save"
    with pytest.raises(RunError, match="no squeue; end them with scancel"):
        slurm.end_jobs(tmp_path, lambda: False, pytest.fail)


@pytest.mark.parametrize(
    ("kind", "how", "left"),
    [
        (None, "claimed", []),
        ("slurm", "claimed", ["job.sh"]),
        ("local", "hosts", []),
        ("slurm", "hosts", ["job.sh"]),
        ("slurm", "submitted", ["job.sh"]),
    ],
)
def test_a_start_leaves_nothing_by_which_down_would_take_it_for_an_earlier_one(
    tmp_path, monkeypatch, kind, how, left
):
    ours = config(run={"name": "far", "root": str(tmp_path)}, cluster={"kind": kind, "generator_hosts": 2})
    directory = RunDirectory(ours.run.directory)
    directory.create(fresh=False)
    replace_text(directory.config, dump_config(ours))
    for path in (directory.job, directory.stopping):
        path.write_text('{"within_s": 3600, "text": "saving"}')
    if how == "claimed":
        with claimed(directory, ours, lambda: None, BestEffort(), fresh=False):
            pass
    elif how == "hosts":

        def fail(config):
            raise RunError("no engine")

        monkeypatch.setattr(hosts_command, "open_cluster", fail)
        with pytest.raises(RunError, match="no engine"), started_on_hosts(ours, fresh=False, console=False):
            pass
    else:
        monkeypatch.setattr(slurm, "ask", lambda *words, **_: "" if words[0] == "squeue" else "9")
        assert list(hosts_command.submitted(ours, ["asyncrl", "up"], fresh=False))
    assert [path.name for path in (directory.job, directory.stopping) if path.exists()] == left


def test_hosts_look_for_no_file_that_is_written_later(tmp_path, monkeypatch):
    """An NFS client remembers for a minute that a file was not there."""
    monkeypatch.chdir(tmp_path)
    ours, found = config(cluster={"kind": "ray", "generator_hosts": 1}), []
    directory = RunDirectory(ours.run.directory)

    def looked(*_):
        yield pytest.fail("it looks for config.yaml")

    def opened(config):
        keys = directory.keys().join
        monkeypatch.setattr(Path, "glob", looked)
        found.append(joining._run_of(keys, ours))
        raise RunError("no engine")

    monkeypatch.setattr(hosts_command, "open_cluster", opened)
    with pytest.raises(RunError, match="no engine"), started_on_hosts(ours, fresh=False, console=False):
        pass
    assert found == [directory] and not directory.config.exists()


def test_a_job_of_slurm_has_a_node_for_each_host_and_the_options_of_the_user_last(tmp_path):
    ours = config(
        run={"name": "far", "root": str(tmp_path / "my runs")},
        cluster={"kind": "slurm", "generator_hosts": 2, "sbatch": ["--time=24:00:00", "--nodes=4"]},
    )
    run = f"{tmp_path}/my runs/far"
    *options, command = run_script(ours, ["asyncrl", "up", "--config", "my task.yaml"]).splitlines()
    assert command == "exec asyncrl up --config 'my task.yaml'"
    assert options[:15] == [
        "#!/bin/sh",
        "#SBATCH --job-name=far",
        f"#SBATCH '--comment={run}'",
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH '--output={run}/logs/job.out'",
        "#SBATCH --no-kill",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --time=24:00:00",
        "#SBATCH --nodes=4",
    ]
    on_cpu = run_script(
        ours.model_copy(update={"learner": ours.learner.model_copy(update={"device": "cpu"})}), []
    )
    assert "gpus" not in on_cpu
