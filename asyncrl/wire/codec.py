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

import contextlib
import hashlib
import hmac
import math
import reprlib
import struct
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

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

Arrays = dict[str, NDArray[Any]]


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


def encode_frame(limits: Limits, meta: Mapping[str, Any], arrays: Arrays, *, key: bytes = b"") -> bytes:
    """Return one frame. Raises WireError if the receiver would refuse it, or MessagePack cannot hold it."""
    for name, array in arrays.items():
        if array.dtype not in _NAMES or not _is_shape(array.shape):
            raise WireError(
                f"tensor {name} of dtype {array.dtype} and shape {array.shape}; allowed are "
                f"{', '.join(DTYPES)} and 1 to {MOST_AXES} axes"
            )
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    table = [[name, _NAMES[array.dtype], *array.shape] for name, array in ordered]
    try:
        packed: bytes = msgpack.packb({**meta, "arrays": table})
    except (ValueError, TypeError, OverflowError) as error:  # for example, half of a surrogate pair
        raise WireError(f"the meta cannot be packed: {type(error).__name__}: {error}") from error
    body = b"".join(array.tobytes() for _, array in ordered)
    _check_sizes(limits, len(packed), len(body))
    _unpack(limits, packed)
    fields = _FIELDS.pack(MAGIC, WIRE_VERSION, limits.kind, len(packed), len(body))
    return b"".join((fields, _checksum(key, fields, body, packed), body, packed))


def decode_frame(
    limits: Limits, data: bytes | bytearray, *, key: bytes | None = b""
) -> tuple[dict[str, Any], Arrays]:
    """The inverse of `encode_frame`: the meta, and the arrays as read-only views into the received bytes.

    `key=None` skips the checksum, for bytes that have passed it before. Raises WireError, or WireVersionError
    for a peer of another release.
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
    return meta, _arrays(meta.pop("arrays", None), body)


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


def _arrays(table: Any, body: memoryview) -> Arrays:
    """Return views into `body`. Every size is checked before it is used."""
    if not isinstance(table, list):
        raise WireError(f"the table of tensors is a {type(table).__name__}; a list is needed")
    arrays: Arrays = {}
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


def _is_shape(sizes: Sequence[Any]) -> bool:
    return 1 <= len(sizes) <= MOST_AXES and all(
        type(size) is int and 0 <= size <= MOST_SIZE for size in sizes
    )


Message = TypeVar("Message")
# Lists are long enough for one entry per parameter of a large model, bytes for one bit per row of 33 million.
# The socket bounds the whole message before it is read, that of the learner to 32 KiB.
MESSAGE_LIMITS = Limits(
    kind=2, meta_bytes=1 << 23, body_bytes=0, items=1 << 16, text_bytes=1 << 16, binary_bytes=1 << 22
)
_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
MAX_DEPTH = 16
# Integers up to this one are the same in Python, MessagePack, JSON and Lua.
LARGEST_INT = 2**53


class MessageCodec(Generic[Message]):
    """Turns instances of the given dataclasses into frames and back. Every field must fit its annotation.

    Annotations may use bool, int, float, str, bytes, None, unions, tuple[X, ...], list[X], Mapping or
    dict[str, X], Any (plain values) and the given dataclasses; floats are finite. A message of the same wire
    version may lack fields that have a default.
    """

    def __init__(self, types: tuple[type[Message], ...], *, any_number: bool = False) -> None:
        """Accept floats that are not finite and integers without a bound only if `any_number`."""
        self._any_number = any_number
        self._types = {kind.__name__: kind for kind in types}
        self._hints: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in types}

    def encode(self, message: Message, key: bytes = b"") -> bytes:
        """Return one frame. Raises WireError if a value does not have the type of its field."""
        return encode_frame(MESSAGE_LIMITS, {"message": self._tagged(message)}, {}, key=key)

    def decode(self, data: bytes, key: bytes = b"") -> Message:
        """Return an instance of one of the types. Raises WireError."""
        meta, _ = decode_frame(MESSAGE_LIMITS, data, key=key)
        message: Message = self._message(meta.get("message"))
        return message

    def _tagged(self, message: Any) -> dict[str, Any]:
        kind = type(message)
        if kind not in self._hints:
            raise WireError(f"a {kind.__name__} cannot be sent; known messages are {', '.join(self._types)}")
        values = {field.name: self._lower(getattr(message, field.name)) for field in fields(kind)}
        tagged = {"type": kind.__name__, "fields": values}
        self._message(tagged)
        return tagged

    def _lower(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise WireError(f"a message nests deeper than {MAX_DEPTH}")
        if is_dataclass(value):
            return self._tagged(value)
        if isinstance(value, Mapping):
            return {name: self._lower(item, depth + 1) for name, item in value.items()}
        if isinstance(value, tuple | list):
            return [self._lower(item, depth + 1) for item in value]
        return value

    def _message(self, tagged: Any) -> Any:
        match tagged:
            case {"type": str(name), "fields": dict(values)} if len(tagged) == 2 and name in self._types:
                return self.made(self._types[name], values)
            case _:
                raise WireError(
                    f"not a message: {reprlib.repr(tagged)}; known messages are {', '.join(self._types)}"
                )

    def made(self, kind: type[Message], values: Mapping[str, Any]) -> Message:
        """Return an instance of one of the types with these fields. Raises WireError."""
        name, hints = kind.__name__, self._hints[kind]
        unknown = values.keys() - hints.keys()
        if unknown:
            raise WireError(
                f"{name} has unknown fields {sorted(map(str, unknown))}; it has {', '.join(hints)}"
            )
        try:
            return kind(**{k: self._lift(v, hints[k], f"{name}.{k}") for k, v in values.items()})
        except (TypeError, ValueError) as error:
            raise WireError(f"{name} cannot be made from these fields: {error}") from error

    def _lift(self, value: Any, hint: Any, where: str) -> Any:
        if hint is float and type(value) in (int, float):
            return self._finite(float(value), hint, where)
        if hint in _PLAIN and type(value) is hint:
            if hint is int and abs(value) > LARGEST_INT and not self._any_number:
                raise WireError(f"{where} is {value}; an integer of at most ±{LARGEST_INT} is needed")
            return value
        if hint is Any:
            return self._plain(value, where)
        if hint in self._hints:
            lifted = self._message(value)
            return lifted if type(lifted) is hint else self._refuse(value, hint, where)
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            for candidate in arguments:
                with contextlib.suppress(WireError):
                    return self._lift(value, candidate, where)
        if origin in (tuple, list) and isinstance(value, list):
            return origin(self._lift(item, arguments[0], where) for item in value)
        if origin in (dict, Mapping) and isinstance(value, dict):
            return {self._lift(k, str, where): self._lift(v, arguments[1], where) for k, v in value.items()}
        return self._refuse(value, hint, where)

    def _plain(self, value: Any, where: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise WireError(f"{where} nests deeper than {MAX_DEPTH}")
        if isinstance(value, list):
            return [self._plain(item, where, depth + 1) for item in value]
        if isinstance(value, dict):
            return {self._lift(k, str, where): self._plain(v, where, depth + 1) for k, v in value.items()}
        if type(value) is float:
            return self._finite(value, float, where)
        return value if type(value) in _PLAIN else self._refuse(value, Any, where)

    def _finite(self, value: float, hint: Any, where: str) -> float:
        return value if self._any_number or math.isfinite(value) else self._refuse(value, hint, where)

    def _refuse(self, value: Any, hint: Any, where: str) -> Any:
        wanted = getattr(hint, "__name__", None) if not get_args(hint) else str(hint)
        finite = "finite " if hint is float else ""
        raise WireError(
            f"{where} is {reprlib.repr(value)} ({type(value).__name__}); a {finite}{wanted or hint} is needed"
        )
