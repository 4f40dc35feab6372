"""A process of the broadcast check: `python -m asyncrl.preflight.checks.broadcast gloo|nccl RANK DIRECTORY`.

Rank 0 sends, rank 1 verifies. Gloo runs through the transport of the weights, NCCL through torch's process
group, like the ranks of a learner.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from asyncrl.weights.base import TensorSpec
from asyncrl.weights.gloo import open_group, receive, send
from asyncrl.weights.layout import Layout, checksum

MEGABYTES = 16
DEADLINE_S = 30.0


def main() -> None:
    """Send or receive; the exit status is 0 if the bytes arrived."""
    backend, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    (_nccl if backend == "nccl" else _gloo)(rank, directory)


def _payload() -> torch.Tensor:
    """Return the same random bytes in every process."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (MEGABYTES << 20,), dtype=torch.uint8, generator=seeded)


def _gloo(rank: int, directory: Path) -> None:
    layout = Layout.plan([TensorSpec(name="probe", dtype="float32", shape=(MEGABYTES << 18,))], 4 << 20)
    payload = _payload()
    group = open_group({"name": "doctor", "directory": str(directory)}, rank=rank, deadline_s=DEADLINE_S)
    if rank == 0:
        send(group, payload, layout)
    else:
        receive(group, torch.zeros_like(payload), layout, [checksum(payload)])


def _nccl(rank: int, directory: Path) -> None:
    torch.cuda.set_device(rank)
    store = FileStore(str(directory / "store"), 2)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timeout)
    payload = _payload().cuda()
    received = payload.clone() if rank == 0 else torch.zeros_like(payload)
    dist.broadcast(received, src=0)
    if not torch.equal(received, payload):
        raise SystemExit("other bytes arrived than were sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
