"""Frames: the bytes that the processes of a run send each other, and the checks before they are used.

    header, 40 bytes little-endian:
            magic 8s | wire version u16 | kind u16 | meta bytes u32 | body bytes u64 | checksum 16s
    body:   the tensors, raw little-endian, one after the other, wider items first (so that all are aligned)
    meta:   one MessagePack map, with the table of tensors under "arrays": [name, dtype, size, ...] of each

The checksum is a keyed BLAKE2b over everything else. There are no pickles, and a sender cannot choose the
type of an object. A new field has a default, and a new column is optional. Any other change of the format
needs a new WIRE_VERSION, except of a message that is sent after both sides have said that their releases are
the same; frozen frames in the tests show when.

The header has the version of the format, not the release. A learner can thus read the greeting of a generator
of another release, and answers with both releases. After an upgrade, the groups in the store are still read.
"""

import hashlib
import hmac
import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError, WireVersionError
from asyncrl.version import __version__

WIRE_VERSION = 2
MAGIC = b"ASYNCRL\0"
# The allowed data types, by name.
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float64", "int64", "uint64", "float32", "int32", "int16", "uint16", "uint8", "bool")
}
# By numpy's objects, because making their names is slow.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bounds of a tensor's shape.
MOST_AXES, MOST_SIZE = 4, 1 << 31
# A meta has at most this many times `Limits.items` entries in total, as an empty list is one byte in a frame
# and sixty in memory.
NESTING = 8

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
    """Entries of one list or map in the meta."""
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
    """Return one frame. Raises WireError if the receiver would refuse it, or MessagePack cannot hold it."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    table = [_entry(name, array) for name, array in ordered]
    try:
        packed: bytes = msgpack.packb({**meta, "arrays": table})
    except (ValueError, TypeError, OverflowError) as error:  # for example, half of a surrogate pair
        raise WireError(f"the meta cannot be packed: {type(error).__name__}: {error}") from error
    body = b"".join(array.tobytes() for _, array in ordered)
    _check_sizes(limits, len(packed), len(body))
    _unpack(limits, packed)
    fields = _FIELDS.pack(MAGIC, WIRE_VERSION, limits.kind, len(packed), len(body))
    return b"".join((fields, _checksum(key, fields, body, packed), body, packed))


def decode_frame(limits: Limits, data: bytes | bytearray, *, key: bytes | None = b"") -> Frame:
    """The inverse of `encode_frame`. Raises WireError, or WireVersionError for a peer of another release.

    `key=None` skips the checksum, for bytes that have passed it before.
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
    """Return the number of bytes of tensors that follow."""
    if len(data) < HEADER_BYTES:
        raise WireError(f"{len(data)} bytes are not a frame; the header alone has {HEADER_BYTES}")
    magic, version, kind, meta_bytes, body_bytes = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"the bytes begin with {magic!r}, a frame begins with {MAGIC!r}")
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"the frame has wire version {version}, and asyncrl {__version__} reads {WIRE_VERSION}; run "
            "learner and generators from the same asyncrl release"
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


def _unpack(limits: Limits, packed: bytes) -> dict[str, Any]:
    left = NESTING * limits.items

    def spend(container: Any) -> Any:
        nonlocal left
        left -= 1 + len(container)
        if left < 0:
            raise ValueError("too many entries in all lists and maps together")
        return container

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
            list_hook=spend,
            object_hook=spend,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(
            f"{len(packed)} bytes of meta cannot be unpacked: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(meta, dict):
        raise WireError(f"the meta is a {type(meta).__name__}; a map is needed")
    return meta


def _arrays(table: Any, body: memoryview) -> dict[str, NDArray[Any]]:
    """Return views into `body`. Every size is checked before it is used."""
    if not isinstance(table, list):
        raise WireError(f"the table of tensors is a {type(table).__name__}; a list is needed")
    arrays: dict[str, NDArray[Any]] = {}
    offset = 0
    for entry in table:
        match entry:
            case [str(name), str(kind), *shape] if kind in DTYPES and _is_shape(shape):
                dtype = DTYPES[kind]
            case _:
                raise WireError(
                    f"entry {reprlib.repr(entry)} of the table of tensors is not [name, dtype, size, ...] "
                    f"with one of {', '.join(DTYPES)} and 1 to {MOST_AXES} sizes"
                )
        end = offset + math.prod(shape) * dtype.itemsize
        if name in arrays or offset % dtype.itemsize or end > len(body):
            raise WireError(
                f"tensor {name!r} ({shape} of {dtype}) at byte {offset} is repeated, unaligned, or ends "
                f"after the {len(body)} bytes of all tensors"
            )
        if kind == "bool" and (np.frombuffer(body[offset:end], np.uint8) > 1).any():
            raise WireError(f"tensor {name!r} has truth values other than 0 and 1")
        try:
            arrays[name] = np.ndarray(shape, dtype, body, offset)
        except ValueError as error:
            raise WireError(f"tensor {name!r} has the impossible shape {shape}: {error}") from error
        offset = end
    if offset != len(body):
        raise WireError(f"the tensors fill {offset} of {len(body)} bytes")
    return arrays


def _entry(name: str, array: NDArray[Any]) -> list[Any]:
    """Return the entry in the table of tensors."""
    if array.dtype not in _NAMES or not _is_shape(array.shape):
        raise WireError(
            f"tensor {name} of dtype {array.dtype} and shape {array.shape}; allowed are {', '.join(DTYPES)} "
            f"and 1 to {MOST_AXES} axes"
        )
    return [name, _NAMES[array.dtype], *array.shape]


def _is_shape(sizes: Sequence[Any]) -> bool:
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MOST_SIZE:
            return False
    return 1 <= len(sizes) <= MOST_AXES
