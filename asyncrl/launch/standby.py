"""A standby: a process that has loaded its libraries and waits for the death of the one before it.

Most of what a learner needs to come back is the time until torch and DeepSpeed are imported. A standby holds
that memory and nothing else: no lock, no connection, nothing on a GPU.
"""

import argparse
import select
import sys
from pathlib import Path

from asyncrl.progress import Pace, beat, begin

# The argument of a process that begins as a standby.
FLAG = "--standby"


def parse_arguments(prog: str) -> argparse.Namespace:
    """The arguments of the learner, and of the process that starts its ranks: `store`, `config`,
    `standby`."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--store", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(FLAG, action="store_true")
    return parser.parse_args()


def wait_until_needed() -> str:
    """Wait until the parent writes one line to stdin, and return that line. Exit if the parent closes the
    pipe."""
    begin("stand by", Pace.QUICK)
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        beat()
    begin("start", Pace.SLOW)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return line.strip()
