"""A generator's part of an order while requests run: refuse paths, fetch from the network, verify.

    slot in host memory or a file    verified
    tcp, nccl                        fetched and verified once for this host; the order then names that slot
    slot on a GPU                    left to the engine, which verifies before it loads

So requests wait only for the loading, not for the network, and a failed transfer leaves the weights in use
unchanged. The memory holds one copy for all workers of this host, and is reused for the next version.
"""

import time
from dataclasses import replace
from pathlib import Path

from asyncrl.errors import TransferError
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.layout import Layout, verify
from asyncrl.weights.relay import OPEN_FILE, Relay
from asyncrl.weights.slots import open_slot


class HostStaging:
    """Implements `weights.base.Staging`."""

    def __init__(self, files: Path) -> None:
        """Orders may come from another host, so the paths in them must be below the directory `files`."""
        self._files, self._relay = files.resolve(), Relay()

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        until_s = time.monotonic() + order.deadline_s
        self._refuse_other_files(order)
        if order.details.get("slot", {}).get("exported") is not None:
            return order
        layout = Layout.from_plain(order.details["layout"])
        sums = order.details["checksums"]
        if order.transport in ("tcp", "nccl"):
            slot = self._relay.bring(order.transport, order.details["source"], layout, sums, until_s=until_s)
            return replace(order, transport="slot", details={**order.details, "slot": slot})
        verify(open_slot(order.details["slot"], layout.total_bytes, keep=True).buffer, layout, sums)
        return order

    def close(self) -> None:
        self._relay.close()

    def _refuse_other_files(self, order: UpdateOrder) -> None:
        path = order.details.get("slot", {}).get("path")
        if order.transport == "slot" and not OPEN_FILE.fullmatch(str(path)):
            raise TransferError(
                f"weights: an order names {path}; a slot is an open file of a process, /proc/PID/fd/N"
            )
        if order.transport == "disk" and not Path(str(path)).resolve().is_relative_to(self._files):
            raise TransferError(
                f"weights: an order names {path}, but a generator uses nothing outside {self._files}; start "
                "`asyncrl generator` in the learner's working directory, or set an absolute run.root or a "
                "control.bind, with which weights need no common files"
            )
