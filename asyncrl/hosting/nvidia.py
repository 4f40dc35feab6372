"""What nvidia-smi tells about GPUs: their names, memory and faults, instances of MIG, and peers."""

import csv
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from asyncrl.errors import DataError
from asyncrl.hosting.gpus import INSTANCE, count_gpus, visible_devices
from asyncrl.hosting.smi import SMI, UNKNOWN_FIELD, ask

MIB, GIB = 1 << 20, 1 << 30
NEEDED = ("index", "uuid", "pci.bus_id", "name", "driver_version", "memory.total", "memory.used")
# An old driver may not know these.
OPTIONAL = (
    *("mig.mode.current", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending"),
    "compute_cap",
)
FIELDS = (*NEEDED, *OPTIONAL)
# How nvidia-smi prints what a GPU does not have, or does not show in a container, without its brackets.
ABSENT = ("N/A", "Not Supported", "Insufficient Permissions")
# Of the size in an instance's name, which is rounded up: an instance 1g.5gb of an A100 has 4.75 GiB.
MIG_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A row of nvidia-smi, or an instance of a GPU that MIG divides."""

    name: str  # as in messages: `GPU 0 (NVIDIA H100 80GB HBM3)`
    uuid: str
    index: int
    bus: str  # domain, bus and device, as the kernel's log writes them: 0000:3b:00
    driver: str
    total_bytes: int  # 0 if it has no memory of its own
    used_bytes: int
    ecc_errors: int  # that could not be corrected, since the driver was loaded
    is_divided: bool = False  # by MIG
    is_worn: bool = False  # waits for a reset to replace faulty memory
    capability: tuple[int, ...] = ()  # of its cores, such as 9 and 0; empty if it is not known
    unknown: tuple[str, ...] = ()  # fields of nvidia-smi that the driver is too old for


def visible_gpus() -> tuple[Gpu, ...]:
    """Ask for the GPUs that this process may use, without fields that the driver does not know.

    Raises DataError.
    """
    names, fields = visible_devices(range(count_gpus())).split(","), list(FIELDS)
    gpus: tuple[Gpu, ...] | None = None
    while gpus is None:
        try:
            gpus = read_gpus(ask(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"), fields)
        except DataError as error:
            unknown = re.search(UNKNOWN_FIELD, str(error))
            if unknown is None or unknown[1] not in OPTIONAL or unknown[1] not in fields:
                raise
            fields.remove(unknown[1])
    instances = read_instances(ask("-L"), gpus) if any(name.startswith(INSTANCE) for name in names) else ()
    return choose(names, gpus, instances)


def peer_reads(readers: Collection[int], source: int) -> dict[int, bool | None]:
    """Return which of our GPUs can read the memory of another one; None if nvidia-smi does not say."""
    try:
        gpus, peers = visible_gpus(), read_peers(ask("topo", "-p2p", "r"))
    except DataError:
        return dict.fromkeys(readers)

    def can_read(reader: int) -> bool | None:
        one, other = gpus[reader], gpus[source]
        if one.uuid == other.uuid:
            return True
        if INSTANCE in one.uuid + other.uuid:  # CUDA lets no instance read another one
            return False
        found = peers.get((one.index, other.index))
        return None if found is None else found == "OK"

    return {reader: can_read(reader) for reader in readers}


def read_peers(matrix: str) -> dict[tuple[int, int], str]:
    """Read what `topo -p2p r` prints for each pair of GPUs: OK, or why one cannot read the other."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    heads = next((row for row in rows if row and all(cell.startswith("GPU") for cell in row)), [])
    return {
        (int(row[0][3:]), int(head[3:])): cell
        for row in rows
        if len(row) == len(heads) + 1 and row[0] in heads
        for head, cell in zip(heads, row[1:], strict=True)
    }


def read_gpus(text: str, fields: Sequence[str] = FIELDS) -> tuple[Gpu, ...]:
    """Read the rows that `--query-gpu` prints for `fields`. Raises DataError for a GPU that is lost."""
    gpus, unknown = [], tuple(field for field in OPTIONAL if field not in fields)
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        row = dict(zip(fields, cells, strict=False))
        name = f"GPU {row['index']} ({row.get('name', '')})"
        try:
            sizes = [row[field].strip("[]") for field in ("memory.total", "memory.used")]
            total_mib, used_mib = (0 if size in ABSENT else int(size) for size in sizes)
        except (KeyError, ValueError) as error:
            found = f"{name}: {SMI} shows no memory ({', '.join(cells)})"
            raise DataError(f"{found}; reset the GPU, or choose others with CUDA_VISIBLE_DEVICES") from error
        errors = row.get("ecc.errors.uncorrected.volatile.total", "")
        capability = re.fullmatch(r"(\d+)\.(\d+)", row.get("compute_cap", ""))
        gpus.append(
            Gpu(
                name=name,
                uuid=row["uuid"],
                index=int(row["index"]),
                bus=short_bus(row["pci.bus_id"]),
                driver=row["driver_version"],
                total_bytes=total_mib * MIB,
                used_bytes=used_mib * MIB,
                ecc_errors=int(errors) if errors.isdecimal() else 0,
                is_divided=row.get("mig.mode.current") == "Enabled",
                is_worn=row.get("remapped_rows.pending") in ("1", "Yes"),
                capability=tuple(map(int, capability.groups())) if capability else (),
                unknown=unknown,
            )
        )
    return tuple(gpus)


def short_bus(bus: str) -> str:
    """Return `0000:3b:00` for `00000000:3B:00.0`, which nvidia-smi writes."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def read_instances(listing: str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Read the instances that `nvidia-smi -L` lists below each GPU that MIG divides."""
    found, owner = [], None
    for line in listing.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            owner = next((gpu for gpu in gpus if gpu.index == int(match[1])), None)
        elif owner and (match := re.search(r"MIG (\S*?(\d+)gb\S*)\s.*UUID: (MIG-[^)]+)\)", line)):
            found.append(
                replace(
                    owner,
                    name=f"{owner.name}, instance {match[1]}",
                    uuid=match[3],
                    total_bytes=int(int(match[2]) * GIB * MIG_SHARE),
                    used_bytes=0,
                    is_divided=False,
                )
            )
    return tuple(found)


def choose(names: Sequence[str], gpus: Sequence[Gpu], instances: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs of these names: indices, or the beginnings of UUIDs. Raises DataError."""
    chosen = []
    for name in names:
        matching = [gpu for gpu in gpus if name == str(gpu.index)]
        matching += [gpu for gpu in (*gpus, *instances) if gpu.uuid.startswith(name)]
        if not matching:
            shown = ", ".join(gpu.uuid for gpu in (*gpus, *instances)) or "none"
            raise DataError(
                f"CUDA_VISIBLE_DEVICES names {name}, but {SMI} shows {len(gpus)} GPUs ({shown}); correct it"
            )
        if matching[0].is_divided:
            found = f"{matching[0].name} is divided by MIG, and a process can use one instance of it"
            raise DataError(f"{found}; name Device 0 of a GPU in CUDA_VISIBLE_DEVICES (see `nvidia-smi -L`)")
        chosen.append(matching[0])
    return tuple(chosen)
