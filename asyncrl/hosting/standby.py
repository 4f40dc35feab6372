"""A standby: a process that has loaded its libraries and waits for the death of the one before it.

A learner that is restarted spends most of its time on the import of torch and DeepSpeed. A standby holds that
memory and nothing else: no lock, no connection, nothing on a GPU.
"""

import argparse
import select
import sys
from pathlib import Path

from asyncrl.hosting.progress import Pace, beat, begin

FLAG = "--standby"
MEMORY_SHARE = "--memory-share"
HOST, LEARNER = "--host", "--learner"


def parse_arguments(prog: str) -> argparse.Namespace:
    """Parse what the learner and the process that starts its ranks are called with."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--store", required=True)
    parser.add_argument("--config", type=Path, required=True)
    # Of the memory of each rank's GPU: less than 1 beside generators.
    parser.add_argument(MEMORY_SHARE, type=float, default=1.0)
    # The host of these ranks, and the address of host 0.
    parser.add_argument(HOST, type=int, default=0)
    parser.add_argument(LEARNER)
    parser.add_argument(FLAG, action="store_true")
    return parser.parse_args()


def name_of(host: int) -> str:
    """Return the name under which the ranks of a host of the learner are kept, and log."""
    return f"ranks-{host}" if host else "learner"


def wait_until_needed() -> str:
    """Return the line that the parent writes to stdin. Exit if the parent closes the pipe."""
    begin("stand by", Pace.QUICK)
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        beat()
    begin("start", Pace.SLOW)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return line.strip()
