"""Frames that carry frozen dataclasses of plain values, such as the messages of the control plane."""

import math
import reprlib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from asyncrl.errors import WireError
from asyncrl.wire.codec import Limits, decode_frame, encode_frame

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
        message: Message = self._message(decode_frame(MESSAGE_LIMITS, data, key=key).meta.get("message"))
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
            return self._first(value, arguments, hint, where)
        if origin is tuple and isinstance(value, list):
            return tuple(self._lift(item, arguments[0], where) for item in value)
        if origin is list and isinstance(value, list):
            return [self._lift(item, arguments[0], where) for item in value]
        if origin in (dict, Mapping) and isinstance(value, dict):
            return {self._lift(k, str, where): self._lift(v, arguments[1], where) for k, v in value.items()}
        return self._refuse(value, hint, where)

    def _first(self, value: Any, hints: tuple[Any, ...], hint: Any, where: str) -> Any:
        for candidate in hints:
            try:
                return self._lift(value, candidate, where)
            except WireError:
                continue
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
