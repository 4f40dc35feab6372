"""One whole run, looked at from outside: what it unpickles, where it listens and whom it hears, and where its
secrets are.

The store and the control plane listen on a port; a generator joins as from another host, with an address and
a file; the learner is killed once and loads its checkpoint.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from zmq.utils import z85

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.run_record import RunRecord
from asyncrl.buffer.users import GENERATOR, LEARNER
from asyncrl.commands.down import processes_of
from asyncrl.control.base import Refused
from asyncrl.control.sockets import GeneratorKeys
from asyncrl.errors import StoreRefused
from asyncrl.run.directory import RunDirectory
from asyncrl.run.keys import SECRET_FILE_VARIABLE, SECRET_VARIABLE, RunKeys
from tests.support.command import ASYNCRL
from tests.support.curve import answer
from tests.support.ports import free_ports
from tests.support.whole_run import call, kill, member_versions, rows, steps, tiny_run, wait

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with tiny_run(tmp_path, "vllm") as path:
        yield path


SUPPORT = Path(__file__).parents[1] / "support"
CANARIES = {
    name: secrets.token_hex(20)
    for name in (
        *(
            "WANDB_API_KEY",
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "OPENAI_API_KEY",
            "GITHUB_TOKEN",
        ),
        "ASYNCRL_STORE_PASSWORD",
    )
}
LEARNERS, GENERATORS = "asyncrl.launch.learner_process", "asyncrl.launch.generator_process"
WIRES = ("asyncrl", "redis", "zmq", "msgpack", "msgspec", "torch.distributed", "vllm.distributed")
REWARDS, STORES = "asyncrl.rewards.worker", ("valkey-server", "redis-server")
MAY_UNPICKLE = {
    LEARNERS: {"torch.serialization"},  # DeepSpeed's files, after the manifest was verified
    # vLLM's own children; the engine's core, a fork, reads what torch has compiled and kept on this disk.
    GENERATORS: {"multiprocessing.connection", "torch._inductor.codecache"},
}


@dataclass
class Seen:
    """Of all processes of a run, at any time."""

    argv: dict[int, str] = field(default_factory=dict)
    environments: dict[int, dict[str, str]] = field(default_factory=dict)
    ports: dict[tuple[str, int], str] = field(default_factory=dict)
    sockets: dict[str, int] = field(default_factory=dict)
    """Path -> its mode; 0 for one that anybody can reach, whatever its mode."""

    def look(self, *roots: int) -> None:
        for root in roots:
            for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
                try:
                    self._look_at(process)
                except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
                    continue  # it has just ended

    def _look_at(self, process: psutil.Process) -> None:
        # A process that ends in between is not noted at all.
        argv, environment = " ".join(process.cmdline()), process.environ()
        self.argv[process.pid], self.environments[process.pid] = argv, environment
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                self.ports[(one.laddr.ip, one.laddr.port)] = self.argv[process.pid]
        mine = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        for path, inode in listening_unix():
            if f"socket:[{inode}]" in mine:
                try:
                    self.sockets[path] = os.stat(path).st_mode
                except FileNotFoundError:  # it is abstract, or has just been closed
                    if (path, inode) in listening_unix():
                        self.sockets[path] = 0


def listening_unix() -> Iterator[tuple[str, str]]:
    accepting = 0x10000
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split(None, 7)
        if int(words[3], 16) & accepting and len(words) == 8:
            yield words[7], words[6]


def test_a_run_unpickles_nothing_from_a_wire_hears_nobody_else_and_keeps_its_secrets(config, monkeypatch):
    run, elsewhere, notes = (
        config.parent / "runs" / "whole",
        config.parent / "elsewhere",
        config.parent / "unpickled.jsonl",
    )
    store_port, control_port = free_ports(2)
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NOTE_UNPICKLING_IN", str(notes))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(SUPPORT / "observer"), os.environ.get("PYTHONPATH", "")])
    )
    control = f"tcp://127.0.0.1:{control_port}"
    overrides = [
        f"store.bind=tcp://127.0.0.1:{store_port}",
        f"control.bind={control}",
        "run.environment=[NOTE_UNPICKLING_IN]",
    ]
    overrides += [
        "learner.steps=5000",
        "generator.count=1",
        "telemetry.wandb=offline",
    ]
    with (config.parent / "up.out").open("wb") as output:
        up = subprocess.Popen(
            [*ASYNCRL, "learner", "--config", str(config), *overrides], stdout=output, stderr=output
        )
    seen, joined = Seen(), None

    def looked_until(condition) -> None:
        wait(lambda: seen.look(up.pid, *([joined.pid] if joined else [])) or condition(), up, config)

    try:
        looked_until(lambda: answers(control_port))
        keys = RunDirectory(run).keys()
        store = f"redis://{GENERATOR}@127.0.0.1:{store_port}/0"

        # Nobody without the secret is let in, and who asked for it is told.
        check_refusals(store, control, keys)
        elsewhere.mkdir()
        key = shutil.copy(run / "join.key", elsewhere / "join.key")
        others = {name: value for name, value in os.environ.items() if name not in CANARIES}
        wrong = others | {SECRET_VARIABLE: RunKeys(bytes(32)).join.text()}
        line = [
            *ASYNCRL,
            "generator",
            "--count",
            "1",
            "--store",
            store,
            "--wait",
            "60",
            "--allow",
            "variable:NOTE_UNPICKLING_IN",
        ]
        line += ["--allow", str(config.parent / "rewards.py")]
        refused = subprocess.run(
            line, cwd=elsewhere, env=wrong, capture_output=True, text=True, timeout=300, check=False
        )
        assert refused.returncode != 0 and "refused" in refused.stderr + refused.stdout

        # Somebody with it joins from anywhere, with an address and a file.
        joined = subprocess.Popen(line, cwd=elsewhere, env=others | {SECRET_FILE_VARIABLE: str(key)})
        looked_until(lambda: len(steps(run)) > 1 and min(member_versions(run), default=-1) > 0)

        # The learner dies and loads its checkpoint, which is a pickle.
        looked_until(lambda: any(run.glob("checkpoints/step-*/MANIFEST.json")))
        kill(run, "learner")
        before = len(steps(run))
        # Only who is a member of the new learner hears its farewell.
        looked_until(lambda: min(member_versions(run), default=-1) > before + 1)
        store_dump = dump(store, keys)
        call("down", str(run))
        assert up.wait(timeout=200) == 128 + signal.SIGTERM
        assert joined.wait(timeout=200) == 0
    finally:
        up.kill()
        if joined:
            joined.kill()
    trained = steps(run)
    assert sorted(set(trained)) == list(range(1, max(trained) + 1))
    assert all(row.get("weights/probe_max", 0) < 1e-4 for row in rows(run))
    assert processes_of(run) == []
    check_sockets(seen, {store_port, control_port})
    check_unpickling(notes)
    check_secrets(seen, config.parent, keys, store_dump)


def answers(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def check_refusals(store: str, control: str, keys: RunKeys) -> None:
    password = keys.store_password(GENERATOR)
    assert (
        RunRecord(StoreConnection(store, password=password, retry_s=5), keys.join.record).read().name
        == "whole"
    )
    for url, wrong in [
        (store, None),
        (store, "x" * 64),
        (store, keys.store_password(LEARNER)),
        (store.replace(GENERATOR, LEARNER), password),
        (store.replace(f"{GENERATOR}@", ""), password),
        (store.replace(f"{GENERATOR}@", ""), None),
    ]:
        with pytest.raises(StoreRefused):
            StoreConnection(url, password=wrong, retry_s=20).call(
                lambda client: client.hgetall("asyncrl:run")
            )
    assert isinstance(answer(control, keys.join.control, wait_ms=20_000, wire_key=keys.join.wire), Refused)
    assert answer(control, None, wire_key=keys.join.wire) is None
    assert (
        answer(
            control, GeneratorKeys(secret=os.urandom(32), learner=keys.join.learner), wire_key=keys.join.wire
        )
        is None
    )


def dump(store: str, keys: RunKeys) -> bytes:
    """What a generator can read; the rest is in the append-only file below the run directory."""
    client = StoreConnection(store, password=keys.store_password(GENERATOR)).client
    return repr(client.hgetall("asyncrl:run")).encode()


def check_sockets(seen: Seen, ours: set[int]) -> None:
    assert ours <= {port for _, port in seen.ports}, "they were seen at all"
    strangers = {where: who for where, who in seen.ports.items() if where[0] not in ("127.0.0.1", "::1")}
    assert strangers == {}, "all of this run is told to stay on this host"
    assert any(path.endswith("store.sock") for path in seen.sockets)
    for path, mode in seen.sockets.items():
        assert mode and not mode & (stat.S_IWGRP | stat.S_IWOTH), f"others may connect to {path}"


def check_unpickling(notes: Path) -> None:
    found: dict[str, dict[str, object]] = {role: {} for role in MAY_UNPICKLE}
    for line in notes.read_text().splitlines():
        noted = json.loads(line)
        for role in MAY_UNPICKLE:
            if role in noted["argv"]:
                found[role][noted["asking"][0]] = noted
    assert "torch.serialization" in found[LEARNERS], "the checkpoint was loaded and the observer saw it"
    for role, events in found.items():
        unexpected = {module: noted for module, noted in events.items() if module not in MAY_UNPICKLE[role]}
        assert unexpected == {}, f"{role} unpickles"
        assert not [module for module in events if module.startswith(WIRES)]


def check_secrets(seen: Seen, root: Path, keys: RunKeys, store_dump: bytes) -> None:
    own = {
        "run.key": keys.secret,
        "join.key": keys.join.secret,
        "wire": keys.join.wire,
        "control learner": keys.control.secret,
        "control generator": keys.join.control.secret,
        **{f"store {user}": bytes.fromhex(keys.store_password(user)) for user in (LEARNER, GENERATOR)},
    }
    forms = {name: (value.encode(),) for name, value in CANARIES.items()}
    forms |= {name: (value, value.hex().encode(), z85.encode(value)) for name, value in own.items()}
    places = {f"argv {pid}": line.encode() for pid, line in seen.argv.items()} | {"store": store_dump}
    for path in root.rglob("*"):
        if path.is_file() and path.name not in ("run.key", "join.key"):
            places[str(path)] = path.read_bytes()
    for part in ("config.yaml", "status.json", "checkpoints", "logs", "metrics", "appendonly", "wandb"):
        assert any(part in place for place in places), f"nothing of {part} was searched"
    for name, (place, data) in ((name, found) for name in forms for found in places.items()):
        assert not any(form in data for form in forms[name]), f"{name} stands in {place}"
    # A process inherits what it needs: trackers run in the learner, and only roles need the secret of the
    # run.
    never = CANARIES.keys() - {"HF_TOKEN", "WANDB_API_KEY"}
    for pid, line in seen.argv.items():
        if "asyncrl.cli.main" in line:
            continue  # the user's own environment
        inherited = {name for name, value in CANARIES.items() if seen.environments[pid].get(name) == value}
        assert not inherited & never, line
        if any(one in line for one in (GENERATORS, REWARDS, *STORES)):
            assert "WANDB_API_KEY" not in inherited, line
        if any(one in line for one in (REWARDS, *STORES)):
            assert SECRET_VARIABLE not in seen.environments[pid], line
