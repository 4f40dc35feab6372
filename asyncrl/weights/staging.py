"""A generator's part of an order while requests run: refuse paths, verify host memory, receive over Gloo.

    slot in host memory       verified
    sender --Gloo-->          this process's own slot, verified; the order then names it
    slot on a GPU, files      left to the engine, which verifies them while it loads

So requests wait only for the loading, not for the network, and a failed transfer leaves the weights in use
unchanged. The memory holds one copy for all workers of this host, and is reused for the next version.
"""

import time
from dataclasses import replace
from pathlib import Path

from asyncrl.errors import TransferError
from asyncrl.weights import gloo
from asyncrl.weights.base import UpdateOrder
from asyncrl.weights.layout import Layout, verify
from asyncrl.weights.slots import Slot, open_slot


class HostStaging:
    """Implements `weights.base.Staging`."""

    def __init__(self, files: Path) -> None:
        """Orders may come from another host, so the paths in them must be below the directory `files`."""
        self._files = files.resolve()
        self._group: gloo.Group | None = None
        self._slot: Slot | None = None

    def stage(self, order: UpdateOrder) -> UpdateOrder:
        details = order.details
        for directory in (details.get("directory"), details.get("rendezvous", {}).get("directory")):
            if directory is not None and not Path(directory).resolve().is_relative_to(self._files):
                raise TransferError(
                    f"weights: an order names {directory}, but a generator uses nothing outside "
                    f"{self._files}; start `asyncrl generator` in the learner's working directory, or set an "
                    "absolute run.root or a control.bind, with which weights need no common files"
                )
        if order.transport == "slot" and details["slot"]["exported"] is None:
            layout = Layout.from_plain(details["layout"])
            verify(open_slot(details["slot"], layout.total_bytes).buffer, layout, details["checksums"])
        if order.transport != "gloo":
            return order
        layout = Layout.from_plain(details["layout"])
        group, own = self._meet(order), self._memory(layout.total_bytes)
        gloo.receive(group, own.buffer, layout, details["checksums"])
        return replace(order, transport="slot", details={**details, "slot": own.describe()})

    def close(self) -> None:
        self._group = None
        if self._slot is not None:
            self._slot.close()
        self._slot = None

    def _meet(self, order: UpdateOrder) -> gloo.Group:
        """The group of the order. One deadline bounds both opening it and the transfer."""
        ends_at_s = time.monotonic() + order.deadline_s
        rendezvous = order.details["rendezvous"]
        if self._group is None or self._group.name != rendezvous["name"]:
            self._group = None  # frees its sockets first
            self._group = gloo.open_group(rendezvous, rank=1, deadline_s=order.deadline_s)
        self._group.deadline_s = max(ends_at_s - time.monotonic(), 0.001)
        return self._group

    def _memory(self, size_bytes: int) -> Slot:
        if self._slot is not None and len(self._slot.buffer) != size_bytes:
            self._slot.close()
            self._slot = None
        self._slot = self._slot or Slot.create(size_bytes)
        return self._slot
