"""The process group of a learner's ranks, and their exchange of bytes: with timeouts, without pickle."""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from asyncrl.config.schema import Config
from asyncrl.errors import CheckpointError, RunError, lacks_gpu_memory
from asyncrl.hosting.progress import beat
from asyncrl.hosting.route import interface_towards


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The rank of this process and the address of rank 0; the entry point reads them from the environment."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0  # index of this rank's GPU on its host
    address: str = "127.0.0.1"
    port: int = 0  # a free one on rank 0's host; not used by a single rank
    timeout_s: float = 600.0  # of a collective: if a rank is gone, the others end with an error

    @classmethod
    def of(cls, config: Config, environment: Mapping[str, str]) -> Self:
        """Read where the ranks meet from the variables that `launch/ranks.py` or torchrun has set."""
        return cls(
            rank=int(environment.get("RANK", "0")),
            ranks=config.learner.ranks,
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            address=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environment.get("MASTER_PORT") or "0"),
            # Longer than the supervisor's bound, because the supervisor can name the process that hangs.
            timeout_s=config.control.slow_s + config.control.hang_s,
        )


class Ranks:
    """The process group of the learner."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, per_share: int = 1) -> None:
        """Wait for all ranks. Raises RunError if one is missing after `timeout_s` or the port is taken.

        `per_share` consecutive ranks have the same share of every batch.
        """
        self.rank, self.count = rendezvous.rank, rendezvous.ranks
        self.per_share = per_share
        timeout = timedelta(seconds=rendezvous.timeout_s)
        # DeepSpeed makes further groups, which use torch's default timeout of 10 minutes.
        defaults: Any = dist.distributed_c10d
        defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = timeout
        try:
            store = _store(rendezvous, timeout)
            _keep_to_interface(rendezvous.address)
            backend = "nccl" if device.type == "cuda" else "gloo"
            gpu = device if backend == "nccl" else None  # a barrier of NCCL would guess it
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.count, timeout=timeout, device_id=gpu
            )
            # Bytes go over Gloo: ranks that wait in NCCL keep their GPUs busy, which generators may share.
            self._messages = dist.new_group(backend="gloo", timeout=timeout) if self.count > 1 else None
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and lacks_gpu_memory(error):
                raise  # `naming_memory` says what to lower
            found = f"no meeting of {self.count} ranks at {rendezvous.address}:{rendezvous.port}"
            found = f"learner rank {self.rank}: {found} within {rendezvous.timeout_s:g} s ({error})"
            raise RunError(
                f"{found}; check that all ranks run, and that the port is free and reachable"
            ) from error

    def broadcast(self, value: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.count == 1:
            return value or b""
        size = torch.tensor([len(value or b"")])
        dist.broadcast(size, src=0, group=self._messages)
        data = _bytes_tensor(value or b"") if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._messages)
        return data.numpy().tobytes()

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank."""
        if self.count == 1:
            return [value]
        sizes = [torch.tensor([0]) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(value)]), group=self._messages)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(value)] = _bytes_tensor(value)
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded, group=self._messages)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def gather_shares(self, value: bytes) -> list[bytes]:
        """The bytes of the first rank of each share, on every rank."""
        return self.gather(value)[:: self.per_share]


def _store(rendezvous: Rendezvous, timeout: timedelta) -> Store:
    if rendezvous.ranks == 1:
        return HashStore()
    where = (rendezvous.address, rendezvous.port)
    if rendezvous.rank > 0:
        return TCPStore(*where, rendezvous.ranks, is_master=False, timeout=timeout)
    family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
    # Without our own listener torch would listen on every interface.
    listener = socket.create_server(where, family=family).detach()
    return TCPStore(
        *where, rendezvous.ranks, is_master=True, timeout=timeout, master_listen_fd=listener, use_libuv=False
    )


def _keep_to_interface(address: str) -> None:
    """Let Gloo use the interface of the route to `address`; by default it uses that of the host's name."""
    with suppress(OSError):  # no interface has the address from which the route begins
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(address))


def _bytes_tensor(value: bytes) -> Tensor:
    if not value:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


@dataclass(slots=True)
class Writes:
    """The writes of one rank during a save. The others are skipped after the first failure.

    A rank must not end the save early: the others would wait for it in the next collective.
    """

    failure: str = ""  # type and text of the first one

    def attempt(self, write: Callable[[], object]) -> None:
        """Run `write`, unless one has failed already."""
        beat()
        if self.failure:
            return
        try:
            write()
        # torch and safetensors wrap the error of a full disk.
        except (OSError, RuntimeError, SafetensorError) as error:
            self.failure = f"{type(error).__name__}: {error}"

    def conclude(self, directory: Path, ranks: Ranks) -> None:
        """Raise CheckpointError on every rank if a write into `directory` failed on one of them."""
        failures = enumerate(ranks.gather(self.failure.encode()))
        if found := "; ".join(f"rank {rank}: {failure.decode()}" for rank, failure in failures if failure):
            raise CheckpointError(f"{directory} could not be written ({found}); look at the disk under it")
