"""A Redis server in one object: the commands that the client and functions.lua use, and the functions in real
Lua 5.1.

Replies and refusals are those of Redis 7 (types, integer parsing, the "-0" that HINCRBY refuses, OOM with and
without `allow-oom`, a transaction whose second command fails and whose first one stays done). Nothing is
checked for speed.
"""

import fnmatch
import functools
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import lupa.lua51 as lupa
from redis.exceptions import OutOfMemoryError, ResponseError

from .violation import Violation

Reply = Any
Request = tuple[Any, ...]
"""A command's name and its arguments."""

OOM = "OOM command not allowed when used memory > 'maxmemory'."


class SortedSet(dict[bytes, float]):
    """member -> score"""

    def ascending(self) -> list[bytes]:
        return sorted(self, key=lambda member: (self[member], member))


class Data:
    """Keys and values, and the commands on them.

    A value is never changed, only replaced by another one: whoever keeps it has the value of that moment, and
    as long as the key has the same object nothing has happened to it.
    """

    def __init__(self) -> None:
        self.keys: dict[bytes, Any] = {}

    def copy(self) -> "Data":
        other = Data()
        other.keys = dict(self.keys)
        return other

    def look(self, key: bytes, kind: type) -> Any:
        """The value, an empty one when there is none."""
        value = self.keys.get(key)
        if value is None:
            return kind()
        if type(value) is not kind:
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def copy_of(self, key: bytes, kind: type) -> Any:
        """The value, to be changed and stored."""
        return kind(self.look(key, kind))

    def store(self, key: bytes, value: Any) -> None:
        """Redis knows no empty values, and an equal one is no change."""
        if not value:
            self.keys.pop(key, None)
        elif value != self.keys.get(key):
            self.keys[key] = value

    def command(self, name: str, *arguments: bytes) -> Reply:
        if name not in COMMANDS:
            raise ResponseError(f"ERR unknown command '{name}'")
        return COMMANDS[name](self, *arguments)

    # -- hashes

    def _hget(self, key: bytes, name: bytes) -> Reply:
        return self.look(key, dict).get(name)

    def _hmget(self, key: bytes, *names: bytes) -> Reply:
        value = self.look(key, dict)
        return [value.get(name) for name in names]

    def _hgetall(self, key: bytes) -> Reply:
        return [part for pair in self.look(key, dict).items() for part in pair]

    def _hkeys(self, key: bytes) -> Reply:
        return list(self.look(key, dict))

    def _hexists(self, key: bytes, name: bytes) -> Reply:
        return int(name in self.look(key, dict))

    def _hstrlen(self, key: bytes, name: bytes) -> Reply:
        return len(self.look(key, dict).get(name, b""))

    def _hset(self, key: bytes, *pairs: bytes) -> Reply:
        value = self.copy_of(key, dict)
        before = len(value)
        value.update(zip(pairs[::2], pairs[1::2], strict=True))
        self.store(key, value)
        return len(value) - before

    def _hsetnx(self, key: bytes, name: bytes, content: bytes) -> Reply:
        return 0 if name in self.look(key, dict) else self._hset(key, name, content)

    def _hincrby(self, key: bytes, name: bytes, by: bytes) -> Reply:
        value = self.copy_of(key, dict)
        result = _integer(value.get(name, b"0")) + _integer(by)
        value[name] = b"%d" % result
        self.store(key, value)
        return result

    def _hdel(self, key: bytes, *names: bytes) -> Reply:
        value = self.copy_of(key, dict)
        removed = sum(value.pop(name, None) is not None for name in names)
        self.store(key, value)
        return removed

    # -- sorted sets and sets

    def _zadd(self, key: bytes, score: bytes, member: bytes) -> Reply:
        value = self.copy_of(key, SortedSet)
        is_new = member not in value
        value[member] = float(score)
        self.store(key, value)
        return int(is_new)

    def _zrem(self, key: bytes, *members: bytes) -> Reply:
        value = self.copy_of(key, SortedSet)
        removed = sum(value.pop(member, None) is not None for member in members)
        self.store(key, value)
        return removed

    def _zscore(self, key: bytes, member: bytes) -> Reply:
        score = self.look(key, SortedSet).get(member)
        return None if score is None else b"%.17g" % score

    def _zcard(self, key: bytes) -> Reply:
        return len(self.look(key, SortedSet))

    def _zrange(self, key: bytes, first: bytes, last: bytes, withscores: bytes = b"") -> Reply:
        value = self.look(key, SortedSet)
        found = value.ascending()[_span(first, last)]
        return (
            [part for member in found for part in (member, b"%.17g" % value[member])] if withscores else found
        )

    def _zremrangebyrank(self, key: bytes, first: bytes, last: bytes) -> Reply:
        return self._zrem(key, *self._zrange(key, first, last))

    def _zrangebyscore(self, key: bytes, low: bytes, high: bytes, *limit: bytes) -> Reply:
        value = self.look(key, SortedSet)
        found = [member for member in value.ascending() if float(low) <= value[member] <= float(high)]
        if limit:
            start, count = _integer(limit[1]), _integer(limit[2])
            found = found[start : start + count] if count >= 0 else found[start:]
        return found

    def _sadd(self, key: bytes, *members: bytes) -> Reply:
        value = self.copy_of(key, set)
        before = len(value)
        value.update(members)
        self.store(key, value)
        return len(value) - before

    def _srem(self, key: bytes, *members: bytes) -> Reply:
        value = self.copy_of(key, set)
        before = len(value)
        value.difference_update(members)
        self.store(key, value)
        return before - len(value)

    def _sismember(self, key: bytes, member: bytes) -> Reply:
        return int(member in self.look(key, set))

    def _scard(self, key: bytes) -> Reply:
        return len(self.look(key, set))

    # -- lists and keys

    def _lpush(self, key: bytes, *values: bytes) -> Reply:
        value = self.copy_of(key, list)
        for one in values:
            value.insert(0, one)
        self.store(key, value)
        return len(value)

    def _lrange(self, key: bytes, first: bytes, last: bytes) -> Reply:
        return self.look(key, list)[_span(first, last)]

    def _ltrim(self, key: bytes, first: bytes, last: bytes) -> Reply:
        value = self.copy_of(key, list)
        value[:] = value[_span(first, last)]
        self.store(key, value)
        return b"OK"

    def _del(self, *keys: bytes) -> Reply:
        return sum(self.keys.pop(key, None) is not None for key in keys)

    def _unlink(self, *keys: bytes) -> Reply:
        return self._del(*keys)

    def _keys(self, pattern: bytes) -> Reply:
        return sorted(key for key in self.keys if fnmatch.fnmatchcase(key.decode(), pattern.decode()))


COMMANDS: dict[str, Callable[..., Reply]] = {
    name.removeprefix("_").upper(): body
    for name, body in vars(Data).items()
    if name.startswith("_") and name[1] != "_"
}


def _integer(text: bytes) -> int:
    number = int(text)
    if b"%d" % number != text:
        raise ResponseError("ERR value is not an integer or out of range")
    return number


def _span(first: bytes, last: bytes) -> slice:
    end = _integer(last)
    return slice(_integer(first), None if end == -1 else end + 1)


SHIM = """
local commands = ...
local type, select, format = type, select, string.format

local function texts(count, first, ...)
  if count == 0 then return end
  local kind = type(first)
  if kind == 'number' then first = format('%.17g', first)
  elseif kind ~= 'string' then error('Lua redis lib command arguments must be strings or integers') end
  return first, texts(count - 1, ...)
end

redis = {sha1hex = python_sha1hex}
function redis.call(name, ...)
  local reply = commands[name](texts(select('#', ...), ...))
  if reply == nil then return false end
  return reply
end
function redis.pcall(...)
  local went_well, reply = pcall(redis.call, ...)
  if went_well then return reply end
  return {err = tostring(reply)}
end
function redis.register_function(described) python_register(described) end
"""


@dataclass(frozen=True, slots=True)
class Function:
    body: Any
    flags: frozenset[str]


class Interpreter:
    """Lua 5.1 with Redis' `redis`; compiled libraries are kept, for many stores of many simulations."""

    def __init__(self) -> None:
        self._lua = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=False)
        self._libraries: dict[bytes, dict[str, Function]] = {}
        self._found: dict[str, Function] = {}
        self._data = Data()
        self._clock: Callable[[], float] = lambda: 0.0
        table = self._lua.globals()
        table[b"python_sha1hex"] = lambda text: hashlib.sha1(text).hexdigest().encode()
        table[b"python_register"] = self._register
        commands = {name.encode(): self._command(body) for name, body in COMMANDS.items()}
        self._lua.execute(
            SHIM.encode(), self._lua.table_from(commands | {b"TIME": self._command(self._time)})
        )

    def library(self, source: bytes) -> dict[str, Function]:
        """The functions that a library registers."""
        if source not in self._libraries:
            shebang, _, code = source.partition(b"\n")
            if not shebang.startswith(b"#!lua name="):
                raise ResponseError("ERR Missing library metadata")
            self._found = {}
            self._lua.execute(code)
            self._libraries[source] = self._found
        return self._libraries[source]

    def run(
        self,
        function: Function,
        keys: tuple[bytes, ...],
        arguments: tuple[bytes, ...],
        data: Data,
        clock: Any,
    ) -> Reply:
        self._data, self._clock = data, clock
        table = self._lua.table_from
        return self._to_reply(function.body(table(keys), table(arguments)))

    def _register(self, described: Any) -> None:
        flags = frozenset(flag.decode() for flag in described[b"flags"].values())
        self._found[described[b"function_name"].decode()] = Function(described[b"callback"], flags)

    def _command(self, body: Callable[..., Reply]) -> Callable[..., Any]:
        """As Lua calls it: each on its own, for a function calls many."""

        def command(*arguments: bytes) -> Any:
            reply = body(self._data, *arguments)
            if isinstance(reply, list):
                return self._lua.table_from([False if part is None else part for part in reply])
            return reply

        return command

    def _time(self, data: Data) -> Reply:
        microseconds = round(self._clock() * 1e6)
        return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]

    def _to_reply(self, value: Any) -> Reply:
        if value is None or value is False:
            return None
        if isinstance(value, bytes):
            return value
        if isinstance(value, int | float):
            return int(value)
        parts, i = [], 1
        while (part := value[i]) is not None:
            parts.append(self._to_reply(part))
            i += 1
        return parts


INTERPRETER = Interpreter()


Snapshot = tuple[Data, dict[str, Function], set[tuple[bytes, int]]]


@dataclass(slots=True)
class VirtualStore:
    """The server. `after` hears of each function and UNLINK: (first key, name, arguments, reply)."""

    clock: Callable[[], float]
    after: Callable[[bytes, str, tuple[bytes, ...], Reply], None] = lambda key, name, arguments, reply: None
    data: Data = field(default_factory=Data)
    libraries: dict[str, Function] = field(default_factory=dict)
    strays: set[tuple[bytes, int]] = field(default_factory=set)
    """(key, id) of each frame that was stored by a transaction that then found no functions."""
    out_of_memory: bool = False
    calls: int = 0

    @property
    def now_ms(self) -> int:
        return round(self.clock() * 1e6) // 1000

    def snapshot(self) -> Snapshot:
        """What is on its disk when everything so far is."""
        return self.data.copy(), dict(self.libraries), set(self.strays)

    def restore(self, snapshot: Snapshot, *, lanes: Collection[str] | None = None) -> None:
        """Go back, or with `lanes` only with these: they are on another node."""
        data, libraries, strays = snapshot
        data = data.copy()
        if lanes is not None:
            kept = {key: value for key, value in self.data.keys.items() if not _is_in(key, lanes)}
            data.keys = {key: value for key, value in data.keys.items() if _is_in(key, lanes)} | kept
            strays = {one for one in strays if _is_in(one[0], lanes)} | {
                one for one in self.strays if not _is_in(one[0], lanes)
            }
            libraries = self.libraries
        self.data, self.libraries, self.strays = data, dict(libraries), set(strays)

    def strays_of(self, lane: str) -> set[int]:
        return {ticket_id for key, ticket_id in self.strays if lane_of(key) == lane}

    def forget_strays(self, lane: str) -> None:
        self.strays = {one for one in self.strays if lane_of(one[0]) != lane}

    def execute(self, requests: tuple[Request, ...]) -> list[Reply]:
        """Replies to one command, or to a transaction. A refusal is a reply."""
        if self.out_of_memory and any(name in ("HSETNX", "HSET") for name, *_ in requests):
            return [
                OutOfMemoryError(OOM)
                if len(requests) == 1
                else ResponseError(f"Transaction discarded because of: {OOM}")
            ]
        replies: list[Reply] = []
        for name, *arguments in requests:
            try:
                replies.append(self._one(name, [_encoded(argument) for argument in arguments]))
            except ResponseError as refusal:
                replies.append(refusal)
        if requests[0][0] == "HSETNX" and len(requests) == 2 and isinstance(replies[1], ResponseError):
            self.strays.add((requests[0][1].encode(), int(requests[0][2])))
        return replies

    def _one(self, name: str, arguments: list[bytes]) -> Reply:
        self.calls += 1
        if name == "FCALL":
            return self._fcall(arguments[0].decode(), int(arguments[1]), arguments[2:])
        if name == "FUNCTION LOAD":
            self.libraries.update(INTERPRETER.library(arguments[0]))
            return b"ok"
        reply = self.data.command(name, *arguments)
        if name == "UNLINK":
            self.forget_strays(lane_of(arguments[0]))
            self.after(arguments[0], "unlink", tuple(arguments), reply)
        return reply

    def _fcall(self, name: str, count: int, rest: list[bytes]) -> Reply:
        function, keys, arguments = self.libraries.get(name), tuple(rest[:count]), tuple(rest[count:])
        if function is None:
            raise ResponseError("ERR Function not found")
        if self.out_of_memory and not function.flags & {"allow-oom", "no-writes"}:
            self.after(keys[0], function_name(name), arguments, OOM)
            raise OutOfMemoryError(OOM)
        try:
            reply = INTERPRETER.run(function, keys, arguments, self.data, self.clock)
        except lupa.LuaError as error:
            raise Violation(f"{name} failed half-way: {error}") from error
        self.after(keys[0], function_name(name), arguments, reply)
        return reply


def lane_of(key: bytes) -> str:
    """The name of the lane that a key belongs to: {run:LANE}:place."""
    return key[key.index(b":") + 1 : key.index(b"}")].decode()


def _is_in(key: bytes, lanes: Collection[str]) -> bool:
    return key.startswith(b"{") and lane_of(key) in lanes


@functools.cache
def function_name(registered: str) -> str:
    """Without the library's digest."""
    return registered.split("_", 2)[2]


def _encoded(value: object) -> bytes:
    """As redis-py sends it."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int) and not isinstance(value, bool):
        return b"%d" % value
    raise Violation(f"redis-py would refuse an argument of type {type(value).__name__}: {value!r}")
