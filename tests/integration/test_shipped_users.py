"""The shipped lines that name a store's users: each server takes them, and they admit the right callers."""

import re
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.probe import probe_store
from asyncrl.buffer.redis import PLACES
from asyncrl.buffer.run_record import RunRecord
from asyncrl.buffer.server import find_server
from asyncrl.buffer.users import GENERATOR, LEARNER
from asyncrl.errors import StoreRefused
from tests.support.buffer_contract import RULES, fill, take
from tests.support.compose import DEPLOY, compose, env_file
from tests.support.ports import free_ports
from tests.support.redis_lane import RUN
from tests.support.store_servers import SERVERS
from tests.support.store_users import ATTACKS, OF_A_RULER, REFUSED, ByRole

pytestmark = pytest.mark.integration

PAGE = DEPLOY.parent / "docs" / "security.md"
NAME = RUN.name


class Shipped:
    """A server on a port, with its users' passwords."""

    def __init__(self, binary: Path, directory: Path) -> None:
        (self.port,), self.directory = free_ports(1), directory
        self.passwords = {user: secrets.token_hex(8) for user in (LEARNER, GENERATOR)}
        (directory / "valkey-server").symlink_to(binary)

    def connection(self, user: str | None) -> StoreConnection:
        at = f"{user}@" if user else ""
        return StoreConnection(
            f"redis://{at}127.0.0.1:{self.port}/0", password=self.passwords.get(user or ""), retry_s=20
        )


def of_compose(server: Shipped) -> list[str]:
    """The command of the container, with the server in question under the name that it calls."""
    passwords = {
        "ASYNCRL_STORE_PASSWORD": server.passwords[LEARNER],
        "ASYNCRL_GENERATOR_PASSWORD": server.passwords[GENERATOR],
    }
    variables = env_file() | passwords | {"STORE_PORT": str(server.port), "GRAFANA_PASSWORD": "unused"}
    store = compose(variables)["services"]["store"]
    settings = "".join(f"export {name}={value}\n" for name, value in store["environment"].items())
    script = store["command"][-1].replace("dir /data", f"dir {server.directory}")
    return ["sh", "-ec", f"PATH={server.directory}:$PATH\n{settings}{script}"]


def of_the_page(server: Shipped) -> list[str]:
    """A server of one's own, to which the lines of docs/security.md are typed."""
    return [
        str(server.directory / "valkey-server"),
        "--port",
        str(server.port),
        "--maxmemory-policy",
        "noeviction",
    ]


def type_the_lines(server: Shipped) -> None:
    lines = re.findall(r"^    (ACL SETUSER (\w+) .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [user for _, user in lines] == [LEARNER, GENERATOR, "default"]
    with redis.Redis(port=server.port) as client:
        for line, user in lines:
            typed = line.replace(">PASSWORD", f">{server.passwords.get(user)}").replace("NAME", NAME)
            client.execute_command(*typed.split())  # as redis-cli sends a line


@pytest.fixture(scope="module", params=SERVERS)
def binary(request) -> Path:
    return find_server(request.param)


@pytest.fixture(params=["compose.yaml", "security.md"])
def server(request, binary, tmp_path) -> Iterator[Shipped]:
    server = Shipped(binary, tmp_path)
    argv = of_compose(server) if request.param == "compose.yaml" else of_the_page(server)
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(argv, cwd=tmp_path, stdout=out, stderr=out)
    try:
        if request.param == "security.md":
            server.connection(None).call(lambda client: client.ping())
            type_the_lines(server)
        yield server
    finally:
        process.terminate()
        process.wait(120)


def test_shipped_users_do_their_part_and_nothing_else(server):
    learner, generator = server.connection(LEARNER), server.connection(GENERATOR)
    learner.check()
    assert probe_store(learner, NAME).version
    RunRecord(learner, b"key").claim(RUN, fresh=True)
    assert RunRecord(generator, b"key").read() == RUN
    buffer, ledger = ByRole(learner, generator, NAME, RULES), Ledger()
    buffer.recover(ledger, version=0, limit=8)
    fill(buffer, 4)
    first = take(buffer, ledger, 2)
    buffer.commit(first.number, first.chain)
    assert buffer.audit().missing == 0

    def state() -> tuple[object, ...]:
        return (
            buffer.audit(),
            learner.client.hgetall(f"{{{NAME}:train}}:meta"),
            RunRecord(generator, b"key").read(),
        )

    before = state()
    elsewhere = [
        ("HGET", "other:meta", "epoch"),
        ("HSET", "asyncrl:run", "name", "mine"),
        ("GET", "anything"),
    ]
    for words in [*ATTACKS, *elsewhere]:
        line = [f"{{{NAME}:train}}:{word}" if word in PLACES else word for word in words]
        with pytest.raises(ResponseError, match=REFUSED):
            generator.client.execute_command(*line)
    for words in OF_A_RULER:
        with pytest.raises(NoPermissionError):
            learner.client.execute_command(*words)
    assert state() == before
    for user in (None, "default", "nobody"):
        with pytest.raises(StoreRefused):
            server.connection(user).call(lambda client: client.ping())
