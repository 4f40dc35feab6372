"""What the supervisor's process does beside supervising."""

import os
import signal
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from asyncrl.best_effort import BestEffort
from asyncrl.cli import foreground
from asyncrl.commands import hosts, supervising, up
from asyncrl.config.resolved import dump_config
from asyncrl.config.sections import ControlConfig
from asyncrl.errors import RunError, StoreError
from asyncrl.hosting import machine
from asyncrl.hosting.children import Family, ProcessSpec
from asyncrl.hosting.placement import placement_of
from asyncrl.hosting.supervisor import Supervisor
from asyncrl.launch import own_store, specs
from asyncrl.launch.scorers import scorer_specs
from asyncrl.run import directory as run_directory
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import RunKeys
from asyncrl.run.lock import RunLock
from asyncrl.run.starts import record_start
from asyncrl.telemetry import live
from asyncrl.telemetry.status import read_status, write_status
from tests.support.synthetic_run import SyntheticRun
from tests.support.task_config import config_of
from tests.support.telemetry_records import snapshot
from tests.support.waiting import HANG


class Server:
    """A store that dies, finds no room on its disk for a while, and then loads for a while."""

    url = "unix:///store.sock"
    is_running = True
    refusals = 2
    looks = 3

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def look(self):
        return "ready"

    def stop(self): ...

    def begin(self):
        if self.refusals:
            self.refusals -= 1
            raise (StoreError, OSError)[self.refusals]("no space left on device")
        self.is_running = True

    def comes_up(self):
        self.looks -= 1
        return self.looks == 0


def test_a_store_that_cannot_start_is_tried_again(monkeypatch, tmp_path, caplog):
    server = Server()
    monkeypatch.setattr(own_store, "own_store", lambda *_: server)
    monkeypatch.setattr(own_store, "AGAIN_S", 0.0)
    config = SimpleNamespace(store=SimpleNamespace(url=None))
    with own_store.opened_store(config, RunDirectory(tmp_path), {}) as (url, tend):
        assert url == server.url
        server.is_running = False
        tries = 0
        while not server.is_running:
            tend()
            tries += 1
        assert tries == 3
        while server.looks:
            tend()
        for _ in range(3):
            tend()
        assert server.looks == 0, "one that is up is let alone"
    assert caplog.text.count("no space left on device") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_a_signal_ended_says_so_in_its_status(number, tmp_path, monkeypatch):
    # Also where the tests run under nohup.
    monkeypatch.setattr(foreground.signal, "getsignal", lambda number: signal.SIG_DFL)
    sleeper = [sys.executable, "-c", HANG]
    spec = ProcessSpec(
        name="learner",
        argv=sleeper,
        env=dict(os.environ),
        log_path=tmp_path / "out",
        ends_run=True,
        grace_s=2.0,
    )
    with Supervisor([spec], max_restarts=0) as supervisor, foreground.stop_on_signals(supervisor) as stopped:
        supervisor.run(lambda: os.kill(os.getpid(), number))
        os.kill(os.getpid(), signal.SIGINT)  # a second one, from an impatient user
    assert stopped.status == 128 + number


@pytest.mark.parametrize("how_to_join", [(), ("generators join with: ...",)])
def test_a_run_goes_on_if_the_reader_of_its_lines_leaves(how_to_join, tmp_path, monkeypatch):
    run, (reading, writing) = SyntheticRun(tmp_path), os.pipe()
    os.close(reading)
    monkeypatch.setattr(live, "INTERVAL_S", 0.0)

    def supervise(tick):
        for _ in range(3):
            run.advance()
            tick()

    supervisor = SimpleNamespace(run=supervise, stop=lambda **_: None, is_over=True)
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        started = supervising.StartedRun(supervisor, how_to_join, lambda: None)
        assert foreground._watched(started, RunDirectory(tmp_path), lines=True) == 0
        assert os.fstat(writing).st_rdev == os.stat(os.devnull).st_rdev, "the lines that are left go nowhere"
    assert run.step == 3


@pytest.mark.parametrize(
    ("before", "program", "asks", "after", "message"),
    [
        ("training", "os.kill(os.getpid(), 9)", False, "failed", "learner died 1 times"),
        # Another process failed, and the learner had to leave.
        ("stopped", "sys.exit(2)", False, "failed", "learner refused to start"),
        # A stop while a learner that was killed, or that failed, is started again.
        ("training", HANG, True, "stopped", "asked to stop"),
        ("failed", HANG, True, "stopped", "asked to stop"),
        ("finished", "", False, "finished", ""),
        # The learner ended before it had written one.
        (None, "sys.exit(2)", False, "failed", "learner refused to start"),
        (None, HANG, True, "stopped", "asked to stop"),
    ],
)
def test_the_last_status_says_how_the_run_ended(before, program, asks, after, message, tmp_path):
    directory = RunDirectory(tmp_path)
    (directory.checkpoints / "step-000003").mkdir(parents=True)
    if before:
        write_status(directory.status, snapshot(state=before, step=3))
    spec = ProcessSpec(
        name="learner",
        argv=[sys.executable, "-c", f"import os, sys\n{program}"],
        env=dict(os.environ),
        log_path=tmp_path / "out",
        ends_run=True,
    )
    control = ControlConfig(max_restarts=0)
    with (
        pytest.raises(RunError) if after == "failed" else nullcontext(),
        supervising.supervised([spec], control, directory, Family(), BestEffort()) as run,
    ):
        if asks:
            run.supervisor.request_stop("SIGTERM")
        run.supervisor.run(run.tend)
    status = read_status(directory.status)
    assert status.state == after and status.message.startswith(message) and status.step == 3


@pytest.mark.parametrize(("error", "after"), [(None, "stopped"), (RunError("the host is lost"), "failed")])
def test_a_run_whose_host_is_lost_has_a_last_status(error, after, tmp_path):
    cluster = {"kind": "local", "generator_hosts": 1}
    config = config_of(run={"name": "r", "root": str(tmp_path)}, generator={"count": 1}, cluster=cluster)
    status = RunDirectory(config.run.directory).status
    with (
        pytest.raises(RunError) if error else nullcontext(),
        hosts.started_on_hosts(config, fresh=False, console=False),
    ):
        write_status(status, snapshot(state="training"))
        if error:
            raise error
    assert read_status(status).state == after


def test_under_nohup_a_closed_terminal_does_not_end_a_run(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        spec = ProcessSpec(
            name="learner", argv=["true"], env=dict(os.environ), log_path=tmp_path / "out", ends_run=True
        )
        with (
            Supervisor([spec], max_restarts=0) as supervisor,
            foreground.stop_on_signals(supervisor) as stopped,
        ):
            supervisor.run(lambda: os.kill(os.getpid(), signal.SIGHUP))
            assert supervisor.is_over and stopped.status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_generator_that_would_overfill_a_gpu_is_not_made(monkeypatch, tmp_path):
    """On two GPUs, of which the learner has one: the first generator has its share of the other one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config, directory = config_of(), RunDirectory(tmp_path)
    keys = RunKeys(b"k" * 32).join
    make = specs.generator_maker(
        config, directory, "unix:///s", keys, learner=placement_of(config, 2).learner_seats
    )
    assert make(0, 1, ()).env["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(
        RunError, match=r"g1 would need 42% of GPU 1, .* keep 85% for g0; .* generator\.count=2"
    ):
        make(1, 2, ["learner", "g0"])
    assert make(1, 1, ["learner"]).env["CUDA_VISIBLE_DEVICES"] == "1", "g0 has left"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one = placement_of(config, 1)
    make = specs.generator_maker(config, directory, "unix:///s", keys, learner=one.learner_seats)
    make(0, 1, ["learner"])
    with pytest.raises(RunError, match=r"GPU 0, .* keep 57% for rank 0 of the learner, 40% for g0"):
        make(1, 2, ["learner", "g0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make = specs.generator_maker(config, directory, "unix:///s", keys, learner=placement_of(config, 0).ranks)
    assert [make(index, 9, [f"g{other}" for other in range(index)]).name for index in range(9)]


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "800000 100000"}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 12),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {}, 12),
        ("0::/", {"cpu.max": "9000000 100000"}, 12),
        # a job of a batch system, and the path of a host that its container does not see
        ("0::/job/step", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"}, 3),
        ("0::/docker/1f", {"cpu.max": "250000 100000"}, 2),
        ("4:cpu,cpuacct:/\n2:cpuset:/", {"cpu/cpu.cfs_quota_us": "8", "cpu/cpu.cfs_period_us": "2"}, 4),
        ("4:cpu:/docker/1f", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 12),
        ("2:cpuset:/", {"cpuset/cpu.max": "100000 100000"}, 12),
    ],
)
def test_a_container_has_the_cores_of_its_quota(groups, files, cores, monkeypatch, tmp_path):
    for name, text in ({"own": groups} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    assert machine.share_of_cores() == cores
    assert machine.share_of_cores(2) == max(1, cores // 2)


def test_a_scorer_gets_a_share_of_its_gpu_which_it_keeps(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    asks = {"function": "model_score", "params": {"scorer": "rm"}}
    config = config_of(reward={"functions": [asks]}, scorers={"rm": {"model": "m"}})
    directory = RunDirectory(tmp_path)
    (spec,) = scorer_specs(config, directory, config.served)
    assert spec.argv[-3:] == ["--memory-share", "0.2", "--shared-gpu"]
    make = specs.generator_maker(
        config, directory, "unix:///s", RunKeys(b"k" * 32).join, learner=placement_of(config, 1).learner_seats
    )
    assert make(0, 1, ["learner"]).argv[-3:] == ["--memory-share", "0.2", "--shared-gpu"]
    with pytest.raises(RunError, match=r"keep 57% for rank 0 of the learner, 20% for rm\.0, 20% for g0"):
        make(1, 2, ["learner", "g0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (spec,) = scorer_specs(config, directory, config.served)
    assert "--memory-share" not in spec.argv


def test_sides_that_take_turns_have_all_cores_each(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    for lag, learner_threads, generator_threads in ((0, "12", "6"), (1, "4", "4")):
        config = config_of(staleness={"max_lag": lag}, generator={"count": 2}, learner={"device": "cpu"})
        directory, placement = RunDirectory(tmp_path / str(lag)), placement_of(config, 0)
        directory.create(fresh=False)
        directory.draw_secret()
        learner = specs.learner_spec(config, directory, "unix:///s", placement)
        make = specs.generator_maker(
            config, directory, "unix:///s", RunKeys(b"k" * 32).join, learner=placement.learner_seats
        )
        assert learner.env["OMP_NUM_THREADS"] == learner_threads
        assert make(0, 2, ()).env["OMP_NUM_THREADS"] == generator_threads


@pytest.mark.parametrize("begins", [True, False])
def test_a_start_whose_learner_never_began_leaves_the_settings_of_the_training(begins, tmp_path):
    texts = []
    for learning_rate in (1e-5, 2e-5):
        rate = {"optimizer": {"lr": learning_rate}}
        config = config_of(run={"name": "r", "root": str(tmp_path)}, learner=rate)
        directory = RunDirectory(config.run.directory)
        with supervising.claimed(directory, config, lambda: None, BestEffort(), fresh=False):
            if begins or not texts:
                record_start(directory.starts, 0, None)
            texts.append(dump_config(config))
    assert directory.config.read_text() == texts[begins]


def _start(config, directory):
    with supervising.claimed(directory, config, lambda: None, BestEffort(), fresh=True):
        pass


def _start_on_hosts(config, directory):
    with hosts.started_on_hosts(config, fresh=True, console=False):
        pass


def _submit(config, directory):
    list(hosts.submitted(config, ["true"], fresh=True))


@pytest.mark.parametrize("start", [_start, _start_on_hosts, _submit])
def test_a_run_that_is_up_is_not_begun_again_by_any_way(start, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "jobs_of", lambda _: [])
    monkeypatch.setattr(hosts, "submit", lambda _: pytest.fail("it was submitted"))
    cluster = {"kind": "local", "generator_hosts": 1}
    config = config_of(run={"name": "r", "root": str(tmp_path)}, generator={"count": 1}, cluster=cluster)
    directory = RunDirectory(config.run.directory)
    directory.create(fresh=False)
    directory.config.write_text("run: {}\n")
    with RunLock(directory.supervisor_lock):
        before = sorted(directory.path.iterdir())
        with pytest.raises(
            RunError,
            match=rf"{directory.path} is running already \(process {os.getpid()}\).* {directory.path} --watch`",
        ):
            start(config, directory)
        assert sorted(directory.path.iterdir()) == before


@pytest.mark.parametrize(("kind", "leases", "waits"), [("ray", 1, 3), ("ray", 9, 5), (None, 1, 0)])
def test_a_host_waits_for_the_lock_of_one_that_died_for_a_bounded_time(
    kind, leases, waits, tmp_path, monkeypatch, caplog
):
    """A file server keeps the lock of a dead host until its lease ends; its process can be seen nowhere."""
    cluster = {"kind": kind, "generator_hosts": 1} if kind else {}
    config = config_of(run={"name": "r", "root": str(tmp_path)}, generator={"count": 1}, cluster=cluster)
    directory = RunDirectory(config.run.directory)
    for module in (supervising, run_directory):
        monkeypatch.setattr(module, "find_holder", lambda lock: None)
    directory.create(fresh=False)
    dead, waited_s = RunLock(directory.supervisor_lock), []

    def wait(seconds):
        waited_s.append(seconds)
        if len(waited_s) == 3 * leases:
            dead.release()

    monkeypatch.setattr(
        supervising, "time", SimpleNamespace(sleep=wait, monotonic=lambda: float(len(waited_s)))
    )
    monkeypatch.setattr(supervising, "LEASE_S", 5.0)
    refused = pytest.raises(RunError, match=r"on host .*; give the command there")
    with (
        dead,
        nullcontext() if kind and leases == 1 else refused,
        supervising.claimed(directory, config, lambda: None, BestEffort(), fresh=False),
    ):
        pass
    assert len(waited_s) == waits
    said = f"is held by pid {os.getpid()} on host"
    assert [said in line for line in caplog.messages] == [True] * (waits > 0), "once"


def test_generators_join_a_store_of_ones_own_as_their_user_of_it(tmp_path):
    """The learner's user has rights that a generator's host must not have."""
    control = {"bind": "tcp://10.0.0.1:7001"}
    for given, said in (("learner@", "generator@"), ("", ""), ("me@", "me@")):
        url = f"rediss://{given}store/0"
        lines = up._how_to_join(config_of(store={"url": url}, control=control), tmp_path / "join.key", url)
        assert [line.partition(" --store ")[2] for line in lines[:2]] == [f"rediss://{said}store/0"] * 2
    own = config_of(store={"bind": "tcp://[fd00::1]:7000"}, control=control)
    [_, line, *_] = up._how_to_join(own, tmp_path / "join.key", "unix://generator@/store.sock")
    assert line == "from other hosts: asyncrl generator --store redis://generator@[fd00::1]:7000/0"
