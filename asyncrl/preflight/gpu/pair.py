"""A process of the row `links`: `python -m asyncrl.preflight.gpu.pair tcp|nccl RANK FILE`.

Rank 0 sends, and writes GB/s into the file.
"""

import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

SIZE_BYTES = {"tcp": 256 << 20, "nccl": 1 << 30}
TIMES = 5
DEADLINE_S = 60.0


def main() -> None:
    """Send some times."""
    backend, rank, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    seconds = (_nccl if backend == "nccl" else _tcp)(rank, file)
    if rank == 0:
        file.write_text(str(SIZE_BYTES[backend] / min(seconds) / 1e9))


def _tcp(rank: int, file: Path) -> list[float]:
    """Send over one connection of the loopback interface, and wait for the other side's answer."""
    store, payload = FileStore(f"{file}-store", 2), bytearray(SIZE_BYTES["tcp"])
    if rank == 1:
        with socket.create_connection(("127.0.0.1", int(store.get("port"))), DEADLINE_S) as channel:
            for _ in range(TIMES):
                arrived = 0
                while arrived < len(payload):
                    count = channel.recv_into(memoryview(payload)[arrived:])
                    assert count, "rank 0 has gone"
                    arrived += count
                channel.sendall(b"!")
        return []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        store.set("port", str(listener.getsockname()[1]))
        channel, seconds = listener.accept()[0], []
        with channel:
            for _ in range(TIMES):
                started_s = time.perf_counter()
                channel.sendall(payload)
                channel.recv(1)
                seconds.append(time.perf_counter() - started_s)
    return seconds


def _nccl(rank: int, file: Path) -> list[float]:
    """Broadcast from the first GPU to the last one."""
    index = 0 if rank == 0 else torch.cuda.device_count() - 1
    torch.cuda.set_device(index)
    store = FileStore(f"{file}-store", 2)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timeout)
    payload = torch.zeros(SIZE_BYTES["nccl"], dtype=torch.uint8, device=f"cuda:{index}")
    seconds = []
    for _ in range(TIMES):
        dist.barrier()
        started_s = time.perf_counter()
        dist.broadcast(payload, src=0)
        torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - started_s)
    dist.destroy_process_group()
    return seconds


if __name__ == "__main__":
    main()
