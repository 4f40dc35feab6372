"""The doctor's checks on real processes: what crashes and hangs, ports and stores that fail, and a
whole run of it."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
import yaml

from asyncrl.buffer.server import StoreServer
from asyncrl.config.load import load_config
from asyncrl.config.store import StoreConfig
from asyncrl.preflight.checks import host
from asyncrl.preflight.checks import this_run as run
from asyncrl.preflight.checks.base import Check, Finding, execute, fine
from tests.support.command import ASYNCRL
from tests.support.models import tiny_qwen2
from tests.support.waiting import HANG, hang

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DOCTOR = [*ASYNCRL, "doctor"]


def outcome(work, limit_s: float = 60.0) -> Finding:
    return execute(Check(name="planted", run=work, fix="do this", limit_s=limit_s)).finding


def test_what_a_check_finds_comes_back_whatever_it_prints():
    def chatty() -> Finding:
        sys.stdout.write("a library says hello\n")
        os.write(2, b"and complains\n")
        return fine("all well")

    assert outcome(chatty) == fine("all well")


def test_a_check_that_raises_crashes_or_hangs_is_a_failure_with_its_fix_and_leaves_no_process(tmp_path):
    def raises() -> Finding:
        raise ImportError("libfoo.so.3: cannot open shared object file")

    def crashes() -> Finding:
        os.write(2, b"about to fall")
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # else libraries print a long stack
        os.kill(os.getpid(), signal.SIGSEGV)
        return fine("never")

    def hangs() -> Finding:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(child.pid))
        hang()
        return fine("never")

    for work, limit_s, found in (
        (raises, 60, "ImportError: libfoo.so.3"),
        (crashes, 60, "SIGSEGV"),
        (hangs, 3, "within 3 s"),
    ):
        finding = outcome(work, limit_s)
        assert finding.verdict == "failed" and found in finding.found and finding.fix == "do this"
    assert "about to fall" in outcome(crashes).found
    sleeper = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(sleeper) or psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE


def test_processes_that_do_not_reach_each_other(monkeypatch):
    refused = [sys.executable, "-c", "import sys; sys.exit('gloo: connection refused')"]
    finding = host.broadcast_over("gloo", refused)
    assert (
        finding.verdict == "failed"
        and "connection refused" in finding.found
        and "GLOO_SOCKET_IFNAME" in finding.fix
    )
    monkeypatch.setattr(host, "BROADCAST_S", 1.0)
    finding = host.broadcast_over("nccl", [sys.executable, "-c", HANG])
    assert (
        finding.verdict == "failed" and "did not meet" in finding.found and "NCCL_P2P_DISABLE" in finding.fix
    )


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        bind = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finding = host.port(bind)
        assert finding.verdict == "failed" and "taken" in finding.found
    assert host.port(bind).verdict == "ok"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tiny_qwen2(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    values = {
        "run": {"name": "checked", "root": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"functions": [{"function": "arithmetic"}]},
        "sampling": {"max_prompt_tokens": 8, "max_response_tokens": 8},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_stores_that_are_not_there_throw_away_or_serve_another_run(config, tmp_path):
    loaded = load_config(config, ["store.url=unix:///nowhere.sock"])
    finding = outcome(lambda: run.configured_store(loaded))
    assert finding.verdict == "failed" and "unix:///nowhere.sock" in finding.found
    with StoreServer(StoreConfig(), tmp_path / "store") as server:
        loaded = load_config(config, [f"store.url={server.url}"])
        client = redis.Redis(unix_socket_path=str(server.socket_path))
        finding = run.configured_store(loaded)
        assert finding.verdict == "ok" and "functions load" in finding.found
        assert client.keys() == [], "nothing of the probe stays"
        client.hset(
            "asyncrl:run",
            mapping={"name": "other", "config_json": "", "config_hash": "", "release": "", "key_id": ""},
        )
        finding = run.configured_store(loaded)
        assert (
            finding.verdict == "failed"
            and "serves run 'other'" in finding.found
            and "store.url" in finding.fix
        )
        client.config_set("maxmemory-policy", "allkeys-lru")
        finding = outcome(lambda: run.configured_store(loaded))
        assert finding.verdict == "failed" and "noeviction" in finding.found
        client.close()


def examine(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = subprocess.run(
        [*DOCTOR, "--json", *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, {one["check"]: one for one in json.loads(done.stdout)}


def test_a_machine_that_runs_these_tests_is_well_and_a_config_that_cannot_run_is_not(config):
    status, found = examine("--config", str(config))
    # The ranges are those of the installed package, which beside a source tree may be of another day.
    wrong = {name: one for name, one in found.items() if one["verdict"] == "failed" and name != "packages"}
    assert not wrong and status == int(found["packages"]["verdict"] == "failed")
    assert list(found) == [
        *("config", "packages", "libraries", "gpus", "broadcast"),
        *("shared memory", "disk", "store", "model", "prompts", "rewards"),
    ]
    assert "verified" in found["broadcast"]["found"] and "1 prompts" in found["prompts"]["found"]
    assert not any(config.parent.joinpath("runs").glob("*")), "looking changes nothing"
