"""The frame: what every process of a run may send to another, and the checks before a byte of it is believed.

    header, 40 bytes little-endian:
            magic 8s | wire version u16 | kind u16 | meta bytes u32 | body bytes u64 | checksum 16s
    body:   the tensors, raw little-endian, one after the other, wider items first (so that all are aligned)
    meta:   one MessagePack map, with the table of tensors under "arrays"

The checksum is a keyed BLAKE2b over everything else. No pickle, no object that a sender can choose the type
of. Rules: a field is only added, with a default; a changed meaning is a new WIRE_VERSION.
"""

import hashlib
import hmac
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError, WireVersionError

WIRE_VERSION = 1
MAGIC = b"ASYNCRL\0"
# What may cross, by name.
DTYPES = {
    name: np.dtype(name).newbyteorder("<") for name in ("float64", "int64", "float32", "int32", "uint8")
}
NESTING = 8

C = TypeVar("C", list[Any], dict[Any, Any])

_FIELDS = struct.Struct("<8sHHIQ")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds on what a decoder allocates for one kind of frame."""

    kind: int
    meta_bytes: int
    body_bytes: int
    items: int
    """Entries of one list or map in the meta; of all of them together `NESTING` times as many."""
    text_bytes: int
    binary_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A checked frame. The arrays are read-only views into the received bytes."""

    meta: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def encode_frame(
    limits: Limits, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], *, key: bytes = b""
) -> bytes:
    """One frame. Raises WireError when it would break `limits`, so that no peer is sent what it must
    refuse."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    table = [[name, array.dtype.name, len(array)] for name, array in ordered]
    packed: bytes = msgpack.packb({**meta, "arrays": table})
    body = b"".join(array.astype(_dtype(array.dtype.name), copy=False).tobytes() for _, array in ordered)
    _check_sizes(limits, len(packed), len(body))
    _unpack(limits, packed)
    fields = _FIELDS.pack(MAGIC, WIRE_VERSION, limits.kind, len(packed), len(body))
    return b"".join((fields, _checksum(key, fields, body, packed), body, packed))


def decode_frame(limits: Limits, data: bytes | bytearray, *, key: bytes | None = b"") -> Frame:
    """The inverse of `encode_frame`. Raises WireError, or WireVersionError for a peer of another release.

    `key` is None where the checksum of the same bytes has been verified already.
    """
    body_bytes = _check_header(limits, data)
    view = memoryview(data)
    fields, claimed = view[: _FIELDS.size], view[_FIELDS.size : HEADER_BYTES]
    body, packed = view[HEADER_BYTES : HEADER_BYTES + body_bytes], view[HEADER_BYTES + body_bytes :]
    if key is not None and not hmac.compare_digest(_checksum(key, fields, body, packed), claimed):
        raise WireError(
            f"{len(data)}-byte frame fails its checksum: it was changed on the way, or made with another "
            "run's key"
        )
    meta = _unpack(limits, bytes(packed))
    return Frame(meta=meta, arrays=_arrays(meta.pop("arrays", None), body))


def _check_header(limits: Limits, data: bytes | bytearray) -> int:
    """How many bytes of tensors follow."""
    if len(data) < HEADER_BYTES:
        raise WireError(f"{len(data)} bytes are no frame; the header alone has {HEADER_BYTES}")
    magic, version, kind, meta_bytes, body_bytes = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"the bytes begin with {magic!r}, a frame begins with {MAGIC!r}")
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"the peer speaks wire version {version}, this process speaks {WIRE_VERSION}; "
            "run learner and generators from the same asyncrl release"
        )
    if kind != limits.kind:
        raise WireError(f"frame of kind {kind} where kind {limits.kind} is expected")
    _check_sizes(limits, meta_bytes, body_bytes)
    if len(data) != HEADER_BYTES + meta_bytes + body_bytes:
        raise WireError(
            f"frame of {len(data)} bytes, but its header says {HEADER_BYTES} + {meta_bytes} + {body_bytes}"
        )
    return int(body_bytes)


def _check_sizes(limits: Limits, meta_bytes: int, body_bytes: int) -> None:
    if meta_bytes > limits.meta_bytes or body_bytes > limits.body_bytes:
        raise WireError(
            f"frame with {meta_bytes} bytes of meta and {body_bytes} of tensors; "
            f"at most {limits.meta_bytes} and {limits.body_bytes} are allowed"
        )


def _checksum(key: bytes, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


@dataclass(slots=True)
class _Budget:
    """Entries that may still be unpacked: an empty list is one byte on the wire and sixty in memory."""

    left: int

    def spend(self, container: C) -> C:
        self.left -= 1 + len(container)
        if self.left < 0:
            raise ValueError("too many entries in all lists and maps together")
        return container


def _unpack(limits: Limits, packed: bytes) -> dict[str, Any]:
    budget = _Budget(NESTING * limits.items)
    try:
        meta = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            max_array_len=limits.items,
            max_map_len=limits.items,
            max_str_len=limits.text_bytes,
            max_bin_len=limits.binary_bytes,
            max_ext_len=0,
            list_hook=budget.spend,
            object_hook=budget.spend,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(
            f"{len(packed)} bytes of meta are not what a frame may carry: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(meta, dict):
        raise WireError(f"the meta is a {type(meta).__name__}; a map is needed")
    return meta


def _arrays(table: Any, body: memoryview) -> dict[str, NDArray[Any]]:
    """Views into `body`; every count is checked before anything is made of it."""
    if not isinstance(table, list):
        raise WireError(f"the table of tensors is a {type(table).__name__}; a list is needed")
    arrays: dict[str, NDArray[Any]] = {}
    offset = 0
    for entry in table:
        name, dtype, count = _entry(entry)
        end = offset + count * dtype.itemsize
        if name in arrays or offset % dtype.itemsize or end > len(body):
            raise WireError(
                f"tensor {name!r} ({count} x {dtype}) at byte {offset} is repeated, unaligned, or past the "
                f"{len(body)}"
            )
        arrays[name] = np.frombuffer(body, dtype=dtype, count=count, offset=offset)
        offset = end
    if offset != len(body):
        raise WireError(f"the tensors fill {offset} of {len(body)} bytes")
    return arrays


def _entry(entry: Any) -> tuple[str, np.dtype[Any], int]:
    match entry:
        case [str(name), str(dtype), int(count)] if count >= 0 and not isinstance(count, bool):
            return name, _dtype(dtype), count
    raise WireError(f"entry {reprlib.repr(entry)} of the table of tensors is not [name, dtype, count]")


def _dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise WireError(f"tensor of dtype {name[:32]!r}; allowed are {', '.join(DTYPES)}")
    return DTYPES[name]
