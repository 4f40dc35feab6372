"""One version of the weights from a learner to 1, 2, 4 and 8 hosts at the same time, over `tcp`.

The hosts are networks of this machine (needs root), and the learner's cable carries `--gbit` per second. On
each host, one process receives the version and verifies it, as for all generators of a host. "seconds" is the
median time until the last host has it; "relative" is that, relative to as many times the seconds of one host:
1.0 is a cable that is always full. "sent" is what left the learner's cable, in versions.

    python -m bench.fanout [--hosts 1 2 4 8] [--mib 64] [--gbit 1] [--rounds 5] [--json FILE]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgpack
import torch

from asyncrl.cluster.local import Namespace, Network, obstacle
from asyncrl.hosting.processes import module_argv
from asyncrl.weights.base import TensorSpec
from asyncrl.weights.layout import Layout, checksums
from asyncrl.weights.slots import Slot
from asyncrl.weights.stream import SlotServer, fetch
from bench.environment import describe, report

DEADLINE_S = 300.0


def layout_of(mib: int) -> Layout:
    specs = [TensorSpec(name=f"layer.{n}", dtype="float32", shape=(512, 1024)) for n in range(mib // 2)]
    return Layout.plan(specs, 1 << 26)


def serve(address: str, mib: int) -> None:
    """The learner's side, until its input is closed."""
    layout = layout_of(mib)
    slot = Slot.create(layout.total_bytes)
    slot.buffer.fill_(7)
    slot.complete(1)
    server = SlotServer(address, lambda stamp: slot.file, layout.total_bytes, deadline_s=DEADLINE_S)
    described = {"source": server.source(1), "sums": checksums(slot.buffer, layout)}
    print(msgpack.packb(described).hex(), flush=True)
    sys.stdin.read()
    server.close()


def receive(mib: int) -> None:
    """The side of a host: fetch the version, for each line of the input."""
    layout = layout_of(mib)
    memory = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    described = msgpack.unpackb(bytes.fromhex(sys.stdin.readline()))
    print("ready", flush=True)
    for _ in sys.stdin:
        until_s = time.monotonic() + DEADLINE_S
        fetch(described["source"], memory, layout, described["sums"], until_s=until_s)
        print("received", flush=True)


def start(host: Namespace, *words: str) -> "subprocess.Popen[str]":
    command = host.command(*module_argv("bench.fanout", *words))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def say(receivers: "Sequence[subprocess.Popen[str]]", line: str) -> None:
    """Tell a line to all, and wait until each has answered."""
    for receiver in receivers:
        assert receiver.stdin is not None
        receiver.stdin.write(line + "\n")
        receiver.stdin.flush()
    for receiver in receivers:
        assert receiver.stdout is not None
        if not receiver.stdout.readline():
            raise RuntimeError(f"a host ended with status {receiver.wait()}")


def sent_bytes(host: Namespace) -> int:
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    # A network has its own view of /sys only where that is mounted anew.
    words = ("unshare", "--mount", "sh", "-c", f"mount -t sysfs sysfs /sys && cat {counter}")
    return int(subprocess.check_output(host.command(*words)))


def measured(network: Network, hosts: int, options: argparse.Namespace, described: str) -> dict[str, float]:
    """Return seconds and versions sent, with as many hosts at the same time."""
    learner = network.host("learner")
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(start(network.host(f"host-{n}"), "--receive", "--mib", str(options.mib)))
            for n in range(hosts)
        ]
        say(receivers, described)
        seconds, sent = list[float](), sent_bytes(learner)
        for _ in range(options.rounds):
            began_s = time.monotonic()
            say(receivers, "")
            seconds.append(time.monotonic() - began_s)
        sent = sent_bytes(learner) - sent
        for receiver in receivers:
            assert receiver.stdin is not None
            receiver.stdin.close()
    versions = sent / options.rounds / layout_of(options.mib).total_bytes
    return {"hosts": hosts, "seconds": round(statistics.median(seconds), 3), "sent": round(versions, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        return serve(options.serve, options.mib)
    if options.receive:
        return receive(options.mib)
    if why := obstacle():
        parser.error(why)
    with closing(Network()) as network:
        learner, mbit = network.host("learner"), round(1000 * options.gbit)
        shape = f"tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 1mb latency 50ms"
        subprocess.run(learner.command(*shape.split()), check=True)
        server = start(learner, "--serve", network.address("learner"), "--mib", str(options.mib))
        assert server.stdin is not None and server.stdout is not None
        described = server.stdout.readline().strip()
        rows = [measured(network, hosts, options, described) for hosts in options.hosts]
        server.stdin.close()
        server.wait(60)
    for row in rows:
        row["relative"] = round(row["seconds"] / (row["hosts"] * rows[0]["seconds"] / rows[0]["hosts"]), 2)
    report(
        {**describe("asyncrl", "torch"), "mib": options.mib, "gbit": options.gbit, "rows": rows}, options.json
    )
    return None


if __name__ == "__main__":
    main()
