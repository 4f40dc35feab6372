"""A process of the row `links`: `python -m asyncrl.preflight.gpu.pair gloo|nccl RANK FILE`.

Rank 0 writes GB/s into the file.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

SIZES = {"gloo": 64 << 20, "nccl": 1 << 30}
TIMES = 5
DEADLINE_S = 60.0


def main() -> None:
    """Broadcast some times."""
    backend, rank, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    device = "cpu"
    if backend == "nccl":
        index = 0 if rank == 0 else torch.cuda.device_count() - 1
        torch.cuda.set_device(index)
        device = f"cuda:{index}"
    store = FileStore(f"{file}-store", 2)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    payload = torch.zeros(SIZES[backend], dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(TIMES):
        dist.barrier()
        started_s = time.perf_counter()
        dist.broadcast(payload, src=0)
        if backend == "nccl":
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - started_s)
    if rank == 0:
        file.write_text(str(len(payload) / min(seconds) / 1e9))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
