"""A process of the broadcast check: `python -m asyncrl.preflight.checks.broadcast gloo|nccl RANK DIRECTORY`.

Rank 0 sends, rank 1 compares, through torch's process group, like the ranks of a learner.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

MEGABYTES = 16
DEADLINE_S = 30.0


def main() -> None:
    """Send or receive; the exit status is 0 if the bytes arrived."""
    backend, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = FileStore(str(directory / "store"), 2)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    seeded = torch.Generator().manual_seed(0)  # the same bytes in both processes
    payload = torch.randint(0, 256, (MEGABYTES << 20,), dtype=torch.uint8, generator=seeded)
    payload = payload.to("cuda" if backend == "nccl" else "cpu")
    received = payload.clone() if rank == 0 else torch.zeros_like(payload)
    dist.broadcast(received, src=0)
    if not torch.equal(received, payload):
        raise SystemExit("other bytes arrived than were sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
