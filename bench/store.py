"""Groups per second through the store, beside the server's own benchmark with the same bytes in the same run.

Two producer processes lease and put; one consumer takes, fetches the frames, and commits. The baseline is
what redis-benchmark gets for one SET and one GET of the same size on the same server: 1 / (1 / SET + 1 /
GET). Ours and the baseline alternate; the medians are compared.

    python -m bench.store [--server auto|redis-server|bundled] [--fsync everysec] [--out
    bench/results/store.json]
"""

import argparse
import csv
import io
import json
import multiprocessing
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from asyncrl.buffer.base import BufferRules, PutOutcome
from asyncrl.buffer.connection import StoreConnection
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.redis import RedisBuffer
from asyncrl.buffer.server import StoreServer, find_server
from asyncrl.config.store import StoreConfig
from bench.environment import describe

RULES = BufferRules(groups=32)
CREDIT_GROUPS, COMMIT_TAKES = 256, 4


def produce(url, run, name, frame_bytes, start):
    connection = StoreConnection(url)
    buffer = RedisBuffer(connection, run, RULES)
    frame = bytes(frame_bytes)
    start.wait()
    while not (lease := buffer.lease(name, 16)).closed:
        for ticket in lease.tickets:
            while buffer.put(name, ticket.id, frame) is PutOutcome.FULL:
                time.sleep(0.001)
        if not lease.tickets:
            time.sleep(0.001)
    connection.close()


def consume(buffer, groups):
    ledger = Ledger()
    while ledger.consumed < groups:
        take = buffer.take(ledger, RULES.groups, window=64)
        if take is None:
            time.sleep(0.0005)
            continue
        buffer.frames(take.ids)
        ledger.consume(take.ids)
        buffer.set_version(ledger.takes, limit=min(groups, ledger.consumed + CREDIT_GROUPS))
        if ledger.takes % COMMIT_TAKES == 0:
            buffer.commit(ledger.takes, ledger.chain)
    buffer.commit(ledger.takes, ledger.chain)


def ours(server, run, *, groups, frame_bytes, producers):
    """Groups per second from the first lease to the last commit."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(producers + 1)
    processes = [
        context.Process(target=produce, args=(server.url, run, f"g{i}", frame_bytes, start))
        for i in range(producers)
    ]
    connection = StoreConnection(server.url)
    buffer = RedisBuffer(connection, run, RULES)
    try:
        for process in processes:
            process.start()
        start.wait(60)
        started = time.perf_counter()
        buffer.recover(Ledger(), version=0, limit=CREDIT_GROUPS)
        consume(buffer, groups)
        seconds = time.perf_counter() - started
        buffer.close()
        audit = buffer.audit()
        assert audit.missing == 0
        assert audit.done == groups
    finally:
        for process in processes:
            process.join(10)
            process.kill()
        connection.client.flushall()
        connection.close()
    return groups / seconds


def baseline(server, *, requests, frame_bytes, clients):
    """Requests per second of SET and GET, as redis-benchmark counts them."""
    argv = [
        "redis-benchmark",
        "-s",
        str(server.socket_path),
        "-t",
        "set,get",
        "-d",
        str(frame_bytes),
        "-n",
        str(requests),
    ]
    argv += ["-c", str(clients), "-r", "256", "--csv"]
    text = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = {row["test"]: float(row["rps"]) for row in csv.DictReader(io.StringIO(text))}
    return rows["SET"], rows["GET"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--server", default="auto", choices=["auto", "redis-server", "valkey-server", "bundled"]
    )
    parser.add_argument("--fsync", default="everysec", choices=["always", "everysec", "no"])
    parser.add_argument("--groups", type=int, default=3200)
    parser.add_argument("--frame-bytes", type=int, default=65536)
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if shutil.which("redis-benchmark") is None:
        parser.error("redis-benchmark is not on PATH (Debian: redis-tools)")
    workload = {"groups": options.groups, "frame_bytes": options.frame_bytes, "producers": options.producers}
    rates, sets, gets = [], [], []
    with (
        tempfile.TemporaryDirectory() as directory,
        StoreServer(StoreConfig(fsync=options.fsync), Path(directory), server=options.server) as server,
    ):
        for repeat in range(options.repeats):
            set_rate, get_rate = baseline(
                server, requests=options.groups, frame_bytes=options.frame_bytes, clients=options.producers
            )
            sets.append(set_rate)
            gets.append(get_rate)
            rates.append(ours(server, f"bench-{repeat}", **workload))
    baselines = [1 / (1 / s + 1 / g) for s, g in zip(sets, gets, strict=True)]
    result = {
        **describe("asyncrl", "redis", "hiredis", server=find_server(options.server)),
        "workload": {**workload, "fsync": options.fsync, "repeats": options.repeats},
        "groups_per_s": round(statistics.median(rates)),
        "groups_per_s_all": [round(rate) for rate in rates],
        "mib_per_s": round(statistics.median(rates) * options.frame_bytes / 2**20, 1),
        "baseline_set_per_s": round(statistics.median(sets)),
        "baseline_get_per_s": round(statistics.median(gets)),
        "baseline_groups_per_s": round(statistics.median(baselines)),
        "ratio": round(
            statistics.median(ours / base for ours, base in zip(rates, baselines, strict=True)), 3
        ),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
